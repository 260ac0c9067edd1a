"""What only a GPU can show, one command a part: is it right, how fast is it, does a step fit.

    python benchmarks/gpu.py correctness     # then step, speed, and the others in PARTS
    python benchmarks/gpu.py step --quick    # toys on any device: does it run?
    python benchmarks/gpu.py evening --weights QWEN --data GSM8K --out FOLDER

Random weights in the shape of Qwen2.5-3B; no network. Each part is meant for one GPU of 80 GB or
more and at most 5 minutes. Each of its checks prints a table when it has ended, and all figures so
far are written to gpu-<part>.json in the folder of `--out`: a check that raises, or a part that is
killed, costs no others. Some figures have an aim; the exit status is 1 if one is not reached.

The evening is a quarter of an hour with a card: the parts in EVENING, what is worth most first,
each in a process of its own that is killed when its time is up. The next call with the same folder
leaves out what is done. QWEN has the shape of Qwen2.5-0.5B-Instruct; GSM8K has train.jsonl. `lora`
needs peft and bitsandbytes.

Then by hand: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before `step`. Without it 30 GB
were reserved for 23 allocated, on a stand-in for CUDA, and torch warned of failed allocations that
then succeeded. It becomes a default only if it is right with captures, DDP and shards.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import bf16_copy, in_turns, print_table, synchronize, time_once  # first: the modules
from rollouts import Size, Workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from engine import ROOT
from engine.core.distributed import World, order_ddp_buckets
from engine.core.files import read_lines
from engine.core.tensors import autocast, right_pad
from engine.core.types import SamplingParams, Trajectory
from engine.model.load import recompute
from engine.model.policy import Policy
from engine.report.metrics import peak_memory_gb
from engine.run.config_file import load_config
from engine.run.state import Run
from engine.sampling.draw import draw_uniforms
from engine.sampling.graphs import CapturedSteps, decode_captured
from engine.sampling.grouped import DecodeBatch, decode_grouped
from engine.sampling.sampler import choose_loop, sample_by_loop
from engine.update.head import ChunkedScorer
from engine.update.optimizer import make_optimizer
from logger import Logger
from main import assign_advantages, update_policy

RECIPE = ROOT / "configs/countdown-qwen2.5-3b.yaml"
QWEN, LORA = "gsm8k-qwen2.5-0.5b", "gsm8k-qwen2.5-1.5b-lora"  # recipes for real weights
RANK = "model.lora.r=32"  # the recipe's, for the toy
IN_BF16, IN_FP16 = "model.compute_dtype=bfloat16", "model.compute_dtype=float16"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "vocab_size")
TOY = dict(zip(SIZES, (16, 32, 1, 2, 1, 600), strict=True))
QWEN_3B = dict(zip(SIZES, (2048, 11008, 36, 16, 2, 151936), strict=True))
PROMPT_TOKENS, MEAN_LENGTH = 128, 400
CARD_BYTES, T4_BYTES = 80e9, 14e9  # what may be used; the rest of a GPU is filled with ballast
FEW = ["training.k_best_of_n=[4,4]", "task.max_train_examples=64", "checkpoint.every=1"]
FEW += ["training.num_samples_per_step=1", "validation.num_examples=2", "validation.best_of_n=1"]
FAILED = "failed"  # in the place of a unit: the check has raised
SIL = ["training.learning_type=sil", "training.k_best_of_n=[2,4]"]  # trains whatever is earned
NO_ENDS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "eos_ids": (), "pad_id": 0}


@dataclasses.dataclass
class Row:
    """One figure, and the aim that it is held to: at most it, or at least it; None for no aim."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_reached(self) -> bool:
        low = -float("inf") if self.at_least is None else self.at_least
        high = float("inf") if self.at_most is None else self.at_most
        return low <= self.value <= high

    def cells(self) -> list[str]:
        aims = [(self.at_most, "at most"), (self.at_least, "at least")]
        aim = next((f"{word} {limit:g}" for limit, word in aims if limit is not None), "")
        return [self.name, f"{self.value:.4g} {self.unit}", aim, "" if self.is_reached else "NO"]


