"""How the kernels of ``pallas_gpu`` run: their shared loop over blocks.

A kernel computes a block of score rows (queries or keys): 64 in each of one or two warpgroups, which keep their sums in
registers. Another warpgroup reads the columns into shared memory, block by block from a list, ahead of the computing
warpgroups. The lists are arrays in global memory, so empty blocks are neither read nor computed, whether or not the
mask is known while tracing.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jattn.kernels import pallas_tiles
from jattn.kernels.pallas_gpu.schedule import ROWS
from jattn.kernels.pallas_gpu.tile import GPUPlan, Place
from jattn.kernels.pallas_tiles import Ref

Result = TypeVar("Result")
WIDTH = 64  # features are padded to a multiple of this: 128 bytes, the widest swizzle
SHARED = 216 * 2**10  # bytes of shared memory for arrays, out of 227 KiB: barriers, alignment and reductions take some
STAGES = 4  # at most this many blocks of columns in shared memory
PART = 32  # columns
# For the 16-bit blocks that wgmma reads.
TRANSFORMS = plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(2 * WIDTH)  # pyright: ignore
Carry = Any  # the register state of a loop over blocks: a tree of arrays
MEMORY_REGISTERS = 24  # for the reading warpgroup; the others share the rest


@dataclasses.dataclass(frozen=True)
class Steps:
    """The work of a warpgroup.

    ``start(place) -> carry`` runs before the first block of columns. For each block,
    ``add(step, rows, columns, carry) -> carry`` gets references to the rows and columns of the input arrays in shared
    memory. Finally, ``finish(place, carry) -> (results, vectors)``.
    """

    start: Callable[[Place], Carry]
    add: Callable[["Step", Sequence[Ref], Sequence[Ref], Carry], Carry]
    finish: Callable[[Place, Carry], tuple[Sequence[jax.Array], Sequence[jax.Array]]]
    pingpong: bool = False  # the warpgroups alternate: one multiplies while the other computes exponentials


@dataclasses.dataclass
class Step(Place):
    """One block of columns, as a warpgroup sees it."""

    partial: jax.Array
    released: Sequence[Ref]
    turn: Callable[[], None]
    scratch: Ref | None

    def either(self, fn: Callable[..., Result], product: jax.Array) -> Result:
        """``fn(tile)``, with the mask if the block needs it."""
        return self._either(lambda masked, product: fn(self.tile(masked, product)), product)

    def _either(self, of: Callable[[bool, jax.Array], Result], product: jax.Array) -> Result:
        full, others = self.plan.kinds
        if full and others:
            return jax.lax.cond(self.partial, functools.partial(of, True), functools.partial(of, False), product)
        return of(others, product)

    def part_by_part(self, fn: Callable[..., Result], product: jax.Array) -> Result:
        """``either`` for results ``[rows, columns]``, ``PART`` columns at a time.

        The compiler keeps a register per pair for each value passed between operations.
        """

        def of(masked: bool, product: jax.Array) -> Result:
            if not masked and self.scores.score_mod is None:
                return fn(self.tile(masked, product))
            (row, column), pieces = self.starts, []
            for first in range(0, product.shape[1], PART):
                here = dataclasses.replace(self, starts=(row, column + first))
                part = jax.lax.slice(product, (0, first), (product.shape[0], first + PART))
                pieces.append(fn(here.tile(masked, part)))
            return jax.tree.map(lambda *parts: jnp.concatenate(parts, 1), *pieces)

        return self._either(of, product)

    def products(self, *factors: tuple[Ref, Ref]) -> list[jax.Array]:
        """``x y^T`` of references ``x [rows, X]`` and ``y [columns, X]``, in float32."""

        def multiply(*results: Ref) -> list[jax.Array]:
            for result, (x, y) in zip(results, factors, strict=True):
                plgpu.wgmma(result, x, y.transpose((1, 0)))
            self.turn()
            return [result[...] for result in results]

        shapes = ((x.shape[0], y.shape[0]) for x, y in factors)
        return pl.run_scoped(multiply, *(plgpu.WGMMAAccumulatorRef(shape, jnp.float32) for shape in shapes))

    def add(self, *terms: tuple[jax.Array, jax.Array, Ref]) -> Sequence[jax.Array]:
        """``z + x y`` of ``z`` and ``x`` in registers, and a reference ``y``."""
        if self.scratch is not None:  # the interpreter multiplies only references, starting from 0
            return [z + self._interpreted(x, y) for z, x, y in terms]

        def multiply(results: Sequence[Ref]) -> None:
            for result, (_, x, y) in zip(results, terms, strict=True):
                plgpu.wgmma(result, x, y)

        # Typed as references, but actually their values.
        return pl.run_state(multiply)([plgpu.WGMMAAccumulatorRef.init(z) for z, _, _ in terms])  # pyright: ignore

    def _interpreted(self, x: jax.Array, y: Ref) -> jax.Array:
        scratch = self.scratch
        assert scratch is not None

        def multiply(result: Ref) -> jax.Array:
            plgpu.wgmma(result, scratch, y)
            return result[...]

        scratch[...] = x
        plgpu.commit_smem()
        return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef((x.shape[0], y.shape[1]), jnp.float32))

    def hide_unseen(self, values: Ref) -> None:
        """Zeroes the values ``[keys, D]`` seen by no query, where all queries see the same keys: 0 times NaN is NaN."""
        plan = dataclasses.replace(self.plan, by_key=True, size=(ROWS, ROWS))
        for first in range(0, values.shape[0], ROWS):
            tile = Place(plan, self.scores, self.ins, self.head, (self.starts[1] + first, 0)).tile(masked=True)
            assert tile.visible is not None  # it is masked
            seen = jnp.max(jnp.where(tile.visible, 1.0, 0.0), axis=1)
            part = values.at[pl.ds(first, ROWS)]
            x = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where(jax.lax.broadcast_in_dim(seen, x.shape, [0]) > 0.0, x, jnp.zeros((), x.dtype))
        plgpu.commit_smem()

    def release(self, *columns: int) -> None:
        """Allows the blocks of these arrays to be overwritten."""
        for number in columns:
            plgpu.barrier_arrive(self.released[number])


def zeros(*shape: int) -> jax.Array:
    """Float32 zeros ``[rows, X]`` or ``[rows]`` in registers."""
    return full(shape, 0.0)


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """A float32 array ``[rows, X]`` or ``[rows]`` in registers."""
    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


@dataclasses.dataclass
class MosaicKernel:
    """One kernel.

    Args:
        rows, columns: arrays ``[B,T|S,N|K,X]`` of the side to which the score rows belong, and of the other side.
        results: the number of features of each row result ``[B,T|S,N|K,X]``, in the arrays' dtype; padded if
            ``num_splits`` is not 1.
        vectors: the number of float32 results ``[B,N|K,T|S]`` for the rows; padded.
        each_head: whether keys get results for each query head, ``[B,N,S]``, instead of their sum for each key head.
    """

    plan: GPUPlan
    scores: pallas_tiles.Scores
    steps: Steps
    rows: Sequence[jax.Array]
    columns: Sequence[jax.Array]
    results: Sequence[int]
    vectors: int = 0
    each_head: bool = False

    def __post_init__(self):
        self.warpgroups = self.plan.rows // ROWS
        features = [x.shape[3] for x in self.rows]
        # A result replaces the rows of the same shape, which are no longer needed by then.
        self.places = {n: n for n, size in enumerate(self.results) if features[n : n + 1] == [size]}
        shapes = [(self.warpgroups, ROWS, size) for size in features]
        others = [(self.warpgroups, ROWS, size) for n, size in enumerate(self.results) if n not in self.places]
        self.places |= {n: len(shapes) + at for at, n in enumerate(set(range(len(self.results))) - set(self.places))}
        self.scratch = {
            "blocks": [self._shared(shape) for shape in (*shapes, *others)],
            "lines": [plgpu.SMEM((self.warpgroups, ROWS), jnp.float32)] * self.vectors,
            "here": plgpu.Barrier(num_arrivals=len(self.rows), num_barriers=self.warpgroups),
            "turn": plgpu.Barrier(num_arrivals=self.warpgroups) if self.steps.pingpong else None,
            "factor": self._shared((self.warpgroups, ROWS, self.plan.inner)) if self.plan.interpret else None,
        }

    def call(self) -> tuple[list[jax.Array], list[jax.Array]]:
        """The results and the vectors."""
        plan, (B, length, heads, _), (entries, counts) = self.plan, self.rows[0].shape, self.plan.lists
        heads = plan.call.query.shape[2] if self.each_head else heads
        padded = counts.shape[1] * plan.rows
        length = length if plan.num_splits == 1 else padded
        types = [jax.ShapeDtypeStruct((B, length, heads, size), self.rows[0].dtype) for size in self.results]
        types += [jax.ShapeDtypeStruct((B, heads, padded), jnp.float32)] * self.vectors
        program = plgpu.kernel(
            self.run,
            out_type=types,
            scratch_types=self.scratch,
            grid=(heads, counts.shape[1], B),
            grid_names=("head", "row", "sequence"),
            num_threads=self.warpgroups + 1,
            thread_name="warpgroup",
            # The approximate tanh is off by 2^-11, too much for a score function.
            compiler_params=plgpu.CompilerParams(approx_math=plan.call.score_mod is None),
            interpret=plan.interpret or None,
        )
        with jax.enable_x64(False):  # Pallas' pipeline counts in int32
            lists = jnp.asarray(entries), jnp.asarray(counts)
            outputs = program(*self.rows, *self.columns, *plan.operands.arrays, *lists)
        return list(outputs[: len(self.results)]), list(outputs[len(self.results) :])

    def _shared(self, shape: tuple[int, ...]) -> Ref:
        return plgpu.SMEM(shape, self.rows[0].dtype, transforms=TRANSFORMS)

    @property
    def stages(self) -> int:
        """The number of column blocks to hold in shared memory."""
        kept = sum(math.prod(x.shape) for x in self.scratch["blocks"])
        of_a_block = sum(self.plan.inner * x.shape[3] for x in self.columns)
        return min(STAGES, (SHARED // self.rows[0].dtype.itemsize - kept) // of_a_block)

    def run(self, *refs: Ref, **kept: Ref) -> None:
        """The kernel, given references to its arrays and scratch."""
        counts = len(self.rows), len(self.columns), len(self.plan.operands.arrays)
        row_refs, column_refs, ins, (entry_ref, count_ref, *outs) = _split(refs, counts)
        i, n, b, w = (jax.lax.axis_index(name) for name in ("row", "head", "sequence", "warpgroup"))
        if not self.plan.by_key:  # for causal masks, the longest rows come first
            i = jnp.int32(count_ref.shape[1] - 1) - i
        sequence = 0 if count_ref.shape[0] == 1 else b
        grid = (count_ref[sequence, i],)
        if self.by_group:
            grid = (jnp.int32(self.group), *grid)
        first, result = (at * self.plan.rows + w * ROWS for at in (jax.lax.div(i, jnp.int32(self.plan.num_splits)), i))
        at = _At(self, kept, ins, (b, n), w, first, result, lambda t: entry_ref[sequence, i, t])
        plgpu.emit_pipeline_warp_specialized(
            at.add,
            grid=grid,
            in_specs=[
                plgpu.BlockSpec((None, self.plan.inner, None, x.shape[3]), at.index, transforms=TRANSFORMS)
                for x in self.columns
            ],
            max_concurrent_steps=self.stages,
            num_compute_wgs=self.warpgroups,
            memory_registers=MEMORY_REGISTERS,
            wg_axis="warpgroup",
            manual_consumed_barriers=True,
            compute_context=lambda pipeline: at.compute(pipeline, row_refs, outs),
        )(*column_refs)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.plan.call.query.shape[2] // self.plan.call.key.shape[2]

    @property
    def by_group(self) -> bool:
        """Whether the rows of a key head loop over all its query heads."""
        return self.plan.by_key and not self.each_head


@dataclasses.dataclass
class _At:
    """A kernel's body in one warpgroup."""

    kernel: MosaicKernel
    kept: dict[str, Ref]
    ins: Sequence[Ref]
    head: tuple[jax.Array, jax.Array]
    warpgroup: jax.Array
    first: jax.Array  # its first row
    result_row: jax.Array  # and its place in the results
    entry: Callable[[jax.Array], jax.Array]  # of the list

    def index(self, *ids: jax.Array) -> tuple:
        """The block of the columns' arrays at a step of the pipeline."""
        column = jax.lax.shift_right_logical(self.entry(ids[-1]), jnp.int32(1))
        by_key, group = self.kernel.plan.by_key, jnp.int32(self.kernel.group)
        column_head = self._query_head(ids) if by_key else jax.lax.div(self.head[1], group)
        return self.head[0], column, column_head, jnp.int32(0)

    def _query_head(self, ids: Sequence[jax.Array]) -> jax.Array:
        return self.head[1] * self.kernel.group + ids[0] if self.kernel.by_group else self.head[1]

    def add(self, ids: Sequence[jax.Array], *refs: Any) -> Any:
        """A step of the pipeline."""
        count, plan = len(self.kernel.columns), self.kernel.plan
        blocks, released, carry = refs[:count], refs[count:-1], refs[-1]
        head = self.head[0], self._query_head(ids)
        starts, partial = (self.first, self.index(*ids)[1] * plan.inner), (self.entry(ids[-1]) & 1) == 1
        factor = None if self.kept["factor"] is None else self.kept["factor"].at[self.warpgroup]
        step = Step(plan, self.kernel.scores, self.ins, head, starts, partial, released, self._turn, factor)
        return self.kernel.steps.add(step, self._rows(), blocks, carry)

    def compute(self, pipeline: Callable[[Carry], Carry], rows: Sequence[Ref], outs: Sequence[Ref]) -> None:
        """The work of a warpgroup around the pipeline."""
        (b, n), w, kept = self.head, self.warpgroup, self.kept
        rows_out, row_head = pl.ds(self.result_row, ROWS), n
        if self.kernel.each_head:
            row_head = jax.lax.div(n, jnp.int32(self.kernel.group))
        for ref, smem in zip(rows, self._rows(), strict=True):
            plgpu.copy_gmem_to_smem(
                ref.at[b, pl.ds(self.first, ROWS), row_head], smem, kept["here"].at[w], oob_mode=plgpu.OOBFillMode.ZEROS
            )
        plgpu.barrier_wait(kept["here"].at[w])
        place = Place(self.kernel.plan, self.kernel.scores, self.ins, self.head, (self.first, None))
        carry = self.kernel.steps.start(place)
        if self.kernel.steps.pingpong:
            pl.when(w == 1)(self._turn)
        carry = pipeline(carry)
        if self.kernel.steps.pingpong:
            pl.when(w == 0)(self._turn)
        results, lines = self.kernel.steps.finish(place, carry)
        places = [kept["blocks"][self.kernel.places[at]] for at in range(len(results))]
        for smem, x in zip((*places, *kept["lines"]), (*results, *lines), strict=True):
            smem.at[w][...] = x.astype(smem.dtype)
        plgpu.commit_smem()
        for smem, out in zip(places, outs, strict=False):
            plgpu.copy_smem_to_gmem(smem.at[w], out.at[b, rows_out, n])
        for smem, out in zip(kept["lines"], outs[len(places) :], strict=True):
            plgpu.copy_smem_to_gmem(smem.at[w], out.at[b, n, rows_out])
        plgpu.wait_smem_to_gmem(0)

    def _rows(self) -> list[Ref]:
        return [ref.at[self.warpgroup] for ref in self.kept["blocks"][: len(self.kernel.rows)]]

    def _turn(self) -> None:
        if self.kernel.steps.pingpong:
            plgpu.barrier_arrive(self.kept["turn"])
            plgpu.barrier_wait(self.kept["turn"])


def _split(refs: Sequence[Ref], counts: Sequence[int]) -> list[Sequence[Ref]]:
    groups = []
    for count in counts:
        groups, refs = [*groups, refs[:count]], refs[count:]
    return [*groups, refs]
