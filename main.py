"""Teach a language model to reason by reinforcement learning: GRPO and SIL in one script.

    torchrun --nproc-per-node=2 main.py                                 # the default, on a laptop
    torchrun --nproc-per-node=4 main.py --config configs/countdown-qwen2.5-3b.yaml
    python main.py training.num_steps=5 training.learning_rate=1e-4     # any key, on one process

One step of the algorithm (`run_training` is the loop):

    1. take N questions and sample G completions of each: the groups
    2. score every completion with a rule: the reward
    3. grpo: advantage = reward - mean reward of its group (GRPO, arXiv:2402.03300, without the
       division by the standard deviation: Dr. GRPO, arXiv:2503.20783)
       sil:  advantage = 1 for the k best of each group, which are imitated; the rest is dropped
    4. loss = -sum of advantage * log-probability over all completion tokens, divided by a constant
    5. one optimizer step on that loss: what was better than its group's mean becomes more likely

There is no critic and, with one update per batch, no ratio and no clipping. A penalty for moving
away from the model that the run began with (`training.kl_coef`) is off unless asked for.

This file is all of training and generation. What it rests on is in engine/, one idea a file; the
default task is countdown.py; config.yaml explains the settings.

Shapes: N questions, G completions each, B rows, P longest prompt, T completion tokens, V
vocabulary. Masks are bool, True = keep.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig, LogitsProcessorList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging as transformers_logging

from engine.calculator import Calculator
from engine.config import (
    Config,
    check_world,
    differences,
    load_config,
    load_task,
    truncates,
)
from engine.data import load_questions
from engine.distributed import World, init_world, settle_ddp_buckets
from engine.head import CompletionScorer, supports_chunked_head
from engine.metrics import Clock, part_metric, peak_memory_gb, reduce_means, solve_rates
from engine.model import (
    Policy,
    choose_backend,
    choose_compute_dtype,
    load_model_and_tokenizer,
    make_reference,
    make_sampler,
)
from engine.optimizer import learning_rate_at, make_optimizer, set_learning_rate
from engine.prompts import completion_text, encode_prompts
from engine.rollouts import log_rollouts
from engine.run import (
    Run,
    answer_totals,
    check_room,
    crashes_name_the_fix,
    export,
    finish,
    first_samples,
    mistakes_cost_one_line,
    open_files,
    resume,
    run_folder,
    save_best,
    save_checkpoint,
    save_evaluation,
    single_answer_metrics,
    stop,
    validation_samples,
)
from engine.sampler import (
    Completion,
    RecordingProcessor,
    SamplingParams,
    Seed,
    decode_grouped,
    left_pad,
    right_pad,
    sample_in_batches,
    seeded,
)
from engine.sharding import equal_passes, shard_scorer
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
    """Load what the config names on this rank; a run that was interrupted is resumed.

    Raises ValueError or OSError, one line with the fix, where something cannot be used.
    """
    is_training = config.mode == "train"
    world, notes = init_world()  # which of torchrun's ranks this is, and its device
    check_world(config, world.size)
    logger = Logger(rank=world.rank, do_mlflow=config.logging.mlflow and is_training)
    for line in [*notes, *differences(config)]:
        logger.info(line)
    policy, task = load_policy(config, world, logger), load_task(config.task.name)
    logger.info(f"a completion ends at {policy.end_tokens}")
    validation, training = load_questions(
        task,
        config,
        tokenizer=policy.tokenizer,
        context=policy.context_length,
        log=logger.info,
    )
    if len(validation) < world.size:
        raise ValueError(f"{len(validation)} validation questions for {world.size} ranks")
    if is_training:  # epochs become steps
        config = config.with_num_steps(len(training.questions), world.size)
    run = Run(config, world, logger, run_folder(config), task, policy, validation, training)
    if is_training:
        run.optimizer = make_optimizer(policy.model, config)
        check_room(run)
        resume(run)
        settle_ddp_buckets(policy.scorer, world.device)
        open_files(run)
    return run


def load_policy(config: Config, world: World, logger: Logger) -> Policy:
    """The model on this rank's device: one that is trained and scores, and one that samples.

    The trained weights are fp32 and their arithmetic is bf16 on a GPU, fp32 on a CPU, or what
    `compute_dtype` says. For bf16 a copy in bf16 samples, refreshed after each optimizer step.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    training, sampling, device = config.training, config.sampling, world.device
    compute_dtype = choose_compute_dtype(config.model.compute_dtype, device)
    model, tokenizer, eos_ids = load_model_and_tokenizer(
        config, device=device, compute_dtype=compute_dtype, log=logger.info
    )
    sampler = make_sampler(model, compute_dtype, device, shard=config.model.shard)
    scorer = reference = None
    if config.mode == "train":
        chunked = supports_chunked_head(model)
        if not chunked:
            logger.info(
                "this model's logits are more than head(hidden): the update holds all at once"
            )
        scorer = CompletionScorer(model, compute_dtype, chunked=chunked)
        if training.kl_coef > 0:  # before a checkpoint is loaded: the reference stays model.name
            reference = make_reference(config, scorer, in_bf16=sampler.dtype == torch.bfloat16)
        if config.model.shard:  # each rank has a part of the model (and of the reference)
            scorer = shard_scorer(scorer, world, keeps_root=True)
            reference = reference and shard_scorer(reference, world, keeps_root=False)
        elif world.size > 1:
            # Each rank has the whole model; DDP averages their gradients in the backward pass.
            device_ids = [device.index] if device.type == "cuda" else None
            scorer = DistributedDataParallel(scorer, device_ids, gradient_as_bucket_view=True)
        if truncates(sampling):
            logger.info(
                "sampling.top_p or top_k is on: completions are drawn from a truncated "
                "distribution, but scored under the whole one, so the gradient is biased"
            )
    params = SamplingParams(
        max_new_tokens=training.max_new_gen_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        eos_ids=eos_ids,
        pad_id=tokenizer.pad_token_id,
        calculator=Calculator(tokenizer, sampling.calculator) if sampling.calculator else None,
    )
    policy = Policy(model, scorer, sampler, tokenizer, params, sampling.backend, reference)
    with policy.autocast():
        policy.backend = choose_backend(sampling.backend, sampler, logger.info)
    return policy


