"""main.py with one thing changed for which the config has no key, for benchmarks/ablations.py.

python benchmarks/switched.py bf16-weights [section.key=value ...]
"""

import sys
from dataclasses import replace

import common  # noqa: F401  # first: it finds the script's modules
import torch

import engine.model
import main as program
from engine.run import Run
from engine.types import Trajectory

load_model, answer_questions = engine.model.load_model, program.answer_questions


def main() -> None:
    name, *arguments = sys.argv[1:]
    if name == "bf16-weights":
        engine.model.load_model = load_in_bf16
    elif name == "whole-evaluation":
        program.answer_questions = answer_untruncated
    else:
        raise SystemExit(f"{name}: must be bf16-weights or whole-evaluation")
    sys.argv[1:] = arguments
    program.main()


def load_in_bf16(*arguments: object, **settings: object) -> torch.nn.Module:
    """The trained weights are bf16, and with them gradients, AdamW's averages and arithmetic."""
    return load_model(*arguments, **settings | {"dtype": torch.bfloat16})


def answer_untruncated(run: Run, **settings: object) -> list[list[Trajectory]]:
    """Evaluate on the whole distribution, as the other rows do, whatever training draws from."""
    params = replace(run.policy.params, top_p=1.0, top_k=0)
    return answer_questions(replace(run, policy=replace(run.policy, params=params)), **settings)


if __name__ == "__main__":
    main()
