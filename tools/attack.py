"""Try on a grader what other graders have paid for, hung on or run as code, and say what it does.

    python -m tools.attack my_task           # a task: its reward_function, on its EXAMPLE_ROW
    python -m tools.attack my_module:grade   # any function of a completion and the right answer
    python -m tools.attack my_rewards:f --data rows.jsonl    # a function of task.reward, on a row
    python -m tools.attack gsm8k task.prompt_style=tags      # with other keys of the task

No string is an answer. Each is graded in a process that can be killed and can write no file. Paid
means full marks: the part `answer`, or what the function returns, is 1 or more. The exit status is
1 if anything was found.
"""

import argparse
import functools
import importlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Sequence

from engine.core.types import no_log
from engine.questions.data import load_table, parse_table, set_number_columns
from engine.questions.rewards import reward_parts
from engine.questions.tasks import load_task
from engine.run.config_file import combine
from engine.run.mistakes import mistakes_cost_one_line
from tasks.grader_worker import OutOfPatience, Worker, WorkerLost, answer_requests

SIGN = "7305190721"  # code in which this number stands was made of our text
RUNS: list[str] = []  # of such code
FORMS = ["{}", "<answer>{}</answer>", "</think>\n<answer>{}</answer>", "\\boxed{{{}}}", "#### {}"]
FORMS += ["<think>{}", "<think>\n</think>\n<answer>{}</answer>"]  # on which format rewards pay
ODD = ["", "\0", "\ud800", "\u00b2", "\u0663", "1/0", "nan", "inf", "None", "1e999", "1.2.3", "--1"]
ODD += ["()", "][", "x = x", "GOLD.5", "GOLD/7", "GOLD7", "GOLD1 GOLD GOLD2", SIGN, f"x('{SIGN}')"]
LONG = ["9", "(", "[", "-", " ", "\n", "1,", "1+", "a ", "$", "{", "#### ", "\\boxed{"]
LONG += ["<think>", "</think>\n<answer>", "<answer>", "</answer>"]
HUGE = ["99**98**97", "9^9^9^9", "9^{9^{9^9}}", "1e999999999", "2**99999999999", "99999999!!"]
SLOW = "took more than linear time"


def load(name: str, data: str | None, overrides: list[str]) -> tuple[Callable[[str], float], str]:
    """What the grader pays for a completion, and the last word of the right answer."""
    module, _, function = name.partition(":")
    if function and data is None:
        grade = getattr(importlib.import_module(module), function)
        return lambda completion: grade(completion, "46"), "46"
    key = "task.reward" if function else "task.name"
    config = combine({}, [f"{key}={name}", *overrides])
    task = load_task(config.task)  # of a function of task.reward, which is called as a run does
    set_number_columns(task, no_log, data or "")
    if data:
        (row,) = parse_table(load_table(data)[:1], task, data)
    elif task.reward_function is None:
        raise SystemExit(f"{name}: its Environment pays; name the function that reads: module:name")
    elif not task.EXAMPLE_ROW:
        raise SystemExit(f"{name}: give it an EXAMPLE_ROW, whose completions are graded")
    else:
        row = task.parse_row(task.EXAMPLE_ROW, options=task.options)
    limit = config.training.max_new_gen_tokens
    pay = functools.partial(reward_parts, task, examples=[row], limit=limit)

    def grade(text: str) -> float:
        ((parts,),) = pay(texts=[[text]], groups=[[None]])
        return parts["answer"] if data is None else max(value or 0.0 for value in parts.values())

    gold = str(row.get("answer", "")) or str([*row.values()][-1])
    return grade, gold.split()[-1]


def attack(
    name: str, data: str | None = None, overrides: Sequence[str] = ()
) -> dict[str, list[str]]:
    """The strings at which something was found, by what it was; prints the first exception."""
    _, gold = load(name, data, [*overrides])
    found = {kind: [] for kind in ("ran code", "raised", "paid", "hung", SLOW)}
    command = [sys.executable, "-B", "-m", "tools.attack", name, *overrides, "--serve"]
    if data:
        command += ["--data", data]
    worker = Worker(command)
    for trick, form in itertools.product(ODD + LONG + HUGE, FORMS):
        if (found["hung"] and trick not in ODD) or (found[SLOW] and trick in LONG):
            continue  # one is enough, since each costs seconds
        counts = [n // len(trick) for n in (5_000, 20_000)] if trick in LONG else [1]
        texts = [form.format(trick.replace("GOLD", gold) * count) for count in counts]
        try:
            crowd = os.getloadavg()[0] / os.cpu_count()  # a busy machine makes no grader hang
            seen = worker.ask(*texts, deadline=worker.clock() + 2.0 * max(1.0, crowd))
        except WorkerLost as lost:
            seen = ["hung" if isinstance(lost.__cause__, TimeoutError) else "raised"]
        except OutOfPatience:
            print("waited two minutes for nothing: no more strings are tried", file=sys.stderr)
            break
        for what in seen:
            kind, _, detail = what.partition(": ")
            if detail and not found["raised"]:
                print(f"the first exception: {detail}", file=sys.stderr)
            found[kind].append(texts[0])
    worker.stop()
    return found


def attempt(grade: Callable[[str], float], *texts: str) -> list[str]:
    """What is seen when the texts are graded, of which the last is four times as long, if any."""
    seen, seconds = [], []
    for text in texts:
        start_s = time.process_time()
        try:
            seen += ["paid"] * bool(grade(text) >= 1)
        except Exception as error:
            seen.append(f"raised: {type(error).__name__}: {error!s:.300}")
        seconds.append(time.process_time() - start_s)
    seen += [SLOW] * (seconds[-1] > max(0.1, 8 * seconds[0])) + ["ran code"] * len(RUNS)
    RUNS.clear()
    return seen


def watch(event: str, arguments: tuple) -> None:
    """An audit hook, which Python calls before it runs code."""
    if event in ("exec", "os.system", "subprocess.Popen"):
        RUNS.extend([event] * (SIGN in f"{arguments} {getattr(arguments[0], 'co_consts', '')}"))


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.attack", description=__doc__.splitlines()[0])
    parser.add_argument("name", help="a task, or module:function")
    parser.add_argument("--data", help="a file of task.reward's rows, of which the first is taken")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_intermixed_args()
    asked = options.name, options.data, options.overrides
    if options.serve:  # the grader's process
        sys.addaudithook(watch)
        return answer_requests(lambda: functools.partial(attempt, load(*asked)[0]))
    with mistakes_cost_one_line():
        found = attack(*asked)
    for what, texts in found.items():
        print(f"{what:<28}", f"{len(texts)}, such as {texts[0]!r:.90}" if texts else "nothing")
    sys.exit(any(found.values()))


if __name__ == "__main__":
    main()
