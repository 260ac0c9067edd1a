"""Questions: load a task's rows, hold some out for validation, stream the others without end."""

import collections
import copy
import difflib
import functools
import glob
import itertools
import json
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.core.config import Config, ConfigError, TaskSettings
from engine.core.hub import commit_of
from engine.core.packages import import_package
from engine.core.types import Log, Questions, SeedWord, no_log
from engine.core.user_file import naming_mistakes
from engine.questions.contract import Task, fill
from engine.questions.prompts import prompt_length
from engine.questions.rewards import reward_parts
from engine.questions.tables import (
    CsvRow,
    is_file_name,
    is_on_hub,
    number_in,
    read_text_file,
    split_source,
)
from engine.questions.tasks import Hub, hash_of, is_in_split
from engine.questions.templates import check_chat

GOLD_KEYS = ("answer", "solution", "gold", "ground_truth")  # as data sets call the right answer
# What functions of task.reward get by these names, whatever columns a row has
GIVEN = {"prompts", "completions", "completion_ids", "max_completion_length", "rewards"}
FILE_OR_HUB = "a .jsonl, .json, .csv or .parquet file, or a hub dataset id (owner/name)"
NONE_FITS = "no {} question fits: each holds a special token, or its prompt more than {:,} tokens, "
NONE_FITS += "the model's context less {}.max_new_gen_tokens: lower that"


def load_questions(
    task: Task,
    config: Config,
    tokenizer: PreTrainedTokenizerFast,
    context: int | None,
    log: Log,
) -> "tuple[Questions, QuestionStream | None]":
    """The validation questions, and the stream of training questions if the run trains.

    `context` is the number of tokens that the model can see, None for no limit. Questions without
    room for a completion are dropped: in training by the stream, since to render all takes long.
    """
    length = functools.partial(prompt_length, task=task, tokenizer=tokenizer)
    most = context or 10**9
    validation = load_validation(task, config, log)
    check_wording(task.options, validation[0], log)
    check_chat(task.pose(validation[0]), tokenizer)
    longest = most - config.max_validation_tokens
    lengths = [length(question) for question in validation]
    fits = [num <= longest for num in lengths]
    fitting = [*itertools.compress(validation, fits)]
    if not fitting:
        section = "validation" if config.validation.max_new_gen_tokens else "training"
        raise ValueError(NONE_FITS.format("validation", longest, section))
    if num_long := fits.count(False):
        log(
            f"{num_long} of {len(validation)} validation questions are too long or hold a special "
            "token: dropped"
        )
    if len(fitting) < (num := config.validation.num_examples):
        log(f"warning: {len(fitting)} different validation questions, not the {num} asked for")
    kept = [*itertools.compress(lengths, fits)]
    log(
        f"prompts of validation questions: {np.mean(kept):.0f} tokens on average, {max(kept)} the "
        "longest"
    )
    if config.mode != "train":
        return fitting, None
    limit = task.options.max_train_examples
    seed = config.training.seed
    num = limit if task.options.shuffle else None  # without shuffle the first ones of the file
    questions = load_examples(
        task, "train", num_examples=num, seed=seed, exclude=validation, log=log
    )
    longest = most - config.training.max_new_gen_tokens
    stream = QuestionStream(questions[:limit], seed, task.options.shuffle, length, longest, log)
    stream.take(0, 1)  # ValueError if no question fits
    log(f"{len(stream.questions):,} training questions")
    return fitting, stream


def load_validation(task: Task, config: Config, log: Log) -> Questions:
    """The validation questions, no two of them equal; the task's functions are tried on one."""
    # Seed 0: the same questions for every training.seed, so that runs can be compared.
    num = config.validation.num_examples
    rows = load_examples(task, "validation", num_examples=num, seed=0, exclude=[], log=log)
    # Equal questions would narrow the interval.
    rows = [*{task.key_of(row): row for row in rows}.values()]
    set_number_columns(task, log)
    try:
        check_functions(task, rows[0], config.training.max_new_gen_tokens)
    except ValueError as error:  # the same on all ranks, of which one prints it
        raise ConfigError(str(error)) from error
    return [*{task.asked(row): row for row in rows}.values()]


