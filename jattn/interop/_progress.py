"""Shows the progress of a long loop on a terminal."""

import sys
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def track(items: Iterable[Item], what: str, show: bool) -> Iterator[Item]:
    """Yields the items and, on a terminal, shows on stderr how many are done."""
    every = list(items)
    show = show and sys.stderr.isatty()
    for done, item in enumerate(every):
        if show:
            print(f"\r\x1b[K{what}: {done} of {len(every)}", end="", file=sys.stderr, flush=True)
        yield item
    if show:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
