"""Signs that the policy has collapsed, read from the training metrics of the last steps.

A collapsed policy gives the same few answers, or rambles until it is cut off; more steps seldom
bring it back, and on rented hardware they cost money.
"""

import math

WATCHED = ("train/solved", "train/entropy", "train/truncated_frac")
MIN_STEPS, MIN_QUESTIONS = 10, 160  # that a mean is taken over: fewer are too noisy to judge
LEAST_FALL = 0.05  # of the share solved; half of very little is noise
LOW_ENTROPY = 0.01  # nats per token: at each token there is nothing left to choose


def mean_of_last(
    recent: list[list[float]], metrics: dict[str, float], *, num_questions: int
) -> tuple[list[list[float]], dict[str, float]]:
    """The watched metrics of the last steps, this one's among them, and their means.

    `num_questions` is how many a step has. The means are empty until there are enough steps.
    """
    num_steps = max(MIN_STEPS, math.ceil(MIN_QUESTIONS / num_questions))
    recent = [*recent, [metrics[name] for name in WATCHED]][-num_steps:]
    if len(recent) < num_steps:
        return recent, {}
    sums = map(sum, zip(*recent, strict=True))
    return recent, {name: total / num_steps for name, total in zip(WATCHED, sums, strict=True)}


def signs_of_collapse(means: dict[str, float], *, best_solved: float) -> dict[str, str]:
    """What in the means of the last steps tells of a collapse: metric and description."""
    solved, entropy, truncated = (means[name] for name in WATCHED)
    signs = {}
    if solved < best_solved / 2 and solved < best_solved - LEAST_FALL:
        signs["train/solved"] = f"solved fell from {best_solved:.3f} to {solved:.3f}"
    if entropy < LOW_ENTROPY:
        signs["train/entropy"] = f"the entropy is {entropy:.4f}"
    if truncated > 0.5:
        signs["train/truncated_frac"] = f"{truncated:.0%} of completions are cut off"
    return signs
