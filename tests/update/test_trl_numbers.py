"""Advantages, loss, gradient and clip are those that TRL's GRPOTrainer computes.

TRL's figures, in trl_numbers.txt, are what this printed for its inputs, with trl 1.16.0 and torch
2.13.0:

    python benchmarks/trl_numbers.py

The conventions differ in places. Inputs and comparisons are chosen so that both agree there:

- TRL multiplies the KL by the ratio (`use_bias_correction_kl`) unless told not to, as here. GRPO
  (arXiv:2402.03300, equations 3 and 4) does not.
- GSPO is TRL's `importance_sampling_level="sequence"`. For CISPO TRL takes the limit of the weight
  where ours takes its distance from 1. The share of clipped tokens is compared for PPO alone: for
  CISPO TRL leaves out the tokens of negative advantage, whose weight is limited too, and for GSPO
  it counts completions instead of their tokens.
- DPPO is an experimental trainer of TRL up to 1.8.0, whose figures stand here; 1.9.0 has none. Its
  loss is that of the ratio without its gradient times log pi, so that only the gradients are equal,
  up to the limit of 20 that it sets to the ratio.
- Distillation is TRL's IW-OPD, an experimental trainer too, whose weights are 1 where gamma is 0.
- TRL's shares and means are of all rows' tokens. Ours leave out rows whose advantage is 0, unless
  there is a KL penalty, as here.
"""

import ast
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import alone, make_config

from benchmarks import trl_numbers as inputs
from engine.core.types import Completion, Trajectory
from main import grpo_advantages, make_micro_batches, micro_batch_loss

LINES = Path(__file__).with_name("trl_numbers.txt").read_text().splitlines()
TRL = {name: ast.literal_eval(text) for name, _, text in (line.partition(" = ") for line in LINES)}
GSPO = f"policy_loss=gspo clip_eps={inputs.GSPO_CLIP_EPS} clip_eps_high={inputs.GSPO_CLIP_EPS_HIGH}"
DPPO = f"policy_loss=dppo dppo_delta={inputs.DPPO_DELTA}"
KL = f"kl_coef={inputs.KL_COEF}"
DISTILL = "learning_type=distill num_iterations=1"
# (keys of training, loss_normalization, whether it is the first pass, TRL's loss, TRL's gradient).
# Our first pass is plain REINFORCE: its loss is not TRL's, whose ratio is 1, but its gradient is.
# In DPPO's later pass `old_log_probs` are others: it compares with the sampler, not with them.
LOSSES = {
    "grpo": (KL, "sequence", False, TRL["LOSS_WITH_KL"]["grpo"], TRL["GRADIENT_WITH_KL"]["grpo"]),
    "dapo": (KL, "token", False, TRL["LOSS_WITH_KL"]["dapo"], TRL["GRADIENT_WITH_KL"]["dapo"]),
    "first": ("policy_loss=ppo", "dr_grpo", True, None, TRL["FIRST_GRADIENT"]),
    "cispo": ("policy_loss=cispo", "token", False, TRL["CISPO_LOSS"], TRL["CISPO_GRADIENT"]),
    "gspo": (GSPO, "sequence", False, TRL["GSPO_LOSS"], TRL["GSPO_GRADIENT"]),
    "first, dppo": (DPPO, "token", True, None, TRL["DPPO_GRADIENT"]),
    "dppo": (DPPO, "token", False, None, TRL["DPPO_GRADIENT"]),
    "distill": (DISTILL, "token", True, None, TRL["DISTILL_GRADIENT"]),
    # Bug: the tokens of completions that are cut off stayed in the divisor.
    "skip": ("skip_truncated=true", "token", False, TRL["SKIP_LOSS"], TRL["SKIP_GRADIENT"]),
}
CLIPPED = [("policy_loss=ppo", False, 3), ("policy_loss=cispo", False, 3)]
CLIPPED += [(DPPO, False, 2), (DPPO, True, 2)]


def loss_and_gradient(
    keys: str, normalization: str, *, is_first: bool
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """What the update computes where a policy and its reference give these log-probabilities."""
    fixed = f"num_iterations=2 clip_eps={inputs.CLIP_EPS} clip_eps_high={inputs.CLIP_EPS_HIGH}"
    fixed += f" max_new_gen_tokens={inputs.MAX_NEW_TOKENS} micro_batch_tokens=2048"
    fixed += f" loss_normalization={normalization}"
    overrides = [f"training.{key}" for key in f"{fixed} {keys}".split()]
    overrides += ["model.teacher=x"] if keys == DISTILL else []
    training, rows = make_config(*overrides).training, []
    for i, length in enumerate(inputs.LENGTHS):  # the last one of the four has no end
        sampled, zeros = np.float32(inputs.OLD_LOG_PROBS[i][:length]), np.zeros(length, np.float32)
        completion = Completion([1] * length, sampled, zeros, i == 3, is_inserted=zeros > 0)
        rows.append(Trajectory([i], completion, "", {}, 0.0, advantage=inputs.ROW_ADVANTAGES[i]))
    (batch,) = make_micro_batches([rows], training, alone(), training.micro_batch_tokens)
    order = batch.input_ids[:, 0]  # the prompt of each row, one token, is its number
    log_probs = torch.tensor(inputs.LOG_PROBS, requires_grad=True)
    old, ref = torch.tensor([inputs.OLD_LOG_PROBS, inputs.REF_LOG_PROBS])
    old = old - 1 if "dppo" in keys else old
    scored, old, ref = (F.pad(some[order], (1, 0)) for some in (log_probs, old, ref))
    if not is_first:
        batch.old_log_probs, batch.ref_log_probs = old, ref
    policy = SimpleNamespace(
        scorer=lambda *_, **__: scored,
        score_by_reference=lambda *_, **__: ref,
        params=SimpleNamespace(temperature=1.0),
    )
    sums: dict[str, torch.Tensor] = {}
    loss = micro_batch_loss(policy, batch, training, sums)
    loss.backward()
    return loss.item(), log_probs.grad, sums


def assert_close(ours: torch.Tensor, figures: list[list[float]]) -> None:
    torch.testing.assert_close(ours.double(), torch.tensor(figures).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("scale", "divide_by_std"), [("none", False), ("group", True)])
def test_the_advantages_are_those_of_trl(scale, divide_by_std):
    rewards = torch.tensor(inputs.REWARDS, dtype=torch.float64)
    assert_close(grpo_advantages(rewards, divide_by_std=divide_by_std), TRL["ADVANTAGES"][scale])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_trl(name):
    keys, normalization, is_first, trl_loss, trl_gradient = LOSSES[name]
    loss, gradient, _ = loss_and_gradient(keys, normalization, is_first=is_first)
    assert_close(gradient, trl_gradient)
    if trl_loss is not None:
        assert loss == pytest.approx(trl_loss, rel=0, abs=1e-6)


def test_the_share_of_clipped_tokens_is_that_of_trl():
    """Bug: a token whose advantage is 0 counted as clipped where its ratio was low."""
    for keys, is_first, num_clipped in CLIPPED:
        _, _, sums = loss_and_gradient(f"{keys} {KL}", "dr_grpo", is_first=is_first)
        assert sums["train/clip_frac"].tolist() == [num_clipped, sum(inputs.LENGTHS)], keys
    num_clipped, num_tokens = CLIPPED[0][2], sum(inputs.LENGTHS)
    assert num_clipped / num_tokens == pytest.approx(TRL["CLIP_FRAC"], rel=0, abs=1e-6)
