"""main.py with rewards by construction: `python tests/graded.py <options> <what main.py takes>`.

What a random model writes hangs on the last bits of its matrix products, which differ between
processors, numbers of threads and versions of libraries. So no test may need that some completions
are better than others by luck. Here each reward follows from a digest of the question and the
text: texts that differ earn different rewards, and half of all texts count as solved.

The options are JSON:

    {}                         nothing else
    {"rates": [0.1, 0.3]}      eval/pass@1 at step 0, at step 1 and so on, for what hangs on it
    {"is_exact": true}         weights and arithmetic in fp64: see `in_fp64`
"""

import functools
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import main
import policy
from data import TASKS


def by_text(reward_function: Callable[..., dict]) -> Callable[..., dict]:
    """The task's reward function, with another answer (and format, if it has one)."""

    @functools.wraps(reward_function)
    def graded(completion: str, example: dict, **options) -> dict[str, float]:
        question = json.dumps(example, sort_keys=True)
        digest = hashlib.sha256(f"{question} {completion}".encode()).digest()
        share = int.from_bytes(digest[:6]) / 2**48  # [0, 1)
        parts = reward_function(completion, example, **options)
        parts |= {"format": share} if "format" in parts else {}
        return parts | {"answer": 1.0 if share < 0.5 else share - 0.5}

    return graded


def grade_by_text(patch: pytest.MonkeyPatch) -> None:
    """Every task's rewards are by text from here on."""
    for task in TASKS.values():
        patch.setattr(task, "reward_function", by_text(task.reward_function))


def set_rates(patch: pytest.MonkeyPatch, rates: list[float]) -> None:
    """The logged pass@1 of each step's evaluation is that of the list."""
    evaluate_if_due = main.evaluate_if_due

    def with_rate(run, logger):
        metrics, samples = evaluate_if_due(run, logger)
        if metrics:
            metrics["eval/pass@1"] = rates[run.state.step]
        return metrics, samples

    patch.setattr(main, "evaluate_if_due", with_rate)


def in_fp64(patch: pytest.MonkeyPatch) -> None:
    """Models are loaded, run and saved in fp64; 4 bits cannot be.

    For tests that compare what is sampled in batches of different shapes: a uniform number falls
    between two shapes' thresholds of a token with a chance of 1e-5 in fp32, which is too much for
    thousands of tokens, and of less than 1e-12 in fp64. And for tests that compare gradients, whose
    rounding in fp32 is as large as what they allow.
    """
    load_model, add_adapter = policy.load_model, policy.add_adapter

    def load_in_fp64(*args, **options):
        return load_model(*args, **options | {"dtype": torch.float64})

    def add_in_fp64(model, *args, **options):
        add_adapter(model, *args, **options)
        model.double()

    patch.setattr(policy, "load_model", load_in_fp64)
    patch.setattr(policy, "add_adapter", add_in_fp64)
    patch.setattr(policy, "choose_compute_dtype", lambda name, device: torch.float64)


def install(options: dict) -> None:
    """For the rest of this process."""
    patch = pytest.MonkeyPatch()
    grade_by_text(patch)
    if "rates" in options:
        set_rates(patch, options["rates"])
    if options.get("is_exact"):
        in_fp64(patch)


if __name__ == "__main__":
    install(json.loads(sys.argv[1]))
    sys.argv = ["main.py", *sys.argv[2:]]
    main.main()
