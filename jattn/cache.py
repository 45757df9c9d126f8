"""Holds the keys and values of earlier tokens for decoding: ``KVCache``, ``init_cache``, ``append``."""

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike

from jattn import _shares as shares
from jattn._core.call import Stack
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn._mods.validation import check_array
from jattn.masks import Mask, Prefix, SlidingWindow


@pytree_dataclass
class KVCache:
    """The KV cache: keys and values of the tokens so far, in C slots per sequence; a pytree.

    The token at position p is in slot p. In a ``rolling`` cache it is in slot ``p mod C`` and replaces the token C
    positions before it. Queries never see empty slots. ``flax.serialization`` saves and restores a cache once
    ``jattn.nnx`` or ``jattn.linen`` is imported.

    A scan over layers can carry a single cache for all layers: ``dataclasses.replace(cache, layer=i)``. A call then
    reads layer i, writes only its new tokens, and returns the cache for all layers. On CPUs, ``"native"`` (head dims
    that are multiples of 16) and ``"decode"`` read the layer in place, chunk by chunk: no layer is copied, and empty
    slots cost nothing.

    Attributes:
        key, value: ``[B,C,K,H]`` and ``[B,C,K,D]``, or ``[L,B,C,K,H]`` and ``[L,B,C,K,D]`` for all layers.
        length: the number of tokens so far, which is the position of the next token; 32- or 64-bit integers ``[B]``, or
            ``[]`` if shared. It keeps its dtype; ``rewind`` lowers it.
        rolling: new tokens replace the oldest, so the cache is never full.
        sharding: the ``NamedSharding`` of B, C and K over a mesh, or None (``init_cache``).
        layer: the index of the layer to use, traced or not; None if the cache holds one layer.
        first_tokens: F. A rolling cache keeps the first F tokens and the last C - F, and layers apply ``position`` to
            positions within the cache (``init_cache``).

    Example:
        >>> cache = jattn.init_cache(1, capacity=4, num_kv_heads=2, head_dim=8, rolling=True)
        >>> tokens = jnp.ones((1, 5, 2, 8))
        >>> cache = jattn.append(cache, tokens, tokens)
        >>> cache.capacity, cache.length.tolist(), cache.filled.tolist(), cache.overflowed.tolist()
        (4, [5], [4], [False])
        >>> cache.slot_positions.tolist(), cache.next_positions(2).tolist()  # token 4 has replaced token 0
        ([[4, 1, 2, 3]], [[5, 6]])
    """

    key: Any
    value: Any
    length: Any
    rolling: bool = static_field(default=False)
    sharding: NamedSharding | None = static_field(default=None)
    layer: Any = None
    first_tokens: int = static_field(default=0)

    @property
    def capacity(self) -> int:
        """C, the number of slots."""
        return self.key.shape[-3]

    @property
    def filled(self) -> Array:
        """The number of slots in use, counted from slot 0; integers ``[B]``."""
        return jnp.minimum(jnp.broadcast_to(self._length, self.key.shape[-4:-3]), self.capacity)

    @property
    def overflowed(self) -> Array:
        """Whether more tokens were appended than fit, or removed than were present; bool, shaped like ``length``.

        The outputs of such a sequence are NaN.
        """
        return self._length < 0 if self.rolling else self._length > self.capacity

    @property
    def _held(self) -> tuple[Any, Any]:
        """Keys and values ``[B,C,K,H]`` of the selected layer."""
        if self.layer is None:
            return self.key, self.value
        key, value = (jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False) for x in (self.key, self.value))
        return key, value

    @property
    def _length(self) -> Array:
        """``length`` as int32, like positions. A narrower integer would wrap around to a valid length."""
        length = jnp.asarray(self.length)
        if not jnp.issubdtype(length.dtype, jnp.integer) or length.dtype.itemsize < 4:
            raise TypeError(f"length of a cache must be integers of 32 or 64 bits, got {length.dtype}")
        return length.astype(jnp.int32)

    @property
    def _turn(self) -> int:
        """The number of slots used in rotation: all but the slots of the first tokens."""
        return self.capacity - self.first_tokens

    def _slots(self, positions: Array) -> Array:
        """The slots in which a rolling cache holds the tokens at these positions."""
        first = self.first_tokens
        if not first:
            return positions % self.capacity
        return jnp.where(positions < first, positions, first + (positions - first) % self._turn)

    @property
    def slot_positions(self) -> Array | None:
        """The position of each slot's token, ``[B|1, C]``, negative in empty slots; None if positions equal slots."""
        if not self.rolling:
            return None
        last, slots = jnp.reshape(self._length, (-1, 1)) - 1, np.arange(self.capacity, dtype=np.int32)[None, :]
        positions = last - (last - slots) % self._turn
        if not self.first_tokens:
            return positions
        first, empty = slots < self.first_tokens, slots > last
        return jnp.where(empty, -1, jnp.where(first, slots, positions))

    def next_positions(self, tokens: int, valid: ArrayLike | None = None) -> Array:
        """The positions of the next ``tokens`` tokens, ``[tokens]`` or ``[B,tokens]``.

        ``valid``: bool ``[B,tokens]``, which tokens are real; the others get -1. Tokens that do not fit get the
        position of the last slot, whose value is NaN, so even a sliding window shows the overflow.
        """
        length, last = self._length[..., None], np.iinfo(np.int32).max if self.rolling else self.capacity - 1
        if valid is None:
            following = np.arange(tokens, dtype=np.int32).reshape((1,) * (length.ndim - 1) + (tokens,))
            return jnp.minimum(length + following, last)
        valid = _valid(valid, (self.key.shape[-4], tokens))
        positions = jnp.reshape(length, (-1, 1)) + jnp.cumsum(valid, axis=1, dtype=jnp.int32) - 1
        return jnp.where(valid, jnp.minimum(positions, last), -1)

    def rewind(self, tokens: ArrayLike) -> "KVCache":
        """A cache without the last ``tokens``, such as those rejected in speculative decoding.

        A rolling cache has lost the tokens replaced by the removed ones, and queries that would see the lost tokens get
        NaN. Choose a capacity of at least the ``SlidingWindow``'s ``left`` plus the largest drop of ``length`` below
        its maximum so far. Takes O(1) time, or O(capacity) in a rolling cache, which marks the lost slots.

        Args:
            tokens: integers ``[B]``, or one for all sequences.

        Raises:
            ValueError: ``tokens`` are not such integers, or the cache holds fewer tokens. Under ``jit``, where the
                numbers are unknown, no error is raised: the sequence counts as ``overflowed`` and its outputs stay NaN.

        Example:
            >>> tokens = jnp.ones((1, 5, 2, 8))
            >>> cache = jattn.append(jattn.init_cache(1, 8, num_kv_heads=2, head_dim=8), tokens, tokens)
            >>> cache.rewind(2).length.tolist()
            [3]
        """
        tokens, length = jnp.asarray(tokens), self._length
        check_array("tokens", tokens, "integers [] or [B]", jnp.integer, (), self.key.shape[-4:-3])
        kept = jnp.where(length > self.capacity, self._turn, length) if self.rolling else length
        held = (tokens >= 0) & (tokens <= kept)
        if not isinstance(held, Tracer) and not held.all():
            raise ValueError(
                f"rewind: tokens must be from 0 to the {kept.tolist()} that the cache holds, got {tokens.tolist()}"
            )
        overflow = np.iinfo(np.int32).min // 2 if self.rolling else self.capacity + 1
        length = jnp.where(held, length - tokens.astype(jnp.int32), overflow)
        rewound = dataclasses.replace(self, length=length.astype(jnp.result_type(self.length)))
        if (positions := self.slot_positions) is None:
            return rewound
        # By position, these slots now stand for tokens they no longer hold.
        lost = positions >= jnp.reshape(length, (-1, 1))
        lost = jnp.reshape(lost, (1,) * (self.key.ndim - 4) + (*lost.shape, 1, 1))
        key, value = (jnp.where(lost, jnp.nan, x) for x in (self.key, self.value))
        return dataclasses.replace(rewound, key=key, value=value)


