"""The logger: files that survive a kill, a readable terminal, boards that cannot hurt a run."""

import contextlib
import fcntl
import json
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pandas
import pytest
import wandb
from harness import ROOT, read_jsonl
from wandb.proto import wandb_internal_pb2 as pb

import logger
from engine.core.config import LoggingSettings
from engine.report import boards as report_boards
from engine.report.boards import MLFLOW_ENVIRONMENT, MlflowRun, WandbRun, import_mlflow, make_boards
from logger import Logger

pytestmark = pytest.mark.timeout(120)

FILES = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")
SAMPLE = {
    "prompt": "Use the numbers 3 7 25, to make 46.",
    "question": "nums: 3 7 25, target: 46",
    "completion": "<think>25 + 7 * 3</think>\n<answer>25 + 7 * 3</answer>",
    "reward": 1.1,
    "reward_parts": {"format": 1.0, "answer": 1.0},
    "gold": "So\n#### 46",
    "answer": "25+7*3",
    "tokens": 9,
}


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch) -> Iterator[None]:
    """Give each test a folder without .env, and take back what a Logger put into os.environ."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        yield


def start(
    folder: Path,
    *,
    rank: int = 0,
    boards: str | list[str] = "none",
    resume_step: int | None = None,
    is_evaluated: bool = False,
    **shown,
) -> Logger:
    """A logger whose files are open, and the runs of its boards too, if wanted."""
    log = Logger(rank=rank, boards=make_boards(LoggingSettings(report_to=boards)))
    about = {"experiment": "plain-grpo", "run_name": "test", "description": ""}
    about |= {"config_text": "", "params": {}} | shown
    log.open(folder, resume_step=resume_step, is_evaluated=is_evaluated, about=about)
    return log


def log_steps(log: Logger, steps: range) -> None:
    for step in steps:
        log.log_metrics(step, {"train/loss": -0.1 * step, "train/reward": 0.1 * step})
        log.log_samples(step, [SAMPLE])


def logged_steps(folder: Path) -> tuple[list[int], ...]:
    """The steps in metrics.jsonl and samples.jsonl."""
    return tuple([row["step"] for row in read_jsonl(folder / name)] for name in FILES[:2])


# Files


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\xff\n", "is not UTF-8 text"),
        (b"{\n", "is not JSON"),
        (b"9" * 5_000 + b"\n", "is not JSON"),  # a number that Python refuses to read
        (b"[" * 200_000 + b"\n", "is not JSON"),
        (b"7\n", "no object with a step"),
    ],
    ids=["bytes", "brace", "digits", "brackets", "number"],
)
def test_a_damaged_file_of_a_resumed_run_is_named(tmp_path, name, line, problem):
    """The traceback did not say which file it was."""
    log_steps(start(tmp_path), range(2))
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes() + line)
    with pytest.raises(ValueError, match=f"{name}: .*{problem}"):
        start(tmp_path, resume_step=1)


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_closed_terminal_stops_nothing(tmp_path, monkeypatch, closed):
    monkeypatch.setattr(sys, closed, None)
    log = start(tmp_path)
    log.info("hello")
    log.progress(3, "rollout", "seq").update(1)


def test_a_step_is_a_json_line_and_so_is_its_evaluation_which_pandas_reads(tmp_path):
    log = start(tmp_path / "runs/a")
    log.log_metrics(0, {"eval/pass@1": 0.25})
    log.log_metrics(1, {"train/reward": 1 / 3, "train/loss": -2})
    log.log_metrics(2, {"train/loss": -3})
    log.log_metrics(2, {"eval/pass@1": 0.5})
    assert (tmp_path / "runs/a/metrics.jsonl").read_text().splitlines() == [
        '{"step": 0, "eval/pass@1": 0.25}',
        '{"step": 1, "train/reward": 0.3333333333333333, "train/loss": -2.0}',
        '{"step": 2, "train/loss": -3.0}',
        '{"step": 2, "eval/pass@1": 0.5}',
    ]
    table = pandas.read_json(tmp_path / "runs/a/metrics.jsonl", lines=True)
    assert [*table] == ["step", "eval/pass@1", "train/reward", "train/loss"]
    assert table["step"].tolist() == [0, 1, 2, 2]
    assert table["train/loss"].dropna().tolist() == [-2.0, -3.0]


def test_values_that_are_not_finite_are_null(tmp_path):
    log = start(tmp_path)
    log.log_metrics(1, {"train/loss": float("nan"), "train/reward": float("-inf")})
    log.log_samples(1, [SAMPLE | {"reward": float("nan"), "seen": (float("inf"), 2, Path("a"))}])
    (row,), (sample,) = (read_jsonl(tmp_path / f"{name}.jsonl") for name in ("metrics", "samples"))
    assert row == {"step": 1, "train/loss": None, "train/reward": None}
    assert sample["reward"] is None and sample["seen"] == [None, 2, "a"]


def test_any_text_survives_in_the_samples_file(tmp_path):
    text = 'half a character \ud83d, NUL \0, é, 数, \u2028, quote ", NaN, newline \n'
    start(tmp_path).log_samples(3, [SAMPLE | {"completion": text}])
    assert (tmp_path / "samples.jsonl").read_bytes().isascii()
    assert read_jsonl(tmp_path / "samples.jsonl") == [{"step": 3, **SAMPLE, "completion": text}]


def test_other_ranks_write_and_print_nothing(tmp_path, capfd):
    log = start(tmp_path / "run", rank=1, boards="mlflow")
    log.info("hello")
    log.warning("careful")
    with log.progress(10, "rollouts", "rows") as bar:
        bar.update(10)
    log_steps(log, range(1, 2))
    log.print_step(1, 10, {})
    log.print_evaluation("evaluation", {}, [])
    log.close()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_logger_that_is_not_open_prints_but_writes_nothing(tmp_path, capfd):
    log = Logger(rank=0, do_mlflow=True)
    log.info("hello")
    log_steps(log, range(1, 2))
    log.close("FAILED")
    assert capfd.readouterr() == ("hello\n", "")
    assert list(tmp_path.iterdir()) == []


# Resume


def test_a_new_run_starts_its_files_anew(tmp_path):
    """And does not go on in the run that a board has of the one before it."""
    log_steps(start(tmp_path), range(1, 4))
    for board in ("mlflow", "wandb"):
        (tmp_path / f"{board}_run_id").write_text("that of the run before\n")
    log_steps(start(tmp_path), range(1, 2))
    assert logged_steps(tmp_path) == ([1],) * 2
    assert not list(tmp_path.glob("*_run_id"))


def test_a_resumed_run_has_neither_a_gap_nor_a_doubled_step(tmp_path):
    unbroken, resumed = tmp_path / "unbroken", tmp_path / "resumed"
    log_steps(start(unbroken), range(1, 13))
    log_steps(start(resumed), range(1, 12))
    for name, half_a_row in zip(FILES, ('{"step": 1', "{", "{"), strict=True):
        with (resumed / name).open("a") as file:  # killed while writing
            file.write(half_a_row)
    log = start(resumed, resume_step=9)
    assert logged_steps(resumed) == (list(range(1, 10)),) * 2
    log_steps(log, range(10, 13))
    for name in FILES:
        assert (resumed / name).read_bytes() == (unbroken / name).read_bytes()


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_an_evaluation_stays_if_the_checkpoint_knows_it(tmp_path, is_evaluated):
    """Else the resumed run makes it again, and it would stand there twice."""
    log = start(tmp_path)
    for metrics in ({"train/loss": 0.5}, {"eval/pass@1": 0.5}):
        log.log_metrics(2, metrics)
    start(tmp_path, resume_step=2, is_evaluated=is_evaluated)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1 + is_evaluated


def test_a_run_killed_before_its_first_row_can_be_resumed(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "trai')
    log_steps(start(tmp_path, resume_step=0), range(1, 3))
    assert logged_steps(tmp_path) == ([1, 2],) * 2


@pytest.mark.parametrize("resume_step", [None, 1])
def test_a_run_goes_on_beside_an_older_versions_metrics_csv(tmp_path, resume_step):
    log_steps(start(tmp_path), range(1, 3))
    (tmp_path / "metrics.csv").write_text("step,train/loss\n1,half a row")
    log_steps(start(tmp_path, resume_step=resume_step), range(2, 4))
    kept = [] if resume_step is None else [1]
    assert logged_steps(tmp_path) == ([*kept, 2, 3],) * 2
    assert (tmp_path / "metrics.csv").read_text() == "step,train/loss\n1,half a row"


# The terminal


def run_python(code: str, **options: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60, check=True, **options)


DRAW_BAR = """
import time
from logger import Logger
log = Logger(rank=0)
with log.progress(30, "rollouts", "rows") as bar:
    for row in range(30):
        bar.update(1)
        time.sleep(0.02)
        if row == 20:
            log.info("a line in between")
