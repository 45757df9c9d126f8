"""Attention in O(T + S) memory: the formulas of ``jattn._core.attention``, block by block.

The forward pass is an online softmax (https://arxiv.org/abs/1805.02867; https://arxiv.org/abs/2112.05682). Let
``row_max`` be the largest score of a row so far. Then

    acc = sum_kv exp(score - row_max) v      row_sum = sum_kv exp(score - row_max)      out = acc / row_sum

Empty blocks are skipped, and full blocks are computed without a mask (``jattn._blocks.block_mask``). All functions are
plain functions, traced for a ``platform`` (``jattn._core.deferred``). ``backward`` attaches their derivatives.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from jattn._blocks import all_heads
from jattn._blocks.all_heads import rounding_error
from jattn._blocks.block import BlockedHead, BlockPlan, product_dtype, split_head
from jattn._blocks.block_lists import BlockList, Piece, fold_row
from jattn._blocks.plan import BlockSizes, plan_call
from jattn._core.attention import row_maximum
from jattn._core.call import Call, softmax_dtype
from jattn._mods.arrays import Index

IfListed = Callable[[Callable[[], PyTree], PyTree], PyTree]  # ``(compute, otherwise) -> one of them``
VisitListed = Callable[[PyTree, Array, Array, bool, IfListed], PyTree]  # as ``scan_blocks`` calls it


def forward(
    platform: str, call: Call, sizes: BlockSizes, with_error: bool = False
) -> tuple[Array, Array, Array, *tuple[Array, ...]]:
    """``out [B,T,N,D]``, ``row_max`` and ``row_sum [B,T,N]`` of a canonical call (``jattn._core.vmap.canonical``).

    ``with_error``: also return the ``rounding_error`` of ``out``.
    """
    plan = plan_call(platform, call, sizes, forward=True)
    if platform in all_heads.GPUS and plan.all_at_once and not call.sharded:
        return all_heads.forward(platform, call, plan.blocks, with_error)
    return plan.over_heads(functools.partial(forward_head, platform, with_error=with_error), call, out_axes=1)


def forward_head(
    platform: str, head: Call, plan: BlockPlan, *, with_error: bool = False
) -> tuple[Array, Array, Array, *tuple[Array, ...]]:
    """``out [T,D]``, ``row_max [T]`` and ``row_sum [T]``; ``lse = row_max + log(row_sum)``. Has no derivatives.

    ``with_error``: as in ``forward``.
    """
    q = head.query
    summed = platform == "tpu" and head.dropout is None and product_dtype(platform, q) != softmax_dtype(q)
    blocked = split_head(platform, head, plan, differentiated=False)
    out, row_max, row_sum, *error = online_softmax(blocked, summed, head.value.dtype, with_error)
    return join_rows(out, q), join_rows(row_max, q), join_rows(row_sum, q), *(join_rows(x, q) for x in error)


def online_softmax(
    blocked: BlockedHead, summed: bool, out_dtype: DTypeLike, with_error: bool = False
) -> tuple[Array, Array, Array, *tuple[Array, ...]]:
    """``out [blocks, rows, D]``; ``row_max`` and ``row_sum [blocks, rows]``, in the softmax's dtype.

    ``summed``: the product with the values, which have a column of ones appended, also computes ``row_sum``. XLA for
    TPU otherwise computes every exponential twice: once for ``row_sum`` and once inside the product. ``with_error``: as
    in ``forward``.
    """
    rows, q, v, dtype = blocked.plan.size[0], blocked.arrays.q, blocked.arrays.v, blocked.dtype

    def row_of_blocks(i: Array) -> tuple[Array, ...]:
        def visit(state: tuple, j: Index, masked: bool) -> tuple:
            block = blocked.take(i, j, transposable=False)

            def of_piece(piece: Piece | None) -> tuple[Array, Array, Array]:
                acc, row_max, row_sum = state if piece is None else (x[piece[0]] for x in state)
                scores, v = blocked.scores(block, i, j, masked, piece)
                if summed:
                    v = jnp.concatenate([v, jnp.ones((1, v.shape[1]), v.dtype)])
                new_max = jnp.maximum(row_max, row_maximum(scores))
                rescale = jnp.exp(row_max - new_max)
                block_acc, block_sum = blocked.softmax_sums(scores, v, new_max, i, j, piece)
                new_sum = row_sum if summed else row_sum * rescale + block_sum
                return acc * rescale[:, None] + block_acc, new_max, new_sum

            return blocked.by_piece(masked, of_piece, state)

        # The lowest float instead of -inf, because -inf - -inf is NaN.
        state = (jnp.zeros((rows, v.shape[1] + summed), dtype), jnp.full(rows, jnp.finfo(dtype).min, dtype),
                 jnp.zeros(rows, dtype))  # fmt: skip
        acc, row_max, row_sum = fold_row(blocked.lists, i, visit, state)
        if summed:
            acc, row_sum = acc[:, :-1], acc[:, -1]
        # The largest score adds 1 to row_sum, so only a row that sees nothing has a sum below 1.
        out = acc * (1.0 / jnp.maximum(row_sum, 1.0))[:, None]
        error = [rounding_error(out, out_dtype).astype(out_dtype)] if with_error else []
        return out.astype(out_dtype), row_max, row_sum, *error

    return jax.lax.map(row_of_blocks, jnp.arange(q.shape[0], dtype=jnp.int32))


def scan_blocks(visit: VisitListed, carry: PyTree, blocked: BlockedHead) -> PyTree:
    """``carry = visit(carry, i, j, masked, if_listed)`` over all nonempty blocks.

    ``if_listed(compute, otherwise)`` is ``compute()``, except past the end of a list whose length is known only at run
    time, where it is ``otherwise``. Slices of whole arrays are taken outside it: inside a conditional, their gradients
    would be allocated anew in every iteration. When differentiated, the loop saves no block.
    """
    for masked, blocks in zip((False, True), blocked.lists, strict=True):
        if blocks.row.shape[0] == 0:
            continue

        def body(carry: PyTree, entry: tuple, masked: bool = masked, blocks: BlockList = blocks) -> tuple[PyTree, None]:
            p, i, j = entry

            def if_listed(compute: Callable[[], PyTree], otherwise: PyTree) -> PyTree:
                return compute() if blocks.whole else jax.lax.cond(p < blocks.starts[-1], compute, lambda: otherwise)

            return visit(carry, i, j, masked, if_listed), None

        numbers = jnp.arange(blocks.row.shape[0], dtype=jnp.int32)
        entries = numbers, jnp.asarray(blocks.row), jnp.asarray(blocks.column)
        carry, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, entries)
    return carry


def join_rows(blocks: Array, q: Array) -> Array:
    """``[blocks, rows, ...] -> [T, ...]``."""
    return jax.lax.collapse(blocks, 0, 2)[: q.shape[0]]


def log_sum_exp(row_max: Array, row_sum: Array) -> Array:
    """``row_max + log(row_sum)``; -inf for a row that sees nothing."""
    seen = row_sum != 0.0
    lse = row_max + jnp.log(jnp.where(seen, row_sum, 1.0))  # 1 keeps the derivative of the log finite
    return jnp.where(seen, lse, -jnp.inf)
