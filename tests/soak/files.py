"""Draws GGUF files, tokenizers and checkpoints: sound ones must be read as they are meant, damaged ones be refused or read as sound.

A file that is damaged at random may lose nothing but its own numbers: a model or tokenizer, or a ``ValueError`` with a message.
"""

import json
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jattn import interop
from jattn_experiments.bench.probe import peak_resident
from tests.reference.tokenizer import BYTES, encoded
from tests.soak import models
from tests.soak.trial import Difference, Trial, compare
from tests.soak.vocabulary import Random

TASKS = ("tokenizer", "damaged vocabulary", "model", "flipped", "cut", "checkpoint")
WIDTH, HEADS, DIM, INNER = 32, 2, 16, 64
MODULES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "self_attn.q_proj": "blk.0.attn_q",
    "self_attn.k_proj": "blk.0.attn_k", "self_attn.v_proj": "blk.0.attn_v", "self_attn.o_proj": "blk.0.attn_output",
    "mlp.gate_proj": "blk.0.ffn_gate", "mlp.up_proj": "blk.0.ffn_up", "mlp.down_proj": "blk.0.ffn_down",
    "input_layernorm": "blk.0.attn_norm", "post_attention_layernorm": "blk.0.ffn_norm",
}  # fmt: skip
TEXTS = (
    "he", "hello", " the the", "né", "日本語", "😀👩‍👩‍👧", "١٢٣", "½²", "ß", "ﬁ", "İ", "\u0301", "\u200b", "\x00\x1f", "\U000f0000", " ", "   ",
    "\t", "\n", "\r\n", "\u00a0", "\u3000", "'s", "'LL", "'re", "'", "...", "a-b", "1234", "x2y", "<|end|>", "<|end|", "<tool>", "Ġ", "Ċ", "",
)  # fmt: skip

CONFIG: dict[str, Any] = {
    "model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 11, "n_positions": 7,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu",
}  # fmt: skip
EXPECTED = (ValueError, FileNotFoundError)
SECONDS, MEMORY = 5.0, 64 * 2**20  # per file; bytes beyond what was in use before
SPECIAL = ["<|end|>", "<tool>"]


def draw_vocabulary(rng: Random) -> dict[str, Any]:
    """The fields of a GGUF file: all bytes, merges of what is there, special tokens, and what stands around a text."""
    tokens, merges = [BYTES[i] for i in rng.permutation(256)], []
    for text in rng.choice([text for text in TEXTS if text], 12):
        parts = [BYTES[byte] for byte in str(text).encode()]
        while len(parts) > 1 and rng.random() < 0.8:
            i = int(rng.integers(len(parts) - 1))
            pair = parts[i], parts[i + 1]
            if pair not in merges and "".join(pair) not in (*tokens, *SPECIAL):
                merges.append(pair)
                tokens.append("".join(pair))
            elif pair not in merges:
                break
            parts[i : i + 2] = ["".join(pair)]
    merges = [merges[i] for i in rng.permutation(len(merges))] if rng.random() < 0.3 else merges
    types = [1] * len(tokens) + [3, 4]
    tokens += SPECIAL
    fields = {"model": "gpt2", "pre": str(rng.choice(["gpt-2", "smollm"])), "tokens": tokens, "token_type": types}
    fields |= {"merges": [" ".join(pair) for pair in merges]}
    for end in ("bos", "eos"):
        if rng.random() < 0.5:
            fields |= {f"add_{end}_token": bool(rng.random() < 0.6), f"{end}_token_id": int(rng.integers(len(tokens)))}
    return fields | ({"add_space_prefix": False} if rng.random() < 0.3 else {})


# each breaks a vocabulary so that it must be refused
DAMAGES = {
    "a token twice": lambda x: x["tokens"].__setitem__(1, x["tokens"][0]),
    "no merges": lambda x: x.pop("merges"),
    "no tokens": lambda x: x.pop("tokens"),
    "a merge of nothing": lambda x: x["merges"].append("nothing there"),
    "a merge of one part": lambda x: x["merges"].append("alone"),
    "too few types": lambda x: x["token_type"].pop(),
    "bos outside": lambda x: x.update(add_bos_token=True, bos_token_id=len(x["tokens"])),
    "no bos": lambda x: (x.update(add_bos_token=True), x.pop("bos_token_id", None)),
    "another kind": lambda x: x.update(model="llama"),
    "another split": lambda x: x.update(pre="unheard-of"),
    "a space before": lambda x: x.update(add_space_prefix=True),
}


