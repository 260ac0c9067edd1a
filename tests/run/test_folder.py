"""A run's folder: nothing in it is lost, whatever a careless user does to it between two starts."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import (
    alone,
    arguments,
    assert_same,
    change_json,
    grade_by_text,
    load_run,
    read_rows,
    set_rates,
    train,
    train_forked,
)
from transformers import AutoModelForCausalLM

import main
from engine.core.files import append_durably
from engine.run import resuming, saving
from engine.run.config_file import load_config

TWO, THREE = "training.num_steps=2", "training.num_steps=3"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rotary_model_folder, data) -> Path:
    """Three steps without a break."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, rotary_model_folder, *data, THREE)
    return folder


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory, rotary_model_folder, data) -> Path:
    """A run that has ended after two steps; tests copy it."""
    folder = tmp_path_factory.mktemp("two")
    train(folder, rotary_model_folder, *data, TWO)
    return folder


@pytest.fixture
def parts(two_steps, tmp_path) -> Path:
    """A copy of that run, to be spoiled and gone on with."""
    return Path(shutil.copytree(two_steps, tmp_path / "parts", symlinks=True))


def contents(folder: Path) -> dict[Path, bytes]:
    """All files, but for the lock, which each start writes anew."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {file: file.read_bytes() for file in files}


# Results that no checkpoint continues


def delete_checkpoints(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")


def damage_checkpoints(run: Path) -> None:
    for file in run.glob("checkpoints/step-*/model.safetensors"):
        file.write_bytes(b"")


def leave_alone(run: Path) -> None:
    pass


@pytest.mark.parametrize(
    ("spoil", "resume", "reason"),
    [
        (delete_checkpoints, "auto", "no whole checkpoint"),
        (damage_checkpoints, "auto", "no whole checkpoint"),
        (leave_alone, "never", "checkpoint.resume is never"),
    ],
)
def test_results_are_never_overwritten(spoil, resume, reason, parts, rotary_model_folder, data):
    """Bug: the run began again, cut its metrics and replaced best/ by the untrained model."""
    spoil(parts / "x")
    before = contents(parts / "x")
    overrides = [*data, THREE, f"checkpoint.resume={resume}"]
    status, output = train_forked(parts, rotary_model_folder, *overrides)
    assert status == 2
    assert reason in output and "run.name" in output
    assert contents(parts / "x") == before


def test_a_run_is_known_though_its_checkpoints_were_deleted(tmp_path):
    """The empty file that its first save has left says so; else its metrics would be cut."""
    write = lambda folder: (folder / "weights").touch()  # noqa: E731
    saving.write_checkpoint(tmp_path / "checkpoints", {}, step=1, write=write, keep=1)
    shutil.rmtree(tmp_path / "checkpoints")
    with pytest.raises(ValueError, match="holds the results of a run, and no whole checkpoint"):
        resuming.find_start(tmp_path, may_resume=True, warn=pytest.fail)


def test_a_folder_that_is_no_runs_is_left_alone(tmp_path, rotary_model_folder, data):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/config.yaml").write_text("mine: 1\n")
    status, output = train_forked(tmp_path, rotary_model_folder, *data, TWO)
    assert status == 2 and "config.yaml, but no run" in output
    assert (tmp_path / "x/config.yaml").read_text() == "mine: 1\n"


def test_a_finished_run_started_again_takes_no_step(two_steps, parts, rotary_model_folder, data):
    output = train(parts, rotary_model_folder, *data, TWO)
    assert "pass@1" in output and "step 1/2" not in output
    assert_same(two_steps, parts)


def test_a_longer_run_says_where_its_learning_rate_jumps(tmp_path, rotary_model_folder, data):
    """Bug: trained on with more steps, it fell to near 0 and rose again without a word."""
    given = [*data, "training.warmup_steps=0", "training.lr_schedule=linear"]
    output = train(tmp_path, rotary_model_folder, *given, TWO)
    assert "a larger training.num_steps; its learning rate" in output
    output = train(tmp_path, rotary_model_folder, *given, THREE)
    line = "warning: training.num_steps was 2 and is 3: the learning rate goes on at 3.3e-04"
    assert line in output and "num_steps was" not in train(
        tmp_path, rotary_model_folder, *given, THREE
    )


def test_evaluations_are_no_results(tmp_path, rotary_model_folder, data):
    train(tmp_path, rotary_model_folder, *data, "mode=evaluate")
    train(tmp_path, rotary_model_folder, *data, "training.num_steps=1")
    assert len(list((tmp_path / "x").glob("eval-*"))) == 1


@pytest.mark.timeout(120)
def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path, rotary_model_folder, data):
    """What it left is kept beside the new files."""
    fault = {"do": "raise", "rank": 0, "calls": 20}  # in the first step, after best/ was saved
    given = (tmp_path, rotary_model_folder, *data, THREE)
    status, output = train_forked(*given, num_ranks=2, fault=fault)
    assert status == 1, output
    assert "killed before its first checkpoint" in train(*given, num_ranks=2)
    (aside,) = (tmp_path / "x").glob("killed-*")
    assert {"best", "config.yaml", "metrics.jsonl", "samples.jsonl"} <= set(os.listdir(aside))
    assert [row["step"] for row in read_rows(tmp_path / "x")] == [0, 1, 2, 3]


@pytest.mark.parametrize("num_moved", range(4))
def test_a_kill_while_a_killed_run_is_moved_aside_leaves_the_rest_to_the_next_start(
    tmp_path, monkeypatch, num_moved
):
    """A folder is a run's if it has a metrics.jsonl, which therefore moves last."""
    names, rename = ["config.yaml", "metrics.csv", "metrics.jsonl", "samples.jsonl"], Path.rename
    for name in names:
        (tmp_path / name).touch()

    def move(path: Path, target: Path) -> None:
        if len(list(tmp_path.glob("killed-*/*"))) == num_moved:
            raise KeyboardInterrupt
        rename(path, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", move)
        resuming.find_start(tmp_path, may_resume=True, warn=print)
    assert resuming.find_start(tmp_path, may_resume=True, warn=print) is None
    assert sorted(path.name for path in tmp_path.glob("killed-*/*")) == names
    assert all(path.name.startswith("killed-") for path in tmp_path.iterdir())


# Two starts of one run


@pytest.mark.timeout(120)
def test_a_second_start_of_a_run_is_refused_while_the_first_lasts(parts, rotary_model_folder, data):
    """Bug: the two wrote steps 0, 1, 2, 3, 2, 4 into one file, and both ended with 0."""
    before = contents(parts / "x")
    with resuming.lock_folder(parts / "x", print):
        status, output = train_forked(parts, rotary_model_folder, *data, THREE, num_ranks=2)
    assert status == 1  # torchrun's own
    assert f"error: {parts / 'x'}: process {os.getpid()} on" in output
    assert contents(parts / "x") == before
    assert "resumed after step 2" in train(parts, rotary_model_folder, *data, THREE)


def test_a_folder_is_locked_by_one_alone(tmp_path):
    with (
        resuming.lock_folder(tmp_path, pytest.fail),
        pytest.raises(ValueError, match=f"process {os.getpid()} on .* trains there now"),
    ):
        resuming.lock_folder(tmp_path, pytest.fail)
    resuming.lock_folder(tmp_path, pytest.fail).close()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(resuming.fcntl, "flock", refuse)
    warnings = []
    resuming.lock_folder(tmp_path, warnings.append).close()
    assert "No locks available" in warnings[0] and "twice at once" in warnings[0]


@pytest.mark.parametrize("name", ["lock", "has_checkpoints", "metrics.jsonl"])
def test_a_file_behind_a_link_is_never_written(tmp_path, name):
    """Bug: the lock was opened through a link, and the file at its end was emptied."""
    other, place = tmp_path / "precious", tmp_path / "run" / name
    other.write_text("mine")
    place.parent.mkdir()
    place.symlink_to(other)
    with pytest.raises(OSError, match=f"run/{name}"):
        if name == "lock":
            resuming.lock_folder(place.parent, pytest.fail)
        else:
            append_durably(place, "ours")
    assert other.read_text() == "mine"


# Checkpoints that are not whole, files that are no checkpoint's


def test_damaged_checkpoints_are_not_counted_and_last_may_be_a_real_folder(
    parts, rotary_model_folder, data, whole
):
    """Bugs: with keep=1 an empty folder step-000099 cost all good checkpoints.

    A run copied by `cp -rL` could save nothing more, and kept all old checkpoints.
    """
    checkpoints, last = parts / "x/checkpoints", parts / "x/checkpoints/last"
    (checkpoints / "step-000099").mkdir()
    (checkpoints / "step-notes").write_text("stray")
    target = last.resolve()
    last.unlink()
    shutil.copytree(target, last)
    output = train(parts, rotary_model_folder, *data, THREE, "checkpoint.keep=1")
    assert "step-000099 is damaged" in output and "resumed after step 2" in output
    assert "nothing saved" not in output
    names = {path.name for path in checkpoints.iterdir()}
    assert names == {"last", "step-000003", "step-000099", "step-notes"}
    assert last.is_symlink() and last.resolve().name == "step-000003"
    assert_same(whole, parts)


@pytest.mark.parametrize("gone", ["best", "best/model.safetensors"])
def test_a_best_model_that_is_gone_is_replaced_by_the_next(parts, rotary_model_folder, data, gone):
    """Even if the next one is worse; bug: the score alone was reported as the best model's."""
    subprocess.run(["rm", "-r", parts / "x" / gone], check=True)
    rates = {"rates": [0.0, 0.0, 0.0, 0.0]}
    output = train(parts, rotary_model_folder, *data, THREE, grading=rates)
    assert "best is gone" in output
    best, last = (
        AutoModelForCausalLM.from_pretrained(parts / "x" / name).state_dict()
        for name in ("best", "checkpoints/last")
    )
    assert all(torch.equal(best[name], last[name]) for name in last)


def test_a_best_model_without_its_weights_is_gone_too(parts, rotary_model_folder, data):
    """Bug: its score alone, in best.json, was reported as the best model's."""
    (parts / "x/best/model.safetensors").unlink()
    rates = {"rates": [0.0, 0.0, 0.0, 0.0]}
    assert "best is gone" in train(parts, rotary_model_folder, *data, THREE, grading=rates)
    assert (parts / "x/best/model.safetensors").is_file()


@pytest.mark.parametrize("content", ['{"best": 0.5, "best_st', "", '{"best_step": 1, "note": 2}'])
def test_a_damaged_best_score_costs_one_line_at_most(parts, rotary_model_folder, data, content):
    """Bug: the line, `Expecting value`, had no file's name; a key too many was a traceback."""
    file = parts / "x/best/best.json"
    file.write_text(content)
    status, output = train_forked(parts, rotary_model_folder, *data, THREE)
    assert "Traceback" not in output
    if "note" in content or not content:
        assert status == 0 and "resumed after step 2" in output
    else:
        assert status == 2 and f"error: {file}: cannot be read" in output


def test_the_best_score_is_that_of_the_model_in_best(tmp_path, rotary_model_folder, data):
    """Bug: after a checkpoint was deleted, card and summary told of different models."""
    every = [*data, TWO, "validation.every=1"]
    train(tmp_path, rotary_model_folder, *every, grading={"rates": [0.1, 0.2, 0.5]})
    run = tmp_path / "x"
    card = (run / "best/README.md").read_text()
    assert json.loads((run / "best/best.json").read_text()) == {"best": 0.5, "best_step": 2}
    shutil.rmtree(run / "checkpoints/step-000002")
    output = train(tmp_path, rotary_model_folder, *every, grading={"rates": [0.1, 0.2, 0.4]})
    assert "resumed after step 1" in output
    assert "0.400 after step 2; best 0.500 at step 2" in output
    assert (run / "best/README.md").read_text() == card
    state = resuming.load_state(run / "checkpoints/last")["state"]
    assert (state["best"], state["best_step"]) == (0.5, 2)


def test_a_run_that_knew_of_warm_starts_goes_on(parts, rotary_model_folder, data):
    """Until then each checkpoint said whether its run had had one, and each config asked for it."""
    file = parts / "x/checkpoints/last/training_state/state.json"
    known = json.loads(file.read_text())
    known["state"]["is_warm"] = False
    known["config"] |= {"warm_start.data": None, "warm_start.num_steps": 50}
    file.write_text(json.dumps(known, indent=1))
    change_json(file.with_name("files.json"), **{"training_state/state.json": file.stat().st_size})
    output = train(parts, rotary_model_folder, *data, THREE)
    assert "resumed after step 2" in output


def test_a_checkpoint_of_another_version_is_named(parts, rotary_model_folder, data):
    file = parts / "x/checkpoints/last/training_state/state.json"
    file.write_text(file.read_text().replace('"best_solved"', '"best_sowed_"'))  # the same size
    status, output = train_forked(parts, rotary_model_folder, *data, THREE)
    assert status == 2 and "another version" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("checkpoints/last/training_state/state.json", '"step": 2', '"step": x'),
        ("checkpoints/last/training_state/state.json", '"step": 2', '"step": []'),
        ("checkpoints/last/training_state/state.json", '"config"', '"konfig"'),
        ("checkpoints/last/training_state/state.json", '"num_ranks": 1', '"num_ranks": ""'),
        ("checkpoints/last/training_state/state.json", '"position": ', '"position": -'),
        ("checkpoints/last/training_state/state.json", '"first": ', '"first": null, "last": '),
        ("best/best.json", '"best": ', '"best": "high", "was": '),
        ("best/best.json", '"best_step": ', '"best_step": 1e999, "was": '),
    ],
)
def test_a_state_edited_by_hand_is_one_line(
    parts, rotary_model_folder, data, capsys, monkeypatch, file, old, new
):
    """Bug: a traceback, or a line without a file's name."""
    monkeypatch.setattr(resuming, "is_whole", lambda folder: True)  # as if it had its old size
    edited = parts / "x" / file
    assert old in edited.read_text()
    edited.write_text(edited.read_text().replace(old, new))
    given = arguments(parts, rotary_model_folder, *data, THREE)
    monkeypatch.setattr(sys, "argv", ["main.py", *given])
    with pytest.raises(SystemExit) as caught:
        main.main()
    (line,) = capsys.readouterr().err.splitlines()
    assert caught.value.code == 2 and line.startswith("error: ") and edited.name in line


