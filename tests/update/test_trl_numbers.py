"""Advantages, loss, gradient and clip are those that TRL's GRPOTrainer computes.

TRL's figures below are what this printed, for its inputs, with trl 1.16.0 and torch 2.13.0:

    python benchmarks/trl_numbers.py

The conventions differ in places. Inputs and comparisons are chosen so that both agree there:

- All rows are one micro-batch on one rank: with several TRL's bnpo averages their losses.
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

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import alone, make_config

from benchmarks import trl_numbers as inputs
from engine.core.types import Completion, MicroBatch, Trajectory
from main import grpo_advantages, make_micro_batches, micro_batch_loss, token_weights

# TRL's figures

TRL_ADVANTAGES = {
    "none": [
        [0.774999976, -0.225000024, -0.325000018, -0.225000024],
        [0.274999976, 0.274999976, 0.274999976, -0.825000048],
        [-0.224999964, 0.175000012, -0.324999988, 0.375],
        [0.0, 0.0, 0.0, 0.0],
    ],
    "group": [
        [1.493507147, -0.433598906, -0.626309514, -0.433598906],
        [0.499909043, 0.499909043, 0.499909043, -1.499727368],
        [-0.680778742, 0.529494703, -0.983347237, 1.134631515],
        [0.0, 0.0, 0.0, 0.0],
    ],
}
TRL_FIRST_GRADIENT = [
    [-0.0625, -0.0625, -0.0625, -0.0625, -0.0625],
    [0.03125, 0.03125, 0.03125, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.083333333, 0.083333333, 0.083333333, 0.083333333, 0.0],
]
TRL_LOSS_WITH_KL = {"grpo": 0.440660382, "dapo": 0.343774973}
TRL_GRADIENT_WITH_KL = {
    "grpo": [
        [0.000906346, -0.091605207, -0.042522648, -0.075525855, -0.07293157],
        [0.003759903, 0.102168655, 0.076337672, 0.0, 0.0],
        [-0.036490078, 0.0, 0.0, 0.0, 0.0],
        [0.124342682, 0.004169556, 0.22776485, 0.11172091, 0.0],
    ],
    "dapo": [
        [0.001394379, -0.140931087, -0.065419458, -0.116193622, -0.112202415],
        [0.00347068, 0.094309528, 0.070465544, 0.0, 0.0],
        [-0.011227716, 0.0, 0.0, 0.0, 0.0],
        [0.153037147, 0.005131761, 0.280325969, 0.137502658, 0.0],
    ],
}
TRL_GSPO_LOSS = 0.345436631
TRL_GSPO_GRADIENT = [
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.066808694, 0.066808694, 0.066808694, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.131408887, 0.131408887, 0.131408887, 0.131408887, 0.0],
]
TRL_CLIP_FRAC = 0.230769232
TRL_SKIP_LOSS = -0.529618137
TRL_SKIP_GRADIENT = [
    [0.0, -0.203567126, -0.101088443, -0.166666667, -0.150806236],
    [0.0, 0.137393439, 0.101783563, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
]
TRL_CISPO_LOSS = -0.210600854
TRL_CISPO_GRADIENT = [
    [-0.147692308, -0.140931087, -0.069984307, -0.115384615, -0.104404317],
    [0.034992153, 0.073846154, 0.070465544, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.153846154, 0.113972034, 0.196923077, 0.139205757, 0.0],
]
TRL_DPPO_GRADIENT = [  # of trl 1.8.0
    [0.0, -0.140931087, -0.069984307, -0.115384615, -0.104404317],
    [0.0, 0.095118535, 0.070465544, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.153846154, 0.113972034, 0.280325969, 0.139205757, 0.0],
]
TRL_DISTILL_GRADIENT = [
    [0.015384615, 0.0, 0.069230769, -0.007692308, -0.053846154],
    [0.046153846, -0.007692308, 0.0, 0.0, 0.0],
    [-0.069230769, 0.0, 0.0, 0.0, 0.0],
    [-0.007692308, 0.084615385, 0.0, -0.015384615, 0.0],
]

GSPO = f"policy_loss=gspo clip_eps={inputs.GSPO_CLIP_EPS} clip_eps_high={inputs.GSPO_CLIP_EPS_HIGH}"
DPPO = f"policy_loss=dppo dppo_delta={inputs.DPPO_DELTA}"
KL = f"kl_coef={inputs.KL_COEF}"
DISTILL = "learning_type=distill num_iterations=1"
# (keys of training, loss_normalization, whether it is the first pass, TRL's loss, TRL's gradient).
# Our first pass is plain REINFORCE: its loss is not TRL's, whose ratio is 1, but its gradient is.
# In DPPO's later pass `old_log_probs` are others: it compares with the sampler, not with them.
LOSSES = {
    "grpo": (KL, "sequence", False, TRL_LOSS_WITH_KL["grpo"], TRL_GRADIENT_WITH_KL["grpo"]),
    "dapo": (KL, "token", False, TRL_LOSS_WITH_KL["dapo"], TRL_GRADIENT_WITH_KL["dapo"]),
    "first, once": ("num_iterations=1", "dr_grpo", True, None, TRL_FIRST_GRADIENT),
    "first, ppo": ("policy_loss=ppo", "dr_grpo", True, None, TRL_FIRST_GRADIENT),
    "first, gspo": (GSPO, "dr_grpo", True, None, TRL_FIRST_GRADIENT),
    "cispo": ("policy_loss=cispo", "token", False, TRL_CISPO_LOSS, TRL_CISPO_GRADIENT),
    "gspo": (GSPO, "sequence", False, TRL_GSPO_LOSS, TRL_GSPO_GRADIENT),
    "first, dppo": (DPPO, "token", True, None, TRL_DPPO_GRADIENT),
    "dppo": (DPPO, "token", False, None, TRL_DPPO_GRADIENT),
    "distill": (DISTILL, "token", True, None, TRL_DISTILL_GRADIENT),
}
CLIPPED = [(KL, False, 3), ("policy_loss=cispo", False, 3), (DPPO, False, 2), (DPPO, True, 2)]


def loss_and_gradient(
    keys: str, normalization: str, *, is_first: bool = False, weights: torch.Tensor | None = None
) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """What the update computes where a policy and its reference give these log-probabilities."""
    mask = torch.arange(5) < torch.tensor(inputs.LENGTHS)[:, None]
    counts = {"num_rows": 4, "num_tokens": sum(inputs.LENGTHS)}
    training = SimpleNamespace(
        loss_normalization=normalization, max_new_gen_tokens=inputs.MAX_NEW_TOKENS
    )
    sampler, ref = torch.tensor(inputs.OLD_LOG_PROBS), torch.tensor(inputs.REF_LOG_PROBS)
    old = sampler - 1 if keys == DPPO else sampler
    log_probs = torch.tensor(inputs.LOG_PROBS, requires_grad=True)
    batch = MicroBatch(
        trajectories=[],
        input_ids=torch.zeros(4, 5, dtype=torch.long),
        completion_mask=mask,
        advantages=torch.tensor(inputs.ROW_ADVANTAGES),
        token_weights=weights if weights is not None else token_weights(mask, training, **counts),
        sampler_log_probs=sampler,
        old_log_probs=None if is_first else old,
        ref_log_probs=None if is_first else ref,
    )
    policy = SimpleNamespace(
        scorer=lambda *_, **__: log_probs,
        score_by_reference=lambda *_, **__: ref,
        params=SimpleNamespace(temperature=1.0),
        grad_scaler=torch.amp.GradScaler(enabled=False),
    )
    clip = f"num_iterations=2 clip_eps={inputs.CLIP_EPS} clip_eps_high={inputs.CLIP_EPS_HIGH}"
    overrides = [f"training.{key}" for key in f"{clip} {keys}".split()]
    overrides += ["model.teacher=x"] if keys == DISTILL else []
    sums: dict[str, torch.Tensor] = {}
    loss = micro_batch_loss(policy, batch, make_config(*overrides).training, sums)
    loss.backward()
    return loss.item(), log_probs.grad, sums


def assert_close(ours: torch.Tensor, figures: list[list[float]]) -> None:
    torch.testing.assert_close(ours.double(), torch.tensor(figures).double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("scale", "divide_by_std"), [("none", False), ("group", True)])
def test_the_advantages_are_those_of_trl(scale, divide_by_std):
    rewards = torch.tensor(inputs.REWARDS, dtype=torch.float64)
    assert_close(grpo_advantages(rewards, divide_by_std=divide_by_std), TRL_ADVANTAGES[scale])


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_those_of_trl(name):
    keys, normalization, is_first, trl_loss, trl_gradient = LOSSES[name]
    loss, gradient, _ = loss_and_gradient(keys, normalization, is_first=is_first)
    assert_close(gradient, trl_gradient)
    if trl_loss is not None:
        assert loss == pytest.approx(trl_loss, rel=0, abs=1e-6)


def test_without_cut_off_completions_loss_and_gradient_are_those_of_trl():
    """Bug: their tokens stayed in the divisor; the last one of the four has no end."""
    keys, rows = "skip_truncated=true", []
    for advantage, length in zip(inputs.ROW_ADVANTAGES, inputs.LENGTHS, strict=True):
        zeros, is_cut = np.zeros(length, np.float32), len(rows) == 3
        completion = Completion([1] * length, zeros, zeros, is_cut, zeros > 0)
        rows.append(Trajectory([1], completion, "", {}, 0.0, advantage=advantage))
    given = ("training.loss_normalization=token", "training.micro_batch_tokens=2048")
    config = make_config(f"training.{keys}", *given)
    (batch,) = make_micro_batches([rows], config.training, alone())
    weights = torch.zeros(4, 5)
    for trajectory, of_row in zip(batch.trajectories, batch.token_weights[:, 1:], strict=True):
        place = [row is trajectory for row in rows].index(True)
        weights[place] = of_row  # behind the prompt's one token
    loss, gradient, _ = loss_and_gradient(keys, "token", weights=weights)
    assert_close(gradient, TRL_SKIP_GRADIENT)
    assert loss == pytest.approx(TRL_SKIP_LOSS, rel=0, abs=1e-6)


def test_the_share_of_clipped_tokens_is_that_of_trl():
    """Bug: a token whose advantage is 0 counted as clipped where its ratio was low."""
    for keys, is_first, num_clipped in CLIPPED:
        _, _, sums = loss_and_gradient(keys, "dr_grpo", is_first=is_first)
        assert sums["train/clip_frac"].tolist() == [num_clipped, sum(inputs.LENGTHS)], keys
    num_clipped, num_tokens = CLIPPED[0][2], sum(inputs.LENGTHS)
    assert num_clipped / num_tokens == pytest.approx(TRL_CLIP_FRAC, rel=0, abs=1e-6)
