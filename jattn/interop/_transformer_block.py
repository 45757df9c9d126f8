"""Implements one layer of a model: attention and an MLP on ``jattn.nnx.MultiHeadAttention``."""

import functools
from typing import Any

from flax import nnx
from jaxtyping import Array

from jattn.interop._config import ACTIVATIONS, Config
from jattn.interop._products import dot_general
from jattn.nnx import MultiHeadAttention
from jattn.score_mods import SoftCap


class Block(nnx.Module):
    """One layer of a model: attention and an MLP, each added to the residual stream, with the config's norms.

    Args:
        config: the sizes and the kind.
        rngs: the random keys of the parameters.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 1, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> block = jattn.interop.Block(config, rngs=nnx.Rngs(0))
        >>> block(jnp.ones((1, 3, 8)), is_causal=True, head_gate=jnp.array([1.0, 0.0])).shape  # head 1 is off
        (1, 3, 8)
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=config.mlp_bias, dot_general=dot_general, rngs=rngs)
        self.attention = MultiHeadAttention(
            config.num_heads,
            config.model_dim,
            config.num_heads * config.size_of_head,
            num_kv_heads=config.num_kv_heads,
            position=config.position,
            score_mod=None if config.score_cap is None else SoftCap(config.score_cap),
            use_bias=config.qkv_bias or config.out_bias,
            qkv_dot_general=dot_general,
            out_dot_general=dot_general,
            rngs=rngs,
        )
        if not config.out_bias:
            self.attention.out.bias = nnx.data(None)
        if not config.qkv_bias:
            for projection in (self.attention.query, self.attention.key, self.attention.value):
                projection.bias = nnx.data(None)
        if config.qk_norm is not None:
            self.attention.query_ln = config.new_qk_norm(self.attention.num_heads, rngs)
            self.attention.key_ln = config.new_qk_norm(self.attention.num_kv_heads, rngs)
        outputs_alone = config.norm_outputs and not config.norm_first
        self.attention_norm = nnx.data(None) if outputs_alone else config.new_norm(rngs)
        self.mlp_in = linear(config.model_dim, config.mlp_dim)
        self.mlp_out = linear(config.mlp_dim, config.model_dim)
        self.mlp_norm = nnx.data(None) if outputs_alone else config.new_norm(rngs)
        self.mlp_gate = linear(config.model_dim, config.mlp_dim) if config.gated else nnx.data(None)
        self.attention_out_norm = config.new_norm(rngs) if config.norm_outputs else nnx.data(None)
        self.mlp_out_norm = config.new_norm(rngs) if config.norm_outputs else nnx.data(None)
        self.norm_sums = not (config.norm_first or config.norm_outputs)
        self.parallel, self.activation, self.scale = config.parallel, config.activation, config.scale

    def __call__(self, x: Array, *, sow_parts: bool = False, **attention: Any) -> Any:
        """The layer's output ``[B,T,M]`` for ``x [B,T,M]``; with ``cache=``, ``(output, cache)``.

        ``attention``: options of the attention call. ``sow_parts`` sows ``residual_parts``: the layer's ``input``, the
        output of its attention before ``attention_out_norm``, and what its ``mlp`` adds, all ``[B,T,M]``.
        """
        before = x
        if self.scale is not None:
            attention = {"scale": self.scale, **attention}
        z = self.attention(x if self.norm_sums else _normed(self.attention_norm, x), **attention)
        z, cache = z if isinstance(z, tuple) else (z, None)
        added = _normed(self.attention_out_norm, z)
        if self.norm_sums:
            x = _normed(self.attention_norm, x + added)
            mlp = self.mlp(x)
            x = _normed(self.mlp_norm, x + mlp)
        else:
            y = x + added
            mlp = _normed(self.mlp_out_norm, self.mlp(_normed(self.mlp_norm, x if self.parallel else y)))
            x = y + mlp
        if sow_parts:
            self.sow(nnx.Intermediate, "residual_parts", {"input": before, "attention": z, "mlp": mlp})
        return x if cache is None else (x, cache)

    def mlp(self, x: Array) -> Array:
        """The output ``[..., M]`` of the MLP for ``x [..., M]``."""
        activation = ACTIVATIONS[self.activation]
        hidden = self.mlp_in(x)
        hidden = activation(hidden) if self.mlp_gate is None else activation(self.mlp_gate(x)) * hidden
        return self.mlp_out(hidden)


def _normed(norm: nnx.LayerNorm | nnx.RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
