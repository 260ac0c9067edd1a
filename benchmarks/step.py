"""A whole GRPO step, rollout to update: this repository's against TRL's GRPOTrainer, in turns.

    pip install trl==1.16.0
    python benchmarks/step.py     # of several GPUs show it one: CUDA_VISIBLE_DEVICES=0
    python benchmarks/step.py --model FOLDER    # a chat model that learns to add

One process, so the same threads; the same model (tiny/ or FOLDER, fp32), questions, reward, loss
(Dr. GRPO: no KL, no division by the standard deviation) and optimizer; TRL samples with
`model.generate`, without vLLM. First both compute the gradient of the same rollouts, which must
agree; then their steps alternate, TRL's first. At a learning rate of 1e-6 the models hardly
change, so that their completions stay equally long.
"""

import argparse
import copy
import functools
import os
import statistics
import tempfile
import time

import torch
from common import print_table, synchronize  # first: it finds the script's modules
from transformers import TrainerCallback
from trl_side import GRPOTrainer, load_silent_run, make_trainer, num_rows, replay, roll_out

from engine.core.statistics import Clock, reduce_means
from engine.core.types import Trajectory
from engine.report.metrics import rollout_sums
from engine.run.state import Run
from main import assign_advantages, make_micro_batches, micro_batch_loss, update_policy

TINY_SIZES, CHAT_SIZES = (32, 16, 208), (8, 8, 24)  # questions, samples, new tokens
LEARNING_RATE = 1e-6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5, help="steps of each, after one to warm up")
    parser.add_argument("--trl-micro-batch", type=int, default=64, help="rows, divides the batch")
    parser.add_argument("--model", help="a folder with a chat model, in place of tiny/")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(folder, options)
        turns = Turns(run)
        model = copy.deepcopy(run.policy.model)
        trainer = make_trainer(run, model, turns, micro_batch=options.trl_micro_batch)
        check_gradient(run, trainer)
        trainer.train()
    print_results(trainer, turns)


def load_run(folder: str, options: argparse.Namespace) -> Run:
    """Our side: the default run with the sizes above, silent from here on."""
    questions, samples, max_new_tokens = CHAT_SIZES if options.model else TINY_SIZES
    overrides = [
        f"run.dir={folder}",
        "model.compute_dtype=float32",
        f"training.num_steps={options.steps + 1}",
        f"training.num_samples_per_step={questions}",
        f"training.k_best_of_n=[{samples},{samples}]",
        f"training.max_new_gen_tokens={max_new_tokens}",
        f"training.learning_rate={LEARNING_RATE}",
        "training.warmup_steps=0",
        "validation.num_examples=1",
    ]
    if options.model:
        overrides += [f"model.name={options.model}", "task.name=arithmetic"]
    return load_silent_run(["--config", os.devnull, *overrides])


# The same rollouts give the same gradient


def check_gradient(run: Run, trainer: GRPOTrainer) -> None:
    """Print how the two gradients of one batch of rollouts compare; stop unless they agree."""
    ours, groups = our_gradient(run)
    theirs = trl_gradient(trainer, run, groups)
    cosine = torch.nn.functional.cosine_similarity(ours, theirs, dim=0).item()
    ratio = (ours.norm() / theirs.norm()).item()
    print(f"gradient of the same rollouts: cosine {cosine:.7f}, ratio of the norms {ratio:.7f}")
    assert cosine > 0.999, "the two do not compute the same gradient"
    assert abs(ratio - 1) < 0.001, "the two gradients differ in length"


def our_gradient(run: Run) -> tuple[torch.Tensor, list[list[Trajectory]]]:
    """The gradient of our update before it is clipped, and the rollouts that it is of."""
    groups, training = roll_out(run, Clock()), run.config.training
    assign_advantages(groups, training)
    run.policy.model.train()
    for micro_batch in make_micro_batches(groups, training, run.world):
        micro_batch_loss(run.policy, micro_batch, training, {}).backward()
    gradient = flat_gradient(run.policy.model)
    run.policy.model.zero_grad()
    return gradient, groups


