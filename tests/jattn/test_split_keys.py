"""Keys sharded over devices: the results of one device, and a cache that each device writes and reads in place."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads, masks
from jattn.cache import KVCache, append_chunk
from jattn.positions import Rotary
from jattn.sharding import Ring, SplitKeys
from jattn.testing._check import run, values_and_gradients
from jattn.testing._reference import inputs
from tests.ring_cases import AGAINST, CASES, assert_close, expected, largest_error, mesh_of

B, M, N, K, H, D = 2, 12, 4, 2, 4, 5
ALONG = PartitionSpec(None, "sequence")


def across(name, devices, gradients=False):
    """One case of the conformance table with its keys sharded."""
    how = SplitKeys(mesh_of(devices), "sequence", implementation=AGAINST.get(name, "xla"))
    return jax.jit(lambda given: values_and_gradients(CASES[name], lambda x: run(CASES[name], how, x), given, gradients))(inputs(CASES[name]))  # fmt: skip


@pytest.mark.slow_except("1-nobody sees anything", "1-lengths, one of them 0")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("turn", range(2))
def test_values_are_those_of_one_device(name, turn):
    """Each case on two of 1, 2, 4 and 8 devices."""
    devices = (1, 2, 4, 8)[(list(CASES).index(name) + 2 * turn) % 4]
    assert largest_error(across(name, devices), expected(name, gradients=False)) <= 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lengths, one of them 0", "bias", "sinks", "function that captures a table", "dropout"])  # fmt: skip
def test_gradients_are_those_of_one_device(name):
    assert_close(across(name, 4, gradients=True), name)


@pytest.mark.slow
def test_statistics_are_those_of_one_device():
    query, key = (jnp.asarray(inputs(CASES["causal"])[name]) for name in ("query", "key"))
    tokens = np.random.default_rng(1).integers(0, 4, query.shape[:2])
    names = ["entropy", "max_logit", "offset_profile", "received", "induction"]  # reductions of every kind
    given = {"tokens": tokens, "names": names, "is_causal": True}
    look = jax.jit(lambda q, k, how: heads.statistics(q, k, implementation=how, **given), static_argnums=2)
    found = look(query, key, SplitKeys(mesh_of(4), "sequence"))
    chex.assert_trees_all_close(found, look(query, key, None), atol=1e-5)


@functools.cache
def layer():
    rng = np.random.default_rng(0)
    sizes = {"query": (M, N, H), "key": (M, K, H), "value": (M, K, D), "out": (N, D, M)}
    params = {name: {"kernel": jnp.float32(rng.normal(size=size) / M**0.5)} for name, size in sizes.items()}
    return params, jnp.float32(rng.normal(size=(B, 32, M)))


@functools.partial(jax.jit, static_argnums=(3, 4))
def step(cache, x, valid, how, mask):
    given = {"cache": cache, "valid": valid, "implementation": how, "mask": mask, "position": Rotary(100.0)}
    return jattn.multi_head_attention(layer()[0], x, **given)


def caches(mesh, capacity, one_length=False, spec=ALONG, **options):
    """The same empty cache on one device and sharded."""
    pair = [jattn.init_cache(B, capacity, K, H, value_dim=D, sharding=sharding, **options) for sharding in (None, NamedSharding(mesh, spec))]  # fmt: skip
    return [KVCache(one.key, one.value, one.length[0], one.rolling, one.sharding) if one_length else one for one in pair]  # fmt: skip


def decode(mesh, chunks, plain, sharded, ragged=False, in_a_ring=(), mask=None):
    """Decodes into both caches and compares outputs and caches after every chunk; ``in_a_ring``: those lengths."""
    rng, start, mask = np.random.default_rng(2), 0, masks.Causal() if mask is None else mask
    for length in chunks:
        x = layer()[1][:, start : start + length]
        valid = jnp.asarray(rng.random((B, length)) < 0.7) if ragged else None
        wanted, plain = step(plain, x, valid, None, mask)
        how = Ring(mesh, "sequence") if length in in_a_ring else None
        placed = x if how is None else jax.device_put(x, NamedSharding(mesh, ALONG))
        got, sharded = step(sharded, placed, valid, how, mask)
        np.testing.assert_allclose(np.asarray(got), wanted, atol=1e-5)
        for name in ("key", "value", "length"):
            np.testing.assert_allclose(np.asarray(getattr(sharded, name)), getattr(plain, name), atol=1e-5)
        start += length
    return sharded


def lies_in_shares(cache, devices):
    parts = {part.data.shape[1] for x in (cache.key, cache.value) for part in x.addressable_shards}
    return parts == {cache.capacity // devices}


KINDS = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}


# Sequences of one length, of lengths of their own, and of those with padding among their tokens.
LENGTHS = {"one": (True, False), "own": (False, False), "ragged": (False, True)}
MESHES = [(1, "Auto"), (2, "Auto"), (4, "Explicit"), (8, "Auto"), (8, "Explicit")]


@pytest.mark.slow
@pytest.mark.parametrize("devices, kind", MESHES)
@pytest.mark.parametrize("rolling", [False, True], ids=["filling", "rolling"])
def test_decoding_gives_what_one_device_gives(devices, kind, rolling):
    mesh = jax.make_mesh((devices,), ("sequence",), (KINDS[kind],), devices=jax.devices()[:devices])
    for one_length, ragged in LENGTHS.values() if devices == 8 else [LENGTHS["ragged" if rolling else "own"]]:
        both = caches(mesh, 8 if rolling else 16, one_length, rolling=rolling)
        assert lies_in_shares(decode(mesh, [5, 2, 1, 1, 1], *both, ragged), devices)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rolling", [False, True], ids=["filling", "rolling"])
def test_rewinding_gives_what_one_device_gives(kind, rolling):
    mesh = jax.make_mesh((4,), ("sequence",), (KINDS[kind],), devices=jax.devices()[:4])
    both = caches(mesh, 8 if rolling else 16, rolling=rolling)
    x, rewind = layer()[1], jax.jit(KVCache.rewind)
    both = [step(cache, x[:, :11], None, None, masks.SlidingWindow(3))[1] for cache in both]
    both = [rewind(cache, np.arange(1, B + 1)) for cache in both]
    assert lies_in_shares(both[1], 4)
    decode(mesh, [2, 1], *both, mask=masks.SlidingWindow(3))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("rolling", [False, True], ids=["filling", "rolling"])
def test_a_prompt_in_a_ring(rolling, lengths, kind):
    """Into empty shares and into used ones, from devices that do not hold the tokens' slots."""
    one_length, ragged = LENGTHS[lengths]
    devices = 8 if kind == "Auto" else 2
    mesh = jax.make_mesh((devices,), ("sequence",), (KINDS[kind],), devices=jax.devices()[:devices])
    both = caches(mesh, 24 if rolling else 40, one_length, rolling=rolling)
    decode(mesh, [16, 3, 8, 1, 1], *both, ragged, in_a_ring=(16, 8))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_heads_and_slots_at_once(kind):
    mesh = jax.make_mesh((2, 2, 2), ("data", "heads", "sequence"), (KINDS[kind],) * 3)
    both = caches(mesh, 16, spec=PartitionSpec("data", "sequence", "heads"))
    cache = decode(mesh, [5, 1, 1], *both)
    assert {part.data.shape for part in cache.key.addressable_shards} == {(1, 8, 1, H)}
    both = caches(mesh, 16, spec=PartitionSpec("data", ("sequence", "heads")))
    assert {part.data.shape for part in decode(mesh, [5, 1], *both).key.addressable_shards} == {(1, 4, K, H)}
    both = caches(mesh, 5, spec=PartitionSpec("data", None, "heads"))
    assert {part.data.shape for part in decode(mesh, [4, 1], *both).key.addressable_shards} == {(1, 5, 1, H)}


