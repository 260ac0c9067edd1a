"""notebooks/first_run.ipynb: its cells run in their order, and what is stored in it is whole."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness import ROOT, USERS_ENVIRONMENT

from tools import page

FILE = ROOT / "notebooks/first_run.ipynb"
CELLS = [c for c in json.loads(FILE.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
SMALL = (
    "training.num_steps=1 training.num_samples_per_step=2 validation.num_examples=4 "
    "validation.best_of_n=2 'validation.pass_k=[1]' logging.rollouts_every=1"
)


def shell(programs: Path, command: str) -> None:
    environment = USERS_ENVIRONMENT | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    line = ["bash", "-o", "pipefail", "-c", command]
    subprocess.run(line, env=environment, check=True, timeout=120)


@pytest.mark.slow
def test_every_cell_runs_in_its_order(python, tmp_path, monkeypatch, capsys):
    """In a copy of the repository, from the notebook's folder, with one small step.

    Plain Python runs the cells and bash their lines that begin with `!`: IPython and its kernel
    would be thirty packages more.
    """
    clone, shown = tmp_path / "clone", []
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
    monkeypatch.chdir(clone / "notebooks")
    display = SimpleNamespace(HTML=str)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr(page, "PART_BYTES", dict(page.PART_BYTES))  # a cell changes it
    names = {"shell": functools.partial(shell, python.parent), "display": shown.append}
    for cell in CELLS:
        source = "".join(cell["source"]).replace('"first", ""', f'"first", "{SMALL}"')
        exec(re.sub(r"^( *)!(.*)$", r'\1shell(rf"""\2""")', source, flags=re.M), names)
    first, report, second = shown
    assert first.size == second.size
    assert report.startswith("<iframe") and "run.name" in report and "advantage" in report
    printed = capsys.readouterr().out
    assert printed.count("--- after step 1:") == 3 and "\x1b[43m" in printed


def test_the_stored_outputs_are_of_one_run_without_errors_and_name_no_machines_paths():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    outputs = [output for cell in CELLS for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert not re.search(r"(?<![\w.<])/(tmp|root|home|work)/", FILE.read_text("utf-8"))
