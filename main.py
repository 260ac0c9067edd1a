"""Teach a language model to reason by reinforcement learning: GRPO and SIL in one script.

    torchrun --nproc-per-node=2 main.py                                 # the default, on a laptop
    torchrun --nproc-per-node=4 main.py --config configs/countdown-qwen2.5-3b.yaml
    python main.py training.num_steps=5 training.learning_rate=1e-4     # any key, on one process

One step of the algorithm (`run_training` is the loop):

    1. take N questions and sample G completions of each: the groups
    2. a rule says what each completion earns: the reward
    3. grpo: advantage = reward - mean reward of its group (GRPO, arXiv:2402.03300, without the
       division by the standard deviation: Dr. GRPO, arXiv:2503.20783)
       sil (self-improvement learning): advantage = 1 for the k best of each group's n completions,
       which are imitated; the rest is dropped
    4. loss = -sum of advantage * log-probability over all drawn tokens, divided by a constant
    5. one optimizer step on that loss: what was better than its group's mean becomes more likely
    6. where it is due an evaluation; the best model is kept

There is no critic and, with one update per batch, no ratio and no clipping. This file is all of
training and generation, a function below the one that calls it. What it rests on is in engine/, one
idea a file: other ways to the same numbers (CUDA graphs, caches with room, the head in blocks,
shards) and what is off by default. The default task is countdown.py; config.yaml explains all keys.

Shapes: N questions, G completions each, B rows, P longest prompt, T completion tokens, S longest
prompt with its completion, V vocabulary. Masks are bool, True = keep.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import engine  # noqa: F401  isort: skip  (it checks the version of Python before all else)
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList
from transformers.generation import BaseStreamer, StoppingCriteriaList

from engine.batches import sample_in_batches
from engine.cache import Room
from engine.config import Config, check_world, differences
from engine.config_file import load_config
from engine.data import load_questions
from engine.distributed import World, init_world, settle_ddp_buckets
from engine.environment import begin, check_environment
from engine.errors import crashes_name_the_fix, mistakes_cost_one_line
from engine.evaluation import (
    answer_totals,
    evaluation_metrics,
    save_evaluation,
    single_answer_metrics,
)
from engine.export import export
from engine.graphs import CapturedSteps
from engine.head import head_log_probs
from engine.losses import kl_penalty, off_policy_loss, truncated_importance
from engine.metrics import Clock, add_to_mean, performance, reduce_means, rollout_sums
from engine.model import (
    Policy,
    choose_backend,
    choose_compute_dtype,
    load_model_and_tokenizer,
    make_reference,
    make_sampler,
    sampling_params,
)
from engine.optimizer import learning_rate_at, make_optimizer, set_learning_rate
from engine.probe import supports_chunked_head
from engine.prompts import completion_text
from engine.record import Record
from engine.resume import check_room, open_files, resume, save_best, save_checkpoint, stop
from engine.rollouts_log import describe_rollouts
from engine.run import Run, summary
from engine.samples import training_samples, validation_samples
from engine.sharding import equal_passes, shard_scorer
from engine.start import run_folder, settle
from engine.task_module import load_task, reward_parts
from engine.tensors import autocast, left_pad, position_ids, right_pad, seeded
from engine.truncation import keep_likeliest
from engine.types import Completion, MicroBatch, SamplingParams, Seed, Trajectory
from logger import Logger


def main() -> None:
    """Do what the command line asks for; a user's mistake costs one line and exit status 2."""
    with mistakes_cost_one_line():
        run = load_run(load_config(sys.argv[1:]))
    with crashes_name_the_fix(run.folder):
        exit_status = run_training(run) if run.config.mode == "train" else run_evaluation(run)
        run.policy.scorer = None  # frees DDP, which must not outlive the process group
        run.world.leave()
        if run.config.mode == "train" and exit_status == 0:
            export(run)  # what the config asks to be made of best/
    sys.exit(exit_status)


def load_run(config: Config) -> Run:
    """Load what the config names on this rank; a run that was interrupted is resumed."""
    is_training = config.mode == "train"
    world, notes = init_world()  # which of torchrun's ranks this is, and its device
    check_world(config, world.size)
    logger = Logger(rank=world.rank, do_mlflow=config.logging.mlflow and is_training)
    for line in [*notes, *differences(config)]:
        logger.info(line)
    config = settle(config, world)  # the model's commit, and the date that a chat template writes
    policy, task = load_policy(config, world, logger), load_task(config.task.name)
    logger.info(f"a completion ends at {policy.end_tokens}")
    tokens = {"tokenizer": policy.tokenizer, "context": policy.context_length}
    validation, training = load_questions(task, config, **tokens, log=logger.info)
    if is_training:  # epochs become steps
        config = config.with_num_steps(len(training.questions), world.size)
    run = Run(config, world, logger, run_folder(config), task, policy, validation, training)
    run.check_questions()  # as many as ranks, and the same on all
    check_environment(run)
    if is_training:
        run.optimizer = make_optimizer(policy.model, config)
        check_room(run)
        resume(run)
        settle_ddp_buckets(policy.scorer, world.device)
        open_files(run)
    return run


