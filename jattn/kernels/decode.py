"""``"decode"``: few queries against many keys, one chunk of keys at a time, with all heads of a chunk at once.

With few queries, reading keys and values takes most of the time. Each chunk is therefore read once for all heads, and
chunks seen by no query are not read: empty slots of a cache cost nothing. The sums over chunks follow
``jattn._blocks.online_softmax``, and JAX differentiates them chunk by chunk. Supports every call; holds O(S) numbers
and ``[B,N,T,chunk]`` scores.
"""

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import PrecisionLike
from jax.typing import DTypeLike
from jaxtyping import Array

from jattn._blocks.block import product_dtype
from jattn._blocks.plan import block_table
from jattn._core import deferred
from jattn._core.attention import row_maximum, scores_of, visible_pairs
from jattn._core.call import Call, softmax_dtype
from jattn._core.chunk import Chunk, slot_indices
from jattn._core.dropout import drop
from jattn._core.vmap import canonical, over_call
from jattn._mods.arrays import Length
from jattn.kernels.kernel import FEW, PlainKernel

# It pays off with at least this many numbers in the keys per query, and up to this T * K: multiplying all query heads
# by all key heads then costs less than transposing the keys (measured on CPU).
MIN_KEYS, MAX_ROWS = 2**20, 64
CHUNK = 2**20  # numbers in a chunk of keys: the fastest of 2**17 to 2**21 with all 65536 slots full


class Accumulator(NamedTuple):
    """The online softmax's state after some chunks."""

    acc: Array  # [B,T,N,D]
    row_max: Array  # [B,T,N]
    row_sum: Array  # [B,T,N]


@dataclasses.dataclass(frozen=True)
class Decode(PlainKernel):
    """``implementation=``: ``"decode"`` with a custom chunk length, in keys. Derivatives are computed by JAX."""

    name: ClassVar[str] = "decode"
    pays_when: ClassVar[str] = (
        f"faster on CPU for fewer than {FEW} queries, T * K up to {MAX_ROWS}, and {MIN_KEYS} or more numbers in the "
        "keys per query"
    )
    wide_query: ClassVar[bool] = True

    chunk: int | None = None

    def pays(self, call: Call) -> bool:
        (B, T), (S, K, H) = call.query.shape[:2], call.key.shape[1:]
        if not all(isinstance(size, int) for size in (T, S, K, H)):
            return False
        return 0 < T < FEW and K * T <= MAX_ROWS and (B if isinstance(B, int) else 1) * S * K * H >= T * MIN_KEYS

    def refusals(self, call: Call) -> Iterable[tuple[bool, str]]:
        sizes = *call.query.shape[1:], *call.key.shape[1:3], *([] if call.value is None else call.value.shape[3:])
        symbolic = not all(isinstance(size, int) for size in sizes)
        return [(symbolic, "it needs lengths, heads and head dims that are known while tracing")]

    def run(self, call: Call) -> tuple[Array, Array]:
        (B, T, N, _), D = call.query.shape, call.value.shape[3]
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise ValueError(f"chunk must be a positive number of keys, got {self.chunk!r}")
        out = jax.ShapeDtypeStruct((B, T, N, D), call.value.dtype)
        lse = jax.ShapeDtypeStruct((B, T, N), softmax_dtype(call.query))
        return deferred.call(_run, canonical(call), self.chunk, out=(out, lse))


