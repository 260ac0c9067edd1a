"""mode=evaluate: a model is measured as training measures it, and leaves its run as it was."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import (
    ROOT,
    alone,
    arguments,
    in_fp64,
    load_run,
    make_config,
    read_jsonl,
    read_rows,
    run_on_ranks,
    seed,
    train,
)

import countdown
import main
from engine.core.distributed import World
from engine.core.types import Completion
from engine.questions.prompts import encode_prompts
from engine.report.evaluation import single_answer_metrics
from engine.run.config_file import load_config
from engine.run.folder import run_folder
from engine.run.state import Run

TINY = ROOT / "tiny"  # gives answers to vote on
EXACT = {"is_exact": True}  # so that one rank and two sample the same
SIZES = [f"training.seed={seed()}", "training.num_steps=1", "training.warmup_steps=0"]
SIZES += ["training.max_new_gen_tokens=64", "validation.num_examples=9"]
SIZES += ["validation.best_of_n=4", "validation.every=1", "logging.samples=2"]
EVALUATE = [*SIZES, "mode=evaluate"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """The folder of run x, of one step."""
    folder = tmp_path_factory.mktemp("trained")
    train(folder, TINY, *SIZES, grading=EXACT)
    return folder


@pytest.fixture(scope="module")
def evaluated(trained) -> tuple[Path, str, dict[str, bytes]]:
    """The folder of an evaluation of best/, its output, and the files of the run before it."""
    before = files_of(trained / "x")
    output = train(trained, trained / "x/best", *EVALUATE, grading=EXACT)
    (folder,) = (trained / "x").glob("eval-*")
    return folder, output, before


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def figures(folder: Path) -> dict[str, float]:
    metrics = json.loads((folder / "metrics.json").read_text())
    return {name: value for name, value in metrics.items() if name.startswith("eval/")}


# Whole runs


def test_an_evaluation_prints_and_writes_its_figures_and_leaves_its_run_alone(evaluated, trained):
    folder, output, before = evaluated
    after = files_of(trained / "x")
    assert {name: after[name] for name in after if not name.startswith("eval-")} == before
    assert "metrics.jsonl" in before and "best/model.safetensors" in before
    assert set(files_of(folder)) == {"config.yaml", "metrics.json", "samples.jsonl"}
    config = load_config(["--config", str(folder / "config.yaml")])
    assert config.mode == "evaluate" and config.model.name == str(trained / "x/best")
    rate, low, high = (figures(folder)[f"eval/majority{end}"] for end in ("", "_low", "_high"))
    count, interval = f"({rate * 9:.0f} of 9)", f"(95% interval {low:.3f} to {high:.3f})"
    assert f"\n  majority            {rate:.3f}  {count}  {interval}\n" in output
    assert f"  ({figures(folder)['eval/pass@1'] * 36:.0f} of 36)  (95% interval" in output
    assert output.endswith(f"written to {folder}\n")


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


def test_an_evaluation_measures_what_training_measured_of_the_same_model(evaluated, trained):
    measured = figures(evaluated[0])  # of best/: the highest pass@1, the earliest on ties
    logged = max(read_rows(trained / "x"), key=lambda row: row["eval/pass@1"])
    logged_figures = {name: value for name, value in logged.items() if name.startswith("eval/")}
    assert len(logged_figures) == 8 and 0 < logged["eval/pass@1"] < 1
    assert measured.items() >= logged_figures.items()
    more = {f"eval/{name}{end}" for name in ("majority", "greedy") for end in ("", "_low", "_high")}
    assert set(measured) == {*logged_figures, *more, "eval/greedy_tokens"}
    samples = read_jsonl(evaluated[0] / "samples.jsonl")
    assert len(samples) == 2
    for sample in samples:
        assert {"step": logged["step"], **sample} in read_jsonl(trained / "x/samples.jsonl")


def test_an_evaluation_that_could_not_be_written_is_refused_at_the_start(tmp_path):
    """Bug: it failed after all the work, in a traceback. A file stands where the folder would."""
    (tmp_path / "x").touch()
    with pytest.raises(ValueError, match=r"x cannot be written \(File exists\); give "):
        load_evaluation(tmp_path)


def test_a_reward_function_may_change_its_question(tmp_path, monkeypatch):
    """Bug: the validation questions were changed for good; pass@1 fell from 0.438 to 0.000."""
    expected, rewarded = load_evaluation(tmp_path).validation_questions, countdown.reward_function

    def spoil(completion: str, example: dict, **settings) -> dict[str, float]:
        parts = rewarded(completion, example, **settings)
        example["nums"].clear()
        return parts

    monkeypatch.setattr(countdown, "reward_function", spoil)
    run = load_evaluation(tmp_path)
    assert main.run_evaluation(run) == 0
    assert run.validation_questions == expected and all(row["nums"] for row in expected)


# Only what an evaluation needs


def load_evaluation(folder: Path, *overrides: str) -> Run:
    return load_run(load_config(arguments(folder, TINY, *EVALUATE, *overrides)))


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


# Greedy


def test_the_greedy_figure_is_that_of_the_likeliest_tokens(tmp_path, monkeypatch):
    """These tokens are found one by one, without cache, padding or batch; top-k must not matter."""
    in_fp64(monkeypatch)
    run = load_evaluation(tmp_path, "sampling.top_k=3", "validation.best_of_n=8")
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
    for _ in range(2):
        main.run_evaluation(run)
        (folder,) = run.folder.iterdir()
        assert figures(folder)["eval/greedy"] == 5 / 9
        run.folder = tmp_path / "again"


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
TASK = make_config().task


def by_hand(world: World) -> dict[str, float]:
    share = slice(world.rank, None, world.size)
    rows = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]
    assert world.gather_rows(rows[share], shape=(5, 2)).tolist() == rows, "in their own places"
    groups, greedy = GROUPS[share], GREEDY[share]
    return single_answer_metrics(countdown, TASK, QUESTIONS, groups, greedy, world)


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


def is_lenient_solved(completion: str, example: dict, **settings) -> bool:
    return completion in ("first", f"lenient: {example['target']}")


def test_a_lenient_reading_stands_beside_the_strict_one_where_the_task_has_one(monkeypatch):
    monkeypatch.setattr(countdown, "is_lenient_solved", is_lenient_solved, raising=False)
    metrics = by_hand(alone())
    assert metrics["eval/strict"] == metrics["eval/greedy"] == 0.2
    assert metrics["eval/lenient"] == 0.4
    assert metrics["eval/lenient_low"] == pytest.approx(0.1176, abs=1e-4)


def test_each_rank_reads_its_answers_against_their_own_questions(monkeypatch):
    """Rank 1 of 2 has the second and the fourth question, not the first two."""
    read = []
    note = lambda text, example, **_: read.append((text, example["target"]))  # noqa: E731
    monkeypatch.setattr(countdown, "is_lenient_solved", note, raising=False)
    world = World(1, 2, torch.device("cpu"))
    monkeypatch.setattr(world, "sum", torch.as_tensor)  # there is no other rank
    single_answer_metrics(countdown, TASK, QUESTIONS, GROUPS[1::2], GREEDY[1::2], world)
    assert read == [("lenient: 1", 1)]  # that of the fourth question is broken
