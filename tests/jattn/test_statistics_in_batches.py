"""A sequence's statistics do not depend on how it is batched: alone, packed, or padded on either side.

What is expected is computed query by query, from the weights of each sequence alone.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jattn
import jattn.nnx
from jattn import heads, interop, masks
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.pallas_gpu.interpreted import Interpreted
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.sharding import HeadParallel, Ring, SplitKeys, Ulysses, to_zigzag
from tests.ring_cases import mesh_of

LENGTHS, N, K, H, WINDOW = (5, 12, 7), 2, 1, 4, 3
SEQUENCES = [
    {
        "query": rng.integers(-16, 17, (length, N, H)).astype(np.float32) / 4,  # exact in bfloat16
        "key": rng.integers(-16, 17, (length, K, H)).astype(np.float32) / 8,
        "tokens": rng.integers(0, 4, length),
    }
    for length in LENGTHS
    for rng in [np.random.default_rng(length)]
]


def by_query(sequence, sees):
    """``{name: [N lists of a number for each query that counts]}``, and those of keys and offsets, of one sequence."""
    length, tokens = len(sequence["tokens"]), sequence["tokens"]
    rows = {name: [[] for _ in range(N)] for name in heads.STATISTICS}
    received, offsets = np.zeros((N, length)), [{} for _ in range(N)]
    for h in range(N):
        for q in range(length):
            seen = [kv for kv in range(length) if sees(q, kv)]
            if not seen:
                continue
            scores = np.array(
                [np.float64(sequence["query"][q, h]) @ sequence["key"][kv, 0] / np.sqrt(H) for kv in seen]
            )
            weights = np.exp(scores) / np.exp(scores).sum()
            p = dict(zip(seen, weights, strict=True))
            if len(seen) > 1:
                rows["entropy"][h].append(-(weights * np.log(weights)).sum() / np.log(len(seen)))
            rows["max_weight"][h].append(weights.max())
            rows["max_logit"][h].append(scores.max())
            rows["distance"][h].append(sum(x * abs(q - kv) for kv, x in p.items()))
            targets = {
                "previous_token": {q - 1},
                "current_token": {q},
                "first_token": {0} if q else set(),
                "duplicate_token": {kv for kv in range(q) if tokens[kv] == tokens[q]},
                "induction": {kv + 1 for kv in range(q) if tokens[kv] == tokens[q]},
            }
            for name, keys in targets.items():
                if keys & p.keys():
                    rows[name][h].append(sum(p[kv] for kv in keys & p.keys()))
            for kv, x in p.items():
                received[h, kv] += x
                offsets[h].setdefault(kv - q, []).append(x)
    return rows, received, offsets


def assert_of(result, sequences, sees, starts, tolerance=1e-6):
    """``result``, of one row, is that of these sequences, which begin at these slots."""
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    parts = [by_query(sequence, sees) for sequence in sequences]
    T = (result["offset_profile"].shape[-1] + 1) // 2
    for h in range(N):
        for name in heads.STATISTICS:
            values = [x for rows, _, _ in parts for x in rows[name][h]]
            if name == "offset_profile":
                for offset in range(1 - T, T):
                    of_offset = [x for _, _, offsets in parts for x in offsets[h].get(offset, [])]
                    close(result[name][h, offset + T - 1], np.mean(of_offset or [0.0]))
                continue
            if name == "received":
                wanted = np.zeros(T)
                for start, (_, received, _) in zip(starts, parts, strict=True):
                    wanted[start : start + len(received[h])] = received[h]
                close(result[name][h], wanted)
                continue
            wanted = np.max(values) if name == "max_logit" else np.mean(values or [0.0])
            close(result[name][h], wanted, err_msg=name)
            assert result["support"][name][h] == len(values), name


def causal(q, kv):
    return kv <= q


def in_window(q, kv):
    return q - WINDOW <= kv <= q


def everything(q, kv):
    return True


SEES = {"causal": causal, "window": in_window, "full": everything}
MASKS = {"causal": masks.Causal(), "window": masks.SlidingWindow(WINDOW), "full": None}
LENGTH = sum(LENGTHS)  # of every batch; the same number is a multiple of 4 devices and their chunks


def joined(mask, other):
    return other if mask is None else mask & other


def batched(name, starts):
    """An array of all sequences ``[B,LENGTH,...]``, each from its slot on; random numbers elsewhere."""
    rng, rows = np.random.default_rng(9), []
    for sequence, start in zip(SEQUENCES, starts, strict=True):
        x = sequence[name]
        row = (
            rng.integers(0, 4, LENGTH) if name == "tokens" else rng.normal(size=(LENGTH, *x.shape[1:])).astype(x.dtype)
        )
        row[start : start + len(x)] = x
        rows.append(row)
    return np.stack(rows)


def padded(starts):
    """``(query, key, tokens)`` and which of them are real, bool ``[B,LENGTH]``."""
    arrays = [batched(name, starts) for name in ("query", "key", "tokens")]
    t, first, count = np.arange(LENGTH), np.array(starts)[:, None], np.array(LENGTHS)[:, None]
    return arrays, (t >= first) & (t < first + count)


PACKED = [np.concatenate([sequence[name] for sequence in SEQUENCES])[None] for name in ("query", "key", "tokens")]
DOCUMENTS = np.repeat(np.arange(3), LENGTHS)
RESTARTED = np.concatenate([np.arange(length) for length in LENGTHS])
ENDS = np.cumsum([0, *LENGTHS])
LEFT, RIGHT = [LENGTH - length for length in LENGTHS], [0, 0, 0]
LOWEST = np.finfo(np.float32).min


def key_bias(real, low):
    return np.where(real, 0.0, low).astype(np.float32)[:, None, None]


def pairs_of(kind):
    at = np.arange(LENGTH)
    return np.array([[SEES[kind](q, kv) for kv in at] for q in at])


def flax_masks(real, kind):
    """What Flax's ``make_attention_mask`` and ``combine_masks`` make of padding: pads neither see nor are seen."""
    return real[:, None, :, None] & real[:, None, None, :] & pairs_of(kind)


