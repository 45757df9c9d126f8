"""Blockwise attention by the accelerators' rule, on CPU: products of the inputs' own dtype, all heads in every step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

import jattn
from jattn import masks, score_mods
from jattn.core import deferred
from jattn.kernels.blockwise import Blockwise

B, T, S, N, K, H, D = 2, 13, 17, 4, 2, 5, 3


@pytest.fixture
def accelerator():
    """Programs for this machine's CPU are traced as for a TPU."""

    def lower_as(platform):
        mlir.register_lowering(deferred.deferred_p, functools.partial(deferred._lower, platform), platform="cpu")
        jax.clear_caches()
        deferred._compiled.cache_clear()

    lower_as("tpu")
    yield
    lower_as("cpu")


def floats(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32), dtype)


@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_gradients(attend, q, k, v, g):
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)


def outputs_and_gradients(implementation, arrays, **options):
    attend = functools.partial(jattn.dot_product_attention, implementation=implementation, **options)
    return _outputs_and_gradients(lambda *qkv: attend(*qkv), *arrays)


OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window and soft cap": {"mask": masks.SlidingWindow(6, 2), "score_mod": score_mods.SoftCap(1.3)},
    "bias and lengths": {"bias": floats(1, N, T, S), "key_value_seq_lengths": np.array([9, 17])},
    "rows that see nothing": {"query_seq_lengths": np.array([3, 13]), "is_causal": True},
    "dropout": {"dropout_rate": 0.3, "dropout_rng": jax.random.key(4)},
    "positions": {"query_positions": np.arange(T)[::-1].copy(), "is_causal": True, "scale": 0.3},
    "plain function": {"mask": lambda b, h, q, kv: (q + kv + h + b) % 3 != 0},
}


@pytest.mark.slow_except("nothing", "plain function")
@pytest.mark.parametrize("name", OPTIONS)
def test_same_as_dense(accelerator, name):
    arrays = floats(B, T, N, H), floats(B, S, K, H, seed=1), floats(B, S, K, D, seed=2), floats(B, T, N, D, seed=3)
    found = outputs_and_gradients(Blockwise((4, 5)), arrays, **OPTIONS[name])
    wanted = outputs_and_gradients("xla", arrays, **OPTIONS[name])
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(jnp.abs(y).max()))


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_bfloat16_are_as_exact_as_dense(accelerator, causal):
    """Each block's gradients are added up in float32 and rounded once."""
    arrays = [floats(1, 512, 2, 32, seed=i) for i in range(4)]
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    exact = outputs_and_gradients("xla", [x.astype(jnp.float32) for x in arrays], is_causal=causal)
    found = outputs_and_gradients(Blockwise((64, 64)), arrays, is_causal=causal)
    dense = outputs_and_gradients("xla", arrays, is_causal=causal)
    for x, y, z in zip(found[1:], dense[1:], exact[1:], strict=True):
        x, y = (float(jnp.linalg.norm(a.astype(jnp.float32) - z)) for a in (x, y))
        assert x <= y


def test_one_set_of_gradients_for_full_and_partial_blocks(accelerator):
    arrays = [floats(1, 2048, 2, 32, seed=i) for i in range(4)]

    def memory(causal):
        def run(*arrays):
            return outputs_and_gradients(Blockwise((128, 128)), arrays, is_causal=causal)

        analysis = jax.jit(run).lower(*arrays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert memory(causal=True) <= memory(causal=False) + arrays[0].nbytes


def test_a_products_column_of_ones_sums_the_exponentials():
    """XLA for TPU would compute every exponential twice, for the sum and for the product."""
    x = jax.ShapeDtypeStruct((1, 2048, 2, 32), jnp.bfloat16)

    def appends_a_column(platform, **options):
        attend = functools.partial(jattn.dot_product_attention, implementation="blockwise", **options)
        text = jax.jit(attend).trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()
        return "x33xf32" in text

    assert appends_a_column("tpu")
    assert not appends_a_column("cuda")
    assert not appends_a_column("cpu")
    assert not appends_a_column("tpu", dropout_rate=0.1, dropout_rng=jax.random.key(0))  # the sum is of all weights
