"""What became of a step's update."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from torch.amp import GradScaler

from engine.core.config import TrainingSettings
from engine.core.types import MicroBatch


class Outcome(Enum):
    UPDATED = "updated"
    NOTHING_TO_TRAIN_ON = "nothing to train on"  # on any rank: advantages of 0, or a gradient of 0
    BROKEN = "broken"  # a completion, the loss or the gradient is not finite: the step is skipped
    OVERFLOWED = "overflowed"  # skipped too: float16's loss scale was too high, and is halved now

    @classmethod
    def of(cls, loss: float, norm: float, scaler: GradScaler, training: TrainingSettings) -> Self:
        """Whether the optimizer may step: by loss and gradient norm, which are of all ranks."""
        if not math.isfinite(loss + norm):
            is_overflow = math.isfinite(loss) and scaler.get_scale() > 1  # 1 too where it is off
            return cls.OVERFLOWED if is_overflow else cls.BROKEN
        # Rows of advantage 0, where they are not left out, may turn out to move nothing.
        return cls.NOTHING_TO_TRAIN_ON if norm == 0 and training.trains_all_rows else cls.UPDATED


@dataclass
class Update:
    """One step's update: what became of it, and what it measured, means over all ranks."""

    outcome: Outcome
    micro_batches: list[MicroBatch] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    has_moved: bool = False  # the weights; a later one of num_iterations may still be broken
