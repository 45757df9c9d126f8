"""Defines score functions, which modify ``scale * q·k + bias`` before the softmax.

A score function is any elementwise callable ``(score, b, h, q_idx, kv_idx) -> score`` over broadcastable arrays, like
FlexAttention's ``score_mod`` (https://arxiv.org/abs/2412.05496). For a masked pair, it gets a stand-in score of 1 and
its result is discarded, so an infinite derivative with respect to the score is harmless there. Values computed from the
indices alone must be finite everywhere. The function runs under NumPy's dtype promotion, whatever the caller's setting.
Every array that it holds or captures is differentiated.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jattn._mods.arrays import AnyArray, Index, Length
from jattn._mods.contracts import ScoreMod
from jattn._mods.pytree import as_part, pytree_dataclass, static_field
from jattn._mods.validation import LARGEST, check_fits, to_int32

__all__ = ["Alibi", "RelativeBias", "ScoreMod", "SoftCap", "Then", "alibi_slopes", "then"]


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The slopes ``[N]`` of ALiBi: ``2^(-8i/N)``, i = 1..N, if N is a power of two.

    For other N: the slopes for the next lower power of two, then every second slope for the next higher one. The dtype
    is float32.

    Raises:
        ValueError: ``num_heads`` is less than 1.

    Example:
        >>> jattn.score_mods.alibi_slopes(4).tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]

    Source: https://arxiv.org/abs/2108.12409, section 3, and its published code.
    """
    if num_heads < 1:
        raise ValueError(f"alibi_slopes: num_heads must be at least 1, got {num_heads}")
    lower = 2 ** math.floor(math.log2(num_heads))
    slopes = 2.0 ** (-8.0 / lower * np.arange(1, lower + 1))
    between = 2.0 ** (-4.0 / lower * np.arange(1, 2 * (num_heads - lower), 2))
    return np.concatenate([slopes, between]).astype(np.float32)


