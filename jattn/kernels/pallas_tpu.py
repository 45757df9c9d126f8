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

from jattn.batching import canonical
from jattn.kernels import Fold, Program, Unsupported
from jattn.kernels.blockwise import accumulate, staged_fold
from jattn.kernels.pallas_fold import LONGEST, fold_blocks
from jattn.kernels.tiles import unsupported_reason
from jattn.kernels.tpu_program import SMALL, Plan, Steps, block_sizes, call, make_plan
from jattn.kernels.tpu_tiles import MOST, TILE, Scores, Tile
from jattn.online_softmax import differentiable, log_sum_exp, of_sums
from jattn.placement import on_each_device
from jattn.request import Request

ENTRIES = 2**17  # blocks in scalar memory: half a mebibyte
LEAST = jnp.finfo(jnp.float32).min


@dataclasses.dataclass(frozen=True)
class PallasTPU:
    """``implementation=``: ``"pallas_tpu"`` with your own settings.

    ``block_sizes``: queries and keys per block, multiples of 128; ``jattn.kernels.tpu_program`` sets the default.
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
        reason = unsupported_reason(request, (jnp.float32, jnp.bfloat16))
        if reason is not None:
            return reason
        T, S = request.query.shape[1], request.key.shape[1]
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
        return differentiable(forward, _plain_accumulate, canonical(request), self, backward=backward)

    def slots(self, length: Any) -> None:
        """None: each slot holds its own token."""
        return None

    def fold_reason(self, request: Request, fold: Fold) -> str | None:
        """The first reason against ``fold``, or None."""
        length = request.query.shape[1] + request.key.shape[1]
        reason = self.unsupported_reason(dataclasses.replace(request, value=request.key))
        if reason is None and length > LONGEST and fold.named("keys", "offsets"):
            return f"sums by key or by offset take T + S up to {LONGEST}, got {length}"
        return reason

    def fold(self, request: Request, fold: Fold) -> dict[str, jax.Array]:
        """As in ``jattn.kernels.FoldsWeights``. Its derivatives are blockwise's."""
        reason = self.fold_reason(request, fold)
        if reason is not None:
            raise Unsupported(f"implementation={self!r} cannot do this: {reason}")
        return staged_fold(fold_on_tpu, request, fold, self)

    def map_parts(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[jax.Array, str]) -> Any:
        """``jattn.placement.on_each_device``."""
        return on_each_device(fn, request, out_axes, *extra)

    def program(self, request: Request, divided: bool) -> Program:
        """As in ``jattn.kernels.InBlocks``."""
        return forward, backward, (self,)


def fold_on_tpu(platform: str, request: Request, fold: Fold, settings: PallasTPU) -> dict[str, jax.Array]:
    """``PallasTPU.fold`` traced for ``platform``; the request is canonical."""
    T, S = request.query.shape[1], request.key.shape[1]
    sizes = settings.block_sizes or block_sizes(T, S, SMALL)
    return fold_blocks(make_plan(platform, request, sizes, settings.interpret), fold)


def _plain_accumulate(platform: str, request: Request, row_max: jax.Array, settings: PallasTPU) -> Any:
    return accumulate(platform, request, row_max, None, False)


