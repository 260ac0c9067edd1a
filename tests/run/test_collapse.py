"""The watch for a collapse: what counts as one, what is left alone, and a run that stops."""

from types import SimpleNamespace

from harness import alone, make_config

from engine.report.metrics import WATCHED, mean_of_last, signs_of_collapse
from engine.run.state import Run, State
from engine.update.optimizer import Outcome, Update
from logger import Logger

HEALTHY = {"train/solved": 0.6, "train/entropy": 0.3, "train/truncated_frac": 0.1}


def run_with(warnings: list[str]) -> SimpleNamespace:
    """What `Run.end_step` uses of a run with 16 questions a step."""
    config, logger = make_config("training.num_samples_per_step=16"), Logger(rank=1)
    logger.warning = warnings.append
    return SimpleNamespace(state=State(), config=config, world=alone(), logger=logger)


def test_means_are_over_ten_steps_or_160_questions_whichever_is_more():
    for num_questions, expected in ((16, 10), (32, 10), (8, 20), (1, 160)):
        recent, num_steps, means = [], 0, {}
        while not means:
            num_steps += 1
            metrics = dict.fromkeys(WATCHED, num_steps)
            recent, means = mean_of_last(recent, metrics, num_questions=num_questions)
        assert num_steps == expected and means == dict.fromkeys(WATCHED, (expected + 1) / 2)
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
        metrics = HEALTHY | {"train/solved": solved}
        Run.end_step(run, Update(Outcome.UPDATED, has_moved=True), metrics, 0)
    (warning,) = warnings
    assert "collapsing: solved fell from 0.600 to 0.240 (mean" in warning


def test_a_collapsed_run_goes_on_unless_the_config_says_to_stop():
    """A false alarm would end a run that was well, if its user had not asked for that."""
    run = run_with([])
    run.state.signs = {"train/solved": "solved fell from 0.600 to 0.240"}
    assert not Run.is_over.fget(run)
    run.config = make_config("training.stop_on_collapse=true")
    assert Run.is_over.fget(run)
