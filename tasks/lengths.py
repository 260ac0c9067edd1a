"""Rewards for length, to be named beside your own: task.reward='[my_rewards:f, lengths:cosine]'.

L is training.max_new_gen_tokens, l a completion's length in tokens. Right is what the first
function that is named pays 1 or more.
"""

import math
import statistics


def soft_overlong(completion_ids, max_completion_length, **kwargs):
    """0 up to 4/5 L, then down to -1 at L, and -1 beyond (DAPO, arXiv:2503.14476, equation 13)."""
    cache = max(max_completion_length, 1) / 5
    over = [(len(ids) - max_completion_length + cache) / cache for ids in completion_ids]
    return [-min(max(x, 0.0), 1.0) for x in over]


def shorter(completion_ids, rewards, **kwargs):
    """-sigmoid((l - mean) / std) of the right ones of a group, arXiv:2502.04463, equation 2.

    Its weight in task.reward_weights is the paper's alpha. It does not apply to wrong ones.
    """
    rows = [*zip(map(len, completion_ids), is_right(rewards), strict=True)]
    lengths = [length for length, right in rows if right] or [0]
    mean, std = statistics.mean(lengths), statistics.pstdev(lengths) or 1.0
    return [-1 / (1 + math.exp((mean - n) / std)) if right else None for n, right in rows]


def cosine(completion_ids, rewards, max_completion_length, **kwargs):
    """Along a cosine of l / L: 2 to 1 for right ones, -10 to 0 for wrong ones, -10 from L on.

    Short and right pays most, long and wrong costs least (arXiv:2502.03373, section 4 and its
    table of hyperparameters).
    """
    paid = []
    for ids, right in zip(completion_ids, is_right(rewards), strict=True):
        at_0, at_end = (2.0, 1.0) if right else (-10.0, 0.0)
        share = len(ids) / max(max_completion_length, 1)
        along = at_end + (at_0 - at_end) * (1 + math.cos(math.pi * share)) / 2
        paid.append(along if share < 1 else -10.0)
    return paid


def is_right(rewards):
    """Whether the first function paid at least 1, of each completion."""
    if not rewards:
        fix = "the first says what is right, as in '[my_rewards:f, lengths:cosine]'"
        raise ValueError(f"it is named first: {fix}")
    return [paid is not None and paid >= 1 for paid in next(iter(rewards.values()))]
