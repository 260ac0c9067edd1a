"""From a task to prompts: it is found and checked, its rows are read, its questions posed."""
