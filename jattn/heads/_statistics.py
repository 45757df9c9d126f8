"""Computes statistics of all heads at any length, without forming their weight matrices."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jattn._blocks.reduction import COUNTS, lowest_score
from jattn._core.arguments import make_call, make_lse
from jattn._core.call import Call, ScoreOptions, softmax_dtype
from jattn._mods.arrays import Length, arange, maximum, namespace
from jattn._mods.lookup import ranks
from jattn._mods.validation import check_array, to_int32
from jattn.api import dot_product_attention, fold_weights
from jattn.heads._sequences import find_places
from jattn.kernels import ReducesWeights, Reduction
from jattn.kernels.dispatch import Dispatch
from jattn.masks import MaskFunction

SEEN = 1e-30  # for a visible target: too large to underflow, too small to count
LEAST = 1e-20  # smaller weights are 0


class _Block(NamedTuple):
    """A block of one head's weights, and data about its queries and keys; all arrays broadcast."""

    log_weights: Array  # -inf where a pair is hidden or its query does not count
    weights: Array
    row: Mapping[str, Array]  # of queries: place, token, order
    column: Mapping[str, Array]  # of keys

    def log_weight(self) -> Array:
        """``ln p``, because with large sinks p underflows to 0; inf for NaN, which a maximum may drop."""
        return jnp.where(jnp.isnan(self.log_weights), jnp.inf, self.log_weights)

    def at(self, holds: Callable[[Array, Array], Array]) -> Array:
        """``log_weight`` of the pairs of places for which ``holds(q, kv)``; -inf elsewhere."""
        return jnp.where(holds(self.row["place"], self.column["place"]), self.log_weight(), -jnp.inf)

    def duplicates(self) -> Array:
        """Whether the key is an earlier occurrence of the query's token."""
        earlier = self.column["order"] < self.row["order"]
        return (self.row["token"] == self.column["token"]) & earlier

    def continuations(self) -> Array:
        """Whether the key's previous token equals the query's token and is earlier."""
        previous = self.column["previous"]
        return (self.row["token"] == self.column["before"]) & (previous >= 0) & (previous < self.row["order"])

    def where(self, pairs: Array) -> Array:
        """The weights of these pairs where visible, at least ``SEEN``, so that a sum shows them; 0 elsewhere."""
        return jnp.where(pairs & self.visible(), jnp.maximum(self.weights, SEEN), 0.0)

    def visible(self) -> Array:
        """Whether the pair is visible."""
        return self.log_weights != -jnp.inf

    def entropy(self) -> Array:
        """``-p ln p``, 0 at ``p = 0``."""
        return self.weights * -jnp.maximum(self.log_weights, -1e4)  # below, p is 0 in any precision

    def distance(self) -> Array:
        """``p |q - kv|``."""
        q, kv = self.row["place"], self.column["place"]
        apart = jnp.where(q > kv, q - kv, kv - q)
        # Two positions may be further apart than int32 can represent; the difference wraps around once.
        number = apart.astype(self.weights.dtype)
        return self.weights * jnp.where(apart < 0, number + 2.0**32, number)


class _Statistic(NamedTuple):
    """What each weight contributes, how contributions are reduced, and the queries to average over."""

    value: Callable[[_Block], Array]
    reduction: str = "row_sum"  # a kind of jattn.kernels.Reduction
    queries: str = "seeing"  # a key of _eligible


def _weight_at(holds: Callable[[Array, Array], Array]) -> _Statistic:
    """The weight on the key for which ``holds(q, kv)`` (places), over the queries that see it."""
    return _Statistic(lambda block: block.at(holds), "row_max", "target")


