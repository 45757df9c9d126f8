"""A cache of keys and values, so that decoding computes each token once: ``KVCache``, ``init_cache``, ``append``."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.experimental import checkify
from jaxtyping import Array, ArrayLike

from jattn.masks import Mask, Prefix, SlidingWindow
from jattn.mods import pytree_dataclass, static_field


@pytree_dataclass
class KVCache:
    """Keys ``[B,C,K,H]`` and values ``[B,C,K,D]`` of the tokens so far, in C slots; a pytree.

    ``length``: how many tokens have come, which is the position of the next; integers ``[B]``, or ``[]`` where it is
    the same for all. It keeps its dtype. The token at position p lies in slot p; with ``rolling`` in slot ``p mod C``,
    where it replaces the one C before it. What lies in other slots is never seen.
    """

    key: Any
    value: Any
    length: Any
    rolling: bool = static_field(default=False)

    @property
    def capacity(self) -> int:
        """C, the number of slots."""
        return self.key.shape[-3]

    @property
    def filled(self) -> Array:
        """How many slots hold a token, from slot 0 on: integers ``[B]``."""
        return jnp.minimum(jnp.broadcast_to(self._length, self.key.shape[:1]), self.capacity)

    @property
    def _length(self) -> Array:
        """``length`` as positions are: int32, whatever dtype it has and whether or not 64 bits are enabled."""
        return jnp.asarray(self.length).astype(jnp.int32)

    @property
    def slot_positions(self) -> Array | None:
        """The position of each slot's token, ``[B|1, C]``, negative before there was one; None: the slot itself."""
        if not self.rolling:
            return None
        last = jnp.reshape(self._length, (-1, 1)) - 1
        return last - (last - np.arange(self.capacity, dtype=np.int32)[None, :]) % self.capacity

    def next_positions(self, tokens: int, valid: ArrayLike | None = None) -> Array:
        """The positions of the next ``tokens`` tokens, ``[tokens]`` or ``[B,tokens]``; -1 where not ``valid``."""
        length = self._length[..., None]
        if valid is None:
            return length + np.arange(tokens, dtype=np.int32).reshape((1,) * (length.ndim - 1) + (tokens,))
        valid = _valid(valid, (self.key.shape[0], tokens))
        return jnp.where(valid, jnp.reshape(length, (-1, 1)) + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1, -1)


