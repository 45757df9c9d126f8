"""Attention of one head, of many by vmap, merging, and the hash of dropout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jattn
from jattn import masks, score_mods
from jattn._core.arguments import make_call, make_head
from jattn._core.attention import dense_weights
from jattn._core.chunk import Chunk
from jattn._core.dropout import Dropout, dropout_keep, dropout_seeds
from jattn.kernels.dense import Dense
from tests import reference


def qkv(T=7, S=11, N=6, K=3, H=5, D=13, heads=slice(None), dtype=jnp.float32):
    rng = np.random.default_rng(0)
    sizes = (T, N, H), (S, K, H), (S, K, D)
    return tuple(jnp.asarray(rng.normal(size=size)[:, heads], dtype) for size in sizes)


@pytest.mark.slow
def test_one_head_is_the_formula():
    q, k, v = qkv(heads=0)
    out, lse = jattn.attend(q, k, v)
    scores = np.asarray(q, np.float64) @ np.asarray(k, np.float64).T / np.sqrt(5)
    np.testing.assert_allclose(out, reference.softmax(scores) @ np.asarray(v), atol=1e-6)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(1)), atol=1e-6)


def test_several_masks_must_all_hold():
    q, k, v = qkv(heads=0)
    even = jnp.asarray(np.arange(11)[None, :] % 2 == 0)
    attend = lambda mask: jax.jit(lambda *qkv: jattn.attend(*qkv, mask=mask))(q, k, v)
    both, _ = attend((masks.Causal(), even))
    joined, _ = attend(lambda b, h, q, kv: (kv <= q) & (kv % 2 == 0))
    np.testing.assert_array_equal(both, joined)


@pytest.mark.slow
@pytest.mark.parametrize("N, K", [(6, 6), (6, 3), (6, 2), (5, 1)])
def test_over_heads_is_a_loop_over_heads(N, K):
    q, k, v = qkv(N=N, K=K)
    rng = np.random.default_rng(1)
    bias, shared = (jnp.asarray(rng.normal(size=(heads, 7, 11)), jnp.float32) for heads in (N, 1))
    fn = lambda q, k, v, bias, shared: jattn.attend(q, k, v, bias=bias + shared)
    out, lse = jattn.over_heads(fn)(q, k, v, bias, shared)
    assert out.shape == (7, N, 13) and lse.shape == (7, N)
    for n in range(N):
        one = fn(q[:, n], k[:, n // (N // K)], v[:, n // (N // K)], bias[n], shared[0])
        np.testing.assert_allclose(out[:, n], one[0], atol=1e-6)
        np.testing.assert_allclose(lse[:, n], one[1], atol=1e-6)


def test_over_heads_puts_the_head_axis_where_it_is_told():
    q, k, _ = qkv()
    lifted = jattn.over_heads(lambda q, k, v: dense_weights(make_head(q, k, v)), out_axes=(0, 1))
    weights, lse = jax.eval_shape(lifted, q, k, None)
    assert weights.shape == (6, 7, 11) and lse.shape == (7, 6)


def test_over_heads_does_not_repeat_keys():
    """With grouped queries, no intermediate repeats the keys for every query head."""
    q, k, v = qkv(S=101, N=6, K=3, D=5)
    jaxpr = jax.make_jaxpr(jattn.over_heads(jattn.attend))(q, k, v)
    sizes = [np.prod(var.aval.shape) for eqn in jaxpr.eqns for var in eqn.outvars]
    assert max(sizes) <= 6 * 7 * 101 and 6 * 101 * 5 not in sizes


def test_over_heads_refuses_heads_that_do_not_group():
    q, k, v = qkv(N=5, K=3)
    with pytest.raises(ValueError, match="5 query heads must be a multiple of the 3"):
        jattn.over_heads(jattn.attend)(q, k, v)


@pytest.mark.parametrize("options, error, message", [
    ({"mask": lambda b, h, q, kv: q - kv}, TypeError, "mask must return bool, got int32"),
    ({"mask": lambda b, h, q, kv: jnp.ones((3, 11), bool)}, ValueError, r"mask must .*\(7, 11\), got shape \(3, 11\)"),
    ({"score_mod": lambda s, b, h, q, kv: q + kv}, TypeError, "score_mod must return floats, got int32"),
    ({"score_mod": lambda s, b, h, q, kv: s.sum(0)[:3]}, ValueError, r"score_mod must .*got shape \(3,\)"),
    ({"score_mod": lambda s, b, h, q, kv: s[None]}, ValueError, r"got shape \(1, 7, 11\)"),
])  # fmt: skip
def test_a_wrong_mod_is_named_at_trace_time(options, error, message):
    q, k, v = qkv(heads=0)
    with pytest.raises(error, match=message):
        jax.eval_shape(lambda q, k, v: jattn.attend(q, k, v, **options), q, k, v)


def part(rng, lse_low, empty):
    out = rng.normal(size=(3, 2)).astype(np.float32)
    lse = rng.uniform(lse_low, lse_low + 9, size=3).astype(np.float32)
    lse[:empty], out[:empty] = -np.inf, 0
    return out, lse


merge = jax.jit(jattn.merge)
parts = st.builds(
    lambda seed, low, empty: part(np.random.default_rng(seed), low, empty), st.integers(0, 99),
    st.sampled_from([-200.0, -3.0, 0.0, 300.0]), st.integers(0, 3),
)  # fmt: skip


def assert_same(a, b):
    np.testing.assert_allclose(a[0], b[0], atol=1e-5)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@given(parts, parts, parts)
def test_merge_is_associative_and_commutative_with_a_unit(a, b, c):
    assert_same(merge(*merge(*a, *b), *c), merge(*a, *merge(*b, *c)))
    assert_same(merge(*a, *b), merge(*b, *a))
    assert_same(merge(*a, jnp.zeros((3, 2)), jnp.full(3, -jnp.inf)), a)
    gradients = jax.grad(lambda a, b: sum(x.sum() for x in jattn.merge(*a, *b)[:1]), (0, 1))(a, b)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(gradients))


@pytest.mark.slow
def test_merge_joins_attention_over_two_sets_of_keys():
    q, k, v = qkv(heads=0)
    whole = jattn.attend(q, k, v, mask=masks.Causal())
    left = jattn.attend(q, k[:4], v[:4], mask=masks.Causal())
    right = jattn.attend(q, k[4:], v[4:], mask=masks.Causal(), kv_positions=jnp.arange(4, 11))
    assert not np.isfinite(right[1]).all(), "some rows should see nothing on the right"
    assert_same(jattn.merge(*left, *right), whole)


@jax.jit
def taken_out(whole, part):
    """What ``unmerge`` leaves, and the gradients of its finite results."""
    finite = lambda *x: sum(jnp.where(jnp.isfinite(y), y, 0.0).sum() for y in jattn.unmerge(*x))
    return jattn.unmerge(*whole, *part), jax.grad(finite, (0, 1, 2, 3))(*whole, *part)


@given(parts, parts)
def test_unmerge_undoes_merge(a, b):
    whole, unit = merge(*a, *b), (np.zeros((3, 2), np.float32), np.full(3, -np.inf, np.float32))
    (left, lse), gradients = jax.device_get(taken_out(whole, b))
    # The share that is left, from the two parts alone: the error grows as it falls.
    apart = np.where(lse == -np.inf, np.inf, np.float64(b[1]) - np.where(a[1] == -np.inf, 0.0, a[1]))
    rest = np.where(a[1] == -np.inf, 0.0, 1 / (1 + np.exp(np.minimum(apart, 99.0))))
    known = rest > 1e-3
    error = 4e-7 * (1 + abs(np.where(known, whole[1], 0.0))) / np.where(known, rest, 1.0)
    assert (abs(np.where(known, lse, 0.0) - np.where(known, a[1], 0.0)) <= error).all()
    assert (abs(left - a[0])[known] <= 4 * error[known, None]).all()
    (same, same_lse), of_unit = taken_out(whole, unit)
    assert_same((same, same_lse), whole)
    (nothing, none), of_all = jax.device_get(taken_out(b, b))
    assert not nothing.any() and (none == -jnp.inf).all()
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradients, of_unit, of_all)))


def test_unmerge_takes_keys_out_of_attention():
    """Values and derivatives are those of attention without these keys, also of a part of nearly no or all weight."""
    with jax.enable_x64(True):
        q, k, v = qkv(heads=0, dtype=jnp.float64)

        @jax.jit
        def both(k, v, shift):  # of the scores of the keys that are taken out
            def without(k, v):
                moved = {"score_mod": lambda score, b, h, q, kv: score + jnp.where(kv < 4, 0.0, shift)}
                whole = jattn.attend(q, k, v, mask=masks.Causal(), **moved)
                part = jattn.attend(q, k[4:], v[4:], mask=masks.Causal(), kv_positions=jnp.arange(4, 11), **moved)
                return jattn.unmerge(*whole, *part)

            left = lambda k, v: jattn.attend(q, k[:4], v[:4], mask=masks.Causal())

            def with_gradients(f):
                return f(k, v), jax.grad(lambda *x: sum(jnp.sin(y).sum() for y in f(*x)), (0, 1))(k, v)

            return with_gradients(without), with_gradients(left)

        for shift in (-20.0, 0.0, 9.0):
            result, expected = both(k, v, shift)
            for one, other in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(one, other, atol=1e-9)
    nan, zeros = np.full((1, 2), np.nan), np.zeros((1, 2), np.float32)
    out, lse = jax.jit(jattn.unmerge)(nan.astype(jnp.bfloat16), np.float32(nan[0, :1]), zeros, zeros[0, :1])
    assert out.dtype == jnp.bfloat16 and np.isnan(out).all() and np.isnan(lse).all()  # a NaN is never hidden


@functools.partial(jax.jit, static_argnames=("rate", "rows", "columns"))
def keep(key, rate=0.3, b=0, h=0, rows=500, columns=400, start=0):
    seeds = dropout_seeds(Dropout(key, rate), b, h)
    return dropout_keep(seeds, rate, jnp.arange(rows)[:, None], start + jnp.arange(columns)[None, :])


@pytest.mark.slow_except("<lambda>")
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey, lambda seed: jax.random.key(seed, impl="rbg")])
def test_dropout_is_a_fair_coin_without_memory(make):
    """The rate, and correlations of neighbours, rows, heads, sequences and keys, are within 5 standard deviations."""
    key = make(0)
    bits = np.asarray(keep(key), np.float64)
    sigma = 1 / np.sqrt(bits.size)
    assert abs(bits.mean() - 0.7) < 5 * np.sqrt(0.21) * sigma
    bits = (bits - 0.7) / np.sqrt(0.21)
    others = [
        keep(key, h=1), keep(key, b=1), keep(make(1)), np.roll(keep(key), 1, 0), np.roll(keep(key), 1, 1),
        np.asarray(keep(key, rows=400, columns=500)).T,
    ]  # fmt: skip
    for other in others:
        other = (np.asarray(other, np.float64) - 0.7) / np.sqrt(0.21)
        assert abs((bits * other).mean()) < 5 * sigma
    assert np.abs(bits.mean(0)).max() < 5.5 / np.sqrt(500) and np.abs(bits.mean(1)).max() < 5.5 / np.sqrt(400)


def test_dropout_depends_on_the_indices_alone():
    key = jax.random.key(5)
    np.testing.assert_array_equal(np.asarray(keep(key))[:, 100:150], keep(key, columns=50, start=100))
    assert np.all(keep(key, rate=0.0)) and not np.any(keep(key, rate=1.0))
    with pytest.raises(ValueError, match=r"dropout_rate must lie in \[0, 1\], got 1.5"):
        keep(key, rate=1.5)


@pytest.mark.slow
def test_second_derivatives():
    """The log-sum-exp's derivative rule is itself differentiable: Hessian against finite differences in float64."""
    with jax.enable_x64(True):
        q, k, v = qkv(T=2, S=3, H=2, D=2, heads=0, dtype=jnp.float64)

        def f(q):
            out, lse = jattn.attend(q, k, v, mask=lambda b, h, q, kv: kv <= q)
            return jnp.sum(jnp.sin(out)) + jnp.sum(lse**2)

        hessian = jax.hessian(f)(q)
        for t, i in np.ndindex(2, 2):
            step = jnp.zeros_like(q).at[t, i].set(1e-5)
            numeric = (jax.grad(f)(q + step) - jax.grad(f)(q - step)) / 2e-5
            np.testing.assert_allclose(hessian[:, :, t, i], numeric, atol=1e-8)


