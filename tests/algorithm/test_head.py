"""The head's log-probabilities without all logits: the same numbers in less memory."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from harness import (
    SIZES,
    alone,
    load_trained,
    make_config,
    make_policy,
    peak_bytes,
    save_random,
    seed,
    tokens_of,
)
from reference import COMPLETIONS, PROMPTS, score
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import Gemma2Config, Gemma2ForCausalLM

from engine import head
from engine.head import head_log_probs
from engine.model import Policy
from main import CompletionScorer, token_log_probs

M, H, V = 5, 3, 11
COLUMNS = (1, 4, 11, 50)  # of a block: 4 does not divide V, and with 11 or 50 there is one block


@pytest.fixture(params=[0, 4 * M * 8, 10**9], ids=["none", "some", "all"])
def kept_bytes(request, monkeypatch) -> None:
    """No logits are kept for the backward pass, or eight columns of them, or all."""
    monkeypatch.setattr(head, "KEPT_BYTES", request.param)


def set_columns(monkeypatch, columns: int) -> None:
    monkeypatch.setattr(head, "CPU_BLOCK_BYTES", 4 * M * columns)


def made_up(
    dtype: torch.dtype, *, bias: bool = True
) -> tuple[torch.Tensor, nn.Linear, torch.Tensor]:
    """Hidden states (M, H), a head and token ids (M,), the first and the last token among them."""
    torch.manual_seed(seed())
    hidden = torch.randn(M, H, dtype=dtype, requires_grad=True)
    linear = nn.Linear(H, V, bias=bias, dtype=dtype)
    return hidden, linear, torch.tensor([0, V - 1, 4, 5, 5])


def naive(hidden, linear, token_ids, *, temperature):
    log_probs = (linear(hidden) / temperature).log_softmax(dim=-1)
    return log_probs[torch.arange(len(token_ids)), token_ids]


# The function


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_log_softmax_for_any_loss(monkeypatch, kept_bytes, columns, temperature, bias):
    """A loss that is not linear, such as a ratio's, and logits far from 0."""
    set_columns(monkeypatch, columns)
    hidden, linear, token_ids = made_up(torch.float32, bias=bias)
    hidden = (10 * hidden.detach()).requires_grad_()
    inputs, results = [hidden, *linear.parameters()], []
    for function in (head_log_probs, naive):
        log_probs = function(hidden, linear, token_ids, temperature=temperature)
        loss = (log_probs / 10).exp().sum()
        results.append([log_probs, *torch.autograd.grad(loss, inputs)])
    # The rounding of a logit is a relative error of its probability: half a bit of fp32 (2**-24)
    # times its size. Each of the two computations rounds a logit and a few sums of them. A gradient
    # is a sum of terms that may cancel, as 1 - p does: it errs by as much as their sizes.
    logits = linear(hidden).detach() / temperature
    tolerance = 4 * 2**-24 * logits.abs().max().item()
    assert tolerance < 1e-4  # or it would say nothing
    log_probs = results[1][0].detach()
    terms = logits.softmax(dim=-1) + F.one_hot(token_ids, V)  # (M, V)
    terms *= (log_probs / 10).exp()[:, None] / (10 * temperature)
    sizes = [log_probs, terms @ linear.weight.abs(), terms.T @ hidden.abs(), terms.sum(dim=0)]
    for ours, expected, size in zip(*results, sizes[: len(results[0])], strict=True):
        assert (ours - expected).norm() <= tolerance * size.norm()


def test_what_needs_no_gradient_gets_none(monkeypatch):
    """As with adapters, where the head's weight is frozen."""
    set_columns(monkeypatch, 4)
    hidden, linear, token_ids = made_up(torch.float32)
    expected = torch.autograd.grad(naive(hidden, linear, token_ids, temperature=1.0).sum(), hidden)
    linear.requires_grad_(False)
    head_log_probs(hidden, linear, token_ids, temperature=1.0).sum().backward()
    assert linear.weight.grad is None and linear.bias.grad is None
    assert torch.allclose(hidden.grad, expected[0], atol=1e-6)
    linear.requires_grad_(True)
    head_log_probs(hidden.detach(), linear, token_ids, temperature=1.0).sum().backward()
    assert linear.weight.grad is not None


@pytest.mark.parametrize("num_tokens", [1, 512, 10_237, 10**6])
def test_on_a_gpu_blocks_are_multiples_of_64_columns(num_tokens):
    """Bug: for 10,237 tokens they had 1,638 columns, which halves the speed of bf16 products."""
    hidden = torch.empty(num_tokens, 1, device="meta")  # as on a GPU, any other than the CPU
    blocks = list(head.vocabulary_blocks(torch.empty(151_936, 1), hidden))
    assert all(block.start % 64 == 0 for block in blocks)
    assert [block.stop for block in blocks] == [*(b.start for b in blocks[1:]), 151_936]
    width = blocks[0].stop
    assert 4 * num_tokens * width <= head.GPU_BLOCK_BYTES or width == 64


