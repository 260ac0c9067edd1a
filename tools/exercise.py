"""Plant a bug of docs/exercises in a copy of this repository, and say whether somebody found it.

    python -m tools.exercise 7 ../seven                # a copy with the bug of exercise 7
    python -m tools.exercise 7 --check main.py:210     # is it at this line of the copy?

The copy has what a run needs, but no tests, benchmarks, answers or history. Besides the bug, twelve
places in it are written in another way that computes the same, so `diff -r` shows thirteen. This
hides the bug from a glance, not from a will: docs/exercises/answers names it. git is not needed.
"""

import argparse
import re
import shutil
import sys
from pathlib import Path

from engine import ROOT
from engine.run.mistakes import mistakes_cost_one_line

COPIED = {"main.py", "countdown.py", "logger.py", "config.yaml", "configs", "engine", "tasks"}
COPIED |= {"tiny", "tools", "requirements.txt", "pyproject.toml"}
ANSWERS = ROOT / "docs/exercises/answers"


def changed(number: int) -> tuple[dict[str, str], str, int]:
    """The text of each file that the copy changes; the bug's file, and its line in the copy."""
    answer = ANSWERS / f"{number:02}.md"
    name = answer.is_file() and re.search(r"^bug: (.+)$", answer.read_text("utf-8"), re.MULTILINE)
    if not name:
        raise ValueError(f"{number}: 1 to 10 have a bug, in a clone that has {ANSWERS}")
    bugs = read_changes(ROOT / "benchmarks/planted.txt")
    texts: dict[str, str] = {}
    for change in read_changes(ANSWERS / "rewrites.txt") + [b for b in bugs if b["bug"] == name[1]]:
        file = change["file"]
        before = texts.get(file) or (ROOT / file).read_text("utf-8")
        texts[file], num_found = re.subn(change["find"], change["with"], before)
        assert num_found == 1, f"{file}: {change['find']} matches {num_found} times, not once"
    lines = zip(before.split("\n"), texts[file].split("\n"), strict=False)
    return texts, file, next(n for n, (old, new) in enumerate(lines, start=1) if old != new)


def read_changes(file: Path) -> list[dict[str, str]]:
    """The blocks of planted.txt or rewrites.txt, each by the words before its colons."""
    pair = re.compile(r"^(bug|file|find|with|test): ?(.*)$", re.MULTILINE)
    return [dict(pair.findall(block)) for block in file.read_text("utf-8").split("\n\n")]


def not_copied(folder: str, names: list[str]) -> set[str]:
    return {*names} - COPIED if Path(folder) == ROOT else {"__pycache__", "exercise.py"}


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.exercise", description=__doc__.split("\n")[0])
    parser.add_argument("number", type=int, help="of the exercise, 1 to 10")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("folder", type=Path, nargs="?", help="of the copy, a new one")
    what.add_argument("--check", metavar="FILE:LINE", help="two lines more or less are right")
    options = parser.parse_args()
    with mistakes_cost_one_line():
        texts, file, line = changed(options.number)
        if options.check is None:
            folder = shutil.copytree(ROOT, options.folder.expanduser(), ignore=not_copied)
            for name, text in texts.items():
                (folder / name).write_text(text, "utf-8")
            return print(f"written: {folder}; docs/exercises/{options.number:02}.md asks about it")
        guess = re.fullmatch(r"(.+):(\d+)", options.check)
        if guess is None:
            raise ValueError(f"--check {options.check}: write it as main.py:210")
        name = Path(guess[1]).as_posix()  # without ./
        folder, is_ours = name.split("/")[0], name.endswith("/exercise.py")
        if folder not in COPIED or is_ours or not (ROOT / name).is_file():
            raise ValueError(f"{name}: the copy has no such file; write it as main.py:210")
        if name != file or abs(int(guess[2]) - line) > 2:
            sys.exit("no: the bug is not there")
        print(f"right: docs/exercises/answers/{options.number:02}.md explains it")


if __name__ == "__main__":
    main()
