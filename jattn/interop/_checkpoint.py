"""Places a checkpoint's tensors in a ``Transformer``."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jattn.interop._config import Config
from jattn.interop._families import family_of
from jattn.interop._gguf import read_gguf
from jattn.interop._progress import track
from jattn.interop._safetensors import read_folder
from jattn.interop._transformer import Transformer
from jattn.interop.family import Family

Tensors = Mapping[str, Any]  # of arrays, or of objects with a shape and a dtype that become arrays when sliced
Shapes = Mapping[str, tuple[int, ...]]

# Modules that a checkpoint may fuse into one, by the end of the path in ``Family.layer``.
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
    source: str | Path,
    *,
    config: Mapping[str, Any] | None = None,
    ignore: Sequence[str] = (),
    dtype: Any = jnp.float32,
    family: Family | None = None,
    progress: bool = True,
) -> Transformer:
    """Loads a model from a folder (``config.json`` and safetensors) or a GGUF file.

    Tensors are read one at a time and kept in ``dtype`` only.

    GGUF files lack some options. Unless set in ``config``, these options are as in most published models of the family:
    Mistral and Qwen have no window; Gemma is causal, with the query scale of its size; GPT-2 has ``"gelu_new"``;
    rotary positions are not scaled dynamically, and YaRN has neither ``mscale`` nor ``truncate``.

    Args:
        source: a folder as saved by Hugging Face's ``save_pretrained``: ``model.safetensors``, or else the files named
            in ``model.safetensors.index.json``, or else all ``*.safetensors``; or a ``*.gguf`` file, which is
            dequantised. The folder of an installed package is
            ``Path(importlib.util.find_spec(package).origin).parent``.
        config: keys that override those of ``config.json``, such as ``{"model_type": "mistral", "sliding_window":
            4096}`` for a GGUF file of the first Mistral.
        ignore: name prefixes of tensors to leave out, such as ``"cls."`` for BERT's training heads; names as in the
            file or an error message.
        dtype: the dtype of the parameters.
        family: the ``Family`` that defines how to read the model; by default the entry of ``FAMILIES`` for the config's
            ``model_type``.
        progress: show the number of tensors read on a terminal's stderr.

    Returns:
        A ``Transformer``.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the family is unknown; the config has an unknown key that may change what the model computes; the
            folder holds an adapter; an output embedding differs from the input embedding to which the config ties it; a
            file is damaged; tensors are missing, unused, of the wrong shape, not floating-point, or in two files. The
            message names all of them.
        TypeError: ``ignore`` is a single string, or ``dtype`` is not floating.
        ImportError: safetensors, or gguf for a GGUF file, is not installed.

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
        >>> model.logits(model(jnp.array([[2, 0, 1]]))).argmax(-1).tolist()  # this model repeats its input
        [[2, 0, 1]]
    """
    source = Path(source)
    is_gguf = source.suffix.lower() == ".gguf"
    tensors, options = read_gguf(source) if is_gguf else read_folder(source, exclude=BUFFERS)
    options = _in_place(options, {} if config is None else config)
    family = family_of(options) if family is None else family
    if is_gguf:  # its norms are stored as the factors they multiply by
        family = dataclasses.replace(family, norm_offset=0.0)
    return _model(tensors, options, ignore, dtype, family, progress)


def _in_place(options: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The ``options`` of a file, with identical and synonymous keys replaced by those of ``config``."""
    merged, entry = {**options, **config}, options.get("rope_parameters")
    if "layer_types" in config:
        merged = {key: x for key, x in merged.items() if key != "sliding_window_pattern" or key in config}
    if "rope_parameters" in config or not entry or not config.keys() & {"rope_scaling", "rope_theta"}:
        return merged
    if not isinstance(entry, Mapping) or any(isinstance(one, Mapping) for one in entry.values()):
        raise ValueError(f"config: this model's positions are in rope_parameters; pass rope_parameters, not {entry}")
    if "rope_scaling" not in config:
        return merged | {"rope_parameters": {**entry, "rope_theta": config["rope_theta"]}}
    base = config.get("rope_theta", entry.get("rope_theta"))
    return merged | {"rope_parameters": None} | ({} if base is None else {"rope_theta": base})


