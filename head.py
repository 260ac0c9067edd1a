"""log pi of given tokens straight from hidden states: no tensor is as large as all logits.

The logits of 8,192 tokens over a vocabulary of 151,936 take 5 GB, and log-softmax and its gradient
make several tensors of that size. Here the vocabulary goes by in blocks, as in Cut Cross-Entropy
(arXiv:2411.09009): a block's logits only add to each token's log-sum-exp, and the backward pass
computes them again, apart from the first ones, which are kept while they fit.

Blocks of the vocabulary, not of the tokens: so each block completes its own rows of the weight's
gradient, and a bf16 copy of the weight is as small as a block.

Shapes: M tokens to score, H hidden size, V vocabulary, v the size of one block of it.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

# Of a block's fp32 logits: what stays in the CPU's cache, or keeps a GPU's matrices large
CPU_BLOCK_BYTES, GPU_BLOCK_BYTES = 2**23, 2**26
KEPT_BYTES = 2**29  # of logits that wait for the backward pass; the others are computed twice


def head_log_probs(
    hidden: torch.Tensor, head: nn.Linear, token_ids: torch.Tensor, *, temperature: float
) -> torch.Tensor:
    """log softmax(head(hidden) / temperature) of the given tokens, (M,), in fp32.

    hidden (M, H), token_ids (M,). Matrices are multiplied in the dtype of `hidden`, whatever the
    weight's: to be called outside of autocast.
    """
    return HeadLogProbs.apply(hidden, head.weight, head.bias, token_ids, temperature)


class HeadLogProbs(torch.autograd.Function):
    """The maths of `head_log_probs`, with z = logits / temperature and p = softmax(z)."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, temperature):
        chosen = torch.zeros(len(hidden), dtype=wide(hidden.dtype), device=hidden.device)  # (M,)
        log_sum = torch.full_like(chosen, -torch.inf)  # log sum exp z over the blocks so far
        ctx.temperature = temperature
        num_kept = min(len(weight), KEPT_BYTES // (max(1, len(hidden)) * hidden.itemsize))
        kept = hidden.new_empty(len(hidden), num_kept)  # one tensor: many would fragment the heap
        for block in blocks(weight, hidden):
            logits = block_logits(hidden, weight, bias, block)  # (M, v)
            if block.stop <= num_kept:
                kept[:, block] = logits
            z = logits.to(chosen.dtype) / temperature
            log_sum = torch.logaddexp(log_sum, z.logsumexp(dim=1))
            column, is_here = find(token_ids, block)
            chosen += torch.where(is_here, z.gather(1, column)[:, 0], 0.0)
        ctx.save_for_backward(hidden, weight, bias, token_ids, log_sum, kept)
        return chosen - log_sum

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs):
        """d log pi / dz is 1 at the token itself, minus p everywhere."""
        hidden, weight, bias, token_ids, log_sum, kept = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_sum.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        grad_bias = torch.empty_like(bias) if needs_bias else None
        slope = grad_log_probs / ctx.temperature  # (M,)
        for block in blocks(weight, hidden):
            is_kept = block.stop <= kept.shape[1]
            logits = kept[:, block] if is_kept else block_logits(hidden, weight, bias, block)
            z = logits.to(log_sum.dtype) / ctx.temperature
            grad_logits = z.sub_(log_sum[:, None]).exp_().mul_(-slope[:, None])  # (M, v)
            column, is_here = find(token_ids, block)
            grad_logits.scatter_add_(1, column, torch.where(is_here, slope, 0.0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            if needs_hidden:
                grad_hidden += grad_logits @ weight[block].to(hidden.dtype)
            if needs_weight:
                grad_weight[block] = grad_logits.T @ hidden
            if needs_bias:
                grad_bias[block] = grad_logits.sum(dim=0)
        return grad_hidden, grad_weight, grad_bias, None, None


def blocks(weight: torch.Tensor, hidden: torch.Tensor) -> Iterator[slice]:
    """The vocabulary in slices, whose logits of all tokens have the bytes of a block."""
    num_bytes = CPU_BLOCK_BYTES if hidden.device.type == "cpu" else GPU_BLOCK_BYTES
    width = max(1, num_bytes // (4 * max(1, len(hidden))))
    for start in range(0, len(weight), width):
        yield slice(start, min(start + width, len(weight)))


def block_logits(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, block: slice
) -> torch.Tensor:
    """(M, v), in the dtype of `hidden`."""
    block_bias = None if bias is None else bias[block].to(hidden.dtype)
    return F.linear(hidden, weight[block].to(hidden.dtype), block_bias)


def find(token_ids: torch.Tensor, block: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's column in the block (M, 1), and whether it is in there at all (M,)."""
    is_here = (block.start <= token_ids) & (token_ids < block.stop)
    return torch.where(is_here, token_ids - block.start, 0)[:, None], is_here


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the softmax: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)
