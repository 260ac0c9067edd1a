"""launch/train.sbatch, with stand-ins for what a cluster has."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from harness import ENVIRONMENT, ROOT, arguments, read_jsonl

SCONTROL = 'case $1 in show) echo localhost ;; *) echo "$@" >> "$SLURM/requeued" ;; esac'
# Each task is a process group, as under Slurm, which signals all of it.
SRUN = """worst=0
for node in 1 2; do setsid "$@" & echo $! >> "$SLURM/tasks"; done
for task in $(jobs -p); do wait "$task" || { s=$?; [ $s -gt $worst ] && worst=$s; }; done
exit $worst"""


def submit(folder: Path, *given: str, torchrun: str) -> subprocess.Popen:
    """The batch script as Slurm starts it on the first node; `torchrun` is a stand-in's shell."""
    programs = {"scontrol": SCONTROL, "srun": SRUN}
    programs["torchrun"] = torchrun
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    slurm = {"SLURM": folder, "SLURM_NNODES": 2, "SLURM_GPUS_ON_NODE": 1, "RENDEZVOUS_PORT": port}
    slurm |= {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "n[1-2]", "HF_HUB_OFFLINE": 1}
    environment = ENVIRONMENT | {name: str(value) for name, value in slurm.items()}
    return subprocess.Popen(
        ["bash", "launch/train.sbatch", *given],
        cwd=ROOT,
        env=environment | {"PATH": f"{folder}:{environment['PATH']}"},
        stdout=(folder / "log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def wait_for(condition, job: subprocess.Popen) -> None:
    while not condition():
        assert job.poll() is None, "it has ended before"
        time.sleep(0.05)


def terminate_tasks(folder: Path) -> None:
    for task in (folder / "tasks").read_text().split():
        os.killpg(int(task), signal.SIGTERM)


def tasks_are_there(folder: Path, mark: str) -> bool:
    return (folder / "log").read_text().count(mark) == 2


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_at_its_limit_saves_and_is_queued_again(python, tmp_path, rotary_model_folder):
    """Two nodes of one rank each. At the limit, and where it is preempted, tasks get SIGTERM."""
    steps = tmp_path / "x" / "metrics.jsonl"
    given = arguments(tmp_path, rotary_model_folder, "training.num_steps=100000")
    torchrun = f'exec {python.parent}/torchrun "$@"'
    job = submit(tmp_path, *given, torchrun=torchrun)
    wait_for(lambda: steps.exists() and len(read_jsonl(steps)) > 1, job)
    terminate_tasks(tmp_path)
    output = (tmp_path / "log").read_text
    assert job.wait(100) == 143, output()
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert "all is saved" in output()


@pytest.mark.parametrize(
    ("torchrun", "killed", "status", "requeued"),
    [
        ("exit 1", None, 1, False),  # it failed
        ("echo there; trap 'exit 1' TERM; sleep 60 & wait", "tasks", 143, True),
        ("echo there; trap 'exit 0' TERM; sleep 60 & wait", "tasks", 0, False),  # just finished
        ("echo there; trap 'exit 1' TERM; sleep 60 & wait", "all", -signal.SIGTERM, False),
    ],
)
def test_only_a_stopped_job_is_queued_again(torchrun, killed, status, requeued, tmp_path):
    """`scancel` signals the batch script as well, and the job has ended for good."""
    job = submit(tmp_path, torchrun=torchrun)
    if killed:
        wait_for(lambda: tasks_are_there(tmp_path, "there"), job)
        if killed == "all":
            os.kill(job.pid, signal.SIGTERM)
        terminate_tasks(tmp_path)
    assert job.wait(30) == status
    assert (tmp_path / "requeued").exists() == requeued
