"""How the kernels of ``pallas_tpu`` run: their blocks, and their shared loops over blocks and tiles."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jattn._blocks.block_lists import choose_size
from jattn._blocks.plan import block_table, visibility
from jattn._core.call import Call
from jattn._mods.arrays import pad_end
from jattn.kernels.pallas_tiles import Ref
from jattn.kernels.pallas_tpu import PallasTPU, in_place
from jattn.kernels.pallas_tpu.schedule import LARGE, SMALL, TILE, Table, block_sizes, schedule, split_entry
from jattn.kernels.pallas_tpu.tile import Operands, Scores

Result = tuple[str, jax.ShapeDtypeStruct]  # its owner, one of the kinds of ``Operands``, and its type
Scratch = Sequence[tuple[tuple[int, ...], DTypeLike]]  # shapes and dtypes
WIDE = 512  # with queries of this many bytes or more, LARGE blocks exceed a v5e's vector memory in the backward pass


@dataclasses.dataclass
class TPUPlan:
    """One kernel call: its blocks and inputs."""

    call: Call
    settings: PallasTPU
    size: tuple[int, int]
    tables: tuple[Table, Table]  # any_visible and all_visible [B|1, blocks of T, blocks of S]
    operands: Operands

    def _in_place(self, shape: tuple[int, ...], dtype: DTypeLike, axis: int) -> bool:
        return self.settings.in_place and in_place.fits(shape, dtype, self.size[axis])

    def add_queries(self, array: jax.Array, dtype: DTypeLike) -> int:
        """Adds ``[B,T,N,X]`` to the operands and returns its number: as ``[B,N,X,T]``, padded, or in place."""
        if self._in_place(array.shape, dtype, 0):
            return self.operands.add("queries in place", array.astype(dtype).reshape(in_place.by_pair(array.shape)))
        array = jnp.transpose(array, (0, 2, 3, 1)).astype(dtype)
        return self.operands.add("queries", pad_end(array, (*array.shape[:3], self.operands.padded[0])))

    def add_keys(self, array: jax.Array) -> int:
        """Adds ``[B,S,K,X]``: as ``[B,K,S,X]``, padded, or in place."""
        if self._in_place(array.shape, array.dtype, 1):
            return self.operands.add("keys in place", array.reshape(in_place.by_pair(array.shape)))
        array = jnp.transpose(array, (0, 2, 1, 3))
        return self.operands.add("keys", pad_end(array, (*array.shape[:2], self.operands.padded[1], array.shape[3])))

    def add_value(self) -> int:
        """Adds the value, with a column of zeros if D is 0, because no array of a kernel may be empty."""
        value = self.call.value
        return self.add_keys(value if value.shape[3] else jnp.zeros((*value.shape[:3], 1), value.dtype))

    def result(self, over: str, size: int, dtype: DTypeLike) -> "Result":
        """The kind and type of a result ``[B,T,N,size]``, or ``[B,S,K,size]`` over ``"keys"``."""
        axis = 0 if over == "queries" else 1
        B, length, heads, _ = (self.call.query, self.call.key)[axis].shape
        shape = B, length, heads, size
        if self._in_place(shape, dtype, axis):
            return f"{over} in place", self.type_of(in_place.by_pair(shape), dtype)
        padded = self.operands.padded[axis]
        shape = (B, heads, size, padded) if over == "queries" else (B, heads, padded, size)
        return over, self.type_of(shape, dtype)

    def restored(self, result: "Result", array: jax.Array) -> jax.Array:
        """The array of a ``result``, ``[B,T,N,size]`` or ``[B,S,K,size]``."""
        kind, (T, S) = result[0], (self.call.query.shape[1], self.call.key.shape[1])
        if kind.endswith("in place"):
            return array.reshape(*array.shape[:2], array.shape[2] * array.shape[3], array.shape[4])
        return jnp.transpose(array, (0, 3, 1, 2))[:, :T] if kind == "queries" else jnp.swapaxes(array, 1, 2)[:, :S]

    def type_of(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """A result's type. Inside ``jax.shard_map``, it must declare how it varies: like the query, it does not."""
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(self.call.query).manual_axis_type)

    def scores(self) -> Scores:
        """The scores, with their arrays among the operands."""
        call, operands = self.call, self.operands
        numbers = {"query": self.add_queries(call.query, call.query.dtype), "key": self.add_keys(call.key)}
        return Scores.of(call, operands, visibility(call).all_seen(), operands=operands, **numbers)


