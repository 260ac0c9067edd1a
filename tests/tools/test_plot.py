"""The curves that are drawn: which runs are one, where they lie, and what their bands are."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.core.files import json_line
from tools import plot
from tools.plot import PANELS, curve_of, group_seeds, main, make_figure, read_table

COLUMNS = (
    "step,train/reward,train/entropy,eval/pass@1,eval/pass@1_low,eval/pass@1_high,eval/best_of_4,"
    "time/eval_s,time/step_s"
)


def write_run(
    file: Path, rewards: list, rates: dict[int, float] | None = None, *, step_s: float = 60
) -> Path:
    """A run of one reward for each step, evaluated in 30 s at the steps in `rates`.

    Where the file is a .jsonl, its lines are as a run writes them: a metric that a row lacks is not
    there, and one that is not finite is null.
    """
    lines, rates = [COLUMNS], rates or {}
    for step, reward in enumerate(["", *rewards]):
        if step:
            lines.append(f"{step},{reward},0.5,,,,,,{step_s}")
        if step in rates:
            rate = rates[step]
            lines.append(f"{step},,,{rate},{rate - 0.1},{rate + 0.2},{rate * 2},30,")
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".jsonl":
        rows = [zip(COLUMNS.split(","), line.split(","), strict=True) for line in lines[1:]]
        rows = [{name: float(cell) for name, cell in row if cell} for row in rows]
        lines = [json_line(row).rstrip() for row in rows]
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / "solo.csv", [1, 2, 3, 4], {0: 0.2, 2: 0.4, 4: 0.3})


def same(values: np.ndarray, expected: list[float]) -> bool:
    return values.tolist() == pytest.approx(expected, nan_ok=True)


# What there is to draw


def test_a_folder_and_a_file_of_any_name_are_runs(tmp_path):
    folder = write_run(tmp_path / "runs/countdown-s0/metrics.jsonl", [1], {0: 0.2}).parent
    file = write_run(tmp_path / "countdown-s1.csv", [1])
    names = [read_table(path).name for path in (folder, folder / "metrics.jsonl", file)]
    assert names == ["countdown-s0", "countdown-s0", "countdown-s1"]


def test_a_runs_lines_and_a_table_of_them_are_the_same(tmp_path):
    """Also the metrics.csv that an older version left in a run's folder, beside its lines."""
    measured = [0.3, 0.625, "nan", -0.125], {0: 0.25, 2: 0.5}
    folder = write_run(tmp_path / "a/metrics.jsonl", *measured).parent
    table = read_table(write_run(tmp_path / "a/metrics.csv", *measured))
    lines = read_table(folder)
    assert table.name == lines.name == "a"
    assert table.rows[[*lines.rows]].equals(lines.rows)
    assert lines.rows["step"].tolist() == [0, 1, 2, 3, 4]
    assert same(lines.rows["train/reward"].to_numpy(), [math.nan, 0.3, 0.625, math.nan, -0.125])
    assert same(lines.rows["eval/pass@1"].to_numpy(), [0.25, math.nan, 0.5, math.nan, math.nan])


def test_runs_that_differ_in_their_seed_are_one_curve_and_others_keep_their_names(tmp_path):
    names = ["a-sil-s3", "a-s0", "a-s12", "a", "b-s1", "a-s1x"]
    groups = group_seeds([read_table(write_run(tmp_path / f"{n}.csv", [1])) for n in names])
    assert {name: [table.name for table in tables] for name, tables in groups.items()} == {
        "a-sil-s3": ["a-sil-s3"],
        "a (2 seeds)": ["a-s0", "a-s12"],
        "a": ["a"],
        "b-s1": ["b-s1"],
        "a-s1x": ["a-s1x"],
    }


