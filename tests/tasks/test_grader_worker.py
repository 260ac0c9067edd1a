"""The process that runs math-verify: it may hang, die or talk nonsense, and mixes no answers up."""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tasks import grader, grader_worker, reasoning_gym
from tasks.grader import MAX_LEAF_CHARS, grade
from tasks.grader_worker import FORGIVEN_AFTER, MAX_LOST_S, WORKER, Worker, WorkerLost

ROOT = Path(__file__).parents[2]
EASY = "(x+y+z+w)^{90}"
HARD = "((x+y)^2+2(x+y)(z+w)+(z+w)^2)^{45}"  # equal, which math-verify does not find out


def ask(worker: Worker, gold: str, prediction: str, *, timeout_s: float = 30.0) -> bool:
    return worker.ask(gold, prediction, deadline=worker.clock() + timeout_s)


@pytest.fixture(autouse=True)
def fresh_cache() -> Iterator[None]:
    grader.grade_answer.cache_clear()
    yield
    grader.grade_answer.cache_clear()


# The real worker


HANGING = [(r"\log 5", "12345678901234567890"), (r"x\ln 2", "12345678901234567890x")]
HANGING += [("x = 5", "x^{10^9} = 5"), ("x+y+z+w", "(x+y+z+w)^{600}-(x+y+z-w)^{600}")]


@pytest.mark.parametrize(("gold", "answer"), HANGING)
def test_a_wrong_value_is_refused_before_math_verify_hangs_on_it(gold: str, answer: str):
    assert grade(f"\\boxed{{{answer}}}", gold, timeout_s=5) is False


def test_a_hanging_worker_is_killed_counted_once_and_replaced():
    assert ask(WORKER, "a+b", "b+a")
    hanging = WORKER.process
    start = time.monotonic()
    result = grade(rf"\boxed{{{HARD}}}", EASY, timeout_s=0.5)
    assert 0.4 < time.monotonic() - start < 5
    assert result is None
    assert hanging.returncode == -signal.SIGKILL
    start = time.monotonic()
    assert grade(rf"\boxed{{{HARD}}}", EASY, timeout_s=0.5) == result
    assert time.monotonic() - start < 0.1, "the samples of a question pay for one time-out"
    assert ask(WORKER, "a+b", "b+a")
    assert not ask(WORKER, "a+b", "b-a")
    assert WORKER.process.pid != hanging.pid


def test_it_ends_with_its_stdin_sees_no_gpu_and_has_its_own_session():
    assert ask(WORKER, "a+b", "b+a")
    process = WORKER.process
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    if sys.platform == "linux":
        assert resource.prlimit(process.pid, resource.RLIMIT_AS)[0] == grader_worker.MEMORY_BYTES
        assert resource.prlimit(process.pid, resource.RLIMIT_FSIZE) == (0, 0)
        environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        assert b"CUDA_VISIBLE_DEVICES=" in environment
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert ask(WORKER, "a+b", "b+a")


def test_it_ends_by_itself_where_the_trainer_is_gone():
    """A hard question and a trainer killed by SIGKILL: nobody would end the worker."""
    assert ask(WORKER, "a+b", "b+a")
    request = {"id": 1, "arguments": [EASY, HARD], "limit_s": 1}
    WORKER.process.stdin.write(json.dumps(request).encode() + b"\n")
    assert WORKER.process.wait(timeout=30) == -signal.SIGALRM


def test_it_starts_in_any_folder_whatever_lies_there(tmp_path, monkeypatch):
    """A user's task may be called random.py: it must not stand in for the standard library."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    script = folder / "grader_worker.py"
    script.write_text(Path(grader_worker.__file__).read_text())
    for place in (tmp_path, folder):
        (place / "random.py").write_text("raise SystemExit('not the standard library')")
    monkeypatch.chdir(tmp_path)
    assert WORKER.command[-1] == os.path.abspath(grader_worker.__file__)
    worker = Worker([*WORKER.command[:-1], str(script)])
    assert ask(worker, "a+b", "b+a")
    worker.stop()


def test_it_runs_as_a_module_and_needs_none_of_ours():
    """Starting it takes the time of SymPy alone."""
    command = [sys.executable, "-m", "tasks.grader_worker"]
    request = json.dumps({"id": 1, "arguments": ["a+b", "b+a"], "limit_s": 60})
    result = subprocess.run(command, cwd=ROOT, input=request, capture_output=True, text=True)
    assert [json.loads(line)["reply"] for line in result.stdout.splitlines()] == [None, True]
    command = [sys.executable, "-c", "import sys, tasks.grader; print(*sys.modules)"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not {"engine", "torch", "sympy", "math_verify"} & set(result.stdout.split())


# Programs that behave as a worker might

READY = """
import json, os, sys, time
say = lambda text: print(text, flush=True)
say('{"id": 0, "reply": null}')
"""
HONEST = """
for line in sys.stdin:
    request = json.loads(line)
    gold, prediction = request["arguments"]
    time.sleep(0.4 * prediction.endswith("slow"))
    say(json.dumps({"id": request["id"], "reply": gold == prediction}))
