"""Returns what the heads of every layer of a ``Transformer`` read and write (``look``)."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn import heads
from jattn.interop._transformer import Transformer, layer_options


def look(model: Transformer, tokens: ArrayLike, **options: Any) -> list[dict[str, Any]]:
    """Returns what the heads of every layer read and wrote, and the options that reproduce their weights.

    It takes one forward pass, compiled once per model and shape.

    Args:
        model: a model of any family.
        tokens: integers ``[B,T]``.
        options: keywords of the model's call, such as ``valid`` or ``per_layer``; not ``cache``.

    Returns:
        A list with one dict per layer. It has ``query [B,T,N,H]``, ``key [B,T,K,H]``, ``value [B,T,K,H]``,
        ``lse [B,T,N]`` and ``z [B,T,N,H]``, and whichever of the options ``is_causal``, ``mask``,
        ``local_window_size``, ``score_mod``, ``scale`` and ``bias`` the layer has, for ``heads.statistics`` and
        ``fold_weights``. The mask hides the padding given by ``valid``; query and key include ``input_positions``.

    Raises:
        ValueError: a ``patch`` has a ``"pattern"``, which mixes the weights of two queries and keys; ``tokens`` or
            options do not match the model.
        TypeError: ``cache`` or an option unknown to the model is given.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> for layer in jattn.interop.look(model, jnp.array([[3, 1, 4]])):
        ...     options = {name: x for name, x in layer.items() if name not in ("query", "key", "value", "lse", "z")}
        ...     seen = jattn.heads.statistics(layer["query"], layer["key"], lse=layer["lse"], **options)
        ...     print(options, seen["entropy"].shape)
        {'is_causal': True} (1, 2)
        {'is_causal': True} (1, 2)
    """
    if options.get("cache") is not None:
        raise TypeError("cache: look sees whole sequences; pass all tokens, and valid= for padding")
    config, per_layer = model.config, options.get("per_layer") or [{}] * model.config.num_layers
    shared = {name: x for name, x in options.items() if name not in ("per_layer", "valid", "token_types")}
    every = [{"is_causal": config.causal, "scale": config.scale, **shared, **layer} for layer in per_layer]
    if any("pattern" in (layer.get("patch") or {}) for layer in every):
        raise ValueError("patch['pattern'] mixes the weights of two queries and keys, which look cannot return")
    for name in {"valid", "token_types"} & options.keys():
        options[name] = None if options[name] is None else jnp.asarray(options[name])
    leaves, structure = jax.tree.flatten(options)
    is_array = tuple(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)
    fixed = tuple(None if array else leaf for leaf, array in zip(leaves, is_array, strict=True))
    graph, state = nnx.split(model)
    arrays = [leaf for leaf, array in zip(leaves, is_array, strict=True) if array]
    sown = _sown(graph, structure, fixed, is_array, state, jnp.asarray(tokens), arrays)
    valid = options.get("valid")
    valid = None if valid is None else jnp.asarray(valid, bool)
    calls = (layer_options(config, layer, local, valid) for layer, local in zip(every, config.is_local, strict=True))
    return [{**arrays, **_score_options(model, call)} for arrays, call in zip(sown, calls, strict=True)]


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _sown(
    graph: Any, structure: Any, fixed: tuple, is_array: tuple[bool, ...], state: Any, tokens: Array, arrays: list[Array]
) -> list[dict[str, Array]]:
    rest = iter(arrays)
    both = zip(fixed, is_array, strict=True)
    options = structure.unflatten([next(rest) if array else leaf for leaf, array in both])
    watch = nnx.capture(lambda model: model(tokens, sow_heads=True, **options), nnx.Intermediate)
    return heads.collect(watch(nnx.merge(graph, state))[1])


def _score_options(model: Transformer, call: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``fold_weights`` that a layer has, taken from those of its attention call."""
    mask = call.get("mask")
    options = {
        "mask": mask if mask is None or callable(mask) else jnp.asarray(mask, bool),
        "score_mod": model.layers.attention.score_mod if call.get("score_mod") is None else call["score_mod"],
        **{name: call.get(name) for name in ("is_causal", "local_window_size", "scale", "bias")},
    }
    return {name: x for name, x in options.items() if x is not None}
