"""Handles the arguments of Flax's ``MultiHeadAttention`` and ``attention_fn`` for both the NNX and Linen modules."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jaxtyping import Array, ArrayLike

from jattn._core.call import softmax_dtype
from jattn._mods.arrays import Length
from jattn._mods.keywords import unknown_keyword
from jattn._mods.validation import check_array
from jattn.cache import KVCache, append, nan_if_overflowed, to_flax
from jattn.multi_head import CallOptions, attend_heads, common_dtype, for_tokens, one_batch_axis, wants_statistics

# An ``attention_fn`` of Flax's modules: ``(query, key, value, **Flax's keywords) -> [..., T, N, D]``.
AttentionFunction = Callable[Concatenate[Array, Array, Array, ...], Array]


def _restored(cache: KVCache, saved: dict[str, Any]) -> KVCache:
    """The saved cache, in ``flax.serialization``'s structure; ``cache`` tells whether it is rolling or sharded."""
    names = ("key", "value", "length")
    if saved.get("first_tokens", 0) != cache.first_tokens:
        raise ValueError(
            f"the cache was saved with first_tokens={saved.get('first_tokens', 0)}, but is restored into one with "
            f"first_tokens={cache.first_tokens}"
        )
    if cache.sharding is None:
        parts = {name: jnp.asarray(saved[name]) for name in names}
    else:
        parts = {name: jax.device_put(saved[name], getattr(cache, name).sharding) for name in names}
    return dataclasses.replace(cache, **parts)


def _saved(cache: KVCache) -> dict[str, Any]:
    saved = {"key": cache.key, "value": cache.value, "length": cache.length}
    return saved | ({"first_tokens": cache.first_tokens} if cache.first_tokens else {})


# Here rather than next to the class, so that `import jattn` does not import Flax.
serialization.register_serialization_state(KVCache, _saved, _restored)


def attend_as_flax(
    query: Array,
    key: Array,
    value: Array,
    *,
    dtype: Any,
    mask: Any,
    deterministic: bool,
    dropout_rate: float,
    dropout_rng: Any,
    input_positions: ArrayLike | None = None,
    **options: Any,
) -> Any:
    """``attend_heads`` with Flax's arguments: a mask array of any dtype, and dropout unless ``deterministic``.

    ``input_positions`` apply to ``position`` only, as in Flax. Masks, score functions and dropout see slots, so that
    document tables and windows stay valid when positions restart. If the numbers of keys and queries differ,
    ``input_positions`` also locate the queries among the keys. ``options`` and the result are the same as for
    ``attend_heads``.
    """
    query, key, value = common_dtype(query, key, value, dtype)
    if deterministic or dropout_rate == 0.0:
        dropout_rate, dropout_rng = 0.0, None
    counts_itself = options.get("cache") is not None and options["cache"].first_tokens  # which is an error
    if input_positions is not None and key.shape[-3] == query.shape[-3] and not counts_itself:
        position = for_tokens(options.get("position"), query.shape[-3], options.get("cache"))
        options["position"] = _at_positions(position, input_positions, query.shape[:-2])
    elif input_positions is not None:
        options["query_positions"] = input_positions
    if mask is not None and not callable(mask):
        mask = jnp.asarray(mask, bool)
    return attend_heads(query, key, value, mask=mask, dropout_rate=dropout_rate, dropout_rng=dropout_rng, **options)


def _at_positions(
    position: Callable[[Array, Array], Array] | None, positions: ArrayLike, axes: tuple[Length, ...]
) -> Callable[[Array, Any], Array]:
    """``position`` at these positions, ``[T]`` or ``[..., T]`` of the ``axes``, in place of the slots."""
    if position is None:
        raise ValueError(
            "input_positions are for position=, such as Rotary(), but this layer has position=None. Masks and score "
            "functions see slots; jattn.dot_product_attention takes query_positions= and kv_positions= for them"
        )
    *lead, T = axes
    positions = jnp.asarray(one_batch_axis(positions, tuple(lead), 1))
    shapes = [(T,), *([(math.prod(lead), T), (1, T)] if lead else [])]
    check_array("input_positions", positions, f"integers [{T}] or {list(axes)}", jnp.integer, *shapes)
    return lambda x, slots: position(x, positions)


