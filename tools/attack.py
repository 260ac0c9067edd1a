"""Try on a grader what other graders have paid for, hung on or run as code, and say what it does.

    python -m tools.attack my_task           # a task: its reward_function, on its EXAMPLE_ROW
    python -m tools.attack my_module:grade   # any function of a completion and the right answer

No string is an answer. Each is graded in a process that can be killed and can write no file. Paid
means full marks: the part `answer`, or what the function returns, is 1 or more. The exit status is
1 if anything was found. Finding nothing is no proof: these are the tricks that are known.
"""

import functools
import importlib
import itertools
import sys
import time
from collections.abc import Callable

from engine.questions.tasks import load_task, reward_parts, schema
from tasks.grader_worker import Worker, WorkerLost, serve

SIGN = "7305190721"  # code in which this number stands was made of our text
RUNS: list[str] = []  # of such code
FORMS = ["{}", "<answer>{}</answer>", "</think>\n<answer>{}</answer>", "\\boxed{{{}}}", "#### {}"]
ODD = ["", "\0", "\ud800", "\u00b2", "\u0663", "1/0", "nan", "inf", "None", "1e999", "1.2.3", "--1"]
ODD += ["()", "][", "x = x", "GOLD.5", "GOLD/7", "GOLD7", "GOLD1 GOLD GOLD2", SIGN, f"x('{SIGN}')"]
LONG = ["9", "(", "[", "-", " ", "\n", "1,", "1+", "a ", "$", "{", "#### ", "\\boxed{"]
LONG += ["<think>", "</think>\n<answer>", "<answer>", "</answer>"]
HUGE = ["99**98**97", "9^9^9^9", "9^{9^{9^9}}", "1e999999999", "2**99999999999", "99999999!!"]
SLOW = "took more than linear time"


def load(name: str) -> tuple[Callable[[str], float], str]:
    """What the grader pays for a completion, and the last word of the right answer."""
    module, is_function, function = name.partition(":")
    if is_function:
        grade = getattr(importlib.import_module(module), function)
        return lambda completion: grade(completion, "46"), "46"
    task = load_task(module)
    if not hasattr(task, "reward_function"):
        raise SystemExit(f"{name}: its Environment pays; name the function that reads: module:name")
    if not task.EXAMPLE_ROW:
        raise SystemExit(f"{name}: give it an EXAMPLE_ROW, whose completions are graded")
    options = schema(task)().task
    example = task.parse_row(task.EXAMPLE_ROW, options=options)
    gold = str(example.get("answer") or [*example.values()][-1]).split()[-1]
    pay = functools.partial(reward_parts, task, example=example, options=options)
    return lambda text: pay(texts=[text], completions=[None])[0]["answer"], gold


def attack(name: str) -> dict[str, list[str]]:
    """The strings at which something was found, by what it was."""
    (_, gold), found = load(name), {k: [] for k in ("ran code", "raised", "paid", "hung", SLOW)}
    worker = Worker([sys.executable, "-B", "-m", "tools.attack", name, "--serve"])
    for trick, form in itertools.product(ODD + LONG + HUGE, FORMS):
        if (found["hung"] and trick not in ODD) or (found[SLOW] and trick in LONG):
            continue  # one is enough, since each costs seconds
        counts = [n // len(trick) for n in (5_000, 20_000)] if trick in LONG else [1]
        texts = [form.format(trick.replace("GOLD", gold) * count) for count in counts]
        try:
            seen = worker.ask(*texts, deadline=worker.clock() + 2.0)
        except WorkerLost as lost:
            seen = ["hung" if isinstance(lost.__cause__, TimeoutError) else "raised"]
        for what in seen:
            found[what].append(texts[0])
    worker.stop()
    return found


def attempt(grade: Callable[[str], float], *texts: str) -> list[str]:
    """What is seen when the texts are graded, of which the last is four times as long, if any."""
    seen, seconds = [], []
    for text in texts:
        start_s = time.process_time()
        try:
            seen += ["paid"] * bool(grade(text) >= 1)
        except Exception:
            seen.append("raised")
        seconds.append(time.process_time() - start_s)
    seen += [SLOW] * (seconds[-1] > max(0.1, 8 * seconds[0])) + ["ran code"] * len(RUNS)
    RUNS.clear()
    return seen


def watch(event: str, arguments: tuple) -> None:
    """An audit hook, which Python calls before it runs code."""
    if event in ("exec", "os.system", "subprocess.Popen"):
        RUNS.extend([event] * (SIGN in f"{arguments} {getattr(arguments[0], 'co_consts', '')}"))


if __name__ == "__main__":
    if "--serve" in sys.argv:  # the grader's process
        sys.addaudithook(watch)
        serve(lambda: functools.partial(attempt, load(sys.argv[1])[0]))
    else:
        found = attack(sys.argv[1])
        for what, texts in found.items():
            print(f"{what:<28}", f"{len(texts)}, such as {texts[0]!r:.90}" if texts else "nothing")
        sys.exit(any(found.values()))
