"""Defines the sizes and the kind of a model: every option in which families differ."""

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
    """The sizes and the kind of a ``Transformer``; :func:`~jattn.interop.read_config` creates one from a file.

    The fields:

    - ``family``: the ``model_type``.
    - ``num_layers``, ``num_heads``, ``num_kv_heads``: L, N and K; K is N by default.
    - ``model_dim``, ``mlp_dim``, ``head_dim``: M, the width of the MLP, and H; H is ``M / N`` by default.
    - ``vocabulary``, ``token_types``: the numbers of tokens and of BERT's segments (0: none).
    - ``max_length``: the number of learned positions, and the length that the model was trained for.
    - ``norm``, ``norm_epsilon``: ``"layer"`` or ``"rms"``, and the number that the norm adds to the variance.
    - ``norm_first``: norms before attention and MLP, and at the end.
    - ``norm_outputs``: norms of what attention and MLP add to the stream, and at the end; ``"rms"`` only. Without
      ``norm_first`` and ``norm_outputs``, norms act on the stream itself: after embeddings, attention and MLP.
    - ``qk_norm``: an RMS norm of queries and keys, per ``"head"`` or over ``"all"`` heads together.
    - ``activation``, ``gated``: ``"gelu"``, ``"gelu_new"``, ``"gelu_pytorch_tanh"``, ``"relu"`` or ``"silu"``; whether
      the MLP is ``out(activation(gate(x)) * in(x))``.
    - ``parallel``: attention and MLP read the same input.
    - ``causal``: a token sees itself and earlier tokens.
    - ``position``: the ``Rotary``; learned embeddings by default.
    - ``window``, ``local``: the number of keys that a query sees, including its own (if not causal, half on either
      side); for each layer, whether it has the window (all by default).
    - ``local_position``: the ``Rotary`` of layers with the window; ``position`` by default.
    - ``scale``, ``score_cap``, ``logit_cap``: the factor on scores, ``1 / sqrt(H)`` by default; the soft caps of scores
      and of logits.
    - ``embed_scale``: the factor on token embeddings.
    - ``qkv_bias``, ``out_bias``, ``mlp_bias``: whether these projections have biases.
    - ``pooler``, ``head``, ``tied``: BERT's pooler of the first token; a separate output embedding; without it, the
      input embedding as the output embedding.

    Raises:
        ValueError: ``local`` does not have one entry per layer; ``qk_norm`` is unknown; ``norm_outputs`` is set without
            RMS norms; rotary positions do not match the heads.

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
    max_length: int
    norm_epsilon: float
    activation: str
    num_kv_heads: int | None = None
    head_dim: int | None = None
    token_types: int = 0
    causal: bool = True
    norm: str = "layer"
    norm_first: bool = True
    norm_outputs: bool = False
    qk_norm: str | None = None
    parallel: bool = False
    gated: bool = False
    position: Rotary | None = None
    window: int | None = None
    local: tuple[bool, ...] | None = None
    local_position: Rotary | None = None
    scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    embed_scale: float | None = None
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    pooler: bool = False
    head: bool = False
    tied: bool = True

    def __post_init__(self):
        if self.local is not None and len(self.local) != self.num_layers:
            raise ValueError(f"local must have an entry for each of {self.num_layers} layers, got {len(self.local)}")
        if self.norm_outputs and self.norm != "rms":
            raise ValueError(f"norm_outputs needs norm='rms', got {self.norm!r}")
        if self.qk_norm not in (None, "head", "all"):
            raise ValueError(f"qk_norm must be None, 'head' or 'all', got {self.qk_norm!r}")
        for position in (self.position, self.local_position):
            if isinstance(position, Rotary):
                position.frequencies(self.size_of_head)  # raises if it cannot rotate heads of this size

    @property
    def is_local(self) -> tuple[bool, ...]:
        """For each layer, whether it has the window: ``local``, or its default."""
        return (True,) * self.num_layers if self.local is None else self.local

    @property
    def window_sides(self) -> tuple[int, int]:
        """The numbers of keys that a query sees before and after its own, in a layer with the window."""
        if self.window is None:
            raise ValueError(f"this {self.family} has no window: window is None in its config")
        return (self.window - 1, 0) if self.causal else (self.window // 2, self.window // 2)

    @property
    def size_of_head(self) -> int:
        """H: ``head_dim``, or its default ``model_dim / num_heads``."""
        return self.model_dim // self.num_heads if self.head_dim is None else self.head_dim

    def new_norm(self, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
        """A norm of the residual stream."""
        if self.norm == "rms":
            return nnx.RMSNorm(self.model_dim, epsilon=self.norm_epsilon, rngs=rngs)
        # As in PyTorch, the variance is the mean square after subtracting the mean. Flax's default, a difference of
        # squares, loses all digits if the mean is large.
        return nnx.LayerNorm(self.model_dim, epsilon=self.norm_epsilon, use_fast_variance=False, rngs=rngs)

    def new_qk_norm(self, num_heads: int, rngs: nnx.Rngs) -> nnx.RMSNorm:
        """A norm of queries or keys ``[B,T,N,H]``."""
        features, axes = self.size_of_head, -1
        if self.qk_norm == "all":
            features, axes = num_heads * features, (-2, -1)
        return nnx.RMSNorm(features, epsilon=self.norm_epsilon, reduction_axes=axes, feature_axes=axes, rngs=rngs)
