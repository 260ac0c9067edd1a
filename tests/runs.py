"""Whole runs of main.py, and what two runs must have in common to be the same."""

import contextlib
import csv
import json
import os
import runpy
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from conftest import NUM_THREADS, NUMBERS, forkserver, seed
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": str(NUM_THREADS), "CUDA_VISIBLE_DEVICES": ""}
SHORT_RUN = (
    "--config",
    os.devnull,
    f"training.seed={seed()}",
    "training.num_samples_per_step=2",
    "training.k_best_of_n=[8, 8]",
    "training.max_new_gen_tokens=16",
    "training.learning_rate=1e-3",
    "validation.num_examples=4",
    "validation.best_of_n=2",
    "validation.pass_k=[1, 2]",
    "validation.every=2",
    "checkpoint.every=1",
)
TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]


def command(folder: Path, model: Path, *overrides: str, num_ranks: int = 1) -> list[str]:
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += [*TORCHRUN, f"--nproc-per-node={num_ranks}"]
    return [*launcher, *program(folder, model, *overrides)]


def program(
    folder: Path,
    model: Path,
    *overrides: str,
    fault: dict | None = None,
    grading: dict | None = None,
) -> list[str]:
    """main.py and what it takes, its rewards by text (see graded.py).

    `grading` are options of graded.py. There is a fault if one is given (see faults.py).
    """
    options = grading or {}
    script = ["tests/graded.py", json.dumps(options)]
    if fault is not None:
        script = ["tests/faults.py", json.dumps(fault | {"grading": options})]
    return [
        *script,
        *SHORT_RUN,
        f"model.name={model}",
        f"run.dir={folder}",
        "run.name=x",
        *overrides,
    ]


# Runs in a fork of a process that has imported everything: a start takes a second, not ten


def start(arguments: list[str], *torchrun: str, log: Path) -> BaseProcess:
    """A process of its own that runs the program, under torchrun if that is given options."""
    process = forkserver().Process(target=run_program, args=(arguments, torchrun, log))
    process.start()
    return process


def run_program(arguments: list[str], torchrun: tuple[str, ...], log: Path) -> None:
    """The body of that process, and of a group: torchrun's workers are forks of it."""
    os.setsid()
    os.chdir(ROOT)
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(NUM_THREADS)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if torchrun:
        sys.argv = ["torchrun", *torchrun, "--run-path", "--start-method=fork", *arguments]
        runpy.run_module("torch.distributed.run", run_name="__main__")
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


def finish(*processes: BaseProcess, timeout_s: float = 90) -> list[int | None]:
    """Exit statuses, None where time was up; nothing of the processes' groups is left running."""
    try:
        for process in processes:
            process.join(timeout_s)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def train_forked(
    folder: Path,
    model: Path,
    *overrides: str,
    num_ranks: int = 1,
    fault: dict | None = None,
    grading: dict | None = None,
) -> tuple[int | None, str]:
    """Exit status and output."""
    folder.mkdir(exist_ok=True)
    options = ["--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    arguments = program(folder, model, *overrides, fault=fault, grading=grading)
    (status,) = finish(start(arguments, *options, log=folder / "log"))
    return status, (folder / "log").read_text(errors="replace")


def train(
    folder: Path,
    model: Path,
    *overrides: str,
    num_ranks: int = 1,
    grading: dict | None = None,
) -> str:
    """Output of a run that ends well."""
    status, output = train_forked(folder, model, *overrides, num_ranks=num_ranks, grading=grading)
    assert status == 0, output
    return output


# What is left of a run


def write_questions(file: Path) -> Path:
    """Questions of prompts that are of about one length."""
    rows = [{"nums": [number], "target": number} for number in NUMBERS]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def without_times(row: dict) -> dict:
    return {name: row[name] for name in row if not name.startswith(("time/", "perf/"))}


def what_is_left(folder: Path) -> tuple[dict, list[dict], list[dict], str]:
    """Weights, metrics but times, samples: what a resumed run must have in common."""
    run = folder / "x"
    weights = {}
    for name in ("checkpoints/last", "best"):
        model = AutoModelForCausalLM.from_pretrained(run / name)
        weights |= {f"{name}: {key}": value for key, value in model.state_dict().items()}
    lines = (run / "metrics.jsonl").read_text().splitlines()
    rows = [without_times(json.loads(line)) for line in lines]
    with (run / "metrics.csv").open(newline="") as file:
        cells = [without_times(row) for row in csv.DictReader(file)]
    return weights, rows, cells, (run / "samples.jsonl").read_text()


def assert_same(one: Path, other: Path) -> None:
    weights, rows, cells, samples = what_is_left(one)
    other_weights, other_rows, other_cells, other_samples = what_is_left(other)
    assert [row["step"] for row in other_rows] == list(range(len(other_rows)))
    assert [int(row["step"]) for row in other_cells] == list(range(len(other_rows)))
    assert rows == other_rows
    assert cells == other_cells
    assert samples == other_samples
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)
