"""The embedded model: what it is, and that the default run is about it."""

import json
from pathlib import Path

import torch
from conftest import ALONE, CPU, make_config
from transformers import AutoModelForCausalLM, AutoTokenizer

import countdown
from logger import Logger
from main import evaluate
from policy import load_policy, plain_text

TINY = Path(__file__).resolve().parent.parent / "tiny"


def test_the_embedded_model_is_small_and_loads_as_any_other():
    model = AutoModelForCausalLM.from_pretrained(TINY)
    assert model.num_parameters() < 3_000_000
    assert sum(path.stat().st_size for path in TINY.iterdir() if path.is_file()) < 8_000_000
    assert model.dtype == torch.float32


def test_its_tokenizer_survives_auto_tokenizer_and_makes_short_prompts():
    """AutoTokenizer replaces the pre-tokenizer of some model types: then a prompt has 200."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    text = plain_text(countdown.generate_prompt({"nums": [3, 7, 25, 12], "target": 46}))
    ids = tokenizer(text)["input_ids"]
    assert len(ids) <= 40
    assert tokenizer.decode(ids) == text
    for text in ("3 * 7 = 21, 21 + 25 = 46 yes\n", "Übung \U0001f600\t 123456 \\x00"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_it_loads_without_a_note_on_changed_tokens():
    notes = []
    load_policy(make_config(f"model.name={TINY}"), device=CPU, num_ranks=1, say=notes.append)
    assert notes == ["the tokenizer has no chat template: the prompt is plain text"]


def test_it_solves_some_questions_not_most():
    """The default run starts between 0.15 and 0.45; here on its first 256 questions.

    Its README measured 0.237 on twice as many, which is five standard errors inside.
    """
    measured, low, high = 0.237, 0.15, 0.45
    config = make_config(f"model.name={TINY}", "validation.num_examples=256")
    policy = load_policy(config, device=CPU, num_ranks=1, say=print)
    questions = countdown.load_examples("generated", "validation", num_examples=256)
    metrics, _ = evaluate(policy, questions, config=config, world=ALONE, logger=Logger(rank=0))
    interval = metrics["eval/pass@1_high"] - metrics["eval/pass@1_low"]
    standard_error = interval / (2 * 1.96)
    assert 5 * standard_error < min(measured - low, high - measured)
    assert low < metrics["eval/pass@1"] < high
    assert abs(metrics["eval/pass@1"] - measured) < 5 * standard_error


def test_its_files_are_plain():
    names = {path.name for path in TINY.iterdir() if path.is_file()}
    assert names == {
        "README.md",
        "config.json",
        "generation_config.json",
        "make_tiny.py",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert json.loads((TINY / "config.json").read_text())["model_type"] == "qwen3"
