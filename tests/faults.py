"""main.py with a fault in it: `python tests/faults.py <fault> <what main.py takes>`.

The fault is JSON: what is to be done, on which rank, and when.

    {"do": "kill", ...}             SIGKILL this rank
    {"do": "kill other", ...}       of two ranks, the other
    {"do": "kill all", ...}         the process group: torchrun, if the ranks are its forks, too
    {"do": "copy", "to": ..., ...}  copy the run's folder, at each file event from there on
    {"do": "stop and copy", ...}    the same, after a SIGTERM
    ... "saves": 2, "events": 7     at the 7th file event from the moment the 2nd checkpoint of
                                    this process is there; the events are those of rank 0
    ... "saves": 2, "delay_s": 0.1  so long after that moment, or with "in": ["sampler.py"] after
                                    the main thread is next in one of these files
    a kill comes at the latest when the next checkpoint is there
    {"do": "raise", "rank": 1, "calls": 40}  RuntimeError in that call of the reward function
    {"grading": {...}, ...}         options of graded.py, whose rewards the run has

Under `torchrun --max-restarts` the first start has it, or with "starts": 3 the first three. After a
restart rank 0 is late, so that rank 1 finds in torchrun's store what the rank 0 before it left.
run.dir/struck is made just before the fault.
"""

import faulthandler
import functools
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import graded

import countdown
import main as program

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
        if event == "os.rename" and paths[1].endswith("/checkpoints/last"):
            self.saves += 1
            self.see_checkpoint()
        if self.saves >= self.fault["saves"] and "events" in self.fault:
            self.events += 1
            if self.events >= self.fault["events"]:
                self.strike()

    def see_checkpoint(self) -> None:
        if self.saves == self.fault["saves"]:
            if self.fault["do"] == "stop and copy":
                os.kill(os.getpid(), signal.SIGTERM)
            if "delay_s" in self.fault:
                threading.Thread(target=self.wait, daemon=True).start()
        elif self.saves > self.fault["saves"] and self.fault["do"].startswith("kill"):
            self.strike()

    def wait(self) -> None:
        while "in" in self.fault and not is_main_thread_in(self.fault["in"]):
            time.sleep(0.001)
        time.sleep(self.fault["delay_s"])
        self.strike()

    def strike(self) -> None:
        if self.is_busy:  # struck after a time and by an event
            return
        self.is_busy = True
        if self.fault["do"].endswith("copy"):
            copy = Path(self.fault["to"]) / f"{self.events:04d}" / "x"
            shutil.copytree(self.folder / "x", copy, symlinks=True)
            self.is_busy = False
            return
        (self.folder / "struck").touch()
        faulthandler.dump_traceback()  # where it was
        if self.fault["do"] == "kill all":
            os.killpg(0, signal.SIGKILL)
        victim = "1" if self.fault["do"] == "kill other" else "0"
        os.kill(int((self.folder / f"pid-{victim}").read_text()), signal.SIGKILL)


def is_main_thread_in(files: list[str]) -> bool:
    frame = sys._current_frames()[threading.main_thread().ident]
    stack = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(frame)]
    return any(file in name for file in files for name in stack)


def fail_at_call(number: int, calls: itertools.count, function, folder: Path, *arguments):
    """The function, which raises at one of its calls."""
    if next(calls) == number:
        (folder / "struck").touch()
        raise RuntimeError("the reward function fails here")
    return function(*arguments)


def main() -> None:
    fault, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    sys.argv = ["main.py", *arguments]
    graded.install(fault.get("grading", {}))
    rank = int(os.environ.get("RANK", 0))
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    (given,) = (a.partition("=")[2] for a in arguments if a.startswith("run.dir="))
    folder = Path(given)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    if rank == fault.get("rank", 0) and restarts < fault.get("starts", 1):
        if fault["do"] == "raise":
            countdown.reward_function = functools.partial(
                fail_at_call, fault["calls"], itertools.count(1), countdown.reward_function, folder
            )
        else:
            sys.addaudithook(Striker(fault, folder))
    if rank == 0 and restarts > 0:
        time.sleep(1)
    program.main()


if __name__ == "__main__":
    main()
