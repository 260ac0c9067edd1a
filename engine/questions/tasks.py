"""The module of a task: where it is found, what it must define, which keys it adds to a config.

Tasks import this module, and a config is read before torch: it imports no heavy library.
"""

import copy
import functools
import hashlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
from pydantic import create_model

from engine import ROOT
from engine.core.config import Config, ConfigError, Section, TaskSettings, Weight
from engine.core.yaml_text import show


def load_task(name: str) -> ModuleType:
    """One of the checkout's tasks, or <name>.py in the current folder, if it is a whole task."""
    own_file = Path.cwd() / f"{name}.py"
    if name in built_in_tasks():
        module = importlib.import_module(name if name == "countdown" else f"tasks.{name}")
    elif own_file.stem == name and own_file.is_file():
        module = import_file(own_file)
    else:
        choices = f"{', '.join(built_in_tasks())}, or the name of a .py file in {Path.cwd()}"
        raise ConfigError([f"task.name = {show(name):.80}: must be one of {choices}"])
    if hasattr(module, "Environment") and not hasattr(module, "REWARD_PARTS"):
        module.REWARD_PARTS = ("answer",)  # what a get_reward that returns a number pays
    if problems := list(problems_of_task(module)):
        raise ConfigError([f"{module.__file__}: {problem}" for problem in problems])
    return module


@functools.cache
def built_in_tasks() -> list[str]:
    """The names of the tasks in the checkout; other files in tasks/ pay no reward."""
    paths = [ROOT / "countdown.py", *sorted(ROOT.glob("tasks/*.py"))]
    pays = re.compile(r"^(def reward_function|class Environment)\b", re.MULTILINE)
    return [path.stem for path in paths if pays.search(path.read_text("utf-8"))]


@functools.cache
def import_file(path: Path) -> ModuleType:
    """The module in a file, under a name that cannot be taken for another module's."""
    spec = importlib.util.spec_from_file_location(f"user_task_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle and dataclasses look modules up by their names
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        problem = f"it calls sys.exit({error.code!r}) when it is imported: raise an exception"
        raise ConfigError([f"{path}: {problem} instead"]) from error
    return module


def problems_of_task(module: ModuleType) -> Iterator[str]:
    """A line for each thing that is missing or wrong in a task's module."""
    loads_itself = hasattr(module, "load_examples")
    data = ["load_examples"] if loads_itself else ["EXAMPLE_ROW", "parse_row", "question_key"]
    is_played = hasattr(module, "Environment")  # which may pay the reward itself
    functions = [] if is_played else ["reward_function", "extract_answer"]
    for name in (*data, "generate_prompt", "REWARD_PARTS", *functions):
        if not hasattr(module, name):
            yield f"a task must define {name}; countdown.py shows how"
    for name, method in vars(getattr(module, "Environment", object)).items():
        if inspect.iscoroutinefunction(method):
            yield f"Environment.{name} must not be async"
    parts = getattr(module, "REWARD_PARTS", ("answer",))
    if not isinstance(parts, tuple) or "answer" not in parts:
        yield 'REWARD_PARTS must be a tuple of names with "answer" among them, such as ("answer",)'
    options = getattr(module, "Options", Section)
    if not issubclass(options, Section):
        yield "Options must inherit from Section in engine/core/config.py"
        return
    for key, field in options.model_fields.items():
        if field.is_required() or key in TaskSettings.model_fields:
            shared = ", ".join(TaskSettings.model_fields)
            yield f"Options.{key} needs a default, and a name other than {shared}"


NUMBERS = (int, float, np.integer, np.floating, np.bool_)
LARGEST_PART = 1e30  # times a weight of at most 1e6 it is still finite in fp32


class RewardError(ValueError):
    """A task's reward_function or Environment has done what no run can use."""


def reward_parts(
    task: ModuleType, text: str, example: dict, options: TaskSettings, completion: Any
) -> dict[str, float]:
    """What reward_function and Environment pay for a completion; RewardError if that is no number.

    `completion` is the Completion whose text it is (its module imports torch), None to try a task.
    They get a copy of the question: a change of the question itself would stay for the whole run.
    """
    parts, payer = {}, "get_reward"
    if hasattr(task, "reward_function"):
        payer, num_tokens = "reward_function", len(completion.token_ids) if completion else 0
        question = copy.deepcopy(example)
        parts = task.reward_function(text, question, options=options, num_tokens=num_tokens)
    if completion and completion.conversation and isinstance(parts, dict):
        parts = parts | completion.conversation.reward()
    for name in task.REWARD_PARTS:
        value = parts.get(name) if isinstance(parts, dict) else None
        if not isinstance(value, NUMBERS) or not abs(value) <= LARGEST_PART:  # NaN: never <=
            wanted = f"must return a dict with a number for each of {', '.join(task.REWARD_PARTS)}"
            place = f"see to {name} for the question {example!r:.200}"
            raise RewardError(f"{task.__file__}: {payer} {wanted}, not {parts!r:.80}: {place}")
    return {name: float(parts[name]) for name in task.REWARD_PARTS}


@functools.cache
def schema(task: ModuleType) -> type[Config]:
    """Config with the task's own keys and the parts of its reward in the task section."""
    weights = TaskSettings().reward_weights
    defaults = {part: weights.get(part, 0.0) for part in task.REWARD_PARTS}
    settings = create_model(
        "TaskSettings",
        __base__=(task.Options, TaskSettings) if hasattr(task, "Options") else TaskSettings,
        reward_weights=(dict[Literal[task.REWARD_PARTS], Weight], defaults),
    )
    return create_model("Config", __base__=Config, task=(settings, settings()))


# Which questions of a source are for training and which for validation

FILE_FORMATS = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class Hub:
    """Which part of a hub dataset is loaded. A task that needs another part sets its HUB."""

    usual_id: str | None = None  # the dataset that error messages suggest
    config: str | None = None  # the configuration of usual_id to load
    validation_split: str = "train"  # the split that holds the validation questions
    # One dataset may serve training and validation. True: its split train is divided between them.
    # False: its splits train and validation_split are used as they are.
    divides_train: bool = True


def is_in_split(key: str, split: str) -> bool:
    """Whether a question belongs to the split, if the splits share one source.

    A hash of the question's key decides, so that no question is in both splits, whatever the seed,
    the number of questions or the order of a file. 1 question in 8 is for validation.
    """
    assert split in ("train", "validation"), split
    digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
    is_held_out = digest[0] < 256 / 8
    return is_held_out == (split == "validation")


def is_file(source: str) -> bool:
    """Whether `source` is named like a file that can be loaded; it need not exist."""
    return Path(source).suffix.lower() in FILE_FORMATS
