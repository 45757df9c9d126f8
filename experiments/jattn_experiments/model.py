"""The model of all experiments: a small transformer built on jattn's Linen module.

It is not ``jattn.interop.Transformer``, which implements published families in NNX. Here, tokens have several fields
and answers several places. Linen initializes and names the parameters, and all kept results and checkpoints depend on
that.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from jattn import positions, score_mods
from jattn.linen import MultiHeadDotProductAttention
from jattn.masks import SlidingWindow
from jattn.sharding import HeadParallel, Ring, to_zigzag
from jattn_experiments import config
from jattn_experiments.tasks import Task

# Scores times this put all weight on the largest one: scores that differ by 1e-4 end up e^-100 apart.
SHARPNESS = 1e6
RELATIVE_BUCKETS = 32
# Adam moves all parameters at the same pace, but a bias must move farther than a weight, so it has these units.
RELATIVE_UNIT = 8.0


class Transformer(nn.Module):
    """Embeddings, ``num_layers`` of attention (and MLP) on a residual stream, and a linear read-out per place."""

    options: config.Model
    vocabulary: tuple[int, ...]  # ids in each field of a token
    max_length: int
    num_places: int
    num_classes: int
    padding: int | None = None  # token that no query sees
    implementation: Ring | HeadParallel | None = None  # attention on a mesh; a ring's tokens are in zigzag order

    @nn.compact
    def __call__(
        self,
        tokens: Array,
        *,
        at: Array | None = None,
        harden: bool = False,
        per_layer: Sequence[Mapping[str, Any]] | None = None,
        **attention: Any,
    ) -> Array:
        """Logits ``[B,T,A,classes]`` of ``tokens [B,T,F]``, or ``[B,Q,A,classes]`` of those ``at`` some positions.

        Args:
            at: positions ``[B,Q]``.
            harden: put all the weight of each attention row on its largest.
            per_layer: options of each layer's attention call, such as ``head_gate`` (``jattn.heads.ablate``).
            attention: options of every attention call, such as ``sow_weights``.
        """
        options = self.options
        where = jnp.arange(tokens.shape[1])  # positions
        if isinstance(self.implementation, Ring):
            where = to_zigzag(where, self.implementation.mesh.shape["sequence"], axis=0)
        embedding = nn.initializers.normal(options.embed_scale)
        embed = [
            nn.Embed(size, options.model_dim, embedding_init=embedding, name=f"embed_{field}")
            for field, size in enumerate(self.vocabulary)
        ]
        x = sum(one(tokens[..., field]) for field, one in enumerate(embed))
        if options.position == "learned":
            table = self.param("positions", embedding, (self.max_length, options.model_dim))
            x = x + table[where][None]
        elif options.position == "sinusoidal":
            x = x + positions.sinusoidal(x.shape[1], options.model_dim)[where][None]
        if self.padding is not None:
            attention["mask"] = (tokens[..., 0] != self.padding)[:, None, None, :]
        for layer in range(options.num_layers):
            here = attention | dict(per_layer[layer] if per_layer else {})
            if isinstance(self.implementation, Ring) and options.position == "rotary":
                here["input_positions"] = where
            x = Block(options, self.implementation, name=f"layer_{layer}")(x, harden, here)
        x = _norm(options, "norm")(x)
        if at is not None:
            x = jnp.take_along_axis(x, at[..., None], 1)
        if options.tied:
            return embed[0].attend(x)[..., None, :]
        kernels = _kernel_init(options)
        return nn.DenseGeneral((self.num_places, self.num_classes), kernel_init=kernels, name="read_out")(x)


class Block(nn.Module):
    """Attention and, unless ``mlp_dim`` is 0, an MLP, each added to the residual stream."""

    options: config.Model
    implementation: Ring | HeadParallel | None = None

    @nn.compact
    def __call__(self, x: Array, harden: bool, attend: Mapping[str, Any]) -> Array:
        """``x [B,T,M]`` to the same shape."""
        options = self.options
        attention = MultiHeadDotProductAttention(
            num_heads=options.num_heads,
            num_kv_heads=options.num_kv_heads,
            qkv_features=options.num_heads * options.head_dim,
            value_dim=options.value_dim,
            position=positions.Rotary(base=options.rotary_base) if options.position == "rotary" else None,
            kernel_init=_kernel_init(options),
            implementation=self.implementation,
            name="attention",
        )
        normed = _norm(options, "attention_norm")(x)
        if options.position == "relative_keys":
            attend = {**attend, "bias": self._relative_keys(normed)}
        if options.window is not None:
            attend = {**attend, "mask": SlidingWindow(options.window - 1, 0)}
        x = x + attention(normed, is_causal=options.causal, score_mod=self._score_mod(harden), **attend)
        if options.mlp_dim:
            dense = functools.partial(nn.Dense, kernel_init=_kernel_init(options))
            hidden = dense(options.mlp_dim, name="mlp_in")(_norm(options, "mlp_norm")(x))
            x = x + dense(options.model_dim, name="mlp_out")(nn.gelu(hidden))
        return x

    def _relative_keys(self, x: Array) -> Array:
        """``[B,N,T,T]``: ``q . r[distance] / sqrt(head_dim)``, where q is a separate projection of ``x [B,T,M]``.

        Source: Shaw et al., https://arxiv.org/abs/1803.02155, section 3.2, with a vector for every distance.
        """
        options, (batch, length, _) = self.options, x.shape
        each = options.num_heads, options.head_dim
        query = nn.DenseGeneral(each, use_bias=False, kernel_init=_kernel_init(options), name="relative_query")(x)
        table = self.param("relative_keys", nn.initializers.normal(options.embed_scale), (length, *each))
        scores = jnp.einsum("btnh,dnh->bntd", query, table[::-1]) / options.head_dim**0.5  # distances T-1 to 0
        # Row t moves left by T-1-t, so that a query's own position has distance 0: pad each row by one, then reshape.
        wider = jnp.pad(scores, ((0, 0), (0, 0), (0, 0), (1, 0)))
        return wider.reshape(batch, options.num_heads, length + 1, length)[:, :, 1:]

    def _score_mod(self, harden: bool) -> score_mods.ScoreMod | None:
        options, mods = self.options, []
        if options.position == "alibi":
            mods.append(score_mods.Alibi(jnp.asarray(score_mods.alibi_slopes(options.num_heads))))
        elif options.position == "relative":
            shape = (RELATIVE_BUCKETS, options.num_heads)
            table = self.param("relative_bias", nn.initializers.normal(1 / RELATIVE_UNIT), shape)
            mods.append(score_mods.RelativeBias(RELATIVE_UNIT * table, bidirectional=False))
        if harden:
            mods.append(lambda score, b, h, q_idx, kv_idx: score * SHARPNESS)
        return score_mods.then(*mods) if mods else None


def _norm(options: config.Model, name: str) -> Any:
    return nn.LayerNorm(name=name) if options.norm else lambda x: x


def _kernel_init(options: config.Model) -> nn.initializers.Initializer:
    scale = options.kernel_scale
    return nn.linear.default_kernel_init if scale is None else nn.initializers.normal(scale)


def make(options: config.Model, task: Task, implementation: Ring | HeadParallel | None = None) -> Transformer:
    """The model of a config, sized for its task."""
    sizes = task.vocabulary, task.max_length, len(task.places), task.classes
    return Transformer(options, *sizes, task.padding, implementation)


def layer_by_layer(intermediates: dict[str, Any], name: str) -> list[Any]:
    """What each layer's attention sowed under ``name``."""
    layers = sorted(intermediates, key=lambda layer: int(layer.rpartition("_")[2]))
    return [intermediates[layer]["attention"][name][0] for layer in layers]


def attention_weights(intermediates: dict[str, Any]) -> Array:
    """The sown weights of all layers, ``[B,L,N,T,S]``."""
    return jnp.stack(layer_by_layer(intermediates, "attention_weights"), 1)
