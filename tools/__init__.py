"""Programs that look at a run or its model: python -m tools.plot, .report, .think and .chat."""
