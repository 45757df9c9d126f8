"""``"blockwise"``: the formula in O(T + S) memory of ``jattn.blockwise``, head by head. Takes every request.

What to skip is decided here, outside of any vmap, where a condition still saves work: one table of blocks for all heads
of a sequence (a block is computed where any head sees it), and for each sequence its own where masks differ by batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jattn import blockwise, staged
from jattn.attention import softmax_dtype
from jattn.blocks import all_seen, choose_blocks, visible_blocks
from jattn.head_blocks import Cut
from jattn.hoist import traced
from jattn.kernels.lift import lift, ready
from jattn.kernels.shards import may_be_divided
from jattn.lifting import one_by_one
from jattn.request import Request
from jattn.tables import Length, arange

Where = tuple[Any, Any, Any, Any, Any, Any, tuple[Length, Length]]  # the arguments of visible_blocks, but for the size


@dataclasses.dataclass(frozen=True)
class Blockwise:
    """``implementation=``: as ``"blockwise"``, with blocks of a size of your own.

    ``block_sizes``: queries and keys of a block; ``jattn.blocks.choose_blocks`` has the default. They change no result
    beyond rounding.
    """

    block_sizes: tuple[int, int] | None = None

    def why_not(self, request: Request) -> str | None:
        """None: it takes every request."""
        return None

    def run(self, request: Request) -> tuple[jax.Array, jax.Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``; beyond inputs and outputs O(T + S) memory, forward and backward."""
        request = ready(request)
        return blockwise.differentiable(_values, _sums, request, self.block_sizes, may_be_divided(request))

    def sums(self, request: Request, high: jax.Array) -> tuple[jax.Array, jax.Array]:
        """``sum exp(score - high) value [B,T,N,D]`` and ``sum exp(score - high) [B,T,N]``, for ``high [B,T,N]``."""
        dtype = softmax_dtype(request.query)
        rows = jax.ShapeDtypeStruct(request.query.shape[:3], dtype)
        out = jax.ShapeDtypeStruct((*rows.shape, request.value.shape[3]), dtype), rows
        how = self.block_sizes, may_be_divided(request)
        return staged.call(_sums, ready(request), high, *how, out=out)

    def fold(
        self, request: Request, step: Callable, init: Any, lse: jax.Array | None, per_sequence: Sequence[Any] = ()
    ) -> Any:
        """The carries of all heads ``[B,N,...]`` of ``jattn.blockwise.fold``; ``lse [B,T,N]`` or None.

        ``step`` also gets what its sequence has of the arrays ``per_sequence``, ``[B|1,...]``.
        """
        if 0 in (request.query.shape[1], request.key.shape[1]):  # no block comes
            lead = request.query.shape[0], request.query.shape[2]
            return jax.tree.map(lambda x: jnp.broadcast_to(x, (*lead, *jnp.shape(x))), init)
        if lse is None:
            lse = self.run(dataclasses.replace(request, value=request.key[..., :0]))[1]
        request, (B, _, N, _) = ready(request), request.query.shape
        size = _size(request, self.block_sizes)
        dtype, index = softmax_dtype(request.query), jnp.int32
        block = (
            jax.ShapeDtypeStruct(size, dtype),
            *(jax.ShapeDtypeStruct(x, index) for x in ((size[0], 1), (1, size[1]))),
        )
        structure = jax.tree.structure(init)
        init = [jnp.asarray(x) for x in jax.tree.leaves(init)]
        here = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in per_sequence]
        types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in init]

        def flat(*args: Any) -> list[jax.Array]:
            carry = step(structure.unflatten(args[: len(init)]), *args[len(init) :])
            _check_carry(structure, types, carry)
            return jax.tree.leaves(carry)

        program = traced(flat, *types, *block, *here)
        out = [jax.ShapeDtypeStruct((B, N, *x.shape), x.dtype) for x in init]
        how = size, may_be_divided(request)
        found = staged.call(_fold, request, program, init, lse, list(per_sequence), *how, out=out)
        return structure.unflatten(found)

    def count_visible(self, request: Request) -> jax.Array:
        """How many keys each query sees, integers ``[B,N,T]``."""
        B, T, N, _ = request.query.shape
        how = self.block_sizes, may_be_divided(request)
        return staged.call(_count_visible, ready(request), *how, out=jax.ShapeDtypeStruct((B, N, T), jnp.int32))


