"""Does it learn as TRL does, and how soon: pass@1 here and in TRL's GRPOTrainer, three seeds each.

    pip install trl==1.16.0 matplotlib==3.11.2
    OMP_NUM_THREADS=2 python benchmarks/learning.py     # goes on where it was stopped
    python benchmarks/learning.py --draw                # only the table and the picture
    python benchmarks/learning.py --same-rollouts       # both learn from our completions

The default run on one process: the same model, questions, rewards, loss, optimizer,
warm-up and clipping, and both are measured by main.py's evaluation, on the same held-out questions
with the same random numbers. The sides run one after the other, with the same number of threads.
Minutes are those of the steps; evaluations do not count on either side. TRL samples with
`model.generate`, without vLLM.

Each run leaves its evaluations in results/learning.csv, where `run` is <side>-s<seed>; a run that
has them is not repeated. Our own run goes on from its last checkpoint, TRL's begins again.

What is sampled is chance. With --same-rollouts TRL's trainer gets our completions in place of its
own: what remains is TRL's rewards, advantages, loss and optimizer, so its weights should stay ours
but for rounding. How far rounding goes is seen on a third model, ours with other micro-batches.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from common import keep_run, kept_runs, print_table, questions_per_step, seeds_of  # first: modules
from pandas import DataFrame
from torch import nn
from torch.nn.utils import parameters_to_vector
from transformers import TrainerCallback

import main as program
from engine import ROOT
from engine.core.measures import Clock
from engine.core.packages import import_package
from engine.report.metrics import evaluation_metrics
from engine.run.state import Run
from tools.plot import STYLE, draw_curve

SIDES = ("TRL", "plain-grpo")
LEVEL = 0.85  # of pass@1: the time to reach it is reported
TRL_MICRO_BATCH = 64  # rows; 16 and 32 were as fast, 128 and 512 slower
METRICS = ("eval/pass@1", "eval/pass@1_low", "eval/pass@1_high")
QUICK = [
    "task.max_train_examples=64",
    "training.num_steps=2",
    "training.num_samples_per_step_global=2",
    "training.k_best_of_n=[4, 4]",
    "training.max_new_gen_tokens=64",  # long enough for an answer
    "validation.num_examples=4",
    "validation.best_of_n=2",
    "validation.pass_k=[1]",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--same-rollouts", action="store_true", help="only compare the updates")
    parser.add_argument("--quick", action="store_true", help="two tiny steps: does it run?")
    options = parser.parse_args()
    if options.same_rollouts:
        return compare_updates(settings(options.seeds[0], is_quick=options.quick))
    file = options.out / "learning.csv"
    folder = (options.out if options.quick else ROOT) / "runs/learning"
    for seed in [] if options.draw else options.seeds:
        for side in options.sides:
            run = f"{side}-s{seed}"
            if run not in kept_runs(file):
                print(f"{side}, seed {seed}", flush=True)
                take = run_trl if side == "TRL" else run_ours
                rows = take(settings(seed, is_quick=options.quick), folder / run)
                keep_run(file, run, DataFrame(rows))
    curves = {side: read_curves(file, side) for side in SIDES}
    report({side: found for side, found in curves.items() if len(found)})
    draw(curves, options.out / "learning.png")


def settings(seed: int, *, is_quick: bool) -> list[str]:
    """What both sides are given: the default run's step, in one process."""
    return [
        f"training.seed={seed}",
        f"training.num_samples_per_step_global={questions_per_step()}",
        "model.compute_dtype=float32",
        "validation.every=5",
        *(QUICK if is_quick else []),
    ]


# The two sides


def run_ours(overrides: list[str], folder: Path) -> list[dict[str, float]]:
    """A plain run of main.py, which resumes by itself; its evaluations."""
    where = [f"run.dir={folder.parent}", f"run.name={folder.name}"]
    subprocess.run([sys.executable, "main.py", *overrides, *where], cwd=ROOT, check=True)
    rows, seconds = [], 0.0
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        seconds += metrics.get("time/step_s", 0.0)
        if METRICS[0] in metrics:
            rows.append(as_row(metrics["step"], seconds, metrics))
    return rows


