"""What a ring sends and when, what each hop runs, and its derivatives beyond the first reverse one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
from jattn import masks, score_mods
from jattn._core.arguments import make_call
from jattn._core.attention import NAMES
from jattn.kernels.splash import Splash
from jattn.sharding import Ring, from_zigzag, ring_attention, to_zigzag
from jattn.sharding._pairs import EVERYTHING, NOTHING, SOMETHING, Ahead, seen_by_distance
from jattn.testing._check import run
from jattn.testing._reference import inputs
from tests.ring_cases import CASES, largest_error, mesh_of


def args_of(length, **options):
    return make_call(*(np.zeros((1, length, 1, 4), np.float32),) * 3, **options)


@pytest.mark.parametrize("options", [
    {"is_causal": True},
    {"local_window_size": (5, 0)},
    {"local_window_size": (9, 3)},
    {"mask": masks.Causal() & ~masks.SlidingWindow(2, 2)},
    {"mask": masks.Causal() | masks.SlidingWindow(0, 4)},
    {},
])  # fmt: skip
def test_what_a_chunk_sees_by_distance_is_what_its_pairs_are(options):
    length, chunks = 32, 8
    args, i = args_of(length, **options), np.arange(length)
    pairs = np.ones((length, length), bool)
    for mask in args.masks:
        pairs &= np.asarray(mask(0, 0, i[:, None], i))
    pairs = pairs.reshape(chunks, length // chunks, chunks, length // chunks).transpose(0, 2, 1, 3)
    found = seen_by_distance(args, chunks)
    assert found is not None
    for row in range(chunks):
        for column in range(chunks):
            block, seen = pairs[row, column], found[row - column + chunks - 1]
            assert block.all() if seen == EVERYTHING else seen == SOMETHING or not block.any()
            # the masks of this call, seen from the slots of the two chunks
            slots, by = np.arange(length // chunks), (row - column) * (length // chunks)
            shown = np.ones_like(block)
            for mask in args.masks:
                shown &= np.asarray(Ahead(mask, by)(0, 0, slots[:, None], slots))
            np.testing.assert_array_equal(shown, block)
    if "is_causal" in options:
        assert found == (NOTHING,) * 7 + (SOMETHING,) + (EVERYTHING,) * 7


@pytest.mark.parametrize("options", [
    {"mask": masks.Prefix(3)},
    {"mask": masks.Causal() & masks.Segments(np.arange(16))},
    {"mask": lambda b, h, q, kv: q >= kv},
    {"mask": np.ones((16, 16), bool)},
    {"is_causal": True, "key_value_seq_lengths": np.array([9])},
    {"is_causal": True, "query_positions": np.arange(16)},
    {"is_causal": True, "score_mod": score_mods.Alibi(np.ones(1, np.float32))},
    {"is_causal": True, "bias": np.zeros((16, 16), np.float32)},
    {"is_causal": True, "dropout_rate": 0.5, "dropout_rng": jax.random.key(0)},
])  # fmt: skip
def test_what_depends_on_more_than_the_distance_is_left_to_positions(options):
    assert seen_by_distance(args_of(16, **options), 4) is None


def lowered(devices, layout="contiguous", gradient=True, length=64, dtype=jnp.float32, policy=None, **options):
    """The program of a ring, and what ``shape`` each ``collective_permute`` in it has."""
    mesh = mesh_of(devices)
    how = Ring(mesh, "sequence", layout=layout, gradient_dtype=options.pop("gradient_dtype", None))
    lies = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    arrays = [jax.ShapeDtypeStruct((1, length, 1, 16), dtype, sharding=lies)] * 3

    def attention(*arrays):
        return jnp.sin(jattn.dot_product_attention(*arrays, implementation=how, **options))

    def loss(*arrays):
        fn = attention if policy is None else jax.checkpoint(attention, policy=policy)
        return jnp.sum(fn(*arrays).astype(jnp.float32))

    fn = jax.value_and_grad(loss, (0, 1, 2)) if gradient else attention
    text = jax.jit(fn).lower(*arrays).as_text()
    return re.findall(r'"?stablehlo.collective_permute"?.*?-> tensor<([\dx]+x\w+)>', text)


@pytest.mark.slow
def test_no_hop_is_wasted():
    """Two devices: keys and values travel once in each pass, and so do the gradients, home."""
    assert len(lowered(2, gradient=False, is_causal=True)) == 2
    assert len(lowered(2, is_causal=True)) == 2 + 2 + 2
    assert lowered(1, is_causal=True) == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_a_window_stops_travelling(layout):
    """Of eight devices, each sees its neighbours: a hop there, and one home; with zigzag, neighbours on both sides."""
    window = {"local_window_size": (3, 0), "is_causal": True}
    forward, both = lowered(8, layout, False, **window), lowered(8, layout, **window)
    hops = 1 if layout == "contiguous" else 2
    assert len(forward) == 2 * hops and len(both) == 2 * (hops + hops + hops)


@pytest.mark.slow
def test_numbers_travel_in_the_dtype_of_the_keys_and_gradients_in_float32_unless_asked():
    sent = lowered(2, dtype=jnp.bfloat16, is_causal=True)
    assert [one.rpartition("x")[2] for one in sorted(sent)] == ["bf16"] * 4 + ["f32"] * 2
    sent = lowered(2, dtype=jnp.bfloat16, is_causal=True, gradient_dtype=jnp.bfloat16)
    assert {one.rpartition("x")[2] for one in sent} == {"bf16"}


@pytest.mark.slow
def test_gradients_that_travel_in_bfloat16_are_rounded_once_a_hop():
    """On four devices, up to four roundings to 2^-9 of what has been added so far."""
    given = {name: jnp.asarray(x) for name, x in inputs(CASES["causal"]).items()}

    def gradients(dtype):
        how = Ring(mesh_of(4), "sequence", gradient_dtype=dtype)
        return jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(run(CASES["causal"], how, x)[0]))))(given)

    exact, rounded = gradients(None), gradients(jnp.bfloat16)
    np.testing.assert_array_equal(exact["query"], rounded["query"])
    for name in ("key", "value"):
        assert 1e-4 < largest_error(rounded[name], exact[name]) < 4 * 2**-9


@pytest.mark.slow
def test_a_policy_that_keeps_what_attention_returns_rotates_once_less():
    keep = jax.checkpoint_policies.save_only_these_names(*NAMES)
    everything, nothing = (lowered(2, policy=policy) for policy in (keep, jax.checkpoint_policies.nothing_saveable))
    assert (len(everything), len(nothing)) == (6, 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "bias", "alibi, then a soft cap", "lengths, one of them 0"])
def test_tangents_are_those_of_one_device(name):
    case, given = CASES[name], inputs(CASES[name])
    rng = np.random.default_rng(5)
    by = {key: rng.normal(size=np.shape(x)).astype(np.float32) for key, x in given.items()}
    found, wanted = (
        jax.jit(lambda x, by, how=how: jax.jvp(lambda x: run(case, how, x), (x,), (by,)))(given, by)
        for how in (Ring(mesh_of(4), "sequence"), "xla")
    )
    finite = lambda results: jax.tree.map(lambda x: np.where(np.isfinite(x), x, 0.0), results)
    assert largest_error(found[0], wanted[0]) <= 1e-5 and largest_error(finite(found[1]), finite(wanted[1])) <= 1e-4


@pytest.mark.slow
def test_second_derivatives_are_those_of_one_device():
    """Forward over reverse, as in a Hessian's product with a vector, and reverse over forward."""
    case, given = CASES["causal"], {name: jnp.asarray(x) for name, x in inputs(CASES["causal"]).items()}

    def second(how):
        loss = lambda x: jnp.sum(jnp.sin(run(case, how, x)[0]))
        ahead = jax.jvp(jax.grad(loss), (given,), (given,))[1]
        return ahead, jax.grad(lambda x: jax.jvp(loss, (x,), (given,))[1])(given)

    (found, back), (wanted, _) = (jax.jit(lambda how=how: second(how))() for how in (Ring(mesh_of(2), "sequence"), "xla"))  # fmt: skip
    assert largest_error(found, wanted) <= 1e-4 and largest_error(back, wanted) <= 1e-4


