"""Small tools for tensors: padding, positions and how many there are, precision, seeds."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engine.core.types import Prompts, Seed, Trajectory


@contextlib.contextmanager
def seeded(seeds: list[Seed], device: torch.device) -> Iterator[None]:
    """Let all random numbers follow from the seeds, and put the generators' states back after."""
    sequence = np.random.SeedSequence([word for seed in seeds for word in seed])
    number = int(sequence.generate_state(1)[0])
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        of_torch = torch.default_generator if device.type == "cpu" else torch  # 1 ms slower
        for seed in (of_torch.manual_seed, np.random.seed, random.seed):
            seed(number)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def left_pad(rows: Prompts, pad_id: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask (True = a token), both (B, longest), padded on the left."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([[pad_id] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows])
    return ids.to(device), mask.to(device)


def right_pad(sequences: list, value: float) -> Tensor:
    """Sequences as one tensor (B, longest), padded on the right."""
    tensors = [torch.as_tensor(sequence) for sequence in sequences]
    return nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)


def context_of(model: nn.Module, *, is_steady: bool = False) -> int | None:
    """The most tokens of a row; None for no limit.

    With longrope and "dynamic" the positions of all rows of a batch turn otherwise once the longest
    is above original_max_position_embeddings: `is_steady` asks for the context up to there.
    """
    text = model.config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    rotary = getattr(text, "rope_parameters", None) or {}
    for kind in [rotary, *rotary.values()] if is_steady else ():  # one, or one of a type of layers
        if isinstance(kind, dict) and kind.get("rope_type") in ("longrope", "dynamic"):
            limits.append(kind.get("original_max_position_embeddings"))
    return min(filter(None, limits), default=None)


def pack(trajectories: list[Trajectory], max_tokens: int) -> list[list[Trajectory]]:
    """Batches by length: rows * longest (prompt + completion) <= max_tokens, or a single row."""
    batches = [[]]
    for t in sorted(trajectories, key=lambda t: t.num_tokens):
        if batches[-1] and (len(batches[-1]) + 1) * t.num_tokens > max_tokens:
            batches.append([])
        batches[-1].append(t)
    return batches


def autocast(
    device: torch.device, dtype: torch.dtype, *, cache_casts: bool = True
) -> torch.autocast:
    """Multiplies matrices in bf16 or float16, whatever the weights are; fp32 changes nothing."""
    # The cache holds each trained weight's copy to the end: for an adapter that samples.
    return torch.autocast(device.type, dtype, dtype.itemsize == 2, cache_enabled=cache_casts)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is cut into parts; any other tensor as it is."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor that is cut into parts, gathered in the dtype; any other tensor as it is."""
    return tensor.to(dtype).full_tensor() if isinstance(tensor, DTensor) else tensor
