"""The README's commands are the ones that work."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
FIRST = "pip install -r requirements.txt && OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 main.py"
TESTS = "pip install -r requirements.txt && python -m pytest"


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
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


def test_requirements_are_pinned_exactly_and_name_no_host():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "/" not in line for line in packages)
    assert "torch==2.13.0" in packages and "transformers==5.23.0" in packages
