"""Teach a language model to reason by reinforcement learning, GRPO and SIL: the program.

    torchrun --nproc-per-node=2 main.py                                 # the default, on a laptop
    torchrun --nproc-per-node=4 main.py --config configs/countdown-qwen2.5-3b.yaml
    python main.py training.num_steps=5 training.learning_rate=1e-4     # any key, on one process

plain.py is the algorithm alone, in one file: read that first. This computes the same, faster, and
resumes, keeps the best model, and has more tasks and losses. One step (`run_training` is the loop):

    1. take N questions and sample G completions of each: the groups
    2. a rule says what each completion earns: the reward
    3. grpo (default): advantage = reward - mean reward of its group (GRPO, arXiv:2402.03300,
       without the division by the standard deviation: Dr. GRPO, arXiv:2503.20783)
       sil (self-improvement learning): advantage = 1 for the k best completions of each group,
       which are imitated; the rest is dropped
    4. loss = -(sum of advantage * log-probability of all sampled tokens) / (rows * length limit)
    5. one optimizer step on that loss
    6. before the next step, if one is due, an evaluation; the best model is kept

Rows are the batch's completions (of sil the k best), of all ranks. There is no critic and, with one
update per batch, no ratio and no clipping. Functions stand below their callers. `generate` shows
how any model samples; the default draws the same tokens faster, in engine/sampling/grouped.py.
Rewards are the task's (countdown.py). What is off by default is imported only where it is used.

Shapes: N questions, G completions each, B rows of a micro-batch, P longest prompt, S longest prompt
with its completion, K columns that are scored, V vocabulary. Masks are bool, True = keep.
"""

import contextlib
import sys
from dataclasses import replace

from engine.run.config_file import check_files, load_config
from engine.run.mistakes import crashes_name_the_fix, mistakes_cost_one_line

if __name__ == "__main__":  # a mistake and --help are answered before torch is imported
    with mistakes_cost_one_line():
        CONFIG = load_config(sys.argv[1:])
        check_files(CONFIG)

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import GenerationConfig

from engine.core.config import Config, TrainingSettings
from engine.core.distributed import World, init_world
from engine.core.measures import Clock, add_to_mean, reduce_means
from engine.core.tensors import autocast, left_pad, pack, right_pad, seeded
from engine.core.types import (
    Completion,
    Groups,
    Log,
    Metrics,
    MicroBatch,
    Progress,
    Prompts,
    Questions,
    SamplingParams,
    Seed,
    SeedWord,
    Trajectory,
)
from engine.model.policy import Policy, load_policy
from engine.questions.contract import Task
from engine.questions.data import load_questions
from engine.questions.prompts import completion_text, make_prompts
from engine.questions.rewards import reward_parts, total_reward
from engine.questions.tasks import load_task
from engine.report.metrics import evaluation_metrics
from engine.run.checkpoint import save_best, save_checkpoint
from engine.run.log import finish, log_evaluation, log_step, report_evaluation, step_metrics
from engine.run.start import open_or_resume, settle_config
from engine.run.state import Run
from engine.sampling.batches import decode_in_batches
from engine.sampling.draw import DrawingProcessor
from engine.update.optimizer import Outcome, Update, make_optimizer, set_learning_rate
from logger import Logger


def main(config: Config) -> None:
    """Do what the config asks for; a user's mistake costs one line and exit status 2."""
    with mistakes_cost_one_line():
        run = build_run(config)
        if config.is_training:
            open_or_resume(run)  # its newest checkpoint has weights, optimizer, state, position
    with crashes_name_the_fix(run):
        exit_status = run_training(run) if config.is_training else run_evaluation(run)
        run.policy.scorer = None  # frees DDP, which must not outlive the process group
        run.world.leave()
    sys.exit(exit_status)


