"""main.py with one thing changed for which the config has no key, for benchmarks/ablations.py.

python benchmarks/switched.py bf16-weights [section.key=value ...]
python benchmarks/switched.py stale-4,ratio-to-sampler training.policy_loss=cispo

SWITCHES, at the end, has them all. A switch puts a function of this file in the place of one of
main.py's or of engine's. They are for one process.
"""

import collections
import functools
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import common  # noqa: F401  # first: it finds the script's modules
import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor

import engine.core.statistics
import engine.model.load
import engine.model.policy
import engine.update.losses
import main as program
from engine.core.config import Config, TrainingSettings
from engine.core.distributed import World
from engine.core.statistics import Clock, add_to_mean
from engine.core.types import MicroBatch, SamplingParams, Seed, Trajectory
from engine.model.policy import Policy
from engine.model.sampler import DecodeLoop, LoopSampler, copy_in
from engine.run.state import Run
from engine.update.optimizer import Update

load_model, end_step = engine.model.load.load_model, Run.end_step
sample_trajectories, sample_validation = program.sample_trajectories, program.sample_validation
update_policy, step_metrics = program.update_policy, program.step_metrics
make_micro_batch, assign_advantages = program.make_micro_batch, program.assign_advantages
apply_options = engine.update.losses.apply_options
MASKED, ALL = collections.Counter(), collections.Counter()  # of which tokens DPPO masks how many


def main() -> None:
    names, *arguments = sys.argv[1:]
    for name in names.split(","):
        if name not in SWITCHES:
            raise SystemExit(f"{name}: must be among {', '.join(SWITCHES)}")
        for owner, attribute, replacement in SWITCHES[name]:
            setattr(owner, attribute, replacement)
    program.main(program.load_config(arguments))


# Numbers of less precision


def load_in_bf16(*arguments: object, **settings: object) -> torch.nn.Module:
    """The trained weights are bf16, and with them gradients, AdamW's averages and arithmetic."""
    return load_model(*arguments, **settings | {"dtype": torch.bfloat16})


def sample_untruncated(run: Run, **settings: object) -> list[list[Trajectory]]:
    """Evaluate on the whole distribution, as the other rows do, whatever training draws from."""
    params = replace(run.policy.params, top_p=1.0, top_k=0)
    return sample_validation(replace(run, policy=replace(run.policy, params=params)), **settings)


# A sampler that lags behind


def sample_a_copy(
    config: Config,
    model: torch.nn.Module,
    compute_dtype: torch.dtype,
    world: World,
    loop: DecodeLoop,
) -> LoopSampler:
    """The sampler is a copy in fp32 too, so that it need not follow the model at once."""
    return LoopSampler(copy_in(compute_dtype, model, world.device), model, loop)


def update_without_refresh(run: Run, groups: list[list[Trajectory]]) -> Update:
    """The update leaves the copy that samples as it is: `end_and_refresh` gives it weights."""
    with mock.patch.object(run.policy.sampler, "refresh"):
        return update_policy(run, groups)


def end_and_refresh(run: Run, *arguments: object, every: int) -> None:
    """The copy that samples gets the new weights after every so many steps, not after each.

    It is in no checkpoint: a run that is resumed in between begins with a fresh one.
    """
    end_step(run, *arguments)
    if run.state.step % every == 0:
        run.policy.sampler.refresh()


def sample_from_the_model(run: Run, **settings: object) -> list[list[Trajectory]]:
    """What is measured is the model as it is now, not the copy that samples in training."""
    model, loop = run.policy.model, run.policy.sampler.loop
    policy = replace(run.policy, sampler=LoopSampler(model, model, loop))
    return sample_validation(replace(run, policy=policy), **settings)


def compare_with_sampler(*arguments: object, **counts: float) -> MicroBatch:
    """The ratio of `training.policy_loss` is to what the sampler said, in the first update too.

    main.py has no ratio there, since its sampler is the policy itself.
    """
    batch = make_micro_batch(*arguments, **counts)
    return replace(batch, old_log_probs=batch.sampler_log_probs)


def centered_loss(
    policy: Policy, batch: MicroBatch, training: TrainingSettings, metric_sums: dict[str, Tensor]
) -> Tensor:
    """-A (w(y) log pi(y) - sum over v of mu(v) w(v) log pi(v)), over the whole vocabulary.

    Score centering (arXiv:2609.20807): what tokens drawn from mu would add on average, whatever
    their advantages, is taken off. w is 1 or, with training.tis_clip, min(pi / mu, tis_clip)
    without a gradient. The copy that samples says what mu is.
    """
    columns = batch.completion_mask[:, 1:].any(dim=0).nonzero()[:, 0]
    token_ids, is_scored = (x[:, columns + 1] for x in (batch.input_ids, batch.completion_mask))
    temperature = policy.params.temperature

    def score(model: torch.nn.Module) -> Tensor:
        output = model(input_ids=batch.input_ids, use_cache=False, logits_to_keep=columns)
        return (output.logits.float() / temperature).log_softmax(dim=-1)  # (B, K, V)

    with torch.no_grad():
        sampler = score(policy.sampler.model)
    log_probs = score(policy.model)
    clip = training.tis_clip or torch.inf
    ratio = (log_probs.detach() - sampler).exp().clamp(max=clip) if training.tis_clip else 1.0
    weighted = log_probs * ratio
    drawn = weighted.gather(-1, token_ids[..., None])[..., 0]
    centered = drawn - (sampler.exp() * weighted).sum(dim=-1)  # (B, K)
    said = sampler.gather(-1, token_ids[..., None])[..., 0]
    mismatch = (said - batch.sampler_log_probs[:, columns + 1]).abs()  # 0, but for rounding
    add_to_mean(metric_sums, "train/sampler_mismatch", mismatch, is_scored)
    weights = batch.token_weights[:, columns + 1]
    return -(weights * batch.advantages[:, None] * centered.masked_fill(~is_scored, 0.0)).sum()


