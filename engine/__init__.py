"""What main.py rests on: each file is one idea, and none of them imports main, tasks or tools."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the checkout


def check_python(version: tuple) -> None:
    """End with one line where Python is too old, before a package is missed that needs a newer."""
    if version < (3, 11):
        found = ".".join(map(str, version[:2]))
        print(f"error: Python 3.11 or newer is needed, and this is {found}", file=sys.stderr)
        sys.exit(2)


check_python(tuple(sys.version_info))
