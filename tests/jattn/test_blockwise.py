"""Properties of blockwise beyond the conformance table: memory, composition, higher derivatives, reproducible bits."""

import functools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import blockwise, masks, score_mods
from jattn._core.attention import attend
from jattn._core.vmap import over_heads, sequential_vmap
from jattn.kernels.blockwise import Blockwise

T, S, H, D = 13, 17, 5, 3
SIZES = (4, 5)


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def head(T=T, S=S, H=H, D=D):
    return tuple(jnp.asarray(floats(*shape, seed=i)) for i, shape in enumerate([(T, H), (S, H), (S, D)]))


def compare(got, wanted, tolerance=1e-5):
    """Asserts equality up to ``tolerance`` times the largest expected number."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        scale = float(np.max(np.abs(y), initial=1e-3))
        np.testing.assert_allclose(np.asarray(x) / scale, np.asarray(y) / scale, rtol=0, atol=tolerance)


def loss(fn, **options):
    """A scalar of one head's output and log-sum-exp; ``options`` as in ``attend``."""

    def of(q, k, v):
        out, lse = fn(q, k, v, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0.0, lse)))

    return of


in_blocks = functools.partial(blockwise, block_sizes=SIZES)
OPTIONS = {
    "causal and soft cap": {"mask": masks.Causal(), "score_mod": score_mods.SoftCap(1.3)},
    "dropout": {"dropout": (0.3, jax.random.key(4)), "mask": masks.SlidingWindow(6, 2)},
}


@pytest.mark.slow
class TestOrders:
    @pytest.mark.parametrize("name", OPTIONS)
    def test_forward_mode_second_order_and_both_mixed(self, name):
        q, k, v = head()
        tangents = tuple(jnp.asarray(floats(*x.shape, seed=7)) for x in (q, k, v))

        def everything(fn):
            of = loss(fn, **OPTIONS[name])
            gradient = jax.grad(of, (0, 1, 2))
            _, along = jax.jvp(of, (q, k, v), tangents)
            _, hessian_vector = jax.jvp(gradient, (q, k, v), tangents)
            reverse_twice = jax.grad(lambda *x: sum(jnp.vdot(g, t) for g, t in zip(gradient(*x), tangents, strict=True)))  # fmt: skip
            return along, hessian_vector, reverse_twice(q, k, v)

        compare(jax.jit(lambda: everything(in_blocks))(), jax.jit(lambda: everything(attend))(), 3e-5)

    def test_hessian(self):
        q, k, v = head(T=3, S=5, H=2, D=2)
        of = [lambda q, fn=fn: loss(fn, mask=masks.Causal())(q, k, v) for fn in (in_blocks, attend)]
        compare(*(jax.jit(jax.hessian(one))(q) for one in of), 3e-5)

    def test_third_derivative(self):
        q, k, v = head(T=5, S=6, H=2, D=2)

        def along(fn):
            line = lambda s: loss(fn)(q * s, k, v)
            return jax.jit(jax.grad(jax.grad(jax.grad(line))))(1.0)

        compare(along(functools.partial(blockwise, block_sizes=(2, 4))), along(attend), 1e-4)


