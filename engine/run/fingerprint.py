"""What a run rests on: its settings and, as hashes, the model's files and the questions.

A checkpoint keeps them, so that no run goes on with others that have the same name.
"""

import hashlib
import json
import os
import site
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers

from engine import ROOT
from engine.core.config import Config, ConfigError, TrainingSettings, dotted_values
from engine.core.distributed import World
from engine.core.hub import commit_of, is_commit
from engine.core.text import show
from engine.core.user_file import find_function
from engine.model.folders import hash_of_folder
from engine.model.load import find_base, of_teacher, one_line_errors
from engine.questions.contract import Task
from engine.questions.tables import split_source
from engine.questions.tasks import load_task
from engine.run.folder import run_name

COUNTDOWN = ROOT / "countdown.py"
NOT_OWN = [ROOT / name for name in ("engine", "tools", "main.py", "logger.py")]
INSTALLED = tuple(f"{p}/" for p in (sys.prefix, sys.base_prefix, site.getusersitepackages()))
NOT_OWN += [Path(place).resolve() for place in INSTALLED]
MODEL_FILES = "the files of model.name"  # where a checkpoint keeps what `of_model` says


def of_questions(*splits: list[dict]) -> str:
    """A hash of the questions in their order; what JSON cannot hold, such as a set, is left out."""
    encoder = json.JSONEncoder(sort_keys=True, skipkeys=True, default=lambda value: None)
    digest = hashlib.sha256()
    for questions in splits:
        digest.update(f"{len(questions)} questions".encode())
        for question in questions:
            digest.update(encoder.encode(question).encode())
    return digest.hexdigest()[:16]


def of_files(
    config: Config, key: str = "model.name", *, with_weights: bool = False
) -> dict[str, str]:
    """What `of_model` says of the model, of its base if it is an adapter, and of a teacher.

    `key` names the model.
    """
    source = config.model.source
    what = f"the files of {key}"
    found = {what: of_model(config, with_weights=with_weights)}
    with one_line_errors(source.name, key=key):
        base = find_base(source)
    if base:
        found[f"{what}'s base"] = of_model(config.replace(model=base), with_weights=with_weights)
    if config.is_training and config.model.teacher:
        found |= of_files(of_teacher(config), "model.teacher", with_weights=with_weights)
    return found


def of_model(config: Config, *, with_weights: bool = False) -> str:
    """A hash of the files of a model's folder; of a model on the hub its commit.

    The weights count where the run goes on reading them: below an adapter, as the reference of a KL
    penalty, or as a teacher.
    """
    source = config.model.source
    if not Path(source.name).is_dir():
        return str(commit_of(source.name, source.revision))
    reads_weights = with_weights or config.model.lora is not None or config.training.has_reference
    return hash_of_folder(Path(source.name), with_weights=reads_weights)


def of_own_code(task: Task, training: TrainingSettings) -> str:
    """A hash of the files of the task, of its reward and of an algorithm of the user's own.

    With them count modules in or below the folder of a file of the user's, or the current one.
    """
    named = {task.file, *(file for file, _ in task.functions.values())}
    names = {"training.advantage": training.advantage, "training.policy_loss": training.policy_loss}
    named |= {find_function(name, key)[0] for key, name in names.items() if ":" in name}
    files = {Path(file).resolve() for file in named}
    folders = {file.parent for file in files if not lies_in(file, [ROOT / "tasks", COUNTDOWN])}
    if folders:
        folders.add(Path.cwd())
    names = {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}
    # Most of the thousands are installed; torch has some whose file, such as _ops.py, is nowhere.
    sources = [n for n in names if n.endswith(".py") and not n.startswith(INSTALLED)]
    loaded = {Path(name).resolve() for name in sources if Path(name).is_file()}
    files |= {f for f in loaded if lies_in(f, folders) and not lies_in(f, NOT_OWN)}
    content = b"".join(file.read_bytes() for file in sorted(files, key=str))
    return hashlib.sha256(content).hexdigest()[:16]


