"""Our own TPU kernels, interpreted: several blocks and tiles, derivatives, and the list of blocks.

The conformance table runs them on every case, in a single tile.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import jattn
from jattn import masks, score_mods
from jattn._core.arguments import make_call
from jattn._core.vmap import canonical
from jattn.kernels import Unsupported
from jattn.kernels.pallas_tpu import OLDEST, PallasTPU
from jattn.kernels.pallas_tpu.schedule import block_sizes, schedule, split_entry

B, T, S, N, K, H, D = 2, 300, 200, 4, 2, 16, 24
SMALL_BLOCKS = PallasTPU((128, 128), interpret=True)
SLOPES = jnp.asarray([0.5, 0.25, 0.1, 0.05])


def floats(*shape, seed, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def qkv(dtype=jnp.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D)
    return [floats(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes, 1)]


def results(arrays, implementation, **options):
    """``out``, ``lse`` and the gradients of a loss that both are part of."""
    q, _, v = arrays
    weight, lse_weight = floats(*q.shape[:3], v.shape[3], seed=4), floats(*q.shape[:3], seed=5)

    def loss(*arrays):
        out, lse = jattn.dot_product_attention(*arrays, implementation=implementation, return_residual=True, **options)
        seen = jnp.where(lse == -jnp.inf, 0.0, lse)
        return (out.astype(jnp.float32) * weight).sum() + (seen * lse_weight).sum(), (out, lse)

    (_, (out, lse)), gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arrays)
    return [np.asarray(x, np.float64) for x in (out, lse, *gradients)]


in_place_only = pytest.mark.skipif(jax.__version_info__ < OLDEST, reason="refused")
IN_PLACE = {
    "causal, partial blocks": ((4, 2, 128), {"is_causal": True}),
    "full, a value of another size": ((2, 2, 64), {}),
    "lengths, one key head": ((4, 1, 128), {"key_value_seq_lengths": jnp.array([150, 0])}),
}


@pytest.mark.slow
@in_place_only
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_changes_no_bit(name):
    (N, K, D), options = IN_PLACE[name]
    shapes = (B, T, N, 128), (B, S, K, 128), (B, S, K, D)
    arrays = [floats(*shape, seed=n, dtype=jnp.bfloat16) for n, shape in enumerate(shapes)]
    copied, in_place = (results(arrays, PallasTPU((128, 128), interpret=True, in_place=both), **options) for both in (False, True))  # fmt: skip
    for ours, expected in zip(in_place, copied, strict=True):
        np.testing.assert_array_equal(ours, expected)


@in_place_only
def test_in_place_transposes_no_array():
    x = jnp.ones((1, 256, 2, 128), jnp.bfloat16)

    def transposed(in_place):
        attend = lambda *qkv: jattn.dot_product_attention(*qkv, implementation=PallasTPU(in_place=in_place))
        with jax.enable_x64(True):
            traced = jax.jit(lambda *qkv: jax.vjp(attend, *qkv)[1](qkv[0])).trace(x, x, x)
            text = traced.lower(lowering_platforms=("tpu",)).as_text()
        return len(re.findall(r"stablehlo.transpose.*bf16", text))

    assert transposed(False) >= 8 and transposed(True) == 0


def ids(length, seed):
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 5, (B, length)), 1), jnp.int32)


CASES = {
    "causal, alibi, soft cap": {"is_causal": True, "score_mod": score_mods.then(score_mods.Alibi(SLOPES), score_mods.SoftCap(3.0))},
    "lengths, one of them 0": {"key_value_seq_lengths": jnp.array([150, 0])},
    "full": {},
    "segments and causal": {"mask": masks.Segments(ids(T, 0), ids(S, 1)) & masks.Causal()},
    "window": {"local_window_size": (20, 3)},
    "bias and mask arrays": {"bias": floats(N, T, S, seed=6), "mask": floats(B, 1, T, S, seed=7) > 0},
    "bias of keys, mask of queries": {"bias": floats(S, seed=6), "mask": floats(T, 1, seed=7) > 0},
    "positions": {"mask": lambda b, h, q, kv: (kv <= q + h) & (b == 0), "query_positions": jnp.arange(T) * 2 - 50},
}  # fmt: skip


def assert_dense(kernel, name):
    for ours, dense in zip(*(results(qkv(), by, **CASES[name]) for by in (kernel, "xla")), strict=True):
        np.testing.assert_allclose(ours, dense, rtol=0, atol=2e-5)


@pytest.mark.slow_except("lengths, one of them 0")
@pytest.mark.parametrize("name", CASES)
def test_several_blocks(name):
    assert_dense(SMALL_BLOCKS, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows"),
    [("causal, alibi, soft cap", 384),  # 3 times 128 queries: two at once and one
     ("full", 512),  # twice 256
     ("lengths, one of them 0", 512), ("bias and mask arrays", 512), ("positions", 512), ("bias of keys, mask of queries", 384)],
)  # fmt: skip
def test_several_tiles_of_one_block(name, rows):
    assert_dense(PallasTPU((rows, 256), interpret=True), name)


@pytest.mark.slow
def test_the_error_in_bfloat16_is_at_most_twice_the_formulas():
    exact = results([x.astype(jnp.float32) for x in qkv(jnp.bfloat16)], "xla", is_causal=True)
    dense, ours = (results(qkv(jnp.bfloat16), name, is_causal=True) for name in ("xla", SMALL_BLOCKS))
    for of_ours, of_dense, of_exact in zip(ours, dense, exact, strict=True):
        assert np.abs(of_ours - of_exact).mean() <= 2 * np.abs(of_dense - of_exact).mean() + 1e-6


@pytest.mark.slow
def test_no_races():
    settings = PallasTPU((128, 128), pltpu.InterpretParams(detect_races=True))
    arrays = [x[:1, :200] for x in qkv()]
    args = canonical(make_call(*arrays, is_causal=True))

    def kernels(d_out):  # called as they are: the interpreter's callbacks have no place in a deferred operation
        results = settings.forward("cpu", args)
        return results[0], *settings.backward("cpu", args, results, [d_out, None])

    weight = floats(1, 200, N, D, seed=4)
    dense, pull = jax.vjp(lambda *x: jattn.dot_product_attention(*x, is_causal=True, implementation="xla"), *arrays)
    for ours, expected in zip(jax.jit(kernels)(weight), (dense, *pull(weight)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_other_derivatives_are_blockwises():
    q, k, v = (x[:1, :8] for x in qkv())
    slopes = SLOPES

    def loss(q, slopes, implementation):
        mod = score_mods.Alibi(slopes)
        return (jattn.dot_product_attention(q, k, v, implementation=implementation, score_mod=mod) ** 2).sum()

    def derivatives(implementation):
        def of(q, slopes):
            return loss(q, slopes, implementation)

        tangent = jax.jvp(of, (q, slopes), (q, slopes))[1]
        hessian = jax.jvp(jax.grad(of), (q, slopes), (q, slopes))[1]
        return tangent, hessian, jax.grad(of, 1)(q, slopes), jax.vmap(jax.grad(of), (0, None))(q[None], slopes)

    for ours, dense in zip(derivatives(PallasTPU(interpret=True)), derivatives("xla"), strict=True):
        np.testing.assert_allclose(ours, dense, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_one_head_with_a_traced_slope():
    q, k, v = (x[:1, :8, :1] for x in qkv())

    def loss(slope, implementation):
        mod = score_mods.Alibi(slope)
        return (jattn.dot_product_attention(q, k, v, implementation=implementation, score_mod=mod) ** 2).sum()

    ours, dense = (jax.jit(jax.grad(loss), static_argnums=1)(SLOPES[:1], x) for x in (SMALL_BLOCKS, "xla"))
    np.testing.assert_allclose(ours, dense, rtol=1e-4, atol=1e-4)


def test_is_lowered_for_tpus_alone():
    x = jnp.ones((1, 1024, 2, 64), jnp.bfloat16)  # loops of more than one step

    def attend(q):
        return jattn.dot_product_attention(q, x, x, is_causal=True, implementation="pallas_tpu").astype(jnp.float32).sum()  # fmt: skip

    for x64 in (False, True):
        with jax.enable_x64(x64):
            text = jax.jit(jax.grad(attend)).trace(x).lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == 3  # forward, query's gradient, key's and value's
    with pytest.raises(Unsupported, match="needs a TPU, not cpu"):
        attend(x)


@pytest.mark.slow
def test_in_x64():
    options = {"mask": masks.Segments(ids(T, 0)[:, :20]) & masks.Causal(), "score_mod": score_mods.Alibi(SLOPES)}

    def attend(implementation):
        q, k, v = (x[:, :20] for x in qkv())
        return jattn.dot_product_attention(q, k, v, implementation=implementation, **options)

    with jax.enable_x64(True):
        np.testing.assert_allclose(attend(PallasTPU((256, 128), interpret=True)), attend("xla"), rtol=0, atol=2e-6)


@pytest.mark.slow
def test_on_each_device_of_a_mesh():
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    spec = jax.sharding.NamedSharding(mesh, jax.P("batch", None, "heads", None))
    options = {"is_causal": True, "score_mod": score_mods.Alibi(SLOPES)}
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x[:, :8], spec) for x in qkv()]
        ours = jattn.dot_product_attention(*arrays, implementation=PallasTPU(interpret=True), **options)
    dense = jattn.dot_product_attention(*(x[:, :8] for x in qkv()), implementation="xla", **options)
    np.testing.assert_allclose(ours, dense, rtol=0, atol=2e-6)


def test_refuses_blocks_that_are_no_tiles():
    with pytest.raises(ValueError, match=r"multiples of 128 .* got \(100, 128\)"):
        PallasTPU((100, 128))


def listed(table, by_key):
    """For each sequence, ``(i, j, full)`` of the blocks that are computed, and the rows that are started and finished."""
    results = []
    for sequence in np.asarray(table):
        entries = [split_entry(entry, by_key) for entry in sequence]
        row = [entry[1 if by_key else 0] for entry in entries]
        results.append((
            [(int(i), int(j), bool(full)) for i, j, partial, full, *_ in entries if partial or full],
            [int(r) for r, entry in zip(row, entries, strict=True) if entry[4]],
            [int(r) for r, entry in zip(row, entries, strict=True) if entry[5]],
        ))  # fmt: skip
    return results


@pytest.mark.parametrize("by_key", [False, True])
def test_the_list_of_blocks(by_key):
    some = np.array([[[1, 0, 1], [0, 0, 0], [1, 1, 0]], [[0, 0, 0], [0, 1, 0], [0, 0, 0]]], bool)
    every = some & np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0]], bool)
    first = [(0, 0, False), (0, 2, True), (2, 0, False), (2, 1, True)]
    if by_key:
        first = [(0, 0, False), (2, 0, False), (2, 1, True), (0, 2, True)]
    expected = [(first, [0, 1, 2], [0, 1, 2]), ([(1, 1, False)], [0, 1, 2], [0, 1, 2])]
    static = schedule(some, every, by_key)
    traced = jax.jit(schedule, static_argnums=2)(some, every, by_key)
    assert listed(static, by_key) == expected and listed(traced, by_key) == expected
    assert static.shape == (2, 4 if by_key else 5) and traced.shape == (2, 9)  # a row without blocks has an entry, too


def test_block_sizes_divide_the_length_evenly():
    assert block_sizes(8192, 8191) == (1024, 1024)
    assert block_sizes(1100, 12) == (640, 128)
