"""``jattn.heads.statistics`` and what the modules sow of it, against plain loops over the weights in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads, masks

B, T, S, N, K, H = 2, 7, 11, 6, 3, 5
SEES = {
    "all": lambda b, h, q, kv: True,
    "causal": lambda b, h, q, kv: kv <= q,
    "window": lambda b, h, q, kv: q - 2 <= kv <= q + 1,
    "few, and no head of odd number": lambda b, h, q, kv: h % 2 == 0 and (q + kv + b) % 3 == 0,
}
OPTIONS = {
    "all": {},
    "causal": {"is_causal": True},
    "window": {"mask": masks.SlidingWindow(2, 1)},
    "few, and no head of odd number": {"mask": lambda b, h, q, kv: (h % 2 == 0) & ((q + kv + b) % 3 == 0)},
}


def reference(query, key, sees, q_at, kv_at, score=lambda s, q, kv: s):
    """Every statistic of every head, pair by pair."""
    found = {name: np.zeros((B, N)) for name in heads.STATISTICS}
    for b, n in np.ndindex(B, N):
        rows = {name: [] for name in heads.STATISTICS}
        for i, q in enumerate(q_at):
            there = [j for j, kv in enumerate(kv_at) if sees(b, n, q, kv)]
            if not there:
                continue
            scores = np.array(
                [score(query[b, i, n] @ key[b, j, n // (N // K)] / np.sqrt(H), q, kv_at[j]) for j in there]
            )
            p = np.exp(scores - scores.max())
            p /= p.sum()
            at = dict(zip((kv_at[j] for j in there), p, strict=True))
            if len(there) > 1:
                rows["entropy"].append(-np.sum(p * np.log(p)) / np.log(len(there)))
            rows["max_weight"].append(p.max())
            rows["distance"].append(sum(weight * abs(q - kv) for kv, weight in at.items()))
            rows["current_token"].append(at.get(q, 0.0))
            if q > 0:
                rows["previous_token"].append(at.get(q - 1, 0.0))
                rows["first_token"].append(at.get(0, 0.0))
        for name, values in rows.items():
            found[name][b, n] = np.mean(values) if values else 0.0
    return found


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(3)
    return rng.normal(size=(B, T, N, H)).astype(np.float32) * 2, rng.normal(size=(B, S, K, H)).astype(np.float32)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("shift", [0, 4])
def test_every_statistic_is_that_of_the_weights(arrays, name, shift):
    q_at, kv_at = np.arange(T) + shift, np.arange(S)
    positions = {"query_positions": q_at} if shift else {}
    found = jax.jit(lambda *both: heads.statistics(*both, **OPTIONS[name], **positions))(*arrays)
    expected = reference(*(x.astype(np.float64) for x in arrays), SEES[name], q_at, kv_at)
    assert found.keys() == set(heads.STATISTICS)
    for one, values in expected.items():
        np.testing.assert_allclose(found[one], values, rtol=1e-5, atol=1e-6, err_msg=one)


def test_score_functions_and_a_known_lse(arrays):
    def bend(score, b, h, q, kv):
        return score + 0.3 * (q - kv)

    with jax.numpy_dtype_promotion("standard"):
        _, lse = jattn.dot_product_attention(*arrays, arrays[1], score_mod=bend, return_residual=True)
        found = heads.statistics(*arrays, lse=lse, score_mod=bend)
    exact = [x.astype(np.float64) for x in arrays]
    expected = reference(*exact, SEES["all"], np.arange(T), np.arange(S), lambda s, q, kv: s + 0.3 * (q - kv))
    for one, values in expected.items():
        np.testing.assert_allclose(found[one], values, rtol=1e-5, atol=1e-6, err_msg=one)


def test_known_heads():
    """Uniform and causal: entropy 1. A perfect previous-token head: all its weight there."""
    n = 9
    flat = heads.statistics(jnp.zeros((n, 1, 4)), jnp.zeros((n, 1, 4)), is_causal=True)
    np.testing.assert_allclose(flat["entropy"], 1.0, rtol=1e-6)
    at = jnp.eye(n)[:, None]
    back = heads.statistics(1e3 * jnp.roll(at, -1, axis=2).at[0].set(0.0), at, is_causal=True)
    np.testing.assert_allclose(back["previous_token"], 1.0, atol=1e-6)
    assert back["entropy"] < 1e-6 and back["current_token"] < 0.2  # the first token sees itself alone


def test_long_sequences_take_memory_in_proportion():
    def temporaries(n):
        x = jnp.zeros((n, 1, 16))
        compiled = jax.jit(lambda q, k: heads.statistics(q, k, is_causal=True)).lower(x, x).compile()
        assert f"{n},{n}" not in compiled.as_text()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(16384) < 64 * 2**20


@pytest.mark.parametrize("names", [["entropy", "variance"], "entropy"])
def test_statistics_that_there_are_not(arrays, names):
    with pytest.raises(ValueError, match="names must be some of entropy, max_weight"):
        heads.statistics(*arrays, names=names)


def test_positions_that_differ_by_sequence(arrays):
    with pytest.raises(ValueError, match=r"query_positions that are the same for all sequences, \[7\], got \[2, 7\]"):
        heads.statistics(*arrays, query_positions=np.zeros((B, T), int))


# what the modules sow

LOOKS = {"causal": {"is_causal": True}, "gates": {"head_gate": np.array([1.0, 0.5, 0.0, 1.0], np.float32)}}


@pytest.mark.parametrize("length", [5, 33, 300])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_nnx_sows_statistics_of_the_output_s_own_weights(length, dtype):
    layer = jattn.nnx.MultiHeadAttention(
        4,
        24,
        num_kv_heads=2,
        qk_norm="rms",
        position=jattn.positions.Rotary(),
        sinks=True,
        dtype=dtype,
        rngs=nnx.Rngs(0),
    )
    layer.sinks[...] = jnp.array([0.0, 1.0, -1.0, 2.0])
    x = jax.random.normal(jax.random.key(1), (2, length, 24), dtype)
    looks = {"sow_weights": True, "sow_statistics": ("max_weight", "first_token", "entropy")}
    look = nnx.capture(lambda layer, x: layer(x, is_causal=True, **looks), nnx.Intermediate)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes
        alone = nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, x)
        beside, sown = nnx.jit(lambda layer, x: look(layer, x))(layer, x)
    np.testing.assert_array_equal(alone, beside)
    (found,), (weights,) = sown["attention_statistics"], sown["attention_weights"]
    weights, tolerance = np.asarray(weights, np.float64), 2e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(found["max_weight"], weights.max(-1).mean(-1), rtol=tolerance)
    np.testing.assert_allclose(found["first_token"], weights[:, :, 1:, 0].mean(-1), rtol=tolerance)
    assert found["entropy"].shape == (2, 4)


@pytest.mark.parametrize("look", LOOKS)
def test_linen_sows_statistics_beside_the_same_bits(look):
    layer = jattn.linen.MultiHeadAttention(4)
    x = jax.random.normal(jax.random.key(1), (3, 2, 9, 16))  # two batch axes
    if look == "gates":
        x = x[0]
    params = layer.init(jax.random.key(0), x)
    apply = functools.partial(layer.apply, params, **LOOKS[look])
    alone = jax.jit(apply)(x)
    beside, sown = jax.jit(
        lambda x: apply(x, sow_weights=True, sow_statistics=["distance"], mutable=["intermediates"])
    )(x)
    np.testing.assert_array_equal(alone, beside)
    (weights,), (found,) = (sown["intermediates"][f"attention_{one}"] for one in ("weights", "statistics"))
    distance = np.abs(np.arange(9)[:, None] - np.arange(9))
    np.testing.assert_allclose(found["distance"], (np.asarray(weights) * distance).sum(-1).mean(-1), rtol=1e-5)
    assert found["distance"].shape == x.shape[:-2] + (4,)


def test_another_attention_fn_has_no_statistics():
    layer = jattn.nnx.MultiHeadAttention(2, 8, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="sow_statistics: only for jattn's own attention_fn"):
        layer(jnp.zeros((1, 3, 8)), sow_statistics=["entropy"])
