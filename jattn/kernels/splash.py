"""``"splash"``: JAX's fused kernels for TPUs, which skip the blocks that a static mask empties.

Splash leaves open what a row without a visible key returns, and lets NaN in unseen slots through. So such rows are
found by their log-sum-exp and replaced, and unseen keys and values are zeros. The query is multiplied by ``scale`` and
rounded to its dtype before the kernel, as splash has no scale.

Reverse mode runs splash's backward kernels; every other derivative is that of ``jattn.kernels.blockwise``. Masks are
in ``splash_masks.py``, the kernels in ``splash_kernel.py``.
"""

import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.batching import canonical
from jattn.kernels import Program, Unsupported, blockwise
from jattn.kernels.splash_masks import HeadMask, head_masks, ids_of, mask_reason, seen_keys
from jattn.kernels.tiles import SEVERAL_DEVICES
from jattn.kernels.tpu_program import require_one_tpu
from jattn.mods import mod_semantics
from jattn.online_softmax import differentiable, of_sums
from jattn.placement import is_typed, may_be_divided, on_each_device
from jattn.request import Request
from jattn.score_mods import SoftCap
from jattn.tables import pad_end, parts_of

LANES = 128  # of a TPU's registers: block sizes are multiples of it
LARGEST_BLOCK = 512


