"""Families of models: each can do what docs/models.md says, and what it samples is right."""

import re
from dataclasses import replace
from pathlib import Path

import harness
import pytest
import torch
from graphs import Graph
from harness import ROOT, alone, make_config, make_policy, sample, save_random, seed, table
from one_pass import ATOL, assert_plain, plain_logits
from reference import score
from transformers import AutoConfig, AutoModelForImageTextToText

from engine.model.policy import Policy
from engine.sampling.batches import kept_bytes
from engine.sampling.graphs import CapturedSteps
from engine.sampling.sampler import supports_grouped
from engine.update.head import ChunkedScorer
from main import CompletionScorer

PROMPTS = [[5, 9, 30], [40, 41, 42, 43, 44, 45, 46, 47, 48], [7], [60, 5, 61, 5, 62]]
NUM_TOKENS = 10
SIZES = table("model/families.yaml")["sizes"]
FAMILIES = table("model/families.yaml")["families"]
ADAPTER = "model.lora.r=4"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tokenizer, tmp_path_factory) -> tuple[str, Path, list[str]]:
    """A family's name, the folder of a tiny random model of it, and what it is loaded with."""
    model_type, sizes = FAMILIES[request.param]
    folder = save_random(model_type, tokenizer, tmp_path_factory.mktemp(model_type), **sizes)
    eager = ["model.attn_implementation=eager"]  # transformers has no other for Gemma 2
    return request.param, folder, eager if model_type == "gemma2" else []


@pytest.fixture(scope="module")
def policy(family) -> Policy:
    """The family's policy in fp32; its logits are made in blocks, if that is possible."""
    _, folder, overrides = family
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.model.policy.MAX_LOGITS_BYTES", 0)
        return make_policy(folder, *overrides)


def adapter_learns(policy: Policy) -> bool:
    """Whether a gradient that is finite reaches the adapter of every layer that has one."""
    ids = torch.tensor([PROMPTS[1]])
    policy.model.train()
    log_probs = policy.scorer(ids, ids > 0, temperature=1.0)
    log_probs.sum().backward()
    gradients = [p.grad for name, p in policy.model.named_parameters() if "lora_B" in name]
    return bool(gradients) and all(g.isfinite().all() and g.any() for g in gradients)


def test_a_token_is_drawn_and_scored_as_one_plain_forward_pass_of_its_row_says(policy):
    """Prompts are padded on the left to sample, rows on the right to score."""
    seeds = [(seed(), i) for i in range(len(PROMPTS))]
    changes = {"max_new_tokens": NUM_TOKENS, "eos_ids": tuple(range(0, 345, 8))}
    groups = sample(policy, PROMPTS, seeds, num_samples=3, **changes)
    assert_plain(policy, PROMPTS, seeds, groups, rounding=ATOL, **changes)
    prompts = [prompt for prompt in PROMPTS for _ in range(3)]
    completions, alone = [c.token_ids for group in groups for c in group], []
    assert len(set(map(len, completions))) > 2
    for prompt, ids in zip(prompts, completions, strict=True):
        log_probs = plain_logits(policy.model, prompt, ids).log_softmax(dim=-1)
        alone.append(log_probs.gather(1, torch.tensor(ids)[:, None])[:, 0])
    at_once = replace(policy, scorer=CompletionScorer(policy.model, policy.compute_dtype))
    for scoring in (policy, at_once):
        scored, mask = score(scoring, prompts, completions)
        torch.testing.assert_close(scored[mask], torch.cat(alone), rtol=0, atol=ATOL)


def test_the_readme_says_what_a_family_can_do(family, policy, graphs):
    """Bug: the estimate counted keys in recurrent layers, which have none, and Gemma 4 failed."""
    name, folder, overrides = family
    num_bytes = {  # of a token's keys and values in fp32, and of a row's states
        "Gemma 4": (2 * 2 * (8 + 16) * 4, 0),  # 2 of 4 layers share: heads of 8, of 16 elsewhere
        "Falcon-H1": (2 * 2 * 2 * 8 * 4, 2 * (8 * 8 * 8 + 80 * 4) * 4),
        "GPT-2": (2 * 2 * 4 * 8 * 4, 0),
    }
    assert name not in num_bytes or kept_bytes(policy.sampler.model) == num_bytes[name]
    can = [  # fast path, captured, chunked head, LoRA, 4 bits
        harness.loop_of(policy) == "grouped",
        supports_grouped(policy.sampler.model, CapturedSteps),
        isinstance(policy.scorer, ChunkedScorer),
        adapter_learns(make_policy(folder, *overrides, ADAPTER)),
        adapter_learns(make_policy(folder, *overrides, ADAPTER, "model.load_in_4bit=true")),
    ]
    lines = (ROOT / "docs/models.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    ((_, *said),) = [row for row in rows if row and name in row[0].split(", ")]
    assert [cell.startswith("yes") for cell in [*said, said[-1]]] == can
    assert Graph.num_captures == can[1]  # one capture, or a refusal before any


LONGROPE = harness.LONGROPE | {"original_max_position_embeddings": 64}
CONTEXTS = [("train", 64, "that is its context in training")]
CONTEXTS += [("evaluate", 256, "beyond it a text depends on the rows beside it")]


@pytest.mark.parametrize(("mode", "context", "means"), CONTEXTS)
def test_where_positions_follow_from_the_longest_row_a_training_has_no_longer_ones(
    tokenizer, tmp_path, mode, context, means
):
    """Bug: a row beyond turned those beside it: their log-probabilities were 0.24 nats off."""
    folder = save_random("phi3", tokenizer, tmp_path, **SIZES | LONGROPE)
    config, lines = make_config(f"model.name={folder}", f"mode={mode}"), []
    policy = harness.load_trained(config, alone(), lines.append)
    assert policy.context_length == context and sum(means in line for line in lines) == 1
    if mode == "train":  # as far as the prompts reach there
        fitting = [[*range(5, 59)], *PROMPTS]
        seeds = [(seed(), i) for i in range(5)]
        groups = sample(policy, fitting, seeds, num_samples=1, max_new_tokens=NUM_TOKENS)
        completions = [completion for (completion,) in groups]
        scored, mask = score(policy, fitting, [c.token_ids for c in completions])
        drawn = torch.cat([torch.tensor(c.log_probs) for c in completions])
        torch.testing.assert_close(scored[mask], drawn, rtol=0, atol=ATOL)


def test_of_a_model_that_sees_the_text_part_is_trained_once_it_is_saved(tokenizer, tmp_path):
    """As docs/models.md says."""
    text_type, sizes = FAMILIES["Gemma 3"]
    text = AutoConfig.for_model(text_type, **harness.tokens_of(tokenizer), **sizes).to_dict()
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 28}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    whole = AutoModelForImageTextToText.from_config(config).eval()
    folder, part = tmp_path / "whole", tmp_path / "part"
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with pytest.raises(ValueError, match="it sees pictures too: save its language part"):
        make_policy(folder)
    page = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    (recipe,) = re.findall("```py\n(import transformers\n.*?)```", page, re.DOTALL)
    exec(recipe.replace("NAME", str(folder)).replace("FOLDER", str(part)), {})
    policy, ids = make_policy(part), torch.tensor([PROMPTS[1]])
    torch.testing.assert_close(policy.model(input_ids=ids).logits, whole(input_ids=ids).logits)
    assert not any("vision" in name for name, _ in policy.model.named_parameters())
