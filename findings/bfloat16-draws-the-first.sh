#!/bin/sh
# One expects: jax.random.categorical draws every index about as often as softmax of the logits says; logits in bfloat16 are a
#   little rounded, no more. A thousand equal logits give a uniform draw.
# What happens: the noise has the dtype of the logits, and in bfloat16 it has 128 values. Among equal logits many share the
#   largest, and of those the first wins: 400 draws of 50,000 equal tokens are all among the first 1,000, without a word. Its
#   neighbours have the same: jax.random.choice with such a p returned 128 of 1,000 equal ones, and bernoulli with a p of 0.001
#   is true 0.8 % of the time. mode="high" helps in part. In float32 all are right.
# Version: jax 0.12.0.1; needs Python 3.12. Source: jax/_src/random/core.py, categorical, which hands logits.dtype to gumbel;
#   its docstring says from where float32 is biased, and of other dtypes nothing.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

VOCABULARY, DRAWS, CHOICES = 50_000, 400, 1_000
seen = {}
for dtype in ("float32", "bfloat16"):
    key = jax.random.key(0)
    tokens = jax.random.categorical(key, jnp.zeros((DRAWS, VOCABULARY), dtype))
    chosen = jax.random.choice(key, CHOICES, (100_000,), p=jnp.full(CHOICES, 1 / CHOICES, dtype))
    true = jax.random.bernoulli(key, jnp.asarray(0.001, dtype), (1_000_000,))
    seen[dtype] = int(tokens.max()), len(np.unique(chosen)), float(true.astype(jnp.float32).mean())
    last, different, share = seen[dtype]
    print(f"{dtype}: {DRAWS} draws of {VOCABULARY:,} equal tokens: the last is {last:,};", end=" ")
    print(f"100,000 of {CHOICES:,} choices: {different} different; bernoulli of 0.001: {share:.4f}")
last, different, share = seen["float32"]
assert last > 0.97 * VOCABULARY and different == CHOICES and 0.0009 < share < 0.0011, "this has changed"
last, different, share = seen["bfloat16"]
assert last < 0.02 * VOCABULARY and different <= 128 and share > 0.007, "this has changed"
PY
