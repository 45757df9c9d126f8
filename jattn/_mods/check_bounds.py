"""Compares a mask's claims about whole blocks and rows with its pairs (``check_bounds``)."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jattn._mods.arrays import calling
from jattn._mods.mask import Mask, bounds, interval
from jattn._mods.pytree import known

EVERY = 32  # up to this length, all intervals are checked
MOST = 2**20  # blocks in one call of ``bounds``


def check_bounds(mask: Mask, T: int, S: int, *, batch: int = 1, num_heads: int = 1) -> None:
    """Checks ``mask.bounds`` and ``mask.interval`` against the pairs of T queries and S keys, by brute force.

    Use this to test custom masks. A block that ``bounds`` wrongly declares empty is skipped, and a block wrongly
    declared full is computed without the mask: the results are then silently wrong.

    Along an axis of length 32 or less, blocks begin and end anywhere. Along a longer axis, their lengths are powers of
    two, and they begin at every multiple of half their length. Positions are ``0 .. T - 1`` and ``0 .. S - 1``. Takes
    O(T·S) time and memory.

    Args:
        mask: a ``jattn.masks.Mask`` with known (not traced) arrays.
        T, S: the numbers of queries and keys. Small sizes are checked most thoroughly, but must exceed the mask's own
            lengths and windows.
        batch, num_heads: the numbers of sequences and heads, if the mask varies over them.

    Raises:
        ValueError: ``bounds`` or ``interval`` contradicts a pair; the message names the pair and the block or query.
        TypeError: ``mask`` is not a ``Mask``, or ``bounds`` does not return two bools.

    Example:
        >>> @jattn.pytree_dataclass
        ... class Wrong(jattn.masks.Causal):
        ...     def bounds(self, b, h, q_min, q_max, kv_min, kv_max):
        ...         return kv_max <= q_min, False  # should be kv_min <= q_max
        >>> try:
        ...     jattn.masks.check_bounds(Wrong(), 4, 4)
        ... except ValueError as error:
        ...     print(str(error).partition(",")[0])
        Wrong.bounds says any_visible=False of the block q_idx 0..0
    """
    if not isinstance(mask, Mask):
        raise TypeError(
            f"check_bounds: mask must be an object of a class that extends jattn.masks.Mask, since only these have "
            f"bounds, got {mask!r}"
        )
    q, kv = np.arange(T, dtype=np.int32), np.arange(S, dtype=np.int32)
    pairs = np.empty((batch, num_heads, T, S), bool)
    for b, h in np.ndindex(batch, num_heads):
        with calling("mask"):
            pairs[b, h] = known(mask)(np.int32(b), np.int32(h), q[:, None], kv[None, :])
    b, h = np.arange(batch, dtype=np.int32)[:, None], np.arange(num_heads, dtype=np.int32)[None, :]
    _check_blocks(mask, pairs, b[..., None, None], h[..., None, None])
    _check_rows(mask, pairs, b[..., None], h[..., None], q, kv)


def _check_blocks(mask: Mask, pairs: np.ndarray, b: np.ndarray, h: np.ndarray) -> None:
    *lead, T, S = pairs.shape
    # sums[..., i, j] counts the pairs with q < i and kv < j
    sums = np.pad(pairs.cumsum(2).cumsum(3), ((0, 0), (0, 0), (1, 0), (1, 0)))
    (every_q_min, every_q_max), (kv_min, kv_max) = _intervals(T), _intervals(S)
    rows = max(MOST // max(kv_min.size * b.size * h.size, 1), 1)
    for start in range(0, every_q_min.size, rows):
        q_min, q_max = (x[start : start + rows, None] for x in (every_q_min, every_q_max))
        shape = *lead, *np.broadcast_shapes(q_min.shape, kv_min.shape)
        any_visible, all_visible = _two_bools(mask, bounds(mask, b, h, q_min, q_max, kv_min, kv_max), shape)
        above, below = (sums[:, :, x, kv_max + 1] - sums[:, :, x, kv_min] for x in (q_min, q_max + 1))
        count, size = below - above, (q_max + 1 - q_min) * (kv_max + 1 - kv_min)
        for wrong, says, visible in (
            (~any_visible & (count > 0), "any_visible=False", True),
            (all_visible & (count < size), "all_visible=True", False),
        ):
            if wrong.any():
                one, head, i, j = np.argwhere(wrong)[0]
                rows, columns = slice(q_min[i, 0], q_max[i, 0] + 1), slice(kv_min[j], kv_max[j] + 1)
                q, kv = np.argwhere(pairs[one, head, rows, columns] == visible)[0]
                pair = _pair((one, head, q + rows.start, kv + columns.start))
                raise ValueError(
                    f"{type(mask).__name__}.bounds says {says} of the block q_idx {rows.start}..{rows.stop - 1}, "
                    f"kv_idx {columns.start}..{columns.stop - 1}, but {pair} is "
                    f"{'visible' if visible else 'not visible'}"
                )


def _check_rows(mask: Mask, pairs: np.ndarray, b: np.ndarray, h: np.ndarray, q: np.ndarray, kv: np.ndarray) -> None:
    ends = interval(mask, b, h, q)
    if ends is None:
        return
    first, last = (np.broadcast_to(end, pairs.shape[:3])[..., None] for end in ends)
    wrong = ((first <= kv) & (kv <= last)) != pairs
    if wrong.any():
        at = tuple(np.argwhere(wrong)[0])
        raise ValueError(
            f"{type(mask).__name__}.interval says that q_idx {at[2]} sees the keys {first[at[:3]].item()}.."
            f"{last[at[:3]].item()}, but {_pair(at)} is {'visible' if pairs[at] else 'not visible'}"
        )


def _intervals(length: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last index of each interval, int32, short intervals first."""
    sizes = range(1, length + 1) if length <= EVERY else [2**i for i in range(length.bit_length() + 1)]
    intervals = [
        (start, min(start + size, length) - 1)
        for size in sizes
        for start in (range(length - size + 1) if length <= EVERY else range(0, length, max(size // 2, 1)))
    ]
    first, last = np.array(intervals, np.int32).reshape(-1, 2).T
    return first, last


def _two_bools(mask: Mask, answer: Any, shape: tuple[int, ...]) -> list[np.ndarray]:
    if not isinstance(answer, tuple | list) or len(answer) != 2 or any(np.asarray(x).dtype != bool for x in answer):
        raise TypeError(
            f"{type(mask).__name__}.bounds must return two bools or arrays of bools, (any_visible, all_visible), got "
            f"{answer!r}"
        )
    return [np.broadcast_to(x, shape) for x in answer]


def _pair(at: Sequence[int | np.integer]) -> str:
    b, h, q_idx, kv_idx = at
    return f"the pair b={b}, h={h}, q_idx={q_idx}, kv_idx={kv_idx}"
