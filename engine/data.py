"""Questions: where a task's rows come from, which are held out, and the stream of them."""

import csv
import glob
import hashlib
import io
import json
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.config import Config, TaskSettings
from engine.prompts import describe_lengths, encode_prompts, fill, folds_system, pose

# A run's questions


def load_questions(
    task: ModuleType,
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerFast,
    context: int | None,
    log: Callable[[str], None],
) -> "tuple[list[dict], QuestionStream | None]":
    """The validation questions, and the stream of training questions if the run trains.

    `context` is the number of tokens that the model can see, None for no limit. A question whose
    prompt leaves too little room for a completion is not used: validation questions are dropped
    here, and the stream skips the others, since there may be 490,000 of them. `log` gets their
    numbers. Raises ValueError for a source that cannot be used, and for a split without any
    question that fits.
    """
    settings = config.task
    # The task divides a source that serves both splits; two different sources are used whole.
    request = {"options": settings, "held_out": settings.train == settings.eval}
    validation = task.load_examples(
        settings.eval,
        "validation",
        num_examples=config.validation.num_examples,
        seed=0,  # the same questions for every training.seed, so that runs can be compared
        exclude=[],
        **request,
    )
    check_functions(task, validation, options=settings)
    if settings.prompt is not None and fill(settings.prompt, validation[0]) == settings.prompt:
        keys = ", ".join(f"{{{key}}}" for key in validation[0])
        raise ValueError(f"task.prompt: it does not hold the question; write one of {keys} into it")
    rendering = {"task": task, "options": settings, "tokenizer": tokenizer}
    prompt = pose(validation[0], task=task, options=settings)
    if folds_system(prompt, tokenizer):
        log("the chat template takes no system message: it is put before the question")
    fits = FitsContext(context, config.max_validation_tokens, **rendering)
    fitting = [row for row, fit in zip(validation, fits(validation), strict=True) if fit]
    if not fitting:
        section = "validation" if config.validation.max_new_gen_tokens else "training"
        raise ValueError(fits.refusal("validation", section))
    if num_long := len(validation) - len(fitting):
        log(f"{num_long} of {len(validation)} validation questions are too long: dropped")
    log(f"prompts of validation questions: {describe_lengths(fitting, **rendering)}")
    if config.mode != "train":
        return fitting, None
    limit = settings.max_train_examples  # of a file that is not shuffled, the first ones
    request |= {"num_examples": limit if settings.shuffle else None}
    request |= {"seed": config.training.seed, "exclude": validation}
    questions = task.load_examples(settings.train, "train", **request)[:limit]
    stream = QuestionStream(
        questions,
        seed=config.training.seed,
        shuffle=settings.shuffle,
        fits=FitsContext(context, config.training.max_new_gen_tokens, **rendering),
        log=log,
    )
    stream.take(0, 1)  # ValueError if there is none that fits
    evenly = np.linspace(0, len(questions) - 1, min(len(questions), 1_000), dtype=int)
    some = [questions[i] for i in evenly]
    log(
        f"{len(questions):,} training questions; "
        f"prompts of {len(some):,} of them: {describe_lengths(some, **rendering)}"
    )
    return fitting, stream


def check_functions(task: ModuleType, examples: list[dict], *, options: TaskSettings) -> None:
    """Raise ValueError if the task's functions return something else than a run can use.

    They are tried on the first example, so that a slip in a user's own task shows at the start.
    """
    if not isinstance(examples, list) or not examples or not isinstance(examples[0], dict):
        raise ValueError(f"{task.__file__}: load_examples must return a list of dicts")
    prompt = task.generate_prompt(examples[0], options=options)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages or not all(isinstance(m, dict) and m.get("content") for m in messages):
        raise ValueError(
            f"{task.__file__}: generate_prompt must return a text or a list of chat messages such "
            f'as {{"role": "user", "content": "..."}}, not {prompt!r:.80}'
        )
    parts = task.reward_function("", examples[0], options=options, num_tokens=0)
    values = [parts.get(name) for name in task.REWARD_PARTS] if isinstance(parts, dict) else [None]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in values):
        names = ", ".join(task.REWARD_PARTS)
        raise ValueError(
            f"{task.__file__}: reward_function must return a dict with a number for each of "
            f"{names}, not {parts!r:.80}"
        )


