"""``"native"``: C++ kernels for CPUs, in the package ``jattn-native``, which the folder ``native`` builds.

The online softmax of ``jattn.blocks.online_softmax``, with the scores of a tile in the nearest cache. Backward as in
FlashAttention-2 (https://arxiv.org/abs/2307.08691), with the same derivative rule. With few queries each key is read
once for all heads. For masks under which a query sees an interval of slots, or those of its segment. Forward mode,
higher orders and the gradients of arrays besides query, key and value are blockwise's.
"""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn.blocks.backward import of_sums
from jattn.blocks.plan import describe_work, plan_args
from jattn.core import deferred
from jattn.core.arguments import AttentionArgs
from jattn.kernels import Kernel, Results
from jattn.kernels.dense import Dense
from jattn.kernels.pallas_tiles import LARGEST_DIM
from jattn.masks import MaskFunction, Segments, and_masks, interval
from jattn.mods.arrays import mod_semantics, pad_end
from jattn.mods.lookup import look_up_row, ranks
from jattn.mods.mask import conjuncts
from jattn.score_mods import Alibi, SoftCap

STEP = 16  # head dims are padded to multiples of the widest vector
PART = 1024  # keys of a task with few queries
TILE, TABLE = 64, 4096  # queries and keys of a tile of the widest vectors; rows of a table of tiles, at most
FEWEST = 8  # queries of a tile that pay: fewer leave most of its lanes empty, and their dense weights are small
PARTS = 4  # of the queries that share a key head, at most: each holds gradients of all keys
WIDTHS = (None, 4, 8, 16)
VERSION = "0.1.0"  # of jattn-native, whose kernels take these operands
_EXPORTED = "jax.export does not take its calls"


