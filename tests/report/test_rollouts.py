"""rollouts.jsonl: what is kept of a step, and that it stays small; test_shown.py too."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from harness import make_config, make_policy, make_run, read_jsonl

from engine.core.types import Completion, MicroBatch, Trajectory
from engine.report import completions as rollouts
from engine.run import log as log_of_run
from engine.run.log import describe_step
from engine.run.state import Run
from engine.update.optimizer import Outcome, Update
from engine.update.shards import equal_passes


@pytest.fixture
def run(rotary_model_folder, tmp_path) -> Run:
    """A run whose folder has the empty file, and which keeps every step."""
    run = make_run(make_policy(rotary_model_folder), make_config("logging.rollouts_every=1"))
    run.folder = tmp_path
    (tmp_path / "rollouts.jsonl").touch()
    return run


def trajectory(ids: list[int], reward: float = 1.0, **changes) -> Trajectory:
    """A completion that ended by itself, whose token i has log-probability -i and entropy i / 8."""
    positions = np.arange(len(ids), dtype=np.float32)
    inserted = np.zeros(len(ids), dtype=bool)
    completion = Completion(ids, -positions, positions / 8, False, inserted)
    parts = {"format": 1.0, "answer": reward}
    return Trajectory([2, 3], completion, "", parts, reward, **changes)


def log(run: Run, groups: list, questions: list[dict], *micro_batches: object, step: int) -> None:
    run.state.step = step
    lines = describe_step(run, questions, groups, Update(Outcome.UPDATED, list(micro_batches)))
    with (run.folder / "rollouts.jsonl").open("a") as file:
        file.write(lines)


def kept(run: Run) -> list[dict]:
    return read_jsonl(run.folder / "rollouts.jsonl")


def test_the_texts_of_tokens_join_to_the_completion(tokenizer):
    """The token that completes a character, of several bytes, has all of it."""
    replacement = "\N{REPLACEMENT CHARACTER}"
    for text in ("", "12 and 34", "3 €\n😀😀", f"{replacement}x"):
        ids = tokenizer.encode(text)
        texts = rollouts.token_texts(ids, tokenizer)
        assert len(texts) == len(ids) and "".join(texts) == text
    ids = tokenizer.encode("€1")
    assert rollouts.token_texts(ids, tokenizer) == ["", "", "€", "1"]
    cut = rollouts.token_texts(ids[:2], tokenizer)
    assert cut == ["", tokenizer.decode(ids[:2])] and set(cut[1]) == {replacement}


def test_a_line_holds_the_groups_completions_best_first(run, tokenizer):
    """A token's weight is the formula's; a pass added for another rank says nothing of it."""
    group = [trajectory([5, 6, 7], 0.25, advantage=-0.75), trajectory([8, 9], advantage=1 / 3)]
    trained = MicroBatch(group[1:], None, None, None, torch.tensor([[1 / 7, 0.0]]), None)
    run.world.size = 2
    passes = equal_passes([trained], SimpleNamespace(gather=lambda num: [num, num + 1]))
    group[0].completion.is_inserted[1], group[0].completion.log_probs[2] = True, np.nan
    question = {"nums": [1, 2], "target": 3}
    log(run, [group], [question], *passes, step=4)
    (line,) = kept(run)
    best, worst = line["completions"]
    assert (line["step"], line["size"]) == (4, 2)
    assert line["gold"] == "nums: 1 2, target: 3" and line["prompt"] == tokenizer.decode([2, 3])
    assert (best["advantage"], best["weight"], best["solved"]) == (0.3333, 0.1429, True)
    assert (worst["advantage"], worst["weight"], worst["solved"]) == (-0.75, 0, False)
    assert "".join(worst["tokens"]) == tokenizer.decode([5, 6, 7])
    assert worst["log_probs"] == [0, -1, None] and worst["entropies"] == [0, 0.125, 0.25]
    assert worst["inserted"] == [1] and best["inserted"] == []


def test_of_a_large_group_the_best_and_the_worst_are_kept_and_of_a_long_completion_both_ends(run):
    ids = list(itertools.islice(itertools.cycle(range(5, 205)), 600))
    group = [trajectory(ids, reward) for reward in range(40)]
    group[-1].completion.is_inserted[[100, 400, 500]] = True
    log(run, [group], [{}], step=1)
    (line,) = kept(run)
    rewards = [row["reward"] for row in line["completions"]]
    assert line["size"] == 40
    assert rewards == [*range(39, 31, -1), *range(7, -1, -1)]
    row = line["completions"][0]
    assert (row["gap"], row["inserted"]) == ([384, 600 - 512], [100, 500 - 88])
    assert row["log_probs"] == [-float(i) for i in [*range(384), *range(472, 600)]]
    tokenizer = run.policy.tokenizer
    assert "".join(row["tokens"][:384]) == tokenizer.decode(ids[:384])
    assert "".join(row["tokens"][384:]) == tokenizer.decode(ids[472:])


def test_steps_that_are_not_due_and_other_ranks_write_nothing(run):
    group = [trajectory([5])]
    run.config = make_config("logging.rollouts_every=3")
    for step in range(1, 8):  # the first step is always due
        log(run, [group] * 9, [{}] * 9, step=step)
    assert [line["step"] for line in kept(run)] == [1] * 3 + [3] * 3 + [6] * 3
    for every, rank in ((0, 0), (1, 1)):
        run.config, run.world.rank = make_config(f"logging.rollouts_every={every}"), rank
        log(run, [group], [{}], step=9)
    assert len(kept(run)) == 9
    (run.folder / "rollouts.jsonl").unlink()  # bug: the next step ended the run
    run.config, run.world.rank = make_config("logging.rollouts_every=3"), 0
    log(run, [group], [{}], step=9)
    assert len(kept(run)) == 1


def test_the_file_never_grows_beyond_its_limit_and_reaches_into_the_late_steps(run, monkeypatch):
    """And a run that is cut back and goes on decides as the unbroken one did."""
    monkeypatch.setattr(log_of_run, "MAX_ROLLOUTS_BYTES", 20_000)
    file, before_step_100 = run.folder / "rollouts.jsonl", ""
    for step in range(1, 400):
        if step == 100:
            before_step_100 = file.read_text()
        log(run, [[trajectory([5, 6])]], [{}], step=step)
        assert file.stat().st_size <= 20_000
    unbroken = file.read_text()
    assert kept(run)[-1]["step"] > 200
    file.write_text(before_step_100)
    for step in range(100, 400):
        log(run, [[trajectory([5, 6])]], [{}], step=step)
    assert file.read_text() == unbroken