def test_minutes_add_up_steps_and_evaluations(run):
    """Half a minute for each evaluation, the one before the first step too, one for each step."""
    steps, minutes, *_ = curve_of([read_table(run)], "eval/pass@1", window=1)
    assert same(steps, [0, 2, 4]) and same(minutes, [0.5, 3.0, 5.5])
    assert same(curve_of([read_table(run)], "train/reward", window=1)[1], [1.5, 3, 4, 5.5])


def test_the_band_of_a_single_run_is_the_interval_of_its_pass_at_1(run):
    *_, mean, low, high = curve_of([read_table(run)], "eval/pass@1", window=1)
    assert same(mean, [0.2, 0.4, 0.3])
    assert same(low, [0.1, 0.3, 0.2]) and same(high, [0.4, 0.6, 0.5])
    *_, mean, low, high = curve_of([read_table(run)], plot.BEST_OF, window=1)
    assert same(mean, [0.4, 0.8, 0.6])
    assert same(low, [math.nan] * 3) and same(high, [math.nan] * 3)


def test_the_band_of_several_seeds_is_from_the_lowest_to_the_highest(tmp_path):
    """Minutes are a mean too. The third seed has come to step 1 only, so the curve ends there."""
    first = read_table(write_run(tmp_path / "a-s0.csv", [1, 5], {0: 0.2, 2: 0.5}))
    second = read_table(write_run(tmp_path / "a-s1.csv", [3, 6], {0: 0.4, 2: 0.8}, step_s=180))
    third = read_table(write_run(tmp_path / "a-s2.csv", [8], {0: 0.3}))
    steps, minutes, mean, low, high = curve_of([first, second], "eval/pass@1", window=1)
    assert same(steps, [0, 2]) and same(minutes, [0.5, (3.0 + 7.0) / 2])
    assert same(mean, [0.3, 0.65]) and same(low, [0.2, 0.5]) and same(high, [0.4, 0.8])
    steps, _, mean, low, high = curve_of([second, third, first], "train/reward", window=1)
    assert same(steps, [1]) and same(mean, [4]) and same(low, [1]) and same(high, [8])


@pytest.mark.parametrize(
    ("rewards", "window", "steps", "means"),
    [
        ([1, 2, 6, 7], 1, [1, 2, 3, 4], [1, 2, 6, 7]),
        ([1, 2, 6, 7], 3, [1, 2, 3, 4], [1, 1.5, 3, 5]),
        (["nan", 2, "inf", 4], 2, [2, 4], [2, 3]),  # what is not finite is left out
    ],
)
def test_training_curves_are_the_mean_of_the_last_steps(tmp_path, rewards, window, steps, means):
    table = read_table(write_run(tmp_path / "a.csv", rewards))
    curve = curve_of([table], "train/reward", window=window)
    assert same(curve[0], steps) and same(curve[2], means)


def test_a_metric_that_was_never_measured_has_no_points(tmp_path):
    table = read_table(write_run(tmp_path / "a.csv", [1, 2]))
    for metric in ("eval/pass@1", "train/no_such_metric"):
        assert curve_of([table], metric, window=5).shape == (5, 0)


@pytest.mark.parametrize(
    ("name", "half"), [("a.csv", "5,0.1"), ("metrics.jsonl", '{"step": 5, "t')]
)
def test_a_row_that_is_being_written_waits(tmp_path, name, half):
    run = write_run(tmp_path / name, [1, 2], {0: 0.2})
    whole = read_table(run).rows
    run.write_text(run.read_text() + half)
    assert read_table(run).rows.equals(whole)