def write(file: Path, fields: dict[str, Any], tensors: dict[str, Any] | None = None, config: Any = None) -> None:
    """A GGUF file with this vocabulary and, where given, a model; rows of a Llama's query and key are permuted."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama" if config is None else config["model_type"])
    add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
    for name, value in fields.items():
        add[type(value)](f"tokenizer.ggml.{name}", value)
    if config is not None:
        numbers = {
            "block_count": config["num_hidden_layers"], "context_length": models.LENGTH, "embedding_length": WIDTH,
            "feed_forward_length": INNER, "head_count": HEADS, "head_count_kv": config["num_key_value_heads"],
            "layer_norm_rms_eps": config["rms_norm_eps"], "rope_freq_base": config["rope_theta"],
        }  # fmt: skip
        for name, number in numbers.items():
            getattr(writer, f"add_{name}")(number)
        for name, (stored, kind) in (tensors or {}).items():
            writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def draw_model(rng: Random) -> tuple[dict[str, Any], dict[str, Any], dict[str, np.ndarray]]:
    """A config, the tensors of a GGUF file, and the same by Hugging Face's names."""
    import gguf

    config: dict[str, Any] = {
        "model_type": str(rng.choice(["llama", "qwen2"])), "num_hidden_layers": 1, "num_attention_heads": HEADS, "hidden_size": WIDTH,
        "num_key_value_heads": int(rng.choice([1, 2])), "intermediate_size": INNER, "rms_norm_eps": 2.0**-17, "vocab_size": models.VOCABULARY,
        "rope_theta": float(rng.choice([1e4, 5e5])), "tie_word_embeddings": bool(rng.random() < 0.5),
    }  # fmt: skip
    kinds = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")]
    tensors, named = {}, models.draw_tensors(rng, config)
    for name, x in named.items():
        module, _, part = name.removeprefix("layers.0.").rpartition(".")
        kind = kinds[rng.integers(len(kinds)) if x.ndim == 2 else 0]
        stored = gguf.quantize(x, kind)
        tensors[f"{MODULES[module]}.{part}"] = stored, kind
        x = np.asarray(gguf.dequantize(stored, kind), np.float32)
        if config["model_type"] == "llama" and module[-6:] in ("q_proj", "k_proj"):  # neighbours, not halves
            rows = x.reshape(-1, DIM, *x.shape[1:])
            x = np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1).reshape(x.shape)
        named[name] = x
    return config, tensors, named


def whole() -> tuple[dict, bytes]:
    """The header and the data of a valid safetensors file, which any change must leave readable or refused, soon."""
    header, data = {}, b""
    for name, x in models.draw_tensors(np.random.default_rng(0), CONFIG).items():
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    return header, data


