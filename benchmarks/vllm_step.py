"""A whole step of a chat model, sampled by vLLM or by `decode_grouped`.

    OMP_NUM_THREADS=1 python benchmarks/vllm_step.py grouped --model FOLDER  # then vllm, and again
    OMP_NUM_THREADS=1 python benchmarks/vllm_step.py vllm --model FOLDER --dtype bfloat16

A process for each, in an environment of its own: vLLM brings an older transformers, whose sdpa
repeats grouped keys in each layer. The model learns to add (8 questions x 16 samples, up to 48
tokens), on the same questions with the same random numbers. `sync` hands the trained weights to the
sampler: it is a part of the update. At a learning rate of 1e-6 the models hardly change, so that
their completions stay equally long. `--rollouts` leaves the update out.
"""

import argparse
import os
import statistics
import tempfile

import torch
from common import load_run, print_table, time_once  # first: it finds the script's modules

from engine.core.measures import Clock, reduce_means
from engine.core.types import SeedWord
from engine.report.metrics import rollout_metrics
from engine.run.state import Run
from main import assign_advantages, sample_trajectories, update_policy

PHASES = ("rollout", "update", "sync")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", help="grouped or vllm")
    parser.add_argument("--model", required=True, help="a folder with a chat model")
    parser.add_argument("--dtype", default="float32", help="float32 or bfloat16")
    parser.add_argument("--steps", type=int, default=3, help="after one to warm up")
    parser.add_argument("--rollouts", action="store_true", help="without updates")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = load(folder, options)
        rows = [take_step(run, options.rollouts) for _ in range(options.steps + 1)]
    print(f"{torch.get_num_threads()} threads, {options.dtype}; medians of {options.steps} steps\n")
    print_table(
        ["", *(f"{phase}, s" for phase in PHASES), "tokens", "tokens/s", "mismatch, nats"],
        [[options.backend, *summary(rows[1:])]],
    )


def load(folder: str, options: argparse.Namespace) -> Run:
    overrides = [
        f"run.dir={folder}",
        f"model.name={options.model}",
        f"model.compute_dtype={options.dtype}",
        f"sampling.backend={options.backend}",
        "task.name=arithmetic",
        f"training.num_steps={options.steps + 1}",
        "training.num_samples_per_step=8",
        "training.max_new_gen_tokens=48",
        "training.learning_rate=1e-6",
        "training.warmup_steps=0",
        "validation.num_examples=1",
    ]
    return load_run(["--config", os.devnull, *overrides])


def take_step(run: Run, is_rollout_only: bool) -> dict[str, float]:
    """One step as main.py takes it, without evaluation and files; returns its metrics."""
    clock, count = Clock(), run.config.training.num_samples_per_step
    drawn, run.state.position = run.stream.take(run.state.position, count)
    questions = [question for _, question in drawn]
    seeds = [(SeedWord.TRAINING, 0, position) for position, _ in drawn]
    groups = sample_trajectories(run, questions, seeds, run.policy.params, clock)
    assign_advantages(groups, run.config.training)
    for group in groups:  # all rows are trained, also where all of a group earn the same
        for i, trajectory in enumerate(group):
            trajectory.advantage = 1.0 if i % 2 else -1.0
    metrics = {}
    with clock("update"):
        if not is_rollout_only:
            metrics = update_policy(run, groups).metrics
    metrics |= reduce_means(rollout_metrics(groups, run.task.REWARD_PARTS), run.world)
    sync = {"time/sync_s": time_once(run.policy.sampler.refresh)}
    num_tokens = sum(len(t.completion.token_ids) for group in groups for t in group)
    return metrics | clock.read() | sync | {"num_tokens": num_tokens}


def summary(rows: list[dict]) -> list[str]:
    cells = [f"{statistics.median(row[f'time/{phase}_s'] for row in rows):.2f}" for phase in PHASES]
    num_tokens = statistics.median(row["num_tokens"] for row in rows)
    speed = statistics.median(row["num_tokens"] / row["time/rollout_s"] for row in rows)
    mismatch = statistics.mean(row.get("train/sampler_mismatch", 0.0) for row in rows)
    return [*cells, f"{num_tokens:.0f}", f"{speed:.0f}", f"{mismatch:.1e}"]


if __name__ == "__main__":
    main()
