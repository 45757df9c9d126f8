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
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int

from jattn.api import dot_product_attention
from jattn.kernels import blockwise
from jattn.request import Request, make_lse, make_request

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
        options: those of ``fold_weights``: ``mask``, ``is_causal``, ``score_mod``, ...

    Raises:
        ValueError: no such statistic; tokens of another shape, or not there; as ``fold_weights``.

    Example:
        ``statistics(query, key, is_causal=True, names=["entropy"])["entropy"]``
    """
    names = _names(names, tokens is not None)
    request = make_request(query, key, None, **options)
    (B, T, _, _), S, one_sequence = request.query.shape, request.key.shape[1], jnp.ndim(query) == 3
    if lse is None:
        no_value = jnp.zeros((*request.key.shape[:-1], 0), request.key.dtype)
        _, found = dot_product_attention(request.query, request.key, no_value, return_residual=True, **options)
        lse = jnp.asarray(found)
    else:
        lse = make_lse(lse, request, one_sequence)
    positions = [
        jnp.arange(length)[None] if given is None else jnp.asarray(given)
        for given, length in ((request.query_positions, T), (request.kv_positions, S))
    ]
    tokens = None if tokens is None else _tokens(tokens, B, T, S, one_sequence)
    folded = [name for name in names if name != "max_logit" or "max_weight" not in names]
    sizes = {"offset_profile": T + S - 1, "received": S}
    init = {"max_weight" if name == "max_logit" else name: jnp.zeros(sizes.get(name, T), lse.dtype) for name in folded}
    per_sequence = [*positions, *(() if tokens is None else (tokens,))]
    rows = blockwise.fold(request, _step, init, lse, per_sequence)
    result = _averages(names, rows, request, lse, positions[0], tokens)
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
    weights = jnp.exp(logs)
    q_at, kv_at, *tokens = of_sequence
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

    def add(
        i: Array, sums: Array
    ) -> Array:  # row by row, several times faster on CPU than the reshapes and gathers tried
        row, here = jax.lax.dynamic_index_in_dim(block, i, keepdims=False), t - 1 - i
        return jax.lax.dynamic_update_slice(sums, jax.lax.dynamic_slice(sums, (here,), (s,)) + row, (here,))

    return jax.lax.fori_loop(0, t, add, jnp.zeros(t + s - 1, block.dtype))


def _averages(
    names: Sequence[str],
    rows: dict[str, Array],
    request: Request,
    lse: Array,
    q_positions: Array,
    tokens: Array | None,
) -> dict[str, Any]:
    """The means over eligible queries of the sums ``[B,N,...]``."""
    S, lse = request.key.shape[1], jnp.moveaxis(lse, 2, 1)  # [B,N,T]
    seen, later = lse > -jnp.inf, (q_positions > 0)[:, None]
    eligible = {"previous_token": seen & later, "first_token": seen & later}
    if tokens is not None:
        eligible |= dict.fromkeys(OF_TOKENS, seen & jax.vmap(_occurred)(tokens)[:, None])
    if "entropy" in names:
        count = blockwise.count_visible(request)
        eligible["entropy"] = seen & (count >= 2)
        most = jnp.log(jnp.maximum(count, 2).astype(lse.dtype))
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
    offsets = np.arange(T + S - 1) - (T - 1)
    first, end = np.clip(-offsets, 0, T), np.clip(S - offsets, 0, T)
    upto = jnp.concatenate([jnp.zeros((*seen.shape[:-1], 1), jnp.int32), jnp.cumsum(seen, -1, dtype=jnp.int32)], -1)
    return jnp.maximum(upto[..., end] - upto[..., first], 1).astype(dtype)


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
