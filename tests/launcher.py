"""main.py with rewards by construction and perhaps a fault: `python launcher.py PLAN ARGUMENTS`.

The plan is JSON: {"grading": {...}, "fault": {...}} or less; see `harness.install_grading`. Faults:

    {"do": "kill other"}            SIGKILL rank 1 as soon as rank 0 has saved a checkpoint
    {"do": "raise", "calls": 40}    RuntimeError in rank 0's 40th call of the reward function
    {"do": "copy", "to": "/there"}  copy the run's folder at each file event, and break nothing

run.dir/struck is made just before what breaks the run.
"""

import functools
import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path

from harness import install_grading

import countdown
import main as program

EVENTS = ("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree")


def kill_other(folder: Path, event: str, arguments: tuple) -> None:
    """An audit hook."""
    if event == "os.symlink" and str(arguments[1]).endswith("/checkpoints/last"):
        (folder / "struck").touch()
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)


class Copier:
    """An audit hook."""

    def __init__(self, folder: Path, copies: Path) -> None:
        self.folder, self.copies = folder, copies
        self.numbers = itertools.count()
        self.is_copying = False

    def __call__(self, event: str, arguments: tuple) -> None:
        is_ours = event != "open" or str(arguments[0]).startswith(str(self.folder))
        if event not in EVENTS or not is_ours or self.is_copying:
            return
        self.is_copying = True
        copy = self.copies / f"{next(self.numbers):04d}" / "x"
        if (self.folder / "x").is_dir():
            shutil.copytree(self.folder / "x", copy, symlinks=True)
        self.is_copying = False


def fail_at_call(fault: dict, calls: itertools.count, function, folder: Path, *texts, **settings):
    """Call the function, or raise if it is the fault's call."""
    if next(calls) == fault["calls"]:
        (folder / "struck").touch()
        raise RuntimeError("it fails here")
    return function(*texts, **settings)


def main() -> None:
    plan, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    install_grading(plan.get("grading", {}))
    if "fault" in plan:
        install_fault(plan["fault"], arguments)
    program.main(program.load_config(arguments))


def install_fault(fault: dict, arguments: list[str]) -> None:
    rank = int(os.environ.get("RANK", 0))
    (given,) = (a.partition("=")[2] for a in arguments if a.startswith("run.dir="))
    folder = Path(given)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0 and fault["do"] == "raise":
        given = (fault, itertools.count(1), countdown.reward_function, folder)
        countdown.reward_function = functools.partial(fail_at_call, *given)
    elif rank == 0 and fault["do"] == "copy":
        sys.addaudithook(Copier(folder, Path(fault["to"])))
    elif rank == 0:
        sys.addaudithook(functools.partial(kill_other, folder))


if __name__ == "__main__":
    main()