def forward(platform: str, request: Request, settings: PallasTPU) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``out [B,T,N,D]``, and ``row_max`` and ``row_sum [B,T,N]`` as in ``jattn.online_softmax``."""
    plan = make_plan(platform, request, settings.block_sizes, settings.interpret)
    B, T, N, _ = request.query.shape
    D, rows, scores = max(request.value.shape[3], 1), plan.size[0], plan.scores()
    value = plan.operands.add("keys", plan.value())

    def start(_: tuple, acc: Any, row_max: Any, row_sum: Any) -> None:
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
    types = [("queries", x) for x in (plan.type_of((B, N, D, plan.padded[0]), request.value.dtype), row, row)]
    scratch = [((size, rows), jnp.float32) for size in (D, 1, 1)]
    out, row_max, row_sum = call(plan, scores, "forward", types, scratch, Steps(start, add, finish))
    out = jnp.transpose(out, (0, 3, 1, 2))[:, :T, :, : request.value.shape[3]]
    row_max, row_sum = (jnp.transpose(x[:, :, 0, :T], (0, 2, 1)) for x in (row_max, row_sum))
    if request.query.dtype == jnp.float32:
        return out, row_max, row_sum
    # With the lse for row_max, the cotangent of acc is that of the output, in the dtype that the kernels multiply in.
    lse, seen = log_sum_exp(row_max, row_sum), row_sum != 0.0  # NaN counts as seen
    return out, jnp.where(seen, lse, LEAST), seen.astype(jnp.float32)


def backward(platform: str, args: tuple, cotangents: Sequence[Any]) -> list[jax.Array]:
    """The cotangents of query, key and value (``jattn.online_softmax.differentiable``).

    With ``p = exp(score - row_max)``: ``d_value = sum_q p d_acc``, ``d_score = p (d_acc · value + d_row_sum)``.
    """
    request, results, settings = args
    row_max, sums = results[1], of_sums(results, cotangents)
    plan = functools.partial(make_plan, platform, request, settings.block_sizes, settings.interpret)
    return [_d_query(plan(), row_max, sums), *_d_key_and_value(plan(), row_max, sums)]


def _score_tangents(
    plan: Plan, scores: Scores, row_max: jax.Array, cotangents: Sequence[jax.Array]
) -> tuple[Callable, int]:
    """``(tile, ins) -> (p, d_acc, d_score)`` of a tile, the last before scale and bias; and the number of ``d_acc``."""
    d_acc, d_row_sum = cotangents
    add = plan.operands.add
    if d_acc.shape[3] == 0:  # as Plan.value
        d_acc = jnp.zeros((*d_acc.shape[:3], 1), d_acc.dtype)
    value, d_out = add("keys", plan.value()), add("queries", plan.queries(d_acc, plan.request.query.dtype))
    maximum, d_sum = (add("queries", plan.queries(x[..., None], jnp.float32)) for x in (row_max, d_row_sum))

    def of_tile(tile: Tile, ins: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        own_d_acc = ins[d_out][0, 0, :, tile.queries]
        p = jnp.exp(tile.scores() - ins[maximum][0, 0, :, tile.queries])
        d_score = scores.product(tile.of_keys(ins[value]), own_d_acc, 1, 0) + ins[d_sum][0, 0, :, tile.queries]
        return p, own_d_acc, tile.through_score_mod(p * d_score)

    return of_tile, d_out


def _d_query(plan: Plan, row_max: jax.Array, cotangents: Sequence[jax.Array]) -> jax.Array:
    B, T, N, H = plan.request.query.shape
    scores = plan.scores()
    of_tile, _ = _score_tangents(plan, scores, row_max, cotangents)

    def start(_: tuple, acc: Any, d_scores: Any) -> None:
        acc[...] = jnp.zeros_like(acc)

    def add(tiles: Any, ins: Any, acc: Any, d_scores: Any) -> None:
        for tile in tiles:
            d_score = of_tile(tile, ins)[2]
            if tile.guarded:
                acc[:, tile.queries] += scores.product(tile.k, d_score, 0, 0)
            else:
                d_scores[tile.keys, tile.queries] = d_score.astype(d_scores.dtype)

    def after(_: tuple, guarded: bool, ins: Any, acc: Any, d_scores: Any) -> None:
        if not guarded:  # one product of the block keeps the matrix unit a quarter busier than one of each tile
            acc[...] += scores.product(ins[scores.key][0, 0], d_scores[...], 0, 0)

    def finish(ins: Any, out: Any, acc: Any, _: Any) -> None:
        out[0, 0] = (acc[...] * scores.scale_of(ins)).astype(out.dtype)

    types = [("queries", plan.type_of((B, N, H, plan.padded[0]), plan.request.query.dtype))]
    scratch = [((H, plan.size[0]), jnp.float32), (plan.size[::-1], plan.request.query.dtype)]
    (d_query,) = call(plan, scores, "d_query", types, scratch, Steps(start, add, finish, after=after))
    return jnp.transpose(d_query, (0, 3, 1, 2))[:, :T]


def _d_key_and_value(plan: Plan, row_max: jax.Array, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
    (B, S, K, H), D = plan.request.key.shape, max(plan.request.value.shape[3], 1)
    scores = plan.scores()
    of_tile, d_out = _score_tangents(plan, scores, row_max, cotangents)

    def start(_: tuple, d_key: Any, d_value: Any, ps: Any, d_scores: Any) -> None:
        d_key[...], d_value[...] = jnp.zeros_like(d_key), jnp.zeros_like(d_value)

    def add(tiles: Any, ins: Any, d_key: Any, d_value: Any, ps: Any, d_scores: Any) -> None:
        for tile in tiles:
            p, d_acc, d_score = of_tile(tile, ins)
            if tile.guarded:
                d_value[tile.keys] += scores.product(p, d_acc, 1, 1)
                d_key[tile.keys] += scores.product(d_score, tile.q, 1, 1)
            else:
                at = tile.keys, tile.queries
                ps[at], d_scores[at] = p.astype(ps.dtype), d_score.astype(d_scores.dtype)

    def after(_: tuple, guarded: bool, ins: Any, d_key: Any, d_value: Any, ps: Any, d_scores: Any) -> None:
        if not guarded:  # a v6e's matrix unit takes sums over 256: a product of each tile would fill half of it
            d_value[...] += scores.product(ps[...], ins[d_out][0, 0], 1, 1)
            d_key[...] += scores.product(d_scores[...], ins[scores.query][0, 0], 1, 1)

    def finish(ins: Any, out_key: Any, out_value: Any, d_key: Any, d_value: Any, ps: Any, d_scores: Any) -> None:
        out_key[0, 0] = (d_key[...] * scores.scale_of(ins)).astype(out_key.dtype)
        out_value[0, 0] = d_value[...].astype(out_value.dtype)

    dtype, length, columns = plan.request.key.dtype, plan.padded[1], plan.size[1]
    types = [("keys", plan.type_of((B, K, length, size), dtype)) for size in (H, D)]
    scratch = [((columns, size), jnp.float32) for size in (H, D)] + [(plan.size[::-1], dtype)] * 2
    results = call(plan, scores, "d_key_and_value", types, scratch, Steps(start, add, finish, after=after))
    d_key, d_value = (jnp.transpose(x, (0, 2, 1, 3))[:, :S] for x in results)
    return [d_key, d_value[..., : plan.request.value.shape[3]]]
