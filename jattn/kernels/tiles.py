"""The scores of a tile of pairs inside a kernel: what the kernels for TPUs and for GPUs share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jattn.placement import is_typed, may_be_divided
from jattn.request import Request
from jattn.separate import HEAD, KEY, PAIR, QUERY, Separated, reason_against, separate, spread
from jattn.tables import arange

SEVERAL_DEVICES = "the arrays may lie on several devices: use jax.shard_map or a mesh of AxisType.Explicit"
LARGEST_DIM = 256


def unsupported_reason(request: Request, dtypes: Sequence[Any]) -> str | None:
    """The first reason against our own kernels on either chip, or None; ``dtypes``: those that they take."""
    (B, T, _, H), S, value = request.query.shape, request.key.shape[1], request.value
    dtype, dim = request.query.dtype, max(H, 0 if value is None else value.shape[3])
    taken = " and ".join(jnp.dtype(x).name for x in dtypes)
    reasons = [
        (dtype not in dtypes, f"it takes {taken}, not {dtype}"),
        (not all(isinstance(x, int) for x in (B, T, S)), "it takes no symbolic shapes"),
        (value is None or 0 in (*request.query.shape, *request.key.shape), "it takes no empty arrays"),
        (dim > LARGEST_DIM, f"head_dim must be at most {LARGEST_DIM}, got {dim}"),
        (request.dropout is not None, "it takes no dropout"),
        (may_be_divided(request) and not is_typed(request.query), SEVERAL_DEVICES),
    ]
    reason = next((reason for applies, reason in reasons if applies), None)
    return reason or reason_against(request.masks, request.score_mod)


@runtime_checkable
class Operands(Protocol):
    """The arrays that a kernel reads, in its own order of axes. Each method returns what a ``Tile`` reads it by."""

    def scalars(self, array: jax.Array) -> Any:
        """Adds ``[B|1,N|1]``."""
        ...

    def vector(self, over: str, array: jax.Array) -> Any:
        """Adds ``[B|1,N|1,T]`` or ``[B|1,N|1,S]``; ``over``: QUERY or KEY."""
        ...

    def pairs(self, array: jax.Array) -> Any:
        """Adds ``[B|1,N|1,T,S]``."""
        ...


@dataclasses.dataclass
class _Mod:
    """A mask or score function and the arrays that it reads."""

    separated: Separated
    arrays: list[Any]
    dtypes: list[Any]


@dataclasses.dataclass
class Scores:
    """What the scores of a request are computed from, besides queries and keys."""

    request: Request
    scale: Any
    bias: Any
    masks: list[_Mod]
    score_mod: _Mod | None
    slot_masks: list[Any]
    positions: dict[str, Any]
    all_seen: bool  # whether each query sees a key, and each key is seen

    @classmethod
    def of(cls, request: Request, operands: Operands, all_seen: bool, /, **own: Any) -> Any:
        """Adds what the scores need to ``operands``; ``own``: the fields of a subclass."""
        T = request.query.shape[1]
        given = {QUERY: request.query_positions, KEY: request.kv_positions}
        positions = {over: operands.vector(over, jnp.asarray(x)[:, None]) for over, x in given.items() if x is not None}
        return cls(
            request=request,
            scale=operands.scalars(jnp.asarray(request.score_scale, jnp.float32).reshape(1, 1)),
            bias=None if request.bias is None else _add_pairs(operands, request.bias.astype(jnp.float32), T),
            masks=[_add_mod(request, operands, mask, None) for mask in request.masks],
            score_mod=request.score_mod and _add_mod(request, operands, request.score_mod, jnp.float32),
            slot_masks=[_add_pairs(operands, jnp.asarray(x).astype(jnp.int32), T) for x in request.slot_masks],
            positions=positions,
            all_seen=all_seen,
            **own,
        )


class Tile:
    """The pairs of some queries and keys of one head, as an array of ``shape``. Kernels define what raises here."""

    shape: tuple[int, int]
    block: tuple[int, int]  # T and S are padded to multiples of these

    def __init__(self, source: Scores, masked: bool):
        self.source, self.masked = source, masked
        self._inputs: dict[int, tuple[list[Any], list[Any]]] = {}

    def product(self) -> jax.Array:
        """``q·k``, in float32."""
        raise NotImplementedError

    def slots(self) -> tuple[jax.Array, jax.Array]:
        """The slots of the queries and of the keys, int32, broadcastable to ``shape``."""
        raise NotImplementedError

    def scalar(self, added: Any) -> jax.Array:
        """The head's entry of an array of ``Operands.scalars``."""
        raise NotImplementedError

    def vector(self, over: str, added: Any) -> jax.Array:
        """The tile's part of an array of ``Operands.vector``, broadcastable to ``shape``."""
        raise NotImplementedError

    def pairs(self, added: Any) -> jax.Array:
        """The tile's part of an array of ``Operands.pairs``."""
        raise NotImplementedError

    def compute(self, fn: Callable, *arrays: Any) -> Any:
        """``fn(*arrays)``, of a mask, a score function or its derivative."""
        return fn(*arrays)

    @functools.cached_property
    def visible(self) -> jax.Array | None:
        """Which pairs are visible; None if all are."""
        if not self.masked:
            return None
        visible = None
        lengths = self.source.request.query.shape[1], self.source.request.key.shape[1]
        for slots, length, size in zip(self.slots(), lengths, self.block, strict=True):
            if length % size:
                visible = self._and(visible, slots < length)
        for mask in self.source.masks:
            evaluate = self._evaluated(mask)
            visible = self._and(visible, self.compute(lambda evaluate=evaluate: evaluate(None)))
        for added in self.source.slot_masks:
            visible = self._and(visible, self._read_pairs(added) != 0)
        return jnp.ones(self.shape, bool) if visible is None else visible

    def scores(self) -> jax.Array:
        """The scores, -inf where masked."""
        s = self._biased()
        if self.source.score_mod is not None:
            s = self.compute(self._on_scores(), s)
        return s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)

    def through_score_mod(self, d_score: jax.Array) -> jax.Array:
        """The derivative with respect to ``scale * q·k + bias``, from that with respect to the score."""
        if self.source.score_mod is None:
            return d_score
        modified, s = self._on_scores(), self._biased()
        # Elementwise, so its own transpose.
        return self.compute(lambda s, d_score: jax.jvp(modified, (s,), (d_score,))[1], s, d_score)

    def _biased(self) -> jax.Array:
        s = self.product() * self.scalar(self.source.scale)
        return s if self.source.bias is None else s + self._read_pairs(self.source.bias)

    def _on_scores(self) -> Callable:
        """The score function, of ``scale * q·k + bias``. What it reads is read here: references have no derivative."""
        assert self.source.score_mod is not None
        evaluate, visible = self._evaluated(self.source.score_mod), self.visible

        def modified(s: jax.Array) -> jax.Array:
            if visible is not None:
                s = jnp.where(visible, s, 1.0)  # stand-in: keeps an infinite derivative out
            return jnp.broadcast_to(evaluate(s), s.shape).astype(s.dtype)

        return modified

    def _evaluated(self, mod: _Mod) -> Callable:
        (q_idx, kv_idx), arrays = self._read(mod)
        return lambda score: mod.separated.on_tile(score, q_idx, kv_idx, arrays)

    def _read(self, mod: _Mod) -> tuple[list[Any], list[Any]]:
        """The positions, and the arrays that ``mod`` reads, of this tile."""
        if id(mod) not in self._inputs:
            given = self.source.positions
            positions = [
                self.vector(over, given[over]) if over in given else slots
                for over, slots in zip((QUERY, KEY), self.slots(), strict=True)
            ]
            arrays = [
                _typed(self.scalar(added) if over == HEAD else self.vector(over, added), dtype)
                for over, added, dtype in zip(mod.separated.outside.values(), mod.arrays, mod.dtypes, strict=True)
            ]
            self._inputs[id(mod)] = positions, arrays
        return self._inputs[id(mod)]

    def _read_pairs(self, added: tuple[str, Any]) -> jax.Array:
        over, own = added
        return self.pairs(own) if over == PAIR else self.vector(over, own)

    def _and(self, x: Any, y: Any) -> jax.Array:
        y = spread(y, self.shape)
        return y if x is None else x & y


