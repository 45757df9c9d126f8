"""Computes what each head adds directly to a logit, and the kernels by which heads write to the residual stream."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from jattn import heads
from jattn.interop import Transformer, logit_parts


def out_kernels(model: Any) -> Array | None:
    """``[L,N,D,M]``, if the model provides its kernels and no norm follows them."""
    if isinstance(model, Transformer):
        as_it_is = model.config.norm_first and not model.config.norm_outputs
        return model.layers.attention.out.kernel[...] if as_it_is else None
    return model.out_kernels() if hasattr(model, "out_kernels") else None


def attribution(
    model: Any, z: Sequence[Array], stream: Array, tokens: Array, directions: Array | None
) -> tuple[np.ndarray | None, str]:
    """``[L,N]``, the mean over tokens, and a description; None and the reason if the model does not allow it.

    ``directions``: ``[M]`` or an array that broadcasts to ``[B,T,M]``; None for the row of each correct next token.
    """
    last, target = tokens.shape[1], "the given directions"
    if directions is None:
        if not hasattr(model, "output_embedding"):
            return None, "no attribution: the model has no output_embedding"
        last, target = last - 1, "the next token's logit"
        try:
            rows = model.output_embedding()
        except ValueError as reason:
            return None, f"no attribution: {reason}"
        directions = jnp.asarray(rows)[jnp.roll(tokens, -1, 1)]
    what = f"attribution: to {target}, mean over tokens, with the last norm's scale held"
    kernels, norm = out_kernels(model), getattr(model, "last_norm", ...)
    if kernels is None and isinstance(model, Transformer):
        try:
            shares = logit_parts(model, tokens, directions)["heads"]
        except ValueError as reason:
            return None, f"no attribution: {reason}"
        return np.asarray(shares[:, :, :last].mean((1, 2))), what
    if kernels is None or not (norm is None or isinstance(norm, nnx.LayerNorm | nnx.RMSNorm)):
        return None, "no attribution: it needs the model's out_kernels, last_norm and output_embedding"
    of_norm: dict[str, Any] = {}
    if norm is not None:
        of_norm = {"norm": "rms" if isinstance(norm, nnx.RMSNorm) else "layer", "epsilon": norm.epsilon}
        parameters = {name: getattr(norm, name, None) for name in ("scale", "bias")}
        of_norm |= {name: x[...] for name, x in parameters.items() if x is not None}

    each = zip(z, kernels, strict=True)
    shares = [heads.logit_attribution({"heads": of_layer}, directions, stream, **of_norm)["heads"] for of_layer in each]
    return np.stack([of_layer[:, :last].mean((0, 1)) for of_layer in shares]), what
