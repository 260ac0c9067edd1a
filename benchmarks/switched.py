"""main.py with one thing changed for which the config has no key, for benchmarks/ablations.py.

python benchmarks/switched.py bf16-weights [section.key=value ...]
python benchmarks/switched.py score-in-sampler --config configs/arithmetic-smollm2.yaml
"""

import functools
import sys
from dataclasses import replace

import common  # noqa: F401  # first: it finds the script's modules
import torch

import engine.model
import main as program
from engine.config import Config
from engine.distributed import World
from engine.model import Policy
from engine.run import Run
from engine.types import Trajectory
from logger import Logger

load_model, answer_questions = engine.model.load_model, program.answer_questions
load_policy = program.load_policy
SWITCHES = "bf16-weights, score-in-sampler or whole-evaluation"


def main() -> None:
    name, *arguments = sys.argv[1:]
    if name == "bf16-weights":
        engine.model.load_model = load_in_bf16
    elif name == "score-in-sampler":
        program.load_policy = load_one_that_scores_in_the_sampler
    elif name == "whole-evaluation":
        program.answer_questions = answer_untruncated
    else:
        raise SystemExit(f"{name}: must be {SWITCHES}")
    sys.argv[1:] = arguments
    program.main()


def load_in_bf16(*arguments: object, **settings: object) -> torch.nn.Module:
    """The trained weights are bf16, and with them gradients, AdamW's averages and arithmetic."""
    return load_model(*arguments, **settings | {"dtype": torch.bfloat16})


def load_one_that_scores_in_the_sampler(config: Config, world: World, logger: Logger) -> Policy:
    """The bf16 copy that samples scores too, in the same arithmetic: nothing is cast in a pass.

    Its gradients, which are bf16, are added to those of the fp32 weights, micro-batch by
    micro-batch. With several ranks DDP would have to average them in between: so it needs one.
    """
    policy = load_policy(config, world, logger)
    if policy.scorer is None:  # an evaluation
        return policy
    if world.size > 1 or policy.sampler.dtype != torch.bfloat16 or config.model.lora is not None:
        fix = "needs one process, model.compute_dtype=bfloat16 and model.lora=null"
        raise SystemExit(f"score-in-sampler: {fix}")
    pairs = zip(policy.model.parameters(), policy.sampler.parameters(), strict=True)
    for weights, copied in pairs:
        copied.requires_grad_()
        copied.register_post_accumulate_grad_hook(functools.partial(hand_over, weights))
    chunked = policy.scorer.chunked
    policy.scorer = program.CompletionScorer(policy.sampler, torch.bfloat16, chunked=chunked)
    return policy


def hand_over(weights: torch.nn.Parameter, copied: torch.nn.Parameter) -> None:
    """Add the gradient of a copied weight to that of the trained one, and drop it."""
    gradient = copied.grad.to(weights.dtype)
    weights.grad = gradient if weights.grad is None else weights.grad.add_(gradient)
    copied.grad = None


def answer_untruncated(run: Run, **settings: object) -> list[list[Trajectory]]:
    """Evaluate on the whole distribution, as the other rows do, whatever training draws from."""
    params = replace(run.policy.params, top_p=1.0, top_k=0)
    return answer_questions(replace(run, policy=replace(run.policy, params=params)), **settings)


if __name__ == "__main__":
    main()
