"""The GSM8K task: which numbers it reads, what its graders pay for, and what it asks."""

import itertools
import json
import re
from fractions import Fraction

import pytest
from harness import assert_linear, cpu_seconds, load_rows, real_file
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tasks import gsm8k
from tasks.gsm8k import REWARD_PARTS, Options, lenient_answer, parse_question, parse_row

MILLION = 1_000_000
MAX_MARKS, MAX_TAIL_CHARS = gsm8k.MAX_MARKS, gsm8k.MAX_TAIL_CHARS
ROW = {"question": "What is 2 * 9?", "answer": "2 * 9 = <<2*9=18>>18\n#### 18"}
MINUS = "\N{MINUS SIGN}"


def answer_block(answer: str) -> str:
    return f"<thinking>\n2 * 9\n</thinking>\n<answer>\n{answer}\n</answer>"


def in_both_styles(answer: str) -> dict[str, str]:
    """For each prompt style a completion with this answer."""
    return {"plain": f"so\n#### {answer}", "tags": answer_block(answer)}


def extract_answer(completion: str, **options: str) -> str | None:
    return gsm8k.extract_answer(completion, ROW, options=Options(**options))


def reward(
    completion: str, example_row: dict = ROW, *, num_tokens: int = 0, **options: str | int
) -> dict[str, float]:
    return gsm8k.reward_function(
        completion, example_row, options=Options(**options), num_tokens=num_tokens
    )


def solved(completion: str, gold: str, **options: str) -> float:
    return reward(completion, {"question": "?", "answer": f"#### {gold}"}, **options)["answer"]


# Numbers as a person reads them