class FitsContext:
    """Whether prompts leave room for a completion in the model's context."""

    def __init__(self, context: int | None, max_new_tokens: int, **rendering: Any):
        """`context` in tokens, None for no limit; `rendering` is what `encode_prompts` needs."""
        self.context, self.max_new_tokens = context, max_new_tokens
        self.rendering = rendering

    def __call__(self, examples: list[dict]) -> list[bool]:
        """Whether each of the questions fits."""
        if self.context is None:
            return [True] * len(examples)
        prompts = encode_prompts(examples, **self.rendering)
        return [len(ids) + self.max_new_tokens <= self.context for ids in prompts]

    def refusal(self, split: str, section: str) -> str:
        """The error line where no question fits; the config's `section` sets the limit."""
        return (
            f"{section}.max_new_gen_tokens = {self.max_new_tokens}: no {split} prompt leaves room "
            f"for it in the model's context of {self.context} tokens, lower it"
        )


class QuestionStream:
    """The questions without end: each epoch is a new permutation of them, drawn from the seed.

    Without `shuffle` each epoch has them in their own order.
    """

    def __init__(
        self,
        questions: list[dict],
        *,
        seed: int,
        shuffle: bool,
        fits: FitsContext,
        log: Callable[[str], None],
    ):
        self.questions, self.seed, self.shuffle = questions, seed, shuffle
        self.fits, self.log = fits, log
        self.epoch, self.order = -1, np.arange(len(questions))
        self.too_long: set[int] = set()  # indices of questions that were found not to fit

    def __getitem__(self, position: int) -> dict:
        return self.questions[self.index_at(position)]

    def index_at(self, position: int) -> int:
        """Which of the questions stands at a position of the stream."""
        epoch, index = divmod(position, len(self.questions))
        if self.shuffle and epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self.epoch, self.order = epoch, rng.permutation(len(self.questions))
        return int(self.order[index])

    def take(self, position: int, count: int) -> tuple[list[tuple[int, dict]], int]:
        """The next `count` questions that fit, from a position on, and the position after them.

        Each comes with its own position. Questions that are too long are skipped, and their number
        is logged whenever it has doubled. Raises ValueError if no question fits at all.
        """
        taken: list[tuple[int, dict]] = []
        num_long = len(self.too_long)
        while len(taken) < count:
            walked = [(p, self.index_at(p)) for p in range(position, position + count - len(taken))]
            fits = self.fits([self.questions[index] for _, index in walked])
            for (p, index), fit in zip(walked, fits, strict=True):
                if fit:
                    taken.append((p, self.questions[index]))
                else:
                    self.too_long.add(index)
            if len(self.too_long) == len(self.questions):
                raise ValueError(self.fits.refusal("training", "training"))
            position += len(walked)
        if len(self.too_long).bit_length() > num_long.bit_length():
            so_far = f"{len(self.too_long)} of {len(self.questions)} training questions"
            self.log(f"skipped so far since they are too long: {so_far}")
        return taken, position


# Rows: what the tasks' load_examples have in common

FILE_FORMATS = (".jsonl", ".json", ".csv", ".parquet")
FILE_OR_HUB = "a .jsonl, .json, .csv or .parquet file, or a hub dataset id (owner/name)"


def load_rows(
    source: str,
    split: str,
    *,
    example_row: dict,
    parse_row: Callable[[dict], dict],
    question_key: Callable[[dict], str],
    num_examples: int | None,
    seed: int,
    held_out: bool,
    exclude: Iterable[dict],
    choices: str = FILE_OR_HUB,
    hub_config: str | None = None,
    hub_split: str = "train",
) -> list[dict]:
    """The questions of one split ("train" or "validation") in a local file or a hub dataset.

    `example_row` is a good row: the source must have its columns, and error messages show it.
    `parse_row` makes an example of a row's values in these columns, or raises ValueError. Two
    examples of the same `question_key` are the same question; those in `exclude` are left out.
    With `held_out`, 1 in 8 questions is for validation and the others are for training; without
    it, all are taken. `num_examples` of the rest are drawn by `seed`; None takes them all.
    `hub_config` and `hub_split` say which part of a hub dataset to load, `choices` names the task's
    sources in error messages. Raises ValueError, one line with the source and the fix in it.
    """
    table = load_table(
        source,
        columns=list(example_row),
        choices=choices,
        hub_config=hub_config,
        hub_split=hub_split,
    )
    rows = read_rows(table, source=source, example_row=example_row, parse_row=parse_row)
    excluded = {question_key(row) for row in exclude}
    rows = [row for row in rows if question_key(row) not in excluded]
    if held_out:
        rows = [row for row in rows if is_in_split(question_key(row), split)]
    if not rows:
        raise ValueError(f"{source}: no question left for {split}; give a file with more rows")
    if num_examples is None or num_examples >= len(rows):
        return rows
    return random.Random(seed).sample(rows, num_examples)


