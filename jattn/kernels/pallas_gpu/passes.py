"""The kernels of ``pallas_gpu``: forward, backward and reduction.

Written in Mosaic GPU for Hopper GPUs: ``wgmma`` computes products from shared memory, which the copy engine fills in
advance. The forward pass follows FlashAttention-3 (https://arxiv.org/abs/2407.08608), with two alternating warpgroups.
The backward pass follows FlashAttention-2 (https://arxiv.org/abs/2307.08691), with one kernel for the gradient of query
and one for key and value, and the rule of ``jattn._blocks.backward``. Arrays keep their order of axes and are not
copied. Blockwise computes forward mode, higher orders and the gradients of arrays other than query, key and value.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jattn._blocks.backward import balanced, is_whole, of_sums
from jattn._blocks.plan import visibility
from jattn._blocks.reduction import Reduction, count_pairs
from jattn._core.call import Call
from jattn._mods.arrays import cdiv, pad_end
from jattn._mods.tile_function import QUERY
from jattn.kernels.kernel import Results, narrowed
from jattn.kernels.pallas_gpu import PallasGPU
from jattn.kernels.pallas_gpu.diagonals import sum_diagonals
from jattn.kernels.pallas_gpu.pipeline import WIDTH, MosaicKernel, Step, Steps, full, zeros
from jattn.kernels.pallas_gpu.row_sums import BLOCK, reduce_rows
from jattn.kernels.pallas_gpu.schedule import ROWS
from jattn.kernels.pallas_gpu.split_kv import choose_num_splits, merge_splits, pack_gqa, unpack_gqa
from jattn.kernels.pallas_gpu.tile import LOG2E, GPUPlan, Place, Tile, make_plan
from jattn.kernels.pallas_tiles import LARGEST_DIM, Ref, rounded

LEAST = jnp.finfo(jnp.float32).min


def reduce(call: Call, reduction: Reduction, settings: PallasGPU) -> dict[str, jax.Array]:
    """The sums of ``reduction``, as in ``jattn.kernels.ReducesWeights``."""
    q, k = _padded(call.query), _padded(call.key)
    plan = functools.partial(make_plan, call, interpret=settings.interpret)
    by_row = reduce_rows(functools.partial(plan, shape=BLOCK), q, k, reduction)
    others = [name for name in reduction.counts if name != "visible"]
    return by_row | sum_diagonals(plan, q, k, reduction) | count_pairs(call, reduction, others, None)


def _shape(H: int, D: int, backward: bool) -> tuple[int, int]:
    """Rows and columns of a block: sizes that leave registers for the sums, and shared memory for two column blocks."""
    if max(H, D) > 128:
        return (ROWS, 64) if backward else (2 * ROWS, 64)
    return (2 * ROWS, 64) if backward else (2 * ROWS, 128)


def forward(call: Call, settings: PallasGPU) -> Results:
    """``out [B,T,N,D]``, and ``row_max`` and ``row_sum [B,T,N]`` as in ``jattn._blocks.online_softmax``.

    ``row_max`` is the lse, so that the cotangent of ``acc`` equals the output's, in the dtype in which the kernels
    multiply.
    """
    (B, T, N, H), D = call.query.shape, call.value.shape[3]
    call = pack_gqa(call)
    (_, grouped, heads, _), (rows, columns) = call.query.shape, _shape(H, D, False)
    rows = rows if grouped > ROWS else ROWS
    num_splits = choose_num_splits(B * heads * cdiv(grouped, rows), cdiv(call.key.shape[1], columns))
    q, k, v = (_padded(x) for x in (call.query, call.key, call.value))
    unseen = not visibility(call).all_seen()
    if unseen and T > 1:  # 0 times NaN is NaN. Queries that see such a value get NaN from its key.
        finite = _finite(k) & _finite(v)
        k, v = jnp.where(finite, k, jnp.nan), jnp.where(finite, v, jnp.zeros((), v.dtype))
    plan = make_plan(call, False, (rows, columns), settings.interpret, num_splits)

    def start(_: Place) -> tuple:
        return zeros(ROWS, v.shape[3]), full((ROWS,), float(LEAST)), zeros(ROWS)

    def add(step: Step, rows: Sequence[Ref], columns: Sequence[Ref], carry: tuple) -> tuple:
        ((q,), (k, v)), (acc, row_max, row_sum) = (rows, columns), carry
        (product,) = step.products((q, k))
        step.release(0)
        s = step.either(Tile.log2_scores, product)
        new_max = jnp.maximum(row_max, jnp.max(s, axis=1))
        rescale = jnp.exp2(row_max - new_max)
        p = jnp.exp2(s - _across(new_max, s))
        acc, row_sum = acc * _across(rescale, acc), row_sum * rescale + jnp.sum(p, axis=1)
        acc, row_sum, new_max, p = jax.lax.optimization_barrier((acc, row_sum, new_max, p.astype(q.dtype)))
        step.turn()
        if unseen and T == 1:
            step.hide_unseen(v)
        (acc,) = step.add((acc, p, v))
        step.release(1)
        return acc, new_max, row_sum

    def finish(_: Place, carry: tuple) -> tuple:
        acc, row_max, row_sum = carry
        seen = row_sum != 0.0  # the largest score adds 1; NaN counts as seen
        sums = jnp.where(seen, row_sum, 1.0)
        lse = jnp.where(seen, (row_max + jnp.log2(sums)) * (1.0 / LOG2E), float(LEAST))
        return [acc * _across(1.0 / sums, acc)], [lse]

    steps = Steps(start, add, finish, pingpong=rows > ROWS)
    (out,), (lse,) = MosaicKernel(plan, plan.scores(), steps, [q], [k, v], [v.shape[3]], vectors=1).call()
    if num_splits > 1:
        out, lse = merge_splits(out, lse, num_splits, rows)
    lse = jnp.transpose(lse[:, :, :grouped], (0, 2, 1))
    # A literal constant where possible: XLA then removes the division by it, and thereby a copy of the cotangent.
    seen = jnp.ones_like(lse) if visibility(call).all_seen() else (lse != LEAST).astype(jnp.float32)
    out = out[:, :grouped, :, :D].astype(call.value.dtype)
    if heads != N:
        out, lse, seen = (unpack_gqa(x, T, N) for x in (out, lse, seen))
    return out, lse, seen


def backward(
    call: Call, results: Results, cotangents: Sequence[jax.Array | None], settings: PallasGPU
) -> list[jax.Array]:
    """The cotangents of query, key and value, by the formulas of ``jattn._blocks.backward.of_sums``."""
    whole, call = is_whole(call), narrowed(call)
    row_max, (d_acc, d_row_sum) = results[1], of_sums(results, cotangents)
    H, D = call.query.shape[3], call.value.shape[3]
    q, k, v = (_padded(x) for x in (call.query, call.key, call.value))
    if not visibility(call).all_seen():  # a row that sees NaN has NaN in its row_max
        q, k, v = (jnp.where(_finite(x), x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    d_acc = _padded(d_acc.astype(q.dtype))
    lines = [jnp.transpose(x, (0, 2, 1)) for x in (row_max * LOG2E, d_row_sum)]
    plan = functools.partial(make_plan, call, shape=_shape(H, D, True), interpret=settings.interpret)
    d_query, *totals = _d_query(plan(by_key=False), q, k, v, d_acc, lines, whole)
    d_key_and_value = functools.partial(_d_key_and_value, q=q, k=k, v=v, d_acc=d_acc, lines=lines)
    if H + D > LARGEST_DIM:  # registers hold only the sums of one
        (d_key,), (d_value,) = (d_key_and_value(plan(by_key=True), of=of) for of in ("key", "value"))
    else:
        d_key, d_value = d_key_and_value(plan(by_key=True), of="key and value")
    (T, S), grown = (call.query.shape[1], call.key.shape[1]), (d_query, d_key, d_value)
    of_qkv = [x[:, :length, :, :size] for x, length, size in zip(grown, (T, S, S), (H, H, D), strict=True)]
    totals = [jnp.transpose(x, (0, 2, 1))[:, :T] for x in totals]
    return balanced(call, results, cotangents, of_qkv, *totals) if totals else of_qkv


def _d_query(
    plan: GPUPlan,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    d_acc: jax.Array,
    lines: list[jax.Array],
    with_totals: bool,
) -> list[jax.Array]:
    """The query's gradient and, ``with_totals``, the sums ``[B,N,T]`` of the underlying ``d_score``."""
    scores = plan.scores()
    numbers = [plan.operands.vector(QUERY, x) for x in lines]

    def start(place: Place) -> tuple:
        lines = [place.tile().line(number, 0) for number in numbers]
        return zeros(ROWS, q.shape[3]), *lines, *[zeros(ROWS)] * with_totals

    def add(step: Step, rows: Sequence[Ref], columns: Sequence[Ref], carry: tuple) -> tuple:
        ((q, d_acc), (k, v)), (d_query, row_max, d_sum, *total) = (rows, columns), carry

        def slope_of(tile: Tile) -> jax.Array:
            return tile.weights_and_slope(jax.lax.broadcast_in_dim(row_max, tile.shape, [0]))[1]

        slope = step.part_by_part(slope_of, *step.products((q, k)))
        (d_p,) = step.products((d_acc, v))
        step.release(1)
        d_scores = _d_scores(step, slope, d_p + _across(d_sum, d_p))
        if with_totals:
            d_scores = rounded(d_scores, q.dtype, bool(plan.interpret))
            total = [total[0] + jnp.sum(d_scores, axis=1)]
        (d_query,) = step.add((d_query, d_scores.astype(q.dtype), k))
        step.release(0)
        return d_query, row_max, d_sum, *total

    def finish(place: Place, carry: tuple) -> tuple:
        return [carry[0] * place.scale], carry[3:]

    kernel = MosaicKernel(
        plan, scores, Steps(start, add, finish), [q, d_acc], [k, v], [q.shape[3]], vectors=int(with_totals)
    )
    (d_query,), totals = kernel.call()
    return [d_query, *totals]


