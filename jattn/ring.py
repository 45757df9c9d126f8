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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from jattn.attention import merge, softmax_dtype
from jattn.kernels.blockwise import Blockwise
from jattn.request import Request

LAYOUTS = {"contiguous": 1, "zigzag": 2}  # chunks of each device


@dataclasses.dataclass(frozen=True)
class Circle:
    """The devices along the mesh axis ``axis``, and how far (``steps``, ascending) keys travel along it."""

    axis: str
    devices: int
    layout: str
    steps: tuple[int, ...]
    blockwise: Blockwise
    platform: str  # of the devices

    @property
    def chunks(self) -> int:
        """Of how many pieces of the sequence a device's stretch is made."""
        return LAYOUTS[self.layout]

    def travel(self, visit: Callable, state: Any, keys: Any, sums: Any = ()) -> tuple[Any, Any]:
        """``state, sums = visit(state, sums, keys, source)`` with the ``keys`` of every device ``source`` in turn.

        ``sums`` travel with the keys that they belong to, and are at home in the end. The last hop of the keys is for
        nothing: to leave it out, the last visit would have to be compiled apart from the others.
        """
        here, at = jax.lax.axis_index(self.axis), 0
        for first, last in _runs(self.steps):
            keys, sums = self._send((keys, sums), first - at)
            if first == last:
                state, sums = visit(state, sums, keys, (here - first) % self.devices)
                at = last
                continue

            def body(carry, step):
                state, sums, keys = carry
                coming = self._send(keys, 1)  # on their way while the device computes
                state, sums = visit(state, sums, keys, (here - step) % self.devices)
                return (state, self._send(sums, 1), coming), None

            (state, sums, keys), _ = jax.lax.scan(body, (state, sums, keys), jnp.arange(first, last + 1))
            at = last + 1
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
    request = dataclasses.replace(request, first_head=jnp.asarray(request.first_head))
    split, join = _floats_of(request)

    def compute(floats, others):
        return _forward(circle, join(floats, others))

    def forward(floats, others):
        out, lse = compute(floats, others)
        return (out, lse), (floats, others, out, lse)

    def backward(saved, changes):
        floats, others, *results = saved
        gradients = _backward(circle, join(floats, others), (*results, *changes), split, join)
        return [gradient.astype(x.dtype) for gradient, x in zip(gradients, floats, strict=True)], None

    run = jax.custom_vjp(compute)
    run.defvjp(forward, backward)
    floats, others = split(request)
    return run(floats, others)


def _floats_of(request: Request) -> tuple[Callable, Callable]:
    """``split``: a request to its arrays of floats (query, key, value first) and its other arrays; ``join``: back."""
    leaves, structure = jax.tree.flatten(request)
    is_array = [isinstance(x, jax.Array) for x in leaves]
    is_float = [one and jnp.issubdtype(x.dtype, jnp.floating) for x, one in zip(leaves, is_array, strict=True)]

    def split(request):
        found: list[list[Array]] = [[], []]
        for x, array, floating in zip(jax.tree.leaves(request), is_array, is_float, strict=True):
            if array:
                found[not floating].append(x)
        return found

    def join(floats, others):
        rest = iter(floats), iter(others)
        which = zip(leaves, is_array, is_float, strict=True)
        return jax.tree.unflatten(structure, [next(rest[not floating]) if one else x for x, one, floating in which])

    return split, join


def _forward(circle: Circle, request: Request) -> tuple[Array, Array]:
    dtype, (B, T, N, _), D = softmax_dtype(request.query), request.query.shape, request.value.shape[3]

    def of_head(found, request, h):
        t, G = request.query.shape[1] // circle.chunks, request.query.shape[2]

        def visit(state, sums, keys, source):
            at_hand = dataclasses.replace(request, **keys)

            def pair(state, i, j):
                before_out, before_lse = (cut(x, i, t, 1) for x in state)
                out, lse = circle.blockwise.run(circle.part(at_hand, source, i, j))
                both = merge(before_out, before_lse, out.astype(dtype), lse)
                return tuple(put(x, new, i, 1) for x, new in zip(state, both, strict=True))

            return circle.over_pairs(pair, state), sums

        nothing = jnp.zeros((B, T, G, D), dtype), jnp.full((B, T, G), -jnp.inf, dtype)
        state, _ = circle.travel(visit, nothing, _keys(request))
        return [_add(x, piece, h) for x, piece in zip(found, state, strict=True)]

    out, lse = _each_kv_head(circle, of_head, [jnp.zeros((B, T, N, D), dtype), jnp.zeros((B, T, N), dtype)], request)
    return out.astype(request.value.dtype), lse


