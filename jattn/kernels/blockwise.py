"""``"blockwise"``: the formula in O(T + S) memory of ``jattn.blockwise``, head by head. Takes every request.

What to skip is decided here, outside of any vmap, where a condition still saves work: one table of blocks for all heads
of a sequence (a block is computed where any head sees it), and for each sequence its own where masks differ by batch.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jattn import blockwise
from jattn.attention import one_by_one
from jattn.blocks import all_seen, choose_blocks, visible_blocks
from jattn.kernels.lift import lift
from jattn.mods import holds_plain_function
from jattn.request import Request

Where = tuple[Any, Any, Any, Any, Any, Any, tuple[int, int]]  # the arguments of visible_blocks, but for the size


def why_not(request: Request) -> str | None:
    """None: it takes every request."""
    return None


def run(request: Request) -> tuple[jax.Array, jax.Array]:
    """``out [B,T,N,D]``, ``lse [B,T,N]``; beyond inputs and outputs O(T + S) memory, forward and backward."""
    return compiled_where_eager(_run, request)


def sums(request: Request, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``sum exp(score - high) value [B,T,N,D]`` and ``sum exp(score - high) [B,T,N]``, for ``high [B,T,N]``."""
    return compiled_where_eager(_sums, request, high)


def fold(
    request: Request, step: Callable, init: Any, lse: jax.Array | None, per_sequence: Sequence[jax.Array] = ()
) -> Any:
    """The carries of all heads ``[B,N,...]`` of ``jattn.blockwise.fold``; ``lse [B,T,N]`` or None.

    ``step`` also gets what its sequence has of the arrays ``per_sequence``, ``[B|1,...]``.
    """
    return compiled_where_eager(_fold, step, request, init, lse, list(per_sequence))


def count_visible(request: Request) -> jax.Array:
    """How many keys each query sees, integers ``[B,N,T]``."""
    return compiled_where_eager(_count_visible, request)


def _run(request: Request) -> tuple[jax.Array, jax.Array]:
    size, seen, how = _how(request)

    def one_head(q, k, v, options, *table):
        return blockwise.attend(q, k, v, dropout=request.dropout, block_sizes=size, visible=(*table, seen), **options)

    return lift(one_head, request, out_axes=1, **how)


def _sums(request: Request, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    size, seen, how = _how(request)

    def one_head(q, k, v, options, high, *table):
        return blockwise.sums(
            q, k, v, high=high, dropout=request.dropout, block_sizes=size, visible=(*table, seen), **options
        )

    if how["heads"] is one_by_one:
        how |= {"heads": functools.partial(one_by_one, recompute=True)}
    return lift(one_head, request, out_axes=1, per_head=[jnp.moveaxis(high, 2, 1)], **how)


def _fold(step: Callable, request: Request, init: Any, lse: jax.Array | None, per_sequence: list[jax.Array]) -> Any:
    size, seen, how = _how(request)

    def one_head(q, k, v, options, lse, may, must, *extra):
        def with_extra(carry, logs, q_idx, kv_idx):
            return step(carry, logs, q_idx, kv_idx, *extra)

        return blockwise.fold(with_extra, init, q, k, lse=lse, block_sizes=size, visible=(may, must, seen), **options)

    per_head = [None if lse is None else jnp.moveaxis(lse, 2, 1)]
    how |= {"per_sequence": (*how["per_sequence"], *per_sequence)}
    return lift(one_head, request, out_axes=0, per_head=per_head, **how)


def _count_visible(request: Request) -> jax.Array:
    size, seen, how = _how(request)

    def one_head(q, k, v, options, *table):
        return blockwise.count_visible(q, k, block_sizes=size, visible=(*table, seen), **options)

    return lift(one_head, request, out_axes=0, **how)


def _how(request: Request) -> tuple[tuple[int, int], bool, dict[str, Any]]:
    """The size of the blocks; ``all_seen``; their table, and what lifts one head to many.

    On one CPU device, heads and sequences go one by one: a head keeps all cores busy, and its blocks stay in the
    cache. With several devices an axis may be sharded, and a loop over it would gather it: vmap, and one table for all
    sequences; not so inside ``jax.shard_map``, where the arrays are one device's own. On one accelerator vmap, but over
    sequences only where they share the table.
    """
    alone, on_cpu = nothing_is_sharded(), jax.default_backend() == "cpu"
    T, S = request.query.shape[1], request.key.shape[1]
    size, (may, must) = choose_blocks(functools.partial(block_table, request), T, S)
    if not alone:
        may, must = may.any(0, keepdims=True), must.all(0, keepdims=True)
    heads = one_by_one if alone and on_cpu else jax.vmap
    sequences = one_by_one if alone and (on_cpu or may.shape[0] > 1) else jax.vmap
    return size, all_seen(*_everywhere(request)), {"per_sequence": (may, must), "sequences": sequences, "heads": heads}


def nothing_is_sharded() -> bool:
    """Is there one device, or are the arrays at hand one device's own, as inside ``jax.shard_map``?"""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 or (not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names))


def _everywhere(request: Request) -> Where:
    """What ``visible_blocks`` asks for, with leading axes ``[B|1, N|1]``."""
    B, T, N, _ = request.query.shape
    b, h = request.first_batch + np.arange(B)[:, None], request.first_head + np.arange(N)[None, :]
    lengths = (T, request.key.shape[1])
    q_positions, kv_positions = (
        None if x is None else x[:, None] for x in (request.query_positions, request.kv_positions)
    )
    return request.masks, request.slot_masks, b, h, q_positions, kv_positions, lengths


def block_table(request: Request, size: tuple[int, int]) -> tuple[Any, Any]:
    """``(may, must)``, each ``[B|1, blocks of T, blocks of S]``, for all heads of a sequence."""
    may, must = (x.reshape((1,) * (4 - x.ndim) + x.shape) for x in visible_blocks(*_everywhere(request), size))
    return may.any(1), must.all(1)


def compiled_where_eager(fn: Callable, *args: Any) -> Any:
    """``fn(*args)``, compiled where JAX is not tracing anyway, because a loop that runs eagerly compiles every time.

    With a plain function it is compiled anew each time, because what that captures may have changed since.
    """
    leaves, structure = jax.tree.flatten(args)
    if any(isinstance(leaf, Tracer) for leaf in leaves):
        return fn(*args)
    arrays = [leaf for leaf in leaves if hasattr(leaf, "dtype")]
    static = tuple(None if hasattr(leaf, "dtype") else leaf for leaf in leaves)
    mods = [mod for one in args if isinstance(one, Request) for mod in (*one.masks, one.score_mod)]
    if any(map(holds_plain_function, mods)) or any(map(callable, static)):
        return jax.jit(lambda arrays: _call(fn, structure, static, arrays))(arrays)
    return _compiled(fn, structure, static, arrays)


def _call(fn: Callable, structure: Any, static: tuple, arrays: list) -> Any:
    rest = iter(arrays)
    return fn(*jax.tree.unflatten(structure, [next(rest) if leaf is None else leaf for leaf in static]))


_compiled = jax.jit(_call, static_argnums=(0, 1, 2))
