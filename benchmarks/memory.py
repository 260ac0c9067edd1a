"""Does a process on a CPU grow from step to step, and does it take more than it must hold?

    OMP_NUM_THREADS=1 python benchmarks/memory.py FOLDER                # of a chat model
    OMP_NUM_THREADS=1 python benchmarks/memory.py FOLDER untrimmed      # without `trim_heap`

Twelve steps of two-digit sums, whose completions end where they like within 200 tokens, so that
the tensors of each step have other shapes. What must be held: what is resident once all is loaded,
gradients and averages, and what a pass over one full micro-batch adds to that.
"""

import re
import sys
import tempfile
from pathlib import Path

import torch
from common import load_run, print_table  # first: it finds the script's modules

import main
from engine.sampling import batches
from engine.update.optimizer import AVERAGES

SETTINGS = ["task.name=arithmetic", "training.learning_rate=1e-6", "validation.num_examples=8"]
SETTINGS += ["training.num_samples_per_step=4", "training.k_best_of_n=[4,4]"]
SETTINGS += ["training.max_new_gen_tokens=200", "training.num_steps=12"]
SETTINGS += ["training.advantage=benchmarks.own:only_wrong"]  # -1, so that all rows are trained


def gigabytes(field: str) -> float:
    """This process's VmRSS (resident) or VmHWM (its peak), in 10^9 bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024e-9 * int(re.search(rf"{field}:\s+(\d+)", status)[1])


def must_be_held(run: main.Run) -> float:
    row = run.config.training.max_new_gen_tokens + 50  # tokens; a prompt has about 40
    ids = torch.zeros((run.micro_batch_tokens // row, row), dtype=torch.long)
    for _ in range(2):  # the first one makes the gradients
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        (0.0 * run.policy.inner_scorer(ids, ids == 0, temperature=1.0).sum()).backward()
        batches.trim_heap()
    run.optimizer.zero_grad()
    num_bytes = AVERAGES[run.config.training.optimizer] * sum(
        w.numel() for w in run.trained_weights
    )
    return gigabytes("VmHWM") + 1e-9 * num_bytes


def measure(folder: str, *untrimmed: str) -> None:
    table, log_step = [], main.log_step
    main.log_step = lambda *given: (
        table.append([len(table) + 1, gigabytes("VmRSS"), gigabytes("VmHWM")]) or log_step(*given)
    )
    with tempfile.TemporaryDirectory() as runs:
        run = load_run([*SETTINGS, f"model.name={folder}", f"run.dir={runs}"])
        held = must_be_held(run)
        if untrimmed:
            batches.trim_heap = lambda: None
        main.run_training(run)
    print_table(["step", "resident, GB", "peak, GB"], [[f"{x:.3g}" for x in row] for row in table])
    (_, third, _), (_, last, peak) = table[2], table[-1]
    print(f"resident after the last step / after the third: {last / third:.2f} (at most 1.1)")
    print(f"peak / {held:.2f} GB that must be held: {peak / held:.2f} (at most 1.3)")


if __name__ == "__main__":
    measure(*sys.argv[1:])
