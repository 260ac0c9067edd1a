"""What the searches of a Countdown model are like: tries, equations, verdicts, ways to fail.

    OMP_NUM_THREADS=2 python benchmarks/searches.py --out results/searches-before.md
    OMP_NUM_THREADS=2 python benchmarks/searches.py --out results/searches-after.md \
        model.name=runs/countdown-tiny-grpo-s0/best

Arguments are keys of the config, as for main.py; the questions are those of its validation. Only
form and answer are rewarded, so nothing but this shows whether the way to it still holds. With
--out the table is written to a file too.
"""

import argparse
import re
import tempfile
from collections import Counter, defaultdict
from contextlib import suppress
from fractions import Fraction
from pathlib import Path

from common import load_run, print_table  # first: it finds the script's modules

import main as program
from countdown import value_of
from engine.core.files import write_atomically
from engine.core.types import Trajectory

EQUATION = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")
VERDICT = re.compile(r"= (\d+) (yes|no)$", re.MULTILINE)
README_QUESTION = {"nums": [3, 7, 25], "target": 46}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a file for the table, in Markdown")
    options, keys = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as folder:
        run = load_run(["mode=evaluate", f"run.dir={folder}", *keys])
    questions, groups = run.validation_questions, program.sample_validation(run)
    rows = defaultdict(list)  # by how many numbers a question has
    for question, group in zip(questions, groups, strict=True):
        rows[f"{len(question['nums'])} numbers"] += [(t, question["target"]) for t in group]
    columns = {**dict(sorted(rows.items())), "all": [row for some in rows.values() for row in some]}
    figures = {name: describe(some) for name, some in columns.items()}
    lines = [[name, *(f[name] for f in figures.values())] for name in figures["all"]]
    print_table(["", *figures], lines)
    if options.out:
        rule = ["---"] * (1 + len(figures))
        table = [f"| {' | '.join(line)} |\n" for line in (["", *figures], rule, *lines)]
        command = " ".join(["python benchmarks/searches.py", *keys])
        write_atomically(options.out, f"`{command}`\n\n{''.join(table)}")

    run.validation_questions = [README_QUESTION]
    ((answer,),) = program.sample_validation(run, is_greedy=True)
    print(f"README's question, greedily ({'' if answer.is_solved else 'not '}solved):{answer.text}")


def describe(rows: list[tuple[Trajectory, int]]) -> dict[str, str]:
    """Figures of completions, each given with its target."""
    failures, tries, num_verdicts, num_true = Counter(), 0, 0, 0
    equations: dict[str, list[bool]] = {operator: [] for operator in "+-*/"}
    for trajectory, target in rows:
        for left, operator, right, value in EQUATION.findall(trajectory.text):
            with suppress(ZeroDivisionError):
                equations[operator].append(value_of([left, operator, right]) == Fraction(value))
        verdicts = VERDICT.findall(trajectory.text)
        tries += len(verdicts)
        num_verdicts += len(verdicts)
        num_true += sum((int(value) == target) == (word == "yes") for value, word in verdicts)
        if not trajectory.is_solved:
            failures[how_it_failed(trajectory, verdicts)] += 1
    checked = [is_right for some in equations.values() for is_right in some]
    return {
        "completions": str(len(rows)),
        "pass@1": f"{sum(t.is_solved for t, _ in rows) / len(rows):.3f}",
        "tokens": f"{sum(len(t.completion.token_ids) for t, _ in rows) / len(rows):.1f}",
        "tries": f"{tries / len(rows):.2f}",
        "equations right": share(checked),
        **{f"  {operator}": share(some) for operator, some in equations.items()},
        "verdicts that fit the value": f"{num_true / max(1, num_verdicts):.2%}",
        **{f"failed: {way}": str(failures[way]) for way in WAYS_TO_FAIL},
    }


WAYS_TO_FAIL = ("cut off", "gave up", "said yes", "no verdict")


def how_it_failed(trajectory: Trajectory, verdicts: list[tuple[str, str]]) -> str:
    if trajectory.completion.truncated:
        return "cut off"
    if not verdicts:
        return "no verdict"
    return "gave up" if verdicts[-1][1] == "no" else "said yes"


def share(are_right: list[bool]) -> str:
    return f"{sum(are_right) / len(are_right):.2%} of {len(are_right):,}" if are_right else "-"


if __name__ == "__main__":
    main()
