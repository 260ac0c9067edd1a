"""From a task to prompts: it is found, its rows are read, posed, played; what completions earn."""
