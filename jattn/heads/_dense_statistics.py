"""Computes statistics of one head's weights ``[T,S]``; map them over heads and sequences with ``jax.vmap``.

Each is a mean over the rows for which it is defined, and 0 if there are none. The bool array ``eligible [T]`` further
restricts these rows, for example to real tokens. A weight of 0 does not show whether a key is hidden. If ``visible``,
bool ``[T,S]``, is given, only queries that see a relevant key count. Row and column 0 are the first token of the
sequence; for packed or padded sequences, use ``statistics``.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def target_weight(weights: Float[Array, "T S"], targets: Int[Array, " T"]) -> Float[Array, ""]:
    """Mean weight on one key per query: ``mean over q of weights[q, targets[q]]``.

    Args:
        weights: ``[T,S]``; rows sum to 1.
        targets: integers ``[T]``: the key's slot for each query; -1 excludes the query.

    Returns:
        A scalar in [0, 1].

    Example:
        >>> weights = jnp.array([[1.0, 0.0, 0.0], [0.5, 0.5, 0.0], [0.0, 1.0, 0.0]])
        >>> targets = jnp.array([-1, 0, 1])  # the key that each query should look at; the first has none
        >>> float(jattn.heads.target_weight(weights, targets))
        0.75
    """
    on_target = jnp.take_along_axis(weights, jnp.maximum(targets, 0)[:, None], axis=1)[:, 0]
    return _mean(on_target, targets >= 0)


def offset_profile(
    weights: Float[Array, "T S"],
    eligible: Bool[Array, " T"] | None = None,
    visible: Bool[Array, "T S"] | None = None,
) -> Float[Array, " T+S-1"]:
    """Mean weight at each offset of the key from the query, ``kv - q`` from ``-(T-1)`` to ``S-1``.

    Args:
        weights: ``[T,S]``.
        eligible: bool ``[T]``; all queries by default.
        visible: bool ``[T,S]``: the visible pairs; all by default.

    Returns:
        ``[T+S-1]``; entry ``o`` averages ``weights[q, q + o - (T-1)]`` over the eligible queries that have this key.

    Example:
        >>> weights = jnp.eye(4)[jnp.array([0, 0, 1, 2])]  # a previous-token head
        >>> profile = jattn.heads.offset_profile(weights)
        >>> int(profile.argmax()) - 3  # as an offset: T - 1 = 3
        -1
    """
    length, keys = weights.shape
    offsets = jnp.arange(length + keys - 1) - (length - 1)
    kv_idx = jnp.arange(length)[None, :] + offsets[:, None]  # [T+S-1,T]
    counted = (kv_idx >= 0) & (kv_idx < keys)
    pairs = jnp.arange(length)[None, :], jnp.clip(kv_idx, 0, keys - 1)
    diagonals, counted = weights[pairs], counted if visible is None else counted & visible[pairs]
    return jax.vmap(lambda values, counted: _mean(values, counted, eligible))(diagonals, counted)


def previous_token(
    weights: Float[Array, "T T"],
    eligible: Bool[Array, " T"] | None = None,
    visible: Bool[Array, "T T"] | None = None,
) -> Float[Array, ""]:
    """Mean weight on the previous token: ``mean over q >= 1 of weights[q, q-1]``, a scalar in [0, 1].

    Args:
        weights: ``[T,T]``, from self-attention.
        eligible: bool ``[T]``; all queries by default.
        visible: bool ``[T,T]``: the visible pairs; all by default.

    Example:
        >>> weights = jnp.eye(4)[jnp.array([0, 0, 1, 2])]  # a previous-token head
        >>> even = jnp.tri(4) / jnp.tri(4).sum(1, keepdims=True)  # a uniform causal head
        >>> [round(float(jattn.heads.previous_token(head)), 3) for head in (weights, even)]
        [1.0, 0.361]
    """
    targets = jnp.arange(weights.shape[0]) - 1
    if visible is not None:
        targets = jnp.where(jnp.take_along_axis(visible, jnp.maximum(targets, 0)[:, None], 1)[:, 0], targets, -1)
    return target_weight(weights, targets if eligible is None else jnp.where(eligible, targets, -1))


def induction(
    weights: Float[Array, "T T"],
    tokens: Int[Array, " T"],
    eligible: Bool[Array, " T"] | None = None,
    visible: Bool[Array, "T T"] | None = None,
) -> Float[Array, ""]:
    """Mean weight on the tokens that followed earlier occurrences of the current token.

    For each query q that sees such a key, sums ``weights[q, kv]`` over ``kv <= q`` with ``tokens[kv-1] == tokens[q]``.
    If the token occurred several times, every continuation counts, so a perfect induction head scores 1.

    Args:
        weights: ``[T,T]``, from causal self-attention.
        tokens: integers ``[T]``.
        eligible: bool ``[T]``; all queries by default.
        visible: bool ``[T,T]``: the visible pairs, such as those within a window; all earlier keys by default.

    Returns:
        A scalar in [0, 1].

    Example:
        >>> tokens = jnp.array([3, 1, 2, 3, 1])  # 3 and 1 recur; 1 and 2 followed them, in slots 1 and 2
        >>> weights = jnp.eye(5)[jnp.array([0, 0, 0, 1, 2])]  # the last two queries look there
        >>> float(jattn.heads.induction(weights, tokens))
        1.0

    Source: https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads (prefix matching).
    """
    position = jnp.arange(tokens.shape[0])
    follows = jnp.roll(tokens, 1)[None, :] == tokens[:, None]  # [q, kv]: tokens[kv-1] == tokens[q]
    follows &= (position[None, :] >= 1) & (position[None, :] <= position[:, None])
    follows = follows if visible is None else follows & visible
    return _mean(jnp.sum(jnp.where(follows, weights, 0.0), axis=1), follows.any(axis=1), eligible)


def first_token(
    weights: Float[Array, "T S"],
    eligible: Bool[Array, " T"] | None = None,
    visible: Bool[Array, "T S"] | None = None,
) -> Float[Array, ""]:
    """Mean weight on the first key, an attention sink: ``mean over q >= 1 of weights[q, 0]``, a scalar in [0, 1].

    Args:
        weights: ``[T,S]``.
        eligible: bool ``[T]``; all queries by default.
        visible: bool ``[T,S]``: the visible pairs; all by default.

    Example:
        >>> weights = jnp.array([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0], [0.7, 0.2, 0.1]])
        >>> round(float(jattn.heads.first_token(weights)), 3)
        0.8

    Source: https://arxiv.org/abs/2309.17453.
    """
    later = jnp.arange(weights.shape[0]) > 0
    return _mean(weights[:, 0], later if visible is None else later & visible[:, 0], eligible)


def entropy(
    weights: Float[Array, "T S"],
    visible: Bool[Array, "T S"] | None = None,
    eligible: Bool[Array, " T"] | None = None,
) -> Float[Array, ""]:
    """Mean relative entropy, ``-sum_kv p ln p / ln(number of visible keys)``, over rows that see at least two keys.

    1 for a uniform head, causal or not (each row is relative to its own maximum); 0 for one-hot weights.

    Args:
        weights: ``[T,S]``.
        visible: bool ``[T,S]``: the visible pairs; all by default.
        eligible: bool ``[T]``; all queries by default.

    Returns:
        A scalar in [0, 1].

    Example:
        >>> visible = jnp.tri(4, dtype=bool)
        >>> even = visible / visible.sum(1, keepdims=True)  # a uniform causal head
        >>> two = jnp.tile(jnp.array([0.5, 0.5, 0.0, 0.0]), (4, 1))  # a head that looks at two keys of four
        >>> round(float(jattn.heads.entropy(even, visible)), 3), round(float(jattn.heads.entropy(two)), 3)
        (1.0, 0.5)
    """
    if visible is None:
        visible = jnp.ones(weights.shape, bool)
    count = jnp.sum(visible, axis=1)
    most = jnp.log(jnp.maximum(count, 2).astype(weights.dtype))
    return _mean(jnp.sum(_minus_p_log_p(weights), axis=1) / most, count >= 2, eligible)


def pattern_divergence(
    patterns: Float[Array, "N T S"], eligible: Bool[Array, " T"] | None = None
) -> Float[Array, "N N"]:
    """Jensen-Shannon divergence between heads, divided by ln 2 and averaged over rows; in [0, 1].

    ``JS(p, r) = H((p + r) / 2) - (H(p) + H(r)) / 2`` with ``H`` the entropy of a row; 0 for equal heads, 1 for heads
    that never look at the same key.

    Args:
        patterns: ``[N,T,S]``, the weights of N heads, preferably averaged over many sequences: on a single sequence,
            content-based heads differ even from themselves. ``divergence`` works from queries and keys, at any length.
        eligible: bool ``[T]``; all queries by default.

    Returns:
        ``[N,N]``, symmetric, with a zero diagonal.

    Example:
        >>> straight, crossed = jnp.eye(2), jnp.eye(2)[::-1]  # heads that look at different keys
        >>> print(np.array(jattn.heads.pattern_divergence(jnp.stack([straight, crossed]))).round(3))
        [[0. 1.]
         [1. 0.]]

    Source: Lin, 1991, https://doi.org/10.1109/18.61115.
    """
    rows = jnp.ones(patterns.shape[1], bool) if eligible is None else eligible
    # Head by head: all pairs at once would take N times the memory of the patterns.
    return jax.lax.map(lambda p: jax.vmap(lambda r: _mean(jensen_shannon(p, r), rows))(patterns), patterns)


def jensen_shannon(p: Array, r: Array) -> Array:
    """Jensen-Shannon divergence, over ln 2, between rows of two weight matrices ``[...,S]``: ``[...]``, in [0, 1]."""
    of_mean = jnp.sum(_minus_p_log_p((p + r) / 2), axis=-1)
    mean_of_both = jnp.sum(_minus_p_log_p(p) + _minus_p_log_p(r), axis=-1) / 2
    return jnp.clip((of_mean - mean_of_both) / math.log(2.0), 0.0, 1.0)  # rounding may slightly leave the interval


def _minus_p_log_p(p: Array) -> Array:
    """``-p ln p``, with 0 at ``p = 0``."""
    return -p * jnp.log(jnp.where(p > 0, p, 1.0))


def _mean(values: Array, counted: Array, eligible: Array | None = None) -> Array:
    """Mean of ``values`` where ``counted`` and ``eligible``; 0 if there are none."""
    counted = counted if eligible is None else counted & eligible
    total = jnp.sum(jnp.where(counted, values, 0.0))
    return total / jnp.maximum(jnp.sum(counted), 1).astype(values.dtype)