# Mistakes


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("csv", "", "No columns to parse"),
        ("csv", "step,time/eval_s\n0,1\n", "no rows of a run's metrics"),
        ("csv", "step,time/step_s,time/eval_s\n", "no rows of a run's metrics"),
        ("csv", "step,time/step_s,time/eval_s\n0,,1\n1,two,\n", "'two'"),
        ("csv", "step,time/step_s,time/eval_s\n0,,1\n1,2,3,4\n", "Expected 3 fields in line 3"),
        ("jsonl", "", "no rows of a run's metrics"),
        ("jsonl", '{"step": 0, "time/eval_s": 1}\n', "no rows of a run's metrics"),
        ("jsonl", '{"step": null, "time/eval_s": 1, "time/step_s": 1}\n', "no rows of a run's"),
        ("jsonl", '{"step": 0, "time/eval_s": 1}\n{"step": 1\n', "line 2 is not JSON"),
        ("jsonl", '{"step": 0, "time/eval_s": "two"}\n', "'two'"),
        ("jsonl", '{"step": 0, "time/eval_s": {}}\n', "not 'dict'"),
        ("jsonl", f'{{"step": 0, "time/eval_s": 1{"0" * 400}}}\n', "int too large"),
    ],
)
def test_a_file_without_curves_is_one_line_that_names_it(tmp_path, kind, text, message):
    file = tmp_path / f"metrics.{kind}"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_table(file)
    line = str(caught.value)
    assert line.startswith(f"{file}: ") and message in line and "\n" not in line
    assert line.count(str(file)) == 1


def test_two_runs_of_one_name_are_refused(run):
    with pytest.raises(ValueError, match="two runs are named solo: rename"):
        group_seeds([read_table(run), read_table(run)])


@pytest.mark.parametrize(
    ("arguments", "message"), [(["none.csv"], "none.csv"), (["--smooth=0", "a"], "at least 1")]
)
def test_a_mistake_on_the_command_line_is_one_line(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plot.py", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    line = capsys.readouterr().err
    assert caught.value.code == 2
    assert line.startswith("error: ") and message in line and line.count("\n") == 1


# The files


def test_the_same_metrics_give_the_same_two_files(run, tmp_path, monkeypatch):
    """A dot in the name is no suffix, folders are made, and a tilde is the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    contents = []
    for out in ("one", "two"):
        command = ["plot.py", f"~/{run.name}", "--out", f"~/{out}/v1.5", "--panels", "train/reward"]
        monkeypatch.setattr(sys, "argv", command)
        plot.main()
        contents.append([(tmp_path / out / f"v1.5.{kind}").read_bytes() for kind in ("png", "svg")])
    assert contents[0] == contents[1] and contents[0][0].startswith(b"\x89PNG")
    assert contents[0][1].startswith(b"<?xml")


def test_every_metric_of_every_group_is_drawn_once_over_steps_or_over_minutes(run, tmp_path):
    seeds = [write_run(tmp_path / f"a-s{i}.csv", [i - 2, i], {0: 0.1, 2: 0.5}) for i in range(2)]
    groups = group_seeds([read_table(path) for path in [*seeds, run]])
    figure = make_figure(groups, window=1)
    drawn = [axes.get_lines() for axes in figure.axes]
    assert [len(lines) for lines in drawn] == [2] * 6
    over_steps = drawn[2]  # of the reward
    over_minutes = make_figure(groups, window=1, over="minutes").axes[2].get_lines()
    assert same(over_steps[0].get_ydata(), [-1.5, 0.5])
    assert same(over_steps[1].get_xdata(), [1, 2, 3, 4])
    assert same(over_minutes[1].get_xdata(), [1.5, 3, 4, 5.5])
    assert figure.axes[2].get_ylim()[0] < -1.5  # a reward below 0 is seen
    assert len(make_figure(groups, window=1, panels=PANELS[:3]).axes) == 3


def test_the_pictures_lie_in_the_runs_folder(tmp_path, monkeypatch, capsys):
    """Of several runs in the first one's; beside a file that has another name."""
    folder = write_run(tmp_path / "a/metrics.jsonl", [1], {0: 0.2}).parent
    file = write_run(tmp_path / "b/c.csv", [1])
    for paths, place in (([folder, file], folder), ([file], file.parent)):
        monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, paths)])
        main()
        written = [place / f"curves.{kind}" for kind in ("png", "svg")]
        assert capsys.readouterr().out == f"written: {written[0]}, {written[1]}\n"
        assert all(file.is_file() for file in written)