# Ending


def test_a_run_whose_best_model_was_lost_ends_with_1(
    tmp_path, rotary_model_folder, data, monkeypatch
):
    """Bug: a worse model that was saved later made it 0, and so did a new start."""
    rates, save_model = [0.1, 0.5, 0.3, 0.5], saving.save_model
    grade_by_text(monkeypatch)

    def fail_at_1(*arguments, **options):
        if run.state.step == 1:
            raise OSError("No space left on device")
        save_model(*arguments, **options)

    for steps, status in ((TWO, 1), (TWO, 1), (THREE, 0)):  # the last one saves as good a model
        with monkeypatch.context() as patch:
            patch.setattr(saving, "save_model", fail_at_1)
            set_rates(patch, rates)
            settings = load_config(
                arguments(tmp_path, rotary_model_folder, *data, steps, "validation.every=1")
            )
            run = load_run(settings)
            assert main.run_training(run) == status
            run.lock.close()


def test_a_hangup_that_nohup_makes_ignored_is_ignored():
    world, before = alone(), signal.signal(signal.SIGHUP, signal.SIG_IGN)
    world.catch_signals()
    signal.raise_signal(signal.SIGHUP)
    assert world.stop_signal == 0
    world.leave()
    assert signal.signal(signal.SIGHUP, before) is signal.SIG_IGN
