"""Sampling speed: `grouped` against transformers.

    python benchmarks/rollouts.py             # everything that this machine can run
    python benchmarks/rollouts.py --quick     # the smallest sizes: does it run?
    python benchmarks/rollouts.py --model FOLDER     # a chat model

Tokens per second on the embedded model in fp32, beside `model.generate` called as users would; with
`--model` on a chat model that is asked for sums, 16 questions x 8 samples x 48 tokens, whose end is
ignored so that all do equal work. A large model on a GPU: `gpu.py speed`; vLLM: vllm_step.py.
"""

import argparse
import functools
import os
import statistics
from dataclasses import dataclass, replace

import torch
from common import in_turns, print_table  # first: it finds the script's modules
from torch import nn
from transformers.utils import logging as transformers_logging

from engine import ROOT
from engine.core.distributed import World
from engine.core.tensors import left_pad
from engine.core.types import Completion, PromptBatch, SamplingParams
from engine.model.policy import load_policy
from engine.questions.prompts import encode_prompts
from engine.questions.tasks import load_task
from engine.run.config_file import load_config
from engine.sampling.batches import decode_in_batches
from engine.sampling.sampler import LoopSampler
from logger import Logger
from main import generate, get_generation_config

LOGGER = Logger(rank=0)
TINY = ROOT / "tiny"
NO_EOS = (-1,)  # an id that no token has


@dataclass(frozen=True)
class Size:
    """How much is sampled at a time."""

    questions: int = 32
    samples: int = 16
    max_new_tokens: int = 208


@dataclass
class Workload:
    """A model with its prompts, and the functions that sample from it."""

    sampler: LoopSampler  # by our loop of this device: grouped, or with its steps captured
    prompts: list[list[int]]
    params: SamplingParams
    position: int = 0  # of the next question: every call draws other completions

    @property
    def model(self) -> nn.Module:
        return self.sampler.model

    def sample(self) -> list[list[Completion]]:
        """A group of new completions for each prompt, by our decode loop."""
        seeds = [(0, self.position + i) for i in range(len(self.prompts))]
        self.position += len(seeds)
        most_tokens = None if self.model.device.type == "cuda" else 2**20
        prompts = PromptBatch(self.prompts, seeds)
        args = (prompts, self.params, most_tokens, LOGGER)
        return decode_in_batches(self.sampler, *args, generate=generate)

    def grouped(self) -> list[int]:
        """Lengths of the completions, by our decode loop."""
        return [len(completion.token_ids) for group in self.sample() for completion in group]

    def generate(self) -> list[int]:
        """Lengths of the completions, by `model.generate` on all questions together."""
        ids, mask = left_pad(self.prompts, self.params.pad_id, self.model.device)
        config = get_generation_config(self.params)
        sequences = self.model.generate(ids, attention_mask=mask, generation_config=config)
        completions = sequences[:, ids.shape[1] :]
        eos_ids = torch.tensor(self.params.eos_ids, device=ids.device)
        ended = torch.isin(completions, eos_ids).cumsum(dim=1) > 0
        lengths = (~ended).sum(dim=1) + 1  # the EOS belongs to the completion
        return lengths.clamp(max=self.params.max_new_tokens).tolist()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, once")
    parser.add_argument("--repeats", type=int, default=5, help="calls of each function")
    parser.add_argument("--model", help="a folder with a chat model")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args(arguments)
    repeats = 1 if options.quick else options.repeats
    size = Size(2, 2, 4) if options.quick else Size()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} CPU threads\n")
    if options.model is None:
        return compare_backends(load_workload(size, device), repeats)
    size = size if options.quick else Size(16, 8, 48)
    workload = load_workload(size, device, model=options.model, dtype=options.dtype)
    print(f"{options.model}, {options.dtype}")
    compare_backends(resized(workload, size), repeats)


def load_workload(
    size: Size, device: torch.device, *, model: str | None = None, dtype: str = "float32"
) -> Workload:
    """Generated questions for the embedded model or, in the folder `model`, one that does sums."""
    transformers_logging.disable_progress_bar()
    overrides = [f"model.name={model or TINY}", f"model.compute_dtype={dtype}"]
    overrides.append(f"task.name={'arithmetic' if model else 'countdown'}")
    overrides += [f"training.max_new_gen_tokens={size.max_new_tokens}"]
    overrides += ["training.learning_rate=1e-6"]  # unused, but refused where it is tiny's
    config = load_config(["--config", os.devnull, *overrides])
    world = World(rank=0, size=1, device=device)
    policy = load_policy(config, world, Logger(rank=1).info)
    task = load_task(config.task)
    how = {"options": task.options, "num_examples": size.questions, "seed": 0, "exclude": []}
    questions = task.generate_questions("train", **how)
    prompts = encode_prompts(questions, task=task, tokenizer=policy.tokenizer)
    params = replace(policy.params, group_size=size.samples)
    return Workload(policy.sampler, prompts, params)


def compare_backends(workload: Workload, repeats: int) -> None:
    """Print tokens per second."""
    backends = {"grouped": workload.grouped, "model.generate": workload.generate}
    lengths: dict[str, list[list[int]]] = {name: [] for name in backends}

    def note(name: str) -> None:
        lengths[name].append(backends[name]())

    seconds = in_turns({name: functools.partial(note, name) for name in backends}, repeats)
    speeds, table = {}, []
    for name, calls in lengths.items():
        calls = calls[-repeats:]  # without the warm-up
        rates = [sum(call) / s for call, s in zip(calls, seconds[name], strict=True)]
        speeds[name] = statistics.median(rates)
        median = statistics.median(seconds[name])
        mean_length = statistics.mean(map(statistics.mean, calls))
        table.append([name, f"{median:.2f}", f"{mean_length:.1f}", f"{speeds[name]:.0f}"])
    for row, name in zip(table, speeds, strict=True):
        row.append(f"{speeds[name] / speeds['model.generate']:.2f}")
    print_table(["", "seconds", "mean tokens", "tokens per second", "times generate"], table)


def resized(workload: Workload, size: Size) -> Workload:
    """The first questions of a workload, every completion of which is as long as it may be."""
    params = replace(
        workload.params,
        max_new_tokens=size.max_new_tokens,
        eos_ids=NO_EOS,
        group_size=size.samples,
    )
    return replace(workload, prompts=workload.prompts[: size.questions], params=params)


if __name__ == "__main__":
    main()
