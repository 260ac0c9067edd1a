"""The MATH task: what it asks and what it pays for."""

import pytest
from harness import load_rows, make_config, real_file

from tasks import math500
from tasks.math500 import Options, parse_question, parse_row, question_key

EXAMPLE = {"problem": r"What is $\frac{1}{2} + \frac{1}{3}$?", "answer": r"\frac{5}{6}"}


def reward(completion: str, example: dict = EXAMPLE, *, options: Options) -> dict[str, float]:
    return math500.reward_function(completion, example, options=options, num_tokens=0)


# Reward


PAID = {r"So it is $\boxed{\frac{5}{6}}$.": 1, r"\boxed{\frac{1}{2} + \frac{1}{3}}": 1}
PAID |= {r"\boxed{\frac{2}{3}}, no: \boxed{5/6}": 1, r"\boxed{5/6}, no: \boxed{\frac{2}{3}}": 0}
PAID |= {r"\boxed{0.8333}": 0, r"\frac{5}{6}": 0, "": 0}


def test_only_the_last_box_is_paid_and_only_for_the_gold_value():
    for completion, answer in PAID.items():
        parts = reward(completion, options=Options(grader_timeout_s=30.0))
        assert parts == {"answer": answer, "timeout": 0.0}, completion
        assert tuple(parts) == math500.REWARD_PARTS


def test_a_time_out_is_counted_and_earns_nothing(monkeypatch):
    limits = []

    def stopped(completion: str, gold: str, *, timeout_s: float) -> bool | None:
        limits.append(timeout_s)
        return None

    monkeypatch.setattr(math500, "grade", stopped)
    assert reward("x", options=Options()) == {"answer": 0.0, "timeout": 1.0}
    config = make_config("task.name=math500", "task.train=a/b", "task.grader_timeout_s=2.5")
    assert config.task.reward_weights == {"answer": 1.0, "timeout": 0.0}
    reward("x", options=config.task)
    assert limits == [5.0, 2.5]


def test_extract_answer_is_the_last_box_in_a_normal_form():
    answers = {r"\boxed{1} \boxed{\dfrac{10}{12}}": "5/6", r"\boxed{x=0.50}": "1/2"}
    answers |= dict.fromkeys([r"\boxed{ }", r"\boxed{1", "5"])  # None
    for completion, answer in answers.items():
        assert math500.extract_answer(completion, EXAMPLE, options=Options()) == answer


# Prompt


def test_a_typed_problem_becomes_an_example_that_no_answer_solves():
    example = parse_question(" What is $1+1$?\n")
    assert example == {"problem": "What is $1+1$?", "answer": ""}
    assert reward(r"\boxed{}", example, options=Options())["answer"] == 0.0
    with pytest.raises(ValueError, match="write a problem, for example"):
        parse_question(" \n")


# Rows


SETTINGS = [  # a problem, another one, and whether it is the same
    ("What is $1 + 1$?", "what  is 1+1 ?", True),
    (r"Find $\frac{1}{2}$.", r"Find $\dfrac{1}{2}$", True),
    (r"Is $\left(1, 2\right)$ it?", "Is $(1,2)$ it?", True),
    *(("What is $1 + 1$?", f"What is ${other}$?", False) for other in ("1 - 1", "1 + 11")),
    ("Is $x < 1$?", "Is $x > 1$?", False),
    (r"Find $\leftarrow$", r"Find $\arrow$", False),
]


def test_a_problem_is_known_again_however_it_is_set_and_its_answer_may_be_a_number():
    for problem, other, same in SETTINGS:
        assert (question_key({"problem": problem}) == question_key({"problem": other})) == same
    row = {"problem": "What is $1 + 1$?", "answer": 2}
    assert parse_row(row, options=Options()) == row | {"answer": "2"}


def test_the_real_evaluation_file_loads_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    file = real_file("math500", "test.json")
    rows = load_rows(math500, file, "validation", 500, held_out=False)
    assert len({question_key(row) for row in rows}) == 500
    with pytest.raises(ValueError, match="no question left for train"):
        load_rows(math500, file, "train", held_out=False, exclude=rows)
