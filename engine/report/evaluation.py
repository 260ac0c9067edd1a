"""What an evaluation measures: of training's, and by mode=evaluate alone."""

import math
from collections.abc import Sequence

import numpy as np

from engine.core import statistics
from engine.core.config import TaskSettings, ValidationSettings
from engine.core.distributed import World
from engine.core.types import Groups
from engine.questions.contract import Task
from engine.questions.tasks import read_answer


def evaluation_metrics(
    groups: Groups, task: Task, validation: ValidationSettings, world: World
) -> dict[str, float]:
    """pass@k, lengths and shares over all questions, from this rank's groups."""
    num_questions = int(world.sum([len(groups)]))
    solved = [[t.is_solved for t in group] for group in groups]
    solved = world.gather_rows(solved, shape=(num_questions, validation.best_of_n))
    sampled = [t for group in groups for t in group]
    num_tokens = sum(len(t.completion.token_ids) for t in sampled)
    metrics = {
        "eval/solved_and_ended": (sum(t.is_solved_and_ended for t in sampled), len(sampled)),
        "eval/completion_tokens": (num_tokens, len(sampled)),
        "eval/truncated_frac": (sum(t.completion.truncated for t in sampled), len(sampled)),
    }
    if task.Environment is not None:
        metrics["eval/turns"] = (sum(t.completion.num_turns for t in sampled), len(sampled))
    if "timeout" in task.REWARD_PARTS:
        late = [t.reward_parts["timeout"] for t in sampled]
        metrics["eval/reward_timeouts"] = (sum(late), len(late))
    rates = statistics.solve_rates(solved, validation.reported_k)
    rates |= mean_rewards(groups, task.REWARD_PARTS, num_questions, world)
    return rates | statistics.reduce_means(metrics, world)


def mean_rewards(
    groups: Groups, names: tuple[str, ...], num_questions: int, world: World
) -> dict[str, float]:
    """The means of the reward and, where it applies, of each part; with 95% intervals."""
    parts = [name for name in names if name != "timeout"]
    rows = []
    for group in groups:
        paid = [(t.reward, *(t.reward_parts[part] for part in parts)) for t in group]
        rows.append([mean_of(column) for column in zip(*paid, strict=True)])
    table = world.gather_rows(rows, shape=(num_questions, 1 + len(parts)))
    metrics = {}
    for name, means in zip(["reward", *(f"part_{part}" for part in parts)], table.T, strict=True):
        means = means[~np.isnan(means)]
        if len(means) > 0:
            low, high = statistics.confidence_interval(means, is_binary=False)
            metrics[f"eval/{name}"] = float(means.mean())
            metrics |= {f"eval/{name}_low": low, f"eval/{name}_high": high}
    return metrics


def mean_of(paid: Sequence[float | None]) -> float:
    """The mean of what applies; NaN if nothing does."""
    applying = [value for value in paid if value is not None]
    return sum(applying) / len(applying) if applying else math.nan


def single_answer_metrics(
    task: Task,
    options: TaskSettings,
    questions: list[dict],
    groups: Groups,
    greedy: Groups,
    world: World,
) -> dict[str, float]:
    """Rates of one answer per question, with Wilson's interval: what the group votes for, greedy.

    `groups` and `greedy` answer this rank's `questions`. `is_lenient_solved` forgives the form.
    """
    mine = world.share(questions)
    answers = [trajectory for (trajectory,) in greedy]
    solved = {}
    if task.extract_answer is not None:
        solved["majority"] = []
        for group, example in zip(groups, mine, strict=True):
            votes = [read_answer(task, t.text, example, options) for t in group]
            chosen = statistics.majority_sample(votes)
            solved["majority"].append(chosen is not None and group[chosen].is_solved)
    solved["greedy"] = [t.is_solved for t in answers]
    if task.is_lenient_solved is not None:
        solved["strict"] = solved["greedy"]
        solved["lenient"] = [
            not t.completion.is_broken and task.is_lenient_solved(t.text, example, options=options)
            for t, example in zip(answers, mine, strict=True)
        ]
    num_tokens = sum(len(t.completion.token_ids) for t in answers)
    metrics = statistics.reduce_means({"eval/greedy_tokens": (num_tokens, len(answers))}, world)
    for name, column in solved.items():
        table = world.gather_rows(column, shape=(len(questions), 1))
        metrics |= statistics.single_rate(name, table[:, 0])
    return metrics
