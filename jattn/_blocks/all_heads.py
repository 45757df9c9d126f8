"""Computes blocks of all heads at once on an accelerator: gradients of query, key and value, and GPU forward passes.

A block of rows or columns is a slice ``[B, rows, N, H]`` of an array ``[blocks, B, rows, N, H]``. This order matches
the arrays' memory layout, so no copies are made. Every operation inside the loops is a GPU kernel launch or a copy,
unless XLA fuses it with another operation.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Concatenate

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree

from jattn._blocks.block import Block, BlockedHead, BlockPlan, pad_slot_masks, pad_to_blocks, split_head, take_block
from jattn._blocks.block_lists import BlockList, Run, block_lists, fold_row, runs_of_rows, split_axis
from jattn._core.attention import row_maximum
from jattn._core.call import Call, softmax_dtype
from jattn._core.vmap import over_call
from jattn._mods.arrays import Index

GPUS = "cuda", "rocm"


def forward(
    platform: str, call: Call, plan: BlockPlan, with_error: bool = False
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"], Float[Array, "B T N"], *tuple[Float[Array, "B T N D"], ...]]:
    """``out``, ``row_max`` and ``row_sum`` as in ``jattn._blocks.online_softmax``, including ``with_error``.

    ``plan`` has a single table, ``[1, blocks of T, blocks of S]``, for all sequences.
    """
    rows, columns = plan.size
    blocked_call = _blocked_call(platform, call, plan)
    queries, keys, values = _parts(call.query, rows), _parts(call.key, columns), _parts(call.value, columns)
    lists = block_lists(plan.any_visible[0], plan.all_visible[0])
    blocks, B, _, N, _ = queries.shape
    dtype, lead = softmax_dtype(call.query), (B, N, rows)

    def row_of_blocks(run: Run, i: Index, results: tuple[Array, ...]) -> tuple[Array, ...]:
        q = queries[i]

        def visit(state: tuple, j: Index, masked: bool) -> tuple:
            add = functools.partial(_add_to_softmax, masked)
            return blocked_call.of_heads(add, 0, q, keys[j], values[j], state, i, j, masked)

        least = jnp.finfo(dtype).min  # not -inf, because -inf - -inf is NaN
        state = jnp.zeros((*lead, values.shape[-1]), dtype), jnp.full(lead, least, dtype), jnp.zeros(lead, dtype)
        acc, row_max, row_sum = fold_row(lists, i, visit, state, run)
        # The largest score adds 1 to row_sum, so only a row that sees nothing has a sum below 1.
        out = acc * (1.0 / jnp.maximum(row_sum, 1.0))[..., None]
        error = [rounding_error(out, call.value.dtype).astype(call.value.dtype)] if with_error else []
        of_row = (jnp.moveaxis(x, 1, 2) for x in (out.astype(call.value.dtype), row_max, row_sum, *error))
        return tuple(lax.dynamic_update_index_in_dim(x, y, i, 0) for x, y in zip(results, of_row, strict=True))

    by_row = jnp.zeros((blocks, B, rows, N), dtype)
    out = jnp.zeros((*by_row.shape, values.shape[-1]), call.value.dtype)
    results = _over_rows(row_of_blocks, _runs(platform, lists), (out, by_row, by_row, *[out] * with_error))
    out, row_max, row_sum, *error = (_join(x, call.query) for x in results)
    return out, row_max, row_sum, *error


def rounding_error(x: Float[Array, "*axes"], dtype: DTypeLike) -> Float[Array, "*axes"]:
    """The part of ``x`` lost when it is cast to ``dtype``."""
    info = jnp.finfo(dtype)  # not by casting there and back, which XLA removes
    return x - lax.reduce_precision(x, info.nexp, info.nmant)


def _add_to_softmax(
    masked: bool, blocked: BlockedHead, block: Block, acc: Array, row_max: Array, row_sum: Array
) -> tuple[Array, Array, Array]:
    """One head's ``acc``, ``row_max`` and ``row_sum``, updated with a block."""
    scores, v = blocked.scores(block, 0, 0, masked)
    # The old maximum is included in the reduction, so that both are one kernel.
    new_max = row_maximum(jnp.maximum(scores, row_max[:, None]))
    rescale, exponentials = jnp.exp(row_max - new_max), jnp.exp(scores - new_max[:, None])
    block_acc = blocked.product("qk,dk->qd", blocked.drop(exponentials, 0, 0), v)
    return acc * rescale[:, None] + block_acc, new_max, row_sum * rescale + jnp.sum(exponentials, axis=1)


