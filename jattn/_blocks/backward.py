"""The derivatives of blockwise attention, in linear memory, on every platform and to any order.

They all follow from one linear rule. For a fixed ``row_max``, both sums of ``online_softmax``, ``acc`` and ``row_sum``,
are plain sums over blocks, so their tangents are sums of the blocks' tangents, and
``d out = (d acc - out d row_sum) / row_sum``. The rule is a scan over blocks that recomputes each block from its inputs
(``accumulate``). JAX transposes it into the backward pass, again block by block, and differentiates it again for higher
orders. JAX thus computes the derivatives of score functions and mask arrays by differentiating ``BlockedHead.scores``.

On a single accelerator, ``jattn._blocks.all_heads`` computes the cotangents of query, key and value.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, ArrayLike, Float

from jattn._blocks import all_heads
from jattn._blocks.block import BlockPlan, split_head
from jattn._blocks.block_lists import Piece, split_axis
from jattn._blocks.online_softmax import IfListed, join_rows, log_sum_exp, scan_blocks
from jattn._blocks.plan import BlockSizes, plan_call
from jattn._core import deferred
from jattn._core.attention import NAMES
from jattn._core.call import Call, softmax_dtype
from jattn._core.operation import ReverseRule
from jattn._mods.pytree import split_arrays


def differentiable(
    forward: deferred.Function,
    accumulate: deferred.Function,
    call: Call,
    *static: Hashable,
    backward: ReverseRule | None = None,
    count: int | None = 3,
    alone: bool = False,
    lse: deferred.Function | None = None,
    returns_error: bool = True,
    formula: Callable[[Call], tuple[Array, Array]] | None = None,
) -> tuple[Array, Array]:
    """``(out, lse)`` of one or more heads, with the derivative rule at the top of this file.

    Args:
        forward: ``(platform, call, *static, with_error) -> (out, row_max, row_sum)``: ``out`` in the value's dtype,
            ``[..., T, ..., D]``; the others ``[..., T, ...]``. ``with_error``: also return the ``rounding_error`` of
            ``out``.
        accumulate: ``(platform, call, row_max, *static) -> (acc, row_sum)``, in the softmax's dtype.
        call: canonical, of one or more heads.
        static: hashable arguments.
        backward: ``(platform, (call, results, *static), cotangents, wanted) -> cotangents of the call's arrays``: the
            handwritten reverse derivative. It is used where only the first ``count`` arrays (None: all) are
            differentiated or, if ``not alone``, wherever they are. ``results``: the results of ``forward``;
            ``cotangents``: of ``out``, in the softmax's dtype, and of ``row_sum`` (``of_sums``); ``wanted``: the
            numbers of the arrays whose cotangents are needed.
        lse: ``(platform, call, *static) -> [..., T, ...]``: the lse of the scores of ``accumulate``, if ``forward``
            computes other scores; its ``row_sum`` is then 1, or 0 for a row that sees nothing.
        returns_error: whether ``forward`` knows the rounding error of ``out``. Scores that shift together, through a
            component shared by all keys, change no weight. With a rounded ``out`` in the rule, a row's ``d_score``
            values do not sum to 0, and the gradient of the query contains the remainder times the shared component.
        formula: ``call -> (out, lse)``, from which JAX derives everything not covered by ``backward``, in place of
            ``accumulate``; this is faster for few pairs. If ``backward`` covers nothing, the formula also computes the
            results.
    """
    leaves, (arrays, join), query, value = jax.tree.leaves(call), split_arrays(call), call.query, call.value
    is_array = [isinstance(leaf, jax.Array) for leaf in leaves]
    dtype = softmax_dtype(query)
    rows = jax.ShapeDtypeStruct(query.shape[:-1], dtype)
    out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), value.dtype)
    change = jax.ShapeDtypeStruct(out.shape, dtype)
    keeps_error = returns_error and out.dtype != dtype

    def compute(arrays: Sequence[Array], with_error: bool) -> tuple[Array, ...]:
        types = out, rows, rows, *[out] * with_error

        @jax.custom_jvp
        def results_of(*arrays: Array) -> tuple[Array, ...]:
            return deferred.call(forward, join(arrays), *static, with_error, out=types)

        results_of.defjvp(functools.partial(rule, len(types)), symbolic_zeros=True)
        return results_of(*arrays)

    def rule(
        number: int, primals: Sequence[ArrayLike], in_tangents: Sequence[ArrayLike | SymbolicZero]
    ) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        arrays = [jnp.asarray(x) for x in primals]  # jax.jvp passes plain numbers through
        is_zero = [isinstance(x, SymbolicZero) or jnp.result_type(x) == jax.dtypes.float0 for x in in_tangents]
        known = [None if zero else jnp.asarray(x) for x, zero in zip(in_tangents, is_zero, strict=True)]
        others = any(x is not None for x in known[count:])
        if formula is not None and alone and others and number == 3:  # the formula returns no rounding error
            return _of_formula(formula, join, arrays, known)
        # With these names, a remat policy can save everything that the rule needs besides the inputs.
        names = NAMES[0], NAMES[1], NAMES[1], NAMES[0]
        named = zip(compute(arrays, keeps_error), names, strict=False)
        z, row_max, _, *error = results = tuple(checkpoint_name(x, name) for x, name in named)
        zeros = jnp.zeros_like(row_max)
        of_error = [jnp.zeros_like(x) for x in error]
        if all(x is None for x in known):
            return results[:number], (jnp.zeros_like(z), zeros, zeros, *of_error)[:number]
        rest = iter(known)
        tangents = [next(rest) if array else None for array in is_array]
        rounded = z.dtype != dtype and any(x is not None for x in tangents[3:])
        of_blocks = _Tangents(accumulate, rounded, lse)
        linear: deferred.Function = of_blocks if formula is None else _FormulaTangents(formula)
        if backward is not None:
            covered = len(arrays) if count is None else count
            linear = deferred.CustomRules(linear, vjp=backward, count=covered, results=2, alone=alone)
        d_out, d_row_sum = deferred.jvp(linear, (join(arrays), results, *static), tangents, out=(change, rows))
        # The rule treats row_max as a constant: out and lse are the same for any value of it.
        return results[:number], (d_out.astype(z.dtype), zeros, d_row_sum, *of_error)[:number]

    z, row_max, row_sum = compute(arrays, False)
    return z, log_sum_exp(row_max, row_sum)


def _of_formula(
    formula: Callable[[Call], tuple[Array, Array]],
    join: Callable[[Sequence[Array]], Call],
    arrays: Sequence[Array],
    tangents: Sequence[Array | None],
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Results for ``differentiable``'s rule when JAX differentiates the formula: the lse, with a ``row_sum`` of 1."""
    moved = [i for i, x in enumerate(tangents) if x is not None]

    def results(*inputs: Array) -> tuple[Array, ...]:
        by_number = dict(zip(moved, inputs, strict=True))
        out, lse = formula(join([by_number.get(i, x) for i, x in enumerate(arrays)]))
        row_max = lax.stop_gradient(lse)
        seen = row_max != -jnp.inf
        row_max = jnp.where(seen, row_max, jnp.finfo(lse.dtype).min)
        # Its value is 1, with all derivatives of a sum of exponentials.
        return out, row_max, jnp.where(seen, jnp.exp(lse - row_max), 0.0)

    return jax.jvp(results, [arrays[i] for i in moved], [tangents[i] for i in moved])