def load_policy(config: Config, world: World, logger: Logger) -> Policy:
    """The model on this rank's device: one that is trained and scores, and one that samples.

    The trained weights are fp32. Their arithmetic is bf16 on a GPU (float16 on one without bf16),
    fp32 on a CPU, or what `compute_dtype` says. In 16 bits a copy samples, refreshed every step.
    """
    device, compute_dtype = world.device, choose_compute_dtype(config, world.device)
    # Of the hub's generation_config the end tokens stay, in best/ too; all else is emptied here.
    model, tokenizer, eos_ids, compute_dtype = load_model_and_tokenizer(
        config, device=device, compute_dtype=compute_dtype, log=logger.info
    )
    sampler = make_sampler(model, compute_dtype, device, shard=config.model.shard)
    scorer = reference = None
    if config.mode == "train":
        chunked = supports_chunked_head(model, logger.info)
        scorer = CompletionScorer(model, compute_dtype, chunked=chunked)
        if config.training.kl_coef > 0:  # now, before a checkpoint is loaded: it is model.name
            reference = make_reference(config, scorer, dtype=sampler.dtype)
        if config.model.shard:  # each rank has a part of the model (and of the reference)
            scorer = shard_scorer(scorer, world, keeps_root=True)
            reference = reference and shard_scorer(reference, world, keeps_root=False)
        elif world.size > 1:
            # Each rank has the whole model; DDP averages their gradients in the backward pass.
            device_ids = [device.index] if device.type == "cuda" else None
            scorer = DistributedDataParallel(scorer, device_ids, gradient_as_bucket_view=True)
    params = sampling_params(config, tokenizer, eos_ids, logger.info)
    policy = Policy(model, scorer, sampler, tokenizer, params, reference)
    with policy.autocast():
        policy.backend = choose_backend(config, sampler, DecodeBatch, logger.info)
    return policy


# The run

TRAINING, VALIDATION = 0, 1  # first word of a seed: the random numbers of the two never meet


def run_training(run: Run) -> int:
    """The whole algorithm, in one loop; returns the exit status."""
    config, world, state, logger = run.config, run.world, run.state, run.logger
    training = config.training
    questions_per_rank = config.questions_per_rank(world.size)
    questions_per_step = questions_per_rank * world.size
    world.catch_signals()  # SIGTERM, SIGINT, SIGHUP set should_stop on all ranks (distributed.py)
    # A new run evaluates the model as it was loaded, and a resumed one what a signal prevented.
    is_due = state.last is None or state.unrecorded is not None
    is_saved = end_step(run) if is_due else True
    while not (run.is_over or world.should_stop):
        run.check_progress()  # FloatingPointError after too many skipped steps in a row
        clock = Clock()
        with clock("step"):
            # Each rank takes its slice of the next questions of the stream.
            drawn, end = run.train_questions.take(state.position, questions_per_step)
            mine = drawn[world.rank * questions_per_rank :][:questions_per_rank]
            questions = [question for _, question in mine]
            seeds = [(TRAINING, training.seed, position) for position, _ in mine]
            sampling = {"num_samples": training.group_size, "params": run.policy.params}
            groups = sample_trajectories(run, questions, seeds, **sampling, clock=clock)
            assign_advantages(groups, config)
            learning_rate = learning_rate_at(state.step + 1, config)
            set_learning_rate(run.optimizer, learning_rate)
            # LoRA dropout is the only randomness here; its seed lets a resumed run repeat it.
            with clock("update"), seeded(seeds, world.device):
                is_broken = run.report_broken(groups) > 0  # counted over all ranks
                micro_batches = [] if is_broken else make_micro_batches(run, groups)
                metrics, sums, num_updates = update_policy(run, micro_batches)
                num_planned = training.num_iterations if micro_batches else 0  # if all is finite
            with clock("rollouts_log"):  # a few groups for tools/report.py
                rollouts = describe_rollouts(run, groups, questions, micro_batches)
        metrics |= reduce_means(sums | rollout_sums(groups, run.task.REWARD_PARTS), world)
        metrics |= {"train/lr": learning_rate} | run.loss_scale.read() | clock.read()
        metrics |= performance(metrics, questions_per_step * training.group_size, world.device)
        new_signs = state.advance(
            metrics,
            rollouts,
            num_questions=questions_per_step,
            is_skipped=is_broken or num_updates < num_planned,
            has_moved=num_updates > 0,
        )
        state.position = end
        logger.print_step(state.step, training.num_steps, metrics)
        state.unrecorded["samples"] = training_samples(run, groups, questions)
        for sign in new_signs:
            logger.warning(f"the model may be collapsing: {sign} (mean of the last steps)")
        if not world.should_stop:  # else the resumed run does it: there may be no time left
            is_saved = end_step(run)
    if state.unrecorded is not None or not run.is_over:
        return stop(run)  # saves a checkpoint, returns 128 + the signal: engine/resume.py
    logger.info(summary(run))
    logger.log_pages(run.folder)
    logger.close()
    return 0 if is_saved else 1


def end_step(run: Run) -> bool:
    """Evaluate if that is due, keep the best model, log the step and save a checkpoint if due.

    Returns False if a checkpoint could not be saved. Step 0 is the model as it was loaded.
    """
    config, state, logger = run.config, run.state, run.logger
    measured, samples = {}, []
    if state.step % config.validation.every == 0 or run.is_over:
        measured, samples, is_broken = evaluate(run)
        logger.print_evaluation(f"evaluation at step {state.step}", measured, samples)
        # state.last becomes best_metric, which validation.best_by names: by default eval/pass@1.
        state.note_evaluation(measured, best_metric=config.validation.best_metric)
        is_best = not is_broken and (state.best is None or state.last > state.best)
        if is_best and save_best(run, measured):  # writes best/; False if it could not
            state.best, state.best_step = state.last, state.step
    # Write the log before the checkpoint. After a crash it may then have steps that the checkpoint
    # lacks, which are cut off when the run is resumed, but never the other way round.
    step = state.unrecorded or {"metrics": {}, "samples": [], "rollouts": ""}
    logger.log_samples(state.step, step["samples"] + samples)
    logger.log_rollouts(step["rollouts"])
    logger.log_metrics(state.step, step["metrics"] | measured)
    state.unrecorded = None
    is_due = run.is_over or (state.step > 0 and state.step % config.checkpoint.every == 0)
    return save_checkpoint(run) if is_due else True


# Rollouts


def sample_trajectories(
    run: Run,
    questions: list[dict],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    clock: Clock,
) -> list[list[Trajectory]]:
    """Sample a group of completions for each question, with their rewards.

    The random numbers of a question follow from its seed, whatever the batch that it is in, the
    rank, or what was sampled before. In another batch only rounding may differ.
    """
    policy = run.policy
    sampling = {"num_samples": num_samples, "params": params}
    prompts, conversations = begin(run, questions, seeds, **sampling, clock=clock)
    decode = {
        "grouped": decode_grouped,  # the default; on a GPU it becomes "captured"
        "captured": functools.partial(decode_grouped, capture=True),  # the same in CUDA graphs
        "generate": decode_with_generate,  # transformers' own loop
    }[policy.backend]
    policy.sampler.eval()
    kind = "rollout" if params is policy.params else "evaluation"
    progress = run.logger.progress(len(questions) * num_samples, kind, "seq")
    with clock("rollout"), policy.autocast(), progress as bar:
        groups = sample_in_batches(
            policy.sampler,
            prompts,
            seeds,
            decode=decode,
            **sampling,
            max_batch_tokens=run.config.sampling.max_batch_tokens,
            on_progress=bar.update,
            log=run.logger.once,
            conversations=conversations,  # one a sample, where the task has an Environment
        )
    with clock("reward"):
        return [reward_group(run, *group) for group in zip(questions, prompts, groups, strict=True)]


@torch.no_grad()
def decode_grouped(
    model: nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    on_progress: Callable[[int], None],
    capture: bool = False,
) -> list[Completion]:
    """Sample `num_samples` completions of each prompt: N * G of them, question by question.

    `on_progress` is told how many more completions have ended.
    """
    uniforms = draw_uniforms(seeds, num_samples=num_samples, length=params.max_new_tokens)
    batch = DecodeBatch(model, prompts, uniforms, params)
    step = CapturedSteps(batch) if capture else batch.step
    steps_per_check = CapturedSteps.steps_per_check if capture else 1
    num_unfinished, longest = len(batch.tokens), max(map(len, prompts))
    for t in range(1, params.max_new_tokens):
        batch.record.reply(batch.tokens[:, 0])  # of the calculator or a row's environment, if any
        if t == 1 or t % steps_per_check == 0:
            active = batch.record.active  # (B,), False for the rows that have drawn an end token
            num_active = int(active.sum())
            on_progress(num_unfinished - num_active)
            num_unfinished = num_active
            if num_active == 0:
                break
            if num_active <= 0.85 * len(active):  # not at every end, since it copies the cache
                batch.keep(active.nonzero()[:, 0])
        step(longest + t + 1)  # the prompts and all tokens up to the one that is drawn now
    batch.record.reply(batch.tokens[:, 0])  # a last turn that just fitted
    on_progress(num_unfinished)
    return batch.record.completions()


