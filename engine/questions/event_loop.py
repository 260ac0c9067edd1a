"""The loop of async reward functions: one for the life of a task, in each process.

A client or a lock that a user's module keeps belongs to the loop that has used it first.
"""

import asyncio
import atexit
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class EventLoop:
    def __init__(self) -> None:
        # By process: a fork's child must leave its parent's alone, whose sockets it shares.
        self.runners: dict[int, tuple[asyncio.Runner, threading.Lock]] = {}
        atexit.register(self.close)

    def run(self, coroutine: Coroutine) -> Any:
        """What the coroutine returns; what it has begun and not awaited is cancelled."""
        new = asyncio.Runner(), threading.Lock()  # nothing yet: its loop is made in its first run
        runner, lock = self.runners.setdefault(os.getpid(), new)
        with lock:
            return runner.run(alone(coroutine))

    def close(self) -> None:
        """Close this process's, unless a thread, or a task that heeds no end, is still in it."""
        runner, lock = self.runners.get(os.getpid(), (None, None))
        if runner and lock.acquire(blocking=False) and not asyncio.all_tasks(runner.get_loop()):
            runner.close()


async def alone(coroutine: Coroutine) -> Any:
    asyncio.get_running_loop().set_default_executor(DaemonThreads())
    try:
        return await coroutine
    finally:
        for task in (others := asyncio.all_tasks() - {asyncio.current_task()}):
            task.cancel()
        if others:
            await asyncio.wait(others, timeout=1.0)  # seconds


class DaemonThreads(ThreadPoolExecutor):
    """Runs each call of asyncio.to_thread in a thread of its own, for which no exit waits.

    Nothing ends a call that hangs: it would hold one of a pool's few threads for good.
    """

    def submit(self, function, /, *arguments, **named) -> Future:
        given = future, *_ = Future(), function, arguments, named
        future.set_running_or_notify_cancel()
        threading.Thread(target=fulfil, args=given, daemon=True).start()
        return future


def fulfil(future: Future, function: Any, arguments: tuple, named: dict) -> None:
    try:
        future.set_result(function(*arguments, **named))
    except BaseException as error:
        future.set_exception(error)
