"""Replaces Flax Linen's ``dot_product_attention``, its weights, and ``MultiHeadDotProductAttention``."""

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
from flax import linen as nn
from flax.linen import dot_product_attention as flaxs_attention
from flax.linen import dot_product_attention_weights as flaxs_weights
from flax.typing import DotGeneralT, Initializer
from jaxtyping import Array, ArrayLike

from jattn import _flax
from jattn._core.call import softmax_dtype
from jattn.cache import KVCache, from_flax, to_flax
from jattn.kernels import Implementation
from jattn.masks import MaskFunction
from jattn.multi_head import CallOptions, common_dtype, statistics_of
from jattn.score_mods import ScoreMod
from jattn.sharding._dot_general import dot_general

__all__ = [
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "SelfAttention",
    "dot_product_attention",
    "dot_product_attention_weights",
]
Einsum = Callable[..., Array]


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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    qk_attn_weights_einsum: Callable[..., Array] | None = None,
    attn_weights_value_einsum: Callable[..., Array] | None = None,
    *,
    is_causal: bool = False,
    sow_heads: bool = False,
    **extras: Any,
) -> Array:
    """``flax.linen.dot_product_attention`` with the same arguments: the ``attention_fn`` for Flax's modules.

    Use it as ``nn.MultiHeadDotProductAttention(..., attention_fn=jattn.linen.dot_product_attention)``; add
    ``is_causal`` and ``extras`` with ``functools.partial``.

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
        force_fp32_for_softmax: weights and output in float32. The softmax is always computed in at least float32.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: custom products, such as quantized ones.
            With any of them, Flax's function runs and takes no ``extras``.
        is_causal: a query sees keys at or before its own position.
        sow_heads: the module instead sows ``attention_heads`` (query, key, value, lse and z), in linear memory.
        extras: other keywords of ``jattn.multi_head_attention``, such as ``position``, ``score_mod``, ``sinks``,
            ``head_gate`` and ``implementation``; ``input_positions``: integers ``[T]`` for ``position``.

    Returns:
        ``[..., T, N, D]``. The output of a query that sees nothing is 0 (in Flax, the mean of the values).

    Raises:
        TypeError, ValueError: an argument has the wrong shape or dtype; the message names it.

    Example:
        >>> from flax import linen as nn
        >>> layer = nn.MultiHeadAttention(num_heads=2, attention_fn=jattn.linen.dot_product_attention)  # Flax's own
        >>> x, causal = jnp.ones((1, 4, 8)), jattn.masks.Causal()  # with a mask of jattn's
        >>> layer.init_with_output(jax.random.key(0), x, mask=causal)[0].shape
        (1, 4, 8)
    """
    if einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum:
        _only_flaxs(flaxs_attention, mask, is_causal, extras)
        return flaxs_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, module, force_fp32_for_softmax, einsum_dot_general, qk_attn_weights_einsum,
            attn_weights_value_einsum,
        )  # fmt: skip
    sow = _flax.Sow(weights=module is not None and not sow_heads, heads=module is not None and sow_heads)
    return _flax.attend_and_sow(
        module, "intermediates", sow, force_fp32_for_softmax, query, key, value, dtype=dtype, bias=bias, mask=mask,
        broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng, dropout_rate=dropout_rate,
        deterministic=deterministic, precision=precision, is_causal=is_causal, **extras,
    )[0]  # fmt: skip


