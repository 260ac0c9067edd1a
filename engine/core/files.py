"""Text files that a crash leaves whole, and strict JSON for them."""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO


def sizes_of(folder: Path) -> dict[str, int]:
    """The bytes of each file in a folder, by its path there."""
    return {
        str(file.relative_to(folder)): file.stat().st_size
        for file in folder.rglob("*")
        if file.is_file()
    }


def read_lines(path: Path) -> list[dict]:
    """The whole lines of a .jsonl file, [] if it is absent; ValueError names a line that is bad."""
    return [row for row, _ in whole_lines(path)] if path.exists() else []


def whole_lines(
    path: Path, names: Sequence[str] = ("step",), *, start: int = 0, first: int = 1
) -> Iterator[tuple[dict, int]]:
    """Each line's object and its number of bytes, but for a last line that a kill has torn.

    It reads from the byte `start`, at which the line of the number `first` begins.
    """
    with path.open("rb") as file:
        file.seek(start)
        for number, line in enumerate(file, start=first):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # also of 5,000 digits, or brackets
                raise ValueError(f"{path}: line {number} is not JSON: {error}; remove it") from None
            is_row = isinstance(row, dict) and {*names} <= row.keys()
            if not is_row or type(row.get("step", 0)) is not int:
                raise ValueError(
                    f"{path}: line {number} is no object with a {', '.join(names)}: not a run's"
                )
            yield row, len(line)


def open_to_append(path: Path) -> TextIO:
    """Open a file of our own; ValueError where a link stands: it may lead to somebody's file."""
    if path.is_symlink():
        raise ValueError(f"{path} is a link, which a run does not follow: remove it")
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return open(os.open(path, flags, 0o666), "a+", encoding="utf-8", newline="")


def append_durably(path: Path, text: str) -> None:
    """Append `text`; when this returns, it is on disk."""
    with open_to_append(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def check_replaceable(path: Path) -> None:
    """Raises ValueError where a device, a pipe or a folder stands: a file would take its place."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: is no regular file, which could be written over: name another")


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text. A crash leaves either the whole old text or the whole new one."""
    check_replaceable(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    append_durably(temporary, text)
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def json_line(record: dict) -> str:
    """Return one line of strict JSON in ASCII, which holds any text, even a lone surrogate."""
    return json.dumps(without_nan(record)) + "\n"


def without_nan(value: Any) -> Any:
    """Return `value` as JSON can hold it: with None for every float that is not finite."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)
