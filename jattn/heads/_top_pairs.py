"""Finds the largest weights and their keys: for each query (``top_pairs``), and for each head (``of_heads``)."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike

from jattn._core import shard
from jattn._core.arguments import make_call, make_lse
from jattn._core.call import Call, ScoreOptions, softmax_dtype
from jattn.kernels.blockwise import Blockwise
from jattn.masks import MaskFunction

GROUP = 16  # neighbouring keys; at first only the largest weight of each group is compared


class TopPairs(NamedTuple):
    """The ``k`` largest weights of each query, largest first; the result of :func:`~jattn.heads.top_pairs`.

    Attributes:
        weight: ``[B,N,T,k]`` (or ``[N,T,k]``), float32 (or float64); 0 where a query sees fewer keys.
        key: ``[B,N,T,k]`` (or ``[N,T,k]``), int32: the slots of the keys; -1 where a query sees fewer.

    Example:
        >>> weight, key = jnp.array([[[1.0, 0.0], [0.8, 0.2]]]), jnp.array([[[0, -1], [0, 1]]])  # [N,T,k]
        >>> of_head = jattn.heads.TopPairs(weight, key).of_heads()
        >>> [part[0].tolist() for part in of_head[1:]]  # head 0's largest: of queries 0 and 1, both at key 0
        [[0, 1], [0, 0]]
    """

    weight: Array
    key: Array

    def of_heads(self) -> tuple[Array, Array, Array]:
        """The ``k`` largest weights of each head: ``(weight, query, key)``, each ``[B,N,k]`` (or ``[N,k]``).

        Larger weights come first and, among equal weights, earlier queries. If a head has fewer pairs, the remaining
        weights are 0 and the remaining slots -1.
        """
        k = self.weight.shape[-1]
        weight, key = (x.reshape(*x.shape[:-2], -1) for x in self)
        order = jax.lax.top_k(jnp.where(key < 0, -1.0, weight), min(k, key.shape[-1]))[1]
        weight, key = (jnp.take_along_axis(x, order, -1) for x in (weight, key))
        return weight, jnp.where(key < 0, -1, order // k), key


def top_pairs(
    query: ArrayLike,
    key: ArrayLike,
    k: int,
    *,
    lse: ArrayLike | None = None,
    implementation: Blockwise | None = None,
    bias: ArrayLike | None = None,
    mask: ArrayLike | MaskFunction | None = None,
    **options: Unpack[ScoreOptions],
) -> TopPairs:
    """The ``k`` largest weights of each query of each head and their keys, at any length, in O(T k + S) memory.

    The result is exact. Weights are compared by their logarithms, which do not underflow; among equal weights, the
    earlier slot comes first. NaN counts as the largest: all weights of a query that sees a NaN are NaN.

    Args:
        query, key: ``[B,T,N,H]`` and ``[B,S,K,H]``, or without B; floating, of the same dtype.
        k: the number of weights to keep for each query.
        lse: ``[B,T,N]``, from ``dot_product_attention(..., return_residual=True)``; computed if None.
        implementation: a ``jattn.kernels.blockwise.Blockwise``, for your own block sizes.
        bias: floats added to the scores, broadcastable to ``[B,N,T,S]``.
        mask: a bool array (True: visible), a ``jattn.masks.Mask``, or a function ``(b, h, q_idx, kv_idx) -> bool``.
        options: other keywords of ``jattn.attention_weights``, such as ``is_causal`` and ``score_mod``; not ``sinks``.

    Raises:
        ValueError, TypeError: ``k`` is not a positive integer, or an argument has the wrong shape or dtype.

    Example:
        >>> code = 9 * jnp.eye(4)[:, None]  # [T,N,H], one for each position
        >>> top = jattn.heads.top_pairs(jnp.roll(code, 1, 0), code, 2, is_causal=True)
        >>> top.key[0, :, 0].tolist()  # the key that each query looks at most: one token back
        [0, 0, 1, 2]
        >>> weight, query, key = top.of_heads()  # each [N,k]
    """
    if not isinstance(k, int) or k < 1:
        raise ValueError(f"k must be a positive integer, got {k!r}")
    if implementation is not None and not isinstance(implementation, Blockwise):
        raise TypeError(f"implementation must be a jattn.kernels.blockwise.Blockwise, got {implementation!r}")
    call = make_call(query, key, None, bias, mask, **options)
    one_sequence = jnp.ndim(query) == 3
    extra = [] if lse is None else [(make_lse(lse, call, one_sequence), "btn")]

    def fold(call: Call, lse: Array | None = None) -> tuple[Array, Array]:
        shape = call.query.shape[1], k
        init = jnp.full(shape, -jnp.inf, softmax_dtype(call.query)), jnp.full(shape, -1, jnp.int32)
        return (implementation or Blockwise()).fold_weights(call, _keep, init, lse)

    log_weights, slots = shard.on_each_device(fold, call, ("bn", "bn"), *extra)
    weights = jnp.where(log_weights == jnp.inf, jnp.nan, jnp.exp(log_weights))
    top = TopPairs(weights, slots)
    return jax.tree.map(lambda x: x[0], top) if one_sequence else top


def _keep(carry: tuple[Array, Array], log_weights: Array, q_idx: Array, kv_idx: Array) -> tuple[Array, Array]:
    """A step of ``fold_weights``: the ``k`` largest of each row and of this block, with their slots ``[T,k]``."""
    (best, slots), rows = carry, q_idx[:, 0]
    k = best.shape[1]
    log_weights = jnp.where(jnp.isnan(log_weights), jnp.inf, log_weights)
    largest, columns = _largest(log_weights, k)
    # Blocks come in any order, so slots break ties. The -1 of an empty place comes before the slots of hidden keys.
    negated = -jnp.concatenate([best[rows], largest], 1)
    slot = jnp.concatenate([slots[rows], kv_idx[0, columns]], 1)
    negated, slot = jax.lax.sort((negated, slot), num_keys=2)
    return best.at[rows].set(-negated[:, :k]), slots.at[rows].set(slot[:, :k])


def _largest(x: Array, k: int) -> tuple[Array, Array]:
    """The ``k`` largest of each row, or all of a shorter row, and their columns; ties are in the order of columns.

    Only groups of columns with one of the ``k`` largest maxima can hold any of them.
    """
    rows, columns = x.shape
    if columns <= k * GROUP:
        largest, index = jax.lax.top_k(x, min(k, columns))
        return largest, index
    x = jnp.pad(x, ((0, 0), (0, -columns % GROUP)), constant_values=-jnp.inf)
    x = x.reshape(rows, -1, GROUP)
    groups = jnp.sort(jax.lax.top_k(x.max(2), k)[1], 1)
    within = jnp.take_along_axis(x, groups[:, :, None], 1).reshape(rows, k * GROUP)
    largest, index = jax.lax.top_k(within, k)
    return largest, jnp.take_along_axis(groups, index // GROUP, 1) * GROUP + index % GROUP
