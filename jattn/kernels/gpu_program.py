"""How the kernels of ``pallas_gpu`` run: their blocks, the arrays that they read, and the loop that they share.

A kernel computes a block of rows of scores, queries or keys: 64 by each of one or two warpgroups, which keep their sums
in registers. Another warpgroup reads the columns, block by block of a list, into shared memory, ahead of those that
compute. The lists are arrays in global memory, so empty blocks are neither read nor computed, whether or not the mask
is known while tracing.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn import staged
from jattn.blocks import all_seen
from jattn.kernels import Unsupported, tiles
from jattn.kernels.blockwise import block_table, mask_arguments
from jattn.kernels.gpu_functions import FUNCTIONS
from jattn.request import Request
from jattn.separate import QUERY
from jattn.tables import namespace, pad_end

SEVERAL_DEVICES = "the arrays may lie on several devices: use jax.shard_map or a mesh of AxisType.Explicit"
ROWS = 64  # of a warpgroup: a wgmma computes so many
WIDTH = 64  # features are padded to a multiple: 128 bytes, the widest swizzle
SHARED = 216 * 2**10  # bytes of shared memory for arrays, of 227 KiB: barriers, alignment and reductions take some
STAGES = 4  # at most this many blocks of columns in shared memory
MEMORY_REGISTERS = 24  # of the warpgroup that reads; the others share the rest
LOG2E = math.log2(math.e)


def block_lists(any_visible: Any, all_visible: Any, by_key: bool) -> tuple[Any, Any]:
    """The blocks of each row, int32 ``[B|1, rows, most]``, full ones first, and their number ``[B|1, rows]``.

    An entry is twice the block's column, plus 1 unless the block is full. A row without blocks gets one that is not.
    """
    xp = namespace(any_visible, all_visible)
    if by_key:
        any_visible, all_visible = any_visible.swapaxes(1, 2), all_visible.swapaxes(1, 2)
    rank = xp.where(all_visible, 0, xp.where(any_visible, 1, 2))
    counts = xp.maximum((rank < 2).sum(2), 1)
    most = int(counts.max()) if xp is np else rank.shape[2]
    order = xp.argsort(rank, axis=2, stable=True)[..., :most]
    entries = 2 * order + (xp.take_along_axis(rank, order, 2) > 0).astype(order.dtype)
    return entries.astype(np.int32), counts.astype(np.int32)


class Operands:
    """The arrays that a kernel reads besides its rows and columns, from global memory."""

    def __init__(self, padded: tuple[int, int], by_key: bool):
        self.padded, self.by_key = padded, by_key
        self.arrays: list[jax.Array] = []

    def scalars(self, array: jax.Array) -> int:
        """Adds ``[B|1,N|1]``."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def vector(self, over: str, array: jax.Array) -> int:
        """Adds ``[B|1,N|1,T]`` or ``[B|1,N|1,S]``."""
        return self.scalars(pad_end(array, (*array.shape[:2], self.padded[over != QUERY])))

    def pairs(self, array: jax.Array) -> int:
        """Adds ``[B|1,N|1,T,S]``."""
        array = pad_end(array, (*array.shape[:2], *self.padded))
        return self.scalars(array.swapaxes(2, 3) if self.by_key else array)