def weights_as_flax(
    query: Array, key: Array, *, deterministic: bool, dropout_rate: float, dropout_rng: Any, **options: Any
) -> tuple[Array, Array]:
    """The weights ``[..., N, T, S]`` of ``attend_as_flax`` before and after dropout, in at least float32.

    ``options`` are the same as for ``attend_as_flax``.
    """
    off: dict[str, Any] = {"deterministic": True, "dropout_rate": 0.0, "dropout_rng": None}
    _, weights = attend_as_flax(query, key, key, return_weights=True, **off, **options)
    if deterministic or dropout_rate == 0.0:
        return weights, weights
    if dropout_rate == 1.0:
        return weights, jnp.zeros_like(weights)
    # With equal weights and identity values, the output shows which weights are kept.
    alike = {"dtype": options["dtype"], "broadcast_dropout": options["broadcast_dropout"], "mask": None}
    if "input_positions" in options:
        alike |= {"input_positions": options["input_positions"], "position": lambda x, positions: x}
    on: dict[str, Any] = {"deterministic": False, "dropout_rate": dropout_rate, "dropout_rng": dropout_rng}
    length = key.shape[-3]
    identity = jnp.broadcast_to(jnp.eye(length, dtype=key.dtype)[:, None], (*key.shape[:-1], length))
    kept = attend_as_flax(jnp.zeros_like(query), jnp.zeros_like(key), identity, **on, **alike) != 0
    return weights, jnp.where(jnp.swapaxes(kept, -2, -3), weights / (1.0 - dropout_rate), 0.0)


def own_options(module: Any) -> dict[str, Any]:
    """The module options that an ``attention_fn`` takes under the same names."""
    return {name: getattr(module, name) for name in ("dropout_rate", "broadcast_dropout", "dtype", "precision")}


def call_options(options: Mapping[str, Any], score_mod: Any) -> dict[str, Any]:
    """The checked options of a module's call, with the module's own ``score_mod`` unless another is given."""
    known = CallOptions.__optional_keys__
    for name in options.keys() - known:
        meant = unknown_keyword(name, ["mask", "is_causal", "sow_weights", *known])
        raise TypeError(f"{meant}; in addition to Flax's own, a call takes {', '.join(sorted(known))}")
    return {**options, "score_mod": score_mod if options.get("score_mod") is None else options["score_mod"]}


def to_learn(mod: Any) -> dict[str, Any]:
    """The float arrays of a score function as nested dicts, keyed by the names of their fields."""
    learned: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(mod):
        if is_float_array(leaf):
            *parts, name = _names(path)
            place = functools.reduce(lambda place, part: place.setdefault(part, {}), parts, learned)
            place[name] = jnp.array(leaf)  # a copy: parameters may be donated, and two layers may start from one array
    return learned


def with_learned(mod: Any, learned: Mapping[str, Any]) -> Any:
    """``mod`` with the arrays of ``to_learn`` replaced by their learned values."""

    def put(path: tuple, leaf: Any) -> Any:
        return (
            functools.reduce(lambda place, name: place[name], _names(path), learned) if is_float_array(leaf) else leaf
        )

    return jax.tree_util.tree_map_with_path(put, mod)


def _names(path: tuple) -> list[str]:
    return [jax.tree_util.keystr((key,), simple=True) for key in path]


def is_float_array(x: Any) -> bool:
    """Whether ``x`` is a floating-point array and therefore learned."""
    return isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, jnp.floating)


class Sow(NamedTuple):
    """The values that a call sows into a collection of its module."""

    weights: bool
    heads: bool
    statistics: Sequence[str] | Mapping[str, Any] = ()


def attend_and_sow(
    module: Any, collection: Any, sow: Sow, in_float32: bool, /, *qkv: Array, **options: Any
) -> tuple[Array, KVCache | None]:
    """``attend_as_flax(*qkv, **options)``: its output, in at least float32 if ``in_float32``, and its cache.

    Weights are sown in the output's dtype.
    """
    requested = {"return_weights": sow.weights, "return_statistics": sow.statistics, "return_heads": sow.heads}
    results = attend_as_flax(*qkv, **requested, **options)
    z, *others = results if isinstance(results, tuple) else (results,)
    if in_float32:
        z = z.astype(softmax_dtype(z))
    if sow.weights:
        module.sow(collection, "attention_weights", others.pop(0).astype(z.dtype))
    if wants_statistics(sow.statistics):
        module.sow(collection, "attention_statistics", others.pop(0))
    if sow.heads:
        module.sow(collection, "attention_heads", others.pop(0))
    return z, others.pop() if others else None


def join_inputs(inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None) -> tuple[Array, Array]:
    """Flax's defaults for ``inputs_k`` and ``inputs_v``."""
    if inputs_k is None:
        if inputs_v is not None:
            raise ValueError("inputs_v is given without inputs_k: pass the shared input as inputs_k and omit inputs_v")
        return inputs_q, inputs_q
    return inputs_k, inputs_k if inputs_v is None else inputs_v


def choose_deterministic(dropout_rate: float, at_call: bool | None, at_construction: bool | None) -> bool:
    """Whether dropout is off. The call overrides the constructor; one of them must set it."""
    if dropout_rate == 0.0:
        return True
    chosen = at_construction if at_call is None else at_call
    if chosen is None:
        raise ValueError("dropout_rate is not 0: pass deterministic=True or False to the constructor or the call")
    return chosen


def head_dims(num_heads: int, num_kv_heads: int | None, qkv_features: int, value_dim: int | None):
    """``(num_kv_heads, head_dim, value_dim)``. Raises ValueError unless they divide evenly."""
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if qkv_features % num_heads or num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"qkv_features ({qkv_features}) must be a multiple of num_heads ({num_heads}), and num_heads a multiple "
            f"of num_kv_heads ({num_kv_heads})"
        )
    head_dim = qkv_features // num_heads
    return num_kv_heads, head_dim, head_dim if value_dim is None else value_dim


def choose_norm(normalize_qk: bool, qk_norm: str | None) -> str | None:
    """``"layer"``, ``"rms"`` or None; ``normalize_qk`` is Flax's name for ``"layer"``."""
    if qk_norm not in (None, "layer", "rms"):
        raise ValueError(f"qk_norm must be None, 'layer' or 'rms', got {qk_norm!r}")
    if normalize_qk and qk_norm == "rms":
        raise ValueError("normalize_qk=True means qk_norm='layer', but qk_norm is 'rms'; omit normalize_qk")
    return "layer" if normalize_qk else qk_norm


def decode_as_flax(cache: KVCache, key: Array, value: Array, mask: Any):
    """Flax's protocol for an ``attention_fn`` that takes no cache: ``(key, value, mask, cache)``.

    Key and value contain all slots, and the mask array lets each token see slots up to its own.
    """
    if callable(mask):
        raise ValueError("a custom attention_fn decodes with Flax's mask arrays; pass the mask as an array")
    lead, tokens = key.shape[:-3], key.shape[-3]
    appended = append(cache, *(x.reshape(math.prod(lead), *x.shape[-3:]) for x in (key, value)))
    seen = KVCache(appended.key, nan_if_overflowed(appended, appended.value), appended.length)
    key, value, _ = to_flax(seen, lead)
    written = jnp.arange(cache.capacity)[None, :] <= cache.next_positions(tokens)[:, None]
    written = jnp.broadcast_to(written, (*lead, 1, *written.shape))
    return key, value, written if mask is None else jnp.logical_and(mask, written), appended


def refuse_extras(attention_fn: AttentionFunction, **extras: Any) -> None:
    """Raises if given options beyond Flax's keywords, which a custom ``attention_fn`` would not receive."""
    names = [name for name, value in extras.items() if value is not None]
    if names:
        raise ValueError(
            f"{', '.join(names)}: only jattn's own attention_fn takes them, but this module calls "
            f"{getattr(attention_fn, '__name__', attention_fn)!r}, which gets only Flax's keywords"
        )
