"""``"cudnn"``: NVIDIA's fused kernel, through ``jax.nn.dot_product_attention``, all heads at once.

It supports only the kernel's own masks: with a mask added as a bias, rows without a visible key would be the mean of
the values instead of 0. The log-sum-exp comes from the blockwise rule, because ``jax.nn`` returns it rounded to 16 bits
and without a derivative; XLA removes it if it is unused. cuDNN's rule has no forward-mode derivative, so that raises
JAX's own error.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jattn import staged
from jattn.kernels import Unsupported
from jattn.kernels.blockwise import Blockwise
from jattn.masks import And, Causal, MaskFunction, SlidingWindow
from jattn.request import Request
from jattn.tables import pad_end


def unsupported_reason(request: Request) -> str | None:
    """The first reason against the fused kernel, or None."""
    query, value = request.query, request.value
    head_dim = query.shape[-1]
    reasons = [
        (query.dtype not in (jnp.float16, jnp.bfloat16), f"it takes float16 and bfloat16, not {query.dtype}"),
        (head_dim % 8 != 0 or head_dim > 256, f"head_dim must be a multiple of 8 up to 256, got {head_dim}"),
        (value is None or value.shape[-1] != head_dim, "value's head dim must equal query's"),
        (0 in (*query.shape, request.key.shape[1]), "it takes no empty arrays"),
        (request.bias is not None, "its gradient for a bias is not verified"),
        (request.score_mod is not None, "it takes no score_mod"),
        (request.has_mask_array, "it takes no mask array"),
        (request.query_positions is not None or request.kv_positions is not None, "it takes no positions"),
        (request.dropout is not None, "it takes no dropout"),
        (request.precision is not None, "it has no precision setting"),
        (not isinstance(request.scale, int | float | None), "scale must be a plain number"),
        (not _read_masks(request)[0], "it supports no masks but Causal and SlidingWindow(left), joined by &"),
    ]
    return next((reason for applies, reason in reasons if applies), None)


def run(request: Request) -> tuple[jax.Array, jax.Array]:
    """``out [B,T,N,D]`` by cuDNN, forward and backward; ``lse [B,T,N]`` and its derivative by the blockwise rule."""
    request = dataclasses.replace(request, query=staged.call(_on_cuda, request.query, out=request.query))
    return attend_by(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), request)


def attend_by(kernel: Callable, request: Request) -> tuple[jax.Array, jax.Array]:
    """``run`` with ``kernel`` in place of ``jax.nn.dot_product_attention``."""
    _, causal, left = _read_masks(request)
    B, T = request.query.shape[:2]
    S = request.key.shape[1]
    query, key, value = request.query, request.key, request.value
    assert value is not None  # checked by unsupported_reason
    query_lengths, kv_lengths = request.query_lengths, request.kv_lengths
    if kv_lengths is not None:  # slots past the end may be NaN, and 0 * NaN is NaN
        real = (jnp.arange(S)[None, :] < kv_lengths[:, None])[..., None, None]
        key, value = (jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (key, value))
    visible = _visible_rows(left, B, T, S, query_lengths, kv_lengths)[..., None, None]
    query = jnp.where(visible, query, jnp.zeros((), query.dtype))
    if T % 2 or S % 2:  # its backward pass takes even lengths alone
        query, key, value = (pad_end(x, (B, x.shape[1] + x.shape[1] % 2, *x.shape[2:])) for x in (query, key, value))
        query_lengths = jnp.full(B, T) if query_lengths is None else query_lengths
        kv_lengths = jnp.full(B, S) if kv_lengths is None else kv_lengths
    try:
        out = kernel(
            query,
            key,
            value,
            scale=request.scale,
            is_causal=causal,
            local_window_size=None if left is None else (left, 0),
            query_seq_lengths=None if query_lengths is None else query_lengths.astype(jnp.int32),
            key_value_seq_lengths=None if kv_lengths is None else kv_lengths.astype(jnp.int32),
        )
    except NotImplementedError as reason:  # JAX's, about this GPU and this version of cuDNN
        raise Unsupported(f"implementation='cudnn' cannot do this: {reason}") from reason
    out = out[:, :T]
    _, lse = Blockwise().run(dataclasses.replace(request, value=request.value[..., :0]))
    return jnp.where(visible, out, jnp.zeros((), out.dtype)), lse


def _on_cuda(platform: str, query: jax.Array) -> jax.Array:
    if platform != "cuda":
        raise Unsupported(f"implementation='cudnn' cannot do this: it needs an NVIDIA GPU, not {platform}")
    return query


def _read_masks(request: Request) -> tuple[bool, bool, int | None]:
    """The masks as ``(supported, causal, left)``; ``supported`` is False if cuDNN has no such mask."""
    parts = [part for mask in request.masks for part in _conjuncts(mask)]
    windows = [part for part in parts if isinstance(part, SlidingWindow)]
    causal = any(isinstance(part, Causal) for part in parts) or any(window.right == 0 for window in windows)
    static = all(isinstance(x, int) and x >= 0 for window in windows for x in (window.left, window.right))
    supported = static and all(isinstance(part, Causal | SlidingWindow) for part in parts) and (causal or not parts)
    return supported, causal, min((window.left for window in windows), default=None) if supported else None


def _conjuncts(mask: MaskFunction) -> list[MaskFunction]:
    return [*_conjuncts(mask.left), *_conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def _visible_rows(left: int | None, B: int, T: int, S: int, query_lengths, kv_lengths) -> jax.Array:
    """Bool ``[B,T]``: whether a query sees any key. cuDNN returns another result for rows that see none."""
    rows = jnp.arange(T)[None, :]
    ends = jnp.full((B, 1), S) if kv_lengths is None else kv_lengths[:, None]
    first = jnp.zeros_like(rows) if left is None else jnp.maximum(rows - left, 0)
    visible = first < ends
    return visible if query_lengths is None else visible & (rows < query_lengths[:, None])