"""


def test_bars_do_not_flood_a_file(tmp_path):
    with (tmp_path / "log.txt").open("wb") as file:
        run_python(DRAW_BAR, stdout=file, stderr=file)
    assert (tmp_path / "log.txt").read_text() == "a line in between\n"


def test_a_bar_on_a_terminal_shows_its_eta_and_vanishes():
    reader, terminal = pty.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        run_python(DRAW_BAR, stdout=terminal, stderr=terminal)
        seen = os.read(reader, 1 << 16).decode()
    finally:
        os.close(terminal)
        os.close(reader)
    assert "rollouts" in seen and "rows/s]" in seen and "<00:00" in seen
    assert "\ra line in between\r\n" in seen
    assert seen.split("\r")[-2].strip() == ""  # the bar's line is blank in the end


def test_printing_never_raises_and_never_obeys_control_codes():
    code = r'from logger import Logger; Logger(rank=0).warning("\ud800 \0 é \x1b[2J \r\n\tend")'
    done = run_python(code, stdout=subprocess.PIPE, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.stdout == b"warning: \\ud800 \\x00 \\xe9 \\x1b[2J \\r\n\tend\n"


def test_step_lines_are_aligned_and_a_missing_metric_is_a_dash(capsys):
    metrics = {"train/reward": 0.5123, "train/solved": 0.25, "train/completion_tokens": 87.4}
    metrics |= {"train/entropy": 1.25, "train/grad_norm": 0.5, "train/lr": 1e-4}
    metrics |= {"time/step_s": 2.34}
    Logger(rank=0).print_step(7, 200, metrics)
    Logger(rank=0).print_step(123, 200, {"train/reward": -1.0, "train/lr": 0.0})
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "step   7/200  reward  0.512  solved 0.250  length    87  entropy 1.250"
        "  grad norm  0.500  lr 1.0e-04  seconds    2.3  left 0:07:32"
    )
    assert "reward -1.000  solved     -  length     -" in second
    assert len(first) == len(second)


def test_the_time_left_goes_by_the_last_steps_and_what_came_between_them(monkeypatch, capsys):
    """The first line knows its own step alone: 2 s. Then come 5 s, and 15 s with an evaluation."""
    log = Logger(rank=0)
    for step, now_s in ((8, 100.0), (9, 105.0), (10, 120.0)):
        monkeypatch.setattr(logger.time, "monotonic", lambda now_s=now_s: now_s)
        log.print_step(step, 3610, {"time/step_s": 2.0})
    left = [line.rpartition("  left ")[2] for line in capsys.readouterr().out.splitlines()]
    assert left == ["2:00:04", "5:00:05", "10:00:00"]


def test_an_evaluation_shows_the_interval_and_three_completions_with_their_rewards(capsys):
    metrics = {"eval/pass@1": 0.431, "eval/pass@1_low": 0.4, "eval/pass@1_high": 0.462}
    metrics |= {"eval/pass@8": 0.75, "eval/completion_tokens": 312.44, "time/eval_s": 2.0}
    long = SAMPLE | {"completion": "a" * 700 + "<answer>1</answer>"}
    samples = [SAMPLE, long, SAMPLE, SAMPLE]
    log = Logger(rank=0)
    log.print_evaluation("evaluation at step 10", metrics, samples)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:9] == [
        "evaluation at step 10",
        "  pass@1              0.431  (95% interval 0.400 to 0.462)",
        "  pass@8              0.750",
        "  completion_tokens   312.4",
        "  completion 1  reward 1.10  (format 1.00  answer 1.00)  9 tokens",
        "    > Use the numbers 3 7 25, to make 46.",
        "    <think>25 + 7 * 3</think>",
        "    <answer>25 + 7 * 3</answer>",
        "    read: 25+7*3  gold: #### 46",
    ]
    assert lines[10:14] == [
        "    > nums: 3 7 25, target: 46",
        "    " + "a" * 400,
        "    [... 118 characters ...]",
        "    " + "a" * 182 + "<answer>1</answer>",
    ]
    assert sum(line.startswith("  completion ") for line in lines) == 3
    own_gold = {"gold": {"nums": [3, 7, 25], "target": 46}}  # the question itself
    log.print_samples("training completions", [SAMPLE | own_gold])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "    > nums: 3 7 25, target: 46" and lines[-1] == "    read: 25+7*3"


# MLflow


@contextlib.contextmanager
def mlflow_server(folder: Path) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run a real `mlflow server` on loopback; yield its address and its process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", port]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", str(folder / "artifacts")]
    light = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | light,
            stdout=log,
            stderr=log,
            start_new_session=True,  # its workers are killed with it
        )
    address, deadline_s = f"http://127.0.0.1:{port}", time.monotonic() + 90
    try:
        while not is_healthy(address):
            if time.monotonic() > deadline_s or process.poll() is not None:
                pytest.fail(f"mlflow server did not start:\n{(folder / 'server.log').read_text()}")
            time.sleep(0.1)
        yield address, process
    finally:
        kill_group(process)


def is_healthy(address: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
        return True
    return False


def kill_group(process: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def module_server(tmp_path_factory) -> Iterator[str]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as (address, _):
        yield address


@pytest.fixture
def client(module_server, monkeypatch) -> object:
    """A client of the server that loggers send to."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", module_server)
    return import_mlflow().MlflowClient(module_server)


