"""Translates a call's masks for ``"splash"``: tables of blocks, masks for its kernels, and ids.

Masks known while tracing determine the blocks; within a block, masks with an interval (``Causal``, ``SlidingWindow``,
``Prefix`` and their combinations) are computed, and all others are read from tables of their partial blocks. Masks that
are traced or differ by sequence (``Segments``, ``Padding`` and the lengths) become an id for each query and key: a
query sees a key only if their ids are equal.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn._blocks.block_lists import split_axis
from jattn._blocks.block_mask import Visibility
from jattn._core.call import Call
from jattn._mods.arrays import calling, cdiv, without_mesh
from jattn._mods.closure_convert import Elementwise, depends_on
from jattn._mods.lookup import ranks
from jattn._mods.mask import conjuncts
from jattn._mods.pytree import known
from jattn._mods.tile_function import NotElementwise, make_tile_function
from jattn.kernels.interface import Unsupported
from jattn.masks import And, MaskFunction, Not, Or, Padding, Segments, interval


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a call's masks, all of which a pair must pass."""

    static: tuple[MaskFunction, ...]  # known while tracing
    segments: Segments | None
    paddings: tuple[Padding, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class HeadMask:
    """One head's static mask. Compares by value, so that equal calls share tables and programs.

    ``static`` decides each pair; ``any_visible`` is False for blocks emptied by any mask, including those represented
    by ids.
    """

    static: tuple[MaskFunction, ...]
    head: int
    lengths: tuple[int, int]
    size: tuple[int, int]
    any_visible: np.ndarray  # [blocks of T, blocks of S]
    all_visible: np.ndarray

    @property
    def padded_lengths(self) -> tuple[int, int]:
        """The lengths, rounded up to whole blocks."""
        T, S = (cdiv(length, size) * size for length, size in zip(self.lengths, self.size, strict=True))
        return T, S

    @property
    def in_kernel(self) -> bool:
        """Whether the kernel computes the mask; otherwise it reads partial blocks, if there are any."""
        return (bool(self.static) or self._pads_keys) and all(map(_is_arithmetic, self.static))

    @property
    def _pads_keys(self) -> bool:
        return self.padded_lengths[1] != self.lengths[1]

    def __call__(self, q_idx: Any, kv_idx: Any) -> jax.Array:
        """The visible pairs for traced indices, in the kernel."""
        visible: Any = kv_idx < self.lengths[1] if self._pads_keys else True
        with calling("mask"):
            for mask in self.static:
                visible = mask(0, self.head, q_idx, kv_idx) & visible
        return jnp.broadcast_to(visible, jnp.broadcast_shapes(q_idx.shape, kv_idx.shape))

    def block(self, row: int, column: int) -> np.ndarray:
        """The visible pairs of one block, ``[1,1]`` if all or none are known to be visible.

        Rows past the end see the same keys as the last row, and no query sees keys past the end.
        """
        if not self.any_visible[row, column] or self.all_visible[row, column]:
            return self.any_visible[row : row + 1, column : column + 1]
        (rows, columns), (T, S) = self.size, self.lengths
        q_idx = np.minimum(np.arange(row * rows, (row + 1) * rows, dtype=np.int32), T - 1)
        kv_idx = np.arange(column * columns, (column + 1) * columns, dtype=np.int32)
        return self.pairs(q_idx[:, None], kv_idx[None, :]) & (kv_idx < S)

    def pairs(self, q_idx: np.ndarray, kv_idx: np.ndarray) -> np.ndarray:
        """The visible pairs for known indices."""
        visible = np.ones(np.broadcast_shapes(q_idx.shape, kv_idx.shape), bool)
        for mask in self.static:
            visible &= _evaluate(mask, self.head, q_idx, kv_idx)
        return visible

    @functools.cached_property
    def seen_keys(self) -> np.ndarray:
        """Whether any query sees each key, ``[S]``."""
        seen = np.repeat((self.all_visible & self.any_visible).any(0)[:, None], self.size[1], 1)
        for row, column in np.argwhere(self.any_visible).tolist():
            if not seen[column].all():
                seen[column] |= self.block(row, column).any(0)
        return seen.ravel()[: self.lengths[1]]

    @property
    def computed(self) -> np.ndarray:
        """Whether each block holds a visible pair. Splash evaluates partial blocks pair by pair and skips the rest."""
        visible = self.any_visible.copy()
        for row, column in np.argwhere(visible).tolist():
            visible[row, column] = self.block(row, column).any()
        return visible

    @property
    def holds_function(self) -> bool:
        """Whether a plain function is among the masks."""
        leaves = jax.tree.leaves(self.static, is_leaf=lambda x: isinstance(x, Elementwise))
        return any(isinstance(leaf, Elementwise) for leaf in leaves)

    @property
    def has_diagonal(self) -> bool:
        """Whether every query sees the key in its own slot, and there are no other keys."""
        slots = np.arange(self.lengths[0], dtype=np.int32)
        return self.lengths[0] == self.lengths[1] and bool(self.pairs(slots, slots).all())

    @functools.cached_property
    def _value(self) -> tuple:
        leaves, structure = jax.tree.flatten((self.static, self.any_visible, self.all_visible))
        values = tuple((type(x), getattr(x, "dtype", None), np.shape(x), np.asarray(x).tobytes()) for x in leaves)
        return structure, values, self.head, self.lengths, self.size

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadMask) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)


