"""Attention of one head in O(T + S) memory: the formulas of ``jattn.attention``, block by block.

Values by online softmax (https://arxiv.org/abs/1805.02867; https://arxiv.org/abs/2112.05682): with ``high`` the largest
score of a row seen so far,

    numerator = sum_kv exp(score - high) v      total = sum_kv exp(score - high)      out = numerator / total

All derivatives come from one linear rule. For fixed ``high`` both sums are plain sums over blocks, so their tangents
are the sums of the blocks' tangents, and ``d out = (d numerator - out d total) / total``. The rule is a scan over the
blocks that recomputes each from its inputs; JAX transposes it into the backward pass, again block by block, and
differentiates it again for higher orders. Empty blocks are skipped, full ones computed without a mask (``blocks``).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, Int

from jattn.attention import Dropout, MaskLike, row_maximum, softmax_dtype
from jattn.blocks import cut
from jattn.head_blocks import Arrays, Fixed, Formula, cut_head, take
from jattn.score_mods import ScoreMod


def attend(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S D"],
    *,
    mask: MaskLike | None = None,
    bias: Float[Array, "#T #S"] | None = None,
    score_mod: ScoreMod | None = None,
    scale: ArrayLike | None = None,
    batch: ArrayLike = 0,
    head: ArrayLike = 0,
    query_positions: Int[ArrayLike, " T"] | None = None,
    kv_positions: Int[ArrayLike, " S"] | None = None,
    dropout: Dropout | tuple[float, Array] | None = None,
    precision: Any = None,
    block_sizes: tuple[int, int] | None = None,
    visible: tuple[Any, Any, bool] | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """``jattn.attend``, the same arguments and results, without ever holding a ``[T,S]`` array.

    Differentiable in forward and reverse mode, to any order, in ``q, k, v, bias, scale`` and every float array that
    ``score_mod`` captures; memory stays O(T + S) throughout. Under ``vmap`` over something that the mask depends on,
    every block is computed; ``jattn.dot_product_attention`` decides what to skip outside of it.

    Args:
        block_sizes: queries and keys of a block; ``jattn.blocks.choose_blocks`` has the default. Changes no result
            beyond rounding.
        visible: ``(may, must)`` of all blocks of that size and ``all_seen``, where they are known (``jattn.blocks``).
    """
    head_inputs = (q, k, v, mask, bias, score_mod, scale, batch, head, query_positions, kv_positions)
    formula, arrays, fixed = cut_head(*head_inputs, dropout, precision, block_sizes, visible)
    out, high, total = _values(formula, arrays, fixed)
    out = jax.lax.collapse(out, 0, 2)[: q.shape[0]].astype(v.dtype)
    return out, _lse(high, total).reshape(-1)[: q.shape[0]]


def fold(
    step: Callable[[Any, Array, Array, Array], Any],
    init: Any,
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    *,
    lse: Float[Array, " T"] | None = None,
    mask: MaskLike | None = None,
    bias: Float[Array, "#T #S"] | None = None,
    score_mod: ScoreMod | None = None,
    scale: ArrayLike | None = None,
    batch: ArrayLike = 0,
    head: ArrayLike = 0,
    query_positions: Int[ArrayLike, " T"] | None = None,
    kv_positions: Int[ArrayLike, " S"] | None = None,
    precision: Any = None,
    block_sizes: tuple[int, int] | None = None,
    visible: tuple[Any, Any, bool] | None = None,
) -> Any:
    """``carry = step(carry, logs, q_idx, kv_idx)`` over the blocks of the logarithms of one head's weights.

    -inf where a weight is 0; otherwise as ``jattn.fold_weights``.
    """
    v = jnp.zeros((k.shape[0], 0), k.dtype)
    head_inputs = (q, k, v, mask, bias, score_mod, scale, batch, head, query_positions, kv_positions)
    formula, arrays, fixed = cut_head(*head_inputs, None, precision, block_sizes, visible)
    rows, columns = formula.size
    known = _lse(*_values(formula, arrays, fixed)[1:]) if lse is None else cut(lse.astype(arrays.q.dtype), 0, rows)
    known = jnp.where(known == -jnp.inf, 0.0, known)  # a row that sees nothing: exp(-inf - 0) = 0

    def visit(carry, i, j, masked, where_it_counts):
        block, row_lse = take(arrays, i, j), known[i][:, None]

        def of_block():
            logs = formula.scores(block, fixed, i, j, masked)[0] - row_lse
            q_idx, kv_idx = i * rows + jnp.arange(rows, dtype=i.dtype), j * columns + jnp.arange(columns, dtype=j.dtype)
            return step(carry, logs, q_idx[:, None], kv_idx[None, :])

        return where_it_counts(of_block, carry)

    return _over_blocks(visit, init, fixed)


def sums(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S D"],
    *,
    high: Float[Array, " T"],
    mask: MaskLike | None = None,
    bias: Float[Array, "#T #S"] | None = None,
    score_mod: ScoreMod | None = None,
    scale: ArrayLike | None = None,
    batch: ArrayLike = 0,
    head: ArrayLike = 0,
    query_positions: Int[ArrayLike, " T"] | None = None,
    kv_positions: Int[ArrayLike, " S"] | None = None,
    dropout: Dropout | tuple[float, Array] | None = None,
    precision: Any = None,
    block_sizes: tuple[int, int] | None = None,
    visible: tuple[Any, Any, bool] | None = None,
) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """``numerator [T,D]`` and ``total [T]`` as at the top of this file, of one head, for any ``high [T]``.

    In the softmax's dtype; differentiable in all but ``high``, in linear memory. With the lse of a row over more keys
    than these as ``high``, the numerators of all shares of the keys add up to its output, and the totals to 1.
    """
    head_inputs = (q, k, v, mask, bias, score_mod, scale, batch, head, query_positions, kv_positions)
    formula, arrays, fixed = cut_head(*head_inputs, dropout, precision, block_sizes, visible)
    high = cut(jnp.where(high == -jnp.inf, 0.0, high).astype(arrays.q.dtype), 0, formula.size[0])

    def visit(sums, i, j, masked, where_it_counts):
        block, row_high = take(arrays, i, j), high[i]

        def of_block():
            return formula.sums(*formula.scores(block, fixed, i, j, masked), row_high, fixed, i, j)

        added = where_it_counts(of_block, jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums))
        return jax.tree.map(lambda x, y: x.at[i].add(y), sums, added)

    zeros = jnp.zeros((*arrays.q.shape[:2], v.shape[1]), arrays.q.dtype), jnp.zeros_like(high)
    found = _over_blocks(visit, zeros, fixed)
    return tuple(jax.lax.collapse(x, 0, 2)[: q.shape[0]] for x in found)  # type: ignore


def count_visible(q: Array, k: Array, *, block_sizes=None, visible=None, **options: Any) -> Int[Array, " T"]:
    """How many keys each query of one head sees: only blocks that the mask cuts through are computed.

    Arguments as in ``attend``; of ``q [T,H]`` and ``k [S,H]`` only the lengths matter.
    """
    T, dtype = q.shape[0], softmax_dtype(q)
    q, k = jnp.zeros((T, 1), dtype), jnp.zeros((k.shape[0], 1), dtype)
    batch, head = options.get("batch", 0), options.get("head", 0)
    q_positions, kv_positions = options.get("query_positions"), options.get("kv_positions")
    head_inputs = (q, k, k, options.get("mask"), None, None, None, batch, head, q_positions, kv_positions)
    formula, arrays, fixed = cut_head(*head_inputs, None, None, block_sizes, visible)

    def visit(counts, i, j, masked, where_it_counts):
        def of_block():
            if not masked:
                return jnp.full(formula.size[0], formula.size[1], counts.dtype)
            return formula.visible(fixed, i, j).sum(1, dtype=counts.dtype)

        return counts.at[i].add(where_it_counts(of_block, jnp.zeros(formula.size[0], counts.dtype)))

    counts = jnp.zeros(arrays.q.shape[:2], jnp.int32)
    return _over_blocks(visit, counts, fixed).reshape(-1)[:T]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _values(formula: Formula, arrays: Arrays, fixed: Fixed) -> tuple[Array, Array, Array]:
    """``out [blocks, rows, D]``; ``high`` and ``total [blocks, rows]``: ``lse = high + log(total)``."""
    rows, dtype = formula.size[0], arrays.q.dtype

    def of_row(i):
        def visit(masked, column):
            def body(p, sums):
                numerator, high, total = sums
                j = column[p]
                scores, v = formula.scores(take(arrays, i, j), fixed, i, j, masked)
                higher = jnp.maximum(high, row_maximum(scores))
                shrink = jnp.exp(high - higher)
                new_numerator, new_total = formula.sums(scores, v, higher, fixed, i, j)
                return numerator * shrink[:, None] + new_numerator, higher, total * shrink + new_total

            return body

        # the least float and not -inf, because -inf - -inf is NaN
        sums = (jnp.zeros((rows, arrays.v.shape[1]), dtype), jnp.full(rows, jnp.finfo(dtype).min, dtype),
                jnp.zeros(rows, dtype))  # fmt: skip
        for masked, blocks in ((False, fixed.full), (True, fixed.mixed)):
            if blocks.row.shape[0]:
                starts, column = jnp.asarray(blocks.starts), jnp.asarray(blocks.column)
                sums = jax.lax.fori_loop(starts[i], starts[i + 1], visit(masked, column), sums)
        numerator, high, total = sums
        # the largest score adds 1 to the total, so below 1 there is nothing but a row that sees nothing
        return numerator * (1.0 / jnp.maximum(total, 1.0))[:, None], high, total

    return jax.lax.map(of_row, jnp.arange(arrays.q.shape[0]))


@_values.defjvp
def _values_rule(formula, primals, tangents):
    (arrays, fixed), (change, _) = primals, tangents
    out, high, total = _values(formula, arrays, fixed)

    def visit(sums, i, j, masked, where_it_counts):
        block, block_change, row_high = take(arrays, i, j), take(change, i, j), high[i]

        def of_block(block):
            return formula.sums(*formula.scores(block, fixed, i, j, masked), row_high, fixed, i, j)

        changes = where_it_counts(
            lambda: jax.jvp(of_block, (block,), (block_change,))[1], jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums)
        )
        return jax.tree.map(lambda x, y: x.at[i].add(y), sums, changes)

    numerator, total_change = _over_blocks(visit, (jnp.zeros_like(out), jnp.zeros_like(total)), fixed)
    share = 1.0 / jnp.where(total != 0.0, total, 1.0)  # no maximum: at a total of 1 it would halve second derivatives
    # high is no function of the inputs as far as the rule goes: any constant gives the same out and lse
    return (out, high, total), (
        (numerator - out * total_change[..., None]) * share[..., None],
        jnp.zeros_like(high),
        total_change,
    )


def _over_blocks(visit: Callable, carry: Any, fixed: Fixed) -> Any:
    """``carry = visit(carry, i, j, masked, where_it_counts)`` over all blocks that are not empty.

    ``where_it_counts(compute, otherwise)`` is ``compute()``, or in a list whose length is known only when it runs and
    behind its end, ``otherwise``. What is read from whole arrays is read outside of it: a condition would make their
    gradients anew at every turn. Differentiated, the loop keeps no block.
    """
    for masked, blocks in ((False, fixed.full), (True, fixed.mixed)):
        if not blocks.row.shape[0]:
            continue

        def body(carry, entry, masked=masked, blocks=blocks):
            p, i, j = entry

            def where_it_counts(compute, otherwise):
                return compute() if blocks.whole else jax.lax.cond(p < blocks.starts[-1], compute, lambda: otherwise)

            return visit(carry, i, j, masked, where_it_counts), None

        entries = (jnp.arange(blocks.row.shape[0]), jnp.asarray(blocks.row), jnp.asarray(blocks.column))
        carry, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, entries)
    return carry


def _lse(high: Array, total: Array) -> Array:
    seen = total != 0.0
    lse = high + jnp.log(jnp.where(seen, total, 1.0))  # 1, so that the derivative of the log is finite
    return jnp.where(seen, lse, -jnp.inf)
