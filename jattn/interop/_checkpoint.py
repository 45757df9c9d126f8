"""Places a checkpoint's tensors in a ``Transformer``."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.interop._config import Config
from jattn.interop._families import family_of
from jattn.interop._gguf import read_gguf
from jattn.interop._safetensors import read_folder
from jattn.interop._transformer import Transformer
from jattn.interop.family import Family

Tensors = Mapping[str, Any]
Shapes = Mapping[str, tuple[int, ...]]

# Modules that a checkpoint may hold in one, by the end of the path in ``Family.layer``.
FUSED = {
    "attention.fused": ("attention.query", "attention.key", "attention.value"),
    "mlp_fused": ("mlp_gate", "mlp_in"),
}

# Tensors in checkpoints that are not parameters: masks and tables that the code computes.
BUFFERS = re.compile(
    r"(^|\.)(position_ids|token_type_ids|attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq|attention\.bias"
    r"|attention\.masked_bias)$"
)


def load(
    source: str | Path, *, ignore: Sequence[str] = (), dtype: Any = jnp.float32, family: Family | None = None
) -> Transformer:
    """The model in a folder, from its ``config.json`` and the safetensors beside it, or in a GGUF file.

    Args:
        source: a folder as saved by Hugging Face's ``save_pretrained``: ``model.safetensors``, or else the files that
            ``model.safetensors.index.json`` names, or without either all ``*.safetensors``; or a file ``*.gguf``, which
            is dequantised. Of an installed package, ``Path(importlib.util.find_spec(package).origin).parent`` is the
            folder.
        ignore: prefixes of the names of tensors to leave out, such as ``"cls."`` for BERT's training heads.
        dtype: the dtype of the parameters.
        family: how to read it; by default one of ``FAMILIES``, by the config's ``model_type``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the family is unknown; the config has a key that may change what the model computes and is not
            known here; the folder holds an adapter; an output embedding differs from the input's, to which the config
            ties it; a file is damaged; tensors are missing, left over, of another shape, not floating-point, or in two
            files. The message names all of them.
        TypeError: ``ignore`` is a single string, or ``dtype`` is not floating.
        ImportError: safetensors, or for a GGUF file gguf, is not installed.

    Example:
        >>> import json, pathlib, safetensors.numpy
        >>> config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "rms_norm_eps": 1e-6}
        >>> config |= dict.fromkeys(["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"], 4)
        >>> names = [name.format(0) for (name,) in jattn.interop.FAMILIES["llama"].layer.values()]
        >>> names += ["embed_tokens", "norm", "lm_head"]
        >>> tensors = {f"{name}.weight": np.ones(4) if "norm" in name else np.eye(4) for name in names}
        >>> safetensors.numpy.save_file(tensors, "model.safetensors")  # published models come with these two files
        >>> size = pathlib.Path("config.json").write_text(json.dumps(config))
        >>> model = jattn.interop.load(".")
        >>> model.logits(model(jnp.array([[2, 0, 1]]))).argmax(-1).tolist()  # this one repeats what it reads
        [[2, 0, 1]]
    """
    source = Path(source)
    is_gguf = source.suffix.lower() == ".gguf"
    tensors, config = read_gguf(source) if is_gguf else read_folder(source, exclude=BUFFERS)
    return from_tensors(tensors, config, ignore=ignore, dtype=dtype, family=family)


def from_tensors(
    tensors: Tensors,
    config: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    dtype: Any = jnp.float32,
    family: Family | None = None,
) -> Transformer:
    """:func:`~jattn.interop.load` from memory: arrays by name, and a ``config.json`` as a dict.

    Args:
        tensors: floating arrays by their names in a checkpoint, such as ``numpy()`` of a PyTorch ``state_dict``'s.
        config: its ``model_type`` and sizes.
        ignore, dtype, family: as in ``load``.

    Raises:
        ValueError, TypeError: as ``load``.

    Example:
        >>> config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "rms_norm_eps": 1e-6}
        >>> config |= dict.fromkeys(["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"], 4)
        >>> names = [name.format(0) for (name,) in jattn.interop.FAMILIES["llama"].layer.values()]
        >>> names += ["embed_tokens", "norm", "lm_head"]
        >>> tensors = {f"{name}.weight": np.ones(4) if "norm" in name else np.eye(4) for name in names}
        >>> model = jattn.interop.from_tensors(tensors, config)
        >>> model.logits(model(jnp.array([[2, 0, 1]]))).argmax(-1).tolist()  # this one repeats what it reads
        [[2, 0, 1]]
    """
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of prefixes of names, got the string {ignore!r}; use ({ignore!r},)")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype of the parameters must be floating, got {jnp.dtype(dtype)}")
    family = family_of(config) if family is None else family
    tensors = {
        name: x for name, x in tensors.items() if not BUFFERS.search(name) and not name.startswith(tuple(ignore))
    }
    names: dict[str, list[str]] = {}
    for name in tensors:
        prefix = next((prefix for prefix in family.prefixes if name.startswith(prefix)), "")
        names.setdefault(name.removeprefix(prefix), []).append(name)
    if twice := [" and ".join(stored) for stored in names.values() if len(stored) > 1]:
        raise ValueError(f"tensors that are the same parameter: {', '.join(twice)}; leave one out with ignore=")
    tensors = {name: tensors[stored[0]] for name, stored in names.items()}
    sizes = family.config(config)
    if sizes.num_layers > len(tensors):  # checked before that many layers are built
        raise ValueError(f"the config has {sizes.num_layers} layers, but there are only {len(tensors)} tensors")
    has = lambda module: any(f"{name}.weight" in tensors for name in family.modules.get(module, ()))
    sizes = dataclasses.replace(sizes, pooler=has("pooler"), head=has("head"))
    if config.get("tie_word_embeddings", sizes.tied):
        _check_tied(tensors, family)
    model = nnx.eval_shape(lambda: Transformer(sizes, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(model)
    flat = [(path, ".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(abstract)]
    placed = _place(tensors, family, sizes, {name: leaf.shape for _, name, leaf in flat})
    state = []
    for path, name, leaf in flat:
        parts = (jnp.asarray(x, dtype) for x in placed.pop(name))  # one at a time: a model may fill the memory
        state.append((path, leaf.replace(jnp.stack(list(parts)) if name.startswith("layers.") else next(parts))))
    return nnx.merge(graph, nnx.from_flat_state(state))


def _check_tied(tensors: Tensors, family: Family) -> None:
    """Raises ``ValueError`` if there is an output embedding and it is not the input's."""
    embeddings = {
        name: np.asarray(tensors[name])
        for module in ("token_embed", "head")
        for name in (f"{one}.weight" for one in family.modules.get(module, ()))
        if name in tensors
    }
    if len(embeddings) < 2:
        return
    (ours, embedding), (theirs, head) = embeddings.items()
    if not np.array_equal(embedding, head):
        raise ValueError(
            f"the config ties the embeddings (tie_word_embeddings), but {theirs} differs from {ours}; leave it out "
            f"with ignore=, or set tie_word_embeddings to false in the config"
        )


