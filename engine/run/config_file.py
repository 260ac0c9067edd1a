"""Reading a configuration: defaults, then the file, then the command line; mistakes in it."""

import argparse
import difflib
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import ValidationError

from engine import ROOT
from engine.core.config import SECTIONS, Config, ConfigError, check_world, dotted_values, explained
from engine.core.text import Loader, show, to_yaml, unnest
from engine.model.folders import check_folder
from engine.questions import tasks
from engine.questions.tables import is_file_name
from engine.run.folder import run_that_made

USAGE = """\
usage: torchrun --nproc-per-node=2 main.py [--config FILE] [section.key=value ...]

FILE sets keys (config.yaml if not given); overrides come last and are read as YAML, but for the
task's texts, such as task.prompt: they stand as typed. These are the keys and their defaults;
`--help task.name=gsm8k` prints them with those of another task.
"""

WORDS_ELSEWHERE = Path(__file__).with_name("words_elsewhere.yaml")


def load_config(arguments: list[str]) -> Config:
    """What `[--config FILE] [section.key=value ...]` asks for; --help prints every key and ends."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", default=ROOT / "config.yaml")
    parser.add_argument("-h", "--help", action="store_true")
    options, overrides = parser.parse_known_args(arguments)
    if options.help:
        named = [t for t in overrides if t.startswith(("task.name=", "task.reward="))]
        say_once(f"{USAGE}\n{explained(combine({}, named))}")
        raise SystemExit(0)
    file = Path(options.config).expanduser()
    in_file = read_file(file)
    config = combine(in_file, overrides)
    typed = nest(map(parse_override, overrides))
    lost = left_out(nest(in_file.items()), typed)
    if lost:
        say_once(f"left out of {file}: {', '.join(lost)}")
    of_user = {} if file.resolve() == ROOT / "config.yaml" else in_file
    given = section_of(merge(of_user, typed), "training")
    if config.is_training and "learning_rate" not in given:
        check_default_rate(config)
    return config


def check_default_rate(config: Config) -> None:
    """Raise ConfigError if a model would be trained at a rate that is tiny's, and ruins others."""
    try:
        check_folder(config.model.name)
    except ValueError:
        if not os.path.exists(config.model.name):
            return  # that there is no such model comes first: `check_files` says so
    rate = config.training.learning_rate
    is_tiny = Path(config.model.name).resolve() in (Path("tiny").resolve(), ROOT / "tiny")
    run = run_that_made(config.model.name)
    made_with = section_of(read_file(run / "config.yaml"), "training") if run else {}
    is_given = rate != Config().training.learning_rate  # in config.yaml
    # What a run has made at tiny's rate may be trained further at it.
    if is_tiny or is_given or made_with.get("learning_rate") == rate:
        return
    raise ConfigError(
        f"model.name = {config.model.name}: training.learning_rate = {rate:g} is tiny's and ruins "
        "other models: give one, as in configs/: 2e-05 for 135 million weights, 1e-06 for 3 "
        "billion, 0.0002 with LoRA"
    )


def check_files(config: Config) -> None:
    """Raise ConfigError for files and folders that are missing; else say what takes seconds now."""
    values = dotted_values(config)
    lines = [
        f"{key} = {values[key]}: no such file in {Path.cwd()}"
        for key in keys_of_sources(config)
        if is_file_name(values[key]) and not Path(values[key]).exists()
    ]
    for key in filter(values.get, ("model.name", "model.teacher")):
        try:
            check_folder(values[key])
        except ValueError as error:
            lines.append(f"{key} = {values[key]}: cannot be used: {error}")
    if lines:
        raise ConfigError(*lines)
    say_once(f"loading torch, transformers and {config.model.name} ...")


def keys_of_sources(config: Config) -> list[str]:
    """Of the files or data sets that are read; none if the task says what a source is."""
    if tasks.load_task(config.task).load_examples:
        return []
    reads_train = config.is_training or config.task.train == config.task.eval
    return ["task.eval", "task.train"] if reads_train else ["task.eval"]


def say_once(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)


