"""Advantages that are off by default, one function each, (N, G) to (N, G)."""

from torch import Tensor

from engine.core.user_file import RewardError


def over_mean(rewards: Tensor) -> Tensor:
    """(reward - mean) / mean of each group (N, G): the rarer a right answer, the more it counts.

    MaxRL (arXiv:2602.02710), for rewards of 0 and 1. Equal ones give 0, one below 0 a RewardError.
    """
    if (least := rewards.min()) < 0:
        raise RewardError(
            "training.advantage = over_mean: it is for rewards of 0 and more, but one was "
            f"{least:g}; write mean"
        )
    mean = rewards.mean(dim=1, keepdim=True)  # (N, 1)
    is_equal = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # also where the mean is 0
    return ((rewards - mean) / mean).masked_fill(is_equal, 0.0)