class TestComposition:
    @pytest.mark.slow
    def test_vmap_over_anything_and_grad_on_either_side(self):
        q, k, v = head()
        slopes, lengths = jnp.array([0.1, 0.5, 0.9]), jnp.array([3, 17, 9])

        def of(fn, q, slope, length, v):
            mod = lambda s, b, h, q_idx, kv_idx: s - slope * abs(q_idx - kv_idx)
            mask = lambda b, h, q_idx, kv_idx: kv_idx < length
            return loss(fn, score_mod=mod, mask=[masks.Causal(), mask])(q, k, v)

        queries = jnp.stack([q, 2 * q, -q])
        args = (queries, slopes, lengths, v)

        def both(fn):
            axes = (0, 0, 0, None)
            single = functools.partial(of, fn)
            inside = jax.vmap(jax.grad(single, (0, 1, 3)), axes)(*args)
            outside = jax.grad(lambda *x: jax.vmap(single, axes)(*x).sum(), (0, 1, 3))(*args)
            return inside, outside

        compare(jax.jit(lambda: both(in_blocks))(), jax.jit(lambda: both(attend))())

    @pytest.mark.slow
    def test_vmap_over_what_the_blocks_depend_on(self):
        """The table of blocks is then batched: a block that one element needs must not be skipped for another."""
        q, k, v = head()
        ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (3, S)), axis=1))

        def gradients(fn):
            of = lambda ids: jax.grad(loss(fn, mask=masks.Segments(ids[:T], ids)), (0, 1, 2))(q, k, v)
            return jax.vmap(of)(ids)

        compare(jax.jit(lambda: gradients(in_blocks))(), jax.jit(lambda: gradients(attend))())

    @pytest.mark.slow
    def test_checkpoint_inside_scan_over_layers(self):
        q, k, v = head(D=H)
        k, v = k[:T], v[:T]
        mods = jnp.array([0.3, 0.6])  # one temperature per layer, captured by the score function

        def gradients(fn):
            @jax.checkpoint
            def layer(x, temperature):
                mod = lambda s, b, h, q_idx, kv_idx: s * temperature
                return x + fn(x, k, v, score_mod=mod, mask=masks.Causal())[0], None

            return jax.grad(lambda x, mods: jnp.sum(jax.lax.scan(layer, x, mods)[0] ** 2), (0, 1))(q, mods)

        compare(jax.jit(lambda: gradients(in_blocks))(), jax.jit(lambda: gradients(attend))())

    @pytest.mark.slow
    @pytest.mark.parametrize("groups", [(2, 3), (3, 1)])
    def test_heads_one_by_one_or_together(self, groups):
        """On one CPU device, heads are computed one at a time; with the suite's eight devices, this is never chosen."""
        K, G = groups
        query, key, value = (jnp.asarray(floats(n, heads, dim, seed=5)) for n, heads, dim in ((T, K * G, H), (S, K, H), (S, K, D)))  # fmt: skip
        bias = jnp.asarray(floats(K * G, T, S))

        def results(lift):
            def one(q, k, v, head, bias, shared):
                out, lse = in_blocks(q, k, v, bias=bias * shared, head=head, mask=lambda b, h, q, kv: kv <= q + h)
                return jnp.sin(out), lse

            call = over_heads(one, (1, 1), lift=lift)
            of = lambda *x: call(*x[:3], jnp.arange(K * G), *x[3:])
            total = lambda *x: sum(jnp.sum(y) for y in of(*x))
            args = (query, key, value, bias, jnp.ones((1,)))
            return of(*args), jax.grad(total, tuple(range(5)))(*args)

        compare(jax.jit(lambda: results(sequential_vmap))(), jax.jit(lambda: results(jax.vmap))())

    def test_no_heads_one_by_one(self):
        call = over_heads(in_blocks, (1, 1), lift=sequential_vmap)
        out, lse = call(jnp.zeros((T, 0, H)), jnp.zeros((S, 1, H)), jnp.zeros((S, 1, D)))
        assert (out.shape, lse.shape) == ((T, 0, D), (T, 0))

    @pytest.mark.slow
    def test_sharded_batch_and_heads_need_no_gather(self):
        mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
        spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", None, "heads"))
        arrays = [jnp.asarray(floats(2, 16, 4, H, seed=i)) for i in range(3)]
        ids = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 3, (2, 16)), axis=1))

        def of(q, k, v, ids):
            mask = masks.Causal() & masks.Segments(ids)
            return jnp.sum(jnp.sin(jattn.dot_product_attention(q, k, v, mask=mask, implementation="blockwise")))

        step = jax.jit(jax.value_and_grad(of, (0, 1, 2)))
        sharded = [jax.device_put(x, spec) for x in arrays]
        text = step.lower(*sharded, ids).compile().as_text()
        assert "all-gather" not in text and "all-to-all" not in text
        compare(step(*sharded, ids), step(*arrays, ids))


