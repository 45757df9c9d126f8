"""``attribution_patch``: what ``patch`` would give for every activation at once, from one gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn.attention import softmax_dtype
from jattn.heads.key_replacement import replace_keys
from jattn.request import ScoreOptions

_AXES = {"head": (0, 1), "position": (0, 2), "head_position": (0,)}  # of effects [B,T,N] that are summed up
_NEEDED = {
    "q": ("query", "key"), "k": ("query", "key"), "v": ("value",), "z": ("z",), "pattern": ("query", "key"),
}  # fmt: skip


def attribution_patch(
    run: Callable[[list[dict[str, Any]]], Array],
    own: Sequence[Mapping[str, Array]],
    source: Sequence[Mapping[str, Array]],
    what: str = "z",
    by: str = "head",
    **options: Unpack[ScoreOptions],
) -> Array:
    """Attribution patching: an estimate of ``patch(run, source, what, by) - run`` from one forward and backward pass.

    To first order in the heads' outputs: the effect of a patch is the gradient of ``run`` times the change of z. That
    change itself is exact, also for queries and keys: where the softmax is saturated its derivative is near zero,
    although another query or key may turn it over (AtP*). So for heads of the last layer, and a ``run`` that is linear
    in what they write, the estimate is the effect; otherwise it is best for small effects.

    Put ``jax.jit`` around it. Memory is that of the gradient; for keys by position, O(T + S) more for each head.

    Args:
        run: as in ``patch``, returning one number.
        own, source: what the attention of each layer sows in this run and in the other (``collect(sown)``).
        what, by: as in ``patch``. Queries by position and the like are summed over sequences, as those are patched
            together.
        options: for keys by position, those of the layers' attention that affect its weights, such as ``is_causal``,
            for all layers alike.

    Returns:
        ``[L,N]``, ``[L,T]`` or ``[L,N,T]``, with K heads and S positions for keys and values.

    Raises:
        ValueError: an unknown ``what`` or ``by``; layers that are not lists of dicts with the arrays needed; options
            that are not used; ``run`` does not return one number.

    Source: https://arxiv.org/abs/2403.00745 (Kramar et al.), sections 2.2 and 3.1.1.

    Example:
        ``attribution_patch(lambda layers: loss(model(x, layers)), collect(sown), collect(sown_on_another_x), "q")``
    """
    for name, value, known in (("what", what, _NEEDED), ("by", by, _AXES)):
        if value not in known:
            raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
    by_key = what == "k" and by != "head"
    needed = {"query", "key", "value", "lse", "z"} if by_key else _NEEDED[what]
    for name, layers in (("own", own), ("source", source)):
        if isinstance(layers, Mapping) or not layers or not all(set(needed) <= layer.keys() for layer in layers):
            raise ValueError(f"{name} must be a list with a dict for each layer, each with {', '.join(sorted(needed))}")
    if len(own) != len(source):
        raise ValueError(f"own and source must have the same number of layers, got {len(own)} and {len(source)}")
    if options and not by_key:
        raise ValueError(f"options are those of keys by position, got {', '.join(options)} for {what!r} by {by!r}")
    if by_key:
        return _of_keys(run, own, source, by, options)

    def with_gates(gates: list[Array]) -> Array:
        return _number(run([_options(what, *each) for each in zip(gates, own, source, strict=True)]))

    # A gate of 1 keeps what is there; its derivative is the gradient times what its closing takes away.
    ones = [jnp.ones(layer[{"v": "value", "z": "z"}.get(what, "query")].shape[:-1]) for layer in own]
    closing = jax.grad(with_gates)(ones)
    effects = jnp.stack([-x.reshape(-1, *x.shape[-2:]).swapaxes(1, 2) for x in closing])  # [L,B,N,T]
    if what == "k":  # all keys of a query head at once: those that share them are replaced together
        K = own[0]["key"].shape[-2]
        effects = effects.reshape(*effects.shape[:2], K, -1, effects.shape[-1]).sum(3)
    return _summed(effects, by)


def _options(what: str, gate: Array, own: Mapping[str, Array], source: Mapping[str, Array]) -> dict[str, Any]:
    """The options of a layer's attention call with this gate between its own activations and the source's."""
    if what == "z":
        return {"head_gate": gate, "head_fill": source["z"]}
    if what == "v":
        return {"patch": {"value": (gate, source["value"])}}
    query = (source if what in ("q", "pattern") else own)["query"]
    key = (source if what in ("k", "pattern") else own)["key"]
    # The output with the other query is that of another pattern, whichever mask and score function the layer has.
    return {"patch": {"pattern": (gate, (query, key))}}


def _summed(effects: Array, by: str) -> Array:
    """``[L,B,N,T]`` over sequences, and over positions or heads."""
    return effects.sum({"head": (1, 3), "position": (1, 2), "head_position": 1}[by])


def _number(value: Any) -> Array:
    if jnp.shape(value) != ():
        raise ValueError(f"run must return one number, got an array of shape {list(jnp.shape(value))}")
    return value


def _of_keys(run: Any, own: Any, source: Any, by: str, options: Any) -> Array:
    """The effects of single keys, from the gradient of each layer's outputs."""

    def with_gates(gates: list[Array]) -> Array:
        # z gate + (z - 1) (1 - gate): the same at a gate of 1, where its derivative is the gradient of z.
        fills = [layer["z"] - 1 for layer in own]
        return _number(run([{"head_gate": g, "head_fill": f} for g, f in zip(gates, fills, strict=True)]))

    gradients = jax.grad(with_gates)([jnp.ones(layer["z"].shape, softmax_dtype(layer["z"])) for layer in own])
    effects = [
        replace_keys(mine, other["key"], gradient, options)
        for mine, other, gradient in zip(own, source, gradients, strict=True)
    ]
    return _summed(jnp.stack(effects), by)