# A new mean over queries takes one line here and one in the docstring of ``statistics``.
_STATISTICS = {
    "entropy": _Statistic(_Block.entropy, queries="seeing two keys"),
    "max_weight": _Statistic(_Block.log_weight, "row_max"),
    "max_logit": _Statistic(_Block.log_weight, "row_max"),
    "distance": _Statistic(_Block.distance),
    "previous_token": _weight_at(lambda q, kv: (kv == q - 1) & (q > 0)),
    "current_token": _weight_at(lambda q, kv: kv == q),
    "first_token": _weight_at(lambda q, kv: (kv == 0) & (q > 0)),
    "offset_profile": _Statistic(lambda block: block.weights, "diagonal_sum"),
    "received": _Statistic(lambda block: block.weights, "column_sum"),
    "duplicate_token": _Statistic(lambda block: block.where(block.duplicates()), queries="targets"),
    "induction": _Statistic(lambda block: block.where(block.continuations()), queries="targets"),
}
# The numbers of visible pairs, where masks alone do not determine them.
_COUNTS = {
    name: _Statistic(lambda block: block.visible().astype(block.weights.dtype), kind) for name, kind in COUNTS.items()
}
_ALL = _STATISTICS | _COUNTS
#: The names of all statistics.
STATISTICS = tuple(_STATISTICS)
#: The names of the statistics that need ``tokens``.
OF_TOKENS = tuple(name for name, statistic in _STATISTICS.items() if statistic.queries == "targets")


