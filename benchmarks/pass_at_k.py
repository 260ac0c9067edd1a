"""Does RL add, or only sharpen? pass@k of a model before and after its training, for all k.

    pip install -r requirements.txt ".[plot]"
    python benchmarks/pass_at_k.py                         # tiny, by grpo and by sil; 40 minutes
    python benchmarks/pass_at_k.py --draw                  # only the table and the picture
    python benchmarks/pass_at_k.py --name sums --samples 64 \\
        --models before=FOLDER "after=runs/RUN/best" \\
        --config configs/arithmetic-smollm2.yaml validation.num_examples=64

A model that RL has only sharpened solves more at k = 1 and fewer at a large k than before: what it
lost was there, though rare (arXiv:2504.13837). So each validation question gets 256 completions at
temperature 1, and pass@k for each k is the unbiased estimate from these.

Without --models tiny is trained by both learning types, 60 steps of seed 0, and measured before,
after 20 and after 60 of them. Two processes of one thread each work at a time. How many of its
samples solve each question is kept in results/pass-at-k/<name>.csv, a row a model; a model that has
its row is not measured again, and a training that was stopped goes on. Table and picture,
results/pass-at-k/<name>.md and .png, come from this file alone. All other arguments are main.py's.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import keep_run, kept_runs, load_run, questions_per_step  # first: it finds the modules
from pandas import DataFrame

import main as program
from engine import ROOT
from engine.core.files import write_atomically
from engine.core.packages import import_package
from engine.report.pass_at_k import pass_at_k
from tools.plot import COLORS, DASHES, STYLE

RUNS = ROOT / "runs/pass-at-k"
STEPS = (20, 60)
TYPES = {"grpo": [], "sil": ["--config", "configs/countdown-tiny-sil.yaml"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--name", default="tiny", help="of the files")
    parser.add_argument("--models", nargs="+", metavar="NAME=FOLDER", help="tiny's unless given")
    parser.add_argument("--samples", type=int, default=256, help="of each question")
    parser.add_argument("--out", type=Path, default=ROOT / "results/pass-at-k")
    parser.add_argument("--title", default="pass@k before and after training")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # a name, in a process of its own
    options, keys = parser.parse_known_args()
    file = options.out / f"{options.name}.csv"
    if options.measure:
        return measure(file, options.measure, keys)
    models = dict(text.split("=", 1) for text in options.models or ()) or tiny_models()
    if not options.draw:
        keys += [f"validation.best_of_n={options.samples}", "validation.pass_k=[1]"]
        if not options.models:
            run_two_at_a_time(trainings())
        this = [sys.executable, __file__, f"--out={options.out}", f"--name={options.name}"]
        run_two_at_a_time(
            [
                [*this, f"--measure={name}", *keys, f"model.name={model}"]
                for name, model in models.items()
                if name not in kept_runs(file)
            ]
        )
    kept = kept_runs(file)
    counts = {name: [*map(int, kept[name]["solved"].item().split())] for name in models}
    curves = {name: curve(solved, options.samples) for name, solved in counts.items()}
    write_table(counts, curves, file.with_suffix(".md"))
    draw(curves, options.title, file.with_suffix(".png"))


def tiny_models() -> dict[str, str]:
    """The folder of each model that is measured, before and after its training."""
    after = {
        f"{kind}-{step}": f"{RUNS.relative_to(ROOT)}/{kind}-s0/checkpoints/step-{step:06d}"
        for kind in TYPES
        for step in STEPS
    }
    return {"before": "tiny"} | after


def trainings() -> list[list[str]]:
    """A command for each learning type; it ends at once where the run is finished."""
    sizes = [f"training.num_samples_per_step_global={questions_per_step()}"]
    sizes += [f"training.num_steps={STEPS[-1]}", "checkpoint.every=20", "checkpoint.keep=null"]
    return [
        [sys.executable, "main.py", *config, f"run.dir={RUNS}", f"run.name={kind}-s0", *sizes]
        for kind, config in TYPES.items()
    ]


def run_two_at_a_time(commands: list[list[str]]) -> None:
    """Run them with one thread each; raises CalledProcessError for one that fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with ThreadPoolExecutor(2) as pool:
        runs = [
            pool.submit(subprocess.run, command, cwd=ROOT, env=environment, check=True)
            for command in commands
        ]
        for run in runs:
            run.result()


