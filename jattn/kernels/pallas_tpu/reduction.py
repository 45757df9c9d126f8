"""The reduction of ``"pallas_tpu"``: sums over the weights of each head, for ``jattn.heads.statistics``, in one kernel.

The log-sum-exp is known, so a block's weights are final when they are computed, and nothing is rescaled. Sums of
queries are added up along the keys of a tile. Sums of keys and of offsets are added up tile upon tile, elementwise, and
reduced once a block: those of keys across the lanes, those of offsets along the diagonals.
"""

import dataclasses
import functools
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jattn.kernels import Reduction
from jattn.kernels.pallas_tiles import Ref
from jattn.kernels.pallas_tpu.pipeline import Steps, TPUPlan, call
from jattn.kernels.pallas_tpu.schedule import TILE
from jattn.kernels.pallas_tpu.tile import Scores, Tile
from jattn.mods.arrays import pad_end


def reduce_blocks(plan: TPUPlan, reduction: Reduction) -> dict[str, jax.Array]:
    """The sums ``{name: [B,N,...]}`` of a call."""
    (B, T, N, _), S = plan.args.query.shape, plan.args.key.shape[1]
    steps = _ReductionSteps.of(plan, reduction)
    (_, C), (all_rows, all_columns), (keys, offsets) = steps.tiles, steps.all_tiles, steps.heights
    float32 = functools.partial(plan.type_of, dtype=jnp.float32)
    # A head's sums by key and by offset, as rows of 128; no array of a kernel is empty.
    by_key = keys, all_columns if steps.keys else 1, TILE
    by_offset = offsets, all_rows + all_columns if steps.offsets else 1, TILE
    types = [("queries", float32((B, N, max(steps.height, 1), plan.padded[0])))]
    types += [("whole", float32((B, N, *shape))) for shape in (by_key, by_offset)]
    scratch = [
        ((max(steps.height, 1), plan.size[0]), jnp.float32),
        ((max(len(steps.columns), 1), C, TILE, TILE), jnp.int32),
        ((keys, C, TILE, TILE), jnp.float32),
        (by_key, jnp.float32),
        ((offsets, sum(steps.tiles) - 1, TILE, TILE), jnp.float32),
        (by_offset, jnp.float32),
    ]
    program = Steps(steps.start, steps.add, steps.finish, steps.before, steps.after, at_once=1)
    sums, key_sums, offset_sums = call(plan, steps.scores, "fold", types, scratch, program)
    results = {name: sums[:, :, n, :T] for n, name in enumerate(steps.by_query)}
    results |= {name: key_sums[:, :, n].reshape(B, N, -1)[..., :S] for n, name in enumerate(steps.keys)}
    for n, name in enumerate(steps.offsets):  # the kernel sorts them by query - key, from -S on
        line, end = offset_sums[:, :, n].reshape(B, N, -1), all_columns * TILE + T
        results[name] = jnp.flip(line[..., end - (T + S - 1) : end], -1)
    if reduction.count_visible:
        results["visible"] = sums[:, :, steps.height - 1, :T].astype(jnp.int32)
    return results


