"""MLflow and wandb show what a run has written, and cannot hurt it."""

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import wandb
from test_logger import SAMPLE, log_steps, logged_steps, start

from engine.core.distributed import init_world
from engine.report import boards as report_boards
from engine.report.boards import BOARDS, MLFLOW_ENVIRONMENT, Board, MlflowRun, WandbRun

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch) -> Iterator[None]:
    """Give each test a folder without .env, and take back what a board put into os.environ."""
    monkeypatch.chdir(tmp_path)
    with mock.patch.dict(os.environ):
        yield
    wandb.teardown()  # ends its process


def seen_by_mlflow(folder: Path) -> dict:
    """Of SQLite, without a server; its page also shows config.yaml, and the samples as a table."""
    client = MlflowRun().package.MlflowClient()
    run_id = (folder / "mlflow_run_id").read_text().strip()
    run, history = client.get_run(run_id), client.get_metric_history
    experiment_id, tags = run.info.experiment_id, run.data.tags
    config = client.download_artifacts(run_id, "config.yaml", str(folder))
    assert Path(config).read_text() == "training: {}\n"
    assert json.loads(tags["mlflow.loggedArtifacts"])[0]["type"] == "table"
    return {
        "page": f"{run_id} in {os.environ['MLFLOW_TRACKING_URI']}",
        "experiment": client.get_experiment(experiment_id).name,
        "run_name": run.info.run_name,
        "description": tags["mlflow.note.content"],
        "params": run.data.params,
        "status": run.info.status,
        "curves": {
            name.replace("_at_", "@"): [(p.step, p.value) for p in history(run_id, name)]
            for name in run.data.metrics
        },
        "samples": client.load_table(experiment_id, "samples.json", [run_id]).to_dict("records"),
    }


NAMES = {"experiment": "countdown", "run_name": "first", "description": "- seed: 1"}
PARAMS = {"training.learning_rate": 1e-4, "training.k_best_of_n": [8, 8], "run.name": "数"}
PARAMS |= {"model.lora": {"r": 8}, "task.prompt": "half \ud83d"}
PARAMS |= {f"task.key_{i}": i for i in range(120)}  # more than MLflow takes at once
SHOWN = {"training.learning_rate": "0.0001", "training.k_best_of_n": "[8, 8]", "run.name": "数"}
SHOWN |= {"model.lora.r": "8", "task.prompt": "half \\ud83d", "task.key_119": "119"}


