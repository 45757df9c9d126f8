"""Lists the known families, and reads the sizes in their configs."""

from collections.abc import Mapping
from typing import Any

from jattn.interop._bert import BERT
from jattn.interop._config import Config
from jattn.interop._gemma import GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES
from jattn.interop._gpt2 import GPT2
from jattn.interop._gpt_neox import GPT_NEOX
from jattn.interop._olmo2 import OLMO2
from jattn.interop._phi3 import PHI3
from jattn.interop.family import Family
from jattn.interop.llama import LLAMA, MISTRAL, QWEN2, QWEN3

#: The families whose checkpoints can be read, by ``model_type``.
FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        *(BERT, GPT2, GPT_NEOX),
        *(LLAMA, MISTRAL, QWEN2, QWEN3, PHI3, OLMO2),
        *(GEMMA2, GEMMA3, GEMMA3_WITH_IMAGES),
    )
}


def read_config(config: Mapping[str, Any]) -> Config:
    """Reads the sizes and the kind of a model from the Hugging Face ``config.json`` of one of ``FAMILIES``.

    Args:
        config: the file as a dict.

    Raises:
        ValueError: ``model_type`` is not in ``FAMILIES``; a key is missing, unknown, or has an unsupported value.

    Example:
        >>> published = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}
        >>> published |= {"vocab_size": 50257, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"}
        >>> config = jattn.interop.read_config(published)
        >>> config.num_layers, config.size_of_head, config.norm, config.causal
        (12, 64, 'layer', True)
    """
    return family_of(config).config(config)


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a config's ``model_type``. Raises ``ValueError`` if it is unknown."""
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {name!r}; or pass family=")
    return FAMILIES[name]
