"""How a run goes on where it was: its folder locked, its newest checkpoint found, compared, loaded.

Another start of the same run waits at the file `lock`, which the process that trains here holds.
"""

import fcntl
import json
import os
import socket
import tempfile
from datetime import datetime
from pathlib import Path
from typing import TextIO

import torch

from engine.core.distributed import World
from engine.core.files import open_to_append
from engine.core.types import Log
from engine.run import checkpoint
from engine.run.fingerprint import OWN_CODE, check_same_run, of_files, of_own_code
from engine.run.state import Run, Saved
from engine.update.optimizer import learning_rate_at


def resume(run: Run) -> None:
    """Go on from the newest whole checkpoint, if there is one; rank 0 reads and broadcasts it."""
    world = run.world
    config = run.config
    check_newest(run.folder / "checkpoints", world)
    folder, saved = world.on_main(find_saved, run)
    run.rests_on |= world.on_main(of_files, config)
    run.rests_on[OWN_CODE] = of_own_code(run.task, config.training)
    if config.model.shard:
        from engine.update import shards

        shards.check_shared_disk(run.folder, world)
    if saved is None:
        return
    compare(run, saved)
    world.on_main(checkpoint.mark, folder.parent, folder)  # a kill may have come before
    if config.model.shard:  # each rank reads its own part
        shards.load_parts(
            folder,
            run.policy.model,
            run.optimizer,
            num_parts=saved.num_ranks,
            rank=world.rank,
        )
    else:
        world.on_main(load_checkpoint, run, folder)
        world.broadcast_optimizer(run.optimizer)
    scaler = run.policy.grad_scaler
    scaler.load_state_dict(saved.loss_scale or scaler.state_dict())
    run.policy.sampler.refresh()
    run.state = saved.state
    run.fit = saved.fit
    run.is_resumed = True
    run.num_alike = saved.num_alike
    run.unsaved = {} if saved.lost_best is None else {"best": saved.lost_best}
    run.logger.info(f"resumed after step {run.state.step}")


def load_checkpoint(run: Run, folder: Path) -> None:
    with checkpoint.naming_damage(folder, remove=folder):
        checkpoint.load_weights(folder, run.policy.model)
    with checkpoint.naming_damage(folder / checkpoint.OPTIMIZER, remove=folder):
        # Only weights are read: a pickle may name code to run.
        saved = torch.load(folder / checkpoint.OPTIMIZER, map_location="cpu", weights_only=True)
        run.optimizer.load_state_dict(saved)
        for weight, kept in run.optimizer.state.items():
            for name in kept.keys() & {"exp_avg", "exp_avg_sq", "momentum_buffer"}:
                assert kept[name].expand_as(weight).isfinite().all(), f"{name} is not finite"


def compare(run: Run, saved: Saved) -> None:
    """Refuse what must not have changed since then, and say what else has changed, and means."""
    config = run.config
    training = config.training
    num_ranks = run.world.size
    for key in check_same_run(saved.config, config, run.rests_on):
        means = "from here on no longer bit for bit the same"
        if key == OWN_CODE:
            means = "the rest of the run is paid, or trained, by other code than the steps before"
        run.logger.warning(f"{key} has changed: {means}")
    before = saved.config.get("training.num_steps", training.num_steps)
    if before != training.num_steps and training.lr_schedule != "constant":
        run.logger.warning(
            f"training.num_steps was {before} and is {training.num_steps}: the learning rate goes "
            f"on at {learning_rate_at(saved.state.step + 1, training):.1e}, as in the longer run"
        )
    if saved.num_ranks != num_ranks:
        then, now = (config.questions_per_step(n) for n in (saved.num_ranks, num_ranks))
        run.logger.warning(
            f"the run had {saved.num_ranks} ranks and {then} questions in a step, and goes on with "
            f"{num_ranks} and {now}: no longer bit for bit the same"
        )


def check_newest(root: Path, world: World) -> None:
    """Raise ValueError if another node has a newer checkpoint than rank 0, which would begin anew.

    Without a shared disk each keeps its own, and rank 0 may be elsewhere than at the last start.
    """
    whole = filter(checkpoint.is_whole, checkpoint.list_checkpoints(root))
    newest = max(map(checkpoint.step_of, whole), default=-1)
    (first, here), *others = world.gather((newest, socket.gethostname()))
    for step, host in others:
        if step > first:
            raise ValueError(
                f"{host} has a checkpoint of step {step}, and {here} none so new: start so that "
                f"{host} has rank 0, or give a run.dir that all nodes share"
            )


def find_saved(run: Run) -> tuple[Path | None, Saved | None]:
    """Lock the run's folder; returns the checkpoint to go on from, if any, and its state.json."""
    warn = run.logger.warning
    run.lock = lock_folder(run.folder, warn)
    folder = find_start(run.folder, run.config.checkpoint.resume == "auto", warn)
    if folder is None:
        return None, None
    best = run.folder / "best"
    saved = checkpoint.load_state(folder)
    is_there = any(best.glob("*.safetensors"))
    score = best / "best.json"
    if is_there and score.is_file():  # it may be newer than the checkpoint
        with checkpoint.naming_damage(score, remove=score):
            kept = json.loads(score.read_bytes(), parse_constant=int)  # NaN is an error
            saved.state.best = float(kept["best"])
            saved.state.best_step = int(kept["best_step"])
    elif saved.state.best is not None and not is_there:
        warn(f"the model in {best} is gone: the best one from here on will be saved there")
        saved.state.best = None
    return folder, saved


def find_start(folder: Path, may_resume: bool, warn: Log) -> Path | None:
    """The checkpoint to resume from, or None; ValueError if results would be overwritten."""
    root = folder / "checkpoints"
    checkpoint.mend(folder / "best")
    newest = checkpoint.newest_whole(root, warn, reads_weights=True)
    if newest and may_resume:
        return newest
    fix = "set run.name to start another run, or move this folder away"
    if (folder / checkpoint.MARKER).exists() or checkpoint.list_checkpoints(root):
        why = "no whole checkpoint to go on from" if may_resume else "checkpoint.resume is never"
        raise ValueError(f"{folder} holds the results of a run, and {why}: {fix}")
    if (folder / "metrics.jsonl").exists():
        aside = folder / f"killed-{datetime.now():%Y%m%d-%H%M%S-%f}"
        aside.mkdir()
        # metrics.jsonl marks a used folder, so it goes last: after a kill the next start goes on.
        for path in sorted(folder.iterdir(), key=lambda path: path.name == "metrics.jsonl"):
            if not path.name.startswith(("lock", "killed-", "eval-", "base")):
                path.rename(aside / path.name)
        warn(f"this run was killed before its first checkpoint and begins again; see {aside}")
    elif (folder / "config.yaml").exists():
        raise ValueError(f"{folder} holds a config.yaml, but no run: {fix}")
    return None


def lock_folder(folder: Path, warn: Log) -> TextIO:
    """Lock a run's folder until the file is closed; ValueError names the process that has it."""
    make_folder(folder)
    file = open_to_append(folder / "lock")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ValueError(
            f"{folder}: {file.read()} trains there now: wait until it ends, or set run.name to "
            "start another run"
        ) from None
    except OSError as error:
        warn(f"{folder} cannot be locked ({error.strerror}): do not start this run twice at once")
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}")
    file.flush()
    return file


def make_folder(folder: Path) -> None:
    """Make the folder if there is none; ValueError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written ({error.strerror}); give another run.dir"
        ) from error
