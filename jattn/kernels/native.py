"""``"native"``: C++ kernels for CPUs, in the package ``jattn-native``, which the folder ``native`` builds.

The online softmax of ``jattn.online_softmax``, with the scores of a tile in the nearest cache. Backward as in
FlashAttention-2 (https://arxiv.org/abs/2307.08691), with the same derivative rule. With few queries each key is read
once for all heads. For masks under which a query sees an interval of slots, or those of its segment. Forward mode,
higher orders and the gradients of arrays besides query, key and value are blockwise's.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn import staged
from jattn.batching import canonical
from jattn.fields import LARGEST, number
from jattn.kernels import Program, Unsupported
from jattn.kernels.blockwise import accumulate
from jattn.kernels.tiles import LARGEST_DIM, SEVERAL_DEVICES
from jattn.masks import And, Causal, MaskFunction, Or, Padding, Prefix, Segments, SlidingWindow
from jattn.mods import mod_semantics
from jattn.online_softmax import differentiable, of_sums
from jattn.placement import may_be_divided, on_each_device
from jattn.request import Request
from jattn.score_mods import Alibi, SoftCap
from jattn.tables import look_up_row, pad_end

STEP = 16  # head dims are padded to multiples of the widest vector
PART = 1024  # keys of a task with few queries
PARTS = 4  # of the queries that share a key head, at most: each holds gradients of all keys
WIDTHS = (None, 4, 8, 16)
LEAST = jnp.finfo(jnp.float32).min


@dataclasses.dataclass(frozen=True)
class Native:
    """``implementation=``: ``"native"`` with your own settings.

    ``width``: floats in a vector, 4, 8 (AVX2) or 16 (AVX-512); by default as many as the CPU that runs it has.
    ``few``: fewer queries than these take the kernel that reads each key once for all heads. Neither changes a result
    beyond rounding.
    """

    width: int | None = None
    few: int = 16

    def unsupported_reason(self, request: Request) -> str | None:
        """The first reason against the kernels, or None."""
        if self.width not in WIDTHS:
            return f"width must be one of {WIDTHS}, got {self.width!r}"
        if not _is_installed():
            return "it needs the package jattn-native"
        if self.width is not None and self.width > _library().widest():
            return f"this CPU has vectors of {_library().widest()} floats, not {self.width}"
        query, key, value, mod = request.query, request.key, request.value, request.score_mod
        shape = *query.shape, *key.shape
        dims = [query.shape[-1], key.shape[-1] if value is None else value.shape[-1]]
        reasons = [
            (query.dtype not in (jnp.float16, jnp.bfloat16, jnp.float32), f"it takes 16 or 32 bits, not {query.dtype}"),
            (not all(isinstance(size, int) for size in shape), "it takes no symbolic shapes"),
            (value is None or 0 in shape, "it takes no empty arrays"),
            (max(dims) > LARGEST_DIM, f"head_dim must be at most {LARGEST_DIM}, got {max(dims)}"),
            (request.bias is not None, "it takes no bias"),
            (not (mod is None or isinstance(mod, SoftCap | Alibi)), "it takes no score_mod but SoftCap and Alibi"),
            (request.has_mask_array, "it takes no mask array"),
            (request.kv_positions is not None, "it takes no positions of keys"),
            (request.dropout is not None, "it takes no dropout"),
            (
                not all(map(_is_known, request.masks)) or sum(len(_segments(mask)) for mask in request.masks) > 1,
                "it takes no masks but Causal, SlidingWindow, Prefix, Padding and one Segments, joined by &, and "
                "Causal, Prefix and Padding joined by |",
            ),
            (may_be_divided(request), SEVERAL_DEVICES),
        ]
        return next((reason for applies, reason in reasons if applies), None)

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``; O(T + S) memory besides inputs and outputs, forward and backward."""
        reason = self.unsupported_reason(request)
        if reason is not None:  # given as an object, which is not asked before
            raise Unsupported(f"implementation={self!r} cannot do this: {reason}")
        return on_each_device(self._run, request, ("btnd", "btn"))

    def _run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        return differentiable(forward, _plain_accumulate, canonical(request), self, backward=backward)

    def program(self, request: Request, divided: bool) -> Program:
        """As in ``jattn.kernels.InBlocks``."""
        return forward, backward, (self,)


def _plain_accumulate(platform: str, request: Request, row_max: jax.Array, settings: Native) -> Any:
    return accumulate(platform, request, row_max, None, False)


