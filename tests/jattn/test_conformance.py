"""Every implementation on every case: values, log-sum-exp and gradients, compared with the formula in float64.

The reference below shares no code with jattn: it loops over pairs in plain Python to find the visible ones and computes
the softmax explicitly. Axis sizes are distinct primes, so that a swapped axis fails.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, score_mods
from jattn.core.dropout import Dropout, dropout_keep, dropout_seeds
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode
from jattn.kernels.dispatch import IMPLEMENTATIONS
from jattn.kernels.native import Native
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash
from tests.jattn.interpreted import Interpreted

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
    """One call. ``sees`` and ``score`` are plain definitions of the mask and score functions in ``options``."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sees: Callable[[int, int, int, int], bool] = lambda b, h, q, kv: True
    score: Callable[..., Any] | None = None  # (params, score, h [N,1,1], q [T,1], kv [1,S]) -> score
    mod: Callable[[Any], Any] | None = None  # params -> score_mod
    params: np.ndarray | None = None  # the score function's arrays
    shape: tuple[int, ...] = (B, T, S, N, K, H, D)
    amplify: float = 1.0  # of the queries
    tolerance: float = 2e-5
    dtype: Any = jnp.float32


@dataclasses.dataclass(frozen=True)
class Variant:
    """An implementation, and how to call it."""

    name: str
    implementation: Any
    traced: bool = False  # positions, lengths and masks as arguments of the jitted function
    sharded: bool = False  # under a mesh, so arrays may be on several devices
    mapped: bool = False  # inside jax.shard_map, with arrays local to each device
    dtype: Any = None  # of all cases, for an implementation without float32; of those IN_KIND

    def __str__(self):
        how = {"traced": self.traced, "on a mesh": self.sharded, "in shard_map": self.mapped}
        return ", ".join([self.name, *(name for name, yes in how.items() if yes)])

    def of(self, case: Case) -> Case:
        """The case in the variant's dtype."""
        if self.dtype is None or case.dtype != jnp.float32:
            return case
        return dataclasses.replace(case, dtype=self.dtype, tolerance=2e-2)

    def in_force(self):
        """A context in which the mesh is set."""
        return jax.set_mesh(DEVICES) if self.sharded else contextlib.nullcontext()


# Lengths are mostly 7 and 11: 7 queries divide evenly, the others do not. Traced variants run the cases with arrays.
VARIANTS = [
    Variant("xla", "xla"),
    Variant("cudnn", "cudnn"),
    Variant("blockwise", Blockwise((3, 4))),
    Variant("blockwise", Blockwise((7, 4)), traced=True, sharded=True),
    Variant("decode", Decode(4)),  # products of all heads at once
    Variant("decode", Decode(4), traced=True, sharded=True),  # products of each head
    Variant("xla", "xla", mapped=True),
    Variant("blockwise", Blockwise((3, 4)), mapped=True),
    Variant("decode", Decode(4), mapped=True),
    Variant("splash", Splash(interpret=True)),
    Variant("splash", Splash(interpret=True), traced=True),
    Variant("splash", Splash(interpret=True), mapped=True),
    Variant("pallas_tpu", PallasTPU(interpret=True)),
    Variant("pallas_tpu", PallasTPU(interpret=True), traced=True),
    Variant("pallas_tpu", PallasTPU(interpret=True), mapped=True),
    Variant("pallas_gpu", Interpreted(), dtype=jnp.bfloat16),
    Variant("native", Native()),  # few queries
    Variant("native", Native(few=0)),
    Variant("native", Native(few=0), traced=True),
    Variant("native", Native(few=0), mapped=True),
]
DEVICES = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.fixture(params=VARIANTS, ids=str)
def variant(request):
    return request.param


