"""``dot_product_attention``: same results as jax.nn, stable bits, clear errors, and the choice of implementation."""

import dataclasses
import functools
import inspect
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn._core.arguments import make_call
from jattn._core.call import (
    REFUSED,
    AttentionOptions,
    Call,
    HeadOptions,
    ModOptions,
    ScoreOptions,
    SharedOptions,
)
from jattn.kernels import OPTIONS, Kernel
from jattn.kernels.cudnn import Cudnn
from jattn.kernels.dense import Dense
from jattn.multi_head import CallOptions, LayerOptions, attend_heads
from tests.jattn.cudnn_in_place import fused

B, T, S, N, K, H = 2, 7, 11, 6, 3, 5


def qkv(B=B, T=T, S=S, N=N, K=K, H=H, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=size), dtype) for size in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))


def test_the_signature_is_jax_nns_and_eight_more():
    """New features should be masks or score functions, not new keywords."""
    ours = inspect.signature(jattn.dot_product_attention).parameters
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    shared, more = list(ours.values())[: len(theirs)], list(ours.values())[len(theirs) :]
    describe = lambda parameter: (parameter.name, parameter.kind, parameter.default)
    assert list(map(describe, shared)) == list(map(describe, theirs.values()))
    assert {parameter.kind for parameter in more} == {inspect.Parameter.KEYWORD_ONLY}
    assert (len(theirs), len(more)) == (12, 8)
    beside = {"query", "key", "value", "bias", "mask", "implementation", "return_residual"}
    assert AttentionOptions.__optional_keys__ == set(ours) - beside
    not_of_weights = {"sinks", "dropout_rate", "dropout_rng", "broadcast_dropout"}
    assert ScoreOptions.__optional_keys__ == set(ours) - beside - not_of_weights
    of_heads = set(inspect.signature(attend_heads).parameters)
    assert of_heads.isdisjoint(AttentionOptions.__optional_keys__) and {"bias", "mask", "implementation"} <= of_heads
    assert set(LayerOptions.__optional_keys__) == (set(ours) | of_heads) - {
        "query", "key", "value", "options", "return_residual", "return_weights"
    }  # fmt: skip


def test_the_record_the_keywords_and_the_signatures_agree():
    """Of each option: a field of Call, a keyword with its type for type checkers, and both in the signatures."""
    ours, of_head = (inspect.signature(fn).parameters for fn in (jattn.dot_product_attention, jattn.attend))
    fields = {field.name for field in dataclasses.fields(Call)}
    made = {"masks", "slot_masks", "dropout", "first_batch", "first_head", "stack", "sharded"}  # of several, or inside
    turned = {"mask", "is_causal", "local_window_size", "dropout_rate", "dropout_rng", "broadcast_dropout"}
    assert fields - made == set(ours) - turned - {"sinks", "implementation", "return_residual"}
    assert {name: ours[name].annotation for name in AttentionOptions.__optional_keys__} == get_type_hints(
        AttentionOptions
    )
    assert HeadOptions.__optional_keys__ == set(of_head) - {"q", "k", "v", "head"}
    assert SharedOptions.__optional_keys__ == set(of_head) & set(ours) & fields - {"bias"}
    assert CallOptions.__optional_keys__ >= ModOptions.__optional_keys__
    assert set(REFUSED) == set(OPTIONS) - {"symbolic shapes", "empty arrays", "several devices"}


def test_a_call_is_a_pytree_that_shows_types():
    call = make_call(
        *qkv(), mask=jattn.masks.Segments(np.zeros((B, T), int), np.zeros((B, S), int)), precision="highest"
    )
    assert repr(call) == (
        "Call(query=float32[2, 7, 6, 5], key=float32[2, 11, 3, 5], value=float32[2, 11, 3, 5], "
        f"scale={5**-0.5}, masks=(Segments(query_ids=int32[2, 7], kv_ids=int32[2, 11]),), precision='highest')"
    )
    doubled = jax.tree.map(lambda x: 2 * x, call)
    assert isinstance(doubled, Call) and doubled.precision == "highest" and doubled.scale == 2 * call.scale
    np.testing.assert_array_equal(doubled.query, 2 * call.query)
    assert jax.jit(lambda call: Dense().run(call)[0])(call).shape == (B, T, N, H)