def test_it_never_holds_all_logits(monkeypatch):
    """Counts all tensors alive at once, gradients too. `naive` holds all logits several times."""
    num_tokens, hidden_size, vocabulary = 512, 32, 20_000
    kept, block = 2**23, 2**20
    monkeypatch.setattr(head, "KEPT_BYTES", kept)
    monkeypatch.setattr(head, "CPU_BLOCK_BYTES", block)
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    linear = nn.Linear(hidden_size, vocabulary, bias=False)
    token_ids = torch.randint(vocabulary, (num_tokens,))
    gradients = linear.weight.nbytes + 4 * hidden.nbytes
    bound = gradients + kept + 6 * block
    all_logits = 4 * num_tokens * vocabulary
    assert bound < all_logits / 2

    def peak(function) -> int:
        linear.weight.grad = hidden.grad = None
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            function(hidden, linear, token_ids, temperature=1.0).sum().backward()
        return peak_bytes(profiler)

    assert peak(head_log_probs) < bound
    assert peak(naive) > 2 * all_logits


# The scorer


def scored(policy: Policy, *, in_blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities (B, T), and the gradient of a loss that is not linear in them."""
    policy.scorer = CompletionScorer(policy.model, policy.scorer.compute_dtype, in_blocks=in_blocks)
    policy.model.train().zero_grad()
    log_probs, mask = score(policy, PROMPTS, COMPLETIONS, temperature=0.7)
    (log_probs[mask] / 10).exp().sum().backward()
    return log_probs.detach(), torch.cat([p.grad.flatten() for p in policy.model.parameters()])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_chunked_scorer_equals_the_plain_one(monkeypatch, model_folder, checkpointing):
    """Separate and tied embeddings; ten columns a block, some of them kept."""
    policy = make_policy(model_folder, f"model.gradient_checkpointing={checkpointing}")
    assert policy.scorer.in_blocks
    num_tokens = sum(len(ids) for ids in COMPLETIONS)
    monkeypatch.setattr(head, "CPU_BLOCK_BYTES", 4 * num_tokens * 10)
    monkeypatch.setattr(head, "KEPT_BYTES", 4 * num_tokens * 55)
    log_probs, gradient = scored(policy, in_blocks=True)
    expected, expected_gradient = scored(policy, in_blocks=False)
    assert torch.allclose(log_probs, expected, atol=1e-5)
    assert (gradient - expected_gradient).norm() <= 1e-6 * expected_gradient.norm()


def test_in_bf16_the_chunked_and_the_plain_scorer_round_alike(monkeypatch, model_folder):
    """Both round the same logits to bf16, so that log-probabilities agree as in fp32.

    Gradients differ by what is rounded on the way, to 2**-8 in each of many matrices, and are
    equally far from the one of fp32.
    """
    policy = make_policy(model_folder, "model.compute_dtype=bfloat16")
    monkeypatch.setattr(head, "CPU_BLOCK_BYTES", 4 * 11 * 10)
    log_probs, gradient = scored(policy, in_blocks=True)
    expected, expected_gradient = scored(policy, in_blocks=False)
    assert log_probs.dtype == gradient.dtype == torch.float32
    assert torch.allclose(log_probs, expected, atol=1e-5)
    _, exact = scored(make_policy(model_folder), in_blocks=False)
    assert (gradient - expected_gradient).norm() <= 2**-6 * expected_gradient.norm()
    assert (gradient - exact).norm() <= 1.25 * (expected_gradient - exact).norm()


@pytest.mark.parametrize("in_blocks", [True, False])
def test_padding_scores_0_and_has_no_gradient(model_folder, in_blocks):
    policy = make_policy(model_folder)
    policy.scorer = CompletionScorer(policy.model, torch.float32, in_blocks=in_blocks)
    log_probs, mask = score(policy, PROMPTS, COMPLETIONS)
    assert not mask.all() and (log_probs[~mask] == 0).all() and (log_probs[mask] < 0).all()
    log_probs[~mask].sum().backward()
    assert all((p.grad == 0).all() for p in policy.model.parameters())


# The choice between the two


def load(folder: Path, capsys) -> tuple[Policy, list[str]]:
    """The policy of a Gemma 2, and the lines that loading it logs."""
    # Gemma 2 has no other attention.
    config = make_config(f"model.name={folder}", "model.attn_implementation=eager")
    policy = load_trained(config, alone(), print)
    return policy, capsys.readouterr().out.splitlines()


def gemma2_folder(tokenizer, folder: Path, **settings) -> Path:
    sizes = SIZES | {"num_key_value_heads": 2, "head_dim": 8}
    config = Gemma2Config(**sizes, **tokens_of(tokenizer), **settings)
    return save_random(Gemma2ForCausalLM, config, tokenizer, folder)


def test_capped_logits_are_scored_by_the_plain_path_and_that_is_logged(tokenizer, tmp_path, capsys):
    """Gemma 2 caps logits at 30, which hardly changes those of a model not trained yet."""
    folder = gemma2_folder(tokenizer, tmp_path, initializer_range=0.02)
    policy, lines = load(folder, capsys)
    assert not policy.scorer.in_blocks
    assert any("logits are more than head(hidden)" in line for line in lines)
    log_probs, mask = score(policy, PROMPTS, COMPLETIONS)
    ids = torch.tensor([PROMPTS[0] + COMPLETIONS[0]])
    logits = policy.model(input_ids=ids).logits[:, len(PROMPTS[0]) - 1 : -1]
    expected = token_log_probs(logits, torch.tensor([COMPLETIONS[0]]), temperature=1.0)
    assert torch.allclose(log_probs[0, mask[0]], expected[0], atol=1e-5)
