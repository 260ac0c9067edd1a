"""Teach a language model to reason by reinforcement learning: GRPO and SIL in one script.

    torchrun --nproc-per-node=2 main.py                                 # the default, on a laptop
    torchrun --nproc-per-node=4 main.py --config configs/countdown-qwen2.5-3b.yaml
    python main.py training.num_steps=5 training.learning_rate=1e-4     # any key, on one process

A step of the algorithm (`take_step`):

    1. take N questions and sample n completions of each: the groups
    2. score every completion with a rule: the reward
    3. grpo: advantage = reward - mean reward of its group (GRPO, arXiv:2402.03300, without the
       division by the standard deviation: Dr. GRPO, arXiv:2503.20783)
       sil:  advantage = 1 for the k best of each group, which are imitated; the rest is dropped
    4. loss = -sum of advantage * log-probability over all completion tokens, divided by a constant
    5. one optimizer step on that loss: what was better than its group's mean becomes more likely

There is no critic and, with one update per batch, no ratio and no clipping. A penalty for moving
away from the model that the run began with (`training.kl_coef`) is off unless asked for.

Shapes: N questions, G (or n) completions each, B rows, P longest prompt, T completion tokens, V
vocabulary. Masks are bool, True = keep.
"""

import contextlib
import errno
import functools
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn

from chat import answer_lines, open_console
from checkpoint import SaveOnExit
from config import Config, ConfigError, check_world, load_config
from data import TASKS, completion_text, encode_prompts, reward_parts
from distributed import World, no_sync, questions_per_rank
from evaluation import (
    Evaluation,
    open_folder,
    prepare_evaluation,
    save_results,
    single_answer_metrics,
)
from export import ExportError, export
from logger import Logger
from metrics import Clock, peak_memory_gb, reduce_means, solve_rates
from optimizer import learning_rate_at, set_learning_rate
from policy import Policy
from run import (
    Run,
    open_logger,
    open_session,
    prepare_run,
    save_best,
    save_state,
    show_curves,
    summary,
)
from sampler import Completion, left_pad, right_pad, sample_completions, seeded

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
    in_batch: bool = True  # counts in the loss's denominator; sil leaves out all but the k best

    @property
    def is_solved(self) -> bool:
        return self.reward_parts["answer"] == 1.0 and not self.completion.is_broken


TRAINING, VALIDATION = 0, 1  # first word of a seed: random numbers of the two never meet


def sample_trajectories(
    policy: Policy,
    examples: list[dict],
    seeds: list[tuple[int, ...]],
    *,
    num_samples: int,
    temperature: float,
    config: Config,
    logger: Logger,
    clock: Clock,
    description: str,
) -> list[list[Trajectory]]:
    """Sample and score a group of completions for each question, with randomness from its seed."""
    tokenizer = policy.tokenizer
    prompts = encode_prompts(examples, config=config, tokenizer=tokenizer)
    params = replace(policy.params, temperature=temperature)
    policy.sampler.eval()
    num_rows = len(seeds) * num_samples
    with (
        clock("rollout"),
        policy.autocast(),
        logger.progress(num_rows, description, "seq") as bar,
    ):
        groups = sample_completions(
            policy.sampler,
            prompts,
            seeds,
            num_samples=num_samples,
            params=params,
            backend=policy.backend,
            max_batch_tokens=policy.max_batch_tokens,
            on_progress=bar.update,
        )
    with clock("reward"):
        weights, trajectories = config.task.reward_weights, []
        for example, prompt_ids, group in zip(examples, prompts, groups, strict=True):
            texts = [completion_text(completion, tokenizer) for completion in group]
            parts = reward_parts(group, texts, example, config)
            rewards = [sum(weights[name] * part[name] for name in weights) for part in parts]
            fields = zip(group, texts, parts, rewards, strict=True)
            trajectories.append([Trajectory(prompt_ids, *values) for values in fields])
    return trajectories


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


