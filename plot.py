"""Draw the curves of runs: how well they solve and how they train, over steps and over minutes.

    python plot.py runs/a runs/b                                # writes curves.png and curves.svg
    python plot.py results/*.csv --out results/curves --smooth 1

Takes runs' folders, or their metrics.csv under any name. Runs whose names differ only in the seed
at the end (-s0, -s1) are one curve, as far as all of them have come: the mean over the seeds, in a
band from the lowest to the highest. The band of a single run is the 95% interval of its pass@1.
Minutes are those of steps and evaluations, without loading before and saving between them.
"""

import argparse
import functools
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BEST_OF = "eval/best_of_"
PANELS = (  # metric, title, label of the y-axis
    ("eval/pass@1", "pass@1", "share of samples"),
    (BEST_OF, "best of {n}", "share of questions"),
    ("train/reward", "reward", "mean per completion"),
    ("train/completion_tokens", "length of completions", "tokens"),
    ("train/entropy", "entropy", "nats per token"),
    ("train/zero_advantage_frac", "zero-advantage groups", "share of groups"),
)
# Okabe and Ito's colours, which the colour-blind can tell apart; dashes and markers for print
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (6, 1.5, 1.2, 1.5)))
MARKERS = ("o", "s", "^", "D", "v")
STYLE = {
    "font.size": 8.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "xtick.color": "#888888",
    "ytick.color": "#888888",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "svg.hashsalt": "plain-grpo",  # else the same curves are another file each time
}


# What there is to draw


@dataclass
class Run:
    """The metrics of one run: for each column an array (rows,), NaN where a cell is empty."""

    name: str
    columns: dict[str, np.ndarray]
    best_of: str  # the column, whose name has the number of samples

    def column(self, name: str) -> np.ndarray:
        name = self.best_of if name == BEST_OF else name
        return self.columns.get(name, np.full(len(self.columns["step"]), np.nan))


@dataclass
class Curve:
    """One metric of a run, or of runs that differ in their seed; each (points,)."""

    steps: np.ndarray
    minutes: np.ndarray
    mean: np.ndarray
    low: np.ndarray  # low and high are NaN where there is no band
    high: np.ndarray


def read_run(path: Path) -> Run:
    """Read a run's folder or .csv file; raises OSError or ValueError, which names the file."""
    file = path / "metrics.csv" if path.is_dir() else path
    text = file.read_text(encoding="utf-8", errors="replace")
    whole_lines = text[: text.rfind("\n") + 1].splitlines()  # the last may be half written
    header, *rows = [line.split(",") for line in whole_lines] or [[]]
    missing = {"step", "time/step_s", "time/eval_s"} - set(header)
    if missing:
        raise ValueError(f"{file}: no column {', '.join(sorted(missing))}: not a run's metrics.csv")
    if not rows:
        raise ValueError(f"{file}: no rows yet")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"{file}: line {number} has not {len(header)} cells")
    try:
        table = np.array([[float(cell or "nan") for cell in row] for row in rows])
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    columns = dict(zip(header, table.T, strict=True))
    if not (np.diff(columns["step"]) > 0).all():
        raise ValueError(f"{file}: steps do not ascend")
    name = file.absolute().parent.name if file.name == "metrics.csv" else file.stem
    best_of = next((name for name in header if name.startswith(BEST_OF)), BEST_OF + "n")
    return Run(name, columns, best_of=best_of)


