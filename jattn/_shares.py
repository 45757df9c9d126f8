"""Shards the slots of arrays ``[B,C,K,...]`` over the devices of a mesh, for sharded key-value caches.

A ``NamedSharding`` names the mesh axes of B, C and K; all other axes are unsharded. Each function moves tokens between
devices only as far as needed and never puts all slots, or a whole sharded chunk, on one device.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jattn._core.shard import MeshAxes, map_shards


def axes_of(sharding: NamedSharding) -> MeshAxes:
    """The mesh axes of batch, keys and heads."""
    names = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in (*sharding.spec, None, None, None)]
    return MeshAxes(sharding.mesh, batch=names[0], keys=names[1], heads=names[2])


def check_sharding(sharding: object, batch: int, capacity: int, num_kv_heads: int) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless arrays of these sizes can be sharded this way."""
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise TypeError(
            f"sharding must be a jax.sharding.NamedSharding of a mesh of devices, such as NamedSharding(mesh, "
            f"PartitionSpec(None, 'sequence')), got {sharding!r}"
        )
    if any(names is not None for names in sharding.spec[3:]):
        raise ValueError(f"sharding names mesh axes for [B, C, K], and head_dim stays whole; got {sharding.spec}")
    axes = axes_of(sharding)
    for kind, label, size in (
        ("batch", "batch_size", batch), ("keys", "capacity", capacity), ("heads", "num_kv_heads", num_kv_heads),
    ):  # fmt: skip
        if size % axes.parts(kind):
            raise ValueError(
                f"{label} {size} cannot be divided over {axes.names(kind)}: it must be a multiple of {axes.parts(kind)}"
            )


def zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding | None) -> Array:
    """``jnp.zeros``; if sharded, each device creates its own part, even inside ``jit``, on both kinds of mesh."""
    return jnp.zeros(shape, dtype) if sharding is None else _sharded_zeros(shape, dtype, sharding)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))  # an eager call compiles once
def _sharded_zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Array:
    part = sharding.shard_shape(shape)
    named = [name for names in sharding.spec if names for name in ((names,) if isinstance(names, str) else names)]
    return map_shards(lambda: jnp.zeros(part, dtype), sharding.mesh, named, (), sharding.spec)()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def put(
    sharding: NamedSharding, sharded: bool, in_a_row: bool, held: Sequence[Array], chunk: Sequence[Array], slots: Array
) -> list[Array]:
    """Each array of ``held`` with ``chunk [B,L,...]`` written to ``slots [B|1,L]``, except slots from C on.

    Args:
        sharded: the chunk is sharded over the axes of the slots, if L is divisible; otherwise every device has all of
            it. The parts of a sharded chunk pass from device to device, as far as any token has to go.
        in_a_row: the slots of each sequence are consecutive.
    """
    axes, L, C = axes_of(sharding), slots.shape[1], held[0].shape[1]
    if 0 in (L, C):
        return list(held)
    P = axes.parts("keys")
    share = C // P
    put_tokens = _put_run if in_a_row else _put_rows
    sharded = sharded and L % P == 0
    rotates = sharded and P > 1
    # A token of device p whose slot is on device q passes over p - q devices.
    hops = (np.arange(L, dtype=np.int32)[None] // (L // P) - slots // share) % P if rotates else 0
    hops = jnp.max(jnp.where(slots < C, hops, 0))

    def on_device(held: list[Array], chunk: list[Array], slots: Array, hops: Array) -> list[Array]:
        def put_part(held: list[Array], chunk: list[Array], slots: Array) -> list[Array]:
            local_slots = slots - jax.lax.axis_index(axes.keys) * share
            return [put_tokens(old, x, local_slots) for old, x in zip(held, chunk, strict=True)]

        def send(part: tuple) -> tuple:
            back = [(device, (device - 1) % P) for device in range(P)]
            return jax.tree.map(lambda x: jax.lax.ppermute(x, axes.keys, back), part)

        def hop(carry: tuple, step: Array) -> tuple[tuple, None]:
            held, part = carry
            # After the last hop, a device writes the same part again, so that ``held`` need not pass through a branch.
            part = jax.lax.cond(step <= hops, send, lambda part: part, part)
            return (put_part(held, *part), part), None

        held = put_part(held, chunk, slots)
        if rotates:
            (held, _), _ = jax.lax.scan(hop, (held, (chunk, slots)), jnp.arange(1, P))
        return held

    spec, of_slots = sharding.spec, ("bs" if sharded else "b.")
    of_held, of_chunk = [spec] * len(held), [axes.spec(f"{of_slots}k", (0, 0, 0), False)] * len(held)
    in_specs = of_held, of_chunk, axes.spec(of_slots, slots.shape, False), PartitionSpec()
    return map_shards(on_device, axes.mesh, axes.named, in_specs, of_held)(list(held), list(chunk), slots, hops)


def join(sharding: NamedSharding, held: Array, chunk: Array, fill: Any = 0) -> Array:
    """``held [B,C,...]`` and ``chunk [B,L,...]`` in one array: each device has its own slots, then a part of the chunk.

    The chunk is padded with ``fill`` to a divisible length.
    """
    axes = axes_of(sharding)
    missing = -chunk.shape[1] % axes.parts("keys")
    chunk = jnp.pad(chunk, [(0, 0), (0, missing)] + [(0, 0)] * (chunk.ndim - 2), constant_values=fill)
    spec = axes.spec("bsk"[: held.ndim], held.shape, False)
    return map_shards(lambda *parts: jnp.concatenate(parts, 1), axes.mesh, axes.named, (spec, spec), spec)(held, chunk)


def _put_rows(old: Array, x: Array, slots: Array) -> Array:
    """``old [B,c,...]`` with the tokens ``x [B,L,...]`` written to the ``slots [B|1,L]`` that it contains."""
    slots = jnp.where(slots >= 0, slots, old.shape[1])  # negative slots count from the end
    return old.at[np.arange(old.shape[0])[:, None], slots].set(x, mode="drop")


def _put_run(old: Array, x: Array, slots: Array) -> Array:
    """Like ``_put_rows``, for consecutive slots: reads and writes a single slice instead of a row per token."""

    def put_from(old: Array, x: Array, first: Array) -> Array:
        size = min(x.shape[1], old.shape[1])
        before = jnp.clip(-first, 0, x.shape[1] - size)  # tokens on other devices
        x, first = jax.lax.dynamic_slice_in_dim(x, before, size, 1), first + before
        start = jnp.clip(first, 0, old.shape[1] - size)
        tokens = start - first + jnp.arange(size, dtype=jnp.int32)
        from_chunk = ((tokens >= 0) & (tokens < size)).reshape(1, size, *[1] * (x.ndim - 2))
        kept = jax.lax.dynamic_slice_in_dim(old, start, size, 1)
        new = jnp.where(from_chunk, jnp.roll(x, first - start, 1), kept)
        return jax.lax.dynamic_update_slice_in_dim(old, new, start, 1)

    if slots.shape[0] == 1:
        return put_from(old, x, slots[0, 0])
    return jax.vmap(lambda old, x, first: put_from(old[None], x[None], first)[0])(old, x, slots[:, 0])
