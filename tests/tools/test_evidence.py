"""results/: the kept runs give every table and figure again. And how a benchmark keeps a run."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from harness import ROOT, benchmark
from pandas import DataFrame

from engine.report.pass_at_k import pass_at_k as rate_of

keep_run, kept_runs = benchmark("common").keep_run, benchmark("common").kept_runs
RESULTS = ROOT / "results"


def test_the_printed_commands_make_every_table_again(tmp_path, monkeypatch, capsys):
    """What learning.py prints, a line a step, is a column in RESULTS.md."""
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *_, **__: None)  # it is slow
    drawn = ("*.md", "*.png", "*.svg", "*.gif")
    copy = Path(shutil.copytree(RESULTS, tmp_path / "copy", ignore=shutil.ignore_patterns(*drawn)))
    page = (RESULTS / "README.md").read_text().replace("\\\n", "")
    commands = re.findall(r"^python (benchmarks/\w+\.py .*--draw.*)$", page, re.MULTILINE)
    printed = {}
    for command in commands:  # bash takes the comment away, and multiplies {mean,zscore}-s{0,1}
        words = subprocess.check_output(["bash", "-c", f"printf '%s\n' {command}"], text=True)
        script, *arguments = words.splitlines()
        name = Path(script).stem
        folder = copy / "pass-at-k" if name == "pass_at_k" else copy
        monkeypatch.setattr(sys, "argv", [script, *arguments, "--out", str(folder)])
        benchmark(name).main()
        printed[name] = capsys.readouterr().out
    tables = {file.relative_to(copy): file.read_text() for file in copy.rglob("*.md")}
    assert len(tables) == 8 == len(commands)  # the hard lab has two tables, learning.py none
    assert tables == {name: (RESULTS / name).read_text() for name in tables}
    steps, sides = (part.splitlines()[1:] for part in printed["learning"].split("\n\n")[:2])
    columns = zip(*[line.replace("-0.000", "0.000").split() for line in steps], strict=True)
    *rows, within = [" | ".join(column) for column in columns]
    rows += [re.sub(r"(\d\.\d) (?=\d)", r"\1, ", re.sub(r"  +", " | ", line)) for line in sides]
    quoting = (ROOT / "benchmarks/RESULTS.md").read_text()
    assert [row for row in rows if f"{row} |\n" not in quoting] == []
    assert "False" not in within


# Figures that are no three seeds' of one evaluation, or whose runs are not kept
OTHERS = {
    *("0.163, 0.185 and 0.153", "0.203, 0.177 and 0.193"),  # each over steps 6 to 10
    *("0.334, 0.337 and 0.354", "0.27, 0.48 and 0.41", "0.876, 0.876, 0.878"),  # not kept
    "0.850 to 0.896",  # the interval that README's run prints
    *("0.373 to 0.874", "0.027 to 0.215", "0.275 to 0.333"),  # before to after
    *("0.986, 0.986, 0.990", "0.327 to 0.388"),  # several models
}


def test_every_figure_of_three_seeds_is_that_of_kept_runs():
    """It is quoted as "0.873, 0.869, 0.862", or as "0.862 to 0.873"."""
    pages = ("README.md", "results/README.md", "docs/comparison.md", "benchmarks/RESULTS.md")
    text = " ".join(" ".join((ROOT / page).read_text().split()) for page in pages)
    seeds = r"(?<![\d,] )\b[01]\.\d{2,3}, [01]\.\d{2,3}(?:,| and) [01]\.\d{2,3}\b"
    quoted = re.findall(rf"{seeds}|\b[01]\.\d{{3}} to [01]\.\d{{3}}\b", text)
    found = set()
    for values in evaluations_of_three_seeds():
        for decimals in (2, 3):
            shown = [f"{value:.{decimals}f}" for value in values]
            found |= {", ".join(shown), f"{min(shown)} to {max(shown)}"}
    assert len(quoted) > 90
    assert {figure for figure in quoted if figure.replace(" and", ",") not in found} == OTHERS


def evaluations_of_three_seeds() -> Iterator[list[float]]:
    """pass@1 and pass@8 of each seed, of every evaluation that is kept; pass@64 too, if sampled."""
    for seeds in (seeds for file in RESULTS.rglob("*.csv") for seeds in triples(kept_runs(file))):
        if "solved" in seeds[0]:
            counts = [np.array(rows["solved"].item().split(), dtype=int) for rows in seeds]
            for k in (1, 8, 64):
                yield [rate_of(solved, seeds[0]["samples"].item(), k) for solved in counts]
            continue
        if "step" not in seeds[0]:  # the tokens that a mask met
            continue
        tables = [rows.groupby("step").first() for rows in seeds]
        for name in ("eval/pass@1", "eval/pass@8"):
            if all(name in table for table in tables):
                curves = [table[name].dropna() for table in tables]
                for step in set.intersection(*[set(curve.index) for curve in curves]):
                    yield [curve[step] for curve in curves]


def triples(runs: dict[str, DataFrame]) -> list[list[DataFrame]]:
    """Those of seeds 0, 1 and 2, where all three are there."""
    names = [[f"{run[:-1]}{seed}" for seed in range(3)] for run in runs if re.search(r"\bs0$", run)]
    return [[runs[name] for name in three] for three in names if {*three} <= {*runs}]


def test_runs_that_are_kept_at_the_same_time_are_all_in_the_table_to_the_last_digit(tmp_path):
    """They have other columns, and one of them is kept twice."""
    file, names = tmp_path / "new/table.csv", [f"row-s{seed}" for seed in range(8)]
    runs = {name: DataFrame({"step": [0, 1], name: [0.1 + 0.2, None]}) for name in names}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: keep_run(file, name, runs[name]), [*names, names[0]]))
    assert file.read_text().count("0.30000000000000004") == 8
    found = {name: rows.reset_index(drop=True) for name, rows in kept_runs(file).items()}
    assert list(found) == names and all(found[name].equals(runs[name]) for name in names)
    assert [path.name for path in file.parent.iterdir()] == ["table.csv"]
