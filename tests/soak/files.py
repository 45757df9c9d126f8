"""Draws GGUF files and tokenizers: sound ones must be read as they are meant, damaged ones be refused or read as sound.

The reference of a tokenizer is written here: GPT-2's splitting by Unicode's categories, and merges by rank. A file that
is damaged at random may lose nothing but its own numbers: a model or tokenizer, or a ``ValueError`` with a message.
"""

import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jattn import interop
from tests.soak import models
from tests.soak.draw import Random
from tests.soak.loading import EXPECTED
from tests.soak.trial import Difference, compare

TASKS = ("tokenizer", "damaged vocabulary", "model", "flipped", "cut")
WIDTH, HEADS, DIM, INNER = 32, 2, 16, 64
MODULES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_norm": "input_layernorm",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}  # fmt: skip
TEXTS = (
    "he", "hello", " the the", "né", "日本語", "😀👩‍👩‍👧", "١٢٣", "½²", "ß", "ﬁ", "İ", "\u0301", "\u200b", "\x00\x1f", "\U000f0000", " ", "   ",
    "\t", "\n", "\r\n", "\u00a0", "\u3000", "'s", "'LL", "'re", "'", "...", "a-b", "1234", "x2y", "<|end|>", "<|end|", "<tool>", "Ġ", "Ċ", "",
)  # fmt: skip

SPECIAL = ["<|end|>", "<tool>"]

# ---- a tokenizer, and what it makes of a text