# The run

TRAINING, VALIDATION = 0, 1  # first word of a seed: the random numbers of the two never meet


def run_training(run: Run) -> int:
    """The whole algorithm, in one loop; returns the exit status.

    A step's row of metrics waits in `state.row` for the evaluation that may belong to it. A signal
    between the two leaves the evaluation to the resumed run.
    """
    config, world, state, logger = run.config, run.world, run.state, run.logger
    training = config.training
    questions_per_rank = config.questions_per_rank(world.size)
    questions_per_step = questions_per_rank * world.size
    world.catch_signals()  # a signal to end sets world.should_stop, on all ranks at once
    is_saved = True
    while True:
        if state.row is not None:
            # Evaluate at the start, every so many steps and at the end; keep the best model.
            measured, samples = {}, []
            if state.step % config.validation.every == 0 or run.is_over:
                measured, samples, is_broken = evaluate(run)
                logger.print_evaluation(f"evaluation at step {state.step}", measured, samples)
                state.note_evaluation(measured, best_metric=config.validation.best_metric)
                is_best = not is_broken and (state.best is None or state.last > state.best)
                if is_best and save_best(run, measured):
                    state.best, state.best_step = state.last, state.step
            # Record, then save: a checkpoint never knows a step that the files lack.
            logger.log_samples(state.step, state.samples + samples)
            logger.log_metrics(state.step, state.row | measured)
            state.row, state.samples = None, []
            is_due = state.step > 0 and state.step % config.checkpoint.every == 0
            if run.is_over or is_due:
                is_saved = save_checkpoint(run)
        if run.is_over or world.should_stop:
            break
        if state.skipped_in_a_row >= training.max_skipped_steps:
            raise FloatingPointError(
                f"loss or gradient not finite in {state.skipped_in_a_row} steps in a row: lower "
                f"training.learning_rate; the best model is in {run.folder / 'best'}"
            )

        clock = Clock()
        with clock("step"):
            # Sample and score: each rank takes its slice of the next questions of the stream.
            drawn, end = run.train_questions.take(state.position, questions_per_step)
            mine = drawn[world.rank * questions_per_rank :][:questions_per_rank]
            seeds = [(TRAINING, training.seed, position) for position, _ in mine]
            groups = sample_trajectories(
                run,
                [question for _, question in mine],
                seeds,
                num_samples=training.group_size,
                params=run.policy.params,
                clock=clock,
                description="rollout",
            )
            # Compare the completions of each group, then update.
            rewards = assign_advantages(groups, config)  # (N, G)
            learning_rate = learning_rate_at(state.step + 1, config)
            set_learning_rate(run.optimizer, learning_rate)
            # LoRA dropout is the only randomness here; its seed lets a resumed run repeat it.
            with clock("update"), seeded(seeds, world.device):
                metrics, sums, is_skipped = update_policy(run, groups)
            with clock("rollouts_log"):  # a few groups for tools/report.py
                log_rollouts(run, groups, [row for _, row in mine], step=state.step + 1)
        sums |= rollout_sums(groups, rewards, run.task.REWARD_PARTS)
        metrics |= reduce_means(sums, world)
        metrics |= {"train/lr": learning_rate} | clock.read()
        num_tokens = metrics["train/completion_tokens"] * questions_per_step * training.group_size
        metrics["perf/tokens_per_s"] = num_tokens / metrics["time/step_s"]
        metrics["perf/peak_memory_gb"] = peak_memory_gb(world.device)
        new_signs = state.advance(metrics, num_questions=questions_per_step, is_skipped=is_skipped)
        state.position = end
        logger.print_step(state.step, training.num_steps, state.row)
        samples_every = config.logging.train_samples_every
        if samples_every > 0 and state.step % samples_every == 0:
            state.samples = first_samples(run, groups, [row for _, row in mine], split="train")
            logger.print_samples(f"training completions of step {state.step}", state.samples)
        for sign in new_signs:
            logger.warning(f"the model may be collapsing: {sign} (mean of the last steps)")
        if world.should_stop:
            break
    if not run.is_over or state.row is not None:
        return stop(run)
    finish(run)
    return 0 if is_saved else 1