def _only_flaxs(attention_fn: Callable[..., Array], mask: Any, is_causal: bool, extras: Mapping[str, Any]) -> None:
    """Raises if custom products, computed by Flax's function, are combined with options that it does not take."""
    if is_causal or callable(mask):
        raise ValueError("custom products (einsum) take only Flax's arguments; pass the mask as an array")
    _flax.refuse_extras(attention_fn, **extras)


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
    module: nn.Module | None = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: Callable[..., Array] | None = None,
    einsum: Callable[..., Array] | None = None,
    *,
    is_causal: bool = False,
    **extras: Any,
) -> Array:
    """``flax.linen.dot_product_attention_weights``: the weights that ``dot_product_attention`` applies.

    Args:
        query, key: ``[..., T, N, H]`` and ``[..., S, K, H]``; N is a multiple of K.
        bias, mask: broadcast to ``[..., N, T, S]``; a mask of any dtype, or a ``Mask`` or a function of positions.
        broadcast_dropout: drop the same query-key pairs in all heads of all sequences.
        dropout_rng, dropout_rate, deterministic: the random key for dropout; its rate; whether to switch dropout off.
        dtype, precision: the dtype of the computation (None promotes the arguments); the precision of the product.
        module: sows the weights before dropout as its ``attention_weights``.
        force_fp32_for_softmax: weights in float32. The softmax is always computed in at least float32.
        einsum_dot_general, einsum: custom products; with either, Flax's function runs and takes no ``extras``.
        is_causal: a query sees keys at or before its own position.
        extras: other keywords of ``jattn.attention_weights``; ``position``, applied to query and key.

    Returns:
        The weights ``[..., N, T, S]`` after dropout, in O(N·T·S) memory.

    Example:
        >>> query = key = jnp.zeros((1, 4, 2, 4))  # equal scores
        >>> jattn.linen.dot_product_attention_weights(query, key, is_causal=True)[0, 0, 1].tolist()
        [0.5, 0.5, 0.0, 0.0]
    """
    if einsum_dot_general or einsum:
        _only_flaxs(flaxs_weights, mask, is_causal, extras)
        return flaxs_weights(
            query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision,
            module, force_fp32_for_softmax, einsum_dot_general, einsum,
        )  # fmt: skip
    query, key, _ = common_dtype(query, key, key, dtype)
    kind = softmax_dtype(query) if force_fp32_for_softmax else query.dtype
    weights, kept = _flax.weights_as_flax(
        query, key, dtype=None, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng,
        dropout_rate=dropout_rate, deterministic=deterministic, precision=precision, is_causal=is_causal, **extras,
    )  # fmt: skip
    if module is not None:
        module.sow("intermediates", "attention_weights", weights.astype(kind))
    return kept.astype(kind)