def is_in_split(key: str, split: str) -> bool:
    """Whether the question belongs to the split, where the splits share one source.

    A hash of its key decides, so that a question is never in both splits, whatever the seed, the
    number of questions or the order of a file. 1 question in 8 is for validation.
    """
    assert split in ("train", "validation"), split
    digest = hashlib.sha256(key.encode("utf-8", "backslashreplace")).digest()
    is_held_out = digest[0] < 256 / 8
    return is_held_out == (split == "validation")


def is_file(source: str) -> bool:
    """Whether `source` is named like a file that can be loaded; it need not exist."""
    return Path(source).suffix.lower() in FILE_FORMATS


def load_table(
    source: str, *, columns: list[str], choices: str, hub_config: str | None, hub_split: str
) -> list[dict]:
    """The rows of the file, or these columns of this part of the hub dataset, as they are.

    Raises ValueError for a source that cannot be loaded.
    """
    import datasets  # takes a second, so only where it is needed

    datasets.disable_progress_bars()  # they would fill a log file
    path = Path(source)
    if is_file(source) and not path.is_file():
        raise ValueError(f"{source}: no such file; give {choices}")
    if not is_file(source) and (path.exists() or source.count("/") != 1):
        raise ValueError(f"{source}: unknown kind of source; give {choices}")
    try:
        if is_file(source) and path.suffix.lower() != ".parquet":
            return read_text_file(path)
        if is_file(source):
            table = datasets.load_dataset("parquet", data_files=glob.escape(source), split="train")
        else:
            table = datasets.load_dataset(source, hub_config, split=hub_split)
    except (
        OSError,
        ValueError,
        RecursionError,  # JSON that is nested too deeply
        csv.Error,
        datasets.exceptions.DatasetsError,
    ) as error:
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        raise ValueError(f"{source}: cannot be loaded ({reason}); give {choices}") from error
    shared = [name for name in columns if name in table.column_names]
    return table.select_columns(shared or table.column_names).to_list()


def read_text_file(path: Path) -> list[dict]:
    """The rows of a .csv, .json or .jsonl file; a CSV file's numbers are text.

    `datasets` would guess one type for all values of a column: a single cell that does not fit
    changes the others, or stops it without the row's number.
    """
    text = path.read_text("utf-8-sig")
    if path.suffix.lower() == ".csv":
        rows = list(csv.DictReader(io.StringIO(text, newline="")))
    elif text.lstrip().startswith("["):
        rows = json.loads(text)
    else:
        lines = [line for line in text.split("\n") if line.strip()]
        rows = [parse_line(line, number) for number, line in enumerate(lines, start=1)]
    if not rows:
        raise ValueError("it is empty")
    return rows


def parse_line(line: str, number: int) -> object:
    """The value in a line of a .jsonl file; ValueError with the number of its row."""
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from None


def read_rows(
    table: list[dict], *, source: str, example_row: dict, parse_row: Callable[[dict], dict]
) -> list[dict]:
    """Each row of the table as an example; ValueError for the first row that cannot be one."""
    rows = []
    for number, row in enumerate(table, start=1):
        try:
            if not isinstance(row, dict):
                raise ValueError("it has no columns")
            if missing := sorted(example_row.keys() - row.keys()):
                found = ", ".join(map(str, row))
                raise ValueError(f"no column {' and '.join(missing)} among {found}")
            rows.append(parse_row({name: row[name] for name in example_row}))
        except ValueError as error:
            shown = json.dumps(example_row)
            line = f"{source}, row {number}: {error}; rows must look like {shown}"
            raise ValueError(line) from error
    return rows
