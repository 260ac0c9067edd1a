"""Sampling from less than the whole distribution: top-k and top-p, both off by default."""

import torch
from torch import Tensor


def keep_likeliest(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set the probabilities (B, V) outside the top k, then those outside the top p, to 0."""
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1:  # nucleus sampling, arXiv:1904.09751: the fewest tokens with a share p of the sum
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # the mass of all likelier tokens
        ordered = ordered.masked_fill(before >= top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs
