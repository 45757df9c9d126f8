"""Chooses what a ring hop computes: the kernel for a chunk of queries and a chunk of keys, and its call.

Which chunks meet depends on the device, so their positions are generally data, and the running program decides what a
query sees. Kernels that know masks only while tracing take no positions. They can run if the visibility between two
chunks follows from their distance, as under a causal mask: nothing, everything, or what a mask based on the distance
shows. The device then picks one of a few calls, each with a static mask.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jattn._blocks.block_lists import SMALL, tile
from jattn._core.call import Call
from jattn._core.chunk import Chunk
from jattn._mods.arrays import Index
from jattn._mods.pytree import pytree_dataclass, static_field
from jattn.kernels import Kernel, Unsupported
from jattn.kernels.blockwise import Blockwise
from jattn.kernels.dispatch import Dispatch
from jattn.masks import And, Causal, Mask, MaskFunction, Not, Or, SlidingWindow, bounds, interval
from jattn.score_mods import SoftCap
from jattn.sharding._rotation import Hop, RingPlan

NOTHING, EVERYTHING, SOMETHING = range(3)
# Chunks up to this length get small blocks: large blocks would take up most of the device's memory.
SHORT = 4096


@pytree_dataclass
class Ahead(Mask):
    """``mask`` for queries whose positions exceed their slots by ``by``."""

    mask: MaskFunction
    by: int = static_field()

    def __call__(self, b: Index, h: Index, q_idx: Index, kv_idx: Index):
        return self.mask(b, h, q_idx + self.by, kv_idx)

    def bounds(self, b: Index, h: Index, q_min: Index, q_max: Index, kv_min: Index, kv_max: Index) -> tuple[Any, Any]:
        return bounds(self.mask, b, h, q_min + self.by, q_max + self.by, kv_min, kv_max)

    def interval(self, b: Index, h: Index, q_idx: Index):
        return interval(self.mask, b, h, q_idx + self.by)


def seen_by_distance(call: Call, chunks: int) -> tuple[int, ...] | None:
    """What a chunk's queries see of another chunk's keys, for each difference of chunk numbers >= -chunks + 1.

    ``NOTHING``, ``EVERYTHING`` or ``SOMETHING``. None if the scores depend on more than that difference, or if the
    result is unknown while tracing.
    """
    T, S = call.query.shape[1], call.key.shape[1]
    others = call.bias, call.query_positions, call.kv_positions, call.dropout
    others += call.query_seq_lengths, call.key_value_seq_lengths
    simple = T == S and not call.slot_masks and all(x is None for x in others)
    if not (simple and isinstance(call.score_mod, SoftCap | None) and all(map(_is_of_distance, call.masks))):
        return None
    last, kinds = np.int32(T // chunks - 1), []
    for distance in range(-chunks + 1, chunks):
        first = np.int32(distance * (last + 1))
        either = [bounds(mask, np.int32(0), np.int32(0), first, first + last, np.int32(0), last) for mask in call.masks]
        seen = [all(one) for one in zip((True, True), *either, strict=True)]
        kinds.append(EVERYTHING if seen[1] else SOMETHING if seen[0] else NOTHING)
    return tuple(kinds)


def _is_of_distance(mask: MaskFunction) -> bool:
    """Whether a mask is known, and depends only on the difference of positions."""
    if isinstance(mask, And | Or | Not):
        parts = [getattr(mask, field.name) for field in dataclasses.fields(mask)]
        return all(map(_is_of_distance, parts))
    known = not any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(mask))
    return type(mask) in (Causal, SlidingWindow) and known


# From a device's queries and the current keys, the call for two of their chunks.
CallOf = Callable[[Call], Call]
# ``carry = visit(carry, kernel, call_of, i, j)``: the work with the i-th query chunk and the j-th key chunk.
VisitPair = Callable[[PyTree, Kernel, CallOf, Index, Index], PyTree]


def each_pair(ring: RingPlan, platform: str, call: Call, hop: Hop, visit: VisitPair, carry: PyTree) -> PyTree:
    """``carry = visit(carry, kernel, call_of, i, j)`` for the i-th query chunk and the j-th chunk of the current keys.

    ``call``: the device's queries and the current keys. ``call_of(call)`` is the call for the two chunks, which
    ``kernel`` runs. Pairs of chunks without visible query-key pairs may be skipped.
    """
    device = jax.lax.axis_index(ring.axis)
    source = (device - hop.step) % ring.devices
    if not _runs_by_distance(ring, platform, call):

        def any_pair(carry: PyTree, i: Index, j: Index) -> PyTree:
            call_of = lambda call: ring.part(call, source, i, j)
            return visit(carry, kernel_of(ring, platform, call_of(call)), call_of, i, j)

        return ring.over_pairs(any_pair, carry)
    masks_of, numbers = _masks_by_distance(ring, call, hop)

    def known_pair(carry: PyTree, i: Index, j: Index) -> PyTree:
        distance = ring.number(device, i) - ring.number(source, j)
        number = jnp.asarray(numbers)[distance]  # counted from the end if negative

        def of(masks: Sequence[MaskFunction] | None) -> PyTree:
            if masks is None:
                return carry
            call_of = lambda call: _call(ring, call, masks, i, j)
            return visit(carry, kernel_of(ring, platform, call_of(call)), call_of, i, j)

        return jax.lax.switch(number, [functools.partial(of, masks) for masks in masks_of])

    return ring.over_pairs(known_pair, carry)


def kernel_of(ring: RingPlan, platform: str, call: Call) -> Kernel:
    """The kernel that computes a pair of chunks: the ring's, the platform's own, or blockwise.

    Raises:
        Unsupported: the given kernel does not support the call.
    """
    kernel = Dispatch().kernel(platform, call) if ring.kernel is None else ring.kernel
    reason = kernel.unsupported_reason(call)
    if reason is not None:
        raise Unsupported(f"a ring cannot run {kernel.name!r} in its hops: {reason}; implementation=None picks one")
    if kernel.platform is None and ring.kernel is None:  # the dense formula would not skip hidden blocks
        lengths = call.query.shape[1], call.key.shape[1]
        return Blockwise(tile(*lengths, SMALL) if max(lengths) <= SHORT else None)
    return kernel.prepare(call)


def _runs_by_distance(ring: RingPlan, platform: str, call: Call) -> bool:
    """Whether the kernel takes no positions and does not need them."""
    if ring.distances is None:
        return False
    kernel = ring.kernel or Dispatch().kernel(platform, _call(ring, call, (), 0, 0))
    return "query_positions" not in kernel.takes


def _call(ring: RingPlan, call: Call, masks: Sequence[MaskFunction], i: Index, j: Index) -> Call:
    """The call for two current chunks; ``masks`` see their slots as positions."""
    t, s = call.query.shape[1] // ring.chunks, call.key.shape[1] // ring.chunks
    call = dataclasses.replace(call, masks=tuple(masks)).take(rows=Chunk(i * t, t), columns=Chunk(j * s, s))
    return dataclasses.replace(call, query_positions=None, kv_positions=None)


def _masks_by_distance(ring: RingPlan, call: Call, hop: Hop) -> tuple[list[Any], np.ndarray]:
    """The masks of each distinct call (or None), and the call number for each difference of chunks.

    Includes only differences that occur in this hop.
    """
    assert ring.distances is not None
    t, devices = call.query.shape[1] // ring.chunks, np.arange(ring.devices)
    chunk = np.arange(ring.chunks)
    of_queries = ring.number(devices[:, None], chunk)  # [devices, chunks]
    there = [of_queries[:, :, None] - of_queries[(devices - step) % ring.devices][:, None] for step in hop.possible]
    kinds, numbers = [], np.zeros(len(ring.distances), np.int32)
    for distance in np.unique(there).tolist():
        seen = ring.distances[distance + len(ring.distances) // 2]
        kind = seen, distance if seen == SOMETHING else 0
        if kind not in kinds:
            kinds.append(kind)
        numbers[distance] = kinds.index(kind)
    masks = {
        NOTHING: lambda distance: None,
        EVERYTHING: lambda distance: (),
        SOMETHING: lambda distance: [Ahead(mask, distance * t) if distance else mask for mask in call.masks],
    }
    return [masks[seen](distance) for seen, distance in kinds], numbers
