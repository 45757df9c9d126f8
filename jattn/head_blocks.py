"""One head cut into blocks: its arrays, and the equations of one block."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jattn.attention import Head, check_mod, softmax_dtype
from jattn.blocks import BlockList, block_lists, cut
from jattn.dropout import Dropout, drop
from jattn.mods import mod_semantics
from jattn.score_mods import ScoreMod
from jattn.tables import fill_up, parts_of


class Arrays(NamedTuple):
    """The head's arrays, in the softmax's dtype. Keys and values stand transposed: so do their gradients then
    come out of the products, and XLA's product on CPU is four times slower when the long axis must turn round."""

    q: Array  # [blocks, rows, H]
    k: Array  # [blocks, H, columns]
    v: Array  # [blocks, D, columns]
    bias: Array | None  # [T|1, S|1], filled up to whole blocks
    q_positions: Array  # [blocks, rows]
    kv_positions: Array  # [blocks, columns]
    slot_masks: list[Array]  # [T|1, S|1], filled up to whole blocks


class Block(NamedTuple):
    """What block ``(i, j)`` has of the arrays."""

    q: Array  # [rows, H]
    k: Array  # [H, columns]
    v: Array  # [D, columns]
    bias: Array | None


@dataclasses.dataclass(frozen=True)
class Formula:
    """The equations of one block, and which blocks there are."""

    arrays: Arrays
    size: tuple[int, int]
    masks: tuple[Any, ...]
    score_mod: ScoreMod | None
    scale: Array
    batch: Any
    head: Any
    dropout: Dropout | None
    product_dtype: Any
    precision: Any
    all_seen: bool  # there is no key that nobody sees, and no query that sees nothing
    full: BlockList
    mixed: BlockList

    def visible(self, i, j) -> Array:
        """Which pairs of a mixed block are visible."""
        where = self._where(i, j)
        visible = jnp.ones(self.size, bool)
        for mask in self.masks:
            with mod_semantics():
                part = mask(*where)
            check_mod("mask", part, bool, self.size)
            part = jnp.asarray(part)
            visible &= part.reshape((1,) * (2 - part.ndim) + part.shape)
        for array in self.arrays.slot_masks:
            visible &= _block(array, i, j, self.size)
        return visible

    def scores(self, block: Block, i, j, masked: bool) -> tuple[Array, Array]:
        """The scores ``[rows, columns]`` of a block, -inf where masked, and its values ``[D, columns]``."""
        q, k, v, bias = block
        visible = self.visible(i, j) if masked else None
        if visible is not None and not self.all_seen:
            # what nobody in the block sees, and queries that see nothing, may hold NaN, and 0 * NaN is NaN
            q = jnp.where(visible.any(axis=1)[:, None], q, 0.0)
            k, v = (jnp.where(visible.any(axis=0)[None, :], x, 0.0) for x in (k, v))
        if self.product_dtype == q.dtype:
            scores = self.product("qh,hk->qk", q * self.scale, k)
        else:  # the product of the inputs themselves, not of rounded multiples
            scores = self.product("qh,hk->qk", q, k) * self.scale
        if bias is not None:
            scores += bias
        if self.score_mod is not None:
            if visible is not None:
                scores = jnp.where(visible, scores, 1.0)  # the stand-in that keeps an infinite derivative away
            with mod_semantics():
                modified = self.score_mod(scores, *self._where(i, j))
            check_mod("score_mod", modified, jnp.floating, self.size)
            scores = jnp.broadcast_to(modified, self.size).astype(scores.dtype)
        return (scores if visible is None else jnp.where(visible, scores, -jnp.inf)), v

    def sums(self, scores: Array, v: Array, high: Array, i, j) -> tuple[Array, Array]:
        """The block's part of numerator and total."""
        exponentials = jnp.exp(scores - high[:, None])
        total = jnp.sum(exponentials, axis=1)
        return self.product("qk,dk->qd", drop(exponentials, self.dropout, self._where(i, j)), v), total

    def product(self, formula: str, x: Array, y: Array) -> Array:
        """An einsum of ``product_dtype`` that accumulates in the dtype of its arguments."""
        narrow = (one.astype(self.product_dtype) for one in (x, y))
        return jnp.einsum(formula, *narrow, precision=self.precision, preferred_element_type=x.dtype)

    def take(self, i, j) -> Block:
        """What block ``(i, j)`` needs: linear in the arrays."""
        index = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False)
        arrays = self.arrays
        bias = None if arrays.bias is None else _block(arrays.bias, i, j, self.size)
        return Block(index(arrays.q, i), index(arrays.k, j), index(arrays.v, j), bias)

    def _where(self, i, j) -> tuple:
        rows, columns = self.arrays.q_positions[i], self.arrays.kv_positions[j]
        return self.batch, self.head, rows[:, None], columns[None, :]


