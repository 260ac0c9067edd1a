"""Reading a configuration: defaults, then the file, then the command line. Explaining its keys."""

import argparse
import difflib
import functools
import itertools
import operator
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine import ROOT
from engine.config import SECTIONS, Config, ConfigError, TaskSettings, check_world, dotted_values
from engine.task_module import built_in_tasks, load_task, schema
from engine.yaml_text import Loader, show, to_yaml


def load_config(arguments: list[str]) -> Config:
    """The configuration that `[--config FILE] [section.key=value ...]` asks for.

    Raises ConfigError for a user's mistake. With --help it prints every key, on one rank, and ends.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", action="append")
    parser.add_argument("-h", "--help", action="store_true")
    try:
        options, overrides = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError([str(error)]) from error
    if options.help:
        if os.environ.get("RANK", "0") == "0":
            print(help_text(overrides))
        raise SystemExit(0)
    files = options.config or [ROOT / "config.yaml"]
    if len(files) > 1:
        raise ConfigError([f"--config {' '.join(files)}: give one file; keys can follow it"])
    return combine(read_file(Path(files[0]).expanduser()), overrides)


def combine(in_file: dict[str, Any], overrides: list[str]) -> Config:
    """The configuration of a file's values and, in their place, of `section.key=value` texts."""
    from_file = nest(in_file.items())
    from_command_line = nest(map(parse_override, overrides))
    values = merge(without_other_task(from_file, from_command_line), from_command_line)
    values = merge(values, replaced_length(from_file, from_command_line))
    full_schema = schema(load_task(task_name(values)))
    values = merge(full_schema().model_dump(), values)
    try:
        config = full_schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, full_schema, values)) from error
    check_world(config, num_ranks=1)  # main.py asks again when it knows the ranks
    return config


def parse_yaml(text: str | bytes, *, origin: str | Path) -> Any:
    """The value of YAML text; errors name its `origin`."""
    try:
        return yaml.load(text, Loader=Loader)
    except (RecursionError, yaml.YAMLError, ValueError) as error:  # ValueError: a date in month 13
        nesting = isinstance(error, RecursionError)
        problem = "nested too deeply" if nesting else " ".join(str(error).split())
        raise ConfigError([f"{origin}: cannot be read as YAML: {problem}"]) from error


def read_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        content = parse_yaml(Path(path).read_bytes(), origin=path)
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror}; give --config a YAML file"]) from error
    if content is not None and not isinstance(content, dict):
        raise ConfigError([f"{path}: must hold sections of keys, as config.yaml does"])
    return content or {}


def parse_override(override: str) -> tuple[str, Any]:
    """The dotted key and the value of "training.num_steps=60"."""
    key, equals, text = override.partition("=")
    if not equals:
        example = "section.key=value, for example training.num_steps=60"
        raise ConfigError([f"{override}: write {example}; --help lists the keys"])
    return key, parse_yaml(text, origin=override)


