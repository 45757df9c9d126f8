"""The experiment on circuits: its pairs by brute force, its choices on graphs by hand, a whole run of a tiny model."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jattn.circuits import EdgeScores, Graph
from jattn_experiments import config as configs
from jattn_experiments import optimizers, toy_circuits, train
from jattn_experiments.__main__ import main
from jattn_experiments.config import Circuits, Claim, Config, LanguageModel
from jattn_experiments.measure import circuit_metrics, circuit_tasks, circuits
from jattn_experiments.run import prepared

FIRST = "<|endoftext|>"


@pytest.fixture
def config(tiny):
    return Config(
        "tiny",
        "A tiny one.",
        language=LanguageModel(tiny, FIRST, seed=1, sequences=2, period=24),
        circuits=Circuits(pairs=2, steps=2, sizes=[5, 40], lengths=[16, 24], compared=5),
        claims=[
            Claim("kept", "All is kept.", "kept/copying/5", 1, at_least=2.0),
            Claim("same", "The same edges.", "same/24", 1, at_least=0.0),
        ],
    )


def words(text):
    """A tokenizer of whole words."""
    return [hash(word) % 10**6 + 2 for word in text.split()]


@pytest.mark.parametrize("length", [16, 64, 200])
def test_what_follows_the_last_token_is_the_answer_and_else_the_other(length):
    pairs = circuit_tasks.copying(np.arange(5, 300), 1, length, 20, np.random.default_rng(0))
    assert pairs.clean.shape == pairs.corrupt.shape == (20, length)
    for side, answers in ((pairs.clean, pairs.answer), (pairs.corrupt, pairs.other)):
        for tokens, answer in zip(side.tolist(), answers, strict=True):
            assert tokens[0] == 1 and tokens.count(tokens[-1]) == 2
            assert tokens[tokens.index(tokens[-1]) + 1] == answer
    differ = pairs.clean != pairs.corrupt
    assert (differ.sum(1) == 2).all() and (np.sort(pairs.clean, 1) == np.sort(pairs.corrupt, 1)).all()
    assert (pairs.answer != pairs.other).all()


def test_who_is_given_something_does_not_give():
    pairs = circuit_tasks.names(words, 1, 20, np.random.default_rng(0))
    for clean, corrupt, answer, other in zip(*pairs, strict=True):
        assert list(clean).count(other) == list(corrupt).count(answer) == 2
        assert list(clean).count(answer) == list(corrupt).count(other) == 1
        assert (clean != corrupt).sum() == 1
    with pytest.raises(ValueError, match="at least two of the names as single tokens"):
        circuit_tasks.names(lambda text: list(text.encode()), 1, 4, np.random.default_rng(0))


def test_no_country_is_on_both_sides():
    pairs = circuit_tasks.capitals(words, 1, 16, np.random.default_rng(0))
    chosen, judged = circuits.halves(pairs)
    sides = [{*half.answer.tolist(), *half.other.tolist()} for half in (chosen, judged)]
    assert len(sides[0]) == len(sides[1]) == 8 and not sides[0] & sides[1]
    with pytest.raises(ValueError, match="because 24 countries have single-token names and capitals"):
        circuit_tasks.capitals(words, 1, 26, np.random.default_rng(0))


def test_edges_between_the_nodes_that_matter():
    """Two layers of two heads: head 0.1 and MLP 1 matter most, and the next, head 1.0, has no room."""
    graph = Graph(2, 2, 2)
    scores = np.zeros(graph.edges.shape)
    at = {name: i for i, name in enumerate(graph.writers)}
    for name, worth in {"head 0.1": 3.0, "mlp 1": -2.0, "head 1.0": 1.0}.items():
        scores[-1, at[name]] = worth
    found = EdgeScores(graph, scores, graph.edges, np.ones(1), np.zeros(1), "eap")
    pairs = [
        *(("embedding", reader) for reader in ("query 0.1", "key 0.1", "value 0.1", "mlp 1", "logits")),
        *(("head 0.1", reader) for reader in ("mlp 1", "logits")),
        ("mlp 1", "logits"),
    ]
    for size in (8, 9, 15):
        np.testing.assert_array_equal(circuits.between_nodes(found, size), graph.select(pairs))
    assert circuits.between_nodes(found, 17).sum() == 16  # head 1.0 adds six into it and two out of it


def test_metrics_are_those_that_claims_can_name(config):
    rng, graph = np.random.default_rng(0), Graph(2, 3, 3)
    scores = np.where(graph.edges, rng.normal(size=graph.edges.shape), 0.0)
    to_keys = scores.copy()
    readers, writers = list(graph.readers), list(graph.writers)
    to_keys[readers.index("key 1.2"), writers.index("head 0.1")] = 9.0
    without_two = scores.copy()
    without_two.flat[np.argsort(-np.abs(scores), axis=None)[:2]] = 0.0
    kept = {name: np.array([0.5, 1.0]) for name in ("kept", "random", "left")}
    kept |= {"clean": np.array([2.0, -1.0]), "corrupt": np.array([-2.0, -3.0])}
    nodes = {"kept": np.array([0.25, 0.5])}
    measured = {
        "tasks": {
            task: {"kept": kept, "nodes": nodes, "scores": {"scores": to_keys}} for task in circuit_metrics.TASKS
        },
        "lengths": {
            16: [{"scores": scores}, {"scores": scores}],
            24: [{"scores": without_two}, {"scores": -scores}],
        },
        "carried": {16: {"kept": np.array([0.8, 0.6])}, 24: {"kept": np.array([0.3, 0.6])}},
    }
    looked = {"previous_token": np.arange(6.0).reshape(2, 3), "induction": 10 + np.arange(6.0).reshape(2, 3)}
    metrics = {
        name: measure.values[0] for name, measure in circuit_metrics.metrics_of(config, measured, looked).items()
    }
    assert sorted(metrics) == sorted(circuit_metrics.names(config))
    assert metrics["gap/names"] == 3.0 and metrics["right/names"] == 0.75
    assert metrics["over/copying/5"] == 0.25 and metrics["carries/24"] == 0.5 and metrics["carried/24/16"] == 0.3
    assert metrics["key/previous_token"] == 1.0 and metrics["key/induction"] == 15.0  # of head 0.1, and 1.2
    assert metrics["same/24"] == pytest.approx(5 / 3)  # all five in common with the other length's, three with its own


@pytest.mark.parametrize("change, message", [
    ({"circuits": {"pairs": 1}}, r"circuits\.pairs: expected at least 2"),
    ({"circuits": {"compared": 7}}, r"circuits\.compared: expected one of circuits\.sizes"),
    ({"circuits": {"sizes": [5, 5]}}, r"circuits\.sizes: expected distinct numbers of at least 1"),
    ({"circuits": {"lengths": [64, 32]}}, r"circuits\.lengths: expected increasing numbers of at least 16"),
    ({"circuits": {"lengths": [16, 10**6]}}, r"circuits\.lengths: expected at most \d+, the size of the model's vocabulary"),
    ({"language": {"first": "x"}}, r"language\.first: expected a token of the model, got 'x'"),
    ({"train": {"steps": 3}}, "does not apply to circuits, where nothing is trained"),
])  # fmt: skip
def test_wrong_options_are_named(config, tmp_path, change, message):
    changed = {name: dataclasses.replace(getattr(config, name), **options) for name, options in change.items()}
    config = dataclasses.replace(config, **changed, claims=[])
    with pytest.raises(ValueError, match=message), prepared(config, tmp_path / "out"):
        pass


def test_a_claim_about_nothing(config, tmp_path):
    claims = [Claim("no", "Nothing.", "kept/copying/6", 1, at_least=0.0)]
    with pytest.raises(ValueError, match=r"claims\.no\.metric"):
        circuits.check(dataclasses.replace(config, claims=claims))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:clean and corrupt differ")  # in a random model
def test_a_run_writes_its_pages_and_resumes_from_its_parts(config, tmp_path, as_experiments_run, capsys, monkeypatch):
    as_copying = lambda encode, first, count, rng: circuit_tasks.copying(np.arange(1, 20), first, 16, count, rng)
    for name in ("names", "capitals"):
        monkeypatch.setattr(circuit_tasks, name, as_copying)
    file, out = tmp_path / "tiny.yaml", tmp_path / "run"
    file.write_text(
        f"name: tiny\nlanguage: {{model: {config.language.model}, first: '{FIRST}', sequences: 2, period: 24}}\n"
        "circuits: {pairs: 2, steps: 2, sizes: [5, 40], lengths: [16], compared: 5}\n"
        "claims: [{name: kept, statement: All., metric: kept/copying/5, needed: 1, at_least: 2.0}]\n"
    )
    assert main(["run", str(file), "--out", str(out)]) == 0
    pages = [out / f"circuit-{task}.html" for task in circuit_metrics.TASKS]
    assert all("edges by eap-ig" in page.read_text() for page in pages) and (out / "report.html").exists()
    before = (out / "claims.json").read_bytes()
    kept = sorted((out / "parts").glob("*.npz"))
    for part in kept[::3]:
        part.unlink()
    (out / "findings.json").unlink()
    assert main(["run", str(file), "--out", str(out)]) == 0
    assert (out / "claims.json").read_bytes() == before and sorted((out / "parts").glob("*.npz")) == kept


# the toys


@pytest.mark.parametrize("name", ["induction", "hop"])
def test_a_toy_is_the_model_that_was_trained(name):
    setup = train.Setup.of(configs.load([name]).config)
    params = setup.model.init(jax.random.key(3), setup.task.sample(jax.random.key(0), 1).tokens)
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * jnp.asarray(rng.normal(size=x.shape), jnp.float32), params)
    pairs, place = toy_circuits.pairs_of(setup, rng)
    toy = toy_circuits.Toy(setup, params, place)
    x = toy.embed(jnp.asarray(pairs.clean[:2]))
    for layer in toy.layers:
        x = x + layer.attention(layer.attention_input(x), **layer.attention_options)
        x = x + layer.mlp_added(x)
    expected = setup.model.apply(params, pairs.clean[:2, :, None])[:, :, place]
    np.testing.assert_allclose(toy.unembed(x), expected, atol=1e-4)


def test_one_hop_away_is_the_answer():
    setup = train.Setup.of(configs.load(["hop"]).config)
    pairs, _ = toy_circuits.pairs_of(setup, np.random.default_rng(1))
    for side, answers in ((pairs.clean, pairs.answer), (pairs.corrupt, pairs.other)):
        for (k, *text), answer in zip(side.tolist(), answers, strict=True):
            last = len(text) - 2 - text[:-1][::-1].index(text[-1])
            assert k == setup.config.task.symbols + 1 and text[last + 1] == answer
            assert all(a != b for a, b in zip(text, text[1:], strict=False))


def test_a_toy_of_another_kind_is_refused():
    setup = train.Setup.of(configs.load(["copy"]).config)
    with pytest.raises(ValueError, match="expected 'induction' or 'hop', got 'copy'"):
        toy_circuits.pairs_of(setup, np.random.default_rng(0))
    with pytest.raises(ValueError, match="tokens of one field"):
        toy_circuits.Toy(setup, {"params": {}}, 0)


# Muon; optax needs what strict promotion forbids


def optimizer_of(kind):
    config = configs.load(["copy"]).config
    options = dataclasses.replace(config.train, optimizer=kind, warmup=0, weight_decay=0.0, clip=1e9)
    return optimizers.make(dataclasses.replace(config, train=options))


def params_of():
    shapes = {
        "attention": {
            **{name: {"kernel": (16, 4, 4), "bias": (4, 4)} for name in ("query", "key", "value")},
            "out": {"kernel": (4, 4, 16), "bias": (16,)},
        },
        "embed_0": {"embedding": (9, 16)},
        "read_out": {"kernel": (16, 2, 3), "bias": (2, 3)},
        "mlp_in": {"kernel": (16, 32)},
    }
    rng = np.random.default_rng(0)
    is_shape = lambda x: isinstance(x, tuple)
    return jax.tree.map(lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32), shapes, is_leaf=is_shape)


@pytest.mark.usefixtures("as_experiments_run")
@pytest.mark.parametrize("kind", ["muon", "muon_joint", "muon_per_head"])
def test_what_muon_makes_orthogonal(kind):
    """Singular values of an update lie near one number; Adam's first update is the sign of the gradient."""
    params, gradients = params_of(), params_of()
    optimizer = optimizer_of(kind)
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    apart = lambda matrix: np.ptp(np.log(np.linalg.svd(np.asarray(matrix), compute_uv=False)))
    by_adam = lambda x: np.ptp(np.abs(np.asarray(x))) < 1e-3 * np.abs(np.asarray(x)).max()
    attention = updates["attention"]
    for name in ("query", "key", "value", "out"):
        kernel = attention[name]["kernel"]
        whole = kernel.reshape(16, 16)
        each = [kernel[i] if name == "out" else kernel[:, i] for i in range(4)]
        assert by_adam(kernel) == (kind == "muon")
        if kind == "muon_joint":
            assert apart(whole) < 2.0
        elif kind == "muon_per_head":
            assert max(map(apart, each)) < 0.7 and apart(whole) > 2.5
        assert by_adam(attention[name]["bias"]) == (kind != "muon" or name == "out")
    assert by_adam(updates["embed_0"]["embedding"]) == by_adam(updates["read_out"]["bias"]) == (kind != "muon")
    assert by_adam(updates["read_out"]["kernel"]) and not by_adam(updates["mlp_in"]["kernel"])


@pytest.mark.usefixtures("as_experiments_run")
def test_adamw_is_as_before():
    params, gradients = params_of(), params_of()
    config = configs.load(["copy"]).config
    rate = optax.warmup_cosine_decay_schedule(0.0, 6e-3, 50, 800, 6e-4)
    expected = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=1e-4))
    states = [(one, one.init(params)) for one in (optimizers.make(config), expected)]
    for _ in range(3):
        results = [one.update(gradients, state, params) for one, state in states]
        jax.tree.map(np.testing.assert_array_equal, *(updates for updates, _ in results))
        states = [(one, state) for (one, _), (_, state) in zip(states, results, strict=True)]
