"""The animation of one question's answers."""

import json
import sys

import pytest

from tools.think import BAD, GOOD, HOLD_S, LINE_S, MAX_COLUMNS, PLAIN, frames_of, main, read_answers


def sample(step: int, prompt: str, completion: str, *, answer: float = 0.0, **others) -> dict:
    parts = {"format": 1.0, "answer": answer}
    return {
        "step": step,
        "prompt": prompt,
        "completion": completion,
        "reward_parts": parts,
        **others,
    }


ROWS = [
    sample(0, "a", "\n1 + 2 = 3 no\n</think>"),
    sample(0, "b", ""),
    sample(10, "c", "of a training question", split="train"),
    sample(10, "a", "$x_1$ <b>", answer=1.0),
    sample(10, "b", "4"),
]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return tmp_path


def test_a_question_is_followed_through_the_evaluations(run):
    for question, completions in enumerate((["\n1 + 2 = 3 no\n</think>", "$x_1$ <b>"], ["", "4"])):
        answers = read_answers(run, question)
        assert [row["completion"] for row in answers] == completions
        assert [row["step"] for row in answers] == [0, 10]


def test_lines_come_one_by_one_and_the_last_shows_whether_it_is_solved(run):
    assert frames_of(read_answers(run, 0)) == [
        ("before training", ["1 + 2 = 3 no"], PLAIN, LINE_S),
        ("before training: not solved", ["1 + 2 = 3 no", "</think>"], BAD, HOLD_S),
        ("after 10 steps: solved", ["$x_1$ <b>"], GOOD, HOLD_S),
    ]
    first = frames_of(read_answers(run, 1))[0]
    assert first == ("before training: not solved", ["(nothing)"], BAD, HOLD_S)


@pytest.mark.parametrize(("last", "shown"), [(0, [0]), (30, [0, 10, 30]), (40, [0, 20, 40])])
def test_three_moments_are_shown_of_a_long_run(last, shown):
    rows = [sample(step, "a", "4", answer=1.0) for step in range(0, last + 1, 10)]
    moments = [
        f"after {step} steps: solved" if step else "before training: solved" for step in shown
    ]
    assert [moment for moment, *_ in frames_of(rows)] == moments


def test_a_long_line_goes_on_in_the_next():
    """An answer in prose was cut off at the picture's edge."""
    text = "word " * 30
    lines = frames_of([sample(0, "a", text)])[-1][1]
    assert " ".join(lines).split() == text.split() and max(map(len, lines)) <= MAX_COLUMNS


def test_a_gif_is_written_with_its_pictures_and_times(run, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    monkeypatch.setattr(
        sys, "argv", ["think", str(run), "--title", "$1 <b>", "--out", str(run / "x.gif")]
    )
    main()
    with image.open(run / "x.gif") as gif:
        assert gif.n_frames == 3
        durations_s = []
        for i in range(3):
            gif.seek(i)
            durations_s.append(gif.info["duration"] / 1000)
    assert durations_s == [LINE_S, HOLD_S, HOLD_S]


@pytest.mark.parametrize(
    ("text", "question", "reason"),
    [
        ("", 0, "has 0"),
        ("{", 0, "not a run's samples.jsonl"),
        ("[1]", 0, "not a run's samples.jsonl"),
        ('{"prompt": "a"}', 0, "lacks one of"),
        (json.dumps(ROWS[0]), 1, "has 1, the first is 0"),
        (json.dumps(ROWS[0]), -1, "has 1, the first is 0"),
    ],
)
def test_what_cannot_be_drawn_costs_one_line(tmp_path, text, question, reason, capsys, monkeypatch):
    (tmp_path / "samples.jsonl").write_text(text)
    monkeypatch.setattr(sys, "argv", ["think", str(tmp_path), f"--question={question}"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
