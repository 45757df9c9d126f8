"""Edges between heads: against NumPy that shares no code, and models set by hand whose circuits are known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.nnx
from jattn import circuits, interop
from jattn.positions import Rotary
from tests.reference.circuits import Edges

V, T, B = 23, 7, 2
PLAIN = {"qkv_bias": False, "out_bias": False, "mlp_bias": False}
GATED = {"norm": "rms", "position": Rotary(100.0), "gated": True, **PLAIN}
KINDS = {
    "gpt2": {"activation": "gelu_new"},
    "llama": {**GATED, "num_kv_heads": 2},
    "neox": {"position": Rotary(100.0, 0.5), "parallel": True, "activation": "gelu_new"},
    "gemma": {
        **GATED, "num_kv_heads": 1, "norm_outputs": True, "qk_norm": "head", "window": 3, "local": (True, False),
        "local_position": Rotary(30.0), "scale": 0.3, "score_cap": 5.0, "logit_cap": 10.0, "embed_scale": 4.0,
    },
    "olmo2": {**GATED, "norm_first": False, "norm_outputs": True, "qk_norm": "all"},
}  # fmt: skip
QUIET = {"progress": False}


def draw_model(name, seed=0):
    sizes = {"num_layers": 2, "num_heads": 4, "model_dim": 16, "mlp_dim": 12, "vocabulary": V, "max_length": 16}
    kind = {"norm_epsilon": 1e-5, "activation": "silu", **KINDS[name]}
    model = interop.Transformer(interop.Config(name, **sizes, **kind), rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)
    # Norms and biases that are not ones and zeros, and weights at which softmax is not flat.
    drawn = lambda x: x * 1.5 + 0.2 * rng.normal(size=x.shape).astype(np.float32)
    nnx.update(model, jax.tree.map(drawn, nnx.state(model)))
    return model


@pytest.fixture(scope="module")
def models():
    made = {}

    def of(name):
        if name not in made:
            model = draw_model(name)
            made[name] = model, Edges(model), circuits.graph_of(model)
        return made[name]

    return of


def draw_tokens(seed=0):
    rng = np.random.default_rng(seed)
    clean = rng.integers(0, V, (B, T))
    corrupt = clean.copy()
    corrupt[:, [0, 3]] = (corrupt[:, [0, 3]] + rng.integers(1, V, (B, 2))) % V
    return clean, corrupt


def metric(logits, tokens):
    return logits[-1, 3] - logits[-1, 7] + 0.5 * logits[2, 1]


def named(graph, edges):
    return {(graph.writers[w], graph.readers[r]) for r, w in np.argwhere(edges)}


slow_but = pytest.mark.slow_except("llama")


@slow_but
@pytest.mark.parametrize("name", KINDS)
def test_a_circuit_is_run_as_in_numpy(models, name):
    model, reference, graph = models(name)
    clean, corrupt = draw_tokens()
    rng = np.random.default_rng(1)
    sets = np.stack([graph.edges & (rng.random(graph.edges.shape) < share) for share in (0.2, 0.5, 0.9, 0.0, 1.0)])
    logits = circuits.run_circuit(model, clean, corrupt, sets)
    assert logits.shape == (5, B, T, V)
    for s, edges in enumerate(sets):
        for b in range(B):
            expected = reference.cut(clean[b], corrupt[b], named(graph, edges))
            np.testing.assert_allclose(logits[s, b], expected, atol=2e-4)
    np.testing.assert_allclose(logits[3], model.logits(model(corrupt)), atol=2e-5)
    np.testing.assert_allclose(logits[4], model.logits(model(clean)), atol=2e-5)
    # The test would see an edge: most of them change something.
    assert np.abs(logits[1] - logits[4]).max() > 0.1


@slow_but
@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_score_is_a_derivative_in_numpy(models, name):
    model, reference, graph = models(name)
    clean, corrupt = draw_tokens(2)
    found = circuits.edge_attribution(model, clean, corrupt, metric, per_example=True, **QUIET)
    np.testing.assert_allclose(found.per_example.mean(0), found.scores, atol=1e-6)
    assert (found.scores[~graph.edges] == 0).all()
    rng, step = np.random.default_rng(3), 1e-4
    edges = np.argwhere(graph.edges)
    size = np.abs(found.scores).max()
    for r, w in [*rng.permutation(edges)[:12], *found_first(found, 6)]:
        for b in range(B):
            at = (graph.writers[w], graph.readers[r])
            ends = [metric(reference.with_gates(clean[b], corrupt[b], {at: g}), None) for g in (step, -step)]
            expected = (ends[0] - ends[1]) / (2 * step)
            np.testing.assert_allclose(
                found.per_example[b, r, w], expected, atol=1e-4 * size, rtol=1e-3, err_msg=str(at)
            )


def found_first(found, count):
    return np.argwhere(found.top(count))


@slow_but
@pytest.mark.parametrize("name", KINDS)
def test_integrated_scores_are_means_of_derivatives(models, name):
    """At embeddings between the two; the change stays that of the whole way."""
    model, _, graph = models(name)
    clean, corrupt = draw_tokens(4)
    one = circuits.edge_attribution(model, clean, corrupt, metric, method="eap-ig", steps=1, **QUIET)
    eap = circuits.edge_attribution(model, clean, corrupt, metric, **QUIET)
    np.testing.assert_allclose(one.scores, eap.scores, atol=1e-6)
    ig = circuits.edge_attribution(model, clean[:1], corrupt[:1], metric, method="eap-ig", steps=100, **QUIET)
    # Every way to the metric begins at the embedding: its derivatives along the way sum to the metric's change.
    change = (ig.corrupt - ig.clean)[0]
    np.testing.assert_allclose(ig.scores[:, 0].sum(), change, atol=0.02 * np.abs(ig.scores[:, 0]).sum())


@pytest.mark.slow
def test_exact_scores_cut_one_edge_each(models):
    model, reference, graph = models("llama")
    clean, corrupt = draw_tokens(5)
    some = graph.select([("embedding", "value 0.1"), ("head 0.2", "key 1.0"), ("mlp 1", "logits"), ("mlp 0", "mlp 1")])
    found = circuits.edge_attribution(model, clean, corrupt, metric, method="exact", edges=some, **QUIET)
    assert (found.scores[~some] == 0).all()
    whole = named(graph, graph.edges)
    for r, w in np.argwhere(some):
        at = (graph.writers[w], graph.readers[r])
        change = [
            metric(reference.cut(clean[b], corrupt[b], whole - {at}), None)
            - metric(reference.cut(clean[b], corrupt[b], whole), None)
            for b in range(B)
        ]
        np.testing.assert_allclose(found.scores[r, w], np.mean(change), atol=2e-5)
    within = circuits.edge_attribution(model, clean, corrupt, metric, method="exact", edges=some, within=some, **QUIET)
    r, w = np.argwhere(graph.select([("mlp 1", "logits")]))[0]
    kept = named(graph, some)
    change = [
        metric(reference.cut(clean[b], corrupt[b], kept - {("mlp 1", "logits")}), None)
        - metric(reference.cut(clean[b], corrupt[b], kept), None)
        for b in range(B)
    ]
    np.testing.assert_allclose(within.scores[r, w], np.mean(change), atol=2e-5)


@pytest.mark.slow
def test_a_small_change_is_worth_its_derivative(models):
    """Where the corruption is small, gradients and runs agree."""
    model, _, graph = models("gemma")
    clean, _ = draw_tokens(6)
    parts = circuits._parts.Parts.of(model)
    base = circuits._runs.outputs_of(parts, circuits._runs.Example(jnp.asarray(clean[0]), None, None))
    rng = np.random.default_rng(0)
    near = jax.tree.map(lambda x: x + 1e-2 * rng.normal(size=x.shape).astype(np.float32), base)
    near = circuits.Outputs(near.embedding, near.heads, near.heads.sum(1), near.mlp)
    eap = circuits.edge_attribution(model, clean[:1], near, metric, **QUIET)
    exact = circuits.edge_attribution(model, clean[:1], near, metric, method="exact", edges=graph.edges, **QUIET)
    np.testing.assert_allclose(eap.scores, exact.scores, atol=0.02 * np.abs(exact.scores).max())


@pytest.mark.slow
def test_scores_into_the_logits_sum_to_the_linear_change(models):
    model, reference, _ = models("llama")
    clean, corrupt = draw_tokens(7)
    found = circuits.edge_attribution(model, clean[:1], corrupt[:1], metric, **QUIET)
    every = {(writer, "logits"): 1e-4 for writer in found.graph.writers}
    ends = [
        metric(reference.with_gates(clean[0], corrupt[0], {at: sign * g for at, g in every.items()}), None)
        for sign in (1, -1)
    ]
    np.testing.assert_allclose(found.scores[-1].sum(), (ends[0] - ends[1]) / 2e-4, rtol=1e-3)


@pytest.mark.slow
def test_zero_and_mean_corruptions(models):
    model, reference, graph = models("gpt2")
    clean, other = draw_tokens(8)
    mean = circuits.mean_outputs(model, other, **QUIET)
    written = [reference.run(tokens)[1] for tokens in other]
    by_name = {"embedding": mean.embedding, **{f"mlp {i}": mean.mlp[i] for i in range(2)}}
    by_name |= {f"head {i}.{n}": mean.heads[i, n] for i in range(2) for n in range(4)}
    for name in ("embedding", "head 0.2", "head 1.3", "mlp 1"):
        expected = np.mean([one[name] for one in written], (0, 1))
        np.testing.assert_allclose(by_name[name][0], expected, atol=1e-5)
    chosen = graph.edges & (np.random.default_rng(0).random(graph.edges.shape) < 0.5)
    kept, biases = named(graph, chosen), [layer["attention"]["out"]["bias"] for layer in reference.layers]
    for corrupt, base in (("zero", {}), (mean, by_name)):
        logits = circuits.run_circuit(model, clean, corrupt, chosen)

        def inputs(reader, stream, written, base=base):
            layers = {name.split()[1].split(".")[0] for name in written if name.startswith("head")}
            total = sum((biases[int(i)] for i in layers), np.zeros_like(stream))
            for name, clean in written.items():
                total = total + (clean if (name, reader) in kept else np.asarray(base.get(name, 0.0)))
            return total

        for b in range(B):
            np.testing.assert_allclose(logits[b], reference.run(clean[b], inputs)[0], atol=2e-4)


@pytest.mark.slow
def test_padding_changes_nothing(models):
    model, _, graph = models("llama")
    clean, corrupt = draw_tokens(9)
    expected = circuits.edge_attribution(model, clean, corrupt, metric, **QUIET)
    pad = lambda x: np.concatenate([x, np.full((B, 3), 5)], 1)
    valid = np.arange(T + 3)[None] < np.full((B, 1), T)
    within = lambda logits, tokens: metric(logits[:T], tokens)
    found = circuits.edge_attribution(model, pad(clean), pad(corrupt), within, valid=valid, **QUIET)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-5)


# models set by hand


class Layer(nnx.Module):
    """One head, set by hand, without a norm; an MLP only if one is given."""

    def __init__(self, query, key, value, out, scale, mlp=None):
        heads, width, dim = query.shape
        self.attention = jattn.nnx.MultiHeadAttention(heads, width, heads * dim, use_bias=False, rngs=nnx.Rngs(0))
        for name, kernel in (("query", query), ("key", key), ("value", value)):
            getattr(self.attention, name).kernel[...] = jnp.float32(kernel.transpose(1, 0, 2))
        self.attention.out.kernel[...] = jnp.float32(out)
        self.attention_options = nnx.static({"is_causal": True, "scale": scale})
        self.mlp = nnx.static(mlp)

    def attention_input(self, x):
        return x

    def mlp_added(self, x):
        return jnp.zeros_like(x) if self.mlp is None else self.mlp(x)


class ByHand(nnx.Module):
    def __init__(self, embed, unembed, layers):
        self.tables = nnx.Variable(jnp.float32(embed))
        self.read = nnx.Variable(jnp.float32(unembed))
        self.layers = nnx.List(layers)

    def embed(self, tokens):
        places = jnp.eye(self.tables.shape[1], dtype=jnp.float32)[S + jnp.arange(tokens.shape[1])]
        return self.tables[...][tokens] + places[None]

    def unembed(self, x):
        return x @ self.read[...]


S, L = 5, 6  # symbols, length
# Features: the symbol, the place, the symbol before (written by layer 0), the answer (written by layer 1).
SYMBOL, PLACE, BEFORE, ANSWER = (
    slice(a, b) for a, b in ((0, S), (S, S + L), (S + L, 2 * S + L), (2 * S + L, 3 * S + L))
)
WIDTH, DIM = 3 * S + L, max(S, L)


def kernel(rows, columns=None, shift=0):
    """``[1,M,H]``: features ``rows`` to the head's features, moved by ``shift``."""
    result = np.zeros((1, WIDTH, DIM))
    for j, i in enumerate(range(rows.start, rows.stop)):
        if 0 <= j + shift < DIM:
            result[0, i, j + shift] = 1.0
    return result


