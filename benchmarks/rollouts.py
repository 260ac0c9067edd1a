"""Sampling speed: `grouped` against transformers, how its cost grows, and two ranks.

    python benchmarks/rollouts.py             # everything that this machine can run
    python benchmarks/rollouts.py --quick     # the smallest sizes: does it run?
    python benchmarks/rollouts.py --only growth      # one of its tables
    python benchmarks/rollouts.py --model FOLDER --vllm-python PATH    # a chat model, and vLLM too

On the embedded model in fp32: tokens per second beside `model.generate` called as users would
(`--continuous` adds `generate_batch`, which is meant for GPUs); seconds as questions, samples and
length double twice; completions per second on two ranks of one thread each. On a GPU also models of
the shape of Qwen2.5-0.5B and 3B with random weights in bf16, whose completions end at random
lengths as in real runs, beside what the GPU's memory bandwidth allows.

`--model` makes the first table alone, of a chat model that is asked for sums: 16 questions x 8
samples x 48 tokens, whose end is ignored so that all do equal work. vLLM has a process of its own
(benchmarks/vllm_side.py), and gets the same threads, dtype and prompts.
"""

import argparse
import functools
import json
import math
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from common import in_turns, print_table  # first: it finds the script's modules
from torch import multiprocessing, nn
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging as transformers_logging

from engine import ROOT
from engine.core.distributed import World
from engine.core.tensors import left_pad
from engine.core.types import Completion, PromptBatch, SamplingParams
from engine.model.sampler import LoopSampler, choose_loop, sample_by_loop
from engine.questions.prompts import encode_prompts
from engine.questions.tasks import load_task
from engine.run.config_file import load_config
from engine.sampling.batches import decode_in_batches
from engine.sampling.grouped import decode_grouped
from logger import Logger
from main import generate, get_generation_config
from tools.chat import load_policy

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
        return decode_in_batches(self.sampler, prompts, self.params, most_tokens, LOGGER)

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

    def continuous(self) -> list[int]:
        """Lengths of the completions, by transformers' continuous batching."""
        config = get_generation_config(self.params)
        with torch.no_grad():
            outputs = self.model.generate_batch(self.prompts, generation_config=config)
        return [len(output.generated_tokens) for output in outputs.values()]


