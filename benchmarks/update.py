"""The update's log-probabilities: how long they take and how much memory, ours and others.

    python benchmarks/update.py     # on the CPU about 7 minutes; with a GPU, on that

naive holds all logits and gives them to main.py's `token_log_probs`, as a run does where they are
small (`MAX_LOGITS_BYTES` of engine/model/policy.py), the default's too; checkpoint does so for 256
tokens at a time and computes them again for the gradient; ours is `head_log_probs` of
engine/update/head.py, for all larger ones. Head and loss of Qwen2.5-0.5B: hidden size 896,
vocabulary 151,936; fp32 on the CPU, bf16 on a GPU.
"""

import multiprocessing
import os
from functools import partial
from statistics import median

import torch
from common import in_turns, print_table  # first: it finds the script's modules
from torch import nn
from torch.utils.checkpoint import checkpoint

from engine.report.metrics import peak_memory_gb
from engine.update.head import head_log_probs
from main import token_log_probs

HIDDEN, VOCABULARY, TEMPERATURE = 896, 151_936, 1.0
MEASURED_TOKENS, REPEATS = (512, 2048, 8192), 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32


def naive(hidden: torch.Tensor, head: nn.Linear, token_ids: torch.Tensor) -> torch.Tensor:
    with torch.autocast(DEVICE.type, dtype=DTYPE, enabled=DEVICE.type == "cuda"):
        logits = head(hidden)
    return token_log_probs(logits, token_ids, temperature=TEMPERATURE)


def checkpointed(hidden: torch.Tensor, head: nn.Linear, token_ids: torch.Tensor) -> torch.Tensor:
    chunks = zip(hidden.split(256), token_ids.split(256), strict=True)
    return torch.cat([checkpoint(naive, h, head, ids, use_reentrant=False) for h, ids in chunks])


def ours(hidden: torch.Tensor, head: nn.Linear, token_ids: torch.Tensor) -> torch.Tensor:
    return head_log_probs(hidden.to(DTYPE), head, token_ids, temperature=TEMPERATURE)


METHODS = {"naive": naive, "checkpoint": checkpointed, "ours": ours}
TIMED = {512: ("naive", "checkpoint", "ours"), 2048: ("naive", "ours")}
if DEVICE.type == "cuda":  # what blocks of as many columns as fit, 1,638 for the second, would cost
    TIMED |= {10_240: ("ours",), 10_237: ("ours",)}


class Case:
    """Head and loss, forward and backward, of some tokens by one method."""

    def __init__(self, num_tokens: int):
        torch.manual_seed(0)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False, device=DEVICE)
        self.hidden = torch.randn(num_tokens, HIDDEN, device=DEVICE, requires_grad=True)
        self.token_ids = torch.randint(VOCABULARY, (num_tokens,), device=DEVICE)

    def run(self, method: str) -> None:
        self.head.weight.grad = self.hidden.grad = None
        log_probs = METHODS[method](self.hidden, self.head, self.token_ids)
        (-log_probs.mean()).backward()


# Memory


def measure_memory_gib(method: str, num_tokens: int) -> float:
    """Peak memory above weights, hidden states and the gradients of both, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(memory_of_this_process_gib, (method, num_tokens))


def memory_of_this_process_gib(method: str, num_tokens: int) -> float:
    """The peak (ru_maxrss on the CPU) less what it was before, which never falls again.

    A child's peak begins at that of its parent, so that the parent must hold less than the weights.
    """
    case = Case(num_tokens)
    before = peak_memory_gb(DEVICE)
    case.run(method)
    gradients = (case.head.weight.nbytes + case.hidden.nbytes) / 1e9
    return (peak_memory_gb(DEVICE) - before - gradients) * 1e9 / 2**30


def fits(method: str, num_tokens: int) -> bool:
    """Whether the machine has room for the tensors that naive makes, about six of all logits."""
    if DEVICE.type == "cuda":
        total = torch.cuda.get_device_properties(DEVICE).total_memory
    else:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return method != "naive" or 6 * 4 * num_tokens * VOCABULARY < total


def print_memory() -> None:
    rows = []
    for num_tokens in MEASURED_TOKENS:
        row: list[object] = [num_tokens]
        for method in METHODS:
            fit = fits(method, num_tokens)
            row.append(f"{measure_memory_gib(method, num_tokens):.2f}" if fit else "does not fit")
        rows.append(row)
    print("Peak memory of head and loss above weights and gradients, GiB")
    print_table(["tokens", *METHODS], rows)


# Time


def print_times() -> None:
    rows = []
    for num_tokens, methods in TIMED.items():
        case = Case(num_tokens)
        seconds = in_turns({name: partial(case.run, name) for name in methods}, REPEATS)
        medians = {name: median(seconds[name]) for name in methods}
        row: list[object] = [num_tokens]
        row += [f"{medians[name]:.2f}" if name in methods else "-" for name in METHODS]
        row.append(f"{medians['naive'] / medians['ours']:.2f}" if "naive" in methods else "-")
        rows.append(row)
    print(f"Forward and backward of head and loss, s (median of {REPEATS}, in turns)")
    print_table(["tokens", *METHODS, "naive / ours"], rows)


def main() -> None:
    print(f"{DEVICE.type}, {DTYPE}, {torch.get_num_threads()} threads, torch {torch.__version__}\n")
    print_memory()  # first, while this process is small
    print_times()


if __name__ == "__main__":
    main()
