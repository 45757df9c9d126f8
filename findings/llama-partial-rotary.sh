#!/bin/sh
# One expects: partial_rotary_factor=0.5 in the config of a Llama rotates half of each head, or is refused. It is one of the
#   keys that rope_parameters may have, and the config keeps and saves it.
# What happens: with the default rope_type it is ignored: the logits are the same to the bit as without it. With any scaled
#   type, half as many frequencies are computed and the forward pass raises RuntimeError about tensor sizes.
# Version: transformers 5.24.0, torch 2.13.0. Source: models/llama/modeling_llama.py computes the default frequencies of whole
#   heads; modeling_rope_utils.py, which has the scaled ones, those of the fraction.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0 torch==2.13.0
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def logits(**rotary):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=4, rope_parameters={"rope_theta": 1e4, **rotary})
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        return model(torch.arange(20)[None]).logits


whole = logits(rope_type="default")
same = torch.equal(whole, logits(rope_type="default", partial_rotary_factor=0.5))
print("default type, with and without the factor: equal to the bit:", same)
try:
    logits(rope_type="linear", factor=2.0, partial_rotary_factor=0.5)
    raised = None
except RuntimeError as error:
    raised = str(error)
print("linear type, with the factor:", raised)
assert same and raised is not None, "this has changed"
PY