# How padding is told; of (real, kind) the options
PADDED = {
    "mask array of keys": lambda real, kind: {"mask": real[:, None, None]} | kind_option(kind),
    "Dense": lambda real, kind: {"mask": joined(MASKS[kind], masks.Dense(real[:, None, None]))},
    "Flax's masks": lambda real, kind: {"mask": flax_masks(real, kind)},
    "bias of -inf": lambda real, kind: {"bias": key_bias(real, -np.inf)} | kind_option(kind),
    "bias of the lowest number": lambda real, kind: {"bias": key_bias(real, LOWEST)} | kind_option(kind),
    "bias of pairs": lambda real, kind: {"bias": np.where(flax_masks(real, kind), 0.0, LOWEST).astype(np.float32)},
    "positions": lambda real, kind: {"mask": real[:, None, None]} | positions_of(real) | kind_option(kind),
}
RIGHT_ALONE = {
    "Padding": lambda real, kind: {"mask": joined(MASKS[kind], masks.Padding(np.array(LENGTHS)))},
    "lengths": lambda real, kind: {"key_value_seq_lengths": np.array(LENGTHS)} | kind_option(kind),
}


def kind_option(kind):
    return {"causal": {"is_causal": True}, "window": {"local_window_size": (WINDOW, 0)}, "full": {}}[kind]


def positions_of(real):
    at = np.maximum(np.cumsum(real, 1) - 1, 0)
    return {"query_positions": at, "kv_positions": at}


def look(query, key, tokens, implementation=None, **options):
    fn = lambda q, k, t: heads.statistics(q, k, tokens=t, implementation=implementation, **options)
    return jax.tree.map(np.asarray, jax.jit(fn)(query, key, tokens))


def assert_rows(result, kind, starts, tolerance=1e-6):
    for i, sequence in enumerate(SEQUENCES):
        assert_of(jax.tree.map(lambda x, i=i: x[i], result), [sequence], SEES[kind], [starts[i]], tolerance)


@pytest.mark.slow_except("mask array of keys-causal")
@pytest.mark.parametrize("kind", SEES)
@pytest.mark.parametrize("how", [*PADDED, *RIGHT_ALONE])
def test_padded(how, kind):
    """Also on the left, where that can be told."""
    for starts in (RIGHT, LEFT) if how in PADDED else (RIGHT,):
        arrays, real = padded(starts)
        assert_rows(look(*arrays, **(PADDED | RIGHT_ALONE)[how](real, kind)), kind, starts)


