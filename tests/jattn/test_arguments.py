"""Argument checks, and which arguments are known during tracing; no attention is computed here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jattn
from jattn._core.arguments import make_call
from jattn.masks import Causal, Dense, Padding, Segments, SlidingWindow
from jattn.score_mods import Alibi, RelativeBias, SoftCap, then

B, T, S, N, K, H = 2, 3, 5, 4, 2, 6
ARRAYS = tuple(np.zeros(shape, np.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
KEY = jax.random.key(0)


def args(**options):
    return make_call(*ARRAYS, **options)


WRONG = {
    "query": ({"query": None}, "query must be an array, got NoneType"),
    "head_dim 0": ({"query": ARRAYS[0][..., :0], "key": ARRAYS[1][..., :0]}, r"head_dim is 0 \(query \[2, 3, 4, 0\]\), .* pass scale="),
    "scale of a string": ({"scale": "2"}, "scale must be a number or a scalar array, got '2'"),
    "scale of heads": ({"scale": np.ones(N)}, r"scale must be a number .* got float64 of shape \[4\]"),
    "scale of a bool": ({"scale": True}, "scale must be a number .* got True"),
    "is_causal": ({"is_causal": "no"}, "is_causal must be True or False, .* got 'no'"),
    "is_causal None": ({"is_causal": None}, "is_causal must be True or False, .* got None"),
    "a class": ({"mask": Causal}, r"mask=Causal is a class; write mask=Causal\(\.\.\.\)"),
    "several masks": ({"mask": [Causal(), SlidingWindow(2)]}, "mask must be one callable, got a list of 2; join masks by &"),
    "mask of a string": ({"mask": "causal"}, "mask must be an array, got str"),
    "several score functions": ({"score_mod": (SoftCap(2.0),)}, "score_mod must be one callable, .* join score functions by score_mods.then"),
    "a class of score functions": ({"score_mod": Alibi}, r"write score_mod=Alibi\(\.\.\.\)"),
    "score_mod": ({"score_mod": np.ones(N)}, "score_mod must be a callable"),
    "dropout_rate None": ({"dropout_rate": None}, "dropout_rate must be a number .* got None"),
    "dropout_rate of a string": ({"dropout_rate": "0.1"}, "dropout_rate must be a number .* got '0.1'"),
    "dropout_rate NaN": ({"dropout_rate": np.nan, "dropout_rng": KEY}, r"dropout_rate must lie in \[0, 1\], got nan"),
    "window": ({"local_window_size": "ab"}, r"local_window_size must be \(left, right\) or one integer, .* got 'ab'"),
    "window of bools": ({"local_window_size": (3, False)}, r"local_window_size must be .* got \(3, False\)"),
    "window by name": ({"local_window_size": {3: 0, 1: 2}}, "local_window_size must be"),
    "window of floats": ({"local_window_size": (2.0, 1)}, r"local_window_size must be .* got \(2\.0, 1\)"),
    "window of three": ({"local_window_size": (1, 2, 3)}, "local_window_size must be"),
    "positions beyond int32": ({"query_positions": np.arange(T) + 2**31 - 1}, "query_positions must lie within int32, .* to 2147483649"),
    "JAX's positions beyond int32": ({"query_positions": jnp.arange(T, dtype=jnp.uint32) + jnp.uint32(2**31 - 1)}, "query_positions must lie within int32, .* to 2147483649"),
    "positions of a list": ({"kv_positions": [0, 1, 2, 3, 2**31]}, "kv_positions must be an array, got list"),
    "positions of floats": ({"kv_positions": np.arange(S) * 1.0}, "kv_positions must be integers"),
    "lengths beyond int32": ({"key_value_seq_lengths": np.array([3, 2**32])}, "key_value_seq_lengths must lie within int32"),
    "lengths of nothing": ({"query_seq_lengths": "3"}, "query_seq_lengths must be an array, got str"),
    "a mask for four sequences": ({"mask": Padding(np.array([5] * 4))}, r"Padding: lengths must be \[B\] = \[2\].* got shape \[4\]"),
    "ids of another length": ({"mask": Causal() & Segments(np.zeros((B, T), int), np.zeros((B, 4), int))}, r"kv_ids must be \[B, S\] = \[2, 5\]"),
    "ids of two signs": ({"mask": Segments(jnp.zeros((B, T), jnp.uint32), np.zeros((B, S), int))}, "query_ids and kv_ids must have one integer type .* got uint32 and int32"),
    "a table for two heads": ({"mask": Dense(np.ones((1, 2, T, S), bool))}, r"Dense: array must be \[B, N, T, S\] = \[2, 4, 3, 5\]"),
    "one slope": ({"score_mod": Alibi(np.ones(1))}, r"Alibi: slopes must be \[N\] with N = 4 query heads, got shape \[1\]"),
    "a table for one head": ({"score_mod": then(SoftCap(2.0), RelativeBias(np.ones((8, 1))))}, r"RelativeBias: table must be \[num_buckets, N\] with N = 4"),
    "a head that is not there": ({"mask": jattn.heads.forbid(Causal(), [4])}, r"heads must be below N = 4, .* got \[4\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named(name):
    options, message = WRONG[name]
    with pytest.raises((ValueError, TypeError), match=message) as error:
        make_call(**dict(zip(("query", "key", "value"), ARRAYS, strict=True)) | options)
    assert len(str(error.value)) <= 800


class TestNumbers:
    @pytest.mark.parametrize("rate", [0.5, np.float64(0.5), np.float32(0.5), np.array(0.5), jnp.float32(0.5), 1.0, 1])
    def test_dropout_rate(self, rate):
        result = args(dropout_rate=rate, dropout_rng=KEY).dropout.rate
        assert type(result) is float and result == float(rate)

    @pytest.mark.parametrize("rate", [0, 0.0, np.float64(0), np.array(0.0), jnp.float32(0)])
    def test_no_dropout(self, rate):
        assert args(dropout_rate=rate).dropout is None

    def test_a_traced_dropout_rate(self):
        with pytest.raises(TypeError, match="dropout_rate must be known while tracing"):
            jax.eval_shape(lambda rate: args(dropout_rate=rate), jnp.float32(0.5))

    def test_scale(self):
        for scale in (2, np.float32(2), np.array(2.0)):
            assert type(args(scale=scale).scale) in (int, float)
        assert args().scale == H**-0.5
        without_dim = [x[..., :0] for x in ARRAYS]
        assert make_call(*without_dim, scale=2.0).scale == 2.0

    @pytest.mark.parametrize("window", [(2**40, 0), (np.int64(2**40), np.uint8(0))])
    def test_a_window_beyond_int32(self, window):
        (mask,) = args(local_window_size=window).masks
        q, kv = np.arange(T, dtype=np.int32)[:, None], np.arange(S, dtype=np.int32)
        np.testing.assert_array_equal(jax.jit(lambda q, kv: mask(0, 0, q, kv))(q, kv[None]), kv <= q)


class TestIntegers:
    @pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.uint32, np.int64])
    def test_positions_and_lengths_become_int32(self, dtype):
        for xp in (np, jnp) if np.dtype(dtype).itemsize < 8 else (np,):
            arguments = args(
                query_positions=xp.arange(T, dtype=np.int32).astype(dtype), kv_positions=xp.ones((B, S), dtype),
                key_value_seq_lengths=xp.ones(B, dtype),
            )  # fmt: skip
            integers = arguments.query_positions, arguments.kv_positions, arguments.key_value_seq_lengths
            assert all(x.dtype == np.int32 for x in integers)
            np.testing.assert_array_equal(arguments.query_positions[0], np.arange(T))
            assert isinstance(arguments.query_positions, np.ndarray) == (xp is np), "static arrays must stay static"

    def test_the_ends_of_int32(self):
        ends = np.array([-(2**31), 0, 2**31 - 1])
        np.testing.assert_array_equal(args(query_positions=ends).query_positions, ends[None])

    def test_traced_64_bits_stop_at_the_ends(self):
        with jax.enable_x64(True):
            traced = jax.jit(lambda x: args(query_positions=x).query_positions)
            result = traced(np.array([-(2**40), 3, 2**40]))
        assert result.dtype == np.int32 and result[0].tolist() == [-(2**31), 3, 2**31 - 1]


class TestPairs:
    """Masks and biases of every rank, as ``jax.nn`` broadcasts them."""

    @pytest.mark.parametrize("shape", [(), (1,), (S,), (T, 1), (T, S), (N, 1, S), (B, 1, T, S)], ids=str)
    def test_ranks(self, shape):
        array = np.random.default_rng(0).random(shape) < 0.5
        full = args(mask=array, bias=np.float32(array))
        wanted = np.broadcast_to(array, (B, N, T, S))
        np.testing.assert_array_equal(np.broadcast_to(full.slot_masks[0], wanted.shape), wanted)
        np.testing.assert_array_equal(np.broadcast_to(full.bias, wanted.shape), wanted)

    def test_as_jax_nn(self):
        rng = np.random.default_rng(1)
        q, k, v = (jnp.asarray(rng.normal(size=x.shape), jnp.float32) for x in ARRAYS)
        mask, bias = np.array([True, False, True, True, False]), jnp.asarray(rng.normal(size=S), jnp.float32)
        both = jattn.dot_product_attention, jax.nn.dot_product_attention
        pairs = (bias, mask), (jnp.float32(2), np.True_)
        for one, other in zip(*jax.jit(lambda: [[f(q, k, v, *at) for at in pairs] for f in both])(), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6)

    def test_others(self):
        for shape in ((B,), (T,), (1, B, N, T, S)):
            message = r"mask must be bool \[\], \[S\], \[T, S\], \[N, T, S\] or \[B, N, T, S\] = \[2, 4, 3, 5\]"
            with pytest.raises(ValueError, match=message):
                args(mask=np.ones(shape, bool))


class TestTracing:
    def test_captured_arrays_are_looked_at(self):
        """The values of captured arrays are known, those of arguments are not, and outside jit nothing is copied."""
        positions, lengths, mask = jnp.arange(T), jnp.array([3, 5]), jnp.ones((T, S), bool)
        static = []

        def look(query, positions, lengths, mask):
            options = {"query_positions": positions, "key_value_seq_lengths": lengths, "mask": mask}
            arguments = make_call(query, *ARRAYS[1:], **options)
            static.append([isinstance(x, np.ndarray) for x in (arguments.query_positions, *arguments.slot_masks)])

        operands = (positions, lengths, mask)
        jax.eval_shape(lambda query: look(query, *operands), ARRAYS[0])
        jax.eval_shape(look, ARRAYS[0], *operands)
        look(jnp.asarray(ARRAYS[0]), *operands)
        assert static == [[True] * 3, [False] * 3, [False] * 3]

    def test_tables_by_position_have_any_length(self):
        ids, table = np.zeros((B, 99), int), np.ones((N, 99, 99), bool)
        for mask in (Segments(ids), Dense(table)):
            with pytest.raises(ValueError, match="got shape .*99"):
                args(mask=mask)
            args(mask=mask, query_positions=np.arange(T), kv_positions=np.arange(S))
            args(mask=mask, query_positions=np.arange(T))  # for a cache, whose slots are the positions
        with pytest.raises(ValueError, match=r"query_ids must be \[B, T\] = \[2, any\]"):
            args(mask=Segments(np.zeros((3, 99), int)), query_positions=np.arange(T))

    @pytest.mark.parametrize("shape", ["b, 8", "2, t", "b, t"])
    def test_symbolic_shapes(self, shape):
        sizes = jax.export.symbolic_shape(shape)
        query, ids, lengths = (
            jax.ShapeDtypeStruct(shape, dtype)
            for shape, dtype in (((*sizes, N, H), jnp.float32), (sizes, jnp.int32), (sizes[:1], jnp.int32))
        )

        def one(query, ids, lengths):
            arguments = make_call(
                query, query, query, jnp.zeros((N, 1, 1)), Causal() & Segments(ids) & Padding(lengths), is_causal=True,
                query_seq_lengths=lengths, key_value_seq_lengths=lengths, query_positions=ids,
                score_mod=Alibi(np.ones(N, np.float32)),
            )  # fmt: skip
            return arguments.slot_masks, arguments.query_positions, arguments.scale * arguments.query

        exported = jax.export.export(jax.jit(one))(query, ids, lengths)
        (by_query, by_key), positions, _ = exported.call(
            np.zeros((2, 8, N, H), np.float32), np.zeros((2, 8), np.int32), np.array([3, 8], np.int32)
        )
        assert by_query.sum((1, 2, 3)).tolist() == by_key.sum((1, 2, 3)).tolist() == [3, 8]
        assert positions.shape == (2, 8)
