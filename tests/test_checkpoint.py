"""Checkpoints: whole or not there, and a run that goes on from one as if nothing had happened."""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import checkpoint

ROOT = Path(__file__).resolve().parent.parent
SHORT_RUN = (
    "--config",
    os.devnull,
    "training.num_samples_per_step=2",
    "training.k_best_of_n=[8, 8]",
    "training.max_new_gen_tokens=16",
    "training.learning_rate=1e-3",
    "validation.num_examples=4",
    "validation.best_of_n=2",
    "validation.pass_k=[1, 2]",
    "validation.every=2",
    "checkpoint.every=1",
)


def command(folder: Path, model: Path, *overrides: str, num_ranks: int = 1) -> list[str]:
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    settings = [f"model.name={model}", f"run.dir={folder}", "run.name=x", *overrides]
    return [*launcher, "main.py", *SHORT_RUN, *settings]


def train(folder: Path, model: Path, *overrides: str, num_ranks: int = 1) -> str:
    """Output of a run that ends well."""
    done = subprocess.run(
        command(folder, model, *overrides, num_ranks=num_ranks),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def what_is_left(folder: Path) -> tuple[dict, list[dict], str]:
    """Weights, metrics but times, samples: what a resumed run must have in common."""
    model = AutoModelForCausalLM.from_pretrained(folder / "x/checkpoints/last")
    rows = [json.loads(line) for line in (folder / "x/metrics.jsonl").read_text().splitlines()]
    rows = [
        {name: row[name] for name in row if not name.startswith(("time/", "perf/"))} for row in rows
    ]
    return model.state_dict(), rows, (folder / "x/samples.jsonl").read_text()


def assert_same(one: Path, other: Path) -> None:
    weights, rows, samples = what_is_left(one)
    other_weights, other_rows, other_samples = what_is_left(other)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert rows == other_rows
    assert samples == other_samples
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


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
        env=os.environ | {"OMP_NUM_THREADS": "1"},
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
