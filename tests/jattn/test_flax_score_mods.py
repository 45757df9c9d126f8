"""Score functions in the Flax modules: their float arrays become learned parameters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import score_mods

B, T, M, N = 2, 5, 8, 2


def far(score, b, h, q_idx, kv_idx):
    return score - 0.1 * abs(q_idx - kv_idx)


def t5(table):
    return score_mods.RelativeBias(table, max_distance=4)


# a score function made from its learned array, and that array, if any
MODS = {
    "ALiBi": (score_mods.Alibi, score_mods.alibi_slopes(N)),
    "T5": (t5, np.random.default_rng(0).normal(size=(8, N)).astype(np.float32)),
    "a cap that is an array": (score_mods.SoftCap, jnp.float32(2.0)),
    "a cap that is a number": (lambda _: score_mods.SoftCap(2.0), None),
    "then": (lambda slopes: score_mods.then(far, score_mods.Alibi(slopes), score_mods.SoftCap(2.0)), jnp.ones(N)),
    "a plain function": (lambda _: far, None),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Decay:
    """A user-defined score function."""

    rate: jax.Array  # [N]
    steps: jax.Array  # integers: data that is not learned

    def __call__(self, score, b, h, q_idx, kv_idx):
        return score - self.rate[h] * ((kv_idx - q_idx) % self.steps)


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (B, T, M))


@pytest.fixture(scope="module")
def params():
    return jattn.init_multi_head(jax.random.key(0), M, N, use_bias=True)


def loss(y):
    return jnp.sum(jnp.sin(y) * jnp.arange(1.0, T + 1).reshape(1, T, 1))


def with_loss(run):
    """A function that returns the loss of what ``run`` returns, and that."""
    return lambda x: (loss(y := run(x)), y)


def in_nnx(params, x, mod):
    """``(gradients of the score function's parameters, output)``, and the module."""
    module = jattn.nnx.MultiHeadAttention(N, M, score_mod=mod, rngs=nnx.Rngs(0))
    nnx.update(module, params)

    @nnx.jit
    def run(module, x):
        (_, y), gradients = nnx.value_and_grad(with_loss(lambda module: module(x)), has_aux=True)(module)
        return y, gradients

    y, gradients = run(module, x)
    return nnx.to_pure_dict(nnx.state(gradients, nnx.Param)).get("score_mod", {}), y, module


def in_linen(params, x, mod):
    module = jattn.linen.MultiHeadAttention(N, score_mod=mod)
    initial = module.init(jax.random.key(0), x)["params"]
    params = initial | params
    of = with_loss(lambda params: module.apply({"params": params}, x))
    (_, y), gradients = jax.jit(jax.value_and_grad(of, has_aux=True))(params)
    return gradients.get("score_mod", {}), y, initial


@pytest.mark.slow
@pytest.mark.parametrize("name", MODS)
def test_what_is_learned_is_what_the_function_of_it_says(params, x, name):
    """Output and gradient match ``multi_head_attention``; without arrays there are no parameters."""
    make, array = MODS[name]
    of = with_loss(lambda array: jattn.multi_head_attention(params, x, score_mod=make(array)))
    if array is None:
        expected, gradient = of(None)[1], None
    else:
        (_, expected), gradient = jax.jit(jax.value_and_grad(of, has_aux=True))(array)
        assert np.abs(gradient).max() > 1e-3
    for in_system in (in_nnx, in_linen):
        learned, y, module = in_system(params, x, make(array))
        np.testing.assert_allclose(y, expected, atol=1e-6)
        if array is None:
            assert learned == {}
        else:
            (leaf,) = jax.tree.leaves(learned)
            assert leaf.dtype == jnp.float32
            np.testing.assert_allclose(leaf, gradient, atol=1e-5)
        if in_system is in_nnx:
            copy = nnx.merge(*nnx.split(module))
            np.testing.assert_allclose(copy(x), expected, atol=1e-6)
        else:
            assert jax.tree.structure(module.get("score_mod")) == jax.tree.structure(learned or None)


def test_parameters_carry_the_names_of_the_fields_in_both_systems(params, x):
    """Parameters of one system fit the other; integers are data and not optimised."""
    decay = Decay(jnp.array([0.5, 2.0]), jnp.array(3))
    expected = jattn.multi_head_attention(params, x, score_mod=decay)
    _, y, module = in_nnx(params, x, decay)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    parameters = nnx.to_pure_dict(nnx.state(module, nnx.Param))["score_mod"]
    _, y, initial = in_linen(params, x, decay)
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert list(parameters) == list(initial["score_mod"]) == ["rate"]
    rate = {"score_mod": {"rate": jnp.array([1.0, 0.0])}}
    nnx.update(module, rate)
    changed = jattn.linen.MultiHeadAttention(N, score_mod=decay).apply({"params": params | rate}, x)
    np.testing.assert_allclose(module(x), changed, atol=1e-6)
    assert np.abs(changed - expected).max() > 1e-3


@pytest.mark.slow
def test_an_optimizer_learns_it(params, x, as_experiments_run):
    """The array that the module was made from is unchanged, even if parameters are donated."""
    table = jnp.asarray(MODS["T5"][1])
    gradients, _, module = in_nnx(params, x, t5(table))
    (gradient,) = jax.tree.leaves(gradients)
    optimizer = nnx.Optimizer(module, optax.sgd(0.5), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(module, optimizer, x):
        optimizer.update(module, nnx.grad(lambda module: loss(module(x)))(module))

    step(module, optimizer, x)
    (learned,) = jax.tree.leaves(nnx.state(module.score_mod, nnx.Param))
    np.testing.assert_allclose(learned, np.asarray(table) - 0.5 * gradient, atol=1e-5)


def test_one_that_is_given_to_the_call_stays_fixed(params, x):
    """It replaces the module's own and is not a parameter; neither are the values of an ``nnx.Variable``."""
    fixed = score_mods.Alibi(jnp.array([1.0, 0.25]))
    expected = jattn.multi_head_attention(params, x, score_mod=fixed)
    for of_module in (None, t5(MODS["T5"][1])):
        module = jattn.nnx.MultiHeadAttention(N, M, score_mod=of_module, rngs=nnx.Rngs(0))
        nnx.update(module, params)
        np.testing.assert_allclose(module(x, score_mod=fixed), expected, atol=1e-6)
        module = jattn.linen.MultiHeadAttention(N, score_mod=of_module)
        initial = module.init(jax.random.key(0), x, score_mod=fixed)["params"]
        np.testing.assert_allclose(module.apply({"params": initial | params}, x, score_mod=fixed), expected, atol=1e-6)
    held = score_mods.Alibi(nnx.Variable(fixed.slopes))
    module = jattn.nnx.MultiHeadAttention(N, M, score_mod=held, rngs=nnx.Rngs(0))
    nnx.update(module, params)
    np.testing.assert_allclose(module(x), expected, atol=1e-6)
    assert "score_mod" not in nnx.to_pure_dict(nnx.state(module, nnx.Param))


def test_a_module_of_the_users_scores_with_its_own_parameters(params, x):
    class Scaled(nnx.Module):
        def __init__(self):
            self.factor = nnx.Param(jnp.array([0.5, 2.0]))

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * self.factor[h]

    gradients, y, _ = in_nnx(params, x, Scaled())
    factor = jnp.array([0.5, 2.0])
    expected = jattn.multi_head_attention(params, x, score_mod=lambda score, b, h, q, kv: score * factor[h])
    np.testing.assert_allclose(y, expected, atol=1e-6)
    assert np.abs(gradients["factor"]).max() > 1e-3


@pytest.mark.slow
def test_layers_in_a_stack_have_one_each(x):
    table = MODS["T5"][1]

    @nnx.vmap(in_axes=0, out_axes=0)
    def build(key):
        return jattn.nnx.MultiHeadAttention(N, M, score_mod=t5(table), rngs=nnx.Rngs(key))

    (stacked,) = jax.tree.leaves(nnx.state(build(jax.random.split(jax.random.key(0), 3)).score_mod, nnx.Param))
    np.testing.assert_array_equal(stacked, np.stack([table] * 3))

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return x + jattn.linen.MultiHeadAttention(N, score_mod=t5(table), name="layer")(x), None

    scanned = linen.scan(linen.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    initial = scanned.init(jax.random.key(0), x, None)["params"]["layer"]["score_mod"]
    np.testing.assert_array_equal(jax.tree.leaves(initial)[0], np.stack([table] * 3))
