"""The Flax modules under Flax's transforms, their additional features, and their intended differences from Flax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import masks
from jattn.positions import Rotary

B, T, S, M, N, K, D = 2, 7, 11, 12, 6, 3, 5
BEYOND = {"num_kv_heads": K, "value_dim": D, "qkv_features": 30, "position": Rotary(fraction=0.8)}


@pytest.fixture
def x():
    return jnp.float32(np.random.default_rng(0).normal(size=(B, T, M)))


def capture(module):
    return nnx.capture(module, nnx.Intermediate)


def flaxs_promotion():
    return jax.numpy_dtype_promotion("standard")


@pytest.mark.slow
def test_the_modules_and_the_function_agree(getkey, x):
    """NNX, Linen and ``multi_head_attention`` agree on the same parameters, with all options in use."""
    params = jattn.init_multi_head(getkey(), M, N, num_kv_heads=K, head_dim=5, value_dim=D, use_bias=True)
    params = jax.tree.map(lambda p: p if p.ndim == 3 else jax.random.normal(getkey(), p.shape), params)
    positions = jnp.arange(T)[None] + jnp.array([[0], [5]])
    sinks = jax.random.normal(getkey(), (N,))
    call = {
        "mask": masks.Causal(), "bias": jax.random.normal(getkey(), (1, N, T, T)),
        "head_gate": jnp.arange(1.0, N + 1), "scale": 0.3, "local_window_size": (3, 2),
    }  # fmt: skip
    score_mod = jattn.score_mods.SoftCap(3.0)
    expected = jattn.multi_head_attention(
        params, x, position=BEYOND["position"], query_positions=positions, kv_positions=positions, score_mod=score_mod,
        sinks=sinks, **call,
    )  # fmt: skip
    for at_call in (False, True):
        options = BEYOND | {"sinks": True} | ({} if at_call else {"score_mod": score_mod})
        called = call | {"input_positions": positions} | ({"score_mod": score_mod} if at_call else {})
        in_linen = jattn.linen.MultiHeadAttention(N, **options)
        assert "sinks" in in_linen.init(getkey(), x)["params"]
        y = in_linen.apply({"params": params | {"sinks": sinks}}, x, **called)
        np.testing.assert_allclose(y, expected, atol=1e-6)
        in_nnx = jattn.nnx.MultiHeadAttention(N, M, **options, rngs=nnx.Rngs(0))
        nnx.update(in_nnx, params | {"sinks": sinks})
        np.testing.assert_allclose(in_nnx(x, **called), expected, atol=1e-6)


@pytest.mark.slow
def test_input_positions_are_for_position_alone(x):
    """Masks, windows and dropout see slots, so packed documents are each as alone."""
    module = jattn.nnx.MultiHeadAttention(N, M, position=Rotary(10.0), rngs=nnx.Rngs(0))
    lengths = [3, T - 3]
    ids, positions = np.repeat([4, 2], lengths), np.concatenate([np.arange(length) for length in lengths])
    options = {"is_causal": True, "local_window_size": (2, 0)}
    run = nnx.jit(lambda x, ids, positions: module(x, mask=masks.Segments(ids), input_positions=positions, **options))
    expected = np.concatenate([module(part, **options) for part in (x[:, :3], x[:, 3:])], axis=1)
    np.testing.assert_allclose(run(x, ids, positions), expected, atol=1e-6)
    with pytest.raises(ValueError, match=r"input_positions must be integers \[7\] or \[2, 7\]"):
        module(x, input_positions=positions[1:])
    without = jattn.linen.MultiHeadAttention(N)
    with pytest.raises(ValueError, match="input_positions are for position=.* this layer has position=None"):
        jax.eval_shape(lambda x: without.init(jax.random.key(0), x, input_positions=positions), x)


@pytest.mark.parametrize("norm", [pytest.param("layer", marks=pytest.mark.slow), "rms"])
def test_query_and_key_norms(getkey, x, norm):
    """They normalise each head's features; the layer norm is Flax's ``normalize_qk``."""
    few = 2  # heads, because the norm of two features is ill-conditioned

    def normed(projected):
        centred = projected - (projected.mean(-1, keepdims=True) if norm == "layer" else 0)
        return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-6)

    @jax.jit
    def every(key, x):
        in_linen = jattn.linen.MultiHeadAttention(few, qk_norm=norm)
        p = in_linen.init(key, x)["params"]
        in_nnx = jattn.nnx.MultiHeadAttention(few, M, qk_norm=norm, rngs=nnx.Rngs(0))
        nnx.update(in_nnx, p)
        project = lambda name: jattn.multi_head.project(p[name], x)
        z = jattn.dot_product_attention(normed(project("query")), normed(project("key")), project("value"))
        expected = jnp.tensordot(z, p["out"]["kernel"], 2) + p["out"]["bias"].reshape(1, 1, -1)
        return p, in_linen.apply({"params": p}, x), in_nnx(x), expected

    params, y, of_nnx, expected = every(getkey(), x)
    assert params["query_ln"]["scale"].shape == (M // few,)
    np.testing.assert_allclose(of_nnx, y, atol=1e-6)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    with pytest.raises(ValueError, match="qk_norm must be None, 'layer' or 'rms', got 'batch'"):
        jattn.linen.MultiHeadAttention(N, qk_norm="batch").init(getkey(), x)
    with pytest.raises(ValueError, match="normalize_qk=True means qk_norm='layer'"):
        jattn.nnx.MultiHeadAttention(N, M, normalize_qk=True, qk_norm="rms", rngs=nnx.Rngs(0))


@pytest.mark.slow
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
    of_all = module.apply(params, x, head_gate=gate[0, 0])
    np.testing.assert_allclose(of_all[2], module.apply(params, x[2], head_gate=gate[0, 0]), atol=1e-6)
    shared = module.apply(params, x, mask=mask[0])  # by broadcasting, the same along the first axis
    np.testing.assert_allclose(shared[1], module.apply(params, x[1], mask=mask[0]), atol=1e-6)


@pytest.mark.parametrize("options", [{"qkv_features": 13}, {"num_kv_heads": 4}])
def test_what_does_not_divide_is_refused(options):
    with pytest.raises(ValueError, match=r"qkv_features .* must be a multiple of num_heads \(6\)"):
        jattn.nnx.MultiHeadAttention(N, M, **options, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"qkv_features .* must be a multiple of num_heads \(6\)"):
        jattn.linen.MultiHeadAttention(N, **options).init(jax.random.key(0), jnp.zeros((1, T, M)))
    with pytest.raises(ValueError, match="inputs_v is given without inputs_k"):
        jattn.linen.MultiHeadAttention(N).init(jax.random.key(0), jnp.zeros((1, T, M)), None, jnp.zeros((1, T, M)))


@pytest.mark.slow
@pytest.mark.parametrize("graph", [False, True])
def test_nnx_transforms(getkey, x, graph):
    """jit, grad, split and merge, and layers stacked by vmap and run by scan, in both NNX modes."""
    with nnx.set_graph_mode(graph):
        module = jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0), **BEYOND)
        graphdef, state = nnx.split(module)
        np.testing.assert_allclose(nnx.jit(lambda m, x: m(x))(module, x), nnx.merge(graphdef, state)(x), atol=1e-6)
        gradients = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(module)
        slopes = jax.tree.leaves_with_path(gradients)
        assert all(np.abs(leaf).max() > 0 for path, leaf in slopes if "'bias'" not in str(path))

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


def test_bridge_between_the_module_systems(getkey, x):
    """A module of each system inside a module of the other, with its parameters."""
    inside = nnx.bridge.ToNNX(jattn.linen.MultiHeadAttention(N), rngs=nnx.Rngs(0)).lazy_init(x)
    params = nnx.to_pure_dict(nnx.state(inside, nnx.Param))
    np.testing.assert_allclose(inside(x), jattn.linen.MultiHeadAttention(N).apply({"params": params}, x), atol=1e-6)
    other = nnx.bridge.ToLinen(jattn.nnx.MultiHeadAttention, args=(N, M))
    y, _ = other.init_with_output(getkey(), x)
    assert y.shape == x.shape


class Block(linen.Module):
    """One layer on a residual stream, as the body of a scan."""

    @linen.compact
    def __call__(self, x, _):
        return x + jattn.linen.MultiHeadAttention(N, **BEYOND)(x, is_causal=True), None


@pytest.mark.slow
def test_linen_transforms(getkey, x):
    """scan over layers, remat of each, and vmap over a batch of parameters."""
    scanned = linen.scan(linen.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    params = scanned.init(getkey(), x, None)
    y, _ = scanned.apply(params, x, None)
    by_loop = x
    for i in range(3):
        by_loop, _ = Block().apply(jax.tree.map(lambda p, i=i: p[i], params), by_loop, None)
    np.testing.assert_allclose(y, by_loop, atol=1e-5)
    gradients = jax.grad(lambda p: jnp.sum(scanned.apply(p, x, None)[0] ** 2))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    many = linen.vmap(jattn.linen.MultiHeadAttention, variable_axes={"params": 0}, split_rngs={"params": True})(N)
    params = many.init(getkey(), x)
    for i in range(B):
        one = jattn.linen.MultiHeadAttention(N).apply(jax.tree.map(lambda p, i=i: p[i], params), x[i])
        np.testing.assert_allclose(many.apply(params, x)[i], one, atol=1e-6)


def test_sharding_metadata_of_the_parameters():
    """As in Flax, the metadata for kernels and biases is attached to the parameters."""
    options = {"kernel_metadata": {"kind": "qkv"}, "out_kernel_metadata": {"kind": "out"}, "bias_metadata": {"kind": "bias"},
               "query_ln_scale_metadata": {"kind": "query"}, "key_ln_scale_metadata": {"kind": "key"}}  # fmt: skip
    make = lambda kind: kind(N, M, normalize_qk=True, decode=False, rngs=nnx.Rngs(0), **options)
    ours, theirs = make(jattn.nnx.MultiHeadAttention), make(nnx.MultiHeadAttention)
    state = lambda module: nnx.to_flat_state(nnx.state(module, nnx.Param))
    kinds = lambda module: {path: leaf.get_metadata().get("kind") for path, leaf in state(module)}
    assert kinds(ours) == kinds(theirs) and None not in kinds(ours).values()


# --- the differences from Flax listed in docs/flax.md, row by row ---


def test_a_row_that_sees_nothing_is_zero(x):
    """Flax gives the mean of all values, including padding."""
    mask = jnp.asarray(np.broadcast_to(np.arange(T)[:, None] != 2, (B, 1, T, T)))

    @jax.jit
    def both(x):
        ours = jattn.nnx.MultiHeadAttention(N, M, use_bias=False, rngs=nnx.Rngs(0))
        theirs = nnx.MultiHeadAttention(N, M, use_bias=False, decode=False, rngs=nnx.Rngs(0))
        with flaxs_promotion():
            return ours(x, mask=mask)[:, 2], theirs(x, mask=mask)[:, 2]

    ours, theirs = jax.device_get(both(x))
    assert (ours == 0).all() and np.abs(theirs).max() > 0.01


def test_is_causal_with_a_padding_mask(x):
    """A mask ``(B,1,1,S)``: Flax fails when it returns weights, because it uses the mask's shape for the scores."""
    mask = jnp.arange(T)[None, None, None] < jnp.array([4, T]).reshape(B, 1, 1, 1)
    ours = jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0))
    both = mask & (np.tri(T) > 0)[None, None]
    for sow in (False, True):
        y, _ = capture(ours)(x, mask=mask, is_causal=True, sow_weights=sow)
        np.testing.assert_allclose(y, ours(x, mask=both), atol=1e-6)
    theirs = nnx.MultiHeadAttention(N, M, decode=False, rngs=nnx.Rngs(0))
    with flaxs_promotion(), pytest.raises(ValueError, match="broadcast"):
        capture(theirs)(x, mask=mask, is_causal=True, sow_weights=True)


