"""Attention of one head in O(T + S) memory: the formulas of ``jattn.attention``, block by block.

Values by online softmax (https://arxiv.org/abs/1805.02867; https://arxiv.org/abs/2112.05682): with ``high`` the largest
score of a row seen so far,

    numerator = sum_kv exp(score - high) v      total = sum_kv exp(score - high)      out = numerator / total

All derivatives come from one linear rule. For fixed ``high`` both sums are plain sums over blocks, so their tangents
are the sums of the blocks' tangents, and ``d out = (d numerator - out d total) / total``. The rule is a scan over the
blocks that recomputes each from its inputs; JAX transposes it into the backward pass, again block by block, and
differentiates it again for higher orders. Empty blocks are skipped, full ones computed without a mask (``blocks``).

The functions of one head are plain, and are traced for a ``platform`` (``staged``); ``differentiable`` gives them, or
what lifts them to many heads, that rule.
"""

from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Float, Int

from jattn import staged
from jattn.attention import NAMES, Head, HeadOptions, hoisted, make_head, row_maximum, softmax_dtype
from jattn.blocks import all_seen, choose_blocks, cut, visible_blocks
from jattn.head_blocks import Cut, Formula, cut_head


def attend(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S D"],
    *,
    head: ArrayLike | None = None,
    block_sizes: tuple[int, int] | None = None,
    **options: Unpack[HeadOptions],
) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """``jattn.attend``, the same options and results, without ever holding a ``[T,S]`` array.

    Differentiable in forward and reverse mode, to any order, in ``q, k, v, bias, scale`` and every float array that
    ``score_mod`` captures; memory stays O(T + S) throughout, under every remat policy too. Under ``vmap`` over
    something that the mask depends on, every block is computed; ``jattn.dot_product_attention`` decides what to skip
    outside of it.

    Args:
        block_sizes: queries and keys of a block; ``jattn.blocks.choose_blocks`` has the default. Changes no result
            beyond rounding.
    """
    options_of_head = hoisted(make_head(q, k, v, head, **options), q, (q.shape[0], k.shape[0]))
    return differentiable(_one_head, _sums_of_one_head, (q, k, v, options_of_head), block_sizes)


def _one_head(platform: str, floats_and_head: tuple, block_sizes: Any) -> tuple[Array, Array, Array]:
    q, k, v, head = floats_and_head
    return values(platform, q, k, v, head, choose_cut(q, k, head, block_sizes))


def _sums_of_one_head(platform: str, floats_and_head: tuple, high: Array, block_sizes: Any) -> tuple[Array, Array]:
    q, k, v, head = floats_and_head
    return sums(platform, q, k, v, head, choose_cut(q, k, head, block_sizes), high)


def choose_cut(q: Array, k: Array, head: Head, block_sizes: tuple[int, int] | None) -> Cut:
    """How one head by itself is cut."""
    lengths = q.shape[0], k.shape[0]
    asked = (head.masks, head.slot_masks, head.batch, head.head, head.query_positions, head.kv_positions, lengths)
    size, table = choose_blocks(lambda size: visible_blocks(*asked, size), *lengths, block_sizes)
    return Cut(size, *table, all_seen(*asked))


