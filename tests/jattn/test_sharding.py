"""Sharded arrays: heads and sequences divided over both kinds of meshes, and what cannot be divided."""

import dataclasses
import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads, masks
from jattn.score_mods import Alibi, alibi_slopes
from jattn.sharding import (
    HeadParallel,
    Ring,
    Ulysses,
    from_zigzag,
    head_parallel_attention,
    ring_attention,
    ring_blocks,
    to_zigzag,
)

KINDS = [AxisType.Auto, AxisType.Explicit]
SHARDED = PartitionSpec("data", None, "heads")
B, T, N, H = 4, 8, 8, 6


def mesh_of(kind):
    return jax.make_mesh((2, 4), ("data", "heads"), (kind,) * 2)


def arrays(K, N=N, T=T):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=(B, T, n, H)), jnp.float32) for n in (N, K, K)]


def placed(mesh, query, key, value):
    over_heads = SHARDED if key.shape[2] % 4 == 0 else PartitionSpec("data")
    specs = (SHARDED, over_heads, over_heads)
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((query, key, value), specs, strict=True)]


def run(qkv, slopes, mask, **options):
    """A call with everything that depends on the indices of sequence and head."""

    def loss(qkv, slopes):
        out, lse = jattn.dot_product_attention(
            *qkv, mask=mask, score_mod=Alibi(slopes), dropout_rate=0.3, dropout_rng=jax.random.key(5),
            key_value_seq_lengths=jnp.array([8, 5, 0, 7]), return_residual=True, **options,
        )  # fmt: skip
        return jnp.sum(out**2) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0)), (out, lse)

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(qkv, slopes)


def close(got, wanted, tolerance=1e-5):
    def check(x, y):
        largest = np.abs(y[np.isfinite(y)]).max(initial=1.0)
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance * largest)

    jax.tree.map(lambda x, y: check(x, np.asarray(y)), got, wanted)


MASK = masks.Causal() & (lambda b, h, q, kv: (q + kv + b + h) % 3 > 0)
SLOPES = jnp.asarray(alibi_slopes(N))


@pytest.mark.slow
@pytest.mark.parametrize("kind, implementation", [(KINDS[0], "xla"), (KINDS[0], "blockwise"), (KINDS[1], "xla"), (KINDS[1], "blockwise")])  # fmt: skip
@pytest.mark.parametrize("K", [8, 4, 2])
def test_plain_sharded_arrays_just_work(kind, implementation, K):
    mesh, qkv = mesh_of(kind), arrays(K)
    compiled = jax.jit(lambda *x: run(*x, MASK, implementation=implementation))
    sharded = placed(mesh, *qkv)
    close(compiled(sharded, SLOPES), compiled(qkv, SLOPES))
    forward = jax.jit(lambda *x: jattn.dot_product_attention(*x, mask=MASK, implementation=implementation))
    text = forward.lower(*sharded).compile().as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    out = forward(*sharded)
    assert out.sharding.is_equivalent_to(NamedSharding(mesh, SHARDED), 4)
    if kind == AxisType.Explicit or K >= 4:  # XLA gathers the gradients of replicated arrays
        assert "all-gather" not in compiled.lower(sharded, SLOPES).compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize("K", [8, 2, 1])
def test_head_parallel(K):
    mesh, qkv = mesh_of(AxisType.Auto), arrays(K)
    how = HeadParallel(mesh, "heads", "data", implementation="xla")
    compiled = jax.jit(lambda *x: run(*x, MASK, implementation=how))
    close(compiled(qkv, SLOPES), jax.jit(lambda *x: run(*x, MASK, implementation="xla"))(qkv, SLOPES))
    assert "all-gather" not in compiled.lower(placed(mesh, *qkv), SLOPES).compile().as_text()
    plain = head_parallel_attention(*qkv, None, MASK, mesh=mesh, axis_name=("data", "heads"))
    close(plain, jattn.dot_product_attention(*qkv, None, MASK))


