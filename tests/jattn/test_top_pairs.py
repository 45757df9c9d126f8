"""``heads.top_pairs``, against a sort of all scores in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
from jattn import heads, masks
from jattn.kernels.blockwise import Blockwise
from tests import reference

B, T, S, N, K, H = 2, 7, 11, 6, 3, 2
SMALL = Blockwise((3, 4))  # divides neither length
OPTIONS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"mask": masks.SlidingWindow(2, 4)},
    "few, and no head of odd number": {"mask": lambda b, h, q, kv: (h % 2 == 0) & ((q + kv + b) % 3 == 0)},
    "lengths": {"key_value_seq_lengths": np.array([0, 5])},
    "positions": {"is_causal": True, "query_positions": np.arange(T)[::-1].copy(), "kv_positions": np.arange(S) - 3},
}
SEES = {
    "all": lambda b, h, q, kv: np.True_,
    "causal": lambda b, h, q, kv: kv <= q,
    "window": lambda b, h, q, kv: (q - 2 <= kv) & (kv <= q + 4),
    "few, and no head of odd number": OPTIONS["few, and no head of odd number"]["mask"],
    "lengths": lambda b, h, q, kv: kv < np.array([0, 5])[b],
    "positions": lambda b, h, q, kv: kv - 3 <= T - 1 - q,
}


def integers(*shape, seed=0):
    """Queries or keys whose products are exact, and often equal."""
    return np.random.default_rng([seed, *shape]).integers(-2, 3, shape).astype(np.float32)


def inputs():
    return integers(B, T, N, H, seed=1), integers(B, S, K, H, seed=2)


def scores_of(query, key):
    return np.einsum("btnh,bsnh->bnts", query, key.repeat(query.shape[2] // key.shape[2], 2))


def expected(query, key, k, visible=True):
    """``weight, key [B,N,T,k]``, from all scores: the largest, of equal ones the first."""
    scores = np.where(visible, scores_of(query, key), -np.inf)
    visible = np.broadcast_to(visible, scores.shape)
    order = np.argsort(-scores, -1, kind="stable")[..., :k]
    weight, seen = (np.take_along_axis(x, order, -1) for x in (reference.softmax(scores, visible), visible))
    missing = [(0, 0)] * 3 + [(0, k - order.shape[-1])]
    return np.pad(weight * seen, missing), np.pad(np.where(seen, order, -1), missing, constant_values=-1)


def check(result, wanted):
    weight, key = wanted
    np.testing.assert_array_equal(result.key, key)
    np.testing.assert_allclose(result.weight, weight, rtol=1e-5)
    assert result.weight.dtype == np.float32 and result.key.dtype == np.int32


@functools.partial(jax.jit, static_argnums=(2,), static_argnames=("name", "implementation"))
def top_pairs(query, key, k, *, name="all", implementation=SMALL, **options):
    return heads.top_pairs(query, key, k, scale=1.0, implementation=implementation, **OPTIONS[name], **options)


@pytest.mark.slow_except("few, and no head of odd number", "window")
@pytest.mark.parametrize("name", OPTIONS)
def test_the_largest_are_those_of_a_sort_and_ties_come_in_slot_order(name):
    b, h, q, kv = np.ogrid[:B, :N, :T, :S]
    query, key = inputs()
    check(top_pairs(query, key, 3, name=name), expected(query, key, 3, SEES[name](b, h, q, kv)))


def test_more_than_there_are_keys():
    query, key = inputs()
    result = top_pairs(query, key, S + 2)
    check(result, expected(query, key, S + 2))
    assert (result.key[..., S:] == -1).all() and (result.weight[..., S:] == 0).all()


def test_long_rows():
    """In one block of 1003 keys, which are first compared in groups: few large scores, and more the smaller they are."""
    query = np.eye(5, dtype=np.float32)[None, :, None]
    key = np.random.default_rng(3).geometric(0.5, (1, 1003, 1, 5)).astype(np.float32)
    check(top_pairs(query, key, 6, implementation=None), expected(query, key, 6))


class TestOfHeads:
    def test_the_largest_weights_of_each_head(self):
        query, key = inputs()
        p = reference.softmax(scores_of(query, key), np.tri(T, S, dtype=bool))
        weight, q, kv = top_pairs(query, key, 3, name="causal").of_heads()
        assert weight.shape == q.shape == kv.shape == (B, N, 3)
        for b, n in np.ndindex(B, N):
            np.testing.assert_allclose(weight[b, n], np.sort(p[b, n].ravel())[::-1][:3], rtol=1e-5)
            np.testing.assert_allclose(weight[b, n], p[b, n, q[b, n], kv[b, n]], rtol=1e-5)
            assert len(set(zip(q[b, n].tolist(), kv[b, n].tolist(), strict=True))) == 3

    def test_of_equal_weights_the_first(self):
        query, key = inputs()
        result = top_pairs(0 * query, key, 2, name="causal", lse=np.ones((B, T, N), np.float32)).of_heads()
        weight, q, kv = map(np.asarray, result)
        assert (weight == weight[0, 0, 0]).all() and (q == [0, 1]).all() and (kv == [0, 0]).all()

    def test_a_head_that_sees_nothing(self):
        weight, q, kv = top_pairs(*inputs(), 3, name="few, and no head of odd number").of_heads()
        assert (weight[:, 1::2] == 0).all() and (q[:, 1::2] == -1).all() and (kv[:, 1::2] == -1).all()
        assert (weight[:, ::2] > 0).all() and (q[:, ::2] >= 0).all() and (kv[:, ::2] >= 0).all()


class TestEdges:
    def test_no_keys(self):
        query, key = inputs()
        result = heads.top_pairs(query, key[:, :0], 2)
        assert result.weight.shape == result.key.shape == (B, N, T, 2)
        assert (result.weight == 0).all() and (result.key == -1).all()

    def test_no_queries(self):
        query, key = inputs()
        result = heads.top_pairs(query[:, :0], key, 2)
        assert result.key.shape == (B, N, 0, 2)
        assert [x.shape for x in result.of_heads()] == [(B, N, 0)] * 3

    def test_a_weight_that_underflows_has_its_key(self):
        query, key = np.full((1, 1, 1, 1), 300.0, np.float32), np.array([0, 2, 1], np.float32).reshape(1, 3, 1, 1)
        result = top_pairs(query, key, 4)
        assert result.key.tolist() == [[[[1, 2, 0, -1]]]] and result.weight.tolist() == [[[[1, 0, 0, 0]]]]

    def test_nan_in_a_visible_score_shows_in_the_rows_that_see_it(self):
        query, key = inputs()
        bad = key.copy()
        bad[:, 3] = np.nan
        result, clean = top_pairs(query, bad, 2, name="causal"), top_pairs(query, key, 2, name="causal")
        assert np.isnan(result.weight[:, :, 3:]).all() and (np.asarray(result.key)[:, :, 3:] == [0, 1]).all()
        for got, wanted in zip(result, clean, strict=True):
            np.testing.assert_array_equal(got[:, :, :3], wanted[:, :, :3])

    def test_with_a_given_lse_only_the_nan_itself_shows(self):
        query, key = inputs()
        key[:, 3] = np.nan
        result = top_pairs(query, key, 2, name="causal", lse=np.ones((B, T, N), np.float32))
        assert (result.key[:, :, 3:, 0] == 3).all() and np.isnan(result.weight[:, :, 3:, 0]).all()
        assert np.isfinite(result.weight[:, :, :3]).all() and np.isfinite(result.weight[..., 1]).all()


class TestTransformations:
    @pytest.mark.slow
    def test_one_sequence_and_vmap(self):
        query, key = inputs()
        result = top_pairs(query, key, 2, name="causal")
        alone = top_pairs(query[0], key[0], 2, name="causal")
        mapped = jax.vmap(lambda q, k: top_pairs(q, k, 2, name="causal"))(query, key)
        for one, all_sequences, wanted in zip(alone, mapped, result, strict=True):
            np.testing.assert_array_equal(one, wanted[0])
            np.testing.assert_array_equal(all_sequences, wanted)

    @pytest.mark.slow
    def test_eager_is_compiled_and_leaks_nothing(self):
        query, key = inputs()
        with jax.checking_leaks():
            result = heads.top_pairs(query, key, 2, scale=1.0, implementation=SMALL)
        for got, wanted in zip(result, top_pairs(query, key, 2), strict=True):
            np.testing.assert_array_equal(got, wanted)

    @pytest.mark.slow_except("bfloat16")
    @pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
    def test_dtypes(self, dtype):
        query, key = inputs()
        with jax.enable_x64(True):
            result = top_pairs(jnp.asarray(query, dtype), jnp.asarray(key, dtype), 3)
            assert result.weight.dtype == ("float64" if dtype == "float64" else "float32")
            assert result.key.dtype == np.int32
            weight, slots = expected(query, key, 3)
            np.testing.assert_array_equal(result.key, slots)
            np.testing.assert_allclose(result.weight, weight, rtol=1e-5)

    @pytest.mark.slow
    def test_the_weights_are_differentiable(self):
        query, key = (np.random.default_rng(i).normal(size=x.shape).astype(np.float32) for i, x in enumerate(inputs()))
        slots = top_pairs(query, key, 2, name="causal").key

        def of_dense(query):
            weights = jattn.attention_weights(query, key, scale=1.0, is_causal=True)
            return jnp.sin(jnp.where(slots < 0, 0.0, jnp.take_along_axis(weights, jnp.maximum(slots, 0), -1))).sum()

        result = jax.grad(lambda query: jnp.sin(top_pairs(query, key, 2, name="causal").weight).sum())(query)
        np.testing.assert_allclose(result, jax.grad(of_dense)(query), rtol=1e-4, atol=1e-6)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto], ids=str)
    def test_on_a_mesh(self, kind):
        query, key = integers(2, T, 4, H, seed=1), integers(2, S, 2, H, seed=2)
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind, kind))
        with jax.set_mesh(mesh):
            sharding = NamedSharding(mesh, PartitionSpec("data", None, "model"))
            placed = [jax.device_put(x, sharding) for x in (query, key)]
            result = jax.jit(lambda q, k: heads.top_pairs(q, k, 3, scale=1.0))(*placed)
        assert result.key.sharding.spec[:2] == ("data", "model")
        check(result, expected(query, key, 3))


def test_k_is_checked():
    with pytest.raises(ValueError, match="k must be a positive integer, got 0"):
        heads.top_pairs(*inputs(), 0)
