"""The Countdown task: combine a few numbers with + - * / so that they make a target.

A task is a module with five functions that main.py calls: `load_examples`, `generate_prompt`,
`reward_function`, `extract_answer` and `parse_question`. To add a task, copy this file. An example
is a row such as {"nums": [3, 7, 25], "target": 46}; here 25 + 3 * 7 solves it.

The graders never run the model's text as code, never raise, and take time linear in its length.
"""

import random
import re
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, PositiveInt

from calculator import value_of
from sources import FILE_OR_HUB, check_request, choose_rows, is_key_held_out, load_table, read_rows

if TYPE_CHECKING:  # datasets takes a second to import, so it is imported where rows are loaded
    from datasets import Dataset

# Data: where questions come from, and which of them are never trained on

EXAMPLE_ROW = '{"nums": [3, 7, 25], "target": 46}'
MAX_GENERATED = 10_000
MAX_TRIES = 20_000  # draws in a row without a new question, after which there are taken to be none


def load_examples(
    source: str,
    split: str,
    *,
    num_examples: int | None,
    seed: int = 0,
    min_numbers: Annotated[
        PositiveInt, Field(description="Generated questions: fewest numbers.")
    ] = 3,
    max_numbers: Annotated[
        PositiveInt, Field(description="Generated questions: most numbers.")
    ] = 4,
    min_number: Annotated[
        PositiveInt, Field(description="Generated questions: smallest number.")
    ] = 1,
    max_number: Annotated[
        PositiveInt, Field(description="Generated questions: largest number.")
    ] = 50,
    min_target: Annotated[
        PositiveInt, Field(description="Generated questions: smallest target.")
    ] = 10,
    max_target: Annotated[
        PositiveInt, Field(description="Generated questions: largest target.")
    ] = 99,
    held_out: bool = True,
    exclude: Iterable[dict] = (),
) -> "Dataset":
    """Questions of one split, "train" or "validation", as rows {nums: list[int], target: int}.

    `source` is "generated", a local file or a hub dataset id. The ranges are for generated
    questions; from a file or the hub come at most `num_examples` rows, drawn by `seed`. None means
    all rows there, and as many generated questions as there are up to MAX_GENERATED.
    A question is in "validation" if and only if `is_held_out` says so, whatever the source;
    `held_out=False` takes every row of a file or hub dataset (an evaluation file of your own), and
    `exclude` lists questions to leave out, so that training can still avoid that file's.
    Raises ValueError, one line with the fix in it.
    """
    check_request(split, num_examples)
    excluded = {question_key(row) for row in exclude}
    if source == "generated":
        rows = generate_questions(
            split,
            num_examples,
            seed=seed,
            numbers=(min_numbers, max_numbers),
            number=(min_number, max_number),
            target=(min_target, max_target),
            excluded=excluded,
        )
    else:
        rows = [row for row in read_questions(source) if question_key(row) not in excluded]
        if held_out:
            rows = [row for row in rows if is_held_out(row) == (split == "validation")]
        rows = choose_rows(rows, split, num_examples, seed=seed, source=source)

    from datasets import Dataset

    return Dataset.from_list(rows)


def question_key(example: dict) -> str:
    """The question whatever the order of its numbers: equal keys are the same question."""
    return f"{sorted(example['nums'])} {example['target']}"


def is_held_out(example: dict) -> bool:
    """True for the fixed 1 in 8 of all questions that are for validation, never for training."""
    return is_key_held_out(question_key(example))


def generate_questions(
    split: str,
    num_examples: int | None,
    *,
    seed: int,
    numbers: tuple[int, int],
    number: tuple[int, int],
    target: tuple[int, int],
    excluded: set[str],
) -> list[dict]:
    """Different solvable questions, the same for the same seed on every machine.

    `numbers`, `number` and `target` are (min, max). How many numbers a question has is uniform; a
    count without a new question left is given up. ValueError where that leaves too few questions.
    """
    for name, (low, high) in {"numbers": numbers, "number": number, "target": target}.items():
        if not 1 <= low <= high <= 10**6:
            raise ValueError(
                f"min_{name} {low}, max_{name} {high}: choose 1 <= min <= max <= 10**6"
            )
    rng = random.Random(f"countdown {split} {seed}")
    counts = list(range(numbers[0], numbers[1] + 1))
    seen, rows = set(excluded), []
    while counts and len(rows) < (num_examples or MAX_GENERATED):
        count = rng.choice(counts)
        for _ in range(MAX_TRIES):
            nums = [rng.randint(*number) for _ in range(count)]
            value = combine_at_random(nums, limit=number[1] * target[1], rng=rng)
            row = {"nums": nums, "target": value}
            key = question_key(row)
            is_new = target[0] <= value <= target[1] and key not in seen
            if is_new and is_held_out(row) == (split == "validation"):
                seen.add(key)
                rows.append(row)
                break
        else:
            counts.remove(count)
    if not rows or len(rows) < (num_examples or 0):
        raise ValueError(
            f"num_examples {num_examples}: only {len(rows)} different {split} questions were "
            "found in these ranges; ask for fewer, or widen the ranges of numbers and targets"
        )
    return rows