def set_number_columns(task: Task, log: Log = no_log, *others: str) -> None:
    """Set which columns are numbers in all CSV files of the task and of others."""
    sources = dict.fromkeys([task.options.train, task.options.eval, *others])
    files = [file for file in sources if file.lower().endswith(".csv") and Path(file).is_file()]
    if task.functions:
        task.number_columns = number_columns(itertools.chain(*map(load_table, files)), log)


def check_wording(settings: TaskSettings, question: dict, log: Log) -> None:
    """ValueError if task.prompt names no key of the question; warns of a word that looks wrong."""
    if settings.prompt and fill(settings.prompt, question) == settings.prompt:
        keys = ", ".join(f"{{{key}}}" for key in question)
        raise ValueError(f"task.prompt: it does not hold the question; write one of {keys} into it")
    for word in re.findall(r"\{(\w+)\}", f"{settings.prompt} {settings.system_prompt}"):
        near = difflib.get_close_matches(word, question, n=1, cutoff=0.75)
        if near and word not in question:
            log(f"warning: {{{word}}} is no key of a question, the nearest is {{{near[0]}}}")
        if word in GOLD_KEYS and word in question:
            log(
                f"warning: {{{word}}} in the prompt: the model is shown column {word}, which the "
                "reward reads: leave it out, or rename the column"
            )


def check_functions(task: Task, example: dict, limit: int) -> None:
    """Try a task's functions on a question; ValueError if they return what no run can use."""
    with naming_mistakes(task.file, task.generate_prompt, example):
        prompt = task.generate_prompt(copy.deepcopy(example), options=task.options)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    texts = [isinstance(m, dict) and m.get("role") and m.get("content") for m in messages or [0]]
    if not all(isinstance(text, str) and text.strip() for text in texts):
        raise ValueError(
            f"{task.file}: generate_prompt must return a text or a list of chat messages such as "
            f'{{"role": "user", "content": "..."}}, not {prompt!r:.80}'
        )
    if task.Environment is None:
        reward_parts(task, [[""]], [example], [[None]], limit)
    if task.functions:
        task.take_logged()  # what the trial has logged does not count


@dataclass
class QuestionStream:
    """The questions without end: each epoch is a new permutation of them, drawn from the seed."""

    questions: Questions
    seed: int
    shuffle: bool  # if not, each epoch has the questions in their own order
    prompt_tokens: Callable[[dict], float]  # how many a question's prompt has
    max_prompt_tokens: int  # the model's context, less a completion's longest
    log: Log
    too_long: set[int] = field(default_factory=set)  # indices of questions that did not fit
    permutation: tuple = (-1, None)  # the last epoch asked for, and its order

    def take(self, position: int, count: int) -> tuple[list[tuple[int, dict]], int]:
        """The next `count` questions that fit, each with its position, and the position after them.

        Logs now and then how many were too long, and raises ValueError if all are.
        """
        taken = []
        num_long = len(self.too_long)
        while len(taken) < count:
            epoch, index = divmod(position, len(self.questions))
            if self.shuffle:
                if self.permutation[0] != epoch:
                    rng = np.random.default_rng([SeedWord.ORDER, self.seed, epoch])
                    self.permutation = epoch, rng.permutation(len(self.questions))
                index = int(self.permutation[1][index])
            if self.prompt_tokens(self.questions[index]) <= self.max_prompt_tokens:
                taken.append((position, self.questions[index]))
            else:
                self.too_long.add(index)
            if len(self.too_long) == len(self.questions):
                raise ValueError(NONE_FITS.format("training", self.max_prompt_tokens, "training"))
            position += 1
        if len(self.too_long).bit_length() > num_long.bit_length():
            self.log(
                "skipped so far since they are too long or hold a special token: "
                f"{len(self.too_long)} of {len(self.questions)} training questions"
            )
        return taken, position


