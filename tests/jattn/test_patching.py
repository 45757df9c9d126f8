"""Patching, groups, logit attribution and top queries: on an induction model set by hand, and against NumPy."""

import functools
from types import SimpleNamespace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads, interop
from jattn.multi_head import project
from tests import reference
from tests.reference import looks

# An attention-only model of two layers that completes "A B ... A" with B. Its residual stream is, one-hot, the token,
# the position, the token before (written by layer 0, head 0) and the prediction (written by layer 1, head 0). Heads 0
# and 1 share key and value; every other head looks everywhere and writes nothing.

N, K, V, T, BOS = 4, 2, 9, 7, 8
TOKEN, POSITION, BEFORE, PREDICTION = (slice(i * V, (i + 1) * V) for i in range(4))
SHARP = 60.0


Cases = list[tuple[Any, str]]  # arguments, and the error that they raise


def induction_model(twin=False):
    """Two layers of parameters. With ``twin``, head 3 of layer 1 does what head 0 does, and both write half."""
    layers = [
        {"query": np.zeros((4 * V, N, V)), "key": np.zeros((4 * V, K, V)), "value": np.zeros((4 * V, K, V)),
         "out": np.zeros((N, V, 4 * V))}
        for _ in range(2)
    ]  # fmt: skip
    same = np.eye(V)
    before, induction = layers
    before["query"][POSITION, 0] = SHARP * np.eye(V, k=-1)  # position p asks for p - 1
    before["key"][POSITION, 0] = same
    before["value"][TOKEN, 0] = same
    before["out"][0, :, BEFORE] = same
    for head in (0, 3) if twin else (0,):
        induction["query"][TOKEN, head] = SHARP * same  # a token asks for where it came before
        induction["key"][BEFORE, head // 2] = same
        induction["value"][TOKEN, head // 2] = same
        induction["out"][head, :, PREDICTION] = same / (2 if twin else 1)
    return [{name: {"kernel": jnp.asarray(x, jnp.float32)} for name, x in layer.items()} for layer in layers]


def embedded(tokens):
    x = np.zeros((T, 4 * V), np.float32)
    x[np.arange(T), tokens] = x[np.arange(T), V + np.arange(T)] = 1.0
    return jnp.asarray(x)[None]


@functools.partial(jax.jit, static_argnames="position")
def through(layers, x, per_layer=None, **options):
    """The last residual stream, and what every layer's attention hands out."""
    clean = []
    for i, layer in enumerate(layers):
        changes = per_layer[i] if per_layer else {}
        y, kept = jattn.multi_head_attention(layer, x, is_causal=True, return_heads=True, **options, **changes)
        x, clean = x + y, [*clean, kept]
    return x, clean


A, B, C = 0, 1, 5
CLEAN = [BOS, A, B, 2, 3, 4, A]  # the last token came before, at 1, and B followed, at 2
SOURCES = {  # what differs in the run that is patched, and for each kind of patch, the layers, heads and positions
    "another token before B": ([BOS, C, B, 2, 3, 4, A], {"v": [(0, 0, 1)], "k": [(1, 0, 2)], "z": [(0, 0, 2), (1, 0, 6)], "pattern": [(1, 0, 6)], "q": []}),
    "another last token": ([BOS, A, B, 2, 3, 4, 7], {"v": [], "k": [], "z": [(1, 0, 6)], "pattern": [(1, 0, 6)], "q": [(1, 0, 6)]}),
    "another token after A": ([BOS, A, C, 2, 3, 4, A], {"v": [(1, 0, 2)], "k": [], "z": [(1, 0, 6)], "pattern": [], "q": []}),
}  # fmt: skip


@pytest.fixture(scope="module")
def maps():
    """A function that returns every map of patches of one kind, compiled once for all sources."""
    layers = induction_model()

    @functools.partial(jax.jit, static_argnums=(2, 3))
    def every(x, source, what, by):
        def answer(per_layer):
            return through(layers, x, per_layer)[0][0, -1, PREDICTION][B]

        return heads.patch(answer, source, what, by), answer(None)

    return every


def test_the_model_set_by_hand_completes_the_pair():
    last, (first, second) = through(induction_model(), embedded(CLEAN))
    np.testing.assert_allclose(last[0, -1, PREDICTION], np.eye(V)[B], atol=1e-4)
    np.testing.assert_allclose(last[0, 1:, BEFORE], np.eye(V)[CLEAN[:-1]], atol=1e-4)
    assert set(first) == {"query", "key", "value", "lse", "z"} and second["value"].shape == (1, T, K, V)


@pytest.mark.parametrize("what", ["q", "k", "v", "z", "pattern"])
@pytest.mark.parametrize("case", SOURCES)
def test_the_patches_that_restore_the_answer_are_those_that_carry_it(maps, case, what):
    tokens, cells = SOURCES[case]
    clean = through(induction_model(), embedded(CLEAN))[1]
    result, before = maps(embedded(tokens), clean, what, "head_position")
    assert before < 0.2
    expected = np.full((2, K if what in "kv" else N, T), before)
    for cell in cells[what]:
        expected[cell] = 1.0
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize("what", ["v", "z"])
def test_patches_by_head_and_by_position(maps, what):
    tokens, cells = SOURCES["another token before B"]
    clean = through(induction_model(), embedded(CLEAN))[1]
    for by, keep in ("head", (0, 1)), ("position", (0, 2)):
        result, before = maps(embedded(tokens), clean, what, by)
        expected = np.full((2, T if by == "position" else K if what == "v" else N), before)
        for cell in cells[what]:
            expected[cell[keep[0]], cell[keep[1]]] = 1.0
        np.testing.assert_allclose(result, expected, atol=1e-4)


# Random grouped-query models, against NumPy with the patched activation written in place.


def position(x, positions):
    return x * (1 + 0.1 * positions.reshape((1,) * (x.ndim - 3) + (-1, 1, 1)).astype(x.dtype))


def in_numpy(layers, x, what="", cell=(-1,), source=()):
    """The last stream ``[B,T,M]`` in float64, with the cell ``(layer, head, position)`` taken from ``source``."""

    def hook(i, name, x):
        x = x * (1 + 0.1 * np.arange(x.shape[1])[:, None, None]) if name in "qk" else x
        if (i, name) == (cell[0], what):
            at = cell[1:] if what == "pattern" else cell[:0:-1]
            there = source[i].get(looks.NAMES.get(what, what))
            x[:, *at] = (weights_of(source[i]["query"], source[i]["key"]) if there is None else there)[:, *at]
        return x

    look = SimpleNamespace(sizes=(len(layers), *x.shape[:2], N, K, layers[0]["query"].shape[-1], 0, 0), causal=True)
    arrays = {name: np.stack([layer[name] for layer in layers]) for name in layers[0]}
    return looks.Model(look, arrays | {"x": x, "other": x}).run(hook=hook)[0]


def weights_of(query, key):
    return reference.weights(query, key, np.tri(query.shape[1], dtype=bool))


@pytest.fixture(scope="module")
def random_model():
    rng = np.random.default_rng(0)
    sizes = {"query": (8, N, 3), "key": (8, K, 3), "value": (8, K, 5), "out": (N, 5, 8)}
    drawn = [{name: jnp.float32(rng.normal(size=size) / 8**0.5) for name, size in sizes.items()} for _ in range(2)]
    layers = [{name: {"kernel": x} for name, x in layer.items()} for layer in drawn]
    x, other = jnp.float32(rng.normal(size=(2, 1, 3, 5, 8)))
    source = through(layers, other[0], position=position)[1]
    return layers, x[0], source, [{name: np.asarray(x, float) for name, x in layer.items()} for layer in drawn]


@pytest.mark.slow_except("z", "pattern")
@pytest.mark.parametrize("what", ["q", "k", "v", "z", "pattern"])
def test_every_patch_is_the_run_with_that_activation_replaced(random_model, what):
    layers, x, source, kernels = random_model

    @jax.jit
    def every(x, source):
        run = lambda per_layer: through(layers, x, per_layer, position=position)[0]
        return heads.patch(run, source, what, "head_position", batch_size=7)

    result = every(x, source)
    assert result.shape == (2, K if what in "kv" else N, 5, 3, 5, 8)
    unpatched = in_numpy(kernels, np.asarray(x, float))
    for cell in np.ndindex(result.shape[:3]):
        expected = in_numpy(kernels, np.asarray(x, float), what, cell, source)
        np.testing.assert_allclose(result[cell], expected, atol=2e-5, err_msg=f"{what} {cell}")
        # A query at position 0 sees one key, whatever it is.
        assert abs(expected - unpatched).max() > (-1 if what in ("q", "pattern") and cell[2] == 0 else 1e-3)


def test_one_program_runs_the_model_once(random_model):
    layers, x, source, _ = random_model
    chex.clear_trace_counter()
    run = chex.assert_max_traces(lambda per_layer: through(layers, x, per_layer)[0], n=1)
    shapes = jax.eval_shape(lambda: heads.patch(run, source, "pattern"))
    assert shapes.shape == (2, N, 3, 5, 8)


@pytest.mark.slow
def test_the_option_on_its_own(random_model):
    """Gates between 0 and 1, of one sequence, with several batch axes and with none; weights; both Flax modules."""
    layers, x, source, kernels = random_model
    pair = source[0]["query"], source[0]["key"]

    @functools.partial(jax.jit, static_argnames=("return_weights", "return_heads"))
    def jitted(x, **options):
        return jattn.multi_head_attention(layers[0], x, is_causal=True, position=position, **options)

    layer = lambda *x, **options: jax.device_get(jitted(*x, **options))
    x, half = np.asarray(x), np.float32([0.5, 1.0, 1.0, 1.0])
    y, weights, kept = layer(x, patch={"pattern": (half, pair)}, return_weights=True, return_heads=True)
    _, plain = layer(x, return_weights=True)
    _, other = layer(x, frozen=pair, return_weights=True)
    np.testing.assert_allclose(weights[:, 0], (plain + other)[:, 0] / 2, atol=1e-6)
    np.testing.assert_array_equal(weights[:, 1:], plain[:, 1:])
    z = np.einsum("bnts,bsnd->btnd", weights, kept["value"].repeat(2, 2))
    np.testing.assert_allclose(kept["z"], z, atol=1e-5)
    np.testing.assert_allclose(y, np.einsum("btnd,ndm->btm", z, kernels[0]["out"]), atol=1e-5)

    gate = np.ones((3, 5, K), np.float32)
    gate[1, 2, 0] = 0.0  # one sequence
    patches = jax.device_get({"value": (gate, source[0]["value"]), "key": (gate[:, 2], source[0]["key"])})
    y = layer(x, patch=patches)
    twice = layer(np.stack([x, x])[:, None], patch=jax.tree.map(lambda a: np.stack([a, a])[:, None], patches))
    np.testing.assert_allclose(twice, np.stack([y, y])[:, None], atol=1e-6)
    np.testing.assert_allclose(layer(x[1], patch=jax.tree.map(lambda a: a[1], patches)), y[1], atol=1e-6)
    np.testing.assert_array_equal(y[0], layer(x)[0])
    frozen = layer(x, frozen=pair, patch={"query": (np.float32([0.0, 1.0, 1.0, 1.0]), kept["query"])})
    assert abs(frozen - layer(x, frozen=pair)).max() > 1e-3  # frozen first, then the patch

    @jax.jit
    def both_modules(x, patch):
        of_nnx = jattn.nnx.MultiHeadAttention(N, 8, num_kv_heads=K, use_bias=False, rngs=nnx.Rngs(0))
        of_linen = jattn.linen.MultiHeadAttention(N, num_kv_heads=K, use_bias=False)
        params = {name: {"kernel": getattr(of_nnx, name).kernel[...]} for name in ("query", "key", "value", "out")}
        expected = jattn.multi_head_attention(params, x, patch=patch)
        return expected, of_nnx(x, patch=patch), of_linen.apply({"params": params}, x, patch=patch)

    fill = np.ones((3, 5, K, 2), np.float32)
    expected, *modules = both_modules(x, {"value": (np.float32([0.0, 1.0]), fill)})
    for result in modules:
        np.testing.assert_allclose(result, expected, atol=1e-6)


def test_patch_says_what_is_wrong(random_model):
    layers, x, source, _ = random_model
    run = lambda per_layer: through(layers, x, per_layer)[0]
    of_patch: Cases = [
        ((source, "weights"), "what must be one of q, k, v, z, pattern, got 'weights'"),
        ((source, "z", "token"), "by must be one of head, position, head_position, got 'token'"),
        (([],), r"source must be a list with a dict for each layer .*, got \[\]"),
        (([{}],), "each layer of source must hold 'z'; one has no 'z'"),
        (([source[0], {"z": jnp.zeros((3, 3, 4, 5))}],), r"'z' of one shape, got \[\[3, 3, 4\], \[3, 5, 4\]\]"),
    ]
    for arguments, match in of_patch:
        with pytest.raises(ValueError, match=match):
            heads.patch(run, *arguments)
    layer = functools.partial(jattn.multi_head_attention, layers[0], x)
    ones, pair = jnp.ones(N), (source[0]["query"], source[0]["key"])
    of_layers: Cases = [
        ({"patch": {"queries": 0, "keys": 0}}, "patch must have entries query, key, value, pattern, each_key, got keys, queries"),
        ({"patch": {"z": (ones, 0.0)}}, "got z; a head's output, z, is replaced by head_gate=gate and head_fill=z"),
        ({"patch": {"key": (ones, 0.0)}}, r"the gate of patch\['key'\] must be \[N\] = \[2\], .*got \[4\] for .*\[3, 5, 2, 3\]"),
        ({"patch": {"query": (ones, jnp.ones(7))}}, r"the fill of patch\['query'\] must broadcast to .*\[3, 5, 4, 3\], got \[7\]"),
        ({"patch": {"pattern": (ones, pair[::-1])}}, r"the patched query must have shape \[3, 5, 4, 3\], got \[3, 5, 2, 3\]"),
        ({"patch": {"query": {"gate": ones, "fill": 0.0}}}, r"patch\['query'\] must be a pair \(gate, fill\), got dict"),
        ({"patch": {"pattern": "ab"}}, r"patch\['pattern'\] must be a pair \(gate, \(query, key\)\), got str"),
        ({"patch": {"each_key": {"gate", "fill"}}}, r"patch\['each_key'\] must be a pair \(gate, fill\), got set"),
        ({"patch": {"pattern": (ones, {"query": pair[0], "key": pair[1]})}}, r"the patched query and key must be a pair .*, got dict"),
        ({"patch": {"pattern": (ones, pair)}, "return_statistics": ["entropy"]}, "needs weights from one query and key"),
    ]  # fmt: skip
    for options, match in of_layers:
        with pytest.raises(ValueError, match=match):
            layer(**options)


# Groups


def test_either_twin_is_enough_and_the_group_is_not():
    layers = induction_model(twin=True)
    x = embedded(CLEAN)
    clean = through(layers, x)[1]
    groups = [[(1, 0)], [(1, 3)], [(1, 3), (1, 0)], [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2)], [], [(0, 0)]]
    chex.clear_trace_counter()
    answer = lambda per_layer: through(layers, x, per_layer)[0][0, -1, PREDICTION]
    run = chex.assert_max_traces(answer, n=4)  # batches, and the rest

    @jax.jit
    def every():
        few = heads.ablate(run, clean, groups=groups[:3], batch_size=2)
        return heads.ablate(run, clean, groups=groups), heads.ablate(run, clean), few

    of_groups, of_heads, few = every()
    assert of_groups.shape == (6, V) and of_heads.shape == (2, N, V)
    of_groups, of_heads, few = jax.device_get((of_groups, of_heads, few))
    answers = of_groups[:, B]
    np.testing.assert_allclose(answers[:5], [0.5, 0.5, 0.0, 1.0, 1.0], atol=1e-4)
    assert answers[5] < 0.2 and (of_groups.argmax(-1) == B)[:2].all()
    np.testing.assert_allclose(of_groups[[0, 1, 5]], of_heads[[1, 1, 0], [0, 3, 0]], atol=1e-6)
    np.testing.assert_allclose(few, of_groups[:3], atol=1e-6)
    for wrong, match in (
        ([[(0, 0)], [(0, 1), (2, 0), (0, 4)]], r"heads of 2 layers with 4 heads, got \[\(2, 0\), \(0, 4\)\]"),
        ([[(0, -1)]], r"got \[\(0, -1\)\]"),
        ([(0, 1)], r"lists of pairs \(layer, head\), got the group \(0, 1\)"),
        ([[{1, 0}]], r"lists of pairs \(layer, head\), got the group \[{0, 1}\]"),
        ([], "at least one group"),
    ):
        with pytest.raises(ValueError, match=match):
            heads.ablate(run, clean, groups=wrong)


# Paths


@pytest.mark.parametrize("what", ["query", "key", "value"])
def test_the_previous_token_reaches_the_induction_head_through_its_key(what):
    layers = induction_model()
    x = embedded(SOURCES["another token before B"][0])
    (_, target), (_, source) = through(layers, x), through(layers, embedded(CLEAN))
    stream = through(layers[:1], x)[0]  # what layer 1 reads
    gate = np.float32(np.arange(N if what == "query" else K) > 0)

    def answer(stream):
        fill = project(layers[1][what], stream)
        return through(layers, x, [{}, {"patch": {what: (gate, fill)}}])[0][0, -1, PREDICTION][B]

    @jax.jit
    def every(stream):
        out = [layers[0]["out"]["kernel"]]
        return heads.path_patch(answer, stream, target[:1], source[:1], out), answer(stream)

    result, before = every(stream)
    assert result.shape == (1, N)
    expected = np.full((1, N), before)
    if what == "key":
        expected[0, 0] = 1.0
    np.testing.assert_allclose(result, expected, atol=1e-4)


def test_a_path_to_the_end_is_direct(random_model):
    layers, x, source, kernels = random_model
    last, target = through(layers, x, position=position)
    out = [layer["out"]["kernel"] for layer in layers]

    @jax.jit
    def every(last, target, source):
        answer = lambda stream: stream[:, -1]
        one = heads.path_patch(answer, last, target, source, out, batch_size=3)
        return one, heads.path_patch(answer, last, target, source, out, groups=[[], [(0, 3), (1, 1)]])

    result, both = jax.device_get(every(last, target, source))
    last, target, source = jax.device_get((last, target, source))
    for layer, head in np.ndindex(2, N):
        change = (np.asarray(source[layer]["z"], float) - target[layer]["z"])[:, -1, head] @ kernels[layer]["out"][head]
        np.testing.assert_allclose(result[layer, head], last[:, -1] + change, atol=1e-5)
    np.testing.assert_allclose(both[0], last[:, -1], atol=1e-5)
    np.testing.assert_allclose(both[1], result[0, 3] + result[1, 1] - last[:, -1], atol=1e-5)
    last, target, source = jax.tree.map(jnp.asarray, (last, target, source))
    with pytest.raises(ValueError, match=r"heads of 2 layers with 4 heads, got \[\(2, 0\)\]"):
        heads.path_patch(jnp.sin, last, target, source, out, groups=[[(2, 0)]])
    with pytest.raises(ValueError, match="an entry for each layer, got 2, 1 and 2"):
        heads.path_patch(jnp.sin, last, target, source[:1], out)
    with pytest.raises(ValueError, match="each layer of own and source must hold 'z'"):
        heads.path_patch(jnp.sin, last, target, [{}, {}], out)
    with pytest.raises(ValueError, match=r"for the stream \[3, 4, 8\], got"):
        heads.path_patch(jnp.sin, jnp.zeros((3, 4, 8)), target, source, out)


def test_the_score_of_the_induction_head_is_made_of_token_and_token_before():
    layers = induction_model()
    x = embedded(CLEAN)
    _, (first, second) = jax.device_get(through(layers, x))

    @jax.jit
    def parts_of_scores(z):
        parts = jnp.concatenate([x[:, :, None], heads.residual_contributions(z, layers[0]["out"]["kernel"])], 2)
        of_query, of_key = parts[0, np.array([6, 6])], parts[0, np.array([2, 3])]  # B, and the token after it
        kernels = layers[1]["query"], layers[1]["key"]
        return heads.qk_attribution(of_query.swapaxes(0, 1), of_key.swapaxes(0, 1), *kernels)

    result = parts_of_scores(first["z"])
    assert result.shape == (2, N, 1 + N, 1 + N)  # the embedding, and the heads of layer 0
    expected = np.zeros(result.shape)
    expected[0, 0, 0, 1] = SHARP / 3
    np.testing.assert_allclose(result, expected, atol=1e-3)
    scores = np.einsum("nh,enh->en", second["query"][0, 6], second["key"][0, [2, 3]].repeat(2, 1)) / 3
    np.testing.assert_allclose(np.sum(result, (2, 3)), scores, atol=1e-3)


def test_parts_of_scores_with_rotary_positions_and_biases_sum_to_them():
    rng = np.random.default_rng(0)
    kernel = lambda heads: jnp.float32(0.5 + 0.4 * rng.normal(size=(6, heads, 4)))
    draw = lambda heads: {"kernel": kernel(heads), "bias": jnp.full((heads, 4), 0.5)}
    params = {"query": draw(N), "key": draw(K)}
    of_query, of_key = (jnp.asarray(rng.normal(size=(parts, 5, 6)), jnp.float32) for parts in (3, 2))
    places = jnp.array([9, 7, 0, 3, 3]), jnp.array([0, 7, 5, 2, 1])

    @jax.jit
    def every(of_query, of_key):
        options = {"position": ROTARY, "query_positions": places[0], "kv_positions": places[1]}
        result = heads.qk_attribution(of_query, of_key, params["query"], params["key"], **options)
        query = ROTARY(project(params["query"], of_query.sum(0)), places[0])
        key = ROTARY(project(params["key"], of_key.sum(0)), places[1])
        one = ROTARY(jnp.einsum("em,mnh->enh", of_query[1], params["query"]["kernel"]), places[0])
        bias = ROTARY(jnp.tile(params["key"]["bias"][None], (5, 1, 1)), places[1])
        return result, (query * key.repeat(2, 1)).sum(-1) / 2, (one * bias.repeat(2, 1)).sum(-1) / 2

    result, scores, of_one_and_bias = jax.device_get(every(of_query, of_key))
    assert result.shape == (5, N, 4, 3)
    np.testing.assert_allclose(result.sum((2, 3)), scores, atol=1e-4)
    np.testing.assert_allclose(result[:, :, 1, 2], of_one_and_bias, atol=1e-4)
    with pytest.raises(ValueError, match=r"key_parts must be \[parts, E, M\] = \[parts, 5, 6\], got shape \[2, 4, 6\]"):
        heads.qk_attribution(of_query, jnp.zeros((2, 4, 6)), params["query"], params["key"])
    with pytest.raises(ValueError, match="position needs query_positions and kv_positions"):
        heads.qk_attribution(of_query, of_key, params["query"], params["key"], position=ROTARY)


# Logits

ROTARY = jattn.positions.Rotary()


def test_the_logit_of_the_pair_comes_from_the_induction_head():
    layers = induction_model()
    x = embedded(CLEAN)
    last, clean = through(layers, x)
    z = jnp.asarray(np.stack([layer["z"] for layer in clean]))
    out = jnp.asarray(np.stack([layer["out"]["kernel"] for layer in layers]))
    direction = np.zeros(4 * V, np.float32)
    direction[PREDICTION] = np.eye(V)[B]
    direction = jnp.asarray(direction)
    result = jax.jit(heads.logit_attribution)({"embedding": x, "heads": (z, out)}, direction, last)
    expected = np.zeros((2, N))
    expected[1, 0] = 1.0
    np.testing.assert_allclose(result["heads"][:, 0, -1], expected, atol=1e-4)
    np.testing.assert_array_equal(result["embedding"], np.zeros((1, T)))
    for arguments, match in (
        (({}, jnp.zeros(4 * V - 1), last), r"directions must broadcast to the stream \[1, 7, 36\], got \[35\]"),
        (({"mlp": jnp.zeros((1, T - 1, 4 * V))}, direction, last), r"parts\['mlp'\] must be \[\*, 1, 7, 36\], got \[1, 6, 36\]"),
        (({"heads": (z, layers[0]["out"]["kernel"])}, direction, last), r"parts\['heads'\] must be z \[\*, 1, 7, N, D\] .* got \[2, 1, 7, 4, 9\] and \[4, 9, 36\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            heads.logit_attribution(*arguments)
    with pytest.raises(ValueError, match="norm must be 'layer', 'rms' or None, got 'batch'"):
        heads.logit_attribution({}, direction, last, norm="batch")


SIZES = {"num_layers": 2, "num_heads": 4, "model_dim": 12, "head_dim": 4, "mlp_dim": 10, "vocabulary": 11, "max_length": 9, "norm_epsilon": 1e-3, "activation": "gelu"}  # fmt: skip
KINDS = {
    "layer norm, biases, learned positions": {},
    "RMS norm, grouped queries, no biases, a head": {"norm": "rms", "num_kv_heads": 2, "gated": True, "position": ROTARY, "qkv_bias": False, "out_bias": False, "mlp_bias": False, "head": True},
    "parallel": {"parallel": True, "position": ROTARY},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow_except("RMS norm, grouped queries, no biases, a head")
def test_the_parts_of_a_transformer_sum_to_the_logit(kind):
    rng = np.random.default_rng(0)
    config = interop.Config("test", **SIZES, **KINDS[kind])
    model: Any = nnx.eval_shape(lambda: interop.Transformer(config, rngs=nnx.Rngs(0)))
    state = nnx.state(model, nnx.Param)  # biases and scales that are not 0 and 1
    nnx.update(model, jax.tree.map(lambda x: jnp.float32(0.3 * rng.normal(size=x.shape) + (x.ndim < 3)), state))
    tokens = jnp.asarray(np.array([[1, 10, 3, 0, 5, 5], [7, 2, 8, 3, 1, 9]]))
    valid = jnp.asarray(np.arange(6) < np.array([[6], [4]]))
    rows, answers = np.asarray(model.output_embedding()), np.asarray(tokens[:, :1])
    directions = jnp.asarray(rows[answers] - rows[3])

    @nnx.jit
    def look(model, gates):
        options = {"valid": valid, "per_layer": [{"head_gate": gate} for gate in gates]}
        seen = nnx.capture(lambda model: model(tokens, sow_heads=True, sow_parts=True, **options), nnx.Intermediate)
        hidden, sown = seen(model)
        return interop.logit_parts(model, tokens, directions, **options), model.logits(hidden), sown

    gates = np.ones((2, 2, 4), np.float32)
    gates[1, 1, 2] = 0.0
    (parts, logits, sown), (gated, *_) = (jax.device_get(look(model, one)) for one in gates)
    expected = np.take_along_axis(logits, answers[..., None], -1)[..., 0] - logits[..., 3]
    total = parts["embedding"] + parts["heads"].sum((0, -1)) + parts["mlp"].sum(0) + parts["bias"]
    np.testing.assert_allclose(total, expected, atol=1e-4)
    assert abs(parts["heads"]).min() > 0 and (gated["heads"][1, ..., 2] == 0).all()
    assert (parts["bias"] != 0).all() == ("RMS" not in kind)
    # A head's share by hand: the norm's scale is that of the whole stream.
    stream = np.asarray(sown["last_stream"][0], float)
    z = np.asarray(heads.collect(sown)[1]["z"], float)[..., 2, :]
    added = z @ np.asarray(model.layers.attention.out.kernel[...], float)[1, 2]
    if "RMS" in kind:
        scale = np.sqrt((stream**2).mean(-1, keepdims=True) + 1e-3)
    else:
        scale, added = np.sqrt(stream.var(-1, keepdims=True) + 1e-3), added - added.mean(-1, keepdims=True)
    normed = added / scale * np.asarray(model.last_norm.scale[...])
    share = (normed * np.asarray(directions)).sum(-1)
    np.testing.assert_allclose(parts["heads"][1, :, :, 2], share, atol=1e-4)
    residual = heads.collect(sown, "residual_parts")
    assert len(residual) == 2 and residual[1]["input"].shape == (2, 6, 12)


@pytest.mark.slow
def test_a_transformer_that_scans_over_its_layers_takes_patches():
    model = interop.Transformer(interop.Config("test", **SIZES, num_kv_heads=2, position=ROTARY), rngs=nnx.Rngs(0))
    tokens, others = jax.random.randint(jax.random.key(0), (2, 2, 6), 0, 11)

    @nnx.jit
    def every(model):
        _, sown = nnx.capture(lambda model: model(others, sow_heads=True), nnx.Intermediate)(model)
        run = lambda per_layer: model(tokens, per_layer=per_layer)
        return heads.patch(run, heads.collect(sown), "q", "position"), model(tokens)

    patched, clean = every(model)
    changed = (abs(patched - clean[None, None]) > 1e-5).any((2, 4))  # [L, T, T]
    np.testing.assert_array_equal(changed[1, 1:], np.eye(6, dtype=bool)[1:])  # the first query sees one key anyway
    np.testing.assert_array_equal(changed[0, 1:], np.triu(np.ones((6, 6), bool))[1:])  # later queries read it


def test_a_stream_with_norms_in_it_is_not_a_sum():
    config = interop.Config("bert", **SIZES, norm_first=False)
    model = nnx.eval_shape(lambda: interop.Transformer(config, rngs=nnx.Rngs(0)))
    with pytest.raises(ValueError, match="a bert has norms after attention and MLP"):
        interop.logit_parts(model, jnp.zeros((1, 3), int), jnp.ones(12))
    with pytest.raises(
        ValueError, match="no layer has sown 'residual_parts'; pass sow_parts= in the call of the model"
    ):
        heads.collect({}, "residual_parts")


# The best queries of a stream


@jax.jit
def update(top, *batch):
    return top.update(*batch)


def test_the_top_queries_of_a_stream_are_those_of_all_batches_at_once():
    rng = np.random.default_rng(0)
    sizes = (3, 1, 2, 4)
    scores = [rng.integers(0, 40, (2, size, 5, 3)).astype(np.float32) for size in sizes]  # with ties
    scores[0][:, 0, 3:] = -np.inf  # padding
    tokens = [rng.integers(0, 9, (size, 5)) for size in sizes]
    top = heads.top_queries(6, 2, 3)
    for batch in zip(scores, tokens, strict=True):
        top = update(top, *batch)
    all_scores, all_tokens = np.concatenate(scores, 1), np.concatenate(tokens)
    assert int(top.seen) == 10
    for layer, head in np.ndindex(2, 3):
        flat = all_scores[layer, :, :, head].ravel()
        order = np.argsort(-flat, kind="stable")[:6]  # of ties, the first
        np.testing.assert_array_equal(top.score[layer, head], flat[order])
        np.testing.assert_array_equal(top.sequence[layer, head], order // 5)
        np.testing.assert_array_equal(top.position[layer, head], order % 5)
        np.testing.assert_array_equal(top.token[layer, head], all_tokens.ravel()[order])


def test_top_queries_with_fewer_queries_than_places():
    top = update(heads.top_queries(4, 1), jnp.array([[[2.0], [-jnp.inf], [3.0]]]))
    np.testing.assert_array_equal(top.position, [[2, 0, -1, -1]])
    np.testing.assert_array_equal(top.sequence, [[0, 0, -1, -1]])
    np.testing.assert_array_equal(top.token, [[-1] * 4])
    top = update(top, jnp.zeros((2, 0, 1)))
    assert int(top.seen) == 3 and top.score.tolist() == [[3.0, 2.0, -jnp.inf, -jnp.inf]]
    with pytest.raises(ValueError, match=r"scores must be \[B, T, 1\], got \[2, 3, 2\]"):
        top.update(jnp.zeros((2, 3, 2)))
    with pytest.raises(ValueError, match=r"tokens must be \[B, T\] = \[2, 3\], like scores, got \[3, 2\]"):
        top.update(jnp.zeros((2, 3, 1)), jnp.zeros((3, 2), int))
    with pytest.raises(ValueError, match="tokens must lie within int32, .* to 4294967296"):
        top.update(jnp.zeros((1, 2, 1)), np.array([[0, 2**32]]))
    for wrong in ((0, 4), (3,), (3, 0)):
        with pytest.raises(ValueError, match="positive integers"):
            heads.top_queries(*wrong)


def test_nan_takes_no_place_among_the_top_queries_and_is_counted():
    batches = jnp.array([[[[1.0], [jnp.nan], [2.0]]], [[[5.0], [7.0], [jnp.nan]]], [[[6.0], [jnp.inf], [-jnp.inf]]]])
    top = heads.top_queries(3, 1)
    for batch in batches:
        top = update(top, batch)
    assert top.score.tolist() == [[jnp.inf, 7.0, 6.0]]
    assert top.sequence.tolist() == [[2, 1, 2]] and top.position.tolist() == [[1, 1, 0]]
    assert top.undefined.tolist() == [2]


def test_integers_that_float32_cannot_tell_apart_are_no_scores():
    exact = np.array([[[2**24 - 1], [2**24], [-(2**24)]]])
    top = heads.top_queries(2, 1)
    assert top.update(jnp.asarray(exact)).position.tolist() == [[1, 0]]
    for wrong in ([[[0], [1], [0]]], [[[0], [0], [-1]]]):
        with pytest.raises(ValueError, match=r"every integer up to 2\^24 = 16777216, got 16777217"):
            top.update(jnp.asarray(exact + wrong))
