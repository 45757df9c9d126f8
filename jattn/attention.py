"""The equations of attention, for one head of one sequence, and what lifts them to many.

``q [T,H]``, ``k [S,H]``, ``v [S,D]`` (the axis legend stands in ``jattn``):

    scores  = scale * q k^T + bias, then score_mod, then -inf where masked
    lse     = log sum_kv exp(scores)
    weights = exp(scores - lse)
    out     = weights v

A row without a visible key has ``out = 0`` and ``lse = -inf``. Source: https://arxiv.org/abs/1706.03762, section 3.2.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int, UInt

from jattn.masks import MaskFunction
from jattn.mods import mod_semantics
from jattn.score_mods import ScoreMod

MaskLike = ArrayLike | MaskFunction | Sequence[ArrayLike | MaskFunction]


class Dropout(NamedTuple):
    """Weights are dropped with probability ``rate``; with ``broadcast`` the same in all heads of all sequences."""

    rate: float
    rng: Array
    broadcast: bool = False


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
    dropout: tuple[float, Array] | Dropout | None = None,
    precision: Any = None,
) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """Scaled dot-product attention of one head: ``(out [T,D], lse [T])``, as in the formulas at the top of this file.

    Args:
        q, k, v: queries, keys, values of one dtype. Products accumulate in at least float32.
        mask: a callable ``(b, h, q_idx, kv_idx) -> bool`` over positions, or a bool array ``[T|1, S|1]`` over slots, or
            several of these, which must all hold. Keys and values that no query sees may hold anything, also NaN.
        bias: added to the scores, ``[T|1, S|1]``, over slots.
        score_mod: a callable ``(score, b, h, q_idx, kv_idx) -> score`` over positions.
        scale: a number; ``1 / sqrt(H)`` by default.
        batch, head: the indices that ``mask``, ``score_mod`` and dropout see.
        query_positions, kv_positions: the positions they see; ``arange`` by default.
        dropout: ``(rate, key)``. Which weights are kept depends on the key and on (b, h, q, kv) alone.
        precision: of the two products, as in ``jax.numpy.einsum``.

    Returns:
        ``out`` in v's dtype; ``lse`` float32 (float64 for float64 input).

    Raises:
        TypeError, ValueError: a mask or score function returned another dtype or shape than (T, S).
    """
    q_idx, kv_idx = indices(q, k, query_positions, kv_positions)
    visible = visible_pairs(mask, batch, head, q_idx, kv_idx)
    weights, lse = _weights(q, k, visible, bias, score_mod, scale, (batch, head, q_idx, kv_idx), precision)
    if dropout is not None:
        drop = as_dropout(dropout)
        kept = dropout_keep(dropout_seeds(drop, batch, head), drop.rate, q_idx, kv_idx)
        weights = jnp.where(kept, weights / (1.0 - drop.rate), 0.0)
    if visible is not None:
        v = _zero_unseen(v, visible.any(axis=0))
    out = jnp.einsum("ts,sd->td", weights.astype(v.dtype), v, precision=precision, preferred_element_type=weights.dtype)
    return out.astype(v.dtype), lse


def head_weights(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    *,
    mask: MaskLike | None = None,
    bias: Float[Array, "#T #S"] | None = None,
    score_mod: ScoreMod | None = None,
    scale: ArrayLike | None = None,
    batch: ArrayLike = 0,
    head: ArrayLike = 0,
    query_positions: Int[ArrayLike, " T"] | None = None,
    kv_positions: Int[ArrayLike, " S"] | None = None,
    precision: Any = None,
) -> tuple[Float[Array, "T S"], Float[Array, " T"]]:
    """The weights ``[T,S]`` of ``attend`` before dropout, and its lse ``[T]``: float32 (float64 for float64 input)."""
    q_idx, kv_idx = indices(q, k, query_positions, kv_positions)
    visible = visible_pairs(mask, batch, head, q_idx, kv_idx)
    return _weights(q, k, visible, bias, score_mod, scale, (batch, head, q_idx, kv_idx), precision)


def merge(
    out_a: Float[Array, "*rows D"],
    lse_a: Float[Array, "*rows"],
    out_b: Float[Array, "*rows D"],
    lse_b: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Joins attention over two disjoint sets of keys into attention over both: ``lse = log(e^lse_a + e^lse_b)``,
    ``out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse)``.

    Associative and commutative, ``(0, -inf)`` is its unit. ``out`` keeps out_a's dtype, computed in lse's.
    Source: https://arxiv.org/abs/2405.02803 (tree and ring attention join partial results so).
    """
    high = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    high = jnp.where(high == -jnp.inf, 0.0, high)
    part_a, part_b = jnp.exp(lse_a - high), jnp.exp(lse_b - high)
    total = part_a + part_b
    seen = total != 0.0
    total = jnp.where(seen, total, 1.0)  # 1, so that neither the log nor its derivative is infinite
    lse = jnp.where(seen, high + jnp.log(total), -jnp.inf)
    share_a, share_b = ((part / total)[..., None] for part in (part_a, part_b))
    out = out_a.astype(lse.dtype) * share_a + out_b.astype(lse.dtype) * share_b
    return out.astype(out_a.dtype), lse


