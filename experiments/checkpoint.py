"""Checkpoints of a run. The only file that knows Orbax."""

import logging
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1

# Orbax logs every save; a run has a progress bar.
logging.getLogger("absl").setLevel(logging.ERROR)

_KEPT = 2


class Checkpoints:
    """The checkpoints in one folder, newest two kept; a context manager.

    A checkpoint is there whole or not at all: Orbax writes beside and renames.
    """

    def __init__(self, folder: Path):
        policy = v1.training.preservation_policies.LatestN(_KEPT)
        self._orbax = v1.training.Checkpointer(
            folder.absolute(), preservation_policy=policy, cleanup_tmp_directories=True
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *error: object) -> None:
        self._orbax.close()

    @property
    def latest(self) -> int | None:
        """Step of the newest checkpoint, or None."""
        return None if self._orbax.latest is None else self._orbax.latest.step

    def save(self, step: int, state: Any) -> None:
        """Writes ``state``, a pytree of arrays, and returns when it stands."""
        self._orbax.save(step, state, force=True)

    def load(self, step: int, like: Any) -> Any:
        """The state saved at ``step``, with the structure, shapes and dtypes of ``like``."""

        def described(leaf: jax.Array) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)

        return self._orbax.load(step, jax.tree.map(described, like))
