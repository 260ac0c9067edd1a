"""Lets transformers' own loop, `model.generate`, draw as main.py's `decode_grouped` does."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import StoppingCriteriaList

from engine.core.types import SamplingParams
from engine.sampling.record import Record


class DrawingProcessor(LogitsProcessor):
    """Draws for `model.generate`, whose own temperature then has one token to choose from."""

    def __init__(
        self,
        uniforms: Tensor,
        params: SamplingParams,
        sample_tokens: Callable[..., tuple[Tensor, Tensor, Tensor]],
        write: Callable[..., Tensor],
    ):
        """`sample_tokens` and `write` are main.py's; `uniforms` (B, T) as `draw_uniforms` gives."""
        self.uniforms, self.sample_tokens, self.write = uniforms, sample_tokens, write
        self.record = Record(len(uniforms), params, uniforms.device)
        self.processors = LogitsProcessorList([self])
        self.criteria = StoppingCriteriaList([lambda *_: ~self.record.active])

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Logits (B, V) of -inf for all but the drawn token."""
        record = self.record
        drawn = self.sample_tokens(logits, self.uniforms[:, record.t[0]], record.params)
        tokens = self.write(record, *drawn)
        record.insert_replies(tokens)
        return torch.full_like(logits, -torch.inf).scatter(1, tokens[:, None], 0.0)


def get_generation_config(params: SamplingParams) -> GenerationConfig:
    """A fresh generation config: nothing of the hub's leaks into sampling.

    transformers fills a field left None from the model's own generation config. That is emptied at
    load, and what such configs set is set here too.
    """
    return GenerationConfig(
        do_sample=True,  # without it generate refuses several samples of a prompt
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature or 1.0,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=0.0,
        typical_p=1.0,
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        num_return_sequences=params.group_size,
        eos_token_id=[] if params.conversations else list(params.eos_ids),
        pad_token_id=params.pad_id,
    )
