"""What is measured of completions, and the forms that files, boards and people get of it."""
