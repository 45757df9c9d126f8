"""Our own GPU kernels: several blocks in Pallas' interpreter, what is lowered and listed.

The conformance table runs them on its cases in kind, in a single block.
"""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, score_mods
from jattn._core import deferred
from jattn.heads import statistics
from jattn.kernels import Unsupported
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.pallas_gpu import OLDEST, PallasGPU
from jattn.kernels.pallas_gpu.interpreted import Interpreted
from jattn.kernels.pallas_gpu.mosaic_ops import FUNCTIONS, run
from jattn.kernels.pallas_gpu.schedule import row_lists
from tests.jattn.test_pallas_tpu import floats, results

B, T, S, N, K, H = 1, 203, 150, 2, 1, 64
SLOPES = jnp.asarray(np.float32([0.5, 0.1]))
NEW = pytest.mark.skipif(jax.__version_info__ < OLDEST, reason="pallas_gpu needs a newer JAX")


def qkv(length=T, dtype=jnp.bfloat16, head_dim=H):
    sizes = (length, N), (S, K), (S, K)
    return [floats(B, *size, head_dim, seed=seed, dtype=dtype) for seed, size in enumerate(sizes, 1)]


def ids(length, seed):
    return jnp.asarray(np.sort(np.random.default_rng(seed).integers(0, 5, length)), jnp.int32)


def distant(score, b, h, q, kv):
    return score - SLOPES[h] * jnp.log1p(abs(q - kv)) + 0.01 * jnp.floor(score)


CASES = {
    "causal, alibi, soft cap": {"is_causal": True, "score_mod": score_mods.then(score_mods.Alibi(SLOPES), score_mods.SoftCap(3.0))},
    "full": {},
    "segments and causal": {"mask": masks.Segments(ids(T, 0), ids(S, 1)) & masks.Causal()},
    "window": {"local_window_size": (20, 3)},
    "bias and mask arrays": {"bias": floats(N, T, S, seed=6), "mask": np.random.default_rng(7).random((T, S)) > 0.5},
    "a function": {"mask": lambda b, h, q, kv: ((q - kv) % 4 == 0) & (kv <= q + h), "score_mod": distant},
    "positions": {"is_causal": True, "query_positions": np.arange(T) * 2 - 50},
}  # fmt: skip


def assert_as_exact_as_dense(arrays, options):
    exact = results([x.astype(jnp.float32) for x in arrays], "xla", **options)
    dense, ours = (results(arrays, name, **options) for name in ("xla", Interpreted()))
    for of_ours, of_dense, of_exact in zip(ours, dense, exact, strict=True):
        finite = np.isfinite(of_exact)
        np.testing.assert_array_equal(of_ours[~finite], of_exact[~finite])
        error, allowed = (np.abs(x[finite] - of_exact[finite]).mean() for x in (of_ours, of_dense))
        assert error <= 2 * allowed + 1e-6


@NEW
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_several_blocks_without_races(name):
    assert_as_exact_as_dense(qkv(), CASES[name])


@NEW
@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "head_dim"), [(jnp.float16, 72), (jnp.bfloat16, 160)])
def test_other_dtypes_and_head_dims(dtype, head_dim):
    assert_as_exact_as_dense(qkv(dtype=dtype, head_dim=head_dim), {"is_causal": True})


FEW = {
    "one token, a cache": (1, {"key_value_seq_lengths": np.array([700, 1])}),
    "a function of the head": (2, {"mask": lambda b, h, q, kv: (kv + h) % 3 > b, "score_mod": distant}),
    "causal, biases": (3, {"is_causal": True, "query_positions": np.arange(3) + 600, "bias": floats(2, 1, 3, 900, seed=8),
        "score_mod": score_mods.SoftCap(3.0)}),
}  # fmt: skip


@NEW
@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_few_queries_and_many_keys(name):
    """Several programs share the keys; query heads of one key head are rows of one block, if nothing tells them apart."""
    length, options = FEW[name]
    query, (key, value) = (
        floats(2, length, 2, H, seed=1, dtype=jnp.bfloat16),
        (np.array(floats(2, 900, 1, H, seed=n, dtype=jnp.bfloat16)) for n in (2, 3)),
    )
    if "key_value_seq_lengths" in options:
        value[:, 720] = np.nan  # unseen, in a block that is seen in part
    arrays = np.asarray(query), key, value
    found, expected = (
        jax.jit(lambda *xs, how=how: jattn.dot_product_attention(*xs, implementation=how, return_residual=True, **options))(*xs)
        for xs, how in ((arrays, Interpreted()), ([x.astype(np.float32) for x in arrays], "xla"))
    )  # fmt: skip
    np.testing.assert_allclose(np.asarray(found[0], np.float32), expected[0], rtol=0.02, atol=0.004)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-5)


