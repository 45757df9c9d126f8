"""Decides which blocks of the ``[T,S]`` matrix are computed: block sizes, tables of visible blocks, ``block_mask``.

A block without visible pairs is *empty* and skipped. A block with only visible pairs is *full* and computed without a
mask. All others are *partial*. As in ``Mask.bounds``, ``any_visible`` marks the blocks that are not empty and
``all_visible`` the full ones. The tables are NumPy arrays if masks and positions are static; empty blocks then
disappear while tracing.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from jattn._blocks.block_lists import SMALL, Size, Tables, split_axis, tile, two_sizes
from jattn._core.attention import check_mod
from jattn._mods.arrays import AnyArray, Index, Length, arange, calling, cdiv, mod_semantics
from jattn._mods.closure_convert import depends_on
from jattn._mods.lookup import count_pairs
from jattn._mods.pytree import as_part, holds_plain_function, known, pytree_dataclass, static_field
from jattn._mods.validation import check_fits
from jattn.masks import Mask, MaskFunction, bounds


class Visibility(NamedTuple):
    """All masks combined, which determine the visible pairs of T queries and S keys.

    ``b``, ``h``: index arrays for the leading axes. Positions are ``[..., T]`` and ``[..., S]``, or None for the slots
    themselves. ``slot_masks``: bool arrays ``[..., T|1, S|1]``. Leading axes broadcast.
    """

    lengths: tuple[Length, Length]  # T and S
    masks: Sequence[MaskFunction]
    slot_masks: Sequence[AnyArray] = ()
    b: Index = 0
    h: Index = 0
    q_positions: AnyArray | None = None
    kv_positions: AnyArray | None = None

    def blocks(self, size: Size) -> Tables:
        """``(any_visible, all_visible)``, each ``[..., blocks of T, blocks of S]``.

        Axes on which nothing depends keep size 1.
        """
        (T, S), (rows, columns) = self.lengths, size
        b, h, q_positions, kv_positions, slot_masks = known((*self[3:], list(self.slot_masks)))
        b, h = (x[..., None, None] if np.ndim(x) else x for x in (b, h))
        q_low, q_high = (x[..., :, None] for x in _ranges(q_positions, T, rows))
        kv_low, kv_high = (x[..., None, :] for x in _ranges(kv_positions, S, columns))
        # A block extending past the end of a sequence is never full.
        ends = [(arange(cdiv(length, step)) + 1) * step for length, step in zip(self.lengths, size, strict=True)]
        all_visible = (ends[0] <= T)[:, None] & (ends[1] <= S)[None, :]
        any_visible = all_visible | True
        with mod_semantics():
            for mask in self.masks:
                mask_any, mask_all = bounds(mask, b, h, q_low, q_high, kv_low, kv_high)
                any_visible, all_visible = any_visible & mask_any, all_visible & mask_all
            for array in slot_masks:
                blocks = [rows if array.shape[-2] != 1 else 1, columns if array.shape[-1] != 1 else 1]
                pairs = split_axis(split_axis(array, -2, blocks[0], False), -1, blocks[1], False)
                any_visible, all_visible = any_visible & pairs.any((-3, -1)), all_visible & pairs.all((-3, -1))
            return any_visible, all_visible & any_visible

    def all_seen(self) -> bool:
        """Whether it is known while tracing that every query sees the key in its own slot.

        If so, every key is seen and every query sees a key, and no block has to guard against NaN in unseen slots. The
        guard accounts for a tenth of the work of partial blocks.
        """
        T, S = self.lengths
        if not isinstance(T, int) or T != S or self.slot_masks or any(map(holds_plain_function, self.masks)):
            return False
        masks, b, h, q_positions, kv_positions = known((tuple(self.masks), *self[3:]))
        b, h = (x[..., None] if np.ndim(x) else x for x in (b, h))
        q, kv = (np.arange(T) if x is None else x for x in (q_positions, kv_positions))
        with calling("mask"):
            values = [mask(b, h, q, kv) for mask in masks]  # evaluates the pairs themselves; bounds may cost O(T) each
        return all(isinstance(value, np.ndarray | np.generic) and bool(value.all()) for value in values)


def _ranges(positions: AnyArray | None, length: Length, size: int) -> tuple[AnyArray, AnyArray]:
    """The smallest and largest position of each block."""
    blocks = split_axis(arange(length) if positions is None else positions, -1, size, fill=None)
    return blocks.min(-1), blocks.max(-1)


@pytree_dataclass
class BlockMask(Mask):
    """A mask with the tables of its blocks; see ``block_mask``."""

    mask: MaskFunction
    any_visible: AnyArray
    all_visible: AnyArray
    lengths: tuple[int, int] = static_field()
    size: tuple[int, int] = static_field()

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        check_fits(self.mask, B, N, T, S)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return self.mask(b, h, q_idx, kv_idx)

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Tables:
        (rows, columns), (T, S) = self.size, self.lengths
        B, N = self.any_visible.shape[:2]
        b, h = (0 if size == 1 else index for index, size in ((b, B), (h, N)))  # an axis of size 1 is shared
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
    """Adds exact block tables to ``mask`` by evaluating every pair once, in linear memory.

    Use this for a plain function, whose empty blocks attention cannot otherwise skip. Create the mask once, outside the
    layers and steps that use it, and pass it as ``mask=`` to any of them. It combines with other masks via ``&``, ``|``
    and ``~``. If created outside ``jit``, its tables are static and empty blocks cost nothing.

    Args:
        mask: ``(b, h, q_idx, kv_idx) -> bool``, elementwise.
        query_length, kv_length: T and S. Blocks beyond them are evaluated pair by pair.
        batch, num_heads: the number of sequences and heads, if the mask varies over them.
        block_sizes: queries and keys per block of the tables; at most 512 by default.

    Returns:
        A ``jattn.masks.Mask`` equal to ``mask`` for every pair; a pytree.

    Raises:
        ValueError: ``mask`` uses b without ``batch`` or h without ``num_heads``, or ``block_sizes`` are not two
            positive integers.
        TypeError: ``mask`` does not return bools.

    Example:
        >>> def near(b, h, q_idx, kv_idx):
        ...     return abs(q_idx - kv_idx) <= 1
        >>> mask = jattn.block_mask(near, 6, 6, block_sizes=(2, 2))
        >>> print(mask.any_visible[0, 0].astype(int))  # zeros: blocks to skip
        [[1 1 0]
         [1 1 1]
         [0 1 1]]
    """
    for position, index, argument, count in ((0, "b", "batch", batch), (1, "h", "num_heads", num_heads)):
        if count is None and depends_on(mask, position):
            raise ValueError(f"block_mask: mask depends on {index}; pass {argument}=, the number over which it varies")
    size = tile(query_length, kv_length, SMALL) if block_sizes is None else two_sizes(block_sizes)
    sides = zip((query_length, kv_length), size, strict=True)
    q_blocks, kv_blocks = (split_axis(np.arange(length), 0, step, fill=-1) for length, step in sides)

    def evaluate_block(b: Array, h: Array, q_idx: Array, kv_idx: Array) -> tuple[Array, Array]:
        real = (q_idx >= 0)[:, None] & (kv_idx >= 0)[None, :]
        with calling("mask"):
            visible = mask(b, h, q_idx[:, None], kv_idx[None, :])
            check_mod("mask", visible, bool, real.shape)
            visible = jnp.broadcast_to(visible, real.shape)
        return (visible & real).any(), (visible | ~real).all()

    def table(b: Array, h: Array) -> tuple[Array, Array]:
        over_keys = lambda q: jax.lax.map(lambda kv: evaluate_block(b, h, q, kv), jnp.asarray(kv_blocks))
        return jax.lax.map(over_keys, jnp.asarray(q_blocks))

    def tables() -> tuple[Array, Array]:
        heads, sequences = jnp.arange(num_heads or 1), jnp.arange(batch or 1)
        return jax.lax.map(lambda b: jax.lax.map(lambda h: table(b, h), heads), sequences)

    any_visible, all_visible = jax.jit(tables)()
    if not isinstance(any_visible, Tracer):
        any_visible, all_visible = np.asarray(any_visible), np.asarray(all_visible)
    return BlockMask(as_part(mask), any_visible, all_visible, (query_length, kv_length), size)
