"""Ctrl-C and SIGTERM: one line, the terminal as it was, and a run that goes on where it stopped."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stopped(KeyboardInterrupt):
    """A signal asked the program to end; its message, if any, says how far it came."""

    def __init__(self, number: int, said: str = ""):
        super().__init__(said)
        self.number = number


_asked: list[int] = []  # signals that have come


def asked() -> int | None:
    """The signal that came last, also where a library has swallowed or changed the exception; None so far."""
    return _asked[-1] if _asked else None


def check() -> None:
    """Raises ``Stopped`` where a signal came before."""
    if _asked:
        raise Stopped(_asked[-1])


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Within it SIGINT and SIGTERM raise ``Stopped``, so that what is open is closed; only for the main thread."""

    def stop(number: int, frame: FrameType | None) -> None:
        _asked.append(number)
        raise Stopped(number)

    _asked.clear()
    before = {}
    for one in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(one) != signal.SIG_IGN:  # as nohup and a shell's background jobs ask for
            before[one] = signal.signal(one, stop)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
        _asked.clear()
