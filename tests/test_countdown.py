"""The Countdown task: what its graders pay for, and which questions it trains on."""

import ast
import json
import math
import random
import re
import time
from fractions import Fraction
from itertools import combinations

import pytest
from conftest import seed
from hypothesis import example, given, settings
from hypothesis import strategies as st
from timing import assert_linear

import countdown
from countdown import (
    answer_reward_function,
    extract_answer,
    format_reward_function,
    generate_prompt,
    is_held_out,
    load_examples,
    parse_question,
    question_key,
    reward_function,
)

NUMS, TARGET = [3, 7, 25], 46  # 25 + 3 * 7
MILLION = 1_000_000


def answer_block(expression: str) -> str:
    return f"so it works.</think>\n<answer>{expression}</answer>"


def score(expression: str, nums: list[int], target: int | Fraction) -> float:
    return answer_reward_function(answer_block(expression), nums=nums, target=target)


# The format reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("thought</think>\n<answer>1 + 2</answer>", 1.0),
        ("</think>\n<answer></answer>", 1.0),
        ("several\nlines</think>\n<answer>1\n+ 2</answer>", 1.0),
        ("a</think>\n<answer>1</answer>\n", 1.0),  # $ matches before one last newline
        ("a</think> b</think>\n<answer>1</answer> c</answer>", 1.0),  # .*? reaches further
        ("a</think>\n<answer>1</answer>\n\n", 0.6),
        ("a</think>\n<answer>1</answer> I am done", 0.6),
        ("a</think><answer>1</answer>", 0.6),
        ("a</think>\r\n<answer>1</answer>", 0.6),
        ("<answer>1</answer></think>", 0.6),
        ("a</think>\n<answer>1", 0.1),
        ("a</think>\n</answer><answer>", 0.1),
        ("<answer>1</answer>", 0.5),
        ("<ANSWER>1</ANSWER></THINK>", 0.0),
        ("thinking goes on and on", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward_is_as_the_issue_says(completion: str, reward: float):
    assert format_reward_function(completion) == pytest.approx(reward, abs=1e-12)


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
def test_format_reward_agrees_with_the_regex_it_replaces(completion: str):
    assert format_reward_function(completion) == format_reward_by_regex(completion)


# The answer reward


@pytest.mark.parametrize(
    "expression",
    [
        "25 + 3 * 7",
        "25+3*7",
        "  7 *3 +   25 ",
        "((25)) + (3 * (7))",
        "25 - -3 * 7",
        "25 - (-(3 * 7))",
        "-3 * -7 + 25",
        "--25 + 3 * 7",
        "(" * 300 + "25 + 3 * 7" + ")" * 300,
        "-" * 400 + "25 + 3 * 7",
    ],
)
def test_right_answers_are_paid(expression: str):
    assert score(expression, NUMS, TARGET) == 1.0


def test_values_are_exact_and_not_rounded():
    assert score("8 / (3 - 8 / 3)", [3, 3, 8, 8], 24) == 1.0  # floats give 23.99999999999999
    assert score("100000000000000000 + 1 - 1 / 3", [100000000000000000, 1, 1, 3], 10**17) == 0.0
    assert score("7 / 2", [2, 7], 3) == score("7 / 2", [2, 7], 4) == 0.0


@pytest.mark.parametrize(
    ("expression", "nums", "target"),
    [
        ("2 ** 3", [2, 3], 8),
        ("2 * * 3", [2, 3], 8),
        ("7 // 2", [2, 7], 3),
        ("7 / / 2", [2, 7], 3),
        ("99**98**97", [97, 98, 99], 1),
        ("1.5*4", [1, 4, 5], 6),
        ("1.5*4", [1, 5, 4], 20),
        ("1.0 + 2", [0, 1, 2], 3),
        ("1e2", [1, 2], 100),
        ("1_0 + 2", [2, 10], 12),
        ("0x3 + 2", [0, 2, 3], 5),
        ("1,2", [1, 2], 3),
        ("1 2", [1, 2], 12),
        ("1 2", [12], 12),
        ("2(3)", [2, 3], 6),
        ("(2)(3)", [2, 3], 6),
        ("2 + 3 = 5", [2, 3], 5),
        ("+2 + 3", [2, 3], 5),
        ("2 + 3\n", [2, 3], 5),
        ("2\t+ 3", [2, 3], 5),
        ("2 \u00d7 3", [2, 3], 6),
        ("2 \u2212 3", [2, 3], -1),
        ("\u0662 + 3", [2, 3], 5),
        ("\uff12 + 3", [2, 3], 5),
        ("\u00b2 + 3", [2, 3], 5),
        ("02 + 3", [2, 3], 5),
        ("00 + 3", [0, 3], 3),
        ("1" * 21, [int("1" * 21)], int("1" * 21)),
        ("2 + 3 / 0", [0, 2, 3], 2),
        ("3 / (2 - 2)", [2, 2, 3], 0),
        ("(2 + 3", [2, 3], 5),
        ("2 + 3)", [2, 3], 5),
        ("2) + (3", [2, 3], 5),
        ("2 + 3 +", [2, 3], 5),
        ("* 2 + 3", [2, 3], 5),
        ("2 3 +", [2, 3], 5),
        ("2 -", [2], 2),
        ("()", [], 0),
        ("() 2 + 3", [2, 3], 5),
        ("2 () + 3", [2, 3], 5),
        ("", [], 0),
        ("   ", [], 0),
        ("5", [2, 3], 5),
        ("2 + 3 + 5 - 5", [2, 3], 5),
        ("2 + 2 + 3 - 2", [2, 3], 5),
        ("sum([2, 3])", [2, 3], 5),
        ("__import__('os').getpid()", [2, 3], 5),
        ("2 + 3" + " " * 1_000, [2, 3], 5),
    ],
)
def test_wrong_or_malformed_answers_are_not_paid(expression: str, nums: list[int], target: int):
    assert score(expression, nums, target) == 0.0


def test_only_the_first_answer_block_counts():
    right, wrong = "<answer>25 + 3 * 7</answer>", "<answer>25 + 3 + 7</answer>"
    assert answer_reward_function(right + wrong, nums=NUMS, target=TARGET) == 1.0
    assert answer_reward_function(wrong + right, nums=NUMS, target=TARGET) == 0.0
    assert answer_reward_function("</answer>" + right, nums=NUMS, target=TARGET) == 1.0
    assert answer_reward_function("<answer>" + right, nums=NUMS, target=TARGET) == 0.0
    assert answer_reward_function(right + " and more", nums=NUMS, target=TARGET) == 1.0
    assert answer_reward_function("<answer>25 + 3 * 7", nums=NUMS, target=TARGET) == 0.0
    assert answer_reward_function("25 + 3 * 7", nums=NUMS, target=TARGET) == 0.0


def test_reward_function_names_both_parts():
    example_row = {"nums": NUMS, "target": TARGET}
    rewards = reward_function(answer_block("25 + 3 * 7"), example_row)
    assert rewards == {"format": 1.0, "answer": 1.0}
    assert reward_function("<answer>25 + 3 * 7</answer>", example_row) == {
        "format": 0.5,
        "answer": 1.0,
    }


# Properties: a random expression carries its text, its numbers and its exact value

Expression = tuple[str, list[int], Fraction]


def combine(left: Expression, right: Expression, operation: str, space: str) -> Expression:
    values = {
        "+": left[2] + right[2],
        "-": left[2] - right[2],
        "*": left[2] * right[2],
        "/": left[2] / right[2] if right[2] else Fraction(0),
    }
    if operation == "/" and right[2] == 0:
        operation = "+"
    text = f"({left[0]}){space}{operation}{space}({right[0]})"
    return text, left[1] + right[1], values[operation]


leaves = st.integers(0, 99).map(lambda n: (str(n), [n], Fraction(n)))
spaces = st.sampled_from(["", " ", "  "])
expressions = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(combine, inner, inner, st.sampled_from("+-*/"), spaces),
        inner.map(lambda e: (f"-({e[0]})", e[1], -e[2])),
        inner.map(lambda e: (f"({e[0]})", e[1], e[2])),
    ),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(expressions)