@pytest.mark.slow
def test_is_causal_while_decoding(x):
    """Flax 0.12.8 lets each token see only the first; later versions ignore ``is_causal`` when decoding, as here."""
    module = jattn.nnx.MultiHeadAttention(N, M, decode=True, rngs=nnx.Rngs(0))
    module.init_cache(x.shape)
    got = jnp.concatenate([module(x[:, i : i + 1], is_causal=True) for i in range(T)], axis=1)
    np.testing.assert_allclose(got, module(x, is_causal=True, decode=False), atol=1e-5)


def test_decode_may_be_left_unsaid(x):
    """Flax requires ``decode`` at construction or at the call."""
    make = lambda **options: jattn.nnx.MultiHeadAttention(N, M, **options, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(make()(x), make(decode=False)(x))
    with flaxs_promotion(), pytest.raises(ValueError, match="No `decode` argument"):
        nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0))(x)


@pytest.mark.bits
def test_sowing_weights_changes_no_bit_in_bfloat16(x):
    """Flax uses a different formula for the output when weights are requested."""
    differs = {}
    for name, kind in (("ours", jattn.nnx.MultiHeadAttention), ("theirs", nnx.MultiHeadAttention)):
        with flaxs_promotion():
            module = kind(N, M, dtype=jnp.bfloat16, decode=False, rngs=nnx.Rngs(0))
            graphdef, state = nnx.split(module)
            call = lambda sow, g=graphdef, s=state: jax.jit(lambda: capture(nnx.merge(g, s))(x, sow_weights=sow)[0])()
            plain, sown = call(False), call(True)
        differs[name] = bool((plain != sown).any())
    assert differs == {"ours": False, "theirs": True}


def test_precision_reaches_the_products(x):
    """Flax's NNX ignores it unless dropout or weights are requested."""

    def precisions(kind):
        module = kind(N, M, precision="highest", decode=False, rngs=nnx.Rngs(0))
        with flaxs_promotion():
            text = str(jax.make_jaxpr(lambda x: module(x))(x))
        highest = "precision=Precision.HIGHEST", "precision=(Precision.HIGHEST"
        return text.count("dot_general["), sum(map(text.count, highest))

    ours, theirs = precisions(jattn.nnx.MultiHeadAttention), precisions(nnx.MultiHeadAttention)
    assert ours[0] == ours[1] and theirs[0] > theirs[1]