# Rollouts


@dataclass
class Trajectory:
    """One completion of one question: what was sampled, what it earned, what it teaches."""

    prompt_ids: list[int]
    completion: Completion
    text: str  # the completion without its end-of-sequence token
    reward_parts: dict[str, float]
    reward: float
    advantage: float = 0.0
    weight: float = 0.0  # of each of its sampled tokens in the loss; 0 if the update leaves it out
    in_batch: bool = True  # counts in the loss's denominator; sil leaves out all but the k best

    @property
    def is_solved(self) -> bool:
        return self.reward_parts["answer"] == 1.0 and not self.completion.is_broken

    @property
    def is_solved_and_ended(self) -> bool:
        return self.is_solved and not self.completion.truncated


def sample_trajectories(
    run: Run,
    examples: list[dict],
    seeds: list[Seed],
    *,
    num_samples: int,
    params: SamplingParams,
    clock: Clock,
    description: str,
) -> list[list[Trajectory]]:
    """Sample and score a group of completions for each question.

    The random numbers of a question follow from its seed alone, whatever the batch that it is in,
    the rank, or what was sampled before.
    """
    policy = run.policy
    prompts = encode_prompts(
        examples, task=run.task, options=run.config.task, tokenizer=policy.tokenizer
    )
    decode = {
        "generate": decode_with_generate,  # below: transformers' own loop
        "grouped": decode_grouped,  # reads each prompt once, drops rows as they end
        "captured": functools.partial(decode_grouped, capture=True),  # the same in CUDA graphs
    }[policy.backend]
    policy.sampler.eval()
    num_rows = len(examples) * num_samples
    with (
        clock("rollout"),
        policy.autocast(),
        run.logger.progress(num_rows, description, "seq") as bar,
    ):
        groups = sample_in_batches(
            policy.sampler,
            prompts,
            seeds,
            decode=decode,
            num_samples=num_samples,
            params=params,
            max_batch_tokens=run.config.sampling.max_batch_tokens,
            on_progress=bar.update,
        )
    with clock("reward"):
        return [
            score_group(run, example, prompt_ids, group)
            for example, prompt_ids, group in zip(examples, prompts, groups, strict=True)
        ]


def score_group(
    run: Run, example: dict, prompt_ids: list[int], group: list[Completion]
) -> list[Trajectory]:
    """The completions of one question as text, with what the task's rule pays for them."""
    options, trajectories = run.config.task, []
    for completion in group:
        text = completion_text(completion, run.policy.tokenizer)
        num_tokens = len(completion.token_ids)
        parts = run.task.reward_function(text, example, options=options, num_tokens=num_tokens)
        reward = sum(weight * parts[name] for name, weight in options.reward_weights.items())
        trajectories.append(Trajectory(prompt_ids, completion, text, parts, reward))
    return trajectories


