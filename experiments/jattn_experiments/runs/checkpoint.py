"""Checkpoints of a run. Only this file uses Orbax."""

import hashlib
import io
import json
import logging
import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
from orbax.checkpoint import v1

from jattn_experiments.runs import devices, stopping
from jattn_experiments.runs.folder import Damaged, read_json

# Orbax logs every save and, also through asyncio, every interruption. A run shows a progress bar instead, and one
# line after an interruption.
for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)

_ARRAYS, _CONTENTS = "arrays", "contents.json"


class Checkpoints:
    """The checkpoints in one folder; the newest ``keep`` are kept, or all for 0.

    A checkpoint is a folder named after its step. Orbax writes the arrays. Another file holds metadata and digests of
    all files, which are verified before Orbax reads any. A checkpoint is written under another name and then renamed,
    so it is either complete or absent. All processes of a run write it together.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self._folder, self._keep = folder, keep
        if devices.is_first():
            self._folder.mkdir(parents=True, exist_ok=True)
        devices.everywhere(True)  # visible to all

    @property
    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, oldest first."""
        return saved_steps(self._folder)

    def save(self, step: int, state: Any, beside: dict[str, str] | None = None) -> None:
        """Writes ``state``, a pytree of arrays, and returns when done. All processes call it together.

        Args:
            step: Step of the state.
            state: What to save.
            beside: Metadata that ``restore`` passes to ``fits``.

        Raises:
            OSError: the checkpoint could not be written.
        """
        unfinished, error = self._folder / f"{step}.tmp", None
        stderr, sys.stderr = sys.stderr, _OfMainThread(sys.stderr)
        try:
            with stopping.held():  # an interrupted Orbax leaves unfinished event loops behind
                v1.save((unfinished / _ARRAYS).absolute(), state, overwrite=True)
            if devices.is_first():
                contents = {"files": _digests(unfinished), "beside": beside or {}}
                (unfinished / _CONTENTS).write_text(json.dumps(contents, indent=1), encoding="utf-8")
                unfinished.rename(self._folder / f"{step}")
                for old in self.steps[: -self._keep] if self._keep else []:
                    shutil.rmtree((self._folder / f"{old}").rename(self._folder / f"{old}.tmp"))
        except (OSError, RuntimeError, ValueError) as wrong:  # a full disk raises any of these
            stopping.check()  # a signal may have caused it
            error = wrong
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
        if error is None:  # after an error, threads keep failing until the program ends
            sys.stderr = stderr
        if not devices.everywhere(error is None):
            reason = _first_line(error) if error else "another process failed"
            raise OSError(f"the checkpoint of step {step} could not be written: {reason}") from error

    def load(self, step: int, like: Any) -> Any:
        """The state saved at ``step``, with the structure, shapes, dtypes and shardings of ``like``.

        Raises ``Damaged`` if the checkpoint was altered, or its structure differs from ``like``.
        """
        return self._load(step, like)[0]

    def restore(
        self, like: Any, fits: Callable[[int, dict[str, str]], str], say: Callable[[str], None]
    ) -> tuple[int, Any]:
        """The step and state of the newest intact checkpoint; 0 and ``like`` if nothing was saved yet.

        Newer checkpoints that are unusable are moved to ``damaged/`` next to the folder to make room for new ones.
        Unfinished ones are removed. All processes call it together.

        Args:
            like: A state of the same structure, shapes, dtypes and shardings.
            fits: Takes a checkpoint's step and metadata; returns why it does not fit, or "".
            say: Takes a line for each unusable checkpoint.

        Raises:
            Damaged: there are checkpoints, but none is usable.
        """
        if devices.is_first():
            for unfinished in self._folder.glob("*.tmp"):
                shutil.rmtree(unfinished)
        steps, reason = self.steps[::-1], ""
        for number, step in enumerate(steps):
            try:
                state, words = self._load(step, like)
                reason = fits(step, words)
            except Damaged as damaged:
                reason = str(damaged)
            if not reason:
                if number:
                    self._set_aside(steps[:number])
                    say(f"{self._folder.parent}: resuming from the older checkpoint of step {step}")
                return step, state
            if number + 1 < len(steps):
                say(reason)
        if steps:
            others = (
                f"; no older checkpoint is usable either (the oldest is step {steps[-1]})" if len(steps) > 1 else ""
            )
            raise Damaged(f"{reason}{others}; remove {self._folder.parent} to start over")
        return 0, like

    def _set_aside(self, steps: list[int]) -> None:
        if devices.is_first():
            for step in steps:
                aside = self._folder.with_name("damaged") / f"{step}"
                while aside.exists():
                    aside = aside.with_name(aside.name + "_")
                aside.parent.mkdir(exist_ok=True)
                (self._folder / f"{step}").rename(aside)
        devices.everywhere(True)  # visible to all

    def _load(self, step: int, like: Any) -> tuple[Any, dict[str, str]]:
        described = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
        folder, error = self._folder / f"{step}", ""
        state, words = None, {}
        if devices.is_first():
            try:
                words = _checked(folder)
            except (Damaged, OSError) as wrong:
                error = str(wrong)
        if devices.everywhere(not error):
            try:
                with stopping.held():
                    state = v1.load((folder / _ARRAYS).absolute(), jax.tree.map(described, like))
            except Exception as wrong:  # Orbax and TensorStore raise many types for another version's arrays
                stopping.check()  # a signal may have caused it
                error = f"{folder}: the checkpoint cannot be read: {_first_line(wrong)}"
        if not devices.everywhere(state is not None):
            raise Damaged(error or f"{folder}: another process cannot read the checkpoint")
        return state, words


