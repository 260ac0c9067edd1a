"""How large a micro-batch a GPU holds, and whether it must recompute: found by trying.

A pass of one row and one of two, of weight 0, show what each further row takes.
"""

import math

import torch

from engine.model.load import recompute
from engine.model.policy import MOST_TOKENS
from engine.questions.prompts import encode_prompts
from engine.run.state import Fit, Run
from engine.update.optimizer import AVERAGES

SHARE = 0.7  # of the free memory: micro-batches of several shapes leave a part of it in fragments
NCCL_BYTES = 10**9  # of its buffers, which it takes at its first sum
FEW_TOKENS = 8_192  # it recomputes rather than have fewer
NUM_PROMPTS = 256


def fit_micro_batches(run: Run) -> None:
    """Set `run.fit` where the config leaves open what it says; a resumed run keeps its own."""
    training, settings, fit = run.config.training, run.config.model, run.fit
    may_recompute = settings.gradient_checkpointing is None
    if training.micro_batch_tokens and not may_recompute:
        return
    gpus = f"{run.world.size} x {torch.cuda.get_device_name(run.world.device)}"
    if fit.where != gpus:
        row = longest_row(run)
        enough = max(training.micro_batch_tokens or FEW_TOKENS, 2 * row)
        # All ranks gather shards in a pass: one that ran out of memory there would end the run.
        tokens = 0 if settings.shard and may_recompute else micro_batch_that_fits(run, row)
        fit = Fit(max(tokens, row), may_recompute and tokens < enough, where=gpus)
    if fit.recomputes and may_recompute:
        recompute(run.policy.model)
        if fit is not run.fit:
            fit.tokens = max(micro_batch_that_fits(run, row), row)
    run.fit, how = fit, "with" if fit.recomputes or settings.gradient_checkpointing else "without"
    run.logger.info(f"micro-batches of {fit.tokens:,} tokens on {gpus}, {how} recomputation")


def longest_row(run: Run) -> int:
    """The most tokens of a row: the longest of some prompts, and a completion of full length."""
    questions = [question for _, question in run.stream.take(0, NUM_PROMPTS)[0]]
    ids = encode_prompts(questions, task=run.task, tokenizer=run.policy.tokenizer)
    return max(map(len, ids)) + run.config.training.max_new_gen_tokens


def micro_batch_that_fits(run: Run, row: int) -> int:
    """The tokens of the whole rows that fit on the rank with the least room; 0 if not one does."""
    world, is_cut, num_rows = run.world, run.config.model.shard, 0
    weights = [weight.to_local() if is_cut else weight for weight in run.trained_weights]
    later = NCCL_BYTES * (world.size > 1)  # bytes; those of decoding's graphs are free by then
    if not run.optimizer.state:
        later += AVERAGES[run.config.training.optimizer] * sum(w.numel() for w in weights)
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
    policy, device = run.policy, run.world.device
    ids = torch.zeros((num_rows, row), dtype=torch.long, device=device)
    columns = torch.arange(row, device=device) >= row - run.config.training.max_new_gen_tokens
    mask = columns.expand_as(ids)
    policy.model.train()  # only then are activations recomputed
    torch.cuda.reset_peak_memory_stats(device)
    held = torch.cuda.memory_allocated(device)
    try:
        log_probs = policy.inner_scorer(ids, mask, temperature=policy.params.temperature)
        if policy.reference is not None:
            policy.score_by_reference(ids, mask)
        (0.0 * log_probs.sum()).backward()
    except torch.OutOfMemoryError:
        if run.config.model.shard:  # the other ranks wait in the middle of the pass
            raise
        return math.inf
    return torch.cuda.max_memory_allocated(device) - held
