"""A cache that keeps its first tokens counts positions within itself: against NumPy, from the definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization

import jattn
import jattn.nnx
from jattn import masks
from jattn.cache import KVCache
from jattn.multi_head import attend_heads
from jattn.positions import DynamicScaling, Rotary, at_length

B, T, N, K, H, D = 2, 19, 4, 2, 8, 6
CAPACITY, FIRST, BASE = 7, 2, 100.0
CHUNKS = {"one by one": [1] * T, "a prompt first": [9, *[1] * 10], "chunks": [3, 5, 2, 9], "at once": [T]}


def draw(seed=0, length=T):
    rng = np.random.default_rng(seed)
    sizes = (B, length, N, H), (B, length, K, H), (B, length, K, D)
    return tuple(rng.normal(size=size).astype(np.float32) for size in sizes)


def rotated(x, position, base=BASE):
    angles = position * base ** (-np.arange(0, H, 2) / H)
    first, second = x[: H // 2], x[H // 2 :]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin])


def expected(query, key, value, *, window=None, base=BASE, capacity=CAPACITY):
    """``[B,T,N,D]``, each token alone: what it sees is listed, and an entry's place in the list is its position."""
    z = np.zeros((*query.shape[:3], D))
    for b, t, n in np.ndindex(*query.shape[:3]):
        seen = [s for s in range(t + 1) if s < FIRST or s > t - (capacity - FIRST)]
        places = [i for i, s in enumerate(seen) if window is None or t - s <= window]
        k = n // (N // K)
        q = rotated(query[b, t, n].astype(np.float64), len(seen) - 1, base)
        scores = np.array([q @ rotated(key[b, seen[i], k].astype(np.float64), i, base) for i in places]) / H**0.5
        weights = np.exp(scores - scores.max())
        z[b, t, n] = weights @ value[b, [seen[i] for i in places], k] / weights.sum()
    return z


def empty(**options):
    return jattn.init_cache(B, CAPACITY, K, H, value_dim=D, rolling=True, first_tokens=FIRST, **options)


def step(**options):
    position = options.pop("position", Rotary(BASE))
    return jax.jit(lambda qkv, **call: attend_heads(*qkv, position=position, is_causal=True, **options, **call))


def decode(qkv, chunks, cache=None, attend=None):
    cache, attend, outputs, start = empty() if cache is None else cache, attend or step(), [], 0
    for length in chunks:
        z, cache = attend([x[:, start : start + length] for x in qkv], cache=cache)
        outputs.append(z)
        start += length
    return np.concatenate(outputs, 1), cache


@pytest.mark.parametrize("kind", CHUNKS)
def test_an_entrys_place_in_the_cache_is_its_position(kind):
    qkv = draw()
    got, cache = decode(qkv, CHUNKS[kind])
    np.testing.assert_allclose(got, expected(*qkv), atol=2e-6)
    assert cache.slot_positions.tolist() == [[0, 1, 17, 18, 14, 15, 16]] * B
    np.testing.assert_array_equal(cache.key[:, [0, 1, 3]], qkv[1][:, [0, 1, 18]])  # before positions


@pytest.mark.slow
def test_it_is_not_what_positions_in_the_text_give():
    """The test before fails if positions are those of the text."""
    qkv = draw()
    seen = masks.Causal() & (masks.SlidingWindow(CAPACITY - FIRST - 1) | masks.Prefix(FIRST))
    in_the_text = attend_heads(*map(jnp.asarray, qkv), position=Rotary(BASE), mask=seen)
    of_cache = expected(*qkv)
    np.testing.assert_allclose(in_the_text[:, :CAPACITY], of_cache[:, :CAPACITY], atol=2e-6)
    assert np.abs(in_the_text - of_cache)[:, CAPACITY:].max() > 0.1


@pytest.mark.slow
def test_a_window_and_a_scale_of_the_call():
    qkv = draw(1)
    z, _ = decode(qkv, CHUNKS["chunks"], attend=step(mask=masks.SlidingWindow(4)))
    np.testing.assert_allclose(z, expected(*qkv, window=4), atol=2e-6)
    for kind in ("one by one", "chunks"):
        z, _ = decode(qkv, CHUNKS[kind], attend=step(scale=1.0))
        np.testing.assert_allclose(z, expected(qkv[0] * H**0.5, *qkv[1:]), atol=2e-6)


