"""What only a GPU can show, one command a part: is it right, how fast is it, does a step fit.

    python benchmarks/gpu.py correctness     # then adapters (needs peft, bitsandbytes), speed, step
    python benchmarks/gpu.py step --quick    # toys on any device: does it run?
    python benchmarks/gpu.py evening --weights QWEN --data GSM8K    # a quarter of an hour on a card

Random weights in the shape of Qwen2.5-3B; no network. Each part is meant for one GPU of 80 GB or
more and at most 5 minutes. Each of its checks prints a table when it has ended, and all figures so
far are written to gpu-<part>.json in the folder of `--out`: a check that raises, or a part that is
killed, costs no others. Some figures have an aim; the exit status is 1 if one is not reached.

Then by hand: `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True` before `step`. Without it 30 GB
were reserved for 23 allocated, on a stand-in for CUDA, and torch warned of failed allocations that
then succeeded. It becomes a default only if it is right with captures, DDP and shards.
"""

import argparse
import contextlib
import dataclasses
import functools
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
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import bf16_copy, in_turns, print_table, synchronize, time_once  # first: the modules
from rollouts import TINY, Size, Workload
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from engine import ROOT
from engine.core.distributed import World, order_ddp_buckets
from engine.core.tensors import autocast, right_pad
from engine.core.types import PromptBatch, SamplingParams, Trajectory
from engine.model.load import recompute
from engine.model.policy import Policy, load_policy
from engine.report.metrics import peak_memory_gb
from engine.run.config_file import load_config
from engine.run.state import Run
from engine.sampling.batches import decode_in_batches
from engine.sampling.draw import draw_uniforms
from engine.sampling.graphs import CapturedSteps, decode_captured
from engine.sampling.grouped import DecodeBatch, decode_grouped
from engine.sampling.sampler import choose_loop, sample_by_loop
from engine.update.head import ChunkedScorer, head_log_probs
from engine.update.optimizer import make_optimizer
from logger import Logger
from main import assign_advantages, generate, update_policy, wrap_policy

RECIPE = ROOT / "configs/countdown-qwen2.5-3b.yaml"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads", "num_key_value_heads", "vocab_size")
TOY = dict(zip(SIZES, (16, 32, 1, 2, 1, 600), strict=True))
QWEN_3B = dict(zip(SIZES, (2048, 11008, 36, 16, 2, 151936), strict=True))
QWEN_05B = dict(zip(SIZES, (896, 4864, 24, 14, 2, 151936), strict=True))
PROMPT_TOKENS, MEAN_LENGTH = 128, 400
CARD_BYTES = 80e9  # what the step may use; the rest of a larger GPU is filled with ballast
FEW = ["training.k_best_of_n=[4,4]", "task.max_train_examples=64", "checkpoint.every=1"]
FEW += ["training.num_samples_per_step=1", "validation.num_examples=2", "validation.best_of_n=1"]
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
    data: Path = Path("none")  # of GSM8K: train.jsonl and test.jsonl
    out: Path = Path()  # where figures go, and what an evening trains

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
    sampler = choose_loop(sampler, print)
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


# Adapters: what needs peft and bitsandbytes


def check_8bit_averages(setting: Setting) -> list[Row]:
    return check_optimizers(setting, ("adamw_8bit",))