@pytest.mark.slow
def test_a_kernel_of_one_platform_by_name_on_each_device():
    """What one device runs is asked of its own part: a current mesh does not make that lie on several devices."""
    query, key, value = (jnp.tile(x.astype(jnp.float16), 4) for x in arrays(8))
    mesh = mesh_of(AxisType.Auto)
    with jax.set_mesh(mesh), pytest.raises(jattn.Unsupported, match="needs an NVIDIA GPU, not cpu"):
        how = HeadParallel(mesh, "heads", "data", implementation="cudnn")
        jattn.dot_product_attention(query, key, value, implementation=how)


@pytest.mark.slow
def test_eager_calls_on_typed_arrays():
    qkv = arrays(4)
    query, key, value = placed(mesh_of(AxisType.Explicit), *qkv)
    out = jattn.dot_product_attention(query, key, value, mask=np.tri(T, dtype=bool))
    assert jax.typeof(out).sharding.spec == PartitionSpec("data", None, "heads", None)
    close(np.asarray(out), jattn.dot_product_attention(*qkv, is_causal=True))


@pytest.mark.slow
def test_looking_at_typed_arrays():
    qkv = arrays(4)
    query, key, _ = placed(mesh_of(AxisType.Explicit), *qkv)
    tokens = jnp.asarray(np.random.default_rng(1).integers(0, 3, (B, T)))
    for look in (
        jax.jit(lambda q, k: heads.statistics(q, k, tokens=tokens, is_causal=True)),
        jax.jit(lambda q, k: jattn.attention_weights(q, k, is_causal=True)),
        jax.jit(lambda q, k: jattn.fold_weights(lambda c, w, i, j: c.at[j[0]].add(w.sum(0)), jnp.zeros(T), q, k)),
    ):
        result = look(query, key)
        close(jax.tree.map(np.asarray, result), look(*qkv[:2]))
        assert "all-gather" not in look.lower(query, key).compile().as_text()
        assert all(jax.typeof(x).sharding.spec[:2] == ("data", "heads") for x in jax.tree.leaves(result))
    with jax.set_mesh(mesh_of(AxisType.Explicit)):  # where every new array has a type, too
        close(jax.tree.map(np.asarray, look(query, key)), np.asarray(result))


def test_explain_says_what_each_device_has():
    qkv = placed(mesh_of(AxisType.Explicit), *arrays(4))
    divided = "sequences over mesh axis 'data' (2 devices), heads over mesh axis 'heads' (4 devices)"
    assert divided in jattn.explain(*qkv)