def build_run(config: Config) -> Run:
    """Load what the config names on this rank; `open_or_resume` then reads what it did before."""
    world = init_world()  # rank, number of ranks, this rank's device
    logger = Logger(rank=world.rank)  # `settle_config` gives it the boards of logging.report_to
    config = settle_config(config, world, logger)  # fills in what it leaves open
    task = load_task(config.task)
    # policy.model is an AutoModelForCausalLM; what is trained of it, and AdamW's moments, are fp32.
    # It computes in bf16 or float16 on a GPU, in fp32 on most CPUs. policy.sampler is the model
    # itself in fp32 and with LoRA; else a copy in 16 bits, refreshed after each update.
    policy = load_policy(config, world, logger.info)
    logger.info(f"a completion ends at {policy.end_tokens}")
    validation, stream = load_questions(
        task, config, policy.tokenizer, policy.context_length, logger.info
    )
    run = Run(config, world, logger, task, policy, validation, stream)
    run.check_questions()  # at least one for each rank, and the same list on all of them
    if config.is_training:  # num_epochs, if it was given, becomes num_steps
        run.config = config = config.with_num_steps(len(stream.questions), world.size)
        wrap_policy(policy, config, world, logger.info)
        run.optimizer = make_optimizer(policy.model, config.training)
    return run


def wrap_policy(policy: Policy, config: Config, world: World, log: Log) -> None:
    """Make the scorer of log-probabilities, and wrap it in DDP."""
    scorer_class = CompletionScorer
    if policy.has_large_logits(config, world.device, log):  # made block by block then
        from engine.update.head import ChunkedScorer as scorer_class
    policy.scorer = scorer_class(policy.model, policy.compute_dtype)
    if config.training.has_reference:  # a second, frozen model: off by default
        policy.reference = scorer_class(policy.reference_model(config), policy.compute_dtype)
    if config.model.shard:  # off by default: each rank has a part of the model
        policy.shard(world)
    elif world.size > 1:  # each has the whole model; DDP averages gradients in the backward pass
        policy.scorer = DistributedDataParallel(
            policy.scorer, forward_sync_buffers=False, gradient_as_bucket_view=True
        )


# The run


def run_training(run: Run) -> int:
    """The whole algorithm, in one loop; returns the exit status."""
    config = run.config
    world = run.world
    state = run.state
    questions_per_step = config.questions_per_step(world.size)  # of all ranks
    per_rank = questions_per_step // world.size
    world.signals.start()  # Ctrl-C or SIGTERM: finish the step, save, leave; a second: at once
    while True:
        if run.is_evaluation_due:  # first, last, each validation.every; not twice, nor if signalled
            with run.left_at_signal():  # `stop_signal` is then set, and nothing of it is kept
                evaluate(run)
        if run.is_checkpoint_due:  # each checkpoint.every steps, at the end, and after a signal
            save_checkpoint(run)
        if run.is_over or world.stop_signal:
            return finish(run)  # all is saved: it says what was reached, and gives the exit status
        run.check_skipped_steps()  # FloatingPointError after too many in a row were not finite
        clock = Clock()
        with clock("step"):
            # A position counts the questions since the run's start: it is new in each epoch.
            taken, next_position = run.stream.take(state.position, questions_per_step)
            mine = taken[world.rank * per_rank :][:per_rank]  # this rank's (position, question)
            questions = [question for _, question in mine]
            seeds = [(SeedWord.TRAINING, config.training.seed, position) for position, _ in mine]
            groups = sample_trajectories(run, questions, seeds, run.policy.params, clock)
            assign_advantages(groups, config.training)
            # Only LoRA dropout is random here (a model's own is 0): a resumed run repeats it.
            with clock("update"), seeded(seeds, world.device):
                update = update_policy(run, groups)
        run.end_step(update, next_position)  # counts it, also if nothing was updated
        metrics = step_metrics(run, groups, update, clock)  # means over all ranks, times
        log_step(run, metrics, questions, groups, update)
        world.ask_whether_to_stop()  # sets `stop_signal` on all ranks if one was sent a signal


# Rollouts


