"""The GSM8K task: grade-school word problems whose answer is a number.

An example is a row of openai/gsm8k: {"question": "...", "answer": "... #### 18"}, where the gold
number stands behind the mark ####. Two conventions, by `task.prompt_style`: plain asks the bare
question and reads the number behind ####; tags asks for <thinking> and <answer> blocks, and pays
for the layout too.

The graders never run the model's text as code, never raise, and take time linear in its length.
"""

import re
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, PositiveInt

from calculator import NUMBER
from sources import (
    FILE_OR_HUB,
    check_request,
    choose_rows,
    is_file,
    is_key_held_out,
    load_table,
    read_rows,
)

if TYPE_CHECKING:  # datasets takes a second to import, so it is imported where rows are loaded
    from datasets import Dataset

# The task's options

PromptStyle = Annotated[
    Literal["plain", "tags"],
    Field(
        description="plain asks the bare question and reads the number behind ####; tags asks for "
        "<thinking> and <answer> blocks, and grades them."
    ),
]
Grading = Annotated[
    Literal["exact", "official"],
    Field(
        description="exact reads the number as a person would ($18.00 is 18, 1/2 is none); "
        "official is the published regex on text behind ####, so that published numbers compare."
    ),
]
MaxTokens = Annotated[
    PositiveInt | None,
    Field(
        description="Reward part `length` is -0.5 for a completion of more tokens than this; null "
        "is off."
    ),
]

# Data: where questions come from, and which of them are never trained on

HUB_ID = "openai/gsm8k"
HUB_SPLITS = {"train": "train", "validation": "test"}
CHOICES = f"{HUB_ID}, {FILE_OR_HUB}"
EXAMPLE_ROW = '{"question": "How many is a dozen and a half?", "answer": "12 + 6 = 18 #### 18"}'


def load_examples(
    source: str,
    split: str,
    *,
    num_examples: int | None,
    seed: int = 0,
    held_out: bool = True,
    exclude: Iterable[dict] = (),
) -> "Dataset":
    """Questions of one split, "train" or "validation", as rows {question: str, answer: str}.

    Of a hub dataset these are its splits train and test. Of a local file `is_held_out` says which
    questions are for validation, unless `held_out` is False, which takes every row. At most
    `num_examples` rows come, drawn by `seed`, and none of the questions in `exclude`.
    Raises ValueError, one line with the fix in it.
    """
    check_request(split, num_examples)
    excluded = {question_key(row) for row in exclude}
    rows = [row for row in read_questions(source, split) if question_key(row) not in excluded]
    if held_out and is_file(source):
        rows = [row for row in rows if is_held_out(row) == (split == "validation")]

    from datasets import Dataset

    return Dataset.from_list(choose_rows(rows, split, num_examples, seed=seed, source=source))


def question_key(example: dict) -> str:
    """The question without its capitals and extra spaces: equal keys are the same question."""
    return " ".join(example["question"].lower().split())


def is_held_out(example: dict) -> bool:
    """True for the fixed 1 in 8 of a file's questions that are for validation."""
    return is_key_held_out(question_key(example))


def read_questions(source: str, split: str) -> list[dict]:
    """Every row of a local file, or of the hub dataset's part for this split, checked."""
    table = load_table(
        source,
        choices=CHOICES,
        hub_config="main" if source == HUB_ID else None,
        hub_split=HUB_SPLITS[split],
    )
    return read_rows(
        table, ("question", "answer"), parse_row, source=source, example_row=EXAMPLE_ROW
    )


def parse_row(question: object, answer: object) -> dict:
    """A checked row; an answer that is only a number, such as 18 or "18", gets its mark."""
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"question is {question!r:.60}, not a text")
    text = str(answer) if type(answer) in (str, int) else ""
    marked = text if MARK in text else f"{MARK} {text}"
    if marked_answer(marked) is None:
        raise ValueError(f"answer is {answer!r:.60}, without a number behind {MARK}")
    return {"question": question, "answer": marked}


def parse_question(text: str) -> dict:
    """The example in a text typed by a person; its answer may follow behind ####."""
    question, mark, answer = text.partition(MARK)
    if not question.strip() or (mark and marked_answer(text) is None):
        raise ValueError('write the question, and if you like "#### 18" with its answer behind it')
    return {"question": question.strip(), "answer": mark + answer}


# Prompt

SYSTEM_PROMPT = (
    "Solve the problem of the user. Answer in this layout, and write nothing after it:\n"
    "<thinking>\nyour reasoning, step by step\n</thinking>\n"
    "<answer>\nthe answer, a whole number and nothing else\n</answer>"
)


def generate_prompt(example: dict, *, prompt_style: PromptStyle = "plain") -> list[dict]:
    """Chat messages that pose the question."""
    messages = [{"role": "user", "content": example["question"]}]
    if prompt_style == "tags":
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    return messages


# Reward

REWARD_PARTS = ("format", "answer", "ending", "integer", "length")  # `answer` 1.0 means solved
TAGS = ("<thinking>", "</thinking>", "<answer>", "</answer>")


def reward_function(
    completion: str,
    example: dict,
    *,
    prompt_style: PromptStyle = "plain",
    grading: Grading = "exact",
    max_tokens: MaxTokens = None,
    num_tokens: int = 0,
) -> dict[str, float]:
    """The parts of the reward; a part that the style does not have is 0.

    `num_tokens` is the completion's length.
    plain: answer 0 or 1. tags: format -1 or 1, answer 0 or 1, ending -0.5 or 0, integer -1 or 1.
    """
    parts = dict.fromkeys(REWARD_PARTS, 0.0)
    if prompt_style == "tags":
        parts["format"] = format_reward_function(completion)
        parts["ending"] = ending_reward_function(completion)
        parts["integer"] = integer_reward_function(completion)
    if max_tokens is not None and num_tokens > max_tokens:
        parts["length"] = -0.5
    predicted = extract_answer(completion, prompt_style=prompt_style, grading=grading)
    gold = extract_answer(example["answer"], grading=grading)
    parts["answer"] = 1.0 if predicted is not None and predicted == gold else 0.0
    return parts


