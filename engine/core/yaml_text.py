"""YAML as people expect it: 1e-5 is a number, 010 is ten, a key is text and stands there once."""

import collections
import functools
import re
from typing import Any

import yaml


class Loader(yaml.SafeLoader):
    """PyYAML's SafeLoader reads 1e-5 as text, and of two equal keys only the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, Any]:
        names = collections.Counter(str(key.value) for key, _ in node.value)
        if twice := [name for name in names if names[name] > 1]:
            problem = f"the key {twice[0]} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return {str(key): value for key, value in super().construct_mapping(node, deep).items()}

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        return float(node.value) if ":" in node.value else super().construct_yaml_float(node)


class Dumper(yaml.SafeDumper):
    """Writes what Loader reads, so the text "1e-5" goes in quotes."""


NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")  # with an exponent
for yaml_class in (Loader, Dumper):
    yaml_class.add_implicit_resolver("tag:yaml.org,2002:float", NUMBER, list("-+.0123456789"))
# YAML 1.1 reads 010 as 8 and 1:30 as 90; here 010 is 10, and 1:30 and 1:30.5 are a ValueError
Loader.add_constructor("tag:yaml.org,2002:int", lambda loader, node: int(node.value))
Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_yaml_float)


# YAML that Loader reads as the same value
to_yaml = functools.partial(yaml.dump, Dumper=Dumper, allow_unicode=True, sort_keys=False)


def show(value: Any) -> str:
    """The value as YAML on one line."""
    text = to_yaml(value, default_flow_style=True, width=float("inf"))
    return text.removesuffix("...\n").strip()
