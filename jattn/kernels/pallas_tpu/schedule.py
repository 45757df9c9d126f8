"""The blocks computed by the kernels of ``pallas_tpu``, their order, and their sizes."""

import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from jattn._mods.arrays import mod_semantics, namespace

TILE = 128  # queries and keys of a tile: the lanes of a register
WIDE_TILE = 256  # queries of a tile in forward and backward: the number of columns of a v6e's matrix unit
LARGE, SMALL = 1024, 512  # queries and keys of a block
_BITS, _LAST = 13, 13 + 13 + 2 + 1  # an entry: row, column, partial and full, first, last
MOST = 2**_BITS  # blocks along an axis


Table = Bool[Array | np.ndarray, "batch rows columns"]  # of blocks; one for all sequences if batch is 1


def block_sizes(T: int, S: int, largest: int = LARGE) -> tuple[int, int]:
    """Queries and keys per block: the fewest equal parts of at most ``largest`` per length, in multiples of 128."""
    parts = [-(-length // largest) for length in (T, S)]
    rows, columns = (-(-length // (count * TILE)) * TILE for length, count in zip((T, S), parts, strict=True))
    return rows, columns


def schedule(any_visible: Table, all_visible: Table, by_key: bool) -> Int32[Array | np.ndarray, "batch entries"]:
    """The blocks to compute, row by row (or column by column, ``by_key``), as ``split_entry`` reads them.

    Unlike ``jattn._blocks.block_lists.block_lists``, full and partial blocks are in one list. A row (or column) without
    blocks gets one entry that computes nothing, because its result has to be written. If the number of blocks is known
    only at run time, there is an entry for every block, and entries past the end do nothing.
    """
    xp = namespace(any_visible, all_visible)
    if by_key:
        any_visible, all_visible = any_visible.swapaxes(1, 2), all_visible.swapaxes(1, 2)
    sequences, rows, columns = any_visible.shape
    kind = xp.where(all_visible, 2, xp.where(any_visible, 1, 0)).reshape(sequences, -1)
    listed = any_visible | (~any_visible.any(2, keepdims=True) & (np.arange(columns) == 0)[None, None])
    listed = listed.reshape(sequences, -1)
    counts = listed.sum(1)
    entries = int(counts.max()) if xp is np else rows * columns
    order = xp.argsort(~listed, axis=1, stable=True)[:, :entries]
    real = np.arange(entries)[None] < counts[:, None]
    # Past the end, the last block is repeated, so that nothing new is read.
    order = xp.where(real, order, xp.take_along_axis(order, counts[:, None] - 1, 1))
    row, kind = order // columns, xp.where(real, xp.take_along_axis(kind, order, 1), 0)
    ends = xp.ones((sequences, 1), bool)
    changes = row[:, 1:] != row[:, :-1]
    first = real & xp.concatenate([ends, changes], 1)
    last = real & xp.concatenate([changes | ~real[:, 1:], ends], 1)
    with mod_semantics():
        packed = row | order % columns << _BITS | kind << 2 * _BITS | first * 2 ** (_LAST - 1) | last * 2**_LAST
    return packed.astype(np.int32)


def split_entry(entry: int | np.integer | Array, by_key: bool) -> tuple:
    """``(i, j, partial, full, first, last)``: the block, its kind, and whether it is the first or last in its row."""
    row, column = entry & (MOST - 1), (entry >> _BITS) & (MOST - 1)
    flags = ((entry >> shift) & 1 == 1 for shift in (2 * _BITS, 2 * _BITS + 1, _LAST - 1, _LAST))
    return *((column, row) if by_key else (row, column)), *flags
