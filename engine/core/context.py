"""How many tokens a model can see, by its own config."""

from torch import nn


def context_of(model: nn.Module, *, is_steady: bool = False) -> int | None:
    """The most tokens of a row; None for no limit.

    With longrope and "dynamic" the positions of all rows of a batch turn otherwise once the longest
    is above original_max_position_embeddings: `is_steady` asks for the context up to there.
    """
    text = model.config.get_text_config()
    limits = [getattr(text, "max_position_embeddings", None)]
    rotary = getattr(text, "rope_parameters", None) or {}
    for kind in [rotary, *rotary.values()] if is_steady else ():  # one, or one of a type of layers
        if isinstance(kind, dict) and kind.get("rope_type") in ("longrope", "dynamic"):
            limits.append(kind.get("original_max_position_embeddings"))
    return min(filter(None, limits), default=None)