@dataclasses.dataclass
class Setting:
    """Where it runs, and how large."""

    device: torch.device
    is_quick: bool
    weights: Path = Path("none")  # of Qwen2.5-0.5B-Instruct, or a model of its shape
    data: Path = Path("none")  # of GSM8K: train.jsonl
    out: Path = Path()  # where figures go

    @property
    def shape(self) -> dict[str, int]:
        return TOY if self.is_quick else QWEN_3B

    @property
    def size(self) -> Size:
        return Size(2, 2, 4) if self.is_quick else Size(max_new_tokens=1024)

    @property
    def few_layers(self) -> dict[str, int]:
        """For what depends on no depth, and would fill the disk or take minutes with all layers."""
        return self.shape | {"num_hidden_layers": 2}

    @property
    def has_graphs(self) -> bool:
        return self.device.type == "cuda"

    @property
    def fast_loop(self) -> Callable[..., list]:
        return decode_captured if self.has_graphs else decode_grouped

    def speed_aim(self, **aim: float) -> dict[str, float]:
        """An aim that a toy is not held to."""
        return {} if self.is_quick else aim


# Random models, prompts and lengths


def random_model(shape: dict[str, int], device: torch.device) -> nn.Module:
    """A Qwen2 of that shape, with random weights in fp32."""
    config = Qwen2Config(tie_word_embeddings=True, rope_theta=1e6, **shape)
    config.eos_token_id, config.pad_token_id = 1, 0
    with torch.device(device):
        return Qwen2ForCausalLM(config)


def random_workload(model: nn.Module, size: Size) -> Workload:
    """Prompts of random tokens, for completions in bf16 that end as `end_rates` says."""
    config, world = load_config(["--config", os.devnull]), World(0, 1, model.device)
    sampler = sample_by_loop(config, model, torch.bfloat16, world)
    choose_loop(sampler, print)
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


def decoding_bound(
    model: nn.Module, lengths: list[int], *, bytes_per_s: float, flops_per_s: float
) -> float:
    """Tokens per second if a step took as long as reading weights and cache, or as its products."""
    config = model.config
    head_size = config.hidden_size // config.num_attention_heads
    cache_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_size
    weight_bytes = sum(p.nbytes for p in model.parameters())
    steps = np.arange(max(lengths))
    num_rows = (np.array(lengths)[:, None] > steps).sum(axis=0)  # those that a step still decodes
    num_bytes = weight_bytes + num_rows * (PROMPT_TOKENS + steps + 1) * cache_bytes
    flops = 2 * model.num_parameters() * num_rows
    return sum(lengths) / np.maximum(num_bytes / bytes_per_s, flops / flops_per_s).sum()


def product_rate(setting: Setting) -> float:
    """Floating-point operations per second of one bf16 product of large matrices."""
    size = 64 if setting.is_quick else 8192
    a, b = torch.randn(2, size, size, device=setting.device, dtype=torch.bfloat16)
    (seconds,) = in_turns({"product": functools.partial(torch.mm, a, b)}, repeats=20).values()
    return 2 * size**3 / statistics.median(seconds)


def fuse_norms(model: nn.Module) -> int:
    """Let plain RMSNorms compute by torch's fused kernel, which has a backward pass; how many do.

    Bound to the module, so that a copy's norm reads the copy's weight. A norm that computes
    something else (Gemma's 1 + weight), or that answers in another dtype, stays as it is.
    """
    norms = [norm for norm in model.modules() if type(norm).__name__.endswith("RMSNorm")]
    is_plain = dict.fromkeys(norms, True)
    hooks = [n.register_forward_hook(functools.partial(compare_norm, is_plain)) for n in norms]
    ids = torch.arange(8, device=model.device)[None]
    for dtype in (torch.float32, torch.bfloat16):
        with torch.no_grad(), autocast(model.device, dtype):
            model(input_ids=ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for norm in filter(is_plain.get, norms):
        norm.forward = types.MethodType(fused_norm, norm)
    return sum(is_plain.values())


def fused_norm(norm: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, eps)


def compare_norm(is_plain: dict[nn.Module, bool], norm: nn.Module, args: tuple, output) -> None:
    """Forward hook: whether the fused kernel says the same in the same dtype, to a unit of bf16."""
    found = fused_norm(norm, *args)
    is_near = found.dtype == output.dtype and torch.allclose(found, output, 2**-7, 1e-6)
    is_plain[norm] &= is_near


# Correctness


def ragged_prompts(model: nn.Module, lengths: tuple[int, ...]) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, model.config.vocab_size, length).tolist() for length in lengths]


