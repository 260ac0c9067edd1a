"""What samples for the policy: a backend by its name, on the policy's own weights or on a copy."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.core.config import Config
from engine.core.distributed import World
from engine.core.tensors import autocast, whole
from engine.core.types import (
    Completion,
    DecodeLoop,
    Log,
    Progress,
    Prompts,
    SamplingParams,
    Seed,
    no_log,
)
from engine.sampling.batches import tokens_that_fit
from engine.sampling.grouped import DecodeBatch, decode_grouped


@dataclass
class LoopSampler:
    """Samples by a decode loop on a transformers model: the policy's own or, in 16 bits, a copy.

    Another backend has its methods decode, refresh and tokens_at_once, as VllmEngine does.
    """

    model: nn.Module
    trained: nn.Module
    loop: DecodeLoop | None = None  # faster than the one that `decode` is given, if it fits

    def decode(
        self,
        prompts: Prompts,
        seeds: list[Seed],
        params: SamplingParams,
        *,
        on_progress: Progress,
        generate: DecodeLoop,
    ) -> list[Completion]:
        """Sample a group of completions of each prompt: N * G of them, question by question."""
        loop = self.loop or generate
        with self.autocast():
            return loop(self.model.eval(), prompts, seeds, params, on_progress=on_progress)

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the trained weights into the copy, in place."""
        if self.model is self.trained:
            return
        copies = [*self.model.parameters(), *self.model.buffers()]
        trained = [*self.trained.parameters(), *self.trained.buffers()]
        for copied, weights in zip(copies, trained, strict=True):
            copied.copy_(whole(weights, copied.dtype))

    def tokens_at_once(self, longest: int, params: SamplingParams) -> int:
        with self.autocast():
            return tokens_that_fit(self.model, longest, params)

    def autocast(self) -> torch.autocast:
        """A bf16 model's fp32 adapter computes in bf16, as when it scores."""
        is_mixed = any(p.dtype != self.model.dtype for p in self.model.parameters())
        return autocast(self.model.device, self.model.dtype if is_mixed else torch.float32)


def sample_by_loop(
    config: Config, model: nn.Module, compute_dtype: torch.dtype, world: World
) -> LoopSampler:
    """On the model itself or on a copy in the compute dtype, on the device.

    Without the copy all weights would be cast, or gathered from shards, again for every token. It
    is made before the model is cut into shards: after that no rank has all weights.
    """
    if config.model.shard or model.dtype != compute_dtype:
        return LoopSampler(copy_in(compute_dtype, model, world.device), model)
    return LoopSampler(model.eval(), model)


def choose_loop(sampler: LoopSampler, log: Log) -> None:
    """Decode grouped if a group can share the model's cache, and on a GPU in CUDA graphs."""
    with sampler.autocast():
        if not supports_grouped(sampler.model, log=log):
            log("this model's cache cannot be shared by a group: sampling.backend=generate")
            return
        sampler.loop = decode_grouped
        if sampler.model.device.type == "cuda":
            from engine.sampling.graphs import CapturedSteps, decode_captured

            if supports_grouped(sampler.model, CapturedSteps):
                sampler.loop = decode_captured
            else:
                log("this model's decode step cannot be captured in a CUDA graph: it is slower")


@torch.no_grad()
def supports_grouped(
    model: nn.Module,
    replayed: Callable[[DecodeBatch], Callable[[int], None]] | None = None,
    log: Log = no_log,
) -> bool:
    """Whether grouped decoding computes the same log-probabilities as one plain forward.

    With `replayed`, CapturedSteps, as CUDA graphs. A few tokens are decoded after two short made-up
    prompts, one of them padded, and a row is dropped on the way. An error is logged: it may be our
    mistake and not the model's nature.
    """
    prompts = [[i % model.config.vocab_size for i in ids] for ids in (range(1, 25), (25, 26))]
    params = SamplingParams(5, 1.0, top_p=1.0, top_k=0, eos_ids=(), pad_id=0, group_size=2)
    uniforms = torch.linspace(0.01, 0.99, 20).view(4, params.max_new_tokens)  # (B, T)
    try:
        batch = DecodeBatch(model, prompts, uniforms, params)
        step = replayed(batch) if replayed else batch.step
        step(26)
        batch.select(torch.tensor([0, 2, 3], device=model.device))
        for num_columns in (27, 28, 29):  # if replayed: as usual, captured, replayed once more
            step(num_columns)
        drawn = batch.drawn
        return all(
            scores_alike(model, prompt, drawn.tokens[row], drawn.log_probs[row], model.dtype)
            for prompt, row in zip(prompts, (0, 2), strict=True)
        )
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        log(f"{error!r:.300}")
        return False


def scores_alike(
    model: nn.Module, prompt: list[int], tokens: Tensor, log_probs: Tensor, dtype: torch.dtype
) -> bool:
    """Whether log-probabilities (T,) of tokens (T,) are, but for rounding, a plain forward's."""
    ids = torch.cat([torch.tensor(prompt, device=model.device), tokens])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    difference = (log_probs + F.cross_entropy(logits, tokens, reduction="none")).abs().mean()
    # In multiples of the largest logit, whose rounding they have, or in nats if that is below 1
    mismatch = difference / logits.abs().max().clamp(min=1.0)
    return bool(mismatch <= (1e-3 if dtype == torch.float32 else 2**-6))  # False for NaN


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
