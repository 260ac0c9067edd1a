"""What README, docs/ and the notebook show: commands work, code is quoted, links lead somewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from harness import ROOT, USERS_ENVIRONMENT, make_config, make_policy, make_row

import countdown
from engine.questions.prompts import encode_prompts
from engine.questions.tasks import load_task
from engine.run.config_file import combine
from main import assign_advantages, k_best_mask
from tools.page import PART_BYTES

PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
DOCS = {page.name: page.read_text("utf-8") for page in PAGES}
TEXT = DOCS["README.md"]
README = TEXT.splitlines()
NOTEBOOK = ROOT / "notebooks/first_run.ipynb"
CELLS = [c for c in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
FIRST = "pip install -r requirements.txt && OMP_NUM_THREADS=1 torchrun --nproc-per-node=2 main.py"
TESTS = 'pip install -r requirements.txt ".[dev]" && python -m pytest'
SMALL = "training.num_steps=1 training.num_samples_per_step=1 training.max_new_gen_tokens=30 "
SMALL += "validation.num_examples=4 validation.best_of_n=2 'validation.pass_k=[1]' "
SMALL += "task.max_train_examples=99 logging.rollouts_every=1"


def blocks(language: str, text: str = TEXT) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for named, block in found if named == language]


def test_ci_runs_the_test_command_and_the_first_command():
    assert TESTS in README and FIRST in README
    script = (ROOT / ".ci/run").read_text()
    install, test = TESTS.split(" && ")
    for how in ("pip install --quiet --dry-run", "uv pip install --quiet --compile-bytecode"):
        assert f"\n{install.replace('pip install', how)}\n" in script
    assert f"\n{test}\n" in script
    assert FIRST.split(" && ")[1] in script


def test_every_file_and_recipe_that_the_pages_name_is_there():
    text = "\n".join(DOCS.values())
    named = set(re.findall(r"configs/[\w.-]*\w|(?<!scripts/)\b[\w/]+\.py\b", text))
    named |= {f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (tools\.\w+)", text)}
    assert len(named) > 15
    named -= {"my_rewards.py", "my_algo.py", "tv.py", "configs/tv.yaml"}  # the reader's own
    named -= {"convert_hf_to_gguf.py", "scripts/chat_rl.py"}  # llama.cpp's, nanochat's
    assert [word for word in sorted(named) if not (ROOT / word).exists()] == []


def test_every_link_leads_to_a_file_and_its_heading():
    folders = ("", "docs", "docs/exercises", "results", "configs", "benchmarks")
    pages = [page for folder in folders for page in (ROOT / folder).glob("*.md")]
    links = [(p, link) for p in pages for link in re.findall(r"\]\(([^)\s]+)\)", p.read_text())]
    assert len(links) > 50
    for page, target in links:
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        assert "://" in target or file.exists(), f"{page.name}: {target}"
        if heading and "://" not in target:
            titles = re.findall(r"^##+ (.*)$", file.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", t.lower()).replace(" ", "-") for t in titles]
            assert heading in slugs, f"{page.name}: {target}"


def test_the_example_by_numbers_is_what_main_computes():
    """Log-probabilities, rewards, mean, advantages and gradients of README's four completions."""
    posed, (example,) = blocks(""), [block for block in blocks("") if block.startswith("A  ")]
    texts = [re.sub(r"(?m)^[A-D ]  ", "", block).rstrip() for block in example.split("\n\n")]
    config, question = make_config(), {"nums": [3, 7, 25], "target": 46}
    prompt = countdown.generate_prompt(question, options=config.task)
    assert "\n".join(message["content"] for message in prompt) + "\n" in posed
    policy = make_policy(ROOT / "tiny")
    how = {"task": load_task(config.task), "tokenizer": policy.tokenizer}
    (prompt_ids,) = encode_prompts([question], **how)
    group, log_probs = [], []
    for text in texts:
        token_ids = [*policy.tokenizer.encode(f"\n{text}"), *policy.params.eos_ids]
        num_tokens, row = len(token_ids), torch.tensor([prompt_ids + token_ids])
        mask = torch.arange(row.shape[1])[None] >= len(prompt_ids)
        log_probs.append(policy.scorer(row, mask, temperature=1.0).sum().item())
        how = {"options": config.task, "num_tokens": num_tokens}
        parts = countdown.reward_function(f"\n{text}", question, **how)
        reward = sum(parts[name] * w for name, w in config.task.reward_weights.items())
        group.append(make_row(reward, num_tokens=num_tokens))
    assign_advantages([group], config.training)
    assert config.training.loss_normalization == "dr_grpo"
    divisor = len(group) * config.training.max_new_gen_tokens
    mean = sum(t.reward for t in group) / 4
    assert f"The mean of the group is {mean:.3f}," in " ".join(README)
    assert f"Each token's weight is 1/{divisor}:" in " ".join(README)
    rows = [line for line in README if re.match(r"\| [A-D]: ", line)]
    for row, t, log_prob in zip(rows, group, log_probs, strict=True):
        gradient = -t.advantage / divisor  # of the loss, for each token's log-probability
        length = len(t.completion.token_ids)
        shown = f"{length} {log_prob:.1f} {t.reward:.1f} {t.advantage:+.3f} {gradient:+.5f}"
        assert [cell.strip() for cell in row.split("|")[2:-1]] == shown.split()
    best = k_best_mask(torch.tensor([[t.reward for t in group]]), k=2)[0].tolist()
    assert [name for name, is_best in zip("ABCD", best, strict=True) if is_best] == ["A", "D"]


