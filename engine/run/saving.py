"""How a run is saved, and how it goes on where it was."""

import functools
import math
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pydantic import FiniteFloat, TypeAdapter, ValidationError
from torch import nn

from engine.core.config import Config, differences, dotted_values
from engine.core.files import write_atomically
from engine.model.load import of_teacher
from engine.report.metrics import versions
from engine.run import checkpoint
from engine.run.card import model_card
from engine.run.config_file import dump, read_file
from engine.run.fingerprint import MODEL_FILES, check_same_run, of_model
from engine.run.folder import run_name
from engine.run.state import Run, Saved, summary
from engine.update.optimizer import AVERAGES, FP32, learning_rate_at
from engine.update.shards import (
    check_shared_disk,
    gather_weights,
    load_parts,
    move_parts,
    save_parts,
)

# Beginning


def check_room(run: Run) -> None:
    """Log on what the run computes and where it writes; ValueError if the disk is too small."""
    num_weights, world = run.policy.model.num_parameters(), run.world
    training, num_questions = run.config.training, run.config.questions_per_rank(world.size)
    place = f"{world.size} x {world.device.type}"
    run.logger.info(f"{num_weights:,} weights, on {place}; results in {run.folder}")
    k, n = training.k_best_of_n
    rows = f"{num_questions * world.size * k:,} rows: {num_questions} questions on each rank"
    best = f", of which the best {k}" if k < n else ""
    run.logger.info(f"{training.num_steps} steps of {rows}, {n} samples of each{best}")
    if world.is_main:
        num_trained = sum(parameter.numel() for parameter in run.trained_weights)
        check_disk(run.folder, run.config, num_weights=num_trained)


def check_disk(folder: Path, config: Config, *, num_weights: int) -> None:
    """Raises ValueError, saying what would fit, if the disk is too small for the run's `folder`."""
    checkpoint = (FP32 + AVERAGES[config.training.optimizer]) * num_weights  # its bytes
    twice_best = 2 * FP32 * num_weights  # the new one is written before the old one goes
    num_checkpoints = math.ceil(config.training.num_steps / config.checkpoint.every)
    if config.checkpoint.keep is not None:
        num_checkpoints = config.checkpoint.keep + 1  # one more while it is written
    needed = num_checkpoints * checkpoint + twice_best
    # What is saved already counts as room: a resumed run overwrites it.
    saved = sum(file.lstat().st_size for file in folder.rglob("*") if file.is_file())
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    room = shutil.disk_usage(there).free + saved
    if needed > room:
        keep = math.floor((room - twice_best) / checkpoint) - 1
        fix = f"checkpoint.keep={keep} would fit" if keep > 0 else "give run.dir a larger disk"
        what = f"{num_checkpoints} checkpoints and best/ twice need {needed / 1e6:,.0f} MB"
        problem = f"the disk is too small: {what}, there is room for {room / 1e6:,.0f} MB"
        raise ValueError(f"run.dir = {config.run.dir}: {problem}: {fix}")


