"""Attribution patching: against patches, NumPy and dense attention; on saturated heads, where gradients vanish."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
from jattn import heads, interop
from jattn.kernels.blockwise import Blockwise
from jattn.multi_head import attend_heads
from tests.jattn.test_patching import (
    CLEAN,
    PREDICTION,
    ROTARY,
    SIZES,
    SOURCES,
    B,
    K,
    N,
    embedded,
    in_numpy,
    induction_model,
    position,
    random_model,  # noqa: F401  a fixture
    through,
    weights_of,
)

BY = ("head", "position", "head_position")
ARRAY = {"q": "query", "k": "key", "v": "value"}


@pytest.fixture(scope="module")
def saturated(random_model):  # noqa: F811
    """Layers with scores of up to 100, their kernels in NumPy, a metric linear in the last stream, and two inputs."""
    layers = [{name: {"kernel": np.asarray(w["kernel"]) * np.float32(40.0 if name == "query" else 1.0)}
               for name, w in one.items()} for one in random_model[0]]  # fmt: skip
    weight = np.random.default_rng(0).normal(size=(3, 5, 8))
    run = lambda x, per_layer: (through(layers, x, per_layer, position=position)[0] * weight).sum()
    kernels = [{name: np.asarray(one[name]["kernel"], float) for name in one} for one in layers]
    x = np.asarray(random_model[1])
    return layers, kernels, weight, run, x, x[::-1] * np.float32(0.7)


@pytest.mark.parametrize("what", ["q", "k", "v", "z", "pattern"])
@pytest.mark.slow_except("pattern")
def test_in_the_last_layer_the_estimate_is_the_effect(saturated, what):
    layers, kernels, weight, run, x, other = saturated

    @jax.jit
    def every(x, other):
        (_, target), (_, source) = (through(layers, of, position=position) for of in (x, other))
        here = functools.partial(run, x)
        estimates = [heads.attribution_patch(here, source, what, by) for by in BY]
        of_heads = heads.patch(here, source, what, "head") - here(None)
        if what not in ARRAY or what == "v":
            return estimates, of_heads, target, source, of_heads
        gates = [jnp.ones((1, 5, N if what == "q" else K))] * 2
        options = lambda gates: [{"patch": {ARRAY[what]: (gate, layer[ARRAY[what]])}} for gate, layer in zip(gates, source, strict=True)]  # fmt: skip
        naive = -jax.grad(lambda gates: here(options(gates)))(gates)[1][0].T
        return estimates, of_heads, target, source, naive

    (by_head, by_position, each), of_heads, target, source, naive = jax.device_get(every(x, other))
    weights = weights_of(*(np.asarray(target[1][name], float) for name in ("query", "key")))
    assert (weights[:, :, 1:].max(-1) > 0.999).mean() > 0.5
    unpatched = (in_numpy(kernels, np.asarray(x, float)) * weight).sum()
    expected = np.zeros(each.shape[1:])
    for cell in np.ndindex(expected.shape):
        expected[cell] = (in_numpy(kernels, np.asarray(x, float), what, (1, *cell), source) * weight).sum() - unpatched
    largest = abs(expected).max()
    assert largest > 1
    np.testing.assert_allclose(each[1], expected, atol=2e-4 * largest)
    np.testing.assert_allclose(by_position[1], expected.sum(0), atol=4e-4 * largest)
    np.testing.assert_allclose(by_head[1], of_heads[1], atol=4e-4 * largest)
    if what in ("q", "k"):  # gradients in queries and keys miss most of it
        far = abs(expected) > 0.1
        assert np.median(abs(naive - expected)[far]) > 0.5 * np.median(abs(expected)[far])


@pytest.mark.slow
def test_in_earlier_layers_the_estimate_is_of_first_order(random_model):  # noqa: F811
    @jax.jit
    def every(layers, x, step):
        (_, target), (_, other) = (through(layers, of, position=position) for of in (x, x[::-1]))
        source = jax.tree.map(lambda a, b: a + step * (b - a), target, other)
        run = lambda per_layer: jnp.sin(through(layers, x, per_layer, position=position)[0]).sum()
        return heads.attribution_patch(run, source, "k", "head_position")[0], source

    layers, x, _, kernels = random_model
    errors = []
    with jax.enable_x64(True):
        layers, x = jax.tree.map(lambda a: a.astype(jnp.float64), (layers, x))
        for step in (1e-3, 1e-4):
            estimate, source = every(layers, x, step)
            of_run = lambda *patch: np.sin(in_numpy(kernels, np.asarray(x), *patch)).sum()
            effects = np.array([of_run("k", (0, *cell), source) - of_run() for cell in np.ndindex(K, 5)]).reshape(K, 5)
            assert estimate.dtype == jnp.float64
            errors.append(abs(np.asarray(estimate) - effects).max() / abs(effects).max())
    assert errors[1] < 1e-3 and 8 < errors[0] / errors[1] < 12  # of second order, relative to a change of first order


@pytest.mark.slow
def test_the_induction_model_is_found_cell_by_cell():
    """The cells are those of ``patch``. In layer 1 so are the effects; from layer 0 on, layer 1's softmax is linear."""
    layers, clean = induction_model(), through(induction_model(), embedded(CLEAN))[1]

    @jax.jit
    def every(x):
        answer = lambda per_layer: through(layers, x, per_layer)[0][0, -1, PREDICTION][B]
        kinds = ("q", "k", "v", "z", "pattern")
        return {what: heads.attribution_patch(answer, clean, what, "head_position") for what in kinds}, answer(None)

    for tokens, cells in SOURCES.values():
        estimates, before = every(embedded(tokens))
        for what, estimate in estimates.items():
            expected = np.zeros(estimate.shape)
            for cell in cells[what]:  # of seven keys with equal weights, one scores 20 more
                expected[cell] = 1.0 - before if cell[0] == 1 else 20 * (1 / 7) * (6 / 7)
            np.testing.assert_allclose(estimate, expected, atol=1e-4, err_msg=what)


