#!/bin/sh
# One expects: transformers keeps sequences that are packed into one row apart when position_ids begin again at 0, since its
#   masks look for that; use_cache says whether a cache is returned, and changes no logits.
# What happens: the masks look for it only where there is no cache. use_cache is true by default, in training too, so by
#   default the second sequence attends to the first; with use_cache=False it does not. An attention_mask of ones, which a
#   tokenizer returns, turns it off as well. There is no warning.
# Version: transformers 5.24.0, torch 2.14.1. Source: masking_utils.py, _preprocess_mask_arguments; the model makes the cache
#   before the mask.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.14.1
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, initializer_range=0.3)).eval()
first, second = torch.arange(8)[None], torch.arange(8, 20)[None]
packed = {
    "input_ids": torch.cat([first, second], 1),
    "position_ids": torch.cat([torch.arange(8), torch.arange(12)])[None],
}
ones = torch.ones_like(packed["input_ids"])
ways = {
    "as it is": {},
    "use_cache=False": {"use_cache": False},
    "use_cache=False and a mask of ones": {"use_cache": False, "attention_mask": ones},
}
with torch.no_grad():
    alone = model(second).logits
    apart = {name: float((model(**packed, **way).logits[:, 8:] - alone).abs().max()) for name, way in ways.items()}
for name, difference in apart.items():
    print(f"{name}: logits of the second sequence, packed and alone: {difference:.1g} apart")
assert {name: difference < 1e-3 for name, difference in apart.items()} == {
    "as it is": False,
    "use_cache=False": True,
    "use_cache=False and a mask of ones": False,
}, "this has changed"
PY
