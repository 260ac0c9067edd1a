"""Questions: what every task loads from files and the hub, and how examples become prompts."""

import copy
import csv
import json
import os
import re
import sys
from pathlib import Path

import datasets
import numpy as np
import pytest
from harness import ROOT, load_rows, make_config, seed
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing
from transformers import AddedToken, PreTrainedTokenizerFast

import countdown
from engine.model.tokenizer import load_tokenizer
from engine.questions.data import QuestionStream, load_questions
from engine.questions.messages import assistant_prefix, pose
from engine.questions.prompts import encode_prompts, render_prompt, render_prompts
from engine.questions.tasks import is_in_split, load_task, reward_parts

HUB_ID = "openai/gsm8k"
ROWS = {
    "countdown": [{"nums": [n, 7, 25], "target": 46 + n} for n in range(80)],
    "arithmetic": [{"a": n, "b": 38} for n in range(80)],
    "gsm8k": [
        {"question": f"What is {n} + {n}?", "answer": f"So\n#### {2 * n}"} for n in range(80)
    ],
    "math500": [{"problem": f"What is ${n} + 1$?", "answer": str(n + 1)} for n in range(80)],
}
every_task = pytest.mark.parametrize("name", ROWS)


@pytest.fixture(autouse=True)
def dataset_cache_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(name: str, source: str | Path, split: str = "train", **how) -> list[dict]:
    return load_rows(load_task(name), source, split, **how)


def write_file(path: Path, rows: list[dict]) -> Path:
    if path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(path)
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    return path


# Files


@every_task
@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_a_file_is_divided_without_overlap_unless_it_is_used_whole(tmp_path, name, suffix: str):
    source = write_file(tmp_path / f"rows{suffix}", [{**row, "level": 3} for row in ROWS[name]])
    whole = load(name, source, "validation", held_out=False)
    train, validation = load(name, source, "train"), load(name, source, "validation")
    assert whole == ROWS[name]
    assert [row for row in whole if row not in validation] == train
    assert [row for row in whole if row not in train] == validation
    assert 0 < len(validation) < len(train)


def test_one_question_in_eight_is_held_out_and_never_trained_on():
    """Pinned: others would mix the training and validation questions of published results."""
    keys = [f"question {n}" for n in range(4_000)]
    held_out = [key for key in keys if is_in_split(key, "validation")]
    assert len(held_out) == 542 == pytest.approx(len(keys) / 8, rel=0.1)
    assert held_out[:3] == ["question 1", "question 11", "question 49"]
    assert [key for key in keys if not is_in_split(key, "train")] == held_out
    with pytest.raises(AssertionError, match="test"):
        is_in_split("question 1", "test")


@every_task
def test_some_rows_of_a_file_are_drawn_by_the_seed(tmp_path, name):
    source = write_file(tmp_path / "rows.jsonl", ROWS[name])
    rows = load(name, source, num_examples=10, with_seed=seed(3))
    assert len(rows) == 10
    assert rows == load(name, source, num_examples=10, with_seed=seed(3))
    assert rows != load(name, source, num_examples=10, with_seed=seed(4))
    assert load(name, source, num_examples=1_000) == load(name, source)  # at most


@pytest.mark.parametrize(
    ("name", "respelled"),  # the fourth of the rows
    [
        ("countdown", {"nums": [25, 3, 7], "target": 49}),
        ("arithmetic", {"a": 38, "b": 3}),
        ("gsm8k", {"question": " what IS  3 + 3?\n", "answer": "#### 7"}),
        ("math500", {"problem": "WHAT is  3+1?", "answer": "0"}),
    ],
)
def test_excluded_questions_are_left_out_however_they_are_spelled(tmp_path, name, respelled: dict):
    source = write_file(tmp_path / "rows.jsonl", ROWS[name])
    rows = load(name, source, held_out=False, exclude=[respelled])
    assert rows == [*ROWS[name][:3], *ROWS[name][4:]]
    source = write_file(tmp_path / "more.jsonl", [respelled, *ROWS[name]])
    assert load(name, source, held_out=False, exclude=ROWS[name][:20]) == ROWS[name][20:]


def test_a_folder_with_brackets_in_its_name_is_no_pattern(tmp_path):
    (tmp_path / "run[1]*").mkdir()
    source = write_file(tmp_path / "run[1]*" / "rows.jsonl", ROWS["countdown"])
    assert load("countdown", source, held_out=False) == ROWS["countdown"]


