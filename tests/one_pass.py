"""The law of sampling: a token is the one that its uniform number draws from a plain forward pass.

The pass reads prompt and completion of one row alone: no cache, no padding, no batch.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from engine.core.types import Completion, Seed
from engine.model.policy import Policy
from engine.sampling.draw import keep_likeliest

ATOL = 1e-4  # fp32 log-probabilities, down to -20, differ by the rounding of some 100 operations


def assert_plain(
    policy: Policy,
    prompts: list[list[int]],
    seeds: list[Seed],
    groups: list[list[Completion]],
    *,
    rounding: float | None = None,
    **changes,
) -> None:
    """Each completion has the tokens, numbers and end of one plain pass, but for `rounding`.

    That is of a uniform's place in the cumulative sum, by default V times 2**-24, or of a greedy
    token's logit, by default 0. `changes` are to the policy's sampling parameters.
    """
    policy = replace(policy, params=replace(policy.params, **changes))
    for prompt, words, group in zip(prompts, seeds, groups, strict=True):
        shape = (len(group), policy.params.max_new_tokens)
        uniforms = np.random.default_rng(list(words)).random(shape, dtype=np.float32)
        for completion, row in zip(group, uniforms, strict=True):
            assert_row(policy, prompt, completion, row, rounding)


def assert_row(
    policy: Policy,
    prompt: list[int],
    completion: Completion,
    uniforms: np.ndarray,
    rounding: float | None,
) -> None:
    params, ids = policy.params, completion.token_ids
    is_drawn = torch.from_numpy(~completion.is_inserted)  # (T,), False for what a tool has written
    if completion.conversation is None:  # else its environment may end it
        ends = [i in params.eos_ids and bool(drawn) for i, drawn in zip(ids, is_drawn, strict=True)]
        assert not any(ends[:-1]) and completion.truncated == (not ends[-1])
        assert ends[-1] or len(ids) == params.max_new_tokens
    assert len(completion.log_probs) == len(completion.entropies) == len(ids)
    numbers = torch.tensor(np.stack([completion.log_probs, completion.entropies]))  # (2, T)
    assert not numbers[:, ~is_drawn].any()

    logits = plain_logits(policy.model, prompt, ids)[is_drawn] / (params.temperature or 1.0)
    tokens = torch.tensor(ids)[is_drawn][:, None]
    log_probs = logits.log_softmax(dim=-1)  # (T, V)
    entropies = -(log_probs.exp() * log_probs).sum(dim=-1)
    expected = torch.stack([log_probs.gather(1, tokens)[:, 0], entropies])
    assert ((numbers[:, is_drawn] - expected).abs() <= ATOL).all()
    if params.temperature == 0:
        assert (logits.amax(dim=-1) - logits.gather(1, tokens)[:, 0] <= (rounding or 0.0)).all()
        return
    kept = keep_likeliest(logits.softmax(dim=-1), params.top_p, params.top_k).double()
    kept /= kept.sum(dim=-1, keepdim=True)
    share, upper = (x.gather(1, tokens)[:, 0] for x in (kept, kept.cumsum(dim=-1)))
    uniform = torch.from_numpy(uniforms[: len(ids)]).double()[is_drawn]
    rounding = rounding or logits.shape[1] * 2**-24
    assert (share > 0).all()
    assert (upper - share <= uniform + rounding).all() and (uniform <= upper + rounding).all()


@torch.no_grad()
def plain_logits(model: nn.Module, prompt: list[int], completion: list[int]) -> torch.Tensor:
    """The fp32 logits of each token of the completion, (T, V)."""
    ids = torch.tensor([prompt + completion])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
