"""Other parts of Flax's attention API that models may use, and regression tests for jattn's modules."""

import functools
import inspect
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jattn
import jattn.linen
import jattn.nnx

B, T, S, N, H, M = 2, 5, 7, 2, 4, 8
LIBRARIES = pytest.mark.parametrize("ours, theirs", [(jattn.nnx, nnx), (jattn.linen, linen)], ids=["nnx", "linen"])


def flaxs_promotion():
    return jax.numpy_dtype_promotion("standard")


def arrays(*shapes):
    return (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes))


@pytest.fixture(scope="module")
def qkv():
    return tuple(arrays((B, T, N, H), (B, S, N, H), (B, S, N, H)))


def signature(fn):
    """(name, default, kind) of each argument; all callable defaults count as equal."""
    parameters = inspect.signature(fn).parameters.values()
    return [(p.name, callable(p.default) or p.default, p.kind) for p in parameters]


@pytest.mark.parametrize("ours, theirs", [
    (jattn.nnx.dot_product_attention_weights, nnx.nn.attention.dot_product_attention_weights),
    (jattn.linen.dot_product_attention_weights, linen.dot_product_attention_weights),
    (jattn.linen.SelfAttention.__call__, linen.SelfAttention.__call__),
], ids=["nnx weights", "linen weights", "linen SelfAttention"])  # fmt: skip
def test_signatures_begin_as_flaxs(ours, theirs):
    """Names, order, defaults and kinds; jattn's own arguments follow and are keyword-only."""
    ours, theirs = signature(ours), signature(theirs)
    assert ours[: len(theirs)] == theirs
    by_name = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    assert all(kind in by_name for *_, kind in ours[len(theirs) :])


@pytest.mark.slow
@LIBRARIES
def test_weights_are_flaxs(ours, theirs, qkv):
    query, key, _ = qkv
    bias, sown = jax.random.normal(jax.random.key(3), (1, N, T, S)), {}
    mask = jnp.asarray(np.random.default_rng(0).random((B, 1, T, S)) < 0.7).at[..., 0].set(True)

    class Module(theirs.Module):
        def sow(self, collection, name, value):
            sown[name] = value

    flaxs = theirs.dot_product_attention_weights if theirs is linen else nnx.nn.attention.dot_product_attention_weights
    with flaxs_promotion(), jax.numpy_rank_promotion("allow"):
        for dtype in (jnp.float32, jnp.bfloat16):
            expected = flaxs(query, key, bias, mask, dtype=dtype)
            got = ours.dot_product_attention_weights(query, key, bias, mask, dtype=dtype, module=Module())
            assert got.dtype == expected.dtype == dtype
            np.testing.assert_allclose(got, expected, atol=1e-6 if dtype == jnp.float32 else 0.02)
            np.testing.assert_array_equal(sown["attention_weights"], got)
    if theirs is linen:
        half = query.astype(jnp.bfloat16), key.astype(jnp.bfloat16)
        wide = ours.dot_product_attention_weights(*half, force_fp32_for_softmax=True)
        assert wide.dtype == jnp.float32
        formulas = []
        einsum = lambda formula, *args: formulas.append(formula) or jnp.einsum(formula, *args)
        np.testing.assert_allclose(
            ours.dot_product_attention_weights(query, key, einsum=einsum),
            ours.dot_product_attention_weights(query, key), atol=1e-6,
        )  # fmt: skip
        assert len(formulas) == 1, "the custom product must be used"


@pytest.mark.slow
@LIBRARIES
@pytest.mark.parametrize("broadcast", [True, False])
def test_weights_after_dropout_are_those_that_meet_the_values(ours, theirs, qkv, broadcast):
    query, key, value = qkv
    drop = {"dropout_rate": 0.4, "dropout_rng": jax.random.key(5), "broadcast_dropout": broadcast, "is_causal": True}
    weights = ours.dot_product_attention_weights(query, key, **drop)
    kept = np.asarray(weights > 0)[np.broadcast_to(np.tri(T, S) > 0, weights.shape)]
    assert 0.2 < kept.mean() < 0.9
    out = jnp.einsum("bnts,bsnh->btnh", weights, value)
    np.testing.assert_allclose(ours.dot_product_attention(query, key, value, **drop), out, atol=1e-5)
    all_dropped = ours.dot_product_attention_weights(query, key, **(drop | {"dropout_rate": 1.0}))
    np.testing.assert_array_equal(all_dropped, jnp.zeros_like(weights))


@pytest.mark.slow
def test_self_attention_is_flaxs():
    (x,) = arrays((B, T, M))
    mask = jnp.tri(T)[None, None]
    results = []
    for library in (linen, jattn.linen):
        module = library.SelfAttention(N, qkv_features=M)
        with pytest.warns(DeprecationWarning, match="SelfAttention will be deprecated soon"), flaxs_promotion():
            results.append(module.init_with_output(jax.random.key(0), x, mask, True))
    (expected, theirs), (got, ours) = results
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    with pytest.warns(DeprecationWarning):
        np.testing.assert_allclose(module.apply(ours, x, deterministic=True, is_causal=True), got, atol=1e-6)


