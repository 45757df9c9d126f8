"""The folder of a run: who owns it, files that are whole or not there, and what is said of files that are not."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where nothing is locked
    fcntl = None


class Busy(Exception):
    """Another process works in the folder."""


class Damaged(Exception):
    """What lies in the folder is not what was written there; one line."""


@contextlib.contextmanager
def owned(out: Path) -> Iterator[None]:
    """Keeps every other process out of ``out`` as long as it is entered; the folder is made where it is missing.

    The kernel lets go of the lock when the process ends, however it ends.

    Raises:
        Busy: another process is in it.
        OSError: the folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(20).strip() or "unknown"
            raise Busy(f"expected a folder that no other run uses, got {str(out)!r}, of process {owner}") from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def write_atomically(file: Path, content: bytes) -> None:
    """Writes ``file`` so that it holds the old content or the new, never a part."""
    unfinished = file.with_name(file.name + ".tmp")
    with unfinished.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def read_json(file: Path, expected: type, what: str) -> Any:
    """What a JSON file holds. Raises ``Damaged`` where that is no ``expected``; ``what`` says what it should be."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as wrong:
        raise Damaged(f"{file}: expected {what}, got what is no JSON: {str(wrong).splitlines()[0]}") from None
    if not isinstance(found, expected):
        raise Damaged(f"{file}: expected {what}, got a {type(found).__name__}")
    return found
