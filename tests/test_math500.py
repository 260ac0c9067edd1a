r"""The MATH task: which problems it trains on, what it asks, and what it pays for."""

import copy
import json
import os
import sys
from pathlib import Path

import pytest
from conftest import make_config, save_random, seed
from runs import finish, start
from transformers import GPT2Config, GPT2LMHeadModel

import math500
from config import load_config, options_for
from data import TASKS, encode_prompts, load_questions
from grader import Grade
from math500 import (
    extract_answer,
    generate_prompt,
    is_held_out,
    load_examples,
    parse_question,
    question_key,
    reward_function,
)

ROWS = [{"problem": f"What is ${n} + 1$?", "answer": str(n + 1)} for n in range(80)]
EXAMPLE = {"problem": r"What is $\frac{1}{2} + \frac{1}{3}$?", "answer": r"\frac{5}{6}"}


@pytest.fixture(autouse=True)
def dataset_cache_in_a_temporary_folder(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write_file(folder: Path, rows: list[dict], *, name: str = "questions.json") -> str:
    path = folder / name
    lines = name.endswith("jsonl")
    path.write_text("\n".join(map(json.dumps, rows)) if lines else json.dumps(rows))
    return str(path)


# Reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"So it is $\boxed{\frac{5}{6}}$.", 1.0),
        (r"\boxed{\frac{2}{3}}, no: \boxed{5/6}", 1.0),
        (r"\boxed{\dfrac{10}{12}}", 1.0),
        (r"\boxed{x = \frac56}", 1.0),
        (r"\boxed{\frac{1}{2} + \frac{1}{3}}", 1.0),
        (r"\boxed{5/6}, no: \boxed{\frac{2}{3}}", 0.0),
        (r"\boxed{0.8333}", 0.0),
        (r"\boxed{-\frac{5}{6}}", 0.0),
        (r"\boxed{9^{9^{9^9}}}", 0.0),
        (r"\boxed{\frac{5}{6}", 0.0),
        (r"\frac{5}{6}", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_last_box_is_paid_and_only_for_the_gold_value(completion: str, reward: float):
    parts = reward_function(completion, EXAMPLE, grader_timeout_s=30.0)
    assert parts == {"answer": reward, "timeout": 0.0}


def test_a_time_out_is_counted_and_earns_nothing(monkeypatch):
    limits = []

    def stopped(completion: str, gold: str, *, timeout_s: float) -> Grade:
        limits.append(timeout_s)
        return Grade(False, timed_out=True)

    monkeypatch.setattr(math500, "grade", stopped)
    assert reward_function("x", EXAMPLE) == {"answer": 0.0, "timeout": 1.0}
    config = make_config("task.name=math500", "task.train=a/b", "task.grader_timeout_s=2.5")
    assert config.task.reward_weights == {"answer": 1.0, "timeout": 0.0}
    reward_function("x", EXAMPLE, **options_for(reward_function, config))
    assert limits == [5.0, 2.5]


def test_extract_answer_is_the_last_box_in_a_normal_form():
    assert extract_answer(r"\boxed{1} \boxed{\dfrac{10}{12}}") == "5/6"
    assert extract_answer(r"\boxed{x=0.50}", EXAMPLE) == "1/2"
    assert extract_answer(r"\boxed{ }") is None
    assert extract_answer(r"\boxed{1") is None
    assert extract_answer("5") is None


# Prompt


def test_the_prompt_poses_the_problem_and_asks_for_a_box():
    prompt = generate_prompt(EXAMPLE)
    assert EXAMPLE["problem"] in prompt
    assert r"\boxed{ANSWER}" in prompt
    assert prompt.endswith("Answer:")
    braces = {"problem": r"Is $\{x\} = {0}$?", "answer": "0"}
    assert braces["problem"] in generate_prompt(braces)


def test_the_prompt_is_plain_text_even_where_the_tokenizer_has_a_chat_template(tokenizer):
    """The tokenizers of base models have one too."""
    config = make_config("task.name=math500", "task.train=a/b")
    plain = encode_prompts([EXAMPLE], config=config, tokenizer=tokenizer)
    with_template = copy.deepcopy(tokenizer)
    with_template.chat_template = "<user>{{ messages[0]['content'] }}</user>"
    assert encode_prompts([EXAMPLE], config=config, tokenizer=with_template) == plain
    assert tokenizer.decode(plain[0]) == generate_prompt(EXAMPLE)


def test_a_typed_problem_becomes_an_example_whose_prompt_can_be_made():
    assert parse_question(" What is $1+1$?\n") == {"problem": "What is $1+1$?", "answer": ""}
    assert reward_function(r"\boxed{}", parse_question("What is $1+1$?"))["answer"] == 0.0
    with pytest.raises(ValueError, match="write a problem, for example"):
        parse_question(" \n")


# Data


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_files_load_and_split_without_overlap(tmp_path, name: str):
    source = write_file(tmp_path, [{**row, "level": 3} for row in ROWS], name=name)
    train = load_examples(source, "train", num_examples=None).to_list()
    validation = load_examples(source, "validation", num_examples=None).to_list()
    assert train == [row for row in ROWS if not is_held_out(row)]
    assert validation == [row for row in ROWS if is_held_out(row)]
    assert len(validation) > 0
    everything = load_examples(source, "validation", num_examples=None, held_out=False)
    assert everything.to_list() == ROWS


def test_some_rows_are_drawn_by_the_seed(tmp_path):
    source = write_file(tmp_path, ROWS)
    rows = load_examples(source, "train", num_examples=10, seed=seed(3)).to_list()
    assert len(rows) == 10
    assert rows == load_examples(source, "train", num_examples=10, seed=seed(3)).to_list()
    assert rows != load_examples(source, "train", num_examples=10, seed=seed(4)).to_list()


@pytest.mark.parametrize(
    ("problem", "other", "same"),
    [
        ("What is $1 + 1$?", "what  is 1+1 ?", True),
        (r"Find $\frac{1}{2}$.", r"Find $\dfrac{1}{2}$", True),
        (r"Is $\left(1, 2\right)$ it?", "Is $(1,2)$ it?", True),
        ("What is $1 + 1$?", "What is $1 - 1$?", False),
        ("What is $1 + 1$?", "What is $1 + 11$?", False),
        ("Is $x < 1$?", "Is $x > 1$?", False),
        (r"Find $\leftarrow$", r"Find $\arrow$", False),
    ],
)
def test_a_problem_is_known_again_however_it_is_set(problem: str, other: str, same: bool):
    assert (question_key({"problem": problem}) == question_key({"problem": other})) == same


def test_no_problem_of_the_evaluation_file_is_trained_on(tmp_path):
    """However its text is set there."""
    evaluation = write_file(tmp_path, ROWS[:20], name="evaluation.json")
    respelled = [
        {"problem": row["problem"].replace("$", "").replace(" ", "  ").upper(), "answer": "0"}
        for row in ROWS[:10]
    ]
    train = write_file(tmp_path, [*respelled, *ROWS], name="train.json")
    excluded = load_examples(evaluation, "validation", num_examples=None, held_out=False)
    rows = load_examples(train, "train", num_examples=None, held_out=False, exclude=excluded)
    assert rows.to_list() == ROWS[20:]


def test_a_run_trains_on_none_of_its_evaluation_problems(tmp_path, tokenizer):
    sources = {"train": ROWS, "eval": ROWS[30:40]}
    files = {key: write_file(tmp_path, rows, name=f"{key}.json") for key, rows in sources.items()}
    config = make_config("task.name=math500", *(f"task.{key}={files[key]}" for key in files))
    loaded = load_questions(config, tokenizer=tokenizer, context=None, say=print)
    assert loaded["validation"].to_list() == ROWS[30:40]
    assert loaded["training"].to_list() == ROWS[:30] + ROWS[40:]


def test_of_the_hub_the_evaluation_is_the_test_split_unless_both_are_one_source(monkeypatch):
    asked = []

    def load_table(source: str, *, hub_split: str):
        asked.append((source, hub_split))
        from datasets import Dataset

        return Dataset.from_list(ROWS)

    monkeypatch.setattr(math500, "load_table", load_table)
    load_examples("own/math", "train", num_examples=None, held_out=False)
    load_examples("own/math-500", "validation", num_examples=None, held_out=False)
    load_examples("own/math", "train", num_examples=None)
    load_examples("own/math", "validation", num_examples=None)
    assert [split for _, split in asked] == ["train", "test", "train", "train"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"question": "1+1?", "answer": "2"}]', "no column problem among question, answer"),
        ('[{"problem": "1+1?", "solution": "2"}]', "no column answer among problem, solution"),
        ('[{"problem": " ", "answer": "2"}]', "row 1: problem is ' ', not a text"),
        ('[{"problem": 5, "answer": "2"}]', "row 1: problem is 5, not a text"),
        (
            '[{"problem": "a", "answer": "2"}, {"problem": "b", "answer": ""}]',
            "row 2: answer is ''",
        ),
        ('[{"problem": "1+1?", "answer": null}]', "row 1: answer is None, not an answer"),
        ('[{"problem": "1+1?", "answer": true}]', "row 1: answer is True, not an answer"),
        ("[]", "cannot be loaded|no column"),
        ("{", "cannot be loaded"),
    ],
)
def test_a_bad_file_is_named_in_one_line(tmp_path, content: str, message: str):
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_examples(str(path), "train", num_examples=None)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_answers_may_be_numbers(tmp_path):
    source = write_file(tmp_path, [{"problem": "What is $1 + 1$?", "answer": 2}])
    rows = load_examples(source, "validation", num_examples=None, held_out=False)
    assert rows.to_list() == [{"problem": "What is $1 + 1$?", "answer": "2"}]


