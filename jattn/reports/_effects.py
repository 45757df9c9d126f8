"""Measures the metric without a head, exactly from the head's layer up, or estimates it for all heads."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn import heads
from jattn.heads._ablation import fill_of
from jattn.reports._language_model import Layer, Metric, Whole, measured, step

ROWS = 2048  # tokens of all sequences at once; more would not speed up a matrix product


def estimated(
    whole: Whole, layers: Sequence[Layer], x: Array, z: Sequence[Array], tokens: Array, metric: Metric, kind: str
) -> tuple[np.ndarray, np.ndarray]:
    """``[L,N]``: the first-order estimate of ``exactly`` for all heads, from one forward and one backward pass.

    Also returns the sum of its absolute values over positions, used to choose the heads to measure: effects that cancel
    between positions to first order may be large.
    """

    def run(per_layer: Sequence[dict[str, Any]]) -> Array:
        y = x
        for layer, options in zip(layers, per_layer, strict=True):
            y = step(layer, y, options)
        return measured(whole, y, tokens, metric)

    fills = [{"z": jnp.broadcast_to(fill_of(of_layer, kind), of_layer.shape)} for of_layer in z]
    estimates = np.asarray(heads.attribution_patch(run, fills, by="head_position"))
    return estimates.sum(-1), abs(estimates).sum(-1)


def heads_at_once(num_heads: int, tokens: Array) -> int:
    """The number of a layer's heads that run at once, chosen so that all its batches have nearly the same size."""
    most = max(1, ROWS // tokens.size)
    return math.ceil(num_heads / math.ceil(num_heads / most))


def batches(chosen: np.ndarray, at_once: int) -> list[tuple[int, list[int]]]:
    """``chosen [L,N]`` as pairs of a layer and its heads that run at once."""
    of_layers = [np.flatnonzero(row).tolist() for row in chosen]
    return [
        (layer, row[at : at + at_once]) for layer, row in enumerate(of_layers) for at in range(0, len(row), at_once)
    ]


def exactly(
    whole: Whole,
    layers: Sequence[Layer],
    streams: Sequence[Array],
    z: Sequence[Array],
    tokens: Array,
    metric: Metric,
    kind: str,
    chosen: Iterable[tuple[int, list[int]]],
) -> np.ndarray:
    """``[L,N]``: the metric with each chosen head switched off, NaN for the others.

    A head changes nothing in earlier layers, so the model runs only from its layer up. All batches are padded to one
    size with empty groups, so that they share their programs.
    """
    N = z[0].shape[-2]
    at_once = heads_at_once(N, tokens)
    results = np.full((len(layers), N), np.nan)
    for first, of_layer in chosen:

        def run(per_layer: Sequence[dict[str, Any]], first: int = first) -> Array:
            x = step(layers[first], streams[first], per_layer[0])
            for layer in layers[first + 1 :]:
                x = step(layer, x, {})
            return measured(whole, x, tokens, metric)

        groups: list[Any] = [[(0, head)] for head in of_layer]
        groups += [[]] * (at_once - len(groups))
        values = heads.ablate(run, [{"z": z[first]}], kind, groups=groups)
        results[first, of_layer] = np.asarray(values)[: len(of_layer)]
    return results
