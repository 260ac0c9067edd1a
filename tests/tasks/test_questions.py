"""What the tasks ask: which questions they make, load and understand, and how they pose them."""

import contextlib
import hashlib
import json
import math
import random
import time
from collections import Counter
from fractions import Fraction
from functools import partial
from itertools import permutations

import pytest
from harness import ROOT, load_rows, make_config, seed
from test_verdicts import reward

import countdown
from engine.questions.tasks import is_in_split
from engine.sampling.arithmetic import value_of
from tasks import arithmetic, gsm8k, math500

generate = partial(load_rows, countdown, "generated")
SMALL_SPACE = {"max_numbers": 3, "max_number": 3, "min_target": 1, "max_target": 9}


def test_a_prompt_poses_the_question_and_what_it_shows_is_paid():
    options, example = countdown.Options(), {"nums": [3, 7, 25], "target": 46}
    user, assistant = countdown.generate_prompt(example, options=options)
    assert "[3, 7, 25]" in user["content"] and "make 46." in user["content"]
    assert assistant["role"] == "assistant" and assistant["content"].endswith("<think>")
    shown = user["content"].split("for example ")[1].removesuffix(".")
    assert reward("countdown", shown, {"nums": [1, 2, 4], "target": 12})["answer"] == 1.0

    row, question = gsm8k.parse_question("2 * 9? #### 18"), {"role": "user", "content": "2 * 9?"}
    assert gsm8k.generate_prompt(row, options=gsm8k.Options()) == [question]
    make_config("task.name=gsm8k", "task.prompt={question}", "task.system_prompt=End with ####.")
    system, user = gsm8k.generate_prompt(row, options=gsm8k.Options(prompt_style="tags"))
    layout = system["content"].partition(":\n")[2]
    completion = layout.replace("the answer, a whole number and nothing else", "18")
    for grading in ("lenient", "strict"):
        parts = reward("gsm8k", completion, row, prompt_style="tags", tag_grading=grading)
        assert user == question and sum(parts.values()) == 3.0


def test_an_answer_in_a_file_may_be_only_the_number_and_must_be_one_that_is_paid():
    for text in ("", "#### 18", "####"):
        assert reward("gsm8k", text, {"answer": ""})["answer"] == 0.0
    assert reward("math500", r"\boxed{}", {"answer": ""})["answer"] == 0.0
    for answer in ("1,800", 1800, "2 * 900 #### 1800"):
        for grading in ("exact", "official"):
            options = gsm8k.Options(grading=grading)
            row = gsm8k.parse_row({"question": "900 * 2?", "answer": answer}, options=options)
            assert reward("gsm8k", "#### 1800", row, grading=grading)["answer"] == 1.0
    row = {"question": " What is 2 + 3?\n", "answer": "2 + 3 = 5\n####5"}
    parsed = gsm8k.parse_row(row, options=gsm8k.Options())
    assert parsed["question"] == "What is 2 + 3?"
    assert reward("gsm8k", "#### 5", parsed)["answer"] == 1.0
    with pytest.raises(ValueError, match='official grading needs "#### 18", one space'):
        gsm8k.parse_row(row, options=gsm8k.Options(grading="official"))
    row = {"problem": "What is $1 + 1$?", "answer": 2}
    assert math500.parse_row(row, options=math500.Options()) == row | {"answer": "2"}


def test_countdown_reads_and_divides_as_engine_does_though_it_imports_nothing_of_it():
    """Its own copies must not move training and validation, nor what the calculator computes."""
    rng = random.Random(seed())
    pieces = [*"+-*/()", "0", "7", "25", "46", "9" * 20]
    for num in range(10_000):
        key = f"{rng.sample(range(100), 3)} {num} é"
        for split in ("train", "validation"):
            assert countdown.is_in_split(key, split) == is_in_split(key, split)
        tokens = rng.choices(pieces, k=rng.randint(1, 9))
        assert value_or_none(countdown.value_of, tokens) == value_or_none(value_of, tokens), tokens
    assert "engine" not in (ROOT / "countdown.py").read_text()
    assert value_or_none(countdown.value_of, ["-"] * 199 + ["1"]) == -1
    assert value_or_none(countdown.value_of, ["-"] * 200 + ["1"]) is None


def value_or_none(reader, tokens: list[str]) -> Fraction | None:
    with contextlib.suppress(ValueError, ZeroDivisionError):
        return reader(tokens)