SAME_AS_18 = [
    *("18", "18.", "18.0", "018", "+18", "\n18", "18\n19"),
    *("$18", "18$", "$18$", "$18.00", r"\$18", "€18", "= 18", "(18)", '"18"'),
    *("**18**", "*18*.", "_18_", "`18`", r"\boxed{18}", r"$\boxed{18}$", "18<|end|>"),
    *("18 kg", "18 meters", "18 kids", "18 halfway", "18 ... yes"),
    *("18 eggs", "18 eggs.", "18%", "18 %", "18km", "18th", "18-year-old"),
    *("$18/hour", "$18 / hour"),
    *("18. That is all", "18, that is all", "18: that is all", "18 and that is all", "18 个"),
    *("18 (2 * 9)", "18.0 [2 * 9]", "18 #### 20"),
    *("18 (= 2 * 9)", "18 eggs (3 boxes of 6)", "18 (3 * (2 + 4))", "18 (and that is all)"),
    *("**18** (2 * 9)", "*18* [2 * 9]", "$18$ (2 * 9)"),
    *("18 dollars/hour (2 * 9)", "18 (**2 * 9**)"),
    *("18, that is (2 * 9)", "18 for (3 boxes)"),
    *("18 m^2", "18 m\N{SUPERSCRIPT TWO}", "18m^2", r"18 \text{ cm}^{2}", "18 ft^3"),  # units
    *("18 six-packs", "18 ten-dollar bills", "18 quarters", "18 tents", "18 thirsty dogs"),
    *("18<|end|>20", "18</s>20", "18 <<2*9=18>>", "18\r\n19", "18 eggs\nor 19"),
]
NO_NUMBERS = [
    *("", "x", "eighteen", "Answer 18", "- 18", "--18"),
    *("1/2", "1 / 2", "18 1/2", "2 and 1/2", r"18\frac{1}{2}"),  # fractions
    *("18\N{VULGAR FRACTION ONE HALF}", "18 \N{VULGAR FRACTION ONE HALF}"),
    *("1e3", "1E+3", "1e-3", "10^3", "10**3", "10\N{SUPERSCRIPT TWO}", "0x12"),  # powers
    *("7,8,9", "7, 8, 9", "7; 8", "18 or 20", "18-20", "18\N{EN DASH}20", "18 to 20"),  # several
    *("3:30", "5'3", "18.5.3", "18 + 2", "3 * 6 = 18", "3 x 6", "3x6", r"3 \times 6"),
    *("1 000", "1_000", "1,00", "12,34", "1,0000", "1234,567", "0,500", "1.000,50"),  # thousands
    *("5 hours and 30 minutes", "5 h 30", "5 ft 3 in", "5 eggs or 6 eggs", "5 eggs, 6 hens"),
    *("3 boxes of 6 = 18", "18 eggs = 3 * 6", "5 minus 3", "5 plus 3", "5 out of 6", "5, then 6"),
    *("**5** hours and **30** minutes", r"\boxed{5} \text{ or } \boxed{6}", r"\(5\) and \(6\)"),
    *("5 eggs < 6", "5 <= x <= 6", "5 # 6", "5 eggs \N{EN DASH} 6", "5 $x$ 6", "18. 19"),
    *("18. There were 3 boxes", "-5 degrees to 5 degrees", "5 m^2 3", "5 km30", "(5 or so) 6"),
    *("18 (or 19)", "5 hours (and 30 minutes)", "5 [ or 6]", "5 (+ 3)", "5 (-3)", "5(3)", "(5)(3)"),
    *("5 (hours) 30 (minutes)", "5 (a (b)) 6", "18 (2 * 9) or 19", "5 (6"),
    *("5 + (2 * 9)", "5*(3 + 1)", "5 * (3 + 1)", "5 ** (2)"),
    *("5 - [30 / 2]", "5 = (2 + 3)", "5 (* 3)"),
    *("5 or (3 + 3)", "5 eggs minus (2 * 9)", "5 and (6 hens)"),
    *("5 (**6**)", "20=x+(1/4)x", "**5** * (6 + 1)"),
    *("5(3 + 1)", "(5)(3 + 1)", "5(1/2)", "5 (1/2)", "5[3 * 6]", "5 eggs(6 eggs)"),
    *("5 or six", "5 hours and thirty minutes", "5 minus Three", "5 and twenty-one", "5 TO ten"),
    *("5 hours and a half", "5 eggs or half a dozen", "5 and two-thirds", "5 hours and a quarter"),
    *("5 tenths", "5 hundredths", "5 or a million", "5 or _six_", "5 or *One*", "5 seventeens"),
    *("5 million", "5 Thousand", "5-thousand", "5 dozen", "5k", "5 k", "5K", "5M"),  # multiplied
    *("5!", "5 squared", "5 and a half", "5 and three quarters", "5 half", "5 thirds"),
    *("5 e5", "5 E-5", "5..7", "5...7", "5 % of 50", "5% of 50", "5 percent of 50"),
    *("\N{EN DASH}85", "\N{EM DASH}85", "\N{FIGURE DASH}85", "\N{EN DASH}$85", "$\N{EN DASH}85$"),
    *("1\u0662", "\u0661\u0668", "\N{FULLWIDTH DIGIT ONE}"),  # digits of other scripts
]


@pytest.mark.parametrize("text", SAME_AS_18)
def test_what_surrounds_a_number_does_not_matter(text: str):
    for style, completion in in_both_styles(text).items():
        assert extract_answer(completion, prompt_style=style) == "18"
        assert solved(completion, "18", prompt_style=style) == 1.0
        assert solved(completion, "19", prompt_style=style) == 0.0


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_what_is_no_number_is_no_answer(text: str):
    golds = {"1", "18", "1000", "0", *re.findall("[0-9]+", text)}
    for style, completion in in_both_styles(text).items():
        assert extract_answer(completion, prompt_style=style) is None
        assert all(solved(completion, gold, prompt_style=style) == 0.0 for gold in golds)


BEHIND_MARKS = {  # a completion: its answer
    **dict.fromkeys(("#### Answer\n#### 18", "#### 1/2 of it\n#### 18", "#### 18\n#### 19"), "18"),
    **{"##### 18": "18", "#### $-18": "-18", f"#### {MINUS}18": "-18", "#### -0.0": "0"},
    **{"#### .50": "0.5", "#### 1,234,567.250": "1234567.25", "#### 17 or 19\n#### 18": "18"},
    **{"#### " + "9" * 100: "9" * 100, "#### " + "9" * 101: None},
    **dict.fromkeys(("### 18", "18", "")),  # None
    "#### 18" + " x" * 5_000 + " 19": "18",  # too far away
    **{"#### x\n" * (MAX_MARKS - 1) + "#### 18": "18", "#### x\n" * MAX_MARKS + "#### 18": None},
}


