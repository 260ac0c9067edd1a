"""The decode loop of the default: each prompt is read once, and its cache repeated for the group.

It draws the tokens that main.py's `generate` draws, up to rounding, and is several times as fast
(benchmarks/RESULTS.md): rows that have ended leave the batch, and on a GPU steps are CUDA graphs.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.core.signals import leave_if_signalled
from engine.core.tensors import left_pad
from engine.core.types import Completion, Progress, Prompts, SamplingParams, Seed
from engine.sampling.cache import ReservedColumns
from engine.sampling.draw import TokenBuffer, draw_uniforms

STEPS_PER_CHECK = 16  # if replayed, until ended rows are dropped: each time makes another shape


@torch.inference_mode()  # not no_grad: each of a step's 500 operations costs less
def decode_grouped(
    model: nn.Module,
    prompts: Prompts,
    seeds: list[Seed],
    params: SamplingParams,
    *,
    on_progress: Progress,
    replayed: "Callable[[DecodeBatch], Callable[[int], None]] | None" = None,
) -> list[Completion]:
    """Sample N * G completions; `replayed`, CapturedSteps, makes a step one of a CUDA graph."""
    batch = DecodeBatch(model, prompts, draw_uniforms(seeds, params), params)
    step, steps_per_check = (replayed(batch), STEPS_PER_CHECK) if replayed else (batch.step, 1)
    drawn = batch.drawn
    num_unfinished = len(batch.tokens)
    longest = max(map(len, prompts))
    for t in range(1, params.max_new_tokens):
        drawn.ask_tools(batch.tokens[:, 0])  # a calculator or an environment
        if t == 1 or t % steps_per_check == 0:
            leave_if_signalled()
            active = drawn.active  # (B,), False for the rows that have drawn an end token
            num_active = int(active.sum())
            on_progress(num_unfinished - num_active)
            num_unfinished = num_active
            if num_active == 0:
                break
            if num_active <= 0.85 * len(active):  # not at every end, since it copies the cache
                batch.select(active.nonzero()[:, 0])
        step(longest + t + 1)  # up to the column of the token drawn now, which the mask still hides
    drawn.ask_tools(batch.tokens[:, 0])  # a last turn that just fitted
    on_progress(num_unfinished)
    return drawn.completions()


class DecodeBatch:
    """Rows that are decoded together: each step draws one more token of every row.

    The prompts fill the first P columns, padded on the left; each step fills the next column in
    place (see `TokenBuffer`). `select` makes new tensors, and so does a cache that has to grow.
    """

    def __init__(
        self, model: nn.Module, prompts: Prompts, uniforms: Tensor, params: SamplingParams
    ):
        """Read each prompt once, repeat its cache, and draw the first token of each row."""
        self.model = model
        self.cache = None
        self.uniforms = uniforms.to(model.device)  # (B, T)
        self.drawn = TokenBuffer(len(uniforms), params, model.device)
        # Ask for the last position with an index tensor: the number 1 makes a strided slice, and on
        # a CPU F.linear then copies the whole head matrix once per row.
        self.last_column = torch.full((1,), -1, device=model.device)
        prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
        # Positions count tokens alone, so that padding on the left shifts nothing.
        positions = (prompt_mask.long().cumsum(dim=1) - 1).clamp(min=0)  # (N, P)
        logits = self.read(prompt_ids, prompt_mask, positions)  # (N, V)
        group = torch.arange(len(uniforms), device=model.device) // params.group_size
        self.cache.reorder_cache(group)  # the one call that moves a recurrent layer's state too
        self.positions = prompt_mask.sum(dim=1, keepdim=True)[group] - 1  # (B, 1), of what was read
        self.tokens = torch.zeros_like(self.positions)  # (B, 1), the last ones drawn
        self.column = torch.full((1,), prompt_ids.shape[1] - 1, device=model.device)  # last filled
        self.reserved = ReservedColumns(model, self.cache, self.column)
        room = params.max_new_tokens  # and more, to whole 16s: else sdpa would copy the mask
        room += -(prompt_ids.shape[1] + room) % 16
        self.mask = self.reserved.mask_for(F.pad(prompt_mask, (0, room), value=False)[group])
        self.draw(logits[group])

    def step(self, num_columns: int) -> None:
        """Read the last tokens and draw the next; attention sees the first `num_columns`."""
        self.column += 1
        self.positions += 1
        visible = self.reserved.visible_mask(self.mask, num_columns)
        self.draw(self.read(self.tokens, visible, self.positions))

    def read(self, token_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Let the model read tokens into its cache; return the logits of what follows (B, V)."""
        output = self.model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=self.last_column,
        )
        self.cache = output.past_key_values
        return output.logits[:, -1]

    def draw(self, logits: Tensor) -> None:
        """Draw and record the next token of each row from logits (B, V)."""
        uniforms = self.uniforms.index_select(1, self.drawn.t)[:, 0]  # (B,)
        self.tokens.copy_(self.drawn.draw(logits, uniforms)[:, None])

    def select(self, indices: Tensor) -> None:
        self.drawn.select(indices)
        self.mask = self.mask[indices]
        self.positions = self.positions[indices]
        self.tokens = self.tokens[indices]
        self.uniforms = self.uniforms[indices]
        self.cache.reorder_cache(indices)
