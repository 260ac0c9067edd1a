"""README's and docs/' commands work, their code is the code, their links lead somewhere."""

import os
import re
import shutil
import subprocess
import textwrap
import tomllib
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import yaml
from harness import ROOT, USERS_ENVIRONMENT, make_config
from packaging.requirements import Requirement
from tokenizers import Tokenizer

import countdown
from engine.core.types import MicroBatch
from engine.run.config_file import combine
from main import grpo_advantages, micro_batch_loss, token_weights

TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
README = TEXT.splitlines()
DOCS = {
    file.name: file.read_text(encoding="utf-8")
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
FIRST = "pip install -r requirements.txt && OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 main.py"
TESTS = 'pip install -r requirements.txt ".[dev]" && python -m pytest'
SMALL = "training.num_steps=1 training.num_samples_per_step=2 validation.num_examples=4"


def blocks(language: str, text: str = TEXT) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for named, block in found if named == language]


def test_ci_runs_the_test_command_and_the_first_command():
    assert TESTS in README and FIRST in README
    script = (ROOT / ".ci/run").read_text()
    install, test = TESTS.split(" && ")
    quiet = install.replace("pip install", "pip install --quiet --disable-pip-version-check")
    assert f"{quiet}\n" in script and f"\n{test}\n" in script
    assert FIRST.split(" && ")[1] in script


def test_every_file_and_recipe_that_the_pages_name_is_there():
    text = "\n".join(DOCS.values())
    named = set(re.findall(r"configs/[\w.-]*\w|(?<!scripts/)\b[\w/]+\.py\b", text))
    named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (tools\.\w+)", text)}
    assert len(named) > 15
    named -= {"my_rewards.py", "tv.py", "configs/tv.yaml"}  # the reader's own
    named -= {"convert_hf_to_gguf.py", "scripts/chat_rl.py"}  # llama.cpp's, nanochat's
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


@pytest.mark.parametrize("folder", ["", "docs", "results", "configs", "benchmarks"])
def test_every_link_leads_to_a_file_and_its_heading(folder):
    for page in (ROOT / folder).glob("*.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" in target:
                continue
            name, _, heading = target.partition("#")
            file = page.parent / name if name else page
            assert file.exists(), f"{page.name}: {target}"
            if heading:
                text = file.read_text(encoding="utf-8")
                titles = re.findall(r"^##+ (.*)$", text, re.MULTILINE)
                slugs = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
                assert heading in slugs, f"{page.name}: {target}"


def test_the_example_by_numbers_is_what_main_computes():
    """Rewards, mean, advantages, weights and gradients of README's four completions."""
    posed, (example,) = blocks(""), [block for block in blocks("") if block.startswith("A  ")]
    texts = [re.sub(r"(?m)^[A-D ]  ", "", block).rstrip() for block in example.split("\n\n")]
    config, rewards, lengths = make_config(), [], []
    question = {"nums": [3, 7, 25], "target": 46}
    prompt = countdown.generate_prompt(question, options=config.task)
    assert "\n".join(message["content"] for message in prompt) + "\n" in posed
    tokenizer = Tokenizer.from_file(str(ROOT / "tiny/tokenizer.json"))
    for text in texts:
        options = {"options": config.task, "num_tokens": 0}
        parts = countdown.reward_function(f"\n{text}", question, **options)
        rewards.append(sum(parts[name] * w for name, w in config.task.reward_weights.items()))
        lengths.append(len(tokenizer.encode(f"\n{text}").ids) + 1)  # and the end token
    (advantages,) = grpo_advantages(torch.tensor([rewards]), divide_by_std=False)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (4, T)
    limit = config.training.max_new_gen_tokens
    counts = {"num_rows": 4, "num_tokens": sum(lengths), "max_new_gen_tokens": limit}
    weights = token_weights(mask, normalization=config.training.loss_normalization, **counts)
    log_probs = torch.full(mask.shape, -0.5, requires_grad=True)
    batch = MicroBatch([], torch.zeros_like(mask), mask, advantages, weights, log_probs.detach())
    policy = SimpleNamespace(
        scorer=Mock(return_value=log_probs),
        reference=None,
        params=SimpleNamespace(temperature=1.0),
        grad_scaler=torch.amp.GradScaler(enabled=False),
    )
    micro_batch_loss(policy, batch, config.training, {}).backward()
    assert f"The mean of the group is {sum(rewards) / 4:.3f}," in " ".join(README)
    assert weights[mask].tolist() == pytest.approx([1 / 1280] * sum(lengths))
    rows = [line for line in README if re.match(r"\| [A-D]: ", line)]
    for row, reward, advantage, length, gradient in zip(
        rows, rewards, advantages, lengths, log_probs.grad, strict=True
    ):
        cells = [str(length), f"{reward:.1f}", f"{advantage:+.3f}", "1/1280", f"{gradient[0]:+.5f}"]
        cells.append("likelier" if gradient[0] < 0 else "less likely")
        assert [cell.strip() for cell in row.split("|")[2:-1]] == cells
        assert (gradient[:length] == gradient[0]).all() and not gradient[length:].any()


def test_the_edit_of_config_yaml_that_readme_shows_makes_the_recipe_of_sil():
    (diff,) = blocks("diff")
    before, after = (
        "".join(re.findall(rf"^\{sign}(.*\n)", diff, re.MULTILINE)) for sign in ("-", "+")
    )
    text = (ROOT / "config.yaml").read_text()
    for old, new in zip(before.splitlines(), after.splitlines(), strict=True):
        assert text.splitlines().count(old) == 1
        text = text.replace(old, new)
    recipe = yaml.safe_load((ROOT / "configs/countdown-tiny-sil.yaml").read_text())
    assert combine(yaml.safe_load(text), []) == combine(recipe, [])


def test_requirements_are_pinned_exactly_within_the_ranges_and_name_no_host():
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "/" not in line for line in packages)
    assert "torch==2.13.0" in packages and "transformers==5.23.0" in packages
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    ranges = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    assert all(version in ranges.pop(name) for name, version in (p.split("==") for p in packages))
    assert ranges == {}


