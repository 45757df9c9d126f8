"""Places a checkpoint's tensors in a ``Transformer``."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.interop.bert import BERT
from jattn.interop.files import read_folder
from jattn.interop.gpt2 import GPT2
from jattn.interop.transformer import ACTIVATIONS, Config, Transformer

Tensors = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

FAMILIES = {family.name: family for family in (BERT, GPT2)}

# Tensors in checkpoints that are not parameters: masks and tables that the code computes.
BUFFERS = re.compile(r"(^|\.)(position_ids|token_type_ids|attn\.bias|attn\.masked_bias)$")


def load(folder: str | Path, *, ignore: Sequence[str] = (), dtype: Any = jnp.float32) -> Transformer:
    """The model in ``folder``, from its ``config.json`` and all ``*.safetensors`` beside it.

    Args:
        folder: as saved by Hugging Face's ``save_pretrained``.
        ignore: prefixes of the names of tensors to leave out, such as ``"cls."`` for BERT's training heads.
        dtype: the dtype of the parameters.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the family is unknown; a file is damaged; tensors are missing, left over, of another shape, not
            floating-point, or in two files. The message names all of them.
        TypeError: ``ignore`` is a single string, or ``dtype`` is not floating.
        ImportError: safetensors is not installed.

    Example:
        ``model = load("all-MiniLM-L6-v2"); hidden = model(tokens, valid=tokens != 0)``
    """
    tensors, config = read_folder(Path(folder), exclude=BUFFERS)
    return from_tensors(tensors, config, ignore=ignore, dtype=dtype)


def from_tensors(
    tensors: Tensors, config: Mapping[str, Any], *, ignore: Sequence[str] = (), dtype: Any = jnp.float32
) -> Transformer:
    """``load`` from memory: arrays by name, and a ``config.json`` as a dict."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of prefixes of names, got the string {ignore!r}; use ({ignore!r},)")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype of the parameters must be floating, got {jnp.dtype(dtype)}")
    tensors = {
        name: x for name, x in tensors.items() if not BUFFERS.search(name) and not name.startswith(tuple(ignore))
    }
    tensors = _without_prefix(tensors)
    sizes = read_config(config)
    if sizes.num_layers > len(tensors):  # checked before that many layers are built
        raise ValueError(f"the config has {sizes.num_layers} layers, but there are only {len(tensors)} tensors")
    sizes = dataclasses.replace(sizes, pooler="pooler.dense.weight" in tensors, head="lm_head.weight" in tensors)
    model = nnx.eval_shape(lambda: Transformer(sizes, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(model)
    expected = {".".join(map(str, path)): leaf.shape for path, leaf in nnx.to_flat_state(abstract)}
    placed = _place(tensors, sizes, expected)
    state = [(path, leaf.replace(jnp.asarray(placed[".".join(map(str, path))], dtype)))
             for path, leaf in nnx.to_flat_state(abstract)]  # fmt: skip
    return nnx.merge(graph, nnx.from_flat_state(state))


def read_config(config: Mapping[str, Any]) -> Config:
    """The sizes in Hugging Face's ``config.json`` of a BERT or GPT-2.

    Raises:
        ValueError: another ``model_type``, a missing key, or an option that the model here does not support.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(f"model_type must be one of {', '.join(FAMILIES)}, got {name!r}")
    family = FAMILIES[name]
    missing = [key for key in family.config_keys if key not in config]
    if missing:
        raise ValueError(f"the config of a {name} has no {', '.join(missing)}")
    *size_keys, epsilon_key, activation_key = family.config_keys
    optional = [key for key in (family.mlp_dim_key, "type_vocab_size") if config.get(key) is not None]
    for key in (*size_keys, *optional):
        if type(config[key]) is not int or config[key] < (key != "type_vocab_size"):
            raise ValueError(f"{key} must be a positive integer in the config of a {name}, got {config[key]!r}")
    epsilon, activation = config[epsilon_key], config[activation_key]
    if not isinstance(epsilon, int | float) or not 0 <= epsilon < 1:
        raise ValueError(f"{epsilon_key} must be a small number in the config of a {name}, got {epsilon!r}")
    supported = {
        activation_key: isinstance(activation, str) and activation in ACTIVATIONS,
        "position_embedding_type": config.get("position_embedding_type", "absolute") == "absolute",
        "is_decoder": family.decoder or not config.get("is_decoder", False),
        "add_cross_attention": not config.get("add_cross_attention", False),
        "scale_attn_weights": config.get("scale_attn_weights", True),
        "scale_attn_by_inverse_layer_idx": not config.get("scale_attn_by_inverse_layer_idx", False),
    }
    for key, is_supported in supported.items():
        if not is_supported:
            raise ValueError(f"{key} is {config[key]!r} in this config, which the model here does not support")
    layers, heads, model_dim, vocabulary, length = (config[key] for key in size_keys)
    mlp_dim = config.get(family.mlp_dim_key) or 4 * model_dim
    types = config.get("type_vocab_size", family.token_types) if family.token_types else 0
    return Config(name, layers, heads, model_dim, mlp_dim, vocabulary, length, types, epsilon, activation)


def _without_prefix(tensors: Tensors) -> dict[str, Any]:
    """Removes the prefix ``bert.`` or ``transformer.`` that models with a task head add to names."""
    return {re.sub(r"^(bert|transformer)\.", "", name): x for name, x in tensors.items()}


def _modules(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """``(kind, path in our model, names in checkpoints)`` of all modules that a checkpoint may have."""
    family = FAMILIES[config.family]
    for path, (kind, names) in family.modules.items():
        yield kind, path, names
    for i in range(config.num_layers):
        prefix = family.layer_prefix.format(i)
        for module, names in family.layer.items():
            attention = "attention." if module in ("fused", "query", "key", "value", "out") else ""
            kind = "norm" if module.endswith("norm") else "linear" if module.startswith("mlp") else module
            yield kind, f"layers.{i}.{attention}{module}", tuple(prefix + name for name in names)


def _place(tensors: Tensors, config: Config, expected: Shapes) -> dict[str, Any]:
    """The tensors under our names and in our shapes. Raises ValueError with everything that does not fit."""
    placed, used, misshapen = {}, set(), []
    for source, targets, transposed in _sources(tensors, config, expected):
        used.add(source)
        x = np.asarray(tensors[source])
        flat = [_flat(target, expected[target]) for target in targets]
        shape = (*flat[0][:-1], sum(sizes[-1] for sizes in flat))
        shape = shape[::-1] if transposed else shape
        if x.shape == shape:
            parts = np.split(x.T if transposed else x, len(targets), axis=-1)
            placed |= {target: part.reshape(expected[target]) for target, part in zip(targets, parts, strict=True)}
        else:
            placed |= dict.fromkeys(targets)
            misshapen.append(f"{source} is {list(x.shape)}, expected {list(shape)}")
    problems = {
        "missing": sorted(expected.keys() - placed.keys()),
        "left over": sorted(tensors.keys() - used),
        "of another shape": misshapen,
        "no floating-point numbers": [
            f"{name} is {tensors[name].dtype}"
            for name in sorted(used)
            if not jnp.issubdtype(tensors[name].dtype, jnp.floating)
        ],
    }
    if any(problems.values()):
        lines = "".join(f"\n{problem}: {', '.join(names)}" for problem, names in problems.items() if names)
        raise ValueError(f"the checkpoint does not fit a {config.family} with the sizes in its config{lines}")
    return placed


def _sources(tensors: Tensors, config: Config, expected: Shapes) -> Iterator[tuple[str, list[str], bool]]:
    """``(name in the checkpoint, names in our model, whether stored [out,in])`` of every tensor that has a place."""
    inputs_first = _inputs_first(tensors, config)
    tensorflow = {"weight": "gamma", "bias": "beta"}  # TensorFlow's names in a norm
    for kind, path, names in _modules(config):
        for part, leaf in (("weight", {"embed": "embedding", "norm": "scale"}.get(kind, "kernel")), ("bias", "bias")):
            candidates = [f"{name}.{suffix}" for name in names for suffix in (part, tensorflow[part])]
            source = next((name for name in candidates if name in tensors), None)
            paths = [path.replace("fused", name) for name in ("query", "key", "value")] if kind == "fused" else [path]
            targets = [f"{target}.{leaf}" for target in paths]
            if source is not None and targets[0] in expected:
                transposed = leaf == "kernel" and (kind == "head" or not inputs_first)
                yield source, targets, transposed


def _flat(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with heads and head dim joined, as in other frameworks."""
    if re.search(r"attention\.(query|key|value)\.", path):
        return (*shape[:-2], shape[-2] * shape[-1])
    return (shape[0] * shape[1], shape[2]) if path.endswith("attention.out.kernel") else shape


def _inputs_first(tensors: Tensors, config: Config) -> bool:
    """Whether weights are stored ``[in,out]``, judging by those that are not square; by the family if all are."""
    votes = 0
    for kind, path, names in _modules(config):
        out_dim = 3 * config.model_dim if kind == "fused" else config.mlp_dim if path.endswith("mlp_in") else None
        for name in names if out_dim not in (None, config.model_dim) else ():
            shape = tensors[f"{name}.weight"].shape if f"{name}.weight" in tensors else ()
            votes += (shape == (config.model_dim, out_dim)) - (shape == (out_dim, config.model_dim))
    return votes > 0 if votes else FAMILIES[config.family].inputs_first
