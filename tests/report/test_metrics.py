"""How things are measured, by hand: pass@k and its interval, votes, means, seconds, columns."""

import itertools
import time

import numpy as np
import pytest
import torch
from harness import CPU, alone

from engine.core.distributed import World
from engine.core.statistics import (
    Clock,
    confidence_interval,
    majority_sample,
    pass_at_k,
    reduce_means,
    single_rate,
    solve_rates,
)
from engine.report.metrics import peak_memory_gb, versions


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


def test_the_interval_of_one_sample_per_question_is_wilsons():
    """8 of 10: (0.490, 0.943), as in Wilson's tables; none of 10: (0, 0.278)."""
    rates = np.array([1.0] * 8 + [0.0] * 2)
    assert confidence_interval(rates, is_binary=True) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    low, high = confidence_interval(np.zeros(10), is_binary=True)
    assert (low, high) == pytest.approx((0.0, 0.2775), abs=1e-4)
    found = solve_rates(rates[:, None], [1])
    assert found["eval/pass@1_low"] == pytest.approx(0.4902, abs=1e-4)
    assert single_rate("greedy", rates) == {
        "eval/greedy": 0.8,
        "eval/greedy_low": found["eval/pass@1_low"],
        "eval/greedy_high": found["eval/pass@1_high"],
    }


def test_the_bootstraps_units_are_questions_not_samples():
    """Half of 100 questions always right, half never: 0.5 +- 1.96 * 0.5 / sqrt(100)."""
    rates = np.array([0.0, 1.0] * 50)
    low, high = confidence_interval(rates, is_binary=False)
    assert (low, high) == pytest.approx((0.402, 0.598), abs=0.011)
    assert confidence_interval(rates, is_binary=False) == (low, high)  # the same every time
    assert confidence_interval(np.full(9, 0.3), is_binary=False) == pytest.approx((0.3, 0.3))


def test_the_interval_of_several_samples_is_that_of_so_many_questions():
    """Over the samples of these 100 questions it would be 2.8 times too narrow."""
    solved = np.repeat([[0.0], [1.0]] * 50, 8, axis=1)
    rates = solve_rates(solved, [1])
    interval = rates["eval/pass@1_low"], rates["eval/pass@1_high"]
    assert interval == confidence_interval(solved[:, 0], is_binary=False)


VOTES = [
    *((["1", "2", "2"], 1), ([None, "3", "1", "1", "3"], 1), (["4"], 0)),
    (["2", "1", "2", "1"], 0),  # of equals the one given earliest
    *(([None, None, None, "5"], 3), ([None, None], None), ([], None)),  # no answer is no vote
]


@pytest.mark.parametrize(("answers", "chosen"), VOTES)
def test_the_majority_is_the_earliest_sample_with_the_most_frequent_answer(answers, chosen):
    assert majority_sample(answers) == chosen


def test_means_are_sums_over_counts_and_what_counts_nothing_is_left_out():
    sums = {"train/reward": (3.0, 4), "train/kl": (0.0, 0), "train/loss": (-1.0, 2)}
    assert reduce_means(sums, alone()) == {"train/reward": 0.75, "train/loss": -0.5}


def test_the_rows_of_each_rank_come_to_their_own_places(monkeypatch):
    """Questions go to the ranks in turn: else an answer would be counted for another question."""
    monkeypatch.setattr(World, "sum", lambda world, table: torch.as_tensor(table))
    rows = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    ranks = [World(rank, size=2, device=CPU) for rank in range(2)]
    tables = [world.gather_rows(rows[world.rank :: 2], shape=(5, 2)) for world in ranks]
    assert sum(tables).tolist() == rows


def test_a_clock_adds_up_a_phase_and_starts_anew_when_it_is_read():
    clock = Clock()
    for phase in ("rollout", "reward", "rollout"):
        with clock(phase):
            time.sleep(0.02)
    seconds = clock.read()
    assert list(seconds) == ["time/rollout_s", "time/reward_s"]
    assert seconds["time/rollout_s"] >= 0.04 and seconds["time/reward_s"] >= 0.02
    assert clock.read() == {}


def test_a_process_that_has_loaded_torch_holds_between_50_mb_and_a_terabyte():
    assert 0.05 < peak_memory_gb(CPU) < 1000


def test_versions_name_the_revision_and_the_libraries():
    text = versions()
    assert text.startswith("plain-grpo ") and f"torch {torch.__version__}" in text