def gradients(
    platform: str,
    call: Call,
    row_max: Float[Array, "B T N"],
    d_acc: Float[Array, "B T N D"],
    d_row_sum: Float[Array, "B T N"],
    plan: BlockPlan,
    of_row_max: bool = False,
) -> tuple[Array, Array, Array, *tuple[Array, ...]]:
    """The cotangents of query, key and value, given those of ``acc`` and ``row_sum``; ``plan`` as in ``forward``.

    ``of_row_max``: also return the cotangent of ``row_max``, the negative sum of a row's score gradients.
    """
    rows, columns = plan.size
    blocked_call = _blocked_call(platform, call, plan)
    dtype = softmax_dtype(call.query)
    row_max = jnp.where(row_max == -jnp.inf, 0.0, row_max).astype(dtype)
    by_row = [_parts(x, rows) for x in (call.query, row_max, d_acc, d_row_sum)]
    keys, values = (_parts(x, columns) for x in (call.key, call.value))
    lists = block_lists(plan.any_visible[0], plan.all_visible[0])

    def row_of_blocks(run: Run, i: Index, results: tuple[Array, ...]) -> tuple[Array, ...]:
        q, row_max, *cotangents = (x[i] for x in by_row)

        def softmax_sums(blocked: BlockedHead, block: Block, row_max: Array, masked: bool) -> tuple[Array, Array]:
            scores, v = blocked.scores(block, 0, 0, masked)
            return blocked.softmax_sums(scores, v, row_max, 0, 0)

        def visit(state: tuple, j: Index, masked: bool) -> tuple:
            d_q, d_k, d_v, *d_max = state
            one_head = functools.partial(softmax_sums, masked=masked)
            # In the softmax's dtype, in which the blocks' gradients are added up.
            qkv = [x.astype(dtype) for x in (q, keys[j], values[j])]

            def sums(q: Array, k: Array, v: Array, row_max: Array = row_max) -> tuple[Array, ...]:
                return blocked_call.of_heads(one_head, 1, q, k, v, [jnp.moveaxis(row_max, 2, 1)], i, j, masked)

            _, pull = jax.vjp(sums, *qkv, *[row_max] * of_row_max)
            from_q, from_k, from_v, *from_max = pull(tuple(cotangents))
            from_k, from_v = (jnp.moveaxis(x, 1, 2) for x in (from_k, from_v))
            d_max = [x + y for x, y in zip(d_max, from_max, strict=True)]
            return d_q + from_q, _add_at(d_k, j, from_k), _add_at(d_v, j, from_v), *d_max

        d_query, d_key, d_value, *d_row_max = results
        state = jnp.zeros(q.shape, dtype), d_key, d_value, *[jnp.zeros(row_max.shape, dtype)] * of_row_max
        d_q, d_key, d_value, *d_max = fold_row(lists, i, visit, state, run)
        rows = zip((d_query, *d_row_max), (d_q, *d_max), strict=True)
        d_query, *d_row_max = (lax.dynamic_update_index_in_dim(x, y.astype(x.dtype), i, 0) for x, y in rows)
        return d_query, d_key, d_value, *d_row_max

    # Heads come before columns, as in the products' results.
    zeros = (jnp.moveaxis(jnp.zeros(x.shape, dtype), 2, 3) for x in (keys, values))
    of_rows = [jnp.zeros_like(x) for x in by_row[: 1 + of_row_max]]
    results = _over_rows(row_of_blocks, _runs(platform, lists), (of_rows[0], *zeros, *of_rows[1:]))
    results = results[0], *(jnp.moveaxis(x, 2, 3) for x in results[1:3]), *results[3:]
    of = call.query, call.key, call.value, row_max
    return tuple(_join(x, like).astype(like.dtype) for x, like in zip(results, of, strict=False))  # type: ignore


