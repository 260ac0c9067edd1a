"""Files of questions: what of a CSV is a number, and whose rows are text."""

import csv
import io
import json
import re
from pathlib import Path

FILE_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
DECIMAL = re.compile(r"-?(0|[1-9][0-9]{0,17})(\.[0-9]+)?")


class CsvRow(dict):
    """A row of a CSV file: its cells are text, whatever else is in the file."""


def split_source(source: str) -> tuple[str, str | None, str]:
    """The name, the revision and the rest of owner/name@revision:configuration:split."""
    name, colon, rest = source.partition(":")
    name, _, revision = name.partition("@")
    return name, revision or None, colon + rest


def is_on_hub(source: str) -> bool:
    return split_source(source)[0].count("/") == 1 and not is_file_name(source)


def is_file_name(source: str) -> bool:
    """Whether `source` is named like a file that can be loaded; it need not exist."""
    return Path(source).suffix.lower() in FILE_FORMATS


def read_text_file(path: Path) -> list[dict] | list[str]:
    """The rows of a .csv, .json or .jsonl file; a CSV file's cells and a .jsonl row are text.

    `datasets` would guess one type for a whole column. Then a single cell of another type changes
    the other cells, or is an error without the number of its row.
    """
    text = path.read_text("utf-8-sig")
    if path.suffix.lower() != ".csv":
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [line for line in text.split("\n") if line.strip()]
    rows = []
    start = 1
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        names = reader.fieldnames or []
        if twice := [name for name in filter(None, names) if names.count(name) > 1]:
            raise ValueError(f"two columns are named {twice[0]}")
        # A column without a name gets the one that `datasets` gives it.
        reader.fieldnames = [name or f"Unnamed: {place}" for place, name in enumerate(names)]
        start = reader.line_num + 1
        for row in reader:
            if any(row.pop(None, [])):  # cells beyond the last column
                raise ValueError("more cells than columns: quote commas")
            if any(row[name] is None for name in filter(None, names)):
                raise ValueError("fewer cells than columns: an unclosed quote eats what follows")
            rows.append(CsvRow((name, cell or "") for name, cell in row.items()))
            start = reader.line_num + 1
    except (csv.Error, ValueError) as error:
        fix = ': write a quote within quotes twice, as "", and longer texts into a .jsonl file'
        fix *= isinstance(error, csv.Error)
        raise ValueError(f"line {start}: {error}{fix}") from None
    return rows


def number_in(cell: str) -> int | float | str:
    """The number that a plain decimal is; other texts stay themselves, such as 007 and 1e7."""
    return json.loads(cell) if DECIMAL.fullmatch(cell) else cell


def with_numbers(row: dict, columns: set[str]) -> dict:
    """A CSV's row with numbers in these columns, None where a cell is blank."""
    if not isinstance(row, CsvRow):
        return row
    numbers = {n: number_in(row[n]) if row[n].strip() else None for n in columns & row.keys()}
    return row | numbers  # a dict, no CsvRow
