"""The experiments' model, and the measurements made on it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jattn import heads
from jattn_experiments import config, head_scores, model, tasks, train
from jattn_experiments.measure import claims
from jattn_experiments.measure.evaluate import Measured

POSITIONS = ["none", "sinusoidal", "learned", "rotary", "alibi", "relative"]
TASK = tasks.CopyString(symbols=5, shortest=3, longest=5, farthest=6)
OPTIONS = config.Model(num_layers=2, num_heads=4, num_kv_heads=2, model_dim=12, head_dim=6, value_dim=5, mlp_dim=7)

pytestmark = pytest.mark.usefixtures("as_experiments_run")


def built(position, key, **changes):
    options = {field: getattr(OPTIONS, field) for field in OPTIONS.__dataclass_fields__} | {"position": position}
    transformer = model.make(config.Model(**(options | changes)), TASK)
    batch = TASK.sample(key, 2)
    return transformer, jax.jit(transformer.init)(key, batch.tokens), batch


@pytest.mark.slow
@pytest.mark.parametrize("position, layers", [*((position, 1) for position in POSITIONS), ("rotary", 2)])
def test_every_position_scheme_is_causal_and_all_but_none_see_the_order(position, layers, getkey):
    transformer, params, batch = built(position, getkey(), num_layers=layers)
    apply = jax.jit(transformer.apply)
    changed = batch.tokens.at[:, 6:].set((batch.tokens[:, 6:] + 1) % 5)
    before, after = apply(params, batch.tokens), apply(params, changed)
    assert before.shape == (2, 11, 1, 5)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any()
    swapped = batch.tokens[:, jnp.array([0, 2, 1, 3, 4, 5, 6, 7, 8, 9, 10])].at[:, 1:3].set(jnp.array([[[1], [3]]]))
    other = swapped.at[:, 1:3].set(jnp.array([[[3], [1]]]))
    equal = np.allclose(apply(params, swapped)[:, -1], apply(params, other)[:, -1], atol=1e-6)
    assert equal == (position == "none")


@pytest.mark.slow
@pytest.mark.bits
def test_weights_are_sown_layer_by_layer_and_change_nothing(getkey):
    transformer, params, batch = built("rotary", getkey())

    @jax.jit
    def look_at(params):
        looked, kept = transformer.apply(params, batch.tokens, sow_weights=True, mutable=["intermediates"])
        return looked, head_scores.with_weights(transformer, params, batch.tokens), kept["intermediates"]

    looked, (logits, weights), kept = look_at(params)
    assert weights.shape == (2, 2, 4, 11, 11)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    for layer in range(2):
        np.testing.assert_array_equal(weights[:, layer], kept[f"layer_{layer}"]["attention"]["attention_weights"][0])
    alone = jax.jit(lambda params: transformer.apply(params, batch.tokens))(params)  # tokens are constants, as above
    np.testing.assert_array_equal(alone, looked)
    np.testing.assert_array_equal(alone, logits)


@pytest.mark.slow
def test_hardened_weights_are_one_at_the_largest(getkey):
    transformer, params, batch = built("alibi", getkey(), num_layers=1)

    @functools.partial(jax.jit, static_argnames="harden")
    def weights(harden):
        _, kept = transformer.apply(params, batch.tokens, harden=harden, sow_weights=True, mutable=["intermediates"])
        return model.attention_weights(kept["intermediates"])

    np.testing.assert_allclose(weights(harden=True), np.eye(11)[weights(harden=False).argmax(-1)], atol=1e-6)


@pytest.mark.slow
def test_a_gate_of_zero_switches_a_head_off(getkey):
    transformer, params, batch = built("learned", getkey())
    gates = jnp.ones((2, 4)).at[1, 2].set(0.0)
    out = params["params"]["layer_1"]["attention"]["out"]
    without = jax.tree.map(lambda leaf: leaf, params)
    without["params"]["layer_1"]["attention"]["out"] = out | {"kernel": out["kernel"].at[2].set(0.0)}
    apply = jax.jit(transformer.apply)
    gated = apply(params, batch.tokens, per_layer=[{"head_gate": gate} for gate in gates])
    np.testing.assert_allclose(gated, apply(without, batch.tokens), atol=1e-5)


@pytest.mark.slow
def test_place_scores_and_profiles_find_heads_built_by_hand():
    batch = TASK.probe(jax.random.key(0), 3)  # strings of 4, so sources are 4 back
    position = jnp.arange(9)
    built_by_hand = [position - 1, jnp.maximum(position - 4, 0), jnp.zeros(9, int)]
    weights = jnp.stack([jax.nn.one_hot(targets, 9) for targets in built_by_hand])
    weights = jnp.broadcast_to(weights[None, None], (3, 1, 3, 9, 9))
    scores = jax.jit(lambda weights: head_scores.of_places(TASK, weights, batch.sources))(weights)
    np.testing.assert_allclose(scores["copy source"], [[0, 1, 0]], atol=1e-6)
    profile = jax.jit(head_scores.offset_profile)(weights, batch)
    assert profile.shape == (1, 3, 9) and profile[0, 0].argmax() == 7 and profile[0, 1].argmax() == 4


@pytest.mark.slow
def test_scores_are_those_of_the_weights(getkey):
    transformer, params, batch = built("relative", getkey())
    measure = jax.jit(lambda params: head_scores.scores(transformer, TASK, params, batch, head_scores.ALL))
    scores, weights = measure(params)
    assert set(scores) == {"copy source", *head_scores.ALL} and scores["induction"].shape == (2, 4)

    def mean(statistic, *others):
        statistic = jax.jit(statistic)
        rows = zip(weights, *others, strict=True)
        return np.mean([[[statistic(w, *of) for w in layer] for layer in layers] for layers, *of in rows], 0)

    np.testing.assert_allclose(scores["previous_token"], mean(heads.previous_token, batch.real), atol=1e-6)
    np.testing.assert_allclose(scores["first_token"], mean(heads.first_token, batch.real), atol=1e-6)
    expected = mean(lambda w, t, real: heads.induction(w, t[:, 0], real), batch.tokens, batch.real)
    np.testing.assert_allclose(scores["induction"], expected, atol=1e-6)
    np.testing.assert_allclose(scores["entropy"], jax.jit(head_scores.entropy)(weights, batch), atol=1e-5)


@pytest.mark.slow
def test_shuffled_tokens_leave_places_of_fixed_positions_out(getkey):
    task = tasks.Skills(length=16, symbols=16)
    transformer = model.make(config.Model(num_heads=2, model_dim=8, head_dim=4), task)
    batch = task.sample(getkey(), 4)
    params = jax.jit(transformer.init)(getkey(), batch.tokens)
    scores = jax.jit(lambda params: head_scores.of_shuffled(transformer, task, params, batch))(params)
    assert set(scores) == {"duplicate_token", "induction", "value"}
    weights = jax.jit(lambda params: head_scores.weights_of(transformer, params, batch.tokens))(params)
    other = jnp.roll(batch.tokens[..., 0], 1, 0)
    induction = jax.jit(heads.induction)
    each = [[induction(w, t, r) for w in layers[0]] for layers, t, r in zip(weights, other, batch.real, strict=True)]
    np.testing.assert_allclose(scores["induction"][0], np.mean(each, 0), atol=1e-6)


def measured(**changed):
    empty = dict.fromkeys(Measured._fields, np.zeros(1))
    return Measured(**(empty | changed))


def test_clean_heads_serve_one_place_and_no_other():
    accuracy = np.array([[1.0, 1.0, 0.9]])
    ablated = np.array([[[[0.4, 0.96, 0.9], [1.0, 0.45, 0.8], [1.0, 0.51, 0.9], [1.0, 1.0, 0.2]]]])
    # heads 0 and 3 serve one place each; head 1 also hurts place 2; switching head 2 off costs place 1 only 49 points
    assert claims.clean_heads(measured(accuracy=accuracy, ablated=ablated)).tolist() == [2]
    two_for_one = np.array([[[[0.4, 1.0, 0.9], [0.4, 1.0, 0.9]]]])
    assert claims.clean_heads(measured(accuracy=accuracy, ablated=two_for_one)).tolist() == [1]


def test_the_weight_on_a_place_is_that_of_the_head_it_needs():
    scores = {"a": np.array([[[0.2, 0.9]]]), "b": np.array([[[0.7, 0.3]]])}
    trained = measured(accuracy=np.ones((1, 2)), ablated=np.array([[[[0.1, 1.0], [1.0, 0.0]]]]), scores=scores)
    other = trained._replace(scores={"a": np.array([[[0.01, 0.02]]]), "b": np.array([[[0.03, 0.04]]])})
    assert claims.own_place_weight(("a", "b"), trained, trained).tolist() == [[0.2, 0.3]]
    assert claims.own_place_weight(("a", "b"), trained, other).tolist() == [[0.01, 0.04]]


def test_mean_divergence_runs_over_different_heads():
    pairs = np.array([[[0.0, 0.5, 1.0], [0.5, 0.0, 0.3], [1.0, 0.3, 0.0]]])
    np.testing.assert_allclose(claims.mean_divergence(measured(divergence=pairs)), [0.6])
    assert claims.mean_divergence(measured(divergence=np.zeros((1, 1, 1)))).tolist() == [0.0]


@pytest.mark.parametrize("side, passed", [("at_least", [8, 9]), ("at_most", [7, 8])])
def test_a_claim_holds_when_enough_seeds_pass(side, passed):
    values = measured(exact_match=np.array([0.25, 0.5, 0.75]))
    result = claims.Result(config.Config("x"), ("a",), [7, 8, 9], 1, values, measured(exact_match=np.zeros(3)), {})
    for needed in (2, 3):
        claim = config.Claim("x", "y", "exact_match", needed, **{side: 0.5})
        row = claims.judge(claim, {"": result})
        assert row["passed"] == passed and row["holds"] == (needed == 2) and row["reference"] == [0, 0, 0]
        assert sorted(row["passed"] + row["failed"]) == [7, 8, 9]
    missing = result._replace(trained=measured(exact_match=np.full(3, np.nan)))
    assert not claims.judge(claim, {"": missing})["passed"]


def test_distinct_places_have_a_head_that_is_there_for_them():
    scores = {"a": np.array([[[0.95, 0.2]]]), "b": np.array([[[0.0, 0.89]]]), "c": np.array([[[0.0, 0.91]]])}
    assert claims.distinct_places(("a", "b", "c"), measured(scores=scores)).tolist() == [2]


def test_a_group_that_is_off_is_judged_by_its_role():
    accuracy, off = np.array([[1.0, 0.9], [1.0, 1.0]]), {"induction": np.array([[0.2, 0.1], [0.0, 0.3]])}
    trained, untrained = measured(accuracy=accuracy), measured(accuracy=np.zeros((2, 2)))
    result = claims.Result(config.Config("x"), ("a", "b"), [0, 1], 1, trained, untrained, off)
    np.testing.assert_allclose(claims.measure(result, trained, "off/induction"), [0.15, 0.15])
    np.testing.assert_allclose(claims.measure(result, trained, "off/first_token"), [0.95, 1.0])  # no head has it
    np.testing.assert_allclose(claims.measure(result, untrained, "off/induction"), [0.0, 0.0])


@pytest.mark.slow
def test_the_penalty_is_the_mean_entropy_of_the_heads(getkey):
    task = config.Task("shift_bank", length=12, symbols=3)
    options = {"task": task, "model": config.Model(num_heads=2, model_dim=8, head_dim=4)}
    gradients = []
    # The loss of random answers, log(3) nats, is between the two thresholds.
    for penalty, begins, below in ((0.0, 0.0, None), (0.5, 0.0, 5.0), (0.5, 0.25, None), (0.5, 0.0, 0.1)):
        entropy = {"entropy_penalty": penalty, "entropy_after": begins, "entropy_below": below}
        train_options = config.Train(seeds=1, steps=4, warmup=0, batch=4, clip=1e9, **entropy)
        setup = train.Setup.of(config.Config("x", train=train_options, **options))
        if not gradients:
            state = jax.tree.map(lambda leaf: leaf[0], setup.init())
        after, metrics = jax.jit(functools.partial(train.train_step, setup))(state, setup.keys[0], jnp.asarray(0))
        gradients.append((metrics["loss"], after["optimizer"]))
    batch = setup.task.sample(jax.random.fold_in(jax.random.fold_in(setup.keys[0], train.TRAIN_DATA), 0), 4)
    np.testing.assert_allclose(gradients[0][0], gradients[1][0], rtol=1e-6)  # the reported loss excludes the penalty
    moments = [jax.tree.leaves(optax.tree.get(optimizer, "mu")) for _, optimizer in gradients]
    weights = lambda params: head_scores.weights_of(setup.model, params, batch.tokens)
    entropy = jax.grad(lambda params: head_scores.entropy(weights(params), batch).mean())
    slopes = jax.tree.leaves(jax.jit(entropy)(state["params"]))
    for without, with_penalty, before_it, not_learned, slope in zip(*moments, slopes, strict=True):
        np.testing.assert_allclose(with_penalty - without, 0.1 * 0.5 * slope, atol=1e-6)
        np.testing.assert_allclose(before_it, without, atol=1e-6)
        np.testing.assert_allclose(not_learned, without, atol=1e-6)


@pytest.mark.slow
def test_the_entropy_from_statistics_is_that_of_the_weights(getkey):
    transformer, params, batch = built("alibi", getkey())
    of_weights = lambda params: head_scores.entropy(head_scores.weights_of(transformer, params, batch.tokens), batch)
    of_statistics = lambda params: head_scores.with_entropy(transformer, params, batch)[1]
    with_slopes = lambda of: lambda params: (of(params), jax.grad(lambda params: of(params).mean())(params))
    both = [jax.jit(with_slopes(of))(params) for of in (of_weights, of_statistics)]
    assert both[0][0].shape == (2, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), *both)
