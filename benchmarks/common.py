"""What the benchmarks share: the script's modules, timing in turns, and tables."""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the script's modules

import main
from engine.model.sampler import copy_in
from engine.run.config_file import load_config
from engine.run.state import Run

torch.backends.cuda.enable_cudnn_sdp(False)  # as engine/core/distributed.py does for a run


def questions_per_step(arguments: Sequence[str] = ()) -> int:
    """Questions in a step of the default run, or of what arguments name, on two ranks."""
    return 2 * load_config(list(arguments)).questions_per_rank(2)


def load_run(arguments: Sequence[str]) -> Run:
    """What main.py loads, given these arguments."""
    run = main.build_run(load_config(list(arguments)))
    if run.config.mode == "train":
        main.begin(run)
    return run


def bf16_copy(model: nn.Module) -> nn.Module:
    """A frozen copy that samples as the one in a run: bf16 weights, and the buffers as they are."""
    return copy_in(torch.bfloat16, model, model.device)


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