def test_generated_questions_are_refused_in_words_of_this_task():
    with pytest.raises(ValueError, match=r"generated: unknown kind of source; give a \.jsonl"):
        load_examples("generated", "train", num_examples=5)
    with pytest.raises(ValueError, match="split must be train or validation"):
        load_examples("generated", "test", num_examples=5)


def test_a_missing_math_verify_is_named_when_the_questions_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ValueError, match="pip install math-verify") as caught:
        load_examples(str(tmp_path / "none.json"), "train", num_examples=None)
    assert "\n" not in str(caught.value)


# The recipe

RECIPE = Path(__file__).parent.parent / "configs" / "math-rlvr.yaml"


def test_the_recipe_keeps_the_conventions_of_its_source():
    config = load_config(["--config", str(RECIPE)], tasks=TASKS)
    training, sampling = config.training, config.sampling
    assert (config.task.name, config.task.grader_timeout_s) == ("math500", 5.0)
    assert config.task.reward_weights == {"answer": 1.0, "timeout": 0.0}
    assert (training.num_samples_per_step_global, training.k_best_of_n) == (1, [8, 8])
    assert (training.max_new_gen_tokens, training.num_steps) == (512, 50)
    assert (sampling.temperature, sampling.top_p) == (0.8, 0.9)
    assert (training.advantage, training.loss_normalization) == ("zscore", "sum")
    assert (training.max_grad_norm, training.learning_rate) == (1.0, 1e-5)


