"""Code tokens: what Python's tokenizer gives without comments, layout and docstrings.

python tests/code_tokens.py prints them of each room, with the share of the statements that assign
one written-out tuple to another. A text between statements explains a field: a docstring too.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

LAYOUT = ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENCODING", "ENDMARKER")
ROOMS = ("plain.py", "main.py", "countdown.py", "logger.py", "engine", "tasks", "tools")


def count(source: str) -> int:
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docstrings = {(t.lineno, t.col_offset) for t in texts if is_text(t)}
    num_tokens = depth = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        name = tokenize.tok_name[token.type]
        if depth == 0 and name not in LAYOUT and token.start not in docstrings:
            num_tokens += 1
        depth += (name == "FSTRING_START") - (name == "FSTRING_END")  # split since Python 3.12
    return num_tokens


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def packed_share(sources: list[str]) -> float:
    nodes = [node for source in sources for node in ast.walk(ast.parse(source))]
    statements = [node for node in nodes if isinstance(node, ast.stmt)]
    assignments = [node for node in statements if isinstance(node, ast.Assign)]
    sides = [(node.targets[0], node.value) for node in assignments]
    packed = [side for side in sides if all(isinstance(half, ast.Tuple) for half in side)]
    return len(packed) / len(statements)


def sources_of(room: str) -> list[str]:
    path = Path(__file__).parents[1] / room
    return [file.read_text() for file in sorted(path.rglob("*.py")) or [path]]


if __name__ == "__main__":
    for room in sys.argv[1:] or ROOMS:
        sources = sources_of(room)
        print(f"{room:14}{sum(map(count, sources)):8,}{packed_share(sources):8.1%}")
