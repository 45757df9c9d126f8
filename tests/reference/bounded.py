"""Numbers that know how far a narrower dtype may be off: a formula written once in NumPy also bounds its rounding.

A running error analysis: every operation passes on the errors of its operands and adds its rounding, ``C`` units of
the sizes of its terms, so that the result of a cancellation is not expected to be exact. The operands of a contraction
are rounded to the arrays' dtype first, unless they are arguments. An error may be as large as the number itself, or
infinite, where float32 cannot do better (logits of 1e5 and more).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

C = 4.0  # the approximate number of roundings per operation


def unit(dtype: Any) -> float:
    """The distance between two neighbouring numbers near 1."""
    return float(ml_dtypes.finfo(dtype).eps)


def least(dtype: Any) -> float:
    """Numbers below this may become 0: processors flush subnormals, and compute float16 in float32."""
    info = ml_dtypes.finfo(dtype)
    return float(info.smallest_subnormal if np.dtype(dtype) == np.float16 else info.smallest_normal)


class Rounding(NamedTuple):
    """The dtypes that a computation is held to."""

    wide: Any  # of scores and sums
    narrow: Any  # of arrays, and of computed operands of a contraction


class Bounded(np.lib.mixins.NDArrayOperatorsMixin):
    """``value`` in float64 and its ``error``, of the same shape; an error of None marks an argument, which is exact."""

    def __init__(self, value: Any, rounding: Rounding, error: np.ndarray | None = None):
        self.value, self.rounding, self.error = np.asarray(value, np.float64), rounding, error
        self.shape, self.ndim = self.value.shape, self.value.ndim

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return self.value

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        values, errors = [np.asarray(x, np.float64) for x in inputs], [error_of(x) for x in inputs]
        result = ufunc(*values)
        if ufunc not in RULES:  # comparisons
            return result
        passed, size = RULES[ufunc](result, *values, *errors)
        return Bounded(result, self.rounding, rounded(result, np.broadcast_to(passed, result.shape), size, self.rounding.wide))  # fmt: skip

    def __array_function__(self, function: Any, types: Any, arguments: Any, kwargs: Any) -> Any:
        if function is np.einsum:
            return einsum(self.rounding, *arguments)
        if function is np.where:
            condition, *values = arguments
            exact = all(x.error is None if isinstance(x, Bounded) else np.ndim(x) == 0 for x in values)
            error = None if exact else np.where(condition, *map(error_of, values))
            value = np.where(condition, *map(np.asarray, values))
            return Bounded(value, self.rounding, None if error is None else np.broadcast_to(error, value.shape))
        if function is np.concatenate:
            value, error = (np.concatenate([of(x) for x in arguments[0]], *arguments[1:]) for of in (np.asarray, error_of))  # fmt: skip
            return Bounded(value, self.rounding, error)
        return self._moved(lambda x: function(x, *arguments[1:], **kwargs))

    def _moved(self, move: Callable[[np.ndarray], np.ndarray]) -> "Bounded":
        return Bounded(move(self.value), self.rounding, None if self.error is None else move(self.error))

    def __getitem__(self, index: Any) -> "Bounded":
        return self._moved(lambda x: x[index])

    def reshape(self, *shape: Any) -> "Bounded":
        return self._moved(lambda x: x.reshape(*shape))

    def repeat(self, count: int, axis: int) -> "Bounded":
        return self._moved(lambda x: x.repeat(count, axis))

    def sum(self, axis: Any = None, keepdims: bool = False) -> "Bounded":
        total = lambda x: x.sum(axis, keepdims=keepdims)
        error = total(error_of(self)) + C * unit(self.rounding.wide) * total(abs(self.value))
        return Bounded(total(self.value), self.rounding, error)

    def max(self, axis: Any, initial: float) -> "Bounded":
        return Bounded(self.value.max(axis, initial=initial), self.rounding, error_of(self).max(axis, initial=0.0))

    def at(self, index: np.ndarray, size: int) -> "Bounded":
        """``[size]``: the sums of the entries with each index."""
        total = lambda x: np.bincount(np.broadcast_to(index, x.shape).ravel(), x.ravel(), size)
        error = total(error_of(self)) + C * unit(self.rounding.wide) * total(abs(self.value))
        return Bounded(total(self.value), self.rounding, error)


def error_of(x: Any) -> np.ndarray:
    """The error of a number; 0 of an argument or a constant."""
    error = x.error if isinstance(x, Bounded) else None
    return np.zeros(np.asarray(x).shape) if error is None else error


def rounded(value: np.ndarray, error: np.ndarray, size: np.ndarray, dtype: Any) -> np.ndarray:
    """The error with that of one more operation on terms of this size."""
    return error + C * unit(dtype) * size + least(dtype) * (value != 0)


def einsum(rounding: Rounding, axes: str, x: Any, y: Any) -> Bounded:
    """``np.einsum`` of two operands."""
    (x, off_x), (y, off_y) = (
        (np.asarray(a, np.float64),
            rounded(np.asarray(a), a.error, abs(a.value), rounding.narrow) if isinstance(a, Bounded) and a.error is not None else None)
        for a in (x, y)
    )  # fmt: skip
    value, size = np.einsum(axes, x, y), np.einsum(axes, abs(x), abs(y))
    error = C * unit(rounding.wide) * size + least(rounding.wide) * (size != 0)
    error = error if off_x is None else error + np.einsum(axes, off_x, abs(y))
    error = error if off_y is None else error + np.einsum(axes, abs(x) if off_x is None else abs(x) + off_x, off_y)
    return Bounded(value, rounding, error)


def expm1(error: np.ndarray) -> np.ndarray:
    """The relative error of ``exp`` if its exponent is off by ``error``; infinite if that is too much."""
    return np.where(error < 100.0, np.expm1(np.minimum(error, 100.0)), np.inf)


# Of each operation: the error that it passes on, and the size that it rounds; arguments: result, values, errors.
RULES: dict[Any, Callable] = {
    np.add: lambda r, x, y, a, b: (a + b, abs(x) + abs(y)),
    np.subtract: lambda r, x, y, a, b: (a + b, abs(x) + abs(y)),
    np.multiply: lambda r, x, y, a, b: (abs(x) * b + abs(y) * a + a * b, abs(r)),
    np.divide: lambda r, x, y, a, b: (np.where(b < abs(y), (a + abs(r) * b) / (abs(y) - b), np.inf), abs(r)),
    np.negative: lambda r, x, a: (a, 0.0),
    np.absolute: lambda r, x, a: (a, 0.0),
    np.exp: lambda r, x, a: (np.where(a == 0, 0.0, r * expm1(a)), r),
    np.log: lambda r, x, a: (-np.log1p(-np.minimum(a / x, 1.0)), abs(r)),
    np.cos: lambda r, x, a: (np.minimum(a, 2.0), 1.0),
    np.sin: lambda r, x, a: (np.minimum(a, 2.0), 1.0),
    np.tanh: lambda r, x, a: (np.minimum(a * (1 - r**2 + a), 2.0), abs(r)),
}
