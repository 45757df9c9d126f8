"""The statistics' kernel for TPUs, interpreted, against the loop over blocks of ``blockwise``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import jattn
from jattn import masks, score_mods
from jattn._core.arguments import make_call
from jattn._core.vmap import canonical
from jattn.heads import statistics
from jattn.kernels import Reduction, Unsupported
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.pallas_tpu import LONGEST, PallasTPU
from tests.jattn.test_pallas_tpu import floats

B, T, N, K, H = 2, 300, 2, 1, 16
KERNEL = PallasTPU((128, 256), interpret=True)  # several blocks, and blocks of several tiles


def heads(T=T, S=T, dtype=jnp.float32):
    return floats(B, T, N, H, seed=1, dtype=dtype), floats(B, S, K, H, seed=2, dtype=dtype)


TOKENS = np.random.default_rng(3).integers(0, 20, (B, T))
CASES = {
    "causal, tokens": (heads(), {"is_causal": True, "tokens": TOKENS}),
    "full, fewer keys": (heads(T, 200), {}),
    "whole blocks": (heads(256, 512), {}),
    "window of segments": (heads(), {"local_window_size": (50, 0), "mask": masks.Segments(np.arange(T) // 77)}),
    "positions": (heads(200, T), {"is_causal": True, "query_positions": np.arange(200) + 100}),
    "lengths, one of them 0": (
        heads(),
        {"key_value_seq_lengths": jnp.array([0, 211]), "score_mod": score_mods.Alibi(score_mods.alibi_slopes(N))},
    ),
    "eligible": (heads(), {"is_causal": True, "eligible": np.arange(T) % 3 > 0}),
}


def assert_same(found, expected, tolerance=1e-5):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_as_blockwise(name):
    (query, key), options = CASES[name]
    found = jax.jit(lambda q, k: statistics(q, k, implementation=KERNEL, **options))(query, key)
    wanted = jax.jit(lambda q, k: statistics(q, k, implementation=Blockwise(), **options))(query, key)
    assert_same(found, wanted)


@pytest.mark.slow
def test_each_statistic_alone():
    query, key = heads()
    whole = statistics(query, key, implementation=Blockwise(), is_causal=True)
    lse = jattn.dot_product_attention(query, key, key, is_causal=True, return_residual=True)[1]
    for name in "received", "offset_profile", "max_logit", "previous_token":
        found = statistics(query, key, implementation=KERNEL, is_causal=True, lse=lse, names=[name])
        assert_same(found[name], whole[name])


@pytest.mark.slow
def test_bfloat16():
    query, key = heads(dtype=jnp.bfloat16)
    lse = jattn.dot_product_attention(query, key, key, is_causal=True, return_residual=True)[1]
    found, expected = (statistics(query, key, implementation=how, is_causal=True, lse=lse) for how in (KERNEL, Blockwise()))  # fmt: skip
    assert_same(found, expected, 1e-4)  # the same products of bfloat16; sums in float32


@pytest.mark.slow
def test_x64_and_vmap():
    query, key = heads()
    with jax.enable_x64(True):
        found = jax.vmap(lambda q, k: statistics(q, k, implementation=KERNEL, is_causal=True))(query, key)
    assert_same(found, statistics(query, key, implementation=Blockwise(), is_causal=True))


@pytest.mark.slow
def test_an_lse_of_another_dtype_and_tokens_of_64_bits():
    query, key = heads()
    lse = jattn.dot_product_attention(query, key, key, is_causal=True, return_residual=True)[1].astype(jnp.bfloat16)
    found, expected = (
        statistics(query, key, lse=lse, is_causal=True, implementation=how, names=["entropy"]) for how in (KERNEL, Blockwise())
    )  # fmt: skip
    assert found["entropy"].dtype == expected["entropy"].dtype == jnp.float32
    assert_same(found, expected)
    with jax.enable_x64(True):
        tokens = jnp.asarray(np.tile([3, 3 + 2**32], (B, T // 2)), jnp.int64)
        found, expected = (
            statistics(query, key, tokens=tokens, is_causal=True, implementation=how, names=["duplicate_token"])
            for how in (KERNEL, Blockwise())
        )
    assert_same(found, expected)
    assert (found["duplicate_token"] < 0.6).all()  # every second token is another


@pytest.mark.slow
def test_nan_stays_in_the_pairs_that_are_seen():
    query, key = heads(T, 400)
    key = key.at[:, 120].set(jnp.nan)
    for how in KERNEL, Blockwise(), Blockwise((16, 16)):
        received = statistics(query, key, is_causal=True, implementation=how, names=["received"])["received"]
        np.testing.assert_array_equal(np.isnan(received), np.broadcast_to(np.arange(400) < T, (B, N, 400)))


@pytest.mark.slow
def test_the_gradient_is_blockwises():
    query, key = heads()

    def entropy(query, how):
        return statistics(query, key, implementation=how, is_causal=True, names=["entropy"])["entropy"].sum()

    found, expected = (jax.grad(entropy)(query, how) for how in (KERNEL, Blockwise()))
    assert_same(found, expected)


def weights_and_logs(log_weights, row, column):
    weights = jnp.exp(log_weights)
    far = jnp.where(column["slot"] < row["slot"], weights, 0.0)
    return {"rows": weights, "earlier": far, "highest": log_weights, "columns": weights, "diagonals": weights}


@pytest.mark.slow
def test_no_races():
    query, key = (x[:1] for x in heads())
    args = canonical(make_call(query, key, None, is_causal=True))
    lse = jattn.dot_product_attention(query, key, key, is_causal=True, return_residual=True)[1]
    slots = {"slot": jnp.arange(T)[None], "counts": jnp.ones((1, T), bool)}
    kinds = {
        "rows": "row_sum",
        "earlier": "row_sum",
        "highest": "row_max",
        "columns": "column_sum",
        "diagonals": "diagonal_sum",
    }
    fold = Reduction(lse, slots, slots, weights_and_logs, tuple(kinds.items()), ("visible", "visible_at"))
    settings = PallasTPU((128, 256), pltpu.InterpretParams(detect_races=True))
    # Called as it is: the interpreter's callbacks have no place in a deferred operation.
    found = jax.jit(lambda args, fold: settings.reduce("cpu", args, fold))(args, fold)
    assert_same(found, Blockwise().fold(args, fold))


@pytest.mark.slow
def test_on_a_tpu_it_is_taken_by_name_only():
    x = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)

    def text(platform, **options):
        fn = jax.jit(lambda q, k: statistics(q, k, is_causal=True, **options))
        return jax.export.export(fn, platforms=[platform])(x, x).mlir_module()

    with jax.enable_x64(True):  # a TPU has no 64 bits
        on_tpu = text("tpu", implementation=PallasTPU())
        assert "jattn_fold" in on_tpu and "jattn_forward" in on_tpu  # of which the lse
        assert "jattn_fold" not in text("tpu")
    assert "tpu_custom_call" not in text("cpu") and "tpu_custom_call" not in text("cuda")


def test_refuses_what_does_not_fit():
    long = jax.ShapeDtypeStruct((1, LONGEST // 2 + 1, 1, 8), jnp.float32)
    lse = jax.ShapeDtypeStruct(long.shape[:3], jnp.float32)

    def of(*names):
        how = PallasTPU(interpret=True)
        return jax.eval_shape(lambda q, k, lse: statistics(q, k, lse=lse, names=names, implementation=how), long, long, lse)  # fmt: skip

    with pytest.raises(Unsupported, match=f"sums by key or by offset take T \\+ S up to {LONGEST}"):
        of("received")
    assert set(of("entropy")) == {"entropy", "support"}
    with pytest.raises(Unsupported, match="float32 and bfloat16, not float16"):
        statistics(*heads(dtype=jnp.float16), implementation=KERNEL, lse=jnp.zeros((B, T, N)))
