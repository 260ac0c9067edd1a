"""Caches with room, where transformers would copy all columns of a cache to append one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

# Columns by which a cache grows. Most rows end early: all at once would waste half of the memory.
GROWTH = 256


class ReservedColumns:
    """Empty columns ahead in a cache, if its model can use them; else the cache stays as it is.

    They need an attention that accepts a mask over unused columns: flash_attention_2 does not. A
    sliding window becomes a mask as well; its layer then keeps the columns that it would drop. A
    recurrent layer has a state instead of columns, and writes it in place already.
    """

    def __init__(self, model: nn.Module, cache: Cache, column: Tensor):
        """The tensor `column` (1,) says where a token is written; the caller moves it on."""
        self.cache = cache
        self.dtype = model.dtype
        self.lowest = torch.finfo(self.dtype).min
        text = model.config.get_text_config()
        self.column = column
        plain = (DynamicLayer, DynamicSlidingWindowLayer)  # Llama 4 has the latter for its chunks
        growing = [layer for layer in cache.layers if isinstance(layer, DynamicLayer)]
        self.is_possible = bool(growing) and all(type(layer) in plain for layer in growing)
        self.is_possible &= "chunked_attention" not in (getattr(text, "layer_types", None) or [])
        self.is_possible &= text._attn_implementation in ("sdpa", "eager")
        if self.is_possible:
            sliding = [layer for layer in growing if layer.is_sliding]
            self.window = sliding[0].sliding_window if sliding else None
            self.is_mixed = 0 < len(sliding) < len(growing)
            for i, layer in enumerate(cache.layers):
                if layer in growing:
                    cache.layers[i] = ReservedLayer(layer, column)

    def mask_for(self, mask: Tensor) -> Tensor:
        """The mask (B, C) as attention wants it here, made once for all steps.

        Where there are empty columns it is added to the scores, (B, 1, 1, C): on a GPU, sdpa would
        make that of True and False anew in each layer.
        """
        if not self.is_possible:
            return mask
        hidden = ~mask[:, None, None]
        return torch.zeros_like(hidden, dtype=self.dtype).masked_fill(hidden, self.lowest)

    def visible_mask(self, mask: Tensor, num_columns: int) -> Tensor | dict[str, Tensor]:
        """Let attention see the first `num_columns`, and the token written now: the mask for them.

        Where only some layers have a sliding window, it is two, by the names that models look for.
        """
        if not self.is_possible:
            return mask.index_fill_(1, self.column, True)[:, : num_columns - 1]
        for layer in self.cache.layers:
            if isinstance(layer, ReservedLayer):
                layer.grow(num_columns, limit=mask.shape[3])
        full = mask.index_fill_(3, self.column, 0.0)[..., :num_columns]
        if self.window is None:
            return full
        is_old = torch.arange(num_columns, device=mask.device) <= self.column - self.window
        sliding = full.masked_fill(is_old, self.lowest)
        return {"full_attention": full, "sliding_attention": sliding} if self.is_mixed else sliding


class ReservedLayer(DynamicLayer):
    """A cache layer with empty columns ahead."""

    def __init__(self, layer: DynamicLayer, column: Tensor):
        super().__init__()
        self.is_initialized = True
        self.dtype = layer.keys.dtype
        self.device = layer.keys.device
        self.column = column
        self.num_visible = layer.get_seq_length()
        self.keys = layer.keys
        self.values = layer.values
        self.num_dropped = self.num_visible - layer.keys.shape[2]  # columns, by a sliding window

    def grow(self, num_columns: int, *, limit: int) -> None:
        """Let attention see the first `num_columns`; if room is short, add some, up to `limit`."""
        self.num_visible = num_columns
        if num_columns > self.keys.shape[2]:
            left = self.num_dropped
            self.num_dropped = 0
            right = grown_length(num_columns, limit=limit) - self.keys.shape[2] - left
            padding = (0, 0, left, right)
            self.keys = F.pad(self.keys, padding)
            self.values = F.pad(self.values, padding)

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Write one token's keys and values (B, heads, 1, head size); return all visible ones."""
        self.keys.index_copy_(2, self.column, keys)
        self.values.index_copy_(2, self.column, values)
        return self.keys[:, :, : self.num_visible], self.values[:, :, : self.num_visible]


def grown_length(num_columns: int, *, limit: int) -> int:
    """The next multiple of GROWTH, at most the limit."""
    return min(-(-num_columns // GROWTH) * GROWTH, limit)