def forward(platform: str, request: Request, settings: Native) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``out [B,T,N,D]``, and ``row_max`` and ``row_sum [B,T,N]`` as in ``jattn.online_softmax``.

    ``row_max`` is the lse, so that ``row_sum`` is 1, or 0 where a query sees nothing.
    """
    (B, T, N, _), S, D = request.query.shape, request.key.shape[1], request.value.shape[3]
    types, name = [(B, T, N, _padded(D)), (B, T, N)], "jattn_forward"
    if T < settings.few:
        name = "jattn_decode"
        types.append((B, -(-S // PART), N * T, _padded(D) + 2))  # each part's sums, maxima and sums of exponentials
    out, lse, *_ = _call(platform, name, request, settings, [], types)
    return out[..., :D].astype(request.value.dtype), lse, (lse != LEAST).astype(lse.dtype)


def backward(platform: str, args: tuple, cotangents: Sequence[Any]) -> Sequence[jax.Array]:
    """The cotangents of query, key and value (``jattn.online_softmax.differentiable``)."""
    request, results, settings = args
    (B, T, _, _), K = request.query.shape, request.key.shape[2]
    d_acc, d_row_sum = of_sums(results, cotangents)
    parts = max(min(PARTS, 4 * PARTS // (B * K), T // PART), 1)
    qkv = request.query, request.key, request.value
    query, *others = [(*x.shape[:3], _padded(x.shape[3])) for x in qkv]
    types = [query, *((parts, *shape) for shape in others)]
    given = [results[1], _pad_features(d_acc), d_row_sum]
    d_query, d_key, d_value = _call(platform, "jattn_backward", request, settings, given, types)
    sums = d_query, d_key.sum(0), d_value.sum(0)
    return [total[..., : x.shape[3]].astype(x.dtype) for total, x in zip(sums, qkv, strict=True)]


def _padded(dim: int) -> int:
    return -(-dim // STEP) * STEP


def _pad_features(x: jax.Array) -> jax.Array:
    return pad_end(x, (*x.shape[:3], _padded(x.shape[3])))


def _call(
    platform: str, name: str, request: Request, settings: Native, given: list[jax.Array], shapes: list[tuple[int, ...]]
) -> Sequence[jax.Array]:
    """The results of a kernel, float32 of these ``shapes``."""
    if platform != "cpu":
        raise Unsupported(f"implementation='native' cannot do this: it needs a CPU, not {platform}")
    if staged.is_partitioned():
        raise Unsupported(f"implementation='native' cannot do this: {SEVERAL_DEVICES}")
    if staged.is_exported():
        raise Unsupported("implementation='native' cannot do this: jax.export does not take its calls")
    _library()
    mod, seen = request.score_mod, visible_slots(request)
    qkv = [_pad_features(x) for x in (request.query, request.key, request.value)]
    if any(x.dtype != jnp.bfloat16 for x in qkv):
        qkv = [x.astype(jnp.float32) for x in qkv]
    none = jnp.zeros(0, jnp.int32)
    numbers = [request.score_scale, mod.cap if isinstance(mod, SoftCap) else 0.0]
    alibi = isinstance(mod, Alibi)
    operands = [
        *qkv,
        jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers]),
        seen.low,
        seen.high,
        none if seen.query_ids is None else seen.query_ids,
        none if seen.key_ids is None else seen.key_ids,
        _positions(request) if alibi else none,
        _slopes(request, mod) if alibi else jnp.zeros(0, jnp.float32),
        *(x.astype(jnp.float32) for x in given),
    ]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    kernel = jax.ffi.ffi_call(name, types, vmap_method="sequential")
    return kernel(*operands, width=np.int32(settings.width or 0))


def _slopes(request: Request, mod: Alibi) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(
        jnp.asarray(mod.slopes, jnp.float32), jnp.asarray(request.first_head), request.query.shape[2]
    )


def _positions(request: Request) -> jax.Array:
    """The positions of the queries, int32 ``[B,T]``."""
    B, T = request.query.shape[:2]
    positions = jnp.arange(T)[None] if request.query_positions is None else jnp.asarray(request.query_positions)
    return jnp.broadcast_to(positions, (B, T)).astype(jnp.int32)


class VisibleSlots(NamedTuple):
    """A query sees the slots ``low <= s < high`` whose id is its own, or all of them if there are no ids."""

    low: jax.Array  # [B,T], int32
    high: jax.Array  # [B,T]
    query_ids: jax.Array | None  # [B,T]
    key_ids: jax.Array | None  # [B,S]


def visible_slots(request: Request) -> VisibleSlots:
    """What the queries of a supported request see."""
    (B, T), S = request.query.shape[:2], request.key.shape[1]
    positions, query_ids, key_ids = _positions(request), None, None
    b = request.first_batch + jnp.arange(B, dtype=jnp.int32)[:, None]
    low, high = jnp.zeros((B, T), jnp.int32), jnp.full((B, T), S, jnp.int32)
    with mod_semantics():
        for mask in request.masks:
            own_low, own_high = _interval(mask, b, positions)
            low = low if own_low is None else jnp.maximum(low, own_low)
            high = high if own_high is None else jnp.minimum(high, own_high)
            for segments in _segments(mask):
                query_ids, query_inside = look_up_row(segments.query_ids, b, positions)
                key_ids, key_inside = look_up_row(segments._key_ids(), b, jnp.arange(S, dtype=jnp.int32)[None])
                high = jnp.where(query_inside, high, 0)
                query_ids, key_ids = (
                    jnp.broadcast_to(jnp.asarray(ids), (B, length)).astype(jnp.int32)
                    for ids, length in ((query_ids, T), (key_ids, S))
                )
    if request.kv_lengths is not None:
        high = jnp.minimum(high, jnp.asarray(request.kv_lengths)[:, None])
    if request.query_lengths is not None:
        high = jnp.where(jnp.arange(T)[None] < jnp.asarray(request.query_lengths)[:, None], high, 0)
    return VisibleSlots(low, high.astype(jnp.int32), query_ids, key_ids)


def _is_known(mask: MaskFunction) -> bool:
    """Whether ``_interval`` and ``_segments`` tell what the mask does."""
    if isinstance(mask, And):
        return _is_known(mask.left) and _is_known(mask.right)
    if isinstance(mask, Or):
        return all(map(_starts_at_0, (mask.left, mask.right)))
    return isinstance(mask, Causal | SlidingWindow | Prefix | Padding | Segments)


def _starts_at_0(mask: MaskFunction) -> bool:
    if isinstance(mask, And | Or):
        return _starts_at_0(mask.left) and _starts_at_0(mask.right)
    return isinstance(mask, Causal | Prefix | Padding)


def _segments(mask: MaskFunction) -> list[Segments]:
    if isinstance(mask, And):
        return _segments(mask.left) + _segments(mask.right)
    return [mask] if isinstance(mask, Segments) else []


def _interval(mask: MaskFunction, b: jax.Array, q: jax.Array) -> tuple[Any, Any]:
    """``(low, high)``: the slots ``low <= s < high`` that queries at ``q`` see; None is no bound."""
    if isinstance(mask, Causal):
        return None, _sum(q, 1)
    if isinstance(mask, SlidingWindow):
        left, right = mask._sides()
        low, high = _sum(q, -left), _sum(_sum(q, right), 1)
        limits = jnp.iinfo(jnp.int32)
        return jnp.where(left >= LARGEST, limits.min, low), jnp.where(right >= LARGEST, limits.max, high)
    if isinstance(mask, Prefix):
        return None, jnp.asarray(number(mask.length), jnp.int32)
    if isinstance(mask, Padding):
        length, inside = mask._length(b)
        return None, jnp.where(inside, length, 0)
    if isinstance(mask, And | Or):
        (low, high), (other_low, other_high) = _interval(mask.left, b, q), _interval(mask.right, b, q)
        join = jnp.minimum if isinstance(mask, And) else jnp.maximum
        return _joined(jnp.maximum, low, other_low), _joined(join, high, other_high)
    return None, None


def _joined(join: Any, x: Any, y: Any) -> Any:
    return y if x is None else x if y is None else join(x, y)


def _sum(x: Any, y: Any) -> jax.Array:
    """``x + y`` of int32, clipped to its range."""
    x, y = (jnp.asarray(term, jnp.int32) for term in (x, y))
    added, limits = x + y, jnp.iinfo(jnp.int32)
    added = jnp.where((x > 0) & (y > 0) & (added < 0), limits.max, added)
    return jnp.where((x < 0) & (y < 0) & (added >= 0), limits.min, added)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("jattn_native") is not None


@functools.cache
def _library() -> Any:
    """The kernels, which XLA knows from the first call on."""
    library = importlib.import_module("jattn_native").library()
    for name in ("jattn_forward", "jattn_backward", "jattn_decode"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="cpu")
    return library
