"""``logit_parts``: direct logit attribution of a ``Transformer``."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn import heads
from jattn.interop.transformer import Transformer


def logit_parts(model: Transformer, tokens: ArrayLike, directions: Array, **options: Any) -> dict[str, Array]:
    """What each part of the model adds to a logit directly (``jattn.heads.logit_attribution``), from one forward pass.

    Args:
        model: with norms before attention and MLP, and at the end.
        tokens: integers ``[B,T]``.
        directions: ``[M]``, or what broadcasts to ``[B,T,M]``: rows of ``model.output_embedding()``, or differences of
            them, such as ``[B,1,M]``.
        options: of the model's call, such as ``valid`` or ``per_layer``; not ``cache``.

    Returns:
        ``"embedding" [B,T]``, positions and token types included; ``"heads" [L,B,T,N]``; ``"mlp" [L,B,T]``;
        ``"bias" [B,T]``, of all attention outputs and the last norm. Their sum is the logit.

    Raises:
        ValueError: the model has norms after attention and MLP; directions of another shape.

    Example:
        ``rows = model.output_embedding(); logit_parts(model, tokens, rows[right] - rows[wrong])["heads"][:, 0, -1]``
    """
    config, norm = model.config, model.last_norm
    if norm is None:
        raise ValueError(
            f"a {config.family} has norms after attention and MLP, so its residual stream is not a sum of parts"
        )
    look = nnx.capture(lambda model: model(tokens, sow_heads=True, sow_parts=True, **options), nnx.Intermediate)
    sown: Any = look(model)[1]
    layers, out = sown["layers"], model.layers.attention.out
    z = layers["attention"]["attention_heads"][0]["z"]
    residual, stream = layers["residual_parts"][0], sown["last_stream"][0]
    parts: dict[str, Any] = {
        "embedding": residual["input"][0],
        "heads": (z, out.kernel[...]),
        "mlp": residual["mlp"],
        "bias": jnp.zeros_like(stream) if out.bias is None else jnp.broadcast_to(out.bias[...].sum(0), stream.shape),
    }
    scale, bias = (None if x is None else x[...] for x in (norm.scale, getattr(norm, "bias", None)))
    return heads.logit_attribution(
        parts, directions, stream, norm=config.norm, scale=scale, bias=bias, epsilon=config.norm_epsilon
    )
