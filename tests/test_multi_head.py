"""The multi-head layer: one product per projection, gates, any batch axes, and the two Flax modules round it."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import masks
from jattn.multi_head import project
from jattn.positions import Rotary

B, T, S, M, N, K, H, D = 2, 7, 11, 12, 6, 3, 5, 13


def layer(getkey, **options):
    """Parameters (with biases that are not zero, so that they show) and inputs."""
    options = {"num_kv_heads": K, "head_dim": H, "value_dim": D, "use_bias": True} | options
    params = jattn.init_multi_head(getkey(), M, N, **options)
    params = jax.tree.map(lambda x: x if x.ndim == 3 else jax.random.normal(getkey(), x.shape), params)
    return params, jax.random.normal(getkey(), (B, T, M)), jax.random.normal(getkey(), (B, S, M))


def by_hand(params, x, x_kv, gate=None):
    """Head by head, in float64 NumPy: the sum over heads of z_i W_i^O."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x, x_kv = np.asarray(x, np.float64), np.asarray(x_kv, np.float64)
    heads, kv_heads = params["query"]["kernel"].shape[1], params["key"]["kernel"].shape[1]
    y = 0
    for n in range(heads):
        i = n // (heads // kv_heads)
        q = x @ params["query"]["kernel"][:, n] + params["query"]["bias"][n]
        k = x_kv @ params["key"]["kernel"][:, i] + params["key"]["bias"][i]
        v = x_kv @ params["value"]["kernel"][:, i] + params["value"]["bias"][i]
        weights = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]))
        z = weights / weights.sum(-1, keepdims=True) @ v
        y += z @ params["out"]["kernel"][n] * (1 if gate is None else gate[n])
    return y + params["out"]["bias"]


def test_cross_attention_is_the_sum_over_heads(getkey):
    params, x, x_kv = layer(getkey)
    y = jattn.multi_head_attention(params, x, x_kv)
    np.testing.assert_allclose(y, by_hand(params, x, x_kv), atol=2e-5)
    np.testing.assert_allclose(jattn.multi_head_attention(params, x[0], x_kv[0]), y[0], atol=1e-5)


