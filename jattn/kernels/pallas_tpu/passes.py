"""The kernels of ``pallas_tpu``: forward, backward and reduction.

Forward and backward passes follow FlashAttention-2 (https://arxiv.org/abs/2307.08691), with the derivative rule of
``jattn._blocks.backward``: the backward kernels take the cotangents of ``acc`` and ``row_sum``, so the lse's cotangent
is exact. Blockwise computes forward mode, higher orders and the gradients of arrays other than query, key and value.

Scores are transposed, ``[keys, queries]``. Queries and their softmax sums then lie along the lanes of a register: the
maximum and the sum over keys are elementwise operations, and the lse takes 4 bytes per query and head. A grid step
computes one block from a list in scalar memory, so empty blocks are neither read nor computed. Blocks are computed in
tiles of 128 keys by 256 queries, which stay in registers.
"""

import functools
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jattn._blocks.backward import balanced, is_whole, of_sums
from jattn._blocks.online_softmax import log_sum_exp
from jattn._blocks.reduction import Reduction
from jattn._core.call import Call
from jattn.kernels.kernel import Results, narrowed
from jattn.kernels.pallas_tiles import Ref, rounded
from jattn.kernels.pallas_tpu import PallasTPU
from jattn.kernels.pallas_tpu.block_sums import reduce_blocks
from jattn.kernels.pallas_tpu.pipeline import Steps, TPUPlan, call_kernel, make_plan
from jattn.kernels.pallas_tpu.schedule import SMALL, TILE, WIDE_TILE, block_sizes
from jattn.kernels.pallas_tpu.tile import Scores, Tile

LEAST = jnp.finfo(jnp.float32).min


def reduce(call: Call, reduction: Reduction, settings: PallasTPU) -> dict[str, jax.Array]:
    """The sums of ``reduction``, as in ``jattn.kernels.ReducesWeights``."""
    T, S = call.query.shape[1], call.key.shape[1]
    sizes = settings.block_sizes or block_sizes(T, S, SMALL)
    return reduce_blocks(make_plan(call, settings, sizes, TILE), reduction)


def forward(call: Call, settings: PallasTPU) -> Results:
    """``out [B,T,N,D]``, and ``row_max`` and ``row_sum [B,T,N]`` as in ``jattn._blocks.online_softmax``."""
    plan = make_plan(call, settings, settings.block_sizes, WIDE_TILE)
    D, rows, scores = max(call.value.shape[3], 1), plan.size[0], plan.scores()
    value = plan.add_value()

    def start(_: tuple, acc: Ref, row_max: Ref, row_sum: Ref) -> None:
        acc[...] = jnp.zeros(acc.shape, acc.dtype)
        row_max[...] = jnp.full_like(row_max, LEAST)
        row_sum[...] = jnp.zeros_like(row_sum)

    def add(tiles: Iterable[Tile], ins: Sequence[Ref], acc: Ref, row_max: Ref, row_sum: Ref) -> None:
        for tile in tiles:
            s, at = tile.scores(), (slice(None), tile.queries)
            new_max = jnp.maximum(row_max[at], jnp.max(s, axis=0, keepdims=True))
            rescale, exponentials = jnp.exp(row_max[at] - new_max), jnp.exp(s - new_max)
            row_max[at] = new_max
            row_sum[at] = row_sum[at] * rescale + jnp.sum(exponentials, axis=0, keepdims=True)
            acc[at] = acc[at] * rescale + scores.product(tile.of_keys(ins[value]), exponentials, 0, 0)

    def finish(_: Sequence[Ref], acc: Ref, row_max: Ref, row_sum: Ref) -> Sequence[jax.Array]:
        # The largest score adds 1 to row_sum, so only a row that sees nothing has a sum below 1.
        return acc[...] * (1.0 / jnp.maximum(row_sum[...], 1.0)), row_max[...], row_sum[...]

    results = [plan.result("queries", D, call.value.dtype), *[plan.result("queries", 1, jnp.float32)] * 2]
    scratch = [((size, rows), jnp.float32) for size in (D, 1, 1)]
    outputs = call_kernel(plan, scores, "forward", results, scratch, Steps(start, add, finish))
    out, row_max, row_sum = (plan.restored(*both) for both in zip(results, outputs, strict=True))
    out, row_max, row_sum = out[..., : call.value.shape[3]], row_max[..., 0], row_sum[..., 0]
    if call.query.dtype == jnp.float32:
        return out, row_max, row_sum
    # With the lse as row_max, the cotangent of acc equals the output's, in the dtype in which the kernels multiply.
    lse, seen = log_sum_exp(row_max, row_sum), row_sum != 0.0  # NaN counts as seen
    return out, jnp.where(seen, lse, LEAST), seen.astype(jnp.float32)


