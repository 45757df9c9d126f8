"""How the ``[T,S]`` matrix is split: block sizes, pieces of partial blocks, and lists of blocks to visit."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jattn._mods.arrays import AnyArray, Index, Length, cdiv, pad_end
from jattn._mods.pytree import pytree_dataclass, static_field

LARGE, SMALL = 1024, 512  # rows and columns of a block: 4 MiB of float32 scores, or 1 MiB
PIECE = 256  # rows and columns of the pieces of partial blocks
WORTH = 0.85
MOST_RUNS = 2  # loops over rows of blocks; XLA compiles each and keeps buffers for it
Size = tuple[int, int]  # rows and columns of a block
Piece = tuple[slice, slice]
Run = tuple[Any, Any]  # the first row, and the end
Visit = Callable[[PyTree, Index, bool], PyTree]  # ``(state, j, masked) -> state``, as ``fold_row`` calls it
Tables = tuple[AnyArray, AnyArray]  # ``any_visible`` and ``all_visible`` of ``jattn._blocks.block_mask``


def tile(T: Length, S: Length, largest: int = LARGE) -> Size:
    """The rows and columns of a block: each length is split into the fewest equal parts of at most ``largest``.

    A symbolic length (``jax.export``) is split into parts of ``SMALL``.
    """
    return _part(T, largest), _part(S, largest)


def _part(length: Length, largest: int) -> int:
    if not isinstance(length, int):
        return SMALL
    parts = -(-length // largest)
    return max(length, 1) if parts <= 1 else -(-length // (parts * 16)) * 16


def choose_blocks(
    tables: Callable[[Size], Tables],
    T: Length,
    S: Length,
    block_sizes: Any = None,
    *,
    cuts: bool = False,
    large_if_cut: bool = False,
) -> tuple[Size, Tables, tuple[Piece, ...]]:
    """The block size, ``tables(size)`` from ``Visibility.blocks``, and the ``cut`` of the partial blocks.

    Large blocks keep products near the machine's peak rate and the loop short: at H = 64 on two cores, small blocks
    cost one eighth more per pair. Small blocks are chosen if they skip enough of the matrix to pay off, as with a
    window. Only a static table reveals this while tracing. ``block_sizes`` overrides the choice.

    ``cuts``: cut partial blocks. ``large_if_cut``: then keep large blocks wherever cutting leaves out enough of them.
    On an AVX-512 CPU, 2048 causal tokens then take a fifth less time and 5 MiB more memory; gradients, which hold
    several block-sized arrays, would gain 3% and need several times as much memory.
    """
    if block_sizes is not None:
        rows, columns = two_sizes(block_sizes)
        rows, columns = (
            min(size, max(length, 1)) if isinstance(length, int) else size for size, length in ((rows, T), (columns, S))
        )
        block = rows, columns
        block_tables = tables(block)
        return block, block_tables, cut(tables, block, block_tables) if cuts else ()
    large = tile(T, S)
    if cuts and large_if_cut:
        coarse = tables(large)
        several = isinstance(coarse[0], np.ndarray) and coarse[0].size > 1  # a single block is divided instead
        pieces = cut(tables, large, coarse) if several else ()
        if pieces:
            return large, coarse, pieces
    size, block_tables = choose_size(tables, large, tile(T, S, SMALL))
    return size, block_tables, cut(tables, size, block_tables) if cuts else ()


def choose_size(tables: Callable[[Size], Tables], large: Size, small: Size) -> tuple[Size, Tables]:
    """``large`` or ``small``, with its tables; small blocks are chosen if they skip sufficiently more."""
    coarse = tables(large)
    if small != large and isinstance(coarse[0], np.ndarray) and coarse[0].size:
        fine = tables(small)
        if fine[0].mean() <= WORTH * coarse[0].mean():
            return small, fine
    return large, coarse


def cut(tables: Callable[[Size], Tables], size: Size, block_tables: Tables) -> tuple[Piece, ...]:
    """The pieces of every partial block that hold its visible pairs: some rows, and the columns seen by any of them.

    The diagonal blocks of a causal mask need ten sixteenths of their pairs. None if the tables are not static or little
    would be left out. ``block_tables``: ``tables(size)``.
    """
    parts = [step // PIECE for step in size]
    if min(parts) < 2 or any(step % number for step, number in zip(size, parts, strict=True)):
        return ()
    partial = block_tables[0] & True ^ block_tables[1]
    if not isinstance(partial, np.ndarray) or not partial.any():
        return ()
    small = size[0] // parts[0], size[1] // parts[1]
    fine = np.asarray(tables(small)[0])
    short = [
        count * number - have for count, number, have in zip(partial.shape[-2:], parts, fine.shape[-2:], strict=True)
    ]
    fine = np.pad(fine, [(0, 0)] * (fine.ndim - 2) + [(0, missing) for missing in short])
    fine = fine.reshape(*fine.shape[:-2], partial.shape[-2], parts[0], partial.shape[-1], parts[1])
    seen = (fine & partial[..., :, None, :, None]).any((*range(fine.ndim - 4), -4, -2))  # [parts of rows, of columns]
    pieces = []
    for row, columns in enumerate(seen):
        if columns.any():
            first, last = np.flatnonzero(columns)[[0, -1]]
            rows = slice(row * small[0], (row + 1) * small[0])
            pieces.append((rows, slice(int(first) * small[1], int(last + 1) * small[1])))
    needed = sum((rows.stop - rows.start) * (columns.stop - columns.start) for rows, columns in pieces)
    return tuple(pieces) if needed <= WORTH * size[0] * size[1] else ()


def two_sizes(block_sizes: Any, multiples_of: int = 1) -> Size:
    """The checked argument ``block_sizes``."""
    try:
        rows, columns = (int(operator.index(size)) for size in block_sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1 or rows % multiples_of or columns % multiples_of:
        kind = "integers" if multiples_of == 1 else f"multiples of {multiples_of}"
        raise ValueError(f"block_sizes must be two positive {kind} (of queries, of keys), got {block_sizes!r}")
    return rows, columns


def split_axis(x: AnyArray, axis: int, size: int, fill: int | None = 0) -> AnyArray:
    """``x`` with ``axis`` split into ``[parts, size]``, padded with ``fill`` (None repeats the last entry)."""
    xp = np if isinstance(x, np.ndarray) else jnp
    axis %= x.ndim
    length, parts = x.shape[axis], cdiv(x.shape[axis], size)
    if length != parts * size:
        if fill is None:
            x = xp.take(x, xp.minimum(xp.arange(parts * size), length - 1), axis)
        else:
            x = pad_end(x, [parts * size if i == axis else length for i, length in enumerate(x.shape)], fill)
    return x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :])


@pytree_dataclass
class BlockList:
    """Blocks, row by row: entry p is ``(row[p], column[p])``; row i holds entries ``starts[i]`` up to ``starts[i+1]``.

    ``whole``: all entries are blocks. Otherwise, only the first ``starts[-1]`` are, a number known only at run time.
    """

    row: AnyArray
    column: AnyArray
    starts: AnyArray
    whole: bool = static_field()

    def of_row(self, i: Index, run: Run | None = None) -> tuple[Index, Index, Callable[[Index], Index]]:
        """``(start, end, column)``: row i holds the blocks ``column(p)`` for ``start <= p < end``.

        Adjacent columns, the usual case, are counted rather than looked up. Values shared by all rows of the ``run``
        that contains i are plain numbers.
        """
        if isinstance(self.column, np.ndarray):
            counts, offsets = np.diff(self.starts), self.column - np.arange(len(self.column))
            first = np.append(offsets, 0)[self.starts[:-1]]
            if (offsets == np.repeat(first, counts)).all():
                first, count = (_of_run(x, i, run) for x in (first + self.starts[:-1], counts))
                return 0, count, lambda p: first + p
        starts, columns = jnp.asarray(self.starts), jnp.asarray(self.column)
        return starts[i], starts[i + 1], lambda p: columns[p]


def _of_run(by_row: np.ndarray, i: Index, run: Run | None) -> Index:
    values = by_row[slice(*run)] if run else by_row[:0]
    same = values.size and (values == values[0]).all()
    return int(values[0]) if same else jnp.asarray(by_row, jnp.int32)[i]  # even with x64


def runs_of_rows(lists: tuple[BlockList, BlockList]) -> list[Run]:
    """Runs of adjacent rows with the same number of blocks, so that the loop over blocks has a constant trip count.

    All rows form one run if the lists are known only at run time, or if there would be more than ``MOST_RUNS``.
    """
    (full, partial), rows = lists, lists[0].starts.shape[0] - 1
    if not isinstance(full.starts, np.ndarray) or not isinstance(partial.starts, np.ndarray) or rows == 0:
        return [(0, rows)]
    changes = np.diff(full.starts, 2) | np.diff(partial.starts, 2)
    ends = [0, *(np.flatnonzero(changes) + 1).tolist(), rows]
    return list(itertools.pairwise(ends)) if len(ends) <= MOST_RUNS + 1 else [(0, rows)]


def fold_row(
    lists: tuple[BlockList, BlockList], i: Index, visit: Visit, state: PyTree, run: Run | None = None
) -> PyTree:
    """``state = visit(state, j, masked)`` over the blocks ``(i, j)`` of row i: full blocks first, then partial ones.

    ``run``: as in ``BlockList.of_row``.
    """
    for masked, blocks in zip((False, True), lists, strict=True):
        if blocks.row.shape[0] != 0:
            start, end, column = blocks.of_row(i, run)
            step = lambda p, state, masked=masked, column=column: visit(state, column(p), masked)
            state = jax.lax.fori_loop(start, end, step, state)
    return state


def block_lists(any_visible: AnyArray, all_visible: AnyArray) -> tuple[BlockList, BlockList]:
    """The full and partial blocks of one pair of tables ``[blocks of T, blocks of S]``."""
    return _list(all_visible), _list(any_visible & True ^ all_visible)


def _list(table: AnyArray) -> BlockList:
    if isinstance(table, np.ndarray | np.generic):
        row, column = np.nonzero(table)
        starts = np.concatenate([[0], np.cumsum(table.sum(1))])
        return BlockList(*(x.astype(np.int32) for x in (row, column, starts)), whole=True)
    order = jnp.argsort(~table.ravel(), stable=True).astype(jnp.int32)  # listed blocks first, in order
    ends = jnp.cumsum(table.sum(1, dtype=jnp.int32))
    return BlockList(order // table.shape[1], order % table.shape[1], jnp.pad(ends, (1, 0)), whole=False)
