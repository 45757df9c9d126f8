"""Arrays of more elements than an int counts."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks
from jattn.kernels import native

K, H, D, SEEN = 64, 128, 16, 200
KEYS = 2**31 // (K * H) + 1000

memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not native._is_installed(), reason="jattn-native is not installed"),
    pytest.mark.skipif(memory < 12 * 2**30, reason="it takes 5 GiB of memory"),
]


@pytest.mark.parametrize("queries", [2, 40])
def test_the_last_of_many_keys(queries, getkey):
    """Few queries and more: what they see starts beyond 2^31 elements."""
    shapes = (1, queries, K, H), (1, SEEN, K, H), (1, SEEN, K, D)
    query, key, value = (jax.random.normal(getkey(), shape, jnp.bfloat16) for shape in shapes)

    def attend(key, value, implementation):
        positions = np.arange(key.shape[1] - queries, key.shape[1])
        options = {"mask": masks.SlidingWindow(150, 0), "query_positions": positions}
        return jattn.dot_product_attention(query, key, value, implementation=implementation, **options)

    after_zeros = jax.jit(lambda x: jnp.zeros((1, KEYS, *x.shape[2:]), x.dtype).at[:, -SEEN:].set(x))
    native_out = jax.jit(attend, static_argnums=2)(after_zeros(key), after_zeros(value), "native")
    wanted = attend(key, value, "xla")
    np.testing.assert_allclose(np.asarray(native_out, np.float32), np.asarray(wanted, np.float32), atol=0.02)
