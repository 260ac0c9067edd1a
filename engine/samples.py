"""samples.jsonl: a few completions of each evaluation, and of training if that is wanted."""

from engine.run import Run
from engine.types import Trajectory


def first_samples(
    run: Run, groups: list[list[Trajectory]], questions: list[dict], *, split: str
) -> list[dict]:
    """The first completion of each of some groups of trajectories, as samples.jsonl keeps it.

    With fewer groups than `logging.samples` the second completions follow, and so on. Where the
    groups' `questions` have no key `answer`, the gold answer is the question: Countdown's numbers.
    """
    read = getattr(run.task, "extract_answer", lambda *_, options: None)
    numbered = zip(*groups, strict=True)  # the first completion of each group, then the second
    pairs = [pair for some in numbered for pair in zip(some, questions, strict=True)]
    return [
        {
            "split": split,
            "prompt": run.policy.tokenizer.decode(trajectory.prompt_ids),
            "completion": trajectory.text,
            "gold": question.get("answer", question),
            "answer": read(trajectory.text, question, options=run.config.task),
            "reward": trajectory.reward,
            "reward_parts": trajectory.reward_parts,
            "truncated": trajectory.completion.truncated,
            "tokens": len(trajectory.completion.token_ids),
        }
        for trajectory, question in pairs[: run.config.logging.samples]
    ]


def training_samples(run: Run, groups: list[list[Trajectory]], questions: list[dict]) -> list[dict]:
    """Print and return the first completions of a step that are wanted, if any are."""
    every, step = run.config.logging.train_samples_every, run.state.step
    if every == 0 or step % every != 0:
        return []
    samples = first_samples(run, groups, questions, split="train")
    run.logger.print_samples(f"training completions of step {step}", samples)
    return samples


def validation_samples(run: Run, groups: list[list[Trajectory]]) -> list[dict]:
    """The same of this rank's share of the validation questions."""
    mine = run.validation_questions[run.world.rank :: run.world.size]
    return first_samples(run, groups, mine, split="validation")
