"""The Countdown task: what its graders pay for, and which questions it trains on."""

import ast
import functools
import hashlib
import json
import math
import operator
import re
import time
from fractions import Fraction
from itertools import combinations

import pytest
from harness import ROOT, assert_linear, cpu_seconds, load_rows, seed
from hypothesis import example, given, settings
from hypothesis import strategies as st

import countdown
from countdown import Options, answer_reward_function, format_reward_function, question_key
from engine.questions.tasks import is_in_split

NUMS, TARGET = [3, 7, 25], 46  # 25 + 3 * 7
EXAMPLE = {"nums": NUMS, "target": TARGET}
MILLION = 1_000_000


def answer_block(expression: str) -> str:
    return f"so it works.</think>\n<answer>{expression}</answer>"


def score(expression: str, nums: list[int], target: int | Fraction) -> float:
    return answer_reward_function(answer_block(expression), nums=nums, target=target)


def reward(completion: str, example_row: dict = EXAMPLE) -> dict[str, float]:
    return countdown.reward_function(completion, example_row, options=Options(), num_tokens=0)


def extract_answer(completion: str) -> str | None:
    return countdown.extract_answer(completion, EXAMPLE, options=Options())


generate = functools.partial(load_rows, countdown, "generated")

# The format reward


def format_reward_by_regex(completion: str) -> float:
    text = "<think>" + completion
    if re.match(r"^<think>.*?</think>\n<answer>.*?</answer>$", text, re.DOTALL):
        return 1.0
    has_think_block = re.search(r"<think>.*?</think>", text, re.DOTALL) is not None
    has_answer_block = re.search(r"<answer>.*?</answer>", text, re.DOTALL) is not None
    return 0.1 * has_think_block + 0.5 * has_answer_block


PIECES = ["<think>", "</think>", "<answer>", "</answer>", "\n", "x", " ", "<", "</", "\r", ">", "1"]
BRIDGED = [*PIECES, "</think>\n<answer>", "</answer>\n"]


@settings(max_examples=1_000, deadline=None)
@given(st.lists(st.sampled_from(BRIDGED), max_size=14).map("".join))
@example("several\nlines</think>\n<answer>1\n+ 2</answer>")  # 1.0
@example("a</think>\n<answer>1</answer>\n")  # $ matches before one last newline
@example("a</think> b</think>\n<answer>1</answer> c</answer>")  # .*? reaches further
@example("a</think>\n<answer>1</answer> I am done")  # 0.6
@example("<ANSWER>1</ANSWER></THINK>")  # 0.0
def test_format_reward_agrees_with_the_regex_it_replaces(completion: str):
    assert format_reward_function(completion) == format_reward_by_regex(completion)


# The answer reward


RIGHT = ["25+3*7", "  7 *3 +   25 ", "((25)) + (3 * (7))", "25 - -3 * 7", "25 - (-(3 * 7))"]
RIGHT += ["-3 * -7 + 25", "(" * 300 + "25 + 3 * 7" + ")" * 300, "-" * 400 + "25 + 3 * 7"]


