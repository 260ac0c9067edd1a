"""What `python tools/chat.py` finds in place of the package engine: it says how to start a tool."""

import sys
from pathlib import Path

print(f"error: start it as: python -m tools.{Path(sys.argv[0]).stem}", file=sys.stderr)
sys.exit(2)
