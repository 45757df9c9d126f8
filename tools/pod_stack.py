"""A stack of layers with the sizes of a 7-billion-parameter model, trained on one long batch by all chips of a pod.

The mesh has three axes: sequences over ``data``, heads and features over ``heads``, tokens over ``sequence``, in a
ring. Parameters are divided over all three (https://arxiv.org/abs/2304.11277) and gathered layer by layer; nothing
gathers a sequence. The backward pass recomputes each layer except the results of attention, which are kept by name.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jattn._core.attention import NAMES
from jattn.multi_head import attend_heads
from jattn.positions import Rotary
from jattn.sharding import Ring
from tools.chip_compiler import devices

LAYERS, MODEL, HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 4096, 32, 8, 128, 11008
AXES = ("data", "heads", "sequence")


@dataclasses.dataclass(frozen=True)
class Stack:
    """A training step of ``LAYERS`` layers: ``sequences`` of ``length`` tokens on ``mesh``, chips along each axis.

    ``kept``: the parts of a layer that the backward pass keeps, "attention" or "nothing".
    """

    topology: str
    mesh: tuple[int, int, int]
    sequences: int
    length: int
    kept: str = "attention"

    @property
    def tokens(self) -> int:
        """Tokens of a sequence on each chip."""
        return self.length // self.mesh[2]


def problem(stack: Stack) -> tuple[Callable[..., Any], list[Any]]:
    """The loss with its gradient by the parameters, and the types of the parameters and the activations."""
    chips = devices(stack.topology)
    # A mesh axis may be a part of a topology axis, which jax.make_mesh does not try.
    mesh = Mesh(create_device_mesh(stack.mesh, chips, allow_split_physical_axes=True), AXES)
    ring = Ring(mesh, "sequence", batch_axis="data", head_axis="heads", layout="zigzag")

    def lies(*axes: Any) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    def typed(shape: tuple[int, ...], *axes: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=lies(*axes))

    rest = ("data", "sequence")  # the axes that divide parameters in addition to the heads
    parameters = {
        "query": typed((LAYERS, MODEL, HEADS, HEAD_DIM), None, rest, "heads"),
        "key": typed((LAYERS, MODEL, KV_HEADS, HEAD_DIM), None, rest, "heads"),
        "value": typed((LAYERS, MODEL, KV_HEADS, HEAD_DIM), None, rest, "heads"),
        "out": typed((LAYERS, HEADS, HEAD_DIM, MODEL), None, "heads", None, rest),
        "gate": typed((LAYERS, MODEL, HIDDEN), None, rest, "heads"),
        "up": typed((LAYERS, MODEL, HIDDEN), None, rest, "heads"),
        "down": typed((LAYERS, HIDDEN, MODEL), None, "heads", rest),
    }

    def put(x: jax.Array, *axes: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, lies(*axes))

    def layer(x: jax.Array, of_layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        y = _normalize(x)
        heads = (jnp.einsum("btm,mnh->btnh", y, of_layer[name]) for name in ("query", "key", "value"))
        heads = (put(one, "data", "sequence", "heads") for one in heads)
        z = attend_heads(*heads, position=Rotary(), is_causal=True, implementation=ring)
        x = x + put(jnp.einsum("btnh,nhm->btm", z, of_layer["out"]), "data", "sequence")
        y = _normalize(x)
        gate, up = (put(y @ of_layer[name], "data", "sequence", "heads") for name in ("gate", "up"))
        return x + put((jax.nn.silu(gate) * up) @ of_layer["down"], "data", "sequence"), None

    policies = jax.checkpoint_policies
    keep = {"attention": policies.save_only_these_names(*NAMES), "nothing": policies.nothing_saveable}

    def loss(parameters: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(jax.checkpoint(layer, policy=keep[stack.kept]), x, parameters)
        return jnp.mean(jnp.square(y.astype(jnp.float32)))

    return jax.value_and_grad(loss), [parameters, typed((stack.sequences, stack.length, MODEL), "data", "sequence")]


def _normalize(x: jax.Array) -> jax.Array:
    """RMSNorm without a gain: https://arxiv.org/abs/1910.07467."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-5)).astype(x.dtype)
