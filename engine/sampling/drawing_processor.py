"""Lets transformers' own loop, `model.generate` (main.py), draw as every backend does."""

import torch
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from engine.core.types import SamplingParams, Seed
from engine.sampling.draw import TokenBuffer, draw_uniforms


class DrawingProcessor(LogitsProcessor):
    """Draws for `model.generate`, whose own temperature then has one token to choose from."""

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
