"""What the switches of benchmarks/switched.py compute, by hand on a few rows."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from harness import benchmark, make_config, make_policy, make_row, make_rows, make_run

import main
from engine.report.metrics import WATCHED

switched, ablations = map(benchmark, ("switched", "ablations"))


def switch(monkeypatch, name: str) -> None:
    for replaced in switched.SWITCHES[name]:
        monkeypatch.setattr(*replaced)


def test_every_switch_of_a_row_is_there_and_replaces_what_is_there():
    for switches in ablations.SWITCHES.values():
        assert set(switches.split(",")) <= set(switched.SWITCHES)
    for replaced in switched.SWITCHES.values():
        assert all(hasattr(owner, name) for owner, name, _ in replaced)


# A sampler that lags behind


def test_a_stale_sampler_gets_the_weights_after_every_fourth_step(rotary_model_folder, monkeypatch):
    """Each update adds 1 to all weights. Measured is the model itself."""
    switch(monkeypatch, "stale-4")

    def update(policy):
        with torch.no_grad():
            for weights in policy.model.parameters():
                weights += 1
        policy.refresh_sampler()

    measured = []
    monkeypatch.setattr(switched, "update_policy", update)
    monkeypatch.setattr(switched, "sample_validation", lambda run: measured.append(run.policy))
    run = make_run(make_policy(rotary_model_folder), make_config())
    model, sampler = (next(m.parameters()) for m in (run.policy.model, run.policy.sampler))
    lags, metrics = [], dict.fromkeys(WATCHED, 0.0)
    for _ in range(9):
        main.update_policy(run.policy)
        run.advance(metrics, 0, is_skipped=False, has_moved=True)
        lags.append(round((model - sampler).mean().item()))
    assert lags == [1, 2, 3, 0, 1, 2, 3, 0, 1]
    main.sample_validation(run)
    assert measured[0].sampler is run.policy.model is not run.policy.sampler


def test_the_ratio_is_to_what_the_sampler_said(rotary_model_folder, monkeypatch):
    """Of three tokens one is now 1.5 times as likely, one as likely, one 0.5 times.

    The advantage is 1, so that PPO clips the first, and the others weigh 1 and 0.5; without the
    switch the first update is REINFORCE, whose loss has no ratio.
    """
    policy = make_policy(rotary_model_folder)
    run = make_run(policy, make_config("training.policy_loss=ppo", "training.clip_eps=0.2"))
    training = run.config.training
    row = replace(make_row(1.0, num_tokens=3), advantage=1.0)
    batch = main.make_micro_batch([row], training, run.world, num_rows=1, num_tokens=3)
    with torch.no_grad():
        log_probs = policy.scorer(batch.input_ids, batch.completion_mask, temperature=1.0)[0, 3:]
    row.completion.log_probs[:] = log_probs.numpy() - np.log([1.5, 1.0, 0.5])
    weight, sums = batch.token_weights[0, -1].item(), {}
    plain = main.accumulate_gradient(policy, batch, training, {})
    assert plain.item() == pytest.approx(-weight * log_probs.sum().item(), rel=1e-4)
    switch(monkeypatch, "ratio-to-sampler")
    batch = main.make_micro_batch([row], training, run.world, num_rows=1, num_tokens=3)
    loss = main.accumulate_gradient(policy, batch, training, sums)
    assert loss.item() == pytest.approx(-weight * (1.2 + 1.0 + 0.5), rel=1e-4)
    assert sums["train/clip_frac"].tolist() == [1, 3]


# Advantages


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
