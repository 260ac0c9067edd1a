"""The benchmarks run."""

import subprocess
import sys

import pytest
from harness import ROOT, USERS_ENVIRONMENT

pytestmark = pytest.mark.slow


def run_quickly(script: str) -> str:
    """What it prints on the smallest sizes."""
    result = subprocess.run(
        [sys.executable, f"benchmarks/{script}", "--quick"],
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


def test_a_step_of_the_published_setting_is_timed():
    assert "3B step" in run_quickly("step_3b.py")
