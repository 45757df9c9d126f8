"""Parts of arrays along one axis: a chunk of consecutive slots, or any slots."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


class Chunk(NamedTuple):
    """``size`` consecutive slots starting at ``first``, which may be traced."""

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


def slot_indices(slots: Slots) -> Int[Array, " slots"]:
    """The slots as an array."""
    return slots.first + jnp.arange(slots.size, dtype=jnp.int32) if isinstance(slots, Chunk) else slots
