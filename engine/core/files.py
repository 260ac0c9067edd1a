"""Text files that a crash leaves whole, strict JSON for them, what lies at a model's path or id."""

import difflib
import functools
import json
import os
from pathlib import Path
from typing import Any, TextIO


def read_text(path: Path) -> str:
    """Return a file's text; raises ValueError, with the file's name, if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 text ({error}); save it as UTF-8") from error


def load_env() -> None:
    """Set what ./.env names and the environment leaves unset."""
    import dotenv

    dotenv.load_dotenv(".env")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file, [] if it is absent; ValueError names a line that is bad."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n")[:-1] if path.exists() else [], 1):
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:  # also of 5,000 digits, or brackets
            raise ValueError(f"{path}: line {number} is not JSON: {error}") from None
        if not isinstance(rows[-1], dict) or "step" not in rows[-1]:
            raise ValueError(f"{path}: line {number} is no object with a step: not a run's")
    return rows


def open_to_append(path: Path) -> TextIO:
    """Open a file of our own; OSError where a link stands, which may lead to somebody's file."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    return open(os.open(path, flags, 0o666), "a+", encoding="utf-8", newline="")


def append_durably(path: Path, text: str) -> None:
    """Append `text`; when this returns, it is on disk."""
    with open_to_append(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Replace the file's text. A crash leaves either the whole old text or the whole new one."""
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


def json_line(record: dict[str, Any]) -> str:
    """Return one line of strict JSON in ASCII, which holds any text, even a lone surrogate."""
    return json.dumps(without_nan(record), allow_nan=False) + "\n"


def without_nan(value: Any) -> Any:
    """Return `value` as JSON can hold it: with None for every float that is not finite."""
    return json.loads(json.dumps(value, default=str), parse_constant=lambda name: None)


def check_folder(name: str) -> None:
    """Raise ValueError if `name` is a path, not a hub id, and there is no model at it."""
    path, pointer = Path(name), b"version https://git-lfs"  # in place of a file git has not fetched
    if not path.exists():
        is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if is_path or ("/" in name and path.parent.is_dir()):
            raise ValueError(no_such_folder(name))
        return
    if not any((path / file).exists() for file in ("config.json", "adapter_config.json")):
        if (path / "best").is_dir():
            raise ValueError(f"it is the folder of a run; its best model is {path / 'best'}")
        raise ValueError("it is no folder with a config.json, so no model")
    for file in path.iterdir():
        if file.is_file() and file.open("rb").read(len(pointer)) == pointer:
            raise ValueError(f"{file.name} is only a pointer; fetch the file with `git lfs pull`")


def no_such_folder(name: str) -> str:
    """The error for a path where there is nothing; it names the existing folder nearest to it."""
    path = Path(name).absolute()
    there = next(folder for folder in path.parents if folder.is_dir())
    names = [folder.name for folder in there.iterdir() if folder.is_dir()]
    close = difflib.get_close_matches(path.relative_to(there).parts[0], names, n=1)
    return f"no such folder in {there}" + (f", the nearest is {there / close[0]}" if close else "")


@functools.cache
def reach_hub(name: str, revision: str | None, *, kind: str = "model") -> str | None:
    """Let the run read the hub's cache alone if the hub cannot be reached for what is no folder.

    The hub is tried once: its own client asks six times for each file, in 24 s. `kind` is "model"
    or "dataset". Returns why, if so; OSError if the cache lacks the model.
    """
    import huggingface_hub  # takes a moment, and this file is imported before any mistake is told
    from huggingface_hub.errors import HfHubHTTPError

    if Path(name).exists() or huggingface_hub.is_offline_mode():
        return None
    try:
        url = huggingface_hub.hf_hub_url(name, "config.json", revision=revision, repo_type=kind)
        huggingface_hub.get_hf_file_metadata(url, timeout=10)
    except ValueError:  # it is no id of the hub, which loading says better
        return None
    except Exception as error:  # the HTTP client's, which has another name in each version
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            return None  # the hub was reached
        huggingface_hub.constants.HF_HUB_OFFLINE = True
        files = ("config.json", "adapter_config.json")
        cached = functools.partial(huggingface_hub.try_to_load_from_cache, name, revision=revision)
        problem = f"{huggingface_hub.constants.ENDPOINT} cannot be reached: {error}"
        if kind == "model" and not any(isinstance(cached(file), str) for file in files):
            raise OSError(f"{problem}; the cache lacks the model") from error
        return problem