# Each key on its own, against dense attention with that key replaced

T, S, H, D = 7, 6, 3, 5
TABLE = np.linspace(-1.0, 1.0, 20, dtype=np.float32)
CASES: dict[str, dict[str, Any]] = {
    "a mask, a score function, a bias, positions, sinks, blocks": {
        "is_causal": True, "score_mod": lambda score, b, h, q, kv: score + jnp.asarray(TABLE)[q - kv] * (h + 1),
        "bias": np.sin(np.arange(T * S, dtype=np.float32)).reshape(T, S), "query_positions": np.array([5, 0, 1, 2, 3, 4, 9]),
        "kv_positions": np.array([[0, 2, 1, 3, 4, 5], [1, 1, 2, 4, 8, 9]]), "sinks": np.float32([-2.0, 0.0, 3.0, 30.0]),
        "implementation": Blockwise((4, 4)),
    },
    "rows that see nothing, one or equal keys, and dropout": {
        "mask": (np.arange(T)[:, None] > np.arange(S)) & (np.arange(S) < 5), "query_seq_lengths": np.array([7, 5]),
        "local_window_size": (2, 0), "dropout_rate": 0.4, "dropout_rng": jax.random.key(3),
    },
    "a key that no score function sees": {"score_mod": lambda score, b, h, q, kv: jnp.where((score > 0.2) | (q == 3), score, -jnp.inf), "scale": 0.5},
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs():
    rng = np.random.default_rng(7)
    sizes = (2, T, N, H), (2, S, K, H), (2, S, K, D), (2, S, K, H)
    query, key, value, fill = (rng.normal(size=size).astype(np.float32) for size in sizes)
    # Some queries score keys by up to 60 apart, some key ties with another, and one ties with its replacement.
    query[:, ::2] *= 30.0
    key[0, 1] = key[0, 2]
    fill[1, 3] = key[1, 3]
    return query, key, value, fill


def by_hand(query, key, value, fill, options):
    """z ``[B,T,N,D]`` of dense attention, and what it changes by with each key replaced, ``[S,K,B,T,N,D]``."""
    dense = {**options, "implementation": "xla"}
    z = attend_heads(query, key, value, **dense)

    def change(number):
        off = (jnp.arange(S * K) == number).reshape(1, S, K, 1)
        return attend_heads(query, jnp.where(off, fill, key), value, **dense) - z

    return z, jax.vmap(change)(jnp.arange(S * K)).reshape(S, K, *z.shape)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.slow
def test_the_effect_of_each_key_is_that_of_attention_with_it_replaced(inputs, case):
    options, gate = CASES[case], np.sin(np.arange(2 * S * K)).reshape(2, S, K)
    weight = np.cos(np.arange(2 * T * N * D)).reshape(2, T, N, D)

    @jax.jit
    def every(query, key, value, fill, gate):
        of_gate = lambda gate: attend_heads(query, key, value, patch={"each_key": (gate, fill)}, **options)
        z, pull = jax.vjp(of_gate, gate)
        return z, pull(jnp.asarray(weight, z.dtype))[0], by_hand(query, key, value, fill, options)

    result, slope, (z, each) = jax.tree.map(np.asarray, every(*inputs, np.float32(gate)))
    assert np.isfinite(z).all() and abs(each).max() > 1
    np.testing.assert_allclose(result, z + np.einsum("bsk,skbtnd->btnd", 1 - gate, each), atol=2e-4)
    np.testing.assert_allclose(-slope, np.einsum("skbtnd,btnd->bsk", each, weight), atol=1e-3)


@pytest.mark.slow
def test_unseen_keys_may_hold_anything_and_an_open_gate_changes_no_bit(inputs):
    """In bfloat16."""
    query, *rest = (jnp.asarray(x[:1].astype(jnp.bfloat16)) for x in inputs)
    options: dict[str, Any] = {"key_value_seq_lengths": jnp.array([4])}

    @jax.jit
    def both(query, key, value, fill):
        of_gate = lambda gate: attend_heads(query, key, value, patch={"each_key": (gate, fill)}, **options)
        z, pull = jax.vjp(of_gate, jnp.ones((1, S, K)))
        return z, pull(jnp.ones_like(z))[0], attend_heads(query, key, value, **options)

    z, slope, expected = both(query, *(x.at[:, 4:].set(jnp.nan) for x in rest))
    np.testing.assert_array_equal(z, expected)
    assert z.dtype == jnp.bfloat16 and not slope[:, 4:].any()
    wide = (x.astype(jnp.float32) for x in (query, *rest))
    of_each = jax.jit(lambda *x: by_hand(*x, options)[1])(*wide).sum((3, 4, 5))
    np.testing.assert_allclose(-slope[0], of_each[..., 0], atol=0.05 * abs(of_each).max())


@pytest.mark.slow
def test_memory_is_linear():
    """Compiled, not run: queries, keys and their effects at T = S = 4096, whose scores take 64 MiB a head."""
    length = 4096
    shape = jax.ShapeDtypeStruct((1, length, 2, 8), jnp.float32)

    def effects(x, source, what):
        run = lambda per_layer: attend_heads(x, x, x, is_causal=True, **per_layer[0]).sum()
        return heads.attribution_patch(run, [{"query": source, "key": source}], what, "position")

    for what in ("q", "k"):
        compiled = jax.jit(effects, static_argnums=2).lower(shape, shape, what).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < length * length * 4 / 2


@pytest.mark.slow
def test_a_transformer_that_scans_over_its_layers_is_attributed():
    model = interop.Transformer(interop.Config("test", **SIZES, num_kv_heads=2, position=ROTARY), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 6), 0, 11)

    @nnx.jit
    def every(model):
        target = heads.collect(nnx.capture(lambda model: model(tokens, sow_heads=True), nnx.Intermediate)(model)[1])
        source = jax.tree.map(lambda x: x + 0.02 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), target)
        run = lambda per_layer: model.logits(model(tokens, per_layer=per_layer))[:, -1, 3].sum()
        patched = heads.patch(run, source, "k", "position") - run([{}, {}])
        return heads.attribution_patch(run, source, "k", "position"), patched

    estimate, effect = every(model)
    assert estimate.shape == (2, 6) and abs(effect).max() > 1e-3
    np.testing.assert_allclose(estimate, effect, atol=0.05 * abs(effect).max())


