"""What a task may define, what stands for the names that it leaves out; a question as messages."""

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from engine.core.config import Section, TaskSettings
from engine.core.signals import leave_if_signalled
from engine.core.text import plain
from engine.core.user_file import naming_mistakes
from engine.questions.tables import CsvRow, number_in

NUMBER_TYPES = (int, float, np.integer, np.floating, np.bool_)
Functions = dict[str, tuple[str, Callable]]  # by name, each with its file
MAX_REWARD = 1e30  # times a weight of at most 1e6 it is still finite in fp32
FIXED = {str, int, float}  # types whose values nothing can change
KEYS = json.JSONEncoder(sort_keys=True, default=repr)  # one for all: json.dumps would make many


class Contract:
    """What a task's module may define, and what stands for the names that it leaves out.

    docs/tasks.md explains the names.
    """

    generate_prompt = None  # each task must define it, and one of the next two
    reward_function = Environment = None
    REWARD_PARTS: tuple[str, ...] = ("answer",)  # where the reward is a number
    EXAMPLE_ROW: Mapping[str, Any] = MappingProxyType({})  # every column is kept
    PACKAGES: tuple[str, ...] = ()
    HUB = generate_questions = load_examples = parse_question = is_lenient_solved = None

    class Options(Section):
        """No keys of its own."""

    def parse_row(self, row: dict, *, options: TaskSettings) -> dict:
        return row

    def question_key(self, example: dict) -> str:
        """The whole row, whatever the order of its columns; in a CSV 9.50 is the number 9.5."""
        if isinstance(example, CsvRow):
            example = {name: number_in(example[name]) for name in example}
        return KEYS.encode(example)

    def extract_answer(self, completion: str, example: dict, *, options: TaskSettings) -> Any:
        """What the reward read, if reward_function returns that as `read`; else the text."""
        read = completion.strip()
        if self.reward_function:
            paid = self.reward_function(completion, example, options=options, num_tokens=0)
            read = paid.get("read", read) if isinstance(paid, dict) else read
        return None if read is None else str(read) or None


class Task(Contract):
    """A task as a run uses it, with the options of its config. Nothing is set on the module."""

    reward_groups = None  # pays whole groups, as task.reward's functions do

    def __init__(self, file: str, defined: Mapping[str, Any], options: TaskSettings) -> None:
        """`defined` are the names of the module in the file."""
        if "Environment" in defined:
            self.extract_answer = None  # the text of a whole talk is no answer to vote for
        names = [name for name in defined if name in vars(Contract) and name[0] != "_"]
        vars(self).update({name: defined[name] for name in names})
        self.file = file
        self.options = options
        self.functions: Functions = {}  # of task.reward
        self.number_columns: set[str] = set()  # of CSV files: the functions get their numbers

    def pose(self, example: dict) -> list[dict] | str:
        """The prompt for a question, with the words of the config if it has any.

        task.prompt replaces the plain text or the user's message. task.system_prompt becomes the
        system message, or the beginning of a plain text. An assistant prefix stays.
        """
        options = self.options
        leave_if_signalled()
        try:
            messages = self.generate_prompt(copied(example), options=options)  # may change it
        except (Exception, SystemExit):  # no guard, which would double the time of many questions
            with naming_mistakes(self.file, self.generate_prompt, example):
                raise
        system = options.system_prompt and fill(options.system_prompt, example)
        prompt = options.prompt and fill(options.prompt, example)
        if isinstance(messages, str):
            text = prompt or messages
            return text if system is None else f"{system}\n\n{text}"
        if prompt is not None:
            messages = [m | {"content": prompt} if m["role"] == "user" else m for m in messages]
        if system is not None:
            messages = [m for m in messages if m["role"] != "system"]
            messages = [{"role": "system", "content": system}, *messages]
        return messages

    def key_of(self, example: dict) -> str:
        """The question's key, by the task's own function if it has one."""
        try:
            key = self.question_key(example)
            if not isinstance(key, str):
                raise TypeError(f"a key must be a text, not {key!r:.80}")
        except (Exception, SystemExit):  # as in `pose`
            with naming_mistakes(self.file, self.question_key, example):
                raise
        return key

    def asked(self, example: dict) -> str:
        """What the model is asked; of an Environment, which may say more, the question's key."""
        if self.Environment:
            return self.key_of(example)
        posed = self.pose(example)
        return posed if isinstance(posed, str) else "\n".join([str(m["content"]) for m in posed])

    def question_text(self, example: dict) -> str:
        """What a person reads of a question; with task.reward it is what the model is asked."""
        if not self.functions:
            return plain({key: value for key, value in example.items() if key != "answer"})
        posed = self.pose(example)
        return posed if isinstance(posed, str) else posed[-1]["content"]


def is_reward(value: object) -> bool:
    """Whether it is a number that can be added up; NaN is none."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # an array's only number
    return isinstance(value, NUMBER_TYPES) and abs(value) <= MAX_REWARD


def fill(text: str, example: dict) -> str:
    """The text with the values of the example's keys in place of {key}; other braces stay."""
    return places_of(*example).sub(lambda match: str(example[match[1]]), text)


@functools.cache
def places_of(*names: str) -> re.Pattern:
    return re.compile(rf"\{{({'|'.join(map(re.escape, names))})\}}")


def copied(value: Any) -> Any:
    """As copy.deepcopy does it, in less time for what JSON holds."""
    kind = type(value)
    if kind is list:
        return [item if type(item) in FIXED else copied(item) for item in value]
    if kind in (dict, CsvRow):
        items = value.items()
        return kind({name: i if type(i) in FIXED else copied(i) for name, i in items})
    return copy.deepcopy(value)


def assistant_prefix(messages: list[dict] | str) -> str:
    """The beginning of the answer that the prompt already contains; "" if it contains none."""
    is_begun = not isinstance(messages, str) and messages[-1]["role"] == "assistant"
    return messages[-1]["content"] if is_begun else ""
