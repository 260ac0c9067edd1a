"""Reward functions of one's own in TRL's form, in place of a task, and what a task may leave out.

Mistakes in them are in tests/run/test_mistakes.py.
"""

import asyncio
import copy
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import harness
import numpy as np
import pytest
import torch
from harness import ROOT, alone, arguments, load_rows, load_run, make_config, make_task, read_rows

import main
from engine.core.config import ConfigError
from engine.core.signals import Left
from engine.core.types import Completion, Trajectory
from engine.core.user_file import RewardError, import_file
from engine.questions import reward_functions
from engine.questions.contract import Task
from engine.questions.data import check_functions, load_questions, number_columns
from engine.questions.rewards import read_answer, reward_parts, total_reward
from engine.questions.tables import CsvRow, read_text_file, with_numbers
from engine.questions.tasks import functions_in, load_task
from engine.run.checkpoint import load_state
from engine.run.config_file import check_files, dump, load_config
from engine.run.folder import run_name
from engine.update.user_algorithm import own_advantages
from tasks import gsm8k, math500
from tools import attack, chat, imitate

USERS = harness.table("questions/users.yaml")
KINDS = [{"prompt": "1?", "kind": "math"}, {"prompt": "late?", "kind": "code"}]
ROWS = [{"prompt": f"{n} + {n} =", "answer": str(2 * n)} for n in range(40)]
ZEROS = np.zeros(2, np.float32)
DRAWN = Completion([1, 2], ZEROS, ZEROS, False, ZEROS > 0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """Where main.py is started: my_rewards.py and rows.jsonl."""
    (tmp_path / "my_rewards.py").write_text(USERS["rewards"])
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_has_the_functions_name_and_each_weighs_1(folder):
    reward, name = "my_rewards:[ short,answer ]", "short+answer"
    weights = {"short": 1.0, "answer": 1.0}
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


def test_one_more_reward_leaves_the_files_words_and_what_is_left_out_is_named(folder, capsys):
    """Bug: prompt, system prompt and weights of the file were dropped without a word."""
    words = "prompt: '{prompt}!', system_prompt: S, reward_weights: {answer: 0.5, short: 2.0}"
    task = f"reward: 'my_rewards:[answer, short]', train: rows.jsonl, {words}"
    (folder / "own.yaml").write_text(f"task: {{{task}}}")
    mine, train = "task.reward=[my_rewards:answer, lengths:cosine]", "task.train=rows.jsonl"
    for given, prompt, weight, lost in (
        ([mine], "{prompt}!", 0.5, "task.reward_weights.short"),
        ([mine, train], None, 1.0, "task.prompt, task.system_prompt, task.reward_weights.answer, "),
        (["task.name=gsm8k"], None, 1.0, "task.prompt, task.system_prompt, "),
        ([], "{prompt}!", 0.5, ""),
    ):
        task = load_config(["--config", "own.yaml", *given]).task
        assert (task.prompt, task.reward_weights["answer"]) == (prompt, weight)
        said = capsys.readouterr().out
        assert said.startswith(f"left out of own.yaml: {lost}") if lost else said == ""


def test_solved_is_the_answer_else_the_first_function():
    for parts, solved in (
        ({"short": 1.0}, True),
        ({"short": 2.0}, True),
        ({"short": 0.9}, False),
        ({"short": 1.0, "answer": 0.0}, False),
        ({"first": None, "second": 1.0}, True),
        ({"first": None, "timeout": 1.0}, False),
    ):
        assert Trajectory([1], DRAWN, "", parts, reward=0.0).is_solved == solved, parts


USER, ASKED = ({"role": "user", "content": text} for text in ("2?", "1?"))
SYSTEM = {"role": "system", "content": "S"}
ANSWER = {"role": "assistant", "content": "x"}
# As in https://huggingface.co/docs/trl/grpo_trainer#using-a-custom-reward-function
SEEN = {  # the row, task.prompt, what the model is asked, and the function's prompt and completion
    # A column completion is left out by TRL as well.
    "text": ({"prompt": "2?", "completion": "4"}, None, "2?", "2?", "x"),
    "worded": ({"q": "2"}, "{q}?", [USER], "2?", "x"),
    "worded text": ({"prompt": "2"}, "{prompt}?", [USER], "2?", "x"),
    "messages": ({"prompt": [USER]}, None, [USER], [USER], [ANSWER]),
    "worded messages": ({"prompt": [ASKED], "q": 2}, "{q}?", [USER], [USER], [ANSWER]),
}


@pytest.mark.parametrize("system", [None, "S"])
@pytest.mark.parametrize("name", SEEN)
def test_a_function_is_given_text_or_messages_as_the_rows_are(folder, capsys, name, system):
    """As is the model; but where task.prompt words a text, what it makes of it alone."""
    row, wording, posed, prompt, completion = SEEN[name]
    task = make_task("my_rewards:see", prompt=wording, system_prompt=system)
    if system is not None:
        asked = f"S\n\n{posed}" if isinstance(posed, str) else [SYSTEM, *posed]
        prompt, posed = asked if prompt == posed else prompt, asked
    assert task.pose(row) == posed
    assert reward_parts(task, [["x"]], [row], [[DRAWN]], 9) == [[{"see": 1.0}]]
    names = {"prompts", "completions", "completion_ids", *row} - {"prompt", "completion"}
    names |= {"rewards", "max_completion_length", "log_metric"}
    assert capsys.readouterr().out == f"{sorted(names)} {[prompt]} {[completion]}\n"


def paid(reward: str | Task, *settings: str) -> list[list[dict]]:
    is_made = isinstance(reward, Task)
    task = reward if is_made else load_task(make_config(f"task.reward={reward}", *settings).task)
    return reward_parts(task, [["yes", "no"]] * 2, KINDS, [[DRAWN] * 2] * 2, 4)


def test_functions_are_named_of_one_file_or_of_several(tmp_path):
    assert functions_in("mine:[judge, of_math]") == ["mine:judge", "mine:of_math"]
    assert functions_in("[mine:judge, a.b:[c, d]]") == ["mine:judge", "a.b:c", "a.b:d"]
    typed = "task.reward=[my_rewards:short, lengths:cosine]"
    assert make_config(typed).task.reward.startswith("[my_rewards:")
    # Bug: a list, as YAML reads it, was compared with its text, so what was typed was refused.
    (tmp_path / "found.yaml").write_text("task: {reward: my_rewards:short}")
    assert chat.harmless(tmp_path / "found.yaml", [typed])


OBJECT = "class Own:\n    __hash__ = None\n    {}def __call__(self, **columns): return pay({})\n"
OBJECT += "own = Own()"
FORMS = {
    "def": "def own(**columns): return pay(columns)",
    "async def": "async def own(**columns): return pay(columns, await nap())",
    "object": OBJECT.format("", "columns"),
    "async object": OBJECT.format("async ", "columns, await nap()"),
    "partial": "def f(one, **columns): return pay(columns)\nown = functools.partial(f, 1)",
}
# Of the first question and of the second, to which `other` does not apply
PAID = [{"own": 0.5, "other": 0.25, "long": 0.5}, {"own": 0.5, "other": None, "long": 0.5}]
WORTH = {"own": 1.0, "other": 2.0, "long": 4.0, "timeout": 0.0}


@pytest.mark.parametrize("names", ["[own]", "[own, other]", "[other, own]"])
@pytest.mark.parametrize("form", FORMS)
def test_a_function_is_called_alike_in_every_form_and_place(folder, form, names):
    """With copies, in order, once a question; late only where it can be left; its line is told."""
    siblings = USERS["siblings"]
    (folder / "siblings.py").write_text(siblings + FORMS[form])
    import_file.cache_clear()
    reward, order = f"[siblings:{names}, my_rewards:long]", re.findall(r"\w+", names)
    task, module = make_task(reward, reward_timeout=5), import_file(folder / "siblings.py")
    before, is_async = copy.deepcopy(KINDS), "async" in form or "other" in order
    timeout = {"timeout": 0.0} if is_async else {}
    for rows, parts in zip(paid(task), PAID, strict=True):
        parts = {name: parts[name] for name in (*order, "long")}
        weights = {name: WORTH[name] for name in parts | timeout}
        total = sum(weights[name] * (value or 0.0) for name, value in parts.items())
        for row in rows:
            assert row == parts | timeout and [n for n in row if n in parts] == [*parts]
            assert total_reward(row, weights) == total
    assert total_reward(dict.fromkeys(WORTH), WORTH) == 0 and before == KINDS
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()  # none is left behind
    earlier = order[: order.index("own")]
    assert [(question["prompt"], earlier) for question in KINDS] == module.CALLS
    assert task.take_logged() == {name: {"own": (4, 2), "other": (2, 2)}[name] for name in order}
    start = siblings.count("\n") + 1 + 2 * ("class" in FORMS[form])
    for pay, said in (
        (module.fail, f"line {siblings.count(chr(10))}: own raised ZeroDivisionError: .*1\\?"),
        (lambda *_: [float("nan")] * 2, f"line {start}: own must return a list of 2 .*1\\?"),
    ):
        module.pay = pay
        with pytest.raises(RewardError, match=f"siblings.py, {said}"):
            paid(task)
    module.pay, module.nap = lambda *_: [1.0] * 2, lambda: asyncio.sleep(60)
    task = make_task(reward, reward_timeout=0.1)
    expected = {"own": None, "timeout": 1.0} if "async" in form else {"own": 1.0}
    assert all(row.items() >= expected.items() for group in paid(task) for row in group)


@pytest.mark.timeout(60)
def test_async_functions_have_one_loop_for_all_steps_which_a_hung_thread_does_not_hold(
    folder, monkeypatch
):
    """Bugs: a lock or client at module level ended the run in its second evaluation; then what a
    call had left open, here a task, was cancelled behind its step."""
    (folder / "judges.py").write_text(USERS["judges"])
    module = import_file(folder / "judges.py")
    for _ in range(2):
        start = time.perf_counter()
        (row, _), _ = paid("judges:[client, hangs]", "task.reward_timeout=1")
        assert row == {"client": 1.0, "hangs": None, "timeout": 1.0}
        assert not any(task.done() for task in module.LEFT)
        assert time.perf_counter() - start < 10
    assert len(module.LOOPS) == 1 and len(module.LEFT) == 4
    monkeypatch.setattr(reward_functions, "LOOPS", {})
    reward_functions.run(asyncio.sleep(0))
    child = os.fork()
    if child == 0:  # with a loop of its own
        os._exit(reward_functions.run(asyncio.sleep(0, 7)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert reward_functions.run(asyncio.sleep(0, 8)) == 8
    world = alone()
    threading.Timer(0.1, world.signals.note, [signal.SIGTERM]).start()
    with pytest.raises(Left), world.left_by_all():  # an evaluation
        pytest.fail(reward_functions.run(asyncio.sleep(600, "awaited in spite of the signal")))
    deadline = time.monotonic() + 10
    while asyncio.all_tasks(*reward_functions.LOOPS.values()):  # it is cancelled
        assert time.monotonic() < deadline


@pytest.mark.timeout(60)
def test_a_judges_own_tasks_go_on_from_step_to_step_and_between_them(folder, monkeypatch, capsys):
    """Bugs: a queue's worker was cancelled behind the first step, and then where one exited."""
    (folder / "queued.py").write_text(USERS["queued"])
    module = import_file(folder / "queued.py")
    for _ in range(2):
        assert [row["judge"] for row in paid("queued:judge")[0]] == [1.0, 0.0]
        num_beats = len(module.BEATS)
        time.sleep(0.1)
        assert len(module.BEATS) > num_beats
    with pytest.raises(RewardError, match=r"queued.py, line \d+: cancelled was .*question {'prom"):
        paid("queued:cancelled")
    assert paid("queued:exits")[0][0] == {"exits": 1.0, "timeout": 0.0}
    assert "has raised SystemExit('no key')" in capsys.readouterr().out
    monkeypatch.setattr(reward_functions, "CLOSE_S", 0.5)
    reward_functions.close()  # as at the end of the process
    assert [task.done() for task in module.OWN[:3]] == [True, True, False]
    with pytest.raises(RewardError, match="has cancelled all tasks"):
        paid("queued:cancels_all")


@pytest.mark.timeout(60)
def test_a_run_ends_where_nothing_can_bring_what_its_judge_awaits(folder, monkeypatch, capfd):
    """Bugs: a worker that nothing held hung the run for good once it had raised, or was collected
    before. And a task that had failed, and mattered to nobody, ended a run whose call was slow."""
    monkeypatch.setattr(reward_functions, "LOST_S", 0.7)
    monkeypatch.setattr(reward_functions, "LOOPS", {})
    (folder / "loses.py").write_text(USERS["loses"])
    assert paid("loses:collected")[0][0] == {"collected": 1.0, "timeout": 0.0}
    for name in ("unheld", "held"):
        says = r"waits, .*work\(\).* has no attribute 'no_such_key'"
        with pytest.raises(RewardError, match=says):
            paid(f"loses:{name}")
    for kind in ("timer", "thread", "pool", "pipe", "processor"):
        monkeypatch.setitem(KINDS[0], "kind", kind)
        assert paid("loses:slow")[0][0] == {"slow": 1.0, "timeout": 0.0}


@pytest.mark.timeout(180)
def test_a_signal_in_an_await_ends_the_run_after_its_step(folder, rotary_model_folder, python):
    """At the end nothing waits for the threads that hang."""
    (folder / "judges.py").write_text(USERS["judges"])
    given = ["task.reward=judges:[client, hangs, signalled]", f"task.train={folder}/rows.jsonl"]
    sizes = ["training.num_samples_per_step=8", "validation.num_examples=4", "validation.every=1"]
    given = arguments(folder, rotary_model_folder, *given, *sizes, "task.reward_timeout=0.1")
    command = [python, str(ROOT / "main.py"), *given]
    how = {"cwd": folder, "env": harness.ENVIRONMENT, "capture_output": True, "text": True}
    result = subprocess.run(command, **how)
    assert result.returncode == 143 and not result.stderr, result.stderr[-2000:]
    assert load_state(folder / "x/checkpoints/last").state.step == 2
    assert read_rows(folder / "x")[-1]["train/reward_timeouts"] == 1.0


def test_the_reward_chooses_the_best_model_where_no_function_says_what_is_right():
    assert make_config("task.reward=my_rewards:short").best_metric == "eval/reward"
    chosen = make_config("task.reward=my_rewards:short", "validation.best_by=pass@1")
    assert chosen.best_metric == "eval/pass@1"
    assert make_config().best_metric == "eval/pass@1"


@pytest.mark.parametrize("blank", ["", " ", "\t", "\u00a0", "\u2003"])
def test_what_is_blank_is_blank_wherever_it_is_read(blank, folder):
    """Bug: a prompt of white space was asked, where a completion of it was refused."""
    rows = [CsvRow(n="1"), CsvRow(n=blank)]
    assert number_columns(rows) == {"n"} and with_numbers(rows[1], {"n"}) == {"n": None}
    (folder / "rows.jsonl").write_text(f'{{"prompt": "1?"}}\n{blank}\n')
    assert len(read_text_file(folder / "rows.jsonl")) == 1
    task = make_task("my_rewards:long")
    (folder / "blank.py").write_text(f"{MODULE}    return 0.0\n")
    for refused in (
        lambda: task.parse_row({"prompt": blank}, options=task.options),
        lambda: check_functions(make_task("blank"), {"q": blank}, 9),
        lambda: check_functions(task, {"prompt": [USER | {"content": blank}]}, 9),
        lambda: imitate.parse_answer(task, {"prompt": "1?", "completion": blank}, options=None),
        lambda: gsm8k.parse_row({"question": blank, "answer": "#### 1"}, options=None),
        lambda: math500.parse_row({"problem": blank, "answer": "1"}, options=None),
    ):
        with pytest.raises(ValueError):
            refused()


def test_length_rewards_are_those_of_their_formulas():
    """Of completions of 1, 2, 8, 9 and 10 tokens, at most 10, the first two right."""
    columns = {"completion_ids": [[0] * n for n in (1, 2, 8, 9, 10)], "max_completion_length": 10}
    along = np.cos(np.pi * np.arange(10) / 10)
    for name, expected in (
        ("soft_overlong", [0, 0, 0, -0.5, -1]),
        ("shorter", [-1 / (1 + np.e), -np.e / (1 + np.e), None, None, None]),
        ("cosine", [*1.5 + 0.5 * along[1:3], *-5 - 5 * along[8:10], -10]),
    ):
        (_, function) = make_task(f"lengths:{name}").functions[name]
        given = function(**columns, rewards={"mine": [1.0, 1.0, 0.0, None, 0.5]})
        for value, right in zip(given, expected, strict=True):
            assert value is None if right is None else value == pytest.approx(right)


def test_one_file_serves_both_and_so_many_rows_are_held_out_by_their_hash(folder):
    load = functools.partial(load_rows, "my_rewards:answer", num_examples=512)
    held_out = load("rows.jsonl", "validation", num_examples=6)
    train = load("rows.jsonl", "train", exclude=held_out)
    assert len(held_out) == 6 and [row for row in ROWS if row not in held_out] == train
    assert load("rows.jsonl", "validation", num_examples=7)[:6] == held_out
    assert len(load("rows.jsonl", "validation")) == 20  # half is left to train on
    (folder / "other.csv").write_text("prompt,answer\n1 + 1 =,2\n9?,9\n")
    _, row = load("other.csv", "validation", held_out=False)
    assert row == {"prompt": "9?", "answer": "9"}
    assert len(load("rows.jsonl", "train", held_out=False, exclude=ROWS[1:2])) == 39


TYPED = """
def typed(prompts, price, code, n, level, **kwargs):
    print(prompts[0], price, code, n, level, kwargs["max_completion_length"])
    return [1.0] * len(prompts)
"""


def test_what_a_csvs_row_is_does_not_depend_on_its_file(folder, tokenizer, capsys):
    """Bugs: numbers were made per file, so an "n/a" let questions that were held out be trained on;
    9.50 was asked as 9.5."""
    (folder / "typed.py").write_text(TYPED)
    head = "q,price,code,n,level,\n"
    (folder / "train.csv").write_text(f"{head}1,9.50,007,1,2,a\n2,8,1e7,,3,b\n")
    (folder / "eval.csv").write_text(f"{head}1,9.5,007,1,2,a\n2,,1e7,n/a,3,b\n")
    given = ["task.reward=typed:typed", "task.train=train.csv", "task.eval=eval.csv"]
    config, lines = make_config(*given, "task.prompt='{q} at {price}?'"), []
    task = load_task(config.task)
    how = {"tokenizer": tokenizer, "context": None, "log": lines.append}
    validation, stream = load_questions(task, config, **how)
    assert "the column n stays text: 1 of its cells are no numbers" in lines
    row = {"q": "2", "price": "8", "code": "1e7", "n": "", "level": "3", "Unnamed: 5": "b"}
    assert stream.questions == [row]  # the other is held out
    capsys.readouterr()
    for question in (*validation, row := stream.questions[0]):
        reward_parts(task, [["x"]], [question], [[None]], 320)
    assert capsys.readouterr().out.splitlines() == [
        "1 at 9.5? [9.5] ['007'] ['1'] [2] 320",
        "2 at ? [None] ['1e7'] ['n/a'] [3] 320",
        "2 at 8? [8] ['1e7'] [''] [3] 320",
    ]
    numbers = {"q": 2, "price": 8, "code": "1e7", "n": "", "level": 3, "Unnamed: 5": "b"}
    assert task.question_key(numbers) == task.question_key(row) != task.question_key(dict(row))
    config = make_config(*given, "mode=evaluate", "task.prompt={q}")
    task = load_task(config.task)
    load_questions(task, config, **how)
    assert task.number_columns == {"q", "price", "level"}  # as in training
    assert with_numbers(CsvRow(q="7"), task.number_columns) == {"q": 7}  # a file may lack columns


def test_a_reward_for_length_gets_the_limit_of_an_evaluation_there(folder, rotary_model_folder):
    """And tools.chat and tools.attack, which have no questions of a run, give it one too."""
    given = ["task.reward=my_rewards:long", "task.train=rows.jsonl"]
    given = arguments(folder, rotary_model_folder, *given, "validation.max_new_gen_tokens=4")
    run = load_run(load_config(given))
    groups = main.sample_validation(run)
    lengths = [len(t.completion.token_ids) for group in groups for t in group]
    assert [t.reward for group in groups for t in group] == [n / 4 for n in lengths]
    assert max(lengths) == 4
    assert attack.load("lengths:soft_overlong", "rows.jsonl", [])[0]("x") == 0.0


def test_functions_are_named_as_they_are_written_and_leave_the_run_where_it_is(folder):
    """Bug: partial and objects have no __name__, two of one decorator the same; chdir moved all."""
    (folder / "written.py").write_text(USERS["written"])
    (row, _), _ = paid("written:[half, one, two]")
    assert row == {"half": 0.5, "one": 1.0, "two": 1.0} and Path.cwd() == folder
    with pytest.raises(RewardError, match=r"written\.py, line 10: two must return a tensor"):
        own_advantages("written:two", torch.zeros(1, 1), [[Trajectory([1], DRAWN, "", {}, 0.0)]])
    with pytest.raises(ConfigError, match="timeout is the name of another part: rename"):
        paid("written:timeout")
    with pytest.raises(RewardError, match=r"cosine raised .* named first: the first says"):
        paid("[lengths:cosine, written:one]")


MODULE = """
def generate_prompt(example, *, options):
    return example["q"]
def reward_function(completion, example, *, options, num_tokens):
"""


def test_a_module_needs_a_prompt_and_a_reward_alone(folder):
    (folder / "mine.py").write_text(f"{MODULE}    return {{'answer': 0.5, 'read': 12}}\n")
    (folder / "rows.csv").write_text("q,level\n" + "".join(f"{n},3\n" for n in range(80)))
    task = make_task("mine")
    assert task.options.reward_weights == {"answer": 1.0}
    rows = load_rows("mine", "rows.csv", "train")
    assert 60 < len(rows) < 80 and rows[0].keys() == {"q", "level"}
    assert task.question_key({"b": 1, "a": 2}) == task.question_key({"a": 2, "b": 1})
    assert reward_parts(task, [["y"]], [rows[0]], [[None]], 9)[0][0]["answer"] == 0.5
    assert read_answer(task, " x\n", rows[0]) == "12"
    with pytest.raises(SystemExit, match="give it an EXAMPLE_ROW"):
        attack.load("mine", None, [])


@pytest.mark.timeout(120)
def test_the_first_lines_of_the_docs_and_the_template_train(folder, rotary_model_folder):
    """Bug: what main.py asks before torch took the run's name for that of a task."""
    page = (ROOT / "docs/tasks.md").read_text()
    (code,) = re.findall("```python\n(def plural.*?)```", page, re.DOTALL)
    command = re.search("```bash\ncp (\\S+) . && python main.py (.*?)```", page, re.DOTALL)
    (folder / "my_rewards.py").write_text(code)
    shutil.copy(ROOT / command[1], folder)
    typed = shlex.split(command[2].replace("\\\n", ""))
    assert make_config(*typed).task.name == "plural"  # all of its keys are there
    small = [text for text in typed if text.startswith("task.")]
    check_files(make_config(*small))  # nothing is missing
    sources = [f"task.{key}={ROOT}/tasks/plurals.csv" for key in ("train", "eval")]
    for given, part in ((small, "plural"), (["task.name=template", *sources], "answer")):
        given = [*given, "training.num_steps=1", f"run.name={part}"]
        run = load_run(load_config(arguments(folder, rotary_model_folder, *given)))
        assert main.run_training(run) in (0, 1)  # 1 where no completion earned more than another
        assert f"train/part_{part}" in read_rows(run.folder)[1]


def test_a_prompt_that_shows_the_answer_and_columns_that_rows_lack_are_told(folder, tokenizer):
    rows = [{**row, "hint": n} if n > 2 else row for n, row in enumerate(ROWS[:39])]
    rows.append({"prompt": "9?", "hint": 1, "rewards": 3})
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for prompt in ("{prompt} \\boxed{answer}", "{prompt} \\boxed{...}"):
        given = ["task.reward=my_rewards:answer", "task.train=rows.jsonl"]
        config, lines = make_config(*given, f"task.prompt={json.dumps(prompt)}"), []
        task = load_task(config.task)
        load_questions(task, config, tokenizer=tokenizer, context=None, log=lines.append)
        warned = [line for line in lines if "the model is shown column answer" in line]
        assert len(warned) == ("{answer}" in prompt)
        (told,) = (line for line in lines if "of its" in line)
        assert len([line for line in lines if "the run's rewards, not this column" in line]) == 1
        lacking = "no answer in 1, no hint in 3, no rewards in 39 of its 40 rows"
        assert told == f"warning: rows.jsonl: {lacking}; the others have it"