def test_attribution_patch_runs_once_and_says_what_is_wrong(random_model):  # noqa: F811
    layers, x, source, _ = random_model
    chex.clear_trace_counter()
    run = chex.assert_max_traces(lambda per_layer: through(layers, x, per_layer)[0].sum(), n=1)
    for what, axes in (("k", (2, K, 5)), ("q", (2, N, 5))):
        chex.clear_trace_counter()
        assert jax.eval_shape(lambda what=what: heads.attribution_patch(run, source, what, BY[2])).shape == axes
    of_stream = lambda per_layer: through(layers, x, per_layer)[0]
    for arguments, match in (
        ((of_stream, source), r"run must return a floating scalar, got float32 of shape \[3, 5, 8\]"),
        ((lambda per_layer: 3, source), r"a floating scalar, got int32 of shape \[\]"),
        ((run, source, "weights"), "what must be one of q, k, v, z, pattern, got 'weights'"),
        ((run, source, "k", "token"), "by must be one of head, position, head_position, got 'token'"),
        ((run, [{"key": source[0]["key"]}], "k"), "each layer of source must hold 'key', 'query'; one has no 'query'"),
    ):
        with pytest.raises(ValueError, match=match):
            heads.attribution_patch(*arguments)
    layer = functools.partial(jattn.multi_head_attention, layers[0], x)
    wrong: list[tuple[Any, str]] = [
        ((jnp.ones(N), 0.0), r"the gate of patch\['each_key'\] must be \[N\] = \[2\], .*got \[4\] for .*\[3, 5, 2, 3\]"),
        ((jnp.ones(K), jnp.ones(7)), r"the fill of patch\['each_key'\] must broadcast to .*\[3, 5, 2, 3\], got \[7\]"),
    ]  # fmt: skip
    for each_key, match in wrong:
        with pytest.raises(ValueError, match=match):
            layer(patch={"each_key": each_key})


@pytest.mark.slow
def test_blocks_that_are_cut_change_nothing():
    """Blocks of 512 are cut into pieces of 256; those of 256 are not."""
    draw = lambda i, count: jax.random.normal(jax.random.key(i), (1, 1024, count, 4))
    q, k, v, fill = map(draw, range(4), (2, 1, 1, 1))
    q = q.at[:, :, 0].multiply(20)  # some keys hold nearly everything
    gate = jnp.ones((1, 1024, 1)).at[0, ::7].set(0.0)
    options = {"is_causal": True, "patch": {"each_key": (gate, fill)}}
    of = {size: attend_heads(q, k, v, **options, implementation=Blockwise((size, size))) for size in (256, 512)}
    np.testing.assert_allclose(of[512], of[256], atol=2e-4 * float(abs(of[256]).max()))
