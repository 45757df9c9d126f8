"""Roles compared with the null, and errors of other tools that jattn must not repeat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import heads


def null(*names, size=200):
    rng = np.random.default_rng(0)
    return {name: rng.uniform(0, 0.2, size) for name in names}


def test_a_head_gets_the_role_that_passes_its_null_by_the_most():
    scores = {"previous": np.array([[0.9, 0.3], [0.1, 0.25]]), "first": np.array([[0.05, 0.8], [0.1, 0.5]])}
    roles = heads.roles(scores, null("previous", "first"))
    assert roles.label.tolist() == [["previous", "first"], ["mixed", "first"]]
    assert roles.score.tolist() == [[0.9, 0.8], [0.1, 0.5]]
    assert (roles.p_value[roles.label != "mixed"] == 2 / 201).all()
    assert roles.p_value[1, 0] > 0.05


def test_each_pattern_has_the_threshold_of_its_own_null():
    rng = np.random.default_rng(1)
    low, high = rng.uniform(0, 0.1, 500), rng.uniform(0, 0.9, 500)
    roles = heads.roles({"a": np.array([0.5, 0.5]), "b": np.array([0.0, 0.95])}, {"a": low, "b": high}, level=0.1)
    # 0.5 is far above the null of a, but not above that of b
    assert roles.label.tolist() == ["a", "a"]
    assert abs(roles.threshold[0] - np.quantile(low, 0.95)) < 0.005
    np.testing.assert_allclose(roles.p_value, 2 * (1 + (low >= 0.5).sum()) / 501)


@pytest.mark.parametrize("level", [0.05, 0.1, 0.6])
@pytest.mark.parametrize("size", [40, 99, 210])
def test_a_score_passes_where_it_is_above_the_threshold(size, level):
    """At every position among the null scores, also exactly at one of them and next to it."""
    grid = np.sort(np.concatenate([np.arange(float(size)) + shift for shift in (-0.25, 0.0, 0.25)]))
    numbers = np.arange(float(size))
    roles = heads.roles({"a": grid, "b": grid - 1e3}, {"a": numbers, "b": numbers}, level=level)
    p = 2 * (1 + np.array([(np.arange(size) >= score).sum() for score in grid])) / (1 + size)
    np.testing.assert_array_equal(roles.label == "a", p <= level)
    np.testing.assert_array_equal(roles.label == "a", grid > roles.threshold)
    np.testing.assert_allclose(roles.p_value, np.minimum(p, 1.0))


def test_heads_without_roles_get_one_as_often_as_the_level_says():
    names = ("a", "b", "c", "d")
    rng = np.random.default_rng(2)
    scores = {name: rng.normal(size=4000) for name in names}
    roles = heads.roles(scores, {name: rng.normal(size=20000) for name in names}, level=0.05)
    assert 0.035 < (roles.label != "mixed").mean() < 0.06


def test_what_is_usual_in_the_same_model_is_weak():
    """Three heads pass both nulls; the baseline of b, whose 95% quantile is 0.38, leaves one of its scores."""
    scores = {"a": np.array([0.3, 0.1, 0.3]), "b": np.array([0.35, 0.35, 0.9])}
    baseline = {"a": np.full(20, 0.1), "b": np.linspace(0.0, 0.4, 21)}
    roles = heads.roles(scores, null("a", "b"), baseline=baseline)
    assert roles.label.tolist() == ["a", "weak b", "b"]
    least = roles.threshold + 0.1 * (1 - roles.threshold)
    np.testing.assert_allclose(roles.least, [least[0], 0.38, 0.38])
    plain = heads.roles(scores, null("a", "b"))
    assert plain.label.tolist() == ["b", "b", "b"]
    with pytest.raises(ValueError, match=r"baseline must have the patterns of scores, \['a', 'b'\], got \['a'\]"):
        heads.roles(scores, null("a", "b"), baseline={"a": np.ones(3)})
    with pytest.raises(ValueError, match="none may be empty"):
        heads.roles(scores, null("a", "b"), baseline={"a": np.ones(3), "b": np.ones(0)})


def test_a_score_that_hardly_exceeds_its_null_is_weak():
    """0.073 passes a null of 0.069 with a p-value of 0.025: it is a tenth of the way to 1 only from 0.1621 on."""
    nulls = {"a": np.linspace(0.0, 0.069, 39), "b": np.linspace(0.0, 0.9, 39)}
    alone = heads.roles({"a": np.array([0.073, 0.16, 0.164, 0.05])}, {"a": nulls["a"]}, level=0.025)
    assert alone.label.tolist() == ["weak a", "weak a", "a", "mixed"] and (alone.p_value[:3] == 0.025).all()
    np.testing.assert_allclose(alone.threshold, 0.069)  # only what exceeds all 39 has a p-value of 1/40
    np.testing.assert_allclose(alone.least, 0.1621)
    # a rises by more, but hardly; b, from its high null, by half of what is left
    both = heads.roles({"a": np.array([0.15]), "b": np.array([0.94])}, nulls)
    assert both.label.tolist() == ["b"] and both.score.tolist() == [0.94]


def test_a_null_that_could_never_be_passed_is_refused():
    scores = {"a": np.ones(1), "b": np.ones(1)}
    heads.roles(scores, null("a", "b", size=39))
    with pytest.raises(ValueError, match=r"needs at least 39 scores in the null of each, got \{'a': 38, 'b': 38\}"):
        heads.roles(scores, null("a", "b", size=38))
    with pytest.raises(ValueError, match=r"null must have the patterns of scores, \['a', 'b'\], got \['a'\]"):
        heads.roles(scores, null("a"))
    for wrong in (np.nan, np.inf):
        with pytest.raises(ValueError, match="must be finite"):
            heads.roles({"a": np.array([wrong])}, null("a"))
    for level in (0.0, 1.0, -1.0, np.nan):
        with pytest.raises(ValueError, match="level must lie between 0 and 1"):
            heads.roles({"a": np.ones(1)}, null("a"), level=level)
    with pytest.raises(ValueError, match="scores must have one shape"):
        heads.roles({"a": np.ones(1), "b": np.ones(2)}, null("a", "b"))


# known errors of other tools, as regression tests


def hard(targets):
    """Query and key of one head that only attends to ``targets [T]``."""
    length = len(targets)
    return 300 * np.eye(length, dtype=np.float32)[targets][:, None], np.eye(length, dtype=np.float32)[:, None]


@jax.jit
def look(query, key, tokens):
    return heads.statistics(query, key, tokens=tokens, is_causal=True, names=heads.OF_TOKENS)


def test_a_perfect_induction_head_scores_1_and_not_a_half():
    """If a segment of n tokens occurs twice, the first half of the queries has no earlier occurrence. A detector that
    compares the whole matrix with a pattern of ones counts these as failures and gives 0.5."""
    n = 16
    tokens = np.tile(np.arange(n), 2)
    targets = np.where(np.arange(2 * n) < n, 0, np.arange(2 * n) - n + 1)
    query, key = hard(targets)
    result = look(query, key, tokens)
    np.testing.assert_allclose(result["induction"], 1.0, atol=1e-6)
    assert result["support"]["induction"].tolist() == [n]


@pytest.mark.parametrize("shift, pattern", [pytest.param(0, "duplicate_token", marks=pytest.mark.slow), (1, "induction")])  # fmt: skip
def test_induction_is_not_off_by_one(shift, pattern):
    """It attends to the token *after* the earlier occurrence; a duplicate-token head, to the occurrence itself."""
    n = 12
    tokens = np.tile(np.arange(n), 2)
    targets = np.where(np.arange(2 * n) < n, 0, np.arange(2 * n) - n + shift)
    result = look(*hard(targets), tokens)
    other = {"duplicate_token": "induction", "induction": "duplicate_token"}[pattern]
    np.testing.assert_allclose(result[pattern], 1.0, atol=1e-6)
    np.testing.assert_allclose(result[other], 0.0, atol=1e-6)


@pytest.mark.slow
def test_a_uniform_causal_head_is_not_coherent():
    """Query t sees only t keys. Entropy divided by ln T would call a uniform head at length 29 0.27 coherent, so each
    row is divided by the maximum for its own keys."""
    T = 29
    nothing = jnp.zeros((T, 1, 4))
    result = jax.jit(lambda x: heads.statistics(x, x, is_causal=True, names=["entropy"]))(nothing)
    np.testing.assert_allclose(result["entropy"], 1.0, atol=1e-6)
    weights = np.tri(T, dtype=np.float32) / np.arange(1, T + 1, dtype=np.float32)[:, None]
    np.testing.assert_allclose(heads.entropy(jnp.asarray(weights), jnp.tri(T, dtype=bool)), 1.0, atol=1e-6)


@pytest.mark.slow
def test_divergence_never_passes_its_maximum():
    """A sum over rows can exceed ln 2; the mean over rows, divided by ln 2, is at most 1."""
    T = 8
    one, other = jnp.eye(T), jnp.eye(T)[::-1]
    result = heads.pattern_divergence(jnp.stack([one, other]))
    np.testing.assert_allclose(result, [[0, 1], [1, 0]], atol=1e-6)