class TestTake:
    """Attention to a part of a call is that part of the whole call's."""

    def args(self, **options):
        B, T, S, N, K = 2, 7, 11, 6, 3
        rng = np.random.default_rng(0)
        floats = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
        return make_call(
            floats(B, T, N, 5), floats(B, S, K, 5), floats(B, S, K, 4), floats(1, N, T, S),
            lambda b, h, q, kv: (q + kv + h + b) % 4 != 0, query_seq_lengths=np.array([5, 7]),
            key_value_seq_lengths=np.array([11, 9]), score_mod=score_mods.Alibi(np.arange(1.0, N + 1) / N),
            dropout_rate=0.3, dropout_rng=jax.random.key(1), **options,
        )  # fmt: skip

    @pytest.mark.parametrize("positions", [{}, {"query_positions": np.arange(7) * 2, "kv_positions": np.arange(3, 14)}])
    @pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
    def test_rows_and_heads(self, positions, traced):
        args = self.args(**positions)

        def parts_and_whole(first):
            every_row = Chunk(first, 4), jnp.array([2, 3, 4, 5])
            of_rows = [Dense().run(args.take(rows=rows, heads=Chunk(first - 1, 2))) for rows in every_row]
            return of_rows, Dense().run(args)

        result = jax.jit(parts_and_whole)(2) if traced else jax.jit(lambda: parts_and_whole(2))()
        of_rows, wholes = jax.device_get(result)
        for parts in of_rows:
            for part, whole in zip(parts, wholes, strict=True):
                np.testing.assert_allclose(part, whole[:, 2:6, 2:6], atol=1e-6)

    @pytest.mark.parametrize("positions", [
        {},
        pytest.param({"query_positions": np.arange(7) * 2, "kv_positions": np.arange(11) + 3}, marks=pytest.mark.slow),
    ])  # fmt: skip
    def test_columns_merge_to_the_whole(self, positions):
        @jax.jit
        def merged_and_whole():
            args = self.args(**positions)
            front, back = (Dense().run(args.take(columns=columns)) for columns in (Chunk(0, 4), Chunk(4, 7)))
            return jattn.merge(*front, *back), Dense().run(args)

        for merged, whole in zip(*merged_and_whole(), strict=True):
            np.testing.assert_allclose(merged, whole, atol=1e-6)
