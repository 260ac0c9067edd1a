"""What the switches of benchmarks/switched.py compute, by hand on a few rows."""

from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import benchmark, make_config, make_policy, make_row, make_rows, make_run, sample
from reference import distance, score

import main
from engine.questions.data import QuestionStream
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


def test_a_bf16_copy_that_scores_as_it_samples_hands_gradients_on(rotary_model_folder, monkeypatch):
    """With eager attention, whose numbers are the same for a token alone and in a whole row."""
    options = ["model.compute_dtype=bfloat16", "model.attn_implementation=eager"]
    prompts, gradients, mismatches = [[5, 9, 30], [40, 41]], [], []
    for wrap in (main.wrap_policy, switched.score_in_the_sampler):
        monkeypatch.setattr(main, "wrap_policy", wrap)
        policy = make_policy(rotary_model_folder, *options)
        ((one, _), (other, _)) = sample(policy, prompts, num_samples=2, max_new_tokens=12)
        completions = [one.token_ids, other.token_ids]
        log_probs, mask = score(policy, prompts, completions, pad_id=policy.params.pad_id)
        log_probs[mask].sum().backward()
        sampled = torch.from_numpy(np.concatenate([one.log_probs, other.log_probs]))
        mismatches.append((log_probs[mask] - sampled).abs().mean().item())
        assert {p.grad.dtype for p in policy.model.parameters()} == {torch.float32}
        gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters()]).numpy())
    assert all(p.grad is None for p in policy.sampler.parameters())
    assert mismatches[1] < 1e-5 < 1e-3 < mismatches[0]
    assert 1e-4 < distance(gradients[1], gradients[0]) < 0.1


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


# Questions and rewards


@pytest.mark.parametrize(("good", "num_drawn"), [({10, 125, 130, 131}, 8), (set(), 12)])
def test_groups_of_equals_are_replaced_by_fresh_questions(monkeypatch, good, num_drawn):
    """A step of four questions at positions 8 to 11, of 400: the fresh ones are from 124 on.

    Of 8 to 11 only 10 is good. The first round asks 124 to 126 in place of the others, the second
    127 and 128, and so on until 131. Where none is good, twelve are asked in vain.
    """
    asked = []

    def sample(policy, task, config, questions, seeds, **settings):
        asked.extend(zip(questions, seeds, strict=True))
        return [make_rows(float(q["n"] in good), 0.0) for q in questions]

    monkeypatch.setattr(switched, "sample_trajectories", sample)
    rows = [{"n": n} for n in range(400)]
    stream = QuestionStream(rows, 0, False, len, 9, print)
    policy = SimpleNamespace(params="training")
    drawn, _ = stream.take(8, 4)
    questions, seeds = [row for _, row in drawn], [(0, 5, p) for p, _ in drawn]
    asking = (stream, policy, None, None, questions, seeds)
    groups = switched.sample_fresh(*asking, "training", None, None)
    fresh = asked[4:]
    assert [seed for _, seed in fresh] == [(0, 5, 124 + i) for i in range(num_drawn)]
    assert all(question["n"] == seed[-1] for question, seed in asked)
    solved = [group[0].reward == 1 for group in groups]
    assert solved == [q["n"] in good for q in questions]
    asked.clear()
    switched.sample_fresh(*asking, "evaluation", None, None)
    assert len(asked) == 4


def test_a_random_reward_follows_from_the_seed_alone(monkeypatch):
    arguments, rewards = (None, None, None, [], [(0, 0, 1), (0, 0, 2)]), []
    for solved in (0.0, 1.0):
        groups = [make_rows(*[solved] * 64) for _ in range(2)]
        monkeypatch.setattr(switched, "sample_trajectories", lambda *_, groups=groups: groups)
        graded = switched.sample_with_random_reward(*arguments)
        rewards.append([[t.reward for t in group] for group in graded])
    assert rewards[0] == rewards[1] and rewards[0][0] != rewards[0][1]
    assert {reward for group in rewards[0] for reward in group} == {0.0, 1.0}


def test_a_reward_for_length_pays_nothing_for_what_is_cut_off(monkeypatch):
    rows = [make_row(1.0, num_tokens=50), make_row(0.0, num_tokens=150)]
    rows += [make_row(1.0, num_tokens=200, truncated=True)]
    monkeypatch.setattr(switched, "sample_trajectories", lambda *_: [rows])
    params = SimpleNamespace(max_new_tokens=200)
    switched.sample_with_length_reward(None, None, None, [], [], params)
    assert [row.reward for row in rows] == [0.25, 0.75, 0.0]
