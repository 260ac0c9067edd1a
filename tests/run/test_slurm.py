"""launch/train.sbatch, with stand-ins for what a cluster has."""

import os
import signal
import subprocess
import time

import pytest
from harness import ENVIRONMENT, ROOT

SCONTROL = 'case $1 in show) echo localhost ;; *) echo "$@" >> "$SLURM/requeued" ;; esac'
# Each task is a process group, as under Slurm, which signals all of it.
SRUN = """worst=0
for node in 1 2; do setsid "$@" & echo $! >> "$SLURM/tasks"; done
for task in $(jobs -p); do wait "$task" || { s=$?; [ $s -gt $worst ] && worst=$s; }; done
exit $worst"""


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
    for name, text in {"scontrol": SCONTROL, "srun": SRUN, "torchrun": torchrun}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM": tmp_path, "SLURM_NNODES": 2, "SLURM_GPUS_ON_NODE": 1, "SLURM_JOB_ID": 7}
    slurm |= {"SLURM_JOB_NODELIST": "n[1-2]", "PATH": f"{tmp_path}:{ENVIRONMENT['PATH']}"}
    environment, log = ENVIRONMENT | {k: str(v) for k, v in slurm.items()}, tmp_path / "log"
    how = {"env": environment, "stdout": log.open("w"), "stderr": subprocess.STDOUT}
    command = ["bash", "launch/train.sbatch", "run.name=x"]
    job = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **how)
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
