"""The calculator in a completion: what it writes, and that none of it is trained on."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import make_config, make_policy, save_random, seed
from test_update import make_groups, recorded
from transformers import Qwen2Config, Qwen2ForCausalLM

from config import ConfigError
from main import completion_text, rollout_sums
from policy import Policy
from sampler import Completion, sample_completions

# The model below knows which characters may follow which; "<<12*3=" comes in half of its
# completions, and behind "=" it has an opinion of its own: x
FOLLOWS = {
    "?": "<",
    "<": "<1",
    "1": "2",
    "2": "*",
    "*": "3",
    "3": "=",
    "=": "x",
    ">": ">.",
    "x": ".",
}
NUM_SAMPLES = 200


@pytest.fixture(scope="module")
def calculating_folder(tokenizer, tmp_path_factory) -> Path:
    """A model whose next token depends on the last one alone; "." is followed by the end."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path_factory.mktemp("markov"))
    model = Qwen2ForCausalLM.from_pretrained(folder)
    ids = {character: tokenizer.encode(character)[0] for character in [*FOLLOWS, "."]}
    with torch.no_grad():
        for projection in (
            model.model.layers[0].self_attn.o_proj,
            model.model.layers[0].mlp.down_proj,
        ):
            projection.weight.zero_()
        embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embeddings.zero_()
        head.zero_()
        for i, (character, followers) in enumerate((FOLLOWS | {".": ""}).items()):
            embeddings[ids[character], i] = 1.0
            for follower in [ids[f] for f in followers] or [tokenizer.eos_token_id]:
                head[follower, i] = 3.0  # times the norm's sqrt(32): nearly certain
    model.save_pretrained(folder)
    return folder


def sample(folder: Path, *overrides: str, **changes) -> tuple[Policy, list[str], list[Completion]]:
    policy = make_policy(folder, "sampling.calculator=true", *overrides)
    params = replace(policy.params, **({"max_new_tokens": 24} | changes))
    prompt = policy.tokenizer.encode("?")
    ((*group,),) = sample_completions(
        policy.sampler.eval(),
        [prompt],
        [(seed(),)],
        num_samples=NUM_SAMPLES,
        params=params,
        backend=policy.backend,
        max_batch_tokens=None,
        on_progress=lambda n: None,
    )
    return policy, [completion_text(c, policy.tokenizer) for c in group], group


@pytest.mark.parametrize("backend", ["grouped", "generate"])
def test_the_result_is_written_where_a_completion_asks_for_it_and_nowhere_else(
    calculating_folder, backend
):
    policy, texts, group = sample(calculating_folder, f"sampling.backend={backend}")
    asking = [text for text in texts if "<<12*3=" in text]
    standard_error = math.sqrt(NUM_SAMPLES / 4)
    assert abs(len(asking) - NUM_SAMPLES / 2) < 5 * standard_error
    assert all(text.partition("=")[2].startswith("36>>") for text in asking)
    others = set(texts) - set(asking)
    assert others == {"<12*3=x."}
    for text, completion in zip(texts, group, strict=True):
        inserted = np.array(completion.token_ids)[completion.is_inserted]
        assert policy.tokenizer.decode(inserted) == ("36>>" if text in asking else "")
        assert completion.num_sampled == len(completion.token_ids) - len(inserted)


@pytest.mark.parametrize("backend", ["grouped", "generate"])
def test_sampled_tokens_are_scored_as_drawn_and_inserted_ones_have_no_numbers(
    calculating_folder, backend
):
    policy, _, group = sample(calculating_folder, f"sampling.backend={backend}")
    prompt = policy.tokenizer.encode("?")
    for completion in group:
        ids = torch.tensor([prompt + completion.token_ids])
        mask, length = torch.ones_like(ids, dtype=torch.bool), len(completion.token_ids)
        scored = policy.scorer(ids, mask, num_tokens=length, temperature=1.0)[0].detach().numpy()
        is_inserted = completion.is_inserted
        assert np.abs(scored - completion.log_probs)[~is_inserted].max() <= 1e-4
        assert not completion.log_probs[is_inserted].any()
        assert not completion.entropies[is_inserted].any()


def test_what_does_not_ask_is_sampled_as_without_a_calculator(calculating_folder):
    _, with_tool, _ = sample(calculating_folder)
    _, without, group = sample(calculating_folder, "sampling.calculator=false")
    assert not any(completion.is_inserted.any() for completion in group)
    for text, plain in zip(with_tool, without, strict=True):
        assert text.partition("=")[0] == plain.partition("=")[0]
        assert text == plain or "<<12*3=36>>" in text