@pytest.mark.parametrize("expression", RIGHT)
def test_right_answers_are_paid(expression: str):
    assert score(expression, NUMS, TARGET) == 1.0
    assert score("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24) == 1.0  # floats give 23.99999999999999


WRONG = [  # an expression, the numbers of the question, its target
    *(("2 - 3", [2, 3], 5), ("5", [2, 3], 5), ("2 + 3 + 5 - 5", [2, 3], 5)),
    *(("2 + 2 + 3 - 2", [2, 3], 5), ("1.5*4", [1, 4, 5], 6), ("1.0 + 2", [0, 1, 2], 3)),
    *(("1e2", [1, 2], 100), ("1_0 + 2", [2, 10], 12), ("1 2", [12], 12), ("02 + 3", [2, 3], 5)),
    *(("1" * 21, [int("1" * 21)], int("1" * 21)), ("7 / 2", [2, 7], 3), ("7 / 2", [2, 7], 4)),
    ("100000000000000000 + 1 - 1 / 3", [100000000000000000, 1, 1, 3], 10**17),  # equal as floats
]


@pytest.mark.parametrize(("expression", "nums", "target"), WRONG)
def test_a_wrong_value_or_other_numbers_are_not_paid(expression, nums: list[int], target: int):
    assert score(expression, nums, target) == 0.0


MALFORMED = [  # with the numbers in it and whatever target
    *("2 ** 3", "2 * * 3", "7 // 2", "7 / / 2", "99**98**97", "0x3 + 2", "1,2", "1 2", "2(3)"),
    *("(2)(3)", "2 + 3 = 5", "+2 + 3", "2 + 3\n", "2\t+ 3", "2 \u00d7 3", "2 \u2212 3"),
    *("\u0662 + 3", "\uff12 + 3", "\u00b2 + 3", "00 + 3", "2 + 3 / 0", "3 / (2 - 2)", "(2 + 3"),
    *("2 + 3)", "2) + (3", "2 + 3 +", "* 2 + 3", "2 3 +", "2 -", "()", "() 2 + 3", "2 () + 3"),
    *("", "   ", "sum([2, 3])", "__import__('os').getpid()", "2 + 3" + " " * 1_000),
]


@pytest.mark.parametrize("expression", MALFORMED)
def test_wrong_or_malformed_answers_are_not_paid(expression: str):
    nums = [int(number) for number in re.findall(r"\d+", expression)]
    assert not any(score(expression, nums, target) for target in range(-30, 100))


def test_only_the_first_answer_block_counts():
    right, wrong = "<answer>25 + 3 * 7</answer>", "<answer>25 + 3 + 7</answer>"
    for text in (right + wrong, "</answer>" + right, right + " and more"):
        assert reward(text)["answer"] == 1.0
    for text in (wrong + right, "<answer>" + right, "<answer>25 + 3 * 7", "25 + 3 * 7"):
        assert reward(text)["answer"] == 0.0


# Properties: a random expression carries its text, its numbers and its exact value

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


expressions = st.recursive(
    st.integers(0, 99).map(str),
    lambda inner: (
        st.builds("({}) {}({})".format, inner, st.sampled_from("+-*/"), inner)
        | inner.map("-({})".format)
    ),
    max_leaves=6,
)


def value_by_ast(text: str) -> Fraction | None:
    """An independent oracle: Python's own parser, then exact arithmetic on four operators."""
    try:
        return fold(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


AST_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}


def fold(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -fold(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in AST_OPERATORS:
            return OPERATORS[AST_OPERATORS[type(op)]](fold(left), fold(right))
    raise ValueError(f"not in the grammar: {ast.dump(node)}")


MORSELS = ["0", "1", "2", "7", "25", "10", "+", "-", "*", "/", "(", ")", " "]


@settings(max_examples=2_000, deadline=None)
@given(st.lists(st.sampled_from(MORSELS), max_size=12).map("".join) | expressions)
@example("2-3-4*5/6/7")
@example("2/-3*4")
@example("--2---3")
@example("2" * 20)
@example("2" * 21)
def test_an_independent_oracle_agrees_on_random_strings(text: str):
    nums = [int(number) for number in re.findall("[0-9]+", text)]
    is_no_number = re.search(r"(?<![0-9])0[0-9]|[0-9]{21}", text)  # 007, or too many digits
    value = None if is_no_number else value_by_ast(text)
    if value is None:
        assert all(score(text, nums, target) == 0.0 for target in range(-30, 60))
    else:
        assert score(text, nums, value) == 1.0
        assert score(text, nums, value + Fraction(1, 10**9)) == 0.0


# Properties: any text at all is graded, fast

any_text = st.lists(
    st.one_of(
        st.sampled_from([*BRIDGED, "25", "3", "7", "+", "*", "(", ")", "\0", "\ud800", "\u0663"]),
        st.text(st.characters(), max_size=5),
    ),
    max_size=30,
).map("".join)


@settings(max_examples=1_000, deadline=None)
@given(any_text, st.lists(st.integers(0, 99), max_size=4), st.integers(-9, 99))
@example("\0", [], 0)
@example("<answer>\ud800\udfff</answer>", [3], 3)
@example("<answer>\udcff", [3], 3)
def test_any_text_gets_a_reward_of_the_allowed_set(text: str, nums: list[int], target: int):
    start = time.process_time()
    rewards = reward(text, {"nums": nums, "target": target})
    assert time.process_time() - start < 0.1
    assert tuple(rewards) == countdown.REWARD_PARTS
    assert rewards["format"] == format_reward_function(text) in (0.0, 0.1, 0.5, 0.6, 1.0)
    assert rewards["answer"] in (0.0, 1.0)
    assert extract_answer(text) is None or extract_answer(text) in "".join(text.split())


UNITS = ["x", "\0", "\ud800", "\U0001f600", "<", "\n", "<think>", "</think>", "<answer>"]
UNITS += ["</answer>", "</think>\n<answer>", "</think>\n<answer", "<answer>1</answer>"]
EXPRESSIONS = ["1" * MILLION, "0" * MILLION, "-" * MILLION + "3", " " * MILLION]
EXPRESSIONS += ["(" * (MILLION // 2) + "3" + ")" * (MILLION // 2), "9**" * (MILLION // 3) + "9"]
EXPRESSIONS += ["(" * 10_000 + "25 + 3 * 7" + ")" * 10_000]
GARBAGE = [unit * (MILLION // len(unit)) for unit in UNITS] + [*map(answer_block, EXPRESSIONS)]
GARBAGE += ["x" * MILLION + answer_block("1"), answer_block("1") + "x" * MILLION]


def grade(text: str) -> None:
    reward(text)
    extract_answer(text)


@pytest.mark.parametrize("number", range(len(GARBAGE)))
def test_a_million_characters_of_garbage_take_less_than_100_ms(number: int):
    assert reward(GARBAGE[number])["answer"] == 0.0
    assert cpu_seconds(grade, GARBAGE[number], repeats=3) < 0.1


@pytest.mark.parametrize(
    "unit", ["<think>", "</think>", "<answer>", "</answer>", "</think>\n<answer>", "<", "(", "1"]
)
def test_time_grows_linearly_with_the_text(unit: str):
    """A lazy regex over repeated unclosed tags needed 23 s for 22,000 of them."""
    assert_linear(lambda k: cpu_seconds(grade, unit * k, repeats=7), 2 * MILLION // len(unit))


@pytest.mark.parametrize("unit", ["<think>", "<answer>", "</think>\n<answer>"])
def test_a_few_thousand_unclosed_tags_take_less_than_100_ms(unit: str):
    """A quadratic search takes seconds for these, and hours for the texts above."""
    assert cpu_seconds(grade, unit * 5_000, repeats=3) < 0.1


def test_the_longest_expressions_take_less_than_100_ms():
    """At the cap of 1,000 characters, with every number given, so that all of it is evaluated."""
    number = "9" * 20  # the longest that is read
    for operation in "+-*/":
        text = operation.join([number] * (countdown.MAX_ANSWER_CHARS // (len(number) + 1)))
        nums = [int(number)] * (text.count(operation) + 1)
        assert cpu_seconds(score, text, nums, 1) < 0.1
    fractions = "+".join(f"1/{n}" for n in range(2, 190))
    nums = [1] * 188 + list(range(2, 190))
    assert score(fractions, nums, 1) == 0.0
    assert cpu_seconds(score, fractions, nums, 1) < 0.1


# Answers and questions as text


def test_extract_answer_is_the_first_block_without_spaces():
    assert extract_answer(answer_block(" 25 + 3\n* 7 ")) == "25+3*7"
    assert extract_answer(answer_block("1") + answer_block("2")) == "1"
    for text in ("25 + 3 * 7", "<answer>25", answer_block(" "), answer_block("1" * 1_001)):
        assert extract_answer(text) is None


def test_a_typed_question_is_understood_or_answered_with_an_example():
    texts = ["numbers: 3, 7, 25, target: 46", "Numbers: [3, 7, 25]; Target: 46\n"]
    for text in (*texts, "numbers: 3 7 25, target: 46", "number 3 7 25 target 46"):
        assert countdown.parse_question(text) == EXAMPLE
    texts = ["", "3 7 25", "numbers: 3 7 25", "target: 46", "numbers: , target: 46"]
    texts += [f"numbers: 3 {wrong}, target: 46" for wrong in ("7.5", "x", "[] 7", "9" * 5_000)]
    texts += [f"numbers: 3 7 25, target: {wrong}" for wrong in ("4.6", "46, please", "9" * 5_000)]
    for text in texts:
        with pytest.raises(ValueError, match="numbers: 3 7 25, target: 46"):
            countdown.parse_question(text)


def test_the_prompt_poses_the_question_opens_the_think_block_and_shows_an_answer_that_is_paid():
    user, assistant = countdown.generate_prompt(EXAMPLE, options=Options())
    assert (user["role"], assistant["role"]) == ("user", "assistant")
    assert "[3, 7, 25]" in user["content"] and "make 46." in user["content"]
    assert assistant["content"].endswith("<think>")
    shown = user["content"].split("for example ")[1].removesuffix(".")
    assert answer_reward_function(shown, nums=[1, 2, 4], target=12) == 1.0


# Generated questions


def solutions_exist(values: list[Fraction], target: int) -> bool:
    """Brute force: every pair, every operation."""
    if len(values) == 1:
        return values[0] == target
    for i, j in combinations(range(len(values)), 2):
        a, b = values[i], values[j]
        rest = [v for k, v in enumerate(values) if k not in (i, j)]
        results = {a + b, a * b, a - b, b - a}
        results |= {x / y for x, y in ((a, b), (b, a)) if y}
        if any(solutions_exist([*rest, result], target) for result in results):
            return True
    return False


def test_every_generated_question_has_a_solution():
    for split in ("train", "validation"):
        for row in generate(split, 100, with_seed=seed(5)):
            assert solutions_exist([Fraction(n) for n in row["nums"]], row["target"]), row
    assert not solutions_exist([Fraction(1)] * 3, 60)


def test_train_and_validation_never_overlap_whatever_seed_and_size():
    """Nor does the order of the numbers matter."""
    keys = {"train": set(), "validation": set()}
    for split, num_examples in (("train", 3_000), ("validation", 1_000)):
        for n, num in ((0, num_examples), (7, 300)):
            rows = generate(split, num, with_seed=seed(n))
            keys[split] |= {question_key({**row, "nums": row["nums"][::-1]}) for row in rows}
    assert not keys["train"] & keys["validation"]
    assert all(is_in_split(key, split) for split in keys for key in keys[split])


def test_generated_questions_depend_on_the_seed_alone():
    """Pinned, as those of validation are below: else nobody could repeat published results."""
    rows = generate("train", 20)
    assert rows[:3] == PINNED_ROWS and rows[:10] == generate("train", 10)


PINNED_ROWS = [
    {"nums": [47, 44, 7, 24], "target": 20},
    {"nums": [4, 30, 8, 8], "target": 24},
    {"nums": [17, 39, 37], "target": 93},
]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_generated_questions_respect_their_ranges_and_do_not_repeat(data: st.DataObject):
    ranges = {}
    for name, lows, widths in [
        ("numbers", st.integers(3, 5), st.integers(0, 2)),  # 2 may make fewer than 10 questions
        ("number", st.integers(1, 20), st.integers(10, 80)),
        ("target", st.integers(1, 40), st.integers(50, 900)),
    ]:
        ranges[f"min_{name}"] = data.draw(lows)
        ranges[f"max_{name}"] = ranges[f"min_{name}"] + data.draw(widths)
    rows = generate("train", 10, **ranges)
    assert len({question_key(row) for row in rows}) == 10
    for row in rows:
        assert ranges["min_numbers"] <= len(row["nums"]) <= ranges["max_numbers"]
        assert all(ranges["min_number"] <= n <= ranges["max_number"] for n in row["nums"])
        assert ranges["min_target"] <= row["target"] <= ranges["max_target"]


def test_the_count_of_numbers_is_uniform():
    rows = generate("train", 4_000, with_seed=seed(), min_numbers=3, max_numbers=5)
    counts = [len(row["nums"]) for row in rows]
    standard_error = math.sqrt(1 / 3 * 2 / 3 / len(rows))  # 0.007
    for count in (3, 4, 5):
        assert counts.count(count) / len(rows) == pytest.approx(1 / 3, abs=5 * standard_error)


def test_a_count_without_new_questions_gives_way_to_the_others():
    """All questions with 2 numbers of 1..3 and a target of 1..9 are soon used up."""
    rows = generate("train", 60, min_numbers=2, **SMALL_SPACE | {"max_numbers": 4})
    assert len({question_key(row) for row in rows}) == 60
    assert sum(len(row["nums"]) == 2 for row in rows) < 20


SMALL_SPACE = {"max_numbers": 3, "max_number": 3, "min_target": 1, "max_target": 9}


def test_without_a_number_of_examples_all_questions_come_up_to_a_limit():
    """A small space of questions is then no mistake; ten thousand take about a second."""
    rows = generate("train", None, **SMALL_SPACE)
    assert 20 < len(rows) < 100
    assert len({question_key(row) for row in rows}) == len(rows)
    start = time.process_time()
    many = generate("train", None)
    assert time.process_time() - start < 3
    assert len(many) == countdown.MAX_GENERATED == 10_000
    assert many[:10] == generate("train", 10)[:10]


@pytest.mark.parametrize(
    ("num_examples", "options", "message"),
    [
        (1_000, SMALL_SPACE, r"num_examples 1000: only \d+ different train questions"),
        (None, {"max_number": 1, "min_target": 50}, "only 0 different train"),
        (5, {"min_numbers": 4, "max_numbers": 3}, r"min_numbers = 4 must be at most max_numbers"),
        (5, {"min_number": 60}, r"min_number = 60 must be at most max_number \(50\)"),
        (5, {"max_target": 10**30}, "max_target\n"),  # refused by the schema
        (5, {"min_number": 0}, "min_number\n"),
        (5, {"min_target": -1}, "min_target\n"),
    ],
)
def test_impossible_requests_are_named_and_do_not_loop(num_examples, options, message):
    with pytest.raises(ValueError, match=message):
        generate("train", num_examples, **options)


def test_the_questions_in_results_are_generated_ones_and_those_of_tuning_are_apart():
    """Scores on the board can only be compared if the validation's, the default, never change."""
    files = [ROOT / f"results/countdown-{name}.jsonl" for name in ("tuning", "validation")]
    tuning, validation = ([*map(json.loads, file.read_text().splitlines())] for file in files)
    assert validation == generate("validation", 512)
    digest = hashlib.sha256(files[1].read_bytes()).hexdigest()
    assert digest in (ROOT / "results/board.md").read_text()
    assert tuning == generate("validation", 512, with_seed=1, exclude=validation)
    keys, other = ({question_key(row) for row in rows} for rows in (tuning, validation))
    assert len(keys) == 512 and not keys & other
    assert all(is_in_split(key, "validation") for key in keys)
