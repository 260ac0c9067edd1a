"""Saving and loading the folders of a run, so that a kill at any moment loses no saved work.

    checkpoints/step-000010/     the model and its tokenizer, as `from_pretrained` loads them
        training_state/          state.json, optimizer.pt, files.json (all files' sizes);
                                 with model.shard a part-*.safetensors of each rank, and no model
    checkpoints/last             a link to the newest checkpoint
    best/                        the model, its tokenizer, its model card, its score (best.json)
    has_checkpoints              written with the first checkpoint; it stays if they are deleted
    lock                         locked by the process that trains here

With LoRA only the adapter is saved, with the name of its base model. Loading runs no code from
these files: weights are safetensors, and the optimizer is read with `weights_only=True`.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.core.files import open_to_append, read_text, sync
from engine.model.adapters import load_adapter_weights

MARKER = "has_checkpoints"

# A run's folder


def make_folder(folder: Path) -> None:
    """Make the folder if there is none; ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        problem = f"{folder} cannot be written ({error.strerror}); give another run.dir"
        raise ValueError(problem) from error


def lock_folder(folder: Path, warn: Callable[[str], None]) -> TextIO:
    """Lock a run's folder, so that no other process trains in it, until the file is closed.

    The lock is the operating system's (flock; Linux passes it on to NFS); it ends with the process.
    Raises ValueError if another process has it, which is named, or if the folder is not writable.
    """
    make_folder(folder)
    file = open_to_append(folder / "lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        fix = "wait until it ends, or set run.name to start another run"
        raise ValueError(f"{folder}: {file.read()} trains there now: {fix}") from None
    except OSError as error:
        warn(f"{folder} cannot be locked ({error.strerror}): do not start this run twice at once")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def find_start(folder: Path, *, may_resume: bool, warn: Callable[[str], None]) -> Path | None:
    """The checkpoint to resume a run from, or None if it begins anew.

    Raises ValueError, one line with the fix, if the folder holds results that would be overwritten.
    """
    root = folder / "checkpoints"
    mend(folder / "best")
    newest = newest_whole(root, warn)
    if newest is not None and may_resume:
        return newest
    fix = "set run.name to start another run, or move this folder away"
    if (folder / MARKER).exists() or list_checkpoints(root):
        why = "no whole checkpoint to go on from" if may_resume else "checkpoint.resume is never"
        raise ValueError(f"{folder} holds the results of a run, and {why}: {fix}")
    if (folder / "metrics.jsonl").exists():
        aside = folder / f"killed-{datetime.now():%Y%m%d-%H%M%S-%f}"
        aside.mkdir()
        # metrics.jsonl is how we recognise a used folder, so it is moved aside last: if we are
        # killed in between, the next start moves the rest.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "metrics.jsonl"):
            if not path.name.startswith(("lock", "killed-", "eval-")):
                path.rename(aside / path.name)
        warn(f"this run was killed before its first checkpoint and begins again; see {aside}")
    elif (folder / "config.yaml").exists():
        raise ValueError(f"{folder} holds a config.yaml, but no run: {fix}")
    return None


# Writing


@contextlib.contextmanager
def save_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, then put it in the place of `folder`.

    The new files are on the disk itself before anything is renamed, so a kill at any moment leaves
    the old folder (see `mend`) or the new one. If writing fails, as on a full disk, the temporary
    folder is removed, the old one stays, and OSError is raised. Where `folder` is a link, as to a
    larger disk, the folder that it leads to is replaced.
    """
    folder = folder.resolve()
    mend(folder)
    temporary, old = (folder.with_name(f"{folder.name}.{end}") for end in ("tmp", "old"))
    remove(temporary)
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
    except Exception as error:  # each library has its own exception for a full disk
        remove(temporary)
        raise OSError(f"{folder} could not be written: {error}") from error
    remove(old)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    remove(old)


def remove(path: Path) -> None:
    """Remove a folder, a file or a link (not what it leads to), if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def mend(folder: Path) -> None:
    """Give the old folder its name back if a kill came between `save_folder`'s two renames."""
    folder = folder.resolve()
    old = folder.with_name(f"{folder.name}.old")
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    card: str,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    best: dict[str, float] | None = None,
) -> None:
    """Write the model, its tokenizer and its model card, as `from_pretrained` loads them.

    With model.shard the model holds only a part of its weights: `weights` are all of them, by name.
    `best` is what best/ keeps of its score, for a run that goes on from an older checkpoint.
    """
    with save_folder(folder) as temporary:
        model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")  # in the place of peft's own
        if best is not None:
            (temporary / "best.json").write_text(json.dumps(best), encoding="utf-8")