def test_sequences_of_different_lengths():
    qkv = draw(2)
    lengths = [13, 9]
    padded = [np.full((B, 13, *x.shape[2:]), np.nan, np.float32) for x in qkv]
    for x, whole in zip(padded, qkv, strict=True):
        for b, length in enumerate(lengths):
            x[b, 13 - length :] = whole[b, :length]
    valid = ~np.isnan(padded[1][..., 0, 0])
    first, cache = step()(padded, cache=empty(), valid=valid)
    following = [np.stack([x[b, [length]] for b, length in enumerate(lengths)]) for x in qkv]
    second, cache = step()(following, cache=cache)
    z = expected(*qkv)
    for b, length in enumerate(lengths):
        np.testing.assert_allclose(first[b, 13 - length :], z[b, :length], atol=2e-6)
        np.testing.assert_allclose(second[b, 0], z[b, length], atol=2e-6)
    np.testing.assert_array_equal(cache.length, [14, 10])


def test_after_a_billion_tokens_every_bit_is_the_same():
    """No angle grows with the text."""
    qkv = draw(3)
    _, cache = decode(qkv, [11])
    far = dataclasses.replace(cache, length=cache.length + 2**28 * (CAPACITY - FIRST))
    for chunks in ([1, 1, 1], [5]):
        following = [x[:, 11:] for x in qkv]
        near, _ = decode(following, chunks, cache)
        np.testing.assert_array_equal(decode(following, chunks, far)[0], near)


def test_rewound_tokens_are_as_never_appended():
    """The window of 4 hides what a draft has replaced."""
    qkv = draw(4)
    attend = step(mask=masks.SlidingWindow(2))
    _, cache = decode([x[:, :9] for x in qkv], [9], attend=attend)
    _, drafted = attend([x[:, :2] * 100 for x in qkv], cache=cache)
    z, _ = decode([x[:, 9:] for x in qkv], [2, 3], jax.jit(KVCache.rewind)(drafted, 2), attend)
    np.testing.assert_allclose(z, expected(*qkv, window=2)[:, 9:14], atol=2e-6)
    with pytest.raises(ValueError, match=r"tokens must be from 0 to the \[5, 5\] that the cache holds"):
        cache.rewind(6)
    assert np.isnan(attend([x[:, :1] for x in qkv], cache=drafted.rewind(4))[0]).all()


