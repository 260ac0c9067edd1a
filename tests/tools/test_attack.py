"""The tool that tries known tricks on a grader."""

import runpy
import sys

import pytest
from harness import ROOT

from engine.questions.tasks import built_in_tasks
from tools.attack import SLOW, attack

NAIVE = r"""
import re

def grade(completion, answer):
    for text in re.findall("<answer>(.*?)</answer>", completion, re.DOTALL):
        return float(answer in text.split() or eval(text) == int(answer))
    return 0.0

def harmless(completion, answer):
    return completion.strip() == answer

def lethal(completion, answer):
    if completion.count("(") > 1_000:
        raise SystemExit
    return 0
"""


@pytest.fixture
def naive(tmp_path, monkeypatch):
    (tmp_path / "naive.py").write_text(NAIVE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delitem(sys.modules, "naive", raising=False)


def test_each_kind_is_found_in_a_naive_grader(naive):
    """It evaluates, it finds the answer among others, and its regex is quadratic."""
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


@pytest.mark.parametrize(("name", "status"), [("lethal", 1), ("harmless", 0)])
def test_the_table_and_the_exit_status_say_whether_anything_was_found(
    name, status, naive, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "argv", ["attack.py", f"naive:{name}"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(f"{ROOT}/tools/attack.py", run_name="__main__")
    table = capsys.readouterr().out.splitlines()
    assert ended.value.code == status
    assert len(table) == 5 and sum(not line.endswith(" nothing") for line in table) == status
    assert table[1].startswith("raised       ") and ("such as '((((" in table[1]) == status


@pytest.mark.parametrize("name", sorted({*built_in_tasks()} - {"guess"}))  # its Environment pays
def test_nothing_is_found_in_our_own_tasks(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    if name == "reasoning_gym":
        pytest.importorskip("reasoning_gym", reason="needs a C compiler: pip install '.[gym]'")
    assert not any(attack(name).values())
