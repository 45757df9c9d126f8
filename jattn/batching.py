"""Lifts a function of one head to all heads of all sequences of a ``Request``."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn.attention import Head, hoisted, softmax_dtype
from jattn.lifting import map_axes, over_heads
from jattn.request import Request


def canonical(request: Request) -> Request:
    """The request with its functions traced and its scale as an array, so that equal calls share one compilation.

    The default scale is None: kernels that have it built in need not multiply.
    """
    scale, head_dim = request.scale, request.query.shape[-1]
    if scale is not None:
        is_default = isinstance(scale, float) and head_dim > 0 and scale == head_dim**-0.5
        scale = None if is_default else jnp.asarray(scale, softmax_dtype(request.query))
    lengths = request.query.shape[1], request.key.shape[1]
    return hoisted(dataclasses.replace(request, scale=scale), request.query, lengths)


def over_request(
    one_head: Callable,
    request: Request,
    out_axes: Any,
    *,
    per_head: Sequence[Any] = (),
    per_sequence: Sequence[Any] = (),
    sequences: Callable = jax.vmap,
    heads: Callable = jax.vmap,
) -> Any:
    """``one_head(q, k, v, head, *per_head, *per_sequence)`` for every head of every sequence.

    Args:
        one_head: its fourth argument is that head's ``Head``.
        out_axes: as in ``over_heads``, without the batch axis, which comes first.
        per_head, per_sequence: arrays with leading axes ``[B|1, N|1]`` and ``[B|1]``. NumPy arrays whose leading axis
            is 1 stay NumPy arrays.
        sequences, heads: how to map over each, such as ``jax.vmap``.
    """
    slot_masks = request.slot_masks
    by_head, by_sequence = [request.bias, *slot_masks, *per_head], [request.query_positions, request.kv_positions]
    arrays, axes = map_axes([*by_head, *by_sequence, *per_sequence])

    def one_sequence(batch, query, key, value, *arrays):
        own_by_head, (query_positions, kv_positions, *extra) = arrays[: len(by_head)], arrays[len(by_head) :]

        def with_options(q, k, v, index, bias, *arrays):
            options = Head(
                masks=request.masks,
                slot_masks=arrays[: len(slot_masks)],
                bias=bias,
                score_mod=request.score_mod,
                scale=request.scale,
                batch=batch,
                head=index,
                query_positions=query_positions,
                kv_positions=kv_positions,
                dropout=request.dropout,
                precision=request.precision,
            )
            return one_head(q, k, v, options, *arrays[len(slot_masks) :], *extra)

        index = request.first_head + jnp.arange(request.query.shape[2])
        return over_heads(with_options, out_axes, lift=heads)(query, key, value, index, *own_by_head)

    batch = request.first_batch + jnp.arange(request.query.shape[0])
    value_axis = None if request.value is None else 0
    return sequences(one_sequence, in_axes=(0, 0, 0, value_axis, *axes))(
        batch, request.query, request.key, request.value, *arrays
    )
