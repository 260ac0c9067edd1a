"""The benchmarks run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, USERS_ENVIRONMENT, benchmark

pytestmark = pytest.mark.slow


def run_quickly(python: Path, *arguments: str) -> str:
    """What a benchmark prints."""
    command = [python, f"benchmarks/{arguments[0]}", *arguments[1:]]
    how = {"capture_output": True, "text": True, "timeout": 120}
    result = subprocess.run(command, cwd=ROOT, env=USERS_ENVIRONMENT, **how)
    assert result.returncode == 0, result.stderr
    return result.stdout


# Bug: searches.py called main.py in a way that was no longer there, and no test noticed.
PRINTED = {
    "searches.py validation.num_examples=4 validation.best_of_n=2 validation.pass_k=[1]": "\nequat",
    "think.py --title 54 --out HERE/think.gif": "",
    "learning.py --quick --sides plain-grpo --seeds 1 --out HERE": "plain-grpo, seed 1",
}


@pytest.mark.parametrize("command", PRINTED)
def test_a_benchmark_prints_what_it_measures(python, tmp_path, command):
    """TRL's side of learning.py needs the package trl, which is no dependency of ours."""
    arguments = command.replace("HERE", str(tmp_path)).split()
    assert PRINTED[command] in run_quickly(python, *arguments)


@pytest.mark.parametrize("part", ["correctness", "adapters", "speed", "step"])
def test_what_only_a_gpu_can_show_runs_as_a_toy(python, part, tmp_path):
    """Every aim of correctness is reached on a CPU too; speed has none for toys."""
    output = run_quickly(python, "gpu.py", "--quick", part, "--out", str(tmp_path))
    found = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    assert found["part"] == part and len(found["rows"]) >= 5
    assert all(row["is_reached"] and row["name"] in output for row in found["rows"])


def test_a_tree_does_not_equal_one_with_another_constant(python, monkeypatch, capsys):
    """In one step with a KL penalty, whose limit is another."""
    equality, name = benchmark("equality"), "gspo-kl"
    one_step = ["training.num_steps=1", "validation.num_examples=2", "checkpoint.every=1"]
    overrides = [*equality.CONFIGURATIONS[name].overrides, *one_step]
    monkeypatch.setitem(equality.CONFIGURATIONS, name, equality.Configuration(overrides))
    changed = ["--set-b", "KL_LOG_RATIO_LIMIT=0.001", "--only", name]
    monkeypatch.setattr(sys, "argv", ["equality.py", str(ROOT), str(ROOT), *changed])
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(SystemExit, match="True"):
        equality.main()
    assert "| gspo-kl | weights: at most " in capsys.readouterr().out