def chunk_length(batch: Length, num_kv_heads: int, head_dim: int) -> int:
    """The number of keys per chunk: a power of two, at least 128; a symbolic batch counts as one sequence."""
    batch = batch if isinstance(batch, int) else 1
    return max(2 ** (CHUNK // max(batch * num_kv_heads * head_dim, 1)).bit_length() // 2, 128)


def _run(platform: str, call: Call, chunk: int | None) -> tuple[Array, Array]:
    products = Products(platform == "cpu" and not call.sharded, product_dtype(platform, call.key), call.precision)
    B, T, N, _ = call.query.shape
    _, S, K, H = call.key.shape
    # Its gradient is summed over chunks before rounding.
    call = dataclasses.replace(call, query=call.query.astype(softmax_dtype(call.query)))
    D, dtype = call.value.shape[-1], softmax_dtype(call.query)
    size = min(chunk or chunk_length(B, K, H), max(S, 1))
    any_visible, all_visible = (x.reshape(x.shape[0], -1) for x in block_table(call, (max(T, 1), size)))
    any_visible, all_visible = any_visible.any(0), all_visible.all(0)
    chunks = np.arange(any_visible.shape[0], dtype=np.int32)
    kinds = any_visible.astype(np.int32) + all_visible.astype(np.int32)  # 0: empty, 1: partial, 2: full
    if isinstance(kinds, np.ndarray):
        chunks, kinds = chunks[kinds > 0], kinds[kinds > 0]

    def visit(state: Accumulator, chunk: Array, masked: bool) -> Accumulator:
        # The last chunk ends at S; keys already in the previous chunk are masked.
        first = jnp.minimum(chunk * size, S - size)
        return _add(state, _slice_keys(call, first, size, chunk * size if masked else None), products)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(state: Accumulator, entry: tuple[Array, Array]) -> tuple[Accumulator, None]:
        chunk, kind = entry
        branches = [lambda x: x, lambda x: visit(x, chunk, True), lambda x: visit(x, chunk, False)]
        return jax.lax.switch(kind, branches, state), None

    # The lowest float instead of -inf, because -inf - -inf is NaN.
    state = Accumulator(
        acc=jnp.zeros((B, T, N, D), dtype),
        row_max=jnp.full((B, T, N), jnp.finfo(dtype).min, dtype),
        row_sum=jnp.zeros((B, T, N), dtype),
    )
    if B * N * T and len(chunks):
        state, _ = jax.lax.scan(body, state, (jnp.asarray(chunks), jnp.asarray(kinds)))
    seen = state.row_sum != 0.0
    row_sum = jnp.where(seen, state.row_sum, 1.0)  # 1 keeps the derivatives of quotient and log finite
    out = (state.acc / row_sum[..., None]).astype(call.value.dtype)
    return out, jnp.where(seen, state.row_max + jnp.log(row_sum), -jnp.inf)


def _slice_keys(call: Call, first: Array, size: int, begin: Array | None) -> Call:
    """The call for the ``size`` keys starting at slot ``first``.

    If ``begin`` is None, every query sees all of them. Otherwise, they are masked, and those before slot ``begin`` are
    hidden.
    """
    columns = Chunk(first, size)
    part = dataclasses.replace(call.take(columns=columns), query_seq_lengths=None)  # also a mask array
    if call.stack is not None:
        of_layer = functools.partial(_slots_of_layer, call.stack.layer, columns)
        part = dataclasses.replace(part, key=of_layer(call.stack.key), value=of_layer(call.stack.value))
    if begin is None:
        return dataclasses.replace(part, masks=(), slot_masks=())
    new = (slot_indices(columns) >= begin)[None, None, None, :]
    return dataclasses.replace(part, slot_masks=(*part.slot_masks, new))


def _slots_of_layer(layer: Any, columns: Chunk, x: Array) -> Array:
    """These slots of one layer of ``[L,B,S,K,...]``."""
    _, B, _, K, H = x.shape
    at = [jnp.asarray(i, jnp.int32) for i in (layer, 0, columns.first, 0, 0)]
    return jax.lax.dynamic_slice(x, at, (1, B, columns.size, K, H))[0]


def _add(state: Accumulator, call: Call, products: "Products") -> Accumulator:
    """The state after another chunk."""
    query, key, value = call.query, call.key, call.value
    dtype, K = softmax_dtype(query), key.shape[2]
    visible = None
    if call.masks or call.slot_masks:

        def visible_of_head(head: Call) -> Array:
            pairs = visible_pairs(head)
            assert pairs is not None  # there are masks
            return jnp.broadcast_to(pairs, head.lengths)

        visible = over_call(visible_of_head, call, out_axes=0)  # [B,N,T,S]
        # Unseen keys, and queries that see nothing, may hold NaN; 0 * NaN is NaN.
        B, N, T, S = visible.shape
        key_seen = visible.reshape(B, K, -1, S).any(2).swapaxes(1, 2)[..., None]
        key, value = (jnp.where(key_seen, x, jnp.zeros((), x.dtype)) for x in (key, value))
        query = jnp.where(visible.any(3).swapaxes(1, 2)[..., None], query, jnp.zeros((), query.dtype))
    raw = products.scores(query, key)

    def one_head(head: Call, raw: Array, *visible: Array) -> tuple[Array, Array, Array]:
        scores = scores_of(raw, visible[0] if visible else None, head)
        row_max = jax.lax.stop_gradient(row_maximum(jax.lax.stop_gradient(scores)))
        exponentials = jnp.exp(scores - row_max[:, None])
        return drop(exponentials, head.dropout, head.indices), row_max, exponentials.sum(1)

    per_head = [raw] if visible is None else [raw, visible]
    exponentials, row_max, row_sum = over_call(one_head, call, out_axes=(0, 1, 1), per_head=per_head)
    new_max = jnp.maximum(state.row_max, row_max)
    rescale, chunk_scale = jnp.exp(state.row_max - new_max), jnp.exp(row_max - new_max)
    acc = products.values(exponentials, value).astype(dtype)
    return Accumulator(
        acc=state.acc * rescale[..., None] + acc * chunk_scale[..., None],
        row_max=new_max,
        row_sum=state.row_sum * rescale + row_sum * chunk_scale,
    )


class Products(NamedTuple):
    """The two products for all heads of a chunk.

    ``together``: multiply every query head by every key head and keep the matching pairs. This reads the keys in their
    own layout, whereas separate products would first transpose the whole chunk. Used on a single CPU device, where all
    heads are local.
    """

    together: bool
    dtype: DTypeLike
    precision: PrecisionLike

    def scores(self, query: Array, key: Array) -> Array:
        """``q k^T`` of every head, ``[B,N,T,S]``."""
        B, T, N, H = query.shape
        _, S, K, _ = key.shape
        product = functools.partial(jnp.einsum, precision=self.precision, preferred_element_type=softmax_dtype(query))
        query, key = (x.astype(self.dtype) for x in (query, key))
        if not self.together:
            raw = product("bskh,btkgh->bkgts", key, query.reshape(B, T, K, N // K, H))
            return raw.reshape(B, N, T, S)
        raw = product("bxh,byh->bxy", key.reshape(B, S * K, H), query.swapaxes(1, 2).reshape(B, N * T, H))
        raw = raw.reshape(B, S, K, K, -1)
        return jnp.stack([raw[:, :, k, k] for k in range(K)], axis=2).reshape(B, S, N, T).transpose(0, 2, 3, 1)

    def values(self, exponentials: Array, value: Array) -> Array:
        """``e v`` of every head, ``[B,T,N,D]``."""
        B, N, T, S = exponentials.shape
        _, _, K, D = value.shape
        product = functools.partial(jnp.einsum, precision=self.precision, preferred_element_type=exponentials.dtype)
        exponentials, value = (x.astype(self.dtype) for x in (exponentials, value))
        if not self.together:
            return product("bkgts,bskd->btkgd", exponentials.reshape(B, K, N // K, T, S), value).reshape(B, T, N, D)
        all_pairs = product("bxs,bsy->bxy", exponentials.reshape(B, N * T, S), value.reshape(B, S, K * D))
        all_pairs = all_pairs.reshape(B, K, N // K, T, K, D)
        return jnp.stack([all_pairs[:, k, :, :, k] for k in range(K)], axis=1).reshape(B, N, T, D).swapaxes(1, 2)