def test_numbers_in_a_csv_file_may_be_separated_by_spaces(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("id,nums,target,,\na,3 7 25,46\nb,[1 2 3],6,,,\n")  # as spreadsheets write
    rows = [{"nums": [3, 7, 25], "target": 46}, {"nums": [1, 2, 3], "target": 6}]
    assert load("countdown", path, held_out=False) == rows


# The hub


@pytest.mark.parametrize(
    ("name", "source", "split", "held_out", "asked"),
    [
        ("countdown", "own/rows", "train", True, ("own/rows", None, "train")),
        ("gsm8k", HUB_ID, "validation", True, (HUB_ID, "main", "test")),
        ("gsm8k", "own/rows", "validation", False, ("own/rows", None, "test")),
        ("math500", "own/rows", "validation", False, ("own/rows", None, "test")),
        ("math500", "own/rows", "validation", True, ("own/rows", None, "train")),
    ],
)
def test_each_task_asks_the_hub_for_its_part(monkeypatch, name, source, split, held_out, asked):
    """GSM8K's own splits are kept; a source of MATH or Countdown that serves both is divided."""
    requests = []

    def load_dataset(source: str, config: str | None, *, split: str) -> datasets.Dataset:
        requests.append((source, config, split))
        return datasets.Dataset.from_list(ROWS[name])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows = load(name, source, split, held_out=held_out)
    assert requests == [asked]
    is_divided = held_out and name != "gsm8k"
    assert (rows == ROWS[name]) == (not is_divided)


# Mistakes: one line with the source and the fix

GOOD = '{"nums": [1, 2], "target": 3}'


def refusal(name: str, source: str | Path, split: str = "train", **settings) -> str:
    """The line of the ValueError for a source that cannot be used."""
    with pytest.raises(ValueError) as caught:
        load(name, source, split, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("countdown", {"numbers": [1], "target": 3}, "row 1: no column nums among numbers, target"),
        ("countdown", {"a": 1, "b": 2}, "row 1: no column nums and target among a, b"),
        ("countdown", {"nums": [1, -2], "target": 3}, "row 1: nums is [1, -2], not a list of"),
        ("countdown", {"nums": '__import__("os")', "target": 5}, "row 1: nums is '__import__("),
        ("countdown", {"nums": [1, 2], "target": 3.5}, "row 1: target is 3.5, not an integer"),
        ("arithmetic", {"a": -4, "b": 38}, "row 1: a is -4, not an integer >= 0"),
        ("gsm8k", {"question": "", "answer": "#### 1"}, "row 1: question is '', not a text"),
        ("gsm8k", {"question": "a", "answer": "#### x"}, "row 1: answer is '#### x', without a n"),
        ("math500", {"problem": " ", "answer": "2"}, "row 1: problem is ' ', not a text"),
        ("math500", {"problem": "1?", "answer": ""}, "row 1: answer is '', not an answer"),
    ],
)
def test_a_bad_row_is_named_in_one_line_beside_a_good_one(tmp_path, name, row, message):
    source = write_file(tmp_path / "rows.jsonl", [row])
    line, good_row = refusal(name, source), json.dumps(load_task(name).EXAMPLE_ROW)
    assert line.startswith((f"{source}, {message}", f"{source}: {message}"))
    assert line.endswith(f"; rows must look like {good_row}")


