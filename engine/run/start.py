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

import contextlib
import json
import os
import socket
from datetime import date
from typing import Any

from huggingface_hub import constants, is_offline_mode

from engine.core.config import (
    Config,
    ConfigError,
    check_world,
    differences,
    dotted_values,
)
from engine.core.distributed import World, order_ddp_buckets
from engine.core.files import write_atomically
from engine.core.hub import BEGAN, COMMITS, commit_of, is_commit
from engine.core.types import Log, no_log
from engine.model.load import at_commit, find_base, one_line_errors
from engine.model.precision import gains_by_bf16, multiplies_bf16
from engine.questions.tables import is_on_hub, split_source
from engine.run.checkpoint import load_state, newest_whole
from engine.run.config_file import dump, keys_of_sources, read_file, section_of
from engine.run.fingerprint import check_same_everywhere, check_same_files
from engine.run.fit import check_room, fit_micro_batches
from engine.run.folder import COMMITS_FILE, command, run_folder, run_name
from engine.run.log import write_settings
from engine.run.remarks import remark_at_start
from engine.run.resume import make_folder, resume
from engine.run.state import Run


def open_or_resume(run: Run) -> None:
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
    if run.world.is_main:  # with what auto has chosen, so that mode=evaluate computes the same
        dtype = str(run.policy.compute_dtype).removeprefix("torch.")
        write_settings(run.folder, config.replace(model=config.model.replace(compute_dtype=dtype)))
        write_atomically(run.folder / COMMITS_FILE, json.dumps(COMMITS, indent=1))
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


def settle_config(config: Config, world: World, logger: Any) -> Config:
    """Check the config on these ranks, print what is not as usual, and fix what it leaves open.

    `pin` fills in what another start could find changed; a merged base takes an adapter's place.
    """
    check_world(config, world.size)
    check_same_everywhere(config, world)
    if not world.is_main and os.environ.get("LOCAL_RANK") == "0":
        print(
            f"rank {world.rank} of {world.size} on {socket.gethostname()}; node 0 prints",
            flush=True,
        )
    if config.is_training and ":" in config.training.advantage + config.training.policy_loss:
        from engine.update.user_algorithm import try_algorithm

        try_algorithm(config, world)
    names = {*config.logging.report_to, *["mlflow"] * config.logging.mlflow}
    if config.is_training and world.is_main and names:
        from engine.report.boards import BOARDS

        logger.boards += [board() for name, board in BOARDS.items() if name in names]
    for line in differences(config):
        logger.info(line)
    config = pin(config, world, logger.info)
    check_same_files(config, world)
    with one_line_errors(config.model.name):
        is_adapter = config.is_training and find_base(config.model) is not None
    if is_adapter:
        from engine.run.merge import start_from_adapter

        config = start_from_adapter(config, world, logger.info)
    if config.is_training and config.model.load_in_4bit and config.model.lora is None:
        raise ConfigError(
            "model.load_in_4bit = true: cannot be trained; write false, or set model.lora='{r: 8}'"
        )
    return config


def pin(config: Config, world: World, log: Log = no_log) -> Config:
    """Fill in the commits of what is on the hub, and the date that a chat template writes.

    Another start would find both changed, so a run goes on with those in its config.yaml, and with
    the compute_dtype of its checkpoint. Raises ValueError if an evaluation could not be written:
    now, not after all the work.
    """
    if not config.is_training:
        world.on_main(make_folder, run_folder(config))
    model, task, commits, constants.HF_HUB_OFFLINE = world.on_main(find_pins, config, log)
    COMMITS.update(commits)
    return config.replace(model=config.model.replace(**model), task=config.task.replace(**task))


def find_pins(config: Config, log: Log) -> tuple[dict, dict, dict, bool]:
    """What to fill in for model and task, all commits, and whether the hub is asked no more."""
    folder = run_folder(config)
    file = folder / "config.yaml"
    began = read_file(file) if file.is_file() else {}
    model = section_of(began, "model")
    file = folder / COMMITS_FILE
    BEGAN.clear()
    if file.is_file():
        BEGAN.update(read_file(file))
    elif is_commit(model.get("revision")):  # of an older version
        BEGAN[f"model {model['name']} None"] = model["revision"]
    day = config.task.template_date or section_of(began, "task").get("template_date")
    of_model = {}
    of_task = {"template_date": str(day or date.today())}
    is_training = config.is_training
    newest = newest_whole(folder / "checkpoints")
    given = config.model.compute_dtype
    if is_training and newest and given in ("auto", model.get("compute_dtype")):
        # config.yaml has what auto chose, and a checkpoint auto itself.
        with contextlib.suppress(ValueError, KeyError):  # resuming will say it better
            of_model["compute_dtype"] = load_state(newest).config["model.compute_dtype"]
    for key, which in [("name", "revision"), ("teacher", "teacher_revision")][: 1 + is_training]:
        name = getattr(config.model, key)
        if name:
            with one_line_errors(name, key=f"model.{key}"):
                named = config.model.replace(name=name, revision=getattr(config.model, which))
                named = at_commit(named, log)
                find_base(named, log)
            of_model[which] = named.revision
    for key in keys_of_sources(config):
        source = dotted_values(config)[key]
        if is_on_hub(source):
            name, revision, part = split_source(source)
            with one_line_errors(source, key=key):
                commit = commit_of(name, revision, kind="dataset", log=log)
            of_task[key.removeprefix("task.")] = f"{name}@{commit}{part}" if commit else source
    return of_model, of_task, COMMITS, is_offline_mode()
