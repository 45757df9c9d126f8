"""Reads the heads of a report, in any of their forms, as queries and keys of each layer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn._core.call import ScoreOptions
from jattn.heads import collect

OPTIONS = frozenset({"bias", "mask", *ScoreOptions.__optional_keys__})
SOWN = frozenset({"query", "key", "value", "lse", "z"})  # by a layer under sow_heads
FORMS = (
    "what a model has sown, a list of layers, or {name: layer}; a layer is (query, key), (query, key, lse), a dict "
    "with 'query' and 'key', or weights [B,N,T,S]"
)

EAGER = (
    'transformers returns attentions only if the model is loaded with attn_implementation="eager" and called with '
    "output_attentions=True"
)


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer's ``query [B,T,N,H]``, ``key [B,S,K,H]``, ``lse [B,T,N]`` or None, and options of ``fold_weights``."""

    name: str
    query: Any
    key: Any
    lse: Any
    options: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """``B, N, T, S``."""
        (B, T, N, _), S = self.query.shape, self.key.shape[1]
        return B, N, T, S


def read_layers(heads: Any, options: Mapping[str, Any]) -> list[Layer]:
    """Every layer of ``heads``, with its own options or else these.

    Raises:
        ValueError: ``heads`` has none of the ``FORMS``; layers differ in B, T or S.
        TypeError: an option is unknown.
    """
    for name in options.keys() - OPTIONS:
        raise TypeError(f"report takes no {name!r}; options of the weights are {', '.join(sorted(OPTIONS))}")
    if isinstance(heads, Mapping):
        sown = next((name for name in ("attention_heads", "attention_weights") if _contains(heads, name)), None)
        entries = list(enumerate(collect(heads, sown))) if sown else list(heads.items())
    elif isinstance(heads, list | tuple):
        entries = list(enumerate(heads))
    elif _is_array(heads):
        entries = list(enumerate(_layers_of_weights(as_array(heads))))
    else:
        hint = f"; {EAGER}" if heads is None else ""
        raise TypeError(f"heads must be {FORMS}; got {type(heads).__name__}{hint}")
    if not entries:
        hint = "did the model sow, with sow_heads=True?" if isinstance(heads, Mapping) else f"{EAGER}."
        raise ValueError(f"heads has no layers: {hint} Expected {FORMS}")
    layers = [
        _layer(f"layer {name}" if isinstance(name, int) else str(name), entry, options) for name, entry in entries
    ]
    B, _, T, S = layers[0].shape
    for layer in layers:
        sizes = tuple(size for size, axis in zip(layer.shape, "BNTS", strict=True) if axis != "N")
        if sizes != (B, T, S):
            raise ValueError(
                f"{layer.name} has (B, T, S) = {sizes}, but {layers[0].name} has {(B, T, S)}; all layers of a report "
                "must see the same sequences: make separate reports for self-attention and cross-attention"
            )
        if 0 in layer.shape:
            raise ValueError(f"{layer.name} is empty: (B, N, T, S) = {layer.shape}")
    return layers


def _contains(node: Any, name: str) -> bool:
    return isinstance(node, Mapping) and (name in node or any(_contains(child, name) for child in node.values()))


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) or hasattr(x, "__array__") or hasattr(x, "__dlpack__")


def as_array(x: Any) -> Any:
    """Converts tensors from other libraries to NumPy or JAX arrays; returns these arrays and non-arrays unchanged."""
    if isinstance(x, jax.Array | np.ndarray):
        return x
    if hasattr(x, "detach"):  # PyTorch's; NumPy cannot read one with a gradient, on an accelerator or in bfloat16
        x = x.detach().cpu()
        x = x.float() if x.is_floating_point() else x
    if hasattr(x, "__array__"):
        return np.asarray(x)
    return jnp.from_dlpack(x) if hasattr(x, "__dlpack__") else x


def _layers_of_weights(weights: Any) -> list[Any]:
    """``[N,T,S]`` of one layer, ``[L,N,T,S]`` of one sequence, or ``[L,B,N,T,S]``."""
    if weights.ndim not in (3, 4, 5):
        raise ValueError(f"weights must be [N,T,S], [L,N,T,S] or [L,B,N,T,S], got shape {list(weights.shape)}")
    return [weights] if weights.ndim == 3 else list(weights)


def _layer(name: str, entry: Any, options: Mapping[str, Any]) -> Layer:
    of_layer: Mapping[str, Any] = {}
    if isinstance(entry, Mapping):
        if "query" not in entry or "key" not in entry:
            raise ValueError(
                f"{name} has {', '.join(map(str, entry)) or 'nothing'}, expected 'query' and 'key'; call the model "
                "with sow_heads=True to sow them"
            )
        for unknown in entry.keys() - OPTIONS - SOWN:
            raise TypeError(f"{name} takes no {unknown!r}; options of the weights are {', '.join(sorted(OPTIONS))}")
        query, key, lse = entry["query"], entry["key"], entry.get("lse")
        of_layer = {option: entry[option] for option in entry.keys() & OPTIONS}
    elif _is_array(entry):
        return _of_weights(name, as_array(entry))
    elif isinstance(entry, Sequence) and len(entry) in (2, 3):
        query, key, lse = (*entry, None)[:3]
    else:
        raise ValueError(
            f"{name} must be (query, key), (query, key, lse), a dict or weights; got {type(entry).__name__}"
            + (f"; {EAGER}" if entry is None else "")
        )
    if any(isinstance(x, Mapping) for x in (query, key, lse)):
        raise ValueError(f"{name} has parameters, not arrays; pass what the model sows with sow_heads=True")
    if any(isinstance(x, Tracer) for x in (query, key, lse)):
        raise TypeError(f"{name} is traced: call report outside jax.jit, on the results of the compiled function")
    query, key = jnp.asarray(as_array(query)), jnp.asarray(as_array(key))
    lse = None if lse is None else jnp.asarray(as_array(lse))
    if query.ndim not in (3, 4) or key.ndim != query.ndim:
        raise ValueError(
            f"{name} must have query [B,T,N,H] and key [B,S,K,H], both with B or both without; got shapes "
            f"{list(query.shape)} and {list(key.shape)}"
        )
    if query.ndim == 3:
        query, key, lse = query[None], key[None], None if lse is None else lse[None]
    return Layer(name, query, key, lse, {**options, **of_layer})


def _of_weights(name: str, weights: Any) -> Layer:
    """Weights as a layer with their logarithms as scores, for functions that read queries and keys."""
    weights = jnp.asarray(weights, jnp.float32)
    weights = weights[None] if weights.ndim == 3 else weights
    if weights.ndim != 4:
        raise ValueError(f"{name}: weights must be [B,N,T,S] or [N,T,S], got shape {list(weights.shape)}")
    B, N, T, S = weights.shape
    most = float(weights.sum(-1).max()) if weights.size else 0.0
    if not (bool((weights >= 0).all()) and most < 1.05):
        raise ValueError(
            f"{name}: weights must be at least 0, and those of a query must sum to at most 1; these sum to {most:.3g}. "
            "For queries and keys pass {name: (query, key, lse)}"
        )
    seen = weights > 0
    lse = jnp.where(seen.any(-1), 0.0, -jnp.inf).swapaxes(1, 2)
    bias = jnp.log(jnp.where(seen, weights, 1.0))
    return Layer(name, jnp.zeros((B, T, N, 1)), jnp.zeros((B, S, N, 1)), lse, {"bias": bias, "mask": seen})
