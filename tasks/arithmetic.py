"""Arithmetic: add two numbers. A small chat model can do it, once it answers instead of rambling.

An example is a row such as {"a": 47, "b": 38}: it is solved if the last number written is 85.
"""

import random
import re
from collections.abc import Iterable
from itertools import combinations_with_replacement
from typing import Self

from pydantic import Field, model_validator

from engine.core.config import Section
from engine.questions.tasks import is_in_split
from tasks.gsm8k import MAX_TAIL_CHARS, lenient_answer

EXAMPLE_ROW = {"a": 47, "b": 38}
REWARD_PARTS = ("answer",)
# 85! is 85, exclaimed. But in 5!/4!, 5! - 4! and 85!=86 the mark is an operator.
EXCLAIMED = re.compile(r"(?<![\w.,+/^-])(?<![-+*/^\xd7\xf7x] )([0-9][0-9.,]*)!(?!!*[\w=+/^(\\-])")


class Options(Section):
    min_number: int = Field(10, ge=0, le=999)
    """The smallest number that a generated sum may have."""
    max_number: int = Field(99, ge=0, le=999)
    """The largest number that a generated sum may have."""

    @model_validator(mode="after")
    def check_range(self) -> Self:
        low, high = self.min_number, self.max_number
        if low > high:
            raise ValueError(f"min_number = {low} must be at most max_number ({high})")
        return self


def question_key(example: dict) -> str:
    """Equal for equal questions: 47 + 38 is 38 + 47."""
    return str(sorted((example["a"], example["b"])))


def generate_questions(
    split: str, *, options: Options, num_examples: int | None, seed: int, exclude: Iterable[dict]
) -> list[dict]:
    """Different sums, the same for the same seed on every machine; None takes all of them."""
    excluded = {question_key(row) for row in exclude}
    numbers = range(options.min_number, options.max_number + 1)
    pairs = []
    for a, b in combinations_with_replacement(numbers, 2):
        key = question_key({"a": a, "b": b})
        if key not in excluded and is_in_split(key, split):
            pairs.append((a, b))
    if len(pairs) < (num_examples or 1):
        have = f"there are only {len(pairs)} different {split} questions in this range"
        raise ValueError(f"num_examples {num_examples}: {have}; ask for fewer, or widen it")
    rng = random.Random(f"arithmetic {split} {seed}")
    drawn = rng.sample(pairs, num_examples or len(pairs))
    return [{"a": a, "b": b} for a, b in (rng.sample(pair, 2) for pair in drawn)]


def parse_row(row: dict, *, options: Options) -> dict:
    """The example in a row, whose numbers may be text (CSV); ValueError says what is wrong."""
    for name, value in row.items():
        if not re.fullmatch("[0-9]{1,9}", str(value).strip(), re.ASCII):
            raise ValueError(f"{name} is {value!r:.60}, not an integer >= 0")
    return {name: int(value) for name, value in row.items()}


def parse_question(text: str) -> dict:
    """The example in a line typed by a person, such as "47 + 38"."""
    match = re.fullmatch(r"\s*([0-9]{1,9})\s*\+\s*([0-9]{1,9})\s*", text, re.ASCII)
    if match is None:
        raise ValueError('write the question like this: "47 + 38"')
    return {"a": int(match[1]), "b": int(match[2])}


def generate_prompt(example: dict, *, options: Options) -> list[dict]:
    """One chat message, without a word about how to answer."""
    return [{"role": "user", "content": f"What is {example['a']} + {example['b']}?"}]


def reward_function(
    completion: str, example: dict, *, options: Options, num_tokens: int
) -> dict[str, float]:
    """`answer` is 1.0 if the last number of the completion is the sum, else 0.0."""
    answer = extract_answer(completion, example, options=options)
    return {"answer": float(answer == str(example["a"] + example["b"]))}


def extract_answer(completion: str, example: dict, *, options: Options) -> str | None:
    """The last number, in a normal form: 85 for $85.00; majority votes count these.

    Joined numbers, such as 84 85 86 or 84/85, do not count. Unlike in tasks/gsm8k.py, 85! is 85.
    """
    return lenient_answer(EXCLAIMED.sub(r"\1 ", completion[-2 * MAX_TAIL_CHARS :]))
