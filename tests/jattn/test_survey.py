"""``survey``: against ``heads.ablate`` and the other functions it joins, on one's own model and on interop's."""

import io
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from flax import nnx

import jattn
from jattn import heads, interop
from jattn.interop._progress import track
from jattn.reports import _effects, _language_model, _survey
from jattn.reports import survey as survey_of
from jattn.reports._clean_run import NAMES

B, T, M, V, L, N = 3, 8, 12, 11, 3, 2


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.attention = nnx.RMSNorm(M, rngs=rngs), jattn.nnx.MultiHeadAttention(N, M, rngs=rngs)
        self.mlp = nnx.Linear(M, M, rngs=rngs)

    def __call__(self, x, **options):
        x = x + self.attention(self.norm(x), is_causal=True, **options)
        return x + jnp.tanh(self.mlp(x))


class Model(nnx.Module):
    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.token_embed, self.last_norm = nnx.Embed(V, M, rngs=rngs), nnx.RMSNorm(M, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(L)])

    def embed(self, tokens):
        return 4.0 * self.token_embed(tokens)

    def unembed(self, x):
        return self.last_norm(x) @ self.output_embedding().T

    def output_embedding(self):
        return self.token_embed.embedding[...]

    def out_kernels(self):
        return jnp.stack([layer.attention.out.kernel[...] for layer in self.layers])

    def __call__(self, tokens, per_layer=None, **options):
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, **options, **({} if per_layer is None else per_layer[i]))
        return self.unembed(x)


TOKENS = np.random.default_rng(0).integers(0, V, (B, T)).astype(np.int32)


@pytest.fixture(scope="module")
def model():
    return Model()


def sown_by(model, tokens=TOKENS, **options):
    return nnx.capture(lambda model: model(jnp.asarray(tokens), sow_heads=True, **options), nnx.Intermediate)(model)[1]


def loss(logits, tokens=TOKENS):
    right = np.take_along_axis(np.asarray(logits, float)[:, :-1], tokens[:, 1:, None], -1)[..., 0]
    return (np.log(np.exp(np.asarray(logits, float)[:, :-1]).sum(-1)) - right).mean((-2, -1))


@pytest.mark.parametrize("kind", ["zero", "mean", "resample"])
@pytest.mark.slow
def test_effects_are_those_of_ablate(model, kind):
    survey = survey_of(model, TOKENS, kind=kind, exact=None)
    clean = heads.collect(sown_by(model))
    ablated = jax.jit(lambda: heads.ablate(lambda layers: model(jnp.asarray(TOKENS), layers), clean, kind))()
    expected = np.array([[loss(one) for one in layer] for layer in ablated]) - loss(model(jnp.asarray(TOKENS)))
    np.testing.assert_allclose(survey.effect, expected, atol=2e-5)
    assert abs(expected).min() > 1e-4 and survey.exact.all() and survey.estimate is None
    assert np.isclose(survey.metric, loss(model(jnp.asarray(TOKENS))), atol=1e-5)


@pytest.mark.slow
def test_the_largest_estimates_are_measured(model):
    survey, exact = survey_of(model, TOKENS, exact=2), survey_of(model, TOKENS, exact=None)

    def metric(layers):
        logits = model(jnp.asarray(TOKENS), layers)
        return jax.vmap(_language_model.next_token_loss)(logits, jnp.asarray(TOKENS)).mean()

    clean = [layer["z"] for layer in heads.collect(sown_by(model))]
    means = [{"z": jnp.broadcast_to(z.mean((0, 1)), z.shape)} for z in clean]
    estimate = np.asarray(heads.attribution_patch(metric, means, by="head_position"))
    np.testing.assert_allclose(survey.estimate, estimate.sum(-1), atol=1e-5)
    size = abs(estimate).sum(-1)
    largest = size >= np.sort(size, axis=None)[-2]
    assert (survey.exact == largest).all() and survey.exact.sum() == 2
    np.testing.assert_allclose(survey.effect, np.where(largest, exact.effect, survey.estimate), atol=1e-6)
    assert "2 of 6 heads are measured" in survey.notes[0]
    none = survey_of(model, TOKENS, exact=0)
    assert not none.exact.any() and (none.effect == none.estimate).all()