def packed(header: object, data: bytes, length: int | None = None) -> bytes:
    """A file in the format: the length of the header in eight bytes, the header as JSON, the data."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def draw_checkpoint(rng: np.random.Generator) -> tuple[bytes, bytes]:
    """A mutated safetensors file and the ``config.json`` beside it."""
    header, data = whole()
    config: object = dict(CONFIG)
    name = str(rng.choice(list(header)))
    huge = int(rng.choice([2**31, 2**32, 2**53, 2**60, 2**63 - 1]))
    kind = int(rng.integers(12))
    if kind == 0:  # an enormous header length
        return packed(header, data, huge), json.dumps(config).encode()
    if kind == 1:  # tensors that overlap, lie past the end, or have reversed offsets
        a, b = (int(x) for x in rng.integers(-9, len(data) + 99, 2))
        header[name]["data_offsets"] = [a, b]
    elif kind == 2:
        header[name]["shape"] = [huge, *header[name]["shape"][1:]]
    elif kind == 3:
        header[name]["shape"] = [[0], [], [-1, 8], [huge, huge], "8", None, [1.5], [[8]]][int(rng.integers(8))]
    elif kind == 4:
        header[name]["dtype"] = ["I64", "BOOL", "F64", "BF16", "F8_E4M3", "X", 3, None][int(rng.integers(8))]
    elif kind == 5:
        del header[name]
    elif kind == 6:
        header[str(rng.choice(["__metadata__", "../x", "", "h.0.attn.bias", "\\u0000"]))] = header[name]
    elif kind == 7:  # damage the config instead
        key = str(rng.choice(list(CONFIG)))
        config = [CONFIG | {key: v} for v in (huge, -1, 0, None, "x", 1.5, [], {}, True)][int(rng.integers(9))]
    elif kind == 8:
        config = [[], 3, None, "x", {}, {"model_type": "bert"}][int(rng.integers(6))]
    file, text = packed(header, data), json.dumps(config).encode()
    if kind == 9:
        file = file[: int(rng.integers(len(file)))]
    elif kind == 10:
        file = flipped(rng, file, [200, len(file)])
    elif kind == 11:
        cut = text[: int(rng.integers(len(text)))]
        text = [flipped(rng, text, [200, len(text)]), cut, b"[" * 100_000][int(rng.integers(3))]
    return file, text


def flipped(rng: np.random.Generator, content: bytes, within: list[int]) -> bytes:
    """Changes a few bytes, each among the first of one of these numbers: the first bytes matter most."""
    changed = bytearray(content)
    for _ in range(int(rng.integers(1, 9))):
        changed[int(rng.integers(min(len(changed), rng.choice(within))))] = int(rng.integers(256))
    return bytes(changed)


def outcome(read: Callable[[Path], Any], path: Path) -> tuple[str, str]:
    """Whether a file is read or refused; and what is wrong: another error than expected, or one without a message."""
    try:
        read(path)
    except EXPECTED as error:
        return type(error).__name__, "" if str(error) else "an error without a message"
    except Exception as error:
        return type(error).__name__, f"{type(error).__name__}: {str(error)[:200]}"
    return "loaded", ""


def load_checkpoint(folder: Path, rng: np.random.Generator) -> tuple[str, str]:
    """The outcome of loading one drawn checkpoint, and what is wrong, if anything."""
    file, config = draw_checkpoint(rng)
    (folder / "model.safetensors").write_bytes(file)
    (folder / "config.json").write_bytes(config)
    began, before = time.monotonic(), peak_resident()
    result, wrong = outcome(interop.load, folder)
    seconds, taken = time.monotonic() - began, peak_resident() - before
    if seconds > SECONDS or taken > MEMORY + len(file):
        wrong = f"{seconds:.1f} s and {taken / 2**20:.0f} MiB of memory for a file of {len(file)} bytes"
    return result, wrong


class FileTrial(Trial):
    """One task; each case is a file of its own."""

    stream = 6

    def __init__(self, seed: int, index: int):
        super().__init__(seed, index)
        self.task = TASKS[index % len(TASKS)]
        self.label = f"file, {self.task}"

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """Writes the file into a folder of its own."""
        rng, self.outcomes = self.rng(draw), ["kind file", f"file: {self.task}"]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "drawn.gguf"
            if self.task == "tokenizer":
                return _tokenizer(rng, file), 0.0
            if self.task == "model":
                return _model(rng, file)
            if self.task == "checkpoint":
                return self.judged(*load_checkpoint(Path(folder), rng)), 0.0
            if self.task == "damaged vocabulary":
                fields, damage = draw_vocabulary(rng), str(rng.choice(list(DAMAGES)))
                DAMAGES[damage](fields)
                write(file, fields)
                return self.judged(*outcome(interop.tokenizer, file), damage), 0.0
            config, tensors, _ = draw_model(rng)
            write(file, draw_vocabulary(rng), tensors, config)
            content = file.read_bytes()
            cut = content[: int(rng.integers(len(content)))] if self.task == "cut" else None
            file.write_bytes(flipped(rng, content, [64, 20_000]) if cut is None else cut)
            of_model = self.judged(*outcome(interop.load, file))
            return of_model + self.judged(*outcome(interop.tokenizer, file)), 0.0

    def judged(self, outcome: str, wrong: str, damage: str = "") -> list[Difference]:
        """What is wrong with the reading of a file, which fails after this damage."""
        self.outcomes[1] = f"file: {self.task}, {outcome}"
        wrong = f"read in spite of: {damage}" if damage and outcome == "loaded" else wrong
        return [Difference(wrong)] if wrong else []


def _tokenizer(rng: Random, file: Path) -> list[Difference]:
    fields, wrong = draw_vocabulary(rng), []
    write(file, fields)
    tokenizer = interop.tokenizer(file)
    for _ in range(8):
        text = "".join(str(x) for x in rng.choice(TEXTS, rng.integers(0, 6)))
        if rng.random() < 0.3:
            text += "".join(chr(x) for x in rng.integers(1, 0x3000, 5))
        ids, wanted = tokenizer.encode(text).ids, encoded(fields, text)
        if ids != wanted:
            wrong.append(Difference(f"{text!r} split as {fields['pre']} is {ids} instead of {wanted}"))
        back = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if back != text:
            wrong.append(Difference(f"{text!r} comes back as {back!r}"))
    return wrong


def _model(rng: Random, file: Path) -> tuple[list[Difference], float]:
    config, tensors, named = draw_model(rng)
    write(file, draw_vocabulary(rng), tensors, config)
    tokens, valid = rng.integers(0, models.VOCABULARY, (models.B, models.T)), np.ones((models.B, models.T), bool)
    wanted = {name: (x, off.max()) for name, (x, off) in models.bounded(config, named, tokens, valid, tokens).items()}
    with jax.disable_jit():
        return compare(models.run(interop.load(file), tokens, {}, False), wanted)
