r"""MATH: competition problems whose answer stands in \boxed{}.

An example is a row such as {"problem": "What is $1+1$?", "answer": "2"}. tasks/grader.py decides
whether an answer is right; it needs the package math-verify.
"""

import re

from pydantic import PositiveFloat

from engine.core.config import Section
from engine.questions.tasks import Hub
from tasks.grader import grade, last_boxed, normal_answer


class Options(Section):
    """MATH's own key in the config's `task` section."""

    grader_timeout_s: PositiveFloat = 5.0
    """The longest time in seconds for grading one answer; an answer that takes longer is wrong."""


EXAMPLE_ROW = {"problem": "What is $1+1$?", "answer": "2"}
HUB = Hub(validation_split="test")
PACKAGES = ("math-verify",)  # pip names; one that is missing is named before questions are loaded


def question_key(example: dict) -> str:
    r"""The letters, digits and signs of the problem: equal for equal questions.

    Spaces, capitals, `$`, \dfrac for \frac, \left and \right make no difference.
    """
    text = re.sub(r"\\[dt]frac", r"\\frac", example["problem"].casefold())
    text = re.sub(r"\\(?:left|right|displaystyle)(?![a-z])", "", text)
    return "".join(char for char in text if char.isalnum() or char in "+-*/^=<>")


def parse_row(row: dict, *, options: Options) -> dict:
    """The example in a row, whose answer may also be a number; ValueError says what is wrong."""
    problem, answer = row["problem"], row["answer"]
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError(f"problem is {problem!r:.60}, not a text")
    if type(answer) not in (str, int, float) or str(answer).strip() in ("", "nan"):
        raise ValueError(f"answer is {answer!r:.60}, not an answer")
    return {"problem": problem, "answer": str(answer)}


def parse_question(text: str) -> dict:
    """The example in a problem typed by a person; its answer is not known."""
    if not text.strip():
        raise ValueError("write a problem, for example: What is $1+1$?")
    return {"problem": text.strip(), "answer": ""}


PROMPT = r"""You solve math problems.
Write the final result exactly, not rounded, on a line of its own, as \boxed{{ANSWER}}.

Question:
{problem}

Answer:"""


def generate_prompt(example: dict, *, options: Options) -> str:
    """The problem as plain text, not a chat, since base models are to continue it."""
    return PROMPT.format(problem=example["problem"])


REWARD_PARTS = ("answer", "timeout")


def reward_function(
    completion: str, example: dict, *, options: Options, num_tokens: int
) -> dict[str, float]:
    """`answer` is 1.0 if the last boxed answer is right; `timeout` if the grader was stopped."""
    is_right = grade(completion, example["answer"], timeout_s=options.grader_timeout_s)
    return {"answer": float(is_right is True), "timeout": float(is_right is None)}


def extract_answer(completion: str, example: dict, *, options: Options) -> str | None:
    """The last boxed answer in a normal form, which majority votes count; None if there is none."""
    boxed = last_boxed(completion)
    return None if boxed is None else normal_answer(boxed) or None
