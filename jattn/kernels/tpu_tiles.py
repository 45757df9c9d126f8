"""What the kernels of ``pallas_tpu`` share: the list of blocks, the arrays that they read, and the scores of a tile."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.mods import mod_semantics
from jattn.request import Request
from jattn.separate import HEAD, QUERY, Separated, separate, spread
from jattn.tables import arange, namespace, pad_end

TILE = 128  # queries and keys of a tile: the lanes of a register
_BITS, _LAST = 13, 13 + 13 + 2 + 1  # an entry: row, column, partial and full, first, last
MOST = 2**_BITS  # blocks along an axis


def schedule(any_visible: Any, all_visible: Any, by_key: bool) -> Any:
    """The blocks to compute, in order, as int32 ``[B|1, entries]``; ``split_entry`` tells what an entry says.

    Args:
        any_visible, all_visible: tables ``[B|1, blocks of T, blocks of S]``.
        by_key: column by column instead of row by row.

    A row (or column) without blocks gets one entry that computes nothing, because its result has to be written. If the
    number of blocks is known only at run time, there is an entry for every block, and those past the end do nothing.
    """
    xp = namespace(any_visible, all_visible)
    if by_key:
        any_visible, all_visible = any_visible.swapaxes(1, 2), all_visible.swapaxes(1, 2)
    sequences, rows, columns = any_visible.shape
    kind = xp.where(all_visible, 2, xp.where(any_visible, 1, 0)).reshape(sequences, -1)
    listed = any_visible | (~any_visible.any(2, keepdims=True) & (np.arange(columns) == 0)[None, None])
    listed = listed.reshape(sequences, -1)
    counts = listed.sum(1)
    entries = int(counts.max()) if xp is np else rows * columns
    order = xp.argsort(~listed, axis=1, stable=True)[:, :entries]
    real = np.arange(entries)[None] < counts[:, None]
    # Past the end, the last block again: nothing new is read.
    order = xp.where(real, order, xp.take_along_axis(order, counts[:, None] - 1, 1))
    row, kind = order // columns, xp.where(real, xp.take_along_axis(kind, order, 1), 0)
    ends = xp.ones((sequences, 1), bool)
    changes = row[:, 1:] != row[:, :-1]
    first = real & xp.concatenate([ends, changes], 1)
    last = real & xp.concatenate([changes | ~real[:, 1:], ends], 1)
    with mod_semantics():
        packed = row | order % columns << _BITS | kind << 2 * _BITS | first * 2 ** (_LAST - 1) | last * 2**_LAST
    return packed.astype(np.int32)


def split_entry(entry: Any, by_key: bool) -> tuple:
    """``(i, j, partial, full, first, last)``: the block, what it is, and whether it is the first or last of its row."""
    row, column = entry & (MOST - 1), (entry >> _BITS) & (MOST - 1)
    flags = ((entry >> shift) & 1 == 1 for shift in (2 * _BITS, 2 * _BITS + 1, _LAST - 1, _LAST))
    return *((column, row) if by_key else (row, column)), *flags


class Operands:
    """The arrays that a kernel reads, each with a kind that says which of its blocks belongs to a block of pairs.

    - ``"queries" [B|1,N|1,X,T]``, ``"keys" [B|1,K,S,X]``, ``"key row" [B|1,N|1,1,S]``, ``"pairs" [B|1,N|1,T,S]``.
    - ``"scalars" [B|1,N|1]``: the whole array, in scalar memory. ``"whole" [B,N,...]``, of results: a head's.
    """

    def __init__(self, size: tuple[int, int], group: int):
        self.size, self.group = size, group  # queries and keys of a block; query heads per key head
        self.arrays: list[tuple[str, jax.Array]] = []

    def add(self, kind: str, array: jax.Array) -> int:
        """The number of the array."""
        self.arrays.append((kind, array))
        return len(self.arrays) - 1

    def block(self, kind: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
        """The shape of a block."""
        (rows, columns), known = self.size, shape[2:]
        if kind == "whole":
            return (1, 1, *known)
        sizes = {"queries": (*known[:1], rows), "keys": (columns, *known[1:]), "key row": (1, columns)}
        return None if kind == "scalars" else (1, 1, *sizes.get(kind, (rows, columns)))

    def index(self, kind: str, shape: tuple[int, ...], b: Any, n: Any, i: Any, j: Any) -> tuple:
        """The index of the block that belongs to block ``(i, j)`` of head n of sequence b."""
        head = jax.lax.div(n, jnp.int32(self.group)) if kind == "keys" else n  # not //: nothing here is negative
        lead = 0 if shape[0] == 1 else b, 0 if shape[1] == 1 else head
        if kind == "whole":
            return *lead, *(0,) * len(shape[2:])
        return *lead, *{"queries": (0, i), "keys": (j, 0), "key row": (0, j)}.get(kind, (i, j))

    def scalar(self, ins: Any, number: int, b: Any, n: Any) -> Any:
        """The scalar of head n of sequence b."""
        shape = self.arrays[number][1].shape
        return ins[number][0 if shape[0] == 1 else b, 0 if shape[1] == 1 else n]


@dataclasses.dataclass
class _Mod:
    """A mask or score function and the numbers of the arrays that it reads."""

    separated: Separated
    numbers: list[int]
    dtypes: list[Any]


@dataclasses.dataclass
class Scores:
    """The scores of a request, tile by tile, from the blocks of its arrays."""

    request: Request
    operands: Operands
    query: int
    key: int
    scale: int
    bias: tuple[str, int] | None
    masks: list[_Mod]
    score_mod: _Mod | None
    slot_masks: list[tuple[str, int]]
    positions: tuple[int | None, int | None]
    all_seen: bool

    @classmethod
    def of(cls, request: Request, operands: Operands, q: jax.Array, k: jax.Array, all_seen: bool) -> "Scores":
        """Adds what the scores need to ``operands``; ``q [B,N,H,T]`` and ``k [B,K,S,H]`` are padded to whole blocks."""
        lengths = q.shape[3], k.shape[2]
        positions = [
            None
            if x is None
            else operands.add(kind, _padded(jnp.asarray(x)[:, None, None], (None, None, None, length)))
            for x, kind, length in zip(
                (request.query_positions, request.kv_positions), ("queries", "key row"), lengths, strict=True
            )
        ]
        mods = [_add_mod(request, operands, mask, None, lengths) for mask in request.masks]
        return cls(
            request=request,
            operands=operands,
            query=operands.add("queries", q),
            key=operands.add("keys", k),
            scale=operands.add("scalars", jnp.asarray(request.scale, jnp.float32).reshape(1, 1)),
            bias=None if request.bias is None else _add_pairs(operands, request.bias.astype(jnp.float32), lengths),
            masks=mods,
            score_mod=request.score_mod and _add_mod(request, operands, request.score_mod, jnp.float32, lengths),
            slot_masks=[_add_pairs(operands, jnp.asarray(x).astype(jnp.int32), lengths) for x in request.slot_masks],
            positions=(positions[0], positions[1]),
            all_seen=all_seen,
        )

    def tiles(self, ins: Any, block: tuple, head: tuple, queries: Any, masked: bool) -> Iterator["Tile"]:
        """The tiles of a block that hold 128 of its queries, a ``pl.ds``."""
        for start in range(0, self.operands.size[1], TILE):
            yield Tile(self, ins, block, head, queries, slice(start, start + TILE), masked)

    def at_once(self, masked: bool, often: bool) -> int:
        """How many times 128 queries of a block to compute in the body of a loop over them.

        Compiling takes as long as the code is. But at the end of the body the matrix unit runs empty, which costs a few
        percent of a body of 256 queries if a tile takes long, or of a kernel if it is not ``often`` run. Full blocks
        get more: 512 with a score function, else all, as do masked ones of quick masks.
        """
        whole = self.operands.size[0] // TILE
        steps = sum(len(mod.separated.steps) for mod in self.masks if masked)
        quick = self.score_mod is None and steps <= 4  # Causal takes 2, Segments 30, ``%`` 10
        if quick and (often or (whole <= 4 and not masked)):
            return whole
        return 2 if masked or self.score_mod is None else 4

    def scale_of(self, ins: Any) -> Any:
        """The factor on ``q·k``."""
        return self.operands.scalar(ins, self.scale, 0, 0)

    def product(self, x: jax.Array, y: jax.Array, over_x: int, over_y: int) -> jax.Array:
        """The product over one axis of each, of operands in the inputs' dtype, accumulated in float32."""
        dtype = self.request.query.dtype
        return jax.lax.dot_general(
            x.astype(dtype), y.astype(dtype), (((over_x,), (over_y,)), ((), ())),
            precision=self.request.precision, preferred_element_type=jnp.float32,
        )  # fmt: skip