def test_mlflow_shows_parameters_metrics_the_config_and_the_samples(
    client, module_server, tmp_path, capfd
):
    params = {"training.learning_rate": 1e-4, "training.k_best_of_n": [8, 8], "run.name": "数"}
    params |= {"model.lora": {"r": 8}, "task.prompt": "half \ud83d"}
    params |= {f"task.key_{i}": i for i in range(120)}  # more than MLflow takes at once
    names = {"experiment": "countdown", "run_name": "first", "description": "- seed: 1"}
    shown = {"params": params, "config_text": "training: {}\n", **names}
    log = start(tmp_path / "run", boards="mlflow", **shown)
    log.log_metrics(0, {"eval/pass@1": 0.25})
    log.log_metrics(1, {"train/loss": 0.5, "train/reward": float("nan"), "eval/pass@1": 0.5})
    log.log_samples(0, [SAMPLE])
    log.log_samples(1, [SAMPLE | {"completion": "half \ud83d, NUL \0"}, SAMPLE])
    log.close()
    run_id = (tmp_path / "run/mlflow_run_id").read_text().strip()
    address = f"{module_server}/#/experiments/{client.get_run(run_id).info.experiment_id}"
    assert capfd.readouterr() == (f"MLflow: {address}/runs/{run_id}\n", "")

    run = client.get_run(run_id)
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert client.get_experiment(run.info.experiment_id).name == "countdown"
    assert run.data.tags["mlflow.note.content"] == "- seed: 1"  # the UI's description
    assert len(run.data.params) == len(params)
    expected = {"training.learning_rate": "0.0001", "training.k_best_of_n": "[8, 8]"}
    expected |= {"run.name": "数", "model.lora.r": "8", "task.prompt": "half \\ud83d"}
    assert run.data.params.items() >= {**expected, "task.key_119": "119"}.items()
    history = client.get_metric_history(run.info.run_id, "eval/pass_at_1")
    assert [(point.step, point.value) for point in history] == [(0, 0.25), (1, 0.5)]
    assert run.data.metrics == {"train/loss": 0.5, "eval/pass_at_1": 0.5}
    folder = client.download_artifacts(run.info.run_id, "", str(tmp_path))
    assert Path(folder, "config.yaml").read_text() == "training: {}\n"
    table = client.load_table(run.info.experiment_id, "samples.json", [run.info.run_id])
    assert table["step"].tolist() == [0, 1, 1]
    assert table["completion"].tolist()[1] == "half \\ud83d, NUL \\x00"
    assert table["reward_parts/answer"].tolist() == [1.0, 1.0, 1.0]
    assert not any("." in name for name in table.columns)  # the UI shows such columns empty
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"])[0]["type"] == "table"  # the UI shows


