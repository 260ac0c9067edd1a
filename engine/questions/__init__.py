"""From a task to prompts: it is found, its rows are read and posed; and what completions earn."""
