"""What a model can do, found out on made-up tokens when it is loaded."""

from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace

import torch
from torch import nn

from engine.core.tensors import autocast
from engine.core.types import SamplingParams
from engine.sampling.graphs import CapturedSteps
from engine.sampling.record import Record
from engine.sampling.vllm import KEY, VllmEngine


@torch.no_grad()
def supports_grouped(
    model: nn.Module, make_batch: Callable[..., object], *, capture: bool = False
) -> bool:
    """Whether grouped decoding computes the same log-probabilities as one plain forward.

    `make_batch` is main.py's DecodeBatch. A few tokens are decoded after two short made-up prompts,
    one of them padded, and a row is dropped on the way.
    """
    prompts = [[i % model.config.vocab_size for i in ids] for ids in (range(1, 25), (25, 26))]
    params = SamplingParams(5, 1.0, top_p=1.0, top_k=0, eos_ids=(), pad_id=0, group_size=2)
    uniforms = torch.linspace(0.01, 0.99, 20).view(4, params.max_new_tokens)  # (B, T)
    try:
        batch = make_batch(model, prompts, uniforms, params)
        step = CapturedSteps(batch) if capture else batch.step
        step(26)
        batch.select(torch.tensor([0, 2, 3], device=model.device))
        for num_columns in (27, 28, 29):  # with `capture` as usual, captured, replayed once more
            step(num_columns)
        mismatches = [mismatch_of(model, batch.record, prompts[row // 2], row) for row in (0, 2)]
    except torch.OutOfMemoryError:  # a RuntimeError too
        raise
    except (AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
        return False
    tolerance = 1e-3 if model.dtype == torch.float32 else 2**-6  # a few roundings of bf16
    return all(mismatch <= tolerance for mismatch in mismatches)  # NaN is none


@torch.no_grad()
def check_vllm(model: nn.Module, engine: VllmEngine, token_ids: list[int]) -> None:
    """Raise ValueError if vLLM scores some text otherwise than the model, by other weights.

    It must be text: on tokens by chance a chat model in bf16 rounds by half a nat.
    """
    ids = torch.tensor(token_ids, device=model.device)
    log_probs = engine.score(ids.tolist()).to(model.device)
    seen = SimpleNamespace(tokens=ids[None, 1:], log_probs=log_probs[None])
    with autocast(model.device, engine.dtype):
        mismatch = mismatch_of(model, seen, ids[:1].tolist(), 0)
    if not mismatch <= (1e-3 if engine.dtype == torch.float32 else 2**-6):
        raise ValueError(f"{KEY}: it computes another model than ours: write grouped")


def mismatch_of(model: nn.Module, record: Record, prompt: list[int], row: int) -> float:
    """How far a row's recorded log-probabilities are from one plain forward's, on average."""
    tokens = record.tokens[row]  # (T,)
    ids = torch.cat([torch.tensor(prompt, device=model.device), tokens])
    logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    expected = logits.log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    difference = (record.log_probs[row] - expected).abs().mean()
    # In multiples of the largest logit, whose rounding they have, or in nats if that is below 1.
    return float(difference / logits.abs().max().clamp(min=1.0))


@torch.no_grad()
def supports_float16(model: nn.Module) -> bool:
    """Whether float16 arithmetic gives finite logits near those in the weights' own dtype."""
    ids = torch.arange(1, 65, device=model.device)[None] % model.config.vocab_size  # made-up tokens
    with autocast(model.device, model.dtype):
        expected = model(input_ids=ids).logits.float()
    with autocast(model.device, torch.float16):
        difference = (model(input_ids=ids).logits - expected).abs().mean()
    return bool(difference <= 2**-6 * expected.abs().max())  # as above; False for NaN


@torch.no_grad()
def supports_chunked_head(model: nn.Module, log: Callable[[str], None]) -> bool:
    """Whether the logits are exactly those of a plain linear head on the last hidden states.

    If not, that is logged. False for models that cap or scale their logits, such as Gemma 2: a cap
    hardly changes those of a model that is not trained yet, so here only rounding may differ.
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