def params_of(kind):
    mesh = mesh_of(kind)
    params = jattn.init_multi_head(jax.random.key(1), 16, N, num_kv_heads=4, use_bias=True)
    lie = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    of_projections = {"kernel": (None, "heads"), "bias": ("heads",)}
    spec = dict.fromkeys(params, of_projections) | {"out": {"kernel": ("heads",), "bias": ()}}
    sharded = {name: {leaf: lie(x, *spec[name][leaf]) for leaf, x in part.items()} for name, part in params.items()}
    x = jax.random.normal(jax.random.key(0), (B, T, 16))
    return params, x, sharded, lie(x, "data")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_as_a_function(kind):
    params, x, sharded, here = params_of(kind)
    step = jax.jit(jax.value_and_grad(lambda p, x: jnp.sum(jattn.multi_head_attention(p, x, is_causal=True) ** 2)))
    text = step.lower(sharded, here).compile().as_text()
    assert "all-gather" not in text and "all-reduce" in text  # sum_i z_i W_i^O, over the devices
    close(step(sharded, here), step(params, x))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_nnx_parameters_carry_where_they_lie_and_the_module_runs_there(kind):
    mesh = mesh_of(kind)
    lies = {
        "kernel_metadata": {"out_sharding": (None, "heads", None)},
        "bias_metadata": {"out_sharding": ("heads", None)},
        "out_kernel_metadata": {"out_sharding": ("heads", None, None)},
        "out_bias_metadata": {"out_sharding": (None,)},
    }
    x = jax.random.normal(jax.random.key(0), (B, T, 16))
    make = lambda cls, **options: cls(N, 16, decode=False, rngs=nnx.Rngs(0), **options)
    with jax.set_mesh(mesh):
        layer, flaxs = (make(cls, **lies) for cls in (jattn.nnx.MultiHeadAttention, nnx.MultiHeadAttention))
        ours, theirs = (jax.tree.map(lambda p: p.sharding, nnx.state(one, nnx.Param)) for one in (layer, flaxs))
        assert jax.tree.leaves(ours) == jax.tree.leaves(theirs) and len(set(map(str, jax.tree.leaves(ours)))) > 1
        here = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
        call = nnx.jit(lambda layer, x: layer(x, is_causal=True))
        text = call.lower(layer, here).compile().as_text()
        assert "all-gather" not in text
        y = call(layer, here)
    close(np.asarray(y), make(jattn.nnx.MultiHeadAttention)(x, is_causal=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_linen_parameters_carry_where_they_lie_and_the_module_runs_there(kind):
    mesh = mesh_of(kind)

    def make(cls):
        lie = lambda init, *names: linen.with_partitioning(init, names)
        lecun, zeros = linen.initializers.lecun_normal(), linen.initializers.zeros_init()
        return cls(
            num_heads=N, qkv_features=16, kernel_init=lie(lecun, None, "heads", None), bias_init=lie(zeros, "heads", None),
            out_kernel_init=lie(lecun, "heads", None, None), out_bias_init=lie(zeros, None),
        )  # fmt: skip

    x = jax.random.normal(jax.random.key(0), (B, T, 16))
    layer = make(jattn.linen.MultiHeadAttention)
    variables = layer.init(jax.random.key(1), x)
    specs = linen.get_partition_spec(variables)
    assert specs == linen.get_partition_spec(make(linen.MultiHeadDotProductAttention).init(jax.random.key(1), x))
    assert specs["params"]["query"]["kernel"] == PartitionSpec(None, "heads", None)
    plain = flax.core.meta.unbox(variables)
    there = jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), plain, specs)
    here = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
    call = jax.jit(layer.apply)
    assert "all-gather" not in call.lower(there, here).compile().as_text()
    close(np.asarray(call(there, here)), layer.apply(plain, x))


