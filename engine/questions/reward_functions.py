"""A task made of reward functions in TRL's form, `f(completions, **columns) -> list[float]`.

They are called as trl.GRPOTrainer 1.16 calls them, except that what belongs to its trainer
(trainer_state, log_extra, environments) is not passed. Those of `async def` are awaited together.
"""

import asyncio
import atexit
import contextlib
import copy
import inspect
import json
import os
import selectors
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, wait
from typing import Any

import numpy as np
from pydantic import model_validator

from engine.core.config import ConfigError, Section, TaskSettings
from engine.core.signals import leave_if_signalled
from engine.core.types import Parts, Questions, Sums
from engine.core.user_file import RewardError, find_function, line_of, naming_mistakes
from engine.questions.contract import Functions, Task, is_reward
from engine.questions.tables import with_numbers

TIMEOUT = "timeout"  # the part that says which calls took too long
CLOSE_S = 5.0  # seconds for tasks to end in, at the end of a process
LOST_S = 60.0  # seconds in which nothing can bring what is awaited, before the run ends
FOR_EVER_S = 1e9


def find_functions(names: list[str]) -> Functions:
    """The functions, each given as module:function, with their files, by their own names."""
    functions = {}
    for named in names:
        file, function = find_function(named, "task.reward")
        name = named.partition(":")[2]
        where = line_of(file, function=function)
        if inspect.getfullargspec(function).varkw is None:
            raise ConfigError(
                f"{where}: write def {name}(completions, **kwargs): every column comes by name"
            )
        if name in (*functions, TIMEOUT):  # which counts the calls that took too long
            raise ConfigError(f"{where}: {name} is the name of another part: rename this function")
        functions[name] = file, function
    return functions


def form_of(columns: dict) -> str:
    """Which of TRL's two forms a function got its completions in, and why."""
    if isinstance(columns["completions"][0], str):
        return " (each completion is a text, since no row has messages in a column prompt)"
    return " (each completion is a list of messages, since the rows' column prompt holds messages)"


