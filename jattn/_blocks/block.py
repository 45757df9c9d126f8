"""The equations of one block of one head: its scores, softmax sums, and input arrays."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array, PyTree

from jattn._blocks.block_lists import BlockList, Piece, Size, block_lists, split_axis
from jattn._core.attention import evaluate_mask, finish_scores
from jattn._core.call import Call, softmax_dtype
from jattn._core.dropout import drop
from jattn._mods.arrays import AnyArray, Index, Length, cdiv, pad_end


class HeadArrays(NamedTuple):
    """One head's arrays, split into blocks.

    Keys and values are transposed, so the products also yield transposed gradients; on CPU, XLA's product is four times
    slower if it has to transpose the long axis.
    """

    q: Array  # [blocks, rows, H]
    k: Array  # [blocks, H, columns]
    v: Array  # [blocks, D, columns]
    bias: Array | None  # [T|1, S|1], padded to whole blocks
    q_positions: Array  # [blocks, rows]
    kv_positions: Array  # [blocks, columns]
    slot_masks: list[Array]  # [T|1, S|1], padded to whole blocks


class Block(NamedTuple):
    """The array slices that block ``(i, j)`` reads."""

    q: Array  # [rows, H]
    k: Array  # [H, columns]
    v: Array  # [D, columns]
    bias: Array | None


class BlockPlan(NamedTuple):
    """How to split a head: the block size, the tables and ``all_seen`` of its ``Visibility``, and ``cut``."""

    size: tuple[int, int]
    any_visible: AnyArray
    all_visible: AnyArray
    all_seen: bool  # every query sees a key and every key is seen
    pieces: tuple[Piece, ...] = ()  # of partial blocks, if they are cut; rows in no piece see nothing there


@dataclasses.dataclass(frozen=True)
class BlockedHead:
    """One head split into blocks: the equations of a block, and the lists of full and partial blocks."""

    arrays: HeadArrays
    call: Call  # with first_batch and first_head as arrays
    scale: Array
    plan: BlockPlan
    dtype: DTypeLike  # the softmax's dtype, used for blocks and their results
    product_dtype: DTypeLike
    lists: tuple[BlockList, BlockList]  # of full and of partial blocks

    def visible(self, i: Index, j: Index, piece: Piece | None = None) -> Array:
        """The visible pairs of a partial block or a piece of it, bool ``[rows, columns]``."""
        indices = self.indices(i, j, piece)
        visible = jnp.ones((indices[2].shape[0], indices[3].shape[1]), bool)
        for mask in self.call.masks:
            visible &= evaluate_mask(mask, indices)
        for array in self.arrays.slot_masks:
            visible &= _of_piece(take_block(array, i, j, self.plan.size), piece)
        return visible

    def scores(self, block: Block, i: Index, j: Index, masked: bool, piece: Piece | None = None) -> tuple[Array, Array]:
        """The scores ``[rows, columns]`` of a block, -inf where masked, and its values ``[D, columns]``.

        With ``piece``, only for its rows and columns.
        """
        q, k, v, bias = block
        if piece is not None:
            rows, columns = piece
            q, k, v, bias = q[rows], k[:, columns], v[:, columns], None if bias is None else _of_piece(bias, piece)
        visible = self.visible(i, j, piece) if masked else None
        if visible is not None and not self.plan.all_seen:
            # Unseen keys, and queries that see nothing, may hold NaN; 0 * NaN is NaN.
            q = jnp.where(visible.any(axis=1)[:, None], q, 0.0)
            k, v = (jnp.where(visible.any(axis=0)[None, :], x, 0.0) for x in (k, v))
        if self.product_dtype == q.dtype:
            scores = self.product("qh,hk->qk", q * self.scale, k)
        else:  # multiply the inputs themselves, not rounded multiples of them
            scores = self.product("qh,hk->qk", q, k) * self.scale
        indices = functools.partial(self.indices, i, j, piece)
        return finish_scores(scores, bias, visible, self.call, indices), v

    def softmax_sums(
        self, scores: Array, v: Array, row_max: Array, i: Index, j: Index, piece: Piece | None = None
    ) -> tuple[Array, Array]:
        """The contribution of the block, or a piece of it, to ``acc`` and ``row_sum``."""
        exponentials = jnp.exp(scores - row_max[:, None])
        row_sum = jnp.sum(exponentials, axis=1)
        return self.product("qk,dk->qd", self.drop(exponentials, i, j, piece), v), row_sum

    def by_piece(self, masked: bool, compute: Callable[[Piece | None], PyTree], untouched: PyTree) -> PyTree:
        """``compute(None)``; for a cut partial block, the joined results of ``compute`` for the rows of each piece.

        ``untouched``: the result for rows in no piece, a tree of arrays ``[rows, ...]``.
        """
        if not masked or not self.plan.pieces:
            return compute(None)
        results, end, rows = [], 0, self.plan.size[0]
        for piece in (*self.plan.pieces, (slice(rows, rows), None)):
            if end < piece[0].start:
                results.append(jax.tree.map(lambda x, rows=slice(end, piece[0].start): x[rows], untouched))
            if piece[1] is not None:
                results.append(compute(piece))
            end = piece[0].stop
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *results)

    def drop(self, exponentials: Array, i: Index, j: Index, piece: Piece | None = None) -> Array:
        """The block's exponentials, or weights, after dropout."""
        return drop(exponentials, self.call.dropout, self.indices(i, j, piece))

    def product(self, subscripts: str, x: Array, y: Array) -> Array:
        """An einsum in ``product_dtype`` that accumulates in its arguments' dtype, as do its derivatives."""
        return _product(subscripts, self.product_dtype, self.call.precision, x, y)

    def take(self, i: Index, j: Index, *, transposable: bool = True) -> Block:
        """The slices of block ``(i, j)``, linear in the arrays."""
        index = functools.partial(jax.lax.dynamic_index_in_dim, keepdims=False) if transposable else _index(0)
        arrays = self.arrays
        bias = None if arrays.bias is None else take_block(arrays.bias, i, j, self.plan.size)
        q, k, v = (index(x, at).astype(self.dtype) for x, at in ((arrays.q, i), (arrays.k, j), (arrays.v, j)))
        return Block(q, k, v, bias)

    def indices(self, i: Index, j: Index, piece: Piece | None = None) -> tuple:
        rows, columns = self.arrays.q_positions[i], self.arrays.kv_positions[j]
        if piece is not None:
            rows, columns = rows[piece[0]], columns[piece[1]]
        return self.call.first_batch, self.call.first_head, rows[:, None], columns[None, :]