def sample_trajectories(
    run: Run, questions: Questions, seeds: list[Seed], params: SamplingParams, clock: Clock
) -> Groups:
    """Sample a group of completions for each question, with their rewards.

    The random numbers of a question follow from its seed, whatever the batch that it is in, the
    rank, or what was sampled before. In another batch rounding may differ, and so, rarely, a token.
    """
    policy = run.policy
    task = run.task
    prompts = make_prompts(policy, task, questions, seeds, params, clock)  # ids, seeds
    with clock("rollout"):  # by sampling.backend: grouped, `generate` (below) or vLLM
        groups = decode_in_batches(
            policy.sampler,
            prompts,
            params,
            run.config.sampling.max_batch_tokens,
            run.logger,
            generate=generate,
        )
    with clock("reward"):
        limit = params.max_new_tokens
        return compute_rewards(policy, task, questions, prompts.token_ids, groups, limit)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Prompts,
    seeds: list[Seed],
    params: SamplingParams,
    *,
    on_progress: Progress,
    streamer: object | None = None,
) -> list[Completion]:
    """A group of completions of each prompt, in one list, by any model; `streamer` gets tokens."""
    prompt_ids, prompt_mask = left_pad(prompts, params.pad_id, model.device)  # (N, P)
    # All backends draw in engine/sampling/draw.py: a question's seed gives each token of each of
    # its completions a uniform number, and drawn is the first token whose cumulative probability
    # exceeds it, in softmax(logits / temperature), cut by top_p and top_k; at temperature 0 the
    # likeliest. DrawingProcessor sets the others' logits to -inf: transformers' own draw has no
    # choice. `seeded` restores torch's generator behind it.
    drawing = DrawingProcessor(seeds, params, model.device)
    with seeded(seeds, model.device):
        model.generate(
            prompt_ids,
            attention_mask=prompt_mask,
            generation_config=get_generation_config(params),
            logits_processor=drawing.processors,
            stopping_criteria=drawing.stopping_criteria,
            streamer=streamer,
        )
    completions = drawing.drawn.completions()  # what generate returns lacks their log-probabilities
    on_progress(len(completions))
    return completions


def get_generation_config(params: SamplingParams) -> GenerationConfig:
    """A fresh generation config: nothing of the hub's leaks into sampling.

    transformers fills what is None here from the model's own generation config, which is emptied
    at load, and then from defaults. Of those top_k (50) alone would cut the distribution.
    """
    return GenerationConfig(
        do_sample=True,  # without it generate refuses several samples of a prompt
        max_new_tokens=params.max_new_tokens,
        top_k=0,  # all tokens: draw.py has drawn
        num_return_sequences=params.group_size,
        # An environment may reply after an end token: then the stopping criteria alone end a row.
        eos_token_id=[] if params.conversations else list(params.eos_ids),
        pad_token_id=params.pad_id,
    )


# Rewards and advantages


def compute_rewards(
    policy: Policy,
    task: Task,
    questions: Questions,
    prompts: Prompts,
    groups: list[list[Completion]],
    limit: int,
) -> Groups:
    """The completions, of `limit` tokens at most, as text, each with the weighted sum it earns."""
    texts = [[completion_text(c, policy.tokenizer) for c in group] for group in groups]
    parts = reward_parts(task, texts, questions, groups, limit)  # parts[i][j]: by name
    rewarded = [[] for _ in groups]
    for i, group in enumerate(groups):
        for j, completion in enumerate(group):
            reward = total_reward(parts[i][j], task.options.reward_weights)
            rewarded[i].append(Trajectory(prompts[i], completion, texts[i][j], parts[i][j], reward))
    return rewarded


def assign_advantages(groups: Groups, training: TrainingSettings) -> None:
    """Set each trajectory's advantage, and whether it is in the batch that is trained on."""
    rewards = torch.tensor([[t.reward for t in group] for group in groups], dtype=torch.float64)
    in_batch = torch.ones_like(rewards, dtype=torch.bool)
    if training.learning_type == "sil":
        # The k best of every group, even if all rewards are equal, right or wrong: to leave those
        # groups out would drop the questions that the policy always solves.
        in_batch = k_best_mask(rewards, k=training.num_best)
        advantages = in_batch.double()
    elif training.advantage in ("mean", "zscore"):
        advantages = grpo_advantages(rewards, divide_by_std=training.advantage == "zscore")
    elif training.advantage == "over_mean":
        from engine.update.advantages import over_mean

        advantages = over_mean(rewards)
    else:  # a function of the user's own
        from engine.update.user_algorithm import own_advantages

        advantages = own_advantages(training.advantage, rewards, groups)
    for i, group in enumerate(groups):
        for j, trajectory in enumerate(group):
            trajectory.advantage = advantages[i, j].item()
            trajectory.in_batch = bool(in_batch[i, j])


