"""The equations of attention for one head of one sequence; ``jattn._core.vmap`` maps them over many.

``q [T,H]``, ``k [S,H]``, ``v [S,D]`` (see ``jattn`` for the axes):

    scores  = scale * q k^T + bias, then score_mod, then -inf where masked
    lse     = log sum_kv exp(scores)
    weights = exp(scores - lse)
    out     = weights v

A row with no visible key has ``out = 0`` and ``lse = -inf``. Source: https://arxiv.org/abs/1706.03762, section 3.2.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jattn._core.dropout import Dropout, drop
from jattn._mods.arrays import AnyArray, Index, Length, calling
from jattn._mods.closure_convert import closure_convert, depends_on
from jattn._mods.keywords import suggest_keywords
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn._mods.validation import check_signature, to_int32, to_number
from jattn.masks import MaskFunction
from jattn.score_mods import ScoreMod

MaskLike = ArrayLike | MaskFunction | Sequence[ArrayLike | MaskFunction]

# The results' names for remat policies: jax.checkpoint_policies.save_only_these_names(*NAMES).
NAMES = ("attention_out", "attention_lse")


class HeadOptions(TypedDict, total=False):
    """The options of one head: the keyword arguments of ``attend`` except ``head``."""

    mask: MaskLike | None
    bias: Float[Array, "#T #S"] | None
    score_mod: ScoreMod | None
    scale: ArrayLike | None
    batch: ArrayLike | None
    query_positions: Int[ArrayLike, " T"] | None
    kv_positions: Int[ArrayLike, " S"] | None
    dropout: tuple[float, Array] | Dropout | None
    precision: PrecisionLike


@pytree_dataclass
class Head:
    """The options of one head, checked: everything that ``attend`` takes besides q, k and v."""

    masks: tuple[MaskFunction, ...]  # a pair is visible if all masks and slot_masks agree
    slot_masks: tuple[AnyArray, ...]  # [T|1, S|1]
    bias: Array | None  # [T|1, S|1]
    score_mod: ScoreMod | None
    scale: AnyArray | int | float | None
    batch: Index
    head: Index
    query_positions: AnyArray | None  # [T]; None: the slots
    kv_positions: AnyArray | None
    dropout: Dropout | None
    precision: PrecisionLike = static_field()

    def indices(self, q: Array, k: Array) -> tuple[Any, Any, Array, Array]:
        """The indices ``(b, h, q_idx [T,1], kv_idx [1,S])`` that masks, score functions and dropout see."""
        rows = jnp.arange(q.shape[0], dtype=jnp.int32) if self.query_positions is None else self.query_positions
        columns = jnp.arange(k.shape[0], dtype=jnp.int32) if self.kv_positions is None else self.kv_positions
        return self.batch, self.head, jnp.asarray(rows)[:, None], jnp.asarray(columns)[None, :]


@suggest_keywords
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
    precision: PrecisionLike = None,
) -> tuple[Float[Array, "T D"], Float[Array, " T"]]:
    """Scaled dot-product attention of one head: ``(out [T,D], lse [T])``.

    With ``scores = scale * q k^T + bias``, modified by ``score_mod``, then -inf where masked: ``lse`` is the log of the
    sum of ``exp(scores)`` over the keys, and ``out = exp(scores - lse) v``.

    Args:
        q, k, v: queries, keys and values of one dtype. Products accumulate in at least float32.
        mask: a callable ``(b, h, q_idx, kv_idx) -> bool`` over positions, a bool array ``[T|1, S|1]`` over slots, or
            a sequence of these, joined by and. Keys and values that no query sees may hold anything, NaN included.
        bias: added to the scores, ``[T|1, S|1]``, over slots.
        score_mod: a callable ``(score, b, h, q_idx, kv_idx) -> score`` over positions.
        scale: a number; ``1 / sqrt(H)`` by default.
        batch, head: the indices that ``mask``, ``score_mod`` and dropout see; ``over_heads`` passes ``head``. Required
            only if one of these varies by sequence or head.
        query_positions, kv_positions: the positions they see; ``arange`` by default.
        dropout: ``(rate, key)``. The kept weights depend only on the key and (b, h, q, kv); ``batch`` and ``head``
            default to 0.
        precision: the precision of both products, as in ``jax.numpy.einsum``.

    Returns:
        ``out`` in v's dtype; ``lse`` float32 (float64 for float64 input).

    Raises:
        TypeError, ValueError: an array has the wrong rank, length or dtype; a mask or score function returns the wrong
            dtype or shape, or varies by sequence or head while ``batch`` or ``head`` is missing.

    Example:
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 4, 8))
        >>> out, lse = jattn.attend(q, k, v, mask=jattn.masks.Causal())
        >>> weights = np.tri(4) * jnp.exp(q @ k.T / 8**0.5 - lse[:, None])
        >>> np.allclose(out, weights @ v, atol=1e-4)
        True
    """
    options: HeadOptions = {
        "mask": mask, "bias": bias, "score_mod": score_mod, "scale": scale, "batch": batch,
        "query_positions": query_positions, "kv_positions": kv_positions, "dropout": dropout, "precision": precision,
    }  # fmt: skip
    return dense(q, k, v, make_head(q, k, v, head, **options))


def dense(q: Array, k: Array, v: Array, head: Head) -> tuple[Array, Array]:
    """``attend`` with checked options."""
    indices = head.indices(q, k)
    visible = visible_pairs(head, indices)
    weights, lse = _weights(q, k, visible, head, indices)
    weights = drop(weights, head.dropout, indices)
    if visible is not None:
        v = _zero_unseen(v, visible.any(axis=0))
    out = jnp.einsum(
        "ts,sd->td", weights.astype(v.dtype), v, precision=head.precision, preferred_element_type=weights.dtype
    )
    return checkpoint_name(out.astype(v.dtype), NAMES[0]), checkpoint_name(lse, NAMES[1])


def dense_weights(q: Array, k: Array, head: Head) -> tuple[Array, Array]:
    """The weights ``[T,S]`` of ``attend`` before dropout and its lse ``[T]``; float32 (float64 for float64 input)."""
    indices = head.indices(q, k)
    return _weights(q, k, visible_pairs(head, indices), head, indices)


@suggest_keywords
def make_head(
    q: AnyArray, k: AnyArray, v: AnyArray | None, head: Index | None = None, mask: MaskLike | None = None,
    bias: AnyArray | None = None, score_mod: ScoreMod | None = None, scale: ArrayLike | None = None,
    batch: Index | None = None, query_positions: ArrayLike | None = None, kv_positions: ArrayLike | None = None,
    dropout: tuple[float, Array] | Dropout | None = None, precision: PrecisionLike = None,
) -> Head:  # fmt: skip
    """The options of ``attend``, checked; ``v`` is None if only the weights are needed."""
    lengths = _lengths_of_head(q, k, v)
    parts = () if mask is None else tuple(mask) if isinstance(mask, tuple | list) else (mask,)
    parts, score_mod = tuple(check_signature("mask", part) for part in parts), check_signature("score_mod", score_mod)
    masks = tuple(part for part in parts if callable(part))
    slot_masks = tuple(part for part in parts if not callable(part))
    for array in slot_masks:
        if jnp.result_type(array) != bool:
            raise TypeError(
                f"mask must be bool (True: visible), got {jnp.result_type(array)}; for an additive mask, use bias="
            )
        _check_pairs("mask", array, lengths)
    if bias is not None:
        if not jnp.issubdtype(jnp.result_type(bias), jnp.floating):
            raise TypeError(f"bias must be floating (it is added to the scores), got {jnp.result_type(bias)}")
        _check_pairs("bias", bias, lengths)
    scale = None if scale is None else to_number("scale", scale)
    mods: list[tuple] = [("mask", mask) for mask in masks]
    if score_mod is not None:
        mods.append(("score_mod", score_mod, jnp.float32))
    for argument, index, position in (("batch", batch, -4), ("head", head, -3)):
        for name, mod, *score in mods if index is None else ():
            if depends_on(mod, position, *score):
                raise ValueError(
                    f"{name} differs by {argument}, but its index is not given: pass {argument}= (over_heads passes "
                    f"head= to functions that take it, such as functools.partial(attend, ...))"
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


def _lengths_of_head(q: AnyArray, k: AnyArray, v: AnyArray | None) -> tuple[Length, Length]:
    """T and S of one head, from the checked shapes of its arrays."""
    shapes = {name: jnp.shape(x) for name, x in (("q", q), ("k", k), ("v", v)) if x is not None}
    q_shape, k_shape, v_shape = shapes["q"], shapes["k"], shapes.get("v", shapes["k"])
    if any(len(shape) != 2 for shape in shapes.values()) or q_shape[1] != k_shape[1] or k_shape[0] != v_shape[0]:
        got = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"one head takes q [T, H], k [S, H] and v [S, D], got {got}; over_heads maps it over all heads, and "
            "dot_product_attention takes batches"
        )
    return q_shape[0], k_shape[0]


def _check_pairs(name: str, array: AnyArray, lengths: tuple[Length, Length]) -> None:
    shape = jnp.shape(array)
    if len(shape) != 2 or any(size not in (1, length) for size, length in zip(shape, lengths, strict=True)):
        raise ValueError(
            f"{name} must be [T, S] = {list(lengths)} for one head (or 1 along either axis), got {list(shape)}"
        )


def convert_mods(options: Any, q: Array, lengths: tuple[Length, Length]) -> Any:
    """A ``Head`` or ``AttentionArgs`` with plain masks and score functions traced; their captured arrays are leaves.

    ``lengths``: T and S, with which the functions are checked.
    """

    def convert(name: str, mod: PyTree, kind: type, *score: DTypeLike) -> PyTree:
        return closure_convert(mod, lambda result: check_mod(name, result, kind, lengths), lengths, *score)

    masks = tuple(convert("mask", mask, bool) for mask in options.masks)
    score_mod = convert("score_mod", options.score_mod, jnp.floating, softmax_dtype(q))
    return dataclasses.replace(options, masks=masks, score_mod=score_mod)


def softmax_dtype(x: Array) -> Any:
    """The dtype of scores, weights and lse: float32, or float64 for float64 input."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def visible_pairs(head: Head, indices: tuple) -> Bool[Array, "#T #S"] | None:
    """The visible pairs, broadcastable to ``[T,S]``; None without a mask."""
    parts = [evaluate_mask(mask, indices) for mask in head.masks] + [jnp.asarray(array) for array in head.slot_masks]
    return functools.reduce(operator.and_, parts) if parts else None


