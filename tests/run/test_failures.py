"""Signals, ranks that fail or die, restarts, several nodes: a run ends or goes on, never hangs."""

import ast
import contextlib
import functools
import importlib
import math
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import harness
import pytest
import torch
from harness import (
    ENVIRONMENT,
    ROOT,
    TORCHRUN,
    USERS_ENVIRONMENT,
    alone,
    arguments,
    assert_resumes,
    assert_same,
    finish,
    forkserver,
    grade_by_text,
    program,
    read_jsonl,
    run_on_ranks,
    save_random,
    start,
    train,
    train_forked,
)
from transformers import Qwen2Config, Qwen2ForCausalLM

import engine.core.distributed
import main
from engine.core.distributed import World, read_environment
from engine.run import resuming
from engine.run.config_file import load_config
from engine.run.mistakes import crashes_name_the_fix, mistakes_cost_one_line, outlive
from engine.run.state import Run
from logger import Logger

FOUR, SEVEN, LONG = (f"training.num_steps={steps}" for steps in (4, 7, 100000))
TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture(scope="module")
def settings(data) -> list[str]:
    samples = "logging.train_samples_every=1"
    return [*data, samples, "training.warmup_steps=0", "training.learning_rate=3e-3"]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, rotary_model_folder, settings) -> Path:
    """Four steps on one rank without a break."""
    folder = tmp_path_factory.mktemp("one")
    train(folder, rotary_model_folder, *settings, FOUR)
    return folder


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, rotary_model_folder, settings) -> Path:
    """Seven steps on two ranks without a break."""
    folder = tmp_path_factory.mktemp("two")
    train(folder, rotary_model_folder, *settings, SEVEN, num_ranks=2)
    return folder


@pytest.fixture
def patched(monkeypatch) -> pytest.MonkeyPatch:
    """With rewards by text."""
    grade_by_text(monkeypatch)
    return monkeypatch


@pytest.fixture
def model(rotary_model_folder) -> Path:
    return rotary_model_folder


def load_run(folder: Path, model: Path, *overrides: str) -> Run:
    return harness.load_run(load_config(arguments(folder, model, *overrides)))


def last_state(folder: Path) -> dict:
    """The state in the newest checkpoint."""
    return resuming.load_state(folder / "x/checkpoints/last")["state"]


def rows_of(folder: Path) -> list[tuple[int, str]]:
    """The step of each row, and what it has: a step's metrics or an evaluation's."""
    rows = read_jsonl(folder / "x/metrics.jsonl")
    return [(row["step"], "eval" if "eval/pass@1" in row else "train") for row in rows]


# Signals


def call_first(
    monkeypatch: pytest.MonkeyPatch, place: str, run: Run, *, step: int, then: Callable[[], None]
) -> None:
    """Let main's function `place` first call `then`, when `step` steps are done."""
    function = getattr(main, place)

    def replacement(*arguments, **options):
        if run.state.step == step:
            then()
        return function(*arguments, **options)

    monkeypatch.setattr(main, place, replacement)


class Interrupted(Exception):
    """Ends a run where it is, as a kill does: the folder stays as it was at that moment."""


def interrupt() -> None:
    raise Interrupted("it fails here")


@pytest.mark.parametrize(
    ("number", "place", "step", "saved", "is_evaluated", "status"),
    [
        (TERM, "evaluate", 0, 0, True, 143),  # before the first step
        (INT, "sample_trajectories", 1, 2, False, 130),  # of the second, whose evaluation is due
        (signal.SIGHUP, "update_policy", 1, 2, False, 129),  # of a terminal that is closed
        (INT, "evaluate", 2, 2, True, 130),
        (TERM, "update_policy", 3, 4, False, 143),  # of the last step
        (INT, "evaluate", 4, 4, True, 0),  # when all is done
    ],
)
def test_a_signal_saves_the_step_and_the_run_goes_on_bit_for_bit(
    number, place, step, saved, is_evaluated, status, tmp_path, model, settings, one_rank, patched
):
    """It begins no evaluation, which the resumed run makes; one that has begun is made and saved.

    A run that has ended evaluates nothing when it is started again, and ends with 0.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup, which ignores it
    overrides = [*settings, FOUR, "checkpoint.every=100"]
    with patched.context() as patch:
        run = load_run(tmp_path, model, *overrides)
        call_first(patch, place, run, step=step, then=lambda: signal.raise_signal(number))
        assert main.run_training(run) == status
        run.lock.close()
    state = last_state(tmp_path)
    assert (state["step"], state["evaluated_at"] == state["step"]) == (saved, is_evaluated)
    last = (saved, "eval" if is_evaluated else "train")
    assert rows_of(tmp_path)[-1] == last
    again = load_run(tmp_path, model, *overrides)
    assert again.is_resumed and again.state.step == saved
    assert main.run_training(again) == 0
    assert_same(one_rank, tmp_path)


def test_an_evaluation_that_no_checkpoint_knows_is_made_again(
    tmp_path, model, settings, one_rank, patched
):
    """Killed between the row of step 2's evaluation and the checkpoint of step 2, twice."""
    overrides = [*settings, FOUR, "checkpoint.every=1"]
    for _ in range(2):
        with patched.context() as patch:
            run = load_run(tmp_path, model, *overrides)
            call_first(patch, "save_checkpoint", run, step=2, then=interrupt)
            with pytest.raises(Interrupted):
                main.run_training(run)
            run.lock.close()
        assert last_state(tmp_path)["step"] == 1
        assert rows_of(tmp_path)[-2:] == [(2, "train"), (2, "eval")]
    assert main.run_training(load_run(tmp_path, model, *overrides)) == 0
    assert_same(one_rank, tmp_path)


