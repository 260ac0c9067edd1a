"""Recipes: what differs from their sources is named, and each runs on a random model."""

import functools
import json
import operator
import re

import pytest
import torch
import yaml
from harness import ROOT, ROWS, grade_by_text, load_run, read_rows, seed

import main
from engine.core.config import Config, dotted_values
from engine.run.config_file import load_config

CONFIGS = {file.stem: file for file in sorted(ROOT.glob("configs/*.yaml"))}


def load(name: str, *overrides: str) -> Config:
    return load_config(["--config", str(CONFIGS[name]), *overrides])


# "#   training.learning_rate  1e-6 (source: unknown): why"
NAMED = re.compile(r"^#   (\w+\.[\w.]+)  (\S+) \(source: ([^)]*)\)", re.MULTILINE)
# What each source has, as read there: a recipe that drifts from it, and does not say so, fails.
SOURCES = yaml.safe_load("""
countdown-qwen2.5-3b: &easy
  model.name: Qwen/Qwen2.5-3B
  task.reward_weights: {format: 0.1, answer: 1.0}
  sampling: {temperature: 1.0, top_p: 1.0, top_k: 0}
  training: {learning_type: grpo, num_steps: 200, num_samples_per_step: 32, k_best_of_n: [16, 16],
    max_new_gen_tokens: 1024, advantage: mean, loss_normalization: dr_grpo, kl_coef: 0.0,
    num_iterations: 1}
  validation: {every: 10, num_examples: 128, best_of_n: 16, best_by: best_of_n}
countdown-qwen2.5-3b-sil:
  <<: *easy
  training: {learning_type: sil, num_steps: 300, num_samples_per_step: 64, k_best_of_n: [2, 32],
    max_new_gen_tokens: 1024, loss_normalization: dr_grpo, kl_coef: 0.0, num_iterations: 1}
gsm8k-lora:
  model: {name: meta-llama/Meta-Llama-3.1-8B-Instruct, load_in_4bit: true, trust_remote_code: true,
    attn_implementation: sdpa, compute_dtype: bfloat16}
  model.lora: {r: 8, alpha: 32, dropout: 0.05,
    target_modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]}
  sampling: {temperature: 0.7, top_p: 0.9, top_k: 50}
  training: {num_epochs: 3, num_samples_per_step_global: 16, k_best_of_n: [2, 2],
    max_new_gen_tokens: 128, learning_rate: 2.0e-4, adam_betas: [0.9, 0.999], weight_decay: 0.01,
    lr_schedule: cosine, warmup_steps: 125, max_grad_norm: 1.0, kl_coef: 0.02, num_iterations: 4,
    clip_eps: 0.2, advantage: zscore, loss_normalization: local}
  validation: {every: 62.5, num_examples: 1319}
  checkpoint.every: an epoch
gsm8k-chat-rl:
  task.grading: official
  sampling: {temperature: 1.0, top_k: 50}
  training: {num_epochs: 1, num_samples_per_step_global: 16, k_best_of_n: [16, 16],
    max_new_gen_tokens: 256, optimizer: muon, muon_learning_rate: 0.001, learning_rate: 1.225e-4,
    embedding_learning_rate: 6.124e-3, adam_betas: [0.8, 0.95], adam_eps: 1.0e-10,
    weight_decay: 0.0, max_grad_norm: none, lr_schedule: linear, warmup_steps: 0, advantage: mean,
    loss_normalization: passes, kl_coef: 0.0}
  validation: {every: 60, num_examples: 400, best_of_n: 8, pass_k: [1, 2, 3, 4, 5, 6, 7, 8]}
  checkpoint: {every: 60, keep: null}
math-rlvr:
  model.name: Qwen/Qwen3-0.6B-Base
  task.shuffle: false
  sampling: {temperature: 0.8, top_p: 0.9}
  training: {num_steps: 50, num_samples_per_step_global: 1, k_best_of_n: [8, 8],
    max_new_gen_tokens: 512, learning_rate: 1.0e-5, weight_decay: 0.01, max_grad_norm: 1.0,
    lr_schedule: constant, warmup_steps: 0, advantage: zscore, loss_normalization: sum}
  validation: {num_examples: 500, best_of_n: 1, temperature: 0.0, max_new_gen_tokens: 2048}
  checkpoint: {every: 50, keep: null}
gsm8k-qwen2.5-0.5b:
  training: {num_steps: 100, num_samples_per_step_global: 20, k_best_of_n: [8, 8],
    learning_rate: 1.0e-6, lr_schedule: constant, clip_eps_high: 0.28, num_iterations: 1}
""")


