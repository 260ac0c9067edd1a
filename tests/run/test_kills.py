"""Runs that are killed, again and again and at every file event, and go on as if unharmed."""

import itertools
import random
import signal
import statistics
from pathlib import Path

import pytest
from harness import assert_same, read_rows, seed, train, train_forked

from engine.run import resuming

pytestmark = pytest.mark.slow

EVALUATE = "validation.every=1"
BETTER_AT_STEP_2 = {"rates": [0.1, 0.1, 0.3, 0.2]}  # than before, so that best/ is replaced
PHASES = {  # the first of them with one of its places on the main thread's stack
    "save": ("checkpoint.py", "logger.py"),
    "rollout": ("batches.py",),
    "update": ("in update_policy",),
}


@pytest.fixture(scope="module")
def settings(data) -> list[str]:
    return [*data, "training.warmup_steps=0", "training.learning_rate=3e-3"]


# After a time


def phase(output: str) -> str:
    """Where the run was when it was killed."""
    lines = output.rpartition("(most recent call first):\n")[2].split("\n")
    stack = "".join(itertools.takewhile(lambda line: line.startswith("  File"), lines))
    return next((name for name in PHASES if any(f in stack for f in PHASES[name])), "between")


def draw_faults(number: int, step_s: float, victims: list[str]) -> list[dict]:
    """Kills in the second step of each start: in its rollout, its update or at a file event."""
    chance = random.Random(seed())
    faults = []
    for i in range(number):
        delay_s = chance.random() * step_s / 5 * (i > 2)  # the first of each kind comes at once
        moments = [
            {"in": PHASES["rollout"], "delay_s": delay_s},
            {"in": PHASES["update"], "delay_s": delay_s},
            {"events": chance.randint(1, 60)},
        ]
        victim = victims[(i + i // 3) % len(victims)]
        faults.append({"do": victim, "saves": 1} | moments[i % 3])
    return faults


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("shard", "number"), [("false", 4), ("true", 3)])
def test_two_ranks_killed_again_and_again_end_as_the_unbroken_ones(
    tmp_path, rotary_model_folder, settings, shard, number
):
    """One rank at a time, whose torchrun ends the other, or both and torchrun with them."""
    whole, parts, model = tmp_path / "whole", tmp_path / "parts", rotary_model_folder
    overrides = [*settings, f"model.shard={shard}"]
    overrides.append(f"training.num_steps={2 * number + 1}")  # a start takes two at most
    train(whole, model, *overrides, num_ranks=2)
    rows = read_rows(whole / "x")
    step_s = statistics.median(row["time/step_s"] for row in rows if row["step"] > 0)
    phases = set()
    for fault in draw_faults(number, step_s, ["kill", "kill other", "kill all"]):
        status, output = train_forked(parts, model, *overrides, num_ranks=2, fault=fault)
        assert status == (-signal.SIGKILL if fault["do"] == "kill all" else 1), output
        assert "(most recent call first)" in output, output  # it was struck
        phases.add(phase(output))
    assert len(phases) >= 2  # of rollout, update and save: when a short update is hit is chance
    assert "resumed after step" in train(parts, model, *overrides, num_ranks=2)
    assert_same(whole, parts)


# At every file event: a kill leaves what is on the disk at that moment, so a copy of it is made
# before each event


def steps_resumed_from(copies: list[Path]) -> list[int]:
    """For each copy of a run's folder the step of its newest checkpoint, which must be whole."""
    steps, warnings = [], []
    for copy in copies:
        folder = resuming.newest_whole(copy / "x/checkpoints", warnings.append)
        assert folder is not None and warnings == [], copy
        steps.append(resuming.load_state(folder)["state"]["step"])
    return steps


def outline(copy: Path) -> set[tuple[Path, int]]:
    """The names of folders, the names and sizes of files that are appended to."""
    paths = [*copy.glob("x/*"), *copy.glob("x/checkpoints/*")]
    return {(p.relative_to(copy), p.stat().st_size if p.is_file() else 0) for p in paths}


def run(folder: Path, model: Path, *overrides: str, **how) -> str:
    return train(folder, model, EVALUATE, *overrides, grading=BETTER_AT_STEP_2, **how)


def copies_of(folder: Path, model: Path, *overrides: str, saves: int) -> list[Path]:
    """The run's folder before each file event, from its checkpoint of this number on."""
    copies = folder.with_name("copies")
    fault = {"do": "copy", "to": str(copies), "saves": saves, "events": 1}
    run(folder, model, *overrides, fault=fault)
    return sorted(copies.iterdir())


@pytest.fixture(scope="module")
def whole(tmp_path_factory, rotary_model_folder, settings) -> Path:
    """Three steps without a break."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, rotary_model_folder, *settings, "training.num_steps=3")
    return folder


def assert_each_goes_on(copies: list[Path], whole: Path, model: Path, *overrides: str) -> None:
    """Each copy ends as the unbroken run."""
    for copy in copies:
        assert "resumed after step" in run(copy, model, *overrides, "training.num_steps=3")
        assert_same(whole, copy)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.timeout(240)
def test_a_kill_at_any_file_event_of_a_step_costs_no_more_than_that_step(
    tmp_path, rotary_model_folder, settings, whole
):
    """From the checkpoint of step 1 on, over evaluation, best/, rows and checkpoint of step 2."""
    parts, model = tmp_path / "parts", rotary_model_folder
    copies = copies_of(parts, model, *settings, "training.num_steps=2", saves=1)
    steps = steps_resumed_from(copies)
    assert steps == sorted(steps) and set(steps) == {1, 2}
    bests = [contents(folder / "x/best") for folder in (copies[0], parts)]
    assert bests[0] != bests[1], "best/ has not been replaced"
    unnamed = [copy for copy in copies if not (copy / "x/best").exists()]
    assert unnamed
    for copy in unnamed:  # a start that has no step to take
        run(copy, model, *settings, "training.num_steps=1")
    assert all(contents(copy / "x/best") in bests for copy in copies)
    pairs = itertools.pairwise(copies)
    copies = [copy for before, copy in pairs if outline(before) != outline(copy)]
    assert len(copies) > 10
    assert_each_goes_on(copies, whole, model, *settings)


@pytest.mark.timeout(240)
def test_a_kill_while_the_same_step_is_saved_again_leaves_its_checkpoint(
    tmp_path, rotary_model_folder, settings, whole
):
    """Bug: a kill between the two renames of the folder lost it."""
    parts, model = tmp_path / "parts", rotary_model_folder
    overrides = (EVALUATE, *settings, "training.num_steps=3")
    fault = {"do": "terminate", "saves": 1, "events": 1}
    grading = BETTER_AT_STEP_2
    status, output = train_forked(parts, model, *overrides, fault=fault, grading=grading)
    assert status == 128 + signal.SIGTERM, output
    copies = copies_of(parts, model, *settings, "training.num_steps=2", saves=0)
    assert set(steps_resumed_from(copies)) == {2}
    lost = [copy for copy in copies if (copy / "x/checkpoints/step-000002.old").exists()]
    assert_each_goes_on([copies[0], lost[0], lost[-1]], whole, model, *settings)


@pytest.mark.timeout(120)
def test_a_kill_at_any_file_event_of_a_sharded_step_leaves_a_whole_checkpoint(
    tmp_path, rotary_model_folder, settings
):
    """The parts of the ranks are written beside the checkpoint, and moved into it."""
    overrides = (*settings, "model.shard=true", "training.num_steps=2")
    copies = copies_of(tmp_path / "parts", rotary_model_folder, *overrides, saves=1)
    assert any(list(copy.glob("x/checkpoints/*.parts.tmp/part-*")) for copy in copies)
    steps = steps_resumed_from(copies)
    assert steps == sorted(steps) and set(steps) == {1, 2}
