"""Whole runs of main.py: what they leave behind, on one rank and on two, and what they refuse."""

import json
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import harness
import pytest
from harness import ENVIRONMENT, ROOT, arguments, grade_by_text, read_jsonl, read_rows, train

import main
from engine.questions.tasks import built_in_tasks
from engine.run.config_file import load_config
from engine.run.state import Run
from engine.sampling import draw, grouped
from main import sample_trajectories

SIZES = ["training.warmup_steps=0", "training.learning_rate=0.003", "training.lr_schedule=linear"]
SIZES += ["training.max_new_gen_tokens=12", "validation.every=1", "validation.num_examples=7"]
SIZES += ["validation.best_of_n=4", "validation.pass_k=[1, 2]", "logging.samples=7"]
SIZES += ["logging.train_samples_every=1", "logging.completions_every=1"]
TWO = "training.num_steps=2"
OF_FOUR = ["training.num_epochs=0.22", "training.num_samples_per_step_global=4"]  # 2.86 steps


def load_run(folder: Path, model: Path, *overrides: str) -> Run:
    return harness.load_run(load_config(arguments(folder, model, *SIZES, TWO, *overrides)))


def test_two_ranks_do_the_same_step_as_one(rotary_model_folder, data, tmp_path):
    """Twice 2 questions are the same 4, in micro-batches of another size too; and as many steps.

    No question comes twice, though half of them are too long. Rank 0 shows every other validation
    question. A rate times its time is what all ranks wrote. In fp64, so that both sample the same.
    """
    rows = [{"nums": [n] * (1 if n % 2 else 1100), "target": n} for n in range(101, 153)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [*data, f"task.train={tmp_path}/rows.jsonl"]
    own = [OF_FOUR[0], "training.num_samples_per_step=2", "training.micro_batch_tokens=300"]
    for num_ranks, settings in ((1, OF_FOUR), (2, own)):
        given = [rotary_model_folder, *SIZES, *data, *settings]
        train(tmp_path / str(num_ranks), *given, num_ranks=num_ranks, grading={"is_exact": True})
    folders, written = (tmp_path / "1/x", tmp_path / "2/x"), []
    (first, step, last), (other_first, other_step, _) = map(read_rows, folders)
    assert [row["train/lr"] for row in (step, last)] == [0.003, 0.0015]
    measured = [name for name in first if name.startswith("eval/")]
    assert [other_first[name] for name in measured] == [first[name] for name in measured]
    names = "reward reward_std solved part_format advantage_abs completion_tokens truncated_frac"
    assert step["train/reward"] > 0
    for name in [f"train/{name}" for name in names.split()]:
        assert other_step[name] == pytest.approx(step[name], abs=1e-9), name
    for name in ("train/loss", "train/entropy"):  # what is kept of a token is in fp32, to 6e-8
        assert other_step[name] == pytest.approx(step[name], abs=1e-6)
    assert other_step["train/grad_norm"] == pytest.approx(step["train/grad_norm"], rel=1e-6)
    for some, folder in zip((step, other_step), folders, strict=True):
        trained = read_jsonl(folder / "completions.jsonl")
        assert len({str(row["question"]) for row in trained}) == 8
        rows = [row for row in trained if row["step"] == 1]
        num_tokens = sum(row["tokens"] for row in rows)
        assert some["perf/tokens_per_s"] * some["time/step_s"] == pytest.approx(num_tokens)
        written.append(rows)
    assert len(written[0]) == 32 and written[1] == written[0]  # advantages bit for bit, too
    alone, shared = (read_jsonl(folder / "samples.jsonl")[:7] for folder in folders)
    assert shared[:4] == alone[::2]


def test_which_model_is_the_best(tmp_path, rotary_model_folder, data, monkeypatch, capsys):
    """The earliest of equals, and never one with a broken completion, however much it solves."""
    measured = main.evaluation_metrics
    scores = {"eval/pass@1": [0.5, 0.3, 0.4, 0.4], "eval/best_of_4": [0.6, 0.9, 0.9, 0.95]}

    def with_rates(*arguments) -> dict[str, float]:
        return measured(*arguments) | {name: s[run.state.step] for name, s in scores.items()}

    monkeypatch.setattr(main, "evaluation_metrics", with_rates)
    monkeypatch.setattr(Run, "count_broken", lambda *_: run.state.step >= 3)
    grade_by_text(monkeypatch)
    given = [*data, "validation.best_by=best_of_n", "training.num_steps=3"]
    run = load_run(tmp_path, rotary_model_folder, *given)
    main.run_training(run)
    assert (run.state.best, run.state.best_step) == (0.9, 1)
    said = "best_of_4 0.600 at the start, 0.950 after step 3; best 0.900 at step 1"
    assert said in capsys.readouterr().out
    card = (tmp_path / "x/best/README.md").read_text()
    assert "best_of_4 0.900 after step 1." in card and len(card.splitlines()) <= 4


def test_validation_has_its_own_length_and_a_greedy_one_samples_once(
    tmp_path, rotary_model_folder, data, monkeypatch
):
    monkeypatch.setattr(main, "sample_trajectories", spy := mock.Mock(wraps=sample_trajectories))
    greedy = ["validation.temperature=0", "validation.best_of_n=1", "validation.pass_k=[1]"]
    settings = [*data, "mode=evaluate", "validation.max_new_gen_tokens=40", *greedy]
    run = load_run(tmp_path, rotary_model_folder, *settings)
    assert main.run_evaluation(run) == 0
    ((_, _, _, params, _),) = [call.args for call in spy.call_args_list]
    assert (params.temperature, params.max_new_tokens) == (0, 40)
    (file,) = (tmp_path / "x").glob("eval-*/metrics.json")
    metrics = json.loads(file.read_text())
    for end in ("", "_low", "_high"):  # of one sample for each question: Wilson's interval
        assert metrics[f"eval/pass@1{end}"] == metrics[f"eval/greedy{end}"]
    assert metrics["eval/greedy_tokens"] == metrics["eval/completion_tokens"]


def test_no_two_samples_share_random_numbers(tmp_path, rotary_model_folder, data, monkeypatch):
    """Training's are of the run's seed and the question, validation's are always the same."""
    draws, draw_uniforms = [], draw.draw_uniforms  # a question's seed, and a row of its numbers

    def draw_and_note(seeds, params):
        drawn = draw_uniforms(seeds, params)
        for some, rows in zip(seeds, drawn.view(len(seeds), -1, drawn.shape[-1]), strict=True):
            draws.extend((some, tuple(row)) for row in rows.tolist())
        return drawn

    monkeypatch.setattr(grouped, "draw_uniforms", draw_and_note)
    for number in ("2", "3"):  # an epoch is of three questions, and ends in the second step
        given = [*data, f"training.seed={number}", "task.max_train_examples=3"]
        assert main.run_training(load_run(tmp_path / number, rotary_model_folder, *given)) == 0
    trained = [some for some, _ in draws if len(some) == 3]
    assert sorted(some[-1] for some in trained) == [n for n in (0, 1, 2, 3) for _ in range(16)]
    num_validation = 7 * 4
    assert len(draws) == len(trained) + 2 * 3 * num_validation
    assert len({row for _, row in draws}) == len(trained) + num_validation


ASK_EACH = """
import json, runpy, sys
for name in ("torch", "transformers", "datasets", "pandas"):
    sys.modules[name] = None  # `import torch` would raise
for given in json.loads(sys.argv[1]):
    sys.argv = ["main.py", *given.split()]
    try:
        runpy.run_path("main.py", run_name="__main__")
    except SystemExit as end:
        print("ended with", end.code, flush=True)
"""
ANSWERS = {
    "--help": "usage: ",
    "--config no.yaml": "error: no.yaml: ",
    "model.name=tests": "error: model.name = tests: ",
    "training.learning_type=distill model.teacher=./no": "error: model.teacher = ./no: ",
    "task.train=no.csv": "error: task.train = no.csv: ",
    "mode=evaluate task.eval=no.csv": "error: task.eval = no.csv: ",
} | {f"task.name={name} x=1": "error: x = 1: unknown key" for name in built_in_tasks()}


def test_a_mistake_is_answered_before_torch_is_imported():
    """Bug: each took main.py's imports, 4 seconds and on a cold disk 11."""
    command = [sys.executable, "-u", "-c", ASK_EACH, json.dumps([*ANSWERS])]
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    output = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, **how).stdout
    *answers, end = re.split(r"ended with (\d)\n", output)
    assert end == "" and len(answers) == 2 * len(ANSWERS), output
    for given, answer, status in zip(ANSWERS, answers[::2], answers[1::2], strict=True):
        assert answer.startswith(ANSWERS[given]), (given, answer)
        assert status == ("0" if given == "--help" else "2"), given
