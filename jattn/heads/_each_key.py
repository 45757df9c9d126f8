"""Sums the changes in a head's outputs from replacing each key alone, in O(T + S) memory.

A query has the output ``z``. Without one key, whose value is ``v``, its output is ``u`` and its log-sum-exp ``r``. So

    weight = sigmoid(score - r)      z = weight v + (1 - weight) u

and with another key in its place, only the weight changes: ``z' - z = (weight' - weight)(v - u)``. For all keys but the
largest, ``r = lse + log(1 - weight)`` and ``v - u = (v - z) / (1 - weight)``. For a key with nearly all the weight,
``1 - weight`` rounds to 0, so its ``u`` and ``r`` are computed from the other keys. A query has at most one such key,
so one more pass suffices. Source: https://arxiv.org/abs/2403.00745 (Kramár et al., AtP*), section 3.1.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from jattn._blocks.block import Block, BlockedHead, BlockPlan, split_head
from jattn._blocks.block_lists import Piece, split_axis
from jattn._blocks.online_softmax import join_rows, log_sum_exp, online_softmax, scan_blocks
from jattn._blocks.plan import BlockSizes, plan_call
from jattn._core import deferred
from jattn._core.arguments import make_call
from jattn._core.call import Call, softmax_dtype
from jattn._core.shard import on_each_device
from jattn._core.sinks import add_sinks
from jattn._core.vmap import canonical
from jattn._mods.arrays import Index
from jattn.kernels.blockwise import Blockwise

# A key with more weight is its query's largest. Not 1/2, because two weights of 1/2 may both round up.
LARGEST = 0.6


def replace_each(
    query: Array,
    key: Array,
    value: Array,
    z: Array,
    lse: Array,
    gate: Array,
    fill: Array,
    *,
    implementation: object = None,
    sinks: ArrayLike | None = None,
    **options: Any,
) -> Array:
    """``z + sum_s (1 - gate_s) (z with key s from fill - z)``; differentiable in z and the gate alone.

    Args:
        query, key, value, options: the arguments of the call that returned ``z`` and ``lse``.
        gate: ``[B|1,S|1,K]``; 0 replaces a key.
        fill: the keys to use instead, ``[B,S,K,H]``.
        implementation: only the block sizes of a ``Blockwise`` are used.
    """
    if z.ndim == 3:
        batched = (x[None] for x in (query, key, value, z, lse, gate, fill))
        return replace_each(*batched, implementation=implementation, sinks=sinks, **options)[0]
    if 0 in (*z.shape, key.shape[1]):
        return z
    dtype, (B, S, K), N = softmax_dtype(query), key.shape[:3], query.shape[2]
    off = jnp.broadcast_to(1 - gate, (B, S, K)).astype(dtype)
    off = jnp.repeat(jnp.swapaxes(off, 1, 2), N // K, 1)  # [B,N,S]
    # The replacement keys travel with the values, which blocks read by column.
    both = jnp.concatenate([value, fill.astype(value.dtype)], -1)
    call = canonical(dataclasses.replace(make_call(query, key, value, **options), value=both))
    sizes = implementation.block_sizes if isinstance(implementation, Blockwise) else None

    def change(call: Call, z: Array, lse: Array, off: Array, *sinks: Array) -> Array:
        types = jax.ShapeDtypeStruct(z.shape, dtype), jax.ShapeDtypeStruct(lse.shape, dtype)
        u, rest = deferred.call(_without_largest, call, lse, sizes, out=types)
        if sinks:
            u, rest = add_sinks(u, rest, sinks[0])
        return deferred.call(_change, call, (z, lse, u, rest), off, sizes, out=types[0])

    arrays = [(z.astype(dtype), "btnd"), (lse, "btn")] + ([] if sinks is None else [(jnp.asarray(sinks), "n")])
    # All but off is constant, so no derivative multiplies 0 by inf. NumPy arrays stay as they are, static.
    call, arrays = jax.tree.map(lambda x: jax.lax.stop_gradient(x) if isinstance(x, jax.Array) else x, (call, arrays))
    changed = on_each_device(change, call, "btnd", *arrays[:2], (off, "bns"), *arrays[2:])
    return (z.astype(dtype) + changed).astype(z.dtype)


def _without_largest(platform: str, call: Call, lse: Array, sizes: BlockSizes) -> tuple[Array, Array]:
    """``out [B,T,N,D]`` and ``lse [B,T,N]`` of every query without its largest key, in the softmax's dtype."""
    plan = plan_call(platform, call, sizes)
    D = call.value.shape[-1] - call.query.shape[-1]

    def one_head(head: Call, plan: BlockPlan, lse: Array) -> tuple[Array, Array]:
        blocked = split_head(platform, dataclasses.replace(head, value=head.value[:, :D]), plan)
        hidden = _WithoutLargest(**vars(blocked), lse=split_axis(lse, 0, plan.size[0]))
        out, row_max, row_sum = (join_rows(x, head.query) for x in online_softmax(hidden, False, blocked.dtype))
        return out, log_sum_exp(row_max, row_sum)

    return plan.over_heads(one_head, call, out_axes=1, per_head=[jnp.moveaxis(lse, 2, 1)])


