"""``"pallas_tpu"``: our own TPU kernels, for any mask and score function of elementwise operations.

Forward and backward as in FlashAttention-2 (https://arxiv.org/abs/2307.08691), with the derivative rule of
``jattn.online_softmax``: the backward kernels take the cotangents of ``acc`` and ``row_sum``, so that of the lse is
exact. Forward mode, higher orders and the gradients of arrays besides query, key and value are blockwise's.

Scores are transposed, ``[keys, queries]``. Queries and their softmax sums then lie along the lanes of a register: the
maximum and the sum over keys are elementwise operations, and the lse takes 4 bytes per query and head. A grid step
computes one block of a list in scalar memory, so empty blocks are neither read nor computed, in tiles of 128 keys by
128 queries, which stay in registers.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jattn.batching import canonical
from jattn.blocks import all_seen, choose_size
from jattn.kernels import Program, Unsupported
from jattn.kernels.blockwise import accumulate, block_table, mask_arguments
from jattn.kernels.tpu_tiles import MOST, TILE, Operands, Scores, Tile, schedule, split_entry
from jattn.online_softmax import differentiable, log_sum_exp
from jattn.placement import is_typed, may_be_divided, on_each_device
from jattn.request import Request
from jattn.separate import reason_against
from jattn.staged import ByHand
from jattn.tables import pad_end

LARGE, SMALL = 1024, 512  # queries and keys of a block
ENTRIES = 2**17  # blocks in scalar memory: half a mebibyte
LARGEST_DIM = 256
LEAST = jnp.finfo(jnp.float32).min
NAME = "pallas_tpu"


@dataclasses.dataclass(frozen=True)
class PallasTPU:
    """``implementation=``: ``"pallas_tpu"`` with your own settings.

    ``block_sizes``: queries and keys per block, multiples of 128; ``block_sizes`` of this module sets the default.
    ``interpret``: run on any platform in Pallas' interpreter, for tests; True, or a ``pltpu.InterpretParams``.
    """

    block_sizes: tuple[int, int] | None = None
    interpret: Any = False

    def __post_init__(self):
        sizes = self.block_sizes
        if sizes is not None and (len(sizes) != 2 or any(size < 1 or size % TILE for size in sizes)):
            raise ValueError(
                f"block_sizes must be two positive multiples of {TILE} (of queries, of keys), got {sizes!r}"
            )

    def unsupported_reason(self, request: Request) -> str | None:
        """The first reason against the kernels, or None."""
        (B, T, _, H), (S, _), value = request.query.shape, request.key.shape[1:3], request.value
        dtype, dim = request.query.dtype, max(H, 0 if value is None else value.shape[3])
        empty = value is None or 0 in (*request.query.shape, *request.key.shape, *value.shape)
        lengths_known = all(isinstance(x, int) for x in (B, T, S))
        reasons = [
            (dtype not in (jnp.float32, jnp.bfloat16), f"it takes float32 and bfloat16, not {dtype}"),
            (not lengths_known, "it takes no symbolic shapes"),
            (empty, "it takes no empty arrays"),
            (dim > LARGEST_DIM, f"head_dim must be at most {LARGEST_DIM}, got {dim}"),
            (request.dropout is not None, "it takes no dropout"),
            (
                may_be_divided(request) and not is_typed(request.query),
                "the arrays may lie on several devices: use jax.shard_map or a mesh of AxisType.Explicit",
            ),
        ]  # fmt: skip
        reason = next((reason for applies, reason in reasons if applies), None) or reason_against(
            request.masks, request.score_mod
        )
        if reason is not None:
            return reason
        rows, columns = (
            -(-length // size) for length, size in zip((T, S), self.block_sizes or (SMALL, SMALL), strict=True)
        )
        too_many = max(rows, columns) > MOST or rows * columns > ENTRIES
        return f"{rows} by {columns} blocks are too many for scalar memory" if too_many else None

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``; O(T + S) memory besides inputs and outputs, forward and backward."""
        reason = self.unsupported_reason(request)
        if reason is not None:  # given as an object, which is not asked before
            raise Unsupported(f"implementation={self!r} cannot do this: {reason}")
        return on_each_device(self._run, request, ("btnd", "btn"))

    def _run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        return differentiable(forward, _RULE, canonical(request), self)

    def program(self, request: Request, divided: bool) -> Program:
        """As in ``jattn.kernels.InBlocks``."""
        return forward, backward, (self,)