def has_broken(run: Run, groups: list[list[Trajectory]]) -> bool:
    """Whether any rank sampled from logits that were not finite; says so if it did."""
    num_broken = run.world.sum([sum(t.completion.is_broken for group in groups for t in group)])
    if num_broken > 0:
        run.logger.warning(f"{int(num_broken)} completions ended at logits that were not finite")
    return bool(num_broken > 0)


def get_generation_config(params: SamplingParams, *, num_samples: int) -> GenerationConfig:
    """A fresh generation config: nothing of the hub's leaks into sampling.

    Every field that could change the distribution is set, since transformers fills a field left
    None from the model's own generation config.
    """
    return GenerationConfig(
        do_sample=params.temperature > 0,
        max_new_tokens=params.max_new_tokens,
        temperature=params.temperature or 1.0,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=0.0,
        typical_p=1.0,
        epsilon_cutoff=0.0,
        eta_cutoff=0.0,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        num_beams=1,
        num_return_sequences=num_samples,
        eos_token_id=list(params.eos_ids),
        pad_token_id=params.pad_id,
    )


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
    """The plain path: completions (N * G, question by question) by `model.generate`, for any model.

    The recorder takes down each sampled token's log-probability under softmax(logits /
    temperature), and puts in the calculator's tokens. `streamer` gets tokens as they come.
    """
    prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
    num_rows = len(prompts) * num_samples
    recorder = RecordingProcessor(num_rows, params, model.device)
    with seeded(seeds, model.device):
        sequences = model.generate(
            prompt_ids,
            attention_mask=prompt_mask,
            generation_config=get_generation_config(params, num_samples=num_samples),
            logits_processor=LogitsProcessorList([recorder]),
            streamer=streamer,
        )  # (N * G, P + T)
    recorder.take(sequences)
    on_progress(num_rows)
    return recorder.completions()


# The learning signal: pure functions of tensors


def grpo_advantages(rewards: torch.Tensor, *, divide_by_std: bool) -> torch.Tensor:
    """How much better each completion is than the mean of its group; (N, G) to (N, G).

    GRPO (arXiv:2402.03300) divides by the group's standard deviation (here with n - 1, plus 1e-4);
    Dr. GRPO (arXiv:2503.20783) does not, since that weighs very easy and very hard questions more.
    """
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if divide_by_std:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-4)
    return advantages.masked_fill(is_equal_group(rewards)[:, None], 0.0)


def k_best_mask(rewards: torch.Tensor, *, k: int) -> torch.Tensor:
    """True for the k highest rewards of each group (N, n); ties go to the lower sample index."""
    order = rewards.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(rewards, dtype=torch.bool).scatter(1, order[:, :k], True)


def is_equal_group(rewards: torch.Tensor) -> torch.Tensor:
    """True for the groups (N,) of rewards (N, G) in which no completion is better than another."""
    return rewards.amax(dim=1) == rewards.amin(dim=1)  # exact: a mean or std of equals may round


