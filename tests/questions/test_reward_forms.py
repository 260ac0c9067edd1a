"""Reward functions as TRL has them: async, of several files, that apply to some rows only."""

import asyncio
import time

import numpy as np
import pytest
from harness import make_config

from engine.core.types import Completion
from engine.questions.tasks import functions_in, load_task, reward_parts, total_reward
from engine.run.config_file import harmless

MINE = """
import asyncio, time

async def judge(completions, log_metric, **kwargs):
    await asyncio.sleep(0.2)
    log_metric("judged", len(completions))
    return [float("yes" in text) for text in completions]

async def slow(completions, prompts, **kwargs):
    await asyncio.sleep(30 if "late" in prompts[0] else 0)
    return [1.0] * len(completions)

def of_math(completions, kind, rewards, **kwargs):
    assert rewards["judge"] == [float("yes" in text) for text in completions]
    return [0.5 if k == "math" else None for k in kind]
"""
LENGTHS = """
def long(completion_ids, max_completion_length, **kwargs):
    return [len(ids) / max_completion_length for ids in completion_ids]
"""
ROWS = [{"prompt": "1?", "kind": "math"}, {"prompt": "late?", "kind": "code"}]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "other.py").write_text(LENGTHS)
    monkeypatch.chdir(tmp_path)


def paid(reward: str, *settings: str) -> list[list[dict]]:
    options = make_config(f"task.reward={reward}", *settings).task
    task = load_task(options.code)
    task.max_completion_length = 4
    zeros = np.zeros(2, np.float32)
    group = [Completion([1, 2], zeros, zeros, False, zeros > 0)] * 2
    return reward_parts(task, [["yes", "no"]] * 2, ROWS, options, [group] * 2)


@pytest.mark.parametrize(
    ("reward", "names"),
    [
        ("mine:judge", ["mine:judge"]),
        ("mine:[judge, of_math]", ["mine:judge", "mine:of_math"]),
        ("[mine:judge, a.b:[c, d]]", ["mine:judge", "a.b:c", "a.b:d"]),
    ],
)
def test_functions_are_named_of_one_file_or_of_several(reward, names):
    assert functions_in(reward) == names
    assert make_config("task.reward=[mine:judge, other:long]").task.reward.startswith("[mine:")


def test_functions_of_several_files_that_were_typed_are_trusted(tmp_path):
    """Bug: a list, as YAML reads it, was compared with its text, so tools.chat refused it."""
    (tmp_path / "found.yaml").write_text("task: {reward: mine:judge}")
    typed = "task.reward=[mine:judge, other:long]"
    assert harmless(tmp_path / "found.yaml", [typed])
    with pytest.raises(ValueError, match="a file that was found cannot have code run"):
        harmless(tmp_path / "found.yaml", [])


def test_parts_come_in_their_order_and_none_weighs_nothing():
    math, code = paid("[mine:judge, mine:of_math, other:long]")
    assert math[0] == {"judge": 1.0, "of_math": 0.5, "long": 0.5, "timeout": 0.0}
    assert code[1] == {"judge": 0.0, "of_math": None, "long": 0.5, "timeout": 0.0}
    weights = {"judge": 1.0, "of_math": 2.0, "long": 1.0, "timeout": 0.0}
    assert [total_reward(row, weights) for row in (math[0], code[1])] == [2.5, 0.5]
    assert total_reward(dict.fromkeys(weights), weights) == 0
    assert load_task("[mine:judge, mine:of_math, other:long]").take_logged() == {"judged": (4, 2)}


def test_async_functions_wait_together_and_one_that_is_late_does_not_apply():
    start = time.perf_counter()
    in_time, late = paid("mine:[judge, slow]", "task.reward_timeout=1")
    assert time.perf_counter() - start < 10  # not 30
    assert in_time[0] == {"judge": 1.0, "slow": 1.0, "timeout": 0.0}
    assert late[0] == {"judge": 1.0, "slow": None, "timeout": 1.0}
    with pytest.raises(RuntimeError):
        asyncio.get_running_loop()  # none is left behind


@pytest.mark.parametrize(
    ("settings", "metric"),
    [
        (["task.reward=mine:judge"], "eval/reward"),
        (["task.reward=mine:judge", "validation.best_by=pass@1"], "eval/pass@1"),
        ([], "eval/pass@1"),
        (["validation.best_by=reward"], "eval/reward"),
    ],
)
def test_the_reward_chooses_the_best_model_where_no_function_says_what_is_right(settings, metric):
    assert make_config(*settings).best_metric == metric


ALONG = np.cos(np.pi * np.arange(10) / 10)
LENGTH_REWARDS = {  # of completions of 1, 2, 8, 9 and 10 tokens, at most 10, the first two right
    "soft_overlong": [0, 0, 0, -0.5, -1],
    "shorter": [-1 / (1 + np.e), -np.e / (1 + np.e), None, None, None],
    "cosine": [
        1.5 + 0.5 * ALONG[1],
        1.5 + 0.5 * ALONG[2],
        -5 - 5 * ALONG[8],
        -5 - 5 * ALONG[9],
        -10,
    ],
}


@pytest.mark.parametrize("name", LENGTH_REWARDS)
def test_length_rewards_are_those_of_their_formulas(name):
    (_, function) = load_task(f"lengths:{name}").functions[name]
    columns = {"completion_ids": [[0] * n for n in (1, 2, 8, 9, 10)], "max_completion_length": 10}
    given = function(**columns, rewards={"mine": [1.0, 1.0, 0.0, None, 0.5]})
    for value, expected in zip(given, LENGTH_REWARDS[name], strict=True):
        assert value is None if expected is None else value == pytest.approx(expected)
