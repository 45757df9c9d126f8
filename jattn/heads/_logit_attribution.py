"""Attributes a logit to the heads, MLPs and embedding that write it, with the final norm folded in."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jattn._core.call import softmax_dtype

Part = Array | tuple[Array, Array]


def logit_attribution(
    parts: Mapping[str, Part],
    directions: Float[Array, "..."],
    stream: Float[Array, "..."],
    *,
    norm: str | None = None,
    scale: Float[Array, " M"] | None = None,
    bias: Float[Array, " M"] | None = None,
    epsilon: float = 1e-6,
) -> dict[str, Array]:
    """Direct logit attribution: what each part of the residual stream adds to a logit, bypassing later layers.

    ``logit = norm(stream) . direction``. With the norm's factor held at its value for this stream, the logit is linear
    in the stream, so if the parts sum to the stream, their shares sum to the logit. No head's output ``[M]`` is formed.
    The computation uses at least float32.

    Args:
        parts: a dict of arrays ``[*, B,T,M]``, with any leading axes, such as layers. For heads, a pair of
            ``z [*, B,T,N,D]`` and output kernels ``[*, N,D,M]``. Arrays with fewer axes than the stream, such as a bias
            ``[M]``, are shared.
        directions: ``[M]``, or an array that broadcasts to the stream, such as ``[B,1,M]``: a token's column of the
            unembedding, or the difference of two columns for a logit difference.
        stream: ``[B,T,M]``, the input of the final norm.
        norm: ``"layer"``, ``"rms"``, or None if there is no norm.
        scale, bias: the norm's parameters ``[M]``.
        epsilon: the number that the norm adds to the variance.

    Returns:
        ``{name: [*, B,T]}``, or ``[*, B,T,N]`` for heads. The norm's bias is in the part ``"bias"``.

    Raises:
        ValueError: ``norm`` is unknown; a part or the directions do not match the stream.

    Example:
        >>> parts = {"embedding": jnp.array([[[1.0, 0.0]]]), "mlp": jnp.array([[[0.5, 2.0]]])}  # [B,T,M]
        >>> direction = jnp.array([1.0, -1.0])  # the column of one token of the unembedding less that of another
        >>> shares = jattn.heads.logit_attribution(parts, direction, sum(parts.values()))
        >>> {name: float(share[0, 0]) for name, share in shares.items()}
        {'embedding': 1.0, 'mlp': -1.5}

    Source: https://transformer-circuits.pub/2021/framework (Elhage et al.).
    """
    if norm not in ("layer", "rms", None):
        raise ValueError(f"norm must be 'layer', 'rms' or None, got {norm!r}")
    dtype, full = softmax_dtype(stream), stream.shape
    stream, directions = stream.astype(dtype), jnp.asarray(directions, dtype)
    if directions.ndim > stream.ndim or not _broadcasts(directions.shape, full):
        raise ValueError(f"directions must broadcast to the stream {list(full)}, got {list(directions.shape)}")
    directions = _rank(directions, stream.ndim)
    read = directions if scale is None else directions * _rank(scale.astype(dtype), stream.ndim)
    factor = jnp.ones(full[:-1], dtype)
    if norm == "layer":  # (x - mean(x)) . direction = x . (direction - mean(direction))
        read = read - read.mean(-1, keepdims=True)
        factor = jax.lax.rsqrt(stream.var(-1) + epsilon)
    elif norm == "rms":
        factor = jax.lax.rsqrt((stream**2).mean(-1) + epsilon)
    shares = {name: _share(name, part, read, factor) for name, part in parts.items()}
    if bias is not None:
        of_norm = jnp.broadcast_to((directions * _rank(bias.astype(dtype), stream.ndim)).sum(-1), full[:-1])
        shares["bias"] = shares["bias"] + of_norm if "bias" in shares else of_norm
    return shares


def _share(name: str, part: Part, read: Array, factor: Array) -> Array:
    tokens, M = factor.shape, read.shape[-1]
    if isinstance(part, tuple):
        z, out = (x.astype(read.dtype) for x in part)
        N, D = z.shape[-2:]
        lead = z.shape[: z.ndim - 2 - len(tokens)]
        if z.shape != (*lead, *tokens, N, D) or out.shape != (*lead, N, D, M):
            raise ValueError(
                f"parts[{name!r}] must be z [*, {', '.join(map(str, tokens))}, N, D] and kernels [*, N, D, {M}], got "
                f"{list(z.shape)} and {list(out.shape)}"
            )
        by_head = jnp.einsum("...ndm,pm->...pnd", out, read.reshape(-1, M), precision="highest")
        by_head = by_head.reshape(*lead, *read.shape[:-1], N, D)
        return (z * by_head).sum(-1) * factor.reshape((1,) * len(lead) + tokens + (1,))
    part = part.astype(read.dtype)
    part = _rank(part, max(part.ndim, read.ndim))
    lead = part.shape[: part.ndim - read.ndim]
    if not _broadcasts(part.shape, (*lead, *tokens, M)) or part.shape[-1] != M:
        raise ValueError(f"parts[{name!r}] must be [*, {', '.join(map(str, (*tokens, M)))}], got {list(part.shape)}")
    return (part * _rank(read, part.ndim)).sum(-1) * _rank(factor, part.ndim - 1)


def _rank(x: Array, rank: int) -> Array:
    """``x`` with leading axes of 1."""
    return x.reshape((1,) * (rank - x.ndim) + x.shape)


def _broadcasts(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    return all(size in (1, whole) for size, whole in zip(shape[::-1], full[::-1], strict=False))
