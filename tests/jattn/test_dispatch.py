"""Which implementation runs on which platform: what ``explain`` says, and what lowered programs hold."""

import functools
import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, score_mods
from jattn._core.arguments import make_call
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.dispatch import IMPLEMENTATIONS, PLATFORMS, Dispatch
from jattn.kernels.pallas_tpu import PallasTPU

X = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)
STRENGTH = np.linspace(0.0, 1.0, 4, dtype=np.float32)


def cap_by_head(score, b, h, q, kv):
    return score * jnp.asarray(STRENGTH)[h]


def pair_table(score, b, h, q, kv):
    return score + jnp.zeros((1024, 1024))[q, kv]


# What is taken on a TPU, and whether a CPU takes "native" where that is installed; GPUs, and other CPUs, take blockwise.
TAKEN = {
    "full": ({}, "splash", True),
    "causal": ({"is_causal": True}, "splash", True),
    "soft cap": ({"score_mod": score_mods.SoftCap(30.0)}, "splash", True),
    "segments": ({"mask": masks.Segments(np.arange(1024) // 100)}, "splash", True),
    "function": ({"mask": lambda b, h, q, kv: (q - kv) % 3 == 0}, "splash", False),
    "score function": ({"score_mod": cap_by_head}, "blockwise", False),
    "bias": ({"bias": jnp.zeros((4, 1, 1024))}, "blockwise", True),
    "positions": ({"query_positions": np.arange(1024)}, "blockwise", True),
    "look-up by pair": ({"score_mod": pair_table}, "blockwise", False),
    "dropout": ({"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "blockwise", True),
}
ON_CPU = "native" if importlib.util.find_spec("jattn_native") else "blockwise"
KERNELS = {"splash": "splash_mha_fwd", "pallas_tpu": "jattn_forward"}


def lowered(fn, *types, platform="tpu"):
    return jax.export.export(jax.jit(fn), platforms=[platform])(*types).mlir_module()


@pytest.mark.parametrize("name", TAKEN)
def test_what_is_said_is_what_is_lowered(name):
    options, on_tpu, native = TAKEN[name]
    taken = {platform: jattn.explain(X, X, X, platform=platform, **options).splitlines()[0] for platform in PLATFORMS}
    on_cpu = ON_CPU if native else "blockwise"
    assert taken == {
        "cpu": f"{on_cpu}: taken on CPU", "gpu": "blockwise: taken on GPU", "tpu": f"{on_tpu}: taken on TPU"
    }  # fmt: skip
    attend = lambda *x: jattn.dot_product_attention(*x, **options)
    text = lowered(attend, X, X, X)
    assert {kernel for kernel, mark in KERNELS.items() if mark in text} == {on_tpu} & set(KERNELS)
    assert ("jattn_forward" in jax.jit(attend).lower(X, X, X).as_text()) == (on_cpu == "native")


def test_all_platforms_at_once():
    lines = jattn.explain(X, X, X, is_causal=True).splitlines()
    taken = {"native": "CPU", "blockwise": "GPU"} if ON_CPU == "native" else {"blockwise": "CPU and GPU"}
    assert lines[: len(taken) + 1] == [*(f"{name}: taken on {on}" for name, on in taken.items()), "splash: taken on TPU"]  # fmt: skip
    work = [line for line in lines if "computes" in line]
    assert work[-2:] == [
        "blockwise computes 75% of the pairs in blocks of 512 x 512" + " on GPU" * (ON_CPU != "native"),
        "splash computes 75% of the pairs in blocks of 512 x 512",
    ]
    assert work[0] == (
        "native computes 53% of the pairs in blocks of 64 x 64"
        if ON_CPU == "native"
        else "blockwise computes 62% of the pairs in blocks of 512 x 512 on CPU"
    )
    assert sorted(line.partition(":")[0] for line in lines if ":" in line) == sorted(IMPLEMENTATIONS)
    small = X.update(shape=(1, 64, 4, 64))
    of_small = ["native: taken on CPU", "xla: taken on GPU and TPU"] if ON_CPU == "native" else ["xla: taken"]
    assert jattn.explain(small, small, small).splitlines()[: len(of_small)] == of_small


def test_the_compiled_kernels_are_taken_where_they_pay():
    """With the package, from 16 queries and keys on, and for few queries from 128 keys on; exported programs never."""
    if ON_CPU != "native":
        pytest.skip("jattn-native is not installed")

    def taken(T, S, dtype="float32"):
        query, key = (jax.ShapeDtypeStruct((1, n, 2, 64), dtype) for n in (T, S))
        lines = jattn.explain(query, key, key, platform="cpu").splitlines()
        return lines[0].removesuffix(" on CPU").removesuffix(": taken"), lines

    assert taken(128, 128)[0] == taken(16, 16)[0] == taken(1, 128)[0] == taken(1, 65536, "bfloat16")[0] == "native"
    assert taken(15, 127)[0] == taken(1, 127)[0] == taken(0, 128)[0] == taken(2048, 15)[0] == "xla"
    line = "native: also possible, by name, on a CPU; faster with at least 16 keys, or 128 for fewer than 16 queries"
    assert line in taken(1, 16)[1]
    small, long = X.update(shape=(1, 32, 4, 64)), X
    text = lowered(lambda *x: [jattn.dot_product_attention(*x[:3]), jattn.dot_product_attention(*x[3:])],
                   *[small] * 3, *[long] * 3, platform="cpu")  # fmt: skip
    assert "jattn_forward" not in text


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(3, 40, 96), (2, 160, 160), (1, 1, 200)])
def test_what_a_gpu_takes_does_not_depend_on_the_kernels_for_cpus(shape):
    """The dense formula, whose derivatives JAX takes, where the kernels would be taken on a CPU."""
    dispatch, (B, T, S) = Dispatch(), shape
    query, key, value, ct = (
        jnp.asarray(np.random.default_rng(i).normal(size=(B, n, 2, 8)), jnp.float32) for i, n in enumerate((T, S, S, T))
    )
    args = make_call(query, key, value, is_causal=True)
    assert dispatch.kernel("cuda", args).name == "xla"
    cotangents = (ct, ct[..., 0])

    def both(query, key, value):
        options = {"is_causal": True, "implementation": "xla", "return_residual": True}
        return jattn.dot_product_attention(query, key, value, **options)

    (out, lse), pull = jax.vjp(both, query, key, value)
    results = dispatch.forward("cuda", args)
    np.testing.assert_allclose(results[0], out, atol=1e-6)
    np.testing.assert_allclose(results[1] + np.log(results[2]), lse, atol=1e-6)
    gradients = dispatch.backward("cuda", args, results, (ct, cotangents[1] / results[2]))
    for x, y in zip(gradients, pull(cotangents), strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.skipif(ON_CPU != "native", reason="jattn-native is not installed")
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_short_calls_take_what_the_kernels_lack_from_the_formula(dtype):
    """Gradients of other arrays, forward mode and second derivatives, at the price that they have without the kernels."""
    draw = lambda i, *shape: jnp.asarray(np.random.default_rng(i).normal(size=shape), dtype)
    q, k, v, bias = draw(0, 2, 20, 4, 8), draw(1, 2, 24, 2, 8), draw(2, 2, 24, 2, 8), draw(3, 1, 4, 20, 24)
    slopes, sinks = jnp.array([0.5, 0.25, 0.1, 0.0]), jnp.array([1.0, -2.0, 0.0, 3.0])

    def loss(implementation, q, k, v, bias, slopes, sinks):
        options = {"score_mod": score_mods.Alibi(slopes), "implementation": implementation, "return_residual": True}
        lengths = np.array([20, 13])
        out, lse = jattn.dot_product_attention(
            q, k, v, bias, sinks=sinks, query_seq_lengths=lengths, key_value_seq_lengths=lengths, **options
        )
        return jnp.sin(out.astype(jnp.float32)).sum() + jnp.where(lse > -1e30, lse, 0.0).sum()

    arrays = q, k, v, bias, slopes, sinks
    derivatives = {
        "of q, k and v": lambda f: jax.grad(f, (0, 1, 2)),
        "of others": lambda f: jax.value_and_grad(f, (0, 3, 4, 5)),
        "forward": lambda f: lambda *x: jax.jvp(f, x, x),
        "second": lambda f: lambda *x: jax.jvp(jax.grad(f, (0, 1)), x, x),
        "second, of others": lambda f: lambda *x: jax.jvp(jax.grad(f, (3, 4, 5)), x, x),
        "third": lambda f: lambda *x: jax.jvp(lambda *x: jax.jvp(jax.grad(f, (1, 4, 5)), x, x)[1], x, x)[1],
        "second, rematerialised": lambda f: jax.grad(lambda *x: jax.grad(jax.checkpoint(f), 2)(*x).astype(jnp.float32).sum(), (0, 3)),
        "batched": lambda f: lambda q, *x: jax.vmap(jax.grad(f), (0, *[None] * 5))(jnp.stack([q, q + 1]), *x),
    }  # fmt: skip
    for name, derive in derivatives.items():
        program, of_formula = (jax.jit(derive(functools.partial(loss, x))) for x in (None, "xla"))
        tolerance = 2e-5 if dtype == jnp.float32 else 0.06
        for x, y in zip(*(jax.tree.leaves(f(*arrays)) for f in (program, of_formula)), strict=True):
            scale = float(abs(y.astype(jnp.float32)).max())
            np.testing.assert_allclose(*(z.astype(jnp.float32) for z in (x, y)), atol=tolerance * scale, err_msg=name)
        kernels = [name for name in ("jattn_forward", "jattn_backward") if name in program.lower(*arrays).as_text()]
        assert kernels == {"of others": [], "of q, k and v": ["jattn_forward", "jattn_backward"]}.get(name, kernels)


LONG = jax.ShapeDtypeStruct((2, 2048, 2, 8), jnp.float32)
IDS = np.stack([np.arange(2048) // 300, np.arange(2048) // 1500])
TABLE = np.zeros((2, 1, 2048, 2048), bool)
TABLE[0, 0, 700:900, 100:200] = TABLE[1, 0, ::3, 1500:] = True
# For 2048 queries and keys of two sequences.
STATIC = {
    "causal": masks.Causal(), "window": masks.SlidingWindow(100), "segments": masks.Segments(IDS) & masks.Causal(),
    "prefix": masks.Prefix(1030), "table": masks.Dense(TABLE), "nothing": masks.Prefix(0),
    "everything": masks.Prefix(4096),
}  # fmt: skip


def said_of(name, *arguments, **options):
    """The share of the pairs and the blocks that ``explain`` names for an implementation."""
    (line,) = (line for line in jattn.explain(*arguments, **options).splitlines() if line.startswith(f"{name} "))
    pattern = rf"{name} computes (.*)% of the pairs in blocks of (\d+) x (\d+)"
    percent, rows, columns = re.fullmatch(pattern, line).groups()
    return float(percent), int(rows), int(columns)


@jattn.pytree_dataclass
class Counted:
    """A score function that notes how many scores it gets."""

    sizes: list = jattn.static_field()

    def __hash__(self):
        return id(self.sizes)

    def __call__(self, score, b, h, q_idx, kv_idx):
        def note(score):
            self.sizes.append(score.size)
            return score

        return jax.pure_callback(note, score, score, vmap_method="sequential")


@pytest.mark.slow_except("segments")
@pytest.mark.parametrize("name", STATIC)
def test_how_much_is_computed_on_a_cpu(name):
    """Compared with the scores that blockwise computes when it runs."""
    percent, *_ = said_of("blockwise", LONG, LONG, LONG, mask=STATIC[name], implementation="blockwise", platform="cpu")
    counted = Counted([])
    attend = jax.jit(lambda x: jattn.dot_product_attention(x, x, x, mask=STATIC[name], score_mod=counted, implementation="blockwise"))  # fmt: skip
    attend(jnp.zeros(LONG.shape)).block_until_ready()
    assert percent == pytest.approx(100 * sum(counted.sizes) / (2 * 2 * 2048**2), abs=0.5)


@pytest.mark.parametrize("length", [2048, 1500])
@pytest.mark.parametrize("name", STATIC)
def test_how_much_is_computed_elsewhere(name, length):
    """Compared with the pairs of blocks in which a pair is visible. Blocks may extend past the end."""
    mask, x = STATIC[name], LONG.update(shape=(2, length, 2, 8))
    if length != 2048 and name in ("segments", "table"):
        mask = masks.Segments(IDS[:, :length]) if name == "segments" else masks.Dense(TABLE[:, :, :length, :length])
    at = np.arange(length)
    visible = np.stack([np.broadcast_to(mask(b, 0, at[:, None], at), (length, length)) for b in (0, 1)])
    for kernel, platform in (("blockwise", "gpu"), ("splash", "tpu")):
        if kernel == "splash" and name in ("segments", "table"):  # masks that differ by sequence
            continue
        percent, rows, columns = said_of(kernel, x, x, x, mask=mask, implementation=kernel, platform=platform)
        starts = itertools.product((0, 1), range(0, length, rows), range(0, length, columns))
        blocks = (visible[b, i : i + rows, j : j + columns] for b, i, j in starts)
        computed = sum(block.size * block.any() for block in blocks)
        assert percent == pytest.approx(100 * computed / visible.size, abs=0.5), (kernel, name)


def test_how_much_is_computed_where_that_is_not_known():
    """Arrays of a mask are not static in an eager call, and not where they are traced."""
    lines = lambda *x, **options: jattn.explain(*x, **options).splitlines()
    unknown = "blockwise skips empty blocks; which they are depends on arrays that are known only when it runs"
    x, traced = np.zeros(LONG.shape, np.float32), jax.ShapeDtypeStruct((2048, 2048), bool)
    assert lines(x, x, x, mask=masks.Segments(IDS), platform="gpu")[1] == unknown
    assert lines(LONG, LONG, LONG, mask=traced, platform="gpu")[1] == unknown
    assert lines(LONG, LONG, LONG, mask=np.tri(2048) > 0, platform="gpu")[1].startswith("blockwise computes 62% of")
    lengths = jax.ShapeDtypeStruct((2,), "int32")
    assert lines(LONG, LONG, LONG, key_value_seq_lengths=lengths, platform="gpu")[1] == unknown
    function = lambda b, h, q, kv: q >= kv
    assert lines(LONG, LONG, LONG, mask=function, platform="gpu")[1] == (
        "blockwise computes 100% of the pairs in blocks of 1024 x 1024; block_mask finds the empty ones of a plain function"
    )
    of_blocks = "splash computes the blocks of 512 x 512 that hold a visible pair"
    assert lines(LONG, LONG, LONG, mask=function, platform="tpu")[1] == of_blocks
    mask = jattn.block_mask(function, 2048, 2048)
    assert lines(LONG, LONG, LONG, mask=mask, platform="gpu")[1].startswith("blockwise computes 62% of")
    by_sizes = lines(LONG, LONG, LONG, is_causal=True, implementation=Blockwise((128, 256)))
    assert by_sizes == ["Blockwise: given, as an object", "blockwise computes 56% of the pairs in blocks of 128 x 256"]
    short = LONG.update(shape=(1, 64, 2, 8))
    assert lines(short, short, short, is_causal=True, platform="gpu")[1] == "xla computes all pairs"
    for implementation in (None, "blockwise", Blockwise()):  # without a mask there is nothing to skip
        assert not any(" of the pairs" in line for line in lines(LONG, LONG, LONG, implementation=implementation))
    if ON_CPU == "native":
        assert lines(LONG, LONG, LONG, is_causal=True, implementation="native")[:2] == [
            "native: taken by name", "native computes 52% of the pairs in blocks of 64 x 64"
        ]  # fmt: skip


def test_a_kernel_of_another_platform():
    assert jattn.explain(X, X, X, implementation="splash", platform="cpu").startswith("splash: named, but it needs a TPU")  # fmt: skip
    assert "cudnn: it needs a GPU" in jattn.explain(X, X, X, platform="tpu")
    with pytest.raises(ValueError, match="platform must be None or one of cpu, gpu, tpu, got 'cuda'"):
        jattn.explain(X, X, X, platform="cuda")


def test_a_kernel_that_nobody_has_run_is_taken_by_name_only(monkeypatch):
    never_run = {name for name, kernel in IMPLEMENTATIONS.items() if kernel.never_run}
    assert never_run == {"pallas_tpu", "pallas_gpu"}
    lines = jattn.explain(X, X, X, score_mod=cap_by_head).splitlines()
    for name in never_run:
        (line,) = (line for line in lines if line.startswith(name))
        assert line.endswith("; never run on hardware") or ", but " in line or "it needs" in line, line
    options = {"score_mod": cap_by_head, "implementation": "pallas_tpu"}
    text = lowered(lambda *x: jattn.dot_product_attention(*x, **options), X, X, X)
    assert KERNELS["pallas_tpu"] in text
    assert "tpu_custom_call" not in lowered(lambda q, k: jattn.heads.statistics(q, k), X, X)
    # One field decides: what is run becomes the default where it is next in order.
    monkeypatch.setattr(PallasTPU, "never_run", False)
    assert jattn.explain(X, X, X, score_mod=cap_by_head, platform="tpu").startswith("pallas_tpu: taken on TPU")
    assert "tpu_custom_call" in lowered(lambda q, k: jattn.heads.statistics(q, k), X, X)


@pytest.mark.parametrize("options", [{"is_causal": True}, {"score_mod": cap_by_head, "implementation": "pallas_tpu"}])
def test_gradients_keep_the_sums(options):
    """One forward kernel and two of the backward pass: nothing is computed again."""
    loss = lambda *x: jattn.dot_product_attention(*x, **options).astype(jnp.float32).sum()
    assert lowered(jax.grad(loss, (0, 1, 2)), X, X, X).count("tpu_custom_call") == 3
    if "implementation" not in options:
        assert "tpu_custom_call" not in lowered(jax.grad(loss, (0, 1, 2)), X, X, X, platform="cuda")


def test_gradients_of_other_arrays_are_blockwises():
    bias = jax.ShapeDtypeStruct((4, 1, 1024), jnp.float32)
    attend = functools.partial(jattn.dot_product_attention, implementation="pallas_tpu")
    text = lowered(jax.grad(lambda b, *x: attend(*x, b).astype(jnp.float32).sum()), bias, X, X, X)
    assert text.count("tpu_custom_call") == 1


def test_on_a_mesh():
    """A kernel runs on one device's arrays: in ``shard_map`` and on typed meshes, and not on arrays that XLA divides."""
    attend = lambda *x: jattn.dot_product_attention(*x, is_causal=True)
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec(None, None, "heads")
    by_hand = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    typed = X.update(sharding=jax.sharding.NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        assert KERNELS["splash"] in lowered(by_hand, typed, typed, typed)
        assert KERNELS["splash"] in lowered(attend, typed, typed, typed)
    with jax.set_mesh(jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))):
        assert "tpu_custom_call" not in lowered(attend, X, X, X)
        assert jattn.explain(X, X, X, is_causal=True, platform="tpu").startswith("blockwise: taken on TPU")


def test_a_mesh_of_both_kinds_of_axes():
    """The axes that no type names are XLA's."""
    explicit, auto = jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(explicit, auto))
    with jax.set_mesh(mesh):
        over_x = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
        typed = X.update(shape=(2, *X.shape[1:]), sharding=over_x)
        assert jattn.explain(typed, typed, typed, platform="tpu").startswith("blockwise: taken on TPU")
        assert "tpu_custom_call" not in lowered(lambda *x: jattn.dot_product_attention(*x), typed, typed, typed)


def test_what_xla_divides_is_blockwises():
    """XLA cannot divide a kernel, and no type says that it will divide the program."""
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(None, None, "heads")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    text = lambda fn: jax.export.export(jax.jit(fn, in_shardings=sharding), platforms=["tpu"])(X, X, X).mlir_module()

    def attend(*x, implementation=None):
        return jattn.dot_product_attention(*x, is_causal=True, implementation=implementation)

    assert "tpu_custom_call" not in text(attend)
    assert "tpu_custom_call" not in text(lambda q, k, v: jattn.heads.statistics(q, k))
    assert KERNELS["splash"] in text(jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec))
    for name in KERNELS:
        with pytest.raises(jattn.Unsupported, match=f"'{name}' cannot do this: the arrays may lie on several devices"):
            text(lambda *x, name=name: attend(*x, implementation=name))


def test_here_it_is_what_is_said_to_the_bit():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1024, 1, 8)), jnp.float32)
    result, expected = (
        jax.value_and_grad(lambda x, name=name: jattn.dot_product_attention(x, x, x, implementation=name).sum())(x)
        for name in (None, ON_CPU)
    )
    jax.tree.map(np.testing.assert_array_equal, result, expected)


@pytest.mark.skipif(importlib.util.find_spec("jattn_native") is None, reason="needs jattn-native")
def test_the_log_sum_exp_alone_is_computed_as_fast():
    """As ``heads.statistics`` computes it, of values without features."""
    x, nothing = (jax.ShapeDtypeStruct((1, 4096, 4, size), jnp.float32) for size in (64, 0))
    assert jattn.explain(x, x, nothing, platform="cpu").splitlines()[0] == "native: taken on CPU"