def test_a_board_shows_a_run_and_a_resumed_one_doubles_no_step(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    shown = {"params": PARAMS, "config_text": "training: {}\n", **NAMES}
    log = start(tmp_path, boards=[MlflowRun()], **shown)
    log.log_metrics(0, {"eval/pass@1": 0.25})
    log.log_samples(0, [SAMPLE | {"completion": "half \ud83d, NUL \0"}])
    log.log_metrics(1, {"train/loss": 0.5, "train/reward": float("nan")})
    log.log_metrics(2, {"train/loss": 0.25})
    log.log_metrics(2, {"eval/pass@1": 0.5})
    log.close("KILLED")
    seen = seen_by_mlflow(tmp_path)
    assert capfd.readouterr() == (f"{log.boards[0].title}: {seen['page']}\n", "")
    assert {key: seen[key] for key in NAMES} == NAMES and seen["status"] == "KILLED"

    resumed = start(tmp_path, boards=[MlflowRun()], resume_step=1)
    resumed.log_metrics(2, {"train/loss": 0.25})
    resumed.log_metrics(2, {"eval/pass@1": 0.5})
    resumed.log_metrics(3, {"train/loss": 0.125})
    resumed.log_samples(3, [SAMPLE, SAMPLE])
    resumed.close()
    seen = seen_by_mlflow(tmp_path)
    losses, rates = [(1, 0.5), (2, 0.25), (3, 0.125)], [(0, 0.25), (2, 0.5)]
    assert seen["curves"] == {"train/loss": losses, "eval/pass@1": rates}
    assert seen["status"] == "FINISHED" and seen["params"].items() >= SHOWN.items()
    assert [sample["step"] for sample in seen["samples"]] == [0, 3, 3]
    assert seen["samples"][0]["completion"] == "half \\ud83d, NUL \\x00"
    assert all(sample["reward_parts/answer"] == 1 for sample in seen["samples"])
    assert not any("." in key for key in seen["samples"][0])  # MLflow shows such columns empty


@pytest.mark.parametrize("last", [(1, False), (2, False)])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_board_that_was_away_gets_what_it_missed(is_resumed, last, tmp_path, monkeypatch, capfd):
    """Bug: MLflow had lost its server at step 3 of 8, and lacked steps 3 to 8 to the end."""
    monkeypatch.setattr(report_boards, "PAUSE", 0)
    log = start(tmp_path, boards=[board := stand_in()])
    log.log_metrics(1, {"train/loss": 0.5})
    board.last_sent = last  # as `start` finds it
    board.start.side_effect = ConnectionError("Connection refused")
    log.log_metrics(2, {"train/loss": 0.25, "train/reward": float("nan")})
    log.log_metrics(2, {"eval/pass@1": 0.5})
    board.start.side_effect = None
    board.start.reset_mock()
    if is_resumed:
        log = start(tmp_path, boards=[board], resume_step=3)
    log.log_metrics(4, {"train/loss": 0.125})
    sent = [call.args for call in board.send_metrics.call_args_list[1:]]
    due = {(2, False): {"train/loss": 0.25}, (2, True): {"eval/pass@1": 0.5}}
    due |= {(4, False): {"train/loss": 0.125}}
    assert sent == [(*moment, due[moment]) for moment in due if moment > last]
    assert capfd.readouterr().out.count("warning") == 1


def test_wandb_keeps_whether_the_last_evaluation_was_sent(tmp_path, monkeypatch):
    """Else a run that is resumed at an evaluated step sends its evaluation a second time."""
    about = NAMES | {"params": PARAMS}
    run = mock.Mock(id="abc", dir=tmp_path, summary={})
    monkeypatch.setattr(wandb, "init", init := mock.Mock(return_value=run))
    monkeypatch.setenv("WANDB_MODE", "offline")
    for sent in ((2, False), (2, True), (3, False)):
        before, after = WandbRun(), WandbRun()
        before.start("abc", tmp_path, about)
        before.send_metrics(*sent, {"train/loss": 0.5})
        assert after.start("abc", tmp_path, about)[0] == "abc" and after.last_sent == sent
        after.package = mock.Mock()
        for status in ("FINISHED", "FAILED", "KILLED"):
            after.finish(status)
            assert run.finish.call_args.kwargs == {"exit_code": int(status != "FINISHED")}
    given, names = init.call_args.kwargs, ("project", "name", "notes", "config", "id", "resume")
    assert [given[name] for name in names] == [*NAMES.values(), PARAMS, "abc", "allow"]
    settings = given["settings"]
    assert all((settings.silent, settings.disable_code, settings.disable_git))
    assert settings.x_disable_meta and settings.finish_timeout_raises and settings.console == "off"
    assert settings.init_timeout == settings.finish_timeout == report_boards.SLOW_S


def test_the_address_of_a_run_in_mlflow_has_no_password(tmp_path, monkeypatch):
    client = mock.MagicMock()
    run = client.get_run.return_value
    run.data.tags, run.info.experiment_id = {}, "1"
    monkeypatch.setattr(MlflowRun().package, "MlflowClient", lambda: client)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://me:se/c@ret@host/")
    address = "https://host/#/experiments/1/runs/abc"
    assert MlflowRun().start("abc", tmp_path, {}) == ("abc", address)


def check_one_warning(
    folder: Path, capfd: pytest.CaptureFixture[str], reason: str, board: str = "MLflow"
) -> None:
    """Three steps were logged: the board's failure is one line, and no row is missing."""
    out, err = capfd.readouterr()
    assert out.count("warning:") == 1 and len(out.splitlines()) == 1 and err == ""
    state = f"{board} is away and gets its metrics later, the run's own files go on"
    assert out.startswith(f"warning: {state}: ")
    assert reason in out and "secret" not in out
    assert logged_steps(folder) == ([1, 2, 3],) * 2


def stand_in(**behaviour: object) -> Board:
    """A board whose methods are all one mock."""
    board = MlflowRun()
    board.start = mock.Mock(return_value=("1", "here"), **behaviour)
    board.send_metrics = board.send_samples = board.finish = board.start
    return board


def test_a_board_that_has_failed_or_is_slow_is_not_called_at_once(tmp_path, monkeypatch, capfd):
    """Bug: MLflow made its database in 24 s, and one slow call switched it off for good."""
    monkeypatch.setattr(report_boards, "PAUSE", 10**9)
    answers = [("1", "here"), None, None, ConnectionError("Connection refused")]
    failing, working = stand_in(side_effect=answers), stand_in()
    log = start(tmp_path, boards=[failing, working])
    assert capfd.readouterr() == ("MLflow: here\n" * 2, "")
    log_steps(log, range(1, 4))
    assert failing.start.call_count == 4 and working.start.call_count == 1 + 3 + 3
    check_one_warning(tmp_path, capfd, "Connection refused")
    monkeypatch.setattr(report_boards, "SLOW_S", 0.0)
    log_steps(log, range(4, 6))
    log.close()
    assert working.start.call_count == 1 + 3 + 3 + 2
    assert "two calls in a row" in capfd.readouterr().out
    log_steps(start(tmp_path, boards=[slow := stand_in()]), range(1, 4))
    assert slow.start.call_count == 1 + 2  # the first call does not count


DOWN = {  # what is wrong: the board, its server, the user in its address, a part of the warning
    "nobody listens": ("mlflow", False, "", "Connection refused"),
    "it is silent": ("mlflow", True, "", "timed out"),
    # Bug: with a / in it, at which libraries cut the address, the password stood in the warning.
    "a password with a slash": ("mlflow", False, "user:one@secret/slash@", ""),
    "wandb has no key": ("wandb", False, "", "no API key"),  # and nobody is asked for it
}


@pytest.mark.parametrize(("name", "is_silent", "user", "reason"), DOWN.values(), ids=DOWN)
def test_a_server_that_is_down_costs_one_warning_and_no_row(
    name, is_silent, user, reason, tmp_path, monkeypatch, capfd
):
    """It costs seconds only, refusing or silent; MLflow's own defaults wait 8 x 120 s."""
    MlflowRun()
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("HOME", str(tmp_path))  # without a .netrc
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setattr(report_boards, "SLOW_S", 2.0)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if is_silent:
            listener.listen()  # the kernel accepts connections, and nobody reads what is sent
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{user}{address}")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://{address}")
        started_s = time.monotonic()
        log = start(tmp_path, boards=[BOARDS[name]()])
        log_steps(log, range(1, 4))
        log.close()
        assert time.monotonic() - started_s < 10
    check_one_warning(tmp_path, capfd, reason, {"mlflow": "MLflow"}.get(name, name))
    assert not (tmp_path / f"{name}_run_id").exists()


def test_the_default_limits_bound_a_request_to_half_a_minute():
    limits = MLFLOW_ENVIRONMENT
    num_tries = 1 + int(limits["MLFLOW_HTTP_REQUEST_MAX_RETRIES"])
    assert num_tries * int(limits["MLFLOW_HTTP_REQUEST_TIMEOUT"]) <= 30


def test_env_file_sets_mlflow_up_and_the_environment_wins(tmp_path, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "real")
    (tmp_path / ".env").write_text("MLFLOW_TRACKING_URI=a\nMLFLOW_TRACKING_USERNAME=file\n")
    init_world()
    assert os.environ["MLFLOW_TRACKING_URI"] == "a"
    assert os.environ["MLFLOW_TRACKING_USERNAME"] == "real"
