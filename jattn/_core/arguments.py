"""``AttentionArgs``: the checked arguments of ``dot_product_attention``, which every implementation takes."""

import dataclasses
import operator
from typing import Any, SupportsIndex, TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike, Float

from jattn._core.attention import softmax_dtype
from jattn._core.chunk import Chunk, Slots, slot_indices, take, take_pairs
from jattn._core.dropout import Dropout
from jattn._mods.arrays import AnyArray, Index, Length, arange
from jattn._mods.keywords import suggest_keywords
from jattn._mods.pytree import known, pytree_dataclass, static_field
from jattn._mods.validation import LARGEST, check_array, check_fits, check_signature, to_int32, to_number
from jattn.masks import Causal, MaskFunction, SlidingWindow
from jattn.score_mods import ScoreMod


class ScoreOptions(TypedDict, total=False):
    """The keywords of ``jattn.dot_product_attention`` that affect the weights, except ``bias``, ``mask`` and sinks."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: SupportsIndex | tuple[SupportsIndex, SupportsIndex] | None
    score_mod: ScoreMod | None
    query_positions: ArrayLike | None
    kv_positions: ArrayLike | None
    precision: jax.lax.PrecisionLike


class AttentionOptions(ScoreOptions, total=False):
    """Those that affect the output: all its keywords except ``bias``, ``mask`` and what is computed and returned."""

    sinks: ArrayLike | None
    dropout_rate: float
    dropout_rng: Array | None
    broadcast_dropout: bool


@pytree_dataclass
class Stack:
    """The arrays of all layers of which a call's key and value are one, for kernels that read these where they are.

    XLA copies a layer to hand it to a kernel, which takes as long as to attend to it. What a kernel does not read of
    ``AttentionArgs.key`` and ``value`` is not copied. What is differentiated has none (``jattn.api.attend_in_stack``).
    """

    key: Float[Array, "L B S K H"]
    value: Float[Array, "L B S K D"]
    layer: Any  # an index

    def take(self, columns: Chunk) -> tuple[Array, Array]:
        """The layer's keys and values in these slots."""

        def part(x: Array) -> Array:
            _, B, _, K, H = x.shape
            at = [jnp.asarray(i, jnp.int32) for i in (self.layer, 0, columns.first, 0, 0)]
            return jax.lax.dynamic_slice(x, at, (1, B, columns.size, K, H))[0]

        return part(self.key), part(self.value)


