"""What fits: a run on its disk; on a GPU a micro-batch, and whether it must recompute for that.

The latter is found by trying: a pass of one row and one of two, of weight 0, show what each further
row takes.
"""

import math
import shutil
from pathlib import Path

import torch

from engine.core.config import Config
from engine.core.files import sizes_of
from engine.core.tensors import local
from engine.model.load import recompute
from engine.model.policy import MOST_TOKENS
from engine.questions.prompts import encode_prompts
from engine.run.state import Fit, Run
from engine.update.optimizer import AVERAGES, FP32

SHARE = 0.7  # of the free memory: micro-batches of several shapes leave a part of it in fragments
NCCL_BYTES = 10**9  # of its buffers, which it takes at its first sum
FEW_TOKENS = 8_192  # it recomputes rather than have fewer
NUM_PROMPTS = 256


def check_room(run: Run) -> None:
    """Log on what the run computes and where it writes; ValueError if the disk is too small."""
    num_weights = run.policy.model.num_parameters()
    world = run.world
    training = run.config.training
    num_questions = run.config.questions_per_step(world.size)
    num_trained = sum(parameter.numel() for parameter in run.trained_weights)
    share = f" ({num_trained / num_weights:.2%} trained)" if num_trained < num_weights else ""
    run.logger.info(
        f"{num_weights:,} weights{share}, on {world.size} x {world.device.type}; results in "
        f"{run.folder}"
    )
    if world.device.type == "cpu" and num_weights > 50_000_000:
        held = (FP32 * num_weights + (FP32 + AVERAGES[training.optimizer]) * num_trained) / 1e9
        run.logger.info(f"each process holds {held:.1f} GB, and caches and activations on top")
    k = training.num_best
    n = training.group_size
    rows = f"{num_questions * k:,} rows: {num_questions // world.size} questions on each rank"
    best = f", of which the best {k}" if k < n else ""
    run.logger.info(f"{training.num_steps} steps of {rows}, {n} samples of each{best}")
    if world.is_main:
        check_disk(run.folder, run.config, num_trained)


def check_disk(folder: Path, config: Config, num_weights: int) -> None:
    """Raises ValueError, saying what would fit, if the disk is too small for the run's `folder`."""
    checkpoint = (FP32 + AVERAGES[config.training.optimizer]) * num_weights  # its bytes
    twice_best = 2 * FP32 * num_weights  # the new one is written before the old one goes
    num_checkpoints = math.ceil(config.training.num_steps / config.checkpoint.every)
    if config.checkpoint.keep:
        num_checkpoints = config.checkpoint.keep + 1  # one more while it is written
    needed = num_checkpoints * checkpoint + twice_best
    there = next(filter(Path.exists, (folder, *folder.absolute().parents)))
    room = shutil.disk_usage(there).free + sum(sizes_of(folder).values())  # a resume overwrites it
    if needed > room:
        keep = math.floor((room - twice_best) / checkpoint) - 1
        fix = f"checkpoint.keep={keep} would fit" if keep > 0 else "give run.dir a larger disk"
        raise ValueError(
            f"run.dir = {config.run.dir}: the disk is too small: {num_checkpoints} checkpoints and "
            f"best/ twice need {needed / 1e6:,.0f} MB, there is room for {room / 1e6:,.0f} MB: "
            f"{fix}"
        )


def fit_micro_batches(run: Run) -> None:
    """Set `run.fit` where the config leaves open what it says; a resumed run keeps its own."""
    training = run.config.training
    settings = run.config.model
    fit = run.fit
    may_recompute = settings.gradient_checkpointing is None
    if training.micro_batch_tokens and not may_recompute:
        return
    gpus = f"{run.world.size} x {torch.cuda.get_device_name(run.world.device)}"
    if fit.where != gpus:
        questions = [question for _, question in run.stream.take(0, NUM_PROMPTS)[0]]
        prompts = encode_prompts(questions, run.task, run.policy.tokenizer)
        row = max(map(len, prompts)) + training.max_new_gen_tokens  # the longest
        enough = max(training.micro_batch_tokens or FEW_TOKENS, 2 * row)
        # All ranks gather shards in a pass: one that ran out of memory there would end the run.
        tokens = 0 if settings.shard and may_recompute else micro_batch_that_fits(run, row)
        fit = Fit(max(tokens, row), may_recompute and tokens < enough, where=gpus)
    if fit.recomputes and may_recompute:
        recompute(run.policy.model)
        if fit is not run.fit:
            fit.tokens = max(micro_batch_that_fits(run, row), row)
    run.fit = fit
    how = "with" if fit.recomputes or settings.gradient_checkpointing else "without"
    run.logger.info(f"micro-batches of {fit.tokens:,} tokens on {gpus}, {how} recomputation")


def micro_batch_that_fits(run: Run, row: int) -> int:
    """The tokens of the whole rows that fit on the rank with the least room; 0 if not one does."""
    world = run.world
    num_rows = 0
    later = NCCL_BYTES * (world.size > 1)  # bytes; those of decoding's graphs are free by then
    if not run.optimizer.state:
        num_weights = sum(local(weight).numel() for weight in run.trained_weights)
        later += AVERAGES[run.config.training.optimizer] * num_weights
    bytes_of_pass(run, 1, row)  # makes the gradients
    one, two = (bytes_of_pass(run, n, row) for n in (1, 2))
    torch.cuda.empty_cache()
    room = SHARE * (torch.cuda.mem_get_info(world.device)[0] - later)
    if one <= room:
        num_rows = min(1 + int((room - one) // max(1, two - one)), MOST_TOKENS // row)
    num_rows = min(world.gather(num_rows))
    # The head's gradient, which any pass makes, may hide what one row or two take: try them all.
    while num_rows > 1 and max(world.gather(bytes_of_pass(run, num_rows, row) - room)) > 0:
        num_rows //= 2
    run.policy.model.zero_grad(set_to_none=not run.policy.is_in_ddp)
    return num_rows * row


def bytes_of_pass(run: Run, num_rows: int, row: int) -> float:
    """The most that a pass of an update takes, one of weight 0; infinite if it does not fit."""
    policy = run.policy
    device = run.world.device
    ids = torch.zeros((num_rows, row), dtype=torch.long, device=device)
    columns = torch.arange(row, device=device) >= row - run.config.training.max_new_gen_tokens
    mask = columns.expand_as(ids)
    policy.model.train()  # only then are activations recomputed
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    try:
        log_probs = policy.inner_scorer(ids, mask, temperature=policy.params.temperature)
        if policy.reference:
            policy.score_by_reference(ids, mask)
        (0.0 * log_probs.sum()).backward()
    except torch.OutOfMemoryError:
        if run.config.model.shard:  # the other ranks wait in the middle of the pass
            raise
        return math.inf
    return torch.cuda.max_memory_allocated(device) - held
