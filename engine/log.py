"""What a run logs of a step and of an evaluation."""

from engine.rollouts_log import describe_rollouts
from engine.run import Run
from engine.samples import first_samples
from engine.types import MicroBatch, Trajectory


def rollouts_of(
    run: Run, groups: list[list[Trajectory]], questions: list[dict], micro_batches: list[MicroBatch]
) -> str:
    """The lines of rollouts.jsonl for the step that ends now; "" if it is not logged."""
    every, step = run.config.logging.rollouts_every, run.state.step + 1
    if not run.world.is_main or every == 0 or step % every != 0:
        return ""
    return describe_rollouts(
        groups,
        questions,
        micro_batches,
        run.policy.tokenizer,
        step=step,
        turn=step // every,
        num_bytes=(run.folder / "rollouts.jsonl").stat().st_size,
        num_ranks=run.world.size,
    )


def log_step(
    run: Run,
    metrics: dict[str, float],
    groups: list[list[Trajectory]],
    questions: list[dict],
    rollouts: str,
) -> None:
    """Print a step's line, and write its metrics, its rollouts and at times its samples."""
    step, every, logger = run.state.step, run.config.logging.train_samples_every, run.logger
    logger.print_step(step, run.config.training.num_steps, metrics)
    if every > 0 and step % every == 0:
        samples = samples_of(run, groups, questions, split="train")
        logger.print_samples(f"training completions of step {step}", samples)
        logger.log_samples(step, samples)
    logger.log_rollouts(rollouts)
    logger.log_metrics(step, metrics)


def log_evaluation(run: Run, metrics: dict[str, float], groups: list[list[Trajectory]]) -> None:
    """Print and write an evaluation and its first completions."""
    step, samples = run.state.step, validation_samples(run, groups)
    run.logger.print_evaluation(f"evaluation at step {step}", metrics, samples)
    run.logger.log_samples(step, samples)
    run.logger.log_metrics(step, metrics)


def validation_samples(run: Run, groups: list[list[Trajectory]]) -> list[dict]:
    """The first completions of this rank's share of the validation questions."""
    mine = run.validation_questions[run.world.rank :: run.world.size]
    return samples_of(run, groups, mine, split="validation")


def samples_of(
    run: Run, groups: list[list[Trajectory]], questions: list[dict], *, split: str
) -> list[dict]:
    tokenizer, limit = run.policy.tokenizer, run.config.logging.samples
    options = run.config.task
    return first_samples(groups, questions, run.task, options, tokenizer, split=split, limit=limit)
