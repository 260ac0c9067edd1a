"""What a model can do, found out on made-up tokens when it is loaded."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.core.tensors import autocast
from engine.core.types import SamplingParams
from engine.sampling.grouped import DecodeBatch


@torch.no_grad()
def supports_grouped(
    model: nn.Module, replayed: Callable[[DecodeBatch], Callable[[int], None]] | None = None
) -> bool:
    """Whether grouped decoding computes the same log-probabilities as one plain forward.

    With `replayed`, CapturedSteps, as CUDA graphs. A few tokens are decoded after two short made-up
    prompts, one of them padded, and a row is dropped on the way.
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
        mismatches = [
            mismatch_of(model, prompts[row // 2], drawn.tokens[row], drawn.log_probs[row])
            for row in (0, 2)
        ]
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
        return False
    tolerance = 1e-3 if model.dtype == torch.float32 else 2**-6  # a few roundings of bf16
    return all(mismatch <= tolerance for mismatch in mismatches)  # NaN is none


@torch.no_grad()
def check_vllm(model: nn.Module, engine: Any, token_ids: list[int]) -> None:
    """Raise ValueError if vLLM, a VllmEngine, scores a text otherwise than the model does."""
    # It must be text: on random tokens a chat model in bf16 rounds by half a nat.
    tokens = torch.tensor(token_ids[1:], device=model.device)
    log_probs = engine.score(token_ids).to(model.device)
    with autocast(model.device, engine.dtype):
        mismatch = mismatch_of(model, token_ids[:1], tokens, log_probs)
    if not mismatch <= (1e-3 if engine.dtype == torch.float32 else 2**-6):
        problem = "it computes another model than ours: write grouped"
        raise ValueError(f"sampling.backend = vllm: {problem}")


def mismatch_of(model: nn.Module, prompt: list[int], tokens: Tensor, log_probs: Tensor) -> float:
    """How far the log-probabilities (T,) of tokens (T,) are from a plain forward's, on average."""
    ids = torch.cat([torch.tensor(prompt, device=model.device), tokens])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    difference = (log_probs + F.cross_entropy(logits, tokens, reduction="none")).abs().mean()
    # In multiples of the largest logit, whose rounding they have, or in nats if that is below 1
    return float(difference / logits.abs().max().clamp(min=1.0))


@torch.no_grad()
def supports_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether arithmetic in 16 bits gives finite logits near those in the weights' own dtype.

    Of the largest logit, SmolLM2-135M's differ by 0.1% in float16 and by 0.9% in bf16; 1.6% pass.
    """
    ids = torch.arange(1, 65, device=model.device)[None] % model.config.vocab_size  # made-up tokens
    with autocast(model.device, model.dtype):
        expected = model(input_ids=ids).logits.float()
    with autocast(model.device, dtype):
        difference = (model(input_ids=ids).logits - expected).abs().mean()
    return bool(difference <= 2**-6 * expected.abs().max())  # as above; False for NaN


@torch.no_grad()
def supports_chunked_head(model: nn.Module, log: Callable[[str], None]) -> bool:
    """Whether the logits are exactly those of a plain linear head on the last hidden states.

    If not, that is logged. Only rounding may differ: a cap hardly changes small logits.
    """
    head, is_plain = model.get_output_embeddings(), False
    if type(head) is nn.Linear:
        ids = torch.arange(1, 7, device=model.device)[None] % head.out_features  # (1, 6)
        inputs = {"input_ids": ids, "use_cache": False}
        with autocast(ids.device, model.dtype):  # an adapter's fp32 weights on bf16 layers
            expected = model(**inputs).logits
            with suppress(AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
                logits = head(model.base_model(**inputs).last_hidden_state)
                difference = (logits - expected).abs().max()  # RuntimeError for other shapes
                is_plain = bool(difference <= 1e-6 * expected.abs().max())
    if not is_plain:
        log("this model's logits are more than head(hidden): the update holds all at once")
    return is_plain
