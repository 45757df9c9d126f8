"""A ring of devices: the results of one device, no device with the whole sequence, and evenly divided work."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
from jattn import heads, masks
from jattn._core.arguments import make_call
from jattn.kernels.blockwise import Blockwise
from jattn.sharding import Ring, SplitKeys, Ulysses, from_zigzag, ring_blocks, to_zigzag
from jattn.testing import Case
from jattn.testing._check import compare, run, values_and_gradients
from jattn.testing._reference import inputs, reference
from tests.jattn.test_backward import check_against_dense
from tests.ring_cases import CASES, assert_close, check_statistics, expected, in_a_ring, largest_error, mesh_of, numbers

P = 4


def test_eight_devices():
    assert len(jax.devices()) == 8


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_one_device(name):
    # `python -m tools sharding` tests all gradients, layouts and numbers of devices, which takes a quarter of an hour
    how = Ring(mesh_of(P), "sequence", layout="zigzag" if list(CASES).index(name) % 2 else "contiguous")
    found, wanted = in_a_ring(name, how, gradients=False), expected(name, gradients=False)
    assert largest_error(found, wanted) <= 1e-5


CAPTURING = "function that captures a table"
WITH_GRADIENTS = [
    "one key head", "cross, causal, bottom-right by positions", "window far away: a ring with gaps", "nobody sees anything", "lengths, one of them 0",
    "lengths, and positions that are not the slots'", "bias", "sinks", "alibi, then a soft cap", "dropout", "logits of +-1e4",
]  # fmt: skip
ANY_RING = [  # case, number of devices, layout, what each hop runs
    *((name, P, "contiguous" if list(CASES).index(name) % 2 else "zigzag", None) for name in WITH_GRADIENTS),
    (CAPTURING, 1, "zigzag", None), (CAPTURING, 2, "contiguous", None), (CAPTURING, 8, "zigzag", None),
    ("causal window", 2, "zigzag", Blockwise((3, 3))), ("lengths, one of them 0", 2, "zigzag", Blockwise((3, 3))),  # blocks that divide nothing
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name, devices, layout, hops", ANY_RING)
def test_gradients_are_those_of_one_device(name, devices, layout, hops):
    row = numbers(name, devices, layout, hops)
    assert row["values"] <= 1e-5 and row["gradients"] <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["xla", "decode", "native", "blockwise"])
@pytest.mark.parametrize("queries", [8, 32, 64])
def test_gradients_in_hops_of_every_kernel(name, queries):
    """Those of a hop are of a part of a softmax, also where a device has so few queries that others compute them."""
    if name == "native":
        pytest.importorskip("jattn_native")
    case = Case({"is_causal": True}, lambda b, h, q, kv: kv <= q, shape=(2, queries, 64, 4, 2, 6, 5))
    how = Ring(mesh_of(4), "sequence", implementation=name)
    results = jax.jit(lambda x: values_and_gradients(case, lambda x: run(case, how, x), x))(inputs(case))
    outcome = compare(case, results, reference(case))
    assert outcome.result == "right", outcome.reason


@pytest.mark.slow
def test_the_comparison_is_not_a_dummy():
    results, _ = expected("causal")
    assert largest_error(results, expected("causal")[0]) == 0.0
    out, lse = (x.copy() for x in results)
    out[0, 3, 1, 2] += 1e-3
    assert largest_error((out, lse), results) > 1e-4
    assert largest_error((out, np.where(lse == lse.max(), np.nan, lse)), results) == np.inf
    assert largest_error(in_a_ring("plain", Ring(mesh_of(2), "sequence"))[0], results) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("how, one", [(Ring(mesh_of(P), "sequence"), "blockwise"), (SplitKeys(mesh_of(8), "sequence"), "xla")])  # fmt: skip
def test_bfloat16_is_as_good_as_on_one_device(how, one):
    """Also where the parts are merged in float32."""
    (exact, _), _ = expected("causal")
    case, arrays = CASES["causal"].of(jnp.bfloat16), inputs(CASES["causal"])
    here, there = (run(case, x, arrays)[0] for x in (one, how))
    assert there.dtype == jnp.bfloat16
    here, there = (largest_error(x.astype(jnp.float32), exact) for x in (here, there))
    assert there <= 1.5 * here <= 0.03


@pytest.mark.slow
def test_the_gradient_of_what_a_score_function_captures_does_not_show_the_rounding_of_the_output():
    check_against_dense(Ring(mesh_of(2), "sequence"), jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [AxisType.Auto, AxisType.Explicit])
def test_sequences_heads_and_length_at_once(kinds):
    """All three in one call, on both kinds of meshes; with explicit axes, batch and heads need not be named."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "heads", "sequence"), (kinds,) * 3)
    lies = NamedSharding(mesh, PartitionSpec("data", "sequence", "heads"))
    axes = {} if kinds == AxisType.Explicit else {"batch_axis": "data", "head_axis": "heads"}
    case = CASES[CAPTURING]
    given = inputs(case)
    placed = {name: jax.device_put(x, lies) if x.ndim == 4 else jnp.asarray(x) for name, x in given.items()}
    how = Ring(mesh, "sequence", **axes)
    compiled = jax.jit(lambda x: values_and_gradients(case, lambda x: run(case, how, x), x)).lower(placed).compile()
    results, gradients = compiled(placed)
    assert_close((results, gradients), CAPTURING)
    assert results[0].sharding.is_equivalent_to(lies, 4) and gradients["key"].sharding.is_equivalent_to(lies, 4)
    text = compiled.as_text()
    assert "collective-permute" in text and "all-gather" not in text


