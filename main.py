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
    6. if one is due, an evaluation; the best model is kept

There is no critic and, with one update per batch, no ratio and no clipping. What decides a token,
an end, a log-probability, an advantage or a gradient of a default run stands in this file, each
function below the one that calls it; padding and positions are in engine/core/tensors.py, and the
reward is the task's (countdown.py). engine/ has what surrounds that, such as a cache with room, and
what is off by default, such as CUDA graphs, shards and other losses. config.yaml explains the keys.

Shapes: N questions, G completions each, B rows, P longest prompt, T completion tokens, S longest
prompt with its completion, V vocabulary. Masks are bool, True = keep.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

from engine.run.config_file import check_paths, load_config  # engine/ checks Python's version
from engine.run.mistakes import crashes_name_the_fix, mistakes_cost_one_line

if __name__ == "__main__":  # a mistake and --help are answered before torch is imported
    with mistakes_cost_one_line():
        check_paths(load_config(sys.argv[1:]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers.generation import BaseStreamer

from engine.core.config import Config, TaskSettings, TrainingSettings
from engine.core.distributed import World
from engine.core.statistics import Clock, add_to_mean, reduce_means
from engine.core.tensors import autocast, keep_likeliest, left_pad, position_ids, right_pad, seeded
from engine.core.types import Completion, MicroBatch, SamplingParams, Seed, SeedWord, Trajectory
from engine.model.policy import Policy, make_reference
from engine.questions.prompts import completion_text
from engine.questions.tasks import reward_parts
from engine.report.evaluation import evaluation_metrics
from engine.report.metrics import count_broken, performance, rollout_sums
from engine.run.load import load_run
from engine.run.log import log_evaluation, log_step, rollouts_of, run_evaluation
from engine.run.saving import finish, save_best, save_checkpoint, stop
from engine.run.state import Run
from engine.run.warm_start import warm_start
from engine.sampling.batches import decode_in_batches
from engine.sampling.cache import ReservedColumns
from engine.sampling.environment import encode_questions
from engine.sampling.generate import DrawingProcessor, get_generation_config
from engine.sampling.graphs import CapturedSteps
from engine.sampling.record import Record
from engine.sampling.vllm import VllmEngine
from engine.update.head import score_in_blocks
from engine.update.losses import apply_options, check_not_negative, over_mean
from engine.update.optimizer import learning_rate_at, set_learning_rate
from engine.update.shards import equal_passes, shard_scorer
from logger import Logger


def main() -> None:
    """Do what the command line asks for; a user's mistake costs one line and exit status 2."""
    with mistakes_cost_one_line():
        run = load_run(load_config(sys.argv[1:]), wrap_policy, DecodeBatch)
    with crashes_name_the_fix(run.folder):
        is_training = run.config.mode == "train"
        exit_status = run_training(run) if is_training else run_evaluation(run, sample_validation)
        run.policy.scorer = None  # frees DDP, which must not outlive the process group
        run.world.leave()
    sys.exit(exit_status)


def wrap_policy(policy: Policy, config: Config, world: World, *, in_blocks: bool) -> None:
    """Give a policy that is trained what scores completions, over all ranks.

    Trained weights are fp32. They compute in bf16 on a GPU, in fp32 on a CPU (`compute_dtype`); in
    16 bits a copy of the policy samples (`policy.sampler`), refreshed after each update. Of the
    hub's generation_config only the end tokens are left (engine/model/load.py).
    """
    scorer = CompletionScorer(policy.model, policy.compute_dtype, in_blocks=in_blocks)
    if config.training.has_reference:  # a frozen copy, made before a checkpoint is loaded
        policy.reference = make_reference(scorer, policy, lora=config.model.lora)
    if config.model.shard:  # each rank has a part of the model (and of the reference)
        scorer = shard_scorer(scorer, world, keeps_root=True)
        if config.training.has_reference:
            policy.reference = shard_scorer(policy.reference, world, keeps_root=False)
    elif world.size > 1:
        # Each rank has the whole model; DDP averages their gradients in the backward pass.
        device_ids = [world.device.index] if world.device.type == "cuda" else None
        scorer = DistributedDataParallel(scorer, device_ids, gradient_as_bucket_view=True)
    policy.scorer = scorer


# The run


def run_training(run: Run) -> int:
    """The whole algorithm, in one loop; returns the exit status."""
    config, world, state, policy, logger = run.config, run.world, run.state, run.policy, run.logger
    training = config.training
    questions_per_rank = config.questions_per_rank(world.size)
    questions_per_step = questions_per_rank * world.size
    world.catch_signals()  # after SIGTERM, SIGINT, SIGHUP the next world.sum sets should_stop
    while True:
        # Step 0 is the model as it was loaded. After a signal there may be no time to evaluate: the
        # checkpoint has `evaluated_at`, so the resumed run knows what is due.
        is_due = state.step % config.validation.every == 0 or run.is_over
        if is_due and state.evaluated_at < state.step and not world.should_stop:
            evaluate(run)
        if run.answers and not state.is_warm and not world.should_stop:  # off by default
            if warm_start(run, make_micro_batches, update_policy):
                continue  # it is evaluated again, and saved
            return stop(run)  # a signal came
        # A checkpoint has weights, optimizer and state; what it knows is in the log before it. So
        # after a crash the log may have more, which is cut off at the resume, but never less.
        if (run.is_checkpoint_due or world.should_stop) and not state.is_saved:
            save_checkpoint(run)
        if run.is_over or world.should_stop:
            break
        run.check_progress()  # FloatingPointError after too many skipped steps in a row
        clock = Clock()
        with clock("step"):
            # Each rank takes its slice of the next questions of the stream.
            taken, next_position = run.train_questions.take(state.position, questions_per_step)
            mine = taken[world.rank * questions_per_rank :][:questions_per_rank]
            questions = [question for _, question in mine]
            seeds = [(SeedWord.TRAINING, training.seed, position) for position, _ in mine]
            groups = sample_trajectories(
                policy, run.task, config, questions, seeds, policy.params, clock, logger
            )
            assign_advantages(groups, training)
            learning_rate = learning_rate_at(state.step + 1, training)
            set_learning_rate(run.optimizer, learning_rate)
            # LoRA dropout is the only randomness here; its seed lets a resumed run repeat it.
            with clock("update"), seeded(seeds, world.device):
                is_broken = count_broken(groups, world, logger.warning) > 0  # on any rank
                batches = [] if is_broken else make_micro_batches(groups, config, world)
                metrics, sums, num_updates = update_policy(
                    policy, run.optimizer, batches, training, world, logger
                )
            with clock("rollouts_log"):  # a few groups for tools/report.py
                rollouts = rollouts_of(run, groups, questions, batches)
        metrics |= reduce_means(sums | rollout_sums(groups, run.task.REWARD_PARTS), world)
        metrics |= {"train/lr": learning_rate} | policy.loss_scale.read() | clock.read()
        metrics |= performance(metrics, questions_per_step * training.group_size, world.device)
        is_skipped = is_broken or (batches != [] and num_updates < training.num_iterations)
        run.advance(metrics, next_position, is_skipped=is_skipped, has_moved=num_updates > 0)
        log_step(run, metrics, groups, questions, rollouts)
    is_finished = run.is_over and state.evaluated_at == state.step
    return finish(run) if is_finished else stop(run)  # 0, or 1 if a save failed; 128 + the signal


# Rollouts


def sample_trajectories(
    policy: Policy,
    task: ModuleType,
    config: Config,
    questions: list[dict],
    seeds: list[Seed],
    params: SamplingParams,
    clock: Clock,
    logger: Logger,
) -> list[list[Trajectory]]:
    """Sample a group of completions for each question, with their rewards.

    The random numbers of a question follow from its seed, whatever the batch that it is in, the
    rank, or what was sampled before. In another batch only rounding may differ.
    """
    tokenizer, context, device = policy.tokenizer, policy.context_length, policy.model.device
    prompts, conversations = encode_questions(
        task, config, questions, seeds, params, tokenizer, clock, context=context, device=device
    )
    decode = {
        "grouped": decode_grouped,  # the default; on a GPU it becomes "captured"
        "captured": functools.partial(decode_grouped, capture=True),  # the same in CUDA graphs
        "generate": decode_with_generate,  # transformers' own loop, without the hub's settings
        "vllm": functools.partial(VllmEngine.decode, rules=(draw_uniforms, sample_tokens, write)),
    }[policy.backend]
    policy.sampler.eval()
    progress = logger.progress(len(questions) * params.group_size, "sampling", "seq")
    with clock("rollout"), policy.autocast(), progress as bar:
        groups = decode_in_batches(
            policy.sampler,
            prompts,
            seeds,
            params,
            decode=decode,
            max_batch_tokens=config.sampling.max_batch_tokens,
            on_progress=bar.update,
            log=logger.once,
            conversations=conversations,  # one a sample, where the task has an Environment
        )
    with clock("reward"):
        return [
            reward_group(policy, task, config.task, *group)
            for group in zip(questions, prompts, groups, strict=True)
        ]


@torch.no_grad()
def decode_grouped(
    model: nn.Module,
    prompts: list[list[int]],
    seeds: list[Seed],
    params: SamplingParams,
    *,
    on_progress: Callable[[int], None],
    capture: bool = False,
) -> list[Completion]:
    """Sample a group of completions of each prompt: N * G of them, question by question."""
    uniforms = draw_uniforms(seeds, params)
    batch = DecodeBatch(model, prompts, uniforms, params)
    step = CapturedSteps(batch) if capture else batch.step
    steps_per_check = CapturedSteps.steps_per_check if capture else 1
    num_unfinished, longest = len(batch.tokens), max(map(len, prompts))
    for t in range(1, params.max_new_tokens):
        batch.record.insert_replies(batch.tokens[:, 0])  # of the calculator or an environment
        if t == 1 or t % steps_per_check == 0:
            active = batch.record.active  # (B,), False for the rows that have drawn an end token
            num_active = int(active.sum())
            on_progress(num_unfinished - num_active)
            num_unfinished = num_active
            if num_active == 0:
                break
            if num_active <= 0.85 * len(active):  # not at every end, since it copies the cache
                batch.select(active.nonzero()[:, 0])
        step(longest + t + 1)  # up to the column of the token drawn now, which the mask still hides
    batch.record.insert_replies(batch.tokens[:, 0])  # a last turn that just fitted
    on_progress(num_unfinished)
    return batch.record.completions()


class DecodeBatch:
    """Rows that are decoded together: each step draws one more token of every row.

    The prompts fill the first P columns, padded on the left; each step fills the next column. It
    changes tensors in place, for captured graphs (see `write`); only `select` makes new ones.
    """

    def __init__(
        self, model: nn.Module, prompts: list[list[int]], uniforms: Tensor, params: SamplingParams
    ):
        """Read each prompt once, repeat its cache, and draw the first token of each row."""
        self.model, self.cache, self.uniforms = model, None, uniforms.to(model.device)  # (B, T)
        self.record = Record(len(uniforms), params, model.device)
        # Ask for the last position with an index tensor: the number 1 makes a strided slice, and on
        # a CPU F.linear then copies the whole head matrix once per row.
        self.last_column = torch.full((1,), -1, device=model.device)
        prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
        logits = self.read(prompt_ids, prompt_mask, position_ids(prompt_mask))  # (N, V)
        group = torch.arange(len(uniforms), device=model.device) // params.group_size
        self.cache.reorder_cache(group)  # the one call that moves a recurrent layer's state too
        self.mask = F.pad(prompt_mask, (0, params.max_new_tokens), value=False)[group]  # (B, P + T)
        self.positions = self.mask.sum(dim=1, keepdim=True) - 1  # (B, 1), of the last token read
        self.tokens = torch.zeros_like(self.positions)  # (B, 1), the last ones drawn
        self.column = torch.full((1,), prompt_ids.shape[1] - 1, device=model.device)  # last filled
        self.reserved = ReservedColumns(model, self.cache, self.column)
        self.draw(logits[group])

    def step(self, num_columns: int) -> None:
        """Read the last tokens and draw the next; attention sees the first `num_columns`."""
        self.column += 1
        self.positions += 1
        self.mask.index_fill_(1, self.column, True)
        visible = self.reserved.reserve(self.mask, num_columns)
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
        self.tokens.copy_(write(self.record, *drawn)[:, None])

    def select(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self.record.select(indices)
        self.mask, self.positions = self.mask[indices], self.positions[indices]
        self.tokens, self.uniforms = self.tokens[indices], self.uniforms[indices]
        self.cache.reorder_cache(indices)


def write(record: Record, tokens: Tensor, log_probs: Tensor, entropies: Tensor) -> Tensor:
    """Write drawn tokens (b,), or a tool's in their place; return the tokens to read next.

    b of the B rows are still decoded; those that have ended get padding. A row ends with the first
    end token that it draws. All tensors change in place: a captured graph replays kernels on the
    same addresses, and the Python in it is not run again.
    """
    index, is_drawn = (record.rows, record.t.expand_as(record.rows)), record.active
    if record.has_tools:  # what a tool inserts is not drawn: it counts 0, and cannot end the row
        inserts = record.inserts[index]
        tokens, is_drawn = tokens.where(inserts < 0, inserts), is_drawn & (inserts < 0)
    record.tokens.index_put_(index, tokens.where(record.active, record.params.pad_id))
    record.log_probs.index_put_(index, log_probs.where(is_drawn, 0.0))
    record.entropies.index_put_(index, entropies.where(is_drawn, 0.0))
    record.lengths.index_add_(0, record.rows, record.active.long())
    record.active &= (tokens[:, None] != record.end_ids).all(dim=1) | ~is_drawn
    record.t += 1
    return tokens


def draw_uniforms(seeds: list[Seed], params: SamplingParams) -> Tensor:
    """Uniform random numbers in [0, 1), (N * G, T), each question's from its own seed."""
    shape = (params.group_size, params.max_new_tokens)
    blocks = [np.random.default_rng(list(seed)).random(shape, dtype=np.float32) for seed in seeds]
    return torch.from_numpy(np.concatenate(blocks))


def sample_tokens(
    logits: Tensor, uniforms: Tensor, params: SamplingParams
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token per row from softmax(logits / temperature), by inverse transform sampling.

    logits (B, V) and uniforms (B,) give tokens, log-probabilities and entropies in nats, (B,) each.
    Top-k and top-p only restrict what is drawn: the two numbers are those of the whole
    distribution. Temperature 0 takes the first of the likeliest tokens, scored at temperature 1.
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
    params: SamplingParams,
    *,
    on_progress: Callable[[int], None],
    streamer: BaseStreamer | None = None,
) -> list[Completion]:
    """The same by `model.generate`, for any model; `streamer` gets tokens as they come."""
    prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
    uniforms = draw_uniforms(seeds, params)
    drawing = DrawingProcessor(uniforms.to(model.device), params, sample_tokens, write)
    with seeded(seeds, model.device):  # generate draws too, if from one token: put its state back
        model.generate(
            prompt_ids,
            attention_mask=prompt_mask,
            generation_config=get_generation_config(params),
            logits_processor=drawing.processors,
            stopping_criteria=drawing.criteria,
            streamer=streamer,
        )
    on_progress(len(uniforms))
    return drawing.record.completions()


# Rewards and advantages


def reward_group(
    policy: Policy,
    task: ModuleType,
    options: TaskSettings,
    question: dict,
    prompt_ids: list[int],
    completions: list[Completion],
) -> list[Trajectory]:
    """The completions of one question as text, with what the task's reward_function pays."""
    trajectories = []
    texts = [completion_text(completion, policy.tokenizer) for completion in completions]
    paid = reward_parts(task, texts, question, options, completions)
    for completion, text, parts in zip(completions, texts, paid, strict=True):
        reward = sum(weight * parts[name] for name, weight in options.reward_weights.items())
        trajectories.append(Trajectory(prompt_ids, completion, text, parts, reward))
    return trajectories


def assign_advantages(groups: list[list[Trajectory]], training: TrainingSettings) -> None:
    """Set each trajectory's advantage, and whether it is in the batch that is trained on."""
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    if training.learning_type != "sil":  # grpo, or distill, which may add these advantages
        in_batch = torch.ones_like(rewards, dtype=torch.bool)
        advantages = grpo_advantages(rewards, divide_by_std=training.advantage == "zscore")
        if training.advantage == "over_mean":  # off by default
            check_not_negative(groups)
            advantages = over_mean(advantages, rewards)
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


# The update


def make_micro_batches(
    groups: list[list[Trajectory]], config: Config, world: World
) -> list[MicroBatch]:
    """What this rank trains on; empty where no rank has anything to train on.

    Of the batch, trajectories whose advantage is 0 have no gradient (without a KL penalty): they
    count in the denominators and are left out.
    """
    training = config.training
    batch = [t for group in groups for t in group if t.in_batch]
    trained = [t for t in batch if t.advantage != 0.0 or training.has_reference]
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
        make_micro_batch(some, training, world, num_rows=num_rows, num_tokens=num_tokens)
        for some in pack(trained, training.micro_batch_tokens)
    ]
    # A sharded model gathers its weights in every pass: each rank must make as many passes.
    return equal_passes(micro_batches, world) if config.model.shard else micro_batches


def pack(trajectories: list[Trajectory], max_tokens: int) -> Iterator[list[Trajectory]]:
    """Batches by length: rows * longest (prompt + completion) <= max_tokens, or a single row."""
    batch: list[Trajectory] = []
    for t in sorted(trajectories, key=lambda t: t.num_tokens):
        if batch and (len(batch) + 1) * t.num_tokens > max_tokens:
            yield batch
            batch = []
        batch.append(t)
    yield batch


def make_micro_batch(
    trajectories: list[Trajectory],
    training: TrainingSettings,
    world: World,
    *,
    num_rows: float,
    num_tokens: float,
) -> MicroBatch:
    """Tensors on this rank's device; the counts are those of the whole batch over all ranks."""
    device = world.device
    token_ids, is_sampled, log_probs = [], [], []
    for t in trajectories:
        completion, around = t.completion, (len(t.prompt_ids), 0)  # the prompt's columns, and none
        token_ids.append(t.prompt_ids + completion.token_ids)
        # End tokens are trained. What a tool has written is only read, as the prompt is.
        is_sampled.append(np.pad(~completion.is_inserted, around))
        log_probs.append(np.pad(completion.log_probs, around))
    completion_mask = right_pad(is_sampled, False).to(device)  # (B, S)
    weights = token_weights(
        completion_mask,
        normalization=training.loss_normalization,
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_new_gen_tokens=training.max_new_gen_tokens,
    )
    return MicroBatch(
        trajectories,
        input_ids=right_pad(token_ids, 0).to(device),
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

    `num_rows` and `num_tokens` are of the whole batch over all ranks, so the gradient depends on
    neither the number of ranks nor the micro-batches' size. dr_grpo: arXiv:2503.20783; token: DAPO,
    arXiv:2503.14476; sequence: GRPO, arXiv:2402.03300; sum: plain REINFORCE.
    """
    mask = completion_mask.float()
    if normalization == "dr_grpo":
        return mask / (num_rows * max_new_gen_tokens)
    if normalization == "token":
        return mask / num_tokens
    if normalization == "sequence":
        return mask / (num_rows * mask.sum(dim=1, keepdim=True).clamp(min=1))
    return mask / num_rows


def update_policy(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[MicroBatch],
    training: TrainingSettings,
    world: World,
    logger: Logger,
) -> tuple[dict[str, float], dict[str, Tensor], int]:
    """One step's update; returns metrics, more as (sum, count) of this rank, and optimizer steps.

    A loss or gradient that is not finite ends the update before its optimizer step. If there is
    nothing to train on there is none: AdamW would move the weights even with a gradient of 0.
    """
    if not micro_batches:
        return {}, {}, 0
    policy.model.train()
    sums, num_updates, num_passes = {}, 0, len(micro_batches) * training.num_iterations
    in_ddp = isinstance(policy.scorer, DistributedDataParallel)  # its buckets hold the gradients
    with logger.progress(num_passes, "update", "batch") as bar:
        for _ in policy.loss_scale.tries(training.num_iterations):  # one each, but for float16
            optimizer.zero_grad(set_to_none=not in_ddp)
            loss = 0.0
            for micro_batch in micro_batches:
                # DDP averages gradients over the ranks in backward(). Once is enough, at the last
                # micro-batch: until then they add up on each rank. A shard averages each time.
                waits = in_ddp and micro_batch is not micro_batches[-1]
                with policy.scorer.no_sync() if waits else contextlib.nullcontext():
                    loss += accumulate_gradient(policy, micro_batch, training, sums)
                bar.update(1)
            policy.loss_scale.unscale_(optimizer)  # 1, but for float16
            grad_norm = nn.utils.clip_grad_norm_(policy.model.parameters(), training.max_grad_norm)
            loss = world.sum([loss / world.size]).item()  # the weights carry world.size
            metrics = {"train/loss": loss, "train/grad_norm": grad_norm.item()}
            if policy.loss_scale.was_too_high(*metrics.values()):
                continue  # float16 only: it is halved now, and the same update tried again
            if not all(map(math.isfinite, metrics.values())):
                break
            optimizer.step()
            num_updates += 1
    optimizer.zero_grad(set_to_none=not in_ddp)
    policy.refresh_sampler()
    return metrics, sums, num_updates


def accumulate_gradient(
    policy: Policy, batch: MicroBatch, training: TrainingSettings, sums: dict[str, Tensor]
) -> Tensor:
    """Add the gradient of one micro-batch to the weights'; returns its loss.

    The first pass over a micro-batch is plain REINFORCE; if others follow, they compare with it.
    """
    rows, temperature = (batch.input_ids, batch.completion_mask), policy.params.temperature
    log_probs = policy.scorer(*rows, temperature=temperature)  # (B, S)
    token_loss, weights = -batch.advantages[:, None] * log_probs, batch.token_weights  # (B, S)
    measured = {"train/clip_frac": torch.zeros_like(log_probs)}  # of REINFORCE, which clips nothing
    is_first = batch.old_log_probs is None
    if is_first:
        batch.old_log_probs = log_probs.detach()
        measured["train/sampler_mismatch"] = (batch.old_log_probs - batch.sampler_log_probs).abs()
        if policy.reference is not None:
            with torch.no_grad():
                batch.ref_log_probs = policy.reference(*rows, temperature=temperature)
    if not training.is_plain:  # a ratio, a KL penalty, importance weights: all off by default
        token_loss, weights, more = apply_options(training, batch, log_probs, token_loss, is_first)
        measured |= more
    for name, values in measured.items():
        add_to_mean(sums, name, values, batch.token_weights > 0)
    loss = (weights * token_loss).sum()
    policy.loss_scale.scale(loss).backward()
    return loss.detach().double()


class CompletionScorer(nn.Module):
    """log pi of completions. It is an nn.Module because DDP wraps the forward of a module."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype, *, in_blocks: bool):
        """`in_blocks` where all logits of a micro-batch would be large (engine/run/load.py)."""
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.in_blocks = in_blocks

    def forward(self, input_ids: Tensor, mask: Tensor, *, temperature: float) -> Tensor:
        """Log-probabilities (B, S) of the tokens input_ids (B, S) where the mask is True, else 0.

        They are those of softmax(logits / temperature), the distribution that was sampled. Rows are
        padded on the right, where no token looks: attention is causal and needs no mask.
        """
        if self.in_blocks:  # the same numbers, but never all logits at once: engine/update/head.py
            return score_in_blocks(self.model, input_ids, mask, self.compute_dtype, temperature)
        # What the model computes at a column predicts the token in the next one.
        columns = mask[:, 1:].any(dim=0).nonzero()[:, 0]  # (K,), before a token that is scored
        token_ids, mask_there = input_ids[:, columns + 1], mask[:, columns + 1]  # (B, K)
        with autocast(input_ids.device, self.compute_dtype, cache_casts=False):
            output = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=columns)
        log_probs = token_log_probs(output.logits, token_ids, temperature=temperature)
        scored = log_probs.new_zeros(mask.shape)
        return scored.index_copy(1, columns + 1, log_probs.masked_fill(~mask_there, 0.0))


def token_log_probs(logits: Tensor, token_ids: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of the given tokens; (B, K, V) and (B, K) to (B, K)."""
    logits = logits.float() / temperature
    chosen = logits.gather(-1, token_ids[..., None])[..., 0]
    return chosen - logits.logsumexp(dim=-1)


# Evaluation


def evaluate(run: Run) -> None:
    """Measure the policy on all validation questions, log that, and keep it if it is the best."""
    config, world, state, logger = run.config, run.world, run.state, run.logger
    clock = Clock()
    with clock("eval"):
        groups = sample_validation(run)
        metrics = evaluation_metrics(groups, run.task, config.validation, world)
    metrics |= clock.read()
    log_evaluation(run, metrics, groups)
    state.note_evaluation(metrics, best_metric=config.validation.best_metric)  # sets last
    is_broken = count_broken(groups, world, logger.warning) > 0  # then metrics mean nothing
    is_best = not is_broken and (state.best is None or state.last > state.best)
    if is_best and save_best(run, metrics):  # writes best/; False if it could not
        state.best, state.best_step = state.last, state.step


def sample_validation(run: Run, *, is_greedy: bool = False) -> list[list[Trajectory]]:
    """Completions of this rank's share of the validation questions: rank, rank + size and so on.

    Every question has its own fixed randomness, so evaluating changes nothing in training, and two
    evaluations differ by the policy alone. `is_greedy` asks for one completion, at temperature 0.
    """
    policy, config, validation = run.policy, run.config, run.config.validation
    mine = range(run.world.rank, len(run.validation_questions), run.world.size)
    questions = [run.validation_questions[i] for i in mine]
    seeds = [(SeedWord.VALIDATION, i) for i in mine]
    params = replace(
        policy.params,
        temperature=0.0 if is_greedy else validation.temperature,
        max_new_tokens=config.max_validation_tokens,
        group_size=1 if is_greedy else validation.best_of_n,
    )
    return sample_trajectories(
        policy, run.task, config, questions, seeds, params, Clock(), run.logger
    )


if __name__ == "__main__":
    main()
