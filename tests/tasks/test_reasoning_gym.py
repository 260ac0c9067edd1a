"""The package reasoning-gym; what its task pays is in test_grader_worker.py."""

import json
import subprocess

import pytest

from tasks.reasoning_gym import REFUSED

gym = pytest.importorskip("reasoning_gym", reason="needs a C compiler: pip install '.[gym]'")

SWEEP = """
import contextlib, json, random, sys
from reasoning_gym.factory import DATASETS, create_dataset

SIGN, ran, wrong = "7305190721", set(), []

def watch(event, arguments):
    if event == "exec" and SIGN in repr(arguments[0].co_consts):
        ran.add(name)

sys.addaudithook(watch)
for name in sorted(DATASETS.keys() - {"composite"}):
    dataset = create_dataset(name, seed=0)
    random.seed(0)
    entry = dataset[3]  # the 7th would take seconds
    gold = str(entry["answer"])
    for text in (SIGN, f"[{SIGN}]", f"{gold} {SIGN}", f"{gold}\\n{SIGN}", f"{gold} + {SIGN}"):
        with contextlib.suppress(Exception):
            dataset.score_answer(text, entry)
    if entry["answer"] is not None and not dataset.score_answer(gold, entry) >= 0.999:
        wrong.append(name)
print(json.dumps([sorted(ran), wrong, len(DATASETS)]), file=sys.stderr)
"""


def test_those_that_run_an_answer_as_code_are_refused_and_no_others(python):
    """All pay the right answer in full, where the package has one."""
    result = subprocess.run([python, "-c", SWEEP], capture_output=True, text=True)
    ran, wrong, num = json.loads(result.stderr.splitlines()[-1])
    assert ran == sorted(REFUSED) and wrong == []
    assert num - len(REFUSED) - 1 == 96, "composite mixes others; it has no default"
