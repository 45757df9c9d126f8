"""Reads models from GGUF files, with the names and options of Hugging Face checkpoints of the same family.

Source: llama.cpp's converter, https://github.com/ggml-org/llama.cpp/tree/master/conversion, and its gguf package 0.19.
"""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jattn.interop._gguf_file import StoredTensor, damaged, read_file

_SIZES = {
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
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_SIZES_OF_GPT2 = {
    "block_count": "n_layer",
    "attention.head_count": "n_head",
    "embedding_length": "n_embd",
    "feed_forward_length": "n_inner",
    "context_length": "n_positions",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
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
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_NAMES_OF_GPT2 = {
    "token_embd": "wte",
    "position_embd": "wpe",
    "output_norm": "ln_f",
    "output": "lm_head",
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """What ``general.architecture`` stands for."""

    model_type: str
    fields: Mapping[str, str]  # by our name in the config
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: _NAMES)
    layer: str = "model.layers.{}."
    permuted: bool = False  # llama.cpp's rotary embeddings pair neighbouring features, others the two halves
    may_have_biases: tuple[str, ...] = ("attention_bias",)  # config keys for them


_NAMES_AFTER = {
    **_NAMES,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA_NAMES = {**_NAMES_AFTER, "ffn_norm": "pre_feedforward_layernorm"}
_ARCHITECTURES = {
    "llama": _Architecture("llama", _SIZES, permuted=True, may_have_biases=("attention_bias", "mlp_bias")),
    "qwen2": _Architecture("qwen2", _SIZES, may_have_biases=()),
    "qwen3": _Architecture("qwen3", _SIZES),
    "olmo2": _Architecture("olmo2", _SIZES, {key: x for key, x in _NAMES_AFTER.items() if key != "ffn_norm"}),
    "gemma2": _Architecture("gemma2", {**_SIZES, **_CAPS, **_WINDOW}, _GEMMA_NAMES),
    "gemma3": _Architecture(
        "gemma3_text", {**_SIZES, **_CAPS, **_WINDOW, "rope.freq_base_swa": "rope_local_base_freq"}, _GEMMA_NAMES
    ),
    "phi3": _Architecture(
        "phi3",
        {**_SIZES, **_WINDOW},
        {**_NAMES, "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        may_have_biases=(),
    ),
    "gpt2": _Architecture("gpt2", _SIZES_OF_GPT2, _NAMES_OF_GPT2, layer="h.{}.", may_have_biases=()),
}
# The 27B models divide the queries by another number than the rest of their family, which no field records.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def read_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of a GGUF file, keyed by their Hugging Face names and read when sliced, and the file's config.

    Gemma's norm weights are the factors themselves, not the factors minus one. Raises the same errors as ``load``.
    """
    fields, stored = read_file(file, lambda name: not name.startswith("tokenizer."))
    name = fields.get("general.architecture")
    if not isinstance(name, str) or name not in _ARCHITECTURES:
        raise ValueError(f"{file} holds a {name!r}; GGUF files of {', '.join(_ARCHITECTURES)} can be read")
    if (parts := fields.get("split.count", 1)) != 1:
        raise ValueError(f"{file} is one of {parts} parts; merge them with llama.cpp's gguf-split first")
    family = _ARCHITECTURES[name]
    options = {key.removeprefix(f"{name}."): x for key, x in fields.items() if key.startswith(f"{name}.")}
    with damaged(file, "has options that are not read"):
        config = _config(name, family, options, stored)
    factors = [f"{tensor}.weight" for tensor in ("rope_freqs", "rope_factors_short", "rope_factors_long")]
    tensors: dict[str, Any] = {}
    for stored_name, x in stored.items():
        if stored_name not in factors:
            rows, ours = _heads(stored_name, config) if family.permuted else None, _name(stored_name, family)
            if ours in tensors:
                raise ValueError(f"{file} has two tensors for {ours}; one of them is {stored_name}")
            tensors[ours] = x if rows is None else _Unpermuted(x, rows)
    return tensors, config


def read_vocabulary(file: Path) -> dict[str, Any]:
    """The tokenizer fields of a GGUF file (without ``tokenizer.``), such as ``ggml.tokens``, and the model's name."""
    prefix = "tokenizer."
    fields, _ = read_file(file, lambda name: name.startswith(prefix) or name == "general.name")
    return {name.removeprefix(prefix): x for name, x in fields.items()}


def _config(
    name: str, family: _Architecture, options: dict[str, Any], stored: Mapping[str, StoredTensor]
) -> dict[str, Any]:
    """The config, from the fields (without the architecture's name) and the existing tensors.

    Raises ``ValueError`` for an unread field that changes what the model computes.
    """
    options = dict(options)
    sizes = (
        "block_count",
        "attention.head_count",
        "attention.head_count_kv",
        "embedding_length",
        "attention.key_length",
    )
    if wrong := {key: options[key] for key in sizes if type(options.get(key, 1)) is not int}:
        raise ValueError(f"{wrong}, expected an integer")  # such as one per layer
    config: dict[str, Any] = {"model_type": family.model_type}
    config |= {ours: options.pop(theirs) for theirs, ours in family.fields.items() if theirs in options}
    has = lambda tensor: f"{tensor}.weight" in stored
    config["tie_word_embeddings"] = not has("output")
    config["vocab_size"] = stored["token_embd.weight"].shape[0] if has("token_embd") else 0
    tensor_of = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}
    config |= {key: f"blk.0.{tensor_of[key]}.bias" in stored for key in family.may_have_biases}
    heads = max(config.get("num_attention_heads", 1), 1)
    head_dim = config.get("head_dim", config.get("hidden_size", 0) // heads)
    if name == "gpt2":
        config["activation_function"] = "gelu_new"  # the only one in llama.cpp
    elif name == "phi3":
        config["sliding_window"] = config.get("sliding_window") or None  # 0 in Phi-4's files
        rotated = options.pop("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = rotated / max(head_dim, 1)
    if name in _LAYERS_OF_27B:
        is_27b = config.get("num_hidden_layers") == _LAYERS_OF_27B[name]
        config["query_pre_attn_scalar"] = config.get("hidden_size", 0) / heads if is_27b else head_dim
        if name == "gemma2":  # llama.cpp's default
            config = {"sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config}
        else:
            config["sliding_window_pattern"] = 6 if config.get("sliding_window") else 1
    scaling = _scaling(options, stored, config)
    if scaling is not None:
        config["rope_scaling"] = scaling
        if name == "phi3":
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    # Fields that change nothing, with these values or with any.
    neutral = {
        "rope.dimension_count": head_dim, "attention.value_length": head_dim, "rope.scale_linear": 1.0,
        "attention.causal": True, "expert_count": 0, "expert_used_count": 0,
        "rope.freq_base_swa": config.get("rope_theta"), "attention.head_count_kv": config.get("n_head"),
        **{key: options.get(key) for key in ("vocab_size", "pooling_type", "rope.scaling.finetuned")},
    }  # fmt: skip
    if others := {key: x for key, x in options.items() if key not in neutral or neutral[key] != x}:
        raise ValueError(f"{others}")
    return config


def _scaling(
    options: dict[str, Any], stored: Mapping[str, StoredTensor], config: Mapping[str, Any]
) -> dict[str, Any] | None:
    """``rope_scaling`` as in a config; its fields are removed from the ``options``."""
    keys = {
        "rope.scaling.type": "rope_type",
        "rope.scaling.factor": "factor",
        "rope.scaling.original_context_length": "original_max_position_embeddings",
        "rope.scaling.attn_factor": "attention_factor",
        "rope.scaling.yarn_attn_factor": "attention_factor",
        "rope.scaling.yarn_beta_fast": "beta_fast",
        "rope.scaling.yarn_beta_slow": "beta_slow",
    }
    scaling = {ours: options.pop(theirs) for theirs, ours in keys.items() if theirs in options}
    kind = scaling.pop("rope_type", "none")
    factors = {
        part: stored[f"rope_{part}.weight"][:].tolist()
        for part in ("freqs", "factors_short", "factors_long")
        if f"rope_{part}.weight" in stored
    }
    trained = config.get("max_position_embeddings")
    if "freqs" in factors:  # Llama 3's: the divisors of all frequencies, at any length
        if kind != "none" or scaling:
            raise ValueError(f"it has both rope_freqs.weight and the scaling {kind!r} of {scaling}")
        same = {"short_factor": factors["freqs"], "long_factor": factors["freqs"]}
        return {"rope_type": "longrope", **same, "attention_factor": 1.0, "original_max_position_embeddings": trained}
    if factors:
        if kind not in ("none", "longrope"):
            raise ValueError(f"it has both rope_factors_short.weight and _long and the scaling {kind!r}")
        scaling.setdefault("original_max_position_embeddings", trained)
        scaling |= {f"{length}_factor": factors.get(f"factors_{length}") for length in ("short", "long")}
        return {"rope_type": "longrope", **scaling}
    if kind == "none":
        scaling = {key: x for key, x in scaling.items() if key != "original_max_position_embeddings"}
        if scaling.pop("factor", 1.0) != 1.0 or scaling:
            raise ValueError(f"rope.scaling.type is none, but there are {scaling}")
        return None
    if kind not in ("linear", "yarn"):
        raise ValueError(f"rope.scaling.type is {kind!r}; none, linear and yarn can be read")
    return {"rope_type": kind, **scaling}


def _name(name: str, family: _Architecture) -> str:
    """Our name for a tensor; an unknown name is returned unchanged, and its tensor remains unused."""
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in family.names:
        return name
    layer = "" if match[1] is None else family.layer.format(match[1])
    return f"{layer}{family.names[match[2]]}.{match[3]}"


def _heads(name: str, config: Mapping[str, Any]) -> int | None:
    """The number of heads in the rows of a query or key projection; None for other tensors."""
    heads = config.get("num_attention_heads")
    of = {"attn_q": heads, "attn_k": config.get("num_key_value_heads", heads)}
    return next((of[part] for part in name.split(".") if part in of), None)


class _Unpermuted:
    """A projection's weights or biases, with each head's interleaved rows put back into two halves."""

    def __init__(self, stored: StoredTensor, heads: int):
        self.stored, self.heads, self.shape, self.dtype = stored, heads, stored.shape, stored.dtype

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        size = max(self.shape[0] // self.heads, 1)
        first, last = start // size * size, -(-stop // size) * size  # whole heads
        x = self.stored[first:last]
        x = x.reshape(-1, size // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        return x[start - first : stop - first]