def evaluate_mask(mask: MaskFunction, indices: tuple) -> Bool[Array, "#T #S"]:
    """The values of a mask, checked."""
    with calling("mask"):
        visible = mask(*indices)
        check_mod("mask", visible, bool, (indices[2].shape[0], indices[3].shape[1]))
    visible = jnp.asarray(visible)
    return visible.reshape((1,) * (2 - visible.ndim) + visible.shape)


def apply_score_mod(score_mod: ScoreMod, scores: Array, visible: Array | None, indices: tuple) -> Array:
    """What a score function makes of the visible scores, checked."""
    if visible is not None:
        scores = jnp.where(visible, scores, 1.0)  # stand-in: keeps an infinite derivative out
    with calling("score_mod"):
        modified = score_mod(scores, *indices)
        check_mod("score_mod", modified, jnp.floating, scores.shape)
    return jnp.broadcast_to(modified, scores.shape).astype(scores.dtype)


def check_mod(name: str, result: ArrayLike, kind: type, shape: tuple[Length, ...]) -> None:
    """Raises if a mask (``kind`` bool) or score function (floating) returned the wrong dtype or shape."""
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


def _weights(q: Array, k: Array, visible: Array | None, head: Head, indices: tuple) -> tuple[Array, Array]:
    """Weights and lse from one shared expression, so that requesting either changes no bit of the other."""
    if visible is not None:
        # Unseen keys, and queries that see nothing, may hold NaN; 0 * NaN in the products' derivatives is NaN.
        q, k = _zero_unseen(q, visible.any(axis=1)), _zero_unseen(k, visible.any(axis=0))
    raw = jnp.einsum(
        "th,sh->ts", q, k.astype(q.dtype), precision=head.precision, preferred_element_type=softmax_dtype(q)
    )
    weights, log_row_sum = _softmax(finish_scores(raw, visible, head, indices, q.shape[-1]))
    # The lse needs the row maxima. Reading them from the scores above would give a second use to what XLA fuses into
    # one pass, and change the weights' last bits. So the scores are finished again, behind a barrier.
    recomputed = jax.lax.optimization_barrier(jax.lax.stop_gradient(raw))
    recomputed = jax.lax.stop_gradient(finish_scores(recomputed, visible, head, indices, q.shape[-1]))
    return weights, jax.lax.stop_gradient(row_maximum(recomputed)) + log_row_sum


