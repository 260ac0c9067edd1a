"""For a run or its model: python -m tools.plot, report, chat, collect, export, attack, play."""
