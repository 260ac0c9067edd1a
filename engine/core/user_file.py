"""A file of the user's own: how it is imported, and how a mistake in it becomes one line."""

import contextlib
import functools
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from engine import ROOT
from engine.core.config import ConfigError
from engine.core.signals import leave_if_signalled


class RewardError(ValueError):
    """The user's own code has done what no run can use; the line names file, line and question."""


@functools.cache
def import_file(path: Path) -> ModuleType:
    """The module in a file, under a name that cannot be taken for another module's."""
    spec = importlib.util.spec_from_file_location(f"user_task_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # pickle and dataclasses look modules up by their names
    try:
        with contextlib.chdir("."):  # it may go elsewhere, but all paths are relative to here
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # an exit would end the run as if all were well
        raise ConfigError(
            f"{line_of(str(path), error=error)}: {type(error).__name__}: {error}"
        ) from error
    return module


def find_function(name: str, key: str) -> tuple[str, Callable]:
    """The function that `module:function` names, and its file.

    The module is <module>.py in the current folder, else in tasks/, else one that is installed.
    Raises ConfigError, naming the config's key, if there is none.
    """
    module_name, _, function_name = name.partition(":")
    paths = [folder / f"{module_name}.py" for folder in (Path.cwd(), ROOT / "tasks")]
    path = next(filter(Path.is_file, paths), None)
    try:
        module = import_file(path) if path else importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key} = {name}: there is no {module_name}.py in {Path.cwd()} ({error})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"{module.__file__}: {function_name} is no function of this file")
    return module.__file__, function


def line_of(file: str, *, error: Exception | None = None, function: Callable | None = None) -> str:
    """The file with the line of it that raised the error, else the line where the function is."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error and error.__traceback__)
        if frame.filename == file
    ]
    if not lines and isinstance(error, SyntaxError):
        lines = [error.lineno]
    function = function.func if isinstance(function, functools.partial) else function
    if function and not inspect.isroutine(function):  # an object that can be called
        function = type(function).__call__
    code = getattr(inspect.unwrap(function), "__code__", None) if function else None
    if not lines and code and code.co_filename == file:
        lines = [code.co_firstlineno]
    return f"{file}, line {lines[-1]}" if lines else file


@dataclass
class naming_mistakes:
    """Make one line of an exception in a function of the user's file, unless it `passes`.

    It stands around each row that is read; a generator in its place would take far longer.
    """

    file: str
    function: Callable
    question: object = None
    name: str = ""  # as the user wrote it; by default the function's own
    passes: type[Exception] = RewardError
    form: str = ""  # of the two forms of a text, for an exception that speaks of one

    def __enter__(self) -> None:
        leave_if_signalled()

    def __exit__(self, kind: type | None, error: BaseException | None, _: object) -> None:
        # An exit would end the run as if all were well.
        if not isinstance(error, (Exception, SystemExit)) or isinstance(error, self.passes):
            return
        name = self.name or getattr(self.function, "__name__", "it")
        about = "" if self.question is None else f": question {self.question!r:.200}"
        form = self.form if re.search(r"\b(str|string|list)\b", str(error)) else ""
        where = line_of(self.file, error=error, function=self.function)
        raise RewardError(
            f"{where}: {name} raised {type(error).__name__}: {error}{form}{about}"
        ) from error
