"""Ranks that fail or die, restarts, several nodes: the run ends or goes on, and never hangs."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from conftest import save_random
from runs import (
    ENVIRONMENT,
    ROOT,
    TORCHRUN,
    assert_same,
    finish,
    program,
    start,
    train_forked,
    write_questions,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

from distributed import agree_on_start

LONG, SEVEN = "training.num_steps=100000", "training.num_steps=7"


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    questions = write_questions(tmp_path_factory.mktemp("questions") / "questions.jsonl")
    data = [f"task.train={questions}", f"task.eval={questions}"]
    return [*data, "training.warmup_steps=0", "training.learning_rate=3e-3"]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, rotary_model_folder, settings) -> Path:
    """Seven steps on two ranks without a break."""
    folder = tmp_path_factory.mktemp("two")
    status, output = train_forked(folder, rotary_model_folder, *settings, SEVEN, num_ranks=2)
    assert status == 0, output
    return folder


def torchrun(folder: Path, arguments: list[str]) -> tuple[int, str]:
    """Exit status and stderr; asserts that 60 s after the fault no rank was left, of its own."""
    process = subprocess.Popen(
        [sys.executable, *TORCHRUN, "--nproc-per-node=2", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=110)
        took_s = time.time() - (folder / "struck").stat().st_mtime
        assert took_s < 60
        assert "forcefully exiting" not in errors  # what torchrun does to a rank that hangs
        assert not [file for file in folder.glob("pid-*") if is_running(int(file.read_text()))]
        return process.returncode, errors
    finally:
        end(process.pid, folder)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def end(pid: int, folder: Path) -> None:
    """Kill what may be left of a torchrun: each of its ranks has a session of its own."""
    for group in [pid, *(int(file.read_text()) for file in folder.glob("pid-*"))]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


@pytest.mark.timeout(120)
def test_an_exception_on_one_rank_ends_all_with_its_traceback(
    tmp_path, rotary_model_folder, settings
):
    fault = {"do": "raise", "rank": 1, "calls": 50}
    arguments = program(tmp_path, rotary_model_folder, *settings, LONG, fault=fault)
    status, errors = torchrun(tmp_path, arguments)
    assert status != 0
    assert "RuntimeError: the reward function fails here" in errors
    assert "in sample_trajectories" in errors


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["kill", "kill other"])
def test_a_rank_that_dies_ends_the_others(tmp_path, rotary_model_folder, settings, victim):
    fault = {"do": victim, "saves": 2, "delay_s": 0.1}
    arguments = program(tmp_path, rotary_model_folder, *settings, LONG, fault=fault)
    status, errors = torchrun(tmp_path, arguments)
    assert status != 0
    assert "Signal 9 (SIGKILL)" in errors


@pytest.mark.timeout(60)
def test_a_restart_has_a_name_that_its_ranks_share_and_no_earlier_start_had():
    """Bug: see below. Here each rank in turn is late, and first finds what the last start left."""
    store, names = dist.HashStore(), []
    store.set_timeout(timedelta(seconds=20))
    with ThreadPoolExecutor() as pool:
        for late in (0, 0, 1, 2):
            early = {0, 1, 2} - {late}
            ranks = [pool.submit(agree_on_start, store, rank, 3) for rank in early]
            time.sleep(0.2)
            ranks.append(pool.submit(agree_on_start, store, late, 3))
            (name,) = {rank.result() for rank in ranks}
            names.append(name)
    assert len(set(names)) == 4


@pytest.mark.timeout(240)
def test_torchrun_restarts_a_run_whose_rank_was_killed(
    tmp_path, rotary_model_folder, settings, two_ranks
):
    """Bug: new ranks found the old ones' addresses in torchrun's store; half of the starts hung."""
    fault = {"do": "kill other", "saves": 1, "delay_s": 0.1, "starts": 3}
    arguments = program(tmp_path, rotary_model_folder, *settings, SEVEN, fault=fault)
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    (status,) = finish(start(arguments, *options, log=tmp_path / "log"))
    output = (tmp_path / "log").read_text(errors="replace")
    assert status == 0, output
    assert re.findall(r"failed \(exitcode: (\S+)\)", output) == ["-9"] * 3
    assert "resumed after step" in output
    assert_same(two_ranks, tmp_path)


def train_on_two_nodes(folders: list[Path], model: Path, *overrides: str) -> None:
    """One rank under each of two torchruns, that of the first folder being rank 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=nodes"]
    nodes = []
    for number, folder in enumerate(folders, start=1):
        nodes.append(
            start(
                program(folder / "runs", model, *overrides),
                *options,
                f"--rdzv-endpoint={endpoint}",
                f"--local-addr=127.0.0.{number}",  # ranks go by it
                log=folder / "log",
            )
        )
    statuses = finish(*nodes)
    assert statuses == [0, 0], "".join((folder / "log").read_text() for folder in folders)


@pytest.mark.timeout(240)
def test_two_nodes_without_a_shared_disk_train_and_resume_as_two_ranks_of_one(
    tmp_path, rotary_model_folder, settings, two_ranks
):
    """Only rank 0 has the checkpoint: it decides where to go on, and tells the other."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    train_on_two_nodes(folders, rotary_model_folder, *settings, "training.num_steps=2")
    train_on_two_nodes(folders, rotary_model_folder, *settings, SEVEN)
    assert "resumed after step 2" in (folders[0] / "log").read_text()
    assert_same(two_ranks, folders[0] / "runs")
    assert not (folders[1] / "runs").exists()


@pytest.fixture
def two_bucket_model(tmp_path, tokenizer) -> Path:
    """A random Qwen2 of 5 MB: gradients beyond the first MB are in a second bucket of DDP's."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path / "model")


@pytest.mark.timeout(240)
def test_three_ranks_resume_bit_for_bit(tmp_path, two_bucket_model, settings):
    """DDP orders the gradients anew after the first backward; three terms then add up otherwise."""
    whole, parts, model = tmp_path / "whole", tmp_path / "parts", two_bucket_model
    for folder, num_steps in ((whole, 4), (parts, 2), (parts, 4)):
        steps = f"training.num_steps={num_steps}"
        status, output = train_forked(folder, model, *settings, steps, num_ranks=3)
        assert status == 0, output
    assert "resumed after step 2" in output
    assert_same(whole, parts)