def resume(run: Run) -> None:
    """Go on from the newest whole checkpoint, if there is one; rank 0 reads and broadcasts it.

    Raises ValueError where that checkpoint belongs to another configuration, and where the folder
    is another process's or holds results that would be overwritten.
    """
    world, config = run.world, run.config
    folder, saved = world.on_main(find_saved, run)
    run.rests_on[MODEL_FILES] = world.on_main(of_model, config)
    if config.model.teacher is not None:
        run.rests_on["the files of model.teacher"] = world.on_main(of_model, of_teacher(config))
    if config.model.shard:
        check_shared_disk(run.folder, world)
    if saved is None:
        return
    for key in check_same_run(saved.config, config, run.rests_on):
        run.logger.warning(f"{key} has changed: from here on no longer bit for bit the same")
    training = config.training
    before = saved.config.get("training.num_steps", training.num_steps)
    if before != training.num_steps and training.lr_schedule != "constant":
        rate = f"{learning_rate_at(saved.state.step + 1, training):.1e}"
        change = f"training.num_steps was {before} and is {training.num_steps}"
        run.logger.warning(f"{change}: the learning rate goes on at {rate}, as in the longer run")
    num_ranks = saved.num_ranks
    if num_ranks != world.size:
        change = f"the run had {num_ranks} ranks and goes on with {world.size}"
        run.logger.warning(f"{change}: not bit for bit the same")
    if config.model.shard:  # each rank reads its own part
        load_parts(folder, run.policy.model, run.optimizer, num_parts=num_ranks, rank=world.rank)
    else:
        if world.is_main:
            checkpoint.load_weights(folder, run.policy.model)
            run.optimizer.load_state_dict(checkpoint.load_optimizer_state(folder))
        world.broadcast_optimizer(run.optimizer)
    scale = run.policy.loss_scale
    scale.load_state_dict(saved.loss_scale or scale.state_dict())
    run.policy.refresh_sampler()
    run.state, run.is_resumed = saved.state, True
    run.unsaved = {} if saved.lost_best is None else {"best": saved.lost_best}
    run.logger.info(f"resumed after step {run.state.step}")


def find_saved(run: Run) -> tuple[Path | None, Saved | None]:
    """Lock the run's folder; returns the checkpoint to go on from, if any, and its state.json."""
    warn, may_resume = run.logger.warning, run.config.checkpoint.resume == "auto"
    run.lock = checkpoint.lock_folder(run.folder, warn)
    folder = checkpoint.find_start(run.folder, may_resume=may_resume, warn=warn)
    if folder is None:
        return None, None
    content, best = checkpoint.load_state(folder), run.folder / "best"
    file = folder / "training_state" / "state.json"
    saved = checked(Saved, content, file)
    known = content["state"].keys() | {"is_warm"}  # a run older than warm starts lacks it
    if known != asdict(run.state).keys():
        fix = "go on with that one, or set run.name to start another run"
        raise ValueError(f"{folder} was saved by another version of this program: {fix}")
    if saved.state.evaluated_at >= 0 and None in (saved.state.first, saved.state.last):
        raise ValueError(f"{file}: was edited: it lacks a score")
    is_there, score = any(best.glob("*.safetensors")), best / "best.json"
    if is_there and score.is_file():  # it may be newer than the checkpoint
        kept = checked(dict[str, FiniteFloat], read_file(score), score)  # JSON is YAML too
        saved.state.best = kept.get("best", saved.state.best)
        saved.state.best_step = int(kept.get("best_step", saved.state.best_step))
    elif saved.state.best is not None and not is_there:
        warn(f"the model in {best} is gone: the best one from here on will be saved there")
        saved.state.best = None
    return folder, saved


def checked(kind: type, content: object, file: Path) -> Any:
    """A file's content as that type; ValueError, with the file's name, if somebody changed it."""
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        detail = error.errors()[0]
        problem = f"was edited or damaged: {detail['loc']}: {detail['msg']}"
        raise ValueError(f"{file}: {problem}") from error


def open_files(run: Run) -> None:
    """Make the run's folder, write its resolved config, and start the files of its metrics."""
    config, state = run.config, run.state
    run.logger.open(
        run.folder,
        resume_step=state.step if run.is_resumed else None,
        is_evaluated=state.evaluated_at == state.step,
        about={
            "experiment": config.logging.experiment,
            "run_name": run_name(config),
            "description": "\n".join(f"- {line}" for line in differences(config)),
            "params": dotted_values(config),
            "config_text": dump(config),
        },
    )
    if run.world.is_main:
        write_config(run.folder, config)
    run.logger.info(f"look at it live: python -m tools.report {run.folder} --serve")


def write_config(folder: Path, config: Config) -> None:
    """Write every setting to config.yaml, below the versions in use; `pin` reads it."""
    write_atomically(folder / "config.yaml", f"# {versions()}\n{dump(config)}")


# Saving