def count_masked(
    training: TrainingSettings, batch: MicroBatch, *arguments: object
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Which tokens `training.policy_loss` leaves out, and which it is asked about, by their ids."""
    token_loss, weights, measured = apply_options(training, batch, *arguments)
    for counter, mask in ((MASKED, measured["train/clip_frac"] > 0), (ALL, batch.completion_mask)):
        counter.update(batch.input_ids[mask & batch.completion_mask].tolist())
    return token_loss, weights, measured


def measure_and_write_masked(run: Run, *arguments: object) -> dict[str, float]:
    """masked.csv in the run's folder has the counts of the run up to here."""
    words = [run.policy.tokenizer.decode([token]) for token in ALL]
    counts = {"masked": [MASKED[token] for token in ALL], "of": list(ALL.values())}
    DataFrame({"token": words, **counts}).to_csv(run.folder / "masked.csv", index=False)
    return step_metrics(run, *arguments)


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


def sample_fresh(
    run: Run, questions: list[dict], seeds: list[Seed], params: SamplingParams, clock: Clock
) -> list[list[Trajectory]]:
    """Replace questions whose completions all earn the same by fresh ones, until none is left.

    DAPO's dynamic sampling (arXiv:2503.14476), with at most three times as many fresh questions as
    a step has. They come from the part of the stream that 40 steps on a few thousand questions
    never reach, so none is asked twice. `questions` are changed in place, for the logs.
    """
    groups = sample_trajectories(run, questions, seeds, params, clock)
    if params is not run.policy.params:  # an evaluation
        return groups
    *name, position = seeds[0]
    position = len(run.stream.questions) // 4 + 3 * position
    end = position + 3 * len(seeds)
    while position < end and any(map(is_equal, groups)):
        equal = [i for i, group in enumerate(groups) if is_equal(group)][: end - position]
        drawn, position = run.stream.take(position, len(equal))
        others, their_seeds = [q for _, q in drawn], [(*name, p) for p, _ in drawn]
        fresh = sample_trajectories(run, others, their_seeds, params, clock)
        for i, question, group in zip(equal, others, fresh, strict=True):
            questions[i], groups[i] = question, group
    return groups


def sample_with_random_reward(
    run: Run, questions: list[dict], seeds: list[Seed], params: SamplingParams, clock: Clock
) -> list[list[Trajectory]]:
    """A coin is the reward, whatever was written: a control that teaches nothing."""
    groups = sample_trajectories(run, questions, seeds, params, clock)
    for group, seed in zip(groups, seeds, strict=True):
        coins = np.random.default_rng([*seed, len(group)]).integers(2, size=len(group))
        for trajectory, coin in zip(group, coins.tolist(), strict=True):
            trajectory.reward = float(coin)
    return groups


def sample_with_length_reward(
    run: Run, questions: list[dict], seeds: list[Seed], params: SamplingParams, clock: Clock
) -> list[list[Trajectory]]:
    """The longer a completion the higher its reward, up to 1; one that is cut off earns nothing."""
    groups = sample_trajectories(run, questions, seeds, params, clock)
    for trajectory in (t for group in groups for t in group):
        length = len(trajectory.completion.token_ids) / params.max_new_tokens
        trajectory.reward = 0.0 if trajectory.completion.truncated else length
    return groups


# Another optimizer, another clock


class SignSGD(torch.optim.Optimizer):
    """Each weight moves by the learning rate, against its gradient's sign; nothing is kept."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"])


def make_sign_sgd(model: torch.nn.Module, training: TrainingSettings) -> SignSGD:
    return SignSGD(model.parameters(), {"lr": training.learning_rate, "lr_scale": 1.0})


SWITCHES = {
    "bf16-weights": [(engine.model.load, "load_model", load_in_bf16)],
    "whole-evaluation": [(program, "sample_validation", sample_untruncated)],
    **{
        f"stale-{every}": [
            (engine.model.policy, "sample_by_loop", sample_a_copy),
            (program, "update_policy", update_without_refresh),
            (Run, "end_step", functools.partialmethod(end_and_refresh, every=every)),
            (program, "sample_validation", sample_from_the_model),
        ]
        for every in (4, 8, 16)
    },
    "ratio-to-sampler": [
        (program, "make_micro_batch", compare_with_sampler),
        (TrainingSettings, "is_reinforce", False),  # else the first update asks for no ratio
    ],
    "score-centering": [(program, "micro_batch_loss", centered_loss)],
    "masked-tokens": [
        (engine.update.losses, "apply_options", count_masked),
        (program, "step_metrics", measure_and_write_masked),
    ],
    "sign-sgd": [(program, "make_optimizer", make_sign_sgd)],
    "processor-time": [
        (engine.core.statistics, "time", SimpleNamespace(perf_counter=time.process_time))
    ],
    "most-varied-half": [(program, "assign_advantages", assign_to_half)],
    "unequal-groups": [(program, "assign_advantages", assign_to_unequal)],
    "fresh-questions": [(program, "sample_trajectories", sample_fresh)],
    "random-reward": [(program, "sample_trajectories", sample_with_random_reward)],
    "length-reward": [(program, "sample_trajectories", sample_with_length_reward)],
}

if __name__ == "__main__":
    main()