def over_heads(fn: Callable, out_axes: Any = 1, *, lift: Callable = jax.vmap) -> Callable:
    """Lifts ``fn(q [T,H], k [S,H], v [S,D], *rest)`` of one head to all heads of a sequence, by ``vmap``.

    The result takes ``query [T,N,H]``, ``key [S,K,H]``, ``value [S,K,D]`` and arrays ``rest`` with a leading axis of N,
    one entry a head, or of 1, shared by all (``value`` and those may be None). Where K < N, N/K query heads in a row
    share a key and value head (grouped queries, https://arxiv.org/abs/2305.13245), which is not repeated.
    ``out_axes``: where the head axis stands in each output, counted from the front, as in ``jax.vmap``.
    ``lift``: ``one_by_one`` instead of ``jax.vmap`` computes one head after the other.

    Raises:
        ValueError: N is no multiple of K.

    Example:
        ``out, lse = over_heads(attend)(query, key, value)``
    """

    def lifted(query, key, value, *rest):
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        if num_kv_heads == 0 or num_heads % num_kv_heads:
            raise ValueError(f"the {num_heads} query heads must be a multiple of the {num_kv_heads} key/value heads")
        rest, axes = map_axes(rest)
        value_axis = None if value is None else 1
        if num_heads == num_kv_heads:
            return lift(fn, in_axes=(1, 1, value_axis, *axes), out_axes=out_axes)(query, key, value, *rest)
        groups = (num_kv_heads, num_heads // num_kv_heads)
        query = query.reshape(query.shape[0], *groups, *query.shape[2:])
        rest = [x if axis is None else x.reshape(*groups, *x.shape[1:]) for x, axis in zip(rest, axes, strict=True)]
        one_group = lift(fn, in_axes=(1, None, None, *axes), out_axes=out_axes)
        out = lift(one_group, in_axes=(1, 1, value_axis, *axes), out_axes=out_axes)(query, key, value, *rest)

        def join(axis, part):  # the kv head axis and, behind it, the axis of queries that share one
            return jax.tree.map(lambda x: x.reshape(*x.shape[:axis], num_heads, *x.shape[axis + 2 :]), part)

        return jax.tree.map(join, out_axes, out)

    return lifted


def one_by_one(fn: Callable, in_axes: Sequence[int | None], out_axes: Any = 0, *, recompute: bool = False) -> Callable:
    """What ``jax.vmap(fn, in_axes, out_axes)`` computes, in a loop, so that only one call's arrays are live.

    ``recompute``: a backward pass calls ``fn`` again, instead of keeping what it needs of each call.
    """

    def mapped(*args):
        (count,) = {x.shape[axis] for x, axis in zip(args, in_axes, strict=True) if axis is not None}
        if count == 0:
            return jax.vmap(fn, in_axes, out_axes)(*args)

        def call(i):
            # looked up in the loop, since arrays that it ran over would first be copied with that axis in front
            pick = functools.partial(jax.lax.dynamic_index_in_dim, index=i, keepdims=False)
            return fn(*(x if axis is None else pick(x, axis=axis) for x, axis in zip(args, in_axes, strict=True)))

        def move(axis, part):
            return jax.tree.map(lambda x: jnp.moveaxis(x, 0, axis), part)

        # around the look-up, too: what is looked up would otherwise be kept, call by call
        called = jax.checkpoint(call, prevent_cse=False) if recompute else call
        return jax.tree.map(move, out_axes, jax.lax.map(called, jnp.arange(count)))

    return mapped


def map_axes(arrays: Sequence[Any]) -> tuple[list, list]:
    """``arrays`` ready for ``vmap`` and their ``in_axes``: a leading axis of 1 is dropped and shared, others mapped."""
    shared = [x is None or x.shape[0] == 1 for x in arrays]
    ready = [x[0] if one and x is not None else x for x, one in zip(arrays, shared, strict=True)]
    return ready, [None if one else 0 for one in shared]


def softmax_dtype(x: Array) -> Any:
    """What scores, weights and lse of ``x`` are computed in: float32, float64 for float64."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def as_dropout(dropout: Any) -> Dropout:
    """``(rate, key)`` as a ``Dropout``."""
    return Dropout(*dropout)


def dropout_seeds(dropout: Dropout, batch: ArrayLike, head: ArrayLike) -> UInt[Array, "2"]:
    """The two words that ``dropout_keep`` takes for one head; from any type of key."""
    words = jax.random.bits(dropout.rng, (2,), jnp.uint32)
    if dropout.broadcast:
        return words
    return _mix(_mix(words ^ _word(batch)) + _word(head))


def dropout_keep(
    seeds: UInt[Array, "2"], rate: float, q_idx: Int[Array, "T 1"], kv_idx: Int[Array, "1 S"]
) -> Bool[Array, "T S"]:
    """``True`` with probability ``1 - rate``, for each pair, from ``(seeds, q, kv)`` alone.

    A hash of the counters rather than ``jax.random.bernoulli``, so that any block of the matrix can be drawn by itself,
    in any order. Two words of state a row keep rows apart (a collision needs 64 equal bits).
    """
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1), got {rate}")
    first, second = (_mix(seed ^ q_idx.astype(jnp.uint32)) for seed in (seeds[0], seeds[1]))
    bits = _mix(_mix(first ^ kv_idx.astype(jnp.uint32)) + second)
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _word(index: ArrayLike) -> UInt[Array, ""]:
    return jnp.asarray(index).astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """A bijection of 32-bit words in which every input bit flips each output bit half of the time.

    Source: C. Wellons, "Prospecting for Hash Functions" (2018), the function named lowbias32.
    """
    x = (x ^ (x >> jnp.uint32(16))) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> jnp.uint32(15))) * jnp.uint32(0x846CA68B)
    return x ^ (x >> jnp.uint32(16))


def indices(q: Array, k: Array, query_positions: Any, kv_positions: Any) -> tuple[Array, Array]:
    """Positions as ``[T,1]`` and ``[1,S]``."""
    rows = jnp.arange(q.shape[0]) if query_positions is None else jnp.asarray(query_positions)
    columns = jnp.arange(k.shape[0]) if kv_positions is None else jnp.asarray(kv_positions)
    return rows[:, None], columns[None, :]


def visible_pairs(mask: MaskLike | None, batch, head, q_idx: Array, kv_idx: Array) -> Bool[Array, "#T #S"] | None:
    """The visible pairs, of a shape that broadcasts to ``[T,S]``; None where there is no mask."""
    parts = () if mask is None else mask if isinstance(mask, tuple | list) else (mask,)
    visible: Any = None
    for part in parts:
        if callable(part):
            with mod_semantics():
                part = part(batch, head, q_idx, kv_idx)
            check_mod("mask", part, bool, (q_idx.shape[0], kv_idx.shape[1]))
            part = jnp.asarray(part)
            part = part.reshape((1,) * (2 - part.ndim) + part.shape)
        visible = jnp.asarray(part) if visible is None else visible & part
    return visible


def check_mod(name: str, result: Any, kind: Any, shape: tuple[int, ...]) -> None:
    """Raises for what a mask (``kind`` bool) or score function (floating) must not return."""
    dtype = jnp.result_type(result)
    if not (dtype == bool if kind is bool else jnp.issubdtype(dtype, kind)):
        hint = "; compare, or cast by .astype(bool)" if kind is bool else "; cast the indices to float"
        raise TypeError(f"{name} must return {'bool' if kind is bool else 'floats'}, got {dtype}{hint}")
    got = jnp.shape(result)
    if len(got) > 2 or any(size not in (1, full) for size, full in zip(got[::-1], shape[::-1], strict=False)):
        raise ValueError(
            f"{name} must return an array that broadcasts to (T, S) = {shape}, got shape {got}; it is called with "
            f"q_idx [T, 1] and kv_idx [1, S] and must be elementwise in them"
        )


def _weights(q, k, visible, bias, score_mod, scale, where, precision) -> tuple[Array, Array]:
    """Weights and lse, from one expression that everything shares, so that asking for one changes no bit of another."""
    if visible is not None:
        # nobody's keys, and queries that see nothing, may hold NaN: 0 * NaN in the products' derivatives is NaN
        q, k = _zero_unseen(q, visible.any(axis=1)), _zero_unseen(k, visible.any(axis=0))
    weights, rest = _softmax(_scores(q, k, visible, bias, score_mod, scale, where, precision))
    # The lse needs the rows' maxima. Taken from the scores above, they would be a second use of what XLA fuses into one
    # pass, and change the weights' last bits. So the scores are computed again, behind a barrier, when somebody asks.
    q, k = jax.lax.optimization_barrier(jax.lax.stop_gradient((q, k)))
    again = _scores(q, k, visible, bias, score_mod, scale, where, precision)
    return weights, jax.lax.stop_gradient(row_maximum(jax.lax.stop_gradient(again))) + rest


def _zero_unseen(x: Array, seen: Array) -> Array:
    return jnp.where(seen[:, None], x, jnp.zeros((), x.dtype))


def _scores(q, k, visible, bias, score_mod, scale, where, precision) -> Array:
    scores = jnp.einsum("th,sh->ts", q, k, precision=precision, preferred_element_type=softmax_dtype(q))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return finish_scores(scores, visible, bias, score_mod, scale, where)


def finish_scores(scores: Array, visible: Array | None, bias, score_mod, scale: ArrayLike, where: tuple) -> Array:
    """The scores ``[T,S]`` from ``q k^T``: scaled, with bias, modified, and -inf where not visible."""
    dtype = scores.dtype
    scores *= jnp.asarray(scale, dtype)
    if bias is not None:
        scores += bias.astype(dtype)
    if score_mod is not None:
        if visible is not None:
            scores = jnp.where(visible, scores, 1.0)  # the stand-in that keeps an infinite derivative away
        with mod_semantics():
            modified = score_mod(scores, *where)
        check_mod("score_mod", modified, jnp.floating, scores.shape)
        scores = jnp.broadcast_to(modified, scores.shape).astype(dtype)
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


@jax.custom_jvp
def _softmax(scores: Float[Array, "T S"]) -> tuple[Float[Array, "T S"], Float[Array, " T"]]:
    """The softmax of each row, and its log-sum-exp less the row's maximum; 0 and -inf for a row that is all -inf.

    Weights are ``exp(scores - high) / total`` and not ``exp(scores - lse)``: that rounds the sum of ``high`` and
    ``log(total)``, which at logits of 1e4 puts weights off by 5e-4.
    """
    exponentials = jnp.exp(scores - row_maximum(scores)[:, None])
    total = jnp.sum(exponentials, axis=-1)
    # The largest exponential of a row is 1, so below 1 there is nothing but the row that sees nothing. A product with
    # the reciprocal, because XLA makes one of a division unless the total has another use: the weights' last bit
    # would tell whether somebody asked for the lse.
    share = 1.0 / jnp.maximum(total, 1.0)
    return exponentials * share[:, None], jnp.log(total)


@_softmax.defjvp
def _softmax_jvp(primals, tangents):
    # written in the weights, so that no second matrix is kept for the derivative
    (scores,), (tangent,) = primals, tangents
    weights, rest = _softmax(scores)
    change = jnp.sum(weights * tangent, axis=-1)
    return (weights, rest), (weights * (tangent - change[:, None]), change)


def row_maximum(scores: Float[Array, "T S"]) -> Float[Array, " T"]:
    """The largest score of each row; the least float where there is none above it."""
    # The least float instead of -inf, because -inf - -inf is NaN; by lax, because a select here would keep XLA from
    # computing product, maximum and exponential in one pass.
    least = jnp.finfo(scores.dtype).min.astype(scores.dtype)
    if scores.shape[1] == 1:  # of one column XLA takes the entry itself, and forgets the least
        return jnp.maximum(scores[:, 0], least)
    return jax.lax.reduce(scores, least, jax.lax.max, (1,))