def _zero_unseen(x: Array, seen: Array) -> Array:
    return jnp.where(seen[:, None], x, jnp.zeros((), x.dtype))


def finish_scores(scores: Array, visible: Array | None, head: Head, indices: tuple, dim: Length) -> Array:
    """The scores ``[T,S]`` from ``q k^T``: scaled, biased, modified and masked with -inf; ``dim`` is H."""
    dtype = scores.dtype
    scores *= jnp.asarray(dim**-0.5 if head.scale is None else head.scale, dtype)
    if head.bias is not None:
        scores += head.bias.astype(dtype)
    if head.score_mod is not None:
        scores = apply_score_mod(head.score_mod, scores, visible, indices)
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


@jax.custom_jvp
def _softmax(scores: Float[Array, "T S"]) -> tuple[Float[Array, "T S"], Float[Array, " T"]]:
    """The softmax of each row, and its log-sum-exp minus the row maximum; 0 and -inf for a row that is all -inf.

    Weights are ``exp(scores - row_max) / row_sum``. ``exp(scores - lse)`` would round ``row_max + log(row_sum)``, which
    at logits of 1e4 puts weights off by 5e-4.
    """
    exponentials = jnp.exp(scores - row_maximum(scores)[:, None])
    row_sum = jnp.sum(exponentials, axis=-1)
    # The largest exponential of a row is 1, so only a row that sees nothing has a sum below 1. Multiply by the
    # reciprocal: XLA turns a division into that unless row_sum has another use, and then the weights' last bit would
    # depend on whether the lse is used.
    inverse = 1.0 / jnp.maximum(row_sum, 1.0)
    return exponentials * inverse[:, None], jnp.log(row_sum)


@_softmax.defjvp
def _softmax_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[tuple, tuple]:
    # In terms of the weights, so that no second matrix is saved for the derivative.
    (scores,), (tangent,) = primals, tangents
    weights, log_row_sum = _softmax(scores)
    mean_tangent = jnp.sum(weights * tangent, axis=-1)
    return (weights, log_row_sum), (weights * (tangent - mean_tangent[:, None]), mean_tangent)


def row_maximum(scores: Float[Array, "T S"]) -> Float[Array, " T"]:
    """The largest score of each row, and at least the least float."""
    # The least float instead of -inf, because -inf - -inf is NaN. lax.reduce, because a select would keep XLA from
    # fusing product, maximum and exponential into one pass.
    least = jnp.finfo(scores.dtype).min.astype(scores.dtype)
    if scores.shape[1] == 1:  # XLA reduces a single column to its entry and drops the initial value
        return jnp.maximum(scores[:, 0], least)
    return jax.lax.reduce(scores, least, jax.lax.max, (1,))