def token_weights(
    completion_mask: torch.Tensor,
    *,
    normalization: str,
    num_rows: float,
    num_tokens: float,
    max_new_gen_tokens: int,
) -> torch.Tensor:
    """What each token counts for in the loss, (B, T) to (B, T); 0 where the mask is False.

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


def policy_token_loss(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    old_log_probs: torch.Tensor | None,
    clip_eps: float,
    clip_eps_high: float,
) -> torch.Tensor:
    """Loss of each token, (B, T), from log_probs (B, T) and advantages (B,).

    -A log pi (REINFORCE) for the one update of fresh rollouts. With `old_log_probs`, those of the
    policy that sampled, -min(ratio A, clip(ratio) A) (PPO, arXiv:1707.06347, equation 7), whose
    gradient is the same while the ratio is 1.
    """
    advantages = advantages[:, None]  # (B, 1)
    if old_log_probs is None:
        return -advantages * log_probs
    ratio = (log_probs - old_log_probs).exp()  # (B, T)
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps_high)
    return -torch.min(ratio * advantages, clipped * advantages)


def cispo_token_loss(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    old_log_probs: torch.Tensor,
    clip_eps_high: float,
) -> torch.Tensor:
    """CISPO's loss of each token: -sg(min(ratio, 1 + eps)) A log pi; shapes as above.

    sg: no gradient. Where PPO's clip would leave a token out, CISPO trains it with the largest
    weight (MiniMax-M1, arXiv:2506.13585, equations 4 and 5; without the lower bound, as there).
    """
    ratio = (log_probs.detach() - old_log_probs).exp()  # (B, T)
    return -ratio.clamp(max=1 + clip_eps_high) * advantages[:, None] * log_probs


def completion_means(log_probs: torch.Tensor, completion_mask: torch.Tensor) -> torch.Tensor:
    """The mean log-probability of each completion, at all of its tokens; (B, T) to (B, T).

    PPO's loss of these is GSPO's (arXiv:2507.18071, equations 5 and 7): the ratio is then that of
    whole completions, to the power of 1 / length, and its gradient reaches all of their tokens.
    """
    lengths = completion_mask.sum(dim=1, keepdim=True)  # (B, 1)
    means = (log_probs * completion_mask).sum(dim=1, keepdim=True) / lengths.clamp(min=1)
    return means.expand_as(log_probs)


KL_LOG_RATIO_LIMIT = 10.0  # its exponential is 22,026; an unlimited one overflows


def kl_penalty(log_probs: torch.Tensor, ref_log_probs: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy, reference) at each token; (B, T) and (B, T) to (B, T).

    k3 (Schulman 2020, http://joschu.net/blog/kl-approx.html): 0 where the two agree, else above.
    The log-ratio is limited once for both terms; limited in the exponential alone, the gradient of
    a token far from the reference would push it further away.
    """
    log_ratio = (ref_log_probs - log_probs).clamp(-KL_LOG_RATIO_LIMIT, KL_LOG_RATIO_LIMIT)
    return log_ratio.expm1() - log_ratio  # exp(x) - x - 1, which would round to below 0 near 0


def truncated_importance(
    log_probs: torch.Tensor, sampler_log_probs: torch.Tensor, *, clip: float
) -> torch.Tensor:
    """min(pi / pi_sampler, clip) of each token, (B, T): corrects for a sampler of less precision.

    Truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings you
    off-policy RL training").
    """
    return (log_probs - sampler_log_probs).exp().clamp(max=clip)


def assign_advantages(groups: list[list[Trajectory]], config: Config) -> torch.Tensor:
    """Set each trajectory's advantage and whether it is in the batch; returns rewards (N, n)."""
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
    return rewards


# The update


@dataclass
class MicroBatch:
    """Rows that go through the model together, prompts padded left and completions right."""

    input_ids: torch.Tensor  # (B, P + T)
    mask: torch.Tensor  # (B, P + T)
    completion_mask: torch.Tensor  # (B, T), True for what was sampled, the first EOS too
    advantages: torch.Tensor  # (B,)
    weights: torch.Tensor  # (B, T)
    sampler_log_probs: torch.Tensor  # (B, T)
    old_log_probs: torch.Tensor | None = None  # (B, T), set by the first of several iterations
    ref_log_probs: torch.Tensor | None = None  # (B, T), set by the first if there is a KL penalty


@dataclass
class UpdateSums:
    """What the update's passes show about the tokens they score."""

    num_tokens: float = 0.0
    num_clipped: float = 0.0
    num_first_tokens: float = 0.0
    mismatch: float = 0.0
    kl: float = 0.0
    num_kl_tokens: float = 0.0

    def as_metrics(self) -> dict[str, tuple[float, float]]:
        return {
            "train/clip_frac": (self.num_clipped, self.num_tokens),
            "train/sampler_mismatch": (self.mismatch, self.num_first_tokens),
            "train/kl": (self.kl, self.num_kl_tokens),
        }


