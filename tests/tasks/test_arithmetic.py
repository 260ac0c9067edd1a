"""The arithmetic task: what its grader pays for, and which sums it trains on."""

import functools

import pytest
from harness import assert_linear, cpu_seconds, load_rows, seed
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.questions.tasks import is_in_split
from tasks import arithmetic
from tasks.arithmetic import Options, parse_question, question_key

EXAMPLE = {"a": 47, "b": 38}  # 85
MILLION = 1_000_000


def reward(completion: str, example_row: dict = EXAMPLE) -> dict[str, float]:
    return arithmetic.reward_function(completion, example_row, options=Options(), num_tokens=0)


generate = functools.partial(load_rows, arithmetic, "generated")

# The reward


RIGHT = [
    *("85", "85.", " 85 ", "$85", "85.0", "85!", "85!!", "85!!!\n", "85?!", "85.0!", "$85!"),
    *("The answer is **85**.", "The answer is (85).", "\\boxed{85}", "**85!**", '"85!"'),
    *("47 + 38 = 85", "47+38=85.", "The sum of 47 and 38 is 85.", "The answer is 85!"),
    *("47 + 38 = 84. Wait, no: it is 85", "7 + 8 = 15, 4 + 3 + 1 = 8, so 85", "84! No, 85!"),
    *("40 + 30 = 70\n7 + 8 = 15\n70 + 15 = 85\n", "47 + 38 = 85! Great!", "85!<|im_end|>"),
    *("Wow! It is 85! (I am sure!)", "The sum \N{EN DASH} it is 85", "84\n85"),
    *("85 \N{EM DASH} that is the sum", "46\N{EN DASH}47 is wrong, 85 is right"),
]
WRONG = [
    *("", "eighty-five", "84", "185", "850", "8", "-85", "85.5", "8.5", "85%5", "085 + 1", "8 5"),
    *("85e1", "0x85", "x85", "85/1", "85 - 1", "85:00", "8,5", "85,000", "8485", "85 or 86"),
    *("8!5", "85!5", "85!0", "84!!", "185!", "85!/85!", "85!/1", "84! + 85!", "1 * 85!", "1/85!"),
    *("85! or 86", "85! = 86!", "85!=86", "85!k", "-85!", "\N{EN DASH}85!", "85 + 1!"),
    *("47 + 38 \N{EN DASH} 85", "85, or \N{EN DASH}84", "84 \N{EN DASH} 85", "84\N{EN DASH}85"),
    *("-(85)", "-**85**", r"-\boxed{85}", "minus 85", "It is negative 85", "\N{MINUS SIGN} 85"),
    *("47 + 38 = 85 = 86", "85 is the sum of 47 and 38", "85, because 47 + 38", "85\n86"),
    *("83 84 85", "83/84/85", "83, 84, 85, 86", " ".join(map(str, range(20, 199)))),
    *("\u0668\u0665", "\uff18\uff15", "8\u00b25"),  # digits of other scripts
    *["\n".join(map(str, range(20, 199))), "__import__('os')._exit(0)"],
]


@pytest.mark.parametrize("completion", RIGHT)
def test_the_sum_is_paid_where_it_is_the_last_number(completion: str):
    assert reward(completion) == {"answer": 1.0}


@pytest.mark.parametrize("completion", WRONG)
def test_other_numbers_and_lists_of_numbers_are_not_paid(completion: str):
    assert reward(completion) == {"answer": 0.0}


def test_only_one_sum_is_paid_for_a_completion():
    """Whatever it lists, a completion is right for one question at most."""
    lists = [" ".join, "\n".join, ", ".join, " or ".join, "; ".join, "".join, " = ".join]
    for join in lists:
        text = join(str(number) for number in range(20, 199))
        assert sum(reward(text, {"a": n, "b": 0})["answer"] for n in range(20, 199)) <= 1


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 999), st.integers(0, 999), st.integers(-99, 99))
def test_the_sum_is_paid_and_no_other_number(a: int, b: int, error: int):
    row = {"a": a, "b": b}
    for text in ("{}", "{}.", f"{a} + {b} = {{}}", "It is **{}**.", "{}\n", "{}!", "It is {}!!"):
        assert reward(text.format(a + b + error), row)["answer"] == float(error == 0)