def combine(in_file: dict, overrides: list[str]) -> Config:
    """The configuration of a file's values and, in their place, of `section.key=value` texts."""
    from_file = nest(in_file.items())
    from_command_line = nest(map(parse_override, overrides))
    values = merge(without_other_task(from_file, from_command_line), from_command_line)
    values = merge(values, replaced_length(from_file, from_command_line))
    full_schema = tasks.schema(task_name(values))
    values = merge(values, nest(texts_of(overrides, full_schema)))
    values = merge(full_schema().model_dump(), values)
    try:
        config = full_schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(
            *error_lines(error, full_schema, values),
            better=in_our_words(merge(from_file, from_command_line)),
        ) from error
    check_world(config, num_ranks=1)  # main.py asks again when it knows the ranks
    return config


def parse_yaml(text: str | bytes, origin: str | Path) -> Any:
    """The value of YAML text; errors name its `origin`."""
    try:
        return yaml.load(text, Loader=Loader)
    except (RecursionError, yaml.YAMLError, ValueError) as error:  # ValueError: a date in month 13
        raise ConfigError(f"{origin}: cannot be read as YAML: {error}") from error


def read_file(path: str | Path) -> dict:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        content = parse_yaml(Path(path).read_bytes(), path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give --config a YAML file") from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError(f"{path}: must hold sections of keys, as config.yaml does")
    return content or {}


def parse_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value of "training.num_steps=60"."""
    key, equals, text = override.partition("=")
    if not equals:
        example = "section.key=value, for example training.num_steps=60; --help lists the keys"
        if override.endswith((".yaml", ".yml")):
            example = f"--config {override}"
        raise ConfigError(f"{override}: write {example}")
    try:
        return key, parse_yaml(text, override)
    except ConfigError as error:
        if may_be_text(key):
            return key, text  # `combine` knows the task's keys
        raise ConfigError(
            f"{error}; a text with such characters needs quotes of its own: {key}='\"...\"'"
        ) from error


def as_typed(text: str) -> str | None:
    """The words of a text key as they are; null alone unsets, one quoted YAML text is read."""
    if text[:1] in ("'", '"'):
        with suppress(yaml.YAMLError):
            node = yaml.compose(text, Loader=Loader)
            if isinstance(node, yaml.ScalarNode) and node.end_mark.index == len(text):
                return node.value
    return None if text == "null" else text


def texts_of(overrides: list[str], full_schema: type[Config]) -> Iterator[tuple[str, str | None]]:
    """The prompts and the task's own text keys on the command line, which are not read as YAML."""
    fields = full_schema.model_fields["task"].annotation.model_fields
    for key, _, text in (override.partition("=") for override in overrides):
        if may_be_text(key) and (field := fields.get(key.removeprefix("task."))) is not None:
            kind = field.annotation
            kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else [kind]
            if {getattr(kind, "__origin__", kind) for kind in kinds} <= {str, NoneType}:
                yield key, as_typed(text)


def may_be_text(key: str) -> bool:
    """Whether the key is a prompt or a task's own; names, sources and the like stay YAML."""
    is_own = key in ("task.system_prompt", "task.prompt") or key not in dotted_values(Config())
    return key.startswith("task.") and is_own


def nest(pairs: Iterable[tuple[str, Any]]) -> dict:
    """Values by section: {"training": {"seed": 1}} for "training.seed" and 1; the later wins."""
    nested = {}
    for key, value in pairs:
        if value is not None or key not in SECTIONS:  # a section without keys sets nothing
            for name in reversed(key.split(".")):
                value = {name: value}
            nested = merge(nested, value)
    return nested


def merge(base: Any, new: Any) -> Any:
    """`new` in place of `base`; of two mappings, a mapping with the keys of both."""
    if isinstance(base, dict) and isinstance(new, dict):
        return base | {key: merge(base.get(key), value) for key, value in new.items()}
    return new


def without_other_task(values: dict, overrides: dict) -> dict:
    """The file's values, without those for its task if the command line names another task."""
    task = section_of(values, "task")
    given = section_of(overrides, "task")
    is_other = not given.keys().isdisjoint({"name", "reward"})
    if not task or not is_other or task_name(values) == task_name(overrides):
        return values
    # Other functions for the file's rows leave all but the weights of those that are gone.
    if task.get("reward") is not None and given.get("reward") is not None and "train" not in given:
        before, after = (
            [function.split(":")[1] for function in tasks.functions_in(task_name(of))]
            for of in (values, overrides)
        )
        weights = section_of(task, "reward_weights")
        kept = task | {"reward_weights": {part: weights[part] for part in weights if part in after}}
        if task.get("name") == "+".join(before):  # it names the run itself
            del kept["name"]
        return values | {"task": kept}
    own = {"name", "reward", "reward_weights", "system_prompt", "prompt"}
    if {"reward", "train"} <= given.keys():  # its rows have other columns
        own.add("eval")
    shared = Config().task.model_dump().keys() - own
    return values | {"task": {key: task[key] for key in task if key in shared}}


def left_out(values: dict, overrides: dict) -> list[str]:
    """The keys of the file's task that `without_other_task` drops, but for those at the default."""
    sections = (Config().model_dump(), values, without_other_task(values, overrides))
    usual, before, after = (unnest(section_of(of, "task")) for of in sections)
    usual |= {"name": before.get("name"), "reward": before.get("reward")}
    usual["reward_weights.timeout"] = 0.0
    return [f"task.{k}" for k in before if k not in after and before[k] != usual.get(k)]


def replaced_length(from_file: dict, overrides: dict) -> dict:
    """What unsets the file's num_steps or num_epochs if the command line gives the other one."""
    for source, values in (("file", from_file), ("command line", overrides)):
        given = {k: v for k, v in section_of(values, "training").items() if v is not None}
        if "num_steps" in given and "num_epochs" in given:
            raise ConfigError(
                f"training.num_epochs = {show(given['num_epochs'])}: it sets num_steps, which the "
                f"{source} gives too; leave one out"
            )
    if "num_steps" in given:
        return {"training": {"num_epochs": None}}
    return {"training": {"num_steps": Config().training.num_steps}} if "num_epochs" in given else {}


def section_of(values: dict, name: str) -> dict:
    """A section of unchecked values; empty if the user gave no mapping for it."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def task_name(values: dict) -> Any:
    """The task that the values ask for, before they are checked: its name, or task.reward."""
    task = section_of(values, "task")
    name = task.get("name", Config().task.name)
    reward = task.get("reward")
    return name if reward is None else tasks.check_form(reward)


def dump(config: Config) -> str:
    """The whole configuration as YAML, which loads to the same one."""
    values = config.model_dump()
    if config.training.num_epochs is not None:
        del values["training"]["num_steps"]  # a file has only one of the two
    return to_yaml(values)


def error_lines(error: ValidationError, full_schema: type[Config], values: dict) -> list[str]:
    """One line for each key that pydantic rejects: its value, and what it should be."""
    defaults = full_schema()
    problems = {}
    notes = {}
    known = [*SECTIONS, *dotted_values(defaults)]
    theirs = read_file(WORDS_ELSEWHERE)["values"]
    for detail in error.errors():
        names = []
        value = values
        kind = detail["type"]
        with suppress(LookupError, TypeError):  # the place in a union ends with names of types
            for name in detail["loc"]:
                if isinstance(value, str):  # one word in the place of a list
                    break
                value = value[name]
                names.append(str(name))
        key = ".".join(names)
        problem = detail["msg"].removeprefix("Value error, ")
        if kind == "extra_forbidden":
            of_task = f" of task {values['task']['name']}" if names[0] == "task" else ""
            problem = f"unknown key{of_task}{hint(key, value, known)}; --help lists the keys"
        elif kind == "model_type":
            problem = "Input should be a mapping of keys, which --help lists"
        elif kind == "string_type":
            problem += "; in quotes it is text, on the command line '\"12\"'"
        # Beside a wrong key in a mapping, and for a rule about several keys, no value is at fault.
        is_bare = detail["loc"][-1] == "[key]" or (key in SECTIONS and kind == "value_error")
        subject = key if is_bare else f"{key} = {show(value):.80}"
        if isinstance(value, str) and value in theirs.get(key, {}):
            notes[subject] = f"; {value} is {theirs[key][value]} here"
        elif key in ("training.k_best_of_n", "validation.pass_k"):
            numbers = re.findall("[0-9]+", str(value)) or [8]
            notes[subject] = f"; write [{numbers[0]}, {numbers[-1]}]"
        elif key == "task.reward_weights" and kind == "dict_type":
            notes[subject] = f", by name, such as {show(defaults.task.reward_weights)}"
        problems.setdefault(subject, {})[problem] = None  # a union has one for each of its types
    lines = [f"{key}: {' or '.join(all_)}{notes.get(key, '')}" for key, all_ in problems.items()]
    return [line.replace(" or Input should be ", " or ") for line in lines]


def hint(key: str, value: Any, known: list[str]) -> str:
    """What an unknown key or the keys in it are called here, else the known key that is near."""
    close = difflib.get_close_matches
    section, _, last = key.rpartition(".")
    near = []
    for name in SECTIONS if isinstance(value, dict) else known:
        its, _, leaf = name.rpartition(".")
        # Of other sections only the same word: one that is merely near counts other things there.
        if leaf == last or (its == section and close(last, [leaf], cutoff=0.8)):
            near.append(name)
    ours, words = words_elsewhere()
    remarks = words["remarks"]
    paths = unnest({key: value})
    foreign = [*filter(None, (word_in(path, [*ours, *remarks]) for path in paths))]
    is_ours = section in SECTIONS and any(name.startswith(section) for name in near)
    if is_ours and not any(ours.get(word, "").startswith(section) for word in foreign):
        foreign = []
    hints = ""
    for word in foreign:
        named = f" is {ours[word]} here" if word in ours else ""
        note = f" ({remarks[word]})" if word in remarks else ""
        hints += f", {word}{named}{note}"
    if hints or not near:
        return hints
    return f", the nearest is {close(key, near, n=1, cutoff=0)[0]}"


def words_elsewhere() -> tuple[dict[str, str], dict[str, Any]]:
    """Our key for each word of other trainers that has one, and all that we say of their words."""
    words = read_file(WORDS_ELSEWHERE)
    return {word: key for key in words["keys"] for word in words["keys"][key]}, words


def word_in(path: str, words: Iterable[str]) -> str | None:
    """The longest of the words that is the path's end: rollout.n in actor_rollout_ref.rollout.n."""
    path = "." + path.lstrip("-").replace("-", "_")
    return max((word for word in words if path.endswith(f".{word}")), key=len, default=None)


def in_our_words(given: dict) -> str:
    """YAML that loads, to paste into a file; empty unless words of other trainers are given.

    It sets what means the same here. What needs a choice stands in a comment.
    """
    ours, words = words_elsewhere()
    flat = unnest(given)
    known = dotted_values(Config())
    theirs = {path: None if path in known else word_in(path, ours) for path in flat}
    if sum(map(bool, theirs.values())) < 2:
        return ""
    settings = {}
    comments = []
    # In the order of our keys: task.train says whether there may be training.num_epochs.
    for key, path in sorted((ours.get(theirs[path], path), path) for path in flat):
        word = theirs[path]
        value = flat[path]
        meant = words["values"].get(key, {}).get(str(value), value)
        with_it = merge(settings, nest([(key, meant)]))
        if (word not in words["remarks"] or meant != value) and loads(with_it):
            settings = with_it
        elif word:
            remark = words["remarks"].get(word, "it has another value here")
            comment = f"# {key}: {show(value)} ({word}: {remark})"
            comments.append(" ".join(comment.split()) + "\n")
    head = "# In our words, as a file for --config; what is behind a # needs your choice:\n"
    return "".join([head, to_yaml(settings), *comments])


def loads(values: dict) -> bool:
    """Whether they are a file's values without a mistake."""
    try:
        combine(values, [])
    except ConfigError:
        return False
    return True