def writes(columns):
    result = np.zeros((1, DIM, WIDTH))
    for j, i in enumerate(range(columns.start, columns.stop)):
        result[0, j, i] = 1.0
    return result


def induction(sharpness):
    """Layer 0 writes the symbol before; layer 1 looks for the current symbol there, and reads what stands at that place."""
    before = Layer(kernel(PLACE, shift=-1), kernel(PLACE), kernel(SYMBOL), writes(BEFORE), 50.0)
    match = Layer(kernel(SYMBOL), kernel(BEFORE), kernel(SYMBOL), writes(ANSWER), sharpness)
    embed, unembed = np.zeros((S, WIDTH)), np.zeros((WIDTH, S))
    embed[np.arange(S), np.arange(S)] = 1.0
    unembed[np.arange(ANSWER.start, ANSWER.stop), np.arange(S)] = 1.0
    return ByHand(embed, unembed, [before, match])


def test_the_circuit_of_induction_set_by_hand():
    """e a b c d a -> b. Without the first a, its copy behind b is another symbol, and nothing else that counts."""
    model, clean, corrupt = induction(8.0), np.array([[4, 0, 1, 2, 3, 0]]), np.array([[4, 2, 1, 2, 3, 0]])
    right = lambda logits, tokens: logits[-1, 1]
    graph = circuits.graph_of(model)
    found = circuits.edge_attribution(model, clean, corrupt, right, method="exact", edges=graph.edges, **QUIET)
    assert found.clean > 0.99 and found.corrupt < 0.3
    circuit = {("embedding", "value 0.0"), ("head 0.0", "key 1.0"), ("head 1.0", "logits")}
    assert named(graph, np.abs(found.scores) > 0.01) == circuit
    np.testing.assert_allclose(found.scores[found.scores < -0.01], [found.corrupt[0] - found.clean[0]] * 3, atol=1e-5)
    kept = circuits.run_circuit(model, clean, corrupt, graph.select(circuit), right)
    np.testing.assert_allclose(kept, found.clean, atol=1e-5)
    needed = circuits.edge_attribution(
        model, clean, corrupt, right, method="exact", edges=graph.select(circuit), within=graph.select(circuit), **QUIET
    )
    assert named(graph, needed.scores < -0.5) == circuit