@pytest.mark.parametrize(("completion", "answer"), BEHIND_MARKS.items())
def test_the_number_behind_the_first_mark_that_one_follows_is_the_answer(completion, answer):
    assert extract_answer(completion) == answer


def test_numbers_are_compared_exactly():
    assert solved("#### 9007199254740993", "9007199254740992") == 0.0  # equal as floats
    assert solved("#### 0.1000000000000000055", "0.1") == 0.0
    assert solved("#### 18.0000000000000000001", "18") == 0.0
    assert solved("#### 18.0000000000000000000", "18") == 1.0


whole = st.integers(-(10**12), 10**12)
decimals = st.sampled_from(["", "0", "5", "25", "50", "000", "0001"])


def render(number: int, decimals: str, *, with_commas: bool) -> str:
    digits = f"{abs(number):,}" if with_commas else str(abs(number))
    return f"{'-' * (number < 0)}{digits}{'.' * bool(decimals)}{decimals}"


@settings(max_examples=300, deadline=None)
@given(
    whole,
    decimals,
    st.booleans(),
    st.sampled_from(["{}", "${}", "**{}**", "{} eggs", "{}.", "**${}.**", "{}%", r"\boxed{{{}}}"]),
    st.sampled_from(["plain", "tags"]),
)
def test_every_rendering_of_a_number_is_that_number_alone(
    number, decimals, with_commas, decoration, style
):
    plain = render(number, decimals, with_commas=False)
    text = decoration.format(render(number, decimals, with_commas=with_commas))
    completion = in_both_styles(text)[style]
    answer = extract_answer(completion, prompt_style=style)
    assert Fraction(answer) == Fraction(plain)
    assert solved(completion, plain, prompt_style=style) == 1.0
    for other in (f"{number + 1}", f"{plain.partition('.')[0]}.125", f"{number}0"):
        if Fraction(other) != Fraction(plain):
            assert solved(completion, other, prompt_style=style) == 0.0
    assert lenient_answer(f"It takes 7 days.\n{text}") == answer


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 999), st.sampled_from("/:^*=+-\u00d7\u00f7\u2044'"), st.integers(0, 999))
def test_two_joined_numbers_are_never_read_as_one_of_them(a: int, joiner: str, b: int):
    for text in (f"{a}{joiner}{b}", f"{a} {joiner} {b}", f"{a},{b:02d}", f"{a}e{b}"):
        if not re.fullmatch("[1-9][0-9]{0,2},[0-9]{3}", text):
            assert extract_answer(f"#### {text}") is None


JOINERS = ["and", "or", "minus", "boxes of", "= x *", "+", "hours,", "to", "~", "\\text{ and }"]
joiner = st.lists(st.sampled_from(JOINERS) | st.text(st.characters(exclude_characters="\r\n#<([")))


@settings(max_examples=300, deadline=None)
@given(whole, decimals, joiner, whole, st.sampled_from(["{}", "{} (2 * 9)", "{} [boxes] ", "{}."]))
def test_a_line_of_two_numbers_is_never_read_as_one_of_them(a, a_part, words, b, decoration):
    first = decoration.format(render(a, a_part, with_commas=True))
    text = f"{first} {' '.join(words)} {b} minutes\nso"
    for style, completion in in_both_styles(text).items():
        assert extract_answer(completion, prompt_style=style) is None


OFFICIAL = {"#### 18": "18", "#### 1,800": "1800", "#### -5": "-5", "#### 1/2": "1"}
OFFICIAL |= {"#### 7,8,9": "789", "#### 18.0": "18.0", "#### ,": ""}
OFFICIAL |= dict.fromkeys(["#### $18", "####18", "#### \u0661"])


@pytest.mark.parametrize(("completion", "answer"), OFFICIAL.items())
def test_official_grading_is_the_published_regex_with_its_quirks(completion: str, answer):
    assert extract_answer(completion, grading="official") == answer
    for gold in ("18", "18.0"):
        assert solved(completion, gold, grading="official") == float(answer == gold)


