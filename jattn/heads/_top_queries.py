"""Keeps the queries with each head's largest scores over a stream of batches (``TopQueries``)."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, ArrayLike

from jattn._mods.pytree import pytree_dataclass
from jattn._mods.validation import to_int32


@pytree_dataclass
class TopQueries:
    """Each head's ``k`` best queries so far, best first.

    Start with :func:`~jattn.heads.top_queries`; ``update`` adds a batch.

    Attributes:
        score: ``[*,N,k]``, float32; -inf in empty places.
        sequence: ``[*,N,k]``, int32: the index of the sequence over all batches; -1 for none.
        position: ``[*,N,k]``, int32: the query's index in the sequence; -1 for none.
        token: ``[*,N,k]``, int32: the query's token; -1 for none, or if tokens were not given.
        seen: the number of sequences so far, int32.
        undefined: ``[*,N]``, int32: the number of NaN scores so far. NaN never takes a place.

    Example:
        >>> top = jattn.heads.top_queries(1, 2)  # the best query of each of two heads
        >>> first, second = jnp.array([[[0.1, 0.8]]]), jnp.array([[[0.4, 0.2]]])  # scores [B,T,N] of two batches
        >>> top = top.update(first).update(second)
        >>> top.sequence.tolist(), int(top.seen)
        ([[1], [0]], 2)
    """

    score: Array
    sequence: Array
    position: Array
    token: Array
    seen: Array
    undefined: Array

    def update(self, scores: Array, tokens: ArrayLike | None = None) -> "TopQueries":
        """The state after one more batch, in memory that does not grow with the number of batches.

        Ties keep the earlier query.

        Args:
            scores: ``[*,B,T,N]``, such as an lse, or the norms of z. They are compared in float32, so distinct float64
                numbers and, under ``jax.jit``, integers beyond 2^24 may count as equal. Use -inf for padding, which is
                never kept. NaN is counted in ``undefined`` and never kept.
            tokens: integers ``[B,T]``, the tokens of the queries.

        Raises:
            ValueError: scores or tokens have the wrong shape; integer scores are beyond 2^24, or tokens beyond int32.
        """
        *lead, N, k = self.score.shape
        if scores.ndim != len(lead) + 3 or [*scores.shape[:-3], scores.shape[-1]] != [*lead, N]:
            expected = ", ".join([*map(str, lead), "B", "T", str(N)])
            raise ValueError(f"scores must be [{expected}], got {list(scores.shape)}")
        B, T = scores.shape[-3:-1]
        if tokens is not None and jnp.shape(tokens) != (B, T):
            raise ValueError(f"tokens must be [B, T] = [{B}, {T}], like scores, got {list(jnp.shape(tokens))}")
        if np.issubdtype(scores.dtype, np.integer) and not isinstance(scores, Tracer) and scores.size:
            largest = max(abs(int(scores.min())), abs(int(scores.max())))
            if largest > 2**24:
                raise ValueError(
                    f"scores are compared in float32, which holds every integer up to 2^24 = {2**24}, got {largest}; "
                    f"subtract an offset, or pass floating-point numbers if ties do not matter"
                )
        flat = jnp.moveaxis(scores.astype(self.score.dtype), -1, -3).reshape(*lead, N, B * T)
        undefined = self.undefined + jnp.isnan(flat).sum(-1, dtype=jnp.int32)
        flat = jnp.where(jnp.isnan(flat), -jnp.inf, flat)  # top_k would treat it as the largest
        best, index = jax.lax.top_k(flat, min(k, B * T))
        tokens = np.full((B, T), -1) if tokens is None else tokens
        token = jnp.ravel(to_int32("tokens", tokens if isinstance(tokens, jax.Array) else np.asarray(tokens)))
        new = (index // T + self.seen, index % T, token[index]) if B * T else (index, index, index)  # nothing new
        score, order = jax.lax.top_k(jnp.concatenate([self.score, best], -1), k)

        def chosen(old: Array, new: Array) -> Array:  # ties keep the old, so that -inf never replaces an empty place
            return jnp.take_along_axis(jnp.concatenate([old, new], -1), order, -1)

        sequence, position, token = map(chosen, (self.sequence, self.position, self.token), new)
        return TopQueries(score, sequence, position, token, self.seen + B, undefined)


def top_queries(k: int, *heads: int) -> TopQueries:
    """The state before the first batch: ``top_queries(k, N)``, or ``top_queries(k, L, N)`` for all layers at once.

    The inputs with a head's largest scores show what it responds to; averages do not.

    Args:
        k: the number of queries to keep for each head.
        heads: N, with any axes in front, such as L.

    Raises:
        ValueError: ``k`` or a size in ``heads`` is not a positive integer, or ``heads`` is missing.

    Example:
        >>> top = jattn.heads.top_queries(2, 1)  # the two best queries of one head
        >>> scores, tokens = jnp.array([[[0.1], [0.7]], [[0.9], [0.2]]]), np.array([[5, 6], [7, 8]])  # [B,T,N], [B,T]
        >>> top = top.update(scores, tokens)  # and so on for each batch
        >>> top.token.tolist(), top.position.tolist()
        ([[7, 6]], [[0, 1]])
    """
    if not heads or any(not isinstance(size, int) or size < 1 for size in (k, *heads)):
        raise ValueError(f"top_queries needs positive integers, k and the numbers of heads, got {(k, *heads)}")
    none, no_score = jnp.full((*heads, k), -1, jnp.int32), jnp.full((*heads, k), -jnp.inf, jnp.float32)
    return TopQueries(no_score, none, none, none, jnp.zeros((), jnp.int32), jnp.zeros(heads, jnp.int32))
