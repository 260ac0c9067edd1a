"""A warm start: which answers it takes, what it computes, what it leaves, and kills in it."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import (
    CPU,
    NUMBERS,
    alone,
    assert_same,
    load_run,
    make_config,
    make_policy,
    make_run,
    read_jsonl,
    read_rows,
    train,
    train_forked,
)
from reference import ROUNDING, Recorder, distance, row_log_probs
from safetensors.torch import load_file

import countdown
from engine.core.config import ConfigError
from engine.core.distributed import World
from engine.questions.prompts import encode_prompts
from engine.questions.tasks import is_in_split, load_task
from engine.run import checkpoint, warm_start
from engine.run.config_file import load_config
from main import make_micro_batches, update_policy

TRAIN = [n for n in NUMBERS if is_in_split(f"[{n}] {n}", "train")]
HELD_OUT = [n for n in NUMBERS if n not in TRAIN]
WARM = ["warm_start.num_steps=3", "warm_start.learning_rate=2e-3", "training.num_steps=2"]
WARM += ["validation.every=1"]


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


def loaded(folder: Path, file: Path, *overrides: str, log: list[str] | None = None):
    """A run without a folder that has read the file, and its policy in fp64."""
    config = make_config(f"warm_start.data={file}", "training.max_new_gen_tokens=16", *overrides)
    policy = make_policy(folder, "training.max_new_gen_tokens=16", is_exact=True)
    questions = [{"nums": [n], "target": n} for n in HELD_OUT]
    run = make_run(policy, config, questions=questions)
    run.logger.info = (log if log is not None else []).append
    warm_start.load_answers(run, warm_start.read_answers(load_task("countdown"), config))
    return run


# Which answers


@pytest.mark.parametrize(("only_solved", "num"), [(False, len(TRAIN)), (True, len(TRAIN) - 1)])
def test_answers_to_validation_questions_are_left_out_and_wrong_ones_counted(
    rotary_model_folder, answers, only_solved, num
):
    log = []
    override = f"warm_start.only_solved={str(only_solved).lower()}"
    run = loaded(rotary_model_folder, answers, override, log=log)
    assert len(run.answers) == num
    assert log == [
        f"{answers}: {len(HELD_OUT)} answers to validation questions are left out",
        f"{answers}: of {len(TRAIN)} answers 1 do not solve their question"
        + ": left out" * only_solved,
    ]
    assert {t.advantage for t in run.answers} == {1.0}
    end = run.policy.tokenizer.eos_token_id
    assert all(t.completion.token_ids[-1] == end for t in run.answers)
    assert not any(t.completion.truncated for t in run.answers)


LONG = "7 + 8 = 15, " * 9


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        (row(1, ""), "row 2: its completion is empty; rows must look like {"),
        (row(1, " \n"), "row 2: its completion is empty; rows must look like {"),
        (row(1, 5), "row 2: its completion is empty; rows must look like {"),
        (row(1, None) | {"target": "x"}, "row 2: target is 'x', not an integer; rows must"),
        ({"nums": [1], "target": 1}, "row 2: no column completion among nums, target; rows must"),
        (row(TRAIN[1], LONG), "row 2: with its end its completion has "),
        (row(TRAIN[1], "a<|end|>b"), "row 2: the tokenizer cannot give its completion back, or it"),
        (row(TRAIN[1], "half \ud800"), "row 2: the tokenizer cannot give its completion back, or"),
    ],
)
def test_a_bad_answer_is_one_line_with_its_row(rotary_model_folder, tmp_path, bad, line):
    file = write(tmp_path / "answers.jsonl", [row(TRAIN[0]), bad])
    with pytest.raises(ValueError) as caught:
        loaded(rotary_model_folder, file)
    assert str(caught.value).startswith(f"{file}, {line}") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("rows", "overrides", "end"),
    [
        ([row(HELD_OUT[0])], [], "no answer is left to imitate; give a file with more"),
        ([row(TRAIN[0], "no")], ["warm_start.only_solved=true"], "; give a file with more"),
    ],
)
def test_a_file_without_an_answer_to_imitate_is_refused(
    rotary_model_folder, tmp_path, rows, overrides, end
):
    with pytest.raises(ValueError, match=f"{end}$"):
        loaded(rotary_model_folder, write(tmp_path / "answers.jsonl", rows), *overrides)


@pytest.mark.parametrize("text", ["", "\n"])
def test_an_empty_file_is_refused(tmp_path, text):
    """Bug: the run went on without its warm start, and without a word."""
    (tmp_path / "answers.jsonl").write_text(text)
    config = make_config(f"warm_start.data={tmp_path}/answers.jsonl")
    with pytest.raises(ValueError, match=r"answers.jsonl: "):
        warm_start.read_answers(load_task("countdown"), config)


@pytest.mark.parametrize("name", ["no-file.jsonl", "no/hub/id"])
def test_no_file_is_a_line_before_the_model_is_loaded(tmp_path, name):
    config = make_config(f"warm_start.data={name}", "model.name=/no/model", f"run.dir={tmp_path}")
    with pytest.raises(ValueError, match=f"^{name}: .*; give a .jsonl"):
        load_run(config)


def test_a_task_of_several_turns_has_no_answers_in_a_file(tmp_path):
    config = load_config(["task.name=guess", "warm_start.data=x.jsonl"])
    with pytest.raises(ConfigError, match=r"^warm_start.data = x.jsonl: task.name = guess: "):
        warm_start.read_answers(load_task("guess"), config)


def test_an_answer_ends_as_the_chat_template_ends_a_turn(rotary_model_folder, answers):
    """A model that imitates the tokenizer's own end instead writes on where sampling would stop."""
    run = loaded(rotary_model_folder, answers)
    tokenizer = copy.deepcopy(run.policy.tokenizer)
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}<|im_end|>\n{% endfor %}"
    run.policy = replace(run.policy, tokenizer=tokenizer)
    given = {"question": {"nums": [3], "target": 3}, "completion": "7"}
    answer = warm_start.make_answer(run, given, "row 1")
    assert tokenizer.decode(answer.completion.token_ids) == "7<|im_end|>"
    assert answer.text == "7"


