"""Which functions the default run executes, which files a step needs, where stands what decides.

    OMP_NUM_THREADS=1 python benchmarks/trace.py

main.py runs two steps in this process under Python's profiler, which reports each call of a Python
function, in the backward pass too, and each call of a C function with the function that makes it.
So most of what has a role is known by what it does with tensors, whatever its name is. A step is
what main.py's clock calls one: without evaluation, saving and the log. Lines are those of whole
files, with their comments.
"""

import contextlib
import inspect
import io
import os
import runpy
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch  # noqa: F401  # these two here, since under the profiler their import takes minutes
import transformers  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = ["training.num_steps=2", "validation.num_examples=16", "run.name=x"]
BACKWARD = "run_backward"  # in it torch calls the backward functions that are in Python
ROLES = {  # functions of torch that only this role needs, and functions of ours that have it too
    "decides a token": (
        "softmax multinomial argmax searchsorted topk",
        "draw_uniforms draw_indices",
    ),
    "writes a token, ends a row": ("index_put_ index_add_", "draw append"),
    "a log-probability": ("logsumexp logaddexp log_softmax", "forward token_log_probs"),
    "a gradient": (
        BACKWARD,
        "grpo_advantages make_micro_batch token_weights micro_batch_loss update_policy",
    ),
}


class Trace:
    """A function for `sys.setprofile` that notes which functions of ours run, and in what role."""

    def __init__(self, log: Path) -> None:
        self.log = log  # the run's file is there once all is loaded, and tried out
        self.calls: Counter[CodeType] = Counter()
        self.found: set[tuple[str, CodeType]] = set()
        self.in_step: set[CodeType] = set()
        self.is_backward = self.is_step = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and is_ours(code := frame.f_code):
            self.calls[code] += 1
            # A context manager is called when it is entered and, again, when it is left.
            is_clock = code.co_qualname == "Clock.__call__"
            self.is_step ^= is_clock and frame.f_locals["phase"] == "step"
            if self.is_step:
                self.in_step.add(code)
            for role, (_, names) in ROLES.items():
                if code.co_name in names.split() or (self.is_backward and role == "a gradient"):
                    self.found.add((role, code))
        elif event in ("c_call", "c_return"):
            self.is_backward ^= argument.__name__ == BACKWARD
            for role, (names, _) in ROLES.items():
                if argument.__name__ in names.split() and self.log.exists():
                    while "/torch/" in frame.f_code.co_filename:  # torch is Python in part
                        frame = frame.f_back
                    self.found |= {(role, frame.f_code)} if is_ours(frame.f_code) else set()


def is_ours(code: CodeType) -> bool:
    """Whether it is a function of this repository, and not the body of a class or a module."""
    return code.co_filename.startswith(f"{ROOT}/") and bool(code.co_flags & inspect.CO_OPTIMIZED)


def place(code: CodeType) -> tuple[str, str]:
    """File and name of a function; a comprehension inside of it is a part of it."""
    file = Path(code.co_filename).relative_to(ROOT)
    return str(file), code.co_qualname.partition(".<locals>")[0]


def main() -> None:
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trace = Trace(Path(folder, "x/metrics.jsonl"))
        sys.path[0], sys.argv = str(ROOT), ["main.py", f"run.dir={folder}", *SETTINGS]
        threading.setprofile(trace)
        sys.setprofile(trace)
        try:
            runpy.run_path(str(ROOT / "main.py"), run_name="__main__")
        except SystemExit as end:
            assert end.code == 0, "the run failed"
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    print_functions(trace)
    print_files(trace)
    print_roles(trace)


def print_functions(trace: Trace) -> None:
    """Each function with its lines and the number of calls: main.py, countdown.py, the rest."""
    functions: dict[str, dict[str, tuple[int, int, int]]] = {}
    for code in sorted(trace.calls, key=lambda code: (code.co_firstlineno, len(code.co_qualname))):
        file, name = place(code)
        last = max(line for *_, line in code.co_lines() if line)
        start, end, num_calls = functions.setdefault(file, {}).get(
            name, (code.co_firstlineno, last, trace.calls[code])
        )
        functions[file][name] = start, max(end, last), num_calls
    for file in in_order(functions):
        print(f"\n{file}: {len(functions[file])} functions")
        for name, (start, end, num_calls) in functions[file].items():
            print(f"  {name}  lines {start} to {end}, {num_calls:,} calls")


def print_files(trace: Trace) -> None:
    """The files of which something ran inside a step, with their numbers of lines."""
    files = in_order({place(code)[0] for code in trace.in_step})
    lines = {file: (ROOT / file).read_text(encoding="utf-8").count("\n") for file in files}
    print("\n| file of engine/ inside a step | lines |\n|---|---|")
    engine = [file for file in files if file.startswith("engine/")]
    for file in engine:
        print(f"| {file} | {lines[file]} |")
    others = ", ".join(f"{file} ({lines[file]} lines)" for file in files if file not in engine)
    num_lines = sum(lines[file] for file in engine)
    print(f"\nInside a step: {others}, and {len(engine)} files of engine/ ({num_lines:,} lines).")


def in_order(files: Iterable[str]) -> list[str]:
    return sorted(files, key=lambda file: (file != "main.py", file != "countdown.py", file))


def print_roles(trace: Trace) -> None:
    rows = sorted({([*ROLES].index(role), *place(code)) for role, code in trace.found})
    print("\n| role | function | file |\n|---|---|---|")
    for number, file, name in rows:
        print(f"| {[*ROLES][number]} | {name} | {file} |")
    named = {name for _, names in ROLES.values() for name in names.split()}
    missing = sorted(named - {name.rpartition(".")[2] for *_, name in rows})
    print(f"\nNot executed, or not by this name: {', '.join(missing) or 'none'}.")
    empty = [role for i, role in enumerate(ROLES) if i not in {number for number, *_ in rows}]
    assert not empty, f"nothing was found for {empty}"
    elsewhere = sorted({f"{name} ({file})" for _, file, name in rows if file != "main.py"})
    print(f"Not in main.py: {', '.join(elsewhere)}." if elsewhere else "All stand in main.py.")


if __name__ == "__main__":
    main()
