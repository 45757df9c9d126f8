"""``fold_weights`` in many tiny blocks, compared with sums over the dense weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn import masks, score_mods
from jattn.kernels.blockwise import Blockwise

B, T, S, N, K, H = 2, 7, 11, 6, 3, 4


def floats(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def inputs(dtype=jnp.float32):
    return jnp.asarray(floats(B, T, N, H, seed=1), dtype), jnp.asarray(floats(B, S, K, H, seed=2), dtype)


# 3 x 4, which divides neither length
SMALL = Blockwise((3, 4))
fold_weights = functools.partial(jattn.fold_weights, implementation=SMALL)


def compare(got, wanted, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert not np.isnan(x).any()
        np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance)


def look(carry, weights, q_idx, kv_idx):
    """A step that accumulates row entropies, distances and largest log-weights, column sums, weights and a count."""
    q, kv, far = q_idx[:, 0], kv_idx[0], abs(q_idx - kv_idx).astype(weights.dtype)
    logs = jnp.log(jnp.where(weights > 0, weights, 1.0))
    return {
        "entropy": carry["entropy"].at[q].add(-(weights * logs).sum(1)),
        "distance": carry["distance"].at[q].add((weights * far).sum(1)),
        "largest": carry["largest"].at[q].max(jnp.where(weights > 0, logs, -jnp.inf).max(1)),
        "received": carry["received"].at[kv].add(weights.sum(0)),
        "weights": carry["weights"].at[q_idx, kv_idx].add(weights),
        "count": carry["count"] + (weights > 0).sum(dtype=jnp.int32),
    }


IDS = np.array([[0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3], [0] * 6 + [1] * 5])

NOTHING = {
    "entropy": np.zeros(T, np.float32), "distance": np.zeros(T, np.float32),
    "largest": np.full(T, -np.inf, np.float32), "received": np.zeros(S, np.float32),
    "weights": np.zeros((T, S), np.float32), "count": np.int32(0),
}  # fmt: skip


def dense(weights):
    """The results of ``look``, computed from all weights."""
    far = abs(np.arange(T)[:, None] - np.arange(S)).astype(weights.dtype)[None, None]
    logs = jnp.log(jnp.where(weights > 0, weights, 1.0))
    return {
        "entropy": -(weights * logs).sum(-1), "distance": (weights * far).sum(-1),
        "largest": jnp.where(weights > 0, logs, -jnp.inf).max(-1), "received": weights.sum(-2), "weights": weights,
        "count": (weights > 0).sum((-2, -1)),
    }  # fmt: skip


def gather(query, key, **options):
    """All weights, gathered block by block, so that writes outside the weights would show."""
    zeros = np.zeros((query.shape[-3], key.shape[-3]), np.float64 if query.dtype == np.float64 else np.float32)
    return fold_weights(lambda carry, w, q_idx, kv_idx: carry.at[q_idx, kv_idx].add(w), zeros, query, key, **options)


def weights_of(query, key, **options):
    return jax.jit(lambda query, key: jattn.attention_weights(query, key, **options))(query, key)


def lse_of(query, key, **options):
    options = {"implementation": "xla", "return_residual": True, **options}
    return jax.jit(lambda query, key: jattn.dot_product_attention(query, key, key, **options)[1])(query, key)


LENGTHS = {"query_seq_lengths": np.array([7, 2]), "key_value_seq_lengths": np.array([0, 9])}
CASES = {
    "causal, bias by head": {"is_causal": True, "bias": floats(1, N, T, S)},
    "window, score function by head, another scale": {
        "local_window_size": (2, 1), "score_mod": score_mods.then(score_mods.Alibi(floats(N)), score_mods.SoftCap(1.5)), "scale": 0.3,
    },
    "lengths, rows that see nothing": LENGTHS,
    "mask by slot, causal by position": {
        "mask": np.random.default_rng(0).random((B, 1, T, S)) < 0.5, "is_causal": True,
        "query_positions": np.stack([np.arange(T) + 3, np.arange(T)[::-1]]), "kv_positions": np.arange(S) - 1,
    },
    "plain function of head and sequence": {"mask": lambda b, h, q, kv: (q + kv + h) % 3 > b},
    "segments, and a plain function of which the blocks are known": {
        "mask": masks.Segments(IDS[:, :T], IDS) & jattn.block_mask(lambda b, h, q, kv: kv <= q + b, T, S, batch=B, block_sizes=(2, 3))
    },
}  # fmt: skip


class TestValues:
    @pytest.mark.slow
    @pytest.mark.parametrize("name", CASES)
    def test_each_statistic_is_that_of_the_dense_weights(self, name):
        options = CASES[name]

        @jax.jit
        def results(query, key):
            result = fold_weights(look, NOTHING, query, key, **options)
            return result, dense(jattn.attention_weights(query, key, **options))

        compare(*results(*inputs()))

    @pytest.mark.slow
    def test_uncompiled_where_every_array_is_traced(self):
        mask = masks.Causal() & masks.Padding(np.array([9, 4]))
        options = LENGTHS | {"query_positions": np.arange(T) + 2, "mask": mask}
        result = fold_weights(look, NOTHING, *inputs(), **options)
        compare(result, jax.jit(dense)(weights_of(*inputs(), **options)))

    def test_the_largest_logit(self):
        """``log w + lse`` at the visible pairs."""
        (query, key), lengths = inputs(), np.array([11, 8])
        lse = lse_of(query, key, scale=1.0, key_value_seq_lengths=lengths)
        step = lambda carry, weights, q_idx, kv_idx: carry.at[q_idx[:, 0]].max(jnp.log(weights).max(1))
        rows = jnp.full(T, -jnp.inf)
        result = fold_weights(step, rows, query, key, lse=lse, scale=1.0, key_value_seq_lengths=lengths)
        logits = np.einsum("btnh,bsnh->bnts", query, np.repeat(key, N // K, axis=2))
        wanted = [logits[b, :, :, :length].max(-1) for b, length in enumerate(lengths)]
        compare(result + lse.swapaxes(1, 2), np.stack(wanted))

    def test_one_sequence(self):
        query, key = (x[1] for x in inputs())
        result = gather(query, key, lse=lse_of(query, key))
        assert result.shape == (N, T, S)
        compare(result, weights_of(query, key))

    @pytest.mark.slow
    def test_the_lse_of_a_call_with_sinks(self):
        (query, key), sinks = inputs(), jnp.asarray(floats(N))
        options = {"is_causal": True, "key_value_seq_lengths": np.array([0, 9])}
        result = gather(query, key, lse=lse_of(query, key, sinks=sinks, **options), **options)
        compare(result, weights_of(query, key, sinks=sinks, **options))
        assert (result.sum(-1) < 0.99).all()

    @pytest.mark.slow
    def test_dtypes(self):
        with jax.enable_x64(True):
            query, key = inputs(jnp.float64)
            result = gather(query, key, is_causal=True)
            assert result.dtype == jnp.float64
            compare(result, weights_of(query, key, is_causal=True), 1e-12)
        query, key = inputs(jnp.bfloat16)
        result = gather(query, key, lse=lse_of(query, key))
        assert result.dtype == jnp.float32
        compare(result, weights_of(query, key))

    @pytest.mark.slow
    def test_where_arrays_may_be_divided_heads_and_sequences_go_together(self):
        query, key = inputs()
        options = {"bias": floats(1, N, T, S), "key_value_seq_lengths": np.array([3, 9])}
        wanted, lse = weights_of(query, key, **options), lse_of(query, key, **options)
        with jax.set_mesh(jax.make_mesh((2,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))):
            compare(gather(query, key, lse=lse, **options), wanted)

    @pytest.mark.parametrize("lengths", [(0, S), (T, 0)])
    def test_no_queries_or_no_keys(self, lengths):
        query, key = (x[:, :n] for x, n in zip(inputs(), lengths, strict=True))
        total = lambda carry, weights, q_idx, kv_idx: carry + weights.sum()
        result = fold_weights(total, 0.5, query, key, is_causal=True)
        np.testing.assert_array_equal(result, np.full((B, N), 0.5))

    @pytest.mark.slow
    def test_every_block_that_is_not_empty_comes_once_and_no_other(self):
        """Slot indices continue past the last row and column, where the weights are 0."""
        query, key = inputs()
        seen = []

        def step(carry, weights, q_idx, kv_idx):
            assert weights.shape == (3, 4) and q_idx.shape == (3, 1) and kv_idx.shape == (1, 4)
            jax.debug.callback(lambda i, j: seen.append((int(i), int(j))), q_idx[0, 0], kv_idx[0, 0])
            return carry + jnp.where((q_idx < T) & (kv_idx < S), 0.0, weights).sum()

        outside = fold_weights(step, 0.0, query[0, :, :1], key[0, :, :1], is_causal=True)
        np.testing.assert_array_equal(outside, [0.0])
        jax.effects_barrier()
        assert sorted(seen) == [(0, 0), (3, 0), (3, 4), (6, 0), (6, 4)]


@pytest.mark.slow
class TestDerivatives:
    """Reverse mode through a step that only adds, for inputs and for arrays captured by the step and score function."""

    @staticmethod
    def arrays():
        query, key = inputs()
        return {
            "query": query, "key": key, "bias": jnp.asarray(floats(N, T, S)), "values": jnp.asarray(floats(S, seed=5)),
            "power": jnp.float32(1.3), "cap": jnp.float32(1.7),
        }  # fmt: skip

    @staticmethod
    def options(arrays, options):
        cap = arrays["cap"]
        return {"bias": arrays["bias"], "score_mod": lambda score, b, h, q, kv: cap * jnp.tanh(score / cap), **options}

    @staticmethod
    def powers(arrays, weights):
        return jnp.where(weights > 0, jnp.where(weights > 0, weights, 1.0) ** arrays["power"], 0.0)

    def folded(self, arrays, options, with_lse=False):
        def step(carry, weights, q_idx, kv_idx):
            return carry.at[q_idx[:, 0]].add((self.powers(arrays, weights) * arrays["values"][kv_idx]).sum(1))

        (query, key), options = (arrays["query"], arrays["key"]), self.options(arrays, options)
        lse = lse_of(query, key, **options) if with_lse else None
        return jnp.sum(jnp.sin(fold_weights(step, jnp.zeros(T), query, key, lse=lse, **options)))

    def in_full(self, arrays, options):
        weights = jattn.attention_weights(arrays["query"], arrays["key"], **self.options(arrays, options))
        return jnp.sum(jnp.sin((self.powers(arrays, weights) * arrays["values"][None, None, None]).sum(-1)))

    def results(self, fn, options, arrays):
        return jax.jit(jax.value_and_grad(lambda arrays: fn(arrays, options)))(arrays)

    def test_static_blocks(self):
        options = {"mask": masks.Causal() | masks.Prefix(2)}
        got, wanted = (self.results(fn, options, self.arrays()) for fn in (self.folded, self.in_full))
        compare(got, wanted)
        assert all(np.abs(x).max() > 1e-3 for x in jax.tree.leaves(wanted))

    def test_blocks_known_only_when_it_runs_an_lse_that_is_given_and_nan_that_nobody_sees(self):
        options = {"query_seq_lengths": jnp.array([5, 0]), "key_value_seq_lengths": jnp.array([8, 8])}
        clean = self.arrays()
        query, key = clean["query"].at[:, 5:].set(jnp.nan), clean["key"].at[:, 8:].set(jnp.nan)
        folded = functools.partial(self.folded, with_lse=True)
        got = self.results(folded, options, clean | {"query": query, "key": key})
        compare(got, self.results(self.in_full, options, clean))

    def test_uncompiled_and_of_a_captured_array_alone(self):
        """Only what the step captures is then traced."""
        arrays = self.arrays()
        gradient = lambda fn: jax.grad(lambda values: fn(arrays | {"values": values}, {}))(arrays["values"])
        compare(gradient(self.folded), gradient(self.in_full))


@pytest.mark.slow
class TestComposition:
    @staticmethod
    def mod(slope):
        return lambda score, b, h, q, kv: score - slope * abs(q - kv)

    def received(self, query, key, slope):
        step = lambda carry, weights, q_idx, kv_idx: carry.at[kv_idx[0]].add(slope * weights.sum(0))
        return fold_weights(step, jnp.zeros(S), query, key, score_mod=self.mod(slope), is_causal=True)

    def in_full(self, query, key, slope):
        return slope * jattn.attention_weights(query, key, score_mod=self.mod(slope), is_causal=True).sum(-2)

    def test_vmap(self):
        query, key = inputs()
        args = (jnp.stack([query, -query, 2 * query]), key, jnp.array([0.1, 0.5, 0.9]))
        got, wanted = (jax.jit(jax.vmap(fn, (0, None, 0)))(*args) for fn in (self.received, self.in_full))
        compare(got, wanted)

    def test_scan_over_layers(self):
        (query, key), slopes = inputs(), jnp.array([0.2, 0.7])

        def layers(fn):
            def layer(x, slope):
                result = fn(x, key, slope)
                return x * 0.5 + result.mean(), result

            return jax.lax.scan(layer, query, slopes)

        compare(layers(self.received), layers(self.in_full))

    def test_any_pytree_of_arrays_and_numbers(self):
        def step(carry, weights, q_idx, kv_idx):
            total, (rows, count), empty = carry
            return total + weights.sum(), (rows.at[q_idx[:, 0]].add(weights.sum(1)), count + 1), empty

        init = (0.0, (np.zeros(T, np.float32), 0), {})
        total, (rows, count), empty = fold_weights(step, init, *inputs())
        compare((total, rows), (np.full((B, N), T), np.ones((B, N, T))))
        assert (count == 9).all() and count.dtype == jnp.int32 and empty == {}


@pytest.mark.slow
class TestMemory:
    """XLA's own figures for the memory of reverse mode, with blocks of the default size; nothing is run."""

    @staticmethod
    def temporaries(n, **lengths):
        x = jax.ShapeDtypeStruct((1, n, 1, 64), jnp.float32)

        def step(carry, weights, q_idx, kv_idx):
            logs = jnp.log(jnp.where(weights > 0, weights, 1.0))
            return carry.at[q_idx[:, 0]].add((weights * logs).sum(1))

        of = lambda query, key, lengths: jnp.sum(jnp.sin(jattn.fold_weights(step, jnp.zeros(n), query, key, **lengths)))
        compiled = jax.jit(jax.grad(of, (0, 1))).lower(x, x, lengths).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def test_a_step_that_adds_keeps_no_block(self):
        at = {n: self.temporaries(n) for n in (2048, 4096)}
        assert at[4096] <= 1.5 * at[2048]
        assert at[4096] < 4096 * 4096 * 4 / 2  # half the size of the dense weights

    def test_nor_where_the_blocks_are_known_only_when_it_runs(self):
        lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
        assert self.temporaries(4096, key_value_seq_lengths=lengths) < 4096 * 4096 * 4 * 0.6