def test_each_rank_imitates_its_own_share_of_the_shuffled_answers(rotary_model_folder, answers):
    """Two steps of 3 rows on each of 2 ranks: 12 different rows, which one rank takes in the same
    order, by the seed and not as they lie in the file."""
    sizes = ["warm_start.num_steps=2", "training.num_samples_per_step_global=6"]
    run, seen = loaded(rotary_model_folder, answers, *sizes), []

    def note(groups, config, world) -> list:
        seen.extend(t for (t,) in groups)
        return []

    def drawn(world: World) -> list[int]:
        run.world = world
        seen.clear()
        warm_start.warm_start(run, note, lambda *_: ({"train/loss": 0.0}, {}, 1))
        return [run.answers.index(t) for t in seen]

    whole = drawn(alone())
    first, second = (drawn(World(rank, 2, CPU)) for rank in range(2))
    assert len(set(whole)) == 12 and whole != sorted(whole)
    assert whole == first[:3] + second[:3] + first[3:] + second[3:]


# What is computed


def test_its_gradient_is_that_of_the_cross_entropy_row_by_row(
    rotary_model_folder, tmp_path, monkeypatch
):
    """Over the tokens of the answers and their ends, of all rows alike, and not of the prompts."""
    texts = ["</think>\n", "7 + 8 = 15</think>\n", "5"]
    rows = [row(n, text) for n, text in zip(TRAIN, texts, strict=False)]
    file = write(tmp_path / "answers.jsonl", rows)
    overrides = ["warm_start.num_steps=1", "training.num_samples_per_step=3"]
    overrides += ["training.micro_batch_tokens=1", "training.max_grad_norm=1e9"]
    # what RL has on must not matter
    overrides += ["training.policy_loss=dppo", "training.loss_normalization=sequence"]
    run = loaded(rotary_model_folder, file, *overrides)
    model, recorder = copy.deepcopy(run.policy.model), Recorder(run.policy.model)
    recorder.param_groups = []
    monkeypatch.setattr(warm_start, "make_optimizer", lambda *_: recorder)
    assert warm_start.warm_start(run, make_micro_batches, update_policy)
    how = {"task": countdown, "options": run.config.task, "tokenizer": run.policy.tokenizer}
    assert [t.prompt_ids for t in run.answers] == encode_prompts(rows[:3], **how)  # as RL's
    num_tokens = sum(len(run.policy.tokenizer.encode(text)) + 1 for text in texts)  # and ends
    loss = -sum(row_log_probs(model, t).sum() for t in run.answers)
    model.zero_grad()
    (loss / num_tokens).backward()
    expected = np.concatenate([p.grad.flatten().numpy() for p in model.parameters()])
    assert distance(recorder.gradients[0], expected) <= ROUNDING
    assert run.state.is_warm


