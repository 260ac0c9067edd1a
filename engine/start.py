"""A start of the program: where it writes, and what it takes over from the run's first start."""

import os
import tempfile
from datetime import date
from pathlib import Path

from engine.checkpoint import writing_in
from engine.config import Config, run_name
from engine.config_file import read_file, section_of
from engine.distributed import World
from engine.fingerprint import commit_of


def run_folder(config: Config) -> Path:
    """The folder of this run. An evaluated model's is that of the run that made it.

    So `mode=evaluate` of runs/a/best, of a checkpoint or of an exported model writes to runs/a,
    unless run.name is given or nothing can be written there.
    """
    model = Path(config.model.name).resolve()  # checkpoints/last is a link
    is_checkpoint = model.parent.name == "checkpoints"
    folder = model.parent.parent if is_checkpoint else model.parent
    is_of_run = is_checkpoint or model.name in ("best", "merged", "merged-4bit")
    is_of_run = is_of_run and (folder / "metrics.jsonl").is_file() and os.access(folder, os.W_OK)
    if config.mode == "train" or config.run.name is not None or not is_of_run:
        return Path(config.run.dir) / run_name(config)
    return folder


def check_writable(folder: Path) -> None:
    with writing_in(folder):
        tempfile.TemporaryFile(dir=folder).close()


def settle(config: Config, world: World) -> Config:
    """Fill in the model's commit on the hub and the date that a chat template writes.

    Another start would find both changed, so a run goes on with those in its config.yaml. Raises
    ValueError if an evaluation could not be written: now, not after all the work.
    """
    if config.mode == "evaluate":
        world.on_main(check_writable, run_folder(config))
    commit, today = world.on_main(commit_and_date, config)
    model = config.model.model_copy(update={"revision": commit})
    task = config.task.model_copy(update={"template_date": today})
    return config.model_copy(update={"model": model, "task": task})


def commit_and_date(config: Config) -> tuple[str | None, str]:
    """What the config gives, else what the run began with, else the newest commit, and today."""
    file, name = run_folder(config) / "config.yaml", config.model.name
    began = read_file(file) if file.is_file() else {}
    model, task = section_of(began, "model"), section_of(began, "task")
    commit = model.get("revision") if model.get("name") == name else None
    commit = config.model.revision or commit or commit_of(name, None)
    return commit, config.task.template_date or task.get("template_date") or str(date.today())
