"""``"native"``: C++ kernels for CPUs, in the package ``jattn-native``, built from the folder ``native``.

The forward pass is the online softmax of ``jattn._blocks.online_softmax``, with a tile's scores in the nearest cache.
The backward pass follows FlashAttention-2 (https://arxiv.org/abs/2307.08691), with the same derivative rule. With few
queries, each key is read once for all heads. The kernels support masks under which a query sees an interval of keys or
the keys of its segment, and mask arrays. Bias and mask arrays are read in place. If the CPU multiplies bfloat16, so do
the kernels, unless the highest precision is requested: weights and score gradients are rounded before multiplication,
and everything else is float32. Blockwise computes forward mode, higher orders and the gradients of arrays other than
query, key and value.
"""

import dataclasses
import functools
import importlib
import importlib.util
import operator
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._blocks.all_heads import rounding_error
from jattn._blocks.backward import balanced, exact_out
from jattn._blocks.plan import describe_work, plan_call
from jattn._core import deferred
from jattn._core.call import Call
from jattn._core.dropout import Dropout, dropout_seeds
from jattn._mods.arrays import AnyArray, mod_semantics, pad_end
from jattn._mods.lookup import ranks
from jattn._mods.mask import conjuncts
from jattn._mods.validation import LARGEST, LEAST
from jattn.kernels.dense import Dense
from jattn.kernels.ffi import call_once
from jattn.kernels.kernel import FEW, Kernel, Results, narrowed
from jattn.kernels.pallas_tiles import LARGEST_DIM
from jattn.masks import MaskFunction, Segments, and_masks, interval
from jattn.score_mods import Alibi, RelativeBias, SoftCap

MIN_KEYS = 128  # with few queries, it pays off from this many keys (measured on CPU, forward and backward)
STEP = 16  # head dims are padded to multiples of the widest vector
PART = 1024  # keys per task with few queries
TILE, TABLE = 64, 4096  # maximum: queries and keys of a tile; rows of a tile table
FEWEST = 8  # queries in a tile that pay off: fewer leave most lanes empty, and their dense weights are small
WIDTHS = (None, 4, 8, 16)
VERSION = "0.2.0"  # of jattn-native, whose kernels take these operands
FURTHEST = 2**20  # maximum number of distances with their own entry in a relative-bias table


