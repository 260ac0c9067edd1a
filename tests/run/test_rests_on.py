"""What a run rests on: it goes on with the questions that it began with."""

from pathlib import Path

import pytest
from harness import NUMBERS, make_config, run_on_ranks, train, train_forked, write_questions

from engine.config import ConfigError
from engine.data import FitsContext, QuestionStream
from engine.distributed import World
from engine.fingerprint import of_questions
from engine.run import Run
from logger import Logger

ONE, TWO = "training.num_steps=1", "training.num_steps=2"

# The questions


def test_other_questions_or_another_order_are_seen_and_what_json_cannot_hold_is_left_out():
    rows = [{"a": n, "b": [str(n)]} for n in range(4)]
    same = of_questions(rows[:2], rows[2:])
    assert same == of_questions([{"b": ["0"], "a": 0}, *rows[1:2]], rows[2:])
    others = [(rows[:3], rows[3:]), (rows[:2], rows[:1:-1]), (rows[:2], [*rows[2:], {}])]
    assert same not in {of_questions(*splits) for splits in others}
    assert of_questions([{"a": {1}}]) == of_questions([{"a": {2}}]) != of_questions([{"b": {2}}])
    of_questions([{1: 2, "a": 3}])


def test_a_run_does_not_go_on_with_other_questions(tmp_path, rotary_model_folder):
    """Bug: pass@1 and best/ then compared the answers to different questions."""
    file = write_questions(tmp_path / "rows.jsonl")
    sources = [f"task.train={file}", f"task.eval={file}"]
    train(tmp_path, rotary_model_folder, *sources, ONE)
    content = file.read_text()
    lines = content.splitlines(keepends=True)
    for changed in (content + '{"nums": [5, 6], "target": 11}\n', "".join(reversed(lines))):
        file.write_text(changed)
        status, output = train_forked(tmp_path, rotary_model_folder, *sources, TWO)
        assert status == 2 and "Traceback" not in output
        assert "error: the questions of task.train and task.eval = " in output
        assert "run.name" in output
    file.write_text(content)
    assert "resumed after step 1" in train(tmp_path, rotary_model_folder, *sources, TWO)


def problem_on(world: World, differs_in: str) -> str:
    """The error of ranks of which each has the same questions, or its own order in one split."""
    rows = [{"nums": [n], "target": n} for n in NUMBERS]
    own = rows[world.rank :] + rows[: world.rank]
    stream = QuestionStream(
        own if differs_in == "training" else rows,
        seed=0,
        shuffle=True,
        fits=FitsContext(None, 1, {}),
        log=print,
    )
    validation = own[:9] if differs_in == "validation" else rows[:9]
    config, task = make_config(), None
    run = Run(config, world, Logger(rank=1), Path(), task, None, validation, stream)
    try:
        run.check_questions()
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("differs_in", ["validation", "training", "nothing"])
def test_ranks_with_different_questions_all_end_with_one_line(tmp_path, differs_in):
    """Bug: with list(set(...)) in a task, a rank was validated on what another had trained on."""
    first, second = run_on_ranks(problem_on, 2, differs_in, folder=tmp_path)
    assert first == second and "\n" not in first
    assert ("task.name = countdown: " in first and "set(" in first) == (differs_in != "nothing")
