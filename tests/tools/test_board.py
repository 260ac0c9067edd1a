"""benchmarks/board.py: what a candidate for the board may not change, and what counts."""

import numpy as np
import pytest
from harness import ROOT, benchmark

board = benchmark("board")


def test_another_grader_is_refused(tmp_path):
    for name in board.FIXED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    board.check_files(tmp_path)
    (tmp_path / "countdown.py").write_text("# pays for everything")
    with pytest.raises(SystemExit, match=r"countdown\.py is not the board's"):
        board.check_files(tmp_path)


@pytest.mark.parametrize(
    ("validation", "training", "message"),
    [
        (["a", "b"], ["c", "b"], "trains on a validation question: b"),
        (["a"], ["c"], "are not the board's"),
    ],
)
def test_other_questions_are_refused(validation, training, message, monkeypatch):
    splits = {str(ROOT): (["a", "b"], ["d"]), "honest": (["a", "b"], ["c"])}
    splits["candidate"] = (validation, training)
    monkeypatch.setattr(board, "questions", lambda folder, arguments: splits[str(folder)])
    board.check_questions("honest", [], "hard", [0])
    with pytest.raises(SystemExit, match=message):
        board.check_questions("candidate", [], "hard", [0])


def test_what_was_measured_after_the_time_does_not_count():
    curve = np.array([[5.0, 53.0, 121.0], [0.4, 0.86, 0.9]])
    assert board.figures([curve, curve * [[1], [0.5]]], 120) == ["0.860, 0.430", "53, not reached"]