def backward(
    call: Call, results: Results, cotangents: Sequence[jax.Array | None], settings: PallasTPU
) -> list[jax.Array]:
    """The cotangents of query, key and value, by the formulas of ``jattn._blocks.backward.of_sums``."""
    dtype, whole, call = call.query.dtype, is_whole(call), narrowed(call)
    out, row_max, row_sum, *_ = results
    # 1, or 0 for a row that sees nothing, whose cotangent of acc is irrelevant. That cotangent then needs no new array.
    row_sum = row_sum if call.query.dtype == jnp.float32 else jnp.ones_like(row_sum)
    sums = of_sums((out, row_max, row_sum), cotangents)
    plan = functools.partial(make_plan, call, settings, settings.block_sizes, WIDE_TILE)
    d_query, *totals = _d_query(plan(), row_max, sums, dtype, whole)
    of_qkv = [d_query, *_d_key_and_value(plan(), row_max, sums)]
    return balanced(call, (out, row_max, row_sum), cotangents, of_qkv, *totals) if totals else of_qkv


def _score_tangents(
    plan: TPUPlan, scores: Scores, row_max: jax.Array, cotangents: Sequence[jax.Array]
) -> tuple[Callable[[Tile, Sequence[Ref]], tuple[jax.Array, jax.Array, jax.Array]], int]:
    """``(tile, ins) -> (p, d_acc, d_score)`` of a tile, before scale and bias; and the number of ``d_acc``."""
    d_acc, d_row_sum = cotangents
    if d_acc.shape[3] == 0:  # as in Plan.value
        d_acc = jnp.zeros((*d_acc.shape[:3], 1), d_acc.dtype)
    value, d_out = plan.add_value(), plan.add_queries(d_acc, plan.call.query.dtype)
    maximum, d_sum = (plan.add_queries(x[..., None], jnp.float32) for x in (row_max, d_row_sum))

    def of_tile(tile: Tile, ins: Sequence[Ref]) -> tuple[jax.Array, jax.Array, jax.Array]:
        tile_d_acc = ins[d_out][0, 0, :, tile.queries]
        p = jnp.exp(tile.scores() - ins[maximum][0, 0, :, tile.queries])
        d_score = scores.product(tile.of_keys(ins[value]), tile_d_acc, 1, 0) + ins[d_sum][0, 0, :, tile.queries]
        return p, tile_d_acc, tile.through_score_mod(p * d_score)

    return of_tile, d_out