@pytest.mark.parametrize(
    "unit", ["8", "85 ", "85,", "8.", "= ", "$", "x", "\0", "85\n", "(", "-", "85!", "85! "]
)
def test_a_million_characters_are_graded_in_linear_time(unit: str):
    text = unit * (MILLION // len(unit))
    assert cpu_seconds(reward, text, repeats=3) < 0.1
    assert_linear(lambda k: cpu_seconds(reward, text * k, repeats=3), 1)


def test_answers_in_another_form_are_the_same_vote():
    texts = ("85", "85.0", "it is $85.", "47 + 38 = 85", "85!", "no number")
    answers = [arithmetic.extract_answer(text, EXAMPLE, options=Options()) for text in texts]
    assert answers == ["85"] * 5 + [None]


# Prompt


def test_a_typed_question_is_understood_or_answered_with_an_example():
    for text in ("47 + 38", "47+38", " 47 +38\n"):
        assert parse_question(text) == EXAMPLE
    mistakes = ["", "47", "47 + 38 + 1", "47 - 38", "47 + x", "-4 + 5", "\u0664 + 5"]
    for text in (*mistakes, "9" * 5_000 + " + 1"):
        with pytest.raises(ValueError, match=r"47 \+ 38"):
            parse_question(text)


# Generated questions


def test_train_and_validation_never_overlap_whatever_seed_order_and_size():
    train = {question_key(row) for n in (None, 100) for row in generate("train", n)}
    rows = [row for n in range(3) for row in generate("validation", 300, with_seed=n)]
    assert not train & {question_key(row) for row in rows} and len(train) > 3_000
    turned_round = ({"a": row["b"], "b": row["a"]} for row in rows)
    assert all(is_in_split(question_key(row), "validation") for row in turned_round)


def test_all_sums_of_the_range_are_in_one_split_once():
    rows = generate("train", None) + generate("validation", None)
    assert len({question_key(row) for row in rows}) == len(rows) == 90 * 91 / 2
    assert {number for row in rows for number in row.values()} == set(range(10, 100))
    assert any(row["a"] > row["b"] for row in rows) and any(row["a"] < row["b"] for row in rows)
    rows = generate("train", None, min_number=0, max_number=20)
    assert all(0 <= number <= 20 for row in rows for number in row.values())


def test_generated_questions_depend_on_the_seed_alone():
    """Pinned: other rows would make published results impossible to repeat."""
    assert generate("train", 3) == PINNED_TRAIN_ROWS
    assert generate("validation", 3) == PINNED_EVAL_ROWS
    assert generate("train", 20) != generate("train", 20, with_seed=seed(1))


PINNED_TRAIN_ROWS = [{"a": 36, "b": 85}, {"a": 25, "b": 57}, {"a": 18, "b": 74}]
PINNED_EVAL_ROWS = [{"a": 14, "b": 56}, {"a": 78, "b": 79}, {"a": 16, "b": 38}]


def test_excluded_questions_are_not_generated():
    seen = generate("train", 20)
    turned_round = [{"a": row["b"], "b": row["a"]} for row in seen]
    unseen = generate("train", None, exclude=turned_round)
    assert not {question_key(row) for row in seen} & {question_key(row) for row in unseen}
    assert len(unseen) == len(generate("train", None)) - 20


@pytest.mark.parametrize(
    ("num_examples", "options", "message"),
    [
        (4_000, {}, r"num_examples 4000: there are only \d+ different train questions"),
        (None, {"min_number": 47, "max_number": 47}, "there are only 0 different train"),
        (5, {"min_number": 60, "max_number": 50}, r"min_number = 60 must be at most max_number"),
        (5, {"max_number": 1_000}, "max_number\n"),  # refused by the schema
    ],
)
def test_impossible_requests_are_named(num_examples: int | None, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        generate("train", num_examples, **options)
