"""All completions on disk: a gzip member a step, cut back where a run goes on."""

from types import SimpleNamespace

import pandas
import pytest
from harness import CPU, make_config
from reference import EASY, GRPO, HARD, config_of, make_groups

from engine.core.distributed import World
from engine.report.archive import append_completions, cut_completions
from engine.run.start import open_files
from engine.run.state import State
from logger import Logger


def steps_in(file) -> list[int]:
    return pandas.read_json(file, lines=True)["step"].unique().tolist()


@pytest.mark.parametrize("torn", [0, 1, 20])
def test_later_steps_and_a_torn_one_are_cut_off_and_the_rest_is_read_in_one_line(tmp_path, torn):
    file, questions = tmp_path / "completions-0.jsonl.gz", [{"q": "½"}, {"q": "\ud83d"}]
    groups = make_groups(config_of(*GRPO), EASY, HARD)
    for step in (1, 2, 3):
        append_completions(file, step, questions, groups)
    rows = pandas.read_json(file, lines=True)
    assert len(rows) == 3 * sum(map(len, groups)) and steps_in(file) == [1, 2, 3]
    assert {"question", "text", "parts", "advantage", "tokens", "truncated"} < set(rows)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - torn])
    cut_completions(file, 3)
    assert steps_in(file) == ([1, 2] if torn else [1, 2, 3])
    cut_completions(file, 1)
    append_completions(file, 2, questions, groups)
    assert steps_in(file) == [1, 2]


def test_each_rank_cuts_its_own_files(tmp_path):
    """Four files, which four ranks have left behind, and two ranks that go on after step 1."""
    groups = make_groups(config_of(*GRPO), EASY, HARD)
    files = [tmp_path / f"completions-{rank}.jsonl.gz" for rank in range(4)]
    for file in files:
        for step in (1, 2):
            append_completions(file, step, [{}, {}], groups)
    run = SimpleNamespace(
        config=make_config("logging.completions_every=1"),
        folder=tmp_path,
        logger=Logger(rank=1),
        world=World(rank=1, size=2, device=CPU),
        state=State(step=1),
        is_resumed=True,
    )
    open_files(run)
    assert [steps_in(file) for file in files] == [[1, 2], [1]] * 2
