"""Lists the cases: a call's options, and a plain definition of their meaning. Axis sizes are distinct primes."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from jattn import masks, score_mods
from jattn._mods.mask import Ends, Indices, Interval
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn.score_mods import ScoreMod

# Tolerances of results, relative to the largest.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
B, T, S, N, K, H, D = 2, 7, 11, 3, 3, 5, 13


def everything(b: Ends, h: Ends, q: Ends, kv: Ends) -> bool:
    """Every query sees every key."""
    return True


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of ``jattn.dot_product_attention``, and a plain definition of its mask and score function.

    Attributes:
        options: the call's arguments other than query, key, value and ``score_mod``; of these, the floats ``bias`` and
            ``sinks`` are differentiated.
        sees: ``(b, h, q, kv) -> bool``: the visibility under ``is_causal``, ``local_window_size`` and a non-array
            ``mask`` in ``options``. It receives integers; ``q`` and ``kv`` are positions.
        vectorized: ``sees`` gets arrays ``b [B,1,1,1]``, ``h [N,1,1]``, ``q [B,1,T,1]`` and ``kv [B,1,1,S]`` instead.
        score: ``(params, score, h [N,1,1], q [T,1], kv [1,S]) -> score``: the definition of ``mod``.
        mod: ``params -> score_mod``.
        params: the score function's floats, which are differentiated.
        shape: ``(B, T, S, N, K, H, D)``.
        amplify: a factor that multiplies the queries.
        dtype: the dtype of query, key and value, which are normally distributed.
        tolerance: for ``out`` and ``lse``, relative to the largest value, and never less than the dtype's 2e-5, 4e-3
            (float16) or 2e-2 (bfloat16). The tolerance for gradients is twice as large, or 8 times as large in 16 bits.
        poisoned: NaN or infinity in unseen keys and values must leave the results bit-identical.
        offset: the scale of a normally distributed vector ``[K,H]`` added to all keys, like the bias of a projection.
            Only the gradients of ``out`` are then compared. A vector shared by all keys changes no weight, so its
            product with these gradients must vanish, while it dominates the gradient of the lse.

    Example:
        >>> odd = jattn.testing.Case({"mask": lambda b, h, q, kv: kv % 2 == 1}, lambda b, h, q, kv: kv in (1, 3, 5, 7, 9))
        >>> jattn.testing.examine("xla", odd).result
        'right'
    """

    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    sees: Callable[[Any, Any, Any, Any], Any] = everything
    score: Callable[[Any, Any, Any, Any, Any], Any] | None = None
    mod: Callable[[Any], ScoreMod] | None = None
    params: ArrayLike | None = None
    shape: tuple[int, ...] = (B, T, S, N, K, H, D)
    amplify: float = 1.0
    tolerance: float = 0.0
    dtype: DTypeLike = jnp.float32
    vectorized: bool = False
    poisoned: bool = False
    offset: float = 0.0

    def __post_init__(self):
        name = jnp.dtype(self.dtype).name
        if name not in TOLERANCES:
            raise ValueError(f"dtype must be one of {', '.join(TOLERANCES)}, got {name}")
        object.__setattr__(self, "tolerance", max(self.tolerance, TOLERANCES[name]))
        options = {name: option for name, option in self.options.items() if option is not None}  # None: not passed
        object.__setattr__(self, "options", options)

    def of(self, dtype: DTypeLike) -> "Case":
        """The case in another dtype, if its own is float32."""
        return dataclasses.replace(self, dtype=dtype) if self.dtype == jnp.float32 else self


