"""Reads GGUF files, llama.cpp's: quantised weights, sizes and vocabulary in one. Nothing in them is executed.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The tensors get the names and shapes that Hugging
Face's checkpoints of the same family have.
"""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

# llama.cpp pairs neighbouring features in rotary embeddings, others the two halves: its converter permutes the rows.
_PERMUTED = {"llama": True, "qwen2": False, "qwen3": False, "olmo2": False}
_CONFIG = {
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.key_length": "head_dim",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def read_gguf(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The tensors of a GGUF file in float32, by Hugging Face's names, and its config. Raises as ``load``."""
    reader = _open(file)
    from gguf import dequantize

    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
    family = fields.get("general.architecture")
    if family not in _PERMUTED:
        raise ValueError(f"{file} holds a {family!r}; GGUF files of {', '.join(_PERMUTED)} can be read")
    config: dict[str, Any] = {"model_type": family}
    config |= {ours: fields[f"{family}.{name}"] for name, ours in _CONFIG.items() if f"{family}.{name}" in fields}
    scaling = fields.get(f"{family}.rope.scaling.type", "none")
    if scaling not in ("none", "linear") or any(one.name == "rope_freqs.weight" for one in reader.tensors):
        raise ValueError(
            f"{file} scales its rotary frequencies in another way than linearly, which is not read from GGUF files"
        )
    if scaling == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": fields.get(f"{family}.rope.scaling.factor")}
    tensors = {}
    with _damaged(file):
        _refuse_others(fields, family)
        for tensor in reader.tensors:
            x = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
            name, rows = _name(tensor.name), _heads(tensor.name, config) if _PERMUTED[family] else None
            tensors[name] = x if rows is None else _unpermuted(x, rows)
    config["tie_word_embeddings"] = "lm_head.weight" not in tensors
    config["vocab_size"] = len(tensors.get("model.embed_tokens.weight", ()))
    if family == "llama":  # no field says so, only the tensors
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
    return tensors, config


def read_vocabulary(file: Path) -> dict[str, Any]:
    """The fields of a GGUF file about its tokenizer, without ``tokenizer.``, such as ``ggml.tokens``."""
    reader = _open(file)
    prefix = "tokenizer."
    with _damaged(file):
        return {
            name.removeprefix(prefix): field.contents()
            for name, field in reader.fields.items()
            if name.startswith(prefix)
        }


def _refuse_others(fields: Mapping[str, Any], family: str) -> None:
    """Raises ``ValueError`` for a field that changes what the model computes and is not read."""
    options = {name.removeprefix(f"{family}."): x for name, x in fields.items() if name.startswith(f"{family}.")}
    heads = max(options.get("attention.head_count", 1), 1)
    head_dim = options.get("attention.key_length", options.get("embedding_length", 0) // heads)
    neutral = {
        "rope.dimension_count": head_dim, "attention.value_length": head_dim, "rope.scale_linear": 1.0,
        "rope.scaling.type": "none", "rope.scaling.factor": 1.0, "rope.scaling.finetuned": False,
        "attention.causal": True, "expert_count": 0, "expert_used_count": 0, "vocab_size": options.get("vocab_size"),
    }  # fmt: skip
    linear = ("rope.scaling.type", "rope.scaling.factor") if options.get("rope.scaling.type") == "linear" else ()
    unread = {name: x for name, x in options.items() if name not in _CONFIG and name not in linear}
    others = {name: x for name, x in unread.items() if name not in neutral or neutral[name] != x}
    if others:
        raise ValueError(f"options that are not known here: {others}")


def _open(file: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as missing:
        raise ImportError("reading GGUF needs the package of that name: pip install 'jattn[gguf]'") from missing
    if not file.is_file():
        raise FileNotFoundError(f"no file {str(file)!r}")
    with _damaged(file):
        return GGUFReader(file)


@contextlib.contextmanager
def _damaged(file: Path) -> Any:
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, NotImplementedError) as error:
        raise ValueError(f"{file} is damaged or not a GGUF file: {error}") from error


def _name(name: str) -> str:
    *prefix, module, part = name.split(".")
    layer = f"model.layers.{prefix[1]}." if len(prefix) == 2 else ""
    return f"{layer}{_NAMES.get(module, module)}.{part}"


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    """How many heads the rows of a query's or key's projection belong to; None for other tensors."""
    heads = config.get("num_attention_heads")
    return {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}.get(name.split(".")[-2])


def _unpermuted(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows ``[heads * (half, 2), ...]``, of weights or biases, as ``[heads * (2, half), ...]``."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
