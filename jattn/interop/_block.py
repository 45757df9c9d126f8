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
from jattn.score_mods import SoftCap

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and the kind of a ``Transformer``; :func:`~jattn.interop.read_config` makes one from a file.

    Without ``norm_first`` and ``norm_outputs``, norms are of the stream itself: after the embeddings, after attention
    and after the MLP.

    Raises:
        ValueError: ``local`` is not of one entry a layer; an unknown ``qk_norm``; ``norm_outputs`` without RMS norms.

    Example:
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> kind = {"norm_epsilon": 1e-5, "activation": "relu", "window": 4, "local": (True, False)}
        >>> config = jattn.interop.Config("tiny", **sizes, **kind)  # the first layer has a window of 4 tokens
        >>> config.size_of_head, config.is_local
        (4, (True, False))
    """

    family: str
    num_layers: int
    num_heads: int
    model_dim: int
    mlp_dim: int
    vocabulary: int
    max_length: int  #: the number of learned positions, and the length that the model was trained for
    norm_epsilon: float
    activation: str  #: "gelu", "gelu_new", "gelu_pytorch_tanh", "relu" or "silu"
    num_kv_heads: int | None = None  #: ``num_heads`` by default
    head_dim: int | None = None  #: ``model_dim / num_heads`` by default
    token_types: int = 0
    causal: bool = True
    norm: str = "layer"  #: "layer" or "rms"
    norm_first: bool = True  #: norms before attention and MLP, and at the end
    norm_outputs: bool = False  #: norms of what attention and MLP add to the stream, and at the end; "rms" only
    qk_norm: str | None = None  #: an RMS norm of queries and keys, "head" by head or of "all" as one
    parallel: bool = False  #: attention and MLP read the same input
    gated: bool = False  #: the MLP is ``out(activation(gate(x)) * in(x))``
    position: Rotary | None = None  #: learned embeddings by default
    window: int | None = None  #: the keys that a query sees, itself included
    local: tuple[bool, ...] | None = None  #: the layers that have the window; all by default
    local_position: Rotary | None = None  #: that of these layers; ``position`` by default
    scale: float | None = None  #: that of scores; ``1 / sqrt(size_of_head)`` by default
    score_cap: float | None = None  #: the soft cap of scores
    logit_cap: float | None = None  #: the soft cap of logits
    embed_scale: float | None = None  #: what token embeddings are multiplied by
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    pooler: bool = False  #: BERT's, of the first token
    head: bool = False  #: a separate output embedding
    tied: bool = True  #: without a head, the input embedding is the output embedding

    def __post_init__(self):
        if self.local is not None and len(self.local) != self.num_layers:
            raise ValueError(f"local must say for each of {self.num_layers} layers, got {len(self.local)}")
        if self.norm_outputs and self.norm != "rms":
            raise ValueError(f"norm_outputs is for norm='rms', got {self.norm!r}")
        if self.qk_norm not in (None, "head", "all"):
            raise ValueError(f"qk_norm must be None, 'head' or 'all', got {self.qk_norm!r}")

    @property
    def is_local(self) -> tuple[bool, ...]:
        """``local``, also where it is not given."""
        return (True,) * self.num_layers if self.local is None else self.local

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

    def new_qk_norm(self, num_heads: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        """A norm of queries or keys ``[B,T,N,H]``."""
        features, axes = self.size_of_head, -1
        if self.qk_norm == "all":
            features, axes = num_heads * features, (-2, -1)
        return nnx.RMSNorm(features, epsilon=self.norm_epsilon, reduction_axes=axes, feature_axes=axes, rngs=rngs)


class Block(nnx.Module):
    """Attention and an MLP, each added to the residual stream, with norms as the config says: one layer of a model.

    Args:
        config: the sizes and the kind.
        rngs: of the parameters.

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
        """``[B,T,M] -> [B,T,M]``; ``attention``: options of the attention's call. With ``cache``, a pair with it.

        ``sow_parts``: sow ``residual_parts``: the layer's ``input``, the output of its attention before
        ``attention_out_norm``, and what its ``mlp`` adds, all ``[B,T,M]``.
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
        """The MLP, ``[..., M] -> [..., M]``."""
        activation = ACTIVATIONS[self.activation]
        hidden = self.mlp_in(x)
        hidden = activation(hidden) if self.mlp_gate is None else activation(self.mlp_gate(x)) * hidden
        return self.mlp_out(hidden)


def _normed(norm: nnx.LayerNorm | nnx.RMSNorm | None, x: Array) -> Array:
    return x if norm is None else norm(x)
