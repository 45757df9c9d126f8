"""Patches activations from another run into a model (``patch``) and estimates the effects from gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jattn._core.call import softmax_dtype
from jattn.heads._ablation import check_layers, run_each, with_axes

# What can be patched, and the arrays of ``collect`` that it needs; the first has the axes of its gate.
_NEEDED = {"q": ("query",), "k": ("key",), "v": ("value",), "z": ("z",), "pattern": ("query", "key")}
_NAMES = {"q": "query", "k": "key", "v": "value"}
_AXES = {"head": (-2,), "position": (-3,), "head_position": (-2, -3)}


def patch(
    run: Callable[[list[dict[str, Any]]], PyTree[Array]],
    source: Sequence[Mapping[str, Array]],
    what: str = "z",
    by: str = "head",
    *,
    batch_size: int | None = None,
) -> PyTree[Array]:
    """Activation patching: runs the model once for each activation, taking that activation from a source run.

    Suppose the model gives the right answer on one input but not on another. If patching an activation moves the answer
    from one to the other, that activation carries the difference between the inputs.
    All patches run as one program, ``run`` under ``jax.vmap``. Wrap the call in ``jax.jit``.

    Args:
        run: a function of a list with one dict per layer. It passes each dict to that layer's attention as keyword
            arguments, ``patch``, or ``head_gate`` and ``head_fill`` for z, and returns any pytree of arrays.
        source: for each layer, the dict sown by its attention on another input of the same shape (``collect(sown)``).
        what: ``"q"``, ``"k"``, ``"v"``: queries, keys or values as attention reads them, with positions applied;
            ``"z"``: the heads' outputs; ``"pattern"``: the attention weights.
        by: ``"head"``: one head at all positions, leading axes ``[L,N]``; ``"position"``: all heads of a layer at one
            position, ``[L,T]``; ``"head_position"``: one head at one position, ``[L,N,T]``. Positions are query
            positions for q, z and pattern (a row of the weights), and key positions for k and v: ``[L,S]``. Keys and
            values shared by several query heads are patched together: ``[L,K]``, ``[L,K,S]``.
        batch_size: the number of patches to run at once; all by default. Smaller batches take less memory.

    Returns:
        The results of ``run``, with the leading axes set by ``by``.

    Raises:
        ValueError: ``what`` or ``by`` is unknown; ``source`` is not a list of dicts with the arrays needed, or its
            layers have different shapes.

    Example:
        >>> from flax import nnx
        >>> layer, x = jattn.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)), jnp.ones((1, 3, 4))
        >>> other = x.at[:, 1].set(-1.0)  # the two inputs differ at position 1
        >>> _, sown = nnx.capture(lambda layer: layer(other, sow_heads=True), nnx.Intermediate)(layer)
        >>> run = lambda layers: layer(x, **layers[0])
        >>> patched = jattn.heads.patch(run, jattn.heads.collect(sown), "v", "position")  # [L,S,B,T,M]
        >>> (abs(patched - run([{}])).max((2, 3, 4)) > 1e-4).tolist()  # only the value at position 1 matters
        [[False, True, False]]

    Source: https://arxiv.org/abs/2404.15255 (Heimersheim and Nanda).
    """
    lead, T, N = _sizes(source, what, by, _NEEDED)
    sizes = tuple({-2: N, -3: T}[axis] for axis in _AXES[by])
    axes = len(source), *sizes

    def run_with(number: Array) -> PyTree[Array]:
        layer, *place = jnp.unravel_index(number, axes)
        here = jnp.ones((*lead, T, N), bool)
        for axis, index in zip(_AXES[by], place, strict=True):
            of_axis = jnp.arange(T)[:, None] if axis == -3 else jnp.arange(N)[None]
            here &= (of_axis == index).reshape(*lead, *of_axis.shape)
        gates = [jnp.where(here & (layer == i), 0.0, 1.0) for i in range(len(source))]
        return run([_options(what, gate, sown) for gate, sown in zip(gates, source, strict=True)])

    return with_axes(run_each(run_with, jnp.arange(math.prod(axes)), batch_size), axes)


def attribution_patch(
    run: Callable[[list[dict[str, Any]]], Array],
    source: Sequence[Mapping[str, Array]],
    what: str = "z",
    by: str = "head",
) -> Array:
    """Attribution patching: estimates the effects of all patches of ``patch`` from one backward pass.

    The effect is the metric with the patch minus the metric without it. With z the heads' outputs in this run and z'
    their outputs with the patch, the estimate is ``sum (z' - z) d metric / d z``. z' is exact, including the softmax,
    even where the softmax is saturated and the gradient with respect to a query or key is nearly 0. So the estimate is
    exact if the metric is linear in the outputs of the patched layer, and first-order in whatever follows that layer.
    It takes O(T + S) memory, like attention itself. Wrap the call in ``jax.jit``.

    Effects that cancel in a sum may each be large; confirm the largest with ``patch``.

    Args:
        run: a function of a list with one dict per layer, which it passes to that layer's attention as keyword
            arguments. It returns the metric, a scalar summed over sequences, which must not affect each other.
        source: for each layer, the dict sown by its attention on the other input (``collect(sown)``), with ``"query"``.
        what: what to patch: ``"q"``, ``"k"``, ``"v"``, ``"z"`` or ``"pattern"`` (see ``patch``).
        by: ``"head"``, ``"position"`` or ``"head_position"`` (see ``patch``).

    Returns:
        ``[L,N]``, ``[L,T]`` or ``[L,N,T]``, with K and S in place of N and T for k and v; float32 (float64 for float64
        input).

    Raises:
        ValueError: ``what`` or ``by`` is unknown; ``source`` lacks an array, or its layers have different shapes;
            ``run`` does not return a floating scalar.

    Example:
        >>> from flax import nnx
        >>> layer, x = jattn.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)), jnp.ones((1, 3, 4))
        >>> _, sown = nnx.capture(lambda layer: layer(-x, sow_heads=True), nnx.Intermediate)(layer)
        >>> source, metric = jattn.heads.collect(sown), lambda layers: layer(x, **layers[0]).sum()
        >>> estimate = jattn.heads.attribution_patch(metric, source, "v", "head_position")  # [L,N,S]
        >>> exact = jattn.heads.patch(metric, source, "v", "head_position") - metric([{}])
        >>> bool(jnp.allclose(estimate, exact, atol=1e-4))  # nothing follows this layer
        True

    Source: https://arxiv.org/abs/2403.00745 (Kramár et al.: AtP with its softmax recomputed for queries and keys).
    """
    lead, T, N = _sizes(source, what, by, {**_NEEDED, "k": ("key", "query")})
    keys_at_once = what == "k" and by == "head"  # then the gate is on their weights, of N query heads
    gate = jnp.ones((*lead, 1, source[0]["query"].shape[-2]) if keys_at_once else (*lead, T, N))

    def metric(gates: list[Array]) -> Array:
        result = jnp.asarray(run([_estimate(what, by, gate, sown) for gate, sown in zip(gates, source, strict=True)]))
        if result.shape != () or not jnp.issubdtype(result.dtype, jnp.floating):
            raise ValueError(f"run must return a floating scalar, got {result.dtype} of shape {list(result.shape)}")
        return result

    ones = [gate.astype(softmax_dtype(layer[_NEEDED[what][0]])) for layer in source]
    effects = -jnp.stack(jax.grad(metric)(ones)).reshape(len(source), *gate.shape[len(lead) :])
    if by == "position":
        return effects.sum(-1)
    if by == "head_position":
        return jnp.swapaxes(effects, 1, 2)
    return effects.sum(1).reshape(len(source), N, -1).sum(-1)  # over query heads that share a key


def _sizes(
    source: Sequence[Mapping[str, Array]], what: str, by: str, names: Mapping[str, Sequence[str]]
) -> tuple[tuple[int, ...], int, int]:
    """An axis of 1 for each batch axis, then T and N of the patched array (S and K for keys and values); or raises."""
    if what not in names:
        raise ValueError(f"what must be one of {', '.join(names)}, got {what!r}")
    if by not in _AXES:
        raise ValueError(f"by must be one of {', '.join(_AXES)}, got {by!r}")
    needed = names[what]
    check_layers("source", source, needed)
    shapes = sorted({layer[needed[0]].shape[:-1] for layer in source})
    if len(shapes) != 1:
        raise ValueError(f"the layers of source must have {needed[0]!r} of one shape, got {[*map(list, shapes)]}")
    *batch, T, N = shapes[0]
    return (1,) * len(batch), T, N


def _options(what: str, gate: Array, source: Mapping[str, Array]) -> dict[str, Any]:
    """The options that make a layer's attention call take whatever ``gate`` switches off from ``source``."""
    if what == "z":
        return {"head_gate": gate, "head_fill": source["z"]}
    if what == "pattern":
        return {"patch": {"pattern": (gate, (source["query"], source["key"]))}}
    return {"patch": {_NAMES[what]: (gate, source[_NAMES[what]])}}


def _estimate(what: str, by: str, gate: Array, source: Mapping[str, Array]) -> dict[str, Any]:
    """Options that change nothing at a gate of 1, where the effect of the patch is minus the gate's derivative."""
    if what == "q":  # each query alone, because it has its own row of weights
        return {"patch": {"pattern": (gate, (source["query"], None))}}
    if what == "k" and by == "head":
        return {"patch": {"pattern": (gate, (None, source["key"]))}}
    if what == "k":
        return {"patch": {"each_key": (gate, source["key"])}}
    return _options(what, gate, source)
