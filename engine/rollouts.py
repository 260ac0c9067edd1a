"""rollouts.jsonl: a few groups of a step with each token's numbers, for `python -m tools.report`.

Every number is one that sampling and the update have computed anyway. One line is one group:

    step, prompt, gold    the group's question, shortened where it is very long
    size                  completions that were sampled; of a large group the best and worst stay
    completions           best reward first, each with reward, reward_parts, solved, truncated,
        advantage         of the completion against its group
        weight            of each of its tokens in the loss; 0 if the update left the row out
        tokens            their texts; joined, they are the completion and its end-of-sequence token
        log_probs         of each token under softmax(logits / temperature), as it was sampled
        entropies         of that distribution, in nats
        inserted          positions of tokens that the calculator wrote; their two numbers are 0
        gap               [position, number] of tokens left out of the middle of a long completion

advantage * weight is minus the derivative of the loss by a sampled token's log-probability in the
first pass (without a KL penalty, and before training.tis_clip): what is above 0 becomes likelier.
"""

import math
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.run import Run
from logger import append_durably, json_line, shorten

MAX_GROUPS = 3  # of a step
MAX_COMPLETIONS = 16  # of a group
HEAD, TAIL = 384, 128  # tokens kept of a longer completion
MAX_CHARACTERS = 4_000  # of a prompt and of a gold answer
MAX_BYTES = 16_000_000  # of the file


def log_rollouts(run: Run, groups: list[list], questions: list[dict], *, step: int) -> None:
    """Append rank 0's first groups of trajectories to rollouts.jsonl if `step` is to be kept."""
    file, every = run.folder / "rollouts.jsonl", run.config.logging.rollouts_every
    if not run.world.is_main or every == 0 or step % every != 0:
        return
    num_bytes = file.stat().st_size
    if not is_kept(step // every, num_bytes):
        return
    pairs = list(zip(groups, questions, strict=True))[:MAX_GROUPS]
    records = [group_record(run, group, question) for group, question in pairs]
    text = "".join(json_line({"step": step, **record}) for record in records)
    if num_bytes + len(text) <= MAX_BYTES:
        append_durably(file, text)


def is_kept(turn: int, num_bytes: int) -> bool:
    """Whether the turn-th of the steps that are due is kept, when the file has `num_bytes`.

    All are while the file is less than half full, then every fourth until three quarters, every
    16th until seven eighths, and so on: each of these parts covers twice as many steps as the one
    before. Nothing is deleted, so a resumed run, whose file is cut to its checkpoint's step,
    decides as the unbroken one did.
    """
    free = 1 - num_bytes / MAX_BYTES
    return free > 0 and turn % 4 ** math.floor(-math.log2(free)) == 0


def group_record(run: Run, group: list, question: dict) -> dict:
    """One line of the file, but for the step."""
    tokenizer = run.policy.tokenizer
    ordered = sorted(group, key=lambda t: -t.reward)  # ties in the order of sampling
    if len(ordered) > MAX_COMPLETIONS:
        half = MAX_COMPLETIONS // 2
        ordered = ordered[:half] + ordered[-half:]
    return {
        "prompt": shorten(tokenizer.decode(group[0].prompt_ids), MAX_CHARACTERS),
        "gold": shorten(str(question.get("answer", question)), MAX_CHARACTERS),
        "size": len(group),
        "completions": [completion_record(t, tokenizer) for t in ordered],
    }


def completion_record(trajectory: Any, tokenizer: PreTrainedTokenizerFast) -> dict:
    """What the file keeps of one of main.py's trajectories."""
    completion = trajectory.completion
    ids, num_tokens = completion.token_ids, len(completion.token_ids)
    is_long = num_tokens > HEAD + TAIL
    parts = [slice(HEAD), slice(num_tokens - TAIL, None)] if is_long else [slice(None)]
    kept = np.concatenate([np.arange(num_tokens)[part] for part in parts])
    record = {
        "reward": rounded(trajectory.reward),
        "reward_parts": {name: rounded(part) for name, part in trajectory.reward_parts.items()},
        "solved": trajectory.is_solved,
        "truncated": completion.truncated,
        "advantage": rounded(trajectory.advantage),
        "weight": rounded(trajectory.weight),
        "tokens": [text for part in parts for text in token_texts(ids[part], tokenizer)],
        "log_probs": three_decimals(completion.log_probs[kept]),
        "entropies": three_decimals(completion.entropies[kept]),
        "inserted": completion.is_inserted[kept].nonzero()[0].tolist(),
    }
    return record | ({"gap": [HEAD, num_tokens - HEAD - TAIL]} if is_long else {})


def token_texts(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """The text that each token adds to those before it; joined, they are the decoded ids.

    A token that ends inside a character adds nothing; the one that completes it adds all of it.
    The tokens before are decoded too, since some tokenizers drop the space at a text's beginning.
    """
    texts, start, done = [], 0, 0  # ids[:done] have their texts, and ids[start:done] are context
    context = ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[start:end], clean_up_tokenization_spaces=False)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and end < len(ids):
            texts.append("")
            continue
        texts.append(text[len(context) :])
        context = tokenizer.decode(ids[done:end], clean_up_tokenization_spaces=False)
        start, done = done, end
    return texts


def rounded(value: float) -> float:
    """Four significant digits."""
    return float(f"{value:.4g}")


def three_decimals(values: np.ndarray) -> list[float]:
    """Nats to a thousandth, which is what a reader can use."""
    return (np.round(values.astype(float), 3) + 0.0).tolist()  # + 0.0 makes 0.0 of -0.0