def sample(loop: Callable[..., list], model: nn.Module, prompts: list, *, num_tokens: int) -> list:
    return loop(
        model,
        prompts,
        [(0, i) for i in range(len(prompts))],
        SamplingParams(num_tokens, **NO_ENDS, group_size=4),
        on_progress=lambda num_ended: None,
    )


def check_sampling(setting: Setting, *, fused: bool = False) -> list[Row]:
    """Captured steps against plain ones in fp32, and the bf16 copy against the scorer."""
    model = random_model(setting.shape, setting.device).eval()
    rows = [Row("norms fused", fuse_norms(model), "", at_least=1)] if fused else []
    num_tokens = 4 if setting.is_quick else 300  # over a leap of the cache
    prompts = ragged_prompts(model, (3, 17, 60, 9))
    plain = sample(decode_grouped, model, prompts, num_tokens=num_tokens)
    replayed = sample(setting.fast_loop, model, prompts, num_tokens=num_tokens)
    same = [a.token_ids == b.token_ids for a, b in zip(plain, replayed, strict=True)]
    rows.append(Row("captured rows with the tokens of plain ones", np.mean(same), "", at_least=0.9))

    sampler = bf16_copy(model)
    completions = sample(setting.fast_loop, sampler, prompts, num_tokens=num_tokens)
    pairs = list(zip([p for p in prompts for _ in range(4)], completions, strict=True))
    ids = right_pad([prompt + c.token_ids for prompt, c in pairs], 0).to(setting.device)
    is_sampled = [[False] * len(prompt) + [True] * num_tokens for prompt, _ in pairs]
    mask = right_pad(is_sampled, False).to(setting.device)
    scorer = ChunkedScorer(model, torch.bfloat16)
    model.train()
    log_probs = scorer(ids, mask, temperature=1.0)[mask]
    sampled = torch.tensor(np.concatenate([c.log_probs for c in completions])).to(setting.device)
    difference = (log_probs.detach() - sampled).abs().mean().item()
    rows.append(Row("bf16 sampler against scorer, padded", difference, "nats", at_most=0.05))
    (-log_probs.mean()).backward()
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    return [*rows, Row("norm of the gradient is finite", float(np.isfinite(norm)), "", at_least=1)]


def check_optimizers(setting: Setting, names: tuple[str, ...] = ("adamw", "muon")) -> list[Row]:
    """A step, save, load into a new one: the next step is the same, bit for bit."""
    rows = []
    for name in names:
        config = load_config(["--config", os.devnull, f"training.optimizer={name}"])
        model = random_model(setting.few_layers, setting.device)
        optimizer = make_optimizer(model, config.training)
        step_by_made_up_gradient(model, optimizer)
        weights = [p.detach().clone() for p in model.parameters()]
        with tempfile.NamedTemporaryFile() as file:
            torch.save(optimizer.state_dict(), file.name)
            step_by_made_up_gradient(model, optimizer)
            expected = [p.detach().clone() for p in model.parameters()]
            for parameter, before in zip(model.parameters(), weights, strict=True):
                parameter.data.copy_(before)
            again = make_optimizer(model, config.training)
            again.load_state_dict(torch.load(file.name, weights_only=True))
        step_by_made_up_gradient(model, again)
        pairs = list(zip(expected, model.parameters(), strict=True))
        same = all(torch.equal(a, b) and bool(b.isfinite().all()) for a, b in pairs)
        rows.append(Row(f"{name}: the step after loading is the same", same, "", at_least=1))
    return rows


