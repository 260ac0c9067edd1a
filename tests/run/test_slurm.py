"""launch/train.sbatch, with stand-ins for what a cluster has."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from harness import ENVIRONMENT, ROOT

SCONTROL = 'case $1 in show) echo localhost ;; *) echo "$@" >> "$SLURM/requeued" ;; esac'
# Each task is a process group, as under Slurm, which signals all of it.
SRUN = """worst=0
for node in 1 2; do setsid "$@" & echo $! >> "$SLURM/tasks"; done
for task in $(jobs -p); do wait "$task" || { s=$?; [ $s -gt $worst ] && worst=$s; }; done
exit $worst"""


def submit(folder: Path, *given: str, torchrun: str) -> subprocess.Popen:
    """The batch script as Slurm starts it on the first node; `torchrun` is a stand-in's shell."""
    programs = {"scontrol": SCONTROL, "srun": SRUN, "torchrun": torchrun}
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    slurm = {"SLURM": folder, "SLURM_NNODES": 2, "SLURM_GPUS_ON_NODE": 1}
    slurm |= {"SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "n[1-2]"}
    environment = ENVIRONMENT | {name: str(value) for name, value in slurm.items()}
    return subprocess.Popen(
        ["bash", "launch/train.sbatch", *given],
        cwd=ROOT,
        env=environment | {"PATH": f"{folder}:{environment['PATH']}"},
        stdout=(folder / "log").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    ("torchrun", "killed", "status", "requeued"),
    [
        ('echo "$@"; exit 1', None, 1, False),  # it failed
        ("echo there; trap 'exit 1' TERM; sleep 60 & wait", "tasks", 143, True),
        ("echo there; trap 'exit 0' TERM; sleep 60 & wait", "tasks", 0, False),  # just finished
        ("echo there; trap 'exit 1' TERM; sleep 60 & wait", "all", -signal.SIGTERM, False),
    ],
)
def test_only_a_stopped_job_is_queued_again(torchrun, killed, status, requeued, tmp_path):
    """`scancel` signals the batch script as well, and the job has ended for good."""
    job, log = submit(tmp_path, "run.name=x", torchrun=torchrun), tmp_path / "log"
    while killed and log.read_text().count("there") < 2:
        assert job.poll() is None, "it has ended before"
        time.sleep(0.05)
    if killed == "all":
        os.kill(job.pid, signal.SIGTERM)
    for task in (tmp_path / "tasks").read_text().split() if killed else []:
        os.killpg(int(task), signal.SIGTERM)
    assert job.wait(30) == status
    assert (tmp_path / "requeued").exists() == requeued
    said = log.read_text()
    assert killed or ("--nnodes=2" in said and said.count("main.py run.name=x") == 2)
