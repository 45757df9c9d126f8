"""The equations of attention, for one head of one sequence; ``jattn.lifting`` lifts them to many.

``q [T,H]``, ``k [S,H]``, ``v [S,D]`` (the axis legend stands in ``jattn``):

    scores  = scale * q k^T + bias, then score_mod, then -inf where masked
    lse     = log sum_kv exp(scores)
    weights = exp(scores - lse)
    out     = weights v

A row without a visible key has ``out = 0`` and ``lse = -inf``. Source: https://arxiv.org/abs/1706.03762, section 3.2.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jattn.dropout import Dropout, drop
from jattn.fields import to_int32, to_number
from jattn.hoist import depends_on, hoist
from jattn.masks import MaskFunction
from jattn.mods import checked, mod_semantics, pytree_dataclass, static_field
from jattn.score_mods import ScoreMod

MaskLike = ArrayLike | MaskFunction | Sequence[ArrayLike | MaskFunction]

# What a remat policy knows the results by: jax.checkpoint_policies.save_only_these_names(*NAMES).
NAMES = ("attention_out", "attention_lse")


class HeadOptions(TypedDict, total=False):
    """The options of one head: the keyword arguments of ``attend``, but for ``head``."""

    mask: MaskLike | None
    bias: Float[Array, "#T #S"] | None
    score_mod: ScoreMod | None
    scale: ArrayLike | None
    batch: ArrayLike | None
    query_positions: Int[ArrayLike, " T"] | None
    kv_positions: Int[ArrayLike, " S"] | None
    dropout: tuple[float, Array] | Dropout | None
    precision: Any


@pytree_dataclass
class Head:
    """What one head attends with beside q, k and v: the options of ``attend``, checked."""

    masks: tuple[MaskFunction, ...]  # these and those by slot must all hold
    slot_masks: tuple[Any, ...]  # [T|1, S|1]
    bias: Any  # [T|1, S|1] or None
    score_mod: ScoreMod | None
    scale: Any
    batch: Any
    head: Any
    query_positions: Any  # [T], None where they are the slots
    kv_positions: Any
    dropout: Dropout | None
    precision: Any = static_field()

    def where(self, q: Array, k: Array) -> tuple[Any, Any, Array, Array]:
        """The indices that masks, score functions and dropout see: b, h, ``[T,1]``, ``[1,S]``."""
        rows = jnp.arange(q.shape[0], dtype=jnp.int32) if self.query_positions is None else self.query_positions
        columns = jnp.arange(k.shape[0], dtype=jnp.int32) if self.kv_positions is None else self.kv_positions
        return self.batch, self.head, jnp.asarray(rows)[:, None], jnp.asarray(columns)[None, :]


def attend(
    q: Float[Array, "T H"],
    k: Float[Array, "S H"],
    v: Float[Array, "S D"],
    *,
    mask: MaskLike | None = None,
    bias: Float[Array, "#T #S"] | None = None,
    score_mod: ScoreMod | None = None,
    scale: ArrayLike | None = None,
    batch: ArrayLike | None = None,
    head: ArrayLike | None = None,
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
        batch, head: the indices that ``mask``, ``score_mod`` and dropout see; ``over_heads`` gives ``head``. Only what
            differs by sequence or head needs them.
        query_positions, kv_positions: the positions they see; ``arange`` by default.
        dropout: ``(rate, key)``. Which weights are kept depends on the key and on (b, h, q, kv) alone; without
            ``batch`` or ``head`` these are 0.
        precision: of the two products, as in ``jax.numpy.einsum``.

    Returns:
        ``out`` in v's dtype; ``lse`` float32 (float64 for float64 input).

    Raises:
        TypeError, ValueError: arrays of other ranks, lengths or dtypes; a mask or score function returned another dtype
            or shape than (T, S), or differs by sequence or head, and there is no ``batch`` or ``head``.
    """
    options: HeadOptions = {
        "mask": mask, "bias": bias, "score_mod": score_mod, "scale": scale, "batch": batch,
        "query_positions": query_positions, "kv_positions": kv_positions, "dropout": dropout, "precision": precision,
    }  # fmt: skip
    return dense(q, k, v, make_head(q, k, v, head, **options))


