"""Questions become prompts, of token ids, and what completes them becomes text again."""

import math
from typing import Any

from transformers import PreTrainedTokenizerFast as Tokenizer

from engine.core.measures import Clock
from engine.core.types import Completion, PromptBatch, Prompts, Questions, SamplingParams, Seed
from engine.questions.contract import Task
from engine.questions.templates import render_prompt, special_ids, tool_schemas, whole_characters


def make_prompts(
    policy: Any,  # model/policy.py's Policy
    task: Task,
    questions: Questions,
    seeds: list[Seed],
    params: SamplingParams,
    clock: Clock,
) -> PromptBatch:
    """The prompts of questions and, if the task has an Environment, their conversations."""
    if task.Environment is None:
        return PromptBatch(encode_prompts(questions, task, policy.tokenizer), seeds)
    from engine.questions.environment import start_conversations  # off by default

    return start_conversations(policy, task, questions, seeds, params, clock)


def encode_prompts(examples: Questions, task: Task, tokenizer: Tokenizer) -> Prompts:
    """The ids of each question's prompt, one by one: a text may stand beside a chat."""
    return [encode_prompt(example, task, tokenizer) for example in examples]


def encode_prompt(example: dict, task: Task, tokenizer: Tokenizer) -> list[int]:
    text, adds = prompt_text(example, task, tokenizer)
    encoded = tokenizer(text, add_special_tokens=adds, return_special_tokens_mask=True)
    # Some add an end too (add_eos_token), behind which a model would begin another text: drop it.
    mask = "".join(map(str, encoded["special_tokens_mask"])).rstrip("1")
    return encoded["input_ids"][: len(mask) or None]


def prompt_length(example: dict, task: Task, tokenizer: Tokenizer) -> float:
    """The tokens of a question's prompt; infinite if it holds a special one, which ends a turn."""
    is_chat = tokenizer.chat_template is not None and not isinstance(task.pose(example), str)
    if is_chat:  # in the ids, since a normalizer may make a special token of other characters
        text = whole_characters(" ".join(map(str, example.values())))
        if not special_ids(tokenizer).isdisjoint(tokenizer.encode(text, add_special_tokens=False)):
            return math.inf
    return len(encode_prompt(example, task, tokenizer))


def prompt_text(example: dict, task: Task, tokenizer: Tokenizer) -> tuple[str, bool]:
    """The text of a question's prompt, and whether the tokenizer must add special tokens."""
    prompt = task.pose(example)
    # A chat template has written them: with it, the tokenizer would add them a second time.
    adds = tokenizer.chat_template is None or isinstance(prompt, str)
    return whole_characters(render_prompt(prompt, tokenizer, tool_schemas(task))), adds


def completion_text(completion: Completion, tokenizer: Tokenizer) -> str:
    """What the model wrote, without the end-of-sequence token."""
    has_end = not (completion.truncated or completion.ends_in_text)
    ids = completion.token_ids[:-1] if has_end else completion.token_ids
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
