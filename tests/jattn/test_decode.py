"""The implementation for few queries, beyond the conformance table: what it skips, and when it is chosen."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn.kernels import decode
from jattn.kernels.decode import Decode
from jattn.masks import SlidingWindow

B, S, N, K, H, CHUNK = 2, 23, 6, 3, 5, 4


@pytest.fixture
def arrays(getkey):
    shapes = (B, 1, N, H), (B, S, K, H), (B, S, K, H)
    return [jax.random.normal(getkey(), shape) for shape in shapes]


@pytest.mark.slow_except("True-nothing")
@pytest.mark.parametrize("options, chunks", [
    ({}, [0, 1, 2, 3, 4, 5]),
    ({"key_value_seq_lengths": np.array([9, 6])}, [0, 1, 2]),
    ({"mask": SlidingWindow(5), "query_positions": np.array([14])}, [2, 3]),
    ({"mask": np.arange(S)[None, :] // CHUNK == 1}, [1]),
    ({"mask": np.zeros((1, S), bool)}, []),
], ids=["everything", "lengths", "window", "mask array", "nothing"])  # fmt: skip
@pytest.mark.parametrize("traced", [False, True])
def test_chunks_that_no_query_sees_are_not_computed(arrays, options, chunks, traced):
    computed = set()

    def watched(score, b, h, q, kv):
        jax.debug.callback(lambda kv: computed.update((np.ravel(kv) // CHUNK).tolist()), kv)
        return score

    def call(arrays, options):
        return jattn.dot_product_attention(*arrays, **options, score_mod=watched, implementation=Decode(CHUNK))

    if traced:
        moving = {name: x for name, x in options.items() if name != "mask" or isinstance(x, np.ndarray)}
        fixed = {name: x for name, x in options.items() if name not in moving}
        out = jax.jit(lambda arrays, moving: call(arrays, moving | fixed))(arrays, moving)
    else:
        out = call(arrays, options)
    jax.effects_barrier()
    assert sorted(computed) == chunks
    np.testing.assert_allclose(out, jattn.dot_product_attention(*arrays, **options, implementation="xla"), atol=2e-6)


def test_products_of_all_heads_together_are_each_heads_own(arrays):
    """NaN in the keys and values of one kv head only affects the query heads that use it."""
    q, k, v = arrays
    k, v = (x.at[0, 7, 1].set(jnp.nan) for x in (k, v))
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    for in_force in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with in_force:
            out = jattn.dot_product_attention(q, k, v, implementation=Decode(CHUNK))
        bad = np.isnan(out).any(-1)[:, 0]
        np.testing.assert_array_equal(bad, np.array([[False, False, True, True, False, False], [False] * 6]))


def test_where_it_is_taken():
    """On CPUs, unless the compiled kernels are there, which take no score function of the user's."""
    explain = functools.partial(jattn.explain, score_mod=lambda score, *indices: 2 * score)
    one = jnp.zeros((1, 1, 8, 64))
    cache, short = jnp.zeros((1, 65536, 2, 64)), jnp.zeros((1, 512, 2, 64))
    assert explain(one, cache, cache).startswith("decode: taken on CPU\nxla: taken on GPU and TPU")
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (one, cache)]
    assert explain(types[0], types[1], types[1]) == explain(one, cache, cache)
    eight, heads = jax.ShapeDtypeStruct((1, 8, 16, 64), "float32"), jax.ShapeDtypeStruct((1, 65536, 16, 64), "float32")
    assert explain(eight, heads, heads).startswith("xla: taken")  # every query meets each of 16 key heads
    assert "decode: also possible" in explain(one, short, short)
    many = jnp.zeros((1, 64, 8, 64))
    assert explain(many, cache, cache).startswith("blockwise: taken")


def test_a_chunk_is_a_power_of_two_and_not_tiny():
    assert decode.chunk_length(1, 2, 64) == 8192
    assert decode.chunk_length(3, 5, 48) == 1024
    assert decode.chunk_length(64, 32, 128) == 128


@pytest.mark.slow
def test_gradients_keep_no_chunk(arrays):
    """Temporary memory is that of one chunk, also in the backward pass."""

    def temporaries(length):
        q, k = jnp.zeros((1, 1, 4, 8)), jnp.zeros((1, length, 2, 8))
        loss = lambda q, k, v: jattn.dot_product_attention(q, k, v, implementation="decode").sum()
        compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k).compile()
        return compiled.memory_analysis().temp_size_in_bytes, k.nbytes

    (short, _), (long, of_keys) = temporaries(2**17), temporaries(2**19)
    assert long - short < of_keys / 10
