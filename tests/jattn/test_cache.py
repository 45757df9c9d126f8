"""Decoding from a cache gives the same as the full pass: chunks of any length, ragged batches, rolling windows."""

import dataclasses
import functools
import importlib.util

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

import jattn
import jattn.nnx  # registers the cache with flax.serialization
from jattn import masks, score_mods
from jattn.cache import KVCache
from jattn.multi_head import attend_heads
from jattn.positions import Rotary

B, T, M, N, K, H, D = 2, 13, 12, 6, 3, 4, 5
IDS = np.repeat([[0, 1, 2], [3, 4, 4]], [5, 4, 4], axis=1)

CASES = {
    "causal": {"is_causal": True},
    "rotary": {"is_causal": True, "position": Rotary(100.0)},
    "window": {"mask": masks.SlidingWindow(3), "position": Rotary(100.0)},
    "packed segments": {"mask": masks.Segments(IDS) & masks.Causal()},
    "prefix": {"mask": masks.Causal() | masks.Prefix(4)},
    "a plain function": {"mask": lambda b, h, q, kv: (kv <= q) & ((q - kv) % (h + 1) == 0)},
    "ALiBi": {"is_causal": True, "score_mod": score_mods.Alibi(np.geomspace(0.5, 0.01, N, dtype=np.float32))},
    "soft cap and sinks": {"is_causal": True, "score_mod": score_mods.SoftCap(2.0), "sinks": np.linspace(-1.0, 1.0, N, dtype=np.float32)},
    "a gate": {"is_causal": True, "head_gate": np.linspace(0.0, 2.0, N, dtype=np.float32)},
}  # fmt: skip
CHUNKS = {"one by one": [1] * T, "prefill, then one by one": [6, *[1] * 7], "chunks": [5, 2, 1, 5], "at once": [T]}


@pytest.fixture(scope="module")
def layer():
    rng = np.random.default_rng(0)
    sizes = {"query": (M, N, H), "key": (M, K, H), "value": (M, K, D), "out": (N, D, M)}
    params = {name: {"kernel": jnp.float32(rng.normal(size=size) / M**0.5)} for name, size in sizes.items()}
    return params, jnp.float32(rng.normal(size=(B, T, M)))


def empty(capacity=T, scalar=False, **options):
    cache = jattn.init_cache(B, capacity, K, H, value_dim=D, **options)
    return KVCache(cache.key, cache.value, jnp.int32(0), cache.rolling) if scalar else cache


def stepper(layer, **options):
    params, _ = layer
    return jax.jit(lambda cache, x: jattn.multi_head_attention(params, x, cache=cache, **options))


def decode(layer, cache, chunks, step=None, **options):
    """The concatenated outputs of all chunks, and the last cache; compiles once per chunk length.

    ``step`` is the result of ``stepper``, to decode more than once without compiling again.
    """
    x = np.asarray(layer[1])
    step, outputs, start = step or stepper(layer, **options), [], 0
    known = step._cache_size()
    for length in chunks:
        y, cache = step(cache, x[:, start : start + length])
        outputs.append(y)
        start += length
    assert step._cache_size() <= known + len(set(chunks))
    return np.concatenate(outputs, axis=1), cache


def full(layer, **options):
    params, x = layer
    return jax.jit(lambda x: jattn.multi_head_attention(params, x, **options))(x)


@pytest.mark.slow_except("one length-a gate")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("scalar", [False, True], ids=["a length each", "one length"])
def test_chunks_equal_the_full_pass(layer, name, scalar):
    expected = full(layer, **CASES[name])
    kinds = ["prefill, then one by one", "chunks"] if name == "prefix" else ["prefill, then one by one", "one by one"]
    step = stepper(layer, **CASES[name])
    for kind in kinds:
        got, cache = decode(layer, empty(T + 3, scalar), CHUNKS[kind], step)
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=kind)
        assert (np.asarray(cache.length) == T).all()