@dataclasses.dataclass(frozen=True)
class SplashPlan:
    """The non-array inputs of a kernel call; hashable."""

    masks: tuple[HeadMask, ...]  # one for all heads, or one for each
    size: tuple[int, int]
    soft_cap: float | None
    interpret: bool
    all_keys_seen: bool

    @property
    def is_empty(self) -> bool:
        """Whether no query sees any key."""
        return not self.all_keys_seen and not any(mask.seen_keys.any() for mask in self.masks)


def head_masks(call: Call, size: tuple[int, int]) -> tuple[tuple[HeadMask, ...], bool]:
    """The static masks, one for all heads or one per head, in blocks of this size, and whether all keys are seen.

    Raises:
        Unsupported: a mask differs by head, and the head indices are unknown.
    """
    (B, T, N, _), S = call.query.shape, call.key.shape[1]
    parts = _split(call)
    by_head = any(depends_on(mask, 1) for mask in parts.static)
    if by_head and not isinstance(call.first_head, int):
        raise Unsupported("implementation='splash' cannot do this: a mask that differs by head, over several devices")
    # Blocks emptied by ids can be skipped as well, if the ids are known. In eager calls they are not, so that one
    # compilation serves all ids.
    vectors, slot_masks = [], []
    if isinstance(call.query, Tracer) and isinstance(call.first_batch, int):
        vectors = [mask for mask in (parts.segments, *parts.paddings) if mask is not None and _is_known(mask)]
        slot_masks = [x for x in call.slot_masks if isinstance(x, np.ndarray)]
    b = np.arange(B, dtype=np.int32)[:, None]
    masks = []
    for head in range(N) if by_head else range(1):
        h = np.full((1, 1), head + (call.first_head if by_head else 0), np.int32)
        with _at_once():
            every, full = Visibility((T, S), parts.static, (), b, h).blocks(size)
            possible, _ = Visibility((T, S), (*parts.static, *vectors), slot_masks, b, h).blocks(size)
        every, full, possible = (np.asarray(x).reshape(-1, *x.shape[-2:]) for x in (every, full, possible))
        masks.append(HeadMask(parts.static, int(h[0, 0]), (T, S), size, possible.any(0), full.all(0)))
    self_attention = parts.segments is None or parts.segments.kv_ids is None
    ragged = parts.paddings or call.query_seq_lengths is not None or call.key_value_seq_lengths is not None
    all_keys_seen = not ragged and self_attention and all(mask.has_diagonal for mask in masks)
    return tuple(masks), all_keys_seen


def _split(call: Call) -> Parts:
    """The parts of the masks. At most one ``Segments`` becomes ids; any others must be static."""
    static, segments, paddings = [], None, []
    for mask in (part for joined in call.masks for part in conjuncts(joined)):
        if type(mask) is Segments and segments is None:
            segments = known(mask)
        elif type(mask) is Padding:
            paddings.append(known(mask))
        else:
            static.append(known(mask))
    return Parts(tuple(static), segments, tuple(paddings))


def mask_reason(call: Call) -> str | None:
    """The first reason against the call's masks, or None."""
    parts = _split(call)
    if parts.segments is not None:
        tables = (parts.segments.query_ids, parts.segments.kv_ids)
        if not all(np.can_cast(table.dtype, np.int32) for table in tables if table is not None):
            return "the ids of Segments must fit int32"
    for mask in parts.static:
        if not _is_known(mask):
            return "its masks must be known while tracing, all but Padding and one Segments, joined to the others by &"
        if depends_on(mask, 0):
            return "it takes no masks that differ by sequence but Padding and one Segments, joined to the others by &"
    return None


def _is_known(mask: MaskFunction) -> bool:
    """Whether the mask's values are known while tracing."""
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(mask)):  # known() leaves only unknown arrays
        return False
    one = np.zeros((1, 1), np.int32)
    with _at_once(), calling("mask"):
        return not isinstance(mask(np.int32(0), np.int32(0), one, one), Tracer)


