"""What matters: the default run with one thing changed, a row for each, in a table and a picture.

    pip install -r requirements.txt ".[lora,plot]"
    python benchmarks/ablations.py                            # one seed of each row, two at a time
    python benchmarks/ablations.py --rows default zscore --seeds 1 2
    python benchmarks/ablations.py --draw                     # only the table and the picture
    python benchmarks/ablations.py --lab hard                 # the same of questions that are hard
    python benchmarks/ablations.py --lab symptoms             # broken runs and sound ones
    python benchmarks/ablations.py --lab smollm2              # a real model, see below

Each run takes 40 steps on one process with one thread, and as many samples a step as the default on
two ranks. "default" is here the one before today's, with which these runs were made. A run that is
stopped goes on from its last checkpoint in runs/ablations/. The metrics of a run that has ended are
kept in results/ablations.csv, whose column `run` has the row and the seed, and it is not run again.
Table and picture, results/ablations.md and .png, come from that file alone. What one sees in a row
is written by hand in results/ablations.yaml, a sentence for each name. The lab "hard" also has
results/quarrels.md, what was expected of some rows (quarrels.yaml, from before their first run)
beside what came. Rows in SHOWN_ONLY, whose code has left the tree, run at ea4c86e alone.
The lab "symptoms" has the bugs of docs/exercises, each in a copy and by the command of its page,
rewards that teach the wrong thing, and sound runs, of the default's length; with seed 1 kl_coef is
1e-12, so that KL is measured. What those runs warn of is kept too, in columns such as remark/alike.
benchmarks/symptoms.py reads them.

The lab "smollm2" asks whether the claims hold for SmolLM2-135M-Instruct, which adds numbers. It
begins from a model that imitated forty written answers (FOLDER is the model's: see
configs/arithmetic-smollm2.yaml). "smollm2-tuning" is its pilot: the default for longer, on 64 sums
that neither split of the lab has. The lab's runs end at its first evaluation between 0.5 and 0.85
from step 16 on: before, a sampler refreshed every eighth step has been refreshed once at most.

    python -m tools.imitate FOLDER results/smollm2-answers.jsonl --steps 10 --learning-rate 1e-5 \
        --out runs/smollm2-warm task.name=arithmetic "task.system_prompt=You add numbers." \
        training.num_samples_per_step=8 validation.num_examples=64 validation.best_of_n=2

The lab "hard" (configs/countdown-tiny-hard.yaml) has rows of its own, also of variants for which
there is no key (switched.py); its files are named hard instead of ablations. A step of some rows is
much shorter or longer than the default's. They are compared at equal minutes too, below the table:
pass@1 of both when the first of the two had ended, between two evaluations on a straight line. The
learning rate of the slower one has not fallen to 0 there.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from common import keep_run, kept_runs, questions_per_step, seeds_of  # first: modules
from pandas import DataFrame

from engine import ROOT
from engine.core.files import read_lines, write_atomically
from engine.core.packages import import_package
from engine.run.config_file import load_config, read_file
from tools.plot import BEST_OF, COLORS, STYLE, Table, curve_of, points, read_table

NUM_STEPS = 40
CLOSE = 0.02  # a smaller difference in pass@1 is called none by the picture's title
LABS = {
    "ablations": [  # the default that its runs were made with
        "training.learning_rate=2e-4",
        "training.warmup_steps=10",
        "training.max_new_gen_tokens=208",
    ],
    "hard": ["--config", "configs/countdown-tiny-hard.yaml"],
    "symptoms": [],
    "smollm2": [
        "model.name=runs/smollm2-warm",
        "model.attn_implementation=eager",
        "model.compute_dtype=float32",  # as the pilot; auto is bfloat16 on some CPUs
        "task.name=arithmetic",
        "task.system_prompt=You add numbers.",
        "training.num_samples_per_step=4",
        "training.k_best_of_n=[8, 8]",
        "training.max_new_gen_tokens=24",
        "training.micro_batch_tokens=1024",
        "training.learning_rate=1e-5",
        "training.lr_schedule=constant",
        "training.warmup_steps=0",
        "validation.num_examples=256",
        "validation.best_of_n=4",
        "validation.pass_k=[1]",
    ],
}
# Where settings are chosen: 512 questions that are in neither split
LABS["hard-tuning"] = [*LABS["hard"], "task.eval=results/hard-tuning.jsonl"]
TUNING = ["task.eval=results/smollm2-tuning.jsonl", "validation.num_examples=64"]
LABS["smollm2-tuning"] = [*LABS["smollm2"], *TUNING]
STEPS = {"symptoms": load_config([]).training.num_steps, "smollm2": 16, "smollm2-tuning": 32}
# Losses for a sampler that lags behind: name, keys, switches
OWN, DPPO = "training.policy_loss=benchmarks.own:", "training.policy_loss=dppo"
STALE = {
    "": ("plain", [], []),
    "-ppo": ("PPO", [], ["ratio-to-sampler"]),
    "-tis": ("TIS", ["training.tis_clip=2"], []),
    "-cispo": ("CISPO", ["training.policy_loss=cispo"], ["ratio-to-sampler"]),
    "-dppo": ("DPPO", [DPPO], []),
    "-ipo-0.1": ("IPO, 0.1", [OWN + "ipo_10"], []),
    "-ipo-0.3": ("IPO, 0.3", [OWN + "ipo_30"], []),
    "-ipo-0.3-alone": ("IPO, 0.3, no square", [OWN + "ipo_30_alone"], []),
    "-dppo-0.1": ("DPPO, 0.1", [DPPO, "training.dppo_delta=0.1"], ["masked-tokens"]),
    "-dppo-0.2": ("DPPO, 0.2", [DPPO, "training.dppo_delta=0.2"], ["masked-tokens"]),
    "-dppo-0.3": ("DPPO, 0.3", [DPPO, "training.dppo_delta=0.3"], ["masked-tokens"]),
    "-centered": ("score centering", [], ["score-centering"]),
    "-centered-tis": ("score centering, TIS", ["training.tis_clip=2"], ["score-centering"]),
    "-dro-0.1": ("DRO, 0.1", [OWN + "dro_01"], []),
    "-dro-1": ("DRO, 1", [OWN + "dro_1"], []),
    "-sequence-tis": ("TIS by sequence", [OWN + "sequence_tis"], []),
    "-sequence-mask": ("mask by sequence", [OWN + "sequence_mask"], []),
}
AGES = {4: [*STALE][:5], 8: [*STALE]}  # of the sampler, in updates
AGES[16] = ["", "-ppo", "-centered", "-centered-tis", "-ipo-0.1"]  # the three best at an age of 8
# What no key of the config changes: see switched.py
SWITCHES = {
    "top-k-10": "whole-evaluation",
    "bf16-weights": "bf16-weights",
    **{
        f"stale-{age}{ending}": ",".join([f"stale-{age}", *STALE[ending][2]])
        for age, endings in AGES.items()
        for ending in endings
    },
    "sign-sgd": "sign-sgd",
    "default-processor": "processor-time",
    "most-varied-half": "most-varied-half",
    "fresh-questions": "fresh-questions",
    "sil-1-unequal": "unequal-groups",
    "random-reward": "random-reward",
    "length-reward": "length-reward",
    "brevity-reward": "brevity-reward",
}
AT_EQUAL_MINUTES = ("most-varied-half", "fresh-questions")
SHOWN_ONLY = [*AT_EQUAL_MINUTES, "top-k-10", "bf16-weights", "sil-1-unequal", "default-processor"]
SHOWN_ONLY += ["evolution", "entropy-lr-x2", "only-worse", "only-better", "only-wrong"]
SHOWN_ONLY += [
    f"stale-{age}{ending}"
    for age, endings in AGES.items()
    for ending in endings
    if ending.startswith(("-ipo", "-dro", "-dppo-"))
]
# The rows of both labs: what is known to matter, and what others say does
IN_BOTH = ("default", "zscore", "token", "sequence", "sum", "group-4", "group-32", "lr-x0.5")
IN_BOTH += ("lr-x2", "kl-0.02", "sil-1", "lora-r8-lr-x10", "iterations-2", "iterations-4")
# How the pictures name a row
LABELS = {
    "default": "unchanged",
    "zscore": "advantages divided by the standard deviation",
    "token": "loss divided by all tokens (DAPO)",
    "sequence": "loss divided by each completion's length (GRPO)",
    "sum": "loss summed over tokens",
    "group-4": "groups of 4, four times as many",
    "group-8": "groups of 8, twice as many",
    "group-32": "groups of 32, half as many",
    "lr-x0.5": "learning rate halved",
    "lr-x2": "learning rate doubled",
    "lr-x4": "learning rate times 4",
    "kl-0.02": "KL penalty of 0.02",
    "sil-1": "sil, the best of each group",
    "sil-4": "sil, the 4 best of 16",
    "sil-1-unequal": "sil, groups of equals left out",
    "muon": "Muon instead of AdamW",
    "lora-r8": "LoRA of rank 8",
    "lora-r8-lr-x10": "LoRA of rank 8, learning rate times 10",
    "lora-r1-lr-x10": "LoRA of rank 1, learning rate times 10",
    "temperature-0.7": "temperature 0.7",
    "top-k-10": "top-k of 10",
    "skip-truncated": "cut-off completions left out",
    "bf16-arithmetic": "arithmetic in bfloat16",
    "bf16-weights": "weights in bfloat16",
    "iterations-2": "2 updates a batch, PPO's clip",
    "iterations-4": "4 updates a batch, PPO's clip",
    "iterations-4-dppo": "4 updates a batch, DPPO",
    "iterations-4-unclipped": "4 updates a batch, no clip",
    "zscore-lr-x0.5": "standard deviation, learning rate halved",
    "zscore-lr-x2": "standard deviation, learning rate doubled",
    "clipped": "gradients clipped at 0.005",
    "zscore-clipped": "standard deviation, gradients clipped at 0.005",
    "cispo": "4 updates a batch, CISPO",
    "gspo": "4 updates a batch, GSPO",
    "gspo-clip-x10": "4 updates a batch, GSPO, clip times 10",
    "answer": "no reward for the form",
    "answer-zscore": "no reward for the form, standard deviation",
    "rloo": "your own advantage: leave one out (RLOO)",
    "over-mean": "advantages divided by the mean (MaxRL)",
    "answer-over-mean": "no reward for the form, over the mean (MaxRL)",
    "most-varied-half": "only the more varied half of each group",
    "fresh-questions": "groups of equals drawn anew (DAPO)",
    "random-reward": "a random reward",
    "length-reward": "a reward for length",
    "default-processor": "unchanged, processor minutes",
    "sign-sgd": "sign-SGD instead of AdamW",
    "evolution": "evolution strategies, processor minutes",
    "entropy-lr-x2": "learning rate doubled, entropy bonus",
    "only-worse": "only advantages below 0",
    "only-better": "only advantages above 0",
    "only-wrong": "-1 for each wrong answer (NSR)",
    "only-right": "1 for each right answer (PSR)",
}
SIX = {  # README's picture
    "default": "unchanged",
    "sil-1": "sil: imitate the best of 16",
    "kl-0.02": "with a KL penalty of 0.02",
    "stale-8": "trained on samples up to seven updates old",
    "length-reward": "paid for length, not for answers",
    "random-reward": "paid at random",
}
SOUND = ("default", "sil")  # of the lab "symptoms"; its other rows are broken runs
COPIES = ROOT / "runs/symptoms/copies"
SIGN_RATES = {f"sign-sgd-x{factor}": factor * 3e-4 for factor in (0.25, 0.5, 1, 2)}
EVOLUTIONS = [f"evolution-{sigma}-x{factor}" for sigma in (0.01, 0.03) for factor in (0.5, 2)]
SHOWN_ONLY += EVOLUTIONS
SWITCHES |= dict.fromkeys(SIGN_RATES, "sign-sgd")
LABELS |= {name: name for name in (*SIGN_RATES, *EVOLUTIONS)}  # the trials
for age, endings in AGES.items():
    for ending in endings:
        LABELS[f"stale-{age}{ending}"] = f"samples up to {age - 1} updates old, {STALE[ending][0]}"
QUICK = [
    "training.num_steps=2",
    "training.max_new_gen_tokens=64",  # long enough for an answer
    "validation.num_examples=4",
    "validation.best_of_n=2",
    "validation.pass_k=[1]",
    "checkpoint.every=1",
]


def make_rows(questions: int, lab: str = "ablations") -> dict[str, list[str]]:
    """The name of each row and the keys that it changes; `questions` are those of a step.

    All rows sample as many completions in a step.
    """
    default = load_config(LABS[lab]).training
    num_samples, rate = questions * default.group_size, default.learning_rate
    rows = {
        "default": [],
        "zscore": ["training.advantage=zscore"],
        **{name: [f"training.loss_normalization={name}"] for name in ("token", "sequence", "sum")},
    }
    for size in (4, 8, 32):
        rows[f"group-{size}"] = [
            f"training.k_best_of_n=[{size}, {size}]",
            f"training.num_samples_per_step_global={num_samples // size}",
        ]
    for factor in (0.5, 2, 4):
        rows[f"lr-x{factor}"] = [f"training.learning_rate={rate * factor:g}"]
    rows |= {
        "kl-0.02": ["training.kl_coef=0.02"],
        "sil-1": ["training.learning_type=sil", f"training.k_best_of_n=[1, {default.group_size}]"],
        "sil-4": ["training.learning_type=sil", f"training.k_best_of_n=[4, {default.group_size}]"],
        "muon": ["training.optimizer=muon"],
        "lora-r8": ["model.lora={r: 8}"],
        "lora-r8-lr-x10": ["model.lora={r: 8}", f"training.learning_rate={rate * 10:g}"],
        "temperature-0.7": ["sampling.temperature=0.7"],
        "top-k-10": ["sampling.top_k=10"],
        "skip-truncated": ["training.skip_truncated=true"],
        "bf16-arithmetic": ["model.compute_dtype=bfloat16"],
        "bf16-weights": ["model.compute_dtype=bfloat16"],
        "iterations-2": ["training.num_iterations=2"],
        "iterations-4": ["training.num_iterations=4"],
        "cispo": ["training.num_iterations=4", "training.policy_loss=cispo"],
    }
    # GSPO's paper clips at 3e-4 and 4e-4, where the learning rate is 100 times lower than here.
    for name, low, high in (("gspo", 3e-4, 4e-4), ("gspo-clip-x10", 3e-3, 4e-3)):
        rows[name] = [
            "training.num_iterations=4",
            "training.policy_loss=gspo",
            f"training.clip_eps={low}",
            f"training.clip_eps_high={high}",
        ]
    return rows


def make_hard_rows(questions: int) -> dict[str, list[str]]:
    """The same for the lab of hard questions."""
    both = make_rows(questions, "hard")
    rows = {name: both[name] for name in IN_BOTH}
    rows["iterations-4-dppo"] = ["training.num_iterations=4", "training.policy_loss=dppo"]
    rows["iterations-4-unclipped"] = ["training.num_iterations=4", OWN + "unclipped"]
    clipped = "training.max_grad_norm=0.005"
    rows |= {f"zscore-{name}": rows["zscore"] + rows[name] for name in ("lr-x0.5", "lr-x2")}
    rows |= {"clipped": [clipped], "zscore-clipped": [*rows["zscore"], clipped]}
    for age, endings in AGES.items():
        rows |= {f"stale-{age}{ending}": STALE[ending][1] for ending in endings}
    answer = "task.reward_weights={format: 0.0, answer: 1.0}"
    return rows | {
        "answer": [answer],
        "answer-zscore": [answer, "training.advantage=zscore"],
        "answer-over-mean": [answer, "training.advantage=over_mean"],
        "rloo": ["training.advantage=benchmarks.rloo:rloo"],
        "lora-r1-lr-x10": ["model.lora={r: 1}", *rows["lora-r8-lr-x10"][1:]],
        "most-varied-half": [],
        "fresh-questions": [],
        "sil-1-unequal": rows["sil-1"],
        "random-reward": [],
        "length-reward": [],
        "default-processor": [],
        "sign-sgd": [f"training.learning_rate={SIGN_RATES['sign-sgd-x2']:g}"],  # so too
        "evolution": [],
        "entropy-lr-x2": ["training.policy_loss=benchmarks.own:entropy_001", *rows["lr-x2"]],
        **{
            name: [f"training.advantage=benchmarks.own:{name.replace('-', '_')}"]
            for name in ("only-worse", "only-better", "only-wrong", "only-right")
        },
    }


def make_tuning_rows(questions: int) -> dict[str, list[str]]:
    """The trials by which sign-SGD's rate and evolution strategies' two numbers were chosen."""
    rates = {name: [f"training.learning_rate={rate:g}"] for name, rate in SIGN_RATES.items()}
    return rates | {name: [] for name in EVOLUTIONS}


def make_smollm2(questions: int) -> dict[str, list[str]]:
    """Of the claims of three seeds those that a model that adds numbers can be asked about."""
    ours, hard = make_rows(questions, "smollm2"), make_hard_rows(questions)
    rows = {name: ours[name] for name in ("default", "sil-1", "kl-0.02", "zscore")}
    for name in ("stale-8", "stale-8-ppo", "stale-8-centered", "only-right", "random-reward"):
        rows[name] = hard[name]
    return rows | {
        "lora-r1-lr-x10": ["model.lora={r: 1}", *ours["lora-r8-lr-x10"][1:]],
        "sign-sgd": ours["lr-x2"],
        "over-mean": ["training.advantage=over_mean"],
    }


def make_smollm2_pilot(questions: int) -> dict[str, list[str]]:
    return {"default": []}


def make_symptoms(questions: int) -> dict[str, list[str]]:
    """Runs whose end is known by what they are: SOUND, and rewards and bugs that break them."""
    hub, files = COPIES / "bug-10/hub", COPIES / "bug-9"
    return {
        "default": [],
        "sil": [
            "training.learning_type=sil",
            "training.k_best_of_n=[2, 32]",
            "training.learning_rate=4e-4",
        ],
        **{f"{name}-reward": [] for name in ("length", "random", "brevity")},
        "bug-1": [],
        "bug-2": [],
        "bug-3": ["sampling.temperature=0.7"],
        "bug-4": ["training.micro_batch_tokens=2048"],
        "bug-5": [],
        "bug-7": [],
        "bug-8": ["task.reward_weights.answer=0", "training.k_best_of_n=[12,12]"],
        "bug-9": [
            f"task.train={files}/train.jsonl",
            f"task.eval={files}/held.jsonl",
            "validation.num_examples=16",
        ],
        "bug-10": [
            f"model.name={hub}",
            "training.learning_rate=6e-4",
            "sampling.backend=generate",
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lab", choices=LABS, default="ablations")
    parser.add_argument("--rows", nargs="+", help="names; all of them unless given")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, each on one core")
    parser.add_argument("--out", type=Path, default=ROOT / "results")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    parser.add_argument("--quick", action="store_true", help="two tiny steps: does it run?")
    options = parser.parse_args()
    makers = {"hard": make_hard_rows, "hard-tuning": make_tuning_rows, "symptoms": make_symptoms}
    makers |= {"smollm2": make_smollm2, "smollm2-tuning": make_smollm2_pilot}
    rows = makers.get(options.lab, make_rows)(
        2 if options.quick else questions_per_step(LABS[options.lab])
    )
    can_run = [row for row in rows if row not in SHOWN_ONLY]
    if unknown := set(options.rows or ()) - set(can_run):
        parser.error(f"{', '.join(unknown)}: must be among {', '.join(can_run)}")
    options.rows = options.rows or can_run
    file = options.out / f"{options.lab}.csv"
    failed = [] if options.draw else run_all(rows, file, options)
    runs = kept_runs(file)
    if options.lab != "symptoms":
        write_table(rows, runs, file.with_suffix(".md"))
        names = {row: LABELS[row] for row in rows}
        draw(names, runs, file.with_suffix(".png"), closeness(names, runs))
    if options.lab == "hard":
        draw(SIX, runs, options.out / "six.png", "pass@1 after 40 steps of hard questions")
        write_quarrels(rows, runs, options.out / "quarrels.md")
    if failed:
        raise SystemExit(f"failed, see their logs: {', '.join(failed)}")


# The runs


def run_all(rows: dict[str, list[str]], file: Path, options: argparse.Namespace) -> list[str]:
    """Run what has no metrics in `file` yet; returns the names of the runs that failed.

    All rows of one seed come before the next seed. A sampler that lags behind is in no checkpoint:
    a run with one that was stopped begins again.
    """
    folder = (options.out if options.quick else ROOT) / "runs" / options.lab
    folder.mkdir(parents=True, exist_ok=True)
    commands, kept = {}, kept_runs(file)
    for seed in options.seeds:
        for row in options.rows:
            name = f"{row}-s{seed}"
            if name not in kept:
                where = [f"run.dir={folder}", f"run.name={name}", f"training.seed={seed}"]
                steps = STEPS.get(options.lab, NUM_STEPS)
                sizes = QUICK if options.quick else [f"training.num_steps={steps}"]
                questions = 2 if options.quick else questions_per_step(LABS[options.lab])
                sizes = [f"training.num_samples_per_step_global={questions}", *sizes]
                if options.lab == "symptoms":
                    sizes += ["training.kl_coef=1e-12"] * (seed == 1)
                elif options.lab == "smollm2-tuning":
                    sizes.append("validation.every=4")
                elif options.lab != "ablations":  # a curve over minutes needs more points
                    is_curve = options.lab == "hard" and row in ("default", *AT_EQUAL_MINUTES)
                    sizes.append(f"validation.every={10 if is_curve else steps}")
                commands[name] = [*program_of(row), *LABS[options.lab], *where, *sizes, *rows[row]]
                if row.startswith("stale-"):
                    shutil.rmtree(folder / name, ignore_errors=True)
    pool = ThreadPoolExecutor(options.jobs)
    try:
        ended = pool.map(lambda name: run_one(name, commands[name], folder, file), commands)
        return [name for name, is_done in zip(commands, ended, strict=True) if not is_done]
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C: those that run end by themselves


def program_of(row: str) -> list[str]:
    if row in SWITCHES:
        return [sys.executable, "benchmarks/switched.py", SWITCHES[row]]
    if row.startswith("bug-"):
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node=2"] if row == "bug-5" else []
        return [sys.executable, *ranks, str(plant(row) / "main.py")]
    return [sys.executable, "main.py"]


def plant(row: str) -> Path:
    """A copy of the program with an exercise's bug, and the files that its page's script writes."""
    number, copy = row.removeprefix("bug-"), COPIES / row
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        exercise = [sys.executable, "-m", "tools.exercise", number, str(copy)]
        subprocess.run(exercise, cwd=ROOT, check=True)
        page = (ROOT / f"docs/exercises/{int(number):02}.md").read_text("utf-8")
        if script := re.search(r"```python\n(.+?)```", page, re.DOTALL):
            subprocess.run([sys.executable, "-c", script[1]], cwd=copy, check=True)
    return copy


def run_one(name: str, command: list[str], folder: Path, file: Path) -> bool:
    """Run it with one thread; if it ended well, keep its metrics in `file`, a row for a step."""
    with (folder / f"{name}.log").open("a") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        status = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    is_symptom = folder.name == "symptoms"
    is_done = status == 0 or (is_symptom and status == 1)  # 1: nothing was trained
    if is_done:
        rows = read_table(folder / name).rows.astype({"step": int})
        for said in read_lines(folder / name / "remarks.jsonl") if is_symptom else []:
            rows.loc[rows["step"] == said["step"], f"remark/{said['kind']}"] = 1
        keep_run(file, name, rows)
    print(f"{name}: {'done' if status == 0 else f'status {status}'}", flush=True)
    return is_done


# What is seen


def last_values(runs: dict[str, DataFrame], row: str) -> np.ndarray:
    """pass@1, best of n and minutes at the end of each seed of a row, (seeds, 3)."""
    values = []
    for run in seeds_of(runs, row).items():
        table = Table(*run)
        _, minutes, rates, *_ = points(table, "eval/pass@1", window=1)
        values.append([rates[-1], points(table, BEST_OF, window=1)[2, -1], minutes[-1]])
    return np.array(values).reshape(-1, 3)


def titles(lab: str) -> tuple[str, str]:
    return "pass@1", f"best of {load_config(LABS[lab]).validation.best_of_n}"


def shown(values: np.ndarray, decimals: int) -> str:
    """The mean and, of several seeds, their range."""
    mean, low, high = (f"{value:.{decimals}f}" for value in (values.mean(), *bounds(values)))
    return mean if len(values) == 1 else f"{mean} ({low} to {high})"


def bounds(values: np.ndarray) -> tuple[float, float]:
    return float(values.min()), float(values.max())


def write_table(rows: dict[str, list[str]], runs: dict[str, DataFrame], file: Path) -> None:
    """A line of Markdown for each row; those without a run say so."""
    by_hand = file.with_suffix(".yaml")
    remarks = read_file(by_hand) if by_hand.exists() else {}
    lines = [
        f"| row | changed | seeds | {' | '.join(titles(file.stem))} | minutes | what one sees |",
        "|---|---|---|---|---|---|---|",
    ]
    for row, overrides in rows.items():
        values = last_values(runs, row)
        figures = ["not run", "", ""]
        if len(values):
            figures = [shown(values[:, i], decimals) for i, decimals in enumerate((3, 3, 1))]
        changes = [*overrides, f"switched.py {SWITCHES[row]}"] if row in SWITCHES else overrides
        changed = " ".join(f"`{change}`" for change in changes)
        cells = [row, changed, len(values), *figures, remarks.get(row, "")]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    compared = [at_equal_minutes(runs, row) for row in AT_EQUAL_MINUTES if row in rows]
    if found := [line for line in compared if line]:
        lines += ["", "pass@1 at equal minutes:", "", *found]
    write_atomically(file, "\n".join(lines) + "\n")
    print(f"written: {file}")


def at_equal_minutes(runs: dict[str, DataFrame], row: str) -> str:
    """pass@1 of a row and of the default when the first of them has ended; "" without both.

    The default's are its runs of then: those in its row ran while other work did.
    """
    both = [seeds_of(runs, name).items() for name in (row, "earlier-default")]
    if not all(both):
        return ""
    curves = [curve_of([Table(*run) for run in some], "eval/pass@1", window=1) for some in both]
    minutes = min(curve[1, -1] for curve in curves)
    ours, default = (float(np.interp(minutes, curve[1], curve[2])) for curve in curves)
    return f"- {row}: {ours:.3f} after {minutes:.1f} minutes, the default {default:.3f}"


def write_quarrels(rows: dict[str, list[str]], runs: dict[str, DataFrame], file: Path) -> None:
    """Of the rows in quarrels.yaml what was expected, and what came; with a picture of them."""
    heads = ["row", "loss of a token", "from", "expected", "seeds", *titles("hard"), "against"]
    lines, shown_rows = [heads, ["---"] * len(heads)], {"default"}
    for name, row in read_file(ROOT / "results/quarrels.yaml").items():
        values, others = last_values(runs, name), {}
        if len(values):
            theirs = {other: last_values(runs, other) for other in row["against"]}
            others = {other: verdict(values, them) for other, them in theirs.items() if len(them)}
        came = [shown(values[:, i], 3) for i in (0, 1)] if len(values) else ["not run", ""]
        texts = (row[key].replace("|", r"\|") for key in ("formula", "source", "expected"))
        against = "; ".join(f"{other}: {words}" for other, words in others.items())
        lines.append([name, *texts, len(values), *came, against])
        shown_rows |= {name, *row["against"]}
    write_atomically(file, "".join(f"| {' | '.join(map(str, cells))} |\n" for cells in lines))
    names = {row: LABELS[row] for row in rows if row in shown_rows}
    draw(names, runs, file.with_suffix(".png"), closeness(names, runs))


def verdict(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Whether pass@1 and best of 8 are above or below, or equal: the seeds' ranges meet."""
    few, words = min(len(ours), len(theirs)), []
    for i in (0, 1):
        (low, high), (their_low, their_high) = bounds(ours[:, i]), bounds(theirs[:, i])
        words.append("above" if low > their_high else "below" if high < their_low else "equal")
    return ", ".join(words) + (f" ({few} seed{'s' * (few > 1)})" if few < 3 else "")