def test_a_resumed_run_evaluates_where_another_interval_asks_for_it(
    tmp_path, model, settings, patched
):
    overrides = [*settings, "training.num_steps=2", "checkpoint.every=100"]
    with patched.context() as patch:
        run = load_run(tmp_path, model, *overrides, "validation.every=2")
        then = functools.partial(signal.raise_signal, TERM)
        call_first(patch, "update_policy", run, step=0, then=then)
        assert main.run_training(run) == 143
        run.lock.close()
    assert rows_of(tmp_path) == [(0, "eval"), (1, "train")]
    assert main.run_training(load_run(tmp_path, model, *overrides, "validation.every=1")) == 0
    in_order = [(step, kind) for step in (1, 2) for kind in ("train", "eval")]
    assert rows_of(tmp_path) == [(0, "eval"), *in_order]


def send_signals(times_s: list[float], numbers: list[int]) -> None:
    """Get these signals at these times, and exit with the number of the one that is noted."""
    world, clock = alone(), iter(times_s)
    engine.core.distributed.time = SimpleNamespace(monotonic=lambda: next(clock))
    world.catch_signals()
    for number in numbers:
        signal.raise_signal(number)
    os._exit(world.stop_signal)


@pytest.mark.parametrize(
    ("times_s", "numbers", "status"),
    [
        ([50.0], [TERM], TERM),
        ([50.0, 50.1, 90.0], [TERM, TERM, TERM], TERM),
        ([50.0, 90.0], [TERM, INT], TERM),
        ([50.0, 90.0], [INT, TERM], INT),
        ([50.0, 50.9], [INT, INT], INT),  # as of one Ctrl-C under torchrun
        ([50.0, 51.1], [INT, INT], 128 + INT),  # at once
        ([50.0, 50.1, 51.1], [INT, INT, INT], 128 + INT),
    ],
)
def test_only_a_second_ctrl_c_ends_a_run_before_it_is_saved(times_s, numbers, status):
    process = forkserver().Process(target=send_signals, args=(times_s, numbers))
    process.start()
    process.join(60)
    assert process.exitcode == status


def test_signals_end_the_process_again_when_the_run_is_over():
    """Bug: the handlers stayed, so that nothing could stop a long upload."""
    world = alone()
    world.catch_signals()
    world.leave()
    assert signal.getsignal(TERM) is signal.SIG_DFL
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(INT)


def learn_of_a_signal(world: World) -> list:
    """What this rank knows after it was asked twice; rank 1 gets a signal in between."""
    world.ask_whether_to_stop()
    known = [world.should_stop]
    if world.rank == 1:
        world.note_signal(TERM, None)
    known += [world.sum([[2.0], [world.rank]]).tolist(), world.should_stop]  # a sum only sums
    world.ask_whether_to_stop()
    return [*known, world.should_stop]


def test_all_ranks_learn_of_a_signal_to_one_when_they_are_asked(tmp_path):
    ranks = run_on_ranks(learn_of_a_signal, 2, folder=tmp_path)
    assert ranks == [[False, [[4.0], [1.0]], False, True]] * 2


