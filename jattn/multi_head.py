"""Computes a multi-head layer: everything between the projections (``attend_heads``) and the whole layer.

``z_i = attention(x W_i^Q, x_kv W_i^K, x_kv W_i^V)`` for each head i, and ``y = sum_i z_i W_i^O``, which equals
``concat(z_1 .. z_N) W^O``. Source: https://arxiv.org/abs/1706.03762, section 3.2.2.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jattn._cache_positions import positions_within
from jattn._core.call import AttentionOptions, ModOptions, ScoreOptions
from jattn._mods.arrays import Length, namespace
from jattn.api import attend_in_stack, attention_weights, dot_product_attention
from jattn.cache import KVCache, append_chunk, nan_if_overflowed, stack_of, visible_keys
from jattn.heads import statistics
from jattn.heads._each_key import replace_each
from jattn.heads._gates import expand_gate, patched, replace_both, through_gate
from jattn.kernels import Implementation, OverDevices, ReducesWeights, Unsupported
from jattn.masks import MaskFunction
from jattn.positions import Rotary, at_length
from jattn.sharding._dot_general import dot_general
from jattn.sharding._head_parallel import OverMesh
from jattn.sharding._split_keys import for_cache

Params = dict[str, dict[str, Array]]


_WEIGHTS_OF_ALL = (
    "return_weights=True (sow_weights=True of the modules) does not work with {}, which divides the sequence: every "
    "device would hold all weights [B,N,T,S]. For numbers of each head use return_statistics= (sow_statistics=). For "
    "the weights of a few queries use return_heads=True (sow_heads=True), then attention_weights(query[:, slots], key, "
    "query_positions=...); for all weights, gather query and key, then attention_weights(query, key, ...)"
)


class CallOptions(ModOptions, total=False):
    """The options of ``attend_heads`` that jattn's Flax modules take at each call, in addition to Flax's own."""

    bias: ArrayLike | None
    local_window_size: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None
    head_gate: ArrayLike | None
    head_fill: ArrayLike | None
    frozen: tuple[Array, Array] | None
    patch: Mapping[str, Any] | None
    cache: KVCache | None
    valid: ArrayLike | None


class LayerOptions(AttentionOptions, CallOptions, total=False):
    """All options of ``attend_heads`` except ``return_weights``."""

    mask: ArrayLike | MaskFunction | None
    implementation: str | Implementation | None
    position: Callable[[Array, Array], Array] | None
    return_statistics: Sequence[str] | Mapping[str, Any]
    return_heads: bool


def attend_heads(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    position: Callable[[Array, Array], Array] | None = None,
    head_gate: ArrayLike | None = None,
    head_fill: ArrayLike | None = None,
    frozen: tuple[Array, Array] | None = None,
    patch: Mapping[str, Any] | None = None,
    cache: KVCache | None = None,
    valid: ArrayLike | None = None,
    implementation: str | Implementation | None = None,
    return_weights: bool = False,
    return_statistics: Sequence[str] | Mapping[str, Any] = (),
    return_heads: bool = False,
    **options: Unpack[AttentionOptions],
) -> Any:
    """Everything between the projections of a multi-head layer: positions, cache, attention, gates.

    Args:
        query, key, value: ``[B,T,N,H]``, ``[B,S,K,H]``, ``[B,S,K,D]``; any number of batch axes may replace B.
        bias: floats added to the scores; they broadcast to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        position: ``(x, positions) -> x``, such as ``Rotary()``; applied to query and key.
        head_gate: ``[N]``, ``[B,N]`` or ``[B,T,N]``; multiplies each head's output (0 switches it off).
        head_fill: with ``head_gate``, replaces the gated-off output: ``gate * z + (1 - gate) * fill``; broadcasts to
            z ``[B,T,N,D]``.
        frozen: ``(query, key)`` from ``return_heads`` of another call, which determine the weights; the values remain
            this call's.
        patch: ``{"query" | "key" | "value": (gate, fill)}``: ``gate * x + (1 - gate) * fill``, after positions are
            applied to query and key, with gates like ``head_gate`` (``[K]``, ``[B,K]`` or ``[B,S,K]`` for keys and
            values). ``{"pattern": (gate, (query, key))}`` mixes the weights with the weights of this query and key in
            the same way; None for either means this call's own. ``return_heads`` still returns this call's query, key
            and lse. ``{"each_key": (gate, fill)}``: ``z + sum_s (1 - gate_s) (z with key s alone replaced - z)``, in
            O(T + S) memory, differentiable only with respect to this gate. Applied after ``frozen``. To patch a head's
            output z, use ``head_gate`` and ``head_fill``.
        cache: a ``KVCache``. The keys and values, one per query, are appended at the next positions, and the queries
            attend to the whole cache (subject to ``mask``; pass ``is_causal`` for chunks of several tokens). With a
            cache, ``query_positions`` affect ``position`` only. For cross-attention, append an encoder's keys with a
            call without queries, then attend without keys. With a sharded cache, each device attends to its slots in
            place, with the named ``implementation``, if any; for a long prompt, pass a ``jattn.sharding.Ring``.
        valid: bool ``[B,S]``, only with ``cache``: which tokens of the chunk are real. Others take no slot or position.
        return_weights: also return the attention weights. The output stays bit-identical. Raises ``Unsupported`` if a
            ``jattn.sharding.Ring`` or ``Ulysses`` divides the sequence over devices.
        return_statistics: also return these statistics of every head (``jattn.heads.statistics``): names, or a dict of
            that function's arguments (``names``, ``tokens``, ``eligible``). The output stays bit-identical.
        return_heads: also return ``{"query", "key", "value", "lse", "z"}`` for ``jattn.heads``: query and key with
            positions applied, z with gates applied. The output stays bit-identical.
        implementation: a name or an object (see ``dot_product_attention``); None picks one.
        options: the other keywords of ``dot_product_attention``. Positions are 0, 1, 2, ... by default. Positions
            passed explicitly also apply to ``mask``, unless there is a ``cache``. For packed documents, see
            ``Segments``.

    Returns:
        ``z [B,T,N,D]``. With ``return_weights``, ``return_statistics``, ``return_heads`` or ``cache``, a tuple of z and
        the requested items, in this order: the weights ``[B,N,T,S]``, the statistics ``{name: [B,N]}``, the dict of
        heads, the new cache.
    """
    if valid is not None and cache is None:
        raise ValueError(
            "valid says which tokens of a chunk enter a cache, but cache is None; to mask padding pass "
            "mask=valid[:, None, None, :] or key_value_seq_lengths"
        )
    if return_weights and isinstance(implementation, OverDevices) and implementation.divides_length:
        raise Unsupported(_WEIGHTS_OF_ALL.format(type(implementation).__name__))
    if cache is not None and cache.sharding is not None and (implementation is None or isinstance(implementation, str)):
        implementation = for_cache(cache.sharding, implementation)
    lead = query.shape[:-3]
    arguments: dict[str, Any] = {"bias": bias, "mask": mask, "implementation": implementation, **options}
    if len(lead) != 1 and (lead or cache is not None):  # any number of batch axes, as in Flax
        query, key, value = (x.reshape(math.prod(lead), *x.shape[-3:]) for x in (query, key, value))
        for name in ("query_positions", "kv_positions"):
            arguments[name] = one_batch_axis(arguments.get(name), lead, 1)
        for name in ("mask", "bias"):
            arguments[name] = one_batch_axis(arguments[name], lead, 3)
        valid = one_batch_axis(valid, lead, 1)
    query, key, value, cache = _with_positions_and_cache(query, key, value, position, cache, valid, arguments)
    if frozen is not None:
        query, key = replace_both(frozen, query, key, lead)
    pattern = each_key = None  # a gate, and query and key; a gate, and keys
    if patch is not None:
        (query, key, value), pattern, each_key = patched(patch, {"query": query, "key": key, "value": value}, lead)
    kernel = arguments["implementation"]
    reads_stack = frozen is None and patch is None and (kernel is None or isinstance(kernel, str))
    if reads_stack and cache is not None and (stack := stack_of(cache, key)) is not None:
        z, lse = attend_in_stack(query, key, value, stack, **arguments)
    else:
        z, lse = dot_product_attention(query, key, value, return_residual=True, **arguments)
    if each_key is not None:
        z = replace_each(query, key, value, z, lse, *each_key, **arguments)
    if pattern is not None:
        gate, (other_query, other_key) = pattern
        other = dot_product_attention(other_query, other_key, value, **arguments)
        z = through_gate(z, gate, other, z.shape[:-3])
    if head_gate is not None:
        z = through_gate(z, expand_gate(head_gate, z, lead), head_fill, lead)
    elif head_fill is not None:
        raise ValueError("head_fill without head_gate: the gate selects the heads to fill")
    z = z if cache is None else nan_if_overflowed(cache, z)
    heads = {"query": query, "key": key, "value": value, "lse": lse, "z": z}
    extras = _extras(heads, pattern, lead, arguments, return_weights, return_statistics, return_heads, valid)
    results = [z.reshape(*lead, *z.shape[-3:]), *extras, *([] if cache is None else [cache])]
    return results[0] if len(results) == 1 else tuple(results)


def _with_positions_and_cache(
    query: Array,
    key: Array,
    value: Array,
    position: Callable[[Array, Array], Array] | None,
    cache: KVCache | None,
    valid: ArrayLike | None,
    arguments: dict[str, Any],
) -> tuple[Array, Array, Array, KVCache | None]:
    """Query, key, value and cache with ``position`` applied and the chunk appended to the cache.

    Updates the ``arguments`` of ``dot_product_attention``: its positions and the visible part of the cache.
    """
    implementation = arguments["implementation"]
    query_positions, kv_positions = arguments.get("query_positions"), arguments.get("kv_positions")
    slots_of = implementation.slots if isinstance(implementation, ReducesWeights) else lambda length: None
    if slots_of(query.shape[1]) is not None:  # slots are not in token order: positions default to the tokens'
        if cache is not None:
            raise ValueError(f"cache must be filled in the order of the tokens, which {implementation} does not keep")
        query_positions = slots_of(query.shape[1]) if query_positions is None else query_positions
        kv_positions = slots_of(key.shape[1]) if kv_positions is None else kv_positions
    chunk_positions: Any = None
    at_queries: Any = None
    T, S = query.shape[1], key.shape[1]
    if cache is not None:
        if 0 not in (T, S) and T != S:
            raise ValueError(
                f"cache takes as many keys as there are queries, got {S} keys for {T} queries; for cross-attention, "
                "append the encoder's keys once, by a call without queries (x[:, :0]), and then pass no keys (an "
                "x_kv or inputs_k of encoded[:, :0])"
            )
        chunk_positions = cache.next_positions(S, valid)
        at_queries = chunk_positions if T == S else cache.next_positions(T)
        if cache.first_tokens and query_positions is not None:
            raise ValueError(
                "query_positions, input_positions: a cache with first_tokens counts positions itself; omit them"
            )
        query_positions = at_queries if query_positions is None else query_positions
        kv_positions = query_positions if T == S else chunk_positions
    within_cache = cache is not None and cache.first_tokens > 0
    if position is not None and not within_cache:
        rotate = for_tokens(position, S, cache)
        query = rotate(query, _or_arange(query_positions, query))
        key = rotate(key, _or_arange(kv_positions, key))
    if cache is None:
        return query, key, value, None
    in_a_ring = isinstance(implementation, OverMesh) and "length" in implementation.kinds
    appended = append_chunk(cache, key, value, valid, sharded=in_a_ring)
    mask, bias = arguments["mask"], arguments["bias"]
    key, value, visibility = visible_keys(cache, appended, key, value, chunk_positions, mask, bias)
    arguments |= {"query_positions": at_queries, "kv_positions": None} | visibility
    if position is not None and within_cache:
        if not isinstance(position, Rotary):  # only distances may count, or results would depend on the chunks
            raise ValueError(
                f"position must be a jattn.positions.Rotary with a cache that has first_tokens, got {position!r}"
            )
        rotate, seen = for_tokens(position, S, cache), arguments["kv_positions"]
        query, key = positions_within(cache, rotate, query, key, at_queries, seen, arguments.get("scale") is not None)
    return *common_dtype(query, key, value, None), appended


def _extras(
    heads: dict[str, Array],
    pattern: Any,
    lead: tuple[Length, ...],
    options: dict[str, Any],
    return_weights: bool,
    return_statistics: Sequence[str] | Mapping[str, Any],
    return_heads: bool,
    valid: ArrayLike | None,
) -> list[Any]:
    """The results of ``attend_heads`` other than output and cache; statistics ignore the padding of a chunk."""
    results: list[Any] = []
    query, key = heads["query"], heads["key"]
    drop = query.ndim - 3  # the one batch axis, if any
    affecting = {"bias", "mask", *ScoreOptions.__optional_keys__}
    of_weights = {name: option for name, option in options.items() if name in affecting}
    if return_weights:
        sinks = options.get("sinks")
        weights = attention_weights(query, key, sinks=sinks, **of_weights)
        if pattern is not None:
            gate, other = pattern
            mix = jnp.swapaxes(gate, -3, -2)  # [B,N,T,1]
            other_weights = attention_weights(*other, sinks=sinks, **of_weights)
            weights = through_gate(weights, mix, other_weights, weights.shape[:-3])
        results.append(weights.reshape(*lead, *weights.shape[-3:]))
    if wants_statistics(return_statistics):
        if pattern is not None:
            raise ValueError("return_statistics needs weights from one query and key, but patch['pattern'] mixes two")
        implementation = options["implementation"]
        if isinstance(implementation, ReducesWeights):
            of_weights["implementation"] = implementation
        wanted = return_statistics
        arguments: dict[str, Any] = dict(wanted) if isinstance(wanted, Mapping) else {"names": wanted}
        for name in {"tokens", "eligible"} & arguments.keys():
            arguments[name] = one_batch_axis(arguments[name], lead, 1)
        if valid is not None and jnp.shape(valid)[-1] == query.shape[-3] and arguments.get("eligible") is None:
            arguments["eligible"] = valid
        by_name = statistics(query, key, lse=heads["lse"], **arguments, **of_weights)  # sinks are in the lse
        results.append(jax.tree.map(lambda x: x.reshape(*lead, *x.shape[drop:]), by_name))
    if return_heads:
        results.append({name: x.reshape(*lead, *x.shape[drop:]) for name, x in heads.items()})
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
    """Parameters for ``multi_head_attention``, with the tree, names and shapes of Flax's modules.

    ``query/kernel [M,N,H]``, ``key/kernel [M,K,H]``, ``value/kernel [M,K,D]``, ``out/kernel [N,D,M]``; with
    ``use_bias``, also ``bias [N,H]``, ``[K,H]``, ``[K,D]`` and ``[M]``, initially zero. Kernels use LeCun normal
    initialization.

    Args:
        key: a JAX random key.
        model_dim: M, the number of features of the input and the output.
        num_heads: N, the number of query heads.
        num_kv_heads: K, a divisor of N; N by default.
        head_dim: H, of query and key; ``model_dim / num_heads`` by default.
        value_dim: D; ``head_dim`` by default.
        kv_model_dim: the number of features of ``x_kv``, if different from M (cross-attention).
        use_bias: add biases, initially 0.
        dtype: the dtype of the parameters.

    Raises:
        ValueError: a number is not a positive integer, or is not divisible as required.

    Example:
        >>> params = jattn.init_multi_head(jax.random.key(0), 8, num_heads=2, num_kv_heads=1)
        >>> {name: part["kernel"].shape for name, part in params.items()}
        {'query': (8, 2, 4), 'key': (8, 1, 4), 'value': (8, 1, 4), 'out': (2, 4, 8)}
    """
    sizes = {"model_dim": model_dim, "num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim,
             "value_dim": value_dim, "kv_model_dim": kv_model_dim}  # fmt: skip
    for name, size in sizes.items():
        if size is not None and (not isinstance(size, int | np.integer) or size < 1):
            raise ValueError(f"{name} must be a positive integer, got {size!r}")
    if head_dim is None and model_dim % num_heads:
        raise ValueError(f"model_dim {model_dim} is not a multiple of num_heads {num_heads}; pass head_dim=")
    head_dim = model_dim // num_heads if head_dim is None else head_dim
    value_dim = head_dim if value_dim is None else value_dim
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    if num_heads % num_kv_heads:
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
    """``y = sum_i attention(x W_i^Q, x_kv W_i^K, x_kv W_i^V) W_i^O``: multi-head self- or cross-attention.

    Args:
        params: from ``init_multi_head`` (or a Flax module).
        x: ``[B,T,M]`` or ``[T,M]``, the input of the queries.
        x_kv: ``[B,S,M']`` or ``[S,M']``, the input of the keys and values; ``x`` by default.
        return_weights: also return the attention weights, ``[B,N,T,S]``.
        bias: floats added to the scores; they broadcast to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        position: ``(x, positions) -> x``, applied to queries and keys, such as ``jattn.positions.Rotary()``.
        head_gate: ``[N]``, ``[B,N]`` or ``[B,T,N]``; multiplies each head's output (0 switches it off).
        head_fill: the output of a switched-off head instead of 0; broadcasts to ``[B,T,N,D]``.
        frozen: ``(query, key)`` from ``return_heads`` of another call; their weights replace this call's.
        patch: queries, keys, values or patterns that replace this call's (``jattn.heads.patch``).
        cache: a ``jattn.KVCache``. The tokens of ``x_kv`` are appended, and the queries attend to the whole cache; pass
            ``is_causal`` if there are several.
        valid: bool ``[B,S]``, only with ``cache``: which tokens are real (``jattn.append``).
        return_statistics: also return these statistics (``jattn.heads.statistics``): names, or a dict of arguments.
        return_heads: also return ``{"query", "key", "value", "lse", "z"}`` of all heads, for ``jattn.heads``.
        implementation: a name from ``jattn.explain`` or an object such as ``jattn.sharding.Ring``; None picks one.
        precision: the ``jax.lax.Precision`` of all products.
        options: the other keywords of ``jattn.dot_product_attention``, such as ``is_causal`` and ``score_mod``.

    Returns:
        ``y [B,T,M]``, or a tuple of y and the requested items, in this order: the weights, the statistics
        ``{name: [B,N]}``, the heads' arrays and the new cache.

    Raises:
        ValueError, TypeError: the input's features do not match the kernels', or an argument has the wrong shape or
            dtype.

    Example:
        >>> params, x = jattn.init_multi_head(jax.random.key(0), 8, num_heads=2), jnp.ones((1, 4, 8))
        >>> y, weights = jattn.multi_head_attention(params, x, is_causal=True, return_weights=True)
        >>> y.shape, weights.shape
        ((1, 4, 8), (1, 2, 4, 4))
    """
    x_kv, precision = x if x_kv is None else x_kv, options.get("precision")
    query = project(params["query"], x, precision)
    key, value = (project(params[name], x_kv, precision) for name in ("key", "value"))
    if "return_statistics" in options:
        options["return_statistics"] = statistics_of(options["return_statistics"], x, x_kv)
    z = attend_heads(query, key, value, return_weights=return_weights, **options)
    z, *others = z if isinstance(z, tuple) else (z,)
    dims = ((z.ndim - 2, z.ndim - 1), (0, 1)), ((), ())
    y = dot_general(z, params["out"]["kernel"], dims, precision=precision)
    if "bias" in params["out"]:
        y += params["out"]["bias"].reshape((1,) * (y.ndim - 1) + (-1,))
    return (y, *others) if others else y


def project(params: dict[str, Array], x: Array, precision: Any = None) -> Array:
    """``x [..., M] -> [..., N, H]``: ``x W_i``, vmapped over heads, compiles to a single product."""
    if params["kernel"].shape[0] != x.shape[-1]:
        raise ValueError(f"the input's last axis must be {params['kernel'].shape[0]}, like the kernel, got {x.shape}")

    def one_head(kernel: Array) -> Array:
        return jnp.matmul(x, kernel, precision=precision)

    projected = jax.vmap(one_head, in_axes=1, out_axes=-2)(params["kernel"])
    if "bias" in params:
        projected += params["bias"].reshape((1,) * (x.ndim - 1) + params["bias"].shape)
    return projected


def for_tokens(position: Any, tokens: Length, cache: KVCache | None) -> Any:
    """``position`` adapted to the length of a call with this many keys, or of its cache.

    Raises ``ValueError`` if that length is unknown because the cache is rolling.
    """
    at = at_length(position, tokens if cache is None else cache.capacity)
    if cache is not None and cache.rolling and not cache.first_tokens and at is not position:
        raise ValueError(
            "position: the frequencies of this Rotary depend on the length of the text, which a rolling cache does not "
            "know; pass jattn.positions.at_length(position, tokens)"
        )
    return at


def _or_arange(positions: ArrayLike | None, x: Array) -> Array:
    return jnp.arange(x.shape[-3]) if positions is None else jnp.asarray(positions)


def one_batch_axis(x: Any, lead: tuple[Length, ...], trailing: int) -> Any:
    """An array ``[*lead, ...]`` with its batch axes joined; functions and arrays without batch axes are unchanged."""
    if x is None or callable(x) or jnp.ndim(x) <= trailing:
        return x
    xp = namespace(x)  # a NumPy array stays static
    x = xp.asarray(x)
    batch = x.shape[:-trailing]
    if trailing == 3:  # a mask or bias, which broadcasts
        batch = (1,) * (len(lead) - len(batch)) + batch
    if len(batch) != len(lead) or any(size not in (1, full) for size, full in zip(batch, lead, strict=True)):
        raise ValueError(f"expected batch axes {lead} and {trailing} more, or {trailing} alone, got {list(x.shape)}")
    return xp.broadcast_to(x, (*lead, *x.shape[-trailing:])).reshape(math.prod(lead), *x.shape[-trailing:])


def statistics_of(requested: Sequence[str] | Mapping[str, Any], x: Array, x_kv: Array) -> Any:
    """The request; in cross-attention, all queries count, because key masks say nothing about queries."""
    if x_kv is x or not wants_statistics(requested):
        return requested
    request = dict(requested) if isinstance(requested, Mapping) else {"names": requested}
    return request if request.get("eligible") is not None else request | {"eligible": np.ones(x.shape[-2], bool)}


def wants_statistics(statistics: Sequence[str] | Mapping[str, Any]) -> bool:
    """Whether the request names statistics or is a dict of arguments, in which names are optional."""
    return isinstance(statistics, Mapping) or bool(statistics)


def common_dtype(query: Array, key: Array, value: Array, dtype: Any) -> tuple[Array, Array, Array]:
    """All three arrays in one dtype: ``dtype``, or the result of promotion."""
    if dtype is None:
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(query, key, value)
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)
