"""The table of cases that holds every implementation to the formula in float64, in the tests and on a chip.

The reference below shares no code with jattn: it asks a plain definition of the mask about each pair and computes the
softmax explicitly. Axis sizes are distinct primes, so that a swapped axis fails.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jattn
from jattn import masks, score_mods

# Of results relative to the largest; gradients may be off by 2 times as much, and in 16 bits by 8 times as much.
TOLERANCES = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
B, T, S, N, K, H, D = 2, 7, 11, 3, 3, 5, 13
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@jattn.pytree_dataclass
class InChunk(masks.Mask):
    """A mask class of a user's own: the keys of the query's chunk, up to the query itself."""

    size: int = jattn.static_field(default=4)

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx) & (kv_idx // self.size == q_idx // self.size)

    def interval(self, b, h, q_idx):
        return q_idx - q_idx % self.size, q_idx


@dataclasses.dataclass(frozen=True)
class Case:
    """One call. ``sees`` and ``score`` are plain definitions of the mask and score functions in ``options``.

    ``at_size``: the lengths are those of a real call, and ``sees`` takes arrays of indices.
    """

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sees: Callable[[int, int, int, int], bool] = lambda b, h, q, kv: True
    score: Callable[..., Any] | None = None  # (params, score, h [N,1,1], q [T,1], kv [1,S]) -> score
    mod: Callable[[Any], Any] | None = None  # params -> score_mod
    params: np.ndarray | None = None  # the score function's arrays
    shape: tuple[int, ...] = (B, T, S, N, K, H, D)
    amplify: float = 1.0  # of the queries
    tolerance: float = 2e-5
    dtype: Any = jnp.float32
    at_size: bool = False

    def of(self, dtype: Any) -> "Case":
        """The case in another dtype, if it is of float32."""
        if self.dtype != jnp.float32:
            return self
        return dataclasses.replace(self, dtype=dtype, tolerance=max(self.tolerance, TOLERANCES[jnp.dtype(dtype).name]))


GRID = np.arange(T)[:, None] * 3 % 5 <= np.arange(S)[None, :] % 4
IDS = np.array([[0, 0, 1, 1, 1, 2, 2], [3, 3, 3, 3, 4, 4, 4]])
KV_IDS = np.array([[0, 1, 1, 0, 2, 2, 5, 1, 0, 0, 2], [3, 4, 3, 4, 3, 3, 9, 9, 3, 4, 4]])
LENGTHS = np.array([4, 0])
TABLE = RNG.random((2, 3, 7, 11)) < 0.5
SHIFTED = np.array([[4, 5, 6, 7, 8, 9, 10], [0, 1, 2, 3, 4, 5, 6]])
ALIBI = np.array([0.5, 0.25, 0.125], np.float32)
BUCKETS = floats(8, 3)


def t5_bucket(offset, buckets, bidirectional, max_distance):
    """T5's bucket for one offset kv - q, in plain Python."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    large = exact + int(np.log(distance / exact) / np.log(max_distance / exact) * (buckets - exact))
    return first + min(large, buckets - 1)


BUCKET_OF = np.array([[t5_bucket(s - t, 8, True, 16) for s in range(S)] for t in range(T)])