def differentiable(values: Callable, sums: Callable, args: Any, *static: Any) -> tuple[Array, Array]:
    """``(out, lse)`` of one or many heads, with the derivatives of the rule at the top of this file.

    Args:
        values: ``(platform, args, *static) -> (out, high, total)``: ``out`` in the value's dtype, ``[..., T, ..., D]``,
            the others ``[..., T, ...]``.
        sums: ``(platform, args, high, *static) -> (numerator, total)``, in the softmax's dtype.
        args: a pytree whose first three leaves are query, key and value.
        static: hashable.
    """
    leaves, structure = jax.tree.flatten(args)
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]

    def joined(arrays: Any) -> Any:
        rest = iter(arrays)
        return structure.unflatten([next(rest) if array else x for x, array in zip(leaves, is_array, strict=True)])

    query, _, value = leaves[:3]
    dtype = softmax_dtype(query)
    rows = jax.ShapeDtypeStruct(query.shape[:-1], dtype)
    out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), value.dtype)
    numerator = jax.ShapeDtypeStruct(out.shape, dtype)

    @jax.custom_jvp
    def compute(*arrays: Array) -> tuple[Array, Array, Array]:
        return staged.call(values, joined(arrays), *static, out=(out, rows, rows))

    def rule(arrays: Any, changes: Any) -> Any:
        z, high, total = compute(*arrays)
        # by these names a remat policy can keep all that the rule needs beside the inputs
        z, high, total = checkpoint_name(z, NAMES[0]), *(checkpoint_name(x, NAMES[1]) for x in (high, total))
        changes = [None if isinstance(x, SymbolicZero) or x.dtype == jax.dtypes.float0 else x for x in changes]
        zeros = jnp.zeros_like(high)
        if all(x is None for x in changes):
            return (z, high, total), (jnp.zeros_like(z), zeros, zeros)
        rest = iter(changes)
        tangents = [next(rest) if array else None for array in is_array]
        d_numerator, d_total = staged.jvp(sums, (joined(arrays), high, *static), tangents, out=(numerator, rows))
        # no maximum with 1: at a total of 1 it would halve second derivatives
        share = 1.0 / jnp.where(total != 0.0, total, 1.0)
        d_out = (d_numerator - z.astype(dtype) * d_total[..., None]) * share[..., None]
        # high is no function of the inputs as far as the rule goes: any constant gives the same out and lse
        return (z, high, total), (d_out.astype(z.dtype), zeros, d_total)

    compute.defjvp(rule, symbolic_zeros=True)
    z, high, total = compute(*(x for x, array in zip(leaves, is_array, strict=True) if array))
    return z, log_sum_exp(high, total)


def values(platform: str, q: Array, k: Array, v: Array, head: Head, how: Cut) -> tuple[Array, Array, Array]:
    """``out [T,D]``; ``high`` and ``total [T]``: ``lse = high + log(total)``. Without derivatives."""
    formula = cut_head(platform, q, k, v, head, how)
    out, high, total = _blocks_of_values(formula)
    return _rows(out, q).astype(v.dtype), _rows(high, q), _rows(total, q)


def sums(platform: str, q: Array, k: Array, v: Array, head: Head, how: Cut, high: Array) -> tuple[Array, Array]:
    """``numerator [T,D]`` and ``total [T]`` as at the top of this file, for any ``high [T]``.

    In the softmax's dtype; differentiable in all but ``high``, in linear memory. With the lse of a row over more keys
    than these as ``high``, the numerators of all shares of the keys add up to its output, and the totals to 1.
    """
    formula = cut_head(platform, q, k, v, head, how)
    dtype = formula.arrays.q.dtype
    high = jax.lax.stop_gradient(high)
    high = cut(jnp.where(high == -jnp.inf, 0.0, high).astype(dtype), 0, how.size[0])

    def visit(sums, i, j, masked, where_it_counts):
        block, row_high = formula.take(i, j), high[i]

        def of_block():
            return formula.sums(*formula.scores(block, i, j, masked), row_high, i, j)

        added = where_it_counts(of_block, jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums))
        return jax.tree.map(lambda x, y: x.at[i].add(y), sums, added)

    zeros = jnp.zeros((*formula.arrays.q.shape[:2], v.shape[1]), dtype), jnp.zeros_like(high)
    return tuple(_rows(x, q) for x in _over_blocks(visit, zeros, formula))  # type: ignore


def fold(
    platform: str,
    step: Callable[[Any, Array, Array, Array], Any],
    init: Any,
    q: Array,
    k: Array,
    head: Head,
    how: Cut,
    lse: Float[Array, " T"],
) -> Any:
    """``carry = step(carry, logs, q_idx, kv_idx)`` over the blocks of the logarithms of one head's weights.

    -inf where a weight is 0; otherwise as ``jattn.fold_weights``.
    """
    formula = cut_head(platform, q, k, jnp.zeros((k.shape[0], 0), k.dtype), head, how)
    rows, columns = formula.size
    known = cut(lse.astype(formula.arrays.q.dtype), 0, rows)
    known = jnp.where(known == -jnp.inf, 0.0, known)  # a row that sees nothing: exp(-inf - 0) = 0

    def visit(carry, i, j, masked, where_it_counts):
        block, row_lse = formula.take(i, j), known[i][:, None]

        def of_block():
            logs = formula.scores(block, i, j, masked)[0] - row_lse
            q_idx, kv_idx = i * rows + jnp.arange(rows, dtype=i.dtype), j * columns + jnp.arange(columns, dtype=j.dtype)
            return step(carry, logs, q_idx[:, None], kv_idx[None, :])

        return where_it_counts(of_block, carry)

    return _over_blocks(visit, init, formula)


