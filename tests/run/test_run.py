"""Whole runs of main.py: what they leave behind, on one rank and on two, and what they refuse."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from types import SimpleNamespace

import harness
import numpy as np
import pytest
from harness import ENVIRONMENT, ROOT, read_jsonl, read_rows, train

import main
from engine.core.distributed import World
from engine.questions.tasks import built_in_tasks
from engine.run.state import Run, State
from engine.update.optimizer import Outcome, Update

SIZES = ["training.warmup_steps=0", "training.learning_rate=0.003", "training.lr_schedule=linear"]
SIZES += ["training.max_new_gen_tokens=12", "validation.every=1", "validation.num_examples=7"]
SIZES += ["validation.best_of_n=4", "validation.pass_k=[1, 2]", "logging.samples=7"]
SIZES += ["logging.train_samples_every=1", "logging.completions_every=1"]
OF_FOUR = ["training.num_epochs=0.22", "training.num_samples_per_step_global=4"]  # 2.86 steps


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


def with_a_broken_rank(world: World, folder: Path, model: Path, *overrides: str) -> str:
    """A run in whose second evaluation, the best, rank 1 alone has met broken logits."""
    sample = main.sample_validation

    def sampled(run: Run) -> list:
        groups = sample(run)
        if world.rank == run.state.step == 1:
            groups[0][0].completion.log_probs[0] = np.nan
        return groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(main, "sample_validation", sampled)
        return harness.train_on_rank(world, folder, model, *overrides, rates=[0.1, 0.9, 0.5, 0.5])


def test_no_rank_takes_a_model_for_the_best_that_is_broken_on_another(
    tmp_path, rotary_model_folder, data
):
    """And of equals the earliest is the best."""
    given = [tmp_path, rotary_model_folder, *data, "training.num_steps=3", "validation.every=1"]
    output, _ = harness.run_on_ranks(with_a_broken_rank, 2, *given, folder=tmp_path)
    best = json.loads((tmp_path / "x/best/best.json").read_text())
    assert (best["best"], best["best_step"]) == (0.5, 2)
    assert output.count("1 completions ended at logits that were not finite") == 1


def test_where_a_run_is_follows_from_all_that_has_happened():
    """Each field, a second time from the whole history of its steps, evaluations and saves."""
    random = Random(harness.seed())
    events = ["saved", "evaluated", *itertools.product(Outcome, (False, True))]
    for _ in range(500):
        run, steps, scores = SimpleNamespace(state=State()), [], {}
        for position in range(1, random.randrange(2, 15)):
            event = random.choice(events)
            if event == "saved":
                run.state.is_saved = True
            elif event == "evaluated":
                run.state.remember_score(position / 8)
                scores[len(steps)] = position / 8
            else:
                Run.end_step(run, Update(event[0], moved_weights=event[1]), position)
                steps.append((position, *event))
        skipped = [outcome in (Outcome.BROKEN, Outcome.OVERFLOWED) for _, outcome, _ in steps]
        moved = [i for i, (*_, is_moved) in enumerate(steps, 1) if is_moved]
        sound = [i for i, is_skipped in enumerate(skipped, 1) if not is_skipped]
        marks = {Outcome.BROKEN: "x", Outcome.OVERFLOWED: ""}
        judged = "".join(marks.get(outcome, ".") for _, outcome, _ in steps)
        expected = State(
            step=len(steps),
            position=steps[-1][0] if steps else 0,
            first_score=scores.get(0),
            last_score=[None, *scores.values()][-1],
            skipped_steps=sum(skipped),
            skipped_in_a_row=len(judged) - len(judged.rstrip("x")),
            changed_at=max([0, *moved, *sound]),
            evaluated_at=max(scores, default=-1),
            has_trained=bool(moved),
            is_saved=event == "saved",
        )
        assert run.state == expected, steps


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
