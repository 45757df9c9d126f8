"""The multi-head layer as a function: one product per projection, gates, positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jattn
from jattn.multi_head import project
from jattn.positions import Rotary
from tests import reference

B, T, S, M, N, K, H, D = 2, 7, 11, 12, 6, 3, 5, 13


def layer(**options):
    """Parameters (with nonzero biases, so that they matter) and inputs."""
    options = {"num_kv_heads": K, "head_dim": H, "value_dim": D, "use_bias": True} | options
    shapes = jax.eval_shape(lambda: jattn.init_multi_head(jax.random.key(0), M, N, **options))
    rng = np.random.default_rng(0)
    normal = lambda shape, scale=1.0: jnp.float32(scale * rng.normal(size=shape))
    params = jax.tree.map(lambda x: normal(x.shape, M**-0.5 if x.ndim == 3 else 1.0), shapes)
    return params, normal((B, T, M)), normal((B, S, M))


def by_hand(params, x, x_kv, gate=1.0):
    """In float64 NumPy: the sum over heads of z_i W_i^O."""
    exact = {f"{name} {part}": np.asarray(a, np.float64) for name, of in params.items() for part, a in of.items()}
    exact["out kernel"] = exact["out kernel"] * np.reshape(gate, (-1, 1, 1))
    visible = np.ones((B, N, x.shape[1], x_kv.shape[1]), bool)
    x, x_kv = np.asarray(x, np.float64), np.asarray(x_kv, np.float64)
    return reference.layer(x, x_kv, exact, np.zeros(x.shape), visible)["out"]


@pytest.mark.slow
def test_cross_attention_is_the_sum_over_heads():
    params, x, x_kv = layer()
    y = jattn.multi_head_attention(params, x, x_kv)
    np.testing.assert_allclose(y, by_hand(params, x, x_kv), atol=2e-5)
    np.testing.assert_allclose(jattn.multi_head_attention(params, x[0], x_kv[0]), y[0], atol=1e-5)


@pytest.mark.slow
@pytest.mark.bits
def test_self_attention_and_weights():
    params, x, _ = layer()
    alone = jattn.multi_head_attention(params, x)
    y, weights = jattn.multi_head_attention(params, x, return_weights=True, implementation="xla")
    np.testing.assert_array_equal(alone, y)
    np.testing.assert_allclose(y, by_hand(params, x, x), atol=2e-5)
    assert weights.shape == (B, N, T, T)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


@pytest.mark.slow
def test_concat_times_w_o_is_the_sum_of_z_i_w_i():
    params, x, _ = layer(use_bias=False)
    query, key, value = (project(params[name], x) for name in ("query", "key", "value"))
    z = jattn.multi_head.attend_heads(query, key, value)
    concat = np.concatenate([z[:, :, n] for n in range(N)], axis=-1)
    w_o = np.concatenate([params["out"]["kernel"][n] for n in range(N)], axis=0)
    by_head = sum(np.asarray(z[:, :, n]) @ np.asarray(params["out"]["kernel"][n]) for n in range(N))
    np.testing.assert_allclose(concat @ w_o, by_head, atol=1e-5)
    np.testing.assert_allclose(jattn.multi_head_attention(params, x), by_head, atol=1e-5)


def test_projections_by_vmap_are_one_product_each():
    """One ``dot_general`` each for q, k and v, without a batch axis, and one for the output over both head axes."""
    params, x, _ = layer()

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
    assert compiled.count(" dot(") == 6  # q, k, v, scores, values, out; nothing for the unused lse


@pytest.mark.parametrize("shape", [(N,), (B, N), (B, T, N)])
def test_head_gate(shape):
    params, x, _ = layer()
    gate = np.ones(shape, np.float32)
    gate[..., 2] = 0.0
    expected = by_hand(params, x, x, gate=[1, 1, 0, 1, 1, 1])
    result = jax.jit(lambda x, gate: jattn.multi_head_attention(params, x, head_gate=gate))(x, gate)
    np.testing.assert_allclose(result, expected, atol=2e-5)


def test_all_single_head_ablations_in_one_call():
    params, x, _ = layer()
    gates = 1 - np.eye(N, dtype=np.float32)
    ablated = jax.jit(jax.vmap(lambda gate: jattn.multi_head_attention(params, x, head_gate=gate)))(gates)
    for n in range(N):
        np.testing.assert_allclose(ablated[n], by_hand(params, x, x, gate=gates[n]), atol=2e-5)


def test_export_for_any_batch_and_length():
    params, _, x = layer()
    options = {"is_causal": True, "head_gate": np.arange(N), "patch": {"value": (np.zeros(K), np.ones(D))}}
    run = jax.jit(lambda params, x: jattn.multi_head_attention(params, x, return_heads=True, **options))
    sizes = export.symbolic_shape("batch, length")
    exported = export.export(run, platforms=("cpu", "tpu"))(params, jax.ShapeDtypeStruct((*sizes, M), x.dtype))
    for result, expected in zip(*map(jax.tree.leaves, (exported.call(params, x), run(params, x))), strict=True):
        np.testing.assert_allclose(result, expected, atol=1e-5)


def test_position_reaches_queries_and_keys():
    """Rotary attention does not depend on the starting position, but does depend on a gap."""
    params, x, _ = layer()
    call = jax.jit(lambda **options: jattn.multi_head_attention(params, x, position=Rotary(fraction=0.8), **options))
    at = lambda q, kv: call(query_positions=q, kv_positions=kv)
    here = np.arange(T)
    np.testing.assert_allclose(at(here, here), call(), atol=1e-6)
    np.testing.assert_allclose(at(here + 50, here + 50), call(), atol=1e-4)
    assert np.abs(np.subtract(at(here + 1, here), call())).max() > 1e-3


@pytest.mark.slow
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


@pytest.mark.parametrize("make, message", [
    (lambda: jattn.init_multi_head(jax.random.key(0), 10, 4), "model_dim 10 is not a multiple of num_heads 4"),
    (lambda: jattn.init_multi_head(jax.random.key(0), 12, 4, num_kv_heads=3), "multiple of num_kv_heads 3"),
    (lambda: project({"kernel": jnp.zeros((4, 2, 3))}, jnp.zeros((5, 6))), r"last axis must be 4.*\(5, 6\)"),
    (lambda: jattn.multi_head.attend_heads(*[jnp.zeros((2, 3, 4, 5))] * 3, head_gate=jnp.ones(3)), r"head_gate must be \[N\] = \[4\]"),
    (lambda: jattn.multi_head.attend_heads(*[jnp.zeros((2, 3, 4, 5))] * 3, valid=jnp.ones((2, 3), bool)),
        r"valid says .* enter a cache, but cache is None; to mask padding pass mask=valid"),
    pytest.param(lambda: jattn.multi_head.attend_heads(*[jnp.zeros((2, 2, 3, 4, 5))] * 3, mask=jnp.ones((3, 2, 4, 3, 3), bool)),
        r"expected batch axes \(2, 2\) and 3 more",
        marks=pytest.mark.slow),
])  # fmt: skip
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()
