"""Each recipe has its source's numbers, and runs from end to end on a tiny random model."""

import copy
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from harness import (
    ROOT,
    SIZES,
    alone,
    grade_by_text,
    load_run,
    load_trained,
    read_rows,
    save_random,
    seed,
    tokens_of,
)
from transformers import AutoModelForCausalLM, NanoChatConfig, NanoChatForCausalLM

import main
from engine.core.config import Config, dotted
from engine.run.config_file import load_config
from engine.update.optimizer import make_optimizer

CONFIGS = {file.stem: file for file in sorted(ROOT.glob("configs/*.yaml"))}


def load(name: str, *overrides: str) -> Config:
    return load_config(["--config", str(CONFIGS[name]), *overrides])


# The numbers, as typed in here from the sources

# What the four sources share, by choice or because they do not have the feature
PLAIN = "training: {policy_loss: ppo, clip_eps: 0.2, tis_clip: null, skip_truncated: false}"
EASY_GRPO = """
model: {name: Qwen/Qwen2.5-3B, lora: null}
task: {name: countdown, reward_weights: {format: 0.1, answer: 1.0}}
sampling: {temperature: 1.0}
training: {max_new_gen_tokens: 1024, advantage: mean, loss_normalization: dr_grpo, kl_coef: 0.0,
  optimizer: adamw, clip_eps_high: null, num_iterations: 1, warmup_steps: 0}
validation: {every: 10, num_examples: 128, best_of_n: 16, best_by: best_of_n}
"""
SOURCES = {  # rates are written to four digits
    # easy-GRPO by johnnycrab
    "countdown-qwen2.5-3b": EASY_GRPO
    + """training.learning_type: grpo
training.num_steps: 200
training.num_samples_per_step: 32
training.k_best_of_n: [16, 16]
""",
    "countdown-qwen2.5-3b-sil": EASY_GRPO
    + """training.learning_type: sil
training.num_steps: 300
training.num_samples_per_step: 64
training.k_best_of_n: [2, 32]
""",
    # nanochat's scripts/chat_rl.py: its rates are times 0.05 at the start, and those of AdamW are
    # divided by the root of 2048 / 768, since the model is 2,048 wide: 0.05 x 0.02 for Muon, of 0.2
    # for embeddings and of 0.004 for the rest
    "gsm8k-chat-rl": """
model: {name: karpathy/nanochat-d32, revision: refs/pr/1, lora: null}
task: {name: gsm8k, train: openai/gsm8k, eval: openai/gsm8k, prompt_style: plain, grading: official}
sampling: {temperature: 1.0, top_p: 1.0, top_k: 50, stop: [<|bos|>], calculator: nanochat}
training: {num_epochs: 1, num_samples_per_step_global: 16, k_best_of_n: [16, 16],
  learning_type: grpo, max_new_gen_tokens: 256, optimizer: muon, muon_learning_rate: 1.0e-3,
  embedding_learning_rate: 6.124e-3, learning_rate: 1.225e-4, adam_betas: [0.8, 0.95],
  adam_eps: 1.0e-10, weight_decay: 0.0, max_grad_norm: none, clip_eps_high: null,
  lr_schedule: linear, warmup_steps: 0, advantage: mean, loss_normalization: passes, kl_coef: 0.0,
  num_iterations: 1}
validation: {every: 60, num_examples: 400, best_of_n: 8, pass_k: [1, 2, 3, 4, 5, 6, 7, 8],
  temperature: 1.0, max_new_gen_tokens: null}
checkpoint: {every: 60, keep: null}
""",
    # A notebook with TRL's GRPOTrainer, which counts optimizer steps: 4 of them are one of ours (it
    # warms up for 500 and evaluates every 250), and its batch of 32 rows has 16 questions
    "gsm8k-lora": """
model: {name: meta-llama/Meta-Llama-3.1-8B-Instruct, compute_dtype: bfloat16, load_in_4bit: true,
  attn_implementation: sdpa, lora: {r: 8, alpha: 32, dropout: 0.05,
  target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}}
task: {name: gsm8k, train: openai/gsm8k, eval: openai/gsm8k, prompt_style: tags,
  reward_weights: {format: 1.0, answer: 1.0, ending: 1.0, integer: 1.0, length: 0.0},
  tag_grading: strict}
sampling: {temperature: 0.7, top_p: 0.9, top_k: 50}
training: {num_epochs: 3, num_samples_per_step_global: 16, k_best_of_n: [2, 2],
  learning_type: grpo, max_new_gen_tokens: 128, optimizer: adamw, learning_rate: 2.0e-4,
  adam_betas: [0.9, 0.999], weight_decay: 0.01, clip_eps_high: null, lr_schedule: cosine,
  warmup_steps: 125, max_grad_norm: 1.0, advantage: zscore, loss_normalization: local,
  kl_coef: 0.02, num_iterations: 4}
validation: {every: 62.5, num_examples: 1319}
logging: {samples: 10}
checkpoint: {every: an epoch}
""",
    # slime's pull request 1835: the run that it reports
    "gsm8k-qwen2.5-0.5b": """
model: {name: Qwen/Qwen2.5-0.5B-Instruct, lora: null}
task: {name: gsm8k, train: openai/gsm8k, eval: openai/gsm8k}
training: {num_steps: 100, num_samples_per_step_global: 20, k_best_of_n: [8, 8],
  learning_type: grpo, optimizer: adamw, learning_rate: 1.0e-6, lr_schedule: constant,
  clip_eps_high: 0.28, num_iterations: 1}
validation: {num_examples: 1319, best_of_n: 1, temperature: 0}
""",
    # S. Raschka, chapter 6: the published run
    "math-rlvr": """
model: {name: Qwen/Qwen3-0.6B-Base, lora: null}
task: {name: math500, shuffle: false, max_train_examples: null}
sampling: {temperature: 0.8, top_p: 0.9}
training: {num_steps: 50, num_samples_per_step_global: 1, k_best_of_n: [8, 8], learning_type: grpo,
  max_new_gen_tokens: 512, optimizer: adamw, learning_rate: 1.0e-5, adam_betas: [0.9, 0.999],
  adam_eps: 1.0e-8, weight_decay: 0.01, clip_eps_high: null, lr_schedule: constant,
  warmup_steps: 0, max_grad_norm: 1.0, advantage: zscore, loss_normalization: sum, kl_coef: 0.0,
  num_iterations: 1}
validation: {num_examples: 500, best_of_n: 1, temperature: 0, max_new_gen_tokens: 2048}
logging: {samples: 3, train_samples_every: 10}
checkpoint: {every: 50, keep: null}
""",
}
OUR_OWN = {"countdown-tiny-sil", "countdown-tiny-hard", "countdown-qwen2.5-7b"}  # without a source
OUR_OWN |= {"arithmetic-smollm2", "gsm8k-qwen2.5-1.5b-lora", "guess-smollm2"}
# "#   training.learning_rate  1e-6 (source: unknown): why"
NAMED = re.compile(r"^#   (\w+\.[\w.]+)  (\S+) \(source: ([^)]*)\)", re.MULTILINE)