def init_cache(
    batch_size: int,
    capacity: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    value_dim: int | None = None,
    dtype: Any = jnp.float32,
    rolling: bool = False,
    first_tokens: int = 0,
    sharding: NamedSharding | None = None,
) -> KVCache:
    """An empty cache for ``capacity`` tokens per sequence; sequences may have different lengths.

    Args:
        batch_size: B, the number of sequences.
        capacity: C, the number of tokens that fit.
        num_kv_heads: K, the number of key/value heads.
        head_dim: H, of the keys.
        value_dim: D, of the values; H by default.
        dtype: a floating dtype, to which tokens are cast.
        rolling: keep the last ``capacity`` tokens and drop older ones; a rolling cache is never full.
        first_tokens: F. A rolling cache keeps the first F tokens and the last ``capacity - F``, so that a model that
            attends to its first tokens can generate without end (StreamingLLM, https://arxiv.org/abs/2309.17453). The
            cache holds keys before ``position``, which must be a ``Rotary``, is applied. Layers apply it with positions
            counted within the cache: the distance to a first token is at most ``capacity - 1``, and all other distances
            are as in the text. Masks and score functions see positions in the text. Each call rotates a copy of the C
            keys; a call with several tokens computes scores with twice the head dim.
        sharding: the mesh axes over which B, C and K are sharded, such as ``NamedSharding(mesh, PartitionSpec(None,
            "sequence"))``. Each device then holds its share of the slots. ``append`` writes in place and layers attend
            in place (``jattn.sharding.SplitKeys``), so no device ever holds the whole cache.

    Raises:
        TypeError: ``dtype`` is not floating; ``sharding`` is not a ``NamedSharding`` of a mesh of devices.
        ValueError: ``sharding`` names an axis for head_dim, or B, C or K is not a multiple of its number of devices;
            ``first_tokens`` is not less than ``capacity``, or is given for a cache that is not rolling or is sharded.

    Example:
        >>> cache = jattn.init_cache(1, capacity=4, num_kv_heads=2, head_dim=8, dtype=jnp.bfloat16)
        >>> cache.key.shape, cache.key.dtype.name, cache.length.tolist()
        ((1, 4, 2, 8), 'bfloat16', [0])
        >>> mesh = jax.make_mesh((jax.device_count(),), ("sequence",))
        >>> shares = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "sequence"))
        >>> cache = jattn.init_cache(1, 64, num_kv_heads=2, head_dim=8, sharding=shares)
        >>> cache.key.addressable_shards[0].data.shape[1] == 64 // jax.device_count()
        True
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype of a cache must be floating, got {jnp.dtype(dtype)}, which truncates keys and values")
    first_tokens = operator.index(first_tokens)
    if first_tokens and (not rolling or sharding is not None or not 0 < first_tokens < capacity):
        raise ValueError(
            f"first_tokens must be from 0 to capacity - 1 = {capacity - 1}, and needs rolling=True and sharding=None, "
            f"got first_tokens={first_tokens}, rolling={rolling}, sharding={sharding}"
        )
    slots = (batch_size, capacity, num_kv_heads)
    shapes = (*slots, head_dim), (*slots, head_dim if value_dim is None else value_dim)
    everywhere = None
    if sharding is not None:
        shares.check_sharding(sharding, *slots)
        everywhere = NamedSharding(sharding.mesh, PartitionSpec())
    key, value = (shares.zeros(shape, dtype, sharding) for shape in shapes)
    length = shares.zeros((batch_size,), jnp.int32, everywhere)
    return KVCache(key, value, length, rolling, sharding, first_tokens=first_tokens)


def append(cache: KVCache, key: ArrayLike, value: ArrayLike, *, valid: ArrayLike | None = None) -> KVCache:
    """A new cache with the tokens of a chunk appended. Takes O(L) time if the old cache is donated.

    Args:
        cache: the old cache, which is unchanged.
        key, value: ``[B,L,K,H]`` and ``[B,L,K,D]``, of any length L; cast to the cache's dtype.
        valid: bool ``[B,L]``: which tokens are real. The others (padding on either side) take no slot or position.

    Raises:
        ValueError: shapes do not match, ``cache.layer`` does not exist, or the tokens exceed the capacity. Under
            ``jit``, where the length is unknown, no error is raised: the chunk's values and the last slot become NaN,
            all later layer outputs for this sequence are NaN, and the result's ``overflowed`` is True.
        TypeError: ``cache.length`` does not hold integers of at least 32 bits.

    Example:
        >>> tokens = jnp.ones((2, 3, 2, 8))  # two sequences; the second has two real tokens
        >>> valid = np.array([[True, True, True], [True, True, False]])
        >>> cache = jattn.append(jattn.init_cache(2, 4, 2, 8), tokens, tokens, valid=valid)
        >>> cache.length.tolist(), cache.key[:, :, 0, 0].tolist()
        ([3, 2], [[1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    """
    return append_chunk(cache, key, value, valid)


def append_chunk(
    cache: KVCache, key: ArrayLike, value: ArrayLike, valid: ArrayLike | None, sharded: bool = False
) -> KVCache:
    """``append``; ``sharded``: the chunk's tokens are sharded like the cache's slots, if L is divisible."""
    _check_layer(cache)
    if cache.layer is not None and (cache.sharding is not None or (cache.rolling and jnp.shape(key)[1] > 1)):
        # A chunk of a rolling cache attends to tokens that it replaces, so a layer is copied before its slots are
        # written.
        one = dataclasses.replace(cache, **dict(zip(("key", "value"), cache._held, strict=True)), layer=None)
        one = append_chunk(one, key, value, valid, sharded)
        pairs = (cache.key, one.key), (cache.value, one.value)
        key, value = (jax.lax.dynamic_update_index_in_dim(old, x, cache.layer, 0) for old, x in pairs)
        return dataclasses.replace(cache, key=key, value=value, length=one.length)
    key, value = (jnp.asarray(x).astype(old.dtype) for x, old in ((key, cache.key), (value, cache.value)))
    B, L = key.shape[:2]
    for name, x, old in (("key", key, cache.key), ("value", value, cache.value)):
        wanted = [old.shape[-4], "L", *old.shape[-2:]]
        if x.ndim != 4 or [*x.shape[:1], "L", *x.shape[2:]] != wanted or x.shape[1] != L:
            raise ValueError(
                f"append: {name} must be {wanted}, like the cache's {list(old.shape)}, got {list(x.shape)}"
            )
    if valid is None:
        positions, length = cache.next_positions(L), cache.length + L
    else:
        valid = _valid(valid, (B, L))
        count = valid.sum(axis=1, dtype=jnp.int32)
        positions, length = cache.next_positions(L, valid), cache.length + count.astype(jnp.result_type(cache.length))
    if not cache.rolling:
        fits = jnp.reshape(within_capacity(length, cache.capacity), (-1, 1, 1, 1))
        value = jnp.where(fits, value, jnp.nan)
    # The sequences of all layers, of which this layer's sequences are a slice.
    chunk, both = (key, value), (cache.key, cache.value)
    held = tuple(jnp.reshape(old, (math.prod(old.shape[:-3]), *old.shape[-3:])) for old in both)
    in_a_row, row = valid is None and not cache.rolling, 0 if cache.layer is None else cache.layer * B
    if in_a_row and cache.sharding is not None:
        # The first token that does not fit goes to the last slot.
        first = jnp.reshape(jnp.minimum(cache._length, cache.capacity - 1), (-1, 1))
        slots = first + np.arange(L, dtype=np.int32)[None]
        key, value = shares.put(cache.sharding, sharded, True, held, chunk, slots)
    # One slice instead of a scatter by rows, as a longer chunk would need.
    elif in_a_row and jnp.size(cache.length) == 1 and L <= cache.capacity:
        first = jnp.reshape(cache._length, ())
        key, value = (jax.lax.dynamic_update_slice(old, x, _at(row, first)) for old, x in zip(held, chunk, strict=True))
    else:
        positions = jnp.broadcast_to(positions, (B, L))
        oldest = jnp.reshape(length, (-1, 1)).astype(jnp.int32) - cache._turn if cache.rolling else 0
        slots = cache._slots(positions) if cache.rolling else positions
        # Tokens before the oldest are replaced within this chunk.
        stays = positions >= jnp.maximum(oldest, 0)
        if cache.first_tokens:
            stays |= (positions >= 0) & (positions < cache.first_tokens)
        slots = jnp.where(stays, slots, cache.capacity)
        rows = row + np.arange(B)[:, None]
        if cache.sharding is not None:
            key, value = shares.put(cache.sharding, sharded, False, held, chunk, slots)
        elif (B, L) == (1, 1):  # XLA turns a one-token scatter into a select between whole arrays
            key, value = (_put_one(old, x, row, slots[0, 0]) for old, x in zip(held, chunk, strict=True))
        else:
            key, value = (old.at[rows, slots].set(x, mode="drop") for old, x in zip(held, chunk, strict=True))
    key, value = (jnp.reshape(x, old.shape) for x, old in zip((key, value), both, strict=True))
    return dataclasses.replace(cache, key=key, value=value, length=length)


def _check_layer(cache: KVCache) -> None:
    """Raises ValueError unless keys are ``[B,C,K,H]``, or ``[L,B,C,K,H]`` with a layer index."""
    shape, layer = list(cache.key.shape), cache.layer
    if layer is None and len(shape) != 4:
        hint = "; a cache of all layers needs layer=, the index of this one" if len(shape) == 5 else ""
        raise ValueError(f"cache must hold keys [B, C, K, H], got {shape}{hint}")
    if layer is not None and len(shape) != 5:
        raise ValueError(f"cache with layer= must hold keys of all layers, [L, B, C, K, H], got {shape}")
    if layer is not None and not isinstance(layer, Tracer) and not 0 <= layer < shape[0]:
        raise ValueError(f"layer of a cache must be from 0 to {shape[0] - 1}, as it holds {shape[0]}, got {layer}")


def _at(row: Any, slot: Array) -> list[Array]:
    """The start indices of a cache slice."""
    return [jnp.asarray(x, jnp.int32) for x in (row, slot, 0, 0)]


def _put_one(held: Array, x: Array, row: Any, slot: Array) -> Array:
    """``held`` with ``x [1,1,K,H]`` in a slot; unchanged if the slot does not exist."""
    last = held.shape[1] - 1
    at = _at(row, jnp.minimum(slot, last))
    x = jnp.where(slot <= last, x, jax.lax.dynamic_slice(held, at, x.shape))
    return jax.lax.dynamic_update_slice(held, x, at)


def visible_keys(
    cache: KVCache, appended: KVCache, key: Array, value: Array, positions: Array, mask: Any, bias: Any = None
):
    """The keys and values attended to by a chunk's queries: ``(key, value, options)``, for ``dot_product_attention``.

    ``cache`` and ``appended`` are the cache before and after the chunk ``key, value`` at ``positions``.
    """
    if not cache.rolling:
        return *appended._held, {"mask": mask, "key_value_seq_lengths": appended.filled}
    if mask is not None and not callable(mask):
        raise ValueError("a mask array is indexed by slot, but a rolling cache reuses slots; pass a Mask or a function")
    # Empty slots and padding have negative positions. The window is at most the capacity.
    window: Mask = SlidingWindow(cache._turn - 1, np.iinfo(np.int32).max)
    window = ~Prefix(0) & (window | Prefix(cache.first_tokens) if cache.first_tokens else window)
    options: dict[str, Any] = {"mask": window if mask is None else window & mask}
    if key.shape[1] == 1:
        return *appended._held, options | {"kv_positions": appended.slot_positions}
    # A chunk's last tokens replace keys that its first tokens still see, so attend to the old cache and the chunk.
    old_positions = cache.slot_positions
    assert old_positions is not None
    pairs = [(old, x.astype(old.dtype)) for old, x in zip(cache._held, (key, value), strict=True)]
    spread = [jnp.broadcast_to(x, (key.shape[0], x.shape[-1])) for x in (old_positions, positions)]
    if cache.sharding is None:
        *both, kv_positions = (jnp.concatenate(pair, 1) for pair in (*pairs, spread))
        return *both, options | {"kv_positions": kv_positions}
    if bias is not None and jnp.shape(bias)[-1:] not in ((), (1,)):
        raise ValueError(
            f"bias of shape {list(jnp.shape(bias))} is indexed by slot, but a sharded rolling cache does not keep the "
            f"tokens of a chunk in the order of slots; pass a score_mod, which sees positions"
        )
    both = [shares.join(cache.sharding, *pair) for pair in pairs]
    return *both, options | {"kv_positions": shares.join(cache.sharding, *spread, fill=-1)}


def stack_of(cache: KVCache, key: Array) -> Stack | None:
    """The arrays of all layers, if ``key [B,S,K,H]`` from ``visible_keys`` is one of their layers on this device.

    With first tokens, the visible keys are rotated copies.
    """
    if cache.layer is None or cache.sharding is not None or cache.key.shape[1:] != key.shape or cache.first_tokens:
        return None
    if not cache.key.dtype == cache.value.dtype == key.dtype:  # a cast already makes a copy
        return None
    layer = jnp.asarray(cache.layer, jnp.int32)  # a Python number would be compiled for each layer
    return Stack(cache.key, cache.value, jnp.where(layer < 0, layer + len(cache.key), layer))


def from_flax(cached_key: Array, cached_value: Array, cache_index: Array, key: Array) -> KVCache:
    """Flax's three cache arrays, ``[..., C, K, H]``, ``[..., C, K, D]`` and ``[]``, as a cache with one batch axis.

    ``key [..., L, K, H]`` belongs to the next chunk. Raises ValueError if it does not match.
    """
    if cached_key.shape[:-3] != key.shape[:-3] or cached_key.shape[-2:] != key.shape[-2:]:
        wanted = [*cached_key.shape[:-3], "tokens", *cached_key.shape[-2:]]
        raise ValueError(
            f"the autoregressive cache, of shape {list(cached_key.shape)}, takes keys of shape {wanted}, got "
            f"{list(key.shape)}; call init_cache with the batch and the maximum length"
        )
    batch = math.prod(key.shape[:-3])
    key, value = (x.reshape(batch, *x.shape[-3:]) for x in (cached_key, cached_value))
    return KVCache(key, value, cache_index)


def to_flax(cache: KVCache, lead: tuple[int, ...]) -> tuple[Array, Array, Array]:
    """Flax's three cache arrays, with batch axes ``lead``: the inverse of ``from_flax``."""
    key, value = (x.reshape(*lead, *x.shape[-3:]) for x in (cache.key, cache.value))
    return key, value, cache.length


def nan_if_overflowed(cache: KVCache, x: Array) -> Array:
    """``x [B, ...]``, with NaN for sequences that no longer fit in the cache, regardless of masks."""
    return jnp.where(jnp.reshape(cache.overflowed, (-1,) + (1,) * (x.ndim - 1)), jnp.nan, x)


def within_capacity(length: Any, capacity: int) -> Array:
    """Whether the new lengths are within the capacity; raises if they are known to exceed it."""
    if not isinstance(length, Tracer) and np.max(length, initial=0) > capacity:
        raise ValueError(
            f"append: {int(np.max(length))} tokens do not fit into a cache of {capacity}; use a larger capacity or "
            f"rolling=True, or pass no keys (key[:, :0]) to attend to stored ones"
        )
    return jnp.asarray(length) <= capacity


def _valid(valid: ArrayLike, shape: tuple[int, int]) -> Array:
    valid = jnp.asarray(valid)
    check_array("valid", valid, f"bools [B, L] = {list(shape)}", np.bool_, shape)
    return valid
