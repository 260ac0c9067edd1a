"""Which questions are decoded together: as many as the memory holds."""

import ctypes
import functools
import math
import resource
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from engine.core.types import Completion, DecodeLoop, PromptBatch, SamplingParams

# Of the rows that a CPU decodes at once; more rows than these are hardly faster, each for itself.
CPU_BATCH_BYTES = 2**30
CPU_BATCH_TOKENS = 524_288
SMALL_PROCESS_KB = 2**20  # at its peak


def decode_in_batches(
    sampler: Any,  # a LoopSampler or a VllmEngine
    prompts: PromptBatch,
    params: SamplingParams,
    max_batch_tokens: int | None,
    logger: Any,
    *,
    generate: DecodeLoop,
) -> list[list[Completion]]:
    """Sample a group of completions of each prompt: one list per prompt, in their order.

    `generate` is main.py's loop, for a sampler that has none of its own.

    Questions are decoded together, longest prompts first, while rows * (longest + new tokens)
    <= `max_batch_tokens`; None is as many as the GPU holds if they end as early as most do, or as
    take about 1 GB on a CPU. If a GPU's memory runs out all the same, they are decoded again in
    halves: the random numbers are the questions' own. Conversations cannot begin again.
    """
    token_ids = prompts.token_ids
    conversations = prompts.conversations
    groups = [[] for _ in token_ids]
    by_length = sorted(range(len(token_ids)), key=lambda i: -len(token_ids[i]))
    most = len(token_ids)
    trim_heap()  # of what the last update has left
    with logger.progress(range(len(token_ids) * params.group_size), "sampling", "seq") as bar:
        while by_length:
            longest = len(token_ids[by_length[0]])
            fit = max_batch_tokens or sampler.tokens_at_once(longest, params)
            num_rows = fit // (longest + params.max_new_tokens)
            batch = by_length[: min(most, max(1, num_rows // params.group_size))]
            rows = [row for i in batch for row in conversations[i]] if conversations else []
            try:
                completions = sampler.decode(
                    [token_ids[i] for i in batch],
                    [prompts.seeds[i] for i in batch],
                    replace(params, conversations=rows),
                    on_progress=bar.update,
                    generate=generate,
                )
            except torch.OutOfMemoryError:
                if len(batch) == 1 or conversations:
                    raise
                most = math.ceil(len(batch) / 2)
                continue
            by_length = by_length[len(batch) :]
            for j, i in enumerate(batch):
                groups[i] = completions[j * params.group_size :][: params.group_size]
    trim_heap()
    return groups


def trim_heap() -> None:
    """Give the free memory of the process back to the system, where the C library can (glibc).

    The tensors of each rollout and each update have other shapes: where they were freed, the heap
    keeps holes that the next ones do not fit into. It then grows though nothing is kept. A small
    process is left alone, since it would only ask for the same pages again.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim and resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > SMALL_PROCESS_KB:
        trim(0)


def tokens_that_fit(model: nn.Module, longest: int, params: SamplingParams) -> int:
    """How many tokens, of prompts and completions, can be decoded at once; `longest` is a prompt.

    On a GPU as many as fit into the memory now free; on a CPU, whose caches many rows do not help,
    as many as take `CPU_BATCH_BYTES` if each row gets as long as it may.
    """
    device = model.device
    row_tokens = longest + params.max_new_tokens
    config = model.config.get_text_config()
    cached, states = kept_bytes(model)
    is_cuda = device.type == "cuda"
    likely = longest + (0.7 if is_cuda else 1.0) * params.max_new_tokens  # most end early
    row = states + decode_bytes_per_row(config, likely, cached=cached, top_p=params.top_p)
    if not is_cuda:
        return min(CPU_BATCH_TOKENS, int(CPU_BATCH_BYTES / row) * row_tokens)
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = torch.cuda.mem_get_info(device)[0] + reserved
    hidden_size = getattr(config, "hidden_size", 0)
    inner_size = getattr(config, "intermediate_size", None) or 4 * hidden_size
    layer = model.dtype.itemsize * (5 * hidden_size + 3 * inner_size)  # of a prompt's token
    reading = longest * (cached + layer) / params.group_size  # of all prompts, before they grow
    return int(0.9 * free / max(row, reading)) * row_tokens  # a tenth for fragmentation


def decode_bytes_per_row(
    config: PretrainedConfig, row_tokens: float, *, cached: int, top_p: float
) -> float:
    """The most bytes that a row takes while it is decoded; `cached` are a token's in the cache."""
    cache = row_tokens * cached
    growing = cache / getattr(config, "num_hidden_layers", 1)  # one layer at a time is copied
    num_copies = 6 if top_p == 1 else 13  # top-p sorts them
    drawing = num_copies * 4 * config.vocab_size  # fp32 logits and what `sample_tokens` makes
    return cache + growing + drawing


@functools.lru_cache(1)  # of the model that samples
@torch.no_grad()
def kept_bytes(model: nn.Module) -> tuple[int, int]:
    """Bytes of a token's keys and values, and of a row's recurrent states: seen on two tokens."""
    # On one token, torch 2.13 may compile a kernel for a GPU, which needs a C compiler.
    ids = torch.zeros((1, 2), dtype=torch.long, device=model.device)
    cache = getattr(model(input_ids=ids, use_cache=True), "past_key_values", None)  # Mamba has none
    keys = []
    states = []
    for layer in cache.layers if cache else []:
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            keys += [layer.keys, layer.values]
        if isinstance(layer, LinearAttentionLayer):
            states += [*layer.conv_states.values(), *layer.recurrent_states.values()]
    return sum(x.nbytes for x in keys) // 2, sum(x.nbytes for x in states if x is not None)