def count_visible(platform: str, q: Array, k: Array, head: Head, how: Cut) -> Int[Array, " T"]:
    """How many keys each query of one head sees: only blocks that the mask cuts through are computed."""
    no_scores = jnp.zeros((k.shape[0], 0), k.dtype)
    formula = cut_head(platform, q[:, :0], no_scores, no_scores, head, how)

    def visit(counts, i, j, masked, where_it_counts):
        def of_block():
            if not masked:
                return jnp.full(formula.size[0], formula.size[1], counts.dtype)
            return formula.visible(i, j).sum(1, dtype=counts.dtype)

        return counts.at[i].add(where_it_counts(of_block, jnp.zeros(formula.size[0], counts.dtype)))

    return _rows(_over_blocks(visit, jnp.zeros(formula.arrays.q.shape[:2], jnp.int32), formula), q)


def _blocks_of_values(formula: Formula) -> tuple[Array, Array, Array]:
    """``out [blocks, rows, D]``; ``high`` and ``total [blocks, rows]``."""
    rows, q, v = formula.size[0], formula.arrays.q, formula.arrays.v

    def of_row(i):
        def visit(masked, column):
            def body(p, sums):
                numerator, high, total = sums
                j = column[p]
                scores, v = formula.scores(formula.take(i, j), i, j, masked)
                higher = jnp.maximum(high, row_maximum(scores))
                shrink = jnp.exp(high - higher)
                new_numerator, new_total = formula.sums(scores, v, higher, i, j)
                return numerator * shrink[:, None] + new_numerator, higher, total * shrink + new_total

            return body

        # the least float and not -inf, because -inf - -inf is NaN
        sums = (jnp.zeros((rows, v.shape[1]), q.dtype), jnp.full(rows, jnp.finfo(q.dtype).min, q.dtype),
                jnp.zeros(rows, q.dtype))  # fmt: skip
        for masked, blocks in ((False, formula.full), (True, formula.mixed)):
            if blocks.row.shape[0] != 0:
                starts, column = jnp.asarray(blocks.starts), jnp.asarray(blocks.column)
                sums = jax.lax.fori_loop(starts[i], starts[i + 1], visit(masked, column), sums)
        numerator, high, total = sums
        # the largest score adds 1 to the total, so below 1 there is nothing but a row that sees nothing
        return numerator * (1.0 / jnp.maximum(total, 1.0))[:, None], high, total

    return jax.lax.map(of_row, jnp.arange(q.shape[0]))


def _over_blocks(visit: Callable, carry: Any, formula: Formula) -> Any:
    """``carry = visit(carry, i, j, masked, where_it_counts)`` over all blocks that are not empty.

    ``where_it_counts(compute, otherwise)`` is ``compute()``, or in a list whose length is known only when it runs and
    behind its end, ``otherwise``. What is read from whole arrays is read outside of it: a condition would make their
    gradients anew at every turn. Differentiated, the loop keeps no block.
    """
    for masked, blocks in ((False, formula.full), (True, formula.mixed)):
        if blocks.row.shape[0] == 0:
            continue

        def body(carry, entry, masked=masked, blocks=blocks):
            p, i, j = entry

            def where_it_counts(compute, otherwise):
                return compute() if blocks.whole else jax.lax.cond(p < blocks.starts[-1], compute, lambda: otherwise)

            return visit(carry, i, j, masked, where_it_counts), None

        entries = (jnp.arange(blocks.row.shape[0]), jnp.asarray(blocks.row), jnp.asarray(blocks.column))
        carry, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), carry, entries)
    return carry


def _rows(blocks: Array, q: Array) -> Array:
    """``[blocks, rows, ...] -> [T, ...]``."""
    return jax.lax.collapse(blocks, 0, 2)[: q.shape[0]]


def log_sum_exp(high: Array, total: Array) -> Array:
    """``high + log(total)``, -inf where nothing was seen."""
    seen = total != 0.0
    lse = high + jnp.log(jnp.where(seen, total, 1.0))  # 1, so that the derivative of the log is finite
    return jnp.where(seen, lse, -jnp.inf)
