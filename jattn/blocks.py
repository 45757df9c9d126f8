"""Which blocks of the ``[T,S]`` matrix are computed: the block size, the tables of visible blocks, ``block_mask``.

A block without a visible pair is *empty* and skipped. A block whose pairs are all visible is *full* and computed
without a mask. All others are *partial*. As in ``Mask.bounds``, ``any_visible`` tells which blocks are not empty and
``all_visible`` which are full. The tables are NumPy arrays if masks and positions are static; empty blocks then
disappear while tracing.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn.attention import check_mod
from jattn.hoist import depends_on
from jattn.masks import Mask, MaskFunction, bounds
from jattn.mods import as_part, check, holds_plain_function, known, mod_semantics, pytree_dataclass, static_field
from jattn.tables import Length, arange, count_pairs, pad_end, parts_of

LARGE, SMALL = 1024, 512  # rows and columns of a block: 4 MiB of float32 scores, or 1 MiB
PIECE = 256  # rows and columns in which partial blocks are cut
WORTH = 0.85

Piece = tuple[slice, slice]  # rows and columns of a block


def tile(T: Length, S: Length, largest: int = LARGE) -> tuple[int, int]:
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
    tables: Callable[[tuple[int, int]], tuple[Any, Any]],
    T: Length,
    S: Length,
    block_sizes: tuple[int, int] | None = None,
    *,
    cuts: bool = False,
    large_if_cut: bool = False,
) -> tuple[tuple[int, int], tuple[Any, Any], tuple[Piece, ...]]:
    """The block size, ``tables(size)``, which are the tables of ``visible_blocks``, and ``cut`` of the partial blocks.

    Large blocks keep products near the machine's peak rate and the loop short: at H = 64 on two cores, small blocks
    cost an eighth more per pair. Small blocks are chosen if they skip enough of the matrix to pay for that, as for a
    window. Only a static table shows this while tracing. ``block_sizes`` overrides.

    ``cuts``: cut partial blocks. ``large_if_cut``: then keep large blocks wherever that leaves out enough of them. On
    an AVX-512 CPU 2048 causal tokens then take a fifth less time and 5 MiB more; gradients, which hold several arrays
    of a block's size, would win 3% and need several times as much.

    Raises:
        ValueError: ``block_sizes`` are not two positive integers.
    """
    if block_sizes is not None:
        rows, columns = _two_sizes(block_sizes)
        sizes = zip((rows, columns), (T, S), strict=True)
        block: Any = tuple(min(size, max(length, 1)) if isinstance(length, int) else size for size, length in sizes)
        found = tables(block)
        return block, found, cut(tables, block, found) if cuts else ()
    large = tile(T, S)
    if cuts and large_if_cut:
        coarse = tables(large)
        pieces = cut(tables, large, coarse) if coarse[0].size > 1 else ()  # a single block is rather divided
        if pieces:
            return large, coarse, pieces
    size, found = choose_size(tables, large, tile(T, S, SMALL))
    return size, found, cut(tables, size, found) if cuts else ()


def choose_size(
    tables: Callable[[tuple[int, int]], tuple[Any, Any]], large: tuple[int, int], small: tuple[int, int]
) -> tuple[tuple[int, int], tuple[Any, Any]]:
    """``large`` or ``small`` and its tables: small blocks if they skip enough more."""
    coarse = tables(large)
    if small != large and isinstance(coarse[0], np.ndarray) and coarse[0].size:
        fine = tables(small)
        if fine[0].mean() <= WORTH * coarse[0].mean():
            return small, fine
    return large, coarse


def cut(
    tables: Callable[[tuple[int, int]], tuple[Any, Any]], size: tuple[int, int], found: tuple[Any, Any]
) -> tuple[Piece, ...]:
    """The pieces of every partial block that hold its visible pairs: for some rows, the columns that any of them sees.

    The diagonal blocks of a causal mask need ten sixteenths of their pairs. None if the tables are not static, or
    little is left out. ``found``: ``tables(size)``.
    """
    parts = [step // PIECE for step in size]
    if min(parts) < 2 or any(step % number for step, number in zip(size, parts, strict=True)):
        return ()
    partial = found[0] & True ^ found[1]
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


def _two_sizes(block_sizes: Any) -> tuple[int, int]:
    try:
        rows, columns = (int(operator.index(size)) for size in block_sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ValueError(f"block_sizes must be two positive integers (of queries, of keys), got {block_sizes!r}")
    return rows, columns


def split_axis(x: Any, axis: int, size: int, fill: Any = 0) -> Any:
    """``x`` with ``axis`` split into ``[parts, size]``, padded with ``fill``; None repeats the last entry."""
    xp = np if isinstance(x, np.ndarray) else jnp
    axis %= x.ndim
    length, parts = x.shape[axis], parts_of(x.shape[axis], size)
    if length != parts * size:
        if fill is None:
            x = xp.take(x, xp.minimum(xp.arange(parts * size), length - 1), axis)
        else:
            x = pad_end(x, [parts * size if i == axis else length for i, length in enumerate(x.shape)], fill)
    return x.reshape(*x.shape[:axis], parts, size, *x.shape[axis + 1 :])


def visible_blocks(
    masks: Sequence[MaskFunction],
    slot_masks: Sequence[Any],
    b: Any,
    h: Any,
    q_positions: Any,
    kv_positions: Any,
    lengths: tuple[Length, Length],
    size: tuple[int, int],
) -> tuple[Any, Any]:
    """``(any_visible, all_visible)`` under all masks together, each ``[..., blocks of T, blocks of S]``.

    ``b``, ``h``: index arrays of the leading axes. Positions are ``[..., T]`` and ``[..., S]``, or None for the slots
    themselves. ``slot_masks``: bool arrays ``[..., T|1, S|1]``. Leading axes broadcast; an axis on which nothing
    depends stays 1.
    """
    (T, S), (rows, columns) = lengths, size
    b, h, q_positions, kv_positions, slot_masks = known((b, h, q_positions, kv_positions, list(slot_masks)))
    b, h = (x[..., None, None] if np.ndim(x) else x for x in (b, h))
    q_low, q_high = (x[..., :, None] for x in _ranges(q_positions, T, rows))
    kv_low, kv_high = (x[..., None, :] for x in _ranges(kv_positions, S, columns))
    # A block that extends past the end of a sequence is never full.
    ends = [(arange(parts_of(length, step)) + 1) * step for length, step in zip(lengths, size, strict=True)]
    all_visible = (ends[0] <= T)[:, None] & (ends[1] <= S)[None, :]
    any_visible = all_visible | True
    with mod_semantics():
        for mask in masks:
            mask_any, mask_all = bounds(mask, b, h, q_low, q_high, kv_low, kv_high)
            any_visible, all_visible = any_visible & mask_any, all_visible & mask_all
        for array in slot_masks:
            blocks = [rows if array.shape[-2] != 1 else 1, columns if array.shape[-1] != 1 else 1]
            pairs = split_axis(split_axis(array, -2, blocks[0], False), -1, blocks[1], False)
            any_visible, all_visible = any_visible & pairs.any((-3, -1)), all_visible & pairs.all((-3, -1))
        return any_visible, all_visible & any_visible


def all_seen(
    masks: Sequence[MaskFunction],
    slot_masks: Sequence[Any],
    b: Any,
    h: Any,
    q_positions: Any,
    kv_positions: Any,
    lengths: tuple[Length, Length],
) -> bool:
    """Whether it is known while tracing that every query sees the key in its own slot; arguments as ``visible_blocks``.

    If so, every key is seen and every query sees a key, and no block has to guard against NaN in unseen ones. That
    guard is a tenth of the work of partial blocks.
    """
    T, S = lengths
    if not isinstance(T, int) or T != S or slot_masks or any(map(holds_plain_function, masks)):
        return False
    masks, b, h, q_positions, kv_positions = known((tuple(masks), b, h, q_positions, kv_positions))
    b, h = (x[..., None] if np.ndim(x) else x for x in (b, h))
    q, kv = (np.arange(T) if x is None else x for x in (q_positions, kv_positions))
    with mod_semantics():
        values = [mask(b, h, q, kv) for mask in masks]  # the pairs themselves; bounds may cost O(T) each
    return all(isinstance(value, np.ndarray | np.generic) and bool(value.all()) for value in values)


def _ranges(positions: Any, length: Length, size: int) -> tuple[Any, Any]:
    """The least and greatest position of each block."""
    blocks = split_axis(arange(length) if positions is None else positions, -1, size, fill=None)
    return blocks.min(-1), blocks.max(-1)


@pytree_dataclass
class BlockList:
    """Blocks, row by row: the p-th is ``(row[p], column[p])``, and row i holds ``starts[i]`` up to ``starts[i+1]``.

    ``whole``: all entries are blocks. Otherwise only the first ``starts[-1]`` are, a number known at run time.
    """

    row: Any
    column: Any
    starts: Any
    whole: bool = static_field()

    def of_row(self, i: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        """``(start, end, column)``: row i holds the blocks ``column(p)`` for ``start <= p < end``.

        Neighbouring columns, the usual case, are counted instead of looked up.
        """
        if isinstance(self.column, np.ndarray):
            counts, offsets = np.diff(self.starts), self.column - np.arange(len(self.column))
            first = np.append(offsets, 0)[self.starts[:-1]]
            if (offsets == np.repeat(first, counts)).all():
                first, counts = (jnp.asarray(x, jnp.int32) for x in (first + self.starts[:-1], counts))  # also in x64
                return 0, counts[i], lambda p: first[i] + p
        starts, columns = jnp.asarray(self.starts), jnp.asarray(self.column)
        return starts[i], starts[i + 1], lambda p: columns[p]


def block_lists(any_visible: Any, all_visible: Any) -> tuple[BlockList, BlockList]:
    """The full and the partial blocks of one pair of tables ``[blocks of T, blocks of S]``."""
    return _list(all_visible), _list(any_visible & True ^ all_visible)


def _list(table: Any) -> BlockList:
    if isinstance(table, np.ndarray | np.generic):
        row, column = np.nonzero(table)
        starts = np.concatenate([[0], np.cumsum(table.sum(1))])
        return BlockList(*(x.astype(np.int32) for x in (row, column, starts)), whole=True)
    order = jnp.argsort(~table.ravel(), stable=True).astype(jnp.int32)  # listed blocks first, in order
    ends = jnp.cumsum(table.sum(1, dtype=jnp.int32))
    return BlockList(order // table.shape[1], order % table.shape[1], jnp.pad(ends, (1, 0)), whole=False)


@pytree_dataclass
class BlockMask(Mask):
    """A mask with the tables of its blocks; see ``block_mask``."""

    mask: Any
    any_visible: Any
    all_visible: Any
    lengths: tuple[int, int] = static_field()
    size: tuple[int, int] = static_field()

    def check(self, B, N, T, S) -> None:
        check(self.mask, B, N, T, S)

    def __call__(self, b, h, q_idx, kv_idx):
        return self.mask(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        (rows, columns), (T, S) = self.size, self.lengths
        B, N = self.any_visible.shape[:2]
        b, h = (0 if size == 1 else index for index, size in ((b, B), (h, N)))  # a size of 1 is shared
        inside = (b >= 0) & (b < B) & (h >= 0) & (h < N)
        inside = inside & (q_min >= 0) & (q_max < T) & (kv_min >= 0) & (kv_max < S)
        block = (b, h, q_min // rows, q_max // rows, kv_min // columns, kv_max // columns)
        nonempty, _, _ = count_pairs(self.any_visible, *block)
        full, count, within = count_pairs(self.all_visible, *block)
        return (nonempty > 0) | (True ^ inside), (full == count) & within & inside


def block_mask(
    mask: MaskFunction,
    query_length: int,
    kv_length: int,
    *,
    batch: int | None = None,
    num_heads: int | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> BlockMask:
    """``mask`` with the exact tables of its blocks, computed by evaluating every pair once, in linear memory.

    Use it for a plain function, whose blocks are otherwise unknown. Make it once, outside the layers and steps that use
    it, and pass it as ``mask=`` to any of them. It combines with other masks by ``&``, ``|`` and ``~``. Outside
    ``jit`` its tables are static and empty blocks cost nothing.

    Args:
        mask: ``(b, h, q_idx, kv_idx) -> bool``.
        query_length, kv_length: T and S. Blocks beyond them count as partial.
        batch, num_heads: the number of sequences and heads, if the mask varies over them.
        block_sizes: queries and keys per block of the tables; at most 512 by default.

    Returns:
        A ``Mask`` that equals ``mask`` pair by pair; a pytree.

    Raises:
        ValueError: ``mask`` uses b without ``batch`` or h without ``num_heads``, or ``block_sizes`` are not two
            positive integers.
        TypeError: ``mask`` does not return bools.
    """
    for position, index, argument, count in ((0, "b", "batch", batch), (1, "h", "num_heads", num_heads)):
        if count is None and depends_on(mask, position):
            raise ValueError(f"block_mask: mask depends on {index}; pass {argument}=, the number over which it varies")
    size = tile(query_length, kv_length, SMALL) if block_sizes is None else _two_sizes(block_sizes)
    q_blocks, kv_blocks = (
        split_axis(np.arange(length), 0, step, fill=-1)
        for length, step in zip((query_length, kv_length), size, strict=True)
    )

    def evaluate_block(b, h, q_idx, kv_idx):
        real = (q_idx >= 0)[:, None] & (kv_idx >= 0)[None, :]
        with mod_semantics():
            visible = mask(b, h, q_idx[:, None], kv_idx[None, :])
            check_mod("mask", visible, bool, real.shape)
            visible = jnp.broadcast_to(visible, real.shape)
        return (visible & real).any(), (visible | ~real).all()

    def table(b, h):
        return jax.lax.map(
            lambda q: jax.lax.map(lambda kv: evaluate_block(b, h, q, kv), jnp.asarray(kv_blocks)), jnp.asarray(q_blocks)
        )

    def tables():
        heads, sequences = jnp.arange(num_heads or 1), jnp.arange(batch or 1)
        return jax.lax.map(lambda b: jax.lax.map(lambda h: table(b, h), heads), sequences)

    any_visible, all_visible = jax.jit(tables)()
    if not isinstance(any_visible, Tracer):
        any_visible, all_visible = np.asarray(any_visible), np.asarray(all_visible)
    return BlockMask(as_part(mask), any_visible, all_visible, (query_length, kv_length), size)
