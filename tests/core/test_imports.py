"""Which module may import which."""

import ast

from harness import ROOT

ROOMS = ("run", "report", "model", "sampling", "update", "questions", "core")


def test_imports_of_engine_run_down():
    """None from a lower room to a higher one, none to the program, its tasks and its tools."""
    assert {path.name for path in (ROOT / "engine").iterdir() if path.is_dir()} - {
        "__pycache__"
    } == set(ROOMS)
    for path in ROOT.glob("engine/*/*.py"):
        higher = ROOMS[: ROOMS.index(path.parent.name)]
        for node in ast.walk(ast.parse(path.read_text())):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                first, second, *_ = [*module.split("."), ""]
                assert first not in ("main", "tasks", "tools", "countdown"), path
                assert first != "engine" or second not in higher, f"{path}: {module}"
