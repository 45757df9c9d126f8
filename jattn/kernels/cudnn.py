"""``"cudnn"``: NVIDIA's fused kernel, through ``jax.nn.dot_product_attention``, all heads at once.

It supports only the kernel's own masks: with a mask added as a bias, the output of rows without a visible key would be
the mean of the values instead of 0. The query is multiplied by ``scale`` and rounded to its dtype before the kernel
runs, because the kernel's own scale must be known while tracing.

The log-sum-exp and the output, which the backward pass needs, are found among the residuals of ``jax.vjp`` of the
kernel: ``jax.nn`` returns the log-sum-exp rounded to 16 bits and accepts neither. cuDNN's backward kernel supports no
cotangent of the log-sum-exp, so ``jattn.kernels.blockwise`` computes derivatives with such a cotangent, and all others.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._core import deferred
from jattn._core.call import Call
from jattn._mods.arrays import mod_semantics, pad_end
from jattn._mods.validation import LEAST
from jattn.kernels.interface import Unsupported
from jattn.kernels.kernel import Kernel, Results
from jattn.masks import and_masks, interval

# The default from this version of JAX on: earlier versions wrongly broadcast keys shared under a vmap.
OLDEST = (0, 11, 2)


def fused(query: jax.Array, key: jax.Array, value: jax.Array, **options: Any) -> jax.Array:
    """cuDNN's kernel. Its derivative must keep its output and, in float32, its log-sum-exp ``[B,N,T]``."""
    return jax.nn.dot_product_attention(query, key, value, implementation="cudnn", **options)