def grpo_advantages(rewards: Tensor, *, divide_by_std: bool) -> Tensor:
    """How much better each completion is than the mean of its group; (N, G) to (N, G).

    GRPO (arXiv:2402.03300) divides by the group's standard deviation (here with n - 1, plus 1e-4);
    Dr. GRPO (arXiv:2503.20783) does not: dividing weighs very easy and very hard questions more.
    """
    advantages = rewards - rewards.mean(dim=1, keepdim=True)
    if divide_by_std:
        advantages = advantages / (rewards.std(dim=1, keepdim=True) + 1e-4)
    is_equal = rewards.amax(dim=1) == rewards.amin(dim=1)  # a rounded mean would not give exactly 0
    return advantages.masked_fill(is_equal[:, None], 0.0)


def k_best_mask(rewards: Tensor, *, k: int) -> Tensor:
    """True for the k highest rewards of each group (N, G); ties go to the lower sample index."""
    order = rewards.argsort(dim=1, descending=True, stable=True)
    return torch.zeros_like(rewards, dtype=torch.bool).scatter(1, order[:, :k], True)


# The update


def update_policy(run: Run, groups: Groups) -> Update:
    """The optimizer's step, or `num_iterations` steps (1 by default), on these groups.

    There is none if a completion, loss or gradient is not finite or overflows float16, nor if there
    is nothing to train on: AdamW moves weights even at a gradient of 0. The outcome says which.
    """
    policy = run.policy
    optimizer = run.optimizer
    training = run.config.training
    set_learning_rate(optimizer, run.state.step + 1, training)
    if run.count_broken(groups) > 0:  # of all ranks: their logits were not finite
        return Update(Outcome.BROKEN)
    micro_batches = make_micro_batches(groups, training, run.world, run.micro_batch_tokens)
    if not micro_batches:  # no rank has a row to train on
        return Update(Outcome.NOTHING_TO_TRAIN_ON)
    if run.config.model.shard:  # off by default: all ranks then need equally many passes
        from engine.update.shards import equal_passes

        micro_batches = equal_passes(micro_batches, run.world)  # some have weight 0
    update = Update(Outcome.NOTHING_TO_TRAIN_ON, micro_batches)  # until one is known
    metric_sums = {}
    scaler = policy.grad_scaler  # for float16; otherwise it does nothing
    policy.model.train()  # the sampler calls eval()
    for _ in range(training.num_iterations):
        loss = accumulate_gradients(run, micro_batches, metric_sums)
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(policy.model.parameters(), training.max_grad_norm).item()
        update.metrics |= {"train/loss": loss, "train/grad_norm": norm}
        outcome = Outcome.of(loss, norm, scaler, training)  # UPDATED: both finite, and norm not 0
        if outcome is Outcome.UPDATED:
            scaler.step(optimizer)
            update.moved_weights = True  # and stays so if a later iteration is broken
        scaler.update()  # halves the scale after an overflow, doubles it after many steps without
        optimizer.zero_grad(set_to_none=not policy.is_in_ddp)  # DDP's views are kept, zeroed
        update.outcome = outcome
        if outcome is not Outcome.UPDATED:
            break
    policy.sampler.refresh()  # the copy that samples, if there is one, takes over the weights
    update.metrics |= reduce_means(metric_sums, run.world)
    return update


def make_micro_batches(
    groups: Groups, training: TrainingSettings, world: World, max_tokens: int
) -> list[MicroBatch]:
    """What this rank trains on; empty only if no rank has anything to train on.

    The denominators: `num_rows` counts `batch`, `num_tokens` the sampled tokens of `kept`. Passes
    are made of `trained`: rows of advantage 0 have no gradient (but by a KL penalty).
    """
    batch = [t for group in groups for t in group if t.in_batch]
    kept = [t for t in batch if not (training.skip_truncated and t.completion.truncated)]
    trained = [t for t in kept if t.advantage != 0.0 or training.trains_all_rows]
    num_rows, num_tokens, num_trained = world.sum(
        [len(batch), sum(t.completion.num_sampled for t in kept), len(trained)]
    ).tolist()
    if num_trained == 0:
        return []
    if not trained:  # DDP needs a backward pass from each rank: a placeholder, of weight 1 / inf
        trained = batch[:1]
        num_rows = num_tokens = torch.inf
    return [
        make_micro_batch(rows, training, world.device, num_rows=num_rows, num_tokens=num_tokens)
        for rows in pack(trained, max_tokens)
    ]


