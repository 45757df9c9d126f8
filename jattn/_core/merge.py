"""Joins attention over two parts of the keys (``merge``), or removes one part from the whole (``unmerge``)."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge(
    out_a: Float[Array, "*rows D"],
    lse_a: Float[Array, "*rows"],
    out_b: Float[Array, "*rows D"],
    lse_b: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Joins attention over two disjoint sets of keys.

    ``lse = log(e^lse_a + e^lse_b)``, ``out = out_a e^(lse_a - lse) + out_b e^(lse_b - lse)``. The operation is
    associative and commutative, with unit ``(0, -inf)``.

    Args:
        out_a, out_b: the outputs ``[...,D]`` of the two parts.
        lse_a, lse_b: their log-sum-exps ``[...]``, from ``return_residual=True``.

    Returns:
        ``(out, lse)``. ``out`` is computed in lse's dtype and returned in ``out_a``'s dtype.

    Example:
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))
        >>> attention = lambda *key_value: jattn.dot_product_attention(query, *key_value, return_residual=True)
        >>> left, right = attention(key[:, :2], value[:, :2]), attention(key[:, 2:], value[:, 2:])
        >>> out, lse = jattn.merge(*left, *right)
        >>> np.allclose(out, attention(key, value)[0], atol=1e-4)
        True

    Source: https://arxiv.org/abs/2310.01889 and https://arxiv.org/abs/2408.04093 (ring and tree attention).
    """
    row_max = jax.lax.stop_gradient(jnp.maximum(lse_a, lse_b))
    row_max = jnp.where(row_max == -jnp.inf, 0.0, row_max)
    sum_a, sum_b = jnp.exp(lse_a - row_max), jnp.exp(lse_b - row_max)
    row_sum = sum_a + sum_b
    seen = row_sum != 0.0
    row_sum = jnp.where(seen, row_sum, 1.0)  # 1 keeps the log and its derivative finite
    lse = jnp.where(seen, row_max + jnp.log(row_sum), -jnp.inf)
    share_a, share_b = ((part / row_sum)[..., None] for part in (sum_a, sum_b))
    out = out_a.astype(lse.dtype) * share_a + out_b.astype(lse.dtype) * share_b
    return out.astype(out_a.dtype), lse


def unmerge(
    out: Float[Array, "*rows D"],
    lse: Float[Array, "*rows"],
    part_out: Float[Array, "*rows D"],
    part_lse: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows D"], Float[Array, "*rows"]]:
    """Removes the keys of one part from attention over all keys: the inverse of ``merge`` with that part.

    With ``share = e^(part_lse - lse)``, the result is ``(out - share part_out) / (1 - share)`` and
    ``lse + log(1 - share)``. Removing a part with an lse of -inf changes nothing. Removing a part that holds everything
    leaves ``(0, -inf)``, with derivatives of 0.

    The result has a relative error of about ``eps / (1 - share)``, where eps is the rounding error of the given outputs
    and log-sum-exps. If the part may hold nearly everything, compute attention over the other keys instead.

    Args:
        out, lse: the output ``[...,D]`` and log-sum-exp ``[...]`` over all keys.
        part_out, part_lse: the output and log-sum-exp over the keys to remove.

    Returns:
        ``(out, lse)`` over the other keys. ``out`` is computed in lse's dtype and returned in its own.

    Example:
        >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 4, 2, 8))
        >>> attention = lambda *key_value: jattn.dot_product_attention(query, *key_value, return_residual=True)
        >>> left, right = attention(key[:, :2], value[:, :2]), attention(key[:, 2:], value[:, 2:])
        >>> out, lse = jattn.unmerge(*attention(key, value), *right)
        >>> np.allclose(out, left[0], atol=1e-3)
        True
    """
    held = (part_lse >= lse) | (lse == -jnp.inf)  # everything; False for NaN, which then stays visible
    log_share = jnp.where(held, -1.0, part_lse - lse)  # -1 keeps all derivatives finite
    rest = -jnp.expm1(log_share)  # 1 - share
    # Each form is exact where the other is not; the minimum keeps the first form's derivative finite there.
    few, much = jnp.log1p(-jnp.minimum(jnp.exp(log_share), 0.5)), jnp.log(rest)
    left_lse = jnp.where(held, -jnp.inf, lse + jnp.where(log_share < -math.log(2), few, much))
    share, rest = jnp.exp(log_share)[..., None], rest[..., None]
    left = (out.astype(lse.dtype) - share * part_out.astype(lse.dtype)) / rest
    return jnp.where(held[..., None], 0.0, left).astype(out.dtype), left_lse
