"""README's commands are the ones that work, its code is the code; PITFALLS.md names real tests."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from harness import ROOT, USERS_ENVIRONMENT

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
README = TEXT.splitlines()
FIRST = "pip install -r requirements.txt && OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 main.py"
TESTS = 'pip install -r requirements.txt ".[dev]" && python -m pytest'
SMALL = "training.num_steps=1 training.num_samples_per_step=2 validation.num_examples=4"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_first_command_stands_near_the_top_below_the_virtual_environment():
    assert README.index(FIRST) < 35
    venv = next(i for i, line in enumerate(README) if "python3 -m venv" in line)
    assert venv < README.index(FIRST)


def test_ci_runs_the_test_command_and_the_first_command():
    assert TESTS in README
    script = (ROOT / ".ci/run").read_text()
    install, test = TESTS.split(" && ")
    quiet = install.replace("pip install", "pip install --quiet --disable-pip-version-check")
    assert f"{quiet}\n" in script and f"\n{test}\n" in script
    assert FIRST.split(" && ")[1] in script


def test_every_file_and_recipe_that_the_readme_names_is_there():
    named = set(re.findall(r"configs/[\w.-]*\w|[\w/]+\.py", TEXT))
    named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (tools\.\w+)", TEXT)}
    assert len(named) > 15
    named -= {"tv.py", "configs/tv.yaml"}  # the reader's own
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


def test_requirements_are_pinned_exactly_and_name_no_host():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "/" not in line for line in packages)
    assert "torch==2.13.0" in packages and "transformers==5.23.0" in packages


def test_every_excerpt_is_in_main_word_for_word():
    main = (ROOT / "main.py").read_text(encoding="utf-8")
    excerpts = [block for block in blocks("python") if not block.startswith('"""')]
    assert len(excerpts) == 10
    for excerpt in excerpts:
        assert len(excerpt.splitlines()) <= 15
        assert any(textwrap.indent(excerpt, " " * n) in main for n in (0, 4, 8, 12, 16)), excerpt


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of what is in the repository, and the two files of README's own task."""
    folder = tmp_path_factory.mktemp("clone") / "plain-grpo"
    no_results = shutil.ignore_patterns(".*", "runs", "mlruns*", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=no_results)
    (task,) = (block for block in blocks("python") if block.startswith('"""'))
    (recipe,) = blocks("yaml")
    (folder / "tv.py").write_text(task)
    (folder / "configs/tv.yaml").write_text(recipe)
    return folder


@pytest.mark.slow
def test_every_command_that_needs_no_gpu_works_as_printed(clone):
    """In their order, from a copy of the repository; runs are made small by keys at the end."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [line.split(" && ")[-1] for line in lines if re.search(r"main\.py|-m tools", line)]
    commands = [command for command in commands if "--nnodes" not in command]
    assert len(commands) >= 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        result = subprocess.run(
            f"{command} {SMALL}" if "main.py" in command else command,
            shell=True,
            cwd=clone,
            env=USERS_ENVIRONMENT | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        commands += re.findall("ask it: +(.*--config.*)", result.stdout)  # for README's own task
    assert "tools.chat" in commands[-1] and "--config" in commands[-1]


def test_the_task_of_the_readme_pays_for_being_near():
    (task,) = (block for block in blocks("python") if block.startswith('"""'))
    module: dict = {}
    exec(task, module)
    example, options = {"nums": [3, 7, 25], "target": 46}, module["Options"]()
    expected = {"25 + 3 * 7": (1.0, 0.0), "25 * 7 / 3": (0.0, 0.0), "7 * 7": (0.0, 0.0)}
    expected |= {"25 + 3 + 7": (0.0, 0.0), "25 * 3 - 25": (0.0, 0.0), "(25 - 7) * 3": (0.0, 0.5)}
    expected |= {"7 * 3 + 25 - 25": (0.0, 0.0), "": (0.0, 0.0), "25 / 0": (0.0, 0.0)}
    for answer, (solved, near) in expected.items():
        text = f"</think>\n<answer>{answer}</answer>"
        parts = module["reward_function"](text, example, options=options, num_tokens=20)
        assert parts == {"answer": solved, "near": near}, answer


def test_each_test_that_the_pitfalls_name_is_there():
    pitfalls = (ROOT / "PITFALLS.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", pitfalls)
    assert len(named) >= 25 and len(named) == pitfalls.count("::")
    missing = [
        f"{file}::{name}"
        for file, name in named
        if not (ROOT / file).exists() or f"\ndef {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
