"""Runs attention with sharded keys and whole queries: devices attend to their own keys, then merge the results."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, PyTree

from jattn._core import shard
from jattn._core.arguments import masks_of_lengths
from jattn._core.call import Call, softmax_dtype
from jattn._shares import axes_of
from jattn.kernels import Reduction
from jattn.kernels.dispatch import Dispatch, choose
from jattn.sharding._head_parallel import Axes, OnOwnPart, OnPart, in_units


@dataclasses.dataclass(frozen=True)
class SplitKeys(OnOwnPart):
    """``implementation=`` of ``jattn.dot_product_attention`` and the modules: keys over ``axis_name`` of ``mesh``.

    On every device, all queries attend to the device's own keys and values. Two all-reduces, of ``[B,T,N]`` and
    ``[B,T,N,D+1]`` numbers, merge the results. Calls with a sharded cache (``jattn.init_cache``) use this
    implementation. It is meant for few queries; for equally many queries and keys, use a ``Ring``, which shards queries
    as well. Masks and score functions see global positions, and each device holds its own columns of ``mask`` and
    ``bias`` arrays.

    Args:
        mesh: the devices; the work is replicated along its other axes.
        axis_name: the mesh axis (or axes) over which S is sharded.
        batch_axis, head_axis: the mesh axes (one or several each) over which B, and N and K, are sharded.
        implementation: the name of the implementation on each device; None picks one.

    Raises:
        TypeError: ``mesh`` is not a ``jax.sharding.Mesh``.
        ValueError: the mesh has no such axis, or two arguments name the same one.

    Example:
        >>> mesh = jax.make_mesh((jax.device_count(),), ("devices",))
        >>> split = jattn.sharding.SplitKeys(mesh, "devices")
        >>> query, key, value = (jax.random.normal(jax.random.key(i), (1, n, 8, 2)) for i, n in enumerate((3, 16, 16)))
        >>> out = jattn.dot_product_attention(query, key, value, implementation=split)
        >>> np.allclose(out, jattn.dot_product_attention(query, key, value), atol=1e-4)
        True

    Source: https://arxiv.org/abs/2408.04093 (tree attention: decoding over sharded keys by all-reduces).
    """

    kinds: ClassVar[Mapping[str, str]] = {"keys": "axis_name", "batch": "batch_axis", "heads": "head_axis"}

    mesh: Mesh
    axis_name: Axes
    batch_axis: Axes = None
    head_axis: Axes = None
    implementation: str | None = None

    def run(self, call: Call) -> tuple[Array, Array]:
        """``out [B,T,N,D]`` and ``lse [B,T,N]`` of ``call``, replicated along ``axis_name``."""
        axes = self.mesh_axes(call).keys
        # The devices' gradients of the query are summed before rounding.
        call = dataclasses.replace(call, query=call.query.astype(softmax_dtype(call.query)))

        def attend(part: Call) -> tuple[Array, Array]:
            return merge_devices(*choose(part, self.implementation).run(part), axes)

        return self.per_device(attend, call, ("btnd", "btn"))

    def describe(self, call: Call, explain: Callable[[Call, str | None], str]) -> list[str]:
        """The lines of ``jattn.explain`` about ``call``: what is divided, what a device sends, and what it runs."""
        mesh_axes, (B, T, N, _), D = self.mesh_axes(call), call.query.shape, call.value.shape[3]
        share = mesh_axes.parts("batch") * mesh_axes.parts("heads")
        rows = B * T * N // share * jnp.dtype(softmax_dtype(call.query)).itemsize
        moved = (
            f"all-reduces of {in_units(rows)}, the largest log-sum-exps, and {in_units(rows * (D + 1))}, the outputs"
        )
        moved = f"forward, {moved}" if mesh_axes.parts("keys") > 1 else "moves nothing"
        return [f"SplitKeys: {mesh_axes}", moved, *self.explain_parts(call, explain)]

    def fold(self, call: Call, reduction: Reduction) -> dict[str, Array]:
        """The sums ``{name: [B,N,...]}`` of ``reduction`` over the weights of ``call``, added up over all devices."""
        axes, (T, S) = self.mesh_axes(call).keys, (call.query.shape[1], call.key.shape[1])

        def fold_on_device(part: Call, of_part: Reduction) -> dict[str, Array]:
            sums = Dispatch().fold(part, of_part)
            first = jax.lax.axis_index(axes) * part.key.shape[1]

            def over_devices(kind: str, x: Array) -> Array:
                if kind == "column_sum":
                    return x
                if kind == "row_max":
                    return jax.lax.all_gather(x, axes).max(0)  # differentiable, unlike pmax
                if kind == "diagonal_sum":
                    whole = jnp.zeros((*x.shape[:2], T + S - 1), x.dtype)
                    x = jax.lax.dynamic_update_slice_in_dim(whole, x, first, axis=2)
                return jax.lax.psum(x, axes)

            return {name: over_devices(reduction.result_kinds[name], x) for name, x in sums.items()}

        return self.fold_parts(fold_on_device, call, reduction)

    def per_device(self, fn: OnPart, call: Call, out_axes: PyTree[str], *extra: tuple[Array, str]) -> PyTree:
        """``jattn._core.shard.per_device`` with sharded keys: lengths and positions apply to each device's slots."""
        mesh_axes = self.mesh_axes(call)
        # Masks that see positions, which each slot must therefore keep.
        by_position = bool(call.masks) or call.score_mod is not None or call.dropout is not None

        def on_part(part: Call, *arrays: Array) -> PyTree:
            s, slots = part.key.shape[1], (np.arange(length, dtype=np.int32) for length in part.lengths)
            first = jax.lax.axis_index(mesh_axes.keys) * s
            lengths, positions = part.key_value_seq_lengths, part.kv_positions
            if lengths is not None:
                lengths = jnp.clip(lengths - first, 0, s)
            if positions is None and by_position:
                positions = (first + jnp.arange(s, dtype=jnp.int32))[None]
            slot_masks = (*part.slot_masks, *masks_of_lengths(part.query_seq_lengths, lengths, *slots))
            fields = {"key_value_seq_lengths": lengths, "kv_positions": positions, "slot_masks": slot_masks}
            return fn(dataclasses.replace(part, **fields), *arrays)

        call = dataclasses.replace(call, slot_masks=call.slot_masks[: call.has("slot_masks")])
        return shard.per_device(on_part, call, mesh_axes, out_axes, *extra)


