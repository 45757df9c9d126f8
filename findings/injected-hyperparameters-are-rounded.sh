#!/bin/sh
# One expects: optax.inject_hyperparams(optax.adamw)(learning_rate=...) is optax.adamw, with its hyperparameters in the state
#   to be read and set.
# What happens: the hyperparameters get the dtype of the parameters. For parameters in bfloat16, b2=0.999 becomes 1.0: the
#   second moment stays zero, its correction divides by zero, and the first update is NaN. Other numbers are rounded without
#   a word (b1=0.9 to 0.8984). hyperparam_dtype=jnp.float32 mends it; optax.adamw itself is right.
# Version: optax 0.2.8, jax 0.12.0.1; needs Python 3.12. Source: optax/schedules/_inject.py, _convert_floats.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q optax==0.2.8 jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax.numpy as jnp
import optax

ways = {
    "adamw": optax.adamw(0.01),
    "injected": optax.inject_hyperparams(optax.adamw)(learning_rate=0.01),
    "injected, float32": optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(learning_rate=0.01),
}
seen = {}
for dtype in ("float32", "bfloat16"):
    parameters, gradients = jnp.ones(3, dtype), jnp.full(3, 0.1, dtype)
    for name, optimizer in ways.items():
        update, state = optimizer.update(gradients, optimizer.init(parameters), parameters)
        b2 = float(state.hyperparams["b2"]) if name != "adamw" else None
        seen[dtype, name] = float(update[0])
        print(f"{dtype}, {name}: b2 {b2}, first update {seen[dtype, name]:.4f}")
for (dtype, name), update in seen.items():
    if (dtype, name) == ("bfloat16", "injected"):
        assert update != update, "this has changed"
    else:
        assert -0.011 < update < -0.009, "this has changed"
PY