def test_every_implementation_has_a_variant():
    assert {variant.name for variant in VARIANTS} == set(IMPLEMENTATIONS)


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
    """The visible pairs ``[B,N,T,S]``, one at a time."""
    B, T, S, N, *_ = case.shape
    given = case.options
    q_pos = np.broadcast_to(given.get("query_positions", np.arange(T)), (B, T))
    kv_pos = np.broadcast_to(given.get("kv_positions", np.arange(S)), (B, S))
    seen = np.ones((B, N, T, S), bool)
    for b, h, t, s in np.ndindex(B, N, T, S):
        seen[b, h, t, s] = case.sees(b, h, int(q_pos[b, t]), int(kv_pos[b, s]))
        seen[b, h, t, s] &= t < given.get("query_seq_lengths", [T] * B)[b]
        seen[b, h, t, s] &= s < given.get("key_value_seq_lengths", [S] * B)[b]
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
    case: Case, variant: Variant, given: dict[str, jax.Array], arrays: list | None = None
) -> tuple[jax.Array, jax.Array]:
    options = options_of(case, arrays)
    options = {name: value for name, value in options.items() if name not in ("bias", "sinks")}
    if case.mod is not None:
        options["score_mod"] = case.mod(given["params"])
    given = {name: x.astype(case.dtype) if name in ("query", "key", "value") else x for name, x in given.items()}
    given.pop("params", None)
    return jattn.dot_product_attention(**given, **options, implementation=variant.implementation, return_residual=True)


def options_of(case: Case, arrays: list | None) -> dict[str, Any]:
    """The case's options, with ``arrays`` for their arrays."""
    leaves, structure = jax.tree.flatten(dict(case.options))
    rest = iter(arrays_of(case) if arrays is None else arrays)
    return jax.tree.unflatten(structure, [next(rest) if is_array(leaf) else leaf for leaf in leaves])


def arrays_of(case: Case) -> list:
    return [leaf for leaf in jax.tree.leaves(case.options) if is_array(leaf)]


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray)


def caller(case: Case, variant: Variant) -> Callable:
    """``given -> results and gradients``, jitted; for a traced variant, with all arrays of the options as arguments."""
    arrays = arrays_of(case) if variant.traced else None

    def both(given, arrays):
        return values_and_gradients(lambda x: run(case, variant, x, arrays), given)

    def on_a_device(given, arrays):
        own = jax.tree.map(lambda x: jax.lax.pcast(x, "devices", to="varying"), (given, arrays))
        return jax.tree.map(lambda x: x[None], both(*own))

    def mapped(given, arrays):
        spec = jax.sharding.PartitionSpec
        each = jax.shard_map(on_a_device, mesh=DEVICES, in_specs=spec(), out_specs=spec("devices"))
        return jax.tree.map(lambda x: x[1], each(given, arrays))

    jitted = jax.jit(mapped if variant.mapped else both)

    def call(given: dict[str, np.ndarray]):
        with variant.in_force():
            return jitted(jax.tree.map(jnp.asarray, given), arrays)

    return call


def values_and_gradients(fn: Callable, given: dict[str, jax.Array]):
    def both(given):
        results = fn(given)
        return loss(*results), results

    (_, results), gradients = jax.value_and_grad(both, has_aux=True)(given)
    return results, gradients


@functools.cache
def expected(name: str, dtype: Any):
    """The reference for one case, computed once for all implementations."""
    case = dataclasses.replace(CASES[name], dtype=dtype)
    return reference(case, inputs(case))


def skip_where_unsupported(case: Case, variant: Variant) -> None:
    """Skips the case with the reason that the implementation gives, instead of letting it raise ``Unsupported``."""
    B, T, S, N, K, H, D = case.shape
    q, k, v = (jax.ShapeDtypeStruct(shape, case.dtype) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, D)))
    mod = {} if case.mod is None else {"score_mod": case.mod(jnp.asarray(case.params))}  # it is differentiated
    texts = []

    def ask(arrays):
        options = options_of(case, arrays)
        texts.append(jattn.explain(q, k, v, **options, **mod, implementation=variant.implementation))

    jax.eval_shape(ask, arrays_of(case)) if variant.traced else ask(None)
    text = texts[0]
    if variant.name == "cudnn" and jax.default_backend() != "gpu":
        pytest.skip("cudnn: it needs an NVIDIA GPU")
    if "but " in text.splitlines()[0]:
        pytest.skip(text.splitlines()[0])


def has_arrays(case: Case) -> bool:
    return any(map(is_array, jax.tree.leaves(case.options)))


# Cases that differ in blocks, tables, groups or the kind of numbers.
IN_KIND = {
    "grouped, with per-head bias and mask", "positions that differ by row", "both lengths and causal",
    "mask function of all four indices", "score function that captures a table, int times float",
    "score function with an infinite derivative where masked", "sinks, and rows that see nothing", "logits of +-1e4",
    "no keys, causal", "bfloat16, causal", "mask class of one's own, with an interval",
}  # fmt: skip

