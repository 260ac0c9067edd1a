"""Advantages and token losses by path that benchmarks/ablations.py compares with the config's own.

`training.policy_loss=benchmarks.own:ipo_10` and so on; all shapes are (B, S), and those of
advantages (N, G). mu is the policy that sampled; sg: no gradient.
"""

from functools import partial

import torch

CAP = 2.0  # prime-rl's seq_clip
GEOMETRIC = (0.99, 1.01)  # SkyRL's geo_mask_low and geo_mask_high


def ipo(log_probs, old_log_probs, advantages, mask, *, sampler_log_probs, eps, square, **kwargs):
    """-pi / mu A, 0 where |pi - mu| > eps whatever A asks; plus square (log pi / mu)^2 everywhere.

    prime-rl's IPO, which has nothing to do with arXiv:2310.12036.
    """
    log_ratio = log_probs - sampler_log_probs
    is_masked = (log_probs.exp() - sampler_log_probs.exp()).detach().abs() > eps
    ratio = log_ratio.masked_fill(is_masked, -torch.inf).exp()
    return square * log_ratio.square() - ratio * advantages


def dro(log_probs, old_log_probs, advantages, mask, *, sampler_log_probs, beta, **kwargs):
    """-A log pi + beta / 2 (log pi / mu)^2: verl's dro (with beta 0.1 there)."""
    return -advantages * log_probs + beta / 2 * (log_probs - sampler_log_probs).square()


def unclipped(log_probs, old_log_probs, advantages, mask, **kwargs):
    """-pi / pi_old A: PPO's loss without its clip."""
    return -(log_probs - old_log_probs).exp() * advantages


def sequence_tis(log_probs, old_log_probs, advantages, mask, *, sampler_log_probs, **kwargs):
    """-sg(min(w, 2)) A log pi, w the product of a completion's pi / mu: prime-rl's seq_tis."""
    log_weight = (log_probs - sampler_log_probs).detach().sum(dim=1, keepdim=True)  # 0 if masked
    return -log_weight.exp().clamp(max=CAP) * advantages * log_probs


def sequence_mask(log_probs, old_log_probs, advantages, mask, *, sampler_log_probs, **kwargs):
    """-A log pi, and 0 in completions whose w ** (1 / length) is not in GEOMETRIC: geo_mask."""
    log_weight = (log_probs - sampler_log_probs).detach().sum(dim=1, keepdim=True)
    geometric = (log_weight / mask.sum(dim=1, keepdim=True).clamp(min=1)).exp()
    low, high = GEOMETRIC
    is_kept = (geometric > low) & (geometric < high)
    return -is_kept.float() * advantages * log_probs


def with_entropy(log_probs, old_log_probs, advantages, mask, *, coef, **kwargs):
    """-(A - coef sg(log pi)) log pi: the gradient of the entropy, from the tokens drawn."""
    return -(advantages - coef * log_probs.detach()) * log_probs


ipo_10 = partial(ipo, eps=0.1, square=1e-3)  # prime-rl's default from #3418 on
ipo_30 = partial(ipo, eps=0.3, square=1e-3)
ipo_30_alone = partial(ipo, eps=0.3, square=0.0)  # from #3586 on
dro_01, dro_1 = partial(dro, beta=0.1), partial(dro, beta=1.0)
entropy_001 = partial(with_entropy, coef=0.01)


def only_worse(rewards, **kwargs):
    """Of the advantages reward - mean those below 0."""
    return (rewards - rewards.mean(dim=1, keepdim=True)).clamp(max=0)


def only_better(rewards, **kwargs):
    return (rewards - rewards.mean(dim=1, keepdim=True)).clamp(min=0)


def only_wrong(rewards, *, parts, **kwargs):
    """-1 for each wrong answer, without a baseline (NSR, arXiv:2506.01347)."""
    return -(parts["answer"] < 1).double()


def only_right(rewards, *, parts, **kwargs):
    """1 for each right answer, without a baseline (PSR, arXiv:2506.01347)."""
    return (parts["answer"] >= 1).double()
