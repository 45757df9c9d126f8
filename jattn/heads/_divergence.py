"""Measures how much the heads of a layer differ, in linear memory."""

from typing import Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from jattn._core import deferred
from jattn._core.arguments import make_call
from jattn._core.call import Call, ScoreOptions, softmax_dtype
from jattn._core.vmap import canonical
from jattn._mods.arrays import arange
from jattn.heads._dense_statistics import jensen_shannon
from jattn.heads._sequences import find_places
from jattn.heads._statistics import eligible_rows
from jattn.kernels import dense as dense_kernel
from jattn.masks import MaskFunction

WEIGHTS = 2**21  # weights in memory at once, over all heads and sequences


def divergence(
    query: ArrayLike,
    key: ArrayLike,
    *,
    eligible: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    **options: Unpack[ScoreOptions],
) -> tuple[Array, Array]:
    """Measures how much heads differ, and how much of that is noise: ``(between [N,N], floor [N])``.

    ``between[i, j]`` is the Jensen-Shannon divergence between heads i and j, over ln 2, averaged over rows: 0 for equal
    patterns, 1 for heads that never look at the same key. A head's pattern is the mean of its weights over sequences,
    because on a single sequence, content-based heads differ even from themselves. With several sequences, the pattern
    of head i on one half of them (the even indices) is compared with the pattern of head j on the other half, and vice
    versa. The diagonal, ``floor``, is then each head's distance from itself, and only distances above this floor are
    real. For a single sequence, or if one half sees nothing, the diagonal is 0 and the floor is NaN.

    A few rows of all heads are processed at a time, in O(T + S) memory (forward), with ``2 N^2 T S`` logarithms.

    Args:
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]``, or without B. All sequences must have the same layout, so that
            their rows correspond.
        eligible: bool ``[B,T]`` or ``[T]``: the queries to average over; all but padding by default. Queries that see
            nothing never count.
        bias: floats added to the scores, broadcastable to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        options: other keywords of ``jattn.attention_weights``, such as ``is_causal`` and ``score_mod``; not ``sinks``.

    Returns:
        Two arrays, float32 (or float64).

    Raises:
        ValueError, TypeError: an argument has the wrong shape or dtype; the message names it.

    Example:
        >>> code = 9 * jnp.eye(4)  # one for each position
        >>> query, key = jnp.stack([0 * code, code], 1), jnp.stack([code, code], 1)  # uniform; at its own position
        >>> between, floor = jattn.heads.divergence(jnp.stack([query, query]), jnp.stack([key, key]))
        >>> print(np.array(between).round(3), np.array(floor).round(3))
        [[0.    0.549]
         [0.549 0.   ]] [0. 0.]

    Source: Lin, 1991, https://doi.org/10.1109/18.61115.
    """
    call = make_call(query, key, None, bias, mask, **options)
    B, T, N, _ = call.query.shape
    real = find_places(call, arange(T), arange(call.key.shape[1])).real
    counts = jnp.broadcast_to(real if eligible is None else eligible_rows(eligible, B, T), (B, T))
    zeros = jax.ShapeDtypeStruct((N, N), softmax_dtype(call.query))
    total, count = deferred.call(_sum_over_rows, canonical(call), counts, out=(zeros, zeros))
    between = total / jnp.maximum(count, 1)
    floor = jnp.where((jnp.diagonal(count) > 0) & (B > 1), jnp.diagonal(between), jnp.nan)
    return between, floor


def _sum_over_rows(platform: str, call: Call, counts: Array) -> tuple[Array, Array]:
    """``[N,N]`` each: the summed divergences of each pair of heads, and the number of rows."""
    (B, T, N, _), S = call.query.shape, call.key.shape[1]
    zeros = jnp.zeros((N, N), softmax_dtype(call.query))
    size = max(1, min(T, WEIGHTS // max(B * N * S, 1)))

    def add(carry: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        rows = start + jnp.arange(size)
        weights, _ = dense_kernel.weights(call.take(rows=jnp.minimum(rows, T - 1)))  # [B,N,size,S]
        counted = counts[:, jnp.minimum(rows, T - 1)] & (rows < T)[None]
        weights = jnp.where(counted[:, None, :, None], weights, 0.0)
        even, odd = _mean_pattern(weights[0::2]), _mean_pattern(weights[1::2] if B > 1 else weights)
        sums = jax.lax.map(lambda head: jax.vmap(_divergence_sums, (None, 0))(head, odd), even)  # one head against all
        return jax.tree.map(lambda old, new: old + new + new.T, carry, sums), None

    if B * T * S == 0:
        return zeros, zeros
    return jax.lax.scan(add, (zeros, zeros), jnp.arange(0, T, size))[0]


def _mean_pattern(weights: Array) -> tuple[Array, Array]:
    """The mean of ``weights [B,N,T,S]`` over the sequences in which a row sees a key, and whether there are any."""
    seen = (weights != 0).any(-1).sum(0)  # [N,T]; a NaN counts as seen
    return weights.sum(0) / jnp.maximum(seen, 1)[..., None].astype(weights.dtype), seen > 0


def _divergence_sums(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """The divergence of two patterns ``[T,S]``, summed over the rows present in both, and the number of such rows."""
    both = a[1] & b[1]
    divergences = jnp.where(both, jensen_shannon(a[0], b[0]), 0.0)
    return divergences.sum(), both.sum().astype(divergences.dtype)