def _runs(platform: str, lists: tuple[BlockList, BlockList]) -> list[Run]:
    """Runs of rows. The host of a GPU waits at every condition of a loop with an unknown number of iterations."""
    return runs_of_rows(lists) if platform in GPUS else [(0, lists[0].starts.shape[0] - 1)]


def _over_rows(row_of_blocks: Callable[[Run, Index, tuple], tuple], runs: Sequence[Run], results: tuple) -> tuple:
    """``results = row_of_blocks(run, i, results)`` for every row of blocks."""
    for run in runs:
        results = lax.fori_loop(*run, functools.partial(row_of_blocks, run), results)
    return results


@dataclasses.dataclass(frozen=True)
class _BlockedCall:
    """A call split into blocks of all heads at once."""

    platform: str
    call: Call  # bias and slot masks padded to whole blocks
    plan: BlockPlan
    query_positions: Array  # [blocks, B|1, rows]
    kv_positions: Array

    def of_heads(
        self,
        fn: Callable[Concatenate[BlockedHead, Block, ...], PyTree],
        out_axes: int,
        q: Array,
        k: Array,
        v: Array,
        per_head: Sequence[Array],
        i: Index,
        j: Index,
        masked: bool,
    ) -> tuple[Array, ...]:
        """``fn(blocked, block, *per_head)`` for one block of every head, as if the call had only that block.

        ``out_axes``, ``per_head``: as in ``over_call``.
        """

        def one_head(head: Call, *arrays: Array) -> PyTree:
            visible, full = np.ones((1, 1), bool), np.full((1, 1), not masked)
            one_block = BlockPlan(self.plan.size, visible, full, self.plan.all_seen)
            blocked = split_head(self.platform, head, one_block, differentiated=False)
            # Not taken from blocked: XLA for GPU transposes copies of arrays with an axis for the single block.
            qkv = head.query, head.key.swapaxes(0, 1), head.value.swapaxes(0, 1)
            q, k, v = (x.astype(blocked.dtype) for x in qkv)
            return fn(blocked, Block(q, k, v, blocked.arrays.bias), *arrays)

        block = dataclasses.replace(self._block(i, j, masked), query=q, key=k, value=v)
        return over_call(one_head, block, out_axes, per_head=per_head)

    def _block(self, i: Index, j: Index, masked: bool) -> Call:
        call, size = self.call, self.plan.size
        return dataclasses.replace(
            call,
            bias=None if call.bias is None else take_block(call.bias, i, j, size),
            slot_masks=tuple(take_block(x, i, j, size) for x in call.slot_masks) if masked else (),
            query_positions=self.query_positions[i],
            kv_positions=self.kv_positions[j],
        )


def _blocked_call(platform: str, call: Call, plan: BlockPlan) -> _BlockedCall:
    (T, S), (rows, columns) = (call.query.shape[1], call.key.shape[1]), plan.size
    query_positions, kv_positions = (
        _parts(jnp.arange(length)[None] if positions is None else jnp.asarray(positions), size, fill=None)
        for positions, length, size in ((call.query_positions, T, rows), (call.kv_positions, S, columns))
    )
    padded = dataclasses.replace(
        call,
        bias=None if call.bias is None else pad_to_blocks(call.bias, plan.size),
        slot_masks=tuple(pad_slot_masks(call.slot_masks, (T, S), plan.size, lead=(1, 1))),
    )
    return _BlockedCall(platform, padded, plan, query_positions, kv_positions)


def _parts(x: Array, size: int, fill: int | None = 0) -> Array:
    """``[B, T, ...] -> [blocks, B, rows, ...]``."""
    return jnp.moveaxis(split_axis(x, 1, size, fill), 1, 0)


def _join(parts: Array, like: Array) -> Array:
    """The inverse of ``_parts``, without its padding: the result has as many rows as ``like``."""
    return lax.collapse(jnp.moveaxis(parts, 0, 1), 1, 3)[:, : like.shape[1]]


def _add_at(x: Array, i: Index, y: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, x[i] + y, i, 0)
