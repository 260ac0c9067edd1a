"""Packages that only some runs need: they are imported on use, and a missing one is named."""

import importlib
import logging
import tomllib
from shlex import quote
from types import ModuleType

from engine import ROOT

# Else bitsandbytes, which peft imports too, says that it did not fetch a kernel of the hub's.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def import_package(name: str, *, key: str) -> ModuleType:
    """The package that pip calls `name`, which `key` needs; else ValueError with pip's command."""
    try:
        return importlib.import_module(name.replace("-", "_"))
    except ModuleNotFoundError as error:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
        pins = [pin for extra in project["optional-dependencies"].values() for pin in extra]
        pin = next((pin for pin in pins if pin.startswith((f"{name}==", f"{name}>="))), name)
        raise ValueError(f"{key}: needs a package: pip install {quote(pin)}") from error