def test_every_expression_with_the_right_value_is_paid(expression: Expression):
    text, nums, value = expression
    assert score(text, nums, value) == 1.0


@settings(max_examples=300, deadline=None)
@given(expressions, st.data())
def test_a_wrong_value_or_a_wrong_number_is_never_paid(expression: Expression, data: st.DataObject):
    text, nums, value = expression
    i = data.draw(st.integers(0, len(nums) - 1))
    assert score(text, nums, value + 1) == 0.0
    assert score(text, nums, value - 1) == 0.0
    assert score(text, [*nums[:i], nums[i] + 1, *nums[i + 1 :]], value) == 0.0
    assert score(text, nums[:i] + nums[i + 1 :], value) == 0.0
    assert score(text, [*nums, nums[i]], value) == 0.0


@settings(max_examples=300, deadline=None)
@given(expressions, st.randoms(use_true_random=False))
def test_order_of_numbers_spaces_and_redundant_brackets_do_not_matter(
    expression: Expression, rng: random.Random
):
    text, nums, value = expression
    shuffled = rng.sample(nums, len(nums))
    spaced = re.sub(r"[0-9]+|.", lambda m: m.group() + " " * rng.randrange(3), text)
    bracketed = re.sub(r"[0-9]+", lambda m: f"(({m.group()}))", text)
    for variant in (text, spaced, bracketed, f"({text})"):
        assert score(variant, shuffled, value) == 1.0
        assert score(variant, shuffled, value + 1) == 0.0


