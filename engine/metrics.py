"""What is measured and how: time, memory, pass@k with its interval, signs of a collapse."""

import contextlib
import math
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
import transformers
from torch import Tensor

from engine import ROOT
from engine.distributed import World
from engine.types import Trajectory

# A collapsed policy gives the same few answers, or rambles until it is cut off. More steps seldom
# bring it back. The means of these metrics over the last steps show it.
WATCHED = ("train/solved", "train/entropy", "train/truncated_frac")
MIN_STEPS, MIN_QUESTIONS = 10, 160  # window length; a shorter window is too noisy to judge
LEAST_FALL = 0.05  # of train/solved; where little was ever solved, a smaller fall may be noise
LOW_ENTROPY = 0.01  # nats per token: the policy has nothing left to choose between


class Clock:
    """Seconds spent in each phase since the last reading: `with clock("rollout"): ...`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def read(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, {}
        return {f"time/{phase}_s": value for phase, value in seconds.items()}


def peak_memory_gb(device: torch.device) -> float:
    """The most memory this rank has held so far, in 10^9 bytes: the GPU's, or the process's."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def performance(
    metrics: dict[str, float], num_completions: int, device: torch.device
) -> dict[str, float]:
    """Tokens per second of a step with so many completions, and this rank's peak memory."""
    num_tokens = metrics["train/completion_tokens"] * num_completions
    return {
        "perf/tokens_per_s": num_tokens / metrics["time/step_s"],
        "perf/peak_memory_gb": peak_memory_gb(device),
    }


def reduce_means(sums: dict[str, Tensor | tuple[float, float]], world: World) -> dict[str, float]:
    """Means over all ranks of (sum, count) pairs; a metric whose count is 0 is left out."""
    pairs = [torch.as_tensor(pair, dtype=torch.float64, device="cpu") for pair in sums.values()]
    totals = world.sum(torch.stack(pairs)).tolist()
    return {name: total / count for name, (total, count) in zip(sums, totals, strict=True) if count}


def add_to_mean(sums: dict[str, Tensor], name: str, values: Tensor, mask: Tensor) -> None:
    """Add the values (B, T) where the mask is True to a metric's (sum, count), a tensor (2,)."""
    pair = torch.where(mask, values, 0).sum(dtype=torch.float64), mask.sum(dtype=torch.float64)
    sums[name] = sums.get(name, 0.0) + torch.stack(pair)


