"""``jattn.heads.statistics``, also as sown by the modules, against the weights in float64."""

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
from jattn.kernels.blockwise import Blockwise
from jattn.sharding import Ring
from tests import reference
from tests.reference import definitions
from tests.ring_cases import mesh_of

B, T, S, N, K, H = 2, 7, 11, 6, 3, 5
FEW = "few, and no head of odd number"
SEES = {
    "all": lambda b, h, q, kv: np.True_,
    "causal": lambda b, h, q, kv: kv <= q,
    "window": lambda b, h, q, kv: (q - 2 <= kv) & (kv <= q + 1),
    FEW: lambda b, h, q, kv: (h % 2 == 0) & ((q + kv + b) % 3 == 0),
}
OPTIONS = {"all": {}, "causal": {"is_causal": True}, "window": {"mask": masks.SlidingWindow(2, 1)}, FEW: {"mask": SEES[FEW]}}  # fmt: skip


def expected_statistics(query, key, name, q_at, added=0.0, tokens=None):
    """All statistics of all heads, of queries at these positions and keys at their slots."""
    T, S = query.shape[1], key.shape[1]
    where = definitions.places(B, N, q_at, np.arange(S))
    visible = np.broadcast_to(SEES[name](*where), (B, N, T, S))
    scores = reference.attend(query, key, key, visible).scores + added
    slots = np.arange(T), np.arange(S)
    return reference.statistics(scores, visible, *where[2:], slots=slots, tokens=tokens)


def check(result, expected, names=None):
    for name in names or [name for name in heads.STATISTICS if name in result]:
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(result["support"][name], expected[f"support {name}"], err_msg=name)


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(3)
    return rng.normal(size=(B, T, N, H)).astype(np.float32) * 2, rng.normal(size=(B, S, K, H)).astype(np.float32)


