"""Score functions, compared with the definitions in their papers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import score_mods
from jattn._mods.arrays import mod_semantics
from jattn._mods.validation import check_fits
from tests.reference import t5_bucket

Q, KV = np.arange(150)[:, None], np.arange(170)[None, :]
SCORE = np.random.default_rng(0).normal(size=(150, 170)).astype(np.float32)


def call(mod, score=SCORE, h=1):
    with mod_semantics():
        return jax.jit(lambda *arguments: mod(arguments[0], 0, h, *arguments[1:]))(score, Q, KV)


def test_alibi_slopes():
    np.testing.assert_allclose(score_mods.alibi_slopes(8), [2.0**-i for i in range(1, 9)])
    # the paper's rule if the number of heads is not a power of two: the slopes for 4, then every second one for 8
    np.testing.assert_allclose(score_mods.alibi_slopes(6), [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3])
    with pytest.raises(ValueError, match="at least 1, got 0"):
        score_mods.alibi_slopes(0)


def test_alibi():
    slopes = np.array([9.0, 0.25, 9.0], np.float32)
    np.testing.assert_allclose(call(score_mods.Alibi(slopes)), SCORE - 0.25 * np.abs(Q - KV), rtol=1e-6)


@pytest.mark.parametrize("bidirectional", [pytest.param(True, marks=pytest.mark.slow), False])
def test_relative_bias_buckets(bidirectional):
    """T5's, with 32 buckets and the default distance of 128."""
    table = np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)
    mod = score_mods.RelativeBias(table, bidirectional=bidirectional)
    expected = t5_bucket(KV - Q, 32, bidirectional, 128)
    # bucket 16 would be for keys after the query at distance 0, so T5 never uses it
    assert len(np.unique(expected)) == (31 if bidirectional else 32)
    np.testing.assert_array_equal(jax.jit(mod.bucket)(KV - Q), expected)
    np.testing.assert_allclose(call(mod), SCORE + table[expected, 1], rtol=1e-6)


def test_soft_cap_and_then():
    np.testing.assert_allclose(call(score_mods.SoftCap(2.0)), 2 * np.tanh(SCORE / 2), rtol=1e-5)
    double = lambda score, b, h, q, kv: 2 * score
    shift = lambda score, b, h, q, kv: score + h
    np.testing.assert_allclose(call(score_mods.then(double, shift)), 2 * SCORE + 1, rtol=1e-6)
    np.testing.assert_allclose(call(score_mods.then(shift, double)), 2 * (SCORE + 1), rtol=1e-6)
    three = score_mods.then(shift, double, score_mods.SoftCap(1.0))
    np.testing.assert_allclose(call(three), np.tanh(2 * (SCORE + 1)), rtol=1e-5)


ENDS = np.array([-(2**31), -(2**30) - 7, -3, 0, 2, 2**24 + 1, 2**24 + 4, 2**31 - 5, 2**31 - 1])


@pytest.mark.parametrize("dtype", [pytest.param(np.int32, marks=pytest.mark.slow), np.int64])
def test_distances_at_the_ends_of_int32(dtype):
    """Compared with Python integers, which do not overflow; float32 rounds large distances."""
    score = np.zeros((len(ENDS),) * 2, np.float32)
    offset = ENDS[None, :] - ENDS[:, None]
    q, kv = ENDS.astype(dtype)[:, None], ENDS.astype(dtype)[None, :]
    table = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
    with mod_semantics():
        mods = score_mods.Alibi(np.array([9.0, 0.5], np.float32)), score_mods.RelativeBias(table, False, 16)
        result, biased = jax.device_get(jax.jit(lambda: [mod(score, 0, 1, q, kv) for mod in mods])())
    np.testing.assert_allclose(result, -0.5 * abs(offset), rtol=1e-7)
    np.testing.assert_array_equal(np.asarray(result)[abs(offset) < 10], -0.5 * abs(offset[abs(offset) < 10]))
    nearest = {-1: 1, -2: 2, -3: 3}
    wanted = [0 if at >= 0 else nearest.get(at, 7 if at < -15 else 4) for at in offset.ravel()]
    near = (offset > -4) | (offset < -15)
    np.testing.assert_array_equal(biased[near], table[np.reshape(wanted, offset.shape), 1][near])


@pytest.mark.parametrize("cast", [np.uint8, np.int8, np.uint32, pytest.param(jnp.uint8, marks=pytest.mark.slow)])
def test_narrow_and_unsigned_positions_mean_the_same(cast):
    q, score = np.arange(9), np.zeros((9, 9), np.float32)
    for mod in (score_mods.Alibi(np.ones(1, np.float32)), score_mods.RelativeBias(np.arange(32.0)[:, None])):
        with mod_semantics():
            result, wanted = (mod(score, 0, 0, x[:, None], x[None, :]) for x in (cast(q), q))
        np.testing.assert_array_equal(result, wanted)
        assert len(np.unique(wanted)) > 8


def test_a_table_for_other_heads():
    alibi, bias = score_mods.Alibi(np.ones(3)), score_mods.RelativeBias(np.ones((8, 3)))
    for mod in (alibi, bias, score_mods.then(score_mods.SoftCap(2.0), alibi), score_mods.then(bias, lambda s, *at: s)):
        mod_check = functools.partial(check_fits, mod, 2)
        mod_check(3, 7, 7)
        with pytest.raises(ValueError, match=r"with N = 2 query heads, got shape \[.*3\]"):
            mod_check(2, 7, 7)


@pytest.mark.parametrize("make, message", [
    (lambda: score_mods.Alibi(3.0), r"slopes must be a float array \[N\], got float"),
    (lambda: score_mods.Alibi(np.arange(3)), "slopes must be a float array"),
    (lambda: score_mods.RelativeBias(np.ones(3)), r"table must be a float array \[num_buckets, N\]"),
    (lambda: score_mods.RelativeBias(np.ones((2, 3))), "2 buckets"),
    (lambda: score_mods.RelativeBias(np.ones((32, 3)), max_distance=8), "less than max_distance"),
    (lambda: score_mods.SoftCap(-1.0), "cap must be positive, got -1"),
    (lambda: score_mods.SoftCap(np.array(-1.0)), "cap must be positive, got -1"),
    (lambda: score_mods.SoftCap("2"), "cap must be a number or a scalar array, got str"),
    (lambda: score_mods.SoftCap(np.ones(3)), r"cap must be a number .* got shape \(3,\)"),
    (lambda: score_mods.then(score_mods.SoftCap), "must be callable, got the class SoftCap"),
    (lambda: score_mods.then(3), "must be callable|Expected type: .*ScoreMod"),
    (lambda: score_mods.then(), "at least one"),
])  # fmt: skip
def test_errors_name_the_argument(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
