"""The maths of a step where numbers are special: ties, equals, limits; and a rollout's metrics.

What advantages and losses are otherwise is in test_trl_numbers.py and, by formulas, test_update.py.
"""

import math

import pytest
import torch
from harness import alone, make_config, make_row, make_rows

from engine.core.user_file import RewardError
from engine.report.metrics import rollout_metrics
from engine.update import losses
from main import assign_advantages, grpo_advantages, k_best_mask

# Advantages


def test_over_mean_refuses_a_negative_reward_in_a_line_that_names_its_part():
    rows = make_rows(1.0, -0.5)
    rows[1].reward_parts["length"] = -1.5
    with pytest.raises(RewardError) as caught:
        assign_advantages([rows], make_config("training.advantage=over_mean").training)
    assert "training.advantage = over_mean: " in str(caught.value)
    assert "but part length was -1.5; write mean" in str(caught.value)


@pytest.mark.parametrize("divide_by_std", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(divide_by_std, dtype):
    """The mean of three 0.1 is not 0.1 in floating point, so a threshold would not do."""
    rewards = torch.full((1, 3), 0.1, dtype=dtype)
    assert grpo_advantages(rewards, divide_by_std=divide_by_std).tolist() == [[0, 0, 0]]
    assert losses.over_mean(rewards, groups=[]).tolist() == [[0, 0, 0]]
    assert grpo_advantages(torch.tensor([[0.1, 0.1 + 1e-7]]), divide_by_std=divide_by_std).all()


def test_the_k_best_are_marked_and_ties_go_to_the_lower_index():
    rewards = torch.tensor([[0.1, 1.1, 0.1, 1.1], [0.5, 0.5, 0.5, 0.5], [0.0, 0.1, 0.1, 0.1]])
    assert k_best_mask(rewards, k=2).tolist() == [
        [False, True, False, True],
        [True, True, False, False],
        [False, True, True, False],
    ]
    many = torch.zeros((1, 200))  # a sort that is not stable shows from a few dozen equals on
    assert k_best_mask(many, k=3)[0].nonzero()[:, 0].tolist() == [0, 1, 2]


def test_a_quarter_of_sils_gradient_comes_from_groups_of_equals():
    """By the logit of a policy that is right with probability p = 0.85: see PITFALLS.md."""
    p, n, parts = 0.85, 8, []
    sil = make_config("training.learning_type=sil", f"training.k_best_of_n=[1,{n}]").training
    for num_right in range(n + 1):
        group = make_rows(*[1.0] * num_right, *[0.0] * (n - num_right))
        assign_advantages([group], sil)
        chance = math.comb(n, num_right) * p**num_right * (1 - p) ** (n - num_right)
        parts.append(chance * sum(t.advantage * (1 - p if t.reward else -p) for t in group))
    assert (parts[0] + parts[-1]) / sum(parts) == pytest.approx(0.27, abs=0.005)


# Losses of tokens that are far from where they were


def test_a_masked_token_whose_ratio_overflows_leaves_the_gradient_finite():
    log_probs = torch.tensor([[-0.1, -1.0]], requires_grad=True)
    sampled = torch.tensor([[-200.0, -1.0]])
    loss, masked = losses.dppo_loss(log_probs, torch.ones(1), sampled, delta=0.15)
    loss.sum().backward()
    assert masked.tolist() == [[True, False]]
    assert loss[0].tolist() == log_probs.grad[0].tolist() == [0.0, -1.0]


def test_the_kl_penalty_is_limited_on_both_sides():
    """Beyond a log-ratio of 10 it stays what it is there, and has no gradient."""
    log_ratios = torch.tensor([-1e4, -100.0, -11.0, 11.0, 100.0, 1e4])
    log_probs = (-1 - log_ratios).requires_grad_()
    kl = losses.kl_penalty(log_probs, torch.full_like(log_ratios, -1.0))
    expected = [math.exp(-10) + 10 - 1] * 3 + [math.exp(10) - 10 - 1] * 3
    assert kl.tolist() == pytest.approx(expected, rel=1e-6)
    kl.sum().backward()
    assert log_probs.grad.tolist() == [0.0] * 6


def test_rollout_metrics_are_sums_and_counts_over_all_rows():
    """Two groups of two: rewards (1, 0) and (0.1, 0.1), 2 + 4 + 4 + 4 tokens of 2 nats each."""
    groups = [
        [make_row(1.0, num_tokens=2, solved=True), make_row(0.0, truncated=True)],
        [make_row(0.1), make_row(0.1, solved=True, truncated=True)],  # it does not stop
    ]
    assign_advantages(groups, make_config("training.k_best_of_n=[2,2]").training)
    sums = rollout_metrics(groups, ("format", "answer"))
    expected = {"reward": (1.2, 4), "reward_std": (math.sqrt(0.5), 2), "solved": (2, 4)}
    expected |= {"solved_and_ended": (1, 4), "part_format": (2.0, 4), "part_answer": (2.0, 4)}
    expected |= {"advantage_abs": (1.0, 4), "entropy": (28.0, 14), "completion_tokens": (14, 4)}
    expected |= {"truncated_frac": (2, 4), "zero_advantage_frac": (1, 2)}
    assert {name: pytest.approx(sums[f"train/{name}"]) for name in expected} == expected
    assert "train/reward_timeouts" not in sums
    groups[0][1].reward_parts = {"answer": 0.0, "timeout": 1.0}
    groups[0][0].reward_parts |= {"timeout": 0.0}
    sums = rollout_metrics(groups[:1], ("answer", "timeout"))
    assert sums["train/reward_timeouts"] == (1.0, 2) and "train/part_timeout" not in sums


def test_sums_over_ranks_are_exact_in_float64_and_leave_the_caller_its_values():
    """Bug: a list of floats went through float32: rewards differed from the ninth digit on."""
    values = torch.tensor([0.1], dtype=torch.float64)
    assert alone().sum([0.1, 2**24 + 1]).tolist() == [0.1, 2**24 + 1]
    assert alone().sum(values).data_ptr() != values.data_ptr()