def test_a_resumed_run_continues_its_mlflow_run_and_doubles_no_step(client, tmp_path):
    log_steps(start(tmp_path, boards="mlflow", params={"num_steps": 4}), range(1, 4))  # killed
    run_id = (tmp_path / "mlflow_run_id").read_text().strip()
    log = start(tmp_path, boards="mlflow", params={"num_steps": 5}, resume_step=2)
    log_steps(log, range(3, 6))
    log.close("KILLED")
    run = client.get_run(run_id)
    history = client.get_metric_history(run_id, "train/loss")
    assert [point.step for point in history] == [1, 2, 3, 4, 5]
    assert (run.info.status, run.data.params) == ("KILLED", {"num_steps": "4"})
    table = client.load_table(run.info.experiment_id, "samples.json", [run_id])
    assert table["step"].tolist() == [1, 2, 3, 4, 5]

    log_steps(start(tmp_path, boards="mlflow"), range(1, 2))
    assert (tmp_path / "mlflow_run_id").read_text().strip() != run_id


class Remembering:
    """A stand-in for MLflow's client and its server, which keeps the tags of a run."""

    def __init__(self) -> None:
        self.data, self.info = SimpleNamespace(tags={}), SimpleNamespace(experiment_id="1")

    def get_run(self, run_id: str) -> "Remembering":
        return self

    def update_run(self, run_id: str, status: str) -> None:
        """It runs again."""

    def log_batch(self, run_id: str, *, metrics: list, tags: list, synchronous: bool) -> None:
        self.data.tags.update((tag.key, tag.value) for tag in tags)