@pytest.mark.slow
def test_each_device_keeps_the_tokens_of_its_slots():
    """A chunk longer than a share, over borders of shares, and beyond what the first devices have."""
    cache, tokens = caches(mesh_of(4), 8)[1], jnp.arange(1.0, 9.0).reshape(1, 8, 1, 1)
    tokens = jnp.broadcast_to(tokens, (B, 8, K, H))
    put = jax.jit(lambda cache, x: jattn.append(cache, x, jnp.broadcast_to(x[..., :1], (*x.shape[:3], D))))
    for part, wanted in ((slice(0, 1), [1]), (slice(1, 6), [1, 2, 3, 4, 5, 6]), (slice(6, 8), list(range(1, 9)))):
        cache = put(cache, tokens[:, part])
        got = np.asarray(cache.key)[0, :, 0, 0]
        np.testing.assert_array_equal(got, [*wanted, *[0] * (8 - len(wanted))])
    with pytest.raises(ValueError, match="9 tokens do not fit into a cache of 8"):
        jattn.append(cache, tokens[:, :1], jnp.zeros((B, 1, K, D)))


@pytest.mark.slow
@pytest.mark.parametrize("one_length", [False, True])
def test_an_overflow_stays(one_length):
    """NaN from then on, for the sequences that overflow and no other."""
    mesh = mesh_of(8)
    for cache in caches(mesh, 8, one_length):
        for t in range(11):
            valid = None if one_length else jnp.array([[True], [t < 4]])
            y, cache = step(cache, layer()[1][:, t : t + 1], valid, None, masks.SlidingWindow(2))
            assert np.isnan(y[0]).all() == (t >= 8) and np.isnan(y[1]).any() == (t >= 8 and one_length), t
        assert np.isnan(np.asarray(cache.value)[0, -1]).all()


