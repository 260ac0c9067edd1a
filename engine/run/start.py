"""How a run begins: its settings, its folder, and where it was if it was interrupted.

A config is checked as soon as what the question needs is there:

    load_config              each key, by pydantic; keys beside each other (`impossible`); the rate
                             of the embedded model, which ruins others (`check_default_rate`)
    check_files              before torch is imported: whether files and folders are there
    settle_config            on all ranks: `impossible` with their number, whether all have the same
                             config, code and packages; the algorithm of one's own, tried
    check_functions          the task's functions, tried on its first question
    Run.check_questions      the same questions on all ranks, at least one each; a game, played once
    check_room               the disk, for this number of weights
    check_same_run           what must not have changed since the run was started
"""

import math
import os
import shutil
import socket
from datetime import date
from pathlib import Path
from typing import Any

import torch

from engine.core.config import Config, ConfigError, check_world, differences, dotted_values
from engine.core.distributed import World, order_ddp_buckets
from engine.core.files import sizes_of
from engine.model.load import find_base, one_line_errors
from engine.model.probes import supports_dtype
from engine.run.config_file import dump, read_file, section_of
from engine.run.fingerprint import check_same_everywhere, check_same_files, commit_of
from engine.run.folder import command, run_folder, run_name
from engine.run.log import write_settings
from engine.run.remarks import remark_at_start
from engine.run.resume import make_folder, resume
from engine.run.state import Run
from engine.update.optimizer import AVERAGES, FP32

BF16_INSTRUCTIONS = ("amx_bf16", "avx512_bf16")  # by which a CPU multiplies bf16
MIN_SIZE = 512  # of the hidden states, from which on it gains by that


def begin(run: Run) -> None:
    """Open a run's folder, and go on from its newest checkpoint if there is one."""
    check_room(run)
    resume(run)
    order_ddp_buckets(run.policy.scorer, run.world.device)
    if run.world.device.type == "cuda":
        from engine.run.fit import fit_micro_batches

        fit_micro_batches(run)
    elif run.config.model.compute_dtype == "auto":
        choose_dtype(run)
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
        write_settings(run.folder, config)
    run.logger.info(f"look at it live: {command('tools.report')} {run.folder} --serve")
    if not run.is_resumed:
        remark_at_start(run)


def choose_dtype(run: Run) -> None:
    """bf16 instead of fp32 for a run of all weights of a large model on a CPU that is made for it.

    Rank 0 decides once. Smaller matrices gain nothing, and an adapter's base would be rounded too.
    """
    policy, settings, backend = run.policy, run.config.model, run.config.sampling.backend
    is_made_for_it = any(torch.cpu.get_capabilities().get(name) for name in BF16_INSTRUCTIONS)
    if not run.is_resumed and settings.lora is None and backend != "vllm":
        may_gain = is_made_for_it and getattr(policy.model.config, "hidden_size", 0) >= MIN_SIZE
        is_near = may_gain and supports_dtype(policy.sampler.model, torch.bfloat16)
        run.fit.in_bf16 = run.world.broadcast(is_near)
    if run.fit.in_bf16:
        policy.compute_in_bf16()
        how = "multiplies in hardware" if is_made_for_it else "has no hardware for: that is slow"
        run.logger.info(f"it computes in bfloat16, which this processor {how}")


def check_room(run: Run) -> None:
    """Log on what the run computes and where it writes; ValueError if the disk is too small."""
    num_weights, world = run.policy.model.num_parameters(), run.world
    training, num_questions = run.config.training, run.config.questions_per_step(world.size)
    num_trained = sum(parameter.numel() for parameter in run.trained_weights)
    share = f" ({num_trained / num_weights:.2%} trained)" if num_trained < num_weights else ""
    place = f"{world.size} x {world.device.type}"
    run.logger.info(f"{num_weights:,} weights{share}, on {place}; results in {run.folder}")
    if world.device.type == "cpu" and num_weights > 50_000_000:
        held = (FP32 * num_weights + (FP32 + AVERAGES[training.optimizer]) * num_trained) / 1e9
        run.logger.info(f"each process holds {held:.1f} GB, and caches and activations on top")
    k, n = training.num_best, training.group_size
    rows = f"{num_questions * k:,} rows: {num_questions // world.size} questions on each rank"
    best = f", of which the best {k}" if k < n else ""
    run.logger.info(f"{training.num_steps} steps of {rows}, {n} samples of each{best}")
    if world.is_main:
        check_disk(run.folder, run.config, num_weights=num_trained)


def check_disk(folder: Path, config: Config, *, num_weights: int) -> None:
    """Raises ValueError, saying what would fit, if the disk is too small for the run's `folder`."""
    checkpoint = (FP32 + AVERAGES[config.training.optimizer]) * num_weights  # its bytes
    twice_best = 2 * FP32 * num_weights  # the new one is written before the old one goes
    num_checkpoints = math.ceil(config.training.num_steps / config.checkpoint.every)
    if config.checkpoint.keep is not None:
        num_checkpoints = config.checkpoint.keep + 1  # one more while it is written
    needed = num_checkpoints * checkpoint + twice_best
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    room = shutil.disk_usage(there).free + sum(sizes_of(folder).values())  # a resume overwrites it
    if needed > room:
        keep = math.floor((room - twice_best) / checkpoint) - 1
        fix = f"checkpoint.keep={keep} would fit" if keep > 0 else "give run.dir a larger disk"
        what = f"{num_checkpoints} checkpoints and best/ twice need {needed / 1e6:,.0f} MB"
        problem = f"the disk is too small: {what}, there is room for {room / 1e6:,.0f} MB"
        raise ValueError(f"run.dir = {config.run.dir}: {problem}: {fix}")


def settle_config(config: Config, world: World, notes: list[str], logger: Any) -> Config:
    """Check the config on these ranks, print what is not as usual, and fix what it leaves open.

    `pin` fills in what another start could find changed; a merged base takes an adapter's place.
    """
    check_world(config, world.size)
    check_same_everywhere(config, world)
    if not world.is_main and os.environ.get("LOCAL_RANK") == "0":
        here = f"rank {world.rank} of {world.size} on {socket.gethostname()}"
        print(f"{here}; node 0 prints", flush=True)
    if config.mode == "train" and ":" in config.training.advantage + config.training.policy_loss:
        from engine.update.user_algorithm import try_algorithm

        try_algorithm(config, world)
    names = {*config.logging.report_to, *["mlflow"] * config.logging.mlflow}
    if config.mode == "train" and world.is_main and names:
        from engine.report.boards import BOARDS

        logger.boards += [board() for name, board in BOARDS.items() if name in names]
    for line in [*notes, *differences(config)]:
        logger.info(line)
    config = pin(config, world)
    check_same_files(config, world)
    with one_line_errors(config.model.name):
        is_adapter = config.mode == "train" and find_base(config.model) is not None
    if is_adapter:
        from engine.run.merge import start_from_adapter

        config = start_from_adapter(config, world, logger.info)
    if config.mode == "train" and config.model.load_in_4bit and config.model.lora is None:
        fix = "cannot be trained; write false, or set model.lora='{r: 8}'"
        raise ConfigError([f"model.load_in_4bit = true: {fix}"])
    return config


def pin(config: Config, world: World) -> Config:
    """Fill in the model's commit on the hub and the date that a chat template writes.

    Another start would find both changed, so a run goes on with those in its config.yaml. Raises
    ValueError if an evaluation could not be written: now, not after all the work.
    """
    if config.mode == "evaluate":
        world.on_main(make_folder, run_folder(config))
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
    return commit, config.task.template_date or str(task.get("template_date") or date.today())
