"""Show that two trees of this repository compute the same: run both, and compare what they write.

    python benchmarks/equality.py TREE_A TREE_B                        # every configuration
    python benchmarks/equality.py A B --only default sil --out FILE.md
    python benchmarks/equality.py A B --set-b MAX_LOGITS_BYTES=0       # a constant of tree B
    python benchmarks/equality.py A B --first-gradient                 # up to rounding
    python benchmarks/equality.py --plain [KEY=VALUE ...]              # plain.py against main.py

Each configuration is a short run of main.py, in a process of its own for each tree, one thread a
rank. Equal are: the exit statuses, the newest checkpoint's weights and optimizer, best/, the
metrics of each step that both trees write but time/ and perf/ (the others are named), and of
samples.jsonl, rollouts.jsonl and completions.jsonl the columns that both write. Files may move,
functions may have other names. A run in which no gradient moved anything, or that ended otherwise,
shows nothing. --plain runs both programs of this tree whole, by default config.yaml, in one
process a rank, and compares each token when it is drawn; behind a first other one nothing is.
"""

import argparse
import functools
import gzip
import json
import math
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from planted import copy_tree
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor
from writers import write_data

ROUNDING = 1e-6  # relative L2 difference of gradients that --first-gradient allows
TIMEOUT_S = 600  # of one run
ENDS = ("[0]", f"[{128 + signal.SIGTERM}, 0]")  # the exit statuses of a run, and of a killed one
SHORT = ["run.name=x", "training.num_steps=3", "training.warmup_steps=0"]
SHORT += ["training.num_samples_per_step_global=4", "validation.num_examples=16"]
SHORT += ["validation.every=2", "checkpoint.every=2"]
SHORT += ["logging.rollouts_every=1", "logging.train_samples_every=1"]
SHORT += ["logging.completions_every=1", "logging.samples=3"]  # the default was 3
TINY = ["training.k_best_of_n=[8,8]", "training.max_new_gen_tokens=128"]
TINY += ["validation.best_of_n=2"]
THREE = [*TINY, "training.num_iterations=3"]
GSPO = ["training.policy_loss=gspo", "training.clip_eps=3e-4", "training.clip_eps_high=4e-4"]


class Configuration(NamedTuple):
    overrides: list[str]
    recipe: str | None = None  # in configs/
    num_ranks: int = 1
    is_killed: bool = False  # by SIGTERM after its first step, and started again


def of_recipe(recipe: str, rows: str, *overrides: str) -> Configuration:
    """A recipe with a small model and a few questions of writers.py."""
    files = [f"model.name=DATA/{recipe}"]
    if rows:
        files += [f"task.train=DATA/{rows}-train.jsonl", f"task.eval=DATA/{rows}-eval.jsonl"]
    return Configuration([*files, *overrides], recipe)