@dataclasses.dataclass(frozen=True)
class _FormulaTangents:
    """Computes the tangents of ``out`` and ``row_sum`` using JAX's derivative of the formula."""

    formula: Callable[[Call], tuple[Array, Array]]

    def __call__(self, platform: str, call: Call, results: Sequence[Array], *static: Hashable) -> tuple[Array, Array]:
        out, lse = self.formula(call)
        row_sum = results[2]  # its own derivative follows the rule
        return out.astype(row_sum.dtype), jnp.where(row_sum != 0, lse, 0.0) * row_sum


@dataclasses.dataclass(frozen=True)
class _Tangents:
    """Computes the tangents of ``out`` and ``row_sum`` for results of ``forward``.

    ``rounded``: account for the rounding of ``out``, in a separate pass. Scores that shift together change no weight,
    but with a rounded ``out`` in the rule, the tangent of their sum does not vanish. The effect is small in the
    gradients of query, key and value, but shows in the gradients of biases and of arrays captured by score functions,
    which sum over rows. The same holds for an lse that does not match the scores: ``lse`` then computes the matching
    one, as in ``differentiable``.
    """

    accumulate: deferred.Function
    rounded: bool
    lse: deferred.Function | None

    def __call__(self, platform: str, call: Call, results: Sequence[Array], *static: Hashable) -> tuple[Array, Array]:
        row_max, inverse = lax.stop_gradient(results[1]), _inverse(results[2])
        if self.rounded and self.lse is not None:
            arrays, join = split_arrays(call)
            row_max = self.lse(platform, join(lax.stop_gradient(arrays)), *static)
        acc, row_sum = self.accumulate(platform, call, row_max, *static)
        rest = row_sum
        if self.rounded:
            # If row_max moves by the tangent of the lse, almost no tangent of row_sum remains to multiply by out.
            moved = self._moved(platform, call, row_max, row_sum * inverse, (acc, row_sum), *static)
            acc, rest = jax.tree.map(jnp.add, (acc, row_sum), moved)
        return acc * inverse[..., None] - exact_out(results) * (rest * inverse)[..., None], row_sum

    def _moved(
        self, platform: str, call: Call, row_max: Array, by: Array, like: tuple[Array, Array], *static: Hashable
    ) -> tuple[Array, Array]:
        """Zeros ``like`` ``acc`` and ``row_sum``, with their tangents where ``row_max`` has the tangent of ``by``."""
        arrays, join = split_arrays(call)

        @jax.custom_jvp
        def zeros(by: Array, row_max: Array, arrays: list[Array]) -> tuple[Array, Array]:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        @zeros.defjvp
        def _(primals: tuple, tangents: tuple) -> tuple:
            _, row_max, arrays = primals
            sums = lambda row_max: self.accumulate(platform, join(arrays), row_max, *static)
            return zeros(*primals), jax.jvp(sums, (row_max,), tangents[:1])[1]

        return zeros(by, row_max, arrays)


