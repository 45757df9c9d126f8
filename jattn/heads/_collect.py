"""Collects the values sown by a model's layers, in the order of the layers."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jaxtyping import PyTree

# The rank of each array that a layer sows, for inputs [B,T,M]. Scanned layers add a leading axis.
_RANKS = {"attention_weights": 4, "attention_statistics": 2, "attention_heads": None, "residual_parts": 3}
_HEADS = {"query": 4, "key": 4, "value": 4, "lse": 3, "z": 4}


def collect(sown: Mapping[str, PyTree], name: str = "attention_heads") -> list[Any]:
    """Collects what each layer has sown under ``name``, one entry per layer, for ``ablate`` and similar functions.

    Args:
        sown: the state returned by ``nnx.capture(fn, nnx.Intermediate)``, or Linen's ``"intermediates"``, for inputs
            ``[B,T,M]``. Layers may be separate modules, numbered in their names or in a list, or one module that the
            model scans over, as in ``jattn.interop.Transformer``.
        name: ``"attention_heads"`` (``sow_heads``), ``"attention_statistics"``, ``"attention_weights"``, or
            ``"residual_parts"`` (``sow_parts`` of ``jattn.interop.Transformer``).

    Returns:
        A list with the array ``[B,N,T,S]`` or the dict of each layer, from the last call if a layer was called more
        than once.

    Raises:
        ValueError: ``name`` is unknown, or no layer has sown it.

    Example:
        >>> from flax import nnx
        >>> layer, x = jattn.nnx.MultiHeadAttention(2, 4, rngs=nnx.Rngs(0)), jnp.ones((1, 3, 4))
        >>> _, sown = nnx.capture(lambda layer: layer(x, sow_heads=True), nnx.Intermediate)(layer)
        >>> for layer in jattn.heads.collect(sown):
        ...     print({name: array.shape for name, array in sorted(layer.items())})
        {'key': (1, 3, 2, 2), 'lse': (1, 3, 2), 'query': (1, 3, 2, 2), 'value': (1, 3, 2, 2), 'z': (1, 3, 2, 2)}
    """
    if name not in _RANKS:
        raise ValueError(f"name must be one of {', '.join(_RANKS)}, got {name!r}")
    entries = sorted(_named(sown, name, ()), key=lambda entry: _natural(entry[0]))
    if not entries:
        raise ValueError(f"no layer has sown {name!r}; pass sow_{name.partition('_')[2]}= in the call of the model")
    return [layer for _, value in entries for layer in _layers(value, name)]


def _named(node: PyTree, name: str, path: tuple) -> Iterator[tuple[tuple, PyTree]]:
    """Every ``(path, value)`` under this name."""
    for key, child in node.items() if isinstance(node, Mapping) else ():
        if key == name:
            yield path, _last_call(child)
        else:
            yield from _named(child, name, (*path, key))


def _last_call(value: PyTree) -> PyTree:
    value = value.get_value() if hasattr(value, "get_value") else value  # an NNX variable
    return value[-1] if isinstance(value, tuple) else value


def _natural(path: tuple) -> list[list[int | str]]:
    """A sort key that puts ``layer_10`` after ``layer_9``."""
    parts = [re.split(r"(\d+)", str(key)) for key in path]
    return [[int(part) if part.isdigit() else part for part in name] for name in parts]


def _layers(value: PyTree, name: str) -> list[PyTree]:
    if isinstance(value, Mapping):
        first = next(iter(value))
        rank, leaf = _HEADS[first] if name == "attention_heads" else _RANKS[name], value[first]
    else:
        rank, leaf = _RANKS[name], value
    if leaf.ndim <= rank:
        return [value]
    return [jax.tree.map(lambda x, i=i: x[i], value) for i in range(leaf.shape[0])]