TOKENS = np.random.default_rng(3).integers(0, 20, (B, S))
FOLDS = {
    "causal, tokens": {"is_causal": True, "tokens": TOKENS},
    "segments, eligible": {"mask": masks.Segments(ids(S, 0)), "eligible": np.arange(S) % 3 > 0},
    "lengths, score function": {"key_value_seq_lengths": np.array([101]), "score_mod": distant},
}


@NEW
@pytest.mark.slow
@pytest.mark.parametrize("name", FOLDS)
def test_statistics_are_blockwises(name):
    query, key, _ = qkv(S)
    options = {k: v for k, v in FOLDS[name].items() if k not in ("tokens", "eligible")}
    _, lse = jattn.dot_product_attention(query, key, key, return_residual=True, **options)
    found, expected = (statistics(query, key, lse=lse, implementation=how, **FOLDS[name]) for how in (Interpreted(), Blockwise()))  # fmt: skip
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, expected)


@NEW
@pytest.mark.slow
def test_nan_stays_in_the_rows_that_see_it():
    query, key, _ = (np.array(x, np.float32) for x in qkv(S))
    key[0, 40] = np.nan
    query, key = jnp.asarray(query, jnp.bfloat16), jnp.asarray(key, jnp.bfloat16)
    options = {"mask": masks.Segments(np.arange(S) // 40), "is_causal": True, "key_value_seq_lengths": np.array([140])}
    out, lse = jattn.dot_product_attention(query, key, key, implementation=Interpreted(), return_residual=True, **options)  # fmt: skip
    assert np.isnan(lse[0, 40:80]).all() and np.isfinite(np.delete(lse[0], np.s_[40:80], 0)).all()
    assert np.isnan(out[0, 40:80]).all() and np.isfinite(np.delete(out[0], np.s_[40:80], 0)).all()
    received = statistics(query, key, lse=lse, implementation=Interpreted(), names=["received"], **options)["received"]
    assert np.isnan(received[0, :, 40]).all() and np.isfinite(received[0, :, 80:]).all()


@pytest.mark.slow
@NEW
def test_is_lowered_for_nvidia_gpus_alone():
    x = jnp.ones((1, 512, 2, 64), jnp.bfloat16)

    def attend(q):
        out = jattn.dot_product_attention(q, x, x, is_causal=True, implementation="pallas_gpu", score_mod=distant)
        return out.astype(jnp.float32).sum()

    for x64 in (False, True):
        with jax.enable_x64(x64):
            text = jax.jit(jax.grad(attend)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("mosaic_gpu_v2") == 3  # forward, query's gradient, key's and value's
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU, not cpu"):
        attend(x)

    def look(q):
        found = statistics(q, x, is_causal=True, implementation=PallasGPU())
        return found["entropy"], found["received"], found["offset_profile"]

    text = jax.jit(look).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("mosaic_gpu_v2") == 4  # the log-sum-exp, the sums of queries, of keys, of offsets


@pytest.mark.slow
@NEW
def test_one_head_with_a_traced_slope_is_lowered():
    x = jnp.ones((1, 128, 1, 64), jnp.bfloat16)
    attend = lambda slope: jattn.dot_product_attention(x, x, x, score_mod=score_mods.Alibi(slope), implementation="pallas_gpu")  # fmt: skip
    assert "mosaic_gpu_v2" in jax.jit(attend).trace(SLOPES[:1]).lower(lowering_platforms=("cuda",)).as_text()


@NEW
def test_a_chip_that_is_not_a_hopper_is_refused_where_it_is_known(monkeypatch):
    lowered_as = deferred._lowered_as

    def attend(q):
        return jattn.dot_product_attention(q, q, q, implementation="pallas_gpu")

    def lower(chip):  # as for the device of a topology, which need not be there
        backend = SimpleNamespace(devices=lambda: [SimpleNamespace(compute_capability=chip)])
        there = lambda ctx: lowered_as(ctx.replace(module_context=ctx.module_context.replace(backend=backend)))
        monkeypatch.setattr(deferred, "_lowered_as", there)
        jax.jit(lambda q: attend(q)).trace(floats(1, 128, 1, 64, seed=1, dtype=jnp.bfloat16)).lower(lowering_platforms=("cuda",))  # fmt: skip

    lower("9.0")
    with pytest.raises(Unsupported, match=r"compute capability 9.0 \(H100, H200, GH200\), not 10.0"):
        lower("10.0")


def test_an_older_jax_is_refused():
    if jax.__version_info__ >= OLDEST:
        pytest.skip("this JAX is new enough")
    with pytest.raises(Unsupported, match="needs JAX 0.11.2 or newer"):
        jattn.dot_product_attention(*qkv(), implementation="pallas_gpu")


NUMBERS = np.array([-3.0, -2.5, -1.0, -1e-3, -1e-7, 0.0, 1e-7, 1e-3, 0.5, 1.0, 2.5, 3.0, 70.0], np.float32)
OWN = {
    "ceil": jnp.ceil,
    "expm1": jnp.expm1,
    "floor": jnp.floor,
    "is_finite": lambda x: jnp.where(jnp.isfinite(x / 0.5), x, 0.0),
    "log1p": lambda x: jnp.log1p(abs(x)),
    "tan": jnp.tan,
    "pow": lambda x: abs(x) ** 2.5 + x ** jnp.float32(3.0),
    "negative integer powers": lambda x: jax.lax.integer_pow(x + 0.25, -3),
    "a sum of derivatives": lambda x: x * jnp.exp(-x * x),
    "stop_gradient, numbers that are bools": lambda x: jax.lax.stop_gradient(x) * jnp.float32(3).astype(bool),
}


@pytest.mark.parametrize("name", OWN)
def test_operations_that_the_compiler_lacks(name):
    """The same values and derivatives as JAX, by the operations that there are."""
    with jax.numpy_dtype_promotion("standard"):
        for fn in OWN[name], lambda x: jax.jvp(OWN[name], (x,), (jnp.ones_like(x),))[1]:
            # One operation at a time: XLA would simplify what is exact only as it is written.
            np.testing.assert_allclose(run(fn, jnp.asarray(NUMBERS))[0], fn(NUMBERS), rtol=1e-5, atol=1e-30)
            left = jax.make_jaxpr(lambda x, fn=fn: run(fn, x))(NUMBERS).jaxpr.eqns
            assert not {equation.primitive.name for equation in left} & (set(FUNCTIONS) | {"custom_jvp_call"})


def test_powers_of_both_signs():
    x, y = (z.ravel() for z in np.meshgrid(NUMBERS[:-1], np.float32([-2.0, -0.5, 0.0, 1.0, 2.0, 3.0])))
    np.testing.assert_allclose(run(jax.lax.pow, jnp.asarray(x), jnp.asarray(y))[0], jax.lax.pow(x, y), rtol=1e-5)


@pytest.mark.parametrize("by_key", [False, True])
def test_the_lists_of_blocks(by_key):
    some = np.array([[[1, 0, 1], [0, 0, 0], [1, 1, 0]]], bool)
    every = some & np.array([[0, 0, 1], [0, 0, 0], [0, 1, 0]], bool)
    full_first = [[1, 5], [4], [0]] if by_key else [[4, 1], [1], [2, 1]]
    for lists in (row_lists(some, every, by_key), jax.jit(row_lists, static_argnums=2)(some, every, by_key)):
        entries, counts = map(np.asarray, lists)
        assert [list(row[:count]) for row, count in zip(entries[0], counts[0], strict=True)] == full_first


def test_the_lists_dealt_out():
    """Each visible block once; a part without any has one that is not."""
    some = np.random.default_rng(0).random((2, 3, 7)) < np.array([0.2, 0.9])[:, None, None]
    for table in some, np.zeros_like(some):
        every = table & (np.random.default_rng(1).random(table.shape) < 0.5)
        for lists in (row_lists(table, every, False, 3), jax.jit(row_lists, static_argnums=(2, 3))(table, every, False, 3)):  # fmt: skip
            entries, counts = (np.asarray(x).reshape(2, 3, 3, *x.shape[2:]) for x in lists)
            assert (counts >= 1).all() and (counts.max(2) - counts.min(2) <= 1).all()
            for b, i in np.ndindex(2, 3):
                found = [x for part, count in zip(entries[b, i], counts[b, i], strict=True) for x in part[:count]]
                visible = [x for x in found if table[b, i, x // 2]]
                assert sorted(visible) == sorted(2 * j + (not every[b, i, j]) for j in np.flatnonzero(table[b, i]))
                assert all(x % 2 for x in set(found) - set(visible))
