"""The curves that are drawn: which runs are one, where they lie, and what their bands are."""

import math
from pathlib import Path

import numpy as np
import pandas
import pytest

from engine.core.files import json_line
from engine.run.fingerprint import OWN_CODE
from tools import plot
from tools.plot import curve_of, group_seeds, make_figure, read_table, read_tables

NAN = math.nan


def write_run(
    file: Path, rewards: list, rates: dict[int, float] | None = None, *, step_s: float = 60
) -> Path:
    """A run of one reward for each step, evaluated in 30 s at `rates`; a .csv is one table."""
    rows, rates = [{"step": 0, "time/eval_s": 30}], rates or {}  # a run always has that column
    for step, reward in enumerate([None, *rewards]):
        if step > 0:
            row = {"step": step, "train/reward": reward, "train/entropy": 0.5}
            rows.append(row | {"time/step_s": step_s})
        if step in rates:
            rate = rates[step]
            row = {"step": step, "eval/pass@1": rate, "eval/best_of_4": rate * 2}
            row |= {"eval/pass@1_low": rate - 0.1, "eval/pass@1_high": rate + 0.2}
            rows.append(row | {"time/eval_s": 30})
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".csv":
        pandas.DataFrame(rows).to_csv(file, index=False)
    else:
        file.write_text("".join(map(json_line, rows)))
    return file


def same(values: np.ndarray, expected: list) -> bool:
    return np.allclose(values, expected, equal_nan=True) and values.shape == np.shape(expected)


def test_a_runs_lines_and_a_table_of_them_are_the_same(tmp_path):
    """A run is named after its folder, and a file of another name after that."""
    measured = [0.3, 0.625, NAN, -0.125], {0: 0.25, 2: 0.5}
    folder = write_run(tmp_path / "a/metrics.jsonl", *measured).parent
    table = read_table(write_run(tmp_path / "a/metrics.csv", *measured))
    lines = read_table(folder)
    assert table.name == lines.name == read_table(folder / "metrics.jsonl").name == "a"
    assert read_table(write_run(tmp_path / "countdown-s1.csv", [1])).name == "countdown-s1"
    assert table.rows[[*lines.rows]].equals(lines.rows)
    assert lines.rows["step"].tolist() == [0, 1, 2, 3, 4]
    assert same(lines.rows["train/reward"].to_numpy(), [NAN, 0.3, 0.625, NAN, -0.125])


def test_a_file_with_a_column_run_has_several_runs_each_with_the_columns_that_it_measured(tmp_path):
    seeds = [write_run(tmp_path / "a-s0.csv", [1, 2], {2: 0.5}), write_run(tmp_path / "b.csv", [3])]
    rows = [pandas.read_csv(file).assign(run=file.stem) for file in seeds]
    pandas.concat(rows).to_csv(tmp_path / "all.csv", index=False)
    tables = read_tables(tmp_path / "all.csv")
    assert [table.name for table in tables] == ["a-s0", "b"]
    for table, alone in zip(tables, map(read_table, seeds), strict=True):
        assert table.rows.equals(alone.rows)


def test_runs_that_differ_in_their_seed_are_one_curve_and_others_keep_their_names(tmp_path):
    names = ["a-sil-s3", "a-s0", "a-s12", "a", "a-s1x"]
    tables = [read_table(write_run(tmp_path / f"{n}.csv", [1])) for n in names]
    groups = {name: [table.name for table in some] for name, some in group_seeds(tables).items()}
    alone = {name: [name] for name in ("a-sil-s3", "a", "a-s1x")}
    assert groups == alone | {"a (2 seeds)": ["a-s0", "a-s12"]}
    with pytest.raises(ValueError, match="two runs are named a: rename"):
        group_seeds([*tables, tables[3]])


def test_runs_of_other_code_are_told_apart(tmp_path):
    """Bug: two rewards were drawn into one panel without a word."""
    tables = []
    for name, code in (("a", "1a2b3c4d"), ("b", "1a2b3c4d"), ("c", "5e6f7a8b")):
        file = write_run(tmp_path / name / "metrics.jsonl", [1])
        head = f"# plain-grpo 1\n# {OWN_CODE}: {code}\ntask: {{}}\n"
        (file.parent / "config.yaml").write_text(head)
        tables.append(read_table(file))
    assert plot.labels_of(group_seeds(tables[:2])) == ["a", "b"]
    assert plot.labels_of(group_seeds(tables[1:])) == ["b, code 1a2b3c", "c, code 5e6f7a"]