def statistics(
    query: ArrayLike,
    key: ArrayLike,
    *,
    tokens: ArrayLike | None = None,
    lse: ArrayLike | None = None,
    names: Iterable[str] | None = None,
    eligible: ArrayLike | None = None,
    implementation: ReducesWeights | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    **options: Unpack[ScoreOptions],
) -> dict[str, Any]:
    """Statistics of every head's weights, in O(T + S) memory: ``{name: [B,N]}`` (or ``[N]``), float32 (or float64).

    ``p`` denotes the weights of a query. Each mean is over the queries in parentheses. A query counts only if it sees
    at least one key and, for the weight on certain keys, only if it sees one of them. Keys hidden by a window, the end
    of a document or padding do not count against a head, so a sequence has the same statistics whether alone, packed or
    padded.

    - ``entropy``: ``-sum p ln p / ln(number of visible keys)`` (that see two or more keys); 1 for a uniform head.
    - ``max_weight``: ``max p`` (all). ``max_logit``: the largest score of all queries.
    - ``distance``: ``sum p |q - kv|``, in tokens (all).
    - ``previous_token``, ``current_token``: p at ``kv = q - 1`` (``q > 0``) and at ``kv = q`` (queries that see it).
    - ``first_token``: p at ``kv = 0``, the attention sink (queries with ``q > 0`` that see it; few under a window).
      Source: https://arxiv.org/abs/2309.17453.
    - ``offset_profile`` ``[B,N,T+S-1]``: p at each ``kv - q`` from ``-(T-1)`` to ``S-1`` (that see such a key).
    - ``received`` ``[B,N,S]``: for each key, the sum of p over all queries. Summed over a set of keys, such as
      delimiters, and divided by its ``support``, it is the mean weight on that set.
    - ``duplicate_token``: p at earlier occurrences of the query's token (that see one); ``induction``: p at the tokens
      that followed them in their sequence (that see one). Source:
      https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads.
    - ``support``, always: ``{name: [B,N]}``, the number of queries in each mean.

    ``q`` and ``kv`` are places in a query's own sequence, counted from 0; in ``offset_profile`` and ``received``, and
    for the order of tokens, they are slots. Places are the positions, if given. Otherwise they are slots, counted from
    the first that is not padding or, with ``Segments``, within each id.

    If T = S, padding is what a mask hides from all queries at either end of a sequence. Its queries never count. Only
    some masks reveal it: ``masks.Padding``, ``masks.Dense``, lengths, and arrays as ``mask`` and ``bias``, joined by
    ``&`` alone. A function, ``~`` and ``|`` reveal neither padding nor documents: pass ``eligible`` and positions, or
    ``Segments``. A padding segment counts like any other: pass ``eligible``.

    A pair is hidden if a mask hides it, or if its score, with ``bias`` and ``score_mod``, is -1e8 or less (in float16,
    -32,752), so additive masks of -inf, ``finfo.min`` and -1e9 count as masks. If a query sees a NaN, each mean that
    includes the query is NaN.

    Args:
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]``, or without B; floating, of the same dtype.
        tokens: integers ``[B,T]`` or ``[T]``, for ``duplicate_token`` and ``induction`` in self-attention.
        lse: ``[B,T,N]``, from ``dot_product_attention(..., return_residual=True)``; computed if None.
        names: the statistics to compute; by default all that the arguments allow.
        eligible: bool ``[B,T]`` or ``[T]``: the queries that count; by default all but padding. For cross-attention
            with T = S and padded keys, pass all True, as the modules do.
        implementation: a ``jattn.sharding.Ring`` or ``HeadParallel`` for sharded arrays; a
            ``jattn.kernels.blockwise.Blockwise`` or ``jattn.kernels.pallas_tpu.PallasTPU`` for your own block sizes;
            ``jattn.kernels.pallas_gpu.PallasGPU()`` for the kernels of a Hopper GPU. In a ring, slots follow its
            layout, except in ``offset_profile``, which uses tokens. The default is Blockwise's loop on every platform.
        bias: floats added to the scores, broadcastable to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        options: other keywords of ``jattn.attention_weights``, such as ``is_causal`` and ``score_mod``; not ``sinks``.

    Raises:
        ValueError: a statistic is unknown; ``tokens`` is missing; an argument has the wrong shape.
        TypeError: ``implementation`` is none of these; ``sinks`` are given (they are part of the lse).

    Example:
        >>> code = 9 * jnp.eye(4)[:, None]  # [T,N,H], one for each position
        >>> query = jnp.roll(code, 1, 0)  # a head that looks one token back
        >>> seen = jattn.heads.statistics(query, code, is_causal=True, names=["previous_token", "distance"])
        >>> [round(float(seen[name][0]), 3) for name in ("previous_token", "distance")]
        [1.0, 0.75]
    """
    names = _names(names, tokens is not None)
    folding = Dispatch() if implementation is None else implementation
    if isinstance(folding, type) or not isinstance(folding, ReducesWeights):
        raise TypeError(
            "implementation must be a Ring or HeadParallel of jattn.sharding, a Blockwise, a PallasTPU or a PallasGPU, "
            f"got {implementation!r}"
        )
    if "sinks" in options:
        raise TypeError("statistics takes no sinks=: they are part of the lse; pass the lse= of the call with sinks")
    call = make_call(query, key, None, bias, mask, **options)
    (B, T, _, _), S, one_sequence = call.query.shape, call.key.shape[1], jnp.ndim(query) == 3
    lse_passed = lse is not None
    if lse is None:
        no_value = jnp.zeros((*call.key.shape[:-1], 0), call.key.dtype)
        static = {"implementation": implementation, "return_residual": True}
        lse = dot_product_attention(call.query, call.key, no_value, bias, mask, **static, **options)[1]
    lse = make_lse(jnp.asarray(lse), call, one_sequence and lse_passed)
    slots = [arange(n) if order is None else order for n, order in ((n, folding.slots(n)) for n in (T, S))]
    places = find_places(call, *slots)
    counts = places.real if eligible is None else eligible_rows(eligible, B, T).reshape(-1, T)
    rows = {"counts": jnp.broadcast_to(counts, (counts.shape[0], T)), "place": places.query, "order": slots[0][None]}
    columns = {"place": places.key, "order": slots[1][None]}
    if tokens is not None:
        rows |= {"token": _tokens(tokens, B, T, S, one_sequence)}
        columns |= {"token": rows["token"], "previous": places.previous}
        in_order = rows["token"][:, namespace(slots[1]).argsort(slots[1])]
        columns["before"] = jnp.take_along_axis(in_order, jnp.maximum(places.previous, 0), 1)
    # Masks count their pairs cheaply. Only scores show what a bias or a score function hides.
    by_masks = lowest_score(call) == -math.inf
    numbers = ["visible"] if lse_passed or "entropy" in names or not by_masks else []
    numbers += ["visible_at"] if "offset_profile" in names else []
    # max_logit is computed from the reduction of max_weight.
    reduced = [*dict.fromkeys("max_weight" if name == "max_logit" else name for name in names)]
    reduced += [] if by_masks else numbers
    kinds = tuple((name, _ALL[name].reduction) for name in reduced)
    data, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, (rows, columns)))

    def of_part(call: Call, lse: Array, *data: Array) -> dict[str, Array | dict[str, Array]]:
        rows, columns = structure.unflatten(data)
        values = _Values(tuple(reduced))
        reduction = Reduction(lse, rows, columns, values, kinds, tuple(numbers) if by_masks else ())
        return _averages(names, folding.fold(call, reduction), lse, rows["counts"])

    out_axes = {**dict.fromkeys(names, "bn"), "support": dict.fromkeys(names, "bn")}
    letters = ["bt"] * len(rows) + ["bs"] * len(columns)
    result = folding.map_parts(of_part, call, out_axes, (lse, "btn"), *zip(data, letters, strict=True))
    return jax.tree.map(lambda x: x[0], result) if one_sequence else result


