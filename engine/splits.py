"""Which part of a source is for training and which for validation: what light tasks import too."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

FILE_FORMATS = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True)
class Hub:
    """Which part of a hub dataset is loaded. A task that needs another part sets its HUB."""

    usual_id: str | None = None  # the dataset that error messages suggest
    config: str | None = None  # the configuration of usual_id to load
    validation_split: str = "train"  # the split that holds the validation questions
    # One dataset may serve training and validation. True: its split train is divided between them.
    # False: its splits train and validation_split are used as they are.
    divides_train: bool = True


def is_in_split(key: str, split: str) -> bool:
    """Whether a question belongs to the split, if the splits share one source.

    A hash of the question's key decides, so that no question is in both splits, whatever the seed,
    the number of questions or the order of a file. 1 question in 8 is for validation.
    """
    assert split in ("train", "validation"), split
    digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
    is_held_out = digest[0] < 256 / 8
    return is_held_out == (split == "validation")


def is_file(source: str) -> bool:
    """Whether `source` is named like a file that can be loaded; it need not exist."""
    return Path(source).suffix.lower() in FILE_FORMATS
