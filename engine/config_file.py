"""Reading a configuration: the schema's defaults, then the file, then the command line."""

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from engine import ROOT
from engine.config import SECTIONS, Config, ConfigError, TaskSettings, check_world
from engine.config_help import explain, help_text
from engine.task_module import load_task, schema
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
    from_file = nest(read_file(Path(files[0]).expanduser()).items())
    from_command_line = nest(map(parse_override, overrides))
    values = merge(without_other_task(from_file, from_command_line), from_command_line)
    return validate(merge(values, replaced_length(from_file, from_command_line)))


def parse_yaml(text: str | bytes, *, origin: str | Path) -> Any:
    """The value that YAML text stands for; errors name its `origin`."""
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
    nested: dict[str, Any] = {}
    pairs = [pair for pair in pairs if pair[1] is not None or pair[0] not in SECTIONS]  # empty ones
    for key, value in pairs:
        for other, _ in pairs:
            if other.startswith(f"{key}.") and sets(value, other.removeprefix(f"{key}.")):
                raise ConfigError([f"{key}: {other} is given beside it; leave one of the two out"])
        for name in reversed(key.split(".")):
            value = {name: value}
        nested = merge(nested, value)
    return nested


def sets(value: Any, path: str) -> bool:
    """Whether a section's value decides on the key at this dotted path inside it."""
    name, _, rest = path.partition(".")
    if not isinstance(value, dict):
        return True
    return name in value and (not rest or sets(value[name], rest))


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
    """A file may give num_steps or num_epochs; the command line's takes the place of the other."""
    in_file, given = (section_of(values, "training") for values in (from_file, overrides))
    if in_file.get("num_steps") is not None and in_file.get("num_epochs") is not None:
        key = f"training.num_epochs = {show(in_file['num_epochs'])}"
        raise ConfigError([f"{key}: it sets num_steps, which the file gives too; leave one out"])
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


def validate(values: dict[str, Any]) -> Config:
    """The configuration of these values and, for all other keys, the defaults."""
    full_schema = schema(load_task(task_name(values)))
    values = merge(full_schema().model_dump(), values)
    try:
        config = full_schema.model_validate(values)
    except ValidationError as error:
        raise ConfigError(explain(error, full_schema, values)) from error
    check_world(config, num_ranks=1)  # main.py asks again when it knows the ranks
    return config


def dump(config: Config) -> str:
    """The whole configuration as YAML, which loads to the same one."""
    values = config.model_dump()
    if config.training.num_epochs is not None:
        del values["training"]["num_steps"]  # a file has only one of the two
    return to_yaml(values)