@pytest.mark.slow
def test_a_saturated_softmax_hides_an_edge_from_its_derivative_but_not_from_a_run():
    model, clean, corrupt = induction(60.0), np.array([[4, 0, 1, 2, 3, 0]]), np.array([[4, 2, 1, 2, 3, 0]])
    right = lambda logits, tokens: logits[-1, 1]
    graph = circuits.graph_of(model)
    at = np.argwhere(graph.select([("head 0.0", "key 1.0")]))[0]
    score = {
        method: circuits.edge_attribution(
            model,
            clean,
            corrupt,
            right,
            method=method,
            edges=graph.edges if method == "exact" else None,
            steps=10,
            **QUIET,
        ).scores[tuple(at)]
        for method in circuits._attribution.METHODS
    }
    assert abs(score["eap"]) < 1e-6 and score["exact"] < -0.7
    assert score["exact"] / 2 < score["eap-ig"] < -0.01  # few of the ten inputs between are not saturated


def heads_that_copy(signs, mlp=None):
    """Heads of one layer that each copy the first symbol to the answer, times a sign."""
    N = len(signs)
    each = np.zeros((N, WIDTH, DIM))
    first = np.zeros((1, WIDTH, DIM))
    first[0, PLACE.start, 0] = 1.0  # the key of the first place
    ask = np.zeros((1, WIDTH, DIM))
    ask[0, PLACE, 0] = 1.0
    out = np.concatenate([sign * writes(ANSWER) for sign in signs])
    layer = Layer(np.repeat(ask, N, 0), np.repeat(first, N, 0), np.repeat(kernel(SYMBOL), N, 0), out, 50.0, mlp)
    embed, unembed = np.zeros((S, WIDTH)), np.zeros((WIDTH, S))
    embed[np.arange(S), np.arange(S)] = 1.0
    unembed[np.arange(ANSWER.start, ANSWER.stop), np.arange(S)] = 1.0
    assert each.shape[0] == N
    return ByHand(embed, unembed, [layer])


