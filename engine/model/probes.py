"""What a model can do, found out on made-up tokens when it is loaded."""

from contextlib import suppress

import torch
from torch import nn

from engine.core.tensors import autocast, context_of
from engine.core.types import Log


@torch.no_grad()
def check_causal(model: nn.Module) -> None:
    """Raise ValueError if the model sees later tokens, as BERT and other encoders do."""
    ids = torch.tensor([[0, 1, 2, 3], [0, 1, 3, 2]], device=model.device)
    with autocast(model.device, model.dtype):
        one, other = model.eval()(input_ids=ids).logits[:, :2].float()
    if not torch.allclose(one, other, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise ValueError("it sees the tokens that come later, so it cannot write text: an encoder")


@torch.no_grad()
def supports_dtype(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether arithmetic in 16 bits gives finite logits near those in the weights' own dtype.

    Of the largest logit, SmolLM2-135M's differ by 0.1% in float16 and by 0.9% in bf16; 1.6% pass.
    """
    ids = torch.arange(1, 65, device=model.device)[None, : context_of(model)]  # made-up tokens
    ids %= model.config.vocab_size
    with autocast(model.device, model.dtype):
        expected = model(input_ids=ids).logits.float()
    with autocast(model.device, dtype):
        difference = (model(input_ids=ids).logits - expected).abs().mean()
    return bool(difference <= 2**-6 * expected.abs().max())  # as above; False for NaN


@torch.no_grad()
def supports_chunked_head(model: nn.Module, log: Log) -> bool:
    """Whether the logits are exactly those of a plain linear head on the last hidden states.

    If not, that is logged. Only rounding may differ: a cap hardly changes small logits.
    """
    head = model.get_output_embeddings()
    is_plain = False
    if type(head) is nn.Linear:
        ids = torch.arange(1, 7, device=model.device)[None] % head.out_features  # (1, 6)
        inputs = {"input_ids": ids, "use_cache": False}
        with autocast(ids.device, model.dtype):  # an adapter's fp32 weights on bf16 layers
            expected = model(**inputs).logits
            with suppress(AttributeError, TypeError, ValueError, RuntimeError):
                logits = head(model.base_model(**inputs).last_hidden_state)
                difference = (logits - expected).abs().max()  # RuntimeError for other shapes
                is_plain = bool(difference <= 1e-6 * expected.abs().max())
    if not is_plain:
        log("this model's logits are more than head(hidden): the update holds all at once")
    return is_plain
