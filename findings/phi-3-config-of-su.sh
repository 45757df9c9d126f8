#!/bin/sh
# One expects: the config.json that came with the first Phi-3 of 128k tokens opens in transformers, as the class says that it
#   takes the older name "su" of LongRoPE; and a length that rope_parameters names is the one that is used.
# What happens: with type "su" the constructor raises KeyError for original_max_position_embeddings, which the config has
#   beside the entry, where these files have it. Named longrope, the entry's own length is replaced, without a word, by the
#   class's default of 4096.
# Version: transformers 5.24.0. Source: models/phi3/configuration_phi3.py (the entry is completed before "su" is renamed).
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q transformers==5.24.0
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
from transformers import Phi3Config

sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 64}
factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
try:
    Phi3Config(**sizes, original_max_position_embeddings=16, rope_theta=1e4, rope_scaling={"type": "su"} | factors)
    raised = None
except KeyError as error:
    raised = str(error)
print("su, as published:", raised)
entry = {"rope_type": "longrope", "original_max_position_embeddings": 16, "rope_theta": 1e4} | factors
config = Phi3Config(**sizes, rope_parameters=entry)
length = config.rope_parameters["original_max_position_embeddings"]
print("longrope, with 16 in the entry:", length)
assert raised is not None and "original_max_position_embeddings" in raised and length == 4096, "this has changed"
PY