def mistake_on_rank_0(world: World) -> str:
    """What this rank says of a file that rank 0 does not find."""
    with pytest.raises(ValueError) as caught:
        world.on_main(Path("/no/such/file").read_text)
    return str(caught.value)


def test_a_mistake_of_rank_0_ends_every_rank(tmp_path):
    """A rank that went on would wait for rank 0 in the next sum, for half an hour."""
    first, second = run_on_ranks(mistake_on_rank_0, 2, folder=tmp_path)
    assert first == second and "/no/such/file" in first


@pytest.mark.timeout(120)
@pytest.mark.parametrize("fault", ["terminate", "terminate other", "terminate all"])
def test_two_ranks_stop_together_and_go_on_bit_for_bit(fault, tmp_path, model, settings, two_ranks):
    """SIGTERM goes to rank 0, to rank 1, or to both and to torchrun, which passes it on to them."""
    overrides = [*settings, SEVEN, "checkpoint.every=2"]
    plan = {"do": fault, "saves": 1, "events": 1}  # while step 2 is saved
    status, output = train_forked(tmp_path, model, *overrides, num_ranks=2, fault=plan)
    assert status == 1, output  # torchrun's own
    assert output.count("stopped by a signal after step 3") == 1, output
    assert set(re.findall(r"exitcode: +(\S+)\)", output)) <= {"143"}, output
    assert last_state(tmp_path)["step"] == 3
    output = train(tmp_path, model, *overrides, num_ranks=2)
    assert "resumed after step 3" in output
    assert_same(two_ranks, tmp_path)


@pytest.mark.timeout(240)
def test_one_ctrl_c_under_torchrun_saves_the_run(tmp_path, model, settings):
    """Each rank gets it twice: as one of the terminal's process group, and from torchrun.

    More than a second between the two counts as a second Ctrl-C. On a machine that is too busy that
    can happen, so there are three attempts.
    """
    fault = {"do": "interrupt all", "saves": 1, "events": 1}
    for _attempt in range(3):
        status, output = train_forked(tmp_path, model, *settings, LONG, num_ranks=2, fault=fault)
        assert status == 1, output
        if saved := re.findall(r"stopped by a signal after step (\d+)", output):
            assert saved == [str(last_state(tmp_path)["step"])]
            return
    pytest.fail(output)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("kind", "steps", "number", "num_ranks", "status"),
    [
        ("terminal", SEVEN, None, 1, 0),  # as under setsid, which keeps the signal off
        ("terminal", LONG, signal.SIGHUP, 1, 129),
        ("terminal", LONG, signal.SIGHUP, 2, 1),  # torchrun's own
        ("pipe", LONG, INT, 1, 130),  # as of `2>&1 | tee log`, whose tee dies of Ctrl-C too
        ("pipe", SEVEN, None, 2, 0),
    ],
)
def test_a_terminal_or_pipe_that_is_gone_loses_nothing(
    kind, steps, number, num_ranks, status, tmp_path, model, settings
):
    """Bug: the next line that was logged raised EIO or EPIPE, before the run was saved."""
    if kind == "terminal":
        reader, terminal = pty.openpty()
        place = Path(os.ttyname(terminal))
    else:
        place = tmp_path / "pipe"
        os.mkfifo(place)
        reader, terminal = os.open(place, os.O_RDONLY | os.O_NONBLOCK), None
    os.set_blocking(reader, False)
    given = program(tmp_path, model, *settings, steps, "checkpoint.every=100000")
    torchrun = ["--standalone", f"--nproc-per-node={num_ranks}"] if num_ranks > 1 else []
    process, seen = start(given, *torchrun, log=place), b""
    while b"entropy" not in seen:  # the line of the first step
        time.sleep(0.02)
        with contextlib.suppress(BlockingIOError):
            seen += os.read(reader, 1 << 16)
    os.close(reader)
    if terminal is not None:
        os.close(terminal)
    if number is not None:
        os.killpg(process.pid, number)
    assert finish(process) == [status]
    step = last_state(tmp_path)["step"]
    assert {step for step, _ in rows_of(tmp_path)} == set(range(step + 1))
    assert step == 7 if number is None else step >= 1