def block_sizes(T: int, S: int, largest: int = LARGE) -> tuple[int, int]:
    """Queries and keys per block: each length in the fewest equal parts of at most ``largest``, in multiples of 128.

    ``SMALL`` blocks are used if they skip enough of the matrix to pay off, as in ``jattn.blocks.choose_blocks``.
    """
    parts = [-(-length // largest) for length in (T, S)]
    rows, columns = (-(-length // (count * TILE)) * TILE for length, count in zip((T, S), parts, strict=True))
    return rows, columns


def _plain_accumulate(platform: str, request: Request, row_max: jax.Array, settings: PallasTPU) -> Any:
    return accumulate(platform, request, row_max, None, False)


@dataclasses.dataclass
class _Plan:
    """One kernel's call: its blocks and what it reads."""

    request: Request
    settings: PallasTPU
    size: tuple[int, int]
    tables: tuple[Any, Any]  # any_visible and all_visible [B|1, blocks of T, blocks of S]
    operands: Operands

    @property
    def padded(self) -> tuple[int, int]:
        """T and S in whole blocks."""
        T, S = (count * size for count, size in zip(self.tables[0].shape[1:], self.size, strict=True))
        return T, S

    def queries(self, array: jax.Array, dtype: Any) -> jax.Array:
        """``[B,T,N,X] -> [B,N,X,T]``, padded."""
        array = jnp.transpose(array, (0, 2, 3, 1)).astype(dtype)
        return pad_end(array, (*array.shape[:3], self.padded[0]))

    def keys(self, array: jax.Array) -> jax.Array:
        """``[B,S,K,X] -> [B,K,S,X]``, padded."""
        array = jnp.transpose(array, (0, 2, 1, 3))
        return pad_end(array, (*array.shape[:2], self.padded[1], array.shape[3]))

    def type_of(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """A result's type, which inside ``jax.shard_map`` must say how it varies: not, as in all of ``staged``."""
        return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(self.request.query).manual_axis_type)

    def scores(self) -> Scores:
        """The scores, with their arrays among the operands."""
        request = self.request
        q, k = self.queries(request.query, request.query.dtype), self.keys(request.key)
        return Scores.of(request, self.operands, q, k, all_seen(*mask_arguments(request)))


def _plan(platform: str, request: Request, settings: PallasTPU) -> _Plan:
    if platform != "tpu" and not settings.interpret:
        raise Unsupported(f"implementation={NAME!r} cannot do this: it needs a TPU, not {platform}")
    T, S = request.query.shape[1], request.key.shape[1]
    tables = functools.partial(block_table, request)
    size, found = settings.block_sizes, None
    if size is None:
        size, found = choose_size(tables, block_sizes(T, S), block_sizes(T, S, SMALL))
    operands = Operands(size, request.query.shape[2] // request.key.shape[2])
    return _Plan(request, settings, size, tables(size) if found is None else found, operands)


def forward(platform: str, request: Request, settings: PallasTPU) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``out [B,T,N,D]``, and ``row_max`` and ``row_sum [B,T,N]`` as in ``jattn.online_softmax``."""
    plan = _plan(platform, request, settings)
    B, T, N, _ = request.query.shape
    D, rows, scores = request.value.shape[3], plan.size[0], plan.scores()
    value = plan.operands.add("keys", plan.keys(request.value))

    def start(acc: Any, row_max: Any, row_sum: Any) -> None:
        acc[...] = jnp.zeros_like(acc)
        row_max[...] = jnp.full_like(row_max, LEAST)
        row_sum[...] = jnp.zeros_like(row_sum)

    def add(tiles: Any, ins: Any, acc: Any, row_max: Any, row_sum: Any) -> None:
        for tile in tiles:
            s, at = tile.scores(), (slice(None), tile.queries)
            new_max = jnp.maximum(row_max[at], jnp.max(s, axis=0, keepdims=True))
            rescale, exponentials = jnp.exp(row_max[at] - new_max), jnp.exp(s - new_max)
            row_max[at] = new_max
            row_sum[at] = row_sum[at] * rescale + jnp.sum(exponentials, axis=0, keepdims=True)
            acc[at] = acc[at] * rescale + scores.product(tile.of_keys(ins[value]), exponentials, 0, 0)

    def finish(ins: Any, out: Any, out_max: Any, out_sum: Any, acc: Any, row_max: Any, row_sum: Any) -> None:
        # The largest score adds 1 to row_sum, so only a row that sees nothing is below 1.
        out[0, 0] = (acc[...] * (1.0 / jnp.maximum(row_sum[...], 1.0))).astype(out.dtype)
        out_max[0, 0], out_sum[0, 0] = row_max[...], row_sum[...]

    row = plan.type_of((B, N, 1, plan.padded[0]), jnp.float32)
    types = plan.type_of((B, N, D, plan.padded[0]), request.value.dtype), row, row
    scratch = [((size, rows), jnp.float32) for size in (D, 1, 1)]
    out, row_max, row_sum = _call(plan, scores, "forward", "queries", types, scratch, start, add, finish)
    out = jnp.transpose(out, (0, 3, 1, 2))[:, :T]
    row_max, row_sum = (jnp.transpose(x[:, :, 0, :T], (0, 2, 1)) for x in (row_max, row_sum))
    if request.query.dtype == jnp.float32:
        return out, row_max, row_sum
    # With the lse for row_max, the cotangent of acc is that of the output, in the dtype that the kernels multiply in.
    lse, seen = log_sum_exp(row_max, row_sum), row_sum > 0.0
    return out, jnp.where(seen, lse, LEAST), seen.astype(jnp.float32)


def backward(platform: str, args: tuple, cotangents: list[jax.Array]) -> list[jax.Array]:
    """The cotangents of query, key and value, from those of ``acc [B,T,N,D]`` and ``row_sum [B,T,N]``.

    With ``p = exp(score - row_max)``: ``d_value = sum_q p d_acc``, ``d_score = p (d_acc · value + d_row_sum)``.
    """
    request, row_max, settings = args
    return [
        _d_query(_plan(platform, request, settings), row_max, cotangents),
        *_d_key_and_value(_plan(platform, request, settings), row_max, cotangents),
    ]


_RULE = ByHand(_plain_accumulate, vjp=backward, count=3)


def _score_tangents(plan: _Plan, scores: Scores, row_max: jax.Array, cotangents: list[jax.Array]) -> Callable:
    """``(tile, ins) -> (p, d_acc, d_score)`` of a tile, the last before scale and bias."""
    d_acc, d_row_sum = cotangents
    add = plan.operands.add
    value, d_out = add("keys", plan.keys(plan.request.value)), add("queries", plan.queries(d_acc, d_acc.dtype))
    maximum, d_sum = (add("queries", plan.queries(x[..., None], jnp.float32)) for x in (row_max, d_row_sum))

    def of_tile(tile: Tile, ins: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        own_d_acc = ins[d_out][0, 0, :, tile.queries]
        p = jnp.exp(tile.scores() - ins[maximum][0, 0, :, tile.queries])
        d_score = scores.product(tile.of_keys(ins[value]), own_d_acc, 1, 0) + ins[d_sum][0, 0, :, tile.queries]
        return p, own_d_acc, tile.through_score_mod(p * d_score)

    return of_tile


def _d_query(plan: _Plan, row_max: jax.Array, cotangents: list[jax.Array]) -> jax.Array:
    B, T, N, H = plan.request.query.shape
    scores = plan.scores()
    of_tile = _score_tangents(plan, scores, row_max, cotangents)

    def start(acc: Any, _: Any) -> None:
        acc[...] = jnp.zeros_like(acc)

    def add(tiles: Any, ins: Any, acc: Any, d_scores: Any) -> None:
        guarded = False
        for tile in tiles:
            guarded, d_score = tile.guarded, of_tile(tile, ins)[2]
            if guarded:
                acc[:, tile.queries] += scores.product(tile.k, d_score, 0, 0)
            else:
                d_scores[tile.keys, tile.queries] = d_score.astype(d_scores.dtype)
        if not guarded:  # one product of the block keeps the matrix unit a quarter busier than one of each tile
            acc[...] += scores.product(ins[scores.key][0, 0], d_scores[...], 0, 0)

    def finish(ins: Any, out: Any, acc: Any, _: Any) -> None:
        out[0, 0] = (acc[...] * scores.scale_of(ins)).astype(out.dtype)

    types = [plan.type_of((B, N, H, plan.padded[0]), plan.request.query.dtype)]
    scratch = [((H, plan.size[0]), jnp.float32), (plan.size[::-1], plan.request.query.dtype)]
    (d_query,) = _call(plan, scores, "d_query", "queries", types, scratch, start, add, finish)
    return jnp.transpose(d_query, (0, 3, 1, 2))[:, :T]


def _d_key_and_value(plan: _Plan, row_max: jax.Array, cotangents: list[jax.Array]) -> list[jax.Array]:
    (B, S, K, H), D = plan.request.key.shape, plan.request.value.shape[3]
    scores = plan.scores()
    of_tile = _score_tangents(plan, scores, row_max, cotangents)

    def start(d_key: Any, d_value: Any) -> None:
        d_key[...], d_value[...] = jnp.zeros_like(d_key), jnp.zeros_like(d_value)

    def add(tiles: Any, ins: Any, d_key: Any, d_value: Any) -> None:
        for tile in tiles:
            p, d_acc, d_score = of_tile(tile, ins)
            d_value[tile.keys] += scores.product(p, d_acc, 1, 1)
            d_key[tile.keys] += scores.product(d_score, tile.q, 1, 1)

    def finish(ins: Any, out_key: Any, out_value: Any, d_key: Any, d_value: Any) -> None:
        out_key[0, 0] = (d_key[...] * scores.scale_of(ins)).astype(out_key.dtype)
        out_value[0, 0] = d_value[...].astype(out_value.dtype)

    dtype, length, columns = plan.request.key.dtype, plan.padded[1], plan.size[1]
    types = [plan.type_of((B, K, length, size), dtype) for size in (H, D)]
    scratch = [((columns, size), jnp.float32) for size in (H, D)]
    results = _call(plan, scores, "d_key_and_value", "keys", types, scratch, start, add, finish)
    return [jnp.transpose(x, (0, 2, 1, 3))[:, :S] for x in results]


def _call(
    plan: _Plan, scores: Scores, name: str, kind: str, types: Sequence[jax.ShapeDtypeStruct], scratch: Sequence[Any],
    start: Callable, add: Callable, finish: Callable,
) -> Any:  # fmt: skip
    """The results of one kernel, which have one block for each block of queries, or of keys.

    Args:
        kind: ``"queries"`` or ``"keys"``: what the results belong to; of the latter, per key head.
        types: the results'.
        scratch: shapes and dtypes of what the kernel keeps from block to block of one result.
        start: ``(*scratch)``, before the first block.
        add: ``(tiles, ins, *scratch)`` for each block that is not empty.
        finish: ``(ins, *results, *scratch)``, after the last.
    """
    # Imported when a kernel is traced: it takes as long as half of jattn.
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    (B, _, N, _), K, by_key = plan.request.query.shape, plan.request.key.shape[2], kind == "keys"
    group, operands = N // K, plan.operands
    table = schedule(*plan.tables, by_key)
    entries, shared = table.shape[1], table.shape[0] == 1
    # Both branches are compiled, which takes longer, unless the tables are known.
    known = isinstance(table, np.ndarray)
    occur = (plan.tables[1].any(), (plan.tables[0] & ~plan.tables[1]).any()) if known else (True, True)

    def locate(ids: Sequence[Any], table_ref: Any) -> tuple:
        n = ids[1] * group + ids[3] if by_key else ids[1]
        entry = table_ref[ids[2] if shared else ids[0] * entries + ids[2]]
        return ids[0], n, *split_entry(entry, by_key)

    def spec(kind: str, shape: tuple[int, ...]) -> Any:
        if kind == "scalars":
            return pl.BlockSpec(memory_space=pltpu.SMEM)
        return pl.BlockSpec(
            operands.block(kind, shape), lambda *args: operands.index(kind, shape, *locate(args[:-1], args[-1])[:4])
        )

    def kernel(table_ref: Any, *refs: Any) -> None:
        ids = [pl.program_id(axis) for axis in range(len(grid))]
        b, n, i, j, partial, full, first, last = locate(ids, table_ref)
        ins, outs, kept = refs[:count], refs[count : count + len(types)], refs[count + len(types) :]
        if by_key:  # a key's head is done after all query heads of its group
            first, last = first & (ids[3] == 0), last & (ids[3] == group - 1)
        pl.when(first)(lambda: start(*kept))
        for masked, listed, occurs in ((False, full, occur[0]), (True, partial, occur[1])):
            if occurs:
                pl.when(listed)(lambda masked=masked: add(scores.tiles(ins, (i, j), (b, n), masked), ins, *kept))
        pl.when(last)(lambda: finish(ins, *outs, *kept))

    grid, count = (B, K, entries, group) if by_key else (B, N, entries), len(operands.arrays)
    call = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=grid,
            in_specs=[spec(kind, array.shape) for kind, array in operands.arrays],
            out_specs=[spec(kind, result.shape) for result in types],
            scratch_shapes=[pltpu.VMEM(*shape_and_dtype) for shape_and_dtype in scratch],
        ),
        out_shape=types,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=[pltpu.PARALLEL, pltpu.PARALLEL, *[pltpu.ARBITRARY] * (len(grid) - 2)]
        ),
        interpret=plan.settings.interpret,
        name=f"jattn_{name}",
    )
    return call(jnp.asarray(table).reshape(-1), *(array for _, array in operands.arrays))
