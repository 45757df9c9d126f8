"""What a head's outputs change by if one of its keys is another: in closed form, for every key in turn."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn.attention import Head, finish_scores, merge, softmax_dtype, visible_pairs
from jattn.batching import over_request
from jattn.request import make_request

BLOCK = 128  # keys whose scores are held at once


def replace_keys(own: Mapping[str, Array], key: Array, gradient: Array, options: Mapping[str, Any]) -> Array:
    """``[B,K,S]``: the sum over queries and features of ``gradient`` times the change of z if one key is replaced.

    With w and w' a key's weights ``exp(score - lse)`` before and after, z changes by ``(w' - w) / (1 - w + w')
    (value - z)``, in O(T + S) memory. Where w is above a half, ``1 - w`` is inexact: there, for at most one key of a
    row, z and lse are computed anew without it, and the new key is merged in.

    Args:
        own: a layer's ``query``, ``key``, ``value`` and ``z``, ``[...,T,N,H]`` and so on, and ``lse [...,T,N]``.
        key: the others, ``[...,S,K,H]``.
        gradient: ``[...,T,N,D]``.
        options: of its attention.
    """
    query, old, other, value, z, gradient = (
        x.reshape(-1, *x.shape[-3:]) for x in (own["query"], own["key"], key, own["value"], own["z"], gradient)
    )
    request = make_request(query, old, value, **options)
    (B, _, N, _), (S, K) = query.shape, old.shape[1:3]

    def each(x: Array) -> Array:  # [B,N,...]: of every query head
        return jnp.repeat(jnp.moveaxis(x, 2, 1), N // x.shape[2], 1)

    lse = jnp.moveaxis(own["lse"].reshape(B, -1, N), 2, 1)
    per_head = [each(other), lse, each(z), each(gradient)]
    return over_request(_of_head, request, out_axes=0, per_head=per_head).reshape(B, K, N // K, S).sum(2)


def _of_head(q: Array, k: Array, v: Array, head: Head, other: Array, lse: Array, z: Array, gradient: Array) -> Array:
    """``[S]``, of one head."""
    dtype, (T, S) = softmax_dtype(q), (q.shape[0], k.shape[0])
    z, gradient, lse = z.astype(dtype), gradient.astype(dtype), jnp.where(lse > -jnp.inf, lse, 0.0)
    starts = jnp.arange(0, S, BLOCK)

    def block(start: Array, *keys: Array) -> tuple[Array, list[Array]]:
        """The slots of some keys, and their scores ``[T,block]``; past the end of the keys -inf."""
        slots = start + jnp.arange(min(BLOCK, S))
        scores = [_scores(q, x, head, jnp.minimum(slots, S - 1)) for x in keys]
        return slots, [jnp.where((slots < S)[None], x, -jnp.inf) for x in scores]

    def find(top: Array, start: Array) -> tuple[Array, None]:
        slots, (scores,) = block(start, k)
        return jnp.maximum(top, jnp.where(scores - lse[:, None] > math.log(0.5), slots[None], -1).max(1)), None

    top, _ = jax.lax.scan(find, jnp.full(T, -1), starts)  # the slot of the key with more than half of the weight, or -1

    def add(rest: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        slots, (scores,) = block(start, k)
        scores = jnp.where(slots[None] == top[:, None], -jnp.inf, scores)
        largest = jnp.maximum(scores.max(1), jnp.finfo(dtype).min)
        weights = jnp.exp(scores - largest[:, None])
        total = weights.sum(1)
        out = _product(weights, v[jnp.minimum(slots, S - 1)]) / jnp.where(total > 0, total, 1.0)[:, None]
        block_lse = jnp.where(total > 0, largest + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)
        return merge(*rest, out, block_lse), None

    rest, rest_lse = jax.lax.scan(add, (jnp.zeros_like(z), jnp.full(T, -jnp.inf, dtype)), starts)[0]
    of_z, of_rest = (jnp.sum(gradient * x, 1)[:, None] for x in (z, rest))

    def replace(_: None, start: Array) -> tuple[None, Array]:
        slots, (old, new) = block(start, k, other)
        of_v = _product(gradient, v[jnp.minimum(slots, S - 1)].T)
        is_top = slots[None] == top[:, None]
        w = jnp.exp(jnp.where(is_top, -jnp.inf, old - lse[:, None]))
        # (w' - w) / (1 - w + w') without an infinite w': divided by the larger of 1 and w'.
        log_new = new - lse[:, None]
        by = jnp.exp(-jnp.maximum(log_new, 0.0))
        change = (jnp.exp(jnp.minimum(log_new, 0.0)) - w * by) / ((1 - w) * by + jnp.exp(jnp.minimum(log_new, 0.0)))
        none_left = (rest_lse == -jnp.inf)[:, None]
        share = jax.nn.sigmoid(new - jnp.where(none_left, 0.0, rest_lse[:, None]))
        share = jnp.where(none_left, (new > -jnp.inf).astype(dtype), share)
        effect = jnp.where(is_top, of_rest + share * (of_v - of_rest) - of_z, change * (of_v - of_z))
        return None, jnp.where(old > -jnp.inf, effect, 0.0).sum(0)

    return jax.lax.scan(replace, None, starts)[1].reshape(-1)[:S]


def _scores(q: Array, k: Array, head: Head, slots: Array) -> Array:
    """The scores ``[T,block]`` of the keys in these slots, -inf where masked."""

    def columns(x: Any) -> Any:
        return x if x is None or x.shape[1] == 1 else jnp.asarray(x)[:, slots]

    b, h, q_idx, kv_idx = head.indices(q, k)
    indices = b, h, q_idx, kv_idx[:, slots]
    part = dataclasses.replace(head, bias=columns(head.bias), slot_masks=tuple(map(columns, head.slot_masks)))
    visible = visible_pairs(part, indices)
    if visible is not None:
        q, k = (
            jnp.where(x, y, jnp.zeros((), y.dtype))
            for x, y in ((visible.any(1)[:, None], q), (visible.any(0)[:, None], k[slots]))
        )
    else:
        k = k[slots]
    raw = jnp.einsum("th,sh->ts", q, k, precision=head.precision, preferred_element_type=softmax_dtype(q))
    return finish_scores(raw, visible, part, indices, q.shape[-1])


def _product(x: Array, y: Array) -> Array:
    return jnp.einsum("ab,bc->ac", x, y.astype(x.dtype), precision="highest")
