"""The maths of a step, by hand on small tensors: advantages, weights and losses of tokens, metrics.

How these become one gradient is in test_update.py, the KL penalty's part of it in test_kl.py.
"""

import math
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from harness import alone, make_config, make_row, make_rows

from engine.core.types import MicroBatch
from engine.questions.user_file import RewardError
from engine.report.metrics import rollout_sums
from engine.update import losses
from main import assign_advantages, grpo_advantages, k_best_mask, micro_batch_loss, token_weights

# Advantages


def test_advantage_is_the_reward_minus_the_mean_of_its_own_group():
    """The same question twice is two groups, each with its own baseline."""
    groups = [make_rows(1.0, 0.0, 0.0, 0.0), make_rows(0.0, 0.0, 0.0, 0.0)]
    assign_advantages(groups, make_config("training.k_best_of_n=[4,4]").training)
    assert [[t.advantage for t in group] for group in groups] == [[0.75, *[-0.25] * 3], [0] * 4]
    assert all(t.in_batch for group in groups for t in group)


def test_zscore_divides_by_the_sample_standard_deviation_plus_1e_4():
    """(1, 0, 0, 0): the squares sum to 3/4, over n - 1 = 3 that is a variance of 1/4."""
    expected = [0.75 / 0.5001, *[-0.25 / 0.5001] * 3]
    group = make_rows(1.0, 0.0, 0.0, 0.0)
    assign_advantages([group], make_config("training.advantage=zscore").training)
    assert [t.advantage for t in group] == pytest.approx(expected, rel=1e-12)


def test_over_mean_counts_a_rare_answer_more_row_by_row():
    """(r - mean) / mean, and 0 for a group of zeros or of equals, whose mean may round."""
    groups = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [0.1, 0.1, 0.1, 1.1]]
    rows = [make_rows(*map(float, group)) for group in groups]
    assign_advantages(rows, make_config("training.advantage=over_mean").training)
    for group, made in zip(groups, rows, strict=True):
        mean = sum(group) / len(group)
        expected = [(reward - mean) / mean if mean > 0 else 0.0 for reward in group]
        assert [t.advantage for t in made] == pytest.approx(expected, rel=1e-12)
        assert all(t.in_batch for t in made)
    assert [t.advantage for t in rows[0]] == [3, -1, -1, -1]


def test_over_mean_refuses_a_negative_reward_in_a_line_that_names_its_part():
    rows = make_rows(1.0, -0.5)
    rows[1].reward_parts["length"] = -1.5
    with pytest.raises(RewardError) as caught:
        assign_advantages([rows], make_config("training.advantage=over_mean").training)
    line = "training.advantage = over_mean: it divides by rewards of 0 and more, but part length "
    assert str(caught.value) == line + "was -1.5; write mean, or let the task pay 0 at least"


