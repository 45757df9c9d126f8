"""Checks the arguments of attention: ``make_call`` for all heads, ``make_head`` for one."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from jattn._core.call import ARRAYS, Call, MaskLike, SharedOptions, softmax_dtype
from jattn._core.dropout import Dropout
from jattn._mods.arrays import AnyArray, Length, arange
from jattn._mods.closure_convert import depends_on
from jattn._mods.keywords import suggest_keywords
from jattn._mods.pytree import known
from jattn._mods.validation import (
    LARGEST,
    as_array,
    check_array,
    check_fits,
    check_signature,
    flag,
    pair,
    to_int32,
    to_number,
)
from jattn.masks import Causal, SlidingWindow

_KINDS = {jnp.floating: "floating", jnp.integer: "integers", bool: "bool"}
_HINTS = {
    "mask": (" (True: visible)", "; for an additive mask, use bias="),
    "bias": (" (it is added to the scores)", "; bools go to mask="),
}


@suggest_keywords
def make_call(
    query: Any, key: Any, value: Any, bias: Any = None, mask: Any = None, *, is_causal: Any = False,
    query_seq_lengths: Any = None, key_value_seq_lengths: Any = None, local_window_size: Any = None,
    dropout_rate: Any = 0.0, dropout_rng: Any = None, broadcast_dropout: Any = False, **options: Unpack[SharedOptions],
) -> Call:  # fmt: skip
    """The checked, batched call; ``is_causal`` and ``local_window_size`` become masks. Arguments may have any type."""
    query, key, value = _qkv(query, key, value)
    (B, T, N, _), S = query.shape, key.shape[1]
    masks: list[Any] = [Causal()] if flag("is_causal", is_causal) else []
    if local_window_size is not None:
        masks.append(SlidingWindow(*_window(local_window_size)))
    if mask is not None:
        masks.append(check_signature("mask", mask))
    call = _make(
        query, key, value, {"b": B, "n": N, "t": T, "s": S, "c": S}, masks,
        bias=bias, query_seq_lengths=query_seq_lengths, key_value_seq_lengths=key_value_seq_lengths,
        dropout=_dropout(dropout_rate, dropout_rng, broadcast_dropout), **options,
    )  # fmt: skip
    by_slot = call.query_positions is None and call.kv_positions is None  # tables by position may have any length
    for mod in (*call.masks, call.score_mod):
        check_fits(mod, B, N, *((T, S) if by_slot else (None, None)))
    return call


@suggest_keywords
def make_head(
    q: Any, k: Any, v: Any, *, mask: MaskLike | None = None, bias: Any = None, batch: Any = None, head: Any = None,
    dropout: Any = None, **options: Unpack[SharedOptions],
) -> Call:  # fmt: skip
    """The checked call of one head, with the options of ``attend``; ``v`` is None if only the weights are needed."""
    arrays = _same_dtype({"q": q, "k": k} | ({} if v is None else {"v": v}))
    q, k, v = arrays["q"], arrays["k"], arrays.get("v")
    by_key = k if v is None else v
    if any(x.ndim != 2 for x in arrays.values()) or q.shape[1] != k.shape[1] or by_key.shape[0] != k.shape[0]:
        raise ValueError(
            f"one head takes q [T, H], k [S, H] and v [S, D], got {_types(arrays)}; for all heads use over_heads, for "
            "batches dot_product_attention"
        )
    if dropout is not None and not isinstance(dropout, Dropout):
        rate, rng = pair("dropout", dropout, "(rate, key)")
        dropout = _dropout(rate, rng, False, "the rate of dropout=(rate, key)", "the second")
    masks = mask if isinstance(mask, tuple | list) else [] if mask is None else [mask]
    sizes = {"t": q.shape[0], "s": k.shape[0], "c": k.shape[0]}
    indices = {"first_batch": 0 if batch is None else batch, "first_head": 0 if head is None else head}
    checked = [check_signature("mask", mask) for mask in masks]
    call = _make(q, k, v, sizes, checked, bias=bias, dropout=dropout, **indices, **options)
    mods: list[tuple] = [("mask", mask) for mask in call.masks]
    mods += [] if call.score_mod is None else [("score_mod", call.score_mod, jnp.float32)]
    for argument, index, position in (("batch", batch, -4), ("head", head, -3)):
        for name, mod, *score in mods if index is None else ():
            if depends_on(mod, position, *score):
                raise ValueError(
                    f"{name} differs by {argument}, but its index is not given: pass {argument}= (over_heads passes "
                    f"head= to functions that take it, such as functools.partial(attend, ...))"
                )
    return call


def _make(
    query: Array, key: Array, value: Array | None, sizes: Mapping[str, Length], masks: Sequence[Any], **options: Any
) -> Call:
    """The checked call with these fields and the masks; ``sizes``: the sizes of its axes, by letter."""
    # Arrays captured by a jitted function are concrete: as NumPy arrays, they are static.
    static = known if isinstance(query, Tracer) else lambda x: x
    slot_masks = [_fitting("mask", static(mask), sizes, "slot_masks") for mask in masks if not callable(mask)]
    for name, x in options.items():
        if name in ARRAYS and x is not None:
            options[name] = _fitting(name, x if ARRAYS[name][1] == jnp.floating else static(x), sizes, name)
    lengths = [options.get(name) for name in ("query_seq_lengths", "key_value_seq_lengths")]
    if any(x is not None for x in lengths):
        slot_masks += masks_of_lengths(*lengths, *(arange(sizes[axis], np.int32) for axis in "ts"))
    score_mod = check_signature("score_mod", options.get("score_mod"))
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a callable (score, b, h, q_idx, kv_idx) -> score, got {type(score_mod)}")
    options |= {"scale": _scale(options.get("scale"), query.shape), "slot_masks": tuple(slot_masks)}
    return Call(query, key, value, masks=tuple(filter(callable, masks)), **options)


def _qkv(query: Any, key: Any, value: Any) -> tuple[Array, Array, Array | None]:
    arrays = _same_dtype({"query": query, "key": key} | ({} if value is None else {"value": value}))
    rank = arrays["query"].ndim
    if rank not in (3, 4) or any(x.ndim != rank for x in arrays.values()):
        raise ValueError(
            "query, key, value must all be [B, length, heads, dim] or all [length, heads, dim], got " + _types(arrays)
        )
    arrays = {name: x[None] if rank == 3 else x for name, x in arrays.items()}
    query, key, value, needed = arrays["query"], arrays["key"], arrays.get("value"), None
    if any(x.shape[0] != query.shape[0] for x in arrays.values()):
        needed = "one batch size"
    elif key.shape[3] != query.shape[3]:
        needed = "one head dim for query and key (the last axis)"
    elif value is not None and value.shape[1:3] != key.shape[1:3]:
        needed = "one length and one number of heads for key and value"
    elif key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        needed = "query heads that are a multiple of the key/value heads"
    if needed:
        raise ValueError(f"dot_product_attention needs {needed}, got {_types(arrays)} (layout [B, length, heads, dim])")
    return query, key, value


def _same_dtype(arrays: Mapping[str, Any]) -> dict[str, Array]:
    arrays = {name: jnp.asarray(as_array(name, x)) for name, x in arrays.items()}
    dtype, *others = (x.dtype for x in arrays.values())
    if any(other != dtype for other in others) or not jnp.issubdtype(dtype, jnp.floating):
        *names, last = arrays
        text = f"{', '.join(names)} and {last} must have one floating dtype"
        raise TypeError(f"{text}, got {_types(arrays)}; cast them first")
    return arrays


def _types(arrays: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in arrays.items())


def _fitting(name: str, x: Any, sizes: Mapping[str, Length], field: str) -> AnyArray:
    """The argument ``name`` as the array of a ``Call`` field: with all of its axes, and integers as int32."""
    axes, kind = ARRAYS[field]
    array, axes = as_array(name, x), [axis for axis in axes if axis[-1] in sizes]
    full = [sizes[axis[-1]] for axis in axes]
    first = next((i for i, axis in enumerate(axes) if axis[0] != "#"), len(axes))  # axes before it may be omitted
    left_out = len(axes) - array.ndim
    fits = 0 <= left_out <= first and all(
        size == whole or (size == 1 and axis[0] == "#")
        for size, whole, axis in zip(array.shape, full[left_out:], axes[left_out:], strict=True)
    )
    if not jnp.issubdtype(array.dtype, kind):
        meaning, instead = _HINTS.get(name, ("", ""))
        raise TypeError(f"{name} must be {_KINDS[kind]}{meaning}, got {array.dtype}{instead}")
    if not fits:
        letters = [{"c": "S"}.get(axis[-1], axis[-1].upper()) for axis in axes]
        *fewer, every = [f"[{', '.join(letters[i:])}]" for i in range(first, -1, -1)]
        of_pairs, hint = len(axes) == 4, ""
        if of_pairs and array.shape == (full[0], full[3]):
            hint = f"; a padding mask [B, S] is {name}[:, None, None, :]"
        elif of_pairs and array.shape in ((full[0], full[2], full[3]), (full[0], 1, full[3])):
            hint = f"; one per sequence is {name}[:, None]"
        elif of_pairs and array.ndim and array.shape[-1] not in (1, full[3]):
            causal = ", and a causal one is is_causal=True" if array.shape[-2:] == (full[2], full[2]) else ""
            hint = f"; with a cache, {name} covers its slots{causal}"
        shapes = f"{', '.join(fewer)} or {every}" if fewer else every
        shared = ", with 1 where it is shared" if first else ""
        raise ValueError(
            f"{name} must be {_KINDS[kind]} {shapes} = {full}{' for one head' * ('b' not in sizes)}{shared}, got shape "
            f"{list(array.shape)}{hint}"
        )
    if kind == jnp.floating:
        array = jnp.asarray(array)
    elif kind == jnp.integer:
        array = to_int32(name, array)
    return array.reshape((1,) * left_out + array.shape) if left_out else array


def masks_of_lengths(
    query_lengths: AnyArray | None, kv_lengths: AnyArray | None, q_idx: AnyArray, kv_idx: AnyArray
) -> list[AnyArray]:
    """Whether slots lie within each length that is not None: bool ``[B,1,T,1]`` and ``[B,1,1,S]``."""
    masks = []
    if query_lengths is not None:
        masks.append(q_idx[None, None, :, None] < query_lengths[:, None, None, None])
    if kv_lengths is not None:
        masks.append(kv_idx[None, None, None, :] < kv_lengths[:, None, None, None])
    return masks


def _scale(scale: Any, shape: tuple[Length, ...]) -> AnyArray | int | float:
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


def _dropout(rate: Any, rng: Any, broadcast: bool, name: str = "dropout_rate", key: str = "dropout_rng") -> Any:
    rate = to_number(name, rate)
    if isinstance(rate, Tracer):
        raise TypeError(f"{name} must be known while tracing, got a traced array; make it a static argument")
    rate = float(rate)
    if not 0.0 <= rate <= 1.0:
        raise ValueError(f"{name} must lie in [0, 1], got {rate}")
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(f"{name} is {rate}, which needs {key}, a key from jax.random.key; or pass a rate of 0")
    return Dropout(rng, rate, broadcast)


def make_lse(lse: ArrayLike, call: Call, one_sequence: bool) -> Array:
    """The checked argument ``lse`` as ``[B,T,N]``, in the softmax's dtype."""
    array, rows = jnp.asarray(as_array("lse", lse)), call.query.shape[:3]
    array = array[None] if one_sequence else array
    check_array("lse", array, f"floats [B, T, N] = {list(rows)}", jnp.floating, rows)
    return array.astype(softmax_dtype(call.query))
