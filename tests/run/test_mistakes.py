"""A user's mistake costs one line, which begins with the key or file and holds the fix; status 2.

The tables say what is given, and what must stand in the line: " ... " is any text in between, and
HERE the folder in which main.py is started.
"""

import asyncio
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import CPU, ROOT, change_json, make_task, run_main, table, train_tokenizer

from engine.core.config import ConfigError, TaskSettings, check_world, dotted_values
from engine.core.packages import import_package
from engine.model import policy
from engine.model.load import load_model_and_tokenizer
from engine.questions.contract import Contract, Task, is_reward
from engine.questions.rewards import reward_parts
from engine.questions.tasks import is_of, problems_of_task
from engine.run.config_file import load_config


@pytest.fixture
def lines_of(tmp_path, monkeypatch, capsys) -> Callable[..., list[str]]:
    """`lines_of(*given)` are the lines of error in which main.py ends, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def lines(*given: str) -> list[str]:
        assert run_main(*given) == 2 and not Path("runs").exists()
        printed = capsys.readouterr().err.splitlines()
        assert all(line.startswith("error: ") for line in printed)
        return [line.removeprefix("error: ").replace(str(tmp_path), "HERE") for line in printed]

    return lines


@pytest.fixture(scope="module")
def tiny() -> tuple:
    """The default model and its tokenizer."""
    return load_model_and_tokenizer(load_config([]), CPU, log=lambda line: None)


@pytest.fixture
def start(lines_of, tiny, monkeypatch) -> Callable[..., None]:
    """`start(*given, says=said)` starts main.py with the tiny model and looks at its only line."""
    monkeypatch.setattr(policy, "load_model_and_tokenizer", lambda *_: tiny)  # loaded once for all

    def started(*given: str, says: str) -> None:
        (line,) = lines_of(*given)
        assert_says(line, says)

    return started


def assert_says(line: str, said: str) -> None:
    assert re.match(".*".join(map(re.escape, said.split(" ... "))), line), line


# On the command line

TABLES = table("run/mistakes.yaml")


@pytest.mark.parametrize(("given", "said"), TABLES["on the command line"].items())
def test_a_mistake_on_the_command_line_is_one_line_with_its_fix(given, said, start):
    start(*given.replace("ROOT", str(ROOT)).split(), says=said.replace("ROOT", str(ROOT)))


def test_every_mistake_has_its_line(lines_of):
    assert len(lines_of("training.seed=x", "sampling.top_p=7", "zzz=1", "task.min_target=1.5")) == 4
    assert len(lines_of("training.k_best_of_n=[1, 2]", "validation.pass_k=[9]")) == 2


def test_ranks_without_their_share_of_the_questions_are_refused():
    config = load_config(["training.num_samples_per_step_global=6"])
    check_world(config, 3)
    line = r"^training\.num_samples_per_step_global = 6: must be a multiple of the 4.*$"
    with pytest.raises(ConfigError, match=line):
        check_world(config, 4)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch, start):
    for package in ("peft", "math-verify", "vllm"):
        monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
        with pytest.raises(ValueError, match=rf"^a\.b: .*: pip install '?{package}[=>]=\d"):
            import_package(package, key="a.b")
    with pytest.raises(ValueError, match=r"pip install a-package-of-the-users$"):
        import_package("a-package-of-the-users", key="task.name = own")
    assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
    for board in ("mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, board, None)
        start(f"logging.report_to={board}", says=f"logging.report_to ... pip install {board}")
    start("task.name=math500", says="task.name = math500: ... pip install math-verify==")


# In a file of settings


def test_a_mistake_in_a_config_is_one_line_with_its_fix(tmp_path, start):
    for text, said in (
        ("training: [", "some.yaml: cannot be read as YAML: while parsing"),
        ("training: {seed: 1, seed: 2}", "some.yaml: ... key seed is given twice"),
        ("a: " + "[" * 1_000, "some.yaml: cannot be read as YAML: maximum recursion"),
        ("training: {1: 2}", "training.1 = 2: unknown key"),
    ):
        (tmp_path / "some.yaml").write_text(text)
        start("--config=some.yaml", says=said)


@pytest.mark.parametrize("trainer", TABLES["of other trainers"])
def test_the_error_for_a_file_of_another_trainer_ends_in_yaml_that_means_the_same_here(
    trainer, tmp_path, capsys
):
    theirs, ours, choices = TABLES["of other trainers"][trainer].values()
    (tmp_path / "theirs.yaml").write_text(theirs)
    assert run_main(f"--config={tmp_path}/theirs.yaml") == 2
    lines = capsys.readouterr().err.splitlines()
    block = [line for line in lines if not line.startswith("error: ")]
    assert lines[-len(block) :] == block
    (tmp_path / "ours.yaml").write_text("\n".join(block))
    config = load_config([f"--config={tmp_path}/ours.yaml"])
    defaults = dotted_values(load_config([]))
    values = dotted_values(config).items()
    assert {key: value for key, value in values if value != defaults[key]} == ours
    commented = [line.split()[1].removesuffix(":") for line in block[1:] if line.startswith("# ")]
    assert [key.removeprefix("training.") for key in commented] == choices.split()


# In a file of questions

GOOD = '{"nums": [1, 2], "target": 3}'
WITH_A = '{"question": "a", "answer": "#### '

IN_THE_QUESTIONS = [  # task, file, content, and what is said after the file's name
    ("countdown", "a.jsonl", '{"a": 1, "b": 2}', ", row 1: no column nums and target among a, b"),
    ("countdown", "a.jsonl", GOOD.replace("2", "-2"), ", row 1: nums is [1, -2]"),
    ("countdown", "a.jsonl", f"{GOOD}\n\n{GOOD[:9]}", ", row 2: Expecting"),
    ("countdown", "a.jsonl", "", ": no question left for validation; give a file with more rows"),
    # Bug: one cell that did not fit changed the type of its column, and row 1 was blamed.
    ("countdown", "a.csv", "nums,target\n3 4,5\n3 4,\n", ", row 2: target is ''"),
    ("countdown", "a.csv", 'nums,target\n3 4,5\n"3,5\n4,5\n', ": cannot be loaded (line 3: unexp"),
    ("countdown", "a.csv", "nums,target\n3 4,5\n3,5,6\n", ": cannot be loaded (line 3: more cel"),
    # Bug: the advice was that a quote within quotes is written twice, and no more.
    ("countdown", "a.csv", f"nums,target\n{'3' * 140_000},5\n", ": cannot ... into a .jsonl file"),
    ("gsm8k", "a.jsonl", f'{WITH_A}x"}}', ", row 1: answer is '#### x'"),
]


@pytest.mark.parametrize(("task", "file", "content", "said"), IN_THE_QUESTIONS)
def test_a_mistake_in_a_file_of_questions_is_one_line_beside_a_good_row(
    task, file, content, said, tmp_path, start
):
    (tmp_path / file).write_text(content)
    good = f" ... ; rows must look like {json.dumps(make_task(task).EXAMPLE_ROW)}"
    given = [f"task.name={task}", f"task.train={file}", f"task.eval={file}"]
    start(*given, says=f"{file}{said}{good if ', row' in said else ''}")


@pytest.mark.timeout(20)
def test_a_source_that_is_no_file_is_refused_at_once(tmp_path, start):
    """Bug: a named pipe was waited for without an end."""
    os.mkfifo(tmp_path / "rows.jsonl")
    start("task.eval=rows.jsonl", says="rows.jsonl: unknown kind of source")


# In a task of one's own

OWN_TASK = """
REWARD_PARTS = ("answer", "length")
def generate_prompt(example, *, options):
    return example["q"]