@functools.cache
def at_positions(name):
    return jax.jit(lambda q, k, at: heads.statistics(q, k, query_positions=at, **OPTIONS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("at", ["slots", "shifted", "by sequence"])
def test_every_statistic_is_that_of_the_weights(arrays, name, at):
    by_sequence = np.array([np.arange(T), np.arange(T) + 4])
    q_at = {"slots": np.arange(T), "shifted": np.arange(T) + 4, "by sequence": by_sequence}[at]
    if at == "slots":
        result = jax.jit(lambda *both: heads.statistics(*both, **OPTIONS[name]))(*arrays)
    else:
        result = at_positions(name)(*arrays, np.broadcast_to(q_at, (B, T)))
    assert result.keys() == {*heads.STATISTICS, "support"} - {*heads.OF_TOKENS}
    check(result, expected_statistics(*arrays, name, q_at))


@pytest.mark.slow_except("window")
@pytest.mark.parametrize("name", OPTIONS)
def test_statistics_of_tokens(name):
    rng = np.random.default_rng(4)
    query, key = (rng.normal(size=(B, S, heads_, H)).astype(np.float32) for heads_ in (N, K))
    tokens = rng.integers(0, 4, (B, S))
    look = jax.jit(lambda q, k, tokens: heads.statistics(q, k, tokens=tokens, names=heads.OF_TOKENS, **OPTIONS[name]))
    result = look(query, key, tokens)
    check(result, expected_statistics(query, key, name, np.arange(S), tokens=tokens), heads.OF_TOKENS)
    if name == "causal":
        one = heads.statistics(query[0], key[0], tokens=tokens[0], names=["induction"], **OPTIONS[name])
        np.testing.assert_allclose(one["induction"], result["induction"][0], rtol=1e-6)


@pytest.mark.slow
def test_in_blocks_of_any_size(arrays):
    """Also blocks that extend past the end."""
    result = jax.jit(lambda *both: heads.statistics(*both, is_causal=True, implementation=Blockwise((3, 4))))(*arrays)
    assert set(result) == {*heads.STATISTICS, "support"} - set(heads.OF_TOKENS)
    check(result, expected_statistics(*arrays, "causal", np.arange(T)))


@pytest.mark.slow
def test_score_functions_and_a_known_lse(arrays):
    def bend(score, b, h, q, kv):
        return score + 0.3 * (q - kv)

    with jax.numpy_dtype_promotion("standard"):

        @jax.jit
        def look(query, key):
            _, lse = jattn.dot_product_attention(query, key, key, score_mod=bend, return_residual=True)
            return heads.statistics(query, key, lse=lse, score_mod=bend)

        result = look(*arrays)
    assert (result["support"]["max_weight"] == T).all()
    added = 0.3 * (np.arange(T)[:, None] - np.arange(S))
    check(result, expected_statistics(*arrays, "all", np.arange(T), added))


def test_distance_of_positions_further_apart_than_int32_counts():
    query, key = np.float32(np.random.default_rng(0).normal(size=(2, 1, 3, 2, 4)))
    ends = np.array([-(2**31), 0, 2**31 - 1]), np.array([2**31 - 1, -7, -(2**31)])
    positions = {"query_positions": ends[0].astype(np.int32), "kv_positions": ends[1].astype(np.int32)}

    @jax.jit
    def both(query, key):
        result = heads.statistics(query, key, names=["distance"], **positions)["distance"]
        return result, jattn.attention_weights(query, key, **positions)

    result, weights = both(query, key)
    weights = np.asarray(weights, np.float64)
    wanted = (weights * abs(ends[0][:, None] - ends[1])).sum(-1).mean(-1)
    np.testing.assert_allclose(result, wanted, rtol=1e-5)


@pytest.mark.slow
def test_gradients_of_entropy_and_distance():
    """Compared with the derivatives of the dense formula."""
    query, key = (jax.random.normal(jax.random.key(i), (5, 2, 3)) for i in range(2))

    def folded(query, key):
        result = heads.statistics(query, key, is_causal=True, names=["entropy", "distance"])
        return (result["entropy"] * jnp.array([1.0, 2.0]) + result["distance"]).sum()

    def dense(query, key):
        weights = jattn.attention_weights(query, key, is_causal=True)
        distance = abs(jnp.arange(5.0)[:, None] - jnp.arange(5.0)[None])
        entropies = jax.vmap(lambda one: heads.entropy(one, jnp.tril(jnp.ones((5, 5), bool))))(weights)
        return (entropies * jnp.array([1.0, 2.0])).sum() + (weights * distance[None]).sum() / 5

    for got, wanted in zip(*(jax.jit(jax.grad(fn, (0, 1)))(query, key) for fn in (folded, dense)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-6)


# heads with known roles, built by hand

LENGTH, SEQUENCES, WIDE = 64, 8, 4


@pytest.fixture(scope="module")
def known():
    """``{role: statistics, mean over sequences}``; scores are 50 on the keys of the role and 0 elsewhere."""
    rng = np.random.default_rng(5)
    tokens = rng.integers(0, 32, (SEQUENCES, LENGTH))
    for i in range(1, LENGTH):  # no token twice in a row, or a token would be its own continuation
        tokens[:, i] = np.where(tokens[:, i] == tokens[:, i - 1], (tokens[:, i] + 1) % 32, tokens[:, i])
    q, kv = np.arange(LENGTH)[:, None], np.arange(LENGTH)[None, :]
    same = (tokens[:, :, None] == tokens[:, None, :]) & (kv < q)
    after = np.concatenate([np.zeros((SEQUENCES, LENGTH, 1), bool), same[:, :, :-1]], 2)
    roles = {
        "previous": kv == q - 1, "current": kv == q, "first": kv == 0, "three back": kv == q - 3,
        "duplicate": same, "induction": after, "uniform": kv < 0, "window": kv > q - WIDE,
        "delimiter": kv % 8 == 5,
    }  # fmt: skip
    patterns = np.stack([np.broadcast_to(one, same.shape) for one in roles.values()], 2)  # [B,T,N,S]
    scale = 50.0 * np.sqrt(LENGTH)
    key = np.broadcast_to(np.eye(LENGTH, dtype=np.float32)[:, None], (SEQUENCES, LENGTH, 1, LENGTH))
    look = jax.jit(lambda *arrays, tokens: heads.statistics(*arrays, tokens=tokens, is_causal=True))
    result = look((patterns * scale).astype(np.float32), key, tokens=tokens)
    return {role: {name: np.mean(x[:, i], 0) for name, x in result.items() if name != "support"} for i, role in enumerate(roles)}  # fmt: skip


DETECTORS = {
    "previous_token": "previous", "current_token": "current", "first_token": "first", "duplicate_token": "duplicate",
    "induction": "induction",
}  # fmt: skip


@pytest.mark.slow_except("induction")
@pytest.mark.parametrize("name", DETECTORS)
def test_a_detector_knows_its_own_kind_alone(known, name):
    chance = known["uniform"][name]
    for role, result in known.items():
        if role == DETECTORS[name]:
            assert result[name] >= 0.99, role
        elif (role, name) != ("window", "previous_token") and (role, name) != ("window", "current_token"):
            assert result[name] <= chance + 0.05, role
    assert chance < 0.2
    if name in ("previous_token", "current_token"):
        np.testing.assert_allclose(known["window"][name], 1 / WIDE, atol=0.05)


def test_profiles_and_spread_of_known_heads(known):
    np.testing.assert_allclose(known["uniform"]["entropy"], 1.0, rtol=1e-5)  # also for a causal head
    assert known["previous"]["entropy"] < 0.01 < known["window"]["entropy"] < 0.8
    assert known["three back"]["offset_profile"].argmax() == LENGTH - 1 - 3
    assert known["three back"]["offset_profile"].max() > 0.99
    np.testing.assert_allclose(known["three back"]["distance"], 3, atol=0.2)
    assert known["first"]["received"].argmax() == 0 and known["first"]["received"][0] > LENGTH - 0.01
    np.testing.assert_allclose(known["first"]["max_logit"], 50.0, rtol=1e-5)


def test_a_delimiter_head_gives_its_weight_to_delimiters_alone(known):
    """Weight on a set of keys is a sum over ``received``; queries before the first of the set add nothing."""
    on_set = {role: result["received"][5::8].sum() / (LENGTH - 5) for role, result in known.items()}
    assert on_set.pop("delimiter") >= 0.99
    assert abs(on_set["uniform"] - 1 / 8) < 0.05
    assert all(weight <= on_set["uniform"] + 0.05 for weight in on_set.values()), on_set


def test_weight_on_a_set_of_keys_and_its_null(arrays):
    """The set differs by sequence; the null, from queries of 0, is the set's share of the keys that a query sees."""
    query, key = arrays[0], arrays[1][:, :T]
    chosen = np.random.default_rng(8).random((B, T)) < 0.4
    one, other = np.cumsum(chosen, 1), np.cumsum(~chosen, 1)
    both = (one > 0) & (other > 0)
    assert (both.sum(1) > 1).all() and (both.sum(1) < T).all()
    look = jax.jit(lambda q, k: heads.statistics(q, k, is_causal=True, names=["received"], eligible=both))

    def on_set(query):
        seen = jax.tree.map(np.asarray, look(query, key))
        return np.sum(seen["received"] * chosen[:, None], -1) / seen["support"]["received"]

    p = np.asarray(jattn.attention_weights(query, key, is_causal=True), np.float64)  # [B,N,T,S]
    result, null = on_set(query), on_set(0 * query)
    for b in range(B):
        expected = (p[b] * chosen[b]).sum(-1)[:, both[b]].mean(-1)
        np.testing.assert_allclose(result[b], expected, rtol=1e-5)
        of_visible = (one / (one + other))[b, both[b]].mean()
        np.testing.assert_allclose(null[b], np.full(N, of_visible), rtol=1e-5)


LONG = {  # with the shape of query and key
    "statistics": (lambda q, k, tokens: heads.statistics(q, k, tokens=tokens, is_causal=True), (32768, 1, 64)),
    "top pairs": (lambda q, k, tokens: heads.top_pairs(q, k, 4, is_causal=True), (32768, 2, 64)),
    "divergence": (lambda q, k, tokens: heads.divergence(q[None], k[None], is_causal=True), (65536, 2, 8)),
}


@pytest.mark.slow_except("divergence")
@pytest.mark.parametrize("look, shape", LONG.values(), ids=LONG)
def test_long_sequences_take_memory_in_proportion(look, shape):
    x, tokens = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    compiled = jax.jit(look).lower(x, x, tokens).compile()
    assert f"{shape[0]},{shape[0]}" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 64 * 2**20


@pytest.mark.slow
def test_equal_to_dense_at_1024():
    n, rng = 1024, np.random.default_rng(6)
    query, key = (rng.normal(size=(n, 2, 64)).astype(np.float32) for _ in range(2))
    tokens = rng.integers(0, 50, n)
    look = jax.jit(lambda *arrays, tokens: heads.statistics(*arrays, tokens=tokens, is_causal=True))
    result = look(query, key, tokens=tokens)
    weights = jax.jit(lambda *arrays: jattn.attention_weights(*arrays, is_causal=True))(query, key)
    p, visible = np.asarray(weights, np.float64), np.tri(n, dtype=bool)
    position, same = np.arange(n), (tokens[:, None] == tokens[None]) & np.tri(n, k=-1, dtype=bool)
    after = np.pad(same, ((0, 0), (1, 0)))[:, :-1]
    rows = {
        "entropy": (-(p * np.log(np.where(visible, p, 1.0))).sum(-1) / np.log(np.maximum(position, 1) + 1))[:, 1:],
        "max_weight": p.max(-1),
        "distance": (p * abs(position[:, None] - position)).sum(-1),
        "previous_token": p[:, position[1:], position[:-1]],
        "current_token": p[:, position, position],
        "first_token": p[:, 1:, 0],
        "duplicate_token": (p * same).sum(-1)[:, same.any(1)],
        "induction": (p * after).sum(-1)[:, same.any(1)],
    }
    for name, values in rows.items():
        np.testing.assert_allclose(result[name], values.mean(-1), rtol=1e-5, atol=1e-6, err_msg=name)
        assert (result["support"][name] == values.shape[-1]).all()
    np.testing.assert_allclose(result["received"], p.sum(-2), rtol=1e-5, atol=1e-5)
    profile = [np.diagonal(p, offset, 1, 2).mean(-1) for offset in range(1 - n, n)]
    np.testing.assert_allclose(result["offset_profile"], np.stack(profile, -1), rtol=1e-4, atol=1e-5)
    scores = np.einsum("tnh,snh->nts", query, key)[:, visible] / 8
    np.testing.assert_allclose(result["max_logit"], scores.max(-1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(B, T), (T,)])
def test_queries_that_are_not_eligible_count_nowhere(arrays, shape):
    eligible = np.random.default_rng(5).random(shape) > 0.4
    window = masks.SlidingWindow(2, 1)
    result = jax.jit(lambda *arrays: heads.statistics(*arrays, eligible=eligible, mask=window))(*arrays)
    q, kv = np.arange(T)[:, None], np.arange(S)
    rows = np.broadcast_to(eligible, (B, T))[:, None, :, None]
    look = jax.jit(lambda *arrays, mask: heads.statistics(*arrays, mask=mask))
    hidden = look(*arrays, mask=(kv - q <= 1) & (q - kv <= 2) & rows)
    assert 0 < eligible.sum() < eligible.size
    for name, values in hidden.items():
        if name != "support":
            np.testing.assert_allclose(result[name], values, rtol=1e-5, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(result["support"][name], hidden["support"][name])


@pytest.mark.slow
def test_a_nan_is_never_hidden_and_never_spread(arrays):
    query = arrays[0].copy()
    query[0, 3, 1] = np.nan
    look = jax.jit(lambda *arrays, eligible: heads.statistics(*arrays, eligible=eligible))
    seen = look(query, arrays[1], eligible=np.ones(T, bool))
    assert np.isnan(seen["max_weight"][0, 1]) and np.isfinite(np.delete(seen["max_weight"], 1, 1)).all()
    unseen = look(query, arrays[1], eligible=np.arange(T) != 3)
    expected = look(*arrays, eligible=np.arange(T) != 3)
    for name in heads.STATISTICS[:9]:
        np.testing.assert_allclose(unseen[name], expected[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("implementation", [None, pytest.param("ring", marks=pytest.mark.slow)])
def test_a_nan_among_many_numbers(implementation):
    """As many as those from which on ``jnp.max`` loses it on a CPU; of a ring's devices, at any size."""
    rng, (length, count) = np.random.default_rng(0), (1056, 4)
    query, key = (rng.normal(size=(1, length, count, 4)).astype(np.float32) for _ in range(2))
    query[0, length - 1, 1] = query[:, :, 3] = np.nan
    how = None if implementation is None else Ring(mesh_of(4), "sequence")
    look = jax.jit(lambda *both, tokens: heads.statistics(*both, tokens=tokens, is_causal=True, implementation=how))
    result = look(query, key, tokens=rng.integers(0, 9, (1, length)))
    assert result.pop("support")["max_logit"].tolist() == [[length] * 4]
    for name, x in result.items():
        nan = np.isnan(np.asarray(x[0])).reshape(count, -1).any(1)
        assert nan.tolist() == [False, True, False, True], name


@pytest.mark.slow
def test_sinks_do_not_make_a_query_see(arrays):
    options = {"query_seq_lengths": np.array([3, 0])}
    sinks = np.full(N, -30.0, np.float32)

    @jax.jit
    def look(query, key):
        _, lse = jattn.dot_product_attention(query, key, key, sinks=sinks, return_residual=True, **options)
        return heads.statistics(query, key, lse=lse, **options), heads.statistics(query, key, **options)

    result, expected = look(*arrays)
    for name in heads.STATISTICS[:9]:
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
        np.testing.assert_array_equal(result["support"][name], expected["support"][name])


def test_the_largest_score_beside_sinks_that_leave_no_weight(arrays):
    """Weights of e^-200 are 0 in float32, but their logarithms are finite. Names may come from a generator."""
    query, key = arrays

    @jax.jit
    def both(query, key):
        sinks = np.full(N, 200.0, "f")
        _, lse = jattn.dot_product_attention(query, key, key, is_causal=True, sinks=sinks, return_residual=True)
        names = (name for name in ("max_logit",))
        result = heads.statistics(query, key, lse=lse, is_causal=True, names=names)["max_logit"]
        return result, heads.statistics(query, key, is_causal=True, names=["max_logit"])["max_logit"]

    result, expected = both(query, key)
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize("names", [["entropy", "variance"], "entropy"])
def test_statistics_that_there_are_not(arrays, names):
    with pytest.raises(ValueError, match="names must be some of entropy, max_weight"):
        heads.statistics(*arrays, names=names)


@pytest.mark.parametrize("tokens", [np.zeros((B, T), int), np.zeros(S, int), np.zeros((B, S))])
def test_tokens_of_another_shape(arrays, tokens):
    query = np.concatenate([arrays[0], arrays[0]], 1)[:, :S]
    with pytest.raises(ValueError, match=r"tokens must be integers \[2, 11\]"):
        heads.statistics(query, arrays[1], tokens=tokens)
    with pytest.raises(ValueError, match="need tokens="):
        heads.statistics(query, arrays[1], names=["induction"])


# what the modules sow

LENGTHS = [(33, jnp.float32), (300, jnp.bfloat16), (5, jnp.float32), (300, jnp.float32), (5, jnp.bfloat16), (33, jnp.bfloat16)]  # fmt: skip
LOOKS = {"causal": {"is_causal": True}, "gates": {"head_gate": np.array([1.0, 0.5, 0.0, 1.0], np.float32)}}


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("length, dtype", LENGTHS)
def test_nnx_sows_statistics_of_the_output_s_own_weights(length, dtype):
    layer = jattn.nnx.MultiHeadAttention(
        4, 24, num_kv_heads=2, qk_norm="rms", position=jattn.positions.Rotary(), sinks=True, dtype=dtype,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    layer.sinks[...] = jnp.array([0.0, 1.0, -1.0, 2.0])
    x = jax.random.normal(jax.random.key(1), (2, length, 24), dtype)
    looks = {"sow_weights": True, "sow_statistics": ("max_weight", "first_token", "entropy")}
    look = nnx.capture(lambda layer, x: layer(x, is_causal=True, **looks), nnx.Intermediate)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms mix dtypes
        alone = nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, x)
        beside, sown = nnx.jit(lambda layer, x: look(layer, x))(layer, x)
    np.testing.assert_array_equal(alone, beside)
    (result,), (weights,) = sown["attention_statistics"], sown["attention_weights"]
    weights, tolerance = np.asarray(weights, np.float64), 2e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(result["max_weight"], weights.max(-1).mean(-1), rtol=tolerance)
    np.testing.assert_allclose(result["first_token"], weights[:, :, 1:, 0].mean(-1), rtol=tolerance)
    assert result["entropy"].shape == (2, 4)


@pytest.mark.slow_except("causal")
@pytest.mark.bits
@pytest.mark.parametrize("look", LOOKS)
def test_linen_sows_statistics_beside_the_same_bits(look):
    layer = jattn.linen.MultiHeadAttention(4)
    x = jax.random.normal(jax.random.key(1), (3, 2, 9, 16))  # two batch axes
    if look == "gates":
        x = x[0]
    params = jax.jit(layer.init)(jax.random.key(0), x)
    apply = functools.partial(layer.apply, params, **LOOKS[look])
    alone = jax.jit(apply)(x)
    looks = {"sow_weights": True, "sow_statistics": ["distance"], "mutable": ["intermediates"]}
    beside, sown = jax.jit(lambda x: apply(x, **looks))(x)
    np.testing.assert_array_equal(alone, beside)
    (weights,), (result,) = (sown["intermediates"][f"attention_{one}"] for one in ("weights", "statistics"))
    distance = np.abs(np.arange(9)[:, None] - np.arange(9))
    np.testing.assert_allclose(result["distance"], (np.asarray(weights) * distance).sum(-1).mean(-1), rtol=1e-5)
    assert result["distance"].shape == x.shape[:-2] + (4,)


def test_another_attention_fn_has_no_statistics():
    make = lambda: jattn.nnx.MultiHeadAttention(2, 8, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="sow_statistics: only jattn's own attention_fn takes them"):
        jax.eval_shape(lambda: make()(jnp.zeros((1, 3, 8)), sow_statistics=["entropy"]))
