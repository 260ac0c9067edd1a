"""Every recipe in configs/ runs from end to end, on a tiny random model and a few local rows."""

import copy
import json
import math
import os
from pathlib import Path

import pytest
import torch
from harness import (
    ROOT,
    SIZES,
    alone,
    grade_by_text,
    load_run,
    load_trained,
    read_rows,
    real_file,
    save_random,
    seed,
    tokens_of,
)
from transformers import AutoModelForCausalLM, NanoChatConfig, NanoChatForCausalLM

import main
from engine.core.config import Config
from engine.run.config_file import load_config
from engine.update.optimizer import make_optimizer
from main import CompletionScorer

REAL_FILES = {"gsm8k": "gsm8k/test.jsonl", "math500": "math500/test.json"}
ROWS = {
    "countdown": [{"nums": [n, n + 3, 7], "target": n + 10} for n in range(1, 41)],
    "arithmetic": [{"a": n, "b": n + 50} for n in range(1, 41)],
    "gsm8k": [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in range(1, 41)],
    "math500": [{"problem": f"${n} + {n}$?", "answer": str(2 * n)} for n in range(1, 41)],
}
# Sizes and the seed: what a recipe teaches and how stays as it is. A step teaches nothing if all of
# its completions are solved, which for 32 of them is a chance of 2^-32.
SMALL = [f"training.seed={seed()}", "training.num_steps=2", "training.k_best_of_n=[8, 8]"]
SMALL += ["training.num_samples_per_step_global=4", "training.max_new_gen_tokens=8"]
SMALL += ["validation.max_new_gen_tokens=8", "validation.num_examples=4", "validation.every=1"]
SMALL += ["checkpoint.every=1", "logging.samples=1", "run.name=x"]


def load(recipe: Path, *overrides: str) -> Config:
    return load_config(["--config", str(recipe), *overrides])


# The recipe of a task with an Environment runs in that task's tests: a random model takes no turns.
RECIPES = [file for file in sorted(ROOT.glob("configs/*.yaml")) if load(file).task.name in ROWS]

NANOCHAT = ROOT / "configs/gsm8k-chat-rl.yaml"
NANOCHAT_TOKENS = ["<|bos|>", "<|python_start|>", "<|python_end|>", "<|output_start|>"]
NANOCHAT_TOKENS += ["<|output_end|>", "<|user_start|>", "<|user_end|>"]
NANOCHAT_TOKENS += ["<|assistant_start|>", "<|assistant_end|>"]
NANOCHAT_TEMPLATE = """<|bos|>{%- for message in messages -%}
{{ '<|' + message.role + '_start|>' + message.content + '<|' + message.role + '_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant_start|>{%- endif -%}"""


@pytest.fixture(scope="module")
def nanochat_folder(tokenizer, tmp_path_factory) -> Path:
    """It has nanochat's special tokens and chats, whose turns do not end with its end token."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(NANOCHAT_TOKENS, special_tokens=True)
    tokenizer.chat_template = NANOCHAT_TEMPLATE
    sizes = SIZES | {"max_position_embeddings": 1024, "initializer_range": 0.5}
    config = NanoChatConfig(**sizes, **tokens_of(tokenizer))
    return save_random(NanoChatForCausalLM, config, tokenizer, tmp_path_factory.mktemp("nanochat"))


@pytest.fixture(autouse=True)
def rewards_that_differ(monkeypatch) -> None:
    grade_by_text(monkeypatch)


def rows_for(task: str) -> list[dict]:
    """Rows of the real file, where the task has one and it is there; else those above."""
    if task not in REAL_FILES or "GRPO_TEST_DATA" not in os.environ:
        return ROWS[task]
    text = real_file(REAL_FILES[task]).read_text()
    real = json.loads(text) if text[0] == "[" else [json.loads(line) for line in text.splitlines()]
    return real[:40]


def run_recipe(recipe: Path, model: Path, rows: list[dict], folder: Path) -> Path:
    """Train two steps, then evaluate the best model; returns the run's folder."""
    questions = folder / "rows.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [f"task.train={questions}", f"task.eval={questions}", f"run.dir={folder}", *SMALL]
    if load(recipe).training.learning_type == "sil":
        small.append("training.k_best_of_n=[2, 8]")
    run = load_run(load(recipe, f"model.name={model}", *small))
    trained = {name: p for name, p in run.policy.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    assert main.run_training(run) == 0
    assert before and not any(torch.equal(p, before[name]) for name, p in trained.items())
    run.world.leave()  # with model.shard a rank alone has a process group too
    best = [f"model.name={run.folder / 'best'}", "mode=evaluate"]
    run = load_run(load(recipe, *small, *best))
    assert main.run_evaluation(run) == 0
    return run.folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_to_its_end(recipe, rotary_model_folder, nanochat_folder, tmp_path):
    """The rewards differ by construction, so every weight that is trained moves."""
    config = load(recipe)
    model = nanochat_folder if recipe == NANOCHAT else rotary_model_folder
    folder = run_recipe(recipe, model, rows_for(config.task.name), tmp_path)
    rows = read_rows(folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(row["train/reward"]) for row in rows[1:])
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    is_rounded = config.model.compute_dtype == "bfloat16"  # else it is fp32 on a CPU
    assert all(row["train/sampler_mismatch"] < (0.1 if is_rounded else 1e-4) for row in rows[1:])
    AutoModelForCausalLM.from_pretrained(folder / "best")  # an adapter too
    (measured,) = folder.glob("eval-*/metrics.json")
    metrics, best_metric = json.loads(measured.read_text()), config.validation.best_metric
    assert metrics[best_metric] == max(row[best_metric] for row in rows)
    assert {"eval/greedy", "eval/majority"} <= set(metrics)


def test_nanochats_turns_logits_and_optimizer_are_its_sources(nanochat_folder, monkeypatch):
    """Muon for the blocks' matrices; for embeddings and head AdamW, with nanochat's settings."""
    config = load(NANOCHAT, f"model.name={nanochat_folder}")
    monkeypatch.setattr("engine.model.policy.MAX_LOGITS_BYTES", 0)
    policy = load_trained(config, alone())
    assert set(policy.tokenizer.encode("<|assistant_end|><|bos|>")) < set(policy.params.eos_ids)
    assert policy.params.calculator is not None
    assert (
        type(policy.scorer) is CompletionScorer
    )  # the head alone would score as if there were no cap
    *adamw, muon = make_optimizer(policy.model, config.training).param_groups
    assert len(muon["params"]) == 2 * 6
    assert (muon["momentum"], muon["nesterov"], muon["ns_steps"]) == (0.95, True, 5)
    assert {(group["eps"], *group["betas"]) for group in adamw} == {(1e-10, 0.8, 0.95)}
    assert [group["lr"] for group in (*adamw, muon)] == pytest.approx([1.225e-4, 6.124e-3, 1e-3])
    assert all(group["weight_decay"] == 0 for group in (*adamw, muon))
