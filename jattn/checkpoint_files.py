"""Files of published checkpoints: a ``config.json``, what it means, and the safetensors beside it.

Nothing in them runs. A file that is damaged, or made to harm, ends in an error that names it.
"""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jaxtyping import Array

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a ``Transformer``, in jattn's words; ``read_config`` translates a ``config.json``."""

    family: str  # "bert" or "gpt2"
    num_layers: int
    num_heads: int
    model_dim: int
    mlp_dim: int
    vocabulary: int
    max_length: int
    token_types: int
    norm_epsilon: float
    activation: str
    pooler: bool = False  # BERT's, of the first token
    head: bool = False  # an output embedding of its own; the input's otherwise

    @property
    def causal(self) -> bool:
        """Does a token see what comes before it alone? Then norms stand before what they norm, too."""
        return self.family == "gpt2"


def read_folder(folder: Path, leave_out: re.Pattern[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of all ``*.safetensors`` in ``folder``, by name, but for those ``leave_out`` finds; and the config.

    Raises:
        FileNotFoundError: a file is not there.
        ValueError: a file is damaged, or two hold the same tensor.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as missing:
        raise ImportError("reading safetensors needs the package of that name: pip install 'jattn[hf]'") from missing
    files = sorted(folder.glob("*.safetensors"))
    for wanted, found in (("config.json", (folder / "config.json").is_file()), ("*.safetensors", bool(files))):
        if not found:
            raise FileNotFoundError(f"no {wanted} in {str(folder)!r}; expected the folder of a saved model")
    tensors: dict[str, Any] = {}
    stood: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="flax") as opened:  # NumPy's has no bfloat16
                here = {name: opened.get_tensor(name) for name in opened.keys() if not leave_out.search(name)}
        except (SafetensorError, ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged, or no safetensors file: {error}") from error
        if twice := sorted(here.keys() & tensors.keys()):
            raise ValueError(f"{file} and {stood[twice[0]]} both hold {', '.join(twice)}; one of them must go")
        tensors |= here
        stood |= dict.fromkeys(here, file)
    return tensors, _read_json(folder / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged, or no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config


def read_config(config: Mapping[str, Any]) -> Config:
    """Hugging Face's ``config.json`` of a BERT or a GPT-2.

    Raises:
        ValueError: another ``model_type``, a missing key, or an option that the model here does not have.
    """
    family = config.get("model_type")
    keys = {
        "bert": ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "max_position_embeddings",
                 "layer_norm_eps", "hidden_act"),
        "gpt2": ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions", "layer_norm_epsilon",
                 "activation_function"),
    }  # fmt: skip
    if not isinstance(family, str) or family not in keys:
        raise ValueError(f"model_type must be one of {', '.join(keys)}, got {family!r}")
    missing = [key for key in keys[family] if key not in config]
    if missing:
        raise ValueError(f"the config of a {family} has no {', '.join(missing)}")
    *sizes, epsilon_key, activation_key = keys[family]
    inner_key = "intermediate_size" if family == "bert" else "n_inner"
    for key in (*sizes, *(key for key in (inner_key, "type_vocab_size") if config.get(key) is not None)):
        if type(config[key]) is not int or config[key] < (key != "type_vocab_size"):
            raise ValueError(f"{key} must be a positive integer in the config of a {family}, got {config[key]!r}")
    if not isinstance(config[epsilon_key], int | float) or not 0 <= config[epsilon_key] < 1:
        raise ValueError(
            f"{epsilon_key} must be a small number in the config of a {family}, got {config[epsilon_key]!r}"
        )
    known = {
        activation_key: isinstance(config[activation_key], str) and config[activation_key] in ACTIVATIONS,
        "position_embedding_type": config.get("position_embedding_type", "absolute") == "absolute",
        "is_decoder": family == "gpt2" or not config.get("is_decoder", False),
        "add_cross_attention": not config.get("add_cross_attention", False),
        "scale_attn_weights": config.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": not config.get("scale_attn_by_inverse_layer_idx", False),
    }
    for name, good in known.items():
        if not good:
            raise ValueError(f"{name} is {config[name]!r} in this config, which the model here does not have")
    layers, heads, width, vocabulary, length, epsilon, activation = (config[key] for key in keys[family])
    inner = config.get(inner_key) or 4 * width
    types = config.get("type_vocab_size", 2) if family == "bert" else 0
    return Config(family, layers, heads, width, inner, vocabulary, length, types, epsilon, activation)
