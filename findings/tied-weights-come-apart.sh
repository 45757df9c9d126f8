#!/bin/sh
# One expects: an nnx.Module whose head is its embedding stays tied, or JAX's own transformations, which take a module as a
#   tree since flax 0.12, refuse it, as nnx.jit(graph=False) does ("Duplicate Param").
# What happens: to JAX it is a tree of two arrays. jax.grad gives each use its own gradient, and whatever comes out of jax.jit
#   or jax.tree.map has two embeddings: one training step later the weights are no longer tied, and nothing says so. nnx.grad
#   gives one gradient, the sum of both.
# Version: flax 0.12.12, jax 0.12.0.1; needs Python 3.12. Source: flax/nnx/pytreelib.py, where a
#   module is flattened attribute by attribute; flax's guide "Module & Pytree".
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q flax==0.12.12 jax==0.12.0.1 numpy==2.4.6
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
from flax import nnx


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(7, 4, rngs=rngs)
        self.head = self.embedding

    def __call__(self, tokens):
        return self.head.attend(self.embedding(tokens))


def loss(model):
    logits = model(jnp.array([1, 2, 3]))
    return -jax.nn.log_softmax(logits)[jnp.arange(3), jnp.array([2, 3, 4])].mean()


@jax.jit
def step(model):
    return jax.tree.map(lambda weight, change: weight - 0.1 * change, model, jax.grad(loss)(model))


model = Model(nnx.Rngs(0))
after = step(model)
of_nnx, of_jax = jax.tree.leaves(nnx.grad(loss)(model)), jax.tree.leaves(jax.grad(loss)(model))
print("gradients: nnx.grad", len(of_nnx), "jax.grad", len(of_jax))
summed = bool(jnp.allclose(of_nnx[0], sum(of_jax), atol=1e-6))
print("the one is the sum of the two:", summed)
apart = [float(jnp.abs(x.embedding.embedding[...] - x.head.embedding[...]).max()) for x in (model, after)]
print(f"embedding and head apart: {apart[0]} before the step, {apart[1]:.2g} after it")
try:
    nnx.jit(loss, graph=False)(model)
    refused = False
except ValueError as error:
    refused = "Duplicate" in str(error)
print("nnx.jit(graph=False) refuses the model:", refused)
assert (len(of_nnx), len(of_jax), summed, refused) == (1, 2, True, True), "this has changed"
assert model.head is model.embedding and after.head is not after.embedding, "this has changed"
assert apart[0] == 0.0 and apart[1] > 1e-3, "this has changed"
PY
