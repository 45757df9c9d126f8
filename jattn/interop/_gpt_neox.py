"""The GPT-NeoX family (Pythia): attention and MLP in parallel, and positions that rotate part of each head.

Source: https://arxiv.org/abs/2204.06745, section 2.1; names as in published checkpoints.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jattn.interop._config import Config
from jattn.interop.family import SIZES, Family, activation, numbers, refuse, refuse_others, rotary, small


def config(options: Mapping[str, Any]) -> Config:
    """The sizes in a GPT-NeoX config."""
    sizes = numbers(options, {**SIZES, "mlp_dim": "intermediate_size"})
    refuse(options, attention_bias=True)
    refuse_others(
        options, *SIZES.values(), "intermediate_size", "attention_bias", "rotary_emb_base", "rotary_pct",
        "rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings", "layer_norm_eps", "hidden_act",
        "use_parallel_residual",
    )  # fmt: skip
    base = "rotary_emb_base" if "rotary_emb_base" in options else "rope_theta"
    tied = bool(options.get("tie_word_embeddings", False))
    return Config(
        family="gpt_neox",
        **sizes,
        norm_epsilon=small(options, "layer_norm_eps"),
        activation=activation(options, "hidden_act", "gelu"),
        position=rotary(options, base, options.get("rotary_pct", 0.25)),
        tied=tied,
        head=not tied,
        parallel=bool(options.get("use_parallel_residual", True)),
    )


def by_head(x: np.ndarray, widths: Sequence[int], head_dim: int) -> list[np.ndarray]:
    """Query, key and value from a fused projection in which each head's three are adjacent."""
    parts = x.reshape(*x.shape[:-1], -1, 3, head_dim)
    return [parts[..., i, :].reshape(*x.shape[:-1], width) for i, width in enumerate(widths)]


GPT_NEOX = Family(
    name="gpt_neox",
    config=config,
    modules={"token_embed": ("embed_in",), "last_norm": ("final_layer_norm",), "head": ("embed_out", "lm_head")},
    layer={
        "attention.fused": ("layers.{}.attention.query_key_value",),
        "attention.out": ("layers.{}.attention.dense",),
        "attention_norm": ("layers.{}.input_layernorm",),
        "mlp_in": ("layers.{}.mlp.dense_h_to_4h",),
        "mlp_out": ("layers.{}.mlp.dense_4h_to_h",),
        "mlp_norm": ("layers.{}.post_attention_layernorm",),
    },
    fused=by_head,
    prefixes=("gpt_neox.",),
)
