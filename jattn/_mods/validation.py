"""Checks the fields of masks and score functions at construction, and converts integers to int32.

All arithmetic on positions, lengths and ids uses int32. JAX would silently truncate NumPy's wider integers, and
differences of narrow or unsigned integers would wrap around.
"""

import inspect
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn._mods.arrays import AnyArray, Index, Length, namespace

LEAST, LARGEST = -(2**31), 2**31 - 1  # of int32


def to_int32(argument: str, x: AnyArray) -> AnyArray:
    """Integers of any width and sign as int32; raises if they do not fit, but clips traced integers."""
    if x.dtype == np.int32:
        return x
    traced = isinstance(x, jax.Array) and (isinstance(x, Tracer) or not x.is_fully_addressable)
    if not traced and jnp.iinfo(x.dtype).max > LARGEST:
        values = np.asarray(x)
        if values.min(initial=0) < LEAST or values.max(initial=0) > LARGEST:
            raise ValueError(
                f"{argument} must lie within int32, from {LEAST} to {LARGEST}, got values from {values.min()} to "
                f"{values.max()}"
            )
    return _clipped(x) if isinstance(x, jax.Array) else x.astype(np.int32)


def _clipped(x: jax.Array) -> jax.Array:
    info = jnp.iinfo(x.dtype)
    if info.max > LARGEST:
        x = jnp.clip(x, max(info.min, LEAST), LARGEST)
    return x.astype(jnp.int32)


def as_array(name: str, x: object) -> AnyArray:
    """The argument ``name`` as an array; NumPy and JAX arrays are unchanged."""
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return np.asarray(x) if isinstance(x, np.generic) else x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {error}") from error


