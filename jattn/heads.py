"""What a head does, in numbers: statistics of all heads at any length, and of one head's matrix of weights.

Each is a mean over *eligible* queries, the rows where the question makes sense; a statistic without any eligible
query is 0. ``statistics`` needs no matrix of weights. The others take one head's ``[T,S]``, to be lifted by
``jax.vmap``; there ``eligible``, a bool array ``[T]``, narrows the rows further (to those behind padding, say).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jattn.api import dot_product_attention, fold_weights

STATISTICS = ("entropy", "max_weight", "distance", "previous_token", "current_token", "first_token")


def statistics(
    query: ArrayLike,
    key: ArrayLike,
    *,
    lse: ArrayLike | None = None,
    names: Sequence[str] = STATISTICS,
    **options: Any,
) -> dict[str, Array]:
    """Statistics of every head's weights, in O(T + S) memory: ``{name: [B,N]}`` (or ``[N]``), float32 (or float64).

    With ``p`` the weights of a query, and means over the queries in brackets that see anything:

    - ``entropy``: ``-sum p ln p / ln(number of visible keys)`` (those that see two keys); 1 for a uniform head.
    - ``max_weight``: ``max p`` (all).
    - ``distance``: ``sum p |q - kv|`` (all).
    - ``previous_token``, ``current_token``: p at ``kv = q - 1`` (``q > 0``) and at ``kv = q`` (all).
    - ``first_token``: p at ``kv = 0`` (``q > 0``), also known as a sink. Source: https://arxiv.org/abs/2309.17453.

    ``q`` and ``kv`` are positions, as masks see them.

    Args:
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]``, or without B.
        lse: as of ``dot_product_attention(..., return_residual=True)``; computed when None.
        names: which statistics.
        options: those of ``fold_weights``. Positions must be the same for all sequences, ``[T]`` and ``[S]``.

    Raises:
        ValueError: no such statistic; positions that differ by sequence; as ``fold_weights``.

    Example:
        ``statistics(query, key, is_causal=True, names=["entropy"])["entropy"]``
    """
    unknown = [name for name in names if name not in STATISTICS]
    if unknown or isinstance(names, str):
        raise ValueError(f"names must be some of {', '.join(STATISTICS)}, got {names!r}")
    query, key = jnp.asarray(query), jnp.asarray(key)
    T, S = query.shape[-3], key.shape[-3]
    at = [
        _positions(which, options.get(which), length) for which, length in (("query_positions", T), ("kv_positions", S))
    ]
    if lse is None:
        no_value = jnp.zeros((*key.shape[:-1], 0), key.dtype)
        _, lse = dot_product_attention(query, key, no_value, return_residual=True, **options)
    dtype = jnp.result_type(lse)

    def step(rows: dict[str, Array], weights: Array, q_idx: Array, kv_idx: Array) -> dict[str, Array]:
        q, kv = at[0][q_idx], at[1][kv_idx]
        found = {
            "entropy": lambda: _minus_p_log_p(weights).sum(1),
            "distance": lambda: (weights * abs(q - kv).astype(dtype)).sum(1),
            "previous_token": lambda: jnp.where(kv == q - 1, weights, 0.0).sum(1),
            "current_token": lambda: jnp.where(kv == q, weights, 0.0).sum(1),
            "first_token": lambda: jnp.where(kv == 0, weights, 0.0).sum(1),
        }
        rows_here = q_idx[:, 0]
        return {
            name: row.at[rows_here].max(weights.max(1))
            if name == "max_weight"
            else row.at[rows_here].add(found[name]())
            for name, row in rows.items()
        }

    rows = fold_weights(step, {name: jnp.zeros(T, dtype) for name in names}, query, key, lse=lse, **options)
    seen, later = jnp.moveaxis(jnp.asarray(lse), -1, -2) > -jnp.inf, at[0] > 0  # [B,N,T], [T]
    counted = dict.fromkeys(names, seen)
    counted |= {name: seen & later.reshape((1,) * (seen.ndim - 1) + (T,)) for name in ("previous_token", "first_token")}
    if "entropy" in rows:
        most = _log_visible(query, key, options)
        counted["entropy"] = seen & (most > math.log(1.5))
        rows["entropy"] /= jnp.where(counted["entropy"], most, 1.0)
    over_rows = _mean
    for _ in range(seen.ndim - 1):
        over_rows = jax.vmap(over_rows)
    return {name: over_rows(row, counted[name]) for name, row in rows.items()}


def _positions(name: str, positions: Any, length: int) -> Array:
    positions = jnp.arange(length) if positions is None else jnp.asarray(positions)
    if positions.shape != (length,):
        raise ValueError(
            f"statistics take {name} that are the same for all sequences, [{length}], got {list(positions.shape)}"
        )
    return positions


def _log_visible(query: Array, key: Array, options: dict[str, Any]) -> Array:
    """``ln`` of the number of keys that each query sees, ``[B,N,T]``: the log-sum-exp of scores that are all 0."""
    plain = {name: value for name, value in options.items() if name not in ("bias", "score_mod", "scale")}
    query, key = jnp.zeros_like(query), jnp.zeros_like(key)
    _, count = dot_product_attention(query, key, key[..., :0], return_residual=True, **plain)
    return jnp.moveaxis(count, -1, -2)


def target_weight(weights: Float[Array, "T S"], targets: Int[Array, " T"]) -> Float[Array, ""]:
    """Mean weight on one given key per query: ``mean over q of weights[q, targets[q]]``.

    Args:
        weights: ``[T,S]``, rows that sum to 1.
        targets: integers ``[T]``: the key slot to look at; -1 leaves a query out.

    Returns:
        A scalar in [0, 1].
    """
    found = jnp.take_along_axis(weights, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return _mean(found, targets >= 0)


def offset_profile(weights: Float[Array, "T S"], eligible: Bool[Array, " T"] | None = None) -> Float[Array, " T+S-1"]:
    """Mean weight at each offset of the key from the query, ``kv - q`` from ``-(T-1)`` to ``S-1``.

    Args:
        weights: ``[T,S]``.
        eligible: bool ``[T]``; all queries by default.

    Returns:
        ``[T+S-1]``: entry ``o`` averages ``weights[q, q + o - (T-1)]`` over the eligible queries that have such a key.
    """
    length, keys = weights.shape
    offsets = jnp.arange(length + keys - 1) - (length - 1)
    kv_idx = jnp.arange(length)[None, :] + offsets[:, None]  # [T+S-1,T]
    counted = (kv_idx >= 0) & (kv_idx < keys)
    if eligible is not None:
        counted &= eligible[None, :]
    found = weights[jnp.arange(length)[None, :], jnp.clip(kv_idx, 0, keys - 1)]
    return jax.vmap(_mean)(found, counted)


def previous_token(weights: Float[Array, "T T"], eligible: Bool[Array, " T"] | None = None) -> Float[Array, ""]:
    """Mean weight on the token before: ``mean over q >= 1 of weights[q, q-1]``. ``weights [T,T]``; a scalar."""
    targets = jnp.arange(weights.shape[0]) - 1
    return target_weight(weights, targets if eligible is None else jnp.where(eligible, targets, -1))


def induction(
    weights: Float[Array, "T T"], tokens: Int[Array, " T"], eligible: Bool[Array, " T"] | None = None
) -> Float[Array, ""]:
    """Mean weight on the tokens that came after an earlier occurrence of the current token.

    ``mean over q of sum of weights[q, kv] over kv <= q with tokens[kv-1] == tokens[q]``, over the queries whose token
    occurred before. Where it occurred several times, any continuation counts, so a perfect induction head scores 1.
    Source: https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads (prefix matching).

    Args:
        weights: ``[T,T]``, causal self-attention.
        tokens: integers ``[T]``.
        eligible: bool ``[T]``; all queries by default.
    """
    position = jnp.arange(tokens.shape[0])
    follows = jnp.roll(tokens, 1)[None, :] == tokens[:, None]  # [q, kv]: tokens[kv-1] == tokens[q]
    follows &= (position[None, :] >= 1) & (position[None, :] <= position[:, None])
    occurred = follows.any(axis=1)
    return _mean(
        jnp.sum(jnp.where(follows, weights, 0.0), axis=1), occurred if eligible is None else occurred & eligible
    )


def sink(weights: Float[Array, "T S"], eligible: Bool[Array, " T"] | None = None) -> Float[Array, ""]:
    """Mean weight on the first key, over the queries after the first. Source: https://arxiv.org/abs/2309.17453."""
    later = jnp.arange(weights.shape[0]) > 0
    return _mean(weights[:, 0], later if eligible is None else later & eligible)


