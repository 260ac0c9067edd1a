"""mode=evaluate: where it writes, what it loads, votes, greedy answers; test_shown.py too."""

from functools import partial
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import ROOT, alone, arguments, make_config, make_row, run_on_ranks, seed

import main
from engine.core.distributed import World
from engine.report.metrics import single_answer_metrics
from engine.run.config_file import load_config
from engine.run.folder import run_folder

EVALUATE = [f"training.seed={seed()}", "training.max_new_gen_tokens=64", "mode=evaluate"]
EVALUATE += ["validation.num_examples=9", "validation.best_of_n=4"]


def test_a_runs_own_models_are_evaluated_into_its_folder(tmp_path):
    """Bug: they went to a folder of their own, such as runs/countdown-best-grpo-s0."""
    own, other = tmp_path / "own", tmp_path / "runs/countdown-best-grpo-s0"
    models = ["best", "merged", "merged-4bit", "checkpoints/step-000010", "checkpoints/last"]
    for name in models[:-1]:
        (own / name).mkdir(parents=True)
    (own / models[-1]).symlink_to("step-000010")

    def folder_of(model: str, *overrides: str) -> Path:
        overrides = [f"model.name={own / model}", f"run.dir={tmp_path / 'runs'}", *overrides]
        return run_folder(make_config("mode=evaluate", *overrides))

    assert folder_of("best") == other  # there is no run
    (own / "metrics.jsonl").touch()
    assert [folder_of(model) for model in models] == [own] * len(models)
    assert folder_of("best", "mode=train") == (named := tmp_path / "runs/countdown-own-grpo-s0")
    assert folder_of("best", "run.name=x") == tmp_path / "runs/x"
    with pytest.MonkeyPatch.context() as patch:  # root may write anywhere
        patch.setattr("os.access", lambda path, mode: False)
        assert folder_of("best") == named
    (tmp_path / "x").touch()  # bug: it failed after all the work, in a traceback
    with pytest.raises(ValueError, match=r"x cannot be written \(File exists\); give "):
        harness.load_run(load_config(arguments(tmp_path, ROOT / "tiny", *EVALUATE)))


def vote(*numbers: int, right: int) -> list[main.Trajectory]:
    """A group whose samples give these answers; 0 is no answer."""
    texts = [f"<answer>{number}</answer>" if number else "" for number in numbers]
    return [make_row(text=text, solved=n == right) for text, n in zip(texts, numbers, strict=True)]


GROUPS = [
    vote(1, 2, 2, right=2),  # the majority is right, though the first is not
    vote(1, 2, 2, right=1),  # wrong, though one sample is right
    vote(0, 3, 1, 1, 2, 3, 2, right=3),  # of equals the one given earliest
    vote(0, 0, 0, 5, right=5),  # no answer is no vote
    vote(0, 0, 0, right=3),
]
GREEDY = [
    [make_row(text="first", solved=True)],
    [make_row(text="lenient: 1")],
    [make_row(text="no", num_tokens=2)],
    [make_row(text="lenient: 3", solved=True)],
    [make_row(text="lenient: 3")],  # the answer to another question
]
GREEDY[3][0].completion.log_probs[0] = np.nan  # noise
QUESTIONS = [{"target": target} for target in range(5)]


def is_lenient_solved(text: str, example: dict, **_: object) -> bool:
    return text in ("first", f"lenient: {example['target']}")


def by_hand(world: World) -> list[dict[str, float]]:
    """The metrics of this rank's share of all questions, and of two: they go to ranks in turn."""
    share = slice(world.rank, None, world.size)
    rows = [[i, -i] for i in range(9)]  # more than ranks: else one after the other is in turn
    assert world.gather_rows(rows[share], shape=(9, 2)).tolist() == rows, "in their own places"
    task = harness.make_task("countdown")
    task.is_lenient_solved = is_lenient_solved
    measure = partial(single_answer_metrics, task)
    return [measure(QUESTIONS[:n], GROUPS[:n][share], GREEDY[:n][share], world) for n in (5, 2)]


def test_votes_and_greedy_answers_by_hand(tmp_path):
    """3, 1 and 2 of 5 questions, with Wilson's intervals; the same from three ranks."""
    metrics, _ = by_hand(alone())
    three, two, one = (0.6, 0.2307, 0.8824), (0.4, 0.1176, 0.7693), (0.2, 0.0362, 0.6245)
    for name, rates in {"majority": three, "greedy": one, "strict": one, "lenient": two}.items():
        found = [metrics.pop(f"eval/{name}{end}") for end in ("", "_low", "_high")]
        assert found == pytest.approx(rates, abs=1e-4), name
    assert metrics == {"eval/greedy_tokens": 18 / 5}
    ranks = run_on_ranks(by_hand, 3, folder=tmp_path)  # of which one has none of two questions
    assert ranks == [by_hand(alone())] * 3
