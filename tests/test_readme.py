"""The README's commands are the ones that work, its code is the code."""

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
README = TEXT.splitlines()
FIRST = "pip install -r requirements.txt && OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 main.py"
TESTS = "pip install -r requirements.txt && python -m pytest"
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
    assert (
        f"{install.replace('pip install', 'pip install --quiet --disable-pip-version-check')}\n"
        in script
    )
    assert f"\n{test}\n" in script
    assert FIRST.split(" && ")[1] in script


def test_every_file_and_recipe_that_the_readme_names_is_there():
    words = {word.strip("`()[],.;:") for line in README for word in line.split()}
    named = {word for word in words if word.startswith("configs/") or word.endswith(".py")}
    assert len(named) > 8
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
    assert len(excerpts) == 6
    for excerpt in excerpts:
        assert len(excerpt.splitlines()) <= 15
        assert any(textwrap.indent(excerpt, " " * n) in main for n in (0, 4, 8, 12)), excerpt


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of what is in the repository, with the task that the README adds to it."""
    folder = tmp_path_factory.mktemp("clone") / "plain-grpo"
    no_results = shutil.ignore_patterns(".*", "runs", "mlruns*", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=no_results)
    (task,) = (block for block in blocks("python") if block.startswith('"""'))
    (recipe,) = blocks("yaml")
    (folder / "tv.py").write_text(task)
    (folder / "configs/tv.yaml").write_text(recipe)
    data = (folder / "data.py").read_text()
    for before, after in (("import gsm8k\n", "import tv\n"), ('"gsm8k": gsm8k', '"tv": tv')):
        assert data.count(before) == 1
        data = data.replace(before, before + (", " if ":" in before else "") + after)
    (folder / "data.py").write_text(data)
    return folder


def test_every_command_that_needs_no_gpu_works_as_printed(clone):
    """In their order, from a copy of the repository; runs are made small by keys at the end."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [line.split(" && ")[-1] for line in lines if re.search(r"(main|plot)\.py", line)]
    commands = [command for command in commands if "--nnodes" not in command]
    assert len(commands) >= 6
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        is_run = "main.py" in command and "mode=sample" not in command
        result = subprocess.run(
            f"{command} {SMALL}" if is_run else command,
            shell=True,
            cwd=clone,
            env=os.environ | {"PATH": path, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"


def test_the_task_of_the_readme_pays_for_being_near():
    (task,) = (block for block in blocks("python") if block.startswith('"""'))
    module: dict = {}
    exec(task, module)
    reward, example = module["reward_function"], {"nums": [3, 7, 25], "target": 46}
    expected = {"25 + 3 * 7": (1.0, 0.0), "25 * 7 / 3": (0.0, 0.0), "7 * 7": (0.0, 0.0)}
    expected |= {"25 + 3 + 7": (0.0, 0.0), "25 * 3 - 25": (0.0, 0.0), "(25 - 7) * 3": (0.0, 0.5)}
    expected |= {"7 * 3 + 25 - 25": (0.0, 0.0), "": (0.0, 0.0), "25 / 0": (0.0, 0.0)}
    for answer, (solved, near) in expected.items():
        parts = reward(f"</think>\n<answer>{answer}</answer>", example)
        assert parts == {"answer": solved, "near": near}, answer
