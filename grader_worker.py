r"""math-verify in a process of its own, which can be killed whenever an answer takes too long.

The trainer's side is the class Worker; run as a script, this file is the process. It is a new
program, never a fork of the trainer, which may hold a GPU and a network of ranks; it ends when its
stdin does, so with the trainer. A request is a line of JSON and so is its reply:

    {"id": 7, "gold": "a+b", "prediction": "b+a", "limit_s": 6}
    {"id": 7, "equal": true}
"""

import json
import math
import os
import resource
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress

STARTUP_S = 60.0  # importing SymPy takes a second, on a busy disk many
MAX_LOST_S = 120.0  # how long replies may be awaited in vain ...
REGAINED = 0.1  # ... of which so much comes back with each second
MEMORY_BYTES = 2 * 1024**3
MAX_REPLY_BYTES = 65_536
PIP_COMMAND = "pip install math-verify==0.9.0"


def require_math_verify() -> None:
    """ValueError with the command that installs what the worker needs, where it is missing."""
    try:
        import math_verify  # noqa: F401
    except ImportError as error:
        raise ValueError(f"math-verify is needed, but {error}: {PIP_COMMAND}") from error


# The trainer's side


class WorkerLost(Exception):
    """The worker did not answer in time, died, or answered nonsense; another takes its place."""


class OutOfPatience(Exception):
    """The worker was not even asked, since too much time was lost on it lately."""


class Deadline:
    """The moment by which an answer must be graded."""

    def __init__(self, timeout_s: float) -> None:
        self.ends_at = time.monotonic() + timeout_s

    def left_s(self) -> float:
        return self.ends_at - time.monotonic()


class Patience:
    """Seconds that may still be lost on replies that never come.

    Without a limit 256 answers that all hang would hold a step up for 20 minutes; the other ranks
    wait for it, and give up after 30.
    """

    def __init__(self) -> None:
        self.seconds, self.counted_at = MAX_LOST_S, time.monotonic()

    def left_s(self) -> float:
        now = time.monotonic()
        self.seconds = min(MAX_LOST_S, self.seconds + REGAINED * (now - self.counted_at))
        self.counted_at = now
        return self.seconds


class Worker:
    """A process that answers one question at a time, started when the first one is asked."""

    def __init__(self, command: list[str]) -> None:
        self.command = command
        self.process: subprocess.Popen | None = None
        self.is_ready = False
        self.unread = b""
        self.last_id = 0
        self.patience = Patience()

    def ask(self, gold: str, prediction: str, *, deadline: Deadline) -> bool:
        """math-verify's opinion; raises WorkerLost where there is none by the deadline.

        Texts must be short, so that a request fits into the pipe even if nobody reads it.
        """
        if self.patience.left_s() <= 0:
            raise OutOfPatience
        started_at = time.monotonic()
        try:
            self.await_start(deadline)
            return self.exchange(gold, prediction, deadline)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            self.replace()
            self.patience.seconds -= time.monotonic() - started_at
            raise WorkerLost(f"{type(error).__name__}: {error}") from error

    def exchange(self, gold: str, prediction: str, deadline: Deadline) -> bool:
        """Send a request and read its reply."""
        self.last_id += 1
        limit_s = max(0, math.ceil(deadline.left_s())) + 1
        request = {"id": self.last_id, "gold": gold, "prediction": prediction, "limit_s": limit_s}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        return self.read_reply(deadline)

    def await_start(self, deadline: Deadline) -> None:
        """Wait for the first line of a new worker, a reply to no question; moves the deadline."""
        if self.process is None or self.process.poll() is not None:
            self.stop()
            self.start()
        if not self.is_ready:
            start = Deadline(STARTUP_S)
            self.last_id = 0
            self.read_reply(start)
            self.is_ready = True
            deadline.ends_at += STARTUP_S - start.left_s()

    def start(self) -> None:
        self.unread, self.is_ready = b"", False
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # ctrl-C is for the training process
            env=os.environ
            | {
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": "1",
                "PYTHONHASHSEED": "0",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
        )

    def read_reply(self, deadline: Deadline) -> bool:
        """The answer to the last request: a reply with another id is an error, never an answer."""
        reply = json.loads(self.read_line(deadline))
        if not isinstance(reply, dict) or reply.get("id") != self.last_id:
            raise ValueError(f"not the reply to request {self.last_id}")
        if not isinstance(reply.get("equal"), bool):
            raise ValueError("no opinion in the reply")
        return reply["equal"]

    def read_line(self, deadline: Deadline) -> bytes:
        descriptor = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self.unread:
            if not poll.poll(max(0, math.ceil(deadline.left_s() * 1000))):
                raise TimeoutError("no reply in time")
            chunk = os.read(descriptor, MAX_REPLY_BYTES)
            if not chunk or len(self.unread) > MAX_REPLY_BYTES:
                raise EOFError("the worker has ended, or never ends its line")
            self.unread += chunk
        line, _, self.unread = self.unread.partition(b"\n")
        return line

    def replace(self) -> None:
        """Kill the worker and start another, which gets ready while the caller goes on."""
        self.stop()
        with suppress(OSError):  # the next question tries again
            self.start()

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.process, self.is_ready = None, False


WORKER = Worker([sys.executable, os.path.abspath(__file__)])  # one per rank


# The worker's side


def serve() -> None:
    """Answer requests, a line each, until stdin ends."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints is no reply
    import math_verify  # noqa: F401  (slow, so that the first request need not wait for it)

    with suppress(ValueError, OSError):  # macOS does not limit memory
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"id": 0, "equal": False}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(request["limit_s"])  # ends this process, should the trainer be gone
        equal = math_verify_equal(request["gold"], request["prediction"])
        signal.alarm(0)
        print(json.dumps({"id": request["id"], "equal": equal}), file=replies, flush=True)


def math_verify_equal(gold: str, prediction: str) -> bool:
    """math-verify's opinion, with a True between constants checked again, since it rounds.

    Its LaTeX parser alone: the one for plain expressions would run them as Python.
    """
    from math_verify import LatexExtractionConfig, parse, verify

    try:
        parsed = [
            parse(
                f"\\boxed{{{text}}}",
                extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
                fallback_mode="no_fallback",
                extraction_mode="first_match",
                parsing_timeout=None,  # its alarm would cancel ours
            )
            for text in (gold, prediction)
        ]
        if not all(parsed) or not verify(*parsed, timeout_seconds=None):
            return False
        return is_same_constant(parsed[0][0], parsed[1][0])
    except Exception:
        return False


def is_same_constant(gold: object, prediction: object) -> bool:
    """False for two constants that differ, by however little; True for what is no constant.

    Exact where the difference is rational, else to 1e-12.
    """
    from sympy import Expr

    if not (isinstance(gold, Expr) and isinstance(prediction, Expr)):
        return True
    if gold == prediction or gold.free_symbols or prediction.free_symbols:
        return True
    difference = (gold - prediction).doit()
    if difference.is_Rational:
        return difference == 0
    scale = abs(gold.evalf(30))
    return bool(abs(difference.evalf(30)) <= 1e-12 * (min(1, scale) or 1))


if __name__ == "__main__":
    serve()