# What is left, and kills


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rotary_model_folder, data) -> tuple[Path, list[str]]:
    """An unbroken run of three warm steps and two of RL, and what it was given."""
    folder = tmp_path_factory.mktemp("warm")
    file = write(folder / "answers.jsonl", [row(n) for n in NUMBERS])
    overrides = [*data, *WARM, f"warm_start.data={file}", "checkpoint.keep=null"]
    train(folder, rotary_model_folder, *overrides)
    return folder, overrides


def test_it_leaves_its_rows_beside_those_of_rl_and_a_checkpoint(whole, rotary_model_folder):
    run = whole[0] / "x"
    steps = read_jsonl(run / "warm.jsonl")
    assert [some["step"] for some in steps] == [1, 2, 3, 3]
    assert all(some["warm/loss"] > 0 for some in steps[:3])
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (rotary_model_folder, run / "checkpoints/step-000000")
    )
    assert not any(torch.equal(after[name], before[name]) for name in before)
    assert [some["warm/lr"] for some in steps[:3]] == pytest.approx([4e-4, 8e-4, 12e-4])
    assert "eval/pass@1" in steps[3] and "warm/loss" not in steps[3]
    rows = read_rows(run)  # fails where a row is there twice
    assert [some["step"] for some in rows] == [0, 1, 2]
    assert not any(name.startswith("warm/") for some in rows for name in some)
    names = [folder.name for folder in checkpoint.list_checkpoints(run / "checkpoints")]
    assert names == ["step-000002", "step-000001", "step-000000"]
    state = checkpoint.load_state(run / "checkpoints/step-000000")["state"]
    assert state["is_warm"] and state["evaluated_at"] == state["step"] == 0
    # Of eight samples before and after, as many may be right: the two may be equal.
    assert state["first"] == rows[0]["eval/pass@1"] and state["last"] == steps[3]["eval/pass@1"]
    assert not checkpoint.load_optimizer_state(run / "checkpoints/step-000000")["state"]