@pytest.mark.slow
def test_one_head_alone_matters(model):
    model = nnx.clone(model)
    for i, layer in enumerate(model.layers):
        kernel = layer.attention.out.kernel
        kernel[...] = jnp.where(jnp.arange(N)[:, None, None] == (1 if i == 1 else -1), kernel[...], 0.0)
    survey = survey_of(model, TOKENS, kind="zero", exact=None)
    assert survey.effect[1, 1] != 0 and abs(np.delete(survey.effect.ravel(), 3)).max() < 1e-6
    assert abs(np.delete(survey.attribution.ravel(), 3)).max() < 1e-6
    assert survey.table(1).splitlines()[1].split()[:2] == ["1", "1"]


def mean_over_queries(statistics, name):
    """Few queries of a sequence count less than many."""
    counts = np.asarray(statistics["support"][name], float)
    return (statistics[name] * counts).sum(0) / np.maximum(counts.sum(0), 1)


@pytest.mark.slow
def test_statistics_and_attribution(model):
    survey = survey_of(model, TOKENS, exact=0)
    sown = sown_by(model, sow_statistics={"names": NAMES, "tokens": jnp.asarray(TOKENS)})
    for i, layer in enumerate(heads.collect(sown, "attention_statistics")):
        for name in NAMES:
            np.testing.assert_allclose(survey.statistics[name][i], mean_over_queries(layer, name), atol=1e-6)
    x = model.embed(jnp.asarray(TOKENS))
    for layer in model.layers:
        x = layer(x)
    z = np.stack([look["z"] for look in heads.collect(sown)]).astype(float)
    x, kernels = np.asarray(x, float), np.asarray(model.out_kernels(), float)
    factor = 1 / np.sqrt((x**2).mean(-1) + 1e-6)
    rows = np.asarray(model.output_embedding(), float)[TOKENS[:, 1:]] * factor[:, :-1, None]
    expected = np.einsum("lbtnd,lndm,btm->ln", z[:, :, :-1], kernels, rows) / (B * (T - 1))
    np.testing.assert_allclose(survey.attribution, expected, atol=1e-4)
    direction = jnp.asarray(np.random.default_rng(1).normal(size=M).astype(np.float32))
    survey = survey_of(model, TOKENS, exact=0, directions=direction)
    expected = np.einsum("lbtnd,lndm,m,bt->ln", z, kernels, np.asarray(direction, float), factor) / (B * T)
    np.testing.assert_allclose(survey.attribution, expected, atol=1e-4)


@pytest.mark.slow
def test_roles_need_twins(model, monkeypatch):
    assert survey_of(model, TOKENS, exact=0).roles is None
    seeds, seen, roles = [], {}, heads.roles

    def twin(seed):
        seeds.append(seed)
        return Model(seed + 1)

    def watched(scores, null, *, level, baseline):
        seen.update(scores=scores, null=null, baseline=baseline)
        return roles(scores, null, level=level, baseline=baseline)

    monkeypatch.setattr(heads, "roles", watched)
    survey = survey_of(model, TOKENS, exact=0, twins=twin)
    assert seeds == list(range(17)), "99 scores for 5 patterns at .05, 6 a twin"
    shuffled = np.random.default_rng(0).permuted(TOKENS, axis=1)

    def scores(name, model, read, by):
        request = {"names": [name], "tokens": jnp.asarray(by)}
        layers = heads.collect(sown_by(model, read, sow_statistics=request), "attention_statistics")
        return np.stack([mean_over_queries(layer, name) for layer in layers])

    close = lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5)
    close(seen["scores"]["induction"], scores("induction", model, TOKENS, TOKENS))
    close(seen["null"]["previous_token"][3], scores("previous_token", Model(4), TOKENS, TOKENS))
    close(seen["baseline"]["first_token"], scores("first_token", model, shuffled, shuffled))
    close(seen["baseline"]["induction"], scores("induction", model, TOKENS, shuffled))
    assert survey.roles.label.shape == (L, N) and "102 heads of models with random parameters (17)" in survey.notes[1]
    assert "role" in survey.columns()


@pytest.mark.slow
def test_paths_into_a_head(model):
    paths = survey_of(model, TOKENS, exact=0, into=(2, 1)).paths
    assert paths.query.shape == paths.key.shape == (2, N)
    assert paths.pattern in heads.STATISTICS
    sown = heads.collect(sown_by(model))
    x = [model.embed(jnp.asarray(TOKENS))]
    for layer in model.layers:
        x.append(layer(x[-1]))
    change = jnp.roll(sown[0]["z"], 1, 0) - sown[0]["z"]
    stream = x[2] + jnp.einsum("btd,dm->btm", change[:, :, 1], model.out_kernels()[0, 1])
    reader = model.layers[2]
    sow = nnx.capture(lambda layer: layer(stream, sow_heads=True), nnx.Intermediate)(reader)[1]
    there = heads.collect(sow)[0]
    for name, effects in (("query", paths.query), ("key", paths.key)):
        both = {"query": sown[2]["query"], "key": sown[2]["key"], name: there[name]}
        request = {"names": [paths.pattern], "tokens": jnp.asarray(TOKENS), "is_causal": True}
        score = heads.statistics(both["query"], both["key"], **request)[paths.pattern].mean(0)[1]
        assert abs(effects[0, 1] - (score - paths.score)) < 1e-5 and abs(effects).max() > 1e-4
    strongest = paths.strongest(3)
    assert [abs(path[-1]) for path in strongest] == sorted((abs(path[-1]) for path in strongest), reverse=True)


