"""The sizes and the kind of a model, and one of its layers, on ``jattn.nnx.MultiHeadAttention``."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from jattn.interop._products import dot_general
from jattn.nnx import MultiHeadAttention
from jattn.positions import Rotary

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and the kind of a ``Transformer``; ``read_config`` makes one from a ``config.json``."""

    family: str
    num_layers: int
    num_heads: int
    model_dim: int
    mlp_dim: int
    vocabulary: int
    max_length: int  # of learned positions, and of what the model was trained for
    norm_epsilon: float
    activation: str  # of ACTIVATIONS
    num_kv_heads: int | None = None  # None: num_heads
    head_dim: int | None = None  # None: model_dim / num_heads
    token_types: int = 0
    causal: bool = True
    norm: str = "layer"  # or "rms"
    norm_first: bool = True  # before attention and MLP, and at the end; otherwise after each, and after the embeddings
    parallel: bool = False  # attention and MLP read the same input
    gated: bool = False  # the MLP is out(activation(gate(x)) * in(x))
    position: Rotary | None = None  # None: learned embeddings
    window: int | None = None  # the keys that a query sees, itself included
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    pooler: bool = False  # BERT's, of the first token
    head: bool = False  # a separate output embedding
    tied: bool = True  # without one, the input embedding serves

    @property
    def size_of_head(self) -> int:
        """``head_dim``, also where it is not given."""
        return self.model_dim // self.num_heads if self.head_dim is None else self.head_dim

    def new_norm(self, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
        """A norm of the residual stream."""
        if self.norm == "rms":
            return nnx.RMSNorm(self.model_dim, epsilon=self.norm_epsilon, rngs=rngs)
        # As in PyTorch, the variance is the mean square of what is left without the mean. Flax's default, a difference
        # of squares, loses all digits where the mean is large.
        return nnx.LayerNorm(self.model_dim, epsilon=self.norm_epsilon, use_fast_variance=False, rngs=rngs)


class Block(nnx.Module):
    """Attention and an MLP, each added to the residual stream, with a norm before or after."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, use_bias=config.mlp_bias, dot_general=dot_general, rngs=rngs)
        self.attention = MultiHeadAttention(
            config.num_heads,
            config.model_dim,
            config.num_heads * config.size_of_head,
            num_kv_heads=config.num_kv_heads,
            position=config.position,
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
        self.attention_norm = config.new_norm(rngs)
        self.mlp_in = linear(config.model_dim, config.mlp_dim)
        self.mlp_out = linear(config.mlp_dim, config.model_dim)
        self.mlp_norm = config.new_norm(rngs)
        self.mlp_gate = linear(config.model_dim, config.mlp_dim) if config.gated else nnx.data(None)
        self.norm_first, self.parallel, self.activation = config.norm_first, config.parallel, config.activation

    def __call__(self, x: Array, *, sow_parts: bool = False, **attention: Any) -> Any:
        """``[B,T,M] -> [B,T,M]``; ``attention``: options of the attention's call. With ``cache``, a pair with it.

        ``sow_parts``: sow ``residual_parts``: the layer's ``input`` and the output of its ``mlp``, ``[B,T,M]``.
        """
        before = x
        z = self.attention(self.attention_norm(x) if self.norm_first else x, **attention)
        z, cache = z if isinstance(z, tuple) else (z, None)
        if self.parallel:
            mlp = self.mlp(self.mlp_norm(x))
            x = x + z + mlp
        elif self.norm_first:
            x = x + z
            mlp = self.mlp(self.mlp_norm(x))
            x = x + mlp
        else:
            x = self.attention_norm(x + z)
            mlp = self.mlp(x)
            x = self.mlp_norm(x + mlp)
        if sow_parts:
            self.sow(nnx.Intermediate, "residual_parts", {"input": before, "mlp": mlp})
        return x if cache is None else (x, cache)

    def mlp(self, x: Array) -> Array:
        """The MLP, ``[..., M] -> [..., M]``."""
        activation = ACTIVATIONS[self.activation]
        hidden = self.mlp_in(x)
        hidden = activation(hidden) if self.mlp_gate is None else activation(self.mlp_gate(x)) * hidden
        return self.mlp_out(hidden)
