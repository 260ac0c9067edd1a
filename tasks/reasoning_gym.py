r"""reasoning-gym: 96 kinds of generated puzzles, from words spelt backward to Sudoku.

    python -m tasks.reasoning_gym  # lists them, with their settings and an example each

The package (github.com/open-thought/reasoning-gym, Apache-2.0) makes a question of a seed and an
index, and scores answers. Both happen in a worker (grader_worker.py): a few scorers hang, such as
coin_flip's at 1e999999999, and a few generators depend on Python's hash seed, which is fixed there.
docs/tasks.md says how to choose one, and which pay for what is no answer.
"""

import json
from collections.abc import Iterable
from typing import Any

from pydantic import Field, PositiveFloat

from engine.core.config import Section
from engine.core.packages import import_package
from engine.questions.tasks import is_in_split
from tasks import grader_worker
from tasks.grader_worker import OutOfPatience, Worker, WorkerLost

EXAMPLE_ROW = {"seed": 0, "index": 7}
REWARD_PARTS = ("answer", "partial", "timeout")
# The scorers of these run what the model wrote as Python: by `eval`, or by SymPy's `parse_expr`.
REFUSED = ("binary_matrix", "countdown", "intermediate_integration", "n_queens", "puzzle24")
REFUSED += ("polynomial_multiplication", "simple_integration", "spiral_matrix", "string_insertion")
NEEDED_BY = "reasoning_gym, whose pycosat needs a C compiler"
NUM_DRAWS = 20_000  # puzzles tried for enough questions of a split; word_ladder makes no more
WORKER = Worker([*grader_worker.WORKER.command, "reasoning_gym"])


class Options(Section):
    dataset: str = "spell_backward"
    """The kind of puzzle; python -m tasks.reasoning_gym lists them."""
    dataset_config: dict[str, Any] = Field({})
    """Settings of the dataset that differ from its own defaults, such as max_word_len: 6."""
    scorer_timeout_s: PositiveFloat = 1.0
    """The longest time in seconds for scoring one answer; an answer that takes longer is wrong."""


def parse_row(row: dict, *, options: Options) -> dict:
    """The example of a seed and an index; ValueError says why there is none."""
    import_package("reasoning-gym", key=NEEDED_BY)
    seed, index = int(row["seed"]), int(row["index"])
    problem = "its scorer runs what the model wrote as code"
    if options.dataset not in REFUSED:
        try:
            question, answer, problem = ask(options, seed, index, None, limit_s=60.0)
        except WorkerLost as error:
            problem = str(error)
    if problem:
        hint = "python -m tasks.reasoning_gym lists what there is"
        raise ValueError(f"task.dataset = {options.dataset}: {problem}; {hint}")
    return {"question": question, "answer": answer, "seed": seed, "index": index}


def ask(options: Options, seed: int, index: int, answer: str | None, *, limit_s: float) -> Any:
    """The reply of `ask_reasoning_gym`, from the worker."""
    config = json.dumps({"size": NUM_DRAWS} | options.dataset_config)
    with WORKER.lock:
        deadline = WORKER.clock() + limit_s
        return WORKER.ask(options.dataset, config, seed, index, answer, deadline=deadline)


def question_key(example: dict) -> str:
    return example["question"]


def generate_questions(
    split: str, *, options: Options, num_examples: int | None, seed: int, exclude: Iterable[dict]
) -> list[dict]:
    """Different questions, 1,000 if `num_examples` is None; ValueError if there are too few."""
    excluded, found = {question_key(row) for row in exclude}, {}
    for index in range(NUM_DRAWS):
        example = parse_row({"seed": seed, "index": index}, options=options)
        if is_in_split(example["question"], split) and example["question"] not in excluded:
            found[example["question"]] = example
        if len(found) == (num_examples or 1_000):
            return [*found.values()]
    have = f"{len(found)} different {split} questions among {NUM_DRAWS:,}"
    raise ValueError(f"num_examples {num_examples}: only {have}; ask for fewer, or other settings")


def parse_question(text: str) -> dict:
    """The example in a question typed by a person, whose answer cannot be scored."""
    return {"question": text, "answer": "", "seed": None, "index": None}


def generate_prompt(example: dict, *, options: Options) -> list[dict]:
    return [{"role": "user", "content": example["question"]}]


def reward_function(
    completion: str, example: dict, *, options: Options, num_tokens: int
) -> dict[str, float]:
    """`partial` is the package's score; `timeout` is 1.0 if its scorer had to be stopped."""
    answer = extract_answer(completion, example, options=options) or ""
    seed, index = example["seed"], example["index"]
    try:  # the longest right answer, of tower_of_hanoi, has 4,063 characters
        score = ask(options, seed, index, answer[:8_000], limit_s=options.scorer_timeout_s)
    except (WorkerLost, OutOfPatience):
        return {"answer": 0.0, "partial": 0.0, "timeout": 1.0}
    return {"answer": float(score >= 0.999), "partial": score, "timeout": 0.0}


def extract_answer(completion: str, example: dict, *, options: Options) -> str | None:
    """What stands in the last <answer> block, else all that follows the last </think>."""
    text = completion.rpartition("</think>")[2].rpartition("<answer>")[2]
    return text.partition("</answer>")[0].strip() or None


if __name__ == "__main__":
    gym = import_package("reasoning-gym", key=NEEDED_BY)
    for name in sorted(gym.factory.DATASETS.keys() - {*REFUSED, "composite"}):
        example = parse_row(EXAMPLE_ROW, options=Options(dataset=name))
        question = " ".join(example["question"].split())
        print(f"{name}: {gym.factory.DATASETS[name][1]()!r:.400}")
        print(f"    {question[:300]!r}\n    {example['answer']!r:.200}")
