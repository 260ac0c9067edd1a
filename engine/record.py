"""What has been drawn so far, in tensors that change in place, so that a step can be replayed."""

import torch
from torch import Tensor

from engine.types import Completion, SamplingParams


class Record:
    """The tokens of all B rows with log-probabilities and entropies; b rows are still decoded."""

    def __init__(self, num_rows: int, params: SamplingParams, device: torch.device):
        shape, calculator = (num_rows, params.max_new_tokens), params.calculator
        self.params = params
        self.tokens = torch.full(shape, params.pad_id, device=device)  # (B, T)
        self.log_probs, self.entropies = torch.zeros((2, *shape), device=device)  # (B, T) each
        # What the calculator has written ahead of the model; -1 where the model writes itself.
        self.inserts = torch.full(shape, -1, device=device)  # (B, T)
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)  # (B,)
        self.t = torch.zeros(1, dtype=torch.long, device=device)  # the column to be written next
        self.rows = torch.arange(num_rows, device=device)  # (b,), those that are still decoded
        self.active = torch.ones_like(self.rows, dtype=torch.bool)  # (b,), False once ended
        self.eos_ids = torch.tensor(params.eos_ids, device=device)
        self.asking_ids = torch.tensor(calculator.asking_ids if calculator else [], device=device)

    def write(self, tokens: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
        """Write drawn tokens (b,), or the calculator's in their place; return what is written."""
        index, is_drawn = (self.rows, self.t.expand_as(self.rows)), self.active
        if self.params.calculator is not None:
            inserts = self.inserts[index]
            tokens, is_drawn = tokens.where(inserts < 0, inserts), is_drawn & (inserts < 0)
        self.tokens.index_put_(index, tokens.where(self.active, self.params.pad_id))
        self.log_probs.index_put_(index, log_probs.where(is_drawn, 0.0))
        self.entropies.index_put_(index, entropies.where(is_drawn, 0.0))
        self.lengths.index_add_(0, self.rows, self.active.long())
        self.active &= (tokens[:, None] != self.eos_ids).all(dim=1)
        self.t += 1
        return tokens

    def calculate(self, tokens: Tensor) -> None:
        """Where a row's last token (b,) asks for a result, set the tokens that are written next.

        This waits for the GPU, so it is no part of a step, which may be captured.
        """
        if self.params.calculator is None:
            return
        for row in self.rows[self.active & torch.isin(tokens, self.asking_ids)].tolist():
            length = int(self.lengths[row])
            result_ids = self.params.calculator.complete(self.tokens[row, :length].tolist())
            room = self.inserts[row, length : length + len(result_ids)]
            room.copy_(torch.tensor(result_ids[: len(room)], dtype=torch.long))

    def keep(self, indices: Tensor) -> None:
        """Go on with these of the rows that are still decoded."""
        self.rows, self.active = self.rows[indices], self.active[indices]

    def completions(self) -> list[Completion]:
        """The completions of all rows, each cut to its own length."""
        numbers = [x.cpu().numpy() for x in (self.log_probs, self.entropies, self.inserts >= 0)]
        tokens, completions = self.tokens.tolist(), []
        for row, length in enumerate(self.lengths.tolist()):
            log_probs, entropies, is_inserted = (x[row, :length] for x in numbers)
            ids = tokens[row][:length]
            truncated = ids[-1] not in self.params.eos_ids
            completions.append(Completion(ids, log_probs, entropies, truncated, is_inserted))
        return completions
