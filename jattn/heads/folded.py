"""Statistics of all heads at any length, without their matrices of weights."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jattn.api import dot_product_attention, fold_weights
from jattn.attention import softmax_dtype
from jattn.kernels import blockwise
from jattn.request import make_lse, make_request

OF_TOKENS = ("duplicate_token", "induction")
STATISTICS = (
    "entropy", "max_weight", "max_logit", "distance", "previous_token", "current_token", "first_token",
    "offset_profile", "received", *OF_TOKENS,
)  # fmt: skip


def statistics(
    query: ArrayLike,
    key: ArrayLike,
    *,
    tokens: ArrayLike | None = None,
    lse: ArrayLike | None = None,
    names: Sequence[str] | None = None,
    eligible: ArrayLike | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Statistics of every head's weights, in O(T + S) memory: ``{name: [B,N]}`` (or ``[N]``), float32 (or float64).

    With ``p`` the weights of a query, and means over the eligible queries: those in brackets that see anything.

    - ``entropy``: ``-sum p ln p / ln(number of visible keys)`` (those that see two keys); 1 for a uniform head.
    - ``max_weight``: ``max p`` (all). ``max_logit``: the largest score of all.
    - ``distance``: ``sum p |q - kv|`` (all).
    - ``previous_token``, ``current_token``: p at ``kv = q - 1`` (``q > 0``) and at ``kv = q`` (all).
    - ``first_token``: p at ``kv = 0`` (``q > 0``), also known as a sink. Source: https://arxiv.org/abs/2309.17453.
    - ``offset_profile`` ``[B,N,T+S-1]``: p at each ``kv - q`` from ``-(T-1)`` to ``S-1`` (those that have such a key).
    - ``received`` ``[B,N,S]``: for each key the sum of p over all queries.
    - ``duplicate_token``: p at earlier occurrences of the query's token; ``induction``: p at the tokens that came after
      these (both: queries whose token occurred before). Source:
      https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads.
    - ``support``, always: ``{name: [B,N]}``, the number of eligible queries of each mean.

    ``q`` and ``kv`` are positions, as masks see them; in the profiles and for tokens they are slots.

    Args:
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]``, or without B.
        tokens: integers ``[B,T]`` or ``[T]``, of self-attention; for the last two.
        lse: as of ``dot_product_attention(..., return_residual=True)``; computed when None.
        names: which statistics; all that the arguments allow by default.
        eligible: bool ``[B,T]`` or ``[T]``: the queries that count at all; all by default.
        options: those of ``fold_weights``: ``mask``, ``is_causal``, ``score_mod``, ...

    Raises:
        ValueError: no such statistic; tokens or eligible of another shape, or not there; as ``fold_weights``.

    Example:
        ``statistics(query, key, is_causal=True, names=["entropy"])["entropy"]``
    """
    names = _names(names, tokens is not None)
    request = make_request(query, key, None, **options)
    (B, T, _, _), S, one_sequence = request.query.shape, request.key.shape[1], jnp.ndim(query) == 3
    given = lse is not None
    if lse is None:
        no_value = jnp.zeros((*request.key.shape[:-1], 0), request.key.dtype)
        _, found = dot_product_attention(request.query, request.key, no_value, return_residual=True, **options)
        lse = jnp.asarray(found)
    else:
        lse = make_lse(lse, request, one_sequence)
    counts = jnp.ones((1, T), bool) if eligible is None else eligible_rows(eligible, B, T).reshape(-1, T)
    positions = [
        jnp.arange(length)[None] if own is None else jnp.asarray(own)
        for own, length in ((request.query_positions, T), (request.kv_positions, S))
    ]
    tokens = None if tokens is None else _tokens(tokens, B, T, S, one_sequence)
    folded = [name for name in names if name != "max_logit" or "max_weight" not in names]
    sizes = {"offset_profile": max(T + S - 1, 0), "received": S}
    init = {"max_weight" if name == "max_logit" else name: jnp.zeros(sizes.get(name, T), lse.dtype) for name in folded}
    per_sequence = [counts, *positions, *(() if tokens is None else (tokens,))]
    rows = blockwise.fold(request, _step, init, lse, per_sequence)
    seen = (counts[:, :, None] & (lse != -jnp.inf)).swapaxes(1, 2)  # [B,N,T]; a NaN shall be seen
    visible = blockwise.count_visible(request) if given or "entropy" in names else None
    if given and visible is not None:  # with sinks, a row that sees nothing has a finite lse
        seen &= visible > 0
    result = _averages(names, rows, S, lse, seen, visible, positions[0], tokens)
    return jax.tree.map(lambda x: x[0], result) if one_sequence else result


