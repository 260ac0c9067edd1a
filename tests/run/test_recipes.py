"""Recipes: what differs from their sources is named, and each runs on a random model."""

import functools
import json
import operator
import re

import pytest
import torch
import yaml
from harness import ROOT, ROWS, grade_by_text, load_run, read_rows, seed, table

import main
from engine.core.config import Config, dotted_values
from engine.run.config_file import load_config

CONFIGS = {file.stem: file for file in sorted(ROOT.glob("configs/*.yaml"))}
SOURCES = table("run/recipes.yaml")
# "#   training.learning_rate  1e-6 (source: unknown): why"
NAMED = re.compile(r"^#   (\w+\.[\w.]+)  (\S+) \(source: ([^)]*)\)", re.MULTILINE)


def load(name: str, *overrides: str) -> Config:
    return load_config(["--config", str(CONFIGS[name]), *overrides])


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
