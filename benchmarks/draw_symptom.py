"""All that a run with a bug of docs/exercises measures, beside three sound ones, without the code.

    python benchmarks/draw_symptom.py 7        # as tools.exercise --symptom 7: symptom-7.png

The sound ones are the default's, of results/countdown-tiny-grpo.csv. The bugs' runs are kept in
docs/exercises/symptoms.csv; one that is missing is made: six steps on one core, with the learning
rates of the default's first six, and 64 questions to evaluate.
"""

import re
import sys

from ablations import ROOT, make_symptoms, program_of, run_one  # first: modules
from common import kept_runs, questions_per_step

from tools.plot import make_figure, read_tables

RUNS = ROOT / "docs/exercises/symptoms.csv"
FOLDER = ROOT / "runs/symptoms"  # whose name lets run_one take a run in which nothing was trained
SIZES = ["training.num_steps=6", "validation.num_examples=64"]


def main() -> None:
    number = sys.argv[1]
    row = f"bug-{number}"
    questions = questions_per_step()
    bugs = make_symptoms(questions)
    if row not in bugs:
        raise SystemExit(f"error: {number}: 1 to 10 without 6, whose bug no run of main.py shows")
    name = f"six-steps-{number}"
    if name not in kept_runs(RUNS):
        FOLDER.mkdir(parents=True, exist_ok=True)
        where = [f"run.dir={FOLDER}", f"run.name={name}"]
        where.append(f"training.num_samples_per_step_global={questions}")
        if not run_one(name, [*program_of(row), *where, *SIZES, *bugs[row]], FOLDER, RUNS):
            raise SystemExit(f"failed, see {FOLDER}/{name}.log")
    (copy,) = (table for table in read_tables(RUNS) if table.name == name)
    sound = read_tables(ROOT / "results/countdown-tiny-grpo.csv")
    panels = [(name, name, "") for name in copy.rows if re.match("train/|eval/pass@1$", name)]
    figure = make_figure({"a bug": [copy], "three sound runs": sound}, window=1, panels=panels)
    figure.savefig(f"symptom-{number}.png")
    print(f"written: symptom-{number}.png; which number proves a bug?")


if __name__ == "__main__":
    main()