def test_mlflow_keeps_whether_the_last_evaluation_was_sent(tmp_path, monkeypatch):
    """Else a run that is resumed at an evaluated step sends its evaluation a second time."""
    about, server = {"params": {}, "config_text": ""}, Remembering()
    monkeypatch.setattr(import_mlflow(), "MlflowClient", lambda: server)
    for sent in ((2, False), (2, True)):
        before, after = MlflowRun(), MlflowRun()
        before.start("abc", tmp_path, about)
        before.send_metrics(*sent, {"train/loss": 0.5})
        after.start("abc", tmp_path, about)
        assert after.last_sent == sent


def check_one_warning(
    folder: Path, capfd: pytest.CaptureFixture[str], reason: str, board: str = "MLflow"
) -> None:
    """Three steps were logged: the board's failure is one line, and no row is missing."""
    out, err = capfd.readouterr()
    assert out.count("warning:") == 1 and len(out.splitlines()) == 1 and err == ""
    state = f"{board} is off until the run ends, the run's own files go on"
    assert out.startswith(f"warning: {state}: ")
    assert reason in out and "secret" not in out
    assert logged_steps(folder) == ([1, 2, 3],) * 2


@pytest.mark.slow
def test_a_server_killed_in_mid_run_costs_one_warning_and_no_row(tmp_path, monkeypatch, capfd):
    with mlflow_server(tmp_path) as (address, process):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        log = start(tmp_path / "run", boards="mlflow")
        log_steps(log, range(1, 2))
        assert capfd.readouterr().out.startswith(f"MLflow: {address}/#/experiments/")
        kill_group(process)
        started_s = time.monotonic()
        log_steps(log, range(2, 4))
        log.close()
        assert time.monotonic() - started_s < 20
    check_one_warning(tmp_path / "run", capfd, "Connection refused")