def _names(names: Sequence[str] | None, with_tokens: bool) -> tuple[str, ...]:
    known = STATISTICS if with_tokens else tuple(name for name in STATISTICS if name not in OF_TOKENS)
    if names is None:
        return known
    if isinstance(names, str) or not set(names) <= set(STATISTICS):
        raise ValueError(f"names must be some of {', '.join(STATISTICS)}, got {names!r}")
    if not set(names) <= set(known):
        raise ValueError(f"{' and '.join(OF_TOKENS)} need tokens=, integers [B, T]")
    return tuple(names)


def eligible_rows(eligible: ArrayLike, B: int, T: int) -> Array:
    """The argument ``eligible``, checked: bool ``[T]`` or ``[B,T]``."""
    rows = jnp.asarray(eligible)
    if rows.shape not in ((T,), (B, T)) or rows.dtype != bool:
        raise ValueError(
            f"eligible must be bool [B, T] = {[B, T]} or [T], got {rows.dtype} of shape {list(rows.shape)}"
        )
    return rows


def _tokens(tokens: ArrayLike, B: int, T: int, S: int, one_sequence: bool) -> Array:
    tokens = jnp.asarray(tokens)
    wanted = (T,) if one_sequence else (B, T)
    if T != S or tokens.shape != wanted or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers {list(wanted)} of self-attention, got {tokens.dtype} of shape "
            f"{list(tokens.shape)} for {T} queries and {S} keys"
        )
    return tokens.reshape(B, T)


def _step(carry: dict[str, Array], logs: Array, q_idx: Array, kv_idx: Array, *of_sequence: Array) -> dict[str, Array]:
    """What a block, of the logarithms of weights, adds to each row's (or diagonal's, or column's) sum."""
    counts, q_at, kv_at, *tokens = of_sequence
    logs = jnp.where(counts[q_idx], logs, -jnp.inf)
    weights = jnp.exp(logs)
    q, kv = q_at[q_idx], kv_at[kv_idx]

    def where(pairs: Array) -> Array:
        return jnp.where(pairs, weights, 0.0).sum(1)

    def same(shift: int) -> Array:  # is the key, or the one before it, the query's token, earlier?
        return (
            (tokens[0][q_idx] == tokens[0][jnp.maximum(kv_idx - shift, 0)])
            & (kv_idx >= shift)
            & (kv_idx - shift < q_idx)
        )

    of_rows = {
        "entropy": lambda: (weights * jnp.where(logs > -jnp.inf, -logs, 0.0)).sum(1),
        "distance": lambda: (weights * abs(q - kv).astype(weights.dtype)).sum(1),
        "previous_token": lambda: where(kv == q - 1),
        "current_token": lambda: where(kv == q),
        "first_token": lambda: where(kv == 0),
        "duplicate_token": lambda: where(same(0)),
        "induction": lambda: where(same(1)),
    }
    rows, columns = q_idx[:, 0], kv_idx[0]
    added = {name: carry[name].at[rows].add(make()) for name, make in of_rows.items() if name in carry}
    if "max_weight" in carry:
        added["max_weight"] = carry["max_weight"].at[rows].max(weights.max(1))
    if "received" in carry:
        added["received"] = carry["received"].at[columns].add(weights.sum(0))
    if "offset_profile" in carry:
        profile, T = carry["offset_profile"], q_at.shape[0]
        diagonals = columns[0] - rows[-1] + T - 1 + jnp.arange(weights.shape[0] + weights.shape[1] - 1)
        added["offset_profile"] = profile.at[diagonals].add(_diagonal_sums(weights))
    return added


def _diagonal_sums(block: Array) -> Array:
    """``[t,s] -> [t+s-1]``: the sum over each diagonal, from the lower left corner to the upper right."""
    t, s = block.shape

    # row by row: several times faster on CPU than the reshapes and gathers tried
    def add(i: Array, sums: Array) -> Array:
        row, here = jax.lax.dynamic_index_in_dim(block, i, keepdims=False), t - 1 - i
        return jax.lax.dynamic_update_slice(sums, jax.lax.dynamic_slice(sums, (here,), (s,)) + row, (here,))

    return jax.lax.fori_loop(0, t, add, jnp.zeros(t + s - 1, block.dtype))


