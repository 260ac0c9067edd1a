"""The optimizer, its learning rate, and what becomes of its step."""

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

import torch
from torch import nn
from torch.amp import GradScaler

from engine.core.config import TrainingSettings
from engine.core.packages import import_package
from engine.core.types import Metrics, MicroBatch

# Bytes per weight: of the weight itself, and of what an optimizer keeps
FP32 = 4
AVERAGES = {"adamw": 8, "adamw_8bit": 2, "muon": 4}


def make_optimizer(model: nn.Module, training: TrainingSettings) -> torch.optim.Optimizer:
    """AdamW for all trainable weights, or Muon for the blocks' matrices and AdamW for the rest.

    Weight decay spares vectors. A group's learning rate is the schedule's times `lr_scale`.
    """
    others = [p for p in model.parameters() if p.requires_grad]
    matrices = []
    embeddings = []
    rate = training.learning_rate
    if training.optimizer == "muon":  # a head that shares the embeddings' weight is one of them
        tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        embeddings = [p for p in others if id(p) in tables]
        in_ends = tables | {id(p) for p in model.get_output_embeddings().parameters()}
        matrices = [p for p in others if p.ndim == 2 and id(p) not in in_ends]
        split = {id(p) for p in [*matrices, *embeddings]}
        others = [p for p in others if id(p) not in split]
    decay = training.weight_decay
    how = {"lr": rate, "betas": tuple(training.adam_betas), "eps": training.adam_eps}
    embedding_scale = (training.embedding_learning_rate or rate) / rate
    groups = [
        {"params": weights, "weight_decay": weight_decay, "lr_scale": scale}
        for weights, weight_decay, scale in (
            ([p for p in others if p.ndim >= 2], decay, 1.0),
            ([p for p in others if p.ndim < 2], 0.0, 1.0),
            (embeddings, decay, embedding_scale),
        )
        if weights
    ]
    if training.optimizer == "adamw_8bit":
        bitsandbytes = import_package("bitsandbytes", key="training.optimizer = adamw_8bit")
        return bitsandbytes.optim.AdamW8bit(groups, **how)
    is_cuda = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(groups, **how, fused=is_cuda)
    if matrices:
        group = {"params": matrices, "lr_scale": training.muon_learning_rate / rate}
        optimizer = Together(optimizer, torch.optim.Muon([group], weight_decay=decay))
    return optimizer


class Together(torch.optim.Optimizer):
    """One optimizer made of several: it has the groups and the state of all of them."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], defaults={})
        self.share()

    def share(self) -> None:
        """Give each optimizer its own part of the common groups, and the common state."""
        groups = iter(self.param_groups)
        for one in self.optimizers:
            one.param_groups = [next(groups) for _ in one.param_groups]
            one.state = self.state

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)  # makes groups and state anew
        self.share()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()


def learning_rate_at(step: int, training: TrainingSettings) -> float:
    """The learning rate of step 1, 2, ..., num_steps, for groups whose `lr_scale` is 1.

    The decay is that of transformers' schedulers at step - 1: at `step` the last would be 0.
    """
    num_warmup = training.warmup_steps
    if step <= num_warmup:
        return training.learning_rate * step / num_warmup
    progress = (step - 1 - num_warmup) / (training.num_steps - num_warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    decays = {"constant": 1.0, "linear": 1 - progress, "cosine": cosine}
    return training.learning_rate * decays[training.lr_schedule]


def set_learning_rate(
    optimizer: torch.optim.Optimizer, step: int, training: TrainingSettings
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate_at(step, training) * group["lr_scale"]


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
    metrics: Metrics = field(default_factory=dict)
    moved_weights: bool = False  # the weights; a later one of num_iterations may still be broken
