"""Which blocks of the ``[T,S]`` matrix are computed: the tile, the table of visible blocks, ``block_mask``.

A block that no query sees is *empty* and skipped, one that every query sees whole is *full* and computed without a
mask, the others are *mixed*. ``may`` says which are not empty, ``must`` which are full, as in ``Mask.bounds``. Tables
are NumPy arrays wherever masks and positions are static; the trips through empty blocks then vanish at trace time.
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
from jattn.tables import Length, arange, count_pairs, fill_up, parts_of

LARGE, SMALL = 1024, 512  # rows and columns of a block: 4 MiB of float32 scores, or 1 MiB
WORTH = 0.85


def tile(T: Length, S: Length, largest: int = LARGE) -> tuple[int, int]:
    """The rows and columns of a block: each length cut into the fewest equal parts of at most ``largest``.

    A length that ``jax.export`` knows by a symbol alone is cut into parts of ``SMALL``.
    """
    return _part(T, largest), _part(S, largest)


def _part(length: Length, largest: int) -> int:
    if not isinstance(length, int):
        return SMALL
    parts = -(-length // largest)
    return max(length, 1) if parts <= 1 else -(-length // (parts * 16)) * 16


def choose_blocks(
    see: Callable[[tuple[int, int]], tuple[Any, Any]], T: Length, S: Length, block_sizes: tuple[int, int] | None = None
) -> tuple[tuple[int, int], tuple[Any, Any]]:
    """The tile, and ``see(tile)``: the table of its visible blocks.

    Large blocks keep products near the machine's own rate and the loop short: at H = 64 on two cores, small ones cost
    an eighth more per pair. They are taken where they leave out enough of the matrix to pay for that, which shows
    while tracing only if the table is static: for a window, or a causal mask of two blocks. ``block_sizes`` overrides.

    Raises:
        ValueError: ``block_sizes`` are not two positive integers.
    """
    if block_sizes is not None:
        rows, columns = _two_sizes(block_sizes)
        sizes = zip((rows, columns), (T, S), strict=True)
        size = tuple(min(one, max(length, 1)) if isinstance(length, int) else one for one, length in sizes)
        return size, see(size)  # type: ignore[return-value]
    large, small = tile(T, S), tile(T, S, SMALL)
    found = see(large)
    if small != large and isinstance(found[0], np.ndarray) and found[0].size:
        finer = see(small)
        if finer[0].mean() <= WORTH * found[0].mean():
            return small, finer
    return large, found


def _two_sizes(block_sizes: Any) -> tuple[int, int]:
    try:
        rows, columns = (int(operator.index(size)) for size in block_sizes)
    except (TypeError, ValueError):
        rows = columns = 0
    if min(rows, columns) < 1:
        raise ValueError(f"block_sizes must be two positive integers (of queries, of keys), got {block_sizes!r}")
    return rows, columns


def cut(x: Any, axis: int, size: int, fill: Any = 0) -> Any:
    """``x`` with ``axis`` cut into ``[parts, size]``, filled up with ``fill``; an axis of length 1 stays one part.

    ``fill=None`` repeats the last entry.
    """
    xp = np if isinstance(x, np.ndarray) else jnp
    axis %= x.ndim
    length, parts = x.shape[axis], parts_of(x.shape[axis], size)
    if length != parts * size:
        if fill is None:
            x = xp.take(x, xp.minimum(xp.arange(parts * size), length - 1), axis)
        else:
            x = fill_up(x, [parts * size if one == axis else n for one, n in enumerate(x.shape)], fill)
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
    """``(may, must)``, each ``[..., blocks of T, blocks of S]``, of everything that must hold at once.

    ``b``, ``h``: index arrays of the leading axes; positions ``[..., T]`` and ``[..., S]``, None where they are the
    slots; ``slot_masks``: bool arrays ``[..., T|1, S|1]``. Leading axes broadcast: an axis stays 1 where nothing
    depends on it.
    """
    (T, S), (rows, columns) = lengths, size
    b, h, q_positions, kv_positions, slot_masks = known((b, h, q_positions, kv_positions, list(slot_masks)))
    b, h = (x[..., None, None] if np.ndim(x) else x for x in (b, h))
    q_low, q_high = (x[..., :, None] for x in _ranges(q_positions, T, rows))
    kv_low, kv_high = (x[..., None, :] for x in _ranges(kv_positions, S, columns))
    # a block that reaches behind the end of a sequence is never full
    ends = [(arange(parts_of(length, one)) + 1) * one for length, one in zip(lengths, size, strict=True)]
    must = (ends[0] <= T)[:, None] & (ends[1] <= S)[None, :]
    may = must | True
    with mod_semantics():
        for mask in masks:
            one_may, one_must = bounds(mask, b, h, q_low, q_high, kv_low, kv_high)
            may, must = may & one_may, must & one_must
        for array in slot_masks:
            blocks = [rows if array.shape[-2] != 1 else 1, columns if array.shape[-1] != 1 else 1]
            axes = (-3, -1)
            may = may & cut(cut(array, -2, blocks[0], False), -1, blocks[1], False).any(axes)
            must = must & cut(cut(array, -2, blocks[0], False), -1, blocks[1], False).all(axes)
        return may, must & may


def all_seen(
    masks: Sequence[MaskFunction],
    slot_masks: Sequence[Any],
    b: Any,
    h: Any,
    q_positions: Any,
    kv_positions: Any,
    lengths: tuple[Length, Length],
) -> bool:
    """Is it known while tracing that every query sees the key in its own slot? Arguments as in ``visible_blocks``.

    Then there is no key that nobody sees and no query that sees nothing, and no block has to guard against what these
    may hold, which is a tenth of the work where blocks are mixed.
    """
    T, S = lengths
    if not isinstance(T, int) or T != S or slot_masks or any(map(holds_plain_function, masks)):
        return False
    masks, b, h, q_positions, kv_positions = known((tuple(masks), b, h, q_positions, kv_positions))
    b, h = (x[..., None] if np.ndim(x) else x for x in (b, h))
    q, kv = (np.arange(T) if x is None else x for x in (q_positions, kv_positions))
    with mod_semantics():
        sees = [mask(b, h, q, kv) for mask in masks]  # the pairs themselves: bounds may cost O(T) for each
    return all(isinstance(seen, np.ndarray | np.generic) and bool(seen.all()) for seen in sees)


def _ranges(positions: Any, length: Length, size: int) -> tuple[Any, Any]:
    """The least and greatest position of each block."""
    blocks = cut(arange(length) if positions is None else positions, -1, size, fill=None)
    return blocks.min(-1), blocks.max(-1)


@pytree_dataclass
class BlockList:
    """Blocks, row by row: the p-th is ``(row[p], column[p])``, row i has those from ``starts[i]`` to ``starts[i+1]``.

    ``whole``: all entries count. Otherwise only the first ``starts[-1]``, because how many is known when it runs.
    """

    row: Any
    column: Any
    starts: Any
    whole: bool = static_field()


def block_lists(may: Any, must: Any) -> tuple[BlockList, BlockList]:
    """The full and the mixed blocks of one table ``[blocks of T, blocks of S]``."""
    return _list(must), _list(may & True ^ must)


def _list(table: Any) -> BlockList:
    if isinstance(table, np.ndarray | np.generic):
        row, column = np.nonzero(table)
        starts = np.concatenate([[0], np.cumsum(table.sum(1))])
        return BlockList(*(x.astype(np.int32) for x in (row, column, starts)), whole=True)
    order = jnp.argsort(~table.ravel(), stable=True).astype(jnp.int32)  # the blocks of the list first, in their order
    ends = jnp.cumsum(table.sum(1, dtype=jnp.int32))
    return BlockList(order // table.shape[1], order % table.shape[1], jnp.pad(ends, (1, 0)), whole=False)


@pytree_dataclass
class BlockMask(Mask):
    """A mask and what is known of its blocks: see ``block_mask``."""

    mask: Any
    may: Any
    must: Any
    lengths: tuple[int, int] = static_field()
    size: tuple[int, int] = static_field()

    def check(self, B, N, T, S) -> None:
        check(self.mask, B, N, T, S)

    def __call__(self, b, h, q_idx, kv_idx):
        return self.mask(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        (rows, columns), (T, S) = self.size, self.lengths
        B, N = self.may.shape[:2]
        b, h = (0 if size == 1 else index for index, size in ((b, B), (h, N)))  # 1: the same for all
        inside = (b >= 0) & (b < B) & (h >= 0) & (h < N)
        inside = inside & (q_min >= 0) & (q_max < T) & (kv_min >= 0) & (kv_max < S)
        block = (b, h, q_min // rows, q_max // rows, kv_min // columns, kv_max // columns)
        some, _, _ = count_pairs(self.may, *block)
        full, count, within = count_pairs(self.must, *block)
        return (some > 0) | (True ^ inside), (full == count) & within & inside


def block_mask(
    mask: MaskFunction,
    query_length: int,
    kv_length: int,
    *,
    batch: int | None = None,
    num_heads: int | None = None,
    block_sizes: tuple[int, int] | None = None,
) -> BlockMask:
    """``mask`` together with the table of its blocks, found by asking it for every pair once, in linear memory.

    For a plain function, of which nothing is known: what the result says of a block, it knows. Make it once, outside
    the layers and steps that use it, and give it as ``mask=`` to any of them; it joins with others by ``&``, ``|``
    and ``~``. Made outside ``jit``, its table is static and empty blocks cost nothing.

    Args:
        mask: ``(b, h, q_idx, kv_idx) -> bool``.
        query_length, kv_length: T and S; at positions beyond them nothing is known, and the mask itself decides.
        batch, num_heads: over how many sequences and heads the mask differs; None where it is the same for all.
        block_sizes: queries and keys of a block of the table; at most 512 by default.

    Returns:
        a ``Mask``, equal to ``mask`` pair by pair; a pytree.

    Raises:
        ValueError: ``mask`` makes use of b without a ``batch``, or of h without a ``num_heads``; or ``block_sizes``
            are not two positive integers.
        TypeError: ``mask`` does not return bools.
    """
    for at, index, argument, count in ((0, "b", "batch", batch), (1, "h", "num_heads", num_heads)):
        if count is None and depends_on(mask, at):
            raise ValueError(f"block_mask: mask makes use of {index}; say by {argument}= over how many it differs")
    size = tile(query_length, kv_length, SMALL) if block_sizes is None else _two_sizes(block_sizes)
    q_blocks, kv_blocks = (
        cut(np.arange(length), 0, one, fill=-1) for length, one in zip((query_length, kv_length), size, strict=True)
    )

    def of_block(b, h, q_idx, kv_idx):
        real = (q_idx >= 0)[:, None] & (kv_idx >= 0)[None, :]
        with mod_semantics():
            visible = mask(b, h, q_idx[:, None], kv_idx[None, :])
            check_mod("mask", visible, bool, real.shape)
            visible = jnp.broadcast_to(visible, real.shape)
        return (visible & real).any(), (visible | ~real).all()

    def table(b, h):
        return jax.lax.map(
            lambda q: jax.lax.map(lambda kv: of_block(b, h, q, kv), jnp.asarray(kv_blocks)), jnp.asarray(q_blocks)
        )

    def tables():
        heads, sequences = jnp.arange(num_heads or 1), jnp.arange(batch or 1)
        return jax.lax.map(lambda b: jax.lax.map(lambda h: table(b, h), heads), sequences)

    may, must = jax.jit(tables)()
    if not isinstance(may, Tracer):
        may, must = np.asarray(may), np.asarray(must)
    return BlockMask(as_part(mask), may, must, (query_length, kv_length), size)
