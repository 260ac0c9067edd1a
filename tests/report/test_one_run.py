"""One short run, and what it leaves looked at from all sides: files, card, page, evaluation."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import ROOT, read_jsonl, read_rows, seed, train

from engine.run.config_file import load_config

SIZES = [f"training.seed={seed()}", "training.num_steps=1", "training.warmup_steps=0"]
SIZES += ["training.learning_rate=3e-2", "training.max_new_gen_tokens=64"]
SIZES += ["validation.num_examples=9", "validation.best_of_n=4", "validation.every=1"]
SIZES += ["logging.samples=2", "logging.train_samples_every=1"]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> SimpleNamespace:
    """A run of one step, and an evaluation of the model that it has made."""
    parent = tmp_path_factory.mktemp("run")
    train(parent, ROOT / "tiny", *SIZES)
    before, trained = files_of(folder := parent / "x"), folder / "checkpoints/last"
    evaluated = train(parent, trained, *SIZES, "mode=evaluate")
    (evaluation,) = folder.glob("eval-*")
    figures = json.loads((evaluation / "metrics.json").read_text())
    return SimpleNamespace(
        folder=folder,
        files=before,
        samples=read_jsonl(folder / "samples.jsonl"),
        evaluation=evaluation,
        evaluation_output=evaluated,
        figures={name: value for name, value in figures.items() if name.startswith("eval/")},
    )


def test_it_keeps_what_it_sampled_and_what_the_update_made(run):
    """A token weighs 1 / (2 x 8 rows x 64 tokens at most)."""
    groups = read_jsonl(run.folder / "rollouts.jsonl")
    assert [(group["step"], group["size"]) for group in groups] == [(1, 8)] * 2
    sampled = [sample for sample in run.samples if sample["split"] == "train"]
    for group, sample in zip(groups, sampled, strict=True):
        assert group["prompt"] == sample["prompt"]
        texts = ["".join(row["tokens"]) for row in group["completions"]]
        assert any(text.removesuffix("<|endoftext|>") == sample["completion"] for text in texts)
        rewards = [row["reward"] for row in group["completions"]]
        for row in group["completions"]:
            expected = row["reward"] - sum(rewards) / len(rewards)
            assert row["advantage"] == pytest.approx(expected, abs=1e-3)
            assert row["weight"] == pytest.approx(1 / (16 * 64), rel=1e-3)  # all rewards differ


def test_an_evaluation_prints_and_writes_its_figures_and_leaves_its_run_alone(run):
    after, output, figures = files_of(run.folder), run.evaluation_output, run.figures
    assert {name: after[name] for name in after if not name.startswith("eval-")} == run.files
    assert "metrics.jsonl" in run.files and "best/model.safetensors" in run.files
    assert set(files_of(run.evaluation)) == {"config.yaml", "metrics.json", "samples.jsonl"}
    config = load_config(["--config", str(run.evaluation / "config.yaml")])
    assert config.mode == "evaluate" and config.model.name == str(run.folder / "checkpoints/last")
    rate, low, high = (figures[f"eval/majority{end}"] for end in ("", "_low", "_high"))
    shown = f"{rate:.3f}  ({9 * rate:.0f} of 9)  (95% interval {low:.3f} to {high:.3f})"
    assert f"\n  majority            {shown}\n" in output
    shown = f"{figures['eval/pass@1']:.3f}  ({36 * figures['eval/pass@1']:.0f} of 36)  (95%"
    assert f"\n  pass@1              {shown}" in output
    assert output.endswith(f"written to {run.evaluation}\n")


def test_an_evaluation_measures_what_training_measured_of_the_same_model(run):
    _, row = read_rows(run.folder)
    logged = {name: value for name, value in row.items() if name.startswith("eval/")}
    assert len(logged) == 17 and 0 < logged["eval/pass@1"] < 1
    assert run.figures.items() >= logged.items()
    more = {f"eval/{name}{end}" for name in ("majority", "greedy") for end in ("", "_low", "_high")}
    assert set(run.figures) == {*logged, *more, "eval/greedy_tokens"}
    samples = read_jsonl(run.evaluation / "samples.jsonl")
    assert len(samples) == 2
    assert all({"step": 1, **sample} in run.samples for sample in samples)
