"""How many questions are solved: pass@k, votes, and 95% intervals."""

import math

import numpy as np

from engine.core.types import Metrics


def solve_rates(solved: np.ndarray, pass_k: list[int]) -> Metrics:
    """pass@k, with the 95% interval of pass@1, from solved (questions, samples) of 0 and 1."""
    num_samples = solved.shape[1]
    counts = solved.sum(axis=1).astype(int)
    rates = with_interval("eval/pass@1", solved.mean(axis=1), is_binary=num_samples == 1)
    rates |= {f"eval/pass@{k}": pass_at_k(counts, num_samples, k) for k in pass_k if k != 1}
    rates[f"eval/best_of_{num_samples}"] = pass_at_k(counts, num_samples, num_samples)
    return rates


def with_interval(name: str, rates: np.ndarray, *, is_binary: bool) -> Metrics:
    """The mean of `rates` (questions,) and its 95% interval, as three metrics."""
    low, high = confidence_interval(rates, is_binary=is_binary)
    return {name: float(rates.mean()), f"{name}_low": low, f"{name}_high": high}


def pass_at_k(counts: np.ndarray, n: int, k: int) -> float:
    """The unbiased pass@k of questions with `counts` right of n (arXiv:2107.03374, equation 1)."""
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for c in counts.tolist()]))


def confidence_interval(rates: np.ndarray, *, is_binary: bool) -> tuple[float, float]:
    """95% interval of the mean of `rates` (questions,), each the share of right samples of one."""
    n = len(rates)
    mean = float(rates.mean())
    z = 1.96
    if is_binary:  # Wilson's interval
        centre = (mean + z**2 / (2 * n)) / (1 + z**2 / n)
        half = z / (1 + z**2 / n) * math.sqrt(mean * (1 - mean) / n + z**2 / (4 * n**2))
        return max(0.0, centre - half), min(1.0, centre + half)  # rounding, at 0 and 1
    # A bootstrap of questions, not of samples: eight samples of one question are not independent.
    resampled = np.random.default_rng(0).choice(rates, size=(2000, n)).mean(axis=1)
    return tuple(np.quantile(resampled, [0.025, 0.975]).tolist())