def combine_at_random(nums: list[int], *, limit: int, rng: random.Random) -> int:
    """A value that `nums` can make: random pairs are combined until one value is left.

    Every value on the way is a positive integer, and no product is above `limit`.
    """
    values = list(nums)
    while len(values) > 1:
        rng.shuffle(values)
        small, large = sorted((values.pop(), values.pop()))
        results = [large + small]
        if large * small <= limit:
            results.append(large * small)
        if large > small:
            results.append(large - small)
        if large % small == 0:
            results.append(large // small)
        values.append(rng.choice(results))
    return values[0]


def read_questions(source: str) -> list[dict]:
    """Every row of a local file, or of a hub dataset's train split, checked."""
    table = load_table(source, choices=f"generated, {FILE_OR_HUB}")
    return read_rows(table, ("nums", "target"), parse_row, source=source, example_row=EXAMPLE_ROW)


def parse_row(nums: object, target: object) -> dict:
    """A checked row; text such as "[3, 7, 25]" or "3 7 25" (CSV) is read as its integers."""
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
            return parse_row(*match.groups())
    raise ValueError('write the question like this: "numbers: 3 7 25, target: 46"')


# Prompt

QUESTION = (
    "Use the numbers {nums}, each exactly once, with + - * / and parentheses, to make {target}."
    " Reason inside <think> </think> tags, then write only the expression inside"
    " <answer> </answer> tags on the next line, for example <answer>(1 + 2) * 4</answer>."
)
ASSISTANT_PREFIX = "Let me solve this step by step.\n<think>"


def generate_prompt(example: dict) -> list[dict]:
    """Chat messages that pose the question; the last one is the completion's beginning."""
    question = QUESTION.format(nums=example["nums"], target=example["target"])
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": ASSISTANT_PREFIX},
    ]


# Reward

REWARD_PARTS = ("format", "answer")  # `answer` equal to 1.0 means solved
MAX_ANSWER_CHARS = 1_000
MAX_DIGITS = 20
ANSWER_CHARS = frozenset("0123456789+-*/() ")


def reward_function(completion: str, example: dict) -> dict[str, float]:
    """The parts of the reward, each in [0, 1]; the config's `task.reward_weights` weighs them."""
    nums, target = example["nums"], example["target"]
    return {
        "format": format_reward_function(completion),
        "answer": answer_reward_function(completion, nums=nums, target=target),
    }


def format_reward_function(completion: str) -> float:
    r"""1.0 where "<think>" + completion matches ^<think>.*?</think>\n<answer>.*?</answer>$.

    Else 0.1 for a think block plus 0.5 for an answer block. The prompt ends with <think>, so it is
    not in the completion. Written with plain searches: the regex is quadratic on repeated tags.
    """
    text = completion.removesuffix("\n")  # `$` also matches before a newline that ends the text
    if "</think>\n<answer>" in completion and text.endswith("</answer>"):
        return 1.0
    has_think_block = "</think>" in completion
    has_answer_block = find_answer(completion) is not None
    return 0.1 * has_think_block + 0.5 * has_answer_block


def answer_reward_function(completion: str, *, nums: list[int], target: int) -> float:
    """1.0 if the first answer block uses each of `nums` once and equals `target`, else 0.0."""
    try:
        tokens = tokenize(find_answer(completion) or "")
        numbers = [int(token) for token in tokens if token.isdigit()]
        solved = sorted(numbers) == sorted(nums) and value_of(tokens) == target
    except (ValueError, ZeroDivisionError):
        return 0.0
    return 1.0 if solved else 0.0


def extract_answer(completion: str, example: dict | None = None) -> str | None:
    """The first answer block without its spaces, what majority votes count; None for no answer."""
    answer = find_answer(completion)
    if answer is None or len(answer) > MAX_ANSWER_CHARS:
        return None
    return "".join(answer.split()) or None


def find_answer(completion: str) -> str | None:
    """The text between the first <answer> and the first </answer> after it."""
    _, opening, rest = completion.partition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer if opening and closing else None


def tokenize(answer: str) -> list[str]:
    """Numbers, operators and parentheses; ValueError for anything but these and spaces.

    Numbers are ASCII digits, at most MAX_DIGITS of them, without leading zeros: int() would take
    other digits too, and refuses long ones.
    """
    if len(answer) > MAX_ANSWER_CHARS or not ANSWER_CHARS.issuperset(answer):
        raise ValueError("too long, or a character that no expression has")
    tokens = re.findall(r"[0-9]+|[-+*/()]", answer)
    if any(len(token) > MAX_DIGITS or re.match("0[0-9]", token) for token in tokens):
        raise ValueError("a number with too many digits or a leading zero")
    return tokens
