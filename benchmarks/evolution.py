"""Evolution strategies on a run's questions, for as long as the default computes.

    python benchmarks/evolution.py SIGMA ALPHA SECONDS [section.key=value ...]

arXiv:2509.24372. Each of 8 members is the model with its own noise e_i times SIGMA on all weights,
and answers the same 64 questions once, with the same random numbers; its mean reward, made a
z-score over the members, is r_i. Then theta += ALPHA / 8 * sum of r_i e_i: ALPHA is a / s of the
formula with 1 / (n s). A generation is a step in metrics.jsonl. SECONDS are of the processor, as
are all times, and evaluations do not count: those of `switched.py processor-time` compare. A run
that is stopped starts over.
"""

import sys
from dataclasses import replace

import common  # first: it finds the script's modules
import torch
from switched import SWITCHES
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import main as program
from engine.core.statistics import Clock
from engine.core.types import SeedWord
from engine.run.state import Run

NUM_MEMBERS, NUM_QUESTIONS = 8, 64


def main() -> None:
    *numbers, left_s = map(float, sys.argv[1:4])
    for owner, attribute, replacement in SWITCHES["processor-time"]:
        setattr(owner, attribute, replacement)
    run = common.load_run(sys.argv[4:])
    program.evaluate(run)
    while left_s > 0:
        clock = Clock()
        with clock("step"):
            rewards = evolve(run, *numbers)
        run.state.step += 1
        times = clock.read()
        left_s -= times["time/step_s"]
        run.logger.log_metrics(run.state.step, {"train/reward": rewards.mean().item(), **times})
        print(f"generation {run.state.step}: {rewards.mean():.3f}", flush=True)
    program.evaluate(run)


@torch.no_grad()
def evolve(run: Run, sigma: float, alpha: float) -> torch.Tensor:
    """One generation; returns the members' rewards."""
    seed, step = run.config.training.seed, run.state.step
    taken, run.state.position = run.stream.take(run.state.position, NUM_QUESTIONS)
    asked = [q for _, q in taken], [(SeedWord.TRAINING, seed, position) for position, _ in taken]
    params = replace(run.policy.params, group_size=1)
    theta = parameters_to_vector(weights := list(run.policy.model.parameters()))
    generator = torch.Generator().manual_seed(1_000_000 * seed + step)
    noise = torch.randn(NUM_MEMBERS, len(theta), generator=generator)
    rewards = torch.zeros(NUM_MEMBERS)
    for i in range(NUM_MEMBERS):
        vector_to_parameters(theta + sigma * noise[i], weights)
        groups = program.sample_trajectories(run, *asked, params, Clock())
        rewards[i] = sum(t.reward for (t,) in groups) / len(groups)
    scores = (rewards - rewards.mean()) / (rewards.std() + 1e-8)
    vector_to_parameters(theta + alpha / NUM_MEMBERS * scores @ noise, weights)
    return rewards


if __name__ == "__main__":
    main()