@pytest.fixture(scope="module")
def boxing_model_folder(tmp_path_factory, tokenizer) -> Path:
    """A random model, 64 of whose tokens are boxed answers; of 32 of them the value is 2 sqrt 2."""
    tokenizer = copy.deepcopy(tokenizer)
    boxes = [rf"\boxed{{{' ' * n}\sqrt{{8}}}}" for n in range(32)]
    tokenizer.add_tokens(boxes + [rf"\boxed{{{n}}}" for n in range(32)])
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_embd=32,
        n_layer=1,
        n_head=2,
        n_positions=2048,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    folder = tmp_path_factory.mktemp("boxing")
    return save_random(GPT2LMHeadModel, config, tokenizer, folder)


def train(folder: Path, model: Path, **sources: str) -> list[dict]:
    """The metrics of two steps of the recipe."""
    overrides = {
        "model.name": model,
        "run.dir": folder,
        "run.name": "x",
        "training.num_steps": 2,
        "training.num_samples_per_step_global": 16,
        "training.max_new_gen_tokens": 16,
        "validation.every": 1,
        "validation.num_examples": 4,
    }
    overrides |= {f"task.{key}": source for key, source in sources.items()}
    arguments = ["main.py", "--config", str(RECIPE)]
    arguments += [f"{key}={value}" for key, value in overrides.items()]
    (status,) = finish(start(arguments, log=folder / "log"))
    assert status == 0, (folder / "log").read_text()
    return [json.loads(line) for line in (folder / "x/metrics.jsonl").read_text().splitlines()]


def test_the_recipe_runs_on_local_files_and_pays_for_equal_values(tmp_path, boxing_model_folder):
    rows = [{"problem": f"What is $\\sqrt{{8}}$? {n}", "answer": r"2\sqrt{2}"} for n in range(40)]
    files = {"train": rows[:30], "eval": rows[30:]}
    sources = {key: write_file(tmp_path, rows, name=f"{key}.json") for key, rows in files.items()}
    metrics = train(tmp_path, boxing_model_folder, **sources)
    # of 128 completions about half are right: none and all have chances of about 2**-128
    assert [row["step"] for row in metrics] == [0, 1, 2]
    for row in metrics[1:]:
        assert 0 < row["train/solved"] == row["train/reward"] < 1
        assert row["train/reward_timeouts"] == 0
        assert row["train/grad_norm"] > 0
    assert any(row["eval/pass@1"] > 0 for row in metrics)


@pytest.fixture
def real_file() -> str:
    if "GRPO_TEST_DATA" not in os.environ:
        pytest.skip("GRPO_TEST_DATA is not set to the folder of the real files")
    return str(Path(os.environ["GRPO_TEST_DATA"], "math500", "test.json"))


def test_the_recipe_runs_on_real_problems(tmp_path, boxing_model_folder, real_file):
    rows = json.loads(Path(real_file).read_text())
    source = write_file(tmp_path, rows[:40])
    metrics = train(tmp_path, boxing_model_folder, train=source, eval=real_file)
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert metrics[1]["train/reward_timeouts"] == 0


def test_the_real_evaluation_file_loads_whole(real_file):
    rows = load_examples(real_file, "validation", num_examples=500, held_out=False).to_list()
    assert len({question_key(row) for row in rows}) == 500
    for row in rows:
        assert reward_function(f"\\boxed{{{row['answer']}}}", row)["answer"] == 1.0
        assert reward_function("", row)["answer"] == 0.0
    with pytest.raises(ValueError, match="no question left for train"):
        load_examples(real_file, "train", num_examples=None, held_out=False, exclude=rows)
