"""A whole step of the published setting on one GPU: 3B weights, 32 questions x 16 samples.

    python benchmarks/step_3b.py             # needs a GPU of 80 GB
    python benchmarks/step_3b.py --quick     # a toy on any device: does it run?

Qwen2.5-3B's shape with random weights, the settings of configs/countdown-qwen2.5-3b.yaml. Rewards
are drawn at random; completions end at random lengths, log-normal with a mean of 400 and at most
1024 tokens. Aim: 40 s a step, in less than 80 GB.
"""

import argparse
from pathlib import Path
from statistics import median

import numpy as np
import torch
from common import in_turns, print_table  # first: it finds the script's modules
from rollouts import QWEN_SHAPES, Size, random_model, random_workload

from engine import ROOT
from engine.core.config import Config
from engine.core.distributed import World
from engine.core.types import Trajectory
from engine.model.policy import Policy
from engine.report.metrics import peak_memory_gb
from engine.run.config_file import load_config
from engine.run.state import Run
from engine.update.head import ChunkedScorer
from engine.update.optimizer import make_optimizer
from logger import Logger
from main import assign_advantages, update_policy

RECIPE = ROOT / "configs/countdown-qwen2.5-3b.yaml"
TOY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Step:
    """Rollout and update of one policy, again and again."""

    def __init__(self, shape: dict[str, int], size: Size, device: torch.device, config: Config):
        model = random_model(shape, device)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.workload = random_workload(model, size)
        sampler, params = self.workload.sampler, self.workload.params
        scorer = ChunkedScorer(model, torch.bfloat16)
        policy = Policy(model, sampler, None, params, torch.bfloat16, scorer)
        world = World(rank=0, size=1, device=device)
        self.run = Run(config, world, Logger(rank=1), None, policy, [], folder=Path())
        self.run.optimizer = make_optimizer(model, config.training)
        self.rng = np.random.default_rng(0)

    def rollout(self) -> None:
        """Completions with random rewards."""
        self.groups = [
            [Trajectory(prompt, c, "", {}, float(self.rng.integers(2))) for c in group]
            for prompt, group in zip(self.workload.prompts, self.workload.sample(), strict=True)
        ]
        assign_advantages(self.groups, self.run.config.training)

    def update(self) -> None:
        update_policy(self.run, self.groups)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy, once")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not options.quick:
        print("no GPU: not measured")
        return
    config = load_config(["--config", str(RECIPE)])
    shape, size = QWEN_SHAPES["Qwen2.5-3B"], Size(max_new_tokens=1024)
    if options.quick:
        shape, size = TOY, Size(2, 2, 4)
    step = Step(shape, size, device, config)
    phases = {"rollout": step.rollout, "update": step.update}
    seconds = in_turns(phases, repeats=1 if options.quick else 3)
    medians = {name: median(values) for name, values in seconds.items()}
    lengths = [len(t.completion.token_ids) for group in step.groups for t in group]
    print_table(
        ["", "rollout s", "update s", "step s", "mean tokens", "peak GB"],
        [
            [
                "3B step",
                *(f"{value:.1f}" for value in (*medians.values(), sum(medians.values()))),
                f"{np.mean(lengths):.0f}",
                f"{peak_memory_gb(device):.1f}",
            ]
        ],
    )


if __name__ == "__main__":
    main()
