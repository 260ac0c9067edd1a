"""mode=evaluate: where it writes, what it loads, votes, greedy answers; test_one_run.py too."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import ROOT, alone, arguments, in_fp64, load_run, make_config, run_on_ranks, seed

import countdown
import main
from engine.core.distributed import World
from engine.core.types import Completion
from engine.questions.prompts import encode_prompts
from engine.report.evaluation import single_answer_metrics
from engine.run.config_file import load_config
from engine.run.folder import run_folder
from engine.run.state import Run

EVALUATE = [f"training.seed={seed()}", "training.max_new_gen_tokens=64", "mode=evaluate"]
EVALUATE += ["validation.num_examples=9", "validation.best_of_n=4"]


def load_evaluation(folder: Path, *overrides: str) -> Run:
    return load_run(load_config(arguments(folder, ROOT / "tiny", *EVALUATE, *overrides)))


def test_a_runs_own_models_are_evaluated_into_its_folder(tmp_path):
    """Bug: they went to a folder of their own, such as runs/countdown-best-grpo-s0."""
    own, other = tmp_path / "own", tmp_path / "runs/countdown-best-grpo-s0"
    models = ["best", "merged", "merged-4bit", "checkpoints/step-000010", "checkpoints/last"]
    for name in models[:-1]:
        (own / name).mkdir(parents=True)
    (own / models[-1]).symlink_to("step-000010")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/linked").symlink_to(own / "best")

    def folder_of(model: str, *overrides: str) -> Path:
        overrides = [f"model.name={own / model}", f"run.dir={tmp_path / 'runs'}", *overrides]
        return run_folder(make_config("mode=evaluate", *overrides))

    assert folder_of("best") == other  # there is no run
    (own / "metrics.jsonl").touch()
    assert [folder_of(model) for model in models] == [own] * len(models)
    assert folder_of("best", "mode=train") == (named := tmp_path / "runs/countdown-own-grpo-s0")
    assert folder_of("best", "run.name=x") == tmp_path / "runs/x"
    assert folder_of(".") == named and folder_of("../runs/linked") == own
    with pytest.MonkeyPatch.context() as patch:  # root may write anywhere
        patch.setattr("os.access", lambda path, mode: False)
        assert folder_of("best") == named


def test_an_evaluation_that_could_not_be_written_is_refused_at_the_start(tmp_path):
    """Bug: it failed after all the work, in a traceback. A file stands where the folder would."""
    (tmp_path / "x").touch()
    with pytest.raises(ValueError, match=r"x cannot be written \(File exists\); give "):
        load_evaluation(tmp_path)


def test_nothing_that_only_training_needs_is_loaded_or_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(main, "make_optimizer", pytest.fail)
    monkeypatch.setattr(main, "wrap_policy", pytest.fail)
    nowhere, file = tmp_path / "nowhere.jsonl", tmp_path / "questions.jsonl"
    file.write_text('{"nums": [3, 4], "target": 7}\n')
    data = [f"task.train={nowhere}", f"task.eval={file}"]
    run = load_evaluation(tmp_path / "runs", *data, "sampling.top_k=5")
    assert run.validation_questions == [{"nums": [3, 4], "target": 7}]
    assert main.run_evaluation(run) == 0
    assert run.policy.scorer is None
    assert all(parameter.grad is None for parameter in run.policy.model.parameters())
    assert "gradient" not in capsys.readouterr().out


def test_the_greedy_figure_is_that_of_the_likeliest_tokens(tmp_path, monkeypatch):
    """These tokens are found one by one, without cache, padding or batch; top-k must not matter."""
    in_fp64(monkeypatch)
    run = load_evaluation(tmp_path, "sampling.top_k=3")
    model, tokenizer, questions = run.policy.model, run.policy.tokenizer, run.validation_questions
    prompts = encode_prompts(questions, task=run.task, options=run.config.task, tokenizer=tokenizer)
    likeliest = []
    for prompt_ids in prompts:
        ids = list(prompt_ids)
        while len(ids) < len(prompt_ids) + 64 and ids[-1] != tokenizer.eos_token_id:
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        likeliest.append(tokenizer.decode(ids[len(prompt_ids) :], skip_special_tokens=True))
    wanted = dict(zip(map(str, questions[::2]), likeliest[::2], strict=True))

    def is_wanted(completion: str, example: dict, **settings) -> dict[str, float]:
        return {"format": 0.0, "answer": float(completion == wanted.get(str(example)))}

    monkeypatch.setattr(countdown, "reward_function", is_wanted)
    main.run_evaluation(run)
    (folder,) = run.folder.iterdir()
    assert json.loads((folder / "metrics.json").read_text())["eval/greedy"] == 5 / 9


# Votes


def answered(text: str, *, solved: bool, broken: bool = False, length: int = 1) -> main.Trajectory:
    log_probs = np.full(length, np.nan if broken else -1.0)
    none = np.zeros(length)
    completion = Completion([7] * length, log_probs, none, False, is_inserted=none.astype(bool))
    return main.Trajectory([5], completion, text, {"answer": float(solved)}, 0.0)


def vote(*numbers: int, right: int) -> list[main.Trajectory]:
    """A group whose samples give these answers; 0 is no answer."""
    texts = [f"<answer>{number}</answer>" if number else "" for number in numbers]
    return [answered(text, solved=n == right) for text, n in zip(texts, numbers, strict=True)]


GROUPS = [
    vote(1, 2, 2, right=2),  # the majority is right, though the first is not
    vote(1, 2, 2, right=1),  # wrong, though one sample is right
    vote(3, 1, 0, right=3),  # a tie
    vote(1, 3, 0, right=3),
    vote(0, 0, 0, right=3),
]
GREEDY = [
    [answered("first", solved=True)],
    [answered("lenient: 1", solved=False)],
    [answered("no", solved=False, length=2)],
    [answered("lenient: 3", solved=True, broken=True)],  # noise
    [answered("lenient: 3", solved=False)],  # the answer to another question
]
QUESTIONS = [{"target": target} for target in range(5)]


def by_hand(world: World) -> dict[str, float]:
    """The metrics of this rank's share: questions go to the ranks in turn."""
    share = slice(world.rank, None, world.size)
    rows = [[i, -i] for i in range(9)]  # more than ranks: else one after the other is in turn
    assert world.gather_rows(rows[share], shape=(9, 2)).tolist() == rows, "in their own places"
    groups, greedy, options = GROUPS[share], GREEDY[share], make_config().task
    return single_answer_metrics(countdown, options, QUESTIONS, groups, greedy, world)


