"""What an evaluation measures: of training's, and by mode=evaluate alone."""

from collections.abc import Callable
from types import ModuleType

from engine.config import TaskSettings, ValidationSettings
from engine.distributed import World
from engine.log import validation_samples
from engine.metrics import (
    Clock,
    count_broken,
    majority_sample,
    reduce_means,
    single_rate,
    solve_rates,
)
from engine.resume import save_evaluation
from engine.run import Run
from engine.types import Trajectory


def evaluation_metrics(
    groups: list[list[Trajectory]], task: ModuleType, validation: ValidationSettings, world: World
) -> dict[str, float]:
    """pass@k, lengths and shares over all questions, from this rank's groups."""
    num_questions = int(world.sum([len(groups)]))
    solved = [[t.is_solved for t in group] for group in groups]
    solved = world.gather_rows(solved, shape=(num_questions, validation.best_of_n))
    answers = [t for group in groups for t in group]
    num_tokens = sum(len(t.completion.token_ids) for t in answers)
    sums = {
        "eval/solved_and_ended": (sum(t.is_solved_and_ended for t in answers), len(answers)),
        "eval/completion_tokens": (num_tokens, len(answers)),
        "eval/truncated_frac": (sum(t.completion.truncated for t in answers), len(answers)),
    }
    if hasattr(task, "Environment"):
        sums["eval/turns"] = (sum(t.completion.num_turns for t in answers), len(answers))
    return solve_rates(solved, validation.pass_k) | reduce_means(sums, world)


# What only mode=evaluate measures


def run_evaluation(run: Run, sample_validation: Callable[..., list[list[Trajectory]]]) -> int:
    """Measure as training would, by majority votes and greedily; 2 where logits are not finite.

    `sample_validation` is main.py's.
    """
    config, world, questions, clock = run.config, run.world, run.validation_questions, Clock()
    with clock("eval"):
        groups = sample_validation(run)
        is_greedy = config.validation.temperature == 0
        greedy = groups if is_greedy else sample_validation(run, is_greedy=True)
    metrics = evaluation_metrics(groups, run.task, config.validation, world)
    metrics |= single_answer_metrics(run.task, config.task, questions, groups, greedy, world)
    metrics, samples = metrics | clock.read(), validation_samples(run, groups)
    title = f"evaluation of {config.model.name} on {config.task.name}"
    totals = answer_totals(len(questions), config.validation.best_of_n)
    run.logger.print_evaluation(title, metrics, samples, totals=totals)
    save_evaluation(run, metrics, samples)
    return 2 if count_broken(groups, world, run.logger.warning) > 0 else 0


def single_answer_metrics(
    task: ModuleType,
    options: TaskSettings,
    questions: list[dict],
    groups: list[list[Trajectory]],
    greedy: list[list[Trajectory]],
    world: World,
) -> dict[str, float]:
    """Rates of one answer per question, with Wilson's interval: what the group votes for, greedy.

    Also the mean length of the greedy answers and, where the task has `is_lenient_solved`, a
    reading of them that forgives the form. `groups` and `greedy` answer this rank's `questions`.
    """
    mine = questions[world.rank :: world.size]
    answers = [trajectory for (trajectory,) in greedy]
    solved = {}
    if hasattr(task, "extract_answer"):
        solved["majority"] = []
        for group, example in zip(groups, mine, strict=True):
            votes = [task.extract_answer(t.text, example, options=options) for t in group]
            chosen = majority_sample(votes)
            solved["majority"].append(chosen is not None and group[chosen].is_solved)
    solved["greedy"] = [t.is_solved for t in answers]
    if hasattr(task, "is_lenient_solved"):
        solved["strict"] = solved["greedy"]
        solved["lenient"] = [
            not t.completion.is_broken and task.is_lenient_solved(t.text, example, options=options)
            for t, example in zip(answers, mine, strict=True)
        ]
    num_tokens = sum(len(t.completion.token_ids) for t in answers)
    metrics = reduce_means({"eval/greedy_tokens": (num_tokens, len(answers))}, world)
    for name, column in solved.items():
        table = world.gather_rows(column, shape=(len(questions), 1))
        metrics |= single_rate(name, table[:, 0])
    return metrics


def answer_totals(num_questions: int, num_samples: int) -> dict[str, int]:
    """The number of answers behind each rate that is a share of them."""
    of_samples = ("pass@1", "solved_and_ended", "truncated_frac")
    of_questions = (f"best_of_{num_samples}", "majority", "greedy", "strict", "lenient")
    totals = dict.fromkeys(of_questions, num_questions)
    return totals | dict.fromkeys(of_samples, num_questions * num_samples)