def byte_names() -> list[str]:
    """GPT-2's printable name of each byte."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(256)]


BYTES = byte_names()


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


def encoded(fields: dict[str, Any], text: str) -> list[int]:
    """The ids of a text."""
    ids = {token: i for i, token in enumerate(fields["tokens"])}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(fields["merges"])}
    found, at = [], 0
    specials = [t for t, kind in zip(fields["tokens"], fields["token_type"], strict=True) if kind in (3, 4)]
    pieces: list[tuple[str, bool]] = []
    while at < len(text):
        whole = next((one for one in specials if text.startswith(one, at)), None)
        if whole is not None:
            pieces.append((whole, True))
            at += len(whole)
            continue
        ends = [place for one in specials if (place := text.find(one, at)) >= 0]
        end = min(ends, default=len(text))
        pieces.append((text[at:end], False))
        at = end
    for piece, special in pieces:
        if special:
            found.append(ids[piece])
            continue
        for part in digits_apart(piece) if fields["pre"] == "smollm" else [piece]:
            for word in words(part):
                symbols = [BYTES[byte] for byte in word.encode()]
                while True:
                    pairs = [
                        (ranks[pair], i)
                        for i, pair in enumerate(zip(symbols, symbols[1:], strict=False))
                        if pair in ranks
                    ]
                    if not pairs:
                        break
                    best = min(pairs)[1]
                    symbols[best : best + 2] = ["".join(symbols[best : best + 2])]
                found += [ids[symbol] for symbol in symbols]
    first, last = ([fields[f"{end}_token_id"]] if fields.get(f"add_{end}_token") else [] for end in ("bos", "eos"))
    return [*first, *found, *last]


def digits_apart(text: str) -> list[str]:
    """Each number character alone."""
    found = [""]
    for one in text:
        found += [one, ""] if kind_of(one) == "N" else []
        found[-1] += one if kind_of(one) != "N" else ""
    return [part for part in found if part]


def kind_of(one: str) -> str:
    """Letter, number, space or other."""
    category = unicodedata.category(one)[0]
    space = one in "\t\n\x0b\x0c\r\x85" or unicodedata.category(one) in ("Zs", "Zl", "Zp")
    return "S" if space else category if category in "LN" else "O"


def words(text: str) -> list[str]:
    """GPT-2's split: ``'s|'t|'re|'ve|'m|'ll|'d| ?letters| ?numbers| ?others|spaces before the last|spaces``."""
    found, at = [], 0
    while at < len(text):
        short = next((x for x in ("'s", "'t", "'re", "'ve", "'m", "'ll", "'d") if text.startswith(x, at)), None)
        end = at + 1
        if short is not None:
            end = at + len(short)
        else:
            start = at + (text[at] == " " and at + 1 < len(text) and kind_of(text[at + 1]) != "S")
            kind = kind_of(text[start])
            end = start
            while end < len(text) and kind_of(text[end]) == kind:
                end += 1
            if kind == "S" and end < len(text) and end - at > 1:
                end -= 1  # the last space goes with what follows
        found.append(text[at:end])
        at = end
    return found


def damage(rng: Random, fields: dict[str, Any]) -> str | None:
    """Breaks a vocabulary so that it must be refused; returns how."""
    hows = [
        "twice",
        "no merges",
        "merge of nothing",
        "one part",
        "no tokens",
        "types",
        "bos outside",
        "no bos",
        "kind",
        "pre",
        "space",
    ]
    how = str(rng.choice(hows))
    match how:
        case "twice":
            fields["tokens"][1] = fields["tokens"][0]
        case "no merges" | "no tokens":
            del fields[how[3:]]
        case "merge of nothing":
            fields["merges"] = [*fields["merges"], "nothing there"]
        case "one part":
            fields["merges"] = [*fields["merges"], "alone"]
        case "bos outside":
            fields |= {"add_bos_token": True, "bos_token_id": len(fields["tokens"])}
        case "no bos":
            fields |= {"add_bos_token": True}
            fields.pop("bos_token_id", None)
        case "types":
            fields["token_type"] = fields["token_type"][:-1]
        case "space":
            fields["add_space_prefix"] = True
        case "kind":
            fields["model"] = "llama"
        case "pre":
            fields["pre"] = "unheard-of"
    return how


# ---- files


def write(file: Path, fields: dict[str, Any], tensors: dict[str, Any] | None = None, config: Any = None) -> None:
    """A GGUF file with this vocabulary and, where given, a model; rows of a Llama's query and key are permuted."""
    import gguf

    writer = gguf.GGUFWriter(file, "llama" if config is None else config["model_type"])
    for name, value in fields.items():
        key = f"tokenizer.ggml.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)](key, value)
    if config is not None:
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(models.LENGTH)
        writer.add_embedding_length(WIDTH)
        writer.add_feed_forward_length(INNER)
        writer.add_head_count(HEADS)
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        writer.add_rope_freq_base(config["rope_theta"])
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
        "num_key_value_heads": int(rng.choice([1, 2])), "intermediate_size": INNER, "rms_norm_eps": 2.0**-17,
        "rope_theta": float(rng.choice([1e4, 5e5])), "tie_word_embeddings": bool(rng.random() < 0.5),
    }  # fmt: skip
    narrow, quantised = config["num_key_value_heads"] * DIM, gguf.GGMLQuantizationType
    kinds = [quantised[name] for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q5_1")]
    shapes = {"attn_q": (WIDTH, WIDTH), "attn_k": (narrow, WIDTH), "attn_v": (narrow, WIDTH), "attn_output": (WIDTH, WIDTH),
              "ffn_gate": (INNER, WIDTH), "ffn_up": (INNER, WIDTH), "ffn_down": (WIDTH, INNER), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,)}  # fmt: skip
    tensors, named = {}, {}

    def add(theirs: str, ours: str, shape: tuple[int, ...]) -> None:
        kind = kinds[rng.integers(len(kinds))] if len(shape) == 2 else quantised.F32
        x = rng.normal(size=shape, scale=0.4).astype(np.float32) + np.float32(len(shape) == 1)
        stored = gguf.quantize(x, kind)
        tensors[theirs] = stored, kind
        x = np.asarray(gguf.dequantize(stored, kind), np.float32)
        if config["model_type"] == "llama" and ("attn_q." in theirs or "attn_k." in theirs):  # neighbours, not halves
            rows = x.reshape(-1, DIM, *x.shape[1:])
            x = np.concatenate([rows[:, 0::2], rows[:, 1::2]], 1).reshape(x.shape)
        named[ours] = x

    add("token_embd.weight", "embed_tokens.weight", (models.VOCABULARY, WIDTH))
    add("output_norm.weight", "norm.weight", (WIDTH,))
    if not config["tie_word_embeddings"]:
        add("output.weight", "lm_head.weight", (models.VOCABULARY, WIDTH))
    for name, shape in shapes.items():
        add(f"blk.0.{name}.weight", f"layers.0.{MODULES[name]}.weight", shape)
        if config["model_type"] == "qwen2" and name in ("attn_q", "attn_k", "attn_v"):
            add(f"blk.0.{name}.bias", f"layers.0.{MODULES[name]}.bias", shape[:1])
    return config, tensors, named