class MultiHeadDotProductAttention(nn.Module):
    """``flax.linen.MultiHeadDotProductAttention`` with the same arguments, parameters and checkpoints, plus options.

    ``query``, ``key`` and ``value`` are ``nn.DenseGeneral`` with kernels ``[M,N,H]``, ``[M,K,H]`` and ``[M,K,D]``; the
    kernel of ``out`` is ``[N,D,M]``. ``normalize_qk`` adds ``query_ln`` and ``key_ln``. The same random key gives the
    same bits as in Flax. Unlike in Flax, the output of a query that sees nothing is 0 instead of the mean of the
    values, and a ``decode`` call may process several tokens.

    Attributes:
        num_heads: N, the number of query heads.
        qkv_features: ``N * H``; by default, the number of input features.
        out_features: the number of output features; by default, equal to the input's.
        num_kv_heads: K, a divisor of N; N by default.
        value_dim: D; ``H`` by default.
        position: ``(x, positions) -> x``, applied to queries and keys, such as ``jattn.positions.Rotary()``.
        score_mod: ``(score, b, h, q_idx, kv_idx) -> score``. Its float arrays are the initial values of the learned
            parameters ``score_mod``. To keep an array fixed, pass the ``score_mod`` at the call.
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
        decode: append the input to the collection ``cache`` at each call.
        normalize_qk: apply a LayerNorm to each head's queries and keys.
        force_fp32_for_softmax: return the heads' outputs in float32. The softmax is always computed in at least
            float32.
        qkv_dot_general, out_dot_general: replace ``jax.lax.dot_general`` in the projections and in ``out``.
        qkv_dot_general_cls, out_dot_general_cls: classes that create these functions.
        qk_attn_weights_einsum_cls, attn_weights_value_einsum_cls: classes that create the einsums for scores and
            outputs, such as quantized ones; with either, Flax's own function computes attention.

    Raises:
        ValueError: at a call, a number of features or heads is not divisible as required.

    Example:
        >>> from flax import linen as nn
        >>> x = jnp.ones((1, 4, 8))
        >>> params = jattn.linen.MultiHeadDotProductAttention(num_heads=2).init(jax.random.key(0), x)
        >>> flaxs = nn.MultiHeadDotProductAttention(num_heads=2).init(jax.random.key(0), x)
        >>> jax.tree.all(jax.tree.map(np.array_equal, params, flaxs))
        True
    """

    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    broadcast_dropout: bool = True
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    out_kernel_init: Initializer | None = None
    bias_init: Initializer = nn.initializers.zeros_init()
    out_bias_init: Initializer | None = None
    use_bias: bool = True
    attention_fn: _flax.AttentionFunction = dot_product_attention
    decode: bool = False
    normalize_qk: bool = False
    force_fp32_for_softmax: bool = False
    qkv_dot_general: DotGeneralT | None = None
    out_dot_general: DotGeneralT | None = None
    qkv_dot_general_cls: Any = None
    out_dot_general_cls: Any = None
    qk_attn_weights_einsum_cls: Callable[..., Einsum] | None = None
    attn_weights_value_einsum_cls: Callable[..., Einsum] | None = None
    num_kv_heads: int | None = None
    value_dim: int | None = None
    position: Callable[[Array, Array], Array] | None = None
    score_mod: ScoreMod | None = None
    sinks: bool = False
    qk_norm: str | None = None
    implementation: str | Implementation | None = None

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        inputs_kv: Array | None = None,
        mask: ArrayLike | MaskFunction | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
        is_causal: bool = False,
        input_positions: ArrayLike | None = None,
        sow_statistics: Sequence[str] | Mapping[str, Any] = (),
        sow_heads: bool = False,
        **options: Unpack[CallOptions],
    ) -> Any:
        """The layer's output ``[..., T, out_features]`` for inputs ``[..., T, M]``.

        With ``decode``, the T input tokens are appended to the collection ``cache``. Without a mask, or with a mask
        array over the cache's slots, a token sees itself and earlier tokens. A ``Mask`` or a function of positions
        replaces that rule.

        Args:
            inputs_q: the input of the queries, ``[..., T, M]``.
            inputs_k: the input of the keys, ``[..., S, M]``; ``inputs_q`` by default.
            inputs_v: the input of the values, ``[..., S, M]``; ``inputs_k`` by default.
            inputs_kv: the input of both keys and values; deprecated, as in Flax.
            mask: an array that broadcasts to ``[..., N, T, S]`` (cast to bool, as in Flax), a ``Mask`` or a function.
            deterministic: switch dropout off.
            dropout_rng: the dropout key, instead of the module's.
            sow_weights: sow the weights ``[..., N, T, S]`` into ``intermediates`` as ``attention_weights``.
            is_causal: a token sees itself and earlier ones.
            input_positions: integers ``[T]`` or ``[..., T]`` for ``position``, instead of ``arange``; for packed
                documents, positions that restart. As in Flax, masks, score functions and dropout see slots. If the
                numbers of keys and queries differ, these are the queries' positions for masks as well.
            bias: floats added to the scores; they broadcast to ``[..., N, T, S]``.
            head_gate: ``[N]``, ``[B, N]`` or ``[B, T, N]``; multiplies each head's output (0 switches it off).
            head_fill: the output of a switched-off head instead of 0; broadcasts to ``[B, T, N, D]``.
            frozen: ``(query, key)`` from another call; their weights replace this call's.
            patch: queries, keys, values or patterns that replace this call's (``jattn.heads.patch``).
            score_mod: replaces the attribute.
            scale: multiplies the scores; ``1 / sqrt(H)`` by default.
            local_window_size: ``(left, right)``: how many keys a query sees before and after its own.
            cache: a ``KVCache`` instead of the collection. The result is then ``(output, cache)``, and ``is_causal``
                and ``mask`` apply as given.
            valid: bool ``[B, T]``, only with ``cache``: which tokens are real (``jattn.append``).
            sow_statistics: sow these statistics as ``attention_statistics``: names from ``jattn.heads.STATISTICS``, or
                a dict of arguments to ``jattn.heads.statistics``. The output stays bit-identical.
            sow_heads: sow ``attention_heads`` for ``jattn.heads``: a dict of query, key, value, lse and z. The output
                stays bit-identical.

        Raises:
            ValueError: ``attention_fn`` is not jattn's and lacks a given option.
        """
        inputs_k, inputs_v = _keys_and_values(inputs_q, inputs_k, inputs_v, inputs_kv)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        extras: dict[str, Any] = {
            "position": self.position,
            "sinks": self._own_sinks(),
            "implementation": self.implementation,
            "input_positions": input_positions,
            **_flax.call_options(options, self._own_score_mod()),
        }
        cache = extras.get("cache")
        module_cache, keep = self._own_cache(key, value) if self.decode and cache is None else (None, None)
        keywords = self._keywords(deterministic, dropout_rng) | {"mask": mask}
        einsums = self._einsums()
        new_cache = None
        if self.attention_fn is dot_product_attention and not any(einsums.values()):
            if module_cache is not None:
                extras["cache"], is_causal = module_cache, is_causal or not callable(mask)
            keywords["is_causal"] = is_causal
            sow = _flax.Sow(sow_weights, sow_heads, statistics_of(sow_statistics, inputs_q, inputs_k))
            in_float32 = self.force_fp32_for_softmax
            z, new_cache = _flax.attend_and_sow(
                self, "intermediates", sow, in_float32, query, key, value, **keywords, **extras
            )
        else:
            sow_options = {"sow_statistics": sow_statistics or None, "sow_heads": sow_heads or None}
            _flax.refuse_extras(self.attention_fn, is_causal=is_causal or None, **sow_options, **extras)
            if module_cache is not None:
                key, value, keywords["mask"], new_cache = _flax.decode_as_flax(module_cache, key, value, mask)
            keywords |= {"force_fp32_for_softmax": self.force_fp32_for_softmax, **einsums}
            known = inspect.signature(self.attention_fn).parameters
            keywords = {name: option for name, option in keywords.items() if name in known}
            if sow_weights:
                keywords["module"] = self
            z = self.attention_fn(query, key, value, **keywords)
        if keep is not None and new_cache is not None:
            keep(new_cache)
        y = self._project_out(z, self.out_features or inputs_q.shape[-1])
        return y if cache is None else (y, new_cache)

    # Parts of the compact ``__call__``: Flax would capture the results of wrapped methods as intermediates.

    @nn.nowrap
    def _project(self, inputs_q: Array, inputs_k: Array, inputs_v: Array) -> tuple[Array, Array, Array]:
        """Query, key and value of all heads."""
        num_kv_heads, head_dim, value_dim = _flax.head_dims(
            self.num_heads, self.num_kv_heads, self.qkv_features or inputs_q.shape[-1], self.value_dim
        )

        def dense(name: str, heads: int, dim: int) -> nn.Module:
            return nn.DenseGeneral(
                features=(heads, dim),
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                dot_general=self.qkv_dot_general,
                dot_general_cls=self.qkv_dot_general_cls,
                name=name,
                **self._linear_options(),
            )

        query = dense("query", self.num_heads, head_dim)(inputs_q)
        key = dense("key", num_kv_heads, head_dim)(inputs_k)
        value = dense("value", num_kv_heads, value_dim)(inputs_v)
        norm = _flax.choose_norm(self.normalize_qk, self.qk_norm)
        if norm is not None:
            kind: Callable[..., nn.Module] = nn.RMSNorm if norm == "rms" else nn.LayerNorm
            options: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.param_dtype}
            options |= {} if norm == "rms" else {"use_bias": False}
            query, key = kind(name="query_ln", **options)(query), kind(name="key_ln", **options)(key)
        return query, key, value

    @nn.nowrap
    def _project_out(self, z: Array, features: int) -> Array:
        """The heads' outputs ``[..., T, N, D]``, joined and projected to ``[..., T, features]``."""
        return nn.DenseGeneral(
            features=features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            dot_general=self.out_dot_general or dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
            **self._linear_options(),
        )(z)

    @nn.nowrap
    def _linear_options(self) -> dict[str, Any]:
        """The arguments shared by all four projections."""
        return {name: getattr(self, name) for name in ("use_bias", "dtype", "param_dtype", "precision")}

    @nn.nowrap
    def _keywords(self, deterministic: bool | None, dropout_rng: Array | None) -> dict[str, Any]:
        """The module's own options, under Flax's names for the options of an ``attention_fn``."""
        deterministic = _flax.choose_deterministic(self.dropout_rate, deterministic, self.deterministic)
        if not deterministic and dropout_rng is None:
            dropout_rng = self.make_rng("dropout")
        return _flax.own_options(self) | {"deterministic": deterministic, "dropout_rng": dropout_rng}

    @nn.nowrap
    def _own_score_mod(self) -> ScoreMod | None:
        """The attribute ``score_mod``, with its float arrays replaced by the parameters ``score_mod``."""
        learned, mod = _flax.to_learn(self.score_mod), self.score_mod
        return _flax.with_learned(mod, self.param("score_mod", lambda key: learned)) if learned else mod

    @nn.nowrap
    def _own_sinks(self) -> Array | None:
        if not self.sinks:
            return None
        return self.param("sinks", nn.initializers.zeros_init(), (self.num_heads,), self.param_dtype)

    @nn.nowrap
    def _einsums(self) -> dict[str, Einsum | None]:
        """The custom products, by their names in ``attention_fn``; None if the module has no class for one."""
        qk, weights_value = self.qk_attn_weights_einsum_cls, self.attn_weights_value_einsum_cls
        return {
            "qk_attn_weights_einsum": None if qk is None else qk(),
            "attn_weights_value_einsum": None if weights_value is None else weights_value(),
        }

    @nn.nowrap
    def _own_cache(self, key: Array, value: Array) -> tuple[KVCache | None, Callable[[KVCache], None] | None]:
        """Flax's collection ``cache``, and a function that updates it. None in the call that creates the collection,
        whose input has the cache's maximum length.
        """
        exists = self.has_variable("cache", "cached_key")
        cached_key = self.variable("cache", "cached_key", jnp.zeros, key.shape, key.dtype)
        cached_value = self.variable("cache", "cached_value", jnp.zeros, value.shape, value.dtype)
        index = self.variable("cache", "cache_index", lambda: jnp.array(0, jnp.int32))
        if not exists:
            return None, None

        def keep(cache: KVCache) -> None:
            cached_key.value, cached_value.value, index.value = to_flax(cache, key.shape[:-3])

        return from_flax(cached_key.value, cached_value.value, index.value, key), keep