def make_micro_batch(
    trajectories: list[Trajectory],
    training: TrainingSettings,
    device: torch.device,
    *,
    num_rows: float,
    num_tokens: float,
) -> MicroBatch:
    """Tensors on the device; the counts are those of the whole batch over all ranks."""
    token_ids = []
    is_sampled = []
    log_probs = []
    for t in trajectories:
        completion = t.completion
        num_prompt = len(t.prompt_ids)
        token_ids.append(t.prompt_ids + completion.token_ids)
        # End tokens are trained. What a tool has written, if any, is read only, as the prompt is.
        is_sampled.append([False] * num_prompt + (~completion.is_inserted).tolist())
        log_probs.append([0.0] * num_prompt + completion.log_probs.tolist())
    completion_mask = right_pad(is_sampled, False).to(device)  # (B, S)
    weights = token_weights(completion_mask, training, num_rows=num_rows, num_tokens=num_tokens)
    return MicroBatch(
        trajectories,
        input_ids=right_pad(token_ids, 0).to(device),
        completion_mask=completion_mask,
        advantages=torch.tensor([t.advantage for t in trajectories], device=device),
        token_weights=weights,
        sampler_log_probs=right_pad(log_probs, 0.0).to(device),
    )


def token_weights(
    mask: Tensor, training: TrainingSettings, *, num_rows: float, num_tokens: float
) -> Tensor:
    """What each token counts for in the loss, (B, S) to (B, S); 0 where the mask is False.

    The counts are of all ranks: neither their number nor the micro-batches' size matters.
    """
    mask = mask.float()
    normalization = training.loss_normalization
    if normalization == "dr_grpo":  # the default, rows * length limit: arXiv:2503.20783
        return mask / (num_rows * training.max_new_gen_tokens)
    if normalization == "token":  # DAPO, arXiv:2503.14476
        return mask / num_tokens
    if normalization == "sequence":  # GRPO, arXiv:2402.03300
        return mask / (num_rows * mask.sum(dim=1, keepdim=True).clamp(min=1))
    return mask / num_rows  # sum: plain REINFORCE


def accumulate_gradients(
    run: Run, micro_batches: list[MicroBatch], metric_sums: dict[str, Tensor]
) -> float:
    """Add up the gradient of the whole batch's loss on every rank; returns that loss.

    DDP and shards average gradients over the ranks, and ours must add up: hence `world.size`. DDP
    does so in the last micro-batch alone (`no_sync`): ranks may have unequally many.
    """
    policy = run.policy
    world = run.world
    losses = []
    for micro_batch in run.logger.progress(micro_batches, "update", "batch"):
        syncs_later = policy.is_in_ddp and micro_batch is not micro_batches[-1]
        with policy.scorer.no_sync() if syncs_later else contextlib.nullcontext():
            loss = micro_batch_loss(policy, micro_batch, run.config.training, metric_sums)
            policy.grad_scaler.scale(world.size * loss).backward()  # float16's factor, or 1
        losses.append(loss.detach())
    return world.sum([sum(torch.stack(losses).tolist())]).item()  # Python's sum: MPS has no float64


def micro_batch_loss(
    policy: Policy, batch: MicroBatch, training: TrainingSettings, metric_sums: dict[str, Tensor]
) -> Tensor:
    """One micro-batch's part of the loss, by default REINFORCE's; adds to `metric_sums`."""
    log_probs = policy.scorer(  # (B, S), 0 where the mask is False
        batch.input_ids, batch.completion_mask, temperature=policy.params.temperature
    )
    token_loss = -batch.advantages[:, None] * log_probs  # (B, S)
    weights = batch.token_weights  # (B, S), 1 / (rows of all ranks * length limit) by default
    metrics = {}
    is_first = batch.old_log_probs is None  # in the first of num_iterations
    if is_first:
        batch.old_log_probs = log_probs.detach()
        metrics["train/sampler_mismatch"] = (batch.old_log_probs - batch.sampler_log_probs).abs()
    if not training.is_reinforce:  # ratio and clip (num_iterations > 1), KL, ...: off by default
        from engine.update.losses import apply_options  # it asks the reference if `is_first`

        token_loss, weights, more = apply_options(
            training, batch, log_probs, token_loss, is_first, policy.score_by_reference
        )
        metrics |= more
    for name, values in metrics.items():
        add_to_mean(metric_sums, name, values, batch.token_weights > 0)  # no row of weight 0
    return (weights * token_loss).sum()