def closeness(rows: Iterable[str], runs: dict[str, DataFrame]) -> str:
    """How many rows end near the default, as a picture's title."""
    means = {row: values[:, 0].mean() for row in rows if len(values := last_values(runs, row))}
    default = means.pop("default", np.nan)
    num_close = sum(abs(mean - default) < CLOSE for mean in means.values())
    return f"{num_close} of {len(means)} changes move pass@1 by less than {CLOSE}"


def draw(labels: dict[str, str], runs: dict[str, DataFrame], file: Path, title: str) -> None:
    """pass@1 of each row, the best at the top: a point for each seed, a stroke for their mean.

    The default's mean goes through all rows.
    """
    import_package("matplotlib", key="benchmarks/ablations.py")
    from matplotlib import style
    from matplotlib.figure import Figure

    measured = {row: last_values(runs, row)[:, 0] for row in labels}
    measured = {row: rates for row, rates in measured.items() if len(rates)}
    names = sorted(measured, key=lambda row: measured[row].mean())
    with style.context(STYLE, after_reset=True):
        figure = Figure(figsize=(8, 1 + 0.19 * len(names)), layout="constrained")  # inches
        axes = figure.subplots()
        for y, name in enumerate(names):
            rates, mean = measured[name], measured[name].mean()
            color = COLORS[1] if name == "default" else COLORS[0]
            axes.plot(bounds(rates), (y, y), color=color, linewidth=0.8)
            axes.plot(rates, [y] * len(rates), "o", color=color, markersize=3.5)
            if len(rates) > 1:
                axes.plot(mean, y, "|", color=color, markersize=9, markeredgewidth=1.5)
            right = axes.get_yaxis_transform()  # x is a share of the axis
            axes.text(1.01, y, f"{mean:.3f}", va="center", color=color, transform=right)
        if "default" in measured:
            default = measured["default"].mean()
            axes.axvline(default, color=COLORS[1], linewidth=0.8, linestyle=":")
        figure.suptitle(title, size=12, weight="bold", x=0.01, ha="left")
        axes.set(
            xlim=(0, None), yticks=range(len(names)), yticklabels=[labels[name] for name in names]
        )
        axes.set(
            xlabel=f"pass@1 after {STEPS.get(file.stem, NUM_STEPS)} steps",
            ylim=(-0.7, len(names) - 0.3),
        )
        figure.savefig(file, dpi=200)
    print(f"written: {file}")


if __name__ == "__main__":
    main()