@pytest.mark.parametrize("name", SOURCES | CONFIGS)
def test_a_recipe_holds_only_what_differs_and_has_its_sources_numbers_or_names_its_own(name: str):
    config, text = load(name), CONFIGS[name].read_text()
    numbers, header = config.model_dump(mode="json"), text.partition("\n\n")[0]
    named = {key: source for key, _, source in NAMED.findall(header)}
    for section, keys in SOURCES.get(name, {}).items():
        for key, source in (keys if isinstance(keys, dict) else {"": keys}).items():
            path = f"{section}.{key}".strip(".")
            ours = functools.reduce(operator.getitem, path.split("."), numbers)
            assert ours == source or named.get(path) == str(source), (path, ours, source)
    values, defaults = dotted_values(config), dotted_values(type(config)())
    given = [f"{name}.{key}" for name, keys in yaml.safe_load(text).items() for key in keys]
    same = {key for key in given if values[key] == defaults[key]}
    spelled_out = {"training.k_best_of_n", "training.micro_batch_tokens"}  # for the reader
    assert same <= spelled_out, "all else differs"
    for word in ("command", "hardware", "time", "result"):
        assert re.search(rf"^#   {word} ", text, re.MULTILINE), word
    assert f"--config configs/{name}.yaml" in text
    for key, ours, _ in NAMED.findall(header):
        value = functools.reduce(operator.getitem, key.split("."), numbers)
        number = float(ours) if re.fullmatch(r"[0-9.]+e[-+]?[0-9]+", ours) else yaml.safe_load(ours)
        assert value == number, key


# Sizes and the seed: what a recipe teaches and how stays as it is. A step teaches nothing if all of
# its completions are solved, which for 16 of them is a chance of 2^-16.
SMALL = [f"training.seed={seed()}", "training.num_steps=2", "training.k_best_of_n=[4, 4]"]
SMALL += ["training.num_samples_per_step_global=4", "training.max_new_gen_tokens=8"]
SMALL += ["validation.max_new_gen_tokens=8", "validation.num_examples=2", "validation.every=2"]
SMALL += ["checkpoint.every=2", "logging.samples=1", "run.name=x"]
# A task with an Environment needs a chat model.
RECIPES = [name for name in CONFIGS if load(name).task.name in ROWS]
# What a random model of another family lacks: nanochat's tokens.
LACKS = {"gsm8k-chat-rl": ["sampling.stop=[]", "sampling.calculator=null"]}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_two_steps_and_evaluates_the_best_model(
    name, rotary_model_folder, tmp_path, monkeypatch
):
    """The rewards differ by construction, so every weight that is trained moves."""
    grade_by_text(monkeypatch)
    questions = tmp_path / "rows.jsonl"
    rows = ROWS[load(name).task.name]
    questions.write_text("\n".join(map(json.dumps, rows)))
    small = [f"task.train={questions}", f"task.eval={questions}", f"run.dir={tmp_path}", *SMALL]
    if load(name).training.learning_type == "sil":
        small.append("training.k_best_of_n=[2, 4]")
    small += LACKS.get(name, [])
    run = load_run(load(name, f"model.name={rotary_model_folder}", *small))
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
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    if config.training.learning_type == "sil":
        assert all(row["train/advantage_abs"] == 1 for row in rows[1:])  # of those it imitates
    is_rounded = config.model.compute_dtype in ("bfloat16", "float16")  # else fp32 on a CPU
    assert all(row["train/sampler_mismatch"] < (0.1 if is_rounded else 1e-4) for row in rows[1:])
    (measured,) = run.folder.glob("eval-*/metrics.json")
    metrics, best_metric = json.loads(measured.read_text()), config.best_metric
    assert metrics[best_metric] == max(row[best_metric] for row in rows[::2])
    assert {"eval/greedy", "eval/majority"} <= set(metrics)