@dataclasses.dataclass(frozen=True)
class Native(Kernel):
    """``implementation=``: ``"native"`` with your own settings.

    ``width``: floats in a vector, 4, 8 (AVX2) or 16 (AVX-512); by default as many as the CPU that runs it has.
    ``few``: fewer queries than these take the kernel that reads each key once for all heads. Neither changes a result
    beyond rounding.
    """

    name: ClassVar[str] = "native"
    platform: ClassVar[str | None] = "cpu"
    dtypes: ClassVar[tuple[DTypeLike, ...]] = (jnp.float16, jnp.bfloat16, jnp.float32)
    takes: ClassVar[frozenset[str]] = frozenset({"score_mod", "query positions", "precision"})

    width: int | None = None
    few: int = 16

    def unsupported_reason(self, args: AttentionArgs) -> str | None:
        if self.width not in WIDTHS:
            return f"width must be one of {WIDTHS}, got {self.width!r}"
        if (missing := _why_missing()) is not None:
            return missing
        if self.width is not None and self.width > _library().widest():
            return f"this CPU has vectors of {_library().widest()} floats, not {self.width}"
        return super().unsupported_reason(args)

    def refusals(self, args: AttentionArgs) -> Iterable[tuple[bool, str]]:
        mod, dim = args.score_mod, max(args.query.shape[-1], args.value.shape[-1])
        return [
            (dim > LARGEST_DIM, f"head_dim must be at most {LARGEST_DIM}, got {dim}"),
            (not (mod is None or isinstance(mod, SoftCap | Alibi)), "it takes no score_mod but SoftCap and Alibi"),
            (
                not _takes_masks(args),
                "it takes no masks but Causal, SlidingWindow, Prefix, Padding and one Segments, joined by &, "
                "Causal, Prefix and Padding joined by |, and others with an interval that is the same for all heads",
            ),
        ]

    def refusal_at_lowering(self, args: AttentionArgs) -> str | None:
        return _EXPORTED if deferred.is_exported() else None

    def lowering_reason(self, platform: str) -> str | None:
        return super().lowering_reason(platform) or (_EXPORTED if deferred.is_exported() else None)

    def describe_work(self, platform: str, args: AttentionArgs) -> str:
        """By the tables of the largest tiles; those of narrow vectors leave out more."""
        T, S = args.query.shape[1], args.key.shape[1]
        tile = max(TILE, T // TABLE), max(TILE, S // TABLE)
        return describe_work(plan_args("", args, tile).blocks, (T, S))

    def forward(self, platform: str, args: AttentionArgs) -> Results:
        """By the kernels."""
        (B, T, N, _), S, D = args.query.shape, args.key.shape[1], args.value.shape[3]
        types, name = [(B, T, N, _padded(D)), (B, T, N), (B, T, N)], "jattn_forward"
        if T < self.few:
            name = "jattn_decode"
            types.append((B, -(-S // PART), N * T, _padded(D) + 2))  # each part's sums, maxima and sums of exponentials
        out, row_max, row_sum, *_ = _call(name, args, self.width, [], types)
        return out[..., :D].astype(args.value.dtype), row_max, row_sum

    def backward(
        self, platform: str, args: AttentionArgs, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        (B, T, _, _), K = args.query.shape, args.key.shape[2]
        if T < FEWEST:
            return Dense().backward(platform, args, results, cotangents)
        if T < self.few:
            # That kernel adds up products in another order. At large scores, exp(score - row_max) would differ.
            results = dataclasses.replace(self, few=0).forward(platform, args)
        d_acc, d_row_sum = of_sums(results, cotangents)
        parts = max(min(PARTS, 4 * PARTS // (B * K), T // PART), 1)
        qkv = args.query, args.key, args.value
        query, *others = [(*x.shape[:3], _padded(x.shape[3])) for x in qkv]
        types = [query, *((parts, *shape) for shape in others)]
        given = [results[1], _pad_features(d_acc), d_row_sum]
        d_query, d_key, d_value = _call("jattn_backward", args, self.width, given, types)
        sums = d_query, d_key.sum(0), d_value.sum(0)
        return [total[..., : x.shape[3]].astype(x.dtype) for total, x in zip(sums, qkv, strict=True)]


def _padded(dim: int) -> int:
    return -(-dim // STEP) * STEP


def _pad_features(x: jax.Array) -> jax.Array:
    return pad_end(x, (*x.shape[:3], _padded(x.shape[3])))


def _call(
    name: str,
    args: AttentionArgs,
    width: int | None,
    given: list[jax.Array],
    shapes: list[tuple[int, ...]],
) -> Sequence[jax.Array]:
    """The results of a kernel, float32 of these ``shapes``."""
    _library()
    mod, seen = args.score_mod, visible_slots(args)
    qkv = [_pad_features(x) for x in (args.query, args.key, args.value)]
    if any(x.dtype != jnp.bfloat16 for x in qkv):
        qkv = [x.astype(jnp.float32) for x in qkv]
    none = jnp.zeros(0, jnp.int32)
    numbers = [args.score_scale, mod.cap if isinstance(mod, SoftCap) else 0.0]
    alibi = isinstance(mod, Alibi)
    operands = [
        *qkv,
        jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers]),
        seen.low,
        seen.high,
        none if seen.query_ids is None else seen.query_ids,
        none if seen.key_ids is None else seen.key_ids,
        _positions(args) if alibi else none,
        _slopes(args, mod) if alibi else jnp.zeros(0, jnp.float32),
        *(x.astype(jnp.float32) for x in given),
    ]
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    kernel = jax.ffi.ffi_call(name, types, vmap_method="sequential")
    return kernel(*operands, width=np.int32(width or 0))


def _slopes(args: AttentionArgs, mod: Alibi) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(
        jnp.asarray(mod.slopes, jnp.float32), jnp.asarray(args.first_head), args.query.shape[2]
    )


def _positions(args: AttentionArgs) -> jax.Array:
    """The positions of the queries, int32 ``[B,T]``."""
    B, T = args.query.shape[:2]
    positions = jnp.arange(T)[None] if args.query_positions is None else jnp.asarray(args.query_positions)
    return jnp.broadcast_to(positions, (B, T)).astype(jnp.int32)


class VisibleSlots(NamedTuple):
    """A query sees the slots ``low <= s < high`` whose id is its own, or all of them if there are no ids."""

    low: jax.Array  # [B,T], int32
    high: jax.Array  # [B,T]
    query_ids: jax.Array | None  # [B,T]
    key_ids: jax.Array | None  # [B,S]


def visible_slots(args: AttentionArgs) -> VisibleSlots:
    """What the queries of a supported call see."""
    (B, T), S = args.query.shape[:2], args.key.shape[1]
    positions, query_ids, key_ids = _positions(args), None, None
    b = args.first_batch + jnp.arange(B, dtype=jnp.int32)[:, None]
    low, high = jnp.zeros((B, T), jnp.int32), jnp.full((B, T), S, jnp.int32)
    in_interval, by_id = _split(args.masks)
    with mod_semantics():
        if in_interval:
            seen = interval(and_masks(*in_interval), b, jnp.asarray(args.first_head, jnp.int32), positions)
            assert seen is not None  # see _takes_masks
            low, high = jnp.maximum(low, seen[0]), jnp.minimum(high - 1, seen[1]) + 1
        for segments in by_id:
            query_ids, query_inside = look_up_row(segments.query_ids, b, positions)
            key_ids, _ = look_up_row(segments._key_ids(), b, jnp.arange(S, dtype=jnp.int32)[None])
            high = jnp.where(query_inside, high, 0)
            ids = [jnp.broadcast_to(jnp.asarray(x), (B, n)) for x, n in ((query_ids, T), (key_ids, S))]
            both = jnp.concatenate(ids, 1)
            # 32 bits of either sign are as good as int32.
            both = ranks(both) if both.dtype.itemsize > 4 else both.astype(jnp.int32)
            query_ids, key_ids = both[:, :T], both[:, T:]
    if args.kv_lengths is not None:
        high = jnp.minimum(high, jnp.asarray(args.kv_lengths)[:, None])
    if args.query_lengths is not None:
        high = jnp.where(jnp.arange(T)[None] < jnp.asarray(args.query_lengths)[:, None], high, 0)
    return VisibleSlots(low.astype(jnp.int32), high.astype(jnp.int32), query_ids, key_ids)


def _takes_masks(args: AttentionArgs) -> bool:
    """Whether ``visible_slots`` can tell what the masks show."""
    in_interval, by_id = _split(args.masks)
    if len(by_id) > 1:
        return False
    # Where the kernel is called, arrays in a mask may be traced that are not here.
    return not in_interval or deferred.at_lowering(_has_interval, and_masks(*in_interval), args.query.shape[2])


def _split(masks: Sequence[MaskFunction]) -> tuple[list[MaskFunction], list[Segments]]:
    """What the masks join: those that must have an interval, and those that the kernel compares ids for."""
    parts = [part for mask in masks for part in conjuncts(mask)]
    segments = [part for part in parts if isinstance(part, Segments)]
    return [part for part in parts if not isinstance(part, Segments)], segments


def _has_interval(mask: MaskFunction, num_heads: int) -> bool:
    """Whether the mask has an interval, the same for all heads."""
    one = np.zeros((1, 1), np.int32)
    seen = interval(mask, one, np.zeros((num_heads, 1, 1), np.int32), one)
    return seen is not None and all(np.ndim(end) < 3 or np.shape(end)[0] == 1 for end in seen)


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("jattn_native") is not None


@functools.cache
def _why_missing() -> str | None:
    """Why there are no kernels to call, if there are none."""
    if not _is_installed():
        return "it needs the package jattn-native"
    found = importlib.import_module("jattn_native").__version__
    if found != VERSION:
        return f"it needs jattn-native {VERSION}, not {found}"
    try:
        _library()
    except ImportError as reason:
        return str(reason)
    return None


def _library() -> Any:
    """The kernels, which XLA knows from the first call on."""
    return importlib.import_module("jattn_native").library()
