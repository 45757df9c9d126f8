"""Reads the folder of a published checkpoint: its ``config.json`` and safetensors.

Nothing in these files is executed. A damaged or malicious file raises an error that names it.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_INDEX = "model.safetensors.index.json"


def read_folder(folder: Path, exclude: re.Pattern[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of the model in ``folder``, keyed by name, except those matching ``exclude``; and the config.

    Each tensor is read when it is sliced.

    Tensors come from ``model.safetensors``, or else from the files named in an index, or else from all
    ``*.safetensors``. Raises the same errors as ``load``.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as missing:
        raise ImportError("reading safetensors needs the package safetensors: pip install 'jattn[hf]'") from missing
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"{str(folder)!r} holds an adapter (adapter_config.json), not a model: merge the adapter into its model"
        )
    files, where = _files(folder)
    for name, exists in (("config.json", (folder / "config.json").is_file()), ("*.safetensors", bool(files))):
        if not exists:
            raise FileNotFoundError(f"no {name} in {str(folder)!r}; expected the folder of a saved model")
    tensors: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    for file in files:
        try:
            opened = safe_open(file, framework="flax")  # NumPy has no bfloat16
            wanted = [name for name in opened.keys() if where.get(name, file.name) == file.name]
            loaded = {name: _StoredTensor(opened, name) for name in wanted if not exclude.search(name)}
        except (SafetensorError, ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
        if duplicates := sorted(loaded.keys() & tensors.keys()):
            raise ValueError(f"{file} and {sources[duplicates[0]]} both hold {', '.join(duplicates)}; remove one")
        tensors |= loaded
        sources |= dict.fromkeys(loaded, file)
    if absent := sorted(name for name in where.keys() - tensors.keys() if not exclude.search(name)):
        raise ValueError(f"{folder / _INDEX} names tensors that are not in the files it says: {', '.join(absent)}")
    return tensors, _read_json(folder / "config.json")


_DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16, "I64": np.int64, "I32": np.int32,
    "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


class _StoredTensor:
    """A tensor in an open file."""

    def __init__(self, opened: Any, name: str):
        self.stored = opened.get_slice(name)
        self.shape = tuple(self.stored.get_shape())
        self.stored_as = self.stored.get_dtype()
        self.dtype = np.dtype(_DTYPES.get(self.stored_as, object))  # object: an unsupported format

    def __getitem__(self, rows: slice) -> np.ndarray:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):  # not through an accelerator
            return np.asarray(self.stored[rows])


def _files(folder: Path) -> tuple[list[Path], Mapping[str, str]]:
    """The files to read, and the file of each tensor if an index is used."""
    whole, index = folder / "model.safetensors", folder / _INDEX
    if whole.is_file():
        return [whole], {}
    if not index.is_file():
        return sorted(folder.glob("*.safetensors")), {}
    where = _read_json(index).get("weight_map")
    if not isinstance(where, dict) or not where or not all(_is_name(name) for name in where.values()):
        raise ValueError(f"{index} must have a weight_map from tensors to names of files in the same folder")
    names = sorted(set(where.values()))
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise FileNotFoundError(f"{index} names files that do not exist: {', '.join(absent)}")
    return [folder / name for name in names], where


def _is_name(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged or not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config
