"""Multiplies projections whose heads are sharded over the devices of a mesh."""

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._core.shard import explicit_axes


def dot_general(
    lhs: Array,
    rhs: Array,
    dimension_numbers: jax.lax.DotDimensionNumbers,
    precision: jax.lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
) -> Array:
    """``jax.lax.dot_general`` that also accepts a sharded contracted axis without an ``out_sharding``.

    The result is then summed over the devices and keeps the sharding of the remaining axes: ``sum_i z_i W_i^O`` with a
    head on each device.
    """
    if out_sharding is None:
        (contracted, others), (batch, batch_others) = dimension_numbers
        mesh, left = explicit_axes(lhs)
        _, right = explicit_axes(rhs)
        if not batch and any(left[axis] for axis in contracted) and any(right[axis] for axis in others):
            rest = [names for axis, names in enumerate(left) if axis not in contracted]
            rest += [names for axis, names in enumerate(right) if axis not in others]
            out_sharding = NamedSharding(mesh, PartitionSpec(*(names or None for names in rest)))
    return jax.lax.dot_general(
        lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding
    )