ROW = jax.make_mesh((2, 4), ("data", "row"))
ring = functools.partial(ring_attention, mesh=ROW, axis_name="row")
by_heads = functools.partial(head_parallel_attention, mesh=ROW, axis_name="row")
BAD = {
    "no such axis": (lambda q, k, v: ring(q, k, v, axis_name="rows"), r"axis_name='rows': the mesh has no axis 'rows'; it has 'data' \(2 devices\), 'row' \(4 devices\)"),
    "one axis twice": (lambda q, k, v: ring(q, k, v, batch_axis="row"), r"batch_axis='row': the mesh axis 'row' is given twice"),
    "queries": (lambda q, k, v: ring(q[:, :6], k, v), r"6 queries \(T\) cannot be divided over mesh axis 'row' \(4 devices\): they must be a multiple of 4"),
    "keys": (lambda q, k, v: ring(q, k[:, :7], v[:, :7]), r"7 keys \(S\) cannot .*'row' \(4 devices\)"),
    "chunks": (lambda q, k, v: ring(q[:, :4], k, v, layout="zigzag"), r"4 queries \(T\) .* 'row' \(4 devices\): they must be a multiple of 8"),
    "layout": (lambda q, k, v: ring(q, k, v, layout="spiral"), "contiguous, zigzag, got 'spiral'"),
    "sequences": (lambda q, k, v: ring(q[:3], k[:3], v[:3], batch_axis="data"), r"3 sequences \(B\) .* 'data' \(2 devices\)"),
    "heads": (lambda q, k, v: by_heads(q[:, :, :6], k[:, :, :6], v[:, :, :6]), r"6 query heads \(N\) .* 'row' \(4 devices\)"),
    "key heads": (lambda q, k, v: by_heads(jnp.concatenate([q, q, q], 2), k[:, :, :6], v[:, :, :6]), r"6 key/value heads \(K\) cannot be divided over mesh axis 'row' \(4 devices\): K must divide the number of devices or be a multiple of it"),
    "several axes": (lambda q, k, v: by_heads(q[:, :, :4], k[:, :, :4], v[:, :, :4], axis_name=("data", "row")), r"4 query heads \(N\) .* mesh axes 'data' \(2 devices\) and 'row' \(4 devices\): they must be a multiple of 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_divided_is_named(name):
    call, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        call(*arrays(8))


@pytest.mark.parametrize("specs, message", [
    (("data", "heads"), r"the queries' length \(axis T\) is sharded over 'heads' \(4 devices\).*ring_attention"),
    (("data", None, None, "heads"), r"the queries' head dim \(axis H\) is sharded over 'heads' \(4 devices\)"),
])  # fmt: skip
def test_types_that_attention_cannot_take(specs, message):
    query, key, value = arrays(4, N=4)
    query = jnp.concatenate([query, query], 3)[..., :8]
    key = jnp.concatenate([key, key], 3)[..., :8]
    query = jax.device_put(query, NamedSharding(mesh_of(AxisType.Explicit), PartitionSpec(*specs)))
    with pytest.raises(ValueError, match=message):
        jax.jit(jattn.dot_product_attention)(query, key, value)


def test_keys_must_lie_where_queries_do():
    mesh = mesh_of(AxisType.Explicit)
    query, key, value = arrays(8)
    query = jax.device_put(query, NamedSharding(mesh, PartitionSpec("data")))
    key, value = (jax.device_put(x, NamedSharding(mesh, SHARDED)) for x in (key, value))
    for one in (query, jnp.asarray(np.asarray(query))):
        message = "key is sharded as .* sequences and heads of key must be sharded like the query's"
        with pytest.raises(ValueError, match=message):
            jattn.dot_product_attention(one, key, value)


@pytest.mark.parametrize("shape", [pytest.param((1, 4), marks=pytest.mark.slow), (1, 1)])
def test_axes_of_one_device_are_part_of_the_type(shape):
    """The carry of a scan then has the same type before and after."""
    mesh = jax.make_mesh(shape, ("data", "heads"), devices=jax.devices()[: shape[1]])
    query, key, value = (jax.device_put(x, NamedSharding(mesh, SHARDED)) for x in arrays(8))

    @jax.jit
    def run(query):
        return jax.lax.scan(lambda c, _: (jattn.dot_product_attention(c, key, value), None), query, None, length=2)[0]

    assert jax.typeof(run(query)) == jax.typeof(query)


@pytest.mark.slow
def test_mixed_axes_are_left_as_they_are():
    """Automatic and unnamed axes may still divide an array, which is not gathered."""
    qkv = arrays(8)
    mixed = jax.make_mesh((2, 4), ("data", "heads"), (AxisType.Explicit, AxisType.Auto))
    forward = jax.jit(lambda *x: jattn.dot_product_attention(*x, is_causal=True))
    ring = jax.jit(lambda *x: ring_attention(*x, mesh=mesh_of(AxisType.Auto), axis_name="heads", is_causal=True))
    in_a_row = NamedSharding(mesh_of(AxisType.Auto), PartitionSpec("data", "heads"))
    for call, lies in ((forward, NamedSharding(mixed, SHARDED)), (ring, in_a_row)):
        there = [jax.device_put(x, lies) for x in qkv]
        assert "all-gather" not in call.lower(*there).compile().as_text()
        close(np.asarray(call(*there)), forward(*qkv))


@pytest.mark.slow
def test_typed_positions_ids_and_orders():
    mesh = jax.make_mesh((2, 4), ("data", "row"))
    lie = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
    qkv, how = arrays(8), Ring(mesh, "row")
    there = [lie(x, "data", "row") for x in qkv]
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))[:, ::-1]
    at = lie(positions, "data", "row")
    options = {"is_causal": True, "query_positions": at, "kv_positions": at, "implementation": how}
    wanted = {"is_causal": True, "query_positions": positions, "kv_positions": positions}
    result = jattn.dot_product_attention(*there, **options)
    close(np.asarray(result), jattn.dot_product_attention(*qkv, **wanted))
    ids = jnp.array([[0, 0, 0, 1, 1, 2, 2, 2]] * B)
    result = jattn.dot_product_attention(*there, mask=masks.Segments(lie(ids, "data")), implementation=how)
    close(np.asarray(result), jattn.dot_product_attention(*qkv, mask=masks.Segments(ids)))
    turned = jax.jit(lambda x: to_zigzag(x, 4))(there[0])
    assert jax.typeof(turned) == jax.typeof(there[0])
    close(np.asarray(turned), to_zigzag(qkv[0], 4))
    close(np.asarray(from_zigzag(turned, 4)), qkv[0])


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True])
def test_a_layer_in_zigzag_order_knows_its_positions(module):
    """Rotary positions are in token order, also without explicit positions."""
    how = Ring(jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2]), "x", layout="zigzag")
    x, order = jax.random.normal(jax.random.key(0), (2, 8, 16)), np.asarray(to_zigzag(jnp.arange(8), 2, axis=0))
    rotary = jattn.positions.Rotary()
    if module:
        cls = jattn.nnx.MultiHeadAttention
        make = lambda **options: cls(4, 16, decode=False, position=rotary, rngs=nnx.Rngs(0), **options)
        plain, turned = make()(x, is_causal=True), make(implementation=how)(x[:, order], is_causal=True)
    else:
        params = jattn.init_multi_head(jax.random.key(1), 16, 4)
        options = {"is_causal": True, "position": rotary}
        plain = jattn.multi_head_attention(params, x, **options)
        turned = jattn.multi_head_attention(params, x[:, order], **options, implementation=how)
        with pytest.raises(ValueError, match="cache must be filled in the order of the tokens, .*'zigzag'"):
            jattn.multi_head_attention(params, x, implementation=how, cache=jattn.init_cache(2, 16, 4, 4))
    close(turned, plain[:, order])