def check_lora(setting: Setting, in_4bit: str = "false") -> list[Row]:
    """LoRA on a few layers: a gradient, and the backend that is chosen."""
    with tempfile.TemporaryDirectory() as folder:
        random_model(setting.few_layers, torch.device("cpu")).save_pretrained(folder)
        AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
        overrides = [f"model.name={folder}", "model.lora.r=8", f"model.load_in_4bit={in_4bit}"]
        overrides += ["training.learning_rate=1e-4"]
        config = load_config(["--config", os.devnull, *overrides])
        world = World(rank=0, size=1, device=setting.device)
        log = Logger(rank=1).info
        policy = load_policy(config, world, log)
        wrap_policy(policy, config, world, log)
    prompts = PromptBatch([[5, 9, 30]], [(0, 0)])
    params = dataclasses.replace(policy.params, max_new_tokens=4)
    groups = decode_in_batches(
        policy.sampler, prompts, params, None, Logger(rank=1), generate=generate
    )
    ids = torch.arange(2, 34, device=setting.device)[None]
    policy.model.train()
    policy.scorer(ids, ids > 0, temperature=1.0).sum().backward()
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    is_finite = all(p.grad is not None and p.grad.isfinite().all() for p in trained)
    fast = policy.sampler.loop is setting.fast_loop
    name = f"LoRA, 4 bits {in_4bit}"
    return [
        Row(f"{name}: gradients are finite", is_finite, "", at_least=1),
        Row(f"{name}: the fast path", fast, "", at_least=1),
        Row(f"{name}: a group is sampled", len(groups[0]) == params.group_size, "", at_least=1),
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


def time_head(setting: Setting) -> list[Row]:
    """Head and loss at an aligned and an unaligned number of tokens; products of two widths."""
    tokens, hidden_size, vocabulary = (10_240, 10_237), 2048, 151_936
    if setting.is_quick:
        tokens, hidden_size, vocabulary = (64, 61), 16, 999
    make = functools.partial(torch.randn, device=setting.device)
    head = nn.Linear(hidden_size, vocabulary, bias=False, device=setting.device)

    def score(num_tokens: int) -> None:
        hidden = make(num_tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        ids = torch.zeros(num_tokens, dtype=torch.long, device=setting.device)
        head_log_probs(hidden, head, ids, temperature=1.0).sum().backward()

    def multiply(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, weight)

    functions = {f"head of {n} tokens": functools.partial(score, n) for n in tokens}
    for width in (1600, 1638):
        hidden = make(tokens[1], hidden_size, dtype=torch.bfloat16)
        weight = make(width, hidden_size, dtype=torch.bfloat16)
        name = f"product of {tokens[1]} tokens and {width} columns"
        functions[name] = functools.partial(multiply, hidden, weight)
    seconds = in_turns(functions, repeats=1 if setting.is_quick else 5)
    return [Row(name, 1000 * statistics.median(s), "ms") for name, s in seconds.items()]


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
    ballast_bytes = 0
    if setting.device.type == "cuda" and not setting.is_quick:
        total = torch.cuda.get_device_properties(setting.device).total_memory
        ballast_bytes = max(0, int(total - CARD_BYTES))
    ballast = torch.empty(ballast_bytes, dtype=torch.uint8, device=setting.device)
    with one_rank(setting) if name == "DDP" else contextlib.nullcontext():
        step = Step(setting, fused=name == "fused norms")
        if name == "DDP":
            step.run.policy.scorer = in_ddp(step.run.policy.scorer, setting)
        phases = {"rollout": step.rollout, "update": step.update}
        seconds = {phase: s[0] for phase, s in in_turns(phases, repeats=1).items()}
        step.run.policy.scorer = None  # frees DDP before its process group
    peak_gb = peak_memory_gb(setting.device) - ballast.nbytes / 1e9
    return [
        *(Row(f"{name}: {phase}", s, "s") for phase, s in seconds.items()),
        Row(f"{name}: step", sum(seconds.values()), "s", **setting.speed_aim(at_most=40)),
        Row(f"{name}: peak memory", peak_gb, "GB", **setting.speed_aim(at_most=80)),
    ]


# An evening with a card: what is short and asked for most comes first


def time_small_updates(setting: Setting) -> list[Row]:
    """Seconds of 32,768 tokens at 0.5B, in micro-batches of three sizes; rows of 512 tokens."""
    row, sizes = (8, (8, 16)) if setting.is_quick else (512, (2048, 8192, 32768))
    model = random_model(TOY if setting.is_quick else QWEN_05B, setting.device)
    return [
        Row(
            f"update of {sizes[-1]:,} tokens by {tokens:,}",
            seconds_of_update(setting, model, tokens // row, row) * sizes[-1] / tokens,
            "s",
        )
        for tokens in sizes
    ]


def train_real(setting: Setting) -> list[Row]:
    """The 0.5B recipe on real weights, and what its first and its last model solve of the test.

    best/ is chosen on 256 training questions that are held out. After `run_s` the run is stopped as
    a user would, unless its 100 steps are done; it stays in the folder of `--out`. As a toy, two
    steps of the default. Left out if the weights are not there within 3 minutes.
    """
    run_s, wait_s = (60, 0) if setting.is_quick else (330, 180)
    weights, data, folder = setting.weights, setting.data, setting.out / "real"
    arguments = ["--config", "configs/gsm8k-qwen2.5-0.5b.yaml", f"model.name={weights}"]
    arguments += [f"task.train={data}/train.jsonl", f"task.eval={data}/train.jsonl"]
    test = [f"task.eval={data}/test.jsonl", "logging.samples=1319"]
    held_out = ["validation.num_examples=256", "validation.every=25", "checkpoint.every=1000"]
    if setting.is_quick:
        arguments, test, weights = [*FEW, "training.max_new_gen_tokens=8"], [], TINY
        held_out = ["training.num_steps=2"]
    deadline = time.monotonic() + wait_s
    while not (weights / "config.json").is_file():
        if time.monotonic() > deadline:
            return [Row("real weights: not there", 0.0, "")]
        time.sleep(1)
    command = [sys.executable, "main.py", *arguments, f"run.dir={folder.parent}", "run.name=real"]
    process = subprocess.Popen([*command, *held_out], cwd=ROOT)
    try:
        process.wait(run_s)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its step, and saves
        process.wait()
    for model in (weights, folder / "checkpoints/last"):
        subprocess.run([*command, "mode=evaluate", f"model.name={model}", *test], cwd=ROOT)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    steps = [row for row in rows if "time/step_s" in row]
    names = ["time/step_s", "time/rollout_s", "time/update_s", "perf/tokens_per_s"]
    found = [Row(name, statistics.median(row[name] for row in steps), "") for name in names]
    found.append(Row("peak memory", steps[-1]["perf/peak_memory_gb"], "GB"))
    files = sorted(folder.glob("eval-*/metrics.json"))[-2:]  # an earlier evening may have left some
    ends = [json.loads(file.read_text()) for file in files]
    for when, measured in zip(("before", "after"), ends, strict=True):
        for name in ("strict", "strict_low", "strict_high", "lenient", "truncated_frac"):
            if f"eval/{name}" in measured:
                found.append(Row(f"{name} {when}", measured[f"eval/{name}"], ""))
    return [Row("steps", len(steps), "", at_least=1), *found]


def train_lora(setting: Setting) -> list[Row]:
    """Two steps of the embedded model with an adapter, in both precisions."""
    rows = []
    for dtype in ("bfloat16", "float16"):
        with tempfile.TemporaryDirectory() as folder:
            settings = [*FEW, "model.lora.r=8", f"model.compute_dtype={dtype}"]
            settings += ["training.max_new_gen_tokens=32", "training.num_steps=2"]
            command = [sys.executable, "main.py", f"run.dir={folder}", *settings]
            is_done = subprocess.run(command, cwd=ROOT).returncode in (0, 1)
            rows.append(Row(f"two steps with LoRA in {dtype}", is_done, "", at_least=1))
    return rows


PARTS: dict[str, dict[str, Callable[[Setting], list[Row]]]] = {
    "correctness": {
        "sampling": check_sampling,
        "fused norms": functools.partial(check_sampling, fused=True),
        "optimizers": check_optimizers,
        "DDP": check_ddp,
        "resume": check_resume,
    },
    "adapters": {
        "8-bit averages": check_8bit_averages,
        "LoRA": check_lora,
        "LoRA on 4 bits": functools.partial(check_lora, in_4bit="true"),
    },
    "speed": {
        "rollout": time_rollout,
        "head": time_head,
        "update": time_update,
    },
    "step": {
        f"step, {name}": functools.partial(measure_step, name=name)
        for name in ("plain", "fused norms", "DDP")
    },
}
# Real weights may still be on their way to the machine while the first are at work.
PARTS["evening"] = {
    "small updates": time_small_updates,
    **PARTS["correctness"],
    "real weights": train_real,
    **PARTS["step"],
    "LoRA by main.py": train_lora,
    **PARTS["adapters"],
}


def rows_of(name: str, check: Callable[[Setting], list[Row]], setting: Setting) -> list[Row]:
    """What the check finds; if it raises, one row that says so, and is not reached."""
    try:
        return check(setting)
    except Exception as error:
        traceback.print_exc()
        problem = f"{name}: {type(error).__name__}: {' '.join(str(error).split())}"
        return [Row(problem[:100], 0.0, "", at_least=1)]
    finally:
        if setting.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--only", nargs="+", help="these checks of the part, by name")
    parser.add_argument("--quick", action="store_true", help="toys, on any device")
    parser.add_argument("--out", type=Path, default=Path(), help="the folder of gpu-<part>.json")
    parser.add_argument("--weights", type=Path, default=Path("none"), help="for evening")
    parser.add_argument("--data", type=Path, default=Path("none"), help="for evening")
    options = parser.parse_args(arguments)
    if unknown := {*(options.only or [])} - {*PARTS[options.part]}:
        parser.error(f"no check {unknown}; {options.part} has {', '.join(PARTS[options.part])}")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not options.quick:
        print("no GPU: not measured")
        return
    start, rows = time.perf_counter(), []
    options.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{options.part} on {name}, torch {torch.__version__}\n", flush=True)
    folders = [path.resolve() for path in (options.weights, options.data, options.out)]
    setting = Setting(device, options.quick, *folders)
    for check in options.only or PARTS[options.part]:
        new = rows_of(check, PARTS[options.part][check], setting)
        print_table([check, "measured", "aim", "reached"], [row.cells() for row in new])
        rows += new
        elapsed_s = time.perf_counter() - start
        found = [dataclasses.asdict(row) | {"is_reached": row.is_reached} for row in rows]
        result = {"part": options.part, "device": name, "seconds": elapsed_s, "rows": found}
        text = json.dumps(result, indent=1, default=float) + "\n"
        (options.out / f"gpu-{options.part}.json").write_text(text, encoding="utf-8")
    print(f"{elapsed_s:.0f} s")
    sys.exit(0 if all(row.is_reached for row in rows) else 1)


if __name__ == "__main__":
    main()
