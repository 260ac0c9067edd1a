"""Countdown, the default task: combine a few numbers with + - * / so that they make a target.

An example is a row such as {"nums": [3, 7, 25], "target": 46}; here 25 + 3 * 7 solves it.

A task of your own is one new file. Copy this one, or the shorter tasks/template.py, to tv.py in the
folder where you run main.py, change it, and set task.name=tv; there is nothing to register. A task
needs generate_prompt and reward_function; the other names, of which docs/tasks.md has a table, are
used if they are there. All functions are called with the arguments that they have here.

A model can write anything. So a grader must never run its text as code, must never raise, and must
be fast: it takes time linear in the length of the text.
"""

import ast
import hashlib
import random
import re
from collections.abc import Iterable
from contextlib import suppress
from fractions import Fraction
from operator import add, mul, sub, truediv
from typing import Annotated, Self

from pydantic import BaseModel, Field, model_validator

EXAMPLE_ROW = {"nums": [3, 7, 25], "target": 46}
REWARD_PARTS = ("format", "answer")
MAX_GENERATED = 10_000
MAX_TRIES = 20_000  # after so many draws without a new question, we take it that none is left
MAX_ANSWER_CHARS = 1_000
MAX_TOKENS = 200  # of an expression, asked first: no verdict depends on how deep a parser can go
OPERATORS = {"Add": add, "Sub": sub, "Mult": mul, "Div": truediv}
# A number is ASCII digits, at most 20 of them and without leading zeros: int() would also take the
# digits of other scripts, and refuses very long numbers.
TOKEN = re.compile(r"(?<![0-9])(?:0|[1-9][0-9]{0,19})(?![0-9])|[-+*/()]")
Number = Annotated[int, Field(ge=1, le=1_000_000)]


class Options(BaseModel, extra="forbid", strict=True, use_attribute_docstrings=True):
    """Countdown's own keys in the config's `task` section; the text below each key explains it."""

    min_numbers: Number = 3
    """The fewest numbers of a generated question."""
    max_numbers: int = Field(4, ge=1, le=10)
    """The most numbers of a generated question."""
    min_number: Number = 1
    """The smallest number that a generated question may use."""
    max_number: Number = 50
    """The largest number that a generated question may use."""
    min_target: Number = 10
    """The smallest target of a generated question."""
    max_target: Number = 99
    """The largest target of a generated question."""

    @model_validator(mode="after")
    def check_ranges(self) -> Self:
        for name in ("numbers", "number", "target"):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low > high:
                raise ValueError(f"min_{name} = {low} must be at most max_{name} ({high})")
        return self


def question_key(example: dict) -> str:
    """Equal for equal questions, whatever the order of their numbers."""
    return f"{sorted(example['nums'])} {example['target']}"


def generate_questions(
    split: str, *, options: Options, num_examples: int | None, seed: int, exclude: Iterable[dict]
) -> list[dict]:
    """Different solvable questions, the same for the same seed on every machine.

    Every count of numbers is equally likely, until no new question with so many numbers is found.
    None makes MAX_GENERATED of them, or all that there are. ValueError if the ranges hold too few.
    """
    rng = random.Random(f"countdown {split} {seed}")
    counts = list(range(options.min_numbers, options.max_numbers + 1))
    seen = {question_key(row) for row in exclude}
    rows: list[dict] = []
    while counts and len(rows) < (num_examples or MAX_GENERATED):
        count = rng.choice(counts)
        for _ in range(MAX_TRIES):
            row = draw_question(count, options=options, rng=rng)
            key = question_key(row)
            is_in_range = options.min_target <= row["target"] <= options.max_target
            if is_in_range and key not in seen and is_in_split(key, split):
                seen.add(key)
                rows.append(row)
                break
        else:
            counts.remove(count)
    if not rows or len(rows) < (num_examples or 0):
        have = f"only {len(rows)} different {split} questions were found in these ranges"
        raise ValueError(f"num_examples {num_examples}: {have}; ask for fewer, or widen them")
    return rows


def is_in_split(key: str, split: str) -> bool:
    """Whether a hash of its key puts a question into the split; 1 in 8 is for validation."""
    is_held_out = hashlib.sha256(key.encode()).digest()[0] < 256 / 8
    return is_held_out == (split == "validation")


