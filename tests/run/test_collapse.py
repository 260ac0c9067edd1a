"""The watch for a collapse: what counts as one, what is left alone, and a run that stops."""

from types import SimpleNamespace

import pytest
from harness import alone, arguments, load_run, make_config, read_rows

import main
from engine.report.metrics import WATCHED, mean_of_last, signs_of_collapse
from engine.run.config_file import load_config
from engine.run.state import Run, State
from engine.update.outcome import Outcome, Update
from logger import Logger

HEALTHY = {"train/solved": 0.6, "train/entropy": 0.3, "train/truncated_frac": 0.1}


def run_with(warnings: list[str]) -> SimpleNamespace:
    """What `Run.end_step` uses of a run with 16 questions a step."""
    config, logger = make_config("training.num_samples_per_step=16"), Logger(rank=1)
    logger.warning = warnings.append
    return SimpleNamespace(state=State(), config=config, world=alone(), logger=logger)


def advance(run: SimpleNamespace, metrics: dict) -> dict:
    """Count a step with these metrics; returns them with those that are added."""
    metrics = HEALTHY | metrics
    Run.end_step(run, Update(Outcome.UPDATED, has_moved=True), metrics, 0)
    return metrics


@pytest.mark.parametrize(("num_questions", "expected"), [(16, 10), (32, 10), (8, 20), (1, 160)])
def test_means_are_over_ten_steps_or_160_questions_whichever_is_more(num_questions, expected):
    recent, num_steps, means = [], 0, {}
    while not means:
        num_steps += 1
        metrics = dict.fromkeys(WATCHED, num_steps)
        recent, means = mean_of_last(recent, metrics, num_questions=num_questions)
    assert num_steps == expected
    assert means == dict.fromkeys(WATCHED, (expected + 1) / 2)
    metrics = dict.fromkeys(WATCHED, num_steps + 1)
    recent, means = mean_of_last(recent, metrics, num_questions=num_questions)
    assert len(recent) == expected and means["train/solved"] == (expected + 3) / 2


SIGNS = [  # the best mean of train/solved, the means that are not healthy, and the signs
    *((0.6, {}, []), (0.6, {"train/solved": 0.31}, [])),
    (0.06, {"train/solved": 0.02}, []),  # half of very little is noise
    *((best, {"train/solved": now}, ["train/solved"]) for best, now in ((0.6, 0.29), (0.06, 0.0))),
    (0.6, {"train/entropy": 0.009}, ["train/entropy"]),
    (0.6, {"train/truncated_frac": 0.51}, ["train/truncated_frac"]),
    (0.9, dict.fromkeys(WATCHED, 0.0), ["train/solved", "train/entropy"]),
]


def test_signs_of_a_collapse():
    for best, means, expected in SIGNS:
        assert list(signs_of_collapse(HEALTHY | means, best_solved=best)) == expected, means


def test_a_sign_is_reported_once_while_it_lasts():
    warnings = []
    run = run_with(warnings)
    for solved in [0.6] * 10 + [0.0] * 20:
        advance(run, {"train/solved": solved})
    (warning,) = warnings
    assert "collapsing: solved fell from 0.600 to 0.240 (mean" in warning


def test_a_collapsed_run_goes_on_unless_the_config_says_to_stop():
    """A false alarm would end a run that was well, if its user had not asked for that."""
    run = run_with([])
    run.state.signs = {"train/solved": "solved fell from 0.600 to 0.240"}
    assert not Run.is_over.fget(run)
    run.config = make_config("training.stop_on_collapse=true")
    assert Run.is_over.fget(run)


def test_a_collapsed_run_stops_where_the_config_says_so(rotary_model_folder, tmp_path, capsys):
    """A random model writes until it is cut off, which the means of ten steps show at step 10."""
    sizes = ["training.num_samples_per_step=16", "training.max_new_gen_tokens=2"]
    sizes += ["training.k_best_of_n=[2, 2]", "training.num_steps=12", "checkpoint.every=100"]
    given = arguments(tmp_path, rotary_model_folder, *sizes, "training.stop_on_collapse=true")
    run = load_run(load_config(given))
    assert main.run_training(run) == 0
    said = "".join(capsys.readouterr())
    assert "warning: the model may be collapsing" in said and "the model has collapsed" in said
    rows = read_rows(tmp_path / "x")
    assert [row.get("train/collapsed") for row in rows] == [None, *[0.0] * 9, 1.0]
    assert "eval/pass@1" in rows[10] and (tmp_path / "x/best").is_dir()
