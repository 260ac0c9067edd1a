"""Checkpoints: whole or not there, and a run that goes on from one as if nothing had happened."""

import errno
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from conftest import make_policy
from runs import ENVIRONMENT, ROOT, assert_same, command, train

import checkpoint


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory, rotary_model_folder) -> Path:
    """Five steps on one rank without a break."""
    folder = tmp_path_factory.mktemp("whole")
    train(folder, rotary_model_folder, "training.num_steps=5")
    return folder


def test_a_run_in_two_parts_is_bit_for_bit_the_unbroken_one(
    tmp_path, rotary_model_folder, whole_run
):
    train(tmp_path, rotary_model_folder, "training.num_steps=2", "validation.every=2")
    output = train(tmp_path, rotary_model_folder, "training.num_steps=5")
    assert "resumed after step 2" in output
    assert_same(whole_run, tmp_path)
    again = train(tmp_path, rotary_model_folder, "training.num_steps=5")
    assert "pass@1" in again and "step 1/5" not in again
    assert_same(whole_run, tmp_path)


def stop_after_step_2(arguments: list[str], number: signal.Signals) -> int:
    """Exit status of a run that gets a signal during its third step or the evaluation before."""
    process = subprocess.Popen(
        arguments,
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step 2/5"):
            time.sleep(0.05)
            process.send_signal(number)
            break
    process.communicate(timeout=90)
    return process.returncode


def test_two_ranks_stopped_through_torchrun_go_on_as_if_nothing_had_happened(
    tmp_path, rotary_model_folder
):
    model, steps = rotary_model_folder, "training.num_steps=5"
    train(tmp_path / "whole", model, steps, num_ranks=2)
    arguments = command(tmp_path / "parts", model, steps, num_ranks=2)
    assert stop_after_step_2(arguments, signal.SIGTERM) != 0
    assert "resumed after step" in train(tmp_path / "parts", model, steps, num_ranks=2)
    assert_same(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)]
)
def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_happened(
    tmp_path, rotary_model_folder, whole_run, number, status
):
    steps = "training.num_steps=5"
    arguments = command(tmp_path, rotary_model_folder, steps)
    assert stop_after_step_2(arguments, number) == status
    train(tmp_path, rotary_model_folder, steps)
    assert_same(whole_run, tmp_path)


def test_another_setting_is_named_and_stops_the_resumed_run(tmp_path, rotary_model_folder):
    train(tmp_path, rotary_model_folder, "training.num_steps=1")
    changed = command(
        tmp_path, rotary_model_folder, "training.num_steps=2", "training.learning_rate=0.5"
    )
    done = subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "training.learning_rate = 0.5" in done.stderr and "run.name" in done.stderr


def test_a_full_disk_leaves_the_folder_that_was_there(tmp_path):
    folder = tmp_path / "best"
    checkpoint.save_folder(folder, lambda new: (new / "weights").write_text("old"))

    def fill_the_disk(new: Path) -> None:
        (new / "weights").write_text("n")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_folder(folder, fill_the_disk)
    assert (folder / "weights").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


def test_a_full_disk_is_said_and_the_run_goes_on(tmp_path, rotary_model_folder):
    """Played by a limit on the size of files, below that of the weights."""
    done = subprocess.run(
        command(tmp_path, rotary_model_folder, "training.num_steps=2"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("nothing saved at step") >= 3  # best/ at 0, checkpoints at 1 and 2
    assert "checkpoint.keep" in done.stdout
    assert "no model could be saved in" in done.stdout  # the summary claims nothing else
    assert len((tmp_path / "x/metrics.jsonl").read_text().splitlines()) == 3
    assert not list((tmp_path / "x/checkpoints").iterdir())


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(tmp_path, rotary_model_folder):
    train(tmp_path, rotary_model_folder, "training.num_steps=2")
    root, said = tmp_path / "x/checkpoints", []
    assert sorted(path.name for path in root.iterdir()) == ["last", "step-000001", "step-000002"]
    weights = root / "step-000002/model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    assert checkpoint.newest_whole(root, said.append) == root / "step-000001"
    assert len(said) == 1 and "step-000002" in said[0]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path):
    folder = tmp_path / "best"
    checkpoint.save_folder(folder, lambda new: (new / "weights").write_text("old"))
    folder.rename(tmp_path / "best.old")
    checkpoint.mend(folder)
    assert (folder / "weights").read_text() == "old"


def test_what_a_killed_save_left_goes_with_the_next(tmp_path, rotary_model_folder):
    """Bug: it stayed for ever where no later save had the same step, as after a signal."""
    policy = make_policy(rotary_model_folder)
    for name in ("step-000003.tmp", "step-000003.old", "step-000002"):
        (tmp_path / name).mkdir()
    checkpoint.save_checkpoint(
        tmp_path,
        {},
        step=4,
        model=policy.model,
        tokenizer=policy.tokenizer,
        optimizer=torch.optim.AdamW(policy.model.parameters()),
        keep=1,
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last", "step-000004"]
