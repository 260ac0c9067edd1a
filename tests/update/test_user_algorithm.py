"""An advantage and a loss of the user's own take the place of ours, and of nothing else."""

import itertools
import math
import re
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from harness import ROOT, alone, make_policy
from reference import EASY, EQUAL, GRPO, HARD, config_of, distance, make_groups, update, weights_of

from engine.core.types import Trajectory
from engine.update.optimizer import Outcome, make_optimizer
from engine.update.user_algorithm import own_loss, try_algorithm
from main import assign_advantages

README, DOCS = ((ROOT / name).read_text() for name in ("README.md", "docs/tasks.md"))
(RLOO,) = re.findall(r"```python\n(def rloo.*?)```", README, re.DOTALL)
(CLIP,) = re.findall(r"```python\n(def clip_higher.*?)```", DOCS, re.DOTALL)
OWN = """
def by_length(rewards, lengths, truncated, parts, **kwargs):
    return rewards / lengths + 10 * parts["answer"].nan_to_num(7) + 100 * truncated

def ppo(log_probs, old_log_probs, advantages, mask, **kwargs):
    ratio = (log_probs - old_log_probs).exp()
    return -(ratio * advantages).minimum(ratio.clamp(0.8, 1.2) * advantages)

def dppo(log_probs, old_log_probs, advantages, mask, sampler_log_probs, **kwargs):
    moved = (log_probs.exp() - sampler_log_probs.exp()).detach()
    is_masked = (moved.abs() > 0.001) & (advantages * moved > 0)
    ratio = (log_probs - sampler_log_probs).masked_fill(is_masked, -torch.inf).exp()
    return -ratio * advantages

def distill(log_probs, old_log_probs, advantages, mask, ref_log_probs, **kwargs):
    return -(ref_log_probs - old_log_probs) * log_probs

def by_pairs(rewards, lengths, truncated, parts, **kwargs):
    assert rewards.shape == (3, 4) and set(parts) == {"format", "answer"}
    assert lengths.max() == 10 and truncated.tolist() == (lengths == 10).tolist()
    first, second = rewards.reshape(-1, 2).unbind(dim=1)
    return torch.stack([first - second, second - first], dim=1).reshape(rewards.shape)

def with_bonus(log_probs, old_log_probs, advantages, mask, **kwargs):
    assert not mask.all() and not log_probs[~mask].any()
    return 0.1 * log_probs.exp() * log_probs - advantages * log_probs

def one_group(rewards, **kwargs):
    return rewards[0]

def unknown(rewards, **kwargs):
    return kwargs["nothing"]

def nan(rewards, **kwargs):
    return rewards / 0

def unlikelihood(log_probs, old_log_probs, advantages, mask, **kwargs):
    assert not log_probs[~mask].any()
    likely = [log_probs, old_log_probs, kwargs["sampler_log_probs"], kwargs["ref_log_probs"]]
    return sum((advantages < 0) * -torch.log1p(-each.exp()) for each in likely) - log_probs

def sharp(log_probs, old_log_probs, *args, **kwargs):
    return (log_probs - old_log_probs).abs().sqrt()

def constant(log_probs, *args, **kwargs):
    return log_probs.detach()
"""


@pytest.fixture(autouse=True)
def my_algo(tmp_path, monkeypatch):
    (tmp_path / "my_algo.py").write_text(f"import torch\n{RLOO}\n{CLIP}{OWN}")
    monkeypatch.chdir(tmp_path)


def advantages_by(name: str, groups: list[list[Trajectory]]) -> np.ndarray:
    config = config_of(*GRPO, f"training.advantage={name}")
    assign_advantages(groups, config.training)
    return np.array([[t.advantage for t in group] for group in groups])


def test_leave_one_out_is_the_means_advantage_times_g_over_g_minus_1():
    groups = make_groups(config_of(*GRPO), EASY, HARD)
    num = len(groups[0])
    expected = num / (num - 1) * advantages_by("mean", groups)
    assert np.abs(advantages_by("my_algo:rloo", groups) - expected).max() < 1e-12
    parts = np.array([[None, *range(num - 1)], range(num)], float)  # NaN where one does not apply
    for i, t in enumerate(itertools.chain(*groups)):
        t.reward_parts["answer"] = parts.flat[i] if i > 0 else None
    told = [
        [(len(t.completion.token_ids), t.completion.truncated, t.reward) for t in g] for g in groups
    ]
    lengths, truncated, rewards = np.moveaxis(np.array(told), 2, 0)
    expected = rewards / lengths + 10 * np.nan_to_num(parts, nan=7) + 100 * truncated
    assert np.array_equal(advantages_by("my_algo:by_length", groups), expected)
    names = ("training.advantage=my_algo:rloo", "training.policy_loss=my_algo:clip_higher")
    try_algorithm(config_of(*GRPO, *names), alone())  # README's and the docs' functions are taken


