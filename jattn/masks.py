"""Defines masks: which query sees which key.

A mask is any callable ``(b, h, q_idx, kv_idx) -> bool`` over broadcastable integer index arrays: ``True`` if query
``q_idx`` of head ``h`` in sequence ``b`` sees key ``kv_idx``. The indices are positions: slots, unless the attention
call gives ``query_positions`` or ``kv_positions``. Tables inside masks are therefore indexed by position, and positions
outside the table are not visible. The convention follows FlexAttention (https://arxiv.org/abs/2412.05496), so its
``mask_mod`` examples port line by line.

The masks below combine with ``&``, ``|`` and ``~``. Their ``bounds`` describe a whole block of query-key pairs at once,
so that implementations can skip empty blocks, and their ``interval`` describes all keys seen by a query.
"""

from typing import Any

import jax
import numpy as np

from jattn._mods.arrays import AnyArray, Bools, Index, Length, namespace
from jattn._mods.check_bounds import check_bounds
from jattn._mods.contracts import MaskFunction
from jattn._mods.lookup import count_pairs, look_up, look_up_row, range_in_row, shared
from jattn._mods.mask import And, Bounds, Indices, Interval, Mask, Not, Or, and_masks, bounds, interval, or_masks
from jattn._mods.pytree import pytree_dataclass
from jattn._mods.validation import (
    LARGEST,
    LEAST,
    at_least,
    at_most,
    check_number,
    check_sizes,
    check_table,
    end_of_window,
    number,
    to_int32,
)

__all__ = [
    "And", "Causal", "Dense", "Mask", "MaskFunction", "Not", "Or", "Padding", "Prefix", "Segments", "SlidingWindow",
    "and_masks", "bounds", "check_bounds", "interval", "or_masks",
]  # fmt: skip


@pytree_dataclass
class Causal(Mask):
    """A query sees its own position and earlier ones: ``kv <= q``.

    Example:
        >>> i = np.arange(4)
        >>> print(jattn.masks.Causal()(0, 0, i[:, None], i).astype(int))
        [[1 0 0 0]
         [1 1 0 0]
         [1 1 1 0]
         [1 1 1 1]]
    """

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Bools:
        return kv_idx <= q_idx

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        return kv_min <= q_max, kv_max <= q_min

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval:
        return LEAST, q_idx


@pytree_dataclass
class SlidingWindow(Mask):
    """A query sees ``left`` keys before it, itself, and ``right`` after it: ``-left <= kv - q <= right``.

    ``left`` and ``right`` are integers or integer scalar arrays; 2^31 - 1 or more means unbounded. They exclude the
    query's own key, like ``local_window_size=(left, right)`` in ``jax.nn``, tokamax and ejkernel. transformers, attnax
    and penzai include it: Mistral's ``sliding_window`` of 4096 is ``SlidingWindow(4095)``.

    Raises:
        TypeError: a side is not an integer or an integer scalar array.

    Example:
        >>> i = np.arange(4)
        >>> print(jattn.masks.SlidingWindow(2, right=1)(0, 0, i[:, None], i).astype(int))
        [[1 1 0 0]
         [1 1 1 0]
         [1 1 1 1]
         [0 1 1 1]]
    """

    left: Any
    right: Any = 0

    def __post_init__(self):
        check_number(self.left, "masks.SlidingWindow", "left")
        check_number(self.right, "masks.SlidingWindow", "right")

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Bools:
        left, right = self._sides()
        return at_least(kv_idx, q_idx, -left) & at_most(kv_idx, q_idx, right)

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        left, right = self._sides()
        any_visible = at_least(kv_max, q_min, -left) & at_most(kv_min, q_max, right)
        return any_visible, at_least(kv_min, q_max, -left) & at_most(kv_max, q_min, right)

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval:
        left, right = self._sides()
        return end_of_window(q_idx, -left, LEAST), end_of_window(q_idx, right, LARGEST)

    def _sides(self):
        return (number(side, -LARGEST) for side in (self.left, self.right))


