"""The Gemma 2 and Gemma 3 families, of text: layers with a window and layers without, and norms on both sides.

Sources: https://arxiv.org/abs/2408.00118, section 2 (every other layer has a window; soft caps; norms before and after
attention and MLP); https://arxiv.org/abs/2503.19786, section 2 (five layers with a window to one without, each kind
with its own base of the rotary positions; norms of queries and keys instead of soft caps). Names as in published
checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import (
    SIZES,
    activation,
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
_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def gemma2(options: Mapping[str, Any]) -> Config:
    """The sizes in a Gemma 2's config."""
    if missing := [key for key in _CAPS if key not in options]:
        raise ValueError(f"the config of a gemma2 has no {', '.join(missing)}; null means none")
    refuse_others(options, *_READ)
    position = of_whole_heads(rotary(options))
    return dataclasses.replace(_gemma(options, pattern=2), position=position)


def gemma3(options: Mapping[str, Any]) -> Config:
    """The sizes in the config of a Gemma 3, of text."""
    refuse(options, attn_logit_softcapping=None)
    refuse_others(options, *_READ, "sliding_window_pattern", "_sliding_window_pattern", "rope_local_base_freq")
    by_kind = options.get("rope_parameters") or {}
    if not isinstance(by_kind, Mapping) or by_kind.keys() - {_LOCAL, _GLOBAL}:
        raise ValueError(f"rope_parameters must have entries {_LOCAL} and {_GLOBAL} in this config, got {by_kind!r}")
    bases = options.get("rope_local_base_freq", 10000.0), options.get("rope_theta", 1000000.0)
    local = {"rope_parameters": by_kind.get(_LOCAL), "rope_theta": bases[0]}
    scaling = options.get("rope_scaling")
    others = {"rope_parameters": by_kind.get(_GLOBAL), "rope_theta": bases[1], "rope_scaling": scaling}
    # Older versions called it so; newer ones keep it under the second name, also where layer_types says something else.
    pattern = numbers(options, {}, {"pattern": "sliding_window_pattern"})
    if options.get("layer_types") is None:
        pattern = pattern or numbers(options, {}, {"pattern": "_sliding_window_pattern"})
    return dataclasses.replace(
        _gemma(options, **pattern),
        qk_norm="head",
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
    """What both have in common, without positions; ``pattern``: one in so many layers has no window."""
    refuse(options, **_UNCHANGED)
    keys = {**SIZES, "mlp_dim": "intermediate_size", "head_dim": "head_dim"}
    sizes = numbers(options, keys, {"num_kv_heads": "num_key_value_heads"})
    kinds = _kinds(options, sizes["num_layers"], pattern)
    window = numbers(options, {"window": "sliding_window"}) if _LOCAL in kinds else {}
    caps = [None if options.get(key) is None else positive(options, key) for key in _CAPS]
    act = activation(options, "hidden_activation", "gelu_pytorch_tanh")
    if options.get("hidden_act") not in (None, act):  # the first files have it under both names
        raise ValueError(f"hidden_act is {options['hidden_act']!r} in this config, but hidden_activation is {act!r}")
    bias, tied = bool(options.get("attention_bias", False)), bool(options.get("tie_word_embeddings", True))
    return Config(
        family=options["model_type"],
        **sizes,
        **window,
        local=tuple(kind == _LOCAL for kind in kinds),
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


def _kinds(options: Mapping[str, Any], num_layers: int, pattern: int | None) -> list[str]:
    """The kind of each layer, as ``layer_types`` says, or else the pattern."""
    kinds = options.get("layer_types")
    repeated = [_LOCAL if (i + 1) % pattern else _GLOBAL for i in range(num_layers)] if pattern else None
    if kinds is None:
        if repeated is None:
            raise ValueError(f"the config of a {options['model_type']} has no layer_types or sliding_window_pattern")
        return repeated
    known = isinstance(kinds, list | tuple) and all(kind in (_LOCAL, _GLOBAL) for kind in kinds)
    if not known or len(kinds) != num_layers:
        raise ValueError(
            f"layer_types must say {_LOCAL} or {_GLOBAL} for each of {num_layers} layers in this config, got {kinds!r}"
        )
    if options.get("sliding_window_pattern") is not None and list(kinds) != repeated:
        raise ValueError(f"sliding_window_pattern is {pattern} in this config, but layer_types is {kinds!r}")
    return list(kinds)


_NORMS = {
    "attention_out_norm": ("layers.{}.post_attention_layernorm",),
    "mlp_norm": ("layers.{}.pre_feedforward_layernorm",),
    "mlp_out_norm": ("layers.{}.post_feedforward_layernorm",),
}
GEMMA2 = dataclasses.replace(LLAMA, name="gemma2", config=gemma2, layer={**LLAMA.layer, **_NORMS}, norm_offset=1.0)
GEMMA3 = dataclasses.replace(GEMMA2, name="gemma3_text", config=gemma3, layer={**GEMMA2.layer, **QK_NORMS})
