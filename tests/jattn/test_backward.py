"""Blockwise attention by the accelerators' rule, on CPU: products of the inputs' own dtype, all heads in every step."""

import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir

import jattn
from jattn import masks, score_mods
from jattn._blocks.backward import balanced
from jattn._core import deferred
from jattn._core.arguments import make_call
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.cudnn import Cudnn
from jattn.kernels.native import Native
from jattn.kernels.pallas_gpu import OLDEST
from jattn.kernels.pallas_gpu.interpreted import Interpreted
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.splash import Splash
from jattn.sharding import HeadParallel, Ring, SplitKeys, Ulysses
from tests.jattn.cudnn_in_place import fused

B, T, S, N, K, H, D = 2, 13, 17, 4, 2, 5, 3
SMALL = Blockwise((256, 256))
needs_native = pytest.mark.skipif(importlib.util.find_spec("jattn_native") is None, reason="needs jattn-native")


@pytest.fixture(params=["tpu", "cuda"])
def accelerator(request):
    """Programs for this machine's CPU are traced as for a TPU or a GPU."""

    def lower_as(platform):
        mlir.register_lowering(deferred.primitive(), functools.partial(deferred._lower, platform), platform="cpu")
        jax.clear_caches()
        deferred._compiled.cache_clear()

    lower_as(request.param)
    yield
    lower_as("cpu")


def floats(*shape, seed=0, dtype=np.float32):
    return jnp.asarray(np.random.default_rng([*np.ravel(seed), *shape]).normal(size=shape).astype(np.float32), dtype)


@functools.partial(jax.jit, static_argnums=0)
def _outputs_and_gradients(attend, q, k, v, g):
    out, pull = jax.vjp(attend, q, k, v)
    return out, *pull(g)


def outputs_and_gradients(implementation, arrays, **options):
    attend = functools.partial(jattn.dot_product_attention, implementation=implementation, **options)
    return _outputs_and_gradients(lambda *qkv: attend(*qkv), *arrays)


OPTIONS = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window and soft cap": {"mask": masks.SlidingWindow(6, 2), "score_mod": score_mods.SoftCap(1.3)},
    "bias and lengths": {"bias": floats(1, N, T, S), "key_value_seq_lengths": np.array([9, 17])},
    "rows that see nothing": {"query_seq_lengths": np.array([3, 13]), "is_causal": True},
    "dropout": {"dropout_rate": 0.3, "dropout_rng": jax.random.key(4)},
    "positions": {"query_positions": np.arange(T)[::-1].copy(), "is_causal": True, "scale": 0.3},
    "plain function": {"mask": lambda b, h, q, kv: (q + kv + h + b) % 3 != 0},
}


@pytest.mark.slow_except("cuda-window and soft cap")
@pytest.mark.parametrize("name", OPTIONS)
def test_same_as_dense(accelerator, name):
    arrays = floats(B, T, N, H), floats(B, S, K, H, seed=1), floats(B, S, K, D, seed=2), floats(B, T, N, D, seed=3)
    result = outputs_and_gradients(Blockwise((4, 5)), arrays, **OPTIONS[name])
    wanted = outputs_and_gradients("xla", arrays, **OPTIONS[name])
    for x, y in zip(result, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2e-5 * float(jnp.abs(y).max()))


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_bfloat16_are_as_exact_as_dense(accelerator, causal):
    """Each block's gradients are added up in float32 and rounded once."""
    arrays = [floats(1, 512, 2, 32, seed=i) for i in range(4)]
    arrays = [x.astype(jnp.bfloat16) for x in arrays]
    exact = outputs_and_gradients("xla", [x.astype(jnp.float32) for x in arrays], is_causal=causal)
    result = outputs_and_gradients(Blockwise((64, 64)), arrays, is_causal=causal)
    dense = outputs_and_gradients("xla", arrays, is_causal=causal)
    for x, y, z in zip(result[1:], dense[1:], exact[1:], strict=True):
        x, y = (float(jnp.linalg.norm(a.astype(jnp.float32) - z)) for a in (x, y))
        assert x <= y


