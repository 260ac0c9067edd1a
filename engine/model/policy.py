"""The policy: the model that is trained, a copy that samples, a reference; how each computes."""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config, LoraSettings, ModelSettings
from engine.core.tensors import autocast
from engine.core.types import Log, SamplingParams
from engine.model.adapters import score_without_adapter
from engine.model.probes import supports_chunked_head, supports_grouped
from engine.sampling.calculator import Calculator
from engine.sampling.vllm import VllmEngine
from engine.update.optimizer import LossScale
from engine.update.shards import whole


@dataclass
class Policy:
    """The model that is trained, as it scores completions and as it samples them."""

    model: nn.Module  # what the optimizer steps is fp32; else in the dtype that it computes in
    sampler: nn.Module | VllmEngine  # the model or, in bf16 or with model.shard, a copy; or vLLM
    tokenizer: PreTrainedTokenizerFast
    params: SamplingParams  # for the samples that are trained on
    compute_dtype: torch.dtype  # of the scorer, and of the sampler where that is a copy
    scorer: nn.Module | None = None  # main.py's CompletionScorer, perhaps in DDP, for training
    reference: Callable[..., torch.Tensor] | None = None  # of a KL penalty, or the teacher
    teacher: nn.Module | None = None
    backend: str = "generate"  # how it samples: generate, grouped, captured or vllm

    @functools.cached_property
    def loss_scale(self) -> LossScale:
        """For arithmetic in float16; else it is off, a factor of 1."""
        is_on = self.compute_dtype == torch.float16
        return LossScale(self.model.device.type, growth_interval=100, enabled=is_on)

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model can see; None for no limit."""
        return getattr(self.model.config.get_text_config(), "max_position_embeddings", None)

    @property
    def end_tokens(self) -> str:
        """The tokens at which a completion ends, in words; None is an id without a token."""
        return " or ".join(map(str, self.tokenizer.convert_ids_to_tokens(self.params.eos_ids)))

    def autocast(self) -> torch.autocast:
        """For sampling: a bf16 model's fp32 adapter then computes in bf16, as when it scores."""
        is_mixed = any(p.dtype != self.model.dtype for p in self.model.parameters())
        return autocast(self.model.device, self.model.dtype if is_mixed else torch.float32)

    @torch.no_grad()
    def refresh_sampler(self) -> None:
        """Copy the trained weights into the sampler, in place."""
        if self.sampler is self.model:
            return
        if self.backend == "vllm":
            self.sampler.load_weights(self.model)
            return
        copies = [*self.sampler.parameters(), *self.sampler.buffers()]
        trained = [*self.model.parameters(), *self.model.buffers()]
        for copied, weights in zip(copies, trained, strict=True):
            copied.copy_(whole(weights, copied.dtype))


def choose_compute_dtype(settings: ModelSettings, device: torch.device) -> torch.dtype:
    """bf16 on a GPU that has it, else float16, and fp32 elsewhere, unless the config names one."""
    if settings.compute_dtype != "auto":
        return getattr(torch, settings.compute_dtype)
    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return torch.bfloat16
    return torch.float16 if device.type == "cuda" else torch.float32


def make_sampler(
    model: nn.Module, compute_dtype: torch.dtype, device: torch.device, *, shard: bool
) -> nn.Module:
    """The model that samples: the model itself or a copy, on the device, in the compute dtype.

    Without the copy all weights would be cast, or gathered from shards, again for every token. Call
    it before the model is cut into shards: after that no rank has all weights.
    """
    if shard or model.dtype != compute_dtype:
        return copy_in(compute_dtype, model, device)
    return model.eval()


def copy_in(dtype: torch.dtype, model: nn.Module, device: torch.device) -> nn.Module:
    """A frozen copy on the device: weights in the dtype, buffers as they are.

    Rotary frequencies, which are buffers, would turn far positions by the wrong angle in bf16. Each
    weight is cast while it is copied, so that there is never a second copy in fp32.
    """
    copies = {}
    for p in model.parameters():
        weights = p.detach().to(device, dtype, copy=True)
        copies[id(p)] = nn.Parameter(weights, requires_grad=False)
    return copy.deepcopy(model, copies).to(device).eval()


def make_reference(
    scorer: nn.Module, policy: Policy, *, lora: LoraSettings | None
) -> Callable[..., torch.Tensor]:
    """A scorer for the teacher, else for the model that the run starts from.

    That one is the policy without its adapter, or a frozen copy.
    """
    if policy.teacher is not None:
        in_blocks = scorer.in_blocks and supports_chunked_head(policy.teacher, lambda line: None)
        return type(scorer)(policy.teacher, scorer.compute_dtype, in_blocks=in_blocks)
    if lora is not None:
        return functools.partial(score_without_adapter, scorer)
    copied = copy_in(policy.compute_dtype, scorer.model, scorer.model.device)
    return type(scorer)(copied, scorer.compute_dtype, in_blocks=scorer.in_blocks)


def sampling_params(
    config: Config, tokenizer: PreTrainedTokenizerFast, eos_ids: tuple[int, ...], log: Log
) -> SamplingParams:
    """How the completions that are trained on are sampled."""
    training, sampling = config.training, config.sampling
    if config.mode == "train" and (sampling.top_p < 1 or sampling.top_k > 0):
        log("sampling.top_p or top_k draws from less than what is scored: the gradient is biased")
    return SamplingParams(
        max_new_tokens=training.max_new_gen_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id,
        group_size=training.group_size,
        calculator=Calculator(tokenizer, sampling.calculator) if sampling.calculator else None,
    )


def choose_backend(
    backend: str, sampler: nn.Module, make_batch: Callable[..., object], log: Log
) -> str:
    """The backend that the config asks for or, if this model does not support it, a slower one.

    On a GPU `grouped` becomes `captured`: its decode step is replayed as a CUDA graph.
    """
    if backend in ("generate", "vllm"):
        return backend
    if not supports_grouped(sampler, make_batch):
        log("this model's cache cannot be shared by a group: sampling.backend=generate")
        return "generate"
    if sampler.device.type == "cuda":
        if supports_grouped(sampler, make_batch, capture=True):
            return "captured"
        log("this model's decode step cannot be captured in a CUDA graph: sampling is slower")
    return "grouped"
