"""Seconds of each phase, and means over ranks."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from engine.core.distributed import World
from engine.core.types import Metrics, Sums


class Clock:
    """Seconds spent in each phase since the last reading: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def read(self) -> Metrics:
        times = {f"time/{phase}_s": value for phase, value in self.seconds.items()}
        self.seconds.clear()
        return times


def reduce_means(sums: Sums | dict[str, Tensor], world: World) -> Metrics:
    """Means over all ranks of (sum, count) pairs; a metric whose count is 0 is left out."""
    pairs = [torch.as_tensor(pair, dtype=torch.float64, device="cpu") for pair in sums.values()]
    totals = world.sum(torch.stack(pairs)).tolist()
    return {name: total / count for name, (total, count) in zip(sums, totals, strict=True) if count}


def add_to_mean(sums: dict[str, Tensor], name: str, values: Tensor, mask: Tensor) -> None:
    """Add the values (B, T) where the mask is True to a metric's (sum, count), a tensor (2,)."""
    if values.device.type == "mps":  # Apple's GPU, which has no float64
        values = values.cpu()
        mask = mask.cpu()
    pair = torch.where(mask, values, 0).sum(dtype=torch.float64), mask.sum(dtype=torch.float64)
    sums[name] = sums.get(name, 0.0) + torch.stack(pair)