@pytest.mark.slow
def test_paths_that_cancel():
    """Two heads say the same, a third the opposite of one: nothing but runs of pairs tells."""
    model, clean, corrupt = heads_that_copy([1.0, 1.0, -1.0]), np.array([[3, 1, 2]]), np.array([[4, 1, 2]])
    right = lambda logits, tokens: logits[-1, 3]
    graph = circuits.graph_of(model)
    found = circuits.edge_attribution(model, clean, corrupt, right, method="exact", edges=graph.edges, **QUIET)
    into_logits = dict(zip(graph.writers, found.scores[-1], strict=True))
    np.testing.assert_allclose([into_logits[f"head 0.{n}"] for n in range(3)], [-1, -1, 1], atol=1e-5)
    two = graph.select([("embedding", f"value 0.{n}") for n in (0, 2)] + [(f"head 0.{n}", "logits") for n in (0, 2)])
    assert abs(circuits.run_circuit(model, clean, corrupt, two, right)[0]) < 1e-5
    one = graph.select([("embedding", "value 0.0"), ("head 0.0", "logits")])
    np.testing.assert_allclose(circuits.run_circuit(model, clean, corrupt, one, right), 1.0, atol=1e-5)


@pytest.mark.slow
def test_a_backup_head():
    """Either of two heads is enough, since the MLP takes away what is said twice: no edge alone is needed, both are."""

    def once(x):
        said = x[..., ANSWER.start : ANSWER.stop]
        return jnp.zeros_like(x).at[..., ANSWER.start : ANSWER.stop].set(jnp.minimum(said, 1.0) - said)

    model, clean, corrupt = heads_that_copy([1.0, 1.0], once), np.array([[3, 1, 2]]), np.array([[4, 1, 2]])
    right = lambda logits, tokens: logits[-1, 3]
    graph = circuits.graph_of(model)
    found = circuits.edge_attribution(model, clean, corrupt, right, method="exact", edges=graph.edges, **QUIET)
    values = {name: found.scores[graph.readers.index(name), 0] for name in ("value 0.0", "value 0.1")}
    assert max(map(abs, values.values())) < 1e-5
    one_off = graph.edges & ~graph.select([("embedding", "value 0.0")])
    within = circuits.edge_attribution(
        model, clean, corrupt, right, method="exact", edges=one_off, within=one_off, **QUIET
    )
    np.testing.assert_allclose(within.scores[graph.readers.index("value 0.1"), 0], -1.0, atol=1e-5)