class RewardTask(Task):
    """A task made of reward functions and the rows that they judge."""

    class Options(Section):
        @model_validator(mode="before")
        @classmethod
        def validate_on_the_training_file(cls, values: dict) -> dict:
            """One file serves both, unless task.eval names another."""
            if isinstance(values, dict) and values.get("eval", "generated") == "generated":
                return values | {"eval": values.get("train", "generated")}
            return values

    def __init__(self, functions: Functions, options: TaskSettings) -> None:
        (file, _), *_ = functions.values()
        called = {name: (f, type(f).__call__) for name, (_, f) in functions.items()}  # or objects
        self.awaited = [n for n in called if any(map(inspect.iscoroutinefunction, called[n]))]
        late = [TIMEOUT] if self.awaited else []
        super().__init__(file, {"REWARD_PARTS": (*functions, *late)}, options)
        self.functions = functions
        self.logged: dict[str, list[float]] = defaultdict(list)  # by log_metric, since last taken

    def parse_row(self, row: dict, *, options: TaskSettings) -> dict:
        """The row as it is, if there is a prompt in it or task.prompt makes one of it."""
        prompt = row.get("prompt")
        is_there = isinstance(prompt, str | list) and str(prompt or "").strip()
        if options.prompt is None and not is_there:
            names = ", ".join(f"{{{name}}}" for name in row)
            raise ValueError(
                f"no text or messages in a column prompt: add one, or word task.prompt with {names}"
            )
        return row

    def parse_question(self, text: str) -> dict:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(
                "write a row with its columns as JSON, such as "
                '{"prompt": "What is 2 + 2?", "answer": "4"}'
            ) from error

    def generate_prompt(self, example: dict, *, options: TaskSettings) -> list[dict] | str:
        """The column `prompt`, as TRL takes it; what task.prompt words is a user's message."""
        self.parse_row(example, options=options)  # a person may have typed it
        prompt = example.get("prompt")
        if options.prompt is None or isinstance(prompt, list):
            return prompt
        return [{"role": "user", "content": options.prompt}]

    def reward_groups(
        self,
        texts: list[list[str]],
        examples: Questions,
        groups: list[list],
        limit: int,
    ) -> list[list[Parts]]:
        """The parts of the reward of all completions, by one call of each function a question.

        Each also gets, as `rewards`, what those that are named before it have paid, by name.
        """
        columns = [
            self.columns_of(*of_question, limit)
            for of_question in zip(texts, examples, groups, strict=True)
        ]
        parts = [[{} for _ in group] for group in groups]
        for name in self.functions:
            if name in self.awaited:
                paid = run(self.call_together(name, columns, examples))
            else:
                paid = [self.call(name, *one) for one in zip(columns, examples, strict=True)]
            for of_question, values, column in zip(parts, paid, columns, strict=True):
                is_late = values is None
                values = [None] * len(of_question) if is_late else values
                column["rewards"] |= {name: values}
                for row, value in zip(of_question, values, strict=True):
                    row[name] = value
                    if TIMEOUT in self.REWARD_PARTS:
                        row[TIMEOUT] = max(row.get(TIMEOUT, 0.0), float(is_late))
        return parts

    def columns_of(self, texts: list[str], example: dict, completions: list, limit: int) -> dict:
        """What the functions get of a question, by name: lists with an entry a completion.

        Prompts and completions are messages where the row holds messages, and plain text elsewhere.
        """
        if isinstance(example.get("prompt"), list):
            prompt = self.pose(example)
            written = [[{"role": "assistant", "content": text}] for text in texts]
        else:
            prompt = self.question_text(example)
            written = texts
        columns = {
            name: [value] * len(texts)
            for name, value in with_numbers(example, self.number_columns).items()
            if name not in ("prompt", "completion")
        }
        return columns | {
            "prompts": [prompt] * len(texts),
            "completions": written,
            "completion_ids": [[*c.token_ids] if c else [0] for c in completions],  # an end
            "max_completion_length": limit,
            "rewards": {},
        }

    def call(self, name: str, columns: dict, example: dict) -> list[float | None]:
        """What a function, given a copy, pays for each completion of a question."""
        file, function = self.functions[name]
        with naming_mistakes(file, function, example, name=name, form=form_of(columns)):
            paid = function(**copy.deepcopy(columns), log_metric=self.log_metric)
        return self.checked(paid, name, columns, example)

    async def call_together(
        self, name: str, columns: list[dict], examples: Questions
    ) -> list[list[float | None] | None]:
        """The same of all questions, by an async function; None where it took too long."""
        free = asyncio.Semaphore(self.options.concurrency)

        async def in_time(columns: dict, example: dict) -> list[float | None] | None:
            async with free:
                running = asyncio.ensure_future(self.call_async(name, columns, example))
                try:
                    await asyncio.wait([running], timeout=self.options.reward_timeout)
                finally:  # also where a signal ends the evaluation
                    is_late = running.cancel()
                if not is_late and running.cancelled():
                    raise self.error(name, "was cancelled, or something that it awaits", example)
                return None if is_late else running.result()

        return await asyncio.gather(*map(in_time, columns, examples))

    async def call_async(self, name: str, columns: dict, example: dict) -> list:
        """As `call`, of an async function; a sys.exit() that got past it would end the process."""
        file, function = self.functions[name]
        with naming_mistakes(file, function, example, name=name, form=form_of(columns)):
            paid = await function(**copy.deepcopy(columns), log_metric=self.log_metric)
        return self.checked(paid, name, columns, example)

    def checked(self, paid: Any, name: str, columns: dict, example: dict) -> list[float | None]:
        """What a function paid; RewardError if that is no list of numbers, one a completion."""
        num = len(columns["completions"])
        paid = paid.tolist() if isinstance(paid, np.ndarray) else paid
        is_list = isinstance(paid, list | tuple) and len(paid) == num
        if not is_list or not all(value is None or is_reward(value) for value in paid):
            raise self.error(
                name,
                f"must return a list of {num} finite numbers, one a completion, not {paid!r:.80}",
                example,
            )
        return [None if value is None else float(value) for value in paid]

    def error(self, name: str, problem: str, example: dict) -> RewardError:
        file, function = self.functions[name]
        return RewardError(
            f"{line_of(file, function=function)}: {name} {problem}: question {example!r:.200}"
        )

    def log_metric(self, name: str, value: float) -> None:
        """What TRL passes under this name: the step's metric is the mean of all values."""
        self.logged[name].append(float(value))

    @property
    def num_open(self) -> int:
        """How many tasks the functions have left open in this process."""
        return sum(len(loop.tasks) for loop in LOOPS.values())

    def take_logged(self) -> Sums:
        """(sum, count) of what was logged since the last time."""
        taken = {name: (sum(values), len(values)) for name, values in self.logged.items()}
        self.logged.clear()
        return taken