def run_trl(overrides: list[str], folder: Path) -> list[dict[str, float]]:
    """TRL's trainer takes our run's model and trains it; the evaluations are ours."""
    from trl_side import load_silent_run, make_trainer, num_rows  # here: the rest needs no TRL

    with tempfile.TemporaryDirectory() as temporary:
        run = load_silent_run([*overrides, f"run.dir={temporary}", f"run.name={folder.name}"])
        course, micro_batch = Course(run), min(TRL_MICRO_BATCH, num_rows(run))
        trainer = make_trainer(run, run.policy.model, course, micro_batch=micro_batch)
        assert trainer.model is run.policy.model, "what is trained is not what is measured"
        course.measure(step=0)
        trainer.train()
    return course.rows


class Course(TrainerCallback):
    """Times each of TRL's steps, and measures the model as main.py would, between two of them."""

    def __init__(self, run: Run):
        self.run = run
        self.seconds = 0.0
        self.rows: list[dict[str, float]] = []

    def on_step_begin(self, *args: object, **kwargs: object) -> None:
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs: object) -> None:
        self.seconds += time.perf_counter() - self.start
        config, step = self.run.config, state.global_step
        if step % config.validation.every == 0 or step == config.training.num_steps:
            self.measure(step)
            print(f"  step {step}: pass@1 {self.rows[-1][METRICS[0]]:.3f}", flush=True)

    def measure(self, step: int) -> None:
        run = self.run
        run.policy.sampler.refresh()
        groups = program.sample_validation(run)
        metrics = evaluation_metrics(groups, run.task, run.config.validation, run.world)
        self.rows.append(as_row(step, self.seconds, metrics))


def as_row(step: int, seconds: float, metrics: dict[str, float]) -> dict[str, float]:
    return {"step": step, "minutes": seconds / 60} | {name: metrics[name] for name in METRICS}


# The same rollouts


def compare_updates(overrides: list[str]) -> None:
    """Train three copies of the model on the same completions, and print how far they part."""
    from trl_side import load_silent_run, make_trainer, num_rows

    with tempfile.TemporaryDirectory() as folder:
        overrides = [*overrides, f"run.dir={folder}"]
        run = load_silent_run([*overrides, "run.name=ours"])
        other_cut = "training.micro_batch_tokens=3000"
        again = load_silent_run([*overrides, other_cut, "run.name=again"])
        copies = Copies(run, again, copy.deepcopy(run.policy.model))
        micro_batch = min(TRL_MICRO_BATCH, num_rows(run))
        trainer = make_trainer(run, copies.theirs, copies, micro_batch=micro_batch)
        trainer.rollout_func = copies.roll_out  # instead of sampling
        trainer.train()


class Copies(TrainerCallback):
    """Our model, which samples; the same with other micro-batches; and TRL's."""

    def __init__(self, run: Run, again: Run, theirs: nn.Module):
        self.run, self.again, self.theirs = run, again, theirs
        again.state = run.state  # in which step they are
        self.start = parameters_to_vector(theirs.parameters()).detach()

    def roll_out(self, prompts: list, trainer: object) -> dict:
        """Sample, take the step of both of ours, and give TRL the completions."""
        from trl_side import replay, roll_out

        state, groups = self.run.state, roll_out(self.run, Clock())
        program.assign_advantages(groups, self.run.config.training)
        for run in (self.run, self.again):
            program.update_policy(run, groups)
        state.step += 1
        state.position += len(groups)
        return replay(groups, prompts, trainer)

    def on_step_end(self, args, state, control, **kwargs: object) -> None:
        if state.global_step % self.run.config.validation.every == 0:
            models = (self.run.policy.model, self.theirs, self.again.policy.model)
            ours, *copies = (parameters_to_vector(m.parameters()).detach() for m in models)
            distances = ((ours - other).double().norm() for other in (self.start, *copies))
            moved, theirs, rounding = (distance.item() for distance in distances)
            print(
                f"step {state.global_step}: the weights have moved by {moved:.3f}; apart from them "
                f"by {theirs:.1e}: TRL's, by {rounding:.1e}: ours with other micro-batches",
                flush=True,
            )