@pytest.mark.parametrize("divide_by_std", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(divide_by_std, dtype):
    """The mean of three 0.1 is not 0.1 in floating point, so a threshold would not do."""
    rewards = torch.full((1, 3), 0.1, dtype=dtype)
    assert grpo_advantages(rewards, divide_by_std=divide_by_std).tolist() == [[0, 0, 0]]
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


def test_sil_imitates_the_k_best_of_every_group_of_equals_too():
    """Groups of equals were left out once, since any k of them would do: see PITFALLS.md."""
    groups = [make_rows(0.0, 1.1, 0.1, 1.1), make_rows(0.1, 0.1, 0.1, 0.1)]
    sil = ["training.learning_type=sil", "training.k_best_of_n=[2,4]"]
    assign_advantages(groups, make_config(*sil).training)
    assert [[t.advantage for t in group] for group in groups] == [[0, 1, 0, 1], [1, 1, 0, 0]]
    in_batch = [[t.in_batch for t in group] for group in groups]
    assert in_batch == [[False, True, False, True], [True, True, False, False]]


def test_a_quarter_of_sils_gradient_comes_from_groups_of_equals():
    """A policy that is right with probability p: d log p is 1 - p by its logit, d log (1-p) is -p.

    The one best of n samples is right unless all are wrong. Without groups of equals the gradient
    would lack p (1-p) (p^(n-1) - (1-p)^(n-1)), 27% of it where p = 0.85 and n = 8.
    """
    p, n, gradient, of_equals = 0.85, 8, 0.0, 0.0
    sil = make_config("training.learning_type=sil", f"training.k_best_of_n=[1,{n}]").training
    for num_right in range(n + 1):
        group = make_rows(*[1.0] * num_right, *[0.0] * (n - num_right))
        assign_advantages([group], sil)
        chance = math.comb(n, num_right) * p**num_right * (1 - p) ** (n - num_right)
        part = chance * sum(t.advantage * (1 - p if t.reward else -p) for t in group)
        gradient += part
        of_equals += part if num_right in (0, n) else 0
    all_wrong = (1 - p) ** n
    assert gradient == pytest.approx((1 - all_wrong) * (1 - p) - all_wrong * p)
    assert of_equals == pytest.approx(p * (1 - p) * (p ** (n - 1) - (1 - p) ** (n - 1)))
    assert of_equals / gradient == pytest.approx(0.27, abs=0.005)


# What a token counts for


WEIGHTS = {"dr_grpo": [[1 / 80] * 3, [1 / 80, 0, 0]], "token": [[1 / 20] * 3, [1 / 20, 0, 0]]}
WEIGHTS |= {"sequence": [[1 / 24] * 3, [1 / 8, 0, 0]], "sum": [[1 / 8] * 3, [1 / 8, 0, 0]]}


@pytest.mark.parametrize("normalization", WEIGHTS)
def test_token_weights_divide_by_the_counts_of_the_global_batch(normalization):
    """Rows of 3 and 1 tokens, among 8 rows and 20 tokens over all ranks; at most 10 new tokens."""
    mask = torch.tensor([[True, True, True], [True, False, False]])
    counts = {"num_rows": 8, "num_tokens": 20, "max_new_gen_tokens": 10}
    weights = token_weights(mask, normalization=normalization, **counts)
    assert torch.allclose(weights, torch.tensor(WEIGHTS[normalization]), rtol=1e-6, atol=0)


def test_the_importance_of_a_token_is_its_ratio_to_the_sampler_up_to_a_limit():
    """Tokens that are twice, half and four times as likely as when they were sampled."""
    log_probs, sampler_log_probs = torch.tensor([[0.8, 0.1, 0.4], [0.4, 0.2, 0.1]]).log()[:, None]
    ratios = losses.truncated_importance(log_probs, sampler_log_probs, clip=3.0)
    assert torch.allclose(ratios, torch.tensor([[2.0, 0.5, 3.0]]))


# The loss of a token


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [
        *((1, 0.5, 0.5), (1, 1, 1), (1, 1.25, 1.25), (1, 1.35, 0)),  # above 1.3 nothing is gained
        *((-1, 0.75, 0), (-1, 0.85, -0.85), (-1, 1, -1), (-1, 1.5, -1.5)),  # nor below 0.8
    ],
)
def test_the_clip_cuts_what_goes_too_far_and_only_that(advantage, ratio, gradient):
    """min(ratio A, clip(ratio) A), with a clip that is wider above, as DAPO's clip-higher."""
    log_probs = torch.tensor([[math.log(ratio) - 2]], requires_grad=True)
    advantages, old = torch.tensor([float(advantage)]), torch.tensor([[-2.0]])
    loss, is_clipped = losses.ppo_loss(log_probs, advantages, old, eps=0.2, eps_high=0.3)
    loss.sum().backward()
    assert -log_probs.grad.item() == pytest.approx(gradient, abs=1e-6)
    assert is_clipped.item() == (gradient == 0)
    clipped = min(max(ratio, 0.8), 1.3) * advantage
    assert -loss.item() == pytest.approx(min(ratio * advantage, clipped), abs=1e-6)


def test_reinforce_and_the_ratio_have_the_same_gradient_while_the_ratio_is_one():
    """Though their losses differ: at ratio 1 a group's ratio loss is 0, its gradient is not."""
    gradients, found = [], []
    for is_first in (True, False):
        log_probs, batch = make_compared([[1.0, 1.0], [1.0, 1.0]], [[True] * 2] * 2, [0.75, -0.75])
        with torch.no_grad():
            log_probs.copy_(torch.tensor([[-1.0, -2.0], [-0.5, -3.0]]))
        batch.old_log_probs = None if is_first else log_probs.detach().clone()
        policy = SimpleNamespace(
            scorer=Mock(return_value=log_probs),
            reference=None,
            params=SimpleNamespace(temperature=1.0),
            grad_scaler=torch.amp.GradScaler(enabled=False),
        )
        training = make_config("training.num_iterations=2").training
        loss = micro_batch_loss(policy, batch, training, {})
        loss.backward()
        found.append(loss.item())
        gradients.append(log_probs.grad)
    assert torch.allclose(*gradients)
    assert gradients[0].tolist() == [[-0.75, -0.75], [0.75, 0.75]]
    assert found == pytest.approx([0.75 * 3.0 - 0.75 * 3.5, 0.0])