def save_checkpoint(
    root: Path, state: dict, *, step: int, write: Callable[[Path], None], keep: int | None
) -> None:
    """Write step-<step> below `root`, link `last` to it, and delete all but the `keep` newest.

    `write` puts weights and averages into a folder: `write_model`, or `move_parts` in sharding.py.
    Damaged checkpoints are neither counted nor deleted. With `keep` None nothing is deleted.
    """
    checkpoint = root / f"step-{step:06d}"
    with save_folder(checkpoint) as temporary:
        inner = temporary / "training_state"
        inner.mkdir()
        write(temporary)
        text = json.dumps(state, indent=1)
        (inner / "state.json").write_text(text, encoding="utf-8")
        (inner / "files.json").write_text(json.dumps(sizes_of(temporary)), encoding="utf-8")
    open_to_append(root.parent / MARKER).close()
    with contextlib.suppress(OSError):  # `last` is for people, and some file systems have no links
        last, link = root / "last", root / "last.tmp"
        remove(link)
        link.symlink_to(checkpoint.name)
        if last.is_dir() and not last.is_symlink():  # what `cp -rL` makes of a link: an old copy
            shutil.rmtree(last)
        link.replace(last)
    sync(root)
    whole = [folder for folder in list_checkpoints(root) if is_whole(folder)]
    outdated = [] if keep is None else whole[keep:]
    left_by_kills = [*root.glob("step-*.tmp"), *root.glob("step-*.old")]
    for folder in [*outdated, *left_by_kills]:
        remove(folder)


def write_model(
    folder: Path,
    *,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Write the model and its tokenizer, as `from_pretrained` loads them, and the optimizer."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    torch.save(optimizer.state_dict(), folder / "training_state" / "optimizer.pt")


def sizes_of(folder: Path) -> dict[str, int]:
    """The bytes of each file, by its path in the folder."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.stat().st_size for file in files}


# Reading


def list_checkpoints(root: Path) -> list[Path]:
    """All folders of checkpoints, newest first."""
    named = [path for path in root.glob("step-*") if re.fullmatch("step-[0-9]+", path.name)]
    folders = [path for path in named if path.is_dir()]
    return sorted(folders, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The step after which a checkpoint was saved."""
    return int(folder.name[5:])


def newest_whole(root: Path, warn: Callable[[str], None] | None = None) -> Path | None:
    """The newest checkpoint that is undamaged; newer ones that are damaged cost a warning each."""
    for old in root.glob("step-*.old"):
        mend(old.with_suffix(""))
    for folder in list_checkpoints(root):
        if is_whole(folder):
            return folder
        if warn:
            warn(f"{folder} is damaged and not used")
    return None


def is_whole(folder: Path) -> bool:
    """Whether each file that was saved still has its size."""
    try:
        saved = json.loads((folder / "training_state" / "files.json").read_text())
        return "training_state/state.json" in saved and saved.items() <= sizes_of(folder).items()
    except (OSError, ValueError, AttributeError):  # files.json itself is missing or damaged
        return False


def load_state(folder: Path) -> dict:
    """The state that `save_checkpoint` was given; ValueError if its file was edited since."""
    file = folder / "training_state" / "state.json"
    try:
        return json.loads(read_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: is no JSON: {error}") from error


def load_weights(folder: Path, model: PreTrainedModel) -> None:
    """Overwrite the model's weights, or those of its adapter, with a checkpoint's."""
    if (folder / "adapter_config.json").exists():
        load_adapter_weights(model, folder)
    else:
        # By the model's config: that of the folder may name another attention, a kernel to load.
        saved = type(model).from_pretrained(folder, config=model.config, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())


def load_optimizer_state(folder: Path) -> dict:
    """The optimizer's averages. Raises ValueError if the file was damaged or tampered with."""
    file = folder / "training_state" / "optimizer.pt"
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever an unpickler raises at bytes that it did not write
        problem = f"{file} cannot be read ({type(error).__name__})"
        raise ValueError(f"{problem}: delete {folder}, to go on from the one before it") from error
