"""Signals, terminals that are gone, mistakes at the start: a run ends as it should, never hangs."""

import contextlib
import os
import pkgutil
import pty
import re
import signal
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import harness
import pytest
import torch
from harness import arguments, make_config, read_rows, run_main, run_on_ranks, start, with_ranks

import main
from engine.core.distributed import World, init_world
from engine.core.signals import Left, leave_if_signalled
from engine.run import log
from engine.run.checkpoint import load_state
from engine.run.mistakes import crashes_name_the_fix, outlive
from engine.run.state import State
from logger import Logger

INT, HUP = signal.SIGINT, signal.SIGHUP


def learn_from_the_other(world: World) -> tuple[list, str]:
    """What each of two ranks knows of a signal to rank 1, and of a file that rank 0 lacks."""
    world.ask_whether_to_stop()
    known = [world.stop_signal]
    with world.left_by_all():
        known.append(world.rank)
    if world.rank == 1:
        world.signals.note(INT)
    known += [world.sum([[2.0], [world.rank]]).tolist(), world.stop_signal]  # a sum only sums
    with pytest.raises(Left), world.left_by_all():
        leave_if_signalled()
        known.append(world.rank)  # rank 0 was not sent it, and comes to the end
    with pytest.raises(ValueError) as caught:
        world.on_main(Path("/no/such/file").read_text)
    given = {"world": world, "logger": Logger(rank=1), "lock": None}
    run = SimpleNamespace(state=State(), is_over=False, **given)
    return [*known, world.stop_signal, log.finish(run)], str(caught.value)


def test_all_ranks_learn_of_a_signal_to_one_and_of_a_mistake_of_rank_0(tmp_path):
    """They are asked once a step. Who goes on would wait for rank 0 in the next sum, for long.
    Bug: the status of a rank that was not sent the signal itself was always SIGTERM's."""
    ranks = run_on_ranks(learn_from_the_other, 2, folder=tmp_path)
    expected = [[0, 0, [[4.0], [1.0]], 0, 0, INT, 130], [0, 1, [[4.0], [1.0]], 0, INT, 130]]
    assert [known for known, _ in ranks] == expected
    assert ranks[0][1] == ranks[1][1] and "/no/such/file" in ranks[0][1]


# Where an evaluation is when a signal comes: in a decode loop, or before a task's function
PLACES = {
    "engine.sampling.grouped:DecodeBatch.step": "grouped",
    "engine.sampling.draw:TokenBuffer.draw": "generate",
    "engine.questions.rewards:parts_of": "grouped",
    "main:compute_rewards": "grouped",
}


@pytest.mark.parametrize("place", PLACES)
def test_a_signal_leaves_an_evaluation_at_once_and_nothing_of_it_stays(
    place, rotary_model_folder, monkeypatch, capsys
):
    """Bug: one that takes longer than torchrun waits cost every step since the last checkpoint."""
    settings = [f"sampling.backend={PLACES[place]}", "validation.best_of_n=2"]
    policy = harness.make_policy(rotary_model_folder, *settings)
    questions = [{"nums": [number], "target": number} for number in range(3)]
    run = harness.make_run(policy, make_config(*settings), questions=questions)
    function, calls = pkgutil.resolve_name(place), []

    def replacement(*arguments, **options):
        calls.append(place)
        run.world.signals.note(signal.SIGTERM)
        return function(*arguments, **options)

    monkeypatch.setattr(place.replace(":", "."), replacement)
    monkeypatch.setattr(main, "log_evaluation", pytest.fail)
    with run.left_at_signal():
        main.evaluate(run)
    assert len(calls) == 1
    assert run.world.stop_signal == signal.SIGTERM and run.state == State()


def test_a_terminal_that_is_gone_loses_nothing(tmp_path, rotary_model_folder, data):
    """Two ranks and torchrun are signalled when it is closed, and none of them can print then."""
    reader, terminal = pty.openpty()
    os.set_blocking(reader, False)
    for_long = ["training.num_steps=100000", "checkpoint.every=100000"]
    given = harness.program(tmp_path, rotary_model_folder, *data, *for_long)
    place = os.ttyname(terminal)
    process, seen = start(given, *with_ranks(2), log=Path(place)), b""
    while not re.search(rb"step +1/", seen):  # the line of the first step
        time.sleep(0.02)
        with contextlib.suppress(BlockingIOError):
            seen += os.read(reader, 1 << 16)
    os.close(reader)
    os.close(terminal)
    os.killpg(process.pid, HUP)
    assert harness.finish(process) == [1]  # torchrun's own
    step = load_state(tmp_path / "x/checkpoints/last").state.step
    assert [row["step"] for row in read_rows(tmp_path / "x")] == [*range(step + 1)] and step >= 1


def test_what_is_written_into_a_dead_pipe_goes_nowhere():
    """As of `2>&1 | tee log`, whose tee a Ctrl-C has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:
        for _ in range(2):
            outlive(stream.write, stream, "a line\n")


def test_ddp_is_freed_before_the_process_group(tmp_path, rotary_model_folder, monkeypatch):
    """Bug: freed after it, DDP waited for a thread of gloo's, which waited for Python's lock."""
    seen = []
    note = lambda run: seen.append(weakref.ref(run.policy.scorer)) or 0  # noqa: E731
    monkeypatch.setattr(main, "run_training", note)
    monkeypatch.setattr(World, "leave", lambda world: seen.append(seen[0]() is None))
    assert run_main(*arguments(tmp_path, rotary_model_folder)) == 0 and seen[1:] == [True]


def test_variables_that_torchrun_would_not_set_are_named(monkeypatch):
    """Bug: of RANK=1 alone it trained in silence and wrote nothing, as ranks but 0 do."""
    assert init_world() == World(0, 1, torch.device("cpu"))
    wrong = ["RANK=1", "RANK=-1", "WORLD_SIZE=0", "LOCAL_RANK=1"]
    for given in (*wrong, "LOCAL_WORLD_SIZE=2", "RANK=2 WORLD_SIZE=2"):
        with monkeypatch.context() as patch:
            for name, value in (text.split("=") for text in given.split()):
                patch.setenv(name, value)
            with pytest.raises(ValueError, match="start with torchrun") as caught:
                init_world()
        assert all(text in str(caught.value).replace("': ", "=") for text in given.split())


def test_where_a_cpus_memory_runs_out_or_a_task_exits_the_fix_is_named():
    """Bugs: a plain RuntimeError; status 0 of an evaluation in which is_lenient_solved exits."""
    run = SimpleNamespace(folder=Path(), micro_batch_tokens=2048)
    with pytest.raises(RuntimeError, match="_tokens=1024,"), crashes_name_the_fix(run):
        torch.empty(1 << 60)
    with pytest.raises(RuntimeError, match=r"exit\(0\)"), crashes_name_the_fix(run):
        sys.exit(0)


@pytest.mark.parametrize("text", ["\x1b[2J\x1b]0;evil\x07", "two\nlines\r\u202e", "9" * 5_000])
def test_an_error_is_one_printable_line(text, monkeypatch, capsys):
    """Bug: a column's name or an exception's text reached the terminal raw, escapes and all."""
    error = ValueError(f"before {text} behind")
    monkeypatch.setattr(main, "build_run", mock.Mock(side_effect=error))
    status = run_main()
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert status == 2 and line.isprintable() and len(line) < 3_000
    assert line.startswith("error: before ") and line.endswith(" behind")
