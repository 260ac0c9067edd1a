"""Signals that end a run, and what the processes that a reward starts make of them."""

import subprocess
import sys

import pytest
from harness import ENVIRONMENT, ROOT

START = """
import multiprocessing, os, signal, subprocess, sys, time
from engine.core.signals import SignalWatch

watch = SignalWatch(is_main=True)
watch.start()

def send(*numbers, seconds_between=0.0):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(seconds_between)

def first():
    while watch.first == 0:  # a thread notes it
        time.sleep(0.01)
    return watch.first
"""

# From another process, as a terminal does: this one will be deep in a library
SEND_TWO = """
kill = f"kill -INT {os.getpid()}"
subprocess.Popen(["sh", "-c", f"sleep 0.3; {kill}; sleep 1.1; {kill}"])"""
# What a process does once it catches signals
PROGRAMS = {
    "a forked child is terminated": """
fork = multiprocessing.get_context("fork")
for _ in range(20):  # right behind the fork too, before the child has its handlers back
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
assert watch.first == 0""",
    "a child, forked or executed, lives through a Ctrl-C": """
executed = subprocess.Popen(["sleep", "0.3"])
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.3,))
forked.start()
for child in (executed, forked):
    os.kill(child.pid, signal.SIGINT)
forked.join()
assert executed.wait() == forked.exitcode == 0""",
    "two SIGTERM change nothing": """
send(signal.SIGTERM, signal.SIGTERM, seconds_between=1.1)
assert first() == signal.SIGTERM""",
    "one Ctrl-C that torchrun passes on is one": """
send(signal.SIGINT, signal.SIGINT, seconds_between=0.1)
assert first() == signal.SIGINT""",
    "a second Ctrl-C ends it in a loop of C code": f"""{SEND_TWO}
import hashlib
hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)""",
    "a second Ctrl-C ends it in a sum whose partner is away": f"""
import threading, torch, torch.distributed as dist
store, groups = dist.HashStore(), {{}}
def join(rank): groups[rank] = dist.ProcessGroupGloo(store, rank, 2)
threading.Thread(target=join, args=(1,)).start()
join(0){SEND_TWO}
groups[0].allreduce([torch.ones(1)]).wait()""",
    "once it is left a signal ends it": "watch.stop()\nsend(signal.SIGTERM)\ntime.sleep(5)",
}
STATUSES = {  # of those that do not end by themselves
    "a second Ctrl-C ends it in a loop of C code": 130,
    "a second Ctrl-C ends it in a sum whose partner is away": 130,
    "once it is left a signal ends it": -15,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_signals(name, python):
    program = PROGRAMS[name]
    how = {"cwd": ROOT, "env": ENVIRONMENT, "capture_output": True, "text": True, "timeout": 60}
    # The quick python has an earlier import's hooks around forks: it serves where torch is needed.
    interpreter = python if "torch.distributed" in program else sys.executable
    result = subprocess.run([interpreter, "-c", START + program], **how)
    assert result.returncode == STATUSES.get(name, 0), result.stderr
