"""How users run attention: exported, rematerialised, inside shard_map, eagerly; and as one operation of a program."""

import contextlib
import functools
import importlib.util
import operator
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, PartitionSpec

import jattn
from jattn import heads, masks, score_mods
from jattn._core import deferred
from jattn._core.attention import NAMES
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode

B, T, N, K, H = 2, 12, 4, 2, 8
ALIBI = np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
SMALL = Blockwise((4, 4))
PLATFORMS = ["cpu", "cuda", "tpu"]
needs_native = pytest.mark.skipif(importlib.util.find_spec("jattn_native") is None, reason="needs jattn-native")


def floats(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def qkv(B=B, T=T, N=N, K=K, H=H):
    return floats(B, T, N, H, seed=1), floats(B, T, K, H, seed=2), floats(B, T, K, H, seed=3)


def attend(*arrays, **options):
    return jattn.dot_product_attention(*arrays, **options)


class TestExport:
    def text(self, platforms, what=lambda fn: fn, dtype=jnp.bfloat16):
        x = [jax.ShapeDtypeStruct((2, 256, heads, 16), dtype) for heads in (4, 2, 2)]
        fn = what(lambda *x: attend(*x, is_causal=True, implementation=Blockwise((64, 64))).astype(jnp.float32))
        return jax.export.export(jax.jit(fn), platforms=platforms)(*x).mlir_module()

    @staticmethod
    def products(text):
        """The dtypes of the products' arguments, and their numbers of batch axes."""
        dtypes = re.findall(r"stablehlo\.dot_general.*?: \(tensor<[0-9x]*x(\w+)>, tensor<[0-9x]*x\w+>\)", text)
        batches = re.findall(r"stablehlo\.dot_general[^\n]*batching_dims = \[([0-9, ]*)\]", text)
        return set(dtypes), batches

    def test_each_platform_has_its_own_program(self):
        cpu, tpu = self.text(["cpu"]), self.text(["tpu"])
        assert self.products(cpu)[0] == {"f32"} and not self.products(cpu)[1]  # heads one at a time
        assert self.products(tpu)[0] == {"bf16"} and self.products(tpu)[1]  # together
        assert cpu.count("stablehlo.while") > tpu.count("stablehlo.while")

    def test_one_trace_holds_all_of_them(self):
        text = self.text(PLATFORMS)
        assert self.products(text)[0] == {"f32", "bf16"}
        assert text.count("stablehlo.while") >= self.text(["cpu"]).count("stablehlo.while")

    @pytest.mark.slow
    def test_so_does_that_of_a_gradient(self):
        text = self.text(PLATFORMS, lambda fn: jax.grad(lambda *x: fn(*x).sum(), (0, 1, 2)))
        assert self.products(text)[0] == {"f32", "bf16"}

    def test_few_queries_too(self):
        """ "decode" on CPU, dense elsewhere."""
        q, k = jax.ShapeDtypeStruct((1, 1, 4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((1, 16384, 2, 64), jnp.bfloat16)
        exported = jax.export.export(jax.jit(attend), platforms=PLATFORMS)
        text = exported(q, k, k).mlir_module()
        assert self.products(text)[0] >= {"f32", "bf16"}

    @pytest.mark.parametrize("name", [
        "dense",
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("batch", "blocks", "gradients of blocks", "statistics")),
    ])  # fmt: skip
    def test_symbolic_shapes(self, name):
        b, t = jax.export.symbolic_shape("b, t")
        alibi, ids = score_mods.Alibi(ALIBI), jnp.arange(T) // 5
        options = {"score_mod": alibi, "local_window_size": (6, 2)}
        if name != "dense":
            options["implementation"] = Blockwise((4, 4))
        of_call = lambda ids, *x: attend(*x, mask=masks.Causal() & masks.Segments(ids), return_residual=True, **options)

        def of_statistics(ids, q, k, _):
            tokens = jnp.broadcast_to(ids, q.shape[:2])
            return heads.statistics(q, k, mask=masks.Segments(ids), tokens=tokens, **options)

        of_gradients = lambda ids, *x: jax.grad(lambda x: of_call(ids, *x)[0].sum())(x)
        fn = jax.jit({"statistics": of_statistics, "gradients of blocks": of_gradients}.get(name, of_call))
        length = T if name == "batch" else t
        x = [jax.ShapeDtypeStruct((b, length, heads, H), jnp.float32) for heads in (N, K, K)]
        exported = jax.export.export(fn)(jax.ShapeDtypeStruct((length,), jnp.int32), *x)
        length = T if name == "batch" else 7  # which leaves a partial block
        here = [ids[:length], *qkv(T=length)]
        chex.assert_trees_all_close(exported.call(*here), fn(*here), atol=1e-5)

    @pytest.mark.slow_except("head dim")
    @pytest.mark.parametrize("query, key, options", [
        pytest.param("2, 8, n, 16", "2, 8, n, 16", {}, id="heads"),
        pytest.param("2, 8, 2*n, 16", "2, 8, n, 16", {"implementation": "blockwise"}, id="grouped"),
        pytest.param("2, 8, 6, d", "2, 8, 3, d", {"scale": 0.3}, id="head dim"),
        pytest.param("b, t, n, d", "b, t, n, d", {"scale": 0.3}, id="all"),
        pytest.param("b, 1, 3, 16", "b, 30000, 3, 16", {}, id="few queries of any batch"),
    ])  # fmt: skip
    def test_symbolic_heads_and_head_dims(self, query, key, options):
        sizes = {"b": 2, "t": 7, "n": 3, "d": 5}
        shapes = jax.export.symbolic_shape(f"{query}, {key}")
        q, k = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (shapes[:4], shapes[4:]))
        fn = lambda q, k: attend(q, k, k, **options)
        exported = jax.export.export(jax.jit(fn), platforms=PLATFORMS)(q, k)
        of = lambda text: [eval(size, sizes) for size in text.split(",")]
        rng = np.random.default_rng(0)
        q, k = (jnp.float32(rng.normal(size=of(text))) for text in (query, key))
        expected = jax.nn.dot_product_attention(q, k, k, scale=options.get("scale"))
        np.testing.assert_allclose(exported.call(q, k), expected, atol=1e-5)

    def test_a_default_scale_needs_a_head_dim(self):
        (d,) = jax.export.symbolic_shape("d")
        with pytest.raises(ValueError, match=r"head_dim is d, so 1 / sqrt\(head_dim\) is not known .*; pass scale="):
            jax.eval_shape(lambda x: attend(x, x, x), jax.ShapeDtypeStruct((1, 2, 3, d), jnp.float32))

    def test_symbolic_lengths_in_blocks_of_the_default_size(self):
        b, t = jax.export.symbolic_shape("b, t")
        x = jax.ShapeDtypeStruct((b, t, N, H), jnp.float32)
        fn = functools.partial(attend, is_causal=True, implementation="blockwise")
        exported = jax.export.export(jax.jit(fn), platforms=["cpu"])(x, x, x)
        assert "stablehlo.while" in exported.mlir_module()
        assert "blockwise skips empty blocks" in jattn.explain(x, x, x, is_causal=True, implementation="blockwise")

    @pytest.mark.parametrize("lengths", [None, np.array([30, 96])])
    def test_gradients_in_x64(self, lengths):
        def total(q, lengths):
            options = {"is_causal": True, "implementation": Blockwise((32, 32)), "key_value_seq_lengths": lengths}
            return attend(q, q, q, **options).sum()

        with jax.enable_x64(True):
            x = jnp.ones((2, 96, 4, 16), jnp.float32)
            text = jax.jit(jax.grad(total)).trace(x, lengths).lower(lowering_platforms=("tpu",)).as_text()
        assert "xf64>" not in text


class TestPlacement:
    def test_an_idle_device_costs_nothing(self):
        """With eight devices but all arrays on one, heads and sequences are still computed one at a time."""
        temporaries = {}
        for count in (1, 4):
            x = jax.ShapeDtypeStruct((count, 1024, count, 64), jnp.float32)
            fn = jax.jit(functools.partial(attend, is_causal=True, implementation="blockwise"))
            temporaries[count] = fn.lower(x, x, x).compile().memory_analysis().temp_size_in_bytes
        assert temporaries[4] < 4 * temporaries[1]  # for sixteen times as many heads

    def test_each_sequence_skips_its_own_blocks(self):
        computed = []

        def watched(score, b, h, q, kv):
            jax.debug.callback(lambda b, q, kv: computed.append(int(b)), b, q, kv)
            return score

        x, options = floats(2, 8, 1, 4), {"score_mod": watched, "implementation": Blockwise((4, 4))}
        attend(x, x, x, key_value_seq_lengths=np.array([4, 8]), **options)
        jax.effects_barrier()
        assert [computed.count(b) for b in (0, 1)] == [2 * 16, 4 * 16]

    @pytest.mark.slow_except("xla")
    @pytest.mark.parametrize("implementation", [SMALL, Decode(4), "xla"], ids=["blockwise", "decode", "xla"])
    def test_inside_shard_map_as_it_is(self, implementation):
        """With check_vma: values and gradients equal those of one device, also for replicated arrays."""
        mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))
        each, same = PartitionSpec("devices"), PartitionSpec()
        options = {"is_causal": True, "key_value_seq_lengths": jnp.array([7, 12]), "implementation": implementation}

        def loss(slopes, *arrays, lengths):
            more = options | {"key_value_seq_lengths": lengths, "score_mod": score_mods.Alibi(slopes)}
            return jnp.sin(attend(*arrays, **more))

        def sharded(slopes, *arrays):
            part = lambda slopes, lengths, *arrays: loss(slopes, *arrays, lengths=lengths)
            run = jax.shard_map(part, mesh=mesh, in_specs=(same, each, each, each, each), out_specs=each)
            return run(slopes, options["key_value_seq_lengths"], *arrays).sum()

        whole = lambda slopes, *arrays: loss(slopes, *arrays, lengths=options["key_value_seq_lengths"]).sum()
        args = jnp.asarray(ALIBI), *qkv()
        got, wanted = (jax.jit(jax.value_and_grad(fn, (0, 1, 2, 3)))(*args) for fn in (sharded, whole))
        chex.assert_trees_all_close(got, wanted, atol=2e-5)

    def test_divergence_of_arrays_with_explicit_axes(self):
        x = floats(4, 12, 4, 8)
        divergence = jax.jit(lambda x: heads.divergence(x, x, is_causal=True))
        wanted = divergence(x)
        mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
        with jax.set_mesh(mesh):
            there = jax.device_put(x, jax.sharding.NamedSharding(mesh, PartitionSpec("data", None, "heads")))
            result = divergence(there)
        chex.assert_trees_all_close(jax.tree.map(np.asarray, result), wanted, atol=1e-6)


POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots without batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "names": jax.checkpoint_policies.save_only_these_names(*NAMES),
    "all but a name": jax.checkpoint_policies.save_anything_except_these_names("another"),
}


class TestRemat:
    @staticmethod
    def compiled(policy, length=4096, heads=1):
        x = jax.ShapeDtypeStruct((1, length, heads, 16), jnp.float32)
        layer = lambda x: attend(jnp.sin(x), jnp.cos(x), x, is_causal=True, implementation="blockwise")
        fn = layer if policy is None else jax.checkpoint(layer, policy=policy)
        return jax.jit(jax.grad(lambda x: jnp.sum(fn(x) ** 2))).lower(x).compile()

    @pytest.mark.slow
    @pytest.mark.parametrize("heads", [1, 2])
    @pytest.mark.parametrize("names", [
        ("dots", "all but a name"),  # which keep most
        ("dots without batch", "nothing", "names"),
    ])  # fmt: skip
    def test_memory_under_every_policy(self, names, heads):
        memory = lambda policy: self.compiled(policy, heads=heads).memory_analysis().temp_size_in_bytes
        plain, *others = map(memory, (None, *(POLICIES[name] for name in names)))
        assert max(others) <= 2 * plain

    @pytest.mark.slow
    def test_kept_by_name_the_forward_pass_does_not_run_again(self):
        loops = [self.compiled(POLICIES[name]).as_text().count(" while(") for name in ("nothing", "names")]
        without = self.compiled(None).as_text().count(" while(")
        assert loops[1] == without < loops[0]