# What is seen


def read_curves(file: Path, side: str) -> np.ndarray:
    """Steps, minutes and pass@1 of a side's seeds, (seeds, 3, evaluations)."""
    runs, columns = seeds_of(kept_runs(file), side).values(), ["step", "minutes", METRICS[0]]
    return np.array([rows[columns].to_numpy().T for rows in runs])


def standard_error(rates: np.ndarray) -> np.ndarray:
    """Of the mean over the seeds, from rates (seeds, evaluations)."""
    return rates.std(axis=0, ddof=1) / np.sqrt(len(rates))


def time_to(level: float, minutes: np.ndarray, rates: np.ndarray) -> float:
    """Minutes until the rate is first at the level, in a line between evaluations; else NaN."""
    reached = np.flatnonzero(rates >= level)
    if len(reached) == 0:
        return float("nan")
    end = reached[0]
    if end == 0:
        return float(minutes[0])
    part = slice(end - 1, end + 1)
    return float(np.interp(level, rates[part], minutes[part]))


def report(curves: dict[str, np.ndarray]) -> None:
    """Print how the sides' means compare at each evaluation, and when each seed is at LEVEL."""
    if len(curves) == 2 and min(map(len, curves.values())) > 1:
        theirs, ours = (curves[side][:, 2] for side in SIDES)
        limits = 2 * np.hypot(standard_error(theirs), standard_error(ours))
        differences = ours.mean(axis=0) - theirs.mean(axis=0)
        means = zip(curves["TRL"][0, 0], theirs.mean(axis=0), ours.mean(axis=0), strict=True)
        print_table(
            ["step", *SIDES, "difference", "two standard errors", "within"],
            [
                [f"{step:.0f}", *(f"{value:.3f}" for value in (*two, difference, limit)), within]
                for (step, *two), difference, limit, within in zip(
                    means, differences, limits, np.abs(differences) <= limits, strict=True
                )
            ],
        )
    print_table(
        ["", f"minutes to {LEVEL}, each seed", "minutes of all steps, each seed"],
        [
            [
                side,
                " ".join(f"{time_to(LEVEL, *curve[1:]):.1f}" for curve in found),
                " ".join(f"{curve[1, -1]:.1f}" for curve in found),
            ]
            for side, found in curves.items()
        ],
    )


def draw(curves: dict[str, np.ndarray], file: Path) -> None:
    """pass@1 over steps and over minutes: the mean of a side's seeds, in a band of their range.

    It is README's first picture: narrow, so that its text can be read on a phone.
    """
    import_package("matplotlib", key="benchmarks/learning.py")
    from matplotlib import style
    from matplotlib.figure import Figure

    text = {"font.size": 11, "legend.fontsize": 11, "axes.titlesize": 11}
    with style.context([STYLE, text], after_reset=True):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")  # inches
        left, right = figure.subplots(1, 2, sharey=True)
        for i, side in enumerate(SIDES):
            if len(found := curves[side]):
                band = found[:, 2].min(axis=0), found[:, 2].max(axis=0)
                curve = np.stack([*found.mean(axis=0), *band])
                draw_curve(left, i, curve[0], curve)
                draw_curve(right, i, curve[1], curve)
                left.get_lines()[-1].set_label(side)
        left.set(xlabel="steps", ylabel="solved (pass@1)", ylim=(0, 1))
        right.set(xlabel="minutes of training")
        left.legend(loc="lower right")
        if all(map(len, curves.values())):
            theirs, ours = (curves[side][:, 1, -1].mean() for side in SIDES)
            title = f"On 2 CPU cores it learns what TRL learns, {theirs / ours:.1f} times as fast"
            figure.suptitle(title, size=13, weight="bold", x=0.01, ha="left")
        figure.savefig(file, dpi=200)
    print(f"written: {file}")


if __name__ == "__main__":
    main()
