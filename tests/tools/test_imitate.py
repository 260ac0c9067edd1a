"""tools.imitate: which answers it takes, what it computes, what it writes, and what ends it."""

import copy
import json
import os
import re
import shlex
import signal
from argparse import Namespace
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock

import harness
import numpy as np
import pytest
import torch
from harness import NUMBERS, make_config, make_policy, make_run, make_task, read_jsonl
from huggingface_hub import ModelCard
from reference import ROUNDING, Recorder, distance, row_log_probs

from engine.core.config import TaskSettings
from engine.core.distributed import World
from engine.questions.contract import Task
from engine.questions.prompts import encode_prompts
from engine.questions.tasks import is_in_split
from engine.run.config_file import load_config
from engine.run.folder import run_folder
from engine.run.state import Run, State
from engine.update.optimizer import Outcome, Update
from main import build_run
from tools import imitate

COUNTDOWN = make_task("countdown")
TRAIN = [n for n in NUMBERS if is_in_split(f"[{n}] {n}", "train")]
HELD_OUT = [n for n in NUMBERS if n not in TRAIN]
LORA = "model.lora={r: 2, dropout: 0.1}"


def row(number: int, completion: object = None) -> dict:
    """A question that has one answer, which is found without a word of thought."""
    text = f"</think>\n<answer>{number}</answer>" if completion is None else completion
    return {"nums": [number], "target": number, "completion": text}


def write(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(some) + "\n" for some in rows))
    return file


@pytest.fixture
def answers(tmp_path) -> Path:
    """Right answers to all questions, the validation's too, but for one that is wrong."""
    wrong = row(TRAIN[0], f"</think>\n<answer>{TRAIN[1]}</answer>")
    return write(tmp_path / "answers.jsonl", [wrong, *(row(n) for n in NUMBERS if n != TRAIN[0])])


def choose(folder: Path, file: Path, *, only_solved: bool = False):
    """The answers in the file that a run of the model in `folder` imitates; this run; its lines."""
    settings, lines = ["training.max_new_gen_tokens=16"], []
    config = make_config(*settings)
    questions = [{"nums": [n], "target": n} for n in HELD_OUT]
    run = make_run(make_policy(folder, *settings), config, questions=questions)
    run.logger.info = lines.append
    rows = imitate.read_answers(COUNTDOWN, config, str(file))
    return imitate.choose_answers(run, rows, str(file), only_solved=only_solved), run, lines


@pytest.fixture
def begin(rotary_model_folder, tmp_path, answers, data, call) -> partial:
    """Calls tools/imitate.py, which is to write tmp_path/x-imitation."""
    given = harness.arguments(tmp_path, rotary_model_folder, *data)
    return partial(call, imitate, rotary_model_folder, answers, *given)