@pytest.mark.parametrize(
    ("advantage", "was", "now", "is_masked"),
    [
        *((1, 0.5, 0.6, False), (1, 0.5, 0.7, True), (1, 0.5, 0.1, False)),  # only upwards
        *((-2, 0.5, 0.4, False), (-2, 0.5, 0.3, True), (-2, 0.1, 0.9, False)),  # only downwards
        *((1, 1e-5, 1e-2, False), (-2, 0.99, 0.8, True)),  # ratios of 1,000 and of 0.81
        *((0, 0.1, 0.9, False), (1, 0.5, 0.5, False)),
    ],
)
def test_dppo_masks_by_the_difference_of_probabilities(advantage, was, now, is_masked):
    """The gradient of -pi/mu A by log pi is -pi/mu A; PPO would clip ratios, whatever they mean."""
    log_probs = torch.tensor([[math.log(now)]], requires_grad=True)
    advantages, sampler = torch.tensor([float(advantage)]), torch.tensor([[math.log(was)]])
    loss, masked = losses.dppo_loss(log_probs, advantages, sampler, delta=0.15)
    loss.sum().backward()
    expected = 0.0 if is_masked else -now / was * advantage
    assert masked.item() == is_masked
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert log_probs.grad.item() == pytest.approx(expected, rel=1e-5)


def test_a_masked_token_whose_ratio_overflows_leaves_the_gradient_finite():
    log_probs = torch.tensor([[-0.1, -1.0]], requires_grad=True)
    sampled = torch.tensor([[-200.0, -1.0]])
    loss, masked = losses.dppo_loss(log_probs, torch.ones(1), sampled, delta=0.15)
    loss.sum().backward()
    assert masked.tolist() == [[True, False]]
    assert loss[0].tolist() == log_probs.grad[0].tolist() == [0.0, -1.0]


def test_the_mean_of_a_completion_has_a_gradient_through_its_own_tokens():
    """Completions of three tokens and of one; what stands where the mask is False is left out."""
    log_probs = torch.tensor([[-1.0, -2.0, -6.0], [-4.0, -9.0, -9.0]], requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])
    means = losses.completion_means(log_probs, mask)
    assert means.tolist() == [[-3.0] * 3, [-4.0] * 3]
    (means * torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]])).sum().backward()
    torch.testing.assert_close(log_probs.grad, torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]]))


def make_compared(ratios: list[list[float]], mask: list[list[bool]], advantages: list[float]):
    """log_probs (B, T) that have these ratios to the policy that sampled, and their batch."""
    log_ratios, completion_mask = torch.tensor(ratios).log(), torch.tensor(mask)
    old = torch.linspace(-3, -1, log_ratios.numel()).view_as(log_ratios)
    batch = MicroBatch(
        trajectories=[],
        input_ids=torch.zeros_like(completion_mask),
        completion_mask=completion_mask,
        advantages=torch.tensor(advantages),
        token_weights=completion_mask.float(),
        sampler_log_probs=old,
        old_log_probs=old,
    )
    return (old + log_ratios).requires_grad_(), batch


@pytest.mark.parametrize(
    ("advantage", "product", "gradient"),
    # of each token: ratio of the completion x A / 2 tokens x 2 tokens of weight 1
    [(1, 1.0, 1.0), (1, 1.21, 1.1), (1, 1.69, 0), (1, 0.25, 0.5), (-1, 1.69, -1.3), (-1, 0.25, 0)],
)
def test_gspo_clips_whole_completions_by_hand(advantage, product, gradient):
    """The ratio is the root of the product of two tokens' ratios, 4 and product / 4."""
    log_probs, batch = make_compared([[4.0, product / 4, 9.0]], [[True, True, False]], [advantage])
    settings = ["policy_loss=gspo", "clip_eps=0.09", "clip_eps_high=0.2"]
    training = make_config(*(f"training.{setting}" for setting in settings)).training
    loss, is_clipped = losses.off_policy_loss(training, batch, log_probs, batch.advantages)
    (batch.token_weights * loss).sum().backward()
    expected = torch.tensor([[-gradient, -gradient, 0.0]])
    torch.testing.assert_close(log_probs.grad, expected, rtol=0, atol=1e-6)
    assert is_clipped[batch.completion_mask].tolist() == [gradient == 0] * 2


# The KL penalty of a token


