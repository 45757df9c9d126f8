"""Terminal output that tolerates a reader that stops early, such as ``| head -1``."""

import contextlib
import os
import sys
from collections.abc import Iterator

from rich.console import Console


class Terminal(Console):
    """A console on stdout that tolerates a closed pipe."""

    def on_broken_pipe(self) -> None:
        """Discards further output; Rich would end the program."""
        self.quiet = True
        drop_output()


def drop_output() -> None:
    """Discards all further output, including output that is not flushed yet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


class Refused(Exception):
    """The reason why a command cannot run, in one line. ``main`` prints it and returns status 2."""


@contextlib.contextmanager
def refusing(option: str, *errors: type[Exception]) -> Iterator[None]:
    """A context in which these errors become ``Refused``, as faults of an option."""
    try:
        yield
    except errors as wrong:
        raise Refused(f"{option}: {wrong}") from None


def fail(*lines: str, status: int = 2) -> int:
    """Prints errors to stderr, one per line; returns the exit status."""
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return status