@pytest.mark.parametrize(("suffix", "text"), [("jsonl", GOOD), ("csv", "nums,target\n3 4,7\n")])
def test_text_is_read_without_the_package_datasets(tmp_path, monkeypatch, suffix, text):
    """Bug: it was imported for every file, which takes a second."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    (tmp_path / f"rows.{suffix}").write_text(text)
    assert len(load_rows(countdown, tmp_path / f"rows.{suffix}", "train", held_out=False)) == 1


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("jsonl", '{"nums": [1, 2], "target": 3}\n{"nums": [], "target": 3}', "row 2: nums is []"),
        # Bug: one cell that did not fit changed the type of its column, and row 1 was blamed
        ("csv", "nums,target\n3 4,5\n3 4,\n", "row 2: target is ''"),
        ("csv", "nums,target\n3 4,5\n3 4,5,6\n", "cannot be loaded (line 3: more cells"),
        ("csv", "nums,target,target\n3 4,5,6\n", "cannot be loaded (two columns are named target"),
        ("jsonl", f'{GOOD}\n{{"nums": [1]}}', "row 2: no column target among nums"),
        ("jsonl", f"{GOOD}\n\n{GOOD[:9]}", "row 2: Expecting"),
        ("jsonl", '{"nums":' + "[" * 100_000, "row 1: maximum recursion"),
        ("csv", b"nums,target\n3 4,\xff\n", "cannot be loaded ('utf-8' codec can't decode"),
        ("jsonl", "", "no question left for train"),
        ("parquet", "no parquet", "cannot be loaded"),
        ("txt", "3 7 25", "unknown kind of source"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, suffix: str, content: str | bytes, message: str):
    path = tmp_path / f"rows.{suffix}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    line = refusal("countdown", path)
    assert line.startswith((f"{path}, {message}", f"{path}: {message}"))


NO_FILE = "cannot be loaded ([Errno 2] No such file or directory: 'none.json"
FILE_OR_HUB = "a .jsonl, .json, .csv or .parquet file, or a hub dataset id (owner/name)"


@pytest.mark.parametrize(
    ("name", "source", "problem", "choices"),
    [
        ("countdown", "none.jsonl", NO_FILE, f"generated, {FILE_OR_HUB}"),
        ("gsm8k", "generated", "unknown kind of source", f"{HUB_ID}, {FILE_OR_HUB}"),
        ("gsm8k", "nobody/nothing", "cannot be loaded", f"{HUB_ID}, {FILE_OR_HUB}"),  # no network
        ("math500", "none.parquet", "cannot be loaded (Unable to find '", FILE_OR_HUB),
    ],
)
def test_a_source_that_cannot_be_used_is_named_in_one_line(name, source, problem, choices):
    line = refusal(name, source)
    assert line.startswith(f"{source}: {problem}") and line.endswith(f"; give {choices}")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/null"), Path.mkdir])
def test_a_source_that_is_no_file_is_refused_at_once(tmp_path, make):
    """Bug: a named pipe was waited for, and a device read, without an end."""
    make(tmp_path / "rows.jsonl")
    assert "rows.jsonl: unknown kind of source" in refusal("countdown", tmp_path / "rows.jsonl")


@pytest.mark.timeout(20)
def test_many_columns_take_no_quadratic_time(tmp_path):
    names = [f"c{n}" for n in range(100_000)]
    path = tmp_path / "rows.csv"
    path.write_text(f"{','.join(names)}\n{','.join(['1'] * len(names))}\n")
    assert refusal("countdown", path).startswith(f"{path}, row 1: no column nums and target")


def test_a_file_that_leaves_no_question_is_named(tmp_path):
    source = write_file(tmp_path / "rows.jsonl", ROWS["gsm8k"])
    one = write_file(tmp_path / "one.jsonl", load("gsm8k", source, num_examples=1))
    assert f"{one}: no question left for validation" in refusal("gsm8k", one, "validation")


def test_a_missing_math_verify_is_named_when_the_questions_are_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    line = refusal("math500", "none.json")
    assert line.startswith("task.name = math500: needs a package: pip install math-verify==")


# A run's questions


def questions_for(
    tokenizer: PreTrainedTokenizerFast, *overrides: str, context: int | None = None
) -> tuple[list[dict], QuestionStream | None, list[str]]:
    """The validation questions of a run, its training questions, and what it logs about them."""
    config, logged = make_config(*overrides), []
    task, log = load_task(config.task.name), logged.append
    questions = load_questions(task, config, tokenizer=tokenizer, context=context, log=log)
    return *questions, logged


@pytest.mark.parametrize(
    ("function", "value", "problem"),
    [
        ("load_examples", [], "load_examples must return a list of dicts"),
        ("generate_questions", None, "generate_questions must return a list of dicts"),
        ("generate_prompt", None, "generate_prompt must return a text or a list of chat messages"),
        # Bug: content as a list of parts was a traceback.
        ("generate_prompt", [{"role": "user", "content": [{}]}], "must return a text or a list of"),
        ("reward_function", None, "reward_function must return a dict with a number for each of"),
        ("reward_function", {"format": 10**400, "answer": 1}, "see to format for the question {'"),
        ("reward_function", {"format": 1.0}, "for each of format, answer, not {'format': 1.0}"),
    ],
)
def test_a_slip_in_a_users_task_is_named_at_once(tokenizer, monkeypatch, function, value, problem):
    own = {"raising": False}  # load_examples in place of what countdown.py declares
    monkeypatch.setattr(load_task("countdown"), function, lambda *_, **settings: value, **own)
    with pytest.raises(ValueError) as caught:
        questions_for(tokenizer)
    assert str(caught.value).startswith(f"{ROOT}/countdown.py: ") and problem in str(caught.value)


@pytest.mark.parametrize("slip", [[], [ROWS["countdown"][0], None], iter(ROWS["countdown"])])
def test_training_questions_that_are_no_list_of_dicts_are_named_too(tokenizer, monkeypatch, slip):
    """Bug: only the validation questions were looked at; the others ended in a traceback."""
    loaded, own = {"validation": ROWS["countdown"][:8], "train": slip}, {"raising": False}
    give = lambda source, split, **settings: loaded[split]  # noqa: E731
    monkeypatch.setattr(load_task("countdown"), "load_examples", give, **own)
    with pytest.raises(ValueError, match=r"countdown\.py: load_examples must return a list of"):
        questions_for(tokenizer)


def test_a_prompt_may_be_made_by_changing_the_question(tokenizer, monkeypatch):
    """Bug: the words that a task added to a question were there twice in the next prompt."""
    task, generate_prompt = load_task("countdown"), countdown.generate_prompt

    def add_a_number(example: dict, **settings) -> list[dict]:
        example["nums"].append(0)
        return generate_prompt(example, **settings)

    monkeypatch.setattr(task, "generate_prompt", add_a_number)
    validation, training, _ = questions_for(tokenizer)
    questions = [*validation, *training.questions]
    assert len(questions) > 512 and all(all(question["nums"]) for question in questions)


def test_a_reward_may_have_numpys_numbers_and_other_parts(monkeypatch):
    """Bug: np.float32 and np.bool_ were refused, and other parts ended in a traceback."""
    task, options = load_task("countdown"), make_config().task
    paid = {"answer": np.bool_(True), "format": np.float32(0.5), "notes": object()}
    monkeypatch.setattr(task, "reward_function", lambda *_, **settings: paid)
    (parts,) = reward_parts(task, [""], ROWS["countdown"][0], options, [None])
    assert parts == {"format": 0.5, "answer": 1.0} and set(map(type, parts.values())) == {float}


OWN_TASK = """
from countdown import REWARD_PARTS, extract_answer, generate_prompt, reward_function
"""
LOADS_ITSELF = """
def load_examples(source, split, *, options, num_examples, seed, held_out, exclude):
    asked = {"source": source, "split": split, "name": options.name, "num_examples": num_examples}
    asked |= {"seed": seed, "held_out": held_out, "num_excluded": len(exclude)}
    return [{"nums": [n], "target": n, **asked} for n in range(5)]
