#!/bin/sh
# One expects: need_weights=True, the default of nn.MultiheadAttention, also returns the weights and leaves the output as it is.
# What happens: for a query that sees no key, as in a left-padded batch with a causal mask, the output is NaN if weights are
#   requested and the projection's bias if not. A loss over the real tokens alone then has a NaN gradient in every parameter
#   of the query, key and value projections if weights are requested, and a finite one if not.
# Version: torch 2.13.0. Source: torch/nn/functional.py, multi_head_attention_forward: baddbmm and softmax with weights,
#   scaled_dot_product_attention, which gives such a row 0, without.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PY'
import torch

torch.manual_seed(0)
layer = torch.nn.MultiheadAttention(32, 4, batch_first=True)
x = torch.randn(2, 6, 32)
padding = torch.tensor([[False] * 6, [True] * 2 + [False] * 4])  # the second sequence begins with two tokens of padding
later = torch.ones(6, 6, dtype=torch.bool).triu(1)


def run(need_weights):
    layer.zero_grad()
    out, _ = layer(x, x, x, key_padding_mask=padding, attn_mask=later, need_weights=need_weights)
    out[~padding].pow(2).mean().backward()
    return out.detach(), layer.in_proj_weight.grad.clone()


(with_weights, nan_gradient), (without, gradient) = run(True), run(False)
print("padded query, weights requested:", with_weights[1, 0, :3].tolist())
print("padded query, not requested:    ", without[1, 0, :3].tolist())
print("real queries, largest difference:", (with_weights - without)[~padding].abs().max().item())
print("gradient, weights requested, all NaN:", nan_gradient.isnan().all().item())
print("gradient, not requested, all finite: ", gradient.isfinite().all().item())
same = torch.allclose(with_weights[~padding], without[~padding], atol=1e-6)
assert same and with_weights[1, 0].isnan().all() and torch.equal(without[1, 0], layer.out_proj.bias), "this has changed"
assert nan_gradient.isnan().all() and gradient.isfinite().all(), "this has changed"
PY
