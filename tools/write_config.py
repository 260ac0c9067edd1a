"""Write config.yaml from the schema in engine/core/config.py: `python -m tools.write_config`."""

import subprocess
from pathlib import Path

from engine import ROOT
from engine.core.config import explained
from engine.questions.tasks import schema


def write_defaults(file: Path) -> None:
    """Replace all below the header; SystemExit where git does not hold what would be lost."""
    if subprocess.run(["git", "diff", "--quiet", "--", file.name], cwd=file.parent).returncode:
        raise SystemExit(f"error: {file} is changed: git add it, or restore it, first")
    header, _, _ = file.read_text("utf-8").partition("\n\n")
    file.write_text(f"{header}\n\n{explained(schema('countdown')())}\n", "utf-8")


if __name__ == "__main__":
    write_defaults(ROOT / "config.yaml")
