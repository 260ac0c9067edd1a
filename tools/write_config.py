"""Write what follows from other files: `python -m tools.write_config`.

config.yaml follows from the schema in engine/core/config.py, and the table of other trainers' words
in docs/comparison.md from engine/run/words_elsewhere.yaml.
"""

import re
import subprocess
from pathlib import Path

from engine import ROOT
from engine.core.config import explained
from engine.questions.tasks import schema
from engine.run.config_file import WORDS_ELSEWHERE, read_file


def write_defaults(file: Path) -> None:
    """Replace all below the header; SystemExit where git does not hold what would be lost."""
    git = ["git", "-C", str(file.parent), "diff", "--quiet", "--", file.name]
    if subprocess.run(git).returncode != 0:
        raise SystemExit(f"error: {file} is changed: git add it, or restore it, first")
    header, _, _ = file.read_text("utf-8").partition("\n\n")
    defaults = schema("countdown")()
    file.write_text(f"{header}\n\n{explained(defaults)}\n", "utf-8")


def write_words(file: Path) -> None:
    """Replace the rows of the last table that begins with | here |."""
    keys = read_file(WORDS_ELSEWHERE)["keys"].items()
    rows = "".join(f"| `{key}` | {', '.join(f'`{w}`' for w in words)} |\n" for key, words in keys)
    text = re.sub(r"(\| here \|.*\n\|---.*\n)(?:\|.*\n)*", lambda t: t[1] + rows, file.read_text())
    file.write_text(text)


if __name__ == "__main__":
    write_words(ROOT / "docs/comparison.md")
    write_defaults(ROOT / "config.yaml")
