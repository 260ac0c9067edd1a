"""What a run rests on, as hashes: the questions.

A checkpoint keeps them. Without them a resumed run would go on, without a word, with
questions that have changed under the same name.
"""

import contextlib
import hashlib
import json


def of_questions(*splits: list[dict]) -> str:
    """A hash of the questions in their order; what JSON cannot hold, such as a set, is left out."""
    encoder = json.JSONEncoder(sort_keys=True, skipkeys=True, default=lambda value: None)
    digest = hashlib.sha256()
    for questions in splits:
        digest.update(f"{len(questions)} questions".encode())
        for question in questions:
            with contextlib.suppress(TypeError, ValueError):  # keys of several types, or a circle
                digest.update(encoder.encode(question).encode())
    return digest.hexdigest()[:16]
