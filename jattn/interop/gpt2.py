"""The GPT-2 family; names as in published checkpoints.

Source: Radford et al., 2019, "Language Models are Unsupervised Multitask Learners", section 2.3.
"""

from jattn.interop.family import Family

GPT2 = Family(
    name="gpt2",
    config_keys=(
        "n_layer", "n_head", "n_embd", "vocab_size", "n_positions", "layer_norm_epsilon", "activation_function",
    ),
    mlp_dim_key="n_inner",
    token_types=0,
    decoder=True,
    modules={
        "token_embed": ("embed", ("wte",)),
        "position_embed": ("embed", ("wpe",)),
        "last_norm": ("norm", ("ln_f",)),
        "head": ("head", ("lm_head",)),
    },
    layer_prefix="h.{}.",
    layer={
        "fused": ("attn.c_attn",),
        "query": ("attn.q_proj",),
        "key": ("attn.k_proj",),
        "value": ("attn.v_proj",),
        "out": ("attn.c_proj", "attn.out_proj"),
        "attention_norm": ("ln_1",),
        "mlp_in": ("mlp.c_fc",),
        "mlp_out": ("mlp.c_proj",),
        "mlp_norm": ("ln_2",),
    },
    inputs_first=True,
)  # fmt: skip
