"""Reads the folder of a published checkpoint: its ``config.json`` and the safetensors beside it.

Nothing in these files is executed. A damaged or malicious file raises an error that names it.
"""

import json
import re
from pathlib import Path
from typing import Any


def read_folder(folder: Path, exclude: re.Pattern[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors of all ``*.safetensors`` in ``folder`` by name, except those that match ``exclude``; and the config.

    Raises as ``load``.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as missing:
        raise ImportError("reading safetensors needs the package of that name: pip install 'jattn[hf]'") from missing
    files = sorted(folder.glob("*.safetensors"))
    for name, exists in (("config.json", (folder / "config.json").is_file()), ("*.safetensors", bool(files))):
        if not exists:
            raise FileNotFoundError(f"no {name} in {str(folder)!r}; expected the folder of a saved model")
    tensors: dict[str, Any] = {}
    sources: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="flax") as opened:  # NumPy's has no bfloat16
                loaded = {name: opened.get_tensor(name) for name in opened.keys() if not exclude.search(name)}
        except (SafetensorError, ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged or not a safetensors file: {error}") from error
        if duplicates := sorted(loaded.keys() & tensors.keys()):
            raise ValueError(f"{file} and {sources[duplicates[0]]} both hold {', '.join(duplicates)}; remove one")
        tensors |= loaded
        sources |= dict.fromkeys(loaded, file)
    return tensors, _read_json(folder / "config.json")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged or not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}")
    return config
