"""Attributes a logit directly to the parts of a ``Transformer`` (``logit_parts``)."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, ArrayLike

from jattn import heads
from jattn._core.call import softmax_dtype
from jattn.interop._transformer import Transformer


def logit_parts(model: Transformer, tokens: ArrayLike, directions: Array, **options: Any) -> dict[str, Array]:
    """Direct logit attribution of a ``Transformer``: what each part adds to a logit, from one forward pass.

    Args:
        model: a model with a norm at the end. With norms on the stream itself, as in BERT, no sum of parts exists.
        tokens: integers ``[B,T]``.
        directions: ``[M]``, or an array that broadcasts to ``[B,T,M]``, such as ``[B,1,M]``: rows of
            ``model.output_embedding()``, or differences of rows.
        options: keywords of the model's call, such as ``valid`` or ``per_layer``; not ``cache``.

    Returns:
        A dict: ``"embedding" [B,T]``, including positions and token types; ``"heads" [L,B,T,N]``; ``"mlp" [L,B,T]``;
        ``"bias" [B,T]``, from all attention outputs and the last norm. Their sum is the logit, before the model's soft
        cap, if any. The factors of norms on attention outputs and of the last norm are held fixed
        (``jattn.heads.logit_attribution``).

    Raises:
        ValueError: the model has norms on its stream itself, or ``directions`` has the wrong shape.

    Example:
        >>> from flax import nnx
        >>> sizes = {"num_layers": 2, "num_heads": 2, "model_dim": 8, "mlp_dim": 16, "vocabulary": 11, "max_length": 9}
        >>> config = jattn.interop.Config("tiny", **sizes, norm_epsilon=1e-5, activation="relu")
        >>> model = jattn.interop.Transformer(config, rngs=nnx.Rngs(0))
        >>> rows = model.output_embedding()
        >>> parts = jattn.interop.logit_parts(model, jnp.array([[3, 1, 4]]), rows[7] - rows[5])
        >>> parts["heads"][:, 0, -1].shape  # what each head adds at the last token to logit 7 less logit 5, [L,N]
        (2, 2)
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
    kernel = out.kernel[...]  # [L,N,D,M]
    out_bias = jnp.zeros((1, 1, 1, 1)) if out.bias is None else out.bias[...][:, None, None]  # [L,1,1,M]
    out_norm: Any = model.layers.attention_out_norm
    if out_norm is not None:
        dtype, out_scale = softmax_dtype(stream), out_norm.scale[...][:, None, None]
        squares = jnp.square(residual["attention"].astype(dtype))
        factor = jax.lax.rsqrt(squares.mean(-1, keepdims=True) + config.norm_epsilon)  # [L,B,T,1]
        z, kernel = z.astype(dtype) * factor[..., None], kernel * out_scale
        out_bias = (out_bias * out_scale).astype(dtype) * factor
    parts: dict[str, Any] = {
        "embedding": residual["input"][0],
        "heads": (z, kernel),
        "mlp": residual["mlp"],
        "bias": jnp.broadcast_to(out_bias.sum(0), stream.shape),
    }
    scale, bias = (None if x is None else x[...] for x in (norm.scale, getattr(norm, "bias", None)))
    return heads.logit_attribution(
        parts, directions, stream, norm=config.norm, scale=scale, bias=bias, epsilon=config.norm_epsilon
    )