def test_self_attention_and_weights(getkey):
    params, x, _ = layer(getkey)
    alone = jattn.multi_head_attention(params, x)
    y, weights = jattn.multi_head_attention(params, x, return_weights=True, implementation="xla")
    np.testing.assert_array_equal(alone, y)
    np.testing.assert_allclose(y, by_hand(params, x, x), atol=2e-5)
    assert weights.shape == (B, N, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


def test_concat_times_w_o_is_the_sum_of_z_i_w_i(getkey):
    params, x, _ = layer(getkey, use_bias=False)
    query, key, value = (project(params[name], x) for name in ("query", "key", "value"))
    z = jattn.multi_head.attend_heads(query, key, value)
    concat = np.concatenate([z[:, :, n] for n in range(N)], axis=-1)
    w_o = np.concatenate([params["out"]["kernel"][n] for n in range(N)], axis=0)
    by_head = sum(np.asarray(z[:, :, n]) @ np.asarray(params["out"]["kernel"][n]) for n in range(N))
    np.testing.assert_allclose(concat @ w_o, by_head, atol=1e-5)
    np.testing.assert_allclose(jattn.multi_head_attention(params, x), by_head, atol=1e-5)


def test_projections_by_vmap_are_one_product_each(getkey):
    """q, k, v: one ``dot_general`` each, without a batch axis; the output one over both head axes."""
    params, x, _ = layer(getkey)

    def products(fn, *args):
        return [eqn for eqn in jax.make_jaxpr(fn)(*args).jaxpr.eqns if eqn.primitive.name == "dot_general"]

    for name in ("query", "key", "value"):
        (product,) = products(project, params[name], x)
        contracted, batch = product.params["dimension_numbers"]
        assert batch == ((), ()) and [len(axes) for axes in contracted] == [1, 1]

    z = jnp.zeros((B, T, N, D))
    (product,) = products(lambda z, w: jnp.tensordot(z, w, axes=2), z, params["out"]["kernel"])
    assert product.params["dimension_numbers"][1] == ((), ())
    compiled = jax.jit(lambda p, x: jattn.multi_head_attention(p, x)).lower(params, x).compile().as_text()
    assert compiled.count(" dot(") == 6  # q, k, v, scores, values, out: nothing of the lse that nobody asked for


@pytest.mark.parametrize("shape", [(N,), (B, N), (B, T, N)])
def test_head_gate(getkey, shape):
    params, x, _ = layer(getkey)
    gate = np.ones(shape, np.float32)
    gate[..., 2] = 0.0
    expected = by_hand(params, x, x, gate=[1, 1, 0, 1, 1, 1])
    np.testing.assert_allclose(jattn.multi_head_attention(params, x, head_gate=gate), expected, atol=2e-5)


def test_all_single_head_ablations_in_one_call(getkey):
    params, x, _ = layer(getkey)
    gates = 1 - np.eye(N, dtype=np.float32)
    ablated = jax.jit(jax.vmap(lambda gate: jattn.multi_head_attention(params, x, head_gate=gate)))(gates)
    for n in range(N):
        np.testing.assert_allclose(ablated[n], by_hand(params, x, x, gate=gates[n]), atol=2e-5)


def test_position_reaches_queries_and_keys(getkey):
    """Rotary attention does not notice where it starts, but does notice a gap."""
    params, x, _ = layer(getkey)
    call = lambda **options: jattn.multi_head_attention(params, x, position=Rotary(fraction=0.8), **options)
    at = lambda q, kv: call(query_positions=q, kv_positions=kv)
    here = np.arange(T)
    np.testing.assert_allclose(at(here, here), call(), atol=1e-6)
    np.testing.assert_allclose(at(here + 50, here + 50), call(), atol=1e-4)
    assert np.abs(at(here + 1, here) - call()).max() > 1e-3


def test_init_is_lecun_normal_in_flaxs_tree(getkey):
    params = jattn.init_multi_head(getkey(), 64, 8, num_kv_heads=2, value_dim=16, kv_model_dim=48, use_bias=True)
    shapes = jax.tree.map(jnp.shape, params)
    assert shapes == {
        "query": {"kernel": (64, 8, 8), "bias": (8, 8)},
        "key": {"kernel": (48, 2, 8), "bias": (2, 8)},
        "value": {"kernel": (48, 2, 16), "bias": (2, 16)},
        "out": {"kernel": (8, 16, 64), "bias": (64,)},
    }
    for name, fan_in in {"query": 64, "key": 48, "value": 48, "out": 128}.items():
        np.testing.assert_allclose(params[name]["kernel"].std() * fan_in**0.5, 1, atol=0.1)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: jattn.init_multi_head(jax.random.key(0), 10, 4), "model_dim 10 is no multiple of num_heads 4"),
        (lambda: jattn.init_multi_head(jax.random.key(0), 12, 4, num_kv_heads=3), "multiple of num_kv_heads 3"),
        (lambda: project({"kernel": jnp.zeros((4, 2, 3))}, jnp.zeros((5, 6))), r"last axis must be 4.*\(5, 6\)"),
        (
            lambda: jattn.multi_head.attend_heads(*[jnp.zeros((2, 3, 4, 5))] * 3, head_gate=jnp.ones(3)),
            r"head_gate must be \[N\] = \[4\]",
        ),
        (
            lambda: jattn.multi_head.attend_heads(*[jnp.zeros((2, 2, 3, 4, 5))] * 3, mask=jnp.ones((2, 4, 3, 3), bool)),
            r"expected batch axes \(2, 2\) and 3 more",
        ),
    ],
)
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# --- the modules ---

OPTIONS = {
    "plain": {},
    "no bias": {"use_bias": False},
    "normalised": {"normalize_qk": True},
    "features": {"qkv_features": 30, "out_features": 7},
    "bfloat16": {"dtype": jnp.bfloat16},
}
CALLS = {
    "self": lambda x, x_kv: ((x,), {}),
    "cross": lambda x, x_kv: ((x, x_kv), {}),
    "keys and values apart": lambda x, x_kv: ((x, x_kv, 2 * x_kv), {}),
    "float mask": lambda x, x_kv: (
        (x, x_kv),
        {"mask": jnp.asarray(np.arange(S) % 3 > 0, jnp.float32)[None, None, None]},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_flax_nnx_parameters_and_numbers(getkey, name):
    """Same key, same bits in the same tree; the same numbers in every kind of call."""
    options, x, x_kv = OPTIONS[name], jax.random.normal(getkey(), (B, T, M)), jax.random.normal(getkey(), (B, S, M))
    theirs = nnx.MultiHeadAttention(N, M, decode=False, rngs=nnx.Rngs(3), **options)
    ours = jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(3), **options)
    pure = lambda module: nnx.to_pure_dict(nnx.state(module, nnx.Param))
    jax.tree.map(np.testing.assert_array_equal, pure(ours), pure(theirs))
    tolerance = 3e-2 if "dtype" in options else 2e-6
    for call in CALLS.values():
        args, kwargs = call(x, x_kv)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            expected = theirs(*args, **kwargs)
        got = ours(*args, **kwargs)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=tolerance)