def test_what_is_written_into_a_dead_pipe_goes_nowhere():
    """As of `2>&1 | tee log`, whose tee a Ctrl-C has ended."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w", buffering=1) as stream:
        for _ in range(2):
            outlive(stream.write, stream, "a line\n")


# Exceptions and deaths


def test_an_exception_leaves_the_last_checkpoint_and_the_run_goes_on_bit_for_bit(
    tmp_path, model, settings, one_rank, patched
):
    overrides = [*settings, FOUR, "checkpoint.every=2"]
    with patched.context() as patch:
        run = load_run(tmp_path, model, *overrides)
        call_first(patch, "update_policy", run, step=3, then=interrupt)
        with pytest.raises(Interrupted, match="it fails here"):
            main.run_training(run)
        run.lock.close()
    assert last_state(tmp_path)["step"] == 2 and rows_of(tmp_path)[-1] == (3, "train")
    again = load_run(tmp_path, model, *overrides)
    assert again.state.step == 2
    assert main.run_training(again) == 0
    assert_same(one_rank, tmp_path)


def test_a_run_that_dies_as_it_writes_its_log_has_no_checkpoint_of_that_step(
    tmp_path, model, settings, one_rank, monkeypatch
):
    """The log is written before the checkpoint: whatever is saved has its row."""
    grade_by_text(monkeypatch)
    log_metrics = Logger.log_metrics

    def fail_at_2(logger: Logger, step: int, metrics: dict) -> None:
        if step == 2:
            interrupt()
        log_metrics(logger, step, metrics)

    with monkeypatch.context() as patch:
        patch.setattr(Logger, "log_metrics", fail_at_2)
        run = load_run(tmp_path, model, *settings, FOUR)
        with pytest.raises(Interrupted):
            main.run_training(run)
        run.lock.close()
    assert last_state(tmp_path)["step"] == 1
    assert main.run_training(load_run(tmp_path, model, *settings, FOUR)) == 0
    assert_same(one_rank, tmp_path)


def test_ddp_is_freed_before_the_process_group(tmp_path, model, settings, monkeypatch):
    """Bug: freed after it, DDP waited for a thread of gloo's, which waited for Python's lock.

    One in ten runs on two ranks never ended.
    """
    seen = []
    monkeypatch.setattr(
        main, "run_training", lambda run: seen.append(weakref.ref(run.policy.scorer)) or 0
    )
    monkeypatch.setattr(World, "leave", lambda world: seen.append(seen[0]() is None))
    monkeypatch.setattr(sys, "argv", ["main.py", *arguments(tmp_path, model, *settings)])
    with pytest.raises(SystemExit) as caught:
        main.main()
    assert caught.value.code == 0 and seen[1:] == [True]


def torchrun(python: Path, folder: Path, *arguments: object, fault: dict) -> tuple[int, str]:
    """Exit status and stderr of two ranks, none of which may be left 60 s after the fault."""
    with subprocess.Popen(
        [python, *TORCHRUN, "--nproc-per-node=2", *program(folder, *arguments, fault=fault)],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            _, errors = process.communicate(timeout=110)
            assert time.time() - (folder / "struck").stat().st_mtime < 60
            assert "forcefully exiting" not in errors  # what torchrun does to a rank that hangs
            ranks = [int(file.read_text()) for file in folder.glob("pid-*")]
            assert not any(kill_group(rank) for rank in ranks)
            return process.returncode, errors
        finally:  # each rank has a session of its own
            for file in folder.glob("pid-*"):
                kill_group(int(file.read_text()))
            kill_group(process.pid)


def kill_group(pid: int) -> bool:
    """Kill the process group that a process leads; returns whether there was one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
        return True
    return False


@pytest.mark.timeout(180)
def test_an_exception_on_one_rank_ends_all_with_its_traceback(
    python, tmp_path, model, settings, two_ranks
):
    """In the third step: rank 1 reads 4 completions (an evaluation), then 16, 16, 4 and 16."""
    fault = {"do": "raise", "rank": 1, "calls": 50}
    overrides = [*settings, SEVEN, "checkpoint.every=2"]
    status, errors = torchrun(python, tmp_path, model, *overrides, fault=fault)
    assert status != 0
    assert "RuntimeError: it fails here" in errors
    assert "in sample_trajectories" in errors
    output = train(tmp_path, model, *overrides, num_ranks=2)
    assert "resumed after step 2" in output
    assert_same(two_ranks, tmp_path)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ({"do": "pay"}, "countdown.py: reward_function must return a dict with a number"),
        ({"do": "raise in reward"}, "countdown.py: it raised RuntimeError: it fails here"),
    ],
)
def test_a_reward_that_is_no_number_ends_all_ranks_with_a_line(
    python, tmp_path, model, settings, fault, line
):
    """Bug: NaN skipped ten steps, and then the log advised to lower the learning rate.

    An exception was 27 lines.
    """
    fault |= {"parts": {"format": 1.0, "answer": math.nan}, "rank": 1, "calls": 50}
    status, errors = torchrun(python, tmp_path, model, *settings, SEVEN, fault=fault)
    assert status != 0
    (found,) = (line for line in errors.splitlines() if line.startswith("error: "))
    assert found.startswith(f"error: {ROOT}/{line}")
    assert " question {'nums': [" in found
    assert "in sample_trajectories" not in errors and "by peer" not in errors  # of either rank


