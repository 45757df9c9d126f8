"""Masks and score functions by their plain definitions, for arrays of indices that broadcast to ``[B,N,T,S]``."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.reference import Modify

LARGEST = 2**31 - 1


def look_up(values: np.ndarray, *indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``values[indices]``, and whether the indices are in range."""
    inside, entries = np.array(True), list(zip(indices, values.shape, strict=True))
    for x, size in entries:
        inside = inside & (x >= 0) & (x < size)
    if 0 in values.shape:
        return np.zeros(inside.shape, values.dtype), inside
    return values[tuple(x.clip(0, size - 1) for x, size in entries)], inside


def window(q: np.ndarray, kv: np.ndarray, left: int, right: int) -> np.ndarray:
    """``-left <= kv - q <= right``; a side of 2^31 - 1 or more is unlimited."""
    return ((left >= LARGEST) | (kv >= q - left)) & ((right >= LARGEST) | (kv <= q + right))


def segments(ids: list[np.ndarray], b: np.ndarray, q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """Equal ids, ``[T]`` or ``[1|B,T]`` and, if they differ, ``[S]`` or ``[1|B,S]``; what is outside sees nothing."""
    sides = []
    for x, at in zip((ids[0], ids[-1]), (q, kv), strict=True):
        x = x[0] if x.ndim == 2 and len(x) == 1 else x
        sides.append(look_up(x.astype(np.int64), *([b] if x.ndim == 2 else []), at))
    (of_query, there), (of_key, here) = sides
    return (of_query == of_key) & there & here


def padding(lengths: np.ndarray, b: np.ndarray, kv: np.ndarray) -> np.ndarray:
    """Keys before the length of the sequence, of lengths ``[1|B]``."""
    return kv < np.broadcast_to(lengths.astype(np.int64), b.shape[0])[b]


def dense(values: np.ndarray, *where: np.ndarray) -> np.ndarray:
    """A table by position, which broadcasts to all pairs; nothing outside of it."""
    values = values.reshape((1,) * (4 - values.ndim) + values.shape)
    shared = (np.zeros_like(x) if size == 1 else x for x, size in zip(where, values.shape, strict=True))
    entry, inside = look_up(values, *shared)
    return entry & inside


def zigzag(length: int, devices: int) -> np.ndarray:
    """The token in each slot: device p has the p-th of 2P chunks from either end. Without devices, in order."""
    if not devices:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * devices, -1)
    return np.stack([chunks, chunks[::-1]], 1)[:devices].ravel()


Places = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def places(B: int, N: int, query_positions: np.ndarray, kv_positions: np.ndarray) -> Places:
    """b ``[B,1,1,1]``, h ``[1,N,1,1]``, q ``[B|1,1,T,1]`` and kv ``[B|1,1,1,S]``, of positions ``[T]`` or ``[B|1,T]``."""
    q, kv = (np.atleast_2d(np.asarray(x, np.int64))[:, None] for x in (query_positions, kv_positions))
    return np.arange(B).reshape(B, 1, 1, 1), np.arange(N).reshape(1, N, 1, 1), q[..., None], kv[:, :, None]


def visible(
    where: Places,
    slots: tuple[np.ndarray, np.ndarray],
    arrays: dict[str, np.ndarray],
    mask: Any,
    is_causal: bool,
    sides: Any,
) -> np.ndarray:
    """``[B,N,T,S]``: the pairs of a mask that all options of the call show; masks and lengths in ``arrays`` go by slot."""
    b, h, q, kv = where
    pairs = np.ones((b.size, h.size, q.shape[2], kv.shape[3]), bool) & mask & arrays.get("mask", True)
    if is_causal:
        pairs &= kv <= q
    if sides is not None:
        pairs &= window(q, kv, *(sides if isinstance(sides, tuple) else (sides, sides)))
    for name, slot in (("query_seq_lengths", slots[0][:, None]), ("key_value_seq_lengths", slots[1])):
        if name in arrays:
            pairs &= slot < arrays[name].astype(int)[b]
    return pairs


class Formula(NamedTuple):
    """A score function of each score ``s``, its parameter ``p`` and ``d = kv - q``; its derivatives by ``s`` and ``p``."""

    score: Callable[..., Any]
    by_score: Callable[..., Any]
    by_parameter: Callable[..., Any]


one = lambda s, p, d: 1.0
wrapped = lambda d: (
    (d + 2**31) % 2**32 - 2**31.0
)  # the difference in int32, for the functions that subtract as users do
FORMULAS = {
    "alibi": Formula(lambda s, p, d: s - p * abs(d), one, lambda s, p, d: -abs(d)),
    "added": Formula(lambda s, p, d: s + p, one, one),
    "gain": Formula(lambda s, p, d: s * p, lambda s, p, d: p, lambda s, p, d: s),
    "captured table": Formula(lambda s, p, d: s * 0.5 + wrapped(d) * p, lambda s, p, d: 0.5, lambda s, p, d: wrapped(d)),
    "cap": Formula(lambda s, p, d: p * np.tanh(s / p),
        lambda s, p, d: 1 - np.tanh(s / p) * np.tanh(s / p),
        lambda s, p, d: np.tanh(s / p) - s / p * (1 - np.tanh(s / p) * np.tanh(s / p))),
}  # fmt: skip


def modified(formula: Formula, d: np.ndarray, values: Any, name: str | None = None, at: Any = 0) -> Modify:
    """A score function whose parameter is a number or, of an array with this name, the entry of each flat index."""
    p = float(values) if name is None else np.asarray(values, np.float64).ravel()[at]

    def modify(scores: Any) -> tuple[Any, Callable]:
        def back(ds: Any) -> tuple[Any, dict[str, Any]]:
            of = {}
            if name is not None:
                of[name] = (ds * formula.by_parameter(scores, p, d)).at(at, values.size).reshape(values.shape)
            return ds * formula.by_score(scores, p, d), of

        return formula.score(scores, p, d), back

    return modify


def then(first: Modify, second: Modify) -> Modify:
    """One score function after another."""

    def modify(scores: Any) -> tuple[Any, Callable]:
        scores, back_first = first(scores)
        scores, back_second = second(scores)

        def back(ds: Any) -> tuple[Any, dict[str, Any]]:
            ds, later = back_second(ds)
            ds, earlier = back_first(ds)
            return ds, earlier | later

        return scores, back

    return modify
