"""What the switches of benchmarks/switched.py compute, by hand on a few rows."""

from itertools import combinations

import numpy as np
import pytest
import torch
from harness import benchmark, make_config, make_policy, make_rows, make_run

import main
from engine.report.metrics import WATCHED
from engine.update.outcome import Outcome, Update

switched, ablations = map(benchmark, ("switched", "ablations"))


def test_every_switch_of_a_row_is_there_and_replaces_what_is_there():
    for switches in ablations.SWITCHES.values():
        assert set(switches.split(",")) <= set(switched.SWITCHES)
    for replaced in switched.SWITCHES.values():
        assert all(hasattr(owner, name) for owner, name, _ in replaced)


def test_a_stale_sampler_gets_the_weights_after_every_fourth_step(rotary_model_folder, monkeypatch):
    """Each update adds 1 to all weights. Measured is the model itself."""
    for replaced in switched.SWITCHES["stale-4"]:
        monkeypatch.setattr(*replaced)

    def update(run, groups):
        with torch.no_grad():
            for weights in run.policy.model.parameters():
                weights += 1
        run.policy.sampler.refresh()
        return Update(Outcome.UPDATED, has_moved=True)

    measured = []
    monkeypatch.setattr(switched, "update_policy", update)
    monkeypatch.setattr(switched, "sample_validation", lambda run: measured.append(run.policy))
    run = make_run(make_policy(rotary_model_folder), make_config())
    model, sampler = (next(m.parameters()) for m in (run.policy.model, run.policy.sampler.model))
    lags, metrics = [], dict.fromkeys(WATCHED, 0.0)
    for _ in range(9):
        run.end_step(main.update_policy(run, []), metrics, 0)
        lags.append(round((model - sampler).mean().item()))
    assert lags == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    main.sample_validation(run)
    assert measured[0].sampler.model is run.policy.model is not run.policy.sampler.model


def test_the_most_varied_half_has_the_largest_variance_of_all_halves():
    rewards = torch.tensor([[0.1, 1.1, 0.1, 0.1, 0.0, 1.1], [1.1, 1.1, 0.1, 1.1, 1.1, 0.06]])
    masks = switched.most_varied(rewards, num_kept=3)
    assert masks.sum(dim=1).tolist() == [3, 3]
    for group, mask in zip(rewards, masks, strict=True):
        best = max(np.var(some) for some in combinations(group.tolist(), 3))
        assert np.var(group[mask].tolist()) == pytest.approx(best, rel=1e-6)


def test_only_the_most_varied_half_is_trained_on_with_its_own_mean():
    group = make_rows(0.0, 0.0, 1.0, 0.0)
    switched.assign_to_half([group], make_config().training)
    assert [t.in_batch for t in group] == [True, False, True, False]
    assert [t.advantage for t in group if t.in_batch] == [-0.5, 0.5]


def test_sil_over_unequal_groups_leaves_groups_of_equals_out():
    groups = [make_rows(1.0, 1.0), make_rows(0.0, 1.0)]
    config = make_config("training.learning_type=sil", "training.k_best_of_n=[1, 2]")
    switched.assign_to_unequal(groups, config.training)
    assert [[t.advantage for t in group] for group in groups] == [[0, 0], [0, 1]]
    assert [[t.in_batch for t in group] for group in groups] == [[True, False], [False, True]]
