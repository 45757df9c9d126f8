"""Decoding with the modules: Flax's protocol, token by token and in chunks, and with an explicit cache."""

import functools

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

B, T, M, N = 2, 9, 12, 6
BEYOND = {
    "num_kv_heads": 3, "value_dim": 5, "qkv_features": 24, "position": Rotary(100.0), "sinks": True, "qk_norm": "rms",
}  # fmt: skip
CHUNKS = {"one by one": [1] * T, "chunks": [4, 1, 3, 1]}


@pytest.fixture(scope="module")
def x():
    return jax.random.normal(jax.random.key(1), (B, T, M))


class NNX:
    """Flax's protocol: ``init_cache`` with the maximum length, then calls with ``decode=True``."""

    ours = jattn.nnx.MultiHeadAttention
    flaxs = nnx.MultiHeadAttention

    @staticmethod
    def full(kind, x, call, **options):
        return nnx.jit(lambda m, x: m(x, **call))(kind(N, M, decode=False, rngs=nnx.Rngs(0), **options), x)

    @staticmethod
    def decode(kind, x, chunks, call=lambda start, length: {}, length=T, index=jnp.int32, **options):
        module = kind(N, M, decode=True, rngs=nnx.Rngs(0), **options)
        module.init_cache((*x.shape[:-2], length, M))
        module.cache_index = nnx.Cache(jnp.zeros((), index))
        step, outputs, start = nnx.jit(lambda m, x, call: m(x, **call)), [], 0
        for size in chunks:
            outputs.append(step(module, x[..., start : start + size, :], call(start, size)))
            start += size
        state = nnx.to_pure_dict(nnx.state(module, nnx.Cache))
        return jnp.concatenate(outputs, axis=-2), state, step


class LINEN:
    """Flax's protocol: ``init`` with an input of the maximum length, then ``apply`` with ``mutable=["cache"]``."""

    ours = jattn.linen.MultiHeadDotProductAttention
    flaxs = linen.MultiHeadDotProductAttention

    @staticmethod
    def full(kind, x, call, **options):
        module = kind(N, **options)
        return jax.jit(lambda x: module.apply(module.init(jax.random.key(0), x), x, **call))(x)

    @staticmethod
    def decode(kind, x, chunks, call=lambda start, length: {}, length=T, index=jnp.int32, **options):
        module = kind(N, decode=True, **options)
        variables = jax.jit(module.init)(jax.random.key(0), jnp.zeros((*x.shape[:-2], length, M), x.dtype))
        params, cache = variables["params"], variables["cache"] | {"cache_index": jnp.zeros((), index)}
        apply = functools.partial(module.apply, mutable=["cache"])
        step = jax.jit(lambda params, cache, x, call: apply({"params": params, "cache": cache}, x, **call))
        outputs, start = [], 0
        for size in chunks:
            y, updated = step(params, cache, x[..., start : start + size, :], call(start, size))
            cache = updated["cache"]
            outputs.append(y)
            start += size
        return jnp.concatenate(outputs, axis=-2), cache, step


SYSTEMS = pytest.mark.parametrize("system", [NNX, LINEN], ids=["nnx", "linen"])


@pytest.mark.slow
@SYSTEMS
def test_flaxs_protocol_gives_flaxs_numbers_and_flaxs_cache(system, x):
    """Outputs, and the three arrays of the cache and their names, token by token with a mask over the cache's slots."""
    mask = jnp.asarray(np.random.default_rng(0).random((B, 1, T, T)) < 0.7).at[:, :, :, 0].set(True)
    call = lambda start, length: {"mask": mask[:, :, start : start + length]}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        expected, theirs, _ = system.decode(system.flaxs, x, CHUNKS["one by one"], call)
    got, ours, step = system.decode(system.ours, x, CHUNKS["one by one"], call)
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for name in ("cached_key", "cached_value", "cache_index"):
        assert ours[name].dtype == theirs[name].dtype
        np.testing.assert_allclose(ours[name], theirs[name], atol=1e-6)


@pytest.mark.slow
@SYSTEMS
@pytest.mark.parametrize("options", [{}, BEYOND], ids=["plain", "beyond"])
def test_decoding_equals_the_full_pass(system, options, x):
    got, _, _ = system.decode(system.ours, x, CHUNKS["chunks"], length=T + 2, **options)
    np.testing.assert_allclose(got, system.full(system.ours, x, {"is_causal": True}, **options), atol=1e-5)


@pytest.mark.slow_except("uint32-nnx")
@SYSTEMS
@pytest.mark.parametrize("index", ["int32", "uint32", "int64"])
def test_decoding_where_64_bits_are_enabled(system, index, x):
    """The index keeps its dtype, and a chunk without tokens works."""
    with jax.enable_x64(True):
        expected = system.full(system.ours, x, {"is_causal": True})
        got, cache, _ = system.decode(system.ours, x, [4, 0, 1, 4], index=index)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert got.dtype == jnp.float32 and cache["cache_index"].dtype == index and int(cache["cache_index"]) == T


@pytest.mark.slow
@SYSTEMS
def test_a_mask_of_positions_decides_by_itself(system, x):
    mask = masks.SlidingWindow(2) | masks.Prefix(3)
    call = lambda start, length: {"mask": mask}
    got, _, _ = system.decode(system.ours, x, CHUNKS["chunks"], call)
    np.testing.assert_allclose(got, system.full(system.ours, x, {"mask": mask}), atol=1e-5)


