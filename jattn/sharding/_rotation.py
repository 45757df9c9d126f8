"""What one device of a ring computes: attention of its own queries to the keys of all devices, one device at a time.

Runs inside ``jax.shard_map``; ``jattn.sharding`` is the entry point. Keys and values rotate by ``ppermute`` while the
device computes with those at hand; ``jattn.merge`` joins the results: https://arxiv.org/abs/2310.01889. In the backward
pass they rotate once more, together with their gradients. If ``row_max`` is the log-sum-exp of whole rows, the sums of
``Blockwise.sums`` over all devices add up to ``acc = out`` and ``row_sum = 1``. So their derivatives add up to
that of ``out = acc / row_sum`` and ``lse = row_max + log(row_sum)``, and a device holds only its own keys and those at
hand.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jaxtyping import PyTree

from jattn.core.arguments import AttentionArgs
from jattn.core.attention import softmax_dtype
from jattn.core.chunk import Chunk, take, take_pairs
from jattn.core.merge import merge
from jattn.kernels import Reduction
from jattn.kernels.blockwise import Blockwise
from jattn.mods.arrays import AnyArray, Index

#: The layouts of a ring, each with the number of chunks of the sequence that a device holds.
LAYOUTS = {"contiguous": 1, "zigzag": 2}


@dataclasses.dataclass(frozen=True)
class RingPlan:
    """The devices along the mesh axis ``axis``, and the ``steps`` (ascending) at which their keys are needed."""

    axis: str
    devices: int
    layout: str
    steps: tuple[int, ...]
    blockwise: Blockwise
    platform: str  # of the devices

    @property
    def chunks(self) -> int:
        """The number of chunks of the sequence on each device."""
        return LAYOUTS[self.layout]

    def rotate(self, visit: Callable, state: Any, keys: PyTree, key_sums: Any = ()) -> tuple[Any, Any]:
        """``state, key_sums = visit(state, key_sums, keys, source)`` with the ``keys`` of each device ``source``.

        ``key_sums`` rotate with the keys they belong to, and end on the device they started from. The last hop of the
        keys is wasted: leaving it out would compile the last visit separately.
        """
        device, shift = jax.lax.axis_index(self.axis), 0
        for first, last in _runs(self.steps):
            keys, key_sums = self._send((keys, key_sums), first - shift)
            if first == last:
                state, key_sums = visit(state, key_sums, keys, (device - first) % self.devices)
                shift = last
                continue

            def body(carry, step):
                state, key_sums, keys = carry
                next_keys = self._send(keys, 1)  # in flight while the device computes
                state, key_sums = visit(state, key_sums, keys, (device - step) % self.devices)
                return (state, self._send(key_sums, 1), next_keys), None

            (state, key_sums, keys), _ = jax.lax.scan(body, (state, key_sums, keys), jnp.arange(first, last + 1))
            shift = last + 1
        return state, self._send(key_sums, -shift)

    def over_pairs(self, visit: Callable, carry: PyTree) -> PyTree:
        """``carry = visit(carry, i, j)`` for the i-th chunk of queries and the j-th of keys."""
        if self.chunks == 1:
            return visit(carry, 0, 0)
        pairs = jnp.array(list(itertools.product(range(self.chunks), repeat=2)))
        return jax.lax.scan(lambda carry, ij: (visit(carry, ij[0], ij[1]), None), carry, pairs)[0]

    def tokens(self, device: Index, chunk: Index, size: int) -> Array:
        """The tokens ``[size]`` of the sequence in a chunk of a device."""
        piece = device if self.layout == "contiguous" else jnp.where(chunk == 0, device, 2 * self.devices - 1 - device)
        return piece * size + jnp.arange(size)

    def part(self, args: AttentionArgs, source: Index, i: Index, j: Index) -> AttentionArgs:
        """The call for the i-th chunk of the device's queries and the j-th of the keys of ``source``."""
        t, s = args.query.shape[1] // self.chunks, args.key.shape[1] // self.chunks
        q_tokens, kv_tokens = self.tokens(jax.lax.axis_index(self.axis), i, t), self.tokens(source, j, s)
        rows = Chunk(i * t, t)
        of_all = Chunk((source * self.chunks + j) * s, s)  # bias and mask arrays have the columns of all devices
        bias, *slot_masks = (take_pairs(x, rows=rows, columns=of_all) for x in (args.bias, *args.slot_masks))
        if args.query_lengths is not None:
            slot_masks.append((q_tokens[None, :] < args.query_lengths[:, None])[:, None, :, None])
        if args.kv_lengths is not None:
            slot_masks.append((kv_tokens[None, :] < args.kv_lengths[:, None])[:, None, None, :])
        part = dataclasses.replace(args, bias=None, slot_masks=()).take(rows=rows, columns=Chunk(j * s, s))
        return dataclasses.replace(
            part,
            bias=bias,
            slot_masks=tuple(slot_masks),
            query_positions=q_tokens[None] if args.query_positions is None else part.query_positions,
            kv_positions=kv_tokens[None] if args.kv_positions is None else part.kv_positions,
        )

    def _send(self, tree: PyTree, shift: int) -> PyTree:
        if shift % self.devices == 0:
            return tree
        pairs = [(device, (device + shift) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, pairs), tree)


