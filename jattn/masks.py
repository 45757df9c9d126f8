"""Masks: which query sees which key.

A mask is any callable ``(b, h, q_idx, kv_idx) -> bool`` over broadcastable integer index arrays: ``True`` if query
``q_idx`` of head ``h`` in sequence ``b`` sees key ``kv_idx``. The indices are positions (see
``jattn.dot_product_attention``), so tables inside masks are indexed by position, and positions outside the table are
not visible. The convention is FlexAttention's (https://arxiv.org/abs/2412.05496), so its ``mask_mod`` examples port
line by line.

The masks below also combine with ``&``, ``|`` and ``~``, and their ``bounds`` describe a whole block of pairs at once,
so that implementations can skip empty blocks.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from jattn.fields import LARGEST, at_least, at_most, check_number, check_sizes, check_table, number, to_int32
from jattn.mods import as_part, check, known, mod_semantics, pytree_dataclass
from jattn.tables import count_pairs, look_up, look_up_row, range_in_row, shared

MaskFunction = Callable[[Any, Any, Any, Any], Any]


class Mask:
    """Base class of masks that combine with others and can bound blocks. Any plain function is a mask, too."""

    __array_ufunc__ = None  # array & mask must call __rand__, not broadcast over the array

    def __call__(self, b, h, q_idx, kv_idx):
        """``True`` where a pair is visible; index arrays broadcast."""
        raise NotImplementedError(f"{type(self).__name__} does not say which pairs are visible: define __call__")

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        """``(any_visible, all_visible)`` for the block ``[q_min, q_max] x [kv_min, kv_max]``, both ends included.

        ``any_visible`` is False only if no pair of the block is visible, and ``all_visible`` is True only if all pairs
        are: sound, but not always tight. NumPy bools if everything is static, otherwise arrays. Arguments broadcast, so
        one call can describe a grid of blocks.
        """
        return np.True_, np.False_

    def check(self, B, N, T, S) -> None:
        """Raises ``ValueError`` if the mask does not fit B sequences, N heads, T queries and S keys.

        Called by ``dot_product_attention``. T and S are None if positions are given; tables may then have any length.
        """

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
        raise TypeError(f"a mask has no truth value ({type(self).__name__}): join masks by &, | and ~, not and, or")


def _as_parts(mask: Mask, *fields: str) -> None:
    for name in fields:
        object.__setattr__(mask, name, _as_mask(getattr(mask, name)))


def _as_mask(mask: Any) -> MaskFunction:
    if not callable(mask):
        hint = "; wrap an array as masks.Dense(array)" if hasattr(mask, "shape") else ""
        raise TypeError(f"a mask must be a callable (b, h, q_idx, kv_idx) -> bool, got {type(mask).__name__}{hint}")
    if isinstance(mask, type):
        raise TypeError(f"a mask must be an object, got the class {mask.__name__}; write {mask.__name__}(...)")
    return as_part(mask)


def bounds(mask: MaskFunction, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
    """``mask.bounds(...)``; ``(True, False)`` for a plain function.

    Concrete arrays in the mask are passed as NumPy arrays, so that the result is static.
    """
    if not isinstance(mask, Mask):
        return np.True_, np.False_
    with mod_semantics():
        return known(mask).bounds(b, h, q_min, q_max, kv_min, kv_max)


@pytree_dataclass
class Causal(Mask):
    """A query sees its own position and earlier ones: ``kv <= q``."""

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx <= q_idx

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        return kv_min <= q_max, kv_max <= q_min


@pytree_dataclass
class SlidingWindow(Mask):
    """A query sees ``left`` keys before it, itself, and ``right`` after it: ``-left <= kv - q <= right``.

    As ``local_window_size=(left, right)`` in ``jax.nn.dot_product_attention``. Integers or integer scalar
    arrays; 2^31 - 1 or more means unbounded.
    """

    left: Any
    right: Any = 0

    def __post_init__(self):
        check_number(self.left, "masks.SlidingWindow", "left")
        check_number(self.right, "masks.SlidingWindow", "right")

    def __call__(self, b, h, q_idx, kv_idx):
        left, right = self._sides()
        return at_least(kv_idx, q_idx, -left) & at_most(kv_idx, q_idx, right)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        left, right = self._sides()
        any_visible = at_least(kv_max, q_min, -left) & at_most(kv_min, q_max, right)
        return any_visible, at_least(kv_min, q_max, -left) & at_most(kv_max, q_min, right)

    def _sides(self):
        return (number(side, -LARGEST) for side in (self.left, self.right))


@pytree_dataclass
class Prefix(Mask):
    """Every query sees the first ``length`` keys: ``kv < length``. ``Causal() | Prefix(n)`` is a prefix language model.

    ``length``: an integer or integer scalar array, shared by all sequences (``Padding`` has one per sequence).
    Source: T5, https://arxiv.org/abs/1910.10683, section 3.2.1.
    """

    length: Any

    def __post_init__(self):
        check_number(self.length, "masks.Prefix", "length")

    def __call__(self, b, h, q_idx, kv_idx):
        return kv_idx < number(self.length)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        length = number(self.length)
        return kv_min < length, kv_max < length


@pytree_dataclass
class Padding(Mask):
    """Hides keys past the end of their sequence: ``kv < lengths[b]``.

    ``lengths``: integers ``[B]``; a B of 1 is shared by all sequences.
    """

    lengths: Any

    def __post_init__(self):
        check_table(self.lengths, "masks.Padding", "lengths", ranks=(1,), kind="i")
        object.__setattr__(self, "lengths", to_int32("masks.Padding: lengths", self.lengths))

    def check(self, B, N, T, S) -> None:
        check_sizes(self.lengths, "masks.Padding", "lengths", B=B)

    def __call__(self, b, h, q_idx, kv_idx):
        length, known = self._length(b)
        return (kv_idx < length) & known

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        length, known = self._length(b)
        return (kv_min < length) & known, (kv_max < length) & known

    def _length(self, b):
        return (self.lengths[0], np.True_) if self.lengths.shape[0] == 1 else look_up(self.lengths, b)


@pytree_dataclass
class Segments(Mask):
    """Packed sequences: a pair is visible if its two ids are equal. ``query_ids`` ``[T]`` or ``[B,T]``, integers.

    ``kv_ids`` ``[S]`` or ``[B,S]`` default to ``query_ids``; a B of 1 is shared by all sequences. Usually combined:
    ``Segments(ids) & Causal()``.
    """

    query_ids: Any
    kv_ids: Any = None

    def __post_init__(self):
        for name in ("query_ids", "kv_ids")[: 1 if self.kv_ids is None else 2]:
            ids = getattr(self, name)
            check_table(ids, "masks.Segments", name, ranks=(1, 2), kind="i")
            if isinstance(ids, np.ndarray):  # JAX would truncate these to 32 bits, and different ids could become equal
                object.__setattr__(self, name, to_int32(f"masks.Segments: {name}", ids))

    def check(self, B, N, T, S) -> None:
        check_sizes(self.query_ids, "masks.Segments", "query_ids", B=B, T=T)
        hint = "" if self.kv_ids is not None else "; keys of another length than the queries need kv_ids"
        check_sizes(self._key_ids(), "masks.Segments", "query_ids" if hint else "kv_ids", hint, B=B, S=S)

    def __call__(self, b, h, q_idx, kv_idx):
        query_id, query_inside = look_up_row(self.query_ids, b, q_idx)
        kv_id, kv_inside = look_up_row(self._key_ids(), b, kv_idx)
        return (query_id == kv_id) & query_inside & kv_inside

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        q_low, q_high, q_all = range_in_row(self.query_ids, b, q_min, q_max)
        kv_low, kv_high, kv_all = range_in_row(self._key_ids(), b, kv_min, kv_max)
        any_visible = (q_low <= kv_high) & (kv_low <= q_high)
        same_id = (q_low == q_high) & (kv_low == kv_high) & (q_low == kv_low)
        return any_visible, same_id & q_all & kv_all

    def _key_ids(self):
        return self.query_ids if self.kv_ids is None else self.kv_ids


@pytree_dataclass
class Dense(Mask):
    """A table of visible pairs, by position: bool ``[T,S]``, ``[N,T,S]`` or ``[B,N,T,S]``; axes of size 1 are shared.

    A bool array passed as ``mask=`` to ``dot_product_attention`` is indexed by slot instead; the two differ only if
    positions are given. ``bounds`` is exact and uses a summed-area table.
    """

    array: Any

    def __post_init__(self):
        check_table(self.array, "masks.Dense", "array", ranks=(2, 3, 4), kind="b")

    def check(self, B, N, T, S) -> None:
        check_sizes(self.array, "masks.Dense", "array", shared="BNTS", B=B, N=N, T=T, S=S)

    def __call__(self, b, h, q_idx, kv_idx):
        table = self._table()
        q_idx = q_idx if table.shape[2] != 1 else q_idx * 0
        kv_idx = kv_idx if table.shape[3] != 1 else kv_idx * 0
        value, inside = look_up(table, *shared(table, b, h), q_idx, kv_idx)
        return value & inside

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        visible, pairs, inside = count_pairs(self._table(), b, h, q_min, q_max, kv_min, kv_max)
        return visible > 0, (visible == pairs) & inside

    def _table(self):
        return self.array[(None,) * (4 - self.array.ndim)]


@pytree_dataclass
class And(Mask):
    """Visible where both masks are True; write ``a & b``."""

    left: Any
    right: Any

    def __post_init__(self):
        _as_parts(self, "left", "right")

    def check(self, B, N, T, S) -> None:
        check(self.left, B, N, T, S)
        check(self.right, B, N, T, S)

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) & self.right(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        left_any, left_all = bounds(self.left, b, h, q_min, q_max, kv_min, kv_max)
        right_any, right_all = bounds(self.right, b, h, q_min, q_max, kv_min, kv_max)
        return left_any & right_any, left_all & right_all


@pytree_dataclass
class Or(Mask):
    """Visible where either mask is True; write ``a | b``."""

    left: Any
    right: Any

    def __post_init__(self):
        _as_parts(self, "left", "right")

    def check(self, B, N, T, S) -> None:
        check(self.left, B, N, T, S)
        check(self.right, B, N, T, S)

    def __call__(self, b, h, q_idx, kv_idx):
        return self.left(b, h, q_idx, kv_idx) | self.right(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        left_any, left_all = bounds(self.left, b, h, q_min, q_max, kv_min, kv_max)
        right_any, right_all = bounds(self.right, b, h, q_min, q_max, kv_min, kv_max)
        return left_any | right_any, left_all | right_all


@pytree_dataclass
class Not(Mask):
    """Visible where the mask is False; write ``~a``."""

    mask: Any

    def __post_init__(self):
        _as_parts(self, "mask")

    def check(self, B, N, T, S) -> None:
        check(self.mask, B, N, T, S)

    def __call__(self, b, h, q_idx, kv_idx):
        return True ^ self.mask(b, h, q_idx, kv_idx)

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max) -> tuple[Any, Any]:
        any_visible, all_visible = bounds(self.mask, b, h, q_min, q_max, kv_min, kv_max)
        return True ^ all_visible, True ^ any_visible


def and_masks(*masks: MaskFunction) -> Mask:
    """Visible where all of ``masks`` (``Mask`` objects or plain functions) are True."""
    return _join(And, masks, "and_masks")


def or_masks(*masks: MaskFunction) -> Mask:
    """Visible where any of ``masks`` (``Mask`` objects or plain functions) is True."""
    return _join(Or, masks, "or_masks")


def _join(join, masks, name):
    if not masks:
        raise ValueError(f"{name}() needs at least one mask")
    joined, *rest = map(_as_mask, masks)
    for mask in rest:
        joined = join(joined, mask)
    return joined if isinstance(joined, Mask) else Not(Not(joined))  # wraps a single plain function in a Mask
