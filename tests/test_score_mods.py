"""Score functions against their papers' definitions, written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from jattn import mods, score_mods

Q, KV = np.arange(150)[:, None], np.arange(170)[None, :]
SCORE = np.random.default_rng(0).normal(size=(150, 170)).astype(np.float32)


def call(mod, score=SCORE, h=1):
    with mods.mod_semantics():
        return mod(jnp.asarray(score), 0, h, jnp.asarray(Q), jnp.asarray(KV))


def test_alibi_slopes():
    np.testing.assert_allclose(score_mods.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    # the paper's rule for a number of heads that is no power of two: those of 4, then every second one of 8
    np.testing.assert_allclose(score_mods.alibi_slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        score_mods.alibi_slopes(0)


def test_alibi():
    slopes = np.array([9.0, 0.25, 9.0], np.float32)
    np.testing.assert_allclose(call(score_mods.Alibi(slopes)), SCORE - 0.25 * np.abs(Q - KV), rtol=1e-6)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_buckets(bidirectional):
    """T5's buckets, one offset at a time in Python, for 32 buckets and its default distance of 128."""

    def bucket(offset):
        buckets, first = 32, 0
        if bidirectional:
            buckets = 16
            first, distance = (16 if offset > 0 else 0), abs(offset)
        else:
            distance = max(-offset, 0)
        exact = buckets // 2
        if distance < exact:
            return first + distance
        large = exact + int(np.log(distance / exact) / np.log(128 / exact) * (buckets - exact) + 1e-6)
        return first + min(large, buckets - 1)

    table = np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)
    mod = score_mods.RelativeBias(table, bidirectional=bidirectional)
    expected = np.vectorize(bucket)(KV - Q)
    # no offset is after the query and 0 away, so T5 never uses the bucket 16
    assert len(np.unique(expected)) == (31 if bidirectional else 32)
    np.testing.assert_array_equal(mod.bucket(jnp.asarray(KV - Q)), expected)
    np.testing.assert_allclose(call(mod), SCORE + table[expected, 1], rtol=1e-6)


def test_soft_cap_and_then():
    np.testing.assert_allclose(call(score_mods.SoftCap(2.0)), 2 * np.tanh(SCORE / 2), rtol=1e-5)
    double = lambda score, b, h, q, kv: 2 * score
    shift = lambda score, b, h, q, kv: score + h
    np.testing.assert_allclose(call(score_mods.then(double, shift)), 2 * SCORE + 1, rtol=1e-6)
    np.testing.assert_allclose(call(score_mods.then(shift, double)), 2 * (SCORE + 1), rtol=1e-6)
    three = score_mods.then(shift, double, score_mods.SoftCap(1.0))
    np.testing.assert_allclose(call(three), np.tanh(2 * (SCORE + 1)), rtol=1e-5)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: score_mods.Alibi(3.0), r"slopes must be a float array \[N\], got float"),
        (lambda: score_mods.Alibi(np.arange(3)), "slopes must be a float array"),
        (lambda: score_mods.RelativeBias(np.ones(3)), r"table must be a float array \[num_buckets, N\]"),
        (lambda: score_mods.RelativeBias(np.ones((2, 3))), "2 buckets"),
        (lambda: score_mods.RelativeBias(np.ones((32, 3)), max_distance=8), "max_distance must be larger"),
        (lambda: score_mods.SoftCap(-1.0), "cap must be positive, got -1"),
        (lambda: score_mods.then(3), "must be callable|Expected type: .*Callable"),
        (lambda: score_mods.then(), "at least one"),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
