"""Head statistics, compared with slow NumPy references and on heads built by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import heads
from tests import reference

T, VOCABULARY = 13, 5


def causal_weights(rng, *lead, length=T):
    """Random causal heads ``[*lead,T,T]``."""
    scores = np.where(np.tri(length, dtype=bool), 2 * rng.normal(size=(*lead, length, length)), -np.inf)
    return jnp.asarray(reference.softmax(scores), jnp.float32)


def hard(targets, keys=T):
    """A head that puts all its weight on one key per query; -1 stands for key 0."""
    return jnp.asarray(np.eye(keys, dtype=np.float32)[np.maximum(targets, 0)])


def uniform_causal(length=T):
    rows = np.tri(length, dtype=np.float32)
    return jnp.asarray(rows / rows.sum(1, keepdims=True))


def score(statistic, *arguments):
    """One score, compiled as one program."""
    return np.asarray(jax.jit(statistic)(*arguments))


def slow_mean(values):
    return sum(values) / len(values) if values else 0.0


def slow_induction(weights, tokens, eligible):
    values = []
    for q in range(len(tokens)):
        after = [j + 1 for j in range(q) if tokens[j] == tokens[q]]
        if after and eligible[q]:
            values.append(sum(weights[q, kv] for kv in after))
    return slow_mean(values)


def slow_entropy(weights, visible, eligible):
    values = []
    for row, seen, use in zip(weights, visible, eligible, strict=True):
        if use and seen.sum() >= 2:
            values.append(-sum(p * np.log(p) for p in row if p > 0) / np.log(seen.sum()))
    return slow_mean(values)


def slow_profile(weights, eligible):
    length, keys = weights.shape
    return [slow_mean([weights[q, q + o] for q in range(length) if eligible[q] and 0 <= q + o < keys]) for o in range(1 - length, keys)]  # fmt: skip


def slow_divergence(one, other, eligible):
    entropy = lambda row: -sum(p * np.log(p) for p in row if p > 0)
    rows = [(p, r) for p, r, use in zip(one, other, eligible, strict=True) if use]
    rows = [(entropy((p + r) / 2) - (entropy(p) + entropy(r)) / 2) / np.log(2) for p, r in rows]
    return slow_mean(rows)


@pytest.fixture(params=["all queries", "some", "none"])
def eligible(request):
    rows = {"all queries": np.ones(T, bool), "some": np.arange(T) % 3 > 0, "none": np.zeros(T, bool)}
    return jnp.asarray(rows[request.param])


@pytest.mark.slow
def test_statistics_equal_the_slow_reference(eligible):
    rng = np.random.default_rng(0)
    for _ in range(3):
        weights = causal_weights(rng)
        w, tokens = np.asarray(weights, np.float64), jnp.asarray(rng.integers(0, VOCABULARY, T))
        t, visible = np.asarray(tokens), np.tril(np.ones((T, T), bool))
        targets = np.where(eligible, rng.integers(0, T, T), -1)
        rows = [q for q in range(1, T) if eligible[q]]
        pairs = [
            (heads.target_weight(weights, jnp.asarray(targets)), slow_mean([w[q, targets[q]] for q in range(T) if targets[q] >= 0])),
            (heads.previous_token(weights, eligible), slow_mean([w[q, q - 1] for q in rows])),
            (heads.first_token(weights, eligible), slow_mean([w[q, 0] for q in rows])),
            (heads.induction(weights, tokens, eligible), slow_induction(w, t, eligible)),
            (heads.entropy(weights, jnp.asarray(visible), eligible), slow_entropy(w, visible, eligible)),
            (heads.offset_profile(weights, eligible), slow_profile(w, eligible)),
        ]  # fmt: skip
        for result, expected in pairs:
            np.testing.assert_allclose(result, expected, atol=1e-6)


@pytest.mark.slow
def test_only_queries_count_that_see_a_target(eligible):
    """Under a window whose queries see some of their targets alone."""
    rng = np.random.default_rng(1)
    visible = np.tri(T, dtype=bool) & ~np.tri(T, k=-4, dtype=bool) & (rng.random((T, T)) < 0.7)
    w = reference.softmax(2 * rng.normal(size=(T, T)), visible)
    tokens, use = rng.integers(0, VOCABULARY, T), np.asarray(eligible)
    rows = [(q, [kv for kv in range(T) if visible[q, kv]]) for q in range(T) if use[q]]
    after = [sum(w[q, kv] for kv in keys) for q, seen in rows if (keys := [kv for kv in seen if 0 < kv <= q and tokens[kv - 1] == tokens[q]])]  # fmt: skip
    pairs = {
        "previous_token": ([], slow_mean([w[q, q - 1] for q, seen in rows if q and q - 1 in seen])),
        "first_token": ([], slow_mean([w[q, 0] for q, seen in rows if q and 0 in seen])),
        "induction": ([jnp.asarray(tokens)], slow_mean(after)),
        "offset_profile": (
            [],
            [slow_mean([w[q, q + o] for q, seen in rows if q + o in seen]) for o in range(1 - T, T)],
        ),
    }
    for name, (arguments, expected) in pairs.items():
        result = getattr(heads, name)(jnp.asarray(w, jnp.float32), *arguments, eligible, jnp.asarray(visible))
        np.testing.assert_allclose(result, expected, atol=1e-6, err_msg=name)


@pytest.mark.slow_except("none")
def test_divergence_equals_the_slow_reference(eligible):
    patterns = causal_weights(np.random.default_rng(0), 3)
    p = np.asarray(patterns, np.float64)
    expected = [[slow_divergence(one, other, eligible) for other in p] for one in p]
    np.testing.assert_allclose(score(heads.pattern_divergence, patterns, eligible), expected, atol=1e-6)


@pytest.mark.slow
def test_defaults_take_every_query():
    rng = np.random.default_rng(0)
    weights, tokens = causal_weights(rng), jnp.asarray(rng.integers(0, VOCABULARY, T))
    every = jnp.ones(T, bool)
    for name, *arguments in (("previous_token",), ("first_token",), ("offset_profile",), ("induction", tokens)):
        statistic = getattr(heads, name)
        np.testing.assert_array_equal(statistic(weights, *arguments), statistic(weights, *arguments, every))
    np.testing.assert_array_equal(heads.entropy(weights), heads.entropy(weights, jnp.ones((T, T), bool), every))
    patterns = jnp.stack([weights, causal_weights(rng)])
    np.testing.assert_array_equal(heads.pattern_divergence(patterns), heads.pattern_divergence(patterns, every))


def test_heads_of_known_role():
    tokens = np.array([3, 1, 4, 2, 3, 1, 4, 2, 3, 1, 4, 2, 3])  # period 4, so the continuation is 3 back
    position = np.arange(T)
    built = {
        "previous_token": hard(position - 1),
        "induction": hard(np.where(position >= 4, position - 3, -1)),
        "sink": hard(np.zeros(T, int)),
    }

    @jax.jit
    def scores(weights):
        late = jnp.asarray(position >= 4)
        return {
            "previous_token": heads.previous_token(weights, late),
            "induction": heads.induction(weights, jnp.asarray(tokens)),
            "sink": heads.first_token(weights, late),
        }

    for kind, weights in built.items():
        for name, value in scores(weights).items():
            np.testing.assert_allclose(value, name == kind, atol=1e-6, err_msg=f"{kind}, {name}")


@pytest.mark.parametrize("shift", [pytest.param(-1, marks=pytest.mark.slow), 1])
def test_induction_has_no_off_by_one(shift):
    tokens, position = jnp.asarray(np.tile(np.arange(5), 3)), np.arange(15)
    beside, exact = (hard(np.where(position >= 5, position - 4 + off, -1), 15) for off in (shift, 0))
    np.testing.assert_allclose([score(heads.induction, one, tokens) for one in (beside, exact)], [0, 1], atol=1e-6)


@pytest.mark.slow
def test_induction_counts_every_continuation_and_no_query_without_one():
    tokens = jnp.array([0, 1, 0, 2, 0, 3])  # at position 4, token 0 has occurred twice, followed by 1 and by 2
    weights = jnp.zeros((6, 6)).at[4, 1].set(0.5).at[4, 3].set(0.5).at[2, 1].set(1.0)
    np.testing.assert_allclose(heads.induction(weights, tokens), 1.0, atol=1e-6)
    assert heads.induction(weights, jnp.arange(6)) == 0.0
    # a repeated token is its own continuation
    np.testing.assert_allclose(heads.induction(jnp.eye(2), jnp.array([7, 7])), 1.0, atol=1e-6)
    # nothing follows the last token, not even the first
    assert heads.induction(hard([0, 0, 0], 3), jnp.array([5, 6, 5])) == 0.0


def test_entropy_of_uniform_and_hard_heads():
    causal = np.tri(T, dtype=bool)
    np.testing.assert_allclose(score(heads.entropy, uniform_causal(), causal), 1.0, atol=1e-6)
    np.testing.assert_allclose(score(heads.entropy, np.full((3, 7), 1 / 7, np.float32)), 1.0, atol=1e-6)
    np.testing.assert_allclose(score(heads.entropy, np.eye(T, dtype=np.float32), causal), 0.0, atol=1e-6)
    assert score(heads.entropy, np.ones((1, 1), np.float32)) == 0.0  # only one visible key, so no row counts


@pytest.mark.slow
def test_divergence_is_a_distance_in_the_unit_interval():
    patterns = jnp.stack([jnp.eye(T), hard(np.arange(T) - 1), uniform_causal(), jnp.eye(T)])
    result = heads.pattern_divergence(patterns, jnp.arange(T) >= 1)
    np.testing.assert_allclose(jnp.diagonal(result), 0.0, atol=1e-6)
    np.testing.assert_allclose(result, result.T, atol=1e-7)
    np.testing.assert_allclose(result[0, 1], 1.0, atol=1e-6)  # they never attend to the same key
    np.testing.assert_allclose(result[0, 3], 0.0, atol=1e-6)
    assert 0.0 < result[0, 2] < 1.0 and result.max() <= 1.0 + 1e-6


def test_cross_attention_profile():
    weights = hard([3, 0], 4)
    np.testing.assert_allclose(score(heads.offset_profile, weights), [1.0, 0.0, 0.0, 0.0, 1.0], atol=1e-6)


def test_statistics_lift_by_vmap_and_jit():
    rng = np.random.default_rng(0)
    weights, tokens = np.asarray(causal_weights(rng, 3, 2)), rng.integers(0, VOCABULARY, (3, T))  # [B,N,T,T], [B,T]
    lifted = jax.jit(jax.vmap(jax.vmap(heads.induction, (0, None)), (0, 0)))(weights, tokens)
    one = jax.jit(heads.induction)
    sequential_vmap = [[one(w, t) for w in of_batch] for of_batch, t in zip(weights, tokens, strict=True)]
    np.testing.assert_allclose(lifted, sequential_vmap, atol=1e-6)


@pytest.mark.slow
def test_entropy_is_differentiable_at_zero_weights():
    gradient = jax.grad(lambda weights: heads.entropy(weights))(jnp.eye(3))
    assert jnp.isfinite(gradient).all()