PACKINGS = {
    "Segments": lambda kind: {"mask": joined(MASKS[kind], masks.Segments(DOCUMENTS))},
    "Segments of both": lambda kind: {"mask": joined(MASKS[kind], masks.Segments(DOCUMENTS, DOCUMENTS[None]))},
    "restarted positions": lambda kind: {
        "mask": (DOCUMENTS[:, None] == DOCUMENTS) & pairs_of(kind), "query_positions": RESTARTED, "kv_positions": RESTARTED,
    },
}  # fmt: skip


@pytest.mark.slow_except("Segments-window")
@pytest.mark.parametrize("kind", SEES)
@pytest.mark.parametrize("how", PACKINGS)
def test_packed(how, kind):
    result = look(*PACKED, **PACKINGS[how](kind))
    assert_of(jax.tree.map(lambda x: x[0], result), SEQUENCES, SEES[kind], ENDS[:-1])


@pytest.mark.slow
def test_interleaved():
    """Tokens of one sequence need not be neighbours."""
    order = np.random.default_rng(0).permutation(LENGTH)
    order = np.concatenate([np.sort(order[a:b]) for a, b in itertools.pairwise(ENDS)])  # the slots of each sequence
    arrays = [np.empty_like(x) for x in PACKED]
    for x, packed in zip(arrays, PACKED, strict=True):
        x[:, order] = packed
    ids = np.empty_like(DOCUMENTS)
    ids[order] = DOCUMENTS
    result = look(*arrays, mask=masks.Segments(ids) & masks.Causal())
    del result["offset_profile"], result["received"]  # of slots
    wanted = look(*PACKED, mask=masks.Segments(DOCUMENTS) & masks.Causal())
    for name in result.keys() - {"support"}:
        np.testing.assert_allclose(result[name], wanted[name], rtol=1e-6, err_msg=name)
        np.testing.assert_array_equal(result["support"][name], wanted["support"][name])


