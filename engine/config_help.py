"""What every key may be, in words that come from the schema: for --help and for wrong values."""

import difflib
import functools
import operator

from pydantic import ValidationError

from engine.config import SECTIONS, Config, dotted_values
from engine.task_module import built_in_tasks, load_task, schema
from engine.yaml_text import show

USAGE = """\
usage: torchrun --nproc-per-node=2 main.py [--config FILE] [section.key=value ...]

FILE sets keys (config.yaml if not given); overrides come last and are read as YAML. These are the
keys, their defaults and what they may be; config.yaml explains them, a task's module its own.
"""


def help_text(overrides: list[str]) -> str:
    """Usage, and a line for each key; the task section has those of every task that is known."""
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
    """A hint at the known key that is spelt most like `key`, or whose last name is."""
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