@contextlib.contextmanager
def counting_compilations():
    """A list of the programs compiled inside the context."""
    seen = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seen
    finally:
        jax.monitoring.clear_event_listeners()


EAGER = {
    "attention": lambda q, k, v, number: attend(q, k, v, scale=number, is_causal=True, implementation=SMALL),
    "dense": lambda q, k, v, number: attend(q, k, v, scale=number, key_value_seq_lengths=np.array([7, 12])),
    "a plain mask": lambda q, k, v, number: attend(q, k, v, mask=lambda b, h, q, kv: kv <= q + 1, implementation=SMALL),
    "decode": lambda q, k, v, number: attend(q[:, :1], k, v, scale=number, implementation=Decode(4)),
    "gradient": lambda q, k, v, number: jax.grad(
        lambda q: attend(q, k, v, score_mod=lambda s, b, h, i, j: jax.nn.relu(s), implementation=SMALL).sum()
    )(q),
    "fold": lambda q, k, v, number: jattn.fold_weights(lambda c, w, i, j: c + w.sum(), 0.0, q, k, scale=number),
    "statistics": lambda q, k, v, number: heads.statistics(q, k, scale=number, names=["entropy"]),
    "coarse": lambda q, k, v, number: heads.coarse_weights(q, k, 4, scale=number),
    "divergence": lambda q, k, v, number: heads.divergence(q, k, scale=number),
}


