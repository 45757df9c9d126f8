"""``"decode"``: few queries that ask many keys, chunk of keys after chunk, all heads of a chunk at once.

With few queries the time is that of reading keys and values, so each chunk is read once, for all heads, and chunks that
no query sees are not read: the slots of a cache that hold nothing yet cost nothing. The sums over chunks are those of
``jattn.blockwise``; here JAX differentiates them, chunk by chunk. Takes every request; beside O(S) it keeps
``[B,N,T,chunk]`` scores.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jattn import staged
from jattn.attention import Head, finish_scores, row_maximum, softmax_dtype, visible_pairs
from jattn.dropout import drop
from jattn.head_blocks import product_dtype
from jattn.kernels.blockwise import block_table
from jattn.kernels.lift import lift, ready
from jattn.kernels.shards import may_be_divided
from jattn.request import Request

CHUNK = 2**20  # numbers in a chunk of keys: of 2**17 to 2**21 the fastest with all of 65536 slots full


class Sums(NamedTuple):
    """What came of the chunks so far."""

    numerator: Array  # [B,T,N,D]
    high: Array  # [B,T,N], the largest score
    total: Array  # [B,T,N]


@dataclasses.dataclass(frozen=True)
class Decode:
    """``implementation=``: as ``"decode"``, with chunks of a length of your own: so many keys."""

    chunk: int | None = None

    def why_not(self, request: Request) -> str | None:
        """None, unless a length is known only when the program runs."""
        lengths = request.query.shape[1], request.key.shape[1]
        if all(isinstance(length, int) for length in lengths):
            return None
        return f"it cuts lengths that are known while tracing into chunks, and these are {lengths}"

    def run(self, request: Request) -> tuple[Array, Array]:
        """``out [B,T,N,D]``, ``lse [B,T,N]``."""
        (B, T, N, _), D = request.query.shape, request.value.shape[3]
        if self.chunk is not None and (not isinstance(self.chunk, int) or self.chunk < 1):
            raise ValueError(f"chunk must be a positive integer, of keys, got {self.chunk!r}")
        out = jax.ShapeDtypeStruct((B, T, N, D), request.value.dtype)
        lse = jax.ShapeDtypeStruct((B, T, N), softmax_dtype(request.query))
        how = self.chunk, may_be_divided(request)
        return staged.call(_run, ready(request), *how, out=(out, lse))


def chunk_length(batch: int, num_kv_heads: int, head_dim: int) -> int:
    """How many keys make a chunk: a power of two, at least 128."""
    return max(2 ** (CHUNK // max(batch * num_kv_heads * head_dim, 1)).bit_length() // 2, 128)


def _run(platform: str, request: Request, chunk: int | None, divided: bool) -> tuple[Array, Array]:
    how = Products(platform == "cpu" and not divided, product_dtype(platform, request.query), request.precision)
    B, T, N, _ = request.query.shape
    _, S, K, H = request.key.shape
    D, dtype = request.value.shape[-1], softmax_dtype(request.query)
    size = min(chunk or chunk_length(B, K, H), max(S, 1))
    may, must = (x.reshape(x.shape[0], -1) for x in block_table(request, (max(T, 1), size)))
    may, must = may.any(0), must.all(0)
    chunks, kinds = np.arange(may.shape[0], dtype=np.int32), may.astype(np.int32) + must.astype(np.int32)
    if isinstance(kinds, np.ndarray):
        chunks, kinds = chunks[kinds > 0], kinds[kinds > 0]

    def visit(sums: Sums, chunk: Any, masked: bool) -> Sums:
        # the last chunk ends at S, and leaves the keys to the one before it that this has had
        first = jnp.minimum(chunk * size, S - size)
        return _add(sums, _cut(request, first, size, chunk * size if masked else None), how)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def body(sums: Sums, entry: tuple[Any, Any]) -> tuple[Sums, None]:
        chunk, kind = entry
        branches = [lambda x: x, lambda x: visit(x, chunk, True), lambda x: visit(x, chunk, False)]
        return jax.lax.switch(kind, branches, sums), None

    # the least float and not -inf, because -inf - -inf is NaN
    sums = Sums(
        numerator=jnp.zeros((B, T, N, D), dtype),
        high=jnp.full((B, T, N), jnp.finfo(dtype).min, dtype),
        total=jnp.zeros((B, T, N), dtype),
    )
    if B * N * T and len(chunks):
        sums, _ = jax.lax.scan(body, sums, (jnp.asarray(chunks), jnp.asarray(kinds)))
    seen = sums.total != 0.0
    total = jnp.where(seen, sums.total, 1.0)  # 1, so that neither the quotient nor the log's derivative is infinite
    out = (sums.numerator / total[..., None]).astype(request.value.dtype)
    return out, jnp.where(seen, sums.high + jnp.log(total), -jnp.inf)


def _cut(request: Request, first: Any, size: int, begin: Any) -> Request:
    """The request for ``size`` keys from slot ``first`` on; with ``begin`` None for those that every query sees, else
    masked, from slot ``begin`` on."""
    cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=first, slice_size=size)
    slots = first + jnp.arange(size, dtype=jnp.int32)

    def pairs(x: Any) -> Any:
        return x if x is None or x.shape[3] == 1 else cut(jnp.asarray(x), axis=3)

    masks: dict[str, Any] = {"masks": (), "slot_masks": ()}
    if begin is not None:
        slot_masks = (*map(pairs, request.slot_masks), (slots >= begin)[None, None, None, :])
        masks = {"masks": request.masks, "slot_masks": slot_masks}
    positions = request.kv_positions
    return dataclasses.replace(
        request,
        key=cut(request.key, axis=1),
        value=cut(request.value, axis=1),
        bias=pairs(request.bias),
        kv_positions=slots[None] if positions is None else cut(jnp.asarray(positions), axis=1),
        query_lengths=None,
        kv_lengths=None,
        **masks,
    )


def _add(sums: Sums, request: Request, products: "Products") -> Sums:
    """The sums with those of one chunk."""
    query, key, value = request.query, request.key, request.value
    dtype, K = softmax_dtype(query), key.shape[2]
    visible = None
    if request.masks or request.slot_masks:

        def sees(q: Array, k: Array, v: Array, head: Head) -> Array:
            pairs = visible_pairs(head, head.where(q, k))
            assert pairs is not None  # there are masks
            return jnp.broadcast_to(pairs, (q.shape[0], k.shape[0]))

        visible = lift(sees, request, out_axes=0)  # [B,N,T,S]
        # keys that nobody sees, and queries that see nothing, may hold NaN, and 0 * NaN is NaN
        B, N, T, S = visible.shape
        by_key = visible.reshape(B, K, -1, S).any(2).swapaxes(1, 2)[..., None]
        key, value = (jnp.where(by_key, x, jnp.zeros((), x.dtype)) for x in (key, value))
        query = jnp.where(visible.any(3).swapaxes(1, 2)[..., None], query, jnp.zeros((), query.dtype))
    raw = products.scores(query, key)

    def one_head(q: Array, k: Array, v: Array, head: Head, raw: Array, *visible: Array) -> tuple[Array, Array, Array]:
        where = head.where(q, k)
        scores = finish_scores(raw, visible[0] if visible else None, head, where, q.shape[-1])
        high = jax.lax.stop_gradient(row_maximum(jax.lax.stop_gradient(scores)))
        exponentials = jnp.exp(scores - high[:, None])
        return drop(exponentials, head.dropout, where), high, exponentials.sum(1)

    per_head = [raw] if visible is None else [raw, visible]
    exponentials, high, total = lift(one_head, request, out_axes=(0, 1, 1), per_head=per_head)
    higher = jnp.maximum(sums.high, high)
    before, here = jnp.exp(sums.high - higher), jnp.exp(high - higher)
    numerator = products.values(exponentials, value).astype(dtype)
    return Sums(
        numerator=sums.numerator * before[..., None] + numerator * here[..., None],
        high=higher,
        total=sums.total * before + total * here,
    )


class Products(NamedTuple):
    """The two products of all heads of a chunk.

    ``together``: every query head with every key head, of which only its own is taken. So the keys are read as they
    lie, where the product of each pair by itself would first turn the whole chunk round. For one CPU, where no other
    device may have some of the heads.
    """

    together: bool
    dtype: Any
    precision: Any

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
        every = product("bxs,bsy->bxy", exponentials.reshape(B, N * T, S), value.reshape(B, S, K * D))
        every = every.reshape(B, K, N // K, T, K, D)
        return jnp.stack([every[:, k, :, :, k] for k in range(K)], axis=1).reshape(B, N, T, D).swapaxes(1, 2)
