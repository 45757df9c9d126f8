"""Options of each layer, for a model that scans over its layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array


def stack_options(per_layer: Sequence[Mapping[str, Any]] | None, num_layers: int) -> tuple[Any, Callable]:
    """The arrays of all layers' options, stacked, and a function from one layer's arrays to its options."""
    if per_layer is None:
        return (), lambda arrays: {}
    if len(per_layer) != num_layers:
        raise ValueError(f"per_layer must have options for each of {num_layers} layers, got {len(per_layer)}")
    leaves, structures = zip(*(jax.tree.flatten(dict(options)) for options in per_layer), strict=True)
    if any(structure != structures[0] for structure in structures):
        other = next(structure for structure in structures if structure != structures[0])
        raise ValueError(
            f"per_layer must have the same options for every layer, with the same masks and functions: a head_gate of "
            f"ones changes nothing; got {structures[0]} and {other}"
        )
    is_array = [isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves[0]]
    for leaf, *others in (own for own, array in zip(zip(*leaves, strict=True), is_array, strict=True) if not array):
        if any(other is not leaf and other != leaf for other in others):
            raise ValueError(
                f"per_layer must have the same {type(leaf).__name__} for every layer, got {leaf!r} and others"
            )
    shapes = [{jnp.shape(x) for x in own} for own in zip(*leaves, strict=True)]
    if any(len(own) > 1 for own in shapes):
        raise ValueError(f"per_layer must have arrays of one shape for every layer, got {max(shapes, key=len)}")
    arrays = [jnp.stack(own) for own, array in zip(zip(*leaves, strict=True), is_array, strict=True) if array]

    def with_own(own: Sequence[Array]) -> dict[str, Any]:
        rest = iter(own)
        both = zip(leaves[0], is_array, strict=True)
        return structures[0].unflatten([next(rest) if array else leaf for leaf, array in both])

    return arrays, with_own
