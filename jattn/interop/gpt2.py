"""The GPT-2 family; names as in published checkpoints.

Source: Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

from collections.abc import Mapping
from typing import Any

from jattn.interop._block import Config
from jattn.interop.family import Family, activation, numbers, refuse, small


def config(options: Mapping[str, Any]) -> Config:
    """The sizes in a GPT-2's config."""
    layers, heads, model_dim, vocabulary, length, mlp_dim = numbers(
        options, "n_layer", "n_head", "n_embd", "vocab_size", "n_positions", optional={"n_inner": None}
    )
    refuse(options, add_cross_attention=False, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    return Config(
        family="gpt2",
        num_layers=layers,
        num_heads=heads,
        model_dim=model_dim,
        mlp_dim=mlp_dim or 4 * model_dim,
        vocabulary=vocabulary,
        max_length=length,
        norm_epsilon=small(options, "layer_norm_epsilon"),
        activation=activation(options, "activation_function"),
    )


GPT2 = Family(
    name="gpt2",
    config=config,
    modules={"token_embed": ("wte",), "position_embed": ("wpe",), "last_norm": ("ln_f",), "head": ("lm_head",)},
    layer={
        "attention.fused": ("h.{}.attn.c_attn",),
        "attention.query": ("h.{}.attn.q_proj",),
        "attention.key": ("h.{}.attn.k_proj",),
        "attention.value": ("h.{}.attn.v_proj",),
        "attention.out": ("h.{}.attn.c_proj", "h.{}.attn.out_proj"),
        "attention_norm": ("h.{}.ln_1",),
        "mlp_in": ("h.{}.mlp.c_fc",),
        "mlp_out": ("h.{}.mlp.c_proj",),
        "mlp_norm": ("h.{}.ln_2",),
    },
    inputs_first=True,
    prefixes=("transformer.",),
)
