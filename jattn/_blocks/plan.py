"""How the heads of a call are split into blocks, and whether they run one by one or all at once.

The blocks to skip are chosen here, outside any vmap, where a conditional still saves work. All heads of a sequence
share one table: a block is computed if any head sees it. If masks differ by sequence, each sequence has its own table.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, PyTree

from jattn._blocks.block import BlockPlan
from jattn._blocks.block_lists import Piece, Size, Tables, choose_blocks
from jattn._blocks.block_mask import Visibility
from jattn._core.call import Call
from jattn._core.vmap import Lift, over_call, sequential_vmap
from jattn._mods.arrays import AnyArray, Length, arange, cdiv

BlockSizes = Any  # queries and keys per block, not checked before ``choose_blocks``; None: the default


class HeadsPlan(NamedTuple):
    """How to split all heads, with the tables of all sequences, and how to run heads and sequences."""

    blocks: BlockPlan
    heads: Lift
    sequences: Lift

    @property
    def all_at_once(self) -> bool:
        """Whether every step computes a block of all heads of all sequences."""
        return self.heads is self.sequences is jax.vmap

    def over_heads(
        self,
        one_head: Callable[Concatenate[Call, BlockPlan, ...], PyTree],
        call: Call,
        out_axes: PyTree[int],
        *,
        per_head: Sequence[Array] = (),
        per_sequence: Sequence[Array] = (),
        recompute: bool = False,
    ) -> PyTree[Array]:
        """``one_head(head, plan, *per_head, *per_sequence)`` for every head, with its sequence's ``plan``.

        ``recompute``: whether the backward pass recomputes a head that runs by itself instead of saving its residuals.
        Other arguments are as in ``over_call``.
        """
        count, by_itself = len(per_head), self.heads is sequential_vmap

        def with_plan(head: Call, *arrays: Any) -> PyTree:
            tables = {"any_visible": arrays[count], "all_visible": arrays[count + 1]}
            return one_head(head, self.blocks._replace(**tables), *arrays[:count], *arrays[count + 2 :])

        return over_call(
            with_plan,
            call,
            out_axes,
            per_head=per_head,
            per_sequence=(self.blocks.any_visible, self.blocks.all_visible, *per_sequence),
            sequences=self.sequences,
            heads=functools.partial(sequential_vmap, recompute=recompute) if by_itself else self.heads,
        )


def plan_call(platform: str, call: Call, sizes: BlockSizes, *, forward: bool = False) -> HeadsPlan:
    """The plan of a canonical call (``jattn._core.vmap.canonical``).

    On one CPU device, heads and sequences run one by one: a single head keeps all cores busy, and its blocks stay in
    the cache. Looping over an axis that may be sharded over devices would gather it, so such axes use vmap, with one
    table for all sequences. One accelerator also uses vmap, but over sequences only if they share a table.
    """
    size, (any_visible, all_visible), pieces = choose_blocks(
        functools.partial(block_table, call), *call.lengths, sizes, cuts=platform == "cpu", large_if_cut=forward
    )
    if call.sharded:
        any_visible, all_visible = any_visible.any(0, keepdims=True), all_visible.all(0, keepdims=True)
    blocks = BlockPlan(size, any_visible, all_visible, visibility(call).all_seen(), pieces)
    if call.sharded:
        return HeadsPlan(blocks, jax.vmap, jax.vmap)
    if platform == "cpu":
        return HeadsPlan(blocks, sequential_vmap, sequential_vmap)
    return HeadsPlan(blocks, jax.vmap, sequential_vmap if any_visible.shape[0] > 1 else jax.vmap)


def plan_head(platform: str, head: Call, block_sizes: BlockSizes, *, forward: bool = False) -> BlockPlan:
    """The plan of a single head."""
    indices = head.first_batch, head.first_head, head.query_positions, head.kv_positions
    pairs = Visibility(head.lengths, head.masks, head.slot_masks, *indices)
    size, tables, pieces = choose_blocks(
        pairs.blocks, *head.lengths, block_sizes, cuts=platform == "cpu", large_if_cut=forward
    )
    return BlockPlan(size, *tables, pairs.all_seen(), pieces)


def visibility(call: Call) -> Visibility:
    """The visibility of a call's pairs, with leading axes ``[B|1, N|1]``."""
    B, _, N, _ = call.query.shape
    b, h = call.first_batch + arange(B)[:, None], call.first_head + arange(N)[None, :]
    positions = (None if x is None else x[:, None] for x in (call.query_positions, call.kv_positions))
    return Visibility(call.lengths, call.masks, call.slot_masks, b, h, *positions)


def block_table(call: Call, size: Size) -> Tables:
    """``(any_visible, all_visible)``, each ``[B|1, blocks of T, blocks of S]``, for all heads of a sequence."""
    any_visible, all_visible = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in visibility(call).blocks(size))
    return any_visible.any(1), all_visible.all(1)


def describe_work(plan: BlockPlan, lengths: tuple[Length, Length]) -> str:
    """The fraction of the ``[T,S]`` matrix computed by a plan, as a verb phrase about the kernel that uses it."""
    any_visible, all_visible = plan.any_visible, plan.all_visible
    if not isinstance(any_visible, np.ndarray) or not isinstance(all_visible, np.ndarray):
        return "skips empty blocks; which they are depends on arrays that are known only when it runs"
    (rows, columns), (T, S) = plan.size, lengths

    def pairs(piece: Piece) -> AnyArray:
        """The number of pairs within the matrix in this piece of each block, ``[blocks of T, blocks of S]``."""
        ends = [np.arange(cdiv(length, size)) * size for length, size in zip(lengths, plan.size, strict=True)]
        sides = zip(lengths, ends, piece, strict=True)
        counts = [np.clip(length - starts, part.start, part.stop) - part.start for length, starts, part in sides]
        return counts[0][:, None] * counts[1]

    whole = pairs((slice(0, rows), slice(0, columns)))
    partial = sum(map(pairs, plan.pieces)) if plan.pieces else whole
    computed = np.where(all_visible, whole, np.where(any_visible, partial, 0)).sum((-2, -1)).mean()
    percent = 100 * computed / max(T * S, 1)
    return f"computes {percent:.{int(0 < percent < 10)}f}% of the pairs in blocks of {rows} x {columns}"
