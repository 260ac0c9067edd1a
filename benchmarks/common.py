"""What the benchmarks share: the script's modules, the tables in results/, and timing in turns."""

import csv
import fcntl
import io
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the script's modules

import main
from engine.core.files import write_atomically
from engine.run.config_file import load_config
from engine.run.state import Run
from engine.sampling.sampler import copy_in

torch.backends.cuda.enable_cudnn_sdp(False)  # as engine/core/distributed.py does for a run


def questions_per_step(arguments: Sequence[str] = ()) -> int:
    """Questions in a step of the default run, or of what arguments name, on two ranks."""
    return load_config(list(arguments)).questions_per_step(2)


def load_run(arguments: Sequence[str]) -> Run:
    """What main.py loads, given these arguments."""
    run = main.build_run(load_config(list(arguments)))
    if run.config.mode == "train":
        main.open_or_resume(run)
    return run


def bf16_copy(model: nn.Module) -> nn.Module:
    """A frozen copy that samples as the one in a run: bf16 weights, and the buffers as they are."""
    return copy_in(torch.bfloat16, model, model.device)


# A table of runs: a .csv file of results/ whose column `run` has the row's name and seed


def kept_runs(file: Path) -> dict[str, pandas.DataFrame]:
    """The runs of a table by name, each with the columns that it has; {} if there is no file."""
    if not file.exists():
        return {}
    groups = pandas.read_csv(file, dtype={"run": str}).groupby("run")
    return {run: rows.drop(columns="run").dropna(axis=1, how="all") for run, rows in groups}


def seeds_of(runs: dict[str, pandas.DataFrame], row: str) -> dict[str, pandas.DataFrame]:
    """The runs <row>-s0, <row>-s1 and so on."""
    return {run: rows for run, rows in runs.items() if re.fullmatch(rf"{row}-s\d+", run)}


def keep_run(file: Path, run: str, rows: pandas.DataFrame) -> None:
    """Add a run to a table, or put it in its old place.

    The other runs' numbers stay to the last digit. The lock on the folder makes scripts that write
    at the same time wait for each other; else the second would write the table without the first's.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        old = list(csv.DictReader(file.open(newline=""))) if file.exists() else []
        new = csv.DictReader(io.StringIO(rows.to_csv(index=False)))
        table = [row for row in old if row["run"] != run] + [{"run": run} | row for row in new]
        table.sort(key=lambda row: row["run"])  # the order does not tell which run ended first
        text, names = io.StringIO(), dict.fromkeys(name for row in table for name in row)
        writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
        write_atomically(file, text.getvalue())
    finally:
        os.close(folder)  # and so unlocks it


# Timing


def in_turns(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call: all functions once, then all again, so that drift hits them alike.

    Each is called once before, to warm up.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(repeats + 1):
        for name, function in functions.items():
            elapsed_s = time_once(function)
            if turn > 0:
                seconds[name].append(elapsed_s)
    return seconds


def time_once(function: Callable[[], object]) -> float:
    """Seconds of one call, until the GPU is done where there is one."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def print_table(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """The first column is left-aligned, the others right-aligned."""
    cells = [list(headers), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    for row in cells:
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(padded).rstrip())
    print(flush=True)
