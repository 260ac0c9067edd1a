"""The process that runs math-verify: it may hang, die or talk nonsense, and mixes no answers up."""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from harness import make_config, table

from tasks import grader, grader_worker, math500, reasoning_gym
from tasks.grader import MAX_LEAF_CHARS, grade
from tasks.grader_worker import FORGIVEN_AFTER, MAX_LOST_S, WORKER, Worker, WorkerLost

EASY = "(x+y+z+w)^{90}"
HARD = "((x+y)^2+2(x+y)(z+w)+(z+w)^2)^{45}"  # equal, which math-verify does not find out


def ask(worker: Worker, gold: str, prediction: str, *, timeout_s: float = 30.0) -> bool:
    return worker.ask(gold, prediction, deadline=worker.clock() + timeout_s)


@pytest.fixture(autouse=True)
def fresh_cache() -> None:
    grader.grade_answer.cache_clear()


def test_a_hanging_worker_is_killed_counted_once_and_replaced():
    assert ask(WORKER, "a+b", "b+a")
    hanging = WORKER.process
    start = time.monotonic()
    assert grade(rf"\boxed{{{HARD}}}", EASY, timeout_s=0.5) is None
    assert 0.4 < time.monotonic() - start < 5
    assert hanging.returncode == -signal.SIGKILL
    start = time.monotonic()
    assert grade(rf"\boxed{{{HARD}}}", EASY, timeout_s=0.5) is None
    assert time.monotonic() - start < 0.1, "the samples of a question pay for one time-out"
    assert ask(WORKER, "a+b", "b+a")
    assert not ask(WORKER, "a+b", "b-a")
    assert WORKER.process.pid != hanging.pid


def test_it_has_its_own_session_and_limits_and_ends_with_its_trainer():
    """By its alarm, if a trainer is killed by SIGKILL while a hard question is being decided."""
    assert ask(WORKER, "a+b", "b+a")
    process = WORKER.process
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    if sys.platform == "linux":
        pages = int(Path(f"/proc/{process.pid}/statm").read_text().split()[0])
        limit = resource.prlimit(process.pid, resource.RLIMIT_AS)[0]
        # What it had mapped when it was ready, and 2 GiB; it has mapped hardly less since.
        assert 0 < limit - grader_worker.MEMORY_BYTES < 1.1 * pages * resource.getpagesize()
        assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == (0, 0)
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=" in environment
    request = {"id": 1, "arguments": ["a+b", "b+a"], "limit_s": 1}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    assert json.loads(process.stdout.readline())["reply"]
    time.sleep(1.1)
    assert process.poll() is None  # it may idle
    request["arguments"] = [EASY, HARD]
    process.stdin.write(json.dumps(request).encode() + b"\n")
    assert process.wait(timeout=30) == -signal.SIGALRM
    assert ask(WORKER, "a+b", "b+a")
    WORKER.process.stdin.close()
    assert WORKER.process.wait(timeout=30) == 0
    assert ask(WORKER, "a+b", "b+a")


def test_a_time_out_is_counted_and_earns_nothing(monkeypatch):
    limits = []

    def stopped(completion: str, gold: str, *, timeout_s: float) -> None:
        limits.append(timeout_s)

    monkeypatch.setattr(math500, "grade", stopped)
    config = make_config("task.name=math500", "task.train=a/b", "task.grader_timeout_s=2.5")
    assert config.task.reward_weights == {"answer": 1.0, "timeout": 0.0}
    for options in (math500.Options(), config.task):
        parts = math500.reward_function("x", {"answer": "1"}, options=options, num_tokens=0)
        assert parts == {"answer": 0.0, "timeout": 1.0}
    assert limits == [5.0, 2.5]


READY = """
import json, os, sys, time
say = lambda text: print(text, flush=True)
say('{"id": 0, "reply": null}')
"""
HONEST = """
for line in sys.stdin:
    request = json.loads(line)
    *_, gold, prediction = request["arguments"]
    say(json.dumps({"id": request["id"], "reply": gold == prediction}))
"""
SCORER = HONEST.replace("gold == prediction", '{"right": 1.0, "near": 0.998}.get(prediction, 0)')
FAKES = {
    "no start": "raise ImportError",
    "garbage": 'for line in sys.stdin: say("garbage")',
    "an old reply": HONEST.replace('request["id"]', 'request["id"] - 1'),
    "not text": 'for line in sys.stdin: sys.stdout.buffer.write(b"\\xff\\n"); sys.stdout.flush()',
    "an endless line": 'for line in sys.stdin: print("x" * 10**6, end="", flush=True)',
    "an end": "sys.exit(1)",
    "silence": "for line in sys.stdin: pass",
    "a closed stdin": "os.close(0); time.sleep(60)",
}


def fake_command(code: str, *, ready: str = READY) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", ready + code]


def become_honest(worker: Worker) -> None:
    worker.command = fake_command(HONEST)
    worker.stop()


@pytest.fixture
def make_fake() -> Iterator[Callable[..., Worker]]:
    workers = []

    def make(code: str, *, ready: str = READY) -> Worker:
        workers.append(Worker(fake_command(code, ready=ready)))
        return workers[-1]

    yield make
    for worker in workers:
        worker.stop()