def assign_advantages(groups: list[list[Trajectory]], config: Config) -> torch.Tensor:
    """Set each trajectory's advantage and whether it is in the batch; returns rewards (N, n)."""
    training = config.training
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    if training.learning_type == "grpo":
        in_batch = torch.ones_like(rewards, dtype=torch.bool)
        advantages = grpo_advantages(rewards, divide_by_std=training.advantage == "zscore")
    else:
        in_batch = k_best_mask(rewards, k=training.k_best_of_n[0])
        # any k of a group of equals would do, so imitating them teaches nothing on average
        advantages = (in_batch & ~is_equal_group(rewards)[:, None]).double()
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group):
            trajectory.advantage = advantages[i, j].item()
            trajectory.in_batch = bool(in_batch[i, j])
    return rewards


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


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    groups: list[list[Trajectory]],
    *,
    config: Config,
    world: World,
    logger: Logger,
    before_change: Callable[[], None] = lambda: None,
) -> tuple[dict[str, float], dict[str, tuple[float, float]], bool]:
    """One step's update; returns metrics, more as (sum, count) of this rank, and if it was skipped.

    `before_change` is called when the gradient is there and the weights are about to change.

    A step is skipped if its loss, its gradient or the logits it was sampled from are not finite. If
    there is no lesson on any rank nothing is updated: AdamW would move the weights even with a
    gradient of 0.
    """
    training, sums = config.training, UpdateSums()
    num_broken = sum(t.completion.is_broken for group in groups for t in group)
    is_skipped = world.sum([num_broken]).item() > 0
    micro_batches = [] if is_skipped else make_micro_batches(groups, policy, config, world)
    if not micro_batches:
        return {}, {}, is_skipped
    with logger.progress(len(micro_batches) * training.num_iterations, "update", "batch") as bar:
        for _ in range(training.num_iterations):
            optimizer.zero_grad()
            loss = compute_gradient(policy, micro_batches, config, sums, bar.update)
            grad_norm = nn.utils.clip_grad_norm_(policy.model.parameters(), training.max_grad_norm)
            loss = world.sum([loss / world.size]).item()  # undoes the factor in the weights
            metrics = {"train/loss": loss, "train/grad_norm": grad_norm.item()}
            is_skipped = not all(math.isfinite(value) for value in metrics.values())
            if is_skipped:
                break
            before_change()
            optimizer.step()
    optimizer.zero_grad()
    policy.refresh_sampler()
    return metrics, sums.as_metrics(), is_skipped


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


def compute_gradient(
    policy: Policy,
    micro_batches: list[MicroBatch],
    config: Config,
    sums: UpdateSums,
    on_progress: Callable[[int], None],
) -> float:
    """Add up the micro-batches' gradients, at the last over the ranks too; returns the loss."""
    policy.model.train()
    loss = 0.0
    for micro_batch in micro_batches:
        is_last = micro_batch is micro_batches[-1]
        with contextlib.nullcontext() if is_last else no_sync(policy.scorer):
            loss += accumulate_gradient(policy, micro_batch, config, sums)
        on_progress(1)
    return loss


def accumulate_gradient(
    policy: Policy, batch: MicroBatch, config: Config, sums: UpdateSums
) -> float:
    """Add one micro-batch's gradient to the weights'; returns its loss."""
    training = config.training
    eps, eps_high = training.clip_eps, training.clip_eps_high or training.clip_eps
    log_probs = score(policy.scorer, batch, policy.params.temperature)  # (B, T)
    if training.tis_clip is not None and batch.old_log_probs is None:
        batch.weights = batch.weights * truncated_importance(
            log_probs.detach(), batch.sampler_log_probs, clip=training.tis_clip
        )
    token_loss = policy_token_loss(
        log_probs,
        batch.advantages,
        old_log_probs=batch.old_log_probs,
        clip_eps=eps,
        clip_eps_high=eps_high,
    )
    if training.kl_coef > 0:
        token_loss = token_loss + training.kl_coef * kl_to_reference(policy, batch, log_probs, sums)
    loss = (batch.weights * token_loss).sum()
    loss.backward()

    log_probs, mask = log_probs.detach(), batch.completion_mask
    sums.num_tokens += mask.sum().item()
    if batch.old_log_probs is None:  # the first pass: these weights sampled the batch
        sums.num_first_tokens += mask.sum().item()
        sums.mismatch += (log_probs - batch.sampler_log_probs).abs()[mask].sum().item()
        if training.num_iterations > 1:
            batch.old_log_probs = log_probs
    else:
        ratio, advantages = (log_probs - batch.old_log_probs).exp(), batch.advantages[:, None]
        too_high, too_low = ratio > 1 + eps_high, ratio < 1 - eps
        is_clipped = (too_high & (advantages > 0)) | (too_low & (advantages < 0))
        sums.num_clipped += is_clipped[mask].sum().item()
    return loss.item()


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
    """log pi of the batch's completions, (B, T)."""
    num_tokens = batch.completion_mask.shape[1]
    return scorer(batch.input_ids, batch.mask, num_tokens=num_tokens, temperature=temperature)


