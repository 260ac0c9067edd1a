"""main.py with one thing changed for which the config has no key, for benchmarks/ablations.py.

python benchmarks/switched.py bf16-weights [section.key=value ...]
python benchmarks/switched.py score-in-sampler --config configs/arithmetic-smollm2.yaml
python benchmarks/switched.py stale-4,ratio-to-sampler training.policy_loss=cispo

SWITCHES, at the end, has them all. A switch puts a function of this file in the place of one of
main.py's or of engine's. They are for one process.
"""

import functools
import sys
from dataclasses import replace
from types import ModuleType
from unittest import mock

import common  # noqa: F401  # first: it finds the script's modules
import numpy as np
import torch
from torch import Tensor

import engine.model.load
import engine.run.load
import main as program
from engine.core.config import Config, TrainingSettings
from engine.core.distributed import World
from engine.core.statistics import Clock
from engine.core.types import MicroBatch, SamplingParams, Seed, Trajectory
from engine.model.policy import Policy, copy_in
from engine.questions.data import QuestionStream
from engine.run.state import Run
from logger import Logger

load_model, wrap_policy, advance = engine.model.load.load_model, program.wrap_policy, Run.advance
run_training, sample_validation = program.run_training, program.sample_validation
sample_trajectories, update_policy = program.sample_trajectories, program.update_policy
make_micro_batch, assign_advantages = program.make_micro_batch, program.assign_advantages


def main() -> None:
    names, *arguments = sys.argv[1:]
    for name in names.split(","):
        if name not in SWITCHES:
            raise SystemExit(f"{name}: must be among {', '.join(SWITCHES)}")
        for owner, attribute, replacement in SWITCHES[name]:
            setattr(owner, attribute, replacement)
    sys.argv[1:] = arguments
    program.main()


# Numbers of less precision


def load_in_bf16(*arguments: object, **settings: object) -> torch.nn.Module:
    """The trained weights are bf16, and with them gradients, AdamW's averages and arithmetic."""
    return load_model(*arguments, **settings | {"dtype": torch.bfloat16})


def score_in_the_sampler(policy: Policy, config: Config, world: World, *, in_blocks: bool) -> None:
    """The bf16 copy that samples scores too, in the same arithmetic: nothing is cast in a pass.

    Its gradients, which are bf16, are added to those of the fp32 weights, micro-batch by
    micro-batch. With several ranks DDP would have to average them in between: so it needs one.
    """
    wrap_policy(policy, config, world, in_blocks=in_blocks)
    if world.size > 1 or policy.sampler.dtype != torch.bfloat16 or config.model.lora is not None:
        fix = "needs one process, model.compute_dtype=bfloat16 and model.lora=null"
        raise SystemExit(f"score-in-sampler: {fix}")
    pairs = zip(policy.model.parameters(), policy.sampler.parameters(), strict=True)
    for weights, copied in pairs:
        copied.requires_grad_()
        copied.register_post_accumulate_grad_hook(functools.partial(hand_over, weights))
    policy.scorer = program.CompletionScorer(policy.sampler, torch.bfloat16, in_blocks=in_blocks)


def hand_over(weights: torch.nn.Parameter, copied: torch.nn.Parameter) -> None:
    """Add the gradient of a copied weight to that of the trained one, and drop it."""
    gradient = copied.grad.to(weights.dtype)
    weights.grad = gradient if weights.grad is None else weights.grad.add_(gradient)
    copied.grad = None


def sample_untruncated(run: Run, **settings: object) -> list[list[Trajectory]]:
    """Evaluate on the whole distribution, as the other rows do, whatever training draws from."""
    params = replace(run.policy.params, top_p=1.0, top_k=0)
    return sample_validation(replace(run, policy=replace(run.policy, params=params)), **settings)


# A sampler that lags behind


def sample_a_copy(
    model: torch.nn.Module, compute_dtype: torch.dtype, device: torch.device, *, shard: bool
) -> torch.nn.Module:
    """The sampler is a copy in fp32 too, so that it need not follow the model at once."""
    return copy_in(compute_dtype, model, device)


def update_without_refresh(policy: Policy, *arguments: object) -> tuple:
    """The update leaves the copy that samples as it is: `advance_and_refresh` gives it weights."""
    with mock.patch.object(policy, "refresh_sampler"):
        return update_policy(policy, *arguments)


def advance_and_refresh(run: Run, *arguments: object, every: int, **settings: bool) -> None:
    """The copy that samples gets the new weights after every so many steps, not after each.

    It is in no checkpoint: a run that is resumed in between begins with a fresh one.
    """
    advance(run, *arguments, **settings)
    if run.state.step % every == 0:
        run.policy.refresh_sampler()


def sample_from_the_model(run: Run, **settings: object) -> list[list[Trajectory]]:
    """What is measured is the model as it is now, not the copy that samples in training."""
    policy = replace(run.policy, sampler=run.policy.model)
    return sample_validation(replace(run, policy=policy), **settings)


def compare_with_sampler(*arguments: object, **counts: float) -> MicroBatch:
    """The ratio of `training.policy_loss` is to what the sampler said, in the first update too.

    main.py has no ratio there, since its sampler is the policy itself.
    """
    batch = make_micro_batch(*arguments, **counts)
    return replace(batch, old_log_probs=batch.sampler_log_probs)


# Other advantages


