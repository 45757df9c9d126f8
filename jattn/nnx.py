"""Replaces Flax NNX's ``dot_product_attention``, its weights, and ``MultiHeadAttention``."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn import dtypes
from flax.typing import DotGeneralT, Initializer
from jaxtyping import Array, ArrayLike

from jattn import _flax
from jattn._mods.keywords import suggest_keywords
from jattn.cache import KVCache, from_flax, to_flax
from jattn.kernels import Implementation
from jattn.masks import MaskFunction
from jattn.multi_head import CallOptions, statistics_of
from jattn.score_mods import ScoreMod
from jattn.sharding._dot_general import dot_general

__all__ = ["MultiHeadAttention", "dot_product_attention", "dot_product_attention_weights"]

Metadata = Mapping[str, Any]
PromoteDtype = Callable[..., Any]  # Flax's ``(arrays, *, dtype) -> arrays of one dtype``
NOTHING: Metadata = MappingProxyType({})


def dot_product_attention(
    query: Array,
    key: Array,
    value: Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: PromoteDtype = dtypes.promote_dtype,
    is_causal: bool = False,
    sow_heads: bool = False,
    **extras: Any,
) -> Array:
    """``flax.nnx.dot_product_attention`` with the same arguments: the ``attention_fn`` for Flax's modules.

    Use it as ``nnx.MultiHeadAttention(..., attention_fn=jattn.nnx.dot_product_attention)``; add ``extras`` with
    ``functools.partial``.

    Args:
        query, key, value: ``[..., T, N, H]``, ``[..., S, K, H]``, ``[..., S, K, D]``; N is a multiple of K.
        bias: floats added to the scores; they broadcast to ``[..., N, T, S]``.
        mask: an array broadcastable to ``[..., N, T, S]`` (nonzero: visible), a ``jattn.masks.Mask``, or a function
            ``(b, h, q_idx, kv_idx) -> bool``.
        broadcast_dropout: drop the same query-key pairs in all heads of all sequences.
        dropout_rng: the random key for dropout.
        dropout_rate: the probability of dropping a weight.
        deterministic: switch dropout off.
        dtype: the dtype of the computation; None promotes the arguments.
        precision: the ``jax.lax.Precision`` of both products.
        module: sows the weights ``[..., N, T, S]`` as its ``attention_weights``.
        promote_dtype: Flax's function that casts query, key and value to one dtype.
        is_causal: a query sees keys at or before its own position.
        sow_heads: the module instead sows ``attention_heads`` (query, key, value, lse and z), in linear memory.
        extras: other keywords of ``jattn.multi_head_attention``, such as ``position``, ``score_mod``, ``sinks``,
            ``head_gate`` and ``implementation``; ``input_positions``: integers ``[T]`` for ``position``.

    Returns:
        ``[..., T, N, D]``. The output of a query that sees nothing is 0 (in Flax, the mean of the values or worse).

    Raises:
        TypeError, ValueError: an argument has the wrong shape or dtype; the message names it.

    Example:
        >>> from flax import nnx
        >>> options = {"attention_fn": jattn.nnx.dot_product_attention, "decode": False, "rngs": nnx.Rngs(0)}
        >>> layer = nnx.MultiHeadAttention(num_heads=2, in_features=8, **options)  # Flax's own
        >>> layer(jnp.ones((1, 4, 8)), mask=jattn.masks.Causal()).shape  # with a mask of jattn's
        (1, 4, 8)
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    sow = _flax.Sow(weights=module is not None and not sow_heads, heads=module is not None and sow_heads)
    return _flax.attend_and_sow(
        module, nnx.Intermediate, sow, False, query, key, value, dtype=None, bias=bias, mask=mask,
        broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng, dropout_rate=dropout_rate,
        deterministic=deterministic, precision=precision, is_causal=is_causal, **extras,
    )[0]  # fmt: skip


