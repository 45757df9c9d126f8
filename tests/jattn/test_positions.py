"""Position encodings, compared with their papers' formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.positions import LinearScaling, Llama3Scaling, Rotary, YarnScaling, sinusoidal
from tests import reference
from tests.reference.models import frequencies


@pytest.mark.parametrize("dim", [6, 7])
def test_sinusoidal(dim):
    table = sinusoidal(5003, dim)
    assert table.shape == (5003, dim) and table.dtype == jnp.float32
    for p, i in [(0, 0), (0, 1), (1, 0), (17, 3), (5002, 2), (5002, dim - 1)]:
        angle = p / 10000 ** ((i - i % 2) / dim)
        np.testing.assert_allclose(table[p, i], np.cos(angle) if i % 2 else np.sin(angle), atol=1e-6)
    assert sinusoidal(0, dim).shape == (0, dim)
    with pytest.raises(ValueError, match="dim=0"):
        sinusoidal(3, 0)


@pytest.mark.slow
@pytest.mark.parametrize("fraction, dim", [(1.0, 12), (0.5, 6), (0.34, 4)])
def test_rotary(getkey, fraction, dim):
    x = jax.random.normal(getkey(), (2, 5, 3, 12))
    positions = jnp.array([[0, 1, 2, 3, 4], [7, 100, 5, 0, 1]])
    got = Rotary(base=100.0, fraction=fraction)(x, positions)
    angles = np.asarray(positions)[..., None, None] * 100.0 ** (-np.arange(0, dim, 2) / dim)
    np.testing.assert_allclose(got, reference.rotate(np.asarray(x, np.float64), angles), atol=2e-5)
    rotary = Rotary(100.0, fraction)
    np.testing.assert_array_equal(rotary(x, positions[1])[0], rotary(x[:1], positions[1:])[0])


def test_rotary_scores_depend_on_the_difference_alone():
    q, k = jnp.float32(np.random.default_rng(0).normal(size=(2, 1, 1, 8)))
    score = jax.jit(lambda i, j: jnp.sum(Rotary()(q, i[None]) * Rotary()(k, j[None])))
    np.testing.assert_allclose(score(9, 4), score(105, 100), atol=1e-5)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3


def test_rotary_keeps_the_dtype():
    x = jax.ShapeDtypeStruct((5, 3, 8), jnp.bfloat16)
    assert jax.eval_shape(lambda x: Rotary()(x, jnp.arange(5)), x).dtype == jnp.bfloat16


def test_scalings():
    plain, one = Rotary(500000.0).frequencies(128)
    assert one == 1.0
    np.testing.assert_allclose(plain, 500000.0 ** (-np.arange(64) / 64))
    linear, _ = Rotary(500000.0, scaling=LinearScaling(4.0)).frequencies(128)
    np.testing.assert_allclose(linear, plain / 4)
    # Llama 3.1: wavelengths below 8192/4 kept, above 8192 divided, blended between
    llama, _ = Rotary(500000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)).frequencies(128)
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    config = {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3"} | scaling}
    np.testing.assert_allclose(llama, frequencies(config, 128))
    assert len({*np.flatnonzero(llama == plain)}) > 20 and np.sum(np.isclose(llama, plain / 8)) > 20


def test_yarn():
    """High frequencies are kept, low ones divided; between, a linear ramp over dimensions (paper, eq. 13 and 17)."""
    frequencies, factor = Rotary(10000.0, scaling=YarnScaling(4.0, 4096)).frequencies(128)
    plain, _ = Rotary(10000.0).frequencies(128)
    turns = 4096 * plain / (2 * np.pi)
    kept = (frequencies * 4 / plain - 1) / 3  # 1 where kept, 0 where divided by 4
    np.testing.assert_allclose(kept[turns > 40], 1.0, atol=1e-12)
    np.testing.assert_allclose(kept[turns < 0.8], 0.0, atol=1e-12)
    ramp = kept[(kept > 0) & (kept < 1)]
    np.testing.assert_allclose(np.diff(ramp), np.diff(ramp)[0], atol=1e-12)
    # where the ramp starts and ends, worked out by hand: 64 ln(4096 / (2 pi beta)) / ln 10000
    assert (int(np.sum(kept == 1)) - 1, int(np.argmax(kept == 0))) == (
        int(np.floor(64 * np.log(4096 / (64 * np.pi)) / np.log(10000))),
        int(np.ceil(64 * np.log(4096 / (2 * np.pi)) / np.log(10000))),
    )
    np.testing.assert_allclose(factor, 0.1 * np.log(4) + 1)
    assert Rotary(scaling=YarnScaling(4.0, 4096, attention_factor=1.5)).frequencies(64)[1] == 1.5


@pytest.mark.parametrize("make, message", [
    (lambda: Rotary(base=0.5), "base must be larger than 1"),
    (lambda: Rotary(fraction=0.0), r"fraction must lie in \(0, 1\]"),
    (lambda: Rotary()(jnp.zeros((4, 2, 7)), jnp.arange(4)), "must be even"),
    (lambda: Rotary()(jnp.zeros((4, 6)), jnp.arange(4)), r"one head \[T, H\]: pass x\[:, None\]"),
    (lambda: Rotary()(jnp.zeros((1, 2, 6)), np.array([2**32])), "positions must lie within int32"),
    (lambda: Rotary()(jnp.zeros((4, 2, 6)), jnp.arange(5)), r"positions of shape \(5,\)"),
])  # fmt: skip
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()
