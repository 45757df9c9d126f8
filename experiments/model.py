"""The experiments' one model: a small causal transformer, built of jattn's own attention module."""

from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from experiments import config
from experiments.tasks import Task
from jattn import positions, score_mods
from jattn.linen import MultiHeadDotProductAttention

# Multiplying scores by this leaves all weight on the largest: scores that differ by 1e-4 are e^-100 apart.
SHARPNESS = 1e6
RELATIVE_BUCKETS = 32


class Transformer(nn.Module):
    """Embeddings, ``num_layers`` of attention (and MLP) on a residual stream, and one linear read-out a place."""

    options: config.Model
    vocabulary: tuple[int, ...]  # ids in each field of a token
    max_length: int
    num_places: int
    num_classes: int

    @nn.compact
    def __call__(
        self, tokens: Array, *, head_gates: Array | None = None, harden: bool = False, sow_weights: bool = False
    ) -> Array:
        """Logits ``[B,T,A,classes]`` of ``tokens [B,T,F]``.

        Args:
            head_gates: ``[L,N]``, multiplied onto each head's output; 0 switches a head off.
            harden: put the whole weight of each attention row on its largest.
            sow_weights: keep every layer's ``attention_weights [B,N,T,S]`` in ``intermediates``.
        """
        options = self.options
        embedding = nn.initializers.normal(options.embed_scale)
        x = sum(
            nn.Embed(size, options.model_dim, embedding_init=embedding, name=f"embed_{field}")(tokens[..., field])
            for field, size in enumerate(self.vocabulary)
        )
        if options.position == "learned":
            table = self.param("positions", embedding, (self.max_length, options.model_dim))
            x = x + table[None, : x.shape[1]]
        elif options.position == "sinusoidal":
            x = x + positions.sinusoidal(x.shape[1], options.model_dim)[None]
        for layer in range(options.num_layers):
            gate = None if head_gates is None else head_gates[layer]
            x = Block(options, name=f"layer_{layer}")(x, gate, harden, sow_weights)
        x = _norm(options, "norm")(x)
        return nn.DenseGeneral((self.num_places, self.num_classes), name="read_out")(x)


class Block(nn.Module):
    """Attention and, where ``mlp_dim`` is not 0, an MLP, each added to the residual stream."""

    options: config.Model

    @nn.compact
    def __call__(self, x: Array, head_gate: Array | None, harden: bool, sow_weights: bool) -> Array:
        """``x [B,T,M]`` to the same shape."""
        options = self.options
        attention = MultiHeadDotProductAttention(
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            qkv_features=options.num_heads * options.head_dim,
            value_dim=options.value_dim,
            position=positions.Rotary(base=options.rotary_base) if options.position == "rotary" else None,
            name="attention",
        )
        x = x + attention(
            _norm(options, "attention_norm")(x),
            is_causal=True,
            score_mod=self._score_mod(harden),
            head_gate=head_gate,
            sow_weights=sow_weights,
        )
        if options.mlp_dim:
            hidden = nn.Dense(options.mlp_dim, name="mlp_in")(_norm(options, "mlp_norm")(x))
            x = x + nn.Dense(options.model_dim, name="mlp_out")(nn.gelu(hidden))
        return x

    def _score_mod(self, harden: bool) -> score_mods.ScoreMod | None:
        options, mods = self.options, []
        if options.position == "alibi":
            mods.append(score_mods.Alibi(jnp.asarray(score_mods.alibi_slopes(options.num_heads))))
        elif options.position == "relative":
            shape = (RELATIVE_BUCKETS, options.num_heads)
            table = self.param("relative_bias", nn.initializers.normal(1.0), shape)
            mods.append(score_mods.RelativeBias(table, bidirectional=False))
        if harden:
            mods.append(lambda score, b, h, q_idx, kv_idx: score * SHARPNESS)
        return score_mods.then(*mods) if mods else None


def _norm(options: config.Model, name: str) -> Any:
    return nn.LayerNorm(name=name) if options.norm else lambda x: x


def make(options: config.Model, task: Task) -> Transformer:
    """The model of a config, sized for its task."""
    return Transformer(options, task.vocabulary, task.max_length, len(task.places), task.symbols)


def attention_weights(intermediates: dict[str, Any]) -> Array:
    """The sown weights of all layers, ``[B,L,N,T,S]``."""
    layers = sorted(intermediates, key=lambda name: int(name.rpartition("_")[2]))
    return jnp.stack([intermediates[name]["attention"]["attention_weights"][0] for name in layers], 1)
