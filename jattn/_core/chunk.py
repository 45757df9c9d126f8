"""Parts of arrays along one axis: a chunk of consecutive slots, or any slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class Chunk(NamedTuple):
    """``size`` consecutive slots from ``first`` on, which may be traced."""

    first: int | Int[Array, ""]
    size: int


Slots = Chunk | Int[Array, " slots"]


def take(x: Array | np.ndarray, slots: Slots, axis: int) -> Array | np.ndarray:
    """``x`` at ``slots`` along ``axis``; ``x`` itself if a chunk is the whole axis."""
    if not isinstance(slots, Chunk):
        return jnp.asarray(x)[(slice(None),) * axis + (slots,)]
    if x.shape[axis] == slots.size:
        return x
    return jax.lax.dynamic_slice_in_dim(jnp.asarray(x), slots.first, slots.size, axis)


def take_pairs(
    x: Array | np.ndarray | None, *, rows: Slots | None = None, columns: Slots | None = None, heads: Chunk | None = None
) -> Array | np.ndarray | None:
    """A bias or mask ``[B|1, N|1, T|1, S|1]`` at some rows, columns and heads; an axis of size 1 stays as it is."""
    for axis, slots in ((1, heads), (2, rows), (3, columns)):
        if x is not None and slots is not None and x.shape[axis] != 1:
            x = take(x, slots, axis)
    return x


def slot_indices(slots: Slots) -> Int[Array, " slots"]:
    """The slots as an array."""
    return slots.first + jnp.arange(slots.size, dtype=jnp.int32) if isinstance(slots, Chunk) else slots
