"""Arrays ``[B,T,N,X]`` of bfloat16 that the kernels read and write in their memory layout, without copies.

XLA holds them in tiles of heads by 128 features, where a 32-bit word holds one feature of two heads. ``[B,T,N/2,2,X]``
has the same bytes. A block of this array belongs to a pair of heads, and the kernel reads or sets its head's half of
each word.
"""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jattn.kernels.pallas_tiles import Ref
from jattn.kernels.pallas_tpu.schedule import TILE

PAIR = 2  # heads per word
_TILED = 8  # heads per tile; 2 or 4 heads have smaller tiles


def fits(shape: tuple[int, ...], dtype: DTypeLike, rows: int) -> bool:
    """Whether ``[B,T,N,X]``, in blocks of ``rows`` of T, can be read in place.

    XLA prefers other axis orders if these tiles would hold padding, so a copy is then made in any case. Two tiles of
    128 features would have a different order from the pairs' tiles.
    """
    _, length, heads, features = shape
    whole = heads % _TILED == 0 or heads in (2, 4)
    return dtype == jnp.bfloat16 and features == TILE and heads > 0 and whole and length >= rows


def by_pair(shape: tuple[int, ...]) -> tuple[int, ...]:
    """``[B,T,N,X] -> [B,T,N/2,2,X]``."""
    return *shape[:2], shape[2] // PAIR, PAIR, shape[3]


def _words(ref: Ref) -> Ref:
    """A block ``[1,rows,1,2,X]`` as 32-bit words ``[rows,X]``, with the first head in the lower half."""
    return ref.bitcast(jnp.int32).reshape(ref.shape[1], ref.shape[4])


def read(ref: Ref, head: jax.Array, rest: jax.Array | None) -> jax.Array:
    """A head's part of a block, ``[rows,X]`` in float32; ``rest``: rows from this one on lie past the end and are 0."""
    x = _words(ref)[...]
    if rest is not None:
        x = jnp.where(jax.lax.broadcasted_iota(jnp.int32, x.shape, 0) < rest, x, jnp.int32(0))
    upper = jnp.left_shift(x, _distance(head)) & jnp.int32(-(2**16))  # a bfloat16 is the upper half of a float32
    return jax.lax.bitcast_convert_type(upper, jnp.float32)


def write(ref: Ref, head: int | jax.Array, x: jax.Array) -> None:
    """Sets a head's part of a block to ``x [rows,X]``."""
    rounded = jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
    words, distance = _words(ref), _distance(head)
    others = words[...] & jnp.left_shift(jnp.int32(2**16 - 1), distance)
    words[...] = jax.lax.shift_right_logical(rounded, jnp.broadcast_to(distance, x.shape)) | others


def _distance(head: int | jax.Array) -> jax.Array:
    """The number of bits from a head's half of a word to the upper half."""
    return jnp.int32(16) * (1 - (head & 1))