class Source(NamedTuple):
    """A tensor that has a place: its name in the checkpoint and in our model, and how it is stored."""

    name: str
    targets: list[str]
    layer: int | None
    transposed: bool  # [out,in]


def _place(tensors: Tensors, family: Family, config: Config, expected: Shapes) -> dict[str, list[Any]]:
    """The tensors under our names and in our shapes, a list over layers or of one.

    Raises ``ValueError`` with everything that does not fit.
    """
    placed: dict[str, list[Any]] = {
        name: [None] * (config.num_layers if name.startswith("layers.") else 1) for name in expected
    }
    used, misshapen, twice = set(), [], []
    for source in _sources(tensors, family, config, expected):
        used.add(source.name)
        x = np.asarray(tensors[source.name])
        flat = [_flat(target, expected[target]) for target in source.targets]
        shape = (*flat[0][:-1], sum(sizes[-1] for sizes in flat))
        shape = shape[::-1] if source.transposed else shape
        if x.shape == shape:
            x = x.T if source.transposed else x
            if family.norm_offset and source.targets[0].endswith(".scale"):
                x = np.asarray(x, np.float32) + np.float32(family.norm_offset)
            parts = [x] if len(flat) == 1 else family.fused(x, [one[-1] for one in flat], config.size_of_head)
        else:
            misshapen.append(f"{source.name} is {list(x.shape)}, expected {list(shape)}")
            parts = [None] * len(flat)
        if any(placed[target][source.layer or 0] is not None for target in source.targets):
            twice.append(source.name)
        for target, part in zip(source.targets, parts, strict=True):
            shape_of_one = expected[target] if source.layer is None else expected[target][1:]
            placed[target][source.layer or 0] = () if part is None else part.reshape(shape_of_one)
    problems = {
        "missing": [
            name.replace("layers.", f"layers.{i}.", 1)
            for name, parts in placed.items() for i, part in enumerate(parts) if part is None
        ],
        "left over": list(tensors.keys() - used),
        "of a parameter that another tensor is, too": twice,
        "of another shape": misshapen,
        "no floating-point numbers": [
            f"{name} is {tensors[name].dtype}"
            for name in used
            if not jnp.issubdtype(tensors[name].dtype, jnp.floating)
        ],
    }  # fmt: skip
    if any(problems.values()):
        lines = "".join(f"\n{problem}: {', '.join(sorted(names))}" for problem, names in problems.items() if names)
        raise ValueError(f"the checkpoint does not fit a {config.family} with the sizes in its config{lines}")
    return placed