@pytest.mark.slow
def test_what_lies_in_empty_slots_is_never_seen():
    plain, sharded = caches(mesh_of(8), 16)
    dirty = jax.tree.map(lambda x: x if x.ndim == 1 else jnp.full_like(x, jnp.nan), sharded)
    clean = KVCache(*(jnp.full_like(x, jnp.nan) for x in (plain.key, plain.value)), plain.length)
    decode(mesh_of(8), [3, 1, 1], clean, dirty)


def compiled_step(mesh, capacity, chunk, how=None, ragged=False, fn=None):
    """The program of one step on a sharded cache that is donated."""

    def of(shape, spec=(), dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))

    held, lies = of((1, capacity, 4, 16), ALONG), ALONG if how else ()
    cache = KVCache(held, held, of((1,), dtype=jnp.int32), sharding=NamedSharding(mesh, ALONG))
    valid = (of((1, chunk), lies, bool),) if ragged else ()

    def attend(cache, query, key, value, *valid):
        options = {"valid": valid[0]} if valid else {}
        return jattn.multi_head.attend_heads(query, key, value, cache=cache, is_causal=True, implementation=how, **options)  # fmt: skip

    tokens = [of((1, chunk, heads, 16), lies) for heads in (8, 4, 4)]
    return jax.jit(fn or attend, donate_argnums=0).lower(cache, *tokens, *valid).compile()


