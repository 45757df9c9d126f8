"""What induction heads read: their scores if keys or queries take one head's output from another run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jattn import heads
from jattn_experiments.measure.head_groups import Heads

INTO = ("key", "query")
AT_ONCE = 9  # paths


class Run(Protocol):
    """What a layer's attention sows, by name, on a residual stream ``[B,T,M]``."""

    def __call__(self, layer: Any, stream: Array, **options: Any) -> Mapping[str, Any]:
        """``layer``: its parameters; ``options``: of its call, such as ``sow_heads``."""


def scores(
    run: Run,
    layers: Callable[[int], Any],
    streams: Sequence[Array],
    sown: Sequence[Mapping[str, Array]],
    kernels: Sequence[Array],
    readers: Heads,
    groups: Sequence[Heads],
    tokens: Array,
) -> dict[str, np.ndarray]:
    """The mean induction score of the readers, with each path that ends in their keys, or in their queries, patched.

    The head at the start of a path gets its output from another sequence of the batch. Heads and MLPs in between keep
    theirs. A path into a reader from its own or a later layer does not exist and changes nothing.

    Args:
        run: runs a layer's attention.
        layers: from a layer's number to its parameters, as ``run`` takes them.
        streams: the input ``[B,T,M]`` of each layer.
        sown: what each layer's attention sows (``sow_heads``).
        kernels: their output kernels ``[N,D,M]``.
        readers: the heads that read.
        groups: the heads of each path together.
        tokens: ``[B,T]``, of the score.

    Returns:
        ``"clean" []``; for ``"key"`` and ``"query"`` of ``INTO``: the name ``[L,N]``, and with ``" groups"`` ``[G]``.
    """
    request = {"names": ("induction",), "tokens": tokens}

    @jax.jit
    def of_layer(layer: Any, stream: Array, clean: Any, others: Any, kernels: Any) -> dict[str, Array]:
        def score(**patch: Any) -> Array:
            return run(layer, stream, sow_statistics=request, patch=patch)["attention_statistics"]["induction"].mean(0)

        def read(into: str) -> Callable[[Array], Array]:
            def through(stream: Array) -> Array:
                there = run(layer, stream, sow_heads=True)["attention_heads"][into]
                return score(**{into: (jnp.zeros(there.shape[-2]), there)})

            return through

        result = {"clean": score()}
        for into in INTO:
            for name, together in ((into, None), (f"{into} groups", groups)):
                result[name] = heads.path_patch(
                    read(into), stream, clean, others, kernels, groups=together, batch_size=AT_ONCE
                )
        return result

    z = [{"z": layer["z"]} for layer in sown]
    other = [{"z": jnp.roll(layer["z"], 1, 0)} for layer in z]
    total: dict[str, Array] = {}
    for layer in sorted({layer for layer, _ in readers}):
        reading = np.array([head for at, head in readers if at == layer])
        result = of_layer(layers(layer), streams[layer], z, [*other[:layer], *z[layer:]], list(kernels))
        for name, value in result.items():
            total[name] = total.get(name, 0.0) + value[..., reading].sum(-1)
    return {name: np.asarray(value / len(readers)) for name, value in total.items()}