@pytest.mark.timeout(120)
@pytest.mark.parametrize("victim", ["kill", "kill other"])
def test_a_rank_that_dies_ends_the_others(python, tmp_path, model, settings, victim):
    fault = {"do": victim, "saves": 2, "delay_s": 0.1}
    status, errors = torchrun(python, tmp_path, model, *settings, LONG, fault=fault)
    assert status != 0
    assert "Signal 9 (SIGKILL)" in errors


# Starting


def test_an_old_python_is_named_before_a_package_is_missed():
    """Bug: pip finds no transformers 5.23 for Python 3.10, and main.py had no module tomllib.

    Without site-packages main.py can import none of its packages.
    """
    code = "import runpy, sys; sys.version_info = (3, 10, 12); runpy.run_path('main.py')"
    command, told = [sys.executable, "-S", "-c", code], {"capture_output": True, "text": True}
    done = subprocess.run(command, cwd=ROOT, env=USERS_ENVIRONMENT, **told)
    line = "error: Python 3.11 or newer is needed, and this is 3.10\n"
    assert (done.returncode, done.stderr) == (2, line)
    for file in ("main.py", "engine/__init__.py"):
        ast.parse((ROOT / file).read_text(), feature_version=(3, 8))


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1"},  # bug: it trained in silence and wrote nothing, as ranks but 0 do
        {"WORLD_SIZE": "0"},
        {"WORLD_SIZE": "-1"},
        {"WORLD_SIZE": "abc"},
        {"LOCAL_RANK": "1"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
    ],
)
def test_variables_that_torchrun_would_not_set_are_named(monkeypatch, variables):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert read_environment() == (0, 1, 0, 1)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="start with torchrun") as caught:
        read_environment()
    assert all(f"{name}={value}" in str(caught.value) for name, value in variables.items())


def test_ctrl_c_while_loading_is_one_line(capsys):
    signal.signal(INT, signal.default_int_handler)  # a shell's background jobs ignore it
    with pytest.raises(SystemExit) as ended, mistakes_cost_one_line():
        signal.raise_signal(INT)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "stopped by Ctrl-C before the start: nothing was changed\n"


def test_full_memory_is_an_error_that_names_what_to_change(capsys):
    with pytest.raises(SystemExit) as ended, mistakes_cost_one_line():
        raise torch.OutOfMemoryError("CUDA out of memory")  # where the model is loaded
    assert ended.value.code == 2
    assert re.fullmatch(r"error: .* model\.lora or model\.shard .*\n", capsys.readouterr().err)
    with pytest.raises(RuntimeError, match="micro_batch_tokens"), crashes_name_the_fix(Path()):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_full_memory_of_the_host_is_named_like_a_gpus(capsys):
    """Bug: on a CPU torch raises a plain RuntimeError, which was a traceback without a fix."""
    with pytest.raises(RuntimeError, match="micro_batch_tokens"), crashes_name_the_fix(Path()):
        torch.empty(1 << 60)
    with pytest.raises(RuntimeError, match="another problem"), crashes_name_the_fix(Path()):
        raise RuntimeError("another problem")
    with pytest.raises(SystemExit) as ended, mistakes_cost_one_line():
        torch.empty(1 << 60)
    assert ended.value.code == 2
    assert re.fullmatch(r"error: .* model\.lora or model\.shard .*\n", capsys.readouterr().err)


def test_a_task_that_exits_is_a_failure():
    """Bug: sys.exit(0) in a task ended the run after the first of three steps, with status 0."""
    with pytest.raises(RuntimeError, match=r"called sys\.exit\(0\)"), crashes_name_the_fix(Path()):
        sys.exit(0)


