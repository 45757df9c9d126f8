"""Infers each token's place in its own sequence, and which tokens are padding, from the masks of a call."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from jattn._blocks.reduction import lowest_score
from jattn._core.call import Call
from jattn._core.shard import explicit_axes
from jattn._mods.arrays import AnyArray, Bools, namespace
from jattn._mods.lookup import look_up_row
from jattn._mods.mask import conjuncts
from jattn.masks import Dense, MaskFunction, Padding, Segments


class Places(NamedTuple):
    """The place of each slot's token in its own sequence, counted from 0.

    query, key: int32 ``[B|1,T]`` and ``[B|1,S]``.
    previous: int32 ``[B|1,S]``: the token before each key in its sequence; -1 for none.
    real: bool ``[B|1,T]``: which queries are not padding.
    """

    query: AnyArray
    key: AnyArray
    previous: AnyArray
    real: Bools


def find_places(call: Call, q_slots: AnyArray, kv_slots: AnyArray) -> Places:
    """The places of a call's tokens; ``q_slots [T]`` and ``kv_slots [S]``: the token in each slot.

    With ``Segments``, the tokens of each id are counted. Otherwise positions, if given, are the places; if not, tokens
    are counted from the first that is not padding. If T = S, padding is whatever ``Padding``, ``Dense``, mask and bias
    arrays and key lengths, joined by ``&`` alone, hide at either end of a sequence.
    """
    at_query, at_key = call.query_positions, call.kv_positions
    parts = [part for mask in call.masks for part in conjuncts(mask)]
    shown = None
    if call.query.shape[1] == call.key.shape[1] and (at_query is None) == (at_key is None):
        shown = _shown(call, parts if at_key is None else (), kv_slots)
    real: Bools = np.ones((1, 1), bool) if shown is None else shown[:, q_slots]
    ids = [(x.query_ids, x.query_ids if x.kv_ids is None else x.kv_ids) for x in parts if isinstance(x, Segments)]
    query, key = (slots[None] if at is None else at for at, slots in ((at_query, q_slots), (at_key, kv_slots)))
    previous = kv_slots[None] - 1
    if ids:
        ids += [(shown, shown)] if shown is not None and at_key is None else []
        (of_queries, _), (of_keys, before) = (_ranks([pair[side] for pair in ids]) for side in (0, 1))
        query, key = _at(of_queries, query), _at(of_keys, key)
        previous = previous if at_key is not None else before[:, kv_slots]
    elif shown is not None and at_key is None:
        first = (jnp.cumsum(shown, 1) == 0).sum(1, keepdims=True, dtype=jnp.int32)
        query, key = query - first, key - first
    return Places(query, key, namespace(key, previous).where(key > 0, previous, -1), real)


def _shown(call: Call, parts: Iterable[MaskFunction], slots: AnyArray) -> AnyArray | None:
    """Bool ``[B|1,S]``, by token: False for hidden keys at either end; None if there are none.

    If an array has one row per query, a token hidden from all by strict causality still counts, because it sees others.
    """
    by_slot = [*call.slot_masks, *([] if call.bias is None else [call.bias > lowest_score(call)])]
    by_token = [x.array[(None,) * (4 - x.array.ndim)] for x in parts if isinstance(x, Dense)]
    lengths = [x.lengths[:, None] for x in parts if isinstance(x, Padding)]
    T, order = call.query.shape[1], namespace(slots).argsort(slots)
    shown = [_of_pairs(x)[:, order] for x in by_slot if x.shape[3] != 1]
    shown += [_of_pairs(x) for x in by_token if x.shape[3] != 1]
    shown += [namespace(slots).arange(T)[None] < x for x in lengths]
    both = functools.reduce(operator.and_, shown, np.True_)
    if isinstance(both, np.ndarray | np.generic) and both.all():
        return None
    # Hidden keys between visible ones are not padding.
    both = _with_whole_axis(jnp.asarray(both), 1)
    return (jnp.cumsum(both, axis=1) > 0) & (jnp.cumsum(both[:, ::-1], axis=1)[:, ::-1] > 0)


def _of_pairs(visible: AnyArray) -> AnyArray:
    """``[B|1,N|1,T|1,S] -> [B|1,S]``: the tokens that any query sees, or that see any key."""
    seen = visible.any((1, 2))
    return seen if visible.shape[2] == 1 else seen | visible.any((1, 3))


def _ranks(ids: Sequence[AnyArray]) -> tuple[Array, Array]:
    """Int32 ``[B|1,length]``: the number of earlier entries with the same ids, and the index of the last, or -1."""
    length = min(x.shape[-1] for x in ids) if len(ids) > 1 else ids[0].shape[-1]
    rows = [_with_whole_axis(jnp.atleast_2d(jnp.asarray(x)), 1)[:, :length] for x in ids]
    rows = jnp.broadcast_arrays(*(x.astype(jnp.int32) if x.dtype == bool else x for x in rows))
    index = jax.lax.broadcasted_iota(jnp.int32, rows[0].shape, 1)
    *rows, order = jax.lax.sort((*rows, index), dimension=1, num_keys=len(rows) + 1)
    changes = [x[:, 1:] != x[:, :-1] for x in rows]
    new = jnp.concatenate([jnp.ones_like(index[:, :1], bool), functools.reduce(jnp.logical_or, changes)], 1)[:, :length]
    rank = index - jax.lax.cummax(jnp.where(new, index, 0), axis=1)
    before = jnp.where(new, -1, jnp.roll(order, 1, axis=1))
    put = jax.vmap(lambda order, x: jnp.zeros_like(x).at[order].set(x, unique_indices=True))
    return put(order, rank), put(order, before)


def _at(ranks: Array, positions: AnyArray) -> AnyArray:
    return look_up_row(ranks, np.arange(ranks.shape[0])[:, None], positions)[0]


def _with_whole_axis(x: Array, axis: int) -> Array:
    """``x``, with ``axis`` whole on every device if its type shows that it is sharded.

    On other meshes, XLA partitions the work by itself.
    """
    mesh, axes = explicit_axes(x)
    axis %= x.ndim
    if not axes[axis]:
        return x
    spec = (None if i == axis else names or None for i, names in enumerate(axes))
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*spec)))
