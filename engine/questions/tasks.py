"""The module of a task, which a config needs before torch: this imports no heavy library."""

import contextlib
import functools
import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, TypeAdapter, ValidationError, create_model

from engine import ROOT
from engine.core.config import Config, ConfigError, TaskSettings, Text, Weight, as_reward
from engine.core.text import show
from engine.core.user_file import import_file
from engine.questions.contract import Task
from engine.questions.rewards import default_weights

# How task.reward names functions: my_rewards:f, my_rewards:[f, g] or [my_rewards:f, lengths:g].
OF_ONE_FILE = r"[\w.]+:(?:\w+|\[\s*\w+(?:\s*,\s*\w+)*\s*\])"
REWARD_FORM = re.compile(rf"{OF_ONE_FILE}|\[\s*{OF_ONE_FILE}(?:\s*,\s*{OF_ONE_FILE})*\s*\]")


@dataclass(frozen=True)
class Hub:
    """Which part of a hub dataset is loaded. A task that needs another part sets its HUB."""

    usual_id: str | None = None  # the dataset that error messages suggest
    config: str | None = None  # the configuration of usual_id to load
    validation_split: str = "train"  # the split that holds the validation questions
    divides_train: bool = True  # between both; else train and validation_split stay as they are


FUNCTION = "a function or a class, and not async"
OPTIONAL = (
    "reward_function",
    "extract_answer",
    "parse_question",
    "is_lenient_solved",
    "generate_questions",
    "load_examples",
    "Environment",
)
# The names that a module may define for a task: the type of each, and what a line calls it.
KINDS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("generate_prompt", "parse_row", "question_key"), (Callable, FUNCTION)),
    **dict.fromkeys(OPTIONAL, (Callable | None, FUNCTION)),
    "Options": (type[BaseModel], "a pydantic BaseModel"),
    "REWARD_PARTS": (
        tuple[Text, ...],
        'a tuple of different names with "answer" and without dots, such as ("answer",)',
    ),
    "EXAMPLE_ROW": (dict[str, Any], "a dict, a good row by its columns"),
    "PACKAGES": (tuple[str, ...] | list[str], "a tuple of names of packages"),
    "HUB": (Hub | None, "a Hub, as in tasks/gsm8k.py"),
}


def load_task(options: TaskSettings) -> Task:
    """A task of the checkout, <name>.py in the current folder, or functions (my_rewards:f).

    ConfigError if there is none, or if it lacks what each task needs.
    """
    name = options.code
    own_file = Path.cwd() / f"{name}.py"
    if ":" in str(name):
        from engine.questions.reward_functions import RewardTask, find_functions  # off by default

        return RewardTask(find_functions(functions_in(check_form(name))), options)
    if name in built_in_tasks():
        module = importlib.import_module(name if name == "countdown" else f"tasks.{name}")
    elif own_file.stem == name and own_file.is_file():
        module = import_file(own_file)
    else:
        raise ConfigError(
            f"task.name = {show(name):.80}: must be one of {', '.join(built_in_tasks())}, or the "
            f"name of a .py file in {Path.cwd()}"
        )
    task = Task(module.__file__, vars(module), options)
    if problems := list(problems_of_task(task)):
        raise ConfigError(*(f"{task.file}: {problem}" for problem in problems))
    return task


def functions_in(reward: str) -> list[str]:
    """The functions that a task.reward names, in its order, each as module:function."""
    return [
        f"{module}:{name}"
        for module, names in re.findall(r"([\w.]+):(\w+|\[[^\]]*\])", reward)
        for name in re.findall(r"\w+", names)
    ]


def check_form(text: Any) -> str:
    """The text of a task.reward, if it names functions; else ConfigError."""
    given = text
    text = as_reward(text)
    if not isinstance(text, str) or not REWARD_FORM.fullmatch(text):
        raise ConfigError(
            f"task.reward = {show(given):.80}: write my_rewards:f for the function f in "
            "my_rewards.py, 'my_rewards:[f, g]' for two, or '[my_rewards:f, lengths:g]'"
        )
    return text


@functools.cache
def built_in_tasks() -> list[str]:
    """The names of the tasks in the checkout; other files in tasks/ pay no reward."""
    paths = [ROOT / "countdown.py", *sorted(ROOT.glob("tasks/*.py"))]
    pays = r"(?m)^(def reward_function|class Environment)\b"
    return [path.stem for path in paths if re.search(pays, path.read_text("utf-8"))]


def is_of(name: str, value: object) -> bool:
    """Whether a module may define the name by this value."""
    with contextlib.suppress(ValidationError):
        TypeAdapter(KINDS[name][0]).validate_python(value, strict=True)
        return not inspect.iscoroutinefunction(value)
    return False


def problems_of_task(task: Task) -> Iterator[str]:
    """A line for each thing that is missing or wrong in a task's module."""
    wrong = [name for name in KINDS if name in vars(task) and not is_of(name, getattr(task, name))]
    for name in wrong:
        yield f"{name} must be {KINDS[name][1]}, not {getattr(task, name)!r:.80}"
    if wrong:  # what comes below rests on them
        return
    if not (task.generate_prompt and (task.reward_function or task.Environment)):
        yield "a task must define generate_prompt and reward_function; tasks/template.py shows how"
    for name, _ in inspect.getmembers(task.Environment, inspect.iscoroutinefunction):
        yield f"Environment.{name} must not be async"
    parts = task.REWARD_PARTS
    if "answer" not in parts or len(parts) > len({*parts}) or "." in "".join(parts):
        yield f"REWARD_PARTS must be {KINDS['REWARD_PARTS'][1]}"
    if "timeout" in parts and Path(task.file).parent != ROOT / "tasks":
        yield "REWARD_PARTS: a part called timeout counts graders that were stopped: rename it"
    if issubclass(TaskSettings, task.Options):
        yield "Options must be a class of its own: class Options(Section)"
    for key, field in task.Options.model_fields.items():
        if field.is_required() or key in TaskSettings.model_fields or hasattr(TaskSettings, key):
            yield (
                f"Options.{key} needs a default, and a name other than code, replace or "
                f"{', '.join(TaskSettings.model_fields)}"
            )


def schema(code: str) -> type[Config]:
    """Config with the own keys of the task that `load_task` finds, and the parts of its reward."""
    task = load_task(TaskSettings.model_construct(name=code))
    return make_schema(task.Options, task.REWARD_PARTS, *task.functions)


@functools.cache
def make_schema(own: type[BaseModel], parts: tuple[str, ...], *functions: str) -> type[Config]:
    weights = default_weights(functions)
    defaults = {part: weights.get(part, 0.0) for part in parts}
    # The keys' explanations are those of the bases: pydantic would search all modules for more.
    make = functools.partial(create_model, __cls_kwargs__={"use_attribute_docstrings": False})
    settings = make(
        "TaskSettings",
        __base__=(own, TaskSettings),
        name=(Text, "+".join(functions) or TaskSettings().name),
        reward_weights=(dict[Literal[parts], Weight], defaults),
    )
    return make("Config", __base__=Config, task=(settings, settings()))


def is_in_split(key: str, split: str) -> bool:
    """Whether a question belongs to the split, if the splits share one source.

    A hash of its key decides, so that no question is in both, whatever the seed or the order.
    """
    assert split in ("train", "validation"), split
    is_held_out = hash_of(key)[0] < 256 / 8  # 1 question in 8
    return is_held_out == (split == "validation")


def hash_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
