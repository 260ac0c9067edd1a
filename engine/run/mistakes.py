"""What a user sees when something goes wrong: one line that names the fix."""

import contextlib
import errno
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from engine.core.config import ConfigError
from engine.core.text import error_line
from engine.core.user_file import RewardError


def outlive(use: Callable[..., Any], stream: TextIO, *text: str) -> Any:
    """Write or flush; at EIO (a closed terminal) or EPIPE (a dead pipe) it becomes /dev/null."""
    try:
        return use(*text)
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EPIPE):
            error.filename = stream.name  # such as <stdout>, on a full disk
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def mistakes_cost_one_line() -> Iterator[None]:
    """Print a user's mistake on one rank, and once; exit with status 2."""
    # What is printed where nobody reads it any more goes nowhere: an error would end the run.
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a daemon may have closed them
        for name in ("write", "flush"):
            setattr(stream, name, functools.partial(outlive, getattr(stream, name), stream))
    is_first_rank = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        yield
    except KeyboardInterrupt:
        if is_first_rank:
            print("stopped by Ctrl-C before the start: nothing was changed", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if isinstance(error, (RuntimeError, MemoryError)):
            if not is_out_of_memory(error):
                raise
            error = ValueError(
                "the memory is full before anything is sampled: end other programs on it, or set "
                "model.lora or model.shard (docs/models.md)"
            )
        is_config = isinstance(error, ConfigError)
        # A restart by torchrun would repeat what its first start has printed. That there is one is
        # a mistake of its own (see `init_world`), which the first restart prints.
        is_new = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) <= (0 if is_config else 1)
        if is_new and not is_first_rank:
            time.sleep(3)  # torchrun ends all ranks with the first: let rank 0 print it before
        if is_new and (is_first_rank or not is_config):
            for line in error.lines if is_config else [error]:
                print(error_line(line), file=sys.stderr)
            print(error.better if is_config else "", end="", file=sys.stderr)
        sys.exit(2)


@contextlib.contextmanager
def crashes_name_the_fix(run: Any) -> Iterator[None]:
    """Where memory or the disk is full, or a task exits, say below the traceback what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "by peer" in str(error):  # gloo's words, where the other rank has said why
            print(
                "this rank ends too, since another one has ended; what was saved stays in "
                f"{run.folder}; the same command on all nodes goes on",
                file=sys.stderr,
            )
            time.sleep(1)  # torchrun names the rank that ends first: let that be the other one
            sys.exit(1)
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(
            "out of memory: if it was sampling, lower sampling.max_batch_tokens, else set "
            f"training.micro_batch_tokens={run.micro_batch_tokens // 2}, or "
            "model.gradient_checkpointing=true"
        ) from error
    except RewardError as error:
        with mistakes_cost_one_line():
            raise error
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise RuntimeError(
            f"{error.filename or run.folder}: the disk is full: free some space; the same command "
            "goes on from the last checkpoint"
        ) from error
    except SystemExit as error:
        raise RuntimeError(f"a task called sys.exit({error.code}): let it raise instead") from error


def is_out_of_memory(error: RuntimeError | MemoryError) -> bool:
    """Of a GPU or of the host, for which torch's CPU allocator raises a plain RuntimeError."""
    import torch  # which a mistake in a config need not wait for

    text = "DefaultCPUAllocator: can't allocate memory"
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or text in str(error)
