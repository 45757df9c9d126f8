"""The fold of ``"pallas_tpu"``: sums over the weights of each head, for ``jattn.heads.statistics``, in one kernel.

The log-sum-exp is known, so a block's weights are final when they are computed, and nothing is rescaled. Sums of
queries are added up along the keys of a tile. Sums of keys and of offsets are added up tile upon tile, elementwise, and
reduced once a block: those of keys across the lanes, those of offsets along the diagonals.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jattn.kernels import Fold
from jattn.kernels.tpu_program import Plan, Steps, call
from jattn.kernels.tpu_tiles import TILE
from jattn.tables import pad_end

LONGEST = 2**18  # T + S of sums by key and by offset, which stay in vector memory


def fold_blocks(plan: Plan, fold: Fold) -> dict[str, jax.Array]:
    """``jattn.kernels.FoldsWeights.fold``."""
    # Imported when a kernel is traced: it takes as long as half of jattn.
    from jax.experimental import pallas as pl

    (B, T, N, _), S = plan.request.query.shape, plan.request.key.shape[1]
    (R, C), (all_rows, all_columns) = (tuple(x // TILE for x in pair) for pair in (plan.size, plan.padded))
    scores, add = plan.scores(), plan.operands.add
    row_lse = add("queries", plan.queries(jnp.where(fold.lse == -jnp.inf, 0.0, fold.lse)[..., None], jnp.float32))
    of_row, of_column = (
        {name: (add(kind, _whole(x, length * TILE)), x.dtype == bool) for name, x in data.items()}
        for kind, data, length in (("queries", fold.rows, all_rows), ("key row", fold.columns, all_columns))
    )
    largest, by_query = fold.named("largest"), fold.named("queries", "largest")
    by_key_names, by_offset_names = fold.named("keys"), fold.named("offsets")
    height = len(by_query) + fold.count_visible

    def start(block: tuple, sums: Any, data: Any, by_key: Any, of_keys: Any, by_offset: Any, of_offsets: Any) -> None:
        sums[...] = jnp.zeros_like(sums)
        for name in largest:
            sums[pl.ds(by_query.index(name), 1)] = jnp.full((1, sums.shape[1]), -jnp.inf, sums.dtype)

        @pl.when(block[0] == 0)
        def _() -> None:
            of_keys[...], of_offsets[...] = jnp.zeros_like(of_keys), jnp.zeros_like(of_offsets)

    def before(ins: Any, sums: Any, data: Any, by_key: Any, of_keys: Any, by_offset: Any, of_offsets: Any) -> None:
        by_key[...], by_offset[...] = jnp.zeros_like(by_key), jnp.zeros_like(by_offset)
        for n, (number, _) in enumerate(of_column.values()):  # once a block, because it is a transpose
            for column in range(C):
                row = ins[number][0, 0, :, column * TILE : (column + 1) * TILE]
                data[n, column] = jnp.broadcast_to(row, (TILE, TILE)).T

    def add_tiles(tiles: Any, ins: Any, *kept: Any) -> None:
        sums, data, by_key, _, by_offset, _ = kept
        for tile in tiles:
            at = tile.keys.start // TILE
            row = {name: _typed(ins[n][0, 0, :, tile.queries], is_bool) for name, (n, is_bool) in of_row.items()}
            own = enumerate(of_column.items())
            column = {name: _typed(data[n, at], is_bool) for n, (name, (_, is_bool)) in own}
            scored = tile.scores()
            logs = scored - ins[row_lse][0, 0, :, tile.queries]
            logs = jnp.where(scored == -jnp.inf, scored, logs)  # 0, also where the lse is NaN
            found = fold.values(logs, row, column)
            for n, name in enumerate(by_query):
                here, x = (pl.ds(n, 1), tile.queries), found[name]
                if name in largest:
                    sums[here] = jnp.maximum(sums[here], jnp.max(x, axis=0, keepdims=True))
                else:
                    sums[here] += jnp.sum(x, axis=0, keepdims=True)
            if fold.count_visible:
                seen = (
                    TILE if tile.visible is None else jnp.sum(tile.visible.astype(jnp.float32), axis=0, keepdims=True)
                )
                sums[pl.ds(height - 1, 1), tile.queries] += seen
            for n, name in enumerate(by_key_names):
                by_key[n, at] += found[name]
            for n, name in enumerate(by_offset_names):
                by_offset[n, jax.lax.div(tile.queries.start, jnp.int32(TILE)) - at + C - 1] += found[name]

    def after(block: tuple, masked: bool, ins: Any, *kept: Any) -> None:
        _, _, by_key, of_keys, by_offset, of_offsets = kept
        i, j = block
        for n in range(len(by_key_names)):
            for column in range(C):
                of_keys[n, pl.ds(j * C + column, 1)] += jnp.sum(by_key[n, column].T, axis=0, keepdims=True)
        for n in range(len(by_offset_names)):
            for diagonal in range(R + C - 1):
                sums = _diagonal_sums(by_offset[n, diagonal])
                first = i * R + diagonal + all_columns - (j + 1) * C
                of_offsets[n, pl.ds(first, 1)] += sums[:, :TILE]
                of_offsets[n, pl.ds(first + 1, 1)] += sums[:, TILE:]

    def finish(ins: Any, out: Any, out_keys: Any, out_offsets: Any, *kept: Any) -> None:
        sums, _, _, of_keys, _, of_offsets = kept
        out[0, 0], out_keys[0, 0], out_offsets[0, 0] = sums[...], of_keys[...], of_offsets[...]

    keys, offsets = (max(len(names), 1) for names in (by_key_names, by_offset_names))  # no array is empty
    whole = [(keys, all_columns if by_key_names else 1), (offsets, all_rows + all_columns if by_offset_names else 1)]
    types = [("queries", plan.type_of((B, N, max(height, 1), plan.padded[0]), jnp.float32))]
    types += [("whole", plan.type_of((B, N, *shape, TILE), jnp.float32)) for shape in whole]
    scratch = [
        ((max(height, 1), plan.size[0]), jnp.float32),
        ((max(len(of_column), 1), C, TILE, TILE), jnp.int32),
        ((keys, C, TILE, TILE), jnp.float32),
        ((*whole[0], TILE), jnp.float32),
        ((offsets, R + C - 1, TILE, TILE), jnp.float32),
        ((*whole[1], TILE), jnp.float32),
    ]
    steps = Steps(start, add_tiles, finish, before, after, at_once=1)
    by_query_sums, key_sums, offset_sums = call(plan, scores, "fold", types, scratch, steps)
    results = {name: by_query_sums[:, :, n, :T] for n, name in enumerate(by_query)}
    results |= {name: key_sums[:, :, n].reshape(B, N, -1)[..., :S] for n, name in enumerate(by_key_names)}
    for n, name in enumerate(by_offset_names):  # the kernel sorts them by query - key, from -S on
        line, end = offset_sums[:, :, n].reshape(B, N, -1), all_columns * TILE + T
        results[name] = jnp.flip(line[..., end - (T + S - 1) : end], -1)
    return results | ({"visible": by_query_sums[:, :, height - 1, :T].astype(jnp.int32)} if fold.count_visible else {})


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
    from jax.experimental.pallas import tpu as pltpu

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
