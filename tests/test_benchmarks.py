"""The benchmarks run."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_rollouts_benchmark_runs_on_the_smallest_sizes():
    """Every table is printed, and what needs a GPU says that it was not measured."""
    result = subprocess.run(
        [sys.executable, "benchmarks/rollouts.py", "--quick"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    for name in ("grouped", "model.generate", "questions", "samples", "max_new_tokens", "2 ranks"):
        assert any(line.startswith(name) for line in result.stdout.splitlines()), name
    assert result.stdout.count("not measured") == 2
