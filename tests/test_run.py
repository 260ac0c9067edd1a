"""Whole runs of main.py: what they leave behind, on one rank and on two, and what they refuse."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import ALONE, NUMBERS, make_config, make_policy, run_on_ranks, seed
from graded import grade_by_text, in_fp64
from runs import ENVIRONMENT
from transformers import AutoModelForCausalLM

import main
from distributed import World
from logger import Logger
from run import prepare_run

ROOT = Path(__file__).resolve().parent.parent
SIZES = [
    f"training.seed={seed()}",
    "training.num_steps=2",
    "logging.samples=7",
    "training.warmup_steps=0",
    "training.learning_rate=0.003",
    "training.max_new_gen_tokens=24",
    "training.k_best_of_n=[8,8]",
    "validation.every=1",
    "validation.num_examples=7",
    "validation.best_of_n=4",
    "validation.pass_k=[1,2]",
    "model.compute_dtype=float32",
]


@pytest.fixture(scope="module")
def questions(tmp_path_factory) -> Path:
    """Questions some of which the task holds out to validate."""
    rows = [{"nums": [number], "target": number} for number in NUMBERS]
    return write_rows(tmp_path_factory.mktemp("questions") / "questions.jsonl", rows)


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def arguments(model: Path, questions: Path, folder: Path, *more: str) -> list[str]:
    data = [f"task.train={questions}", f"task.eval={questions}"]
    return [f"--config={os.devnull}", f"model.name={model}", f"run.dir={folder}", *data, *more]


def run_main(
    *overrides: str, num_ranks: int = 1, grading: dict | None = None
) -> subprocess.CompletedProcess:
    """main.py, or with options graded.py."""
    command = [sys.executable]
    if num_ranks > 1:
        elastic = ["--standalone", f"--nproc-per-node={num_ranks}"]
        command += ["-m", "torch.distributed.run", *elastic]
    command += [str(ROOT / "main.py")]
    if grading is not None:
        command[-1:] = [str(ROOT / "tests/graded.py"), json.dumps(grading)]
    return subprocess.run(
        [*command, *overrides],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def finished(result: subprocess.CompletedProcess, folder: Path) -> Path:
    """The folder of the one run in `folder`, which must have ended well."""
    assert result.returncode == 0, result.stdout + result.stderr
    (run,) = folder.iterdir()
    return run


def rows_of(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


EXACT = {"is_exact": True}  # so that one rank and two sample the same


@pytest.fixture(scope="module")
def on_one_rank(rotary_model_folder, questions, tmp_path_factory) -> Path:
    """The folder of a run of two steps of four questions."""
    folder = tmp_path_factory.mktemp("one")
    overrides = [*SIZES, "training.num_samples_per_step=4"]
    command = arguments(rotary_model_folder, questions, folder, *overrides)
    return finished(run_main(*command, grading=EXACT), folder)


@pytest.fixture(scope="module")
def on_two_ranks(rotary_model_folder, questions, tmp_path_factory) -> Path:
    """The same on two ranks, which share the four questions, in micro-batches of another size."""
    folder = tmp_path_factory.mktemp("two")
    overrides = ["training.num_samples_per_step_global=4", "training.micro_batch_tokens=1200"]
    command = arguments(rotary_model_folder, questions, folder, *SIZES, *overrides)
    return finished(run_main(*command, num_ranks=2, grading=EXACT), folder)


def test_a_run_leaves_a_row_for_each_step_with_evaluations_at_both_ends(on_one_rank):
    rows = rows_of(on_one_rank)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(0 <= row["eval/pass@1_low"] <= row["eval/pass@1_high"] <= 1 for row in rows)
    assert all(row["eval/pass@1"] <= row["eval/pass@2"] <= row["eval/best_of_4"] for row in rows)
    assert not any(name.startswith("train/") for name in rows[0])
    for row in rows[1:]:
        assert row["train/sampler_mismatch"] < 1e-5
        assert row["train/grad_norm"] > 0 and row["train/lr"] == 0.003
        assert row["train/skipped_steps"] == row["train/clip_frac"] == 0
    assert {"config.yaml", "metrics.csv", "samples.jsonl", "best"} <= set(os.listdir(on_one_rank))


def test_two_ranks_do_the_same_step_as_one(on_one_rank, on_two_ranks):
    """Twice 2 questions are the same 4 questions: completions, rewards, loss and gradient.

    Sums over the same numbers in another order differ by the rounding of fp64, some 1e-15.
    """
    (first, step, _), (other_first, other_step, _) = map(rows_of, (on_one_rank, on_two_ranks))
    measured = [name for name in first if name.startswith("eval/")]
    assert len(measured) == 7
    assert [other_first[name] for name in measured] == [first[name] for name in measured]
    names = "reward reward_std solved format advantage_abs completion_tokens truncated_frac"
    assert step["train/reward"] > 0
    for name in [f"train/{name}" for name in names.split()]:
        assert other_step[name] == pytest.approx(step[name], abs=1e-9), name
    for name in ("train/loss", "train/entropy"):  # what is noted of a token is in fp32, to 6e-8
        assert other_step[name] == pytest.approx(step[name], abs=1e-6)
    assert other_step["train/grad_norm"] == pytest.approx(step["train/grad_norm"], rel=1e-6)


@pytest.mark.parametrize("which", ["on_one_rank", "on_two_ranks"])
def test_the_best_model_loads_and_scores_what_the_log_says(which, questions, request, monkeypatch):
    """It writes what the model wrote at the step of the highest pass@1, and no other step's did."""
    run = request.getfixturevalue(which)
    rows = rows_of(run)
    best = max(rows, key=lambda row: row["eval/pass@1"])  # of equals the earliest
    logged = [[], [], []]
    for line in (run / "samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        logged[sample.pop("step")].append(sample)
    assert logged[0] != logged[1] != logged[2] != logged[0], "they cannot be told apart"
    grade_by_text(monkeypatch)
    in_fp64(monkeypatch)
    AutoModelForCausalLM.from_pretrained(run / "best")
    config = make_config(*arguments(run / "best", questions, run, *SIZES)[1:])
    again = prepare_run(config)
    metrics, samples = main.evaluate(
        again.policy,
        again.validation_questions,
        config=config,
        world=ALONE,
        logger=Logger(rank=0),
    )
    assert metrics.items() <= best.items() and len(metrics) == 7
    if which == "on_one_rank":  # with two, the other's are not in the log
        assert samples == logged[best["step"]]
    else:
        assert samples[::2] == logged[best["step"]]


@pytest.mark.parametrize(
    "shared", ["training.num_samples_per_step=2", "training.num_samples_per_step_global=4"]
)
def test_each_rank_takes_its_own_slice_of_the_same_questions(
    shared, rotary_model_folder, questions, tmp_path
):
    overrides = [*SIZES, "training.num_samples_per_step=4"]
    command = arguments(rotary_model_folder, questions, tmp_path, *overrides)
    run = prepare_run(make_config(*command[1:]))
    examples, seeds = main.next_questions(run)
    halves = replace(run, config=make_config(*command[1:], shared))
    parts = [
        main.next_questions(replace(halves, world=replace(ALONE, rank=rank, size=2)))
        for rank in (0, 1)
    ]
    assert parts[0][0] + parts[1][0] == examples
    assert parts[0][1] + parts[1][1] == seeds
    assert len(set(seeds)) == 4
    held_out = {row["target"] for row in run.validation_questions}
    trained = {row["target"] for row in run.train_questions.questions}
    assert len(held_out) == 7 and trained and not held_out & trained


def test_sil_runs_and_of_equal_models_the_earliest_is_the_best(
    rotary_model_folder, questions, tmp_path
):
    sizes = [size for size in SIZES if not size.startswith(("training.k_best", "training.learn"))]
    overrides = ["training.learning_type=sil", "training.k_best_of_n=[2,8]"]
    overrides += ["training.num_steps=1"]
    command = arguments(rotary_model_folder, questions, tmp_path, *sizes, *overrides)
    result = run_main(*command, grading={"rates": [0.5, 0.5]})
    run = finished(result, tmp_path)
    assert "-sil-" in run.name
    first, last = rows_of(run)
    assert last["train/loss"] > 0  # minus log-probabilities of what is imitated
    assert 0 < last["train/advantage_abs"] <= 1
    assert last["train/sampler_mismatch"] < 1e-5  # log-probabilities of about 6, in fp32
    assert first["eval/pass@1"] == last["eval/pass@1"]
    assert re.search(r"best \S+ at step 0\b", result.stdout)


def evaluate_a_single_question(world: World, model: Path, questions: Path) -> dict[str, float]:
    config = make_config(*arguments(model, questions, questions.parent, *SIZES)[1:])
    policy = make_policy(model, *SIZES, num_ranks=world.size)
    validation = [{"nums": [3], "target": 3}]
    metrics, _ = main.evaluate(
        policy, validation, config=config, world=world, logger=Logger(rank=world.rank)
    )
    return metrics


def test_a_rank_without_a_question_waits_for_the_others(rotary_model_folder, questions, tmp_path):
    """Bug: too long questions are dropped after the check that each rank has one; this crashed."""
    alone = evaluate_a_single_question(ALONE, rotary_model_folder, questions)
    arguments = (rotary_model_folder, questions)
    assert run_on_ranks(evaluate_a_single_question, 2, *arguments, folder=tmp_path) == [alone] * 2


# A user's mistakes: one line on one rank, status 2, nothing written


def refusal(capsys, monkeypatch, command: list[str], folder: Path) -> str:
    """The line that main prints before it ends with status 2."""
    monkeypatch.setattr(sys, "argv", ["main.py", *command])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert not list(folder.iterdir())
    lines = capsys.readouterr().err.splitlines()
    (line,) = [line for line in lines if line and "Generating" not in line]  # datasets' own bar
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("training.num_step=5", "training.num_step = 5: unknown key, the nearest is"),
        ("training.num_steps=many", "training.num_steps = many: must be"),
        ("training.micro_batch_tokens=0", "training.micro_batch_tokens = 0: must be"),
        ("training.k_best_of_n=[4,8]", "training.k_best_of_n = [4, 8]: grpo"),
        ("training.k_best_of_n=[1,1]", "training.k_best_of_n = [1, 1]: n must"),
        ("model.name=no/such/folder", "model.name = no/such/folder: "),
        ("task.train=nowhere.jsonl", "nowhere.jsonl: "),
        ("task.eval=nowhere.jsonl", "nowhere.jsonl: "),
        ("training.max_new_gen_tokens=1000", "training.max_new_gen_tokens"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_or_file(
    capsys, monkeypatch, rotary_model_folder, questions, tmp_path, override, named
):
    command = arguments(rotary_model_folder, questions, tmp_path, *SIZES, override)
    assert named in refusal(capsys, monkeypatch, command, tmp_path)


def test_a_model_without_weights_is_refused(
    capsys, monkeypatch, rotary_model_folder, questions, tmp_path
):
    model, folder = tmp_path / "model", tmp_path / "runs"
    model.mkdir()
    folder.mkdir()
    for file in rotary_model_folder.iterdir():
        if file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    line = refusal(capsys, monkeypatch, arguments(model, questions, folder, *SIZES), folder)
    assert f"model.name = {model}: " in line and "model.safetensors" in line


def test_a_dataset_without_the_columns_is_refused(
    capsys, monkeypatch, rotary_model_folder, tmp_path
):
    file, folder = (
        write_rows(tmp_path / "rows.jsonl", [{"numbers": [3], "goal": 3}]),
        tmp_path / "r",
    )
    folder.mkdir()
    command = arguments(rotary_model_folder, file, folder, *SIZES)
    line = refusal(capsys, monkeypatch, command, folder)
    assert str(file) in line and "nums" in line and "target" in line


def test_a_rank_without_a_validation_question_is_refused(
    capsys, monkeypatch, rotary_model_folder, questions, tmp_path
):
    monkeypatch.setenv("WORLD_SIZE", "2")
    command = arguments(
        rotary_model_folder, questions, tmp_path, *SIZES, "validation.num_examples=1"
    )
    assert "validation.num_examples = 1" in refusal(capsys, monkeypatch, command, tmp_path)


def test_an_unusable_run_dir_is_refused(
    capsys, monkeypatch, rotary_model_folder, questions, tmp_path
):
    """Bug: the folder was made outside the part of main that turns errors into a line."""
    file, folder = tmp_path / "a-file", tmp_path / "runs"
    file.touch()
    folder.mkdir()
    command = arguments(rotary_model_folder, questions, file, *SIZES)
    assert str(file) in refusal(capsys, monkeypatch, command, folder)


def test_missing_mlflow_is_refused_before_anything_is_written(
    capsys, monkeypatch, rotary_model_folder, questions, tmp_path
):
    """Bug: it ended in a traceback, with config.yaml written."""
    monkeypatch.setitem(sys.modules, "mlflow", None)
    command = arguments(rotary_model_folder, questions, tmp_path, *SIZES, "logging.mlflow=true")
    assert "logging.mlflow" in refusal(capsys, monkeypatch, command, tmp_path)


@pytest.mark.parametrize("variable", ["LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_a_mistake_is_told_once(capsys, monkeypatch, tmp_path, variable):
    """Bug: under `torchrun --max-restarts` every restart told it again.

    Bug: torchrun ends all ranks with the first one, so that another one has to wait for rank 0.
    """
    waited = []
    monkeypatch.setattr(main.time, "sleep", waited.append)
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(sys, "argv", ["main.py", f"run.dir={tmp_path}", "training.num_step=5"])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == ""
    assert waited == ([3] if variable == "LOCAL_RANK" else [])


def test_questions_that_leave_no_room_are_dropped_with_a_count(
    capsys, rotary_model_folder, tmp_path
):
    """450 numbers need more than the model's context of 1024 tokens."""
    rows = [{"nums": [number], "target": number} for number in NUMBERS]
    rows += [{"nums": [number] * 450, "target": 1} for number in NUMBERS]
    file = write_rows(tmp_path / "rows.jsonl", rows)
    overrides = [*SIZES, "validation.num_examples=100"]
    config = make_config(*arguments(rotary_model_folder, file, tmp_path, *overrides)[1:])
    run = prepare_run(config)
    said = capsys.readouterr().out
    num_all = 0
    for split, kept in (
        ("training", run.train_questions.questions),
        ("validation", run.validation_questions),
    ):
        assert all(len(row["nums"]) == 1 for row in kept)
        pattern = rf"(\d+) of (\d+) {split} questions are too long: dropped"
        dropped, among = map(int, re.search(pattern, said).groups())
        assert among - dropped == len(kept) > 0
        num_all += among
    assert num_all == 2 * len(NUMBERS)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_mistake_ends_the_process_with_one_line(tmp_path, num_ranks):
    result = run_main(f"run.dir={tmp_path}", "training.num_step=5", num_ranks=num_ranks)
    assert result.returncode == (2 if num_ranks == 1 else 1)  # torchrun's own status is 1
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and "training.num_step = 5: unknown key" in errors[0]
    assert num_ranks > 1 or result.stderr == errors[0] + "\n"
    assert not list(tmp_path.iterdir())