def test_a_full_standard_output_is_named(tmp_path, model, settings):
    """Bug: of `> /dev/full` it said that the disk of the run's folder was full."""
    given = ["main.py", *arguments(tmp_path, model, *settings, "training.num_steps=1")]
    code = f"import sys; sys.argv = {given}; import main; main.main()"
    with open("/dev/full", "w") as full:
        command, how = [sys.executable, "-c", code], {"stderr": subprocess.PIPE, "text": True}
        done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=full, **how)
    assert done.returncode not in (0, None) and "stdout" in done.stderr
    assert str(tmp_path) not in done.stderr, done.stderr


@pytest.mark.parametrize("text", ["\x1b[2J\x1b]0;evil\x07", "two\nlines\r\u202e", "9" * 5_000])
@pytest.mark.parametrize("program", ["main", "tools.chat", "tools.report", "tools.plot"])
def test_an_error_is_one_printable_line(program, text, tmp_path, monkeypatch, capsys):
    """Bug: a column's name or an exception's text reached the terminal raw, escapes and all."""
    module = importlib.import_module(program)
    monkeypatch.setattr(sys, "argv", [program, str(tmp_path)])
    place = {"main": "load_config", "tools.chat": "read_arguments", "tools.report": "write_report"}

    def fail(*arguments, **options):
        raise ValueError(f"before {text} behind")

    monkeypatch.setattr(module, place.get(program, "read_table"), fail)
    with pytest.raises(SystemExit) as ended:
        module.main()
    (line,) = capsys.readouterr().err.split("\n")[:-1]
    assert ended.value.code == 2 and line.isprintable() and len(line) < 3_000
    assert line.startswith("error: before ") and line.endswith(" behind")


# Restarts and nodes


@pytest.mark.timeout(240)
def test_a_restart_by_torchrun_ends_with_one_line_and_the_command_resumes(
    tmp_path, model, settings, two_ranks
):
    """Bug: new ranks found the old ones' addresses in torchrun's store; half of the starts hung."""
    fault = {"do": "kill other", "saves": 1, "delay_s": 0.1}
    options = ["--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    started = program(tmp_path, model, *settings, SEVEN, fault=fault)
    (status,) = finish(start(started, *options, log=tmp_path / "log"))
    output = (tmp_path / "log").read_text(errors="replace")
    assert status == 1, output  # torchrun's own
    (line,) = re.findall(r"^error: .*", output, re.MULTILINE)
    assert line.endswith("which is not supported: start the command again, it resumes")
    assert f"traceback : {line}\n" in output  # torchrun's report, which comes last
    assert "exitcode  : 2" in output and "resumed after step" not in output
    assert "resumed after step" in train(tmp_path, model, *settings, SEVEN, num_ranks=2)
    assert_same(two_ranks, tmp_path)


def train_on_two_nodes(folders: list[Path], model: Path, *overrides: str) -> None:
    """One rank under each of two torchruns, that of the first folder being rank 0."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    options = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=nodes"]
    nodes = []
    for number, folder in enumerate(folders, start=1):
        nodes.append(
            start(
                program(folder / "runs", model, *overrides),
                *options,
                f"--rdzv-endpoint={endpoint}",
                f"--local-addr=127.0.0.{number}",  # torchrun orders the ranks by it
                log=folder / "log",
            )
        )
    statuses = finish(*nodes)
    assert statuses == [0, 0], "".join((folder / "log").read_text() for folder in folders)


@pytest.mark.timeout(240)
def test_two_nodes_without_a_shared_disk_train_and_resume_as_two_ranks_of_one(
    tmp_path, model, settings, two_ranks
):
    """Only rank 0 has the checkpoint: it decides where to go on, and broadcasts that."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    train_on_two_nodes(folders, model, *settings, "training.num_steps=2")
    train_on_two_nodes(folders, model, *settings, SEVEN)
    assert "resumed after step 2" in (folders[0] / "log").read_text()
    assert_same(two_ranks, folders[0] / "runs")
    assert not (folders[1] / "runs").exists()


@pytest.fixture
def two_bucket_model(tmp_path, tokenizer, rotary_model_folder) -> Path:
    """A random Qwen2 of 5 MB: DDP puts the gradients beyond the first MB into a second bucket."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "initializer_range": 0.02}
    config = Qwen2Config.from_pretrained(rotary_model_folder, **sizes)
    return save_random(Qwen2ForCausalLM, config, tokenizer, tmp_path / "model")


@pytest.mark.timeout(240)
def test_three_ranks_resume_bit_for_bit(tmp_path, two_bucket_model, settings):
    """DDP reorders gradients after the first backward pass; sums of three then round otherwise."""
    assert_resumes(tmp_path, two_bucket_model, *settings, num_ranks=3)