# what is made of scores


def test_greedy_edges_lead_to_the_logits(models):
    model, _, graph = models("llama")
    clean, corrupt = draw_tokens(10)
    found = circuits.edge_attribution(model, clean, corrupt, metric, **QUIET)
    chosen = found.greedy(25)
    assert chosen.sum() == 25 and (chosen <= graph.edges).all()
    sources = {graph.writers[w] for _, w in np.argwhere(chosen)}
    for r in np.flatnonzero(chosen.any(1))[:-1]:
        assert any(graph.writers[w] in sources for w in graph.heads_of(int(r))), graph.readers[r]
    assert found.greedy(int(graph.edges.sum())).sum() == graph.edges.sum()
    top = found.top(25)
    assert np.abs(found.scores[top]).min() >= np.abs(found.scores[graph.edges & ~top]).max()
    lines = found.table(3).splitlines()
    assert len(lines) == 5 and lines[-1] == f"and {graph.edges.sum() - 3} more"
    first = np.unravel_index(np.abs(found.scores).argmax(), graph.edges.shape)
    assert lines[1].split()[0] in graph.writers[first[1]] and found.columns()["reader"][0] == graph.readers[first[0]]


def test_faithfulness_is_what_runs_say(models):
    model, _, graph = models("llama")
    clean, corrupt = draw_tokens(11)
    scores = circuits.edge_attribution(model, clean, corrupt, metric, method="eap-ig", **QUIET)
    total = int(graph.edges.sum())
    with pytest.warns(UserWarning, match="shares of that difference mean little"):
        flat = lambda logits, tokens: metric(logits, tokens) * jnp.where(tokens[1] == clean[0, 1], 1.0, -1.0)
        circuits.faithfulness(model, clean, corrupt, flat, scores, sizes=[total], **QUIET)
    found = circuits.faithfulness(model, clean[:1], corrupt[:1], metric, scores, sizes=[0, 20, total], **QUIET)
    np.testing.assert_allclose(found.kept[[0, 2]], [0, 1], atol=1e-5)
    np.testing.assert_allclose(found.left[[0, 2]], [1, 0], atol=1e-5)
    value = circuits.run_circuit(model, clean[:1], corrupt[:1], scores.greedy(20), metric)[0]
    np.testing.assert_allclose(
        found.kept[1], (value - found.corrupt[0]) / (found.clean[0] - found.corrupt[0]), rtol=1e-4
    )
    assert found.edges[1].sum() == 20 and found.values["random"].shape == (3, 1)
    share = found.sizes / total
    np.testing.assert_allclose(found.area, np.trapezoid(found.kept, share))
    assert found.table().splitlines()[0].split() == ["edges", "kept", "95%", "interval", "random", "left"]