@dataclasses.dataclass(frozen=True)
class _WithoutLargest(BlockedHead):
    lse: Array  # [blocks, rows]

    def scores(self, block: Block, i: Index, j: Index, masked: bool, piece: Piece | None = None) -> tuple[Array, Array]:
        scores, v = super().scores(block, i, j, masked, piece)
        lse = self.lse[i] if piece is None else self.lse[i][piece[0]]
        return jnp.where(scores - lse[:, None] > math.log(LARGEST), -jnp.inf, scores), v


def _change(platform: str, call: Call, by_query: tuple[Array, ...], off: Array, sizes: BlockSizes) -> Array:
    """The change of each output ``[B,T,N,D]``, linear in ``off [B,N,S]``.

    ``by_query``: outputs and log-sum-exps, with and without the largest key.
    """
    per_head, plan = [off, *(jnp.moveaxis(x, 2, 1) for x in by_query)], plan_call(platform, call, sizes)
    one_head = functools.partial(_change_of_head, platform)
    return plan.over_heads(one_head, call, out_axes=1, per_head=per_head, recompute=True)


def _change_of_head(platform: str, head: Call, plan: BlockPlan, off: Array, *by_query: Array) -> Float[Array, "T D"]:
    blocked = split_head(platform, head, plan)
    off_by_column = split_axis(off, 0, plan.size[1])
    by_row = [split_axis(x, 0, plan.size[0]) for x in by_query]
    D = by_query[0].shape[-1]

    def visit(changes: Array, i: Index, j: Index, masked: bool, if_listed: Callable[..., Array]) -> Array:
        block, off, (z, lse, u, rest) = blocked.take(i, j), off_by_column[j], (x[i] for x in by_row)

        def compute():
            scores, columns = blocked.scores(block, i, j, masked)
            v, fill = columns[:D], columns[D:]
            others, _ = blocked.scores(block._replace(k=fill), i, j, masked)
            by_weight, largest = _change_of_weights(scores, others, lse[:, None], rest[:, None])
            weighted = by_weight * off[None, :]
            of_values = blocked.product("qk,dk->qd", blocked.drop(weighted, i, j), v)
            from_u = jnp.where(largest, weighted, 0.0).sum(1, keepdims=True)
            from_z = jnp.where(largest, 0.0, weighted).sum(1, keepdims=True)
            return of_values - from_z * z - from_u * u

        return changes.at[i].add(if_listed(compute, jnp.zeros_like(z)))

    return join_rows(scan_blocks(visit, jnp.zeros_like(by_row[0]), blocked), head.query)


def _change_of_weights(scores: Array, others: Array, lse: Array, rest: Array) -> tuple[Array, Array]:
    """``(weight' - weight) / (1 - weight)``, or ``weight' - weight`` for the largest key; and which pairs have it."""
    weights = jnp.where(scores == -jnp.inf, 0.0, jnp.exp(scores - lse))
    largest = weights > LARGEST
    rest = jnp.where(largest, rest, lse + jnp.log1p(-jnp.where(largest, 0.0, weights)))
    # For the largest, the difference of what both leave to the other keys: exact where both are nearly everything.
    left = jnp.where(others == -jnp.inf, 1.0, jax.nn.sigmoid(rest - others))
    of_largest = jax.nn.sigmoid(rest - scores) - left
    others = jnp.where(others == -jnp.inf, 0.0, jax.nn.sigmoid(others - rest))
    return jnp.where(largest, of_largest, (others - weights) / (1 - jnp.where(largest, 0.0, weights))), largest