class FileTrial:
    """One task; each case is a file of its own."""

    eager = False

    def __init__(self, seed: int, index: int):
        self.seed, self.index, self.task = seed, index, TASKS[index % len(TASKS)]
        self.label, self.came = f"file, {self.task}", ""

    def covers(self) -> list[str]:
        """What is counted."""
        return ["kind file", f"file: {self.task}{self.came}"]

    def case(self, draw: int) -> tuple[list[Difference], float]:
        """What is wrong in a case."""
        rng = np.random.default_rng([self.seed, self.index, 6, draw])
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "drawn.gguf"
            match self.task:
                case "tokenizer":
                    return _tokenizer(rng, file), 0.0
                case "damaged vocabulary":
                    fields = draw_vocabulary(rng)
                    how = damage(rng, fields)
                    write(file, fields)
                    return self._refused(lambda: interop.tokenizer(file), how), 0.0
                case "model":
                    return _model(rng, file)
            config, tensors, _ = draw_model(rng)
            write(file, draw_vocabulary(rng), tensors, config)
            content = bytearray(file.read_bytes())
            if self.task == "cut":
                content = content[: int(rng.integers(len(content)))]
            else:
                for _ in range(int(rng.integers(1, 9))):
                    content[int(rng.integers(min(len(content), rng.choice([64, 20_000]))))] = int(rng.integers(256))
            file.write_bytes(content)
            return [*self._refused(lambda: interop.load(file)), *self._refused(lambda: interop.tokenizer(file))], 0.0

    def _refused(self, read: Any, must: str | None = None) -> list[Difference]:
        """Wrong is another error than a ``ValueError`` with a message, or none where there ``must`` be one."""
        try:
            read()
            self.came = ", read"
        except EXPECTED as error:
            self.came = ", refused"
            return [] if str(error) else [Difference("an error without a message", np.inf)]
        except Exception as error:
            return [Difference(f"{type(error).__name__}: {str(error)[:200]}", np.inf)]
        return [Difference(f"read in spite of: {must}", np.inf)] if must else []


def _tokenizer(rng: Random, file: Path) -> list[Difference]:
    fields = draw_vocabulary(rng)
    write(file, fields)
    found = interop.tokenizer(file)
    wrong = []
    for _ in range(8):
        text = "".join(str(one) for one in rng.choice(TEXTS, rng.integers(0, 6)))
        if rng.random() < 0.3:
            text += "".join(chr(one) for one in rng.integers(1, 0x3000, 5))
        ids, wanted = found.encode(text).ids, encoded(fields, text)
        if ids != wanted:
            wrong.append(Difference(f"{text!r} split as {fields['pre']} is {ids} instead of {wanted}", np.inf))
        back = found.decode(found.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if back != text:
            wrong.append(Difference(f"{text!r} comes back as {back!r}", np.inf))
    return wrong


def _model(rng: Random, file: Path) -> tuple[list[Difference], float]:
    config, tensors, named = draw_model(rng)
    write(file, draw_vocabulary(rng), tensors, config)
    tokens, valid = rng.integers(0, models.VOCABULARY, (models.B, models.T)), np.ones((models.B, models.T), bool)
    wanted, off = models.bounded(config, named, tokens, valid, tokens)
    with jax.disable_jit():
        found = models.run(interop.load(file), tokens, {}, False)
    expected = {name: (x, off[name].max()) for name, x in wanted.items()}
    return compare({name: np.asarray(x) for name, x in found.items()}, expected)