LENIENT = {"It is 3 * 6 = $18.00, I think.": "18", "Then 1/2 of 36 at 3:30, or 1e-3": "36"}
LENIENT |= {"#### 18\nor was it -20?": "-20", "5 eggs or 6 eggs (or 7)": "7"}
LENIENT |= dict.fromkeys(["from 20-18", "x18, v2.0, 1 000", "none", "5!"])
LENIENT |= {"18" + " " * (MAX_TAIL_CHARS - 1): None, "18" + " " * (MAX_TAIL_CHARS - 2): "18"}


def test_the_lenient_answer_is_the_last_number():
    assert {text: lenient_answer(text) for text in LENIENT} == LENIENT
    assert gsm8k.is_lenient_solved("So it is 18.", ROW, options=Options(grading="official"))
    assert not gsm8k.is_lenient_solved("So it is 18, not 19.", ROW, options=Options())


@pytest.mark.parametrize("dash", "\u02d7\u2010\u2012\u2013\u2014\u2015\u2796\ufe63\uff0d\u00b1")
def test_a_number_behind_a_dash_is_not_read_nor_is_the_one_before(dash: str):
    for text in ("{}18", "{} 18", "{}$18", "{}(18)", "**{}18**", r"$\boxed{{{}18}}$", "20 {} 18"):
        assert lenient_answer("It is 7, or " + text.format(dash)) is None
    assert lenient_answer(f"the sum {dash} it is 18") == "18"
    assert lenient_answer(f"18 {dash} that is it") == "18"


def test_a_minus_behind_which_no_digit_stands_is_a_minus_too():
    for text in ("-(18)", "-**18**", r"-\boxed{18}", "minus 18", "Negative **18**"):
        assert lenient_answer(f"It is {text}") is None
        assert lenient_answer(f"It is {text}".replace("-", MINUS)) is None
    for text in ("-18", "-$18", r"-\$18", "(-18)", r"\boxed{-18}"):
        assert lenient_answer(f"It is {text}") == "-18"
        assert lenient_answer(f"It is {text}".replace("-", MINUS)) == "-18"
    assert lenient_answer(f"It is {MINUS} 18") is None
    assert lenient_answer("The sum:\n- 18\n- **19**") == "19"


# The reward


def test_plain_pays_for_the_answer_alone():
    assert reward("#### 18") == dict.fromkeys(REWARD_PARTS, 0.0) | {"answer": 1.0}
    for completion in ("#### 19", "", answer_block("18")):
        assert reward(completion) == dict.fromkeys(REWARD_PARTS, 0.0)


TAGS = [  # a completion, and what it is paid for its format, its ending, an integer, the answer
    (answer_block("18"), 1.0, 0.0, 1.0, 1.0),
    (answer_block("$18"), 1.0, 0.0, -1.0, 1.0),
    (answer_block(""), 1.0, 0.0, -1.0, 0.0),
    (answer_block("18") + " Done.", 1.0, -0.5, 1.0, 1.0),
    ("Sure! " + answer_block("18"), -1.0, 0.0, 1.0, 1.0),
    ("<thinking>a</thinking> so <answer>18</answer>", -1.0, 0.0, 1.0, 1.0),
    ("<thinking>a<answer>18</answer></thinking>", -1.0, -0.5, 1.0, 1.0),
    ("<answer>18</answer>", -1.0, 0.0, 1.0, 1.0),
    ("<thinking></answer></thinking><answer>18", -1.0, -0.5, -1.0, 0.0),
    (answer_block("18") + answer_block("19"), -1.0, -0.5, 1.0, 1.0),
    (answer_block("19") + answer_block("18"), -1.0, -0.5, 1.0, 0.0),
    ("<thinking>a</thinking><answer>18", -1.0, 0.0, -1.0, 0.0),
    ("", -1.0, 0.0, -1.0, 0.0),
]
STRICT_TAGS = "<thinking>\na\n</thinking>\n<answer>\n{}\n</answer>"
STRICT = [
    (STRICT_TAGS.format("18"), 1.0, 0.0, 1.0, 1.0),
    (STRICT_TAGS.format("1,800"), 1.0, 0.0, -1.0, 0.0),
    (STRICT_TAGS.format("$18"), 1.0, 0.0, -1.0, 1.0),
    (STRICT_TAGS.format("\u0661"), 1.0, 0.0, -1.0, 0.0),
    (STRICT_TAGS.format("18") + "\n", -1.0, 0.0, 1.0, 1.0),
    (STRICT_TAGS.format("18") + " Done.", -1.0, -0.5, 1.0, 1.0),
    (STRICT_TAGS.format("18").replace("\n<answer>", "\n\n<answer>"), -1.0, 0.0, 1.0, 1.0),
    ("<thinking>a</thinking>\n<answer>18</answer>", -1.0, 0.0, 1.0, 1.0),
    ("<thinking>\n</thinking>\n<answer>\n</answer>", -1.0, 0.0, -1.0, 0.0),
    ("<thinking>\na\n</thinking>\n<answer>\n18", -1.0, -0.5, -1.0, 0.0),
    ("", -1.0, -0.5, -1.0, 0.0),
]


