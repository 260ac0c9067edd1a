"""Questions: what every task loads from files and the hub, how they stream, and their prompts.

Mistakes in a file of questions or in a task are in tests/run/test_mistakes.py.
"""

from itertools import product
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pandas
import pytest
from harness import ROWS, adding, chatty, load_rows, make_config, make_task, seed
from tokenizers import normalizers
from transformers import AddedToken, PreTrainedTokenizerFast

from engine.model.tokenizer import load_tokenizer
from engine.questions.contract import assistant_prefix
from engine.questions.data import QuestionStream, load_questions
from engine.questions.prompts import encode_prompts, make_prompts, prompt_length, prompt_text
from engine.questions.tasks import load_task
from engine.questions.templates import render_prompt
from tasks import gsm8k

RESPELLED = {  # the fourth of the rows
    "countdown": {"nums": [25, 3, 7], "target": 49},
    "arithmetic": {"a": 38, "b": 3},
    "gsm8k": {"question": " what IS  3 + 3?\n", "answer": "#### 7"},
    "math500": {"problem": "WHAT is  3+1?", "answer": "0"},
}
every_task = pytest.mark.parametrize("name", ROWS)


@pytest.fixture(autouse=True)
def dataset_cache_in_a_temporary_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def load(name: str, source: str | Path, split: str = "train", **how) -> list[dict]:
    return load_rows(name, source, split, **how)


def write_file(path: Path, rows: list[dict]) -> Path:
    frame, suffix = pandas.DataFrame(rows), path.suffix.removeprefix(".")
    if suffix in ("csv", "parquet"):
        getattr(frame, f"to_{suffix}")(path, index=False)
    else:
        frame.to_json(path, orient="records", lines=suffix == "jsonl", force_ascii=False)
    return path


@every_task
def test_a_file_is_divided_without_overlap_unless_it_is_used_whole(tmp_path, name):
    (tmp_path / "run[1]*").mkdir()  # brackets in a folder's name are no pattern
    rows = [{**row, "level": 3, "note": "a\u2028line"} for row in ROWS[name]]
    for suffix in ("jsonl", "json", "csv", "parquet"):
        source = write_file(tmp_path / f"run[1]*/rows.{suffix}", rows)
        train, validation = load(name, source, "train"), load(name, source, "validation")
        assert load(name, source, "validation", held_out=False) == ROWS[name]
        assert [row for row in ROWS[name] if row not in validation] == train
        assert [row for row in ROWS[name] if row not in train] == validation
        assert 0 < len(validation) < len(train)
        if suffix != "parquet":  # as Windows writes it
            text = source.read_bytes().replace(b"\n", b"\r\n")
            source.write_bytes(b"\xef\xbb\xbf" + text)
            assert load(name, source, "train") == train
    first, same, other = (load(name, source, num_examples=10, with_seed=seed(n)) for n in (3, 3, 4))
    assert first == same != other and len(first) == 10  # drawn by the seed
    assert load(name, source, num_examples=1_000) == train  # at most


@every_task
def test_excluded_questions_are_left_out_however_they_are_spelled(tmp_path, name):
    source = write_file(tmp_path / "rows.jsonl", ROWS[name])
    rows = load(name, source, held_out=False, exclude=[RESPELLED[name]])
    assert rows == [*ROWS[name][:3], *ROWS[name][4:]]
    source = write_file(tmp_path / "more.jsonl", [RESPELLED[name], *ROWS[name]])
    assert load(name, source, held_out=False, exclude=ROWS[name][:20]) == ROWS[name][20:]