LONG = {"length": 512, "devices": 2, "head_dim": 128}


def long_call(how, layout, gradient=True, **options):
    """Values and gradients of a call of 512 tokens, four query and two key heads."""
    rng, P = np.random.default_rng(2), LONG["devices"]
    shapes = [(1, LONG["length"], n, LONG["head_dim"]) for n in (4, 2, 2)]
    given = [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]
    turn, back = (to_zigzag, from_zigzag) if layout == "zigzag" else ((lambda x, _: x),) * 2

    def loss(*x):
        x = [turn(one, P) for one in x]
        out, lse = jattn.dot_product_attention(*x, implementation=how, return_residual=True, **options)
        out, lse = back(out, P), back(lse, P)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), jnp.cos(lse), 0.0)), (out, lse)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, options",
    [("zigzag", {"is_causal": True}), ("contiguous", {"local_window_size": (70, 10)}), ("contiguous", {})],
)
def test_each_hop_runs_a_kernel_of_static_masks(layout, options):
    """JAX's splash kernels, interpreted: they take no positions, so the device picks the call for the chunks it has."""
    how = Ring(mesh_of(2), "sequence", layout=layout, implementation=Splash((128, 128), interpret=True))
    found, wanted = long_call(how, layout, **options), long_call("xla", "contiguous", **options)
    assert largest_error(found[0][1], wanted[0][1]) <= 1e-5 and largest_error(found[1], wanted[1]) <= 1e-4