def _backward(circle: Circle, request: Request, results: Sequence[Array], split, join) -> list[Array]:
    """The gradients of ``split``'s floats; ``results``: out and lse, and the cotangents of both."""

    def of_head(gradients, request, h):
        t, G = request.query.shape[1] // circle.chunks, request.query.shape[2]
        out, lse, out_change, lse_change = (cut(x, h, G, 2) for x in results)
        # cotangents of the sums, at numerator = out and total = 1
        seen = lse != -jnp.inf
        numerator = jnp.where(seen[..., None], out_change.astype(lse.dtype), 0.0)
        total = jnp.where(seen, lse_change - jnp.sum(numerator * out.astype(lse.dtype), -1), 0.0)

        def visit(state, of_keys, keys, source):
            floats, others = split(dataclasses.replace(request, **keys))

            def pair(carry, i, j):
                def sums(floats):
                    return circle.blockwise.sums(circle.part(join(floats, others), source, i, j), cut(lse, i, t, 1))

                _, pull = jax.vjp(sums, floats)
                (change,) = pull(tuple(cut(x, i, t, 1) for x in (numerator, total)))
                return [x + y.astype(x.dtype) for x, y in zip(carry, change, strict=True)]

            query, *rest = state
            query, key, value, *rest = circle.over_pairs(pair, [query, *of_keys, *rest])
            return [query, *rest], [key, value]

        query, key, value, *rest = (jnp.zeros(x.shape, softmax_dtype(x)) for x in split(request)[0])
        (query, *rest), (key, value) = circle.travel(visit, [query, *rest], _keys(request), [key, value])
        return [_add(x, piece, h) for x, piece in zip(gradients, (query, key, value, *rest), strict=True)]

    nothing = [jnp.zeros(x.shape, softmax_dtype(x)) for x in split(request)[0]]
    return _each_kv_head(circle, of_head, nothing, request)