@pytest.mark.slow_except("plain")
@pytest.mark.parametrize("ragged", [False, True], ids=["plain", "ragged"])
def test_a_step_moves_sums_and_no_keys(ragged):
    """Two all-reduces: of lse, and of the output with its weight. The cache is written in place."""
    program = compiled_step(mesh_of(8), 8192, 1, ragged=ragged)
    text, memory = program.as_text(), program.memory_analysis()
    assert not any(word in text for word in ("all-gather", "all-to-all", "collective-permute"))
    reduced = sorted(re.findall(r"= f32\[([\d,]+)\]\S* all-reduce", text), key=len)
    assert len(reduced) == 2 and reduced[1].endswith(",17"), reduced
    assert "8192" not in "".join(re.findall(r"\w+\[[\d,]*\]", text))  # nothing as long as the cache
    share = 2 * 8192 // 8 * 4 * 16 * 4
    assert memory.alias_size_in_bytes >= share and memory.temp_size_in_bytes < share


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_a_prompt_in_a_ring_is_gathered_nowhere(ragged):
    mesh = mesh_of(8)
    for fn in (None, lambda cache, _, *key_value: append_chunk(cache, *key_value[:2], *(key_value[2:] or [None]), sharded=True)):  # fmt: skip
        text = compiled_step(mesh, 8192, 4096, Ring(mesh, "sequence"), ragged, fn).as_text()
        assert "collective-permute" in text and "all-to-all" not in text
        # Ragged prompts gather one integer for each token, to count those that are valid.
        assert set(re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather", text)) <= ({"s32", "pred"} if ragged else set())
        long = re.findall(r"f32\[[\d,]*(?:8192|4096)[\d,]*\]", text)
        assert not long, long


@pytest.mark.slow
def test_generation_in_scan_and_while():
    """One program with the cache made in it, carried through both loops."""
    params, x = layer()
    sharding = NamedSharding(mesh_of(8), ALONG)

    def attend(cache, x):
        return jattn.multi_head_attention(params, x, cache=cache, is_causal=True)

    def write(sharding):
        cache = jattn.init_cache(B, 16, K, H, value_dim=D, sharding=sharding)
        y, cache = attend(cache, x[:, :4])
        one = lambda carry, _: (attend(carry[1], carry[0]), None)
        (y, cache), _ = jax.lax.scan(one, (y[:, -1:], cache), None, length=4)
        return jax.lax.while_loop(lambda carry: carry[1].length[0] < 12, lambda carry: attend(carry[1], carry[0]), (y, cache))  # fmt: skip

    (wanted, plain), (got, sharded) = (jax.jit(functools.partial(write, how))() for how in (None, sharding))
    np.testing.assert_allclose(got, wanted, atol=1e-5)
    np.testing.assert_allclose(np.asarray(sharded.value), plain.value, atol=1e-5)
    assert lies_in_shares(sharded, 8)


@pytest.mark.slow
def test_gradients_through_a_cache():
    """Also through a prompt in a ring, whose tokens move to where their slots are."""
    params, x = layer()
    mesh = mesh_of(4)
    ring = Ring(mesh, "sequence")

    @functools.partial(jax.jit, static_argnums=2)
    def gradient(params, cache, how):
        def loss(params):
            prompt, after = jattn.multi_head_attention(params, x[:, :8], cache=cache, is_causal=True, implementation=how)  # fmt: skip
            y, _ = jattn.multi_head_attention(params, x[:, 8:9], cache=after)
            return jnp.sum(y**2) + jnp.sum(prompt**2)

        return jax.grad(loss)(params)

    plain, sharded = caches(mesh, 12)
    wanted = gradient(params, plain, None)
    for how in (None, ring):
        chex.assert_trees_all_close(jax.tree.map(np.asarray, gradient(params, sharded, how)), wanted, atol=1e-4, rtol=1e-4)  # fmt: skip


@pytest.mark.slow
def test_an_exported_step():
    plain, sharded = caches(mesh_of(8), 16)
    x = layer()[1][:, :1]

    def flat(sharding, *arrays):  # of arrays, since an exported program knows no KVCache
        y, cache = jattn.multi_head_attention(layer()[0], x, cache=KVCache(*arrays, sharding=sharding))
        return y, cache.key, cache.length

    both = []
    for cache in (plain, sharded):
        arrays = (cache.key, cache.value, cache.length)
        exported = jax.export.export(jax.jit(functools.partial(flat, cache.sharding)))(*arrays)
        both.append(jax.export.deserialize(exported.serialize()).call(*arrays))
    np.testing.assert_allclose(np.asarray(both[1][0]), both[0][0], atol=1e-5)
    assert both[1][1].addressable_shards[0].data.shape[1] == 2


def test_flax_saves_and_restores_a_sharded_cache():
    _, fresh = caches(mesh_of(8), 16)
    cache = jax.tree.map(lambda x: (x + 1).astype(x.dtype), fresh)
    restored = serialization.from_bytes(fresh, serialization.to_bytes(cache))
    chex.assert_trees_all_equal(restored, cache)
    assert restored.sharding == fresh.sharding and lies_in_shares(restored, 8)


@pytest.mark.slow
def test_the_modules_and_a_whole_model():
    sharding, x = NamedSharding(mesh_of(4), ALONG), layer()[1]
    module = jattn.nnx.MultiHeadAttention(N, M, num_kv_heads=K, rngs=nnx.Rngs(0))
    linen = jattn.linen.MultiHeadAttention(N, num_kv_heads=K)
    variables = linen.init(jax.random.key(0), x)
    options = {"is_causal": True}
    calls = (
        nnx.jit(lambda x, cache: module(x, cache=cache, **options)),
        jax.jit(lambda x, cache: linen.apply(variables, x, cache=cache, **options)),
    )
    for one in calls:
        found = []
        for how in (None, sharding):
            cache = jattn.init_cache(B, 16, K, M // N, sharding=how)
            found.append(np.asarray(one(x[:, 5:6], one(x[:, :5], cache)[1])[0]))
        np.testing.assert_allclose(*found, atol=1e-5)

    sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 16}
    config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
    model, tokens = jattn.interop.Transformer(config, rngs=nnx.Rngs(0)), jnp.array([[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]])
    run, found = nnx.jit(lambda model, tokens, cache: model(tokens, cache=cache)), []
    for how in (None, sharding):
        hidden, cache = run(model, tokens, model.init_cache(2, 16, sharding=how))
        found.append(np.asarray(run(model, tokens[:, :1], cache)[0]))
    np.testing.assert_allclose(*found, atol=1e-5)
    assert {part.data.shape for part in cache.key.addressable_shards} == {(2, 2, 4, 2, 4)}


@pytest.mark.slow
def test_options_of_a_call_with_a_sharded_cache():
    """What one can ask for besides the output: weights, statistics, heads; and a named implementation."""
    params, x = layer()
    for cache in (both := caches(mesh_of(4), 16)):
        assert cache is both[0] or cache.sharding is not None
    ask = {
        "return_weights": True,
        "return_statistics": ["entropy", "received"],
        "return_heads": True,
        "is_causal": True,
    }
    bias, sinks = np.float32(np.random.default_rng(3).normal(size=(N, 5, 16))), np.linspace(-1, 1, N, dtype=np.float32)

    @jax.jit
    def run(cache):
        given = {"bias": bias, "sinks": sinks, "mask": np.arange(16) != 2, "implementation": "blockwise"}
        return jattn.multi_head_attention(params, x[:, :5], cache=cache, **given, **ask)[:-1]

    wanted, got = (jax.tree.map(np.asarray, run(cache)) for cache in both)
    chex.assert_trees_all_close(got, wanted, atol=1e-5)


MESH = jax.make_mesh((2, 4), ("data", "sequence"), (AxisType.Auto,) * 2)


def made(*sizes, spec, **options):
    return lambda: jattn.init_cache(*sizes, H, sharding=NamedSharding(MESH, PartitionSpec(*spec)), **options)


BAD = {
    "a mesh without devices": (
        lambda: jattn.init_cache(2, 8, 2, H, sharding=NamedSharding(jax.sharding.AbstractMesh((4,), ("sequence",)), ALONG)),
        TypeError,
        r"sharding must be a jax.sharding.NamedSharding of a mesh of devices, such as .*, got NamedSharding\(mesh=Abstract"),
    "slots": (made(2, 10, 2, spec=(None, "sequence")),
        ValueError,
        r"capacity 10 cannot be divided over mesh axis 'sequence' \(4 devices\): it must be a multiple of 4"),
    "sequences": (made(3, 8, 2, spec=("data",)), ValueError, r"batch_size 3 cannot .* 'data' \(2 devices\)"),
    "heads": (made(2, 8, 3, spec=(None, "sequence", "data")), ValueError, r"num_kv_heads 3 cannot .* 'data'"),
    "head_dim": (made(2, 8, 2, spec=(None, None, None, "data")), ValueError, r"head_dim stays whole; got P.*'data'"),
    "zigzag": (lambda: jattn.multi_head_attention(layer()[0], layer()[1], cache=made(B, 32, K, spec=(None, "sequence"), value_dim=D)(),
            implementation=Ring(MESH, "sequence", layout="zigzag")),
        ValueError,
        "cache must be filled in the order of the tokens, .*'zigzag'"),
    "a bias by slot, rolling": (lambda: jattn.multi_head_attention(layer()[0], layer()[1][:, :3], bias=jnp.zeros((N, 3, 11)),
            cache=made(B, 8, K, spec=(None, "sequence"), value_dim=D, rolling=True)()),
        ValueError,
        r"bias of shape \[4, 3, 11\] is indexed by slot, .* pass a score_mod"),
    "keys that do not divide": (
        lambda: jattn.dot_product_attention(*[jnp.zeros((1, 6, 2, 4))] * 3, implementation=SplitKeys(MESH, "sequence")),
        ValueError,
        r"6 keys \(S\) cannot be divided over mesh axis 'sequence' \(4 devices\)"),
}  # fmt: skip


@pytest.mark.slow_except(*(name for name in BAD if name != "a bias by slot, rolling"))
@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sharded_is_named(name):
    make, kind, message = BAD[name]
    with pytest.raises(kind, match=message):
        make()


def test_explain_says_what_is_reduced():
    query, key = (jax.ShapeDtypeStruct((1, length, heads, 128), jnp.bfloat16) for length, heads in ((1, 32), (2**17, 8)))  # fmt: skip
    how = SplitKeys(mesh_of(8), "sequence", implementation="blockwise")
    assert jattn.explain(query, key, key, implementation=how).splitlines()[:3] == [
        "SplitKeys: keys over mesh axis 'sequence' (8 devices)",
        "forward, all-reduces of 128 B, the largest log-sum-exps, and 16.1 KiB, the outputs",  # 32 * (128 + 1) floats
        "blockwise: taken by name",
    ]
