#!/bin/sh
# One expects: jax.nn.dot_product_attention(return_residual=True) gives the output and the log-sum-exp of the scores, both
#   functions of query and key. So attention over the keys in two parts, joined by the log-sum-exps, has the gradients of
#   attention over all; and a penalty on the log-sum-exp (a z-loss) has one.
# What happens: the log-sum-exp passes through stop_gradient. The joined outputs agree, the gradients do not: those of query
#   and key are wrong without a word, that of value is right, and a z-loss's is zero.
# Version: jax 0.12.0.1; needs Python 3.12. Source: jax/_src/nn/functions.py, the last line of the XLA implementation; the
#   docstring calls the log-sum-exp a residual and says nothing of gradients.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp

query, key, value, weights = jax.random.normal(jax.random.key(0), (4, 2, 16, 2, 8))
attention = jax.nn.dot_product_attention


def whole(query, key, value):
    return attention(query, key, value)


def in_parts(query, key, value):
    halves = [attention(query, key[:, at], value[:, at], return_residual=True) for at in (slice(8), slice(8, 16))]
    outputs, lse = (jnp.stack(x) for x in zip(*halves, strict=True))
    return (jax.nn.softmax(lse, axis=0)[..., None] * outputs).sum(0)


def largest(x):
    return float(jnp.abs(x).max())


apart = largest(whole(query, key, value) - in_parts(query, key, value))
print(f"outputs: {apart:.1g} apart")
one, other = (jax.grad(lambda *x, f=f: (f(*x) * weights).sum(), (0, 1, 2))(query, key, value) for f in (whole, in_parts))
wrong = {name: largest(a - b) / largest(a) for name, a, b in zip(("query", "key", "value"), one, other, strict=True)}
for name, relative in wrong.items():
    print(f"gradient of {name}: {relative:.1g} apart, of its largest")
penalty = largest(jax.grad(lambda x: (attention(x, key, value, return_residual=True)[1] ** 2).sum())(query))
print("gradient of a z-loss:", penalty)
assert apart < 1e-5 and wrong["value"] < 1e-5 and penalty == 0.0, "this has changed"
assert wrong["query"] > 0.05 and wrong["key"] > 0.05, "this has changed"
PY
