#!/bin/sh
# One expects: add_weighted_adapter(["a", "b"], [0.5, 0.5], combination_type="linear") of peft gives the mean of what the two
#   LoRA adapters add to a weight; the mean of an adapter and itself is that adapter.
# What happens: the factors A and the factors B are added, each with the root of the weight, before they are multiplied. The
#   mean of an adapter with itself is twice that adapter, and that of two has products of the one's A with the other's B, as
#   large as the result. "cat" is right (of twice the rank); "svd" is the nearest of the same rank.
# Version: peft 0.21.2, torch 2.14.1. Source: tuners/lora/model.py, _generalized_task_arithmetic_weighted_adapter; the
#   project's issue 3004 is about its negative weights.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q peft==0.21.2 transformers==5.24.0 torch==2.14.1
"$folder/venv/bin/python" - 2>/dev/null <<'PY'
import torch
from peft import LoraConfig, get_peft_model

torch.manual_seed(0)
config = LoraConfig(r=2, lora_alpha=4, target_modules=["0"], init_lora_weights=False)
model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(16, 16)), config, adapter_name="a")
model.add_adapter("b", config)
layer = model.base_model.model[0]


def added(name):
    return layer.get_delta_weight(name).detach()


def merged(adapters, kind):
    model.add_weighted_adapter(adapters, [0.5, 0.5], "merged", combination_type=kind)
    result = added("merged")
    model.delete_adapter("merged")
    return result


mean, seen = (added("a") + added("b")) / 2, {}
for kind in ("linear", "svd", "cat"):
    itself = float((merged(["a", "a"], kind) * added("a")).sum() / (added("a") ** 2).sum())
    error = float((merged(["a", "b"], kind) - mean).norm() / mean.norm())
    seen[kind] = itself, error
    print(f"{kind}: a with itself is {itself:.2f} of a; a with b is off by {error:.2g} of the mean's norm")
assert abs(seen["linear"][0] - 2) < 1e-3 and seen["linear"][1] > 0.5, "this has changed"
assert abs(seen["svd"][0] - 1) < 1e-3 and seen["svd"][1] < seen["linear"][1], "this has changed"
assert abs(seen["cat"][0] - 1) < 1e-3 and seen["cat"][1] < 1e-5, "this has changed"
PY
