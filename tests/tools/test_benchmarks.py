"""The benchmarks run."""

import json
import subprocess
import sys

import pytest
from harness import ROOT, USERS_ENVIRONMENT

pytestmark = pytest.mark.slow


def run_quickly(script: str, *arguments: str) -> str:
    """What it prints on the smallest sizes."""
    result = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--quick", *arguments],
        cwd=ROOT,
        env=USERS_ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_rollouts_benchmark_prints_every_table_and_what_was_not_measured():
    output = run_quickly("rollouts.py")
    for name in ("grouped", "model.generate", "questions", "samples", "max_new_tokens", "2 ranks"):
        assert any(line.startswith(name) for line in output.splitlines()), name
    assert output.count("not measured") == 2


def test_one_table_of_the_rollouts_benchmark_can_be_had_alone():
    output = run_quickly("rollouts.py", "--only", "growth")
    assert "questions" in output and "model.generate" not in output and "2 ranks" not in output


@pytest.mark.parametrize("part", ["correctness", "adapters", "speed", "step"])
def test_what_only_a_gpu_can_show_runs_as_a_toy(part, tmp_path):
    """Every aim of correctness is reached on a CPU too; speed has none for toys."""
    output = run_quickly("gpu.py", part, "--out", str(tmp_path))
    found = json.loads((tmp_path / f"gpu-{part}.json").read_text())
    assert found["part"] == part and len(found["rows"]) >= 5
    assert all(row["is_reached"] and row["name"] in output for row in found["rows"])


def test_a_step_of_the_published_setting_is_timed():
    assert "3B step" in run_quickly("step_3b.py")
