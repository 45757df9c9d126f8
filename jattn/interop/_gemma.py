"""The Gemma 2 and Gemma 3 (text) families: layers with and without a window, and norms on both sides.

Sources: https://arxiv.org/abs/2408.00118, section 2 (every other layer has a window; soft caps; norms before and after
attention and MLP); https://arxiv.org/abs/2503.19786, section 2 (five layers with a window to one without, each kind
with its own rotary base; norms of queries and keys instead of soft caps). Names as in published
checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import (
    GLOBAL,
    LOCAL,
    SIZES,
    activation,
    local_layers,
    numbers,
    of_whole_heads,
    positive,
    refuse,
    refuse_others,
    rotary,
    small,
)
from jattn.interop.llama import LLAMA, QK_NORMS, UNCHANGED

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def gemma2(options: Mapping[str, Any]) -> Config:
    """The sizes in a Gemma 2 config."""
    if missing := [key for key in _CAPS if key not in options]:
        raise ValueError(
            f"config.json of this gemma2 lacks {', '.join(missing)}; set it to null if the model does not use it"
        )
    refuse_others(options, *_READ)
    position = of_whole_heads(rotary(options))
    return dataclasses.replace(_gemma(options, pattern=2), position=position)


def gemma3(options: Mapping[str, Any]) -> Config:
    """The sizes in a Gemma 3 (text) config."""
    refuse(options, attn_logit_softcapping=None)
    bidirectional = options.get("use_bidirectional_attention") or False
    if not isinstance(bidirectional, bool):
        raise ValueError(f"use_bidirectional_attention must be true or false in this config, got {bidirectional!r}")
    options = {key: x for key, x in options.items() if key != "use_bidirectional_attention"}
    refuse_others(options, *_READ, "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq")
    by_kind = options.get("rope_parameters") or {}
    if not isinstance(by_kind, Mapping) or by_kind.keys() - {LOCAL, GLOBAL}:
        raise ValueError(f"rope_parameters must have entries {LOCAL} and {GLOBAL} in this config, got {by_kind!r}")
    bases = options.get("rope_local_base_freq", 10000.0), options.get("rope_theta", 1000000.0)
    trained = {"max_position_embeddings": options.get("max_position_embeddings")}
    local = {"rope_parameters": by_kind.get(LOCAL), "rope_theta": bases[0], **trained}
    scaling = options.get("rope_scaling")
    others = {"rope_parameters": by_kind.get(GLOBAL), "rope_theta": bases[1], "rope_scaling": scaling, **trained}
    # Its older name; newer versions keep it under the second name, even if layer_types disagrees.
    pattern = numbers(options, {}, {"pattern": "sliding_window_pattern"})
    if options.get("layer_types") is None and not pattern:
        refuse(options, _sliding_window_pattern=6)  # without layer_types, newer versions assume 6
        pattern = numbers(options, {}, {"pattern": "_sliding_window_pattern"})
    return dataclasses.replace(
        _gemma(options, **pattern),
        qk_norm="head",
        causal=not bidirectional,
        position=of_whole_heads(rotary(others)),
        local_position=of_whole_heads(rotary(local)),
    )


_UNCHANGED = {key: value for key, value in UNCHANGED.items() if key not in _CAPS}
_READ = (
    *SIZES.values(), *_CAPS, *_UNCHANGED, "intermediate_size", "num_key_value_heads", "head_dim", "attention_bias",
    "rms_norm_eps", "hidden_activation", "hidden_act", "query_pre_attn_scalar", "sliding_window", "layer_types",
    "tie_word_embeddings", "rope_theta", "rope_parameters", "rope_scaling",
)  # fmt: skip


def _gemma(options: Mapping[str, Any], pattern: int | None = None) -> Config:
    """What both have in common, except positions; one in every ``pattern`` layers has no window."""
    refuse(options, **_UNCHANGED)
    keys = {**SIZES, "mlp_dim": "intermediate_size", "head_dim": "head_dim"}
    sizes = numbers(options, keys, {"num_kv_heads": "num_key_value_heads"})
    local = _local(options, sizes["num_layers"], pattern)
    window = numbers(options, {"window": "sliding_window"}) if any(local) else {}
    caps = [None if options.get(key) is None else positive(options, key) for key in _CAPS]
    act = activation(options, "hidden_activation", "gelu_pytorch_tanh")
    if options.get("hidden_act") not in (None, act):  # early files have it under both names
        raise ValueError(f"hidden_act is {options['hidden_act']!r} in this config, but hidden_activation is {act!r}")
    bias, tied = bool(options.get("attention_bias", False)), bool(options.get("tie_word_embeddings", True))
    return Config(
        family=options["model_type"],
        **sizes,
        **window,
        local=tuple(local),
        norm="rms",
        norm_epsilon=small(options, "rms_norm_eps"),
        norm_outputs=True,
        activation=act,
        gated=True,
        scale=positive(options, "query_pre_attn_scalar") ** -0.5,
        score_cap=caps[0],
        logit_cap=caps[1],
        embed_scale=sizes["model_dim"] ** 0.5,
        tied=tied,
        head=not tied,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=False,
    )


def _local(options: Mapping[str, Any], num_layers: int, pattern: int | None) -> list[bool]:
    """Whether each layer has a window, according to ``layer_types`` or else the pattern."""
    repeated = [LOCAL if (i + 1) % pattern else GLOBAL for i in range(num_layers)] if pattern else []
    if options.get("layer_types") is None and not pattern:
        raise ValueError(f"the config of a {options['model_type']} needs layer_types or sliding_window_pattern")
    local = local_layers(options, num_layers, repeated)
    if options.get("sliding_window_pattern") is not None and local != [kind == LOCAL for kind in repeated]:
        kinds = options["layer_types"]
        raise ValueError(f"sliding_window_pattern is {pattern} in this config, but layer_types is {kinds!r}")
    return local


# Values missing from ``text_config`` of a Gemma 3 with images: from ``Gemma3TextConfig`` of transformers 5.24.
_TEXT_DEFAULTS = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096,
}  # fmt: skip
_OF_IMAGES = (
    "text_config", "vision_config", "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index",
    "image_token_id", "tie_word_embeddings",
)  # fmt: skip


def gemma3_with_images(options: Mapping[str, Any]) -> Config:
    """The sizes of the text model in the config of a Gemma 3 that also reads images."""
    refuse_others(options, *_OF_IMAGES)
    text = options.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config must be a dict in the config of a gemma3, got {text!r}")
    refuse(text, model_type="gemma3_text")
    ties = {"tie_word_embeddings": options.get("tie_word_embeddings", True)}  # the value in text_config is ignored
    if text.get("layer_types") is None and text.get("_sliding_window_pattern") is None:
        text = {"sliding_window_pattern": 6, **text}
    return gemma3({**_TEXT_DEFAULTS, **text, **ties, "model_type": "gemma3_text"})


_NORMS = {
    "attention_out_norm": ("layers.{}.post_attention_layernorm",),
    "mlp_norm": ("layers.{}.pre_feedforward_layernorm",),
    "mlp_out_norm": ("layers.{}.post_feedforward_layernorm",),
}
GEMMA2 = dataclasses.replace(LLAMA, name="gemma2", config=gemma2, layer={**LLAMA.layer, **_NORMS}, norm_offset=1.0)
GEMMA3 = dataclasses.replace(GEMMA2, name="gemma3_text", config=gemma3, layer={**GEMMA2.layer, **QK_NORMS})
# With images: the text model is under the first prefix in published files, under the second in newer transformers.
GEMMA3_WITH_IMAGES = dataclasses.replace(
    GEMMA3,
    name="gemma3",
    config=gemma3_with_images,
    prefixes=("language_model.model.", "model.language_model.", "language_model.", "model."),
    skipped=tuple(f"{whole}{part}." for whole in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
)