class TestEager:
    @pytest.mark.slow_except("dense")
    @pytest.mark.parametrize("name", EAGER)
    def test_the_second_call_compiles_nothing(self, name):
        arrays = qkv()
        first = jax.tree.leaves(EAGER[name](*arrays, 0.5))
        with counting_compilations() as seen:
            again = jax.tree.leaves(EAGER[name](*arrays, 0.5))
            EAGER[name](*arrays, 0.25)  # a number is an argument
        assert not seen
        chex.assert_trees_all_equal(first, again)

    @pytest.mark.slow
    def test_what_a_function_or_an_object_captures_may_change(self):
        class Stretch:
            """A callable that JAX knows nothing about."""

            by = 1.0

            def __call__(self, score, b, h, q, kv):
                return score * self.by

        stretch, arrays = Stretch(), qkv()
        for by in (1.0, 3.0):
            stretch.by = by
            for mod in (stretch, score_mods.then(stretch, score_mods.SoftCap(50.0))):
                result = attend(*arrays, score_mod=mod, implementation=SMALL)
                np.testing.assert_allclose(result, attend(*arrays, score_mod=mod), atol=1e-5)

    def test_fresh_functions_that_do_the_same_are_one_program(self):
        x = floats(1, 8, 1, 4)
        tables = [floats(8, seed=i) for i in range(20)]
        mods = [lambda s, b, h, q, kv, table=table: s + table[kv] for table in tables]
        attend(x, x, x, score_mod=mods[0], implementation=SMALL)
        with counting_compilations() as seen:
            results = [attend(x, x, x, score_mod=mod, implementation=SMALL) for mod in mods]
        assert not seen
        assert len({float(x.sum()) for x in results}) == len(mods)

    def test_without_jit(self):
        arrays = qkv()
        with jax.disable_jit():
            result = attend(*arrays, implementation=SMALL)
        np.testing.assert_array_equal(result, attend(*arrays, implementation=SMALL))

    def test_what_is_kept_is_bounded(self):
        assert deferred._compiled.cache_info().maxsize == deferred._jitted.cache_info().maxsize == deferred.PROGRAMS

    def test_infinities_within_are_no_errors(self):
        """jax_debug_infs checks the results of a program."""
        for options in {"is_causal": True}, {"mask": np.arange(T)[None, :] < 5}:
            with jax.debug_infs(True):
                result = attend(*qkv(), **options)
            np.testing.assert_array_equal(result, attend(*qkv(), **options))


