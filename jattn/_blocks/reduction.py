"""Sums over the weights of each head, block by block: ``fold_weights``, and the reductions of ``heads.statistics``."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Int, PyTree

from jattn._blocks.block import BlockPlan, split_head
from jattn._blocks.block_lists import Size, split_axis
from jattn._blocks.online_softmax import IfListed, scan_blocks
from jattn._blocks.plan import BlockSizes, plan_call
from jattn._core import deferred
from jattn._core.call import Call, softmax_dtype
from jattn._core.vmap import canonical
from jattn._mods.arrays import Length, cdiv, pad_end
from jattn._mods.closure_convert import Traced, traced
from jattn._mods.pytree import pytree_dataclass, static_field

# A step that receives log weights, which are -inf where a weight is 0, and its sequence's entries of further arrays.
LogStep = Callable[Concatenate[Any, Array, Array, Array, ...], Any]


# Counts that depend only on masks: the number of keys seen by each query, and of visible pairs at each offset, for the
# queries with a true ``Reduction.rows["counts"]``.
COUNTS = {"visible": "row_sum", "visible_at": "diagonal_sum"}
HIDDEN = -1e8  # the highest score that hides a pair, in dtypes that can represent it


# A step of ``jattn.fold_weights``, ``(carry, weights [t,s], q_idx, kv_idx) -> carry`` over slots.
FoldStep = Callable[[Any, Array, Array, Array], Any]


@pytree_dataclass
class Reduction:
    """Sums over query-key pairs of values that depend on the weight.

    ``values(log_weights, row, column) -> {name: values}`` is elementwise: ``row`` and ``column``, the data of queries
    and keys, broadcast against the log weights, whose axes may come in either order. The function compares by value and
    holds no arrays. A hidden pair, with a log weight of -inf (``lowest_score``), must add nothing, or -inf to a
    ``"row_max"``. The values of a ``"row_max"`` must never be NaN, which a maximum on a CPU would drop.

    ``kinds``: the kind of each name: ``"row_sum"`` and ``"row_max"`` have a result per query, ``"column_sum"`` one per
    key, and ``"diagonal_sum"`` one per offset of the key from the query.
    """

    lse: Float[Array, "B T N"]
    rows: dict[str, Bool[Array, "#B T"] | Int[Array, "#B T"]]
    columns: dict[str, Bool[Array, "#B S"] | Int[Array, "#B S"]]
    values: Callable[[Array, dict[str, Array], dict[str, Array]], dict[str, Array]] = static_field()
    kinds: tuple[tuple[str, str], ...] = static_field()
    counts: tuple[str, ...] = static_field(default=())  # names in COUNTS: numbers of pairs visible under the masks

    @property
    def result_kinds(self) -> dict[str, str]:
        """The kind of each result."""
        return dict(self.kinds) | {name: COUNTS[name] for name in self.counts}

    def named(self, *kinds: str) -> list[str]:
        """The names of these kinds, without ``counts``."""
        return [name for one in kinds for name, kind in self.kinds if kind == one]

    def results(self, call: Call) -> dict[str, jax.ShapeDtypeStruct]:
        """The type ``[B,N,...]`` of each result."""
        (B, T, N, _), S = call.query.shape, call.key.shape[1]
        return {
            name: jax.ShapeDtypeStruct((B, N, _result_length(kind, T, S)), self.lse.dtype)
            for name, kind in self.result_kinds.items()
        }


def reduce_weights(call: Call, reduction: Reduction, sizes: BlockSizes) -> dict[str, Array]:
    """The results of a reduction, block by block; differentiable with respect to its lse and the call's arrays."""
    lengths, kinds = (call.query.shape[1], call.key.shape[1]), dict(reduction.kinds)
    size = _block_size(call, sizes)
    T, S = (cdiv(length, of_block) * of_block for length, of_block in zip(lengths, size, strict=True))  # whole blocks
    init = {
        name: jnp.full(_result_length(kind, T, S), -jnp.inf if kind == "row_max" else 0, reduction.lse.dtype)
        for name, kind in kinds.items()
    }
    sides = [
        {name: pad_end(x, (x.shape[0], length)) for name, x in arrays.items()}
        for arrays, length in ((reduction.rows, T), (reduction.columns, S))
    ]
    data, structure = jax.tree.flatten(sides)

    def step(carry: dict, log_weights: Array, q_idx: Array, kv_idx: Array, *data: Array) -> dict[str, Array]:
        starts = q_idx[0, 0], kv_idx[0, 0]
        both = zip(jax.tree.unflatten(structure, data), starts, size, (1, 0), strict=True)
        row, column = (
            {name: jnp.expand_dims(jax.lax.dynamic_slice(x, (start,), (length,)), axis) for name, x in arrays.items()}
            for arrays, start, length, axis in both
        )
        values = reduction.values(log_weights, row, column)
        blocks = {name: _reduced(kind, values[name]) for name, kind in kinds.items()}
        return {name: _joined(x, kinds[name], blocks[name], starts, T - size[0]) for name, x in carry.items()}

    sums = fold_blocks(call, step, init, reduction.lse, size, data, lowest_score(call))
    results = {name: _of_slots(x, kinds[name], lengths, (T, S)) for name, x in sums.items()}
    return results | count_pairs(call, reduction, reduction.counts, sizes)


