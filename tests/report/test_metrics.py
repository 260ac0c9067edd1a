"""How things are measured, by hand: pass@k and its interval, votes, means, seconds, memory."""

import itertools
import time

import numpy as np
import pytest

from engine.core.statistics import (
    Clock,
    confidence_interval,
    majority_sample,
    pass_at_k,
    single_rate,
    solve_rates,
)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_all_subsets_with_a_right_sample(k):
    counts, n = np.array([0, 1, 3, 5]), 5
    shares = []
    for right in counts:
        samples = [i < right for i in range(n)]
        subsets = list(itertools.combinations(samples, k))
        shares.append(sum(any(subset) for subset in subsets) / len(subsets))
    assert pass_at_k(counts, n, k) == pytest.approx(np.mean(shares))


def test_solve_rates_by_hand():
    """4 samples, of which 0, 1, 2 are right: pass@2 = 1 - C(4 - c, 2) / 6 is 0, 1/2, 5/6."""
    solved = np.array([[0, 0, 0, 0], [0, 1, 0, 0], [1, 0, 0, 1]], dtype=float)
    rates = solve_rates(solved, [1, 2])
    assert rates["eval/pass@1"] == pytest.approx(0.25)
    assert rates["eval/pass@2"] == pytest.approx((0 + 1 / 2 + 5 / 6) / 3)
    assert rates["eval/best_of_4"] == pytest.approx(2 / 3)
    assert rates["eval/pass@1_low"] <= 0.25 <= rates["eval/pass@1_high"]
    names = ["pass@1", "pass@1_low", "pass@1_high", "pass@2", "best_of_4"]
    assert list(rates) == [f"eval/{name}" for name in names]


EIGHT_OF_TEN, HALF_OF_100 = [1.0] * 8 + [0.0] * 2, [0.0, 1.0] * 50
INTERVALS = [  # rates, whether they are 0 or 1, their interval and how near it is
    (EIGHT_OF_TEN, True, (0.4902, 0.9433), 1e-4),  # Wilson's tables
    ([0.0] * 10, True, (0.0, 0.2775), 1e-4),
    (HALF_OF_100, False, (0.402, 0.598), 0.011),  # 0.5 +- 1.96 * 0.5 / sqrt(100)
]


def test_the_interval_is_wilsons_or_where_rates_are_shares_the_bootstraps():
    for rates, is_binary, interval, tolerance in INTERVALS:
        found = confidence_interval(np.array(rates), is_binary=is_binary)
        assert found == pytest.approx(interval, abs=tolerance)
        assert found == confidence_interval(np.array(rates), is_binary=is_binary)  # every time


def test_the_units_of_the_interval_are_questions_not_samples():
    """Over the samples of these 100 questions it would be 2.8 times too narrow."""
    several = np.repeat(np.array(HALF_OF_100)[:, None], 8, axis=1)
    one = np.array(EIGHT_OF_TEN)
    for solved, is_binary in ((several, False), (one[:, None], True)):
        rates = solve_rates(solved, [1])
        interval = rates["eval/pass@1_low"], rates["eval/pass@1_high"]
        assert interval == confidence_interval(solved[:, 0], is_binary=is_binary)
    assert [*single_rate("greedy", one).items()] == [
        ("eval/greedy", 0.8),
        ("eval/greedy_low", interval[0]),
        ("eval/greedy_high", interval[1]),
    ]


VOTES = [
    *((["1", "2", "2"], 1), ([None, "3", "1", "1", "3"], 1), (["4"], 0)),
    (["2", "1", "2", "1"], 0),  # of equals the one given earliest
    *(([None, None, None, "5"], 3), ([None, None], None), ([], None)),  # no answer is no vote
]


def test_the_majority_is_the_earliest_sample_with_the_most_frequent_answer():
    assert [majority_sample(answers) for answers, _ in VOTES] == [chosen for _, chosen in VOTES]


def test_a_clock_adds_up_a_phase_and_starts_anew_when_it_is_read():
    clock = Clock()
    for phase in ("rollout", "reward", "rollout"):
        with clock(phase):
            time.sleep(0.02)
    seconds = clock.read()
    assert list(seconds) == ["time/rollout_s", "time/reward_s"]
    assert seconds["time/rollout_s"] >= 0.04 and seconds["time/reward_s"] >= 0.02
    assert clock.read() == {}