"""


def own_task(folder: Path, monkeypatch, code: str) -> None:
    """Write a user's task `own`, which plays Countdown, to the folder that a run starts in."""
    (folder / "own.py").write_text(OWN_TASK + code)
    monkeypatch.chdir(folder)


def test_a_task_may_load_its_questions_itself(tmp_path, tokenizer, monkeypatch):
    own_task(tmp_path, monkeypatch, LOADS_ITSELF)
    settings = ["task.name=own", "task.eval=here", "training.seed=3", "validation.num_examples=5"]
    for train, held_out in (("here", True), ("there", False)):
        validation, training, _ = questions_for(tokenizer, *settings, f"task.train={train}")
        of_both = {"nums": [4], "target": 4, "name": "own", "held_out": held_out}
        asked = {"source": "here", "split": "validation", "num_examples": 5, "seed": 0}
        assert validation[4] == of_both | asked | {"num_excluded": 0}
        asked = {"source": train, "split": "train", "num_examples": None, "seed": 3}
        assert training.questions[4] == of_both | asked | {"num_excluded": 5}


def test_half_a_character_in_a_question_is_a_question_mark(tmp_path, tokenizer):
    """JSON can hold it; the tokenizer raised a TypeError."""
    rows = [{"question": f"What is \ud800{n}?", "answer": f"#### {n}"} for n in range(30)]
    source = write_file(tmp_path / "rows.jsonl", rows)
    task = ["task.name=gsm8k", f"task.train={source}", f"task.eval={source}"]
    validation, *_ = questions_for(tokenizer, *task)
    (ids, *_) = encode_prompts(validation, tokenizer=tokenizer, **of_task("gsm8k"))
    assert "What is ?" in tokenizer.decode(ids)


@every_task
def test_a_run_trains_on_no_question_of_its_evaluation_file(tmp_path, tokenizer, name):
    train = write_file(tmp_path / "train.json", ROWS[name])
    evaluation = write_file(tmp_path / "eval.json", ROWS[name][30:40])
    sources = f"task.train={train}", f"task.eval={evaluation}"
    validation, training, _ = questions_for(tokenizer, f"task.name={name}", *sources)
    assert validation == ROWS[name][30:40]
    assert training.questions == ROWS[name][:30] + ROWS[name][40:]


def test_the_validation_questions_are_the_same_for_every_seed_and_mode(tokenizer):
    twenty = "validation.num_examples=20"
    first, _, _ = questions_for(tokenizer, twenty)
    other, training, _ = questions_for(tokenizer, twenty, "training.seed=1", "mode=evaluate")
    assert len(first) == 20 and other == first and training is None


