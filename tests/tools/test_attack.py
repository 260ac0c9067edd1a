"""The tool that tries known tricks on a grader."""

import re
import sys

import pytest
from harness import ROOT

from engine.questions.tasks import built_in_tasks
from tasks import grader_worker
from tools import attack as tool
from tools.attack import SLOW, attack, load

NAIVE = r"""
import mmap, re

MAPPED = mmap.mmap(-1, 3 * 1024**3)  # as CUDA's torch does when it is imported

def grade(completion, answer):
    for text in re.findall("<answer>(.*?)</answer>", completion, re.DOTALL):
        return 1.5 * (answer in text.split() or eval(text) == int(answer))
    return 0.0
"""


def test_each_kind_is_found_in_a_naive_grader(tmp_path, call, monkeypatch, python):
    """It evaluates, it finds the answer among others, its regex is quadratic, and it maps 3 GB.

    Under a limit of 2 GiB in all, a grader that hangs ran out of memory instead."""
    (tmp_path / "naive.py").write_text(NAIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "executable", str(python))  # one that is killed starts again at once
    found = attack("naive:grade")
    examples = {
        "ran code": "<answer>7305190721</answer>",
        "raised": "<answer></answer>",
        "paid": "<answer>461 46 462</answer>",
        "hung": "<answer>99**98**97</answer>",
    }
    assert {kind: found[kind][0] for kind in examples} == examples
    assert found[SLOW][0].count("<answer>") > 100
    assert [len(found[kind]) for kind in ("paid", "hung", SLOW)] == [3, 1, 1]
    assert all("7305190721" in text for text in found["ran code"])
    monkeypatch.setattr(tool, "attack", lambda *_: found)
    status, output, _ = call(tool, "naive:grade")
    assert status == 1 and "\nraised       " in output and "such as '<answer></answer>'" in output


def test_a_grader_that_always_hangs_has_its_table_too(tmp_path, call, monkeypatch, python):
    """Bug: once two minutes were lost in waiting, as on a busy machine, this was a traceback."""
    (tmp_path / "hangs.py").write_text("import time\ndef grade(*texts): time.sleep(60)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(grader_worker, "MAX_LOST_S", 1.0)
    status, output, line = call(tool, "hangs:grade")
    assert status == 1 and re.search("\nhung +1, such as", output)
    assert line.startswith("waited ") and line.count("\n") == 1


def test_a_row_without_a_prompt_is_one_line(tmp_path, call, monkeypatch):
    """Bug: each of the strings was said to make the reward raise."""
    (tmp_path / "mine.py").write_text("def f(completions, **columns): return [0.0]")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"q": "2 + 2?"}\n')
    status, output, line = call(tool, "mine:f", "--data=a.jsonl")
    assert status == 2 and not output
    assert line.count("\n") == 1 and "word task.prompt with {q}" in line
    status, _, line = call(tool, "mine:f", "--data=a.csv")  # bug: a traceback
    assert status == 2 and line.startswith("error: a.csv: cannot be loaded")


def test_a_task_is_attacked_with_the_keys_that_a_run_has():
    for given, paid in (([], 0.0), (["task.prompt_style=tags"], 1.0)):
        grade, gold = load("gsm8k", None, given)
        assert gold == "18" and grade("<answer>18</answer>") == paid


@pytest.mark.parametrize("name", sorted({*built_in_tasks()} - {"guess"}))  # its Environment pays
def test_nothing_is_found_in_our_own_tasks(name, monkeypatch, python):
    monkeypatch.chdir(ROOT)
    if name == "reasoning_gym":
        pytest.importorskip(name, reason="needs a C compiler: pip install '.[gym]'")
    monkeypatch.setattr(sys, "executable", str(python))
    assert not any(attack(name).values())