def step_by_made_up_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = parameter.detach().sin()
    optimizer.step()


def check_resume(setting: Setting) -> list[Row]:
    """main.py on the embedded model for 5 steps, killed after the second and started again."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = [*FEW, "training.max_new_gen_tokens=32", "training.num_steps=5"]
        command = [sys.executable, "main.py", f"run.dir={folder}", "run.name=x", *sizes]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
        deadline_s = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline_s:
            if Path(folder, "x/checkpoints/step-000002").exists():
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.02)
        process.kill()
        process.wait()
        again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        rows = Path(folder, "x/metrics.jsonl").read_text().count('"step"')  # 5 steps, 2 evaluations
        is_whole = again.returncode == 0 and "resumed after step" in again.stdout and rows == 7
        return [Row("main.py, killed and resumed, has all its steps", is_whole, "", at_least=1)]


@contextlib.contextmanager
def one_rank(setting: Setting) -> Iterator[None]:
    """A process group of this process alone."""
    backend = "nccl" if setting.device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def in_ddp(scorer: ChunkedScorer, setting: Setting) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(
        scorer, forward_sync_buffers=False, gradient_as_bucket_view=True
    )
    order_ddp_buckets(wrapped, setting.device)
    return wrapped


def check_ddp(setting: Setting) -> list[Row]:
    """After a backward pass without a sum over ranks the gradients are in the buckets, once."""
    with one_rank(setting):
        model = random_model(setting.few_layers, setting.device)
        scorer = in_ddp(ChunkedScorer(model, torch.bfloat16), setting)
        before = peak_memory_gb(setting.device)
        ids = torch.tensor([[5, 9, 30, 7]], device=setting.device)
        with scorer.no_sync():
            scorer(ids, ids > 0, temperature=1.0).sum().backward()
        gradients = [p.grad for p in model.parameters()]
        shared = [g.untyped_storage().nbytes() > g.nbytes for g in gradients]
        grown = peak_memory_gb(setting.device) - before
        del scorer
    weights_gb = sum(p.nbytes for p in model.parameters()) / 1e9
    return [
        Row("share of gradients in DDP's buckets", np.mean(shared), "", at_least=0.5),
        Row("weights", weights_gb, "GB"),
        Row("peak memory above that of settling", grown, "GB"),
    ]


# Speed


def time_steps(setting: Setting, model: nn.Module) -> list[Row]:
    """Milliseconds a decode step at several numbers of rows, without the first two."""
    rows, num_steps = [], 2 if setting.is_quick else 50
    for num_rows in (4, 2) if setting.is_quick else (512, 256, 64):
        prompts = ragged_prompts(model, (128,) * (num_rows // 2))
        seeds = [(0, i) for i in range(len(prompts))]
        params = SamplingParams(num_steps + 4, **NO_ENDS, group_size=2)
        uniforms = draw_uniforms(seeds, params)
        with torch.no_grad():
            batch = DecodeBatch(model, prompts, uniforms, params)
            step = CapturedSteps(batch) if setting.has_graphs else batch.step
            for t in (1, 2):
                step(128 + t + 1)
            synchronize()
            start = time.perf_counter()
            for t in range(3, num_steps + 3):
                step(128 + t + 1)
            synchronize()
        milliseconds = 1000 * (time.perf_counter() - start) / num_steps
        rows.append(Row(f"decode step of {num_rows} rows", milliseconds, "ms"))
    return rows


def time_rollout(setting: Setting) -> list[Row]:
    """The published rollout beside `model.generate`, and what its captures cost."""
    model = bf16_copy(random_model(setting.shape, setting.device))
    rows = time_steps(setting, model)
    workload = random_workload(model, setting.size)
    capture, capture_s = CapturedSteps.capture, []

    def timed_capture(steps: CapturedSteps, num_columns: int):
        replay = []
        capture_s.append(time_once(lambda: replay.append(capture(steps, num_columns))))
        return replay[0]

    CapturedSteps.capture = timed_capture
    workload.grouped()  # warm up
    capture_s.clear()
    lengths: dict[str, list[int]] = {}
    ours_s = time_once(lambda: lengths.update(ours=workload.grouped()))
    theirs_s = time_once(lambda: lengths.update(theirs=workload.generate()))
    CapturedSteps.capture = capture
    speed = sum(lengths["ours"]) / ours_s
    ratio = speed / (sum(lengths["theirs"]) / theirs_s)
    aim = setting.speed_aim(at_least=2)
    share = []
    if not setting.is_quick:  # a toy has no 8 GB to copy
        rates = {
            "bytes_per_s": copy_bandwidth(setting.device),
            "flops_per_s": product_rate(setting),
        }
        bound = decoding_bound(model, lengths["ours"], **rates)
        share = [Row("rollout, of what bandwidth and products allow", speed / bound, "")]
    return [
        *rows,
        Row("rollout", ours_s, "s"),
        Row("mean length", statistics.mean(lengths["ours"]), "tokens"),
        Row("captures", len(capture_s), ""),
        Row("seconds of all captures", sum(capture_s), "s"),
        Row("model.generate", theirs_s, "s"),
        Row("tokens per second, times generate", ratio, "", **aim),
        *share,
    ]


def time_update(setting: Setting) -> list[Row]:
    """Forward and backward of a micro-batch, as a share of the rate of one bf16 product.

    It counts 6 operations a weight and token: not the products of attention, no recomputation, no
    optimizer's step, and the head for the prompt's tokens too, which are not scored.
    """
    num_rows, num_tokens = (1, 8) if setting.is_quick else (8, 1024)
    model, rate = random_model(setting.shape, setting.device), product_rate(setting)
    update_s = seconds_of_update(setting, model, num_rows, num_tokens)
    flops = 6 * sum(p.numel() for p in model.parameters()) * num_rows * num_tokens
    aim = setting.speed_aim(at_least=0.4)
    return [
        Row("one bf16 product", rate / 1e12, "TFLOP/s"),
        Row("update, of that", flops / update_s / rate, "", **aim),
    ]


def seconds_of_update(setting: Setting, model: nn.Module, num_rows: int, num_tokens: int) -> float:
    ids = torch.randint(model.config.vocab_size, (num_rows, num_tokens), device=setting.device)
    mask = torch.arange(num_tokens, device=setting.device) >= num_tokens // 4  # after the prompt
    update = functools.partial(score_and_differentiate, model, ids, mask.expand_as(ids))
    return statistics.median(in_turns({"update": update}, repeats=1)["update"])


def score_and_differentiate(model: nn.Module, ids: torch.Tensor, mask: torch.Tensor) -> None:
    model.zero_grad()
    ChunkedScorer(model, torch.bfloat16)(ids, mask, temperature=1.0).sum().backward()


# A whole step


class Step:
    """Rollout and update of one policy, again and again; completions have random rewards."""

    def __init__(self, setting: Setting, *, fused: bool):
        model = random_model(setting.shape, setting.device)
        recompute(model)
        if fused:
            print(f"{fuse_norms(model)} norms by torch's fused kernel")
        self.workload = random_workload(model, setting.size)
        sampler, params = self.workload.sampler, self.workload.params
        scorer = ChunkedScorer(model, torch.bfloat16)
        policy = Policy(model, sampler, None, params, torch.bfloat16, scorer)
        config, world = load_config(["--config", str(RECIPE)]), World(0, 1, setting.device)
        self.run = Run(config, world, Logger(rank=1), None, policy, [], folder=Path())
        self.run.optimizer = make_optimizer(model, config.training)
        self.rng = np.random.default_rng(0)

    def rollout(self) -> None:
        self.groups = [
            [Trajectory(prompt, c, "", {}, float(self.rng.integers(2))) for c in group]
            for prompt, group in zip(self.workload.prompts, self.workload.sample(), strict=True)
        ]
        assign_advantages(self.groups, self.run.config.training)

    def update(self) -> None:
        update_policy(self.run, self.groups)


def measure_step(setting: Setting, name: str = "plain") -> list[Row]:
    """The published step on a GPU that has 80 GB or is made to have no more."""
    ballast = fill_card(setting, but=CARD_BYTES)
    step = Step(setting, fused=name == "fused norms")
    phases = {"rollout": step.rollout, "update": step.update}
    seconds = {phase: s[0] for phase, s in in_turns(phases, repeats=1).items()}
    peak_gb = peak_memory_gb(setting.device) - ballast.nbytes / 1e9
    return [
        *(Row(f"{name}: {phase}", s, "s") for phase, s in seconds.items()),
        Row(f"{name}: step", sum(seconds.values()), "s", **setting.speed_aim(at_most=40)),
        Row(f"{name}: peak memory", peak_gb, "GB", **setting.speed_aim(at_most=80)),
    ]


def fill_card(setting: Setting, *, but: float) -> torch.Tensor:
    """Ballast that leaves so many bytes of a GPU free; none in a toy."""
    num_bytes = 0
    if setting.device.type == "cuda" and not setting.is_quick:
        num_bytes = max(0, int(torch.cuda.mem_get_info(setting.device)[0] - but))
    return torch.empty(num_bytes, dtype=torch.uint8, device=setting.device)


# What an evening has beside correctness: whole runs


def train(
    setting: Setting,
    name: str,
    settings: Sequence[str] = (),
    *,
    num_steps: int = 2,
    and_then: Callable[[Setting, str], list[Row]] | None = None,
) -> list[Row]:
    """Steps of a recipe by main.py, on the weights and questions that were given.

    A toy makes two steps of sil. `and_then` gets the run's folder.
    """
    questions = setting.data / "train.jsonl"  # main.py holds an eighth of them out
    arguments = [f"--config=configs/{name}.yaml", f"model.name={setting.weights}"]
    arguments += [f"task.train={questions}", f"task.eval={questions}"]
    arguments += ["validation.num_examples=256", "checkpoint.every=1000"]
    if setting.is_quick:
        arguments, num_steps = [*FEW, "training.max_new_gen_tokens=8", *SIL], 2
    arguments += [f"training.num_steps={num_steps}", f"validation.every={num_steps}", *settings]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "main.py", *arguments, f"run.dir={folder}", "run.name=x"]
        subprocess.run(command, cwd=ROOT, check=True)
        rows = read_lines(Path(folder, "x/metrics.jsonl"))
        more = and_then(setting, f"{folder}/x") if and_then else []
    return [*rows_of_run(rows, num_steps), *more]


def rows_of_run(rows: list[dict], num_steps: int) -> list[Row]:
    """Of metrics.jsonl: steps, median seconds, the peak, and pass@1 before and after."""
    steps = [row for row in rows if "time/step_s" in row]
    num_trained = sum(row.get("train/grad_norm", 0) > 0 for row in steps)
    found = [Row("steps", len(steps), "", at_least=num_steps)]
    found.append(Row("steps that trained", num_trained, "", at_least=1))
    for key in ("time/step_s", "time/rollout_s", "time/update_s"):
        found.append(Row(f"{key}, median", statistics.median(row[key] for row in steps), "s"))
    found.append(Row("peak memory", steps[-1]["perf/peak_memory_gb"], "GB"))
    rates = [row["eval/pass@1"] for row in rows if "eval/pass@1" in row]
    return [*found, Row("pass@1 before", rates[0], ""), Row("pass@1 after", rates[-1], "")]


def merge(setting: Setting, run: str) -> list[Row]:
    """A run's adapter, exported, merged and loaded again."""
    export = [sys.executable, "-m", "tools.export", run, "--merge"]
    subprocess.run(export, cwd=ROOT, check=True)
    merged = AutoModelForCausalLM.from_pretrained(f"{run}/merged").to(setting.device)
    logits = merged(torch.tensor([[1, 2, 3]], device=setting.device)).logits
    return [Row("merged: finite logits", bool(logits.isfinite().all()), "", at_least=1)]