IMPLEMENTATIONS = {
    "blocks": lambda: Blockwise((8, 4)),
    "pallas_tpu": lambda: PallasTPU((128, 128), interpret=True),
    "pallas_gpu": lambda: Interpreted(),
    "ring": lambda: Ring(mesh_of(4), "sequence"),
    "zigzag": lambda: Ring(mesh_of(4), "sequence", layout="zigzag"),
    "heads": lambda: HeadParallel(mesh_of(2), "sequence"),
    "ulysses": lambda: Ulysses(mesh_of(2), "sequence"),
    "keys": lambda: SplitKeys(mesh_of(4), "sequence"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("batch", ["packed", "left", "bias"])
def test_every_implementation(name, batch):
    how = IMPLEMENTATIONS[name]()
    turn = lambda x, axis=1: np.asarray(to_zigzag(jnp.asarray(x), 4, axis=axis)) if name == "zigzag" else x
    arrays, real = (PACKED, None) if batch == "packed" else padded(LEFT)
    options = {
        "packed": lambda: {"mask": masks.Segments(DOCUMENTS) & masks.Causal()},
        "left": lambda: {"mask": masks.Dense(real[:, None, None]), "local_window_size": (WINDOW, 0)},
        "bias": lambda: {"bias": turn(key_bias(real, LOWEST), 3), "is_causal": True},
    }[batch]()
    if name in ("pallas_gpu", "pallas_tpu"):  # heads of 64 features
        arrays = [np.pad(x * 2, ((0, 0),) * 3 + ((0, 60),)) if x.ndim == 4 else x for x in arrays]
        options["scale"] = 1 / 4 / np.sqrt(H)
    tolerance = 1e-6
    if name == "pallas_gpu":  # of 16 bits, with an approximate exponential
        arrays = [x.astype(jnp.bfloat16) if x.ndim == 4 else x for x in arrays]
        options, tolerance = {key: x.astype(jnp.bfloat16) if key == "bias" else x for key, x in options.items()}, 1e-5
    result = look(*map(turn, arrays), implementation=how, **options)
    if name == "zigzag":
        back = np.argsort(turn(np.arange(LENGTH), 0))
        result["received"] = result["received"][..., back]
    if batch == "packed":
        assert_of(jax.tree.map(lambda x: x[0], result), SEQUENCES, causal, ENDS[:-1], tolerance)
    else:
        assert_rows(result, "window" if batch == "left" else "causal", LEFT, tolerance)


# as users call it


def layer_and_inputs():
    layer = jattn.nnx.MultiHeadAttention(N, 8, num_kv_heads=K, rngs=nnx.Rngs(0))
    return layer, [jax.random.normal(jax.random.key(i), (1, length, 8)) for i, length in enumerate(LENGTHS)]


@functools.partial(nnx.jit, static_argnames=("is_causal", "names"))
def sown(layer, *inputs, is_causal=True, names=("entropy", "previous_token", "first_token", "distance"), **options):
    watch = nnx.capture(
        lambda layer: layer(*inputs, is_causal=is_causal, sow_statistics=names, **options), nnx.Intermediate
    )
    return heads.collect(watch(layer)[1], "attention_statistics")[0]


def assert_same_rows(result, each):
    for i, alone in enumerate(each):
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y[0], atol=1e-6), result, alone)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [LENGTH, LENGTH + 3])
def test_a_prompt_that_is_padded_on_its_way_into_a_cache(capacity):
    """Also without a causal mask, under which padding would see what the cache holds."""
    layer, inputs = layer_and_inputs()
    for starts in (LEFT, RIGHT):
        x, valid = jnp.ones((3, LENGTH, 8)), np.zeros((3, LENGTH), bool)
        for i, (start, one) in enumerate(zip(starts, inputs, strict=True)):
            x = x.at[i, start : start + one.shape[1]].set(one[0])
            valid[i, start : start + one.shape[1]] = True
        for is_causal in (True, False):
            cache = jattn.init_cache(3, capacity, K, 4)
            result = sown(layer, x, is_causal=is_causal, cache=cache, valid=valid)
            assert_same_rows(result, [sown(layer, one, is_causal=is_causal) for one in inputs])


@pytest.mark.slow
def test_all_queries_count_in_cross_attention():
    """Padding of the keys says nothing of queries, also where there are as many."""
    layer, _ = layer_and_inputs()
    x, x_kv = (jax.random.normal(jax.random.key(i), (2, 6, 8)) for i in (5, 6))
    mask = masks.Padding(np.array([4, 6]))
    result = sown(layer, x, x_kv, is_causal=False, mask=mask)
    assert result["support"]["entropy"].tolist() == [[6, 6], [6, 6]]
    alone = sown(layer, x[:1], x_kv[:1, :4], is_causal=False)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x[:1], y, atol=1e-6), result, alone)
    assert sown(layer, x, is_causal=False, mask=mask)["support"]["entropy"].tolist() == [[4, 4], [6, 6]]
    params = jattn.init_multi_head(jax.random.key(0), 8, N)
    wanted = {"mask": mask, "return_statistics": ["entropy"]}
    of_all = jattn.multi_head_attention(params, x, x_kv, **wanted)[1]["support"]["entropy"]
    of_real = jattn.multi_head_attention(params, x, **wanted)[1]["support"]["entropy"]
    assert of_all.tolist() == [[6, 6], [6, 6]] and of_real.tolist() == [[4, 4], [6, 6]]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["learned positions", "windows"])