def assign_to_half(groups: list[list[Trajectory]], training: TrainingSettings) -> None:
    """Train on the half of each group with the largest variance of reward, and only that.

    PODS (arXiv:2504.13818). An advantage is the reward minus the mean of the half, and the loss is
    divided by the number of rows in the half.
    """
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    is_kept = most_varied(rewards, num_kept=rewards.shape[1] // 2).tolist()
    for group, keeps in zip(groups, is_kept, strict=True):
        for trajectory, in_batch in zip(group, keeps, strict=True):
            trajectory.in_batch = in_batch
    assign_advantages([[t for t in group if t.in_batch] for group in groups], training)


def most_varied(rewards: Tensor, *, num_kept: int) -> Tensor:
    """True for the `num_kept` rewards of each group (N, G) whose variance is the largest.

    They are some of the lowest and some of the highest; all numbers of the highest are tried.
    """
    order = rewards.argsort(dim=1, stable=True)  # ascending
    size, places = rewards.shape[1], range(num_kept + 1)
    subsets = [[*range(num_kept - k), *range(size - k, size)] for k in places]
    subsets = order[:, torch.tensor(subsets)]  # (N, num_kept + 1, num_kept), indices of samples
    shape = (-1, len(places), -1)
    variances = rewards[:, None].expand(*shape).gather(2, subsets).var(dim=2, correction=0)
    best = variances.argmax(dim=1)  # (N,)
    chosen = subsets[torch.arange(len(rewards)), best]  # (N, num_kept)
    return torch.zeros_like(rewards, dtype=torch.bool).scatter(1, chosen, True)


def assign_to_unequal(groups: list[list[Trajectory]], training: TrainingSettings) -> None:
    """sil leaves out groups whose rewards are all equal; they still count in the denominator."""
    assign_advantages(groups, training)
    for group in filter(is_equal, groups):
        for trajectory in group:
            trajectory.advantage = 0.0


def is_equal(group: list[Trajectory]) -> bool:
    return len({trajectory.reward for trajectory in group}) == 1


# Other questions, other rewards


def train_on_fresh(run: Run) -> int:
    """Hand `sample_fresh` the stream of questions, which `sample_trajectories` does not get."""
    program.sample_trajectories = functools.partial(sample_fresh, run.train_questions)
    return run_training(run)


def sample_fresh(
    stream: QuestionStream,
    policy: Policy,
    task: ModuleType,
    config: Config,
    questions: list[dict],
    seeds: list[Seed],
    params: SamplingParams,
    clock: Clock,
    logger: Logger,
) -> list[list[Trajectory]]:
    """Replace questions whose completions all earn the same by fresh ones, until none is left.

    DAPO's dynamic sampling (arXiv:2503.14476), with at most three times as many fresh questions as
    a step has. They come from the part of the stream that 40 steps on a few thousand questions
    never reach, so none is asked twice. `questions` are changed in place, for the logs.
    """
    sample = functools.partial(
        sample_trajectories, policy, task, config, params=params, clock=clock, logger=logger
    )
    groups = sample(questions, seeds)
    if params is not policy.params:  # an evaluation
        return groups
    *name, position = seeds[0]
    position = len(stream.questions) // 4 + 3 * position
    end = position + 3 * len(seeds)
    while position < end and any(map(is_equal, groups)):
        equal = [i for i, group in enumerate(groups) if is_equal(group)][: end - position]
        drawn, position = stream.take(position, len(equal))
        fresh = sample([question for _, question in drawn], [(*name, p) for p, _ in drawn])
        for i, (_, question), group in zip(equal, drawn, fresh, strict=True):
            questions[i], groups[i] = question, group
    return groups


def sample_with_random_reward(*arguments: object) -> list[list[Trajectory]]:
    """A coin is the reward, whatever was written: a control that teaches nothing."""
    groups, seeds = sample_trajectories(*arguments), arguments[4]
    for group, seed in zip(groups, seeds, strict=True):
        coins = np.random.default_rng([*seed, len(group)]).integers(2, size=len(group))
        for trajectory, coin in zip(group, coins.tolist(), strict=True):
            trajectory.reward = float(coin)
    return groups


def sample_with_length_reward(*arguments: object) -> list[list[Trajectory]]:
    """The longer a completion the higher its reward, up to 1; one that is cut off earns nothing."""
    groups, params = sample_trajectories(*arguments), arguments[5]
    for trajectory in (t for group in groups for t in group):
        length = len(trajectory.completion.token_ids) / params.max_new_tokens
        trajectory.reward = 0.0 if trajectory.completion.truncated else length
    return groups


SWITCHES = {
    "bf16-weights": [(engine.model.load, "load_model", load_in_bf16)],
    "score-in-sampler": [(program, "wrap_policy", score_in_the_sampler)],
    "whole-evaluation": [(program, "sample_validation", sample_untruncated)],
    **{
        f"stale-{every}": [
            (engine.run.load, "make_sampler", sample_a_copy),
            (program, "update_policy", update_without_refresh),
            (Run, "advance", functools.partialmethod(advance_and_refresh, every=every)),
            (program, "sample_validation", sample_from_the_model),
        ]
        for every in (4, 8)
    },
    "ratio-to-sampler": [
        (program, "make_micro_batch", compare_with_sampler),
        (TrainingSettings, "is_plain", False),  # else the first update asks for no ratio
    ],
    "most-varied-half": [(program, "assign_advantages", assign_to_half)],
    "unequal-groups": [(program, "assign_advantages", assign_to_unequal)],
    "fresh-questions": [(program, "run_training", train_on_fresh)],
    "random-reward": [(program, "sample_trajectories", sample_with_random_reward)],
    "length-reward": [(program, "sample_trajectories", sample_with_length_reward)],
}

if __name__ == "__main__":
    main()