def of_sums(results: Sequence[Array], cotangents: Sequence[Array | None]) -> tuple[Array, Array]:
    """The cotangents of ``acc`` and ``row_sum``, given those of ``out`` and ``row_sum``; None means zero.

    If ``p = exp(score - row_max)``, they give ``d_value = sum_q p d_acc`` and
    ``d_score = p (d_acc · value + d_row_sum)``: FlashAttention-2's backward pass (https://arxiv.org/abs/2307.08691).
    """
    out, _, row_sum, *_ = results
    d_out, d_row_sum = cotangents
    d_row_sum = jnp.zeros_like(row_sum) if d_row_sum is None else d_row_sum
    if d_out is None:
        return jnp.zeros(out.shape, row_sum.dtype), d_row_sum
    d_acc = d_out * _inverse(row_sum)[..., None]
    # Not d_acc times out, of which XLA would hold a second copy.
    return d_acc, d_row_sum - (d_out * exact_out(results)).sum(-1) * _inverse(row_sum)


def exact_out(results: Sequence[Array]) -> Array:
    """``out`` in the softmax's dtype, plus its rounding error if ``results`` include it."""
    out, row_max, _, *error = results
    if not error:
        return out.astype(row_max.dtype)
    # XLA otherwise omits the rounding of out where it can, and the error would be added to the exact output.
    out, error = lax.optimization_barrier((out, error[0]))
    return out.astype(row_max.dtype) + error.astype(row_max.dtype)


def is_whole(call: Call) -> bool:
    """Whether ``balanced`` applies to a canonical 16-bit call: it has all keys of a row and no score function.

    A query in the softmax's dtype means that the call has only a part of the keys.
    """
    return call.score_mod is None and call.query.dtype == call.key.dtype != softmax_dtype(call.query)