def flatten(values: dict[str, Any]) -> dict[str, Any]:
    """By dotted name, whatever the depth."""
    while any(isinstance(value, dict) for value in values.values()):
        values = dotted(values)
    return values


def load_yaml(text: str) -> Any:
    """The value of a text; YAML 1.1 alone would take 1e-6 for text."""
    value = yaml.safe_load(text)
    return float(text) if re.fullmatch(r"[0-9.]+e[-+]?[0-9]+", text) else value


def test_every_recipe_has_a_source_or_is_our_own():
    assert CONFIGS.keys() == SOURCES.keys() | OUR_OWN


@pytest.mark.parametrize("name", SOURCES)
def test_a_recipe_has_its_sources_numbers_or_names_both_in_its_header(name: str):
    """So neither the recipe, nor a default that it relies on, nor its header can drift."""
    values = flatten(load(name).model_dump())
    source = flatten(yaml.safe_load(PLAIN)) | flatten(yaml.safe_load(SOURCES[name]))
    differing = {
        key: (values[key], theirs)
        for key, theirs in source.items()
        if values[key] != (pytest.approx(theirs, rel=5e-4) if type(theirs) is float else theirs)
    }
    header, _, _ = CONFIGS[name].read_text().partition("\n\n")
    found = NAMED.findall(header)
    named = {key: (load_yaml(ours), load_yaml(theirs)) for key, ours, theirs in found}
    assert all(values[key] == ours for key, (ours, _) in named.items())
    published = {key: pair for key, pair in named.items() if pair[1] != "unknown"}
    assert published == differing and not (named.keys() - published) & source.keys()