def test_each_task_asks_the_hub_for_its_part(monkeypatch):
    """GSM8K's own splits are kept; a source of MATH or Countdown that serves both is divided."""
    requests = []

    def load_dataset(source: str, config: str | None, *, split: str, **how) -> datasets.Dataset:
        requests.append((source, config, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name, held_out, config, split in (
        ("gsm8k", True, "main", "test"),
        ("math500", False, None, "test"),
        ("math500", True, None, "train"),
    ):
        rows = ROWS[name]
        source = "openai/gsm8k" if name == "gsm8k" else "own/rows"
        found = load(name, source, "validation", held_out=held_out)
        assert requests.pop()[1:] == (config, split)
        assert (found == rows) == (not held_out or name == "gsm8k")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    source = write_file(tmp_path / "rows.parquet", ROWS["gsm8k"])
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", source / "cache")
    with pytest.raises(ValueError, match="set HF_HOME to a folder that can be written"):
        load("gsm8k", source)


def questions_for(
    tokenizer: PreTrainedTokenizerFast, *overrides: str, context: int | None = None
) -> tuple[list[dict], QuestionStream | None, list[str]]:
    """The validation questions of a run, its training questions, and what it logs about them."""
    config, logged = make_config("validation.num_examples=80", *overrides), []
    task, log = load_task(config.task), logged.append
    questions = load_questions(task, config, tokenizer=tokenizer, context=context, log=log)
    return *questions, logged


def of_task(name: str, **options: str) -> dict:
    """The task, as an argument."""
    return {"task": make_task(name, **options)}


def test_the_validation_questions_are_the_same_for_every_seed_and_mode(tokenizer):
    twenty = "validation.num_examples=20"
    first, _, _ = questions_for(tokenizer, twenty)
    other, training, _ = questions_for(tokenizer, twenty, "training.seed=1", "mode=evaluate")
    assert len(first) == 20 and other == first and training is None


def test_what_cannot_be_asked_is_left_out_with_a_count(tmp_path, tokenizer, templated, monkeypatch):
    """Bug: `<|im_end|>` in a dataset ended the user's turn, also in letters that NFKC changes."""
    templated.backend_tokenizer.normalizer = normalizers.NFKC()
    templated.add_tokens([AddedToken("<|stop|>", special=True, normalized=True)])
    asked, rendered = ROWS["gsm8k"], []
    texts = ("A <|end|>", "\uff1c|stop|\uff1e", "long " * 900, "B <|pad|>")
    bad, new = ([{"question": f"{word}{t}", "answer": "1"} for t in texts] for word in ("", "New"))
    others = [{"question": f"What is {n}?", "answer": "1"} for n in range(3_000)]
    train = write_file(tmp_path / "train.json", [*new, *asked, *others])
    evaluation = write_file(tmp_path / "eval.json", [*asked[:10], RESPELLED["gsm8k"], *bad])

    def measured(example: dict, **settings) -> float:
        rendered.append(example)
        return prompt_length(example, **settings)

    monkeypatch.setattr("engine.questions.data.prompt_length", measured)
    given = ["task.name=gsm8k", f"task.train={train}", f"task.eval={evaluation}"]
    given += ["task.shuffle=false", "task.system_prompt=Hello<|end|>"]  # the task's own words stay
    validation, training, logged = questions_for(templated, *given, context=1024)
    keys = [gsm8k.question_key(row) for row in validation]
    assert keys == [gsm8k.question_key(row) for row in asked[:10]]
    assert logged[0].startswith("4 of 14 validation questions are too long or hold a special token")
    assert logged[1].startswith("warning: 10 different validation questions, not the 80 asked for")
    assert len(rendered) < 50 and logged[-1] == "3,074 training questions"
    taken, position = training.take(0, 70)
    assert [row["question"] for _, row in taken] == [row["question"] for row in asked[10:]]
    assert position == 74 and len(training.too_long) == 4
    # Nothing is special without a chat template, nor too long without a limit.
    assert len(questions_for(tokenizer, *given, "mode=evaluate")[0]) == 14
    # Bug: where all hold one, the advice was to lower training.max_new_gen_tokens.
    source = write_file(tmp_path / "all.jsonl", bad[:1])
    with pytest.raises(ValueError, match="each holds a special token, "):
        questions_for(templated, *given, f"task.eval={source}")


SAME = """
def generate_questions(split, *, num_examples, **others):
    return [{"answer": str(i), "split": split} for i in range(num_examples or 30)]
def generate_prompt(example, *, options):
    return f"What is {example['answer']}?"
def reward_function(completion, example, **others):
    return 0.0
"""


def test_no_question_of_the_validation_is_trained_on_whatever_stands_beside_it(
    tmp_path, tokenizer, monkeypatch
):
    """Bugs: 30 of 30 prompts were, with other ids; a .csv's 5 was not a .jsonl's "5"."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "same.py").write_text(SAME)
    rows = [{"prompt": f"What is {i}?", "answer": "1", "id": f"{i}"} for i in range(30)]
    chat = [row | {"prompt": [{"content": row["prompt"], "role": "user"}]} for row in rows]
    files = {"a.jsonl": rows, "b.jsonl": [row | {"id": row["id"] + "b"} for row in rows[:20]]}
    files |= {"a.csv": rows[:20], "c.jsonl": chat[:20], "twice.jsonl": rows[:20] + files["b.jsonl"]}
    for name, some in files.items():
        write_file(tmp_path / name, some)
    reward = "task.reward=lengths:soft_overlong"
    words = "task.prompt=What is {id}?"
    for evaluation in ("b.jsonl", "a.csv", "c.jsonl", "twice.jsonl"):
        given = [reward, "task.train=a.jsonl", f"task.eval={evaluation}"]
        given += [words] * (evaluation == "a.csv")  # "What is {id}?" of 5 and of "5"
        validation, training, logged = questions_for(tokenizer, *given)
        assert len(validation) == 20 and training.questions == rows[20:], evaluation
        assert "20 of 30 questions to train on are asked in validation too: left out" in logged
    one = [reward, "task.train=twice.jsonl", "task.eval=twice.jsonl", "validation.num_examples=10"]
    validation, training, _ = questions_for(tokenizer, *one)
    prompts = [{row["prompt"] for row in some} for some in (validation, training.questions)]
    assert len(prompts[0]) == len(validation) and len(prompts[0] | prompts[1]) == 20
    assert not prompts[0] & prompts[1]
    own = "task.name=same"
    _, training, _ = questions_for(tokenizer, own, "validation.num_examples=9")
    assert [row["answer"] for row in training.questions] == [str(i) for i in range(9, 30)]
    with pytest.raises(ValueError, match=r"same.py: no question left .* let generate_quest"):
        questions_for(tokenizer, own)


def test_a_split_has_the_questions_that_leave_room_for_its_own_completions(tmp_path, tokenizer):
    """All of them, whatever the other split's limit is, if it has one of its own."""
    given, lengths = ["task.name=gsm8k", "task.shuffle=false"], {}
    for split in ("train", "eval"):
        rows = [{"question": f"{split}{' word' * n}?", "answer": "1"} for n in range(40)]
        given.append(f"task.{split}={write_file(tmp_path / f'{split}.jsonl', rows)}")
        prompts = encode_prompts(rows, tokenizer=tokenizer, **of_task("gsm8k"))
        lengths[split] = {row["question"]: len(ids) for row, ids in zip(rows, prompts, strict=True)}
    context = max(lengths["train"].values())
    for new_tokens in ((20, 50), (50, 20), (30, None)):
        sections = zip(("training", "validation"), new_tokens, strict=True)
        limits = [f"{section}.max_new_gen_tokens={num or 'null'}" for section, num in sections]
        validation, stream, _ = questions_for(tokenizer, *given, *limits, context=context)
        train, evaluated = new_tokens[0], new_tokens[1] or new_tokens[0]
        fit = [text for text, num in lengths["train"].items() if num + train <= context]
        taken, _ = stream.take(0, len(fit) + 1)
        assert [row["question"] for _, row in taken] == [*fit, fit[0]] and len(fit) < 40
        fit = [text for text, num in lengths["eval"].items() if num + evaluated <= context]
        assert [row["question"] for row in validation] == fit and 0 < len(fit) < 40
        named = "training" if new_tokens[1] is None else "validation"
        with pytest.raises(ValueError, match=rf"than \d+ tokens, .* {named}\.max_new_gen_tok"):
            questions_for(tokenizer, *given, *limits, context=evaluated + 1)


def test_some_training_questions_are_drawn_or_the_first(tmp_path, tokenizer):
    source = write_file(tmp_path / "rows.json", ROWS["gsm8k"])
    given = ["task.name=gsm8k", f"task.train={source}", f"task.eval={source}"]
    for shuffle in ("true", "false"):
        some = ["task.max_train_examples=20", f"task.shuffle={shuffle}"]
        validation, training, _ = questions_for(tokenizer, *given, *some)
        rows = [row for row in ROWS["gsm8k"] if row not in validation]
        taken = [row for _, row in training.take(0, 20)[0]]
        assert len(training.questions) == 20 and all(row in rows for row in taken)
        assert (taken == rows[:20]) == (shuffle == "false")


def stream_of(num: int, *too_long: int, log=None, **settings) -> QuestionStream:
    """A stream of the questions 0, 1, ..."""
    settings = {"seed": seed(3), "shuffle": True, "max_prompt_tokens": 7} | settings
    return QuestionStream(
        [{"id": i} for i in range(num)],
        prompt_tokens=lambda question: 7 + (question["id"] in too_long),
        log=log or (lambda line: None),
        **settings,
    )


def ids_of(stream: QuestionStream, count: int) -> list[int]:
    """The ids of the stream's first questions."""
    return [question["id"] for _, question in stream.take(0, count)[0]]


def test_the_question_stream_is_one_seeded_permutation_after_the_other():
    again = stream_of(10)
    order = ids_of(stream_of(10), 30)
    epochs = [order[0:10], order[10:20], order[20:30]]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    jumps = [25, 4, 17, 4]  # as a resumed run or another rank asks
    assert [again.take(i, 1) for i in jumps] == [([(i, {"id": order[i]})], i + 1) for i in jumps]
    assert ids_of(stream_of(10, seed=seed(4)), 10) != epochs[0]


def test_the_order_of_the_questions_shares_no_random_numbers_with_what_is_sampled():
    """Bug: the order of seed 0 was that of question 0's numbers: seeds are padded with zeros."""
    for number in (0, 1):
        order = ids_of(stream_of(100, seed=number), 100)
        for sampled in ([word, *rest] for word in range(5) for rest in ([], [0], [1], [0, 0])):
            assert order != np.random.default_rng(sampled).permutation(100).tolist(), sampled


def test_steps_of_any_size_walk_the_same_questions_and_count_those_that_are_too_long():
    """So a resumed run, which begins at a saved position, and every rank see the same stream."""
    stream = stream_of(4, 1, 2, shuffle=False)  # 1 and 2 of 0, 1, 2, 3 are too long
    in_order = [(0, {"id": 0}), (3, {"id": 3}), (4, {"id": 0})]
    assert stream.take(0, 3) == (in_order, 5)  # the skipped ones up to there, and no later ones
    assert stream.take(5, 1) == ([(7, {"id": 3})], 8)
    whole, _ = stream_of(30, *range(0, 30, 3)).take(0, 60)
    assert len({position for position, _ in whole}) == 60
    for size in (1, 4, 7):
        steps, position = [], 0
        while len(steps) < 60:
            taken, position = stream_of(30, *range(0, 30, 3)).take(position, size)  # a new start
            steps += taken
        assert steps[:60] == whole


CHAT = [
    {"role": "user", "content": "Make 24."},
    {"role": "assistant", "content": "Let me see.\n<think>"},
]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</{{ m.role }}>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def templated(tokenizer) -> PreTrainedTokenizerFast:
    """The same tokenizer with a chat template."""
    return chatty(tokenizer, CHAT_TEMPLATE)


ASKED = "<user>Make 24.</user>\n<assistant>"
RENDERED = {  # the prompt, the template, and the text
    "a question": (CHAT[:1], CHAT_TEMPLATE, ASKED),
    "an answer that is begun": (CHAT, CHAT_TEMPLATE, f"{ASKED}Let me see.\n<think>"),
    "without a template": (CHAT, None, "Make 24.\nLet me see.\n<think>"),
    "a text": ("Make 24.", CHAT_TEMPLATE, "Make 24."),  # base models may have a template, too
}


@pytest.mark.parametrize("name", RENDERED)
def test_a_chat_template_renders_the_chat_and_leaves_the_assistants_beginning_open(name, templated):
    prompt, templated.chat_template, text = RENDERED[name]
    assert render_prompt(prompt, templated) == text
    begun = "Let me see.\n<think>"  # what the prompt already says
    assert assistant_prefix(prompt) == (begun if text.endswith(begun) else "")


# What templates do with a system message: Gemma 2's refuses one, others leave it out without a
# word, Qwen2.5's has one of its own if there is none, Mistral's puts it into the user's turn.
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
DROPS = "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}"
ADDS = "{% if messages[0].role != 'system' %}<system>Help.</system>\n{% endif %}"
JOINS = "{% if messages[0].role == 'system' %}{% set messages = [{'role': 'user', 'content': "
JOINS += "messages[0].content + '\n\n' + messages[1].content}] + messages[2:] %}{% endif %}"
SYSTEMS = {"keeps": "", "refuses": REFUSES, "drops": DROPS, "adds": ADDS, "joins": JOINS}
STYLES = [*((name, {}) for name in ROWS), ("gsm8k", {"prompt_style": "tags"})]


@pytest.mark.parametrize(("name", "style"), STYLES)
@pytest.mark.parametrize("is_worded", [False, True])
@pytest.mark.parametrize("words", [None, "Be brief.", "2", "ke"])
def test_a_system_prompts_words_and_the_users_stand_once_and_in_their_turn(
    name, style, words, is_worded, templated
):
    """Bug: words that stand in the question too were taken for kept, and left out."""
    row, key = ROWS[name][2], next(iter(ROWS[name][2]))
    asks, asked = (f"{k} #### \\boxed{{}}" for k in (f"{{{key}}}", row[key]))
    task = make_task(name, **style, system_prompt=words, prompt=asks if is_worded else None)
    if isinstance(posed := make_task(name, **style).pose(row), str):
        posed = asked if is_worded else posed
        assert render_prompt(task.pose(row), templated) == "\n\n".join([words, posed][not words :])
        return
    *told, user, last = [None, *posed]
    begun = last["content"] if last["role"] == "assistant" else ""
    *told, user = [*told, user] if begun else [*told, user, last]
    system = words or (told[-1]["content"] if told[-1] else None)
    for does, template in SYSTEMS.items():
        templated.chat_template = template + CHAT_TEMPLATE
        text = asked if is_worded else user["content"].strip()
        apart = does in ("keeps", "adds")
        heads = {None: "<system>Help.</system>\n" * (does == "adds")}
        head = heads.get(system, f"<system>{system}</system>\n" if apart else "")
        text = text if apart or system is None else f"{system}\n\n{text}"
        found = render_prompt(task.pose(row), templated)
        assert found == f"{head}<user>{text}</user>\n<assistant>{begun}", does


def test_a_template_that_writes_the_date_writes_the_one_that_the_run_began_on(tmp_path, templated):
    """Bug: prompts changed at midnight."""
    templated.chat_template = (
        "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y') }}{% endif %}"
        '{% macro year() %}{{ strftime_now( "%Y" ) }}{% endmacro %}, {{ year() }}, '
    ) + CHAT_TEMPLATE
    templated.save_pretrained(tmp_path)
    config = make_config(f"model.name={tmp_path}", "task.template_date='2024-02-29'")
    loaded = load_tokenizer(config, print)
    assert render_prompt(CHAT, loaded).startswith("29 Feb 2024, 2024, <user>")
    assert not render_prompt(CHAT, templated).startswith("29 Feb 2024")
    assert loaded.chat_template == templated.chat_template  # best/ gets the template as it was


OPAQUE, GOLD = "\ue000", "the right one"
SPECIAL = "{answer} {question}{problem} {prompt} {{x}} {0} %s ${y}$ \\1 \\g<0> {"
OF_TEXTS = {"task.name=gsm8k": "question", "task.name=math500": "problem"}
OF_TEXTS |= {"task.reward=lengths:soft_overlong": "prompt"}


@pytest.mark.parametrize("wording", [None, r"{KEY}, {KEY}: \{1\}, {no key}, {{KEY}}, {answer."])
@pytest.mark.parametrize(("task", "key"), OF_TEXTS.items())
def test_a_question_is_never_read_as_a_template(task, key, wording):
    """Else one with {answer} in it would show the model the right answer."""
    words = wording and wording.replace("KEY", key)
    told = {"prompt": words, "system_prompt": words}
    options = make_config(task, "task.train=rows.jsonl").task.model_copy(update=told)

    def posed(text: str) -> list[str]:
        chat = load_task(options).pose({key: text, "answer": GOLD})
        return [chat] if isinstance(chat, str) else [message["content"] for message in chat]

    assert posed(SPECIAL) == [text.replace(OPAQUE, SPECIAL) for text in posed(OPAQUE)]
    assert GOLD not in "".join(posed(SPECIAL))
    if words is not None:  # all other braces stay
        parts = "\n\n".join(posed(OPAQUE)).split("\n\n")
        assert {*parts} == {words.replace(f"{{{key}}}", OPAQUE)}


def test_encoded_prompts_are_the_tokens_of_the_rendered_text(tokenizer, templated):
    """Bug: for half a character, which JSON can hold, the tokenizer raised a TypeError."""
    own = of_task("countdown", prompt="make {target}.", system_prompt="Be brief.")
    for one, task in product((tokenizer, templated), (of_task("countdown"), own)):
        arguments = {"examples": ROWS["countdown"][:2], "tokenizer": one, **task}
        texts = [prompt_text(row, task["task"], one)[0] for row in arguments["examples"]]
        assert [one.decode(ids) for ids in encode_prompts(**arguments)] == texts
        assert all(text.endswith("<think>") for text in texts) and "make 46." in texts[0]
        assert ("Be brief." in texts[0]) == ("[0, 7, 25]" not in texts[0]) == (task is own)
    half = [{"question": "What is \ud8003?", "answer": "#### 3"}]
    (ids,) = encode_prompts(half, tokenizer=tokenizer, **of_task("gsm8k"))
    assert "What is ?3?" in tokenizer.decode(ids)


def test_a_prompts_tokens_do_not_depend_on_the_questions_beside_it(templated):
    """Bug: of a text and a chat in one batch, the chat got its beginning twice."""
    templated = adding(templated, "<|pad|> $A")
    rows = [{"prompt": "2?"}, {"prompt": [{"role": "user", "content": "2?"}]}]
    task, policy = make_task("lengths:soft_overlong"), SimpleNamespace(tokenizer=templated)
    for some in (rows, rows[::-1], []):
        found = make_prompts(policy, task, some, [(0, 0)] * len(some), None, None).token_ids
        lengths = [prompt_length(row, task=task, tokenizer=templated) for row in some]
        assert [ids.count(1) for ids in found] == [type(row["prompt"]) is str for row in some]
        assert [*map(len, found)] == lengths


def test_of_special_tokens_only_a_beginning_is_added_and_only_without_a_template(templated):
    """Bug: a post-processor that adds an end, as of add_eos_token, let every plain prompt end."""
    rows, task = ROWS["countdown"], of_task("countdown")
    begin, end = "<|end|> $A", "$A <|end|>"
    for template, form in ((None, begin), (None, end), (CHAT_TEMPLATE, begin)):
        templated.chat_template = template
        expected = encode_prompts(rows, tokenizer=templated, **task)
        found = encode_prompts(rows, tokenizer=adding(templated, form), **task)
        is_kept = template is None and form == begin
        assert found == [[0] * is_kept + ids for ids in expected]