def flag(name: str, x: object) -> bool:
    """A checked Python bool."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, and known while tracing, got {x!r}")
    return bool(x)


def to_number(argument: str, x: Any) -> AnyArray | int | float:
    """A real number: a Python number if known, otherwise a scalar array."""
    dtype = np.result_type(x) if isinstance(x, bool | int | float) else getattr(x, "dtype", None)
    if dtype is None or np.shape(x) or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        got = f"{dtype} of shape {list(np.shape(x))}" if hasattr(x, "dtype") else repr(x)
        raise TypeError(f"{argument} must be a number or a scalar array, got {got}")
    return x.item() if isinstance(x, np.ndarray | np.generic) else x


def check_table(table: object, owner: str, argument: str, ranks: tuple[int, ...], kind: str) -> None:
    """Raises unless ``table`` is an array with one of these ranks and this kind: ``"i"`` (int) or ``"b"`` (bool)."""
    wanted = {"i": "integers", "b": "bools"}[kind]
    shape, dtype = getattr(table, "shape", None), getattr(table, "dtype", None)
    if shape is None or dtype is None:
        raise TypeError(f"{owner}: {argument} must be an array of {wanted}, got {type(table).__name__}")
    right_kind = jnp.issubdtype(dtype, jnp.integer) if kind == "i" else dtype == bool
    if len(shape) not in ranks or not right_kind:
        rank = " or ".join(map(str, ranks))
        raise TypeError(f"{owner}: {argument} must be {wanted} of rank {rank}, got {dtype} of shape {shape}")


def check_array(name: str, x: AnyArray, expected: str, kind: Any, *shapes: tuple[Length, ...]) -> None:
    """Raises unless ``x`` has a dtype of this kind and one of these shapes."""
    if x.shape not in shapes or not jnp.issubdtype(x.dtype, kind):
        raise ValueError(f"{name} must be {expected}, got {x.dtype} of shape {list(x.shape)}")


def pair(name: str, x: Any, parts: str) -> tuple[Any, Any]:
    """The two entries of ``x``, a tuple, list or array. A dict, string or set would unpack, but is not a pair.

    Raises ValueError with a message that describes the ``parts``.
    """
    if not isinstance(x, tuple | list | np.ndarray | jax.Array) or getattr(x, "ndim", 1) == 0 or len(x) != 2:
        size = f" of {len(x)}" if isinstance(x, tuple | list) else ""
        raise ValueError(f"{name} must be a pair {parts}, got {type(x).__name__}{size}")
    first, second = x
    return first, second


def check_number(x: Any, owner: str, argument: str) -> None:
    """Raises unless ``x`` is an integer or an integer scalar array."""
    dtype = np.dtype(int) if isinstance(x, int) else getattr(x, "dtype", None)
    if dtype is None or np.shape(x) != () or not jnp.issubdtype(dtype, jnp.integer):
        got = type(x).__name__ if dtype is None else f"{dtype} of shape {np.shape(x)}"
        raise TypeError(f"{owner}: {argument} must be an integer or an integer scalar array, got {got}")


def check_sizes(
    table: AnyArray, owner: str, argument: str, hint: str = "", *, shared: str = "B", **axes: Length | None
) -> None:
    """Raises if a table's sizes do not fit the call's.

    ``axes``: the names of its last axes and their sizes, None for any. Axes in ``shared`` may also be 1.
    """
    named = list(axes.items())[-table.ndim :]
    for (axis, wanted), size in zip(named, table.shape, strict=True):
        if wanted is not None and size != wanted and not (size == 1 and axis in shared):
            names, sizes = (", ".join(map(str, column)) for column in zip(*named, strict=True))
            raise ValueError(
                f"{owner}: {argument} must be [{names}] = [{sizes.replace('None', 'any')}] (or 1 for "
                f"{', '.join(x for x in shared if x in dict(named)) or 'nothing'}), got shape {list(table.shape)}{hint}"
            )


def number(x: AnyArray | int, least: int = LEAST) -> AnyArray | int:
    """An integer field, clipped to int32: a Python int if known, otherwise an int32 array."""
    if isinstance(x, int | np.integer | np.ndarray):
        return min(max(operator.index(x), least), LARGEST)
    return jnp.maximum(_clipped(x), least)


def at_most(kv_idx: Index, q_idx: Index, by: Index) -> AnyArray:
    """``kv <= q + by``, even if the sum overflows int32; a ``by`` of ``LARGEST`` means no limit."""
    if isinstance(by, int):
        if by == LARGEST:
            return np.True_
        return kv_idx <= _plus(q_idx, by) if by >= 0 else kv_idx < _plus(q_idx, by + 1)
    fits = q_idx >= LEAST - jnp.minimum(by, 0)
    return ((kv_idx <= _plus(q_idx, by)) & fits) | (by == LARGEST)


def at_least(kv_idx: Index, q_idx: Index, by: Index) -> AnyArray:
    """``kv >= q + by``, even if the sum overflows int32; a ``by`` of ``-LARGEST`` means no limit."""
    if isinstance(by, int):
        if by == -LARGEST:
            return np.True_
        return kv_idx >= _plus(q_idx, by) if by <= 0 else kv_idx > _plus(q_idx, by - 1)
    fits = q_idx <= LARGEST - jnp.maximum(by, 0)
    return ((kv_idx >= _plus(q_idx, by)) & fits) | (by == -LARGEST)


def end_of_window(q_idx: Index, by: Index, unlimited: int) -> AnyArray | int:
    """``q + by``, clipped to int32: the first key of ``at_least`` or the last key of ``at_most``.

    ``unlimited``: the result if ``by`` means no limit: LEAST for ``at_least``, LARGEST for ``at_most``.
    """
    no_limit = max(unlimited, -LARGEST)
    if isinstance(by, int):
        return unlimited if by == no_limit else _plus(q_idx, by)
    return jnp.where(by == no_limit, unlimited, _plus(q_idx, by))


def _plus(index: Index, by: Index) -> AnyArray:
    """``index + by``, clipped to int32. This takes one sum per query, whereas ``kv - q`` takes one per pair."""
    index = namespace(index, by).asarray(index)
    if index.dtype == np.int64:
        return index + by
    below, above = (min(by, 0), max(by, 0)) if isinstance(by, int) else (jnp.minimum(by, 0), jnp.maximum(by, 0))
    return to_int32("q_idx", index).clip(LEAST - below, LARGEST - above) + by


def check_fits(mod: object, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
    """Calls ``mod.check(B, N, T, S)``, if it exists, as described in ``jattn.masks.Mask.check``."""
    checks = getattr(mod, "check", None)
    if callable(checks):
        checks(B, N, T, S)


def check_signature(name: str, mod: Any) -> Any:
    """Returns ``mod``. Raises for common mistakes: a class, a list of functions, a function with wrong arguments."""
    if isinstance(mod, type):
        raise TypeError(f"{name}={mod.__name__} is a class; write {name}={mod.__name__}(...)")
    if isinstance(mod, list | tuple) and any(map(callable, mod)):
        hint = "masks by & (or masks.and_masks)" if name == "mask" else "score functions by score_mods.then"
        raise TypeError(f"{name} must be one callable, got a {type(mod).__name__} of {len(mod)}; join {hint}")
    if callable(mod):
        arguments = ["b", "h", "q_idx", "kv_idx"] if name == "mask" else ["score", "b", "h", "q_idx", "kv_idx"]
        try:
            signature = inspect.signature(mod)
        except (TypeError, ValueError):  # not every callable has a signature
            return mod
        try:
            signature.bind(*arguments)
        except TypeError:
            raise TypeError(f"{name} must take ({', '.join(arguments)}), got a function of {signature}") from None
    return mod
