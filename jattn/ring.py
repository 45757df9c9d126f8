"""What one device of a ring does: its own queries, and the keys of all devices, one device's after the other.

Inside ``jax.shard_map``; ``jattn.sharding`` is the way in. Keys and values go round by ``ppermute`` while the device
computes with those at hand, and what it finds is joined by ``jattn.merge``: https://arxiv.org/abs/2310.01889. In the
backward pass they go round once more, and their gradients with them. With the log-sum-exp of whole rows as ``high``,
``jattn.blockwise.sums`` over the keys of all devices add up to ``numerator = out`` and ``total = 1``; so the
derivatives of these sums add up to that of ``out = numerator / total`` and ``lse = high + log(total)``, and a device
keeps nothing but its own stretch and the one at hand.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jattn.attention import merge, softmax_dtype
from jattn.kernels import blockwise
from jattn.request import Request

LAYOUTS = {"contiguous": 1, "zigzag": 2}  # chunks of each device


@dataclasses.dataclass(frozen=True)
class Circle:
    """The devices along the mesh axis ``axis``, and how far (``steps``, ascending) keys travel along it."""

    axis: str
    devices: int
    layout: str
    steps: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Of how many pieces of the sequence a device's stretch is made."""
        return LAYOUTS[self.layout]

    def travel(self, visit: Callable, state: Any, keys: Any, sums: Any = ()) -> tuple[Any, Any]:
        """``state, sums = visit(state, sums, keys, source)`` with the ``keys`` of every device ``source`` in turn.

        ``sums`` travel with the keys that they belong to, and are at home in the end.
        """
        here, at = jax.lax.axis_index(self.axis), 0
        for first, last in _runs(self.steps):
            keys, sums = self._send((keys, sums), first - at)

            def body(carry, step):
                state, sums, keys = carry
                coming = self._send(keys, 1)  # on their way while the device computes
                state, sums = visit(state, sums, keys, (here - step) % self.devices)
                return (state, self._send(sums, 1), coming), None

            if last > first:
                (state, sums, keys), _ = jax.lax.scan(body, (state, sums, keys), jnp.arange(first, last))
            state, sums = visit(state, sums, keys, (here - last) % self.devices)
            at = last
        return state, self._send(sums, -at)

    def over_pairs(self, visit: Callable, carry: Any) -> Any:
        """``carry = visit(carry, i, j)`` for the i-th chunk of the queries and the j-th of the keys."""
        if self.chunks == 1:
            return visit(carry, 0, 0)
        pairs = jnp.array(list(itertools.product(range(self.chunks), repeat=2)))
        return jax.lax.scan(lambda carry, ij: (visit(carry, ij[0], ij[1]), None), carry, pairs)[0]

    def tokens(self, device: Any, chunk: Any, size: int) -> Array:
        """Which tokens ``[size]`` of the sequence stand in a chunk of a device."""
        piece = device if self.layout == "contiguous" else jnp.where(chunk == 0, device, 2 * self.devices - 1 - device)
        return piece * size + jnp.arange(size)

    def part(self, request: Request, source: Any, i: Any, j: Any) -> Request:
        """The request for the i-th chunk of the device's queries and the j-th of the keys of ``source``."""
        t, s = request.query.shape[1] // self.chunks, request.key.shape[1] // self.chunks
        rows, columns = self.tokens(jax.lax.axis_index(self.axis), i, t), self.tokens(source, j, s)

        def pairs(x: Any) -> Any:
            if x is None:
                return None
            x = x if x.shape[2] == 1 else cut(x, i, t, 2)
            return x if x.shape[3] == 1 else cut(x, source * self.chunks + j, s, 3)

        slot_masks = [pairs(x) for x in request.slot_masks]
        if request.query_lengths is not None:
            slot_masks.append((rows[None, :] < request.query_lengths[:, None])[:, None, :, None])
        if request.kv_lengths is not None:
            slot_masks.append((columns[None, :] < request.kv_lengths[:, None])[:, None, None, :])
        return dataclasses.replace(
            request,
            query=cut(request.query, i, t, 1),
            key=cut(request.key, j, s, 1),
            value=None if request.value is None else cut(request.value, j, s, 1),
            bias=pairs(request.bias),
            slot_masks=tuple(slot_masks),
            query_lengths=None,
            kv_lengths=None,
            query_positions=rows[None] if request.query_positions is None else cut(request.query_positions, i, t, 1),
            kv_positions=columns[None] if request.kv_positions is None else cut(request.kv_positions, j, s, 1),
        )

    def _send(self, tree: Any, by: int) -> Any:
        if by % self.devices == 0:
            return tree
        to = [(device, (device + by) % self.devices) for device in range(self.devices)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, self.axis, to), tree)


