"""Devices that exchange the sequence for heads: the results of one device, by all-to-alls alone; what ``explain`` says."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
import jattn.nnx
from jattn.sharding import HeadParallel, Ring, Ulysses, from_zigzag, to_zigzag, ulysses_attention
from tests.ring_cases import AGAINST, CASES, assert_close, check_statistics, expected, in_a_ring, largest_error, mesh_of

COLLECTIVES = ("all-to-all", "collective-permute", "all-gather", "all-reduce", "reduce-scatter")


def mesh_over(kind=AxisType.Auto, **axes):
    sizes = tuple(axes.values())
    return jax.make_mesh(sizes, tuple(axes), (kind,) * len(axes), devices=jax.devices()[: int(np.prod(sizes))])


def in_nodes(nodes, chips, layout):
    return Ulysses(mesh_over(nodes=nodes, chips=chips), "chips", ring_axis="nodes", layout=layout)


WAYS = {
    "4 devices": lambda: Ulysses(mesh_of(4), "sequence"),
    "2 nodes of 2, contiguous": lambda: in_nodes(2, 2, "contiguous"),
    "2 nodes of 4, zigzag": lambda: in_nodes(2, 4, "zigzag"),
}
DIVISIBLE = [name for name, case in CASES.items() if case.shape[3] % 4 == 0]


def collectives(text):
    """How many of each kind a compiled program has."""
    return {kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in COLLECTIVES}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVISIBLE)
def test_values_are_those_of_one_device(name):
    how = list(WAYS.values())[list(CASES).index(name) % 3]()
    assert largest_error(in_a_ring(name, how, gradients=False), expected(name, gradients=False)) <= 1e-5


def check_with_gradients(name, how):
    if name in AGAINST:  # a case whose rounding depends on the formula: the same one on both sides
        how = dataclasses.replace(how, implementation=AGAINST[name])
    assert_close(in_a_ring(name, how), name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["cross, causal, bottom-right by positions", "positions that differ by sequence, keys backwards", "table",
        "nobody sees anything", "mask array", "lengths, one of them 0", "bias", "sinks", "alibi, then a soft cap",
        "dropout", "logits of +-1e4"],
)  # fmt: skip
def test_gradients_are_those_of_one_device(name):
    check_with_gradients(name, list(WAYS.values())[(list(CASES).index(name) + 1) % 3]())


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [lambda: Ulysses(mesh_of(1), "sequence"), lambda: Ulysses(mesh_of(2), "sequence", implementation="xla"),
            lambda: in_nodes(4, 2, "contiguous"), lambda: in_nodes(2, 4, "zigzag")]
)  # fmt: skip
def test_with_any_number_of_devices(how):
    check_with_gradients("function that captures a table", how())


def of_heads(N, K, T=16, H=4):
    rng = np.random.default_rng(2)
    return [jnp.asarray(rng.normal(size=(2, T, n, H)), jnp.float32) for n in (N, K, K)]


def loss(how):
    """The gradients of a sum of everything, as a compiled function of query, key and value."""

    def of(query, key, value):
        mask = lambda b, h, q, kv: (q + kv + b + h) % 3 > 0
        out = jattn.dot_product_attention(query, key, value, mask=mask, is_causal=True, implementation=how)
        return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(of, (0, 1, 2), has_aux=True))


def sent_by_all_to_alls(text, devices):
    """The bytes that a device sends by the all-to-alls of a compiled program in float32."""
    results = re.findall(r"= (.*?) all-to-all\(", text)
    pieces = [piece for result in results for piece in re.findall(r"f32\[([\d,]+)\]", result)]
    return sum(4 * np.prod([int(size) for size in piece.split(",")]) for piece in pieces) * (devices - 1) / devices


@pytest.mark.slow
@pytest.mark.parametrize("N, K, devices", [(8, 8, 8), (8, 4, 8), (8, 1, 8), (12, 6, 4), (6, 2, 2)])
def test_key_heads_go_where_they_are_used(N, K, devices):
    """What a device sends is what ``explain`` says; of one key head, each device receives what it does not have."""
    given, mesh = of_heads(N, K), mesh_of(devices)
    how, lies = Ulysses(mesh, "sequence"), NamedSharding(mesh, PartitionSpec(None, "sequence"))
    both, there = loss(how), [jax.device_put(x, lies) for x in given]
    found, wanted = both(*there), loss("xla")(*given)
    assert largest_error(found, wanted) <= 1e-5
    text = both.lower(*there).compile().as_text()
    assert {kind for kind, count in collectives(text).items() if count} == {"all-to-all", "all-reduce"}  # of the sum
    forward = jax.jit(lambda *x: jattn.dot_product_attention(*x, implementation=how)).lower(*there).compile().as_text()
    assert "all-gather" not in forward and "all-reduce" not in forward
    away = 4 / devices * (1 - 1 / devices)
    copied = K if K % devices == 0 else np.lcm(K, devices)
    sent = 2 * 16 * 4 * (2 * N + 2 * copied) * away  # B T H, of queries and outputs, keys and values
    assert sent_by_all_to_alls(forward, devices) == sent
    said = jattn.explain(*given, implementation=how).splitlines()
    numbers = [float(number) * 1024 ** (unit == "KiB") for number, unit in re.findall(r"([\d.]+) (B|KiB) of", said[1])]
    assert sum(numbers) == pytest.approx(sent, abs=3 * 0.05 * 1024)  # as text
    assert (f"(each key head {copied // K} times)" in said[1]) == (copied > K)
    assert said[2] == "backward, as much of their gradients"
    assert sent_by_all_to_alls(text, devices) == 2 * sent


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("N, K, axes", [(8, 4, (2, 2, 2)), (16, 2, (1, 4, 2))])
def test_sequences_heads_and_length_at_once(kind, N, K, axes):
    """With two key heads on four devices along the axis of heads, each device there has both and uses one."""
    mesh = mesh_over(kind, **dict(zip(("data", "heads", "sequence"), axes, strict=True)))
    given, by_head = of_heads(N, K), "heads" if K % axes[1] == 0 else None
    named = {} if kind == AxisType.Explicit else {"batch_axis": "data", "head_axis": "heads"}
    both = loss(Ulysses(mesh, "sequence", **named))
    lies = [NamedSharding(mesh, PartitionSpec("data", "sequence", axis)) for axis in ("heads", by_head, by_head)]
    there = [jax.device_put(x, one) for x, one in zip(given, lies, strict=True)]
    (_, out), gradients = both(*there)
    assert largest_error(((_, out), gradients), loss("xla")(*given)) <= 1e-5
    assert out.sharding.is_equivalent_to(lies[0], 4) and gradients[1].sharding.is_equivalent_to(lies[1], 4)
    assert "all-gather" not in both.lower(*there).compile().as_text()


@pytest.mark.slow
def test_a_ring_of_nodes_gathers_nothing():
    how = in_nodes(2, 4, "zigzag")
    lies = NamedSharding(how.mesh, PartitionSpec(None, ("nodes", "chips")))
    there = [jax.device_put(x, lies) for x in of_heads(8, 4)]
    found = collectives(loss(how).lower(*there).compile().as_text())
    assert found["all-to-all"] and found["collective-permute"] and not found["all-gather"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("nodes, layout", [(1, "contiguous"), (2, "zigzag")])
def test_statistics_are_those_of_one_device(kind, nodes, layout):
    mesh = mesh_over(kind, nodes=nodes, chips=2)
    how = Ulysses(mesh, "chips", ring_axis="nodes" if nodes > 1 else None, layout=layout)
    check_statistics(how, PartitionSpec(None, ("nodes", "chips")), nodes, 1)


@pytest.mark.slow
def test_a_layer_in_zigzag_order_looks_at_itself():
    """Rotary positions are those of the tokens, and statistics leave the output as it is."""
    how, x = in_nodes(2, 2, "zigzag"), jax.random.normal(jax.random.key(0), (2, 8, 16))
    make = lambda **options: jattn.nnx.MultiHeadAttention(4, 16, decode=False, position=jattn.positions.Rotary(), rngs=nnx.Rngs(0), **options)  # fmt: skip
    look = nnx.capture(lambda layer, x: layer(x, is_causal=True, sow_statistics=["entropy"]), nnx.Intermediate)
    (plain, seen), (turned, seen_there) = look(make(), x), look(make(implementation=how), to_zigzag(x, 2))
    np.testing.assert_allclose(from_zigzag(turned, 2), plain, atol=1e-5)
    entropy, there = (jax.tree.leaves(one)[0] for one in (seen, seen_there))
    np.testing.assert_allclose(there, entropy, atol=1e-5)
    assert (make(implementation=how)(to_zigzag(x, 2), is_causal=True) == turned).all()


MESH = mesh_over(nodes=2, chips=4)
BAD = {
    "query heads": (lambda: ulysses_attention(*of_heads(6, 6), mesh=MESH, axis_name="chips"),
        r"6 query heads \(N\) cannot be divided over mesh axis 'chips' \(4 devices\): they must be a multiple of 4"),
    "and those that are divided": (lambda: ulysses_attention(*of_heads(4, 4), mesh=MESH, axis_name="chips", head_axis="nodes"),
        r"4 query heads \(N\) cannot be divided over mesh axes 'nodes' \(2 devices\) and 'chips' \(4 devices\)"),
    "queries": (lambda: ulysses_attention(*of_heads(4, 4, T=6), mesh=MESH, axis_name="chips"),
        r"6 queries \(T\) cannot be divided over mesh axis 'chips' \(4 devices\): they must be a multiple of 4"),
    "queries of all nodes": (lambda: ulysses_attention(*of_heads(4, 4, T=12), mesh=MESH, axis_name="chips", ring_axis="nodes"),
        r"12 queries \(T\) .* mesh axes 'nodes' \(2 devices\) and 'chips' \(4 devices\): .* a multiple of 8"),
    "chunks": (lambda: ulysses_attention(*of_heads(4, 4, T=12), mesh=MESH, axis_name="nodes", ring_axis="chips", layout="zigzag"),
        r"12 queries \(T\) .* multiple of 8"),
    "no such axis": (lambda: Ulysses(MESH, "chip"), r"axis_name='chip': the mesh has no axis 'chip'"),
    "no axis": (lambda: Ulysses(MESH, ()), r"axis_name must name an axis"),
    "no such ring": (lambda: Ulysses(MESH, "chips", ring_axis="node"), r"ring_axis='node': the mesh has no axis"),
    "two rings": (lambda: Ulysses(mesh_over(x=1, y=1, z=1), "x", ring_axis=("y", "z")), "ring_axis"),
    "one axis twice": (lambda: Ulysses(MESH, "chips", ring_axis="chips"), "axis_name='chips': .* 'chips' is given twice"),
    "layout": (lambda: Ulysses(MESH, "chips", ring_axis="nodes", layout="zag"), "layout must be one of .* 'zag'"),
    "layout of no ring": (lambda: Ulysses(MESH, "chips", layout="zigzag"), "layout='zigzag' .* pass ring_axis="),
    "what a ring runs": (lambda: Ulysses(MESH, "chips", ring_axis="nodes", implementation="xla"), "implementation='xla'.*ring_axis='nodes'"),
    "what a device runs": (lambda: ulysses_attention(*of_heads(4, 4), mesh=MESH, axis_name="chips", implementation="cudnn"),
        "cannot do this: it takes float16 and bfloat16"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_odd_input_is_named(name):
    run, message = BAD[name]
    with pytest.raises((ValueError, TypeError, jattn.Unsupported), match=message):
        run()


def said(how, N=32, K=8, T=2**14, kind="tpu", **options):
    query, key = (jax.ShapeDtypeStruct((1, T, n, 128), jnp.bfloat16) for n in (N, K))
    return jattn.explain(query, key, key, is_causal=True, implementation=how, platform=kind, **options).splitlines()


def test_explain_says_what_a_ring_moves():
    mesh = mesh_of(8)
    assert said(Ring(mesh, "sequence", layout="zigzag")) == [
        "Ring: length over mesh axis 'sequence' (8 devices), zigzag; each hop: the platform's kernel, or blockwise",
        "forward, a device sends 8.0 MiB of keys and values in each of 7 hops",  # 2 * 8 * 2048 * 128 * 2 bytes
        "backward, the same again, and 16.0 MiB of their gradients in each of 7 hops",
    ]
    _, forward, backward = said(Ring(mesh, "sequence"), local_window_size=(2000, 0))
    assert forward == "forward, a device sends 8.0 MiB of keys and values in 1 hop, of 7 without this mask"
    assert backward.endswith("in 1 hop")
    packed = jattn.masks.Segments(np.arange(2**14) // 2048)
    assert said(Ring(mesh, "sequence"), mask=packed)[1] == "moves nothing: no device needs the keys of another"
    both = mesh_over(data=2, heads=2, sequence=2)
    assert "32.0 MiB" in jattn.explain(
        *(jax.ShapeDtypeStruct((2, 2**14, n, 128), jnp.float32) for n in (32, 8, 8)),
        implementation=Ring(both, "sequence", "data", "heads"),
    )


def test_explain_says_what_heads_move():
    by_head = said(HeadParallel(mesh_of(8), "sequence"))
    assert by_head[0] == "HeadParallel: heads over mesh axis 'sequence' (8 devices); moves nothing"
    assert by_head[1] == "splash: taken on TPU"
    assert "backward sums the gradients of a key head" in said(HeadParallel(mesh_of(8), "sequence"), K=2)[0]
    swapped = said(Ulysses(mesh_of(8), "sequence"))
    assert swapped[:3] == [
        "Ulysses: length over mesh axis 'sequence' (8 devices); all-to-alls",
        "forward, a device sends 14.0 MiB of queries, 7.0 MiB of keys and values and 14.0 MiB of outputs",
        "backward, as much of their gradients",
    ]
    assert swapped[3:] == by_head
    named = said(Ulysses(mesh_of(8), "sequence", implementation="xla"))
    assert "xla: taken by name" in named
    with_ring = said(in_nodes(2, 4, "zigzag"))
    assert with_ring[0] == "Ulysses: length over mesh axes 'nodes' (2 devices) and 'chips' (4 devices); all-to-alls"
    assert with_ring[3:5] == [
        "Ring: heads over mesh axis 'chips' (4 devices), length over mesh axis 'nodes' (2 devices), zigzag; "
        "each hop: the platform's kernel, or blockwise",
        "forward, a device sends 8.0 MiB of keys and values in 1 hop",  # of 2 key heads, 4 times as many tokens
    ]


@pytest.mark.slow
def test_explain_takes_arrays_whose_types_divide_the_sequence():
    mesh = mesh_over(AxisType.Explicit, x=2)
    given = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "x"))) for x in of_heads(2, 2)]
    assert "length over mesh axis 'x' (2 devices)" in jattn.explain(*given, implementation=Ring(mesh, "x"))
    assert jattn.explain(*given, implementation=Ulysses(mesh, "x")).count("mesh axis 'x' (2 devices)") == 2