@pytest.mark.parametrize("name", FAKES)
def test_a_worker_that_talks_nonsense_is_replaced(name: str, make_fake):
    worker = make_fake(FAKES[name], ready="" if name == "no start" else READY)
    longest = "\0" * MAX_LEAF_CHARS  # six bytes each in JSON
    for _ in range(2):
        with pytest.raises(WorkerLost):
            ask(worker, longest, longest, timeout_s=0.2)
        assert worker.process is not None, "another one is there"
    become_honest(worker)
    assert ask(worker, "1", "1") is True


def test_the_time_in_which_a_worker_starts_is_no_time_of_the_question(make_fake):
    worker = make_fake(HONEST, ready="import time; time.sleep(0.6)\n" + READY)
    assert ask(worker, "1", "1", timeout_s=0.5) is True and worker.startup_s > 0.5


def test_time_outs_cannot_hold_up_a_step_for_long(make_fake, monkeypatch):
    """However many answers hang: after MAX_LOST_S the worker is not asked for a while."""
    worker = make_fake(FAKES["silence"])
    monkeypatch.setattr(grader, "WORKER", worker)
    worker.forgiven_at = time.monotonic() + FORGIVEN_AFTER * (MAX_LOST_S - 0.5)
    start = time.monotonic()
    grades = [grade(f"\\boxed{{a+{i}}}", "a+b", timeout_s=0.2) for i in range(100)]
    assert set(grades) == {None}
    assert time.monotonic() - start < 3
    with pytest.raises(grader_worker.OutOfPatience):
        ask(worker, "a", "b", timeout_s=0.2)
    become_honest(worker)
    worker.forgiven_at -= 10  # as if so many seconds had gone by
    assert grade(r"\boxed{a+99}", "a+b", timeout_s=30) is False, "it was not remembered"


def test_a_second_lost_is_forgiven_after_ten(make_fake):
    """And the ten seconds are added to those of the seconds that were lost before."""
    worker = make_fake(FAKES["silence"])
    for ahead_s in (0, 1_000):
        start = time.monotonic()
        worker.forgiven_at = start + ahead_s
        with pytest.raises(WorkerLost):
            ask(worker, "a", "b", timeout_s=0.5)
        added_s = worker.forgiven_at - start - ahead_s
        assert 0.4 * FORGIVEN_AFTER < added_s <= (time.monotonic() - start) * FORGIVEN_AFTER


def test_a_python_without_math_verify_is_told_so(make_fake, monkeypatch):
    """Each answer counted as a time-out, and nothing said why."""
    monkeypatch.setattr(grader, "WORKER", make_fake(FAKES["an end"]))
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ModuleNotFoundError, match="pip install math-verify"):
        grade(r"\boxed{\sqrt{8}}", r"2\sqrt{2}", timeout_s=60.0)


def test_threads_and_a_forks_child_ask_one_after_the_other(make_fake, monkeypatch):
    """Bug: of 8 right answers from 8 threads none was paid, and 7 processes stayed behind."""
    worker, starts = make_fake(HONEST.replace("gold == prediction", "not time.sleep(0.1)")), []
    monkeypatch.setattr(grader, "WORKER", worker)
    start, is_taken, may_end = worker.start, threading.Event(), threading.Event()
    monkeypatch.setattr(worker, "start", lambda: starts.append(start()))

    def paid(n: int) -> bool | None:
        return grade(f"\\boxed{{{n}+x}}", f"x+{n}", timeout_s=5)

    def hold_lock() -> None:
        with worker.lock:
            is_taken.set()
            may_end.wait()

    with ThreadPoolExecutor(8) as threads:
        assert [*threads.map(paid, range(8))] == [True] * 8 and len(starts) == 1
        threads.submit(hold_lock)
        assert is_taken.wait(30)
        if (child := os.fork()) == 0:
            signal.alarm(30)  # of a child that waits for a lock that nobody gives back
            os._exit(paid(9) is not True)
        may_end.set()
    assert os.waitpid(child, 0)[1] == 0 and paid(10)


def test_a_puzzle_is_solved_by_a_full_score_of_the_last_answer_alone(make_fake, monkeypatch):
    """A score that is nearly full is kept beside it, as a part that is not paid."""
    monkeypatch.setattr(reasoning_gym, "WORKER", make_fake(SCORER))
    how = {"options": reasoning_gym.Options(scorer_timeout_s=30), "num_tokens": 1}
    for completion, (answer, partial) in table("tasks/cases.yaml")["scores"].items():
        paid = reasoning_gym.reward_function(completion, reasoning_gym.parse_question("?"), **how)
        assert paid == {"answer": answer, "partial": partial, "timeout": 0.0}, completion


def test_a_puzzle_whose_scorer_runs_code_is_not_even_asked_for(make_fake, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "WORKER", make_fake(SCORER))
    monkeypatch.setattr(reasoning_gym, "import_package", lambda name, key: None)
    for name in reasoning_gym.REFUSED:
        options = reasoning_gym.Options(dataset=name)
        with pytest.raises(ValueError, match="its scorer runs what the model wrote as code"):
            reasoning_gym.parse_row({"seed": 0, "index": 0}, options=options)
    assert reasoning_gym.WORKER.process is None
