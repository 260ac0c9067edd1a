"""How things are measured: time, memory, and pass@k with its interval."""

import contextlib
import math
import platform
import resource
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import transformers

from config import Config
from distributed import World


class Clock:
    """Seconds spent in each phase since the last reading."""

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


def reduce_means(sums: dict[str, tuple[float, float]], world: World) -> dict[str, float]:
    """Means over all ranks of (sum, count) pairs; a metric that counts nothing is left out."""
    totals = world.sum(list(sums.values())).tolist()
    return {name: total / count for name, (total, count) in zip(sums, totals, strict=True) if count}


def metric_columns(config: Config) -> list[str]:
    """Every metric this run can log, in the order of the CSV's columns."""
    validation = config.validation
    train = (
        "loss reward reward_std solved format advantage_abs entropy clip_frac grad_norm lr "
        "completion_tokens truncated_frac zero_advantage_frac skipped_steps collapsed "
        "reward_timeouts sampler_mismatch"
    )
    if config.training.kl_coef > 0:
        train += " kl"
    evaluation = ["pass@1", "pass@1_low", "pass@1_high"]
    evaluation += [f"pass@{k}" for k in validation.pass_k if k != 1]
    evaluation += [f"best_of_{validation.best_of_n}", "completion_tokens", "truncated_frac"]
    return [
        *(f"train/{name}" for name in train.split()),
        *(f"eval/{name}" for name in evaluation),
        *(f"time/{name}_s" for name in ("rollout", "reward", "update", "eval", "step")),
        "perf/tokens_per_s",
        "perf/peak_memory_gb",
    ]


def solve_rates(solved: np.ndarray, pass_k: list[int]) -> dict[str, float]:
    """pass@k and its 95% interval from solved (questions, samples) of 0 and 1."""
    num_samples = solved.shape[1]
    counts = solved.sum(axis=1).astype(int)
    low, high = confidence_interval(solved.mean(axis=1), is_binary=num_samples == 1)
    rates = {"eval/pass@1": solved.mean(), "eval/pass@1_low": low, "eval/pass@1_high": high}
    rates |= {f"eval/pass@{k}": pass_at_k(counts, num_samples, k) for k in pass_k if k != 1}
    rates[f"eval/best_of_{num_samples}"] = pass_at_k(counts, num_samples, num_samples)
    return {name: float(rate) for name, rate in rates.items()}


def single_rate(name: str, solved: np.ndarray) -> dict[str, float]:
    """Share of right answers and its 95% interval, from one per question (questions,) of 0, 1."""
    low, high = confidence_interval(solved, is_binary=True)
    rates = {name: float(solved.mean()), f"{name}_low": low, f"{name}_high": high}
    return {f"eval/{key}": rate for key, rate in rates.items()}


def majority_sample(answers: list[str | None]) -> int | None:
    """The earliest sample that gave the most frequent answer; None where no sample has one.

    Of answers that are as frequent, the one given earliest wins.
    """
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return None
    ((answer, _),) = counts.most_common(1)  # in the order first met, where counts are equal
    return answers.index(answer)


def pass_at_k(counts: np.ndarray, n: int, k: int) -> float:
    """Unbiased chance that one of k samples is right, from `counts` right ones of n per question.

    1 - C(n - c, k) / C(n, k), the mean over questions (arXiv:2107.03374, equation 1).
    """
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in counts.tolist()]))


def confidence_interval(rates: np.ndarray, *, is_binary: bool) -> tuple[float, float]:
    """95% interval of the mean over questions of `rates`, each the share of its right samples.

    The units are questions, since samples of one question are alike. Wilson's interval for one
    sample per question, else a bootstrap over questions.
    """
    n, mean = len(rates), float(rates.mean())
    if is_binary:
        z = 1.96
        centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
        return centre - half, centre + half
    resampled = np.random.default_rng(0).choice(rates, size=(2000, n)).mean(axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(low), float(high)


def versions() -> str:
    """What a run was made with: the revision of this code, Python, torch and transformers."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    folder = Path(__file__).parent
    try:
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        revision = result.stdout.strip() or "unknown"
    except OSError:
        revision = "unknown"  # no git here
    python = platform.python_version()
    return (
        f"plain-grpo {revision}, Python {python}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
