"""Wrong calls and the words that must be in their errors: the argument, what it got, what was expected.

As a program, makes every call without a type checker, as users do, and prints what was raised as JSON.
"""

import json
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jattn
import jattn.linen
import jattn.nnx
from jattn import heads, interop, masks, positions, score_mods, sharding
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.decode import Decode
from jattn.masks import Causal, Dense, Padding, Prefix, Segments, SlidingWindow
from jattn.multi_head import attend_heads

B, T, S, N, K, H = 2, 4, 6, 4, 2, 8
Q, KEY, VALUE = (np.zeros(shape, np.float32) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))
LSE, TOKENS = np.zeros((B, T, N), np.float32), np.zeros((B, T), np.int32)
RNG = np.zeros(2, np.uint32)
NNX = jattn.nnx.MultiHeadAttention(4, 16, rngs=nnx.Rngs(0))
Row = tuple[Callable[[], object], str]  # a call, and words that must all be in its error


@jattn.pytree_dataclass
class Integers(Causal):
    """Its bounds are not bools."""

    def bounds(self, b, h, q_min, q_max, kv_min, kv_max):
        return 1, 0


def call(*words: str, query=Q, key=KEY, value=VALUE, **options) -> Row:
    return lambda: jattn.dot_product_attention(query, key, value, **options), words


def one(*words: str, q=Q[0, :, 0], k=KEY[0, :, 0], v=VALUE[0, :, 0], **options) -> Row:
    return lambda: jattn.attend(q, k, v, **options), words


def stat(*words: str, query=Q, key=Q, **options) -> Row:
    return lambda: heads.statistics(query, key, **options), words


def layer(*words: str, query=Q, key=KEY, value=VALUE, **options) -> Row:
    return lambda: attend_heads(query, key, value, **options), words


def of(make: Callable[[], object], *words: str) -> Row:
    return make, words


def both(name: str, *words: str, **options) -> dict[str, Row]:
    """The same call for one head, by "xla" and in blocks."""
    in_blocks = lambda: jattn.blockwise(Q[0, :, 0], KEY[0, :, 0], VALUE[0, :, 0], **options)
    return {f"{name}, one head": one(*words, **options), f"{name}, one head in blocks": (in_blocks, words)}


def tables(name: str, make: Callable, *words: str) -> dict[str, Row]:
    """Constructors that raise."""
    arguments = {"a float": 1.5, "a word": "a", "a list": [1, 2], "floats": np.ones(B, np.float32)}
    return {f"{name}, {n}": (lambda bad=bad: make(bad), words) for n, bad in arguments.items()}


BERT = {
    "model_type": "bert", "num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "vocab_size": 9,
    "max_position_embeddings": 7, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
}  # fmt: skip
MESH = jax.make_mesh((1,), ("x",))