def update_policy(
    run: Run, groups: list[list[Trajectory]]
) -> tuple[dict[str, float], dict[str, tuple[float, float]], bool]:
    """One step's update; returns metrics, more as (sum, count) of this rank, and if it was skipped.

    A step is skipped if its loss, its gradient or the logits it was sampled from are not finite. If
    there is no lesson on any rank nothing is updated: AdamW would move the weights even with a
    gradient of 0.
    """
    training, world, policy, optimizer = run.config.training, run.world, run.policy, run.optimizer
    is_skipped = has_broken(run, groups)
    micro_batches = [] if is_skipped else make_micro_batches(run, groups)
    if not micro_batches:
        return {}, {}, is_skipped
    policy.model.train()
    sums, num_passes = UpdateSums(), len(micro_batches) * training.num_iterations
    in_ddp = isinstance(policy.scorer, DistributedDataParallel)  # its buckets hold the gradients
    with run.logger.progress(num_passes, "update", "batch") as bar:
        for _ in range(training.num_iterations):
            optimizer.zero_grad(set_to_none=not in_ddp)
            loss = 0.0
            for micro_batch in micro_batches:
                # DDP sums gradients over the ranks in backward(); once, at the last micro-batch,
                # is enough, since gradients add up on each rank until then. A shard sums each time.
                is_last = micro_batch is micro_batches[-1]
                waits = in_ddp and not is_last
                with policy.scorer.no_sync() if waits else contextlib.nullcontext():
                    loss += accumulate_gradient(run, micro_batch, sums)
                bar.update(1)
            grad_norm = nn.utils.clip_grad_norm_(policy.model.parameters(), training.max_grad_norm)
            # The weights carry world.size because DDP averages over the ranks.
            loss = world.sum([loss / world.size]).item()
            metrics = {"train/loss": loss, "train/grad_norm": grad_norm.item()}
            is_skipped = not all(math.isfinite(value) for value in metrics.values())
            if is_skipped:
                break
            optimizer.step()
    optimizer.zero_grad(set_to_none=not in_ddp)
    policy.refresh_sampler()
    return metrics, sums.as_metrics(), is_skipped


def accumulate_gradient(run: Run, batch: MicroBatch, sums: UpdateSums) -> float:
    """Add one micro-batch's gradient to the weights'; returns its loss."""
    training, policy = run.config.training, run.policy
    log_probs = score(policy.scorer, batch, policy.params.temperature)  # (B, T)
    if training.tis_clip is not None and batch.old_log_probs is None:
        batch.weights = batch.weights * truncated_importance(
            log_probs.detach(), batch.sampler_log_probs, clip=training.tis_clip
        )
    token_loss, is_clipped = compare_policies(run.config, batch, log_probs)
    if training.kl_coef > 0:
        token_loss = token_loss + training.kl_coef * kl_to_reference(policy, batch, log_probs, sums)
    loss = (batch.weights * token_loss).sum()
    loss.backward()

    log_probs, mask = log_probs.detach(), batch.completion_mask
    sums.num_tokens += mask.sum().item()
    sums.num_clipped += is_clipped[mask].sum().item()
    if batch.old_log_probs is None:  # the first pass: these weights sampled the batch
        sums.num_first_tokens += mask.sum().item()
        sums.mismatch += (log_probs - batch.sampler_log_probs).abs()[mask].sum().item()
        if training.num_iterations > 1:
            batch.old_log_probs = log_probs
    return loss.item()


