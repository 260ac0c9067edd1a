"""Where a task's questions come from: local files and the hub; and which are held out."""

import glob
import hashlib
import random
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # datasets takes a second to import, so it is imported where rows are loaded
    from datasets import Dataset

FILE_FORMATS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}
FILE_OR_HUB = "a .jsonl, .json, .csv or .parquet file, or a hub dataset id (owner/name)"
HELD_OUT_SHARE = 1 / 8


def check_request(split: str, num_examples: int | None) -> None:
    """Raises ValueError for a split or a number of examples that no task has."""
    if split not in ("train", "validation"):
        raise ValueError(f"split must be train or validation, not {split!r}")
    if num_examples is not None and num_examples < 1:
        raise ValueError(f"num_examples {num_examples}: choose at least 1")


def is_file(source: str) -> bool:
    """Whether `source` is the name of a file that can be loaded, there or not."""
    return Path(source).suffix.lower() in FILE_FORMATS


def load_table(
    source: str,
    *,
    choices: str = FILE_OR_HUB,
    hub_config: str | None = None,
    hub_split: str = "train",
) -> "Dataset":
    """The file, or that split of the hub dataset, as it is; ValueError where there is none.

    `choices` says in that error's words which sources the task has.
    """
    import datasets

    datasets.disable_progress_bars()  # they would fill a log file
    path = Path(source)
    if is_file(source) and not path.is_file():
        raise ValueError(f"{source}: no such file; give {choices}")
    if not is_file(source) and (path.exists() or source.count("/") != 1):
        raise ValueError(f"{source}: unknown kind of source; give {choices}")
    try:
        if is_file(source):
            file_format = FILE_FORMATS[path.suffix.lower()]
            return datasets.load_dataset(file_format, data_files=glob.escape(source), split="train")
        return datasets.load_dataset(source, hub_config, split=hub_split)
    except (OSError, ValueError, StopIteration, datasets.exceptions.DatasetsError) as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0] or "it is empty"
        raise ValueError(f"{source}: cannot be loaded ({reason}); give {choices}") from error


def is_key_held_out(key: str) -> bool:
    """True for a fixed 1 in 8 of all questions, which are for validation, never for training."""
    return hashlib.sha256(key.encode()).digest()[0] < 256 * HELD_OUT_SHARE


def choose_rows(
    rows: list[dict], split: str, num_examples: int | None, *, seed: int, source: str
) -> list[dict]:
    """All rows, or `num_examples` of them drawn by `seed`; ValueError where there are none."""
    if not rows:
        raise ValueError(f"{source}: no question left for {split}; give a file with more rows")
    if num_examples is None or num_examples >= len(rows):
        return rows
    return random.Random(seed).sample(rows, num_examples)
