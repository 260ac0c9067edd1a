"""Where a task's questions come from: local files and the hub; and which are held out."""

import glob
import hashlib
import random
from collections.abc import Callable
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


def read_rows(
    table: "Dataset",
    names: tuple[str, str],
    parse_row: Callable[[object, object], dict],
    *,
    source: str,
    example_row: str,
) -> list[dict]:
    """`parse_row` of the two columns called `names`, row by row.

    Raises ValueError, which shows a good row, for a missing column or where `parse_row` does.
    """
    missing = sorted(set(names) - set(table.column_names))
    if missing:
        raise ValueError(
            f"{source}: no column {' and '.join(missing)} among {', '.join(table.column_names)}; "
            f"rows must look like {example_row}"
        )
    columns = table.select_columns(list(names)).to_dict()
    rows = []
    for values in zip(*(columns[name] for name in names), strict=True):
        try:
            rows.append(parse_row(*values))
        except ValueError as error:
            raise ValueError(
                f"{source}, row {len(rows) + 1}: {error}; rows must look like {example_row}"
            ) from error
    return rows


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