class Tile:
    """The pairs of 128 keys and 128 queries of one block: ``[keys, queries]``."""

    def __init__(self, scores: Scores, ins: Any, block: tuple, head: tuple, queries: Any, keys: slice, masked: bool):
        self.source, self.ins, self.block, self.head = scores, ins, block, head
        self.queries, self.keys = queries, keys
        self.visible = self._visible() if masked else None

    @property
    def q(self) -> jax.Array:
        """The queries ``[H, queries]``; 0 where they see none of the tile's keys, because those may hold NaN."""
        q = self.ins[self.source.query][0, 0, :, self.queries]
        return q if not self.guarded else _where(_any(self.visible, 0), q)

    @property
    def k(self) -> jax.Array:
        """The keys ``[keys, H]``; 0 where none of the tile's queries sees them."""
        return self.of_keys(self.ins[self.source.key])

    @property
    def guarded(self) -> bool:
        """Whether the tile may hold keys that nobody sees."""
        return self.visible is not None and not self.source.all_seen

    def of_keys(self, ref: Any) -> jax.Array:
        """Keys or values ``[keys, X]``; 0 where none of the tile's queries sees them."""
        x = ref[0, 0, self.keys, :]
        return x if not self.guarded else _where(_any(self.visible, 1), x)

    def scores(self) -> jax.Array:
        """The scores ``[keys, queries]``, -inf where masked."""
        s = self._biased()
        if self.source.score_mod is not None:
            s = self._modified(s)
        return s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)

    def through_score_mod(self, d_score: jax.Array) -> jax.Array:
        """The derivative with respect to ``scale * q·k + bias``, from that with respect to the score."""
        if self.source.score_mod is None:
            return d_score
        return jax.jvp(self._modified, (self._biased(),), (d_score,))[1]  # elementwise, so its own transpose

    def _biased(self) -> jax.Array:
        source = self.source
        s = source.product(self.k, self.q, 1, 0) * source.scale_of(self.ins)
        return s if source.bias is None else s + self._pairs(*source.bias)

    def _modified(self, s: jax.Array) -> jax.Array:
        assert self.source.score_mod is not None
        if self.visible is not None:
            s = jnp.where(self.visible, s, 1.0)  # stand-in: keeps an infinite derivative out
        return jnp.broadcast_to(self._evaluate(self.source.score_mod, s), s.shape).astype(s.dtype)

    def _visible(self) -> jax.Array:
        visible = None
        lengths = self.source.request.query.shape[1], self.source.request.key.shape[1]
        for slots, length, size in zip(self._slots(), lengths, self.source.operands.size, strict=True):
            if length % size:
                visible = _and(visible, slots < length)
        for mask in self.source.masks:
            visible = _and(visible, self._evaluate(mask, None))
        for kind, number in self.source.slot_masks:
            visible = _and(visible, self._pairs(kind, number) != 0)
        return jnp.ones((TILE, TILE), bool) if visible is None else visible

    def _slots(self) -> tuple[jax.Array, jax.Array]:
        """The slots of the queries ``[1, queries]`` and of the keys ``[keys, queries]``."""
        (i, j), (rows, columns) = self.block, self.source.operands.size
        q = i * rows + self.queries.start + jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
        return q, j * columns + self.keys.start + jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0)

    def _evaluate(self, mod: _Mod, score: Any) -> Any:
        q, kv = self.source.positions
        q_slots, kv_slots = self._slots()
        arrays = [
            self._read(over, number).astype(dtype)
            for over, number, dtype in zip(mod.separated.outside.values(), mod.numbers, mod.dtypes, strict=True)
        ]
        q_idx = q_slots if q is None else self._read(QUERY, q)
        return mod.separated.on_tile(score, q_idx, kv_slots if kv is None else self._read("key", kv), arrays)

    def _read(self, over: str, number: int) -> Any:
        if over == HEAD:
            return self.source.operands.scalar(self.ins, number, *self.head)
        return (
            self.ins[number][0, 0, :, self.queries] if over == QUERY else _column(self.ins[number][0, 0, :, self.keys])
        )

    def _pairs(self, kind: str, number: int) -> jax.Array:
        ref = self.ins[number]
        if kind == "queries":
            return ref[0, 0, :, self.queries]
        return _column(ref[0, 0, :, self.keys]) if kind == "key row" else ref[0, 0, self.queries, self.keys].T