def from_tensors(
    tensors: Tensors,
    config: Mapping[str, Any],
    *,
    ignore: Sequence[str] = (),
    dtype: Any = jnp.float32,
    family: Family | None = None,
) -> Transformer:
    """Loads a model from memory, as :func:`~jattn.interop.load` does from files.

    Args:
        tensors: floating arrays keyed by their names in a checkpoint, such as the ``numpy()`` arrays of a PyTorch
            ``state_dict``.
        config: the contents of ``config.json`` as a dict, with ``model_type`` and sizes.
        ignore: name prefixes of tensors to leave out.
        dtype: the dtype of the parameters.
        family: the ``Family`` that defines how to read the model; by default the entry of ``FAMILIES`` for
            ``model_type``.

    Returns:
        A ``Transformer``.

    Raises:
        ValueError: the family or a key of the config is unknown; tensors are missing, unused, of the wrong shape or not
            floating-point. The message names all of them.
        TypeError: ``ignore`` is a single string, or ``dtype`` is not floating.

    Example:
        >>> config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "rms_norm_eps": 1e-6}
        >>> config |= dict.fromkeys(["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"], 4)
        >>> names = [name.format(0) for (name,) in jattn.interop.FAMILIES["llama"].layer.values()]
        >>> names += ["embed_tokens", "norm", "lm_head"]
        >>> tensors = {f"{name}.weight": np.ones(4) if "norm" in name else np.eye(4) for name in names}
        >>> model = jattn.interop.from_tensors(tensors, config)
        >>> model.logits(model(jnp.array([[2, 0, 1]]))).argmax(-1).tolist()  # this model repeats its input
        [[2, 0, 1]]
    """
    return _model(tensors, config, ignore, dtype, family_of(config) if family is None else family, progress=False)


def _model(
    tensors: Tensors, config: Mapping[str, Any], ignore: Sequence[str], dtype: Any, family: Family, progress: bool
) -> Transformer:
    """The model of ``from_tensors``, with every tensor read once."""
    if isinstance(ignore, str):
        raise TypeError(f"ignore must be a sequence of prefixes of names, got the string {ignore!r}; use ({ignore!r},)")
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype of the parameters must be floating, got {jnp.dtype(dtype)}")
    names: dict[str, list[str]] = {}
    for name in tensors:
        prefix = next((prefix for prefix in family.prefixes if name.startswith(prefix)), "")
        ours = name.removeprefix(prefix)  # its name in messages
        if not BUFFERS.search(name) and not any(one.startswith((*ignore, *family.skipped)) for one in (name, ours)):
            names.setdefault(ours, []).append(name)
    if twice := [" and ".join(stored) for stored in names.values() if len(stored) > 1]:
        raise ValueError(f"tensors that are the same parameter: {', '.join(twice)}; leave one out with ignore=")
    tensors = {name: tensors[stored[0]] for name, stored in names.items()}
    tensors = {name: x if hasattr(x, "__getitem__") else np.asarray(x) for name, x in tensors.items()}
    sizes = family.config(config)
    if sizes.num_layers > len(tensors):  # checked before that many layers are built
        raise ValueError(f"the config has {sizes.num_layers} layers, but there are only {len(tensors)} tensors")
    has = lambda module: any(f"{name}.weight" in tensors for name in family.modules.get(module, ()))
    sizes = dataclasses.replace(sizes, pooler=has("pooler"), head=has("head"))
    model = nnx.eval_shape(lambda: Transformer(sizes, rngs=nnx.Rngs(0)))
    graph, abstract = nnx.split(model)
    flat = [(path, ".".join(map(str, path)), leaf) for path, leaf in nnx.to_flat_state(abstract)]
    shapes = {name: leaf.shape for _, name, leaf in flat}
    sources = _fitting(tensors, family, sizes, shapes)
    if sizes.tied:
        _check_tied(tensors, family)
    # Unwritten memory is not allocated: usage grows by one tensor at a time.
    arrays = {name: _aligned(shape, jax.dtypes.canonicalize_dtype(dtype)) for name, shape in shapes.items()}
    for source in track(sources, "reading tensors", progress):
        _read_into(arrays, tensors[source.name], source, family, sizes)
    state = [(path, leaf.replace(jax.device_put(arrays.pop(name)))) for path, name, leaf in flat]
    return nnx.merge(graph, nnx.from_flat_state(state))


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array that ``device_put`` reuses on the CPU, because it begins at a multiple of 64 bytes."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + 64, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size].view(dtype).reshape(shape)


_ROWS = 1 << 22  # numbers read at once