def compare_policies(
    config: Config, batch: MicroBatch, log_probs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each token by `training.policy_loss`, and whether it is clipped; both (B, T)."""
    training, advantages, old = config.training, batch.advantages, batch.old_log_probs
    eps, eps_high = training.clip_eps, training.clip_eps_high or training.clip_eps
    if training.policy_loss == "gspo" and old is not None:  # one ratio for a whole completion
        log_probs = completion_means(log_probs, batch.completion_mask)
        old = completion_means(old, batch.completion_mask)
    if training.policy_loss == "cispo" and old is not None:
        loss = cispo_token_loss(log_probs, advantages, old_log_probs=old, clip_eps_high=eps_high)
    else:
        loss = policy_token_loss(
            log_probs, advantages, old_log_probs=old, clip_eps=eps, clip_eps_high=eps_high
        )
    if old is None:
        return loss, torch.zeros_like(batch.completion_mask)
    ratio = (log_probs.detach() - old).exp()  # (B, T)
    rises, falls = advantages[:, None] > 0, advantages[:, None] < 0  # (B, 1)
    too_high, too_low = ratio > 1 + eps_high, ratio < 1 - eps
    if training.policy_loss == "cispo":  # cuts a weight only from above, but for both signs
        return loss, too_high & (rises | falls)
    return loss, (too_high & rises) | (too_low & falls)


def kl_to_reference(
    policy: Policy, batch: MicroBatch, log_probs: torch.Tensor, sums: UpdateSums
) -> torch.Tensor:
    """The KL penalty of each token, (B, T); the reference scores a batch at its first pass."""
    if batch.ref_log_probs is not None:
        return kl_penalty(log_probs, batch.ref_log_probs)
    with torch.no_grad():
        batch.ref_log_probs = score(policy.reference, batch, policy.params.temperature)
    kl, mask = kl_penalty(log_probs, batch.ref_log_probs), batch.weights > 0
    sums.kl += kl.detach()[mask].sum().item()
    sums.num_kl_tokens += mask.sum().item()
    return kl


def score(scorer: nn.Module, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """log pi of the batch's completions at the temperature that sampled them, (B, T)."""
    num_tokens = batch.completion_mask.shape[1]
    return scorer(batch.input_ids, batch.mask, num_tokens=num_tokens, temperature=temperature)


def make_micro_batches(run: Run, groups: list[list[Trajectory]]) -> list[MicroBatch]:
    """The rows of this rank that teach something; empty where there are none on any rank.

    Without a KL penalty rows whose advantage is 0 have no gradient: they are counted and left out.
    """
    training, world = run.config.training, run.world
    batch = [t for group in groups for t in group if t.in_batch]
    rows = [t for t in batch if t.advantage != 0.0 or training.kl_coef > 0]
    if training.skip_truncated:
        rows = [t for t in rows if not t.completion.truncated]
    counts = [len(batch), sum(t.completion.num_sampled for t in batch), len(rows)]
    num_rows, num_tokens, num_trainable = world.sum(counts).tolist()
    if num_trainable == 0:
        return []
    is_idle = not rows  # the other ranks wait for this one's gradient: one row of weight 0
    if is_idle:
        rows = [replace(batch[0], advantage=0.0)]
    micro_batches = [
        make_micro_batch(some, run, num_rows=num_rows, num_tokens=num_tokens)
        for some in pack_rows(rows, training.micro_batch_tokens)
    ]
    if is_idle:
        micro_batches[0].weights.zero_()
    return equal_passes(micro_batches, world) if run.config.model.shard else micro_batches


def pack_rows(rows: list[Trajectory], max_tokens: int) -> Iterator[list[Trajectory]]:
    """Rows in order of length, in batches of rows x (longest prompt + completion) <= max_tokens."""
    batch: list[Trajectory] = []
    longest_prompt = longest_completion = 0
    for row in sorted(rows, key=lambda t: len(t.prompt_ids) + len(t.completion.token_ids)):
        prompt = max(longest_prompt, len(row.prompt_ids))
        completion = max(longest_completion, len(row.completion.token_ids))
        if batch and (len(batch) + 1) * (prompt + completion) > max_tokens:
            yield batch
            batch, prompt, completion = [], len(row.prompt_ids), len(row.completion.token_ids)
        longest_prompt, longest_completion = prompt, completion
        batch.append(row)
    yield batch


def make_micro_batch(
    rows: list[Trajectory], run: Run, *, num_rows: float, num_tokens: float
) -> MicroBatch:
    """Tensors on this rank's device; the counts are those of the whole batch over all ranks."""
    training, world, pad_id = run.config.training, run.world, run.policy.params.pad_id
    device, completions = world.device, [t.completion for t in rows]
    prompt_ids, prompt_mask = left_pad([t.prompt_ids for t in rows], pad_id, device)  # (B, P)
    completion_ids = right_pad([c.token_ids for c in completions], pad_id).to(device)  # (B, T)
    lengths = torch.tensor([len(c.token_ids) for c in completions], device=device)
    columns = torch.arange(completion_ids.shape[1], device=device)
    is_token = columns < lengths[:, None]  # (B, T)
    # what the calculator wrote is read as the prompt is, and not trained on
    completion_mask = ~right_pad([c.is_inserted for c in completions], True).to(device)  # (B, T)
    weights = token_weights(
        completion_mask,
        normalization=training.loss_normalization,
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_new_gen_tokens=training.max_new_gen_tokens,
    )
    for row, weight in zip(rows, weights.amax(dim=1).tolist(), strict=True):
        row.weight = weight
    return MicroBatch(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        mask=torch.cat([prompt_mask, is_token], dim=1),
        completion_mask=completion_mask,
        advantages=torch.tensor([t.advantage for t in rows], device=device, dtype=torch.float32),
        weights=weights * world.size,  # DDP averages over the ranks, the loss is a sum
        sampler_log_probs=right_pad([c.log_probs for c in completions], 0.0).to(device),
    )


def rollout_sums(
    groups: list[list[Trajectory]], rewards: torch.Tensor, reward_parts: tuple[str, ...]
) -> dict[str, tuple[float, float]]:
    """What this rank's rollouts show, as (sum, count): summed over the ranks, then divided."""
    rows = [t for group in groups for t in group]
    batch = [t for t in rows if t.in_batch]
    num_tokens = sum(len(t.completion.token_ids) for t in rows)
    num_sampled = sum(t.completion.num_sampled for t in rows)
    equal = is_equal_group(rewards)
    sums = {
        "train/reward": (sum(t.reward for t in rows), len(rows)),
        "train/reward_std": (rewards.std(dim=1).sum().item(), len(groups)),
        "train/solved": (sum(t.is_solved for t in rows), len(rows)),
        "train/solved_and_ended": (sum(t.is_solved_and_ended for t in rows), len(rows)),
        "train/advantage_abs": (sum(abs(t.advantage) for t in batch), len(batch)),
        "train/entropy": (sum(float(t.completion.entropies.sum()) for t in rows), num_sampled),
        "train/completion_tokens": (num_tokens, len(rows)),
        "train/truncated_frac": (sum(t.completion.truncated for t in rows), len(rows)),
        "train/zero_advantage_frac": (equal.sum().item(), len(groups)),
    }
    for part in reward_parts:
        sums[part_metric(part)] = (sum(t.reward_parts[part] for t in rows), len(rows))
    return sums


# Evaluation


def evaluate(run: Run) -> tuple[dict[str, float], list[dict], bool]:
    """Metrics over all validation questions, each answered on one rank, and the first samples.

    Also whether the model is broken: then logits were not finite, and the scores mean nothing.
    """
    validation, clock = run.config.validation, Clock()
    with clock("eval"):
        groups = answer_questions(
            run, num_samples=validation.best_of_n, temperature=validation.temperature
        )
        metrics = group_metrics(run, groups)
    return metrics | clock.read(), validation_samples(run, groups), has_broken(run, groups)


def answer_questions(run: Run, *, num_samples: int, temperature: float) -> list[list[Trajectory]]:
    """Completions of this rank's share of the validation questions: rank, rank + size and so on.

    Every question has its own fixed randomness, so evaluating changes nothing in training, and two
    evaluations differ by the policy alone.
    """
    mine = range(run.world.rank, len(run.validation_questions), run.world.size)
    max_new_tokens = run.config.max_validation_tokens
    return sample_trajectories(
        run,
        [run.validation_questions[i] for i in mine],
        [(VALIDATION, i) for i in mine],
        num_samples=num_samples,
        params=replace(run.policy.params, temperature=temperature, max_new_tokens=max_new_tokens),
        clock=Clock(),
        description="evaluation" if temperature > 0 else "greedy",
    )


def group_metrics(run: Run, groups: list[list[Trajectory]]) -> dict[str, float]:
    """pass@k, lengths and shares over all questions, from this rank's groups."""
    validation, num_questions = run.config.validation, len(run.validation_questions)
    solved = [[t.is_solved for t in group] for group in groups]
    solved = run.world.gather_rows(solved, shape=(num_questions, validation.best_of_n))
    rows = [t for group in groups for t in group]
    sums = {
        "eval/solved_and_ended": (sum(t.is_solved_and_ended for t in rows), len(rows)),
        "eval/completion_tokens": (sum(len(t.completion.token_ids) for t in rows), len(rows)),
        "eval/truncated_frac": (sum(t.completion.truncated for t in rows), len(rows)),
    }
    return solve_rates(solved, validation.pass_k) | reduce_means(sums, run.world)


def run_evaluation(run: Run) -> int:
    """Measure a model as it is: as training would, and by majority votes and greedy completions.

    Returns the exit status, 2 if the model's logits are not finite.
    """
    validation, clock = run.config.validation, Clock()
    with clock("eval"):
        groups = answer_questions(
            run, num_samples=validation.best_of_n, temperature=validation.temperature
        )
        is_greedy = validation.temperature == 0
        greedy = groups if is_greedy else answer_questions(run, num_samples=1, temperature=0.0)
    metrics = group_metrics(run, groups) | single_answer_metrics(run, groups, greedy) | clock.read()
    samples = validation_samples(run, groups)
    title, totals = f"evaluation of {run.config.model.name}", answer_totals(run)
    run.logger.print_evaluation(title, metrics, samples, totals=totals)
    save_evaluation(run, metrics, samples)
    return 2 if has_broken(run, groups) else 0


if __name__ == "__main__":
    main()
