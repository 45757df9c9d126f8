"""Computes attention, and its derivatives, for a device's own queries over the keys of all devices of a ring.

``jattn.merge`` joins the results of the hops. If ``row_max`` is the log-sum-exp of whole rows, the ``acc`` values of
all hops add up to ``out``, and the ``row_sum`` values to 1. Their derivatives therefore add up to those of
``out = acc / row_sum`` and ``lse = row_max + log(row_sum)`` (``jattn._blocks.backward``). The backward pass rotates the
keys once more, and a device holds only its own keys and the current ones. Tangents rotate in the same way.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import PyTree

from jattn._blocks import backward
from jattn._blocks.all_heads import rounding_error
from jattn._blocks.online_softmax import log_sum_exp
from jattn._core.call import Call, softmax_dtype
from jattn._core.merge import merge
from jattn._core.vmap import canonical
from jattn._mods.arrays import Index
from jattn.kernels import Kernel
from jattn.sharding._mask_tables import rotating, with_keys
from jattn.sharding._pairs import CallOf, each_pair
from jattn.sharding._rotation import Hop, RingPlan, add_chunk, each_kv_head, put_chunk, take_chunk


def ring_attend(ring: RingPlan, call: Call) -> tuple[Array, Array]:
    """``out [B,T,N,D]`` and ``lse [B,T,N]``, differentiable like a kernel's results.

    ``call`` is the device's part; its ``slot_masks`` contain the device's rows and omit the lengths.
    """
    call = canonical(call)
    return backward.differentiable(_forward, _accumulate, call, ring, backward=_backward, count=None)


def _forward(
    platform: str, call: Call, ring: RingPlan, with_error: bool
) -> tuple[Array, Array, Array, *tuple[Array, ...]]:
    dtype, (B, T, N, _), D = softmax_dtype(call.query), call.query.shape, call.value.shape[3]
    t, rounded = T // ring.chunks, call.value.dtype != dtype

    def attend_group(outputs: list[Array], call: Call, h: Index) -> list[Array]:
        G = call.query.shape[2]

        def visit(state: PyTree, keys: dict[str, Any], hop: Hop) -> tuple[PyTree, None]:
            at_hand = with_keys(call, keys)

            def attend(state: PyTree, kernel: Kernel, call_of: CallOf, i: Index, j: Index) -> PyTree:
                old_out, old_lse = (take_chunk(x, i, t, 1) for x in state)
                forward = kernel.forward_of_part if rounded else kernel.forward
                results = forward(platform, call_of(at_hand))
                merged = merge(old_out, old_lse, backward.exact_out(results), log_sum_exp(*results[1:3]))
                return tuple(put_chunk(x, new, i, 1) for x, new in zip(state, merged, strict=True))

            return each_pair(ring, platform, at_hand, hop, attend, state), None

        unit = jnp.zeros((B, T, G, D), dtype), jnp.full((B, T, G), -jnp.inf, dtype)
        state, _ = ring.rotate(visit, unit, rotating(call))
        state = [*state, *[rounding_error(state[0], call.value.dtype)] * with_error]
        return [add_chunk(x, chunk.astype(x.dtype), h) for x, chunk in zip(outputs, state, strict=True)]

    zeros = jnp.zeros((B, T, N, D), call.value.dtype)
    start = [zeros, jnp.zeros((B, T, N), dtype), *[zeros] * with_error]
    out, lse, *error = each_kv_head(platform, attend_group, start, call)
    seen = lse != -jnp.inf
    return out, jnp.where(seen, lse, jnp.finfo(dtype).min), seen.astype(dtype), *error


def _accumulate(platform: str, call: Call, row_max: Array, ring: RingPlan) -> tuple[Array, Array]:
    """``acc [B,T,N,D]`` and ``row_sum [B,T,N]`` over the keys of all devices, for any ``row_max [B,T,N]``."""
    dtype, (B, T, N, _), D = softmax_dtype(call.query), call.query.shape, call.value.shape[3]
    add = lambda totals, acc, row_sum, i: [add_chunk(x, new, i) for x, new in zip(totals, (acc, row_sum), strict=True)]
    like = [jax.ShapeDtypeStruct((B, T, N, D), dtype), jax.ShapeDtypeStruct((B, T, N), dtype)]
    acc, row_sum = _add_sums(platform, call, row_max, ring, add, like)
    return acc, row_sum


def _add_sums(
    platform: str, call: Call, row_max: Array, ring: RingPlan, add: Callable[..., list[Array]],
    like: Sequence, *rows: Array,
) -> list[Array]:  # fmt: skip
    """``totals = add(totals, acc, row_sum, i, *rows)`` for each pair of chunks, starting with zeros ``like``.

    like: ``[B,T,N,...]``. i: the number of the query chunk to which ``rows`` belong.
    """

    def of_group(totals: list[Array], call: Call, h: Index) -> list[Array]:
        t, G = call.query.shape[1] // ring.chunks, call.query.shape[2]
        of_heads = [take_chunk(x, h, G, 2) for x in (row_max, *rows)]

        def visit(state: PyTree, keys: dict[str, Any], hop: Hop) -> tuple[PyTree, None]:
            at_hand = with_keys(call, keys)

            def of_pair(state: PyTree, kernel: Kernel, call_of: CallOf, i: Index, j: Index) -> PyTree:
                chunk_max, *chunk_rows = (take_chunk(x, i, t, 1) for x in of_heads)
                sums = backward.accumulate(platform, call_of(at_hand), chunk_max, kernel._block_sizes)
                return add(state, *sums, i, *chunk_rows)

            return each_pair(ring, platform, at_hand, hop, of_pair, state), None

        zeros = [jnp.zeros((*x.shape[:2], G, *x.shape[3:]), x.dtype) for x in like]
        state, _ = ring.rotate(visit, zeros, rotating(call))
        return [add_chunk(x, chunk, h) for x, chunk in zip(totals, state, strict=True)]

    return each_kv_head(platform, of_group, [jnp.zeros(x.shape, x.dtype) for x in like], call)


def _backward(
    platform: str, inputs: tuple, cotangents: Sequence[Array | None], wanted: Sequence[int]
) -> dict[int, Array]:
    """The cotangents of query, key and value, from each hop's kernel, or blockwise if other arrays are ``captured``."""
    call, (out, row_max, row_sum, *error), ring = inputs
    leaves, dtype = jax.tree.leaves(call), softmax_dtype(call.query)
    arrays = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    captured = [arrays[i] for i in wanted if i > 2]
    seen, (d_out, d_row_sum) = row_sum != 0, cotangents
    # In the dtype of out, it takes less memory, and it is no more precise than the cotangent of out.
    d_out = jnp.zeros_like(out) if d_out is None else jnp.where(seen[..., None], d_out, 0).astype(out.dtype)
    d_row_sum = jnp.zeros_like(row_sum) if d_row_sum is None else jnp.where(seen, d_row_sum, 0)
    if captured:
        d_row_sum = jnp.where(seen, d_row_sum - _product(platform, call, (out, row_max), d_out, ring), 0)

    def of_group(gradients: list[Array], call: Call, h: Index) -> list[Array]:
        t, G = call.query.shape[1] // ring.chunks, call.query.shape[2]
        rows = [take_chunk(x, h, G, 2) for x in (d_out, d_row_sum, out, row_max, row_sum, *error)]

        def visit(state: PyTree, keys: dict[str, Any], hop: Hop) -> tuple[PyTree, PyTree]:
            at_hand = with_keys(call, keys)

            def differentiate(sums: PyTree, kernel: Kernel, call_of: CallOf, i: Index, j: Index) -> list[Array]:
                d_out, d_row_sum, *results = (take_chunk(x, i, t, 1) for x in rows)
                call, cotangents = call_of(at_hand), (d_out.astype(dtype), d_row_sum)

                def accumulate(query: Array, key: Array, value: Array, *others: Array) -> PyTree:
                    call = dataclasses.replace(
                        call_of(_with_leaves(at_hand, captured, others)), query=query, key=key, value=value
                    )
                    return backward.accumulate(platform, call, results[1], kernel._block_sizes)

                if captured:
                    others = [jax.tree.leaves(at_hand)[n] for n in captured]
                    of_pair = jax.vjp(accumulate, call.query, call.key, call.value, *others)[1](cotangents)
                else:
                    if kernel.wide_query:  # the shared component of one hop's keys is large before summation
                        call = dataclasses.replace(call, query=call.query.astype(dtype))
                    of_pair = kernel.backward_of_part(
                        platform, call, tuple(results[: 3 + kernel.returns_error]), cotangents
                    )
                numbers = i, j, j, *(0 for _ in captured)
                return [add_chunk(x, y.astype(x.dtype), n) for x, y, n in zip(sums, of_pair, numbers, strict=True)]

            d_query, *d_captured = state
            zeros = [jnp.zeros(x.shape, dtype) for x in (at_hand.key, at_hand.value)]
            sums = each_pair(ring, platform, at_hand, hop, differentiate, [d_query, *zeros, *d_captured])
            return [sums[0], *sums[3:]], sums[1:3]

        of_call = jax.tree.leaves(call)
        zeros = [jnp.zeros(of_call[n].shape, softmax_dtype(of_call[n])) for n in (0, *captured)]
        (d_query, *d_captured), d_key_value = ring.rotate(visit, zeros, rotating(call), sums=True)
        of_heads = [d_query, *d_key_value, *d_captured]
        return [add_chunk(x, chunk.astype(x.dtype), h) for x, chunk in zip(gradients, of_heads, strict=True)]

    numbers = [*range(3), *captured]
    # Cotangents shared by all heads are added up; the others belong to one head.
    dtypes = [leaves[n].dtype if n < 3 else softmax_dtype(leaves[n]) for n in numbers]
    zeros = [jnp.zeros(leaves[n].shape, kind) for n, kind in zip(numbers, dtypes, strict=True)]
    gradients = each_kv_head(platform, of_group, zeros, call)
    by_leaf = {n: x.astype(leaves[n].dtype) for n, x in zip(numbers, gradients, strict=True)}
    return {i: by_leaf[arrays[i]] for i in wanted}


def _with_leaves(call: Call, numbers: Sequence[int], values: Sequence[Array]) -> Call:
    """``call`` with ``values`` in place of its leaves with these ``numbers``."""
    leaves, structure = jax.tree.flatten(call)
    for n, x in zip(numbers, values, strict=True):
        leaves[n] = x
    return jax.tree.unflatten(structure, leaves)


def _product(platform: str, call: Call, results: Sequence[Array], d_out: Array, ring: RingPlan) -> Array:
    """The sums ``[B,T,N]`` of ``d_out * out``. If out was rounded, it is recomputed: the keys rotate once more.

    As in ``jattn._blocks.backward._Tangents``.
    """
    out, row_max = results
    if out.dtype == row_max.dtype:
        return jnp.sum(d_out * out, -1)
    add = lambda totals, acc, _, i, d_out: [add_chunk(totals[0], jnp.sum(acc * d_out.astype(acc.dtype), -1), i)]
    return _add_sums(platform, call, row_max, ring, add, [row_max], d_out)[0]
