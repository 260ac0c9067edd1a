"""Each recipe has the numbers of its source, as typed in here, but for what its header names."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT

from engine.config_file import load_config

ALL_OF_LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
# What the four sources share, by choice or because they do not have the feature
PLAIN = {
    "training.policy_loss": "ppo",
    "training.clip_eps": 0.2,
    "training.clip_eps_high": None,
    "training.tis_clip": None,
    "training.skip_truncated": False,
}

# easy-GRPO by johnnycrab
EASY_GRPO = PLAIN | {
    "model.name": "Qwen/Qwen2.5-3B",
    "model.lora": None,
    "task.name": "countdown",
    "task.reward_weights": {"format": 0.1, "answer": 1.0},
    "sampling.temperature": 1.0,
    "training.max_new_gen_tokens": 1024,
    "training.advantage": "mean",
    "training.loss_normalization": "dr_grpo",
    "training.kl_coef": 0.0,
    "training.num_iterations": 1,
    "training.optimizer": "adamw",
    "training.warmup_steps": 0,
    "validation.every": 10,
    "validation.num_examples": 128,
    "validation.best_of_n": 16,
    "validation.best_by": "best_of_n",
}
SOURCES = {
    "countdown-qwen2.5-3b": EASY_GRPO
    | {
        "training.learning_type": "grpo",
        "training.num_steps": 200,
        "training.num_samples_per_step": 32,
        "training.k_best_of_n": [16, 16],
    },
    "countdown-qwen2.5-3b-sil": EASY_GRPO
    | {
        "training.learning_type": "sil",
        "training.num_steps": 300,
        "training.num_samples_per_step": 64,
        "training.k_best_of_n": [2, 32],
    },
    # nanochat's scripts/chat_rl.py; its rates are times 0.05 at the start, and the model is 2,048
    # wide
    "gsm8k-chat-rl": PLAIN
    | {
        "model.name": "karpathy/nanochat-d32",
        "model.revision": "refs/pr/1",
        "model.lora": None,
        "task.name": "gsm8k",
        "task.train": "openai/gsm8k",
        "task.eval": "openai/gsm8k",
        "task.prompt_style": "plain",
        "task.grading": "official",
        "sampling.temperature": 1.0,
        "sampling.top_p": 1.0,
        "sampling.top_k": 50,
        "sampling.stop": ["<|bos|>"],
        "sampling.calculator": "nanochat",
        "training.learning_type": "grpo",
        "training.num_epochs": 1,
        "training.num_samples_per_step_global": 16,
        "training.k_best_of_n": [16, 16],
        "training.max_new_gen_tokens": 256,
        "training.optimizer": "muon",
        "training.muon_learning_rate": 0.05 * 0.02,
        "training.embedding_learning_rate": 0.05 * 0.2 * (2048 / 768) ** -0.5,
        "training.learning_rate": 0.05 * 0.004 * (2048 / 768) ** -0.5,
        "training.adam_betas": [0.8, 0.95],
        "training.adam_eps": 1e-10,
        "training.weight_decay": 0.0,
        "training.max_grad_norm": "none",
        "training.lr_schedule": "linear",
        "training.warmup_steps": 0,
        "training.advantage": "mean",
        "training.loss_normalization": "passes",
        "training.kl_coef": 0.0,
        "training.num_iterations": 1,
        "validation.every": 60,
        "validation.num_examples": 400,
        "validation.best_of_n": 8,
        "validation.pass_k": [1, 2, 3, 4, 5, 6, 7, 8],
        "validation.temperature": 1.0,
        "validation.max_new_gen_tokens": None,
        "checkpoint.every": 60,
        "checkpoint.keep": None,
    },
    # A notebook with TRL's GRPOTrainer, which counts optimizer steps: 4 of them are one of ours
    "gsm8k-lora": PLAIN
    | {
        "model.name": "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "model.compute_dtype": "bfloat16",
        "model.attn_implementation": "sdpa",
        "model.load_in_4bit": True,
        "model.lora.r": 8,
        "model.lora.alpha": 32,
        "model.lora.dropout": 0.05,
        "model.lora.target_modules": ALL_OF_LLAMA,
        "task.name": "gsm8k",
        "task.train": "openai/gsm8k",
        "task.eval": "openai/gsm8k",
        "task.prompt_style": "tags",
        "task.tag_grading": "strict",
        "task.reward_weights": {
            "format": 1.0,
            "answer": 1.0,
            "ending": 1.0,
            "integer": 1.0,
            "length": 0.0,
        },
        "sampling.temperature": 0.7,
        "sampling.top_p": 0.9,
        "sampling.top_k": 50,
        "training.learning_type": "grpo",
        "training.num_epochs": 3,
        "training.num_samples_per_step_global": 32 // 2,
        "training.k_best_of_n": [2, 2],
        "training.max_new_gen_tokens": 128,
        "training.optimizer": "adamw",
        "training.learning_rate": 2e-4,
        "training.adam_betas": [0.9, 0.999],
        "training.weight_decay": 0.01,
        "training.lr_schedule": "cosine",
        "training.warmup_steps": 500 / 4,
        "training.max_grad_norm": 1.0,
        "training.advantage": "zscore",
        "training.loss_normalization": "local",
        "training.kl_coef": 0.02,
        "training.num_iterations": 4,
        "validation.every": 250 / 4,
        "validation.num_examples": 1319,
        "logging.samples": 10,
        "checkpoint.every": "an epoch",
    },
    # slime's pull request 1835: the run that it reports
    "gsm8k-qwen2.5-0.5b": PLAIN
    | {
        "model.name": "Qwen/Qwen2.5-0.5B-Instruct",
        "model.lora": None,
        "task.name": "gsm8k",
        "task.train": "openai/gsm8k",
        "task.eval": "openai/gsm8k",
        "training.learning_type": "grpo",
        "training.num_steps": 100,
        "training.num_samples_per_step_global": 20,
        "training.k_best_of_n": [8, 8],
        "training.optimizer": "adamw",
        "training.learning_rate": 1e-6,
        "training.lr_schedule": "constant",
        "training.clip_eps_high": 0.28,
        "training.num_iterations": 1,
        "validation.num_examples": 1319,
        "validation.best_of_n": 1,
        "validation.temperature": 0,
    },
    # S. Raschka, chapter 6: the published run
    "math-rlvr": PLAIN
    | {
        "model.name": "Qwen/Qwen3-0.6B-Base",
        "model.lora": None,
        "task.name": "math500",
        "task.shuffle": False,
        "task.max_train_examples": None,
        "sampling.temperature": 0.8,
        "sampling.top_p": 0.9,
        "training.learning_type": "grpo",
        "training.num_steps": 50,
        "training.num_samples_per_step_global": 1,
        "training.k_best_of_n": [8, 8],
        "training.max_new_gen_tokens": 512,
        "training.optimizer": "adamw",
        "training.learning_rate": 1e-5,
        "training.adam_betas": [0.9, 0.999],
        "training.adam_eps": 1e-8,
        "training.weight_decay": 0.01,
        "training.lr_schedule": "constant",
        "training.warmup_steps": 0,
        "training.max_grad_norm": 1.0,
        "training.advantage": "zscore",
        "training.loss_normalization": "sum",
        "training.kl_coef": 0.0,
        "training.num_iterations": 1,
        "validation.num_examples": 500,
        "validation.best_of_n": 1,
        "validation.temperature": 0,
        "validation.max_new_gen_tokens": 2048,
        "logging.samples": 3,
        "logging.train_samples_every": 10,
        "checkpoint.every": 50,
        "checkpoint.keep": None,
    },
}
OUR_OWN = {
    "countdown-tiny-sil",
    "countdown-tiny-hard",
    "countdown-qwen2.5-7b",
    "arithmetic-smollm2",
    "gsm8k-qwen2.5-1.5b-lora",
    "guess-smollm2",
}  # recipes without a source
# "#   training.learning_rate  1e-6 (source: unknown): why"
NAMED = re.compile(r"^#   (\w+\.[\w.]+)  (\S+) \(source: ([^)]*)\)", re.MULTILINE)


def resolved(recipe: Path) -> dict[str, Any]:
    """The recipe's values with the defaults, by dotted name, at any depth."""
    values, todo = {}, [("", load_config(["--config", str(recipe)]).model_dump())]
    while todo:
        prefix, content = todo.pop()
        for key, value in content.items():
            values[f"{prefix}{key}"] = value
            if isinstance(value, dict):
                todo.append((f"{prefix}{key}.", value))
    return values