def config(**changes):
    options = {
        "num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "model_dim": 16, "mlp_dim": 8, "vocabulary": V, "max_length": T,
        "norm_epsilon": 1e-5, "activation": "silu", "norm": "rms", "gated": True, "window": 3, "local": (True, False, True),
        "position": jattn.positions.Rotary(), "local_position": jattn.positions.Rotary(base=100.0), "score_cap": 2.0, "scale": 0.5,
    }  # fmt: skip
    return interop.Config("tiny", **(options | changes))


KINDS = {"a window in all layers": {"local": None, "local_position": None}, "in some": {}}


@pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS)
@pytest.mark.slow
def test_a_model_of_interop(changes):
    model, tokens = interop.Transformer(config(**changes), rngs=nnx.Rngs(0)), jnp.asarray(TOKENS)
    survey = survey_of(model, TOKENS, exact=None, into=(1, 0))
    clean = heads.collect(nnx.capture(lambda model: model(tokens, sow_heads=True), nnx.Intermediate)(model)[1])
    run = lambda layers: model.logits(model(tokens, per_layer=layers))
    ablated = jax.jit(lambda: heads.ablate(run, clean, "mean"))()
    expected = np.array([[loss(one) for one in layer] for layer in ablated]) - loss(model.logits(model(tokens)))
    np.testing.assert_allclose(survey.effect, expected, atol=2e-5)
    rows = model.output_embedding()[tokens[:, 1:]]
    shares = interop.logit_parts(model, tokens[:, :-1], rows)["heads"]
    np.testing.assert_allclose(survey.attribution, shares.mean((1, 2)), atol=1e-4)
    assert survey.roles.label.shape == (3, 4) and survey.paths.key.shape == (1, 4)
    # With these options, queries and keys give the lse of the run, as a report needs.
    for look, layer in zip(survey.layers, clean, strict=True):
        options = {name: x for name, x in look.items() if name not in ("query", "key", "lse")}
        lse = jattn.dot_product_attention(look["query"], look["key"], look["key"], return_residual=True, **options)[1]
        np.testing.assert_allclose(lse, layer["lse"], atol=1e-5)


@pytest.mark.slow
def test_norms_of_what_heads_write():
    model = interop.Transformer(config(norm_outputs=True), rngs=nnx.Rngs(0))
    survey = survey_of(model, TOKENS, exact=0)
    rows = model.output_embedding()[jnp.asarray(TOKENS)[:, 1:]]
    shares = interop.logit_parts(model, jnp.asarray(TOKENS)[:, :-1], rows)["heads"]
    np.testing.assert_allclose(survey.attribution, shares.mean((1, 2)), atol=1e-4)
    with pytest.raises(ValueError, match="no norm between the heads' output and the residual stream"):
        survey_of(model, TOKENS, into=(1, 0))


@pytest.mark.slow
def test_the_report_has_effects_and_attribution(model, tmp_path):
    survey = survey_of(model, TOKENS, exact=0)
    page = survey.report(tmp_path / "heads.html", is_causal=True)
    assert (page.numbers["effect"] == survey.effect.ravel()).all()
    assert (page.numbers["attribution"] == survey.attribution.ravel()).all()
    assert (tmp_path / "heads.html").read_text() == page.html and page.queries[0][0] == str(TOKENS[0, 0])


@pytest.mark.slow
def test_equal_layers_share_their_programs(model, caplog):
    longer = with_layers(*Model(1).layers, *Model(2).layers)
    survey_of(model, TOKENS, exact=2)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        survey_of(longer, TOKENS, exact=2)
    compiled = [line for line in caplog.messages if line.startswith("Finished XLA compilation of")]
    assert any("measured" in line for line in compiled), "the log has another form"
    assert not [line for line in compiled if "look" in line or "step" in line]


