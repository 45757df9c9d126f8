"""The scores of a tile of pairs inside a kernel, shared by the kernels for TPUs and GPUs."""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from jattn._blocks.reduction import Reduction
from jattn._core.call import Call
from jattn._mods.arrays import arange
from jattn._mods.mask import MaskFunction
from jattn._mods.tile_function import HEAD, KEY, PAIR, QUERY, TileFunction, make_tile_function, reason_against, spread
from jattn.kernels.kernel import ReducingKernel, Results
from jattn.score_mods import ScoreMod

LARGEST_DIM = 256
Ref = Any  # an array in a kernel's memory: Pallas has several types, none of them public


class PallasKernel(ReducingKernel):
    """Our own kernels for one kind of chip, in the ``passes`` module of its package."""

    takes: ClassVar[frozenset[str]] = frozenset(
        {
            "bias", "masks", "slot_masks", "query_seq_lengths", "key_value_seq_lengths", "score_mod", "query_positions",
            "kv_positions", "precision",
        }
    )  # fmt: skip

    def refusals(self, call: Call) -> Iterator[tuple[bool, str]]:
        dim = max(call.query.shape[3], call.value.shape[3])
        yield dim > LARGEST_DIM, f"head_dim must be at most {LARGEST_DIM}, got {dim}"
        reason = reason_against(call.masks, call.score_mod)
        yield reason is not None, reason or ""

    @property
    def _kernel(self) -> ModuleType:
        """Imported on first use: importing Pallas takes half as long as importing jattn."""
        return importlib.import_module(f"jattn.kernels.{self.name}.passes")

    def forward(self, platform: str, call: Call) -> Results:
        return self._kernel.forward(call, self)

    def backward(
        self, platform: str, call: Call, results: Results, cotangents: Sequence[Array | None]
    ) -> Sequence[Array]:
        return self._kernel.backward(call, results, cotangents, self)

    def reduce(self, platform: str, call: Call, reduction: Reduction) -> dict[str, Array]:
        return self._kernel.reduce(call, reduction, self)


def rounded(x: Array, dtype: DTypeLike, simulated: bool) -> Array:
    """``x``, in its own dtype, rounded to ``dtype``."""
    if simulated:  # XLA omits a cast there and back, but kernel compilers do not
        return jax.lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)
    return x.astype(dtype).astype(x.dtype)


@runtime_checkable
class Operands(Protocol):
    """The arrays that a kernel reads, in its own order of axes. Each method returns a handle for ``Tile`` to read."""

    def scalars(self, array: Array) -> Any:
        """Adds ``[B|1,N|1]``."""
        ...

    def vector(self, over: str, array: Array) -> Any:
        """Adds ``[B|1,N|1,T]`` or ``[B|1,N|1,S]``; ``over``: QUERY or KEY."""
        ...

    def pairs(self, array: Array) -> Any:
        """Adds ``[B|1,N|1,T,S]``."""
        ...


@dataclasses.dataclass
class _Mod:
    """A mask or score function and the arrays it reads."""

    tile_function: TileFunction
    arrays: list[Any]  # what ``Operands`` returned
    dtypes: list[jnp.dtype]


@dataclasses.dataclass
class Scores:
    """The inputs of a call's scores other than queries and keys."""

    call: Call
    scale: Any  # arrays here and below are handles from ``Operands``, paired with what they run over
    bias: tuple[str, Any] | None
    masks: list[_Mod]
    score_mod: _Mod | None
    slot_masks: list[tuple[str, Any]]
    positions: dict[str, Any]
    all_seen: bool  # whether each query sees a key, and each key is seen

    @classmethod
    def of(cls, call: Call, operands: Operands, all_seen: bool, /, **fields: Any) -> Any:
        """Adds the scores' inputs to ``operands``; ``fields``: the fields of a subclass."""
        T = call.query.shape[1]
        arrays = (QUERY, call.query_positions), (KEY, call.kv_positions)
        positions = {over: operands.vector(over, jnp.asarray(x)[:, None]) for over, x in arrays if x is not None}
        return cls(
            call=call,
            scale=operands.scalars(jnp.asarray(call.score_scale, jnp.float32).reshape(1, 1)),
            bias=None if call.bias is None else _add_pairs(operands, call.bias.astype(jnp.float32), T),
            masks=[_add_mod(call, operands, mask, None) for mask in call.masks],
            score_mod=None if call.score_mod is None else _add_mod(call, operands, call.score_mod, jnp.float32),
            slot_masks=[_add_pairs(operands, jnp.asarray(x).astype(jnp.int32), T) for x in call.slot_masks],
            positions=positions,
            all_seen=all_seen,
            **fields,
        )