def test_of_a_row_with_messages_the_last_answer_is_imitated():
    asked, answered = {"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}
    task = Task("a.py", {"parse_row": lambda row, options: row}, TaskSettings())
    read = imitate.parse_answer(task, {"messages": [asked, answered], "n": 2}, options=None)
    assert read == {"question": {"prompt": [asked], "n": 2}, "completion": "4"}


@pytest.mark.parametrize(("only_solved", "num"), [(False, len(TRAIN)), (True, len(TRAIN) - 1)])
def test_answers_to_validation_questions_are_left_out_and_wrong_ones_counted(
    rotary_model_folder, answers, only_solved, num
):
    chosen, run, lines = choose(rotary_model_folder, answers, only_solved=only_solved)
    assert len(chosen) == num
    assert lines == [
        f"{answers}: {len(HELD_OUT)} answers to validation questions are left out",
        f"{answers}: of {len(TRAIN)} answers 1 do not solve their question"
        + ": left out" * only_solved,
    ]
    assert {t.completion.token_ids[-1] for t in chosen} == {run.policy.tokenizer.eos_token_id}
    assert not any(t.completion.truncated for t in chosen)


def test_an_answer_ends_where_the_chat_template_ends_a_turn(rotary_model_folder, answers):
    _, run, _ = choose(rotary_model_folder, answers)
    tokenizer = run.policy.tokenizer
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|pad|>{% endfor %}"
    answer = imitate.make_answer(run, {"question": row(1), "completion": "5"}, "row 1")
    five = tokenizer.encode("5", add_special_tokens=False)
    assert answer.completion.token_ids == [*five, tokenizer.pad_token_id]


LONG, SHOWN = "7 + 8 = 15, " * 9, "; rows must look like {"
NO_ANSWER = ": no answer is left to imitate; give a file with more"
BAD_ANSWERS = {
    "white space": ([row(TRAIN[0]), row(1, " \n")], f", row 2: its completion is empty{SHOWN}"),
    "no column": ([{"nums": [1], "target": 1}], ", row 1: no column completion among nums, target"),
    "too long": ([row(TRAIN[1], LONG)], ", row 1: with its end its completion has "),
    "an end inside": ([row(TRAIN[1], "a<|end|>b")], ", row 1: the tokenizer cannot give its"),
    "half a character": ([row(TRAIN[1], "7\ud800")], ", row 1: the tokenizer cannot give its"),
    "none solved": ([row(TRAIN[0], "no")], NO_ANSWER),
    "no rows": ([], ": "),  # bug: nothing was imitated, without a word
}


@pytest.mark.parametrize(("rows", "line"), BAD_ANSWERS.values(), ids=BAD_ANSWERS)
def test_a_file_with_a_bad_answer_or_none_is_one_line(rotary_model_folder, tmp_path, rows, line):
    file = write(tmp_path / "answers.jsonl", rows)
    with pytest.raises(ValueError) as caught:
        choose(rotary_model_folder, file, only_solved=line == NO_ANSWER)
    assert str(caught.value).startswith(f"{file}{line}") and "\n" not in str(caught.value)


def test_its_gradient_is_cross_entropys_row_by_row(rotary_model_folder, tmp_path, monkeypatch):
    """Over the tokens of the answers and their ends, of all rows alike, and not of the prompts."""
    texts = ["</think>\n", "7 + 8 = 15</think>\n", "5"]
    rows = [row(n, text) for n, text in zip(TRAIN, texts, strict=False)]
    file = write(tmp_path / "answers.jsonl", rows)
    given = ["training.num_samples_per_step=3", "training.micro_batch_tokens=1"]
    given += ["training.max_grad_norm=1e9", "training.max_new_gen_tokens=16"]
    given += ["validation.num_examples=2", "validation.best_of_n=1"]
    # what RL has on must not matter
    given += ["training.policy_loss=dppo", "training.loss_normalization=sequence"]
    given += ["training.kl_coef=0.1", "training.num_iterations=2", "training.skip_truncated=true"]
    harness.in_fp64(monkeypatch)
    asked = {"model": rotary_model_folder, "config": os.devnull, "out": None}
    asked |= {"steps": "1", "learning_rate": "1e-3", "overrides": given}
    run = build_run(imitate.imitating(Namespace(**asked)))
    model, recorder = copy.deepcopy(run.policy.model), Recorder(run.policy.model)
    run.optimizer = recorder
    read = imitate.read_answers(COUNTDOWN, run.config, str(file))
    chosen = imitate.choose_answers(run, read, str(file), only_solved=False)
    imitate.imitate(run, chosen)
    how = {"task": run.task, "tokenizer": run.policy.tokenizer}
    assert [t.prompt_ids for t in chosen] == encode_prompts(rows, **how)  # as RL's
    num_tokens = sum(len(run.policy.tokenizer.encode(text)) + 1 for text in texts)  # and ends
    loss = -sum(row_log_probs(model, t).sum() for t in chosen)
    model.zero_grad()
    (loss / num_tokens).backward()
    expected = np.concatenate([p.grad.flatten().numpy() for p in model.parameters()])
    (gradient,) = recorder.gradients
    assert distance(gradient, expected) <= ROUNDING


def test_each_rank_imitates_its_own_share_of_the_shuffled_answers(
    rotary_model_folder, answers, monkeypatch
):
    """12 rows, in two steps of two ranks or one, in an order by the seed and not as in the file.
    And each step's seconds are its own, also where there was one before it."""
    chosen, run, lines = choose(rotary_model_folder, answers)
    run.config = make_config("training.num_steps=2", "training.num_samples_per_step_global=6")
    seen: list[int] = []
    now_s = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now_s[0])
    lines.clear()

    def note(run: Run, groups: list) -> Update:
        now_s[0] += 40 + run.state.step
        seen.extend(chosen.index(answer) for (answer,) in groups)
        return Update(Outcome.UPDATED, metrics={"train/loss": 0.0})

    monkeypatch.setattr(imitate, "update_policy", note)
    monkeypatch.setattr(imitate, "seeded", seeded := MagicMock())
    monkeypatch.setattr(imitate, "measure_and_log", lambda run: {})
    monkeypatch.setattr(World, "ask_whether_to_stop", lambda world: None)
    taken = []
    for run.world in (harness.alone(), World(0, 2, harness.CPU), World(1, 2, harness.CPU)):
        run.state = State()
        imitate.imitate(run, chosen)
        taken.append([*seen])
        seen.clear()
    shown = [re.search("seconds (.*)  left (.*)", line).groups() for line in lines]
    assert shown == [("40.0", "0:00:40"), ("41.0", "0:00:00")] * 3
    whole, first, second = taken
    seeds = [some for (some, _), _ in seeded.call_args_list]  # of dropout
    assert len({*map(tuple, seeds[2:])}) == 4  # in two steps on two ranks
    assert len(set(whole)) == 12 and whole != sorted(whole)
    assert whole == first[:3] + second[:3] + first[3:] + second[3:]