@pytest.mark.parametrize("own", ["ppo", "dppo", "distill"])
def test_a_loss_of_ours_that_a_user_writes_moves_the_weights_as_ours(
    rotary_model_folder, teacher_folder, own
):
    """Of our three passes the first is REINFORCE, PPO's is not: its ratio is 1, so all agree.
    A gradient of exactly 0 makes no step: AdamW would move the weights on by its averages."""
    weights, is_taught = [], own == "distill"
    options = ["training.num_iterations=3", "training.dppo_delta=0.001"]
    if is_taught:
        options = ["training.learning_type=distill", f"model.teacher={teacher_folder}"]
    for name in ("ppo" if is_taught else own, f"my_algo:{own}"):
        given = (*GRPO, *options, f"training.policy_loss={name}")
        policy = make_policy(rotary_model_folder, *given, is_exact=True)
        config = config_of(*given)
        optimizer = make_optimizer(policy.model, config.training)
        update(policy, optimizer, make_groups(config, EASY, HARD), config)
        weights.append(weights_of(policy))
        if not is_taught:
            result = update(policy, optimizer, make_groups(config, EQUAL), config)
            assert result.outcome is Outcome.NOTHING_TO_TRAIN_ON and not result.moved_weights
            weights.append(weights_of(policy))
    assert all(np.array_equal(weights[0], others) for others in weights)


def test_the_functions_are_tried_on_a_batch_that_looks_like_one_of_the_run():
    """Bug: its groups were of three samples, so a function of pairs of samples was refused."""
    names = ("training.advantage=my_algo:by_pairs", "training.policy_loss=my_algo:with_bonus")
    try_algorithm(config_of(*GRPO, *names, "training.num_samples_per_step=3"), alone())


def test_a_loss_of_ones_own_gets_the_rows_of_advantage_0_too(rotary_model_folder):
    """Bug: they were left out, though this one's bonus moves them as all others."""
    given = ("training.policy_loss=my_algo:with_bonus", "training.skip_truncated=true")
    config = config_of(*GRPO, *given)
    policy = make_policy(rotary_model_folder, is_exact=True)
    groups = make_groups(config, EASY, EQUAL)
    gradient, _ = reference.recorded(policy, groups, config)
    rows, loss = [t for group in groups for t in group], 0.0
    for t in (t for t in rows if not t.completion.truncated):
        log_probs = reference.row_log_probs(policy.model, t)
        loss += (0.1 * log_probs.exp() * log_probs - t.advantage * log_probs).sum()
    loss /= len(rows) * reference.MAX_NEW_TOKENS
    expected = reference.flat(torch.autograd.grad(loss, list(policy.model.parameters())))
    assert distance(gradient, expected) <= reference.FP32_ROUNDING


def test_a_loss_of_ones_own_is_finite_where_a_drawn_token_is_certain():
    """Bug: at probability 1 unlikelihood is infinite: no step was made, and the rate was blamed."""
    options = ("training.policy_loss=my_algo:unlikelihood", "training.kl_coef=0.1")
    try_algorithm(config_of(*GRPO, *options), alone())
    log_probs = torch.tensor([[0.0, -1.0, 0.0, -1e-8, -0.5]], requires_grad=True)
    mask, before = torch.tensor([[False, True, True, True, True]]), log_probs.detach()
    batch = SimpleNamespace(completion_mask=mask, old_log_probs=before)
    batch.sampler_log_probs = batch.ref_log_probs = before
    loss = own_loss("my_algo:unlikelihood", batch, log_probs, torch.tensor([[-1.0]]))
    (gradient,) = torch.autograd.grad(loss.sum(), log_probs)
    assert loss.isfinite().all() and loss[0, 0] == 0
    odds = [math.exp(p) / (1 - math.exp(p)) for p in (-1.0, -0.5)]
    expected = torch.tensor([[0.0, odds[0] - 1, 0.0, 0.0, odds[1] - 1]])
    assert torch.allclose(gradient, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("key", "name", "line"),
    [
        ("advantage", "one_group", r"my_algo.py, line \d+: one_group"),
        ("advantage", "unknown", r"my_algo.py, line \d+: unknown raised KeyError"),
        ("advantage", "nan", "training.advantage = my_algo:nan"),
        ("policy_loss", "constant", "no gradient"),
        ("policy_loss", "sharp", "its loss or gradient is not finite"),
    ],
)
def test_a_mistake_costs_one_line_before_the_model_is_loaded(key, name, line):
    with pytest.raises(ValueError, match=line) as error:
        try_algorithm(config_of(*GRPO, f"training.{key}=my_algo:{name}"), alone())
    assert "\n" not in str(error.value)