@dataclasses.dataclass(frozen=True)
class Native(Kernel):
    """``implementation=``: ``"native"`` with custom settings.

    ``width``: floats per vector, 4, 8 (AVX2) or 16 (AVX-512); by default, the widest that the CPU supports. ``few``:
    calls with fewer queries use the kernel that reads each key once for all heads. Neither setting changes results
    beyond rounding.
    """

    name: ClassVar[str] = "native"
    platform: ClassVar[str | None] = "cpu"
    returns_error: ClassVar[bool] = True
    wide_query: ClassVar[bool] = True
    pays_when: ClassVar[str] = f"faster with at least {FEW} keys, or {MIN_KEYS} for fewer than {FEW} queries"
    dtypes: ClassVar[tuple[DTypeLike, ...]] = (jnp.float16, jnp.bfloat16, jnp.float32)
    takes: ClassVar[frozenset[str]] = frozenset(
        {
            "bias", "masks", "slot_masks", "query_seq_lengths", "key_value_seq_lengths", "score_mod", "query_positions",
            "kv_positions", "dropout", "precision",
        }
    )  # fmt: skip

    width: int | None = None
    few: int = FEW

    def unsupported_reason(self, call: Call) -> str | None:
        if self.width not in WIDTHS:
            return f"width must be one of {WIDTHS}, got {self.width!r}"
        if (missing := _why_missing()) is not None:
            return missing
        if self.width is not None and self.width > _library().widest():
            return f"this CPU has vectors of {_library().widest()} floats, not {self.width}"
        return super().unsupported_reason(call)

    def refusals(self, call: Call) -> Iterator[tuple[bool, str]]:
        mod, dim = call.score_mod, max(call.query.shape[-1], call.value.shape[-1])
        yield dim > LARGEST_DIM, f"head_dim must be at most {LARGEST_DIM}, got {dim}"
        known = mod is None or isinstance(mod, SoftCap | Alibi | RelativeBias)
        yield not known, "it takes no score_mod but SoftCap, Alibi and RelativeBias"
        far = isinstance(mod, RelativeBias) and _furthest(call, mod) > FURTHEST
        yield far, f"it takes no RelativeBias with a max_distance above {FURTHEST} in sequences that may be as long"
        yield (
            not _takes_masks(call),
            (
                "it takes no masks but Causal, SlidingWindow, Prefix, Padding and one Segments, joined by &, "
                "Causal, Prefix and Padding joined by |, others with an interval, and arrays"
            ),
        )

    def pays(self, call: Call) -> bool:
        T, S = call.query.shape[1], call.key.shape[1]
        if not isinstance(T, int) or not isinstance(S, int):
            return False
        return S >= (MIN_KEYS if T < FEW else FEW)

    def lowering_reason(self, platform: str) -> str | None:
        exported = "jax.export does not take its calls" if deferred.is_exported() else None
        return super().lowering_reason(platform) or exported

    def describe_work(self, platform: str, call: Call) -> str:
        """Based on the tables of the largest tiles; tiles of narrow vectors skip more."""
        T, S = call.query.shape[1], call.key.shape[1]
        tile = max(TILE, T // TABLE), max(TILE, S // TABLE)
        return describe_work(plan_call("", call, tile).blocks, (T, S))

    def describe_products(self, call: Call) -> str | None:
        """The dtype depends on the machine only for bfloat16."""
        if call.key.dtype != jnp.bfloat16:
            return None
        in_pairs = call.query.shape[1] >= self.few and self._multiplies_pairs(call)
        return f"multiplies in {'bfloat16' if in_pairs else 'float32'} and adds up in float32"

    def _multiplies_pairs(self, call: Call) -> bool:
        """Whether products for many queries use pairs of bfloat16, which rounds their factors."""
        widest = self.width in (None, _library().widest())
        has_pairs = call.key.dtype == jnp.bfloat16 and _library().has_bfloat16_products()
        return bool(has_pairs) and widest and not _in_float32(call)

    def forward(self, platform: str, call: Call) -> Results:
        """Computed by the kernels."""
        return self.forward_with_error(platform, call)[:3]

    def forward_with_error(self, platform: str, call: Call) -> Results:
        """Computed by the kernels, which output float32."""
        (B, T, N, _), S, D = call.query.shape, call.key.shape[1], call.value.shape[3]
        types, (key, value) = [(B, T, N, _padded(D)), (B, T, N), (B, T, N)], (call.key, call.value)
        if T < self.few:
            layer = jnp.int32(0)
            if call.stack is not None and call.key.shape[3] % STEP == D % STEP == 0:  # others are copied to pad
                key, value, layer = call.stack.key, call.stack.value, jnp.asarray(call.stack.layer, jnp.int32)
            types.append((B, -(-S // PART), N * T, _padded(D) + 2))  # each part's sums, maxima and sums of exponentials
            results = _call("jattn_decode", call, (call.query, key, value), self.width, [layer], types)
        else:
            results = _call("jattn_forward", call, (call.query, key, value), self.width, [], types)
        out, row_max, row_sum, *_ = results
        out, dtype = out[..., :D], call.value.dtype
        return out.astype(dtype), row_max, row_sum, rounding_error(out, dtype).astype(dtype)

    def forward_of_part(self, platform: str, call: Call, with_error: bool = True) -> Results:
        """Computed in float32: the error of rounded factors is known only for whole rows."""
        return super().forward_of_part(platform, dataclasses.replace(call, precision="highest"), with_error)

    def backward(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        T = call.query.shape[1]
        if T < FEWEST:
            return Dense().backward(platform, call, results, cotangents)
        if T < self.few:
            # That kernel sums products in another order. At large scores, exp(score - row_max) would differ.
            tiled = dataclasses.replace(self, few=0)
            is_part = call.query.dtype != call.key.dtype
            forward = tiled.forward_of_part if is_part else tiled.forward_with_error
            again = forward(platform, narrowed(call))
            results = results[0], *again[1:3], *results[3:]
        return self.backward_of_part(platform, call, results, cotangents)

    def backward_of_part(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        qkv, is_part = (call.query, call.key, call.value), call.query.dtype != call.key.dtype
        call = narrowed(call)
        if is_part:  # in float32, like ``forward_of_part``
            call = dataclasses.replace(call, precision="highest")
        out, row_sum = exact_out(results), results[2]
        d_out, d_row_sum = (0.0 if x is None else x for x in cotangents)
        d_out, seen = jnp.broadcast_to(d_out, out.shape).astype(jnp.float32), row_sum != 0
        of_rows = [
            jnp.where(seen, results[1], -jnp.inf),
            jnp.where(seen, 1.0 / jnp.where(seen, row_sum, 1.0), 0.0),
            _pad_features(d_out),
            d_row_sum * row_sum - (d_out * out).sum(-1),
        ]
        types = [*((*x.shape[:3], _padded(x.shape[3])) for x in qkv), call.query.shape[:3]]
        others = [x.astype(jnp.float32) for x in of_rows]
        *sums, totals = _call("jattn_backward", call, (call.query, call.key, call.value), self.width, others, types)
        of_qkv = [total[..., : x.shape[3]].astype(x.dtype) for total, x in zip(sums, qkv, strict=True)]
        # Alibi and RelativeBias are added to scores, so d_score is also the gradient of the products.
        return balanced(call, results, cotangents, of_qkv, totals) if self._multiplies_pairs(call) else of_qkv


def _padded(dim: int) -> int:
    return -(-dim // STEP) * STEP


def _pad_features(x: jax.Array) -> jax.Array:
    return pad_end(x, (*x.shape[:-1], _padded(x.shape[-1])))


def _call(
    name: str,
    call: Call,
    qkv: Sequence[jax.Array],
    width: int | None,
    others: list[jax.Array],
    shapes: list[tuple[int, ...]],
) -> Sequence[jax.Array]:
    """The results of a kernel, in float32 with these ``shapes``."""
    _library()
    qkv = [_pad_features(x) for x in qkv]
    if len({x.dtype for x in qkv}) > 1:
        qkv = [x.astype(jnp.float32) for x in qkv]
    rate = 0.0 if call.dropout is None else call.dropout.rate
    threshold = np.uint32(min(round(rate * 2**32), 2**32 - 1))  # as in jattn._core.dropout
    settings = {"width": np.int32(width or 0), "in_float32": _in_float32(call)}
    settings |= {"dropped": threshold.view(np.int32)}
    of_qkv = ["each" if x.ndim == 4 else "none" for x in qkv]  # none: a stack of all layers
    kinds = [*of_qkv, *("each" if x.ndim else "none" for x in others), *SEQUENCES]
    return call_once(name, settings, kinds, shapes, [*qkv, *others, *_score_operands(call)])


def _in_float32(call: Call) -> bool:
    """Whether bfloat16 products are too imprecise: the highest precision is requested, or scores are capped.

    With capped scores, a row's product gradients do not sum to 0, and the effect of their rounding is unknown.
    """
    precision = call.precision or jax.config.jax_default_matmul_precision
    asked = precision if isinstance(precision, tuple) else (precision,)
    highest = jax.lax.Precision.HIGHEST, "highest", "float32"
    return isinstance(call.score_mod, SoftCap) or any(one in highest for one in asked)


# For ``_score_operands``: see ``jattn.kernels.ffi.call_once``.
SEQUENCES = "none", "shared", "shared", *["each"] * 5, "none", "none", *["shared"] * 3


def _score_operands(call: Call) -> list[jax.Array]:
    """The inputs of scores other than queries and keys, in the order read by ``scores_of`` in C++."""
    mod, dropout, seen = call.score_mod, call.dropout, visible_keys(call)
    relative = isinstance(mod, Alibi | RelativeBias) or dropout is not None
    numbers = [
        call.score_scale,
        mod.cap if isinstance(mod, SoftCap) else 0.0,
        0.0 if dropout is None or dropout.rate == 1.0 else 1.0 / (1.0 - dropout.rate),
    ]
    no_ints, no_floats = jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.float32)
    optional = [
        (call.key_value_seq_lengths, no_ints),
        (seen.query_ids, no_ints),
        (seen.key_ids, no_ints),
        (_positions(call) if relative else None, no_ints),
        (seen.key_positions, no_ints),
        (_of_heads(mod.slopes, call) if isinstance(mod, Alibi) else None, no_floats),
        (_by_distance(call, mod) if isinstance(mod, RelativeBias) else None, no_floats.reshape(0, 1)),
        (_read_in_place(call.bias), no_floats.reshape(0, 1, 1, 1)),
        (seen.mask, jnp.zeros((0, 1, 1, 1), bool)),
        (None if dropout is None else _seeds(call, dropout), no_ints.reshape(0, 1, 2)),
    ]
    scalars = jnp.stack([jnp.asarray(x, jnp.float32) for x in numbers])
    return [scalars, seen.low, seen.high, *(jnp.asarray(none if x is None else x) for x, none in optional)]


def _read_in_place(bias: jax.Array | None) -> jax.Array | None:
    return bias if bias is None or bias.dtype == jnp.bfloat16 else bias.astype(jnp.float32)


def _of_heads(table: AnyArray, call: Call) -> jax.Array:
    """The rows of a table ``[N,...]`` for the call's heads, float32."""
    table = jnp.asarray(table, jnp.float32)
    return jax.lax.dynamic_slice_in_dim(table, jnp.asarray(call.first_head), call.query.shape[2])


def _furthest(call: Call, mod: RelativeBias) -> int:
    """The distance at which biases become constant, or the largest distance in the call."""
    by_slot = call.query_positions is None and call.kv_positions is None
    return min(mod.max_distance, max(call.query.shape[1], call.key.shape[1])) if by_slot else mod.max_distance


def _by_distance(call: Call, mod: RelativeBias) -> jax.Array:
    """The biases ``[N,2n+1]`` by query position minus key position, from ``-n`` to ``n = _furthest(call, mod)``."""
    n = _furthest(call, mod)
    with mod_semantics():
        by_head = jnp.asarray(mod.table)[mod.bucket(jnp.arange(n, -n - 1, -1, dtype=jnp.int32))].T
    return _of_heads(by_head, call)


def _seeds(call: Call, dropout: Dropout) -> jax.Array:
    """Dropout's seeds, ``[B|1,N|1,2]``, as int32."""
    if dropout.broadcast:
        return dropout_seeds(dropout, 0, 0).view(jnp.int32)[None, None]
    b, h = call.first_batch + jnp.arange(call.query.shape[0]), call.first_head + jnp.arange(call.query.shape[2])
    of_heads = jax.vmap(functools.partial(dropout_seeds, dropout), (None, 0))
    return jax.vmap(of_heads, (0, None))(b, h).view(jnp.int32)


def _positions(call: Call) -> jax.Array:
    """The positions of the queries, int32 ``[B,T]``."""
    positions = np.arange(call.query.shape[1])[None] if call.query_positions is None else call.query_positions
    return _of_each(positions, call.query)


def _of_each(positions: AnyArray, arrays: jax.Array) -> jax.Array:
    """Positions ``[B|1,T]`` of queries or keys, int32 for each sequence."""
    return jnp.broadcast_to(jnp.asarray(positions, jnp.int32), arrays.shape[:2])


class Visible(NamedTuple):
    """Which keys a call's queries see.

    A query sees a key if ``low <= position <= high``, their ids (if any) are equal, and the mask (if any) shows it.
    Without positions, a key's position is its slot.
    """

    low: jax.Array  # [B|1,N|1,T], int32
    high: jax.Array
    query_ids: jax.Array | None  # [B,T]
    key_ids: jax.Array | None  # [B,S]
    key_positions: jax.Array | None  # [B,S]
    mask: jax.Array | None  # bool [B|1,N|1,T|1,S]


def visible_keys(call: Call) -> Visible:
    """Which keys, within their lengths, are seen by the queries of a supported call."""
    (B, T, N, _), S = call.query.shape, call.key.shape[1]
    in_interval, by_id = _split(call.masks)
    positions, b = _positions(call), call.first_batch + jnp.arange(B, dtype=jnp.int32)
    kv_positions = None if call.kv_positions is None else _of_each(call.kv_positions, call.key)
    rows_shown, mask = _mask_arrays(call)
    ends: tuple[Any, Any] = LEAST, LARGEST
    query_ids = key_ids = None
    with mod_semantics():
        if in_interval:
            h = call.first_head + jnp.arange(N, dtype=jnp.int32)
            seen = interval(and_masks(*in_interval), b[:, None, None], h[:, None], positions[:, None])
            assert seen is not None  # see _takes_masks
            ends = seen
        low, high = (jnp.asarray(end, jnp.int32) for end in ends)
        for segments in by_id:
            slots = jnp.arange(S, dtype=jnp.int32)[None] if kv_positions is None else kv_positions
            query_ids, query_inside = segments._query_ids_at(b[:, None], positions)
            key_ids, key_inside = segments._key_ids_at(b[:, None], slots)
            query_ids, key_ids = _as_int32(*(jnp.broadcast_to(x, (B, n)) for x, n in ((query_ids, T), (key_ids, S))))
            rows_shown.append(jnp.broadcast_to(query_inside, (B, T))[:, None])
            if kv_positions is not None:  # no table has an id for LEAST
                low, kv_positions = jnp.maximum(low, LEAST + 1), jnp.where(key_inside, kv_positions, LEAST)
        nothing = (high == LEAST) & (positions[:, None] != LEAST)  # a query at LEAST may see keys at LEAST
        for shown in rows_shown:
            nothing |= ~jnp.asarray(shown)
        low, high = jnp.where(nothing, LARGEST, low), jnp.where(nothing, LEAST, high)
        low, high, _ = jnp.broadcast_arrays(low, high, jnp.zeros((1, 1, T)))
    return Visible(low, high, query_ids, key_ids, kv_positions, mask)


def _mask_arrays(call: Call) -> tuple[list[AnyArray], jax.Array | None]:
    """Masks that are the same for all keys, ``[B|1,N|1,T|1]``, and the others, joined: ``[B|1,N|1,T|1,S]``."""
    # The last one comes from the key lengths.
    arrays = call.slot_masks if call.key_value_seq_lengths is None else call.slot_masks[:-1]
    by_pair = [jnp.asarray(x) for x in arrays if x.shape[3] != 1]
    rows_shown = [x[..., 0] for x in arrays if x.shape[3] == 1]
    return rows_shown, functools.reduce(operator.and_, by_pair) if by_pair else None


def _as_int32(query_ids: jax.Array, key_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """32-bit ids that are equal where these ids are."""
    both = jnp.concatenate([query_ids, key_ids], 1)
    both = ranks(both) if both.dtype.itemsize > 4 else both.astype(jnp.int32)  # signed and unsigned are equivalent
    return both[:, : query_ids.shape[1]], both[:, query_ids.shape[1] :]


def _takes_masks(call: Call) -> bool:
    """Whether ``visible_keys`` can represent the masks."""
    in_interval, by_id = _split(call.masks)
    if len(by_id) > 1:
        return False
    # Arrays in a mask that are not traced here may be traced where the kernel is called.
    return not in_interval or deferred.at_lowering(_has_interval, and_masks(*in_interval))


def _split(masks: Sequence[MaskFunction]) -> tuple[list[MaskFunction], list[Segments]]:
    """The parts of the masks: those that must have an interval, and those for which the kernel compares ids."""
    parts = [part for mask in masks for part in conjuncts(mask)]
    segments = [part for part in parts if isinstance(part, Segments)]
    return [part for part in parts if not isinstance(part, Segments)], segments


def _has_interval(mask: MaskFunction) -> bool:
    one = np.zeros((1, 1, 1), np.int32)
    return interval(mask, one, one, one) is not None


@functools.cache
def _is_installed() -> bool:
    return importlib.util.find_spec("jattn_native") is not None


@functools.cache
def _why_missing() -> str | None:
    """Why no kernels are available, or None."""
    if not _is_installed():
        return "it needs the package jattn-native"
    version = importlib.import_module("jattn_native").__version__
    if version != VERSION:
        return f"it needs jattn-native {VERSION}, not {version}"
    try:
        _library()
    except ImportError as reason:
        return str(reason)
    return None


def _library() -> Any:
    """The kernels; the first call registers them with XLA."""
    return importlib.import_module("jattn_native").library()
