"""The embedded model: what it is, and that the default run is about it."""

import torch
from harness import ROOT, alone, make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
from engine.questions.prompts import render_prompts
from tools.chat import load_policy

TINY = ROOT / "tiny"


def test_the_embedded_model_is_small_and_loads_as_any_other():
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert model.num_parameters() < 3_000_000
    assert sum(path.stat().st_size for path in TINY.iterdir() if path.is_file()) < 8_000_000
    assert model.dtype == torch.float32
    notes: list[str] = []
    load_policy(make_config(f"model.name={TINY}"), alone(), notes.append)
    assert notes == ["the tokenizer has no chat template: the prompt is plain text"]


def test_its_tokenizer_survives_auto_tokenizer_and_makes_short_prompts():
    """AutoTokenizer replaces the pre-tokenizer of some types: a prompt then has 200 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    rendering = {"task": countdown, "options": make_config().task, "tokenizer": tokenizer}
    (prompt,), _ = render_prompts([{"nums": [3, 7, 25, 12], "target": 46}], **rendering)
    assert len(tokenizer(prompt)["input_ids"]) <= 40
    for text in (prompt, "3 * 7 = 21, 21 + 25 = 46 yes\n", "Übung \U0001f600\t 123456 \\x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
