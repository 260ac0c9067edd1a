"""The benchmarks run."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import ROOT, USERS_ENVIRONMENT, benchmark, forkserver, read_jsonl
from PIL import Image, ImageSequence
from safetensors.torch import load_file

from tools.plot import read_table

pytestmark = pytest.mark.slow


def run_quickly(python: Path, script: str, *arguments: str, size: str = "--quick") -> str:
    """What a benchmark prints on the smallest sizes."""
    command = [python, f"benchmarks/{script}", *size.split(), *arguments]
    how = {"capture_output": True, "text": True, "timeout": 120}
    result = subprocess.run(command, cwd=ROOT, env=USERS_ENVIRONMENT, **how)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_rollouts_benchmark_prints_every_table_and_what_was_not_measured(monkeypatch, capsys):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # for the ranks, whose start is a fork here
    rollouts = benchmark("rollouts")
    monkeypatch.setattr(rollouts.multiprocessing, "get_context", lambda method: forkserver())
    rollouts.main(["--quick"])
    output = capsys.readouterr().out
    for name in ("grouped", "model.generate", "questions", "samples", "max_new_tokens", "2 ranks"):
        assert any(line.startswith(name) for line in output.splitlines()), name
    assert output.count("not measured") == 2


def test_searches_counts_tries_and_equations_and_answers_a_question(tmp_path, python):
    """Bug: it called main.py in a way that was no longer there, and no test noticed."""
    size = "validation.num_examples=4 validation.best_of_n=2 validation.pass_k=[1]"
    file = tmp_path / "searches.md"
    lines = run_quickly(python, "searches.py", "--out", str(file), size=size).splitlines()
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["completions"][-1] == "8" and "equations right" in rows
    assert any(line.startswith("README's question, greedily (") for line in lines)
    command, _, *table = file.read_text().splitlines()
    assert command == f"`python benchmarks/searches.py {size}`"
    cells = [cell.strip() for cell in table[2].strip("|").split("|")]
    assert cells[0] == "completions" and cells[-1] == "8"


def test_the_gif_of_readme_is_what_its_command_draws(python, tmp_path):
    page = (ROOT / "results/README.md").read_text().splitlines()
    command = next(line for line in page if line.startswith("python benchmarks/think.py"))
    *arguments, kept = shlex.split(command)[2:]
    drawn = tmp_path / "think.gif"
    run_quickly(python, "think.py", *arguments, str(drawn), size="")
    gifs = [Image.open(path) for path in (ROOT / kept, drawn)]
    frames, again = ([frame.info["duration"] for frame in ImageSequence.Iterator(g)] for g in gifs)
    assert frames == again and len(frames) > 20


@pytest.mark.parametrize("part", ["correctness", "adapters", "speed", "step"])
def test_what_only_a_gpu_can_show_runs_as_a_toy(python, part, tmp_path):
    """Every aim of correctness is reached on a CPU too; speed has none for toys."""
    output = run_quickly(python, "gpu.py", part, "--out", str(tmp_path))
    found = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    assert found["part"] == part and len(found["rows"]) >= 5
    assert all(row["is_reached"] and row["name"] in output for row in found["rows"])


def test_a_tree_equals_itself_but_not_one_with_another_constant(python, monkeypatch, capsys):
    """The limit of the KL penalty matters where there is one, and there alone. In one step."""
    equality, names = benchmark("equality"), ["default", "gspo-kl"]
    one_step = ["training.num_steps=1", "validation.num_examples=2", "checkpoint.every=1"]
    for name in names:
        overrides = [*equality.CONFIGURATIONS[name].overrides, *one_step]
        monkeypatch.setitem(equality.CONFIGURATIONS, name, equality.Configuration(overrides))
    changed = ["--set-b", "KL_LOG_RATIO_LIMIT=0.001", "--only", *names]
    monkeypatch.setattr(sys, "argv", ["equality.py", str(ROOT), str(ROOT), *changed])
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SystemExit, match="True"):
        equality.main()
    output = capsys.readouterr().out
    assert "| default | equal |" in output
    assert "| gspo-kl | weights: at most " in output


def test_a_step_of_the_published_setting_is_timed(python):
    assert "3B step" in run_quickly(python, "step_3b.py")


def test_our_side_of_the_learning_benchmark_runs_once(python, tmp_path):
    """TRL's needs the package trl, which is no dependency of ours."""
    ours = ["--sides", "plain-grpo", "--seeds", "1", "--out", str(tmp_path)]
    assert "plain-grpo, seed 1" in run_quickly(python, "learning.py", *ours)
    rows = read_jsonl(tmp_path / "learning/plain-grpo-s1.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert 0 == rows[0]["minutes"] < rows[1]["minutes"] < rows[2]["minutes"]
    assert "seed 1" not in run_quickly(python, "learning.py", *ours)


def test_ablations_leave_metrics_a_table_and_a_picture_and_run_once(python, tmp_path):
    rows = {"bf16-weights": torch.bfloat16, "top-k-10": torch.float32}  # with a switch each
    arguments = ["--rows", *rows, "--jobs", "1", "--out", str(tmp_path)]
    output = run_quickly(python, "ablations.py", *arguments)
    assert [f"{row}-s0: done" in output for row in rows] == [True, True]
    assert (tmp_path / "ablations.md").read_text().count("not run") > 15
    for row, dtype in rows.items():
        run, kept = tmp_path / f"ablations/runs/{row}-s0", tmp_path / f"ablations/{row}-s0.csv"
        weights = load_file(run / "checkpoints/last/model.safetensors").values()
        assert {weight.dtype for weight in weights} == {dtype}
        assert read_table(kept).rows["step"].tolist() == [0, 1, 2]
        assert read_table(kept).rows.equals(read_table(run).rows)
    assert "done" not in run_quickly(python, "ablations.py", *arguments)
