"""A task to copy and change: cp tasks/template.py plurals.py, and then task.name=plurals.

    python main.py task.name=template task.train=plurals.csv task.eval=plurals.csv

These are rows of the columns singular and plural, one in eight of which is held out. docs/tasks.md
lists what else a task may define, such as settings of its own and questions that it generates.
"""

EXAMPLE_ROW = {"singular": "fox", "plural": "foxes"}  # the columns that a file must have


def generate_prompt(example, *, options):
    """The question as chat messages; a plain text is what a base model continues."""
    question = f"What is the plural of {example['singular']}?"
    return [{"role": "user", "content": question}]


def reward_function(completion, example, *, options, num_tokens):
    """`answer` equal to 1.0 means solved; `read` is the answer that was read, or None."""
    words = completion.lower().strip(" .\n").split()
    if words and words[-1] == example["plural"]:
        return {"answer": 1.0 if len(words) == 1 else 0.5, "read": words[-1]}
    return {"answer": 0.0, "read": words[-1] if words else None}