def _d_query(
    plan: TPUPlan, row_max: jax.Array, cotangents: Sequence[jax.Array], dtype: DTypeLike, with_totals: bool
) -> list[jax.Array]:
    """The query's gradient in ``dtype`` and, ``with_totals``, the sums ``[B,T,N]`` of the underlying ``d_score``."""
    H, scores, product_dtype = plan.call.query.shape[3], plan.scores(), plan.call.query.dtype
    of_tile, _ = _score_tangents(plan, scores, row_max, cotangents)

    def start(_: tuple, acc: Ref, total: Ref, d_scores: Ref) -> None:
        acc[...], total[...] = jnp.zeros(acc.shape, acc.dtype), jnp.zeros(total.shape, total.dtype)

    def add(tiles: Iterable[Tile], ins: Sequence[Ref], acc: Ref, total: Ref, d_scores: Ref) -> None:
        for tile in tiles:
            d_score = of_tile(tile, ins)[2]
            if with_totals:
                d_score = rounded(d_score, product_dtype, plan.settings.is_simulated)
                total[:, tile.queries] += jnp.sum(d_score, axis=0, keepdims=True)
            if tile.guarded:
                acc[:, tile.queries] += scores.product(tile.k, d_score, 0, 0)
            else:
                d_scores[tile.keys, tile.queries] = d_score.astype(d_scores.dtype)

    def after(_: tuple, guarded: bool, ins: Sequence[Ref], acc: Ref, total: Ref, d_scores: Ref) -> None:
        if not guarded:  # one product per block keeps the matrix unit a quarter busier than one per tile
            acc[...] += scores.product(ins[scores.key][0, 0], d_scores[...], 0, 0)

    def finish(ins: Sequence[Ref], acc: Ref, total: Ref, _: Ref) -> Sequence[jax.Array]:
        return [acc[...] * scores.scale_of(ins), total[...]][: 1 + with_totals]

    results = [plan.result("queries", H, dtype), plan.result("queries", 1, jnp.float32)][: 1 + with_totals]
    kept, of_block = [((size, plan.size[0]), jnp.float32) for size in (H, 1)], [(plan.size[::-1], product_dtype)]
    outputs = call_kernel(plan, scores, "d_query", results, kept, Steps(start, add, finish, after=after), of_block)
    d_query, *totals = (plan.restored(*both) for both in zip(results, outputs, strict=True))
    return [d_query, *(x[..., 0] for x in totals)]


def _d_key_and_value(plan: TPUPlan, row_max: jax.Array, cotangents: Sequence[jax.Array]) -> list[jax.Array]:
    H, D, scores = plan.call.key.shape[3], max(plan.call.value.shape[3], 1), plan.scores()
    of_tile, d_out = _score_tangents(plan, scores, row_max, cotangents)

    def start(_: tuple, d_key: Ref, d_value: Ref, ps: Ref, d_scores: Ref) -> None:
        d_key[...], d_value[...] = jnp.zeros_like(d_key), jnp.zeros_like(d_value)

    def add(tiles: Iterable[Tile], ins: Sequence[Ref], d_key: Ref, d_value: Ref, ps: Ref, d_scores: Ref) -> None:
        for tile in tiles:
            p, d_acc, d_score = of_tile(tile, ins)
            if tile.guarded:
                d_value[tile.keys] += scores.product(p, d_acc, 1, 1)
                d_key[tile.keys] += scores.product(d_score, tile.q, 1, 1)
            else:
                at = tile.keys, tile.queries
                ps[at], d_scores[at] = p.astype(ps.dtype), d_score.astype(d_scores.dtype)

    def after(_: tuple, guarded: bool, ins: Sequence[Ref], d_key: Ref, d_value: Ref, ps: Ref, d_scores: Ref) -> None:
        if not guarded:  # a v6e's matrix unit sums over 256 entries: a product per tile would fill only half of it
            d_value[...] += scores.product(ps[...], ins[d_out][0, 0], 1, 1)
            d_key[...] += scores.product(d_scores[...], ins[scores.query][0, 0], 1, 1)

    def finish(ins: Sequence[Ref], d_key: Ref, d_value: Ref, *_: Ref) -> Sequence[jax.Array]:
        return d_key[...] * scores.scale_of(ins), d_value[...]

    dtype = plan.call.key.dtype
    results = [plan.result("keys", size, dtype) for size in (H, D)]
    kept, of_block = [((plan.size[1], size), jnp.float32) for size in (H, D)], [(plan.size[::-1], dtype)] * 2
    outputs = call_kernel(
        plan, scores, "d_key_and_value", results, kept, Steps(start, add, finish, after=after), of_block
    )
    d_key, d_value = (plan.restored(*both) for both in zip(results, outputs, strict=True))
    return [d_key, d_value[..., : plan.call.value.shape[3]]]
