"""Terminal output; a reader that stops (``| head -1``) stops nothing."""

import os
import sys

from rich.console import Console


class Terminal(Console):
    """A console on stdout that tolerates a closed pipe."""

    def on_broken_pipe(self) -> None:
        """Shows nothing more; Rich would end the program."""
        self.quiet = True
        drop_output()


def drop_output() -> None:
    """Discards all further output, including what is not flushed yet."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def fail(*lines: str, status: int = 2) -> int:
    """Prints errors to stderr, one per line; returns the exit status."""
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return status
