"""One head cut into blocks: its arrays, and the equations of one block.

Everything that masks and score functions capture becomes an explicit array here, because a custom derivative rule may
close over nothing that is traced.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import eval_jaxpr
from jaxtyping import Array

from jattn.attention import as_dropout, check_mod, dropout_keep, dropout_seeds, softmax_dtype
from jattn.blocks import BlockList, all_seen, block_lists, choose_blocks, cut, visible_blocks
from jattn.mods import mod_semantics


class Arrays(NamedTuple):
    """What derivatives reach, in the softmax's dtype. Keys and values stand transposed: so do their gradients then
    come out of the products, and XLA's product on CPU is four times slower when the long axis must turn round."""

    q: Array  # [blocks, rows, H]
    k: Array  # [blocks, H, columns]
    v: Array  # [blocks, D, columns]
    scale: Array
    bias: Array | None  # [T|1, S|1], filled up to whole blocks
    captured: list[Array]  # by score_mod


class Fixed(NamedTuple):
    """What they do not reach."""

    batch: Array
    head: Array
    q_positions: Array  # [blocks, rows]
    kv_positions: Array  # [blocks, columns]
    slot_masks: list[Array]  # [T|1, S|1], filled up to whole blocks
    mask_captured: list[list[Array]]
    score_captured: list[Array]
    seeds: Array | None
    full: BlockList
    mixed: BlockList


@dataclasses.dataclass(frozen=True)
class Formula:
    """What is static: the equations of one block."""

    size: tuple[int, int]
    masks: tuple[Callable, ...]  # (captured, b, h, q_idx, kv_idx)
    score_mod: Callable | None  # (differentiable captured, other captured, score, b, h, q_idx, kv_idx)
    rate: float
    product_dtype: Any
    precision: Any
    all_seen: bool  # there is no key that nobody sees, and no query that sees nothing

    def visible(self, fixed: Fixed, i, j) -> Array:
        """Which pairs of a mixed block are visible."""
        where = self._where(fixed, i, j)
        visible = jnp.ones(self.size, bool)
        for mask, captured in zip(self.masks, fixed.mask_captured, strict=True):
            part = mask(captured, *where)
            visible &= part.reshape((1,) * (2 - part.ndim) + part.shape)
        for array in fixed.slot_masks:
            visible &= _block(array, i, j, self.size)
        return visible

    def scores(self, block: Arrays, fixed: Fixed, i, j, masked: bool) -> tuple[Array, Array]:
        """The scores ``[rows, columns]`` of a block, -inf where masked, and its values ``[D, columns]``."""
        q, k, v, scale, bias, captured = block
        visible = self.visible(fixed, i, j) if masked else None
        if visible is not None and not self.all_seen:
            # what nobody in the block sees, and queries that see nothing, may hold NaN, and 0 * NaN is NaN
            q = jnp.where(visible.any(axis=1)[:, None], q, 0.0)
            k, v = (jnp.where(visible.any(axis=0)[None, :], x, 0.0) for x in (k, v))
        if self.product_dtype == q.dtype:
            scores = self.product("qh,hk->qk", q * scale, k)
        else:  # the product of the inputs themselves, not of rounded multiples
            scores = self.product("qh,hk->qk", q, k) * scale
        if bias is not None:
            scores += bias
        if self.score_mod is not None:
            if visible is not None:
                scores = jnp.where(visible, scores, 1.0)  # the stand-in that keeps an infinite derivative away
            scores = self.score_mod(captured, fixed.score_captured, scores, *self._where(fixed, i, j))
        return (scores if visible is None else jnp.where(visible, scores, -jnp.inf)), v

    def sums(self, scores: Array, v: Array, high: Array, fixed: Fixed, i, j) -> tuple[Array, Array]:
        """The block's part of numerator and total."""
        exponentials = jnp.exp(scores - high[:, None])
        total = jnp.sum(exponentials, axis=1)
        if fixed.seeds is not None:
            kept = dropout_keep(fixed.seeds, self.rate, *self._where(fixed, i, j)[2:])
            exponentials = jnp.where(kept, exponentials * (1.0 / (1.0 - self.rate)), 0.0)
        return self.product("qk,dk->qd", exponentials, v), total

    def product(self, formula: str, x: Array, y: Array) -> Array:
        """An einsum of ``product_dtype`` that accumulates in the dtype of its arguments."""
        narrow = (one.astype(self.product_dtype) for one in (x, y))
        return jnp.einsum(formula, *narrow, precision=self.precision, preferred_element_type=x.dtype)

    def _where(self, fixed: Fixed, i, j) -> tuple:
        return fixed.batch, fixed.head, fixed.q_positions[i][:, None], fixed.kv_positions[j][None, :]