# what users get wrong


def test_what_cannot_be(models):
    model, _, graph = models("llama")
    clean, corrupt = draw_tokens()
    score = lambda *arguments, **options: circuits.edge_attribution(model, *arguments, **{**QUIET, **options})
    refused = [
        (lambda: score(clean, corrupt[:, :-1], metric), r"clean and corrupt must be tokens of one shape.*got shapes \[2, 7\] and \[2, 6\]"),
        (lambda: score(clean, np.stack([corrupt[0], clean[1]]), metric), "are equal in example 1"),
        (lambda: score(clean[0], corrupt[0], metric), r"clean must be integers \[B, T\], got int64 of shape \[7\]"),
        (lambda: score(clean, "nothing", metric), "corrupt must be tokens .*or 'zero', got 'nothing'"),
        (lambda: score(clean, corrupt, lambda logits, tokens: logits[-1, 0] * jnp.nan), "metric of example 0 is nan"),
        (lambda: score(clean, corrupt, lambda logits, tokens: logits[-1]), "metric must return a floating scalar"),
        (lambda: score(clean + V, corrupt, metric), r"metric of example 0 is nan .*within the vocabulary"),
        (lambda: score(clean, corrupt, metric, method="acdc"), "method must be one of eap, eap-ig, exact, got 'acdc'"),
        (lambda: score(clean, corrupt, metric, method="exact"), "here 82 times; choose edges="),
        (lambda: score(clean, corrupt, metric, valid=np.ones(T, bool)), r"valid must be bools \[B, T\]"),
        (lambda: score(clean, corrupt, metric, labels=np.zeros(3)), r"labels must be arrays \[B, ...\] with B = 2"),
        (lambda: graph.select([("head 1.0", "key 0.0")]), "'key 0.0' does not come after 'head 1.0'"),
        (lambda: graph.select([("head 9.0", "logits")]), "there is no writer 'head 9.0'"),
        (lambda: circuits.run_circuit(model, clean, corrupt, ~graph.edges), "does not come after"),
        (lambda: circuits.run_circuit(model, clean, corrupt, graph.edges[:-1]), r"edges must be bools \[..., R, W\]"),
    ]  # fmt: skip
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="model must be an nnx.Module with embed, layers and unembed"):
        circuits.graph_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    bert = interop.Config("bert", 1, 2, 8, 8, 5, 8, 1e-5, "relu", norm_first=False, causal=False)
    with pytest.raises(ValueError, match="a bert norms its residual stream itself"):
        circuits.graph_of(interop.Transformer(bert, rngs=nnx.Rngs(0)))


