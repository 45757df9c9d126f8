"""Defines the base class of masks, and how masks combine. The masks themselves are in ``jattn.masks``."""

import operator
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import numpy as np

from jattn._mods.arrays import Bools, Index, Length, calling, namespace
from jattn._mods.contracts import MaskFunction
from jattn._mods.pytree import as_part, holds_plain_function, known, pytree_dataclass
from jattn._mods.validation import check_fits

Indices = np.integer | np.ndarray | jax.Array  # int32
Ends = int | Indices
Interval = tuple[Ends, Ends]
Bounds = tuple[Bools, Bools]


class Mask:
    """Base class of masks that combine with others and can bound blocks. Any plain function can also be a mask.

    A subclass defines ``__call__`` and, if implementations should skip its empty blocks, ``bounds``.
    :func:`~jattn.pytree_dataclass` makes it a pytree, and :func:`~jattn.masks.check_bounds` tests it.

    Example:
        >>> @jattn.pytree_dataclass
        ... class Even(jattn.masks.Mask):
        ...     def __call__(self, b, h, q_idx, kv_idx):
        ...         return kv_idx % 2 == 0
        >>> i = np.arange(4)
        >>> print((Even() & jattn.masks.Causal())(0, 0, i[:, None], i).astype(int)[-1])
        [1 0 1 0]
    """

    __array_ufunc__ = None  # array & mask must call __rand__, not broadcast over the array

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Bools:
        """``True`` where a pair is visible; index arrays broadcast."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__, which says which pairs are visible")

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        """``(any_visible, all_visible)`` for the block ``[q_min, q_max] x [kv_min, kv_max]``, both ends included.

        The block belongs to head ``h`` in sequence ``b``. ``any_visible`` is False only if no pair of the block is
        visible, and ``all_visible`` is True only if all pairs are. They may be conservative, but never wrong. They are
        NumPy bools if everything is static, and arrays otherwise. Arguments broadcast, so one call can describe a grid
        of blocks.

        Wrong bounds silently give wrong results: test custom bounds with ``jattn.masks.check_bounds``.
        """
        return np.True_, np.False_

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval | None:
        """``(first, last)``: query ``q_idx`` sees only the keys ``first <= kv_idx <= last``; none if ``last < first``.

        The query belongs to head ``h`` in sequence ``b``. Return None if a query does not always see a single interval
        of keys. Whether it is None must depend only on the class and its static fields, not on indices or arrays.
        Unlike ``bounds``, an interval must be exact: kernels limited to a few kinds of masks use it instead of
        ``__call__``, and thereby support custom mask classes. ``jattn.masks.check_bounds`` tests it.

        Results are int32, clipped where a sum overflows, or Python integers shared by all queries. ``-2**31`` and
        ``2**31 - 1`` mean no limit on that side. A ``last`` of ``-2**31`` shows no key, except to a query at that
        position. Results are NumPy arrays if everything is static, and JAX arrays otherwise. Arguments are int32 and
        broadcast; a result has only the axes it depends on.
        """
        return None

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        """Raises ``ValueError`` if the mask does not fit B sequences, N heads, T queries and S keys.

        Called by ``dot_product_attention``. T and S are None if positions are given: tables may then have any length.
        """

    def __and__(self, other: object) -> "And":
        return And(self, _as_mask(other))

    def __rand__(self, other: object) -> "And":
        return And(_as_mask(other), self)

    def __or__(self, other: object) -> "Or":
        return Or(self, _as_mask(other))

    def __ror__(self, other: object) -> "Or":
        return Or(_as_mask(other), self)

    def __invert__(self) -> "Not":
        return Not(self)

    @property
    def ndim(self):
        """Raises, because a mask has no axes. Flax's ``combine_masks`` reads it; the message gives an alternative."""
        raise AttributeError(
            f"{type(self).__name__} is a mask object, not an array, so it has no ndim: instead of combine_masks, join "
            "masks by &, as in Causal() & masks.Dense(array)"
        )

    def __bool__(self):
        raise TypeError(f"a mask has no truth value ({type(self).__name__}): join masks by &, | and ~, not by and, or")