def test_a_board_that_has_failed_is_not_called_again(tmp_path, monkeypatch, capfd):
    """Each call to a server that is down costs seconds, in which all ranks wait."""
    board, called = MlflowRun(), []

    def refuse(*arguments: object) -> None:
        called.append(arguments)
        raise ConnectionError("Connection refused")

    for method in ("start", "send_metrics", "send_samples", "finish"):
        monkeypatch.setattr(board, method, refuse)
    log = Logger(rank=0, boards=[board])
    log.open(tmp_path, resume_step=None, is_evaluated=False, about={"params": {}})
    log_steps(log, range(1, 4))
    log.close()
    assert len(called) == 1
    check_one_warning(tmp_path, capfd, "Connection refused")


class Overloaded(BaseHTTPRequestHandler):
    """A server that asks its clients to come back in an hour."""

    def do_GET(self) -> None:
        self.send_response(503)
        self.send_header("Retry-After", "3600")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Keep the test's output empty."""


@contextlib.contextmanager
def deaf_port(*, is_silent: bool) -> Iterator[int]:
    """A port where nobody listens or, if it is silent, where nobody reads what is sent."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_silent:
            listener.listen()  # from here on the kernel accepts connections
        yield listener.getsockname()[1]


@contextlib.contextmanager
def overloaded_port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Overloaded) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    ("open_port", "reason"),
    [
        (partial(deaf_port, is_silent=False), "Connection refused"),
        (partial(deaf_port, is_silent=True), "timed out"),
        (overloaded_port, "503"),
    ],
)
def test_a_server_that_is_down_costs_one_warning_and_no_row(
    open_port, reason, tmp_path, monkeypatch, capfd
):
    """It costs seconds only, whichever way it is down: refusing, silent or overloaded.

    MLflow's own defaults wait 8 x 120 s for a silent one, and an hour for an overloaded one.
    """
    import_mlflow()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    with open_port() as port:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
        started_s = time.monotonic()
        log = start(tmp_path, boards="mlflow")
        log_steps(log, range(1, 4))
        log.close()
        assert time.monotonic() - started_s < 10
    check_one_warning(tmp_path, capfd, reason)
    assert not (tmp_path / "mlflow_run_id").exists()


@pytest.mark.parametrize("password", ["secret/slash", "one@secret", "12/secret", "a%2Fsecret?b"])
def test_the_password_in_a_servers_address_is_not_printed(password, tmp_path, monkeypatch, capfd):
    """Bug: with a / in it, at which libraries cut the address, it stood in the warning."""
    import_mlflow()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://user:{password}@127.0.0.1:9")
    log = start(tmp_path, boards="mlflow")
    log_steps(log, range(1, 4))
    check_one_warning(tmp_path, capfd, "")


def test_the_default_limits_bound_a_request_to_half_a_minute():
    limits = MLFLOW_ENVIRONMENT
    num_tries = 1 + int(limits["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
    assert num_tries * int(limits["MLFLOW_HTTP_REQUEST_TIMEOUT"]) <= 30


def test_a_call_that_is_slow_is_the_last(client, tmp_path, monkeypatch, capfd):
    log = start(tmp_path, boards="mlflow")
    capfd.readouterr()
    monkeypatch.setattr(report_boards, "SLOW_S", 0.0)
    log_steps(log, range(1, 4))
    check_one_warning(tmp_path, capfd, "a call took 0 s")


def test_env_file_sets_mlflow_up_and_the_environment_wins(tmp_path, monkeypatch):
    for name in (*MLFLOW_ENVIRONMENT, "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "real")
    (tmp_path / ".env").write_text(
        "MLFLOW_TRACKING_URI=http://127.0.0.1:1\n"
        "MLFLOW_TRACKING_USERNAME=file\n"
        "MLFLOW_HTTP_REQUEST_TIMEOUT=77\n"
    )
    assert import_mlflow().get_tracking_uri() == "http://127.0.0.1:1"
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "real"
    assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "1"


@pytest.mark.parametrize(
    ("board", "command"),
    [
        ("mlflow", "pip install mlflow"),
        ("wandb", "pip install wandb==[0-9.]+"),
    ],
)
def test_a_missing_package_is_named_with_its_pip_command_at_once(board, command, monkeypatch):
    monkeypatch.setitem(sys.modules, board, None)  # what an import finds if it is not installed
    with pytest.raises(ValueError, match=command):
        [*make_boards(LoggingSettings(report_to=[board]))]


# wandb


@pytest.fixture
def offline(monkeypatch) -> Iterator[None]:
    """wandb without a server; its process ends with the test."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield
    wandb.teardown()


