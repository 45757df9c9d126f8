"""Few queries against many keys in ``pallas_gpu``'s forward pass, as in Flash-Decoding.

With few queries, reading keys and values dominates the time. The query heads of a key head therefore become rows of one
block, which reads its keys once, and the list of a row's visible blocks is distributed over enough programs to keep the
chip busy; their results are merged (https://crfm.stanford.edu/2023/10/12/flashdecoding.html). Blocks seen by no query,
such as the empty slots of a cache, are in no list.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jattn._core.call import Call
from jattn._mods.closure_convert import depends_on
from jattn.kernels.pallas_gpu.schedule import ROWS

PROGRAMS = 132  # running at once: the multiprocessors of an H100
LEAST_BLOCKS = 4  # of keys per program, so that merging costs comparatively little


def pack_gqa(call: Call) -> Call:
    """A canonical call with the query heads of each key head as queries, ``[B, G*T, K, H]``.

    ``call`` unchanged if there is no group, a block cannot hold it, or heads differ in more than their queries.
    """
    (B, T, N, H), K = call.query.shape, call.key.shape[2]
    group = N // K
    by_head = [x for x in (call.bias, *call.slot_masks) if x is not None and x.shape[1] != 1]
    if group == 1 or group * T > ROWS or by_head or any(depends_on(mask, 1) for mask in call.masks):
        return call
    if call.score_mod is not None and depends_on(call.score_mod, 2, jnp.float32):
        return call

    def each_head(x: jax.Array | np.ndarray | None, axis: int) -> jax.Array | np.ndarray | None:
        return x if x is None or x.shape[axis] == 1 else jnp.concatenate([x] * group, axis)

    positions = np.arange(T, dtype=np.int32)[None] if call.query_positions is None else call.query_positions
    query = call.query.reshape(B, T, K, group, H).transpose(0, 3, 1, 2, 4).reshape(B, group * T, K, H)
    return dataclasses.replace(
        call,
        query=query,
        bias=each_head(call.bias, 2),
        slot_masks=tuple(each_head(x, 2) for x in call.slot_masks),
        query_positions=np.tile(positions, group) if isinstance(positions, np.ndarray) else each_head(positions, 1),
        query_seq_lengths=None,
    )


def unpack_gqa(x: jax.Array, T: int, num_heads: int) -> jax.Array:
    """``[B, G*T, K, ...] -> [B, T, N, ...]``: the inverse of ``pack_gqa``, for a result."""
    B, rows, K, *rest = x.shape
    return jnp.moveaxis(x.reshape(B, rows // T, T, K, *rest), 1, 3).reshape(B, T, num_heads, *rest)


def choose_num_splits(programs: int, blocks: int) -> int:
    """The number of programs, at most ``blocks``, over which to distribute a row's blocks."""
    return max(1, min(PROGRAMS // programs, blocks // LEAST_BLOCKS))


def merge_splits(out: jax.Array, lse: jax.Array, num_splits: int, rows: int) -> tuple[jax.Array, jax.Array]:
    """Joins ``out [B,blocks*num_splits*rows,N,D]``, in float32, and ``lse [B,N,blocks*num_splits*rows]``."""
    (B, length, N, D), lead = out.shape, lse.shape[:2]
    each = lse.reshape(*lead, -1, num_splits, rows)
    largest = each.max(3, keepdims=True)
    weights = jnp.exp(each - largest)
    total = weights.sum(3)
    shares = (weights / total[:, :, :, None]).reshape(*lead, length).swapaxes(1, 2)[..., None]
    out = (out.astype(jnp.float32) * shares).reshape(B, -1, num_splits, rows, N, D).sum(2)
    return out.reshape(B, -1, N, D), (largest[:, :, :, 0] + jnp.log(total)).reshape(*lead, -1)