def fold(
    circle: Circle,
    request: Request,
    step: Callable,
    kinds: Mapping[str, str],
    lse: Array,
    rows: dict[str, Array],
    columns: dict[str, Array],
    counted: bool,
) -> dict[str, Array]:
    """``[B,N,...]``: what ``step`` makes of the weights of the device's own queries, with the keys of all devices.

    ``step(carry, logs, q_idx, kv_idx, rows, columns)`` as in ``jattn.blockwise.fold``, where the last two are what
    ``rows [B|1,T]`` and ``columns [B|1,S]`` have of the chunks at hand. ``kinds`` of its results: by ``"queries"`` (a
    sum, or the ``"largest"``), by ``"keys"``, or by ``"offsets"`` of tokens, of which each device gets those of all.
    ``counted``: also how many keys each query sees, as ``visible``.
    """
    (B, T, N, _), S, dtype = request.query.shape, request.key.shape[1], lse.dtype
    t, s, total = T // circle.chunks, S // circle.chunks, circle.devices * T
    kinds = {**kinds, **({"visible": "queries"} if counted else {})}
    leaves, structure = jax.tree.flatten((rows, columns))

    def nothing(sizes: Mapping[str, int], *lead: int) -> dict[str, Array]:
        fill, types = {"largest": -jnp.inf}, {"visible": jnp.int32}
        shapes = {name: (*lead, sizes[kind]) for name, kind in kinds.items()}
        return {name: jnp.full(shapes[name], fill.get(kind, 0), types.get(name, dtype)) for name, kind in kinds.items()}

    def unpacked(carry: Any, logs: Array, q_idx: Array, kv_idx: Array, *data: Array) -> Any:
        return step(carry, logs, q_idx, kv_idx, *jax.tree.unflatten(structure, data))

    def of_pair(request: Request, source: Any, i: Any, j: Any, lse: Array, data: Sequence[Array]) -> dict[str, Array]:
        part = circle.part(request, source, i, j)
        begin = nothing({"queries": t, "largest": t, "keys": s, "offsets": max(t + s - 1, 0)})
        begin.pop("visible", None)
        here = circle.blockwise.fold(part, unpacked, begin, cut(lse, i, t, 1), data)
        return here | ({"visible": circle.blockwise.count_visible(part)} if counted else {})

    def of_head(found, request, h):
        lse_here = cut(lse, h, request.query.shape[2], 2)

        def visit(state, by_key, keys, source):
            at_hand = dataclasses.replace(request, **keys[0])

            def pair(carry, i, j):
                data = [cut(x, *((i, t) if n < len(rows) else (j, s)), 1) for n, x in enumerate([*of_rows, *keys[1]])]
                here = of_pair(at_hand, source, i, j, lse_here, data)
                first = circle.tokens(source, j, s)[0] - circle.tokens(jax.lax.axis_index(circle.axis), i, t)[0]
                at = {"queries": i * t, "largest": i * t, "keys": j * s, "offsets": first - t + total}
                join = {"largest": jnp.maximum}
                return {
                    name: _join(join.get(kinds[name], jnp.add), carry[name], x, at[kinds[name]])
                    for name, x in here.items()
                }

            both = circle.over_pairs(pair, state | by_key)
            return {name: both[name] for name in state}, {name: both[name] for name in by_key}

        of_rows, of_columns = leaves[: len(rows)], leaves[len(rows) :]
        state = nothing(sizes, B, request.query.shape[2])
        by_key = {name: state.pop(name) for name, kind in kinds.items() if kind == "keys"}
        state, by_key = circle.travel(visit, state, (_keys(request), of_columns), by_key)
        return {name: _add(x, (state | by_key)[name], h) for name, x in found.items()}

    sizes = {"queries": T, "largest": T, "keys": S, "offsets": max(total + circle.devices * S - 1, 0)}
    found = _each_kv_head(circle, of_head, jax.tree.map(jnp.zeros_like, nothing(sizes, B, N)), request)
    of_all = {name: jax.lax.psum(found[name], circle.axis) for name, kind in kinds.items() if kind == "offsets"}
    return found | of_all


def _join(how: Callable, x: Array, piece: Array, start: Any) -> Array:
    """``x [B,N,...]`` with ``piece`` joined to what stands from ``start`` on."""
    old = jax.lax.dynamic_slice_in_dim(x, start, piece.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(x, how(old, piece), start, 2)


def _keys(request: Request) -> dict[str, Any]:
    """What travels."""
    found = {name: getattr(request, name) for name in ("key", "value", "kv_positions")}
    return {name: x for name, x in found.items() if x is not None}


def _each_kv_head(circle: Circle, fn: Callable, carry: Any, request: Request) -> Any:
    """``carry = fn(carry, request of a key/value head, its index)``: one by one on CPU, elsewhere all at once."""
    K = request.key.shape[2]
    if K == 1 or circle.platform != "cpu":
        return fn(carry, request, 0)
    G = request.query.shape[2] // K

    def pairs(x: Any, h: Any) -> Any:
        return x if x is None or x.shape[1] == 1 else cut(x, h, G, 1)

    def of_head(carry, h):
        part = dataclasses.replace(
            request,
            query=cut(request.query, h, G, 2),
            key=cut(request.key, h, 1, 2),
            value=None if request.value is None else cut(request.value, h, 1, 2),
            bias=pairs(request.bias, h),
            slot_masks=tuple(pairs(x, h) for x in request.slot_masks),
            first_head=request.first_head + h * G,
        )
        return fn(carry, part, h), None

    return jax.lax.scan(of_head, carry, jnp.arange(K))[0]


def _add(x: Array, piece: Array, index: Any) -> Array:
    """``x`` with ``piece`` added where ``cut`` took it from, along the axis in which their shapes differ."""
    for axis, (size, part) in enumerate(zip(x.shape, piece.shape, strict=True)):
        if size != part:
            return put(x, cut(x, index, part, axis) + piece, index, axis)
    return x + piece