TIES = {
    "none": ([0.3, -0.1, 0.2, 0.5], [1.0, 2.0, 3.0, 4.0]),
    "of the estimates": ([0.3, -0.1, 0.2, 0.5], [0.0, 0.0, 0.0, 1.0]),
    "of both": ([0.25, 0.25, 0.0, -0.5, 0.0], [2.0, 1.0, 1.0, -1.0, 2.0]),
}


@pytest.mark.parametrize("effect, estimate", TIES.values(), ids=TIES)
def test_equal_effects_share_a_rank(effect, estimate):
    expected = scipy.stats.spearmanr(effect, estimate).statistic
    note = _survey._note("mean", 1.0, np.array([*effect, np.nan]), np.array([*estimate, 9.0]))
    assert note.endswith(f"{len(effect)} of {len(effect) + 1} heads are measured, their rank correlation with the estimates is {expected:.2f}")  # fmt: skip


@pytest.mark.parametrize("same, words", [("effects", ([1.0] * 3, [1.0, 2.0, 3.0])), ("estimates", ([1.0, 2.0, 3.0], [1.0] * 3))])  # fmt: skip
def test_what_is_all_equal_has_no_rank_correlation(same, words):
    note = _survey._note("mean", 1.0, *map(np.array, words))
    assert note.endswith(f"measured; all of their {same} are equal: no rank correlation")


def accuracy(logits, tokens):
    return (logits[:-1].argmax(-1) == tokens[1:]).astype(jnp.float32).mean()


@pytest.mark.slow_except("accuracy")
@pytest.mark.parametrize("metric", [accuracy, lambda logits, tokens: jnp.float32(1)], ids=["accuracy", "constant"])
def test_a_metric_without_a_gradient_has_no_estimates(model, metric):
    with pytest.raises(ValueError, match="gradient of 0 .* differentiable metric .* or exact=None to measure"):
        survey_of(model, TOKENS, metric=metric, exact=2)


@pytest.mark.slow
def test_a_metric_that_counts_is_measured(model):
    survey = survey_of(model, TOKENS, metric=accuracy, exact=None)
    right = np.asarray(model(jnp.asarray(TOKENS)))[:, :-1].argmax(-1) == TOKENS[:, 1:]
    assert survey.exact.all() and survey.metric == pytest.approx(right.mean()) and "~" not in survey.table()


def test_batches_of_heads(model, monkeypatch):
    chosen = np.array([[True, True, True], [False, True, False]])
    assert _effects.batches(chosen, 2) == [(0, [0, 1]), (0, [2]), (1, [1])]
    monkeypatch.setattr(_effects, "ROWS", 4 * TOKENS.size)
    assert [_effects.heads_at_once(n, jnp.asarray(TOKENS)) for n in (3, 4, 9)] == [3, 4, 3]
    monkeypatch.setattr(_effects, "ROWS", 1)
    alone = survey_of(model, TOKENS, exact=None).effect
    monkeypatch.undo()
    np.testing.assert_allclose(alone, survey_of(model, TOKENS, exact=None).effect, atol=1e-5)


def test_a_metric_of_the_users(model):
    survey = survey_of(model, TOKENS, exact=None, metric=lambda logits, tokens: logits[-1, tokens[0]])
    logits = np.asarray(model(jnp.asarray(TOKENS)))
    assert np.isclose(survey.metric, np.mean([logits[b, -1, TOKENS[b, 0]] for b in range(B)]), atol=1e-5)


def example(**changes):
    values = {
        "tokens": TOKENS, "metric": 2.5, "effect": np.array([[0.25, -0.5]]), "exact": np.array([[False, True]]),
        "estimate": np.array([[0.25, -0.4]]), "statistics": {"entropy": np.array([[0.5, 1.0]], np.float32)},
        "roles": heads.Roles(np.array([["mixed", "induction"]]), *[np.array([[0.1, 0.75]])] * 4),
        "attribution": np.array([[1.0, -2.0]]), "paths": None, "layers": [], "notes": ("one", "two"),
    }  # fmt: skip
    return jattn.reports.Survey(**(values | changes))


def test_the_table():
    assert example().table() == "\n".join([
        "layer  head    effect       role  score  attribution  entropy",
        "    0     1   -0.5000  induction  0.750       -2.000    1.000",
        "    0     0  ~+0.2500      mixed  0.100        1.000    0.500",
        "one",
        "two",
    ])  # fmt: skip
    paths = jattn.reports.Paths((1, 0), "induction", 0.75, np.array([[0.0, 0.01]]), np.array([[-0.5, 0.0]]))
    short = example(roles=None, attribution=None, paths=paths).table(rows=1).splitlines()
    assert short[0].split() == ["layer", "head", "effect", "entropy"]
    assert short[2:5] == [
        "head 0 of layer 1: induction 0.750; paths by the change:",
        "  its key from 0.0: -0.500",
        "  its query from 0.1: +0.010",
    ]