@pytest.mark.parametrize("name", OPTIONS)
def test_flax_linen_parameters_and_numbers(getkey, name):
    options, x, x_kv = OPTIONS[name], jax.random.normal(getkey(), (B, T, M)), jax.random.normal(getkey(), (B, S, M))
    theirs = linen.MultiHeadDotProductAttention(N, **options)
    ours = jattn.linen.MultiHeadDotProductAttention(N, **options)
    key = getkey()
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        params = theirs.init(key, x)
    jax.tree.map(np.testing.assert_array_equal, ours.init(key, x), params)
    tolerance = 3e-2 if "dtype" in options else 2e-6
    for call in CALLS.values():
        args, kwargs = call(x, x_kv)
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            expected = theirs.apply(params, *args, **kwargs)
        got = ours.apply(params, *args, **kwargs)
        assert got.dtype == expected.dtype
        np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=tolerance)


def test_names_of_the_module_classes(getkey):
    """Linen names parameters after the class, so a checkpoint fits only under the same name."""

    class Model(linen.Module):
        layer: type

        @linen.compact
        def __call__(self, x):
            return self.layer(N)(x)

    x = jnp.zeros((1, T, M))
    for name in ("MultiHeadDotProductAttention", "MultiHeadAttention"):
        ours, theirs = (Model(getattr(module, name)).init(getkey(), x) for module in (jattn.linen, linen))
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)


BEYOND = {"num_kv_heads": K, "value_dim": D, "qkv_features": 30, "position": Rotary(fraction=0.8)}


def test_the_modules_and_the_function_agree(getkey):
    """NNX, Linen and ``multi_head_attention`` on the same parameters: one set of numbers, with everything switched on."""
    params, x, _ = layer(getkey)
    positions = jnp.arange(T)[None] + jnp.array([[0], [5]])
    call = {
        "mask": masks.Causal() | masks.Prefix(2),
        "score_mod": jattn.score_mods.SoftCap(3.0),
        "bias": jax.random.normal(getkey(), (1, N, T, T)),
        "head_gate": jnp.arange(1.0, N + 1),
    }
    expected = jattn.multi_head_attention(
        params, x, position=BEYOND["position"], query_positions=positions, kv_positions=positions, **call
    )
    in_linen = jattn.linen.MultiHeadAttention(N, **BEYOND)
    np.testing.assert_allclose(
        in_linen.apply({"params": params}, x, input_positions=positions, **call), expected, atol=1e-6
    )
    in_nnx = jattn.nnx.MultiHeadAttention(N, M, **BEYOND, rngs=nnx.Rngs(0))
    nnx.update(in_nnx, params)
    np.testing.assert_allclose(in_nnx(x, input_positions=positions, **call), expected, atol=1e-6)


def test_sown_weights(getkey):
    """Under Flax's name and shape, with no bit of the output changed."""
    x = jax.random.normal(getkey(), (B, T, M))
    in_linen = jattn.linen.MultiHeadAttention(N)
    params = in_linen.init(getkey(), x)
    alone = jax.jit(lambda: in_linen.apply(params, x, is_causal=True))()
    sow = lambda: in_linen.apply(params, x, is_causal=True, sow_weights=True, mutable=["intermediates"])
    y, sown = jax.jit(sow)()
    np.testing.assert_array_equal(alone, y)
    (weights,) = sown["intermediates"]["attention_weights"]
    np.testing.assert_array_equal(weights > 0, np.broadcast_to(np.tri(T) > 0, (B, N, T, T)))

    in_nnx = jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0))
    nnx.update(in_nnx, params["params"])
    y, sown = nnx.capture(in_nnx, nnx.Intermediate)(x, is_causal=True, sow_weights=True)
    np.testing.assert_allclose(y, alone, atol=1e-6)
    (captured,) = jax.tree.leaves(nnx.to_pure_dict(sown))
    np.testing.assert_allclose(captured, weights, atol=1e-6)


