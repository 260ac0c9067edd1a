"""The exercises: thirteen places differ in each copy, the bug is found where it is, a copy runs."""

import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

from harness import ROOT, SHORT_RUN, USERS_ENVIRONMENT

from tools import exercise


def changed_lines(file: str, copy: Path) -> list[range]:
    """The lines of the copy, from 1 on, in each place where it differs from ours."""
    ours, theirs = ((root / file).read_text().splitlines() for root in (ROOT, copy))
    places = SequenceMatcher(None, ours, theirs, autojunk=False).get_opcodes()
    return [range(j1 + 1, j2 + 2) for tag, _, _, j1, j2 in places if tag != "equal"]


def test_a_copy_differs_in_thirteen_places_and_the_bug_is_found_in_one_of_them(tmp_path, call):
    """Bug: a linter named five of the ten, by long lines and unused names."""
    for number in range(1, 11):
        drawn = f"--draw={number}"
        changes = exercise.changes_of(number, number)
        copy, (texts, file, line) = tmp_path / f"{number}", exercise.changed(changes)
        assert call(exercise, number, copy, drawn)[0] == 0
        places = {name: changed_lines(name, copy) for name in texts}
        assert sum(map(len, places.values())) == 13, number
        assert [line in lines for lines in places[file]].count(True) == 1
        for off, is_near in ((-3, False), (-2, True), (2, True), (3, False)):
            guess = f"--check=./{file}:{line + off}"
            assert (call(exercise, number, drawn, guess)[0] == 0) == is_near
        assert call(exercise, number, drawn, f"--check=logger.py:{line}")[0] != 0
    for how in (["check"], ["format", "--check"]):
        linter = [sys.executable, "-m", "ruff", *how, "--no-cache", tmp_path]
        found = subprocess.run(linter, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout


def test_a_copy_runs_without_git_and_a_mistake_is_one_line(tmp_path, call, python):
    folder = tmp_path / "copy"
    assert call(exercise, 5, folder)[0] == 0  # a bug that a single rank does not see
    command = [python, "main.py", *SHORT_RUN, "training.num_steps=1"]
    how = {"cwd": folder, "env": USERS_ENVIRONMENT, "capture_output": True, "text": True}
    result = subprocess.run(command, timeout=120, **how)
    assert result.returncode == 0 or "no step has trained" in result.stdout, result.stderr
    mistaken = (folder, "--check=main.py", "--check=main.p:8")
    for arguments in ([11, tmp_path / "new"], *([5, mistake] for mistake in mistaken)):
        status, printed, error = call(exercise, *arguments)
        assert (status, printed, error.count("\n")) == (2, "", 1) and error.startswith("error: ")
