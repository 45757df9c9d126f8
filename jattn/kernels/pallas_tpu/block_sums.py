"""The reduction of ``"pallas_tpu"``: sums over the weights of each head, for ``jattn.heads.statistics``, in one kernel.

The log-sum-exp is known, so a block's weights are final when computed, and nothing is rescaled. Sums by query are added
up along the keys of a tile. Sums by key and by offset are added up tile by tile, elementwise, and reduced once per
block: sums by key across the lanes, and sums by offset along the diagonals.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jattn._blocks.reduction import Reduction, count_pairs, lowest_score
from jattn._mods.arrays import pad_end
from jattn.kernels.pallas_tiles import Ref
from jattn.kernels.pallas_tpu.pipeline import Steps, TPUPlan, call_kernel
from jattn.kernels.pallas_tpu.schedule import TILE
from jattn.kernels.pallas_tpu.tile import Scores, Tile

FEW = 4  # statistics; up to this number, the loop over a block's queries is unrolled: compile time grows with the code


def reduce_blocks(plan: TPUPlan, reduction: Reduction) -> dict[str, jax.Array]:
    """The sums ``{name: [B,N,...]}`` of a call."""
    (B, T, N, _), S = plan.call.query.shape, plan.call.key.shape[1]
    steps = _ReductionSteps.of(plan, reduction)
    float32 = functools.partial(plan.type_of, dtype=jnp.float32)
    types = [("queries", float32((B, N, steps.height, plan.operands.padded[0])))]
    types += [("whole", float32((B, N, *steps.scratch[name][0]))) for name in steps.whole]
    at_once = 0 if len(reduction.kinds) <= FEW else 1
    program = Steps(steps.start, steps.add, steps.finish, steps.before, steps.after, at_once)
    sums, *whole = call_kernel(plan, steps.scores, "fold", types, list(steps.scratch.values()), program)
    by_name = dict(zip(steps.whole, whole, strict=True))
    results = {name: sums[:, :, n, :T] for n, name in enumerate(steps.by_query)}
    results |= {name: by_name["of_keys"][:, :, n].reshape(B, N, -1)[..., :S] for n, name in enumerate(steps.keys)}
    for n, name in enumerate(steps.offsets):  # the kernel sorts them by query - key, starting from -S
        line, end = by_name["of_offsets"][:, :, n].reshape(B, N, -1), plan.operands.padded[1] + T
        results[name] = jnp.flip(line[..., end - (T + S - 1) : end], -1)
    if "visible" in reduction.counts:
        results["visible"] = sums[:, :, steps.height - 1, :T]
    others = [name for name in reduction.counts if name != "visible"]
    return results | count_pairs(plan.call, reduction, others, None)


@dataclasses.dataclass
class _ReductionSteps:
    """The kernel's steps."""

    plan: TPUPlan
    reduction: Reduction
    scores: Scores
    lse: int
    rows: dict[str, tuple[int, bool]]  # the number of the array, and whether it is bool
    columns: dict[str, tuple[int, bool]]

    @classmethod
    def of(cls, plan: TPUPlan, reduction: Reduction) -> "_ReductionSteps":
        """The values, with their arrays added to the plan's operands."""
        scores, add = plan.scores(), plan.operands.add
        lse = jnp.where(reduction.lse == -jnp.inf, 0.0, reduction.lse)[..., None]
        number = plan.add_queries(lse, jnp.float32)
        by_kind = zip(("queries", "key row"), _data_read(reduction), plan.operands.padded, strict=True)
        rows, columns = (
            {name: (add(kind, _whole(x, length)), x.dtype == bool) for name, x in data.items()}
            for kind, data, length in by_kind
        )
        return cls(plan, reduction, scores, number, rows, columns)

    def __post_init__(self):
        pairs = self.plan.size, self.plan.operands.padded
        self.tiles, self.all_tiles = (tuple(x // TILE for x in pair) for pair in pairs)
        self.largest, self.keys, self.offsets = map(self.reduction.named, ("row_max", "column_sum", "diagonal_sum"))
        self.by_query = self.reduction.named("row_sum", "row_max")
        # A kernel's arrays cannot be empty.
        self.counts = ["visible"] if "visible" in self.reduction.counts else []
        self.height = max(len(self.by_query) + len(self.counts), 1)
        self.scratch = self._scratch()
        self.whole = [name for name in ("of_keys", "of_offsets") if name in self.scratch]

    def _scratch(self) -> dict[str, tuple[tuple[int, ...], DTypeLike]]:
        """The kernel's scratch for the requested sums.

        ``sums [height, queries]``; ``data``: the columns' data as tiles; ``by_key``, ``by_offset``: a block's values,
        with tiles added up; ``of_keys`` and ``of_offsets``: the head's sums so far, as rows of 128.
        """
        (R, C), (all_rows, all_columns) = self.tiles, self.all_tiles
        keys, offsets = len(self.keys), len(self.offsets)
        scratch: dict[str, tuple[tuple[int, ...], DTypeLike]] = {
            "sums": ((self.height, self.plan.size[0]), jnp.float32),
            "data": ((len(self.columns), C, TILE, TILE), jnp.int32),
            "by_key": ((keys, C, TILE, TILE), jnp.float32),
            "of_keys": ((keys, all_columns, TILE), jnp.float32),
            "by_offset": ((offsets, R + C - 1, TILE, TILE), jnp.float32),
            "of_offsets": ((offsets, all_rows + all_columns, TILE), jnp.float32),
        }
        return {name: (shape, dtype) for name, (shape, dtype) in scratch.items() if shape[0]}

    def _named(self, kept: Sequence[Ref]) -> dict[str, Ref]:
        return dict(zip(self.scratch, kept, strict=True))

    def start(self, block: tuple, *kept: Ref) -> None:
        """Clears the sums of a block of queries and, before the first block, the sums of the head."""
        refs = self._named(kept)
        _clear(refs["sums"])
        for name in self.largest:
            refs["sums"][pl.ds(self.by_query.index(name), 1)] = jnp.full((1, self.plan.size[0]), -jnp.inf, jnp.float32)

        @pl.when(block[0] == 0)
        def _() -> None:
            for name in self.whole:
                _clear(refs[name])

    def before(self, ins: Sequence[Ref], *kept: Ref) -> None:
        """Clears the data of one block, and reads its columns' data."""
        refs = self._named(kept)
        for name in refs.keys() & {"by_key", "by_offset"}:
            _clear(refs[name])
        for n, (number, _) in enumerate(self.columns.values()):  # once per block, because it is a transpose
            for column in range(self.tiles[1]):
                row = ins[number][0, 0, :, column * TILE : (column + 1) * TILE]
                refs["data"][n, column] = jnp.broadcast_to(row, (TILE, TILE)).T

    def add(self, tiles: Iterable[Tile], ins: Sequence[Ref], *kept: Ref) -> None:
        """Adds the values of tiles with the same queries."""
        refs, totals, call, tiles = self._named(kept), {}, self.plan.call, list(tiles)
        queries = tiles[0].queries
        lowest = lowest_score(call)
        bools = {name: is_bool for name, (_, is_bool) in self.columns.items()}
        for tile in tiles:
            at = tile.keys.start // TILE
            row = {name: _typed(ins[n][0, 0, :, queries], is_bool) for name, (n, is_bool) in self.rows.items()}
            column = {name: _typed(refs["data"][n, at], bools[name]) for n, name in enumerate(bools)}
            scored = tile.scores()
            logs = scored - ins[self.lse][0, 0, :, queries]
            if tile.masked or lowest > -math.inf:  # a bias or score function may hide pairs as well
                logs = jnp.where(scored <= lowest, -jnp.inf, logs)  # even where the lse is NaN
            values = self.reduction.values(logs, row, column)
            for name in self.by_query:
                totals[name] = _joined(name in self.largest, totals.get(name), values[name])
            if self.counts and tile.visible is not None:
                totals["visible"] = _joined(False, totals.get("visible"), tile.visible.astype(jnp.float32))
            for n, name in enumerate(self.keys):
                refs["by_key"][n, at] += values[name]
            diagonal = jax.lax.div(queries.start, jnp.int32(TILE)) - at + self.tiles[1] - 1
            for n, name in enumerate(self.offsets):
                refs["by_offset"][n, diagonal] += values[name]
        for n, name in enumerate([*self.by_query, *self.counts]):
            here = pl.ds(n, 1), queries
            if name in self.largest:
                refs["sums"][here] = jnp.maximum(refs["sums"][here], jnp.max(totals[name], axis=0, keepdims=True))
            elif name in totals:
                refs["sums"][here] += jnp.sum(totals[name], axis=0, keepdims=True)
            else:  # all keys are visible
                refs["sums"][here] += jnp.float32(self.plan.size[1])

    def after(self, block: tuple, guarded: bool, ins: Sequence[Ref], *kept: Ref) -> None:
        """Reduces the block's values by key and by offset."""
        refs, (i, j), (R, C) = self._named(kept), block, self.tiles
        for n in range(len(self.keys)):
            for column in range(C):
                sums = jnp.sum(refs["by_key"][n, column].T, axis=0, keepdims=True)
                refs["of_keys"][n, pl.ds(j * C + column, 1)] += sums
        for n in range(len(self.offsets)):
            for diagonal in range(R + C - 1):
                sums = _diagonal_sums(refs["by_offset"][n, diagonal])
                first = i * R + diagonal + self.all_tiles[1] - (j + 1) * C
                refs["of_offsets"][n, pl.ds(first, 1)] += sums[:, :TILE]
                refs["of_offsets"][n, pl.ds(first + 1, 1)] += sums[:, TILE:]

    def finish(self, ins: Sequence[Ref], *kept: Ref) -> Sequence[jax.Array]:
        """The sums of a block of queries, and the head's sums so far."""
        refs = self._named(kept)
        return [refs[name][...] for name in ("sums", *self.whole)]


def _data_read(reduction: Reduction) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The query and key data on which the values depend."""
    arrays = reduction.rows, reduction.columns
    tiles = [
        {name: jax.ShapeDtypeStruct(shape, bool if x.dtype == bool else jnp.int32) for name, x in data.items()}
        for data, shape in zip(arrays, ((1, TILE), (TILE, TILE)), strict=True)
    ]
    jaxpr = jax.make_jaxpr(reduction.values)(jax.ShapeDtypeStruct((TILE, TILE), jnp.float32), *tiles).jaxpr
    read = {id(x) for equation in jaxpr.eqns for x in equation.invars} | {id(x) for x in jaxpr.outvars}
    names = [(kind, name) for kind, data in enumerate(tiles) for name in sorted(data)]  # in the order of a jaxpr
    kept = {both for both, x in zip(names, jaxpr.invars[1:], strict=True) if id(x) in read}
    rows, columns = ({name: x for name, x in data.items() if (n, name) in kept} for n, data in enumerate(arrays))
    return rows, columns


def _clear(ref: Ref) -> None:
    ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _joined(largest: bool, total: jax.Array | None, x: jax.Array) -> jax.Array:
    """Values ``[keys, queries]`` reduced to ``[8, queries]`` by sum or maximum, register by register."""
    x = jnp.broadcast_to(x, (TILE, TILE)).reshape(-1, 8, TILE)
    x = jnp.max(x, axis=0) if largest else jnp.sum(x, axis=0)
    if total is None:
        return x
    return jnp.maximum(total, x) if largest else total + x


def _whole(data: jax.Array, length: int) -> jax.Array:
    """``[B|1,X] -> [B|1,1,1,length]``, in 32 bits."""
    return pad_end(data.astype(jnp.int32)[:, None, None], (data.shape[0], 1, 1, length))


def _typed(data: jax.Array, is_bool: bool) -> jax.Array:
    return data != 0 if is_bool else data


def _diagonal_sums(x: jax.Array) -> jax.Array:
    """``[keys, queries] -> [1, 2 * 128]``: entry ``128 + query - key`` is the sum of a diagonal.

    Each row must move left by its index. Repeatedly, the lower half of the rows moves left by half the number of rows
    and is added to the upper half.
    """
    x = jnp.concatenate([jnp.zeros_like(x), x], axis=1)
    rows, lanes = x.shape

    def left(x: jax.Array, by: int) -> jax.Array:
        return pltpu.roll(x, jnp.int32(lanes - by), axis=1)  # an int would have 64 bits with x64

    while rows > 8:
        rows //= 2
        x = x[:rows] + left(x[rows:], rows)
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for by in (4, 2, 1):  # rows cannot be sliced within a register
        x = jnp.where((row & by) != 0, left(x, by), x)
    return jnp.sum(x, axis=0, keepdims=True)
