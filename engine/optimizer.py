"""The optimizer and its learning rate."""

import math

import torch
from torch import nn

from engine.config import Config, import_package


def make_optimizer(model: nn.Module, config: Config) -> torch.optim.Optimizer:
    """AdamW for all trainable weights, or Muon for the blocks' matrices and AdamW for the rest.

    Weight decay is on matrices and embeddings only. A group's `lr_scale` is its learning rate as a
    multiple of the one that the schedule gives. Raises ValueError if the package for 8-bit averages
    is missing.
    """
    training, rate = config.training, config.training.learning_rate
    matrices, embeddings = split_matrices(model) if training.optimizer == "muon" else ([], [])
    split = {id(p) for p in [*matrices, *embeddings]}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in split]
    decay = training.weight_decay
    adam = {"lr": rate, "betas": tuple(training.adam_betas), "eps": training.adam_eps}
    embedding_scale = (training.embedding_learning_rate or rate) / rate
    groups = [
        {"params": [p for p in others if p.ndim >= 2], "weight_decay": decay, "lr_scale": 1.0},
        {"params": [p for p in others if p.ndim < 2], "weight_decay": 0.0, "lr_scale": 1.0},
        {"params": embeddings, "weight_decay": decay, "lr_scale": embedding_scale},
    ]
    groups = [group for group in groups if group["params"]]
    is_cuda = next(model.parameters()).device.type == "cuda"
    if training.optimizer == "adamw_8bit":
        bitsandbytes = import_package("bitsandbytes", key="training.optimizer = adamw_8bit")
        return bitsandbytes.optim.AdamW8bit(groups, **adam)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, **adam, fused=is_cuda)
    if matrices:
        group = {"params": matrices, "lr_scale": training.muon_learning_rate / rate}
        optimizer = Together(optimizer, torch.optim.Muon([group], weight_decay=decay))
    set_learning_rate(optimizer, rate)
    return optimizer


def split_matrices(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trainable matrices within the blocks, which Muon steps, and the embeddings.

    An output head that shares the embedding's weight is an embedding; any other is neither.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    embeddings = {id(table.weight) for table in tables}
    not_in_blocks = embeddings | {id(p) for p in model.get_output_embeddings().parameters()}
    return (
        [p for p in parameters if p.ndim == 2 and id(p) not in not_in_blocks],
        [p for p in parameters if id(p) in embeddings],
    )


class Together(torch.optim.Optimizer):
    """Several optimizers that look like one: it has all their groups and their state."""

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for one in optimizers for group in one.param_groups], defaults={})
        self.share()

    def share(self) -> None:
        """Let each optimizer work on its part of the common groups and on the common state."""
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


def learning_rate_at(step: int, config: Config) -> float:
    """The learning rate of step 1, 2, ..., num_steps, for groups whose `lr_scale` is 1.

    The warm-up ends at the full rate. The decay begins behind it: it is the factor of transformers'
    schedulers at step - 1, so that no step has the rate 0.
    """
    training, num_warmup = config.training, config.training.warmup_steps
    if step <= num_warmup:
        return training.learning_rate * step / num_warmup
    progress = (step - 1 - num_warmup) / (training.num_steps - num_warmup)
    decay = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
    }[training.lr_schedule]
    return training.learning_rate * decay


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """Give each group its multiple of this step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate * group["lr_scale"]