def cube(platform, x, y):
    return x**3 * y


def marked(platform, args, cotangents, wanted):
    """Not the derivative, so that a test sees where it is used."""
    assert wanted == [0]  # y is not covered
    return [100.0 * cotangents[0]]


class TestByHand:
    def call(self, x, y):
        rules = deferred.CustomRules(cube, vjp=marked, count=1)
        return deferred.call(rules, x, y, out=jax.ShapeDtypeStruct((), jnp.float32))

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
    def test_is_the_first_reverse_derivative_in_its_own_operands(self, transform):
        dx, dy = transform(jax.grad(self.call, (0, 1)))(2.0, 3.0)
        assert (dx, dy) == (100.0, 8.0)

    def test_batched(self):
        dx = jax.vmap(jax.grad(self.call), (0, None))(jnp.arange(3.0), 3.0)
        np.testing.assert_array_equal(dx, [100.0] * 3)

    def test_other_derivatives_are_the_functions(self):
        np.testing.assert_allclose(self.call(2.0, 3.0), 24.0)
        np.testing.assert_allclose(jax.jvp(self.call, (2.0, 3.0), (1.0, 0.0))[1], 36.0)
        np.testing.assert_allclose(jax.jacfwd(jax.grad(self.call))(2.0, 3.0), 36.0)
        np.testing.assert_allclose(jax.vmap(jax.jacfwd(jax.grad(self.call)), (0, None))(jnp.arange(3.0), 3.0),
                                   [0.0, 18.0, 36.0])  # fmt: skip


def two(platform, x):
    return x**2, x**3


def which(platform, args, cotangents, wanted):
    """Not the derivative, but which of the results have cotangents."""
    return [jnp.float32((cotangents[0] is not None) + 10 * (cotangents[1] is not None))]


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.vmap])
def test_results_that_nothing_depends_on_have_no_cotangent(transform):
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    call = lambda x, fn: deferred.call(fn, x, out=(scalar, scalar))
    by_hand = deferred.CustomRules(two, vjp=which, count=1, results=2)
    x = jnp.full(3, 2.0) if transform is jax.vmap else 2.0
    uses = {1: lambda y: y[0], 10: lambda y: y[1], 11: sum, 0: lambda y: jnp.zeros(())}
    for expected, use in uses.items():
        result = transform(jax.grad(lambda x, use=use: use(call(x, by_hand))))(x)
        np.testing.assert_array_equal(result, np.full(np.shape(x), expected))
    for expected, use in ((4.0, uses[1]), (12.0, uses[10]), (16.0, sum)):
        result = transform(jax.grad(lambda x, use=use: use(call(x, two))))(x)
        np.testing.assert_allclose(result, np.full(np.shape(x), expected))
        second = transform(jax.jacfwd(jax.grad(lambda x, use=use: use(call(x, two)))))(x)
        np.testing.assert_allclose(second, np.full(np.shape(x), {4.0: 2.0, 12.0: 12.0, 16.0: 14.0}[expected]))


def test_settings_are_those_of_the_call():
    """The program is traced when it is lowered, but with the settings in effect at the call."""
    x = floats(1, 8, 1, 4)

    def fn(x):
        with jax.default_matmul_precision("highest"):
            return attend(x, x, x, implementation=SMALL)

    assert "HIGHEST" in jax.jit(fn).lower(x).as_text()
    assert "HIGHEST" not in jax.jit(lambda x: attend(x, x, x, implementation=SMALL)).lower(x).as_text()


