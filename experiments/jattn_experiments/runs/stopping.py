"""Handles Ctrl-C, SIGTERM and aborts of JAX with one line, an intact terminal, and a run that can resume."""

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
    """Within ``stoppable``, delays the first signal to the end, for libraries that an exception at any line breaks.

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
    """A context in which SIGINT and SIGTERM raise ``Stopped``, so that resources are closed; main thread only."""

    def stop(number: int, frame: FrameType | None) -> None:
        _signals.append(number)
        if not _held or len(_signals) > 1:
            raise Stopped(number)

    _signals.clear()
    before = {}
    for one in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(one) != signal.SIG_IGN:  # nohup and background jobs of a shell ignore signals
            before[one] = signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        _signals.clear()


def abort_in_one_line() -> None:
    """Replaces pages of log and SIGABRT when JAX loses another process. Call it before importing JAX.

    JAX notices the loss on a separate thread. An error in Python may come earlier, later or never.
    """
    if os.environ.get(_LOG_LEVEL, "1") == "1":  # JAX sets the same value, and child processes inherit it
        os.environ[_LOG_LEVEL] = "4"  # hides even the last messages of an abort
    ctypes.pythonapi.PyOS_setsig(signal.SIGABRT, _aborted)  # Python's own handlers wait for the main thread


@ctypes.CFUNCTYPE(None, ctypes.c_int)
def _aborted(number: int) -> None:
    """Runs on the thread that aborts. Returning would end the process by the signal."""
    time.sleep(1)  # if the main thread has an error, it reports that and exits
    line = f"JAX ended this process, usually because another process died or is missing ({_LOG_LEVEL}=0 shows why)"
    os.write(2, f"error: stopped: {line}; {RESTART}\n".encode())  # a save may have replaced sys.stderr
    os._exit(1)