def measure(file: Path, name: str, keys: list[str]) -> None:
    """Keep how many of a model's samples solve each validation question, by a name for it."""
    with tempfile.TemporaryDirectory() as folder:
        run = load_run([*keys, "mode=evaluate", f"run.dir={folder}"])
    groups = program.sample_validation(run)
    solved = " ".join(str(sum(t.is_solved for t in group)) for group in groups)
    found = {"model": run.config.model.name, "samples": run.config.validation.best_of_n}
    keep_run(file, name, DataFrame([found | {"solved": solved}]))


# What is seen


def curve(solved: list[int], num_samples: int) -> np.ndarray:
    """pass@k for k from 1 to the number of samples."""
    counts = np.array(solved)
    return np.array([pass_at_k(counts, num_samples, k) for k in range(1, num_samples + 1)])


def crossing(before: np.ndarray, after: np.ndarray) -> int | None:
    """The first k from which on pass@k was never lower before the training; None without one."""
    is_lower = np.flatnonzero(before < after)
    first = int(is_lower[-1]) + 2 if len(is_lower) else 1
    return first if first <= len(before) else None


def write_table(counts: dict[str, list[int]], curves: dict[str, np.ndarray], file: Path) -> None:
    """pass@k of each model; where it falls below the first one's; which questions came and went."""
    (first, before), *_ = counts.items()
    num_samples = len(curves[first])
    ks = [2**i for i in range(num_samples.bit_length()) if 2**i <= num_samples]
    lines = [
        f"| model | {' | '.join(f'pass@{k}' for k in ks)} | below the first from k | newly solved "
        "| no more solved |",
        f"|{'---|' * (len(ks) + 4)}",
    ]
    for name, solved in counts.items():
        rates, others = curves[name], ["", "", ""]
        if name != first:
            was, is_now = (np.array(some) > 0 for some in (before, solved))
            k = crossing(curves[first], rates)
            others = [k or "never", (is_now & ~was).sum(), (was & ~is_now).sum()]
        cells = [name, *(f"{rates[k - 1]:.3f}" for k in ks), *others]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    lines += ["", f"{len(before)} questions, {num_samples} samples each."]
    lines[-1] += f" Newly solved: none of {first}'s samples was right, some of this model's are."
    write_atomically(file, "\n".join(lines) + "\n")
    print(f"written: {file}")


def draw(models: dict[str, np.ndarray], title: str, file: Path) -> None:
    """A curve for each model; those of one kind (grpo-20, grpo-60) have its colour.

    Seeds (grpo-20-s0, grpo-20-s1) are one model: the mean of their curves, and a band over all.
    """
    import_package("matplotlib", key="benchmarks/pass_at_k.py")
    from matplotlib import style
    from matplotlib.figure import Figure

    curves, kinds = {}, {}
    for name, rates in models.items():
        curves.setdefault(re.sub(r"-s\d+$", "", name), []).append(rates)
    for name in curves:
        kinds.setdefault(name.rsplit("-", 1)[0], []).append(name)
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(6, 3.6), layout="constrained")  # inches
        axes = figure.subplots()
        ks = range(1, len(rates) + 1)
        for i, names in enumerate(kinds.values()):
            color = COLORS[i % len(COLORS)]
            for j, name in enumerate(names, 1 - len(names)):  # the last one's line is solid
                rates, line = np.array(curves[name]), DASHES[-j % len(DASHES)]
                low, high = rates.min(0), rates.max(0)
                axes.fill_between(ks, low, high, color=color, alpha=0.2, linewidth=0)
                axes.plot(ks, rates.mean(0), label=name, color=color, linestyle=line)
        axes.set_xscale("log", base=2)
        axes.set(xlabel="k, samples of a question", ylabel="share solved (pass@k)", ylim=(0, 1))
        figure.suptitle(title, size=12, weight="bold", x=0.01, ha="left")
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.legend()
        figure.savefig(file, dpi=200)
    print(f"written: {file}")


if __name__ == "__main__":
    main()
