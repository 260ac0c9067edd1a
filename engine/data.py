"""Questions: where a task's rows come from, which are held out, and how they become prompts."""

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

import numpy as np
from transformers import PreTrainedTokenizerFast

from engine.config import Config, Section
from engine.sampler import Completion

# A run's questions


def load_questions(
    task: ModuleType,
    config: Config,
    *,
    tokenizer: PreTrainedTokenizerFast,
    context: int | None,
    log: Callable[[str], None],
) -> dict[str, list[dict]]:
    """The questions of the run by split: "validation", and "training" if the run trains.

    `context` is the number of tokens that the model can see, None for no limit. A question whose
    prompt leaves too little room for a completion is dropped, and `log` gets the number of those.
    Raises ValueError for a source that cannot be used, and for a split without any question left.
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
    questions = {"validation": validation}
    if config.mode == "train":
        request |= {"num_examples": None, "seed": config.training.seed, "exclude": validation}
        questions["training"] = task.load_examples(settings.train, "train", **request)
    prompt = task.generate_prompt(questions["validation"][0], options=settings)
    if tokenizer.chat_template and not isinstance(prompt, str) and prompt[0]["role"] == "system":
        folded = fold_system(prompt)
        if render_prompt(prompt, tokenizer) == render_prompt(folded, tokenizer):
            log("the chat template takes no system message: it is put before the question")
    max_new_tokens = config.training.max_new_gen_tokens
    room = math.inf if context is None else context - max_new_tokens
    for split, examples in questions.items():
        prompts = encode_prompts(examples, task=task, options=settings, tokenizer=tokenizer)
        fitting = [row for row, ids in zip(examples, prompts, strict=True) if len(ids) <= room]
        if not fitting:
            raise ValueError(
                f"training.max_new_gen_tokens = {max_new_tokens}: no {split} prompt leaves room "
                f"for it in the model's context of {context} tokens, lower it"
            )
        if num_long := len(examples) - len(fitting):
            log(f"{num_long} of {len(examples)} {split} questions are too long: dropped")
        questions[split] = fitting
    return questions


class QuestionStream:
    """The questions without end: each epoch is a new permutation of them, drawn from the seed."""

    def __init__(self, questions: list[dict], seed: int):
        self.questions = questions
        self.seed = seed
        self.epoch = -1
        self.order = np.empty(0, dtype=np.int64)

    def __getitem__(self, position: int) -> dict:
        epoch, index = divmod(position, len(self.questions))
        if epoch != self.epoch:
            rng = np.random.default_rng([self.seed, epoch])
            self.epoch, self.order = epoch, rng.permutation(len(self.questions))
        return self.questions[self.order[index]]


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
    is_held_out = hashlib.sha256(key.encode()).digest()[0] < 256 / 8
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
    except (OSError, ValueError, csv.Error, datasets.exceptions.DatasetsError) as error:
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


# Prompts: from an example to text to tokens


def encode_prompts(
    examples: list[dict], *, task: ModuleType, options: Section, tokenizer: PreTrainedTokenizerFast
) -> list[list[int]]:
    """The token ids of each question's prompt."""
    texts, adds_special_tokens = render_prompts(
        examples, task=task, options=options, tokenizer=tokenizer
    )
    if not texts:  # a rank without validation questions; the tokenizer would raise IndexError
        return []
    return tokenizer(texts, add_special_tokens=adds_special_tokens)["input_ids"]


def render_prompts(
    examples: list[dict], *, task: ModuleType, options: Section, tokenizer: PreTrainedTokenizerFast
) -> tuple[list[str], bool]:
    """The text of each question's prompt, and whether the tokenizer must add special tokens to it.

    It must not where a chat template has been used, because the template has written them already.
    """
    prompts = [task.generate_prompt(example, options=options) for example in examples]
    is_chat = tokenizer.chat_template is not None and not any(isinstance(p, str) for p in prompts)
    return [render_prompt(prompt, tokenizer) for prompt in prompts], not is_chat


def render_prompt(messages: list[dict] | str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The chat as text, which the model continues; a last assistant message stays open.

    A plain text stays as it is, even if the tokenizer has a chat template: the tokenizers of many
    base models have one, although these models have never seen a chat.
    """
    if isinstance(messages, str):
        return messages
    if tokenizer.chat_template is None:
        return plain_text(messages)
    prefix = assistant_prefix(messages)
    chat = messages[:-1] if prefix else messages
    # The prefix is appended by hand, since some templates rewrite what an assistant says.
    return apply_template(chat, tokenizer) + prefix


def apply_template(chat: list[dict], tokenizer: PreTrainedTokenizerFast) -> str:
    """The chat in the tokenizer's template, up to where the assistant speaks.

    Some templates, such as Gemma 2's, refuse a system message, and others leave it out: then it
    goes before the user's message. Raises ValueError for a template that fails.
    """
    has_system = chat[0]["role"] == "system"
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, which may raise anything
        if not has_system:
            name = tokenizer.name_or_path
            raise ValueError(f"the chat template of {name} fails: {error}") from error
    else:
        if not has_system or chat[0]["content"].strip() in text:
            return text
    return apply_template(fold_system(chat), tokenizer)


MADE_UP_TURN = "A made-up turn."


def end_of_turn(tokenizer: PreTrainedTokenizerFast) -> int | None:
    """The special token that the chat template writes after what an assistant says, if it has one.

    None too for a template that cannot write an assistant's turn.
    """
    if tokenizer.chat_template is None:
        return None
    chat = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": MADE_UP_TURN}]
    try:
        text = tokenizer.apply_chat_template(chat, tokenize=False)
    except Exception:  # a template is a program, which may raise anything
        return None
    _, _, after = text.partition(MADE_UP_TURN)
    (first,) = tokenizer.encode(after.lstrip(), add_special_tokens=False)[:1] or [None]
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return first if first in special else None


def fold_system(chat: list[dict]) -> list[dict]:
    """The chat with its system message at the beginning of the user's message."""
    system, user, *others = chat
    return [user | {"content": f"{system['content']}\n\n{user['content']}"}, *others]


def assistant_prefix(messages: list[dict] | str) -> str:
    """The beginning of the answer that the prompt already contains; "" if it contains none."""
    if isinstance(messages, str) or messages[-1]["role"] != "assistant":
        return ""
    return messages[-1]["content"]


def plain_text(messages: list[dict]) -> str:
    """The chat as text for a tokenizer without a chat template."""
    return "\n".join(message["content"] for message in messages)


def completion_text(completion: Completion, tokenizer: PreTrainedTokenizerFast) -> str:
    """What the model wrote, without the end-of-sequence token."""
    ids = completion.token_ids if completion.truncated else completion.token_ids[:-1]
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)