def draw_question(count: int, *, options: Options, rng: random.Random) -> dict:
    """`count` random numbers and a target that they make, perhaps one outside the allowed range.

    Random pairs are combined until one value is left: by positive integers that are not too large.
    """
    nums = [rng.randint(options.min_number, options.max_number) for _ in range(count)]
    max_product = options.max_number * options.max_target
    values = list(nums)
    while len(values) > 1:
        rng.shuffle(values)
        small, large = sorted((values.pop(), values.pop()))
        results = [large + small]
        if large * small <= max_product:
            results.append(large * small)
        if large > small:
            results.append(large - small)
        if large % small == 0:
            results.append(large // small)
        values.append(rng.choice(results))
    return {"nums": nums, "target": values[0]}


def parse_row(row: dict, *, options: Options) -> dict:
    """The example in a row, which may be text (CSV), as "3 7 25"; ValueError says what is wrong."""
    nums, target = row["nums"], row["target"]
    if isinstance(nums, str) and set(nums) <= set("0123456789, []"):
        nums = [int(number) for number in nums.strip("[] ").replace(",", " ").split()]
    if isinstance(target, str) and re.fullmatch("-?[0-9]+", target.strip()):
        target = int(target)
    if not isinstance(nums, list) or not nums or any(type(n) is not int or n < 0 for n in nums):
        raise ValueError(f"nums is {nums!r:.60}, not a list of integers >= 0")
    if type(target) is not int:
        raise ValueError(f"target is {target!r:.60}, not an integer")
    return {"nums": nums, "target": target}


def parse_question(text: str) -> dict:
    """The example in a line typed by a person, such as "numbers: 3 7 25, target: 46"."""
    pattern = r"\s*numbers?\s*:?([0-9, \[\]]+)[.;]?\s*target\s*:?\s*(-?[0-9]+)\s*"
    match = re.fullmatch(pattern, text, re.IGNORECASE)
    if match:
        with suppress(ValueError):
            return parse_row({"nums": match[1], "target": match[2]}, options=Options())
    raise ValueError('write the question like this: "numbers: 3 7 25, target: 46"')


QUESTION = (
    "Use the numbers {nums}, each exactly once, with + - * / and parentheses, to make {target}."
    " Reason inside <think> </think> tags, then write only the expression inside"
    " <answer> </answer> tags on the next line, for example <answer>(1 + 2) * 4</answer>."
)
ASSISTANT_PREFIX = "Let me solve this step by step.\n<think>"


def generate_prompt(example: dict, *, options: Options) -> list[dict]:
    """Chat messages that pose the question; the model continues the last one."""
    question = QUESTION.format(nums=example["nums"], target=example["target"])
    prefix = {"role": "assistant", "content": ASSISTANT_PREFIX}
    return [{"role": "user", "content": question}, prefix]


def reward_function(
    completion: str, example: dict, *, options: Options, num_tokens: int
) -> dict[str, float]:
    """The parts of the reward, each in [0, 1]; `num_tokens` is the completion's length."""
    answer = answer_reward_function(completion, nums=example["nums"], target=example["target"])
    return {"format": format_reward_function(completion), "answer": answer}


def format_reward_function(completion: str) -> float:
    r"""1.0 if "<think>" + completion matches ^<think>.*?</think>\n<answer>.*?</answer>$.

    Else 0.1 for a think block plus 0.5 for an answer block. The prompt ends with <think>. The regex
    itself would take quadratic time on repeated tags, so plain searches stand in for it.
    """
    text = completion.removesuffix("\n")  # `$` also matches before a newline that ends the text
    if "</think>\n<answer>" in completion and text.endswith("</answer>"):
        return 1.0
    return 0.1 * ("</think>" in completion) + 0.5 * (find_answer(completion) is not None)


def answer_reward_function(completion: str, *, nums: list[int], target: int) -> float:
    """1.0 if the first answer block uses each of `nums` once and equals `target`, else 0.0."""
    try:
        tokens = tokenize(find_answer(completion) or "")
        numbers = [int(token) for token in tokens if token.isdigit()]
        return float(sorted(numbers) == sorted(nums) and value_of(tokens) == target)
    except (ValueError, ZeroDivisionError):
        return 0.0


def extract_answer(completion: str, example: dict, *, options: Options) -> str | None:
    """The first answer block without its spaces and the breaks around it, or None, for votes."""
    answer = find_answer(completion)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return None
    return answer.strip(" \t\r\n").replace(" ", "") or None


def find_answer(completion: str) -> str | None:
    """The text between the first <answer> and the first </answer> after it."""
    _, opening, rest = completion.partition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer if opening and closing else None


def tokenize(answer: str) -> list[str]:
    """The numbers, operators and parentheses of an expression; ValueError for any other text.

    The expression may stand on a line of its own, but a line break within it is no expression.
    """
    if len(answer) > MAX_ANSWER_CHARS or TOKEN.sub("", answer.strip(" \t\r\n")).strip(" "):
        raise ValueError("too long, or a number or a character that no expression has")
    return TOKEN.findall(answer)


def value_of(tokens: list[str]) -> Fraction:
    """An expression's exact value; ValueError or ZeroDivisionError if it has none."""
    if len(tokens) > MAX_TOKENS:
        raise ValueError(f"more than {MAX_TOKENS} numbers, signs and brackets")
    try:
        return value_of_node(ast.parse(" ".join(tokens), mode="eval").body)
    except SyntaxError as error:
        raise ValueError("no expression") from error


def value_of_node(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant):
        return Fraction(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of_node(node.operand)
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op).__name__](
            value_of_node(node.left), value_of_node(node.right)
        )
    raise ValueError("a sign or a bracket that no expression has there")