class JudgeLoop(asyncio.SelectorEventLoop):
    """Runs all of task.reward's async functions in a process, in a thread of its own.

    A user's client belongs to the first loop it meets, and has tasks of its own there: they go on
    between steps too, such as to answer a server that asks whether the client is still there. Tasks
    are held until they end: asyncio's own may be collected where no variable holds them.
    """

    failed = ""  # the last task that has raised

    def __init__(self) -> None:
        self.selector = Selector()
        super().__init__(self.selector)
        self.tasks: set[asyncio.Task] = set()
        # A Ctrl-C is the run's affair: the processes that the functions start inherit this.
        self.call_soon(signal.pthread_sigmask, signal.SIG_BLOCK, {signal.SIGINT})
        threading.Thread(target=run_for_ever, args=(self,), daemon=True).start()
        LOOPS[os.getpid()] = self

    def create_task(self, *given: Any, **named: Any) -> asyncio.Task:
        task = super().create_task(*given, **named)
        self.tasks.add(task)
        task.add_done_callback(self.let_go)
        return task

    def let_go(self, task: asyncio.Task) -> None:
        self.tasks.discard(task)
        if task.get_stack():  # of an exception; to ask for that would silence asyncio's own message
            self.failed = str(task)

    def run_in_executor(self, pool: Any, function: Callable, *arguments: Any) -> asyncio.Future:
        """Without a pool in a thread of its own, for which no exit waits.

        Nothing ends a call that hangs: it would hold one of a pool's few threads for good. A timer
        shows the selector that something is awaited.
        """
        timer = self.call_later(FOR_EVER_S, int)
        call = Future() if pool is None else pool.submit(function, *arguments)
        if pool is None:
            threading.Thread(target=fulfil, args=(call, function, arguments), daemon=True).start()
        future = asyncio.wrap_future(call, loop=self)
        future.add_done_callback(lambda _: timer.cancel())
        return future


# By process: a fork's child must leave its parent's alone, whose sockets it shares.
LOOPS: dict[int, JudgeLoop] = {}


def run(coroutine: Coroutine) -> Any:
    """What the coroutine returns; it is cancelled if a signal ends an evaluation.

    Where it waits for a task that has raised, such as a queue's worker, it would wait for ever.
    """
    loop = LOOPS.get(os.getpid()) or JudgeLoop()
    running = asyncio.run_coroutine_threadsafe(coroutine, loop)
    lost_s = 0.0
    try:
        while not wait([running], timeout=0.2).done:  # seconds
            leave_if_signalled()
            lost_s = lost_s + 0.2 if loop.failed and loop.selector.waits_for_nothing else 0.0
            if lost_s > LOST_S:
                raise RewardError(
                    f"an async reward waits, perhaps for a task that has failed: {loop.failed}"
                )
        return running.result()
    except CancelledError as error:
        raise RewardError("an async reward has cancelled all tasks of its loop") from error
    finally:
        running.cancel()  # unless it has ended


@atexit.register
def close() -> None:
    """End what is still open in this process's, but wait for no task that heeds no end."""
    if loop := LOOPS.get(os.getpid()):
        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(end_others(), loop).result(CLOSE_S)


class Selector(selectors.DefaultSelector):
    waits_for_nothing = False  # no timer, socket or pipe

    def select(self, timeout: float | None = None) -> list:
        self.waits_for_nothing = timeout is None and len(self.get_map()) == 1  # the loop's own pipe
        ready = super().select(timeout)
        self.waits_for_nothing = False
        return ready


def run_for_ever(loop: JudgeLoop) -> None:
    """Go on also where a task of the user's own stops the loop or exits: a judge would hang."""
    while True:
        try:
            loop.run_forever()
        except BaseException as error:
            print(f"warning: a task of task.reward's own has raised {error!r}", flush=True)


async def end_others() -> None:
    # Python 3.11 calls the end of a server's connection an error.
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others)


def fulfil(future: Future, function: Callable, arguments: tuple) -> None:
    future.set_running_or_notify_cancel()
    try:
        future.set_result(function(*arguments))
    except BaseException as error:
        future.set_exception(error)
