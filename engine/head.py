"""log pi of given tokens: for whole completions, and without ever holding all logits.

The logits of 8,192 tokens over a vocabulary of 151,936 take 5 GB, and log-softmax and its gradient
make several tensors of that size. The chunked head goes through the vocabulary in blocks instead,
as Cut Cross-Entropy does (arXiv:2411.09009). In the forward pass a block's logits only add to each
token's log-sum-exp; the backward pass computes them again, except for the first blocks, which are
kept while they fit.

The vocabulary is cut into blocks rather than the tokens, because then each block completes its own
rows of the weight's gradient, and only one block of the weight has to be copied to bf16 at a time.

Shapes: M tokens to score, H hidden size, V vocabulary, v the size of one block of it; B rows, P
longest prompt, T completion tokens. Masks are bool, True = keep.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from engine.sampler import position_ids

# Bytes of a block's fp32 logits: they fit into a CPU's cache, or keep a GPU's matrices large.
CPU_BLOCK_BYTES, GPU_BLOCK_BYTES = 2**23, 2**26
KEPT_BYTES = 2**29  # of logits kept for the backward pass; the others are computed twice


class CompletionScorer(nn.Module):
    """log pi of completions. It is an nn.Module because DDP wraps the forward of a module."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, chunked: bool):
        """With `chunked` no tensor holds all logits; `supports_chunked_head` must allow it."""
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.chunked = chunked
        self.keeps_casts = True  # weights that autocast has made bf16, until the pass ends

    def forward(
        self, input_ids: Tensor, mask: Tensor, *, num_tokens: int, temperature: float
    ) -> Tensor:
        """Log-probabilities (B, T) of the last T = num_tokens columns of input_ids (B, P + T).

        `mask` (B, P + T) is False on padding, which may be on both sides and scores 0.
        """
        inputs = model_inputs(input_ids, mask)
        token_ids, is_kept = input_ids[:, -num_tokens:], mask[:, -num_tokens:]  # (B, T)
        with autocast(input_ids.device, self.compute_dtype, keeps_casts=self.keeps_casts):
            # What the model computes at a position predicts the token after it.
            if self.chunked:
                hidden = self.model.base_model(**inputs).last_hidden_state
                hidden = hidden[:, -num_tokens - 1 : -1]  # (B, T, H)
            else:
                columns = torch.arange(-num_tokens - 1, -1, device=input_ids.device)
                logits = self.model(**inputs, logits_to_keep=columns).logits
        if not self.chunked:
            log_probs = token_log_probs(logits, token_ids, temperature=temperature)
            return log_probs.masked_fill(~is_kept, 0.0)
        log_probs = head_log_probs(
            hidden[is_kept].to(self.compute_dtype),
            self.model.get_output_embeddings(),
            token_ids[is_kept],
            temperature=temperature,
        )  # (M,)
        return log_probs.new_zeros(is_kept.shape).masked_scatter(is_kept, log_probs)


def autocast(
    device: torch.device, dtype: torch.dtype, *, keeps_casts: bool = True
) -> torch.autocast:
    """Multiplies matrices in bf16, whatever the weights are; with fp32 it changes nothing."""
    return torch.autocast(
        device.type,
        dtype=torch.bfloat16,
        enabled=dtype == torch.bfloat16,
        cache_enabled=keeps_casts,
    )


def model_inputs(input_ids: Tensor, mask: Tensor) -> dict[str, Any]:
    """The arguments of a model's forward over whole rows (B, P + T)."""
    return {
        "input_ids": input_ids,
        "attention_mask": mask,
        "position_ids": position_ids(mask),
        "use_cache": False,
    }


def token_log_probs(logits: Tensor, token_ids: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of the given tokens; (B, T, V) and (B, T) to (B, T)."""
    logits = logits.float() / temperature
    chosen = logits.gather(-1, token_ids[..., None])[..., 0]
    return chosen - logits.logsumexp(dim=-1)


@torch.no_grad()
def supports_chunked_head(model: nn.Module) -> bool:
    """Whether the logits are exactly those of a plain linear head on the last hidden states.

    False for models that cap or scale their logits, such as Gemma 2, and for heads that are
    quantised or have an adapter. A cap hardly changes small logits, such as those of a model that
    is not trained yet, so on a short made-up input only rounding may differ.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return False
    ids = torch.arange(1, 7, device=model.device)[None] % head.out_features  # (1, 6)
    inputs = model_inputs(ids, torch.ones_like(ids, dtype=torch.bool))
    expected = model(**inputs).logits
    try:
        logits = head(model.base_model(**inputs).last_hidden_state)
    except (AttributeError, NotImplementedError, TypeError, ValueError, RuntimeError):
        return False
    if logits.shape != expected.shape:
        return False
    return bool((logits - expected).abs().max() <= 1e-6 * expected.abs().max())


# The chunked head


def head_log_probs(
    hidden: Tensor, head: nn.Linear, token_ids: Tensor, *, temperature: float
) -> Tensor:
    """log softmax(head(hidden) / temperature) of the given tokens, (M,), in fp32.

    hidden (M, H), token_ids (M,). Matrices are multiplied in the dtype of `hidden`, whatever the
    weight's is, so call it outside of autocast.
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
        chosen = torch.zeros(len(hidden), dtype=softmax_dtype(hidden), device=hidden.device)  # (M,)
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
            column, is_here = find_tokens(token_ids, block)
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
            column, is_here = find_tokens(token_ids, block)
            grad_logits.scatter_add_(1, column, torch.where(is_here, slope, 0.0)[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            if needs_hidden:
                grad_hidden += grad_logits @ weight[block].to(hidden.dtype)
            if needs_weight:
                grad_weight[block] = grad_logits.T @ hidden
            if needs_bias:
                grad_bias[block] = grad_logits.sum(dim=0)
        return grad_hidden, grad_weight, grad_bias, None, None


def vocabulary_blocks(weight: Tensor, hidden: Tensor) -> Iterator[slice]:
    """Slices of the vocabulary, each so wide that the fp32 logits of all M tokens fill a block.

    On a GPU the width is a multiple of 64: tensor cores want bf16 matrices aligned.
    """
    is_cpu = hidden.device.type == "cpu"
    num_bytes, multiple = (CPU_BLOCK_BYTES, 1) if is_cpu else (GPU_BLOCK_BYTES, 64)
    width = num_bytes // (4 * max(1, len(hidden)))
    width = max(multiple, width // multiple * multiple)
    for start in range(0, len(weight), width):
        yield slice(start, min(start + width, len(weight)))


def block_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, block: slice) -> Tensor:
    """The logits (M, v) of one block, in the dtype of `hidden`."""
    block_bias = None if bias is None else bias[block].to(hidden.dtype)
    return F.linear(hidden, weight[block].to(hidden.dtype), block_bias)


def find_tokens(token_ids: Tensor, block: slice) -> tuple[Tensor, Tensor]:
    """Each token's column within the block (M, 1), and whether it is in the block at all (M,)."""
    is_here = (block.start <= token_ids) & (token_ids < block.stop)
    return torch.where(is_here, token_ids - block.start, 0)[:, None], is_here


def softmax_dtype(hidden: Tensor) -> torch.dtype:
    """The softmax is computed in fp32, or in fp64 if `hidden` is fp64."""
    return torch.promote_types(hidden.dtype, torch.float32)
