"""What main.py rests on: each file is one idea, and none of them imports main, tasks or tools."""