@pytree_dataclass
class Prefix(Mask):
    """Every query sees the first ``length`` keys: ``kv < length``. ``Causal() | Prefix(n)`` is a prefix language model.

    ``length``: an integer or integer scalar array, shared by all sequences (``Padding`` has one per sequence).

    Raises:
        TypeError: ``length`` is neither.

    Example:
        >>> mask, i = jattn.masks.Causal() | jattn.masks.Prefix(2), np.arange(4)
        >>> print(mask(0, 0, i[:, None], i).astype(int))
        [[1 1 0 0]
         [1 1 0 0]
         [1 1 1 0]
         [1 1 1 1]]

    Source: T5, https://arxiv.org/abs/1910.10683, section 3.2.1.
    """

    length: Any

    def __post_init__(self):
        check_number(self.length, "masks.Prefix", "length")

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Bools:
        return kv_idx < number(self.length)

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        length = number(self.length)
        return kv_min < length, kv_max < length

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval:
        return LEAST, number(self.length, LEAST + 1) - 1


@pytree_dataclass
class Padding(Mask):
    """Hides keys past the end of their sequence: ``kv < lengths[b]``.

    ``lengths``: integers ``[B]``; if B is 1, the length is shared by all sequences.

    Raises:
        TypeError: ``lengths`` is not an integer array of rank 1.

    Example:
        >>> mask, b = jattn.masks.Padding(np.array([2, 3])), np.arange(2)
        >>> print(mask(b[:, None], 0, 0, np.arange(4)).astype(int))  # a row per sequence
        [[1 1 0 0]
         [1 1 1 0]]
    """

    lengths: Any

    def __post_init__(self):
        check_table(self.lengths, "masks.Padding", "lengths", ranks=(1,), kind="i")
        object.__setattr__(self, "lengths", to_int32("masks.Padding: lengths", self.lengths))

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        check_sizes(self.lengths, "masks.Padding", "lengths", B=B)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Bools:
        length, known = self._length(b)
        return (kv_idx < length) & known

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        length, known = self._length(b)
        return (kv_min < length) & known, (kv_max < length) & known

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval:
        length, known = self._length(b)
        xp = namespace(length, known)
        return LEAST, xp.where(known, xp.maximum(length, LEAST + 1), LEAST + 1) - 1

    def _length(self, b: Index) -> tuple[AnyArray, Bools]:
        return (self.lengths[0], np.True_) if self.lengths.shape[0] == 1 else look_up(self.lengths, b)