def group_seeds(runs: list[Run]) -> dict[str, list[Run]]:
    """Runs by what their curve is called; raises ValueError if two have the same name."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        some = groups.setdefault(re.sub(r"-s\d+$", "-s*", run.name), [])
        if run.name in [other.name for other in some]:
            raise ValueError(f"two runs are named {run.name}: rename one of them")
        some.append(run)
    return {
        f"{name.removesuffix('-s*')} ({len(some)} seeds)" if len(some) > 1 else some[0].name: some
        for name, some in groups.items()
    }


def curve_of(runs: list[Run], metric: str, *, window: int) -> Curve:
    """The mean over the runs at the steps where each has measured the metric."""
    each = [points(run, metric, window=window) for run in runs]
    common = functools.reduce(np.intersect1d, [some[0] for some in each])
    stacked = np.stack([some[:, np.isin(some[0], common)] for some in each])  # (runs, 5, points)
    curve = Curve(*stacked.mean(axis=0))
    if len(runs) > 1:
        values = stacked[:, 2]
        curve.low, curve.high = values.min(axis=0), values.max(axis=0)
    return curve


def points(run: Run, metric: str, *, window: int) -> np.ndarray:
    """Step, minutes, running mean, low and high wherever the metric was measured; (5, points)."""
    seconds = np.nan_to_num([run.column("time/step_s"), run.column("time/eval_s")]).sum(axis=0)
    minutes = seconds.cumsum() / 60
    value, low, high = (run.column(metric + end) for end in ("", "_low", "_high"))
    has = np.isfinite(value)
    table = np.stack([run.column("step"), minutes, value, low, high])[:, has]
    table[2] = running_mean(table[2], window=window)
    return table


def running_mean(values: np.ndarray, *, window: int) -> np.ndarray:
    """Mean of each value and of up to window - 1 before it."""
    return np.array([values[max(0, i + 1 - window) : i + 1].mean() for i in range(len(values))])


def caption(groups: dict[str, list[Run]], *, window: int) -> str:
    """What the lines and bands are, and what has been smoothed."""
    sizes = [len(some) for some in groups.values()]
    seeds = "Lines: mean of the seeds; bands: lowest to highest seed." if max(sizes) > 1 else ""
    single = "Band of pass@1 of a single run: its 95% interval." if min(sizes) == 1 else ""
    smoothing = f"mean of the last {window} steps" if window > 1 else "not smoothed"
    training = f"reward and below: training completions, {smoothing}."
    evaluation = "pass@1 and best of n: validation questions, not smoothed;"
    return f"{' '.join(filter(None, [seeds, single]))}\n{evaluation} {training}"


# The picture


def draw(paths: list[Path], out: Path, *, window: int = 5) -> list[Path]:
    """Draw the runs in `paths` to `out`.png and `out`.svg; the same metrics give the same files.

    Raises OSError or ValueError for files without curves, or without matplotlib.
    """
    if window < 1:
        raise ValueError(f"--smooth {window}: it must be at least 1, which does not smooth")
    matplotlib = import_matplotlib()
    groups = group_seeds([read_run(path) for path in paths])
    out = out.with_suffix("") if out.suffix in (".png", ".svg") else out
    out.parent.mkdir(parents=True, exist_ok=True)
    png, svg = (out.with_name(f"{out.name}.{kind}") for kind in ("png", "svg"))
    with matplotlib.style.context(STYLE, after_reset=True):
        figure = make_figure(matplotlib.figure.Figure, groups, window=window)
        figure.savefig(png, dpi=200)
        figure.savefig(svg, metadata={"Date": None})
    return [png, svg]


def import_matplotlib() -> Any:
    try:
        import matplotlib.figure
        import matplotlib.style
    except ModuleNotFoundError as error:
        raise ValueError(f"needs the package {error.name}: pip install matplotlib") from error
    return matplotlib


def make_figure(new_figure: Any, groups: dict[str, list[Run]], *, window: int) -> Any:
    """Six panels, each over steps on the left and over minutes on the right."""
    figure = new_figure(figsize=(9, 6.6), layout="constrained")  # inches: 900 pixels on a page
    widths = (1, 1, 0.06, 1, 1)  # the middle column keeps the panels apart
    grid = figure.subplots(3, 5, sharex="col", gridspec_kw={"width_ratios": widths})
    columns = {run.best_of for runs in groups.values() for run in runs}
    best_of = "/".join(sorted(column.removeprefix(BEST_OF) for column in columns))
    for axes in grid[:, 2]:
        axes.remove()
    pairs = grid[:, [0, 1, 3, 4]].reshape(6, 2)
    for (left, right), (metric, title, label) in zip(pairs, PANELS, strict=True):
        left.set(title=title.format(n=best_of), ylabel=label)
        right.sharey(left)
        right.tick_params(labelleft=False)
        for axes, x in ((left, "steps"), (right, "minutes")):
            steps = window if metric.startswith("train/") else 1
            draw_curves(axes, groups, metric, x, window=steps)
    for axes, x in zip(pairs[-2:].flat, ("steps", "minutes") * 2, strict=True):
        axes.set_xlabel(x)
    figure.align_ylabels()
    lines = pairs[0, 0].get_lines()
    figure.legend(lines, list(groups), loc="outside upper center", ncols=2, handlelength=4)
    figure.supxlabel(caption(groups, window=window), size=8, color="#444444", x=0.01, ha="left")
    return figure


def draw_curves(
    axes: Any, groups: dict[str, list[Run]], metric: str, along: str, *, window: int
) -> None:
    """The curves of one metric `along` the steps or the minutes."""
    axes.update_datalim([(0, 0)])  # both axes begin at 0
    for i, runs in enumerate(groups.values()):
        curve = curve_of(runs, metric, window=window)
        color = COLORS[i % len(COLORS)]
        x = curve.steps if along == "steps" else curve.minutes
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.18, linewidth=0)
        (line,) = axes.plot(
            x,
            curve.mean,
            color=color,
            linestyle=DASHES[i % len(DASHES)],
            marker=MARKERS[i % len(MARKERS)],
            markersize=3.5,
            markevery=max(1, len(x) // 8),
            linewidth=1.5,
        )
        line.sticky_edges.y.append(0)  # no margin below a 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="runs' folders or .csv files")
    parser.add_argument("--out", type=Path, default=Path("curves"), help="without .png and .svg")
    parser.add_argument("--smooth", type=int, default=5, help="steps in the training curves' mean")
    options = parser.parse_args()
    try:
        files = draw(options.paths, options.out, window=options.smooth)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"written: {', '.join(map(str, files))}")


if __name__ == "__main__":
    main()