def make_micro_batches(
    groups: list[list[Trajectory]], policy: Policy, config: Config, world: World
) -> list[MicroBatch]:
    """The rows of this rank that teach something; empty where there are none on any rank.

    Without a KL penalty rows whose advantage is 0 have no gradient: they are counted and left out.
    """
    training = config.training
    batch = [t for group in groups for t in group if t.in_batch]
    rows = [t for t in batch if t.advantage != 0.0 or training.kl_coef > 0]
    if training.skip_truncated:
        rows = [t for t in rows if not t.completion.truncated]
    counts = [len(batch), sum(t.completion.num_sampled for t in batch), len(rows)]
    num_rows, num_tokens, num_trainable = world.sum(counts).tolist()
    if num_trainable == 0:
        return []
    is_idle = not rows  # the other ranks wait for this one's gradient
    if is_idle:
        rows = [replace(batch[0], advantage=0.0)]
    micro_batches = [
        make_micro_batch(some, policy, config, world, num_rows=num_rows, num_tokens=num_tokens)
        for some in pack_rows(rows, training.micro_batch_tokens)
    ]
    if is_idle:
        micro_batches[0].weights.zero_()
    return micro_batches


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
    rows: list[Trajectory],
    policy: Policy,
    config: Config,
    world: World,
    *,
    num_rows: float,
    num_tokens: float,
) -> MicroBatch:
    """Tensors on this rank's device; the counts are those of the whole batch over all ranks."""
    training, device, pad_id = config.training, world.device, policy.params.pad_id
    prompt_ids, prompt_mask = left_pad([t.prompt_ids for t in rows], pad_id, device)  # (B, P)
    completions = [t.completion for t in rows]
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
    return MicroBatch(
        input_ids=torch.cat([prompt_ids, completion_ids], dim=1),
        mask=torch.cat([prompt_mask, is_token], dim=1),
        completion_mask=completion_mask,
        advantages=torch.tensor([t.advantage for t in rows], device=device, dtype=torch.float32),
        weights=weights * world.size,  # DDP averages over the ranks, the loss is a sum
        sampler_log_probs=right_pad([c.log_probs for c in completions], 0.0).to(device),
    )


# Metrics: sums and counts over all ranks, then one division; never a mean of rank means


def rollout_sums(
    groups: list[list[Trajectory]], rewards: torch.Tensor
) -> dict[str, tuple[float, float]]:
    """What this rank's rollouts show, as (sum, count)."""
    rows = [t for group in groups for t in group]
    batch = [t for t in rows if t.in_batch]
    num_tokens = sum(len(t.completion.token_ids) for t in rows)
    num_sampled = sum(t.completion.num_sampled for t in rows)
    equal = is_equal_group(rewards)
    sums = {
        "train/reward": (sum(t.reward for t in rows), len(rows)),
        "train/reward_std": (rewards.std(dim=1).sum().item(), len(groups)),
        "train/solved": (sum(t.is_solved for t in rows), len(rows)),
        "train/advantage_abs": (sum(abs(t.advantage) for t in batch), len(batch)),
        "train/entropy": (sum(float(t.completion.entropies.sum()) for t in rows), num_sampled),
        "train/completion_tokens": (num_tokens, len(rows)),
        "train/truncated_frac": (sum(t.completion.truncated for t in rows), len(rows)),
        "train/zero_advantage_frac": (equal.sum().item(), len(groups)),
    }
    for part, name in {"format": "format", "timeout": "reward_timeouts"}.items():
        if part in rows[0].reward_parts:
            sums[f"train/{name}"] = (sum(t.reward_parts[part] for t in rows), len(rows))
    return sums


# Evaluation


def evaluate(
    policy: Policy, questions: list[dict], *, config: Config, world: World, logger: Logger
) -> tuple[dict[str, float], list[dict]]:
    """Metrics over all validation questions, each answered on one rank, and the first samples."""
    groups = answer_questions(
        policy,
        questions,
        num_samples=config.validation.best_of_n,
        temperature=config.validation.temperature,
        config=config,
        world=world,
        logger=logger,
    )
    metrics = group_metrics(groups, num_questions=len(questions), config=config, world=world)
    return metrics, describe_first(groups, policy, config)


def answer_questions(
    policy: Policy,
    questions: list[dict],
    *,
    num_samples: int,
    temperature: float,
    config: Config,
    world: World,
    logger: Logger,
) -> list[list[Trajectory]]:
    """Completions of this rank's share of the validation questions: rank, rank + size and so on.

    Every question has its own fixed randomness, so evaluating changes nothing in training, and two
    evaluations differ by the policy alone.
    """
    mine = range(world.rank, len(questions), world.size)
    return sample_trajectories(
        policy,
        [questions[i] for i in mine],
        [(VALIDATION, i) for i in mine],
        num_samples=num_samples,
        temperature=temperature,
        config=config,
        logger=logger,
        clock=Clock(),
        description="evaluation" if temperature > 0 else "greedy",
    )