@pytree_dataclass
class Segments(Mask):
    """Packed sequences: a query sees a key if their ids are equal.

    ``query_ids``: integers ``[T]`` or ``[B,T]``. ``kv_ids``: integers ``[S]`` or ``[B,S]``, ``query_ids`` by default.
    If B is 1, the ids are shared by all sequences. For causal attention, write ``Segments(ids) & Causal()``. Ids may be
    hashes: JAX arrays of any integer type (64 bits with x64) are compared exactly; NumPy arrays must fit in int32. Like
    every table, ids are indexed by the positions that masks see. Do not give masks positions that restart in each
    document; pass them as the modules' ``input_positions``.

    Raises:
        TypeError: ids are not an integer array of rank 1 or 2.

    Example:
        >>> mask, i = jattn.masks.Segments(np.array([0, 0, 1, 1])) & jattn.masks.Causal(), np.arange(4)
        >>> print(mask(0, 0, i[:, None], i).astype(int))
        [[1 0 0 0]
         [1 1 0 0]
         [0 0 1 0]
         [0 0 1 1]]
    """

    query_ids: Any
    kv_ids: Any = None

    def __post_init__(self):
        for name in ("query_ids", "kv_ids")[: 1 if self.kv_ids is None else 2]:
            ids = getattr(self, name)
            check_table(ids, "masks.Segments", name, ranks=(1, 2), kind="i")
            if isinstance(ids, np.ndarray):  # JAX would truncate to 32 bits, and different ids could become equal
                object.__setattr__(self, name, to_int32(f"masks.Segments: {name}", ids))

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        common = np.promote_types(self.query_ids.dtype, self._key_ids().dtype)
        if common.kind == "f" or (common.itemsize > 4 and not jax.config.jax_enable_x64):
            raise TypeError(
                "masks.Segments: query_ids and kv_ids must have one integer type of at most 32 bits (64 with "
                f"jax_enable_x64), or JAX would not compare them exactly; got {self.query_ids.dtype} and "
                f"{self._key_ids().dtype}"
            )
        check_sizes(self.query_ids, "masks.Segments", "query_ids", B=B, T=T)
        hint = "" if self.kv_ids is not None else "; keys of another length than the queries need kv_ids"
        check_sizes(self._key_ids(), "masks.Segments", "query_ids" if hint else "kv_ids", hint, B=B, S=S)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Bools:
        query_id, query_inside = self._query_ids_at(b, q_idx)
        kv_id, kv_inside = self._key_ids_at(b, kv_idx)
        return (query_id == kv_id) & query_inside & kv_inside

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        q_low, q_high, q_all = range_in_row(self.query_ids, b, q_min, q_max)
        kv_low, kv_high, kv_all = range_in_row(self._key_ids(), b, kv_min, kv_max)
        any_visible = (q_low <= kv_high) & (kv_low <= q_high)
        same_id = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
        return any_visible, same_id & q_all & kv_all

    def _query_ids_at(self, b: Index, q_idx: Index) -> tuple[AnyArray, Bools]:
        """The ids of queries, and whether the positions lie within the table."""
        return look_up_row(self.query_ids, b, q_idx)

    def _key_ids_at(self, b: Index, kv_idx: Index) -> tuple[AnyArray, Bools]:
        return look_up_row(self._key_ids(), b, kv_idx)

    def _key_ids(self) -> AnyArray:
        return self.query_ids if self.kv_ids is None else self.kv_ids


@pytree_dataclass
class Dense(Mask):
    """A table of visible pairs, by position: bool ``[T,S]``, ``[N,T,S]`` or ``[B,N,T,S]``; axes of size 1 are shared.

    A bool array passed as ``mask=`` to ``dot_product_attention`` is indexed by slot instead. The two differ only if
    positions are given. ``bounds`` are exact and use a summed-area table.

    Raises:
        TypeError: ``array`` is not a bool array of rank 2, 3 or 4.

    Example:
        >>> hidden, i = np.array([[0, 0, 0], [0, 0, 0], [0, 1, 0]], bool), np.arange(3)
        >>> mask = jattn.masks.Causal() & ~jattn.masks.Dense(hidden)  # without the pair (2, 1)
        >>> print(mask(0, 0, i[:, None], i).astype(int))
        [[1 0 0]
         [1 1 0]
         [1 0 1]]
    """

    array: Any

    def __post_init__(self):
        check_table(self.array, "masks.Dense", "array", ranks=(2, 3, 4), kind="b")

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        check_sizes(self.array, "masks.Dense", "array", shared="BNTS", B=B, N=N, T=T, S=S)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Bools:
        table = self._table()
        # Not ``q_idx * 0``: shared values must not even formally depend on the index.
        q_idx, kv_idx = (
            namespace(x).zeros_like(x) if size == 1 else x
            for x, size in zip((q_idx, kv_idx), table.shape[2:], strict=True)
        )
        value, inside = look_up(table, *shared(table, b, h), q_idx, kv_idx)
        return value & inside

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        visible, pairs, inside = count_pairs(self._table(), b, h, q_min, q_max, kv_min, kv_max)
        return visible > 0, (visible == pairs) & inside

    def _table(self) -> AnyArray:
        return self.array[(None,) * (4 - self.array.ndim)]