def make_plan(call: Call, settings: PallasTPU, sizes: tuple[int, int] | None, at_a_time: int) -> TPUPlan:
    """The plan for blocks of these sizes, or the default sizes, in tiles of ``at_a_time`` queries, or 128.

    Blocks are ``LARGE`` by default, but ``SMALL`` if that skips enough of the matrix to pay off, as in
    ``jattn._blocks.block_lists.choose_blocks``, or if a query is ``WIDE``, as in float32 with more than 128 features.
    """
    T, S = call.query.shape[1], call.key.shape[1]
    tables, blocks = functools.partial(block_table, call), None
    if sizes is None:
        dim = call.query.shape[3] if call.value is None else max(call.query.shape[3], call.value.shape[3])
        wide = dim * call.query.dtype.itemsize > WIDE
        sizes, blocks = choose_size(tables, block_sizes(T, S, SMALL if wide else LARGE), block_sizes(T, S, SMALL))
    blocks = tables(sizes) if blocks is None else blocks
    rows, columns = (count * size for count, size in zip(blocks[0].shape[1:], sizes, strict=True))
    at_a_time = TILE if sizes[0] % at_a_time else at_a_time
    operands = Operands(sizes, (rows, columns), call.query.shape[2] // call.key.shape[2], at_a_time)
    return TPUPlan(call, settings, sizes, blocks, operands)


def _nothing(*_: object) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Steps:
    """The work of a kernel, given references to its inputs, ``ins``, and its scratch.

    - ``start(block, *scratch)`` before a result's first block ``(i, j)``; after the last, ``finish(ins, *scratch)``,
      which returns the values of the results.
    - For each nonempty block, ``before(ins, *scratch)``; for the queries of each tile, ``add(tiles, ins, *scratch)``;
      then ``after(block, guarded, ins, *scratch)``, with the tiles' ``guarded``.
    """

    start: Callable[..., None]
    add: Callable[..., None]
    finish: Callable[..., Sequence[jax.Array]]
    before: Callable[..., None] = _nothing
    after: Callable[..., None] = _nothing
    at_once: int = 0  # number of ``add`` calls per loop body; 0: ``Scores.at_once``


@dataclasses.dataclass(frozen=True)
class Grid:
    """The programs of one kernel, one for each listed block of each head: which block each takes, and its contents."""

    operands: Operands
    results: Sequence[Result]
    by_key: bool  # whether results belong to keys, so that each result takes the blocks of a column
    shape: tuple[int, int, int, int]  # B, the results' heads less turns, entries of the table, turns times members
    turns: int  # result heads that take turns on a block, because they share words
    members: int  # query heads per result head
    shared: bool  # whether all sequences share one table

    @property
    def result_kind(self) -> str:
        """The kind of in-place arrays that belong to a result and are copied once for it."""
        return "keys in place" if self.by_key else "queries in place"

    @property
    def copied(self) -> dict[int, str]:
        """The numbers and kinds of the operands that are read in place, which the kernel copies."""
        kinds = "keys in place", "queries in place"
        return {number: kind for number, (kind, _) in enumerate(self.operands.arrays) if kind in kinds}

    def copies(self) -> list[Any]:
        """The scratch for ``copied``."""
        return [
            pltpu.VMEM(
                (self.turns if kind == self.result_kind else 1, *self.operands.copy_shape(number)),
                self.operands.arrays[number][1].dtype,
            )
            for number, kind in self.copied.items()
        ]

    def locate(self, ids: Sequence[jax.Array], table_ref: Ref) -> tuple:
        """A program's sequence, query head and entry: ``i, j, partial, full, first, last``."""
        entry = table_ref[ids[2] if self.shared else ids[0] * self.shape[2] + ids[2]]
        return ids[0], ids[1] * self.shape[3] + ids[3], *split_entry(entry, self.by_key)

    def spec(self, kind: str, shape: tuple[int, ...], of_result: bool) -> pl.BlockSpec:
        """The block of an operand or result."""
        if kind == "scalars":
            return pl.BlockSpec(memory_space=pltpu.SMEM)

        def index(*numbers: Any) -> tuple:
            b, n, i, j = self.locate(numbers[:-1], numbers[-1])[:4]
            head = numbers[1] if of_result else self.operands.head(kind, n)
            return self.operands.index(kind, shape, b, head, i, j)

        return pl.BlockSpec(self.operands.block(kind, shape, self.turns if of_result else 1), index)


def call_kernel(
    plan: TPUPlan, scores: Scores, name: str, results: Sequence[Result], scratch: Scratch, steps: Steps,
    of_block: Scratch = (),
) -> Sequence[jax.Array]:  # fmt: skip
    """The results of one kernel.

    Args:
        results: ``"queries"`` or ``"keys"`` (of each key head), optionally in place, or ``"whole"``, which stays in
            vector memory for all blocks of a head. Either none or all of them belong to keys.
        scratch: state kept from block to block of one result.
        of_block: further scratch, after ``scratch``, for one block.
    """
    (B, _, N, _), K, by_key = plan.call.query.shape, plan.call.key.shape[2], results[0][0].startswith("keys")
    table, (some, every), operands = schedule(*plan.tables, by_key), plan.tables, plan.operands
    # Full blocks, and others. Unless these are known, both branches are compiled, which takes longer.
    counts = (every.sum(), (some & ~every).sum()) if isinstance(table, np.ndarray) else (2, 1)
    turns = in_place.PAIR if any(kind.endswith("in place") for kind, _ in results) else 1
    heads, members = (K, N // K) if by_key else (N, 1)
    shape = B, heads // turns, table.shape[1], turns * members
    grid = Grid(operands, results, by_key, shape, turns, members, shared=table.shape[0] == 1)
    copies = grid.copies()

    def kernel(table_ref: Ref, *refs: Ref) -> None:
        rest = iter(refs)
        ins, outs, buffers, kept, passing = (
            [next(rest) for _ in x] for x in (operands.arrays, results, copies, scratch, of_block)
        )
        _program(grid, scores, steps, counts, table_ref, ins, outs, buffers, kept, passing)

    program = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=shape,
            in_specs=[grid.spec(kind, array.shape, False) for kind, array in operands.arrays],
            out_specs=[grid.spec(kind, result.shape, True) for kind, result in results],
            scratch_shapes=[
                *copies,
                *(pltpu.VMEM((turns, *shape), dtype) for shape, dtype in scratch),
                *(pltpu.VMEM(*shape_and_dtype) for shape_and_dtype in of_block),
            ],
        ),
        out_shape=[result for _, result in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY, pltpu.ARBITRARY]
        ),
        interpret=plan.settings.interpret,
        name=f"jattn_{name}",
    )
    return program(jnp.asarray(table).reshape(-1), *(array for _, array in operands.arrays))