@pytest.mark.parametrize(("grading", "cases"), [("lenient", TAGS), ("strict", STRICT)])
def test_tags_pay_for_format_ending_integer_and_answer(grading, cases):
    """Strict ones want each newline: the four rewards of the run that gsm8k-lora.yaml repeats."""
    for completion, form, ending, integer, answer in cases:
        parts = reward(completion, prompt_style="tags", tag_grading=grading)
        expected = {"format": form, "answer": answer, "ending": ending, "integer": integer}
        assert parts == expected | {"length": 0.0}, completion


@pytest.mark.parametrize("style", ["plain", "tags"])
def test_only_more_tokens_than_allowed_cost_something(style: str):
    for limit, num_tokens, cost in ((3, 3, 0.0), (3, 4, -0.5), (None, 5_000, 0.0)):
        options = {"prompt_style": style, "max_tokens": limit, "num_tokens": num_tokens}
        assert reward("18", **options)["length"] == cost


def test_an_example_without_a_gold_answer_is_never_solved():
    row = parse_question("What is 2 * 9?")
    for completion, grading in itertools.product(("", "#### 18", "####"), ("exact", "official")):
        assert reward(completion, row, grading=grading)["answer"] == 0.0


# Properties: any text at all is graded, fast

PIECES = [
    *("#### ", " $", "18", ",", "000", "1/2", ".", "-", MINUS, "e3", "**", "\\boxed{", "\n"),
    *("<thinking>", "</thinking>", "<answer>", "</answer>", "</ANSWER>"),
    *("\0", "\ud800", "\u0663", "\N{SUPERSCRIPT TWO}"),
]
piece = st.sampled_from(PIECES) | st.text(st.characters(), max_size=5)
any_text = st.lists(piece, max_size=20).map("".join)
STYLES = [{"prompt_style": style} for style in ("plain", "tags")]
STYLES += [STYLES[0] | {"grading": "official"}, STYLES[1] | {"tag_grading": "strict"}]


@settings(max_examples=500, deadline=None)
@given(any_text)
@example("\0")
@example("#### \ud800")
@example("<answer>\udcff</answer>")
def test_any_text_gets_a_reward_of_the_allowed_set(text: str):
    for style in STYLES:
        parts = reward(text, **style, max_tokens=5)
        assert tuple(parts) == REWARD_PARTS
        assert parts["answer"] in (0.0, 1.0) and parts["length"] in (0.0, -0.5)
        assert parts["format"] in (-1.0, 0.0, 1.0) and parts["integer"] in (-1.0, 0.0, 1.0)
        assert parts["ending"] in (0.0, -0.5)
        answer = extract_answer(text, **style)
        assert answer is None or re.fullmatch(r"-?[0-9.]*", answer)
    lenient = lenient_answer(text)
    assert lenient is None or re.fullmatch(r"-?[0-9]+(\.[0-9]+)?", lenient)


UNITS = [
    *("x", "\0", "\ud800", " ", "a ", "$", "-", "1", "1 ", ",000", "1/2 ", "\\boxed{"),
    *("(", "(1", "(a)", "[(a) ", "((a)", "one ", "-", "\N{EN DASH} ", "minus ", "m^", "< ", "# "),
    *("#### 18 or 19 ", "#### 5 (" + "a" * 600 + "6 ", "####", "#### "),
    *("#### $", "#### 1/2 ", "#### 7, 8 ", "#### 1a"),
    *("<thinking>", "<answer>", "</answer>", "<answer>1/2</answer>"),
]
FRAMES = ["{}", "#### {}", "#### 1{}", "#### 1{}/2", "<answer>{}</answer>", "<answer>1{}2</answer>"]


