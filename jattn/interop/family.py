"""``Family``: how one family of models names its configuration and its tensors."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jattn.interop._block import ACTIVATIONS, Config
from jattn.positions import LinearScaling, Llama3Scaling, Rotary

# Where most families' configs have the sizes of a ``Config``.
SIZES: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "model_dim": "hidden_size",
    "vocabulary": "vocab_size",
    "max_length": "max_position_embeddings",
}


def in_blocks(x: np.ndarray, widths: Sequence[int], head_dim: int) -> list[np.ndarray]:
    """Query, key and value ``[..., width]`` from a fused projection ``[..., sum(widths)]``, one after the other."""
    return np.split(x, np.cumsum(widths)[:-1], axis=-1)


@dataclasses.dataclass(frozen=True)
class Family:
    """The names in the ``config.json`` and the checkpoints of one family.

    ``modules`` maps the path of each module in ``Transformer`` to its possible names in a checkpoint; ``layer`` does so
    for the modules of a layer, with ``{}`` for its number. A module has a weight, and a bias or not. A module that a
    checkpoint lacks may be there in our model only if its ``Config`` says so. ``"attention.fused"`` stands for query,
    key and value in one.

    Attributes:
        name: ``model_type`` in the config.
        config: reads the config; raises ``ValueError`` for what the model does not support (``numbers``, ``refuse``).
        fused: ``(x [...,in], widths, head_dim)``: how a fused projection is split. By default one after the other.
        inputs_first: whether weights are usually stored ``[in,out]``; by default ``[out,in]``, as PyTorch's Linear.
        prefixes: what models with a task head put before every name.
    """

    name: str
    config: Callable[[Mapping[str, Any]], Config]
    modules: Mapping[str, tuple[str, ...]]
    layer: Mapping[str, tuple[str, ...]]
    fused: Callable[[np.ndarray, Sequence[int], int], Sequence[np.ndarray]] = in_blocks
    inputs_first: bool = False
    prefixes: tuple[str, ...] = ()


def numbers(
    config: Mapping[str, Any], keys: Mapping[str, str], optional: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Positive integers by their names in ``Config``: those under ``keys``, and of ``optional`` those that are given.

    Raises ``ValueError`` if one is missing, or is no positive integer.
    """
    kind = config.get("model_type")
    if missing := [key for key in keys.values() if key not in config]:
        raise ValueError(f"the config of a {kind} has no {', '.join(missing)}")
    found = {**keys, **{name: key for name, key in (optional or {}).items() if config.get(key) is not None}}
    for key in found.values():
        if type(config[key]) is not int or config[key] < (key != "type_vocab_size"):
            raise ValueError(f"{key} must be a positive integer in the config of a {kind}, got {config[key]!r}")
    return {name: config[key] for name, key in found.items()}


def small(config: Mapping[str, Any], key: str) -> float:
    """The number in [0, 1) under a key, such as a norm's epsilon. Raises ``ValueError`` if there is none."""
    if key not in config:
        raise ValueError(f"the config of a {config.get('model_type')} has no {key}")
    if isinstance(config[key], bool) or not isinstance(config[key], int | float) or not 0 <= config[key] < 1:
        raise ValueError(
            f"{key} must be a small number in the config of a {config.get('model_type')}, got {config[key]!r}"
        )
    return config[key]


def activation(config: Mapping[str, Any], key: str, default: str | None = None) -> str:
    """The name of the activation under a key. Raises ``ValueError`` if it is not one of ``ACTIVATIONS``."""
    name = config.get(key, default)
    if name is None:
        raise ValueError(f"the config of a {config.get('model_type')} has no {key}")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ValueError(f"{key} is {name!r} in this config, which the model here does not support")
    return name


def rotary(config: Mapping[str, Any], base_key: str = "rope_theta", fraction: float = 1.0) -> Rotary:
    """Rotary positions as a config says; newer ones keep base, fraction and scaling in one entry.

    Raises:
        ValueError: another scaling than ``linear`` and ``llama3``, two of them, or a number that is not positive.
    """
    entries = [config.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    if not all(isinstance(entry, Mapping) for entry in entries):
        raise ValueError(f"rope_parameters and rope_scaling must be dicts, got {entries}")
    merged: dict[str, Any] = {**entries[1], **entries[0]}
    kinds = {entry.get("rope_type", entry.get("type", "default")) for entry in entries} - {"default"}
    if not kinds <= {"linear", "llama3"} or len(kinds) > 1:
        raise ValueError(
            f"rope_type is {' and '.join(map(repr, sorted(map(str, kinds))))} in this config, which the model "
            f"here does not support"
        )

    def number(name: str, default: float | None = None) -> float:
        value = merged.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise ValueError(f"{name} of the rotary positions must be a positive number, got {value!r}")
        return float(value)

    base, share = number("rope_theta", config.get(base_key, 10000.0)), number("partial_rotary_factor", fraction)
    scaling = None
    if kinds == {"linear"}:
        scaling = LinearScaling(number("factor"))
    elif kinds:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        factor, low, high, length = (number(name) for name in names)
        scaling = Llama3Scaling(factor, low, high, int(length))
    return Rotary(base, share, scaling)


def refuse(config: Mapping[str, Any], **supported: Any) -> None:
    """Raises ``ValueError`` if a key is in the config with another value than the one supported."""
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} is {config[key]!r} in this config, which the model here does not support")