def nest(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Values by section: {"training": {"seed": 1}} for "training.seed" and 1; the later pair wins.

    Raises ConfigError for a key that is given beside a section that sets it too.
    """
    nested = []  # each key with what it sets
    for key, value in pairs:
        if value is not None or key not in SECTIONS:  # a section without keys sets nothing
            for name in reversed(key.split(".")):
                value = {name: value}
            nested.append((key, value))
    for (key, one), (other, two) in itertools.permutations(nested, 2):
        if other.startswith(f"{key}.") and merge(one, two) != merge(two, one):
            raise ConfigError([f"{key}: {other} is given beside it; leave one of the two out"])
    return functools.reduce(merge, (values for _, values in nested), {})


def merge(base: Any, new: Any) -> Any:
    """`new` in place of `base`; of two mappings, a mapping with the keys of both."""
    if isinstance(base, dict) and isinstance(new, dict):
        return base | {key: merge(base.get(key), value) for key, value in new.items()}
    return new


def without_other_task(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The file's values, without those for its task if the command line names another task."""
    task = section_of(values, "task")
    if not task or task_name(values) == task_name(merge(values, overrides)):
        return values
    shared = TaskSettings.model_fields.keys() - {"reward_weights", "system_prompt", "prompt"}
    return values | {"task": {key: task[key] for key in task if key in shared}}


def replaced_length(from_file: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """What unsets the file's num_steps or num_epochs if the command line gives the other one."""
    in_file, given = (section_of(values, "training") for values in (from_file, overrides))
    for place, values in (("file", in_file), ("command line", given)):
        if values.get("num_steps") is not None and values.get("num_epochs") is not None:
            problem = f"it sets num_steps, which the {place} gives too; leave one out"
            raise ConfigError([f"training.num_epochs = {show(values['num_epochs'])}: {problem}"])
    if given.get("num_steps") is not None:
        return {"training": {"num_epochs": None}}
    if given.get("num_epochs") is not None:
        return {"training": {"num_steps": Config().training.num_steps}}
    return {}


def section_of(values: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of unchecked values; empty if the user gave no mapping for it."""
    section = values.get(name)
    return section if isinstance(section, dict) else {}


def task_name(values: dict[str, Any]) -> Any:
    """The name of the task that the values ask for, before they are checked."""
    return section_of(values, "task").get("name", TaskSettings().name)


def dump(config: Config) -> str:
    """The whole configuration as YAML, which loads to the same one."""
    values = config.model_dump()
    if config.training.num_epochs is not None:
        del values["training"]["num_steps"]  # a file has only one of the two
    return to_yaml(values)


# What every key may be, in words made from the schema

USAGE = """\
usage: torchrun --nproc-per-node=2 main.py [--config FILE] [section.key=value ...]

FILE sets keys (config.yaml if not given); overrides come last and are read as YAML. These are the
keys, their defaults and what they may be; config.yaml explains them, a task's module its own.
"""


def help_text(overrides: list[str]) -> str:
    """Usage, and a line for each key; also for the own keys of each task that is known."""
    asked = [text.removeprefix("task.name=") for text in overrides if text.startswith("task.name=")]
    lines = [USAGE, *describe(Config)]
    for name in dict.fromkeys(built_in_tasks() + asked):
        own_lines = [line for line in describe(schema(load_task(name))) if line not in lines]
        lines += [f"{line} (task {name})" for line in own_lines]
    return "\n".join(lines)


def describe(full_schema: type[Config]) -> list[str]:
    """A line for each key: its default and what is allowed."""
    defaults, known = dotted_values(full_schema()), known_keys(full_schema)
    return [f"{key} = {show(defaults[key])}: {known[key]}" for key in known]


def explain(error: ValidationError, full_schema: type[Config], values: dict) -> list[str]:
    """One line for each key that pydantic rejects: its value and what is allowed."""
    known, lines = known_keys(full_schema), []
    for detail in error.errors():
        path = detail["loc"][:2]
        key, value = ".".join(path), functools.reduce(operator.getitem, path, values)
        subject = f"{key} = {show(value):.80}"
        if detail["type"] == "value_error":  # a validator in a task's Options raised it
            subject = key if key == "task" else subject  # "task": it is about several keys
            problem = str(detail["ctx"]["error"])
        elif key in known:
            problem = f"must be {known[key]}"
            if known[key].startswith("text") and not isinstance(value, str):
                problem += f"; in quotes it is text, as in {key}='\"12\"'"
        elif key in SECTIONS:
            example = next(name for name in known if name.startswith(f"{key}."))
            problem = f"is a section, set its keys, such as {example}"
        else:
            place = f" of task {values['task']['name']}" if path[0] == "task" else ""
            hint = nearest(key, [*SECTIONS, *known])
            problem = f"unknown key{place}{hint}; --help lists the keys"
        lines.append(f"{subject}: {problem}")
    return list(dict.fromkeys(lines))


def nearest(key: str, known: list[str]) -> str:
    """A hint: the known key that is spelt most like `key`, or whose last part is."""
    by_name = {other.split(".")[-1]: other for other in known}
    close = functools.partial(difflib.get_close_matches, n=1, cutoff=0.8)
    for match in close(key, known) or close(key.split(".")[-1], by_name):
        return f", the nearest is {by_name.get(match, match)}"
    return ""


def known_keys(full_schema: type[Config]) -> dict[str, str]:
    """What is allowed for every key, in words, by the key's dotted name."""
    document = full_schema.model_json_schema()
    definitions, known = document["$defs"], {}
    for name, value in full_schema():
        if name in SECTIONS:
            keys = definitions[type(value).__name__]["properties"].items()
            known |= {f"{name}.{key}": allowed(field, definitions) for key, field in keys}
        else:
            known[name] = allowed(document["properties"][name], definitions)
    return known


WORDS = {  # for what JSON schema calls types and limits
    "integer": "an integer",
    "number": "a number",
    "string": "text",
    "boolean": "true or false",
    "object": "a mapping",
    "exclusiveMinimum": "> {}",
    "minimum": ">= {}",
    "exclusiveMaximum": "< {}",
    "maximum": "<= {}",
    "pattern": "matching {}",
    "minLength": "that is not empty",
}


def allowed(field: dict, definitions: dict) -> str:
    """What a field's JSON schema allows, in words such as "an integer > 0"."""
    if "$ref" in field:
        field = definitions[field["$ref"].removeprefix("#/$defs/")]
    if "anyOf" in field:
        return " or ".join(allowed(choice, definitions) for choice in field["anyOf"])
    if "const" in field:  # a choice of one
        return str(field["const"])
    if "enum" in field:
        return "one of " + ", ".join(map(str, field["enum"]))
    if "properties" in field:
        keys = field["properties"].items()
        return "a mapping of " + ", ".join(f"{k} ({allowed(v, definitions)})" for k, v in keys)
    if "propertyNames" in field:
        names = allowed(field["propertyNames"], definitions).removeprefix("one of ")
        return f"a mapping from {names} to {allowed(field['additionalProperties'], definitions)}"
    if "items" in field:
        length = f" of {field['minItems']}" if "maxItems" in field else ""
        return f"a list{length}, each {allowed(field['items'], definitions)}"
    kind = WORDS.get(field.get("type"), field.get("type", "any value"))
    limits = [text.format(field[name]) for name, text in WORDS.items() if name in field]
    return f"{kind} {' and '.join(limits)}".strip()