def entropy(
    weights: Float[Array, "T S"],
    visible: Bool[Array, "T S"] | None = None,
    eligible: Bool[Array, " T"] | None = None,
) -> Float[Array, ""]:
    """Mean of ``-sum_kv p ln p / ln(number of visible keys)``, over rows that see at least two keys.

    1 for a uniform head, also a causal one (each row is measured against its own maximum), 0 for a hard one.

    Args:
        weights: ``[T,S]``.
        visible: bool ``[T,S]``: the pairs that the mask leaves; all by default.
        eligible: bool ``[T]``; all queries by default.
    """
    if visible is None:
        visible = jnp.ones(weights.shape, bool)
    count = jnp.sum(visible, axis=1)
    counted = count >= 2 if eligible is None else (count >= 2) & eligible
    most = jnp.log(jnp.maximum(count, 2).astype(weights.dtype))
    return _mean(jnp.sum(_minus_p_log_p(weights), axis=1) / most, counted)


def divergence(patterns: Float[Array, "N T S"], eligible: Bool[Array, " T"] | None = None) -> Float[Array, "N N"]:
    """How much heads differ: Jensen-Shannon divergence of their rows over ln 2, averaged over rows; in [0, 1].

    ``JS(p, r) = H((p + r) / 2) - (H(p) + H(r)) / 2`` with ``H`` the entropy of a row; 0 for equal heads, 1 for heads
    that never look at the same key. Source: Lin, 1991, https://doi.org/10.1109/18.61115.

    Args:
        patterns: ``[N,T,S]``, the weights of N heads, best averaged over many sequences: on a single one, heads that
            look for content differ even from themselves.
        eligible: bool ``[T]``; all queries by default.

    Returns:
        ``[N,N]``, symmetric, with a zero diagonal.
    """
    rows = jnp.ones(patterns.shape[1], bool) if eligible is None else eligible
    return jax.vmap(lambda one: jax.vmap(lambda other: _jensen_shannon(one, other, rows))(patterns))(patterns)


def _jensen_shannon(one: Array, other: Array, eligible: Array) -> Array:
    """The mean over eligible rows for one pair of heads, both ``[T,S]``."""
    middle = jnp.sum(_minus_p_log_p((one + other) / 2), axis=1)
    ends = jnp.sum(_minus_p_log_p(one) + _minus_p_log_p(other), axis=1) / 2
    # rounding may leave a hair outside [0, 1]
    return jnp.clip(_mean((middle - ends) / math.log(2.0), eligible), 0.0, 1.0)


def _minus_p_log_p(p: Array) -> Array:
    """``-p ln p``, with 0 at ``p = 0``."""
    return -p * jnp.log(jnp.where(p > 0, p, 1.0))


def _mean(values: Array, counted: Array) -> Array:
    """Mean of ``values`` where ``counted``; 0 where nothing is."""
    total = jnp.sum(jnp.where(counted, values, 0.0))
    return total / jnp.maximum(jnp.sum(counted), 1).astype(values.dtype)