def _keys_and_values(
    inputs_q: Array, inputs_k: Array | None, inputs_v: Array | None, inputs_kv: Array | None
) -> tuple[Array, Array]:
    """``join_inputs`` with Flax's deprecated ``inputs_kv``, and its warning about a mask passed as ``inputs_v``."""
    # The warnings begin like Flax's, so that filters written for Flax match.
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError("inputs_kv is both keys and values: pass either inputs_kv, or inputs_k and inputs_v")
        warnings.warn(
            "The inputs_kv arg will be deprecated soon, as in Flax: pass inputs_k", DeprecationWarning, stacklevel=3
        )
        inputs_k = inputs_kv
    elif inputs_k is not None and inputs_v is not None and inputs_v.shape[-2] == inputs_v.shape[-1]:
        warnings.warn(
            f"You are passing an array of shape {inputs_v.shape} to the `inputs_v` arg, which has the shape of a mask: "
            f"if it is a mask, pass mask=",
            DeprecationWarning,
            stacklevel=3,
        )
    return _flax.join_inputs(inputs_q, inputs_k, inputs_v)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """``flax.linen.MultiHeadAttention``: ``MultiHeadDotProductAttention`` under its other name in Flax.

    It has the same attributes and call signature. Linen names parameters after the class, so a checkpoint fits only the
    class that created it.

    Example:
        >>> layer, x = jattn.linen.MultiHeadAttention(num_heads=2), jnp.ones((1, 4, 8))
        >>> params = layer.init(jax.random.key(0), x)
        >>> y, seen = layer.apply(params, x, is_causal=True, sow_weights=True, mutable="intermediates")
        >>> y.shape, seen["intermediates"]["attention_weights"][0].shape
        ((1, 4, 8), (1, 2, 4, 4))
    """


