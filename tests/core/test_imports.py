"""Which module may import which, and what a run loads."""

import ast
import functools
import json
import subprocess
import sys

import harness
from harness import ENVIRONMENT, ROOT, assert_same, table

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
    places = ("*.py", "engine/**/*.py", "tasks/*.py", "tools/*.py")
    paths = [path for place in places for path in ROOT.glob(place)]
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    after = {name: {m for m in imported(path) if m in files} for name, path in files.items()}
    while leaves := [name for name in after if not after[name] & after.keys()]:
        for name in leaves:
            del after[name]
    assert not after, f"in or before a circle: {sorted(after)}"


@functools.cache
def imported(path) -> list[str]:
    """The modules that a file imports anywhere, by their full names."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return modules


OPTIONAL = {"vllm", "peft", "bitsandbytes", "datasets", "mlflow", "wandb", "pandas"}
OPTIONAL |= {"engine.sampling.vllm", "engine.sampling.graphs", "engine.questions.environment"}
OPTIONAL |= {"engine.sampling.calculator", "engine.model.adapters", "engine.update.shards"}
OPTIONAL |= {"engine.update.head", "engine.update.losses", "engine.update.advantages"}
OPTIONAL |= {"engine.questions.reward_functions", "engine.report.boards", "engine.run.merge"}
OPTIONAL |= {"engine.update.user_algorithm", "engine.sampling.stop_texts"}
OPTIONAL |= {"tasks.guess", "tasks.lengths", "tasks.gsm8k"}

RUNS = table("core/runs.yaml")
PROGRAM = """
import json, sys
import main

found, before = {}, set()
for name, arguments in json.loads(sys.argv[1]).items():
    run = main.build_run(main.load_config(arguments))
    main.open_or_resume(run)
    assert main.run_training(run) in (0, 1)  # 1 where no step had anything to learn
    loaded = set(json.loads(sys.argv[2])) & sys.modules.keys()
    found[name] = sorted(loaded - before)
    before |= loaded
print("\\n" + json.dumps(found))
"""


def test_a_feature_that_is_off_is_not_loaded_and_nothing_follows_from_the_hash_seed(
    tmp_path, rotary_model_folder, chat_folder
):
    """The order of a set does: a run of that process is made again in this one."""
    given = {}
    for name, (overrides, _) in RUNS.items():
        model = chat_folder if "environment" in name else rotary_model_folder
        settings = ["training.num_steps=1", *overrides.replace("ROOT", str(ROOT)).split()]
        given[name] = harness.arguments(tmp_path / name, model, *settings)
    command = [sys.executable, "-c", PROGRAM, json.dumps(given), json.dumps(sorted(OPTIONAL))]
    how = {"capture_output": True, "text": True, "timeout": 200}
    how["env"] = ENVIRONMENT | {"PYTHONWARNINGS": "error"}
    result = subprocess.run(command, cwd=ROOT, **how)
    assert (result.returncode, result.stderr) == (0, "")
    found = json.loads(result.stdout.rstrip().split("\n")[-1])
    assert found == {name: sorted(own) for name, (_, own) in RUNS.items()}
    name, again = "a reward's function", tmp_path / "again"
    assert harness.run_main(*given[name], f"run.dir={again}") in (0, 1)
    assert_same(tmp_path / name, again)