@pytest.mark.slow_except("a gate-one by one", "a gate-prefill, then one by one")
@pytest.mark.parametrize("kind", CHUNKS)
@pytest.mark.parametrize("name", ["window", "a gate"])
def test_a_rolling_window_of_fixed_size(layer, name, kind):
    """4 slots give the same as a full cache with a window of 4, also if a chunk is longer than the window."""
    options = dict(CASES[name])
    options["mask"] = masks.SlidingWindow(3)
    options.pop("is_causal", None)
    expected = full(layer, **options)
    call = options if name == "window" else options | {"mask": None, "is_causal": True}
    got, cache = decode(layer, empty(4, rolling=True), CHUNKS[kind], **call)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert cache.key.shape == (B, 4, K, H)
    np.testing.assert_array_equal(np.sort(cache.slot_positions, axis=1), [[9, 10, 11, 12]] * B)


@pytest.mark.slow
@pytest.mark.parametrize("rolling", [False, True])
def test_ragged_batches_padded_on_either_side(layer, rolling):
    """Each sequence gives the same as alone, and the contents of the padding, even NaN, change nothing."""
    params, x = layer
    lengths, pads = [7, 4], 7
    left = np.full((B, pads, M), np.nan, np.float32)
    right, more = left.copy(), np.asarray(x[:, 9:])
    for b, length in enumerate(lengths):
        left[b, pads - length :] = x[b, :length]
        right[b, :length] = x[b, :length]
    call = jax.jit(functools.partial(jattn.multi_head_attention, params, is_causal=True, position=Rotary(100.0)))
    for padded in (left, right):
        valid = jnp.asarray(~np.isnan(padded[..., 0]))
        cache = empty(8, rolling=True) if rolling else empty(20)
        first, cache = call(jnp.asarray(padded), cache=cache, valid=valid)
        np.testing.assert_array_equal(cache.length, lengths)
        second, cache = call(jnp.asarray(more[:, :1]), cache=cache)
        for b, length in enumerate(lengths):
            expected = call(jnp.concatenate([x[b, :length], more[b, :1]]))
            np.testing.assert_allclose(first[b][valid[b]], expected[:length], atol=1e-5)
            np.testing.assert_allclose(second[b], expected[length:], atol=1e-5)


LAYERS = 3


def through_layers(params, chunks, cache, valid, one_cache):
    """Outputs and the last cache of layers that each decode all chunks: of one cache, or of one for each layer."""

    def one_layer(held, i):
        if one_cache:
            kv = dataclasses.replace(cache, key=held[0], value=held[1], layer=i)
        else:
            kv = dataclasses.replace(cache, key=held[0][i], value=held[1][i])
        ys = []
        for x, shown in zip(chunks, valid, strict=True):
            y, kv = jattn.multi_head_attention(params, x * (i + 1).astype(x.dtype), cache=kv, valid=shown)
            ys.append(y)
        updated = kv.key, kv.value
        if not one_cache:
            updated = tuple(old.at[i].set(x) for old, x in zip(held, updated, strict=True))
        return updated, (tuple(ys), kv.length)

    return jax.lax.scan(one_layer, (cache.key, cache.value), jnp.arange(LAYERS))


