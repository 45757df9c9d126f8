"""Sums over the weights of each head, block by block: ``fold_weights``, and the reductions of ``heads.statistics``."""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Concatenate

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jattn._blocks.block import BlockPlan, split_head
from jattn._blocks.block_lists import Size, split_axis
from jattn._blocks.online_softmax import IfListed, join_rows, scan_blocks
from jattn._blocks.plan import BlockSizes, plan_args
from jattn._core import deferred
from jattn._core.arguments import AttentionArgs
from jattn._core.attention import Head, softmax_dtype
from jattn._core.vmap import canonical
from jattn._mods.arrays import Length
from jattn._mods.closure_convert import Traced, traced
from jattn._mods.pytree import pytree_dataclass, static_field

# A step that gets log weights, which are -inf where a weight is 0, and its sequence's entries of further arrays.
LogStep = Callable[Concatenate[Any, Array, Array, Array, ...], Any]


# A step of ``jattn.fold_weights``, ``(carry, weights [t,s], q_idx, kv_idx) -> carry`` over slots.
FoldStep = Callable[[Any, Array, Array, Array], Any]


@pytree_dataclass
class Reduction:
    """Sums over the pairs of a query and a key, of values that depend on the weight.

    ``values(log_weights, row, column) -> {name: values}`` is elementwise: the data of queries and keys, ``row`` and
    ``column``, broadcast against the log weights, whose axes may come in either order. It compares by value and holds
    no arrays. A pair of weight 0 must add nothing, or -inf to a ``"row_max"``.

    ``kinds``: each name with its kind: ``"row_sum"`` and ``"row_max"`` have a result per query, ``"column_sum"`` one
    per key, and ``"diagonal_sum"`` one per offset of the key from the query.
    """

    lse: Float[Array, "B T N"]
    rows: dict[str, Bool[Array, "#B T"] | Int[Array, "#B T"]]
    columns: dict[str, Bool[Array, "#B S"] | Int[Array, "#B S"]]
    values: Callable[[Array, dict[str, Array], dict[str, Array]], dict[str, Array]] = static_field()
    kinds: tuple[tuple[str, str], ...] = static_field()
    count_visible: bool = static_field()  # also return the number of keys that each query sees, as ``visible``

    @property
    def result_kinds(self) -> dict[str, str]:
        """The kind of each result."""
        return dict(self.kinds) | ({"visible": "row_sum"} if self.count_visible else {})

    def named(self, *kinds: str) -> list[str]:
        """The names of these kinds, without ``visible``."""
        return [name for one in kinds for name, kind in self.kinds if kind == one]

    def results(self, args: AttentionArgs) -> dict[str, jax.ShapeDtypeStruct]:
        """The type ``[B,N,...]`` of each result."""
        (B, T, N, _), S = args.query.shape, args.key.shape[1]
        return {
            name: jax.ShapeDtypeStruct(
                (B, N, _result_length(kind, T, S)), jnp.int32 if name == "visible" else self.lse.dtype
            )
            for name, kind in self.result_kinds.items()
        }


def reduce_weights(args: AttentionArgs, reduction: Reduction, sizes: BlockSizes) -> dict[str, Array]:
    """The results of a reduction, block by block; differentiable in its lse and in the arrays of the call."""
    T, S, kinds = args.query.shape[1], args.key.shape[1], dict(reduction.kinds)
    fill = {"row_max": -jnp.inf}
    init = {
        name: jnp.full(_result_length(kind, T, S), fill.get(kind, 0), reduction.lse.dtype)
        for name, kind in kinds.items()
    }
    structure = jax.tree.structure((reduction.rows, reduction.columns))

    def step(carry: dict, log_weights: Array, q_idx: Array, kv_idx: Array, *data: Array) -> dict[str, Array]:
        sides = zip(jax.tree.unflatten(structure, data), (q_idx, kv_idx), strict=True)
        row, column = ({name: x[index] for name, x in arrays.items()} for arrays, index in sides)
        values = reduction.values(log_weights, row, column)
        return {name: _added(x, kinds[name], values[name], q_idx[:, 0], kv_idx[0], T) for name, x in carry.items()}

    data = jax.tree.leaves((reduction.rows, reduction.columns))
    results = fold_blocks(args, step, init, reduction.lse, sizes, data)
    return results | ({"visible": count_visible(args, sizes)} if reduction.count_visible else {})


