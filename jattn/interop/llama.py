"""The Llama family (Llama 2 and 3, SmolLM2), and Mistral and Qwen2, which differ from it in little.

Sources: https://arxiv.org/abs/2302.13971, section 2.2; https://arxiv.org/abs/2310.06825, section 2 (the window);
https://arxiv.org/abs/2407.10671, section 2.2 (biases of query, key and value). Names as in published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.interop.family import Family, activation, numbers, refuse, small
from jattn.interop.transformer import Config
from jattn.positions import LinearScaling, Llama3Scaling, Rotary


def llama(options: Mapping[str, Any]) -> Config:
    """The sizes in a Llama's config."""
    layers, heads, model_dim, vocabulary, length, mlp_dim, kv_heads, head_dim = numbers(
        options, "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings",
        "intermediate_size", optional={"num_key_value_heads": None, "head_dim": None},
    )  # fmt: skip
    bias = bool(options.get("attention_bias", False))
    return Config(
        family=options["model_type"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        model_dim=model_dim,
        mlp_dim=mlp_dim,
        vocabulary=vocabulary,
        max_length=length,
        norm="rms",
        norm_epsilon=small(options, "rms_norm_eps"),
        activation=activation(options, "hidden_act", "silu"),
        gated=True,
        position=_rotary(options),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(options.get("mlp_bias", False)),
    )


def mistral(options: Mapping[str, Any]) -> Config:
    """The sizes in a Mistral's config: a Llama whose queries may see a window."""
    (window,) = numbers(options, optional={"sliding_window": None})
    return dataclasses.replace(llama(options), window=window)


def qwen2(options: Mapping[str, Any]) -> Config:
    """The sizes in a Qwen2's config: a Llama with biases of query, key and value."""
    refuse(options, use_sliding_window=False)
    return dataclasses.replace(llama(options), qkv_bias=True)


def _rotary(options: Mapping[str, Any]) -> Rotary:
    # Newer configs keep the base and the scaling in one entry.
    scaling = options.get("rope_parameters") or options.get("rope_scaling") or {}
    base = float(scaling.get("rope_theta", options.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rotary(base)
    if kind == "linear":
        return Rotary(base, scaling=LinearScaling(scaling["factor"]))
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        return Rotary(base, scaling=Llama3Scaling(*(scaling[name] for name in names)))
    raise ValueError(f"rope_type is {kind!r} in this config, which the model here does not support")


LLAMA = Family(
    name="llama",
    config=llama,
    modules={"token_embed": ("embed_tokens",), "last_norm": ("norm",), "head": ("lm_head",)},
    layer={
        "attention.query": ("layers.{}.self_attn.q_proj",),
        "attention.key": ("layers.{}.self_attn.k_proj",),
        "attention.value": ("layers.{}.self_attn.v_proj",),
        "attention.out": ("layers.{}.self_attn.o_proj",),
        "attention_norm": ("layers.{}.input_layernorm",),
        "mlp_gate": ("layers.{}.mlp.gate_proj",),
        "mlp_in": ("layers.{}.mlp.up_proj",),
        "mlp_out": ("layers.{}.mlp.down_proj",),
        "mlp_norm": ("layers.{}.post_attention_layernorm",),
    },
    prefixes=("model.",),
)
MISTRAL = dataclasses.replace(LLAMA, name="mistral", config=mistral)
QWEN2 = dataclasses.replace(LLAMA, name="qwen2", config=qwen2)