@pytest.mark.slow
def test_key_heads_that_all_devices_have():
    """Two key heads on four devices along the head axis: each has both and uses one, and their gradients are summed."""
    mesh = jax.make_mesh((4, 2), ("heads", "sequence"), (AxisType.Auto,) * 2)
    case = CASES[CAPTURING]
    how = Ring(mesh, "sequence", head_axis="heads")
    assert_close(jax.jit(lambda x: values_and_gradients(case, lambda x: run(case, how, x), x))(inputs(case)), CAPTURING)


def lowered(devices, layout, length, N=4, hops=None, **options):
    mesh = mesh_of(devices)
    how = Ring(mesh, "sequence", layout=layout, implementation=hops)
    lies = NamedSharding(mesh, PartitionSpec(None, "sequence"))
    arrays = [jax.ShapeDtypeStruct((1, length, N, 16), jnp.float32, sharding=lies)] * 3

    def loss(*arrays):
        return jnp.sum(jattn.dot_product_attention(*arrays, implementation=how, **options) ** 2)

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2))).lower(*arrays)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_no_device_ever_holds_the_sequence(layout):
    """No array in the program is as long as the sequence, and twice as many devices halve the memory of each."""
    length, small = 8192, Blockwise((64, 64))  # the block size does not shrink with devices, so it is small here
    compiled = {devices: lowered(devices, layout, length, hops=small, is_causal=True).compile() for devices in (4, 8)}
    text = compiled[8].as_text()
    assert "collective-permute" in text and "all-gather" not in text
    assert str(length // 8) in text and f"{length}," not in text and f",{length}]" not in text
    four, eight = (one.memory_analysis().temp_size_in_bytes for one in compiled.values())
    assert four / eight > 1.8


def hops(text):
    return text.count("collective_permute")


@pytest.mark.slow
def test_keys_travel_as_far_as_somebody_sees_them():
    """A window that reaches only the next device needs one hop of keys and values; in zigzag, one in each direction."""
    window = lowered(8, "contiguous", 64, local_window_size=(5, 0), is_causal=True).as_text()
    nothing = lowered(8, "contiguous", 64, mask=masks.Segments(np.arange(64) // 8)).as_text()
    assert hops(nothing) == 0 and 0 < hops(window)
    ring = Ring(mesh_of(8), "sequence")
    args = make_call(*(np.zeros((1, 64, 1, 4), np.float32),) * 3, is_causal=True, local_window_size=(4, 0))
    assert ring.plan(args).steps == (0, 1)
    assert Ring(mesh_of(8), "sequence", layout="zigzag").plan(args).steps == (0, 1, 7)
    traced = jax.eval_shape(
        lambda q: ring.plan(make_call(q, q, q, mask=masks.SlidingWindow(q.astype(int).max()))) and q,
        jnp.zeros((1, 64, 1, 4)),
    )
    assert traced.shape == (1, 64, 1, 4)


@pytest.mark.parametrize("devices", [2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_zigzag_gives_all_devices_the_same_causal_work(devices):
    zigzag, contiguous = (ring_blocks(masks.Causal(), 32768, 32768, devices=devices, layout=layout) for layout in ("zigzag", "contiguous"))  # fmt: skip
    assert zigzag.sum() <= contiguous.sum()
    assert zigzag.sum(1).max() <= 1.1 * zigzag.sum(1).mean() and zigzag.max(0).sum() <= 1.1 * zigzag.sum(1).mean()
    assert contiguous.sum(1).max() > 1.4 * contiguous.sum(1).mean()


@pytest.mark.slow
def test_blocks_are_counted_as_they_are_computed():
    """The count equals the number of pairs whose scores a device computes."""
    computed = []

    def watched(score, b, h, q, kv):
        jax.debug.callback(lambda q, kv: computed.append(int(np.ravel(q)[0])), q, kv)
        return score

    q, ring = jnp.zeros((1, 64, 1, 4)), Ring(mesh_of(2), "sequence", layout="zigzag")
    jattn.dot_product_attention(q, q, q, is_causal=True, score_mod=watched, implementation=ring)
    jax.effects_barrier()
    first = to_zigzag(jnp.arange(64), 2, axis=0)[:32]  # the tokens of the first device
    of_devices = [np.isin(computed, first).sum(), (~np.isin(computed, first)).sum()]
    blocks = ring_blocks(masks.Causal(), 64, 64, devices=2, layout="zigzag").sum(1)
    np.testing.assert_array_equal(of_devices, blocks * 16 * 16)


def test_zigzag_order():
    assert to_zigzag(jnp.arange(8), 2, axis=0).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    x = jnp.arange(2 * 12 * 3).reshape(2, 12, 3)
    np.testing.assert_array_equal(from_zigzag(to_zigzag(x, 3), 3), x)
    with pytest.raises(ValueError, match=r"a length of 10 .* 4 devices in a zigzag layout: .* multiple of 8"):
        to_zigzag(jnp.arange(10), 4, axis=0)


@pytest.mark.slow
@pytest.mark.parametrize("layout, kinds", [("contiguous", AxisType.Auto), ("zigzag", AxisType.Auto), ("zigzag", AxisType.Explicit)])  # fmt: skip
def test_statistics_are_those_of_one_device(layout, kinds):
    how = Ring(jax.make_mesh((2, 2), ("heads", "sequence"), (kinds,) * 2), "sequence", head_axis="heads", layout=layout)
    check_statistics(how, PartitionSpec(None, "sequence", "heads"), 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [AxisType.Auto, AxisType.Explicit])
def test_statistics_gather_no_sums(kinds):
    """Not one number a query; where every offset has a mean, one bool, as each device holds the sums of all offsets."""
    mesh = jax.make_mesh((2, 2), ("heads", "sequence"), (kinds,) * 2)
    lies = NamedSharding(mesh, PartitionSpec(None, "sequence", "heads"))
    x = jax.ShapeDtypeStruct((1, 32, 4, 8), jnp.float32, sharding=lies)
    how = Ring(mesh, "sequence", head_axis="heads")

    def gathered(names):
        found = jax.jit(lambda q, k: heads.statistics(q, k, names=names, implementation=how, is_causal=True))
        return re.findall(r"= (\w+)\[[\d,]*\]\S* all-gather", found.lower(x, x).compile().as_text())

    assert gathered(["entropy", "max_logit", "received", "previous_token"]) == []
    assert set(gathered(["offset_profile"])) <= {"pred"}


@pytest.mark.slow
@pytest.mark.bits
def test_a_layer_looks_at_itself_in_a_ring():
    """Gates, statistics and heads of ``multi_head_attention``; the output is bit-identical."""
    params = jattn.init_multi_head(jax.random.key(0), 16, 4, num_kv_heads=2)
    x = jax.random.normal(jax.random.key(1), (2, 16, 16))
    options = {"is_causal": True, "position": jattn.positions.Rotary(), "head_gate": jnp.array([1.0, 0.5, 0.0, 1.0])}
    how = Ring(mesh_of(2), "sequence")
    wanted, statistics = jattn.multi_head_attention(params, x, return_statistics=["entropy"], **options)
    plain = jax.jit(lambda x: jattn.multi_head_attention(params, x, implementation=how, **options))(x)
    y, found = jax.jit(lambda x: jattn.multi_head_attention(params, x, implementation=how, return_statistics=["entropy"], **options))(x)  # fmt: skip
    np.testing.assert_allclose(y, wanted, atol=1e-6)
    np.testing.assert_array_equal(y, plain)
    np.testing.assert_allclose(found["entropy"], statistics["entropy"], atol=1e-6)


@pytest.mark.slow
def test_what_nobody_sees_may_be_nan():
    given = inputs(CASES["plain"])
    clean, dirty = ({name: x.copy() for name, x in given.items()} for _ in range(2))
    for filled, value in ((clean, 0.0), (dirty, np.nan)):
        filled["key"][:, 20:], filled["value"][:, 20:] = value, value
    case = Case({"key_value_seq_lengths": np.array([20, 13])})
    compiled = jax.jit(lambda x: values_and_gradients(case, lambda x: run(case, Ring(mesh_of(2), "sequence"), x), x))
    jax.tree.map(np.testing.assert_array_equal, compiled(clean), compiled(dirty))


@pytest.mark.parametrize("kind", [Ring, Ulysses])
def test_no_queries_no_keys(kind):
    how = kind(mesh_of(2), "sequence")
    full, none = jnp.ones((2, 4, 2, 3)), jnp.ones((2, 0, 2, 3))
    assert jattn.dot_product_attention(none, full, full, implementation=how).shape == (2, 0, 2, 3)
    out, lse = jattn.dot_product_attention(full, none, none, implementation=how, return_residual=True)
    assert not out.any() and (lse == -jnp.inf).all()


@pytest.mark.slow
def test_a_query_that_sees_nothing_has_no_gradient():
    """Even if the derivative of the loss at its output, 0, is infinite."""
    case = Case({"query_seq_lengths": np.array([20, 3])})
    given = {name: jnp.asarray(x) for name, x in inputs(CASES["plain"]).items()}
    how = Ring(mesh_of(2), "sequence")
    found = jax.jit(jax.grad(lambda given: jnp.sum(jnp.sqrt(jnp.abs(run(case, how, given)[0])))))(given)
    assert all(np.isfinite(x).all() and np.any(x != 0) for x in found.values())
    assert not found["query"][0, 20:].any() and not found["query"][1, 3:].any()
