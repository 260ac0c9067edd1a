"""How a run begins: its ranks, its model, its questions, and where it was if it was interrupted."""

import os
from collections.abc import Callable
from datetime import date
from pathlib import Path

from torch import nn

from engine.core.config import Config, check_world, differences
from engine.core.distributed import World, init_world, order_ddp_buckets
from engine.core.types import Log
from engine.model.adapters import find_base
from engine.model.load import check_teacher, load_model_and_tokenizer, load_teacher
from engine.model.policy import (
    Policy,
    choose_backend,
    choose_compute_dtype,
    make_sampler,
    sampling_params,
)
from engine.model.probes import check_vllm, supports_chunked_head
from engine.questions.data import load_questions
from engine.questions.tasks import load_task
from engine.report.boards import make_boards
from engine.run.checkpoint import make_folder
from engine.run.config_file import read_file, section_of
from engine.run.fingerprint import commit_of
from engine.run.folder import run_name, run_that_made
from engine.run.saving import check_room, open_files, resume
from engine.run.state import Run
from engine.run.warm_start import load_answers, read_answers
from engine.sampling.environment import check_environment
from engine.sampling.vllm import VllmEngine
from engine.update.optimizer import make_optimizer
from logger import Logger

# Up to so many bytes the fp32 logits of a whole micro-batch are made at once; larger ones would be
# most of a GPU's memory (8,192 tokens x 151,936 make 5 GB), so they are made block by block.
MAX_LOGITS_BYTES = 2**28


def load_run(
    config: Config, wrap_policy: Callable[..., None], make_batch: Callable[..., object]
) -> Run:
    """Load what the config names on this rank; a run that was interrupted is resumed.

    `wrap_policy` and `make_batch` are main.py's wrap_policy and DecodeBatch.
    """
    is_training = config.mode == "train"
    world, notes = init_world()  # which of torchrun's ranks this is, and its device
    check_world(config, world.size)
    boards = make_boards(config.logging) if is_training and world.is_main else ()
    logger = Logger(rank=world.rank, boards=boards)
    for line in [*notes, *differences(config)]:
        logger.info(line)
    config = pin(config, world)  # the model's commit, and the date that a chat template writes
    task = load_task(config.task.code)
    rows = read_answers(task, config)
    policy = load_policy(config, world, logger.info, make_batch)
    logger.info(f"a completion ends at {policy.end_tokens}")
    if is_training:
        in_blocks = scores_in_blocks(policy.model, config.training.micro_batch_tokens, logger.info)
        wrap_policy(policy, config, world, in_blocks=in_blocks)
    validation, training = load_questions(
        task,
        config,
        tokenizer=policy.tokenizer,
        context=policy.context_length,
        log=logger.info,
    )
    if is_training:  # epochs become steps
        config = config.with_num_steps(len(training.questions), world.size)
    run = Run(config, world, logger, run_folder(config), task, policy, validation, training)
    run.check_questions()  # as many as ranks, and the same on all
    check_environment(task, config, policy.tokenizer, validation[0])
    if is_training:
        load_answers(run, rows)
        run.optimizer = make_optimizer(policy.model, config.training)
        check_room(run)
        resume(run)
        order_ddp_buckets(policy.scorer, world.device)
        open_files(run)
    return run


def load_policy(
    config: Config, world: World, log: Log, make_batch: Callable[..., object]
) -> Policy:
    """The model on this rank's device, and how completions are sampled from it.

    The trained weights are fp32. Their arithmetic is bf16 on a GPU (float16 on one without bf16),
    fp32 on a CPU, or what `compute_dtype` says. In 16 bits a copy samples, refreshed every step;
    with sampling.backend=vllm that copy is vLLM's, which samples in evaluations too. The loss scale
    follows the compute dtype all the same, and tools.chat samples by transformers.
    `make_batch` is main.py's DecodeBatch, whose decoding is tried out here.
    """
    is_taught = config.mode == "train" and config.model.teacher is not None
    if is_taught:
        check_teacher(config)  # its tokens, before any weights are loaded
    # Of the hub's generation_config the end tokens stay, in best/ too; all else is emptied here.
    model, tokenizer, eos_ids, compute_dtype = load_model_and_tokenizer(
        config,
        device=world.device,
        compute_dtype=choose_compute_dtype(config.model, world.device),
        log=log,
    )
    if config.sampling.backend == "vllm":
        base = find_base(config.model) or config.model  # of an adapter
        sampler = VllmEngine(base, world, compute_dtype, config.sampling.vllm_memory_gb)
        sampler.load_weights(model)
        check_vllm(model, sampler, tokenizer.encode("12 plus 30 is 42, and Rome is in Italy."))
    else:
        sampler = make_sampler(model, compute_dtype, world.device, shard=config.model.shard)
    params = sampling_params(config, tokenizer, eos_ids, log)
    policy = Policy(model, sampler, tokenizer, params, compute_dtype)
    if is_taught:
        policy.teacher = load_teacher(
            config, device=world.device, compute_dtype=compute_dtype, log=log
        )
    with policy.autocast():
        policy.backend = choose_backend(config.sampling.backend, sampler, make_batch, log)
    return policy


def scores_in_blocks(model: nn.Module, micro_batch_tokens: int, log: Log) -> bool:
    """Whether log-probabilities come from the chunked head, as where logits are large.

    Every rank decides by the same numbers. It costs time, and a model whose logits are more than
    head(hidden) cannot use it.
    """
    num_bytes = 4 * micro_batch_tokens * model.config.get_text_config().vocab_size
    in_blocks = num_bytes > MAX_LOGITS_BYTES and supports_chunked_head(model, log)
    how = "in blocks of the vocabulary" if in_blocks else "at once"
    log(f"logits of a micro-batch: {num_bytes / 1e6:,.1f} MB, made {how}")
    return in_blocks


def run_folder(config: Config) -> Path:
    """The folder of this run. An evaluated model's is that of the run that made it.

    So `mode=evaluate` of runs/a/best, of a checkpoint or of an exported model writes to runs/a,
    unless run.name is given or nothing can be written there.
    """
    if config.mode == "evaluate" and config.run.name is None:
        folder = run_that_made(config.model.name)
        if folder is not None and os.access(folder, os.W_OK):
            return folder
    return Path(config.run.dir) / run_name(config)


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
