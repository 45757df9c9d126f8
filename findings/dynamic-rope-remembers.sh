#!/bin/sh
# One expects: with rope_type "dynamic" in transformers, a model in evaluation gives the same logits for the same tokens, and
#   with a cache those that it gives without.
# What happens: the module keeps the frequencies of the longest input so far, until one shorter than the trained length comes.
#   So the logits of 20 tokens change after a call with 40, stay changed, and are as before after a call with 8. Prompts of
#   one batch change one another. Keys in the cache keep older frequencies: generating token by token ends elsewhere.
# Version: transformers 5.24.0, torch 2.14.1. Source: modeling_rope_utils.py, dynamic_frequency_update.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.14.1
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}
torch.manual_seed(0)
config = LlamaConfig(**sizes, max_position_embeddings=16, rope_parameters=rope, initializer_range=0.3)
model = LlamaForCausalLM(config).eval()
tokens = torch.arange(40)[None]


def logits(length, **options):
    return model(tokens[:, :length], **options).logits


def apart(one, other):
    return float((one - other).abs().max())


with torch.no_grad():
    before = logits(20)
    again = logits(20)
    whole = logits(40)
    after_long = logits(20)
    logits(8)
    after_short = logits(20)

    padded, mask = torch.cat([tokens, tokens]), torch.ones(2, 40, dtype=torch.long)
    mask[0, 12:] = 0
    logits(8)
    alone = logits(12)
    in_batch = model(padded, attention_mask=mask).logits[:1, :12]

    logits(8)
    cache = model(tokens[:, :20], use_cache=True).past_key_values
    for at in range(20, 40):
        last = model(tokens[:, at : at + 1], past_key_values=cache).logits
seen = {
    "20 tokens, again": apart(before, again),
    "20 tokens, after 40": apart(before, after_long),
    "20 tokens, after 8": apart(before, after_short),
    "12 tokens, alone and beside 40": apart(alone, in_batch),
    "the 40th, with a cache and without": apart(last[:, 0], whole[:, -1]),
}
for name, difference in seen.items():
    print(f"{name}: {difference:.1g} apart")
changed = [difference > 1e-2 for difference in seen.values()]
assert changed == [False, True, False, True, True], "this has changed"
PY
