"""What people read and write: values, long or hostile texts, mistakes; YAML as they expect it."""

import collections
import functools
import re
from typing import Any

import yaml


def unnest(nested: dict, separator: str = ".") -> dict:
    """Return {"a.b": 1} for {"a": {"b": 1}}, with all texts printable."""
    flat = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            inner = unnest(value, separator)
            flat |= {f"{key}{separator}{name}": inner[name] for name in inner}
        else:
            flat[key] = printable(value) if isinstance(value, str) else value
    return flat


def plain(value: Any) -> str:
    """A question or a gold answer as a person writes it: "nums: 3 7 25, target: 46", say."""
    if isinstance(value, dict):
        return ", ".join(f"{name}: {plain(item)}" for name, item in value.items())
    return " ".join(map(plain, value)) if isinstance(value, list) else str(value)


def shorten(text: str, max_characters: int = 600) -> str:
    """Return a long text without its middle; its end is kept, since the answer stands there."""
    if len(text) <= max_characters:
        return text
    head = text[: max_characters * 2 // 3]
    tail = text[-(max_characters // 3) :]
    return f"{head}\n[... {len(text) - len(head) - len(tail)} characters ...]\n{tail}"


def printable(text: str, encoding: str = "utf-8") -> str:
    """Return `text` with escapes for control codes and for characters that `encoding` lacks."""
    visible = (c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
    return "".join(visible).encode(encoding, "backslashreplace").decode(encoding)


def error_line(problem: object) -> str:
    """One line that says what is wrong, whatever text of a file or a package it quotes."""
    text = re.sub(r"\s*\n\s*", " ", shorten(str(problem), 2_000))
    return f"error: {printable(text)}"


class Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader reads 1e-5 as text, and of two equal keys only the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        names = collections.Counter(str(key.value) for key, _ in node.value)
        if twice := [name for name in names if names[name] > 1]:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {twice[0]} is given twice", node.start_mark
            )
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads, so the text "1e-5" goes in quotes."""


NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")  # with an exponent
for yaml_class in (Loader, Dumper):
    yaml_class.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, "-+.0123456789")
# YAML 1.1 reads 010 as 8 and 1:30 as 90; here 010 is 10, and 1:30 a ValueError
Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))

# YAML that Loader reads as the same value
to_yaml = functools.partial(yaml.dump, Dumper=Dumper, allow_unicode=True, sort_keys=False)


def show(value: Any) -> str:
    return to_yaml(value, default_flow_style=True, width=float("inf")).removesuffix("...\n").strip()
