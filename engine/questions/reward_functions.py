"""A task made of reward functions in TRL's form, `f(completions, **columns) -> list[float]`.

They are called as trl.GRPOTrainer 1.16 does it, but without what belongs to its trainer.
"""

import copy
import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import model_validator

from engine.core.config import ConfigError, Section, TaskSettings
from engine.questions.messages import pose
from engine.questions.user_file import RewardError, import_file, is_reward, line_of, naming_mistakes


@functools.cache
def make_task(file: Path, *names: str) -> "RewardTask":
    module = import_file(file)
    functions = {name: getattr(module, name, None) for name in names}
    if missing := [name for name, function in functions.items() if not callable(function)]:
        raise ConfigError([f"{file}: {name} is no function of this file" for name in missing])
    for name, function in functions.items():
        kinds = [parameter.kind for parameter in inspect.signature(function).parameters.values()]
        if inspect.iscoroutinefunction(function) or inspect.Parameter.VAR_KEYWORD not in kinds:
            form = f"def {name}(completions, **kwargs), without async: every column comes by name"
            raise ConfigError([f"{line_of(str(file), function=function)}: write {form}"])
    return RewardTask(str(file), functions)


class RewardTask:
    """What a task's module is to a run, made of reward functions and the rows that they judge."""

    HOLDS_OUT_NUM_EXAMPLES = True  # of one source for both splits, in place of 1 question in 8

    class Options(Section):
        @model_validator(mode="before")
        @classmethod
        def validate_on_the_training_file(cls, values: dict[str, Any]) -> dict[str, Any]:
            """One file serves both, unless task.eval names another."""
            if isinstance(values, dict) and values.get("eval", "generated") == "generated":
                return values | {"eval": values.get("train", "generated")}
            return values

    def __init__(self, file: str, functions: dict[str, Callable]) -> None:
        self.__file__, self.functions = file, functions
        self.REWARD_PARTS, self.NAME = (*functions,), "+".join(functions)
        self.REWARD_WEIGHTS = dict.fromkeys(functions, 1.0)

    def parse_row(self, row: dict, *, options: TaskSettings) -> dict:
        """The row as it is, if there is a prompt in it or task.prompt makes one of it."""
        prompt = row.get("prompt")
        if options.prompt is None and not (prompt and isinstance(prompt, str | list)):
            names = ", ".join(f"{{{name}}}" for name in row)
            have = "no text or messages in a column prompt: add one, or word task.prompt with"
            raise ValueError(f"{have} {names}")
        return row

    def parse_question(self, text: str) -> dict:
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            row = '{"prompt": "What is 2 + 2?", "answer": "4"}'
            raise ValueError(f"write a row with its columns as JSON, such as {row}") from error

    def generate_prompt(self, example: dict, *, options: TaskSettings) -> list[dict] | str:
        """The column `prompt`, as TRL takes it; what task.prompt words is a user's message."""
        self.parse_row(example, options=options)  # a person may have typed it
        prompt = example.get("prompt")
        if options.prompt is None or isinstance(prompt, list):
            return prompt
        return [{"role": "user", "content": options.prompt}]

    def reward_group(
        self, texts: list[str], example: dict, *, options: TaskSettings, completions: list
    ) -> list[dict[str, float]]:
        """The parts of the reward of each completion of a question: a call of each function."""
        posed = pose(example, task=self, options=options)
        if isinstance(example.get("prompt"), list):
            prompt, written = posed, [[{"role": "assistant", "content": text}] for text in texts]
        else:
            prompt, written = posed if isinstance(posed, str) else posed[-1]["content"], texts
        row = {key: example[key] for key in example if key not in ("prompt", "completion")}
        columns = {key: [value] * len(texts) for key, value in row.items()}
        columns |= {"prompts": [prompt] * len(texts), "completions": written}
        columns["completion_ids"] = [[*c.token_ids] if c else [0] for c in completions]  # an end
        paid = [self.call(name, columns, example) for name in self.functions]
        return [dict(zip(self.functions, parts, strict=True)) for parts in zip(*paid, strict=True)]

    def call(self, name: str, columns: dict[str, list], example: dict) -> list[float]:
        """What a function pays for each completion; RewardError if that is no list of numbers."""
        function, num = self.functions[name], len(columns["completions"])
        with naming_mistakes(self.__file__, function, example):
            paid = function(**copy.deepcopy(columns))  # a change would stay for the whole run
        is_list = isinstance(paid, list | tuple | np.ndarray) and len(paid) == num
        if not is_list or not all(map(is_reward, paid)):
            where = f"{line_of(self.__file__, function=function)}: {name}"
            wanted = f"must return a list of {num} finite numbers, one a completion"
            raise RewardError(f"{where} {wanted}, not {paid!r:.80}: question {example!r:.200}")
        return [float(value) for value in paid]
