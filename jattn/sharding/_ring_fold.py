"""Sums over the weights of a ring, for each device's own queries and the keys of all devices."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from jattn._core.call import Call
from jattn._mods.arrays import Index
from jattn.kernels import Reduction
from jattn.kernels.blockwise import Blockwise
from jattn.sharding._mask_tables import rotating, with_keys
from jattn.sharding._rotation import Hop, RingPlan, add_chunk, each_kv_head, take_chunk


def ring_fold(ring: RingPlan, platform: str, call: Call, reduction: Reduction) -> dict[str, Array]:
    """``ReducesWeights.fold`` for the device's own queries and the keys of all devices.

    Offsets are token offsets, and every device gets the sums over all devices. ``platform``: the devices' platform.
    """
    (B, T, N, _), S, dtype = call.query.shape, call.key.shape[1], reduction.lse.dtype
    t, s, all_queries = T // ring.chunks, S // ring.chunks, ring.devices * T
    result_kinds = reduction.result_kinds
    sizes = {"row_sum": T, "row_max": T, "column_sum": S, "diagonal_sum": max(all_queries + ring.devices * S - 1, 0)}

    device = jax.lax.axis_index(ring.axis)

    def initial(num_heads: int, by_key: bool) -> dict[str, Array]:
        fill = {"row_max": -jnp.inf}
        return {
            name: jnp.full((B, num_heads, sizes[kind]), fill.get(kind, 0), dtype)
            for name, kind in result_kinds.items()
            if (kind == "column_sum") == by_key
        }

    def fold_group(results: dict[str, Array], call: Call, h: Index) -> dict[str, Array]:
        G = call.query.shape[2]
        group_lse = take_chunk(reduction.lse, h, G, 2)

        def visit(state: dict[str, Array], keys: tuple, hop: Hop) -> tuple[dict[str, Array], dict[str, Array]]:
            travelling, columns = keys
            at_hand, source = with_keys(call, travelling), (device - hop.step) % ring.devices

            def fold_pair(carry: dict[str, Array], i: Index, j: Index) -> dict[str, Array]:
                of_pair = dataclasses.replace(
                    reduction,
                    lse=take_chunk(group_lse, i, t, 1),
                    rows={name: take_chunk(x, i, t, 1) for name, x in reduction.rows.items()},
                    columns={name: take_chunk(x, j, s, 1) for name, x in columns.items()},
                )
                chunk = Blockwise().fold(ring.part(at_hand, source, i, j), of_pair)
                first = ring.tokens(source, j, s)[0] - ring.tokens(device, i, t)[0] - t + all_queries
                starts = {"row_sum": i * t, "row_max": i * t, "column_sum": j * s, "diagonal_sum": first}
                kinds = result_kinds.items()
                return {name: _combine(kind, carry[name], chunk[name], starts[kind]) for name, kind in kinds}

            of_keys = initial(G, True)
            both = ring.over_pairs(fold_pair, state | of_keys)
            return {name: both[name] for name in state}, {name: both[name] for name in of_keys}

        keys = rotating(call), reduction.columns
        state, key_sums = ring.rotate(visit, initial(G, False), keys, sums=True)
        return {name: add_chunk(x, (state | key_sums)[name], h) for name, x in results.items()}

    zeros = jax.tree.map(jnp.zeros_like, initial(N, False) | initial(N, True))
    results = each_kv_head(platform, fold_group, zeros, call)
    by_offset = [name for name, kind in result_kinds.items() if kind == "diagonal_sum"]
    return results | {name: jax.lax.psum(results[name], ring.axis) for name in by_offset}


def _combine(kind: str, x: Array, chunk: Array, start: Index) -> Array:
    """``x [B,N,...]`` with ``chunk`` added at ``start``, or the maximum taken for the kind ``"row_max"``."""
    combine = jnp.maximum if kind == "row_max" else jnp.add
    old = jax.lax.dynamic_slice_in_dim(x, start, chunk.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(x, combine(old, chunk), start, 2)
