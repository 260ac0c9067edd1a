"""Advantages and token losses by path that benchmarks/ablations.py compares with the config's own.

`training.policy_loss=benchmarks.own:unclipped` and so on; all shapes are (B, S), and those of
advantages (N, G). mu is the policy that sampled; sg: no gradient. Those of rows that ablations.py
only shows are in ea4c86e.
"""

CAP = 2.0  # prime-rl's seq_clip
GEOMETRIC = (0.99, 1.01)  # SkyRL's geo_mask_low and geo_mask_high


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


def only_right(rewards, *, parts, **kwargs):
    """1 for each right answer, without a baseline (PSR, arXiv:2506.01347)."""
    return (parts["answer"] >= 1).double()