def test_a_result_counts_in_the_length_and_is_cut_off_by_the_limit(calculating_folder):
    """<<12*3= has 7 tokens, so that 9 leave room for two of the four of 36>>."""
    _, texts, group = sample(calculating_folder, max_new_tokens=9)
    cut = [c for text, c in zip(texts, group, strict=True) if text == "<<12*3=36"]
    assert cut  # a quarter of them are such: none with a chance of 1e-25
    for completion in cut:
        assert completion.truncated and len(completion.token_ids) == 9
        assert completion.is_inserted.tolist() == [False] * 7 + [True] * 2


def test_what_cannot_be_calculated_is_left_to_the_model(calculating_folder):
    calculator = make_policy(calculating_folder, "sampling.calculator=true").params.calculator
    encode = calculator.tokenizer.encode
    for text in ("<<1/3=", "<<1/0=", "<<2**3=", "<<=", "12*3=", "<<12*3=36>> 5=", "<<1=1="):
        assert calculator.complete(encode(text)) == []
    assert calculator.complete(encode("<<1=2>> then <<1/8=")) == encode("0.125>>")
    assert calculator.complete(encode("x" * 5000 + "<<" + "1+" * 90 + "1=")) == encode("91>>")


def test_a_long_answer_without_an_opening_costs_little(calculating_folder):
    calculator = make_policy(calculating_folder, "sampling.calculator=true").params.calculator
    assert calculator.complete(calculator.tokenizer.encode("9" * 10**5 + "=")) == []


# Training


def insert(groups, columns: slice):
    """The groups, with some of their tokens marked as the calculator's."""
    for row in (row for group in groups for row in group):
        row.completion.is_inserted[columns] = True
        row.completion.log_probs[columns] = 0.0
    return groups


@pytest.mark.parametrize("normalization", ["dr_grpo", "token", "sequence", "sum"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 10_000])
def test_the_gradient_is_that_of_the_sampled_tokens_alone(
    rotary_model_folder, normalization, micro_batch_tokens
):
    """Against a sum over sampled tokens, row by row, divided by their number where that counts."""
    config = make_config(
        f"training.loss_normalization={normalization}",
        f"training.micro_batch_tokens={micro_batch_tokens}",
        "training.k_best_of_n=[4,4]",
        "training.max_new_gen_tokens=12",
        "training.max_grad_norm=1e9",
    )
    groups = insert(make_groups(config, (3, (5, 7, 6, 6), (1.1, 0.1, 0.06, 0.1))), slice(1, 4))
    policy = make_policy(rotary_model_folder)
    gradient, _ = recorded(policy, groups, config)

    rows = [row for group in groups for row in group]
    sampled = [[i for i in range(len(r.completion.token_ids)) if not 1 <= i < 4] for r in rows]
    divisor = {
        "dr_grpo": lambda row: len(rows) * 12,
        "token": lambda row: sum(map(len, sampled)),
        "sequence": lambda row: len(rows) * len(sampled[row]),
        "sum": lambda row: len(rows),
    }[normalization]
    model, loss = make_policy(rotary_model_folder).model, 0.0
    for number, row in enumerate(rows):
        ids = row.prompt_ids + row.completion.token_ids
        log_probs = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(dim=-1)
        for i in sampled[number]:
            position = len(row.prompt_ids) + i
            log_prob = log_probs[position - 1, ids[position]]
            loss = loss - row.advantage * log_prob / divisor(number)
    loss.backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    difference = torch.from_numpy(gradient) - expected
    # some hundred operations of fp32, which round by 6e-8 each, and rows that cancel in part
    assert difference.norm() <= 1e-5 * expected.norm()


def test_entropy_is_a_mean_over_sampled_tokens_and_length_counts_all():
    config = make_config("training.k_best_of_n=[4,4]")
    groups = insert(make_groups(config, (3, (4, 4, 4, 4), (1, 0, 0, 0))), slice(1, 3))
    for row in groups[0]:
        row.completion.entropies[[0, 3]] = 2.0
    sums = rollout_sums(groups, torch.tensor([[1.0, 0, 0, 0]]))
    assert sums["train/entropy"] == (16.0, 8)
    assert sums["train/completion_tokens"] == (16, 4)


def test_continuous_batching_has_no_calculator():
    with pytest.raises(ConfigError, match=r"sampling\.calculator=false"):
        make_config("sampling.backend=continuous", "sampling.calculator=true")
