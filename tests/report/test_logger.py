"""The logger: files that survive a kill, and a readable terminal."""

import io
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from harness import read_jsonl

from engine.report.boards import Board
from logger import STEP_FIELDS, Logger

FILES = ("metrics.jsonl", "samples.jsonl", "rollouts.jsonl")
SAMPLE = {
    "prompt": "Use the numbers 3 7 25, to make 46.",
    "question": "nums: 3 7 25, target: 46",
    "completion": "<think>25 + 7 * 3</think>\n<answer>25 + 7 * 3</answer>",
    "reward": 1.1,
    "reward_parts": {"format": 1.0, "answer": 1.0},
    "gold": "So\n#### 46",
    "answer": "25+7*3",
    "solved": True,
    "tokens": 9,
}


def start(
    folder: Path,
    *,
    rank: int = 0,
    boards: Iterable[object] = (),
    resume_step: int | None = None,
    **shown,
) -> Logger:
    """A logger whose files are open, and the runs of its boards too."""
    log = Logger(rank=rank, boards=boards)
    about = {"experiment": "plain-grpo", "run_name": "test", "description": ""}
    about |= {"config_text": "", "params": {}} | shown
    log.open(folder, resume_step=resume_step, is_evaluated=False, about=about)
    return log


def log_steps(log: Logger, steps: range) -> None:
    for step in steps:
        log.log_metrics(step, {"train/loss": -0.1 * step, "train/reward": 0.1 * step})
        log.log_samples(step, [SAMPLE])


def logged_steps(folder: Path) -> tuple[list[int], ...]:
    """The steps in metrics.jsonl and samples.jsonl."""
    return tuple([row["step"] for row in read_jsonl(folder / name)] for name in FILES[:2])


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_of_a_resumed_run_is_named(tmp_path, name):
    """The traceback did not say which file it was."""
    for line, problem in (
        (b"\xff\n", "is not JSON: 'utf-8' codec"),
        (b"9" * 5_000 + b"\n", "is not JSON"),  # a number that Python refuses to read
        (b"[" * 200_000 + b"\n", "is not JSON"),
        (b"7\n", "no object with a step"),
    ):
        (tmp_path / name).write_bytes(b'{"step": 0}\n' + line)
        with pytest.raises(ValueError, match=f"{name}: .*{problem}"):
            start(tmp_path, resume_step=1)


def test_any_text_survives_in_a_sample_and_a_number_that_is_not_finite_is_null(tmp_path):
    text = 'half a character \ud83d, NUL \0, é, 数, \u2028, quote ", NaN, newline \n'
    changes = {"completion": text, "reward": float("nan"), "seen": (float("inf"), 2, Path("a"))}
    start(tmp_path).log_samples(3, [SAMPLE | changes])
    kept = {"completion": text, "reward": None, "seen": [None, 2, "a"]}
    assert read_jsonl(tmp_path / "samples.jsonl") == [{"step": 3, **SAMPLE, **kept}]
    assert (tmp_path / "samples.jsonl").read_bytes().isascii()


def test_other_ranks_and_a_logger_that_is_not_open_write_nothing(tmp_path, capfd):
    """That another rank prints nothing is in test_resume.py."""
    boards = [Board.__new__(Board)]  # fails where it is used
    for log in (start(tmp_path, rank=1, boards=boards), Logger(rank=0, boards=boards)):
        log_steps(log, range(1, 2))
        log.log_lines("rollouts.jsonl", "{}\n")
        log.close("FAILED")
    assert capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_a_new_run_starts_its_files_anew(tmp_path):
    """And does not go on in the run that a board has of the one before it."""
    log_steps(start(tmp_path), range(1, 4))
    for board in ("mlflow", "wandb"):
        (tmp_path / f"{board}_run_id").write_text("that of the run before\n")
    log_steps(start(tmp_path), range(1, 2))
    assert logged_steps(tmp_path) == ([1],) * 2
    assert not list(tmp_path.glob("*_run_id"))


def test_printing_never_raises_and_never_obeys_control_codes(monkeypatch):
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding="ascii"))
    Logger(rank=0).warning("\ud800 \0 é \x1b[2J \r\n\tend")
    assert printed.getvalue() == b"warning: \\ud800 \\x00 \\xe9 \\x1b[2J \\r\n\tend\n"


def test_a_dumb_terminal_gets_no_bars(monkeypatch):
    """Bug: it got each redrawing of a bar as text."""
    monkeypatch.setattr(sys, "stderr", terminal := io.StringIO())
    terminal.isatty = lambda: True
    for kind in ("dumb", "xterm"):
        monkeypatch.setenv("TERM", kind)
        with Logger(rank=0).progress(range(3), "rollouts", "rows") as bar:
            assert bool(bar.disable) == (kind == "dumb")


def test_a_share_is_said_as_its_count_and_a_narrow_terminal_keeps_the_seconds(monkeypatch):
    """0.29 * 100 is below 29; of a step's line the rate goes first, then what is before it."""
    monkeypatch.setattr(sys, "stdout", terminal := io.StringIO())
    for num in range(101):
        Logger(rank=0).print_evaluation("", {"eval/pass@1": num / 100}, [], {"pass@1": 100})
    assert re.findall(r"\((\d+) of 100\)", terminal.getvalue()) == [*map(str, range(101))]
    terminal.isatty = lambda: True
    labels = [label for label, *_ in STEP_FIELDS]
    for columns in range(60, 140):
        monkeypatch.setenv("COLUMNS", str(columns))
        Logger(rank=0).print_step(1, 9, {})
        line = terminal.getvalue().splitlines()[-1]
        shown = [label for label in labels if label in line]
        assert shown == [*labels[: len(shown) - 1], labels[-1]] and "left" in line
        assert len(line) <= columns or len(shown) == 2
    assert shown == labels


def test_the_middle_of_a_long_completion_is_left_out(capsys):
    """All else that an evaluation shows, but what was read, is in test_shown.py."""
    long = SAMPLE | {"completion": "a" * 700 + "<answer>1</answer>"}
    Logger(rank=0).print_evaluation("", {}, [long], totals={})
    lines = capsys.readouterr().out.splitlines()
    assert lines[4:6] == ["    " + "a" * 400, "    [... 118 characters ...]"]
    assert lines[-1] == "    read: 25+7*3  gold: #### 46"
