r"""A grader in a process of its own, which can be killed whenever an answer takes too long.

The trainer's side is the class Worker; run as a script, this file is the process of math-verify or
of reasoning-gym. It is no fork of the trainer, which may hold a GPU and connections to other ranks.
It ends when its stdin is closed, so it does not outlive the trainer. Requests and replies are lines
of JSON:

    {"id": 7, "arguments": ["a+b", "b+a"], "limit_s": 6}
    {"id": 7, "reply": true}
"""

import functools
import importlib
import json
import math
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTUP_S = 60.0  # a worker may take so long to start: importing SymPy is slow on a busy disk
MAX_LOST_S = 120.0  # after so many seconds of waiting in vain no question is asked for a while
FORGIVEN_AFTER = 10.0  # seconds after which one lost second no longer counts
MEMORY_BYTES = 2 * 1024**3  # beside what the grader has mapped when it is loaded
MAX_REPLY_BYTES = 65_536
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
DECIMAL = re.compile(r"([0-9]*)\.([0-9]+)")  # a decimal, which SymPy would round

# The trainer's side


class WorkerLost(Exception):
    """The worker did not answer in time, died, or answered nonsense; another takes its place."""


class OutOfPatience(Exception):
    """Not even asked, since too much time was lost lately: the other ranks wait for 30 minutes."""


