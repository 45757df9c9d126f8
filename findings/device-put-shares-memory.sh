#!/bin/sh
# One expects: a JAX array does not change; what is put on a device is a copy of the NumPy array, as jax.numpy.array's is.
# What happens: on a CPU, jax.device_put of a NumPy array whose memory begins at a multiple of 64 bytes is that memory. Who
#   fills a buffer again, such as a data loader, changes the JAX arrays made of it before. NumPy's own arrays begin there or
#   not by chance, so the same program is right at one size and wrong at another. jax.numpy.asarray copies, also with
#   copy=False.
# Version: jax 0.12.0.1 (0.10.2 does the same); needs Python 3.12. Source: found while loading weights without a copy;
#   device_put's docstring names may_alias and no default.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

room = np.zeros(4096 + 64, np.uint8)
start = -room.ctypes.data % 64
buffer = room[start : start + 4096].view(np.float32)  # begins at a multiple of 64 bytes
ways = {
    "jax.device_put": jax.device_put,
    "jax.numpy.array": jnp.array,
    "jax.numpy.asarray": jnp.asarray,
    "jax.numpy.asarray, copy=False": lambda x: jnp.asarray(x, copy=False),
}
buffer[:] = 1
arrays = {name: jax.block_until_ready(way(buffer)) for name, way in ways.items()}
buffer[:] = 2  # the next batch
seen = {name: float(x[0]) for name, x in arrays.items()}
for name, value in seen.items():
    print(f"{name}: made of 1.0, now {value}")
assert seen == {name: 2.0 if name == "jax.device_put" else 1.0 for name in ways}, "this has changed"
PY
