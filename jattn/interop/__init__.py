"""Checkpoints of other frameworks in jattn's modules: the BERT and GPT-2 families, by Hugging Face's names.

``load(folder)`` reads ``config.json`` and the safetensors beside it. Projections may be separate or fused, and weights
stored ``[out,in]`` (PyTorch's Linear) or ``[in,out]`` (GPT-2's Conv1D). Every tensor must find its place; otherwise the
error lists what is missing, left over or of another shape.

One file per family (``bert``, ``gpt2``); ``transformer`` is the model of both, ``files`` reads folders, and
``checkpoint`` places tensors in the model.
"""

from jattn.interop.checkpoint import from_tensors, load, read_config
from jattn.interop.transformer import Block, Config, Transformer

__all__ = ["Block", "Config", "Transformer", "from_tensors", "load", "read_config"]
