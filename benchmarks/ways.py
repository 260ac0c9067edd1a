"""Ways to learn, on a laptop: RL alone, imitation alone, RL after imitation, and from a teacher.

    pip install -r requirements.txt ".[plot]"
    python benchmarks/ways.py --seeds 0 1 2            # one run at a time, most on one core
    python benchmarks/ways.py --rows weak-grpo weak-warm-grpo
    python benchmarks/ways.py --draw                   # only the table and the picture
    python benchmarks/ways.py --rows sums-warm-sil --smollm2 FOLDER

The students are the embedded model and "weak", which the same script makes in 3% of the steps. The
teacher is best/ of 60 steps of the default, as many samples a step as on two ranks; the answers are
500 of its own (tools.collect). These are made first, in runs/ways/. Each row takes 20 steps of the
default, a "warm" one from a model that tools.imitate has made; an "sft" row takes one, which is not
looked at. What a run has measured is kept in results/ways.csv, whose column `run` has row and seed,
and what tools.imitate has in ways-imitation.csv; a run that has its rows is not run again, and one
that was stopped goes on. Table and picture, results/ways.md and .png, come from these files alone.
The warm rows but tiny-sft, weak-warm-200-grpo and sums-warm-sil are of e8c738d, of one run each, by
`warm_start.data`, which computed the same.

The sums are arithmetic-smollm2.yaml's, on two ranks, after imitation of 500 answers that a program
writes, such as "47 + 38 = 85." Without it: results/arithmetic-smollm2.csv.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
from ablations import shown
from common import keep_run, kept_runs, load_config, questions_per_step, seeds_of  # first: modules
from pandas import DataFrame

from engine import ROOT
from engine.core.files import json_line, read_lines, write_atomically
from engine.core.packages import import_package
from engine.questions.data import load_examples
from engine.questions.tasks import load_task
from engine.run.config_file import read_file
from tools.plot import COLORS, DASHES, MARKERS, STYLE, read_table

RUNS = ROOT / "runs/ways"
SHARE, NUM_ANSWERS, LEVEL = 0.03, 500, 0.85  # of the steps; in the file; pass@1 to be reached
WEAK, TEACHER, ANSWERS = RUNS / "weak", RUNS / "teacher", RUNS / "answers.jsonl"
SUMS, SUMS_CONFIG = RUNS / "sums.jsonl", ROOT / "configs/arithmetic-smollm2.yaml"
ON_WEAK = [f"model.name={WEAK}", "training.learning_rate=6e-4"]
TAUGHT = ["training.learning_type=distill", f"model.teacher={TEACHER / 'best'}"]
STEPS = ["training.num_steps=20", "validation.every=5"]
ROWS = {
    "weak-grpo": [*ON_WEAK, *STEPS],
    "weak-warm-grpo": [*ON_WEAK, *STEPS],
    "weak-warm-200-grpo": [*ON_WEAK, *STEPS],
    "weak-distill": [*ON_WEAK, *TAUGHT, *STEPS],
    "weak-warm-distill": [*ON_WEAK, *TAUGHT, *STEPS],
    "weak-sft": [*ON_WEAK, "training.num_steps=1"],
    "tiny-grpo": STEPS,
    "tiny-distill": [*TAUGHT, *STEPS],
    "tiny-distill-mix": [*TAUGHT, "training.distill_mix=1", *STEPS],
    "tiny-sft": ["training.learning_rate=6e-4", "training.num_steps=1"],
    "sums-warm-sil": [f"--config={SUMS_CONFIG}", "validation.every=10", "training.num_steps=60"],
}
IMITATED = {  # steps of imitation before
    **{"weak-warm-grpo": 50, "weak-warm-200-grpo": 200, "weak-warm-distill": 50},
    **{"weak-sft": 200, "tiny-sft": 200, "sums-warm-sil": 50},
}
LABELS = {
    "warm-grpo": "50 steps of imitation, then grpo",
    "warm-200-grpo": "200 steps of imitation, then grpo",
    "distill": "distillation",
    "warm-distill": "50 steps of imitation, then distillation",
    "distill-mix": "distillation and grpo",
    "sft": "200 steps of imitation only",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [name for name in ROWS if not name.startswith("sums")]
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=names)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--smollm2", help="the folder of SmolLM2-135M-Instruct")
    parser.add_argument("--title", default="Ways to learn")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    options = parser.parse_args()
    file, imitation_file = options.out / "ways.csv", options.out / "ways-imitation.csv"
    if not options.draw:
        prepare(options.rows)
        for seed in options.seeds:
            for row in options.rows:
                if f"{row}-s{seed}" not in kept_runs(file):
                    run_row(row, seed, file, imitation_file, options.smollm2)
    tables = kept_runs(file), kept_runs(imitation_file)
    curves = {row: curve(row, *tables) for row in ROWS}
    write_table(curves, options.out / "ways.md")
    draw(curves, options.title, options.out / "ways.png")


# The runs


def prepare(rows: list[str]) -> None:
    """Make the weak model, the teacher and the answers, each if it is not there."""
    RUNS.mkdir(parents=True, exist_ok=True)
    if any(row.startswith("sums") for row in rows) and not SUMS.exists():
        write_sums(SUMS)
    if all(row.startswith("sums") for row in rows):
        return
    if not (WEAK / "tokenizer.json").exists():
        run("tiny/make_tiny.py", "--share", str(SHARE), "--out", str(WEAK))
    size = f"training.num_samples_per_step_global={questions_per_step()}"
    sixty = ["training.num_steps=60", f"run.dir={RUNS}", "run.name=teacher", size]
    run("main.py", *sixty)  # at once, where it has ended
    if not ANSWERS.exists():
        run("-m", "tools.collect", str(TEACHER), "--samples=1", f"--questions={2 * NUM_ANSWERS}")
        lines = (TEACHER / "answers.jsonl").read_text().splitlines(keepends=True)
        write_atomically(ANSWERS, "".join(lines[:NUM_ANSWERS]))


def write_sums(file: Path) -> None:
    """Answers to training questions of the task arithmetic, as a program writes them."""
    task, options = load_task("arithmetic"), load_config(["task.name=arithmetic"]).task
    how = {"options": options, "num_examples": NUM_ANSWERS, "seed": 0, "held_out": True}
    rows = load_examples(task, "generated", "train", exclude=[], **how)
    lines = [
        row | {"completion": f"{row['a']} + {row['b']} = {sum(row.values())}."} for row in rows
    ]
    write_atomically(file, "".join(map(json_line, lines)))


def run_row(row: str, seed: int, file: Path, imitation_file: Path, smollm2: str | None) -> None:
    made, script = RUNS / f"{row}-s{seed}", []
    given = [*ROWS[row], f"run.dir={RUNS}", f"run.name={made.name}", f"training.seed={seed}"]
    if row.startswith("sums"):  # on two ranks, as the recipe
        script = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
        student, answers = smollm2 or read_file(SUMS_CONFIG)["model"]["name"], SUMS
    else:
        given += [f"training.num_samples_per_step_global={questions_per_step()}"]
        student, answers = WEAK if row.startswith("weak") else ROOT / "tiny", ANSWERS
    if row in IMITATED:
        model = RUNS / f"{made.name}-imitation"
        if not model.exists():
            how = [f"--steps={IMITATED[row]}", f"--out={model}"]
            run(*script, "-m", "tools.imitate", str(student), str(answers), *given, *how)
        keep_run(imitation_file, made.name, DataFrame(read_lines(model / "imitation.jsonl")))
        student = model
    run(*script, "main.py", *given, f"model.name={student}")
    keep_run(file, made.name, read_table(made).rows.astype({"step": int}))


def run(*command: str) -> None:
    """Run Python with one thread; raises CalledProcessError where that fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
    print(f"done: {' '.join(command)[:100]}", flush=True)