"""
FAKES = {
    "garbage": 'for line in sys.stdin: say("garbage")',
    "no opinion": 'for line in sys.stdin: say(json.dumps({"id": json.loads(line)["id"]}))',
    "an old reply": "for line in sys.stdin: "
    'say(json.dumps({"id": json.loads(line)["id"] - 1, "reply": True}))',
    "not text": 'for line in sys.stdin: sys.stdout.buffer.write(b"\\xff\\n"); sys.stdout.flush()',
    "an endless line": 'for line in sys.stdin: print("x" * 10**6, end="", flush=True)',
    "an end": "sys.exit(1)",
    "silence": "for line in sys.stdin: pass",
    "a closed stdin": "os.close(0); time.sleep(60)",
    "a stdin that is never read": "time.sleep(60)",
}


def fake_command(code: str, *, ready: str = READY) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", ready + code]


def become_honest(worker: Worker) -> None:
    worker.command = fake_command(HONEST)
    worker.stop()


LONGEST = "\0" * MAX_LEAF_CHARS  # six bytes each in JSON


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
    worker = make_fake(FAKES[name])
    for _ in range(2):
        with pytest.raises(WorkerLost):
            ask(worker, LONGEST, LONGEST, timeout_s=0.2)
        assert worker.process is not None, "another one is there"
    become_honest(worker)
    assert ask(worker, "1", "1") is True


def test_slow_replies_kills_and_interrupts_never_mix_answers(make_fake):
    worker, rng = make_fake(HONEST), random.Random(0)
    lost = answered = 0
    for i in range(60):
        gold, prediction = rng.choice("ab"), rng.choice(["a", "b", "a", "b", "a slow"])
        event = rng.choice(["kill", "interrupt", "none", "none", "none"])
        if event == "kill" and worker.process:
            worker.process.kill()
        if event == "interrupt" and worker.last_id:  # a question asked, its reply never read
            worker.last_id += 1
            request = {"id": worker.last_id, "arguments": ["a", "a"], "limit_s": 9}
            with suppress(OSError):
                worker.process.stdin.write(json.dumps(request).encode() + b"\n")
        try:
            timeout_s = 0.1 if prediction.endswith("slow") else 30.0
            assert ask(worker, gold, prediction, timeout_s=timeout_s) == (gold == prediction), i
            answered += 1
        except WorkerLost:
            lost += 1
    assert answered > 20 and lost > 5


def test_a_worker_that_dies_during_a_question_loses_only_that_one(make_fake, monkeypatch):
    worker = make_fake('request = sys.stdin.readline(); "d" in request and sys.exit(3)' + HONEST)
    monkeypatch.setattr(grader, "WORKER", worker)
    start = time.monotonic()
    assert grade(r"\boxed{d+c}", "c+d", timeout_s=60.0) is None
    assert time.monotonic() - start < 30, "an end of file is seen at once"
    become_honest(worker)
    assert grade(r"\boxed{d+c+b}", "c+d", timeout_s=60.0) is False


def test_the_time_in_which_a_worker_starts_is_no_time_of_the_question(make_fake):
    worker = make_fake(HONEST, ready="import time; time.sleep(0.6)\n" + READY)
    assert ask(worker, "1", "1", timeout_s=0.5) is True


def test_a_worker_that_cannot_start_is_a_lost_question(make_fake):
    worker = make_fake("", ready="raise ImportError")
    with pytest.raises(WorkerLost):
        ask(worker, "1", "1")
    worker.command = ["/no/such/program"]
    with pytest.raises(WorkerLost):
        ask(worker, "1", "1")


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


SCORER = """
for line in sys.stdin:
    request = json.loads(line)
    answer = request["arguments"][-1]
    score = {"right": 1.0, "near": 0.998}.get(answer, 0.0)
    say(json.dumps({"id": request["id"], "reply": score}))
"""


def test_a_puzzle_is_solved_by_a_full_score_of_the_last_answer_alone(make_fake, monkeypatch):
    """A score that is nearly full is kept beside it, as a part that is not paid."""
    monkeypatch.setattr(reasoning_gym, "WORKER", make_fake(SCORER))
    example, options = reasoning_gym.parse_question("?"), reasoning_gym.Options(scorer_timeout_s=30)
    block = "<answer>{}</answer>".format
    for completion, answer, partial in (
        ("right", 1, 1),
        (block("near"), 0, 0.998),
        (block("wrong") + block("right"), 1, 1),
        (block("right") + block("wrong"), 0, 0),
        (f"{block('right')} </think> wrong", 0, 0),
    ):
        how = {"options": options, "num_tokens": 1}
        paid = reasoning_gym.reward_function(completion, example, **how)
        assert paid == {"answer": answer, "partial": partial, "timeout": 0.0}, completion


def test_a_puzzle_whose_scorer_runs_code_is_not_even_asked_for(make_fake, monkeypatch):
    monkeypatch.setattr(reasoning_gym, "WORKER", make_fake(SCORER))
    monkeypatch.setattr(reasoning_gym, "import_package", lambda name, key: None)
    for name in reasoning_gym.REFUSED:
        with pytest.raises(ValueError, match="its scorer runs what the model wrote as code"):
            reasoning_gym.parse_row(
                {"seed": 0, "index": 0}, options=reasoning_gym.Options(dataset=name)
            )
    assert reasoning_gym.WORKER.process is None