def test_a_kernel_that_takes_what_is_no_option_is_refused():
    with pytest.raises(TypeError, match=r"Odd\.takes: no option is called \['mask array'\]; there are .*slot_masks"):
        type("Odd", (Kernel,), {"takes": frozenset({"bias", "mask array"})})


JAX_NN = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window and causal": {"local_window_size": (2, 3), "is_causal": True},
    "bias and mask": {"bias": np.linspace(-1, 1, N * T * S, dtype=np.float32).reshape(1, N, T, S), "mask": np.arange(S)[None, None, None] != 4},
    "two-dimensional mask": {"mask": np.arange(T)[:, None] + np.arange(S)[None, :] > 2},
    "key lengths": {"key_value_seq_lengths": np.array([5, 9], np.int32)},
    "query lengths": {"query_seq_lengths": np.array([5, 7], np.int32)},
}  # fmt: skip


@pytest.mark.slow_except("bias and mask", "key lengths")
@pytest.mark.parametrize("name", JAX_NN)
def test_the_same_as_jax_nn(name):
    options = JAX_NN[name]
    q, k, v = qkv()

    @jax.jit
    def both(q, k, v):
        ours = jattn.dot_product_attention(q, k, v, **options, return_residual=True)
        with jax.numpy_rank_promotion("allow"):
            return *ours, *jax.nn.dot_product_attention(q, k, v, **options, return_residual=True)

    out, lse, expected, expected_lse = jax.device_get(both(q, k, v))
    seen = np.isfinite(lse)  # rows that see nothing differ, as documented
    np.testing.assert_allclose(out, np.where(seen[..., None], expected, 0), atol=2e-6)
    np.testing.assert_allclose(lse[seen], expected_lse[seen], atol=2e-6)


def test_unbatched():
    batch = jax.device_get(qkv(B=1))
    attend = jax.jit(lambda *qkv: jattn.dot_product_attention(*qkv, is_causal=True, return_residual=True))
    for one, batched in zip(attend(*(x[0] for x in batch)), attend(*batch), strict=True):
        np.testing.assert_array_equal(one, np.asarray(batched)[0])
    assert jax.eval_shape(jattn.attention_weights, batch[0][0], batch[1][0]).shape == (N, T, S)


@pytest.mark.slow_except("64-float32", "257-bfloat16")
@pytest.mark.bits
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("length", [33, 64, 128, 257, 512])
def test_looking_changes_no_bit(dtype, length):
    """The output is bit-identical under jit: alone, with the lse, with the weights, and with statistics."""
    q, k, v = qkv(B=1, T=length, S=length, N=2, K=2, H=16, dtype=dtype)
    attend = lambda **options: jattn.dot_product_attention(q, k, v, is_causal=True, **options)
    weights = lambda: jattn.attention_weights(q, k, is_causal=True)
    alone = jax.jit(lambda: attend())()
    looks = {
        "lse": lambda: attend(return_residual=True)[0:2],
        "weights": lambda: (attend(), weights()),
        "largest weight and lse": lambda: (attend(), weights().max(-1), attend(return_residual=True)[1]),
    }
    for name, look in looks.items():
        np.testing.assert_array_equal(alone, jax.jit(look)()[0], err_msg=name)