class DecodeBatch:
    """Rows that are decoded together: each step draws one more token of every row.

    The prompts fill the first P columns, padded on the left; each step fills the next column. It
    changes tensors in place and none of them in shape; only `keep` makes new ones.
    """

    def __init__(
        self, model: nn.Module, prompts: list[list[int]], uniforms: Tensor, params: SamplingParams
    ):
        """Read each prompt once, repeat its cache, and draw the first token of each row."""
        num_samples = len(uniforms) // len(prompts)
        self.model, self.cache, self.uniforms = model, None, uniforms.to(model.device)  # (B, T)
        self.record = Record(len(uniforms), params, model.device)
        # Ask for the last position with an index tensor: the number 1 makes a strided slice, and on
        # a CPU F.linear then copies the whole head matrix once per row.
        self.last_column = torch.full((1,), -1, device=model.device)
        prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
        logits = self.read(prompt_ids, prompt_mask, position_ids(prompt_mask))  # (N, V)
        group = torch.arange(len(uniforms), device=model.device) // num_samples  # (B,), of each row
        self.cache.reorder_cache(group)  # the one call that moves a recurrent layer's state too
        self.mask = F.pad(prompt_mask, (0, params.max_new_tokens), value=False)[group]  # (B, P + T)
        self.positions = self.mask.sum(dim=1, keepdim=True) - 1  # (B, 1), of the last token read
        self.tokens = torch.zeros_like(self.positions)  # (B, 1), the last ones drawn
        self.column = torch.full((1,), prompt_ids.shape[1] - 1, device=model.device)  # last filled
        self.room = Room(model, self.cache, self.column)
        self.draw(logits[group])

    def step(self, num_columns: int) -> None:
        """Read the last tokens and draw the next; attention sees the first `num_columns`."""
        self.column += 1
        self.positions += 1
        self.mask.index_fill_(1, self.column, True)
        visible = self.room.show(self.mask, num_columns)
        self.draw(self.read(self.tokens, visible, self.positions))

    def read(self, token_ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        """Let the model read tokens into its cache; return the logits of what follows (B, V)."""
        output = self.model(
            input_ids=token_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self.cache,
            use_cache=True,
            logits_to_keep=self.last_column,
        )
        self.cache = output.past_key_values
        return output.logits[:, -1]

    def draw(self, logits: Tensor) -> None:
        """Draw and record the next token of each row from logits (B, V)."""
        uniforms = self.uniforms.index_select(1, self.record.t)[:, 0]  # (B,)
        drawn = sample_tokens(logits, uniforms, self.record.params)
        self.tokens.copy_(self.record.write(*drawn)[:, None])

    def keep(self, indices: Tensor) -> None:
        """Go on with these rows only."""
        self.record.keep(indices)
        self.mask, self.positions = self.mask[indices], self.positions[indices]
        self.tokens, self.uniforms = self.tokens[indices], self.uniforms[indices]
        self.cache.reorder_cache(indices)


def draw_uniforms(seeds: list[Seed], *, num_samples: int, length: int) -> Tensor:
    """Uniform random numbers in [0, 1), (N * G, length), each question's from its own seed."""
    shape = (num_samples, length)
    blocks = [np.random.default_rng(list(seed)).random(shape, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.concatenate(blocks))


def sample_tokens(
    logits: Tensor, uniforms: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), by inverse transform sampling.

    logits (B, V) and uniforms (B,) give tokens, log-probabilities and entropies in nats, (B,) each.
    Top-k and top-p only restrict what is drawn: the two numbers are those of the whole
    distribution. Temperature 0 takes the first of the likeliest tokens and scores it at 1.
    """
    logits = logits.float()
    if params.temperature not in (0, 1):  # a division by 1 would be one more pass over all logits
        logits = logits / params.temperature
    probs = logits.softmax(dim=-1)  # (B, V)
    # The largest is exp(largest logit) / sum: so log(sum) needs no second pass of exponentials.
    log_sum = logits.amax(dim=-1) - probs.amax(dim=-1).log()  # (B,)
    log_probs = logits - log_sum[:, None]  # (B, V)
    entropies = -(probs * log_probs).nansum(dim=-1)  # NaN is left out: 0 log 0 is 0
    is_broken = log_sum.isnan()  # (B,), rows with a logit of NaN or infinity
    if params.temperature == 0:
        tokens = logits.argmax(dim=-1)
    else:
        tokens = draw_indices(keep_likeliest(probs, params.top_p, params.top_k), uniforms)
    # A broken row draws from all tokens alike, since an index out of range would end the process.
    # Its log-probability is NaN: for that the update skips the step.
    noise = (uniforms * probs.shape[1]).long().clamp(max=probs.shape[1] - 1)
    tokens = tokens.where(~is_broken, noise)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    return tokens, chosen, entropies.masked_fill(is_broken, math.log(probs.shape[1]))


def draw_indices(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Indices (B,) drawn in proportion to weights (B, V): first a block of 256, then one inside.

    The sums of blocks take a tenth of the time of a cumulative sum over all V.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % 256)).unflatten(1, (-1, 256))  # (B, V/256, 256)
    block, uniforms = invert_cdf(blocks.sum(dim=-1), uniforms)
    inside = blocks.gather(1, block[:, None, None].expand(-1, 1, 256))[:, 0]  # (B, 256)
    return 256 * block + invert_cdf(inside, uniforms)[0]


def invert_cdf(weights: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first index (B,) at which the cumulative sum of weights (B, n) exceeds the uniform.

    Also how far into that index's own weight the uniform falls (B,), a uniform in [0, 1] again.
    cumsum rounds: it may end at 0.9999, so the uniform is scaled by its last value. On a GPU it may
    also fall a little, so that the search lands on a weight of 0: then the largest is taken.
    """
    cdf = weights.cumsum(dim=-1)
    threshold = uniforms[:, None] * cdf[:, -1:]  # (B, 1)
    index = torch.searchsorted(cdf, threshold, right=True).clamp(max=cdf.shape[1] - 1)
    index = index.where(weights.gather(-1, index) > 0, weights.argmax(dim=-1, keepdim=True))
    share_left = (cdf.gather(-1, index) - threshold) / weights.gather(-1, index)
    return index[:, 0], (1 - share_left[:, 0]).clamp(0, 1)


@torch.no_grad()
def decode_with_generate(
    model: nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    on_progress: Callable[[int], None],
    streamer: BaseStreamer | None = None,
) -> list[Completion]:
    """The same by `model.generate`, for any model; `streamer` gets tokens as they come."""
    prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
    uniforms = draw_uniforms(seeds, num_samples=num_samples, length=params.max_new_tokens)
    drawing = DrawingProcessor(uniforms.to(model.device), params)
    with seeded(seeds, model.device):  # it draws too, from one token: torch's state is put back
        model.generate(
            prompt_ids,
            attention_mask=prompt_mask,
            generation_config=get_generation_config(params, num_samples=num_samples),
            logits_processor=LogitsProcessorList([drawing]),
            stopping_criteria=StoppingCriteriaList([lambda *_: ~drawing.record.active]),
            streamer=streamer,
        )
    on_progress(len(uniforms))
    return drawing.record.completions()


class DrawingProcessor(LogitsProcessor):
    """Draws for `model.generate`, whose own temperature then has one token to choose from."""

    def __init__(self, uniforms: Tensor, params: SamplingParams):
        self.uniforms = uniforms  # (B, T)
        self.record = Record(len(uniforms), params, uniforms.device)

    def __call__(self, input_ids: Tensor, logits: Tensor) -> Tensor:
        """Logits (B, V) of -inf for all but the drawn token."""
        record = self.record
        tokens = record.write(*sample_tokens(logits, self.uniforms[:, record.t[0]], record.params))
        record.reply(tokens)
        return torch.full_like(logits, -torch.inf).scatter(1, tokens[:, None], 0.0)


def get_generation_config(params: SamplingParams, *, num_samples: int) -> GenerationConfig:
    """A fresh generation config: nothing of the hub's leaks into sampling.

    transformers fills a field left None from the model's own generation config. That is emptied at
    load, and what such configs set is set here too.
    """
    off = {"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    off |= {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1}
    return GenerationConfig(
        do_sample=True,  # without it generate refuses several samples of a prompt
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature or 1.0,
        top_p=params.top_p,
        top_k=params.top_k,
        **off,
        num_return_sequences=num_samples,
        eos_token_id=[] if params.conversations else list(params.eos_ids),
        pad_token_id=params.pad_id,
    )


# Rewards and advantages


def reward_group(
    run: Run, question: dict, prompt_ids: list[int], completions: list[Completion]
) -> list[Trajectory]:
    """The completions of one question as text, with what the task's reward_function pays."""
    options, trajectories = run.config.task, []
    for completion in completions:
        text = completion_text(completion, run.policy.tokenizer)
        parts = reward_parts(run.task, text, question, options, completion)
        reward = sum(weight * parts[name] for name, weight in options.reward_weights.items())
        trajectories.append(Trajectory(prompt_ids, completion, text, parts, reward))
    return trajectories


def assign_advantages(groups: list[list[Trajectory]], config: Config) -> None:
    """Set each trajectory's advantage, and whether it is in the batch that is trained on."""
    training = config.training
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    if training.learning_type == "grpo":
        in_batch = torch.ones_like(rewards, dtype=torch.bool)
        advantages = grpo_advantages(rewards, divide_by_std=training.advantage == "zscore")
    else:
        in_batch = k_best_mask(rewards, k=training.k_best_of_n[0])
        # The k best of every group, as in easy-GRPO, also where all rewards are equal: to leave
        # those groups out would drop the questions that the policy always solves.
        advantages = in_batch.double()
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group):
            trajectory.advantage = advantages[i, j].item()
            trajectory.in_batch = bool(in_batch[i, j])


def grpo_advantages(rewards: Tensor, *, divide_by_std: bool) -> Tensor:
    """How much better each completion is than the mean of its group; (N, G) to (N, G).

    GRPO (arXiv:2402.03300) divides by the group's standard deviation (here with n - 1, plus 1e-4);
    Dr. GRPO (arXiv:2503.20783) does not, since that weighs very easy and very hard questions more.
    """
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if divide_by_std:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-4)
    is_equal = rewards.amax(dim=1) == rewards.amin(dim=1)  # exact: their mean may round
    return advantages.masked_fill(is_equal[:, None], 0.0)


def k_best_mask(rewards: Tensor, *, k: int) -> Tensor:
    """True for the k highest rewards of each group (N, n); ties go to the lower sample index."""
    order = rewards.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(rewards, dtype=torch.bool).scatter(1, order[:, :k], True)


# Micro-batches


def make_micro_batches(run: Run, groups: list[list[Trajectory]]) -> list[MicroBatch]:
    """What this rank trains on; empty where no rank has anything to train on.

    Of the batch, trajectories whose advantage is 0 have no gradient (without a KL penalty): they
    count in the denominators and are left out.
    """
    training, world = run.config.training, run.world
    batch = [t for group in groups for t in group if t.in_batch]
    trained = [t for t in batch if t.advantage != 0.0 or training.kl_coef > 0]
    if training.skip_truncated:
        trained = [t for t in trained if not t.completion.truncated]
    counts = [len(batch), sum(t.completion.num_sampled for t in batch), len(trained)]
    num_rows, num_tokens, num_trained = world.sum(counts).tolist()
    if num_trained == 0:
        return []
    if not trained:
        # This rank has nothing to train on, but DDP needs a backward pass from every rank: send one
        # row with weight 0 (1 / infinity), whose gradient is zero.
        trained, num_rows, num_tokens = [replace(batch[0], advantage=0.0)], math.inf, math.inf
    micro_batches = [
        make_micro_batch(some, run, num_rows=num_rows, num_tokens=num_tokens)
        for some in pack(trained, training.micro_batch_tokens)
    ]
    # A sharded model gathers its weights in every pass: each rank must make as many passes.
    return equal_passes(micro_batches, world) if run.config.model.shard else micro_batches


def pack(trajectories: list[Trajectory], max_tokens: int) -> Iterator[list[Trajectory]]:
    """Batches by length: rows * longest (prompt + completion) <= max_tokens, or a single row."""
    batch: list[Trajectory] = []
    for t in sorted(trajectories, key=lambda t: len(t.prompt_ids) + len(t.completion.token_ids)):
        longest = len(t.prompt_ids) + len(t.completion.token_ids)
        if batch and (len(batch) + 1) * longest > max_tokens:
            yield batch
            batch = []
        batch.append(t)
    yield batch


def make_micro_batch(
    trajectories: list[Trajectory], run: Run, *, num_rows: float, num_tokens: float
) -> MicroBatch:
    """Tensors on this rank's device; the counts are those of the whole batch over all ranks."""
    training, world, device = run.config.training, run.world, run.world.device
    token_ids, is_read, log_probs = [], [], []
    for t in trajectories:
        completion, prompt = t.completion, (len(t.prompt_ids), 0)  # columns before it, and behind
        token_ids.append(t.prompt_ids + completion.token_ids)
        # End tokens are trained. What a tool has written is only read, as the prompt is.
        is_read.append(np.pad(completion.is_inserted, prompt, constant_values=True))
        log_probs.append(np.pad(completion.log_probs, prompt))
    completion_mask = ~right_pad(is_read, True).to(device)  # (B, S)
    weights = token_weights(
        completion_mask,
        normalization=training.loss_normalization,
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_new_gen_tokens=training.max_new_gen_tokens,
    )
    return MicroBatch(
        trajectories,
        input_ids=right_pad(token_ids, run.policy.params.pad_id).to(device),
        completion_mask=completion_mask,
        advantages=torch.tensor([t.advantage for t in trajectories], device=device),
        token_weights=weights * world.size,  # DDP averages over the ranks, the loss is a sum
        sampler_log_probs=right_pad(log_probs, 0.0).to(device),
    )


def token_weights(
    completion_mask: Tensor,
    *,
    normalization: str,
    num_rows: float,
    num_tokens: float,
    max_new_gen_tokens: int,
) -> Tensor:
    """What each token counts for in the loss, (B, S) to (B, S); 0 where the mask is False.

    `num_rows` and `num_tokens` are those of the whole batch over all ranks, so that the gradient
    depends neither on the number of ranks nor on the size of a micro-batch. dr_grpo is that of
    arXiv:2503.20783, token of DAPO (arXiv:2503.14476), sequence of GRPO (arXiv:2402.03300), sum of
    plain REINFORCE.
    """
    mask = completion_mask.float()
    if normalization == "dr_grpo":
        return mask / (num_rows * max_new_gen_tokens)
    if normalization == "token":
        return mask / num_tokens
    if normalization == "sequence":
        return mask / (num_rows * mask.sum(dim=1, keepdim=True).clamp(min=1))
    return mask / num_rows


# The update


def update_policy(
    run: Run, micro_batches: list[MicroBatch]
) -> tuple[dict[str, float], dict[str, Tensor], int]:
    """One step's update; returns metrics, more as (sum, count) of this rank, and optimizer steps.

    A loss or gradient that is not finite ends the update before its optimizer step. If there is
    nothing to train on there is none: AdamW would move the weights even with a gradient of 0.
    """
    training, world, policy, optimizer = run.config.training, run.world, run.policy, run.optimizer
    if not micro_batches:
        return {}, {}, 0
    policy.model.train()
    sums, num_updates, num_passes = {}, 0, len(micro_batches) * training.num_iterations
    in_ddp = isinstance(policy.scorer, DistributedDataParallel)  # its buckets hold the gradients
    with run.logger.progress(num_passes, "update", "batch") as bar:
        while num_updates < training.num_iterations:
            optimizer.zero_grad(set_to_none=not in_ddp)
            loss = 0.0
            for micro_batch in micro_batches:
                # DDP averages gradients over the ranks in backward(). Once is enough, at the last
                # micro-batch: until then they add up on each rank. A shard averages each time.
                waits = in_ddp and micro_batch is not micro_batches[-1]
                with policy.scorer.no_sync() if waits else contextlib.nullcontext():
                    loss += accumulate_gradient(run, micro_batch, sums)
                bar.update(1)
            run.loss_scale.unscale_(optimizer)  # 1, but for float16
            grad_norm = nn.utils.clip_grad_norm_(policy.model.parameters(), training.max_grad_norm)
            loss = world.sum([loss / world.size]).item()  # the weights carry world.size
            metrics = {"train/loss": loss, "train/grad_norm": grad_norm.item()}
            if run.loss_scale.was_too_high(loss, metrics["train/grad_norm"]):
                continue  # it is halved now: the same update again
            if not all(math.isfinite(value) for value in metrics.values()):
                break
            optimizer.step()
            num_updates += 1
    optimizer.zero_grad(set_to_none=not in_ddp)
    policy.refresh_sampler()
    return metrics, sums, num_updates


def accumulate_gradient(run: Run, batch: MicroBatch, sums: dict[str, Tensor]) -> Tensor:
    """Add the gradient of one micro-batch to the weights'; returns its loss. Waits for no number.

    The first of several updates is plain REINFORCE. The others compare with its log-probabilities.
    """
    training, policy = run.config.training, run.policy
    rows, temperature = (batch.input_ids, batch.completion_mask), policy.params.temperature
    log_probs = policy.scorer(*rows, temperature=temperature)  # (B, S)
    is_first, is_trained = batch.old_log_probs is None, batch.token_weights > 0  # (B, S)
    if is_first:
        token_loss = -batch.advantages[:, None] * log_probs
        is_clipped = torch.zeros_like(is_trained)
        difference = (log_probs.detach() - batch.sampler_log_probs).abs()
        add_to_mean(sums, "train/sampler_mismatch", difference, is_trained)
    else:
        token_loss, is_clipped = off_policy_loss(
            training, log_probs, batch.advantages, batch.old_log_probs, batch.completion_mask
        )
    add_to_mean(sums, "train/clip_frac", is_clipped, is_trained)
    if training.kl_coef > 0:
        if is_first:
            with torch.no_grad():
                batch.ref_log_probs = policy.reference(*rows, temperature=temperature)
        kl = kl_penalty(log_probs, batch.ref_log_probs)
        token_loss = token_loss + training.kl_coef * kl
        if is_first:
            add_to_mean(sums, "train/kl", kl.detach(), is_trained)
    weights = batch.token_weights
    if training.tis_clip is not None:
        if is_first:
            batch.importance = truncated_importance(
                log_probs.detach(), batch.sampler_log_probs, clip=training.tis_clip
            )
        weights = weights * batch.importance
    loss = (weights * token_loss).sum()
    run.loss_scale.scale(loss).backward()
    if training.num_iterations > 1 and is_first:
        batch.old_log_probs = log_probs.detach()
    return loss.detach().double()


class CompletionScorer(nn.Module):
    """log pi of completions. It is an nn.Module because DDP wraps the forward of a module."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, chunked: bool):
        """`chunked` is what `supports_chunked_head` says: True for the default and most models."""
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.chunked = chunked

    def forward(self, input_ids: Tensor, mask: Tensor, *, temperature: float) -> Tensor:
        """Log-probabilities (B, S) of the tokens input_ids (B, S) where the mask is True, else 0.

        They are those of softmax(logits / temperature), the distribution that was sampled. Rows are
        padded on the right, where no token looks: attention is causal and needs no mask.
        """
        inputs = {"input_ids": input_ids, "use_cache": False}
        mask, token_ids = mask[:, 1:], input_ids[:, 1:]  # nothing predicts the first column
        with autocast(input_ids.device, self.compute_dtype, keeps_casts=False):
            # What the model computes at a position predicts the token after it.
            if self.chunked:
                hidden = self.model.base_model(**inputs).last_hidden_state
            else:  # all logits at once, of the columns in which some row scores a token
                columns = mask.any(dim=0).nonzero()[:, 0]  # (K,)
                logits = self.model(**inputs, logits_to_keep=columns).logits  # (B, K, V)
        if self.chunked:
            log_probs = head_log_probs(  # the same number for each token: engine/head.py
                hidden[:, :-1][mask].to(self.compute_dtype),
                self.model.get_output_embeddings(),
                token_ids[mask],
                temperature=temperature,
            )
        else:
            log_probs = token_log_probs(logits, token_ids[:, columns], temperature=temperature)
            log_probs = log_probs[mask[:, columns]]
        scored = log_probs.new_zeros(mask.shape).masked_scatter(mask, log_probs)
        return F.pad(scored, (1, 0))


def token_log_probs(logits: Tensor, token_ids: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of the given tokens; (B, T, V) and (B, T) to (B, T)."""
    logits = logits.float() / temperature
    chosen = logits.gather(-1, token_ids[..., None])[..., 0]
    return chosen - logits.logsumexp(dim=-1)


# Evaluation


def evaluate(run: Run) -> tuple[dict[str, float], list[dict], bool]:
    """Metrics over all validation questions, each answered on one rank, and the first samples.

    Also whether the model is broken: then logits were not finite, and the metrics mean nothing.
    """
    clock = Clock()
    with clock("eval"):
        groups = answer_questions(run)
        metrics = evaluation_metrics(run, groups)
    return metrics | clock.read(), validation_samples(run, groups), run.report_broken(groups) > 0


def answer_questions(run: Run, *, is_greedy: bool = False) -> list[list[Trajectory]]:
    """Completions of this rank's share of the validation questions: rank, rank + size and so on.

    Every question has its own fixed randomness, so evaluating changes nothing in training, and two
    evaluations differ by the policy alone. `is_greedy` asks for one completion, at temperature 0.
    """
    mine = range(run.world.rank, len(run.validation_questions), run.world.size)
    validation, max_new_tokens = run.config.validation, run.config.max_validation_tokens
    temperature = 0.0 if is_greedy else validation.temperature
    return sample_trajectories(
        run,
        [run.validation_questions[i] for i in mine],
        [(VALIDATION, i) for i in mine],
        num_samples=1 if is_greedy else validation.best_of_n,
        params=replace(run.policy.params, temperature=temperature, max_new_tokens=max_new_tokens),
        clock=Clock(),
    )


def run_evaluation(run: Run) -> int:
    """Measure as training would, by majority votes and greedily; 2 where logits are not finite."""
    clock = Clock()
    with clock("eval"):
        groups = answer_questions(run)
        is_greedy = run.config.validation.temperature == 0
        greedy = groups if is_greedy else answer_questions(run, is_greedy=True)
    metrics = evaluation_metrics(run, groups) | single_answer_metrics(run, groups, greedy)
    metrics, samples = metrics | clock.read(), validation_samples(run, groups)
    title = f"evaluation of {run.config.model.name} on {run.config.task.name}"
    run.logger.print_evaluation(title, metrics, samples, totals=answer_totals(run))
    save_evaluation(run, metrics, samples)
    return 2 if run.report_broken(groups) > 0 else 0


if __name__ == "__main__":
    main()