def test_a_mask_for_the_values_warns_as_in_flax():
    """Flax's third argument used to be the mask, so values with the shape of a mask are suspicious."""
    (x,) = arrays((B, T, M))
    for library in (linen, jattn.linen):
        module = library.MultiHeadDotProductAttention(N)
        init = functools.partial(jax.eval_shape, functools.partial(module.init, jax.random.key(0)))
        with pytest.warns(DeprecationWarning, match="You are passing an array of shape .* to the `inputs_v` arg"):
            init(x, x, jnp.ones((B, T, T)))
        with pytest.warns(DeprecationWarning, match="The inputs_kv arg will be deprecated soon"):
            init(x, inputs_kv=x)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            init(x, x, x)
            init(jnp.ones((B, M, M)))
        assert not caught


def test_captured_intermediates_are_flaxs():
    """A filter that accepts every method captures those that Flax's module has, and none of jattn's own."""
    (x,) = arrays((B, T, M))

    def captured(library):
        module = library.MultiHeadDotProductAttention(N, decode=True)
        variables = module.init(jax.random.key(0), x)
        collections = ["cache", "intermediates"]
        _, state = module.apply(variables, x[:, :1], capture_intermediates=lambda *_: True, mutable=collections)
        return state["intermediates"]

    theirs, ours = (jax.eval_shape(functools.partial(captured, library)) for library in (linen, jattn.linen))
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)


@pytest.mark.slow
@LIBRARIES
def test_masks_and_biases_of_few_axes(ours, theirs, qkv):
    """Rank 0 and 1 broadcast like arrays, also with several batch axes and without any."""
    visible, bias = jnp.arange(S) < 4, jnp.linspace(-1.0, 1.0, S)
    attend = jax.jit(ours.dot_product_attention)
    several = tuple(jnp.stack([x, -x]) for x in qkv)
    for query, key, value in (qkv, tuple(x[0] for x in qkv), several):
        full = (*query.shape[:-3], N, T, S)
        expected = attend(query, key, value, bias=jnp.broadcast_to(bias, full), mask=jnp.broadcast_to(visible, full))
        np.testing.assert_allclose(attend(query, key, value, bias=bias, mask=visible), expected, atol=1e-6)
        plain = attend(query, key, value)
        np.testing.assert_allclose(attend(query, key, value, bias=jnp.float32(3), mask=True), plain, atol=1e-6)
        np.testing.assert_array_equal(attend(query, key, value, mask=False), jnp.zeros_like(plain))


@pytest.mark.slow_except("linen")
@LIBRARIES
def test_no_queries(ours, theirs, qkv):
    """With several batch axes, this used to divide by zero."""
    query, key, value = (jnp.stack([x, -x]) for x in qkv)
    assert ours.dot_product_attention(query[:, :, :0], key, value).shape == (2, B, 0, N, H)
    assert ours.dot_product_attention(query[:0], key[:0], value[:0]).shape == (0, B, T, N, H)


@pytest.mark.slow
@LIBRARIES
def test_a_dropout_rate_of_one_drops_everything(ours, theirs, qkv):
    """Flax's formula divides by 0 and gives NaN (``nnx`` after 0.12.8 rejects the rate)."""
    drop = {"dropout_rate": 1.0, "dropout_rng": jax.random.key(0)}
    gradient = jax.grad(lambda q: ours.dot_product_attention(q, *qkv[1:], **drop).sum())(qkv[0])
    np.testing.assert_array_equal(gradient, jnp.zeros_like(qkv[0]))
    np.testing.assert_array_equal(ours.dot_product_attention(*qkv, **drop), jnp.zeros_like(qkv[0]))
    (x,) = arrays((B, T, M))
    if theirs is nnx:
        y = ours.MultiHeadAttention(N, M, dropout_rate=1.0, deterministic=False, rngs=nnx.Rngs(0))(x)
    else:
        module = ours.MultiHeadAttention(N, dropout_rate=1.0, deterministic=False)
        y, _ = module.init_with_output({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    np.testing.assert_array_equal(y, jnp.zeros_like(x))  # the biases are initially 0


def test_flaxs_names_may_be_bound_to_jattns(monkeypatch, qkv):
    """A program that replaces ``linen.dot_product_attention`` can still use Flax's with custom products."""
    monkeypatch.setattr(linen, "dot_product_attention", jattn.linen.dot_product_attention)
    monkeypatch.setattr(linen, "dot_product_attention_weights", jattn.linen.dot_product_attention_weights)
    query, key, value = qkv
    with flaxs_promotion(), jax.numpy_rank_promotion("allow"):
        got = linen.dot_product_attention(query, key, value, einsum_dot_general=jax.lax.dot_general)
    np.testing.assert_allclose(got, linen.dot_product_attention(query, key, value), atol=1e-6)
    with pytest.raises(ValueError, match="must be specified together"):
        linen.dot_product_attention(query, key, value, qk_attn_weights_einsum=jnp.einsum)