def save_best(run: Run, measured: dict[str, float]) -> bool:
    """Save the model in best/ with its card; returns False if that was not possible."""
    model, config = run.policy.model, run.config
    save = functools.partial(
        checkpoint.save_model,
        model,
        run.policy.tokenizer,
        model_card(run, measured),
        run.folder / "best",
        weights=gather_weights(model, run.world) if config.model.shard else None,
        # As `State` names them:
        best={"best": measured[config.validation.best_metric], "best_step": run.state.step},
    )
    return save_on_main(run, "best", measured[config.validation.best_metric], save)


def save_checkpoint(run: Run) -> None:
    """Save all that a resumed run needs, if that is possible.

    Steps are skipped one after the other where the last update has ruined the weights. Then only
    the first checkpoint behind it is written: with checkpoint.keep=2 a good one before it stays.
    """
    root, world, state = run.folder / "checkpoints", run.world, run.state
    if state.skipped_in_a_row > 0:
        newest = world.on_main(checkpoint.newest_whole, root)
        if newest is not None and checkpoint.step_of(newest) >= state.changed_at:
            run.logger.info("all steps since the newest checkpoint were skipped: nothing to save")
            return
    # The norm can overflow for finite weights, but only for ones far too large for usable logits.
    if not nn.utils.get_total_norm(run.trained_weights).isfinite():
        problem = "since the weights are not finite: what was saved before stays"
        run.logger.warning(f"nothing saved at step {state.step}, {problem}")
        run.unsaved["checkpoint"] = state.step
        return
    state.is_saved = True  # the checkpoint says so too: the resumed run does not save it again
    known = {
        "state": asdict(state),
        "loss_scale": run.policy.loss_scale.state_dict(),
        "num_ranks": world.size,
        "config": dotted_values(run.config) | run.rests_on,
        "lost_best": run.unsaved.get("best"),
    }
    model, tokenizer, optimizer = run.policy.model, run.policy.tokenizer, run.optimizer
    name, keep = f"step-{state.step:06d}", run.config.checkpoint.keep
    if run.config.model.shard:
        folder = root / f"{name}.parts.tmp"
        num_failed = save_parts(model, optimizer, folder, world)
        write = functools.partial(
            move_parts, written=folder, num_parts=world.size, num_failed=num_failed
        )
    else:
        write = functools.partial(
            checkpoint.write_model, model=model, tokenizer=tokenizer, optimizer=optimizer
        )
    save = functools.partial(
        checkpoint.save_checkpoint, root, known, step=state.step, write=write, keep=keep
    )
    state.is_saved = save_on_main(run, "checkpoint", state.step, save)
    if state.is_saved:
        run.logger.info(f"saved checkpoint {root / name}")


def save_on_main(run: Run, what: str, value: float, save: Callable[[], None]) -> bool:
    """Call `save` on rank 0; if the disk is full, warn, and return False on all ranks.

    Then the run's `unsaved` has the `value`, a metric or a step, until one not below it is saved.
    """
    try:
        run.world.on_main(save)
    except ValueError as error:  # rank 0's OSError, on every rank
        fix = "what was saved before is kept; free some space, or lower checkpoint.keep"
        run.logger.warning(f"nothing saved at step {run.state.step}: {error}; {fix}")
        run.unsaved[what] = max(value, run.unsaved.get(what, value))
        return False
    if value >= run.unsaved.get(what, value):
        run.unsaved.pop(what, None)
    return True


# The end


def finish(run: Run) -> int:
    """Print the summary; returns the exit status: 1 if the best or the last model is not saved."""
    run.logger.info(summary(run))
    run.logger.close()
    return 1 if run.unsaved else 0


def stop(run: Run) -> int:
    """Say where a run goes on that a signal has ended; returns the exit status of the signal."""
    step, is_saved = run.state.step, run.state.is_saved
    run.logger.close("KILLED")
    what = "all is saved" if is_saved else "only what was saved before is there"
    run.logger.info(f"stopped by a signal after step {step}; {what}; go on with the same command")
    return 128 + (run.world.stop_signal or 15)  # SIGTERM, where another rank was sent the signal