@dataclasses.dataclass
class _ReductionSteps:
    """The kernel's steps. Its scratch, in this order:

    ``sums [height, queries]``; ``data``: the columns' data as tiles; ``by_key``, ``by_offset``: a block's values, the
    tiles upon each other; ``of_keys`` and ``of_offsets``, which come after each: the sums of the head so far.
    """

    plan: TPUPlan
    reduction: Reduction
    scores: Scores
    lse: int
    rows: dict[str, tuple[int, bool]]  # the number of the array, and whether it is bool
    columns: dict[str, tuple[int, bool]]

    @classmethod
    def of(cls, plan: TPUPlan, reduction: Reduction) -> "_ReductionSteps":
        """With their arrays among the plan's operands."""
        scores, add = plan.scores(), plan.operands.add
        lse = jnp.where(reduction.lse == -jnp.inf, 0.0, reduction.lse)[..., None]
        number = plan.add_queries(lse, jnp.float32)
        by_kind = zip(("queries", "key row"), (reduction.rows, reduction.columns), plan.padded, strict=True)
        rows, columns = (
            {name: (add(kind, _whole(x, length)), x.dtype == bool) for name, x in data.items()}
            for kind, data, length in by_kind
        )
        return cls(plan, reduction, scores, number, rows, columns)

    def __post_init__(self):
        self.tiles, self.all_tiles = (tuple(x // TILE for x in pair) for pair in (self.plan.size, self.plan.padded))
        self.largest, self.keys, self.offsets = (
            self.reduction.named(kind) for kind in ("row_max", "column_sum", "diagonal_sum")
        )
        self.by_query = self.reduction.named("row_sum", "row_max")
        self.height = len(self.by_query) + self.reduction.count_visible
        self.heights = max(len(self.keys), 1), max(len(self.offsets), 1)

    def start(self, block: tuple, *kept: Ref) -> None:
        """Clears the sums of a block of queries, and before the first one those of the head."""
        sums, _, _, of_keys, _, of_offsets = kept
        sums[...] = jnp.zeros_like(sums)
        for name in self.largest:
            sums[pl.ds(self.by_query.index(name), 1)] = jnp.full((1, sums.shape[1]), -jnp.inf, sums.dtype)

        @pl.when(block[0] == 0)
        def _() -> None:
            of_keys[...], of_offsets[...] = jnp.zeros_like(of_keys), jnp.zeros_like(of_offsets)

    def before(self, ins: Sequence[Ref], *kept: Ref) -> None:
        """Clears what belongs to one block, and reads its columns' data."""
        _, data, by_key, _, by_offset, _ = kept
        by_key[...], by_offset[...] = jnp.zeros_like(by_key), jnp.zeros_like(by_offset)
        for n, (number, _) in enumerate(self.columns.values()):  # once a block, because it is a transpose
            for column in range(self.tiles[1]):
                row = ins[number][0, 0, :, column * TILE : (column + 1) * TILE]
                data[n, column] = jnp.broadcast_to(row, (TILE, TILE)).T

    def add(self, tiles: Iterable[Tile], ins: Sequence[Ref], *kept: Ref) -> None:
        """Adds the values of tiles."""
        sums, data, by_key, _, by_offset, _ = kept
        for tile in tiles:
            at = tile.keys.start // TILE
            row = {name: _typed(ins[n][0, 0, :, tile.queries], is_bool) for name, (n, is_bool) in self.rows.items()}
            own = enumerate(self.columns.items())
            column = {name: _typed(data[n, at], is_bool) for n, (name, (_, is_bool)) in own}
            scored = tile.scores()
            logs = scored - ins[self.lse][0, 0, :, tile.queries]
            logs = jnp.where(scored == -jnp.inf, scored, logs)  # 0, also where the lse is NaN
            found = self.reduction.values(logs, row, column)
            for n, name in enumerate(self.by_query):
                here, x = (pl.ds(n, 1), tile.queries), found[name]
                if name in self.largest:
                    sums[here] = jnp.maximum(sums[here], jnp.max(x, axis=0, keepdims=True))
                else:
                    sums[here] += jnp.sum(x, axis=0, keepdims=True)
            if self.reduction.count_visible:
                visible = jnp.ones((TILE, TILE), bool) if tile.visible is None else tile.visible
                seen = jnp.sum(visible.astype(jnp.float32), axis=0, keepdims=True)
                sums[pl.ds(self.height - 1, 1), tile.queries] += seen
            for n, name in enumerate(self.keys):
                by_key[n, at] += found[name]
            diagonal = jax.lax.div(tile.queries.start, jnp.int32(TILE)) - at + self.tiles[1] - 1
            for n, name in enumerate(self.offsets):
                by_offset[n, diagonal] += found[name]

    def after(self, block: tuple, guarded: bool, ins: Sequence[Ref], *kept: Ref) -> None:
        """Reduces the block's values by key and by offset."""
        _, _, by_key, of_keys, by_offset, of_offsets = kept
        (i, j), (R, C) = block, self.tiles
        for n in range(len(self.keys)):
            for column in range(C):
                of_keys[n, pl.ds(j * C + column, 1)] += jnp.sum(by_key[n, column].T, axis=0, keepdims=True)
        for n in range(len(self.offsets)):
            for diagonal in range(R + C - 1):
                sums = _diagonal_sums(by_offset[n, diagonal])
                first = i * R + diagonal + self.all_tiles[1] - (j + 1) * C
                of_offsets[n, pl.ds(first, 1)] += sums[:, :TILE]
                of_offsets[n, pl.ds(first + 1, 1)] += sums[:, TILE:]

    def finish(self, ins: Sequence[Ref], *kept: Ref) -> Sequence[jax.Array]:
        """The sums of a block of queries, and the head's so far."""
        sums, _, _, of_keys, _, of_offsets = kept
        return sums[...], of_keys[...], of_offsets[...]


def _whole(data: jax.Array, length: int) -> jax.Array:
    """``[B|1,X] -> [B|1,1,1,length]``, in 32 bits."""
    return pad_end(data.astype(jnp.int32)[:, None, None], (data.shape[0], 1, 1, length))


def _typed(data: jax.Array, is_bool: bool) -> jax.Array:
    return data != 0 if is_bool else data


def _diagonal_sums(x: jax.Array) -> jax.Array:
    """``[keys, queries] -> [1, 2 * 128]``: at ``128 + query - key`` the sum of a diagonal.

    Each row has to move left by its number. The lower half of the rows moves by half their number and is added to the
    upper, again and again.
    """
    x = jnp.concatenate([jnp.zeros_like(x), x], axis=1)
    rows, lanes = x.shape

    def left(x: jax.Array, by: int) -> jax.Array:
        return pltpu.roll(x, jnp.int32(lanes - by), axis=1)  # an int would be of 64 bits in x64

    while rows > 8:
        rows //= 2
        x = x[:rows] + left(x[rows:], rows)
    row = jax.lax.broadcasted_iota(jnp.int32, x.shape, 0)
    for by in (4, 2, 1):  # within a register, rows are not sliced
        x = jnp.where((row & by) != 0, left(x, by), x)
    return jnp.sum(x, axis=0, keepdims=True)
