"""Attention sinks: each head's score for attending to nothing, which has no value.

A sink is included in the softmax's denominator and the lse. ``merge`` joins it to the result as one more part of the
keys, with an output of 0 and the sink as its lse. Kernels therefore need not support sinks, whose gradient comes from
``merge``.
"""

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from jattn._core.merge import merge
from jattn._mods.arrays import Length
from jattn._mods.validation import as_array, check_array


def check_sinks(sinks: ArrayLike, num_heads: Length) -> Array:
    """The argument ``sinks`` as an array ``[N]``."""
    array = jnp.asarray(as_array("sinks", sinks))
    check_array("sinks", array, f"floats [N] = {[num_heads]}", jnp.floating, (num_heads,))
    return array


def add_sinks(out: Array, lse: Array, sinks: ArrayLike | None) -> tuple[Array, Array]:
    """``out [B,T,N,D]`` and ``lse [B,T,N]`` with ``sinks [N]`` in the denominator; None adds none."""
    if sinks is None:
        return out, lse
    sinks = check_sinks(sinks, lse.shape[2]).astype(lse.dtype)
    return merge(out, lse, jnp.zeros_like(out), jnp.broadcast_to(sinks.reshape(1, 1, -1), lse.shape))


def share_of_keys(lse: Array, sinks: ArrayLike) -> Array:
    """The share of each query's weights left by ``sinks [N]``, ``[B,T,N]``."""
    ones = jnp.ones((*lse.shape, 1), lse.dtype)  # an output of 1 becomes the keys' share
    return add_sinks(ones, lse, sinks)[0][..., 0]