# The cases that are not slow, by variant: each kind of case for the implementations that need no compiler, and with the
# others where it is most likely to fail; the dense formula and tests/jattn/test_masks.py cover what the rest add.
FAST = {
    "xla": IN_KIND - {
        "positions that differ by row", "both lengths and causal", "score function that captures a table, int times float",
        "score function with an infinite derivative where masked",
    } | {
        "one key", "positions up to 2**30", "key lengths, one of them 0", "mask Causal | Prefix", "mask Padding", "mask Dense",
        "mask SlidingWindow & ~Prefix: rows that see nothing", "every row sees nothing",
        "mask function and causal and lengths", "soft cap, its cap learned", "alibi, then a soft cap, causal",
        "no queries", "no keys", "no sequences",
    },
    "cudnn": set(CASES),  # skipped where there is no GPU
    "blockwise": {"logits of +-1e4", "no keys, causal"},
    "blockwise, traced, on a mesh": {"both lengths and causal"},
    "decode": {"mask function of all four indices", "no keys, causal"},
    "decode, traced, on a mesh": {"grouped, with per-head bias and mask"},
    "splash": IN_KIND - {
        "both lengths and causal", "sinks, and rows that see nothing", "logits of +-1e4", "bfloat16, causal"
    },
    "splash, traced": {
        "grouped, with per-head bias and mask", "positions that differ by row",
        "score function with an infinite derivative where masked",
    },
    "pallas_tpu": {"bfloat16, causal"},
    "native": IN_KIND,
    "native, traced": IN_KIND,
}  # fmt: skip


def pairs():
    for variant in VARIANTS:
        for name, case in CASES.items():
            if variant.dtype is not None and name not in IN_KIND:
                continue
            if has_arrays(case) if variant.traced else variant.name != "decode" or not has_arrays(case):
                yield param(variant, name, fast=name in FAST.get(str(variant), ()))


def param(*values: Any, fast: bool):
    return pytest.param(*values, marks=[] if fast else [pytest.mark.slow])


@pytest.mark.parametrize("variant, name", list(pairs()), indirect=["variant"], ids=str)
def test_values_lse_and_gradients(variant, name):
    case = variant.of(CASES[name])
    skip_where_unsupported(case, variant)
    (out, lse), gradients = caller(case, variant)(inputs(case))
    (exact_out, exact_lse), exact_gradients = expected(name, case.dtype)
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    compare(out, exact_out, case.tolerance, "out")
    compare(lse, exact_lse, case.tolerance, "lse")
    for argument, gradient in gradients.items():
        compare(gradient, exact_gradients[argument], case.tolerance * (8 if case.dtype != jnp.float32 else 2), argument)