def balanced(
    call: Call,
    results: Sequence[Array],
    cotangents: Sequence[Array | None],
    of_qkv: Sequence[Array],
    totals: Array,
) -> list[Array]:
    """The cotangents ``of_qkv`` of query, key and value, corrected where products round their factors to 16 bits.

    The weights summed into ``out``, and possibly ``d_score``, were then rounded, so the sum of ``d_score`` over a row,
    ``totals [B,T,N]``, differs from its correct value, the cotangent of the lse. The difference times the component
    shared by all keys is added to the cotangent of the query. That component is estimated as the mean of the finite
    keys seen by any query, which have a nonzero ``d_value``. The mean is scaled down as keys deviate more from it,
    because a row's few keys may then be far from it.
    """
    d_query, d_key, d_value = of_qkv
    d_row_sum, dtype = cotangents[1], totals.dtype
    missing = (0.0 if d_row_sum is None else d_row_sum * results[2]) - totals
    counts = (d_value != 0).any(-1, keepdims=True) & jnp.isfinite(call.key).all(-1, keepdims=True)
    number = jnp.maximum(counts.sum(1, keepdims=True).astype(dtype), 1.0)
    keys = jnp.where(counts, call.key, 0).astype(dtype)
    mean = keys.sum(1, keepdims=True) / number
    deviation = jnp.where(counts, abs(keys - mean), 0.0).sum(1, keepdims=True) / number
    mean /= (1.0 + (deviation / jnp.maximum(abs(mean), jnp.finfo(dtype).tiny)) ** 2) ** 2
    common = jnp.repeat(mean, call.query.shape[2] // call.key.shape[2], axis=2)
    added = (missing * call.score_scale)[..., None] * common
    return [(d_query.astype(dtype) + added).astype(d_query.dtype), d_key, d_value]


def _inverse(row_sum: Array) -> Array:
    # Not maximum(row_sum, 1), which would halve second derivatives at a row_sum of 1.
    return 1.0 / jnp.where(row_sum != 0.0, row_sum, 1.0)


def accumulate(
    platform: str, call: Call, row_max: Float[Array, "B T N"], sizes: BlockSizes
) -> tuple[Float[Array, "B T N D"], Float[Array, "B T N"]]:
    """``acc = sum exp(score - row_max) value`` and ``row_sum`` of a call, for any ``row_max``."""
    one_head, per_head = functools.partial(accumulate_head, platform), [jnp.moveaxis(row_max, 2, 1)]
    plan = plan_call(platform, call, sizes)
    return plan.over_heads(one_head, call, out_axes=1, per_head=per_head, recompute=True)


def accumulate_head(platform: str, head: Call, plan: BlockPlan, row_max: Array) -> tuple[Array, Array]:
    """``acc [T,D]`` and ``row_sum [T]`` as at the top of this file, for any ``row_max [T]``.

    In the softmax's dtype; differentiable in linear memory. If ``row_max`` is the lse over a larger set of keys, the
    ``acc`` values of its parts add up to the output, and their ``row_sum`` values to 1.
    """
    blocked = split_head(platform, head, plan)
    dtype = blocked.arrays.q.dtype
    row_max = split_axis(jnp.where(row_max == -jnp.inf, 0.0, row_max).astype(dtype), 0, plan.size[0])

    def visit(sums: tuple, i: Array, j: Array, masked: bool, if_listed: IfListed) -> tuple:
        block, block_max = blocked.take(i, j), row_max[i]

        nothing = jax.tree.map(lambda x: jnp.zeros_like(x[0]), sums)

        def of_piece(piece: Piece | None) -> tuple[Array, Array]:
            piece_max = block_max if piece is None else block_max[piece[0]]
            return blocked.softmax_sums(*blocked.scores(block, i, j, masked, piece), piece_max, i, j, piece)

        added = if_listed(lambda: blocked.by_piece(masked, of_piece, nothing), nothing)
        return jax.tree.map(lambda x, y: x.at[i].add(y), sums, added)

    zeros = jnp.zeros((*blocked.arrays.q.shape[:2], head.value.shape[1]), dtype), jnp.zeros_like(row_max)
    return tuple(join_rows(x, head.query) for x in scan_blocks(visit, zeros, blocked))  # type: ignore


def gradients_of_qkv(
    platform: str, call: Call, results: Sequence[Array], cotangents: Sequence[Array | None], sizes: BlockSizes
) -> Sequence[Array]:
    """The cotangents of query, key and value of a call.

    ``results`` and ``cotangents`` refer to ``forward``, as in ``differentiable``.
    """
    row_max, of_results = results[1], of_sums(results, cotangents)
    plan, whole = plan_call(platform, call, sizes), platform != "cpu" and is_whole(call)
    if plan.all_at_once and not call.sharded:
        gradients = all_heads.gradients(platform, call, row_max, *of_results, plan.blocks, of_row_max=whole)
    else:

        def sums(query: Array, key: Array, value: Array, row_max: Array = row_max) -> tuple[Array, Array]:
            return accumulate(platform, dataclasses.replace(call, query=query, key=key, value=value), row_max, sizes)

        arrays = call.query, call.key, call.value, *[row_max] * whole
        gradients = jax.vjp(sums, *arrays)[1](of_results)
    of_qkv, totals = gradients[:3], [-x for x in gradients[3:]]
    return balanced(call, results, cotangents, of_qkv, *totals) if totals else of_qkv
