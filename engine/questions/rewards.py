"""What completions earn: the parts of their rewards, the weighted sum, the answer that is read."""

import contextlib
import copy
from collections.abc import Iterable
from typing import Any

from engine.core.config import TaskSettings
from engine.core.user_file import RewardError, line_of, naming_mistakes
from engine.questions.contract import Task, is_reward


def reward_parts(
    task: Task, texts: list[list[str]], examples: list[dict], groups: list[list], limit: int
) -> list[list[dict]]:
    """What a task pays for each completion of each question; RewardError if that is no number.

    `groups` are the texts' Completions, [[None]] to try it, of at most `limit` tokens. A part that
    does not apply is None.
    """
    with contextlib.chdir("."):  # a reward may go elsewhere, but all paths are relative to here
        if task.reward_groups:
            return task.reward_groups(texts, examples, groups, limit)
        return [
            [parts_of(task, text, example, c) for text, c in zip(some, group, strict=True)]
            for some, example, group in zip(texts, examples, groups, strict=True)
        ]


def parts_of(task: Task, text: str, example: dict, completion: Any) -> dict:
    """What reward_function and Environment pay for a completion; a number is the part `answer`."""
    parts = {}
    payer = "get_reward"
    if task.reward_function:
        payer = "reward_function"
        with naming_mistakes(task.file, task.reward_function, example):
            parts = task.reward_function(
                text,
                copy.deepcopy(example),  # else a change of it would stay for the whole run
                options=task.options,
                num_tokens=len(completion.token_ids) if completion else 0,
            )
        parts = {"answer": parts} if is_reward(parts) else parts
    if completion and completion.conversation and isinstance(parts, dict):
        parts = parts | completion.conversation.reward()
    for name in task.REWARD_PARTS:
        value = parts.get(name) if isinstance(parts, dict) else None
        if not is_reward(value):
            where = line_of(task.file, function=task.reward_function)
            raise RewardError(
                f"{where}: {payer} must return a dict with a number for each of "
                f"{', '.join(task.REWARD_PARTS)}, not {parts!r:.80}: {name} is missing or no "
                f"finite number: question {example!r:.200}"
            )
    return {name: float(parts[name]) for name in task.REWARD_PARTS}


def total_reward(parts: dict, weights: dict[str, float]) -> float:
    """The sum of weight times part, over the parts that apply; 0 if none does, as in TRL."""
    return sum(weights[name] * parts[name] for name in weights if parts[name] is not None)


def default_weights(functions: Iterable[str]) -> dict[str, float]:
    """What the parts of a reward weigh, by default: task.reward's functions, or a task's parts."""
    return dict.fromkeys(functions, 1.0) or TaskSettings().reward_weights


def read_answer(task: Task, text: str, example: dict) -> str | None:
    """The answer in a completion; None if there is none, or the task reads none."""
    if task.extract_answer is None:
        return None
    with naming_mistakes(task.file, task.extract_answer, example):
        return task.extract_answer(text, copy.deepcopy(example), options=task.options)