@pytest.mark.parametrize("mask", [None, masks.SlidingWindow(6)], ids=["no mask", "a mask function"])
def test_a_model_that_is_looked_into(family, mask):
    special = {
        "learned positions": {},
        "windows": {"position": jattn.positions.Rotary(), "window": 4, "local": (True, False)},
    }[family]
    sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 4, "max_length": LENGTH}
    config = interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu", **special)
    model = interop.Transformer(config, rngs=nnx.Rngs(0))

    def of(tokens, **options):
        layers = interop.look(model, tokens, **{"mask": mask} | options)
        arrays = ("query", "key", "value", "lse", "z")
        options = [{name: x for name, x in layer.items() if name not in arrays} for layer in layers]
        each = zip(layers, options, strict=True)
        return [heads.statistics(one["query"], one["key"], lse=one["lse"], tokens=tokens, **rest) for one, rest in each]

    alone = [of(sequence["tokens"][None]) for sequence in SEQUENCES]
    means = [name for name in heads.STATISTICS if name not in ("offset_profile", "received", "max_logit")]

    def assert_of_layer(i, result, row, each):
        """Row ``row`` of layer i's statistics is over the queries of these sequences."""
        for name in means:
            values, counts = (
                [np.asarray(x, np.float64) for x in pair]
                for pair in zip(*((alone[n][i][name][0], alone[n][i]["support"][name][0]) for n in each), strict=True)
            )
            wanted = np.sum([x * count for x, count in zip(values, counts, strict=True)], 0) / np.maximum(
                sum(counts), 1
            )
            np.testing.assert_allclose(result[name][row], wanted, atol=1e-6, err_msg=name)
            np.testing.assert_array_equal(result["support"][name][row], sum(counts))

    for starts in (LEFT, RIGHT):
        tokens, real = batched("tokens", starts), padded(starts)[1]
        for i, result in enumerate(of(tokens, valid=real)):
            for row in range(3):
                assert_of_layer(i, result, row, [row])
    documents = masks.Segments(DOCUMENTS)
    packed = of(PACKED[2], mask=documents if mask is None else documents & mask, input_positions=RESTARTED)
    for i, result in enumerate(packed):
        assert_of_layer(i, result, 0, range(3))


# as it was reported


def continuing(tokens):
    """A head that looks at what followed the latest earlier occurrence, else at itself: ``(query, key) [T,1,T]``."""
    length = len(tokens)
    at = np.arange(length)
    for q in range(length):
        before = [kv + 1 for kv in range(q) if tokens[kv] == tokens[q]]
        at[q] = before[-1] if before else q
    return np.float32(60 * np.sqrt(length) * np.eye(length)[at][:, None]), np.eye(length, dtype=np.float32)[:, None]


@pytest.mark.parametrize("length, mask, seen", [
    (60, masks.Segments(np.repeat(np.arange(3), 20)), lambda q, kv: q // 20 == kv // 20),
    pytest.param(80, masks.SlidingWindow(15), lambda q, kv: q - kv <= 15, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_perfect_induction_head_is_perfect_where_it_can_be(length, mask, seen):
    """Each token occurs twice; the few queries that see the first time count, and no others."""
    tokens = np.random.default_rng(2).permutation(np.repeat(np.arange(length // 2), 2))
    query, key = continuing(tokens)
    first = {int(token): kv for kv, token in reversed(list(enumerate(tokens)))}
    able = sum(first[token] < q and seen(q, first[token] + 1) for q, token in enumerate(tokens.tolist()))
    look = jax.jit(
        lambda *both: heads.statistics(*both, tokens=tokens, names=["induction"], mask=mask & masks.Causal())
    )
    result = look(query, key)
    if length == 60:  # the first of the next document followed no token of this one
        able -= sum(
            first[token] < q and first[token] // 20 != (first[token] + 1) // 20 == q // 20
            for q, token in enumerate(tokens.tolist())
        )
    assert 3 < able < length // 4 and result["support"]["induction"].tolist() == [able]
    assert result["induction"][0] > 0.999


@pytest.mark.parametrize(
    "low", [LOWEST, pytest.param(-np.inf, marks=pytest.mark.slow), pytest.param(-1e9, marks=pytest.mark.slow)]
)
def test_what_a_bias_hides_does_not_count_as_seen(low):
    even = jnp.zeros((12, 1, 4))
    bias = np.where(np.tri(12, dtype=bool), 0.0, low).astype(np.float32)
    look = jax.jit(
        lambda **options: heads.statistics(even, even, **options), static_argnames=("score_mod", "is_causal")
    )
    wanted = look(is_causal=True)
    for options in ({"bias": bias}, {"score_mod": lambda score, b, h, q, kv: jnp.where(kv <= q, score, low)}):
        result = look(**options)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), result, wanted)
        np.testing.assert_allclose(result["entropy"], 1.0, rtol=1e-6)