def test_equal_validation_questions_count_once_and_fewer_than_asked_for_are_a_line(
    tmp_path, tokenizer
):
    """Bug: 40 equal rows had the interval of 40 questions; 20 of 512 were taken without a word."""
    rows = ROWS["countdown"][:20] + [{"nums": [7, 0, 25], "target": 46}] * 20
    source = write_file(tmp_path / "eval.json", rows)
    settings = [f"task.eval={source}", "mode=evaluate"]
    validation, _, logged = questions_for(tokenizer, *settings, "validation.num_examples=40")
    assert [row["target"] for row in validation] == list(range(46, 66))
    (line,) = [line for line in logged if line.startswith("warning: ")]
    assert "20 different validation questions" in line and "40" in line
    _, _, logged = questions_for(tokenizer, "validation.num_examples=20", "mode=evaluate")
    assert not any("different" in line for line in logged)


@pytest.mark.parametrize(
    ("wording", "hint"),
    [
        ("task.prompt=Make {traget} of {nums}.", "{traget} is no key of a question, the"),
        ("task.system_prompt=Use {num}.", "{num} is no key of a question, the nearest is {nums}"),
        (r"task.prompt=\\frac{{1}}{{2}} {nums} {answer} {x}", None),
    ],
)
def test_a_word_that_is_nearly_a_key_is_named(tokenizer, wording, hint):
    """Bug: the model was trained on the braces without a word."""
    *_, logged = questions_for(tokenizer, wording, "mode=evaluate")
    hints = [line for line in logged if "is no key" in line]
    assert [line.startswith(f"warning: {hint}") for line in hints] == [True] * (hint is not None)


def test_questions_that_leave_no_room_are_dropped_with_a_count(tmp_path, tokenizer):
    rows = [*ROWS["countdown"], *({"nums": [n] * 450, "target": 1} for n in range(40))]
    train = write_file(tmp_path / "train.json", rows)
    evaluation = write_file(tmp_path / "eval.json", ROWS["countdown"][:10] + rows[-2:])
    overrides = [f"task.train={train}", f"task.eval={evaluation}"]
    validation, training, logged = questions_for(tokenizer, *overrides, context=1024)
    assert validation == ROWS["countdown"][:10]
    assert logged[0].startswith("2 of 12 validation questions are too long or ")
    epoch = [row for _, row in training.take(0, 70)[0]]
    assert sorted(row["target"] for row in epoch) == list(range(56, 126))
    assert len(training.too_long) <= 38  # of 108 it walked only what it needed
    _, whole, logged = questions_for(tokenizer, *overrides, context=None)
    assert len({row["target"] for _, row in whole.take(0, 108)[0]}) == 71
    assert not any("too long" in line for line in logged)


def test_a_question_that_holds_a_special_token_is_left_out(tmp_path, tokenizer, templated):
    """Bug: `<|im_end|>` in a dataset ended the user's turn. The task's own words stay."""
    rows = [dict(row) for row in ROWS["gsm8k"]]
    rows[3]["question"] += templated.eos_token
    rows[5]["answer"] = f"{templated.pad_token} #### 5"
    source = write_file(tmp_path / "rows.jsonl", rows)
    train = write_file(tmp_path / "train.jsonl", [{**ROWS["gsm8k"][0], "question": "New?"}])
    task = ["task.name=gsm8k", f"task.train={train}", f"task.eval={source}"]
    task.append(f"task.system_prompt=Hello{templated.eos_token}")
    validation, _, logged = questions_for(templated, *task)
    kept = load("gsm8k", source, "validation", held_out=False)
    assert validation == [row for i, row in enumerate(kept) if i not in (3, 5)]
    assert logged[0].startswith("2 of 80 validation questions are ")
    assert "special token" in logged[0]
    assert questions_for(tokenizer, *task)[0] == kept  # no chat template: plain text
    source = write_file(tmp_path / "math.jsonl", [{"problem": "<|end|>1", "answer": "1"}])
    plain = ["task.name=math500", f"task.eval={source}", "mode=evaluate"]
    assert len(questions_for(templated, *plain)[0]) == 1
    # Bug: where all hold one, the advice was to lower training.max_new_gen_tokens.
    source = write_file(tmp_path / "all.jsonl", rows[3:4])
    with pytest.raises(ValueError, match="each holds a special token, "):
        questions_for(templated, *task, f"task.eval={source}")


def test_a_special_token_that_the_normalizer_makes_is_seen(tmp_path, templated):
    """Bug: full-width letters, which NFKC turns into plain ones, passed the search of the text."""
    backend = templated.backend_tokenizer
    backend.normalizer = normalizers.NFKC()
    templated.add_tokens([AddedToken("<|stop|>", special=True, normalized=True)])
    rows = [dict(row) for row in ROWS["gsm8k"]]
    rows[3]["question"] += "\uff1c|stop|\uff1e"
    source = write_file(tmp_path / "rows.jsonl", rows)
    task = ["task.name=gsm8k", f"task.eval={source}", "mode=evaluate"]
    kept = load("gsm8k", source, "validation", held_out=False)
    assert questions_for(templated, *task)[0] == [row for i, row in enumerate(kept) if i != 3]