@pytree_dataclass
class AttentionArgs:
    """One checked call of ``jattn.dot_product_attention``, batched: all heads of all sequences.

    ``bias`` and ``slot_masks`` are ``[B|1, N|1, T|1, S|1]``, by slot. ``masks`` and ``score_mod`` see positions,
    ``[B|1, T]`` and ``[B|1, S]``, or None for the slots themselves. Masks and positions given as NumPy arrays stay
    NumPy arrays, which are static while tracing. Sinks are not part of it; they are merged into the result.
    """

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Any  # [B,S,K,D]; None if only the weights are needed
    scale: AnyArray | int | float | None  # None: 1 / sqrt(H)
    bias: Float[Array, "#B #N #T _"] | None  # in a ring, with the columns of all devices
    masks: tuple[MaskFunction, ...]  # a pair is visible if all masks and slot_masks agree
    slot_masks: tuple[AnyArray, ...]
    query_lengths: AnyArray | None  # [B]; also among the slot_masks
    kv_lengths: AnyArray | None
    score_mod: ScoreMod | None
    query_positions: AnyArray | None
    kv_positions: AnyArray | None
    dropout: Dropout | None
    first_batch: Index = 0  # the indices of its first sequence and head, for masks, score functions and dropout
    first_head: Index = 0
    stack: Stack | None = None  # of exactly this key and value; a call with others has none
    precision: jax.lax.PrecisionLike = static_field(default=None)
    sharded: bool = static_field(default=False)  # the arrays may lie on several devices; set by ``canonical``

    @property
    def score_scale(self) -> AnyArray | int | float:
        """``scale``, the default as a number."""
        return self.query.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def has_mask_array(self) -> bool:
        """Whether there is a mask array besides the lengths."""
        return len(self.slot_masks) > sum(x is not None for x in (self.query_lengths, self.kv_lengths))

    def take(
        self, *, rows: Slots | None = None, columns: Slots | None = None, heads: Chunk | None = None
    ) -> "AttentionArgs":
        """The call for some of its queries and heads, over some of its keys.

        Bias and mask arrays are cut, too. Masks, score functions and dropout see the indices that they see in the whole
        call: positions, which are the slots taken unless given, and heads. The lengths count slots of the whole call,
        so only the mask arrays made from them remain.

        Args:
            rows, columns: the slots of queries and of keys.
            heads: key/value heads, with the query heads that share them.
        """
        parts: dict[str, Any] = {}
        if rows is not None:
            positions = self.query_positions
            positions = slot_indices(rows)[None] if positions is None else take(positions, rows, 1)
            parts |= {"query": take(self.query, rows, 1), "query_positions": positions, "query_lengths": None}
        if columns is not None:
            positions = self.kv_positions
            positions = slot_indices(columns)[None] if positions is None else take(positions, columns, 1)
            parts |= {"key": take(self.key, columns, 1), "kv_positions": positions, "kv_lengths": None}
            parts |= {"value": None if self.value is None else take(self.value, columns, 1), "stack": None}
        query_heads = None
        if heads is not None:
            group = self.query.shape[2] // self.key.shape[2]
            query_heads = Chunk(heads.first * group, heads.size * group)
            key, value = parts.get("key", self.key), parts.get("value", self.value)
            parts |= {"query": take(parts.get("query", self.query), query_heads, 2), "key": take(key, heads, 2)}
            parts |= {"value": None if value is None else take(value, heads, 2), "stack": None}
            parts["first_head"] = self.first_head + query_heads.first
        bias, *slot_masks = (
            take_pairs(x, rows=rows, columns=columns, heads=query_heads) for x in (self.bias, *self.slot_masks)
        )
        return dataclasses.replace(self, bias=bias, slot_masks=tuple(slot_masks), **parts)


@suggest_keywords
def make_args(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, scale: Any = None, is_causal: Any = False,
    query_seq_lengths: Any = None, key_value_seq_lengths: Any = None, local_window_size: Any = None,
    score_mod: Any = None, query_positions: Any = None, kv_positions: Any = None, dropout_rate: Any = 0.0,
    dropout_rng: Any = None, broadcast_dropout: Any = False, precision: jax.lax.PrecisionLike = None,
) -> AttentionArgs:  # fmt: skip
    """The checked call: batched, with ``is_causal`` and ``local_window_size`` turned into masks. Takes anything."""
    query, key, value = _qkv(query, key, value)
    B, T, N, _ = query.shape
    S = key.shape[1]
    # Arrays that a jitted function captures are concrete: as NumPy arrays they are static.
    static = known if isinstance(query, Tracer) else lambda x: x
    masks: list[MaskFunction] = [Causal()] if flag("is_causal", is_causal) else []
    if local_window_size is not None:
        masks.append(SlidingWindow(*_window(local_window_size)))
    slot_masks = []
    mask, score_mod = check_signature("mask", mask), check_signature("score_mod", score_mod)
    if callable(mask):
        masks.append(mask)
    elif mask is not None:
        slot_masks.append(_pairs("mask", static(mask), (B, N, T, S)))
        if slot_masks[0].dtype != bool:
            raise TypeError(
                f"mask must be bool (True: visible), got {slot_masks[0].dtype}; for an additive mask, use bias="
            )
    query_lengths = _lengths("query_seq_lengths", static(query_seq_lengths), B)
    kv_lengths = _lengths("key_value_seq_lengths", static(key_value_seq_lengths), B)
    slot_masks += masks_of_lengths(query_lengths, kv_lengths, T, S)
    if bias is not None:
        bias = jnp.asarray(_pairs("bias", bias, (B, N, T, S)))
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias must be floating (it is added to the scores), got {bias.dtype}; bools go to mask=")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a callable (score, b, h, q_idx, kv_idx) -> score, got {type(score_mod)}")
    query_positions = _positions("query_positions", static(query_positions), B, T)
    kv_positions = _positions("kv_positions", static(kv_positions), B, S)
    by_slot = query_positions is None and kv_positions is None  # tables by position may have any length
    for mod in (*masks, score_mod):
        check_fits(mod, B, N, *((T, S) if by_slot else (None, None)))
    return AttentionArgs(
        query=query,
        key=key,
        value=value,
        scale=_scale(scale, query.shape),
        bias=bias,
        masks=tuple(masks),
        slot_masks=tuple(slot_masks),
        query_lengths=query_lengths,
        kv_lengths=kv_lengths,
        score_mod=score_mod,
        query_positions=query_positions,
        kv_positions=kv_positions,
        dropout=_dropout(dropout_rate, dropout_rng, broadcast_dropout),
        precision=precision,
    )


