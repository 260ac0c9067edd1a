"""Draw the curves of runs: how well they solve and how they train, over steps or over minutes.

    python -m tools.plot runs/a runs/b               # writes runs/a/curves.png and curves.svg
    python -m tools.plot runs/a runs/b --over minutes
    python -m tools.plot results/countdown-tiny-*.csv --out runs/curves --smooth 1
    python -m tools.plot runs/a --panels eval/pass@1 train/completion_tokens

Give each run as its folder, or as a .csv file that has a row a step; one with a column
`run`, such as those in results/, has several runs. The pictures lie beside the first one's metrics,
unless --out says otherwise. Runs whose names differ only in the seed at the end (-s0, -s1) share a
curve: the mean over the seeds, in a band from the lowest to the highest seed, up to the end of the
shortest run. The band of a single run is the 95% interval of its pass@1. Minutes are those of steps
and evaluations, without loading and saving.
"""

import argparse
import collections
import functools
import io
import json
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from engine.core.files import check_replaceable, read_lines
from engine.core.packages import import_package
from engine.run.mistakes import mistakes_cost_one_line

BEST_OF = "eval/best_of_"  # the column's name goes on with the number of samples
PANELS = (  # metric, title, label of the y-axis
    ("eval/pass@1", "pass@1", "share solved"),
    (BEST_OF, "best of {n}", "share of questions"),
    ("train/reward", "reward", "mean per completion"),
    ("train/completion_tokens", "length of completions", "tokens"),
    ("train/entropy", "entropy", "nats per token"),
    ("train/zero_advantage_frac", "zero-advantage groups", "share of groups"),
)
REWARD = ("eval/reward", "reward in evaluations", "mean per completion")
# Okabe and Ito's colours, which the colour-blind can tell apart; dashes and markers for print
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "^", "D", "v")
STYLE = Path(__file__).with_name("plot.mplstyle")


def panels_of(run: Path) -> Sequence:
    """The panels of a run; first comes the reward of its evaluations if that chooses its best/."""
    best = run / "best" / "best.json"
    try:
        chosen_by = json.loads(best.read_text()).get("best_by") if best.is_file() else None
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{best}: is no object in JSON: {error}") from error
    return (REWARD, *PANELS) if chosen_by == "reward" else PANELS


@dataclass
class Table:
    """A run's name and its metrics, a row a step, with NaN for what was not measured there."""

    name: str
    rows: pandas.DataFrame
    code: str = ""  # the hash of the task's code, from the head of the run's config.yaml


def read_table(path: Path, lines: list[dict] | None = None) -> Table:
    """Read a run's folder or file; raises OSError or ValueError with the file's name.

    `lines` are those of metrics.jsonl, if they have been read before.
    """
    (table,) = read_tables(path, lines)
    return table


def read_tables(path: Path, lines: list[dict] | None = None) -> list[Table]:
    """Read a run's folder, or the runs of a .csv file, by its column `run`; raises as above."""
    file = path if path.suffix in (".csv", ".jsonl") else path / "metrics.jsonl"
    if not file.is_file():
        places = [path, path.parent, Path("runs")]
        runs = [str(found.parent) for place in places for found in place.glob("*/metrics.jsonl")]
        there = ", ".join(sorted({*runs})) or "none here"
        raise ValueError(f"{file}: no such file; the runs are {there}")
    if file.suffix == ".jsonl":
        lines = read_lines(file) if lines is None else lines
    try:
        if lines is None:
            text = file.read_text(encoding="utf-8", errors="replace")
            whole = text[: text.rfind("\n") + 1]  # without a half-written last line
            rows = pandas.read_csv(
                io.StringIO(whole), dtype=collections.defaultdict(lambda: float, run=str)
            )
        else:
            rows = pandas.DataFrame(lines, dtype=float)
    except (ValueError, TypeError, OverflowError) as error:  # something else than numbers
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from None
    if not {"step", "time/step_s", "time/eval_s"} <= {*rows} or rows["step"].isna().all():
        raise ValueError(f"{file}: no rows of a run's metrics")
    if "run" in rows:
        runs = {  # each without the columns that only others have
            run: some.drop(columns="run").dropna(axis=1, how="all")
            for run, some in rows.groupby("run")
        }
    else:
        runs = {file.absolute().parent.name if file.stem == "metrics" else file.stem: rows}
    # A step and its evaluation are two rows of a run
    merged = {run: some.groupby("step", as_index=False).first() for run, some in runs.items()}
    head = file.with_name("config.yaml")
    text = head.read_text("utf-8") if file.suffix == ".jsonl" and head.is_file() else ""
    code = re.search(r"^# the code of the task.*: (\w+)$", text, re.MULTILINE)
    return [Table(run, some, code[1] if code else "") for run, some in merged.items()]