def lies_in(file: Path, places: Iterable[Path]) -> bool:
    return any(file.is_relative_to(place) for place in places)


def check_same_everywhere(config: Config, world: World) -> None:
    """Raises ValueError if ranks differ in their config, their code or their packages."""
    if world.size == 1:
        return
    values = {k: v for k, v in dotted_values(config).items() if not k.startswith(MAY_DIFFER)}
    mine = {key: show(value) for key, value in values.items()}
    mine |= {"torch": torch.__version__, "transformers": transformers.__version__}
    mine[OWN_CODE] = of_own_code(load_task(config.task), config.training)
    for file in [ROOT / "main.py", COUNTDOWN, *ROOT.glob("engine/**/*.py")]:
        mine[str(file.relative_to(ROOT))] = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    check_equal(mine, world)


def check_same_files(config: Config, world: World) -> None:
    """Raises ValueError if nodes hold other files of the model or its teacher.

    Before DDP makes weights equal, each rank has made a tokenizer, sampler and reference of them.
    """
    if world.size == int(os.environ.get("LOCAL_WORLD_SIZE", "1")):
        return
    mine = {}
    if os.environ.get("LOCAL_RANK", "0") == "0":  # all ranks of a node read the same files
        mine = of_files(config, with_weights=True)
    check_equal(mine, world)


def check_equal(mine: dict[str, str], world: World) -> None:
    """Raises ValueError on all ranks for the first value that a rank, if it has any, has alone."""
    (first, there), *others = world.gather((mine, socket.gethostname()))
    for rank, (theirs, host) in enumerate(others, start=1):
        for name in first | theirs if theirs else ():
            if first.get(name) != theirs.get(name):
                raise ValueError(
                    f"{name} is {theirs.get(name)} on rank {rank} ({host}), {first.get(name)} on "
                    f"rank 0 ({there}): give all nodes the same files, config and packages"
                )


# What may name other places on another node
MAY_DIFFER = ("run.dir", "model.name", "model.teacher", "task.train", "task.eval", "logging.")
# These keys may change when a run is resumed. Changing any other key is refused.
FREE_KEYS = (
    "mode",
    "training.num_steps",
    "training.num_epochs",
    "training.stop_on_collapse",
    "validation.every",
    "validation.pass_k",
)
FREE_SECTIONS = ("checkpoint.", "logging.", "run.")
OWN_CODE = "the code of the task, its reward or the algorithm"
# So may these, which save memory. They change how sums are rounded, and LoRA's dropout masks.
ROUNDING_KEYS = (
    "training.micro_batch_tokens",
    "sampling.max_batch_tokens",
    "model.gradient_checkpointing",
    "sampling.vllm_memory_gb",
    OWN_CODE,
)


def check_same_run(saved: dict, config: Config, rests_on: dict | None = None) -> list[str]:
    """Raise ConfigError if a key has changed that must not; return the ROUNDING_KEYS that have."""
    now = dotted_values(config) | (rests_on or {})  # such as hashes
    saved = now | dotted_values(type(config)()) | saved  # a run older than a key had its default
    for key in ("model.revision", "model.teacher_revision"):
        if not is_commit(saved[key]):  # an older version kept the name of a branch, or nothing
            saved[key] = now[key]
    for key in ("task.train", "task.eval"):
        if "@" not in saved[key]:
            now[key] = "".join(split_source(now[key])[::2])
    for values in (now, saved):
        values["validation.best_by"] = values["validation.best_by"] or config.best_by
    fix = f"restore it to continue {run_name(config)}, or set run.name for another run"
    changed = [key for key in now if not key.startswith(FREE_SECTIONS) and saved[key] != now[key]]
    lines = [
        f"{key} = {show(now[key])}, but the run was started with {show(saved[key])}: {fix}"
        for key in changed
        if key not in (*FREE_KEYS, *ROUNDING_KEYS)
    ]
    if lines:
        raise ConfigError(*lines)
    return [key for key in changed if key in ROUNDING_KEYS]
