"""What is off by default: batches that are used again, a KL penalty, a sampler that is another.

Where a batch is used for several updates (`training.num_iterations`), the policy has moved since it
sampled. Then the ratio pi / pi_old weighs each token: `old_log_probs` are those of the first pass,
whose loss is REINFORCE, -A log pi. All shapes are (B, S), but for advantages (B, 1); with a teacher
each token has its own. DPPO alone compares with the sampler, mu, in every pass.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.core.config import TrainingSettings
from engine.core.types import MicroBatch

KL_LOG_RATIO_LIMIT = 10.0  # its exponential is 22,026; an unlimited one overflows


def apply_options(
    training: TrainingSettings,
    batch: MicroBatch,
    log_probs: Tensor,
    token_loss: Tensor,
    is_first: bool,
    score_by_reference: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """REINFORCE's token losses and weights with what the config switches on; metrics of tokens."""
    if is_first and training.has_reference:  # it does not move: later passes compare with the same
        batch.ref_log_probs = score_by_reference(batch.input_ids, batch.completion_mask)
    weights = batch.token_weights
    is_clipped = torch.zeros_like(token_loss)
    measured = {}
    advantages = batch.advantages[:, None]  # (B, 1)
    if training.learning_type == "distill":
        teaching = batch.ref_log_probs - batch.old_log_probs  # (B, S)
        mix = training.distill_mix
        advantages = teaching if mix is None else advantages + mix * teaching
        token_loss = -advantages * log_probs
        if is_first:
            measured["train/kl"] = -teaching
    if ":" in training.policy_loss:  # the user's own
        from engine.update.user_algorithm import own_loss

        token_loss = own_loss(training.policy_loss, batch, log_probs, advantages)
    elif training.policy_loss == "dppo":
        token_loss, is_clipped = dppo_loss(
            log_probs, advantages, batch.sampler_log_probs, training.dppo_delta
        )
    elif not is_first:
        token_loss, is_clipped = off_policy_loss(training, batch, log_probs, advantages)
    measured["train/clip_frac"] = is_clipped
    if training.kl_coef > 0:
        kl = kl_penalty(log_probs, batch.ref_log_probs)
        token_loss = token_loss + training.kl_coef * kl
        if is_first:
            measured["train/kl"] = kl.detach()
    if training.tis_clip:
        # Truncated importance sampling (Yao et al. 2025): min(pi / pi_sampler, tis_clip)
        ratio = (batch.old_log_probs - batch.sampler_log_probs).exp()
        weights = weights * ratio.clamp(max=training.tis_clip)
    return token_loss, weights, measured


def off_policy_loss(
    training: TrainingSettings, batch: MicroBatch, log_probs: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """The loss of each token by `training.policy_loss`, and which tokens it clips."""
    eps_high = training.clip_eps_high or training.clip_eps
    old_log_probs = batch.old_log_probs
    if training.policy_loss == "cispo":
        return cispo_loss(log_probs, advantages, old_log_probs, eps_high)
    if training.policy_loss == "gspo":
        log_probs = completion_means(log_probs, batch.completion_mask)
        old_log_probs = completion_means(old_log_probs, batch.completion_mask)
    return ppo_loss(log_probs, advantages, old_log_probs, eps=training.clip_eps, eps_high=eps_high)


def ppo_loss(
    log_probs: Tensor, advantages: Tensor, old_log_probs: Tensor, *, eps: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-min(ratio A, clip(ratio) A) (PPO, arXiv:1707.06347, equation 7).

    A token whose ratio has gone too far as the advantage asks is clipped, and has no gradient.
    """
    ratio = (log_probs - old_log_probs).exp()
    clipped = ratio.clamp(1 - eps, 1 + eps_high)
    too_high = ratio > 1 + eps_high
    too_low = ratio < 1 - eps
    is_clipped = (too_high & (advantages > 0)) | (too_low & (advantages < 0))
    return -(ratio * advantages).minimum(clipped * advantages), is_clipped


def cispo_loss(
    log_probs: Tensor, advantages: Tensor, old_log_probs: Tensor, eps_high: float
) -> tuple[Tensor, Tensor]:
    """-sg(min(ratio, 1 + eps)) A log pi; sg: no gradient.

    Where PPO's clip would leave a token out, CISPO trains it with the largest weight (MiniMax-M1,
    arXiv:2506.13585, equations 4 and 5; without the lower bound, as there).
    """
    ratio = (log_probs.detach() - old_log_probs).exp()
    loss = -ratio.clamp(max=1 + eps_high) * advantages * log_probs
    return loss, (ratio > 1 + eps_high) & (advantages != 0)


def dppo_loss(
    log_probs: Tensor, advantages: Tensor, sampler_log_probs: Tensor, delta: float
) -> tuple[Tensor, Tensor]:
    """-pi / mu A, and 0 where |pi - mu| > delta and pi has moved as A asks (DPPO with Binary-TV).

    arXiv:2602.04879, equations 11 and 12; the ratio is not truncated, as there.
    """
    moved = (log_probs.exp() - sampler_log_probs.exp()).detach()
    is_masked = (moved.abs() > delta) & (advantages * moved > 0)
    log_ratio = (log_probs - sampler_log_probs).masked_fill(is_masked, -torch.inf)
    return -log_ratio.exp() * advantages, is_masked  # exp(-inf) is 0, and so is its gradient


def completion_means(log_probs: Tensor, completion_mask: Tensor) -> Tensor:
    """The mean log-probability of each completion, at all of its tokens.

    PPO's loss of these is GSPO's (arXiv:2507.18071, equations 5 and 7): the ratio of a whole
    completion to the power of 1 / length, whose gradient reaches all of its tokens.
    """
    lengths = completion_mask.sum(dim=1, keepdim=True)  # (B, 1)
    means = (log_probs * completion_mask).sum(dim=1, keepdim=True) / lengths.clamp(min=1)
    return means.expand_as(log_probs)


def kl_penalty(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Estimate of KL(policy, reference) at each token: k3, 0 where the two agree, else above.

    Schulman 2020, http://joschu.net/blog/kl-approx.html. The log-ratio is limited in both terms;
    in the exponential alone, the gradient of a far token would push it further away.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(-KL_LOG_RATIO_LIMIT, KL_LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio  # exp(x) - x - 1, which would round to below 0 near 0
