"""The model card of best/: metadata that the hub takes, the run's figures, code that runs."""

import json
import re
from pathlib import Path

import pytest
import torch
from conftest import ALONE, make_config, make_policy
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from runs import train, write_questions
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from card import merged_card, model_card
from config import load_config
from data import TASKS, encode_prompts

AFTER = {
    "eval/pass@1": 0.67912,
    "eval/pass@1_low": 0.65,
    "eval/pass@1_high": 0.7,
    "eval/pass@8": 0.9,
    "eval/completion_tokens": 31.23,
    "time/eval_s": 3.0,
}
HUB = ("model.name=Qwen/Qwen2.5-0.5B", "task.name=gsm8k", "task.train=openai/gsm8k")


def card_of(*overrides: str, step: int = 5, before: tuple = (0.2, 0.1, 0.3), **options) -> str:
    settings = {"world": ALONE, "num_questions": 500, "prompt": "?", "adds_special_tokens": True}
    settings["tokenizer"] = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()))
    return model_card(
        make_config(*overrides), step=step, before=list(before), after=AFTER, **settings | options
    )


def test_the_metadata_names_base_data_and_score_as_the_hub_reads_them():
    data = ModelCard(card_of(*HUB)).data
    for name in (data.base_model, *data.datasets):
        validate_repo_id(name)
    assert (data.base_model, data.datasets) == ("Qwen/Qwen2.5-0.5B", ["openai/gsm8k"])
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert {"grpo", "gsm8k"} < set(data.tags)
    assert data.model_name == "gsm8k-Qwen2.5-0.5B-grpo-s0"
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value) == ("pass@1", 0.6791)
    assert result.metric_name == "pass@1, 95% interval 0.650 to 0.700"
    assert result.metric_args == {"samples_per_question": 8, "temperature": 1.0}


def test_a_base_and_data_that_are_no_hub_ids_are_in_the_text_alone(tmp_path):
    """The hub refuses them in the metadata; a path of this machine is nobody else's business."""
    model, file = tmp_path / "my-model", tmp_path / "questions.jsonl"
    model.mkdir()
    card = card_of(f"model.name={model}", f"task.train={file}", f"run.dir={tmp_path}")
    data = ModelCard(card).data
    assert data.base_model is None and data.datasets is None
    assert "`my-model` (a local model)" in card and "`questions.jsonl` (a local file)" in card
    assert str(tmp_path) not in card


def test_the_scores_stand_beside_those_without_training():
    card = card_of(*HUB)
    assert "\n| before training | 0.200 | 0.100 to 0.300 |\n" in card
    assert "\n| this model, after step 5 | 0.679 | 0.650 to 0.700 |\n" in card
    assert "pass@8 0.900, completion_tokens 31.230." in card and "eval_s" not in card
    assert "\n| before training | 0.200 |  |\n" in card_of(*HUB, before=(0.2,))  # an old checkpoint
    untrained = card_of(*HUB, step=0)
    assert "| this model, before training | 0.679 |" in untrained
    assert "| before training |" not in untrained


def test_the_recipe_holds_what_differs_and_what_everyone_asks_for():
    card = card_of(*HUB, "training.kl_coef=0.01", "checkpoint.keep=5")
    assert "Steps taken: 5, on 1 x cpu." in card
    recipe = card.split("```")[1]
    lines = recipe.strip().split("\n")
    assert "training.kl_coef: 0.01" in lines and "training.learning_rate: 0.0002" in lines
    assert not any(line.startswith(("checkpoint.", "model.name", "task.train")) for line in lines)


def test_an_adapter_is_loaded_by_peft():
    card = card_of(*HUB, library="peft")
    assert ModelCard(card).data.library_name == "peft"
    assert "An adapter (for the package peft) of [Qwen/Qwen2.5-0.5B]" in card


@pytest.fixture(scope="module")
def finished(tmp_path_factory, rotary_model_folder) -> tuple[Path, str]:
    """best/ of a run of one step, and the run's output."""
    folder = tmp_path_factory.mktemp("run")
    questions = write_questions(folder / "questions.jsonl")
    data = [f"task.train={questions}", f"task.eval={questions}"]
    steps = ["training.num_steps=1", "training.learning_rate=3e-2", "training.warmup_steps=0"]
    sizes = ["validation.num_examples=8", "validation.best_of_n=8", "validation.every=1"]
    rates = {"rates": [0.25, 0.5]}
    output = train(folder, rotary_model_folder, *data, *steps, *sizes, grading=rates)
    return folder / "x/best", output


def test_the_summary_says_how_to_ask_the_model(finished):
    best, output = finished
    (command,) = re.findall(r"^ask it: +python main\.py (.*)$", output, re.MULTILINE)
    config = load_config(command.split(), tasks=TASKS)
    assert (config.mode, config.model.name) == ("sample", str(best))
    assert config.task.train.endswith("questions.jsonl")  # the run's own settings


def test_the_card_of_a_run_tells_the_figures_of_its_best_step(finished):
    best, _ = finished
    rows = [json.loads(line) for line in (best.parent / "metrics.jsonl").read_text().splitlines()]
    rate, low, high = (rows[1][f"eval/pass@1{end}"] for end in ("", "_low", "_high"))
    assert rate == 0.5 > rows[0]["eval/pass@1"]
    card = (best / "README.md").read_text()
    assert f"| this model, after step 1 | {rate:.3f} | {low:.3f} to {high:.3f} |" in card
    assert ModelCard(card).data.eval_results[0].metric_value == round(rate, 4)


def test_the_code_in_the_card_asks_the_model_as_training_did(finished, monkeypatch, capsys):
    """The ids of its prompt are those of a validation question, and it prints a completion.

    Bug: AutoTokenizer, as the card had it, gives other ids for this model.
    """
    best, _ = finished
    monkeypatch.chdir(best)
    (code,) = re.findall(r"```python\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names = {}
    with torch.random.fork_rng():
        exec(code, names)
    config, policy = make_config(), make_policy(best)
    question = re.search(r"numbers \[([0-9]+)\]", names["prompt"])[1]
    example = {"nums": [int(question)], "target": int(question)}
    (prompt_ids,) = encode_prompts([example], config=config, tokenizer=policy.tokenizer)
    assert names["inputs"]["input_ids"].tolist() == [prompt_ids]
    written = names["output"][0, len(prompt_ids) :]
    assert len(written) > 0  # the end at least
    text = policy.tokenizer.decode(written, skip_special_tokens=True)
    assert capsys.readouterr().out.endswith(f"{text}\n")


def test_a_merged_model_has_the_adapters_card_as_a_plain_model():
    adapter = card_of(*HUB, "model.lora.r=4", library="peft")
    merged = ModelCard(merged_card(adapter))
    assert (ModelCard(adapter).data.library_name, merged.data.library_name) == (
        "peft",
        "transformers",
    )
    assert "An adapter" in adapter and "An adapter" not in merged.text
    assert merged.data.eval_results == ModelCard(adapter).data.eval_results
