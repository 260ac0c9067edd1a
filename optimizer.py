"""The optimizer and its learning rate."""

import math
from types import ModuleType

import torch
from torch import nn

from config import Config


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW over all trainable weights; weight decay on the matrices only.

    Raises ValueError where the package for 8-bit averages is missing.
    """
    training = config.training
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    if training.optimizer == "adamw_8bit":
        return import_bitsandbytes().optim.AdamW8bit(groups, lr=training.learning_rate)
    is_cuda = parameters[0].device.type == "cuda"
    return torch.optim.AdamW(groups, lr=training.learning_rate, fused=is_cuda)


def import_bitsandbytes() -> ModuleType:
    try:
        import bitsandbytes
    except ModuleNotFoundError as error:
        raise ValueError(
            "training.optimizer = adamw_8bit: needs a package: pip install bitsandbytes, or write "
            "adamw"
        ) from error
    return bitsandbytes


def learning_rate_at(step: int, config: Config) -> float:
    """The learning rate of step 1, 2, ..., num_steps."""
    training = config.training
    warmup = min(1.0, step / max(1, training.warmup_steps))
    progress = (step - 1) / training.num_steps
    decay = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[training.lr_schedule]
    return training.learning_rate * warmup * decay
