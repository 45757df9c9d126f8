"""Masks: which query may look at which key.

A mask is any callable ``(b, h, q_idx, kv_idx) -> bool`` over broadcastable integer index arrays: ``True`` where query
``q_idx`` of head ``h`` in sequence ``b`` sees key ``kv_idx``. The indices are positions (see
``jattn.dot_product_attention``), so a table inside a mask is indexed by position, and a position outside the table is
not visible. The convention is FlexAttention's (https://arxiv.org/abs/2412.05496), so its ``mask_mod`` examples port
line by line.

The masks below are callables of that kind which can be joined by ``&``, ``|`` and ``~`` and which also answer for a
whole block of pairs at once (``bounds``), so that an implementation can skip the blocks that nobody sees.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jattn.mods import mod_semantics, pytree_dataclass

MaskFunction = Callable[[Any, Any, Any, Any], Any]


class Mask:
    """A mask that can be joined with others and can bound a block. Subclass it, or pass any plain function."""

    __array_ufunc__ = None  # array & mask must reach __rand__, not be spread over the array's elements

    def __call__(self, b, h, q_idx, kv_idx):
        """``True`` where the pair is visible; index arrays broadcast."""
        raise NotImplementedError(f"{type(self).__name__} does not say which pairs are visible: define __call__")

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        """``(may, must)`` for the block of pairs ``[q_min, q_max] x [kv_min, kv_max]``, both ends included.

        ``may`` is false only where no pair of the block is visible, ``must`` is true only where all pairs are: sound,
        not always tight. NumPy bools where everything is static, arrays where something is traced. Arguments
        broadcast, so one call can answer for a grid of blocks.
        """
        return np.True_, np.False_

    def __and__(self, other):
        return And(self, _as_mask(other))

    def __rand__(self, other):
        return And(_as_mask(other), self)

    def __or__(self, other):
        return Or(self, _as_mask(other))

    def __ror__(self, other):
        return Or(_as_mask(other), self)

    def __invert__(self):
        return Not(self)

    def __bool__(self):
        raise TypeError(f"a mask has no truth value ({type(self).__name__}): join masks by &, | and ~, not by and, or")


def _as_mask(mask: Any) -> MaskFunction:
    if not callable(mask):
        hint = "; wrap an array as masks.Dense(array)" if hasattr(mask, "shape") else ""
        raise TypeError(f"a mask must be a callable (b, h, q_idx, kv_idx) -> bool, got {type(mask).__name__}{hint}")
    return mask


def bounds(mask: MaskFunction, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
    """``mask.bounds(...)``; a plain function, which cannot say, answers ``(True, False)``."""
    if not isinstance(mask, Mask):
        return np.True_, np.False_
    with mod_semantics():
        return mask.bounds(b, h, q_min, q_max, kv_min, kv_max)


@pytree_dataclass
class Causal(Mask):
    """A query sees itself and what came before it: ``kv <= q``."""

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= q_idx

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        return kv_min <= q_max, kv_max <= q_min


@pytree_dataclass
class SlidingWindow(Mask):
    """A query sees ``left`` keys before it, itself, and ``right`` after it: ``-left <= kv - q <= right``.

    The meaning of ``local_window_size=(left, right)`` in ``jax.nn.dot_product_attention``. Numbers or scalar arrays.
    """

    left: Any
    right: Any = 0

    def __call__(self, b, h, q_idx, kv_idx):
        offset = kv_idx - q_idx  # a difference of positions does not overflow where q_idx + right could
        return (-self.left <= offset) & (offset <= self.right)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        lowest, highest = kv_min - q_max, kv_max - q_min
        may = (-self.left <= highest) & (lowest <= self.right)
        return may, (-self.left <= lowest) & (highest <= self.right)


@pytree_dataclass
class Prefix(Mask):
    """Everybody sees the first ``length`` keys: ``kv < length``. ``Causal() | Prefix(n)`` is the prefix language model.

    ``length``: a number or an integer scalar array, the same for all sequences (``Padding`` has one for each).
    Source: T5, https://arxiv.org/abs/1910.10683, section 3.2.1.
    """

    length: Any

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx < self.length

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        return kv_min < self.length, kv_max < self.length


@pytree_dataclass
class Padding(Mask):
    """Keys behind the end of their sequence are not visible: ``kv < lengths[b]``.

    ``lengths``: integers ``[B]``; a B of 1 serves every sequence.
    """

    lengths: Any

    def __post_init__(self):
        _check_table(self.lengths, "Padding", "lengths", ranks=(1,), kind="i")

    def __call__(self, b, h, q_idx, kv_idx):
        length, known = self._length(b)
        return (kv_idx < length) & known

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        length, known = self._length(b)
        return (kv_min < length) & known, (kv_max < length) & known

    def _length(self, b):
        return (self.lengths[0], np.True_) if len(self.lengths) == 1 else _look_up(self.lengths, b)


@pytree_dataclass
class Segments(Mask):
    """Packed sequences: a pair is visible where its two ids are equal. ``query_ids`` ``[T]`` or ``[B,T]``, integers.

    ``kv_ids`` ``[S]`` or ``[B,S]`` default to ``query_ids``; a B of 1 serves every sequence. Usually joined:
    ``Segments(ids) & Causal()``.
    """

    query_ids: Any
    kv_ids: Any = None

    def __post_init__(self):
        _check_table(self.query_ids, "Segments", "query_ids", ranks=(1, 2), kind="i")
        if self.kv_ids is not None:
            _check_table(self.kv_ids, "Segments", "kv_ids", ranks=(1, 2), kind="i")

    def __call__(self, b, h, q_idx, kv_idx):
        query_id, query_known = _look_up_row(self.query_ids, b, q_idx)
        kv_id, kv_known = _look_up_row(self._key_ids(), b, kv_idx)
        return (query_id == kv_id) & query_known & kv_known

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        q_low, q_high, q_all = _range_in_row(self.query_ids, b, q_min, q_max)
        kv_low, kv_high, kv_all = _range_in_row(self._key_ids(), b, kv_min, kv_max)
        may = (q_low <= kv_high) & (kv_low <= q_high)
        one_id = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
        return may, one_id & q_all & kv_all

    def _key_ids(self):
        return self.query_ids if self.kv_ids is None else self.kv_ids


@pytree_dataclass
class Dense(Mask):
    """A table of visible pairs, by position: bool ``[T,S]``, ``[N,T,S]`` or ``[B,N,T,S]``; axes of 1 are shared.

    A bool array given as ``mask=`` to ``dot_product_attention`` goes by slot instead; the two differ only where
    positions are given. ``bounds`` is exact, by a summed-area table.
    """

    array: Any

    def __post_init__(self):
        _check_table(self.array, "Dense", "array", ranks=(2, 3, 4), kind="b")

    def __call__(self, b, h, q_idx, kv_idx):
        table = self._table()
        q_idx = q_idx if table.shape[2] != 1 else q_idx * 0
        kv_idx = kv_idx if table.shape[3] != 1 else kv_idx * 0
        value, known = _look_up(table, *_shared(table, b, h), q_idx, kv_idx)
        return value & known

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        table = self._table()
        xp = _namespace(table)
        # sums[..., i, j] counts the visible pairs with q < i and kv < j
        sums = xp.pad(xp.cumsum(xp.cumsum(table, axis=2, dtype=xp.int32), axis=3, dtype=xp.int32),
                      ((0, 0), (0, 0), (1, 0), (1, 0)))  # fmt: skip
        q_low, q_high = _clip_interval(q_min, q_max, table.shape[2])
        kv_low, kv_high = _clip_interval(kv_min, kv_max, table.shape[3])

        def count(q_end, kv_end):
            return _look_up(sums, *_shared(table, b, h), q_end, kv_end)

        total, known = count(q_high, kv_high)  # known: b and h lie in the table
        visible = total - count(q_low, kv_high)[0] - count(q_high, kv_low)[0] + count(q_low, kv_low)[0]
        q_size, kv_size = _interval_size(q_min, q_max, table.shape[2]), _interval_size(kv_min, kv_max, table.shape[3])
        whole = (q_high - q_low) * (kv_high - kv_low)
        return (visible > 0) & known, (visible == whole) & (whole == q_size * kv_size) & known

    def _table(self):
        return self.array[(None,) * (4 - self.array.ndim)]


@pytree_dataclass
class And(Mask):
    """Visible where both masks say so; write ``a & b``."""

    joins: ClassVar = ("left", "right")
    left: Any
    right: Any

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) & self.right(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        left_may, left_must = bounds(self.left, b, h, q_min, q_max, kv_min, kv_max)
        right_may, right_must = bounds(self.right, b, h, q_min, q_max, kv_min, kv_max)
        return left_may & right_may, left_must & right_must


@pytree_dataclass
class Or(Mask):
    """Visible where one of the masks says so; write ``a | b``."""

    joins: ClassVar = ("left", "right")
    left: Any
    right: Any

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) | self.right(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        left_may, left_must = bounds(self.left, b, h, q_min, q_max, kv_min, kv_max)
        right_may, right_must = bounds(self.right, b, h, q_min, q_max, kv_min, kv_max)
        return left_may | right_may, left_must | right_must


@pytree_dataclass
class Not(Mask):
    """Visible where the mask says it is not; write ``~a``."""

    joins: ClassVar = ("mask",)
    mask: Any

    def __call__(self, b, h, q_idx, kv_idx):
        return True ^ self.mask(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        may, must = bounds(self.mask, b, h, q_min, q_max, kv_min, kv_max)
        return True ^ must, True ^ may


def and_masks(*masks: MaskFunction) -> Mask:
    """Visible where all of ``masks`` (``Mask`` objects or plain functions) say so."""
    return _join(And, masks, "and_masks")


def or_masks(*masks: MaskFunction) -> Mask:
    """Visible where at least one of ``masks`` (``Mask`` objects or plain functions) says so."""
    return _join(Or, masks, "or_masks")


def _join(join, masks, name):
    if not masks:
        raise ValueError(f"{name}() needs at least one mask")
    joined, *rest = map(_as_mask, masks)
    for mask in rest:
        joined = join(joined, mask)
    return joined if isinstance(joined, Mask) else Not(Not(joined))  # one plain function: still a Mask


def _check_table(table: Any, mask: str, argument: str, ranks: tuple[int, ...], kind: str) -> None:
    wanted = {"i": "integers", "b": "bools"}[kind]
    shape, dtype = getattr(table, "shape", None), getattr(table, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(f"masks.{mask}: {argument} must be an array of {wanted}, got {type(table).__name__}")
    right_kind = jnp.issubdtype(dtype, jnp.integer) if kind == "i" else dtype == bool
    if len(shape) not in ranks or not right_kind:
        rank = " or ".join(map(str, ranks))
        raise TypeError(f"masks.{mask}: {argument} must be {wanted} of rank {rank}, got {dtype} of shape {shape}")


def _namespace(*arrays: Any):
    """NumPy while everything is static, so that a static mask stays static; otherwise jax.numpy."""
    return jnp if any(isinstance(array, jax.Array) for array in arrays) else np


def _look_up(table, *indices) -> tuple[Any, Any]:
    """``table[indices]`` and whether the indices lie inside the table; outside, the value is that at the edge."""
    xp = _namespace(table, *indices)
    known, clipped = np.True_, []
    for index, size in zip(indices, table.shape, strict=True):
        if size == 0:
            return xp.zeros(np.broadcast_shapes(*(np.shape(index) for index in indices)), table.dtype), np.False_
        known = known & (index >= 0) & (index < size)
        clipped.append(xp.clip(index, 0, size - 1))
    return xp.asarray(table)[tuple(clipped)], known


def _look_up_row(table, b, index):
    if table.ndim == 2 and table.shape[0] == 1:  # one row serves every sequence, as an axis of 1 does elsewhere
        table = table[0]
    return _look_up(table, index) if table.ndim == 1 else _look_up(table, b, index)


def _range_in_row(ids, b, low, high):
    """Least and greatest id at positions ``low..high``, and whether all of these positions lie in the table.

    Without any, least is the largest integer and greatest the smallest: an interval that meets no other.
    """
    xp = _namespace(ids, b, low, high)
    ids = xp.asarray(ids)  # jax.numpy's own width of integers, of which the largest is taken below
    low, high, b = (xp.asarray(x)[..., None] for x in (low, high, b))
    positions = xp.arange(ids.shape[-1])
    row, known = _look_up_row(ids, b, positions)
    inside = (low <= positions) & (positions <= high) & known
    info = jnp.iinfo(ids.dtype)
    least = xp.min(xp.where(inside, row, info.max), axis=-1, initial=info.max)
    greatest = xp.max(xp.where(inside, row, info.min), axis=-1, initial=info.min)
    whole = xp.sum(inside, axis=-1) == (high - low + 1)[..., 0]
    return least, greatest, whole


def _shared(table, b, h):
    """Batch and head index into a 4-D table whose axes of size 1 serve every batch and head."""
    xp = _namespace(b, h)  # zeros of their own, and no ``b * 0``: the result shall not even formally depend on b
    return (b if table.shape[0] != 1 else xp.zeros_like(b)), (h if table.shape[1] != 1 else xp.zeros_like(h))


def _clip_interval(low, high, size):
    """``[low, high]`` as a half-open interval within a table axis; an axis of 1 serves every index."""
    xp = _namespace(low, high)
    if size == 1:
        return low * 0, low * 0 + 1
    start = xp.clip(low, 0, size)
    return start, xp.maximum(xp.clip(high + 1, 0, size), start)


def _interval_size(low, high, size):
    return low * 0 + 1 if size == 1 else high - low + 1