def _names(names: Iterable[str] | None, with_tokens: bool) -> tuple[str, ...]:
    names = names if names is None or isinstance(names, str) else tuple(names)  # a generator runs only once
    known = STATISTICS if with_tokens else tuple(name for name in STATISTICS if name not in OF_TOKENS)
    if names is None:
        return known
    if isinstance(names, str) or not set(names) <= set(STATISTICS):
        raise ValueError(f"names must be some of {', '.join(STATISTICS)}, got {names!r}")
    if not set(names) <= set(known):
        raise ValueError(f"{' and '.join(OF_TOKENS)} need tokens=, integers [B, T], the tokens of the sequences")
    return names


def eligible_rows(eligible: ArrayLike, B: Length, T: Length) -> Array:
    """The argument ``eligible``, checked: bool ``[T]`` or ``[B,T]``."""
    rows = jnp.asarray(eligible)
    check_array("eligible", rows, f"bool [B, T] = {[B, T]} or [T]", np.bool_, (T,), (B, T))
    return rows


def _tokens(tokens: ArrayLike, B: Length, T: Length, S: Length, one_sequence: bool) -> Array:
    tokens = tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)
    wanted = (T,) if one_sequence else (B, T)
    if T != S or tokens.shape != wanted or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(
            f"tokens must be integers {list(wanted)} of self-attention, got {tokens.dtype} of shape "
            f"{list(tokens.shape)} for {T} queries and {S} keys"
        )
    # JAX would silently truncate NumPy's wide integers, and different tokens could become equal.
    tokens = jnp.asarray(to_int32("tokens", tokens) if isinstance(tokens, np.ndarray) else tokens).reshape(B, T)
    if tokens.dtype.itemsize > 4:  # kernels use 32 bits; ranks are equal where tokens are
        tokens = ranks(tokens)
    return tokens


@dataclasses.dataclass(frozen=True)
class _Values:
    """``Reduction.values`` for these statistics, compared by value."""

    names: tuple[str, ...]

    def __call__(self, log_weights: Array, row: dict[str, Array], column: dict[str, Array]) -> dict[str, Array]:
        log_weights = jnp.where(row["counts"], log_weights, -jnp.inf)
        block = _Block(log_weights, jnp.exp(log_weights), row, column)
        return {name: _ALL[name].value(block) for name in self.names}


