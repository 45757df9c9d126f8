"""Published models on jattn's modules, by Hugging Face's names.

The families are BERT, GPT-2, GPT-NeoX, Llama, Mistral, Qwen2, Qwen3, Gemma 2, Gemma 3 (text), Phi-3 and OLMo 2.

``load(source)`` reads a folder (``config.json`` and the safetensors beside it) or a GGUF file. Projections may be
separate or fused, and weights stored ``[out,in]`` (PyTorch's Linear) or ``[in,out]`` (GPT-2's Conv1D). Every tensor
must find its place; otherwise the error lists what is missing, left over or of another shape. ``generate`` writes with
a causal model; ``look`` gives every head's queries, keys and values; ``logit_parts`` says which head wrote a logit.

One file per family; ``family`` says what a family is, ``transformer`` is the model of all, ``_safetensors`` and
``_gguf`` read, ``_checkpoint`` places tensors in the model.
"""

from jattn.interop._attribution import logit_parts
from jattn.interop._block import Block, Config
from jattn.interop._checkpoint import FAMILIES, from_tensors, load, read_config
from jattn.interop._generate import generate, stream
from jattn.interop._look import look
from jattn.interop._tokenizer import chatml, tokenizer
from jattn.interop.family import Family
from jattn.interop.transformer import Transformer

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