def _as_parts(mask: Mask, *fields: str) -> None:
    for name in fields:
        object.__setattr__(mask, name, _as_mask(getattr(mask, name)))


def _as_mask(mask: object) -> MaskFunction:
    if not callable(mask):
        hint = "; wrap an array as masks.Dense(array)" if hasattr(mask, "shape") else ""
        raise TypeError(f"a mask must be a callable (b, h, q_idx, kv_idx) -> bool, got {type(mask).__name__}{hint}")
    if isinstance(mask, type):
        raise TypeError(f"a mask must be an object, got the class {mask.__name__}; write {mask.__name__}(...)")
    return as_part(mask)


def bounds(mask: MaskFunction, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
    """``(any_visible, all_visible)`` of a block: ``mask.bounds(...)``, or ``(True, False)`` for a plain function.

    Concrete arrays in the mask are passed as NumPy arrays, so that the result is static.

    Args:
        mask: a ``Mask`` or a function.
        b, h: the indices of the sequence and the head.
        q_min, q_max, kv_min, kv_max: the first and last positions of the block; arrays broadcast.

    Example:
        >>> causal = jattn.masks.Causal()
        >>> jattn.masks.bounds(causal, 0, 0, 4, 7, 0, 3)  # queries 4 to 7 see all of the keys 0 to 3
        (True, True)
        >>> jattn.masks.bounds(causal, 0, 0, 0, 3, 4, 7)  # queries 0 to 3 see none of the keys 4 to 7
        (False, False)
    """
    if not isinstance(mask, Mask):
        return np.True_, np.False_
    with calling("mask.bounds"):
        return known(mask).bounds(b, h, q_min, q_max, kv_min, kv_max)


def interval(mask: MaskFunction, b: Indices, h: Indices, q_idx: Indices) -> Interval | None:
    """``(first, last)``, the keys seen by each query: ``mask.interval(...)``; None for a mask with a plain function.

    A mask whose class is not registered with JAX counts as a plain function: tracing keeps only its ``__call__``.
    Concrete arrays in the mask are passed as NumPy arrays, so that the result is static.

    Args:
        mask: a ``Mask`` or a function.
        b, h, q_idx: int32 sequence and head indices, and query positions; they broadcast.

    Example:
        >>> mask = jattn.masks.SlidingWindow(2) & jattn.masks.Prefix(4)
        >>> b = h = np.int32(0)
        >>> first, last = jattn.masks.interval(mask, b, h, np.arange(6, dtype=np.int32))
        >>> first.tolist(), last.tolist()
        ([-2, -1, 0, 1, 2, 3], [0, 1, 2, 3, 3, 3])
    """
    if not isinstance(mask, Mask) or holds_plain_function(mask):
        return None
    with calling("mask.interval"):
        return known(mask).interval(b, h, q_idx)


def conjuncts(mask: MaskFunction) -> list[MaskFunction]:
    """The masks joined by ``&`` in ``mask``; ``mask`` alone if it joins none."""
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


@pytree_dataclass
class _Pair(Mask):
    """Two masks, combined elementwise by ``join``."""

    left: MaskFunction
    right: MaskFunction

    join: ClassVar[Callable[..., Any]]

    def __post_init__(self):
        _as_parts(self, "left", "right")

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        check_fits(self.left, B, N, T, S)
        check_fits(self.right, B, N, T, S)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return self.join(self.left(b, h, q_idx, kv_idx), self.right(b, h, q_idx, kv_idx))

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        left_any, left_all = bounds(self.left, b, h, q_min, q_max, kv_min, kv_max)
        right_any, right_all = bounds(self.right, b, h, q_min, q_max, kv_min, kv_max)
        return self.join(left_any, right_any), self.join(left_all, right_all)


@pytree_dataclass
class And(_Pair):
    """Visible where both masks, ``left`` and ``right``, are True; write ``left & right``.

    Example:
        >>> mask, i = jattn.masks.Causal() & jattn.masks.SlidingWindow(1), np.arange(3)
        >>> isinstance(mask, jattn.masks.And)
        True
        >>> print(mask(0, 0, i[:, None], i).astype(int))
        [[1 0 0]
         [1 1 0]
         [0 1 1]]
    """

    join = operator.and_

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval | None:
        left, right = interval(self.left, b, h, q_idx), interval(self.right, b, h, q_idx)
        if left is None or right is None:
            return None
        return _larger(left[0], right[0]), _smaller(left[1], right[1])


@pytree_dataclass
class Or(_Pair):
    """Visible where either mask, ``left`` or ``right``, is True; write ``left | right``.

    Example:
        >>> mask, i = jattn.masks.Causal() | jattn.masks.Prefix(2), np.arange(3)
        >>> isinstance(mask, jattn.masks.Or)
        True
        >>> print(mask(0, 0, i[:, None], i).astype(int))
        [[1 1 0]
         [1 1 0]
         [1 1 1]]
    """

    join = operator.or_

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval | None:
        """A single interval if both start at the same key for every query; other intervals may leave a gap."""
        left, right = interval(self.left, b, h, q_idx), interval(self.right, b, h, q_idx)
        if left is None or right is None or not isinstance(left[0], int) or not isinstance(right[0], int):
            return None
        return (left[0], _larger(left[1], right[1])) if left[0] == right[0] else None


@pytree_dataclass
class Not(Mask):
    """Visible where ``mask`` is False; write ``~mask``.

    Example:
        >>> mask, i = ~jattn.masks.Causal(), np.arange(3)
        >>> isinstance(mask, jattn.masks.Not)
        True
        >>> print(mask(0, 0, i[:, None], i).astype(int))
        [[0 1 1]
         [0 0 1]
         [0 0 0]]
    """

    mask: MaskFunction

    def __post_init__(self):
        _as_parts(self, "mask")

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        check_fits(self.mask, B, N, T, S)

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return True ^ self.mask(b, h, q_idx, kv_idx)

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> Bounds:
        any_visible, all_visible = bounds(self.mask, b, h, q_min, q_max, kv_min, kv_max)
        return True ^ all_visible, True ^ any_visible


def _larger(x: Ends, y: Ends) -> Ends:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else namespace(x, y).maximum(x, y)


def _smaller(x: Ends, y: Ends) -> Ends:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else namespace(x, y).minimum(x, y)


def and_masks(*masks: MaskFunction) -> Mask:
    """Visible where all of ``masks`` (``Mask`` objects or plain functions) are True.

    Raises:
        TypeError: one of them is not callable, or is a class.
        ValueError: no mask is given.

    Example:
        >>> even, late = lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0, lambda b, h, q_idx, kv_idx: kv_idx > 2
        >>> print(jattn.masks.and_masks(even, late)(0, 0, 0, np.arange(6)).astype(int))
        [0 0 0 0 1 0]
    """
    return _join(And, masks, "and_masks")


def or_masks(*masks: MaskFunction) -> Mask:
    """Visible where any of ``masks`` (``Mask`` objects or plain functions) is True.

    Raises:
        TypeError: one of them is not callable, or is a class.
        ValueError: no mask is given.

    Example:
        >>> even, late = lambda b, h, q_idx, kv_idx: kv_idx % 2 == 0, lambda b, h, q_idx, kv_idx: kv_idx > 2
        >>> print(jattn.masks.or_masks(even, late)(0, 0, 0, np.arange(6)).astype(int))
        [1 0 1 1 1 1]
    """
    return _join(Or, masks, "or_masks")


def _join(join: type[_Pair], masks: tuple, name: str) -> Mask:
    if not masks:
        raise ValueError(f"{name}() needs at least one mask")
    joined, *rest = map(_as_mask, masks)
    for mask in rest:
        joined = join(joined, mask)
    return joined if isinstance(joined, Mask) else Not(Not(joined))  # wraps a single plain function in a Mask
