"""What a run warns of when it cannot learn: one line each, once, with the key to turn.

The lines are kept in remarks.jsonl, from which tools.report shows them.
"""

import torch

from engine.core.files import json_line, read_lines
from engine.core.tensors import local
from engine.core.types import Groups, Metrics, Questions
from engine.questions.rewards import default_weights
from engine.run.state import Run
from engine.update.optimizer import learning_rate_at

FEW_STEPS = 3  # before a run says that a group, or a part, teaches nothing
ALIKE_GROUPS = 32
# What a weight changes by at least to be another number, as a share of it
ROUNDING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-9, torch.float32: 1e-7}


def remark(run: Run, kind: str, line: str) -> None:
    """Warn of this kind of thing, if the run has not yet."""
    if run.world.is_main:
        said = [row["kind"] for row in read_lines(run.folder / "remarks.jsonl")]
        if kind not in said:
            run.logger.warning(line)
            row = {"step": run.state.step, "kind": kind, "line": line}
            run.logger.log_lines("remarks.jsonl", json_line(row))


def remark_at_start(run: Run) -> None:
    """On learning rates that move nothing."""
    training = run.config.training
    dtype = run.policy.compute_dtype
    if training.optimizer == "muon" or run.config.model.lora:
        return  # Muon's step has another size, and half of an adapter is 0
    weights = map(local, run.trained_weights)
    some = torch.cat([p.detach().flatten()[:: 1 + p.numel() // 10_000] for p in weights])
    median = some.abs().float().median().item()
    # AdamW moves a weight by its rate at most; SmolLM2 learned well by a tenth of a rounding.
    total = sum(learning_rate_at(step, training) for step in range(1, training.num_steps + 1))
    least = ROUNDING.get(dtype, 0.0) * median
    if total < least / 100:
        remark(
            run,
            "rate",
            f"all learning rates together, {total:.1e}, are less than 1% of what half of the "
            f"weights are rounded by in {str(dtype).removeprefix('torch.')}, {least:.1e}: raise "
            "training.learning_rate",
        )


def remark_on_step(run: Run, metrics: Metrics, questions: Questions, groups: Groups) -> None:
    """On parts that are paid but weigh 0, equal rewards, another sampler, and completions."""
    for part, weight in run.config.task.reward_weights.items():
        is_unpaid = weight == 0 and metrics.get(f"train/part_{part}", 0) != 0
        if is_unpaid and part not in default_weights(run.task.functions):
            remark(
                run,
                f"weight of {part}",
                f"the part {part} of the reward weighs 0: set "
                f"task.reward_weights='{{{part}: 1.0}}'",
            )
    if run.task.functions and (num := run.task.num_open) > 1_000:
        remark(
            run,
            "tasks",
            f"async functions of task.reward have left {num:,} tasks open: a step should await or "
            "cancel what it begins, but for a few that serve all steps",
        )
    run.num_alike += len(groups) * run.world.size
    if metrics["train/zero_advantage_frac"] < 1 or run.config.training.learning_type != "grpo":
        run.num_alike = -1_000_000_000  # something can be learned
    trajectory = groups[0][0]
    if run.num_alike >= ALIKE_GROUPS and run.state.step >= FEW_STEPS:
        remark(
            run,
            "alike",
            f"every group's rewards were equal so far, the last {trajectory.reward:g}: nothing can "
            f"be learned from that; a completion ends with {trajectory.text[-60:]!r}: look at "
            "task.reward, task.prompt and training.max_new_gen_tokens",
        )
    is_exact = run.policy.compute_dtype == torch.float32
    if (gap := metrics.get("train/sampler_mismatch", 0)) > (0.01 if is_exact else 0.1):
        remark(
            run,
            "mismatch",
            f"sampler and trainer disagree by {gap:.2g} nats a token, where rounding makes "
            f"{'1e-6' if is_exact else '0.01'}: is it the same model, temperature and mask?",
        )
    remark_on_completions(run, metrics, "train", questions, groups)


def remark_on_completions(
    run: Run, metrics: Metrics, split: str, questions: Questions, groups: Groups
) -> None:
    """On completions that were cut off, and on rewards that came too late or for nothing."""
    is_chat = run.policy.tokenizer.chat_template is not None
    is_cut = metrics[f"{split}/truncated_frac"] > 0.5
    if is_chat and questions and is_cut and isinstance(run.task.pose(questions[0]), str):
        remark(
            run,
            "plain text",
            "most completions were cut off, and this chat model was given plain text: "
            "task.prompt='{prompt}' makes a user's message of it",
        )
    if (share := metrics.get(f"{split}/reward_timeouts", 0)) > 0.1:
        remark(
            run,
            "timeouts",
            f"{share:.0%} of the rewards took too long and did not count: raise "
            "task.reward_timeout, or lower task.concurrency",
        )
    for question, group in zip(questions, groups, strict=True):
        parts = [t.reward_parts.items() for t in group]  # timeout 0 says that nothing was late
        if any(all(x is None for name, x in of if (name, x) != ("timeout", 0)) for of in parts):
            remark(
                run,
                "unpaid",
                f"no function of task.reward applied to the question {question!r:.200}: its reward "
                "is 0",
            )


def remark_on_evaluation(run: Run, metrics: Metrics, questions: Questions, groups: Groups) -> None:
    """On answers that are never right, in part or of an untrained model; completions and parts."""
    remark_on_completions(run, metrics, "eval", questions, groups)
    if run.world.is_main and run.state.step >= FEW_STEPS:
        remark_on_parts(run)
    if metrics["eval/pass@1"] == 0 and "eval/part_answer" in metrics:
        if metrics["eval/part_answer"] > 0:
            remark(
                run,
                "partly",
                "the part answer was above 0 and never 1, so nothing counts as solved: let it pay "
                "1 for what is right, or set validation.best_by=reward",
            )
        elif run.state.step == 0 and run.logger.folder:  # not as it imitates
            remark(
                run,
                "unsolved",
                "the model solves no validation question, so little can be learned from answers: "
                "begin with easier questions, or imitate answers first (python -m tools.imitate)",
            )


def remark_on_parts(run: Run) -> None:
    """On a part that no completion has earned in training, while another part moved.

    Only of `answer`, if the reward has it: others may be penalties that are never due.
    """
    rows = read_lines(run.folder / "metrics.jsonl")
    means = {}
    for part, weight in run.config.task.reward_weights.items():
        values = [row[f"train/part_{part}"] for row in rows if f"train/part_{part}" in row]
        if weight != 0 and values:
            means[part] = values
    moved = [f"{x} ({m[0]:.3g} to {m[-1]:.3g})" for x, m in means.items() if len({*m}) > 1]
    for part in ["answer"] if "answer" in means else means:
        if moved and not any(means[part]) and run.config.training.learning_type != "distill":
            remark(
                run,
                f"zero {part}",
                f"the part {part} of the reward was 0 in all {len(means[part])} steps, so it "
                f"teaches {' and '.join(moved)} alone: look at completions in samples.jsonl, then "
                "at task.reward and the questions",
            )


def remark_at_end(run: Run) -> None:
    """On a run of which no step has trained, and on evaluations that choose nothing."""
    if not run.state.has_trained:
        remark(
            run,
            "untrained",
            "no step has trained the model: look at train/reward_std, then at task.reward and "
            "training.learning_rate",
        )
    elif run.world.is_main:
        metric = run.config.best_metric
        rows = read_lines(run.folder / "metrics.jsonl")
        scores = [row[metric] for row in rows if row.get(metric) is not None]
        if len(scores) > 2 and len(set(scores)) == 1:
            remark(
                run,
                "evaluations",
                f"all {len(scores)} evaluations have the same {metric.removeprefix('eval/')}, so "
                "best/ is the model of the first: let validation.best_by choose by another",
            )
