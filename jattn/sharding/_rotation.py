"""Rotates keys around a ring: determines which device computes with which keys, and what travels meanwhile.

Runs inside ``jax.shard_map``. Keys and values rotate by ``ppermute`` and leave for the next device before the work with
them begins (https://arxiv.org/abs/2310.01889). Sums for a key, such as its gradient, follow one hop behind: they leave
when a hop's work begins, and the hop's result is added when they arrive. A compiler can therefore send both while the
device computes.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jattn._core.arguments import masks_of_lengths
from jattn._core.call import Call
from jattn._core.chunk import Chunk, take
from jattn._mods.arrays import AnyArray, Index
from jattn.kernels import Kernel
from jattn.sharding._mask_tables import of_chunks

#: The layouts of a ring, each with the number of sequence chunks per device.
LAYOUTS = {"contiguous": 1, "zigzag": 2}
# With at least this many queries per device, a hop of a single head gives an accelerator enough work.
MANY = 4096


class Hop(NamedTuple):
    """One turn of a ring: the current keys come from the device ``step`` places before this one."""

    step: Index
    possible: tuple[int, ...]  # possible values of ``step``, if it is traced


# ``state, added = visit(state, keys, hop)``: the work with the keys of one device, and what it adds for them.
Visit = Callable[[PyTree, PyTree, Hop], tuple[Any, Any]]
# ``carry = visit(carry, i, j)``: the work with the i-th query chunk and the j-th key chunk.
VisitChunks = Callable[[PyTree, Index, Index], PyTree]
# ``carry = of_kv_head(carry, call, h)``: the work with the call of the h-th key/value head.
OfKvHead = Callable[[PyTree, Call, Index], PyTree]


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """The devices along the mesh axis ``axis``, and the ``steps``, ascending from 0, at which their keys are needed."""

    axis: str
    devices: int
    layout: str
    steps: tuple[int, ...]
    kernel: Kernel | None  # for each hop; None: the platform's choice
    gradient_dtype: DTypeLike | None  # of traveling key and value gradients; None: the dtype of their sums
    distances: tuple[int, ...] | None  # as from ``jattn.sharding._pairs.seen_by_distance``

    @property
    def chunks(self) -> int:
        """The number of sequence chunks per device."""
        return LAYOUTS[self.layout]

    def rotate(self, visit: Visit, state: PyTree, keys: PyTree, *, sums: bool = False) -> tuple[Any, Any]:
        """``state, added = visit(state, keys, hop)`` with the needed ``keys`` of each device, one by one.

        With ``sums``, also returns the sum of what the devices ``added`` for this device's keys. Its own keys then come
        last, while the sums of the others travel home; otherwise they come first. No hop is wasted, so the first and
        last visits are compiled separately from the loop over the visits in between.
        """
        total = None
        visits = self.steps[1:] if sums else self.steps
        home, gaps = keys, np.diff(visits)

        def work(state: PyTree, total: PyTree, keys: PyTree, hop: Hop, before: int, after: int) -> tuple:
            # Data that has arrived leaves before more work begins: otherwise, XLA may hide a hop behind too little
            # work.
            state, total, keys = jax.lax.optimization_barrier((state, total, keys))
            following, arriving = self.send(keys, after), self._send_sums(total, before)
            state, added = visit(state, keys, hop)
            return state, added if total is None else jax.tree.map(jnp.add, arriving, added), following

        def in_loop(k: int) -> bool | np.bool_:
            """Whether the k-th visit is one step from each of its neighbors."""
            follows = not sums or (k > 0 and gaps[k - 1] == 1)
            return follows and k < len(gaps) and gaps[k] == 1

        if sums and visits:
            keys = self.send(keys, visits[0])
        k = 0
        while k < len(visits):
            alike = list(itertools.takewhile(in_loop, range(k, len(visits))))
            if len(alike) > 1:
                steps = tuple(visits[i] for i in alike)

                def body(carry: tuple, step: Array, steps: tuple[int, ...] = steps) -> tuple[tuple, None]:
                    state, total, keys = carry
                    return work(state, total, keys, Hop(step, steps), 1, 1), None

                (state, total, keys), _ = jax.lax.scan(body, (state, total, keys), jnp.array(steps))
                k = alike[-1] + 1
            else:
                before, after = (int(gaps[i]) if 0 <= i < len(gaps) else 0 for i in (k - 1, k))
                state, total, keys = work(state, total, keys, Hop(visits[k], visits[k : k + 1]), before, after)
                k += 1
        if sums:
            state, total, _ = work(state, total, home, Hop(0, (0,)), -visits[-1] if visits else 0, 0)
        return jax.lax.optimization_barrier((state, total))

    def over_pairs(self, visit: VisitChunks, carry: PyTree) -> PyTree:
        """``carry = visit(carry, i, j)`` for the i-th query chunk and the j-th key chunk."""
        if self.chunks == 1:
            return visit(carry, 0, 0)
        pairs = jnp.array(list(itertools.product(range(self.chunks), repeat=2)))
        return jax.lax.scan(lambda carry, ij: (visit(carry, ij[0], ij[1]), None), carry, pairs)[0]

    def number(self, device: Index | np.ndarray, chunk: Index) -> Index | np.ndarray:
        """The number of a device's chunk among all chunks of the sequence: from the front, or (the second) the back."""
        return device + chunk * (2 * self.devices - 1 - 2 * device)

    def tokens(self, device: Index, chunk: Index, size: int) -> Array:
        """The tokens ``[size]`` of the sequence in a chunk of a device."""
        return jnp.asarray(self.number(device, chunk) * size) + jnp.arange(size)

    def part(self, call: Call, source: Index, i: Index, j: Index) -> Call:
        """The call for the i-th chunk of the device's queries and the j-th chunk of ``source``'s keys."""
        t, s = call.query.shape[1] // self.chunks, call.key.shape[1] // self.chunks
        device = jax.lax.axis_index(self.axis)
        q_tokens, kv_tokens = self.tokens(device, i, t), self.tokens(source, j, s)
        rows = Chunk(i * t, t)
        of_all = Chunk((source * self.chunks + j) * s, s)  # bias and mask arrays have the columns of all devices
        columns = Chunk(j * s, s)
        part = call.take(rows=rows, columns=columns, pair_columns=of_all)
        of_lengths = masks_of_lengths(call.query_seq_lengths, call.key_value_seq_lengths, q_tokens, kv_tokens)
        return dataclasses.replace(
            part,
            masks=of_chunks(call.masks, rows, columns, self.number(device, i) * t, self.number(source, j) * s),
            slot_masks=(*part.slot_masks, *of_lengths),
            query_positions=q_tokens[None] if call.query_positions is None else part.query_positions,
            kv_positions=kv_tokens[None] if call.kv_positions is None else part.kv_positions,
        )

    def send(self, tree: PyTree, shift: int) -> PyTree:
        """``tree`` from the device ``shift`` places before this one."""
        if shift % self.devices == 0:
            return tree
        pairs = [(device, (device + shift) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)

    def _send_sums(self, tree: PyTree, shift: int) -> PyTree:
        if self.gradient_dtype is None:
            return self.send(tree, shift)
        sent = self.send(jax.tree.map(lambda x: x.astype(self.gradient_dtype), tree), shift)
        return jax.tree.map(lambda x, like: x.astype(like.dtype), sent, tree)


def each_kv_head(platform: str, of_kv_head: OfKvHead, carry: PyTree, call: Call) -> PyTree:
    """``carry = of_kv_head(carry, call, h)`` with the call of each key/value head, or once with the call of all heads.

    With many queries per device, heads run one by one, so that the rotation holds only a single head's data at a time.
    """
    T, K = call.query.shape[1], call.key.shape[2]
    if K == 1 or (platform != "cpu" and T < MANY):
        return of_kv_head(carry, call, 0)
    body = lambda carry, h: (of_kv_head(carry, call.take(heads=Chunk(h, 1)), h), None)
    return jax.lax.scan(body, carry, jnp.arange(K))[0]


def take_chunk(x: AnyArray, index: Index, size: int, axis: int) -> AnyArray:
    """The ``index``-th chunk of ``size`` along ``axis``."""
    return take(x, Chunk(index * size, size), axis)


def put_chunk(x: Array, chunk: Array, index: Index, axis: int) -> Array:
    """``x`` with its ``index``-th chunk replaced; the inverse of ``take_chunk``."""
    return jax.lax.dynamic_update_slice_in_dim(x, chunk, index * chunk.shape[axis], axis)


def add_chunk(x: Array, chunk: Array, index: Index) -> Array:
    """``x`` with ``chunk`` added to its ``index``-th chunk, along the axis in which their shapes differ."""
    for axis, (size, part) in enumerate(zip(x.shape, chunk.shape, strict=True)):
        if size != part:
            return put_chunk(x, take_chunk(x, index, part, axis) + chunk, index, axis)
    return x + chunk
