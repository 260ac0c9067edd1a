"""main.py with rewards by construction and perhaps a fault: `python launcher.py PLAN ARGUMENTS`.

The plan is JSON: {"grading": {...}, "fault": {...} or null}; see `harness.install_grading`. Faults:

    {"do": "kill other", ...}       SIGKILL rank 1
    {"do": "copy", "to": ..., ...}  copy the run's folder, at each file event from there on
    ... "saves": 1, "events": 7     at rank 0's 7th file event after that many of its checkpoints
    {"do": "raise", "calls": 40}    RuntimeError in rank 0's 40th call of the reward function

run.dir/struck is made just before the fault.
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

import main as program
from engine.questions.tasks import load_task

FILE_EVENTS = {
    *("open", "os.mkdir", "os.rename", "os.symlink", "os.remove", "os.rmdir", "shutil.rmtree")
}


class Striker:
    """An audit hook that waits for the moment, and strikes."""

    def __init__(self, fault: dict, folder: Path) -> None:
        self.fault = fault
        self.folder = folder
        self.saves = self.events = 0
        self.is_busy = False

    def __call__(self, event: str, arguments: tuple) -> None:
        if event not in FILE_EVENTS or self.is_busy:
            return
        paths = [str(argument) for argument in arguments[:2]]
        if event == "open" and not paths[0].startswith(str(self.folder)):
            return
        if event == "os.symlink" and paths[1].endswith("/checkpoints/last"):
            self.saves += 1
        if self.saves >= self.fault.get("saves", 1):
            self.events += 1
            if self.events >= self.fault["events"]:
                self.strike()

    def strike(self) -> None:
        self.is_busy = True
        if self.fault["do"] == "copy":
            copy = Path(self.fault["to"]) / f"{self.events:04d}" / "x"
            if (self.folder / "x").is_dir():
                shutil.copytree(self.folder / "x", copy, symlinks=True)
            self.is_busy = False
            return
        (self.folder / "struck").touch()
        os.kill(int((self.folder / "pid-1").read_text()), signal.SIGKILL)


def fail_at_call(fault: dict, calls: itertools.count, function, folder: Path, *texts, **settings):
    """Call the function, or raise if it is the fault's call."""
    if next(calls) == fault["calls"]:
        (folder / "struck").touch()
        raise RuntimeError("it fails here")
    return function(*texts, **settings)


def main() -> None:
    plan, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    install_grading(plan["grading"])
    if plan["fault"]:
        install_fault(plan["fault"], arguments)
    program.main(program.load_config(arguments))


def install_fault(fault: dict, arguments: list[str]) -> None:
    rank = int(os.environ.get("RANK", 0))
    (given,) = (a.partition("=")[2] for a in arguments if a.startswith("run.dir="))
    folder = Path(given)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == 0:
        if fault["do"] == "raise":
            task = load_task("countdown")
            given = (fault, itertools.count(1), task.reward_function, folder)
            task.reward_function = functools.partial(fail_at_call, *given)
        else:
            sys.addaudithook(Striker(fault, folder))


if __name__ == "__main__":
    main()
