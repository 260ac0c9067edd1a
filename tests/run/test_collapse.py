"""The watch for a collapse: what counts as one, what is left alone, and a run that stops."""

from harness import make_config, make_run

from engine.report.metrics import WATCHED, mean_of_last, signs_of_collapse

HEALTHY = {"train/solved": 0.6, "train/entropy": 0.3, "train/truncated_frac": 0.1}


def test_means_are_over_ten_steps_or_160_questions_whichever_is_more():
    for num_questions, expected in ((16, 10), (32, 10), (8, 20), (1, 160)):
        recent, num_steps, means = [], 0, {}
        while not means:
            num_steps += 1
            metrics = dict.fromkeys(WATCHED, num_steps)
            means = mean_of_last(recent, metrics, num_questions=num_questions)
        assert num_steps == expected and means == dict.fromkeys(WATCHED, (expected + 1) / 2)
        metrics = dict.fromkeys(WATCHED, num_steps + 1)
        means = mean_of_last(recent, metrics, num_questions=num_questions)
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


def test_a_sign_is_reported_once_while_it_lasts_and_ends_a_run_that_is_to_stop():
    """A false alarm would end a run that was well, if its user had not asked for that."""
    given, warnings = ["training.num_samples_per_step=16", "training.num_steps=99"], []
    run = make_run(None, make_config(*given), optimizer="none")
    run.logger.warning = warnings.append
    for solved in [0.6] * 10 + [0.0] * 20:
        run.watch_for_collapse(HEALTHY | {"train/solved": solved})
    (warning,) = warnings
    assert "collapsing: solved fell from 0.600 to 0.240 (mean" in warning
    assert not run.is_over
    run.config = make_config(*given, "training.stop_on_collapse=true")
    assert run.is_over
    run = make_run(None, run.config, optimizer="none")
    for solved in [0.4] * 10 + [0.9] + [0.4] * 10:  # a lucky step is no best to fall from
        run.watch_for_collapse(HEALTHY | {"train/solved": solved})
    assert not run.is_over
