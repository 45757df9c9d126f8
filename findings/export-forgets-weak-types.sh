#!/bin/sh
# One expects: a function that jax.export wrote gives, read again, what it gave before it was written, dtypes of later sums
#   included.
# What happens: in the same process an exported function keeps JAX's weak types: a factor made of Python numbers does not widen
#   what it is multiplied with. In the bytes they are lost. After serialize and deserialize the factor is a strong float32, and
#   bfloat16 activations times it become float32, without a word: twice the memory, and other rounding.
# Version: jax 0.12.0.1 and flatbuffers 25.12.19 (jax 0.10.2 writes and reads the same way); needs Python 3.12. Source:
#   jax/_src/export/serialization.py, _serialize_aval, which writes shape, dtype and memory space.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 flatbuffers==25.12.19 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from jax import export


def scale(steps):
    return jnp.sqrt(0.5) * jnp.exp(-steps / 10.0)


exported = export.export(jax.jit(scale))(1.0)
read = export.deserialize(exported.serialize())
activations = jnp.ones(4, jnp.bfloat16)
seen = {}
for name, function in {"the function": scale, "exported": exported.call, "written and read": read.call}.items():
    product = activations * function(1.0)
    seen[name] = product.dtype.name
    print(f"bfloat16 activations times {name}: {product.dtype.name}")
assert seen == {"the function": "bfloat16", "exported": "bfloat16", "written and read": "float32"}, "this has changed"
PY
