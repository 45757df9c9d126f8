"""Shards the tables in a ring's masks along with the sequence: each device holds the part that its chunks need.

A ``Dense`` table becomes a mask array, and each device holds its own rows. The ids of ``Segments`` are split into the
ids of the device's queries and the ids of its keys, which rotate with the keys. Both require that positions are the
tokens' own and that the masks are joined to the others by ``&``; other tables are replicated on every device.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from jattn._core.call import AXES, Call
from jattn._core.chunk import Chunk, take
from jattn._mods.arrays import AnyArray, Index, Length
from jattn._mods.lookup import look_up_row
from jattn._mods.mask import conjuncts
from jattn._mods.pytree import pytree_dataclass
from jattn.masks import Dense, MaskFunction, Segments


@pytree_dataclass
class SegmentsAtHand(Segments):
    """``Segments`` for parts of the queries and keys that begin at these indices."""

    first_batch: Index = 0
    first_query: Index = 0
    first_key: Index = 0

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> tuple[Any, Any]:
        b, first, first_key = b - self.first_batch, self.first_query, self.first_key
        ids = Segments(self.query_ids, self.kv_ids)
        return ids.bounds(b, h, q_min - first, q_max - first, kv_min - first_key, kv_max - first_key)

    def _query_ids_at(self, b: Index, q_idx: Index):
        return look_up_row(self.query_ids, b - self.first_batch, q_idx - self.first_query)

    def _key_ids_at(self, b: Index, kv_idx: Index):
        return look_up_row(self._key_ids(), b - self.first_batch, kv_idx - self.first_key)


Turn = Callable[[AnyArray, int], AnyArray]  # ``turn(x, axis)``: ``x`` in the order of a ring's layout


def divide(call: Call, turn: Turn) -> tuple[Call, list[tuple[Array, str]]]:
    """The call without the masks that have divisible tables, and these tables with their axis letters.

    The call also lacks the mask arrays of the lengths, which ``RingPlan.part`` makes for the chunks that it takes.
    """
    T, S = call.query.shape[1], call.key.shape[1]
    call = dataclasses.replace(call, slot_masks=call.slot_masks[: call.has("slot_masks")])
    if call.query_positions is not None or call.kv_positions is not None:
        return call, []
    others: list[MaskFunction] = []
    arrays, tables = [], []
    for mask in (part for joined in call.masks for part in conjuncts(joined)):
        if isinstance(mask, Segments) and type(mask) is Segments and _lengths(mask) == (T, S):
            ids = [jnp.atleast_2d(jnp.asarray(x)) for x in (mask.query_ids, mask._key_ids())]
            tables += [(turn(x, 1), letters) for x, letters in zip(ids, ("bt", "bs"), strict=True)]
        elif isinstance(mask, Dense) and type(mask) is Dense and _covers(mask.array.shape, T, S):
            arrays.append(turn(turn(mask._table(), 2), 3))
        else:
            others.append(mask)
    return dataclasses.replace(call, masks=tuple(others), slot_masks=(*call.slot_masks, *arrays)), tables


def _lengths(mask: Segments) -> tuple[Length, Length]:
    return mask.query_ids.shape[-1], mask._key_ids().shape[-1]


def _covers(shape: tuple[Length, ...], T: Length, S: Length) -> bool:
    """Whether a table ``[..., T|1, S|1]`` has exactly one entry for each pair."""
    return shape[-2] in (1, T) and shape[-1] in (1, S)


def with_tables(part: Call, tables: Sequence[Array]) -> Call:
    """A device's part of the call, with masks for its parts of the tables."""
    pairs = zip(tables[::2], tables[1::2], strict=True)
    masks = (SegmentsAtHand(*ids, part.first_batch) for ids in pairs)
    return dataclasses.replace(part, masks=(*part.masks, *masks))


def rotating(call: Call) -> dict[str, Any]:
    """The items of a device's part that rotate: fields of the call, and the keys' ids."""
    fields = {name: getattr(call, name) for name, axes in AXES.items() if "s" in axes}
    ids = [mask.kv_ids for mask in call.masks if isinstance(mask, SegmentsAtHand)]
    return {name: x for name, x in fields.items() if x is not None} | {"kv_ids": ids}


def with_keys(call: Call, keys: dict[str, Any]) -> Call:
    """A device's part, with another device's items that have rotated to it, as returned by ``rotating``."""
    ids, fields = iter(keys["kv_ids"]), {name: x for name, x in keys.items() if name != "kv_ids"}
    masks = (
        dataclasses.replace(mask, kv_ids=next(ids)) if isinstance(mask, SegmentsAtHand) else mask for mask in call.masks
    )
    return dataclasses.replace(call, masks=tuple(masks), **fields)


def of_chunks(
    masks: Sequence[MaskFunction], rows: Chunk, columns: Chunk, first_query: Index, first_key: Index
) -> tuple:
    """The masks for a chunk of queries and a chunk of the current keys, which begin at these positions."""

    def of_one(mask: MaskFunction) -> MaskFunction:
        if not isinstance(mask, SegmentsAtHand):
            return mask
        query_ids, kv_ids = take(mask.query_ids, rows, 1), take(mask.kv_ids, columns, 1)
        return SegmentsAtHand(query_ids, kv_ids, mask.first_batch, first_query, first_key)

    return tuple(map(of_one, masks))