def _add_mod(request: Request, operands: Operands, mod: Any, score_dtype: Any, lengths: tuple[int, int]) -> _Mod:
    (B, T, N, _), S = request.query.shape, request.key.shape[1]
    batch, heads = request.first_batch + jnp.arange(B), request.first_head + jnp.arange(N)
    positions = [
        arange(length, np.int32)[None] if own is None else own
        for own, length in ((request.query_positions, T), (request.kv_positions, S))
    ]
    separated = separate(mod, score_dtype)
    arrays, numbers = separated.arrays(batch, heads, *positions), []
    for array, over in zip(arrays, separated.outside.values(), strict=True):
        # Scalar memory and registers hold 32 bits.
        wide = array.astype(jnp.float32 if jnp.issubdtype(array.dtype, jnp.floating) else jnp.int32)
        if over == HEAD:
            numbers.append(operands.add("scalars", wide))
        else:
            kind, length = ("queries", lengths[0]) if over == QUERY else ("key row", lengths[1])
            numbers.append(operands.add(kind, _padded(wide[:, :, None], (None, None, None, length))))
    return _Mod(separated, numbers, [array.dtype for array in arrays])


def _add_pairs(operands: Operands, array: jax.Array, lengths: tuple[int, int]) -> tuple[str, int]:
    """Adds an array ``[B|1,N|1,T|1,S|1]``; its kind and number."""
    T, S = lengths
    if array.shape[3] == 1:
        kind, array = "queries", jnp.swapaxes(array, 2, 3)
        array = jnp.broadcast_to(array, (*array.shape[:3], T)) if array.shape[3] == 1 else array
        array = _padded(array, (None, None, None, T))
    elif array.shape[2] == 1:
        kind, array = "key row", _padded(array, (None, None, None, S))
    else:
        kind, array = "pairs", _padded(array, (None, None, T, S))
    return kind, operands.add(kind, array)


def _padded(array: jax.Array, sizes: Sequence[int | None]) -> jax.Array:
    return pad_end(array, [old if new is None else new for old, new in zip(array.shape, sizes, strict=True)])


def _column(row: jax.Array) -> jax.Array:
    """``[1, keys]`` as ``[keys, queries]``, each row of which holds one value."""
    return jnp.broadcast_to(row, (TILE, TILE)).T


def _and(x: Any, y: Any) -> jax.Array:
    y = spread(y, (TILE, TILE))
    return y if x is None else x & y


def _any(visible: Any, axis: int) -> jax.Array:
    return jnp.max(visible.astype(jnp.float32), axis=axis, keepdims=True) > 0.0


def _where(condition: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(condition, x.astype(jnp.float32), 0.0).astype(x.dtype)  # registers of one width
