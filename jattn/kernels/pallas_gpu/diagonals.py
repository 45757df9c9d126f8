"""The sums by offset in ``"pallas_gpu"``: each program sums the blocks along one diagonal of the scores.

These blocks all have the same offsets, from -63 to 63 around their corners' offset, so their sums stay in registers. A
block passes through shared memory: its rows are written below each other and read back, each shifted one place further
left than the previous row, which puts each diagonal into a column.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Bool

from jattn._blocks.plan import block_table
from jattn._blocks.reduction import Reduction
from jattn._mods.arrays import namespace
from jattn.kernels.pallas_gpu.pipeline import MEMORY_REGISTERS, SHARED, STAGES, TRANSFORMS, Carry, Step
from jattn.kernels.pallas_gpu.row_sums import Values
from jattn.kernels.pallas_gpu.schedule import ROWS, row_lists
from jattn.kernels.pallas_gpu.tile import GPUPlan, Tile
from jattn.kernels.pallas_tiles import Ref

SIZE = ROWS, ROWS
WIDE = 2 * ROWS  # the offsets of a block, and one unused offset


def sum_diagonals(
    make_plan: Callable[..., GPUPlan], q: jax.Array, k: jax.Array, reduction: Reduction
) -> dict[str, jax.Array]:
    """The sums ``{name: [B,N,T+S-1]}`` by offset; ``q`` and ``k`` as the kernels read them."""
    names = reduction.named("diagonal_sum")
    if not names:
        return {}
    plan = make_plan(by_key=True, shape=SIZE)  # its masks hide queries and keys past the ends
    tables = [_skewed(table.swapaxes(1, 2)) for table in block_table(plan.call, SIZE)]
    plan = dataclasses.replace(plan, lists=row_lists(*tables, by_key=False))
    kernel = _Diagonals(plan, Values(plan, reduction), names)
    seen = jnp.asarray(tables[0].any(2))[:, None, :, None]  # the list of a diagonal without blocks still has one entry
    (T, S), of_keys = (plan.call.query.shape[1], plan.call.key.shape[1]), plan.operands.padded[1]
    results = {}
    for name, x in zip(names, kernel.call(q, k), strict=True):
        x = jnp.where(seen, x, 0.0)  # [B,N,diagonals,128]: index: 64 plus the query's offset from the key, in the block
        low, high = (half.reshape(*x.shape[:2], -1) for half in (x[..., :ROWS], x[..., ROWS:]))
        sums = jnp.pad(low, ((0, 0), (0, 0), (0, ROWS))) + jnp.pad(high, ((0, 0), (0, 0), (ROWS, 0)))
        results[name] = sums[..., of_keys - S + 1 : of_keys + T][..., ::-1]
    return results


def _skewed(
    table: Bool[Array | np.ndarray, "batch keys queries"],
) -> Bool[Array | np.ndarray, "batch diagonals keys"]:
    """``[B|1, keys, queries]`` by diagonal and block of keys: ``[B|1, keys + queries - 1, keys]``, False outside."""
    xp, (_, keys, queries) = namespace(table), table.shape
    j = _column(np.arange(keys + queries - 1)[:, None], np.arange(keys), keys)
    inside = (j >= 0) & (j < queries)
    return xp.where(inside, table[:, np.arange(keys)[None], np.clip(j, 0, queries - 1)], False)


def _column(diagonal: Any, row: Any, rows: int) -> Any:
    """The block of queries where a diagonal meets the block of keys ``row`` of ``rows``."""
    return row + diagonal - (rows - 1)


@dataclasses.dataclass
class _Diagonals:
    """The kernel."""

    plan: GPUPlan
    values: Values
    names: Sequence[str]

    def call(self, q: jax.Array, k: jax.Array) -> Sequence[jax.Array]:
        """For each name, ``[B,N,diagonals,128]``."""
        plan, (entries, counts), (B, _, N, _) = self.plan, self.plan.lists, q.shape
        program = plgpu.kernel(
            self.run,
            out_type=[jax.ShapeDtypeStruct((B, N, counts.shape[1], WIDE), jnp.float32)] * len(self.names),
            scratch_types={
                "skewed": plgpu.SMEM((ROWS, 3 * ROWS), jnp.float32),
                "lines": [plgpu.SMEM((WIDE,), jnp.float32)] * len(self.names),
            },
            grid=(N, counts.shape[1], B),
            grid_names=("head", "diagonal", "sequence"),
            num_threads=2,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=plan.call.score_mod is None),
            interpret=plan.interpret or None,
        )
        with jax.enable_x64(False):  # Pallas' pipeline counts in int32
            return program(q, k, *plan.operands.arrays, jnp.asarray(entries), jnp.asarray(counts))

    def run(self, q_ref: Ref, k_ref: Ref, *refs: Ref, skewed: Ref, lines: Sequence[Ref]) -> None:
        """One diagonal of one head."""
        plan, count = self.plan, len(self.plan.operands.arrays)
        ins, (entry_ref, count_ref), outs = refs[:count], refs[count : count + 2], refs[count + 2 :]
        diagonal, n, b = (jax.lax.axis_index(name) for name in ("diagonal", "head", "sequence"))
        sequence = 0 if count_ref.shape[0] == 1 else b
        blocks = [padded // ROWS for padded in plan.operands.padded]
        group = jnp.int32(plan.call.query.shape[2] // plan.call.key.shape[2])

        def entry(ids: Sequence[jax.Array]) -> jax.Array:
            return entry_ref[sequence, diagonal, ids[0]]

        def rows_and_columns(ids: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
            row = jax.lax.shift_right_logical(entry(ids), jnp.int32(1))
            column = _column(diagonal, row, blocks[1])
            return row, jnp.clip(column, 0, jnp.int32(blocks[0] - 1))  # of a diagonal without blocks

        def of_keys(*ids: jax.Array) -> tuple:
            return b, rows_and_columns(ids)[0], jax.lax.div(n, group), jnp.int32(0)

        def of_queries(*ids: jax.Array) -> tuple:
            return b, rows_and_columns(ids)[1], n, jnp.int32(0)

        def add(ids: Sequence[jax.Array], k: Ref, q: Ref, *rest: Any) -> Any:
            *released, carry = rest
            (row, column), partial = rows_and_columns(ids), (entry(ids) & 1) == 1
            starts = row * ROWS, column * ROWS
            step = Step(plan, self.values.scores, ins, (b, n), starts, partial, released, lambda: None, None)
            (product,) = step.products((k, q))
            step.release(0, 1)
            values = step.either(self._of_tile, product)
            return [old + _by_diagonal(skewed, x) for old, x in zip(carry, values, strict=True)]

        def compute(pipeline: Callable[[Carry], Carry]) -> None:
            for first in (0, 2 * ROWS):
                plgpu.store(skewed.at[:, pl.ds(first, ROWS)], jnp.zeros(SIZE, jnp.float32), optimized=False)
            totals = pipeline([_line(jnp.zeros(WIDE, jnp.float32)) for _ in self.names])
            for line, out, x in zip(lines, outs, totals, strict=True):
                line[...] = x
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(line, out.at[b, n, diagonal])
            plgpu.wait_smem_to_gmem(0)

        dims = [x.shape[3] for x in (k_ref, q_ref)]
        of_a_block = sum(ROWS * dim * q_ref.dtype.itemsize for dim in dims)
        plgpu.emit_pipeline_warp_specialized(
            add,
            grid=(count_ref[sequence, diagonal],),
            in_specs=[
                plgpu.BlockSpec((None, ROWS, None, dim), index, transforms=TRANSFORMS)
                for dim, index in zip(dims, (of_keys, of_queries), strict=True)
            ],
            max_concurrent_steps=min(STAGES, (SHARED - skewed.size * 4) // of_a_block),
            num_compute_wgs=1,
            memory_registers=MEMORY_REGISTERS,
            wg_axis="warpgroup",
            manual_consumed_barriers=True,
            compute_context=compute,
        )(k_ref, q_ref)

    def _of_tile(self, tile: Tile) -> list[jax.Array]:
        values = self.values.of_tile(tile)[0]
        return [values[name] for name in self.names]


def _line(x: jax.Array) -> jax.Array:
    """``[128]``, one number per thread."""
    return plgpu.layout_cast(x, plgpu.Layout.WG_STRIDED((WIDE,), vec_size=1))


def _by_diagonal(skewed: Ref, x: jax.Array) -> jax.Array:
    """``[keys, queries] -> [128]``: entry ``64 + query - key`` is the sum of a diagonal.

    ``skewed [64, 192]`` has zeros on either side.
    """
    plgpu.store(skewed.at[:, pl.ds(ROWS, ROWS)], x, optimized=False)
    layout = plgpu.Layout.WG_STRIDED((WIDE,), vec_size=1)
    rows = (plgpu.load(skewed.at[row, pl.ds(row, WIDE)], layout=layout) for row in range(ROWS))
    return functools.reduce(jnp.add, rows)