class TestHeads:
    """``over_heads`` passes the index of each head."""

    @pytest.mark.slow_except("mask")
    @pytest.mark.parametrize("name", ["slopes", "mask", "dropout"])
    def test_lifted_options_differ_by_head(self, name):
        q, k, v = (x[0] for x in qkv())
        slot = {"slopes": {"score_mod": score_mods.Alibi(ALIBI)},
                "mask": {"mask": lambda b, h, q, kv: (q + kv + h) % 3 != 0},
                "dropout": {"dropout": (0.5, jax.random.key(0))}}[name]  # fmt: skip
        options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)} if name == "dropout" else slot
        lifted = jattn.over_heads(functools.partial(jattn.attend, **slot))
        (out, _), expected = jax.jit(lambda *qkv: (lifted(*qkv), attend(*qkv, **options)))(q, k, v)
        np.testing.assert_allclose(out, expected, atol=1e-6)

    def test_without_an_index_what_differs_is_refused(self):
        q, k, v = (x[0, :, 0] for x in qkv())
        with pytest.raises(ValueError, match="score_mod differs by head.* pass head="):
            jattn.attend(q, k, v, score_mod=score_mods.Alibi(ALIBI))
        with pytest.raises(ValueError, match="mask differs by batch.* pass batch="):
            jattn.attend(q, k, v, mask=masks.Padding(np.array([3, 4])))
        jax.eval_shape(lambda: jattn.attend(q, k, v, mask=masks.Causal(), score_mod=score_mods.SoftCap(2.0)))


DEBUGGING = {
    "checking_leaks": jax.checking_leaks, "debug_nans": lambda: jax.debug_nans(True), "disable_jit": jax.disable_jit,
    "enable_checks": lambda: jax.enable_checks(True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("mode", DEBUGGING)
@pytest.mark.parametrize("implementation", ["xla", "blockwise", "decode", pytest.param("native", marks=needs_native)])
def test_jaxs_debugging_modes(mode, implementation):
    """Forward, gradients and jvp, of what a score function captures, too."""

    def loss(x, slopes):
        by_slope = lambda s, b, h, q_idx, kv_idx: s * slopes[h]
        mod = score_mods.Alibi(slopes) if implementation == "native" else by_slope
        return attend(x, x, x, score_mod=mod, scale=slopes[0], is_causal=True, implementation=implementation).sum()

    arguments = floats(1, T, 2, H), jnp.float32([0.5, 0.25])
    gradient = jax.grad(loss, (0, 1))
    with DEBUGGING[mode]():
        value = loss(*arguments)
        gradients = jax.jit(gradient)(*arguments)
        same, tangent = jax.jit(lambda *x: jax.jvp(loss, x, x))(*arguments)
    np.testing.assert_allclose(same, value, rtol=1e-4)
    directional = sum(np.vdot(x, y) for x, y in zip(arguments, gradients, strict=True))
    np.testing.assert_allclose(tangent, directional, rtol=1e-3, atol=1e-3)


def has(ctx, path):
    try:
        operator.attrgetter(path)(ctx)
    except AttributeError:
        return False
    return True


def test_what_is_read_of_jax_is_there():
    """Names what a new JAX has moved: these attributes are not documented."""
    contexts, probe = [], Primitive("probe")
    probe.def_abstract_eval(lambda x: x)
    mlir.register_lowering(probe, lambda ctx, x: (contexts.append(ctx), [x])[1])
    mesh, by_sequence = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x")
    in_shard_map = jax.shard_map(probe.bind, mesh=mesh, in_specs=by_sequence, out_specs=by_sequence, check_vma=False)
    for fn in (probe.bind, in_shard_map):
        jax.jit(fn).lower(jnp.ones(2))
    wanted = ("num_devices", "device_assignment"), ("mesh.axis_names", "manual_axes")
    missing = [
        path
        for ctx, names in zip(contexts, wanted, strict=True)
        for path in (*deferred.OF_JAX.values(), *(f"{deferred.OF_JAX['axis_context']}.{name}" for name in names))
        if not has(ctx, path)
    ]
    assert not missing, f"JAX {jax.__version__} has no {missing} for a lowering rule; jattn._core.deferred reads them"
    assert not has(contexts[0], f"{deferred.OF_JAX['axis_context']}.manual_axes"), "which tells the two kinds apart"