def load_examples(
    task: Task,
    split: str,
    *,
    num_examples: int | None,
    seed: int,
    exclude: Iterable[dict],
    log: Log = no_log,
) -> Questions:
    """The questions of one split, "train" or "validation", without those equal to `exclude`'s.

    If both splits have the same source, 1 in 8 of its questions is for validation and the others
    are for training, unless the task's HUB says otherwise. `num_examples` questions are drawn by
    `seed`; None takes all, or as many generated ones as the task chooses. Raises ValueError of one
    line with the source and the fix in it.
    """
    source = task.options.train if split == "train" else task.options.eval
    for package in task.PACKAGES:
        import_package(package, key=f"task.name = {Path(task.file).stem}")
    load = task.generate_questions if source == "generated" else None
    name = "load_examples" if task.load_examples else "generate_questions"
    if task.load_examples:  # the task has its own way to load
        held_out = task.options.train == task.options.eval
        load = functools.partial(task.load_examples, source, held_out=held_out)
    if load is None:
        rows = load_rows(task, split, source, num_examples, log)
    else:
        with naming_mistakes(task.file, load, split, passes=ValueError):  # what it says itself
            rows = load(
                split,
                options=task.options,
                num_examples=num_examples,
                seed=seed,
                exclude=exclude,
            )
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise ValueError(f"{task.file}: {name} must return a list of dicts, parse_row a dict")
    if others := [key for row in rows for key in row if not isinstance(key, str)]:
        raise ValueError(f"{task.file}: a question has the key {others[0]!r}: keys must be text")
    is_other = are_others(task, rows, exclude)
    if num_equal := is_other.count(False):
        log(
            f"{num_equal:,} of {len(rows):,} questions to train on are asked in validation too: "
            "left out"
        )
    rows = [*itertools.compress(rows, is_other)]
    if not rows:
        place = source if load is None else task.file
        fix = f"give a file with more rows, or let {name} return some of its own"
        raise ValueError(f"{place}: no question left for {split}; {fix}")
    if load is None and num_examples is not None and num_examples < len(rows):
        rows = random.Random(seed).sample(rows, num_examples)
    return rows


