"""Shared by the kernels of ``pallas_tpu``: the arrays that they read, and the scores of a tile."""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl

from jattn._mods.arrays import pad_end
from jattn._mods.tile_function import QUERY
from jattn.kernels import pallas_tiles
from jattn.kernels.pallas_tiles import Ref
from jattn.kernels.pallas_tpu import in_place
from jattn.kernels.pallas_tpu.schedule import TILE

Index = int | Array


class Operands:
    """The arrays that a kernel reads, each with a kind that determines which of its blocks belongs to a block of pairs.

    - ``"queries" [B|1,N|1,X,T]``, ``"keys" [B|1,K,S,X]``, ``"key row" [B|1,N|1,1,S]``, ``"pairs" [B|1,N|1,T,S]``.
    - ``"queries in place" [B,T,N/2,2,X]``, ``"keys in place" [B,S,K/2,2,X]``, as in ``in_place.py``.
    - ``"scalars" [B|1,N|1]``: the whole array, in scalar memory. ``"whole" [B,N,...]``, for results: a head's array.
    """

    def __init__(self, size: tuple[int, int], padded: tuple[int, int], group: int, at_a_time: int):
        self.size, self.padded = size, padded  # queries and keys per block, and of all blocks
        self.group = group  # query heads per key head
        self.at_a_time = at_a_time  # queries of a tile
        self.arrays: list[tuple[str, Array]] = []

    def add(self, kind: str, array: Array) -> int:
        """The number of the array."""
        self.arrays.append((kind, array))
        return len(self.arrays) - 1

    def scalars(self, array: Array) -> int:
        return self.add("scalars", array)

    def vector(self, over: str, array: Array) -> int:
        kind, length = ("queries", self.padded[0]) if over == QUERY else ("key row", self.padded[1])
        return self.add(kind, pad_end(array[:, :, None], (*array.shape[:2], 1, length)))

    def pairs(self, array: Array) -> int:
        return self.add("pairs", pad_end(array, (*array.shape[:2], *self.padded)))

    def block(self, kind: str, shape: tuple[int, ...], heads: int) -> tuple[int, ...]:
        """The shape of a block with this many heads."""
        (rows, columns), known = self.size, shape[2:]
        if kind == "whole":
            return (1, heads, *known)
        if kind.endswith("in place"):
            return (1, rows if kind == "queries in place" else columns, 1, *known[1:])
        sizes = {"queries": (*known[:1], rows), "keys": (columns, *known[1:]), "key row": (1, columns)}
        return (1, heads, *sizes.get(kind, (rows, columns)))

    def head(self, kind: str, n: Array) -> Array:
        """The index, along the heads, of the block that belongs to query head n."""
        per_block = self.group if kind.startswith("keys") else 1
        per_block *= in_place.PAIR if kind.endswith("in place") else 1
        return n if per_block == 1 else jax.lax.div(n, jnp.int32(per_block))  # not //: nothing here is negative

    def index(self, kind: str, shape: tuple[int, ...], b: Array, head: Array, i: Array, j: Array) -> tuple:
        """The index of the block that belongs to block ``(i, j)`` of a sequence and a head."""
        if kind.endswith("in place"):
            return b, i if kind == "queries in place" else j, head, 0, 0
        lead = 0 if shape[0] == 1 else b, 0 if shape[1] == 1 else head
        if kind == "whole":
            return *lead, *(0,) * len(shape[2:])
        return *lead, *{"queries": (0, i), "keys": (j, 0), "key row": (0, j)}.get(kind, (i, j))

    def copy_shape(self, number: int) -> tuple[int, ...]:
        """The shape of a block read in place, as written by ``copy``: the same as for a copied array."""
        kind, array = self.arrays[number]
        (rows, columns), size = self.size, array.shape[4]
        return (1, 1, size, rows) if kind == "queries in place" else (1, 1, columns, size)

    def copy(self, number: int, source: Ref, copy: Ref, n: Array, i: Array, j: Array) -> None:
        """Copies query head n's part of a block that is read in place."""
        kind, array = self.arrays[number]
        of_queries = kind == "queries in place"
        head = n if of_queries else self.head("keys", n)
        index, size, length = (i if of_queries else j), self.size[0 if of_queries else 1], array.shape[1]
        x = in_place.read(source, head, length - index * size if length % size else None)
        copy[0, 0] = (x.T if of_queries else x).astype(copy.dtype)

    def write(self, kind: str, out: Ref, turn: Index, value: Array) -> None:
        """Writes a head's values to a block of results."""
        if kind.endswith("in place"):
            in_place.write(out, turn, value.T if kind == "queries in place" else value)
        else:
            out[0, turn] = value.astype(out.dtype)

    def scalar(self, ins: Sequence[Ref], number: int, b: Index, n: Index) -> Array:
        """The scalar of head n of sequence b."""
        shape = self.arrays[number][1].shape
        return ins[number][0 if shape[0] == 1 else b, 0 if shape[1] == 1 else n]


