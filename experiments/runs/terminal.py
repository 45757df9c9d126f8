"""What is shown to a person; who stops reading (``| head -1``) stops nothing."""

import os
import sys

from rich.console import Console


class Terminal(Console):
    """A console on stdout for which a closed pipe is no error."""

    def on_broken_pipe(self) -> None:
        """Shows nothing more, where Rich would end the program."""
        self.quiet = True
        drop_output()


def drop_output() -> None:
    """Lets all further output go nowhere, also what is still to be flushed."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def fail(*lines: str, status: int = 2) -> int:
    """Says what is wrong on stderr, a line each; returns the exit status."""
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    return status