def fold_blocks(
    args: AttentionArgs, step: LogStep, init: PyTree, lse: Array, sizes: BlockSizes, per_sequence: Sequence[Array] = ()
) -> PyTree[Array]:
    """``carry = step(carry, log_weights, q_idx, kv_idx)`` over the blocks of every head: carries ``[B,N,...]``.

    ``step`` also gets its sequence's entries of the arrays ``per_sequence``, ``[B|1,...]``. As ``fold_weights``, but
    with ``log_weights``, which are -inf where a weight is 0.
    """
    if 0 in (args.query.shape[1], args.key.shape[1]):  # there are no blocks
        lead = args.query.shape[0], args.query.shape[2]
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *jnp.shape(x))), init)
    args, (B, _, N, _) = canonical(args), args.query.shape
    # One block size for all platforms: that of the types of step's arguments.
    size = plan_args("", args, sizes).blocks.size
    block_types = (
        jax.ShapeDtypeStruct(size, softmax_dtype(args.query)),
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
    carries = deferred.call(_fold, args, program, init, lse, list(per_sequence), size, out=out)
    return structure.unflatten(carries)


def count_visible(args: AttentionArgs, sizes: BlockSizes) -> Int[Array, "B N T"]:
    """The number of keys that each query sees."""
    B, T, N, _ = args.query.shape
    out = jax.ShapeDtypeStruct((B, N, T), jnp.int32)
    return deferred.call(_count_visible, canonical(args), sizes, out=out)


def _fold(
    platform: str, args: AttentionArgs, step: Traced, init: list[Array], lse: Array, per_sequence: list, size: Size
) -> list[Array]:
    plan = plan_args(platform, args, size)
    rows, columns = plan.blocks.size

    def one_head(q: Array, k: Array, v: Any, head: Head, head_plan: BlockPlan, lse: Array, *extra: Array) -> list:
        blocked = split_head(platform, q, k, jnp.zeros((k.shape[0], 0), k.dtype), head, head_plan)
        block_lse = split_axis(lse.astype(blocked.arrays.q.dtype), 0, rows)
        block_lse = jnp.where(block_lse == -jnp.inf, 0.0, block_lse)  # a row that sees nothing: exp(-inf - 0) = 0

        def visit(carry: list[Array], i: Array, j: Array, masked: bool, if_listed: IfListed) -> list[Array]:
            block, row_lse = blocked.take(i, j), block_lse[i][:, None]

            def compute() -> list[Array]:
                scores = blocked.scores(block, i, j, masked)[0]
                log_weights = jnp.where(scores == -jnp.inf, scores, scores - row_lse)  # 0, also where the lse is NaN
                q_idx = i * rows + jnp.arange(rows, dtype=i.dtype)
                kv_idx = j * columns + jnp.arange(columns, dtype=j.dtype)
                return step(*carry, log_weights, q_idx[:, None], kv_idx[None, :], *extra)

            return if_listed(compute, carry)

        return scan_blocks(visit, init, blocked)

    per_head = [jnp.moveaxis(lse, 2, 1)]
    return plan.over_heads(one_head, args, out_axes=0, per_head=per_head, per_sequence=per_sequence)


def _count_visible(platform: str, args: AttentionArgs, sizes: BlockSizes) -> Array:
    """Evaluates masks in partial blocks only."""
    plan = plan_args(platform, args, sizes)
    rows, columns = plan.blocks.size

    def one_head(q: Array, k: Array, v: Any, head: Head, head_plan: BlockPlan) -> Array:
        no_features, head = jnp.zeros((k.shape[0], 0), k.dtype), dataclasses.replace(head, scale=1.0)
        blocked = split_head(platform, q[:, :0], no_features, no_features, head, head_plan)

        def visit(counts: Array, i: Array, j: Array, masked: bool, if_listed: IfListed) -> Array:
            def compute() -> Array:
                return blocked.visible(i, j).sum(1, dtype=jnp.int32) if masked else jnp.full(rows, columns, jnp.int32)

            return counts.at[i].add(if_listed(compute, jnp.zeros(rows, jnp.int32)))

        return join_rows(scan_blocks(visit, jnp.zeros(blocked.arrays.q.shape[:2], jnp.int32), blocked), q)

    return plan.over_heads(one_head, args, out_axes=0)


def _result_length(kind: str, T: Length, S: Length) -> Length:
    """The length of a result's last axis."""
    return {"column_sum": S, "diagonal_sum": max(T + S - 1, 0)}.get(kind, T)


def _added(sums: jax.Array, kind: str, block: jax.Array, rows: jax.Array, columns: jax.Array, T: Length) -> jax.Array:
    """The sums of a kind of ``Reduction`` with a block's added; ``rows``, ``columns``: its slots."""
    if kind == "row_sum":
        return sums.at[rows].add(block.sum(1))
    if kind == "row_max":
        return sums.at[rows].max(block.max(1))
    if kind == "column_sum":
        return sums.at[columns].add(block.sum(0))
    diagonals = columns[0] - rows[-1] + T - 1 + jnp.arange(sum(block.shape) - 1, dtype=rows.dtype)
    return sums.at[diagonals].add(_diagonal_sums(block))


def _diagonal_sums(block: jax.Array) -> jax.Array:
    """``[t,s] -> [t+s-1]``: the sum of each diagonal, from the lower left corner to the upper right."""
    t, s = block.shape

    # Row by row: on CPU several times faster than reshapes or gathers.
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
