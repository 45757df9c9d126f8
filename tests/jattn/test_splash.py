"""What the conformance table cannot ask of splash: several blocks, other derivatives, traced masks, what is lowered.

The kernels run in Pallas's interpreter, so shapes are a few blocks of 128.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, score_mods
from jattn._core.arguments import make_call
from jattn._core.vmap import canonical
from jattn.kernels.dispatch import IMPLEMENTATIONS
from jattn.kernels.splash import Splash, default_block_sizes
from jattn.kernels.splash.jax_splash import make_kernel

INTERPRETED = Splash((128, 128), interpret=True)
RNG = np.random.default_rng(0)


def floats(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), dtype)


def qkv(B=1, T=130, S=130, N=2, K=2, H=4, D=4, dtype=jnp.float32):
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, D)
    return tuple(floats(*shape, seed=seed, dtype=dtype) for seed, shape in enumerate(shapes))


def attend(*arrays, implementation=INTERPRETED, **options):
    return jattn.dot_product_attention(*arrays, **options, implementation=implementation, return_residual=True)


def loss(out, lse):
    weights = [floats(*x.shape, seed=seed) for seed, x in enumerate((out, lse), 7)]
    parts = out.astype(jnp.float32), jnp.where(lse == -jnp.inf, 0.0, lse)
    return sum(jnp.sum(x * w) for x, w in zip(parts, weights, strict=True))


def results(arrays, implementation, **options):
    def of(*arrays):
        found = attend(*arrays, implementation=implementation, **options)
        return loss(*found), found

    (_, found), gradients = jax.jit(jax.value_and_grad(of, (0, 1, 2), has_aux=True))(*arrays)
    return *found, *gradients


def assert_same(got, expected, tolerance=1e-5):
    for x, y, name in zip(got, expected, ("out", "lse", "query", "key", "value"), strict=False):
        assert not np.isnan(x).any(), name
        x, y = np.asarray(x, np.float32), np.asarray(y, np.float32)
        np.testing.assert_allclose(x, y, rtol=0, atol=tolerance * np.abs(y[np.isfinite(y)]).max(initial=1), err_msg=name)  # fmt: skip


IDS = np.sort(np.random.default_rng(1).integers(0, 3, (1, 300)), axis=1)
BY_HEAD = RNG.random((4, 130, 260)) < 0.1
BY_HEAD[0, :, 130:] = False  # the other query heads of its key head see these keys
BLOCKS = {
    "causal, T < S, grouped": ({"is_causal": True}, {"T": 140, "S": 300, "N": 4}),
    "causal, T > S, one kv head": ({"is_causal": True}, {"T": 300, "S": 140, "K": 1}),
    "window, its grid shrunk": ({"local_window_size": (30, 5)}, {"T": 390, "S": 390}),
    "prefix language model": ({"mask": masks.Causal() | masks.Prefix(150)}, {"T": 270, "S": 270}),
    "window without a prefix: rows that see nothing": ({"mask": masks.SlidingWindow(9, 1) & ~masks.Prefix(140)}, {"T": 270, "S": 270}),
    "segments and causal": ({"mask": masks.Segments(IDS) & masks.Causal()}, {"T": 300, "S": 300}),
    "segments shared by two sequences, keys of their own": ({"mask": masks.Segments(IDS[0, :140], IDS[0])}, {"B": 2, "T": 140, "S": 300}),
    "segments with ids at both ends of int32, and lengths": (
        {"mask": masks.Segments(np.array([-(2**31), 2**31 - 2, 2**31 - 1])[IDS]), "key_value_seq_lengths": np.array([200]), "query_seq_lengths": np.array([290])},
        {"T": 300, "S": 300}),
    "two segments": ({"mask": masks.Segments(IDS) & masks.Segments(IDS[0] % 2)}, {"T": 300, "S": 300}),
    "both lengths and causal": ({"is_causal": True, "query_seq_lengths": np.array([100, 140]), "key_value_seq_lengths": np.array([131, 0])},
        {"B": 2, "T": 140, "S": 270}),
    "padding and lengths": ({"mask": masks.Padding(np.array([100])), "key_value_seq_lengths": np.array([129, 70])}, {"B": 2, "S": 140}),
    "table by head, grouped": ({"mask": masks.Dense(BY_HEAD)}, {"S": 260, "N": 4}),
    "function of the head": ({"mask": lambda b, h, q, kv: (q - kv) % (h + 5) == 0}, {"S": 260, "K": 1}),
    "soft cap": ({"score_mod": score_mods.SoftCap(0.7), "scale": 2.0}, {"T": 140}),
    "bfloat16": ({"is_causal": True, "scale": 0.5}, {"dtype": jnp.bfloat16}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", BLOCKS)
def test_values_lse_and_gradients_of_several_blocks(name):
    options, shape = BLOCKS[name]
    arrays = qkv(**shape)
    got, expected = (results(arrays, by, **options) for by in (INTERPRETED, "xla"))
    assert_same(got, expected, 0.02 if name == "bfloat16" else 1e-5)
    blind = np.asarray(expected[1]) == -np.inf
    np.testing.assert_array_equal(np.asarray(got[1]) == -np.inf, blind)
    assert not np.asarray(got[0])[blind].any() and not np.asarray(got[2])[blind].any()
    assert blind.any() == (name in BLIND)


BLIND = {"window without a prefix: rows that see nothing", "segments with ids at both ends of int32, and lengths", "both lengths and causal"}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"is_causal": True},  # the keys from 140 on
    {"is_causal": True, "query_seq_lengths": np.array([100])},
    {"mask": masks.Causal() & masks.Segments(np.arange(140) // 70, np.arange(300) // 70 + 1)},
], ids=["static", "lengths", "segments"])  # fmt: skip
def test_what_nobody_sees_may_be_nan(options):
    query, key, value = qkv(T=140, S=300)
    seen = np.asarray(jattn.attention_weights(query, key, **options) > 0)
    keys, queries = seen.any((1, 2))[0], seen.any((1, 3))[0]
    assert not keys.all()
    fill = lambda x, kept: jnp.where(jnp.asarray(kept)[None, :, None, None], x, np.nan)
    given = fill(query, queries), fill(key, keys), fill(value, keys)
    clean = results((query, key, value), INTERPRETED, **options)
    for got, expected, kept in zip(results(given, INTERPRETED, **options), clean, [queries] * 3 + [keys] * 2, strict=True):  # fmt: skip
        np.testing.assert_array_equal(got, expected)
        assert not np.asarray(got)[:, ~kept][np.isfinite(np.asarray(got)[:, ~kept])].any()


@pytest.mark.slow
def test_a_nan_that_one_row_sees_shows():
    query, key, value = qkv(T=140, S=140)
    ids = np.arange(140) // 70
    out, _ = attend(query, key.at[0, 100].set(np.nan), value, mask=masks.Segments(ids))
    assert np.isnan(out[0, 70:]).all()


def test_no_visible_pair_at_all():
    out, lse, *gradients = results(qkv(), INTERPRETED, mask=masks.Prefix(0))
    assert not np.asarray(out).any() and (np.asarray(lse) == -np.inf).all()
    assert not any(np.asarray(x).any() for x in gradients)


@pytest.mark.slow
def test_the_cotangent_of_the_lse_alone():
    arrays = qkv(T=140, S=260, K=1)
    gradient = lambda by: jax.jit(jax.grad(lambda *x: jnp.sum(attend(*x, implementation=by, is_causal=True)[1] ** 2), (0, 1, 2)))(*arrays)  # fmt: skip
    got, expected = gradient(INTERPRETED), gradient("xla")
    assert_same(got, expected)
    assert np.asarray(got[0]).any() and not np.asarray(got[2]).any()


@pytest.mark.slow
def test_forward_mode_and_products_with_the_hessian():
    """By the blockwise rule, from splash's output and lse."""
    arrays = qkv(T=140, S=140, K=1)
    along = tuple(floats(*x.shape, seed=9) for x in arrays)

    def products(by):
        fn = lambda *x: loss(*attend(*x, implementation=by, is_causal=True))
        tangent = jax.jvp(fn, arrays, along)[1]
        return tangent, *jax.jvp(jax.grad(fn, (0, 1, 2)), arrays, along)[1]

    assert_same(*(jax.jit(functools.partial(products, by))() for by in (INTERPRETED, "xla")), 1e-4)


