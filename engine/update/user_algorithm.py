"""An advantage or a token loss of the user's own: training.advantage or policy_loss = my_algo:f.

Everything else stays the run's: which rows are trained, token weights, denominators, ranks.
"""

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from engine.core.config import Config
from engine.core.types import MicroBatch, Trajectory
from engine.core.user_file import RewardError, find_function, line_of, naming_mistakes


def own_advantages(name: str, rewards: Tensor, groups: list[list[Trajectory]]) -> Tensor:
    """f(rewards, **kwargs), (N, G) to (N, G) in float64.

    kwargs are `lengths` in tokens and `truncated`, (N, G) each, and `parts`, a dict of (N, G) with
    NaN where a part does not apply.
    """

    def of_all(values: list[float]) -> Tensor:
        numbers = [math.nan if value is None else value for value in values]
        return torch.tensor(numbers, dtype=torch.float64).reshape(rewards.shape)

    rows = [t for group in groups for t in group]
    lengths = of_all([len(t.completion.token_ids) for t in rows])
    truncated = of_all([t.completion.truncated for t in rows]).bool()
    parts = {part: of_all([t.reward_parts[part] for t in rows]) for part in rows[0].reward_parts}
    kwargs = {"lengths": lengths, "truncated": truncated, "parts": parts}
    advantages = call("training.advantage", name, rewards, like=rewards, **kwargs).double()
    for group, given in zip(rewards.tolist(), advantages, strict=True):
        if not given.isfinite().all():
            gave = f"it gave {given.tolist()!s:.80} for rewards of {group!s:.80}"
            raise RewardError(f"training.advantage = {name}: {gave}")
    return advantages


def own_loss(name: str, batch: MicroBatch, log_probs: Tensor, advantages: Tensor) -> Tensor:
    """g(log_probs, old_log_probs, advantages, mask, **kwargs), (B, S) each, to token losses (B, S).

    kwargs are `sampler_log_probs` and, with a KL penalty or a teacher, `ref_log_probs`. In the
    first pass over a batch old_log_probs are log_probs without their gradient.
    """
    tensors = (log_probs, batch.old_log_probs, advantages.expand_as(log_probs))
    kwargs = {"sampler_log_probs": batch.sampler_log_probs}
    if batch.ref_log_probs is not None:
        kwargs["ref_log_probs"] = batch.ref_log_probs
    mask, key = batch.completion_mask, "training.policy_loss"
    return call(key, name, *tensors, mask, like=log_probs, **kwargs).masked_fill(~mask, 0.0)


def call(key: str, name: str, *tensors: Tensor, like: Tensor, **kwargs) -> Tensor:
    """What the function gives; RewardError, with its file and line, if that is of another shape."""
    file, function = find_function(name, key)
    with naming_mistakes(file, function):
        result = function(*tensors, **kwargs)
    shape, dtype = getattr(result, "shape", None), getattr(result, "dtype", None)
    if shape != like.shape or not isinstance(result, Tensor) or not dtype.is_floating_point:
        given = result if shape is None else f"{tuple(shape)} of {dtype}"
        wanted = f"must return a tensor of floats, {tuple(like.shape)}, not {given!s:.80}"
        raise RewardError(f"{line_of(file, function=function)}: {function.__name__} {wanted}")
    return result


def try_algorithm(config: Config) -> None:
    """Call the user's functions on a made-up batch, before the model is loaded."""
    training, parts = config.training, config.task.reward_weights
    rewards = torch.tensor([[0.0, 1.0, 0.5], [1.0, 1.0, 1.0]], dtype=torch.float64)
    if ":" in training.advantage:
        completion = SimpleNamespace(token_ids=[1, 2], truncated=False)
        groups = [
            [Trajectory([1], completion, "", dict.fromkeys(parts, x), reward=x) for x in group]
            for group in rewards.tolist()
        ]
        own_advantages(training.advantage, rewards, groups)
    if ":" in training.policy_loss:
        log_probs = torch.linspace(-2, -0.1, 8).reshape(2, 4).requires_grad_()
        old, advantages = log_probs.detach(), torch.tensor([[1.0], [-0.5]])
        batch = SimpleNamespace(
            old_log_probs=old,
            sampler_log_probs=old,
            ref_log_probs=old if training.has_reference else None,
            completion_mask=torch.ones_like(old, dtype=torch.bool),
        )
        loss = own_loss(training.policy_loss, batch, log_probs, advantages)
        if not loss.isfinite().all() or not loss.requires_grad:
            problem = "its loss is not finite, or has no gradient"
            raise RewardError(f"training.policy_loss = {training.policy_loss}: {problem}")
