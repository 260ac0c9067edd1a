"""Which module may import which, and what a run loads."""

import ast
import subprocess
import sys

from harness import ENVIRONMENT, ROOT, arguments

ROOMS = ("run", "report", "model", "sampling", "update", "questions", "core")


def test_imports_of_engine_run_down():
    """None from a lower room to a higher one, none to the program, its logger, tasks and tools."""
    files = list(ROOT.glob("engine/*/*.py"))
    assert {path.parent.name for path in files} == set(ROOMS)
    for path in files:
        higher = ROOMS[: ROOMS.index(path.parent.name)]
        for module in imported(path):
            first, second, *_ = [*module.split("."), ""]
            assert first not in ("main", "logger", "tasks", "tools", "countdown"), path
            assert first != "engine" or second not in higher, f"{path}: {module}"


def test_no_two_modules_import_each_other():
    """A circle holds no matter where an import stands: within a function it is hidden only."""
    paths = [
        p for place in ("*", "engine/**/*", "tasks/*", "tools/*") for p in ROOT.glob(f"{place}.py")
    ]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    after = {name: {m for m in imported(path) if m in files} for name, path in files.items()}
    while leaves := [name for name in after if not after[name] & after.keys()]:
        for name in leaves:
            del after[name]
    assert not after, f"in or before a circle: {sorted(after)}"


def imported(path) -> list[str]:
    """The modules that a file imports anywhere, by their full names."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return modules


# What is off is not loaded

OPTIONAL = {"vllm", "peft", "bitsandbytes", "datasets", "mlflow", "wandb", "pandas"}
OPTIONAL |= {"engine.sampling.vllm", "engine.sampling.graphs", "engine.sampling.environment"}
OPTIONAL |= {"engine.sampling.calculator", "engine.model.adapters", "engine.update.shards"}
OPTIONAL |= {"engine.update.head", "engine.update.losses", "engine.report.boards"}
OPTIONAL |= {"engine.questions.reward_functions", "tasks.guess", "tasks.gsm8k"}
OPTIONAL |= {"engine.update.user_algorithm", "engine.sampling.stop_texts", "engine.report.archive"}
OPTIONAL |= {"engine.model.merge", "tasks.lengths"}

PROGRAM = """
import sys
import main

run = main.build_run(main.load_config(sys.argv[2:]))
main.begin(run)
assert main.run_training(run) in (0, 1)  # 1 where no step had anything to learn
print("loaded:", *set(sys.argv[1].split()) & sys.modules.keys())
"""


def test_a_feature_that_is_off_is_not_loaded(tmp_path, rotary_model_folder, data):
    ours = [name.replace(".", "/") for name in OPTIONAL if "." in name]
    assert all((ROOT / f"{name}.py").exists() for name in ours)
    sizes = ["training.num_samples_per_step=1", "validation.best_of_n=1", "training.num_steps=1"]
    sizes += ["training.k_best_of_n=[2,2]", "training.max_new_gen_tokens=8"]
    given = arguments(tmp_path, rotary_model_folder, *data, *sizes)
    command = [sys.executable, "-c", PROGRAM, " ".join(OPTIONAL), *given]
    how = {"capture_output": True, "text": True, "timeout": 200}
    result = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, **how)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.endswith("\nloaded:\n")
