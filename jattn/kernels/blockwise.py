"""``"blockwise"``: the O(T + S) formula of ``jattn.online_softmax``, head by head. Supports every request.

The blocks to skip are chosen here, outside of any vmap, where a condition still saves work. All heads of a sequence
share one table: a block is computed if any head sees it. If masks differ by sequence, each has its own table.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn import staged
from jattn.attention import softmax_dtype
from jattn.batching import canonical, over_request
from jattn.block_gradients import gradients
from jattn.blocks import Piece, all_seen, choose_blocks, visible_blocks
from jattn.hoist import traced
from jattn.kernels import Fold, Program
from jattn.lifting import one_by_one
from jattn.one_block import BlockPlan
from jattn.online_softmax import (
    accumulate_head,
    count_visible_head,
    differentiable,
    fold_head,
    forward_head,
    of_sums,
)  # fmt: skip
from jattn.placement import may_be_divided, on_each_device
from jattn.request import Request
from jattn.tables import Length, arange

# The arguments of visible_blocks, except the block size.
MaskArguments = tuple[Any, Any, Any, Any, Any, Any, tuple[Length, Length]]


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """``implementation=``: ``"blockwise"`` with your own block sizes.

    ``block_sizes``: queries and keys per block; ``jattn.blocks.choose_blocks`` sets the default. Changes no result
    beyond rounding.
    """

    block_sizes: tuple[int, int] | None = None

    def unsupported_reason(self, request: Request) -> str | None:
        """None: it supports every request."""
        return None

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``; O(T + S) memory besides inputs and outputs, forward and backward."""
        request = canonical(request)
        forward, backward, static = self.program(request, may_be_divided(request))
        return differentiable(forward, accumulate, request, *static, backward=backward, alone=True)

    def program(self, request: Request, divided: bool) -> Program:
        """As in ``jattn.kernels.InBlocks``."""
        return _forward, gradients_of_qkv, (self.block_sizes, divided)

    def accumulate(self, request: Request, row_max: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``acc [B,T,N,D] = sum exp(score - row_max) value`` and ``row_sum [B,T,N]``, for ``row_max [B,T,N]``."""
        dtype = softmax_dtype(request.query)
        rows = jax.ShapeDtypeStruct(request.query.shape[:3], dtype)
        out = jax.ShapeDtypeStruct((*rows.shape, request.value.shape[3]), dtype), rows
        static = self.block_sizes, may_be_divided(request)
        return staged.call(accumulate, canonical(request), row_max, *static, out=out)

    def fold_blocks(
        self, request: Request, step: Callable, init: Any, lse: jax.Array | None, per_sequence: Sequence[Any] = ()
    ) -> Any:
        """``jattn.online_softmax.fold_head`` for all heads: carries ``[B,N,...]``; ``lse [B,T,N]`` or None.

        ``step`` also gets its sequence's entries of the arrays ``per_sequence``, ``[B|1,...]``.
        """
        if 0 in (request.query.shape[1], request.key.shape[1]):  # there are no blocks
            lead = request.query.shape[0], request.query.shape[2]
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *jnp.shape(x))), init)
        if lse is None:
            lse = self.run(dataclasses.replace(request, value=request.key[..., :0]))[1]
        request, (B, _, N, _) = canonical(request), request.query.shape
        size, *_ = _tables(request, self.block_sizes)
        dtype, index = softmax_dtype(request.query), jnp.int32
        block_types = (
            jax.ShapeDtypeStruct(size, dtype),
            *(jax.ShapeDtypeStruct(shape, index) for shape in ((size[0], 1), (1, size[1]))),
        )
        structure = jax.tree.structure(init)
        init = [jnp.asarray(x) for x in jax.tree.leaves(init)]
        extra_types = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in per_sequence]
        carry_types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in init]

        def flat_step(*args: Any) -> list[jax.Array]:
            carry = step(structure.unflatten(args[: len(init)]), *args[len(init) :])
            _check_carry(structure, carry_types, carry)
            return jax.tree.leaves(carry)

        program = traced(flat_step, *carry_types, *block_types, *extra_types)
        out = [jax.ShapeDtypeStruct((B, N, *x.shape), x.dtype) for x in init]
        static = size, may_be_divided(request)
        carries = staged.call(_fold, request, program, init, lse, list(per_sequence), *static, out=out)
        return structure.unflatten(carries)

    def count_visible(self, request: Request) -> jax.Array:
        """The number of keys that each query sees, integers ``[B,N,T]``."""
        B, T, N, _ = request.query.shape
        static = self.block_sizes, may_be_divided(request)
        out = jax.ShapeDtypeStruct((B, N, T), jnp.int32)
        return staged.call(_count_visible, canonical(request), *static, out=out)

    def slots(self, length: Length) -> None:
        """None: each slot holds its own token."""
        return None

    def fold(self, request: Request, fold: Fold) -> dict[str, jax.Array]:
        """As in ``jattn.kernels.FoldsWeights``."""
        T, S, kinds = request.query.shape[1], request.key.shape[1], dict(fold.kinds)
        fill = {"largest": -jnp.inf}
        init = {
            name: jnp.full(_fold_length(kind, T, S), fill.get(kind, 0), fold.lse.dtype) for name, kind in kinds.items()
        }
        structure = jax.tree.structure((fold.rows, fold.columns))

        def step(carry: Any, log_weights: jax.Array, q_idx: jax.Array, kv_idx: jax.Array, *data: Any) -> Any:
            own = zip(jax.tree.unflatten(structure, data), (q_idx, kv_idx), strict=True)
            row, column = ({name: x[index] for name, x in arrays.items()} for arrays, index in own)
            found = fold.values(log_weights, row, column)
            return {name: _added(x, kinds[name], found[name], q_idx[:, 0], kv_idx[0], T) for name, x in carry.items()}

        results = self.fold_blocks(request, step, init, fold.lse, jax.tree.leaves((fold.rows, fold.columns)))
        return results | ({"visible": self.count_visible(request)} if fold.count_visible else {})

    def map_parts(self, fn: Callable, request: Request, out_axes: Any, *extra: tuple[jax.Array, str]) -> Any:
        """``jattn.placement.on_each_device``."""
        return on_each_device(fn, request, out_axes, *extra)


def staged_fold(run: Callable, request: Request, fold: Fold, settings: Any) -> dict[str, jax.Array]:
    """``Blockwise().fold(request, fold)``, and its derivatives, with the sums computed by ``run``.

    ``run(platform, request, fold, settings)`` is traced at lowering, for a canonical request; ``settings`` hashable.
    """
    (B, T, N, _), S = request.query.shape, request.key.shape[1]
    out = {
        name: jax.ShapeDtypeStruct((B, N, _fold_length(kind, T, S)), jnp.int32 if name == "visible" else fold.lse.dtype)
        for name, kind in fold.result_kinds.items()
    }
    return staged.call(staged.ByHand(_fold_in_blocks, run=run), canonical(request), fold, settings, out=out)


def _fold_in_blocks(platform: str, request: Request, fold: Fold, settings: Any) -> dict[str, jax.Array]:
    return Blockwise().fold(request, fold)


def _fold_length(kind: str, T: Length, S: Length) -> Length:
    """The length of a result's last axis."""
    return {"keys": S, "offsets": max(T + S - 1, 0)}.get(kind, T)


def _added(sums: jax.Array, kind: str, block: jax.Array, rows: jax.Array, columns: jax.Array, T: Length) -> jax.Array:
    """The sums of a kind of ``FoldsWeights.fold`` with a block's added; ``rows``, ``columns``: its slots."""
    if kind == "queries":
        return sums.at[rows].add(block.sum(1))
    if kind == "largest":
        return sums.at[rows].max(block.max(1))
    if kind == "keys":
        return sums.at[columns].add(block.sum(0))
    diagonals = columns[0] - rows[-1] + T - 1 + jnp.arange(sum(block.shape) - 1)
    return sums.at[diagonals].add(_diagonal_sums(block))


def _diagonal_sums(block: jax.Array) -> jax.Array:
    """``[t,s] -> [t+s-1]``: the sum of each diagonal, from the lower left corner to the upper right."""
    t, s = block.shape

    # Row by row: on CPU several times faster than reshapes or gathers.
    def add(i: jax.Array, sums: jax.Array) -> jax.Array:
        row, start = jax.lax.dynamic_index_in_dim(block, i, keepdims=False), t - 1 - i
        return jax.lax.dynamic_update_slice(sums, jax.lax.dynamic_slice(sums, (start,), (s,)) + row, (start,))

    return jax.lax.fori_loop(0, t, add, jnp.zeros(t + s - 1, block.dtype))


def _check_carry(structure: Any, types: Sequence[Any], carry: Any) -> None:
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


def _forward(platform: str, request: Request, sizes: Any, divided: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    plan, lifting = plan_request(platform, request, sizes, divided, forward=True)

    def one_head(q, k, v, head, any_visible, all_visible):
        return forward_head(platform, q, k, v, head, plan._replace(any_visible=any_visible, all_visible=all_visible))

    return over_request(one_head, request, out_axes=1, **lifting)


def accumulate(
    platform: str, request: Request, row_max: jax.Array, sizes: Any, divided: bool
) -> tuple[jax.Array, jax.Array]:
    """``Blockwise.accumulate`` traced for ``platform``; the request is canonical."""
    plan, lifting = plan_request(platform, request, sizes, divided)

    def one_head(q, k, v, head, row_max, any_visible, all_visible):
        own_plan = plan._replace(any_visible=any_visible, all_visible=all_visible)
        return accumulate_head(platform, q, k, v, head, own_plan, row_max)

    if lifting["heads"] is one_by_one:
        lifting |= {"heads": functools.partial(one_by_one, recompute=True)}
    return over_request(one_head, request, out_axes=1, per_head=[jnp.moveaxis(row_max, 2, 1)], **lifting)


def gradients_of_qkv(platform: str, args: tuple, cotangents: Sequence[Any]) -> tuple[jax.Array, ...]:
    """The cotangents of query, key and value, as ``jattn.online_softmax.differentiable`` takes them."""
    request, results, sizes, divided = args
    row_max, (d_acc, d_row_sum) = results[1], of_sums(results, cotangents)
    plan, lifting = plan_request(platform, request, sizes, divided)
    if lifting["sequences"] is lifting["heads"] is jax.vmap and not divided:
        return gradients(platform, request, row_max, d_acc, d_row_sum, plan)

    def of_qkv(*qkv):
        query, key, value = qkv
        own = dataclasses.replace(request, query=query, key=key, value=value)
        return accumulate(platform, own, row_max, sizes, divided)

    return jax.vjp(of_qkv, request.query, request.key, request.value)[1]((d_acc, d_row_sum))


def _fold(
    platform: str, request: Request, step: Any, init: Any, lse: jax.Array, per_sequence: list[jax.Array], sizes: Any,
    divided: bool,
) -> Any:  # fmt: skip
    plan, lifting = plan_request(platform, request, sizes, divided)

    def one_head(q, k, v, head, lse, any_visible, all_visible, *extra):
        def with_extra(carry, log_weights, q_idx, kv_idx):
            return step(*carry, log_weights, q_idx, kv_idx, *extra)

        own_plan = plan._replace(any_visible=any_visible, all_visible=all_visible)
        return fold_head(platform, with_extra, init, q, k, head, own_plan, lse)

    lifting |= {"per_sequence": (*lifting["per_sequence"], *per_sequence)}
    return over_request(one_head, request, out_axes=0, per_head=[jnp.moveaxis(lse, 2, 1)], **lifting)


def _count_visible(platform: str, request: Request, sizes: Any, divided: bool) -> jax.Array:
    plan, lifting = plan_request(platform, request, sizes, divided)

    def one_head(q, k, v, head, any_visible, all_visible):
        return count_visible_head(platform, q, k, head, plan._replace(any_visible=any_visible, all_visible=all_visible))

    return over_request(one_head, request, out_axes=0, **lifting)


def plan_request(
    platform: str, request: Request, sizes: Any, divided: bool, *, forward: bool = False
) -> tuple[BlockPlan, dict[str, Any]]:
    """How to split the heads (with the tables of all sequences), and how to lift one head to many.

    On one CPU device, heads and sequences run one by one: a single head keeps all cores busy, and its blocks stay in
    the cache. If an axis may be ``divided`` over devices, a loop over it would gather it; then vmap, with one table for
    all sequences. On one accelerator vmap, but over sequences only if they share a table.
    """
    size, (any_visible, all_visible), pieces = _tables(request, sizes, cuts=platform == "cpu", large_if_cut=forward)
    if divided:
        any_visible, all_visible = any_visible.any(0, keepdims=True), all_visible.all(0, keepdims=True)
    heads = one_by_one if platform == "cpu" and not divided else jax.vmap
    sequences = one_by_one if not divided and (platform == "cpu" or any_visible.shape[0] > 1) else jax.vmap
    plan = BlockPlan(size, any_visible, all_visible, all_seen(*mask_arguments(request)), pieces)
    return plan, {"per_sequence": (any_visible, all_visible), "sequences": sequences, "heads": heads}


def _tables(
    request: Request, sizes: Any, **options: bool
) -> tuple[tuple[int, int], tuple[Any, Any], tuple[Piece, ...]]:
    lengths = request.query.shape[1], request.key.shape[1]
    return choose_blocks(functools.partial(block_table, request), *lengths, sizes, **options)


def mask_arguments(request: Request) -> MaskArguments:
    """The arguments of ``visible_blocks``, with leading axes ``[B|1, N|1]``."""
    B, T, N, _ = request.query.shape
    b, h = request.first_batch + arange(B)[:, None], request.first_head + arange(N)[None, :]
    lengths = (T, request.key.shape[1])
    q_positions, kv_positions = (
        None if x is None else x[:, None] for x in (request.query_positions, request.kv_positions)
    )
    return request.masks, request.slot_masks, b, h, q_positions, kv_positions, lengths


def block_table(request: Request, size: tuple[int, int]) -> tuple[Any, Any]:
    """``(any_visible, all_visible)``, each ``[B|1, blocks of T, blocks of S]``, for all heads of a sequence."""
    any_visible, all_visible = (
        x.reshape((1,) * (4 - x.ndim) + x.shape) for x in visible_blocks(*mask_arguments(request), size)
    )
    return any_visible.any(1), all_visible.all(1)
