"""What a user sees when something goes wrong: one line that names the fix."""

import contextlib
import errno
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.config import ConfigError
from engine.export import ExportError
from engine.task_module import RewardError


class Outlet(io.FileIO):
    """The file of stdout or stderr; once nobody reads it, what is written goes nowhere.

    A terminal that was closed answers EIO, and a pipe whose reader has died EPIPE. The descriptor
    then becomes /dev/null, so that C libraries and child processes can go on writing to it too.
    """

    def write(self, data: bytes) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.EIO, errno.EPIPE):
                raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
        return len(data)


def outlive_terminal() -> None:
    """Let no line that is logged raise an error: it would end a run that SIGHUP asks to save."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and stream is getattr(sys, f"__{name}__"):  # not a notebook's
            file = io.BufferedWriter(Outlet(stream.fileno(), "w", closefd=False))
            by_line = stream.line_buffering or stream.write_through  # the latter is `python -u`
            text = io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=by_line)
            setattr(sys, name, text)


@contextlib.contextmanager
def mistakes_cost_one_line() -> Iterator[None]:
    """Print a user's mistake on one rank, and not again at a restart; exit with status 2."""
    outlive_terminal()  # here, since this is what main.py enters first
    try:
        yield
    except KeyboardInterrupt:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print("stopped by Ctrl-C before the start: nothing was changed", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, torch.OutOfMemoryError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            fix = "end other programs on it, or set model.lora or model.shard (docs/models.md)"
            error = ValueError(f"the GPU's memory is full before anything is sampled: {fix}")
        is_config = isinstance(error, ConfigError)
        counts = ("LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT")
        is_first_rank, is_first_start = (os.environ.get(name, "0") == "0" for name in counts)
        if is_first_start and not is_first_rank:
            # torchrun ends all ranks with the first: give rank 0 time to print the same mistake.
            time.sleep(3)
        if is_first_start and (is_first_rank or not is_config):
            lines = error.lines if is_config else [str(error)]
            print("\n".join(f"error: {line}" for line in lines), file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def crashes_name_the_fix(folder: Path) -> Iterator[None]:
    """Where memory or the disk is full, say below the traceback what to do about it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RuntimeError(
            "out of GPU memory: lower sampling.max_batch_tokens if it was sampling, else "
            "training.micro_batch_tokens, or set model.gradient_checkpointing=true"
        ) from error
    except (ExportError, RewardError) as error:
        with mistakes_cost_one_line():
            raise error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        fix = "free some space; the same command goes on from the last checkpoint"
        raise RuntimeError(f"{folder}: the disk is full: {fix}") from error
