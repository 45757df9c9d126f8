"""Ctrl-C and SIGTERM: one line, an intact terminal, and a run that can resume."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A signal ended the program; the message, if any, says how far it got."""

    def __init__(self, number: int, said: str = ""):
        super().__init__(said)
        self.number = number


_asked: list[int] = []  # signals received
_held: list[bool] = []  # one for each ``held`` that is open


def asked() -> int | None:
    """The last signal, even if a library swallowed or converted the exception; None if there was none."""
    return _asked[-1] if _asked else None


def check() -> None:
    """Raises ``Stopped`` if a signal has arrived."""
    if _asked:
        raise Stopped(_asked[-1])


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
        _asked.append(number)
        if not _held or len(_asked) > 1:
            raise Stopped(number)

    _asked.clear()
    before = {}
    for one in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(one) != signal.SIG_IGN:  # set by nohup and for a shell's background jobs
            before[one] = signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        _asked.clear()