@pytree_dataclass
class Alibi:
    """``score - slopes[h] * |q - kv|``: lowers scores in proportion to the distance.

    ``slopes``: floats ``[N]``, such as ``alibi_slopes(N)``.

    Raises:
        TypeError: ``slopes`` is not a float array of rank 1.

    Example:
        >>> alibi, i = jattn.score_mods.Alibi(np.array([0.5, 0.25], np.float32)), np.arange(3)
        >>> print(alibi(np.zeros((3, 3)), 0, 0, i[:, None], i))  # of head 0
        [[ 0.  -0.5 -1. ]
         [-0.5  0.  -0.5]
         [-1.  -0.5  0. ]]

    Source: https://arxiv.org/abs/2108.12409, section 3 (causal there; the absolute distance makes it symmetric).
    """

    slopes: Any

    def __post_init__(self):
        _check_float_table("Alibi", "slopes", self.slopes, "[N]", rank=1)

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        """Raises ``ValueError`` unless there are N slopes."""
        _check_heads("Alibi", "slopes", self.slopes, "[N]", N)

    def __call__(self, score: AnyArray, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> AnyArray:
        slopes = jnp.asarray(self.slopes)
        dtype = jnp.promote_types(slopes.dtype, jnp.float32)
        # Split into halves, whose differences are exact in float even if the difference of positions overflows int32.
        (q_high, q_low), (kv_high, kv_low) = _halves(q_idx, dtype), _halves(kv_idx, dtype)
        return score - slopes[h] * abs((q_high - kv_high) * 2**16 + (q_low - kv_low))


@pytree_dataclass
class RelativeBias:
    """``score + table[bucket(kv - q), h]``: T5's learned bias.

    The first half of the buckets hold one distance each; the second half hold logarithmic ranges of distances.

    Args:
        table: floats ``[num_buckets, N]``, as in T5.
        bidirectional: reserve half of the buckets for keys after the query; otherwise, these keys share bucket 0.
        max_distance: this and longer distances share the last bucket.

    Raises:
        TypeError: ``table`` is not a float array of rank 2.
        ValueError: no bucket holds a single distance, or ``max_distance`` has a bucket to itself.

    Example:
        >>> mod, i = jattn.score_mods.RelativeBias(jnp.arange(8.0)[:, None]), np.arange(3)
        >>> print(mod(np.zeros((3, 3)), 0, 0, i[:, None], i))  # here a bucket's bias is its number
        [[0. 5. 6.]
         [1. 0. 5.]
         [2. 1. 0.]]
        >>> mod.bucket(np.array([-1, 0, 1])).tolist()
        [1, 0, 5]

    Source: https://arxiv.org/abs/1910.10683, section 2.1, and its published code.
    """

    table: Any
    bidirectional: bool = static_field(default=True)
    max_distance: int = static_field(default=128)

    def __post_init__(self):
        _check_float_table("RelativeBias", "table", self.table, "[num_buckets, N]", rank=2)
        exact = self.table.shape[0] // (4 if self.bidirectional else 2)
        if exact < 1 or self.max_distance <= exact:
            raise ValueError(
                f"score_mods.RelativeBias: table has {self.table.shape[0]} buckets, and {exact} of them hold a single "
                f"distance; that number must be positive and less than max_distance, got "
                f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
            )

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        """Raises ``ValueError`` unless the table has N columns."""
        _check_heads("RelativeBias", "table", self.table, "[num_buckets, N]", N)

    def __call__(self, score: AnyArray, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> AnyArray:
        # The head's column comes first: under vmap over heads, its lookup then gathers rows of all heads, and its
        # transpose, the table's gradient, adds up rows.
        return score + jnp.asarray(self.table)[:, h][self.bucket(_offset(q_idx, kv_idx))]

    def bucket(self, offset: AnyArray) -> AnyArray:
        """The bucket of each ``offset = kv - q``, integers of offset's shape."""
        buckets, first = self.table.shape[0], 0
        if self.bidirectional:
            buckets //= 2
            first = jnp.where(offset > 0, buckets, 0)
            distance = abs(offset)
        else:
            distance = jnp.maximum(-offset, 0)
        exact = buckets // 2
        # The log is taken only for distances >= exact; at 0, it would be infinite.
        ratio = jnp.log(jnp.maximum(distance, exact) / exact) / math.log(self.max_distance / exact)
        logarithmic = exact + (ratio * (buckets - exact)).astype(jnp.int32)
        return first + jnp.where(distance < exact, distance, jnp.minimum(logarithmic, buckets - 1))


@pytree_dataclass
class SoftCap:
    """``cap * tanh(score / cap)``: bounds scores by ``cap``, a positive number or scalar array.

    Raises:
        TypeError: ``cap`` is not a number or a scalar array.
        ValueError: ``cap`` is known and not positive.

    Example:
        >>> mod = jattn.score_mods.SoftCap(50.0)
        >>> [round(float(x), 2) for x in mod(jnp.array([1.0, 50.0, 1000.0]), 0, 0, 0, 0)]
        [1.0, 38.08, 50.0]

    Source: Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """

    cap: Any

    def __post_init__(self):
        cap: Any = self.cap
        if not isinstance(cap, int | float) and (not hasattr(cap, "dtype") or jnp.ndim(cap)):
            got = f"shape {cap.shape}" if hasattr(cap, "dtype") else type(cap).__name__
            raise TypeError(f"score_mods.SoftCap: cap must be a number or a scalar array, got {got}")
        if isinstance(cap, int | float | np.generic | np.ndarray) and not np.greater(cap, 0):
            raise ValueError(f"score_mods.SoftCap: cap must be positive, got {cap}")

    def __call__(self, score: AnyArray, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> AnyArray:
        return self.cap * jnp.tanh(score / self.cap)


@pytree_dataclass
class Then:
    """Applies the score function ``second`` after ``first``; write ``then(first, second, ...)``.

    Example:
        >>> double, cap = lambda score, b, h, q_idx, kv_idx: 2 * score, jattn.score_mods.SoftCap(1.0)
        >>> mod = jattn.score_mods.then(double, cap)
        >>> isinstance(mod, jattn.score_mods.Then), mod.second == cap
        (True, True)
    """

    first: ScoreMod
    second: ScoreMod

    def __post_init__(self):
        for name in ("first", "second"):
            object.__setattr__(self, name, as_part(getattr(self, name)))

    def check(self, B: Length, N: Length, T: Length | None, S: Length | None) -> None:
        """Calls the ``check`` of both functions, which may raise."""
        check_fits(self.first, B, N, T, S)
        check_fits(self.second, B, N, T, S)

    def __call__(self, score: AnyArray, b: Index, h: Index, q_idx: Index, kv_idx: Index) -> Any:
        return self.second(self.first(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)


def then(*mods: ScoreMod) -> ScoreMod:
    """Applies the score functions ``mods`` in order: ``then(f, g)`` is ``g(f(score, ...), ...)``.

    Raises:
        TypeError: one of them is not callable or is a class.
        ValueError: no function is given.

    Example:
        >>> double, cap = lambda score, b, h, q_idx, kv_idx: 2 * score, jattn.score_mods.SoftCap(10.0)
        >>> score = jnp.array(50.0)
        >>> round(float(jattn.score_mods.then(double, cap)(score, 0, 0, 0, 0)), 3)
        10.0
        >>> round(float(jattn.score_mods.then(cap, double)(score, 0, 0, 0, 0)), 3)
        19.998
    """
    for mod in mods:
        if not callable(mod) or isinstance(mod, type):
            got = f"the class {mod.__name__}" if isinstance(mod, type) else type(mod).__name__
            raise TypeError(f"then: a score function must be callable, got {got}")
    if not mods:
        raise ValueError("then() needs at least one score function")
    first, *rest = mods
    for mod in rest:
        first = Then(first, mod)
    return first


def _check_float_table(mod: str, argument: str, table: Any, shape: str, rank: int) -> None:
    if not hasattr(table, "dtype") or table.ndim != rank or not jnp.issubdtype(table.dtype, jnp.floating):
        got = f"{table.dtype} of shape {table.shape}" if hasattr(table, "dtype") else type(table).__name__
        raise TypeError(f"score_mods.{mod}: {argument} must be a float array {shape}, got {got}")


def _check_heads(mod: str, argument: str, table: Any, shape: str, num_heads: Length) -> None:
    if table.shape[-1] != num_heads:
        raise ValueError(
            f"score_mods.{mod}: {argument} must be {shape} with N = {num_heads} query heads, got shape "
            f"{list(table.shape)}"
        )


def _halves(index: Index, dtype: DTypeLike) -> tuple[AnyArray, AnyArray]:
    """``high`` and ``low`` of ``index = high * 2^16 + low``, both as floats."""
    index = _index(index)
    return (index >> 16).astype(dtype), (index & 0xFFFF).astype(dtype)


def _offset(q_idx: Index, kv_idx: Index) -> AnyArray:
    """``kv - q`` as int32, clipped to ``[-LARGEST, LARGEST]`` so that its negative also fits."""
    q_idx, kv_idx = _index(q_idx), _index(kv_idx)
    offset, after = kv_idx - q_idx, kv_idx > q_idx
    return jnp.where(after == (offset > 0), jnp.maximum(offset, -LARGEST), jnp.where(after, LARGEST, -LARGEST))


def _index(x: Index) -> AnyArray:
    return to_int32("positions", x if hasattr(x, "dtype") else np.asarray(x))
