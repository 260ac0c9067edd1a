"""The verdicts of the graders: what is paid, what is not, and what any text costs.

The verdicts are data: countdown.txt, arithmetic.txt, gsm8k.txt and math500.txt beside this file.
"""

import json
import re
from collections.abc import Iterator
from functools import partial
from itertools import permutations, product
from pathlib import Path
from unittest.mock import patch

import pytest
from harness import cpu_seconds, load_rows, real_file, table
from hypothesis import given, settings
from hypothesis import strategies as st

import countdown
from tasks import arithmetic, grader, gsm8k, math500
from tasks.grader import is_equal, last_boxed, normal_answer, normalise

MILLION = 1_000_000
TASKS = {task.__name__.rpartition(".")[2]: task for task in (countdown, arithmetic, gsm8k, math500)}
ANSWER_BLOCK = "so it works.</think>\n<answer>{}</answer>"
every_task = pytest.mark.parametrize("name", TASKS)


def reward(name: str, completion: str, example: dict, **options: object) -> dict[str, float]:
    how = {"options": TASKS[name].Options(**options), "num_tokens": 0}
    return TASKS[name].reward_function(completion, example, **how)


def extract_answer(name: str, completion: str, example: dict, **options: object) -> str | None:
    return TASKS[name].extract_answer(completion, example, options=TASKS[name].Options(**options))


