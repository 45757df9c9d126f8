"""The C++ kernels beyond the conformance table: lengths of many tiles, each width of vectors, and as users run them."""

import dataclasses
import functools
import itertools
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, score_mods
from jattn._core.arguments import make_call
from jattn._core.call import Stack
from jattn.api import attend_in_stack
from jattn.kernels import native
from jattn.kernels.dense import Dense
from jattn.kernels.native import Native

pytestmark = [pytest.mark.skipif(not native._is_installed(), reason="jattn-native is not installed"), pytest.mark.filterwarnings("error")]  # fmt: skip
attend = jattn.dot_product_attention

B, T, N, K, H, D = 2, 300, 4, 2, 32, 48  # a task has 256 queries, a block 64 keys
IDS = np.sort(np.random.default_rng(1).integers(0, 5, (B, T)), 1)
RNG = np.random.default_rng(2)
TABLE = RNG.normal(size=(32, N)).astype(np.float32)
PARTLY_NOWHERE = np.where(np.arange(T) % 7 == 0, -(2**31), np.arange(T))  # as people mark what has no position
ROLLED = np.stack([np.roll(np.arange(T), 77) - 5, np.arange(T)[::-1]])  # slots of a rolling cache, the first five empty


@jattn.pytree_dataclass
class WindowOfHead(masks.Mask):
    """A mask of a user's own, with an interval for each head and sequence."""

    lengths: Any

    def __call__(self, b, h, q_idx, kv_idx):
        return (kv_idx <= q_idx + b) & (kv_idx > q_idx - jnp.asarray(self.lengths)[h])

    def interval(self, b, h, q_idx):
        return q_idx + 1 - jnp.asarray(self.lengths)[h], q_idx + b


OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (70, 3)},
    "no rows": {"mask": masks.Causal() & masks.SlidingWindow(-1, -280)},
    "lengths": {"query_seq_lengths": np.array([3, 290]), "key_value_seq_lengths": np.array([200, 0])},
    "prefix": {"mask": masks.Causal() | masks.Prefix(90)},
    "packed": {"mask": masks.Segments(IDS) & masks.Causal()},
    "segments in no order": {"mask": masks.Segments(IDS[:, ::7].repeat(7, 1)[:, :T], IDS)},
    "far positions": {"local_window_size": (2**31 - 2, 1), "query_positions": np.arange(T) + 2**31 - 1 - T},
    "unbounded": {"mask": masks.SlidingWindow(2**31 - 1, 2**31 - 1), "query_positions": np.arange(T) - 2**31},
    "the least position": {"mask": masks.Causal() & masks.SlidingWindow(200), "query_positions": PARTLY_NOWHERE,
        "kv_positions": PARTLY_NOWHERE},
    "soft cap": {"score_mod": score_mods.SoftCap(5.0), "is_causal": True, "scale": 0.7},
    "alibi": {"score_mod": score_mods.Alibi(score_mods.alibi_slopes(N)), "query_positions": np.arange(T)[::-1]},
    "far alibi": {"score_mod": score_mods.Alibi(2.0**-31 * np.arange(1, N + 1, dtype=np.float32)),
        "query_positions": np.arange(T) - 2**31 + 5},
    "a window of each head": {"mask": WindowOfHead(np.array([1, 40, 100, 500])) & masks.Segments(IDS)},
    "relative bias": {"score_mod": score_mods.RelativeBias(TABLE), "is_causal": True},
    "one-sided, by positions in no order": {"score_mod": score_mods.RelativeBias(TABLE, bidirectional=False, max_distance=100),
        "query_positions": RNG.permutation(T),
        "kv_positions": ROLLED},
    "relative bias, far positions": {"score_mod": score_mods.RelativeBias(TABLE),
        "query_positions": np.arange(T) + 2**31 - 1 - T,
        "kv_positions": np.arange(T) - 2**31},
    "rolling": {"local_window_size": (200, 0), "kv_positions": ROLLED, "key_value_seq_lengths": np.array([T, 250])},
    "rolling alibi": {"score_mod": score_mods.Alibi(score_mods.alibi_slopes(N)),
        "is_causal": True,
        "query_positions": np.arange(T) + 2,
        "kv_positions": ROLLED},
    "packed, keys beyond the table": {"mask": masks.Segments(IDS) & masks.Causal(), "kv_positions": ROLLED * 2},
    "keys at the ends of int32": {"mask": masks.SlidingWindow(2**31 - 1, 2**31 - 1) & masks.Padding(np.array([2**31 - 1])),
        "kv_positions": np.where(np.arange(T) % 7 == 0, -(2**31), np.where(np.arange(T) % 7 == 1, 2**31 - 1, ROLLED))},
    "dropout": {"dropout_rate": 0.3, "dropout_rng": jax.random.key(5), "is_causal": True, "kv_positions": ROLLED},
    "dropout, all of it": {"dropout_rate": 1.0, "dropout_rng": jax.random.key(5), "broadcast_dropout": True},
    "capped bias": {"bias": np.where(RNG.random((B, 1, T, T)) < 0.2, -np.inf, RNG.normal(size=(B, 1, T, T))).astype(np.float32),
        "score_mod": score_mods.SoftCap(2.0)},
    "rows of -inf, and of the least float": {
        "bias": np.where(np.arange(T) % 9 == 0, -np.inf, np.where(np.arange(T) % 9 == 1, -3.4028235e38, 1)).astype(np.float32)[:, None]
        .repeat(T, 1)},
}  # fmt: skip
AXES = ["".join(axes) for axes in itertools.product("B1", "N1", "T1", "S1")]


