"""What holds for every expression and every number that the graders read."""

import re
from fractions import Fraction
from itertools import product
from random import Random

import pytest
from harness import seed, table
from hypothesis import given, settings
from hypothesis import strategies as st
from test_verdicts import ANSWER_BLOCK, GSM8K_WAYS, extract_answer, reward

import countdown
from tasks import gsm8k


def score(expression: str, nums: list[int], target: int | Fraction) -> float:
    completion = ANSWER_BLOCK.format(expression)
    return countdown.answer_reward_function(completion, nums=nums, target=target)


def expression(random: Random, num_leaves: int) -> str:
    if random.random() < 0.2:
        return f"-({expression(random, num_leaves)})"
    if num_leaves == 1:
        return str(random.randint(0, 99))
    first, operation = random.randrange(1, num_leaves), random.choice("+-*/")
    others = expression(random, num_leaves - first)
    return f"({expression(random, first)}) {operation}({others})"


def test_an_expression_is_paid_for_its_value_and_its_numbers_alone():
    for i in range(500):
        text = expression(Random(seed(i)), 1 + i % 6)
        nums = [int(number) for number in re.findall("[0-9]+", text)]
        try:
            value = eval(re.sub("[0-9]+", r"Fraction(\g<0>)", text))
        except ZeroDivisionError:
            assert not any(score(text, nums, target) for target in range(-10, 30)), text
            continue
        assert score(text, nums, value) == score(f" ({text}) ", nums[::-1], value) == 1.0, text
        for wrong in (nums[1:], [*nums, nums[0]], [nums[0] + 1, *nums[1:]]):
            assert score(text, wrong, value) == 0.0, text
        assert score(text, nums, value + Fraction(1, 10**9)) == 0.0, text


def test_format_reward_is_that_of_the_published_regex():
    """^<think>.*?</think>\\n<answer>.*?</answer>$, or 0.1 and 0.5 for its two blocks."""
    pieces = ("a", "\n", "</think>", "</think>\n<answer>", "<answer>", "</answer>", "</ANSWER>")
    blocks = "<think>.*?</think>", "<answer>.*?</answer>"
    forms = (*blocks, "^{}\n{}$".format(*blocks))
    for text in map("".join, product(pieces, repeat=5)):
        think, answer, both = (re.search(f, f"<think>{text}", re.DOTALL) for f in forms)
        paid = 1.0 if both else 0.1 * bool(think) + 0.5 * bool(answer)
        assert countdown.format_reward_function(text) == paid, text


def reads(text: str) -> set[str | None]:
    """What is read of an answer in each style."""
    ways = GSM8K_WAYS["number"]
    return {extract_answer("gsm8k", frame.format(text), {}, **how) for how, frame in ways}


def render(number: int, decimals: str, *, with_commas: bool = True) -> str:
    digits = f"{abs(number):,}" if with_commas else str(abs(number))
    return f"{'-' * (number < 0)}{digits}{'.' * bool(decimals)}{decimals}"


whole = st.integers(-(10**12), 10**12)
decimals = st.sampled_from(["", "0", "5", "25", "50", "000", "0001"])
DECORATIONS = ["{}", "${}", "**{}**", "{} eggs", "{}.", "**${}.**", "{}%", r"\boxed{{{}}}"]


@settings(max_examples=200, deadline=None)
@given(whole, decimals, st.booleans(), st.sampled_from(DECORATIONS))
def test_every_rendering_of_a_number_is_that_number_alone(number, decimals, commas, decoration):
    plain = render(number, decimals, with_commas=False)
    text = decoration.format(render(number, decimals, with_commas=commas))
    (answer,) = reads(text)
    assert Fraction(answer) == Fraction(plain)
    assert gsm8k.lenient_answer(f"It takes 7 days.\n{text}") == answer
    for gold in (plain, f"{number + 1}", f"{plain.partition('.')[0]}.125", f"{number}0"):
        paid = reward("gsm8k", f"#### {text}", {"answer": f"#### {gold}"})["answer"]
        assert paid == (Fraction(gold) == Fraction(plain))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 999), st.sampled_from("/:^*=+-\u00d7\u00f7\u2044'"), st.integers(0, 999))
def test_two_joined_numbers_are_never_read_as_one_of_them(a: int, joiner: str, b: int):
    for text in (f"{a}{joiner}{b}", f"{a} {joiner} {b}", f"{a},{b:02d}", f"{a}e{b}"):
        if not re.fullmatch("[1-9][0-9]{0,2},[0-9]{3}", text):
            assert reads(text) == {None}


BLOCK = "<thinking>\na\n</thinking>\n<answer>\n{}\n</answer>"


@pytest.mark.parametrize(("column", "grading"), [(1, "lenient"), (2, "strict")])
def test_tags_pay_for_format_ending_integer_and_answer(column: int, grading: str):
    """Strict ones want each newline: the four rewards of the run that gsm8k-lora.yaml repeats."""
    for row in table("tasks/cases.yaml")["tags"]:
        how = {"prompt_style": "tags", "tag_grading": grading}
        parts = reward("gsm8k", row[0], {"answer": "#### 18"}, **how)
        form, ending, integer, answer = row[column]
        expected = {"format": form, "answer": answer, "ending": ending, "integer": integer}
        assert parts == expected | {"length": 0}, row[0]


def test_plain_pays_for_the_answer_alone_and_too_many_tokens_cost_something():
    for completion, answer in {"#### 18": 1, "#### 19": 0, "": 0, BLOCK.format("18"): 0}.items():
        parts = reward("gsm8k", completion, {"answer": "#### 18"})
        assert parts == dict.fromkeys(gsm8k.REWARD_PARTS, 0) | {"answer": answer}
    for style in ("plain", "tags"):
        for limit, num_tokens, cost in ((3, 3, 0), (3, 4, -0.5), (None, 5_000, 0)):
            options = gsm8k.Options(prompt_style=style, max_tokens=limit)
            how = {"options": options, "num_tokens": num_tokens}
            assert gsm8k.reward_function("18", {"answer": "#### 18"}, **how)["length"] == cost


def test_equal_answers_are_one_vote_in_their_normal_form():
    votes = {r"\boxed{1} \boxed{\dfrac{10}{12}}": "5/6", r"\boxed{x = 0.50}": "1/2"}
    votes |= {r"\boxed{\dfrac12}": "1/2", r"\boxed{10,\!080}": "10080"}
    votes |= {r"\boxed{\left( 3, \frac{\pi}2 \right)}": r"(3,\frac{\pi}{2})"}
    votes |= dict.fromkeys([r"\boxed{ }", r"\boxed{1", "5"])  # None
    votes |= {f"\\boxed{{{'(' * 300}}}": "(" * 300}
    assert {text: extract_answer("math500", text, {}) for text in votes} == votes
    votes = {"\n25 + 3 * 7 \n": "25+3*7", "25 + 3\n*7": "25+3\n*7", " ": None, "1" * 1_001: None}
    votes |= {"1</answer><answer>2": "1"}
    for text, vote in votes.items():
        assert extract_answer("countdown", ANSWER_BLOCK.format(text), {}) == vote
    assert {extract_answer("countdown", text, {}) for text in ("25 + 3", "<answer>25")} == {None}
