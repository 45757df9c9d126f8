"""Looks up entries of tables by position, inside masks: single entries, and summaries of whole blocks.

Results are NumPy arrays if everything is static, so that a static mask stays static, and JAX arrays otherwise.
Intervals of positions are arrays that broadcast, so one call covers a grid of blocks. They may extend beyond the table.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jattn._mods.arrays import AnyArray, Index, Length, cdiv, namespace, pad_end

PART = 512  # ids per part; the minimum and maximum of each part are computed once for all intervals


def look_up(table: AnyArray, *indices: Index) -> tuple[AnyArray, AnyArray]:
    """``table[indices]``, and whether the indices lie inside the table; outside, the value is the nearest entry's."""
    xp = namespace(table, *indices)
    known, clipped = np.True_, []
    for index, size in zip(indices, table.shape, strict=True):
        if size == 0:
            return xp.zeros(np.broadcast_shapes(*(np.shape(index) for index in indices)), table.dtype), np.False_
        known = known & (index >= 0) & (index < size)
        clipped.append(xp.clip(index, 0, size - 1))
    return xp.asarray(table)[tuple(clipped)], known


def look_up_row(table: AnyArray, b: Index, index: Index) -> tuple[AnyArray, AnyArray]:
    """``look_up`` in a table ``[length]`` or ``[B, length]``; if B is 1, all sequences share the table."""
    if table.ndim == 2 and table.shape[0] == 1:
        table = table[0]
    return look_up(table, index) if table.ndim == 1 else look_up(table, b, index)


def ranks(ids: AnyArray) -> jax.Array:
    """int32 numbers shaped like ``ids [B, length]``, equal where a row's ids are equal, for 32-bit kernels."""
    return jax.vmap(lambda row: jnp.searchsorted(jnp.sort(row), row))(jnp.asarray(ids)).astype(jnp.int32)


def shared(table: AnyArray, b: Index, h: Index) -> tuple[Index, Index]:
    """Batch and head indices into a 4-D table; axes of size 1 are shared by all."""
    xp = namespace(b, h)  # not ``b * 0``: the result must not even formally depend on b
    return (b if table.shape[0] != 1 else xp.zeros_like(b)), (h if table.shape[1] != 1 else xp.zeros_like(h))


def range_in_row(ids: AnyArray, b: Index, low: Index, high: Index) -> tuple[AnyArray, AnyArray, AnyArray]:
    """The minimum and maximum id at positions ``low..high``, and whether all of these positions lie in the table.

    If none do, the minimum is the largest integer and the maximum the smallest: an interval that overlaps no other.
    Takes O(length + blocks * (PART + length / PART)): an interval consists of whole parts of the row and two ends.
    """
    xp = namespace(ids, b, low, high)
    ids = xp.asarray(ids)  # with jax.numpy's integer width, for iinfo below
    low, high, b = (xp.asarray(x)[..., None] for x in (low, high, b))
    size, info = ids.shape[-1], jnp.iinfo(ids.dtype)
    part = max(min(PART, size), 1) if isinstance(size, int) else PART
    start, end = _within(low, high, size)
    # The head, the tail, and the whole parts between them; together they cover every position.
    count = cdiv(size, part)
    head, tail, between = start + xp.arange(part), end - 1 - xp.arange(part), xp.arange(count)
    extremes = []
    for reduce, of_none in ((xp.min, info.max), (xp.max, info.min)):
        none = np.array(of_none, ids.dtype)  # a Python number would get JAX's default type, which may be too narrow
        parts = pad_end(ids, (*ids.shape[:-1], count * part), none).reshape(*ids.shape[:-1], count, part)
        pieces = [(ids, head, head < end)]
        if not isinstance(size, int) or size > part:
            pieces += [
                (ids, tail, tail >= start),
                (reduce(parts, axis=-1), between, (between * part >= start) & ((between + 1) * part <= end)),
            ]
        per_piece = []
        for table, index, inside in pieces:
            row, known = look_up_row(table, b, index)
            per_piece.append(reduce(xp.where(inside & known, row, none), axis=-1, initial=none))
        extremes.append(reduce(xp.stack(per_piece), axis=0))
    whole = (low >= 0) & (high < size)
    if ids.ndim == 2 and ids.shape[0] != 1:
        whole = whole & (b >= 0) & (b < ids.shape[0])
    return *extremes, whole[..., 0]


def count_pairs(
    table: AnyArray, b: Index, h: Index, q_low: Index, q_high: Index, kv_low: Index, kv_high: Index
) -> tuple[AnyArray, AnyArray, AnyArray]:
    """The number of true entries of the bool ``table[b, h]`` in ``q_low..q_high`` by ``kv_low..kv_high``.

    Also returns the number of entries there, and whether all these indices lie in the table. An axis of size 1 is
    shared. Uses a summed-area table: over the stretches between interval ends if those are static, otherwise over all
    pairs.
    """
    T, S = table.shape[2:]
    rows, columns = _of_axis(q_low, q_high, T), _of_axis(kv_low, kv_high, S)
    whole = (rows[1] - rows[0]) * (columns[1] - columns[0])
    inside = np.True_
    for low, high, size in ((q_low, q_high, T), (kv_low, kv_high, S)):
        inside = inside & (np.True_ if size == 1 else (low >= 0) & (high < size))
    if namespace(table, *rows, *columns) is np:
        table, rows = _between_ends(table, 2, *rows)
        table, columns = _between_ends(table, 3, *columns)
    xp = namespace(table)
    # sums[..., i, j] counts the pairs with q < i and kv < j
    sums = xp.pad(xp.cumsum(xp.cumsum(table, axis=2, dtype=xp.int32), axis=3, dtype=xp.int32),
                  ((0, 0), (0, 0), (1, 0), (1, 0)))  # fmt: skip
    (top, bottom), (left, right) = rows, columns
    b, h = shared(table, b, h)
    total, known = look_up(sums, b, h, bottom, right)  # known: b and h lie in the table
    above, before, both = (look_up(sums, b, h, *corner)[0] for corner in ((top, right), (bottom, left), (top, left)))
    return (total - above - before + both) * known, whole, inside & known


def _between_ends(table: AnyArray, axis: int, start: Index, end: Index) -> tuple[AnyArray, tuple[AnyArray, AnyArray]]:
    """``table`` summed over the stretches of ``axis`` between interval ends, and the intervals in these units."""
    cuts = np.unique(np.concatenate([[0], np.ravel(start), np.ravel(end)]))
    cuts = cuts[cuts < table.shape[axis]]
    if cuts.size:
        table = np.stack([part.sum(axis, dtype=np.int32) for part in np.split(table, cuts[1:], axis)], axis)
    return table, (np.searchsorted(cuts, start), np.searchsorted(cuts, end))


def _of_axis(low: Index, high: Index, size: Length) -> tuple[Index, Index]:
    return (low * 0, low * 0 + 1) if size == 1 else _within(low, high, size)


def _within(low: Index, high: Index, size: Length) -> tuple[AnyArray, AnyArray]:
    """The part of ``low..high`` within ``0..size``, as a half-open interval."""
    xp = namespace(low, high)
    start = xp.clip(low, 0, size)
    return start, xp.maximum(xp.clip(high, -1, size - 1) + 1, start)