def _check_carry(structure: Any, types: Sequence[Any], carry: Any) -> None:
    """Raises where a step changes its carry."""
    if jax.tree.structure(carry) != structure:
        raise TypeError(
            f"step must return a carry like the one it is given, {structure}, got {jax.tree.structure(carry)}"
        )
    for old, new in zip(types, jax.tree.leaves(carry), strict=True):
        for what in ("shape", "dtype"):
            was, now = getattr(old, what), getattr(jnp.asarray(new), what)
            if was != now:
                raise TypeError(
                    f"step must return a carry like the one it is given: carry {what}s do not match, "
                    f"{was} came and {now} was returned"
                )


def _values(platform: str, request: Request, sizes: Any, divided: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    cut, how = _how(platform, request, sizes, divided)

    def one_head(q, k, v, options, may, must):
        return blockwise.values(platform, q, k, v, options, Cut(cut.size, may, must, cut.all_seen))

    return lift(one_head, request, out_axes=1, **how)


def _sums(platform: str, request: Request, high: jax.Array, sizes: Any, divided: bool) -> tuple[jax.Array, jax.Array]:
    cut, how = _how(platform, request, sizes, divided)

    def one_head(q, k, v, options, high, may, must):
        return blockwise.sums(platform, q, k, v, options, Cut(cut.size, may, must, cut.all_seen), high)

    if how["heads"] is one_by_one:
        how |= {"heads": functools.partial(one_by_one, recompute=True)}
    return lift(one_head, request, out_axes=1, per_head=[jnp.moveaxis(high, 2, 1)], **how)


def _fold(
    platform: str, request: Request, step: Any, init: Any, lse: jax.Array, per_sequence: list[jax.Array], sizes: Any,
    divided: bool,
) -> Any:  # fmt: skip
    cut, how = _how(platform, request, sizes, divided)

    def one_head(q, k, v, options, lse, may, must, *extra):
        def with_extra(carry, logs, q_idx, kv_idx):
            return step(*carry, logs, q_idx, kv_idx, *extra)

        how = Cut(cut.size, may, must, cut.all_seen)
        return blockwise.fold(platform, with_extra, init, q, k, options, how, lse)

    how |= {"per_sequence": (*how["per_sequence"], *per_sequence)}
    return lift(one_head, request, out_axes=0, per_head=[jnp.moveaxis(lse, 2, 1)], **how)


def _count_visible(platform: str, request: Request, sizes: Any, divided: bool) -> jax.Array:
    cut, how = _how(platform, request, sizes, divided)

    def one_head(q, k, v, options, may, must):
        return blockwise.count_visible(platform, q, k, options, Cut(cut.size, may, must, cut.all_seen))

    return lift(one_head, request, out_axes=0, **how)


def _how(platform: str, request: Request, sizes: Any, divided: bool) -> tuple[Cut, dict[str, Any]]:
    """How heads are cut (with the table of all sequences), and what lifts one head to many.

    On one CPU device, heads and sequences go one by one: a head keeps all cores busy, and its blocks stay in the
    cache. Where an axis may be ``divided`` over devices, a loop over it would gather it: vmap, and one table for all
    sequences. On one accelerator vmap, but over sequences only where they share the table.
    """
    T, S = request.query.shape[1], request.key.shape[1]
    size, (may, must) = choose_blocks(functools.partial(block_table, request), T, S, sizes)
    if divided:
        may, must = may.any(0, keepdims=True), must.all(0, keepdims=True)
    heads = one_by_one if platform == "cpu" and not divided else jax.vmap
    sequences = one_by_one if not divided and (platform == "cpu" or may.shape[0] > 1) else jax.vmap
    cut = Cut(size, may, must, all_seen(*_everywhere(request)))
    return cut, {"per_sequence": (may, must), "sequences": sequences, "heads": heads}


def _size(request: Request, sizes: Any) -> tuple[int, int]:
    return choose_blocks(functools.partial(block_table, request), request.query.shape[1], request.key.shape[1], sizes)[
        0
    ]


def _everywhere(request: Request) -> Where:
    """What ``visible_blocks`` asks for, with leading axes ``[B|1, N|1]``."""
    B, T, N, _ = request.query.shape
    b, h = request.first_batch + arange(B)[:, None], request.first_head + arange(N)[None, :]
    lengths = (T, request.key.shape[1])
    q_positions, kv_positions = (
        None if x is None else x[:, None] for x in (request.query_positions, request.kv_positions)
    )
    return request.masks, request.slot_masks, b, h, q_positions, kv_positions, lengths


def block_table(request: Request, size: tuple[int, int]) -> tuple[Any, Any]:
    """``(may, must)``, each ``[B|1, blocks of T, blocks of S]``, for all heads of a sequence."""
    may, must = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in visible_blocks(*_everywhere(request), size))
    return may.any(1), must.all(1)