def dense(q: Array, k: Array, v: Array, head: Head) -> tuple[Array, Array]:
    """``attend`` with checked options."""
    where = head.where(q, k)
    visible = visible_pairs(head, where)
    weights, lse = _weights(q, k, visible, head, where)
    weights = drop(weights, head.dropout, where)
    if visible is not None:
        v = _zero_unseen(v, visible.any(axis=0))
    out = jnp.einsum(
        "ts,sd->td", weights.astype(v.dtype), v, precision=head.precision, preferred_element_type=weights.dtype
    )
    return checkpoint_name(out.astype(v.dtype), NAMES[0]), checkpoint_name(lse, NAMES[1])


def dense_weights(q: Array, k: Array, head: Head) -> tuple[Array, Array]:
    """The weights ``[T,S]`` of ``attend`` before dropout, and its lse ``[T]``: float32 (float64 for float64 input)."""
    where = head.where(q, k)
    return _weights(q, k, visible_pairs(head, where), head, where)


def make_head(
    q: Any, k: Any, v: Any, head: Any = None, mask: MaskLike | None = None, bias: Any = None,
    score_mod: ScoreMod | None = None, scale: Any = None, batch: Any = None, query_positions: Any = None,
    kv_positions: Any = None, dropout: Any = None, precision: Any = None,
) -> Head:  # fmt: skip
    """The options of ``attend``, checked; ``v`` is None where only weights are asked for."""
    lengths = _lengths_of_head(q, k, v)
    parts = () if mask is None else tuple(mask) if isinstance(mask, tuple | list) else (mask,)
    parts, score_mod = tuple(checked("mask", part) for part in parts), checked("score_mod", score_mod)
    masks = tuple(part for part in parts if callable(part))
    slot_masks = tuple(part for part in parts if not callable(part))
    for part in slot_masks:
        if jnp.result_type(part) != bool:
            raise TypeError(
                f"mask must be bool (True: visible), got {jnp.result_type(part)}; what is to be added is bias="
            )
        _check_pairs("mask", part, lengths)
    if bias is not None:
        if not jnp.issubdtype(jnp.result_type(bias), jnp.floating):
            raise TypeError(f"bias must be floating (it is added to the scores), got {jnp.result_type(bias)}")
        _check_pairs("bias", bias, lengths)
    scale = None if scale is None else to_number("scale", scale)
    mods: list[tuple] = [("mask", one) for one in masks]
    if score_mod is not None:
        mods.append(("score_mod", score_mod, jnp.float32))
    for argument, given, at in (("batch", batch, -4), ("head", head, -3)):
        for name, mod, *score in mods if given is None else ():
            if depends_on(mod, at, *score):
                raise ValueError(
                    f"{name} differs by {argument}, and nothing says which this is: give {argument}= (over_heads gives "
                    f"head= to a function that takes it, such as functools.partial(attend, ...))"
                )
    if dropout is not None and not isinstance(dropout, Dropout):
        rate, rng = dropout
        dropout = Dropout(rng, rate)
    query_positions, kv_positions = (
        None if x is None else to_int32(name, x if isinstance(x, np.ndarray) else jnp.asarray(x))
        for name, x in (("query_positions", query_positions), ("kv_positions", kv_positions))
    )
    return Head(
        masks, slot_masks, bias, score_mod, scale, 0 if batch is None else batch, 0 if head is None else head,
        query_positions, kv_positions, dropout, precision,
    )  # fmt: skip


