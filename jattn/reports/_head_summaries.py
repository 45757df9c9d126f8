"""Computes what a report shows of a layer: all weights for short sequences, each query's largest for long ones."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn import heads
from jattn.api import dot_product_attention, fold_weights
from jattn.reports._kept_weights import kept
from jattn.reports._read_heads import Layer

OF_TEXT = ("previous_token", "current_token", "duplicate_token", "induction", "distance")  # for self-attention only
NAMES = ("entropy", "max_weight", "first_token", *OF_TEXT)


class Looked(NamedTuple):
    """What all heads do on some sequences: NumPy arrays, with ``h`` heads over all layers and B drawn sequences.

    weights: ``[B,h,T,S]``, or None: then the largest weights of each query and their keys, ``top [B,h,T,k]`` and
        ``keys [B,h,T,k]``, and ``coarse [B,h,Q,K]``.
    length: S.
    numbers: statistics, ``{name: [h]}``, means over all queries of all sequences.
    """

    weights: np.ndarray | None
    top: np.ndarray | None
    keys: np.ndarray | None
    coarse: np.ndarray | None
    length: int
    numbers: dict[str, np.ndarray]


def look(layers: Sequence[Layer], ids: np.ndarray | None, lengths: Sequence[int], of_text: bool) -> Looked:
    """Looks at every layer; ``lengths`` holds the numbers of tokens; ``ids [B,T]``, or None, identify equal tokens.

    Raises:
        ValueError: a layer's weights do not sum to 1.
    """
    B, _, T, S = layers[0].shape
    drawn, k, side = kept(B, T * sum(layer.shape[1] for layer in layers), T, S)
    names = [name for name in NAMES if of_text or name not in OF_TEXT]
    names = tuple(name for name in names if ids is not None or name not in heads.OF_TOKENS)
    eligible = np.arange(T) < np.asarray(lengths)[:, None]
    tokens = None if ids is None or not set(names) & set(heads.OF_TOKENS) else ids
    of_layers = []
    for layer in layers:
        arrays, static = _split(layer.options)
        arguments = layer.query, layer.key, layer.lse, tokens, eligible, arrays
        parts = jax.tree.map(np.asarray, _look(*arguments, static=static, k=k, side=side, names=names))
        _check_sums(layer, parts.pop("sums"))
        of_layers.append(parts)
    drawn_of = [name for name in of_layers[0] if name != "numbers"]
    together = {name: np.concatenate([parts[name][:drawn] for parts in of_layers], 1) for name in drawn_of}
    numbers = {name: np.concatenate([_mean(*parts["numbers"][name]) for parts in of_layers]) for name in names}
    return Looked(*(together.get(name) for name in ("weights", "top", "keys", "coarse")), length=S, numbers=numbers)


def _split(options: Any) -> tuple[dict[str, Any], tuple]:
    """Options passed to a compiled function as arguments, and options for which it is compiled."""
    arrays = {
        name: value
        for name, value in options.items()
        if all(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))
    }
    return arrays, tuple(sorted((name, value) for name, value in options.items() if name not in arrays))


@functools.partial(jax.jit, static_argnames=("static", "k", "side", "names"))
def _look(
    query: Array, key: Array, lse: Array | None, tokens: Array | None, eligible: Array, arrays: dict[str, Any], *,
    static: tuple, k: int, side: int, names: tuple[str, ...],
) -> dict[str, Any]:  # fmt: skip
    options = {**arrays, **dict(static)}
    if lse is None:
        no_value = jnp.zeros((*key.shape[:-1], 0), key.dtype)
        lse = dot_product_attention(query, key, no_value, return_residual=True, **options)[1]
    means = heads.statistics(query, key, lse=lse, tokens=tokens, names=names, eligible=eligible, **options)
    numbers = {name: (means[name], means["support"][name]) for name in names}
    T, S = query.shape[1], key.shape[1]
    if not k:
        weights = fold_weights(_put, jnp.zeros((T, S)), query, key, lse=lse, **options)
        return {"weights": weights, "sums": weights.sum(-1), "numbers": numbers}
    sums = fold_weights(_add, jnp.zeros(T), query, key, lse=lse, **options)
    top = heads.top_pairs(query, key, k, lse=lse, **options)
    coarse = heads.coarse_weights(query, key, side, **options)
    return {"top": top.weight, "keys": top.key, "coarse": coarse, "sums": sums, "numbers": numbers}


def _put(carry: Array, weights: Array, q_idx: Array, kv_idx: Array) -> Array:
    return carry.at[q_idx, kv_idx].set(weights.astype(carry.dtype), mode="drop")


def _add(carry: Array, weights: Array, q_idx: Array, kv_idx: Array) -> Array:
    return carry.at[q_idx[:, 0]].add(weights.sum(1).astype(carry.dtype))


def _mean(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """``[N]``: the mean over the queries of all sequences, from means ``[B,N]`` over ``counts`` each; NaN over none."""
    sums = np.where(counts > 0, values * counts.astype(np.float64), 0.0).sum(0)
    return np.where(counts.sum(0) > 0, sums / np.maximum(counts.sum(0), 1), np.nan)


def _check_sums(layer: Layer, sums: np.ndarray) -> None:
    """Raises if the weights do not match the log-sum-exp, as when it comes from a call with a different mask."""
    most = float(np.nan_to_num(sums).max(initial=0.0))  # NaN in the input is shown, like NaN in the output
    if most > 1.05:
        raise ValueError(
            f"{layer.name}: the weights of a query sum to {most:.3g}, because its lse comes from a call with "
            "other options; pass the model's options: is_causal=True, mask=, score_mod=, scale=, ..."
        )
