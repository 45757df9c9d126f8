"""The BERT family. Source: https://arxiv.org/abs/1810.04805, section 3; names as in published checkpoints."""

from jattn.interop.family import Family

BERT = Family(
    name="bert",
    config_keys=(
        "num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings",
        "layer_norm_eps", "hidden_act",
    ),
    mlp_dim_key="intermediate_size",
    token_types=2,
    decoder=False,
    modules={
        "token_embed": ("embed", ("embeddings.word_embeddings",)),
        "position_embed": ("embed", ("embeddings.position_embeddings",)),
        "type_embed": ("embed", ("embeddings.token_type_embeddings",)),
        "embed_norm": ("norm", ("embeddings.LayerNorm",)),
        "pooler": ("linear", ("pooler.dense",)),
    },
    layer_prefix="encoder.layer.{}.",
    layer={
        "fused": ("attention.self.qkv", "attention.self.Wqkv", "attention.Wqkv"),
        "query": ("attention.self.query",),
        "key": ("attention.self.key",),
        "value": ("attention.self.value",),
        "out": ("attention.output.dense",),
        "attention_norm": ("attention.output.LayerNorm",),
        "mlp_in": ("intermediate.dense",),
        "mlp_out": ("output.dense",),
        "mlp_norm": ("output.LayerNorm",),
    },
    inputs_first=False,
)  # fmt: skip
