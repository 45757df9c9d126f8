"""The blocks computed by the kernels of ``pallas_gpu``, and their order."""

import numpy as np
from jax import Array
from jaxtyping import Bool, Int32

from jattn._mods.arrays import cdiv, namespace, pad_end

ROWS = 64  # of a warpgroup, as computed by one wgmma
Table = Bool[Array | np.ndarray, "batch rows columns"]  # of blocks; one for all sequences if batch is 1
Lists = tuple[Int32[Array | np.ndarray, "batch lists most"], Int32[Array | np.ndarray, "batch lists"]]


def row_lists(any_visible: Table, all_visible: Table, by_key: bool, num_splits: int = 1) -> Lists:
    """The blocks of each row, int32 ``[B|1, rows, most]``, full blocks first, and their number ``[B|1, rows]``.

    An entry is twice the block's column, plus 1 unless the block is full. A row without blocks gets one nonfull block.
    ``num_splits``: distributes each row's list over this many rows, at most one per column. Unlike
    ``jattn._blocks.block_lists.block_lists``, a row's full and partial blocks are in one list, read by one program.
    """
    xp = namespace(any_visible, all_visible)
    if by_key:
        any_visible, all_visible = any_visible.swapaxes(1, 2), all_visible.swapaxes(1, 2)
    rank = xp.where(all_visible, 0, xp.where(any_visible, 1, 2))
    num_blocks, columns = (rank < 2).sum(2), rank.shape[2]
    most = max(int(num_blocks.max()), num_splits) if xp is np else columns
    order = xp.argsort(rank, axis=2, stable=True)[..., :most]
    entries = 2 * order + (xp.take_along_axis(rank, order, 2) > 0).astype(order.dtype)
    if num_splits > 1:
        entries = pad_end(entries, (*entries.shape[:2], cdiv(most, num_splits) * num_splits))
        entries = entries.reshape(*entries.shape[:2], -1, num_splits).swapaxes(2, 3)
        entries = entries.reshape(entries.shape[0], -1, entries.shape[3])
        dealt = num_blocks[..., None] + np.arange(num_splits)[None, None, ::-1]
        num_blocks = (dealt // num_splits).reshape(entries.shape[:2])
    counts = xp.maximum(num_blocks, 1)
    return entries.astype(np.int32), counts.astype(np.int32)