PAIRS = "training.num_samples_per_step_global=16"  # of completions: two of a question often tie
LENGTHS = ["training.max_new_gen_tokens=24", "validation.max_new_gen_tokens=24"]
CONFIGURATIONS = {
    "default": Configuration(TINY),
    "sil": Configuration([*TINY, "training.learning_type=sil", "training.k_best_of_n=[2,16]"]),
    "gsm8k-lora": of_recipe("gsm8k-lora", "gsm8k", *LENGTHS, PAIRS),
    "gsm8k-chat-rl": of_recipe("gsm8k-chat-rl", "gsm8k", *LENGTHS),
    "math-rlvr": of_recipe("math-rlvr", "math", *LENGTHS),
    "ppo": Configuration(THREE),
    "tis": Configuration([*THREE, "training.tis_clip=2", "model.compute_dtype=bfloat16"]),
    "gspo-kl": Configuration([*THREE, *GSPO, "training.kl_coef=0.04"]),
    "shard": Configuration([*TINY, "model.shard=true"], num_ranks=2),
    "ddp": Configuration(TINY, num_ranks=2),
    "guess": of_recipe("guess-smollm2", "", "sampling.stop=[]", "training.max_new_gen_tokens=200"),
    "killed": Configuration([*TINY, "training.num_steps=6"], is_killed=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", type=Path, nargs="*", help="two of them")
    parser.add_argument("--plain", nargs="*", metavar="KEY=VALUE", help="plain.py against main.py")
    parser.add_argument("--only", nargs="+", choices=CONFIGURATIONS, default=[*CONFIGURATIONS])
    parser.add_argument("--out", type=Path, help="a file that gets the table too")
    parser.add_argument("--set-b", metavar="NAME=VALUE", help="a constant of a module of tree B")
    parser.add_argument("--first-gradient", action="store_true", help="compare that alone")
    options = parser.parse_args()
    if options.plain is not None:
        sys.exit(compare_plain(options.plain))
    start, is_first = time.perf_counter(), options.first_gradient
    lines = [f"A is {revision(options.trees[0])}, B is {revision(options.trees[1])}"]
    lines[0] += f" with {options.set_b}.\n" if options.set_b else ".\n"
    lines += ["| configuration | B against A | seconds A, B |", "|---|---|---|"]
    print("\n".join(lines), flush=True)
    num_equal = 0
    with tempfile.TemporaryDirectory() as temporary:
        data, (a, b) = Path(temporary, "DATA"), (tree.resolve() for tree in options.trees)
        write_data(data)
        if options.set_b:
            b = with_constant(*options.set_b.split("=", 1), copy_tree(b, Path(temporary, "tree")))
        for name in options.only:
            runs = [Path(temporary, name, side) for side in "AB"]
            took = [run(tree, name, data, runs[i], is_first) for i, tree in enumerate((a, b))]
            verdict = gradient_verdict(*runs) if is_first else next(differences(*runs))
            num_equal += verdict.startswith("equal")
            lines.append(f"| {name} | {verdict} | {took[0]:.0f}, {took[1]:.0f} |")
            print(lines[-1], flush=True)
    minutes = (time.perf_counter() - start) / 60
    lines.append(f"\n{num_equal} of {len(options.only)} are equal; {minutes:.1f} minutes.")
    print(lines[-1])
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    sys.exit(num_equal < len(options.only))


def compare_plain(given: list[str]) -> int:
    """The exit status; on two ranks, as tests/run/test_plain.py does it in short runs."""
    root = Path(__file__).resolve().parents[1]
    sys.path += map(str, (root, root / "tests", root / "tests/run"))
    from harness import free_port, run_on_ranks
    from test_plain import both_as_they_are

    with tempfile.TemporaryDirectory() as folder:
        arguments = ([*given, f"run.dir={folder}"], free_port())
        how = {"folder": Path(folder), "timeout_s": 36_000}
        ranks = run_on_ranks(both_as_they_are, 2, *arguments, **how)
        theirs, ours = (Path(folder, name) for name in ("main", "plain"))
        rows, others = (read_rows(run / "metrics.jsonl") for run in (ours, theirs))
        is_equal = [a.items() <= b.items() for a, b in zip(rows, others, strict=True)]
        weights = load_file(ours / "last/model.safetensors")
        same = load_file(theirs / "checkpoints/last/model.safetensors")
    parted = [place for rank in ranks for place in rank["parted"]]
    first = min((place["call"] for place in parted), default=None)  # a call samples a row
    print(f"first other tokens: {[place for place in parted if place['call'] == first]}")
    print(f"equal rows of metrics: {''.join('-='[equal] for equal in is_equal)}")
    print(next(numbers_differ("weights", same, weights), f"weights: all {len(same)} are equal"))
    print(f"minutes of main.py and plain.py: {[round(s / 60, 1) for s in ranks[0]['seconds']]}")
    print(f"pass@1: {[row['eval/pass@1'] for row in rows if 'eval/pass@1' in row]}")
    return 0 if all(is_equal[:first]) else 1


def revision(tree: Path) -> str:
    """The commit of a tree, and whether files differ from it."""
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True).stdout.strip()


def with_constant(name: str, value: str, tree: Path) -> Path:
    """Give the one module-level constant of this name another value, in a copy of a tree."""
    expression = rf"(?m)^{name}(: [^=\n]+)? = .*$"
    apart = [tree / "tests", tree / "benchmarks"]
    files = [f for f in tree.rglob("*.py") if not any(map(f.is_relative_to, apart))]
    files = [file for file in files if re.search(expression, file.read_text())]
    assert len(files) == 1, f"{name} is assigned at the top of {len(files)} files, not of one"
    text = re.sub(expression, f"{name} = {value}", files[0].read_text())
    compile(text, files[0].name, "exec")  # the old value may have had several lines
    files[0].write_text(text)
    return tree


# A run


def run(tree: Path, name: str, data: Path, folder: Path, saves_gradient: bool) -> float:
    """Run a configuration of a tree in `folder`; returns the seconds."""
    configuration, program = CONFIGURATIONS[name], ["main.py"]
    folder.mkdir(parents=True)
    if saves_gradient:
        program = [__file__, "--launch", str(folder / "gradient")]
    if configuration.num_ranks > 1:
        ranks = f"--nproc-per-node={configuration.num_ranks}"
        program = ["-m", "torch.distributed.run", "--standalone", ranks, *program]
    if configuration.recipe:
        program += ["--config", f"configs/{configuration.recipe}.yaml"]
    overrides = [*SHORT, *configuration.overrides, f"run.dir={folder}"]
    program += [override.replace("DATA", str(data)) for override in overrides]
    start = time.perf_counter()
    statuses = [execute(program, tree, folder, kills=configuration.is_killed)]
    if configuration.is_killed:
        statuses.append(execute(program, tree, folder))
    (folder / "statuses").write_text(str(statuses))
    if str(statuses) != ENDS[configuration.is_killed]:
        print(f"{name} ended with {statuses}: {(folder / 'log').read_text()[-6000:]}")
    return time.perf_counter() - start


def execute(program: list[str], tree: Path, folder: Path, *, kills: bool = False) -> int:
    """The exit status; `kills` sends SIGTERM once the first step is in metrics.jsonl."""
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    settings |= {"GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": ""}
    how = {"cwd": tree, "env": os.environ | settings, "start_new_session": True}
    with (folder / "log").open("a") as log:
        process = subprocess.Popen([sys.executable, *program], stdout=log, stderr=log, **how)
        while kills and process.poll() is None:
            time.sleep(0.02)
            if any(row["step"] >= 1 for row in read_rows(folder / "x/metrics.jsonl")):
                process.send_signal(signal.SIGTERM)
                break
        try:
            return process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def launch(file: str, arguments: list[str]) -> None:
    """main.py of the current folder, which writes the first gradient that it clips, each rank's."""
    sys.argv, sys.path[0] = ["main.py", *arguments], os.getcwd()
    save = functools.partial(save_first, torch.nn.utils.clip_grad_norm_)
    torch.nn.utils.clip_grad_norm_ = functools.partial(save, f"{file}-{os.environ.get('RANK', 0)}")
    runpy.run_path("main.py", run_name="__main__")


def save_first(clip: Callable, file: str, parameters: Any, *settings: Any, **named: Any) -> Any:
    """Stands where torch's `clip_grad_norm_` does."""
    parameters = list(parameters)
    if not Path(file).exists():
        gradients = [p.grad for p in parameters if p.grad is not None]
        gradients = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        torch.save(torch.cat([g.detach().double().flatten() for g in gradients]), file)
    return clip(parameters, *settings, **named)


# What two runs wrote


def differences(a: Path, b: Path) -> Iterator[str]:
    """What differs between two runs, the most telling first; "equal" where nothing is left."""
    statuses = [(folder / "statuses").read_text() for folder in (a, b)]
    if statuses[0] != statuses[1]:
        yield f"exit statuses {statuses[0]} and {statuses[1]}"
    if statuses[0] not in ENDS:
        yield f"SHOWS NOTHING: exit statuses {statuses[0]}"
    metrics = [merged(read_rows(folder / "x/metrics.jsonl")) for folder in (a, b)]
    if not any(row.get("train/grad_norm") for row in metrics[0].values()):
        yield "SHOWS NOTHING: no gradient above 0"
    newest = [max((folder / "x/checkpoints").glob("step-??????")) for folder in (a, b)]
    for what, folders in {"weights": newest, "best/": [a / "x/best", b / "x/best"]}.items():
        weights = [
            {f"{p.name}:{k}": v for p in f.rglob("*.safetensors") for k, v in load_file(p).items()}
            for f in folders
        ]
        yield from numbers_differ(what, *weights)
    states = [
        dict(flattened(torch.load(file, weights_only=True)))
        for folder in newest
        for file in folder.rglob("optimizer.pt")  # with model.shard it is in the parts
    ]
    yield from numbers_differ("the optimizer's state", *(states or [{"": 0}] * 2))
    names = [set().union(*m.values()) for m in metrics]
    both, alone = names[0] & names[1], sorted(names[0] ^ names[1])
    rows = [{f"step {s}, {k}": m[s][k] for s in m for k in m[s] if k in both} for m in metrics]
    yield from numbers_differ("metrics", *rows)
    for name in ("samples.jsonl", "rollouts.jsonl", "completions.jsonl"):
        files = [folder / "x" / name for folder in (a, b)]
        mine, others = (sorted(read_rows(file), key=lambda row: row["step"]) for file in files)
        if not (mine and others):
            alone.append(name)
            continue
        columns = mine[0].keys() & others[0].keys()  # a later tree may write one more
        mine, others = ([{c: row[c] for c in columns} for row in rows] for rows in (mine, others))
        if mine != others:
            pairs = list(zip(mine, others, strict=False))
            differ = sorted(c for c in columns if any(one[c] != other[c] for one, other in pairs))
            yield f"{name}: {len(mine)} and {len(others)} rows; columns that differ: {differ}"
    yield f"equal, but not both have {', '.join(alone)}" if alone else "equal"


def numbers_differ(what: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[str]:
    """By how much the numbers or tensors of two dictionaries differ, all together, if they do."""
    if a.keys() != b.keys() or not a:
        yield f"{what}: {len(a)} and {len(b)} names, such as {sorted(a.keys() ^ b.keys())[:3]}"
        return
    pairs = {name: (as_tensor(a[name]), as_tensor(b[name])) for name in a}
    other = [name for name, (x, y) in pairs.items() if x.dtype != y.dtype or not torch.equal(x, y)]
    if other and all(pairs[name][0].shape == pairs[name][1].shape for name in other):
        changes = [(y.double() - x.double()).flatten() for x, y in pairs.values()]
        norm = math.sqrt(sum(x.double().square().sum() for x, _ in pairs.values()))
        largest, distance = max(c.abs().max() for c in changes if len(c)), torch.cat(changes).norm()
        yield f"{what}: at most {largest:.1e}, relative L2 {distance / norm:.1e}, in {other[0]}"
    elif other:
        yield f"{what}: another shape of {other[0]}"


def as_tensor(value: Any) -> torch.Tensor:
    return value if torch.is_tensor(value) else torch.tensor(value, dtype=torch.float64)


def flattened(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and tensors in nested dictionaries and lists, by their path."""
    items = value.items() if isinstance(value, dict) else enumerate(value or [])
    for key, inner in items:
        if isinstance(inner, dict | list | tuple):
            yield from flattened(inner, f"{name}/{key}")
        elif not isinstance(inner, str | None):
            yield f"{name}/{key}", inner


def gradient_verdict(a: Path, b: Path) -> str:
    """The relative L2 difference of the first update's gradient, the largest of all ranks."""
    mine, others = ([torch.load(f) for f in sorted(run.glob("gradient-*"))] for run in (a, b))
    if not mine or [len(g) for g in mine] != [len(g) for g in others] or not mine[0].any():
        return f"gradients of {[len(g) for g in mine]} and {[len(g) for g in others]} numbers"
    distance = max(float((y - x).norm() / x.norm()) for x, y in zip(mine, others, strict=True))
    return f"{'equal' if distance <= ROUNDING else 'differs'}: {distance:.1e}"


def read_rows(file: Path) -> list[dict]:
    """The whole lines of a .jsonl file, which may be growing."""
    text = file.read_text() if file.exists() else ""
    for share in sorted(file.parent.glob(f"{file.stem}-*.jsonl.gz")):  # older trees: one a rank
        text += gzip.decompress(share.read_bytes()).decode()
    return [json.loads(line) for line in text.split("\n")[:-1]]


def merged(rows: list[dict]) -> dict[int, dict[str, float]]:
    """The metrics of each step, but for what a clock says; a null is -1, which no metric is."""
    steps: dict[int, dict[str, float]] = {}
    for row in rows:
        kept = {key: row[key] for key in row if not key.startswith(("time/", "perf/"))}
        kept = {key: -1 if value is None else value for key, value in kept.items()}
        steps.setdefault(row["step"], {}).update(kept)
    return steps


if __name__ == "__main__":
    if sys.argv[1:2] == ["--launch"]:
        launch(sys.argv[2], sys.argv[3:])
    else:
        main()
