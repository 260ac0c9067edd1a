r"""The MATH task: competition problems whose answer stands in \boxed{}.

An example is a row such as {"problem": "What is $1+1$?",
"answer": "2"}. Whether an answer is right is decided in grader.py, which needs math-verify.
"""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveFloat

from grader import grade, last_boxed, normal_answer
from grader_worker import require_math_verify
from sources import check_request, choose_rows, is_key_held_out, load_table, read_rows

if TYPE_CHECKING:  # datasets takes a second to import, so it is imported where rows are loaded
    from datasets import Dataset

# Data: where questions come from, and which of them are never trained on

EXAMPLE_ROW = '{"problem": "What is $1+1$?", "answer": "2"}'


def load_examples(
    source: str,
    split: str,
    *,
    num_examples: int | None,
    seed: int = 0,
    held_out: bool = True,
    exclude: Iterable[dict] = (),
) -> "Dataset":
    """Questions of one split, "train" or "validation", as rows {problem: str, answer: str}.

    `source` is a local file or a hub dataset id; at most `num_examples` rows come, drawn by `seed`,
    and none of the questions in `exclude`. With `held_out`, `is_held_out` says which questions are
    for validation; `held_out=False` takes every row, of a hub dataset those of its split train or,
    for validation, test. Raises ValueError, one line with the fix in it.
    """
    require_math_verify()
    check_request(split, num_examples)
    is_test = split == "validation" and not held_out
    excluded = {question_key(row) for row in exclude}
    rows = read_questions(source, hub_split="test" if is_test else "train")
    rows = [row for row in rows if question_key(row) not in excluded]
    if held_out:
        rows = [row for row in rows if is_held_out(row) == (split == "validation")]

    from datasets import Dataset

    return Dataset.from_list(choose_rows(rows, split, num_examples, seed=seed, source=source))


def question_key(example: dict) -> str:
    r"""The problem's letters, digits and signs: equal keys are the same question.

    Spaces, capitals, `$`, \dfrac for \frac, \left and \right do not matter.
    """
    text = re.sub(r"\\[dt]frac", r"\\frac", example["problem"].casefold())
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-z])", "", text)
    return "".join(char for char in text if char.isalnum() or char in "+-*/^=<>")


def is_held_out(example: dict) -> bool:
    """True for the fixed 1 in 8 of all questions that are for validation, never for training."""
    return is_key_held_out(question_key(example))


def read_questions(source: str, *, hub_split: str) -> list[dict]:
    """Every row of a local file or of a split of a hub dataset, checked."""
    table = load_table(source, hub_split=hub_split)
    return read_rows(
        table, ("problem", "answer"), parse_row, source=source, example_row=EXAMPLE_ROW
    )


def parse_row(problem: object, answer: object) -> dict:
    """A checked row; an answer may also be a number."""
    text = str(answer) if type(answer) in (str, int, float) else ""
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"problem is {problem!r:.60}, not a text")
    if not text.strip() or text == "nan":
        raise ValueError(f"answer is {answer!r:.60}, not an answer")
    return {"problem": problem, "answer": text}


def parse_question(text: str) -> dict:
    """The example in a problem typed by a person, whose answer is not known."""
    if not text.strip():
        raise ValueError("write a problem, for example: What is $1+1$?")
    return {"problem": text.strip(), "answer": ""}


# Prompt

PROMPT = r"""You solve math problems.
Reason step by step, then write the final result on a line of its own, as \boxed{{ANSWER}}.

Question:
{problem}

Answer:"""


def generate_prompt(example: dict) -> str:
    """The problem as a plain text, which a base model continues: no chat."""
    return PROMPT.format(problem=example["problem"])


# Reward

REWARD_PARTS = ("answer", "timeout")  # timeout is a measurement: its weight is 0


def reward_function(
    completion: str,
    example: dict,
    *,
    grader_timeout_s: Annotated[
        PositiveFloat,
        Field(description="Longest time that grading one answer may take; it is then wrong."),
    ] = 5.0,
) -> dict[str, float]:
    """`answer` is 1.0 if the last boxed answer equals the gold one, else 0.0.

    `timeout` is 1.0 where the grader was stopped, so that nobody knows.
    """
    result = grade(completion, example["answer"], timeout_s=grader_timeout_s)
    return {"answer": float(result.is_correct), "timeout": float(result.timed_out)}


def extract_answer(completion: str, example: dict | None = None) -> str | None:
    """The last boxed answer in a normal form, what majority votes count; None for no answer."""
    boxed = last_boxed(completion)
    return None if boxed is None else normal_answer(boxed) or None
