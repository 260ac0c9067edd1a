"""Set up before any test: no hub, one thread for each process, one quick python for all."""

import contextlib
import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that asks the hub fails at once
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ["OMP_NUM_THREADS"] = "1"  # processes with several threads stall each other
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # bitsandbytes would import the compiler: 2 s

import pytest
from quick_python import quick_python

UNEXCUSED_SKIPS: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """The process that only waits for those that run the tests imports no torch."""
    if config.option.numprocesses and not hasattr(config, "workerinput"):
        stack = contextlib.ExitStack()
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        python = os.environ["GRPO_TEST_PYTHON"] = str(stack.enter_context(quick_python(folder)))
        config.option.tx = [f"popen//python={python}"] * config.option.numprocesses
        config.add_cleanup(stack.close)
    else:
        gc.disable()  # until all is imported, which is no garbage: a quarter of the time
        config.pluginmanager.import_plugin("harness")
        config.pluginmanager.import_plugin("graphs")


def pytest_runtest_logreport(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and "GRPO_TEST_DATA" not in str(report.longrepr):
        UNEXCUSED_SKIPS.append(report.nodeid)


pytest_collectreport = pytest_runtest_logreport  # a whole module can be skipped too


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test fails the run, unless it lacks real files that users do not have."""
    if os.environ.get("CI") and UNEXCUSED_SKIPS:
        print(f"\nskipped in CI: {', '.join(UNEXCUSED_SKIPS)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.enable()
    if harness := session.config.pluginmanager.get_plugin("harness"):
        harness.forkserver()  # now: a process that has threads cannot be forked


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked vllm need a package that does not fit ours: they run where -m names them."""
    if "vllm" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("vllm")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(autouse=True)
def own_signal_handlers() -> Iterator[None]:
    """A run in this process leaves its signal handlers behind: put back those from before it."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Iterator[Path]:
    """A `python`, with a `torchrun` beside it, that has imported all packages already."""
    if path := os.environ.get("GRPO_TEST_PYTHON"):
        yield Path(path)
    else:  # with -n 0
        with quick_python(tmp_path_factory.mktemp("bin")) as path:
            yield path