def train_as_on_t4(setting: Setting) -> list[Row]:
    """Two steps of the T4's recipe, where no more memory is free than it may use."""
    ballast = fill_card(setting, but=T4_BYTES)
    rows = train(setting, "gsm8k-qwen2.5-0.5b-t4", [IN_FP16])
    del ballast
    aim = setting.speed_aim(at_most=T4_BYTES / 1e9)
    return [dataclasses.replace(r, **aim) if r.name == "peak memory" else r for r in rows]


def time_captured_norms(setting: Setting) -> list[Row]:
    """A captured decode step as it is, and with norms by torch's fused kernel."""
    model = bf16_copy(random_model(setting.shape, setting.device))
    rows = time_steps(setting, model)
    fuse_norms(model)
    fused = time_steps(setting, model)
    return [*rows, *(dataclasses.replace(row, name=f"{row.name}, fused norms") for row in fused)]


def compare_with_plain(setting: Setting, dtype: str) -> list[Row]:
    """plain.py and main.py, three steps of the default; torch leaves TF32 off."""
    if dtype == "bfloat16" and setting.device.type == "cpu":
        return []  # plain.py has it on a GPU alone
    from plain_side import compare  # nothing else needs plain.py

    sizes = ["training.num_steps=3", "validation.num_examples=8", "validation.best_of_n=1"]
    if setting.is_quick:
        sizes += ["training.num_samples_per_step=2", "training.max_new_gen_tokens=32"]
        sizes += ["training.num_steps=1", *SIL]
    with tempfile.TemporaryDirectory() as folder:
        figures = compare(Path(folder), [*sizes, f"model.compute_dtype={dtype}"])
    aims = {"norms of the gradient, apart": 1e-3} if dtype == "float32" else {}
    return [Row(f"{dtype}: {name}", value, "", aims.get(name)) for name, value in figures.items()]


