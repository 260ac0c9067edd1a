"""What is measured: of a step, of an evaluation, by mode=evaluate alone; signs of a collapse."""

import copy
import math
import resource
import statistics
import sys

import numpy as np
import torch

from engine.core.config import ValidationSettings
from engine.core.distributed import World
from engine.core.measures import reduce_means
from engine.core.types import Groups, Metrics, Questions, Sums, Trajectory
from engine.questions.contract import Task
from engine.questions.rewards import read_answer
from engine.report.pass_at_k import solve_rates, with_interval

# A collapsed policy gives the same few answers, or rambles until it is cut off. More steps seldom
# bring it back. The means of these metrics over the last steps show it.
WATCHED = ("train/solved", "train/entropy", "train/truncated_frac")
WINDOW_STEPS = 10  # its length: a shorter window is too noisy to judge
WINDOW_QUESTIONS = 160
LEAST_FALL = 0.05  # of train/solved; where little was ever solved, a smaller fall may be noise
LOW_ENTROPY = 0.01  # nats per token: the policy has nothing left to choose between


def peak_memory_gb(device: torch.device) -> float:
    """The most memory this rank has held so far, in 10^9 bytes: the GPU's, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def rollout_metrics(groups: Groups, reward_parts: tuple[str, ...]) -> Sums:
    """This rank's (sum, count) for each metric of the rollouts; `reduce_means` makes the means."""
    sampled = [t for group in groups for t in group]
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    num_drawn = sum(t.completion.num_sampled for t in sampled)
    columns = of_completions(sampled) | {
        "reward": [t.reward for t in sampled],
        "solved": [t.is_solved for t in sampled],
        "zero_advantage_frac": (rewards.amax(dim=1) == rewards.amin(dim=1)).tolist(),
        "advantage_abs": [abs(t.advantage) for t in sampled if t.in_batch],
    }
    for part in (name for name in reward_parts if name != "timeout"):
        paid = [t.reward_parts[part] for t in sampled]
        columns[f"part_{part}"] = [x for x in paid if x is not None]
    metrics = {
        "train/reward_std": (
            rewards.std(dim=1, correction=rewards.shape[1] > 1).sum().item(),
            len(groups),
        ),
        "train/entropy": (sum(float(t.completion.entropies.sum()) for t in sampled), num_drawn),
    }
    return metrics | sums_of("train", columns)


def of_completions(sampled: list[Trajectory]) -> dict[str, list[float]]:
    """What is measured of completions in training and in evaluations: of each its number."""
    columns = {
        "solved_and_ended": [t.is_solved_and_ended for t in sampled],
        "completion_tokens": [len(t.completion.token_ids) for t in sampled],
        "truncated_frac": [t.completion.truncated for t in sampled],
    }
    if sampled[0].completion.conversation:
        columns["turns"] = [t.completion.num_turns for t in sampled]
    if "timeout" in sampled[0].reward_parts:
        columns["reward_timeouts"] = [t.reward_parts["timeout"] for t in sampled]
    return columns


def sums_of(split: str, columns: dict[str, list[float]]) -> Sums:
    return {f"{split}/{name}": (sum(column), len(column)) for name, column in columns.items()}


def mean_of_last(recent: list[list[float]], metrics: Metrics, num_questions: int) -> Metrics:
    """Add a step's WATCHED metrics to `recent`, which keeps the last; their means, if enough."""
    num_steps = max(WINDOW_STEPS, math.ceil(WINDOW_QUESTIONS / num_questions))
    recent.append([metrics[name] for name in WATCHED])
    del recent[:-num_steps]
    if len(recent) < num_steps:
        return {}
    sums = map(sum, zip(*recent, strict=True))
    return {name: total / num_steps for name, total in zip(WATCHED, sums, strict=True)}


def signs_of_collapse(means: Metrics, best_solved: float) -> dict[str, str]:
    """What shows a collapse in the means over the last steps, by metric; empty if nothing does."""
    solved, entropy, truncated = (means[name] for name in WATCHED)
    signs = {}
    if solved < best_solved / 2 and solved < best_solved - LEAST_FALL:
        signs["train/solved"] = f"solved fell from {best_solved:.3f} to {solved:.3f}"
    if entropy < LOW_ENTROPY:
        signs["train/entropy"] = f"the entropy is {entropy:.4f}"
    if truncated > 0.5:
        signs["train/truncated_frac"] = f"{truncated:.0%} of completions are cut off"
    return signs


def evaluation_metrics(
    groups: Groups, task: Task, validation: ValidationSettings, world: World
) -> Metrics:
    """pass@k, lengths and shares over all questions, from this rank's groups."""
    num_questions = int(world.sum([len(groups)]))
    solved = [[t.is_solved for t in group] for group in groups]
    solved = world.gather_rows(solved, (num_questions, validation.best_of_n))
    columns = of_completions([t for group in groups for t in group])
    rates = solve_rates(solved, validation.reported_k)
    rates |= mean_rewards(groups, task.REWARD_PARTS, num_questions, world)
    return rates | reduce_means(sums_of("eval", columns), world)


def mean_rewards(
    groups: Groups, names: tuple[str, ...], num_questions: int, world: World
) -> Metrics:
    """The means of the reward and, where it applies, of each part; with 95% intervals."""
    parts = [name for name in names if name != "timeout"]
    rows = []
    for group in groups:
        paid = [(t.reward, *(t.reward_parts[part] for part in parts)) for t in group]
        applying = [[x for x in column if x is not None] for column in zip(*paid, strict=True)]
        rows.append([sum(some) / len(some) if some else math.nan for some in applying])
    table = world.gather_rows(rows, (num_questions, 1 + len(parts)))
    metrics = {}
    for name, means in zip(["reward", *(f"part_{part}" for part in parts)], table.T, strict=True):
        means = means[~np.isnan(means)]
        if len(means) > 0:
            metrics |= with_interval(f"eval/{name}", means, is_binary=False)
    return metrics


def single_answer_metrics(
    task: Task, questions: Questions, groups: Groups, greedy: Groups, world: World
) -> Metrics:
    """Rates of one answer per question, with Wilson's interval: what the group votes for, greedy.

    `groups` and `greedy` answer this rank's `questions`. `is_lenient_solved` forgives the form.
    """
    mine = world.share(questions)
    answers = [trajectory for (trajectory,) in greedy]
    solved = {}
    if task.extract_answer:
        solved["majority"] = []
        for group, example in zip(groups, mine, strict=True):
            votes = [read_answer(task, t.text, example) for t in group]
            given = [vote for vote in votes if vote is not None]
            # The first sample with the most frequent answer; on a tie the earliest answer.
            is_right = bool(given) and group[votes.index(statistics.mode(given))].is_solved
            solved["majority"].append(is_right)
    solved["greedy"] = [t.is_solved for t in answers]
    if task.is_lenient_solved:
        solved["strict"] = solved["greedy"]
        solved["lenient"] = [
            not t.completion.is_broken
            and task.is_lenient_solved(t.text, example, options=task.options)
            for t, example in zip(answers, copy.deepcopy(mine), strict=True)
        ]
    lengths = [len(t.completion.token_ids) for t in answers]
    metrics = reduce_means({"eval/greedy_tokens": (sum(lengths), len(lengths))}, world)
    for name, column in solved.items():
        table = world.gather_rows(column, (len(questions), 1))
        metrics |= with_interval(f"eval/{name}", table[:, 0], is_binary=True)
    return metrics