class Cut(NamedTuple):
    """How a head is cut: the size of a block, ``(may, must)`` of all blocks, and ``all_seen`` (``jattn.blocks``)."""

    size: tuple[int, int]
    may: Any
    must: Any
    all_seen: bool


def cut_head(platform: str, q: Array, k: Array, v: Array, head: Head, how: Cut) -> Formula:
    """One head cut into blocks."""
    T, S, dtype, (rows, columns) = q.shape[0], k.shape[0], softmax_dtype(q), how.size
    slot_masks = list(head.slot_masks)
    if T % rows != 0:
        slot_masks.append(jnp.ones((T, 1), bool))
    if S % columns != 0:
        slot_masks.append(jnp.ones((1, S), bool))
    q_positions, kv_positions = (
        cut(jnp.arange(length) if x is None else jnp.asarray(x), 0, one, fill=None)
        for x, length, one in ((head.query_positions, T, rows), (head.kv_positions, S, columns))
    )
    arrays = Arrays(
        q=cut(q.astype(dtype), 0, rows),
        k=cut(k.astype(dtype), 0, columns).swapaxes(1, 2),
        v=cut(v.astype(dtype), 0, columns).swapaxes(1, 2),
        bias=None if head.bias is None else _whole(head.bias.astype(dtype), how.size),
        q_positions=q_positions,
        kv_positions=kv_positions,
        slot_masks=[_whole(jnp.asarray(x), how.size) for x in slot_masks],
    )
    full, mixed = block_lists(how.may, how.must)
    return Formula(
        arrays=arrays,
        size=how.size,
        masks=head.masks,
        score_mod=head.score_mod,
        scale=jnp.asarray(q.shape[-1] ** -0.5 if head.scale is None else head.scale, dtype),
        batch=jnp.asarray(head.batch),
        head=jnp.asarray(head.head),
        dropout=head.dropout,
        product_dtype=product_dtype(platform, q),
        precision=head.precision,
        all_seen=how.all_seen,
        full=full,
        mixed=mixed,
    )


def product_dtype(platform: str, x: Array) -> Any:
    """What products are computed in: the inputs' dtype; on CPU at least float32, whose products are faster there."""
    return softmax_dtype(x) if platform == "cpu" else x.dtype


def _whole(array: Array, size: tuple[int, int]) -> Array:
    """``[T|1, S|1]`` filled up with zeros to whole blocks."""
    whole = [1 if length == 1 else parts_of(length, one) * one for length, one in zip(array.shape, size, strict=True)]
    return fill_up(array, whole)


def _block(array: Array, i, j, size: tuple[int, int]) -> Array:
    """Block ``(i, j)`` of an array ``[T|1, S|1]``; an axis of 1 is shared by all blocks."""
    sizes = [1 if length == 1 else one for length, one in zip(array.shape, size, strict=True)]
    starts = [0 if length == 1 else at * one for length, at, one in zip(array.shape, (i, j), sizes, strict=True)]
    return jax.lax.dynamic_slice(array, [jnp.asarray(start, jnp.int32) for start in starts], sizes)