def group_metrics(
    groups: list[list[Trajectory]], *, num_questions: int, config: Config, world: World
) -> dict[str, float]:
    """pass@k, lengths and truncated share over all questions, from this rank's groups."""
    validation = config.validation
    solved = [[t.is_solved for t in group] for group in groups]
    solved = world.gather_rows(solved, shape=(num_questions, validation.best_of_n))
    rows = [t for group in groups for t in group]
    lengths = {
        "eval/completion_tokens": (sum(len(t.completion.token_ids) for t in rows), len(rows)),
        "eval/truncated_frac": (sum(t.completion.truncated for t in rows), len(rows)),
    }
    return solve_rates(solved, validation.pass_k) | reduce_means(lengths, world)


def describe_first(groups: list[list[Trajectory]], policy: Policy, config: Config) -> list[dict]:
    """The first completion of some questions, as the log shows them."""
    return [describe(group[0], policy) for group in groups[: config.logging.samples]]


def describe(trajectory: Trajectory, policy: Policy) -> dict:
    """A sample as samples.jsonl keeps it."""
    return {
        "prompt": policy.tokenizer.decode(trajectory.prompt_ids),
        "completion": trajectory.text,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "truncated": trajectory.completion.truncated,
    }


# The run


def run_training(run: Run, logger: Logger) -> None:
    """The whole algorithm: sample, score, compare, learn; measure and save now and then."""
    state = run.state
    save = functools.partial(save_state, run)
    with SaveOnExit(save, is_main=run.world.is_main) as guard:
        while True:
            if not state.is_recorded:
                measured, samples = evaluate_if_due(run, logger)
                guard.begin_change()
                record(run, measured, samples, logger)
                guard.end_change()
            if run.is_over:
                break
            stop_if_diverged(run)
            take_step(run, logger, guard)
    logger.info(summary(run))
    show_curves(run, logger)
    logger.close()


def take_step(run: Run, logger: Logger, guard: SaveOnExit) -> None:
    """Sample, score, compare, learn. The state then holds the step's metrics, to be recorded."""
    config, state, clock = run.config, run.state, Clock()
    with clock("step"):
        examples, seeds = next_questions(run)
        groups = sample_trajectories(
            run.policy,
            examples,
            seeds,
            num_samples=config.training.k_best_of_n[1],
            temperature=config.sampling.temperature,
            config=config,
            logger=logger,
            clock=clock,
            description="rollout",
        )
        rewards = assign_advantages(groups, config)
        learning_rate = learning_rate_at(state.step + 1, config)
        set_learning_rate(run.optimizer, learning_rate)
        with clock("update"), seeded(seeds, run.world.device):  # random is an adapter's dropout
            metrics, sums, is_skipped = update_policy(
                run.policy,
                run.optimizer,
                groups,
                config=config,
                world=run.world,
                logger=logger,
                before_change=guard.begin_change,
            )
    metrics |= reduce_means(rollout_sums(groups, rewards) | sums, run.world)
    metrics |= {"train/lr": learning_rate} | speed(run, metrics, clock)

    guard.begin_change()
    num_questions = len(examples) * run.world.size
    new_signs = state.advance(metrics, num_questions=num_questions, is_skipped=is_skipped)
    guard.end_change()
    logger.print_step(state.step, config.training.num_steps, state.row)
    for sign in new_signs:
        logger.warning(f"the model may be collapsing: {sign} (mean of the last steps)")


def next_questions(run: Run) -> tuple[list[dict], list[tuple[int, ...]]]:
    """This rank's slice of the next questions, and what names the randomness of each."""
    per_rank = questions_per_rank(run.config, run.world.size)
    first = run.state.position + run.world.rank * per_rank
    positions = range(first, first + per_rank)
    seeds = [(TRAINING, run.config.training.seed, position) for position in positions]
    return [run.train_questions[position] for position in positions], seeds


def speed(run: Run, metrics: dict[str, float], clock: Clock) -> dict[str, float]:
    """How long the step's phases took on rank 0, tokens sampled per second, and memory held."""
    times, num_ranks = clock.read(), run.world.size
    num_questions = questions_per_rank(run.config, num_ranks) * num_ranks
    num_rows = num_questions * run.config.training.k_best_of_n[1]
    num_tokens = metrics["train/completion_tokens"] * num_rows
    return times | {
        "perf/tokens_per_s": num_tokens / times["time/step_s"],
        "perf/peak_memory_gb": peak_memory_gb(run.world.device),
    }


