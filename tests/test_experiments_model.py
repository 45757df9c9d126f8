"""The experiments' model, and what is measured on it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import claims, config, look, model, tasks
from experiments.evaluate import Measured

POSITIONS = ["none", "sinusoidal", "learned", "rotary", "alibi", "relative"]
TASK = tasks.CopyString(symbols=5, shortest=3, longest=5, farthest=6)
OPTIONS = config.Model(num_layers=2, num_heads=4, num_kv_heads=2, model_dim=12, head_dim=6, value_dim=5, mlp_dim=7)

pytestmark = pytest.mark.usefixtures("as_experiments_run")


def built(position, key, **changes):
    options = {field: getattr(OPTIONS, field) for field in OPTIONS.__dataclass_fields__} | {"position": position}
    transformer = model.make(config.Model(**(options | changes)), TASK)
    batch = TASK.sample(key, 2)
    return transformer, transformer.init(key, batch.tokens), batch


@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_scheme_is_causal(position, getkey):
    transformer, params, batch = built(position, getkey())
    apply = jax.jit(transformer.apply)
    changed = batch.tokens.at[:, 6:].set((batch.tokens[:, 6:] + 1) % 5)
    before, after = apply(params, batch.tokens), apply(params, changed)
    assert before.shape == (2, 11, 1, 5)
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert (before[:, 6:] != after[:, 6:]).any()


@pytest.mark.parametrize("position", POSITIONS)
def test_every_position_scheme_but_none_sees_the_order(position, getkey):
    transformer, params, batch = built(position, getkey(), num_layers=1)
    apply = jax.jit(transformer.apply)
    swapped = batch.tokens[:, jnp.array([0, 2, 1, 3, 4, 5, 6, 7, 8, 9, 10])].at[:, 1:3].set(jnp.array([[[1], [3]]]))
    other = swapped.at[:, 1:3].set(jnp.array([[[3], [1]]]))
    equal = np.allclose(apply(params, swapped)[:, -1], apply(params, other)[:, -1], atol=1e-6)
    assert equal == (position == "none")


def test_weights_are_sown_layer_by_layer_and_change_nothing(getkey):
    transformer, params, batch = built("rotary", getkey())
    weights = look.weights_of(transformer, params, batch.tokens)
    assert weights.shape == (2, 2, 4, 11, 11)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-5)
    kept = transformer.apply(params, batch.tokens, sow_weights=True, mutable=["intermediates"])[1]["intermediates"]
    for layer in range(2):
        np.testing.assert_array_equal(weights[:, layer], kept[f"layer_{layer}"]["attention"]["attention_weights"][0])


def test_hardened_weights_are_one_at_the_largest(getkey):
    transformer, params, batch = built("alibi", getkey(), num_layers=1)

    def weights(harden):
        _, kept = transformer.apply(params, batch.tokens, harden=harden, sow_weights=True, mutable=["intermediates"])
        return model.attention_weights(kept["intermediates"])

    np.testing.assert_allclose(weights(True), jax.nn.one_hot(weights(False).argmax(-1), 11), atol=1e-6)


def test_a_gate_of_zero_switches_a_head_off(getkey):
    transformer, params, batch = built("learned", getkey())
    gates = jnp.ones((2, 4)).at[1, 2].set(0.0)
    out = params["params"]["layer_1"]["attention"]["out"]
    without = jax.tree.map(lambda leaf: leaf, params)
    without["params"]["layer_1"]["attention"]["out"] = out | {"kernel": out["kernel"].at[2].set(0.0)}
    expected = transformer.apply(without, batch.tokens)
    np.testing.assert_allclose(transformer.apply(params, batch.tokens, head_gates=gates), expected, atol=1e-5)


def test_scores_find_heads_built_by_hand():
    batch = TASK.probe(jax.random.key(0), 3)  # strings of 4: sources stand 4 back
    position = jnp.arange(9)
    built_by_hand = [position - 1, jnp.maximum(position - 4, 0), jnp.zeros(9, int)]
    weights = jnp.stack([jax.nn.one_hot(targets, 9) for targets in built_by_hand])
    found = look.scores(TASK, jnp.broadcast_to(weights[None, None], (3, 1, 3, 9, 9)), batch)
    assert found["previous_token"][0, 0] == 1 and found["copy source"][0, 1] == 1 and found["sink"][0, 2] == 1
    assert found["copy source"].tolist() == [[0, 1, 0]] and found["previous_token"].shape == (1, 3)
    profile = look.offset_profile(jnp.broadcast_to(weights[None, None], (3, 1, 3, 9, 9)), batch)
    assert profile.shape == (1, 3, 9) and profile[0, 0].argmax() == 7 and profile[0, 1].argmax() == 4


def measured(**changed):
    empty = dict.fromkeys(Measured._fields, np.zeros(1))
    return Measured(**(empty | changed))


def test_clean_heads_serve_one_place_and_no_other():
    accuracy = np.array([[1.0, 1.0, 0.9]])
    ablated = np.array([[[[0.4, 0.96, 0.9], [1.0, 0.45, 0.8], [1.0, 0.51, 0.9], [1.0, 1.0, 0.2]]]])
    # head 0 serves place 0 alone; head 1 also hurts place 2; head 2 costs place 1 only 49 points; head 3 serves place 2
    assert claims.clean_heads(measured(accuracy=accuracy, ablated=ablated)).tolist() == [2]
    two_for_one = np.array([[[[0.4, 1.0, 0.9], [0.4, 1.0, 0.9]]]])
    assert claims.clean_heads(measured(accuracy=accuracy, ablated=two_for_one)).tolist() == [1]


def test_the_weight_on_a_place_is_that_of_the_head_it_needs():
    scores = {"a": np.array([[[0.2, 0.9]]]), "b": np.array([[[0.7, 0.3]]])}
    found = measured(accuracy=np.ones((1, 2)), ablated=np.array([[[[0.1, 1.0], [1.0, 0.0]]]]), scores=scores)
    other = found._replace(scores={"a": np.array([[[0.01, 0.02]]]), "b": np.array([[[0.03, 0.04]]])})
    assert claims.own_place_weight(("a", "b"), found, found).tolist() == [[0.2, 0.3]]
    assert claims.own_place_weight(("a", "b"), found, other).tolist() == [[0.01, 0.04]]


def test_mean_divergence_runs_over_different_heads():
    pairs = np.array([[[0.0, 0.5, 1.0], [0.5, 0.0, 0.3], [1.0, 0.3, 0.0]]])
    np.testing.assert_allclose(claims.mean_divergence(measured(divergence=pairs)), [0.6])
    assert claims.mean_divergence(measured(divergence=np.zeros((1, 1, 1)))).tolist() == [0.0]


@pytest.mark.parametrize("side, passed", [("at_least", [8, 9]), ("at_most", [7, 8])])
def test_a_claim_holds_when_enough_seeds_pass(side, passed):
    values = measured(exact_match=np.array([0.25, 0.5, 0.75]))
    result = claims.Result(config.Config("x"), ("a",), [7, 8, 9], 1, values, measured(exact_match=np.zeros(3)))
    for needed in (2, 3):
        claim = config.Claim("x", "y", "exact_match", needed, **{side: 0.5})
        row = claims.judge(claim, {"": result})
        assert row["passed"] == passed and row["holds"] == (needed == 2) and row["untrained"] == [0, 0, 0]
        assert sorted(row["passed"] + row["failed"]) == [7, 8, 9]
    missing = result._replace(trained=measured(exact_match=np.full(3, np.nan)))
    assert not claims.judge(claim, {"": missing})["passed"]