def grade(text: str, style: dict) -> None:
    reward(text, **style)
    extract_answer(text, **style)
    lenient_answer(text)


def style_seconds(text: str, *, repeats: int) -> float:
    """Those of the slowest style."""
    return max(cpu_seconds(grade, text, style, repeats=repeats) for style in STYLES)


@pytest.mark.parametrize("unit", UNITS)
def test_a_million_characters_of_garbage_take_less_than_100_ms(unit: str):
    for frame in FRAMES:
        text = frame.format(unit * (MILLION // len(unit)))
        assert any(style_seconds(text, repeats=n) < 0.1 for n in (1, 5)), frame


@pytest.mark.parametrize(
    "unit", ["#### $", "#### 1/2 ", "#### 5 (a) 6", "(", "$", "1", "1 ", ",000", "a", "<answer>"]
)
def test_time_grows_linearly_with_the_text(unit: str):
    assert_linear(lambda k: style_seconds(f"#### 1{unit * k}/2", repeats=3), MILLION // len(unit))


# The prompt


def test_plain_asks_the_bare_question_and_tags_for_a_layout_that_is_paid_in_full():
    question = {"role": "user", "content": "What is 2 * 9?"}
    assert gsm8k.generate_prompt(ROW, options=Options()) == [question]
    system, user = gsm8k.generate_prompt(ROW, options=Options(prompt_style="tags"))
    assert user == question and system["role"] == "system"
    layout = system["content"].partition(":\n")[2]
    completion = layout.replace("the answer, a whole number and nothing else", "18")
    assert completion != layout
    for grading in ("lenient", "strict"):
        parts = reward(completion, prompt_style="tags", tag_grading=grading)
        assert sum(parts.values()) == 3.0


# Questions


@pytest.mark.parametrize("answer", ["1,800", 1800, "2 * 900 #### 1800"])
def test_an_answer_in_a_file_may_be_only_the_number(answer: str | int):
    for grading in ("exact", "official"):
        options = Options(grading=grading)
        row = parse_row({"question": "What is 900 * 2?", "answer": answer}, options=options)
        assert reward("#### 1800", row, grading=grading)["answer"] == 1.0


def test_a_row_that_no_completion_can_earn_is_refused():
    """The published regex wants one space behind the mark, in the gold answer too."""
    row = {"question": "What is 2 + 3?", "answer": "2 + 3 = 5\n####5"}
    assert solved("#### 5", parse_row(row, options=Options())["answer"][-1]) == 1.0
    with pytest.raises(ValueError, match='official grading needs "#### 18", one space'):
        parse_row(row, options=Options(grading="official"))


def test_a_typed_question_may_bring_its_answer():
    assert parse_question(" What is 2 * 9?\n") == {"question": "What is 2 * 9?", "answer": ""}
    row = parse_question("What is 2 * 9? #### 18")
    assert row["question"] == "What is 2 * 9?"
    assert reward("#### 18", row)["answer"] == 1.0
    for text in ("", " \n", "#### 18", "What? #### x"):
        with pytest.raises(ValueError, match="write the question"):
            parse_question(text)


# The real rows


@pytest.mark.parametrize(("name", "num_rows"), [("train", 7473), ("test", 1319)])
def test_the_gold_answers_of_all_real_rows_are_paid(name, num_rows, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    source = real_file("gsm8k", f"{name}.jsonl")
    rows = load_rows(gsm8k, source, "train", held_out=False)
    assert rows == [json.loads(line) for line in source.read_text().splitlines()]
    assert len(rows) == num_rows
    for row in rows:
        gold = extract_answer(row["answer"], grading="official")
        assert extract_answer(row["answer"]) == gold == str(int(gold))
        assert lenient_answer(row["answer"]) == gold
        for grading in ("exact", "official"):
            assert reward(row["answer"], row, grading=grading)["answer"] == 1.0
            assert reward("", row, grading=grading)["answer"] == 0.0
            wrong = f"#### {int(gold) + 1}"
            assert reward(wrong, row, grading=grading)["answer"] == 0.0
        assert sum(reward(answer_block(gold), row, prompt_style="tags").values()) == 3.0
