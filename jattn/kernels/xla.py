"""``"xla"``: the dense formula of ``jattn.attention``, head by head under vmap. The reference; takes every request."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jattn.attention import attend, head_weights, map_axes, over_heads
from jattn.kernels import Request


def why_not(request: Request) -> str | None:
    """None: the dense formula takes every request."""
    return None


def run(request: Request) -> tuple[jax.Array, jax.Array]:
    """``out [B,T,N,D]``, ``lse [B,T,N]``; keeps the ``[B,N,T,S]`` weights in memory."""

    def one_head(q, k, v, options):
        return attend(q, k, v, dropout=request.dropout, **options)

    return lift(one_head, request, out_axes=1)


def weights(request: Request) -> tuple[jax.Array, jax.Array]:
    """The weights ``[B,N,T,S]`` before dropout and ``lse [B,T,N]``, of the expression that ``run`` uses."""

    def one_head(q, k, v, options):
        return head_weights(q, k, **options)

    return lift(one_head, request, out_axes=(0, 1))


def lift(one_head: Callable, request: Request, out_axes: Any) -> Any:
    """``one_head(q, k, v, options)`` over heads and sequences; ``options`` are ``attend``'s, for that head."""
    _, T, N, _ = request.query.shape
    S = request.key.shape[1]
    # what differs from sequence to sequence; a leading axis of 1 is shared
    per_sequence, axes = map_axes(
        [
            request.bias,
            request.slot_mask,
            request.query_lengths,
            request.kv_lengths,
            request.query_positions,
            request.kv_positions,
        ]
    )

    def one_sequence(batch, query, key, value, bias, slot_mask, query_length, kv_length, query_positions, kv_positions):
        masks = list(request.masks)
        if query_length is not None:
            masks.append((jnp.arange(T) < query_length)[:, None])
        if kv_length is not None:
            masks.append((jnp.arange(S) < kv_length)[None, :])

        def with_options(q, k, v, head, bias, slot_mask):
            options = {
                "mask": masks if slot_mask is None else [*masks, slot_mask],
                "bias": bias,
                "score_mod": request.score_mod,
                "scale": request.scale,
                "batch": batch,
                "head": head,
                "query_positions": query_positions,
                "kv_positions": kv_positions,
                "precision": request.precision,
            }
            return one_head(q, k, v, options)

        return over_heads(with_options, out_axes)(query, key, value, jnp.arange(N), bias, slot_mask)

    batch = jnp.arange(request.query.shape[0])
    return jax.vmap(one_sequence, in_axes=(0, 0, 0, 0, *axes))(
        batch, request.query, request.key, request.value, *per_sequence
    )