def compare(got: Any, expected: Any, tolerance: float, what: str) -> None:
    """Asserts equality up to ``tolerance`` times the largest finite expected number, equal infinities, and no NaN."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape
    assert not np.isnan(got).any(), f"NaN in {what}"
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(got[~finite], expected[~finite], err_msg=what)
    scale = np.abs(expected[finite]).max(initial=1e-3)
    np.testing.assert_allclose(got[finite] / scale, expected[finite] / scale, rtol=0, atol=tolerance, err_msg=what)


POISONED = {
    "key lengths": Case({"key_value_seq_lengths": np.array([4, 0])}, lambda b, h, q, kv: kv < (4, 0)[b]),
    "mask array": Case({"mask": np.arange(S)[None, :] % 3 != 1}, lambda b, h, q, kv: kv % 3 != 1),
    "mask function": Case({"mask": lambda b, h, q, kv: kv >= 5}, lambda b, h, q, kv: kv >= 5),
    "causal": Case({"is_causal": True}, lambda b, h, q, kv: kv < T),
    "query lengths": Case({"query_seq_lengths": np.array([3, 7])}),
}


def poisoned_pairs():
    """Those that compile in less than a second are fast, and one case of each other implementation."""
    for variant in VARIANTS:
        plain = not (variant.traced or variant.mapped or variant.dtype)
        for name in POISONED:
            fast = variant.name in ("xla", "cudnn", "native") or (plain and name == "key lengths")
            yield param(variant, name, fast=fast)


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # NumPy's, in an interpreted kernel
@pytest.mark.parametrize("variant, name", list(poisoned_pairs()), indirect=["variant"], ids=str)
def test_what_nobody_sees_may_hold_anything(variant, name):
    """NaN or Inf instead of zeros in unseen slots and in queries that see nothing changes no bit of the results."""
    case = variant.of(POISONED[name])
    skip_where_unsupported(case, variant)
    given = inputs(case)
    unseen = ~np.array([[case.sees(b, 0, 0, s) for s in range(S)] for b in range(B)])
    blind = np.array([[t >= case.options.get("query_seq_lengths", [T] * B)[b] for t in range(T)] for b in range(B)])

    def filled(value):
        filled = {name: given[name].copy() for name in given}
        filled["key"][unseen], filled["value"][unseen], filled["query"][blind] = value, value, value
        return filled

    run_it = caller(case, variant)
    assert unseen.any() or blind.any()
    clean = jax.tree.leaves(run_it(filled(0.0)))
    for poison in (np.nan, np.inf):
        for got, wanted in zip(jax.tree.leaves(run_it(filled(poison))), clean, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("argument", ["key", "value"])
def test_visible_nan_shows_in_every_row_that_sees_it(variant, argument):
    case = variant.of(Case({"is_causal": True}))
    skip_where_unsupported(case, variant)
    given = inputs(case)
    given[argument][0, 4] = np.nan
    out, _ = jax.jit(functools.partial(run, case, variant))(given)
    assert np.isnan(out[0, 4:]).all()
    assert np.isfinite(out[1]).all()


@jax.jit
def kept_and_weights(q, k):
    """The entries ``[B,N,T,S]`` that dropout keeps, one head at a time, and the weights without it."""
    dropout, where = Dropout(jax.random.key(3), 0.4), (jnp.arange(T)[:, None], jnp.arange(S)[None, :])
    keep = lambda b, h: dropout_keep(dropout_seeds(dropout, b, h), 0.4, *where)
    return jnp.stack([jnp.stack([keep(b, h) for h in range(N)]) for b in range(B)]), jattn.attention_weights(q, k)


@pytest.mark.parametrize(
    "variant", [param(variant, fast=not variant.traced) for variant in VARIANTS], indirect=True, ids=str
)
def test_dropout_keeps_what_the_key_and_the_indices_say(variant):
    """With ``value = identity``, the output equals the weights after dropout, which shows the kept entries."""
    case = Case(shape=(B, T, S, N, N, H, S))
    q, k = (jnp.asarray(x) for x in (inputs(case)["query"], inputs(case)["key"]))
    v = jnp.asarray(np.broadcast_to(np.eye(S, dtype=np.float32)[:, None], (B, S, N, S)))
    options = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(3), "implementation": variant.implementation}
    skip_where_unsupported(
        dataclasses.replace(case, options={"dropout_rate": 0.4, "dropout_rng": jax.random.key(3)}), variant
    )
    dropped = np.asarray(jattn.dot_product_attention(q, k, v, **options).transpose(0, 2, 1, 3))
    kept, weights = kept_and_weights(q, k)
    compare(dropped, np.where(kept, weights / 0.6, 0.0), 1e-6, "weights after dropout")
    # half of the keys, at their own positions, keep the same entries
    half = jattn.dot_product_attention(
        q, k[:, 5:], v[:, 5:], **options, kv_positions=np.arange(5, S), return_residual=True
    )[0].transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(half[..., 5:] != 0, dropped[..., 5:] != 0)
    # one pattern for all heads and sequences
    shared = jattn.dot_product_attention(q, k, v, **options, broadcast_dropout=True).transpose(0, 2, 1, 3) != 0
    np.testing.assert_array_equal(shared, np.broadcast_to(shared[:1, :1], shared.shape))
    assert 0.5 < shared.mean() < 0.7


def test_the_cases_in_kind_are_cases():
    assert set(CASES) >= IN_KIND


def test_the_table_is_not_a_dummy():
    """The comparison detects a wrong mask, a wrong score and a wrong gradient in one entry."""
    case = CASES["causal, top-left"]
    (out, lse), gradients = caller(case, Variant("xla", "xla"))(inputs(case))
    (wrong, wrong_lse), _ = reference(dataclasses.replace(case, sees=lambda b, h, q, kv: kv < q + 2), inputs(case))
    for got, expected in (
        (out, wrong),
        (lse, wrong_lse),
        (gradients["query"], gradients["query"].at[0, 0, 0, 0].add(1)),
    ):
        with pytest.raises(AssertionError):
            compare(got, expected, case.tolerance, "planted")
