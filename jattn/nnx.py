"""Flax NNX: a multi-head attention layer with Flax's parameters, round ``jattn.multi_head.attend_heads``."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn.masks import MaskFunction
from jattn.multi_head import attend_heads, choose_deterministic, common_dtype, join_inputs
from jattn.score_mods import ScoreMod


class MultiHeadAttention(nnx.Module):
    """Multi-head attention with the parameters of ``flax.nnx.MultiHeadAttention``: names, shapes, initial values.

    ``query/key/value`` are ``nnx.LinearGeneral`` with kernels ``[M,N,H]``, ``[M,K,H]``, ``[M,K,D]``, ``out`` one with
    ``[N,D,M]``; with ``normalize_qk`` there are ``query_ln`` and ``key_ln``. Same key, same bits as Flax's.

    Args:
        num_heads: N.
        in_features: M, of the queries' input.
        qkv_features: ``N * H``; ``in_features`` by default.
        out_features: of the output; ``in_features`` by default.
        num_kv_heads: K, a divisor of N; N by default.
        in_kv_features: of the keys' and values' input; ``in_features`` by default.
        value_dim: D; ``H`` by default.
        position: ``(x, positions) -> x`` for queries and keys, such as ``jattn.positions.Rotary()``.
        implementation: as in ``jattn.dot_product_attention``.
        dtype, param_dtype, precision, kernel_init, out_kernel_init, bias_init, out_bias_init, use_bias, dropout_rate,
            deterministic, normalize_qk, rngs: as in Flax. Dropout draws each head and sequence by itself.

    Raises:
        ValueError: a number of features or heads does not divide as it must.

    Example:
        ``layer = MultiHeadAttention(8, 64, rngs=nnx.Rngs(0)); y = layer(x, is_causal=True)``
    """

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
        implementation: str | None = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: Any = None,
        kernel_init: Callable = nnx.initializers.lecun_normal(),
        out_kernel_init: Callable | None = None,
        bias_init: Callable = nnx.initializers.zeros_init(),
        out_bias_init: Callable | None = None,
        use_bias: bool = True,
        normalize_qk: bool = False,
        rngs: nnx.Rngs,
    ):
        qkv_features = in_features if qkv_features is None else qkv_features
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if qkv_features % num_heads or num_heads % num_kv_heads:
            raise ValueError(
                f"qkv_features ({qkv_features}) must be a multiple of num_heads ({num_heads}), and that of "
                f"num_kv_heads ({num_kv_heads})"
            )
        head_dim = qkv_features // num_heads
        value_dim = head_dim if value_dim is None else value_dim
        in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.dtype, self.precision = dtype, precision
        self.dropout_rate, self.deterministic = dropout_rate, deterministic
        self.position, self.implementation = position, implementation
        shared: dict[str, Any] = {
            "dtype": dtype,
            "param_dtype": param_dtype,
            "precision": precision,
            "use_bias": use_bias,
            "rngs": rngs,
        }
        inits: dict[str, Any] = {"kernel_init": kernel_init, "bias_init": bias_init}
        out_inits: dict[str, Any] = {
            "kernel_init": out_kernel_init or kernel_init,
            "bias_init": out_bias_init or bias_init,
        }
        # the order in which Flax draws its parameters
        self.query = nnx.LinearGeneral(in_features, (num_heads, head_dim), **shared, **inits)
        self.key = nnx.LinearGeneral(in_kv_features, (num_kv_heads, head_dim), **shared, **inits)
        self.value = nnx.LinearGeneral(in_kv_features, (num_kv_heads, value_dim), **shared, **inits)
        norm: dict[str, Any] = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.query_ln = nnx.LayerNorm(head_dim, **norm) if normalize_qk else nnx.data(None)
        self.key_ln = nnx.LayerNorm(head_dim, **norm) if normalize_qk else nnx.data(None)
        out_features = in_features if out_features is None else out_features
        self.out = nnx.LinearGeneral((num_heads, value_dim), out_features, axis=(-2, -1), **shared, **out_inits)
        self.rngs = rngs.dropout.fork() if dropout_rate > 0 else nnx.data(None)

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
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
    ) -> Array:
        """``[..., T, M] -> [..., T, out_features]``; keys from ``inputs_k`` ``[..., S, M]``, by default ``inputs_q``.

        Args:
            inputs_q, inputs_k, inputs_v: as in Flax: k defaults to q, v to k.
            mask: an array that broadcasts to ``[..., N, T, S]`` (cast to bool, as in Flax), a ``Mask`` or a function.
            bias, score_mod, is_causal: as in ``jattn.dot_product_attention``.
            head_gate: ``[N]``, ``[B,N]`` or ``[B,T,N]``: what each head's output is multiplied by before ``out``.
            input_positions: ``[T]`` or ``[..., T]``: of the queries, in self-attention also of the keys.
            deterministic, rngs: as in Flax.
            sow_weights: sow the weights ``[..., N, T, S]`` as ``nnx.Intermediate`` ``attention_weights``.
        """
        inputs_k, inputs_v, kv_positions = join_inputs(inputs_q, inputs_k, inputs_v, input_positions)
        query, key, value = self.query(inputs_q), self.key(inputs_k), self.value(inputs_v)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        query, key, value = common_dtype(query, key, value, self.dtype)
        dropout_rng = None
        if not choose_deterministic(self.dropout_rate, deterministic, self.deterministic):
            dropout_rng = self._dropout_key(rngs)
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
            self.sow(nnx.Intermediate, "attention_weights", weights.astype(z.dtype))
        return self.out(z)

    def _dropout_key(self, rngs: nnx.Rngs | nnx.RngStream | None) -> jax.Array:
        stream = self.rngs if rngs is None else rngs
        if stream is None:
            raise ValueError("dropout needs a random key: pass rngs=nnx.Rngs(dropout=...) or deterministic=True")
        return stream.dropout() if isinstance(stream, nnx.Rngs) else stream()