def saved_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints in ``folder``, oldest first; none if there is no such folder."""
    return sorted(int(one.name) for one in folder.iterdir() if one.name.isdecimal()) if folder.is_dir() else []


def named(run: str) -> tuple[Path, Checkpoints, int]:
    """The folder, checkpoints and step that ``run`` names: FOLDER, for the last checkpoint, or FOLDER@STEP.

    Raises ``ValueError`` if there is no such run or checkpoint.
    """
    before, at, after = run.rpartition("@")
    folder = Path(before if at else after)
    if not (folder / "checkpoints").is_dir():
        raise ValueError(f"expected the folder of a training run, got {str(folder)!r}")
    checkpoints = Checkpoints(folder / "checkpoints")
    steps = checkpoints.steps
    if not steps or (at and after not in map(str, steps)):
        more = "; train.keep=0 would keep all of them" if steps else ""
        raise ValueError(f"{folder}: expected one of its checkpoints, {steps}, got {after if at else None}{more}")
    return folder, checkpoints, int(after) if at else steps[-1]


class _OfMainThread(io.TextIOBase):
    """A stream that drops other threads' output. When a save fails, each TensorStore thread prints a traceback."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(text) if threading.current_thread() is threading.main_thread() else len(text)

    def flush(self) -> None:
        self._stream.flush()


def _digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file in a folder and its subfolders."""
    digests = {}
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        with file.open("rb") as stream:
            digests[file.relative_to(folder).as_posix()] = hashlib.file_digest(stream, "sha256").hexdigest()
    return digests


def _checked(folder: Path) -> dict[str, str]:
    """A checkpoint's metadata. Raises ``Damaged`` if its files are not what was written."""
    if not (folder / _CONTENTS).is_file():
        raise Damaged(f"{folder}: the checkpoint has no {_CONTENTS}: it is damaged, or from another version")
    contents = read_json(folder / _CONTENTS, dict, "the digests of a checkpoint")
    files, words = contents.get("files"), contents.get("beside")
    if not isinstance(files, dict) or not isinstance(words, dict):
        raise Damaged(f"{folder / _CONTENTS}: expected 'files' and 'beside', got {list(contents)}")
    digests = _digests(folder)
    del digests[_CONTENTS]
    changed = sorted(file for file in {**files, **digests} if files.get(file) != digests.get(file))
    if changed:
        others = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise Damaged(f"{folder}: the checkpoint is damaged: {changed[0]!r}{others} is not what was written")
    return words


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
