"""What is saved so that nothing is lost: a folder is there whole, or not at all.

    checkpoints/step-000010/     model and tokenizer, as `from_pretrained` loads them
        training_state/          state.json, optimizer.pt, files.json (size and hash of each file)
    checkpoints/last             link to the newest
    best/                        model, tokenizer and model card

Of a model with an adapter only the adapter is saved, with the name of its base.
Loading runs no code: weights are safetensors, the optimizer is read with `weights_only=True`.
"""

import hashlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from adapter import load_adapter_weights

# Writing


def save_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, put that on disk for good, then name it `folder`.

    A kill at any instant leaves the old folder (see `mend`) or the new one. Raises OSError, with
    the old folder in place and the temporary one removed, where the disk is full.
    """
    mend(folder)
    temporary = folder.with_name(f"{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        for path in [*temporary.rglob("*"), temporary]:
            sync(path)
    except Exception as error:  # for a full disk torch, safetensors and tokenizers each have one
        shutil.rmtree(temporary, ignore_errors=True)
        raise OSError(f"{folder} could not be written: {error}") from error
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    temporary.rename(folder)
    sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def mend(folder: Path) -> None:
    """Give the old folder its name back, if a kill fell between the two renames."""
    old = folder.with_name(f"{folder.name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk itself."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save_model(model: nn.Module, tokenizer, card: str, folder: Path) -> None:
    """Write model, tokenizer and card so that `AutoModelForCausalLM.from_pretrained` loads them."""

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, encoding="utf-8")  # over one that peft writes

    save_folder(folder, write)


def save_checkpoint(
    root: Path,
    state: dict,
    *,
    step: int,
    model: nn.Module,
    tokenizer,
    optimizer: torch.optim.Optimizer,
    keep: int,
) -> None:
    """Write step-<step> under `root`, point `last` at it, remove all but the `keep` newest."""
    folder = root / f"step-{step:06d}"

    def write(temporary: Path) -> None:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        inner = temporary / "training_state"
        inner.mkdir()
        torch.save(optimizer.state_dict(), inner / "optimizer.pt")
        (inner / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
        (inner / "files.json").write_text(json.dumps(describe_files(temporary)), encoding="utf-8")

    save_folder(folder, write)
    link = root / "last.tmp"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(root / "last")
    sync(root)
    killed = [*root.glob("step-*.tmp"), *root.glob("step-*.old")]  # half of a save each
    for old in [*list_checkpoints(root)[keep:], *killed]:
        shutil.rmtree(old)


def describe_files(folder: Path) -> dict[str, list]:
    """Size and SHA-256 of every file in a checkpoint but the list itself."""
    described = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "files.json":
            described[str(path.relative_to(folder))] = [path.stat().st_size, sha256(path)]
    return described


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


# Reading


def list_checkpoints(root: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    return sorted((p for p in root.glob("step-*") if p.name[5:].isdigit()), reverse=True)


def newest_whole(root: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files are all as they were written; damaged ones are named."""
    for old in root.glob("step-*.old"):
        mend(old.with_suffix(""))
    for folder in list_checkpoints(root):
        try:
            listed = json.loads((folder / "training_state" / "files.json").read_text())
            if describe_files(folder) == listed:
                return folder
        except (OSError, ValueError):
            pass
        warn(f"{folder} is damaged: the one before it is used")
    return None


def load_state(folder: Path) -> dict:
    """The state that `save_checkpoint` was given."""
    return json.loads((folder / "training_state" / "state.json").read_text(encoding="utf-8"))


def load_weights(folder: Path, model: nn.Module) -> None:
    """Overwrite the model's weights, or those of its adapter, by those of a checkpoint."""
    if (folder / "adapter_config.json").exists():
        load_adapter_weights(model, folder)
        return
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(saved.state_dict())


def load_optimizer_state(folder: Path) -> dict:
    """The optimizer's state_dict."""
    file = folder / "training_state" / "optimizer.pt"
    return torch.load(file, map_location="cpu", weights_only=True)


# Saving when the run is ended from outside


class SaveOnExit:
    """Saves the state of the last step boundary when a signal or an exception ends the run.

    Signals are answered by a thread of its own, since the main one may hang in a collective whose
    other ranks are gone. The thread waits while weights and state change together.
    """

    def __init__(self, save: Callable[[], None], *, is_main: bool):
        self.save = save
        self.is_main = is_main
        self.lock = threading.Lock()
        self.is_whole = True  # weights and state belong together
        self.thread = threading.Thread(target=self.answer_signal, daemon=True)
        self.signal_received = threading.Event()

    def __enter__(self) -> "SaveOnExit":
        self.pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)  # written to even while the main thread is stuck in C code
        self.handlers = {
            number: signal.signal(number, lambda *_: None)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        self.thread.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if not self.is_whole:
            self.lock.release()
        if error is not None:
            # torchrun's signal may come just after the other ranks' end broke a collective
            if self.signal_received.wait(timeout=1):
                self.thread.join()
            elif self.is_main and self.is_whole:
                with self.lock:
                    self.save()
        signal.set_wakeup_fd(-1)
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def begin_change(self) -> None:
        """From here on weights and state do not belong together, until `end_change`."""
        if self.is_whole:
            self.lock.acquire()
            self.is_whole = False

    def end_change(self) -> None:
        """The run is at a step boundary again."""
        self.is_whole = True
        self.lock.release()

    def answer_signal(self) -> None:
        number = os.read(self.pipe, 1)[0]
        self.signal_received.set()
        if self.is_main:
            with self.lock:
                if self.is_whole:
                    self.save()
        else:  # not before rank 0 has had its signal, which a lost collective would forestall
            time.sleep(2)
        sys.stdout.flush()
        os._exit(128 + number)
