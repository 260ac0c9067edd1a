"""How a run is saved, so that a kill at any moment loses no saved work, and what is whole of that.

    checkpoints/step-000010/     the model and its tokenizer, as `from_pretrained` loads them
        training_state/          state.json, optimizer.pt, files.json (all files' sizes);
                                 with model.shard a part-*.safetensors of each rank, and no model
    checkpoints/last             a link to the newest checkpoint
    best/                        the model, its tokenizer, its score (best.json, README.md)
    has_checkpoints              written with the first checkpoint; it stays if they are deleted

With LoRA only the adapter is saved, with the name of its base model. Loading runs no code from
these files: safetensors, JSON, and a pickle of weights only.
"""

import contextlib
import functools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from engine.core.config import dotted_values
from engine.core.files import open_to_append, sizes_of, sync
from engine.core.hub import without_hub
from engine.core.types import Log, Metrics, no_log
from engine.run.folder import run_name
from engine.run.mistakes import is_out_of_memory
from engine.run.state import Run, Saved

MARKER = "has_checkpoints"
STATE = "training_state/state.json"
OPTIMIZER = "training_state/optimizer.pt"


def save_best(run: Run, measured: Metrics) -> bool:
    """Save the model in best/ with its score; returns False if that was not possible."""
    model = run.policy.model
    score = measured[run.config.best_metric]
    weights = None
    if run.config.model.shard:
        from engine.update.shards import gather_weights

        weights = gather_weights(model, run.world)
    best = {"best": score, "best_step": run.state.step, "best_by": run.config.best_by}
    card = (
        f"# {run_name(run.config)}\n\n"
        f"{run.config.best_metric.removeprefix('eval/')} {score:.3f} after step {run.state.step}.\n"
        "Made by plain-grpo, whose tools.export publishes it with a whole card.\n"
    )
    arguments = (model, run.policy.tokenizer, card, run.folder / "best", weights, best)
    return save_on_main(run, "best", score, save_model, *arguments)


def save_checkpoint(run: Run) -> None:
    """Save all that a resumed run needs, if that is possible.

    Where the last update has ruined the weights, step after step is skipped. Only the first
    checkpoint behind it is written: with checkpoint.keep=2 a good one before it stays.
    """
    root = run.folder / "checkpoints"
    world = run.world
    state = run.state
    if state.skipped_in_a_row > 0:
        newest = world.on_main(newest_whole, root)
        if newest and step_of(newest) >= state.changed_at:
            run.logger.info("all steps since the newest checkpoint were skipped: nothing to save")
            return
    # The norm can overflow for finite weights, but only for ones far too large for usable logits.
    if not nn.utils.get_total_norm(run.trained_weights).isfinite():
        run.logger.warning(
            f"nothing saved at step {state.step}, since the weights are not finite: what was saved "
            "before stays"
        )
        run.unsaved["checkpoint"] = state.step
        return
    state.is_saved = True  # the checkpoint says so too: the resumed run does not save it again
    known = {
        "state": asdict(state),
        "loss_scale": run.policy.grad_scaler.state_dict(),
        "num_ranks": world.size,
        "config": dotted_values(run.config) | run.rests_on,
        "lost_best": run.unsaved.get("best"),
        "fit": asdict(run.fit),
        "num_alike": run.num_alike,
    }
    checkpoint = root / f"step-{state.step:06d}"
    write = functools.partial(write_state, run)
    if run.config.model.shard:
        from engine.update import shards

        folder = root / f"{checkpoint.name}.parts.tmp"
        num_failed = shards.save_parts(run.policy.model, run.optimizer, folder, world)
        write = functools.partial(
            shards.move_parts, written=folder, num_parts=world.size, num_failed=num_failed
        )
    arguments = (checkpoint, known, write, run.config.checkpoint.keep)
    state.is_saved = save_on_main(run, "checkpoint", state.step, write_checkpoint, *arguments)
    if state.is_saved:
        run.logger.info(f"saved checkpoint {checkpoint}")


def save_on_main(
    run: Run, what: str, value: float, save: Callable[..., None], *arguments: Any
) -> bool:
    """Call `save` on rank 0; if the disk is full, warn, and return False on all ranks.

    Then the run's `unsaved` has the `value`, a metric or a step, until one not below it is saved.
    """
    try:
        run.world.on_main(save, *arguments)
    except ValueError as error:  # rank 0's OSError, on every rank
        run.logger.warning(
            f"nothing saved at step {run.state.step}: {error}; what was saved before is kept; free "
            "some space, or lower checkpoint.keep"
        )
        run.unsaved[what] = max(value, run.unsaved.get(what, value))
        return False
    if value >= run.unsaved.get(what, value):
        run.unsaved.pop(what, None)
    return True


def write_checkpoint(
    checkpoint: Path, state: dict, write: Callable[[Path], None], keep: int | None
) -> None:
    """Write a checkpoint, link `last` to it, and delete all but the `keep` newest.

    `write` puts weights and averages into a folder: `write_state`, or `move_parts` of shards.py.
    Damaged checkpoints are neither counted nor deleted. With `keep` None nothing is deleted.
    """
    root = checkpoint.parent
    with save_folder(checkpoint) as temporary:
        inner = temporary / "training_state"
        inner.mkdir()
        write(temporary)
        (temporary / STATE).write_text(json.dumps(state, indent=1), "utf-8")
        (inner / "files.json").write_text(json.dumps(sizes_of(temporary)), "utf-8")
    mark(root, checkpoint)
    outdated = [old for old in list_checkpoints(root) if is_whole(old)][keep:] if keep else []
    for folder in [*outdated, *root.glob("step-*.tmp"), *root.glob("step-*.old")]:
        remove(folder)  # kills have left the last two