def read_rows(name: str) -> list[tuple[str, str, dict[str, list[str]]]]:
    """Section, gold answer, and its answers by the word before them."""
    rows, section, word, answers = [], "", "", {}
    for line in Path(__file__).with_name(f"{name}.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            section = line[3:].partition(":")[0]
        if not line.startswith(("#", "==")):
            golds, *cells = re.split("  +", line.partition("  -- ")[0])
            if golds:
                word, answers = "", {"paid": [], "same": [], "not": []}
                rows += [(section, plain(gold), answers) for gold in golds.split(" | ")]
            for cell in cells:
                if cell in answers:
                    word = cell
                else:
                    answers[word].append(plain(cell))
    return rows


def plain(cell: str) -> str:
    """The text that a cell stands for: the head of math500.txt tells its few signs."""
    cell = "" if cell == '""' else cell.replace("␣", " ").replace("⏎", "\n")
    cell = re.sub("⟨(.*?)⟩([0-9]+)", lambda match: match[1] * int(match[2]), cell, flags=re.DOTALL)
    return re.sub(r"U\+([0-9A-F]{4})", lambda match: chr(int(match[1], 16)), cell)


def verdicts(name: str) -> Iterator[tuple[str, str, str, bool]]:
    """Section, gold answer, answer, and whether it is paid."""
    for section, gold, answers in read_rows(name):
        for each, other in permutations([gold, *answers["same"]], 2):
            yield section, each, other, True
        for word, is_paid in (("paid", True), ("not", False)):
            for answer in answers[word]:
                yield section, gold, answer, is_paid


def countdown_holds(section: str, gold: str, answer: str, is_paid: bool) -> bool:
    completion = answer if section == "completions" else ANSWER_BLOCK.format(answer)
    nums, _, target = (re.sub("[^0-9]+", " ", answer) if gold == "any" else gold).partition(" = ")
    targets = range(-30, 100) if gold == "any" else [int(target)]
    nums = [int(number) for number in nums.split()]
    examples = [{"nums": nums, "target": target} for target in targets]
    return is_paid == any(reward("countdown", completion, each)["answer"] for each in examples)


def arithmetic_holds(section: str, gold: str, answer: str, is_paid: bool) -> bool:
    example = arithmetic.parse_question(gold)
    is_read = extract_answer("arithmetic", answer, example) == str(example["a"] + example["b"])
    return is_read == is_paid and reward("arithmetic", answer, example) == {"answer": is_paid}


GSM8K_WAYS = {  # of each section: options, and the completion with an answer
    "number": [({}, "so\n#### {}"), ({"prompt_style": "tags"}, ANSWER_BLOCK)],
    "completions": [({}, "{}")],
    "boxed": [({"answer_mark": "boxed"}, "{}")],
    "official": [({"grading": "official"}, "{}")],
}


def gsm8k_holds(section: str, gold: str, answer: str, is_paid: bool) -> bool:
    """Where the gold is "none", no number is read, and none of those in the text is paid."""
    golds = {"0", "1000", *re.findall("[0-9]+", answer)} if gold == "none" else {gold}
    examples = [{"answer": f"#### {each}"} for each in golds]
    if section == "lenient":
        reads = {gsm8k.lenient_answer(answer)}
        solved = partial(gsm8k.is_lenient_solved, options=gsm8k.Options(grading="official"))
        pays = {solved(answer, each) for each in examples}
    else:
        ways = [(text.format(answer), how) for how, text in GSM8K_WAYS[section]]
        reads = {extract_answer("gsm8k", text, {}, **how) for text, how in ways}
        pays = {reward("gsm8k", text, e, **how)["answer"] for text, how in ways for e in examples}
    if is_paid:
        return reads == {gold} and pays == ({1.0} if gold else {0.0})  # the regex takes "," for ""
    return pays == {0.0} and (reads == {None} if gold == "none" else gold not in reads)


def typed_holds(name: str, gold: str, text: str, is_paid: bool) -> bool:
    """A refusal says what to write."""
    try:
        return (TASKS[name].parse_question(text) == json.loads(gold)) == is_paid
    except ValueError as error:
        return str(error).startswith("write ") and not is_paid


def math500_holds(section: str, gold: str, answer: str, is_paid: bool) -> bool:
    """In the section "exact" math-verify would say the opposite, and is not asked if it is paid."""
    if section == "problems":
        keys = {math500.question_key({"problem": problem}) for problem in (gold, answer)}
        return (len(keys) == 1) == is_paid
    completion = answer if section == "completions" else f"So it is $\\boxed{{{answer}}}$."
    if section != "exact":
        parts = reward("math500", completion, {"answer": gold}, grader_timeout_s=30.0)
        return parts == {"answer": float(is_paid), "timeout": 0.0}
    asked = []
    boxed = normalise(last_boxed(completion) or "")
    is_right = is_equal(normalise(gold), boxed, lambda *pair: asked.append(pair) or not is_paid)
    return is_right == is_paid and not (is_paid and asked)


@every_task
def test_each_answer_is_paid_or_not_as_the_tables_say(name: str):
    holds, slips = globals()[f"{name}_holds"], []
    for section, *verdict in verdicts(name):
        holds_here = typed_holds(name, *verdict) if section == "typed" else holds(section, *verdict)
        slips += [] if holds_here else [(section, *verdict)]
    assert not slips, f"section, gold answer, answer, whether it is paid: {slips}"


TAGS = ["<think>", "</think>", "</think>\n<answer>", "<answer>", "</answer>", "</answer>\n", "</"]
ANY = [*"x \n\0\r$1(.-<", "\ud800", "\udfff", "\u0663", "\u00b2", "\u2212", "\U0001f600", *TAGS]
CASES = table("tasks/cases.yaml")
UNITS = CASES["units"]
UNITS["gsm8k"].append("#### 5 (" + "a" * 600 + "6 ")
GOLDS = ["5", "(1,2)", r"\frac{1}{2}", r"\text{even}", "x^2", r"\begin{pmatrix} 1 \end{pmatrix}"]
EXAMPLES = {
    "countdown": [{"nums": nums, "target": nums[0]} for nums in ([3], [1, 2, 3], [3, 7, 25])],
    "arithmetic": [{"a": 47_000, "b": 38}],
    "gsm8k": [{"answer": "#### 12345"}, {"answer": ""}],
    "math500": [{"answer": gold} for gold in GOLDS],
}
STYLE = {"prompt_style": "tags", "max_tokens": 5}
WAYS = {name: [{}] for name in TASKS}
WAYS["gsm8k"] += [{"grading": "official"}, STYLE, STYLE | {"tag_grading": "strict"}]
WAYS["gsm8k"] += [{"answer_mark": "boxed"}]
ALLOWED = {"answer": {0.0, 1.0}, "timeout": {0.0}, "length": {0.0, -0.5}, "ending": {0.0, -0.5}}
ALLOWED |= {"integer": {-1.0, 0.0, 1.0}, "format": {-1.0, 0.0, 0.1, 0.5, 0.6, 1.0}}
FRAMES = CASES["frames"]
READ = {"countdown": r"[^ \t\r\n][^ ]*", "arithmetic": r"-?[0-9]+(\.[0-9]+)?", "gsm8k": r"[-0-9.]*"}


@every_task
@settings(max_examples=100, deadline=None)
@given(st.data(), st.booleans())
def test_any_text_gets_a_reward_of_the_allowed_set(name: str, data: st.DataObject, opinion: bool):
    morsel = st.sampled_from(ANY + UNITS[name]) | st.text(st.characters(), max_size=5)
    text = data.draw(st.lists(morsel, max_size=25).map("".join))
    with patch.object(grader.WORKER, "ask", lambda *_, deadline: opinion):
        grader.grade_answer.cache_clear()
        for frame in ("{}", "\\boxed{{{}}}", "#### {}", ANSWER_BLOCK):
            for example, options in product(EXAMPLES[name], WAYS[name]):
                completion = frame.format(text)
                parts = reward(name, completion, example, **options)
                assert tuple(parts) == TASKS[name].REWARD_PARTS
                assert all(value in ALLOWED[part] for part, value in parts.items()), parts
                answer = extract_answer(name, completion, example, **options)
                assert answer is None or re.fullmatch(READ.get(name, "(?s).*"), answer)


def grade(name: str, text: str, options: dict) -> None:
    grader.grade_answer.cache_clear()
    assert reward(name, text, EXAMPLES[name][0], **options)["answer"] == 0
    extract_answer(name, text, EXAMPLES[name][0], **options)
    if name == "gsm8k" and not options:  # it has none
        gsm8k.lenient_answer(text)


@every_task
def test_a_million_characters_of_garbage_take_less_than_100_ms(name: str, monkeypatch, capfd):
    """A lazy regex over repeated unclosed tags needed 23 s for 22,000 of them."""
    monkeypatch.setattr(grader.WORKER, "ask", lambda *_, deadline: False)
    frames = [*product(FRAMES[name], (990, 50_000)), *product(FRAMES[name][::3], (MILLION,))]
    for unit, (frame, num_chars) in product(ANY + UNITS[name], frames):
        text = frame.format(unit * (num_chars // len(unit)))
        for options in WAYS[name] if num_chars < MILLION else WAYS[name][::3]:  # the slowest
            seconds = (cpu_seconds(grade, name, text, options, repeats=n) for n in (1, 5))
            assert any(each < 0.1 for each in seconds), (unit, frame, num_chars, options)
    assert capfd.readouterr() == ("", "")


def test_the_gold_answers_of_gsm8k_are_paid():
    for split, num_rows in (("train", 7473), ("test", 1319)):
        source = real_file("gsm8k", f"{split}.jsonl")
        rows = load_rows(gsm8k, source, "train", held_out=False)
        assert rows == [json.loads(line) for line in source.read_text().splitlines()]
        assert len(rows) == num_rows
        for row in rows:
            gold = gsm8k.lenient_answer(row["answer"])
            assert gold == str(int(gold))
            block = f"<thinking>\na\n</thinking>\n<answer>\n{gold}\n</answer>"
            assert sum(reward("gsm8k", block, row, prompt_style="tags").values()) == 3.0
            for grading in ("exact", "official"):
                assert extract_answer("gsm8k", row["answer"], row, grading=grading) == gold
                for text, paid in ((row["answer"], 1.0), (f"#### {int(gold) + 1}", 0.0)):
                    assert reward("gsm8k", text, row, grading=grading)["answer"] == paid


def test_the_gold_answers_of_math_equal_themselves_and_their_solutions():
    file = real_file("math500", "test.json")
    loaded = load_rows(math500, file, "validation", 500, held_out=False)
    assert len({math500.question_key(row) for row in loaded}) == 500
    with pytest.raises(ValueError, match="no question left for train"):
        load_rows(math500, file, "train", held_out=False, exclude=loaded)
    for row in json.loads(file.read_text()):
        assert normal_answer(row["answer"])
        for text in (f"\\boxed{{{row['answer']}}}", row["solution"]):
            assert reward("math500", text, row) == {"answer": 1.0, "timeout": 0.0}
        assert reward("math500", "", row)["answer"] == 0.0
