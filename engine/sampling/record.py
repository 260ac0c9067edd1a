"""What has been drawn so far. main.py's `write` adds a token of each row, and ends rows."""

import torch
from torch import Tensor

from engine.core.types import Completion, SamplingParams


class Record:
    """The tokens of all B rows with log-probabilities and entropies; b rows are still decoded."""

    def __init__(self, num_rows: int, params: SamplingParams, device: torch.device):
        shape = (num_rows, params.max_new_tokens)
        self.params = params
        self.tools = params.conversations or [params.calculator] * num_rows
        asking_ids = self.tools[0].asking_ids if self.tools[0] is not None else []
        self.tokens = torch.full(shape, params.pad_id, device=device)  # (B, T)
        self.log_probs, self.entropies = torch.zeros((2, *shape), device=device)  # (B, T) each
        # What a row's tool has written ahead of the model; -1 where the model writes itself.
        self.inserts = torch.full(shape, -1, device=device)  # (B, T)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)  # (B,)
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # the column to be written next
        self.rows = torch.arange(num_rows, device=device)  # (b,), those that are still decoded
        self.active = torch.ones_like(self.rows, dtype=torch.bool)  # (b,), False once ended
        self.end_ids = torch.tensor(sorted({*params.eos_ids} - {*asking_ids}), device=device)
        self.asking_ids = torch.tensor(asking_ids, device=device)

    @property
    def has_tools(self) -> bool:
        return self.tools[0] is not None

    def insert_replies(self, tokens: Tensor) -> None:
        """Where a row's last token (b,) asks its tool, set what is written next, or end the row.

        This waits for the GPU, so it is no part of a step, which may be captured.
        """
        if not self.has_tools:
            return
        is_drawn = self.inserts[self.rows, self.t - 1] < 0
        asks = self.active & is_drawn & torch.isin(tokens, self.asking_ids)
        for i in asks.nonzero()[:, 0].tolist():
            row, length = int(self.rows[i]), int(self.t)
            reply_ids = self.tools[row].reply(self.tokens[row, :length].tolist())
            self.active[i] = reply_ids is not None
            room = self.inserts[row, length : length + len(reply_ids or [])]
            room.copy_(torch.tensor((reply_ids or [])[: len(room)], dtype=torch.long))

    def select(self, indices: Tensor) -> None:
        """Go on with these of the rows that are still decoded."""
        self.rows, self.active = self.rows[indices], self.active[indices]

    def completions(self) -> list[Completion]:
        """The completions of all rows, each cut to its own length."""
        numbers = [x.cpu().numpy() for x in (self.log_probs, self.entropies, self.inserts >= 0)]
        tokens, completions = self.tokens.tolist(), []
        unfinished = set(self.rows[self.active].tolist())
        for row, length in enumerate(self.lengths.tolist()):
            log_probs, entropies, is_inserted = (x[row, :length] for x in numbers)
            conversation = self.tools[row] if self.params.conversations else None
            ended = (row in unfinished, is_inserted, conversation)
            completions.append(Completion(tokens[row][:length], log_probs, entropies, *ended))
        return completions