def format_reward_function(completion: str) -> float:
    """1.0 for a thinking block and then an answer block with only white space around, else -1.0.

    Each tag may come once. What follows the answer block is the matter of another part.
    """
    if any(completion.count(tag) != 1 for tag in TAGS):
        return -1.0
    before, _, rest = completion.partition("<thinking>")
    _, _, rest = rest.partition("</thinking>")
    between, opening, rest = rest.partition("<answer>")
    is_well_formed = opening and "</answer>" in rest and not before.strip() and not between.strip()
    return 1.0 if is_well_formed else -1.0


def ending_reward_function(completion: str) -> float:
    """-0.5 if anything but white space follows the first </answer>, else 0.0."""
    return -0.5 if completion.partition("</answer>")[2].strip() else 0.0


def integer_reward_function(completion: str) -> float:
    """1.0 if the answer block holds an integer and nothing else, else -1.0."""
    answer = (find_answer(completion) or "").strip()
    return 1.0 if "." not in answer and re.fullmatch(f"-?{NUMBER}", answer) else -1.0


def find_answer(completion: str) -> str | None:
    """The text between the first <answer> and the first </answer> after it."""
    _, opening, rest = completion.partition("<answer>")
    answer, closing, _ = rest.partition("</answer>")
    return answer if opening and closing else None


# Reading numbers: the repeats in the regexes are bounded, so that every place takes little time

MARK = "####"
MINUS = "\N{MINUS SIGN}"
NUMERIC = r"[\d¹²³⁰⁴-⁹¼-¾⅐-⅞]"  # digits of any script, powers and fractions
# What may stand before it: $18, **18**, (18), = 18, \boxed{18}
OPENING = r"""[\s$€£¥₹*_`"'(\[{:=\\]{0,20}(?:boxed\{[\s$*\\]{0,20})?"""
# What must not come behind it, since the number would be a part of something else
NOT_CONTINUED = rf"""(?!(?:
      [^\w\r\n(\[.\#<]{{0,20}}         # 1/2  3:30  7,8,9  18-20  3 * 6  10^3  1 000
    | [._]                             # 18.5.3  1_000
    | [A-Za-z]{{1,20}}[-+]?            # 1e3  1e-3  0x12  3x4
    | [^\S\r\n]{{0,20}}(?:and|or|to|[xX])[^\w\r\n]{{0,20}}  # 2 and 1/2  18 or 20  3 x 4
    | [^\S\r\n]{{0,20}}\\(?:[dt]?frac\{{|times[ ]?|cdot[ ]?|div[ ]?)
    ){NUMERIC})"""
SIGNED = rf"(?P<sign>[-+{MINUS}]?)\\?[$€£¥₹]?(?P<number>{NUMBER}){NOT_CONTINUED}"
ANSWER = re.compile(OPENING + SIGNED, re.VERBOSE)  # where the text begins, or behind a mark
ANY_NUMBER = re.compile(rf"(?<![\w.])(?<![0-9][-,:/^'* ])(?<![0-9][eE][-+]){SIGNED}", re.VERBOSE)
OFFICIAL_ANSWER = re.compile(r"#### (\-?[0-9\.\,]+)")  # openai/grade-school-math, dataset.py
MAX_MARKS = 1_000
MAX_TAIL_CHARS = 10_000


def extract_answer(
    completion: str,
    example: dict | None = None,
    *,
    prompt_style: PromptStyle = "plain",
    grading: Grading = "exact",
) -> str | None:
    """The answer in a normal form, what majority votes count; None for no answer.

    Two exact answers are the same number if and only if they are the same text.
    """
    if grading == "official":
        match = OFFICIAL_ANSWER.search(completion)
        return match.group(1).strip().replace(",", "") if match else None
    if prompt_style == "tags":
        match = ANSWER.match(find_answer(completion) or "")
        return normal_form(match) if match else None
    return marked_answer(completion)


def marked_answer(text: str) -> str | None:
    """The number behind the first #### that a number follows, among MAX_MARKS of them."""
    for mark in islice(re.finditer(f"{MARK}(?!#)", text), MAX_MARKS):
        if match := ANSWER.match(text, mark.end()):
            return normal_form(match)
    return None


def lenient_answer(completion: str) -> str | None:
    """The last number in the text's last MAX_TAIL_CHARS characters, wherever it stands."""
    last = None
    for match in ANY_NUMBER.finditer(completion, max(0, len(completion) - MAX_TAIL_CHARS)):
        last = match
    return normal_form(last) if last else None


def is_lenient_solved(completion: str, example: dict) -> bool:
    """Whether the last number of the text, wherever it stands, is the right one."""
    return lenient_answer(completion) == extract_answer(example["answer"])


def normal_form(match: re.Match[str]) -> str:
    """The number without plus, commas and needless zeros: +1,800.50 is 1800.5, -0.0 is 0."""
    whole, _, decimals = match["number"].replace(",", "").partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    text = f"{whole}.{decimals}" if decimals else whole
    return f"-{text}" if match["sign"] in ("-", MINUS) and text != "0" else text