def cut_head(
    q, k, v, mask, bias, score_mod, scale, batch, head, query_positions, kv_positions, dropout, precision, block_sizes,
    visible,
) -> tuple[Formula, Arrays, Fixed]:  # fmt: skip
    """One head cut into blocks, with everything that its masks and score function capture as explicit arrays."""
    T, S, dtype = q.shape[0], k.shape[0], softmax_dtype(q)
    parts = () if mask is None else mask if isinstance(mask, tuple | list) else (mask,)
    masks, slot_masks = [x for x in parts if callable(x)], [x for x in parts if not callable(x)]

    if visible is None:
        asked = (masks, slot_masks, batch, head, query_positions, kv_positions, (T, S))
        size, table = choose_blocks(lambda size: visible_blocks(*asked, size), T, S, block_sizes)
        seen = all_seen(*asked)
    else:
        may, must, seen = visible
        size, table = choose_blocks(lambda size: (may, must), T, S, block_sizes)
    batch, head = jnp.asarray(batch), jnp.asarray(head)  # only now: a table of plain numbers is static
    (rows, columns), (full, mixed) = size, block_lists(*table)
    if T % rows:
        slot_masks = [*slot_masks, jnp.ones((T, 1), bool)]
    if S % columns:
        slot_masks = [*slot_masks, jnp.ones((1, S), bool)]
    q_positions, kv_positions = (
        cut(jnp.arange(length) if x is None else jnp.asarray(x), 0, one, fill=None)
        for x, length, one in ((query_positions, T, rows), (kv_positions, S, columns))
    )
    where = [
        jax.ShapeDtypeStruct(shape, x.dtype)
        for shape, x in (((), batch), ((), head), ((rows, 1), q_positions), ((1, columns), kv_positions))
    ]
    pure_masks = [_hoist("mask", one, bool, size, *where) for one in masks]
    captured, score_captured = [], []
    pure_score: Callable | None = None
    if score_mod is not None:
        score = jax.ShapeDtypeStruct(size, dtype)
        pure, consts = _hoist("score_mod", score_mod, jnp.floating, size, score, *where)
        floating = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in consts]
        captured = [x for x, diff in zip(consts, floating, strict=True) if diff]
        score_captured = [x for x, diff in zip(consts, floating, strict=True) if not diff]

        def with_captured(captured, others, *args):
            captured, others = iter(captured), iter(others)
            return pure([next(captured) if diff else next(others) for diff in floating], *args)

        pure_score = with_captured

    arrays = Arrays(
        q=cut(q.astype(dtype), 0, rows),
        k=cut(k.astype(dtype), 0, columns).swapaxes(1, 2),
        v=cut(v.astype(dtype), 0, columns).swapaxes(1, 2),
        scale=jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype),
        bias=None if bias is None else _whole(bias.astype(dtype), size),
        captured=captured,
    )
    seeds = None if dropout is None else dropout_seeds(as_dropout(dropout), batch, head)
    fixed = Fixed(
        batch, head, q_positions, kv_positions, [_whole(jnp.asarray(x), size) for x in slot_masks],
        [consts for _, consts in pure_masks], score_captured, seeds,
        full, mixed,
    )  # fmt: skip
    rate = 0.0 if dropout is None else dropout[0]
    formula = Formula(size, tuple(pure for pure, _ in pure_masks), pure_score, rate, product_dtype(q), precision, seen)
    return formula, arrays, fixed


def product_dtype(x: Array) -> Any:
    """What products are computed in: the inputs' dtype; on CPU at least float32, whose products are faster there."""
    return softmax_dtype(x) if jax.default_backend() == "cpu" else x.dtype


def _whole(array: Array, size: tuple[int, int]) -> Array:
    """``[T|1, S|1]`` filled up with zeros to whole blocks."""
    missing = [0 if length == 1 else -length % one for length, one in zip(array.shape, size, strict=True)]
    return jnp.pad(array, [(0, one) for one in missing])


def _hoist(name: str, mod: Callable, kind: Any, size: tuple[int, int], *where: Any) -> tuple[Callable, list[Any]]:
    """``mod`` as a function of what it captures, and that: a custom rule may close over nothing that is traced."""

    def checked(*args):
        with mod_semantics():
            result = mod(*args)
            check_mod(name, result, kind, size)
            if kind is bool:
                return jnp.asarray(result)
            return jnp.broadcast_to(result, size).astype(args[0].dtype)

    closed = jax.make_jaxpr(checked)(*where)
    return lambda captured, *args: eval_jaxpr(closed.jaxpr, captured, *args)[0], list(closed.consts)


def take(arrays: Arrays, i, j) -> Arrays:
    """The part of the arrays that block ``(i, j)`` needs: linear in them."""
    index = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
    size = (arrays.q.shape[1], arrays.k.shape[2])
    bias = None if arrays.bias is None else _block(arrays.bias, i, j, size)
    return arrays._replace(q=index(arrays.q, i), k=index(arrays.k, j), v=index(arrays.v, j), bias=bias)


def _block(array: Array, i, j, size: tuple[int, int]) -> Array:
    """Block ``(i, j)`` of an array ``[T|1, S|1]``; an axis of 1 is shared by all blocks."""
    sizes = [1 if length == 1 else one for length, one in zip(array.shape, size, strict=True)]
    starts = [0 if length == 1 else at * one for length, at, one in zip(array.shape, (i, j), sizes, strict=True)]
    return jax.lax.dynamic_slice(array, [jnp.asarray(start, jnp.int32) for start in starts], sizes)