@pytest.mark.slow
def test_weights_are_those_of_the_output():
    q, k, v = qkv()
    options = {
        "mask": lambda b, h, q, kv: (q + kv) % 3 > 0, "bias": jnp.linspace(-1, 1, S)[None], "sinks": jnp.arange(1.0, 7.0),
        "score_mod": jattn.score_mods.SoftCap(2.0), "key_value_seq_lengths": np.array([3, 0]),
    }  # fmt: skip
    weights = jattn.attention_weights(q, k, **options)
    assert weights.shape == (B, N, T, S)
    out, lse = jattn.dot_product_attention(q, k, v, **options, return_residual=True)
    np.testing.assert_allclose(jnp.einsum("bnts,bsnd->btnd", weights, jnp.repeat(v, 2, axis=2)), out, atol=1e-6)
    share = 1 - np.exp(np.arange(1.0, 7.0) - np.asarray(lse))  # what the sinks leave
    np.testing.assert_allclose(weights.sum(-1).swapaxes(1, 2), share, atol=1e-6)
    assert (weights[1] == 0).all() and (share[1] == 0).all()


def test_sinks_are_one_more_key_without_a_value():
    q, k, v = qkv(K=N)
    sinks = np.linspace(-1, 1, N, dtype=np.float32)
    bias = np.zeros((1, N, T, S + 1), np.float32)
    bias[..., S] = sinks[:, None]
    keys, values = (np.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (k, v))
    attend = jax.jit(functools.partial(jattn.dot_product_attention, return_residual=True))
    expected, expected_lse = attend(q, keys, values, bias)
    out, lse = attend(q, k, v, sinks=sinks)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-6)


@pytest.mark.slow
def test_traced_positions_compile_once():
    q, k, v = qkv(T=1)
    count = []

    @jax.jit
    def step(position):
        count.append(1)
        return jattn.dot_product_attention(q, k, v, is_causal=True, query_positions=position[None])

    for t in range(4):
        np.testing.assert_allclose(step(jnp.asarray(t)), jattn.dot_product_attention(q, k[:, : t + 1], v[:, : t + 1]), atol=1e-6)  # fmt: skip
    assert len(count) == 1


@pytest.mark.slow
def test_composes():
    """jit, vmap over an outer axis with shared keys, grad of vmap, checkpoint, scan, forward mode."""
    q, k, v = qkv()
    many = jnp.stack([q, 2 * q])
    f = lambda q, k, v: jattn.dot_product_attention(q, k, v, is_causal=True)
    mapped = jax.jit(jax.vmap(f, in_axes=(0, None, None)))(many, k, v)
    np.testing.assert_allclose(mapped[1], f(2 * q, k, v), atol=1e-6)
    by_vmap = jax.grad(lambda k: jax.vmap(f, in_axes=(0, None, None))(many, k, v).sum())(k)
    by_sum = jax.grad(lambda k: f(q, k, v).sum() + f(2 * q, k, v).sum())(k)
    np.testing.assert_allclose(by_vmap, by_sum, atol=1e-5)
    saved = jax.grad(lambda q: jax.checkpoint(f)(q, k, v).sum())(q)
    np.testing.assert_allclose(saved, jax.grad(lambda q: f(q, k, v).sum())(q), atol=1e-6)
    _, scanned = jax.lax.scan(lambda carry, q: (carry, f(q, k, v)), 0, many)
    np.testing.assert_allclose(scanned, mapped, atol=1e-6)
    _, tangent = jax.jvp(lambda q: f(q, k, v), (q,), (q,))
    numeric = (f(q * 1.01, k, v) - f(q * 0.99, k, v)) / 0.02
    np.testing.assert_allclose(tangent, numeric, atol=1e-3)