def group_seeds(tables: list[Table]) -> dict[str, list[Table]]:
    """The tables of each curve, by its name; raises ValueError if two tables have the same name."""
    groups: dict[tuple[str, int], list[Table]] = {}  # key: name without seed, 1 if it had a seed
    for table in tables:
        group = groups.setdefault(re.subn(r"-s\d+$", "", table.name), [])
        if table.name in [other.name for other in group]:
            raise ValueError(f"two runs are named {table.name}: rename one of them")
        group.append(table)
    return {
        group[0].name if len(group) == 1 else f"{name} ({len(group)} seeds)": group
        for (name, _), group in groups.items()
    }


def curve_of(tables: list[Table], metric: str, *, window: int) -> np.ndarray:
    """Steps, minutes, mean, low and high (5, points) where all tables have measured the metric."""
    curves = [points(table, metric, window=window) for table in tables]
    common = functools.reduce(np.intersect1d, [curve[0] for curve in curves])
    stacked = np.stack([curve[:, np.isin(curve[0], common)] for curve in curves])
    mean = stacked.mean(axis=0)
    if len(tables) > 1:  # the band is from the lowest to the highest seed
        mean[3:] = stacked[:, 2].min(axis=0), stacked[:, 2].max(axis=0)
    return mean


def points(table: Table, metric: str, *, window: int) -> np.ndarray:
    """One table's curve, in `curve_of`'s rows; in training a point is a mean of `window` steps."""
    if metric == BEST_OF:
        metric = next((name for name in table.rows if name.startswith(BEST_OF)), BEST_OF)
    seconds = table.rows[["time/step_s", "time/eval_s"]].sum(axis=1)
    rows = table.rows.assign(minutes=seconds.cumsum() / 60)
    rows = rows.reindex(columns=["step", "minutes", metric, f"{metric}_low", f"{metric}_high"])
    rows = rows[np.isfinite(rows[metric])]
    if metric.startswith("train/"):
        rows[metric] = rows[metric].rolling(window, min_periods=1).mean()
    return rows.to_numpy().T


def make_figure(
    groups: dict[str, list[Table]],
    *,
    window: int,
    panels: Sequence = PANELS,
    title: str = "",
    over: str = "steps",
) -> Any:
    """Panels two by two, each `over` steps or minutes."""
    from matplotlib.figure import Figure

    num_rows = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(8, 0.6 + 1.9 * num_rows), layout="constrained")  # inches
    grid = figure.subplots(num_rows, 2, sharex=True, squeeze=False).ravel()
    names = {name for group in groups.values() for table in group for name in table.rows}
    counts = sorted(name.removeprefix(BEST_OF) for name in names if name.startswith(BEST_OF))
    for axes in grid[len(panels) :]:  # an odd number leaves a place empty
        axes.remove()
    for axes, (metric, name, label) in zip(grid, panels, strict=False):
        axes.set(title=name.format(n="/".join(counts) or "n"), ylabel=label)
        for i, group in enumerate(groups.values()):
            curve = curve_of(group, metric, window=window)
            draw_curve(axes, i, curve[["steps", "minutes"].index(over)], curve)
    for axes in grid[: len(panels)][-2:]:  # the lowest of their columns
        axes.set_xlabel(over)
        axes.locator_params(axis="x", integer=over == "steps")
        axes.tick_params(labelbottom=True)
    figure.align_ylabels()
    figure.suptitle(title, size=12, weight="bold", x=0.01, ha="left")
    if len(groups) > 1 or not title:
        figure.legend(
            figure.axes[0].get_lines(),
            labels_of(groups),
            loc="outside lower center",
            ncols=2,
            handlelength=4,
        )
    return figure