def _chunks(x: Any) -> Iterator[slice]:
    step = max(_ROWS // max(math.prod(x.shape[1:]), 1), 1)
    return (slice(at, min(at + step, x.shape[0])) for at in range(0, x.shape[0], step))


def _read_into(arrays: dict[str, np.ndarray], x: Any, source: "Source", family: Family, config: Config) -> None:
    """Reads a tensor into the arrays of the parameters that it holds."""
    targets = [arrays[name] if source.layer is None else arrays[name][source.layer] for name in source.targets]
    if len(targets) > 1:
        whole = np.asarray(x[:])
        whole = whole.T if source.transposed else whole
        widths = [_flat(name, arrays[name].shape)[-1] for name in source.targets]
        for target, part in zip(targets, family.fused(whole, widths, config.size_of_head), strict=True):
            target[...] = part.reshape(target.shape)
        return
    rows = targets[0].reshape(_flat(source.targets[0], arrays[source.targets[0]].shape))
    rows = rows.T if source.transposed else rows
    offset = family.norm_offset if source.targets[0].endswith(".scale") else 0.0
    wide = np.float64 if rows.dtype == np.float64 else np.float32
    with np.errstate(over="ignore"):  # float16 overflows to infinity, as in jax.numpy
        for chunk in _chunks(x):
            part = np.asarray(x[chunk])
            rows[chunk] = part.astype(wide) + wide(offset) if offset else part


def _check_tied(tensors: Tensors, family: Family) -> None:
    """Raises ``ValueError`` if an output embedding differs from the input embedding."""
    embeddings = {
        name: tensors[name]
        for module in ("token_embed", "head")
        for name in (f"{one}.weight" for one in family.modules.get(module, ()))
        if name in tensors
    }
    if len(embeddings) < 2:
        return
    (ours, embedding), (theirs, head) = embeddings.items()
    same = lambda rows: np.array_equal(np.asarray(embedding[rows]), np.asarray(head[rows]))
    if embedding.shape != head.shape or not all(same(rows) for rows in _chunks(head)):
        raise ValueError(
            f"the config ties the embeddings (tie_word_embeddings), but {theirs} differs from {ours}; leave it out "
            f"with ignore=, or set tie_word_embeddings to false in the config"
        )


class Source(NamedTuple):
    """A tensor with a place in the model: its names in the checkpoint and in our model, and how it is stored."""

    name: str
    targets: list[str]
    layer: int | None
    transposed: bool  # [out,in]


def _fitting(tensors: Tensors, family: Family, config: Config, expected: Shapes) -> list[Source]:
    """Where each tensor goes. Raises ``ValueError`` listing everything that does not fit."""
    placed = {name: [False] * (config.num_layers if name.startswith("layers.") else 1) for name in expected}
    sources, misshapen, twice = list(_sources(tensors, family, config, expected)), [], []
    for source in sources:
        stored = tuple(tensors[source.name].shape)
        flat = [_flat(target, expected[target]) for target in source.targets]
        shape = (*flat[0][:-1], sum(sizes[-1] for sizes in flat))
        shape = shape[::-1] if source.transposed else shape
        if stored != shape:
            misshapen.append(f"{source.name} is {list(stored)}, expected {list(shape)}")
        if any(placed[target][source.layer or 0] for target in source.targets):
            twice.append(source.name)
        for target in source.targets:
            placed[target][source.layer or 0] = True
    problems = {
        "missing": [
            name.replace("layers.", f"layers.{i}.", 1)
            for name, layers in placed.items() for i, there in enumerate(layers) if not there
        ],
        "left over": list(tensors.keys() - {source.name for source in sources}),
        "of a parameter that another tensor also holds": twice,
        "of another shape": misshapen,
        "not floating-point numbers of 16 to 64 bits": [
            f"{source.name} is {getattr(tensors[source.name], 'stored_as', tensors[source.name].dtype)}"
            for source in sources
            if not jnp.issubdtype(tensors[source.name].dtype, jnp.floating)
        ],
    }  # fmt: skip
    if any(problems.values()):
        lines = "".join(f"\n{problem}: {', '.join(sorted(names))}" for problem, names in problems.items() if names)
        raise ValueError(f"the checkpoint does not fit a {config.family} with the sizes in its config{lines}")
    return sources


def _modules(family: Family, config: Config) -> Iterator[tuple[str, int | None, tuple[str, ...]]]:
    """``(path in our model, layer, names in checkpoints)`` of all modules that a checkpoint may have."""
    for path, names in family.modules.items():
        yield path, None, names
    for i in range(config.num_layers):
        for path, names in family.layer.items():
            yield f"layers.{path}", i, tuple(name.format(i) for name in names)


def _sources(tensors: Tensors, family: Family, config: Config, expected: Shapes) -> Iterator[Source]:
    """Every tensor that has a place in the model."""
    inputs_first = _inputs_first(tensors, family, config)
    tensorflow = {"weight": "gamma", "bias": "beta"}  # TensorFlow's names for a norm's parameters
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
    """Whether weights are stored ``[in,out]``, judged by the non-square ones, or by the family if all are square."""
    votes = 0
    for path, _, names in _modules(family, config):
        out_dim = (
            3 * config.model_dim if path.endswith("fused") else config.mlp_dim if path.endswith("mlp_in") else None
        )
        for name in names if out_dim not in (None, config.model_dim) else ():
            shape = tensors[f"{name}.weight"].shape if f"{name}.weight" in tensors else ()
            votes += (shape == (config.model_dim, out_dim)) - (shape == (out_dim, config.model_dim))
    return votes > 0 if votes else family.inputs_first
