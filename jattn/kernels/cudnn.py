"""``"cudnn"``: NVIDIA's fused kernel, through ``jax.nn.dot_product_attention``, all heads at once.

It supports only the kernel's own masks: with a mask added as a bias, rows without a visible key would be the mean of
the values instead of 0. The query is multiplied by ``scale`` and rounded to its dtype before the kernel, whose own
scale must be known while tracing.

The log-sum-exp and the output, which the backward pass needs, are found among what ``jax.vjp`` of the kernel keeps:
``jax.nn`` returns the first rounded to 16 bits and takes neither. Its backward kernel knows no cotangent of the
log-sum-exp, so where that has one, and for every other derivative, ``jattn.kernels.blockwise`` computes it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import staged
from jattn.batching import canonical
from jattn.kernels import Program, Unsupported, blockwise
from jattn.kernels.tiles import SEVERAL_DEVICES
from jattn.masks import And, Causal, MaskFunction, SlidingWindow
from jattn.mods import mod_semantics
from jattn.online_softmax import differentiable
from jattn.placement import is_typed, may_be_divided, on_each_device
from jattn.request import Request
from jattn.tables import pad_end


def fused(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """cuDNN's kernel. Its derivative must keep its log-sum-exp ``[B,N,T]`` in float32, and its output."""
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)