ROUNDED = (132, 20, 64)  # T, S and H
# What has a gradient: the options of a call that take it, and its value.
CAPTURED = {
    "slope": (lambda x: {"score_mod": score_mods.Alibi(x)}, np.array([0.5])),
    "table": (lambda x: {"score_mod": score_mods.RelativeBias(x)}, np.linspace(-1, 1, 8)[:, None]),
    "bias": (lambda x: {"bias": x}, np.zeros((1, 1, 1, ROUNDED[1]))),
    "scale": (lambda x: {"scale": x}, np.array(0.1)),
}


@functools.cache
def errors_in_16_bits(implementation, dtype, captured, draws=12):
    """The relative errors of its gradient, for random arrays; those of dense attention in float64 would be zero."""
    (T, S, H), (options, value) = ROUNDED, CAPTURED[captured]

    def attend(x, q, k, v, implementation):
        return jattn.dot_product_attention(q, k, v, implementation=implementation, **options(x))

    @jax.jit
    def forward(x, *arrays):
        return jax.vjp(lambda x: attend(x, *arrays, implementation), x)

    @jax.jit
    def exact(x, *arrays):
        return jax.grad(lambda x: (attend(x, *arrays[:3], "xla") * arrays[3]).sum())(x)

    # Two programs: in one, XLA may leave out the rounding of the output.
    backward = jax.jit(lambda pull, g: pull(g)[0])
    errors = []
    for seed in range(draws):
        scales = ((3, T), (3, S), (3, S), (1, T))
        arrays = [scale * floats(1, n, 1, H, seed=[seed, i]) for i, (scale, n) in enumerate(scales)]
        arrays = [x.astype(dtype) for x in arrays]
        result = np.ravel(backward(forward(jnp.asarray(value, jnp.float32), *arrays[:3])[1], arrays[3]))
        with jax.enable_x64(True):
            wanted = np.ravel(exact(jnp.asarray(value), *(x.astype(jnp.float64) for x in arrays)))
        errors.append(np.linalg.norm(result - wanted) / np.linalg.norm(wanted))
    return np.array(errors)


def check_against_dense(implementation, dtype, captured="slope"):
    """At most twice the errors of the dense formula."""
    errors, dense = (errors_in_16_bits(x, dtype, captured) for x in (implementation, "xla"))
    assert np.median(errors) <= 2 * np.median(dense) and errors.max() <= 2 * dense.max()


@pytest.mark.parametrize(("implementation", "captured"), [
    ("blockwise", "slope"),
    pytest.param("blockwise", "table", marks=pytest.mark.slow),
    pytest.param("blockwise", "bias", marks=pytest.mark.slow),
    pytest.param("blockwise", "scale", marks=pytest.mark.slow),
    pytest.param("decode", "slope", marks=pytest.mark.slow),
    pytest.param(Native(few=0), "slope", marks=needs_native, id="native-slope"),
    pytest.param(Native(few=0), "bias", marks=[needs_native, pytest.mark.slow], id="native-bias"),
    pytest.param(Cudnn(fused), "scale", marks=pytest.mark.slow, id="cudnn-scale"),
    pytest.param(Splash(interpret=True), "scale", marks=pytest.mark.slow, id="splash-scale"),
])  # fmt: skip
def test_the_gradient_of_what_a_score_function_captures_does_not_show_the_rounding_of_the_output(implementation, captured):  # fmt: skip
    """Bfloat16 outputs, multiplied by their cotangents and summed, left errors of 5% in the median and up to 86%.

    Of a scale, the log-sum-exp of a rounded query left 1% and up to 24 times the gradient.
    """
    check_against_dense(implementation, jnp.bfloat16, captured)


@pytest.mark.slow
def test_nor_does_it_in_float16():
    check_against_dense("blockwise", jnp.float16)


@pytest.mark.slow
def test_nor_does_it_on_an_accelerator(accelerator):
    check_against_dense("blockwise", jnp.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [False, True])
