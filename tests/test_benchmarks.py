"""The benchmarks run."""

import os
import subprocess
import sys
from pathlib import Path

from conftest import NUM_THREADS

ROOT = Path(__file__).parents[1]


def run_quickly(script: str) -> str:
    """What it prints on the smallest sizes."""
    result = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--quick"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": str(NUM_THREADS)},
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


def test_a_step_of_the_published_setting_is_timed():
    assert "3B step" in run_quickly("step_3b.py")