class TestErrors:
    CALLS = {
        "lse of another order": ({"lse": np.zeros((B, N, T))}, ValueError, r"lse must be floats \[B, T, N\] = \[2, 7, 6\]"),
        "lse of one sequence": ({"lse": np.zeros((T, N))}, ValueError, r"lse must .* shape \[7, 6\]"),
        "lse of integers": ({"lse": np.zeros((B, T, N), int)}, ValueError, "lse must be floats .* got int32"),
        "mask of floats": ({"mask": np.ones((T, S))}, TypeError, "mask must be bool"),
        "mask of another shape": ({"mask": np.ones((S, T), bool)}, ValueError, r"mask must be bool .* got shape \[11, 7\]"),
        "mask that returns integers": ({"mask": lambda b, h, q, kv: kv - q}, TypeError, "mask must return bool"),
        "score_mod that returns integers": ({"score_mod": lambda s, b, h, q, kv: q}, TypeError, "score_mod must return floats"),
        "score_mod of another shape": ({"score_mod": lambda s, b, h, q, kv: s[:2]}, ValueError, "score_mod must return an array"),
        "bias of integers": ({"bias": np.ones((T, S), int)}, TypeError, "bias must be floating"),
        "positions of another length": ({"query_positions": np.arange(S)}, ValueError, "query_positions must be integers"),
        "lengths of another batch": ({"key_value_seq_lengths": np.ones(3, int)}, ValueError, "key_value_seq_lengths must be"),
        "heads": ({"key": np.zeros((B, S, 4, H), np.float32)}, ValueError, "query heads that are a multiple"),
        "no such argument": ({"value": 0}, TypeError, "value"),
    }  # fmt: skip

    @pytest.mark.parametrize("name", CALLS)
    def test_arguments(self, name):
        options, error, message = self.CALLS[name]
        query, key = inputs()
        with pytest.raises(error, match=message):
            jattn.fold_weights(look, NOTHING, **{"query": query, "key": key, **options})

    @pytest.mark.parametrize("step, message", [
        pytest.param(lambda carry, *_: carry.astype(jnp.bfloat16), "carry .* dtypes do not match", marks=pytest.mark.slow),
        pytest.param(lambda carry, *_: carry[:2], "carry .* shapes do not match", marks=pytest.mark.slow),
        (lambda carry, *_: (carry,), "carry"),
        (lambda carry, *_: None, "carry"),
        (lambda carry, weights: carry, "positional arguments"),
    ])  # fmt: skip
    def test_a_step_that_does_not_keep_its_carry(self, step, message):
        with pytest.raises(TypeError, match=f"(?s){message}"):
            jattn.fold_weights(step, np.zeros(T, np.float32), *inputs())
