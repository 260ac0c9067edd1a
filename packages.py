"""Packages that are imported only where the config asks for them."""

import importlib
from pathlib import Path
from types import ModuleType


def import_package(name: str, *, key: str) -> ModuleType:
    """The package that a key of the config needs.

    Raises ValueError with the command that installs it, where it is missing.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(f"{key}: needs a package: pip install {requirement(name)}") from error


def requirement(name: str) -> str:
    """The package with the version that this code is tested with, as pip takes it."""
    lines = Path(__file__).with_name("requirements.txt").read_text(encoding="utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(f"{name}==")]
    return line
