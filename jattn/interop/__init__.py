"""Loads published models into jattn's modules, with Hugging Face's names.

The families are BERT, GPT-2, GPT-NeoX, Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text), Phi-3 and OLMo 2.

``load(source)`` reads a folder (``config.json`` and safetensors) or a GGUF file. Projections may be separate or fused,
and weights stored ``[out,in]`` (PyTorch's Linear) or ``[in,out]`` (GPT-2's Conv1D). Every tensor must match a
parameter; otherwise the error lists the tensors that are missing, unused or of the wrong shape. ``generate`` continues
prompts with a causal model; ``look`` returns every head's queries, keys and values; ``logit_parts`` attributes a logit
to heads.

Each family has its own file and is listed in ``_families``; ``family`` defines what a family is. ``_transformer`` is
the model for all families, with the options in ``_config``. ``_safetensors`` and ``_gguf`` read files, and
``_checkpoint`` places tensors in the model.
"""

from jattn.interop._checkpoint import from_tensors, load
from jattn.interop._config import Config
from jattn.interop._families import FAMILIES, read_config
from jattn.interop._generate import generate, stream
from jattn.interop._logit_parts import logit_parts
from jattn.interop._look import look
from jattn.interop._tokenizer import chatml, tokenizer
from jattn.interop._transformer import Transformer
from jattn.interop._transformer_block import Block
from jattn.interop.family import Family

__all__ = [
    "FAMILIES",
    "Block",
    "Config",
    "Family",
    "Transformer",
    "chatml",
    "from_tensors",
    "generate",
    "load",
    "logit_parts",
    "look",
    "read_config",
    "stream",
    "tokenizer",
]
