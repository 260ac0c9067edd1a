"""Plant known bugs in copies of the tree, one in each, and see that a quick test fails at each.

    OMP_NUM_THREADS=1 python benchmarks/planted.py               # two at a time, on two cores
    OMP_NUM_THREADS=1 python benchmarks/planted.py --at-once 8
    OMP_NUM_THREADS=1 python benchmarks/planted.py --only top-p

The bugs stand in planted.txt, five lines each: a name, a file, a regular expression, what takes the
place of its match, and the test that fails then, which is looked for by its name. The expression
must match exactly once. Where the code is rewritten it no longer does, and that is reported like a
bug that no test catches: the expression must then be written anew. First the tests are run on the
tree as it is, since one that fails there shows nothing. Each run of a test is a fork of a process
that has imported the packages.
"""

import argparse
import contextlib
import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TREE = ROOT  # a worker's copy, where the bugs are planted
TIMEOUT_S = 120  # of a test that a bug makes hang
PACKAGES = ("torch.distributed.run", "transformers.modeling_utils", "transformers.models.qwen2")
PACKAGES += ("transformers.models.gpt2", "pytest", "datasets", "peft", "bitsandbytes")
PACKAGES += ("hypothesis.strategies", "anyio.pytest_plugin")  # plugins, with all that they import


class Bug(NamedTuple):
    name: str
    file: str
    expression: str
    replacement: str  # as re.sub takes it
    test: str  # its name, with the file's where two have a test of this name, and a case's [name]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="bugs with this text in their or a test's name")
    parser.add_argument("--tree", type=Path, default=ROOT)
    parser.add_argument("--at-once", type=int, default=2, help="as many copies of the tree")
    options = parser.parse_args()
    bugs = [bug for bug in read_bugs() if options.only in f"{bug.name} {bug.test}"]
    start, num_caught = time.perf_counter(), 0
    # Without bytecode: a file that is changed twice in a second would be taken for the old one.
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    os.environ |= settings | {"GRPO_TEST_KILLS": "all"}  # the tests draw four of many otherwise
    fork = get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(options.at_once, fork, prepare, (options.tree, folder)) as pool,
    ):
        names = sorted({bug.test for bug in bugs})
        parts = [names[first :: options.at_once] for first in range(options.at_once)]
        for failed, output in pool.map(run_tests, filter(None, parts)):
            if failed != "":
                sys.exit(f"{output}\nwithout any bug: {failed or 'not all tests ran'}")
        elapsed_s = time.perf_counter() - start
        print(f"Without a bug all {len(names)} tests pass ({elapsed_s:.0f} s).\n")
        print("| bug | test that failed | seconds |\n|---|---|---|")
        for line, is_caught in pool.map(plant, bugs):
            print(line, flush=True)
            num_caught += is_caught
    elapsed_s = time.perf_counter() - start
    print(f"\n{num_caught} of {len(bugs)} bugs are caught ({elapsed_s:.0f} s).")
    sys.exit(num_caught < len(bugs))


def read_bugs() -> list[Bug]:
    """What planted.txt lists."""
    text = Path(__file__).with_suffix(".txt").read_text()
    keys = ("bug", "file", "find", "with", "test")
    bugs = [re.split(rf"(?m)^(?:{'|'.join(keys)}): ?", block)[1:] for block in text.split("\n\n")]
    return [Bug(*(line.removesuffix("\n") for line in bug)) for bug in bugs]


def prepare(tree: Path, folder: str) -> None:
    """A worker's copy of the tree, and the packages, whose imports would take seconds a test."""
    global TREE
    TREE = copy_tree(tree, Path(folder, f"tree-{os.getpid()}"))
    del sys.path[0]  # benchmarks/, whose files no test imports
    for name in PACKAGES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def plant(bug: Bug) -> tuple[str, bool]:
    """Run the bug's test with it in the tree, then mend that; a table's line, and if it failed."""
    start, failed, file = time.perf_counter(), None, TREE / bug.file
    text = file.read_text() if file.exists() else ""
    planted, num_found = re.subn(bug.expression, bug.replacement, text)
    result = f"NOT PLANTED: the expression matches {num_found} times, not once"
    if num_found == 1:
        file.write_text(planted)
        failed, output = run_tests([bug.test])
        file.write_text(text)
        result = failed or ("NOT CAUGHT" if failed == "" else f"NO TEST RAN: {output[-500:]}")
    return f"| {bug.name} | {result} | {time.perf_counter() - start:.0f} |", bool(failed)


def run_tests(names: list[str]) -> tuple[str | None, str]:
    """The first of the tests that fails, "" if all pass, None if they did not run; their output."""
    ids = []
    for name in names:
        function, bracket, case = name.partition("[")
        stem, _, function = function.rpartition("::")
        files = TREE.glob(f"tests/**/{stem or '*'}.py")
        files = [path for path in files if f"def {function}(" in path.read_text()]
        assert len(files) == 1, f"{name} is in {len(files)} files of tests/: name one"
        ids.append(f"{files[0].relative_to(TREE)}::{function}{bracket}{case}")
    log = TREE.with_suffix(".log")
    process = get_context("fork").Process(target=call_pytest, args=(ids, log))
    process.start()
    process.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what a test has left running
    output = log.read_text(errors="replace")
    failed = re.search(r"^(?:FAILED|ERROR) \S+?::(.+?)(?: - .*)?$", output, re.MULTILINE)
    name = failed[1] if failed and process.exitcode == 1 else {0: ""}.get(process.exitcode)
    return name, output


def call_pytest(ids: list[str], log: Path) -> None:
    """In a fork: `python -m pytest` in the tree, which writes to the file."""
    import pytest

    os.setsid()
    os.chdir(TREE)
    sys.path.insert(0, str(TREE))
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["pytest"]
    how = ["-x", "-n", "0", "-p", "no:cacheprovider", "-rfE", f"--timeout={TIMEOUT_S}"]
    sys.exit(int(pytest.main([*how, *ids])))


def copy_tree(tree: Path, copy: Path) -> Path:
    """A copy of what git tracks or would track of a tree, as it is on the disk; returns `copy`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (tree / name).is_file():  # it may be deleted, and that not yet committed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, copy / name)
    return copy


if __name__ == "__main__":
    main()