def test_the_edit_of_config_yaml_that_readme_shows_makes_the_recipe_of_sil():
    (diff,) = blocks("diff")
    before, after = (re.findall(rf"^\{sign}(.*)", diff, re.MULTILINE) for sign in "-+")
    text = (ROOT / "config.yaml").read_text()
    for old, new in zip(before, after, strict=True):
        assert text.splitlines().count(old) == 1
        text = text.replace(old, new)
    recipe = yaml.safe_load((ROOT / "configs/countdown-tiny-sil.yaml").read_text())
    assert combine(yaml.safe_load(text), []) == combine(recipe, [])


def test_the_walkthrough_stops_at_each_function_of_plain_in_order_and_quotes_it_word_for_word():
    plain = (ROOT / "plain.py").read_text(encoding="utf-8")
    walkthrough = TEXT.partition("\n## plain.py, from")[2].partition("\n## ")[0]
    excerpts = blocks("python", walkthrough)
    assert len(excerpts) > 10
    for excerpt in excerpts:
        assert any(textwrap.indent(excerpt, " " * n) in plain for n in (0, 4, 8, 12)), excerpt
    # The two dataclasses stand at the first function that makes them.
    stops = re.findall(r"\*\*`(\w+)`\*\*", walkthrough)
    assert sorted(stops) == sorted(re.findall(r"^(?:def|class) (\w+)", plain, re.MULTILINE))
    functions = re.findall(r"^def (\w+)", plain, re.MULTILINE)
    assert [stop for stop in stops if stop in functions] == functions


def test_readme_says_how_many_lines_a_file_has():
    sizes = dict(re.findall(r"^\| `([\w/.]+)` \| (?:about )?([\d,]+) \|", TEXT, re.MULTILINE))
    assert {*sizes} == {"plain.py", "countdown.py", "main.py", "engine/"}
    for name, shown in sizes.items():
        files = ROOT.glob(f"{name}**/*.py" if name.endswith("/") else name)
        num_lines = sum(len(file.read_text().splitlines()) for file in files)
        assert shown == f"{round(num_lines, -3 if name == 'engine/' else 0):,}", name
    assert f"in one file of {sizes['plain.py']} lines" in TEXT


def shell(python: Path, command: str, **how) -> str:
    """What a command prints; it finds `python` and the `torchrun` beside it."""
    how |= {"capture_output": True, "text": True, "timeout": 120}
    how["env"] = USERS_ENVIRONMENT | {"PATH": f"{python.parent}:{os.environ['PATH']}"}
    result = subprocess.run(["bash", "-o", "pipefail", "-c", command], **how)
    assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
    return result.stdout


@pytest.mark.slow
def test_every_command_that_needs_no_gpu_and_every_cell_of_the_notebook_work_as_printed(
    tmp_path, python, monkeypatch, capsys
):
    """In their order, from a copy of the repository; runs are made small by keys at the end."""
    clone = tmp_path / "plain-grpo"
    no_results = shutil.ignore_patterns(".*", "runs", "mlruns*")
    shutil.copytree(ROOT, clone, ignore=no_results)
    own_task = [text for text in blocks("python", DOCS["tasks.md"]) if text.startswith('"""')]
    (clone / "tv.py").write_text(own_task[0])
    (clone / "configs/tv.yaml").write_text(*blocks("yaml", DOCS["tasks.md"]))
    pages = [block for text in DOCS.values() for block in blocks("sh", text)]
    lines = [line for block in pages for line in block.splitlines()]
    commands = [line.split(" && ")[-1] for line in lines if re.search(r"main\.py|-m tools", line)]
    commands = list(dict.fromkeys(command.replace("uv run ", "") for command in commands))
    assert len(commands) >= 7
    for command in commands:
        size = f" {SMALL}" if "main.py" in command else ""
        printed = shell(python, command + size, cwd=clone)
        commands += re.findall("ask it: +(.*--config.*)", printed)  # for our own task
    assert "tools.chat" in commands[-1] and "--config" in commands[-1]
    # The notebook's cells run in plain Python, and their lines that begin with `!` in bash, here
    # with one rank for two.
    shown, display = [], SimpleNamespace(HTML=str)
    monkeypatch.chdir(clone / "notebooks")
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setitem(PART_BYTES, "rollouts", PART_BYTES["rollouts"])  # a cell changes it
    names = {"shell": lambda command: print(shell(python, command)), "display": shown.append}
    for cell in CELLS:
        source = "".join(cell["source"]).replace("device_count() or 2", "device_count() or 1")
        source = source.replace('"first", ""', f'"first", "{SMALL}"')
        exec(re.sub(r"^( *)!(.*)$", r'\1shell(rf"""\2""")', source, flags=re.M), names)
    first, report, second = shown
    assert first.size == second.size
    assert report.startswith("<div><iframe") and "run.name" in report and "advantage" in report
    printed = capsys.readouterr().out
    told = (names["changed"] or names["first"])[:3]
    assert printed.count("--- after step 1:") == len(told) > 0 and "\x1b[43m" in printed


def test_the_notebooks_outputs_are_of_one_run_without_errors_and_name_no_machines_paths():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.search(r"(?<![\w.<])/(tmp|root|home|work)/", NOTEBOOK.read_text("utf-8"))


def test_each_test_that_the_pitfalls_name_is_there():
    pitfalls = (ROOT / "PITFALLS.md").read_text(encoding="utf-8")
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", pitfalls)
    assert len(named) >= 25 and len(named) == pitfalls.count("::")
    counted = re.findall(r"(\d+) (?:known )?mistakes", "\n".join(DOCS.values()))
    assert {*map(int, counted)} == {len(re.findall(r"^\*\*", pitfalls, re.MULTILINE))}
    for file, name in named:
        assert f"\ndef {name}(" in (ROOT / file).read_text(), f"{file}::{name}"