def mark(root: Path, checkpoint: Path) -> None:
    """Write that there are checkpoints, and link `last` to the newest."""
    last = root / "last"
    marker = root.parent / MARKER
    if marker.exists() and last.resolve() == checkpoint.resolve():
        return
    open_to_append(marker).close()
    with contextlib.suppress(OSError):  # `last` is for people, and some file systems have no links
        remove(last)  # also what `scp -r` makes of the link: a copy, which would grow old
        last.symlink_to(checkpoint.name)
    sync(root)


def write_state(run: Run, folder: Path) -> None:
    """The run's model, tokenizer and averages, where one rank has all of them."""
    with without_hub():
        run.policy.model.save_pretrained(folder)
    run.policy.tokenizer.save_pretrained(folder)
    torch.save(run.optimizer.state_dict(), folder / OPTIMIZER)


def save_model(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    card: str,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    best: dict | None = None,
) -> None:
    """Write the model, its tokenizer and its card, as `from_pretrained` loads them.

    `weights` are all of them where this rank's model has a part; `best` is what best.json keeps.
    """
    with save_folder(folder) as temporary:
        with without_hub():
            model.save_pretrained(temporary, state_dict=weights)
        tokenizer.save_pretrained(temporary)
        (temporary / "README.md").write_text(card, "utf-8")  # in the place of peft's own
        if best:
            (temporary / "best.json").write_text(json.dumps(best), "utf-8")


@contextlib.contextmanager
def save_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write into, then put it in the place of `folder`.

    The new files are on the disk itself before anything is renamed, so a kill at any moment leaves
    the old folder (see `mend`) or the new one. OSError, as on a full disk, leaves the old one too.
    Where `folder` is a link, as to a larger disk, the folder that it leads to is replaced.
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


def mend(folder: Path) -> None:
    """Give the old folder its name back if a kill came between `save_folder`'s two renames."""
    folder = folder.resolve()
    old = folder.with_name(f"{folder.name}.old")
    if old.is_dir() and not folder.exists():
        old.rename(folder)


def remove(path: Path) -> None:
    """Remove a folder, a file or a link (not what it leads to), if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def newest_whole(root: Path, warn: Log = no_log, *, reads_weights: bool = False) -> Path | None:
    """The newest checkpoint that is undamaged; newer ones that are damaged cost a warning each."""
    for old in root.glob("step-*.old"):
        mend(old.with_suffix(""))
    for folder in list_checkpoints(root):
        if is_whole(folder) and not (reads_weights and has_ruined_weights(folder)):
            return folder
        warn(f"{folder} is damaged and not used")
    return None


def list_checkpoints(root: Path) -> list[Path]:
    """All folders of checkpoints, newest first."""
    named = [path for path in root.glob("step-*") if re.fullmatch("step-[0-9]+", path.name)]
    return sorted(filter(Path.is_dir, named), key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    return int(folder.name[5:])


def is_whole(folder: Path) -> bool:
    """Whether each file that was saved still has its size."""
    try:
        saved = json.loads((folder / "training_state" / "files.json").read_text())
        return STATE in saved and saved.items() <= sizes_of(folder).items()
    except (OSError, ValueError, AttributeError):  # files.json itself is missing or damaged
        return False


def has_ruined_weights(folder: Path) -> bool:
    """Whether some are not finite, as none was when it was saved; unreadable ones do not count."""
    with contextlib.suppress(SafetensorError):
        for file in folder.rglob("*.safetensors"):
            with safe_open(file, framework="pt") as saved:
                names = (name for name in saved.keys() if "/" not in name)  # noqa: SIM118
                if not all(saved.get_tensor(name).isfinite().all() for name in names):
                    return True
    return False


@contextlib.contextmanager
def naming_damage(file: Path, *, remove: Path) -> Iterator[None]:
    """Make one line of what is raised where the file's content is wrong; `remove` mends that."""
    try:
        yield
    except Exception as error:  # pydantic, torch and its optimizers each have their own
        if is_out_of_memory(error):
            raise
        raise ValueError(
            f"{file} is damaged ({type(error).__name__}: {str(error).splitlines()[0]:.80}): "
            f"remove {remove}, and the run goes on by what its checkpoints hold"
        ) from error


def load_state(folder: Path) -> Saved:
    """What `save_checkpoint` has put into state.json; ValueError if that was another version's."""
    with naming_damage(folder / STATE, remove=folder):
        content = json.loads((folder / STATE).read_bytes())
        saved = TypeAdapter(Saved).validate_python(content)
    content["state"].pop("untrained", None)  # which earlier versions kept, for the model card
    if content["state"].keys() != asdict(saved.state).keys():
        raise ValueError(
            f"{folder} was saved by another version of this program: go on with that one, or set "
            "run.name to start another run"
        )
    return saved


def load_weights(folder: Path, model: PreTrainedModel) -> None:
    """Overwrite the model's weights, or those of its adapter, with a checkpoint's."""
    if (folder / "adapter_config.json").exists():
        from engine.model.adapters import load_adapter_weights

        load_adapter_weights(model, folder)
    else:
        # By the model's config: that of the folder may name another attention, a kernel to load.
        saved = type(model).from_pretrained(folder, config=model.config, dtype=model.dtype)
        model.load_state_dict(saved.state_dict())