class Tile:
    """The pairs of some queries and keys of one head, as an array of ``shape``. Kernels define the abstract methods."""

    shape: tuple[int, int]
    block: tuple[int, int]  # T and S are padded to multiples of this

    def __init__(self, source: Scores, masked: bool):
        self.source, self.masked = source, masked
        self._inputs: dict[int, tuple[list[Any], list[Any]]] = {}

    def product(self) -> Array:
        """``q·k``, in float32."""
        raise NotImplementedError

    def slots(self) -> tuple[Array, Array]:
        """The slots of the queries and keys, int32, broadcastable to ``shape``."""
        raise NotImplementedError

    def scalar(self, added: Any) -> Array:
        """The head's entry of an array of ``Operands.scalars``."""
        raise NotImplementedError

    def vector(self, over: str, added: Any) -> Array:
        """The tile's part of an array of ``Operands.vector``, broadcastable to ``shape``."""
        raise NotImplementedError

    def pairs(self, added: Any) -> Array:
        """The tile's part of an array of ``Operands.pairs``."""
        raise NotImplementedError

    def compute(self, fn: Callable[..., Array], *arrays: Array) -> Array:
        """``fn(*arrays)`` for a mask, a score function or its derivative."""
        return fn(*arrays)

    @functools.cached_property
    def visible(self) -> Array | None:
        """Which pairs are visible; None if all are."""
        if not self.masked:
            return None
        visible = None
        lengths = self.source.call.query.shape[1], self.source.call.key.shape[1]
        for slots, length, size in zip(self.slots(), lengths, self.block, strict=True):
            if length % size:
                visible = self._and(visible, slots < length)
        for mask in self.source.masks:
            evaluate = self._evaluated(mask)
            visible = self._and(visible, self.compute(lambda evaluate=evaluate: evaluate(None)))
        for added in self.source.slot_masks:
            visible = self._and(visible, self._read_pairs(added) != 0)
        return jnp.ones(self.shape, bool) if visible is None else visible

    def scores(self) -> Array:
        """The scores, -inf where masked."""
        s = self._biased()
        if self.source.score_mod is not None:
            s = self.compute(self._on_scores(), s)
        return s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)

    def through_score_mod(self, d_score: Array) -> Array:
        """The derivative with respect to ``scale * q·k + bias``, given the derivative with respect to the score."""
        if self.source.score_mod is None:
            return d_score
        modified, s = self._on_scores(), self._biased()
        # Elementwise, and therefore its own transpose.
        return self.compute(lambda s, d_score: jax.jvp(modified, (s,), (d_score,))[1], s, d_score)

    def _biased(self) -> Array:
        s = self.product() * self.scalar(self.source.scale)
        return s if self.source.bias is None else s + self._read_pairs(self.source.bias)

    def _on_scores(self) -> Callable[[Array], Array]:
        """The score function applied to ``scale * q·k + bias``. Reads inputs here: references have no derivative."""
        assert self.source.score_mod is not None
        evaluate, visible = self._evaluated(self.source.score_mod), self.visible

        def modified(s: Array) -> Array:
            if visible is not None:
                s = jnp.where(visible, s, 1.0)  # stand-in: keeps an infinite derivative out
            return jnp.broadcast_to(evaluate(s), s.shape).astype(s.dtype)

        return modified

    def _evaluated(self, mod: _Mod) -> Callable[[Array], Array]:
        (q_idx, kv_idx), arrays = self._read(mod)
        return lambda score: mod.tile_function.on_tile(score, q_idx, kv_idx, arrays)

    def _read(self, mod: _Mod) -> tuple[list[Any], list[Any]]:
        """This tile's positions, and the arrays that ``mod`` reads."""
        if id(mod) not in self._inputs:
            indices = self.source.positions
            positions = [
                self.vector(over, indices[over]) if over in indices else slots
                for over, slots in zip((QUERY, KEY), self.slots(), strict=True)
            ]
            arrays = [
                _typed(self.scalar(added) if over == HEAD else self.vector(over, added), dtype)
                for over, added, dtype in zip(mod.tile_function.outside.values(), mod.arrays, mod.dtypes, strict=True)
            ]
            self._inputs[id(mod)] = positions, arrays
        return self._inputs[id(mod)]

    def _read_pairs(self, added: tuple[str, Any]) -> Array:
        over, operand = added
        return self.pairs(operand) if over == PAIR else self.vector(over, operand)

    def _and(self, x: Array | None, y: Array) -> Array:
        y = jnp.asarray(spread(y, self.shape))
        return y if x is None else x & y


def _typed(array: Array, dtype: jnp.dtype) -> Array:
    return array != 0 if dtype == bool else array.astype(dtype)


def _add_mod(call: Call, operands: Operands, mod: MaskFunction | ScoreMod, score_dtype: DTypeLike | None) -> _Mod:
    (B, T, N, _), S = call.query.shape, call.key.shape[1]
    batch, heads = call.first_batch + jnp.arange(B), call.first_head + jnp.arange(N)
    sides = (call.query_positions, T), (call.kv_positions, S)
    positions = [arange(length, np.int32)[None] if indices is None else indices for indices, length in sides]
    tile_function = make_tile_function(mod, score_dtype)
    arrays, added = tile_function.arrays(batch, heads, *positions), []
    for array, over in zip(arrays, tile_function.outside.values(), strict=True):
        # A TPU's scalar memory and registers hold 32 bits.
        wide = array.astype(jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32)
        added.append(operands.scalars(wide) if over == HEAD else operands.vector(over, wide))
    return _Mod(tile_function, added, [array.dtype for array in arrays])


def _add_pairs(operands: Operands, array: Array, T: int) -> tuple[str, Any]:
    """Adds an array ``[B|1,N|1,T|1,S|1]``; returns what it runs over, and its handle."""
    if array.shape[3] == 1:
        return QUERY, operands.vector(QUERY, jnp.broadcast_to(array[..., 0], (*array.shape[:2], T)))
    if array.shape[2] == 1:
        return KEY, operands.vector(KEY, array[:, :, 0])
    return PAIR, operands.pairs(array)