def sample_by_vllm(setting: Setting) -> list[Row]:
    """Two steps by vLLM, where one for the installed torch is there already."""
    if importlib.util.find_spec("vllm") is None:
        print("no vLLM is installed")
        return []
    return train(setting, QWEN, ["sampling.backend=vllm"])


PARTS: dict[str, dict[str, Callable[[Setting], list[Row]]]] = {
    "correctness": {
        "sampling": check_sampling,
        "fused norms": functools.partial(check_sampling, fused=True),
        "optimizers": check_optimizers,
        "DDP": check_ddp,
        "resume": check_resume,
    },
    "speed": {
        "rollout": time_rollout,
        "update": time_update,
    },
    "step": {
        "plain": measure_step,
        "fused norms": functools.partial(measure_step, name="fused norms"),
        "captured norms": time_captured_norms,
    },
    "lora": {
        "bfloat16": functools.partial(train, name=LORA, settings=[RANK, IN_BF16], and_then=merge),
        "float16": functools.partial(train, name=LORA, settings=[RANK, IN_FP16]),
        "4 bits": functools.partial(train, name=LORA, settings=[RANK, "model.load_in_4bit=true"]),
        "8-bit averages": functools.partial(check_optimizers, names=("adamw_8bit",)),
    },
    "float16": {"as on a T4": train_as_on_t4},
    "gsm8k": {"thirty steps": functools.partial(train, name=QWEN, num_steps=30)},
    "plain": {
        dtype: functools.partial(compare_with_plain, dtype=dtype)
        for dtype in ("float32", "bfloat16")
    },
    "vllm": {"two steps": sample_by_vllm},
}
# What is worth most comes first; the seconds that a part may take
EVENING = {"correctness": 120, "lora": 200, "float16": 90, "step": 210, "gsm8k": 240}
EVENING |= {"plain": 120, "vllm": 120}