def test_a_question_may_leave_exactly_the_room_that_a_completion_needs(tmp_path, tokenizer):
    rows = ROWS["gsm8k"][:1]
    source = write_file(tmp_path / "rows.json", rows)
    overrides = ["task.name=gsm8k", f"task.train={HUB_ID}", f"task.eval={source}", "mode=evaluate"]
    overrides += ["task.prompt_style=tags", "training.max_new_gen_tokens=50"]
    tags = of_task("gsm8k", prompt_style="tags")  # these prompts are longer than the default's
    (ids,) = encode_prompts(rows, tokenizer=tokenizer, **tags)
    validation, _, _ = questions_for(tokenizer, *overrides, context=len(ids) + 50)
    assert validation == rows
    with pytest.raises(ValueError, match=r"than \d+ tokens, .* training\.max_new_gen_tok"):
        questions_for(tokenizer, *overrides, context=len(ids) + 49)
    overrides.append("validation.max_new_gen_tokens=51")
    with pytest.raises(ValueError, match=r"than \d+ tokens, .* validation\.max_new_g"):
        questions_for(tokenizer, *overrides, context=len(ids) + 50)


def stream_of(num: int, *too_long: int, log=None, **settings) -> QuestionStream:
    """A stream of the questions 0, 1, ..."""
    settings = {"seed": seed(3), "shuffle": True, "max_prompt_tokens": 7} | settings
    return QuestionStream(
        [{"id": i} for i in range(num)],
        prompt_tokens=lambda question: 7 + (question["id"] in too_long),
        log=log or (lambda line: None),
        **settings,
    )


def ids_of(stream: QuestionStream, count: int) -> list[int]:
    """The ids of the stream's first questions."""
    return [question["id"] for _, question in stream.take(0, count)[0]]