def value_by_ast(text: str) -> Fraction | None:
    """An independent oracle: Python's own parser, then exact arithmetic on four operators."""
    try:
        return fold(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def fold(node: ast.AST) -> Fraction:
    match node:
        case ast.Constant(value=int() as value):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -fold(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return fold(left) + fold(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return fold(left) - fold(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return fold(left) * fold(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return fold(left) / fold(right)
    raise ValueError(f"not in the grammar: {ast.dump(node)}")


MORSELS = ["0", "1", "2", "7", "25", "10", "+", "-", "*", "/", "(", ")", " "]


@settings(max_examples=2_000, deadline=None)
@given(st.lists(st.sampled_from(MORSELS), max_size=12).map("".join))
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


@settings(max_examples=1_000, deadline=None)
@given(
    st.permutations(["25", "3", "7"]),
    st.sampled_from(["{} {} {} {} {}", "({} {} {}) {} {}", "{} {} ({} {} {})", "{} {} {} {} -{}"]),
    st.lists(st.sampled_from(["+", "-", "*", "/", "**", "//", "."]), min_size=2, max_size=2),
)
def test_near_misses_are_paid_only_for_the_right_value(
    nums: list[str], shape: str, operators: list[str]
):
    text = shape.format(nums[0], operators[0], nums[1], operators[1], nums[2])
    assert score(text, NUMS, TARGET) == float(value_by_ast(text) == TARGET)


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
    rewards = reward_function(text, {"nums": nums, "target": target})
    assert time.process_time() - start < 0.1
    assert rewards["format"] in (0.0, 0.1, 0.5, 0.6, 1.0)
    assert rewards["answer"] in (0.0, 1.0)
    assert extract_answer(text) is None or extract_answer(text) in "".join(text.split())


GARBAGE = {
    "letters": "x" * MILLION,
    "nul": "\0" * MILLION,
    "surrogates": "\ud800" * MILLION,
    "astral": "\U0001f600" * MILLION,
    "unclosed think": "<think>" * (MILLION // 7),
    "closed thinks": "</think>" * (MILLION // 8),
    "unclosed answers": "<answer>" * (MILLION // 8),
    "closed answers": "</answer>" * (MILLION // 9),
    "bridges": "</think>\n<answer>" * (MILLION // 17),
    "almost bridges": "</think>\n<answer" * (MILLION // 16),
    "many answers": "<answer>1</answer>" * (MILLION // 18),
    "opening angles": "<" * MILLION,
    "newlines": "\n" * MILLION,
    "digits": answer_block("1" * MILLION),
    "zeros": answer_block("0" * MILLION),
    "brackets": answer_block("(" * (MILLION // 2) + "3" + ")" * (MILLION // 2)),
    "10,000 nested": answer_block("(" * 10_000 + "25 + 3 * 7" + ")" * 10_000),
    "minuses": answer_block("-" * MILLION + "3"),
    "powers": answer_block("9**" * (MILLION // 3) + "9"),
    "spaces": answer_block(" " * MILLION),
    "a late answer": "x" * MILLION + answer_block("1"),
    "an early answer": answer_block("1") + "x" * MILLION,
}


def cpu_seconds(text: str, *, repeats: int) -> float:
    """The best of `repeats`, so that other work on the machine does not count."""
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        reward_function(text, {"nums": NUMS, "target": TARGET})
        extract_answer(text)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("name", GARBAGE)
def test_a_million_characters_of_garbage_take_less_than_100_ms(name: str):
    assert reward_function(GARBAGE[name], {"nums": NUMS, "target": TARGET})["answer"] == 0.0
    assert cpu_seconds(GARBAGE[name], repeats=3) < 0.1


@pytest.mark.parametrize(
    "unit", ["<think>", "</think>", "<answer>", "</answer>", "</think>\n<answer>", "<", "(", "1"]
)
def test_time_grows_linearly_with_the_text(unit: str):
    """A lazy regex over repeated unclosed tags needed 23 s for 22,000 of them."""
    assert_linear(lambda k: cpu_seconds(unit * k, repeats=7), 2 * MILLION // len(unit))


def test_the_longest_expressions_take_less_than_100_ms():
    """At the cap of 1,000 characters, with every number given, so that all of it is evaluated."""
    number = "9" * countdown.MAX_DIGITS
    for operation in "+-*/":
        text = operation.join([number] * (countdown.MAX_ANSWER_CHARS // (len(number) + 1)))
        nums = [int(number)] * (text.count(operation) + 1)
        start = time.process_time()
        score(text, nums, 1)
        assert time.process_time() - start < 0.1
    fractions = "+".join(f"1/{n}" for n in range(2, 190))
    nums = [1] * 188 + list(range(2, 190))
    start = time.process_time()
    assert score(fractions, nums, 1) == 0.0
    assert time.process_time() - start < 0.1


# Answers and questions as text


def test_extract_answer_is_the_first_block_without_spaces():
    assert extract_answer(answer_block(" 25 + 3\n* 7 ")) == "25+3*7"
    assert extract_answer(answer_block("1") + answer_block("2")) == "1"
    assert extract_answer("25 + 3 * 7") is None
    assert extract_answer("<answer>25") is None
    assert extract_answer(answer_block(" ")) is None
    assert extract_answer(answer_block("1" * 1_001)) is None


@pytest.mark.parametrize(
    "text",
    [
        "numbers: 3 7 25, target: 46",
        "numbers: 3, 7, 25, target: 46",
        "Numbers: [3, 7, 25]; Target: 46\n",
        "number 3 7 25 target 46",
    ],
)
def test_a_typed_question_is_understood(text: str):
    assert parse_question(text) == {"nums": NUMS, "target": TARGET}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3 7 25",
        "numbers: 3 7 25",
        "target: 46",
        "numbers: , target: 46",
        "numbers: 3 7.5, target: 46",
        "numbers: 3 7 x, target: 46",
        "numbers: 3 7 25, target: 4.6",
        "numbers: 3 [] 7, target: 4",
        "numbers: 3 7 25, target: 46, please",
        "numbers: " + "9" * 5_000 + ", target: 4",
        "numbers: 3 7, target: " + "9" * 5_000,
    ],
)
def test_a_question_that_is_not_understood_is_answered_with_an_example(text: str):
    with pytest.raises(ValueError, match="numbers: 3 7 25, target: 46"):
        parse_question(text)


def test_the_prompt_poses_the_question_and_opens_the_think_block():
    user, assistant = generate_prompt({"nums": NUMS, "target": TARGET})
    assert user["role"] == "user"
    assert "[3, 7, 25]" in user["content"]
    assert "make 46." in user["content"]
    assert assistant["role"] == "assistant"
    assert assistant["content"].endswith("<think>")


def test_the_example_in_the_prompt_is_an_answer_that_is_paid():
    user, _ = generate_prompt({"nums": NUMS, "target": TARGET})
    shown = user["content"].split("for example ")[1].removesuffix(".")
    assert answer_reward_function(shown, nums=[1, 2, 4], target=12) == 1.0


def test_prompts_differ_only_in_the_numbers_and_the_target():
    """A small tokenizer can then hold each fixed chunk as one token."""
    chunks = re.split(r"\{nums\}|\{target\}", countdown.QUESTION)
    assert len(chunks) == 3
    text = generate_prompt({"nums": [1, 2], "target": 3})[0]["content"]
    assert text == f"{chunks[0]}[1, 2]{chunks[1]}3{chunks[2]}"


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
        for row in load_examples("generated", split, num_examples=100, seed=seed(5)):
            assert solutions_exist([Fraction(n) for n in row["nums"]], row["target"]), row


def test_the_brute_force_solver_knows_impossible_questions():
    assert not solutions_exist([Fraction(1), Fraction(1), Fraction(1)], 60)


def test_train_and_validation_never_overlap_whatever_seed_and_size():
    keys = {"train": set(), "validation": set()}
    for split, n, num_examples in [
        ("train", 0, 3_000),
        ("train", 1, 500),
        ("validation", 0, 1_000),
        ("validation", 7, 300),
    ]:
        rows = load_examples("generated", split, num_examples=num_examples, seed=seed(n))
        keys[split] |= {question_key(row) for row in rows}
    assert not keys["train"] & keys["validation"]


def test_questions_are_held_out_whatever_the_order_of_their_numbers():
    rows = load_examples("generated", "validation", num_examples=100)
    assert all(is_held_out({"nums": row["nums"][::-1], "target": row["target"]}) for row in rows)


def test_one_question_in_eight_is_held_out():
    rows = [{"nums": [a, b, c], "target": 9} for a in range(20) for b in range(a) for c in range(b)]
    assert sum(map(is_held_out, rows)) / len(rows) == pytest.approx(1 / 8, abs=0.04)


def test_generated_questions_depend_on_the_seed_alone():
    """Pinned: other rows would make published results impossible to repeat."""
    rows = [dict(row) for row in load_examples("generated", "train", num_examples=20)]
    assert rows[:3] == PINNED_TRAIN_ROWS
    assert load_examples("generated", "validation", num_examples=3).to_list() == PINNED_EVAL_ROWS
    assert rows == load_examples("generated", "train", num_examples=20, seed=0).to_list()
    assert rows[:10] == load_examples("generated", "train", num_examples=10).to_list()
    assert rows != load_examples("generated", "train", num_examples=20, seed=1).to_list()


PINNED_TRAIN_ROWS = [
    {"nums": [47, 44, 7, 24], "target": 20},
    {"nums": [4, 30, 8, 8], "target": 24},
    {"nums": [17, 39, 37], "target": 93},
]
PINNED_EVAL_ROWS = [
    {"nums": [39, 7, 48, 1], "target": 16},
    {"nums": [21, 16, 49, 33], "target": 87},
    {"nums": [11, 4, 45, 6], "target": 54},
]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_generated_questions_respect_their_ranges_and_do_not_repeat(data: st.DataObject):
    ranges = {}
    for name, lows, widths in [
        ("numbers", st.integers(2, 5), st.integers(0, 2)),
        ("number", st.integers(1, 20), st.integers(10, 80)),
        ("target", st.integers(1, 40), st.integers(50, 900)),
    ]:
        ranges[f"min_{name}"] = data.draw(lows)
        ranges[f"max_{name}"] = ranges[f"min_{name}"] + data.draw(widths)
    rows = load_examples("generated", "train", num_examples=10, **ranges)
    assert len({question_key(row) for row in rows}) == 10
    for row in rows:
        assert ranges["min_numbers"] <= len(row["nums"]) <= ranges["max_numbers"]
        assert all(ranges["min_number"] <= n <= ranges["max_number"] for n in row["nums"])
        assert ranges["min_target"] <= row["target"] <= ranges["max_target"]


def test_the_count_of_numbers_is_uniform():
    counts = range(3, 6)
    ranges = {"min_numbers": counts[0], "max_numbers": counts[-1]}
    rows = load_examples("generated", "train", num_examples=4_000, seed=seed(), **ranges)
    found = [len(nums) for nums in rows["nums"]]
    standard_error = math.sqrt(1 / 3 * 2 / 3 / len(rows))  # 0.007
    for count in counts:
        share = found.count(count) / len(rows)
        assert share == pytest.approx(1 / 3, abs=5 * standard_error)


def test_a_count_without_new_questions_gives_way_to_the_others():
    """All questions with 2 numbers of 1..3 and a target of 1..9 are soon used up."""
    small = {"min_number": 1, "max_number": 3, "min_target": 1, "max_target": 9}
    rows = load_examples(
        "generated", "train", num_examples=60, min_numbers=2, max_numbers=4, **small
    )
    assert len({question_key(row) for row in rows}) == 60
    assert sum(len(nums) == 2 for nums in rows["nums"]) < 20


SMALL_SPACE = {"max_numbers": 3, "max_number": 3, "min_target": 1, "max_target": 9}


def test_a_space_of_questions_that_is_too_small_is_said_and_does_not_loop():
    with pytest.raises(ValueError, match=r"num_examples 1000: only \d+ different train questions"):
        load_examples("generated", "train", num_examples=1_000, **SMALL_SPACE)


def test_without_a_number_of_examples_all_questions_come_up_to_a_limit():
    """A small space of questions is then no mistake."""
    rows = load_examples("generated", "train", num_examples=None, **SMALL_SPACE)
    assert 20 < len(rows) < 100
    assert len({question_key(row) for row in rows}) == len(rows)
    many = load_examples("generated", "train", num_examples=None)
    assert len(many) == countdown.MAX_GENERATED
    assert many[:10] == load_examples("generated", "train", num_examples=10)[:10]


def test_ten_thousand_questions_take_about_a_second():
    start = time.process_time()
    rows = load_examples("generated", "train", num_examples=10_000)
    assert rows.column_names == ["nums", "target"]
    assert time.process_time() - start < 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_examples": None, "max_number": 1, "min_target": 50}, "only 0 different train"),
        ({"num_examples": 0}, "num_examples 0: choose at least 1"),
        ({"num_examples": 5, "min_numbers": 4, "max_numbers": 3}, "min_numbers 4, max_numbers 3"),
        ({"num_examples": 5, "min_number": 0}, "min_number 0"),
        ({"num_examples": 5, "min_target": -1}, "min_target -1"),
        ({"num_examples": 5, "max_target": 10**30}, "max_target 10"),
    ],
)
def test_impossible_options_are_named(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load_examples("generated", "train", **options)


def test_an_unknown_split_is_named():
    with pytest.raises(ValueError, match="split must be train or validation, not 'test'"):
        load_examples("generated", "test", num_examples=5)


# Questions from files


@pytest.fixture(autouse=True)
def dataset_cache_in_a_temporary_folder(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


ROWS = [{"nums": [n, 7, 25], "target": 46 + n} for n in range(1, 81)]


def write_file(folder, suffix: str, rows: list[dict]) -> str:
    from datasets import Dataset

    path = folder / f"questions.{suffix}"
    if suffix == "jsonl":
        path.write_text("\n".join(json.dumps(row) for row in rows))
    elif suffix == "json":
        path.write_text(json.dumps(rows))
    elif suffix == "parquet":
        Dataset.from_list(rows).to_parquet(path)
    elif suffix == "csv":
        path.write_text(
            "nums,target\n" + "".join(f'"{row["nums"]}",{row["target"]}\n' for row in rows)
        )
    return str(path)


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_files_load_and_split_without_overlap(tmp_path, suffix: str):
    source = write_file(tmp_path, suffix, ROWS)
    train = load_examples(source, "train", num_examples=None).to_list()
    validation = load_examples(source, "validation", num_examples=None).to_list()
    assert train == [row for row in ROWS if not is_held_out(row)]
    assert validation == [row for row in ROWS if is_held_out(row)]
    assert len(validation) > 0
    everything = load_examples(source, "validation", num_examples=None, held_out=False)
    assert everything.to_list() == ROWS


def test_csv_numbers_may_be_separated_by_spaces(tmp_path):
    path = tmp_path / "questions.csv"
    path.write_text("id,nums,target\na,3 7 25,46\nb,[1 2 3],6\n")
    rows = load_examples(str(path), "validation", num_examples=None, held_out=False)
    assert rows.to_list() == [{"nums": NUMS, "target": 46}, {"nums": [1, 2, 3], "target": 6}]


def test_a_folder_with_brackets_in_its_name_is_no_pattern(tmp_path):
    folder = tmp_path / "run[1]*"
    folder.mkdir()
    source = write_file(folder, "jsonl", ROWS)
    assert len(load_examples(source, "train", num_examples=None, held_out=False)) == len(ROWS)


def test_some_rows_of_a_file_are_drawn_by_the_seed(tmp_path):
    source = write_file(tmp_path, "jsonl", ROWS)
    rows = load_examples(source, "train", num_examples=10, seed=seed(3)).to_list()
    assert len(rows) == 10
    assert rows == load_examples(source, "train", num_examples=10, seed=seed(3)).to_list()
    assert rows != load_examples(source, "train", num_examples=10, seed=seed(4)).to_list()
    assert len(load_examples(source, "train", num_examples=1_000)) < len(ROWS)  # at most


def test_training_can_avoid_the_questions_of_an_evaluation_file(tmp_path):
    source = write_file(tmp_path, "jsonl", ROWS)
    evaluation = load_examples(source, "validation", num_examples=20, held_out=False)
    train = load_examples(source, "train", num_examples=None, held_out=False, exclude=evaluation)
    assert len(train) == len(ROWS) - 20
    assert not {question_key(row) for row in train} & {question_key(row) for row in evaluation}
    seen = load_examples("generated", "train", num_examples=20)
    unseen = load_examples("generated", "train", num_examples=50, exclude=seen)
    assert not {question_key(row) for row in seen} & {question_key(row) for row in unseen}


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("jsonl", '{"numbers": [1, 2], "target": 3}', "no column nums among numbers, target"),
        ("jsonl", '{"nums": [1, 2], "goal": 3}', "no column target among nums, goal"),
        ("csv", "a,b\n1,2\n", "no column nums and target among a, b"),
        ("jsonl", '{"nums": [1, 2.5], "target": 3}', r"row 1: nums is \[1.0, 2.5\]"),
        ("jsonl", '{"nums": [1, 2], "target": 3.5}', "row 1: target is 3.5"),
        ("jsonl", '{"nums": [1, 2], "target": 3}\n{"nums": [], "target": 3}', r"row 2: nums is \["),
        ("jsonl", '{"nums": [1, -2], "target": 3}', r"row 1: nums is \[1, -2\]"),
        ("jsonl", '{"nums": null, "target": 3}', "row 1: nums is None"),
        ("jsonl", '{"nums": [1, 2], "target": true}', "row 1: target is True"),
        ("csv", "nums,target\n3 x,5\n", "row 1: nums is '3 x'"),
        ("csv", "nums,target\n3 4,5\n3 4,\n", "row 1: target is 5.0"),
        ("csv", 'nums,target\n"__import__(""os"")",5\n', "row 1: nums is"),
        ("jsonl", '{"nums": [1, 2], "target"', "cannot be loaded"),
        ("jsonl", "", "cannot be loaded"),
        ("csv", "", "cannot be loaded"),
        ("parquet", "no parquet", "cannot be loaded"),
        ("txt", "3 7 25", "unknown kind of source"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, suffix: str, content: str, message: str):
    path = tmp_path / f"questions.{suffix}"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_examples(str(path), "train", num_examples=None)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_source_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl: no such file; give generated, a \.jsonl"):
        load_examples(str(tmp_path / "none.jsonl"), "train", num_examples=None)
    with pytest.raises(ValueError, match="genrated: unknown kind of source; give generated"):
        load_examples("genrated", "train", num_examples=5)


def test_a_file_that_leaves_no_question_is_named(tmp_path):
    row = next(row for row in ROWS if not is_held_out(row))
    source = write_file(tmp_path, "jsonl", [row])
    with pytest.raises(ValueError, match="no question left for validation"):
        load_examples(source, "validation", num_examples=None)
