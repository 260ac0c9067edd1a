"""What the files of completions hold: completions.jsonl, and rollouts.jsonl for tools.report.

Both are of some steps. completions.jsonl has all completions of such a step, in the order of the
batch. rollouts.jsonl has a few groups of it, with the numbers of each token.

Sampling and the update have computed all these numbers anyway. A line of rollouts.jsonl is a group:

    step, prompt, gold    the group's question, shortened if it is very long
    size                  how many completions were sampled
    completions           best reward first; of a large group only the best and the worst. Each has
                          reward, reward_parts, solved, truncated and:
        advantage         of the completion against its group
        weight            of each of its tokens in the loss; 0 if the update left the row out
        tokens            their texts; joined, they are the completion and its end-of-sequence token
        log_probs         of each token under softmax(logits / temperature), as it was sampled
        entropies         of that distribution, in nats
        inserted          positions of a tool's tokens; their log_probs and entropies are 0
        gap               [position, number] of tokens left out of the middle of a long completion

The update makes a sampled token likelier if advantage * weight is above 0, and less likely below 0.
It is minus the loss's derivative by the log-probability in the first pass, without KL and tis_clip.
"""

from collections.abc import Iterator

import numpy as np
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from engine.core.types import Groups, Questions, Trajectory

HEAD = 384  # tokens kept of a longer completion
TAIL = 128


def completion_rows(step: int, questions: Questions, groups: Groups) -> Iterator[dict]:
    """The rows of completions.jsonl for this rank's completions of a step."""
    for question, group in zip(questions, groups, strict=True):
        for t in group:
            yield {
                "step": step,
                "question": question,
                "text": t.text,
                "reward": t.reward,
                "parts": t.reward_parts,
                "advantage": t.advantage,
                "tokens": len(t.completion.token_ids),
                "truncated": t.completion.truncated,
            }


def completion_record(
    trajectory: Trajectory, tokenizer: PreTrainedTokenizerFast, weights: dict[int, float]
) -> dict:
    """What the file keeps of a trajectory; if it is not in `weights`, the update left it out."""
    completion = trajectory.completion
    ids = completion.token_ids
    num_tokens = len(ids)
    is_long = num_tokens > HEAD + TAIL
    parts = [slice(HEAD), slice(num_tokens - TAIL, None)] if is_long else [slice(None)]
    kept = np.concatenate([np.arange(num_tokens)[part] for part in parts])
    numbers = np.stack([completion.log_probs, completion.entropies])[:, kept].astype(float)
    log_probs, entropies = (numbers.round(3) + 0.0).tolist()  # + 0.0 makes 0.0 of -0.0
    record = {
        "reward": rounded(trajectory.reward),
        "reward_parts": {name: rounded(part) for name, part in trajectory.reward_parts.items()},
        "solved": trajectory.is_solved,
        "truncated": completion.truncated,
        "advantage": rounded(trajectory.advantage),
        "weight": rounded(weights.get(id(trajectory), 0.0)),
        "tokens": [text for part in parts for text in token_texts(ids[part], tokenizer)],
        "log_probs": log_probs,
        "entropies": entropies,
        "inserted": completion.is_inserted[kept].nonzero()[0].tolist(),
    }
    if is_long:
        record["gap"] = [HEAD, num_tokens - HEAD - TAIL]
    return record


def token_texts(ids: list[int], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Each token's text; of those that make one character, the last has it and the others ""."""
    stream = DecodeStream(skip_special_tokens=False)
    texts = [stream.step(tokenizer.backend_tokenizer, token_id) or "" for token_id in ids]
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    rest = decoded[len("".join(texts)) :]  # half a character at the end
    return [*texts[:-1], *(text + rest for text in texts[-1:])]


def rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")
