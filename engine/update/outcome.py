"""What became of a step's update."""

import math
from dataclasses import dataclass, field
from enum import Enum

import torch

from engine.core.types import MicroBatch


class Outcome(Enum):
    UPDATED = "updated"
    NOTHING_TO_TRAIN_ON = "nothing to train on"  # on any rank: all advantages are 0
    BROKEN = "broken"  # a completion, the loss or the gradient is not finite: the step is skipped
    OVERFLOWED = "overflowed"  # skipped too: float16's loss scale was too high, and is halved now


@dataclass
class Update:
    """One step's update: what became of it, and what it measured, means over all ranks."""

    outcome: Outcome
    micro_batches: list[MicroBatch] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    has_moved: bool = False  # the weights; a later one of num_iterations may still be broken


def outcome_of(loss: float, grad_norm: float, scaler: torch.amp.GradScaler) -> Outcome:
    """Whether the optimizer may step by a gradient; both numbers are of all ranks."""
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return Outcome.UPDATED
    is_overflow = math.isfinite(loss) and scaler.get_scale() > 1  # 1 too where it is off
    return Outcome.OVERFLOWED if is_overflow else Outcome.BROKEN
