"""Attention of one head in O(T + S) memory: the formulas of ``jattn.attention``, block by block.

The forward pass is an online softmax (https://arxiv.org/abs/1805.02867; https://arxiv.org/abs/2112.05682). With
``row_max`` the largest score of a row so far,

    acc = sum_kv exp(score - row_max) v      row_sum = sum_kv exp(score - row_max)      out = acc / row_sum

All derivatives come from one linear rule. For a fixed ``row_max`` both sums are plain sums over blocks, so their
tangents are the sums of the blocks' tangents, and ``d out = (d acc - out d row_sum) / row_sum``. The rule is a scan
over blocks that recomputes each block from its inputs. JAX transposes it into the backward pass, again block by block,
and differentiates it again for higher orders. Empty blocks are skipped and full blocks are computed without a mask
(``jattn.blocks``).

The functions of one head are plain functions, traced for a ``platform`` (``jattn.staged``). ``differentiable`` attaches
the rule to them, or to their lifting to many heads.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Float, Int

from jattn import staged
from jattn.attention import NAMES, Head, HeadOptions, hoisted, make_head, row_maximum, softmax_dtype
from jattn.blocks import all_seen, choose_blocks, split_axis, visible_blocks
from jattn.one_block import BlockedHead, BlockPlan, product_dtype, split_head


def blockwise(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S D"],
    *,
    head: ArrayLike | None = None,
    block_sizes: tuple[int, int] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """``jattn.attend``, with the same options and results, without ever holding a ``[T,S]`` array.

    Differentiable in forward and reverse mode, to any order, in ``q, k, v, bias, scale`` and every float array that
    ``score_mod`` captures. Memory stays O(T + S) throughout, under every remat policy. Under ``vmap`` over anything
    that the mask depends on, every block is computed; ``jattn.dot_product_attention`` decides outside of the vmap which
    blocks to skip.

    Args:
        block_sizes: queries and keys per block; ``jattn.blocks.choose_blocks`` sets the default. Changes no result
            beyond rounding.
    """
    checked_head = hoisted(make_head(q, k, v, head, **options), q, (q.shape[0], k.shape[0]))
    return differentiable(_forward, _accumulate, (q, k, v, checked_head), block_sizes)


def _forward(platform: str, qkv_and_head: tuple, block_sizes: Any) -> tuple[Array, Array, Array]:
    q, k, v, head = qkv_and_head
    return forward_head(platform, q, k, v, head, plan_head(platform, q, k, head, block_sizes, forward=True))


def _accumulate(platform: str, qkv_and_head: tuple, row_max: Array, block_sizes: Any) -> tuple[Array, Array]:
    q, k, v, head = qkv_and_head
    return accumulate_head(platform, q, k, v, head, plan_head(platform, q, k, head, block_sizes), row_max)


def plan_head(
    platform: str, q: Array, k: Array, head: Head, block_sizes: tuple[int, int] | None, *, forward: bool = False
) -> BlockPlan:
    """How to split a single head into blocks."""
    lengths = q.shape[0], k.shape[0]
    options = (head.masks, head.slot_masks, head.batch, head.head, head.query_positions, head.kv_positions, lengths)
    size, tables, pieces = choose_blocks(
        lambda size: visible_blocks(*options, size), *lengths, block_sizes, cuts=platform == "cpu", large_if_cut=forward
    )
    return BlockPlan(size, *tables, all_seen(*options), pieces)


def differentiable(
    forward: Callable,
    accumulate: Callable,
    args: Any,
    *static: Any,
    backward: Callable | None = None,
    alone: bool = False,
) -> tuple[Array, Array]:
    """``(out, lse)`` of one or many heads, with the derivative rule at the top of this file.

    Args:
        forward: ``(platform, args, *static) -> (out, row_max, row_sum)``: ``out`` in the value's dtype,
            ``[..., T, ..., D]``; the others ``[..., T, ...]``.
        accumulate: ``(platform, args, row_max, *static) -> (acc, row_sum)``, in the softmax's dtype.
        args: a pytree whose first three leaves are query, key and value.
        static: hashable.
        backward: ``(platform, (args, results, *static), cotangents) -> those of query, key and value``: the reverse
            derivative, written by hand, where nothing else is differentiated, or also there if ``not alone``.
            ``results``: what ``forward`` returned; ``cotangents``: of ``out``, in the softmax's dtype, and of
            ``row_sum`` (``of_sums``).
    """
    leaves, structure = jax.tree.flatten(args)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def unflatten(arrays: Any) -> Any:
        rest = iter(arrays)
        return structure.unflatten([next(rest) if array else x for x, array in zip(leaves, is_array, strict=True)])

    query, _, value = leaves[:3]
    dtype = softmax_dtype(query)
    rows = jax.ShapeDtypeStruct(query.shape[:-1], dtype)
    out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), value.dtype)
    change = jax.ShapeDtypeStruct(out.shape, dtype)
    linear: Any = _Change(accumulate)
    if backward is not None:
        linear = staged.ByHand(linear, vjp=backward, count=3, results=2, alone=alone)

    @jax.custom_jvp
    def compute(*arrays: Array) -> tuple[Array, Array, Array]:
        return staged.call(forward, unflatten(arrays), *static, out=(out, rows, rows))

    def rule(arrays: Any, input_tangents: Any) -> Any:
        z, row_max, row_sum = compute(*arrays)
        # With these names a remat policy can save everything that the rule needs besides the inputs.
        z, row_max, row_sum = checkpoint_name(z, NAMES[0]), *(checkpoint_name(x, NAMES[1]) for x in (row_max, row_sum))
        input_tangents = [
            None if isinstance(x, SymbolicZero) or x.dtype == jax.dtypes.float0 else x for x in input_tangents
        ]
        zeros = jnp.zeros_like(row_max)
        if all(x is None for x in input_tangents):
            return (z, row_max, row_sum), (jnp.zeros_like(z), zeros, zeros)
        rest = iter(input_tangents)
        tangents = [next(rest) if array else None for array in is_array]
        results = z, row_max, row_sum
        d_out, d_row_sum = staged.jvp(linear, (unflatten(arrays), results, *static), tangents, out=(change, rows))
        # The rule treats row_max as a constant: out and lse are the same for any value of it.
        return (z, row_max, row_sum), (d_out.astype(z.dtype), zeros, d_row_sum)

    compute.defjvp(rule, symbolic_zeros=True)
    z, row_max, row_sum = compute(*(x for x, array in zip(leaves, is_array, strict=True) if array))
    return z, log_sum_exp(row_max, row_sum)


@dataclasses.dataclass(frozen=True)
class _Change:
    """Has the tangents of ``out`` and ``row_sum``, for results that ``forward`` returned."""

    accumulate: Callable

    def __call__(self, platform: str, args: Any, results: Sequence[Array], *static: Any) -> tuple[Array, Array]:
        acc, row_sum = self.accumulate(platform, args, results[1], *static)
        return (acc - results[0].astype(acc.dtype) * row_sum[..., None]) * _inverse(results[2])[..., None], row_sum


def of_sums(results: Sequence[Array], cotangents: Sequence[Array | None]) -> tuple[Array, Array]:
    """The cotangents of ``acc`` and ``row_sum`` from those of ``out`` and ``row_sum``; None is zero."""
    out, _, row_sum = results
    d_out, d_row_sum = cotangents
    d_row_sum = jnp.zeros_like(row_sum) if d_row_sum is None else d_row_sum
    if d_out is None:
        return jnp.zeros(out.shape, row_sum.dtype), d_row_sum
    d_acc = d_out * _inverse(row_sum)[..., None]
    return d_acc, d_row_sum - (d_acc * out.astype(d_acc.dtype)).sum(-1)


def _inverse(row_sum: Array) -> Array:
    # Not maximum(row_sum, 1): at a row_sum of 1 that would halve second derivatives.
    return 1.0 / jnp.where(row_sum != 0.0, row_sum, 1.0)


def forward_head(
    platform: str, q: Array, k: Array, v: Array, head: Head, plan: BlockPlan
) -> tuple[Array, Array, Array]:
    """``out [T,D]``, ``row_max [T]`` and ``row_sum [T]``; ``lse = row_max + log(row_sum)``. Has no derivatives."""
    summed = platform == "tpu" and head.dropout is None and product_dtype(platform, q) != softmax_dtype(q)
    blocked = split_head(platform, q, k, v, head, plan, differentiated=False)
    out, row_max, row_sum = online_softmax(blocked, summed, v.dtype)
    return join_rows(out, q), join_rows(row_max, q), join_rows(row_sum, q)


def accumulate_head(
    platform: str, q: Array, k: Array, v: Array, head: Head, plan: BlockPlan, row_max: Array
) -> tuple[Array, Array]:
    """``acc [T,D]`` and ``row_sum [T]`` as at the top of this file, for any ``row_max [T]``.

    In the softmax's dtype; differentiable in all but ``row_max``, in linear memory. If ``row_max`` is the lse over a
    larger set of keys, the ``acc`` of all its subsets add up to the output, and their ``row_sum`` to 1.
    """
    blocked = split_head(platform, q, k, v, head, plan)
    dtype = blocked.arrays.q.dtype
    row_max = jax.lax.stop_gradient(row_max)
    row_max = split_axis(jnp.where(row_max == -jnp.inf, 0.0, row_max).astype(dtype), 0, plan.size[0])

    def visit(sums, i, j, masked, if_listed):
        block, block_max = blocked.take(i, j), row_max[i]

        nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums)

        def of_piece(piece):
            own_max = block_max if piece is None else block_max[piece[0]]
            return blocked.softmax_sums(*blocked.scores(block, i, j, masked, piece), own_max, i, j, piece)

        added = if_listed(lambda: blocked.by_piece(masked, of_piece, nothing), nothing)
        return jax.tree.map(lambda x, y: x.at[i].add(y), sums, added)

    zeros = jnp.zeros((*blocked.arrays.q.shape[:2], v.shape[1]), dtype), jnp.zeros_like(row_max)
    return tuple(join_rows(x, q) for x in scan_blocks(visit, zeros, blocked))  # type: ignore


def fold_head(
    platform: str,
    step: Callable[[Any, Array, Array, Array], Any],
    init: Any,
    q: Array,
    k: Array,
    head: Head,
    plan: BlockPlan,
    lse: Float[Array, " T"],
) -> Any:
    """``carry = step(carry, log_weights, q_idx, kv_idx)`` over the blocks of one head.

    ``log_weights`` is -inf where a weight is 0. Otherwise as ``jattn.fold_weights``.
    """
    blocked = split_head(platform, q, k, jnp.zeros((k.shape[0], 0), k.dtype), head, plan)
    rows, columns = blocked.size
    block_lse = split_axis(lse.astype(blocked.arrays.q.dtype), 0, rows)
    block_lse = jnp.where(block_lse == -jnp.inf, 0.0, block_lse)  # a row that sees nothing: exp(-inf - 0) = 0

    def visit(carry, i, j, masked, if_listed):
        block, row_lse = blocked.take(i, j), block_lse[i][:, None]

        def compute():
            scores = blocked.scores(block, i, j, masked)[0]
            log_weights = jnp.where(scores == -jnp.inf, scores, scores - row_lse)  # 0, also where the lse is NaN
            q_idx, kv_idx = i * rows + jnp.arange(rows, dtype=i.dtype), j * columns + jnp.arange(columns, dtype=j.dtype)
            return step(carry, log_weights, q_idx[:, None], kv_idx[None, :])

        return if_listed(compute, carry)

    return scan_blocks(visit, init, blocked)


def count_visible_head(platform: str, q: Array, k: Array, head: Head, plan: BlockPlan) -> Int[Array, " T"]:
    """The number of keys that each query of one head sees. Evaluates the mask in partial blocks only."""
    no_features = jnp.zeros((k.shape[0], 0), k.dtype)
    head = dataclasses.replace(head, scale=1.0)
    blocked = split_head(platform, q[:, :0], no_features, no_features, head, plan)

    def visit(counts, i, j, masked, if_listed):
        def compute():
            if not masked:
                return jnp.full(blocked.size[0], blocked.size[1], counts.dtype)
            return blocked.visible(i, j).sum(1, dtype=counts.dtype)

        return counts.at[i].add(if_listed(compute, jnp.zeros(blocked.size[0], counts.dtype)))

    return join_rows(scan_blocks(visit, jnp.zeros(blocked.arrays.q.shape[:2], jnp.int32), blocked), q)


def online_softmax(blocked: BlockedHead, summed: bool, out_dtype: Any) -> tuple[Array, Array, Array]:
    """``out [blocks, rows, D]``; ``row_max`` and ``row_sum [blocks, rows]``, in the softmax's dtype.

    ``summed``: the product with the values also computes ``row_sum``, with a column of ones appended to the values. XLA
    for TPU otherwise computes every exponential twice, once for ``row_sum`` and once inside the product.
    """
    rows, q, v, dtype = blocked.size[0], blocked.arrays.q, blocked.arrays.v, blocked.dtype

    def row_of_blocks(i):
        def visit(masked, column):
            def body(p, state):
                j = column(p)
                block = blocked.take(i, j, transposable=False)

                def of_piece(piece):
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

            return body

        # The least float instead of -inf, because -inf - -inf is NaN.
        state = (jnp.zeros((rows, v.shape[1] + summed), dtype), jnp.full(rows, jnp.finfo(dtype).min, dtype),
                 jnp.zeros(rows, dtype))  # fmt: skip
        for masked, blocks in ((False, blocked.full), (True, blocked.partial)):
            if blocks.row.shape[0] != 0:
                start, end, column = blocks.of_row(i)
                state = jax.lax.fori_loop(start, end, visit(masked, column), state)
        acc, row_max, row_sum = state
        if summed:
            acc, row_sum = acc[:, :-1], acc[:, -1]
        # The largest score adds 1 to row_sum, so only a row that sees nothing is below 1.
        return (acc * (1.0 / jnp.maximum(row_sum, 1.0))[:, None]).astype(out_dtype), row_max, row_sum

    return jax.lax.map(row_of_blocks, jnp.arange(q.shape[0], dtype=jnp.int32))


def scan_blocks(visit: Callable, carry: Any, blocked: BlockedHead) -> Any:
    """``carry = visit(carry, i, j, masked, if_listed)`` over all blocks that are not empty.

    ``if_listed(compute, otherwise)`` is ``compute()``, except past the end of a list whose length is known only at run
    time, where it is ``otherwise``. Slices of whole arrays are taken outside of it: inside a condition, their gradients
    would be allocated anew in every iteration. Differentiated, the loop saves no block.
    """
    for masked, blocks in ((False, blocked.full), (True, blocked.partial)):
        if blocks.row.shape[0] == 0:
            continue

        def body(carry, entry, masked=masked, blocks=blocks):
            p, i, j = entry

            def if_listed(compute, otherwise):
                return compute() if blocks.whole else jax.lax.cond(p < blocks.starts[-1], compute, lambda: otherwise)

            return visit(carry, i, j, masked, if_listed), None

        entries = (
            jnp.arange(blocks.row.shape[0], dtype=jnp.int32),
            jnp.asarray(blocks.row),
            jnp.asarray(blocks.column),
        )
        carry, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, entries)
    return carry


def join_rows(blocks: Array, q: Array) -> Array:
    """``[blocks, rows, ...] -> [T, ...]``."""
    return jax.lax.collapse(blocks, 0, 2)[: q.shape[0]]


def log_sum_exp(row_max: Array, row_sum: Array) -> Array:
    """``row_max + log(row_sum)``; -inf for a row that saw nothing."""
    seen = row_sum != 0.0
    lse = row_max + jnp.log(jnp.where(seen, row_sum, 1.0))  # 1, so that the derivative of the log is finite
    return jnp.where(seen, lse, -jnp.inf)