def lowest_score(call: Call) -> float:
    """The score at or below which a pair is hidden, as by a mask: -inf if the call has no bias or score function.

    Otherwise, -1e8 (in float16, half the lowest number), to cover additive masks such as ``finfo.min``.
    """
    if call.bias is None and call.score_mod is None:
        return -math.inf
    return max(HIDDEN, float(jnp.finfo(call.query.dtype).min) / 2)


def fold_blocks(
    call: Call, step: LogStep, init: PyTree, lse: Array, sizes: BlockSizes,
    per_sequence: Sequence[Array] = (), lowest: ArrayLike = -math.inf,
) -> PyTree[Array]:  # fmt: skip
    """``carry = step(carry, log_weights, q_idx, kv_idx)`` over the blocks of every head: carries ``[B,N,...]``.

    ``step`` also receives its sequence's entries of the arrays ``per_sequence``, ``[B|1,...]``. Like ``fold_weights``,
    but with ``log_weights``, which are -inf where a score is not above ``lowest``.
    """
    if 0 in (call.query.shape[1], call.key.shape[1]):  # there are no blocks
        lead = call.query.shape[0], call.query.shape[2]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *jnp.shape(x))), init)
    size, call, (B, _, N, _) = _block_size(call, sizes), canonical(call), call.query.shape
    block_types = (
        jax.ShapeDtypeStruct(size, softmax_dtype(call.query)),
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((size[0], 1), (1, size[1]))),
    )
    structure = jax.tree.structure(init)
    init = [jnp.asarray(x) for x in jax.tree.leaves(init)]
    extra_types = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in per_sequence]
    carry_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in init]

    def flat_step(*flat: Array) -> list[Array]:
        carry = step(structure.unflatten(flat[: len(init)]), *flat[len(init) :])
        _check_carry(structure, carry_types, carry)
        return jax.tree.leaves(carry)

    program = traced(flat_step, *carry_types, *block_types, *extra_types)
    out = [jax.ShapeDtypeStruct((B, N, *x.shape), x.dtype) for x in init]
    carries = deferred.call(_fold, call, program, init, lse, list(per_sequence), size, lowest, out=out)
    return structure.unflatten(carries)


def _block_size(call: Call, sizes: BlockSizes) -> Size:
    """One block size for all platforms, used in the types of a step's arguments."""
    return plan_call("", canonical(call), sizes).blocks.size


def count_pairs(call: Call, reduction: Reduction, names: Sequence[str], sizes: BlockSizes) -> dict[str, Array]:
    """The named ``counts`` of the reduction."""
    if not names:
        return {}
    results = reduction.results(call)
    out, counts = {name: results[name] for name in names}, reduction.rows["counts"]
    return deferred.call(_count_pairs, canonical(call), counts, sizes, tuple(names), out=out)


def _fold(
    platform: str, call: Call, step: Traced, init: list[Array], lse: Array, per_sequence: list, size: Size,
    lowest: ArrayLike,
) -> list[Array]:  # fmt: skip
    plan = plan_call(platform, call, size)
    rows, columns = plan.blocks.size

    def one_head(head: Call, head_plan: BlockPlan, lse: Array, *extra: Array) -> list:
        blocked = split_head(platform, dataclasses.replace(head, value=head.key[:, :0]), head_plan)
        block_lse = split_axis(lse.astype(blocked.arrays.q.dtype), 0, rows)
        block_lse = jnp.where(block_lse == -jnp.inf, 0.0, block_lse)  # a row that sees nothing: exp(-inf - 0) = 0

        def visit(carry: list[Array], i: Array, j: Array, masked: bool, if_listed: IfListed) -> list[Array]:
            block, row_lse = blocked.take(i, j), block_lse[i][:, None]

            def compute() -> list[Array]:
                scores = blocked.scores(block, i, j, masked)[0]
                log_weights = jnp.where(scores <= lowest, -jnp.inf, scores - row_lse)  # even where the lse is NaN
                q_idx = i * rows + jnp.arange(rows, dtype=i.dtype)
                kv_idx = j * columns + jnp.arange(columns, dtype=j.dtype)
                return step(*carry, log_weights, q_idx[:, None], kv_idx[None, :], *extra)

            return if_listed(compute, carry)

        return scan_blocks(visit, init, blocked)

    per_head = [jnp.moveaxis(lse, 2, 1)]
    return plan.over_heads(one_head, call, out_axes=0, per_head=per_head, per_sequence=per_sequence)


