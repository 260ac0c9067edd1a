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
import os
import socket
from datetime import date
from pathlib import Path
from typing import Any

from huggingface_hub import constants, is_offline_mode
from transformers.utils import find_adapter_config_file

from engine.core.config import (
    Config,
    ConfigError,
    ModelSettings,
    check_world,
    differences,
    dotted_values,
)
from engine.core.distributed import World, order_ddp_buckets
from engine.core.hub import COMMITS, commit_of, is_commit
from engine.core.types import Log, no_log
from engine.model.load import base_of, find_base, one_line_errors
from engine.model.precision import gains_by_bf16, multiplies_bf16
from engine.questions.tables import is_on_hub, split_source
from engine.questions.tasks import load_task
from engine.run.checkpoint import load_state, newest_whole
from engine.run.config_file import dump, read_file, section_of
from engine.run.fingerprint import check_same_everywhere, check_same_files
from engine.run.fit import check_room, fit_micro_batches
from engine.run.folder import MADE_OF, command, run_folder, run_name
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
        chosen = {"compute_dtype": str(run.policy.compute_dtype).removeprefix("torch.")}
        write_settings(run.folder, config.replace(model=config.model.replace(**chosen)))
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
        print(
            f"rank {world.rank} of {world.size} on {socket.gethostname()}; node 0 prints",
            flush=True,
        )
    if config.mode == "train" and ":" in config.training.advantage + config.training.policy_loss:
        from engine.update.user_algorithm import try_algorithm

        try_algorithm(config, world)
    names = {*config.logging.report_to, *["mlflow"] * config.logging.mlflow}
    if config.mode == "train" and world.is_main and names:
        from engine.report.boards import BOARDS

        logger.boards += [board() for name, board in BOARDS.items() if name in names]
    for line in [*notes, *differences(config)]:
        logger.info(line)
    config = pin(config, world, logger.info)
    check_same_files(config, world)
    with one_line_errors(config.model.name):
        is_adapter = config.mode == "train" and find_base(config.model) is not None
    if is_adapter:
        from engine.run.merge import start_from_adapter

        config = start_from_adapter(config, world, logger.info)
    if config.mode == "train" and config.model.load_in_4bit and config.model.lora is None:
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
    if config.mode == "evaluate":
        world.on_main(make_folder, run_folder(config))
    pins, commits, constants.HF_HUB_OFFLINE = world.on_main(find_pins, config, log)
    COMMITS.update(commits)
    return config.replace(**{name: getattr(config, name).replace(**pins[name]) for name in pins})


def find_pins(config: Config, log: Log) -> tuple[dict[str, dict], dict, bool]:
    """The values to fill in, by section, all commits, and whether the hub is asked no more."""
    file = run_folder(config) / "config.yaml"
    began = read_file(file) if file.is_file() else {}
    newest = newest_whole(run_folder(config) / "checkpoints")
    rests_on = {}
    with contextlib.suppress(ValueError, KeyError):  # resuming will say it better
        rests_on = load_state(newest)["config"] if newest else {}
    if (made_of := run_folder(config) / "base" / MADE_OF).is_file():
        rests_on |= read_file(made_of)
    model = section_of(began, "model")
    task = section_of(began, "task")
    day = config.task.template_date or str(task.get("template_date") or date.today())
    pins = {"model": {}, "task": {"template_date": day}}
    is_training = config.mode == "train"
    if is_training and config.model.compute_dtype in ("auto", model.get("compute_dtype")):
        # config.yaml has what auto chose, and a checkpoint auto itself.
        chosen = rests_on.get("model.compute_dtype", config.model.compute_dtype)
        pins["model"]["compute_dtype"] = chosen
    for key, which in [("name", "revision"), ("teacher", "teacher_revision")][: 1 + is_training]:
        name = getattr(config.model, key)
        files = f"the files of model.{key}"
        if name is not None:
            kept = rests_on | {"revision": model.get(which)} if model.get(key) == name else {}
            known = [kept.get(files), kept.get("revision")]
            with one_line_errors(name, key=f"model.{key}"):
                commit = own_commit(name, getattr(config.model, which), known, log)
                settings = config.model.replace(name=name, revision=commit)
                look_up_base(settings, kept.get(f"{files}'s base"), log)
            pins["model"][which] = commit
    sources = ["eval", *["train"] * (is_training or config.task.train == config.task.eval)]
    if load_task(config.task).load_examples is not None:
        sources = []  # the task says what a source is
    for key in sources:
        source = getattr(config.task, key)
        if is_on_hub(source):
            name, revision, part = split_source(source)
            before = split_source(str(task.get(key)))
            known = [before[1]] if before[::2] == (name, part) else []
            with one_line_errors(source, key=f"task.{key}"):
                commit = own_commit(name, revision, known, log, kind="dataset")
            pins["task"][key] = f"{name}@{commit}{part}" if commit else source
    return pins, COMMITS, is_offline_mode()


def own_commit(
    name: str, given: str | None, known: list[str | None], log: Log, *, kind: str = "model"
) -> str | None:
    """The first commit in `known`, with which the run began, or that which `given` means now."""
    began = next(filter(is_commit, known), None)
    if began is None or is_commit(given):
        return commit_of(name, given, kind=kind, log=log)
    is_asked = given is not None and not is_offline_mode()
    now = commit_of(name, given if is_asked else began, kind=kind, log=log)
    if now != began:
        log(f"{name}: {given} is now commit {now}, this run goes on with its own, {began}")
    return began


def look_up_base(settings: ModelSettings, began: str | None, log: Log) -> None:
    """Put an adapter's base into COMMITS, at the commit that the run began with, if it has."""
    described = find_adapter_config_file(settings.name, revision=settings.revision)
    if described is not None and is_commit(began):
        name, revision = base_of(Path(described).parent)
        COMMITS["model", name, revision] = COMMITS["model", name, began] = began
    find_base(settings, log)
