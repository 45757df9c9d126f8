"""Checkpoints of a run. The only file that knows Orbax."""

import gc
import hashlib
import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

from experiments import devices, stopping
from experiments.folder import Damaged

# Orbax logs every save and, through asyncio too, all that it meets in a damaged file. A run has a progress bar for the
# one, and one line for the other.
for name in ("absl", "asyncio"):
    logging.getLogger(name).setLevel(logging.CRITICAL)

_KEPT = 2


class Checkpoints:
    """The checkpoints in one folder, newest two kept; a context manager.

    A checkpoint is there whole or not at all: Orbax writes beside and renames. It carries a digest of its arrays, and
    what else is to be remembered with it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        policy = v1.training.preservation_policies.LatestN(_KEPT)
        self._orbax = v1.training.Checkpointer(
            folder.absolute(), preservation_policy=policy, cleanup_tmp_directories=True
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self._orbax.close()

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints that there are, oldest first."""
        return [found.step for found in self._orbax.checkpoints]

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        return self.steps[-1] if self.steps else None

    def save(self, step: int, state: Any, beside: dict[str, str] | None = None) -> None:
        """Writes ``state``, a pytree of arrays, and returns when it stands. All processes call it together.

        Args:
            step: Of the state.
            state: What is kept.
            beside: Words that ``restore`` shows to its ``fits``.

        Raises:
            OSError: it could not be written.
        """
        words = {"state": digest(state)} | (beside or {})
        try:
            self._orbax.save(step, state, force=True, custom_metadata=words)
        except (OSError, RuntimeError, ValueError) as error:  # a full disk comes as any of these
            raise OSError(f"the checkpoint of step {step} could not be written: {_first_line(error)}") from error

    def load(self, step: int, like: Any) -> Any:
        """The state saved at ``step``, with the structure, shapes, dtypes and shardings of ``like``.

        Raises:
            Damaged: it cannot be read, or is not what was saved.
        """
        return self._load(step, like)[0]

    def restore(
        self, like: Any, fits: Callable[[int, dict[str, str]], str], say: Callable[[str], None]
    ) -> tuple[int, Any]:
        """The newest state that is whole, and its step; 0 and ``like`` where nothing was saved yet.

        Newer ones that do not serve are moved to ``damaged/`` beside the folder, so that new ones can take their place.
        All processes call it together.

        Args:
            like: A state of the same structure, shapes, dtypes and shardings.
            fits: Is given the step and the words beside a checkpoint; says why it does not fit, or "" where it does.
            say: Is given a line for each that does not serve.

        Raises:
            Damaged: there are some, and none serves.
        """
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
                    say(f"{self._folder.parent}: goes on from the older checkpoint of step {step}")
                return step, state
            if number + 1 < len(steps):
                say(reason)
        if steps:
            others = f"; nor does an older one serve (step {steps[-1]})" if len(steps) > 1 else ""
            raise Damaged(f"{reason}{others}; remove {self._folder.parent} to train anew")
        return 0, like

    def _set_aside(self, steps: list[int]) -> None:
        if devices.is_first():
            for step in steps:
                aside = self._folder.with_name("damaged") / f"{step}"
                while aside.exists():
                    aside = aside.with_name(aside.name + "_")
                aside.parent.mkdir(exist_ok=True)
                (self._folder / f"{step}").rename(aside)
        devices.everywhere(True)  # moved, for all to see
        self._orbax.reload()

    def _load(self, step: int, like: Any) -> tuple[Any, dict[str, str]]:
        def described(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

        where, error = f"{self._folder / str(step)}", ""
        state, words = None, {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # where it fails, Orbax leaves coroutines behind
            try:
                words = self._orbax.metadata(step).custom_metadata or {}
                state = self._orbax.load(step, jax.tree.map(described, like))
            except Exception as wrong:  # whatever Orbax and TensorStore make of foreign bytes
                stopping.check()  # it may have been the exception of a signal
                error = _first_line(wrong)
            if error:
                gc.collect()
        if not devices.everywhere(state is not None):
            raise Damaged(f"{where}: the checkpoint cannot be read: {error or 'so another process says'}")
        if not isinstance(words, dict) or "state" not in words:
            raise Damaged(f"{where}: the checkpoint has no digest: it is another version's, or its metadata is damaged")
        if words["state"] != digest(state):
            raise Damaged(f"{where}: the checkpoint is damaged: its numbers have another digest than was kept")
        return state, words


def digest(state: Any) -> str:
    """SHA-256 of the names, shapes, dtypes and bytes of all leaves; the same on every mesh, as whole arrays are read.

    Of several processes each gets it; they call it together.
    """
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        array = np.asarray(_whole(leaf))
        found.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def _whole(leaf: jax.Array) -> Any:
    """An array that this process can read; one that is split over processes is gathered."""
    if leaf.is_fully_addressable:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_data(0)
    assert isinstance(leaf.sharding, NamedSharding)
    return jax.device_put(leaf, NamedSharding(leaf.sharding.mesh, P())).addressable_data(0)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