@dataclasses.dataclass(frozen=True)
class Cudnn(Kernel):
    """``implementation=``: ``"cudnn"`` with ``kernel`` in place of ``fused``, such as one for every platform."""

    name: ClassVar[str] = "cudnn"
    platform: ClassVar[str | None] = "gpu"
    dtypes: ClassVar[tuple[DTypeLike, ...]] = (jnp.float16, jnp.bfloat16)
    takes: ClassVar[frozenset[str]] = frozenset({"masks", "query_seq_lengths", "key_value_seq_lengths"})
    rounds_query: ClassVar[bool] = True
    reads_rounded_output: ClassVar[bool] = True

    kernel: Callable[..., jax.Array] = fused

    def refusals(self, call: Call) -> Iterator[tuple[bool, str]]:
        head_dim = call.query.shape[-1]
        yield head_dim % 8 != 0 or head_dim > 256, f"head_dim must be a multiple of 8 up to 256, got {head_dim}"
        yield call.value.shape[-1] != head_dim, "value's head dim must equal query's"
        yield (
            not deferred.at_lowering(_read_masks, call)[0],
            (
                "it supports no masks but Causal and SlidingWindow(left), joined by &, and others with their interval, "
                "if that is known while tracing"
            ),
        )

    @property
    def is_simulated(self) -> bool:
        return self.kernel is not fused

    def refusal_at_lowering(self, call: Call) -> str | None:
        if jax.__version_info__ < OLDEST:
            return f"it is a default only with JAX {'.'.join(map(str, OLDEST))} or newer"
        if deferred.is_exported():
            return "jax.export does not take its calls"
        return self.refusal(call)

    def refusal(self, call: Call) -> str | None:
        """JAX's objection to this call on the compilation platform (no cuDNN, or an older GPU), or None."""
        try:
            arrays, attend = _prepared(call, self.kernel)
            jax.eval_shape(lambda *x: jax.vjp(attend, *x)[0], *arrays)
        except Unsupported as reason:
            return str(reason)
        return None

    def forward(self, platform: str, call: Call) -> Results:
        """``row_max`` is the lse, so ``row_sum`` is 1, or 0 where a query sees nothing."""
        T, visible = call.query.shape[1], _visible_rows(call)
        arrays, attend = _prepared(call, self.kernel)
        out, pull = jax.vjp(attend, *arrays)
        lse = next(x for x in jax.tree.leaves(pull) if _is_lse(x, out))
        lse = jnp.where(visible, jnp.swapaxes(lse, 1, 2)[:, :T], jnp.finfo(jnp.float32).min)
        row_sum = jnp.broadcast_to(visible, lse.shape).astype(lse.dtype)
        return jnp.where(visible[..., None], out[:, :T], jnp.zeros((), out.dtype)), lse, row_sum

    def backward(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        """Uses cuDNN, or blockwise where the log-sum-exp has a cotangent."""
        d_out, d_row_sum = cotangents
        if d_out is None or d_row_sum is not None:
            return super().backward(platform, call, results, cotangents)
        T, S = call.query.shape[1], call.key.shape[1]
        visible, real = _visible_rows(call), _real_keys(call)
        arrays, attend = _prepared(call, self.kernel)

        def pad(x: jax.Array) -> jax.Array:
            x = jnp.where(visible if x.ndim == 3 else visible[..., None], x, jnp.zeros((), x.dtype))
            return pad_end(x, (*arrays[0].shape[:2], *x.shape[2:]))

        # Reuses the forward pass's residuals in place of recomputed ones, which XLA then removes.
        again, pull = jax.vjp(attend, *arrays)
        out, lse = pad(results[0]), jnp.swapaxes(pad(results[1]), 1, 2)
        leaves, structure = jax.tree.flatten(pull)
        leaves = [lse if _is_lse(x, again) else out if x is again else x for x in leaves]
        with mod_semantics():
            d_query, d_key, d_value = jax.tree.unflatten(structure, leaves)(pad(d_out).astype(again.dtype))
        d_query = jnp.where(visible[..., None], _scaled(d_query, call)[:, :T], jnp.zeros((), d_query.dtype))
        if real is not None:
            d_key, d_value = (jnp.where(real, x[:, :S], jnp.zeros((), x.dtype)) for x in (d_key, d_value))
        return d_query, d_key[:, :S], d_value[:, :S]


def _prepared(
    call: Call, kernel: Callable[..., jax.Array]
) -> tuple[tuple[jax.Array, ...], Callable[[jax.Array, jax.Array, jax.Array], jax.Array]]:
    """The kernel's arguments, and the kernel with its options."""
    _, causal, left = _read_masks(call)
    (B, T), S = call.query.shape[:2], call.key.shape[1]
    query, key, value = _scaled(call.query, call), call.key, call.value
    query_lengths, kv_lengths, real = call.query_seq_lengths, call.key_value_seq_lengths, _real_keys(call)
    if real is not None:  # slots past the end may be NaN, and 0 * NaN is NaN
        key, value = (jnp.where(real, x, jnp.zeros((), x.dtype)) for x in (key, value))
    query = jnp.where(_visible_rows(call)[..., None], query, jnp.zeros((), query.dtype))
    if T % 2 or S % 2:  # when keeping the log-sum-exp, JAX takes only even lengths, as with a bias
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
        except (NotImplementedError, RuntimeError) as reason:  # from JAX, about this GPU and its cuDNN version
            raise Unsupported(f"implementation='cudnn' cannot do this: {reason}") from reason

    return (query, key, value), attend


def _scaled(query: jax.Array, call: Call) -> jax.Array:
    """The query, prescaled to account for the kernel's own scale, ``1 / sqrt(head_dim)``."""
    if call.scale is None:
        return query
    factor = call.scale * math.sqrt(query.shape[-1])
    return (query.astype(jnp.float32) * factor).astype(query.dtype)


def _is_lse(x: Any, out: jax.Array) -> bool:
    """Whether ``x``, a residual of the backward pass, is the log-sum-exp ``[B,N,T]`` of this output."""
    B, T, N, _ = out.shape
    return x.dtype == jnp.float32 and x.shape == (B, N, T)


def _real_keys(call: Call) -> jax.Array | None:
    """Bool ``[B,S,1,1]``: the keys within their lengths; None if there are no lengths."""
    if call.key_value_seq_lengths is None:
        return None
    return (jnp.arange(call.key.shape[1])[None, :] < call.key_value_seq_lengths[:, None])[..., None, None]


def _read_masks(call: Call) -> tuple[bool, bool, int | None]:
    """The masks as ``(supported, causal, left)``; ``supported`` is False if cuDNN has no such mask.

    They are compared by their intervals for the call's queries, so a mask of any class is supported if it shows the
    same keys.
    """
    unsupported, (T, S) = (False, False, None), (call.query.shape[1], call.key.shape[1])
    if not call.masks:
        return True, False, None
    if not isinstance(T, int) or not isinstance(S, int) or T == 0:
        return unsupported
    rows, two = np.arange(T, dtype=np.int32), np.zeros((2, 1), np.int32)
    seen = interval(and_masks(*call.masks), two[:, :, None], two, rows)
    if seen is None or any(isinstance(end, jax.Array) or np.ndim(end) > 1 for end in seen):
        return unsupported  # traced, or different for two sequences or heads
    first, last = (np.broadcast_to(end, T).astype(np.int64) for end in seen)
    if (np.minimum(last, S - 1) != np.minimum(rows, S - 1)).any():
        return unsupported
    left = rows - first
    if (left == left[0]).all() and left[0] >= 0 and first[0] != LEAST:
        return True, True, int(left[0])
    return bool((first <= 0).all()), True, None


def _visible_rows(call: Call) -> Any:
    """Bool ``[B,T,1]``: whether a query sees any key. cuDNN returns a different result for rows that see none."""
    (B, T), S, (_, _, left) = call.query.shape[:2], call.key.shape[1], _read_masks(call)
    rows = np.arange(T)[None, :]  # in NumPy: without lengths, XLA knows that all are visible
    ends = np.full((B, 1), S) if call.key_value_seq_lengths is None else call.key_value_seq_lengths[:, None]
    visible = (np.zeros_like(rows) if left is None else np.maximum(rows - left, 0)) < ends
    if call.query_seq_lengths is not None:
        visible = visible & (rows < call.query_seq_lengths[:, None])
    return visible[..., None]
