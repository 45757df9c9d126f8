"""The sizes and the kind of a model: every option by which one family differs from another."""

import dataclasses
import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array

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
    """The sizes and the kind of a ``Transformer``; :func:`~jattn.interop.read_config` makes one from a file.

    Without ``norm_first`` and ``norm_outputs``, norms are of the stream itself: after the embeddings, after attention
    and after the MLP.

    Raises:
        ValueError: ``local`` is not of one entry a layer; an unknown ``qk_norm``; ``norm_outputs`` without RMS norms;
            rotary positions that do not fit the heads.

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
    window: int | None = None  #: the keys that a query sees, itself included; not causal: half of it on either side
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
        for position in (self.position, self.local_position):
            if isinstance(position, Rotary):
                position.frequencies(self.size_of_head)  # raises if it cannot rotate heads of this size

    @property
    def is_local(self) -> tuple[bool, ...]:
        """``local``, also where it is not given."""
        return (True,) * self.num_layers if self.local is None else self.local

    @property
    def window_sides(self) -> tuple[int, int]:
        """The keys that a query sees before and after its own, in a layer with the window."""
        if self.window is None:
            raise ValueError(f"a {self.family} of this config has no window")
        return (self.window - 1, 0) if self.causal else (self.window // 2, self.window // 2)

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