@pytest.mark.slow
def test_the_cotangent_of_a_traced_scale():
    arrays = qkv()
    gradient = lambda by: jax.jit(jax.grad(lambda scale: loss(*attend(*arrays, implementation=by, is_causal=True, scale=scale))))(0.3)  # fmt: skip
    np.testing.assert_allclose(gradient(INTERPRETED), gradient("xla"), rtol=1e-4)


@pytest.mark.slow
def test_traced_lengths_and_ids_under_vmap_and_x64():
    arrays, ids = qkv(B=2, T=140, S=140), jnp.asarray(np.arange(280, dtype=np.int32).reshape(2, 140) // 90)
    options = lambda n, ids: {"mask": masks.Segments(ids) & masks.Causal(), "key_value_seq_lengths": n[None]}

    def each(by):
        of_one = lambda q, k, v, n, ids: attend(q[None], k[None], v[None], implementation=by, **options(n, ids))
        return jax.jit(jax.vmap(of_one))(*arrays, jnp.array([50, 140]), ids)

    with jax.enable_x64(True):
        assert_same(each(INTERPRETED), each("xla"))


@pytest.mark.slow
def test_on_each_device_of_a_mesh():
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    arrays = qkv(B=2, T=20, S=20, N=4, K=2)
    ids = np.stack([np.arange(20) // 7, np.arange(20) // 4])
    options = {"mask": masks.Segments(ids) & (lambda b, h, q, kv: kv <= q)}
    spec = jax.sharding.NamedSharding(mesh, jax.P("batch", None, "heads", None))
    with jax.set_mesh(mesh):
        got = results([jax.device_put(x, spec) for x in arrays], INTERPRETED, **options)
        with pytest.raises(jattn.Unsupported, match="differs by head"):
            attend(*(jax.device_put(x, spec) for x in arrays), mask=lambda b, h, q, kv: kv <= q + h)
    assert_same(got, results(arrays, "xla", **options))


def request_of(B=2, T=7, S=11, N=4, K=2, H=8, D=8, dtype=jnp.float32, **options):
    return make_call(*qkv(B, T, S, N, K, H, D, dtype), **options)


@pytest.mark.slow
def test_refuses_more_blocks_than_scalar_memory_holds():
    few, many = (jax.ShapeDtypeStruct((1, length, 1, 128), jnp.bfloat16) for length in (2**18, 2**19))
    assert "splash: taken on TPU" in jattn.explain(few, few, few, is_causal=True, platform="tpu")
    assert "splash: it takes at most 262144 blocks" in jattn.explain(many, many, many, is_causal=True, platform="tpu")


def test_refuses_traced_masks():
    reasons = []

    def ask(table, length, ids):
        captures = lambda b, h, q, kv: kv < length
        for mask in (masks.Dense(table), masks.Prefix(length), captures, masks.Segments(ids[:7], ids)):
            reasons.append(INTERPRETED.unsupported_reason(request_of(mask=mask & masks.Causal())))

    jax.eval_shape(ask, jnp.ones((7, 11), bool), jnp.int32(3), jnp.zeros(11, int))
    *traced, ids = reasons
    assert len(traced) == 3 and all("must be known while tracing" in reason for reason in traced)
    assert ids is None


@pytest.mark.parametrize("sizes", [(128, 100), (0, 128)])
def test_refuses_block_sizes(sizes):
    with pytest.raises(ValueError, match="two positive multiples of 128"):
        Splash(sizes)


def test_needs_a_tpu():
    with pytest.raises(jattn.Unsupported, match="'splash' cannot do this: it needs a TPU, not cpu"):
        jax.jit(functools.partial(attend, implementation="splash"))(*qkv())
    text = jattn.explain(*qkv(), implementation="splash")
    assert text.startswith("splash: taken by name")
    assert "splash: also possible, by name" in jattn.explain(*qkv())


@pytest.mark.parametrize("T", [1, 128, 129, 512, 513, 1000, 8191, 8192])
def test_block_sizes(T):
    rows, columns = default_block_sizes(T, 640, 64)
    assert rows % 128 == 0 and rows <= 512 and columns == 384
    blocks = -(-T // rows)
    assert blocks == -(-T // 512) and blocks * rows - T < 128 * blocks
    assert default_block_sizes(T, 640, 512)[0] <= 256


def blocks_of(T, S, **options):
    """The forward kernel's table of blocks: 0 is skipped. Its width is what the grid was shrunk to."""
    shape = {name: options.pop(name) for name in ("B",) if name in options}
    plans = []
    trace = lambda *arrays: plans.append(INTERPRETED._plan(canonical(make_call(*arrays, **options))))
    jax.eval_shape(trace, *qkv(T=T, S=S, N=1, K=1, **shape))
    return np.asarray(make_kernel(plans[0], 1).fwd_mask_info.block_mask)[0]


def test_empty_blocks_are_skipped():
    assert (blocks_of(512, 512, mask=masks.Causal()) > 0).sum() == 10
    assert blocks_of(512, 512, mask=masks.SlidingWindow(100)).shape == (4, 2)
    assert (blocks_of(512, 512) > 0).all()
    halves = masks.Segments(np.arange(512) // 256)
    assert blocks_of(512, 512, mask=halves).shape == (4, 2)  # known ids empty blocks, too
    assert (blocks_of(512, 512, B=1, mask=halves & masks.Causal()) > 0).sum() == 6
    assert blocks_of(512, 512, B=2, key_value_seq_lengths=np.array([100, 200])).shape == (4, 2)
    table = np.zeros((512, 512), bool)
    table[:, 130] = True
    assert (blocks_of(512, 512, mask=masks.Dense(table)) == 1).sum() == 4


def test_masks_compare_by_value():
    """An eager call compiles once, and never takes another mask's program."""
    plan = lambda mask: INTERPRETED._plan(canonical(request_of(T=200, S=200, mask=mask)))
    table, other = np.eye(200, dtype=bool), np.eye(200, dtype=bool) | np.eye(200, k=1, dtype=bool)
    for first, second in ((masks.Causal(), masks.SlidingWindow(3)), (masks.Dense(table), masks.Dense(other))):
        assert plan(first) == plan(first) and hash(plan(first)) == hash(plan(first))
        assert plan(first) != plan(second)
    assert plan(masks.Dense(table)) == plan(masks.Dense(table.copy()))
    captured = [3]
    window = lambda b, h, q, kv: kv < captured[0]
    before = plan(window)
    captured[0] = 4
    assert before != plan(window)
    ids = np.arange(200)  # of an eager call: an argument of its program
    assert plan(masks.Segments(ids)) == plan(masks.Segments(ids // 128))


def lowered(fn, *arrays):
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
    return jax.jit(fn).trace(*types).lower(lowering_platforms=("tpu",)).as_text()


def test_lowered_for_a_tpu_it_is_a_kernel_each_way():
    options = {"implementation": "splash", "is_causal": True}
    arrays = qkv(T=600, S=600, H=64, D=64, dtype=jnp.bfloat16)
    text = lowered(lambda *x: attend(*x, **options), *arrays)
    assert text.count("tpu_custom_call") == 1 and "stablehlo.dot_general" not in text
    gradient = jax.grad(lambda *x: loss(*attend(*x, **options)), (0, 1, 2))
    text = lowered(gradient, *arrays)
    assert text.count("tpu_custom_call") == 3 and "splash_mha_dkv" in text and "splash_mha_dq" in text
    assert "stablehlo.dot_general" not in text


def test_is_exported_for_a_tpu():
    fn = jax.jit(lambda *x: attend(*x, implementation="splash", is_causal=True)[0])
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in qkv(T=200, S=200)]
    assert "tpu_custom_call" in jax.export.export(fn, platforms=["tpu"])(*types).mlir_module()


def test_is_chosen_by_name_only():
    assert list(IMPLEMENTATIONS).index("splash") > list(IMPLEMENTATIONS).index("xla")