def trl_gradient(trainer: GRPOTrainer, run: Run, groups: list[list[Trajectory]]) -> torch.Tensor:
    """TRL's gradient of these rollouts: its own rewards, advantages and loss of our tokens."""
    rows = [trainer.train_dataset[i] for i, group in enumerate(groups) for _ in group]
    prompts, *_ = trainer._tokenize_prompts([row["prompt"] for row in rows])
    assert prompts == [t.prompt_ids for group in groups for t in group], "other prompts"
    trainer.model.train()
    trainer.rollout_func = functools.partial(replay, groups)  # instead of sampling
    inputs = trainer._generate_and_score_completions(rows)
    trainer.rollout_func = None
    trainer.current_gradient_accumulation_steps = 1  # all rows at once
    trainer.compute_loss(trainer.model, inputs).backward()
    gradient = flat_gradient(trainer.model)
    trainer.model.zero_grad()
    trainer._metrics["train"].clear()  # the check is no step
    return gradient


def flat_gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


# Steps in turns


class Turns(TrainerCallback):
    """Times each of TRL's steps (without the reading of its data), then takes and times ours."""

    def __init__(self, run: Run):
        self.run = run
        self.trl_s: list[float] = []
        self.our_s: list[float] = []
        self.our_rows: list[dict[str, float]] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.start = now()

    def on_step_end(self, *args: object, **kwargs: object) -> None:
        end = now()
        self.trl_s.append(end - self.start)
        row = take_step(self.run)
        self.our_s.append(now() - end)
        self.our_rows.append(row)


def take_step(run: Run) -> dict[str, float]:
    """One step as main.py takes it, without evaluation and files; returns its metrics."""
    clock = Clock()
    groups = roll_out(run, clock)
    assign_advantages(groups, run.config.training)
    with clock("update"):
        update_policy(run, groups)
    run.state.position += len(groups)
    sums = rollout_sums(groups, run.task.REWARD_PARTS)
    return reduce_means(sums, run.world) | clock.read()


def now() -> float:
    synchronize()
    return time.perf_counter()


def print_results(trainer: GRPOTrainer, turns: Turns) -> None:
    """Median times without each one's first step, which warms up; means over all steps."""
    theirs = trainer.state.log_history[-1]
    names = ("train/completion_tokens", "train/reward")
    tokens, reward = (statistics.mean(row[name] for row in turns.our_rows) for name in names)
    median = statistics.median(turns.our_s[1:])
    table = [
        ("TRL", turns.trl_s[1:], float(theirs["completions/mean_length"]), float(theirs["reward"])),
        ("plain-grpo", turns.our_s[1:], tokens, reward),
    ]
    where = f"{torch.get_num_threads()} threads, {turns.run.world.device}"
    print(f"{where}, {num_rows(turns.run)} rows a step\n")
    print_table(
        ["", "seconds a step", "range", "times ours", "tokens a completion", "reward"],
        [
            [
                name,
                f"{statistics.median(seconds):.2f}",
                f"{min(seconds):.2f} to {max(seconds):.2f}",
                f"{statistics.median(seconds) / median:.2f}",
                f"{mean_length:.1f}",
                f"{mean_reward:.3f}",
            ]
            for name, seconds, mean_length, mean_reward in table
        ],
    )
    for phase in ("rollout", "update"):
        seconds = [row[f"time/{phase}_s"] for row in turns.our_rows[1:]]
        print(f"ours, {phase}: {statistics.median(seconds):.2f} s")
    equal = statistics.mean(row["train/zero_advantage_frac"] for row in turns.our_rows)
    print(f"{equal:.0%} of our groups are equal: their rows are not in our update, but in TRL's")


if __name__ == "__main__":
    main()