@pytest.mark.slow
def test_what_is_looked_at_is_what_is_computed():
    qkv = draw(5)
    _, cache = decode([x[:, :12] for x in qkv], [12])
    chunk = [x[:, 12:] for x in qkv]
    z, weights, entropy, looked, _ = step(return_weights=True, return_statistics=["entropy"], return_heads=True)(
        chunk, cache=cache
    )
    np.testing.assert_allclose(z, expected(*qkv)[:, 12:], atol=2e-6)
    np.testing.assert_allclose(weights.sum(-1), 1.0, atol=1e-6)
    information = np.where(weights > 0, -weights * np.log(np.where(weights > 0, weights, 1)), 0)
    of_all_equal = np.log(CAPACITY)
    np.testing.assert_allclose(entropy["entropy"], information.sum(-1).mean(-1) / of_all_equal, atol=1e-5)
    scores = np.einsum("btnh,bsnh->bnts", looked["query"], np.repeat(looked["key"], N // K, 2)) / (2 * H) ** 0.5
    kept = np.where(weights > 0, np.exp(scores - np.asarray(looked["lse"]).swapaxes(1, 2)[..., None]), 0)
    np.testing.assert_allclose(kept, weights, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_short_dtypes(dtype):
    qkv = [jnp.asarray(x, dtype) for x in draw(6)]
    for kind in ("one by one", "chunks"):
        z, _ = decode(qkv, CHUNKS[kind], empty(dtype=dtype))
        np.testing.assert_allclose(z.astype(np.float32), expected(*(np.asarray(x, np.float32) for x in qkv)), atol=0.05)


def decode_module(module, x, cache):
    """One token after the other, in a scan."""

    def step(cache, x):
        y, cache = module(x[:, None], cache=cache, is_causal=True)
        return cache, y[:, 0]

    return jax.lax.scan(step, cache, x.swapaxes(0, 1))[1].swapaxes(0, 1)


@pytest.mark.slow
def test_a_module_and_its_gradient():
    module = jattn.nnx.MultiHeadAttention(N, 8, N * H, num_kv_heads=K, position=Rotary(BASE), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(7), (B, T, 8))
    cache = jattn.init_cache(B, CAPACITY, K, H, rolling=True, first_tokens=FIRST)

    def outputs(x, chunks):
        at, held, parts = 0, cache, []
        for length in chunks:
            y, held = module(x[:, at : at + length], cache=held, is_causal=True)
            parts.append(y)
            at += length
        return jnp.concatenate(parts, 1)

    one_by_one = nnx.jit(lambda x, module: decode_module(module, x, cache))(x, module)
    by_chunk = []
    for chunks in (CHUNKS["chunks"], CHUNKS["at once"]):
        np.testing.assert_allclose(jax.jit(lambda x, c=chunks: outputs(x, c))(x), one_by_one, atol=2e-6)
        by_chunk.append(jax.jit(jax.grad(lambda x, c=chunks: (outputs(x, c)[:, -1] ** 2).sum()))(x))
    np.testing.assert_allclose(*by_chunk, atol=1e-5)
    # What the last token does not see has no part in it.
    assert np.abs(by_chunk[0]).max((0, 2)).nonzero()[0].tolist() == [0, 1, 14, 15, 16, 17, 18]


@pytest.mark.slow
def test_frequencies_that_depend_on_the_length_are_those_of_the_capacity():
    position = Rotary(BASE, scaling=DynamicScaling(2.0, original_length=4))
    qkv = draw(8)
    z, _ = decode(qkv, CHUNKS["chunks"], attend=step(position=position))
    base = BASE * (2.0 * CAPACITY / 4 - 1.0) ** (H / (H - 2))
    np.testing.assert_allclose(z, expected(*qkv, base=base), atol=2e-6)
    assert at_length(position, CAPACITY) != position


def test_what_cannot_be():
    for options in ({"first_tokens": 7}, {"first_tokens": -1}, {"first_tokens": 2, "rolling": False}):
        with pytest.raises(ValueError, match="first_tokens must be from 0 to capacity - 1 = 6, and needs rolling"):
            jattn.init_cache(B, CAPACITY, K, H, **{"rolling": True, **options})
    qkv = [jnp.asarray(x[:, :3]) for x in draw()]
    with pytest.raises(ValueError, match="a cache with first_tokens counts positions itself"):
        attend_heads(*qkv, cache=empty(), position=Rotary(), query_positions=np.arange(3))
    with pytest.raises(
        ValueError, match="position must be a jattn.positions.Rotary with a cache that has first_tokens"
    ):
        attend_heads(*qkv, cache=empty(), position=lambda x, positions: x)
    saved = serialization.to_state_dict(empty())
    assert serialization.from_state_dict(empty(), saved).first_tokens == FIRST
    plain = jattn.init_cache(B, CAPACITY, K, H, value_dim=D, rolling=True)
    with pytest.raises(
        ValueError, match="the cache was saved with first_tokens=2, but is restored into one with first_tokens=0"
    ):
        serialization.from_state_dict(plain, saved)
    module = jattn.nnx.MultiHeadAttention(N, 8, N * H, num_kv_heads=K, position=Rotary(BASE), rngs=nnx.Rngs(0))
    cache = jattn.init_cache(B, CAPACITY, K, H, rolling=True, first_tokens=FIRST)
    with pytest.raises(ValueError, match="a cache with first_tokens counts positions itself"):
        module(jnp.ones((B, 3, 8)), cache=cache, input_positions=np.arange(3))
