#!/bin/sh
# One expects: flax's layer nnx.Einsum("btm,mnh->btnh", ...), the projection of a model's width to heads, begins as
#   nnx.LinearGeneral does, which computes the same: outputs as large as the inputs.
# What happens: the initializer counts every axis of the kernel but the last as input. With N heads the outputs' variance is
#   1/N, so scores of query and key are N times smaller: attention begins nearly uniform. The order "btm,nmh->btnh" is the
#   same, and so is linen's Einsum. The projection back, "btnh,nhm->btm", is right.
# Version: flax 0.12.12, jax 0.12.0.1; needs Python 3.12. Source: flax/nnx/nn/linear.py, Einsum.__init__, which knows the
#   equation and hands the kernel's shape alone to lecun_normal; LinearGeneral's makes it a matrix first.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q flax==0.12.12 jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import flax.linen as nn
import jax
from flax import nnx

WIDTH, HEADS, SIZE = 256, 8, 32
x = jax.random.normal(jax.random.key(0), (4, 64, WIDTH))
heads = jax.random.normal(jax.random.key(0), (4, 64, HEADS, SIZE))
rngs = nnx.Rngs(1)
outputs = {
    "nnx.LinearGeneral": nnx.LinearGeneral(WIDTH, (HEADS, SIZE), rngs=rngs)(x),
    "nnx.Einsum, btm,mnh->btnh": nnx.Einsum("btm,mnh->btnh", (WIDTH, HEADS, SIZE), rngs=rngs)(x),
    "nnx.Einsum, btm,nmh->btnh": nnx.Einsum("btm,nmh->btnh", (HEADS, WIDTH, SIZE), rngs=rngs)(x),
    "linen.Einsum, btm,mnh->btnh": nn.Einsum((WIDTH, HEADS, SIZE), "btm,mnh->btnh").init_with_output(rngs(), x)[0],
    "nnx.Einsum, btnh,nhm->btm": nnx.Einsum("btnh,nhm->btm", (HEADS, SIZE, WIDTH), rngs=rngs)(heads),
}
variance = {name: float(y.var()) for name, y in outputs.items()}
for name, value in variance.items():
    print(f"{name}: variance {value:.2f}")
expected = {name: 1 / HEADS if name.endswith("btnh") else 1.0 for name in outputs}
assert all(0.8 < variance[name] / expected[name] < 1.2 for name in outputs), "this has changed"
PY