@pytest.mark.parametrize("lora", [[], [LORA]], ids=["all weights", "an adapter"])
def test_it_writes_a_plain_model_from_which_a_run_goes_on(
    rotary_model_folder, tmp_path, data, begin, lora
):
    status, output, errors = begin("--steps=3", "--learning-rate=2e-3", *lora)
    assert status == 0, errors
    folder = tmp_path / "x-imitation"
    line = r"train it: python main.py (.*)RATE \(a tenth of 0.002, or less\)\n"
    (again,) = re.findall(f"written: {folder}; {line}", output)
    trained = load_config(shlex.split(f"{again}2e-4"))
    assert trained.model.name == str(folder) and trained.training.learning_rate == 2e-4
    assert re.search(r"imitation 1/3  loss .*  seconds \d+\.\d  left 0:00:\d\d\n", output)
    assert trained.task.eval == make_config(*data).task.eval
    assert {path.name for path in tmp_path.iterdir()} == {"answers.jsonl", folder.name}
    first, *steps, last = read_jsonl(folder / "imitation.jsonl")
    assert [some["step"] for some in (first, *steps, last)] == [0, 1, 2, 3, 3]
    assert all(some["train/loss"] > 0 for some in steps)
    assert [some["train/lr"] for some in steps] == pytest.approx([4e-4, 8e-4, 12e-4])
    before, after = harness.saved_weights(rotary_model_folder), harness.saved_weights(folder)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert all(name.endswith("_proj.weight") for name in moved) if lora else moved == {*before}
    assert any("q_proj" in name for name in moved)
    run = build_run(load_config(harness.arguments(tmp_path, folder, *data)))
    metrics, _ = harness.measure(run)
    assert run.config.training.num_steps != 3 and run.policy.model.dtype == torch.float32
    text = (folder / "README.md").read_text()  # the card
    assert ModelCard(text).data.tags == ["sft", "countdown", "plain-grpo"]
    assert "reinforcement" not in text and str(tmp_path) not in text
    assert "| before training |" in text and "| this model, after step 3 |" in text
    if not lora:  # the sum of adapter and base is rounded
        assert metrics == {k: v for k, v in last.items() if k != "step"}