def records(folder: Path) -> list[pb.Record]:
    """What wandb's files in a run's folder hold: LevelDB's log, in blocks of 32 kB."""
    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        data, place, record = file.read_bytes(), 7, b""
        while place + 7 <= len(data):
            _, length, kind = struct.unpack("<IHB", data[place : place + 7])
            left = 2**15 - place % 2**15
            if left < 7:
                place += left
                continue
            record += data[place + 7 : place + 7 + length]
            place += 7 + length
            if kind in (1, 4):  # a whole record, or its last part
                found.append(pb.Record.FromString(record))
                record = b""
    return found


def history(folder: Path) -> list[dict]:
    """The rows that were logged, without what wandb adds to them."""
    rows = [record.history.item for record in records(folder) if record.HasField("history")]
    rows = [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in r} for r in rows]
    return [{key: row[key] for key in row if not key.startswith("_")} for row in rows]


def test_wandb_shows_parameters_metrics_and_the_samples_and_goes_on(offline, tmp_path, capfd):
    params = {"training.learning_rate": 1e-4, "model.lora": {"r": 8}, "task.prompt": "half \ud83d"}
    names = {"experiment": "countdown", "run_name": "first", "description": "- seed: 1"}
    log = start(tmp_path, boards="wandb", params=params, **names)
    log.log_metrics(0, {"eval/pass@1": 0.25})
    log.log_samples(0, [SAMPLE | {"completion": "half \ud83d, NUL \0"}])
    log.log_metrics(1, {"train/loss": 0.5, "train/reward": float("nan")})
    log.close("KILLED")
    (folder,) = tmp_path.glob("wandb/offline-run-*")
    assert capfd.readouterr() == (f"wandb: offline, wandb sync {folder}\n", "")
    written = records(tmp_path)
    (run,) = (record.run for record in written if record.HasField("run"))
    assert (run.project, run.display_name, run.notes) == ("countdown", "first", "- seed: 1")
    settings = {item.key: json.loads(item.value_json) for item in run.config.update}
    expected = {"training.learning_rate": 1e-4, "model.lora.r": 8, "task.prompt": "half \\ud83d"}
    assert settings.items() >= expected.items()
    assert [r.exit.exit_code for r in written if r.HasField("exit")] == [1]
    before, samples, after = history(tmp_path)
    assert before == {"step": 0, "eval/pass@1": 0.25}
    assert after == {"step": 1, "train/loss": 0.5}
    table = json.loads((folder / "files" / samples["samples/path"]).read_text())
    (row,) = table["data"]
    shown = dict(zip(table["columns"], row, strict=True))
    assert (shown["step"], shown["reward_parts/answer"]) == (0, 1.0)
    assert shown["completion"] == "half \\ud83d, NUL \\x00"
    time.sleep(1.1)  # its folders are named by the second
    log = start(tmp_path, boards="wandb", resume_step=1)
    log.log_metrics(2, {"train/loss": 0.25})
    log.close()
    assert history(tmp_path)[3:] == [{"step": 2, "train/loss": 0.25}]
    ids = {record.run.run_id for record in records(tmp_path) if record.HasField("run")}
    assert ids == {(tmp_path / "wandb_run_id").read_text().strip()}