def reward_function(completion, example, *, options, num_tokens):
    return {"answer": 1.0, "length": 0.0}
"""


TRAINS_ON = 'def load_examples(_, split, **how): return [{"q": "2"}] if split != "train" else '
PAYS = "def reward_function(*_, **how): return "
NO_REWARD = ": reward_function must return a dict with a number for each of answer, length"

IN_A_TASK = {  # code at the end of the task, and what is said after the file's name
    "f(:": ", line 7: SyntaxError",
    "import sys; sys.exit(0)": ", line 7: SystemExit: 0",  # bug: that ended the run with status 0
    "REWARD_PARTS = ('length',)": ': REWARD_PARTS must be a tuple ... "answer"',
    "REWARD_PARTS = ('answer', 'a.b')": ": REWARD_PARTS must be a tuple of different names",
    "REWARD_PARTS = ('answer', 'answer')": ": REWARD_PARTS must be a tuple of different names",
    "from engine.core.config import Section as Options": ": Options must be a class of its own",
    # Bug: they were counted as time-outs, and their mean shown as that.
    "REWARD_PARTS = ('answer', 'timeout')": ": REWARD_PARTS: a part called timeout",
    "def question_key(example): return 3": ", line 7: question_key raised TypeError",
    # Nothing awaits it: the model would read `<coroutine object ...>`.
    "class B:\n    async def respond(_): ...\nclass Environment(B): ...": ": Environment.respond",
    "class Environment:\n    def __init__(self, x): ...": ": Environment: Environment.__init__()",
    # Bug: only the validation questions were looked at; the others ended in a traceback.
    f"{TRAINS_ON}[]": ": no question left for train; ... let load_examples return",
    f"{TRAINS_ON}[{{1: 2}}]": ": a question has the key 1: keys must be text",
    "def parse_row(row, *, options): return row['x']": "a.csv, row 1: HERE/own.py, line 7",
    f"{PAYS}{{'length': 1.0}}": f", line 7{NO_REWARD}, not {{'length': 1.0}}: answer is miss",
    f"{PAYS}{{'answer': 10**400, 'length': 1}}": f", line 7{NO_REWARD} ... question {{'",
}


@pytest.fixture
def own_task(tmp_path) -> list[str]:
    """The arguments that name the task in own.py, and its questions."""
    (tmp_path / "own.py").write_text(OWN_TASK)
    (tmp_path / "a.csv").write_text("q,level\n" + "".join(f"{n},3\n" for n in range(40)))
    return ["task.name=own", "task.train=a.csv", "task.eval=a.csv"]


@pytest.mark.parametrize("code", IN_A_TASK)
def test_a_mistake_in_a_task_is_one_line_with_file_and_line(code, own_task, start):
    Path("own.py").write_text(f"{OWN_TASK}{code}\n")
    said = IN_A_TASK[code]
    start(*own_task, says=said if said.startswith("a.csv") else f"HERE/own.py{said}")


WRONG = [None, 3, 1.5, "text", b"bytes", ["a", 1], ("a", 1), {1: 2}, object(), asyncio.sleep]


@pytest.mark.parametrize("name", [name for name in vars(Contract) if not name.startswith("_")])
def test_no_name_of_a_task_takes_what_it_cannot_be(name):
    """Bug: for most of them a run ended later, in a traceback, or went on and showed nonsense."""
    functions = {"generate_prompt": len, "reward_function": len}
    for wrong in WRONG:
        task = Task("own.py", functions | {name: wrong}, TaskSettings())
        lines = [*problems_of_task(task)]
        if wrong is None and is_of(name, None):  # as if it were left out
            assert lines == [] or name == "reward_function"
        else:
            (line,) = lines
            assert line.startswith(f"{name} must be ") and "\n" not in line, line


def test_a_task_may_have_any_other_name_and_pay_by_an_array():
    """Bugs: a helper called reward_groups was taken for the run's; np.array(1.0) was no number."""
    helper = {"reward_groups": print, "functions": 3, "key_of": 3}
    pays = {"generate_prompt": len, "reward_function": lambda *_, **how: np.array(1.0)}
    task = Task("own.py", helper | pays, TaskSettings())
    assert list(problems_of_task(task)) == []
    assert reward_parts(task, [["x"]], [{}], [[None]], 9) == [[{"answer": 1.0}]]
    assert is_reward(torch.tensor(0.5)) and not any(map(is_reward, (np.array("1"), np.ones(1))))