def _qkv(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array | None]:
    arrays = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
    arrays = {name: jnp.asarray(_array(name, x)) for name, x in arrays.items()}
    shapes = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items())
    rank = arrays["query"].ndim
    if rank not in (3, 4) or any(x.ndim != rank for x in arrays.values()):
        raise ValueError(
            f"query, key, value must all be [B, length, heads, dim] or all [length, heads, dim], got {shapes}"
        )
    if len({x.dtype for x in arrays.values()}) != 1 or not jnp.issubdtype(arrays["query"].dtype, jnp.floating):
        raise TypeError(f"query, key and value must have one floating dtype, got {shapes}; cast them first")
    arrays = {name: x[None] if rank == 3 else x for name, x in arrays.items()}
    query, key, value = arrays["query"], arrays["key"], arrays.get("value")
    needed = None
    if any(x.shape[0] != query.shape[0] for x in arrays.values()):
        needed = "one batch size"
    elif key.shape[3] != query.shape[3]:
        needed = "one head dim for query and key (the last axis)"
    elif value is not None and value.shape[1:3] != key.shape[1:3]:
        needed = "one length and one number of heads for key and value"
    elif key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        needed = "query heads that are a multiple of the key/value heads"
    if needed:
        raise ValueError(f"dot_product_attention needs {needed}, got {shapes} (layout [B, length, heads, dim])")
    return query, key, value