class CompletionScorer(nn.Module):
    """log pi of completions. It is an nn.Module because DDP wraps the forward of a module."""

    def __init__(self, model: nn.Module, compute_dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype

    def forward(self, input_ids: Tensor, mask: Tensor, *, temperature: float) -> Tensor:
        """Log-probabilities (B, S) of the tokens input_ids (B, S) where the mask is True, else 0.

        They are those of softmax(logits / temperature), the distribution that was sampled (unless
        top_p or top_k cut it, which is warned of). Rows are padded on the right, which causal
        attention never sees: no mask is needed.
        """
        # Logits at column c predict the token at c + 1. columns: those c where any row scores it.
        columns = mask[:, 1:].any(dim=0).nonzero()[:, 0]  # (K,)
        token_ids = input_ids[:, columns + 1]  # (B, K)
        with autocast(input_ids.device, self.compute_dtype, cache_casts=False):  # of weights
            output = self.model(input_ids=input_ids, use_cache=False, logits_to_keep=columns)
        log_probs = token_log_probs(output.logits, token_ids, temperature=temperature)
        log_probs = log_probs.masked_fill(~mask[:, columns + 1], 0.0)  # (B, K)
        return log_probs.new_zeros(mask.shape).index_copy(1, columns + 1, log_probs)  # (B, S)


def token_log_probs(logits: Tensor, token_ids: Tensor, *, temperature: float) -> Tensor:
    """log softmax(logits / temperature) of the given tokens; (B, K, V) and (B, K) to (B, K)."""
    logits = logits.float() / temperature
    chosen = logits.gather(-1, token_ids[..., None])[..., 0]
    return chosen - logits.logsumexp(dim=-1)


# Evaluation


def evaluate(run: Run) -> None:
    """Measure the policy on all validation questions, log that, and keep it if it is the best."""
    state = run.state
    clock = Clock()
    metrics, groups = measure_policy(run, clock)
    log_evaluation(run, metrics | clock.read(), groups)
    score = metrics[run.config.best_metric]  # higher is better
    state.remember_score(score)  # for the summary
    is_best = state.best is None or score > state.best
    # It is kept where all logits are finite and rank 0 can write it: all ranks know both.
    if run.count_broken(groups) == 0 and is_best and save_best(run, metrics):
        state.best = score
        state.best_step = state.step
    run.world.ask_whether_to_stop()


def measure_policy(run: Run, clock: Clock) -> tuple[Metrics, Groups]:
    """The metrics of all validation questions, and the completions of this rank's share."""
    run.logger.info(
        f"evaluating: {len(run.validation_questions):,} questions "
        f"x {run.config.validation.best_of_n} samples"
    )
    with clock("eval"):
        with run.world.left_by_all():  # a signal ends it at the next token, then all ranks leave
            groups = sample_validation(run)
        return evaluation_metrics(groups, run.task, run.config.validation, run.world), groups


def sample_validation(run: Run, *, is_greedy: bool = False) -> Groups:
    """Completions of this rank's share of the validation questions.

    Every question has its own fixed randomness, so evaluating changes nothing in training, and two
    evaluations differ by the policy alone. `is_greedy` asks for one completion, at temperature 0.
    """
    validation = run.config.validation
    params = replace(
        run.policy.params,
        temperature=0.0 if is_greedy else validation.temperature,
        max_new_tokens=run.config.max_validation_tokens,
        group_size=1 if is_greedy else validation.best_of_n,
    )
    mine = run.world.share(range(len(run.validation_questions)))
    questions = [run.validation_questions[i] for i in mine]
    seeds = [(SeedWord.VALIDATION, i) for i in mine]
    return sample_trajectories(run, questions, seeds, params, Clock())  # "eval" has its times


def run_evaluation(run: Run) -> int:
    """mode=evaluate: measure as training would, and greedily; returns the exit status."""
    clock = Clock()
    metrics, groups = measure_policy(run, clock)
    has_greedy = run.config.validation.temperature == 0
    greedy = groups if has_greedy else sample_validation(run, is_greedy=True)
    return report_evaluation(run, metrics | clock.read(), groups, greedy)


if __name__ == "__main__":
    main(CONFIG)
