"""Exercises of docs/exercises: bugs to find in a copy of this repository, and functions to write.

    python -m tools.exercise 7 ../seven              # a copy with the bug of exercise 7
    python -m tools.exercise 7 --check main.py:210   # is it at this line of the copy?
    python -m tools.exercise --symptom 7               # what a run of that copy measures: curves
    python -m tools.exercise --write ../mine         # plain.py without the bodies of six functions
    python -m tools.exercise --test ../mine 3        # is the third right? all six without a number

The copy has what a run needs, but no tests, benchmarks, answers or history. Besides the bug, twelve
places in it are written in another way that computes the same, so `diff -r` shows thirteen: --draw
names which twelve of thirty. This hides the bug from a glance, not from a will:
docs/exercises/answers names it. git is not needed.
"""

import argparse
import random
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from engine import ROOT
from engine.run.mistakes import mistakes_cost_one_line

COPIED = {"main.py", "countdown.py", "logger.py", "config.yaml", "configs", "engine", "tasks"}
COPIED |= {"tiny", "tools", "requirements.txt", "pyproject.toml"}
PLAIN = {"plain.py", "countdown.py", "config.yaml", "tiny"}
OURS = {"__pycache__", "exercise.py", "written.py"}  # in no copy
ANSWERS = ROOT / "docs/exercises/answers"


def changes_of(number: int | None, draw: int) -> list[dict[str, str]]:
    """Twelve rewrites, and the bug of an exercise."""
    answer = ANSWERS / f"{number or 0:02}.md"
    name = answer.is_file() and re.search(r"^bug: (.+)$", answer.read_text("utf-8"), re.MULTILINE)
    if not name:
        raise ValueError(f"{number}: 1 to 10 have a bug, in a clone that has {ANSWERS}")
    rewrites = random.Random(draw).sample(read_changes(ANSWERS / "rewrites.txt"), 12)
    bugs = read_changes(ROOT / "benchmarks/planted.txt")
    return rewrites + [bug for bug in bugs if bug["bug"] == name[1]]


def read_changes(file: Path) -> list[dict[str, str]]:
    """The blocks of planted.txt, rewrites.txt or cut.txt, each by the words before its colons."""
    pair = re.compile(r"^(bug|file|find|with|test): ?(.*)$", re.MULTILINE)
    return [dict(pair.findall(block)) for block in file.read_text("utf-8").split("\n\n")]


def changed(changes: list[dict[str, str]]) -> tuple[dict[str, str], str, int]:
    """The text of each file that is changed; the last change's file, and its line there."""
    texts: dict[str, str] = {}
    for change in changes:
        file = change["file"]
        before = texts.get(file) or (ROOT / file).read_text("utf-8")
        texts[file], num_found = re.subn(change["find"], change["with"], before)
        assert num_found == 1, f"{file}: {change['find']} matches {num_found} times, not once"
    lines = zip(before.split("\n"), texts[file].split("\n"), strict=False)
    return texts, file, next(n for n, (old, new) in enumerate(lines, start=1) if old != new)


def copy_to(folder: Path, names: set[str], changes: list[dict[str, str]], page: str) -> None:
    texts, _, _ = changed(changes)
    folder = shutil.copytree(ROOT, folder.expanduser(), ignore=partial(not_copied, names))
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")
    print(f"written: {folder}; docs/exercises/{page}.md says how to go on")


def not_copied(copied: set[str], folder: str, names: list[str]) -> set[str]:
    return {*names} - copied if Path(folder) == ROOT else OURS


def is_found(guess: str, file: str, line: int) -> bool:
    """Whether FILE:LINE, of the copy, is within two lines of the bug."""
    place = re.fullmatch(r"(.+):(\d+)", guess)
    if not place or not (ROOT / place[1]).is_file():
        raise ValueError(f"--check {guess}: name a file of the copy and a line, as main.py:210")
    return Path(place[1]) == Path(file) and abs(int(place[2]) - line) <= 2


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.exercise", description=__doc__.split("\n")[0])
    parser.add_argument("number", type=int, nargs="?", help="exercise 1 to 10, function 1 to 6")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", type=Path, nargs="?", help="of the copy, a new one")
    what.add_argument("--check", metavar="FILE:LINE", help="two lines more or less are right")
    what.add_argument("--symptom", metavar="N", help="1 to 10, without 6")
    what.add_argument("--write", type=Path, metavar="FOLDER", help="a new one")
    what.add_argument("--test", type=Path, metavar="FOLDER", help="all six without a number")
    parser.add_argument("--draw", type=int, default=0, help="another number: other rewrites")
    options = parser.parse_args()
    with mistakes_cost_one_line():
        if options.symptom:
            draw = [sys.executable, "benchmarks/draw_symptom.py", options.symptom]
            sys.exit(subprocess.run(draw, cwd=ROOT).returncode)
        if options.test:
            from tools.written import check

            sys.exit(not check(options.test, options.number))
        if options.write:
            return copy_to(options.write, PLAIN, read_changes(ANSWERS / "cut.txt"), "write")
        changes = changes_of(options.number, options.draw)
        if options.folder:
            return copy_to(options.folder, COPIED, changes, f"{options.number:02}")
        _, file, line = changed(changes)
        if not is_found(options.check, file, line):
            sys.exit("no: the bug is not there")
        print(f"right: docs/exercises/answers/{options.number:02}.md explains it")


if __name__ == "__main__":
    main()