def _typed(array: jax.Array, dtype: Any) -> jax.Array:
    return array != 0 if dtype == bool else array.astype(dtype)


def _add_mod(request: Request, operands: Operands, mod: Any, score_dtype: Any) -> _Mod:
    (B, T, N, _), S = request.query.shape, request.key.shape[1]
    batch, heads = request.first_batch + jnp.arange(B), request.first_head + jnp.arange(N)
    positions = [
        arange(length, np.int32)[None] if own is None else own
        for own, length in ((request.query_positions, T), (request.kv_positions, S))
    ]
    separated = separate(mod, score_dtype)
    arrays, added = separated.arrays(batch, heads, *positions), []
    for array, over in zip(arrays, separated.outside.values(), strict=True):
        # A TPU's scalar memory and registers hold 32 bits.
        wide = array.astype(jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32)
        added.append(operands.scalars(wide) if over == HEAD else operands.vector(over, wide))
    return _Mod(separated, added, [array.dtype for array in arrays])


def _add_pairs(operands: Operands, array: jax.Array, T: int) -> tuple[str, Any]:
    """Adds an array ``[B|1,N|1,T|1,S|1]``; what it runs over, and what it is read by."""
    if array.shape[3] == 1:
        return QUERY, operands.vector(QUERY, jnp.broadcast_to(array[..., 0], (*array.shape[:2], T)))
    if array.shape[2] == 1:
        return KEY, operands.vector(KEY, array[:, :, 0])
    return PAIR, operands.pairs(array)
