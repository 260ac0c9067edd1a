"""What an evaluation measures: of training's, and by mode=evaluate alone."""

import json
from datetime import datetime

from engine.metrics import majority_sample, reduce_means, single_rate, solve_rates
from engine.resume import write_config
from engine.run import Run
from engine.types import Trajectory
from logger import json_line, without_nan, write_atomically


def evaluation_metrics(run: Run, groups: list[list[Trajectory]]) -> dict[str, float]:
    """pass@k, lengths and shares over all questions, from this rank's groups."""
    validation, num_questions = run.config.validation, len(run.validation_questions)
    solved = [[t.is_solved for t in group] for group in groups]
    solved = run.world.gather_rows(solved, shape=(num_questions, validation.best_of_n))
    answers = [t for group in groups for t in group]
    num_tokens = sum(len(t.completion.token_ids) for t in answers)
    sums = {
        "eval/solved_and_ended": (sum(t.is_solved_and_ended for t in answers), len(answers)),
        "eval/completion_tokens": (num_tokens, len(answers)),
        "eval/truncated_frac": (sum(t.completion.truncated for t in answers), len(answers)),
    }
    if hasattr(run.task, "Environment"):
        sums["eval/turns"] = (sum(t.completion.num_turns for t in answers), len(answers))
    return solve_rates(solved, validation.pass_k) | reduce_means(sums, run.world)


# What only mode=evaluate measures and writes


def single_answer_metrics(
    run: Run, groups: list[list[Trajectory]], greedy: list[list[Trajectory]]
) -> dict[str, float]:
    """Rates of one answer per question, with Wilson's interval: what the group votes for, greedy.

    Also the mean length of the greedy answers and, where the task has `is_lenient_solved`, a
    reading of them that forgives the form. `groups` and `greedy` answer this rank's questions.
    """
    task, world, questions = run.task, run.world, run.validation_questions
    mine, options = questions[world.rank :: world.size], run.config.task
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


def answer_totals(run: Run) -> dict[str, int]:
    """The number of answers behind each rate that is a share of them."""
    num_questions, num_samples = len(run.validation_questions), run.config.validation.best_of_n
    of_samples = ("pass@1", "solved_and_ended", "truncated_frac")
    of_questions = (f"best_of_{num_samples}", "majority", "greedy", "strict", "lenient")
    totals = dict.fromkeys(of_questions, num_questions)
    return totals | dict.fromkeys(of_samples, num_questions * num_samples)


def save_evaluation(run: Run, metrics: dict[str, float], samples: list[dict]) -> None:
    """Write what mode=evaluate has measured to eval-<time>/ in the run's folder, on rank 0."""
    if not run.world.is_main:
        return
    folder = run.folder / f"eval-{datetime.now():%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    write_config(folder, run.config)
    write_atomically(folder / "samples.jsonl", "".join(map(json_line, samples)))
    text = json.dumps(without_nan(metrics), allow_nan=False, indent=1) + "\n"
    write_atomically(folder / "metrics.json", text)
    run.logger.info(f"written to {folder}")