@pytest.mark.slow
class TestMemory:
    """XLA's own figures for temporary memory, besides inputs and outputs; nothing is run."""

    def temporaries(self, length, what, heads=1, **options):
        x = jax.ShapeDtypeStruct((1, length, heads, 64), jnp.float32)
        bias = options.pop("bias", None)
        args = [x, x, x] if bias is None else [x, x, x, jax.ShapeDtypeStruct(bias, jnp.float32)]

        def of(q, k, v, bias=None):
            out = jattn.dot_product_attention(q, k, v, bias, implementation="blockwise", **options)
            return jnp.sum(jnp.sin(out))

        fn = jax.grad(of, tuple(range(len(args))))
        if what == "hessian-vector":
            gradient = fn
            fn = lambda *x: jax.jvp(gradient, x[: len(x) // 2], x[len(x) // 2 :])
            args = args * 2
        return jax.jit(fn).lower(*args).compile().memory_analysis().temp_size_in_bytes

    @pytest.mark.parametrize("what, limit", [("gradient", 80), ("hessian-vector", 160)])
    def test_grows_with_the_length_and_not_its_square(self, what, limit):
        at = {n: self.temporaries(n, what, is_causal=True) for n in (8192, 32768)}
        assert at[32768] <= limit * 2**20 and math.log(at[32768] / at[8192]) / math.log(4) <= 1.05

    @pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the XLA of older versions plans 15 MiB more")
    def test_holds_four_arrays_of_the_length_at_once(self):
        """Key and value, transposed, and the cotangent of the output with the output or with a block; a block is 4 MiB."""
        array = 32768 * 64 * 4
        assert self.temporaries(32768, "gradient") <= 4 * array + 2 * 2**20

    def test_where_the_blocks_are_known_only_when_it_runs(self):
        lengths = np.array([5000])
        traced = lambda n: self.temporaries(n, "gradient", mask=lambda b, h, q, kv: kv < jnp.asarray(lengths)[b])
        assert traced(16384) <= 60 * 2**20

    def test_the_gradient_of_a_bias_is_summed_block_by_block(self):
        n = 8192
        few, many = (self.temporaries(n, "gradient", heads=heads, bias=(1, 1, n, n)) for heads in (1, 4))
        assert many - few < 1.5 * n * n * 4  # their sum takes one more; a gradient for each head would take three


@pytest.mark.bits
def test_bits_are_the_same_from_run_to_run():
    arrays = [jnp.asarray(floats(1, 33, 2, 8, seed=i)) for i in range(3)]
    table = jnp.asarray(floats(8, 2))

    def of(q, k, v, table):
        mod = score_mods.RelativeBias(table, max_distance=16)
        return jnp.sum(jattn.dot_product_attention(q, k, v, score_mod=mod, implementation="blockwise") ** 2)

    step = jax.jit(jax.value_and_grad(of, (0, 1, 2, 3)))
    first, second = step(*arrays, table), step(*arrays, table)
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.bits
def test_asking_for_the_lse_changes_no_bit():
    arrays = [jnp.asarray(floats(1, 45, 2, 8, seed=i)) for i in range(3)]
    call = functools.partial(jattn.dot_product_attention, implementation="blockwise", is_causal=True)
    alone = jax.jit(call)(*arrays)
    beside, _ = jax.jit(functools.partial(call, return_residual=True))(*arrays)
    np.testing.assert_array_equal(alone, beside)


@pytest.mark.parametrize("jitted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_one_shape_compiles_once(jitted, caplog):
    """Also eagerly; otherwise a loop would compile at every call."""
    arrays = [jnp.asarray(floats(1, 19, 2, 7, seed=i)) for i in range(3)]
    mask, mod = masks.Causal() | masks.Prefix(3), score_mods.SoftCap(2.0)
    call = lambda q, k, v: jattn.dot_product_attention(q, k, v, mask=mask, score_mod=mod, implementation="blockwise")
    call = jax.jit(call) if jitted else call
    call(*arrays)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for i in range(100):
            call(arrays[0] * 1.0, *arrays[1:]) if i else call(*arrays)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Finished XLA compilation")]
    assert not [text for text in compiled if "multiply" not in text], compiled


@pytest.mark.slow
def test_a_plain_function_is_asked_again_at_every_eager_call():
    """A captured value may have changed since the function was compiled."""
    arrays = [jnp.asarray(floats(1, 9, 2, 4, seed=i)) for i in range(3)]
    temperature = 1.0
    mod = lambda score, b, h, q_idx, kv_idx: score * temperature
    results = []
    joined = score_mods.then(mod, score_mods.SoftCap(9.0))
    for implementation in ("blockwise", "xla"):
        for value in (1.0, 0.0):
            temperature = value
            call = functools.partial(jattn.dot_product_attention, *arrays, implementation=implementation)
            results += [call(score_mod=mod), call(score_mod=joined)]
    compare(results[:4], results[4:])
    assert temperature == 0.0 and not np.allclose(results[0], results[2])


def test_one_query_is_no_long_sequence():
    q, k = jnp.zeros((1, 1, 1, 4)), jnp.zeros((1, 2**20, 1, 4))
    assert jattn.explain(q, k, k, platform="gpu").startswith("xla: taken")
    assert jattn.explain(k, q, q, platform="gpu").startswith("xla: taken")
    assert jattn.explain(k[:, :1024], k[:, :1024], k[:, :1024], platform="gpu").startswith("blockwise: taken")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_sixteen_bits_err_at_most_twice_as_much_as_dense(dtype):
    query, key, value = (jnp.asarray(floats(1, n, 3, 16, seed=i), dtype) for i, n in enumerate((61, 83, 83)))

    def results(implementation, *arrays):
        call = functools.partial(jattn.dot_product_attention, is_causal=True, implementation=implementation)
        of = lambda *x: jnp.sum(jnp.sin(call(*x).astype(jnp.float64 if jax.config.jax_enable_x64 else jnp.float32)))
        return call(*arrays), *jax.grad(of, (0, 1, 2))(*arrays)

    with jax.enable_x64(True):
        exact = results("xla", *(jnp.asarray(np.asarray(x, np.float64)) for x in (query, key, value)))
    of_both = (results(name, query, key, value) for name in ("xla", "blockwise"))
    for dense, blocks, wanted in zip(*of_both, exact, strict=True):
        errors = [np.abs(np.asarray(x, np.float64) - np.asarray(wanted)).max() for x in (blocks, dense)]
        assert errors[0] <= 2 * errors[1]


@pytest.mark.slow
def test_what_it_captures_gets_its_gradient():
    """A closure captures tables, slopes, a temperature and a whole bias at once."""
    q, k, v = head()
    params = {"table": jnp.asarray(floats(30)), "cap": jnp.float32(1.7), "bias": jnp.asarray(floats(T, S))}
    offsets = np.arange(30)  # also captured, but not a float

    def gradients(fn):
        def of(params):
            def mod(score, b, h, q_idx, kv_idx):
                score = params["cap"] * jnp.tanh(score / params["cap"]) + params["bias"][q_idx, kv_idx]
                return score + params["table"][jnp.asarray(offsets)[abs(q_idx - kv_idx)]]

            return loss(fn, score_mod=mod, mask=masks.SlidingWindow(5, 4))(q, k, v)

        return jax.jit(jax.grad(of))(params)

    compare(gradients(in_blocks), gradients(attend))


SQUARE = np.zeros((1, 1, 1024, 1024), bool)
SQUARE[..., 300:400, :30] = True  # rows 0 to 255 of its block are in no piece
CUT = {
    "causal": {"is_causal": True},
    "all options": {
        "is_causal": True, "bias": floats(1, 2, 1024, 1024), "score_mod": score_mods.SoftCap(2.0),
        "dropout_rate": 0.2, "dropout_rng": jax.random.key(1), "query_seq_lengths": np.array([900]),
    },
    "rows in no piece": {"mask": masks.Dense(SQUARE)},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CUT)
def test_blocks_that_are_cut_into_pieces(name):
    """Values, lse and gradients of blocks of 512, cut into pieces of 256, compared with the dense formula."""
    query, key, value, g = (floats(1, 1024, n, 4, seed=i) for i, n in enumerate((2, 1, 1, 2)))

    def results(implementation):
        options = CUT[name] | {"implementation": implementation, "return_residual": True}
        attend = functools.partial(jattn.dot_product_attention, **options)

        @jax.jit
        def of(*qkv):
            (out, lse), pull = jax.vjp(attend, *qkv)
            seen = lse > -jnp.inf
            return (out, jnp.where(seen, lse, 0.0)), seen, pull((g, jnp.where(seen, 1.0, 0.0)))

        return of(query, key, value)

    got, wanted = results(Blockwise((512, 512))), results("xla")
    np.testing.assert_array_equal(got[1], wanted[1])
    compare((got[0], got[2]), (wanted[0], wanted[2]), 2e-5)


# Recipes, built in the test: jattn's classes are type-checked by sampling, and Hypothesis forbids other randomness.
IDS = [np.sort(np.random.default_rng(seed).integers(0, 4, 40)) for seed in range(8)]
MASKS = st.recursive(
    st.one_of(
        st.just(lambda: masks.Causal()),
        st.tuples(st.integers(0, 9), st.integers(0, 4)).map(lambda sides: lambda: masks.SlidingWindow(*sides)),
        st.integers(0, 12).map(lambda length: lambda: masks.Prefix(length)),
        st.integers(0, 7).map(lambda which: lambda: masks.Segments(IDS[which])),
        st.integers(2, 4).map(lambda m: lambda: lambda b, h, q, kv: (q + kv) % m != 0),
    ),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: lambda: masks.and_masks(pair[0](), pair[1]())),
        st.tuples(inner, inner).map(lambda pair: lambda: masks.or_masks(pair[0](), pair[1]())),
        inner.map(lambda one: lambda: ~masks.and_masks(one())),
    ),
    max_leaves=3,
)
MODS = st.one_of(
    st.none(),
    st.just(score_mods.SoftCap(1.5)),
    st.just(score_mods.Alibi(np.array([0.25], np.float32))),
    st.just(score_mods.then(score_mods.Alibi(np.array([0.5], np.float32)), score_mods.SoftCap(2.0))),
)


@pytest.mark.slow
@hypothesis.settings(max_examples=25, phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
@hypothesis.given(
    T=st.integers(1, 18), S=st.integers(1, 18), sizes=st.tuples(st.integers(1, 7), st.integers(1, 7)), mask=MASKS, mod=MODS
)  # fmt: skip
def test_any_shape_mask_score_function_and_blocks(T, S, sizes, mask, mod):
    """Values, lse and gradients, compared with the dense formula in float64."""
    arrays, mask = head(T=T, S=S, H=4, D=3), mask()
    fn = functools.partial(blockwise, block_sizes=sizes)

    def results(fn, arrays):
        options = {"mask": mask, "score_mod": mod, "head": 0}
        of = loss(fn, **options)
        return fn(*arrays, **options), jax.grad(of, (0, 1, 2))(*arrays)

    got = jax.jit(functools.partial(results, fn))(arrays)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(x, np.float64)) for x in arrays]
        wanted = jax.tree.map(np.asarray, jax.jit(functools.partial(results, attend))(exact))
    (out, lse), gradients = got
    (exact_out, exact_lse), exact_gradients = wanted
    np.testing.assert_array_equal(lse == -np.inf, exact_lse == -np.inf)
    finite = lambda lse: np.where(lse == -np.inf, 0, lse)
    compare([out, finite(lse), gradients], [exact_out, finite(exact_lse), exact_gradients], 2e-5)
