"""Drops attention weights. Which weights are kept depends only on the key and on (b, h, q, kv).

They are therefore the same for every implementation and block size, and in the backward pass.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Int, UInt

from jattn._mods.pytree import pytree_dataclass, static_field


@pytree_dataclass
class Dropout:
    """Drops weights with probability ``rate``; with ``broadcast``, the same weights in all heads of all sequences."""

    rng: Array
    rate: float = static_field()
    broadcast: bool = static_field(default=False)


def dropout_seeds(dropout: Dropout, batch: ArrayLike, head: ArrayLike) -> UInt[Array, "2"]:
    """The two seeds of ``dropout_keep`` for one head, from any type of key."""
    words = jax.random.bits(dropout.rng, (2,), jnp.uint32)
    if dropout.broadcast:
        return words
    return _mix(_mix(words ^ _word(batch)) + _word(head))


def dropout_keep(
    seeds: UInt[Array, "2"], rate: float, q_idx: Int[Array, "T 1"], kv_idx: Int[Array, "1 S"]
) -> Bool[Array, "T S"]:
    """``True`` with probability ``1 - rate`` for each pair, as a function of ``(seeds, q, kv)``.

    Uses a hash of the indices rather than ``jax.random.bernoulli``, so that any block of the matrix can be drawn
    independently. Two words of state per row keep rows distinct (a collision needs 64 equal bits).
    """
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1], got {rate}")
    first, second = (_mix(seed ^ q_idx.astype(jnp.uint32)) for seed in (seeds[0], seeds[1]))
    bits = _mix(_mix(first ^ kv_idx.astype(jnp.uint32)) + second)
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1)) if rate < 1.0 else jnp.zeros(bits.shape, bool)


def drop(weights: Array, dropout: Dropout | None, indices: tuple) -> Array:
    """``weights`` (or their exponentials) divided by ``1 - rate`` where kept, 0 elsewhere."""
    if dropout is None:
        return weights
    kept = dropout_keep(dropout_seeds(dropout, *indices[:2]), dropout.rate, *indices[2:])
    factor = 1.0 / (1.0 - dropout.rate) if dropout.rate < 1.0 else 0.0  # at a rate of 1, no weight is kept
    return jnp.where(kept, weights * factor, 0.0)


def _word(index: ArrayLike) -> UInt[Array, ""]:
    return jnp.asarray(index).astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """A bijection on 32-bit words in which every input bit flips each output bit with probability near 1/2.

    Source: C. Wellons, "Prospecting for Hash Functions" (2018), the function named lowbias32.
    """
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))