def split_head(platform: str, head: Call, plan: BlockPlan, *, differentiated: bool = True) -> BlockedHead:
    """Splits one head into blocks.

    ``differentiated``: keep query, key and value in the softmax's dtype, in which block gradients are summed.
    """
    q, k, v = head.query, head.key, head.value
    (T, S), dtype, (rows, columns) = head.lengths, softmax_dtype(q), plan.size
    q_positions, kv_positions = (
        split_axis(jnp.arange(length) if positions is None else jnp.asarray(positions), 0, size, fill=None)
        for positions, length, size in ((head.query_positions, T, rows), (head.kv_positions, S, columns))
    )
    kept = dtype if differentiated else product_dtype(platform, k)
    arrays = HeadArrays(
        q=split_axis(q.astype(kept), 0, rows),
        k=split_axis(k.astype(kept), 0, columns).swapaxes(1, 2),
        v=split_axis(v.astype(kept), 0, columns).swapaxes(1, 2),
        bias=None if head.bias is None else pad_to_blocks(head.bias.astype(dtype), plan.size),
        q_positions=q_positions,
        kv_positions=kv_positions,
        slot_masks=pad_slot_masks(head.slot_masks, (T, S), plan.size),
    )
    scale = jnp.asarray(head.score_scale, dtype)
    indices = {"first_batch": jnp.asarray(head.first_batch), "first_head": jnp.asarray(head.first_head)}
    lists = block_lists(plan.any_visible, plan.all_visible)
    head = dataclasses.replace(head, **indices)
    return BlockedHead(arrays, head, scale, plan, dtype, product_dtype(platform, k), lists)


def _of_piece(array: Array, piece: Piece | None) -> Array:
    """A piece of ``[rows|1, columns|1]``."""
    if piece is None:
        return array
    rows, columns = (part if size > 1 else slice(None) for part, size in zip(piece, array.shape, strict=True))
    return array[rows, columns]


