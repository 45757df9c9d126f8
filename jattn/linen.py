"""Flax Linen: a multi-head attention layer with Flax's parameters, round ``jattn.multi_head.attend_heads``."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, ArrayLike

from jattn.masks import MaskFunction
from jattn.multi_head import attend_heads, choose_deterministic, common_dtype, join_inputs
from jattn.score_mods import ScoreMod


class MultiHeadDotProductAttention(nn.Module):
    """Multi-head attention with the parameters of ``flax.linen.MultiHeadDotProductAttention``.

    ``query/key/value`` are ``nn.DenseGeneral`` with kernels ``[M,N,H]``, ``[M,K,H]``, ``[M,K,D]``, ``out`` one with
    ``[N,D,M]``; with ``normalize_qk`` there are ``query_ln`` and ``key_ln``. Same key, same bits as Flax's.

    Attributes:
        num_heads: N.
        qkv_features: ``N * H``; the input's features by default.
        out_features: of the output; the input's features by default.
        num_kv_heads: K, a divisor of N; N by default.
        value_dim: D; ``H`` by default.
        position: ``(x, positions) -> x`` for queries and keys, such as ``jattn.positions.Rotary()``.
        implementation: as in ``jattn.dot_product_attention``.
        dtype, param_dtype, precision, kernel_init, out_kernel_init, bias_init, out_bias_init, use_bias, dropout_rate,
            deterministic, normalize_qk: as in Flax. Dropout draws each head and sequence by itself.

    Example:
        ``layer = MultiHeadAttention(8); params = layer.init(key, x); y = layer.apply(params, x, is_causal=True)``
    """

    num_heads: int
    dtype: Any = None
    param_dtype: Any = jnp.float32
    qkv_features: int | None = None
    out_features: int | None = None
    num_kv_heads: int | None = None
    value_dim: int | None = None
    position: Callable[[Array, Array], Array] | None = None
    implementation: str | None = None
    dropout_rate: float = 0.0
    deterministic: bool | None = None
    precision: Any = None
    kernel_init: Callable = nn.initializers.lecun_normal()
    out_kernel_init: Callable | None = None
    bias_init: Callable = nn.initializers.zeros_init()
    out_bias_init: Callable | None = None
    use_bias: bool = True
    normalize_qk: bool = False

    @nn.compact
    def __call__(
        self,
        inputs_q: Array,
        inputs_k: Array | None = None,
        inputs_v: Array | None = None,
        *,
        mask: ArrayLike | MaskFunction | None = None,
        bias: ArrayLike | None = None,
        score_mod: ScoreMod | None = None,
        head_gate: ArrayLike | None = None,
        is_causal: bool = False,
        input_positions: ArrayLike | None = None,
        deterministic: bool | None = None,
        dropout_rng: Array | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """``[..., T, M] -> [..., T, out_features]``; keys from ``inputs_k`` ``[..., S, M]``, by default ``inputs_q``.

        Args:
            inputs_q, inputs_k, inputs_v: as in Flax: k defaults to q, v to k.
            mask: an array that broadcasts to ``[..., N, T, S]`` (cast to bool, as in Flax), a ``Mask`` or a function.
            bias, score_mod, is_causal: as in ``jattn.dot_product_attention``.
            head_gate: ``[N]``, ``[B,N]`` or ``[B,T,N]``: what each head's output is multiplied by before ``out``.
            input_positions: ``[T]`` or ``[..., T]``: of the queries, in self-attention also of the keys.
            deterministic, dropout_rng: as in Flax.
            sow_weights: sow the weights ``[..., N, T, S]`` into ``intermediates`` as ``attention_weights``.
        """
        inputs_k, inputs_v, kv_positions = join_inputs(inputs_q, inputs_k, inputs_v, input_positions)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        if not choose_deterministic(self.dropout_rate, deterministic, self.deterministic):
            dropout_rng = self.make_rng("dropout") if dropout_rng is None else dropout_rng
        else:
            dropout_rng = None
        z = attend_heads(
            query,
            key,
            value,
            position=self.position,
            query_positions=input_positions,
            kv_positions=kv_positions,
            head_gate=head_gate,
            return_weights=sow_weights,
            mask=mask if mask is None or callable(mask) else jnp.asarray(mask, bool),
            bias=bias,
            score_mod=score_mod,
            is_causal=is_causal,
            implementation=self.implementation,
            dropout_rate=0.0 if dropout_rng is None else self.dropout_rate,
            dropout_rng=dropout_rng,
            precision=self.precision,
        )
        if sow_weights:
            z, weights = z
            self.sow("intermediates", "attention_weights", weights.astype(z.dtype))
        return nn.DenseGeneral(
            features=inputs_q.shape[-1] if self.out_features is None else self.out_features,
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            name="out",
        )(z)

    def _project(self, inputs_q: Array, inputs_k: Array, inputs_v: Array) -> tuple[Array, Array, Array]:
        """Query, key and value of all heads; called from within the compact ``__call__``."""
        qkv_features = inputs_q.shape[-1] if self.qkv_features is None else self.qkv_features
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        if qkv_features % self.num_heads or self.num_heads % num_kv_heads:
            raise ValueError(
                f"qkv_features ({qkv_features}) must be a multiple of num_heads ({self.num_heads}), and that of "
                f"num_kv_heads ({num_kv_heads})"
            )
        head_dim = qkv_features // self.num_heads
        value_dim = head_dim if self.value_dim is None else self.value_dim

        def dense(name: str, heads: int, dim: int) -> nn.Module:
            return nn.DenseGeneral(
                features=(heads, dim),
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                name=name,
            )

        query = dense("query", self.num_heads, head_dim)(inputs_q)
        key = dense("key", num_kv_heads, head_dim)(inputs_k)
        value = dense("value", num_kv_heads, value_dim)(inputs_v)
        if self.normalize_qk:
            norm: dict[str, Any] = {"use_bias": False, "dtype": self.dtype, "param_dtype": self.param_dtype}
            query, key = nn.LayerNorm(name="query_ln", **norm)(query), nn.LayerNorm(name="key_ln", **norm)(key)
        return common_dtype(query, key, value, self.dtype)


class MultiHeadAttention(MultiHeadDotProductAttention):
    """Multi-head attention: ``MultiHeadDotProductAttention`` under Flax's other name (Linen names parameters by it)."""
