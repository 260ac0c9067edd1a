"""Every recipe in configs/ runs from end to end, on a tiny random model and a few local rows."""

import json
import math
import os
from pathlib import Path

import pytest
from harness import ROOT, grade_by_text, seed
from transformers import AutoModelForCausalLM

import main
from engine.config import Config, load_config

REAL_FILES = {"gsm8k": "gsm8k/test.jsonl", "math500": "math500/test.json"}
ROWS = {
    "countdown": [{"nums": [n, n + 3, 7], "target": n + 10} for n in range(1, 41)],
    "gsm8k": [{"question": f"{n} and {n}?", "answer": f"#### {2 * n}"} for n in range(1, 41)],
    "math500": [{"problem": f"${n} + {n}$?", "answer": str(2 * n)} for n in range(1, 41)],
}
SMALL = [  # sizes and the seed: what a recipe teaches and how stays as it is
    f"training.seed={seed()}",
    "training.num_steps=2",
    "training.k_best_of_n=[4, 4]",
    "training.max_new_gen_tokens=8",
    "validation.num_examples=4",
    "validation.every=1",
    "checkpoint.every=1",
    "logging.samples=1",
    "run.name=x",
]


def load(recipe: Path, *overrides: str) -> Config:
    return load_config(["--config", str(recipe), *overrides])


RECIPES = sorted(ROOT.glob("configs/*.yaml"))
WITH_FILES = [recipe for recipe in RECIPES if load(recipe).task.name in REAL_FILES]


@pytest.fixture(autouse=True)
def rewards_that_differ(monkeypatch) -> None:
    grade_by_text(monkeypatch)


def run_recipe(recipe: Path, model: Path, rows: list[dict], folder: Path) -> Path:
    """Train two steps, then evaluate the best model; returns the run's folder."""
    questions = folder / "rows.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = [f"task.train={questions}", f"task.eval={questions}", f"run.dir={folder}", *SMALL]
    if load(recipe).training.learning_type == "sil":
        small.append("training.k_best_of_n=[2, 4]")
    run = main.load_run(load(recipe, f"model.name={model}", *small))
    assert main.run_training(run) == 0
    best = [f"model.name={run.folder / 'best'}", "mode=evaluate"]
    assert main.run_evaluation(main.load_run(load(recipe, *small, *best))) == 0
    return run.folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_saves_and_evaluates(recipe, rotary_model_folder, tmp_path):
    task = load(recipe).task.name
    folder = run_recipe(recipe, rotary_model_folder, ROWS[task], tmp_path)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(math.isfinite(row["train/reward"]) for row in rows[1:])
    assert all(row["train/grad_norm"] > 0 for row in rows[1:])
    AutoModelForCausalLM.from_pretrained(folder / "best")  # an adapter too
    (measured,) = folder.glob("eval-*/metrics.json")
    best = max(row["eval/pass@1"] for row in rows)
    metrics = json.loads(measured.read_text())
    assert metrics["eval/pass@1"] == best
    assert {"eval/greedy", "eval/majority"} <= set(metrics)


@pytest.mark.parametrize("recipe", WITH_FILES, ids=lambda path: path.stem)
def test_a_recipe_runs_on_rows_of_the_real_files(recipe, rotary_model_folder, tmp_path):
    task = load(recipe).task.name
    if "GRPO_TEST_DATA" not in os.environ:
        pytest.skip("needs GRPO_TEST_DATA")
    text = (Path(os.environ["GRPO_TEST_DATA"]) / REAL_FILES[task]).read_text()
    real = json.loads(text) if text[0] == "[" else [json.loads(line) for line in text.splitlines()]
    folder = run_recipe(recipe, rotary_model_folder, real[:40], tmp_path)
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 3