@dataclass
class Worker:
    """A process that answers one question at a time, started when the first one is asked.

    Several threads may ask: each holds the lock while its deadline runs.
    """

    command: list[str]
    process: subprocess.Popen | None = None
    last_id: int = 0  # 0 as long as the process has not said that it is ready
    startup_s: float = 0.0
    forgiven_at: float = 0.0  # when all the time that was lost is forgiven

    def __post_init__(self):
        """A fork's child may find the lock taken by a thread that it has not: it gets a new one."""
        self.lock = threading.Lock()
        os.register_at_fork(after_in_child=lambda: setattr(self, "lock", threading.Lock()))

    def clock(self) -> float:
        """The time in seconds. It stands still while a worker starts: no answer is to blame."""
        return time.monotonic() - self.startup_s

    def ask(self, *arguments: Any, deadline: float) -> Any:
        """The grader's reply to its arguments, if it comes before the clock shows `deadline`.

        Else WorkerLost or OutOfPatience. A request must fit into the pipe if nobody reads it.
        """
        asked_at = time.monotonic()
        if self.forgiven_at - asked_at >= MAX_LOST_S * FORGIVEN_AFTER:
            raise OutOfPatience
        try:
            if self.process is None or self.process.poll() is not None:
                self.start()
            if self.last_id == 0:
                waiting_since = time.monotonic()
                self.read_reply(self.clock() + STARTUP_S)
                self.startup_s += time.monotonic() - waiting_since
            self.last_id += 1
            limit_s = max(0, math.ceil(deadline - self.clock())) + 1
            request = {"id": self.last_id, "arguments": arguments, "limit_s": limit_s}
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            return self.read_reply(deadline)
        except (OSError, EOFError, ValueError) as error:  # TimeoutError is an OSError
            with suppress(OSError):  # the next question tries again
                self.start()  # so that another one gets ready while the caller goes on
            lost_s = time.monotonic() - asked_at
            self.forgiven_at = max(asked_at, self.forgiven_at) + lost_s * FORGIVEN_AFTER
            raise WorkerLost(f"{type(error).__name__}: {error}") from error

    def start(self) -> None:
        """Start a worker; one that is still there is killed."""
        self.stop()
        self.last_id = 0
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            start_new_session=True,  # ctrl-C is for the training process
            env=os.environ | ENVIRONMENT,
        )

    def stop(self) -> None:
        if self.process is not None:
            with self.process as process:  # closes its pipes and waits for its end
                process.kill()
            self.process = None

    def read_reply(self, deadline: float) -> Any:
        """The answer to the last request: a reply with another id is an error, never an answer."""
        poll = select.poll()
        poll.register(self.process.stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            if not poll.poll(max(0, math.ceil(1_000 * (deadline - self.clock())))):
                raise TimeoutError("no reply in time")
            chunk = self.process.stdout.read(MAX_REPLY_BYTES)
            if not chunk or len(line) > MAX_REPLY_BYTES:
                raise EOFError("the worker has ended, or never ends its line")
            line += chunk
        match json.loads(line):
            case {"id": self.last_id, "reply": reply}:
                return reply
        raise ValueError(f"not the reply to request {self.last_id}")


# One for each rank. -P keeps this folder, where a task may be called random.py, out of sys.path;
# -B keeps it from writing files, which its limits forbid.
WORKER = Worker([sys.executable, "-P", "-B", os.path.abspath(__file__)])


# The worker's side


def answer_requests(load: Callable[[], Callable[..., Any]]) -> None:
    """Answer requests, a line each, until stdin ends, by the grader that `load` imports."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints goes to stderr, not among the replies
    grader = load()  # slow, so the first request need not wait for it
    with suppress(ValueError, OSError):  # macOS has no such file, and does not limit memory
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        limit = mapped + MEMORY_BYTES  # CUDA's torch maps 3 GB when it is imported
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(json.dumps({"id": 0, "reply": None}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(request["limit_s"])  # ends this process, should the trainer be gone
        reply = grader(*request["arguments"])
        signal.alarm(0)
        print(json.dumps({"id": request["id"], "reply": reply}), file=replies, flush=True)


def math_verify_equal(gold: str, prediction: str) -> bool:
    """math-verify's opinion, where the values agree at points of our own, since it rounds.

    It takes i for a variable; here i is the imaginary unit. Only its LaTeX parser is used: that for
    plain expressions would run them as Python. Units are off: it would take letters for them.
    """
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify
    from sympy import I, Symbol

    normalization = NormalizationConfig(units=False, malformed_operators=True, nits=True)
    answers = []
    try:
        for text in (gold, prediction):
            text = DECIMAL.sub(lambda d: rf"\frac{{{d[1]}{d[2]}}}{{1{'0' * len(d[2])}}}", text)
            (answer,) = parse(
                f"\\boxed{{{text}}}",
                extraction_config=[LatexExtractionConfig(True, 0, normalization)],
                fallback_mode="no_fallback",
                extraction_mode="first_match",
                parsing_timeout=None,  # its alarm would cancel ours
            )
            letters = [x for x in answer.free_symbols if x.name == "i" or not x.is_real]
            meant = {x: I if x.name == "i" else Symbol(x.name, real=True) for x in letters}
            answers.append(answer.xreplace(meant))
        is_exact = "." in prediction and "." not in gold
        # By value first, which is cheap: math-verify hangs on x^{10^9} = 5 for x = 5.
        return has_same_values(*answers, is_exact) and verify(*answers, timeout_seconds=None)
    except Exception:
        return False


def has_same_values(gold: Any, prediction: Any, is_exact: bool) -> bool:
    """Whether two of SymPy's expressions, equations or inequalities agree at three fixed points.

    To 1e-100; or exactly, with `is_exact` and for a rational difference. Equations may be
    multiples.
    """
    from sympy import Eq, Rational, fraction, together
    from sympy.core.relational import Relational
    from sympy.logic.boolalg import BooleanAtom

    if gold == prediction:
        return not isinstance(gold, BooleanAtom)  # SymPy makes False of x^2 + i = 0
    letters = sorted(gold.free_symbols | prediction.free_symbols, key=str)
    points = [
        {x: Rational((-1) ** (i + i * k) * (10 * k + 7), bottom) for k, x in enumerate(letters)}
        for i, bottom in enumerate((11, 31, 101))
    ]
    if isinstance(gold, Eq) and isinstance(prediction, Eq):
        g, p = (fraction(together(each.lhs - each.rhs))[0] for each in (gold, prediction))
        gold, prediction = g * p.subs(points[0]), p * g.subs(points[0])
    elif isinstance(gold, Relational):
        gold, prediction = gold.gts - gold.lts, prediction.gts - prediction.lts
    gold, prediction = getattr(gold, "rhs", gold), getattr(prediction, "rhs", prediction)
    difference = gold - prediction
    tolerance = Rational(1, 10 ** (400 if is_exact else 100))  # no decimal has so many digits
    for point in points:
        error, scale = difference.subs(point).evalf(30, maxn=500), abs(gold.subs(point).evalf(30))
        if error != 0 and not abs(error) <= tolerance * (min(1, scale) or 1):
            return False
    rest = difference.doit()
    return rest == 0 or not rest.is_Rational


def ask_reasoning_gym(name: str, config: str, seed: int, index: int, answer: str | None) -> Any:
    """A dataset's question, its answer, and what went wrong; or the score of a model's answer."""
    try:
        dataset, entry_at = gym_dataset(name, config, seed)
        random.seed(index)  # list_functions draws from the numbers that all share
        entry = entry_at(index)
        if answer is None:
            return entry["question"], entry["answer"], ""
        score = float(dataset.score_answer(answer, entry))
        return score if 0 <= score <= 1 else 0.0
    except Exception as error:
        return (None, None, f"{type(error).__name__}: {error}") if answer is None else 0.0


@functools.lru_cache(2)
def gym_dataset(name: str, config: str, seed: int) -> tuple[Any, Callable[[int], dict]]:
    from reasoning_gym import create_dataset

    dataset = create_dataset(name, seed=seed, **json.loads(config))
    return dataset, functools.lru_cache(1_024)(dataset.__getitem__)


if __name__ == "__main__":
    if "reasoning_gym" in sys.argv:
        answer_requests(lambda: importlib.import_module("reasoning_gym") and ask_reasoning_gym)
    else:
        answer_requests(lambda: importlib.import_module("math_verify") and math_verify_equal)