@pytest.mark.parametrize("rolling", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scalar", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("lengths", [pytest.param((5, 1), marks=pytest.mark.slow), (1, 1)], ids=str)
@pytest.mark.parametrize("ragged", [False, True])
def test_a_layer_of_one_cache_is_a_cache_of_its_own(layer, rolling, scalar, lengths, ragged):
    params, x = layer
    x = x[:1] if scalar else x
    chunks = [x[:, : lengths[0]], x[:, lengths[0] : sum(lengths)]]
    shown = lambda length: jnp.asarray(np.arange(length)[None] < np.array([[length], [1]]))[: len(x)]
    valid = [shown(chunk.shape[1]) if ragged else None for chunk in chunks]
    cache = jattn.init_cache(len(x), 4 if rolling else 8, K, H, value_dim=D, rolling=rolling)
    rng = np.random.default_rng(0)  # what other layers hold stays
    held = [jnp.float32(rng.normal(size=(LAYERS, *old.shape))) for old in (cache.key, cache.value)]
    cache = KVCache(*held, cache.length[0] if scalar and not ragged else cache.length, rolling)
    run = jax.jit(through_layers, static_argnums=4)
    chex.assert_trees_all_close(*(run(params, chunks, cache, valid, one) for one in (True, False)), atol=1e-6)


@pytest.mark.parametrize("lead, index, message", [
    ((3,), None, r"a cache of all layers needs layer="),
    ((), 0, r"must hold keys of all layers, \[L, B, C, K, H\], got \[2, 4, 3, 4\]"),
    ((3,), 3, "layer of a cache must be from 0 to 2, as it holds 3, got 3"),
    ((3,), -1, "layer of a cache must be from 0 to 2, as it holds 3, got -1"),
])  # fmt: skip
def test_which_layer_must_be_said(lead, index, message):
    key = np.zeros((*lead, B, 4, K, H), np.float32)
    cache = KVCache(key, key, jnp.zeros(B, jnp.int32), layer=index)
    with pytest.raises(ValueError, match=message):
        jattn.append(cache, key[..., :1, :, :].reshape(-1, 1, K, H)[:B], key[..., :1, :, :].reshape(-1, 1, K, H)[:B])


@pytest.mark.parametrize("rolling", [False, True])
def test_a_step_copies_no_more_than_a_layer_of_one_cache(layer, rolling):
    params, x = layer
    cache = jattn.init_cache(1, 4096, K, H, value_dim=D, rolling=rolling)
    held = [jnp.zeros((LAYERS * 4, *old.shape)) for old in (cache.key, cache.value)]
    cache = KVCache(*held, cache.length, rolling)

    def step(cache, x):
        def one_layer(held, i):
            kv = dataclasses.replace(cache, key=held[0], value=held[1], layer=i)
            y, kv = jattn.multi_head_attention(params, x, cache=kv)
            return (kv.key, kv.value), y

        (key, value), ys = jax.lax.scan(one_layer, (cache.key, cache.value), jnp.arange(LAYERS * 4))
        return ys, dataclasses.replace(cache, key=key, value=value, length=cache.length + 1)

    memory = jax.jit(step, donate_argnums=0).lower(cache, x[:1, :1]).compile().memory_analysis()
    assert memory.temp_size_in_bytes < sum(x.nbytes for x in held) / 2  # of one layer: a twelfth


needs_native = pytest.mark.skipif(importlib.util.find_spec("jattn_native") is None, reason="needs jattn-native")


@pytest.mark.parametrize("derived", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("implementation", ["decode", pytest.param("native", marks=needs_native)])
def test_kernels_that_read_a_layer_in_place_have_the_same_results(getkey, implementation, derived):
    capacity, width = 5000, 256  # of which "decode" reads three chunks
    sizes = [(1, 1, 4, width), *[(3, 1, capacity, 2, width)] * 2, *[(1, 1, 2, width)] * 2]
    query, *held, key, value = (jax.random.normal(getkey(), size) for size in sizes)
    held = [x.at[:, :, 4500:].set(jnp.nan).at[1].set(jnp.nan) for x in held]  # empty slots, another layer

    def loss(named, arrays, layer):
        query, held, chunk = arrays
        cache = KVCache(*held, jnp.array([4500]), layer=layer)
        z, _ = attend_heads(query, *chunk, cache=cache, implementation=named, sinks=jnp.linspace(-1.0, 1.0, 4))
        return jnp.sin(z).sum(), z

    transformed = functools.partial(jax.value_and_grad, has_aux=True) if derived else lambda fn: fn
    run = lambda named: jax.jit(transformed(functools.partial(loss, named)))
    got, expected = (run(named)((query, held, (key, value)), jnp.int32(2)) for named in (implementation, "xla"))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=2e-5)
    assert np.isfinite(jax.tree.leaves(got)[0])


def test_derivatives_keep_no_cache_of_all_layers_for_each_layer():
    held = [jnp.ones((8, 1, 256, K, 16))] * 2

    def layers(query):
        def one_layer(query, i):
            cache = KVCache(*held, jnp.array([255]), layer=i)
            return attend_heads(query, query[:, :, :K], query[:, :, :K], cache=cache, implementation="decode")[0], None

        return jax.lax.scan(one_layer, query, jnp.arange(8))[0]

    _, pull = jax.vjp(layers, jnp.ones((1, 1, N, 16)))
    assert sum(x.nbytes for x in jax.tree.leaves(pull)) < 3 * sum(x.nbytes for x in held)  # with them: ten times


@pytest.mark.parametrize("implementation", [None, "decode"])
def test_kernels_read_a_layer_in_place(implementation):
    abstract = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    held, token = abstract(LAYERS, 1, 100_000, K, 16), abstract(1, 1, K, 16)

    def step(key, value, length, query, *chunk):
        def one_layer(held, i):
            cache = KVCache(*held, length, layer=i)
            z, cache = attend_heads(query, *chunk, cache=cache, implementation=implementation)
            return (cache.key, cache.value), z

        return jax.lax.scan(one_layer, (key, value), jnp.arange(LAYERS))

    operands = held, held, jax.ShapeDtypeStruct((1,), jnp.int32), abstract(1, 1, N, 16), token, token
    memory = jax.jit(step, donate_argnums=(0, 1)).lower(*operands).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 100_000 * K * 16 * 4  # keys of one layer


@pytest.mark.slow
def test_what_lies_in_empty_slots_is_never_seen(layer):
    cache = empty(T + 5)
    dirty = KVCache(*(jnp.full_like(x, jnp.nan) for x in (cache.key, cache.value)), cache.length)
    for step in (stepper(layer, is_causal=True), stepper(layer)):
        got, expected = (decode(layer, one, CHUNKS["chunks"], step)[0] for one in (dirty, cache))
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_append_puts_tokens_where_they_belong():
    tokens = jnp.arange(1.0, 9.0).reshape(1, 8, 1, 1)
    put = lambda cache, part, **options: jattn.append(cache, tokens[:, part], tokens[:, part], **options)
    cache = put(put(jattn.init_cache(1, 5, 1, 1), slice(0, 2)), slice(2, 5))
    np.testing.assert_array_equal(cache.key.ravel(), [1, 2, 3, 4, 5])
    cache = jattn.init_cache(1, 3, 1, 1, rolling=True)
    assert (np.asarray(cache.slot_positions) < 0).all()
    cache = put(put(cache, slice(0, 2)), slice(2, 7))
    np.testing.assert_array_equal(cache.value.ravel(), [7, 5, 6])
    np.testing.assert_array_equal(cache.slot_positions, [[6, 4, 5]])
    valid = jnp.array([[False, True, False, True]])
    cache = put(jattn.init_cache(1, 5, 1, 1), slice(0, 4), valid=valid)
    np.testing.assert_array_equal(cache.key.ravel(), [2, 4, 0, 0, 0])
    np.testing.assert_array_equal(jattn.init_cache(1, 5, 1, 1).next_positions(4, valid), [[-1, 0, -1, 1]])
    np.testing.assert_array_equal(put(cache, slice(7, 8)).key.ravel(), [2, 4, 8, 0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("scalar", [False, True])
def test_overflow_is_an_error(layer, scalar):
    params, x = layer
    step = lambda cache, x: jattn.multi_head_attention(params, x, cache=cache, is_causal=True)
    _, cache = step(empty(5, scalar), x[:, :5])
    with pytest.raises(ValueError, match=r"6 tokens do not fit into a cache of 5.*pass no keys \(key\[:, :0\]\)"):
        step(cache, x[:, 5:6])
    with pytest.raises(ValueError, match="7 tokens do not fit into a cache of 5"):
        step(empty(5, scalar), x[:, :7])
    jitted = jax.jit(step)
    y, cache = jitted(empty(5, scalar), x[:, :5])
    assert np.isfinite(y).all() and not cache.overflowed.any()
    y, cache = jitted(cache, x[:, 5:6])
    assert np.isnan(y).all() and cache.overflowed.all() and cache.overflowed.shape == cache.length.shape


WINDOWS = {
    "window": masks.SlidingWindow(2), "not itself": masks.SlidingWindow(2) & masks.Prefix(4),
    "array": np.arange(5) < 4, "none": None,
}  # fmt: skip


@pytest.mark.slow_except("own lengths-window", "own lengths-not itself")
@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("scalar", [False, True], ids=["own lengths", "one length"])
def test_an_overflow_stays(layer, scalar, name):
    """NaN for every later query of that sequence, also where its window or mask no longer shows the last slot."""
    (params, x), mask = layer, WINDOWS[name]
    step = jax.jit(lambda cache, x, valid: jattn.multi_head_attention(params, x, cache=cache, mask=mask, valid=valid))
    cache = empty(5, scalar)
    for t in range(12):
        valid = None if scalar else jnp.array([[True], [t < 4]])  # the second sequence ends before it overflows
        y, cache = step(cache, x[:, t : t + 1], valid)
        assert np.isnan(y[0]).all() == (t >= 5) and np.isnan(y[1]).any() == (t >= 5 and scalar), t
    assert cache.overflowed.tolist() == (True if scalar else [True, False])


def test_an_overflow_stays_where_one_attends_oneself():
    """``append`` and ``dot_product_attention`` by hand: tokens that do not fit stand at the last slot, which is NaN."""
    cache, one = jattn.init_cache(2, 5, 1, 2), jnp.ones((2, 1, 1, 2))
    valid = jnp.array([[True], [False]])

    @jax.jit
    def step(cache):
        after = jattn.append(cache, one, one, valid=valid)
        options = {"query_positions": cache.next_positions(1, valid), "mask": masks.SlidingWindow(2)}
        key_value = after.key, after.value
        return jattn.dot_product_attention(one, *key_value, key_value_seq_lengths=after.filled, **options), after

    for t in range(11):
        y, cache = step(cache)
        assert np.isnan(y[0]).all() == (t >= 5) and np.isfinite(y[1]).all(), t
    positions = jax.jit(lambda cache: cache.next_positions(2))
    np.testing.assert_array_equal(positions(cache), [[4, 4], [0, 1]])
    rolling = KVCache(cache.key, cache.value, jnp.int32([9, 0]), rolling=True)
    np.testing.assert_array_equal(positions(rolling), [[9, 10], [0, 1]])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("capacity", [4, 0])
def test_a_chunk_longer_than_the_cache_overflows(batch, capacity):
    """Also of one sequence, and at once: no query of the chunk has a finite output."""
    cache, x = jattn.init_cache(batch, capacity, 1, 2), jnp.ones((batch, 5, 1, 2))
    attend = lambda cache: jattn.multi_head.attend_heads(x, x, x, cache=cache, is_causal=True)
    y, after = jax.jit(attend)(cache)
    assert after.overflowed.all() and after.key.shape == cache.key.shape and after.length.tolist() == [5] * batch
    assert np.isnan(after.value).all() and np.isnan(y).all()
    with pytest.raises(ValueError, match=f"5 tokens do not fit into a cache of {capacity}"):
        attend(cache)


def test_a_chunk_of_which_a_part_fits_is_nan():
    """One slice starts earlier than the chunk should, so what it writes does not belong there."""
    x, append = np.arange(1.0, 9.0, dtype=np.float32).reshape(1, 8, 1, 1), jax.jit(jattn.append)
    cache = append(jattn.init_cache(1, 5, 1, 1), x[:, :3], x[:, :3])
    after = append(cache, x[:, 3:6], x[:, 3:6])
    assert after.overflowed.all() and np.isnan(np.asarray(after.value)[:, 3:]).all()


def test_a_step_has_no_effects_and_a_rolling_cache_never_overflows():
    """With one, JAX would take its slow path on every call, a tenth of a millisecond."""
    cache, x = empty(5), jnp.zeros((B, 1, K, H))
    assert not jax.make_jaxpr(jattn.append)(cache, x, jnp.zeros((B, 1, K, D))).effects
    after = jax.jit(jattn.append)(empty(1, rolling=True), jnp.zeros((B, 2, K, H)), jnp.zeros((B, 2, K, D)))
    assert not np.any(after.overflowed)


@pytest.mark.slow_except("rolling")
@pytest.mark.parametrize("rolling", [False, True], ids=["filling", "rolling"])
def test_rewound_tokens_are_as_never_appended(layer, rolling):
    """Speculative decoding: of three drafted tokens, each sequence keeps its own number."""
    _, x = layer
    options, rewind = CASES["window"], jax.jit(KVCache.rewind)
    step, expected = stepper(layer, **options), full(layer, **options)
    cache = empty(6, rolling=True) if rolling else empty(T)  # the window's 3 and the drafts' 3
    start = np.zeros(B, int)
    for accepted in ([3, 3], [1, 2], [0, 3], [3, 0], [2, 1]):
        draft = np.full((B, 3, M), 1e3, np.float32)
        for b, (first, count) in enumerate(zip(start, accepted, strict=True)):
            draft[b, :count] = x[b, first : first + count]
        y, cache = step(cache, draft)
        cache = rewind(cache, 3 - np.array(accepted))
        for b, (first, count) in enumerate(zip(start, accepted, strict=True)):
            np.testing.assert_allclose(y[b, :count], expected[b, first : first + count], atol=1e-5)
        start += accepted
    np.testing.assert_array_equal(cache.length, start)


@pytest.mark.slow
def test_what_a_ring_has_overwritten_cannot_be_rewound(layer):
    """A query that would see it gets NaN, as do all of a sequence rewound to before its beginning."""
    options = CASES["window"]
    step, expected = stepper(layer, **options), full(layer, **options)
    rewind, (_, x) = jax.jit(KVCache.rewind), layer
    _, ring = decode(layer, empty(4, rolling=True), [6, 1, 1], step)
    y, _ = step(rewind(ring, np.array([1, 2])), np.stack([x[0, 7:8], x[1, 6:7]]))
    np.testing.assert_allclose(y[0], expected[0, 7:8], atol=1e-5)
    assert np.isnan(y[1]).all()
    for cache, held in ((ring, 4), (decode(layer, empty(T), [6, 1, 1], step)[1], 8)):
        for count in (held + 1, -1):
            with pytest.raises(ValueError, match=rf"rewind: tokens must be from 0 to the \[{held}, {held}\] that"):
                cache.rewind(count)
            after = rewind(cache, np.array([0, count]))
            assert after.overflowed.tolist() == [False, True]
            for t in range(8, T):
                y, after = step(after, x[:, t : t + 1])
                np.testing.assert_allclose(y[0], expected[0, t : t + 1], atol=1e-5)
                assert np.isnan(y[1]).all()
    with pytest.raises(ValueError, match=r"tokens must be integers \[\] or \[B\], got float32"):
        ring.rewind(1.0)


@pytest.mark.slow
def test_cross_attention_stores_the_encoded_keys_once(layer):
    """By a call without queries; calls without keys then attend to them all, wherever the queries stand."""
    params, x = layer
    encoded, real = x[:, :9], np.arange(9) < np.array([[9], [6]])
    options = {"position": Rotary(100.0), "score_mod": score_mods.SoftCap(2.0)}
    call = jax.jit(lambda x, encoded, **kw: jattn.multi_head_attention(params, x, encoded, **options, **kw))
    y, cache = call(x[:, :0], encoded, cache=empty(9), valid=real)
    assert y.shape == (B, 0, M)
    for t in (9, 10):
        query, at = x[:, t : t + 1], np.array([t])
        y, after = call(query, encoded[:, :0], cache=cache, query_positions=at)
        expected = call(query, encoded, query_positions=at, mask=jnp.asarray(real)[:, None, None, :])
        np.testing.assert_allclose(y, expected, atol=1e-5)
        np.testing.assert_array_equal(after.length, [9, 6])
    own = jattn.nnx.MultiHeadAttention(2, M, decode=True, rngs=nnx.Rngs(0))
    own.init_cache((B, 9, M))
    for again in (lambda: call(x[:, :1], encoded, cache=empty(9)), lambda: own(x[:, :1], encoded)):
        with pytest.raises(
            ValueError, match="as many keys as .* got 9 keys for 1 queries; for cross-attention, append"
        ):
            again()
    own(x[:, :0], encoded)
    np.testing.assert_allclose(own(x[:, :2], encoded[:, :0]), own(x[:, :2], encoded, decode=False), atol=1e-5)


ONE_TOKEN = (B, 1, N, H), (B, 1, K, H), (B, 1, K, D)


@pytest.mark.parametrize("make, message", [
    (lambda: jattn.append(empty(), jnp.zeros((B, 2, K, H + 1)), jnp.zeros((B, 2, K, D))), r"key must be \[2, 'L', 3, 4\]"),
    (lambda: jattn.append(empty(), jnp.zeros((B, 2, K, H)), jnp.zeros((B, 3, K, D))), r"value must be \[2, 'L', 3, 5\]"),
    (lambda: jattn.append(empty(), jnp.zeros((B, 2, K, H)), jnp.zeros((B, 2, K, D)), valid=jnp.ones((B, 2))), r"valid must be bools \[B, L\] = \[2, 2\], got float32"),
    pytest.param(
        lambda: attend_heads(*map(jnp.zeros, ONE_TOKEN), cache=empty(rolling=True), mask=jnp.ones((B, 1, 1, T), bool)),
        "a mask array is indexed by slot, but a rolling cache reuses slots", marks=pytest.mark.slow,
    ),
])  # fmt: skip
def test_errors_name_the_argument(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_scan_over_tokens_compiles_once_and_weights_are_those_of_the_full_pass(layer):
    params, x = layer

    def step(cache, token):
        options = {"is_causal": True, "return_weights": True}
        y, weights, cache = jattn.multi_head_attention(params, token[:, None], cache=cache, **options)
        return cache, (y[:, 0], weights[:, :, 0])

    cache, (y, weights) = jax.lax.scan(step, empty(T), np.moveaxis(x, 1, 0))
    expected, expected_weights = full(layer, is_causal=True, return_weights=True)
    np.testing.assert_allclose(np.moveaxis(y, 0, 1), expected, atol=1e-5)
    np.testing.assert_allclose(np.moveaxis(weights, 0, 2), expected_weights, atol=1e-5)


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("dtype", [pytest.param("int32", marks=pytest.mark.slow), "uint32", "int64"])
def test_lengths_of_any_integers_where_64_bits_are_enabled(dtype, rolling):
    """For ``append`` and for attention to a cache; the lengths keep their dtype."""
    tokens, true = np.arange(1.0, 8.0, dtype=np.float32).reshape(1, 7, 1, 1), np.ones((1, 2), bool)

    @jax.jit
    def after_all(cache):
        for part, valid in ((tokens[:, :5], None), (tokens[:, 5:5], None), (tokens[:, 5:], true)):
            assert cache.next_positions(part.shape[1]).dtype == jnp.int32
            cache = jattn.append(cache, jnp.asarray(part), jnp.asarray(part), valid=valid)
            assert cache.length.dtype == dtype
        return cache, cache.filled, cache.slot_positions if rolling else None

    with jax.enable_x64(True):
        for shape in ((), (1,)):
            cache = jattn.init_cache(1, 4 if rolling else 7, 1, 1, rolling=rolling)
            cache, filled, slot_positions = after_all(KVCache(cache.key, cache.value, jnp.zeros(shape, dtype), rolling))
            assert np.all(np.asarray(cache.length) == 7) and filled.dtype == jnp.int32
            np.testing.assert_array_equal(np.ravel(cache.key), [5, 6, 7, 4] if rolling else tokens.ravel())
            if not rolling:
                with pytest.raises(ValueError, match="8 tokens do not fit into a cache of 7"):
                    jattn.append(cache, jnp.ones((1, 1, 1, 1)), jnp.ones((1, 1, 1, 1)))
            if rolling:
                np.testing.assert_array_equal(slot_positions, [[4, 5, 6, 3]])
                assert slot_positions.dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "float32", "bool"])
def test_lengths_that_cannot_count_on_are_refused(dtype):
    """int8 wraps at 128 tokens: a cache of 300 would start again at a slot in use."""
    x = jnp.zeros((B, 60, K, H))
    cache = KVCache(jnp.zeros((B, 300, K, H)), jnp.zeros((B, 300, K, H)), jnp.zeros(B, dtype))
    for use in (lambda: jattn.append(cache, x, x), lambda: cache.overflowed, lambda: cache.filled):
        with pytest.raises(TypeError, match=f"length of a cache must be integers of 32 or 64 bits, got {dtype}"):
            use()


@pytest.mark.parametrize("rolling", [False, True])
def test_flax_saves_and_restores_a_cache(rolling):
    append, tokens = jax.jit(jattn.append), np.float32(np.random.default_rng(0).normal(size=(2, 7, 1, 2)))
    fresh = jattn.init_cache(2, 4 if rolling else 8, 1, 2, dtype=jnp.bfloat16, rolling=rolling)
    cache = append(fresh, tokens, tokens)
    saved = serialization.to_bytes({"cache": cache})
    restored = serialization.from_bytes({"cache": fresh}, saved)["cache"]
    chex.assert_trees_all_equal(restored, cache)
    chex.assert_trees_all_equal_dtypes(restored, cache)
    one = tokens[:, :1]
    chex.assert_trees_all_equal(append(restored, one, one), append(cache, one, one))


def test_a_cache_of_fewer_bits(layer):
    got, cache = decode(layer, empty(T, dtype=jnp.bfloat16), CHUNKS["chunks"], is_causal=True)
    assert cache.key.dtype == jnp.bfloat16 and got.dtype == jnp.float32
    np.testing.assert_allclose(got, full(layer, is_causal=True), atol=0.05)