def _averages(
    names: Sequence[str], sums: dict[str, Array], lse: Array, counts: Array
) -> dict[str, Array | dict[str, Array]]:
    """The means over queries that count, from the sums ``[B,N,...]``."""
    lse = jnp.moveaxis(lse, 2, 1)  # [B,N,T]
    logs = {name: x for name, x in sums.items() if _ALL[name].reduction == "row_max"}
    sums = sums | {name: jnp.exp(jnp.where(x == jnp.inf, jnp.nan, x)) for name, x in logs.items()}
    # A NaN counts as seen. With sinks, a row that sees no key has a finite lse.
    seeing = counts[:, None] & (sums["visible"] > 0 if "visible" in sums else lse != -jnp.inf)
    results: dict[str, Array | dict[str, Array]] = {}
    support = {}
    for name in names:
        queries, seen = _STATISTICS[name].queries, seeing
        if queries == "seeing two keys":
            seen = seen & (sums["visible"] >= 2)
            sums[name] = sums[name] / jnp.log(jnp.maximum(sums["visible"], 2))
        elif queries == "target":
            seen = logs[name] != -jnp.inf
        elif queries == "targets":
            seen = sums[name] != 0
            sums[name] = jnp.where(sums[name] < LEAST, 0.0, sums[name])
        support[name] = seen.sum(-1)
        if name == "max_logit":
            high = jnp.where(logs["max_weight"] == jnp.inf, jnp.nan, lse + logs["max_weight"])
            highest = maximum(jnp.where(seen, high, -jnp.inf))
            results[name] = jnp.where(seen.any(-1), highest, 0.0)
        elif name == "received":
            results[name] = sums[name]
        elif name == "offset_profile":
            results[name] = sums[name] / jnp.maximum(sums["visible_at"], 1)
        else:
            total = jnp.where(seen, sums[name], 0.0).sum(-1)
            results[name] = total / jnp.maximum(seen.sum(-1), 1).astype(total.dtype)
    return results | {"support": support}


def coarse_weights(
    query: ArrayLike,
    key: ArrayLike,
    size: int = 64,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    **options: Unpack[ScoreOptions],
) -> Array:
    """Each head's weights at low resolution, at any length: ``[B,N,size,size]`` (or ``[N,size,size]``), float32.

    The sequence is split into ``size`` spans; index t is in span ``floor(t size / T)``. Entry ``(i, j)`` is the share
    of their weight that the queries of span i give to the keys of span j. Rows sum to 1, or to 0 if no query
    sees a key. The forward pass takes O(T + S) memory.

    Args:
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]``, or without B; floating, of the same dtype.
        size: the number of spans along each axis, at most T and S.
        bias: floats added to the scores, broadcastable to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        options: other keywords of ``jattn.attention_weights``, such as ``is_causal`` and ``score_mod``; not ``sinks``.

    Raises:
        ValueError, TypeError: ``size`` is not positive, or an argument has the wrong shape or dtype.

    Example:
        >>> even = jnp.zeros((8, 1, 2))  # [T,N,H], of a uniform head
        >>> [round(float(x), 3) for x in jattn.heads.coarse_weights(even, even, 2, is_causal=True)[0, 1]]  # second half
        [0.635, 0.365]
    """
    if not size > 0:
        raise ValueError(f"size must be positive, got {size}")
    T, S = jnp.shape(query)[-3], jnp.shape(key)[-3]
    q_ends, kv_ends = _span_ends(T, min(size, T)), _span_ends(S, min(size, S))

    def add(carry: Array, weights: Array, q_idx: Array, kv_idx: Array) -> Array:
        of_row, of_column = (
            ((ends[None, :-1] <= index) & (index < ends[None, 1:])).astype(weights.dtype)
            for index, ends in ((q_idx, q_ends), (kv_idx.T, kv_ends))
        )
        return carry + of_row.T @ weights @ of_column

    init = jnp.zeros((len(q_ends) - 1, len(kv_ends) - 1), softmax_dtype(jnp.asarray(query)))
    sums = fold_weights(add, init, query, key, bias=bias, mask=mask, **options)
    return sums / jnp.maximum(sums.sum(-1, keepdims=True), jnp.finfo(sums.dtype).tiny)


def _span_ends(length: int, spans: int) -> np.ndarray:
    """``[spans + 1]``: the start of each span, and the end of the last; index t is in span ``t * spans // length``."""
    ends = -(np.arange(spans + 1, dtype=np.int64) * -length // max(spans, 1))  # a product may exceed 32 bits
    return ends.astype(np.int32)
