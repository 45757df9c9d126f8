"""The Phi-3 family: a Llama with fused projections, and LongRoPE in the 128k models.

Source: https://arxiv.org/abs/2404.14219, section 2; names as in published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import numbers, refuse, refuse_others, rotary
from jattn.interop.llama import LLAMA, READ, UNCHANGED, llama, refuse_windows
from jattn.positions import LongRopeScaling


def phi3(options: Mapping[str, Any]) -> Config:
    """The sizes in a Phi-3 config."""
    refuse(options, attention_bias=False, mlp_bias=False)
    window = numbers(options, {}, {"window": "sliding_window"})
    refuse_windows(options, "sliding_attention" if window else "full_attention")
    refuse_others(options, *READ, *UNCHANGED, "original_max_position_embeddings")
    entries = {key: _entry(options, options[key]) for key in ("rope_parameters", "rope_scaling") if options.get(key)}
    options = {**options, **entries}
    position = rotary(options, fraction=options.get("partial_rotary_factor", 1.0))
    if not isinstance(position.scaling, LongRopeScaling | None):
        raise ValueError(f"rope_type of a phi3 must be default or longrope, got {position.scaling}")
    positions = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
    others = {key: value for key, value in options.items() if key not in positions}
    return dataclasses.replace(llama(others), position=position, **window)


def _entry(options: Mapping[str, Any], entry: Any) -> Any:
    """A rotary-position entry in the form used by other families.

    Early files call LongRoPE su or yarn. The training length is a key of the config, 4,096 by default.
    """
    longrope = ("su", "yarn", "longrope")
    if not isinstance(entry, Mapping) or not any(entry.get(name) in longrope for name in ("rope_type", "type")):
        return entry
    original = options.get("original_max_position_embeddings", 4096)
    if entry.get("original_max_position_embeddings", original) != original:
        raise ValueError(
            f"original_max_position_embeddings of the rotary positions is {entry['original_max_position_embeddings']}, "
            f"but that of the config, which is 4096 by default, is {original}"
        )
    names = {name: "longrope" for name in ("rope_type", "type") if entry.get(name) in longrope}
    return {**entry, **names, "original_max_position_embeddings": original}


_UNFUSED = ("attention.query", "attention.key", "attention.value", "mlp_gate", "mlp_in")
_FUSED = {
    "attention.fused": ("layers.{}.self_attn.qkv_proj",),
    "mlp_fused": ("layers.{}.mlp.gate_up_proj",),
}
_LAYER = {path: names for path, names in LLAMA.layer.items() if path not in _UNFUSED}
PHI3 = dataclasses.replace(LLAMA, name="phi3", config=phi3, layer={**_LAYER, **_FUSED})