def merge_devices(
    out: Float[Array, "*rows D"], lse: Float[Array, "*rows"], axes: tuple[str, ...]
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """The ``merge`` of the results of all devices along mesh ``axes``, on each device; inside ``jax.shard_map``.

    Takes two all-reduces: the largest lse of each row, then, together, the sums of ``e^(lse - largest)`` and of its
    product with ``out``. An all-reduce computes either a sum or a maximum, and no device knows a bound on the others'
    lse values; a single all-gather would suffice, but it would hold every device's ``out``.
    """
    row_max = jax.lax.pmax(jax.lax.stop_gradient(lse), axes)
    row_max = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    part = jnp.exp(lse - row_max)[..., None]
    sums = jax.lax.psum(jnp.concatenate([out.astype(lse.dtype) * part, part], -1), axes)
    acc, row_sum = sums[..., :-1], sums[..., -1]
    seen = row_sum != 0.0
    row_sum = jnp.where(seen, row_sum, 1.0)  # 1, as in ``merge``
    return (acc / row_sum[..., None]).astype(out.dtype), jnp.where(seen, row_max + jnp.log(row_sum), -jnp.inf)


def for_cache(sharding: NamedSharding, implementation: str | None) -> SplitKeys:
    """The ``SplitKeys`` for calls with a cache sharded this way."""
    axes = axes_of(sharding)
    assert isinstance(axes.mesh, Mesh)  # checked by ``init_cache``
    return SplitKeys(axes.mesh, axes.keys, axes.batch, axes.heads, implementation)
