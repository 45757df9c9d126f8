"""Interventions: every single-head ablation in one program, importance, and forbidden patterns."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads
from jattn.heads._ablation import KINDS
from jattn.masks import Causal

B, T, M, L, N = 3, 7, 8, 2, 4


class Model(nnx.Module):
    """Attention layers on a residual stream: a user's model with jattn's modules."""

    def __init__(self, rngs):
        self.layers = nnx.List([jattn.nnx.MultiHeadAttention(N, M, num_kv_heads=2, rngs=rngs) for _ in range(L)])

    def __call__(self, x, per_layer=None, **options):
        for i, layer in enumerate(self.layers):
            x = x + layer(x, is_causal=True, **options, **(per_layer[i] if per_layer else {}))
        return x


@pytest.fixture(scope="module")
def model():
    return nnx.jit(lambda: Model(nnx.Rngs(0)))()


@pytest.fixture(scope="module")
def x():
    return jnp.float32(np.random.default_rng(1).normal(size=(B, T, M)))


@pytest.fixture(scope="module")
def clean(model, x):
    _, sown = nnx.jit(nnx.capture(lambda model: model(x, sow_heads=True), nnx.Intermediate))(model)
    return [layer["attention_heads"][0] for _, layer in sorted(sown["layers"].items())]


def by_hand(model, x, off, kind, hold, clean):
    """The forward pass, layer by layer, computed directly from the parameters."""
    for i, layer in enumerate(model.layers):
        params = {name: getattr(layer, name) for name in ("query", "key", "value", "out")}
        query, key, value = (params[name](x) for name in ("query", "key", "value"))
        if hold:
            query, key = clean[i]["query"], clean[i]["key"]
        weights = jattn.attention_weights(query, key, is_causal=True)
        z = jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(value, 2, 2))
        if off[0] == i:
            fill = {
                "zero": 0.0,
                "mean": clean[i]["z"][:, :, off[1]].mean((0, 1)),
                "resample": clean[i]["z"][jnp.array([B - 1, *range(B - 1)]), :, off[1]],
            }[kind]
            z = z.at[:, :, off[1]].set(fill)
        x = x + params["out"](z)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("hold", [False, True], ids=["", "weights held"])
@pytest.mark.parametrize("kind", KINDS)
def test_ablate_switches_off_each_head_alone(model, x, clean, kind, hold):
    graph, state = nnx.split(model)

    @jax.jit
    def every(state):
        return heads.ablate(lambda per_layer: nnx.merge(graph, state)(x, per_layer), clean, kind, freeze_weights=hold)

    result = every(state)
    assert result.shape == (L, N, B, T, M)
    with jax.numpy_rank_promotion("allow"):
        for off in np.ndindex(L, N):
            expected = by_hand(model, x, off, kind, hold, clean)
            np.testing.assert_allclose(result[off], expected, atol=1e-5, err_msg=str(off))
    if kind == "mean" and hold:
        few = heads.ablate(lambda layers: model(x, layers), clean, kind, freeze_weights=hold, batch_size=3)
        np.testing.assert_allclose(few, result, atol=1e-5)


@pytest.mark.slow
def test_one_program_runs_the_model_once(model, x, clean):
    chex.clear_trace_counter()
    run = chex.assert_max_traces(lambda per_layer: model(x, per_layer), n=1)
    assert jax.jit(lambda: heads.ablate(run, clean))().shape == (L, N, B, T, M)


@pytest.mark.slow
def test_importance_is_the_slope_of_the_gate(model, x):
    def losses(gates):
        y = model(x, [{"head_gate": gate} for gate in gates])
        return jnp.sin(y).sum((1, 2))

    losses = jax.jit(losses)
    result = heads.importance(losses, L, N, B)
    for layer, head in np.ndindex(L, N):
        step = jnp.zeros((L, B, N)).at[layer, :, head].set(1e-2)
        slope = (losses(1.0 + step) - losses(1.0 - step)) / 2e-2
        np.testing.assert_allclose(result[layer, head], abs(slope).mean(), rtol=2e-2)
    half = Model(nnx.Rngs(0))
    nnx.update(half, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), nnx.state(half)))

    def sum_of_half(gates):  # a gate's slope is a sum over many numbers, too many for bfloat16
        y = half(jnp.tile(x, (1, 40, 1)).astype(jnp.bfloat16), [{"head_gate": gate} for gate in gates])
        return (y.astype(jnp.float32) ** 2).sum((1, 2))

    def sum_of_whole(gates):
        return (model(jnp.tile(x, (1, 40, 1)), [{"head_gate": gate} for gate in gates]) ** 2).sum((1, 2))

    with jax.numpy_dtype_promotion("standard"):
        pair = [heads.importance(jax.jit(losses_of), L, N, B) for losses_of in (sum_of_half, sum_of_whole)]
    np.testing.assert_allclose(*pair, rtol=0.05)
    with pytest.raises(ValueError, match=r"one loss for each sequence, \[3\], got \[\]"):
        heads.importance(lambda gates: losses(gates).sum(), L, N, B)


def test_ablate_and_forbid_say_what_is_wrong(clean):
    query, run, alone = np.zeros((5, N, 2), np.float32), lambda layers: 0.0, "at least 2 sequences"
    only_z = lambda part: [{"z": layer["z"][part]} for layer in clean]
    for call, message in (
        (lambda: heads.ablate(run, clean, "noise"), "kind must be one of zero, mean, resample, got 'noise'"),
        (lambda: heads.ablate(run, [clean[0], {"z": clean[1]["z"][:, :, :3]}]), r"same number of heads, got \[3, 4\]"),
        (lambda: heads.ablate(run, only_z(slice(1)), "resample"), alone),
        (lambda: heads.ablate(run, only_z(0), "resample"), alone),  # without batch, so that the first axis is tokens
        (lambda: heads.ablate(run, []), "clean must be a list with a dict for each layer"),
        (lambda: heads.ablate(run, [{}]), "each layer of clean must hold 'z'.*; one has no 'z'"),
        (lambda: heads.ablate(run, only_z(...), freeze_weights=True), "each layer of clean must hold 'z'.*; one has no 'query'"),
        (lambda: heads.forbid(previous, heads=[-1]), r"heads must be indices of at least 0, got \[-1\]"),
        (lambda: jattn.attention_weights(query, query, mask=heads.forbid(previous, np.array([True, False, True]))), r"forbid: heads must be bools \[N\] = \[4\], one for each query head, got \[3\]"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.slow
def test_any_number_of_batch_axes(x):
    """Statistics, heads, fills and frozen weights have the batch axes of the input."""
    layer = jattn.linen.MultiHeadAttention(N)
    params = jax.jit(layer.init)(jax.random.key(0), x)
    looks = {"sow_heads": True, "sow_statistics": {"names": ["entropy"]}, "mutable": ["intermediates"]}
    apply = jax.jit(lambda x, **options: layer.apply(params, x, is_causal=True, **options, **looks))
    one, sown = apply(x[0])
    single = {name: sown["intermediates"][f"attention_{name}"][0] for name in ("heads", "statistics")}
    assert single["heads"]["z"].shape == (T, N, 2) and single["statistics"]["entropy"].shape == (N,)
    many = jnp.stack([x, x[::-1]])
    _, sown = apply(many)
    of_many = sown["intermediates"]["attention_heads"][0]
    np.testing.assert_allclose(of_many["z"][0, 0], single["heads"]["z"], atol=1e-6)
    gates = jnp.array([1.0, 0.0, 1.0, 1.0])
    fill = jnp.roll(of_many["z"], 1, 0)
    held = of_many["query"], of_many["key"]
    gated, sown = apply(many, head_gate=gates, head_fill=fill, frozen=held)
    z = sown["intermediates"]["attention_heads"][0]["z"]  # as returned, with gates applied
    np.testing.assert_allclose(z[:, :, :, 1], fill[:, :, :, 1], atol=1e-6)
    np.testing.assert_allclose(z[:, :, :, 0], of_many["z"][:, :, :, 0], atol=1e-6)


def test_fills_and_held_weights_of_another_shape(x):
    layer = jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="head_fill without head_gate"):
        layer(x, head_fill=jnp.zeros((N, 2)))
    with pytest.raises(ValueError, match=r"head_fill must broadcast to the heads' outputs \[3, 7, 4, 2\], got \[5\]"):
        layer(x, head_gate=jnp.ones(N), head_fill=jnp.zeros(5))
    with pytest.raises(ValueError, match=r"the frozen key must have shape \[3, 7, 4, 2\], got \[3, 6, 4, 2\]"):
        layer(x, frozen=(jnp.zeros((B, T, N, 2)), jnp.zeros((B, T - 1, N, 2))))
    with pytest.raises(ValueError, match="head_fill, frozen: only jattn's own attention_fn takes them"):
        other = jattn.nnx.MultiHeadAttention(N, M, attention_fn=nnx.dot_product_attention, rngs=nnx.Rngs(0))
        other(x, head_fill=jnp.zeros((N, 2)), frozen=(x, x))


def previous(b, h, q_idx, kv_idx):
    return kv_idx == q_idx - 1


@pytest.mark.slow
@pytest.mark.parametrize("length", [9, 300])
def test_a_forbidden_pattern_gets_no_weight(length):
    query, key = np.random.default_rng(0).normal(size=(2, 2, length, N, 5)).astype(np.float32)
    mask = Causal() & heads.forbid(previous, heads=[1, 3])
    names = ["previous_token", "entropy", "distance", "first_token"]
    look = jax.jit(lambda *both: [heads.statistics(*both, mask=one, names=names) for one in (mask, Causal())])
    forbidden, free = look(query, key)
    assert (forbidden["previous_token"][:, [1, 3]] == 0).all() and (forbidden["previous_token"][:, [0, 2]] > 0.01).all()
    for name in ("entropy", "distance", "first_token"):
        np.testing.assert_allclose(forbidden[name][:, [0, 2]], free[name][:, [0, 2]], rtol=1e-5)


@pytest.mark.parametrize("chosen", [np.array([False, True, False, True]), [False, True, False, True]])
def test_heads_may_be_bools(chosen):
    i = np.arange(6)
    args = 0, np.arange(N)[:, None, None], i[:, None], i
    by_index, by_bool = (heads.forbid(previous, selection) for selection in ([1, 3], chosen))
    np.testing.assert_array_equal(by_index(*args), by_bool(*args))


@pytest.mark.slow
def test_bools_may_be_traced_and_differ_between_layers(x):
    """A scan over layers, each of which hides the token before from heads of its own."""
    query, key = np.random.default_rng(0).normal(size=(2, 9, N, 5)).astype(np.float32)
    chosen = np.array([[True, False, False, True], [False, True, False, False]])

    @jax.jit
    def weights(chosen):
        def layer(carry, hidden):
            return carry, jattn.attention_weights(query, key, mask=Causal() & heads.forbid(previous, hidden))

        return jax.lax.scan(layer, None, chosen)[1]

    per_layer = weights(chosen)
    looks_back = np.diagonal(per_layer, -1, 2, 3).min(-1)  # [L,N]
    np.testing.assert_array_equal(looks_back > 0, ~chosen)
    for hidden, each in zip(chosen, per_layer, strict=True):
        mask = Causal() & heads.forbid(previous, np.flatnonzero(hidden).tolist())
        np.testing.assert_allclose(each, jattn.attention_weights(query, key, mask=mask), atol=1e-6)


@pytest.mark.slow
def test_a_forbidden_pattern_is_not_learned():
    """The task is to copy from one step back by position alone: a free head learns it, a forbidden one cannot."""
    tokens = jax.random.randint(jax.random.key(0), (16, 12), 0, 5)
    values, table = jax.nn.one_hot(tokens, 5)[:, :, None].repeat(2, 2), jnp.zeros((12, 12, 2))

    def loss(table, mask):
        query = jnp.zeros((16, 12, 2, 1))
        score = lambda score, b, h, q_idx, kv_idx: score + table[q_idx, kv_idx, h]
        out = jattn.dot_product_attention(query, query, values, mask=mask, score_mod=score)
        return ((out[:, 1:] - values[:, :-1]) ** 2).sum(-1).mean((0, 1))

    def train(mask):
        step = jax.jit(lambda table: table - 20.0 * jax.grad(lambda t: loss(t, mask).sum())(table))
        trained = table
        for _ in range(60):
            trained = step(trained)
        return loss(trained, mask)

    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        free, forbidden = train(Causal()), train(Causal() & heads.forbid(previous, heads=[1]))
    assert (free < 0.05).all() and forbidden[0] < 0.05 and forbidden[1] > 0.5


@pytest.mark.slow
@pytest.mark.bits
@pytest.mark.parametrize("length, dtype", [
    (33, jnp.float32), (300, jnp.bfloat16), (5, jnp.float32), (300, jnp.float32), (5, jnp.bfloat16), (33, jnp.bfloat16),
])  # fmt: skip
def test_nnx_hands_out_what_the_heads_see_beside_the_same_bits(length, dtype):
    layer = jattn.nnx.MultiHeadAttention(N, 24, num_kv_heads=2, position=jattn.positions.Rotary(), dtype=dtype, rngs=nnx.Rngs(0))  # fmt: skip
    x = jax.random.normal(jax.random.key(1), (2, length, 24), dtype)
    look = nnx.capture(lambda layer, x: layer(x, is_causal=True, sow_heads=True, sow_weights=True), nnx.Intermediate)
    alone = nnx.jit(lambda layer, x: layer(x, is_causal=True))(layer, x)
    beside, sown = nnx.jit(lambda layer, x: look(layer, x))(layer, x)
    np.testing.assert_array_equal(alone, beside)
    result, weights = sown["attention_heads"][0], np.asarray(sown["attention_weights"][0], np.float64)
    seen = heads.statistics(result["query"], result["key"], lse=result["lse"], is_causal=True, names=["max_weight"])
    tolerance = 2e-2 if dtype == jnp.bfloat16 else 1e-5
    np.testing.assert_allclose(seen["max_weight"], weights.max(-1).mean(-1), rtol=tolerance)
    assert result["lse"].shape == (2, length, N) and result["z"].shape == (2, length, N, 6)


@pytest.mark.slow
@pytest.mark.bits
def test_linen_hands_out_what_the_heads_see_also_with_two_batch_axes():
    layer = jattn.linen.MultiHeadAttention(N)
    x = jax.random.normal(jax.random.key(1), (3, 2, 9, 16))
    tokens = jax.random.randint(jax.random.key(2), (3, 2, 9), 0, 3)
    params = jax.jit(layer.init)(jax.random.key(0), x)
    request = {"names": ["induction", "entropy"], "tokens": tokens, "eligible": tokens > 0}
    apply = functools.partial(layer.apply, params, is_causal=True)
    beside, sown = jax.jit(lambda x: apply(x, sow_heads=True, sow_statistics=request, mutable=["intermediates"]))(x)
    np.testing.assert_array_equal(jax.jit(apply)(x), beside)
    (result,), (statistics,) = (sown["intermediates"][f"attention_{one}"] for one in ("heads", "statistics"))
    assert result["query"].shape == (3, 2, 9, N, 4) and result["lse"].shape == (3, 2, 9, N)

    @jax.jit
    def look(query, key, tokens):
        return heads.statistics(query, key, is_causal=True, names=request["names"], tokens=tokens, eligible=tokens > 0)

    for i, j in np.ndindex(3, 2):
        expected = look(result["query"][i, j], result["key"][i, j], tokens[i, j])
        for name in request["names"]:
            np.testing.assert_allclose(statistics[name][i, j], expected[name], rtol=1e-5, atol=1e-6)
