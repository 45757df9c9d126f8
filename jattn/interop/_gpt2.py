"""The GPT-2 family; names as in published checkpoints.

Source: Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import SIZES, Family, activation, numbers, refuse, refuse_others, small


def config(options: Mapping[str, Any]) -> Config:
    """The sizes in a GPT-2 config."""
    keys = {"num_layers": "n_layer", "num_heads": "n_head", "model_dim": "n_embd", "max_length": "n_positions"}
    sizes = numbers(options, {**SIZES, **keys}, {"mlp_dim": "n_inner"})
    refuse(options, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False)
    summaries = (f"summary_{name}" for name in ("activation", "first_dropout", "proj_to_labels", "type", "use_proj"))
    refuse_others(
        options, *keys.values(), "vocab_size", "n_inner", "layer_norm_epsilon", "activation_function",
        "tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx", *summaries,
    )  # fmt: skip
    return Config(
        family="gpt2",
        **{"mlp_dim": 4 * sizes["model_dim"], **sizes},
        norm_epsilon=small(options, "layer_norm_epsilon"),
        activation=activation(options, "activation_function"),
        tied=bool(options.get("tie_word_embeddings", True)),
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
