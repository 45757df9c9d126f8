"""``flax.nnx.dot_product_attention`` and its weights: the ``attention_fn`` of Flax NNX."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from flax.nnx.nn import dtypes
from jaxtyping import Array, ArrayLike

from jattn._flax import attend_as_flax, weights_as_flax
from jattn.masks import MaskFunction


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
    promote_dtype: Callable = dtypes.promote_dtype,
    is_causal: bool = False,
    **extras: Any,
) -> Array:
    """``flax.nnx.dot_product_attention`` with the same arguments: the ``attention_fn`` for Flax's modules.

    ``nnx.MultiHeadAttention(..., attention_fn=jattn.nnx.dot_product_attention)``; ``functools.partial`` adds
    ``extras``: ``position``, ``input_positions``, ``score_mod``, ``sinks``, ``head_gate``, ``implementation``, as in
    ``jattn.multi_head.attend_heads`` and ``jattn.dot_product_attention``.

    Args:
        query, key, value: ``[..., T, N, H]``, ``[..., S, K, H]``, ``[..., S, K, D]``.
        bias, mask: broadcast to ``[..., N, T, S]``; a mask of any dtype, or a ``Mask`` or a function of positions.
        module: sows the weights ``[..., N, T, S]`` as its ``attention_weights``.
        others: as in Flax.

    Returns:
        ``[..., T, N, D]``. A query that sees nothing gets 0 (in Flax, the mean of the values or worse).
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    z = attend_as_flax(
        query, key, value, dtype=None, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout,
        dropout_rng=dropout_rng, dropout_rate=dropout_rate, deterministic=deterministic, precision=precision,
        is_causal=is_causal, return_weights=module is not None, **extras,
    )  # fmt: skip
    if module is not None:
        z, weights = z
        module.sow(nnx.Intermediate, "attention_weights", weights.astype(query.dtype))
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
    module: nnx.Module | None = None,
    promote_dtype: Callable = dtypes.promote_dtype,
    is_causal: bool = False,
    **extras: Any,
) -> Array:
    """``flax.nnx.dot_product_attention_weights``: the weights that ``dot_product_attention`` applies.

    ``[..., N, T, S]``, after dropout; those sown are before dropout. Arguments as there; memory O(N·T·S).
    """
    query, key = promote_dtype((query, key), dtype=dtype)
    weights, kept = weights_as_flax(
        query, key, dtype=None, bias=bias, mask=mask, broadcast_dropout=broadcast_dropout, dropout_rng=dropout_rng,
        dropout_rate=dropout_rate, deterministic=deterministic, precision=precision, is_causal=is_causal, **extras,
    )  # fmt: skip
    if module is not None:
        module.sow(nnx.Intermediate, "attention_weights", weights.astype(query.dtype))
    return kept.astype(query.dtype)