def _d_key_and_value(
    plan: GPUPlan, q: jax.Array, k: jax.Array, v: jax.Array, d_acc: jax.Array, lines: list[jax.Array], of: str
) -> list[jax.Array]:
    scores = plan.scores()
    row_max, d_sum = (plan.operands.vector(QUERY, x) for x in lines)
    sizes = {"key": [k.shape[3]], "value": [v.shape[3]], "key and value": [k.shape[3], v.shape[3]]}[of]

    def start(_: Place) -> tuple:
        return tuple(zeros(ROWS, size) for size in sizes)

    def add(step: Step, rows: Sequence[Ref], columns: Sequence[Ref], carry: tuple) -> tuple:
        (k, *v), (q, d_acc), sums = rows, columns, list(carry)

        def p_and_slope(tile: Tile) -> list[jax.Array]:
            p, p_slope = tile.weights_and_slope(tile.vector(QUERY, row_max))
            return [p.astype(q.dtype), *([] if of == "value" else [p_slope])]

        p, *slope = step.part_by_part(p_and_slope, *step.products((k, q)))
        if of != "key":
            (sums[-1],) = step.add((sums[-1], p, d_acc))
        if of != "value":
            (d_p,) = step.products((v[0], d_acc))
            d_scores = _d_scores(step, slope[0], d_p + step.tile().vector(QUERY, d_sum))
            (sums[0],) = step.add((sums[0], d_scores.astype(q.dtype), q))
        step.release(0, 1)
        return tuple(sums)

    def finish(place: Place, carry: tuple) -> tuple:
        return [*(carry[:1] if of == "value" else [carry[0] * place.scale]), *carry[1:]], []

    rows = [k] if of == "value" else [k, v]
    return MosaicKernel(plan, scores, Steps(start, add, finish), rows, [q, d_acc], sizes).call()[0]


def _d_scores(step: Step, slope: jax.Array, d_weight: jax.Array) -> jax.Array:
    """``slope`` times ``d_weight``; 0 for pairs of weight 0, even if ``d_weight`` is NaN in a row that sees NaN."""
    d_scores = slope * d_weight
    return d_scores if step.scores.all_seen else jnp.where(slope != 0.0, d_scores, 0.0)


def _across(line: jax.Array, like: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(line, like.shape, [0])


def _padded(x: jax.Array) -> jax.Array:
    """``[B,T,N,X]`` in the copy engine's tiles, 8 tokens by 64 features. The copy engine fills in missing entries."""
    return pad_end(x, (x.shape[0], cdiv(x.shape[1], 8) * 8, x.shape[2], max(cdiv(x.shape[3], WIDTH), 1) * WIDTH))


def _finite(x: jax.Array) -> jax.Array:
    return jnp.isfinite(x).all(-1, keepdims=True)
