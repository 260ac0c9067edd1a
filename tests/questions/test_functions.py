"""Reward functions of one's own in TRL's form, in place of a task, and mistakes in them."""

import json
import random
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from harness import ROOT, arguments, make_config, read_rows

import main
from engine.core.config import ConfigError
from engine.core.types import Completion, Trajectory
from engine.questions.data import load_examples, load_questions
from engine.questions.messages import pose
from engine.questions.tasks import load_task, read_answer, reward_parts
from engine.run.config_file import check_paths, dump, load_config, read_file
from engine.run.folder import run_name
from tools import attack, chat, page
from tools.imitate import read_answers

REWARDS = '''
def answer(completions, answer, **kwargs):
    """1.0 for the right answer."""
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.strip() == right) for text, right in zip(texts, answer)]


def short(prompts, completions, completion_ids, trainer_state=None, **kwargs):
    """Looks at the whole group."""
    longest = max(len(ids) for ids in completion_ids)
    return [1 - len(ids) / longest for ids in completion_ids]


def exact(completions, **kwargs):
    return np.array([0.25] * len(completions))
'''
ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(40)]
CHATS = [row | {"prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """Where main.py is started: my_rewards.py and rows.jsonl are there."""
    (tmp_path / "my_rewards.py").write_text(f"import numpy as np\n{REWARDS}")
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def completions_of(*texts: str) -> list[Completion]:
    pairs = [(text, np.zeros(len(text), np.float32)) for text in texts]
    return [Completion([*map(ord, text)], z, z, False, z > 0) for text, z in pairs]


def rewards_of(
    reward: str, row: dict, *texts: str, settings: tuple[str, ...] = ()
) -> list[dict[str, float]]:
    options = make_config(f"task.reward={reward}", *settings).task
    return reward_parts(load_task(options.code), [*texts], row, options, completions_of(*texts))


# The configuration


@pytest.mark.parametrize(
    ("reward", "name", "weights"),
    [
        ("my_rewards:short", "short", {"short": 1.0}),
        ("my_rewards:[short]", "short", {"short": 1.0}),
        ("my_rewards:[ short,answer ]", "short+answer", {"short": 1.0, "answer": 1.0}),
    ],
)
def test_a_run_has_the_functions_name_and_each_weighs_1(folder, reward, name, weights):
    config = load_config([f"task.reward={reward}", "task.train=rows.jsonl"])  # over config.yaml's
    assert (config.task.name, config.task.reward_weights) == (name, weights)
    assert run_name(config) == f"{name}-tiny-grpo-s0"
    assert (config.task.train, config.task.eval) == ("rows.jsonl", "rows.jsonl")
    (folder / "saved.yaml").write_text(dump(config))
    assert load_config(["--config", "saved.yaml"]) == config
    with pytest.raises(ConfigError, match=r"task\.reward_weights\.long: Input should be 'short'"):
        make_config(f"task.reward={reward}", "task.reward_weights.long=1")
    config = make_config(f"task.reward={reward}", "task.reward_weights.short=0.5", "task.name=x")
    assert config.task.reward_weights == weights | {"short": 0.5} and config.task.name == "x"
    other = load_config(["--config", "saved.yaml", "task.name=gsm8k"]).task
    assert (other.name, other.reward, other.reward_weights["format"]) == ("gsm8k", None, 0.1)


def test_a_recipe_gives_its_settings_and_not_its_questions(folder):
    """Its task.eval stayed, whose rows have other columns."""
    recipe = str(ROOT / "configs/gsm8k-qwen2.5-1.5b-lora.yaml")
    given = ["task.reward=my_rewards:short", "task.train=rows.jsonl"]
    config = load_config(["--config", recipe, *given])
    assert config.model.lora is not None
    assert config.task.train == config.task.eval == "rows.jsonl"
    assert load_config(["--config", recipe, *given, "task.eval=b.csv"]).task.eval == "b.csv"


def test_solved_is_the_answer_else_the_first_function():
    zeros = np.zeros(1, np.float32)
    completion = Completion([1], zeros, zeros, False, zeros > 0)
    for parts, solved in (
        ({"short": 1.0}, True),
        ({"short": 0.9}, False),
        ({"short": 1.0, "answer": 0.0}, False),
        ({"accuracy": 1.0, "format": 0.0}, True),
    ):
        assert Trajectory([1], completion, "", parts, reward=0.0).is_solved == solved, parts


# The call


def documented_call(functions: list, rows: list[dict], prompts, completions, ids) -> list:
    """https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function"""
    columns = {key: [row[key] for row in rows] for key in rows[0] if key != "prompt"}
    given = {"prompts": prompts, "completions": completions, "completion_ids": ids, **columns}
    paid = [f(**given, trainer_state=None, log_extra=None, log_metric=None) for f in functions]
    return [*zip(*paid, strict=True)]


@pytest.mark.parametrize("row", [ROWS[3], CHATS[3] | {"completion": "6"}])
def test_the_same_functions_pay_the_same_in_trl(folder, row):
    """Plain text and messages; also a function that compares the completions of a group."""
    texts, names = ["6", "six is it", " 6 ", ""], ["answer", "short", "exact"]
    ours = rewards_of(f"my_rewards:[{', '.join(names)}]", row, *texts)
    task = load_task(f"my_rewards:[{', '.join(names)}]")
    is_text = isinstance(row["prompt"], str)
    completions = texts if is_text else [[{"role": "assistant", "content": t}] for t in texts]
    ids = [completion.token_ids for completion in completions_of(*texts)]
    functions, num = [*task.functions.values()], len(texts)
    theirs = documented_call(functions, [row] * num, [row["prompt"]] * num, completions, ids)
    ours = np.float32([[*parts.values()] for parts in ours])  # which TRL's rewards are
    np.testing.assert_array_equal(ours, np.float32(theirs))
    assert ours[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0] and len({*ours[:, 1].tolist()}) == 4


SEEN = """
def see(**kwargs):
    kwargs["more"][0].append(1)
    print(sorted(kwargs), kwargs["prompts"], kwargs["completions"], kwargs["more"])
    return [1] * len(kwargs["completions"])
"""


@pytest.mark.parametrize(
    ("row", "settings", "posed", "prompt", "completion"),
    [
        ({"prompt": "2?"}, (), "2?", "2?", "x"),
        ({"prompt": "2?", "completion": "4"}, (), "2?", "2?", "x"),  # TRL leaves it out as well
        ({"prompt": "2?"}, ("task.system_prompt=S",), "S\n\n2?", "S\n\n2?", "x"),
        ({"q": "2"}, ("task.prompt='{q}!'",), [{"role": "user", "content": "2!"}], "2!", "x"),
        (
            {"prompt": [{"role": "user", "content": "2?"}]},
            ("task.system_prompt=S",),
            [{"role": "system", "content": "S"}, {"role": "user", "content": "2?"}],
            [{"role": "system", "content": "S"}, {"role": "user", "content": "2?"}],
            [{"role": "assistant", "content": "x"}],
        ),
    ],
)
def test_a_function_is_given_text_or_messages_as_the_rows_are(
    folder, capsys, row, settings, posed, prompt, completion
):
    """A change of what it was given stays nowhere."""
    (folder / "seen.py").write_text(SEEN)
    options = make_config("task.reward=seen:see", *settings).task
    row |= {"more": []}
    assert pose(row, task=load_task(options.code), options=options) == posed
    assert rewards_of("seen:see", row, "x", settings=settings) == [{"see": 1.0}]
    names = sorted({"prompts", "completions", "completion_ids", *row} - {"prompt", "completion"})
    assert capsys.readouterr().out == f"{names} {[prompt]} {[completion]} {[[1]]}\n"
    assert row["more"] == []


# The rows


def split_of(settings: list[str], split: str, num: int | None, exclude: list[dict]) -> list[dict]:
    options = make_config("task.reward=my_rewards:answer", *settings).task
    source = options.eval if split == "validation" else options.train
    how = {"seed": 0, "held_out": options.train == options.eval, "exclude": exclude}
    task = load_task(options.code)
    return load_examples(task, source, split, options=options, num_examples=num, **how)


def test_one_file_serves_both_and_so_many_rows_are_held_out_by_their_hash(folder):
    one = ["task.train=rows.jsonl"]
    held_out = split_of(one, "validation", 6, [])
    train = split_of(one, "train", None, held_out)
    assert len(held_out) == 6 and [row for row in ROWS if row not in held_out] == train
    mixed = random.Random(0).sample(ROWS, len(ROWS))
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, mixed)))
    assert split_of(one, "validation", 6, []) == held_out
    assert split_of(one, "validation", 7, [])[:6] == held_out
    assert len(split_of(one, "validation", 512, [])) == 20  # half is left to train on
    (folder / "other.csv").write_text("prompt,answer\n1 + 1 =,2\n9?,9\n")
    two = [*one, "task.eval=other.csv"]
    assert split_of(two, "validation", 512, [])[1] == {"prompt": "9?", "answer": "9"}
    assert len(split_of(two, "train", None, ROWS[1:2])) == 39


@pytest.mark.parametrize("row", [{"q": "2?"}, {"q": "2?", "prompt": ""}, {"q": "", "prompt": 5}])
def test_a_row_without_a_prompt_is_named_with_what_to_do(folder, row):
    (folder / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(ValueError, match=r"^rows\.jsonl, row 1: no text or messages in .*\{q\}"):
        split_of(["task.train=rows.jsonl"], "validation", 4, [])


def test_answers_to_imitate_keep_every_column(folder):
    (folder / "answers.jsonl").write_text(json.dumps(ROWS[1] | {"completion": "2"}))
    config = make_config("task.reward=my_rewards:answer", "task.train=rows.jsonl")
    answers = read_answers(load_task(config.task.code), config, "answers.jsonl")
    assert answers == [{"question": ROWS[1], "completion": "2"}]
    (folder / "answers.jsonl").write_text(json.dumps(ROWS[1]))
    with pytest.raises(ValueError, match="row 1: its completion is empty"):
        read_answers(load_task(config.task.code), config, "answers.jsonl")


# Mistakes

ONE_LINE = [
    ("f(:", "f", "line 1: SyntaxError: "),
    ("import no_such_module", "f", "line 1: ModuleNotFoundError: No module named 'no_such_module'"),
    ("x = 1\n1 / 0", "f", "line 2: ZeroDivisionError: division by zero"),
    ("g = 1", "f", "f is no function of this file"),
    (
        "def f(completions, a): pass",
        "f",
        "line 1: write def f(completions, **kwargs), without async",
    ),
    ("async def f(completions, **kwargs): pass", "f", "line 1: write def f(completions, **kwargs)"),
]
NUMBERS = "line 1: f must return a list of 1 finite numbers, one a completion"
AT_A_QUESTION = [
    ("\n    return [kwargs['gold']]", "line 2: f raised KeyError: 'gold': "),
    ("\n    raise SystemExit(0)", "line 2: f raised SystemExit: 0"),
    ("\n    return [\n        int('x')]", "line 3: f raised ValueError: invalid literal for int"),
    *((f" return {value}", f"{NUMBERS}, not {value}: ") for value in ("1.0", "[1, 2]", "[None]")),
    (" return [float('nan')]", f"{NUMBERS}, not [nan]: "),
    (" return [10**400]", f"{NUMBERS}, not [1000000000"),
]


def load_first(tokenizer, *settings: str) -> None:
    """Load the questions of an evaluation; the first is tried."""
    config = make_config(*settings, "mode=evaluate")
    task, log = load_task(config.task.code), [].append
    load_questions(task, config, tokenizer=tokenizer, context=None, log=log)


@pytest.mark.parametrize(("code", "names", "line"), ONE_LINE)
def test_a_mistake_in_the_file_is_one_line_at_the_start(folder, code, names, line):
    (folder / "mine.py").write_text(code)
    with pytest.raises(ConfigError) as caught:
        make_config(f"task.reward=mine:{names}")
    (found,) = caught.value.lines
    assert found.startswith(f"{folder / 'mine.py'}") and line in found and "\n" not in found


@pytest.mark.parametrize(("code", "line"), AT_A_QUESTION)
def test_a_mistake_at_a_question_is_one_line_with_file_line_and_question(
    folder, tokenizer, code, line
):
    """It is tried on the first question before a model samples anything, and one rank prints it."""
    (folder / "mine.py").write_text(f"def f(completions, **kwargs):{code}\n")
    with pytest.raises(ConfigError) as caught:
        load_first(tokenizer, "task.reward=mine:f", "task.train=rows.jsonl")
    found = str(caught.value)
    assert found.startswith(f"{folder / 'mine.py'}, {line}") and "question {'prompt': '" in found


@pytest.mark.parametrize(
    ("reward", "line"),
    [
        ("my_rewards", "task.reward = my_rewards: write my_rewards:f for the function f in"),
        ("../my_rewards:f", "task.reward = ../my_rewards:f: write my_rewards:f for the fun"),
        ("[a]", "task.reward = [a]: write my_rewards:f for the function f in my_rewards.py, or"),
    ],
)
def test_a_reward_that_is_not_there_is_one_line(folder, reward, line):
    with pytest.raises(ConfigError) as caught:
        make_config(f"task.reward={reward}")
    assert len(caught.value.lines) == 1 and caught.value.lines[0].startswith(line)


# Whose code runs


@pytest.mark.parametrize(
    "found",
    [
        "task: {reward: 'evil:f'}",
        "task: {reward: 'evil:f', name: gsm8k}",
        "task.reward: evil:f",
        "task: {name: 'evil:f'}",
    ],
)
def test_a_reward_in_a_config_that_was_found_is_not_imported(folder, monkeypatch, found):
    """As with a task's module: the folder with the model may be a stranger's."""
    (folder / "evil.py").write_text("raise SystemExit('its code has run')")
    (folder / "x/best").mkdir(parents=True)
    (folder / "x/metrics.jsonl").touch()
    file = folder / "x/config.yaml"
    file.write_text(found)

    def config_of(*others: str):
        return chat.chat_config(chat.read_arguments(["x/best", *others]))

    with pytest.raises(ConfigError):
        config_of()
    assert config_of("task.name=gsm8k").task.code == "gsm8k"
    assert config_of("task.reward=my_rewards:short").task.code == "my_rewards:short"
    assert config_of("task.reward=my_rewards:short", "task.name=evil").task.name == "evil"
    for override in ("task.reward=null", "task.prompt=evil:f", "task={}"):
        try:  # refused, or without the stranger's code
            assert config_of(override).task.code == "countdown"
        except ConfigError as error:
            assert "cannot have code run" in str(error) or "write my_rewards:f" in str(error)
    if found == "task: {reward: 'evil:f'}":
        assert {"key": "task.reward", "value": "evil:f", "default": "null"} in page.settings(file)
        for trusting in (["--config=x/config.yaml"], ["task.reward=evil:f"]):
            with pytest.raises(ConfigError, match="its code has run"):
                config_of(*trusting)


# Defaults of a task's module

MODULE = """
def generate_prompt(example, *, options):
    return example["q"]
def reward_function(completion, example, *, options, num_tokens):
"""


@pytest.mark.parametrize(
    ("pays", "answer"),
    [
        ("return completion == 'x'", "x"),
        ("return {'answer': 0.5}", "x"),
        ("return {'answer': 0.5, 'read': 12}", "12"),
        ("return {'answer': 0.5, 'read': None}", None),
    ],
)
def test_a_module_needs_a_prompt_and_a_reward_alone(folder, pays, answer):
    (folder / "mine.py").write_text(f"{MODULE}    {pays}\n")
    (folder / "rows.csv").write_text("q,level\n" + "".join(f"{n},3\n" for n in range(80)))
    config = make_config("task.name=mine", "task.train=rows.csv", "task.eval=rows.csv")
    task, options = load_task("mine"), config.task
    assert options.reward_weights == {"answer": 1.0}
    how = {"options": options, "num_examples": None, "seed": 0, "held_out": True, "exclude": []}
    rows = load_examples(task, "rows.csv", "train", **how)
    assert 60 < len(rows) < 80 and rows[0].keys() == {"q", "level"}
    assert task.question_key({"b": 1, "a": 2}) == task.question_key({"a": 2, "b": 1})
    assert reward_parts(task, ["y"], rows[0], options, [None])[0]["answer"] in (0.0, 0.5)
    assert read_answer(task, " x\n", rows[0], options) == answer
    with pytest.raises(SystemExit, match="give it an EXAMPLE_ROW"):
        attack.load("mine")


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("def parse_row(row, *, options):\n    return row['x']", "parse_row raised KeyError: 'x'"),
        ("def load_examples(*_, **__): 1 / 0", "raised ZeroDivisionError: division by zero"),
        ("def generate_prompt(example, *, options): 1 / 0", "generate_prompt raised ZeroDivision"),
        ("def reward_function(completion, example): ...", "reward_function raised TypeError: "),
    ],
)
def test_an_exception_in_a_module_is_one_line(folder, tokenizer, code, line):
    (folder / "mine.py").write_text(f"{MODULE}    return 0.0\n{code}\n")
    (folder / "rows.csv").write_text("q,level\n" + "".join(f"{n},3\n" for n in range(80)))
    with pytest.raises(ValueError) as caught:
        load_first(tokenizer, "task.name=mine", "task.eval=rows.csv", "task.train=rows.csv")
    assert f"{folder / 'mine.py'}, line " in str(caught.value) and line in str(caught.value)


# Whole runs


@pytest.mark.timeout(120)
def test_a_run_learns_from_a_function_and_its_model_can_be_asked(
    folder, rotary_model_folder, monkeypatch
):
    names = ["task.reward=my_rewards:[answer, short]", "task.train=rows.jsonl"]
    run = run_here(folder, rotary_model_folder, monkeypatch, *names)
    rows = read_rows(run)
    assert {"train/part_answer", "train/part_short"} <= rows[2].keys() and len(rows) == 3
    saved = read_file(run / "config.yaml")
    assert (saved["task"]["reward"], saved["task"]["name"]) == (names[0][12:], "answer+short")
    trusted = ["--config", f"{run}/config.yaml"]
    policy, task = chat.load_chat(chat_of(run, *trusted))
    config = chat_of(run, *trusted)
    with pytest.raises(ValueError, match="write a row with its columns as JSON"):
        task.parse_question("2 + 2 =")
    example = task.parse_question('{"prompt": "2 + 2 =", "answer": "4"}')
    trajectory = chat.answer(policy, task, config, example, 0)
    assert trajectory.reward_parts.keys() == {"answer", "short"}
    assert len(chat.watched(task, config)) == config.validation.num_examples == 4


def chat_of(run: Path, *others: str):
    return chat.chat_config(chat.read_arguments([str(run / "best"), *others]))


def run_here(folder: Path, model: Path, monkeypatch, *overrides: str) -> Path:
    """Two steps in this process, in the current folder."""
    given = arguments(folder, model, *overrides, "training.num_steps=2")
    monkeypatch.setattr("sys.argv", ["main.py", *given])
    with pytest.raises(SystemExit) as end:
        main.main()
    assert end.value.code == 0
    return folder / "x"


@pytest.mark.timeout(120)
def test_the_first_lines_of_the_docs_train(folder, rotary_model_folder, monkeypatch):
    """Bug: what main.py asks before torch took the run's name for that of a task."""
    page = (ROOT / "docs/tasks.md").read_text()
    (code,) = re.findall("```python\n(def .*?)```", page, re.DOTALL)
    command = re.search("```bash\ncp (\\S+) . && python main.py (.*?)```", page, re.DOTALL)
    (folder / "my_rewards.py").write_text(code)
    shutil.copy(ROOT / command[1], folder)
    typed = shlex.split(command[2].replace("\\\n", ""))
    small = [text for text in typed if text.startswith("task.")]
    run = run_here(folder, rotary_model_folder, monkeypatch, *small)
    assert make_config(*typed).task.name == "plural"  # the other keys are there too
    check_paths(make_config(*small))  # nothing is missing
    assert "train/part_plural" in read_rows(run)[2]
    assert "What is the plural of " in (run / "samples.jsonl").read_text()


@pytest.mark.timeout(120)
def test_the_template_trains(folder, rotary_model_folder, monkeypatch):
    names = [f"task.{key}={ROOT}/tasks/plurals.csv" for key in ("train", "eval")]
    run = run_here(folder, rotary_model_folder, monkeypatch, "task.name=template", *names)
    assert len(read_rows(run)) == 3 and "train/part_answer" in read_rows(run)[2]
