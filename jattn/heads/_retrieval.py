"""Computes the retrieval score: how much of a text each head copies while a model repeats it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from jattn._mods.validation import to_int32


def retrieval_score(
    weights: Float[Array, "*heads G S"], tokens: ArrayLike, written: ArrayLike, needle: ArrayLike
) -> Float[Array, "*heads"]:
    """The retrieval score: the share of a needle's tokens that each head copies while a model writes them, in [0, 1].

    A head copies a token if its largest weight is on a key of the needle that holds the token being written:
    ``tokens[argmax of weights[g]] == written[g]``, and that key is in ``needle``. Each token counts once, however often
    it occurs in the needle.

    Only the rows of the writing queries are needed. A decoding step from a cache with ``sow_weights=True`` gives one
    row, ``[B,N,1,S]``; a call with the G tokens of an answer gives all rows.

    Args:
        weights: ``[*,G,S]``, such as ``[L,N,G,S]``. Row g belongs to the query that predicts ``written[g]``: the token
            before it.
        tokens: integers ``[S]``, the tokens of the keys; empty slots of a cache may hold any token.
        written: integers ``[G]``, the tokens being written; -1 for a row that does not count.
        needle: bool ``[S]``: which keys belong to the needle.

    Returns:
        ``[*]``, float32; 0 without a needle. Ties go to the first key. A row of zeros, whose query sees nothing, copies
        nothing.

    Raises:
        ValueError: shapes do not match, or ``needle`` is not bool.

    Example:
        >>> tokens = jnp.array([7, 3, 9, 4, 8])  # the needle is 3 9
        >>> needle = jnp.array([False, True, True, False, False])
        >>> copies = jnp.eye(5)[jnp.array([1, 2])]  # two rows: one while 3 is written, one while 9 is
        >>> other = jnp.eye(5)[jnp.array([1, 4])]
        >>> jattn.heads.retrieval_score(jnp.stack([copies, other]), tokens, jnp.array([3, 9]), needle).tolist()
        [1.0, 0.5]

    Source: Wu, Wang, Xiao, Peng and Fu, Retrieval Head Mechanistically Explains Long-Context Factuality,
    https://arxiv.org/abs/2404.15574, section 2.
    """
    integers = lambda name, x: jnp.asarray(to_int32(name, x if isinstance(x, jax.Array) else np.asarray(x)))
    tokens, written = integers("tokens", tokens), integers("written", written)
    needle = jnp.asarray(needle)
    (G, S), shapes = weights.shape[-2:], (tokens.shape, written.shape, needle.shape)
    if shapes != ((S,), (G,), (S,)):
        raise ValueError(
            f"tokens, written and needle must be [S], [G] and [S] = [{S}], [{G}] and [{S}], for weights of shape "
            f"{list(weights.shape)}, got shapes {', '.join(str(list(shape)) for shape in shapes)}"
        )
    if needle.dtype != bool:
        raise ValueError(f"needle must be bool, True for the keys of the needle, got {needle.dtype}")
    # The needle's distinct tokens: each begins a run once all tokens are sorted, the needle's first.
    outside, in_order = jax.lax.sort(((~needle).astype(jnp.int32), tokens), num_keys=2)
    begins = jnp.concatenate([jnp.ones(1, bool), in_order[1:] != in_order[:-1]])[:S]
    size = jnp.maximum(jnp.sum(begins & (outside == 0)), 1).astype(jnp.float32)

    def of_head(weights: Array) -> Array:
        at = jnp.argmax(weights, -1)
        looks = jnp.take_along_axis(weights, at[:, None], 1)[:, 0] > 0.0
        copied = looks & needle[at] & (tokens[at] == written)
        before = copied[None, :] & (written[:, None] == written[None, :]) & jnp.tri(G, k=-1, dtype=bool)
        return jnp.sum(copied & ~before.any(1)).astype(jnp.float32) / size

    return jax.vmap(of_head)(weights.reshape(-1, G, S)).reshape(weights.shape[:-2])