def test_every_recipe_has_a_source_or_is_our_own():
    assert {path.stem for path in ROOT.glob("configs/*.yaml")} == SOURCES.keys() | OUR_OWN


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_its_sources_numbers_or_names_both_in_its_header(name: str):
    """So neither the recipe, nor a default that it relies on, nor its header can drift."""
    recipe, source = ROOT / "configs" / f"{name}.yaml", SOURCES[name]
    values = resolved(recipe)
    # Rates are written to four digits.
    differing = {
        key: (values[key], theirs)
        for key, theirs in source.items()
        if values[key] != (pytest.approx(theirs, rel=5e-4) if type(theirs) is float else theirs)
    }
    header, _, _ = recipe.read_text().partition("\n\n")
    found = NAMED.findall(header)
    named = {key: (load_yaml(ours), load_yaml(theirs)) for key, ours, theirs in found}
    assert all(values[key] == ours for key, (ours, _) in named.items())
    published = {key: pair for key, pair in named.items() if pair[1] != "unknown"}
    assert published == differing and not (named.keys() - published) & source.keys()


def load_yaml(text: str) -> Any:
    """The value of a text; YAML 1.1 alone would take 1e-6 for text."""
    value = yaml.safe_load(text)
    return float(text) if re.fullmatch(r"[0-9.]+e[-+]?[0-9]+", text) else value
