"""The Transformer of the BERT and GPT-2 families, on ``jattn.nnx.MultiHeadAttention``."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn import masks
from jattn.nnx import MultiHeadAttention

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_new": functools.partial(jax.nn.gelu, approximate=True),
    "gelu_pytorch_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes of a ``Transformer``; ``read_config`` makes one from a ``config.json``."""

    family: str  # "bert" or "gpt2"
    num_layers: int
    num_heads: int
    model_dim: int
    mlp_dim: int
    vocabulary: int
    max_length: int
    token_types: int
    norm_epsilon: float
    activation: str
    pooler: bool = False  # BERT's, of the first token
    head: bool = False  # a separate output embedding; otherwise the input's

    @property
    def causal(self) -> bool:
        """Whether attention is causal; such models also apply norms before attention and MLP."""
        return self.family == "gpt2"


class Block(nnx.Module):
    """Attention and an MLP, each added to the residual stream, with a layer norm before (GPT-2) or after (BERT)."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        norm = functools.partial(nnx.LayerNorm, config.model_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.attention = MultiHeadAttention(config.num_heads, config.model_dim, rngs=rngs)
        self.attention_norm = norm()
        self.mlp_in = nnx.Linear(config.model_dim, config.mlp_dim, rngs=rngs)
        self.mlp_out = nnx.Linear(config.mlp_dim, config.model_dim, rngs=rngs)
        self.mlp_norm = norm()
        self.norm_first, self.activation = config.causal, config.activation

    def __call__(self, x: Array, **attention: Any) -> Array:
        """``[B,T,M] -> [B,T,M]``; ``attention``: options of the attention's call."""

        def mlp(x):
            return self.mlp_out(ACTIVATIONS[self.activation](self.mlp_in(x)))

        if self.norm_first:
            x = x + self.attention(self.attention_norm(x), **attention)
            return x + mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, **attention))
        return self.mlp_norm(x + mlp(x))


class Transformer(nnx.Module):
    """A BERT or GPT-2 model on ``jattn.nnx.MultiHeadAttention``, without dropout."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        self.config = config
        embed = functools.partial(nnx.Embed, features=config.model_dim, rngs=rngs)
        norm = functools.partial(nnx.LayerNorm, config.model_dim, epsilon=config.norm_epsilon, rngs=rngs)
        self.token_embed = embed(config.vocabulary)
        self.position_embed = embed(config.max_length)
        self.type_embed = embed(config.token_types) if config.token_types else nnx.data(None)
        self.embed_norm = nnx.data(None) if config.causal else norm()
        self.layers = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.last_norm = norm() if config.causal else nnx.data(None)
        self.pooler = nnx.Linear(config.model_dim, config.model_dim, rngs=rngs) if config.pooler else nnx.data(None)
        self.head = (
            nnx.Linear(config.model_dim, config.vocabulary, use_bias=False, rngs=rngs)
            if config.head
            else nnx.data(None)
        )

    def __call__(
        self,
        tokens: ArrayLike,
        *,
        valid: ArrayLike | None = None,
        token_types: ArrayLike | None = None,
        per_layer: Sequence[Mapping[str, Any]] | None = None,
        **attention: Any,
    ) -> Array:
        """The final hidden states ``[B,T,M]`` of ``tokens``, integers ``[B,T]``.

        Args:
            tokens: ids below ``config.vocabulary``, with T at most ``config.max_length``.
            valid: bool ``[B,T]``: False for padding, which no query sees.
            token_types: integers ``[B,T]``, BERT's segments; 0 by default.
            per_layer: options of each layer's attention call, such as ``head_gate`` (``jattn.heads.ablate``).
            attention: options of every layer's attention call, such as ``sow_weights``.

        Raises:
            ValueError: ``tokens`` are not integers ``[B,T]`` or too long for the model; ``per_layer`` does not have an
                entry for each layer.
        """
        tokens, config = jnp.asarray(tokens), self.config
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer) or tokens.shape[1] > config.max_length:
            raise ValueError(
                f"tokens must be integers [B, T] with T at most {config.max_length}, got {tokens.dtype} of shape "
                f"{list(tokens.shape)}"
            )
        x = self.token_embed(tokens) + self.position_embed(jnp.arange(tokens.shape[1]))[None]
        if self.type_embed is not None:
            x = x + self.type_embed(jnp.zeros_like(tokens) if token_types is None else jnp.asarray(token_types))
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        if per_layer is not None and len(per_layer) != config.num_layers:
            raise ValueError(
                f"per_layer must have options for each of {config.num_layers} layers, got {len(per_layer)}"
            )
        for i, layer in enumerate(self.layers):
            options = {"is_causal": config.causal, **attention, **(per_layer[i] if per_layer else {})}
            if valid is not None:
                options["mask"] = _mask_padding(jnp.asarray(valid, bool), options.get("mask"))
            x = layer(x, **options)
        return x if self.last_norm is None else self.last_norm(x)

    def logits(self, hidden: Array) -> Array:
        """``[..., M] -> [..., vocabulary]``: by the output embedding, or by the input embedding if there is none."""
        return self.token_embed.attend(hidden) if self.head is None else self.head(hidden)

    def pooled(self, hidden: Array) -> Array:
        """BERT's pooler, ``tanh(W x + b)`` of the first token: ``[B,T,M] -> [B,M]``.

        Raises:
            ValueError: the checkpoint has no pooler.
        """
        if self.pooler is None:
            raise ValueError("this checkpoint has no pooler")
        return jnp.tanh(self.pooler(hidden[:, 0]))


def _mask_padding(valid: Array, mask: Any) -> Any:
    """``mask``, if any, joined with one that shows only the valid keys, ``valid [B,T]``."""
    if callable(mask):
        return masks.and_masks(mask, lambda b, h, q_idx, kv_idx: valid[b, kv_idx])
    valid_keys = valid[:, None, None, :]
    return valid_keys if mask is None else valid_keys & jnp.asarray(mask, bool)