def labels_of(groups: dict[str, list[Table]]) -> list[str]:
    """The curves' names; where rewards may differ, since the code of tasks does, also its hash."""
    codes = [sorted({table.code[:6] for table in group} - {""}) for group in groups.values()]
    if len({code for some in codes for code in some}) < 2:
        return list(groups)
    return [f"{name}, code {' '.join(some)}" for name, some in zip(groups, codes, strict=True)]


def draw_curve(axes: Any, i: int, x: np.ndarray, curve: np.ndarray) -> None:
    """Draw the curve with its band over `x`, in the i-th colour, dashes and marker."""
    _, _, mean, low, high = curve
    color, dashes, marker = (styles[i % len(styles)] for styles in (COLORS, DASHES, MARKERS))
    axes.update_datalim([(0, 0)])  # both axes begin at 0
    axes.fill_between(x, low, high, color=color, alpha=0.18, linewidth=0)
    (line,) = axes.plot(x, mean, color=color, linestyle=dashes, linewidth=1.5)
    line.set(marker=marker, markersize=3.5, markevery=max(1, len(x) // 8))
    line.sticky_edges.y.append(0)  # no margin below a 0


def main() -> None:
    parser = argparse.ArgumentParser("python -m tools.plot", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="runs' folders or .csv files")
    parser.add_argument("--out", type=Path, help="default: curves, in the run's folder")
    parser.add_argument("--over", choices=["steps", "minutes"], default="steps")
    parser.add_argument("--smooth", type=int, default=5, help="steps in the training curves' mean")
    parser.add_argument("--title", default="", help="what the picture shows, in one sentence")
    parser.add_argument(
        "--panels",
        nargs="+",
        choices=[metric for metric, _, _ in (REWARD, *PANELS)],
        help="all without it",
    )
    options = parser.parse_args()
    first = options.paths[0].expanduser()
    out = (options.out or (first if first.is_dir() else first.parent) / "curves").expanduser()
    panels = panels_of(first)
    if options.panels:
        panels = [panel for panel in (REWARD, *PANELS) if panel[0] in options.panels]
    out = out.with_suffix("") if out.suffix in (".png", ".svg") else out
    png, svg = (out.with_name(f"{out.name}.{kind}") for kind in ("png", "svg"))
    with mistakes_cost_one_line():
        if options.smooth < 1:
            raise ValueError(f"--smooth {options.smooth}: it must be at least 1: no smoothing")
        os.environ.pop("MPLBACKEND", None)  # a notebook's, which no other process has
        import_package("matplotlib", key="tools.plot")  # says how to install it
        from matplotlib import style

        for file in (png, svg):
            check_replaceable(file)
        groups = group_seeds([t for path in options.paths for t in read_tables(path.expanduser())])
        out.parent.mkdir(parents=True, exist_ok=True)
        with style.context(STYLE, after_reset=True):
            figure = make_figure(
                groups,
                window=options.smooth,
                panels=panels,
                title=options.title,
                over=options.over,
            )
            for file in (png, svg):
                file.unlink(missing_ok=True)  # a link there may lead to somebody's file
            figure.savefig(png, dpi=200)
            figure.savefig(svg, metadata={"Date": None})  # so that equal pictures are equal files
    print(f"written: {png}, {svg}")


if __name__ == "__main__":
    main()
