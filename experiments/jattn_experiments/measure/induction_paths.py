"""What induction heads read: their score if keys or queries take one head's output from another run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jattn import heads

INTO = ("key", "query")
AT_ONCE = 9  # paths

Heads = list[tuple[int, int]]  # (layer, head)


def matched_groups(group: Heads, count: int, norms: np.ndarray, besides: Heads, rng: Any) -> list[Heads]:
    """``count`` random groups like ``group``: for each of its heads, one of the four with the nearest output norm.

    They are of the same layer, of the next ones if it has too few, and in neither ``group`` nor ``besides``.
    ``norms [L,N]``.
    """
    found = []
    for _ in range(count):
        taken = {*group, *besides}
        for layer, head in group:
            free = [at for at in np.ndindex(*norms.shape) if at not in taken]
            if not free:
                raise ValueError(f"language.group: there are no heads to compare {len(group)} of {norms.size} with")
            free.sort(key=lambda at: (abs(at[0] - layer), abs(np.log(norms[at] / norms[layer, head]))))
            near = [at for at in free[:4] if at[0] == free[0][0]]
            taken.add(near[rng.integers(len(near))])
        found.append(sorted(taken - {*group, *besides}))
    return found


def scores(
    run: Callable[..., Mapping[str, Any]],
    layers: Callable[[int], Any],
    streams: Sequence[Array],
    own: Sequence[Mapping[str, Array]],
    kernels: Sequence[Array],
    readers: Heads,
    groups: Sequence[Heads],
    asked: Mapping[str, Any],
) -> dict[str, Array]:
    """The mean induction score of the readers, with each path that ends in their keys, or in their queries, patched.

    The head at the start of a path has its output from another sequence of the batch; heads and MLPs between keep
    theirs. Paths into a reader from its own layer or a later one do not exist, and change nothing.

    Args:
        run: ``run(layer, stream, **options)``, what a layer's attention sows on a residual stream.
        layers: from a layer's number to its parameters, as ``run`` takes them.
        streams: the input ``[B,T,M]`` of each layer.
        own: what each layer's attention sows (``sow_heads``).
        kernels: their output kernels ``[N,D,M]``.
        readers: the heads that read.
        groups: the heads of each path together.
        asked: ``sow_statistics`` of the score.

    Returns:
        ``"clean" []``; for ``"key"`` and ``"query"`` of ``INTO``: the name ``[L,N]``, and with ``" groups"`` ``[G]``.
    """

    @jax.jit
    def of_layer(layer: Any, stream: Array, own: Any, others: Any, kernels: Any) -> dict[str, Array]:
        def score(**patch: Any) -> Array:
            return run(layer, stream, sow_statistics=asked, patch=patch)["attention_statistics"]["induction"].mean(0)

        def read(into: str) -> Callable[[Array], Array]:
            def through(stream: Array) -> Array:
                there = run(layer, stream, sow_heads=True)["attention_heads"][into]
                return score(**{into: (jnp.zeros(there.shape[-2]), there)})

            return through

        found = {"clean": score()}
        for into in INTO:
            found[into] = heads.path_patch(read(into), stream, own, others, kernels, batch_size=AT_ONCE)
            found[f"{into} groups"] = heads.path_patch(
                read(into), stream, own, others, kernels, groups=groups, batch_size=AT_ONCE
            )
        return found

    z = [{"z": layer["z"]} for layer in own]
    other = [{"z": jnp.roll(layer["z"], 1, 0)} for layer in z]
    total: dict[str, Array] = {}
    for layer in sorted({layer for layer, _ in readers}):
        reading = np.array([head for at, head in readers if at == layer])
        found = of_layer(layers(layer), streams[layer], z, [*other[:layer], *z[layer:]], list(kernels))
        for name, value in found.items():
            total[name] = total.get(name, 0.0) + value[..., reading].sum(-1)
    return {name: value / len(readers) for name, value in total.items()}