@pytree_dataclass
class InChunk(masks.Mask):
    """A user-defined mask class that shows the keys of the query's chunk, up to the query itself."""

    size: int = static_field(default=4)

    def __call__(self, b: Ends, h: Ends, q_idx: Ends, kv_idx: Ends) -> Any:
        return (kv_idx <= q_idx) & (kv_idx // self.size == q_idx // self.size)

    def interval(self, b: Indices, h: Indices, q_idx: Indices) -> Interval:
        return q_idx - q_idx % self.size, q_idx


_RNG = np.random.default_rng(0)


def _floats(*shape: int) -> np.ndarray:
    return _RNG.normal(size=shape).astype(np.float32)


def _bucket(offset: int) -> int:
    """T5's bucket of ``kv - q``, one of 8 in both directions, with a maximum distance of 16."""
    first, distance = 4 if offset > 0 else 0, abs(offset)
    return first + (distance if distance < 2 else min(2 + int(np.log(distance / 2) / np.log(8) * 2), 3))


_GRID = np.arange(T)[:, None] * 3 % 5 <= np.arange(S)[None, :] % 4
_IDS = np.array([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
_KV_IDS = np.array([[0, 1, 1, 0, 2, 2, 5, 1, 0, 0, 2], [3, 4, 3, 4, 3, 3, 9, 9, 3, 4, 4]])
_LENGTHS = np.array([4, 0])
_TABLE = _RNG.random((2, 3, 7, 11)) < 0.5
_SHIFTED = np.array([[4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 6]])
_SLOPES = np.array([0.5, 0.25, 0.125], np.float32)
_BUCKETS = _floats(8, 3)
_BUCKET_OF = np.array([[_bucket(s - t) for s in range(S)] for t in range(T)])
_PAIRS = np.arange(T)[:, None] + np.arange(S)

_causal = {"is_causal": True}, lambda b, h, q, kv: kv <= q
_half = lambda b, h, q, kv: (q + b) % 2 == 0
_of_all_indices = lambda b, h, q, kv: (q + 2 * kv + b + h) % 3 != 0
_thirds = lambda b, h, q, kv: kv % 3 == 0

#: Cases of small calls, by name; they take under a minute for a kernel that compiles quickly.
CASES: Mapping[str, Case] = {
    "plain": Case(),
    "one query": Case(shape=(2, 1, S, N, K, H, D)),
    "one key": Case(shape=(2, T, 1, N, K, H, D)),
    "one key, which half of the queries see": Case({"mask": _half}, _half, shape=(2, T, 1, N, K, H, D)),
    "grouped queries": Case(shape=(B, T, S, 6, 3, H, D)),
    "one kv head": Case(shape=(B, T, S, 5, 1, H, D)),
    "grouped, with per-head bias and mask": Case({"bias": _floats(B, 6, T, S), "mask": _RNG.random((1, 6, T, S)) < 0.6}, shape=(B, T, S, 6, 3, H, D)),
    "scale": Case({"scale": 0.7}),
    "causal, top-left": Case(*_causal),
    "causal, more queries than keys": Case(*_causal, shape=(B, 11, 7, N, K, H, D)),
    "causal, bottom-right by positions": Case({"is_causal": True, "query_positions": np.arange(S - T, S)}, _causal[1]),
    "positions that differ by row": Case({"is_causal": True, "query_positions": _SHIFTED, "kv_positions": np.arange(S)[::-1].copy()}, _causal[1]),
    "positions up to 2**30": Case({"is_causal": True, "query_positions": 2**30 + np.arange(T), "kv_positions": 2**30 - 4 + np.arange(S)}, _causal[1]),
    "window, two-sided": Case({"local_window_size": (2, 1)}, lambda b, h, q, kv: q - 2 <= kv <= q + 1),
    "window, one number": Case({"local_window_size": np.int64(1)}, lambda b, h, q, kv: abs(q - kv) <= 1),
    "window, causal, rows behind the keys see nothing": Case(
        {"local_window_size": (2, 0), "is_causal": True}, lambda b, h, q, kv: q - 2 <= kv <= q, shape=(B, 11, 5, N, K, H, D)
    ),
    "query lengths": Case({"query_seq_lengths": np.array([3, 7])}),
    "key lengths, one of them 0": Case({"key_value_seq_lengths": _LENGTHS}),
    "both lengths and causal": Case({"query_seq_lengths": np.array([3, 7]), "key_value_seq_lengths": np.array([5, 2]), "is_causal": True}, _causal[1]),
    **{
        f"mask array {list(shape)}": Case({"mask": _RNG.random(shape) < 0.6})
        for shape in [(T, S), (1, S), (T, 1), (N, T, S), (1, 1, S), (B, N, T, S), (B, 1, 1, S), (1, N, 1, S), (B, 1, T, 1)]
    },
    **{
        f"bias {list(shape)}": Case({"bias": _floats(*shape)})
        for shape in [(T, S), (1, S), (N, T, S), (B, N, T, S), (B, 1, 1, S), (1, N, 1, S), (B, 1, T, 1)]
    },
    "bias that is -inf for some pairs and one whole row": Case(
        {"bias": np.where(_RNG.random((1, 1, T, S)) < 0.3, -np.inf, _floats(1, 1, T, S)) + np.where(np.arange(T) == 2, -np.inf, 0)[:, None]}
    ),
    "mask Causal | Prefix": Case({"mask": masks.Causal() | masks.Prefix(3)}, lambda b, h, q, kv: kv <= q or kv < 3),
    "mask SlidingWindow & ~Prefix: rows that see nothing": Case(
        {"mask": masks.SlidingWindow(2, 1) & ~masks.Prefix(4)}, lambda b, h, q, kv: q - 2 <= kv <= q + 1 and not kv < 4
    ),
    "mask Segments": Case({"mask": masks.Segments(_IDS, _KV_IDS)}, lambda b, h, q, kv: _IDS[b, q] == _KV_IDS[b, kv]),
    "mask Padding": Case({"mask": masks.Padding(_LENGTHS)}, lambda b, h, q, kv: kv < _LENGTHS[b]),
    "mask Dense": Case({"mask": masks.Dense(_TABLE)}, lambda b, h, q, kv: _TABLE[b, h, q, kv]),
    "mask Dense by position, outside of it nothing": Case(
        {"mask": masks.Dense(_GRID), "query_positions": np.arange(T) + 3}, lambda b, h, q, kv: q < T and _GRID[q, kv]
    ),
    "mask function of all four indices": Case({"mask": _of_all_indices}, _of_all_indices),
    "user-defined mask class, with an interval": Case({"mask": InChunk(3)}, lambda b, h, q, kv: q // 3 * 3 <= kv <= q),
    "mask function that ignores the query": Case({"mask": _thirds}, _thirds),
    "every row sees nothing": Case({"mask": lambda b, h, q, kv: kv < 0}, lambda b, h, q, kv: kv < 0),
    "mask function and causal and lengths": Case(
        {"mask": lambda b, h, q, kv: kv != 2, "is_causal": True, "key_value_seq_lengths": np.array([6, 9])}, lambda b, h, q, kv: kv <= q and kv != 2
    ),
    "alibi": Case(score=lambda slopes, s, h, q, kv: s - slopes[h] * abs(q - kv), mod=score_mods.Alibi, params=_SLOPES),
    "t5 bias": Case(
        score=lambda table, s, h, q, kv: s + table[_BUCKET_OF[None], h],
        mod=lambda table: score_mods.RelativeBias(table, bidirectional=True, max_distance=16), params=_BUCKETS,
    ),
    "soft cap, its cap learned": Case(
        score=lambda cap, s, h, q, kv: cap * jnp.tanh(s / cap), mod=score_mods.SoftCap, params=np.float32(1.5), amplify=4.0
    ),
    "alibi, then a soft cap, causal": Case(
        *_causal, lambda slopes, s, h, q, kv: 2 * jnp.tanh((s - slopes[h] * abs(q - kv)) / 2),
        mod=lambda slopes: score_mods.then(score_mods.Alibi(slopes), score_mods.SoftCap(2.0)), params=_SLOPES,
    ),
    "score function that captures a table, int times float": Case(
        score=lambda table, s, h, q, kv: s * 0.5 + (kv - q) * table[h],
        mod=lambda table: lambda s, b, h, q, kv: s * 0.5 + (kv - q) * table[h], params=_SLOPES,
    ),
    "score function with an infinite derivative where masked": Case(
        {"mask": lambda b, h, q, kv: (q + kv) % 2 == 0, "bias": np.where(_PAIRS % 2, -1e9, 9.0).astype(np.float32)},
        lambda b, h, q, kv: (q + kv) % 2 == 0, lambda one, s, h, q, kv: one * jnp.sqrt(jnp.abs(s)),
        mod=lambda one: lambda s, b, h, q, kv: one * jnp.sqrt(s), params=np.float32(1.0),
    ),
    "sinks": Case({"sinks": _floats(N)}),
    "sinks, and rows that see nothing": Case({"sinks": _floats(N), "key_value_seq_lengths": _LENGTHS}),
    "logits of +-1e4": Case(amplify=3e3, tolerance=2e-3),
    "lse below -88": Case({"bias": np.full((1, 1, 1, 1), -1000.0, np.float32)}, tolerance=1e-4),
    "no queries": Case(shape=(B, 0, S, N, K, H, D)),
    "no keys": Case(shape=(B, T, 0, N, K, H, D)),
    "no keys, causal": Case(*_causal, shape=(B, T, 0, N, K, H, D)),
    "no sequences": Case(shape=(0, T, S, N, K, H, D)),
    "bfloat16, causal": Case(*_causal).of(jnp.bfloat16),
    "float16, head_dim 8": Case(shape=(B, T, S, N, K, 8, 8)).of(jnp.float16),
    "bfloat16, causal window and lengths, head_dim 8": Case(
        {"is_causal": True, "local_window_size": (3, 0), "query_seq_lengths": np.array([5, 7]), "key_value_seq_lengths": np.array([7, 0])},
        lambda b, h, q, kv: q - 3 <= kv <= q, shape=(B, T, S, 6, 3, 8, 8),
    ).of(jnp.bfloat16),
    "bfloat16, keys with much in common": Case(shape=(B, 19, S, N, K, 8, 8), offset=300.0).of(jnp.bfloat16),
    "NaN where nobody looks: key lengths": Case({"key_value_seq_lengths": _LENGTHS}, poisoned=True),
    "NaN where nobody looks: mask array": Case({"mask": np.arange(S)[None, :] % 3 != 1}, poisoned=True),
    "NaN where nobody looks: mask function": Case({"mask": lambda b, h, q, kv: kv >= 5}, lambda b, h, q, kv: kv >= 5, poisoned=True),
    "NaN where nobody looks: causal": Case(*_causal, poisoned=True),
    "NaN where nobody looks: query lengths": Case({"query_seq_lengths": np.array([3, 7])}, poisoned=True),
}  # fmt: skip


def _at_size(T: int, S: int, N: int, K: int, H: int, *call: Any, D: int = 0, B: int = 1, **rest: Any) -> Case:
    return Case(*call, shape=(B, T, S, N, K, H, D or H), vectorized=True, **rest)


_documents = np.arange(1100) * 7 // 1100
_in_documents = {"mask": masks.Segments(_documents), "is_causal": True}
_window = {"local_window_size": (200, 0), "is_causal": True}, lambda b, h, q, kv: (q - 200 <= kv) & (kv <= q)
_two_of_three = lambda b, h, q, kv: (q + 2 * kv + h) % 3 != 0
_lengths = {"key_value_seq_lengths": np.array([1000, 0]), "query_seq_lengths": np.array([700, 600])}

#: Cases that span several blocks of every kernel, at the sizes, dtypes and odd lengths of real calls, by name.
AT_SIZE: Mapping[str, Case] = {
    "causal, bfloat16, 64 features": _at_size(1152, 1152, 4, 2, 64, *_causal).of(jnp.bfloat16),
    "causal, bfloat16, 128 features": _at_size(1152, 1152, 4, 2, 128, *_causal).of(jnp.bfloat16),
    "causal, bfloat16, 256 features": _at_size(1152, 1152, 2, 1, 256, *_causal).of(jnp.bfloat16),
    "causal, float16, 128 features": _at_size(1152, 1152, 2, 2, 128, *_causal).of(jnp.float16),
    "causal, float32, 128 features": _at_size(1152, 1152, 2, 1, 128, *_causal),
    "full, odd lengths, bfloat16": _at_size(1091, 1213, 2, 1, 128).of(jnp.bfloat16),
    "full, odd lengths, float32, 80 features, values of 48": _at_size(1091, 1213, 2, 2, 80, D=48),
    "window, bfloat16": _at_size(1152, 1152, 2, 1, 128, *_window).of(jnp.bfloat16),
    "lengths, rows that see nothing, bfloat16": _at_size(700, 1152, 2, 1, 64, _lengths, B=2).of(jnp.bfloat16),
    "packed documents, bfloat16": _at_size(
        1100, 1100, 2, 1, 64, _in_documents, lambda b, h, q, kv: (kv <= q) & (_documents[q] == _documents[kv])
    ).of(jnp.bfloat16),
    "mask function, bfloat16": _at_size(1152, 1152, 2, 1, 64, {"mask": _two_of_three}, _two_of_three).of(jnp.bfloat16),
    "soft cap, causal, bfloat16": _at_size(
        1152, 1152, 2, 1, 128, *_causal, lambda cap, s, h, q, kv: 5.0 * jnp.tanh(s / 5.0) + 0 * cap,
        mod=lambda cap: score_mods.SoftCap(5.0), params=np.float32(0.0), amplify=4.0,
    ).of(jnp.bfloat16),
    "alibi, bfloat16": _at_size(
        1152, 1152, 3, 3, 64, score=lambda slopes, s, h, q, kv: s - slopes[h] * abs(q - kv), mod=score_mods.Alibi, params=_SLOPES / 8
    ).of(jnp.bfloat16),
    "one query, bfloat16": _at_size(1, 4099, 8, 2, 128, B=2).of(jnp.bfloat16),
}  # fmt: skip