def test_nor_does_it_under_other_transformations(remat):
    """In a loop over layers, mapped over two sequences, from a closure; and in forward mode."""
    q, k, v = (3 * floats(2, 2, n, 1, 64, seed=i) for i, n in enumerate((130, 19, 19)))
    policy = jax.checkpoint_policies.dots_saveable

    def of_layer(slope, arrays, dtype, implementation):
        def one(q, k, v):
            mod = lambda s, b, h, q_idx, kv_idx: s - slope * abs(q_idx - kv_idx).astype(jnp.float32)
            of = lambda *x: jattn.dot_product_attention(*x, score_mod=mod, implementation=implementation)
            return (jax.checkpoint(of, policy=policy) if remat else of)(q[None], k[None], v[None])

        return jnp.sin(jax.vmap(one)(*(x.astype(dtype) for x in arrays)).astype(jnp.float32)).sum()

    def derivatives(*how):
        loss = lambda slope: jax.lax.scan(lambda sum, x: (sum + of_layer(slope, x, *how), None), 0.0, (q, k, v))[0]
        return np.array([jax.grad(loss)(0.5), jax.jvp(loss, (0.5,), (1.0,))[1]])

    q, k, v = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (q, k, v))
    exact = derivatives(jnp.float32, "xla")
    errors = [abs(derivatives(jnp.bfloat16, x) - exact).max() for x in ("blockwise", "xla")]
    assert errors[0] <= 2 * errors[1] + 1e-3 * abs(exact).max()


def largest_error_with_much_in_common(implementation, causal=False):
    """Of the gradients in bfloat16, relative and by norms, where keys have 30 times in common what tells them apart."""
    rng = np.random.default_rng(0)
    q, k, v, g = (rng.normal(size=(1, 256, n, 64)) for n in (4, 2, 2, 4))
    arrays = [x.astype(jnp.bfloat16) for x in (q, k + 30 * rng.normal(size=(2, 64)), v, g)]
    q, k, v, g = (x.astype(np.float64) for x in arrays)
    k, v = (np.repeat(x, 2, axis=2) for x in (k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, k) / 8 + np.where(causal & ~np.tri(256, dtype=bool), -np.inf, 0.0)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    d_p = np.einsum("btnd,bsnd->bnts", g, v)
    d_scores = p * (d_p - (p * d_p).sum(-1, keepdims=True)) / 8
    exact = (
        np.einsum("bnts,bsnh->btnh", d_scores, k),
        np.einsum("bnts,btnh->bsnh", d_scores, q),
        np.einsum("bnts,btnd->bsnd", p, g),
    )
    exact = exact[0], *(x.reshape(1, 256, 2, 2, 64).sum(3) for x in exact[1:])
    attend = functools.partial(jattn.dot_product_attention, is_causal=causal, implementation=implementation)
    # Two programs: in one, XLA may leave out the rounding of the output.
    pull = jax.jit(lambda *x: jax.vjp(lambda *x: attend(*x), *x)[1])(*arrays[:3])
    results = jax.jit(lambda pull, g: pull(g))(pull, arrays[3])
    errors = (np.asarray(x, np.float64) - y for x, y in zip(results, exact, strict=True))
    return max(np.linalg.norm(x) / np.linalg.norm(y) for x, y in zip(errors, exact, strict=True))


def over(kind, devices):
    mesh = jax.make_mesh((devices,), ("devices",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])
    return pytest.param(lambda: kind(mesh, "devices"), marks=pytest.mark.slow, id=kind.__name__)


@pytest.mark.parametrize("implementation", [
    pytest.param(lambda: "blockwise", id="blockwise"),
    pytest.param(lambda: Native(few=0), marks=needs_native, id="native"),
    pytest.param(lambda: "xla", marks=pytest.mark.slow, id="xla"),
    pytest.param(lambda: "decode", marks=pytest.mark.slow, id="decode"),
    over(Ring, 4), over(Ulysses, 2), over(SplitKeys, 4), over(HeadParallel, 2),
    pytest.param(lambda: PallasTPU(interpret=True), marks=pytest.mark.slow, id="pallas_tpu"),
    pytest.param(Interpreted, marks=[pytest.mark.slow, pytest.mark.skipif(jax.__version_info__ < OLDEST, reason="needs a newer JAX")], id="pallas_gpu"),
])  # fmt: skip
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_keys_have_in_common_does_not_multiply_the_rounding_of_the_output(implementation, causal):
    """A row's gradients of scores sum to 0. What rounding left of that was 4% of the gradient of the query."""
    assert largest_error_with_much_in_common(implementation(), causal) <= 0.004


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_nor_does_it_with_products_of_bfloat16(accelerator, causal):
    assert largest_error_with_much_in_common(Blockwise((64, 64)), causal) <= 0.004


def test_what_is_missing_of_a_gradient_is_told_by_what_keys_share_alone(getkey):
    """A mean from which keys are far says nothing of a row that sees few of them."""
    shape, small = (1, 124, 2, 8), jnp.full((1, 1, 2, 8), 0.02, jnp.bfloat16)
    noise = jax.random.normal(getkey(), (1, 124, 1, 8), jnp.bfloat16)
    rows = jnp.ones(shape[:3])

    def added(key):
        call = make_call(jnp.zeros(shape, jnp.bfloat16), key, key, scale=1.0)
        zeros = [jnp.zeros(x.shape) for x in (call.query, key)]
        return balanced(call, (rows, rows, rows), (None, None), [*zeros, jnp.ones(key.shape)], rows)[0]

    np.testing.assert_allclose(added(noise + 64), -jnp.full(shape, 64.0), rtol=0.05)
    far = (100 * noise + 8).at[:, 0].set(small[:, 0, :1])
    assert abs(added(far)).max() < 0.05 * abs(far.astype(jnp.float32).mean(1)).max()
    assert jnp.isfinite(added(noise * 1e30)).all()
    assert (added(jnp.zeros_like(noise)) == 0).all()


@pytest.mark.slow
def test_query_key_and_value_alone_need_no_further_pass():
    """No more loops over blocks than in float32."""
    x = jax.ShapeDtypeStruct((1, 1024, 1, 16), jnp.bfloat16)
    slopes = jax.ShapeDtypeStruct((1,), jnp.float32)

    def loops(at, x):
        def loss(q, k, v, slopes):
            out = jattn.dot_product_attention(q, k, v, score_mod=score_mods.Alibi(slopes), implementation=SMALL)
            return out.astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss, at)).lower(x, x, x, slopes).compile().as_text().count(" while(")

    exact = x.update(dtype=jnp.float32)
    assert loops((0, 1, 2), x) == loops((0, 1, 2), exact) == loops((0, 1, 2, 3), exact) < loops((0, 1, 2, 3), x)