q, k, v = (np.zeros(shape, np.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
ERRORS = {
    "rank": ((q[0, 0], k, v), {}, r"query, key, value must all be \[B, length, heads, dim\]"),
    "mixed ranks": ((q, k[0], v[0]), {}, r"query float32\[2, 7, 6, 5\], key float32\[11, 3, 5\]"),
    "dtypes": ((q, k.astype(np.float16), v), {}, "one floating dtype"),
    "integers": ((q.astype(int), k.astype(int), v.astype(int)), {}, "one floating dtype"),
    "batch": ((q[:1], k, v), {}, "one batch size"),
    "head dim": ((q, k[..., :4], v), {}, "one head dim for query and key"),
    "lengths": ((q, k[:, :5], v), {}, "one length and one number of heads for key and value"),
    "kv heads": ((q, k, v[:, :, :1]), {}, "one number of heads for key and value"),
    "groups": ((q[:, :, :5], k, v), {}, r"multiple of the key/value heads.*\[2, 7, 5, 5\].*\[2, 11, 3, 5\]"),
    "layout of PyTorch": ((q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)), {}, "layout"),
    "a padding mask of two axes": ((q, k, v), {"mask": np.ones((B, S), bool)}, r"mask\[:, None, None, :\]"),
    "one mask a sequence": ((q, k, v), {"mask": np.ones((B, T, S), bool)}, r"one per sequence is mask\[:, None\]"),
    "a causal array without the cache's slots": (
        (q, k, v),
        {"mask": np.tri(T, dtype=bool)},
        "with a cache, mask covers its slots, and a causal one is is_causal=True",
    ),
    "a padding mask without the cache's slots": (
        (q, k, v),
        {"mask": np.ones((B, 1, 1, S - 1), bool)},
        r"with a cache, mask covers its slots$",
    ),
    "mask of five axes": ((q, k, v), {"mask": np.ones((1, B, N, T, S), bool)}, r"got shape \[1, 2, 6, 7, 11\]"),
    "mask of kv heads": ((q, k, v), {"mask": np.ones((B, K, T, S), bool)}, r"\[B, N, T, S\] = \[2, 6, 7, 11\]"),
    "mask of floats": ((q, k, v), {"mask": np.ones((T, S), np.float32)}, "mask must be bool .*float32.*bias="),
    "bias of bools": ((q, k, v), {"bias": np.ones((T, S), bool)}, "bias must be floating"),
    "bias of another shape": (
        (q, k, v),
        {"bias": np.ones((T, T), np.float32)},
        r"bias must be floating \[\], \[S\], .* or \[B, N, T, S\] =",
    ),
    "lengths of another shape": ((q, k, v), {"key_value_seq_lengths": np.ones(3, int)}, r"\[B\] = \[2\]"),
    "lengths of floats": ((q, k, v), {"query_seq_lengths": np.ones(2)}, "query_seq_lengths must be integers"),
    "positions": (
        (q, k, v),
        {"query_positions": np.arange(S)},
        r"query_positions must be integers \[T\] or \[B, T\] = \[2, 7\]",
    ),
    "key positions": (
        (q, k, v),
        {"kv_positions": np.arange(T)},
        r"kv_positions must be integers \[S\] or \[B, S\] = \[2, 11\]",
    ),
    "window": ((q, k, v), {"local_window_size": (-1, 2)}, "none negative"),
    "sinks": ((q, k, v), {"sinks": np.zeros(K, np.float32)}, r"sinks must be floats \[N\] = \[6\]"),
    "dropout without key": ((q, k, v), {"dropout_rate": 0.1}, "needs dropout_rng"),
    "dropout rate": ((q, k, v), {"dropout_rate": 1.5, "dropout_rng": jax.random.key(0)}, r"\[0, 1\], got 1.5"),
    "implementation": ((q, k, v), {"implementation": "flash"}, "None or one of .*'cudnn'.*got 'flash'"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_named(name):
    arguments, options, message = ERRORS[name]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        jattn.dot_product_attention(*arguments, **options)
    assert len(str(error.value)) <= 800
    with pytest.raises((ValueError, TypeError), match=message):
        jattn.explain(*arguments, **options)


def test_a_named_implementation_that_cannot_says_why():
    with pytest.raises(jattn.Unsupported, match="'cudnn' cannot do this: it takes float16 and bfloat16"):
        jattn.dot_product_attention(q, k, v, implementation="cudnn")
    assert issubclass(jattn.Unsupported, NotImplementedError)
    text = jattn.explain(q, k, v, implementation="cudnn")
    assert text.startswith("cudnn: named, but it takes float16 and bfloat16") and "xla: also possible" in text
    assert jattn.explain(q, k, v, is_causal=True).splitlines()[0] == "xla: taken"


def request_of(B=B, T=T, S=S, N=N, K=K, H=8, dtype=jnp.bfloat16, **options):
    rng = np.random.default_rng(0)
    shapes = ((B, T, N, H), (B, S, K, H), (B, S, K, H))
    return make_call(*(jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes), **options)


class TestCudnn:
    """The implementation with a dense function in place of the kernel, so that the rest is tested without a GPU."""

    run = staticmethod(Cudnn(fused).run)

    def test_what_jax_refuses_is_unsupported(self):
        def kernel(*args, **options):
            raise NotImplementedError("Require at least Hopper arch")

        with pytest.raises(jattn.Unsupported, match="'cudnn' cannot do this: Require at least Hopper arch"):
            Cudnn(kernel).run(request_of())
        assert "Require at least Hopper arch" in Cudnn(kernel).refusal(request_of())
        assert Cudnn(fused).refusal(request_of()) is None

    def test_the_backward_pass_takes_what_the_forward_pass_kept(self):
        args = request_of(T=S, S=S, N=K, K=K)

        def loss(query, weights):  # in a loop XLA cannot find what was computed before
            layer = lambda x, weight: (self.run(dataclasses.replace(args, query=x, key=x * weight, value=x))[0], None)
            return jax.lax.scan(layer, query, weights)[0].astype(jnp.float32).sum()

        program = jax.jit(jax.grad(loss)).lower(args.query, jnp.ones(2, jnp.bfloat16)).compile().as_text()
        forward = [line for line in program.splitlines() if " cosine(" in line]
        assert forward and not any("transpose(" in line for line in forward)

    @pytest.mark.slow
    def test_the_gradient_of_the_lse_alone_and_forward_mode(self):
        args = request_of()

        def lse(implementation, query):
            lse = implementation.run(dataclasses.replace(args, query=query))[1]
            return jnp.where(lse == -jnp.inf, 0, lse).sum()

        ours, dense = (
            (
                jax.jit(jax.grad(functools.partial(lse, x)))(args.query),
                jax.jit(lambda q, x=x: jax.jvp(functools.partial(lse, x), (q,), (q,))[1])(args.query),
            )
            for x in (Cudnn(fused), Dense())
        )
        for got, expected in zip(ours, dense, strict=True):
            np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), rtol=0.03, atol=0.03)

    @pytest.mark.slow
    @pytest.mark.parametrize("options", [
        {}, {"scale": 0.5}, {"scale": jnp.float32(0.3), "is_causal": True}, {"is_causal": True},
        {"mask": jattn.masks.Causal() & jattn.masks.SlidingWindow(2, 4)}, {"local_window_size": (0, 0)},
        {"query_seq_lengths": np.array([3, 7]), "key_value_seq_lengths": np.array([5, 0])},
        {"is_causal": True, "local_window_size": 1, "key_value_seq_lengths": np.array([2, 11])},
    ])  # fmt: skip
    def test_values_lse_and_gradients_are_those_of_xla(self, options):
        args = request_of(**options)
        assert Cudnn().unsupported_reason(args) is None

        def results(run_it):
            def loss(query, key, value):
                out, lse = run_it(dataclasses.replace(args, query=query, key=key, value=value))
                return jnp.sum(out.astype(jnp.float32)) + jnp.sum(jnp.where(lse == -jnp.inf, 0, lse)), (out, lse)

            run = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))
            return run(args.query, args.key, args.value)

        with jax.numpy_dtype_promotion("standard"):  # jax.nn's own backward pass is not strict
            ((_, (out, lse)), gradients), ((_, (dense, dense_lse)), dense_gradients) = (results(self.run), results(Dense().run))  # fmt: skip
        rounded = 0.01 if "scale" in options else 1e-6  # the query times the scale, to bfloat16
        np.testing.assert_allclose(lse, dense_lse, rtol=1e-5, atol=rounded)
        np.testing.assert_allclose(out.astype(jnp.float32), dense.astype(jnp.float32), atol=0.03)
        for got, expected in zip(gradients, dense_gradients, strict=True):
            np.testing.assert_allclose(got.astype(jnp.float32), expected.astype(jnp.float32), atol=0.1)