class Tile(tiles.Tile):
    """64 rows and a block of columns: ``[queries, keys]``, or ``[keys, queries]`` of a kernel by key."""

    functions: Mapping[str, Callable] = FUNCTIONS

    def __init__(self, at: "Step", masked: bool, product: jax.Array | None):
        super().__init__(at.scores, masked)
        self.at, self.given, self.block = at, product, at.plan.size
        self.shape = ROWS, at.plan.inner

    def product(self) -> jax.Array:
        """``q·k``, which the kernel has computed."""
        assert self.given is not None
        return self.given

    def log2_scores(self) -> jax.Array:
        """The scores over ln 2, for exponentials to the base 2."""
        if self.source.bias is not None or self.source.score_mod is not None:
            return self.scores() * LOG2E
        s = self.product() * (self.scalar(self.source.scale) * LOG2E)
        return s if self.visible is None else jnp.where(self.visible, s, -jnp.inf)

    def only_visible(self, x: jax.Array) -> jax.Array:
        """``x``, 0 where masked, whatever it is there."""
        return x if self.visible is None else jnp.where(self.visible, x, 0.0)

    def slots(self) -> tuple[jax.Array, jax.Array]:
        """The slots of the queries and of the keys, int32, of ``shape``."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def slots(axis: int) -> jax.Array:
            iota = plgpu.broadcasted_iota(jnp.int32, self.shape, axis, layout=plgpu.Layout.WGMMA)
            return iota + self.at.starts[axis]

        return slots(self.axis(True)), slots(self.axis(False))

    def axis(self, of_queries: bool) -> int:
        """The axis of the queries or of the keys."""
        return int(of_queries == self.at.plan.by_key)

    def scalar(self, added: int) -> jax.Array:
        """The head's entry of an array of ``Operands.scalars``."""
        return self.at.ins[added][self._of_head(added)]

    def vector(self, over: str, added: int) -> jax.Array:
        """The tile's part of an array of ``Operands.vector``, of ``shape``."""
        axis = self.axis(over == QUERY)
        return jax.lax.broadcast_in_dim(self.line(added, axis), self.shape, [axis])

    def line(self, added: int, axis: int) -> jax.Array:
        """The tile's part of an array of ``Operands.vector`` over ``axis``, ``[rows]`` or ``[columns]``."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        at = pl.ds(self.at.starts[axis], self.shape[axis])
        ref = self.at.ins[added].at[(*self._of_head(added), at)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)

    def pairs(self, added: int) -> jax.Array:
        """The tile's part of an array of ``Operands.pairs``."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        at = (pl.ds(start, size) for start, size in zip(self.at.starts, self.shape, strict=True))
        ref = self.at.ins[added].at[(*self._of_head(added), *at)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)

    def _of_head(self, added: int) -> tuple[Any, Any]:
        shape = self.at.plan.operands.arrays[added].shape
        b, n = self.at.head
        return 0 if shape[0] == 1 else b, 0 if shape[1] == 1 else n


@dataclasses.dataclass
class Plan:
    """One kernel's call: its blocks and what it reads."""

    request: Request
    interpret: Any
    by_key: bool
    size: tuple[int, int]  # queries and keys of a block
    lists: tuple[Any, Any]
    operands: Operands

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.size[self.by_key]

    @property
    def inner(self) -> int:
        """Columns of a block."""
        return self.size[not self.by_key]

    @property
    def kinds(self) -> tuple[bool, bool]:
        """Whether there may be full blocks, and others."""
        entries, counts = self.lists
        if not isinstance(entries, np.ndarray):
            return True, True
        kinds = (entries & 1)[np.arange(entries.shape[2]) < counts[..., None]]
        return bool((kinds == 0).any()), bool((kinds == 1).any())

    def scores(self) -> tiles.Scores:
        """The scores, with their arrays among the operands."""
        return tiles.Scores.of(self.request, self.operands, is_all_seen(self.request))


def is_all_seen(request: Request) -> bool:
    """Whether each query sees a key, and each key is seen."""
    return all_seen(*mask_arguments(request))


def make_plan(platform: str, request: Request, by_key: bool, shape: tuple[int, int], interpret: Any) -> Plan:
    """The plan of a kernel whose rows are queries, or keys ``by_key``; ``shape``: a block's rows and columns.

    Raises:
        Unsupported: the platform is no Hopper GPU, or XLA divides the program over several.
    """
    require_hopper(platform, interpret)
    size = shape[::-1] if by_key else shape
    tables = block_table(request, size)
    T, S = (count * one for count, one in zip(tables[0].shape[1:], size, strict=True))
    return Plan(request, interpret, by_key, size, block_lists(*tables, by_key), Operands((T, S), by_key))


