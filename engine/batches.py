"""Which questions are decoded together: as many as the memory holds."""

import functools
from collections.abc import Callable

import torch
from torch import nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from engine.types import Completion, SamplingParams, Seed


def sample_in_batches(
    model: nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    decode: Callable[..., list[Completion]],
    num_samples: int,
    params: SamplingParams,
    max_batch_tokens: int | None,
    on_progress: Callable[[int], None],
) -> list[list[Completion]]:
    """Sample `num_samples` completions of each prompt: one list per prompt, in their order.

    `decode` is main.py's `decode_grouped` or the like. It gets questions together, longest prompts
    first, as long as rows * (longest prompt + new tokens) <= `max_batch_tokens`; None is as many as
    the GPU holds.
    """
    decode_batch = functools.partial(
        decode, model, num_samples=num_samples, params=params, on_progress=on_progress
    )
    groups: list[list[Completion]] = [[] for _ in prompts]
    by_length = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    while by_length:
        row_tokens = len(prompts[by_length[0]]) + params.max_new_tokens
        num_rows = (max_batch_tokens or tokens_that_fit(model, row_tokens)) // row_tokens
        num_questions = max(1, num_rows // num_samples)
        batch, by_length = by_length[:num_questions], by_length[num_questions:]
        completions = decode_batch([prompts[i] for i in batch], [seeds[i] for i in batch])
        for j, i in enumerate(batch):
            groups[i] = completions[j * num_samples : (j + 1) * num_samples]
    return groups


def tokens_that_fit(model: nn.Module, row_tokens: int) -> int:
    """How many tokens can be decoded at once, in rows of `row_tokens`, with the memory now free.

    They fit even if all rows become as long as they may. A tenth is left for fragmentation.
    """
    device = model.device
    if device.type != "cuda":
        return 131_072
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reserved
    config, itemsize = model.config.get_text_config(), model.dtype.itemsize
    row_bytes = decode_bytes_per_row(config, row_tokens, bytes_per_number=itemsize)
    row_bytes += state_bytes(model)
    return int(0.9 * free / row_bytes) * row_tokens


def decode_bytes_per_row(
    config: PretrainedConfig, row_tokens: int, *, bytes_per_number: int
) -> float:
    """The most bytes that a row of so many tokens takes while it is decoded."""
    cache = row_tokens * cache_bytes_per_token(config, bytes_per_number=bytes_per_number)
    growing = cache / getattr(config, "num_hidden_layers", 1)  # one layer at a time is copied
    drawing = 6 * 4 * config.vocab_size  # fp32 logits and what `sample_tokens` makes of them
    return cache + growing + drawing


@torch.no_grad()
def state_bytes(model: nn.Module) -> int:
    """Bytes of a row's recurrent states, however long the row: seen on one token."""
    config = model.config.get_text_config()
    if not any(isinstance(cached, LinearAttentionLayer) for _, cached in cached_layers(config)):
        return 0
    cache = DynamicCache(config=config)
    ids = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    layers = [layer for layer in cache.layers if isinstance(layer, LinearAttentionLayer)]
    states = [[*layer.conv_states.values(), *layer.recurrent_states.values()] for layer in layers]
    return sum(state.nbytes for some in states for state in some if state is not None)


def cache_bytes_per_token(config: PretrainedConfig, *, bytes_per_number: int) -> int:
    """Bytes of one token's keys and values in all layers; 0 if the config does not tell.

    Recurrent layers have none; in Gemma 4 some layers read those of others.
    """
    num_bytes = 0
    for layer, cached in cached_layers(config):
        heads = getattr(layer, "num_attention_heads", 0)
        key_heads = getattr(layer, "num_key_value_heads", None) or heads
        head_size = getattr(layer, "head_dim", None) or (layer.hidden_size // heads if heads else 0)
        num_bytes += 2 * key_heads * head_size * bytes_per_number * isinstance(cached, DynamicLayer)
    return num_bytes


def cached_layers(config: PretrainedConfig) -> list[tuple]:
    """The config of each layer and its cache, still empty; [] for a config that does not tell."""
    try:  # 5.17 makes no cache for the last layers of Gemma 4, which read those of others
        return [*zip(config.per_layer_config, DynamicCache(config=config).layers, strict=False)]
    except (AttributeError, KeyError):
        return []
