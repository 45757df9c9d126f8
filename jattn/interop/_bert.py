"""The BERT family. Source: https://arxiv.org/abs/1810.04805, section 3; names as in published checkpoints."""

from collections.abc import Mapping
from typing import Any

from jattn.interop._config import Config
from jattn.interop.family import SIZES, Family, activation, numbers, refuse, refuse_others, small


def config(options: Mapping[str, Any]) -> Config:
    """The sizes in a BERT config."""
    sizes = numbers(options, SIZES, {"mlp_dim": "intermediate_size", "token_types": "type_vocab_size"})
    refuse(options, position_embedding_type="absolute", is_decoder=False)
    # TensorFlow checkpoints list sizes of the pooler that nothing reads.
    pooler = (f"pooler_{name}" for name in ("fc_size", "num_attention_heads", "num_fc_layers", "size_per_head", "type"))
    refuse_others(
        options, *SIZES.values(), "intermediate_size", "type_vocab_size", "layer_norm_eps", "hidden_act",
        "position_embedding_type", "tie_word_embeddings", "directionality", *pooler,
    )  # fmt: skip
    return Config(
        family="bert",
        **{"mlp_dim": 4 * sizes["model_dim"], "token_types": 2, **sizes},
        norm_epsilon=small(options, "layer_norm_eps"),
        activation=activation(options, "hidden_act"),
        causal=False,
        norm_first=False,
    )


BERT = Family(
    name="bert",
    config=config,
    modules={
        "token_embed": ("embeddings.word_embeddings",),
        "position_embed": ("embeddings.position_embeddings",),
        "type_embed": ("embeddings.token_type_embeddings",),
        "embed_norm": ("embeddings.LayerNorm",),
        "pooler": ("pooler.dense",),
    },
    layer={
        "attention.fused": tuple(f"encoder.layer.{{}}.attention.{name}" for name in ("self.qkv", "self.Wqkv", "Wqkv")),
        "attention.query": ("encoder.layer.{}.attention.self.query",),
        "attention.key": ("encoder.layer.{}.attention.self.key",),
        "attention.value": ("encoder.layer.{}.attention.self.value",),
        "attention.out": ("encoder.layer.{}.attention.output.dense",),
        "attention_norm": ("encoder.layer.{}.attention.output.LayerNorm",),
        "mlp_in": ("encoder.layer.{}.intermediate.dense",),
        "mlp_out": ("encoder.layer.{}.output.dense",),
        "mlp_norm": ("encoder.layer.{}.output.LayerNorm",),
    },
    prefixes=("bert.",),
)
