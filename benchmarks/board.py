"""A row of results/board.md: three seeds of a candidate, checked and measured.

    python benchmarks/board.py FOLDER --name "Ada" --change "warm-up of 2 steps"
    python benchmarks/board.py FOLDER --lab hard --name ... --change ... -- training.num_steps=30

FOLDER is a checkout of this repository with whatever was changed in it; this one is the board. What
follows -- goes to the candidate's main.py. It runs on two ranks of one thread each until the lab's
time is over, or until it has finished. It must have the board's model, graders and validation
questions and train on none of these, and the board's own code must find the same pass@1 for its
best model. Nothing else may run. The row goes to the terminal, each seed's run to
FOLDER/runs/board.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import common  # noqa: F401  # first: it finds the script's modules
import numpy as np

from countdown import question_key
from engine import ROOT
from engine.run.config_file import read_file
from tools.plot import points, read_table

LABS = {  # arguments, and the seconds after which pass@1 counts
    "default": ([], 120),
    "hard": (["--config", "configs/countdown-tiny-hard.yaml"], 600),
}
LEVEL = 0.85
FIXED = ("results/countdown-validation.jsonl", "countdown.py")
FIXED += tuple(f"tiny/{path.name}" for path in (ROOT / "tiny").glob("*.json"))
FIXED += ("tiny/model.safetensors",)
MAX_DIFFERENCE = 0.002  # of pass@1, measured again: another order of sums may change a few tokens
QUESTIONS = """import json, sys
from engine.run.config_file import load_config
from main import build_run
run = build_run(load_config(sys.argv[1:]))
print("QUESTIONS" + json.dumps([run.validation_questions, run.stream.questions]))"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("arguments", nargs="*", help="for the candidate's main.py, behind --")
    parser.add_argument("--lab", choices=LABS, default="default")
    parser.add_argument("--name", required=True)
    parser.add_argument("--change", required=True, help="in one line")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    lab, seconds = LABS[options.lab]
    folder, arguments = options.folder.resolve(), [*lab, *options.arguments]
    check_files(folder)
    check_questions(folder, arguments, options.lab, options.seeds)
    curves = []
    for seed in options.seeds:
        wait_for_idle()
        run = train(folder, options.lab, arguments, seed, seconds)
        curves.append(curve_of(run))
        measure_again(run, lab, curves[-1][1].max())
    commit = subprocess.run(
        ["git", "-C", folder, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    command = f"`torchrun --nproc-per-node=2 main.py {' '.join(arguments)}`".replace(" `", "`")
    cells = [options.name, date.today(), commit, options.change, command]
    print(f"| {' | '.join(map(str, [*cells, *figures(curves, seconds)]))} |")


def check_files(folder: Path) -> None:
    """Ends the program where a file of the board's differs in the candidate."""
    for name in FIXED:
        if (folder / name).read_bytes() != (ROOT / name).read_bytes():
            raise SystemExit(f"{folder / name} is not the board's")


def check_questions(folder: Path, arguments: list[str], lab: str, seeds: list[int]) -> None:
    """The candidate is measured on the board's questions, and trained on none of any lab's."""
    asked = {name: questions(ROOT, given)[0] for name, (given, _) in LABS.items()}
    for seed in seeds:
        measured, trained = questions(folder, [*arguments, f"training.seed={seed}"])
        if measured != asked[lab]:
            raise SystemExit("the candidate's validation questions are not the board's")
        if found := sorted(set(trained).intersection(set().union(*asked.values()))):
            raise SystemExit(f"the candidate trains on a validation question: {found[0]}")


def questions(folder: Path, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Keys of the validation and of the training questions that a run in this checkout has."""
    with tempfile.TemporaryDirectory() as runs:
        command = [sys.executable, "-c", QUESTIONS, *arguments, f"run.dir={runs}"]
        done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    found = done.stdout.rpartition("QUESTIONS")[2]
    validation, training = ([question_key(q) for q in split] for split in json.loads(found))
    return validation, training


def wait_for_idle() -> None:
    """Ends the program where others keep the machine busy for two minutes.

    The load is a mean over a minute: what ran last is still in it.
    """
    for _ in range(24):
        if os.getloadavg()[0] < 0.5:
            return
        time.sleep(5)
    raise SystemExit("something else runs on this machine")


def train(folder: Path, lab: str, arguments: list[str], seed: int, seconds: int) -> Path:
    """The candidate's run; it is stopped, and so saves, once the lab's time is over."""
    run = folder / "runs/board" / f"{lab}-s{seed}"
    if run.exists():
        raise SystemExit(f"{run} is there already: remove it")
    where = [f"training.seed={seed}", f"run.dir={run.parent}", f"run.name={run.name}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    process = subprocess.Popen(
        [*command, "main.py", *arguments, *where],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    while process.poll() is None:
        time.sleep(1)
        if elapsed(run) > seconds:
            process.send_signal(signal.SIGTERM)
            process.wait()
            return run
    if process.returncode != 0:
        raise SystemExit(f"{run.name} has failed")
    return run


def elapsed(run: Path) -> float:
    """Seconds of training and evaluating so far."""
    try:
        return float(read_table(run).rows[["time/step_s", "time/eval_s"]].to_numpy().sum())
    except (OSError, ValueError):  # it has only begun
        return 0.0


def curve_of(run: Path) -> np.ndarray:
    """Seconds since training began, and pass@1, of each evaluation: (2, evaluations)."""
    _, minutes, rates, *_ = points(read_table(run), "eval/pass@1", window=1)
    return np.stack([60 * minutes, rates])


def measure_again(run: Path, lab: list[str], expected: float) -> None:
    """The board's own code measures the candidate's best model: the same, but for rounding."""
    limit = read_file(run / "config.yaml")["training"]["max_new_gen_tokens"]
    arguments = [*lab, "mode=evaluate", f"model.name={run / 'best'}"]
    if not lab:
        arguments += [f"task.eval={FIXED[0]}"]
    with tempfile.TemporaryDirectory() as runs:
        where = [f"training.max_new_gen_tokens={limit}", f"run.dir={runs}", "run.name=again"]
        subprocess.run([sys.executable, "main.py", *arguments, *where], cwd=ROOT, check=True)
        (file,) = Path(runs).glob("again/eval-*/metrics.json")
        found = json.loads(file.read_text())["eval/pass@1"]
    if not abs(found - expected) <= MAX_DIFFERENCE:
        raise SystemExit(f"{run}: pass@1 is {found:.4f}, not {expected:.4f} as it says")


def figures(curves: list[np.ndarray], seconds: int) -> list[str]:
    """Of each seed: pass@1 when the time was over, and seconds to the first one of LEVEL."""
    rates = [curve[1, curve[0] <= seconds][-1] for curve in curves]
    reached = [curve[0, curve[1] >= LEVEL] for curve in curves]
    times = [f"{some[0]:.0f}" if len(some) else "not reached" for some in reached]
    return [", ".join(f"{rate:.3f}" for rate in rates), ", ".join(times)]


if __name__ == "__main__":
    main()