def _pairs(name: str, array: Any, full: tuple[Length, ...]) -> AnyArray:
    """``bias`` or ``mask`` as ``[B|1, N|1, T|1, S|1]``."""
    array = _array(name, array)
    axes = full[4 - array.ndim :]
    if array.ndim > 4 or any(size not in (1, wanted) for size, wanted in zip(array.shape, axes, strict=True)):
        B, N, T, S = full
        hint = ""
        if array.shape == (B, S):
            hint = f"; a padding mask [B, S] is {name}[:, None, None, :]"
        elif array.shape in ((B, T, S), (B, 1, S)):
            hint = f"; one per sequence is {name}[:, None]"
        raise ValueError(
            f"{name} must broadcast to [B, N, T, S] = {list(full)} and have rank 4, 3 ([N, T, S]), 2 ([T, S]), 1 ([S]) "
            f"or 0, got shape {list(array.shape)}{hint}"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _lengths(name: str, lengths: Any, batch: Length) -> AnyArray | None:
    if lengths is None:
        return None
    array = _array(name, lengths)
    check_array(name, array, f"integers [B] = [{batch}]", jnp.integer, (batch,))
    return to_int32(name, array)


def masks_of_lengths(query_lengths: AnyArray | None, kv_lengths: AnyArray | None, T: Length, S: Length) -> list:
    """The slots within the lengths, of those that are not None: bool ``[B,1,T,1]`` and ``[B,1,1,S]``."""
    masks = []
    if query_lengths is not None:
        masks.append(arange(T, np.int32)[None, None, :, None] < query_lengths[:, None, None, None])
    if kv_lengths is not None:
        masks.append(arange(S, np.int32)[None, None, None, :] < kv_lengths[:, None, None, None])
    return masks


def _positions(name: str, positions: Any, batch: Length, length: Length) -> AnyArray | None:
    if positions is None:
        return None
    array = _array(name, positions)
    expected = f"integers [{length}] or [B, length] = [{batch}, {length}]"
    check_array(name, array, expected, jnp.integer, (length,), (batch, length), (1, length))
    return to_int32(name, array if array.ndim == 2 else array[None])


def _array(name: str, x: object) -> AnyArray:
    if isinstance(x, np.ndarray | np.generic | jax.Array):
        return np.asarray(x) if isinstance(x, np.generic) else x
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be an array, got {type(x).__name__}: {error}") from error


def flag(name: str, x: object) -> bool:
    """A Python bool, checked."""
    if not isinstance(x, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, and known while tracing, got {x!r}")
    return bool(x)


def _scale(scale: Any, shape: tuple[Length, ...]) -> AnyArray | int | float | None:
    if scale is not None:
        return to_number("scale", scale)
    if shape[-1] == 0:
        raise ValueError(f"head_dim is 0 (query {list(shape)}), so 1 / sqrt(head_dim) is not finite; pass scale=")
    if not isinstance(shape[-1], int):
        raise ValueError(f"head_dim is {shape[-1]}, so 1 / sqrt(head_dim) is not known while tracing; pass scale=")
    return shape[-1] ** -0.5


def _window(window: Any) -> tuple[int, int]:
    sides = window if isinstance(window, tuple) else (window, window)
    try:
        left, right = map(operator.index, sides)  # accepts NumPy's integers
    except (TypeError, ValueError):
        left = right = -1
    if min(left, right) < 0 or any(isinstance(side, bool) for side in sides):
        raise ValueError(f"local_window_size must be (left, right) or one integer, none negative, got {window!r}")
    return min(left, LARGEST), min(right, LARGEST)


def _dropout(rate: Any, rng: Array | None, broadcast: bool) -> Dropout | None:
    rate = to_number("dropout_rate", rate)
    if isinstance(rate, Tracer):
        raise TypeError("dropout_rate must be known while tracing, got a traced array; make it a static argument")
    rate = float(rate)
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1], got {rate}")
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(f"dropout_rate={rate} needs dropout_rng, a key from jax.random.key; or pass dropout_rate=0")
    return Dropout(rng, rate, broadcast)


def make_lse(lse: ArrayLike, args: AttentionArgs, one_sequence: bool) -> Array:
    """The argument ``lse`` as ``[B,T,N]``, checked, in the softmax's dtype."""
    array, rows = jnp.asarray(_array("lse", lse)), args.query.shape[:3]
    array = array[None] if one_sequence else array
    check_array("lse", array, f"floats [B, T, N] = {list(rows)}", jnp.floating, rows)
    return array.astype(softmax_dtype(args.query))


def make_sinks(sinks: ArrayLike, lse: Array) -> Array:
    """``sinks [N]`` broadcast to lse's shape ``[B,T,N]``, in its dtype."""
    sinks = jnp.asarray(_array("sinks", sinks))
    check_array("sinks", sinks, f"floats [N] = {list(lse.shape[2:])}", jnp.floating, lse.shape[2:])
    return jnp.broadcast_to(sinks.astype(lse.dtype).reshape(1, 1, -1), lse.shape)