MISTAKES = {
    "task.name=guess": "task.name = guess: its questions or turns stand in no file",
    "model.load_in_4bit=true model.lora.r=2": "model.load_in_4bit = true: the adapter is ",
    "--out=HERE": "HERE is there already: remove it, or give another --out",
    "--out=HERE/answers.jsonl/x": "HERE/answers.jsonl cannot be written (",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_a_mistake_is_one_line_and_nothing_is_written(tmp_path, begin, given):
    status, _, errors = begin(*given.replace("HERE", str(tmp_path)).split())
    assert status == 2 and errors.count("\n") == 1
    assert errors.replace(str(tmp_path), "HERE").startswith(f"error: {MISTAKES[given]}")
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_a_full_disk_is_seen_before_the_training_and_no_base_is_left(tmp_path, begin, monkeypatch):
    """Bug: the sum of an adapter and its base stayed in runs/, beside --out."""

    def build(config):
        (tmp_path / "o/base").mkdir(parents=True)
        assert run_folder(config) == tmp_path / "o"
        return build_run(config)

    monkeypatch.setattr(imitate, "build_run", build)
    monkeypatch.setattr(imitate.shutil, "disk_usage", lambda path: Namespace(free=1_000))
    status, _, errors = begin(f"--out={tmp_path}/o")
    assert status == 2 and errors.startswith(f"error: {tmp_path}/o: the disk is too small: the m")
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


def test_rows_that_are_too_long_are_counted_before_the_load(answers, begin, monkeypatch):
    """Bug: the first one ended the command, after minutes for a large model, and then the next."""
    monkeypatch.setattr(imitate, "build_run", pytest.fail)
    status, _, error = begin("training.max_new_gen_tokens=1")
    assert status == 2 and error.startswith(f"error: {answers}, row 1: 64 of 64 completions have m")
    assert re.search(r"max_new_gen_tokens=\d+, or cut them\n$", error)


def test_an_answer_without_its_rewards_column_is_imitated(
    rotary_model_folder, tmp_path, monkeypatch
):
    """Bug: rows of messages, without the column that the reward reads, were refused."""
    (tmp_path / "own.py").write_text("def f(completions, answer, **kwargs): return [1.0]")
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "7?", "completion": "7", "answer": "7"}, {"prompt": "8?", "completion": "8"}]
    file, lines = str(write(tmp_path / "a.jsonl", rows)), []
    run = make_run(make_policy(rotary_model_folder), make_config())
    run.config = make_config("task.reward=own:f", "task.train=a.jsonl")
    run.task, run.logger.info = make_task("own:f"), lines.append
    read = imitate.read_answers(run.task, run.config, file)
    assert len(imitate.choose_answers(run, read, file, only_solved=False)) == 2
    assert ": 1 answers are imitated ungraded: " in lines[0] and "own.py, line 1: f " in lines[0]
    assert lines[1:] == [f"{file}: of 2 answers 0 do not solve their question"]


def test_a_loss_that_is_not_finite_ends_it_with_nothing_written(tmp_path, begin, monkeypatch):
    monkeypatch.setattr(imitate, "update_policy", lambda *_: Update(Outcome.BROKEN))
    with pytest.raises(FloatingPointError, match=r"step 1: .*lower --learning-rate"):
        begin()
    assert [path.name for path in tmp_path.iterdir()] == ["answers.jsonl"]


@pytest.mark.parametrize(("place", "step"), [("update_policy", 1), ("measure_policy", 0)])
def test_after_a_signal_what_it_has_trained_is_written(tmp_path, begin, monkeypatch, place, step):
    """Bug: a job's time limit cost all of it. In an evaluation before step 1 nothing is lost."""
    function = getattr(imitate, place)

    def signalled(run: Run, *arguments: object) -> object:
        run.world.signals.note(signal.SIGTERM)
        return function(run, *arguments)

    monkeypatch.setattr(imitate, place, signalled)
    status, output, _ = begin("--steps=3")
    assert status == 143 and f"stopped by a signal after {step} of 3 steps" in output
    folder = tmp_path / "x-imitation"
    assert folder.exists() == ("train it: " in output) == (step > 0)
    if step > 0:
        assert [some["step"] for some in read_jsonl(folder / "imitation.jsonl")] == [0, 1]
        assert "after step 1, and not measured" in (folder / "README.md").read_text()
        assert harness.saved_weights(folder)