def test_votes_and_greedy_answers_by_hand(tmp_path):
    """2 and 1 of 5 questions, with Wilson's intervals; the same from seven ranks."""
    metrics = by_hand(alone())
    expected = {"eval/majority": (0.4, 0.1176, 0.7693), "eval/greedy": (0.2, 0.0362, 0.6245)}
    for name, rates in expected.items():
        found = [metrics.pop(name + end) for end in ("", "_low", "_high")]
        assert found == pytest.approx(rates, abs=1e-4), name
    assert metrics == {"eval/greedy_tokens": 6 / 5}
    ranks = run_on_ranks(by_hand, 7, folder=tmp_path)  # of which two have no question
    assert ranks == [by_hand(alone())] * 7


def test_a_lenient_reading_stands_beside_the_strict_one_where_the_task_has_one(monkeypatch):
    """And a rank reads its own questions: rank 1 of 2 has the second and the fourth."""
    read = []

    def is_lenient_solved(text: str, example: dict, **_: object) -> bool:
        read.append((text, example["target"]))
        return text in ("first", f"lenient: {example['target']}")

    monkeypatch.setattr(countdown, "is_lenient_solved", is_lenient_solved, raising=False)
    metrics = by_hand(alone())
    assert metrics["eval/strict"] == metrics["eval/greedy"] == 0.2
    assert metrics["eval/lenient"] == 0.4
    assert metrics["eval/lenient_low"] == pytest.approx(0.1176, abs=1e-4)
    read.clear()
    world = World(1, 2, torch.device("cpu"))
    monkeypatch.setattr(world, "sum", torch.as_tensor)  # there is no other rank
    options = make_config().task
    single_answer_metrics(countdown, options, QUESTIONS, GROUPS[1::2], GREEDY[1::2], world)
    assert read == [("lenient: 1", 1)]  # that of the fourth question is broken