@dataclasses.dataclass
class Scores(pallas_tiles.Scores):
    """The scores of a call, tile by tile, from the blocks of its arrays."""

    operands: Operands
    query: int
    key: int

    def tiles(self, ins: Sequence[Ref], block: tuple, head: tuple, queries: pl.Slice, masked: bool) -> Iterator["Tile"]:
        """The tiles of a block that hold these queries, a ``pl.ds``."""
        for start in range(0, self.operands.size[1], TILE):
            yield Tile(self, ins, block, head, queries, slice(start, start + TILE), masked)

    def at_once(self, masked: bool, often: bool) -> int:
        """The number of query tiles to compute per body of a loop over a block's queries.

        Compile time grows with code size. At the end of the body, however, the matrix unit runs empty: for the
        gradients of key and value, bodies of 256 queries take 6 to 18% more bundles than one of 1024. This costs a few
        percent of a body of 256 queries if a tile takes long, or of a kernel if the body does not run ``often``. Full
        blocks get more: 512 with a score function, otherwise all, as do blocks with cheap masks.
        """
        (rows, _), each = self.operands.size, self.operands.at_a_time
        whole = rows // each
        steps = sum(len(mod.tile_function.steps) for mod in self.masks if masked)
        quick = self.score_mod is None and steps <= 4  # Causal takes 2, Segments 30, ``%`` 10
        if quick and (often or (rows <= 4 * TILE and not masked)):
            return whole
        return (2 if masked or self.score_mod is None else 4) * TILE // each

    def scale_of(self, ins: Sequence[Ref]) -> Array:
        """The factor that multiplies ``q·k``."""
        return self.operands.scalar(ins, self.scale, 0, 0)

    def product(self, x: Array, y: Array, over_x: int, over_y: int) -> Array:
        """The product over one axis of each operand, with operands in the inputs' dtype, accumulated in float32."""
        dtype = self.call.query.dtype
        return jax.lax.dot_general(
            x.astype(dtype), y.astype(dtype), (((over_x,), (over_y,)), ((), ())),
            precision=self.call.precision, preferred_element_type=jnp.float32,
        )  # fmt: skip


class Tile(pallas_tiles.Tile):
    """The pairs of 128 keys and some queries of one block: ``[keys, queries]``."""

    source: Scores

    def __init__(
        self,
        source: Scores,
        ins: Sequence[Ref],
        block: tuple,
        head: tuple,
        queries: pl.Slice,
        keys: slice,
        masked: bool,
    ):
        super().__init__(source, masked)
        self.ins, self.at, self.head = ins, block, head
        self.queries, self.keys, self.block = queries, keys, source.operands.size
        self.shape = TILE, source.operands.at_a_time

    @property
    def q(self) -> Array:
        """The queries ``[H, queries]``; 0 if they see none of the tile's keys, because such queries may hold NaN."""
        q = self.ins[self.source.query][0, 0, :, self.queries]
        return q if not self.guarded else _where(_any(self.visible, 0), q)

    @property
    def k(self) -> Array:
        """The keys ``[keys, H]``; 0 if none of the tile's queries sees them."""
        return self.of_keys(self.ins[self.source.key])

    @property
    def guarded(self) -> bool:
        """Whether the tile may hold unseen keys."""
        return self.masked and not self.source.all_seen

    def of_keys(self, ref: Ref) -> Array:
        """Keys or values ``[keys, X]``; 0 if none of the tile's queries sees them."""
        x = ref[0, 0, self.keys, :]
        return x if not self.guarded else _where(_any(self.visible, 1), x)

    def product(self) -> Array:
        return self.source.product(self.k, self.q, 1, 0)

    def slots(self) -> tuple[Array, Array]:
        """The slots of the queries ``[1, queries]`` and keys ``[keys, queries]``."""
        (i, j), (rows, columns) = self.at, self.block
        q = i * rows + self.queries.start + jax.lax.broadcasted_iota(jnp.int32, (1, self.shape[1]), 1)
        return q, j * columns + self.keys.start + jax.lax.broadcasted_iota(jnp.int32, self.shape, 0)

    def scalar(self, added: int) -> Array:
        return self.source.operands.scalar(self.ins, added, *self.head)

    def vector(self, over: str, added: int) -> Array:
        """The tile's part of an array of ``Operands.vector``: ``[1, queries]`` or ``[keys, queries]``."""
        if over == QUERY:
            return self.ins[added][0, 0, :, self.queries]
        return jnp.broadcast_to(self.ins[added][0, 0, :, self.keys], self.shape[::-1]).T  # each row holds one value

    def pairs(self, added: int) -> Array:
        return self.ins[added][0, 0, self.queries, self.keys].T


def _any(visible: Array | None, axis: int) -> Array:
    assert visible is not None  # the tile is masked
    return jnp.max(visible.astype(jnp.float32), axis=axis, keepdims=True) > 0.0


def _where(condition: Array, x: Array) -> Array:
    return jnp.where(condition, x.astype(jnp.float32), 0.0).astype(x.dtype)  # uses registers of one width
