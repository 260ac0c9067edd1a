"""From logits to a token: every backend draws here, so that all of them draw the same tokens.

A question's random numbers follow from its seed alone. Its tokens are drawn by inverse transform
sampling: the token at which the cumulative probability exceeds a uniform number.
"""

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from engine.core.types import Completion, SamplingParams, Seed

CPU_BLOCK = 2**20  # logits drawn from at a time: a CPU's cache holds what is made of them


def draw_uniforms(seeds: list[Seed], params: SamplingParams) -> Tensor:
    """Uniform random numbers in [0, 1), (N * G, T), each question's from its own seed."""
    shape = (params.group_size, params.max_new_tokens)
    blocks = [np.random.default_rng(seed).random(shape, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.concatenate(blocks))


class TokenBuffer:
    """The tokens of all B rows with log-probabilities and entropies; b rows are still decoded.

    Only `select` replaces tensors, all else changes them in place: a captured graph replays kernels
    on the same addresses, and the Python in it is not run again.
    """

    def __init__(self, num_rows: int, params: SamplingParams, device: torch.device):
        shape = (num_rows, params.max_new_tokens)
        self.params = params
        self.tools = params.conversations or [params.calculator] * num_rows
        if params.stop:
            self.tools = [params.stop.around(tool) for tool in self.tools]
        self.has_tools = self.tools[0] is not None
        asking_ids = self.tools[0].asking_ids if self.has_tools else []
        self.tokens = torch.full(shape, params.pad_id, device=device)  # (B, T)
        self.log_probs, self.entropies = torch.zeros((2, *shape), device=device)  # (B, T) each
        # What a row's tool has written ahead of the model; -1 where the model writes itself.
        self.tool_tokens = torch.full(shape, -1, device=device)  # (B, T)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)  # (B,)
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # the column to be written next
        self.rows = torch.arange(num_rows, device=device)  # (b,), those that are still decoded
        self.active = torch.ones_like(self.rows, dtype=torch.bool)  # (b,), False once ended
        self.end_ids = torch.tensor(sorted({*params.eos_ids} - {*asking_ids}), device=device)
        self.asking_ids = torch.tensor(asking_ids, device=device)

    def draw(self, logits: Tensor, uniforms: Tensor) -> Tensor:
        """Draw the next token of each row from logits (b, V) and uniforms (b,), and append it.

        Returns what the model reads next (b,): the tokens drawn or, where a tool has written ahead,
        the tool's. Rows that have ended get padding. A row ends with the first end token drawn.
        """
        num_rows = max(1, CPU_BLOCK // logits.shape[1]) if logits.is_cpu else len(logits)
        blocks = zip(logits.split(num_rows), uniforms.split(num_rows), strict=True)
        drawn = [sample_tokens(*block, self.params) for block in blocks]
        return self.append(*map(torch.cat, zip(*drawn, strict=True)))

    def append(self, tokens: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
        """Append tokens (b,) with their numbers; see `draw`."""
        index = (self.rows, self.t.expand_as(self.rows))
        is_drawn = self.active
        if self.has_tools:  # what a tool inserts is not drawn: it counts 0, and cannot end the row
            written = self.tool_tokens[index]
            tokens = tokens.where(written < 0, written)
            is_drawn = is_drawn & (written < 0)
        self.tokens.index_put_(index, tokens.where(self.active, self.params.pad_id))
        self.log_probs.index_put_(index, log_probs.where(is_drawn, 0.0))
        self.entropies.index_put_(index, entropies.where(is_drawn, 0.0))
        self.lengths.index_add_(0, self.rows, self.active.long())
        self.active &= (tokens[:, None] != self.end_ids).all(dim=1) | ~is_drawn
        self.t += 1
        return tokens

    def ask_tools(self, tokens: Tensor) -> None:
        """Where a row's last token (b,) asks its tool, set what is written next, or end the row."""
        if not self.has_tools:
            return
        is_drawn = self.tool_tokens[self.rows, self.t - 1] < 0
        asks = self.active & is_drawn & torch.isin(tokens, self.asking_ids)
        # This waits for the GPU, so it is no part of a step, which may be captured.
        for i in asks.nonzero()[:, 0].tolist():
            row = int(self.rows[i])
            length = int(self.t)
            reply_ids = self.tools[row].reply(self.tokens[row, :length].tolist())
            self.active[i] = reply_ids is not None
            room = self.tool_tokens[row, length : length + len(reply_ids or [])]
            room.copy_(torch.tensor((reply_ids or [])[: len(room)], dtype=torch.long))

    def select(self, indices: Tensor) -> None:
        """Go on with these of the rows that are still decoded."""
        self.rows = self.rows[indices]
        self.active = self.active[indices]

    def completions(self) -> list[Completion]:
        numbers = [x.cpu().numpy() for x in (self.log_probs, self.entropies, self.tool_tokens >= 0)]
        tokens = self.tokens.tolist()
        completions = []
        unfinished = set(self.rows[self.active].tolist())
        for row, length in enumerate(self.lengths.tolist()):
            log_probs, entropies, is_inserted = (x[row, :length] for x in numbers)
            conversation = self.params.conversations[row] if self.params.conversations else None
            ids = tokens[row][:length]
            is_unfinished = row in unfinished
            is_text = not is_unfinished and ids[-1] not in self.params.eos_ids
            completions.append(
                Completion(
                    ids, log_probs, entropies, is_unfinished, is_inserted, is_text, conversation
                )
            )
        return completions


class DrawingProcessor(LogitsProcessor):
    """Lets transformers' own loop, `model.generate`, draw: it has one token to choose from."""

    def __init__(self, seeds: list[Seed], params: SamplingParams, device: torch.device):
        self.uniforms = draw_uniforms(seeds, params).to(device)  # (B, T)
        self.drawn = TokenBuffer(len(self.uniforms), params, device)
        self.processors = LogitsProcessorList([self])
        self.stopping_criteria = StoppingCriteriaList([lambda *_: ~self.drawn.active])

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Logits (B, V) of -inf for all but the drawn token."""
        tokens = self.drawn.draw(logits, self.uniforms[:, self.drawn.t[0]])
        self.drawn.ask_tools(tokens)
        return torch.full_like(logits, -torch.inf).scatter(1, tokens[:, None], 0.0)


def sample_tokens(
    logits: Tensor, uniforms: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), by inverse transform sampling.

    logits (B, V) and uniforms (B,) give tokens, log-probabilities and entropies in nats, (B,) each.
    Top-k and top-p only restrict what is drawn: the two numbers are those of the whole
    distribution. Temperature 0 takes the first of the likeliest tokens, scored at temperature 1.
    """
    logits = logits.float()
    if params.temperature not in (0, 1):  # a division by 1 would be one more pass over all logits
        logits = logits / params.temperature
    probs = logits.softmax(dim=-1)  # (B, V)
    # The largest is exp(largest logit) / sum: so log(sum) needs no second pass of exponentials.
    log_sum = logits.amax(dim=-1) - probs.amax(dim=-1).log()  # (B,)
    log_probs = logits - log_sum[:, None]  # (B, V)
    entropies = -(probs * log_probs).nansum(dim=-1)  # NaN is left out: 0 log 0 is 0
    is_broken = log_sum.isnan()  # (B,), rows with a logit of NaN or infinity
    if params.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = draw_indices(keep_likeliest(probs, params.top_p, params.top_k), uniforms)
    # A broken row draws from all tokens alike, since an index out of range would end the process.
    # Its log-probability is NaN: for that the update skips the step.
    noise = (uniforms * probs.shape[1]).long().clamp(max=probs.shape[1] - 1)
    tokens = tokens.where(~is_broken, noise)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen, entropies.masked_fill(is_broken, math.log(probs.shape[1]))


def keep_likeliest(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Set the probabilities (B, V) outside the top k, then those outside the top p, to 0."""
    if 0 < top_k < probs.shape[-1]:
        kth = probs.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
        probs = probs.masked_fill(probs < kth, 0.0)
    if top_p < 1:  # nucleus sampling, arXiv:1904.09751: the fewest tokens with a share p of the sum
        ordered, order = probs.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(dim=-1) - ordered  # the mass of all likelier tokens
        ordered = ordered.masked_fill(before >= top_p * ordered.sum(dim=-1, keepdim=True), 0.0)
        probs = torch.zeros_like(probs).scatter(-1, order, ordered)
    return probs


def draw_indices(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Indices (B,) drawn in proportion to weights (B, V): first a block of 128, then one inside."""
    # The sums of blocks take 5 to 11% of the time of a cumulative sum over all V (one core).
    if weights.shape[1] % 128 != 0:  # most vocabularies are made to fit; padding copies all weights
        weights = F.pad(weights, (0, -weights.shape[1] % 128))
    blocks = weights.unflatten(1, (-1, 128))  # (B, V / 128, 128)
    block, uniforms = invert_cdf(blocks.sum(dim=-1), uniforms)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, 128))[:, 0]  # (B, 128)
    return 128 * block + invert_cdf(inside, uniforms)[0]


def invert_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first index (B,) at which the cumulative sum of weights (B, n) exceeds the uniform.

    Also how far into that index's own weight the uniform falls (B,), a uniform in [0, 1] again.
    cumsum rounds: it may end at 0.9999, so the uniform is scaled by its last value. On a GPU it may
    also fall a little, so that the search lands on a weight of 0: then the largest is taken.
    """
    cdf = weights.cumsum(dim=-1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1)
    index = torch.searchsorted(cdf, threshold, right=True).clamp(max=cdf.shape[1] - 1)
    index = index.where(weights.gather(-1, index) > 0, weights.argmax(dim=-1, keepdim=True))
    share_left = (cdf.gather(-1, index) - threshold) / weights.gather(-1, index)
    return index[:, 0], (1 - share_left[:, 0]).clamp(0, 1)
