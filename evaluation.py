"""The life of an evaluation (mode=evaluate): a model, its questions, and a folder for the figures.

    eval-<time>/config.yaml      every setting, with the versions used
                metrics.json     {"eval/pass@1": 0.5, "eval/pass@1_low": 0.4, ...}
                samples.jsonl    some completions, as a run keeps them

The model is measured in main.py (`run_evaluation`). The files of the run of that name stay as they
are.
"""

import json
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from config import Config, options_for
from data import TASKS
from logger import Logger, json_line, without_nan, write_atomically
from metrics import majority_sample, single_rate
from run import Session, open_session, questions_for, write_config

if TYPE_CHECKING:  # main imports this module
    from main import Trajectory


@dataclass
class Evaluation(Session):
    """Everything an evaluation needs: no optimizer, no gradients, nothing to resume."""

    questions: list[dict]


def prepare_evaluation(config: Config) -> Evaluation:
    """Load what the config names. Raises ValueError or OSError where it cannot be used."""
    session = open_session(config)
    session.folder /= f"eval-{datetime.now():%Y%m%d-%H%M%S-%f}"
    return Evaluation(**vars(session), questions=questions_for(session)["validation"].to_list())


def open_folder(evaluation: Evaluation) -> Logger:
    """The evaluation's folder with its resolved config; nothing else is written until the end."""
    if evaluation.world.is_main:
        evaluation.folder.mkdir(parents=True)
        write_config(evaluation.folder, evaluation.config)
    return evaluation.console


def single_answer_metrics(
    evaluation: Evaluation, groups: list[list["Trajectory"]], greedy: list[list["Trajectory"]]
) -> dict[str, float]:
    """Rates of one answer per question, with Wilson's interval: what the group votes for, greedy.

    Where the task has `is_lenient_solved(completion, example)`, a reading that forgives the form,
    it stands beside the strict one. `groups` and `greedy` are those of this rank's questions.
    """
    config, world, questions = evaluation.config, evaluation.world, evaluation.questions
    answers = [trajectory for (trajectory,) in greedy]
    solved = {
        "majority": [is_majority_solved(group, config) for group in groups],
        "greedy": [t.is_solved for t in answers],
    }
    is_lenient_solved = getattr(TASKS[config.task.name], "is_lenient_solved", None)
    if is_lenient_solved is not None:
        solved["strict"] = solved["greedy"]
        solved["lenient"] = [
            not t.completion.is_broken and is_lenient_solved(t.text, example)
            for t, example in zip(answers, questions[world.rank :: world.size], strict=True)
        ]
    rows = list(zip(*solved.values(), strict=True))
    table = world.gather_rows(rows, shape=(len(questions), len(solved)))
    metrics = {}
    for name, column in zip(solved, table.T, strict=True):
        metrics |= single_rate(name, column)
    return metrics


def is_majority_solved(group: list["Trajectory"], config: Config) -> bool:
    """Whether the answer that most of the group's completions give solves the question."""
    extract_answer = TASKS[config.task.name].extract_answer
    options = options_for(extract_answer, config)
    chosen = majority_sample([extract_answer(t.text, **options) for t in group])
    return chosen is not None and group[chosen].is_solved


def save_results(evaluation: Evaluation, metrics: dict[str, float], samples: list[dict]) -> None:
    """Write the figures and the samples, on rank 0."""
    if not evaluation.world.is_main:
        return
    write_atomically(evaluation.folder / "samples.jsonl", "".join(map(json_line, samples)))
    text = json.dumps(without_nan(metrics), allow_nan=False, indent=1) + "\n"
    write_atomically(evaluation.folder / "metrics.json", text)
