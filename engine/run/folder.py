"""What a run's folder is called, and which run's folder a model lies in."""

import os
import shlex
from pathlib import Path

from engine import ROOT
from engine.core.config import Config

COMMITS_FILE = "commits.json"  # what the names of models and data sets on the hub meant
MADE_OF = "made_of.json"  # in base/, the sum of an adapter: the hashes of what it was derived from


def command(program: str) -> str:
    """How main.py, or a module such as tools.report, is started from the current folder."""
    is_here = Path.cwd() == ROOT
    if program.endswith(".py"):
        return f"python {program if is_here else shlex.quote(str(ROOT / program))}"
    path = "" if is_here else f"PYTHONPATH={shlex.quote(str(ROOT))} "
    return f"{path}python -m {program}"


def run_name(config: Config) -> str:
    """The name of the run's folder; by default switching grpo to sil makes another run."""
    model = os.path.basename(os.path.abspath(run_that_made(config.model.name) or config.model.name))
    return (
        config.run.name
        or f"{config.task.name}-{model}-{config.training.learning_type}-s{config.training.seed}"
    )


def run_folder(config: Config) -> Path:
    """The folder of this run; of an evaluated model that of the run that made it, if possible."""
    if not config.is_training and config.run.name is None:
        folder = run_that_made(config.model.name)
        if folder and os.access(folder, os.W_OK):
            return folder
    return Path(config.run.dir) / run_name(config)


def run_that_made(model_name: str) -> Path | None:
    """The folder of the run whose best/, checkpoint or exported model this is, if of any."""
    # best/ may be a link to a larger disk, and any name a link to best/: look at both ends.
    ends = Path(os.path.abspath(model_name)), Path(model_name).resolve()
    for folder in (folder for end in ends if end.is_dir() for folder in end.parents[:2]):
        if (folder / "metrics.jsonl").is_file():
            return folder
    return None
