"""``jattn.heads.divergence`` and ``coarse_weights``, at any length and compared with the matrices of weights."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import heads, masks
from jattn.heads import _divergence
from jattn.heads._statistics import _span_ends

B, T, S, N, K, H = 4, 7, 11, 6, 3, 5
OPTIONS = {
    "all": {},
    "causal": {"is_causal": True},
    "array by slot": {"mask": np.random.default_rng(0).random((B, 1, T, S)) > 0.4},
    "bias and positions": {"bias": np.linspace(0, 2, N * T * S, dtype=np.float32).reshape(N, T, S),
                           "query_positions": np.arange(T) + 4, "is_causal": True},
    "padding": {"query_seq_lengths": np.array([7, 4, 0, 5]), "key_value_seq_lengths": np.array([11, 3, 5, 1])},
    "window": {"mask": masks.SlidingWindow(2, 1)},
    "functions": {"mask": lambda b, h, q, kv: (kv + q + b + h) % 3 > 0, "score_mod": lambda s, b, h, q, kv: s - 0.3 * kv},
}  # fmt: skip


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(3)
    return rng.normal(size=(B, T, N, H)).astype(np.float32) * 2, rng.normal(size=(B, S, K, H)).astype(np.float32)


def entropy(p):
    return -sum(x * np.log2(x) for x in p if x > 0)


def slow(weights, eligible):
    """The divergence of ``weights [B,N,T,S]``, pattern by pattern and row by row."""

    def patterns(part):
        rows = {}
        for n, t in np.ndindex(N, T):
            seen = [w[n, t] for w, use in zip(weights[part], eligible[part], strict=True) if use[t] and w[n, t].any()]
            if seen:
                rows[n, t] = np.mean(seen, 0)
        return rows

    def js(one, other, i, j):
        both = [(one[i, t], other[j, t]) for t in range(T) if (i, t) in one and (j, t) in other]
        return [entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2 for p, q in both]

    mean = lambda values: np.mean(values) if values else 0.0
    even, odd = patterns(slice(0, None, 2)), patterns(slice(1, None, 2))
    pairs = np.array([[mean(js(even, odd, i, j) + js(even, odd, j, i)) for j in range(N)] for i in range(N)])
    return pairs, np.diagonal(pairs)


@pytest.mark.slow_except("all", "padding")
@pytest.mark.parametrize("name", OPTIONS)
def test_divergence_is_that_of_the_mean_patterns(arrays, name):
    eligible = np.random.default_rng(1).random((B, T)) > 0.2
    with jax.numpy_dtype_promotion("standard"):
        weights_of = lambda *both: jattn.attention_weights(*both, **OPTIONS[name])
        divergence = lambda *both: heads.divergence(*both, eligible=eligible, **OPTIONS[name])
        result, weights = jax.jit(lambda *both: (divergence(*both), weights_of(*both)))(*arrays)
    weights = np.asarray(weights, np.float64)
    for one, expected in zip(result, slow(weights, eligible), strict=True):
        np.testing.assert_allclose(one, expected, atol=1e-6)
    if name == "padding":
        with jax.numpy_dtype_promotion("standard"):
            eager = heads.divergence(*arrays, eligible=eligible, **OPTIONS[name])
        np.testing.assert_allclose(eager[0], result[0], atol=1e-6)


@pytest.mark.slow
def test_rows_that_do_not_fit_at_once_are_averaged_all_the_same():
    """Divergence is a mean over all rows, even if they are processed in several parts."""
    keys = _divergence.WEIGHTS // (2 * N)  # two rows of both sequences at a time, so the third is processed alone
    rng = np.random.default_rng(5)
    query, key = rng.normal(size=(2, 3, N, 2)), rng.normal(size=(2, keys // 2, 1, 2))
    query, key = query.astype(np.float32) * 2, key.astype(np.float32)
    divergence = jax.jit(heads.divergence)
    together = divergence(query, key)
    apart = [divergence(query[:, t : t + 1], key) for t in range(3)]
    for one, rows in zip(together, zip(*apart, strict=True), strict=True):
        np.testing.assert_allclose(one, np.mean(rows, 0), atol=1e-4)  # an extra row would change the mean by 0.01
    assert together[0].max() > 0.01


@pytest.mark.slow
def test_divergence_of_one_sequence_has_no_floor(arrays):
    query, key = (x[0] for x in arrays)
    between, floor = heads.divergence(query, key, is_causal=True)
    expected = heads.pattern_divergence(jattn.attention_weights(query, key, is_causal=True))
    np.testing.assert_allclose(between, expected, atol=1e-6)
    assert np.isnan(floor).all()


def test_equal_heads_are_0_apart_and_opposite_ones_1_never_more():
    """Some tools report sums over rows, which exceed the maximum of this divergence, ln 2 nats."""
    position = 9 * np.eye(9, dtype=np.float32)  # scores of 27 or 0; larger ones round in the exponent
    query = np.stack([position, np.roll(position, 1, 1), position], 1)  # heads 0 and 2: itself; head 1: the next
    between, floor = heads.divergence(np.stack([query, query]), np.stack([position[:, None] * np.ones((1, 3, 1))] * 2))
    np.testing.assert_allclose(between, [[0, 1, 0], [1, 0, 1], [0, 1, 0]], atol=1e-5)
    assert between.max() <= 1.0 + 1e-6
    np.testing.assert_allclose(floor, 0, atol=1e-5)


def test_heads_that_look_for_content_differ_from_themselves():
    """Without the noise floor, a random content head seems to specialise."""
    rng = np.random.default_rng(0)
    content = 3 * rng.normal(size=(8, 32, 2, 8)).astype(np.float32)
    place = np.broadcast_to(3 * rng.normal(size=(32, 2, 8)).astype(np.float32), content.shape)
    _, floor = heads.divergence(content, content[:, :, ::-1])
    _, none = heads.divergence(place, place)
    assert (floor > 0.3).all() and np.abs(none).max() < 1e-6


@pytest.mark.slow
def test_the_floor_is_as_noisy_as_the_divergence():
    """Heads of the same distribution differ as much from each other as from themselves: the floor hides nothing."""
    rng = np.random.default_rng(1)
    for sequences in (8, 32):
        query, key = (2 * rng.normal(size=(sequences, 24, 4, 8)).astype(np.float32) for _ in range(2))
        between, floor = heads.divergence(query, key)
        apart = between[np.triu_indices(4, 1)]
        np.testing.assert_allclose(apart.mean(), floor.mean(), rtol=0.1)
        np.testing.assert_allclose(between, between.T, atol=1e-6)


def test_a_half_without_rows_has_no_floor(arrays):
    _, floor = heads.divergence(*arrays, eligible=np.array([True, False] * 2)[:, None] & np.ones((B, T), bool))
    assert np.isnan(floor).all()


def test_nothing_at_all_and_nothing_hidden(arrays):
    (query, key), divergence = arrays, jax.jit(heads.divergence)
    for lead in ((0, T), (B, 0)):
        none = np.zeros((*lead, N, H), np.float32), np.zeros((lead[0], S, K, H), np.float32)
        between, floor = jax.device_get(divergence(*none))
        assert (between == 0).all() and np.isnan(floor).all()
    none = np.zeros((B, 0, N, H), np.float32), np.zeros((B, 0, K, H), np.float32)
    empty = jax.jit(lambda *none: heads.statistics(*none, names=["offset_profile"]))(*none)
    assert empty["offset_profile"].shape == (B, N, 0)
    spoiled = query.copy()
    spoiled[0, 3, 1] = np.nan
    between, _ = jax.device_get(divergence(spoiled, key))
    assert np.isnan(between[1]).all() and np.isfinite(np.delete(np.delete(between, 1, 0), 1, 1)).all()


@pytest.mark.slow_except("64")
@pytest.mark.parametrize("size", [1, 3, 7, 64])
def test_coarse_weights_are_blocks_of_the_matrix(arrays, size):
    result = jax.jit(lambda *arrays: heads.coarse_weights(*arrays, size, is_causal=True))(*arrays)
    weights = np.asarray(jattn.attention_weights(*arrays, is_causal=True), np.float64)
    rows, columns = min(size, T), min(size, S)
    expected = np.zeros((B, N, rows, columns))
    for t, s in np.ndindex(T, S):
        expected[:, :, t * rows // T, s * columns // S] += weights[:, :, t, s]
    np.testing.assert_allclose(result, expected / expected.sum(-1, keepdims=True), atol=1e-6)
    if size == 3:
        one = heads.coarse_weights(arrays[0][0], arrays[1][0], size, is_causal=True)
        np.testing.assert_allclose(one, result[0], atol=1e-6)


@pytest.mark.slow
def test_coarse_weights_of_rows_that_see_nothing_are_0(arrays):
    result = heads.coarse_weights(*arrays, 7, query_seq_lengths=np.array([7, 4, 0, 5]))
    sums = result.sum(-1).round(5)[:, 0]
    np.testing.assert_array_equal(sums, [[1] * 7, [1] * 4 + [0] * 3, [0] * 7, [1] * 5 + [0] * 2])


@pytest.mark.parametrize(("length", "spans"), [(7, 7), (11, 4), (60_000, 40_000), (2**31 - 1, 3), (0, 0)])
def test_spans_of_a_sequence_whose_length_times_their_number_exceeds_32_bits(length, spans):
    ends = _span_ends(length, spans)
    assert ends.dtype == np.int32 and ends[0] == 0 and ends[-1] == length
    for i in [*range(min(spans, 3)), *range(max(spans - 3, 0), spans)]:
        assert {int(t) * spans // length for t in (ends[i], ends[i + 1] - 1)} == {i}


@pytest.mark.slow
def test_coarse_weights_of_many_spans_miss_no_key():
    result = np.asarray(heads.coarse_weights(jnp.zeros((1, 1, 1)), jnp.zeros((60_000, 1, 1)), 40_000))
    expected = np.bincount(np.arange(60_000) * 40_000 // 60_000) / 60_000
    np.testing.assert_allclose(result, expected[None, None], rtol=1e-3)


@pytest.mark.parametrize("eligible", [np.ones((B, T)), np.ones((T, B), bool), np.ones(S, bool)])
@pytest.mark.parametrize("measure", [heads.divergence, heads.statistics])
def test_eligible_of_another_kind_is_named(arrays, eligible, measure):
    shape = re.escape(str([*eligible.shape]))
    with pytest.raises(ValueError, match=rf"eligible must be bool \[B, T\] = \[4, 7\] or \[T\], got .*{shape}"):
        measure(*arrays, eligible=eligible)
