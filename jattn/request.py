"""What is asked of an implementation: the arguments of ``dot_product_attention``, checked, as one ``Request``."""

import operator
from typing import Any, SupportsIndex

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike

from jattn.attention import Dropout
from jattn.masks import Causal, MaskFunction, SlidingWindow
from jattn.mods import pytree_dataclass
from jattn.score_mods import ScoreMod


@pytree_dataclass
class Request:
    """One checked call of ``jattn.dot_product_attention``, batched: all heads of all sequences.

    ``bias`` and ``slot_masks`` are ``[B|1, N|1, T|1, S|1]`` and go by slot; ``masks`` and ``score_mod`` see positions,
    ``[B|1, T]`` and ``[B|1, S]``, which are None where they are the slots themselves. Masks and positions that came as
    NumPy arrays still are: what is static may be looked at while tracing.
    Sinks are not part of it: they are merged into any implementation's result.
    """

    query: Any  # [B,T,N,H]
    key: Any  # [B,S,K,H]
    value: Any  # [B,S,K,D]; None when only weights are asked for
    scale: Any
    bias: Any
    masks: tuple[MaskFunction, ...]  # these and those by slot must all hold
    slot_masks: tuple[Any, ...]
    query_lengths: Any  # [B] or None; they are among the slot_masks, too
    kv_lengths: Any
    score_mod: ScoreMod | None
    query_positions: Any
    kv_positions: Any
    dropout: Dropout | None
    precision: Any
    first_batch: Any = 0  # what masks, score functions and dropout take its first sequence and head for
    first_head: Any = 0

    @property
    def has_mask_array(self) -> bool:
        """Is there a mask by slot beside the lengths?"""
        return len(self.slot_masks) > sum(x is not None for x in (self.query_lengths, self.kv_lengths))


def make_request(
    query, key, value, bias=None, mask=None, *, scale=None, is_causal=False, query_seq_lengths=None,
    key_value_seq_lengths=None, local_window_size=None, score_mod=None, query_positions=None, kv_positions=None,
    dropout_rate=0.0, dropout_rng=None, broadcast_dropout=False, precision=None,
) -> Request:  # fmt: skip
    """The checked request: everything batched, masks that were keywords as masks."""
    query, key, value = _qkv(query, key, value)
    B, T, N, H = query.shape
    S = key.shape[1]
    masks: list[MaskFunction] = [Causal()] if is_causal else []
    if local_window_size is not None:
        masks.append(SlidingWindow(*_window(local_window_size)))
    slot_masks = []
    if callable(mask):
        masks.append(mask)
    elif mask is not None:
        slot_masks.append(_pairs("mask", mask, (B, N, T, S)))
        if slot_masks[0].dtype != bool:
            raise TypeError(
                f"mask must be bool (True: visible), got {slot_masks[0].dtype}; what is to be added is bias="
            )
    query_lengths = _lengths("query_seq_lengths", query_seq_lengths, B)
    kv_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, B)
    if query_lengths is not None:
        slot_masks.append(np.arange(T)[None, None, :, None] < query_lengths[:, None, None, None])
    if kv_lengths is not None:
        slot_masks.append(np.arange(S)[None, None, None, :] < kv_lengths[:, None, None, None])
    if bias is not None:
        bias = jnp.asarray(_pairs("bias", bias, (B, N, T, S)))
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias must be floating (it is added to the scores), got {bias.dtype}; bools are mask=")
    if score_mod is not None and not callable(score_mod):
        raise TypeError(f"score_mod must be a callable (score, b, h, q_idx, kv_idx) -> score, got {type(score_mod)}")
    return Request(
        query=query,
        key=key,
        value=value,
        scale=H**-0.5 if scale is None and H else scale,
        bias=bias,
        masks=tuple(masks),
        slot_masks=tuple(slot_masks),
        query_lengths=query_lengths,
        kv_lengths=kv_lengths,
        score_mod=score_mod,
        query_positions=_positions("query_positions", query_positions, B, T),
        kv_positions=_positions("kv_positions", kv_positions, B, S),
        dropout=_dropout(dropout_rate, dropout_rng, broadcast_dropout),
        precision=precision,
    )


