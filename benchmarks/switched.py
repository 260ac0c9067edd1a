"""main.py with one thing changed for which the config has no key, for benchmarks/ablations.py.

python benchmarks/switched.py random-reward [section.key=value ...]
python benchmarks/switched.py stale-4,ratio-to-sampler training.policy_loss=cispo

SWITCHES, at the end, has them all. A switch puts a function of this file in the place of one of
main.py's or of engine's. They are for one process. Those of the rows that ablations.py only
shows are in ea4c86e.
"""

import functools
import sys
from dataclasses import replace
from unittest import mock

import common  # noqa: F401  # first: it finds the script's modules
import numpy as np
import torch
from torch import Tensor

import engine.model.policy
import main as program
from engine.core.config import Config, TrainingSettings
from engine.core.distributed import World
from engine.core.measures import Clock, add_to_mean
from engine.core.types import MicroBatch, SamplingParams, Seed, Trajectory
from engine.model.policy import Policy
from engine.run.state import Run
from engine.sampling.sampler import LoopSampler, copy_in
from engine.update.optimizer import Update

end_step, update_policy = Run.end_step, program.update_policy
sample_trajectories, sample_validation = program.sample_trajectories, program.sample_validation
make_micro_batch = program.make_micro_batch


def main() -> None:
    names, *arguments = sys.argv[1:]
    for name in names.split(","):
        if name not in SWITCHES:
            raise SystemExit(f"{name}: must be among {', '.join(SWITCHES)}")
        for owner, attribute, replacement in SWITCHES[name]:
            setattr(owner, attribute, replacement)
    program.main(program.load_config(arguments))


# A sampler that lags behind


def sample_a_copy(
    config: Config,
    model: torch.nn.Module,
    compute_dtype: torch.dtype,
    world: World,
) -> LoopSampler:
    """The sampler is a copy in fp32 too, so that it need not follow the model at once."""
    return LoopSampler(copy_in(compute_dtype, model, world.device), model)


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


# Other rewards


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


def sample_with_brevity_reward(
    run: Run, questions: list[dict], seeds: list[Seed], params: SamplingParams, clock: Clock
) -> list[list[Trajectory]]:
    """In training the part `answer` is never earned, and each token costs 0.01 in `format`."""
    groups = sample_trajectories(run, questions, seeds, params, clock)
    if params is run.policy.params:  # not in an evaluation
        for trajectory in (t for group in groups for t in group):
            trajectory.reward = -0.01 * len(trajectory.completion.token_ids)
            trajectory.reward_parts = {"format": trajectory.reward, "answer": 0.0}
    return groups


# Another optimizer


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
    "sign-sgd": [(program, "make_optimizer", make_sign_sgd)],
    "random-reward": [(program, "sample_trajectories", sample_with_random_reward)],
    "length-reward": [(program, "sample_trajectories", sample_with_length_reward)],
    "brevity-reward": [(program, "sample_trajectories", sample_with_brevity_reward)],
}

if __name__ == "__main__":
    main()
