"""What a run logs of a step, of an evaluation, and of its end: logger.py prints and writes it."""

import contextlib
import math
import platform
import subprocess
from datetime import datetime
from pathlib import Path

import numpy as np
import torch
import transformers

from engine import ROOT
from engine.core.config import Config
from engine.core.files import json_line, sizes_of, write_atomically
from engine.core.measures import Clock, reduce_means
from engine.core.text import plain, shorten
from engine.core.types import Groups, Metrics, Questions
from engine.core.user_file import RewardError
from engine.questions.rewards import read_answer
from engine.questions.tasks import load_task
from engine.report.completions import completion_record, completion_rows
from engine.report.metrics import peak_memory_gb, rollout_metrics, single_answer_metrics
from engine.run.config_file import dump
from engine.run.fingerprint import OWN_CODE, of_own_code
from engine.run.remarks import remark, remark_at_end, remark_on_evaluation, remark_on_step
from engine.run.state import Run, summary
from engine.update.optimizer import Outcome, Update, learning_rate_at

MAX_ROLLOUTS_BYTES = 16_000_000  # of rollouts.jsonl
MAX_GROUPS = 3  # there, of a step
MAX_COMPLETIONS = 16  # there, of a group
MAX_CHARACTERS = 4_000  # there, of a prompt and of a gold answer
MAX_HEADING = 300  # and of a question


def step_metrics(run: Run, groups: Groups, update: Update, clock: Clock) -> Metrics:
    """All that is measured of the step that has ended: means over all ranks, times, memory."""
    world = run.world
    state = run.state
    metrics = update.metrics | reduce_means(rollout_metrics(groups, run.task.REWARD_PARTS), world)
    metrics["train/lr"] = learning_rate_at(state.step, run.config.training)
    if run.policy.grad_scaler.is_enabled():
        metrics["train/loss_scale"] = run.policy.grad_scaler.get_scale()  # of the next update
    metrics |= clock.read()
    num_completions = sum(map(len, groups)) * world.size
    num_tokens = metrics["train/completion_tokens"] * num_completions
    metrics["perf/tokens_per_s"] = num_tokens / metrics["time/step_s"]
    metrics["perf/peak_memory_gb"] = peak_memory_gb(world.device)
    run.watch_for_collapse(metrics)
    metrics["train/skipped_steps"] = state.skipped_steps
    metrics["train/collapsed"] = float(bool(state.signs))
    return with_logged(run, "train", metrics)


def with_logged(run: Run, split: str, metrics: Metrics) -> Metrics:
    """The metrics, and means over all ranks of what task.reward gave to log_metric."""
    if not run.task.functions:
        return metrics
    sums = {}
    for logged in run.world.gather(run.task.take_logged()):
        for name, pair in logged.items():
            sums[name] = sums.get(name, 0.0) + np.array(pair)
    for name in sums:
        if f"{split}/{name}" in metrics:
            problem = f"log_metric: {name} is the run's own: rename the metric"
            if run.state.step <= 1:  # in the first evaluation or step: later it ends no run
                raise RewardError(problem)
            remark(run, "log_metric", problem)
    means = {f"{split}/{name}": float(total / count) for name, (total, count) in sums.items()}
    return metrics | means | metrics  # the run's own stay


def log_step(
    run: Run, metrics: Metrics, questions: Questions, groups: Groups, update: Update
) -> None:
    """Print a step's line, and write its metrics, its rollouts and at times its samples."""
    step = run.state.step
    every = run.config.logging.train_samples_every
    logger = run.logger
    clock = Clock()
    with clock("rollouts_log"):  # a few groups for tools/report.py
        rollouts = describe_step(run, questions, groups, update)
    metrics |= clock.read()
    logger.print_step(step, run.config.training.num_steps, metrics)
    if every > 0 and step % every == 0:
        samples = samples_of(run, groups, questions, "train")
        logger.print_samples(f"training completions of step {step}", samples, start=[])
        logger.log_samples(step, samples)
    logger.log_lines("rollouts.jsonl", rollouts)
    completions_every = run.config.logging.completions_every
    if completions_every > 0 and step % completions_every == 0:
        mine = "".join(map(json_line, completion_rows(step, questions, groups)))
        logger.log_lines("completions.jsonl", "".join(run.world.gather(mine)))
    logger.log_metrics(step, metrics)
    if update.outcome is Outcome.NOTHING_TO_TRAIN_ON and "train/grad_norm" not in metrics:
        logger.once("grad norm -: nothing to train on (a group teaches if its rewards differ)")
    remark_on_step(run, metrics, questions, groups)