SOLO = ("solo", [1, 2, 3, 4], {0: 0.2, 2: 0.4, 4: 0.3}, 60)
BROKEN = ("a", [NAN, 2, math.inf, 4], {}, 60)
SEED_0 = ("a-s0", [1, 5], {0: 0.2, 2: 0.5}, 60)
SEED_1 = ("a-s1", [3, 6], {0: 0.4, 2: 0.8}, 180)
SEED_2 = ("a-s2", [8], {0: 0.3}, 60)
STEPS, MINUTES, MEAN, LOW, HIGH = range(5)
RATE, REWARD = "eval/pass@1", "train/reward"
CURVES = [  # runs, metric, window, which row of the curve, its values
    ([SOLO], RATE, 1, MINUTES, [0.5, 3.0, 5.5]),  # half a minute for each evaluation,
    ([SOLO], REWARD, 1, MINUTES, [1.5, 3, 4, 5.5]),  # also before the first step
    ([SOLO], RATE, 1, LOW, [0.1, 0.3, 0.2]),  # the band of a single run is its interval
    ([SOLO], plot.BEST_OF, 1, MEAN, [0.4, 0.8, 0.6]),
    ([SEED_0, SEED_1], RATE, 1, MEAN, [0.3, 0.65]),
    ([SEED_0, SEED_1], RATE, 1, LOW, [0.2, 0.5]),  # that of seeds begins at the lowest
    ([SEED_1, SEED_2, SEED_0], REWARD, 1, STEPS, [1]),  # it ends with the shortest run
    ([SEED_1, SEED_2, SEED_0], REWARD, 1, HIGH, [8]),
    ([("a", [1, 2, 6, 7], {}, 60)], REWARD, 3, MEAN, [1, 1.5, 3, 5]),  # a mean of the last steps
    ([BROKEN], REWARD, 2, STEPS, [2, 4]),  # what is not finite is left out
    ([BROKEN], REWARD, 2, MEAN, [2, 3]),
]


@pytest.mark.parametrize(("runs", "metric", "window", "row", "expected"), CURVES)
def test_curves_by_hand(tmp_path, runs, metric, window, row, expected):
    tables = [
        read_table(write_run(tmp_path / f"{name}.csv", rewards, rates, step_s=step_s))
        for name, rewards, rates, step_s in runs
    ]
    assert same(curve_of(tables, metric, window=window)[row], expected)


WITHOUT = [("csv", "step,time/step_s,time/eval_s\n", "no rows of a run's metrics")]
WITHOUT += [("csv", "step,time/step_s,time/eval_s\n0,,1\n1,two,\n", "'two'")]
WITHOUT += [("jsonl", '{"step": 0, "time/eval_s": 1}\n{"step": 1\n', "line 2 is not JSON")]


@pytest.mark.parametrize(("kind", "text", "message"), WITHOUT)
def test_a_file_without_curves_is_one_line_that_names_it(tmp_path, kind, text, message):
    file = tmp_path / f"metrics.{kind}"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        read_table(file)
    line = str(caught.value)
    assert line.startswith(f"{file}: ") and message in line and "\n" not in line
    assert line.count(str(file)) == 1


def test_every_metric_of_every_group_is_drawn_once_over_steps_or_over_minutes(tmp_path):
    solo = write_run(tmp_path / "solo.csv", *SOLO[1:3])
    seeds = [write_run(tmp_path / f"a-s{i}.csv", [i - 2, i], {0: 0.1, 2: 0.5}) for i in range(2)]
    groups = group_seeds([read_table(path) for path in [*seeds, solo]])
    figure = make_figure(groups, window=1)
    drawn = [axes.get_lines() for axes in figure.axes]
    assert [len(lines) for lines in drawn] == [2] * 6
    assert all(step % 1 == 0 for step in figure.axes[-1].get_xticks())
    over_minutes = make_figure(groups, window=1, over="minutes").axes[2].get_lines()
    assert same(drawn[2][0].get_ydata(), [-1.5, 0.5])  # of the reward
    assert same(over_minutes[1].get_xdata(), [1.5, 3, 4, 5.5])
    assert figure.axes[2].get_ylim()[0] < -1.5  # a reward below 0 is seen