def _runs(steps: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    starts = [step for step in steps if step - 1 not in steps]
    ends = [step for step in steps if step + 1 not in steps]
    return list(zip(starts, ends, strict=True))


def cut(x: Any, index: Any, size: int, axis: int) -> Any:
    """The ``index``-th piece of ``size`` along ``axis``; an axis of that size is whole."""
    return x if x.shape[axis] == size else jax.lax.dynamic_slice_in_dim(jnp.asarray(x), index * size, size, axis)


def put(x: Array, piece: Array, index: Any, axis: int) -> Array:
    """``x`` with that piece in the place that ``cut`` took it from."""
    return jax.lax.dynamic_update_slice_in_dim(x, piece, index * piece.shape[axis], axis)


def attend(circle: Circle, request: Request) -> tuple[Array, Array]:
    """``out [B,T,N,D]`` and ``lse [B,T,N]`` of the device's own queries, over the keys of all devices.

    ``request`` is the device's part; of ``slot_masks`` it has the rows that are its own, without those of lengths.
    Differentiable in reverse mode.
    """
    leaves, structure = jax.tree.flatten(request)
    is_float = [isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating) for x in leaves]
    is_other = [isinstance(x, jax.Array) and not one for x, one in zip(leaves, is_float, strict=True)]

    def split(request: Request) -> tuple[list[Array], list[Array]]:
        found = jax.tree.leaves(request)
        floats = [x for x, one in zip(found, is_float, strict=True) if one]
        return floats, [x for x, one in zip(found, is_other, strict=True) if one]

    def join(floats: Sequence[Array], others: Sequence[Array]) -> Request:
        one, other = iter(floats), iter(others)
        which = zip(leaves, is_float, is_other, strict=True)
        return jax.tree.unflatten(structure, [next(one) if f else next(other) if o else x for x, f, o in which])

    def compute(floats: list[Array], others: list[Array]) -> tuple[Array, Array]:
        return _forward(circle, join(floats, others))

    def forward(floats, others):
        out, lse = compute(floats, others)
        return (out, lse), (floats, others, out, lse)

    def backward(saved, changes):
        floats, others, out, lse = saved
        gradients = _backward(circle, join(floats, others), out, lse, *changes, split, join)
        return [gradient.astype(x.dtype) for gradient, x in zip(gradients, floats, strict=True)], None

    run = jax.custom_vjp(compute)
    run.defvjp(forward, backward)
    return run(*split(request))


def _keys(request: Request) -> dict[str, Any]:
    """What travels."""
    found = {name: getattr(request, name) for name in ("key", "value", "kv_positions")}
    return {name: x for name, x in found.items() if x is not None}


def _forward(circle: Circle, request: Request) -> tuple[Array, Array]:
    (B, T, N, _), dtype = request.query.shape, softmax_dtype(request.query)
    t = T // circle.chunks

    def visit(state, sums, keys, source):
        at_hand = dataclasses.replace(request, **keys)

        def pair(state, i, j):
            out, lse = blockwise.run(circle.part(at_hand, source, i, j))
            before = (cut(x, i, t, 1) for x in state)
            return tuple(
                put(x, new, i, 1) for x, new in zip(state, merge(*before, out.astype(dtype), lse), strict=True)
            )

        return circle.over_pairs(pair, state), sums

    nothing = jnp.zeros((B, T, N, request.value.shape[3]), dtype), jnp.full((B, T, N), -jnp.inf, dtype)
    (out, lse), _ = circle.travel(visit, nothing, _keys(request))
    return out.astype(request.value.dtype), lse


def _backward(circle, request, out, lse, out_change, lse_change, split, join) -> list[Array]:
    """The gradients of ``split``'s floats, of which the first three are query, key and value."""
    dtype, t = lse.dtype, request.query.shape[1] // circle.chunks
    seen = lse != -jnp.inf
    # of the sums, at numerator = out and total = 1
    numerator = jnp.where(seen[..., None], out_change.astype(dtype), 0.0)
    total = jnp.where(seen, lse_change - jnp.sum(numerator * out.astype(dtype), -1), 0.0)

    def visit(gradients, of_keys, keys, source):
        floats, others = split(dataclasses.replace(request, **keys))

        def pair(carry, i, j):
            def sums(floats):
                return blockwise.sums(circle.part(join(floats, others), source, i, j), cut(lse, i, t, 1))

            _, pull = jax.vjp(sums, floats)
            (change,) = pull(tuple(cut(x, i, t, 1) for x in (numerator, total)))
            return [x + y.astype(x.dtype) for x, y in zip(carry, change, strict=True)]

        query, *others_so_far = gradients
        query, key, value, *others_so_far = circle.over_pairs(pair, [query, *of_keys, *others_so_far])
        return [query, *others_so_far], [key, value]

    query, key, value, *others = (jnp.zeros(x.shape, softmax_dtype(x)) for x in split(request)[0])
    (query, *others), (key, value) = circle.travel(visit, [query, *others], _keys(request), [key, value])
    return [query, key, value, *others]