CASES = {
    "plain": Case(),
    "one query": Case(shape=(2, 1, S, N, K, H, D)),
    "one key": Case(shape=(2, T, 1, N, K, H, D)),
    "one key, which half of the queries see": Case(
        {"mask": lambda b, h, q, kv: (q + b) % 2 == 0}, lambda b, h, q, kv: (q + b) % 2 == 0, shape=(2, T, 1, N, K, H, D)
    ),
    "grouped queries": Case(shape=(B, T, S, 6, 3, H, D)),
    "one kv head": Case(shape=(B, T, S, 5, 1, H, D)),
    "grouped, with per-head bias and mask": Case(
        {"bias": floats(B, 6, T, S), "mask": RNG.random((1, 6, T, S)) < 0.6}, shape=(B, T, S, 6, 3, H, D)
    ),
    "scale": Case({"scale": 0.7}),
    "causal, top-left": Case({"is_causal": True}, lambda b, h, q, kv: kv <= q),
    "causal, more queries than keys": Case(
        {"is_causal": True}, lambda b, h, q, kv: kv <= q, shape=(B, 11, 7, N, K, H, D)
    ),
    "causal, bottom-right by positions": Case(
        {"is_causal": True, "query_positions": np.arange(S - T, S)}, lambda b, h, q, kv: kv <= q
    ),
    "positions that differ by row": Case(
        {"is_causal": True, "query_positions": SHIFTED, "kv_positions": np.arange(S)[::-1].copy()},
        lambda b, h, q, kv: kv <= q,
    ),
    "positions up to 2**30": Case(
        {"is_causal": True, "query_positions": 2**30 + np.arange(T), "kv_positions": 2**30 - 4 + np.arange(S)},
        lambda b, h, q, kv: kv <= q,
    ),
    "window, two-sided": Case({"local_window_size": (2, 1)}, lambda b, h, q, kv: q - 2 <= kv <= q + 1),
    "window, one number": Case({"local_window_size": np.int64(1)}, lambda b, h, q, kv: abs(q - kv) <= 1),
    "window, causal, rows behind the keys see nothing": Case(
        {"local_window_size": (2, 0), "is_causal": True},
        lambda b, h, q, kv: q - 2 <= kv <= q,
        shape=(B, 11, 5, N, K, H, D),
    ),
    "query lengths": Case({"query_seq_lengths": np.array([3, 7])}),
    "key lengths, one of them 0": Case({"key_value_seq_lengths": LENGTHS}),
    "both lengths and causal": Case(
        {"query_seq_lengths": np.array([3, 7]), "key_value_seq_lengths": np.array([5, 2]), "is_causal": True},
        lambda b, h, q, kv: kv <= q,
    ),
    **{
        f"mask array {list(shape)}": Case({"mask": RNG.random(shape) < 0.6})
        for shape in [(T, S), (1, S), (T, 1), (N, T, S), (1, 1, S), (B, N, T, S), (B, 1, 1, S), (1, N, 1, S), (B, 1, T, 1)]
    },
    **{
        f"bias {list(shape)}": Case({"bias": floats(*shape)})
        for shape in [(T, S), (1, S), (N, T, S), (B, N, T, S), (B, 1, 1, S), (1, N, 1, S), (B, 1, T, 1)]
    },
    "bias that is -inf for some pairs and one whole row": Case(
        {"bias": np.where(RNG.random((1, 1, T, S)) < 0.3, -np.inf, floats(1, 1, T, S)) + np.where(np.arange(T) == 2, -np.inf, 0)[:, None]}
    ),
    "mask Causal | Prefix": Case({"mask": masks.Causal() | masks.Prefix(3)}, lambda b, h, q, kv: kv <= q or kv < 3),
    "mask SlidingWindow & ~Prefix: rows that see nothing": Case(
        {"mask": masks.SlidingWindow(2, 1) & ~masks.Prefix(4)}, lambda b, h, q, kv: q - 2 <= kv <= q + 1 and not kv < 4
    ),
    "mask Segments": Case({"mask": masks.Segments(IDS, KV_IDS)}, lambda b, h, q, kv: IDS[b, q] == KV_IDS[b, kv]),
    "mask Padding": Case({"mask": masks.Padding(LENGTHS)}, lambda b, h, q, kv: kv < LENGTHS[b]),
    "mask Dense": Case({"mask": masks.Dense(TABLE)}, lambda b, h, q, kv: TABLE[b, h, q, kv]),
    "mask Dense by position, outside of it nothing": Case(
        {"mask": masks.Dense(GRID), "query_positions": np.arange(T) + 3}, lambda b, h, q, kv: q < T and GRID[q, kv]
    ),
    "mask function of all four indices": Case(
        {"mask": lambda b, h, q, kv: (q + 2 * kv + b + h) % 3 != 0}, lambda b, h, q, kv: (q + 2 * kv + b + h) % 3 != 0
    ),
    "mask class of one's own, with an interval": Case({"mask": InChunk(3)}, lambda b, h, q, kv: q // 3 * 3 <= kv <= q),
    "mask function that ignores the query": Case({"mask": lambda b, h, q, kv: kv % 3 == 0}, lambda b, h, q, kv: kv % 3 == 0),
    "every row sees nothing": Case({"mask": lambda b, h, q, kv: kv < 0}, lambda b, h, q, kv: False),
    "mask function and causal and lengths": Case(
        {"mask": lambda b, h, q, kv: kv != 2, "is_causal": True, "key_value_seq_lengths": np.array([6, 9])},
        lambda b, h, q, kv: kv <= q and kv != 2,
    ),
    "alibi": Case(
        {},
        score=lambda slopes, s, h, q, kv: s - slopes[h] * abs(q - kv),
        mod=score_mods.Alibi,
        params=ALIBI,
    ),
    "t5 bias": Case(
        {},
        score=lambda table, s, h, q, kv: s + table[BUCKET_OF[None], h],
        mod=lambda table: score_mods.RelativeBias(table, bidirectional=True, max_distance=16),
        params=BUCKETS,
    ),
    "soft cap, its cap learned": Case(
        {},
        score=lambda cap, s, h, q, kv: cap * jnp.tanh(s / cap),
        mod=score_mods.SoftCap,
        params=np.float32(1.5),
        amplify=4,
    ),
    "alibi, then a soft cap, causal": Case(
        {"is_causal": True},
        lambda b, h, q, kv: kv <= q,
        score=lambda slopes, s, h, q, kv: 2 * jnp.tanh((s - slopes[h] * abs(q - kv)) / 2),
        mod=lambda slopes: score_mods.then(score_mods.Alibi(slopes), score_mods.SoftCap(2.0)),
        params=ALIBI,
    ),
    "score function that captures a table, int times float": Case(
        {},
        score=lambda table, s, h, q, kv: s * 0.5 + (kv - q) * table[h],
        mod=lambda table: lambda s, b, h, q, kv: s * 0.5 + (kv - q) * table[h],
        params=ALIBI,
    ),
    "score function with an infinite derivative where masked": Case(
        {"mask": lambda b, h, q, kv: (q + kv) % 2 == 0, "bias": np.where((np.arange(T)[:, None] + np.arange(S)) % 2, -1e9, 9.0).astype(np.float32)},
        lambda b, h, q, kv: (q + kv) % 2 == 0,
        score=lambda one, s, h, q, kv: one * jnp.sqrt(jnp.abs(s)),
        mod=lambda one: lambda s, b, h, q, kv: one * jnp.sqrt(s),
        params=np.float32(1.0),
    ),
    "sinks": Case({"sinks": floats(N)}),
    "sinks, and rows that see nothing": Case({"sinks": floats(N), "key_value_seq_lengths": LENGTHS}),
    "logits of +-1e4": Case(amplify=3e3, tolerance=2e-3),
    "lse below -88": Case({"bias": np.full((1, 1, 1, 1), -1000.0, np.float32)}, tolerance=1e-4),
    "no queries": Case(shape=(B, 0, S, N, K, H, D)),
    "no keys": Case(shape=(B, T, 0, N, K, H, D)),
    "no keys, causal": Case({"is_causal": True}, lambda b, h, q, kv: kv <= q, shape=(B, T, 0, N, K, H, D)),
    "no sequences": Case(shape=(0, T, S, N, K, H, D)),
    "bfloat16, causal": Case({"is_causal": True}, lambda b, h, q, kv: kv <= q, dtype=jnp.bfloat16, tolerance=2e-2),
    "float16, head_dim 8": Case(shape=(B, T, S, N, K, 8, 8), dtype=jnp.float16, tolerance=4e-3),
    "bfloat16, causal window and lengths, head_dim 8": Case(
        {"is_causal": True, "local_window_size": (3, 0), "query_seq_lengths": np.array([5, 7]), "key_value_seq_lengths": np.array([7, 0])},
        lambda b, h, q, kv: q - 3 <= kv <= q,
        shape=(B, T, S, 6, 3, 8, 8),
        dtype=jnp.bfloat16,
        tolerance=2e-2,
    ),
}  # fmt: skip


POISONED = {
    "key lengths": Case({"key_value_seq_lengths": np.array([4, 0])}, lambda b, h, q, kv: kv < (4, 0)[b]),
    "mask array": Case({"mask": np.arange(S)[None, :] % 3 != 1}, lambda b, h, q, kv: kv % 3 != 1),
    "mask function": Case({"mask": lambda b, h, q, kv: kv >= 5}, lambda b, h, q, kv: kv >= 5),
    "causal": Case({"is_causal": True}, lambda b, h, q, kv: kv < T),
    "query lengths": Case({"query_seq_lengths": np.array([3, 7])}),
}


def _at_size(T: int, S: int, N: int, K: int, H: int, dtype: Any, D: int | None = None, **rest: Any) -> Case:
    options, tolerance = rest.pop("options", {}), TOLERANCES[jnp.dtype(dtype).name]
    shape = rest.pop("B", 1), T, S, N, K, H, D or H
    return Case(options, shape=shape, dtype=dtype, tolerance=tolerance, at_size=True, **rest)


_causal = {"options": {"is_causal": True}, "sees": lambda b, h, q, kv: kv <= q}
_documents = np.arange(1100) * 7 // 1100
# Several blocks of every kernel, at the sizes, dtypes and odd lengths of real calls.
AT_SIZE = {
    "causal, bfloat16, 64 features": _at_size(1152, 1152, 4, 2, 64, jnp.bfloat16, **_causal),
    "causal, bfloat16, 128 features": _at_size(1152, 1152, 4, 2, 128, jnp.bfloat16, **_causal),
    "causal, bfloat16, 256 features": _at_size(1152, 1152, 2, 1, 256, jnp.bfloat16, **_causal),
    "causal, float16, 128 features": _at_size(1152, 1152, 2, 2, 128, jnp.float16, **_causal),
    "causal, float32, 128 features": _at_size(1152, 1152, 2, 1, 128, jnp.float32, **_causal),
    "full, odd lengths, bfloat16": _at_size(1091, 1213, 2, 1, 128, jnp.bfloat16),
    "full, odd lengths, float32, 80 features, values of 48": _at_size(1091, 1213, 2, 2, 80, jnp.float32, 48),
    "window, bfloat16": _at_size(
        1152, 1152, 2, 1, 128, jnp.bfloat16,
        options={"local_window_size": (200, 0), "is_causal": True}, sees=lambda b, h, q, kv: (q - 200 <= kv) & (kv <= q),
    ),
    "lengths, rows that see nothing, bfloat16": _at_size(
        700, 1152, 2, 1, 64, jnp.bfloat16, B=2,
        options={"key_value_seq_lengths": np.array([1000, 0]), "query_seq_lengths": np.array([700, 600])},
    ),
    "packed documents, bfloat16": _at_size(
        1100, 1100, 2, 1, 64, jnp.bfloat16,
        options={"mask": masks.Segments(_documents), "is_causal": True},
        sees=lambda b, h, q, kv: (kv <= q) & (_documents[q] == _documents[kv]),
    ),
    "mask function, bfloat16": _at_size(
        1152, 1152, 2, 1, 64, jnp.bfloat16,
        options={"mask": lambda b, h, q, kv: (q + 2 * kv + h) % 3 != 0}, sees=lambda b, h, q, kv: (q + 2 * kv + h) % 3 != 0,
    ),
    "soft cap, causal, bfloat16": _at_size(
        1152, 1152, 2, 1, 128, jnp.bfloat16, **_causal, amplify=4.0,
        score=lambda cap, s, h, q, kv: 5.0 * jnp.tanh(s / 5.0) + 0 * cap,
        mod=lambda cap: score_mods.SoftCap(5.0), params=np.float32(0.0),
    ),
    "alibi, bfloat16": _at_size(
        1152, 1152, 3, 3, 64, jnp.bfloat16, score=lambda slopes, s, h, q, kv: s - slopes[h] * abs(q - kv),
        mod=score_mods.Alibi, params=ALIBI / 8,
    ),
    "one query, bfloat16": _at_size(1, 4099, 8, 2, 128, jnp.bfloat16, B=2),
}  # fmt: skip


def inputs(case: Case) -> dict[str, np.ndarray]:
    """All differentiated arrays, float32 NumPy, rounded to the case's dtype."""
    B, T, S, N, K, H, D = case.shape
    rng = np.random.default_rng(7)
    arrays = {"query": (B, T, N, H), "key": (B, S, K, H), "value": (B, S, K, D)}
    found = {name: rng.normal(size=shape) for name, shape in arrays.items()}
    found["query"] = found["query"] * case.amplify
    found = {name: x.astype(case.dtype).astype(np.float32) for name, x in found.items()}
    found |= {name: case.options[name] for name in ("bias", "sinks") if name in case.options}
    return found if case.params is None else found | {"params": case.params}


def visible(case: Case) -> np.ndarray:
    """The visible pairs ``[B,N,T,S]``, one at a time; those of a case ``AT_SIZE`` at once."""
    B, T, S, N, *_ = case.shape
    given = case.options
    q_pos = np.broadcast_to(given.get("query_positions", np.arange(T)), (B, T))
    kv_pos = np.broadcast_to(given.get("kv_positions", np.arange(S)), (B, S))
    b, h = np.arange(B)[:, None, None, None], np.arange(N)[:, None, None]
    q, kv = q_pos[:, None, :, None], kv_pos[:, None, None, :]
    if case.at_size:
        seen = np.broadcast_to(case.sees(b, h, q, kv), (B, N, T, S))
    else:
        seen = np.ones((B, N, T, S), bool)
        for i, j, t, s in np.ndindex(B, N, T, S):
            seen[i, j, t, s] = case.sees(i, j, int(q_pos[i, t]), int(kv_pos[i, s]))
    lengths = zip((T, S), ("query_seq_lengths", "key_value_seq_lengths"), strict=True)
    rows, columns = (np.arange(x) < np.reshape(given.get(name, [x] * B), (B, 1)) for x, name in lengths)
    seen = seen & rows[:, None, :, None] & columns[:, None, None, :]
    return seen if callable(given.get("mask", len)) else seen & given["mask"]


def reference(case: Case, given: dict[str, np.ndarray]) -> tuple[tuple[np.ndarray, np.ndarray], dict[str, np.ndarray]]:
    """The formula, computed explicitly in float64: ``out`` and ``lse``, and the gradients of ``loss`` by hand."""
    B, T, S, N, K, H, D = case.shape
    given = {name: x.astype(np.float64) for name, x in given.items()}
    query, key, value = given["query"], *(np.repeat(given[name], N // K, axis=2) for name in ("key", "value"))
    scale, bias = case.options.get("scale", 1 / np.sqrt(H)), given.get("bias", np.zeros(()))
    seen, scores = visible(case), scale * np.einsum("btnh,bsnh->bnts", query, key) + bias
    h, q_idx, kv_idx = np.arange(N)[:, None, None], np.arange(T)[:, None], np.arange(S)[None, :]
    score = lambda params, scores: case.score(params, scores, h, q_idx, kv_idx)
    before = given.get("params"), np.where(seen, scores, 1.0)
    if case.score is not None:
        scores = in_float64(score, *before)
        seen = seen & (scores > -np.inf)
    sinks = given.get("sinks", np.full(N, -np.inf))[None, :, None]
    high = np.maximum(np.max(scores, axis=-1, initial=-np.inf, where=seen), sinks)
    high = np.where(high == -np.inf, 0.0, high)
    exponentials = np.exp(np.where(seen, scores - high[..., None], -np.inf))
    total = exponentials.sum(-1) + np.exp(sinks - high)
    with np.errstate(divide="ignore"):
        lse = high + np.log(total)
    weights = exponentials / np.where(total == 0, 1.0, total)[..., None]
    out = np.einsum("bnts,bsnd->btnd", weights, value)

    of_out, of_lse = (factors(x.shape) for x in (out, lse.swapaxes(1, 2)))
    of_lse = np.where(lse == -np.inf, 0.0, of_lse.swapaxes(1, 2))
    of_weights = np.einsum("btnd,bsnd->bnts", of_out, value)
    mean = (weights * of_weights).sum(-1)
    of_scores = weights * (of_weights - mean[..., None] + of_lse[..., None])
    gradients = {}
    if "sinks" in given:
        gradients["sinks"] = (np.exp(sinks - lse) * (of_lse - mean)).sum((0, 2))
    if case.score is not None:
        pull = lambda of_scores, *before: jax.vjp(score, *before)[1](of_scores)
        gradients["params"], of_scores = in_float64(pull, of_scores, *before)
    if "bias" in given:
        shared = [axis for axis, size in enumerate((1,) * (4 - bias.ndim) + bias.shape) if size == 1]
        gradients["bias"] = of_scores.sum(tuple(shared)).reshape(bias.shape)
    grouped = lambda x: x.reshape(B, S, K, N // K, x.shape[-1]).sum(3)
    gradients["query"] = scale * np.einsum("bnts,bsnh->btnh", of_scores, key)
    gradients["key"] = grouped(scale * np.einsum("bnts,btnh->bsnh", of_scores, query))
    gradients["value"] = grouped(np.einsum("bnts,btnd->bsnd", weights, of_out))
    return (out, lse.swapaxes(1, 2)), gradients


def in_float64(fn: Callable, *arguments: np.ndarray) -> Any:
    with jax.enable_x64(True), jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        return jax.device_get(jax.jit(fn)(*arguments))


def factors(shape: tuple[int, ...]) -> np.ndarray:
    """A different factor for each entry, which float32 holds."""
    return np.random.default_rng(9).normal(size=shape).astype(np.float32).astype(np.float64)


def loss(out: jax.Array, lse: jax.Array) -> jax.Array:
    """A sum of both results, weighted by ``factors``; leaves out the lse of rows that see nothing."""
    weigh = [jnp.asarray(factors(x.shape), jnp.float32) for x in (out, lse)]
    parts = (out, jnp.where(lse == -jnp.inf, 0.0, lse))
    return sum(jnp.sum(x.astype(lse.dtype) * w.astype(lse.dtype)) for x, w in zip(parts, weigh, strict=True))


def run(
    case: Case, implementation: Any, given: dict[str, jax.Array], arrays: list | None = None
) -> tuple[jax.Array, jax.Array]:
    """``out`` and ``lse`` of a case; ``arrays`` stand for those of its options."""
    options = options_of(case, arrays)
    options = {name: value for name, value in options.items() if name not in ("bias", "sinks")}
    if case.mod is not None:
        options["score_mod"] = case.mod(given["params"])
    given = {name: x.astype(case.dtype) if name in ("query", "key", "value") else x for name, x in given.items()}
    given.pop("params", None)
    return jattn.dot_product_attention(**given, **options, implementation=implementation, return_residual=True)


def options_of(case: Case, arrays: list | None) -> dict[str, Any]:
    """The case's options, with ``arrays`` for their arrays."""
    leaves, structure = jax.tree.flatten(dict(case.options))
    rest = iter(arrays_of(case) if arrays is None else arrays)
    return jax.tree.unflatten(structure, [next(rest) if is_array(leaf) else leaf for leaf in leaves])


def arrays_of(case: Case) -> list:
    return [leaf for leaf in jax.tree.leaves(case.options) if is_array(leaf)]


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray)


def values_and_gradients(fn: Callable, given: dict[str, jax.Array]):
    def both(given):
        results = fn(given)
        return loss(*results), results

    (_, results), gradients = jax.value_and_grad(both, has_aux=True)(given)
    return results, gradients


def poisoned(case: Case, value: float) -> dict[str, np.ndarray]:
    """``inputs``, with ``value`` in all keys that nobody sees and in all queries past their length."""
    given, seen = inputs(case), visible(case)
    unseen = ~seen.any((1, 2))
    lengths = np.reshape(case.options.get("query_seq_lengths", [case.shape[1]] * case.shape[0]), (-1, 1))
    blind = np.arange(case.shape[1]) >= lengths
    assert unseen.any() or blind.any()
    given["key"][unseen], given["value"][unseen], given["query"][blind] = value, value, value
    return given


def error(got: Any, expected: Any) -> float:
    """The largest difference divided by the largest finite expected value; infinite for a NaN or a wrong infinity."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    if (
        got.shape != expected.shape
        or not (got[~finite] == expected[~finite]).all()
        or not np.isfinite(got[finite]).all()
    ):
        return np.inf
    return float(np.abs(got[finite] - expected[finite]).max(initial=0.0) / np.abs(expected[finite]).max(initial=1e-3))