@pytest.mark.slow
def test_each_hop_runs_the_kernel_of_its_platform():
    """On a CPU with jattn-native its kernels, which take positions; and none but blockwise if asked."""
    pytest.importorskip("jattn_native", reason="jattn-native is not installed")
    options = {"is_causal": True, "score_mod": score_mods.Alibi(np.float32([0.5, 0.25, 0.1, 0.05]))}
    how = {name: Ring(mesh_of(2), "sequence", layout="zigzag", implementation=name) for name in (None, "blockwise")}
    found, plain = (long_call(one, "zigzag", **options) for one in how.values())
    wanted = long_call("xla", "contiguous", **options)
    for results in (found, plain):
        assert largest_error(results[0][1], wanted[0][1]) <= 1e-5 and largest_error(results[1], wanted[1]) <= 1e-4
    arrays = [jnp.ones((1, LONG["length"], n, 128)) for n in (4, 2, 2)]
    texts = [
        jax.jit(lambda *x, one=one: jattn.dot_product_attention(*x, implementation=one, **options)).lower(*arrays).as_text()
        for one in how.values()
    ]  # fmt: skip
    assert ["jattn_forward" in text for text in texts] == [True, False]


@pytest.mark.slow
def test_a_kernel_that_cannot_do_the_call_says_so():
    how = Ring(mesh_of(2), "sequence", implementation=Splash(interpret=True))
    x = jnp.ones((1, 256, 2, 128))
    with pytest.raises(jattn.Unsupported, match=r"a ring cannot run 'splash' in its hops: it takes no positions"):
        jattn.dot_product_attention(x, x, x, mask=masks.Prefix(3), implementation=how)


@pytest.mark.parametrize("given, error, match", [
    ({"implementation": 3}, TypeError, "implementation"),
    ({"implementation": "flash"}, ValueError, "'flash'"),
    ({"gradient_dtype": jnp.int8}, TypeError, "gradient_dtype must be floating, such as jnp.bfloat16, got int8"),
])  # fmt: skip
def test_errors(given, error, match):
    with pytest.raises(error, match=match):
        Ring(mesh_of(2), "sequence", **given)
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(error, match=match):
        ring_attention(x, x, x, mesh=mesh_of(2), axis_name="sequence", **given)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_documents_whose_ids_are_divided_over_the_devices_and_differ_by_sequence(layout):
    """Ids as arguments, divided like the tokens, with sequences over another axis: each device looks up its own."""
    mesh = jax.make_mesh((2, 4), ("data", "sequence"), (AxisType.Auto,) * 2)
    rng = np.random.default_rng(7)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 64, n, 8)), jnp.float32) for n in (4, 2, 2))
    ids = jnp.asarray(np.sort(rng.integers(0, 6, (2, 64)), axis=1))  # documents of any length, some over two shards
    lies = NamedSharding(mesh, PartitionSpec("data", "sequence"))
    how = Ring(mesh, "sequence", batch_axis="data", layout=layout)
    turn, back = (to_zigzag, from_zigzag) if layout == "zigzag" else ((lambda x, _: x),) * 2

    def packed(q, k, v, ids, how=how):
        mask = masks.Segments(ids) & masks.Causal()
        return jattn.dot_product_attention(q, k, v, mask=mask, implementation=how)

    found = jax.jit(packed)(*(jax.device_put(turn(x, 4), lies) for x in (q, k, v)), jax.device_put(ids, lies))
    np.testing.assert_allclose(back(found, 4), packed(q, k, v, ids, "xla"), atol=2e-6)
    if layout == "contiguous":  # zigzag reorders the ids
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lies) for x in (q, k, v, ids)]
        text = jax.jit(packed).lower(*types).compile().as_text()
        assert "all-gather" not in text and "s32[1,16]" in text and ",64]" not in text


@pytest.mark.slow
def test_a_table_of_pairs_is_divided_by_rows():
    """Each device holds a quarter of a ``Dense`` mask, as of a mask array."""
    table = np.random.default_rng(8).random((64, 64)) < 0.4
    x = jnp.asarray(np.random.default_rng(9).normal(size=(3, 1, 64, 2, 8)), jnp.float32)
    how = Ring(mesh_of(4), "sequence", layout="zigzag")

    def attention(x, table, how=how):
        x = x if how == "xla" else to_zigzag(x, 4, axis=2)
        out = jattn.dot_product_attention(*x, mask=masks.Dense(table) & masks.SlidingWindow(30, 9), implementation=how)
        return out if how == "xla" else from_zigzag(out, 4)

    compiled = jax.jit(attention).lower(x, jnp.asarray(table)).compile()
    np.testing.assert_allclose(compiled(x, jnp.asarray(table)), attention(x, jnp.asarray(table), "xla"), atol=2e-6)
    assert "pred[1,1,16,64]" in compiled.as_text()
