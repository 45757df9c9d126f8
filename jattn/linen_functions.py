"""``flax.linen.dot_product_attention`` and its weights: the ``attention_fn`` of Flax Linen."""

from collections.abc import Callable
from typing import Any

from flax import linen as nn
from flax.linen import dot_product_attention as flaxs_attention
from flax.linen import dot_product_attention_weights as flaxs_weights
from jaxtyping import Array, ArrayLike

from jattn._flax import attend_as_flax, refuse_extras, weights_as_flax
from jattn.core.attention import softmax_dtype
from jattn.masks import MaskFunction
from jattn.multi_head import common_dtype


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
    **extras: Any,
) -> Array:
    """``flax.linen.dot_product_attention`` with the same arguments: the ``attention_fn`` for Flax's modules.

    ``nn.MultiHeadDotProductAttention(..., attention_fn=jattn.linen.dot_product_attention)``; ``functools.partial``
    adds ``is_causal`` and ``extras``: ``position``, ``input_positions``, ``score_mod``, ``sinks``, ``head_gate``,
    ``implementation``, as in ``jattn.multi_head.attend_heads`` and ``jattn.dot_product_attention``.

    Args:
        query, key, value: ``[..., T, N, H]``, ``[..., S, K, H]``, ``[..., S, K, D]``; K may divide N.
        bias, mask: broadcast to ``[..., N, T, S]``; a mask of any dtype, or a ``Mask`` or a function of positions.
        module: sows the weights ``[..., N, T, S]`` as its ``attention_weights``.
        force_fp32_for_softmax: weights and output in float32. The softmax is always computed in at least float32.
        einsum_dot_general, qk_attn_weights_einsum, attn_weights_value_einsum: custom products, such as quantized ones;
            with these, Flax's function runs, which takes no ``extras``.
        others: as in Flax.

    Returns:
        ``[..., T, N, D]``. A query that sees nothing gets 0 (in Flax, the mean of the values).
    """
    if einsum_dot_general or qk_attn_weights_einsum or attn_weights_value_einsum:
        if is_causal or callable(mask):
            raise ValueError("custom products (einsum) take only Flax's arguments; pass the mask as an array")
        refuse_extras(flaxs_attention, **extras)
        return flaxs_attention(
            query, key, value, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype,
            precision, module, force_fp32_for_softmax, einsum_dot_general, qk_attn_weights_einsum,
            attn_weights_value_einsum,
        )  # fmt: skip
    z = attend_as_flax(
        query, key, value, dtype=dtype, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng, dropout_rate=dropout_rate, deterministic=deterministic, precision=precision,
        is_causal=is_causal, return_weights=module is not None, **extras,
    )  # fmt: skip
    z, *weights = z if module is not None else (z,)
    if force_fp32_for_softmax:
        z = z.astype(softmax_dtype(z))
    if module is not None:
        module.sow("intermediates", "attention_weights", weights[0].astype(z.dtype))
    return z


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

    ``[..., N, T, S]``, after dropout; those sown are before dropout. Arguments as there; memory O(N·T·S).
    """
    if einsum_dot_general or einsum:
        if is_causal or callable(mask):
            raise ValueError("custom products (einsum) take only Flax's arguments; pass the mask as an array")
        refuse_extras(flaxs_weights, **extras)
        return flaxs_weights(
            query, key, bias, mask, broadcast_dropout, dropout_rng, dropout_rate, deterministic, dtype, precision,
            module, force_fp32_for_softmax, einsum_dot_general, einsum,
        )  # fmt: skip
    query, key, _ = common_dtype(query, key, key, dtype)
    kind = softmax_dtype(query) if force_fp32_for_softmax else query.dtype
    weights, kept = weights_as_flax(
        query, key, dtype=None, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng,
        dropout_rate=dropout_rate, deterministic=deterministic, precision=precision, is_causal=is_causal, **extras,
    )  # fmt: skip
    if module is not None:
        module.sow("intermediates", "attention_weights", weights.astype(kind))
    return kept.astype(kind)