def test_a_tasks_parts_and_generated_questions_are_checked(own_task, start):
    start("task.name=own", "task.reward_weights.a=1", says="task.reward_weights.a: ... 'answer'")
    Path("other.py").write_text(f"{OWN_TASK}def generate_questions(*_, **how): return None\n")
    start("task.name=other", says="HERE/other.py: generate_questions must return a list of dicts")


# In a reward function of one's own

NUMBERS = ", line 1: f must return a list of 1 finite numbers, one a completion, not "
F = "def f(completions, **columns):"
QUESTION = ": question {'prompt': '"

IN_A_REWARD = {  # name: code of f's file, and what is said after the file's name
    "no function": ("f = 1", ": f is no function of this file"),
    "no columns": ("def f(completions, a): ...", ", line 1: write def f(completions, **kwargs)"),
    "for messages": (  # as most of TRL's examples are, and task.prompt gives plain text
        f"{F}\n return [len(c[0]['content']) for c in completions]",
        ", line 2: f raised IndexError: string index out of range (each completion is a text,"
        f" since no row has messages in a column prompt){QUESTION}",
    ),
    "no list": (f"import numpy\n{F} return numpy.array(1)", NUMBERS.replace("1", "2", 1) + "1: q"),
    "nan": (f"{F} return [float('nan')]", f"{NUMBERS}[nan]{QUESTION}"),
    # Bug: the run ended with status 0, as if all were well.
    "exit": (f"async {F}\n exit(0)", f", line 2: f raised SystemExit: 0{QUESTION}"),
}