def load_rows(task: Task, split: str, source: str, num_examples: int | None, log: Log) -> Questions:
    """The rows of a file or of the hub, of which `split` gets its part if both have one source."""
    held_out = task.options.train == task.options.eval
    hub = task.HUB or Hub()
    is_divided = held_out and (hub.divides_train or is_file_name(source))
    choices = filter(None, [task.generate_questions and "generated", hub.usual_id, FILE_OR_HUB])
    table = load_table(
        source,
        columns=[*task.EXAMPLE_ROW],
        choices=", ".join(choices),
        hub_config=hub.config if split_source(source)[0] == hub.usual_id else None,
        hub_split="train" if split == "train" or is_divided else hub.validation_split,
        log=log,
    )
    is_known = held_out and split == "train"  # it was said with the validation questions
    rows = parse_table(table, task, source, no_log if is_known else log)
    if not is_divided or (task.functions and split == "train"):
        return rows  # those of validation are excluded later
    if not task.functions:
        return [row for row in rows if is_in_split(task.key_of(row), split)]
    # task.reward's hold out as many as are asked for, not 1 question in 8; half is left to train on
    rows = sorted(rows, key=lambda row: hash_of(task.key_of(row)))
    return rows[: min(num_examples, (len(rows) + 1) // 2)]


def are_others(task: Task, questions: Questions, known: Iterable[dict]) -> list[bool]:
    """Whether each question is none of the known ones, by its key and by what the model is asked.

    Equal questions may stand in two files with other columns beside them, such as an id.
    """
    names = {name for row in known for name in (task.key_of(row), task.asked(row))}
    if not names:  # nothing is held out
        return [True] * len(questions)
    return [task.key_of(row) not in names and task.asked(row) not in names for row in questions]


def load_table(
    source: str,
    *,
    columns: Iterable[str] = (),
    choices: str = FILE_OR_HUB,
    hub_config: str | None = None,
    hub_split: str = "train",
    log: Log = no_log,
) -> list[dict] | list[str]:
    """The rows of a file or of a part of a hub dataset; ValueError if it cannot be loaded."""
    path = Path(source)
    is_parquet = source.lower().endswith(".parquet")
    is_other = path.exists() and not (is_file_name(source) and path.is_file())  # a pipe has no end
    if is_other or not (is_file_name(source) or is_on_hub(source)):
        raise ValueError(f"{source}: unknown kind of source; give {choices}")
    try:
        if is_file_name(source) and not is_parquet:
            return read_text_file(path)
        # owner/name@revision:configuration:split; all but the name may be left out, or empty
        hub_id, revision, named = split_source(source)
        if not is_parquet:
            revision = commit_of(hub_id, revision, kind="dataset", log=log)
        import datasets  # takes a second, so only where it is needed

        datasets.disable_progress_bars()  # they would fill a log file
        if is_parquet:
            table = datasets.load_dataset("parquet", data_files=glob.escape(source), split="train")
        else:
            part, split, *_ = [*named.split(":")[1:], "", ""]
            table = datasets.load_dataset(
                hub_id, part or hub_config, split=split or hub_split, revision=revision
            )
    except Exception as error:  # each format has its own
        reason = str(error.__cause__ or error).strip().split("\n")[0]
        fix = f"give {choices}"
        if isinstance(error, OSError) and error.filename and Path(error.filename) != path:
            fix = "set HF_HOME to a folder that can be written"  # for the cache of `datasets`
        raise ValueError(f"{source}: cannot be loaded ({reason}); {fix}") from error
    shared = [name for name in columns if name in table.column_names]
    return table.select_columns(shared or table.column_names).to_list()


def number_columns(rows: Iterable[CsvRow], log: Log = no_log) -> set[str]:
    """The columns that have plain decimals alone, beside blank cells."""
    counts = collections.Counter(
        (name, isinstance(number_in(cell), str))
        for row in rows
        for name, cell in row.items()
        if cell.strip()
    )
    for name, is_text in counts:
        if is_text and counts[name, False]:
            log(f"the column {name} stays text: {counts[name, True]} of its cells are no numbers")
    return {name for name, is_text in counts if not is_text and not counts[name, True]}


def parse_table(
    table: list[dict] | list[str], task: Task, source: str, log: Log = no_log
) -> Questions:
    """The example in each row of the table; ValueError for the first row without one."""
    rows = []
    for number, row in enumerate(table, start=1):
        try:
            row = json.loads(row) if isinstance(row, str) else row
            if not isinstance(row, dict):
                raise ValueError("it has no columns")
            if missing := sorted(task.EXAMPLE_ROW.keys() - row.keys()):
                found = ", ".join(map(str, row))
                raise ValueError(f"no column {' and '.join(missing)} among {found}")
            row = type(row)((name, row[name]) for name in task.EXAMPLE_ROW or row)
            with naming_mistakes(task.file, task.parse_row, row, passes=ValueError):
                row = task.parse_row(row, options=task.options)
        except (ValueError, RecursionError) as error:
            example = task.EXAMPLE_ROW and f"; rows must look like {json.dumps(task.EXAMPLE_ROW)}"
            raise ValueError(f"{source}, row {number}: {error}{example or ''}") from error
        rows.append(row)
    if not task.EXAMPLE_ROW:  # a reward function gets every column, so say which rows lack one
        counts = collections.Counter(name for row in rows for name in row)
        for name in sorted(counts.keys() & GIVEN if task.functions else ()):
            log(
                f"warning: {source}: functions of task.reward get the run's {name}, not this column"
            )
        if lacking := {name: len(rows) - n for name, n in counts.items() if n < len(rows)}:
            some = ", ".join(f"no {name} in {num}" for name, num in lacking.items())
            log(f"warning: {source}: {some} of its {len(rows)} rows; the others have it")
    return rows
