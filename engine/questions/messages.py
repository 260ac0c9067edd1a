"""A question as messages: what its task writes, in the words of the config where it has any."""

import copy
import re

from engine.core.config import TaskSettings
from engine.core.text import plain
from engine.core.user_file import naming_mistakes
from engine.questions.contract import Task


def pose(example: dict, *, task: Task, options: TaskSettings) -> list[dict] | str:
    """The task's prompt for a question, with the words of the config if it has any.

    task.prompt replaces the plain text or the user's message. task.system_prompt becomes the system
    message, or the beginning of a plain text. An assistant prefix stays.
    """
    with naming_mistakes(task.file, task.generate_prompt, example):
        messages = task.generate_prompt(copy.deepcopy(example), options=options)  # it may change it
    texts = (options.system_prompt, options.prompt)
    system, prompt = (None if text is None else fill(text, example) for text in texts)
    if isinstance(messages, str):
        return "\n\n".join(part for part in (system, prompt or messages) if part is not None)
    if prompt is not None:
        messages = [m | {"content": prompt} if m["role"] == "user" else m for m in messages]
    if system is not None:
        others = [m for m in messages if m["role"] != "system"]
        messages = [{"role": "system", "content": system}, *others]
    return messages


def question_text(example: dict, *, task: Task, options: TaskSettings) -> str:
    """What a person reads of a question; with task.reward it is what the model is asked."""
    if not task.functions:
        return plain({key: value for key, value in example.items() if key != "answer"})
    posed = pose(example, task=task, options=options)
    return posed if isinstance(posed, str) else posed[-1]["content"]


def fill(text: str, example: dict) -> str:
    """The text with the values of the example's keys in place of {key}; other braces stay."""
    names = "|".join(map(re.escape, example))
    return re.sub(rf"\{{({names})\}}", lambda match: str(example[match[1]]), text)


def assistant_prefix(messages: list[dict] | str) -> str:
    """The beginning of the answer that the prompt already contains; "" if it contains none."""
    is_begun = not isinstance(messages, str) and messages[-1]["role"] == "assistant"
    return messages[-1]["content"] if is_begun else ""