def _count_pairs(
    platform: str, call: Call, counts: Array, sizes: BlockSizes, names: tuple[str, ...]
) -> dict[str, Array]:
    """Evaluates masks only in partial blocks."""
    plan, (T, S) = plan_call(platform, call, sizes), (call.query.shape[1], call.key.shape[1])
    dtype, (rows, columns) = softmax_dtype(call.query), plan.blocks.size
    whole = cdiv(T, rows) * rows, cdiv(S, columns) * columns
    # The rows of a full block with a key at each of its offsets.
    offsets = np.arange(rows + columns - 1) - (rows - 1)
    first, end = np.clip(-offsets, 0, rows), np.clip(columns - offsets, 0, rows)

    def one_head(head: Call, head_plan: BlockPlan, counts: Array) -> dict[str, Array]:
        q, k = head.query[:, :0], head.key[:, :0]
        blocked = split_head(platform, dataclasses.replace(head, query=q, key=k, value=k, scale=1.0), head_plan)
        block_counts = split_axis(counts, 0, rows)

        def visit(sums: dict[str, Array], i: Array, j: Array, masked: bool, if_listed: IfListed) -> dict[str, Array]:
            def compute() -> dict[str, Array]:
                upto = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(block_counts[i], dtype=jnp.int32)])
                visible = blocked.visible(i, j) if masked else None
                block = {}
                if "visible" in sums:
                    full = jnp.full(rows, columns, jnp.int32)
                    block["visible"] = full if visible is None else visible.sum(1, dtype=jnp.int32)
                if "visible_at" in sums and visible is None:
                    block["visible_at"] = upto[end] - upto[first]
                elif "visible_at" in sums:
                    counted = visible & block_counts[i][:, None]
                    block["visible_at"] = _diagonal_sums(counted.astype(jnp.int32))
                return block

            nothing = {"visible": jnp.zeros(rows, jnp.int32), "visible_at": jnp.zeros(len(offsets), jnp.int32)}
            block = if_listed(compute, {name: nothing[name] for name in names})
            starts = i * rows, j * columns
            return {name: _joined(x, COUNTS[name], block[name], starts, whole[0] - rows) for name, x in sums.items()}

        init = {name: jnp.zeros(_result_length(COUNTS[name], *whole), jnp.int32) for name in names}
        sums = scan_blocks(visit, init, blocked)
        return {name: _of_slots(x, COUNTS[name], (T, S), whole).astype(dtype) for name, x in sums.items()}

    if 0 in (T, S):
        shapes = {name: (*call.query.shape[:3:2], _result_length(COUNTS[name], T, S)) for name in names}
        return {name: jnp.zeros(shape, dtype) for name, shape in shapes.items()}
    return plan.over_heads(one_head, call, out_axes=0, per_sequence=[counts])


def _result_length(kind: str, T: Length, S: Length) -> Length:
    """The length of a result's last axis."""
    return {"column_sum": S, "diagonal_sum": max(T + S - 1, 0)}.get(kind, T)


def _of_slots(sums: jax.Array, kind: str, lengths: tuple[Length, Length], whole: tuple[Length, Length]) -> jax.Array:
    """The sums over whole blocks, restricted to actual slots."""
    first = whole[0] - lengths[0] if kind == "diagonal_sum" else 0
    return sums[..., first : first + _result_length(kind, *lengths)]


def _reduced(kind: str, values: jax.Array) -> jax.Array:
    """A block's results for one kind of ``Reduction``."""
    if kind == "diagonal_sum":
        return _diagonal_sums(values)
    return values.max(1) if kind == "row_max" else values.sum(0 if kind == "column_sum" else 1)


def _joined(sums: jax.Array, kind: str, block: jax.Array, starts: tuple[jax.Array, ...], first: Length) -> jax.Array:
    """``sums`` joined with a block's results; ``starts``: its row and column; ``first``: the first offset of (0, 0)."""
    row, column = starts
    start = {"column_sum": column, "diagonal_sum": column - row + first}.get(kind, row)
    old = jax.lax.dynamic_slice(sums, (start,), block.shape)
    new = jnp.maximum(old, block) if kind == "row_max" else old + block
    return jax.lax.dynamic_update_slice(sums, new, (start,))


def _diagonal_sums(block: jax.Array) -> jax.Array:
    """``[t,s] -> [t+s-1]``: the sum of each diagonal, from the lower left corner to the upper right."""
    t, s = block.shape

    # Row by row, which on CPU is several times faster than reshapes or gathers.
    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        row, start = jax.lax.dynamic_index_in_dim(block, i, keepdims=False), t - 1 - i
        return jax.lax.dynamic_update_slice(sums, jax.lax.dynamic_slice(sums, (start,), (s,)) + row, (start,))

    return jax.lax.fori_loop(0, t, add, jnp.zeros(t + s - 1, block.dtype))


def _check_carry(structure: Hashable, types: Sequence[jax.ShapeDtypeStruct], carry: PyTree) -> None:
    """Raises if a step changes the structure, shapes or dtypes of its carry."""
    if jax.tree.structure(carry) != structure:
        raise TypeError(
            f"step must return a carry like the one it is given, {structure}, got {jax.tree.structure(carry)}"
        )
    for old, new in zip(types, jax.tree.leaves(carry), strict=True):
        for attribute in ("shape", "dtype"):
            expected, got = getattr(old, attribute), getattr(jnp.asarray(new), attribute)
            if expected != got:
                raise TypeError(
                    f"step must return a carry like the one it is given: carry {attribute}s do not match, expected "
                    f"{expected}, got {got}"
                )