def pair_options(axes, queries=T, keys=T):
    """A bias of some axes, a mask array of the others, and other masks. The mask has empty, full and mixed blocks."""
    full = B, N, queries, keys
    shape = [1 if axis == "1" else size for axis, size in zip(axes, full, strict=True)]
    of_mask = [1 if axis != "1" else size for axis, size in zip(axes, full, strict=True)]
    b, h, q, kv = np.indices(of_mask)
    block = (b + h + q * 4 // queries + kv // 70) % 4
    lengths = np.array([keys - keys // 5, keys // 3])
    return {
        "bias": RNG.normal(size=shape).astype(np.float32),
        "mask": np.where(block == 3, RNG.random(of_mask) < 0.5, block > 0),
        "local_window_size": (keys, 3),
        "key_value_seq_lengths": lengths,
    }


@functools.partial(jax.jit, static_argnums=(1, 2), static_argnames=("dtype",))
def arrays(key, queries=T, keys=T, dtype=jnp.float32):
    shapes = (B, queries, N, H), (B, keys, K, H), (B, keys, K, D)
    return [jax.random.normal(one, shape, dtype) for one, shape in zip(jax.random.split(key, 3), shapes, strict=True)]


def values_and_gradients(implementation, options, qkv):
    """Output, log-sum-exp, and the gradients of a loss that takes both."""
    return of_each([implementation], options, qkv)[0]


def of_each(implementations, options, qkv):
    """``values_and_gradients`` of several, in one program."""

    def loss(implementation, *qkv):
        out, lse = attend(*qkv, **options, return_residual=True, implementation=implementation)
        seen = lse > -1e30
        total = jnp.sin(out.astype(jnp.float32)).sum() + jnp.where(seen, jnp.where(seen, lse, 0.0) ** 2, 0.0).sum()
        return total, (out, lse)

    both = jax.value_and_grad(loss, (1, 2, 3), has_aux=True)
    return jax.jit(lambda *qkv: [both(implementation, *qkv) for implementation in implementations])(*qkv)


def compare(got, wanted, tolerance=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert not np.isnan(x).any()
        finite = np.isfinite(y)
        np.testing.assert_array_equal(x[~finite], y[~finite])
        np.testing.assert_allclose(x[finite], y[finite], rtol=0, atol=tolerance * max(abs(y[finite]).max(initial=0), 1))


def widths():
    return [width for width in (4, 8, 16) if width <= native._library().widest()]


def check_every_width(options, qkv):
    wanted, *found = of_each(["xla", *map(Native, widths())], options, qkv)
    for one in found:
        compare(one, wanted)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.slow_except("full", "window", "no rows", "a window of each head", "rows of -inf, and of the least float")  # fmt: skip
def test_every_width_is_the_dense_formula(name, getkey):
    check_every_width(OPTIONS[name], arrays(getkey()))


@pytest.mark.parametrize("queries", [T, 5])
@pytest.mark.parametrize("axes", AXES)
@pytest.mark.slow_except("1NT1-300", "B11S-5")
def test_arrays_of_each_broadcast_shape(axes, queries, getkey):
    check_every_width(pair_options(axes, queries), arrays(getkey(), queries))


@pytest.mark.parametrize("queries", [T, 5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
@pytest.mark.slow_except("bfloat16-5")
def test_biases_of_other_dtypes(dtype, queries, getkey):
    qkv, bias = arrays(getkey(), queries), pair_options("BNTS", queries)["bias"]
    with jax.enable_x64(dtype == "float64"):
        given = jnp.asarray(bias, dtype)
        wanted = of_each(["xla"], {"bias": given.astype(jnp.float32)}, qkv)
        for one in of_each(list(map(Native, widths())), {"bias": given}, qkv):
            compare(one, wanted[0])


def ids_of(kind):
    """Ids that equal others if some of their bits are dropped."""
    wide = jnp.asarray(IDS.astype(np.int64))
    return {
        "64 bits": (wide << 32, None),
        "unsigned": (wide.astype(jnp.uint64) << 63, None),
        "of two types": ((wide + 2**31).astype(jnp.uint32), wide - 2**31),  # no two are equal
    }[kind]


@pytest.mark.parametrize("few", [0, pytest.param(T + 1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["64 bits", *(pytest.param(x, marks=pytest.mark.slow) for x in ("unsigned", "of two types"))])  # fmt: skip
def test_ids_of_64_bits(kind, few, getkey):
    qkv = arrays(getkey())
    with jax.enable_x64(True):
        mask = masks.Segments(*ids_of(kind))
        got = jax.jit(lambda mask: attend(*qkv, mask=mask, implementation=Native(few=few)))(mask)
        compare(got, attend(*qkv, mask=mask, implementation="xla"))


@pytest.mark.parametrize("queries", [5, pytest.param(T, marks=pytest.mark.slow)])
def test_gradients_at_large_scores(queries, getkey):
    """The weights that the backward pass computes again add up to 1, although scores are rounded to units and more."""
    query, key, value = arrays(getkey(), queries, 70)
    equal = np.ones(query.shape, np.float32), np.full(key.shape, 1e8 / H, np.float32)

    def total(value, qk, width):
        return attend(*qk, value, scale=1.0, implementation=Native(width)).sum()

    @jax.jit
    def every_width(query, key, value):
        of_all = [jax.grad(total)(value, qk, width).sum((1, 2)) for width in widths() for qk in ((1e4 * query, 1e4 * key), equal)]  # fmt: skip
        return of_all, jax.jvp(lambda v: total(v, equal, None), (value,), (jnp.ones_like(value),))[1]

    of_all, tangent = every_width(query, key, value)
    for found in of_all:
        np.testing.assert_allclose(found, N * queries, rtol=1e-5)
    np.testing.assert_allclose(tangent, B * queries * N * D, rtol=1e-5)


@pytest.mark.parametrize("queries", [1, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("options", [
    {},
    {"score_mod": score_mods.SoftCap(5.0)},
    {"is_causal": True, "kv_positions": np.stack([np.roll(np.arange(2500), 999), np.arange(2500) * 2 - 100])},
    *(pytest.param(options, marks=pytest.mark.slow)
        for options in ({"local_window_size": (1100, 0)},
            {"score_mod": score_mods.RelativeBias(TABLE, max_distance=3000)},
            {"dropout_rate": 0.5, "dropout_rng": jax.random.key(2), "kv_positions": np.arange(2500)[::-1]},
            {"mask": WindowOfHead(np.array([1, 40, 1000, 3000]))})),
    {"mask": np.arange(2500) // 100 % 2 == np.array([0, 1])[:, None, None, None], "bias": RNG.normal(size=2500)},
])  # fmt: skip
def test_few_queries(queries, options, getkey):
    """More than one part of the keys, the last of which is not whole, and an empty one."""
    options = {"query_positions": np.arange(queries) + 2300} | options
    options |= {"mask": masks.Padding(np.array([2300, 700]))} if isinstance(options.get("score_mod"), score_mods.SoftCap) else {}  # fmt: skip
    check_every_width(options, arrays(getkey(), queries, 2500))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("queries", [pytest.param(1, marks=pytest.mark.slow), T])
def test_16_bits_are_summed_in_float32(queries, dtype, getkey):
    qkv = arrays(getkey(), queries, dtype=dtype)
    got = values_and_gradients("native", {}, qkv)
    assert got[0][1][0].dtype == dtype and all(x.dtype == dtype for x in got[1])
    wanted = values_and_gradients("xla", {}, [x.astype(jnp.float32) for x in qkv])
    compare(got[0][1][1], wanted[0][1][1])  # the lse is not rounded
    compare(got, wanted, 2e-2)


def errors(got, exact):
    """Root mean squares of the differences, in shares of the exact numbers'."""
    pairs = [[np.asarray(x, np.float64) for x in pair] for pair in zip(got, exact, strict=True)]
    return [np.sqrt(((x - y) ** 2).mean() / max((y**2).mean(), 1e-30)) for x, y in pairs]


@pytest.mark.slow_except("window", "packed", "dropout")
@pytest.mark.parametrize("name", OPTIONS)
def test_products_of_bfloat16(name, getkey):
    """On a CPU that has them, hardly further from the formula in float32 than the dense one in bfloat16, with gradients."""
    qkv, options = arrays(getkey(), dtype=jnp.bfloat16), OPTIONS[name]
    gradients = lambda implementation, qkv, **more: values_and_gradients(implementation, options | more, qkv)
    (_, (_, lse)), exact = gradients("xla", [x.astype(jnp.float32) for x in qkv])
    (_, (_, same)), got = gradients("native", qkv)
    np.testing.assert_allclose(
        np.asarray(same), np.asarray(lse), rtol=0, atol=2e-5 * max(1, abs(lse[lse > -1e30]).max(initial=0))
    )
    assert all(
        x <= 1.5 * y + 1e-4 for x, y in zip(errors(got, exact), errors(gradients("xla", qkv)[1], exact), strict=True)
    )
    highest = errors(gradients("native", qkv, precision="highest")[1], exact)
    assert max(highest) < 2e-3, "one rounding"


@pytest.mark.slow_except("few-8.0-True", "full-8.0-False", "alibi-8.0-False")
@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("shift", [0.0, 8.0])
@pytest.mark.parametrize("name", ["full", "few", "alibi", "soft cap", "relative bias"])
def test_what_keys_have_in_common_moves_no_gradient(name, shift, part, getkey):
    """Of what is lost where factors are rounded, too; of a part of the keys, whose query is in float32, nothing is."""
    q, k, v = arrays(getkey(), 12 if name == "few" else T, dtype=jnp.bfloat16)
    k += shift * jax.random.normal(getkey(), (1, 1, K, H), jnp.bfloat16)

    def loss(implementation, q, k, v):
        call = make_call(q, k, v, **OPTIONS.get(name, {}))
        if part:
            call = dataclasses.replace(call, query=call.query.astype(jnp.float32))
        return jnp.sin(implementation.run(call)[0].astype(jnp.float32)).sum()

    gradients = lambda implementation: jax.jit(jax.grad(functools.partial(loss, implementation), (0, 1, 2)))
    exact = gradients(Dense())(*(x.astype(jnp.float32) for x in (q, k, v)))
    assert max(errors(gradients(Native())(q, k, v), exact)) < (2.5e-3 if part else 4e-3)


def test_explain_says_how_bfloat16_is_multiplied():
    x = jax.ShapeDtypeStruct((1, T, 2, 16), jnp.bfloat16)
    products = lambda **options: jattn.explain(x, x, x, implementation=Native(**options)).splitlines()[1]
    by_default = "bfloat16" if native._library().has_bfloat16_products() else "float32"
    assert products() == f"native multiplies in {by_default} and adds up in float32"
    assert products(few=T + 1) == "native multiplies in float32 and adds up in float32"
    capped = jattn.explain(x, x, x, implementation="native", score_mod=score_mods.SoftCap(5.0))
    assert "native multiplies in float32" in capped


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("queries", [2, 20])
def test_every_number_of_16_bits_is_read(queries, dtype):
    """The output of queries that see one key is its value."""
    value = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(16, 1, 16, 256)
    with np.errstate(invalid="ignore"):
        exact = value.astype(np.float32)
    # XLA takes numbers below the least ordinary one for 0.
    value = np.where(np.isfinite(exact) & (np.abs(exact) >= np.finfo(np.float32).tiny), value, np.zeros((), dtype))
    query, key = (jnp.zeros((16, n, 16, 1), dtype) for n in (queries, 1))
    for width in widths():
        out = attend(query, key, jnp.asarray(value), implementation=Native(width))
        np.testing.assert_array_equal(out, value.repeat(queries, 1), strict=True)


@pytest.mark.parametrize("queries", [4, pytest.param(T, marks=pytest.mark.slow)])
def test_what_nobody_sees_may_be_nan(queries, getkey):
    """Keys past the end, between segments, and queries that see nothing."""
    clean = arrays(getkey(), queries)
    ids = np.arange(T)[None] // 40
    ids = np.where(np.arange(T) % 40 > 30, -1 - np.arange(T), ids).repeat(B, 0)  # the last ten of forty are alone
    query_ids = np.where(ids[:, :queries] < 0, -1000, ids[:, :queries])
    options = {"mask": masks.Segments(query_ids, ids), "key_value_seq_lengths": np.array([250, T])}
    dead = ((ids < 0) | (np.arange(T) >= np.array([[250], [T]])))[..., None, None]
    blind = dead[:, :queries] & (query_ids < 0)[..., None, None]
    poisoned = [np.where(unseen, np.float32(np.nan), x) for unseen, x in zip((blind, dead, dead), clean, strict=True)]
    compare(values_and_gradients("native", options, poisoned), values_and_gradients("xla", options, clean))


@pytest.mark.parametrize("queries", [4, pytest.param(T, marks=pytest.mark.slow)])
@pytest.mark.parametrize("by", ["mask array", pytest.param("positions", marks=pytest.mark.slow)])
def test_what_an_array_hides_may_be_nan(by, queries, getkey):
    """Keys that a mask array or their positions hide, with a bias and dropout, too."""
    clean, hidden = arrays(getkey(), queries), np.arange(T) // 10 % 3 == 0
    options = {"mask": ~hidden & (np.arange(T) < 2 * np.arange(queries)[:, None] + 20)}
    if by == "positions":
        options = {"mask": masks.Prefix(T), "kv_positions": np.where(hidden, T, np.arange(T))}
    options |= {"bias": pair_options("1NTS", queries)["bias"], "dropout_rate": 0.2, "dropout_rng": jax.random.key(1)}
    poisoned = [clean[0], *(jnp.where(jnp.asarray(hidden)[:, None, None], jnp.nan, x) for x in clean[1:])]
    wanted = values_and_gradients("xla", options, clean)
    for width in widths():
        compare(values_and_gradients(Native(width), options, poisoned), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("queries", [4, T])
def test_gradients_of_other_arrays(queries, getkey):
    """Of a bias and of a table of relative biases, beside those of query, key and value."""
    qkv = arrays(getkey(), queries)
    bias = jnp.asarray(pair_options("BN1S", queries)["bias"])

    def loss(implementation, qkv, bias, table):
        mod = score_mods.RelativeBias(table, max_distance=50)
        options = {"bias": bias, "score_mod": mod, "is_causal": True, "implementation": implementation}
        out, lse = attend(*qkv, **options, return_residual=True)
        return jnp.sin(out).sum() + jnp.sin(lse).sum()

    gradients = jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)
    compare(gradients("native", qkv, bias, TABLE), gradients("xla", qkv, bias, TABLE))


def test_nan_that_is_seen_stays():
    ones = np.ones((1, 130, 1, 16), np.float32)
    x = ones.copy()
    x[0, 70] = np.nan
    out = jax.jit(lambda ones, x: attend(ones, x, x, is_causal=True, implementation="native"))(ones, x)
    assert np.isnan(np.asarray(out)[0, 70:]).all()
    assert np.isnan(jax.jit(lambda ones, x: attend(ones, x, x, implementation="native"))(ones[:, :1], x)).all()


@pytest.mark.slow
def test_gradients_in_parts(getkey):
    """A long sequence with a single key head: parts of the queries have sums of their own."""
    shapes = (1, 3000, 2, 16), (1, 3000, 1, 16), (1, 3000, 1, 16)
    qkv = [jax.random.normal(getkey(), shape) for shape in shapes]
    options = {"is_causal": True}
    compare(values_and_gradients("native", options, qkv), values_and_gradients("blockwise", options, qkv), 5e-5)


def test_equal_calls_have_equal_bits(getkey):
    qkv = arrays(getkey())
    first = values_and_gradients("native", {}, qkv)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, values_and_gradients("native", {}, qkv), first)


@pytest.mark.slow
def test_under_transformations(getkey):
    qkv = arrays(getkey(), 20, 33)
    many = [jnp.stack([x, 2 * x, -x]) for x in qkv]

    def loss(cap, implementation, *qkv):
        mod = score_mods.SoftCap(cap)
        return jnp.sin(attend(*qkv, score_mod=mod, implementation=implementation)).sum()

    def forward_over_reverse(implementation):
        of = functools.partial(loss, 3.0, implementation)
        return jax.jvp(jax.grad(lambda q: of(q, *qkv[1:])), (qkv[0],), (jnp.ones_like(qkv[0]),))

    def of_another_array(implementation):
        return jax.grad(loss)(jnp.float32(3.0), implementation, *qkv)

    def mapped(queries, implementation):
        one = functools.partial(attend, implementation=implementation)
        return jax.vmap(one, (0, None, 0))(many[0][:, :, :queries], qkv[1], many[2])

    def rematerialised(implementation):
        of = functools.partial(loss, 3.0, implementation)
        if implementation == "native":
            of = jax.checkpoint(of, policy=jax.checkpoint_policies.dots_saveable)
        return jax.grad(of)(*qkv)

    for fn in (forward_over_reverse, of_another_array, functools.partial(mapped, 20), functools.partial(mapped, 4), rematerialised):  # fmt: skip
        compare(*(jax.jit(functools.partial(fn, name))() for name in ("native", "xla")))


V = 5


@pytest.mark.parametrize("layers, sequences", [(2, 2), (4, 2), (3, 1)])
def test_a_batch_of_layers_in_their_stacks(layers, sequences, getkey):
    """The first axis of a stack is no sequence."""
    shapes = (V, sequences, 1, N, 16), (V, layers, sequences, 200, K, 16), (V, layers, sequences, 200, K, 16)
    query, keys, values = (jax.random.normal(getkey(), shape) for shape in shapes)

    def one(implementation, query, keys, values):
        return attend_in_stack(query, keys[1], values[1], Stack(keys, values, 1), implementation=implementation)[0]

    of = lambda implementation: jax.jit(jax.vmap(functools.partial(one, implementation)))(query, keys, values)
    compare(of("native"), of("xla"))


def test_a_batch_copies_no_shared_bias(getkey):
    query = jax.random.normal(getkey(), (8, B, 256, N, 16))
    bias = jnp.zeros((B, N, 256, 256))
    fn = jax.vmap(lambda q: attend(q, q, q, bias, implementation="native"))
    assert jax.jit(fn).lower(query).compile().memory_analysis().temp_size_in_bytes < 2 * bias.nbytes


BATCHED = [
    "nothing", "lengths", "ids of each", "ids of all", "a bias of each", "a bias of all", "queries alone", "a scale of each",
    "few", "an example without batch",
]  # fmt: skip


@pytest.mark.slow_except("ids of each", "a bias of all", "a scale of each")
@pytest.mark.parametrize("name", BATCHED)
def test_a_batch_of_calls_is_one(name, getkey):
    """``jax.vmap`` makes a call of more sequences, unless they share keys, or have scales of their own."""
    shapes = (V, B, 70, N, 16), (V, B, 70, K, 16), (V, B, 70, K, 16)
    qkv = [jax.random.normal(getkey(), shape) for shape in shapes]
    more = {"lengths": RNG.integers(1, 70, (V, B)), "a scale of each": np.linspace(0.1, 1, V, dtype=np.float32)}
    more |= dict.fromkeys(("ids of each", "ids of all"), np.sort(RNG.integers(0, 4, (V, B, 70)), -1))
    more |= {"a bias of each": RNG.normal(size=(V, B, N, 70, 70)).astype(np.float32)}
    more |= {"a bias of all": RNG.normal(size=(V, 1, N, 70, 70)).astype(np.float32)}
    option = jnp.asarray(more.get(name, np.zeros(V)))
    axes = [0, None, None, 0] if name == "queries alone" else [0, 0, 0, None if name.endswith("of all") else 0]
    operands = [x if axis == 0 else x[0] for x, axis in zip((*qkv, option), axes, strict=True)]

    def loss(implementation, q, k, v, option):
        if name == "few":
            q = q[:, :3]
        if name == "an example without batch":
            q, k, v = q[0], k[0], v[0]
        options = {}
        if "bias" in name:
            options = {"bias": option}
        elif "ids" in name:
            options = {"mask": masks.Segments(option) & masks.Causal()}
        elif name == "lengths":
            options = {"key_value_seq_lengths": option}
        elif "scale" in name:
            options = {"scale": option}
        return jnp.sin(attend(q, k, v, **options, implementation=implementation)).sum()

    of = lambda name: jax.jit(jax.vmap(jax.value_and_grad(functools.partial(loss, name), (0, 1, 2)), axes))
    program = of("native").lower(*operands).compile()
    compare(program(*operands), of("xla")(*operands), 5e-5)
    alone = name in ("queries alone", "a scale of each")
    assert (" while(" in program.as_text()) == alone and (alone or program.as_text().count("custom-call(") <= 2)


@pytest.mark.slow
def test_calls_at_the_same_time(getkey):
    """Of several threads, and of one program that computes independent calls: none waits for another's tasks."""
    qkv = arrays(getkey())

    @jax.jit
    def many(*qkv):
        def total(scale, *qkv):
            return attend(scale * qkv[0], *qkv[1:], implementation="native").sum()

        return [jax.value_and_grad(total, (1, 2, 3))(scale, *qkv) for scale in range(1, 9)]

    wanted = many(*qkv)
    with ThreadPoolExecutor(8) as pool:
        for got in pool.map(lambda _: many(*qkv), range(24)):
            jax.tree.map(np.testing.assert_array_equal, got, wanted)


@pytest.mark.slow
def test_in_a_scan(getkey):
    qkv = arrays(getkey(), 20, 33)

    def loss(implementation, *qkv):
        def layer(query, scale):
            out = attend(query, scale * qkv[1], qkv[2], implementation=implementation)
            return out[..., :H], out.sum()

        return jax.lax.scan(jax.checkpoint(layer), qkv[0], jnp.arange(1.0, 4.0))[1].sum()

    compare(*(jax.grad(functools.partial(loss, name), (0, 1, 2))(*qkv) for name in ("native", "xla")))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [("batch", None, "heads"), pytest.param((), marks=pytest.mark.slow)])
def test_on_a_mesh_of_explicit_axes(spec, getkey):
    """Each device computes its part, or all where the types name no axes."""
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    qkv = arrays(getkey())
    options = {"mask": masks.Segments(IDS) & masks.Causal(), "score_mod": OPTIONS["alibi"]["score_mod"]}
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, sharding) for x in qkv]
        got = values_and_gradients("native", options, placed)
    assert [x.sharding.spec for x in got[1]] == [jax.typeof(x).sharding.spec for x in placed]
    compare(got, values_and_gradients("xla", options, qkv))


def test_in_shard_map(getkey):
    """Two devices of one process compute at the same time, on the same threads."""
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("batch")
    qkv = arrays(getkey())

    def gradients(*qkv):
        return jax.grad(lambda qkv: jnp.sin(attend(*qkv, is_causal=True, implementation="native")).sum())(qkv)

    mapped = jax.shard_map(gradients, mesh=mesh, in_specs=spec, out_specs=spec)
    compare(jax.jit(mapped)(*qkv), jax.jit(gradients)(*qkv))


def test_what_it_is_not_lowered_for(getkey):
    qkv = arrays(getkey(), 20, 20)
    call = jax.jit(functools.partial(attend, implementation="native"))
    with pytest.raises(jattn.Unsupported, match=r"jax\.export does not take its calls"):
        jax.export.export(call)(*qkv)
    with pytest.raises(jattn.Unsupported, match="it needs a CPU, not tpu"):
        jax.export.export(call, platforms=["tpu"])(*qkv)
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
    with pytest.raises(jattn.Unsupported, match="the arrays may lie on several devices"):
        call(*(jax.device_put(x, sharding) for x in qkv))
    spec = jax.sharding.PartitionSpec("batch")
    mapped = jax.shard_map(functools.partial(attend, implementation="native"), mesh=mesh, in_specs=spec, out_specs=spec)
    compare(jax.jit(mapped)(*qkv), attend(*qkv, implementation="xla"))