def test_to_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=dict))
    frame = example().to_pandas()
    assert frame["effect"].tolist() == [0.25, -0.5] and frame["exact"].tolist() == [False, True]
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pip install jattn\[pandas\]"):
        example().to_pandas()


def test_progress_is_for_terminals(monkeypatch):
    class Terminal(io.StringIO):
        isatty = lambda self: True

    for stream, show, seen in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert list(track("ab", "heads off", show)) == ["a", "b"]
        assert ("heads off: 1 of 2" in stream.getvalue()) == seen == bool(stream.getvalue())


class Deaf(nnx.Module):
    """A layer that takes the options and uses none."""

    def __call__(self, x, **options):
        return x


def with_layers(*layers):
    model = Model()
    model.layers = nnx.List(layers)
    return model


NAN = lambda logits, tokens: logits.sum() * jnp.nan
BAD = {
    "not integers": ((TOKENS * 1.0,), {}, ValueError, r"tokens must be integers \[B, T\].*float"),
    "one sequence without B": ((TOKENS[0],), {}, ValueError, r"tokens must be integers .*\[8\]"),
    "one token": ((TOKENS[:, :1],), {}, ValueError, r"T at least 2.*\[3, 1\]"),
    "a kind": ((TOKENS,), {"kind": "median"}, ValueError, "kind must be one of zero, mean, resample, got 'median'"),
    "nothing to resample from": ((TOKENS[:1],), {"kind": "resample"}, ValueError, "at least 2 sequences"),
    "negative": ((TOKENS,), {"exact": -1}, ValueError, "exact must be a number of heads.*-1"),
    "no such head": ((TOKENS,), {"into": (1, N)}, ValueError, r"into must be a layer from 1 to 2.*\(1, 2\)"),
    "no such layer": ((TOKENS,), {"into": (L, 0)}, ValueError, "into must be a layer"),
    "no head before": ((TOKENS,), {"into": (0, 0)}, ValueError, "which has heads before it"),
    "no other sequence": ((TOKENS[:1],), {"into": (1, 0)}, ValueError, "at least 2 sequences"),
    "NaN": (
        (TOKENS,),
        {"metric": NAN},
        ValueError,
        "metric must be finite on the clean run, got nan; .* vocabulary, .* positions",
    ),
    "not a scalar": ((TOKENS,), {"metric": lambda x, t: x}, ValueError, r"floating scalar .*\[8, 11\]"),
    "an integer": ((TOKENS,), {"metric": lambda x, t: x.argmax()}, ValueError, "floating scalar .* int32"),
}


@pytest.mark.parametrize("args, options, error, message", BAD.values(), ids=BAD)
def test_wrong_arguments(model, args, options, error, message):
    with pytest.raises(error, match=message):
        survey_of(model, *args, **options)


def test_more_tokens_than_positions(model):
    learned = interop.Transformer(config(position=None, local_position=None), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=rf"tokens must be \[B, T\] with T at most {T}, the model's positions, got .*\[2, 12\]"):  # fmt: skip
        survey_of(learned, np.ones((2, T + 4), int))


@pytest.mark.slow
def test_models_that_are_none(model):
    with pytest.raises(TypeError, match="got Linear without embed, layers, unembed"):
        survey_of(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), TOKENS)
    with pytest.raises(ValueError, match=r"pass \*\*options on to its jattn.nnx.MultiHeadAttention"):
        survey_of(with_layers(Deaf()), TOKENS)
    with pytest.raises(ValueError, match="at least one layer"):
        survey_of(with_layers(), TOKENS)
    config = interop.Config("bert", 2, 2, 8, 8, V, T, 1e-5, "gelu", causal=False, norm_first=False)
    bert = interop.Transformer(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="a bert is not causal and predicts no next token: pass metric="):
        survey_of(bert, TOKENS)
    survey = survey_of(bert, TOKENS, metric=lambda logits, tokens: logits[0, 0], exact=None)
    assert survey.attribution is None and "no attribution: a bert has norms after" in survey.notes[2]
    with pytest.raises(ValueError, match="into needs the model's out_kernels"):
        survey_of(bert, TOKENS, metric=lambda logits, tokens: logits[0, 0], into=(1, 0))
