"""What surrounds main.py, in packages; the `__init__.py` of each says what belongs there.

Imports run down: run, report, model, sampling, update, questions, core. None of them imports main,
logger, tasks or tools. What is off by default is imported where a run asks for it, and only then.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the checkout

if tuple(sys.version_info) < (3, 11):  # say it before a package is missed that needs a newer one
    found = ".".join(map(str, sys.version_info[:2]))
    print(f"error: Python 3.11 or newer is needed, and this is {found}", file=sys.stderr)
    sys.exit(2)