def run_evening(setting: Setting, parts: Sequence[str]) -> bool:
    """Run what is not done yet; whether all is now, and has reached its aims."""
    table, is_well, may_be = [], True, {"vllm": "skipped"}
    for part in parts:
        if figures_of(setting, part)["state"] != "done":
            run_part(setting, part)
        found = figures_of(setting, part)
        missed = sum(not row["is_reached"] for row in found["rows"])
        times = f"{found['seconds']:.0f} of {EVENING[part]} s"
        table.append([part, found["state"], times, len(found["rows"]), missed])
        is_well &= missed == 0 and found["state"] in ("done", may_be.get(part))
    print_table(["part", "state", "time", "figures", "aims missed"], table)
    return is_well


def figures_of(setting: Setting, part: str) -> dict:
    file = setting.out / f"gpu-{part}.json"
    if not file.exists():  # its first check was not over
        return {"state": "cut off", "seconds": 0.0, "rows": []}
    return json.loads(file.read_text(encoding="utf-8"))


def run_part(setting: Setting, part: str) -> None:
    """In a process of its own, which is killed with all that it has started when its time is up."""
    (setting.out / f"gpu-{part}.json").unlink(missing_ok=True)
    command = [sys.executable, __file__, part, "--out", str(setting.out)]
    command += ["--weights", str(setting.weights), "--data", str(setting.data)]
    command += ["--quick"] if setting.is_quick else []
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        process.wait(EVENING[part])
    except subprocess.TimeoutExpired:
        print(f"{part}: its {EVENING[part]} s are over", flush=True)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def measure(setting: Setting, part: str, checks: Sequence[str]) -> bool:
    """Print and keep what each check finds; whether all aims are reached."""
    start, rows, figures = time.perf_counter(), [], []
    for check in checks:
        new = rows_of(check, PARTS[part][check], setting)
        print_table([check, "measured", "aim", "reached"], [row.cells() for row in new])
        rows += new
        of_all = {"check": check}
        figures += [of_all | dataclasses.asdict(r) | {"is_reached": r.is_reached} for r in new]
        result = {
            "part": part,
            "state": state_of(rows, is_over=check == checks[-1]),
            "device": device_name(setting.device),
            "seconds": time.perf_counter() - start,
            "rows": figures,
        }
        text = json.dumps(result, indent=1, default=float) + "\n"
        (setting.out / f"gpu-{part}.json").write_text(text, encoding="utf-8")
    print(f"{result['seconds']:.0f} s")
    return all(row.is_reached for row in rows)