def test_the_question_stream_is_one_seeded_permutation_after_the_other():
    again = stream_of(10)
    order = ids_of(stream_of(10), 30)
    epochs = [order[0:10], order[10:20], order[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    jumps = [25, 4, 17, 4]  # as a resumed run or another rank asks
    assert [again.take(i, 1) for i in jumps] == [([(i, {"id": order[i]})], i + 1) for i in jumps]
    assert ids_of(stream_of(10, seed=seed(4)), 10) != epochs[0]


def test_the_order_of_the_questions_shares_no_random_numbers_with_what_is_sampled():
    """Without a word of its own the order of seed 0 was drawn from question 0's numbers, since a
    seed is padded with zeros, and that of seed 1 from a validation question's."""
    for number in (0, 1):
        order = ids_of(stream_of(100, seed=number), 100)
        for sampled in ([word, *rest] for word in range(5) for rest in ([], [0], [1], [0, 0])):
            assert order != np.random.default_rng(sampled).permutation(100).tolist(), sampled


def test_the_stream_skips_what_is_too_long_and_its_position_counts_it():
    """Questions 1 and 2 of 0, 1, 2, 3 are too long, and the file's order makes this plain."""
    stream = stream_of(4, 1, 2, shuffle=False)
    taken, end = stream.take(0, 3)
    assert taken == [(0, {"id": 0}), (3, {"id": 3}), (4, {"id": 0})]
    assert end == 5  # the skipped ones up to there count, and no later ones
    assert stream.take(end, 1) == ([(7, {"id": 3})], 8)


def test_steps_of_any_size_walk_the_same_questions():
    """So a resumed run, which begins at a saved position, and every rank see the same stream."""
    whole, _ = stream_of(30, *range(0, 30, 3)).take(0, 60)
    assert len({position for position, _ in whole}) == 60
    for size in (1, 4, 7):
        steps, position = [], 0
        while len(steps) < 60:
            taken, position = stream_of(30, *range(0, 30, 3)).take(position, size)  # a new start
            steps += taken
        assert steps[:60] == whole


def test_skipped_questions_are_logged_now_and_then_and_each_counts_once():
    logged = []
    stream = stream_of(8, *range(5), log=logged.append)
    position = 0
    for _ in range(20):
        _, position = stream.take(position, 1)
    found = [int(re.search(r": (\d+) of 8 training questions$", line)[1]) for line in logged]
    with pytest.raises(ValueError, match="no training question fits"):
        stream_of(5, *range(5)).take(0, 1)
    doublings = [n.bit_length() for n in found]  # a line where 1, 2 or 4 are reached or passed
    assert doublings == sorted(set(doublings)) and doublings[-1] == 3


def test_hardly_any_training_question_is_rendered_at_the_start(tmp_path, tokenizer, monkeypatch):
    """Bug: all of the hub's 490,000 were, on every rank, which took a minute."""
    rows = [{"nums": [3, 7, 25], "target": n} for n in range(3_000)]
    train = write_file(tmp_path / "train.json", rows)
    task, rendered = load_task("countdown"), []
    generate_prompt = task.generate_prompt

    def seen(example: dict, **settings) -> list[dict]:
        rendered.append(example)
        return generate_prompt(example, **settings)

    monkeypatch.setattr(task, "generate_prompt", seen)
    settings = [f"task.train={train}", "validation.num_examples=20"]
    _, training, logged = questions_for(tokenizer, *settings, context=1024)
    assert len(training.questions) == 3_000
    assert len(rendered) < 100  # one that fits, 20 for validation
    assert logged[-1] == "3,000 training questions"


@pytest.mark.parametrize(("shuffle", "is_in_order"), [("true", False), ("false", True)])
def test_some_training_questions_are_drawn_or_the_first(tmp_path, tokenizer, shuffle, is_in_order):
    source = write_file(tmp_path / "rows.json", ROWS["gsm8k"])
    some = ["task.max_train_examples=20", f"task.shuffle={shuffle}"]
    settings = ["task.name=gsm8k", f"task.train={source}", f"task.eval={source}", *some]
    validation, training, _ = questions_for(tokenizer, *settings)
    rows = [row for row in ROWS["gsm8k"] if row not in validation]
    taken = [row for _, row in training.take(0, 20)[0]]
    assert len(training.questions) == 20 and all(row in rows for row in taken)
    assert (taken == rows[:20]) == is_in_order


# Prompts

CHAT = [
    {"role": "user", "content": "Make 24."},
    {"role": "assistant", "content": "Let me see.\n<think>"},
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def templated(tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer with a chat template."""
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = CHAT_TEMPLATE
    return copied


def of_task(name: str, **options: str) -> dict:
    """The task and its options, as arguments."""
    task = load_task(name)
    overrides = [f"task.{key}={value}" for key, value in options.items()]
    return {"task": task, "options": make_config(f"task.name={name}", *overrides).task}


def test_a_chat_template_renders_the_chat_and_leaves_the_assistants_beginning_open(templated):
    question = "<user>Make 24.</user>\n<assistant>"
    assert render_prompt(CHAT, templated) == question + "Let me see.\n<think>"
    assert render_prompt(CHAT[:1], templated) == question
    templated.chat_template = None
    assert render_prompt(CHAT, templated) == "Make 24.\nLet me see.\n<think>"
    assert assistant_prefix(CHAT) == "Let me see.\n<think>"  # what the prompt already says
    assert assistant_prefix(CHAT[:1]) == assistant_prefix("Make 24.") == ""


PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
OTHER_ROLE = "{% for m in messages if m.role == 'human' %}{{ m.content }}{% endfor %}AI:"


@pytest.mark.parametrize("template", [PARTS, OTHER_ROLE])
def test_a_template_that_drops_what_the_user_says_is_refused(tokenizer, template):
    """Bug: the prompts were empty, and the run trained on them."""
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = CHAT_TEMPLATE
    questions_for(tokenizer, "task.prompt='  Make {target}. \\n'")  # which the template trims
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="leaves out what the user says, 'Use the numbers"):
        questions_for(tokenizer)


SYSTEM_CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello."}]


@pytest.mark.parametrize(
    "start_of_template",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
        "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}",
    ],
)
def test_a_system_message_that_a_template_refuses_or_drops_goes_before_the_question(
    templated, start_of_template
):
    """Gemma 2's template refuses it, others leave it out without a word."""
    own = "<user>Be brief.\n\nHello.</user>\n<assistant>"
    assert render_prompt(SYSTEM_CHAT, templated) != own  # it has a place of its own
    templated.chat_template = start_of_template + CHAT_TEMPLATE
    assert render_prompt(SYSTEM_CHAT, templated) == own


def test_a_template_that_writes_the_date_writes_the_one_that_the_run_began_on(tmp_path, templated):
    """Bug: prompts changed at midnight."""
    templated.chat_template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        '{% macro year() %}{{ strftime_now( "%Y" ) }}{% endmacro %}, {{ year() }}, '
    ) + CHAT_TEMPLATE
    templated.save_pretrained(tmp_path)
    config = make_config(f"model.name={tmp_path}", "task.template_date='2024-02-29'")
    loaded = load_tokenizer(config, print)
    assert render_prompt(CHAT, loaded).startswith("29 Feb 2024, 2024, <user>")
    assert not render_prompt(CHAT, templated).startswith("29 Feb 2024")
    assert loaded.chat_template == templated.chat_template  # best/ gets the template as it was


def test_a_chat_template_that_fails_is_named_in_one_line(templated):
    templated.chat_template = "{{ messages[0].nothing.at_all }}"
    templated.name_or_path = "some/model"
    with pytest.raises(ValueError, match=r"^the chat template of some/model fails: .*nothing"):
        render_prompt(CHAT, templated)


def test_a_plain_text_stays_as_it_is_even_with_a_chat_template(tokenizer, templated):
    """The tokenizers of base models often have a chat template too."""
    math, (example, *_) = of_task("math500"), ROWS["math500"]
    for one in (tokenizer, templated):
        (ids,) = encode_prompts([example], tokenizer=one, **math)
        assert one.decode(ids) == math["task"].generate_prompt(example, options=math["options"])


# A user's own wording

LATEX = r"Compute {problem}; a set is $\{1\}$, a {unknown} key stays. Not {{problem}}."


@pytest.mark.parametrize(
    ("name", "example", "wording", "messages"),
    [
        (
            "countdown",
            ROWS["countdown"][0],
            {"prompt": "Make {target} of {nums}.", "system_prompt": "Be brief."},
            [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Make 46 of [0, 7, 25]."},
                {"role": "assistant", "content": countdown.ASSISTANT_PREFIX},
            ],
        ),
        (
            "gsm8k",
            {"question": "{answer}?", "answer": "#### 7"},  # what a value holds is not replaced
            {"prompt": "Q: {question}"},
            [{"role": "user", "content": "Q: {answer}?"}],
        ),
        (
            "math500",
            {"problem": r"$\frac{1}{2}$", "answer": "0.5"},
            {"prompt": LATEX},
            LATEX.replace("{problem}", r"$\frac{1}{2}$"),
        ),
    ],
)
def test_a_users_own_wording_takes_the_place_of_the_tasks(name, example, wording, messages):
    """Values go in as they are; braces that name no key of the example stay, as LaTeX has them."""
    posing = of_task(name)
    options = posing["options"].model_copy(update=wording)
    assert pose(example, task=posing["task"], options=options) == messages


def test_a_wording_without_the_question_is_refused(tokenizer):
    with pytest.raises(ValueError, match=r"^task\.prompt: .*; write one of \{nums\}, \{target\}"):
        questions_for(tokenizer, "task.prompt='Make {goal}.'")


def test_encoded_prompts_are_the_tokens_of_the_rendered_text(tokenizer, templated):
    for one in (tokenizer, templated):
        arguments = {"examples": ROWS["countdown"][:2], "tokenizer": one, **of_task("countdown")}
        texts, _ = render_prompts(**arguments)
        assert [one.decode(ids) for ids in encode_prompts(**arguments)] == texts
        assert all(text.endswith("<think>") for text in texts) and "make 46." in texts[0]
    # Bug: the tokenizer raises IndexError for an empty list, where a rank had no question.
    assert encode_prompts([], tokenizer=tokenizer, **of_task("countdown")) == []


def test_no_prompt_ends_with_an_end_that_the_tokenizer_adds(tokenizer):
    """Bug: a post-processor that adds one, as of add_eos_token, let every plain prompt end."""
    end, plain = tokenizer.eos_token, copy.deepcopy(tokenizer)
    expected = encode_prompts(ROWS["countdown"], tokenizer=plain, **of_task("countdown"))
    for single, start in ((f"$A {end}", []), (f"{end} $A {end}", [plain.eos_token_id])):
        plain.backend_tokenizer.post_processor = TemplateProcessing(
            single=single, special_tokens=[(end, plain.eos_token_id)]
        )
        found = encode_prompts(ROWS["countdown"], tokenizer=plain, **of_task("countdown"))
        assert found == [start + ids for ids in expected]


@pytest.mark.parametrize(
    ("name", "has_template", "is_added"),
    [
        ("countdown", False, True),
        ("countdown", True, False),
        ("math500", True, True),  # a plain text
    ],
)
def test_only_a_prompt_without_a_template_gets_special_tokens(
    templated, name, has_template, is_added
):
    """A template writes them itself: added to its text, they would come twice."""
    end = templated.eos_token
    templated.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, templated.eos_token_id)]
    )
    templated.chat_template = CHAT_TEMPLATE if has_template else None
    (ids,) = encode_prompts(ROWS[name][:1], tokenizer=templated, **of_task(name))
    assert (ids[0] == templated.eos_token_id) == is_added