@pytest.mark.parametrize("name", IN_A_REWARD)
def test_a_mistake_in_a_reward_function_is_one_line_with_file_and_line(name, tmp_path, start):
    code, said = IN_A_REWARD[name]
    (tmp_path / "mine.py").write_text(code)
    (tmp_path / "a.jsonl").write_text('{"prompt": "1 + 1 ="}\n{"prompt": "2 + 2 ="}\n')
    start("task.reward=mine:f", "task.train=a.jsonl", says=f"HERE/mine.py{said}")


# In a model's folder


def parts(folder: Path) -> None:
    """Bug: the prompts of such a template were empty, and the run trained on them."""
    inner = "{% for part in m.content %}{{ part.text }}{% endfor %}"
    text = f"{{% for m in messages %}}{inner}{{% endfor %}}"
    (folder / "chat_template.jinja").write_text(text)


def add_token(folder: Path) -> None:
    """Bug: the run started, and ended in an IndexError at the first prompt with such a token."""
    larger = train_tokenizer()
    larger.add_tokens(["Use the numbers"])
    larger.save_pretrained(folder)


def grow(folder: Path) -> None:
    """6.4 x 10^11 weights take 10 TB with their gradients and AdamW's averages."""
    (folder / "model.safetensors").write_bytes(b"not read")
    sizes = {"hidden_size": 100_000, "intermediate_size": 1_000_000, "num_attention_heads": 100}
    change_json(folder / "config.json", **sizes)


IN_A_MODEL = {
    "content as parts": (parts, "the chat template of HERE/model leaves out"),
    "a token": (add_token, "model.name = HERE/model: ... ids up to 345, but it has 345 embeddings"),
    "too large": (grow, "model.name = HERE/model: cannot be used: it needs 10, ... MB of memory"),
}


@pytest.mark.parametrize("name", IN_A_MODEL)
def test_a_mistake_in_a_models_folder_is_one_line_with_its_fix(
    name, rotary_model_folder, tmp_path, lines_of
):
    spoil, said = IN_A_MODEL[name]
    spoil(shutil.copytree(rotary_model_folder, tmp_path / "model"))
    (line,) = lines_of(f"model.name={tmp_path}/model", "training.learning_rate=1e-3")
    assert_says(line, said)