def init_cache(
    batch_size: int,
    capacity: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: Any = jnp.float32,
    rolling: bool = False,
) -> KVCache:
    """An empty cache for ``capacity`` tokens, each sequence with a length of its own.

    Args:
        batch_size, capacity, num_kv_heads, head_dim: B, C, K, H.
        value_dim: D; H by default.
        dtype: floating; tokens are cast to it.
        rolling: a window of the last ``capacity`` tokens, which is never full: older ones are forgotten.

    Raises:
        TypeError: ``dtype`` is not floating, and would cut what is cast to it.
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype of a cache must be floating, got {jnp.dtype(dtype)}, which would cut keys and values")
    slots = (batch_size, capacity, num_kv_heads)
    value_dim = head_dim if value_dim is None else value_dim
    return KVCache(
        key=jnp.zeros((*slots, head_dim), dtype),
        value=jnp.zeros((*slots, value_dim), dtype),
        length=jnp.zeros(batch_size, jnp.int32),
        rolling=rolling,
    )


def append(cache: KVCache, key: ArrayLike, value: ArrayLike, *, valid: ArrayLike | None = None) -> KVCache:
    """``cache`` with the tokens of a chunk behind those that are there. O(chunk) where the old cache is donated.

    Args:
        cache: as it was; stays as it is.
        key, value: ``[B,L,K,H]`` and ``[B,L,K,D]``, of any length L; cast to the cache's dtype.
        valid: bool ``[B,L]``: which tokens are real; the others (padding on either side) take no slot and no position.

    Raises:
        ValueError: shapes do not fit, or the tokens do not. Under ``jit``, where lengths are not known, the latter is
            an error of ``checkify`` (``jax.experimental.checkify.checkify`` shows it); unchecked, the last slot turns
            NaN, and with it every output that sees it.
    """
    key, value = (jnp.asarray(x).astype(old.dtype) for x, old in ((key, cache.key), (value, cache.value)))
    B, L = key.shape[:2]
    for name, x, old in (("key", key, cache.key), ("value", value, cache.value)):
        if x.ndim != 4 or x.shape[1] != L or x.shape[:1] + x.shape[2:] != old.shape[:1] + old.shape[2:]:
            wanted = [old.shape[0], "L", *old.shape[2:]]
            raise ValueError(
                f"append: {name} must be {wanted}, like the cache's {list(old.shape)}, got {list(x.shape)}"
            )
    if valid is None:
        positions, length = cache.next_positions(L), cache.length + L
    else:
        valid = _valid(valid, (B, L))
        count = valid.sum(axis=1, dtype=jnp.int32)
        positions, length = cache.next_positions(L, valid), cache.length + count.astype(jnp.result_type(cache.length))
    fits = None if cache.rolling else _fits(length, cache.capacity)
    if valid is None and jnp.ndim(cache.length) == 0 and not cache.rolling:
        key, value = (
            jax.lax.dynamic_update_slice_in_dim(old, x, cache._length, axis=1)
            for old, x in ((cache.key, key), (cache.value, value))
        )
    else:
        here = jnp.broadcast_to(positions, (B, L))
        first = jnp.reshape(length, (-1, 1)).astype(jnp.int32) - cache.capacity if cache.rolling else 0
        slots = jnp.where(  # what lies before the first is replaced within this chunk
            here >= jnp.maximum(first, 0), here % cache.capacity if cache.rolling else here, cache.capacity
        )
        rows = np.arange(B)[:, None]
        key, value = (old.at[rows, slots].set(x, mode="drop") for old, x in ((cache.key, key), (cache.value, value)))
    if fits is not None and cache.capacity:
        value = jnp.asarray(value)
        last = jnp.where(jnp.reshape(fits, (-1, 1, 1)), value[:, -1], jnp.nan)
        value = value.at[:, -1].set(last)
    return KVCache(key, value, length, cache.rolling)


def seen_of(cache: KVCache, appended: KVCache, key: Array, value: Array, positions: Array, mask: Any):
    """What a chunk's queries attend to: ``(key, value, options)``, options of ``dot_product_attention``.

    ``cache`` before and ``appended`` after the chunk ``key, value`` at ``positions`` has come.
    """
    if not cache.rolling:
        return appended.key, appended.value, {"mask": mask, "key_value_seq_lengths": appended.filled}
    if mask is not None and not callable(mask):
        raise ValueError("a mask array goes by slot, which a rolling cache does not keep: give a Mask or a function")
    # Positions are negative in slots without a token, and for padding; and the window is the cache's at most.
    held: Mask = ~Prefix(0) & SlidingWindow(cache.capacity - 1, np.iinfo(np.int32).max)
    options: dict[str, Any] = {"mask": held if mask is None else held & mask}
    if key.shape[1] == 1:
        return appended.key, appended.value, options | {"kv_positions": appended.slot_positions}
    # a chunk's last tokens push out what its first ones still see, so they are asked beside the cache as it was
    both = [jnp.concatenate([old, x.astype(old.dtype)], 1) for old, x in ((cache.key, key), (cache.value, value))]
    old_positions = cache.slot_positions
    assert old_positions is not None
    spread = [jnp.broadcast_to(x, (key.shape[0], x.shape[-1])) for x in (old_positions, positions)]
    return *both, options | {"kv_positions": jnp.concatenate(spread, axis=1)}


def from_flax(cached_key: Array, cached_value: Array, cache_index: Array, key: Array) -> KVCache:
    """Flax's three cache arrays, ``[..., C, K, H]``, ``[..., C, K, D]`` and ``[]``, as a cache of one batch axis.

    ``key`` ``[..., L, K, H]`` is that of the chunk that is to come. Raises ValueError where it does not fit.
    """
    if cached_key.shape[:-3] != key.shape[:-3] or cached_key.shape[-2:] != key.shape[-2:]:
        wanted = [*cached_key.shape[:-3], "tokens", *cached_key.shape[-2:]]
        raise ValueError(
            f"the autoregressive cache, of shape {list(cached_key.shape)}, takes keys of shape {wanted}, got "
            f"{list(key.shape)}; init_cache with the batch and the greatest length that are to come"
        )
    batch = math.prod(key.shape[:-3])
    key, value = (x.reshape(batch, *x.shape[-3:]) for x in (cached_key, cached_value))
    return KVCache(key, value, cache_index)


def to_flax(cache: KVCache, lead: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Flax's three cache arrays, with the batch axes ``lead``: the inverse of ``from_flax``."""
    key, value = (x.reshape(*lead, *x.shape[-3:]) for x in (cache.key, cache.value))
    return key, value, cache.length


def _fits(length: Any, capacity: int) -> Array:
    """Are the new lengths within the capacity? Raises where that is known."""
    if not isinstance(length, Tracer) and np.max(length, initial=0) > capacity:
        raise ValueError(
            f"append: {int(np.max(length))} tokens do not fit into a cache of {capacity}; make a larger one, or a "
            f"rolling one, which forgets"
        )
    fits = jnp.asarray(length) <= capacity
    checkify.debug_check(fits.all(), f"append: more tokens than fit into a cache of {capacity}")
    return fits


def _valid(valid: ArrayLike, shape: tuple[int, int]) -> Array:
    valid = jnp.asarray(valid)
    if valid.shape != shape or valid.dtype != bool:
        raise ValueError(f"valid must be bools [B, L] = {list(shape)}, got {valid.dtype} of shape {list(valid.shape)}")
    return valid
