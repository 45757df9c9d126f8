"""Finds the strongest paths into a head: which earlier heads its queries and keys depend on."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jattn import heads
from jattn.reports._language_model import Layer, look


class Paths(NamedTuple):
    """How much the score of one head changes when it reads each earlier head's output from another sequence.

    Attributes:
        into: the layer and the head that reads.
        pattern: the statistic that gives its score.
        score: the score of the unchanged head.
        query: ``[layers before, N]``, the change when its queries read the other output; negative for a lower score.
        key: ``[layers before, N]``, the change when its keys read the other output.

    Example:
        >>> change = {"query": np.array([[0.01, -0.02]]), "key": np.array([[-0.6, 0.1]])}  # two heads in layer 0
        >>> paths = jattn.reports.Paths((1, 0), "induction", 0.7, **change)
        >>> paths.strongest(2)
        [('key', 0, 0, -0.6), ('key', 0, 1, 0.1)]
    """

    into: tuple[int, int]
    pattern: str
    score: float
    query: np.ndarray
    key: np.ndarray

    def strongest(self, count: int = 5) -> list[tuple[str, int, int, float]]:
        """The ``count`` paths with the largest absolute changes: ``("query" or "key", layer, head, change)``."""
        paths = [
            (by, layer, head, float(change[layer, head]))
            for by, change in (("query", self.query), ("key", self.key))
            for layer, head in np.ndindex(*change.shape)
        ]
        return sorted(paths, key=lambda path: -abs(path[-1]))[:count]


def paths_into(
    layer: Layer,
    stream: Array,
    z: Sequence[Array],
    out: list[Array],
    tokens: Array,
    into: tuple[int, int],
    pattern: str,
    at_once: int,
) -> Paths:
    """Computes ``Paths`` with ``heads.path_patch``.

    Args:
        layer: the layer of the head that reads.
        stream: its input.
        z, out: outputs ``[B,T,N,D]`` and kernels ``[N,D,M]`` of the earlier layers.
        tokens: ``[B,T]``, at least two sequences.
        into: the layer and the head.
        pattern: a statistic.
        at_once: the number of paths to measure at once.
    """
    clean = [{"z": x} for x in z]
    score, query, key = _changes(layer, stream, clean, out, tokens, into[1], pattern, at_once)
    return Paths(into, pattern, float(score), np.asarray(query), np.asarray(key))


@functools.partial(jax.jit, static_argnames=("pattern", "at_once"))
def _changes(
    layer: Layer, stream: Array, clean: list, out: list, tokens: Array, head: ArrayLike, pattern: str, at_once: int
) -> list[Array]:
    other = [{"z": jnp.roll(x["z"], 1, 0)} for x in clean]

    def score(patch: dict | None = None) -> Array:
        return look(layer, stream, tokens, (pattern,), patch)[2][pattern][head]

    def through(into: str) -> Callable[[Array], Array]:
        def read(changed: Array) -> Array:
            there = look(layer, changed, tokens, (pattern,))[1][into]
            return score({into: (jnp.zeros(there.shape[-2]), there)})

        return read

    before = score()
    after = [heads.path_patch(through(by), stream, clean, other, out, batch_size=at_once) for by in ("query", "key")]
    return [before, *(changed - before for changed in after)]
