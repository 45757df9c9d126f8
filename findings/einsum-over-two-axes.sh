#!/bin/sh
# One expects: einsum("rtm,wtm->rw") takes as long as the product of the two arrays with t and m made one axis by reshape,
#   which moves nothing: it is the same contraction of the same memory.
# What happens: jitted on a CPU, it takes several times as long (8 to 11 times for 15 and 301 rows of 128 x 576 in float32).
#   Contracting two axes that lie side by side is not seen as one product.
# Version: jax 0.12.0.1; needs Python 3.12. Source: measured while summing gradients times changes of a whole model.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import time

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
g, c = (jnp.asarray(rng.normal(size=(rows, 128, 576)), jnp.float32) for rows in (15, 301))
ways = {
    "einsum over two axes": jax.jit(lambda g, c: jnp.einsum("rtm,wtm->rw", g, c)),
    "the two as one axis": jax.jit(lambda g, c: jnp.matmul(c.reshape(301, -1), g.reshape(15, -1).T).T),
}
results = {name: np.asarray(way(g, c)) for name, way in ways.items()}
np.testing.assert_allclose(*results.values(), atol=0.05)
best = dict.fromkeys(ways, float("inf"))
for _ in range(10):  # in turn
    for name, way in ways.items():
        start = time.perf_counter()
        way(g, c).block_until_ready()
        best[name] = min(best[name], time.perf_counter() - start)
for name, seconds in best.items():
    print(f"{name}: {1000 * seconds:.0f} ms")
ratio = best["einsum over two axes"] / best["the two as one axis"]
print(f"ratio: {ratio:.1f}")
assert ratio > 2, "this has changed"
PY
