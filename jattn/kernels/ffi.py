"""Calls a compiled kernel through XLA's foreign function interface; ``jax.vmap`` adds sequences rather than calls."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def call_once(
    name: str, settings: dict[str, Any], kinds: Sequence[str], shapes: Sequence[tuple], operands: Sequence[jax.Array]
) -> Sequence[jax.Array]:
    """One kernel call, which ``jax.vmap`` turns into one call with more sequences.

    ``kinds``: for each operand, whether each sequence has its own entry on the first axis, may share one, or has none.
    """
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    B = shapes[0][0]

    def one_by_one(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jax.ffi.ffi_call(name, types, vmap_method="sequential")(*operands, **settings))

    run = jax.custom_batching.custom_vmap(one_by_one)

    @run.def_vmap
    def of_batch(size: int, is_batched: Sequence[bool], *operands: jax.Array) -> tuple[tuple, tuple]:
        def joined(x: jax.Array, batched: bool, kind: str) -> jax.Array:
            count = x.shape[batched] if kind != "none" and x.size else 0
            if not batched and (count == 0 or kind == "shared" and count == 1):
                return x
            x = x if batched else x[None]
            return jnp.broadcast_to(x, (size, B, *x.shape[2:])).reshape(size * B, *x.shape[2:])

        def is_copied(x: jax.Array, batched: bool, kind: str) -> bool:
            """Whether a bias or mask array shared by some sequences would be copied."""
            if kind != "shared" or x.size == 0 or x.ndim - batched != 4:
                return False
            return x.shape[1] < B if batched else x.shape[0] > 1

        of_all = list(zip(operands, is_batched, kinds, strict=True))
        apart = any(batched and kind == "none" for _, batched, kind in of_all)
        if apart or not all(is_batched[:3]) or any(is_copied(*one) for one in of_all):
            axes = [0 if batched else None for batched in is_batched]
            return jax.vmap(one_by_one, axes)(*operands), (True,) * len(shapes)
        joined_operands = [joined(*one) for one in of_all]
        results = call_once(name, settings, kinds, [(size * B, *shape[1:]) for shape in shapes], joined_operands)
        return tuple(x.reshape(size, B, *x.shape[1:]) for x in results), (True,) * len(shapes)

    return run(*operands)