def test_a_wandb_that_knows_the_run_gets_no_step_twice(offline, tmp_path):
    """As its server tells at a resume; step 2 was sent, its evaluation was not."""
    log = start(tmp_path, boards="wandb")
    (board,) = log.boards
    board.last_sent = (2, False)
    log_steps(log, range(1, 3))
    log.log_metrics(2, {"eval/pass@1": 0.5})
    assert board.run.summary["last_sent"] == [2, True]
    log.close()
    assert history(tmp_path) == [{"step": 2, "eval/pass@1": 0.5}]


def test_a_resumed_wandb_run_is_the_one_that_its_server_has(offline, tmp_path, monkeypatch):
    """Offline nobody can tell what was sent: here a stand-in for its server's answer does."""
    asked, summary = {}, {"last_sent": [2, True]}
    run = mock.Mock(id="abc", dir=tmp_path, summary=summary)
    monkeypatch.setattr(wandb, "init", lambda **settings: asked.update(settings) or run)
    board = WandbRun()
    about = {"experiment": "x", "run_name": "y", "description": "", "params": {}}
    board.start("abc", tmp_path, about)
    assert (asked["id"], asked["resume"]) == ("abc", "allow")  # never would refuse it
    assert board.last_sent == (2, True)
    for sent in ([3, False], [3, True]):
        board.send_metrics(*sent, {"train/loss": 0.5})
        assert summary["last_sent"] == sent


@pytest.mark.parametrize(
    ("key", "reason"), [(None, "no API key"), ("secret01" * 5, "wandb is off")]
)
def test_a_wandb_that_cannot_be_used_costs_one_warning(tmp_path, monkeypatch, capfd, key, reason):
    """There is no key, and nobody is asked for it; or there is no server."""
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(report_boards, "SLOW_S", 2.0)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with deaf_port(is_silent=False) as port:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{port}")
        if key is not None:
            monkeypatch.setenv("WANDB_API_KEY", key)
        log = start(tmp_path / "run", boards="wandb")
        log_steps(log, range(1, 4))
        log.close()
        wandb.teardown()
    check_one_warning(tmp_path / "run", capfd, reason, board="wandb")


def test_two_boards_get_the_same_and_one_that_fails_leaves_the_other(
    offline, tmp_path, monkeypatch, capfd
):
    """MLflow on SQLite, without a server: `logging.mlflow` is a word for it."""
    assert LoggingSettings(report_to="wandb").report_to == ["wandb"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    boards = make_boards(LoggingSettings(report_to=["mlflow", "wandb"], mlflow=True))
    log = Logger(rank=0, boards=boards)
    about = {"experiment": "x", "run_name": "y", "description": "", "config_text": ""}
    log.open(tmp_path, resume_step=None, is_evaluated=False, about={**about, "params": {"a": 1}})
    log.log_metrics(1, {"train/loss": 0.5})
    mlflow_board, wandb_board = log.boards
    run_id = (tmp_path / "mlflow_run_id").read_text().strip()
    addresses = capfd.readouterr().out.splitlines()
    assert addresses[0] == f"MLflow: {run_id} in sqlite:///{tmp_path}/mlflow.db"
    assert mlflow_board.client.get_run(run_id).data.metrics == {"train/loss": 0.5}
    wandb_board.finish("FINISHED")
    assert history(tmp_path) == [{"step": 1, "train/loss": 0.5}]
    log.log_metrics(2, {"train/loss": 0.25})
    assert mlflow_board.client.get_run(run_id).data.metrics == {"train/loss": 0.25}
    assert capfd.readouterr().out.startswith("warning: wandb is off until the run ends")
    log.close()
    assert mlflow_board.client.get_run(run_id).info.status == "FINISHED"