def test_dropout_in_the_modules(getkey):
    x = jax.random.normal(getkey(), (B, T, M))
    in_linen = jattn.linen.MultiHeadAttention(N, dropout_rate=0.5)
    params = in_linen.init(getkey(), x, deterministic=True)
    apply = lambda **options: in_linen.apply(params, x, **options)
    off = jattn.linen.MultiHeadAttention(N).apply(params, x)
    np.testing.assert_array_equal(apply(deterministic=True), off)
    key = getkey()
    on = apply(deterministic=False, rngs={"dropout": key})
    assert np.abs(on - off).max() > 0.01
    np.testing.assert_array_equal(on, apply(deterministic=False, rngs={"dropout": key}))
    np.testing.assert_array_equal(
        apply(deterministic=False, dropout_rng=key), apply(deterministic=False, dropout_rng=key, rngs={"dropout": key})
    )
    with pytest.raises(ValueError, match="say deterministic=True or False"):
        apply()
    with pytest.raises(flax.errors.InvalidRngError):
        apply(deterministic=False)

    in_nnx = jattn.nnx.MultiHeadAttention(N, M, dropout_rate=0.5, deterministic=False, rngs=nnx.Rngs(0, dropout=1))
    first, second = in_nnx(x), in_nnx(x)
    assert np.abs(first - second).max() > 0.01
    np.testing.assert_array_equal(in_nnx(x, rngs=nnx.Rngs(dropout=7)), in_nnx(x, rngs=nnx.Rngs(dropout=7)))
    np.testing.assert_array_equal(in_nnx(x, deterministic=True), in_nnx(x, deterministic=True))


def test_any_number_of_batch_axes(getkey):
    x = jax.random.normal(getkey(), (3, B, T, M))
    module = jattn.linen.MultiHeadAttention(N, position=Rotary(1000.0))
    params = module.init(getkey(), x)
    mask = jax.random.bernoulli(getkey(), 0.7, (3, B, 1, T, T))
    positions = jnp.cumsum(jnp.ones((3, B, T), int), -1) * 2
    gate = jax.random.uniform(getkey(), (3, B, N))
    y = module.apply(params, x, mask=mask, input_positions=positions, head_gate=gate)
    for i in range(3):
        one = module.apply(params, x[i], mask=mask[i], input_positions=positions[i], head_gate=gate[i])
        np.testing.assert_allclose(y[i], one, atol=1e-6)
    np.testing.assert_allclose(module.apply(params, x[0, 0]), module.apply(params, x)[0, 0], atol=1e-6)


@pytest.mark.parametrize("options", [{"qkv_features": 13}, {"num_kv_heads": 4}])
def test_the_modules_refuse_what_does_not_divide(options):
    with pytest.raises(ValueError, match=r"qkv_features .* must be a multiple of num_heads \(6\)"):
        jattn.nnx.MultiHeadAttention(N, M, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"qkv_features .* must be a multiple of num_heads \(6\)"):
        jattn.linen.MultiHeadAttention(N, **options).init(jax.random.key(0), jnp.zeros((1, T, M)))
    with pytest.raises(ValueError, match="inputs_v without inputs_k"):
        jattn.linen.MultiHeadAttention(N).init(jax.random.key(0), jnp.zeros((1, T, M)), None, jnp.zeros((1, T, M)))


def test_nnx_transforms(getkey):
    """jit, grad, split and merge, and layers stacked by vmap and run by scan."""
    x = jax.random.normal(getkey(), (B, T, M))
    module = jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(module)
    np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(module, x), nnx.merge(graphdef, state)(x), atol=1e-6)
    gradients = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(module)
    assert all(
        np.abs(leaf).max() > 0 for path, leaf in jax.tree.leaves_with_path(gradients) if "'bias'" not in str(path)
    )

    @nnx.vmap(in_axes=0, out_axes=0)
    def build(key):
        return jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(key))

    layers = build(jax.random.split(getkey(), 3))

    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    def forward(x, layer):
        return x + layer(x)

    y, by_loop = forward(x, layers), x
    for i in range(3):
        one = nnx.merge(nnx.graphdef(layers), jax.tree.map(lambda leaf, i=i: leaf[i], nnx.state(layers)))
        by_loop = by_loop + one(by_loop)
    np.testing.assert_allclose(y, by_loop, atol=1e-5)
