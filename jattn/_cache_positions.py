"""Counts positions within a cache that keeps its first tokens (``init_cache(first_tokens=...)``)."""

import math
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array

from jattn._core.call import softmax_dtype
from jattn.cache import KVCache


def positions_within(
    cache: KVCache,
    rotate: Callable[[Array, Array], Array],
    query: Array,
    key: Array,
    positions: Array,
    kv_positions: Array,
    scaled: bool,
) -> tuple[Array, Array]:
    """``query [B,T,N,H]`` and ``key [B,S,K,H]``, rotated so that first tokens are at most ``capacity - 1`` away.

    For the keys of first tokens, a query at position t is rotated by ``min(t, C-1)``; for other keys, it is rotated by
    t, counted from the first query's place in the cache, so that no angle grows with the length of the text. A single
    query has the same position for both. Multiple queries hold both rotations as 2H features, and each key has zeros in
    one half. Unless the scores are ``scaled`` by a number, the query is multiplied by the square root of 2 to match the
    default scale. ``positions``: ``[T]`` or ``[B,T]``, ``kv_positions``: ``[S]`` or ``[B,S]``, both in the text.
    ``cache``: the cache before the chunk.
    """
    farthest = cache.capacity - 1
    length = jnp.asarray(cache.length).astype(jnp.int32)
    passed = jnp.maximum(jnp.reshape(length, (-1, 1)) - farthest, 0)
    positions, kv_positions = (
        jnp.broadcast_to(x, x_of.shape[:2]) for x, x_of in ((positions, query), (kv_positions, key))
    )
    first = kv_positions < cache.first_tokens
    within = jnp.maximum(jnp.where(first, kv_positions, kv_positions - passed), 0)
    key = rotate(key, within)
    if query.shape[1] == 1:
        return rotate(query, jnp.maximum(positions - passed, 0)), key
    wide = query.astype(softmax_dtype(query))
    both = [jnp.maximum(positions - passed, 0), jnp.clip(positions, 0, farthest)]
    wide = jnp.concatenate([rotate(wide, at) for at in both], -1)
    query = (wide if scaled else wide * math.sqrt(2)).astype(query.dtype)
    first = first[..., None, None]
    return query, jnp.concatenate([jnp.where(first, 0, key), jnp.where(first, key, 0)], -1)
