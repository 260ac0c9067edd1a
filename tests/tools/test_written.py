"""Functions that a reader wrote: right in any form, wrong for a reason that is said."""

import re
from pathlib import Path

import pytest
import yaml

from tools import written
from tools.exercise import ANSWERS, changed, read_changes

FUNCTIONS = yaml.safe_load(Path(__file__).with_name("written.yaml").read_text())
WRONG = [(i, how) for i, its in enumerate(FUNCTIONS.values(), 1) for how in its["wrong"]]


@pytest.fixture
def cut() -> str:
    texts, _, _ = changed(read_changes(ANSWERS / "cut.txt"))
    return texts["plain.py"]


def fill(folder: Path, cut: str, replaced: tuple[str, str] = ("", "")) -> None:
    for i, its in enumerate(FUNCTIONS.values(), start=1):
        body = its["right"].replace(*replaced).replace("\n", "\n    ")
        cut = cut.replace(f"raise NotImplementedError  # docs/exercises/write-{i}.md", body)
    (folder / "plain.py").write_text(cut)


def test_nothing_of_the_answers_is_left(cut):
    assert cut.count("raise NotImplementedError") == 6
    answers = "length limit|all ranks' rows|log softmax|no_sync|searchsorted|end token too|cumsum"
    assert not re.search(answers, cut)


@pytest.mark.parametrize(("number", "how"), WRONG)
def test_a_wrong_function_fails_where_it_is_wrong(tmp_path, cut, capfd, monkeypatch, number, how):
    monkeypatch.setattr(written, "TIME_S", 2 if how == "for ever" else written.TIME_S)
    where, right, wrong = [*FUNCTIONS.values()][number - 1]["wrong"][how]
    fill(tmp_path, cut, (right, wrong))
    assert not written.check(tmp_path, number)
    situation, _, _ = capfd.readouterr().out.partition("given")
    assert situation.startswith(f"{number}. ") and where in situation


@pytest.mark.slow
def test_right_functions_of_another_form_train_as_ours(tmp_path, cut, capfd, monkeypatch):
    few = "training.num_samples_per_step=2 training.k_best_of_n=[4,4] training.max_new_gen_tokens="
    monkeypatch.setattr(written, "SETTINGS", f"{written.SETTINGS} {few}32")
    fill(tmp_path, cut)
    assert written.check(tmp_path, None)
    printed = capfd.readouterr().out
    assert printed.count("right in") == 6 and ("bit for bit" in printed or "norm" in printed)