def state_of(rows: list[Row], *, is_over: bool) -> str:
    """What a part's file says of it; "cut off" holds unless the next check writes anew."""
    if not is_over:
        return "cut off"
    if not rows:
        return "skipped"
    return FAILED if any(row.unit == FAILED for row in rows) else "done"


def rows_of(name: str, check: Callable[[Setting], list[Row]], setting: Setting) -> list[Row]:
    """What the check finds; if it raises, one row that says so, and is not reached."""
    try:
        return check(setting)
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        problem = f"{name}: {type(error).__name__}: {' '.join(str(error).split())}"
        return [Row(problem[:100], 0.0, FAILED, at_least=1)]
    finally:
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "evening"])
    parser.add_argument("--only", nargs="+", help="these checks of the part, by name")
    parser.add_argument("--quick", action="store_true", help="toys, on any device")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of gpu-<part>.json")
    parser.add_argument("--weights", type=Path, default=Path("none"), help="for evening")
    parser.add_argument("--data", type=Path, default=Path("none"), help="for evening")
    options = parser.parse_args(arguments)
    checks = EVENING if options.part == "evening" else PARTS[options.part]
    if unknown := {*(options.only or [])} - {*checks}:
        parser.error(f"no check {unknown}; {options.part} has {', '.join(checks)}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not options.quick:
        print("no GPU: not measured")
        return
    options.out.mkdir(parents=True, exist_ok=True)
    print(f"{options.part} on {device_name(device)}, torch {torch.__version__}\n", flush=True)
    folders = [path.resolve() for path in (options.weights, options.data, options.out)]
    setting, chosen = Setting(device, options.quick, *folders), options.only or [*checks]
    if options.part == "evening":
        is_well = run_evening(setting, chosen)
    else:
        is_well = measure(setting, options.part, chosen)
    sys.exit(0 if is_well else 1)


if __name__ == "__main__":
    main()