def test_models_of_ones_own_that_do_something_else_are_refused():
    class Causal(jattn.nnx.MultiHeadAttention):
        def __call__(self, x, **options):
            return super().__call__(x, is_causal=True, **options)

    wrong = {
        "Causal": lambda: Causal(1, WIDTH, rngs=nnx.Rngs(0)),
        "MultiHeadAttention": lambda: nnx.MultiHeadAttention(1, WIDTH, decode=False, rngs=nnx.Rngs(0)),
    }
    for name, make in wrong.items():
        model = induction(8.0)
        model.layers[1].attention = make()
        with pytest.raises(
            TypeError, match=f"attention of layer 1 must be a jattn.nnx.MultiHeadAttention .*got {name}"
        ):
            circuits.graph_of(model)
    model = induction(8.0)
    model.layers[0].attention = jattn.nnx.MultiHeadAttention(1, WIDTH, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="attention of layer 0 has dtype=bfloat16"):
        circuits.graph_of(model)
    model.layers[0].attention = jattn.nnx.MultiHeadAttention(1, WIDTH, dropout_rate=0.1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="attention of layer 0 has dropout; call model.eval"):
        circuits.graph_of(model)
    model.eval()
    assert circuits.graph_of(model).num_layers == 2
    # A name that is not part of the protocol means nothing.
    model = induction(8.0)
    tokens, graph = np.array([[4, 0, 1, 2, 3, 0]]), circuits.graph_of(model)
    before = circuits.run_circuit(model, tokens, tokens[:, ::-1], graph.edges)
    model.layers[0].attention_out_norm = nnx.LayerNorm(WIDTH, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(circuits.run_circuit(model, tokens, tokens[:, ::-1], graph.edges), before)


@pytest.mark.slow
def test_sizes_are_sorted_and_what_leads_nowhere_is_told(models):
    model, _, graph = models("llama")
    clean, corrupt = (x[:1] for x in draw_tokens(13))
    scores = circuits.edge_attribution(model, clean, corrupt, metric, **QUIET)
    judge = lambda scores, sizes: circuits.faithfulness(model, clean, corrupt, metric, scores, sizes=sizes, **QUIET)
    np.testing.assert_array_equal(judge(scores, [40, 10, 82, 10]).sizes, [10, 40, 82])
    assert judge(scores, [40, 10, 82]).area == judge(scores, [10, 40, 82]).area
    part = graph.select([("embedding", "query 0.0"), ("embedding", "value 1.0"), ("head 1.0", "logits")])
    some = circuits.edge_attribution(model, clean, corrupt, metric, edges=part, **QUIET)
    with pytest.warns(UserWarning, match=r"only 2 of the scored edges lead to the logits, so sizes \[1, 3\] become"):
        judge(some, [1, 3])
    nowhere = circuits.edge_attribution(
        model, clean, corrupt, metric, edges=part & ~graph.select([("head 1.0", "logits")]), **QUIET
    )
    for scores, sizes in ((nowhere, [1]), (some, [])):
        with pytest.raises(ValueError, match="sizes must not be empty, and scores must include edges into the logits"):
            judge(scores, sizes)


@pytest.mark.slow
def test_what_is_not_finite_is_no_result(models):
    model, _, _ = models("gpt2")
    clean, corrupt = draw_tokens(14)
    long = np.tile(clean, 3)
    with pytest.raises(ValueError, match="a gpt2 has 16 positions, got T = 21"):
        circuits.run_circuit(model, long, (long + 1) % V, circuits.graph_of(model).edges)
    with pytest.raises(ValueError, match=r"logits of example 0 are not finite .*within the vocabulary"):
        circuits.run_circuit(model, clean + V, corrupt, circuits.graph_of(model).edges)
    with pytest.raises(ValueError, match="an output of the model is not finite"):
        circuits.mean_outputs(model, clean + V, **QUIET)
    with pytest.raises(ValueError, match=r"tokens must be integers \[B, T\]"):
        circuits.mean_outputs(model, clean[0], **QUIET)
    steep = lambda logits, tokens: jnp.sqrt(jnp.abs(logits[-1, 0] * 0))
    with pytest.raises(ValueError, match="metric has a derivative that is not finite"):
        circuits.edge_attribution(model, clean, corrupt, steep, **QUIET)
    mean = circuits.mean_outputs(model, clean, **QUIET)
    other = circuits.Outputs(mean.embedding, mean.heads[:, :1], mean.attention, mean.mlp)
    with pytest.raises(ValueError, match="corrupt: outputs of heads must be .* use mean_outputs of this model"):
        circuits.run_circuit(model, clean, other, circuits.graph_of(model).edges)


@pytest.mark.slow
def test_labels_are_of_each_example(models):
    model, _, _ = models("llama")
    clean, corrupt = draw_tokens(12)
    labels = {"right": np.array([3, 4])}
    found = circuits.edge_attribution(
        model, clean, corrupt, lambda logits, tokens, labels: logits[-1, labels["right"]], labels=labels, **QUIET
    )
    np.testing.assert_allclose(found.clean, model.logits(model(clean))[[0, 1], -1, [3, 4]], atol=1e-5)
