"""The head's log-probabilities without all logits: the same numbers in less memory."""

import harness
import pytest
import torch
from harness import SIZES, load_trained, make_config, make_policy, peak_bytes, save_random, seed
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from engine.update import head
from engine.update.head import ChunkedScorer, head_log_probs

M, H, V = 5, 3, 11


def naive(hidden, linear, token_ids, *, temperature):
    log_probs = (linear(hidden) / temperature).log_softmax(dim=-1)
    return log_probs[torch.arange(len(token_ids)), token_ids]


@pytest.mark.parametrize("columns", [1, 4, 11, 50])  # 4 does not divide V, 11 and 50 are one block
@pytest.mark.parametrize("kept_bytes", [0, 8 * M * 8, 10**9], ids=["none", "some", "all"])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_log_softmax_for_any_loss(monkeypatch, kept_bytes, columns, bias):
    """A loss that is not linear, such as a ratio's, and hidden states and logits far from 0."""
    monkeypatch.setattr(head, "KEPT_BYTES", kept_bytes)  # of logits, for the backward pass
    monkeypatch.setattr(head, "CPU_BLOCK_BYTES", 4 * M * columns)
    torch.manual_seed(seed())
    hidden, token_ids = 10 * torch.randn(M, H).double(), torch.tensor([0, V - 1, 4, 5, 5])
    linear = nn.Linear(H, V, bias=bias).double()
    inputs, results = [hidden.requires_grad_(), *linear.parameters()], []
    for function in (head_log_probs, naive):
        log_probs = function(hidden, linear, token_ids, temperature=0.7)
        loss = (log_probs / 10).exp().sum()
        results.append([log_probs, *torch.autograd.grad(loss, inputs)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-13)


def test_sums_of_blocks_are_in_fp32_where_products_are_in_16_bits(monkeypatch):
    """Of whole numbers, whose products are exact."""
    monkeypatch.setattr(head, "CPU_BLOCK_BYTES", 4 * M * 4)
    generator, linear = torch.Generator().manual_seed(seed()), nn.Linear(H, V)
    weights = torch.randint(-2, 3, (V * H + V,), generator=generator).float()
    nn.utils.vector_to_parameters(weights, linear.parameters())
    hidden = torch.randint(-8, 9, (M, H), generator=generator).float()
    token_ids = torch.tensor([0, V - 1, 4, 5, 5])
    log_probs = head_log_probs(hidden.bfloat16(), linear, token_ids, temperature=0.7)
    expected = naive(hidden.double(), linear.double(), token_ids, temperature=0.7)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=1e-4)


def test_it_never_holds_all_logits(monkeypatch):
    """Counts all tensors alive at once, gradients too."""
    num_tokens, hidden_size, vocabulary = 512, 32, 20_000
    kept, block = 2**23, 2**20
    monkeypatch.setattr(head, "KEPT_BYTES", kept)
    monkeypatch.setattr(head, "CPU_BLOCK_BYTES", block)
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    linear = nn.Linear(hidden_size, vocabulary, bias=False)
    token_ids = torch.randint(vocabulary, (num_tokens,))
    bound = linear.weight.nbytes + 4 * hidden.nbytes + kept + 6 * block
    assert bound < 4 * num_tokens * vocabulary / 2
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        head_log_probs(hidden, linear, token_ids, temperature=1.0).sum().backward()
    assert peak_bytes(profiler) < bound


def test_in_bf16_many_lengths_have_few_shapes(rotary_model_folder, monkeypatch):
    """Bug: oneDNN keeps kernels of each shape, and the heap holes beside them: memory grew."""
    model, seen = make_policy(rotary_model_folder).model, []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, x: seen.append(x[0].shape[1]))
    blocks = lambda weight, hidden: seen.append(len(hidden)) or [slice(0, len(weight))]  # noqa: E731
    monkeypatch.setattr(head, "vocabulary_blocks", blocks)
    for length, num_tokens in [(7, 10), (32, 60), (33, 62), (70, 136)]:
        ids, results = torch.randint(3, 30, (3, length)), []
        mask = torch.arange(length) >= torch.tensor([[1], [length - 2], [5]])
        for dtype, multiple in [(torch.float32, 32), (torch.bfloat16, 1), (torch.bfloat16, 32)]:
            monkeypatch.setattr(head, "BF16_MULTIPLE", multiple)
            log_probs = ChunkedScorer(model, dtype)(ids, mask, temperature=0.5)
            (log_probs * torch.linspace(0.1, 1, length)).sum().backward()
            grads = (weight.grad for weight in model.parameters())
            results.append(nn.utils.parameters_to_vector([log_probs, *grads]))
            model.zero_grad()
        few = [-(-number // 32) * 32 for number in (length, num_tokens, num_tokens)]
        assert seen == 2 * [length, num_tokens, num_tokens] + few
        assert (results[1] - results[2]).norm() < 2**-6 * results[1].norm()
        seen.clear()


FIFTY = {"original_max_position_embeddings": 50, "max_position_embeddings": 100}
ENDING = {  # models whose positions end, or turn otherwise, behind the fiftieth
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 50},
    "phi3": SIZES | harness.LONGROPE | FIFTY,
}


@pytest.mark.parametrize("kind", ENDING)
def test_rounding_ends_at_the_context_of_the_model(kind, tokenizer, tmp_path, monkeypatch):
    """Bugs: an IndexError for learned positions; others turned all of a micro-batch otherwise."""
    save_random(kind, tokenizer, tmp_path, **ENDING[kind] | {"initializer_range": 0.2})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for length in (40, 50):
        ids, results = torch.randint(3, 30, (3, length)), []
        for multiple in (1, head.BF16_MULTIPLE):
            monkeypatch.setattr(head, "BF16_MULTIPLE", multiple)
            results.append(ChunkedScorer(model, torch.bfloat16)(ids, ids > 0, temperature=1.0))
        assert (results[0] - results[1]).norm() < 2**-6 * results[0].norm()


def test_capped_logits_take_the_plain_path_and_that_is_logged(tokenizer, tmp_path, monkeypatch):
    """Gemma 2 caps logits at 30, which hardly changes those of a model not trained yet."""
    settings = SIZES | {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.02}
    save_random("gemma2", tokenizer, tmp_path, final_logit_softcapping=30.0, **settings)
    monkeypatch.setattr("engine.model.policy.MAX_LOGITS_BYTES", 0)
    eager = "model.attn_implementation=eager"  # Gemma 2 has no other
    config, lines = make_config(f"model.name={tmp_path}", eager), []
    policy = load_trained(config, harness.alone(), lines.append)
    assert not isinstance(policy.scorer, ChunkedScorer)
    assert any("logits are more than head(hidden)" in line for line in lines)