def test_rl_goes_on_from_its_end_bit_for_bit(whole, tmp_path, rotary_model_folder):
    folder, overrides = whole
    shutil.copytree(folder, tmp_path / "parts", symlinks=True)
    for step in (1, 2):
        shutil.rmtree(tmp_path / f"parts/x/checkpoints/step-00000{step}")
    output = train(tmp_path / "parts", rotary_model_folder, *overrides)
    assert "resumed after step 0" in output and "warm start 1/3" not in output
    assert_same(folder, tmp_path / "parts")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_kill_in_it_or_at_its_last_step_begins_it_again_and_ends_the_same(
    whole, tmp_path, rotary_model_folder
):
    """The copies are what a kill before each file event would leave."""
    folder, overrides = whole
    fault = {"do": "copy", "to": str(tmp_path / "copies"), "saves": 0, "events": 1}
    train(tmp_path / "run", rotary_model_folder, *overrides, "training.num_steps=1", fault=fault)
    copies = sorted((tmp_path / "copies").iterdir())
    files = [c / "x/warm.jsonl" for c in copies]
    rows = [len(f.read_text().splitlines()) if f.exists() else 0 for f in files]
    first, last = rows.index(1), rows.index(3)
    is_saved = [bool(checkpoint.newest_whole(c / "x/checkpoints")) for c in copies]
    saved = is_saved.index(True)
    assert first < last < saved
    for killed, line in (
        (first, "killed before its first checkpoint and begins again"),
        (last, "killed before its first checkpoint and begins again"),
        (saved - 1, "killed before its first checkpoint and begins again"),
        (saved, "resumed after step 0"),
    ):
        output = train(copies[killed], rotary_model_folder, *overrides)
        assert line in output and ("warm start 1/3" in output) == (killed < saved)
        assert_same(folder, copies[killed])
        assert (copies[killed] / "x/warm.jsonl").exists()


@pytest.mark.slow
def test_a_signal_in_it_saves_nothing_of_it(whole, tmp_path, rotary_model_folder):
    folder, overrides = whole
    fault = {"do": "terminate", "saves": 0, "events": 0}
    fault["events"] = 1 + num_events_before_row(whole, tmp_path, rotary_model_folder)
    parts = tmp_path / "parts"
    status, output = train_forked(parts, rotary_model_folder, *overrides, fault=fault)
    assert status == 143 and "stopped by a signal after step 0" in output, output
    assert not (parts / "x/checkpoints").exists()
    assert "begins again" in train(parts, rotary_model_folder, *overrides)
    assert_same(folder, parts)


def num_events_before_row(whole, tmp_path: Path, model: Path) -> int:
    """File events up to the first row of warm.jsonl."""
    fault = {"do": "copy", "to": str(tmp_path / "copies"), "saves": 0, "events": 1}
    train(tmp_path / "run", model, *whole[1], "training.num_steps=1", fault=fault)
    copies = sorted((tmp_path / "copies").iterdir())
    return next(i for i, c in enumerate(copies, 1) if (c / "x/warm.jsonl").exists())


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("warm_start.num_steps=4", "error: warm_start.num_steps = 4, but the run was started with"),
        ("warm_start.only_solved=true", "error: warm_start.only_solved = true, but the run was"),
        ("", "error: the answers of warm_start.data = "),
    ],
)
def test_another_warm_start_is_refused_at_resume(
    whole, tmp_path, rotary_model_folder, override, line
):
    folder, overrides = whole
    shutil.copytree(folder / "x", tmp_path / "x", symlinks=True)
    file = folder / "answers.jsonl"
    before = file.read_text()
    try:
        if not override:
            write(file, [row(n) for n in reversed(NUMBERS)])
        extra = [override] if override else []
        status, output = train_forked(tmp_path, rotary_model_folder, *overrides, *extra)
    finally:
        file.write_text(before)
    assert status == 2 and line in output and "Traceback" not in output


def test_a_run_of_before_there_were_warm_starts_goes_on(tmp_path, rotary_model_folder, data):
    train(tmp_path, rotary_model_folder, *data, "training.num_steps=1")
    file = tmp_path / "x/checkpoints/step-000001/training_state/state.json"
    saved = json.loads(file.read_text())
    del saved["state"]["is_warm"]
    saved["config"] = {k: v for k, v in saved["config"].items() if "warm_start" not in k}
    file.write_text(json.dumps(saved, indent=1))
    sizes = file.with_name("files.json")
    known = json.loads(sizes.read_text()) | {"training_state/state.json": file.stat().st_size}
    sizes.write_text(json.dumps(known))
    output = train(tmp_path, rotary_model_folder, *data, "training.num_steps=2")
    assert "resumed after step 1" in output