def rollout_sums(
    groups: list[list[Trajectory]], reward_parts: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """This rank's (sum, count) for each metric of the rollouts; `reduce_means` makes the means."""
    sampled = [t for group in groups for t in group]
    batch = [t for t in sampled if t.in_batch]
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    num_equal = (rewards.amax(dim=1) == rewards.amin(dim=1)).sum().item()
    num_tokens = sum(len(t.completion.token_ids) for t in sampled)
    num_drawn = sum(t.completion.num_sampled for t in sampled)
    sums = {
        "train/reward": (sum(t.reward for t in sampled), len(sampled)),
        "train/reward_std": (rewards.std(dim=1).sum().item(), len(groups)),
        "train/solved": (sum(t.is_solved for t in sampled), len(sampled)),
        "train/solved_and_ended": (sum(t.is_solved_and_ended for t in sampled), len(sampled)),
        "train/advantage_abs": (sum(abs(t.advantage) for t in batch), len(batch)),
        "train/entropy": (sum(float(t.completion.entropies.sum()) for t in sampled), num_drawn),
        "train/completion_tokens": (num_tokens, len(sampled)),
        "train/truncated_frac": (sum(t.completion.truncated for t in sampled), len(sampled)),
        "train/zero_advantage_frac": (num_equal, len(groups)),
    }
    if sampled[0].completion.conversation is not None:
        sums["train/turns"] = (sum(t.completion.num_turns for t in sampled), len(sampled))
    for part in reward_parts:
        name = "train/reward_timeouts" if part == "timeout" else f"train/part_{part}"
        sums[name] = (sum(t.reward_parts[part] for t in sampled), len(sampled))
    return sums


def count_broken(groups: list[list[Trajectory]], world: World, warn: Callable[[str], None]) -> int:
    """How many completions of all ranks met logits that were not finite; warns of them."""
    num_broken = int(world.sum([sum(t.completion.is_broken for group in groups for t in group)]))
    if num_broken > 0:
        warn(f"{num_broken} completions ended at logits that were not finite")
    return num_broken


def solve_rates(solved: np.ndarray, pass_k: list[int]) -> dict[str, float]:
    """pass@k, with the 95% interval of pass@1, from solved (questions, samples) of 0 and 1."""
    num_samples = solved.shape[1]
    counts = solved.sum(axis=1).astype(int)
    low, high = confidence_interval(solved.mean(axis=1), is_binary=num_samples == 1)
    rates = {"eval/pass@1": solved.mean(), "eval/pass@1_low": low, "eval/pass@1_high": high}
    rates |= {f"eval/pass@{k}": pass_at_k(counts, num_samples, k) for k in pass_k if k != 1}
    rates[f"eval/best_of_{num_samples}"] = pass_at_k(counts, num_samples, num_samples)
    return {name: float(rate) for name, rate in rates.items()}


def single_rate(name: str, solved: np.ndarray) -> dict[str, float]:
    """Share of right answers and its 95% interval, from `solved` (questions,), one answer each."""
    low, high = confidence_interval(solved, is_binary=True)
    name = f"eval/{name}"
    return {name: float(solved.mean()), f"{name}_low": low, f"{name}_high": high}


def majority_sample(answers: list[str | None]) -> int | None:
    """The first sample with the most frequent answer; None if no sample has an answer."""
    given = [answer for answer in answers if answer is not None]
    return answers.index(statistics.mode(given)) if given else None  # on a tie the earliest


def pass_at_k(counts: np.ndarray, n: int, k: int) -> float:
    """The unbiased pass@k of questions with `counts` right of n (arXiv:2107.03374, equation 1)."""
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in counts.tolist()]))


def confidence_interval(rates: np.ndarray, *, is_binary: bool) -> tuple[float, float]:
    """95% interval of the mean of `rates` (questions,), each the share of right samples of one."""
    n, mean = len(rates), float(rates.mean())
    if is_binary:  # Wilson's interval
        z = 1.96
        centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
        return centre - half, centre + half
    # A bootstrap of questions, not of samples: eight samples of one question are not independent.
    resampled = np.random.default_rng(0).choice(rates, size=(2000, n)).mean(axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def mean_of_last(
    recent: list[list[float]], metrics: dict[str, float], *, num_questions: int
) -> tuple[list[list[float]], dict[str, float]]:
    """Add a step's WATCHED metrics to `recent`; return its last steps and, if enough, the means."""
    num_steps = max(MIN_STEPS, math.ceil(MIN_QUESTIONS / num_questions))
    recent = [*recent, [metrics[name] for name in WATCHED]][-num_steps:]
    if len(recent) < num_steps:
        return recent, {}
    sums = map(sum, zip(*recent, strict=True))
    return recent, {name: total / num_steps for name, total in zip(WATCHED, sums, strict=True)}


def signs_of_collapse(means: dict[str, float], *, best_solved: float) -> dict[str, str]:
    """What shows a collapse in the means over the last steps, by metric; empty if nothing does."""
    solved, entropy, truncated = (means[name] for name in WATCHED)
    signs = {}
    if solved < best_solved / 2 and solved < best_solved - LEAST_FALL:
        signs["train/solved"] = f"solved fell from {best_solved:.3f} to {solved:.3f}"
    if entropy < LOW_ENTROPY:
        signs["train/entropy"] = f"the entropy is {entropy:.4f}"
    if truncated > 0.5:
        signs["train/truncated_frac"] = f"{truncated:.0%} of completions are cut off"
    return signs


def versions() -> str:
    """The revision of this code and the versions of Python, torch and transformers."""
    command, revision = ["git", "rev-parse", "--short", "HEAD"], ""
    with contextlib.suppress(OSError):  # no git here
        revision = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"plain-grpo {revision or 'unknown'}, Python {platform.python_version()}, {libraries}"
