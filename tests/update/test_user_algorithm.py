"""An advantage and a loss of the user's own take the place of ours, and of nothing else."""

import re

import numpy as np
import pytest
from harness import ROOT, make_policy
from reference import EASY, GRPO, HARD, config_of, make_groups, update
from test_update import weights_of

from engine.core.types import Trajectory
from engine.update.optimizer import make_optimizer
from engine.update.user_algorithm import try_algorithm
from main import assign_advantages

README, DOCS = ((ROOT / name).read_text() for name in ("README.md", "docs/tasks.md"))
(RLOO,) = re.findall(r"```python\n(def rloo.*?)```", README, re.DOTALL)
(CLIP,) = re.findall(r"```python\n(def clip_higher.*?)```", DOCS, re.DOTALL)
MY_ALGO = (
    f"{RLOO}\n{CLIP}"
    + """
def by_length(rewards, lengths, truncated, parts, **kwargs):
    assert lengths.shape == truncated.shape == parts["answer"].shape == rewards.shape
    return rewards / lengths

def ppo(log_probs, old_log_probs, advantages, mask, **kwargs):
    ratio = (log_probs - old_log_probs).exp()
    return -(ratio * advantages).minimum(ratio.clamp(0.8, 1.2) * advantages)

def one_group(rewards, **kwargs):
    return rewards[0]

def unknown(rewards, **kwargs):
    return kwargs["nothing"]

def nan(rewards, **kwargs):
    return rewards / 0

def constant(log_probs, *args, **kwargs):
    return log_probs.detach()
"""
)


@pytest.fixture(autouse=True)
def my_algo(tmp_path, monkeypatch):
    (tmp_path / "my_algo.py").write_text(MY_ALGO)
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
    lengths = np.array([[len(t.completion.token_ids) for t in group] for group in groups])
    rewards = np.array([[t.reward for t in group] for group in groups])
    assert np.array_equal(advantages_by("my_algo:by_length", groups), rewards / lengths)
    names = ("training.advantage=my_algo:rloo", "training.policy_loss=my_algo:clip_higher")
    try_algorithm(config_of(*GRPO, *names))  # README's and the docs' functions are taken


def test_ppo_as_a_user_writes_it_moves_the_weights_as_ours(rotary_model_folder):
    """Over three passes, of which the first is REINFORCE in ours: at a ratio of 1 both are one."""
    weights = []
    for name in ("ppo", "my_algo:ppo"):
        options = ("training.num_iterations=3", f"training.policy_loss={name}")
        policy, config = make_policy(rotary_model_folder, is_exact=True), config_of(*GRPO, *options)
        optimizer = make_optimizer(policy.model, config.training)
        update(policy, optimizer, make_groups(config, EASY, HARD), config)
        weights.append(weights_of(policy))
    assert np.array_equal(*weights)


@pytest.mark.parametrize(
    ("key", "name", "line"),
    [
        ("advantage", "one_group", r"my_algo.py, line \d+: one_group"),
        ("advantage", "unknown", r"my_algo.py, line \d+: unknown raised KeyError"),
        ("advantage", "nan", "training.advantage = my_algo:nan"),
        ("policy_loss", "constant", "no gradient"),
    ],
)
def test_a_mistake_costs_one_line_before_the_model_is_loaded(key, name, line):
    with pytest.raises(ValueError, match=line) as error:
        try_algorithm(config_of(*GRPO, f"training.{key}=my_algo:{name}"))
    assert "\n" not in str(error.value)