def dot_product_attention_weights(
    query: Array,
    key: Array,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: nnx.Module | None = None,
    promote_dtype: PromoteDtype = dtypes.promote_dtype,
    is_causal: bool = False,
    **extras: Any,
) -> Array:
    """``flax.nnx.dot_product_attention_weights``: the weights that ``dot_product_attention`` applies.

    Args:
        query, key: ``[..., T, N, H]`` and ``[..., S, K, H]``; N is a multiple of K.
        bias, mask: broadcast to ``[..., N, T, S]``; a mask of any dtype, or a ``Mask`` or a function of positions.
        broadcast_dropout: drop the same query-key pairs in all heads of all sequences.
        dropout_rng, dropout_rate, deterministic: the random key for dropout; its rate; whether to switch dropout off.
        dtype, precision: the dtype of the computation (None promotes the arguments); the precision of the product.
        module: sows the weights before dropout as its ``attention_weights``.
        promote_dtype: Flax's function that casts query and key to one dtype.
        is_causal: a query sees keys at or before its own position.
        extras: other keywords of ``jattn.attention_weights``; ``position``, applied to query and key.

    Returns:
        The weights ``[..., N, T, S]`` after dropout, in O(N·T·S) memory.

    Example:
        >>> query = key = jnp.zeros((1, 4, 2, 4))  # equal scores
        >>> jattn.nnx.dot_product_attention_weights(query, key, is_causal=True)[0, 0, 1].tolist()
        [0.5, 0.5, 0.0, 0.0]
    """
    query, key = promote_dtype((query, key), dtype=dtype)
    weights, kept = _flax.weights_as_flax(
        query, key, dtype=None, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng,
        dropout_rate=dropout_rate, deterministic=deterministic, precision=precision, is_causal=is_causal, **extras,
    )  # fmt: skip
    if module is not None:
        module.sow(nnx.Intermediate, "attention_weights", weights.astype(query.dtype))
    return kept.astype(query.dtype)