def test_every_excerpt_is_in_main_word_for_word():
    main = (ROOT / "main.py").read_text(encoding="utf-8")
    excerpts = blocks("python", DOCS["tour.md"])
    assert len(excerpts) > 10
    for file, lines in re.findall(r"`(engine/[\w/]+\.py)` \((\d+)", DOCS["tour.md"]):
        assert len((ROOT / file).read_text().splitlines()) == int(lines), file
    for excerpt in excerpts:
        assert any(textwrap.indent(excerpt, " " * n) in main for n in (0, 4, 8, 12, 16)), excerpt


def own_task() -> str:
    """The file of docs/tasks.md's "A task of your own"."""
    return next(block for block in blocks("python", DOCS["tasks.md"]) if block.startswith('"""'))


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Path:
    """A copy of what is in the repository, and the two files of docs/tasks.md's own task."""
    folder = tmp_path_factory.mktemp("clone") / "plain-grpo"
    no_results = shutil.ignore_patterns(".*", "runs", "mlruns*", "__pycache__")
    shutil.copytree(ROOT, folder, ignore=no_results)
    (recipe,) = blocks("yaml", DOCS["tasks.md"])
    (folder / "tv.py").write_text(own_task())
    (folder / "configs/tv.yaml").write_text(recipe)
    return folder


@pytest.mark.slow
def test_every_command_that_needs_no_gpu_works_as_printed(clone, python):
    """In their order, from a copy of the repository; runs are made small by keys at the end."""
    pages = [block for text in DOCS.values() for block in blocks("sh", text)]
    lines = [line for block in pages for line in block.splitlines()]
    commands = [line.split(" && ")[-1] for line in lines if re.search(r"main\.py|-m tools", line)]
    commands = list(dict.fromkeys(command.replace("uv run ", "") for command in commands))
    assert len(commands) >= 7
    path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
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
        commands += re.findall("ask it: +(.*--config.*)", result.stdout)  # for our own task
    assert "tools.chat" in commands[-1] and "--config" in commands[-1]


def test_the_task_of_the_docs_pays_for_being_near():
    module: dict = {}
    exec(own_task(), module)
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
