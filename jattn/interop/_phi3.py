"""The Phi-3 family, as far as its rotary positions are not stretched: a Llama with fused projections.

Source: https://arxiv.org/abs/2404.14219, section 2; names as in published checkpoints.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import numbers, refuse, refuse_others, rotary
from jattn.interop.llama import LLAMA, READ, UNCHANGED, llama, refuse_windows


def phi3(options: Mapping[str, Any]) -> Config:
    """The sizes in a Phi-3's config. Phi-3's longer contexts have ``rope_type`` longrope, which is refused."""
    refuse(options, attention_bias=False, mlp_bias=False)
    window = numbers(options, {}, {"window": "sliding_window"})
    refuse_windows(options, "sliding_attention" if window else "full_attention")
    # Without longrope, original_max_position_embeddings says nothing.
    refuse_others(options, *READ, *UNCHANGED, "original_max_position_embeddings")
    position = rotary(options, fraction=options.get("partial_rotary_factor", 1.0))
    if position.scaling is not None:
        raise ValueError(f"rope_type of a phi3 must be default here, got {position.scaling}")
    positions = ("rope_theta", "rope_parameters", "rope_scaling", "partial_rotary_factor")
    others = {key: value for key, value in options.items() if key not in positions}
    return dataclasses.replace(llama(others), position=position, **window)


_UNFUSED = ("attention.query", "attention.key", "attention.value", "mlp_gate", "mlp_in")
_FUSED = {
    "attention.fused": ("layers.{}.self_attn.qkv_proj",),
    "mlp_fused": ("layers.{}.mlp.gate_up_proj",),
}
_LAYER = {path: names for path, names in LLAMA.layer.items() if path not in _UNFUSED}
PHI3 = dataclasses.replace(LLAMA, name="phi3", config=phi3, layer={**_LAYER, **_FUSED})