class Vllm:
    """vLLM in an interpreter of its own; it stands still while the others are timed."""

    def __init__(self, python: str, model: str, workload: Workload):
        """Start it and wait until it is ready to sample what the workload samples.

        As its manual advises, the OpenMP library of its own environment is loaded first.
        """
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        threads |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # ours are not bound to cores either
        openmp = ":".join(map(str, Path(python).absolute().parents[1].glob("lib/libiomp5.so")))
        self.process = subprocess.Popen(
            [python, Path(__file__).with_name("vllm_side.py")],
            env=os.environ | threads | {"LD_PRELOAD": openmp, "VLLM_CPU_KVCACHE_SPACE": "4"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        job = {
            "model": model,
            "dtype": str(workload.model.dtype).removeprefix("torch."),
            "prompts": workload.prompts,
            "num_samples": workload.params.group_size,
            "max_new_tokens": workload.params.max_new_tokens,
            "temperature": workload.params.temperature,
        }
        self.ask(json.dumps(job))

    def ask(self, line: str) -> list[int]:
        """Send a line; returns the reply, and stops all of its processes until the next line."""
        os.killpg(self.process.pid, signal.SIGCONT)
        print(line, file=self.process.stdin, flush=True)
        reply = self.process.stdout.readline()
        if not reply:
            raise SystemExit("vLLM has ended: see above")
        os.killpg(self.process.pid, signal.SIGSTOP)
        return json.loads(reply)

    def sample(self) -> list[int]:
        """Lengths of the completions."""
        return self.ask("sample")

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, once")
    parser.add_argument("--only", choices=("backends", "growth", "ranks", "large"))
    parser.add_argument("--continuous", action="store_true", help="time generate_batch on CPUs too")
    parser.add_argument("--repeats", type=int, default=5, help="calls of each function")
    parser.add_argument("--model", help="a folder with a chat model, for the first table alone")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--vllm-python", help="an interpreter that has vLLM; needs --model")
    options = parser.parse_args(arguments)
    repeats = 1 if options.quick else options.repeats
    size = Size(2, 2, 4) if options.quick else Size()
    base = Size(1, 2, 4) if options.quick else Size(16, 8, 28)

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    print(f"torch {torch.__version__}, {device}, {torch.get_num_threads()} CPU threads\n")
    if options.model:
        compare_on_model(options, size if options.quick else Size(16, 8, 48), repeats, device)
        return
    wanted = {options.only} if options.only else {"backends", "growth", "ranks", "large"}
    if "backends" in wanted:
        workload = load_workload(size, device)
        compare_backends(workload, repeats, continuous=options.continuous or has_gpu)
    if "growth" in wanted:
        show_growth(base, repeats, device)
    if "ranks" in wanted:
        compare_ranks(size, repeats)
    for name in QWEN_SHAPES if "large" in wanted else ():
        if has_gpu and not options.quick:
            measure_on_gpu(name, repeats)
        else:
            print(f"{name}-shaped model on a GPU: not measured")


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
    task, options = load_task(config.task.name), config.task
    questions = task.generate_questions(
        "train", options=options, num_examples=size.questions, seed=0, exclude=[]
    )
    prompts = encode_prompts(questions, task=task, options=options, tokenizer=policy.tokenizer)
    params = replace(policy.params, group_size=size.samples)
    return Workload(policy.sampler, prompts, params)


# Backends


def compare_on_model(
    options: argparse.Namespace, size: Size, repeats: int, device: torch.device
) -> None:
    """Print tokens per second of the chat model, by vLLM too if there is one."""
    workload = load_workload(size, device, model=options.model, dtype=options.dtype)
    workload = resized(workload, size)
    vllm = Vllm(options.vllm_python, options.model, workload) if options.vllm_python else None
    print(f"{options.model}, {options.dtype}")
    try:
        compare_backends(workload, repeats, continuous=options.continuous, vllm=vllm)
    finally:
        if vllm is not None:
            vllm.close()


def compare_backends(
    workload: Workload, repeats: int, *, continuous: bool, vllm: Vllm | None = None
) -> dict[str, tuple[list[int], float]]:
    """Print tokens per second; returns each backend's last lengths and its tokens per second."""
    backends = {"grouped": workload.grouped, "model.generate": workload.generate}
    if continuous:
        backends["generate_batch"] = workload.continuous
    if vllm is not None:
        backends["vLLM"] = vllm.sample
    lengths: dict[str, list[list[int]]] = {name: [] for name in backends}
    seconds = in_turns(
        {
            name: functools.partial(note, function, lengths[name])
            for name, function in backends.items()
        },
        repeats,
    )
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
    return {name: (lengths[name][-1], speeds[name]) for name in backends}


def note(function: Callable[[], list[int]], results: list[list[int]]) -> None:
    results.append(function())


# Growth


def show_growth(base: Size, repeats: int, device: torch.device) -> None:
    """Print the seconds of 1, 2 and 4 times as many questions, samples and tokens."""
    tiny = load_workload(replace(base, questions=4 * base.questions), device)
    factors, fields = (1, 2, 4), ("questions", "samples", "max_new_tokens")
    functions = {
        f"{field} {factor}": resized(
            tiny, replace(base, **{field: factor * getattr(base, field)})
        ).grouped
        for field in fields
        for factor in factors
    }
    seconds = in_turns(functions, repeats)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    table = []
    for field in fields:
        times = [medians[f"{field} {factor}"] for factor in factors]
        row = [getattr(base, field), *(f"{time_s:.3f} s" for time_s in times)]
        table.append([field, *row, f"{times[2] / times[0]:.2f}"])
    print_table(["", "base", "1x", "2x", "4x", "4x / 1x"], table)


def resized(workload: Workload, size: Size) -> Workload:
    """The first questions of a workload, every completion of which is as long as it may be."""
    params = replace(
        workload.params,
        max_new_tokens=size.max_new_tokens,
        eos_ids=NO_EOS,
        group_size=size.samples,
    )
    return replace(workload, prompts=workload.prompts[: size.questions], params=params)


# Ranks


def compare_ranks(size: Size, repeats: int) -> None:
    """Print completions per second of one rank and of two, each with its own questions."""
    if torch.cuda.device_count() == 1:
        print("two ranks: not measured, there is one GPU\n")
        return
    context = multiprocessing.get_context("spawn")
    pipes, ranks = [], []
    for rank in range(2):
        ours, theirs = context.Pipe()
        ranks.append(context.Process(target=serve_rank, args=(rank, size, theirs), daemon=True))
        ranks[-1].start()
        pipes.append(ours)
    seconds = in_turns(
        {
            "1 rank": functools.partial(sample_on, pipes[:1]),
            "2 ranks": functools.partial(sample_on, pipes),
        },
        repeats,
    )
    for pipe, rank in zip(pipes, ranks, strict=True):
        pipe.send(False)
        rank.join()
    num_completions = size.questions * size.samples
    rates = {
        name: num_ranks * num_completions / statistics.median(seconds[name])
        for num_ranks, name in enumerate(seconds, start=1)
    }
    print_table(
        ["one thread each", "completions per second", "times one rank"],
        [[name, f"{rate:.0f}", f"{rate / rates['1 rank']:.2f}"] for name, rate in rates.items()],
    )


def serve_rank(rank: int, size: Size, pipe: Connection) -> None:
    """A process that samples whenever it is told to, until it is told no more."""
    torch.set_num_threads(1)
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(rank)  # else its steps are captured on the first GPU
    workload = load_workload(size, torch.device("cuda", rank) if has_gpu else torch.device("cpu"))
    while pipe.recv():
        workload.position = 0  # the same completions on both: equal work
        pipe.send(sum(workload.grouped()))


def sample_on(pipes: list[Connection]) -> None:
    """All of these ranks sample at the same time."""
    for pipe in pipes:
        pipe.send(True)
    for pipe in pipes:
        pipe.recv()


# Larger models, on a GPU

QWEN_SHAPES = {
    "Qwen2.5-0.5B": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "Qwen2.5-3B": {
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
}
PROMPT_TOKENS, MEAN_LENGTH, MAX_LENGTH = 128, 400, 1024


def measure_on_gpu(name: str, repeats: int) -> None:
    """Print tokens per second of a model with random weights, and the bound on them."""
    device = torch.device("cuda")
    model = random_model(QWEN_SHAPES[name], device).to(torch.bfloat16).eval()
    workload = random_workload(model, Size(max_new_tokens=MAX_LENGTH))
    print(f"{name}-shaped, bf16, {torch.cuda.get_device_name()}")
    measured = compare_backends(workload, repeats, continuous=True)
    lengths, speed = measured["grouped"]
    bound = bandwidth_bound(model, lengths, copy_bandwidth(device))
    print(f"memory bandwidth allows {bound:.0f} tokens per second; grouped: {speed / bound:.0%}\n")


def random_model(shape: dict[str, int], device: torch.device) -> nn.Module:
    """A Qwen2 of that shape, with random weights in fp32."""
    config = Qwen2Config(vocab_size=151936, tie_word_embeddings=True, rope_theta=1e6, **shape)
    config.eos_token_id, config.pad_token_id = 1, 0
    with torch.device(device):
        return Qwen2ForCausalLM(config)


def random_workload(model: nn.Module, size: Size) -> Workload:
    """Prompts of random tokens, for completions in bf16 that end as `end_rates` says."""
    config, world = load_config(["--config", os.devnull]), World(0, 1, model.device)
    sampler = sample_by_loop(config, model, torch.bfloat16, world, decode_grouped)
    sampler = choose_loop(sampler, print, fallback=generate)
    rng = np.random.default_rng(0)
    prompts = rng.integers(2, model.config.vocab_size, (size.questions, PROMPT_TOKENS)).tolist()
    rates = end_rates(size.max_new_tokens).to(model.device)
    end_at_random = functools.partial(force_ends, rates=rates, eos_id=1)
    sampler.model.register_forward_hook(end_at_random, with_kwargs=True)
    params = SamplingParams(
        size.max_new_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        eos_ids=(1,),
        pad_id=0,
        group_size=size.samples,
    )
    return Workload(sampler, prompts, params)


def end_rates(max_length: int) -> torch.Tensor:
    """How probably a completion ends at its token 0, 1, ..., given that it got there.

    Lengths are log-normal, as those of reasoning models are about, with a mean of MEAN_LENGTH.
    """
    spread = 0.6
    centre = math.log(MEAN_LENGTH) - spread**2 / 2
    lengths = np.random.default_rng(0).lognormal(centre, spread, 100_000).astype(int)
    counts = torch.bincount(torch.from_numpy(lengths).clamp(1, max_length + 1))
    num_reached = counts.flip(0).cumsum(0).flip(0)
    return (counts / num_reached)[1 : max_length + 1].float()


def force_ends(model, args, kwargs: dict, output, *, rates: torch.Tensor, eos_id: int):
    """Forward hook: the next token is EOS with the rate of its place, and never else.

    It works on positions alone, so that all three backends draw from the same distribution.
    """
    if "position_ids" not in kwargs:  # of the pass that estimates a row's bytes on a GPU
        return output
    positions, kept = kwargs["position_ids"], kwargs.get("logits_to_keep", 0)
    kept = slice(-kept, None) if isinstance(kept, int) else kept
    places = (positions[:, kept] - (PROMPT_TOKENS - 1)).clamp(0, len(rates) - 1)
    ends = torch.rand(places.shape, device=places.device) < rates[places]
    output.logits[..., eos_id] = torch.where(ends, 1e4, -torch.inf).to(output.logits.dtype)
    return output


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy reads and writes."""
    source = torch.empty(2**30, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    (seconds,) = in_turns({"copy": lambda: target.copy_(source)}, 5).values()
    return 2 * source.nbytes / statistics.median(seconds)


def bandwidth_bound(model: nn.Module, lengths: list[int], bytes_per_s: float) -> float:
    """Tokens per second if decoding cost no more than reading weights and cache once a token."""
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    cache_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    weight_bytes = sum(p.nbytes for p in model.parameters())
    cached = sum(length * PROMPT_TOKENS + length * (length + 1) / 2 for length in lengths)
    num_bytes = max(lengths) * weight_bytes + cached * cache_bytes
    return sum(lengths) * bytes_per_s / num_bytes


if __name__ == "__main__":
    start = time.perf_counter()
    main()
    print(f"{time.perf_counter() - start:.0f} s in all")
