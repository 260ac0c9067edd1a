"""samples.jsonl: a few completions of each evaluation, and of training if that is wanted."""

from types import ModuleType

from transformers import PreTrainedTokenizerFast

from engine.config import TaskSettings
from engine.types import Trajectory


def first_samples(
    groups: list[list[Trajectory]],
    questions: list[dict],
    task: ModuleType,
    options: TaskSettings,
    tokenizer: PreTrainedTokenizerFast,
    *,
    split: str,
    limit: int,
) -> list[dict]:
    """The first completion of each of some groups of trajectories, as samples.jsonl keeps it.

    With fewer groups than `limit` the second completions follow, and so on. Where the groups'
    `questions` have no key `answer`, the gold answer is the question: Countdown's numbers.
    """
    read = getattr(task, "extract_answer", lambda *_, options: None)
    numbered = zip(*groups, strict=True)  # the first completion of each group, then the second
    pairs = [pair for some in numbered for pair in zip(some, questions, strict=True)]
    return [
        {
            "split": split,
            "prompt": tokenizer.decode(trajectory.prompt_ids),
            "completion": trajectory.text,
            "gold": question.get("answer", question),
            "answer": read(trajectory.text, question, options=options),
            "reward": trajectory.reward,
            "reward_parts": trajectory.reward_parts,
            "truncated": trajectory.completion.truncated,
            "tokens": len(trajectory.completion.token_ids),
        }
        for trajectory, question in pairs[:limit]
    ]