# What is seen


def curve(
    row: str, runs: dict[str, DataFrame], imitations: dict[str, DataFrame]
) -> tuple[np.ndarray, np.ndarray]:
    """Steps (points,), and each seed's pass@1 and best of n (seeds, points, 2).

    Imitation is before step 0.
    """
    tables, steps = [], np.array([])
    for run, metrics in seeds_of(runs, row).items():
        best = next(name for name in metrics if name.startswith("eval/best_of_"))
        columns = ["step", "eval/pass@1", best]
        rows = metrics[columns].dropna().to_numpy()
        if run in imitations:
            before, *_, after = imitations[run][columns].to_numpy()
            if np.isnan(before[1]):  # by warm_start.data: the run itself had measured that
                before = rows[0]
            ends = rows[1:] if not row.endswith("-sft") else rows[:0]
            rows = np.vstack([[-after[0], *before[1:]], [0, *after[1:]], ends])
        tables.append(rows[:, 1:])
        steps = rows[:, 0]
    return steps, np.array(tables)


def write_table(curves: dict[str, tuple[np.ndarray, np.ndarray]], file: Path) -> None:
    """Before, after imitation and at the end; and the steps to LEVEL of each seed."""
    lines = ["| row | seeds | before | after imitation | at the end | best of n at the end "]
    lines[0] += f"| steps to {LEVEL} |"
    lines.append("|---|---|---|---|---|---|---|")
    for row, (steps, rates) in curves.items():
        if not len(rates):
            lines.append(f"| {row} | 0 | not run | | | | |")
            continue
        solved, start = rates[:, :, 0], np.flatnonzero(steps == 0)[0]
        reached = [steps[seed >= LEVEL][:1].tolist() for seed in solved]
        first = ", ".join(f"{some[0]:.0f}" if some else "no" for some in reached)
        cells = [row, len(rates), shown(solved[:, 0], 3)]
        cells += [shown(solved[:, start], 3) if start else ""]
        cells += [shown(solved[:, -1], 3), shown(rates[:, -1, 1], 3), first]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", "Steps of RL alone: those of imitation come before step 0."]
    write_atomically(file, "\n".join(lines) + "\n")
    print(f"written: {file}")


def draw(curves: dict[str, tuple[np.ndarray, np.ndarray]], title: str, file: Path) -> None:
    """pass@1 over the steps of RL, of the weak student and of the embedded one."""
    import_package("matplotlib", key="benchmarks/ways.py")
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(8, 3.4), layout="constrained")  # inches
        for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("weak", "tiny"), strict=True):
            for i, row in enumerate(name for name in ROWS if name.startswith(kind)):
                steps, rates = curves[row]
                if not len(rates):
                    continue
                steps, solved = steps[steps >= 0], rates[:, steps >= 0, 0]
                how = {"color": COLORS[i], "linestyle": DASHES[i % 4], "marker": MARKERS[i % 5]}
                name = row.removeprefix(f"{kind}-")
                how["label"] = LABELS.get(name, name)
                axes.plot(steps, solved.mean(axis=0), markersize=3.5, **how)
                axes.fill_between(steps, solved.min(0), solved.max(0), color=COLORS[i], alpha=0.18)
            axes.set(title=f"the {kind} student", xlabel="steps of RL", ylim=(0, 1))
            if axes.get_legend_handles_labels()[0]:
                axes.legend()
        figure.axes[0].set_ylabel("pass@1")
        figure.suptitle(title, size=12, weight="bold", x=0.01, ha="left")
        figure.savefig(file, dpi=200)
    print(f"written: {file}")


if __name__ == "__main__":
    main()