def _runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """The first and last of each run of consecutive numbers."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    return list(zip(starts, ends, strict=True))


def take_chunk(x: AnyArray, index: Index, size: int, axis: int) -> AnyArray:
    """The ``index``-th chunk of ``size`` along ``axis``."""
    return take(x, Chunk(index * size, size), axis)


def put_chunk(x: Array, chunk: Array, index: Index, axis: int) -> Array:
    """``x`` with its ``index``-th chunk replaced; the inverse of ``take_chunk``."""
    return jax.lax.dynamic_update_slice_in_dim(x, chunk, index * chunk.shape[axis], axis)


def ring_attend(ring: RingPlan, args: AttentionArgs) -> tuple[Array, Array]:
    """``out [B,T,N,D]`` and ``lse [B,T,N]`` of the device's own queries over the keys of all devices.

    ``args`` is the device's part; its ``slot_masks`` have the device's rows and leave out the lengths.
    Differentiable in reverse mode.
    """
    args = dataclasses.replace(args, first_head=jnp.asarray(args.first_head))
    split, join = _float_leaves(args)

    def compute(floats, others):
        return _forward(ring, join(floats, others))

    def forward(floats, others):
        captured = any(x.perturbed for x in floats[3:])
        floats, others = custom_vjp_primal_tree_values((floats, others))
        out, lse = compute(floats, others)
        rounded = captured and out.dtype != lse.dtype
        return (out, lse), (floats, others, out, lse, () if rounded else None)  # residuals are arrays, or structure

    def backward(residuals, cotangents):
        floats, others, *outputs, rounded = residuals
        pairs = zip(outputs, cotangents, strict=True)
        cotangents = [jnp.zeros_like(x) if isinstance(y, SymbolicZero) else y for x, y in pairs]
        gradients = _backward(ring, join(floats, others), (*outputs, *cotangents), rounded is not None, split, join)
        return [gradient.astype(x.dtype) for gradient, x in zip(gradients, floats, strict=True)], None

    run = jax.custom_vjp(compute)
    run.defvjp(forward, backward, symbolic_zeros=True)
    floats, others = split(args)
    return run(floats, others)


def _float_leaves(args: AttentionArgs) -> tuple[Callable, Callable]:
    """``split``: a call to its float arrays (query, key, value first) and its others; ``join``: the inverse."""
    leaves, structure = jax.tree.flatten(args)
    is_array = [isinstance(x, jax.Array) for x in leaves]
    is_float = [array and jnp.issubdtype(x.dtype, jnp.floating) for x, array in zip(leaves, is_array, strict=True)]

    def split(args):
        floats_and_others: list[list[Array]] = [[], []]
        for x, array, floating in zip(jax.tree.leaves(args), is_array, is_float, strict=True):
            if array:
                floats_and_others[not floating].append(x)
        return floats_and_others

    def join(floats, others):
        rest = iter(floats), iter(others)
        kinds = zip(leaves, is_array, is_float, strict=True)
        return jax.tree.unflatten(structure, [next(rest[not floating]) if array else x for x, array, floating in kinds])

    return split, join


def _forward(ring: RingPlan, args: AttentionArgs) -> tuple[Array, Array]:
    dtype, (B, T, N, _), D = softmax_dtype(args.query), args.query.shape, args.value.shape[3]

    def attend_group(outputs, args, h):
        t, G = args.query.shape[1] // ring.chunks, args.query.shape[2]

        def visit(state, key_sums, keys, source):
            at_hand = dataclasses.replace(args, **keys)

            def attend_pair(state, i, j):
                old_out, old_lse = (take_chunk(x, i, t, 1) for x in state)
                out, lse = ring.blockwise.run(ring.part(at_hand, source, i, j))
                merged = merge(old_out, old_lse, out.astype(dtype), lse)
                return tuple(put_chunk(x, new, i, 1) for x, new in zip(state, merged, strict=True))

            return ring.over_pairs(attend_pair, state), key_sums

        unit = jnp.zeros((B, T, G, D), dtype), jnp.full((B, T, G), -jnp.inf, dtype)
        state, _ = ring.rotate(visit, unit, _rotating(args))
        return [_add_chunk(x, chunk, h) for x, chunk in zip(outputs, state, strict=True)]

    zeros = [jnp.zeros((B, T, N, D), dtype), jnp.zeros((B, T, N), dtype)]
    out, lse = _each_kv_head(ring, attend_group, zeros, args)
    return out.astype(args.value.dtype), lse


def _backward(
    ring: RingPlan, args: AttentionArgs, results: Sequence[Array], rounded: bool, split: Callable, join: Callable
) -> list[Array]:
    """The gradients of ``split``'s floats; ``results``: out and lse, and the cotangents of both.

    ``rounded``: multiply d_out by an output that is not rounded, as in ``jattn.blocks.backward``.
    """

    def differentiate_group(gradients, args, h):
        t, G = args.query.shape[1] // ring.chunks, args.query.shape[2]
        out, lse, d_out, d_lse = (take_chunk(x, h, G, 2) for x in results)
        # The cotangents of the sums, at acc = out and row_sum = 1.
        seen = lse != -jnp.inf
        d_acc = jnp.where(seen[..., None], d_out.astype(lse.dtype), 0.0)
        product = _product(ring, args, lse, d_acc) if rounded else jnp.sum(d_acc * out.astype(lse.dtype), -1)
        d_row_sum = jnp.where(seen, d_lse - product, 0.0)

        def visit(state, key_sums, keys, source):
            floats, others = split(dataclasses.replace(args, **keys))

            def differentiate_pair(carry, i, j):
                def accumulate(floats):
                    part = ring.part(join(floats, others), source, i, j)
                    return ring.blockwise.sums(part, take_chunk(lse, i, t, 1))

                _, pull = jax.vjp(accumulate, floats)
                (d_floats,) = pull(tuple(take_chunk(x, i, t, 1) for x in (d_acc, d_row_sum)))
                return [x + y.astype(x.dtype) for x, y in zip(carry, d_floats, strict=True)]

            query, *rest = state
            query, key, value, *rest = ring.over_pairs(differentiate_pair, [query, *key_sums, *rest])
            return [query, *rest], [key, value]

        query, key, value, *rest = (jnp.zeros(x.shape, softmax_dtype(x)) for x in split(args)[0])
        (query, *rest), (key, value) = ring.rotate(visit, [query, *rest], _rotating(args), [key, value])
        own = (query, key, value, *rest)
        return [_add_chunk(x, chunk, h) for x, chunk in zip(gradients, own, strict=True)]

    zeros = [jnp.zeros(x.shape, softmax_dtype(x)) for x in split(args)[0]]
    return _each_kv_head(ring, differentiate_group, zeros, args)


def _product(ring: RingPlan, args: AttentionArgs, lse: Array, d_out: Array) -> Array:
    """The sums ``[B,T,N]`` of ``d_out`` times an output computed anew: the keys rotate once more."""
    t = args.query.shape[1] // ring.chunks

    def visit(product, key_sums, keys, source):
        def add_pair(product, i, j):
            part = ring.part(dataclasses.replace(args, **keys), source, i, j)
            acc, _ = ring.blockwise.sums(part, take_chunk(lse, i, t, 1))
            added = take_chunk(product, i, t, 1) + jnp.sum(acc * take_chunk(d_out, i, t, 1), -1)
            return put_chunk(product, added, i, 1)

        return ring.over_pairs(add_pair, product), key_sums

    return ring.rotate(visit, jnp.zeros_like(lse), _rotating(args))[0]


def ring_fold(ring: RingPlan, args: AttentionArgs, reduction: Reduction) -> dict[str, Array]:
    """``ReducesWeights.fold`` for the device's own queries and the keys of all devices.

    Offsets are those of tokens, and every device gets the sums over all devices.
    """
    (B, T, N, _), S, dtype = args.query.shape, args.key.shape[1], reduction.lse.dtype
    t, s, all_queries = T // ring.chunks, S // ring.chunks, ring.devices * T
    result_kinds = reduction.result_kinds
    sizes = {"row_sum": T, "row_max": T, "column_sum": S, "diagonal_sum": max(all_queries + ring.devices * S - 1, 0)}

    def initial(num_heads: int) -> dict[str, Array]:
        fill, types = {"row_max": -jnp.inf}, {"visible": jnp.int32}
        return {
            name: jnp.full((B, num_heads, sizes[kind]), fill.get(kind, 0), types.get(name, dtype))
            for name, kind in result_kinds.items()
        }

    def fold_group(results, args, h):
        group_lse = take_chunk(reduction.lse, h, args.query.shape[2], 2)

        def visit(state, key_sums, keys, source):
            own_keys, columns = keys
            at_hand = dataclasses.replace(args, **own_keys)

            def fold_pair(carry, i, j):
                own = dataclasses.replace(
                    reduction,
                    lse=take_chunk(group_lse, i, t, 1),
                    rows={name: take_chunk(x, i, t, 1) for name, x in reduction.rows.items()},
                    columns={name: take_chunk(x, j, s, 1) for name, x in columns.items()},
                )
                chunk = ring.blockwise.fold(ring.part(at_hand, source, i, j), own)
                first = ring.tokens(source, j, s)[0] - ring.tokens(jax.lax.axis_index(ring.axis), i, t)[0]
                starts = {
                    "row_sum": i * t,
                    "row_max": i * t,
                    "column_sum": j * s,
                    "diagonal_sum": first - t + all_queries,
                }
                return {
                    name: _combine(result_kinds[name], carry[name], x, starts[result_kinds[name]])
                    for name, x in chunk.items()
                }

            both = ring.over_pairs(fold_pair, state | key_sums)
            return {name: both[name] for name in state}, {name: both[name] for name in key_sums}

        state = initial(args.query.shape[2])
        key_sums = {name: state.pop(name) for name, kind in result_kinds.items() if kind == "column_sum"}
        state, key_sums = ring.rotate(visit, state, (_rotating(args), reduction.columns), key_sums)
        return {name: _add_chunk(x, (state | key_sums)[name], h) for name, x in results.items()}

    results = _each_kv_head(ring, fold_group, jax.tree.map(jnp.zeros_like, initial(N)), args)
    by_offset = [name for name, kind in result_kinds.items() if kind == "diagonal_sum"]
    return results | {name: jax.lax.psum(results[name], ring.axis) for name in by_offset}


def _combine(kind: str, x: Array, chunk: Array, start: Index) -> Array:
    """``x [B,N,...]`` with ``chunk`` added from ``start`` on, or its maximum taken for the kind ``"row_max"``."""
    combine = jnp.maximum if kind == "row_max" else jnp.add
    old = jax.lax.dynamic_slice_in_dim(x, start, chunk.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(x, combine(old, chunk), start, 2)


def _rotating(args: AttentionArgs) -> dict[str, Any]:
    """The fields of a call that rotate."""
    fields = {name: getattr(args, name) for name in ("key", "value", "kv_positions")}
    return {name: x for name, x in fields.items() if x is not None}


def _each_kv_head(ring: RingPlan, fn: Callable, carry: PyTree, args: AttentionArgs) -> PyTree:
    """``carry = fn(carry, the call of a key/value head, its index)``: one by one on CPU, elsewhere all at once."""
    K = args.key.shape[2]
    if K == 1 or ring.platform != "cpu":
        return fn(carry, args, 0)
    body = lambda carry, h: (fn(carry, args.take(heads=Chunk(h, 1)), h), None)
    return jax.lax.scan(body, carry, jnp.arange(K))[0]


def _add_chunk(x: Array, chunk: Array, index: Index) -> Array:
    """``x`` with ``chunk`` added to its ``index``-th chunk, along the axis in which their shapes differ."""
    for axis, (size, part) in enumerate(zip(x.shape, chunk.shape, strict=True)):
        if size != part:
            return put_chunk(x, take_chunk(x, index, part, axis) + chunk, index, axis)
    return x + chunk
