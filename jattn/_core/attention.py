"""The attention equations for one head of one sequence; ``jattn._core.vmap`` maps them over many.

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
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jattn._core.arguments import make_head
from jattn._core.call import Call, MaskLike, softmax_dtype
from jattn._core.dropout import Dropout, drop
from jattn._mods.arrays import Length, calling
from jattn._mods.closure_convert import closure_convert
from jattn._mods.keywords import suggest_keywords
from jattn.masks import MaskFunction
from jattn.score_mods import ScoreMod

# Names of the results for remat policies: jax.checkpoint_policies.save_only_these_names(*NAMES).
NAMES = ("attention_out", "attention_lse")


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
        q, k, v: ``[T,H]``, ``[S,H]`` and ``[S,D]``, floats of one dtype. Products accumulate in at least float32.
        mask: a function ``(b, h, q_idx, kv_idx) -> bool`` over positions, a bool array ``[T|1, S|1]`` over slots, or
            a sequence of these, all of which must be True. Keys and values seen by no query may hold NaN.
        bias: floats ``[T|1, S|1]`` added to the scores, over slots.
        score_mod: a function ``(score, b, h, q_idx, kv_idx) -> score`` over positions.
        scale: multiplies the scores; ``1 / sqrt(H)`` by default.
        batch, head: the indices b and h that ``mask``, ``score_mod`` and dropout see; ``over_heads`` passes ``head``.
            Required only if any of these varies by sequence or head.
        query_positions, kv_positions: integers ``[T]`` and ``[S]``, the positions that these functions see; by default
            0, 1, 2, ...
        dropout: ``(rate, key)``. The kept weights depend only on the key and (b, h, q, kv); ``batch`` and ``head``
            default to 0.
        precision: the ``jax.lax.Precision`` of both products, or any ``precision`` that ``jax.numpy.einsum`` accepts.

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
    return dense(
        make_head(
            q, k, v, mask=mask, bias=bias, score_mod=score_mod, scale=scale, batch=batch, head=head,
            query_positions=query_positions, kv_positions=kv_positions, dropout=dropout, precision=precision,
        )
    )  # fmt: skip


def dense(head: Call) -> tuple[Array, Array]:
    """``attend`` for a checked call of one head."""
    visible, v = visible_pairs(head), head.value
    weights, lse = _weights(head, visible)
    if head.dropout is not None:
        weights = drop(weights, head.dropout, head.indices)
    if visible is not None:
        v = _zero_unseen(v, visible.any(axis=0))
    out = jnp.einsum(
        "ts,sd->td", weights.astype(v.dtype), v, precision=head.precision, preferred_element_type=weights.dtype
    )
    return checkpoint_name(out.astype(v.dtype), NAMES[0]), checkpoint_name(lse, NAMES[1])


def dense_weights(head: Call) -> tuple[Array, Array]:
    """The pre-dropout weights ``[T,S]`` of ``attend`` and its lse ``[T]``; float32 (float64 for float64 input)."""
    return _weights(head, visible_pairs(head))


def convert_mods(call: Call) -> Call:
    """The call (of one head or all) with plain masks and score functions traced; their captured arrays are leaves."""

    def convert(name: str, mod: PyTree, kind: type, *score: DTypeLike) -> PyTree:
        return closure_convert(mod, lambda result: check_mod(name, result, kind, call.lengths), call.lengths, *score)

    masks = tuple(convert("mask", mask, bool) for mask in call.masks)
    score_mod = convert("score_mod", call.score_mod, jnp.floating, softmax_dtype(call.query))
    return dataclasses.replace(call, masks=masks, score_mod=score_mod)


def visible_pairs(head: Call) -> Bool[Array, "#T #S"] | None:
    """The visible pairs of one head, broadcastable to ``[T,S]``; None without a mask."""
    indices = head.indices if head.masks else ()
    parts = [evaluate_mask(mask, indices) for mask in head.masks] + [jnp.asarray(array) for array in head.slot_masks]
    return functools.reduce(operator.and_, parts) if parts else None


def evaluate_mask(mask: MaskFunction, indices: tuple) -> Bool[Array, "#T #S"]:
    """The checked values of a mask."""
    with calling("mask"):
        visible = mask(*indices)
        check_mod("mask", visible, bool, (indices[2].shape[0], indices[3].shape[1]))
    visible = jnp.asarray(visible)
    return visible.reshape((1,) * (2 - visible.ndim) + visible.shape)


def apply_score_mod(score_mod: ScoreMod, scores: Array, visible: Array | None, indices: tuple) -> Array:
    """The checked result of a score function on the visible scores."""
    if visible is not None:
        scores = jnp.where(visible, scores, 1.0)  # stand-in: keeps an infinite derivative out
    with calling("score_mod"):
        modified = score_mod(scores, *indices)
        check_mod("score_mod", modified, jnp.floating, scores.shape)
    return jnp.broadcast_to(modified, scores.shape).astype(scores.dtype)


def check_mod(name: str, result: ArrayLike, kind: type, shape: tuple[Length, ...]) -> None:
    """Raises if a mask (``kind`` is bool) or score function (floating) returned the wrong dtype or shape."""
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


def _weights(head: Call, visible: Array | None) -> tuple[Array, Array]:
    """Weights and lse from one shared expression, so that requesting one leaves the other bit-identical."""
    q, k = head.query, head.key
    if visible is not None:
        # Unseen keys, and queries that see nothing, may hold NaN; 0 * NaN in the products' derivatives is NaN.
        q, k = _zero_unseen(q, visible.any(axis=1)), _zero_unseen(k, visible.any(axis=0))
    # The query may be in the softmax's dtype, to give its gradient that dtype.
    raw = jnp.einsum(
        "th,sh->ts", q, k.astype(q.dtype), precision=head.precision, preferred_element_type=softmax_dtype(q)
    )
    weights, log_row_sum = _softmax(scores_of(raw, visible, head))
    # The lse needs the row maxima. Reading them from the scores above would add a second use of an intermediate that
    # XLA fuses into one pass, and change the weights' last bits. So the scores are finished again, behind a barrier.
    recomputed = jax.lax.optimization_barrier(jax.lax.stop_gradient(raw))
    recomputed = jax.lax.stop_gradient(scores_of(recomputed, visible, head))
    return weights, jax.lax.stop_gradient(row_maximum(recomputed)) + log_row_sum


def _zero_unseen(x: Array, seen: Array) -> Array:
    return jnp.where(seen[:, None], x, jnp.zeros((), x.dtype))


def finish_scores(
    scores: Array, bias: Array | None, visible: Array | None, head: Call, indices: Callable[[], tuple]
) -> Array:
    """The scores of one head, or of a block, from scaled products: biased, modified and masked with -inf.

    Options change scores only here and in ``Call.score_scale``. Other kernels reject options unknown to them.
    """
    if bias is not None:
        scores += bias.astype(scores.dtype)
    if head.score_mod is not None:
        scores = apply_score_mod(head.score_mod, scores, visible, indices())
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf)


def scores_of(raw: Array, visible: Array | None, head: Call) -> Array:
    """The scores ``[T,S]`` of one head from ``raw``, its ``q k^T``."""
    scores = raw * jnp.asarray(head.score_scale, raw.dtype)
    return finish_scores(scores, head.bias, visible, head, lambda: head.indices)


@jax.custom_jvp
def _softmax(scores: Float[Array, "T S"]) -> tuple[Float[Array, "T S"], Float[Array, " T"]]:
    """The softmax of each row, and its log-sum-exp minus the row maximum; 0 and -inf for a row of all -inf.

    Weights are ``exp(scores - row_max) / row_sum``. ``exp(scores - lse)`` would round ``row_max + log(row_sum)``,
    causing an error of 5e-4 in the weights at logits of 1e4.
    """
    exponentials = jnp.exp(scores - row_maximum(scores)[:, None])
    row_sum = jnp.sum(exponentials, axis=-1)
    # The largest exponential of a row is 1, so only a row that sees nothing has a sum below 1. Multiply by the
    # reciprocal: XLA turns a division into this multiplication unless row_sum has another use, and the weights' last
    # bit would then depend on whether the lse is used.
    inverse = 1.0 / jnp.maximum(row_sum, 1.0)
    return exponentials * inverse[:, None], jnp.log(row_sum)


@_softmax.defjvp
def _softmax_jvp(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[tuple, tuple]:
    # Expressed in terms of the weights, so that no second matrix is saved for the derivative.
    (scores,), (tangent,) = primals, tangents
    weights, log_row_sum = _softmax(scores)
    mean_tangent = jnp.sum(weights * tangent, axis=-1)
    return (weights, log_row_sum), (weights * (tangent - mean_tangent[:, None]), mean_tangent)


def row_maximum(scores: Float[Array, "T S"]) -> Float[Array, " T"]:
    """The largest score of each row, but at least the lowest float."""
    # The lowest float instead of -inf, because -inf - -inf is NaN. lax.reduce, because a select would keep XLA from
    # fusing product, maximum and exponential into one pass.
    least = jnp.finfo(scores.dtype).min.astype(scores.dtype)
    if scores.shape[1] == 1:  # XLA reduces a single column to its entry and drops the initial value
        return jnp.maximum(scores[:, 0], least)
    return jax.lax.reduce(scores, least, jax.lax.max, (1,))