def _lengths_of_head(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    """T and S of one head's arrays, checked."""
    shapes = {name: jnp.shape(x) for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    of_q, of_k, of_v = shapes["q"], shapes["k"], shapes.get("v", shapes["k"])
    if any(len(shape) != 2 for shape in shapes.values()) or of_q[1] != of_k[1] or of_k[0] != of_v[0]:
        got = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"one head takes q [T, H], k [S, H] and v [S, D], got {got}; over_heads lifts it to all heads, and "
            "dot_product_attention takes batches"
        )
    return of_q[0], of_k[0]


def _check_pairs(name: str, array: Any, lengths: tuple[Any, Any]) -> None:
    shape = jnp.shape(array)
    if len(shape) != 2 or any(size not in (1, length) for size, length in zip(shape, lengths, strict=True)):
        raise ValueError(
            f"{name} must be [T, S] = {list(lengths)} of one head (or 1 in place of any), got {list(shape)}"
        )


def hoisted(options: Any, q: Array, lengths: tuple[Any, Any]) -> Any:
    """A ``Head`` or ``Request`` whose plain masks and score functions are programs, with what they capture beside.

    ``lengths``: T and S, which the functions are checked with.
    """

    def ready(name: str, mod: Any, kind: Any, *score: Any) -> Any:
        return hoist(mod, lambda result: check_mod(name, result, kind, lengths), lengths, *score)

    masks = tuple(ready("mask", mask, bool) for mask in options.masks)
    score_mod = ready("score_mod", options.score_mod, jnp.floating, softmax_dtype(q))
    return dataclasses.replace(options, masks=masks, score_mod=score_mod)


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


def softmax_dtype(x: Array) -> Any:
    """What scores, weights and lse of ``x`` are computed in: float32, float64 for float64."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def visible_pairs(head: Head, where: tuple) -> Bool[Array, "#T #S"] | None:
    """The visible pairs, of a shape that broadcasts to ``[T,S]``; None where there is no mask."""
    visible: Any = None
    shape = where[2].shape[0], where[3].shape[1]
    for mask in head.masks:
        with mod_semantics():
            part = mask(*where)
        check_mod("mask", part, bool, shape)
        part = jnp.asarray(part)
        part = part.reshape((1,) * (2 - part.ndim) + part.shape)
        visible = part if visible is None else visible & part
    for part in head.slot_masks:
        visible = jnp.asarray(part) if visible is None else visible & part
    return visible


def check_mod(name: str, result: Any, kind: Any, shape: tuple[Any, ...]) -> None:
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


def _weights(q: Array, k: Array, visible: Array | None, head: Head, where: tuple) -> tuple[Array, Array]:
    """Weights and lse, from one expression that everything shares, so that asking for one changes no bit of another."""
    if visible is not None:
        # nobody's keys, and queries that see nothing, may hold NaN: 0 * NaN in the products' derivatives is NaN
        q, k = _zero_unseen(q, visible.any(axis=1)), _zero_unseen(k, visible.any(axis=0))
    raw = jnp.einsum("th,sh->ts", q, k, precision=head.precision, preferred_element_type=softmax_dtype(q))
    weights, rest = _softmax(finish_scores(raw, visible, head, where, q.shape[-1]))
    # The lse needs the rows' maxima. Taken from the scores above, they would be a second use of what XLA fuses into one
    # pass, and change the weights' last bits. So they come from the same product, finished again behind a barrier.
    again = jax.lax.optimization_barrier(jax.lax.stop_gradient(raw))
    again = jax.lax.stop_gradient(finish_scores(again, visible, head, where, q.shape[-1]))
    return weights, jax.lax.stop_gradient(row_maximum(again)) + rest


def _zero_unseen(x: Array, seen: Array) -> Array:
    return jnp.where(seen[:, None], x, jnp.zeros((), x.dtype))


def finish_scores(scores: Array, visible: Array | None, head: Head, where: tuple, dim: int) -> Array:
    """The scores ``[T,S]`` from ``q k^T``: scaled, with bias, modified, and -inf where not visible; ``dim`` is H."""
    dtype = scores.dtype
    scores *= jnp.asarray(dim**-0.5 if head.scale is None else head.scale, dtype)
    if head.bias is not None:
        scores += head.bias.astype(dtype)
    if head.score_mod is not None:
        if visible is not None:
            scores = jnp.where(visible, scores, 1.0)  # the stand-in that keeps an infinite derivative away
        with mod_semantics():
            modified = head.score_mod(scores, *where)
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
