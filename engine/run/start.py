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

import os
import socket
from datetime import date
from typing import Any

from engine.core.config import Config, ConfigError, check_world, differences, dotted_values
from engine.core.distributed import World, order_ddp_buckets
from engine.model.load import find_base, one_line_errors
from engine.model.precision import gains_by_bf16, multiplies_bf16
from engine.run.config_file import dump, read_file, section_of
from engine.run.fingerprint import check_same_everywhere, check_same_files, commit_of
from engine.run.fit import check_room, fit_micro_batches
from engine.run.folder import command, run_folder, run_name
from engine.run.log import write_settings
from engine.run.remarks import remark_at_start
from engine.run.resume import make_folder, resume
from engine.run.state import Run


def begin(run: Run) -> None:
    """Open a run's folder, and go on from its newest checkpoint if there is one."""
    check_room(run)
    resume(run)
    order_ddp_buckets(run.policy.scorer, run.world.device)
    if run.world.device.type == "cuda":
        fit_micro_batches(run)
    elif run.config.model.compute_dtype == "auto":
        choose_dtype(run)
    config = run.config
    state = run.state
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
    may_choose = run.config.model.lora is None and run.config.sampling.backend != "vllm"
    if may_choose and not run.is_resumed:
        run.fit.in_bf16 = run.world.broadcast(gains_by_bf16(run.policy.sampler.model))
    if run.fit.in_bf16:
        run.policy.compute_in_bf16()
        how = "multiplies in hardware" if multiplies_bf16() else "has no hardware for: that is slow"
        run.logger.info(f"it computes in bfloat16, which this processor {how}")


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
    file = run_folder(config) / "config.yaml"
    name = config.model.name
    began = read_file(file) if file.is_file() else {}
    model = section_of(began, "model")
    task = section_of(began, "task")
    commit = model.get("revision") if model.get("name") == name else None
    commit = config.model.revision or commit or commit_of(name, None)
    return commit, config.task.template_date or str(task.get("template_date") or date.today())
