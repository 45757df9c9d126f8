"""The tasks of published papers, what they need of the model, and the metrics that they are judged by."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn import heads
from jattn_experiments import batches, config, head_scores, model, onset, tasks, train
from jattn_experiments.measure import claims, evaluate
from tests import reference

pytestmark = pytest.mark.usefixtures("as_experiments_run")


def sampled(task, batch=16, key=3):
    return jax.tree.map(np.asarray, jax.jit(lambda key: task.sample(key, batch))(jax.random.key(key)))


@pytest.mark.parametrize("symbols", [2, 3])
@pytest.mark.slow_except("2")
def test_levels_of_chains_are_the_best_predictors_from_counts(symbols):
    batch = sampled(tasks.Markov(20, symbols), 4)
    tokens, after = batch.tokens[..., 0], batch.targets[..., 0]
    np.testing.assert_array_equal(tokens[:, 1:], after[:, :-1])
    rows = zip(tokens, after, batch.levels["unigram"], batch.levels["bigram"], strict=True)
    for row, following, unigram, bigram in rows:
        for t in range(20):
            seen = row[: t + 1].tolist()
            share = (seen.count(following[t]) + 1) / (t + 1 + symbols)
            assert unigram[t] == pytest.approx(-np.log(share), abs=1e-5)
            behind = [b for a, b in zip(seen, seen[1:], strict=False) if a == row[t]]
            share = (behind.count(following[t]) + 1) / (len(behind) + symbols)
            assert bigram[t] == pytest.approx(-np.log(share), abs=1e-5)


@pytest.mark.parametrize(
    "symbols, published", [(2, (0.5768, 0.5104, 0.4807)), (3, (1.0042, 0.8858, 0.8190))], ids=["two", "three"]
)
@pytest.mark.slow
def test_levels_of_long_chains_are_those_published(symbols, published):
    """Means of 200,000 chains; here of 16,000, whose own error is about 0.002."""
    batch = sampled(tasks.Markov(100, symbols), 16000)
    means = [batch.levels[name].mean() for name in ("unigram", "bigram", "chain")]
    np.testing.assert_allclose(means, published, atol=0.006)


@pytest.mark.slow
def test_a_chain_starts_from_its_stationary_distribution_and_doubly_stochastic_ones_say_nothing_by_single_symbols():
    first = sampled(tasks.Markov(2, 2), 8000)
    np.testing.assert_allclose(first.tokens[:, 0].mean(), first.tokens[:, 1].mean(), atol=0.03)
    batch = sampled(tasks.Markov(60, 2, "doubly_stochastic"), 4000)
    assert batch.levels["unigram"].mean() == pytest.approx(np.log(2), abs=0.01)
    assert batch.levels["bigram"].mean() < 0.6


def test_recall_asks_for_the_value_of_each_key():
    task = tasks.Recall(length=32, symbols=64, pairs=5)
    batch = sampled(task)
    tokens = batch.tokens[..., 0]
    for row, at, targets, sources in zip(tokens, batch.at, batch.targets[..., 0], batch.sources[..., 0], strict=True):
        keys, values = row[:10:2], row[1:10:2]
        assert len(set(keys)) == 5 and (0 < keys).all() and (keys < 32).all() and (values >= 32).all()
        assert len(set(at)) == 5 and (at >= 10).all() and sorted(row[at]) == sorted(keys)
        for where, target in zip(at, targets, strict=True):
            assert target == values[list(keys).index(row[where])] == row[sources[where]]
        rest = np.delete(row[10:], at - 10)
        assert not rest.any() and (np.delete(sources, at) == -1).all()
    gaps = sampled(task, 2000).at - 10
    assert (gaps == 0).mean() > 2 * (gaps == 20).mean(), "near ones are more frequent"


def test_a_histogram_counts_over_the_whole_sequence_and_not_over_padding():
    batch = sampled(tasks.Histogram(12, 3, 2))
    rows = (x[..., 0] for x in (batch.tokens, batch.targets, batch.target_weights))
    for row, counts, weights in zip(*rows, strict=True):
        real = row[row != 3].tolist()
        assert 2 <= len(real) <= 12 and weights.tolist() == [1.0] * len(real) + [0.0] * (12 - len(real))
        assert [count + 1 for count in counts[: len(real)]] == [real.count(token) for token in real]


def test_hops_go_to_what_followed_the_last_earlier_occurrence():
    batch = sampled(tasks.Hop(20, 3, 3))
    assert {int(k) for k in batch.tokens[:, 0, 0] - 3} == {0, 1, 2, 3}
    rows = zip(batch.tokens[..., 0], batch.targets, batch.target_weights, batch.sources, strict=True)
    for row, targets, weights, sources in rows:
        k, chars = row[0] - 3, row[1:].tolist()
        assert all(a != b for a, b in zip(chars, chars[1:], strict=False))
        assert weights[0].sum() == 0 and (weights[1:].sum(-1) == 1).all() and (weights[1:, k] == 1).all()
        for i in range(len(chars)):
            at = i
            for _ in range(k):
                earlier = [s for s in range(at) if chars[s] == chars[at]] if at is not None else []
                at = earlier[-1] + 1 if earlier else None
            assert targets[i + 1, k] == (3 if at is None else chars[at])
            assert sources[i + 1, k] == (-1 if at is None else at + 1)


def end_of_hops(chars, at, times=1):
    for _ in range(times):
        at = max(s for s in range(at) if chars[s] == chars[at]) + 1
    return at


@pytest.mark.slow
def test_patches_of_hops_predict_the_answer_of_what_is_read():
    task = tasks.Hop(length=40, symbols=4, hops=2)
    arrays = lambda key: {name: one._replace(what=()) for name, one in task.patch(key, 32).items()}
    patches = jax.device_get(jax.jit(arrays)(jax.random.key(5)))
    assert set(patches) == set(task.patches) and tasks.Hop(hops=1).patch(jax.random.key(0), 2) == {}
    for name, patch in patches.items():
        assert patch.counts.sum() > 8 and (patch.tokens[:, 0] == 6).all() and (patch.other[:, 0] == 6).all()
        assert patch.place == 2 and not patch.at[:, 0].any()
        for row in np.flatnonzero(patch.counts):
            here, there = (tokens[row, 1:, 0].tolist() for tokens in (patch.tokens, patch.other))
            assert all(a != b for chars in (here, there) for a, b in zip(chars, chars[1:], strict=False))
            query, predicted = patch.query[row] - 1, patch.predicted[row]
            at = np.flatnonzero(patch.at[row, 1:]).tolist()
            first, end = (end_of_hops(here, query, k) for k in (1, 2))
            assert first - end > 2 and here[end] == patch.answer[row] != predicted
            if name == "leads here":
                assert at == [first] and here[first - 2 : first] == there[first - 2 : first]
                ends = [end_of_hops([*chars[:first], there[first]], first) for chars in (here, there)]
                assert here[ends[0]] == predicted and max(ends) < first - 2
                assert there[ends[1]] not in (predicted, patch.answer[row])
                continue
            changed = [*here[:end], predicted, *here[end + 1 :]]
            assert end_of_hops(changed, query, 2) == end
            around = slice(max(end - 2, 0), end + 3)
            near = [end, end + 1, end + 2]
            if name == "near the end":
                assert at == near and there[around] == changed[around] and there != changed
            else:
                assert at == [s for s in range(39) if s not in near] and there == changed


def built(task, **changes):
    options = config.Model(num_layers=1, num_heads=2, model_dim=12, head_dim=6, **changes)
    transformer, batch, rng = model.make(options, task), sampled(task, 3, 1), np.random.default_rng(0)
    shapes = jax.eval_shape(transformer.init, jax.random.key(0), batch.tokens)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(x.dtype) / x.shape[0] ** 0.5, shapes)
    return transformer, params, batch


def test_relative_keys_are_a_vector_for_each_distance():
    transformer, params, batch = built(tasks.Markov(9, 2), position="relative_keys", norm=False)
    weights = jax.jit(lambda params: head_scores.weights_of(transformer, params, batch.tokens))(params)[:, 0]
    leaves = params["params"]
    block = leaves["layer_0"]
    x = leaves["embed_0"]["embedding"][np.asarray(batch.tokens[..., 0])]
    projected = lambda layer: np.einsum("btm,mnh->btnh", x, layer["kernel"]) + layer.get("bias", 0.0)
    named = {name: projected(block["attention"][name]) for name in ("query", "key")}
    asking = projected(block["relative_query"])
    scores = np.full((3, 2, 9, 9), -np.inf)
    for t in range(9):
        for s in range(t + 1):
            product = named["query"][:, t] * named["key"][:, s] + asking[:, t] * block["relative_keys"][t - s]
            scores[:, :, t, s] = product.sum(-1) / 6**0.5
    np.testing.assert_allclose(weights, reference.softmax(scores), atol=1e-5)


def test_a_window_padding_and_later_tokens_are_seen_as_they_say():
    def see(transformer, params, batch):
        weights = jax.jit(lambda params: head_scores.weights_of(transformer, params, batch.tokens))(params)
        return np.asarray(weights)[:, 0, 0]

    weights = see(*built(tasks.Markov(9, 2), window=3))
    t, s = np.indices((9, 9))
    np.testing.assert_array_equal(weights[0] > 0, (s <= t) & (s > t - 3))
    padded = built(tasks.Histogram(9, 2, 3), causal=False)
    real = np.asarray(padded[2].real)
    np.testing.assert_array_equal(see(*padded) > 0, np.broadcast_to(real[:, None, :], (3, 9, 9)))


def test_only_what_is_asked_is_read_out_and_a_tied_read_out_is_the_embedding():
    transformer, params, batch = built(tasks.Recall(16, 20, 2), tied=True)
    assert "read_out" not in params["params"]

    @jax.jit
    def both(params):
        answers = transformer.apply(params, batch.tokens, at=batch.at)
        return transformer.apply(params, batch.tokens), answers, train.loss_of(answers, batch)

    whole, answers, loss = jax.device_get(both(params))
    assert whole.shape == (3, 16, 1, 20) and answers.shape == (3, 2, 1, 20)
    np.testing.assert_allclose(answers, np.take_along_axis(whole, np.asarray(batch.at)[..., None, None], 1), atol=1e-5)
    likelihood = reference.softmax(answers)[np.arange(3)[:, None], np.arange(2), 0, batch.targets[..., 0]]
    assert float(loss) == pytest.approx(-np.log(likelihood).mean(), rel=1e-5)


@pytest.mark.slow
def test_a_patch_changes_what_the_last_layer_reads():
    task = tasks.Hop(12, 3, 2)
    transformer, params, _ = built(task, position="none", norm=False)
    params["params"]["read_out"]["bias"] *= 0  # the answers differ
    tokens = sampled(task, 64).tokens
    other = np.roll(tokens, 1, 0)
    other[:, -1] = tokens[:, -1]  # the query itself stays

    @jax.jit
    def shares(params):
        clean, elsewhere = (transformer.apply(params, x)[:, -1, 1].argmax(-1) for x in (tokens, other))
        every, answers = jnp.ones((64, 12), bool), (clean, elsewhere, clean != elsewhere)
        patch = batches.Patch(tokens, other, every, jnp.full(64, 11), *answers, 1, ("key", "value"))
        cases = [patch, patch._replace(what=("value",)), patch._replace(at=~every), patch._replace(answer=clean + 1)]
        return [evaluate.changed_by(transformer, params, one) for one in cases]

    both, value, none, wrong = map(float, shares(params))
    assert both == 1 and 0 < value < 1 and none == wrong == 0


def test_what_patches_change_is_a_metric_of_tasks_that_have_some():
    configs = (config.Config("x", task=config.Task(kind="hop", hops=hops)) for hops in (1, 2))
    names = [name for one in configs for name in claims.known_metrics(one) if name.startswith("patched/")]
    assert names == ["patched/near the end", "patched/elsewhere", "patched/leads here"]
    measured = evaluate.Measured(*(None for _ in evaluate.Measured._fields))._replace(patched={"elsewhere": np.ones(2)})
    assert claims.measure(result_of({}, [0]), measured, "patched/elsewhere") == [1, 1]


def result_of(scores, steps, **others):
    fields = {"look_steps": np.array(steps), "tracked": scores} | others
    return claims.Result(*(fields.get(name) for name in claims.Result._fields))


def test_a_turn_is_where_half_of_the_way_is_behind():
    rising = np.array([[0.1, 0.1, 0.5, 0.9, 0.9], [0.2, 0.8, 0.2, 0.2, 0.2], [0.3, 0.3, 0.3, 0.3, 0.3]])
    scores = {"induction": np.stack([rising, 0 * rising], -1)[:, :, None, :]}  # one layer, two heads
    result = result_of(scores, [0, 10, 20, 30, 40])
    np.testing.assert_allclose(claims.turn(result, "induction"), [20, 5, 40])
    np.testing.assert_allclose(claims.turn(result, "induction@0"), [20, 5, 40])
    both = {"a": scores["induction"], "b": np.roll(scores["induction"], 1, 1)}
    result = result_of(both, [0, 10, 20, 30, 40])
    assert claims.measure(result, object(), "turn/a")[0] == 20
    settings = config.Config("x", train=config.Train(seeds=3))
    result = result._replace(seeds=[7, 8, 9], config=settings)
    later = config.Claim("x", "", "turn/b", 1, minus="other:turn/a", at_least=1)
    row = claims.judge(later, {"": result, "other": result})
    assert row["values"] == pytest.approx([20, 10, 0]) and row["passed"] == [7, 8]
    assert row["metric"] == "turn/b - other:turn/a"
    row = claims.judge(config.Claim("x", "", "turn/a", 1, at_most=20), {"": result})
    assert row["passed"] == [7, 8] and row["reference"] == []
    rising[1, 3] = np.nan  # neither "never" nor a step
    np.testing.assert_allclose(onset.half_way(np.arange(5) * 10, rising), [20, np.nan, 40])
    np.testing.assert_allclose(onset.half_fall(np.arange(5) * 10, -rising), [20, np.nan, 40])


def test_a_level_is_rested_at_while_the_loss_is_near_it():
    metrics = {"above/unigram": np.array([[0.2, 0.005, -0.009, -0.05], [0.1, 0.1, 0.1, 0.1]])}
    result = result_of({}, [0], metric_steps=np.array([10, 20, 30, 40]), metrics=metrics)
    assert claims.measure(result, object(), "rests/unigram") == [20, 0]


def test_a_level_is_passed_when_the_loss_is_nearer_to_the_next():
    above = {"bigram": [[0.3, 0.2, 0.06, 0.01], [0.3] * 4], "unigram": [[0.2, 0.1, -0.04, -0.09], [0.2] * 4]}
    result = result_of(
        {}, [0],
        config=config.Config("x", task=config.Task(kind="markov")),
        metric_steps=np.array([10, 20, 30, 40]),
        metrics={f"above/{name}": np.array(values) for name, values in above.items()},
    )  # fmt: skip
    assert claims.measure(result, object(), "passes/bigram") == [40, 40]
    result.metrics["above/bigram"][1, 0] = np.nan
    np.testing.assert_equal(claims.measure(result, object(), "passes/bigram"), [40, np.nan])


def test_what_may_hold_again_is_told_by_the_seeds_that_passed():
    assert onset.rate(10, 10) == pytest.approx([0.6915, 1.0], abs=1e-3)
    assert onset.rate(9, 10) == pytest.approx([0.5550, 0.9975], abs=1e-3)
    assert onset.again(10, 10, 9) == pytest.approx(0.894, abs=1e-3)
    assert onset.again(9, 10, 9) < 2 / 3 < onset.again(10, 10, 10)
    assert onset.rate(1, 1) is None and onset.again(1, 1, 1) is None


@pytest.mark.parametrize("kind, changes", [
    ("markov", {"length": 12, "symbols": 3}), ("recall", {"length": 16, "symbols": 16, "pairs": 2}),
    ("histogram", {"length": 12, "symbols": 3}), ("hop", {"length": 12, "symbols": 3}),
    ("text", {"length": 16, "symbols": 20}),
])  # fmt: skip
@pytest.mark.slow
def test_a_step_of_every_task_and_what_is_tracked_of_it(kind, changes):
    settings = config.Config(
        "x",
        task=config.Task(kind=kind, **changes),
        model=config.Model(num_layers=1, num_heads=2, model_dim=8, head_dim=4, causal=kind != "histogram"),
        train=config.Train(seeds=1, steps=4, batch=2, warmup=1),
    )
    setup = train.Setup.of(settings)
    state, metrics = train.updates(setup)(setup.init(), jnp.arange(2))
    assert metrics["finite"].all()
    tracked = jax.eval_shape(train.look_at(setup), state["params"])["scores"]
    assert set(tracked) == {*setup.task.located, *head_scores.TRACKED}
    assert {f"above/{name}" for name in setup.task.levels} <= set(metrics)
    assert {*heads.OF_TOKENS} - {"induction"} <= {*setup.task.roles} <= {*setup.task.places, *head_scores.ALL}
    assert dataclasses.is_dataclass(setup.task)
