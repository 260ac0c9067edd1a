"""The maths of a step where numbers are special; for all others see test_update.py."""

import math
from types import SimpleNamespace

import pytest
import torch
from harness import alone, make_config, make_rows
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import main
from engine.core.measures import add_to_mean
from engine.core.user_file import RewardError
from engine.update import advantages, losses
from main import assign_advantages, grpo_advantages, k_best_mask


def test_over_mean_refuses_a_negative_reward_in_a_line():
    training = make_config("training.advantage=over_mean").training
    says = r"training\.advantage = over_mean: .* but one was -0\.5; write mean"
    with pytest.raises(RewardError, match=says):
        assign_advantages([make_rows(1.0, -0.5)], training)


@pytest.mark.parametrize("divide_by_std", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(divide_by_std, dtype):
    """The mean of three 0.1 is not 0.1 in floating point, so a threshold would not do."""
    rewards = torch.full((1, 3), 0.1, dtype=dtype)
    assert grpo_advantages(rewards, divide_by_std=divide_by_std).tolist() == [[0, 0, 0]]
    assert advantages.over_mean(rewards).tolist() == [[0, 0, 0]]
    assert grpo_advantages(torch.tensor([[0.1, 0.1 + 1e-7]]), divide_by_std=divide_by_std).all()


def test_of_equals_the_lower_indices_are_the_k_best():
    """A sort that is not stable shows from a few dozen equals on."""
    assert k_best_mask(torch.zeros((1, 200)), k=3)[0].nonzero()[:, 0].tolist() == [0, 1, 2]


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


def test_sums_over_ranks_are_exact_in_float64_and_leave_the_caller_its_values():
    """Bug: a list of floats went through float32: rewards differed from the ninth digit on."""
    values = torch.tensor([0.1], dtype=torch.float64)
    assert alone().sum([0.1, 2**24 + 1]).tolist() == [0.1, 2**24 + 1]
    assert alone().sum(values).data_ptr() != values.data_ptr()


class NoFloat64(TorchDispatchMode):
    """As on Apple's GPU, whose kernels have no float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        kinds = {(t.device.type, t.dtype) for t in tree_leaves(out) if torch.is_tensor(t)}
        assert ("mps", torch.float64) not in kinds, func
        return out


def test_apples_gpu_is_asked_for_no_float64(monkeypatch):
    """Bug: the first update of every run there ended with an error. Fake tensors have no values."""
    scaled = SimpleNamespace(backward=lambda: None)  # torch has no such pass without the GPU
    scaler = SimpleNamespace(scale=lambda loss: scaled)
    policy = SimpleNamespace(is_in_ddp=False, grad_scaler=scaler)
    logger = SimpleNamespace(progress=lambda batches, *names: batches)
    world = SimpleNamespace(size=1, sum=None)
    run = SimpleNamespace(policy=policy, logger=logger, world=world)
    run.config = SimpleNamespace(training=None)
    with FakeTensorMode(), NoFloat64():
        values, sums = torch.ones(2, 3, device="mps"), {}
        add_to_mean(sums, "entropy", values, values > 0)
        monkeypatch.setattr(main, "micro_batch_loss", lambda *given: values.sum())
        with pytest.raises(DataDependentOutputException):  # where the losses are read
            main.accumulate_gradients(run, [None, None], sums)