def require_hopper(platform: str, interpret: Any) -> None:
    """Raises ``Unsupported`` where a kernel cannot be lowered."""
    if interpret:
        return
    # A process without a GPU compiles for another's: for a Hopper, as JAX does.
    chip = getattr(jax.devices()[0], "compute_capability", "9.0")
    if platform != "cuda":
        needs = f"it needs an NVIDIA GPU, not {platform}"
    elif chip != "9.0":
        needs = f"it needs an NVIDIA GPU of compute capability 9.0 (H100, H200, GH200), not {chip}"
    elif staged.is_partitioned():
        needs = SEVERAL_DEVICES
    else:
        return
    raise Unsupported(f"implementation='pallas_gpu' cannot do this: {needs}")


@dataclasses.dataclass(frozen=True)
class Steps:
    """What a warpgroup does.

    ``start(step) -> carry`` before the first block of columns, where ``step`` has no columns yet. For each block
    ``add(step, rows, columns, carry) -> carry``, with references to the rows and columns of the arrays that the kernel
    reads, in shared memory. ``finish(step, carry) -> (results, vectors)``, as ``start``.
    """

    start: Callable
    add: Callable
    finish: Callable
    in_turn: bool = False  # the warpgroups multiply in turn, each while the other computes exponentials


@dataclasses.dataclass
class Step:
    """One block of columns, as a warpgroup sees it."""

    plan: Plan
    scores: tiles.Scores
    ins: Sequence[Any]
    head: tuple[Any, Any]  # of the queries
    starts: tuple[Any, Any]  # the first slots of rows and columns
    partial: Any
    released: Sequence[Any]
    turn: Callable
    scratch: Any

    @property
    def scale(self) -> jax.Array:
        """The factor on ``q·k``."""
        return self.tile().scalar(self.scores.scale)

    def tile(self, masked: bool = False, product: jax.Array | None = None) -> Tile:
        """The block's scores."""
        return Tile(self, masked, product)

    def either(self, fn: Callable, product: jax.Array, *args: jax.Array) -> Any:
        """``fn(tile, *args)``, with the mask where the block needs it."""
        full, others = self.plan.kinds

        def of(masked: bool) -> Callable:
            return lambda product, *args: fn(self.tile(masked, product), *args)

        if full and others:
            return jax.lax.cond(self.partial, of(True), of(False), product, *args)
        return of(others)(product, *args)

    def products(self, *factors: tuple[Any, Any]) -> list[jax.Array]:
        """``x y^T`` of references ``x [rows, X]`` and ``y [columns, X]``, in float32."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def multiply(*results: Any) -> list[jax.Array]:
            for result, (x, y) in zip(results, factors, strict=True):
                plgpu.wgmma(result, x, y.transpose((1, 0)))
            self.turn()
            return [result[...] for result in results]

        shapes = ((x.shape[0], y.shape[0]) for x, y in factors)
        return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))

    def add(self, *terms: tuple[jax.Array, jax.Array, Any]) -> list[jax.Array]:
        """``z + x y`` of ``z`` and ``x`` in registers, and a reference ``y``."""
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        if self.scratch is not None:  # the interpreter multiplies references alone, and starts at 0
            return [z + self._interpreted(x, y) for z, x, y in terms]

        def multiply(results: Any) -> None:
            for result, (_, x, y) in zip(results, terms, strict=True):
                plgpu.wgmma(result, x, y)

        return pl.run_state(multiply)([plgpu.ACC.init(z) for z, _, _ in terms])

    def _interpreted(self, x: jax.Array, y: Any) -> jax.Array:
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import mosaic_gpu as plgpu

        def multiply(result: Any) -> jax.Array:
            plgpu.wgmma(result, self.scratch, y)
            return result[...]

        self.scratch[...] = x
        plgpu.commit_smem()
        return pl.run_scoped(multiply, plgpu.ACC((x.shape[0], y.shape[1]), jnp.float32))

    def release(self, *columns: int) -> None:
        """Lets the blocks of these arrays be overwritten."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        for number in columns:
            plgpu.barrier_arrive(self.released[number])


