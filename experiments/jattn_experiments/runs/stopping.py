"""Ctrl-C, SIGTERM and aborts of JAX: one line, an intact terminal, and a run that can resume."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

RESTART = "restart all processes to resume from the last checkpoint"  # after one is lost


class Stopped(KeyboardInterrupt):
    """A signal ended the program; the message, if any, says how far it got."""

    def __init__(self, number: int, message: str = ""):
        super().__init__(message)
        self.number = number


_LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # of XLA
_signals: list[int] = []  # received
_held: list[bool] = []  # one for each ``held`` that is open


def last_signal() -> int | None:
    """The last signal, even if a library swallowed or converted the exception; None if there was none."""
    return _signals[-1] if _signals else None


def check() -> None:
    """Raises ``Stopped`` if a signal has arrived."""
    if _signals:
        raise Stopped(_signals[-1])


@contextlib.contextmanager
def held() -> Iterator[None]:
    """Within ``stoppable``, the first signal waits for its end, for libraries that an exception at any line breaks.

    A second signal does not wait.
    """
    _held.append(True)
    try:
        yield
    finally:
        _held.pop()
    check()


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within it, SIGINT and SIGTERM raise ``Stopped``, so that resources are closed; main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        _signals.append(number)
        if not _held or len(_signals) > 1:
            raise Stopped(number)

    _signals.clear()
    before = {}
    for one in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(one) != signal.SIG_IGN:  # set by nohup and for a shell's background jobs
            before[one] = signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        _signals.clear()


def abort_in_one_line() -> None:
    """Replaces how JAX ends a process that lost another: pages of its log, and SIGABRT. Call it before importing JAX.

    JAX notices the loss on a thread of its own. An error in Python may come first, later or never.
    """
    if os.environ.get(_LOG_LEVEL, "1") == "1":  # what JAX sets, too, for child processes
        os.environ[_LOG_LEVEL] = "4"  # hides even the last words of an abort
    ctypes.pythonapi.PyOS_setsig(signal.SIGABRT, _aborted)  # Python's own handlers wait for the main thread


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
    """On the thread that aborts: returning would end the process by the signal."""
    time.sleep(1)  # the main thread knows more, if it has an error, and leaves
    line = f"JAX ended this process, usually because another is lost or missing ({_LOG_LEVEL}=0 shows why)"
    os.write(2, f"error: stopped: {line}; {RESTART}\n".encode())  # a save may have replaced sys.stderr
    os._exit(1)
