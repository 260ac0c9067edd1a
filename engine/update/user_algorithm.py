"""An advantage or a token loss of the user's own: training.advantage or policy_loss = my_algo:f.

Everything else stays the run's: token weights, denominators, ranks. A loss of the user's own gets
all rows of the batch, of advantage 0 too, since a term of it may move them.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from engine.core.config import Config
from engine.core.distributed import World
from engine.core.types import Groups, MicroBatch
from engine.core.user_file import RewardError, find_function, line_of, naming_mistakes

MAX_LOG_PROB = -1e-6  # of a token, as a loss of the user's own is told


def own_advantages(name: str, rewards: Tensor, groups: Groups) -> Tensor:
    """f(rewards, **kwargs), (N, G) to (N, G) in float64.

    kwargs, (N, G) each: `lengths` in tokens, `truncated`, and by name in `parts`, NaN for None.
    """
    rows = [t for group in groups for t in group]
    lengths = of_all([len(t.completion.token_ids) for t in rows], rewards)
    truncated = of_all([t.completion.truncated for t in rows], rewards).bool()
    parts = {
        part: of_all([t.reward_parts[part] for t in rows], rewards) for part in rows[0].reward_parts
    }
    return ask(name, rewards, lengths, truncated, parts)


def of_all(values: list, rewards: Tensor) -> Tensor:
    """A number of each completion, NaN for None, in the shape of the rewards (N, G)."""
    return torch.from_numpy(np.array(values, np.float64).reshape(rewards.shape))


def ask(
    name: str, rewards: Tensor, lengths: Tensor, truncated: Tensor, parts: dict[str, Tensor]
) -> Tensor:
    """What the user's advantage gives; RewardError if that is not finite."""
    advantages = call(
        "training.advantage",
        name,
        rewards,
        like=rewards,
        lengths=lengths,
        truncated=truncated,
        parts=parts,
    ).double()
    for group, given in zip(rewards.tolist(), advantages, strict=True):
        if not given.isfinite().all():
            raise RewardError(
                f"training.advantage = {name}: it gave {given.tolist()!s:.80} for rewards of "
                f"{group!s:.80}"
            )
    return advantages


def own_loss(name: str, batch: MicroBatch, log_probs: Tensor, advantages: Tensor) -> Tensor:
    """g(log_probs, old_log_probs, advantages, mask, **kwargs), (B, S) each, to token losses (B, S).

    kwargs are `sampler_log_probs` and, with a KL penalty or a teacher, `ref_log_probs`. In the
    first pass over a batch old_log_probs are log_probs without their gradient. All are at most
    MAX_LOG_PROB at drawn tokens, and 0 elsewhere.
    """
    mask = batch.completion_mask
    kwargs = {"sampler_log_probs": below_certain(batch.sampler_log_probs, mask)}
    if batch.ref_log_probs is not None:
        kwargs["ref_log_probs"] = below_certain(batch.ref_log_probs, mask)
    token_loss = call(
        "training.policy_loss",
        name,
        below_certain(log_probs, mask),
        below_certain(batch.old_log_probs, mask),
        advantages.expand_as(log_probs),
        mask,
        like=log_probs,
        **kwargs,
    )
    return token_loss.masked_fill(~mask, 0.0)


def below_certain(log_probs: Tensor, mask: Tensor) -> Tensor:
    """log p, at most MAX_LOG_PROB at drawn tokens: log(1 - p) must be finite.

    In fp32 p is often exactly 1. So certain a token has no gradient to lose.
    """
    return log_probs.clamp(max=MAX_LOG_PROB).masked_fill(~mask, 0.0)


def call(key: str, name: str, *tensors: Tensor, like: Tensor, **kwargs) -> Tensor:
    """What the function gives; RewardError, with its file and line, if that is of another shape."""
    file, function = find_function(name, key)
    written = name.partition(":")[2]
    with contextlib.chdir("."), naming_mistakes(file, function, name=written):
        result = function(*tensors, **kwargs)
    is_tensor = isinstance(result, Tensor)
    if not is_tensor or result.shape != like.shape or not result.is_floating_point():
        given = f"{tuple(result.shape)} of {result.dtype}" if is_tensor else result
        raise RewardError(
            f"{line_of(file, function=function)}: {written} must return a tensor of floats, "
            f"{tuple(like.shape)}, not {given!s:.80}"
        )
    return result


def try_algorithm(config: Config, world: World) -> None:
    """Call the user's functions on a batch that looks like one of the run, before it is loaded.

    An advantage is asked twice: for groups of different rewards, and for groups of equal ones.
    """
    training = config.training
    device = world.device
    size = training.group_size
    longest = training.max_new_gen_tokens
    lengths = longest - torch.arange(size) * longest // size  # of a group's completions
    if ":" in training.advantage:
        num_groups = config.questions_per_step(world.size) // world.size
        truncated = (lengths == longest).repeat(num_groups, 1)
        for worse in (0.0, 1.0):
            rewards = torch.ones((num_groups, size), dtype=torch.float64)
            rewards[:, 1::2] = worse
            parts = dict.fromkeys(config.task.reward_weights, rewards)
            ask(training.advantage, rewards, lengths.double().expand_as(rewards), truncated, parts)
    if ":" in training.policy_loss:
        columns = torch.arange(8 + longest, device=device)  # a prompt of 8 tokens, a completion
        mask = (columns >= 8) & (columns < 8 + lengths.to(device)[:, None])
        log_probs = torch.linspace(-2, -0.1, mask.numel(), device=device).reshape(mask.shape)
        log_probs[:, 8] = 0.0  # a token that was certain
        log_probs = (log_probs * mask).requires_grad_()
        old = log_probs.detach()
        advantages = torch.linspace(-1, 1, size, device=device)[:, None]
        batch = SimpleNamespace(old_log_probs=old, sampler_log_probs=old, completion_mask=mask)
        batch.ref_log_probs = old if training.has_reference else None
        loss = own_loss(training.policy_loss, batch, log_probs, advantages)
        if loss.requires_grad:
            loss.sum().backward()
        gradient = log_probs.grad
        if gradient is None or not (loss.isfinite() & gradient.isfinite()).all():
            raise RewardError(
                f"training.policy_loss = {training.policy_loss}: its loss or gradient is not "
                "finite, or there is no gradient"
            )