ROWS: dict[str, Row] = {
    # arrays
    "no value": call("value", "None", "attention_weights", value=None),
    "dtypes differ": call("float16", "float32", query=Q.astype(np.float16)),
    "integers": call("int32", query=Q.astype(np.int32), key=KEY.astype(np.int32), value=VALUE.astype(np.int32)),
    "complex": call("complex64", query=Q.astype("D"), key=KEY.astype("D"), value=VALUE.astype("D")),
    "a word for query": call("query", "str", query="query"),
    # scale, flags, lengths, windows
    "scale complex": call("scale must be a number", scale=1j),
    "is_causal a number": call("is_causal must be True or False", "1", is_causal=1),
    "lengths of 3": call("key_value_seq_lengths", "3", key_value_seq_lengths=np.ones(3, int)),
    "window negative": call("local_window_size", "-1", local_window_size=-1),
    # masks, biases and score functions
    "mask of ints": call("mask must be bool", "int", mask=np.ones((T, S), int)),
    "mask of another shape": call("mask", "[5, 6]", mask=np.ones((5, S), bool)),
    "mask function of floats": call("mask", "bool", "float32", mask=lambda b, h, q, k: q * 1.0),
    "mask function of another shape": call("mask", "shape", mask=lambda b, h, q, k: jnp.ones((3, 3), bool)),
    "mask function of two": call("mask must take (b, h, q_idx, kv_idx)", "(q, k)", mask=lambda q, k: q > k),
    "bias of ints": call("bias must be floating", "int", "mask=", bias=np.ones((T, S), int)),
    "bias of bools": call("bias must be floating", "bool", "mask=", bias=np.ones((T, S), bool)),
    "bias of another shape": call("bias", "[7, 6]", bias=np.ones((7, S), np.float32)),
    "score_mod of a mask's arguments": call("score_mod must take (score, b, h", score_mod=lambda b, h, q, k: q),
    "score_mod of bools": call("score_mod", "bool", score_mod=lambda s, b, h, q, k: s > 0),
    "score_mod of another shape": call("score_mod", "shape", score_mod=lambda s, b, h, q, k: jnp.ones((3, 3))),
    "segments of 9": call("Segments", "9", mask=Segments(np.ones((B, 9), int))),
    # positions
    "positions of floats": call("query_positions", "float64", query_positions=np.ones(T)),
    "positions of 5": call("query_positions", "[5]", query_positions=np.arange(5)),
    "kv_positions beyond int32": call("kv_positions", "int32", kv_positions=np.arange(S) - 2**40),
    "kv_positions unsigned beyond": call("kv_positions", "int32", kv_positions=np.arange(S).astype(np.uint64) + 2**40),
    # dropout and sinks
    "dropout negative": call("dropout_rate", "-0.5", dropout_rate=-0.5, dropout_rng=RNG),
    "sinks of 3": call("sinks", "[3]", sinks=np.ones(3, np.float32)),
    "sinks of ints": call("sinks", sinks=np.ones(N, int)),
    # implementations
    "no such implementation": call("implementation", "'flash'", "blockwise", implementation="flash"),
    "implementation a class": call("implementation", "Blockwise", implementation=Blockwise),
    "implementation a number": call("implementation", "3", implementation=3),
    "block_sizes 0": call("block_sizes", "(0, 4)", implementation=Blockwise((0, 4))),
    "block_sizes one": of(lambda: jattn.dot_product_attention(Q, KEY, VALUE, implementation=Blockwise(4)), "block_sizes", "4"),
    "chunk 0": call("chunk", "0", implementation=Decode(0)),
    "no such option": call("unexpected keyword argument 'no_option'", no_option=1),
    # what others call these arguments
    **{f"{name}=": call(f"unexpected keyword argument '{name}'; did you mean {meant}?", **{name: 1}) for name, meant in {
        "causal": "is_causal", "is_casual": "is_causal", "attn_mask": "mask", "block_mask": "mask",
        "key_mask": "key_value_seq_lengths, or mask=mask[:, None, None, :]", "attn_bias": "bias",
        "dropout": "dropout_rate", "dropout_p": "dropout_rate", "softmax_scale": "scale", "sm_scale": "scale",
        "enable_gqa": "key and value with fewer heads than query, which need no flag",
        "window_size": "local_window_size", "softcap": "score_mod=jattn.score_mods.SoftCap(cap)",
        "segment_ids": "mask=jattn.masks.Segments(ids)", "key_value_seq_length": "key_value_seq_lengths",
    }.items()},
    "return_weights=": call("'return_weights'; did you mean jattn.attention_weights(query, key, ...)?", return_weights=True),
    "nnx, return_weights=": of(lambda: NNX(np.zeros((1, 4, 16), np.float32), return_weights=True), "did you mean sow_weights?"),
    "SlidingWindow(window=)": of(lambda: SlidingWindow(window=4), "'window'; did you mean left, not counting"),
    "Segments(segment_ids=)": of(lambda: Segments(segment_ids=TOKENS), "'segment_ids'; did you mean query_ids?"),
    "Padding(length=)": of(lambda: Padding(length=np.ones(2, int)), "'length'; did you mean lengths?"),
    "jattn.MultiHeadAttention": of(lambda: jattn.MultiHeadAttention, "did you mean jattn.nnx.MultiHeadAttention or jattn.linen"),
    "jattn.Causal": of(lambda: jattn.Causal, "no attribute 'Causal'; did you mean jattn.masks.Causal?"),
    "jattn.no_such_name": of(lambda: jattn.no_such_name, "no attribute 'no_such_name'"),
    "frozen a dict": layer("frozen query and key", "(query, key)", "dict", key=Q, value=Q, frozen={"query": Q, "key": Q}),
    "q=, k=, v=": of(lambda: jattn.dot_product_attention(q=Q, k=KEY, v=VALUE), "'q'; did you mean query?"),
    "weights, causal=": of(lambda: jattn.attention_weights(Q, KEY, causal=True), "'causal'; did you mean is_causal?"),
    "fold, sm_scale=": of(lambda: jattn.fold_weights(lambda c, *x: c, 0.0, Q, KEY, sm_scale=1.0), "'sm_scale'; did you mean scale?"),
    "explain, dropout=": of(lambda: jattn.explain(Q, KEY, VALUE, dropout=0.1), "did you mean dropout_rate?"),
    "statistics, causal=": stat("did you mean is_causal?", causal=True),
    "layer, causal=": layer("did you mean is_causal?", causal=True),
    "one head, is_causal=": one("did you mean mask=jattn.masks.Causal()?", is_causal=True),
    "one head, dropout_rate=": one("did you mean dropout=(rate, key)?", dropout_rate=0.1),
    "one head, query=": of(lambda: jattn.attend(query=Q, key=KEY, value=VALUE), "'query'; did you mean q?"),
    "one head in blocks, causal=": of(lambda: jattn.blockwise(Q[0, :, 0], KEY[0, :, 0], VALUE[0, :, 0], causal=True), "mask=jattn.masks.Causal()?"),
    "nnx, dropout=": of(lambda: jattn.nnx.MultiHeadAttention(4, 16, dropout=0.1, rngs=nnx.Rngs(0)), "did you mean dropout_rate?"),
    "nnx, heads=": of(lambda: jattn.nnx.MultiHeadAttention(n_heads=4, in_features=16, rngs=nnx.Rngs(0)), "did you mean num_heads?"),
    "nnx, causal=": of(lambda: NNX(TOKENS[..., None] * np.ones(16, "f"), causal=True), "did you mean is_causal?"),
    "nnx, attention_mask=": of(lambda: NNX(np.ones((2, 3, 16), "f"), attention_mask=1), "did you mean mask?", "head_gate"),
    "linen, causal=": of(lambda: jattn.linen.MultiHeadAttention(4).init(RNG, np.ones((2, 3, 16), "f"), causal=True), "did you mean is_causal?"),
    "nnx's function, causal=": of(lambda: jattn.nnx.dot_product_attention(*map(jnp.asarray, (Q, KEY, VALUE)), causal=True), "did you mean is_causal?"),
    "return_residual a word": call("return_residual", return_residual="yes"),
    # one head
    **both("mask of floats", "mask must be bool", "float32", mask=np.ones((T, S), np.float32)),
    **both("mask of ints", "mask must be bool", "int", mask=np.ones((T, S), int)),
    **both("mask of another shape", "mask must be bool", "[T, S] = [4, 6] for one head", "[5, 6]", mask=np.ones((5, S), bool)),
    **both("mask a class", "mask=Causal is a class", mask=Causal),
    **both("bias of ints", "bias must be floating", "int", bias=np.ones((T, S), int)),
    **both("bias of another shape", "bias must be floating", "[T, S] = [4, 6] for one head", "[4, 5]", bias=np.ones((T, 5), np.float32)),
    **both("scale a word", "scale must be a number", "'2'", scale="2"),
    **both("score_mod a class", "score_mod=SoftCap is a class", score_mod=score_mods.SoftCap),
    **both("mod without head", "score_mod differs by head", "head=", score_mod=score_mods.Alibi(np.ones(N, "f"))),
    **both("mask without batch", "mask differs by batch", "batch=", mask=Padding(np.array([1, 2]))),
    **both("positions beyond int32", "query_positions", "int32", query_positions=np.arange(T) + 2**31),
    "q of all heads, one head": one("one head takes q [T, H]", "over_heads", q=Q[0]),
    "head_dim differs, one head": one("one head takes q [T, H]", q=Q[0, :, 0, :4]),
    "value is shorter, one head": one("one head takes q [T, H]", v=VALUE[0, :3, 0]),
    # the layer
    "gate of 3": layer("head_gate must be [N]", "[3]", head_gate=np.ones(3)),
    "fill without gate": layer("head_fill without head_gate", head_fill=np.ones(H)),
    "no heads": of(lambda: jattn.init_multi_head(jax.random.key(0), 16, 0), "num_heads", "positive", "0"),
    "a float of heads": of(lambda: jattn.init_multi_head(jax.random.key(0), 16, 2.0), "num_heads", "2.0"),
    "no width": of(lambda: jattn.init_multi_head(jax.random.key(0), 0, 4), "model_dim", "0"),
    "width no multiple": of(lambda: jattn.init_multi_head(jax.random.key(0), 15, 4), "model_dim 15", "head_dim"),
    "head_dim negative": of(lambda: jattn.init_multi_head(jax.random.key(0), 16, 4, head_dim=-4), "head_dim", "-4"),
    "layer of another width": of(lambda: jattn.multi_head_attention(jattn.init_multi_head(RNG, 16, 4), np.ones((2, 3, 15), "f")), "16", "15"),
    # caches
    "cache of bytes": of(lambda: jattn.init_cache(1, 8, 2, 4, dtype=jnp.int8), "dtype", "int8", "floating"),
    "cache of other heads": of(lambda: jattn.append(jattn.init_cache(B, 8, 3, H), KEY, VALUE), "key", "3"),
    "cache too small": of(lambda: jattn.append(jattn.init_cache(B, 5, K, H), KEY, VALUE), "5"),
    # statistics and other looks
    "no such statistic": stat("names must be some of", "'entrpy'", names=["entrpy"]),
    "names a word": stat("names must be some of", "'entropy'", names="entropy"),
    "induction without tokens": stat("tokens=", names=["induction"]),
    "tokens beyond int32": stat("tokens", "int32", tokens=TOKENS + np.int64(2**32)),
    "tokens of floats": stat("tokens must be integers", "float32", tokens=TOKENS.astype(np.float32)),
    "tokens of 3": stat("tokens must be integers", "[2, 3]", tokens=TOKENS[:, :3]),
    "statistics with sinks": stat("statistics takes no sinks=", "lse=", sinks=np.ones(N)),
    "fold by name": of(lambda: jattn.fold_weights(lambda c, *x: c, 0.0, Q, KEY, implementation="xla"), "implementation", "'xla'"),
    "statistics by name": stat("implementation", "'xla'", implementation="xla"),
    "lse of 3": stat("lse", lse=LSE[:, :3]),
    "top pairs of 0.5": of(lambda: heads.top_pairs(Q, KEY, 0.5), "k must be a positive integer", "0.5"),
    "top pairs by name": of(lambda: heads.top_pairs(Q, KEY, 2, implementation="xla"), "implementation", "'xla'"),
    "coarse of 0": of(lambda: heads.coarse_weights(Q, KEY, 0), "size", "0"),
    "ablate one dict": of(lambda: heads.ablate(len, {"z": Q}), "clean", "a dict for each layer", "one dict"),
    "fold lse of 3": of(lambda: jattn.fold_weights(lambda c, *x: c, 0.0, Q, KEY, lse=LSE[:, :3]), "lse"),
    # masks and score functions on their own
    **tables("padding", Padding, "Padding"),
    "prefix of 3": of(lambda: Prefix(np.ones(3, int)), "masks.Prefix", "length", "(3,)"),
    **tables("prefix", Prefix, "Prefix"),
    **tables("segments", Segments, "Segments"),
    **tables("dense", Dense, "Dense"),
    "window of a word": of(lambda: SlidingWindow("a", 0), "SlidingWindow"),
    "window of floats, a mask": of(lambda: SlidingWindow(1.5, 0), "SlidingWindow", "float"),
    "segments beyond int32": of(lambda: Segments(np.array([0, 2**32])), "Segments", "int32"),
    "bounds of a function": of(lambda: masks.check_bounds(lambda b, h, q, k: q >= k, 4, 4), "check_bounds: mask must be", "Mask", "function"),
    "bounds of a class": of(lambda: masks.check_bounds(Causal, 4, 4), "check_bounds: mask must be", "Causal"),
    "bounds of integers": of(lambda: masks.check_bounds(Integers(), 4, 4), "Integers.bounds must return two bools", "(1, 0)"),
    "and of nothing": of(lambda: masks.and_masks(), "and_masks"),
    "or of nothing": of(lambda: masks.or_masks(), "or_masks"),
    "and of an array": of(lambda: Causal() & np.ones(3, bool), "ask"),
    "then of nothing": of(lambda: score_mods.then(), "then"),
    "slopes of ints": of(lambda: score_mods.Alibi(np.ones(4, int)), "Alibi", "slopes"),
    "slopes of rank 2": of(lambda: score_mods.Alibi(np.ones((4, 2), np.float32)), "Alibi", "slopes"),
    "slopes a word": of(lambda: score_mods.Alibi("a"), "Alibi", "slopes"),
    "no heads for slopes": of(lambda: score_mods.alibi_slopes(0), "num_heads", "0"),
    "table of ints": of(lambda: score_mods.RelativeBias(np.ones((32, 4), int)), "RelativeBias", "table"),
    "cap of a word": of(lambda: score_mods.SoftCap("a"), "SoftCap"),
    "cap of 0": of(lambda: score_mods.SoftCap(0.0), "SoftCap", "0"),
    "sinusoidal of nothing": of(lambda: positions.sinusoidal(4, 0), "dim", "0"),
    "sinusoidal negative": of(lambda: positions.sinusoidal(-1, 4), "length", "-1"),
    "rotary odd": of(lambda: positions.Rotary()(np.ones((4, 3), np.float32)[None, :, None], np.arange(4)), "3"),
    "rotary base 1": of(lambda: positions.Rotary(base=1.0), "base", "1"),
    "rotary base negative": of(lambda: positions.Rotary(base=-2.0), "base", "-2"),
    # devices
    "no such axis": of(lambda: sharding.Ring(MESH, "y"), "axis_name", "'y'"),
    "two axes for a ring": of(lambda: sharding.Ring(MESH, ("x", "y")), "axis_name"),
    "no such layout": of(lambda: sharding.Ring(MESH, "x", layout="zag"), "layout", "'zag'"),
    "no axis for heads": of(lambda: sharding.HeadParallel(MESH, "y"), "axis_name", "'y'"),
    "no mesh": of(lambda: sharding.Ring(None, "x"), "mesh", "None"),
    # checkpoints
    "ignore a word": of(lambda: interop.from_tensors({}, BERT, ignore="cls."), "ignore", "'cls.'"),
    "parameters of ints": of(lambda: interop.from_tensors({}, BERT, dtype=jnp.int32), "dtype", "int32"),
    "nothing in it": of(lambda: interop.from_tensors({"x": Q}, BERT), "missing", "token_embed", "left over: x"),
    "layers without end": of(lambda: interop.from_tensors({"x": Q}, BERT | {"num_hidden_layers": 2**60}), "layers", "1 tensors"),
    "weights of ints": of(lambda: interop.from_tensors({"embeddings.word_embeddings.weight": np.ones((9, 8), int)}, BERT),
                          "not floating-point numbers", "word_embeddings.weight is int"),
    "no family": of(lambda: interop.from_tensors({}, {}), "model_type", "None"),
    "config without width": of(lambda: interop.read_config({"model_type": "bert"}), "hidden_size"),
    "layers a word": of(lambda: interop.read_config(BERT | {"num_hidden_layers": "1"}), "num_hidden_layers", "'1'"),
    "layers negative": of(lambda: interop.read_config(BERT | {"num_hidden_layers": -1}), "num_hidden_layers", "-1"),
    "heads true": of(lambda: interop.read_config(BERT | {"num_attention_heads": True}), "num_attention_heads", "True"),
    "activation": of(lambda: interop.read_config(BERT | {"hidden_act": "swish9"}), "hidden_act", "swish9"),
    "relative positions": of(lambda: interop.read_config(BERT | {"position_embedding_type": "relative_key"}), "position_embedding_type"),
    "no folder": of(lambda: interop.load("no/such/folder"), "config.json", "no/such/folder"),
}  # fmt: skip


def raised(make: Callable[[], object]) -> list[str] | None:
    """The type and the message of the exception that a call raises."""
    try:
        make()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


if __name__ == "__main__":
    json.dump({name: raised(make) for name, (make, _) in ROWS.items()}, sys.stdout)
