"""The gradients of blockwise attention in query, key and value, block by block, with all heads in each step.

``jax.vjp`` of ``jattn.online_softmax`` gives the same numbers. It transposes a loop over the full blocks and another
over the partial ones, each with gradient arrays of its own, and every head's slice of those with a scatter. Here there
is one set of arrays, in the softmax's dtype, which both loops add to, and the gradient of a row of queries is complete
when the next row starts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from jattn.attention import softmax_dtype
from jattn.batching import over_request
from jattn.blocks import block_lists, split_axis
from jattn.one_block import BlockPlan, pad_to_blocks, split_head, take_block
from jattn.request import Request


def gradients(
    platform: str,
    request: Request,
    row_max: Float[Array, "B T N"],
    d_acc: Float[Array, "B T N D"],
    d_row_sum: Float[Array, "B T N"],
    plan: BlockPlan,
) -> tuple[Array, Array, Array]:
    """The cotangents of query, key and value from those of ``acc`` and ``row_sum``.

    ``plan``: of a single table, ``[1, blocks of T, blocks of S]``, for all sequences.
    """
    (T, S), (rows, columns) = (request.query.shape[1], request.key.shape[1]), plan.size
    slot_masks = list(request.slot_masks)
    if T % rows != 0:
        slot_masks.append(jnp.ones((1, 1, T, 1), bool))
    if S % columns != 0:
        slot_masks.append(jnp.ones((1, 1, 1, S), bool))
    slot_masks = [pad_to_blocks(jnp.asarray(x), plan.size) for x in slot_masks]
    bias = None if request.bias is None else pad_to_blocks(request.bias, plan.size)
    q_positions, kv_positions = (
        _parts(jnp.arange(length)[None] if positions is None else jnp.asarray(positions), size, fill=None)
        for positions, length, size in ((request.query_positions, T, rows), (request.kv_positions, S, columns))
    )
    dtype = softmax_dtype(request.query)
    row_max = jnp.where(row_max == -jnp.inf, 0.0, row_max).astype(dtype)
    by_row = [_parts(x, rows) for x in (request.query, row_max, d_acc, d_row_sum)]
    keys, values = (_parts(x, columns) for x in (request.key, request.value))

    def block_sums(q, k, v, row_max, i, j, masked):
        """``acc`` and ``row_sum`` of one block of all heads, as of a request with a single block."""

        def one_head(q, k, v, head, row_max):
            one_block = BlockPlan(plan.size, np.ones((1, 1), bool), np.full((1, 1), not masked), plan.all_seen)
            blocked = split_head(platform, q, k, v, head, one_block)
            scores, v = blocked.scores(blocked.take(0, 0), 0, 0, masked)
            return blocked.softmax_sums(scores, v, row_max, 0, 0)

        block = dataclasses.replace(
            request,
            query=q,
            key=k,
            value=v,
            bias=None if bias is None else take_block(bias, i, j, plan.size),
            slot_masks=tuple(take_block(x, i, j, plan.size) for x in slot_masks) if masked else (),
            query_positions=q_positions[i],
            kv_positions=kv_positions[j],
        )
        return over_request(one_head, block, out_axes=1, per_head=[jnp.moveaxis(row_max, 2, 1)])

    lists = block_lists(plan.any_visible[0], plan.all_visible[0])

    def row_of_blocks(sums, row):
        i, q, row_max, *cotangents = row

        def visit(masked, column):
            def body(p, state):
                d_q, d_k, d_v = state
                j = column(p)
                # In the softmax's dtype, so that the blocks' gradients are added up in it.
                qkv = [x.astype(dtype) for x in (q, keys[j], values[j])]
                _, pull = jax.vjp(lambda q, k, v: block_sums(q, k, v, row_max, i, j, masked), *qkv)
                from_q, from_k, from_v = pull(tuple(cotangents))
                return d_q + from_q, _add_at(d_k, j, from_k), _add_at(d_v, j, from_v)

            return body

        state = jnp.zeros(q.shape, dtype), *sums
        for masked, blocks in zip((False, True), lists, strict=True):
            if blocks.row.shape[0] != 0:
                start, end, column = blocks.of_row(i)
                state = lax.fori_loop(start, end, visit(masked, column), state)
        d_q, *sums = state
        return tuple(sums), d_q.astype(request.query.dtype)

    zeros = tuple(jnp.zeros(x.shape, dtype) for x in (keys, values))
    sums, d_q = lax.scan(row_of_blocks, zeros, (jnp.arange(q_positions.shape[0], dtype=jnp.int32), *by_row))
    d_k, d_v = sums
    return _join(d_q, request.query), _join(d_k, request.key), _join(d_v, request.value)


def _parts(x: Array, size: int, fill: Any = 0) -> Array:
    """``[B, T, ...] -> [blocks, B, rows, ...]``."""
    return jnp.moveaxis(split_axis(x, 1, size, fill), 1, 0)


def _join(parts: Array, like: Array) -> Array:
    """``_parts`` undone, without its padding and in the dtype of ``like``."""
    return lax.collapse(jnp.moveaxis(parts, 0, 1), 1, 3)[:, : like.shape[1]].astype(like.dtype)


def _add_at(x: Array, i: Array, y: Array) -> Array:
    return lax.dynamic_update_index_in_dim(x, x[i] + y, i, 0)