def _program(
    grid: Grid, scores: Scores, steps: Steps, counts: tuple[Any, Any], table_ref: Ref, of_arrays: Sequence[Ref],
    outs: Sequence[Ref], buffers: Sequence[Ref], kept: Sequence[Ref], of_block: Sequence[Ref],
) -> None:  # fmt: skip
    """One program of a kernel; ``counts``: the numbers of its full and other blocks."""
    operands, copied = grid.operands, grid.copied
    ids = [pl.program_id(axis) for axis in range(len(grid.shape))]
    b, n, i, j, partial, full, first, last = grid.locate(ids, table_ref)
    zero = jnp.int32(0)  # an int would be of 64 bits in x64
    turn = zero if grid.turns == 1 else jax.lax.div(ids[3], jnp.int32(grid.members))
    if grid.members > 1:  # a key head is finished after all query heads of its group
        member = jax.lax.rem(ids[3], jnp.int32(grid.members))
        first, last = first & (member == 0), last & (member == grid.members - 1)
    ins, kept = list(of_arrays), [*(x.at[turn] for x in kept), *of_block]
    for buffer, (number, kind) in zip(buffers, copied.items(), strict=True):
        ins[number] = buffer.at[turn if kind == grid.result_kind else zero]

    def copy(of_result: bool) -> None:
        for number, kind in copied.items():
            if (kind == grid.result_kind) == of_result:
                operands.copy(number, of_arrays[number], ins[number], n, i, j)

    @pl.when(first)
    def _() -> None:
        copy(of_result=True)
        steps.start((i, j), *kept)

    pl.when(partial | full)(lambda: copy(of_result=False))
    for masked, listed in ((False, full), (True, partial)):
        if counts[masked]:
            often = bool(2 * counts[masked] >= sum(counts))
            arguments = scores, steps, masked, often, (i, j), (b, n), ins, kept
            pl.when(listed)(functools.partial(_compute, *arguments))

    @pl.when(last)
    def _() -> None:
        for out, (kind, _), value in zip(outs, grid.results, steps.finish(ins, *kept), strict=True):
            operands.write(kind, out, turn, value)


def _compute(
    scores: Scores, steps: Steps, masked: bool, often: bool, block: tuple, head: tuple, ins: Sequence[Ref],
    kept: Sequence[Ref],
) -> None:  # fmt: skip
    """One block of a kernel; ``often``: whether many of its blocks are like this one, masked or not."""
    steps.before(ins, *kept)
    each = scores.operands.at_a_time

    def add(number: jax.Array, _: None) -> tuple[jax.Array, None]:
        queries = pl.ds(pl.multiple_of(number * jnp.int32(each), each), each)
        steps.add(scores.tiles(ins, block, head, queries, masked), ins, *kept)
        return number + jnp.int32(1), None

    length = scores.operands.size[0] // each
    unroll = min(length, steps.at_once or scores.at_once(masked, often))
    jax.lax.scan(add, jnp.int32(0), length=length, unroll=unroll)  # a fori_loop would count in int64 with x64
    steps.after(block, masked and not scores.all_seen, ins, *kept)