def test_the_kl_penalty_by_hand():
    """k3 = exp(x) - x - 1 at x = ref - current: 0 at 0, e - 2 at 1, 1/e at -1."""
    log_probs = torch.tensor([[-2.0, -2.0, -2.0]], requires_grad=True)
    kl = losses.kl_penalty(log_probs, torch.tensor([[-2.0, -1.0, -3.0]]))
    assert kl[0].tolist() == pytest.approx([0, math.e - 2, 1 / math.e], rel=1e-6)
    kl.sum().backward()  # 1 - exp(x): rise where the reference is higher, fall where it is lower
    assert log_probs.grad[0].tolist() == pytest.approx([0, 1 - math.e, 1 - 1 / math.e], rel=1e-6)


@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, -11.0, 11.0, 100.0, 1e4])
def test_the_kl_penalty_of_a_token_far_from_the_reference_is_finite(log_ratio):
    """exp(100) is infinite in float32; and no gradient drives the token further away."""
    log_probs = torch.tensor([[-1.0 - log_ratio]], requires_grad=True)
    kl = losses.kl_penalty(log_probs, torch.tensor([[-1.0]]))
    kl.sum().backward()
    assert kl.isfinite().all() and kl.item() > 8
    assert log_probs.grad.isfinite().all() and log_probs.grad.item() * log_ratio <= 0


def test_the_kl_penalty_is_limited_on_both_sides():
    """Beyond a log-ratio of 10 it stays what it is there, and has no gradient."""
    log_probs = torch.tensor([[-60.0, -60.0]], dtype=torch.float64, requires_grad=True)
    kl = losses.kl_penalty(log_probs, torch.tensor([[-10.0, -110.0]]))
    expected = [math.exp(10) - 10 - 1, math.exp(-10) + 10 - 1]
    assert kl[0].tolist() == pytest.approx(expected, rel=1e-12)
    kl.sum().backward()
    assert log_probs.grad.tolist() == [[0.0, 0.0]]


def test_the_kl_penalty_is_never_below_zero_and_zero_at_the_reference():
    """exp(x) - x - 1 in float32 rounds to -6e-8 at some small x."""
    small = torch.logspace(-12, 1, 20_001)
    log_ratios = torch.cat([small, -small, torch.zeros(1)])
    kl = losses.kl_penalty(torch.full_like(log_ratios, 0.0), log_ratios)
    assert (kl >= 0).all() and kl[-1] == 0
    exact = torch.expm1(log_ratios.double()) - log_ratios.double()
    assert torch.allclose(kl.double(), exact, rtol=1e-3, atol=1e-9)
    assert losses.kl_penalty(log_ratios, log_ratios).count_nonzero() == 0


# What a step logs of its rollouts


def test_rollout_metrics_are_sums_and_counts_over_all_rows():
    """Two groups of two: rewards (1, 0) and (0.1, 0.1), 2 + 4 + 4 + 4 tokens of 2 nats each."""
    groups = [
        [make_row(1.0, num_tokens=2, solved=True), make_row(0.0, truncated=True)],
        [make_row(0.1), make_row(0.1, solved=True, truncated=True)],  # it does not stop
    ]
    assign_advantages(groups, make_config("training.k_best_of_n=[2,2]").training)
    sums = rollout_sums(groups, ("format", "answer"))
    expected = {"reward": (1.2, 4), "reward_std": (math.sqrt(0.5), 2), "solved": (2, 4)}
    expected |= {"solved_and_ended": (1, 4), "part_format": (2.0, 4), "part_answer": (2.0, 4)}
    expected |= {"advantage_abs": (1.0, 4), "entropy": (28.0, 14), "completion_tokens": (14, 4)}
    expected |= {"truncated_frac": (2, 4), "zero_advantage_frac": (1, 2)}
    assert {name: pytest.approx(sums[f"train/{name}"]) for name in expected} == expected
    assert "train/reward_timeouts" not in sums
    groups[0][1].reward_parts = {"answer": 0.0, "timeout": 1.0}
    groups[0][0].reward_parts |= {"timeout": 0.0}
    sums = rollout_sums(groups[:1], ("answer", "timeout"))
    assert sums["train/reward_timeouts"] == (1.0, 2) and "train/part_timeout" not in sums


def test_sums_over_ranks_are_exact_in_float64_and_leave_the_caller_its_values():
    """Bug: a list of floats went through float32: rewards differed from the ninth digit on."""
    values = torch.tensor([0.1], dtype=torch.float64)
    assert alone().sum([0.1, 2**24 + 1]).tolist() == [0.1, 2**24 + 1]
    assert alone().sum(values).data_ptr() != values.data_ptr()
