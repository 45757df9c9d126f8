"""Attribution patching: equal to patches where that can be, with a saturated softmax too, and to first order elsewhere."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import heads, interop
from jattn.heads.key_replacement import replace_keys
from jattn.score_mods import SoftCap
from tests.jattn.test_language_models import CONFIGS, TOKENS, tensors_of
from tests.jattn.test_patching import CLEAN, PREDICTION, SOURCES, B, K, N, embedded, induction_model, through

WAYS = [(what, by) for what in "qkvz" for by in ("head", "position", "head_position")] + [("pattern", "head_position")]


@pytest.fixture(scope="module", params=[1.0, 40.0], ids=["soft", "sharp"])
def one_layer(request):
    """A layer with a soft or a saturated softmax, its inputs, a linear metric, and what it sows here and elsewhere."""
    params = jattn.init_multi_head(jax.random.key(0), 8, N, num_kv_heads=K, head_dim=3, value_dim=5)
    params["query"]["kernel"] *= request.param
    x, other, direction = jax.random.normal(jax.random.key(9), (3, 2, 6, 8))
    options = {"score_mod": SoftCap(30.0), "bias": jax.random.normal(jax.random.key(5), (N, 6, 6))}

    def run(per_layer=None):
        return (through([params], x, per_layer, **options)[0] * direction).sum()

    own, source = (through([params], given, **options)[1] for given in (x, other))
    return run, own, source, {"is_causal": True, **options}


@pytest.fixture(scope="module")
def both(one_layer):
    """Every estimate of the layer, and every effect, compiled once."""
    run, own, source, options = one_layer

    @jax.jit
    def every():
        base, found = run(), {}
        for what, by in WAYS:
            given = options if what == "k" and by != "head" else {}
            estimate = heads.attribution_patch(run, own, source, what, by, **given)
            found[what, by] = estimate, heads.patch(run, source, what, by) - base
        return found

    return every()


def test_in_the_last_layer_the_estimate_is_the_effect(both):
    for way, (estimate, effect) in both.items():
        assert estimate.shape == effect.shape and np.abs(effect).max() > 0.05, way
        np.testing.assert_allclose(estimate, effect, atol=2e-4, err_msg=str(way))


@pytest.mark.parametrize("one_layer", [40.0], indirect=True, ids=["sharp"])
def test_the_softmax_is_saturated_and_its_gradient_is_not_enough(one_layer, both):
    run, own, source, options = one_layer
    weights = jattn.attention_weights(own[0]["query"], own[0]["key"], **options)
    assert ((weights > 0.99) & (weights < 1)).sum() > 5

    def with_key(gate):
        return run([{"patch": {"key": (gate, source[0]["key"])}}])

    naive = -jax.grad(with_key)(jnp.ones(own[0]["key"].shape[:-1])).sum(0).T  # [K,S]
    effect = both["k", "head_position"][1][0]
    assert np.abs(naive - effect).max() > 0.5 * np.abs(effect).max()


def test_keys_are_replaced_one_by_one_across_blocks():
    """More keys than a block, one of them with nearly all of the weight; a query that sees nothing, and NaN unseen."""
    rng = np.random.default_rng(0)
    T = S = 150
    own = {name: rng.normal(size=(1, T, heads_, 4)) for name, heads_ in (("query", 2), ("key", 1), ("value", 1))}
    other, gradient = rng.normal(size=(1, S, 1, 4)), rng.normal(size=(1, T, 2, 4))
    own["key"][0, 140] *= 30
    other[0, 3] *= 30
    mask = np.tril(np.ones((T, S), bool))
    mask[7] = mask[:, 90] = False

    def outputs(key):
        scores = np.einsum("tnh,sh->nts", own["query"][0], key[0, :, 0]) / 2
        scores = np.where(mask, scores, -np.inf)
        largest = np.maximum(scores.max(-1, keepdims=True), -1e300)
        weights = np.exp(scores - largest)
        total = weights.sum(-1, keepdims=True)
        out = np.einsum("nts,sd->tnd", weights / np.where(total > 0, total, 1), own["value"][0, :, 0])
        with np.errstate(divide="ignore"):
            return out, (largest + np.log(total))[..., 0].T, weights / np.where(total > 0, total, 1)

    z, lse, weights = outputs(own["key"])
    assert (weights > 0.999).any() and lse[7, 0] == -np.inf
    expected = np.empty(S)
    for s in range(S):
        key = own["key"].copy()
        key[0, s] = other[0, s]
        expected[s] = (gradient[0] * (outputs(key)[0] - z)).sum()
    given = {name: jnp.asarray(x, jnp.float32) for name, x in own.items()} | {"z": z[None], "lse": lse[None]}
    given = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), given)
    given["key"] = given["key"].at[0, 90].set(jnp.nan)  # never seen
    found = replace_keys(given, jnp.asarray(other, jnp.float32), jnp.asarray(gradient, jnp.float32), {"mask": mask})
    np.testing.assert_allclose(found[0, 0], expected, atol=2e-4 * np.abs(expected).max())


def test_memory_of_keys_by_position_is_linear():
    T = 4096
    row = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
    own = dict.fromkeys(("query", "key", "value", "z"), row) | {"lse": jax.ShapeDtypeStruct((1, T, 2), jnp.float32)}
    compiled = (
        jax.jit(lambda own, key, g: replace_keys(own, key, g, {"is_causal": True})).lower(own, row, row).compile()
    )
    assert compiled.memory_analysis().temp_size_in_bytes < T * T * 4 / 2  # one head's scores would be 64 MiB


def test_small_changes_are_met_through_later_layers():
    layers = [jattn.init_multi_head(jax.random.key(i), 8, N, num_kv_heads=K, head_dim=3) for i in range(2)]
    x, other = jax.random.normal(jax.random.key(9), (2, 2, 5, 8))
    near = jax.tree.map(lambda a, b: a + 0.01 * (b - a), *(through(layers, given)[1] for given in (x, other)))
    own = through(layers, x)[1]

    def run(per_layer=None):
        return jnp.sin(through(layers, x, per_layer)[0]).sum()

    @jax.jit
    def every():
        found = {}
        for what in "qkvz":
            options = {"is_causal": True} if what == "k" else {}
            estimate = heads.attribution_patch(run, own, near, what, "head_position", **options)
            found[what] = estimate, heads.patch(run, near, what, "head_position") - run()
        return found

    for what, (estimate, effect) in every().items():
        assert np.abs(effect[0]).max() > 1e-3, what
        np.testing.assert_allclose(estimate, effect, atol=0.03 * np.abs(effect).max(), err_msg=what)


def test_the_cells_that_carry_the_answer_stand_out():
    layers = induction_model()
    x, clean = embedded(SOURCES["another token before B"][0]), through(induction_model(), embedded(CLEAN))[1]

    def answer(per_layer):
        return through(layers, x, per_layer)[0][0, -1, PREDICTION][B]

    own = through(layers, x)[1]
    found = heads.attribution_patch(answer, own, clean, "k", "head_position", is_causal=True)
    patched = heads.patch(answer, clean, "k", "head_position") - answer(None)
    assert found.shape == (2, K, x.shape[1]) and float(found[1, 0, 2]) == np.abs(found).max() and found[1, 0, 2] > 0.8
    np.testing.assert_allclose(found[1], patched[1], atol=1e-4)


def test_a_model_that_scans_over_its_layers():
    model = interop.from_tensors(tensors_of("llama"), CONFIGS["llama"])
    tokens, others = jnp.asarray(TOKENS), jnp.roll(jnp.asarray(TOKENS), 3, 1)
    graph, state = nnx.split(model)

    def sown(tokens):
        return heads.collect(
            nnx.capture(lambda m: m(tokens, sow_heads=True), nnx.Intermediate)(nnx.merge(graph, state))[1]
        )

    def run(per_layer=None):
        return nnx.merge(graph, state)(tokens, per_layer=per_layer)[:, -1].sum()

    @jax.jit
    def every():
        own = sown(tokens)
        near = jax.tree.map(lambda a, b: a + 0.005 * (b - a), own, sown(others))
        found = {}
        for what in "qkz":
            options = {"is_causal": True} if what == "k" else {}
            estimate = heads.attribution_patch(run, own, near, what, "head_position", **options)
            found[what] = estimate, heads.patch(run, near, what, "head_position", batch_size=13) - run()
        return found

    for what, (estimate, effect) in every().items():
        np.testing.assert_allclose(estimate, effect, atol=0.1 * np.abs(effect).max(), err_msg=what)


def test_what_is_wrong_is_said(one_layer):
    run, own, source, options = one_layer
    estimate = functools.partial(heads.attribution_patch, run)
    for arguments, given, match in (
        ((own, source, "x"), {}, "what must be one of q, k, v, z, pattern, got 'x'"),
        ((own, source, "z", "x"), {}, "by must be one of head, position, head_position, got 'x'"),
        (([{}], source), {}, "own must be a list with a dict for each layer, each with z"),
        ((own, []), {}, "source must be a list"),
        ((own, source * 2), {}, "same number of layers, got 1 and 2"),
        (
            (own, source, "q"),
            {"is_causal": True},
            "options are those of keys by position, got is_causal for 'q' by 'head'",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            estimate(*arguments, **given)
    with pytest.raises(ValueError, match=r"run must return one number, got an array of shape \[2\]"):
        heads.attribution_patch(lambda _: jnp.ones(2), own, source)