HOW = {"a ring": Ring, "heads in its place": Ulysses}


@pytest.mark.parametrize("name", HOW)
def test_weights_that_every_device_would_have_whole_are_refused(name):
    mesh = lambda devices: jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
    params, x = jattn.init_multi_head(jax.random.key(1), 16, 4), jax.random.normal(jax.random.key(0), (2, 8, 16))
    layer = jattn.nnx.MultiHeadAttention(4, 16, decode=False, rngs=nnx.Rngs(0), implementation=HOW[name](mesh(2), "x"))
    for call in (
        lambda: jattn.multi_head_attention(params, x, implementation=HOW[name](mesh(2), "x"), return_weights=True),
        lambda: layer(x, sow_weights=True),
    ):
        with pytest.raises(jattn.Unsupported, match=r"would hold all weights \[B,N,T,S\]\. .* return_statistics="):
            call()
    _, weights = jattn.multi_head_attention(params, x, implementation=HOW[name](mesh(1), "x"), return_weights=True)
    assert weights.shape == (2, 4, 8, 8)


@pytest.mark.slow
def test_weights_on_several_devices():
    """With divided heads, all of them; in a ring, those of a few queries, from what the layer returns."""
    params, x = jattn.init_multi_head(jax.random.key(1), 16, 4), jax.random.normal(jax.random.key(0), (2, 8, 16))
    row = jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2])
    _, weights = jattn.multi_head_attention(params, x, return_weights=True, is_causal=True)
    options = {"is_causal": True, "return_weights": True}
    _, there = jattn.multi_head_attention(params, x, implementation=HeadParallel(row, "x"), **options)
    close(there, weights)
    ring = Ring(row, "x", layout="zigzag")
    order = np.asarray(to_zigzag(jnp.arange(8), 2, axis=0))
    _, seen = jattn.multi_head_attention(params, x[:, order], is_causal=True, implementation=ring, return_heads=True)
    slots = np.array([1, 6])
    few = jattn.attention_weights(seen["query"][:, slots], seen["key"], is_causal=True, query_positions=order[slots], kv_positions=order)  # fmt: skip
    close(few, weights[:, :, order[slots]][..., order])


