"""The output layer and its softmax in blocks, without ever holding all logits.

The logits of 8,192 tokens over a vocabulary of 151,936 take 5 GB, and log-softmax and its gradient
make several tensors of that size. The chunked head goes through the vocabulary in blocks instead,
as Cut Cross-Entropy does (arXiv:2411.09009). In the forward pass a block's logits only add to each
token's log-sum-exp; the backward pass computes them again, except for the first blocks, which are
kept while they fit. Blocks are of the vocabulary, not of the tokens: so a block's rows of the
weight's gradient are complete when the block is done, and only these weights are copied to bf16.
torch 2.13's F.linear_cross_entropy is as fast in fp32, but rounds its result to the dtype of the
hidden states: in bf16 its log-probabilities are 0.015 nats off, these 0.001.

Shapes: M tokens, H hidden size, V vocabulary, v the size of one block of it.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.core.tensors import autocast, context_of

# Bytes of a block's fp32 logits: a CPU's cache holds them; a GPU needs large matrices to be fast.
CPU_BLOCK_BYTES = 2**23
GPU_BLOCK_BYTES = 2**26
KEPT_BYTES = 2**29  # of logits kept for the backward pass; the others are computed twice
# A CPU's columns and tokens in bf16 become multiples: oneDNN keeps kernels of each length of a sum.
BF16_MULTIPLE = 32


class ChunkedScorer(nn.Module):
    """What main.py's CompletionScorer computes, by the chunked head."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype

    def forward(self, input_ids: Tensor, mask: Tensor, *, temperature: float) -> Tensor:
        """Log-probabilities (B, S) of tokens input_ids (B, S) where the mask is True, else 0."""
        mask = mask[:, 1:]  # nothing predicts the first column
        token_ids = input_ids[:, 1:]
        multiple = BF16_MULTIPLE if mask.is_cpu and self.compute_dtype == torch.bfloat16 else 1
        length = input_ids.shape[1]
        room = (context_of(self.model, is_steady=True) or math.inf) - length
        input_ids = F.pad(input_ids, (0, min(-length % multiple, room)))
        with autocast(input_ids.device, self.compute_dtype, cache_casts=False):
            output = self.model.base_model(input_ids=input_ids, use_cache=False)
        hidden = output.last_hidden_state[:, : mask.shape[1]][mask].to(self.compute_dtype)  # (M, H)
        more = -len(hidden) % multiple  # tokens, which masked_scatter leaves over
        hidden = F.pad(hidden, (0, 0, 0, more))
        chosen = F.pad(token_ids[mask], (0, more))
        head = self.model.get_output_embeddings()
        log_probs = head_log_probs(hidden, head, chosen, temperature=temperature)
        return F.pad(log_probs.new_zeros(mask.shape).masked_scatter(mask, log_probs), (1, 0))


def head_log_probs(
    hidden: Tensor, head: nn.Linear, token_ids: Tensor, *, temperature: float
) -> Tensor:
    """log softmax(head(hidden) / temperature) of the given tokens, (M,), in fp32.

    hidden (M, H), token_ids (M,). Matrices are multiplied in the dtype of `hidden`, whatever the
    weight's dtype. Call it outside of autocast, which would choose a dtype itself.
    """
    return HeadLogProbs.apply(hidden, head.weight, head.bias, token_ids, temperature)


class HeadLogProbs(torch.autograd.Function):
    """The maths of `head_log_probs`, with z = logits / temperature and p = softmax(z)."""

    @staticmethod
    def forward(
        ctx,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
    ) -> Tensor:
        """log pi = z of the token itself - log sum exp z; both are summed up block by block."""
        dtype = torch.promote_types(hidden.dtype, torch.float32)  # fp64 if `hidden` is fp64
        chosen = hidden.new_zeros(len(hidden), dtype=dtype)  # (M,)
        log_sum = torch.full_like(chosen, -torch.inf)  # log sum exp z over the blocks so far
        ctx.temperature = temperature
        num_kept = min(len(weight), KEPT_BYTES // (max(1, len(hidden)) * hidden.itemsize))
        kept = hidden.new_empty(len(hidden), num_kept)  # one tensor: many would fragment the heap
        for block in vocabulary_blocks(weight, hidden):
            logits = block_logits(hidden, weight, bias, block)  # (M, v)
            if block.stop <= num_kept:
                kept[:, block] = logits
            z = logits.to(chosen.dtype) / temperature
            log_sum = torch.logaddexp(log_sum, z.logsumexp(dim=1))
            column, is_here = columns_in(token_ids, block)
            chosen += torch.where(is_here, z.gather(1, column)[:, 0], 0.0)
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_sum, kept)
        return chosen - log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs: Tensor) -> tuple[Tensor | None, ...]:
        """d log pi / dz is 1 at the token itself, minus p everywhere."""
        hidden, weight, bias, token_ids, log_sum, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        slope = grad_log_probs / ctx.temperature  # (M,)
        for block in vocabulary_blocks(weight, hidden):
            is_kept = block.stop <= kept.shape[1]
            logits = kept[:, block] if is_kept else block_logits(hidden, weight, bias, block)
            z = logits.to(log_sum.dtype) / ctx.temperature
            grad_logits = z.sub_(log_sum[:, None]).exp_().mul_(-slope[:, None])  # (M, v)
            column, is_here = columns_in(token_ids, block)
            grad_logits.scatter_add_(1, column, torch.where(is_here, slope, 0.0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            if needs_hidden:
                grad_hidden += F.linear(grad_logits, weight[block].to(hidden.dtype).T)
            if needs_weight:
                grad_weight[block] = F.linear(grad_logits.T, hidden.T)
            if needs_bias:
                grad_bias[block] = grad_logits.sum(dim=0)
        return grad_hidden, grad_weight, grad_bias, None, None


def vocabulary_blocks(weight: Tensor, hidden: Tensor) -> Iterator[slice]:
    """Slices of the vocabulary; the fp32 logits of one, for all M tokens, fill a block's bytes."""
    # Tensor cores want bf16 matrices aligned, to multiples of 64.
    num_bytes, multiple = (CPU_BLOCK_BYTES, 1) if hidden.is_cpu else (GPU_BLOCK_BYTES, 64)
    width = num_bytes // (4 * max(1, len(hidden)))
    width = max(multiple, width // multiple * multiple)
    for start in range(0, len(weight), width):
        yield slice(start, min(start + width, len(weight)))


def block_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    """The logits (M, v) of one block, in the dtype of `hidden`."""
    block_bias = None if bias is None else bias[block].to(hidden.dtype)
    return F.linear(hidden, weight[block].to(hidden.dtype), block_bias)


def columns_in(token_ids: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Each token's column within the block (M, 1), and whether it is in the block at all (M,)."""
    is_here = (block.start <= token_ids) & (token_ids < block.stop)
    return torch.where(is_here, token_ids - block.start, 0)[:, None], is_here
