"""Signals that end a run: a thread notes them at once, wherever the main thread is."""

import functools
import os
import signal
import sys
import threading
import time

HELD = (signal.SIGTERM, signal.SIGHUP)
CAUGHT = (*HELD, signal.SIGINT)


def leave_to_watch(number: int, frame: object) -> None:
    """Python's handler does nothing: the number is in the pipe of `SignalWatch` already."""


# Around a fork: a signal that comes before the child has its handlers back would be lost.
hold_signals = functools.partial(signal.pthread_sigmask, signal.SIG_BLOCK, HELD)
release_signals = functools.partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, HELD)


def let_held_signals_end() -> None:
    """SIGTERM and SIGHUP end the process again, unless it has ignored them before."""
    for number in HELD:
        if signal.getsignal(number) is leave_to_watch:
            signal.signal(number, signal.SIG_DFL)


def give_signals_back() -> None:
    """In a forked child: SIGTERM and SIGHUP end it again, and Ctrl-C is the run's affair."""
    if signal.getsignal(signal.SIGTERM) is leave_to_watch:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        let_held_signals_end()
    release_signals()


os.register_at_fork(
    before=hold_signals, after_in_parent=release_signals, after_in_child=give_signals_back
)


LEAVABLE = threading.local()  # its `watch` is the thread's SignalWatch in `World.left_by_all`


class Left(BaseException):
    """A signal has ended a block. It is no Exception, which a task's code is asked about."""


def leave_if_signalled() -> None:
    """Raises `Left` in such a block. It is called at each token, and before a task's functions."""
    watch = getattr(LEAVABLE, "watch", None)
    if watch and watch.first:
        raise Left


class SignalWatch:
    """Keeps the first signal to end. A Ctrl-C after it ends this process at once.

    Signals reach the thread through a pipe that Python's C code writes to: the main thread may be
    deep in a library, or wait for a process that will never answer.
    """

    def __init__(self, *, is_main: bool) -> None:
        self.is_main = is_main
        self.first = 0  # for none
        self.first_at_s = 0.0
        self.writer: int | None = None  # the end of the pipe that signals are written to

    def start(self) -> None:
        """Catch signals from here on."""
        reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer, warn_on_full_buffer=False)
        for number in CAUGHT:
            # `nohup` makes a process ignore SIGHUP, which comes when a terminal is closed.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, leave_to_watch)
        threading.Thread(target=self.watch, args=(reader,), daemon=True).start()
        # The thread gets it then. Processes that a reward starts inherit this.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})

    def stop(self) -> None:
        """Signals end this process again."""
        if self.writer is None:
            return
        signal.set_wakeup_fd(-1)
        let_held_signals_end()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.close(self.writer)  # which ends the thread
        self.writer = None

    def watch(self, reader: int) -> None:
        """The thread: note signals as they come, until the pipe's other end is closed."""
        while number := os.read(reader, 1):
            self.note(number[0])
        os.close(reader)

    def note(self, number: int) -> None:
        """Keep the first signal; a second Ctrl-C, also after a SIGTERM, ends this process."""
        now_s = time.monotonic()
        # Under torchrun one Ctrl-C comes twice: from the terminal and, a moment later, torchrun.
        if number == signal.SIGINT and self.first and now_s - self.first_at_s > 1:
            os._exit(128 + number)
        if self.first == 0 and number in CAUGHT:
            self.first = number
            self.first_at_s = now_s
            if number == signal.SIGINT and self.is_main:
                print("\nsaving after this step; Ctrl-C again to quit at once", file=sys.stderr)