def _modules(family: Family, config: Config) -> Iterator[tuple[str, int | None, tuple[str, ...]]]:
    """``(path in our model, layer, names in checkpoints)`` of all modules that a checkpoint may have."""
    for path, names in family.modules.items():
        yield path, None, names
    for i in range(config.num_layers):
        for path, names in family.layer.items():
            yield f"layers.{path}", i, tuple(name.format(i) for name in names)


def _sources(tensors: Tensors, family: Family, config: Config, expected: Shapes) -> Iterator[Source]:
    """Every tensor that has a place."""
    inputs_first = _inputs_first(tensors, family, config)
    tensorflow = {"weight": "gamma", "bias": "beta"}  # TensorFlow's names in a norm
    for path, layer, names in _modules(family, config):
        parts = FUSED.get(path.removeprefix("layers."))
        paths = [path] if parts is None else [f"layers.{one}" for one in parts]
        for part, leaves in (("weight", ("kernel", "embedding", "scale")), ("bias", ("bias",))):
            leaf = next((leaf for leaf in leaves if f"{paths[0]}.{leaf}" in expected), None)
            candidates = [f"{name}.{suffix}" for name in names for suffix in (part, tensorflow[part])]
            name = next((name for name in candidates if name in tensors), None)
            if name is not None and leaf is not None:
                transposed = leaf == "kernel" and (path in ("head", "pooler") or not inputs_first)
                yield Source(name, [f"{one}.{leaf}" for one in paths], layer, transposed)


def _flat(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of one layer's array, with heads and head dim joined, as in other frameworks."""
    shape = shape[1:] if path.startswith("layers.") else shape
    if re.search(r"attention\.(query|key|value)\.", path):
        return (*shape[:-2], shape[-2] * shape[-1])
    return (shape[0] * shape[1], shape[2]) if path.endswith("attention.out.kernel") else shape


def _inputs_first(tensors: Tensors, family: Family, config: Config) -> bool:
    """Whether weights are stored ``[in,out]``, judging by those that are not square; by the family if all are."""
    votes = 0
    for path, _, names in _modules(family, config):
        out_dim = (
            3 * config.model_dim if path.endswith("fused") else config.mlp_dim if path.endswith("mlp_in") else None
        )
        for name in names if out_dim not in (None, config.model_dim) else ():
            shape = tensors[f"{name}.weight"].shape if f"{name}.weight" in tensors else ()
            votes += (shape == (config.model_dim, out_dim)) - (shape == (out_dim, config.model_dim))
    return votes > 0 if votes else family.inputs_first
