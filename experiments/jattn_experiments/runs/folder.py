"""The folder of a run: its owner, atomic writes, and errors for damaged files."""

import contextlib
import io
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: no locks
    fcntl = None


# Where results are kept: in the checkout, or for an installed jattn in the current folder.
_IN_CHECKOUT = Path(__file__).parents[3] / "experiments" / "results"
RESULTS = _IN_CHECKOUT if _IN_CHECKOUT.is_dir() else Path("results")


class Busy(Exception):
    """Another process is using the folder."""


class Damaged(Exception):
    """A file in the folder is not what was written. The message is one line."""


@contextlib.contextmanager
def owned(out: Path) -> Iterator[None]:
    """A context that locks every other process out of ``out``. It creates the folder if it is missing.

    The kernel releases the lock when the process ends, however it ends.

    Raises:
        Busy: another process holds the lock.
        OSError: the folder is not writable.
    """
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("a+") as file:
        try:
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read(20).strip() or "unknown"
            raise Busy(
                f"expected a folder that no other run uses, got {str(out)!r}, which process {owner} uses"
            ) from None
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield


def write_atomically(file: Path, content: bytes) -> None:
    """Writes ``file`` so that it always holds the old content or the new."""
    write_together({file: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Writes each file atomically, and none if the disk is too full for all: files are moved once all are written."""
    unfinished = {file.with_name(file.name + ".tmp"): file for file in contents}
    try:
        for beside, file in unfinished.items():
            with beside.open("wb") as stream:
                stream.write(contents[file])
                stream.flush()
                os.fsync(stream.fileno())
    except BaseException:
        for beside in unfinished:
            beside.unlink(missing_ok=True)
        raise
    for beside, file in unfinished.items():
        beside.replace(file)


def save_figure(figure: Any, file: Path, **options: Any) -> None:
    """Matplotlib's ``figure.savefig(file, **options)``, atomically."""
    content = io.BytesIO()
    figure.savefig(content, format=file.suffix[1:] or None, **options)
    write_atomically(file, content.getvalue())


def read_json(file: Path, expected: type, what: str) -> Any:
    """The contents of a JSON file. Raises ``Damaged`` if they are not an ``expected``; ``what`` describes them."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as wrong:
        raise Damaged(f"{file}: expected {what}, got invalid JSON: {str(wrong).splitlines()[0]}") from None
    if not isinstance(content, expected):
        raise Damaged(f"{file}: expected {what}, got a {type(content).__name__}")
    return content