def describe_step(run: Run, questions: Questions, groups: Groups, update: Update) -> str:
    """The lines of rollouts.jsonl for the step that has ended; "" if it is not logged."""
    every = run.config.logging.rollouts_every
    step = run.state.step
    if not run.world.is_main or every == 0 or (step != 1 and step % every != 0):
        return ""
    # The file has a size limit. As it fills we log more rarely: every fourth of these steps once it
    # is half full, every 16th from three quarters on. A resumed run decides by the same numbers.
    file = run.folder / "rollouts.jsonl"
    num_bytes = file.stat().st_size if file.exists() else 0  # somebody may have removed it
    free = 1 - num_bytes / MAX_ROLLOUTS_BYTES
    if free <= 0 or step // every % 4 ** math.floor(-math.log2(free)) != 0:
        return ""
    weights = {}  # of a trajectory's tokens, by its id
    for batch in update.micro_batches:
        row_weights = batch.token_weights.amax(dim=1).tolist()
        # A pass that `equal_passes` adds has rows, but no trajectories.
        weights |= zip(map(id, batch.trajectories), row_weights, strict=False)
    tokenizer = run.policy.tokenizer
    lines = ""
    for group, question in zip(groups[:MAX_GROUPS], questions, strict=False):
        ordered = sorted(group, key=lambda t: -t.reward)  # ties in the order of sampling
        del ordered[MAX_COMPLETIONS // 2 : -MAX_COMPLETIONS // 2]  # of a large group the middle
        lines += json_line(
            {
                "step": step,
                "question": shorten(run.task.question_text(question), MAX_HEADING),
                "prompt": shorten(tokenizer.decode(group[0].prompt_ids), MAX_CHARACTERS),
                "gold": shorten(plain(question.get("answer", question)), MAX_CHARACTERS),
                "size": len(group),
                "completions": [completion_record(t, tokenizer, weights) for t in ordered],
            }
        )
    return lines if num_bytes + len(lines) <= MAX_ROLLOUTS_BYTES else ""


def log_evaluation(run: Run, metrics: Metrics, groups: Groups) -> None:
    step = run.state.step
    metrics = with_logged(run, "eval", metrics)
    samples = show_evaluation(run, f"evaluation at step {step}", metrics, groups)
    run.logger.log_samples(step, samples)
    run.logger.log_metrics(step, metrics)
    remark_on_evaluation(run, metrics, run.world.share(run.validation_questions), groups)


def show_evaluation(run: Run, title: str, metrics: Metrics, groups: Groups) -> list[dict]:
    """Print metrics and samples; returns the samples, of this rank's share of the questions."""
    questions = run.validation_questions
    samples = samples_of(run, groups, run.world.share(questions), "validation")
    # How many answers are behind each share of right ones
    totals = dict.fromkeys(("majority", "greedy", "strict", "lenient"), len(questions))
    totals["pass@1"] = len(questions) * run.config.validation.best_of_n
    run.logger.print_evaluation(title, metrics, samples, totals)
    return samples


def samples_of(run: Run, groups: Groups, questions: Questions, split: str) -> list[dict]:
    """The first completion of each group, then the second ones, as samples.jsonl keeps them."""
    task = run.task
    pairs = [
        pair for some in zip(*groups, strict=True) for pair in zip(some, questions, strict=True)
    ]
    return [
        {
            "split": split,
            "prompt": run.policy.tokenizer.decode(trajectory.prompt_ids),
            "question": task.question_text(question),
            "completion": trajectory.text,
            # A row of task.reward has any columns: people read what the model is asked.
            "gold": question.get(
                "answer", task.question_text(question) if task.functions else question
            ),
            "answer": read_answer(task, trajectory.text, question),
            "reward": trajectory.reward,
            "reward_parts": trajectory.reward_parts,
            "solved": trajectory.is_solved,
            "truncated": trajectory.completion.truncated,
            "tokens": len(trajectory.completion.token_ids),
        }
        for trajectory, question in pairs[: run.config.logging.samples]
    ]


def report_evaluation(run: Run, metrics: Metrics, groups: Groups, greedy: Groups) -> int:
    """Report mode=evaluate: as training measures, by majority votes, and greedily.

    The numbers are printed, and written to eval-<time>/ in the run's folder. `groups` and `greedy`
    answer this rank's questions. Returns the exit status, 2 where logits are not finite.
    """
    config = run.config
    world = run.world
    metrics |= single_answer_metrics(run.task, run.validation_questions, groups, greedy, world)
    samples = show_evaluation(
        run, f"evaluation of {config.model.name} on {config.task.name}", metrics, groups
    )
    if world.is_main:
        folder = run.folder / f"eval-{datetime.now():%Y%m%d-%H%M%S-%f}"
        folder.mkdir(parents=True)
        write_settings(folder, config)
        write_atomically(folder / "samples.jsonl", "".join(map(json_line, samples)))
        write_atomically(folder / "metrics.json", json_line(metrics))
        run.logger.info(f"written to {folder}")
    return 2 if run.count_broken(groups) > 0 else 0


def write_settings(folder: Path, config: Config) -> None:
    """Write every setting to config.yaml, which `pin` reads, below the versions in use."""
    revision = ""
    with contextlib.suppress(OSError):  # no git here
        # Without a tag it is the commit's hash; an edited tree is called dirty.
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
        )
        revision = described.stdout.strip()
    write_atomically(
        folder / "config.yaml",
        f"# plain-grpo {revision or '?'}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, transformers {transformers.__version__}\n"
        # tools.plot reads this line
        f"# {OWN_CODE}: {of_own_code(load_task(config.task), config.training)}\n{dump(config)}",
    )


def finish(run: Run) -> int:
    """Say how the run ended: returns 0, 1 if nothing was trained or saved, or 128 + the signal."""
    step = run.state.step
    if run.lock:
        run.lock.close()
    if run.is_over and run.state.evaluated_at == step:
        run.logger.info(summary(run))
        size_mb = sum(sizes_of(run.folder).values()) / 1e6
        run.logger.info(f"on the disk:    {size_mb:,.1f} MB in {run.folder}")
        remark_at_end(run)
        run.logger.close()
        return 1 if run.unsaved or not run.state.has_trained else 0
    run.logger.close("KILLED")
    what = "all is saved" if run.state.is_saved else "only what was saved before is there"
    run.logger.info(f"stopped by a signal after step {step}; {what}; go on with the same command")
    return 128 + run.world.stop_signal
