"""Signals that end a run, and what the processes that a reward starts make of them."""

import subprocess
import sys

import pytest
from harness import ENVIRONMENT, ROOT

START = """
import multiprocessing, os, signal, subprocess, sys, time
from engine.core import signals
from engine.core.signals import SignalWatch

watch = SignalWatch(is_main=True)
watch.start()

def send(*numbers, seconds_between=0.0):
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(seconds_between)

def first():
    watch.read(watch.pipe[0])
    return watch.first
"""

# What a process does once it catches signals, and its exit status
PROGRAMS = {
    "a forked child is terminated": (
        """
fork = multiprocessing.get_context("fork")
for _ in range(20):  # right behind the fork too, before the child has its handlers back
    child = fork.Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    assert child.exitcode == -signal.SIGTERM
assert first() == 0""",
        0,
    ),
    "a child, forked or executed, lives through a Ctrl-C": (
        """
executed = subprocess.Popen(["sleep", "0.3"])
forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.3,))
forked.start()
for child in (executed, forked):
    os.kill(child.pid, signal.SIGINT)
forked.join()
assert executed.wait() == forked.exitcode == 0""",
        0,
    ),
    "two SIGTERM change nothing": (
        "send(signal.SIGTERM, signal.SIGTERM, seconds_between=1.1)\nassert first() == 15",
        0,
    ),
    "one Ctrl-C that torchrun passes on is one": (
        "send(signal.SIGINT, signal.SIGINT, seconds_between=0.1)\nassert first() == signal.SIGINT",
        0,
    ),
    "a second Ctrl-C ends it": (
        "send(signal.SIGINT, signal.SIGINT, seconds_between=1.1)\ntime.sleep(5)",
        130,
    ),
    "a reward that does not return after a signal is given up": (
        """
signals.GRACE_S = 0.5
with watch.patience():
    send(signal.SIGTERM)
    time.sleep(30)""",
        143,
    ),
    "once it is left a signal ends it": ("watch.stop()\nsend(signal.SIGTERM)\ntime.sleep(5)", -15),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_signals(name):
    program, status = PROGRAMS[name]
    result = subprocess.run(
        [sys.executable, "-c", START + program],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == status, result.stderr