def _averages(
    names: Sequence[str],
    rows: dict[str, Array],
    S: int,
    lse: Array,
    seen: Array,
    visible: Array | None,
    q_positions: Array,
    tokens: Array | None,
) -> dict[str, Any]:
    """The means over eligible queries of the sums ``[B,N,...]``; ``seen [B,N,T]`` count and see anything, ``visible``
    keys."""
    lse, later = jnp.moveaxis(lse, 2, 1), (q_positions > 0)[:, None]  # [B,N,T]
    eligible = {"previous_token": seen & later, "first_token": seen & later}
    if tokens is not None:
        eligible |= dict.fromkeys(OF_TOKENS, seen & jax.vmap(_occurred)(tokens)[:, None])
    if "entropy" in names and visible is not None:
        eligible["entropy"] = seen & (visible >= 2)
        most = jnp.log(jnp.maximum(visible, 2).astype(lse.dtype))
        rows = rows | {"entropy": rows["entropy"] / most}
    found: dict[str, Any] = {"support": {name: eligible.get(name, seen).sum(-1) for name in names}}
    for name in names:
        if name == "max_logit":
            weight = jnp.where(seen, rows["max_weight"], 1.0)
            highest = jnp.max(jnp.where(seen, lse + jnp.log(weight), -jnp.inf), axis=-1, initial=-jnp.inf)
            found[name] = jnp.where(seen.any(-1), highest, 0.0)
        elif name == "received":
            found[name] = rows[name]
        elif name == "offset_profile":
            found[name] = rows[name] / _pairs_at_offsets(seen, S, lse.dtype)
        else:
            counted = eligible.get(name, seen)
            total = jnp.where(counted, rows[name], 0.0).sum(-1)
            found[name] = total / jnp.maximum(counted.sum(-1), 1).astype(total.dtype)
    return found


def _occurred(tokens: Array) -> Array:
    """Bool ``[T]``: did the token occur before?"""
    order = jnp.argsort(tokens, stable=True)
    again = jnp.concatenate([jnp.zeros(1, bool), tokens[order][1:] == tokens[order][:-1]])[: tokens.shape[0]]
    return jnp.zeros(tokens.shape, bool).at[order].set(again)


def _pairs_at_offsets(seen: Array, S: int, dtype: Any) -> Array:
    """``[B,N,T+S-1]``: how many queries that see anything have a key at each offset; 1 instead of 0."""
    T = seen.shape[-1]
    offsets = np.arange(max(T + S - 1, 0)) - (T - 1)
    first, end = np.clip(-offsets, 0, T), np.clip(S - offsets, 0, T)
    upto = jnp.concatenate([jnp.zeros((*seen.shape[:-1], 1), jnp.int32), jnp.cumsum(seen, -1, dtype=jnp.int32)], -1)
    return jnp.maximum(upto[..., end] - upto[..., first], 1).astype(dtype)


def coarse_weights(query: ArrayLike, key: ArrayLike, size: int = 64, **options: Any) -> Array:
    """A picture of each head's weights at any length: ``[B,N,size,size]`` (or ``[N,size,size]``), float32.

    Block ``(i, j)`` is the share of their weight that the queries of the i-th of ``size`` equal spans give to the keys
    of the j-th span; so rows sum to 1, or to 0 where nobody sees anything. In O(T + S) memory (forward).

    Args:
        query, key: as in ``statistics``.
        size: spans along either axis; at most T and S of them are used.
        options: those of ``fold_weights``.

    Raises:
        ValueError: ``size`` is not positive; as ``fold_weights``.
    """
    if not size > 0:
        raise ValueError(f"size must be positive, got {size}")
    T, S = jnp.shape(query)[-3], jnp.shape(key)[-3]
    rows, columns = min(size, T), min(size, S)

    def add(carry: Array, weights: Array, q_idx: Array, kv_idx: Array) -> Array:
        of_row = jax.nn.one_hot(q_idx[:, 0] * rows // T, rows, axis=0, dtype=weights.dtype)
        of_column = jax.nn.one_hot(kv_idx[0] * columns // S, columns, dtype=weights.dtype)
        return carry + of_row @ weights @ of_column

    sums = fold_weights(add, jnp.zeros((rows, columns), softmax_dtype(jnp.asarray(query))), query, key, **options)
    return sums / jnp.maximum(sums.sum(-1, keepdims=True), jnp.finfo(sums.dtype).tiny)
