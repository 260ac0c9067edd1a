"""Set up before any test: no hub, one thread for each process, tiny random models as fixtures."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a test that asks the hub fails at once
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
# by default 1: several test processes with several threads stall each other
os.environ["OMP_NUM_THREADS"] = os.environ.get("GRPO_TEST_THREADS", "1")

import pytest
import torch
from harness import NUM_THREADS, SIZES, save_random, tokens_of, train_tokenizer, write_questions
from quick_python import quick_python
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.utils import logging as transformers_logging

torch.set_num_threads(NUM_THREADS)  # as in launcher.py
transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()


UNEXCUSED_SKIPS: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and "GRPO_TEST_DATA" not in str(report.longrepr):
        UNEXCUSED_SKIPS.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skipped test fails the run, unless it lacks real files that users do not have."""
    if os.environ.get("CI") and UNEXCUSED_SKIPS:
        print(f"\nskipped in CI: {', '.join(UNEXCUSED_SKIPS)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked vllm need a package that does not fit ours: they run where -m names them."""
    if "vllm" not in config.option.markexpr:
        items[:] = [item for item in items if item.get_closest_marker("vllm") is None]


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
    with quick_python(tmp_path_factory.mktemp("bin")) as path:
        yield path


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer()


@pytest.fixture(scope="session")
def rotary_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2: rotary positions, grouped key-value heads, separate output embeddings."""
    config = Qwen2Config(
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.2,  # far from uniform, so that a mistake shows
        attention_dropout=0.1,
        tie_word_embeddings=False,
        **SIZES,
        **tokens_of(tokenizer),
    )
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("rotary"))


@pytest.fixture(scope="session")
def absolute_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random GPT-2: learned absolute positions, tied embeddings, dropout in its config."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 1024}
    config = GPT2Config(initializer_range=0.2, **sizes, **tokens_of(tokenizer))
    return save_random(GPT2LMHeadModel, config, tokenizer, tmp_path_factory.mktemp("absolute"))


@pytest.fixture(scope="session")
def teacher_folder(tmp_path_factory, tokenizer) -> Path:
    """A random Qwen2 of another shape, with the same tokens."""
    sizes = SIZES | {"num_hidden_layers": 1, "hidden_size": 48, "num_key_value_heads": 4}
    config = Qwen2Config(initializer_range=0.2, **sizes, **tokens_of(tokenizer))
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> list[str]:
    """Overrides that name questions for the task, which holds some of them out to validate."""
    questions = write_questions(tmp_path_factory.mktemp("questions") / "questions.jsonl")
    return [f"task.train={questions}", f"task.eval={questions}"]


@pytest.fixture(params=["rotary", "absolute"])
def model_folder(request, rotary_model_folder, absolute_model_folder) -> Path:
    """Each of the two models, for what must hold with both kinds of positions."""
    return rotary_model_folder if request.param == "rotary" else absolute_model_folder