@contextlib.contextmanager
def _at_once() -> Iterator[None]:
    """Evaluates known values even while tracing."""
    with without_mesh(), jax.ensure_compile_time_eval():
        yield


def _evaluate(mask: MaskFunction, head: int, q_idx: np.ndarray, kv_idx: np.ndarray) -> np.ndarray:
    with _at_once(), calling("mask"):
        return np.asarray(mask(np.int32(0), np.int32(head), q_idx, kv_idx))


def _is_arithmetic(mask: MaskFunction) -> bool:
    """Whether a kernel can compute the mask, from intervals joined by ``&``, ``|`` and ``~``."""
    one = np.zeros((1, 1), np.int32)
    joined = jax.tree.leaves(mask, is_leaf=lambda x: not isinstance(x, And | Or | Not))
    if any(interval(part, one, one, one) is None for part in joined):
        return False
    try:
        with without_mesh():
            return not make_tile_function(mask).outside
    except NotElementwise:
        return False


def ids_of(call: Call) -> tuple[jax.Array, jax.Array] | None:
    """Ids ``[B,T]`` and ``[B,S]``, equal where ``Segments``, ``Padding`` and the lengths let a query see a key.

    Slots hidden by a length get one of two negative ids. Segments then use ranks, which are not negative.
    """
    parts = _split(call)
    (B, T), S = call.query.shape[:2], call.key.shape[1]
    b = call.first_batch + jnp.arange(B, dtype=jnp.int32)
    segments = parts.segments
    limits = [mask.lengths for mask in parts.paddings]
    limits = [jnp.take(jnp.asarray(x), b % x.shape[0]) for x in limits]
    limits += [] if call.key_value_seq_lengths is None else [jnp.asarray(call.key_value_seq_lengths)]
    if segments is None and not limits and call.query_seq_lengths is None:
        return None
    q_ids, kv_ids = jnp.zeros((B, T), jnp.int32), jnp.zeros((B, S), jnp.int32)
    if segments is not None:
        q_ids = _rows(segments.query_ids, b)
        kv_ids = q_ids if segments.kv_ids is None else _rows(segments.kv_ids, b)
    if not limits and call.query_seq_lengths is None:
        return q_ids, kv_ids
    if segments is not None:
        both = ranks(jnp.concatenate([q_ids, kv_ids], 1))
        q_ids, kv_ids = both[:, :T], both[:, T:]
    if call.query_seq_lengths is not None:
        q_ids = jnp.where(jnp.arange(T) < jnp.asarray(call.query_seq_lengths)[:, None], q_ids, -2)
    for limit in limits:
        kv_ids = jnp.where(jnp.arange(S) < limit[:, None], kv_ids, -1)
    return q_ids, kv_ids


def _rows(table: Any, b: jax.Array) -> jax.Array:
    """The rows of a table of ids ``[length]`` or ``[B|1, length]``, ``[B, length]``."""
    table = jnp.asarray(table, jnp.int32)
    table = table[None] if table.ndim == 1 else table
    return jnp.take(table, b % table.shape[0], axis=0)


def seen_keys(call: Call, masks: tuple[HeadMask, ...], ids: Any) -> jax.Array | None:
    """Whether any query sees a key, ``[B|1, S, K|1]``; None if all keys are known to be seen while tracing.

    Exact, because unseen keys may be NaN, and a NaN that is seen must propagate. If the result depends on ids, this
    takes one comparison per pair of every sequence.
    """
    if ids is None:
        by_head = np.stack([mask.seen_keys for mask in masks])[None]
        if by_head.all():
            return None
    else:
        (q_ids, kv_ids), (T, S) = ids, masks[0].lengths
        kv_idx = jnp.arange(S, dtype=jnp.int32)[None, :]

        def add(seen: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            q_idx, q_ids = rows
            same = q_ids[:, :, None] == kv_ids[:, None, :]
            visible = jnp.stack([mask(q_idx[:, None], kv_idx) for mask in masks])
            return seen | (visible[None] & same[:, None]).any(2), None

        # Row by row of blocks: XLA may hold such a row, but not all pairs.
        blocks = split_axis(jnp.arange(T, dtype=jnp.int32), 0, masks[0].size[0], fill=None)
        ids_of_blocks = jnp.moveaxis(split_axis(q_ids, 1, masks[0].size[0], fill=None), 1, 0)
        nothing = jnp.zeros((q_ids.shape[0], len(masks), S), bool)
        by_head, _ = jax.lax.scan(add, nothing, (blocks, ids_of_blocks))
    if by_head.shape[1] > 1:  # all query heads of a key head
        K = call.key.shape[2]
        by_head = by_head.reshape(by_head.shape[0], K, -1, by_head.shape[2]).any(2)
    return jnp.asarray(by_head).swapaxes(1, 2)
