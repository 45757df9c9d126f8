"""Stacks the options of each layer for a model that scans over its layers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn.heads._gates import checked_patch

_GATED = ("head_gate", "head_fill", "patch")  # a layer without them gets a gate of 1


def stack_options(
    per_layer: Sequence[Mapping[str, Any]] | None, num_layers: int, shared: Mapping[str, Any]
) -> tuple[Any, Callable[[Sequence[Array]], dict[str, Any]]]:
    """The stacked arrays of all layers' options, and a function from one layer's arrays to its options.

    ``shared``: options for layers that do not set their own.
    """
    if per_layer is None:
        return (), lambda arrays: {}
    if len(per_layer) != num_layers:
        raise ValueError(f"per_layer must have options for each of {num_layers} layers, got {len(per_layer)}")
    leaves, structures = zip(*(jax.tree.flatten(options) for options in _with_neutral(per_layer, shared)), strict=True)
    if any(structure != structures[0] for structure in structures):
        other = next(structure for structure in structures if structure != structures[0])
        raise ValueError(
            f"per_layer must have the same masks and functions for every layer, got {structures[0]} and {other}"
        )
    by_leaf = list(zip(*leaves, strict=True))  # each leaf's values in all layers
    is_array = [any(isinstance(leaf, jax.Array | np.ndarray) for leaf in values) for values in by_leaf]
    for leaf, *others in (values for values, array in zip(by_leaf, is_array, strict=True) if not array):
        if any(other is not leaf and other != leaf for other in others):
            raise ValueError(
                f"per_layer must have the same {type(leaf).__name__} for every layer, got {leaf!r} and others"
            )
    shapes = [{jnp.shape(x) for x in values} for values in by_leaf]
    if any(len(different) > 1 for different in shapes):
        raise ValueError(f"per_layer must have arrays of one shape for every layer, got {max(shapes, key=len)}")
    arrays = [jnp.stack(values) for values, array in zip(by_leaf, is_array, strict=True) if array]

    def options_of(layer: Sequence[Array]) -> dict[str, Any]:
        rest = iter(layer)
        both = zip(leaves[0], is_array, strict=True)
        return structures[0].unflatten([next(rest) if array else leaf for leaf, array in both])

    return arrays, options_of


def _with_neutral(per_layer: Sequence[Mapping[str, Any]], shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of every layer, with gates of 1 for layers without a gate that another layer has."""
    gates = {name: shared[name] for name in _GATED if name in shared}
    every: list[dict[str, Any]] = [
        {name: x for name, x in {**gates, **options}.items() if x is not None or name not in _GATED}
        for options in per_layer
    ]
    some = {name: x for options in every for name, x in options.items()}
    neutral: dict[str, Any] = {}
    if "head_gate" in some:
        neutral["head_gate"], neutral["head_fill"] = _neutral(some["head_gate"], some.get("head_fill"))
    patches = [checked_patch(options.get("patch", {})) for options in every]
    patch = {name: _neutral(*pair) for of_layer in patches for name, pair in of_layer.items()}
    completed = []
    for i, (options, of_layer) in enumerate(zip(every, patches, strict=True)):
        if missing := sorted(some.keys() - options.keys() - set(_GATED)):
            raise ValueError(
                f"per_layer must give {missing[0]} to every layer or to none, but layer {i} has none; a layer may lack "
                f"only {', '.join(_GATED)}"
            )
        if "head_fill" in options and "head_gate" not in options:
            raise ValueError(f"layer {i} of per_layer has head_fill without head_gate, which selects the heads to fill")
        completed.append({**neutral, **options, **({"patch": {**patch, **of_layer}} if patch else {})})
    return completed


def _neutral(gate: Any, fill: Any) -> tuple[Any, Any]:
    """A gate of 1, and a finite fill that the gate blocks."""
    return jnp.ones_like(gate), jax.tree.map(jnp.zeros_like, fill)