# The runs

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


# The recipe of a task with an Environment runs in that task's tests: a random model takes no turns.
RECIPES = [name for name in CONFIGS if load(name).task.name in ROWS]

NANOCHAT = "gsm8k-chat-rl"
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


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_two_steps_and_evaluates_the_best_model(
    name, rotary_model_folder, nanochat_folder, tmp_path
):
    """The rewards differ by construction, so every weight that is trained moves."""
    questions = tmp_path / "rows.jsonl"
    rows = ROWS[load(name).task.name]
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [f"task.train={questions}", f"task.eval={questions}", f"run.dir={tmp_path}", *SMALL]
    if load(name).training.learning_type == "sil":
        small.append("training.k_best_of_n=[2, 8]")
    model = nanochat_folder if name == NANOCHAT else rotary_model_folder
    run = load_run(load(name, f"model.name={model}", *small))
    config = run.config
    trained = {name: p for name, p in run.policy.model.named_parameters() if p.requires_grad}
    before = {name: p.detach().clone() for name, p in trained.items()}
    assert main.run_training(run) in (0, 1)  # 1 where the toy earned nothing
    assert before and not any(torch.equal(p, before[name]) for name, p in trained.items())
    run.world.leave()  # with model.shard a rank alone has a process group too
    run = load_run(load(name, *small, f"model.name={run.folder / 'best'}", "mode=evaluate"))
    assert main.run_evaluation(run) == 0
    rows = read_rows(run.folder)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(row["train/reward"]) for row in rows[1:])
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    is_rounded = config.model.compute_dtype == "bfloat16"  # else it is fp32 on a CPU
    assert all(row["train/sampler_mismatch"] < (0.1 if is_rounded else 1e-4) for row in rows[1:])
    AutoModelForCausalLM.from_pretrained(run.folder / "best")  # an adapter too
    (measured,) = run.folder.glob("eval-*/metrics.json")
    metrics, best_metric = json.loads(measured.read_text()), config.best_metric
    assert metrics[best_metric] == max(row[best_metric] for row in rows)
    assert {"eval/greedy", "eval/majority"} <= set(metrics)


def test_nanochats_turns_end_and_its_optimizer_is_set_as_its_source_is(nanochat_folder):
    """Muon for the blocks' matrices; for embeddings and head AdamW, with nanochat's settings."""
    config = load(NANOCHAT, f"model.name={nanochat_folder}")
    policy = load_trained(config, alone())
    assert set(policy.tokenizer.encode("<|assistant_end|><|bos|>")) < set(policy.params.eos_ids)
    assert policy.params.calculator is not None
    *adamw, muon = make_optimizer(policy.model, config.training).param_groups
    assert len(muon["params"]) == 2 * 6
    assert (muon["momentum"], muon["nesterov"], muon["ns_steps"]) == (0.95, True, 5)
    assert {(group["eps"], *group["betas"]) for group in adamw} == {(1e-10, 0.8, 0.95)}
    assert [group["lr"] for group in (*adamw, muon)] == pytest.approx([1.225e-4, 6.124e-3, 1e-3])
    assert all(group["weight_decay"] == 0 for group in (*adamw, muon))
