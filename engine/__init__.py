"""What main.py rests on: each file is one idea, and none of them imports main, tasks or tools."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent  # the checkout