def evaluate_if_due(run: Run, logger: Logger) -> tuple[dict[str, float], list[dict]]:
    """Metrics and samples of an evaluation at the start, every so many steps and at the end."""
    config, step = run.config, run.state.step
    if step % config.validation.every != 0 and not run.is_over:
        return {}, []
    clock = Clock()
    with clock("eval"):
        metrics, samples = evaluate(
            run.policy, run.validation_questions, config=config, world=run.world, logger=logger
        )
    return metrics | clock.read(), samples


def record(run: Run, measured: dict[str, float], samples: list[dict], logger: Logger) -> None:
    """Keep the best model, write the step's row, then save a checkpoint where one is due."""
    config, state = run.config, run.state
    if measured:
        logger.print_evaluation(f"evaluation at step {state.step}", measured, samples)
        logger.log_samples(state.step, samples)
        state.last = measured["eval/pass@1"]
        if state.step == 0:
            state.first = state.last
            state.first_interval = [measured[f"eval/pass@1_{end}"] for end in ("low", "high")]
        is_best = state.best is None or state.last > state.best
        if is_best and save_best(run, measured):
            state.best, state.best_step = state.last, state.step
    logger.log_metrics(state.step, state.row | measured)
    state.row, state.is_recorded = {}, True
    if run.is_over or (state.step > 0 and state.step % config.checkpoint.every == 0):
        save_state(run)


def stop_if_diverged(run: Run) -> None:
    """Raise FloatingPointError after too many steps in a row that could not be taken."""
    if run.state.skipped_in_a_row >= run.config.training.max_skipped_steps:
        raise FloatingPointError(
            f"loss or gradient not finite in {run.state.skipped_in_a_row} steps in a row: lower "
            f"training.learning_rate; the best model is in {run.folder / 'best'}"
        )


def run_evaluation(evaluation: Evaluation, logger: Logger) -> None:
    """Measure a model as it is: as training would, and by majority votes and greedy completions."""
    config, world, questions = evaluation.config, evaluation.world, evaluation.questions
    settings = {"config": config, "world": world, "logger": logger}
    answer = functools.partial(answer_questions, evaluation.policy, questions, **settings)
    clock, validation = Clock(), config.validation
    with clock("eval"):
        groups = answer(num_samples=validation.best_of_n, temperature=validation.temperature)
        greedy = answer(num_samples=1, temperature=0.0)
    metrics = group_metrics(groups, num_questions=len(questions), config=config, world=world)
    metrics |= single_answer_metrics(evaluation, groups, greedy) | clock.read()
    samples = describe_first(groups, evaluation.policy, config)
    logger.print_evaluation(f"evaluation of {config.model.name}", metrics, samples)
    save_results(evaluation, metrics, samples)
    logger.info(f"written to {evaluation.folder}")


MODES = {  # what each loads and checks, which files it opens, what it does
    "train": (prepare_run, open_logger, run_training),
    "evaluate": (prepare_evaluation, open_folder, run_evaluation),
    "sample": (open_session, open_console, answer_lines),
}


def main() -> None:
    """Do what the command line asks for; a user's mistake is one line and status 2."""
    try:
        config = load_config(sys.argv[1:], tasks=TASKS)
        check_world(config, int(os.environ.get("WORLD_SIZE", 1)))
        prepare, open_files, do = MODES[config.mode]
        run = prepare(config)
        logger = open_files(run)
    except (ValueError, OSError) as error:
        tell_once(error)
        sys.exit(2)
    try:
        do(run, logger)
        if run.world.size > 1:
            dist.destroy_process_group()
        if config.mode == "train":
            export(run)
    except ExportError as error:
        tell_once(error)
        sys.exit(2)
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            "out of GPU memory: lower sampling.max_batch_tokens if it was sampling, else "
            "training.micro_batch_tokens, or set model.gradient_checkpointing=true"
        ) from error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RuntimeError(
            f"{run.folder}: the disk is full: free some space and give the same command again, it "
            "goes on from the last checkpoint"
        ) from error


def tell_once(error: ValueError | OSError) -> None:
    """Print a user's mistake on one rank, and not again at a restart."""
    is_config = isinstance(error, ConfigError)
    rank, restarts = (
        int(os.environ.get(name, 0)) for name in ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
    )
    if restarts > 0:
        return
    if rank > 0:  # torchrun ends all ranks with the first one: rank 0 speaks and ends before
        time.sleep(3)
        if is_config:
            return
    lines = error.lines if is_config else [str(error)]
    print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)


if __name__ == "__main__":
    main()