@pytest.mark.slow
def test_statistics_with_divided_heads():
    query, key, _ = arrays(4)
    how = HeadParallel(mesh_of(AxisType.Auto), "heads", "data")
    look = lambda **options: heads.statistics(query, key, is_causal=True, **options)
    close(look(implementation=how), look())
    with pytest.raises(Exception, match="implementation"):
        heads.statistics(query, key, implementation="xla")


@pytest.mark.slow
def test_a_score_function_that_jax_cannot_look_into():
    @dataclasses.dataclass(frozen=True)
    class Scaled:
        by: Any

        def __call__(self, score, b, h, q_idx, kv_idx):
            return score * self.by

    def loss(by, how):
        return jnp.sum(jattn.dot_product_attention(*arrays(8), score_mod=Scaled(by), implementation=how) ** 2)

    ring = Ring(jax.make_mesh((2,), ("x",), (AxisType.Auto,), devices=jax.devices()[:2]), "x")
    result, wanted = (jax.grad(loss)(jnp.float32(1.5), how) for how in (ring, "xla"))
    assert result != 0 and abs(result - wanted) <= 1e-5 * abs(wanted)


ODD = {
    "mesh": (lambda: Ring(ROW.abstract_mesh, "row"), "mesh"),
    "axis": (lambda: Ring(ROW, "nope"), r"axis_name='nope': the mesh has no axis 'nope'"),
    "no axis": (lambda: Ring(ROW, None), "axis_name"),
    "twice": (lambda: HeadParallel(ROW, ("row", "row")), "'row' is given twice"),
    "the class": (lambda: jattn.dot_product_attention(*arrays(8), implementation=Ring), "implementation"),
    "a number": (lambda: jattn.explain(*arrays(8), implementation=3), "implementation must be a name"),
    "a name": (lambda: jattn.explain(*arrays(8), implementation=HeadParallel(ROW, "row", implementation="foo")), "got .foo."),
    "ring_blocks, layout": (lambda: ring_blocks(masks.Causal(), 8, 8, devices=2, layout="spiral"), "layout must be one of"),
    "ring_blocks, mask": (lambda: ring_blocks(np.ones((8, 8), bool), 8, 8, devices=2), "mask"),
    "devices": (lambda: to_zigzag(jnp.ones((1, 8)), 0), "devices must be positive, got 0"),
    "no such axis": (lambda: to_zigzag(jnp.arange(8), 2), r"x of shape \[8\] has no axis 1; pass the sequence axis as axis="),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_input_is_named(name):
    call, message = ODD[name]
    with pytest.raises(Exception, match=message):
        call()


def test_explain_asks_the_object():
    how = HeadParallel(ROW, "row", implementation="cudnn")
    assert "but it takes float16 and bfloat16" in jattn.explain(*arrays(8), implementation=how)
    assert hash(HeadParallel(ROW, ["row"])) == hash(HeadParallel(ROW, ("row",)))
