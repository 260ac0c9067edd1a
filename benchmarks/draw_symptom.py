"""All that a run with a bug of docs/exercises measures, beside three sound ones, without the code.

    python benchmarks/draw_symptom.py 7        # as tools.exercise --symptom 7: symptom-7.png

The lab "symptoms" keeps its runs in results/symptoms.csv, and makes those that are missing.
"""

import re
import subprocess
import sys

from ablations import ROOT

from tools.plot import make_figure, read_tables


def main() -> None:
    number = sys.argv[1]
    lab = [sys.executable, "benchmarks/ablations.py", "--lab", "symptoms", "--seeds"]
    for more in (f"0 --rows bug-{number}", "0 1 2 --rows default"):
        subprocess.run(lab + more.split(), cwd=ROOT, check=True)
    tables = {table.name: table for table in read_tables(ROOT / "results/symptoms.csv")}
    copy = tables[f"bug-{number}-s0"]
    sound = [tables[f"default-s{seed}"] for seed in (0, 1, 2)]
    panels = [(name, name, "") for name in copy.rows if re.match("train/|eval/pass@1$", name)]
    figure = make_figure({"a bug": [copy], "three sound runs": sound}, window=1, panels=panels)
    figure.savefig(f"symptom-{number}.png")
    print(f"written: symptom-{number}.png; which number proves a bug?")


if __name__ == "__main__":
    main()