def choose_size(T: int, S: int, head_dim: int) -> tuple[int, int]:
    """Queries and keys per block: each length in the fewest equal parts of at most 512, rounded up to whole lanes.

    512 is the default of MaxText, which trains with this kernel (``sa_block_q`` and its like in its configuration). For
    a ``head_dim`` (the larger of query's and value's) above 256, 256: a block's queries, keys, values and results must
    fit a core's vector memory beside its scores.
    """
    largest = LARGEST_BLOCK if head_dim <= 256 else LARGEST_BLOCK // 2
    rows, columns = (-(-parts_of(length, parts_of(length, largest)) // LANES) * LANES for length in (T, S))
    return rows, columns


@dataclasses.dataclass(frozen=True)
class Splash:
    """``implementation=``: ``"splash"`` with your own settings.

    ``block_sizes``: queries and keys per block, multiples of 128; ``choose_size`` sets the default. ``interpret``: run
    the kernels in Pallas's interpreter, on any platform: slow, for tests.
    """

    block_sizes: tuple[int, int] | None = None
    interpret: bool = False

    def __post_init__(self):
        if self.block_sizes is None:
            return
        try:
            sizes = tuple(operator.index(size) for size in self.block_sizes)
        except TypeError:
            sizes = ()
        if len(sizes) != 2 or any(size < 1 or size % LANES for size in sizes):
            raise ValueError(
                f"block_sizes must be two positive multiples of {LANES} (of queries, of keys), got {self.block_sizes!r}"
            )
        object.__setattr__(self, "block_sizes", sizes)

    def unsupported_reason(self, request: Request) -> str | None:
        """The first reason against splash, or None."""
        query, value, mod = request.query, request.value, request.score_mod
        shape = *query.shape, *request.key.shape
        reasons = [
            (query.dtype not in (jnp.float32, jnp.bfloat16), f"it takes float32 and bfloat16, not {query.dtype}"),
            (not all(isinstance(size, int) for size in shape), f"it needs sizes known while tracing, got {shape}"),
            (value is None, "it needs a value"),
            (value is not None and 0 in (*shape, value.shape[-1]), "it takes no empty arrays"),
            (request.bias is not None, "it takes no bias"),
            (request.has_mask_array, "it takes no mask array; masks.Dense(array) is a mask"),
            (request.query_positions is not None or request.kv_positions is not None, "it takes no positions"),
            (request.dropout is not None, "it takes no dropout"),
            (request.precision is not None, "it has no precision setting"),
            (mod is not None and type(mod) is not SoftCap, "it takes no score_mod but SoftCap"),
            (type(mod) is SoftCap and _soft_cap(request) is None, "the cap of a SoftCap must be a plain number"),
            (may_be_divided(request) and not is_typed(query), SEVERAL_DEVICES),
        ]
        return next((reason for applies, reason in reasons if applies), None) or mask_reason(request)

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``; linear memory beside the tables of masks that are read."""
        reason = self.unsupported_reason(request)
        if reason is not None:
            raise Unsupported(f"implementation={self!r} cannot do this: {reason}")
        return on_each_device(self._run, request, ("btnd", "btn"))

    def _run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        request = canonical(request)
        return differentiable(_forward, _accumulate, request, _plan(request, self), backward=_backward)

    def program(self, request: Request, divided: bool) -> Program:
        """As in ``jattn.kernels.InBlocks``."""
        return _forward, _backward, (_plan(request, self),)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call of the kernels needs besides arrays; hashable."""

    masks: tuple[HeadMask, ...]  # one for all heads, or one for each
    size: tuple[int, int]
    soft_cap: float | None
    interpret: bool
    all_keys_seen: bool

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return not self.all_keys_seen and not any(mask.seen_keys.any() for mask in self.masks)


def _plan(request: Request, settings: Splash) -> Plan:
    (_, T, _, H), S = request.query.shape, request.key.shape[1]
    size = settings.block_sizes or choose_size(T, S, max(H, request.value.shape[-1]))
    masks, all_keys_seen = head_masks(request, size)
    return Plan(masks, size, _soft_cap(request), settings.interpret, all_keys_seen)


def _soft_cap(request: Request) -> float | None:
    cap = getattr(request.score_mod, "cap", None)
    return float(cap) if isinstance(cap, int | float | np.generic | np.ndarray) else None


def _forward(platform: str, request: Request, plan: Plan) -> tuple[jax.Array, jax.Array, jax.Array]:
    require_one_tpu("splash", platform, plan.interpret)
    from jattn.kernels import splash_kernel

    (B, T, N, _), D = request.query.shape, request.value.shape[-1]
    least = jnp.finfo(jnp.float32).min
    if plan.is_empty:  # splash makes no kernel without blocks
        rows = jnp.zeros((B, T, N), jnp.float32)
        return jnp.zeros((B, T, N, D), request.value.dtype), rows + least, rows
    with _settings(request.query.dtype):
        q, k, v, ids = _inputs(request, plan, None)
        out, lse = splash_kernel.forward(splash_kernel.make_kernel(plan, N), q, k, v, ids)
        out, lse = _from_heads(out, T), _from_heads(lse, T)
        seen = ~(lse <= splash_kernel.HIDDEN / 2)  # a NaN is seen
        return (
            jnp.where(seen[..., None], out, jnp.zeros((), out.dtype)),
            jnp.where(seen, lse, least),
            seen.astype(jnp.float32),
        )


def _backward(platform: str, args: tuple, cotangents: Sequence[Any]) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The cotangents of query, key and value (``jattn.online_softmax.differentiable``).

    With ``p = exp(score - row_max)``, ``acc = p v`` and ``row_sum = sum p`` make
    ``d score = p * (d_acc v^T + d_row_sum)`` and ``dv = p^T d_acc``: flash's backward pass, with ``do = d_acc`` and
    ``di = -d_row_sum``. The cotangents of the output and of the lse are in both.
    """
    from jattn.kernels import splash_kernel

    request, results, plan = args
    row_max, (d_acc, d_row_sum) = results[1], of_sums(results, cotangents)
    query, key, value = request.query, request.key, request.value
    T, S = query.shape[1], key.shape[1]
    if plan.is_empty:
        return jnp.zeros_like(query), jnp.zeros_like(key), jnp.zeros_like(value)
    with _settings(query.dtype):
        seen = ~(row_max <= splash_kernel.HIDDEN / 2)
        q, k, v, ids = _inputs(request, plan, seen)
        zero = jnp.zeros((), jnp.float32)
        do, di = (jnp.where(seen[..., None], d_acc, zero).astype(value.dtype), jnp.where(seen, -d_row_sum, zero))
        lse = jnp.where(seen, row_max, zero)
        do, di, lse = (_to_heads(x, plan.masks[0].padded_lengths[0]) for x in (do, di, lse))
        kernel = splash_kernel.make_kernel(plan, query.shape[2])
        dq, dk, dv = splash_kernel.backward(kernel, q, k, v, ids, lse, do, di)
        dq = _scaled(_from_heads(dq, T), request.score_scale)
        return dq, _from_heads(dk, S), _from_heads(dv, S)


def _accumulate(platform: str, request: Request, row_max: jax.Array, plan: Plan) -> tuple[jax.Array, jax.Array]:
    return blockwise.accumulate(platform, request, row_max, None, False)


@contextlib.contextmanager
def _settings(dtype: Any) -> Iterator[None]:
    """Splash's index arithmetic is in 32 bits and mixes dtypes, whatever the caller's settings are.

    Products of bfloat16 have one precision; Mosaic refuses another.
    """
    precision = jax.config.jax_default_matmul_precision if dtype == jnp.float32 else "default"
    with jax.enable_x64(False), mod_semantics(), jax.default_matmul_precision(precision):
        yield


def _inputs(request: Request, plan: Plan, seen_queries: jax.Array | None) -> tuple[Any, Any, Any, Any]:
    """Splash's ``q, k, v`` and ids, padded to whole blocks; unseen keys (and values) and blind queries are zeros."""
    T, S = plan.masks[0].padded_lengths
    query, key, value = request.query, request.key, request.value
    ids = ids_of(request)
    seen = None if plan.all_keys_seen else seen_keys(request, plan.masks, ids)
    if seen is not None:
        key, value = (jnp.where(seen[..., None], x, jnp.zeros((), x.dtype)) for x in (key, value))
    if seen_queries is not None:
        query = jnp.where(seen_queries[..., None], query, jnp.zeros((), query.dtype))
    padded = _to_heads(_scaled(query, request.score_scale), T), _to_heads(key, S), _to_heads(value, S)
    if ids is not None:  # nobody sees a padded key: so says the static mask
        ids = pad_end(ids[0], (ids[0].shape[0], T)), pad_end(ids[1], (ids[1].shape[0], S))
    return *padded, ids


def _scaled(x: jax.Array, scale: Any) -> jax.Array:
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _to_heads(x: jax.Array, length: int) -> jax.Array:
    """``[B,T,N,...] -> [B,N,length,...]``, padded with zeros."""
    return jnp.swapaxes(pad_end(x, (x.shape[0], length, *x.shape[2:])), 1, 2)


def _from_heads(x: jax.Array, length: int) -> jax.Array:
    """``[B,N,...] -> [B,length,N,...]``."""
    return jnp.swapaxes(x, 1, 2)[:, :length]