def zeros(*shape: int) -> jax.Array:
    """Float32 zeros ``[rows, X]`` or ``[rows]`` in registers."""
    return full(shape, 0.0)


def full(shape: tuple[int, ...], value: float) -> jax.Array:
    """A float32 array ``[rows, X]`` or ``[rows]`` in registers."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    layout = plgpu.Layout.WGMMA if len(shape) == 2 else plgpu.Layout.WGMMA.reduce(1)
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def call(
    plan: Plan, rows: Sequence[jax.Array], columns: Sequence[jax.Array], results: Sequence[int], vectors: int,
    steps: Steps, scores: tiles.Scores | None = None,
) -> tuple[list[jax.Array], list[jax.Array]]:  # fmt: skip
    """The results of one kernel.

    Args:
        rows, columns: arrays ``[B,T|S,N|K,X]`` of the side that the rows of scores belong to, and of the other.
        results: the features of each ``[B,T|S,N|K,X]`` that the rows get, in the arrays' dtype.
        vectors: how many float32 ``[B,N|K,T|S]`` they get; padded.
    """
    # Imported when a kernel is traced: it takes as long as half of jattn.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    scores = plan.scores() if scores is None else scores
    (B, length, heads, _), dtype, inner = rows[0].shape, rows[0].dtype, plan.inner
    group = plan.request.query.shape[2] // plan.request.key.shape[2]
    warpgroups, (entries, counts) = plan.rows // ROWS, plan.lists
    counted = len(rows), len(columns), len(plan.operands.arrays)

    def shared(shape: tuple[int, ...]) -> Any:
        transforms = (plgpu.TilingTransform((8, WIDTH)), plgpu.SwizzleTransform(2 * WIDTH))
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    # A result takes the place of the rows that have its shape, which by then are not needed.
    features = [x.shape[3] for x in rows]
    own = {n: features.index(size) for n, size in enumerate(results) if size in features and len(results) == 1}
    own |= {n: n for n, size in enumerate(results) if n < len(rows) and features[n] == size}
    scratch = {
        "rows": [shared((warpgroups, ROWS, size)) for size in features],
        "outs": [None if n in own else shared((warpgroups, ROWS, size)) for n, size in enumerate(results)],
        "lines": [plgpu.SMEM((warpgroups, ROWS), jnp.float32)] * vectors,
        "here": plgpu.Barrier(num_arrivals=len(rows), num_barriers=warpgroups),
        "turn": plgpu.Barrier(num_arrivals=warpgroups) if steps.in_turn else None,
        "factor": shared((warpgroups, ROWS, inner)) if plan.interpret else None,
    }

    def kernel(*refs: Any, **kept: Any) -> None:
        row_refs, column_refs, ins, (entry_ref, count_ref, *outs) = _split(refs, counted)
        i, n, b, w = (jax.lax.axis_index(name) for name in ("i", "n", "b", "warpgroup"))
        i = jnp.int32(counts.shape[1] - 1) - i if not plan.by_key else i  # of causal masks, the longest rows first
        first, sequence = i * plan.rows + w * ROWS, 0 if counts.shape[0] == 1 else b
        grid = (count_ref[sequence, i],)
        grid = (jnp.int32(group), *grid) if plan.by_key else grid

        def entry(ids: Sequence[Any]) -> Any:
            return entry_ref[sequence, i, ids[-1]]

        def index(*ids: Any) -> tuple:
            head = n * group + ids[0] if plan.by_key else jax.lax.div(n, jnp.int32(group))
            return b, jax.lax.shift_right_logical(entry(ids), jnp.int32(1)), head, jnp.int32(0)

        def turn() -> None:
            if steps.in_turn:
                plgpu.barrier_arrive(kept["turn"])
                plgpu.barrier_wait(kept["turn"])

        def step(ids: Sequence[Any] | None, released: Sequence[Any]) -> Step:
            block = None if ids is None else index(*ids)[1] * inner
            partial = None if ids is None else (entry(ids) & 1) == 1
            head = (b, n * group + ids[0] if plan.by_key and ids is not None else n)
            factor = None if kept["factor"] is None else kept["factor"].at[w]
            return Step(plan, scores, ins, head, (first, block), partial, released, turn, factor)

        def compute(run: Callable) -> None:
            own_rows = [ref.at[w] for ref in kept["rows"]]
            for ref, smem in zip(row_refs, own_rows, strict=True):
                here = ref.at[b, pl.ds(first, ROWS), n]
                plgpu.copy_gmem_to_smem(here, smem, kept["here"].at[w], oob_mode=plgpu.OOBFillMode.ZEROS)
            plgpu.barrier_wait(kept["here"].at[w])
            carry = steps.start(step(None, ()))
            if steps.in_turn:
                pl.when(w == 1)(turn)
            carry = run(carry)
            if steps.in_turn:
                pl.when(w == 0)(turn)
            found, lines = steps.finish(step(None, ()), carry)
            places = [kept["rows"][own[k]] if k in own else kept["outs"][k] for k in range(len(results))]
            for place, x in zip((*places, *kept["lines"]), (*found, *lines), strict=True):
                place.at[w][...] = x.astype(place.dtype)
            plgpu.commit_smem()
            for place, out in zip(places, outs, strict=False):
                plgpu.copy_smem_to_gmem(place.at[w], out.at[b, pl.ds(first, ROWS), n])
            for place, out in zip(kept["lines"], outs[len(places) :], strict=True):
                plgpu.copy_smem_to_gmem(place.at[w], out.at[b, n, pl.ds(first, ROWS)])
            plgpu.wait_smem_to_gmem(0)

        def add(ids: Sequence[Any], *refs: Any) -> Any:
            blocks, released, carry = refs[: len(columns)], refs[len(columns) : -1], refs[-1]
            return steps.add(step(ids, released), [ref.at[w] for ref in kept["rows"]], blocks, carry)

        plgpu.emit_pipeline_warp_specialized(
            add,
            grid=grid,
            in_specs=[
                plgpu.BlockSpec((None, inner, None, x.shape[3]), index, transforms=shared((1,)).transforms)
                for x in columns
            ],
            max_concurrent_steps=_stages(scratch, [inner * x.shape[3] for x in columns], dtype),
            num_compute_wgs=warpgroups,
            memory_registers=MEMORY_REGISTERS,
            wg_axis="warpgroup",
            manual_consumed_barriers=True,
            compute_context=compute,
        )(*column_refs)

    types = [jax.ShapeDtypeStruct((B, length, heads, size), dtype) for size in results]
    types += [jax.ShapeDtypeStruct((B, heads, counts.shape[1] * plan.rows), jnp.float32)] * vectors
    program = plgpu.kernel(
        kernel,
        out_type=types,
        scratch_types=scratch,
        grid=(heads, counts.shape[1], B),
        grid_names=("n", "i", "b"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plan.interpret or None,
    )
    with jax.enable_x64(False):  # Pallas' pipeline counts in int32
        found = program(*rows, *columns, *plan.operands.arrays, jnp.asarray(entries), jnp.asarray(counts))
    return list(found[: len(results)]), list(found[len(results) :])


def _split(refs: Sequence[Any], counts: Sequence[int]) -> list[Sequence[Any]]:
    parts = []
    for count in counts:
        parts, refs = [*parts, refs[:count]], refs[count:]
    return [*parts, refs]


def _stages(scratch: Mapping[str, Any], columns: Sequence[int], dtype: Any) -> int:
    """How many blocks of columns to hold in shared memory."""
    kept = sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in (*scratch["rows"], *scratch["lines"]))
    kept += sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in scratch["outs"] if x is not None)
    return min(STAGES, (SHARED - kept) // (sum(columns) * jnp.dtype(dtype).itemsize))
