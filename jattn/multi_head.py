"""The multi-head layer: what happens between the projections, and the whole of it as a pure function.

``z_i = attention(x W_i^Q, x_kv W_i^K, x_kv W_i^V)`` for each head i, ``y = sum_i z_i W_i^O`` (which is what
``concat(z_1 .. z_N) W^O`` comes to). Source: https://arxiv.org/abs/1706.03762, section 3.2.2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jattn.api import attention_weights, dot_product_attention
from jattn.attention import softmax_dtype
from jattn.cache import KVCache, append, seen_of
from jattn.heads import statistics
from jattn.kernels.shards import dot_general
from jattn.request import AttendOptions
from jattn.sharding import HeadParallel, Ring
from jattn.tables import namespace

Params = dict[str, dict[str, Array]]


class LayerOptions(AttendOptions, total=False):
    """What ``multi_head_attention`` hands on to ``attend_heads``."""

    position: Callable[[Array, Array], Array] | None
    query_positions: ArrayLike | None
    kv_positions: ArrayLike | None
    head_gate: ArrayLike | None
    head_fill: ArrayLike | None
    held: tuple[Array, Array] | None
    cache: KVCache | None
    valid: ArrayLike | None
    return_statistics: Sequence[str] | Mapping[str, Any]
    return_heads: bool


# what weights do not depend on
_OUTPUT_ONLY = ("implementation", "dropout_rate", "dropout_rng", "broadcast_dropout")
_NOT_FOLDED = (*_OUTPUT_ONLY, "sinks")  # sinks are in the lse


def attend_heads(
    query: Array,
    key: Array,
    value: Array,
    *,
    position: Callable[[Array, Array], Array] | None = None,
    query_positions: ArrayLike | None = None,
    kv_positions: ArrayLike | None = None,
    head_gate: ArrayLike | None = None,
    head_fill: ArrayLike | None = None,
    held: tuple[Array, Array] | None = None,
    cache: KVCache | None = None,
    valid: ArrayLike | None = None,
    return_weights: bool = False,
    return_statistics: Sequence[str] | Mapping[str, Any] = (),
    return_heads: bool = False,
    **given: Unpack[AttendOptions],
) -> Any:
    """All that stands between the projections of a multi-head layer: positions, cache, attention, gates.

    Args:
        query, key, value: ``[B,T,N,H]``, ``[B,S,K,H]``, ``[B,S,K,D]``; instead of B there may be none or several axes.
        position: ``(x, positions) -> x``, such as ``Rotary()``; applied to query and key.
        query_positions, kv_positions: ``[T]`` or ``[B,T]``, ``[S]`` or ``[B,S]``; ``arange`` by default.
        head_gate: ``[N]``, ``[B,N]`` or ``[B,T,N]``: what each head's output is multiplied by; 0 switches it off.
        head_fill: with ``head_gate``, what takes the place of the output that the gate leaves out,
            ``gate * z + (1 - gate) * fill``; broadcasts to z ``[B,T,N,D]``.
        held: ``(query, key)`` as ``return_heads`` gave them: the weights are theirs, the values those of this call.
        cache: what came before. Keys and values, as many as queries, are appended to it, at the positions that follow,
            and the queries attend to all that it holds (within ``mask``; ``is_causal`` where a chunk has several).
            ``query_positions``, if given, are what ``position`` alone sees.
        valid: bool ``[B,T]``, with ``cache``: which tokens of the chunk are real, as in ``append``.
        return_weights: also return the attention weights; the output's bits stay the same.
        return_statistics: also return these statistics of every head (``jattn.heads.statistics``): their names, or a
            dict of that function's arguments (``names``, ``tokens``, ``eligible``); as above.
        return_heads: also return ``{"query", "key", "lse", "z"}``, which ``jattn.heads`` works on: the first two as
            they meet (with positions), z as it leaves (with gates); as above.
        given: the options of ``dot_product_attention``.

    Returns:
        ``z [B,T,N,D]``; with ``return_weights``, ``return_statistics``, ``return_heads`` or ``cache`` a tuple, where
        the weights ``[B,N,T,S]``, the statistics ``{name: [B,N]}``, that dict and the new cache follow, in this order.
    """
    lead = query.shape[:-3]
    options: dict[str, Any] = {**given}
    if len(lead) != 1 and (lead or cache is not None):  # Flax's modules take any number of batch axes; here one
        query, key, value = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in (query, key, value))
        query_positions, kv_positions = (_one_batch_axis(x, lead, 1) for x in (query_positions, kv_positions))
        for name in ("mask", "bias"):
            options[name] = _one_batch_axis(_all_axes(options.get(name), len(lead) + 3), lead, 3)
        if head_gate is not None and jnp.ndim(head_gate) > max(len(lead), 1):  # [N] serves every sequence
            head_gate = _one_batch_axis(head_gate, lead, jnp.ndim(head_gate) - len(lead))
        head_fill, valid = _one_batch_axis(head_fill, lead, 3), _one_batch_axis(valid, lead, 1)
    here: Any = None
    how = options.get("implementation")
    if isinstance(how, Ring) and how.layout != "contiguous":  # positions are the tokens', where none are given
        if cache is not None:
            raise ValueError(f"cache is filled in the tokens' own order, and the ring's layout is {how.layout!r}")
        query_positions = how.slots(query.shape[1]) if query_positions is None else query_positions
        kv_positions = how.slots(key.shape[1]) if kv_positions is None else kv_positions
    if cache is not None:
        here = cache.next_positions(query.shape[1], valid)
        query_positions = kv_positions = here if query_positions is None else query_positions
    if position is not None:
        query = position(query, _or_arange(query_positions, query))
        key = position(key, _or_arange(kv_positions, key))
    if cache is not None:
        chunk = (key, value)
        appended = append(cache, *chunk, valid=valid)
        key, value, seen = seen_of(cache, appended, *chunk, here, options.get("mask"))
        query, key, value = common_dtype(query, key, value, None)
        cache, query_positions, kv_positions, options = appended, here, None, options | seen
    options.setdefault("query_positions", query_positions)
    options.setdefault("kv_positions", kv_positions)
    if held is not None:
        query, key = _held(held, query, key, lead)
    z, lse = dot_product_attention(query, key, value, return_residual=True, **options)
    if head_gate is not None:
        z = _through_gate(z, _gate(head_gate, z), head_fill)
    elif head_fill is not None:
        raise ValueError("head_fill without head_gate: the gate says which heads it takes the place of")
    looks = _looks(query, key, lse, z, lead, options, return_weights, return_statistics, return_heads)
    results = [z.reshape(*lead, *z.shape[-3:]), *looks]
    if cache is not None:
        results.append(cache)
    return results[0] if len(results) == 1 else tuple(results)


def _looks(
    query: Array,
    key: Array,
    lse: Array,
    z: Array,
    lead: tuple[int, ...],
    options: dict[str, Any],
    weights: bool,
    names: Sequence[str] | Mapping[str, Any],
    parts: bool,
) -> list[Any]:
    """What ``attend_heads`` is asked to return beside the output, of its ``weights``, statistics and ``parts``."""
    results: list[Any] = []
    if weights:
        found = attention_weights(query, key, **{k: v for k, v in options.items() if k not in _OUTPUT_ONLY})
        results.append(found.reshape(*lead, *found.shape[-3:]))
    if asks_for(names):
        folded = {name: option for name, option in options.items() if name not in _NOT_FOLDED}
        how = options.get("implementation")
        if isinstance(how, Ring | HeadParallel):
            folded["implementation"] = how
        asked = names if isinstance(names, Mapping) else {"names": names}
        of_rows = {name: _one_batch_axis(asked[name], lead, 1) for name in ("tokens", "eligible") if name in asked}
        found = statistics(query, key, lse=lse, **{**asked, **of_rows}, **folded)
        results.append(jax.tree.map(lambda x: x.reshape(*lead, *x.shape[z.ndim - 3 :]), found))
    if parts:
        found = {"query": query, "key": key, "lse": lse, "z": z}
        results.append({name: x.reshape(*lead, *x.shape[z.ndim - 3 :]) for name, x in found.items()})
    return results


def init_multi_head(
    key: Array,
    model_dim: int,
    num_heads: int,
    *,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    value_dim: int | None = None,
    kv_model_dim: int | None = None,
    use_bias: bool = False,
    dtype: Any = jnp.float32,
) -> Params:
    """Parameters for ``multi_head_attention``, in the tree, names and shapes of Flax's modules.

    ``query/kernel [M,N,H]``, ``key/kernel [M,K,H]``, ``value/kernel [M,K,D]``, ``out/kernel [N,D,M]``; with
    ``use_bias`` also ``bias [N,H]``, ``[K,H]``, ``[K,D]``, ``[M]``, zero. Kernels are LeCun normal.

    Args:
        key: a JAX random key.
        model_dim: M, of the input and the output.
        num_heads: N.
        num_kv_heads: K, a divisor of N; N by default.
        head_dim: H, of query and key; ``model_dim / num_heads`` by default.
        value_dim: D; ``head_dim`` by default.
        kv_model_dim: M of ``x_kv`` where that differs (cross-attention).

    Raises:
        ValueError: a number is no positive integer, or does not divide as it must.
    """
    sizes = {"model_dim": model_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
             "value_dim": value_dim, "kv_model_dim": kv_model_dim}  # fmt: skip
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int | np.integer) or size < 1):
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    if head_dim is None and model_dim % num_heads:
        raise ValueError(f"model_dim {model_dim} is no multiple of num_heads {num_heads}; give head_dim")
    head_dim = model_dim // num_heads if head_dim is None else head_dim
    value_dim = head_dim if value_dim is None else value_dim
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(f"num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}")
    kv_model_dim = model_dim if kv_model_dim is None else kv_model_dim
    shapes = {
        "query": (model_dim, num_heads, head_dim),
        "key": (kv_model_dim, num_kv_heads, head_dim),
        "value": (kv_model_dim, num_kv_heads, value_dim),
        "out": (num_heads, value_dim, model_dim),
    }
    params = {}
    for (name, shape), subkey in zip(shapes.items(), jax.random.split(key, 4), strict=True):
        axes = {"in_axis": (0, 1), "out_axis": 2} if name == "out" else {"in_axis": 0, "out_axis": (1, 2)}
        params[name] = {"kernel": jax.nn.initializers.lecun_normal(**axes)(subkey, shape, dtype)}
        if use_bias:
            params[name]["bias"] = jnp.zeros(shape[2:] if name == "out" else shape[1:], dtype)
    return params


def multi_head_attention(
    params: Params,
    x: Array,
    x_kv: Array | None = None,
    *,
    return_weights: bool = False,
    **options: Unpack[LayerOptions],
) -> Any:
    """``y = sum_i attention(x W_i^Q, x_kv W_i^K, x_kv W_i^V) W_i^O``: multi-head attention, self or cross.

    Args:
        params: as from ``init_multi_head`` (or of a Flax module).
        x: ``[B,T,M]`` or ``[T,M]``; asks.
        x_kv: ``[B,S,M']`` or ``[S,M']``; is asked; ``x`` by default.
        return_weights: also return the attention weights, ``[B,N,T,S]``.
        options: ``precision``, of all products; those of ``attend_heads`` (``position``, ``head_gate``, ``cache``, ...)
            and of ``dot_product_attention`` (``mask``, ``is_causal``, ``score_mod``, ``sinks``, ...).

    Returns:
        ``y [B,T,M]``, with ``return_weights`` ``(y, weights)``, with ``cache`` ``(y, cache)``, with both all three.

    Example:
        ``params = init_multi_head(jax.random.key(0), 64, 8); y = multi_head_attention(params, x, is_causal=True)``
    """
    x_kv, precision = x if x_kv is None else x_kv, options.get("precision")
    query = project(params["query"], x, precision)
    key, value = (project(params[name], x_kv, precision) for name in ("key", "value"))
    z = attend_heads(query, key, value, return_weights=return_weights, **options)
    z, *others = z if isinstance(z, tuple) else (z,)
    dims = ((z.ndim - 2, z.ndim - 1), (0, 1)), ((), ())
    y = dot_general(z, params["out"]["kernel"], dims, precision=precision)
    if "bias" in params["out"]:
        y += params["out"]["bias"].reshape((1,) * (y.ndim - 1) + (-1,))
    return (y, *others) if others else y


def project(params: dict[str, Array], x: Array, precision: Any = None) -> Array:
    """``x [..., M] -> [..., N, H]``: ``x W_i`` under vmap over heads, which compiles to one product for all."""
    if params["kernel"].shape[0] != x.shape[-1]:
        raise ValueError(f"the input's last axis must be {params['kernel'].shape[0]}, as in the kernel, got {x.shape}")

    def one_head(kernel):
        return jnp.matmul(x, kernel, precision=precision)

    projected = jax.vmap(one_head, in_axes=1, out_axes=-2)(params["kernel"])
    if "bias" in params:
        projected += params["bias"].reshape((1,) * (x.ndim - 1) + params["bias"].shape)
    return projected


def _or_arange(positions: ArrayLike | None, x: Array) -> Array:
    return jnp.arange(x.shape[-3]) if positions is None else jnp.asarray(positions)


def _one_batch_axis(x: Any, lead: tuple[int, ...], trailing: int) -> Any:
    """An array ``[*lead, ...]`` with its batch axes joined; what has none, or is a function, as it is."""
    if x is None or callable(x) or jnp.ndim(x) <= trailing:
        return x
    xp = namespace(x)  # what came as a NumPy array stays one, and is static
    x = xp.asarray(x)
    batch = x.shape[:-trailing] if trailing else x.shape
    if len(batch) != len(lead) or any(size not in (1, full) for size, full in zip(batch, lead, strict=True)):
        raise ValueError(f"expected batch axes {lead} and {trailing} more, or {trailing} alone, got {list(x.shape)}")
    return xp.broadcast_to(x, (*lead, *x.shape[-trailing:])).reshape(math.prod(lead), *x.shape[-trailing:])


def _all_axes(x: Any, rank: int) -> Any:
    """An array whose missing leading axes are 1, as broadcasting has it; one for all heads and sequences as it is."""
    if x is None or callable(x) or jnp.ndim(x) <= 3:
        return x
    return jnp.reshape(x, (1,) * (rank - jnp.ndim(x)) + jnp.shape(x))


def _gate(head_gate: ArrayLike, z: Array) -> Array:
    """``head_gate`` as ``[B|1, T|1, N, 1]`` (or without B)."""
    gate = jnp.asarray(head_gate)
    *batch, T, N, _ = z.shape
    if gate.shape == (N,):
        gate = gate.reshape((1,) * (z.ndim - 2) + (N,))
    elif batch and gate.shape == (*batch, N):
        gate = gate[:, None, :]
    elif gate.shape != (*batch, T, N):
        raise ValueError(
            f"head_gate must be [N] = [{N}], [B, N] or [B, T, N], got {list(gate.shape)} for outputs {list(z.shape)}"
        )
    return gate[..., None].astype(softmax_dtype(z))


def asks_for(statistics: Sequence[str] | Mapping[str, Any]) -> bool:
    """Are there names of statistics, or is there a dict of arguments, which may leave the names to the function?"""
    return isinstance(statistics, Mapping) or bool(statistics)


def _through_gate(z: Array, gate: Array, fill: ArrayLike | None) -> Array:
    """In float32 at least: a gate's derivative is a sum over queries and dimensions."""
    wide = z.astype(gate.dtype)
    if fill is None:
        return (wide * gate).astype(z.dtype)
    try:
        fill = jnp.broadcast_to(jnp.asarray(fill), z.shape).astype(gate.dtype)
    except ValueError:
        raise ValueError(
            f"head_fill must broadcast to the heads' outputs {list(z.shape)}, got {list(jnp.shape(fill))}"
        ) from None
    return (wide * gate + fill * (1 - gate)).astype(z.dtype)


def _held(held: tuple[Array, Array], query: Array, key: Array, lead: tuple[int, ...]) -> tuple[Array, Array]:
    """The held query and key, with the batch axes of those whose place they take."""
    found = []
    for name, one, other in zip(("query", "key"), held, (query, key), strict=True):
        wanted = (*lead, *other.shape[-3:])
        if jnp.shape(one) != wanted:
            raise ValueError(f"the held {name} must have the shape {list(wanted)}, got {list(jnp.shape(one))}")
        found.append(jnp.reshape(one, other.shape).astype(other.dtype))
    return found[0], found[1]


def common_dtype(query: Array, key: Array, value: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """The three in one dtype: ``dtype``, or what they promote to."""
    if dtype is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(query, key, value)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)