class MultiHeadAttention(nnx.Module):
    """``flax.nnx.MultiHeadAttention`` with the same arguments, parameters and checkpoints, plus options.

    ``query``, ``key`` and ``value`` are ``nnx.LinearGeneral`` with kernels ``[M,N,H]``, ``[M,K,H]`` and ``[M,K,D]``;
    the kernel of ``out`` is ``[N,D,M]``. ``normalize_qk`` adds ``query_ln`` and ``key_ln``. The same random key gives
    the same bits as in Flax. Unlike in Flax, the output of a query that sees nothing is 0 instead of the mean of the
    values, and a ``decode`` call may process several tokens.

    Args:
        num_heads: N, the number of query heads.
        in_features: M, the number of features of the queries' input.
        qkv_features: ``N * H``; ``in_features`` by default.
        out_features: the number of output features; ``in_features`` by default.
        num_kv_heads: K, a divisor of N; N by default.
        in_kv_features: the number of features of the keys' and values' input; ``in_features`` by default.
        value_dim: D; ``H`` by default.
        position: ``(x, positions) -> x``, applied to queries and keys, such as ``jattn.positions.Rotary()``.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``. Its float arrays are learned: each becomes an
            ``nnx.Param``. To keep an array fixed, pass the ``score_mod`` at the call or make the array an
            ``nnx.Variable``.
        sinks: learn each head's score ``[N]`` for attending to nothing, initially 0.
        qk_norm: ``"layer"`` (Flax's ``normalize_qk``) or ``"rms"``: the norm of each head's queries and keys.
        implementation: a name from ``jattn.explain`` or an object such as ``jattn.sharding.Ring``; None picks one.
        dtype, param_dtype: the dtypes of the computation (None promotes inputs and parameters) and of the parameters.
        dropout_rate: the probability of dropping an attention weight.
        broadcast_dropout: drop the same query-key pairs in all heads of all sequences.
        deterministic: switch dropout off; a call may override it.
        precision: the ``jax.lax.Precision`` of all products.
        kernel_init, bias_init: initializers for the projections.
        out_kernel_init, out_bias_init: initializers for ``out``; by default, the same as for the other projections.
        use_bias: whether the projections have biases.
        attention_fn: a function to call instead of jattn's; it gets Flax's keywords.
        decode: append the input to the module's own cache at each call; a call may override it.
        normalize_qk: apply a LayerNorm to each head's queries and keys.
        qkv_promote_dtype, out_promote_dtype, ln_promote_dtype: Flax's functions that cast the operands of the
            projections, of ``out`` and of the norms to one dtype.
        qkv_dot_general, out_dot_general: replace ``jax.lax.dot_general`` in the projections and in ``out``.
        qkv_dot_general_cls, out_dot_general_cls: classes that create these functions.
        rngs: the random keys for parameters and dropout.
        keep_rngs: keep the stream of dropout keys in the module.
        kernel_metadata, bias_metadata, out_kernel_metadata, out_bias_metadata: metadata for these parameters.
        query_ln_scale_metadata, key_ln_scale_metadata: metadata for the norms' scales.

    Raises:
        ValueError: a number of features or heads is not divisible as required.

    Example:
        >>> from flax import nnx
        >>> layer = jattn.nnx.MultiHeadAttention(num_heads=2, in_features=8, rngs=nnx.Rngs(0))
        >>> x = jnp.ones((1, 4, 8))
        >>> look = nnx.capture(lambda layer: layer(x, is_causal=True, sow_weights=True), nnx.Intermediate)
        >>> y, sown = look(layer)
        >>> y.shape, sown["attention_weights"][0].shape
        ((1, 4, 8), (1, 2, 4, 4))
    """

    @suggest_keywords
    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        value_dim: int | None = None,
        position: Callable[[Array, Array], Array] | None = None,
        score_mod: ScoreMod | None = None,
        sinks: bool = False,
        qk_norm: str | None = None,
        implementation: str | Implementation | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Initializer = nnx.initializers.lecun_normal(),
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = nnx.initializers.zeros_init(),
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: _flax.AttentionFunction = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: PromoteDtype = dtypes.promote_dtype,
        out_promote_dtype: PromoteDtype = dtypes.promote_dtype,
        ln_promote_dtype: PromoteDtype = dtypes.promote_dtype,
        qkv_dot_general: DotGeneralT | None = None,
        out_dot_general: DotGeneralT | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Metadata = NOTHING,
        out_kernel_metadata: Metadata = NOTHING,
        bias_metadata: Metadata = NOTHING,
        out_bias_metadata: Metadata = NOTHING,
        query_ln_scale_metadata: Metadata = NOTHING,
        key_ln_scale_metadata: Metadata = NOTHING,
    ):
        self.num_heads, self.in_features = num_heads, in_features
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        dims = _flax.head_dims(num_heads, num_kv_heads, self.qkv_features, value_dim)
        self.num_kv_heads, self.head_dim, self.value_dim = dims
        self.dtype, self.param_dtype, self.precision, self.use_bias = dtype, param_dtype, precision, use_bias
        self.broadcast_dropout, self.dropout_rate, self.deterministic = broadcast_dropout, dropout_rate, deterministic
        self.position, self.score_mod, self.implementation = position, _learned(score_mod), implementation
        self.attention_fn, self.decode = attention_fn, decode
        shared: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        linear = shared | {"use_bias": use_bias, "precision": precision}
        qkv = linear | {
            "kernel_init": kernel_init,
            "bias_init": bias_init,
            "promote_dtype": qkv_promote_dtype,
            "dot_general": qkv_dot_general,
            "dot_general_cls": qkv_dot_general_cls,
            "kernel_metadata": kernel_metadata,
            "bias_metadata": bias_metadata,
        }
        # In the order in which Flax creates its parameters.
        self.query = nnx.LinearGeneral(in_features, (num_heads, self.head_dim), **qkv)
        self.key = nnx.LinearGeneral(self.in_kv_features, (self.num_kv_heads, self.head_dim), **qkv)
        self.value = nnx.LinearGeneral(self.in_kv_features, (self.num_kv_heads, self.value_dim), **qkv)
        norm = _flax.choose_norm(normalize_qk, qk_norm)
        self.normalize_qk = norm is not None
        self.query_ln = self.key_ln = nnx.data(None)
        if norm is not None:
            kind: Callable[..., nnx.Module] = nnx.RMSNorm if norm == "rms" else nnx.LayerNorm
            options: dict[str, Any] = (
                shared | {"promote_dtype": ln_promote_dtype} | ({} if norm == "rms" else {"use_bias": False})
            )
            self.query_ln = kind(self.head_dim, **options, scale_metadata=query_ln_scale_metadata)
            self.key_ln = kind(self.head_dim, **options, scale_metadata=key_ln_scale_metadata)
        self.out = nnx.LinearGeneral(
            (num_heads, self.value_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general or dot_general,
            dot_general_cls=out_dot_general_cls,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
            **linear,
        )
        self.sinks = nnx.Param(jnp.zeros(num_heads, param_dtype)) if sinks else nnx.data(None)
        self.rngs = rngs.dropout.fork() if keep_rngs and dropout_rate > 0 else nnx.data(None)
        self.cached_key: nnx.Cache | None = nnx.data(None)
        self.cached_value: nnx.Cache | None = nnx.data(None)
        self.cache_index: nnx.Cache | None = nnx.data(None)

    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: ArrayLike | MaskFunction | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: ArrayLike | None = None,
        sow_statistics: Sequence[str] | Mapping[str, Any] = (),
        sow_heads: bool = False,
        **options: Unpack[CallOptions],
    ) -> Any:
        """The layer's output ``[..., T, out_features]`` for inputs ``[..., T, M]``.

        Args:
            inputs_q: the input of the queries, ``[..., T, M]``.
            inputs_k: the input of the keys, ``[..., S, M]``; ``inputs_q`` by default.
            inputs_v: the input of the values, ``[..., S, M]``; ``inputs_k`` by default.
            mask: an array that broadcasts to ``[..., N, T, S]`` (cast to bool, as in Flax), a ``Mask`` or a function.
            deterministic: switch dropout off.
            rngs: the dropout keys, instead of the module's.
            out_sharding, qkv_sharding: the shardings of the output and of query, key and value, on an explicit mesh.
            sow_weights: sow the weights ``[..., N, T, S]`` as ``nnx.Intermediate`` ``attention_weights``.
            decode: append the T input tokens to the module's own cache (``init_cache``). Without a mask, or with a mask
                array over the cache's slots, a token sees itself and earlier tokens. A ``Mask`` or a function of
                positions replaces that rule.
            is_causal: a token sees itself and earlier ones.
            input_positions: integers ``[T]`` or ``[..., T]`` for ``position``, instead of ``arange``; for packed
                documents, positions that restart. As in Flax, masks, score functions and dropout see slots. If the
                numbers of keys and queries differ, these are the queries' positions for masks as well.
            bias: floats added to the scores; they broadcast to ``[..., N, T, S]``.
            head_gate: ``[N]``, ``[B, N]`` or ``[B, T, N]``; multiplies each head's output (0 switches it off).
            head_fill: the output of a switched-off head instead of 0; broadcasts to ``[B, T, N, D]``.
            frozen: ``(query, key)`` from another call; their weights replace this call's.
            patch: queries, keys, values or patterns that replace this call's (``jattn.heads.patch``).
            score_mod: replaces the constructor's.
            scale: multiplies the scores; ``1 / sqrt(H)`` by default.
            local_window_size: ``(left, right)``: how many keys a query sees before and after its own.
            cache: a ``KVCache`` instead of the module's own. The result is then ``(output, cache)``, and ``is_causal``
                and ``mask`` apply as given.
            valid: bool ``[B, T]``, only with ``cache``: which tokens are real (``jattn.append``).
            sow_statistics: sow these statistics as ``attention_statistics``: names from ``jattn.heads.STATISTICS``, or
                a dict of arguments to ``jattn.heads.statistics``. The output stays bit-identical.
            sow_heads: sow ``attention_heads`` for ``jattn.heads``: a dict of query, key, value, lse and z. The output
                stays bit-identical.

        Raises:
            ValueError: there is no cache to decode from, or ``attention_fn`` is not jattn's and lacks a given option.
        """
        inputs_k, inputs_v = _flax.join_inputs(inputs_q, inputs_k, inputs_v)
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        extras: dict[str, Any] = {
            "position": self.position,
            "sinks": None if self.sinks is None else self.sinks[...],
            "implementation": self.implementation,
            **_flax.call_options(options, variables_read(self.score_mod)),
        }
        cache = extras.get("cache")
        decode = (self.decode if decode is None else decode) and cache is None
        module_cache = self._own_cache(key) if decode else None
        keywords = self._keywords(deterministic, rngs) | {"mask": mask, "is_causal": is_causal}
        if input_positions is not None:
            keywords["input_positions"] = input_positions
        new_cache = None
        if self.attention_fn is dot_product_attention:
            if module_cache is not None:
                extras["cache"], keywords["is_causal"] = module_cache, is_causal or not callable(mask)
            sow = _flax.Sow(sow_weights, sow_heads, statistics_of(sow_statistics, inputs_q, inputs_k))
            z, new_cache = _flax.attend_and_sow(
                self, nnx.Intermediate, sow, False, query, key, value, **keywords, **extras
            )
        else:
            sow_options = {"sow_statistics": sow_statistics or None, "sow_heads": sow_heads or None}
            _flax.refuse_extras(self.attention_fn, **sow_options, **extras)
            if module_cache is not None:
                keywords["is_causal"] = False  # the mask is already causal; is_causal would ignore the cache
                key, value, keywords["mask"], new_cache = _flax.decode_as_flax(module_cache, key, value, mask)
            z = self.attention_fn(query, key, value, module=self if sow_weights else None, **keywords)
        if module_cache is not None and new_cache is not None:
            self._keep(new_cache)
        y = self.out(z, out_sharding=out_sharding)
        return y if cache is None else (y, new_cache)

    def init_cache(self, input_shape: tuple[int, ...], dtype: Any = jnp.float32) -> None:
        """Creates an empty cache of ``dtype`` for decoding inputs of ``input_shape``, ``(..., maximum length, M)``."""
        slots = (*input_shape[:-1], self.num_kv_heads)
        self.cached_key = nnx.Cache(jnp.zeros((*slots, self.head_dim), dtype))
        self.cached_value = nnx.Cache(jnp.zeros((*slots, self.value_dim), dtype))
        self.cache_index = nnx.Cache(jnp.array(0, jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | tuple[int, ...] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Changes the mode, for ``nnx.view``; None keeps it. Raises TypeError if only half of a cache's shape is given.

        Args:
          deterministic: whether dropout is off.
          decode: whether a call decodes from the module's own cache.
          batch_size: B, or all batch axes, of a new, empty cache.
          max_length: the number of slots of the new cache.
        """
        # Indented by two, because nnx.view_info finds the arguments by their indentation.
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is None and max_length is None:
            return
        if batch_size is None or max_length is None:
            raise TypeError("a cache needs both batch_size and max_length")
        batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        self.init_cache((*batch, max_length, self.in_features), jnp.float32 if self.dtype is None else self.dtype)

    def _keywords(self, deterministic: bool | None, rngs: nnx.Rngs | nnx.RngStream | None) -> dict[str, Any]:
        """The module's own options, under Flax's names for the options of an ``attention_fn``."""
        deterministic = _flax.choose_deterministic(self.dropout_rate, deterministic, self.deterministic)
        dropout_rng = None if deterministic else self._dropout_key(rngs)
        return _flax.own_options(self) | {"deterministic": deterministic, "dropout_rng": dropout_rng}

    def _own_cache(self, key: Array) -> KVCache:
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError("decode=True, but the module has no cache: call init_cache(input_shape) first")
        return from_flax(self.cached_key[...], self.cached_value[...], self.cache_index[...], key)

    def _keep(self, cache: KVCache) -> None:
        assert self.cached_key is not None and self.cached_value is not None and self.cache_index is not None
        self.cached_key[...], self.cached_value[...], self.cache_index[...] = to_flax(cache, self.cached_key.shape[:-3])

    def _dropout_key(self, rngs: nnx.Rngs | nnx.RngStream | None) -> jax.Array:
        stream = self.rngs if rngs is None else rngs
        if stream is None:
            raise ValueError("dropout needs a random key: pass rngs=nnx.Rngs(dropout=...) or deterministic=True")
        return stream.dropout() if isinstance(stream, nnx.Rngs) else stream()


def _learned(mod: Any) -> Any:
    """A score function with its float arrays as parameters. Without arrays, it stays a plain attribute."""
    is_variable = lambda x: isinstance(x, nnx.Variable)
    leaves = jax.tree.leaves(mod, is_leaf=is_variable)
    if isinstance(mod, nnx.Module) or not any(isinstance(x, nnx.Variable | jax.Array | np.ndarray) for x in leaves):
        return mod
    to_param = lambda x: nnx.Param(jnp.array(x)) if _flax.is_float_array(x) else x  # a copy: parameters may be donated
    return nnx.data(jax.tree.map(to_param, mod, is_leaf=is_variable))


def variables_read(mod: Any) -> Any:
    """The score function of ``_learned``, with its variables replaced by their values."""
    is_variable = lambda x: isinstance(x, nnx.Variable)
    return jax.tree.map(lambda x: x[...] if is_variable(x) else x, mod, is_leaf=is_variable)