@dataclasses.dataclass(frozen=True)
class Cudnn:
    """``implementation=``: ``"cudnn"``, with a function like ``fused`` in its place, which runs on every platform."""

    kernel: Callable = fused

    def unsupported_reason(self, request: Request) -> str | None:
        """The first reason against the fused kernel, or None."""
        query, value = request.query, request.value
        head_dim = query.shape[-1]
        shape = *query.shape, *request.key.shape
        reasons = [
            (query.dtype not in (jnp.float16, jnp.bfloat16), f"it takes float16 and bfloat16, not {query.dtype}"),
            (head_dim % 8 != 0 or head_dim > 256, f"head_dim must be a multiple of 8 up to 256, got {head_dim}"),
            (value is None or value.shape[-1] != head_dim, "value's head dim must equal query's"),
            (not all(isinstance(size, int) for size in shape), "it takes no symbolic shapes"),
            (0 in shape, "it takes no empty arrays"),
            (request.bias is not None, "its gradient for a bias is not verified"),
            (request.score_mod is not None, "it takes no score_mod"),
            (request.has_mask_array, "it takes no mask array"),
            (request.query_positions is not None or request.kv_positions is not None, "it takes no positions"),
            (request.dropout is not None, "it takes no dropout"),
            (request.precision is not None, "it has no precision setting"),
            (not _read_masks(request)[0], "it supports no masks but Causal and SlidingWindow(left), joined by &"),
            (may_be_divided(request) and not is_typed(query), SEVERAL_DEVICES),
        ]
        return next((reason for applies, reason in reasons if applies), None)

    def refusal(self, request: Request) -> str | None:
        """What JAX says against this request where the program is compiled, or None: no cuDNN, or an older GPU."""
        try:
            arrays, attend = _prepared(request, self.kernel)
            jax.eval_shape(lambda *x: jax.vjp(attend, *x)[0], *arrays)
        except Unsupported as reason:
            return str(reason)
        return None

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]`` and ``lse [B,T,N]`` by cuDNN; O(T + S) memory besides inputs and outputs."""
        reason = self.unsupported_reason(request)
        if reason is not None:  # given as an object, which is not asked before
            raise Unsupported(f"implementation={self!r} cannot do this: {reason}")
        return on_each_device(self._run, request, ("btnd", "btn"))

    def _run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        return differentiable(_forward, _accumulate, canonical(request), self.kernel, backward=_backward)

    def program(self, request: Request, divided: bool) -> Program:
        """As in ``jattn.kernels.InBlocks``."""
        return _forward, _backward, (self.kernel,)


def _accumulate(platform: str, request: Request, row_max: jax.Array, kernel: Callable) -> tuple[jax.Array, jax.Array]:
    return blockwise.accumulate(platform, request, row_max, None, False)


def _forward(platform: str, request: Request, kernel: Callable) -> tuple[jax.Array, jax.Array, jax.Array]:
    if kernel is fused and platform != "cuda":
        raise Unsupported(f"implementation='cudnn' cannot do this: it needs an NVIDIA GPU, not {platform}")
    if kernel is fused and staged.is_partitioned():
        raise Unsupported(f"implementation='cudnn' cannot do this: {SEVERAL_DEVICES}")
    T, visible = request.query.shape[1], _visible_rows(request)
    arrays, attend = _prepared(request, kernel)
    out, pull = jax.vjp(attend, *arrays)
    lse = next(x for x in jax.tree.leaves(pull) if _is_lse(x, out))
    lse = jnp.where(visible, jnp.swapaxes(lse, 1, 2)[:, :T], jnp.finfo(jnp.float32).min)
    row_sum = jnp.broadcast_to(visible, lse.shape).astype(lse.dtype)
    return jnp.where(visible[..., None], out[:, :T], jnp.zeros((), out.dtype)), lse, row_sum


def _backward(platform: str, args: tuple, cotangents: Sequence[Any]) -> Sequence[jax.Array]:
    """The cotangents of query, key and value (``jattn.online_softmax.differentiable``)."""
    request, results, kernel = args
    d_out, d_row_sum = cotangents
    if d_out is None or d_row_sum is not None:
        return blockwise.gradients_of_qkv(platform, (request, results, None, False), cotangents)
    T, S = request.query.shape[1], request.key.shape[1]
    visible, real = _visible_rows(request), _real_keys(request)
    arrays, attend = _prepared(request, kernel)

    def pad(x: jax.Array) -> jax.Array:
        own = jnp.where(visible if x.ndim == 3 else visible[..., None], x, jnp.zeros((), x.dtype))
        return pad_end(own, (*arrays[0].shape[:2], *x.shape[2:]))

    # What the forward pass kept, in place of the same computed again, which XLA then removes.
    again, pull = jax.vjp(attend, *arrays)
    out, lse = pad(results[0]), jnp.swapaxes(pad(results[1]), 1, 2)
    leaves, structure = jax.tree.flatten(pull)
    leaves = [lse if _is_lse(x, again) else out if x is again else x for x in leaves]
    with mod_semantics():
        d_query, d_key, d_value = jax.tree.unflatten(structure, leaves)(pad(d_out).astype(again.dtype))
    d_query = jnp.where(visible[..., None], _scaled(d_query, request)[:, :T], jnp.zeros((), d_query.dtype))
    if real is not None:
        d_key, d_value = (jnp.where(real, x[:, :S], jnp.zeros((), x.dtype)) for x in (d_key, d_value))
    return d_query, d_key[:, :S], d_value[:, :S]


def _prepared(request: Request, kernel: Callable) -> tuple[tuple[jax.Array, ...], Callable]:
    """What the kernel takes, and the kernel with its options."""
    _, causal, left = _read_masks(request)
    (B, T), S = request.query.shape[:2], request.key.shape[1]
    query, key, value = _scaled(request.query, request), request.key, request.value
    query_lengths, kv_lengths, real = request.query_lengths, request.kv_lengths, _real_keys(request)
    if real is not None:  # slots past the end may be NaN, and 0 * NaN is NaN
        key, value = (jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (key, value))
    query = jnp.where(_visible_rows(request)[..., None], query, jnp.zeros((), query.dtype))
    if T % 2 or S % 2:  # its backward pass takes even lengths alone
        query, key, value = (pad_end(x, (B, x.shape[1] + x.shape[1] % 2, *x.shape[2:])) for x in (query, key, value))
        query_lengths = jnp.full(B, T) if query_lengths is None else query_lengths
        kv_lengths = jnp.full(B, S) if kv_lengths is None else kv_lengths
    options = {
        "is_causal": causal,
        "local_window_size": None if left is None else (left, 0),
        "query_seq_lengths": None if query_lengths is None else jnp.asarray(query_lengths, jnp.int32),
        "key_value_seq_lengths": None if kv_lengths is None else jnp.asarray(kv_lengths, jnp.int32),
    }

    def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        try:
            with mod_semantics():
                return kernel(query, key, value, **options)
        except (NotImplementedError, RuntimeError) as reason:  # JAX's, about this GPU and its version of cuDNN
            raise Unsupported(f"implementation='cudnn' cannot do this: {reason}") from reason

    return (query, key, value), attend


def _scaled(query: jax.Array, request: Request) -> jax.Array:
    """The query for the kernel's own scale, ``1 / sqrt(head_dim)``."""
    if request.scale is None:
        return query
    factor = request.scale * math.sqrt(query.shape[-1])
    return (query.astype(jnp.float32) * factor).astype(query.dtype)


def _is_lse(x: Any, out: jax.Array) -> bool:
    """Whether ``x``, among what a backward pass keeps, is the log-sum-exp ``[B,N,T]`` of this output."""
    B, T, N, _ = out.shape
    return x.dtype == jnp.float32 and x.shape == (B, N, T)


def _real_keys(request: Request) -> jax.Array | None:
    """Bool ``[B,S,1,1]``: the keys within their lengths; None if there are no lengths."""
    if request.kv_lengths is None:
        return None
    return (jnp.arange(request.key.shape[1])[None, :] < request.kv_lengths[:, None])[..., None, None]


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


def _visible_rows(request: Request) -> Any:
    """Bool ``[B,T,1]``: whether a query sees any key. cuDNN returns another result for rows that see none."""
    (B, T), S, (_, _, left) = request.query.shape[:2], request.key.shape[1], _read_masks(request)
    rows = np.arange(T)[None, :]  # in NumPy: without lengths, XLA sees that all are visible
    ends = np.full((B, 1), S) if request.kv_lengths is None else request.kv_lengths[:, None]
    visible = (np.zeros_like(rows) if left is None else np.maximum(rows - left, 0)) < ends
    return (visible if request.query_lengths is None else visible & (rows < request.query_lengths[:, None]))[..., None]
