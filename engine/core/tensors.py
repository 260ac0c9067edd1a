"""Small tools for tensors: padding, positions, precision, seeds, top-k and top-p."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from engine.core.types import Seed


@contextlib.contextmanager
def seeded(seeds: list[Seed], device: torch.device) -> Iterator[None]:
    """Let all random numbers follow from the seeds, and put the generators' states back after."""
    words = [word for seed in seeds for word in seed]
    number = int(np.random.SeedSequence(words).generate_state(1)[0])
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(number)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def position_ids(mask: Tensor) -> Tensor:
    """Positions (B, T) that count kept tokens only, so that padding on the left shifts nothing."""
    return (mask.long().cumsum(dim=-1) - 1).clamp(min=0)


def left_pad(rows: list[list[int]], pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask (True = a token), both (B, longest), padded on the left."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return ids.to(device), mask.to(device)


def right_pad(sequences: list, value: float) -> Tensor:
    """Sequences as one tensor (B, longest), padded on the right."""
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def autocast(
    device: torch.device, dtype: torch.dtype, *, cache_casts: bool = True
) -> torch.autocast:
    """Multiplies matrices in bf16 or float16, whatever the weights are; fp32 changes nothing.

    `cache_casts` holds each trained weight's copy to the end: for an adapter that samples.
    """
    return torch.autocast(device.type, dtype, dtype.itemsize == 2, cache_enabled=cache_casts)


def keep_likeliest(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set the probabilities (B, V) outside the top k, then those outside the top p, to 0.

    Both are off by default.
    """
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1:  # nucleus sampling, arXiv:1904.09751: the fewest tokens with a share p of the sum
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # the mass of all likelier tokens
        ordered = ordered.masked_fill(before >= top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs
