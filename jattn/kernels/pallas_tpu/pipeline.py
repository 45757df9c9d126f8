"""How the kernels of ``pallas_tpu`` run: their blocks, and the loops over blocks and tiles that they share."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from jattn.blocks.block_lists import choose_size
from jattn.blocks.plan import block_table, visibility
from jattn.core.arguments import AttentionArgs
from jattn.kernels.pallas_tiles import Ref
from jattn.kernels.pallas_tpu.schedule import LARGE, SMALL, TILE, Table, block_sizes, schedule, split_entry
from jattn.kernels.pallas_tpu.tile import Operands, Scores
from jattn.kernels.tuned import measured_sizes
from jattn.mods.arrays import pad_end

Interpret = bool | pltpu.InterpretParams
WIDE = 512  # bytes of a query from which on LARGE blocks exceed a v5e's vector memory in the backward pass


@dataclasses.dataclass
class TPUPlan:
    """One kernel's call: its blocks and what it reads."""

    args: AttentionArgs
    interpret: Interpret
    size: tuple[int, int]
    tables: tuple[Table, Table]  # any_visible and all_visible [B|1, blocks of T, blocks of S]
    operands: Operands

    @property
    def padded(self) -> tuple[int, int]:
        """T and S in whole blocks."""
        return self.operands.padded

    def queries(self, array: jax.Array, dtype: DTypeLike) -> jax.Array:
        """``[B,T,N,X] -> [B,N,X,T]``, padded."""
        array = jnp.transpose(array, (0, 2, 3, 1)).astype(dtype)
        return pad_end(array, (*array.shape[:3], self.padded[0]))

    def keys(self, array: jax.Array) -> jax.Array:
        """``[B,S,K,X] -> [B,K,S,X]``, padded."""
        array = jnp.transpose(array, (0, 2, 1, 3))
        return pad_end(array, (*array.shape[:2], self.padded[1], array.shape[3]))

    def value(self) -> jax.Array:
        """``[B,K,S,D]``, padded, with a column of zeros if D is 0, because no array of a kernel may be empty."""
        value = self.args.value
        return self.keys(value if value.shape[3] else jnp.zeros((*value.shape[:3], 1), value.dtype))

    def type_of(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        """A result's type. Inside ``jax.shard_map`` it must say how it varies: as the query, here not at all."""
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(self.args.query).manual_axis_type)

    def scores(self) -> Scores:
        """The scores, with their arrays among the operands."""
        args = self.args
        q, k = self.queries(args.query, args.query.dtype), self.keys(args.key)
        return Scores.of_padded(args, self.operands, q, k, visibility(args).all_seen())


def make_plan(args: AttentionArgs, sizes: tuple[int, int] | None, interpret: Interpret) -> TPUPlan:
    """The plan for blocks of these sizes, or of the default ones.

    These are large, as measured on this chip or else ``LARGE``. They are ``SMALL`` if that skips enough of the matrix
    to pay off, as in ``jattn.blocks.block_lists.choose_blocks``, or if a query is ``WIDE``, as in float32 with more
    than 128 features.
    """
    T, S = args.query.shape[1], args.key.shape[1]
    tables, found = functools.partial(block_table, args), None
    if sizes is None:
        dim = args.query.shape[3] if args.value is None else max(args.query.shape[3], args.value.shape[3])
        wide = dim * args.query.dtype.itemsize > WIDE
        large = block_sizes(T, S, SMALL) if wide else measured_sizes("pallas_tpu", args) or block_sizes(T, S, LARGE)
        sizes, found = choose_size(tables, large, block_sizes(T, S, SMALL))
    found = tables(sizes) if found is None else found
    rows, columns = (count * size for count, size in zip(found[0].shape[1:], sizes, strict=True))
    operands = Operands(sizes, (rows, columns), args.query.shape[2] // args.key.shape[2])
    return TPUPlan(args, interpret, sizes, found, operands)


def _nothing(*_: object) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a kernel does, with the references of what it reads, ``ins``, of its results, ``outs``, and of its scratch.

    - ``start(block, *scratch)`` before the first block ``(i, j)`` of a result's, ``finish(ins, *outs, *scratch)`` after
      the last.
    - For each block that is not empty ``before(ins, *scratch)``; for each 128 of its queries ``add(tiles, ins,
      *scratch)``; and ``after(block, guarded, ins, *scratch)``, where ``guarded`` is that of its tiles.
    """

    start: Callable
    add: Callable
    finish: Callable
    before: Callable = _nothing
    after: Callable = _nothing
    at_once: int = 0  # the times that ``add`` is repeated in the body of a loop; 0: ``Scores.at_once``


def call(
    plan: TPUPlan,
    scores: Scores,
    name: str,
    results: Sequence[tuple[str, jax.ShapeDtypeStruct]],
    scratch: Sequence[tuple[tuple[int, ...], DTypeLike]],
    steps: Steps,
) -> Sequence[jax.Array]:
    """The results of one kernel.

    Args:
        results: for each, what it belongs to, and its type: ``"queries"``, ``"keys"`` (for each key head) or
            ``"whole"``, which stays in vector memory for all blocks of a head. None or all are ``"keys"``.
        scratch: shapes and dtypes of what the kernel keeps from block to block of one result.
    """
    (B, _, N, _), K, by_key = plan.args.query.shape, plan.args.key.shape[2], results[0][0] == "keys"
    group, operands = N // K, plan.operands
    table, (some, every) = schedule(*plan.tables, by_key), plan.tables
    entries, shared = table.shape[1], table.shape[0] == 1
    # Blocks that are full, and that are not. Unless known, both branches are compiled, which takes longer.
    counts = (every.sum(), (some & ~every).sum()) if isinstance(table, np.ndarray) else (2, 1)

    def locate(ids: Sequence[jax.Array], table_ref: Ref) -> tuple:
        n = ids[1] * group + ids[3] if by_key else ids[1]
        entry = table_ref[ids[2] if shared else ids[0] * entries + ids[2]]
        return ids[0], n, *split_entry(entry, by_key)

    def spec(kind: str, shape: tuple[int, ...]) -> pl.BlockSpec:
        if kind == "scalars":
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec(
            operands.block(kind, shape), lambda *args: operands.index(kind, shape, *locate(args[:-1], args[-1])[:4])
        )

    def kernel(table_ref: Ref, *refs: Ref) -> None:
        ids = [pl.program_id(axis) for axis in range(len(grid))]
        b, n, i, j, partial, full, first, last = locate(ids, table_ref)
        ins, outs, kept = refs[:count], refs[count : count + len(results)], refs[count + len(results) :]
        if by_key:  # a key's head is done after all query heads of its group
            first, last = first & (ids[3] == 0), last & (ids[3] == group - 1)
        pl.when(first)(lambda: steps.start((i, j), *kept))
        for masked, listed in ((False, full), (True, partial)):
            if counts[masked]:
                often = not by_key and bool(2 * counts[masked] >= sum(counts))  # by key, a loop costs next to nothing
                arguments = scores, steps, masked, often, (i, j), (b, n), ins, kept
                pl.when(listed)(functools.partial(_compute, *arguments))
        pl.when(last)(lambda: steps.finish(ins, *outs, *kept))

    grid, count = (B, K, entries, group) if by_key else (B, N, entries), len(operands.arrays)
    program = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec(kind, array.shape) for kind, array in operands.arrays],
            out_specs=[spec(kind, result.shape) for kind, result in results],
            scratch_shapes=[pltpu.VMEM(*shape_and_dtype) for shape_and_dtype in scratch],
        ),
        out_shape=[result for _, result in results],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL, pltpu.PARALLEL, *[pltpu.ARBITRARY] * (len(grid) - 2)]
        ),
        interpret=plan.interpret,
        name=f"jattn_{name}",
    )
    return program(jnp.asarray(table).reshape(-1), *(array for _, array in operands.arrays))


def _compute(
    scores: Scores, steps: Steps, masked: bool, often: bool, block: tuple, head: tuple, ins: Sequence[Ref],
    kept: Sequence[Ref],
) -> None:  # fmt: skip
    """One block of a kernel; ``often``: whether many of its blocks are as this one, masked or not."""
    steps.before(ins, *kept)

    def add(number: jax.Array, _: None) -> tuple[jax.Array, None]:
        queries = pl.ds(pl.multiple_of(number * jnp.int32(TILE), TILE), TILE)
        steps.add(scores.tiles(ins, block, head, queries, masked), ins, *kept)
        return number + jnp.int32(1), None

    length = scores.operands.size[0] // TILE
    unroll = min(length, steps.at_once or scores.at_once(masked, often))
    jax.lax.scan(add, jnp.int32(0), length=length, unroll=unroll)  # a fori_loop would count in int64 in x64
    steps.after(block, masked and not scores.all_seen, ins, *kept)