@pytest.mark.slow_except("nnx")
@SYSTEMS
def test_a_function_of_the_users_decodes_too(system, x):
    """As in Flax, it gets all slots and a mask array; also in chunks."""
    flaxs = nnx.dot_product_attention if system is NNX else linen.dot_product_attention
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got, _, _ = system.decode(system.ours, x, CHUNKS["chunks"], attention_fn=flaxs)
        np.testing.assert_allclose(got, system.full(system.ours, x, {"is_causal": True}), atol=1e-5)


@pytest.mark.slow
@SYSTEMS
def test_several_batch_axes_and_none(system, x):
    for some in (x[0], jnp.stack([x, 2 * x, -x])):
        got, cache, _ = system.decode(system.ours, some, [4, 0, 5])
        np.testing.assert_allclose(got, system.full(system.ours, some, {"is_causal": True}), atol=1e-5)
        assert cache["cached_key"].shape == (*some.shape[:-2], T, N, 2)


@SYSTEMS
def test_what_does_not_fit_the_cache(system, x):
    if system is NNX:
        call = jattn.nnx.MultiHeadAttention(N, M, decode=True, rngs=nnx.Rngs(0))
        call.init_cache(x.shape)
    else:
        module = jattn.linen.MultiHeadAttention(N, decode=True)
        call = functools.partial(module.apply, module.init(jax.random.key(0), x), mutable=["cache"])
    with pytest.raises(ValueError, match=r"the autoregressive cache, of shape \[2, 9, 6, 2\], takes keys of shape"):
        call(x[:1, :1])
    with pytest.raises(ValueError, match="10 tokens do not fit into a cache of 9"):
        call(jnp.concatenate([x, x[:, :1]], axis=1))


@pytest.mark.slow_except("own-nnx")
@SYSTEMS
@pytest.mark.parametrize("ours", [True, False], ids=["own", "flaxs"])
def test_a_full_cache_stays_nan_where_the_mask_hides_its_end(system, ours, x):
    """With a window, and with a function of the user's, which gets a mask array."""
    mask = masks.SlidingWindow(1) if ours else np.arange(4) < 2
    flaxs = nnx.dot_product_attention if system is NNX else linen.dot_product_attention
    options = {} if ours else {"attention_fn": flaxs}
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        got, _, _ = system.decode(system.ours, x, [1] * T, lambda start, length: {"mask": mask}, length=4, **options)
    np.testing.assert_array_equal(np.isnan(got).all((0, 2)), np.arange(T) >= 4)
    assert np.isfinite(got[:, :4]).all()


@pytest.mark.slow
@SYSTEMS
@pytest.mark.parametrize("rolling", [False, True])
def test_a_cache_that_is_handed_over(system, rolling, x):
    """In functional style, ``(y, cache) = layer(x, cache=cache)``, for a ragged batch padded on the left."""
    cache = jattn.init_cache(B, 4 if rolling else T, 3, 4, value_dim=5, rolling=rolling)
    window = masks.SlidingWindow(3) if rolling else masks.Causal()
    if system is NNX:
        graphdef, state = nnx.split(jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0), **BEYOND))
        call = lambda *args, **options: nnx.merge(graphdef, state)(*args, **options)
    else:
        module = jattn.linen.MultiHeadAttention(N, **BEYOND)
        call = functools.partial(module.apply, jax.jit(module.init)(jax.random.key(0), x))
    call = jax.jit(functools.partial(call, mask=window))
    whole = call(x)
    valid = np.array([[True] * 5, [False, False, True, True, True]])
    padded = np.array(x[:, :5])
    padded[1, 2:] = x[1, :3]
    first, cache = call(jnp.asarray(padded), cache=cache, valid=jnp.asarray(valid))
    np.testing.assert_allclose(first[0], whole[0, :5], atol=1e-5)
    np.testing.assert_allclose(first[1, 2:], whole[1, :3], atol=1e-5)
    second, cache = call(jnp.stack([x[0, 5:7], x[1, 3:5]]), cache=cache)
    np.testing.assert_allclose(second, jnp.stack([whole[0, 5:7], whole[1, 3:5]]), atol=1e-5)
    np.testing.assert_array_equal(cache.length, [7, 5])


def test_decoding_compiles_once(x):
    _, _, step = LINEN.decode(LINEN.ours, x, CHUNKS["one by one"])
    assert step._cache_size() == 1


def test_set_view_builds_the_cache(x):
    """Flax's own checks for attributes that always exist, and builds no cache."""
    module = nnx.view(jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0)), decode=True, batch_size=B, max_length=T)
    got = jnp.concatenate([module(x[:, i : i + 1]) for i in range(T)], axis=1)
    np.testing.assert_allclose(got, NNX.full(NNX.ours, x, {"is_causal": True}), atol=1e-5)
    theirs = nnx.view(nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0)), decode=True, batch_size=B, max_length=T)
    with pytest.raises(ValueError, match="cache not initialized"):
        theirs(x[:, :1])
    bare = nnx.view(jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0)), decode=True)
    with pytest.raises(ValueError, match="call init_cache"):
        bare(x[:, :1])
    with pytest.raises(TypeError, match="both batch_size and max_length"):
        nnx.view(jattn.nnx.MultiHeadAttention(N, M, rngs=nnx.Rngs(0)), decode=True, batch_size=B)


def test_view_info_finds_the_arguments_of_set_view():
    """Flax reads them from the docstring, by its indentation."""
    theirs, ours = (nnx.view_info(lib.MultiHeadAttention(N, M, rngs=nnx.Rngs(0))) for lib in (nnx, jattn.nnx))
    names = [[line.partition(":")[0] for line in info.splitlines()[1::2]] for info in (theirs, ours)]
    assert names[0] == names[1]