@functools.cache
def _index(axis: int) -> Callable[[Array, Index], Array]:
    """``(x, i) -> x[i]`` on an axis. Remains a slice under ``vmap``, where JAX's indexing becomes a slower gather."""

    @jax.custom_batching.custom_vmap
    def index(x: Array, i: Index) -> Array:
        return jax.lax.dynamic_index_in_dim(x, i, axis, keepdims=False)

    @index.def_vmap
    def batched(size: Length, in_batched: Sequence[bool], x: Array, i: Index) -> tuple[Array, bool]:
        if in_batched == [True, False]:
            return _index(axis + 1)(x, i), True
        index_one = functools.partial(jax.lax.dynamic_index_in_dim, axis=axis, keepdims=False)
        return jax.vmap(index_one, [0 if is_batched else None for is_batched in in_batched])(x, i), True

    return index


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _product(subscripts: str, dtype: DTypeLike, precision: PrecisionLike, x: Array, y: Array) -> Array:
    operands = (operand.astype(dtype) for operand in (x, y))
    return jnp.einsum(subscripts, *operands, precision=precision, preferred_element_type=x.dtype)


def _product_jvp(subscripts: str, dtype: DTypeLike, precision: PrecisionLike, primals: tuple, tangents: tuple):
    # The tangents keep their dtype. If they were cast like the operands, the transposed products would be rounded to
    # ``dtype`` block by block before they are summed. A zero tangent is not multiplied: the work would be wasted, and
    # XLA's CPU compiler (jaxlib 0.10 to 0.12) gives wrong numbers for some products with a constant.
    (x, y), (dx, dy) = primals, tangents
    einsum = functools.partial(jnp.einsum, subscripts, precision=precision, preferred_element_type=x.dtype)
    out = _product(subscripts, dtype, precision, x, y)
    terms = [] if isinstance(dx, SymbolicZero) else [einsum(dx, y.astype(dtype))]
    if not isinstance(dy, SymbolicZero):
        terms.append(einsum(x.astype(dtype), dy))
    return out, functools.reduce(jnp.add, terms) if terms else jnp.zeros_like(out)


_product.defjvp(_product_jvp, symbolic_zeros=True)


def product_dtype(platform: str, x: Array) -> DTypeLike:
    """The dtype of products: the inputs' dtype, but at least float32 on CPU, where that is faster."""
    return softmax_dtype(x) if platform == "cpu" else x.dtype


def pad_to_blocks(array: Array, block_size: Size) -> Array:
    """``[..., T|1, S|1]`` zero-padded to whole blocks."""
    pairs = zip(array.shape[-2:], block_size, strict=True)
    padded = [1 if length == 1 else cdiv(length, size) * size for length, size in pairs]
    return pad_end(array, [*array.shape[:-2], *padded])


def pad_slot_masks(
    slot_masks: Iterable[AnyArray], lengths: tuple[Length, Length], block_size: Size, lead: tuple[int, ...] = ()
) -> list[Array]:
    """Slot masks ``[*lead, T|1, S|1]`` zero-padded to whole blocks, plus masks that hide other arrays' padding."""
    (T, S), (rows, columns) = lengths, block_size
    slot_masks = list(slot_masks)
    if T % rows != 0:
        slot_masks.append(jnp.ones((*lead, T, 1), bool))
    if S % columns != 0:
        slot_masks.append(jnp.ones((*lead, 1, S), bool))
    return [pad_to_blocks(jnp.asarray(x), block_size) for x in slot_masks]


def take_block(array: Array, i: Index, j: Index, block_size: Size) -> Array:
    """Block ``(i, j)`` of an array ``[..., T|1, S|1]``; an axis of size 1 is shared by all blocks."""
    lead, lengths = array.shape[:-2], array.shape[-2:]
    sizes = [1 if length == 1 else size for length, size in zip(lengths, block_size, strict=True)]
    starts = [0 if length == 1 else index * size for length, index, size in zip(lengths, (i, j), sizes, strict=True)]
    starts = [jnp.asarray(start, jnp.int32) for start in (*(0 for _ in lead), *starts)]
    return jax.lax.dynamic_slice(array, starts, (*lead, *sizes))