@pytest.mark.slow_except("cuda")
def test_one_set_of_gradients_for_full_and_partial_blocks(accelerator):
    arrays = [floats(1, 2048, 2, 32, seed=i) for i in range(4)]

    def memory(causal):
        run = lambda *arrays: outputs_and_gradients(Blockwise((128, 128)), arrays, is_causal=causal)
        analysis = jax.jit(run).lower(*arrays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    assert memory(causal=True) <= memory(causal=False) + arrays[0].nbytes


def test_a_products_column_of_ones_sums_the_exponentials():
    """XLA for TPU would compute every exponential twice, for the sum and for the product."""
    x = jax.ShapeDtypeStruct((1, 2048, 2, 32), jnp.bfloat16)

    def appends_a_column(platform, **options):
        attend = functools.partial(jattn.dot_product_attention, implementation="blockwise", **options)
        text = jax.jit(attend).trace(x, x, x).lower(lowering_platforms=(platform,)).as_text()
        return "x33xf32" in text

    assert appends_a_column("tpu") and not appends_a_column("cuda") and not appends_a_column("cpu")
    assert not appends_a_column("tpu", dropout_rate=0.1, dropout_rng=jax.random.key(0))  # the sum is of all weights


def test_a_tangent_may_be_a_plain_number():
    """As ``jax.jvp`` gives it to the rule."""
    q, k, v = (floats(1, 4, 1, 8, seed=i) for i in range(3))

    def tangent(scale, implementation):
        of = lambda scale: jattn.dot_product_attention(q, k, v, scale=scale, implementation=implementation)
        return jax.jvp(of, (scale,), (1.0,))[1]

    result, dense = (jax.jit(tangent, static_argnums=1)(jnp.float32(0.5), x) for x in ("blockwise", "xla"))
    np.testing.assert_allclose(result, dense, rtol=0, atol=1e-5)