@pytest.mark.parametrize(("task", "num_train"), [(countdown, 13_000), (arithmetic, 3_576)])
def test_train_and_validation_never_overlap_whatever_seed_order_and_size(task, num_train):
    """Nor does what is excluded. None draws 10,000 expressions, or all sums that are left."""
    keys, seen = {"train": set(), "validation": set()}, []
    for split, n, num in (("train", 0, 3_000), ("train", 7, None), ("validation", 0, 400)):
        for row in load_rows(task, "generated", split, num, with_seed=seed(n), exclude=seen):
            turned = {"nums": row.get("nums", [])[::-1], "a": row.get("b"), "b": row.get("a")}
            seen.append(row | turned)
            keys[split] |= {task.question_key(each) for each in (row, seen[-1])}
    assert not keys["train"] & keys["validation"]
    assert len(keys["train"]) == len(seen) - 400 == num_train
    assert all(is_in_split(key, split) for split in keys for key in keys[split])


def test_generated_questions_depend_on_the_seed_alone():
    """The first three are pinned: else nobody could repeat published results."""
    for task, split, first in (
        (countdown, "train", [([47, 44, 7, 24], 20), ([4, 30, 8, 8], 24), ([17, 39, 37], 93)]),
        (arithmetic, "train", [(36, 85), (25, 57), (18, 74)]),
        (arithmetic, "validation", [(14, 56), (78, 79), (16, 38)]),
    ):
        rows = load_rows(task, "generated", split, 3)
        assert [tuple(row.values()) for row in rows] == first
        assert rows != load_rows(task, "generated", split, 3, with_seed=seed(1))
        more = load_rows(task, "generated", split, 20)
        if task is arithmetic:
            assert {row["a"] < row["b"] for row in more} == {True, False}
        else:
            assert more[:3] == rows


def test_impossible_requests_are_named_and_do_not_loop():
    for task, num_examples, options, message in (
        (countdown, 1_000, SMALL_SPACE, r"num_examples 1000: only \d+ different train questions"),
        (countdown, 5, {"min_numbers": 4, "max_numbers": 3}, "min_numbers = 4 must be .* max_num"),
        (arithmetic, 4_000, {}, r"num_examples 4000: there are only \d+ different train"),
    ):
        with pytest.raises(ValueError, match=message):
            load_rows(task, "generated", "train", num_examples, **options)


def is_solvable(values: list[Fraction], target: int) -> bool:
    """Brute force: every pair, every operation."""
    for a, b, *rest in permutations(values) if len(values) > 1 else []:
        results = [a + b, a - b, a * b, *([a / b] if b else [])]
        if any(is_solvable([*rest, result], target) for result in results):
            return True
    return values == [target]


RANGES = [  # options, how many questions are asked for, and how many there are
    ({}, None, [countdown.MAX_GENERATED]),
    (SMALL_SPACE, None, range(20, 100)),  # all of them, which is no mistake
    (SMALL_SPACE | {"min_numbers": 2, "max_numbers": 4}, 60, [60]),  # 2 numbers are soon used up
    ({"min_numbers": 5, "max_numbers": 7, "min_number": 20, "max_number": 30}, 10, [10]),
    ({"max_numbers": 3, "min_number": 7, "max_number": 80, "max_target": 940}, 10, [10]),
]


@pytest.mark.parametrize(("changed", "num", "found"), RANGES)
def test_generated_questions_are_different_solvable_and_in_their_ranges(changed, num, found):
    """Each count of numbers is as likely; ten thousand questions take about a second."""
    options, start = countdown.Options(**changed), time.process_time()
    rows = generate("train", num, with_seed=seed(5), **changed)
    assert time.process_time() - start < 3
    assert len({countdown.question_key(row) for row in rows}) == len(rows) in found
    for row in rows:
        assert options.min_numbers <= len(row["nums"]) <= options.max_numbers
        assert all(options.min_number <= number <= options.max_number for number in row["nums"])
        assert options.min_target <= row["target"] <= options.max_target
    for nums, target in (row.values() for row in rows[:40] if len(row["nums"]) <= 4):
        assert is_solvable([Fraction(number) for number in nums], target)
        assert len(nums) > 3 or not is_solvable([Fraction(n) for n in nums], target + 10**6)
    counts = Counter(len(row["nums"]) for row in rows)
    share = 1 / (options.max_numbers - options.min_numbers + 1)
    standard_error = math.sqrt(share * (1 - share) / len(rows))
    for count in counts if len(rows) > 1_000 else []:
        assert counts[count] / len(rows) == pytest.approx(share, abs=5 * standard_error)


def test_the_questions_in_results_are_generated_ones_and_those_of_tuning_are_apart():
    """Scores on the board can only be compared if the validation's, the default, never change."""
    files = [ROOT / f"results/countdown-{name}.jsonl" for name in ("tuning", "validation")]
    tuning, validation = ([*map(json.loads, file.read_text().splitlines())] for file in files)
    assert validation == generate("validation", 512)
    digest = hashlib.sha256(files[1].read_bytes()).hexdigest()
    assert digest in (ROOT / "results/board.md").read_text()
    assert tuning == generate("validation", 512, with_seed=1, exclude=validation)
    keys, other = ({countdown.question_key(row) for row in rows} for rows in (tuning, validation))
    assert len(keys) == 512 and not keys & other
