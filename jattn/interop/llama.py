"""The Llama family (Llama 2 and 3, SmolLM2), and Mistral, Qwen2 and Qwen3, which differ little from it.

Sources: https://arxiv.org/abs/2302.13971, section 2.2; https://arxiv.org/abs/2310.06825, section 2 (the window);
https://arxiv.org/abs/2407.10671, section 2.2 (biases of query, key and value); https://arxiv.org/abs/2505.09388,
section 2 (norms of queries and keys instead). Names as in published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import (
    GLOBAL,
    LOCAL,
    SIZES,
    Family,
    activation,
    local_layers,
    numbers,
    of_whole_heads,
    refuse,
    refuse_others,
    rotary,
    small,
)


def llama(options: Mapping[str, Any]) -> Config:
    """The sizes in a Llama config."""
    of_heads = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    sizes = numbers(options, {**SIZES, "mlp_dim": "intermediate_size"}, of_heads)
    refuse(options, **UNCHANGED)
    if options["model_type"] == "llama":
        refuse(options, sliding_window=None)
        refuse_windows(options)
        refuse_others(options, *READ, *UNCHANGED)
    bias, tied = bool(options.get("attention_bias", False)), bool(options.get("tie_word_embeddings", False))
    return Config(
        family=options["model_type"],
        **sizes,
        norm="rms",
        norm_epsilon=small(options, "rms_norm_eps"),
        activation=activation(options, "hidden_act", "silu"),
        gated=True,
        position=of_whole_heads(rotary(options)),
        tied=tied,
        head=not tied,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bool(options.get("mlp_bias", False)),
    )


def mistral(options: Mapping[str, Any]) -> Config:
    """The sizes in a Mistral config: a Llama with a window of 4096 tokens by default; null means no window."""
    options = {"sliding_window": 4096, **options}  # the default of MistralConfig in transformers 5.24
    window = numbers(options, {}, {"window": "sliding_window"})
    refuse_windows(options, "sliding_attention" if window else "full_attention")
    refuse_others(options, *READ, *UNCHANGED)
    return dataclasses.replace(llama(options), **window)


def qwen2(options: Mapping[str, Any]) -> Config:
    """The sizes in a Qwen2 config: a Llama with biases of query, key and value."""
    refuse(options, use_mrope=False)
    refuse_others(options, *READ, *UNCHANGED, *_WINDOWS, "use_mrope")
    return dataclasses.replace(llama(options), qkv_bias=True, **_windows(options))


def qwen3(options: Mapping[str, Any]) -> Config:
    """The sizes in the config of a Qwen3 without experts: a Llama with norms of each head's queries and keys."""
    refuse(options, mlp_bias=False)
    refuse_others(options, *READ, *UNCHANGED, *_WINDOWS)
    numbers(options, {"head_dim": "head_dim"})  # may differ from model_dim / num_heads, so it is required
    return dataclasses.replace(llama(options), qk_norm="head", **_windows(options))


_WINDOWS = ("use_sliding_window", "max_window_layers")


def _windows(options: Mapping[str, Any]) -> dict[str, Any]:
    """Which layers of a Qwen model have a window, as in ``Qwen2Config`` of transformers 5.24.

    Without ``use_sliding_window``, no layer has one, whatever the other keys say. Otherwise, the layers marked in
    ``layer_types`` have one or, without that key, layer ``max_window_layers`` (28 by default) and all later layers. The
    window is 4,096 by default.
    """
    used = options.get("use_sliding_window", False)
    if not isinstance(used, bool):
        raise ValueError(f"use_sliding_window must be true or false in this config, got {used!r}")
    num_layers = numbers(options, SIZES)["num_layers"]
    if not used or ("sliding_window" in options and options["sliding_window"] is None):
        if any(local_layers(options, num_layers, [GLOBAL] * num_layers)):
            raise ValueError(f"layer_types has {LOCAL}, but this config has no window (use_sliding_window)")
        return {}
    first = options.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise ValueError(f"max_window_layers must be a number of layers in this config, got {first!r}")
    local = local_layers(options, num_layers, [GLOBAL] * min(first, num_layers) + [LOCAL] * (num_layers - first))
    window = numbers({"sliding_window": 4096, **options}, {"window": "sliding_window"})
    return {**window, "local": tuple(local)} if any(local) else {}


READ = (
    *SIZES.values(), "intermediate_size", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters", "rope_scaling",
    "sliding_window", "layer_types",
)  # fmt: skip
# Keys that derived models add under this family's name, with the values that change nothing.
UNCHANGED = {
    "partial_rotary_factor": 1.0, "attention_multiplier": None, "embedding_multiplier": 1.0, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "no_rope_layers": None, "qk_norm": False, "is_causal": True,
    "use_bidirectional_attention": False, "final_logit_softcapping": None, "attn_logit_softcapping": None,
    "use_qk_norm": False, "qk_layernorm": False, "rope_interleaved": False, "alibi": False, "logit_scale": 1.0,
    "scale_emb": 1.0,
}  # fmt: skip


def refuse_windows(options: Mapping[str, Any], kind: str = "full_attention") -> None:
    """Raises ``ValueError`` unless all layers attend in the same way."""
    layers = options.get("layer_types")
    if layers is not None and not (isinstance(layers, list | tuple) and all(one == kind for one in layers)):
        raise ValueError(f"layer_types is {layers!r} in this config, which the model here does not support")


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
QK_NORMS = {"attention.query_ln": ("layers.{}.self_attn.q_norm",), "attention.key_ln": ("layers.{}.self_attn.k_norm",)}
QWEN3 = dataclasses.replace(LLAMA, name="qwen3", config=qwen3, layer={**LLAMA.layer, **QK_NORMS})