def _qkv(query, key, value) -> tuple[Array, Array, Array | None]:
    arrays = {"query": query, "key": key} if value is None else {"query": query, "key": key, "value": value}
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
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
    wrong = None
    if any(x.shape[0] != query.shape[0] for x in arrays.values()):
        wrong = "one batch size"
    elif key.shape[3] != query.shape[3]:
        wrong = "one head dim for query and key (the last axis)"
    elif value is not None and value.shape[1:3] != key.shape[1:3]:
        wrong = "one length and one number of heads for key and value"
    elif key.shape[2] == 0 or query.shape[2] % key.shape[2]:
        wrong = "query heads that are a multiple of the key/value heads"
    if wrong:
        raise ValueError(f"dot_product_attention needs {wrong}, got {shapes} (layout [B, length, heads, dim])")
    return query, key, value


def _pairs(name: str, array: Any, full: tuple[int, ...]) -> Any:
    """``bias`` or ``mask`` as ``[B|1, N|1, T|1, S|1]``."""
    array = _array(array)
    axes = full[4 - array.ndim :] if 2 <= array.ndim <= 4 else ()
    if not axes or any(size not in (1, wanted) for size, wanted in zip(array.shape, axes, strict=True)):
        B, N, T, S = full
        hint = ""
        if array.shape == (B, S):
            hint = f"; a padding mask [B, S] is {name}[:, None, None, :]"
        elif array.shape in ((B, T, S), (B, 1, S)):
            hint = f"; one per sequence is {name}[:, None]"
        raise ValueError(
            f"{name} must broadcast to [B, N, T, S] = {list(full)} and have rank 4, 3 ([N, T, S]) or 2 ([T, S]), "
            f"got shape {list(array.shape)}{hint}"
        )
    return array.reshape((1,) * (4 - array.ndim) + array.shape)


def _lengths(name: str, lengths: Any, batch: int) -> Any:
    if lengths is None:
        return None
    lengths = _array(lengths)
    if lengths.shape != (batch,) or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers [B] = [{batch}], got {lengths.dtype} of shape {list(lengths.shape)}")
    return lengths


def _positions(name: str, positions: Any, batch: int, length: int) -> Any:
    if positions is None:
        return None
    positions = _array(positions)
    if positions.shape not in ((length,), (batch, length), (1, length)) or not jnp.issubdtype(
        positions.dtype, jnp.integer
    ):
        raise ValueError(
            f"{name} must be integers [{length}] or [B, length] = [{batch}, {length}], "
            f"got {positions.dtype} of shape {list(positions.shape)}"
        )
    return positions.reshape(-1, length)


def _array(x: Any) -> Any:
    return x if isinstance(x, np.ndarray) else jnp.asarray(x)


def _window(window: SupportsIndex | tuple[SupportsIndex, SupportsIndex]) -> tuple[int, int]:
    sides = window if isinstance(window, tuple) else (window, window)
    if len(sides) != 2 or any(operator.index(side) < 0 for side in sides):  # NumPy's integers are welcome, too
        raise ValueError(f"local_window_size must be (left, right) or one number, none negative, got {window}")
    return operator.index(sides[0]), operator.index(sides[1])


def _dropout(rate: float, rng: Array | None, broadcast: bool) -> Dropout | None:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"dropout_rate must lie in [0, 1), got {rate}")
    if rate == 0.0:
        return None
    if rng is None:
        raise ValueError(f"dropout_rate={rate} needs dropout_rng, a key from jax.random.key; or pass dropout_rate=0")
    return Dropout(rate, rng, broadcast)


def make_lse(given: ArrayLike, request: Request, one_sequence: bool) -> Array:
    """``lse [B,T,N]`` of a call that is folded over."""
    lse = jnp.asarray(given)
    lse = lse[None] if one_sequence else lse
    if lse.shape != request.query.shape[:3] or not jnp.issubdtype(lse.dtype, jnp.floating):
        raise ValueError(
            f"lse must be floats [B, T, N] = {list(request.query.shape[:3])}, got {lse.dtype} of shape "
            f"{list(lse.shape)}"
        )
    return lse


def make_sinks(sinks: ArrayLike, lse: Array) -> Array:
    """``sinks [N]`` in lse's shape ``[B,T,N]`` and dtype."""
    sinks = jnp.asarray(sinks)
    if sinks.shape != lse.shape[2:] or not jnp.issubdtype(sinks.dtype, jnp.floating):
        raise ValueError(
            f"sinks must be floats [N] = {list(lse.shape[2:])}, got {sinks.dtype} of shape {list(sinks.shape)}"
        )
    return jnp.broadcast_to(sinks.astype(lse.dtype).reshape(1, 1, -1), lse.shape)