class SelfAttention(MultiHeadDotProductAttention):
    """``flax.linen.SelfAttention``: ``MultiHeadDotProductAttention`` with a single input, in Flax's argument order.

    It has the same attributes. As in Flax, a call warns that the class is deprecated.

    Example:
        >>> import warnings
        >>> with warnings.catch_warnings(action="ignore"):
        ...     layer, x = jattn.linen.SelfAttention(num_heads=2), jnp.ones((1, 4, 8))
        ...     y, params = layer.init_with_output(jax.random.key(0), x, jattn.masks.Causal())
        >>> y.shape, params["params"]["query"]["kernel"].shape
        ((1, 4, 8), (8, 2, 4))
    """

    @nn.compact
    def __call__(  # type: ignore[override]
        self,
        inputs_q: Array,
        mask: ArrayLike | MaskFunction | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
        **options: Any,
    ) -> Any:
        """The layer's output ``[..., T, out_features]`` for ``[..., T, M]``, the input of queries, keys and values.

        The other arguments and ``options`` are the same as for calling ``MultiHeadDotProductAttention``.
        """
        warnings.warn(
            "SelfAttention will be deprecated soon, as in Flax: use MultiHeadDotProductAttention",
            DeprecationWarning,
            stacklevel=2,
        )
        dropout: dict[str, Any] = {"deterministic": deterministic, "dropout_rng": dropout_rng}
        return super().__call__(inputs_q, mask=mask, sow_weights=sow_weights, **dropout, **options)
