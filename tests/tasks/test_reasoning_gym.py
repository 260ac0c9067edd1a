"""The task that poses questions of the package reasoning-gym, and scores answers in a worker."""

import subprocess
import sys
import time

import pytest
from harness import load_rows

from engine.core.config import TaskSettings
from engine.questions.tasks import reward_parts
from tasks import reasoning_gym as task
from tasks.reasoning_gym import EXAMPLE_ROW, REFUSED, Options, parse_row

gym = pytest.importorskip("reasoning_gym", reason="needs a C compiler: pip install '.[gym]'")


def example_of(dataset: str, **options) -> tuple[dict, Options]:
    options = Options(dataset=dataset, **options)
    return parse_row(EXAMPLE_ROW, options=options), options


def load(split: str, num: int | None = 50, **settings) -> list[dict]:
    config = {"min_word_len": 5, "max_word_len": 6}
    settings = {"dataset": "spell_backward", "dataset_config": config} | settings
    return load_rows(task, "generated", split, num, **settings)


# Questions


def test_questions_follow_from_their_seed_and_are_divided_by_a_hash():
    validation, train = load("validation"), load("train", None)
    assert (len(validation), len(train)) == (50, 1_000)
    assert validation == load("validation") != load("validation", with_seed=1)
    validated, trained = ({row["question"] for row in rows} for rows in (validation, train))
    assert (len(validated), len(trained)) == (50, 1_000) and not validated & trained
    assert {len(row["answer"]) for row in train} == {5, 6}, "dataset_config"
    assert trained.isdisjoint({row["question"] for row in load("train", exclude=train)})
    assert all(parse_row(row, options=Options()).keys() == row.keys() for row in train[:2])


USELESS = [
    ("chess", {}, "ValueError: Dataset 'chess' not registered"),
    ("gcd", {"max_word_len": 6}, "TypeError: GCDConfig.__init__() got an unexpected keyword"),
    ("gcd", {"min_value": 0}, "AssertionError: min_value must be"),
    *((name, {}, "its scorer runs what the model wrote as code") for name in REFUSED),
]


@pytest.mark.parametrize(("dataset", "config", "problem"), USELESS)
def test_what_cannot_be_trained_is_one_line(dataset, config, problem):
    with pytest.raises(ValueError) as caught:
        load("train", dataset=dataset, dataset_config=config)
    assert str(caught.value).startswith(f"task.dataset = {dataset}: {problem}")
    assert str(caught.value).endswith("; python -m tasks.reasoning_gym lists what there is")


# Rewards


def pay(completion: str, example: dict, options: Options) -> tuple[float, ...]:
    ((parts,),) = reward_parts(task, [[completion]], [example], options, [[None]])
    return tuple(parts[name] for name in ("answer", "partial", "timeout"))


def test_the_packages_score_is_a_part_that_is_not_paid():
    """Which block is scored, test_grader_worker.py knows."""
    example, options = example_of("spell_backward")
    assert pay(f"<answer> {example['answer']}\n", example, options) == (1, 1, 0)
    for completion in ("", f"{example['answer']} <answer>x</answer>", "\0\ud800" * 10**6):
        answer, partial, timeout = pay(completion, example, options)
        assert (answer, timeout) == (0, 0) and partial < 0.999, completion
    example, options = example_of("chain_sum")
    assert pay(f"It is {example['answer']}", example, options)[:2] == (0, pytest.approx(1 / 3))


def test_a_scorer_that_hangs_is_stopped_and_one_that_raises_pays_nothing():
    example, options = example_of("coin_flip", scorer_timeout_s=0.3)
    start_s = time.monotonic()
    assert pay("1e999999999", example, options) == (0, 0, 1)
    assert time.monotonic() - start_s < 10
    assert pay(example["answer"], example, Options(dataset="coin_flip")) == (1, 1, 0)
    example, options = example_of("prime_factorization")
    assert pay("x", example, options) == (0, 0, 0)


def test_a_question_that_a_person_typed_earns_nothing():
    assert pay("x", task.parse_question("What is this?"), Options()) == (0, 0, 0)
    assert TaskSettings.model_fields.keys().isdisjoint(Options.model_fields)


# What the package is

SWEEP = """
import random, sys
from reasoning_gym.factory import DATASETS, create_dataset

SIGN, ran, wrong = "7305190721", set(), []

def watch(event, arguments):
    if event == "exec" and SIGN in repr(arguments[0].co_consts):
        ran.add(name)

sys.addaudithook(watch)
for name in sorted(DATASETS.keys() - {"composite"}):
    dataset = create_dataset(name, seed=0)
    random.seed(0)
    entry = dataset[7]
    gold = str(entry["answer"])
    for text in (SIGN, f"[{SIGN}]", f"{gold} {SIGN}", f"{gold}\\n{SIGN}", f"{gold} + {SIGN}"):
        try:
            dataset.score_answer(text, entry)
        except Exception:
            pass
    if entry["answer"] is not None and not dataset.score_answer(gold, entry) >= 0.999:
        wrong.append(name)
print(*sorted(ran), file=sys.stderr)
print(*wrong, file=sys.stderr)
print(len(DATASETS), file=sys.stderr)
"""


def test_those_that_run_an_answer_as_code_are_refused_and_no_others():
    """All pay the right answer in full, where the package has one."""
    result = subprocess.run([sys.executable, "-c", SWEEP], capture_output=True, text=True)
    ran, wrong, num = result.stderr.splitlines()[-3:]
    assert ran.split() == sorted(REFUSED) and wrong.split() == []
    assert int(num) - len(REFUSED) - 1 == 96, "composite mixes others; it has no default"
